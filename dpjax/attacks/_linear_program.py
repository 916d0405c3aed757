"""Reconstruction from noisy answers to linear queries, by linear programming."""

from typing import Any

import numpy as np
import scipy

from dpjax._core import _checks
from dpjax.attacks._differencing import queries_and_answers


def reconstruct_by_linear_program(
    queries: Any, answers: Any, *, seconds: float = 600.0
) -> np.ndarray:
    """Guesses bits by the x in [0, 1]^n whose answers are nearest to those given, in the norm l1.

    Runs on the host, by the HiGHS solvers of SciPy. As by least squares, noise must be well below
    sqrt(n). But where a part of the answers is arbitrarily wrong and the others are exact, all
    bits are right, up to a part of .239 of the answers to many Gaussian queries: absolute
    deviations forgive what squares do not.

    Args:
        queries: shape (m, n), one row for each query.
        answers: shape (m,).
        seconds: after which it gives up, above 0.

    Returns:
        The guesses, booleans of shape (n,).

    Raises:
        TypeError: if queries or answers are not real numbers.
        ValueError: if their shapes do not fit, or they are not finite.
        RuntimeError: if there is no solution yet when the time is over.

    Formal guarantees:
        The answers of the x that is found are off by no more in sum than those of the truth.

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
    # queries @ x + above - below = answers, at the least sum of above and below.
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
