"""How frequent answers are, from what randomized response reports of them."""

import dataclasses
from typing import Any

import numpy as np

from dpjax import _checks
from dpjax._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.mechanisms._randomized_response import RandomizedResponse
from dpjax.mechanisms._unary_encoding import UnaryEncoding


@dataclasses.dataclass(frozen=True, eq=False)
class Frequencies:
    """Frequencies of answers with confidence intervals; made by `frequencies`.

    Attributes:
        estimates: unbiased, float64 of shape (K,); may be below 0 or above 1.
        lower: ends of the intervals, in [0, 1].
        upper: the other ends.
        confidence: of the intervals.
        answers: number of answers.

    Formal guarantees:
        Those of `frequencies`.
    """

    estimates: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    confidence: float
    answers: int


def frequencies(
    reports: Any,
    mechanism: RandomizedResponse | UnaryEncoding,
    *,
    confidence: float = 0.95,
    simultaneous: bool = False,
) -> Frequencies:
    """Unbiased estimates of how frequent each answer is, with intervals that cover.

    An answer is reported with probability t by whom it is true of and l by others: where its
    frequency is f, a report names it with probability s = l + (t - l) f, and (count / n - l) /
    (t - l) is unbiased. t and l are the probabilities really drawn, multiples of 2^-32. Limits of s
    by Clopper and Pearson become limits of f.

    Args:
        reports: the value of a release by the mechanism, of any shape: n answers in all.
        mechanism: made by `dpjax.randomized_response`, `two_coins` or `unary_encoding`.
        confidence: of the intervals, in (0, 1).
        simultaneous: of all of them at once, instead of each by itself.

    Returns:
        A `Frequencies`.

    Raises:
        TypeError: if the mechanism is another, or the reports are not integers.
        ValueError: if the reports are not of this mechanism, epsilon is so small that they do not
            depend on answers, or the confidence is out of range.

    Formal guarantees:
        Post-processing of the reports. Where every person's answer is drawn from a population by
        itself, counts are binomial, and an interval holds the frequency in the population with
        probability `confidence` at least, at any n and frequency. With `simultaneous` that is so of
        all K intervals (Bonferroni). The frequency among the n people is covered as well, at a
        confidence of 1/2 or more where n l and n (1 - t) are 1 or more: reports are then
        independent with two probabilities, and their count varies less than the binomial one.

    Source:
        Warner (1965); Clopper and Pearson (1934); Hoeffding (1956), and Greenberg and Mohri (2014),
        for sums of independent coins.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.two_coins()
        >>> smokes = jnp.arange(10_000) % 5 == 0
        >>> found = dpjax.queries.frequencies(
        ...     mechanism(dpjax.random.seeded_key(0), smokes).value, mechanism
        ... )
        >>> bool(found.lower[1] < 0.2 < found.upper[1])
        True
    """
    if not isinstance(mechanism, (RandomizedResponse, UnaryEncoding)):
        raise TypeError(
            "mechanism must be made by randomized_response, two_coins or unary_encoding, got"
            f" {type(mechanism).__name__}"
        )
    counts, n = _counts_of(reports, mechanism)
    error = 1 - _checks.fraction("confidence", confidence)
    each = error / len(counts) if simultaneous else error
    truth, lie = (weight / 2.0**32 for weight in mechanism.report_weights)
    if truth == lie:
        raise ValueError(
            f"epsilon={float(mechanism.epsilon):g} is too small: reports do not depend on answers"
        )

    def unbiased(share: np.ndarray) -> np.ndarray:
        return (share - lie) / (truth - lie)

    low, high = (
        np.clip(unbiased(limit(counts, n, each / 2)), 0.0, 1.0)
        for limit in (clopper_pearson_lower, clopper_pearson_upper)
    )
    return Frequencies(unbiased(counts / n), low, high, float(confidence), n)


def _counts_of(
    reports: Any, mechanism: RandomizedResponse | UnaryEncoding
) -> tuple[np.ndarray, int]:
    """How often each answer was reported, and how many reports there are."""
    array, size = _checks.host_numbers("reports", reports), mechanism.categories
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"reports must be integers, got dtype {array.dtype}")
    bits = isinstance(mechanism, UnaryEncoding)
    of_this = array.size > 0 and array.min() >= 0 and array.max() < (2 if bits else size)
    if not of_this or (bits and (array.ndim == 0 or array.shape[-1] != size)):
        raise ValueError(
            f"reports must be what a mechanism of {size} categories released, got"
            f" {_checks.described(array)}"
        )
    if bits:
        table = array.reshape(-1, size)
        return table.sum(axis=0, dtype=np.int64), len(table)
    return np.bincount(array.ravel(), minlength=size), array.size
