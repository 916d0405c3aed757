"""Integers of 64 bits in two uint32, against Python's."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._exact import _limbs


def test_division_is_exact():
    """Next to every multiple too, where a quotient that is guessed may be one too small."""
    random = np.random.default_rng(0)
    divisors = [1, 2, 3, 5, 255, 257, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16]
    divisors += random.integers(1, 2**16, 200).tolist()
    pairs = []
    for divisor in divisors:
        multiples = [q * divisor for q in (1, 2**16 - 1, 2**16, 2**32 - 1, (2**63 - 1) // divisor)]
        bits = [int(random.integers(2**63)) >> int(random.integers(63)) for _ in range(20)]
        around = [x + step for x in multiples for step in (-1, 0, 1)]
        pairs += [(x, divisor) for x in (*bits, *around, 2**63 - 1) if x < 2**63]
    pairs += [(-1 - x, divisor) for x, divisor in pairs]
    integers = np.array([x for x, _ in pairs], np.int64).view(np.uint64)
    x = _limbs.Limbs(
        jnp.asarray((integers >> np.uint64(32)).astype(np.uint32)),
        jnp.asarray(integers.astype(np.uint32)),
    )
    found = _limbs.floor_divide(x, jnp.asarray([divisor for _, divisor in pairs], jnp.uint32))
    high, low = (np.asarray(limb).astype(np.uint64) for limb in found)
    quotients = (high << np.uint64(32) | low).view(np.int64)
    assert quotients.tolist() == [x // divisor for x, divisor in pairs]


def test_words_are_divided_exactly_by_any_divisor():
    random = np.random.default_rng(1)
    divisors = [*range(1, 9), 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    divisors += (random.integers(1, 2**32, 200) >> random.integers(32, size=200)).clip(1).tolist()
    multiples = [(q * d, d) for d in divisors for q in (1, 2, 2**31 // d, (2**32 - 1) // d)]
    pairs = [(x + step, d) for x, d in multiples for step in (-1, 0, 1)]
    pairs += [(2**32 - 1, d) for d in divisors]
    x, divisor = np.array([pair for pair in pairs if 0 <= pair[0] < 2**32], np.uint32).T
    quotient, rest = _limbs.divide(jnp.asarray(x), jnp.asarray(divisor))
    np.testing.assert_array_equal(quotient, x // divisor)
    np.testing.assert_array_equal(rest, x % divisor)


@pytest.mark.parametrize("n", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 3 * 2**16 + 5])
def test_totals_are_exact(n):
    """All bits of both limbs, so that every half carries, in one block and in several."""
    largest = (2**62 - 1) // n
    rows = _limbs.Limbs(
        *(jnp.broadcast_to(limb, (n,)) for limb in _limbs.constant(largest)),
    )
    high, low = _limbs.total(rows)
    assert (int(high) << 32) + int(low) == n * largest


def test_scaled_integers_are_rounded_exactly_halves_up():
    """At the ends of the range, next to halves, and at random integers and fractions."""
    rng = np.random.default_rng(1)
    numerators = [0, 1, -1, 3, -(2**29), 2**30 - 1, 2**30, -(2**30)]
    numerators += rng.integers(-(2**30), 2**30, 40).tolist()
    ends = [0, 1, -1, 2**29, -(2**29), 2**30, 2**32 - 1, -(2**32), 2**61 - 1, -(2**61)]
    x = ends + rng.integers(-(2**61), 2**61, 100).tolist() + rng.integers(-99, 99, 50).tolist()
    x += [2**29 * odd for odd in range(-9, 10, 2)]
    words = np.array(x, object) % 2**64
    high, low = (jnp.asarray(y.astype(np.uint32)) for y in (words >> 32, words % 2**32))
    found = _limbs.scale(_limbs.Limbs(high[None], low[None]), jnp.asarray([numerators]).T)
    joined = np.asarray(found.high).view(np.int32).astype(object) * 2**32
    joined += np.asarray(found.low).astype(object)
    assert joined.tolist() == [[(y * n + 2**29) >> 30 for y in x] for n in numerators]


@pytest.mark.parametrize("count", [1, 32, 33, 100])
def test_weighted_totals_are_exact(count):
    """At the ends of all digits, where products are largest, and at random integers."""
    rng = np.random.default_rng(count)
    weights = rng.integers(-(2**18), 2**18, count, endpoint=True).astype(np.int32)
    x = rng.integers(-(2**31), 2**31, (count, 50)).astype(np.int32)
    x[:, 0], x[:, 1], x[:, 2] = -(2**31), 2**31 - 1, 0xFFFF
    for given in (weights, np.full_like(weights, 2**18), np.full_like(weights, -(2**18)),
                  np.full_like(weights, 2**18 - 1)):  # fmt: skip
        found = _limbs.weighted_total(jnp.asarray(given), jnp.asarray(x))
        joined = np.asarray(found.high).astype(np.int32).astype(np.int64) * 2**32
        exact = given.astype(np.int64) @ x.astype(np.int64)
        np.testing.assert_array_equal(joined + np.asarray(found.low), exact)
