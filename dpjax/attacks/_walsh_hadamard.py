"""Walsh-Hadamard queries: n signed sums of the records, and reconstruction from noisy answers."""

import functools

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
    estimate of a record is its true value plus an average of the noise with signs. Noise of
    standard deviation s in every answer becomes s / sqrt(n), and a guess is wrong if it exceeds
    1/2. So the attack succeeds if s is well below sqrt(n), and fails if it is larger.

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


def _transformed(name: str, numbers: jax.Array) -> jax.Array:
    array = jnp.asarray(_checks.real_arrays(name, numbers))
    n = array.shape[-1] if array.ndim else 0
    if n.bit_count() != 1 or n > _MOST_RECORDS:
        raise ValueError(
            f"{name} must have shape (..., n) with n a power of two, at most {_MOST_RECORDS}, got"
            f" {list(array.shape)}"
        )
    return _transform(array.astype(compute_dtype(array.dtype)))


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
