"""Intervals of quantiles: between the released quantiles of lower and of higher probability."""

import math
from typing import Any

import numpy as np

from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._types import PyTree, Value


@intervals_of("selections")
def _of_indices(value: Value, measured: PyTree, facts: dict[str, Any], *_: object) -> Ends:
    del value, measured, facts
    raise ValueError(
        "no interval is known for this release: it selects options, and options have no distance;"
        " mechanism.score_gap bounds how much worse they score than the best"
    )


@intervals_of("quantiles")
def _between_quantiles(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """The nearest released quantiles whose probabilities are further away than ranks may be wrong.

    Let every record be a number of the grid. Then the true p-quantile q is one, and its score for p
    is 0. Let a number r be released for p' < p, at most e ranks worse than the best: at most
    p' n + e records are below r. If r were above q, at least p n records would be. So r <= q if
    e < (p - p') n. The other side is the mirror image.
    """
    del value
    if measured["n"] is None:
        raise ValueError(
            "no interval is known for quantiles of a private number of records: pass at_least=,"
            " such as the low ends of an interval of a count"
        )
    numbers, n = measured["numbers"], np.maximum(measured["n"], 2.0**-30)[..., None]
    rows = numbers.size if simultaneous else min(2, facts["rows"])
    if facts["rows"] == 1:
        unit = facts["denominator"] * float(np.min(n))
        # Three quantiles share epsilon, and two of them must be right.
        within, away = _gap(facts, confidence, 1) / unit, 3 * _gap(facts, confidence, 2) / unit
        raise ValueError(
            f"no interval follows from one quantile alone: at {confidence:g}, its own probability"
            f" is within {within:.3g} of the one that was asked for, but a step of one rank may be"
            " short or long; release two more at once, whose probabilities are more than"
            f" {away:.3g} below and above"
        )
    # Scores are in units of 1 / denominator ranks.
    gap = _gap(facts, confidence, rows)
    numerators = facts["numerators"]
    order = np.argsort(numerators)
    low = np.full(numbers.shape, facts["lower"], float)
    high = np.full(numbers.shape, facts["upper"], float)
    for row, own in enumerate(numerators):
        here = slice(row, row + 1)
        for other in order:
            is_below = (own - numerators[other]) * n > gap
            low[..., here] = np.where(is_below, numbers[..., other, None], low[..., here])
        for other in order[::-1]:
            is_above = (numerators[other] - own) * n > gap
            high[..., here] = np.where(is_above, numbers[..., other, None], high[..., here])
    return low, high


def _gap(facts: dict[str, Any], confidence: float, rows: int) -> float:
    """The largest gap to the best score in so many rows at once, in units of scores."""
    gap = facts["scale"] * math.log(rows * facts["options"] / (1 - confidence))
    return math.floor(gap) if facts["whole"] else gap + facts["step"]
