"""The range of a column, found by a private histogram on powers of two."""

import math

import numpy as np

from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.tables._frame import Column

_EXPONENTS = range(-20, 64)
# The middle bucket holds all numbers closer to 0 than the least power of two.
LEAST = 2.0 ** _EXPONENTS[0]
EDGES = np.array([*(-(2.0**e) for e in reversed(_EXPONENTS)), *(2.0**e for e in _EXPONENTS)])
BUCKETS = len(EDGES) - 1
# The probability that no empty bucket is mistaken for a bucket with numbers.
_CONFIDENCE = 0.999


def powers_of(column: Column) -> np.ndarray:
    """The bucket of each entry. The outer buckets also contain the numbers beyond them.

    Positive buckets include their lower edge, negative buckets their upper edge.
    """
    numbers = column.numbers()
    below = np.searchsorted(EDGES, numbers, side="right") - 1
    from_above = np.searchsorted(EDGES, numbers, side="left") - 1
    found = np.clip(np.where(numbers < 0, from_above, below), 0, BUCKETS - 1)
    return np.where(column.known, found, -1).astype(np.int32)


def range_of(counts: np.ndarray, mechanism: AdditiveMechanism) -> np.ndarray:
    """The ends of the range of buckets that certainly contain numbers; NaN if there are none."""
    # Noise on all empty buckets is below this, with this confidence for all of them together.
    confidence = 1 - 2 * (1 - _CONFIDENCE) / BUCKETS
    least = float(mechanism.error(confidence=confidence, like=np.int32(0)))
    held = np.flatnonzero(np.asarray(counts) > least)
    if not len(held):
        return np.array([math.nan, math.nan])
    middle = BUCKETS // 2
    low = 0.0 if held[0] == middle else EDGES[held[0]]
    high = 0.0 if held[-1] == middle else EDGES[held[-1] + 1]
    return np.array([low, high])
