"""Exact samplers, given uniform random bits: the reference that table samplers are tested against.

Why they are exact stands in `_machines`. How long a draw takes depends on it: where a clock can be
read, use the tables.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax.random._keys import check_key
from dpjax.random._machines import (
    Coin,
    ExponentialCoin,
    Gaussian,
    Laplace,
    draw,
    magnitude,
    quotient,
)

_LARGEST = 2**31 - 1
# The chance of exp(-2^31 / 2^24) = 2^-184 to leave int32.
_LARGEST_SCALE = 2**24
_BAD = -(2**31)


def bernoulli(
    key: jax.Array, *, numerator: Any, denominator: Any = 1, shape: tuple[int, ...] = ()
) -> jax.Array:
    """Coins that are True with probability numerator / denominator.

    Args:
        key: a typed key that is used for nothing else.
        numerator: an integer in [0, denominator], traced or not.
        denominator: an integer in [1, 2^31 - 1], traced or not.
        shape: of the result.

    Returns:
        Booleans; False where a traced parameter is out of range.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a concrete one is out of range.

    Formal guarantees:
        Exact, given uniform random bits. Not constant-time.

    Source:
        Lemire, "Fast random integer generation in an interval" (2019), Lemma 4.1.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> dpjax.random.bernoulli(key, numerator=1, denominator=3, shape=(1000,)).mean()
        Array(0.3..., dtype=float32)
    """
    (a, b), valid = _ratio(numerator, denominator, least=0)
    if not (_checks.is_traced(numerator) or _checks.is_traced(denominator)):
        _checks.integer("numerator", numerator, least=0, most=int(denominator))
    valid &= a <= b
    return _bernoulli(check_key(key), a, b, math.prod(shape)).reshape(shape) & valid


def bernoulli_exp(
    key: jax.Array, *, numerator: Any, denominator: Any = 1, shape: tuple[int, ...] = ()
) -> jax.Array:
    """Coins that are True with probability exp(-numerator / denominator).

    Args:
        key: a typed key that is used for nothing else.
        numerator: an integer in [0, 2^31 - 1], traced or not.
        denominator: an integer in [1, 2^31 - 1], traced or not.
        shape: of the result.

    Returns:
        Booleans; False where a traced parameter is out of range.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a concrete one is out of range.

    Formal guarantees:
        Exact, given uniform random bits. Not constant-time.

    Source:
        Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020),
        Algorithm 1.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> dpjax.random.bernoulli_exp(key, numerator=1, shape=(1000,)).mean()
        Array(0.3..., dtype=float32)
    """
    (a, b), valid = _ratio(numerator, denominator, least=0)
    return _bernoulli_exp(check_key(key), a, b, math.prod(shape)).reshape(shape) & valid


def geometric(
    key: jax.Array, *, numerator: Any, denominator: Any = 1, shape: tuple[int, ...] = ()
) -> jax.Array:
    """One-sided geometric noise: P(n) ~ exp(-n denominator / numerator) for n >= 0.

    Args:
        key: a typed key that is used for nothing else.
        numerator: of the scale, an integer in [1, 2^31 - 1], traced or not.
        denominator: of the scale, likewise; the scale must be below 2^24.
        shape: of the result.

    Returns:
        int32 in [0, 2^31 - 1], where it saturates with a probability below 2^-184; -2^31 where a
        traced parameter is out of range.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a concrete one is out of range.

    Formal guarantees:
        Exact, given uniform random bits. Not constant-time.

    Source:
        Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020),
        Algorithm 2 without its sign.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> noise = dpjax.random.geometric(key, numerator=5, denominator=2, shape=(1000,))
        >>> int(noise.min())
        0
    """
    return _scaled(key, numerator, denominator, shape, signed=False)


def discrete_laplace(
    key: jax.Array, *, numerator: Any, denominator: Any = 1, shape: tuple[int, ...] = ()
) -> jax.Array:
    """Discrete Laplace noise: P(n) ~ exp(-|n| denominator / numerator).

    Args:
        key: a typed key that is used for nothing else.
        numerator: of the scale, an integer in [1, 2^31 - 1], traced or not.
        denominator: of the scale, likewise; the scale must be below 2^24.
        shape: of the result.

    Returns:
        int32 in [1 - 2^31, 2^31 - 1], where it saturates with a probability below 2^-183; -2^31
        where a traced parameter is out of range.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a concrete one is out of range.

    Formal guarantees:
        Exact, given uniform random bits. Added to an integer of sensitivity D, it is
        (D denominator / numerator)-DP. Not constant-time.

    Source:
        Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020),
        Algorithm 2.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> dpjax.random.discrete_laplace(key, numerator=5, denominator=2, shape=(3,)).dtype
        dtype('int32')
    """
    return _scaled(key, numerator, denominator, shape, signed=True)


def discrete_gaussian(
    key: jax.Array, *, numerator: Any, denominator: Any = 1, shape: tuple[int, ...] = ()
) -> jax.Array:
    """Discrete Gaussian noise: P(n) ~ exp(-n^2 / (2 v)) with v = numerator / denominator.

    Args:
        key: a typed key that is used for nothing else.
        numerator: of v = sigma^2, an integer in [1, 2^31 - 1], traced or not.
        denominator: of v, likewise.
        shape: of the result.

    Returns:
        int32 in [1 - 2^31, 2^31 - 1]; -2^31 where a traced parameter is out of range. Within a
        probability of exp(-2^14) a count could wrap.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a concrete one is out of range.

    Formal guarantees:
        Exact, given uniform random bits and no such count. Added to an integer of sensitivity D,
        it satisfies rho-zCDP with rho = D^2 / (2 v), by the source. Not constant-time.

    Source:
        Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020);
        Karney, "Sampling exactly from the normal distribution" (2016), Algorithm D.

    Example:
        >>> import dpjax
        >>> key = dpjax.random.seeded_key(0)
        >>> dpjax.random.discrete_gaussian(key, numerator=100, shape=(3,)).dtype
        dtype('int32')
    """
    (a, b), valid = _ratio(numerator, denominator, least=1)
    drawn = _discrete_gaussian(check_key(key), a, b, math.prod(shape)).reshape(shape)
    return jnp.where(valid, drawn, _BAD)


def _scaled(
    key: jax.Array, numerator: Any, denominator: Any, shape: tuple[int, ...], *, signed: bool
) -> jax.Array:
    (t, s), valid = _ratio(numerator, denominator, least=1)
    traced = _checks.is_traced(numerator) or _checks.is_traced(denominator)
    if not traced and int(numerator) // int(denominator) >= _LARGEST_SCALE:
        raise ValueError(
            f"numerator / denominator must be below 2^24, got {numerator} / {denominator}"
        )
    in_range = t // s < _LARGEST_SCALE
    t, s = jnp.where(in_range, t, 1), jnp.where(in_range, s, 1)
    # Traced, so that both kinds are one program.
    drawn = _discrete_laplace(check_key(key), t, s, math.prod(shape), jnp.bool_(signed))
    return jnp.where(valid & in_range, drawn.reshape(shape), _BAD)


# Parameters.


def _ratio(
    numerator: Any, denominator: Any, *, least: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Both as uint32, 1 where they are out of range, and whether they are in range."""
    a, a_valid = _parameter("numerator", numerator, least)
    b, b_valid = _parameter("denominator", denominator, 1)
    return (a, b), a_valid & b_valid


def _parameter(name: str, value: Any, least: int) -> tuple[jax.Array, jax.Array]:
    if not _checks.is_traced(value):
        number = _checks.integer(name, value, least=least, most=_LARGEST)
        return jnp.uint32(number), jnp.bool_(True)
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an integer, got a traced {value.dtype} of shape {value.shape};"
            " use jax.vmap for a grid of values"
        )
    if value.dtype.itemsize < 4:
        value = value.astype(jnp.int32)
    valid = (value >= least) & (value <= _LARGEST)
    return jnp.where(valid, value, 1).astype(jnp.uint32), valid


# One program for each machine and number of samples.


@partial(jax.jit, static_argnums=3)
def _bernoulli(key: jax.Array, a: jax.Array, b: jax.Array, count: int) -> jax.Array:
    return draw(key, Coin(a, b), count)[0] == 1


@partial(jax.jit, static_argnums=3)
def _bernoulli_exp(key: jax.Array, a: jax.Array, b: jax.Array, count: int) -> jax.Array:
    return draw(key, ExponentialCoin(a, b), count)[0] == 1


@partial(jax.jit, static_argnums=3)
def _discrete_laplace(
    key: jax.Array, t: jax.Array, s: jax.Array, count: int, signed: jax.Array
) -> jax.Array:
    twice, v = draw(key, Laplace(t, s, signed), count)
    size = quotient(magnitude(twice, v, t), s)
    return jnp.where(signed & (twice % np.uint32(2) == 1), -size, size)


@partial(jax.jit, static_argnums=3)
def _discrete_gaussian(
    key: jax.Array, numerator: jax.Array, denominator: jax.Array, count: int
) -> jax.Array:
    machine = Gaussian(numerator, denominator)
    twice, v = draw(key, machine, count)
    size = quotient(magnitude(twice, v, machine.t), jnp.uint32(1))
    return jnp.where(twice % np.uint32(2) == 1, -size, size)
