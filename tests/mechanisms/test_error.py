"""`error(confidence=)` is true of what is released: noise and rounding together, at any confidence.

What else reaches it: floats whose grid is as coarse as the noise (a large epsilon), integers, whose
error is an integer, pytrees with a bound for each array, and records that are rounded before.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax

FALSE_ALARM = 1e-6
COUNT = 2**14
CONFIDENCES = (0.2, 0.5, 0.95, 0.999)


def far_from(released, truth):
    """The distance of each draw from the truth, per coordinate, in float64."""
    return np.abs(np.asarray(released, float) - np.asarray(truth, float))


def assert_keeps(distances, bound, confidence):
    """Too many draws beyond the bound are a false alarm once in a million."""
    misses = int(np.sum(distances > bound))
    assert misses <= stats.binom.isf(FALSE_ALARM, distances.size, 1 - confidence)


COARSE = dpjax.laplace(1.0, 1e5)  # Its grid is as wide as the scale of its noise.


@pytest.mark.parametrize("value", [0.0, 0.3, 0.49999])
def test_rounding_to_the_grid_is_covered(value, draws):
    value = jnp.float32(value * COARSE.grid)
    distances = far_from(draws(COARSE, value, COUNT), value)
    for confidence in CONFIDENCES:
        assert_keeps(distances, COARSE.error(confidence=confidence), confidence)
    # Power: at some confidence the quantile of the noise alone is exceeded too often.
    tails = np.linspace(0.05, 0.95, 19)
    noise = -COARSE.effective_scale() * np.log(tails)
    missed = np.mean(distances[:, None] > noise, axis=0)
    assert np.max(missed - tails) > 0.05


@pytest.mark.parametrize("epsilon", [0.3, 5.0])
@pytest.mark.parametrize("make", [dpjax.laplace, lambda s, e: dpjax.gaussian(s, e, 1e-2)])
def test_integers_are_off_by_integers(make, epsilon, draws):
    mechanism, value = make(1.0, epsilon), jnp.asarray(7)
    distances = far_from(draws(mechanism, value, COUNT), 7)
    for confidence in CONFIDENCES:
        bound = mechanism.error(confidence=confidence, like=value)
        assert bound == round(bound)
        assert_keeps(distances, bound, confidence)
        # Power: one less is too little, where the noise is not much narrower than an integer.
        if bound > 0 and confidence < 0.99:
            assert np.mean(distances > bound - 1) > 1 - confidence


def test_every_array_of_a_tree_has_its_bound(draws):
    mechanism = dpjax.laplace(1.0, 0.5)
    value = {"a": jnp.linspace(0, 1, 3), "b": jnp.arange(4), "c": jnp.asarray(2.5)}
    released = draws(mechanism, value, COUNT)
    for confidence in CONFIDENCES:
        each = mechanism.error(confidence=confidence, like=value)
        together = mechanism.error(confidence=confidence, like=value, simultaneous=True)
        kept = np.ones(COUNT, bool)
        for name, truth in value.items():
            distances = far_from(released[name], truth).reshape(COUNT, -1)
            kept &= np.all(distances <= together[name], axis=1)
            for coordinate in distances.T:
                assert_keeps(coordinate, each[name], confidence)
        assert_keeps(~kept, 0, confidence)
    # Power: the bounds of single coordinates do not hold for all of them at once.
    assert np.mean(kept) >= 0.99
    off = [far_from(released[x], value[x]).reshape(COUNT, -1) <= each[x] for x in value]
    assert np.mean(np.all(np.concatenate(off, axis=1), axis=1)) < np.mean(kept)


def test_shaped_noise_keeps_a_bound_for_each_coordinate(draws):
    from mechanism_table import SHAPE

    bound = dpjax.assume_sensitivity(1.0, norm=SHAPE)
    mechanism, value = dpjax.shaped_gaussian(bound, 1e4, 1e-2), jnp.asarray([0.123456, -0.7])
    distances = far_from(draws(mechanism, value, COUNT), value)
    for confidence in CONFIDENCES:
        bounds = np.asarray(mechanism.error(confidence=confidence))
        for coordinate, bound in zip(distances.T, bounds, strict=True):
            assert_keeps(coordinate, bound, confidence)


RECORDS = jnp.linspace(0.0, 100.0, 51) + 0.123


def test_a_smooth_quantile_keeps_the_bound_of_all_databases(draws):
    mechanism = dpjax.smooth_quantile(1e3, 1e-2, lower=0.0, upper=100.0)
    distances = far_from(draws(mechanism, RECORDS, COUNT), np.clip(RECORDS, 0, 100)[25])
    for confidence in CONFIDENCES:
        assert_keeps(distances, mechanism.error(confidence=confidence), confidence)


@pytest.mark.parametrize("probability", [0.5, (0.25, 0.75)])
def test_an_answer_that_passes_the_test_keeps_its_bound(probability, draws):
    """With an epsilon at which rounding to the grid is a good part of the error."""
    mechanism = dpjax.propose_test_release(
        5e3, 1e-2, bound=10.0, lower=0.0, upper=100.0, probability=probability
    )
    released = draws(mechanism, RECORDS, COUNT)
    kept = np.clip(RECORDS, 0, 100)
    truth = kept[25] if probability == 0.5 else kept[38] - kept[12]
    assert np.all(np.asarray(released.answered) == 1)
    distances = far_from(released.value, truth)
    for confidence in CONFIDENCES:
        assert_keeps(distances, mechanism.error(confidence=confidence), confidence)


@pytest.mark.parametrize(
    ("mechanism", "record"),
    [
        (dpjax.smooth_quantile(30.0, 1e-2, lower=1e6, upper=1e6 + 1), 1e6),
        (dpjax.propose_test_release(50.0, 1e-2, bound=1e-3, lower=1e3, upper=1e3 + 1), 1000.5),
    ],
    ids=["smooth quantile", "propose-test-release"],
)
def test_rounding_to_floats_far_from_0_is_covered(mechanism, record, draws):
    """Where neighboring floats are further apart than the grid is."""
    released = draws(mechanism, jnp.full(101, record, jnp.float32), COUNT)
    distances = far_from(getattr(released, "value", released), record)
    for confidence in CONFIDENCES:
        assert_keeps(distances, mechanism.error(confidence=confidence), confidence)


def test_gaps_and_margins_cover_the_grid():
    """Scores and answers are rounded before they are compared."""
    selection, comparison = (
        dpjax.exponential(1.0, 1e5),
        dpjax.above_threshold(1.0, 1e5, threshold=0),
    )
    gap = selection.score_gap(confidence=0.9, like=jnp.zeros(2), simultaneous=True)
    assert gap >= selection.effective_scale((2,)) * np.log(20) + selection.grid_for((2,))
    noise = comparison._noise()
    alone = noise.threshold.scale * np.log(20) + noise.numbers.scale * np.log(20)
    assert comparison.margin(confidence=0.9) >= alone + 2 * 2.0 ** int(noise.numbers.exponent)


def test_a_bound_of_integer_scores_is_an_integer():
    gap = dpjax.exponential(1.0, 0.7).score_gap(like=jnp.zeros(5, int), simultaneous=True)
    assert gap == np.floor(
        dpjax.exponential(1.0, 0.7).effective_scale(like=jnp.zeros(5, int)) * np.log(100)
    )


def test_a_traced_epsilon_has_bounds_too():
    def bounds(epsilon):
        mechanism = dpjax.laplace(1.0, epsilon)
        return mechanism.error(), mechanism.error(like=jnp.zeros((), int))

    floats, integers = jax.vmap(bounds)(jnp.asarray([0.5, 1.0, 0.0]))
    assert floats[0] == pytest.approx(dpjax.laplace(1.0, 0.5).error(), rel=1e-3)
    assert integers[:2].tolist() == [6.0, 3.0]
    assert np.isnan(floats[2])
    assert np.isnan(integers[2])
