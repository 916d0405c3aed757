"""The noise at which reconstruction stops working: of order sqrt(n)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import Key
from dpjax.attacks._walsh_hadamard import reconstruct_from_walsh_hadamard, walsh_hadamard


def recovered_fraction(key: Key, c: ArrayLike, *, n: int) -> jax.Array:
    """The fraction of n bits that least squares recovers under noise of at most c sqrt(n).

    Draws a database of fair bits, answers its n Walsh-Hadamard queries with independent noise,
    uniform on [-c sqrt(n), c sqrt(n)], and attacks them. Nothing here is private. For several
    databases, map over keys by `vmap`.

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
    normal, with variance c^2 / 3. A bit is wrong if that exceeds 1/2 in the wrong direction. The
    result does not depend on n: at c = .34, .5% are wrong; at c = 1, 19%.

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
