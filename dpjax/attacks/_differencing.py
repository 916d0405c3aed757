"""Differencing: combinations of answers about many people that reveal one of them."""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks

_TOLERANCE = 1e-9  # For the rounding of a projection in float64.
_LEAST_SINGULAR = 1e-11  # Singular values below this part of the largest one count as 0.


class Differences(NamedTuple):
    """Estimates of every record by combinations of answers.

    Attributes:
        values: the estimates, by the combination that comes nearest to the record.
        exposed: whether that combination equals the record, without other knowledge.
        gain: the standard deviation of `values` for independent noise of standard deviation 1.

    Formal guarantees:
        None: this is an attack.
    """

    values: np.ndarray
    exposed: np.ndarray
    gain: np.ndarray


def differencing(queries: ArrayLike, answers: ArrayLike) -> Differences:
    """Combines sums over subsets so that single records remain.

    Two answers suffice if one subset has one person more than another. In general, a record is
    exposed if some combination of the queries counts it once and nobody else. Of all combinations
    this one has the least noise.

    Args:
        queries: shape (m, n), one row for each query: how often it counts each record, such as
            booleans for subsets.
        answers: shape (m,), or (..., m) for many releases of the same queries.

    Returns:
        `Differences`: values of shape (..., n); exposed and gain of shape (n,).

    Raises:
        TypeError: if queries or answers are not real numbers.
        ValueError: if their shapes do not fit.

    Formal guarantees:
        Exact answers reveal every exposed record, up to rounding in float64. The queries alone
        decide which records are exposed. Under differential privacy, the `guessing_bound` of the
        composed guarantee bounds every combination, since it is post-processing.

    Source:
        The lecture "Introduction to differential privacy" (Cho, 2017), "Differencing attack"; that
        the projection on the rows has a one on its diagonal says that a record is exposed.

    Example:
        >>> import dpjax
        >>> everyone, all_but_the_last = [1, 1, 1, 1], [1, 1, 1, 0]
        >>> found = dpjax.attacks.differencing([everyone, all_but_the_last], [3, 2])
        >>> found.exposed.tolist(), round(float(found.values[3]))
        ([False, False, False, True], 1)
    """
    matrix, noisy = queries_and_answers(queries, answers)
    combinations = np.linalg.pinv(matrix, rcond=_LEAST_SINGULAR)
    exposed = np.abs(np.einsum("ij,ji->i", combinations, matrix) - 1) < _TOLERANCE
    return Differences(noisy @ combinations.T, exposed, np.linalg.norm(combinations, axis=1))


def queries_and_answers(queries: ArrayLike, answers: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Linear queries of shape (m, n) and answers of shape (..., m), on the host in float64."""
    matrix, noisy = _host_array("queries", queries), _host_array("answers", answers)
    if matrix.ndim != 2 or 0 in matrix.shape or noisy.shape[-1:] != matrix.shape[:1]:
        raise ValueError(
            "queries must have shape (m, n) and answers (..., m), got"
            f" {list(matrix.shape)} and {list(noisy.shape)}"
        )
    return matrix, noisy


def _host_array(name: str, values: ArrayLike) -> np.ndarray:
    _checks.host_only(name, values, "dpjax.attacks.reconstruct_by_least_squares")
    array = _checks.host_numbers(name, values)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, got {_checks.shown(values)}")
    return array.astype(np.float64)
