"""Where values and releases are clamped, and what `log_prob` says there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax


def test_outputs_at_the_ends_of_integers_have_the_mass_beyond(log_probs):
    end = 2**31 - 2
    mechanism = dpjax.laplace(1.0, 0.1)
    for value in (end, end - 3, 2**31 - 1):
        outputs = end - np.arange(1000, dtype=np.int32)
        for sign in (1, -1):
            probabilities = np.exp(log_probs(mechanism, sign * outputs, sign * value))
            assert probabilities.sum() == pytest.approx(1, abs=1e-4)
    # P(Z >= 2.5), not the mass of one integer; and what is beyond is no release.
    assert probabilities[0] > 0.4
    assert log_probs(mechanism, np.array([2**31 - 1, -(2**31)]), end).tolist() == [-np.inf] * 2


def test_outputs_at_the_ends_of_floats_have_the_mass_beyond():
    end = float(jnp.finfo("float16").max)
    mechanism, value = dpjax.laplace(1000.0, 1.0), jnp.asarray(65000.0, "float16")
    at_end = mechanism.log_prob(jnp.asarray(end, "float16"), value)
    exact = stats.laplace(scale=mechanism.effective_scale()).logsf(end - float(value))
    assert float(at_end) == pytest.approx(exact, rel=1e-3)
    assert mechanism.log_prob(jnp.asarray(np.inf, "float16"), value) == -np.inf


@pytest.mark.parametrize("value", [1e12, 1e30, -np.inf])
def test_density_of_what_was_drawn_knows_the_clamp(value, key):
    """Under 2^61 steps of the grid, 1e12 was released as 1.7e10, and scored -1e15."""
    mechanism = dpjax.laplace(1e-3, 1.0)
    x = jnp.full(1000, value, "float32")
    mean = float(mechanism.log_prob(mechanism(key, x).value, x)) / 1000
    # Between the density at the mode and what five scales take off; 1e12 is far from its floats.
    assert -np.log(2e-3) - 5 < mean <= -np.log(2e-3)


# The range: what is released without being clamped.


def test_range_is_where_values_are_not_clamped(key):
    mechanism = dpjax.laplace(1e-6, 1.0)
    low, high = mechanism.range((3,))
    assert low == -high
    assert high == 2.0**93 * mechanism.grid_for((3,)) > 1e15
    inside, outside = (jnp.asarray([0.0, x * high, -x * high]) for x in (0.5, 2.0))
    np.testing.assert_allclose(mechanism(key, inside).value[1:], inside[1:], rtol=1e-6)
    np.testing.assert_allclose(mechanism(key, outside).value[1:], [high, low], rtol=1e-6)
    np.testing.assert_array_equal(mechanism.clamped(outside), [0.0, high, low])
    strange = jnp.asarray([np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(mechanism.clamped(strange), [0.0, high, low])
    # Where the range is wider than the dtype, there is nothing to clamp.
    assert dpjax.laplace(1e30, 1.0).range()[1] == float(jnp.finfo("float32").max)
    assert dpjax.laplace(1.0, 1.0).range(dtype="float16")[1] == 65504


def test_range_of_integers_is_that_of_their_release(x64):
    mechanism = dpjax.laplace(1.0, 1.0)
    for dtype, bits in (("int8", 31), ("int32", 31), ("uint32", 31), ("int64", 63)):
        assert mechanism.range((), dtype) == (2 - 2**bits, 2**bits - 2)


@pytest.mark.parametrize("epsilon", [1e-3, 1.0])
def test_range_covers_what_float64_resolves(epsilon, x64):
    """The sampler refuses an estimate below 8 units in the last place of the value."""
    for size in (1, 1000, 10**6):
        assert dpjax.laplace(1.0, epsilon).range((size,))[1] > 2.0**52
        assert dpjax.gaussian(1.0, epsilon, 1e-6).range((size,))[1] > 2.0**52


def test_range_under_traced_epsilons():
    low, high = jax.jit(lambda epsilon: dpjax.laplace(1.0, epsilon).range())(1.0)
    assert (low, high) == dpjax.laplace(1.0, 1.0).range()


@pytest.mark.slow
def test_large_integers_of_64_bits_do_not_wrap(key, x64):
    mechanism, end = dpjax.laplace(2.0**40, 1.0), 2**63 - 2
    for value in (2**63 - 1, -(2**63), 2**62):
        released = np.asarray(mechanism(key, np.full(1000, value)).value)
        assert np.all(np.sign(released) == np.sign(value))
        assert np.all((released >= -end) & (released <= end))
        assert len(np.unique(released)) > 400
    far = dpjax.laplace(2.0**30, 1.0).log_prob(jnp.asarray(-end), jnp.asarray(end))
    assert float(far) == pytest.approx(-(2.0**34), rel=1e-3)
