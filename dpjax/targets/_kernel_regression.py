"""Kernel regression: functions of a database on the unit interval."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._exact._fixed_point import average, bits_of_a_digit
from dpjax._exact._numerics import compute_dtype, round_up
from dpjax.targets._bounds import VectorNorm, unit
from dpjax.targets._known_sensitivity import BoundedTarget
from dpjax.targets._strong_convexity import check_strength


def priestley_chao(*, bandwidth: float) -> Callable[[Any], Callable[[jax.Array], jax.Array]]:
    """Priestley-Chao kernel regression with a Gaussian kernel, as a function-valued target.

    With records sorted by x, f(t) = (1/h) sum_{i >= 2} (x_i - x_{i-1}) K((t - x_i) / h) y_i. Of
    records with the same x, the one with the least y counts.

    Args:
        bandwidth: h, above 0, in the units of x.

    Returns:
        A target: takes {"x": (n,), "y": (n,)} to a function of points of shape (1,) in [0, 1]. Use
        it through `dpjax.on_lattice`.

    Raises:
        TypeError: if the bandwidth is not a number.
        ValueError: if it is not above 0.

    Formal guarantees:
        No global bound is known: a record far out stretches a gap without limit. Sorting makes the
        target ignore the order of records.

    Source:
        Priestley and Chao (1972).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> regress = targets.priestley_chao(bandwidth=0.1)
        >>> curve = regress({"x": jnp.linspace(0, 1, 50), "y": jnp.ones(50)})
        >>> round(float(curve(jnp.array([0.5]))), 3)
        1.0
    """
    h = _checks.positive("bandwidth", bandwidth)

    def regress(database: Any) -> Callable[[jax.Array], jax.Array]:
        dtype = compute_dtype(database["x"].dtype)
        x, y = _by_x(database["x"].astype(dtype), database["y"].astype(dtype))
        gaps = jnp.diff(x, prepend=x[:1])
        weights = jnp.where(gaps > 0, gaps * y / h, 0)

        def curve(point: jax.Array) -> jax.Array:
            kernel = _gaussian_kernel((point[0] - x) / h)
            return jnp.dot(weights, kernel, precision=lax.Precision.HIGHEST)

        return curve

    return regress


def nadaraya_watson(*, bandwidth: float, regularization: float = 1e-2) -> BoundedTarget:
    """Nadaraya-Watson kernel regression with a Gaussian kernel, as a function-valued target.

    f(t) = sum_i K((t - x_i) / h) y_i / (sum_i K((t - x_i) / h) + lambda n K(0)): a weighted average
    of the responses, clipped to [-1, 1], that shrinks to 0 where there are few records.

    Args:
        bandwidth: h, above 0, in the units of x.
        regularization: lambda, the share of n that the denominator is raised by, above 0; it
            bounds the influence of a record where there are few.

    Returns:
        A target with a known `sensitivity`, in linf: takes {"x": (n,), "y": (n,)} to a function of
        points of shape (1,) in [0, 1]. Use it through `dpjax.on_lattice`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is not above 0.

    Formal guarantees:
        The linf sensitivity under replace-one, on any lattice, is min(2, 4 / (1 + lambda n)), and
        rounding. The curve lies between -1 and 1. Taking a record out moves it by at most
        2 K(0) / (K(0) + lambda n K(0)); putting another in moves it by as much again. A rounded
        response times its kernel is never larger than the kernel, which is all that this needs.
        Rounding the two averages, their sum and quotient adds at most 20 eps, where lambda and
        1 / n are well above eps. Kernels are added up in fixed point, exactly, so the order of the
        records does not matter.

    Source:
        Nadaraya (1964); Watson (1964).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> regress = targets.nadaraya_watson(bandwidth=0.1)
        >>> curve = regress({"x": jnp.linspace(0, 1, 50), "y": jnp.ones(50)})
        >>> bool(curve(jnp.array([0.5])) > 0.9)
        True
        >>> round(regress.sensitivity("linf", n=300).value, 4)
        1.0
    """
    h = _checks.positive("bandwidth", bandwidth)
    share = _checks.positive("regularization", regularization)

    def regress(database: Any) -> Callable[[jax.Array], jax.Array]:
        x = database["x"].astype(compute_dtype(database["x"].dtype))
        y = database["y"].astype(x.dtype)
        # A record whose x is NaN or infinite weighs nothing, one whose y is NaN counts as 0.
        y = jnp.clip(jnp.where(jnp.isnan(y), 0, y), -1, 1)

        def curve(point: jax.Array) -> jax.Array:
            kernel = jnp.exp(-jnp.square((point[0].astype(x.dtype) - x) / h) / 2)
            kernel = jnp.clip(jnp.where(jnp.isnan(kernel), 0, kernel), 0, 1)
            weight = jnp.maximum(average(kernel, 1.0) + share, jnp.finfo(x.dtype).tiny)
            return average(kernel * y, 1.0) / weight

        return curve

    def bound(norm: VectorNorm, n: int | None, dtype: np.dtype) -> float:
        del norm  # linf.
        size, exactly = _checks.integer("n", n, least=1), Fraction(check_strength(share))
        # What two averages are off by is relative to them down to here, and absolute below.
        least = Fraction(1, 2 ** bits_of_a_digit(size, dtype))
        rounding = 20 * unit(dtype) * (1 + least / exactly)
        return round_up(min(4 / (1 + exactly * size) + rounding, 2 + 20 * unit(dtype)))

    return BoundedTarget(regress, bound=bound, norms=("linf",))


def _by_x(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Records sorted by x; of those with the same x the first has the least y, others infinity.

    On a CPU, XLA sorts integers in a sixth of the time that it takes for floats with a payload.
    """
    keys = _order_like_integers(lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"))
    keys = jnp.where(keys == -1, 0, keys)  # -0.0 is the same x as 0.0.
    in_order = lax.sort(keys)
    firsts = jnp.searchsorted(in_order, keys)
    # A minimum knows no order, but for NaN.
    least = jnp.full_like(y, jnp.inf).at[firsts].min(jnp.where(jnp.isnan(y), jnp.inf, y))
    return lax.bitcast_convert_type(_order_like_integers(in_order), x.dtype), least


def _order_like_integers(bits: jax.Array) -> jax.Array:
    """The bits of floats as integers of the same order; the same again leads back."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _gaussian_kernel(u: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.square(u) / 2) / jnp.sqrt(jnp.asarray(2 * jnp.pi, u.dtype))
