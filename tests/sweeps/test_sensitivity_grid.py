"""All operating points of one sample, and what a choice among them costs."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

GAMMAS, CONFIDENCES = (0.2, 0.05, 0.01), (0.9, 0.99, None)


@pytest.fixture(scope="module")
def distances():
    return jax.random.exponential(jax.random.key(0), (400,))


def test_every_point_is_that_of_the_sampler(distances):
    found = dpjax.sensitivity_grid(
        distances,
        gammas=GAMMAS,
        methods=("exact", "dkw"),
        confidences=CONFIDENCES,
        choices=1,
    )
    assert found.sizes == {"operating_method": 2, "confidence": 3, "gamma": 3}
    points = 0
    for gamma, confidence in itertools.product(GAMMAS, CONFIDENCES):
        label = "marginal" if confidence is None else repr(confidence)
        for method in ("exact", "dkw"):
            one = found.sel(gamma=gamma, confidence=label, operating_method=method)
            settings = {"method": method, "confidence": confidence}
            try:
                point = dpjax.operating_point(m=400, gamma=gamma, **settings)
            except ValueError:  # Too few pairs, or no statement of this method.
                assert one.k == 0
                assert np.isnan(one.sensitivity)
                continue
            points += 1
            assert one.k == point.k
            assert one.sensitivity == dpjax.order_statistic(distances, point.k)
    assert points == 9


def test_all_order_statistics_at_once_are_those_one_by_one():
    distances = jnp.array([3.0, jnp.nan, 0.5, -1.0, 0.5, jnp.inf, 2.0, -0.0] * 10)
    gammas = np.linspace(0.05, 0.95, 30)
    found = dpjax.sensitivity_grid(distances, gammas=gammas, choices=1, confidences=[None])
    expected = [dpjax.order_statistic(distances, int(k)) for k in found.k.values.ravel()]
    np.testing.assert_array_equal(found.sensitivity.values.ravel(), expected)
    assert len(set(found.k.values.ravel().tolist())) == 30


def test_a_choice_is_paid_for(distances):
    """Each of J points at 1 - (1 - C)/J, never less."""
    for choices in (1, 2, 3, 10):
        found = dpjax.sensitivity_grid(
            distances, gammas=[0.2], confidences=[0.9, 0.99], choices=choices
        )
        for taken, confidence in zip(found.confidence_taken.values, (0.9, 0.99), strict=True):
            assert choices * (1 - Fraction(taken)) <= 1 - Fraction(confidence)
            point = dpjax.operating_point(m=400, gamma=0.2, confidence=float(taken))
            assert found.k.sel(gamma=0.2, confidence=repr(confidence)).item() == point.k
    assert found.attrs["choices"] == 10


# Picks the gamma whose estimate looks best beside what its quantile would be: 4000 samples of 300
# uniform distances. All of J = 12 points hold together with probability C or more; a false alarm
# has probability below 10^-6 at 5 standard errors.
MANY, M, CONFIDENCE = 4000, 300, 0.9
PICKED_FROM = np.linspace(0.04, 0.4, 12)


def misses(choices):
    samples = np.sort(np.random.default_rng(0).uniform(size=(MANY, M)), axis=1)
    k = dpjax.sensitivity_grid(
        samples[0].astype(np.float32), gammas=PICKED_FROM, confidences=[CONFIDENCE], choices=choices
    ).k.values.ravel()
    # Of uniform distances Phi(x) = x: the worst one is what an unlucky user picks.
    covered = samples[:, k - 1] >= 1 - PICKED_FROM[None]
    return 1 - covered.all(axis=1).mean(), 1 - covered.mean(axis=0)


def test_the_correction_covers_a_choice_after_looking():
    margin = 5 * np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / MANY)
    of_any, of_each = misses(choices=len(PICKED_FROM))
    assert of_any <= 1 - CONFIDENCE + margin
    # Power: without it each point holds by itself, and a choice breaks the promise.
    of_any, of_each = misses(choices=1)
    assert (of_each <= 1 - CONFIDENCE + margin).all()
    assert of_any > 1.5 * (1 - CONFIDENCE)


@pytest.mark.parametrize("marginal", [{"methods": ("dkw",)}, {"confidences": (0.99, None)}])
def test_marginal_statements_survive_no_choice(distances, marginal):
    with pytest.raises(ValueError, match="Marginal statements do not hold simultaneously"):
        dpjax.sensitivity_grid(distances, gammas=[0.1], choices=2, **marginal)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"choices": 0}, ValueError, "choices must be"),
        ({"gammas": []}, ValueError, "gamma must have distinct values, at least one"),
        ({"gammas": [0.1, 0.1]}, ValueError, "gamma must have distinct values"),
        ({"gammas": [1.5]}, ValueError, "gammas must be"),
        ({"confidences": [1.0]}, ValueError, "confidences must be"),
        ({"distances": jnp.ones((2, 2))}, ValueError, r"distances must have shape \(m,\)"),
        ({"distances": jnp.ones(3, int)}, TypeError, "distances must be floats"),
    ],
)
def test_bad_parameters_are_named(distances, changed, error, message):
    settings = {"distances": distances, "gammas": [0.1], "choices": 1, **changed}
    with pytest.raises(error, match=message):
        dpjax.sensitivity_grid(settings.pop("distances"), **settings)


def test_choices_are_never_assumed(distances):
    with pytest.raises(TypeError, match="choices"):
        dpjax.sensitivity_grid(distances, gammas=[0.1])
