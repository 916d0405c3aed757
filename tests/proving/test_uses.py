"""Two uses of one number may be rounded in two ways, and lemmas that read it twice count that.

XLA computes x in every loop that uses it. In x = y c + d one loop rounds the product, and another
one fuses it with the sum. So two uses of x are as far apart as y c is off. That may be far more
than the rounding of x. Every lemma with two uses has a case here; medians and places have one use.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.proving import _prove_sensitivity

# The product of a number and SCALE is rounded to a multiple of 2^-3, and is off by OFF.
SCALE, OFF = 1.1 * 2.0**20, 2.0**-4
BOUNDS = (1.0, 1.0 + 2.0**-21)


def from_large(x, start=0.0):
    """Numbers of [start, start + .55], up to rounding."""
    return x * SCALE + (start - SCALE)


def bound(target, shape, norm="l1", bounds=BOUNDS, dtype=np.float32):
    spec = jax.ShapeDtypeStruct(shape, dtype)
    return dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm).value


def test_the_weights_of_a_mean_are_used_in_two_sums():
    """One sum also uses the product, so that it stays rounded there. The other one fuses it."""
    with jax.enable_x64(True):
        n, scale = 1000, 1e9

        def target(x):
            large = x * scale
            weights = large + (1 - scale)
            return (weights * large).sum() / weights.sum()

        found = bound(target, (n,), bounds=(1.0, 1 + 0.5 / scale), dtype=np.float64)
        numbers = 1 + np.arange(0, 2_000_000, 10_007) * 2.0**-52
        first = np.repeat(numbers[:, None], n, 1)
        second = first.copy()
        second[:, 0] = 1.0
        run = jax.jit(target)
        reached = max(
            abs(float(run(a)) - float(run(b))) for a, b in zip(first, second, strict=True)
        )
        assert reached <= found
        assert found >= 0.1  # Seen: .112. With one value for both uses, the bound would be .0013.


def test_a_norm_and_what_is_divided_by_it_are_two_uses():
    def clipped(x):
        rows = from_large(x)
        return rows / jnp.maximum(jnp.sqrt((rows**2).sum(1, keepdims=True)), 0.25)

    assert bound(clipped, (10, 4), "l2") >= 2 * (1 + OFF * np.sqrt(4) / 0.25)


@pytest.mark.parametrize("start", [0, 100])
def test_a_mean_and_a_mean_of_squares_are_two_uses(start):
    """Both squares of the mean are off by 2 M times what the uses are apart, on both databases."""

    def variance(x):
        rows = from_large(x, start)
        return (rows**2).mean(0) - rows.mean(0) ** 2

    one_use = (0.55 + 8 * OFF) ** 2 * 9 / 100 + 1e-5 * (start + 1) ** 2
    assert bound(variance, (10,)) >= one_use + 2 * OFF * 2 * start


LEMMAS = {
    "two passes": lambda x: jnp.var(x, axis=0),
    "covariance": lambda x: jnp.cov(x, rowvar=False),
    "softmax": lambda x: jax.nn.softmax(x, axis=1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=1),
    "layer norm": lambda x: (
        (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-3)
    ),
}


@pytest.mark.parametrize("name", LEMMAS)
def test_lemmas_count_what_uses_are_apart(name, monkeypatch):
    """The same program, with records whose uses are alike or apart."""

    target, found = LEMMAS[name], {}
    clamped = _prove_sensitivity._clamped
    for apart in (0.0, 0.01):
        monkeypatch.setattr(
            _prove_sensitivity,
            "_clamped",
            lambda *xs, a=apart: dataclasses.replace(clamped(*xs), apart=a),
        )
        found[apart] = bound(target, (10, 3), "linf", (0, 1))
    assert found[0.01] > found[0.0] * (1 + 1e-6)


def test_both_factors_of_a_scatter_are_uses(monkeypatch):
    """Rows of 0 and 1, whose second use is .01 larger where the first one is 1."""
    clamped = _prove_sensitivity._clamped
    exact = bound(LEMMAS["covariance"], (10, 3), "linf", (0, 1))
    monkeypatch.setattr(
        _prove_sensitivity, "_clamped", lambda *xs: dataclasses.replace(clamped(*xs), apart=0.01)
    )
    assert bound(LEMMAS["covariance"], (10, 3), "linf", (0, 1)) >= exact + 2 * 0.01 * 0.5
