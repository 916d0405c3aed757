"""Attacks on linear queries: `differencing`, and reconstruction by least squares or programs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype

_TOLERANCE = 1e-9  # A tolerance for rounding errors when vectors are projected in float64.
_LEAST_SINGULAR = 1e-11  # Singular values below this fraction of the largest one count as 0.


class Differences(NamedTuple):
    """Estimates of all records by linear combinations of answers, as `differencing` returns them.

    Attributes:
        values: the estimates. Each estimate uses the linear combination of queries that is nearest,
            by least squares, to a query that counts this record alone.
        exposed: for each record, whether its combination counts this record and no other.
        gain: the standard deviation of `values` for independent noise of standard deviation 1.

    Formal guarantees:
        None: this is an attack.
    """

    values: np.ndarray
    exposed: np.ndarray
    gain: np.ndarray


def differencing(queries: ArrayLike, answers: ArrayLike) -> Differences:
    """Estimates single records by adding and subtracting sums over subsets.

    Two answers are enough if one subset has one person more than the other. In general, a record is
    exposed if a linear combination of the queries counts it once, and no other record. If several
    combinations do so, the attack uses the one with the least noise.

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
        Exact answers reveal every exposed record, up to rounding in float64. Which records are
        exposed depends only on the queries. Under differential privacy, the `guessing_bound` of the
        composed guarantee limits this attack, like any other.

    Source:
        The lecture "Introduction to differential privacy" (Cho, 2017), "Differencing attack". A
        record is exposed if the projection onto the rows has a 1 at its place on the diagonal.

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
    """Converts queries to shape (m, n) and answers to shape (..., m), on the host in float64."""
    matrix, noisy = _host_array("queries", queries), _host_array("answers", answers)
    _check_shapes(matrix, noisy)
    return matrix, noisy


def _check_shapes(matrix: np.ndarray | jax.Array, noisy: np.ndarray | jax.Array) -> None:
    if matrix.ndim != 2 or 0 in matrix.shape or noisy.shape[-1:] != matrix.shape[:1]:
        raise ValueError(
            "queries must have shape (m, n) and answers (..., m), got"
            f" {list(matrix.shape)} and {list(noisy.shape)}"
        )


def _host_array(name: str, values: ArrayLike) -> np.ndarray:
    _checks.host_only(name, values, "dpjax.attacks.reconstruct_by_least_squares")
    array = _checks.host_numbers(name, values)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, got {_checks.shown(values)}")
    return array.astype(np.float64)


def reconstruct_by_least_squares(queries: jax.Array, answers: jax.Array) -> jax.Array:
    """Guesses bits from noisy answers to linear queries, such as counts over random subsets.

    The attack solves queries @ x = answers by least squares, and rounds x. Of several solutions, it
    takes the one with the least norm. Suppose that m = r n counts over random subsets, with r above
    1, have noise of standard deviation s. Then every record is estimated with noise of about 2 s /
    sqrt((r - 1) n), and a guess is wrong if its noise exceeds 1/2. As for `walsh_hadamard`, the
    attack succeeds if the noise is well below sqrt(n). Works inside `jit`.

    Args:
        queries: shape (m, n), one row for each query.
        answers: shape (m,), or (..., m) for many releases of the same queries.

    Returns:
        The guesses, booleans of shape (..., n).

    Raises:
        TypeError: if queries or answers are not real numbers.
        ValueError: if their shapes do not fit.

    Formal guarantees:
        If the error of every answer is at most E, at most 4 m E^2 / s_n^2 guesses are wrong, up to
        rounding in floats. Here s_n is the least of the n singular values of the queries.

    Source:
        Dinur and Nissim (2003); Kasiviswanathan, Rudelson, Smith and Ullman (2010), for least
        squares.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> queries = jnp.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
        >>> dpjax.attacks.reconstruct_by_least_squares(queries, jnp.array([2, 1, 1])).tolist()
        [True, True, False]
    """
    matrix = jnp.asarray(_checks.real_arrays("queries", queries))
    noisy = jnp.asarray(_checks.real_arrays("answers", answers))
    _check_shapes(matrix, noisy)
    dtype = np.promote_types(compute_dtype(matrix.dtype), compute_dtype(noisy.dtype))
    return _solution(matrix.astype(dtype), noisy.astype(dtype)) > 0.5


@jax.jit
def _solution(queries: jax.Array, answers: jax.Array) -> jax.Array:
    columns = jnp.moveaxis(answers, -1, 0)
    found, *_ = jnp.linalg.lstsq(queries, columns.reshape(len(columns), -1))
    return jnp.moveaxis(found.reshape(-1, *columns.shape[1:]), 0, -1)


def reconstruct_by_linear_program(
    queries: ArrayLike, answers: ArrayLike, *, seconds: float = 600.0
) -> np.ndarray:
    """Guesses bits by the x in [0, 1]^n whose answers are nearest to the given answers, in l1.

    The attack runs on the host, with the HiGHS solvers of SciPy. As for least squares, noise must
    be well below sqrt(n). Unlike least squares, this attack tolerates outliers: if some answers
    have errors of any size and the others are exact, all guesses can still be right. For many
    Gaussian queries, all guesses are right if fewer than 23.9% of answers are wrong.

    Args:
        queries: shape (m, n), one row for each query.
        answers: shape (m,).
        seconds: the time limit, above 0.

    Returns:
        The guesses, booleans of shape (n,).

    Raises:
        TypeError: if queries or answers are not real numbers.
        ValueError: if their shapes do not fit, or they are not finite.
        RuntimeError: if no solution is found in time.

    Formal guarantees:
        In the norm l1, the answers of x are at least as near to the given ones as the true answers.

    Source:
        Dinur and Nissim (2003); Dwork, McSherry and Talwar (2007), for the norm l1.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> queries = np.random.default_rng(0).integers(2, size=(40, 8))
        >>> bits = np.array([1, 0, 0, 1, 1, 0, 1, 0])
        >>> answers = queries @ bits
        >>> answers[:5] = 100
        >>> dpjax.attacks.reconstruct_by_linear_program(queries, answers).astype(int).tolist()
        [1, 0, 0, 1, 1, 0, 1, 0]
    """
    matrix, noisy = queries_and_answers(queries, answers)
    if noisy.ndim != 1:
        raise ValueError(f"answers must have shape (m,), got {list(noisy.shape)}")
    limit = _checks.positive("seconds", seconds)
    m, n = matrix.shape
    # The variables are three vectors, `x`, `above` and `below`. The program minimizes sum(above) +
    # sum(below) subject to queries @ x + above - below = answers.
    found = scipy.optimize.linprog(
        np.repeat([0.0, 1.0], [n, 2 * m]),
        A_eq=scipy.sparse.hstack([matrix, scipy.sparse.eye(m), -scipy.sparse.eye(m)], format="csr"),
        b_eq=noisy,
        bounds=[(0, 1)] * n + [(0, None)] * (2 * m),
        method="highs",
        options={"time_limit": limit},
    )
    if found.x is None or found.status != 0:
        raise RuntimeError(
            f"the solver failed to solve the linear program of this attack: {found.message}"
        )
    return found.x[:n] > 0.5
