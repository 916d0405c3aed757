"""Intervals of the centers and sizes of clusters, for the noise of the last iteration.

A center is a noisy sum over a noisy count, and both follow from the release: the sum is the center
times the count. A center at the edge of the ball was shortened, and one whose count is not above
the noise was kept from before. Of those the release tells nothing, so their interval is the ball.
"""

from typing import Any

import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.mechanisms._noise_intervals import noise_bounds
from dpjax.queries._moment_intervals import _quotient

_FLOATS = 2.0**-20  # Relative to the radius or the count: what float32 rounds, more than once.


@intervals_of("k-means")
def _of_clusters(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """For the records of each cluster, as the last iteration assigned them."""
    del measured
    middle, size = np.asarray(facts["middle"]), facts["size"]
    spared = _FLOATS * (np.abs(middle) + size)
    centers = (np.asarray(value["centers"], np.float64) - middle) / size
    counts = np.asarray(value["counts"], np.float64)

    def count_within(parts: int) -> np.ndarray:
        (bound,) = noise_bounds(facts, confidence, facts["coordinates"] if simultaneous else parts)
        # Totals are rounded once.
        return (bound + 1) * facts["unit"] + _FLOATS * np.abs(counts)

    alone, reach = count_within(1), count_within(2)[..., None]
    sums, under = centers * counts[..., None], counts[..., None]
    around = (sums - reach, sums + reach), (under - reach, under + reach)
    low, high = _quotient(*around)
    inside = np.sqrt(np.sum(centers**2, axis=-1)) < 1 - facts["edge"]
    known = (inside & (counts > facts["least"] * (1 + _FLOATS)))[..., None]
    low = np.where(known, np.clip(low - facts["edge"], -1, 1), -1)
    high = np.where(known, np.clip(high + facts["edge"], -1, 1), 1)
    return (
        {"centers": middle + size * low - spared, "counts": np.maximum(counts - alone, 0)},
        {"centers": middle + size * high + spared, "counts": counts + alone},
    )
