"""Differencing: answers about many people whose difference is one of them."""

from typing import Any, NamedTuple

import numpy as np

from dpjax import _checks

# Of a projection in float64, and of singular values beside the largest one.
_TOLERANCE = 1e-9
_LEAST_SINGULAR = 1e-11


class Differences(NamedTuple):
    """What differences of answers say about every record.

    Attributes:
        values: the record's value by the combination of answers that comes nearest to it.
        exposed: whether that combination is the value itself, nothing else being known.
        gain: the standard deviation of `values` for independent noise of standard deviation 1.

    Formal guarantees:
        None: this is an attack.
    """

    values: np.ndarray
    exposed: np.ndarray
    gain: np.ndarray


def differencing(queries: Any, answers: Any) -> Differences:
    """Combines sums over subsets so that single records are left.

    Two answers suffice where one subset has one person more than another; in general a record is
    exposed if some combination of the queries counts it once and nobody else. Of all combinations
    the one of least noise is taken.

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
        Exact answers give every exposed record away up to rounding in float64. Whether a record is
        exposed depends on the queries alone. Answers under differential privacy are bound by
        `guessing_bound` of their composed guarantee, for every combination is post-processing.

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


def queries_and_answers(queries: Any, answers: Any) -> tuple[np.ndarray, np.ndarray]:
    """Linear queries of shape (m, n) and answers of shape (..., m), on the host in float64."""
    matrix, noisy = _host_array("queries", queries), _host_array("answers", answers)
    if matrix.ndim != 2 or 0 in matrix.shape or noisy.shape[-1:] != matrix.shape[:1]:
        raise ValueError(
            "queries must have shape (m, n) and answers (..., m), got"
            f" {list(matrix.shape)} and {list(noisy.shape)}"
        )
    return matrix, noisy


def _host_array(name: str, values: Any) -> np.ndarray:
    _checks.host_only(name, values, "dpjax.attacks.reconstruct_by_least_squares")
    array = _checks.host_numbers(name, values)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, got {_checks.shown(values)}")
    return array.astype(np.float64)
