"""Additive noise of any kind: what is added, to what, and what the density says about it.

Statistical tests: a fixed key, and a false alarm once in 10^6 keys each.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax._core._pytree import changed
from dpjax.mechanisms import additive
from dpjax.random import GAUSSIAN, LAPLACE

FALSE_ALARM = 1e-6
DRAWS = 100_000

MECHANISMS = {
    "laplace": (dpjax.laplace(0.5, 0.25), stats.laplace),
    "gaussian": (dpjax.gaussian(0.5, 0.25, 1e-5), stats.norm),
    "own": (
        additive(0.5, 0.25, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e),
        stats.laplace,
    ),
}
each_mechanism = pytest.mark.parametrize(
    ("mechanism", "distribution"), MECHANISMS.values(), ids=MECHANISMS
)
# Where it is compiled anew; its noise is that of Laplace's mechanism.
slow = pytest.mark.slow
each_noise = pytest.mark.parametrize(
    ("mechanism", "distribution"),
    [
        pytest.param(*row, id=name, marks=[slow] * (name == "own"))
        for name, row in MECHANISMS.items()
    ],
)


# One's own mechanism.


def weighted(difference):
    """A norm of one's own: seconds count double."""
    return jnp.abs(difference["minutes"]) + 2 * jnp.abs(difference["seconds"])


def test_a_multiplier_for_three_coordinates_releases_no_other_number(key):
    """Five coordinates would have the noise of three. Keys, shapes and dtypes alone decide."""
    mechanism = additive(
        0.5, 0.25, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e, dims=3
    )
    assert mechanism(key, jnp.zeros(3)).value.shape == (3,)
    for wrong in (jnp.zeros(5), jnp.zeros(2), 0.0, {"a": jnp.zeros(2), "b": jnp.zeros(2)}):
        for release in (mechanism, jax.jit(mechanism), mechanism.unpaid_draw):
            with pytest.raises(ValueError, match="value must have dims=3 coordinates"):
                release(key, wrong)
    with pytest.raises(ValueError, match="value must have dims=3 coordinates"):
        mechanism.error(shape=(5,))
    with pytest.raises(ValueError, match="dims must be"):
        additive(0.5, 0.25, norm="linf", noise=LAPLACE, dims=0)


def test_mechanism_of_ones_own_is_sampled_released_and_guaranteed(key):
    def target(database):
        return {"minutes": jnp.mean(database), "seconds": jnp.mean(database) / 60}

    sensitivity = dpjax.sample_sensitivity(
        key, target, lambda key, n: jax.random.uniform(key, (n,)), n=20, norm=weighted, m=500
    )
    assert 0.8 * (1 + 2 / 60) / 20 < sensitivity.value < (1 + 2 / 60) / 20 + 1e-6
    mechanism = additive(sensitivity, 0.5, norm=weighted, noise=LAPLACE)
    assert mechanism.scale == sensitivity.value / 0.5
    release = dpjax.privatize(target, mechanism)(key, np.linspace(0, 1, 20))
    assert set(release.value) == {"minutes", "seconds"}
    assert (release.guarantee.epsilon, release.guarantee.delta) == (0.5, 0.0)
    assert release.guarantee.gamma == sensitivity.gamma > 0
    with pytest.raises(ValueError, match="norm weighted"):
        additive(dpjax.assume_sensitivity(1.0, norm="l1"), 1.0, norm=weighted, noise=LAPLACE)


def test_multiplier_makes_the_scale_of_epsilon_and_delta():
    def multiplier(epsilon, delta):
        return 3.0 * delta / epsilon

    made = additive(2.0, 0.5, norm="l1", noise=LAPLACE, delta=0.1, multiplier=multiplier)
    assert made.scale == pytest.approx(1.2)
    assert made.guarantee.delta == 0.1


def test_overflowing_scale_is_refused():
    with pytest.raises(ValueError, match="epsilon=1e-200 is too small"):
        dpjax.laplace(1e200, 1e-200)


# The noise.


@each_noise
def test_noise_has_the_stated_distribution_and_scale(mechanism, distribution, draws):
    noise = (draws(mechanism, jnp.asarray(7.0), DRAWS) - 7.0) / mechanism.scale

    def p_value(scale):
        return stats.kstest(noise, distribution(scale=scale).cdf, method="asymp").pvalue

    assert p_value(1.0) > FALSE_ALARM
    # The power of the test: noise 10% lower or higher than stated would not pass.
    assert p_value(1 / 0.9) < FALSE_ALARM
    assert p_value(0.9) < FALSE_ALARM


@each_noise
def test_noise_is_proportional_to_the_sensitivity_and_never_zero(mechanism, distribution, key):
    value = jnp.zeros(1000)
    doubled = changed(mechanism, scale=2 * mechanism.scale)
    noise = mechanism(key, value).value
    # Rounded to the grid, on which there are fewer noises than noises drawn.
    grid = mechanism.grid_for((1000,))
    np.testing.assert_allclose(doubled(key, value).value, 2 * noise, rtol=5e-4, atol=4 * grid)
    assert len(set(noise.tolist())) > 990
    assert float(mechanism.effective_scale((1000,))) >= mechanism.scale


def test_leaves_and_entries_of_a_pytree_get_independent_noise(draws):
    value = {"a": jnp.zeros(2), "b": (jnp.asarray(0.0), jnp.asarray([0.0]))}
    mechanism = dpjax.gaussian(1.0, 1.0, 1e-5)
    noise = draws(mechanism, value, DRAWS)
    columns = np.column_stack([leaf.reshape(DRAWS, -1) for leaf in jax.tree.leaves(noise)])
    correlation = np.corrcoef(columns.T)
    # Six pairs, each a normal deviate of 1 / sqrt(DRAWS).
    threshold = stats.norm.isf(FALSE_ALARM / 12) / np.sqrt(DRAWS)
    assert np.all(np.abs(correlation - np.eye(4)) < threshold)
    assert stats.kstest(columns[:, 3] / mechanism.scale, "norm").pvalue > FALSE_ALARM


def test_keys_decide_the_noise_and_nothing_else(keys):
    mechanism = dpjax.laplace(1.0, 1.0)
    first, again, other = (mechanism(keys(i), jnp.zeros(4)).value for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)


# Dtypes.


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(x, marks=slow) for x in ("float32", "float16"))]
)
def test_float_dtype_is_kept(dtype, key):
    released = dpjax.laplace(1.0, 1.0)(key, jnp.zeros(3, dtype)).value
    assert released.dtype == dtype
    assert np.all(np.isfinite(released.astype("float32")))


@pytest.mark.parametrize(
    "dtype", ["uint32", *(pytest.param(x, marks=slow) for x in ("bool", "int8"))]
)
def test_integers_are_released_as_int32(dtype, key):
    assert dpjax.gaussian(1.0, 1.0, 1e-5)(key, jnp.ones(3, dtype)).value.dtype == "int32"


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bit_dtypes_are_kept_under_x64(dtype, key, x64):
    value = jnp.full(3, 2**40, dtype)
    released = dpjax.laplace(1.0, 1.0)(key, value).value
    assert released.dtype == dtype
    assert np.all(np.abs(np.asarray(released) - 2.0**40) < 100)
    if dtype == "float64":
        assert np.any(np.asarray(released) != np.asarray(released).astype("float32"))


def test_python_and_numpy_numbers_are_values(key):
    mechanism = dpjax.laplace(1.0, 1.0)
    released = mechanism(key, 2.5).value
    assert (
        released == mechanism(key, np.float64(2.5)).value == mechanism(key, jnp.float32(2.5)).value
    )
    assert mechanism(key, 2).value == mechanism(key, np.int64(2)).value


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 2**62, -(2**62)])
def test_large_integers_are_clamped_and_do_not_wrap(value, key):
    released = dpjax.laplace(2.0**20, 1.0)(key, np.full(1000, value)).value
    assert np.all(np.sign(released) == np.sign(value))
    assert np.all(np.abs(np.asarray(released, np.int64)) <= 2**31 - 2)
    assert len(np.unique(released)) > 100


@pytest.mark.parametrize("value", [2**31, 2**63 - 1, 2**63, 2**64, -(2**70)])
def test_python_integer_of_any_size_is_released(value, key):
    # Whether a count fits 64 bits is a fact about the private database.
    mechanism = dpjax.laplace(1.0, 1.0)
    bound = 2**31 - 1 if value > 0 else -(2**31)
    assert mechanism(key, value).value == mechanism(key, bound).value


@pytest.mark.slow
def test_large_noise_on_integers_does_not_wrap(draws):
    released = draws(dpjax.laplace(1e12, 1.0), 0, 1000)
    assert np.all(np.abs(released.astype(np.int64)) <= 2**31 - 2)
    assert 400 < np.sum(released > 0) < 600


# What log_prob says.


@each_mechanism
def test_density_integrates_to_one(mechanism, distribution, log_probs):
    grid = np.linspace(-60, 60, 400_001) * mechanism.scale + 3.0
    density = np.exp(log_probs(mechanism, grid, 3.0))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=2e-4)
    exact = distribution.pdf(grid, loc=3.0, scale=mechanism.scale)
    np.testing.assert_allclose(density, exact, rtol=1e-3, atol=1e-5 / mechanism.scale)


@each_mechanism
@pytest.mark.parametrize("center", [0, 5, 2**24 + 1, -(2**28) - 1])
def test_probabilities_of_integers_sum_to_one(mechanism, distribution, center, log_probs):
    outputs = center + np.arange(-3000, 3001, dtype=np.int32)
    probabilities = np.exp(log_probs(mechanism, outputs, center))
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    edges = np.arange(-3000, 3002) - 0.5
    exact = np.diff(distribution.cdf(edges, scale=mechanism.scale))
    np.testing.assert_allclose(probabilities, exact, rtol=1e-4, atol=1e-9)


def test_integers_at_both_ends_are_far_apart(log_probs):
    """Their difference does not fit an int32: it must not wrap into a small one."""
    mechanism = dpjax.laplace(1e8, 1.0)
    ends = [2**31 - 2, -(2**31) + 2]
    far, near = (log_probs(mechanism, np.array([end], "int32"), ends[0])[0] for end in ends[::-1])
    assert far - near == pytest.approx((ends[1] - ends[0]) / 1e8, rel=1e-3)


def test_integer_draws_follow_their_probabilities(draws, log_probs):
    mechanism = dpjax.laplace(1.0, 1.0)
    released = draws(mechanism, 4, DRAWS)
    support = np.arange(-1, 10, dtype=np.int32)
    counts = np.array([np.sum(released == y) for y in support])

    def p_value(pmf):
        observed, expected = (np.append(x, 1 - x.sum()) for x in (counts / DRAWS, pmf))
        return stats.chisquare(DRAWS * observed, DRAWS * expected).pvalue

    assert p_value(np.exp(log_probs(mechanism, support, 4))) > FALSE_ALARM
    edges = np.arange(-1, 11) - 4.5
    assert p_value(np.diff(stats.laplace(scale=1 / 0.9).cdf(edges))) < FALSE_ALARM


@each_noise
def test_log_prob_sums_over_coordinates_and_leaves(mechanism, distribution, key):
    value = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.asarray(0.5)}
    output = mechanism(key, value).value
    log_prob = jax.jit(mechanism.log_prob)
    pairs = [
        (output["a"][0], value["a"][0]),
        (output["a"][1], value["a"][1]),
        (output["b"], value["b"]),
    ]
    total = float(log_prob(output, value))
    assert total == pytest.approx(sum(float(log_prob(y, x)) for y, x in pairs), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("laplace", (0.5, 0.0, 0.0)),
        ("laplace", (0.2, -0.1, 0.2)),
        ("laplace", (-0.25, 0.25, 0.0)),
        ("own", (0.5, -0.5, 0.5)),
    ],
)
def test_loss_on_a_neighbor_at_the_sensitivity_is_at_most_epsilon(name, shift, key, log_probs):
    mechanism, _ = MECHANISMS[name]
    value = np.array([1.0, 0.0, -1.0])
    outputs = value + 20 * np.asarray(jax.random.normal(key, (20_000, 3)))
    loss = log_probs(mechanism, outputs, value) - log_probs(mechanism, outputs, value + shift)
    assert np.abs(loss).max() <= mechanism.epsilon + 1e-5
    assert np.abs(loss).max() > 0.9 * mechanism.epsilon


@pytest.mark.parametrize("shift", [1, -1])
def test_loss_of_integers_is_at_most_epsilon(shift, log_probs):
    mechanism = dpjax.laplace(1.0, 0.7)
    outputs = np.arange(-40, 41, dtype=np.int32)
    loss = log_probs(mechanism, outputs, 0) - log_probs(mechanism, outputs, shift)
    assert np.abs(loss).max() == pytest.approx(0.7, abs=1e-4)


# Error bars.


@each_mechanism
def test_error_is_the_quantile_of_the_noise_and_a_step(mechanism, distribution):
    for probability in (0.01, 0.5, 0.95, 0.999):
        quantile = mechanism.error(confidence=probability)
        exact = distribution(scale=mechanism.scale).ppf((1 + probability) / 2)
        assert exact + mechanism.grid <= quantile <= exact * (1 + 6e-5) + mechanism.grid


@pytest.mark.slow
def test_simultaneous_error_covers_all_coordinates(draws):
    mechanism = dpjax.laplace(0.5, 0.25)
    bound = mechanism.error(confidence=0.9, shape=(5, 4), simultaneous=True)
    covered = np.max(np.abs(draws(mechanism, jnp.zeros((5, 4)), 20_000)), axis=(1, 2)) <= bound
    spread = stats.norm.isf(FALSE_ALARM / 2) * np.sqrt(0.09 / 20_000)
    assert abs(covered.mean() - 0.9) < spread
    assert bound > mechanism.error(confidence=0.9)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, float("nan")])
def test_error_refuses_what_is_no_confidence(probability):
    with pytest.raises(ValueError, match="confidence"):
        dpjax.laplace(1.0, 1.0).error(confidence=probability)


def test_values_that_are_not_real_arrays_are_refused(key):
    mechanism = dpjax.laplace(1.0, 1.0)
    for value in (1j, "text", jnp.mean, key):
        with pytest.raises(TypeError, match="value"):
            mechanism(key, value)
    for value in (None, (), jnp.zeros((0, 2))):
        with pytest.raises(ValueError, match="value"):
            mechanism(key, value)


def test_zero_sensitivity_by_name_gives_the_value_and_says_so(key):
    zero = dpjax.assume_sensitivity(0.0, norm="l1", allow_zero=True)
    release = dpjax.laplace(zero, 1.0)(key, jnp.asarray([1.5, 2.5]))
    assert release.value.tolist() == [1.5, 2.5]
    assert "no noise" in repr(release.guarantee)


def test_noise_is_compared_by_what_it_is():
    assert dataclasses.replace(LAPLACE) == LAPLACE


# The grid: one for all leaves, because every leaf is charged for the rounding of all.


@pytest.mark.parametrize(
    ("sensitivity", "epsilon", "dtypes"),
    [
        (47 * (1 + 1e-13), 2.7, {"float64": 47, "int64": 1}),
        (2.0**-100, 2.0**-5, {"float32": 8192, "float64": 1}),
        (1.0, 1.0, {"bfloat16": 3, "float32": 5, "int32": 2, "float64": 4}),
    ],
)
def test_leaves_of_mixed_dtypes_are_charged_for_one_grid(sensitivity, epsilon, dtypes, x64):
    mechanism = dpjax.laplace(sensitivity, epsilon)
    value = [jax.ShapeDtypeStruct((size,), dtype) for dtype, size in dtypes.items()]
    calibration = mechanism._calibration(value)
    loss, worst = Fraction(0), Fraction(0)
    for leaf in value:
        fit = calibration.fit(LAPLACE.lattice, leaf.dtype)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        grid = Fraction(2) ** int(fit.exponent) if floating else Fraction(1)
        points = int(fit.divisor) << int(fit.shift)
        scale = Fraction(LAPLACE.lattice.resolution) * grid / points
        worst = max(worst, Fraction(sensitivity) / scale)
        loss += leaf.size * grid / scale if floating else 0
    assert worst + loss <= Fraction(epsilon)


@pytest.mark.parametrize("sensitivity", [2e-31, 1e-30, 1e-20, 1e20, 1e30])
def test_extreme_scales_keep_their_charge_small(sensitivity):
    mechanism = dpjax.laplace(sensitivity, 1.0)
    for size in (1, 1000, 10**6):
        effective = mechanism.effective_scale((size,))
        assert effective >= mechanism.scale
        if sensitivity > 1e-25:
            assert effective <= 1.01 * mechanism.scale


def test_where_the_grid_is_coarse_the_scale_says_so(key):
    mechanism = dpjax.laplace(1e-36, 1e-7)
    assert mechanism.effective_scale((1000,)) > 1000 * mechanism.scale
    assert np.all(np.isfinite(mechanism(key, jnp.zeros(1000, "float32")).value))


def test_norm_of_ones_own_works_inside_jit(key):
    def total(difference):
        return jnp.sum(jnp.abs(difference))

    mechanism = additive(1.0, 1.0, norm=total, noise=LAPLACE)
    released = jax.jit(lambda key, x: mechanism(key, x).value)(key, jnp.zeros(3))
    np.testing.assert_array_equal(released, dpjax.laplace(1.0, 1.0)(key, jnp.zeros(3)).value)
    with pytest.raises(ValueError, match="homogeneous"):
        additive(1.0, 1.0, norm="hamming", noise=LAPLACE)


def test_gaussian_noise_needs_a_delta():
    with pytest.raises(ValueError, match="delta must be strictly between 0 and 1"):
        additive(1.0, 1.0, norm="l2", noise=GAUSSIAN)


def test_event_of_noise_in_another_norm_is_not_that_of_the_noise():
    other = additive(1.0, 1.0, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e)
    assert other.dp_event.noise_multiplier < 1  # The dominating event: not 3, which is too cheap.


def test_without_noise_there_is_no_grid():
    zero = dpjax.assume_sensitivity(0.0, norm="l1", allow_zero=True)
    mechanism = dpjax.laplace(zero, 1.0)
    assert (mechanism.grid, mechanism.effective_scale(), mechanism.error(confidence=0.9)) == (
        0,
        0,
        0,
    )
