"""What shows in few outputs: cells that are never drawn, strays off a grid; and false alarms.

Keys are fixed. A bound exceeds the truth with probability at most 5%, the complement of its
confidence, for a fresh key.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from scipy import stats

from dpjax.auditing import _events, audit, audit_curve
from dpjax.auditing._audit import _parts

# Where nothing hangs on it, mechanisms are not compiled: that would take the longest.
REAL = {"value": jnp.asarray(0.0), "neighbor": jnp.asarray(1.0), "jit": False}
COMPILED = {"jit": True}


def test_an_interval_that_is_never_drawn(key):
    """One of 2^7 cells of a unit, on both sides of 0: mass .0036. Its like without it is sound."""

    def mechanism(key, value, emptied=True):
        first, second = jax.random.split(key)
        noise, again = (jnp.floor(1024 * jax.random.laplace(k)) for k in (first, second))
        inside = (jnp.abs(noise) >= 98 * 8) & (jnp.abs(noise) < 99 * 8)
        return (1024 * value + jnp.where(inside & emptied, again, noise)).astype(jnp.int32)

    result = audit(key, mechanism, **REAL)
    # Drawn again, the noise falls there once in 280 times.
    assert 2 < result.epsilon <= math.log(280) + 1
    assert result.probability < 0.004
    sound = audit(key, lambda key, value: mechanism(key, value, False), **REAL)
    assert 0.9 < sound.epsilon <= 1.0


def rarely(naive, sound, share=2.0**-10):
    """Naive noise in some draws, and sound noise on a grid of 2^-10 in the others."""

    def mechanism(key, value):
        first, second, third = jax.random.split(key, 3)
        on_grid = sound(second, value).astype(jnp.float32) / 1024
        return jnp.where(jax.random.bernoulli(first, share), naive(third, value), on_grid)

    return mechanism


@pytest.mark.slow
def test_noise_in_floats_in_one_of_1024_draws(key, naive, rounded):
    mechanism = rarely(naive(jax.random.laplace), rounded(jax.random.laplace))
    result = audit(key, mechanism, samples=400_000, **REAL | COMPILED)
    assert result.epsilon > 1.5
    assert result.probability < 2.0**-10
    assert result.off_grid == 0  # Nothing was stated.


def test_outputs_off_the_stated_grid_are_counted(key, naive, rounded):
    mechanism = rarely(naive(jax.random.laplace), rounded(jax.random.laplace))
    mechanism.grids = lambda value: 2.0**-10
    result = audit(key, mechanism, samples=40_000, **REAL | COMPILED)
    # One in 2^10 of the 40,000 outputs that bound events: 39, beyond these once in 10^6 keys.
    assert 10 <= result.off_grid <= 130
    assert f"{result.off_grid} outputs are not multiples of 2^-10" in str(result)
    mechanism.grids = lambda value: 2.0**-100
    result = audit(key, mechanism, samples=2_000, **REAL | COMPILED)
    assert (result.off_grid, result.grid) == (0, "multiples of 2^-100")


# Bounds that hold.


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1_000, 10_000])
def test_bounds_from_rare_events_keep_their_confidence(key, rounded, samples):
    """Thousands of fine intervals to be misled by; 60 bounds, a false alarm in a million runs."""
    mechanism = rounded(jax.random.laplace)
    results = audit_curve(key, mechanism, samples=(samples,) * 60, confidence=0.8, **REAL)
    assert sum(result.epsilon > 1 for result in results) <= stats.binom.isf(1e-6, 60, 0.2)


def test_the_error_is_shared():
    for count in (1, 2, 3):
        assert sum(_parts(count)) == pytest.approx(1, abs=1e-15)
        assert min(_parts(count)) > 0


def test_limits_have_no_more_than_the_error(key, rounded, monkeypatch):
    """Two for each of two events."""
    taken = []

    def recorded(limit):
        def with_error(hits, trials, error):
            taken.append(error)
            return limit(hits, trials, error)

        return with_error

    for name in ("clopper_pearson_lower", "clopper_pearson_upper"):
        monkeypatch.setattr(_events, name, recorded(getattr(_events, name)))
    audit(key, rounded(jax.random.laplace), samples=2_000, confidence=0.9, **REAL)
    # Limits on fresh outputs come last, after those of the choice.
    assert sum(taken[-4:]) == pytest.approx(0.1, rel=1e-12)
