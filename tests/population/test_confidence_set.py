"""Confidence sets: exact at every size by exchangeability, and their search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import queries
from dpjax._exact._numerics import clopper_pearson_upper
from dpjax.population._search import Search, margins, p_value, upper_p_values
from tables import for_each

N = 20
PRIVATE = dpjax.privatize(jnp.mean, dpjax.laplace(1 / N, epsilon=1.0))


def located(key, theta, n):
    return theta + jax.random.uniform(key, (n,))


def pool(kind, size=40):
    rng = np.random.default_rng(20230523)
    one, two = rng.normal(size=(size, 1)), rng.normal(size=(size, 2))
    return {
        "a number": one,
        "ties": rng.integers(0, 4, (size, 1)).astype(float),
        "one value": np.ones((size, 1)),
        "NaN and infinities": np.where(one > 1, np.nan, np.where(one < -1, np.inf, one)),
        "two numbers": two,
        "a line": np.concatenate([two[:, :1], 3 * two[:, :1]], axis=1),
        "an outlier": np.concatenate([two, two**9 * 1e20], axis=1),
        "counts": rng.integers(0, 3, (size, 3)).astype(float),
    }[kind]


KINDS = (
    *("a number", "ties", "one value", "NaN and infinities"),
    *("two numbers", "a line", "an outlier", "counts"),
)


P_VALUES = jax.jit(jax.vmap(p_value))
MARGINS = jax.jit(jax.vmap(margins))


def turns(kind):
    """Each point in turn as the observed one, and the others."""
    points = jnp.asarray(pool(kind), jnp.float32)
    each = [(points[i], jnp.delete(points, i, axis=0)) for i in range(len(points))]
    observed, others = (jnp.stack(x) for x in zip(*each, strict=True))
    return observed, others


@for_each("kind", KINDS)
def test_at_most_a_share_alpha_of_points_has_a_p_value_of_alpha(kind):
    """This is all that coverage needs, for every alpha."""
    observed, others = turns(kind)
    size = len(observed)
    ordered = np.sort(np.round(np.asarray(P_VALUES(observed, others)) * size).astype(int))
    assert (ordered >= np.arange(1, size + 1)).all()
    if kind == "two numbers":  # And no larger than it must be.
        assert (ordered == np.arange(1, size + 1)).all()
    if kind == "a number":
        assert (ordered == 2 * np.repeat(np.arange(1, size // 2 + 1), 2)).all()


@for_each("kind", KINDS)
def test_the_bound_of_a_p_value_is_not_below_it(kind):
    """Also for observed points farther out. Two numbers: it is less than .05 above."""
    observed, others = turns(kind)
    k = observed.shape[1]
    for factor in (1.0, 3.0, 30.0):
        given = observed * factor
        exact, found = (np.asarray(f(given, others)) for f in (P_VALUES, MARGINS))
        assert np.isfinite(found[..., : k if k > 1 else None]).all()
        bound = upper_p_values(found, found, k)
        if kind not in ("a line", "an outlier"):  # In float32 their covariances are not exact.
            assert (bound >= exact - 1e-6).all()
        if kind == "two numbers":
            assert np.mean(bound - exact) < 0.05


def test_the_least_central_points_have_the_smallest_p_values():
    line = jnp.linspace(0, 1, 99)[:, None]
    near, far = p_value(jnp.array([0.5]), line), p_value(jnp.array([1.01]), line)
    assert (near, far) == (1.0, pytest.approx(0.02))
    plane = jax.random.normal(jax.random.key(0), (99, 2)) * jnp.array([[1.0, 1e3]])
    near, far = p_value(jnp.array([0.1, 0.0]), plane), p_value(jnp.array([0.0, 1e4]), plane)
    assert near > 0.9
    assert far == pytest.approx(0.01)


@pytest.fixture(scope="module")
def found(keys):
    return dpjax.confidence_set(
        keys(1), jnp.float32(1.5), PRIVATE, model=located, n=N, bounds=(-2.0, 4.0)
    )


def test_the_ends_of_a_location_are_order_statistics(found):
    """Simulated releases are theta + e_r, so the set is where e_(5) < 1.5 - theta < e_(195)."""
    simulation, key = found._simulation, found._key

    def simulated(seed):
        of_database, of_noise = jax.random.split(jax.random.fold_in(key, seed))
        database = located(dpjax.random._keys.sampling_key(of_database), 0.0, N)
        return PRIVATE.mechanism.unpaid_draw(of_noise, jnp.mean(database))

    errors = np.sort(jax.vmap(simulated)(jnp.arange(simulation.seeds)))
    low, high = found.interval()
    # 5 are left out on either side: theta is out if 1.5 is beyond the fifth from an end.
    assert low == pytest.approx(1.5 - errors[194], abs=1e-3)
    assert high == pytest.approx(1.5 - errors[4], abs=1e-3)
    # The outer ends of brackets: neither belongs, and what lies within does.
    assert not found.contains(low)
    assert not found.contains(high)
    assert found.contains(low + 1e-3)
    assert found.contains(high - 1e-3)
    assert "theta in [" in repr(found)


def test_p_values_are_multiples_of_one_over_seeds_and_one(found):
    p_values = found.searched()[1]
    np.testing.assert_allclose(p_values * 200, np.round(p_values * 200), atol=1e-9)
    assert 0 < p_values.min() < 0.02
    assert p_values.max() > 0.9


def test_another_release_has_the_set_that_it_has_alone(found, keys):
    """Also after the search for the first one."""
    found.interval()
    again = found.given(keys(9), jnp.float32(0.7))
    alone = dpjax.confidence_set(
        keys(9), jnp.float32(0.7), PRIVATE, model=located, n=N, bounds=(-2.0, 4.0)
    )
    assert again.interval() == alone.interval() != found.interval()
    with pytest.raises(ValueError, match="release must be like"):
        found.given(keys(9), jnp.zeros(2))


def test_a_set_covers_the_truth_and_leaves_out_others(found, keys):
    """600 runs, at a false-alarm rate of 1e-6: the upper limit of coverage must reach .95."""
    simulation = dataclasses.replace(found._simulation, seeds=39)

    def covers(key, theta):
        of_set, of_data, of_noise = jax.random.split(key, 3)
        data = jax.random.uniform(dpjax.random._keys.sampling_key(of_data), (N,))
        released = PRIVATE.mechanism.unpaid_draw(of_noise, jnp.mean(data))
        return simulation.p_value(of_set, theta, released[None])[0] > 0.05

    runs = jax.jit(jax.vmap(covers, (0, None)))
    covered = np.sum(runs(jax.random.split(keys(2), 600), 0.0))
    assert clopper_pearson_upper(covered, 600, 1e-6) >= 0.95
    assert covered < 600
    # Power: the spread of releases is about .1, so .5 is far away.
    assert np.sum(runs(jax.random.split(keys(3), 600), 0.5)) < 30


def test_nuisance_parameters_have_the_largest_p_value(keys):
    def model(key, theta, n):
        return theta["mean"] + theta["sd"] * jax.random.normal(key, (n,))

    both = [
        functools.partial(
            queries.private_variance, lower=-4.0, upper=4.0, epsilon=4.0, missing="lower"
        ),
        dpjax.privatize(lambda x: jnp.mean(jnp.clip(x, -4, 4)), dpjax.laplace(8 / 200, 4.0)),
    ]
    data = model(jax.random.key(5), {"mean": 0.5, "sd": 1.0}, 200)
    released = [private(keys(i), data) for i, private in enumerate(both)]
    found = dpjax.confidence_set(
        keys(9),
        released,
        both,
        model=model,
        n=200,
        bounds=({"mean": -2.0, "sd": 0.1}, {"mean": 2.0, "sd": 3.0}),
        seeds=39,
    )
    truth = {"mean": 0.5, "sd": 1.0}
    assert found.contains(truth)
    assert found.p_value({"mean": 0.5, "sd": None}) >= found.p_value(truth)
    assert not found.contains({"mean": 1.5, "sd": None})
    low, high = found.interval()
    for name, value in truth.items():
        assert low[name] < value < high[name]
        assert high[name] - low[name] < 1.5
    assert "mean in [" in repr(found)


def world(statistic, observed, *, spread=0.01, seeds=39):
    """Evaluates points whose simulated releases are a statistic of theta plus fixed errors."""
    errors = spread * np.random.default_rng(0).normal(size=(seeds, len(observed)))
    both = jax.jit(jax.vmap(lambda x: (p_value(observed, x), margins(observed, x))))

    def evaluate(points):
        whole = np.resize(points, (-(-len(points) // 64) * 64, points.shape[1]))
        simulated = np.array([statistic(point) for point in whole])[:, None] + errors
        p_values, found = both(jnp.asarray(simulated, jnp.float32))
        p_values = np.round(np.asarray(p_values, np.float64) * (seeds + 1)) / (seeds + 1)
        return p_values[: len(points)], np.asarray(found)[: len(points)]

    return evaluate, errors


def test_an_interval_contains_parts_of_the_set_between_the_first_points():
    """Two parts of width 1 / 4,000, far from each other: |500 theta - 150| is near 100."""
    evaluate, errors = world(lambda x: [abs(500 * x[0] - 150)], jnp.array([100.0]), spread=0.04)
    low, high = Search(evaluate, 0.05, 1).ends()
    # One error of 39 is left out on each side.
    reach = 100 - np.sort(errors[:, 0])[[-1, 0]]
    assert low[0] == pytest.approx((150 - reach[1]) / 500, abs=1e-5)
    assert high[0] == pytest.approx((150 + reach[1]) / 500, abs=1e-5)
    assert low[0] <= (150 - reach[1]) / 500
    assert high[0] >= (150 + reach[1]) / 500


def test_an_interval_contains_a_set_at_a_peak_between_two_points():
    """A parabola reaches the observed number between two points where it has equal values."""
    peak = 20.5 / 64
    evaluate, _ = world(lambda x: [-((200 * (x[0] - peak)) ** 2)], jnp.array([0.0]), spread=0.04)
    around = evaluate(np.array([[20 / 64], [21 / 64], [peak]]))[0]
    assert around[0] <= 0.05
    assert around[1] <= 0.05
    assert around[2] > 0.05
    low, high = Search(evaluate, 0.05, 1).ends()
    assert low[0] < peak < high[0]
    assert high[0] - low[0] < 0.01


def test_a_cell_whose_lengths_cannot_be_computed_is_kept():
    """The lengths of simulated releases are infinite if their covariance has no root."""

    def evaluate(points):
        margins = np.concatenate([np.zeros(2), np.full(39, np.inf)])
        return np.full(len(points), 1 / 40), np.tile(margins, (len(points), 1))

    low, high = Search(evaluate, 0.05, 1, 2).ends()
    assert (low[0], high[0]) == (0, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_are_collinear_exclude_no_parameter(sign):
    """Their p-values exceeded `upper_p_values` of their own margins, by rounding of float32."""
    numbers = jnp.stack([jax.random.normal(jax.random.key(i), (200, 1)) for i in range(24)])
    points = jnp.concatenate([numbers, sign * numbers], axis=2)
    found = np.asarray(MARGINS(points[:, 0], points[:, 1:]))
    expected = jax.jit(jax.vmap(p_value))(points[:, 0], points[:, 1:])
    assert np.all(upper_p_values(found, found, 2) >= expected)


def test_an_interval_of_two_parameters_contains_the_set_and_little_more():
    """Against a fine sample: two ellipses of radius .02, at opposite places."""
    truth = np.array([0.15, 0.1])

    def statistic(x):  # The same for a point and for its mirror image.
        x = x - 0.5
        return [x[0] * x[1], x[0] ** 2 - x[1] ** 2]

    evaluate, _ = world(statistic, jnp.array(statistic(0.5 + truth), jnp.float32), spread=0.003)
    low, high = Search(evaluate, 0.05, 2, 2).ends()
    rng = np.random.default_rng(1)
    near = 0.5 + truth + rng.uniform(-0.06, 0.06, (4000, 2))
    inside = near[evaluate(near)[0] > 0.05]
    assert len(inside) > 300
    both = np.concatenate([inside, 1 - inside])
    assert (low <= both.min(axis=0)).all()
    assert (high >= both.max(axis=0)).all()
    # The bound of a p-value adds a few percent of each part at 39 seeds.
    slack = 0.2 * np.ptp(inside, axis=0)
    assert (both.min(axis=0) - low < slack).all()
    assert (high - both.max(axis=0) < slack).all()


def test_the_largest_p_value_is_not_missed():
    """It is 1 at a point between the first points; around it, p-values are at their least."""
    evaluate, _ = world(lambda x: [500 * x[0]], jnp.array([101.0]))
    assert Search(evaluate, 0.05, 1).largest() == 1.0
    evaluate, _ = world(lambda x: [x[0]], jnp.array([2.0]))
    assert Search(evaluate, 0.05, 1).largest() == 0.05


def test_an_empty_set_says_so():
    evaluate, _ = world(lambda x: [x[0]], jnp.array([2.0]))
    assert np.isnan(Search(evaluate, 0.05, 1).ends()).all()


def test_a_model_that_does_not_fit_is_told(keys):
    found = dpjax.confidence_set(
        keys(1),
        jnp.float32(9.0),
        PRIVATE,
        model=located,
        n=N,
        bounds=(-2.0, 4.0),
        seeds=19,
        confidence=0.9,
    )
    with pytest.raises(ValueError, match="no parameters within the bounds belong"):
        found.interval()


GOOD = {"model": located, "n": N, "bounds": (0.0, 1.0)}
REFUSED = {
    "few seeds": ({"seeds": 19, "confidence": 0.99}, ValueError, "seeds must be at least 99"),
    "bounds of one end": ({"bounds": 3.0}, ValueError, "bounds must be"),
    "bounds in reverse": ({"bounds": (1.0, 0.0)}, ValueError, "bounds must be"),
    "infinite bounds": ({"bounds": (0.0, np.inf)}, ValueError, "bounds must be"),
    "bounds of two shapes": ({"bounds": (np.zeros(2), np.ones(3))}, ValueError, "one structure"),
    "no model": ({"model": 3}, TypeError, "model must be a function"),
    "no statistic": ({"statistic": 3}, TypeError, "statistic must be a function"),
}


@for_each("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name, keys):
    changed, kind, told = REFUSED[name]
    with pytest.raises(kind, match=told):
        dpjax.confidence_set(keys(1), jnp.float32(0.5), PRIVATE, **(GOOD | changed))


def test_keys_releases_and_parameters_of_another_kind_are_refused(found, keys):
    with pytest.raises(TypeError, match="chacha20"):
        dpjax.confidence_set(jax.random.key(0), jnp.float32(0.5), PRIVATE, **GOOD)
    with pytest.raises(ValueError, match="release must be like"):
        dpjax.confidence_set(keys(1), jnp.zeros(2), PRIVATE, **GOOD)
    with pytest.raises(ValueError, match="theta must be like the bounds"):
        found.p_value({"mean": 0.5})
    many = dpjax.confidence_set(
        keys(1),
        jnp.float32(0.5),
        PRIVATE,
        model=lambda key, theta, n: located(key, jnp.sum(theta), n),
        n=N,
        bounds=(np.zeros(7), np.ones(7)),
    )
    with pytest.raises(ValueError, match="at most 6 parameters, got 7"):
        many.interval()
