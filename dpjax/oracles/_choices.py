"""Random choices of an index, with probabilities that are known exactly."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._exact._numerics import count_below

_WORDS = 2**32


@frozen_pytree
class UniformChoice:
    """Chooses each index with the same probability, up to a relative error of count / 2^32."""

    count: int = static()

    @property
    def log_probabilities(self) -> jax.Array:
        return jnp.full(self.count, -math.log(self.count))

    def draw(self, key: jax.Array) -> jax.Array:
        # `randint` would take twice as many random words.
        return jax.random.bits(key, (), jnp.uint32) % jnp.uint32(self.count)


@frozen_pytree
class WeightedChoice:
    """Chooses index i with a given probability, which is a multiple of 2^-32 above 0.

    `ends[i]` is the number of 32-bit words that choose an index of at most i. The last index needs
    no entry.
    """

    ends: jax.Array
    log_probabilities: jax.Array

    @classmethod
    def of(cls, words: np.ndarray) -> "WeightedChoice":
        """Makes a choice from the number of 32-bit words for each index."""
        ends = jnp.asarray(np.cumsum(words)[:-1].astype(np.uint32))
        return cls(ends, jnp.asarray(np.log(words / _WORDS), jnp.result_type(float)))

    def draw(self, key: jax.Array) -> jax.Array:
        word = jax.random.bits(key, (), jnp.uint32)
        return count_below(self.ends, word, or_equal=True)


def words_of(weights: np.ndarray) -> np.ndarray:
    """The number of 32-bit words that choose each index: 2^32 times its share of the weights."""
    ends = np.cumsum(weights / weights.max())
    return np.diff(np.rint(ends / ends[-1] * _WORDS).astype(np.int64), prepend=0)


def weighted_choice(name: str, weights: ArrayLike | Sequence[float], count: int) -> WeightedChoice:
    """A choice by public weights above 0, which need not add up to 1."""
    if _checks.is_traced(weights):
        raise TypeError(
            f"{name} must be known when an oracle is made, got traced {jnp.asarray(weights).dtype}"
        )
    array = _checks.host_numbers(name, weights).astype(np.float64)
    if array.shape != (count,):
        raise ValueError(f"{name} must be {count} numbers, got shape {array.shape}")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"{name} must be finite and above 0, got {_checks.shown(array.tolist())}")
    words = words_of(array)
    if words.min() == 0:
        smallest = array[np.argmin(words)] / array.sum()
        raise ValueError(
            f"{name} must each be at least 2^-32 times their sum, got {smallest:.2g} times the sum"
        )
    return WeightedChoice.of(words)
