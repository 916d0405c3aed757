"""Kernel regression: functions of a database on the unit interval."""

import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database
from dpjax._exact._fixed_point import average, bits_of_a_digit
from dpjax._exact._numerics import compute_dtype, count_below, order_like_integers, round_up
from dpjax.targets._bounds import VectorNorm, unit
from dpjax.targets._interval import clip_and_replace_nan
from dpjax.targets._kernel_density import gaussian_kernel
from dpjax.targets._known_sensitivity import BoundedTarget
from dpjax.targets._strong_convexity import check_strength


def priestley_chao(*, bandwidth: float) -> Callable[[Database], Callable[[jax.Array], jax.Array]]:
    """Priestley-Chao kernel regression with a Gaussian kernel, as a function-valued target.

    With records sorted by x, f(t) = (1/h) sum_{i >= 2} (x_i - x_{i-1}) K((t - x_i) / h) y_i. If
    records have the same x, only the one with the least y counts.

    Args:
        bandwidth: h, above 0, in the units of x.

    Returns:
        A target: takes {"x": (n,), "y": (n,)} to a function of points of shape (1,) in [0, 1]. Use
        it through `dpjax.evaluate_on_lattice`.

    Raises:
        TypeError: if the bandwidth is not a number.
        ValueError: if it is not above 0.

    Formal guarantees:
        No global bound is known: a distant record stretches a gap without limit. The target sorts
        its records, so it ignores their order.

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

    def regress(database: Database) -> Callable[[jax.Array], jax.Array]:
        dtype = compute_dtype(database["x"].dtype)
        x, weights = _weighted(database["x"].astype(dtype), database["y"].astype(dtype))
        weights /= h * math.sqrt(2 * math.pi)

        def curve(point: jax.Array) -> jax.Array:
            kernel = jnp.exp(jnp.square((point[0] - x) / h) * -0.5)
            return jnp.dot(weights, kernel, precision=lax.Precision.HIGHEST)

        return curve

    return regress


def nadaraya_watson(*, bandwidth: float, regularization: float = 1e-2) -> BoundedTarget:
    """Nadaraya-Watson kernel regression with a Gaussian kernel, as a function-valued target.

    f(t) = sum_i K((t - x_i) / h) y_i / (sum_i K((t - x_i) / h) + lambda n K(0)). This is a weighted
    average of the responses, clipped to [-1, 1]. It shrinks to 0 where there are few records.

    Args:
        bandwidth: h, above 0, in the units of x.
        regularization: lambda, above 0. The denominator grows by lambda n K(0), which bounds the
            influence of a record where there are few.

    Returns:
        A target with a known `sensitivity`, in linf: takes {"x": (n,), "y": (n,)} to a function of
        points of shape (1,) in [0, 1]. Use it through `dpjax.evaluate_on_lattice`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is not above 0.

    Formal guarantees:
        The linf sensitivity under replace-one, on any lattice, is min(2, 4 / (1 + lambda n)), and
        rounding. The curve lies between -1 and 1. Taking a record out moves it by at most
        2 K(0) / (K(0) + lambda n K(0)), and putting another in moves it by as much again. The proof
        only needs that a response times its kernel is at most the kernel, also after rounding.
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

    def regress(database: Database) -> Callable[[jax.Array], jax.Array]:
        x = database["x"].astype(compute_dtype(database["x"].dtype))
        y = database["y"].astype(x.dtype)
        # A record whose x is NaN or infinite has weight 0. A y that is NaN counts as 0.
        y = clip_and_replace_nan(y, -1, 1)

        def curve(point: jax.Array) -> jax.Array:
            kernel = gaussian_kernel(point[0].astype(x.dtype), x, h)
            weight = jnp.maximum(average(kernel, 1.0) + share, np.finfo(x.dtype).tiny)
            return average(kernel * y, 1.0) / weight

        return curve

    def bound(norm: VectorNorm, n: int | None, dtype: np.dtype) -> float:
        del norm  # linf.
        size, exactly = _checks.integer("n", n, least=1), Fraction(check_strength(share))
        # The errors of averages are relative to them above this size, and absolute below it.
        least = Fraction(1, 2 ** bits_of_a_digit(size, dtype))
        rounding = 20 * unit(dtype) * (1 + least / exactly)
        return round_up(min(4 / (1 + exactly * size) + rounding, 2 + 20 * unit(dtype)))

    return BoundedTarget(regress, bound=bound, norms=("linf",))


@jax.jit  # Which JAX traces once, and not at every call that traces the target.
def _weighted(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorted x, and each gap below one times its least y; the first x has no gap, and weighs 0."""
    x, y = _by_x(x, y)
    gaps = jnp.diff(x, prepend=x[:1])
    return x, jnp.where(gaps > 0, gaps * y, 0)


def _by_x(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts records by x. Of those with the same x, the first gets the least y, others infinity.

    On a CPU, XLA sorts integers six times faster than floats with a payload. So the bits of x are
    sorted alone, as integers, and each y finds its place by a binary search.
    """
    keys = order_like_integers(lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"))
    keys = jnp.where(keys == -1, 0, keys)  # -0.0 is the same x as 0.0.
    in_order = lax.sort(keys)
    firsts = count_below(in_order, keys)
    # The minimum of floats does not depend on their order, unless one is NaN.
    least = jnp.full_like(y, jnp.inf).at[firsts].min(jnp.where(jnp.isnan(y), jnp.inf, y))
    return lax.bitcast_convert_type(order_like_integers(in_order), x.dtype), least
