"""Attacks on linear queries: `differencing`, and reconstruction by several methods.

Reconstruction is by least squares, by linear programs, or from n noisy Walsh-Hadamard queries,
which are signed sums of the records.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import Key
from dpjax._exact._numerics import compute_dtype

_RADIX = 64  # A dense product with a matrix of this size is fast on CPUs, GPUs and TPUs.
_MOST_RECORDS = 2**24


def walsh_hadamard(database: jax.Array) -> jax.Array:
    """All n Walsh-Hadamard queries of a database: sums of its records with public signs.

    Query j is sum_i (-1)^(number of bits that i and j share) x_i, so query 0 is the plain sum. It
    takes n log n steps.

    Args:
        database: numbers of shape (n,), or (..., n) for many databases; n a power of two, at most
            2^24.

    Returns:
        The answers, floats of the same shape.

    Raises:
        TypeError: if the database is not real numbers.
        ValueError: if n is not such a power.

    Formal guarantees:
        Exact for integers if all partial sums fit into the significand, as for bits in float32. For
        records in [0, 1], every answer changes by at most 1 under replace-one. So the sensitivity
        is n in the norm l1, and sqrt(n) in l2.

    Source:
        Dwork and Yekhanin (2008).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> dpjax.attacks.walsh_hadamard(jnp.array([1, 0, 0, 1])).tolist()
        [2.0, 0.0, 0.0, 2.0]
    """
    return _transformed("database", database)


def reconstruct_from_walsh_hadamard(answers: jax.Array) -> jax.Array:
    """Guesses bits from noisy answers to all n Walsh-Hadamard queries, by least squares.

    The queries are orthogonal, so the solution is the transform of the answers, divided by n. The
    estimate of a record is its true value plus the average of the n noises, each multiplied by +1
    or -1. If every noise has standard deviation s, the average has s / sqrt(n). A guess can be
    wrong only if the average exceeds 1/2 in magnitude. So the attack succeeds if s is well below
    sqrt(n), and fails if s is well above sqrt(n).

    Args:
        answers: shape (n,), or (..., n) for many releases; n a power of two, at most 2^24.

    Returns:
        The guesses, booleans of the same shape.

    Raises:
        TypeError: as for `walsh_hadamard`.
        ValueError: as for `walsh_hadamard`.

    Formal guarantees:
        If the error of every answer is at most E, at most 4 E^2 guesses are wrong. Under
        independent Gaussian noise of standard deviation s, each guess is right with probability
        Phi(sqrt(n) / (2 s)). No attack on one record is better, even if it knows all others.

    Source:
        Dwork and Yekhanin (2008).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> answers = dpjax.attacks.walsh_hadamard(jnp.array([1, 0, 0, 1])) + 0.4
        >>> dpjax.attacks.reconstruct_from_walsh_hadamard(answers).tolist()
        [True, False, False, True]
    """
    transformed = _transformed("answers", answers)
    return transformed > transformed.shape[-1] / 2


def common_floats(**named: ArrayLike) -> list[jax.Array]:
    """Converts real arrays to one float dtype; errors call them by the names of the arguments."""
    arrays = [jnp.asarray(_checks.real_arrays(*item)) for item in named.items()]
    dtype = np.result_type(*(compute_dtype(x.dtype) for x in arrays))
    return [x.astype(dtype) for x in arrays]


def wrong_shape(wanted: str, *arrays: np.ndarray | jax.Array) -> ValueError:
    """Returns the error about arrays that do not have the shapes that `wanted` states."""
    return ValueError(f"{wanted}, got {' and '.join(str(list(x.shape)) for x in arrays)}")


def _transformed(name: str, numbers: jax.Array) -> jax.Array:
    (array,) = common_floats(**{name: numbers})
    n = array.shape[-1] if array.ndim else 0
    if n.bit_count() != 1 or n > _MOST_RECORDS:
        wanted = f"{name} must have shape (..., n) with n a power of two, at most {_MOST_RECORDS}"
        raise wrong_shape(wanted, array)
    return _transform(array)


@jax.jit
def _transform(x: jax.Array) -> jax.Array:
    """Returns H x along the last axis. H of size r s is the Kronecker product of H_r and H_s."""
    n = x.shape[-1]
    size = min(n, _RADIX)
    rows = x.reshape(*x.shape[:-1], n // size, size)
    signs = jnp.asarray(scipy.linalg.hadamard(size), x.dtype)
    rows = jnp.matmul(rows, signs, precision=jax.lax.Precision.HIGHEST)
    if n > size:
        rows = jnp.swapaxes(_transform(jnp.swapaxes(rows, -1, -2)), -1, -2)
    return rows.reshape(x.shape)


def recovered_fraction(key: Key, c: ArrayLike, *, n: int) -> jax.Array:
    """The fraction of n bits that least squares recovers under noise of at most c sqrt(n).

    Draws a database of fair bits, answers its n Walsh-Hadamard queries with independent noise,
    uniform on [-c sqrt(n), c sqrt(n)], and reconstructs the bits. For several databases, map over
    keys by `vmap`.

    Args:
        key: a typed key.
        c: numbers of any shape, 0 or above. All share one database and one draw of noise, scaled.
        n: the number of bits, a power of two, at most 2^24.

    Returns:
        The fractions, of the shape of c.

    Raises:
        TypeError: if c is not real numbers, or n not an integer.
        ValueError: if n is not such a power.

    Formal guarantees:
        None: an experiment. Its mean is near `expected_recovered_fraction`.

    Source:
        Dwork and Yekhanin (2008); Dinur and Nissim (2003) for the order of the noise.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> c = jnp.array([0.1, 10.0])
        >>> dpjax.attacks.recovered_fraction(jax.random.key(0), c, n=4096).round(1).tolist()
        [1.0, 0.5]
    """
    n = _checks.integer("n", n, least=1)
    sizes = jnp.asarray(_checks.real_arrays("c", c), float)
    return _fractions(key, sizes.ravel(), n).reshape(sizes.shape)


def expected_recovered_fraction(c: ArrayLike) -> np.ndarray:
    """The mean of `recovered_fraction` for many bits: Phi(sqrt(3) / (2 c)).

    Uniform noise up to c sqrt(n) has variance c^2 n / 3. Its average over n answers is nearly
    normal, with variance c^2 / 3. A guess is wrong if this average exceeds 1/2 in the wrong
    direction. The result does not depend on n: at c = .34, .5% are wrong; at c = 1, 19%.

    Args:
        c: numbers of any shape, 0 or above.

    Returns:
        The fractions, of the shape of c: 1 at c = 0, and near 1/2 for large c.

    Raises:
        TypeError: if c is not real numbers.

    Formal guarantees:
        Exact in the limit of many records. Since the noise is bounded, the error is below 1/n.

    Source:
        Dwork and Yekhanin (2008), and the central limit theorem.

    Example:
        >>> import dpjax
        >>> dpjax.attacks.expected_recovered_fraction([0.34, 1.0]).round(3).tolist()
        [0.995, 0.807]
    """
    sizes = _checks.host_numbers("c", c).astype(np.float64)
    with np.errstate(divide="ignore"):
        return scipy.special.ndtr(3**0.5 / 2 / sizes)


@functools.partial(jax.jit, static_argnames="n")
def _fractions(key: jax.Array, sizes: jax.Array, n: int) -> jax.Array:
    for_bits, for_noise = jax.random.split(key)
    bits = jax.random.bernoulli(for_bits, shape=(n,))
    exact = walsh_hadamard(bits)
    noise = n**0.5 * jax.random.uniform(for_noise, (n,), minval=-1.0, maxval=1.0)

    def fraction(c: jax.Array) -> jax.Array:
        return jnp.mean(reconstruct_from_walsh_hadamard(exact + c * noise) == bits)

    return jax.vmap(fraction)(sizes)


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
        raise wrong_shape("queries must have shape (m, n) and answers (..., m)", matrix, noisy)


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
    matrix, noisy = common_floats(queries=queries, answers=answers)
    _check_shapes(matrix, noisy)
    return _solution(matrix, noisy) > 0.5


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
        raise wrong_shape("answers must have shape (m,)", noisy)
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
