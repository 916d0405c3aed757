"""Claims as assertions: those that hold pass, those that do not are refuted by name.

At the default confidence a claim that holds is refuted once in a million runs.
"""

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax.auditing import verify

# Where nothing hangs on it, mechanisms are not compiled: that would take the longest.
BIT = {"value": jnp.asarray(0), "neighbor": jnp.asarray(1), "jit": False}
REAL = {"value": jnp.asarray(0.0), "neighbor": jnp.asarray(1.0), "jit": False}
COMPILED = {"jit": True}
SCORES = {"value": jnp.asarray([2.0, 1.0, 0.0]), "neighbor": jnp.asarray([1.0, 2.0, 1.0])}
ANSWERS = {"value": jnp.asarray([2]), "neighbor": jnp.asarray([0])}

SOUND = {
    "laplace": (
        dpjax.laplace(1.0, 1.0),
        {"value": jnp.asarray(0.3), "neighbor": jnp.asarray(1.3)},
    ),
}
MORE = {
    "gaussian": (dpjax.gaussian(1.0, 1.0, 0.01), REAL | COMPILED),
    "exponential": (dpjax.exponential(1.0, 1.0), SCORES),
    "laplace, integers": (dpjax.laplace(1.0, 1.0), BIT | COMPILED),
    "permute-and-flip": (dpjax.permute_and_flip(1.0, 1.0), SCORES),
    "randomized response": (dpjax.randomized_response(1.0, categories=3), ANSWERS),
}


@pytest.mark.parametrize("name", [*SOUND, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE)])
def test_claims_that_hold_pass(release_key, name):
    mechanism, pair = (SOUND | MORE)[name]
    result = verify(release_key, mechanism, **pair)
    assert 0.5 < result.epsilon <= 1.0
    assert result.claimed == 1.0
    assert result.off_grid == 0
    # Where the mechanism adds noise to its value, it states a grid.
    assert bool(result.grid) == ("laplace" in name or "gaussian" in name)


def test_claims_about_functions(key, flip, discrete_laplace, rounded):
    assert verify(key, flip(1.0), epsilon=1.0, **BIT).epsilon > 0.9
    assert verify(key, discrete_laplace(1.0), epsilon=1.0, **BIT).epsilon > 0.9
    assert verify(key, rounded(jax.random.laplace), epsilon=1.0, **REAL).epsilon > 0.85


@pytest.mark.parametrize("seed", range(3))
def test_a_scale_ten_percent_low_is_refuted(seed, discrete_laplace):
    """Epsilon is 1/.9; the bound stays below 1 once in 10,000 runs."""
    with pytest.raises(AssertionError, match="claims epsilon 1, delta 0; the auditor refutes"):
        verify(jax.random.key(seed), discrete_laplace(0.9), epsilon=1.0, **BIT)


def test_half_the_sensitivity_is_refuted(key, rounded, promising):
    half = promising(rounded(jax.random.laplace, 0.5), 1.0, 0.0)
    message = r"claims epsilon 1, delta 0; .* refutes it: epsilon is at least 1\.[89]"
    with pytest.raises(AssertionError, match=message):
        verify(key, half, **REAL)


def test_naive_noise_is_refuted_by_its_bits(key, naive):
    with pytest.raises(AssertionError, match="lowest set bit"):
        verify(key, naive(jax.random.laplace), epsilon=1.0, samples=40_000, **REAL | COMPILED)


class Stating:
    """A mechanism of dpjax, all but some of whose outputs are left to another one."""

    def __init__(self, mechanism, other, share):
        self.mechanism, self.other, self.share = mechanism, other, share
        self.guarantee, self.grids = mechanism.guarantee, mechanism.grids

    def __call__(self, key, value):
        first, second, third = jax.random.split(key, 3)
        other = self.other(second, value)
        usual = self.mechanism(third, value).value
        return jnp.where(jax.random.bernoulli(first, self.share), other, usual)


def test_an_output_off_the_stated_grid_is_refuted(release_key, naive):
    """One in 2^10 of 20,000, of each value 10,000: missed by 1 key in 3 * 10^8."""
    rare = Stating(dpjax.laplace(1.0, 1.0), naive(jax.random.laplace), 2.0**-10)
    with pytest.raises(AssertionError, match=r"claims that its outputs are multiples of 2\^-17"):
        verify(release_key, rare, samples=20_000, **REAL | COMPILED)


@pytest.mark.parametrize("strange", [jnp.nan, jnp.inf])
def test_strange_values_count_as_what_they_become(release_key, strange):
    mechanism = dpjax.laplace(1.0, 1.0)
    value = jnp.asarray(strange)
    near = mechanism.clamped(value)
    assert verify(release_key, mechanism, value=value, neighbor=near, samples=2_000).epsilon == 0
    with pytest.raises(ValueError, match="distance 2"):
        verify(release_key, mechanism, value=jnp.asarray(jnp.nan), neighbor=jnp.asarray(2.0))


def test_publishing_that_a_value_was_nan_is_refuted(key, rounded, promising):
    def mechanism(key, value):
        usual = rounded(jax.random.laplace)(key, jnp.nan_to_num(value))
        return jnp.where(jnp.isnan(value), usual | 1, usual)

    pair = {"value": jnp.asarray(jnp.nan), "neighbor": jnp.asarray(0.0), "jit": False}
    with pytest.raises(AssertionError, match="refutes"):
        verify(key, promising(mechanism, 0.1, 0.0), samples=10_000, **pair)


def test_no_noise_is_refuted(key):
    with pytest.raises(AssertionError, match="claims epsilon 5"):
        verify(key, lambda key, value: value, epsilon=5.0, samples=10_000, **REAL)


def test_a_missing_exp_is_refuted_on_searched_pairs(key):
    def without_the_exp(key, scores):
        return jax.random.categorical(key, jnp.log(scores))

    harmless = jnp.asarray([50.0, 60.0]), jnp.asarray([50.0, 61.0])
    zero = jnp.asarray([0.0, 3.0]), jnp.asarray([1.0, 3.0])
    assert verify(key, without_the_exp, pairs=[harmless], epsilon=1.0, jit=False).epsilon < 0.1
    with pytest.raises(AssertionError, match="refutes"):
        verify(key, without_the_exp, pairs=[harmless, zero], epsilon=1.0, jit=False)


def test_a_delta_is_part_of_the_claim(key):
    """Gives the value away once in 50 times."""

    def mechanism(key, bit):
        return jnp.where(jax.random.bernoulli(key, 0.02), bit, -1)

    assert verify(key, mechanism, epsilon=0.1, delta=0.02, **BIT).delta == 0.02
    with pytest.raises(AssertionError, match=r"claims epsilon 0.1, delta 0.01"):
        verify(key, mechanism, epsilon=0.1, delta=0.01, **BIT)


def test_a_mechanism_claims_nothing_beyond_its_sensitivity(release_key):
    mechanism = dpjax.randomized_response(1.0)
    far = {"value": jnp.asarray([0, 0]), "neighbor": jnp.asarray([1, 1])}
    with pytest.raises(ValueError, match="distance 2"):
        verify(release_key, mechanism, **far)
    with pytest.raises(ValueError, match="distance 2"):
        verify(release_key, mechanism, pairs=[tuple(far.values())])


def test_a_claim_is_needed(key, flip):
    with pytest.raises(TypeError, match="epsilon must be given"):
        verify(key, flip(1.0), **BIT)
    with pytest.raises(TypeError, match="delta must be given together with epsilon"):
        verify(key, flip(1.0), delta=0.1, **BIT)
    with pytest.raises(ValueError, match="epsilon"):
        verify(key, flip(1.0), epsilon=-1.0, **BIT)
