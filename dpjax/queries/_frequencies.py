"""The frequencies of answers, estimated from reports of randomized response."""

import dataclasses

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.mechanisms._randomized_response import RandomizedResponse, UnaryEncoding


@dataclasses.dataclass(frozen=True, eq=False)
class Frequencies:
    """Frequencies of answers with confidence intervals; made by `frequencies`.

    Attributes:
        estimates: unbiased, float64 of shape (K,); they may be below 0 or above 1.
        lower: the lower ends of the intervals, in [0, 1].
        upper: the upper ends of the intervals, in [0, 1].
        confidence: the confidence of the intervals.
        answers: the number of answers.

    Formal guarantees:
        The guarantees of `frequencies`.
    """

    estimates: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    confidence: float
    answers: int


def frequencies(
    reports: ArrayLike,
    mechanism: RandomizedResponse | UnaryEncoding,
    *,
    confidence: float = 0.95,
    simultaneous: bool = False,
) -> Frequencies:
    """Unbiased estimates of the frequency of each answer, with confidence intervals.

    A person reports an answer with probability t if it is that person's true answer, and with
    probability l if it is not. If the frequency of the answer is f, a report names it with
    probability s = l + (t - l) f. So (count / n - l) / (t - l) is an unbiased estimate of f. Here t
    and l are the exact probabilities of the draws, multiples of 2^-32. Clopper-Pearson limits of s
    are converted to limits of f.

    Args:
        reports: the value of a release by the mechanism, of any shape: n answers in total.
        mechanism: made by `dpjax.randomized_response`, `two_coins` or `unary_encoding`.
        confidence: the confidence of the intervals, in (0, 1).
        simultaneous: whether the confidence is for all intervals at once, or for each alone.

    Returns:
        A `Frequencies`.

    Raises:
        TypeError: if the mechanism is of another kind, or the reports are not integers.
        ValueError: if this mechanism cannot release these reports, if epsilon is so small that
            reports do not depend on answers, or if the confidence is out of range.

    Formal guarantees:
        Post-processing of the reports. Assume that people are drawn independently from a
        population. Then counts are binomial, and an interval contains the frequency in the
        population with probability at least `confidence`, for every n and frequency. With
        `simultaneous`, all K intervals contain their frequencies at once with this probability
        (Bonferroni). At a confidence of 1/2 or more, and if n l and n (1 - t) are 1 or more, an
        interval also covers the frequency among the n people. The reason: given the people, reports
        are independent with one of two probabilities, so their count varies less than a binomial
        count.

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
    if type(mechanism) not in (RandomizedResponse, UnaryEncoding):
        raise TypeError(
            "mechanism must be made by randomized_response, two_coins or unary_encoding, got"
            f" {type(mechanism).__name__}"
        )
    counts, n = _counts_of(reports, mechanism)
    missed = 1 - _checks.fraction("confidence", confidence)
    each = missed / len(counts) if simultaneous else missed
    truth, lie = (weight / 2.0**32 for weight in mechanism.report_weights)
    if truth == lie:
        raise ValueError(
            f"epsilon={float(mechanism.epsilon):g} is too small: reports do not depend on "
            "answers, so they show no frequencies"
        )

    def unbiased(share: np.ndarray) -> np.ndarray:
        return (share - lie) / (truth - lie)

    low, high = (
        np.clip(unbiased(limit(counts, n, each / 2)), 0.0, 1.0)
        for limit in (clopper_pearson_lower, clopper_pearson_upper)
    )
    return Frequencies(unbiased(counts / n), low, high, float(confidence), n)


def _counts_of(
    reports: ArrayLike, mechanism: RandomizedResponse | UnaryEncoding
) -> tuple[np.ndarray, int]:
    """Returns how many reports are equal to each answer, and the number of all reports."""
    array, size = _checks.host_numbers("reports", reports), mechanism.categories
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"reports must be integers, got dtype {array.dtype}")
    bits = isinstance(mechanism, UnaryEncoding)
    possible = array.size > 0 and array.min() >= 0 and array.max() < (2 if bits else size)
    if not possible or (bits and (array.ndim == 0 or array.shape[-1] != size)):
        raise ValueError(
            f"reports must be values that this mechanism of {size} categories can release, got "
            f"{_checks.described(array)}"
        )
    if bits:
        table = array.reshape(-1, size)
        return table.sum(axis=0, dtype=np.int64), len(table)
    return np.bincount(array.ravel(), minlength=size), array.size
