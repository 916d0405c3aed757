"""Averages in fixed point against exact rationals."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._exact._grid import (
    average,
    bits_of_a_digit,
    nearest_integers,
    rounding_of_average,
)

LARGEST = [1.0, 0.7, 1e-20, 3e38, 1e-44]


def exact_average(terms):
    return sum(map(Fraction, terms.tolist()), Fraction(0)) / len(terms)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 700])
def test_averages_are_exact_to_two_units(n, dtype):
    with jax.enable_x64(dtype == "float64"):
        generator = np.random.default_rng(n)
        shares = generator.choice([-1, 1], (n, 5)) * generator.choice(
            [1, 0.999999, 0.5, 1e-3, 1e-9], (n, 5)
        )
        terms = (shares * np.minimum(LARGEST, np.finfo(dtype).max)).astype(dtype)
        # Compiled, as releases are: XLA then multiplies by two powers of two at once.
        found = np.asarray(jax.jit(lambda x: average(x, LARGEST))(jnp.asarray(terms)))
    assert found.dtype == dtype
    eps = Fraction(float(np.finfo(dtype).eps))
    for column, largest in enumerate(LARGEST):
        error = abs(Fraction(float(found[column])) - exact_average(terms[:, column]))
        assert error <= Fraction(5, 2) * eps * Fraction(largest) + Fraction(1, 2**113)
        assert abs(found[column]) <= largest or largest == 1e-44


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2**22), ("float64", 2**51)])
def test_integers_are_the_nearest_ones_and_halves_go_to_even(dtype, most):
    rng = np.random.default_rng(0)
    edges = [0.5, 1.5, 2.5, 0.49999997, 0.49999999999999994, 1e-40, 0, most - 0.5, most - 1, most]
    spread = rng.uniform(-1, 1, 10**5) * 2.0 ** rng.integers(-3, most.bit_length(), 10**5)
    with jax.enable_x64(dtype == "float64"):
        numbers = np.concatenate([edges, np.negative(edges), spread]).astype(dtype)
        found = np.asarray(jax.jit(nearest_integers)(jnp.asarray(numbers)))
    assert found.dtype == dtype.replace("float", "int")
    np.testing.assert_array_equal(found, np.rint(numbers).astype(found.dtype))


def test_order_never_counts_and_neighbors_move_by_no_more_than_a_term():
    n = 10**5
    rng = np.random.default_rng(0)
    terms = rng.uniform(0, 1, n).astype("float32")
    neighbor = terms.copy()
    terms[0], neighbor[0] = -1, 1
    mean = jax.jit(lambda x: average(x, 1.0))
    value, other = (float(mean(jnp.asarray(x))) for x in (terms, neighbor))
    permuted = (np.sort(terms), *(rng.permutation(terms) for _ in range(20)))
    assert {float(mean(jnp.asarray(x))) for x in permuted} == {value}
    rounding = float(rounding_of_average(Fraction(1), np.dtype("float32")))
    assert abs(other - value - 2 / n) <= rounding < 2 / n


def test_integers_never_wrap():
    for n in (1, 2, 3, 1000, 2**20, 2**29):
        for dtype, size in (("float32", 31), ("float64", 63)):
            # A digit may round up, to 2^bits.
            bits = bits_of_a_digit(n, dtype)
            assert n * 2**bits < 2**size
            assert bits < jnp.finfo(dtype).nmant
    with pytest.raises(ValueError, match="n must be at most"):
        bits_of_a_digit(2**29 + 1, "float32")
