"""Which records join the batch of a step, if the batches of one record are far enough apart.

A record that may join a batch does so with probability q, and may not join the next
`separation - 1` batches. Its waits are drawn one after the other, so the batch of a step takes a
few random words for each batch that a record joined before, but none for the other steps.
"""

from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import Key
from dpjax._exact._numerics import bisected

# One random 64-bit word covers this many consecutive batches. It decides which one of them a record
# joins, or that the record joins none of them.
_DECIDED = 255


class _Draws(NamedTuple):
    """What is known after some draws.

    Attributes:
        draws: the number of draws.
        able: for each record, the first step in which it may join a batch again.
        found: whether each record joins the batch that is asked for.
    """

    draws: jax.Array
    able: jax.Array
    found: jax.Array


def modulo(high: jax.Array, low: jax.Array, modulus: int) -> jax.Array:
    """Returns 64-bit words modulo `modulus`.

    `modulus` is at most 2^16, so that products of remainders fit in 32 bits.
    """
    divisor = np.uint32(modulus)
    return (high % divisor * np.uint32(2**32 % modulus) % divisor + low % divisor) % divisor


def joins(key: Key, step: jax.Array, *, n: int, separation: int, rate: float) -> jax.Array:
    """Returns which of n records join the batch of a step, as booleans.

    The first step in which a record may join is random. It is chosen such that a record joins the
    batch of every step with the same probability, rate / (1 + (separation - 1) rate).
    """
    key_first, key_waits = jax.random.split(key)
    step = jnp.maximum(step, 0).astype(jnp.uint32)
    limits = _word_limits(*(1 - (1 - Fraction(rate)) ** k for k in range(1, _DECIDED + 1)))

    def draw(state: _Draws) -> _Draws:
        """Makes one more draw for each record that may still join a batch up to step `step`."""
        draws, able, found = state
        high, low = jax.random.bits(jax.random.fold_in(key_waits, draws), (2, n), jnp.uint32)
        wait = _reached(high, low, limits)
        place = able + wait
        # A random word determines whether the record joins in step `able` or in one of the
        # `_DECIDED` - 1 steps after it. If the record joins in none of them, the next word decides
        # in the same way for the steps after them.
        joined = wait < _DECIDED
        after = jnp.where(joined, place + np.uint32(separation), place)
        undecided = able <= step
        found |= undecided & joined & (place == step)
        return _Draws(draws + 1, jnp.where(undecided, after, able), found)

    start = _Draws(jnp.uint32(0), _first_step(key_first, n, separation, rate), jnp.zeros(n, bool))
    return lax.while_loop(lambda state: jnp.any(state.able <= step), draw, start).found


def _first_step(key: Key, n: int, separation: int, rate: float) -> jax.Array:
    """Draws the first step in which each record may join.

    It is 0 with probability 1 / (1 + (separation - 1) rate), and otherwise uniform between 1 and
    separation - 1. This is the stationary distribution of the number of steps until a record may
    join.
    """
    high, low, *other = jax.random.bits(key, (4, n), jnp.uint32)
    limits = _word_limits(1 / (1 + (separation - 1) * Fraction(rate)))
    later = 1 + modulo(other[0], other[1], max(separation - 1, 1))
    return jnp.where(_reached(high, low, limits) == 0, jnp.uint32(0), later)


def _word_limits(*shares: Fraction) -> tuple[np.ndarray, np.ndarray]:
    """Returns 64-bit limits: a random word is below each limit with the given probability.

    The probabilities are rounded by at most 2^-64. The result is the high and the low half of each
    limit.
    """
    numbers = np.array([min(int(share * 2**64), 2**64 - 1) for share in shares], np.uint64)
    return (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)


def _reached(high: jax.Array, low: jax.Array, limits: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Counts, for each 64-bit word, the limits that do not exceed it. Limits increase."""
    highs, lows = (jnp.asarray(x) for x in limits)

    def reached(at: jax.Array) -> jax.Array:
        return (high > highs[at]) | ((high == highs[at]) & (low >= lows[at]))

    return bisected(reached, len(highs), low.shape).astype(jnp.uint32)
