"""Reconstruction from noisy answers to linear queries, by linear programming."""

import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax.attacks._differencing import queries_and_answers


def reconstruct_by_linear_program(
    queries: ArrayLike, answers: ArrayLike, *, seconds: float = 600.0
) -> np.ndarray:
    """Guesses bits by the x in [0, 1]^n whose answers are nearest to the given ones, in norm l1.

    Runs on the host, by the HiGHS solvers of SciPy. As for least squares, noise must be well below
    sqrt(n). But if some answers are arbitrarily wrong and the others exact, all bits can still be
    right. For many Gaussian queries that holds while the wrong part of the answers is below .239.

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
        The distance in l1 of x's answers from the given ones is at most that of the truth.

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
    # Minimizes the sum of above and below, where queries @ x + above - below = answers.
    found = scipy.optimize.linprog(
        np.repeat([0.0, 1.0], [n, 2 * m]),
        A_eq=scipy.sparse.hstack([matrix, scipy.sparse.eye(m), -scipy.sparse.eye(m)], format="csr"),
        b_eq=noisy,
        bounds=[(0, 1)] * n + [(0, None)] * (2 * m),
        method="highs",
        options={"time_limit": limit},
    )
    if found.x is None or found.status != 0:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return found.x[:n] > 0.5
