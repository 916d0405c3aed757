"""Kernel density estimation on the unit cube, and kernel regression on the unit interval."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database, PyTree
from dpjax._exact._grid import average, bits_of_a_digit, rounding_of_average
from dpjax._exact._numerics import compute_dtype, count_below, order_like_integers
from dpjax.targets._clamping import clip_and_replace_nan
from dpjax.targets._known_sensitivity import (
    Bound,
    BoundedSum,
    BoundedTarget,
    check_dims,
    dims_or_none,
    known_dims,
    sqrt_up,
    unit,
)
from dpjax.targets._minimizers import check_strength


def kernel_density(*, bandwidth: float, dims: int | None = None) -> BoundedTarget:
    """Kernel density estimation with a Gaussian kernel, as a function-valued target.

    f(t) = 1/(n h^dims) sum_i K((t - x_i) / h), where K is the density of dims independent standard
    normals. A record with a coordinate that is NaN or infinite has weight 0.

    Args:
        bandwidth: h, above 0, in the units of the records.
        dims: the number of coordinates of a record. With None, no sensitivity is known.

    Returns:
        A target with a known `sensitivity`, in linf. It maps records of shape (n, dims) to a
        function of points of shape (dims,). Use it with `dpjax.evaluate_on_lattice`.
        `kernel_density_on_lattice` computes the same values faster.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range; on a database, if it does not have shape
            (n, dims), or 1/h^dims is out of the range of its dtype; on a point, if it does not have
            shape (dims,).

    Formal guarantees:
        The linf sensitivity under replace-one, on any lattice, is (2 pi)^(-dims/2) / (n h^dims).
        Every value of the kernel is between 0 and K(0) = (2 pi)^(-dims/2), and so is every computed
        value. So replacing a record changes the estimate at a point by at most K(0) / (n h^dims).
        The bound is attained if a record at the point is replaced by a record at infinity. Kernels
        are added up in fixed point, so the order of the records does not matter. Rounding adds at
        most 9 eps K(0) / h^dims.

    Source:
        Rosenblatt (1956); Parzen (1962); Rubinstein and Aldà (2017), Section 7.3.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> density = targets.kernel_density(bandwidth=0.1)(jnp.array([[0.5]]))
        >>> round(float(density(jnp.array([0.5]))), 3)
        3.989
        >>> density = targets.kernel_density(bandwidth=0.1, dims=1)
        >>> round(density.sensitivity("linf", n=5000).value, 4)
        0.0008
    """
    h, dims = _checks.positive("bandwidth", bandwidth), dims_or_none(dims)

    def estimate(database: Database) -> Callable[[jax.Array], jax.Array]:
        if jnp.ndim(database) != 2:
            raise ValueError(f"database must have shape (n, dims), got {jnp.shape(database)}")
        x = database.astype(compute_dtype(database.dtype))
        d = x.shape[1]
        check_dims(dims, d)
        peak = _peak(h, d, x.dtype)

        def density(point: jax.Array) -> jax.Array:
            if jnp.shape(point) != (d,):
                raise ValueError(f"point must have shape ({d},), got {jnp.shape(point)}")
            kernels = gaussian_kernel(point.astype(x.dtype)[None], x, h)
            return average(jnp.prod(kernels, axis=1), 1.0) * peak

        return density

    return BoundedTarget(estimate, bound=_bound(h, dims), norms=("linf",))


def kernel_density_on_lattice(*, bandwidth: float, degree: int, dims: int) -> BoundedSum:
    """The values of `kernel_density` on the lattice of a Bernstein polynomial, as a target.

    Up to rounding, the target is the same as `dpjax.evaluate_on_lattice(kernel_density(
    bandwidth=h), degree=degree, dims=dims)`, but faster. A Gaussian kernel is a product over
    coordinates, so a record needs only dims (degree + 1) exponentials for all lattice points.

    Args:
        bandwidth: h, above 0, in the units of the records.
        degree: the degree of the polynomial, at least 1.
        dims: coordinates of a record, at least 1.

    Returns:
        A target with a known `sensitivity`, in linf. It maps records of shape (n, dims) to
        densities of shape (degree + 1,) * dims, where axis i is coordinate i. Release it by
        `dpjax.bernstein` with the same degree and dims.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: as for `kernel_density`.

    Formal guarantees:
        Those of `kernel_density`.

    Source:
        As for `kernel_density`.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.kernel_density_on_lattice(bandwidth=0.1, degree=2, dims=2)
        >>> target(jnp.array([[0.5, 0.5], [0.5, 1.0]])).round().tolist()
        [[0.0, 0.0, 0.0], [0.0, 8.0, 8.0], [0.0, 0.0, 0.0]]
    """
    h = _checks.positive("bandwidth", bandwidth)
    degree = _checks.integer("degree", degree, least=1)
    dims = _checks.integer("dims", dims, least=1)

    def kernels(record: PyTree) -> jax.Array:
        if jnp.shape(record) != (dims,):
            raise ValueError(f"records must have shape ({dims},), got {jnp.shape(record)}")
        x = record.astype(compute_dtype(record.dtype))
        axis = jnp.asarray(np.linspace(0.0, 1.0, degree + 1), x.dtype)
        # Each coordinate is a separate vector, because XLA is four times slower on the rows of one
        # array.
        return reduce(jnp.multiply.outer, [gaussian_kernel(axis, x[i], h) for i in range(dims)])

    def finish(average: jax.Array) -> jax.Array:
        return average * _peak(h, dims, average.dtype)

    return BoundedSum(kernels, finish, True, 1.0, bound=_bound(h, dims), norms=("linf",))


def _bound(h: float, dims: int | None) -> Bound:
    """Returns the sensitivity bound of `kernel_density` and of `kernel_density_on_lattice`.

    The docstring of `kernel_density` has the proof.
    """

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        size, d = _checks.integer("n", n, least=1), known_dims(dims)
        _peak(h, d, dtype)
        # `math.pi` is slightly below pi, so the peak is rounded up.
        less_than_pi = Fraction(math.pi)
        peak = Fraction(sqrt_up(1 / (2 * less_than_pi * Fraction(h) ** 2) ** d))
        # The term with `unit` covers the rounding of the peak, and of the product of the peak and
        # an average.
        rounding = rounding_of_average(Fraction(1), dtype) + (2 + Fraction(2, size)) * unit(dtype)
        return [peak * (Fraction(1, size) + rounding) + Fraction(float(np.finfo(dtype).tiny))]

    return bound


def gaussian_kernel(t: jax.Array, x: jax.Array, h: float) -> jax.Array:
    """Returns K((t - x) / h) / K(0) = exp(-((t - x) / h)^2 / 2); 0 if x is NaN."""
    return clip_and_replace_nan(jnp.exp(-jnp.square((t - x) / h) / 2), 0, 1)


def _peak(h: float, dims: int, dtype: np.dtype) -> float:
    """Returns K(0) / h^dims. Raises an error if it is out of the range of the dtype."""
    largest = float(np.finfo(dtype).max)
    # Logarithms are compared, because they do not overflow.
    if -dims * math.log(math.sqrt(2 * math.pi) * h) > math.log(largest) - 1:
        raise ValueError(
            "bandwidth must be larger, dims smaller, or the dtype wider: the peak of a density,"
            f" {h!r}^-{dims}, is too large for {dtype}; rescale the records, or use float64"
        )
    return (math.sqrt(2 * math.pi) * h) ** -dims


def priestley_chao(*, bandwidth: float) -> Callable[[Database], Callable[[jax.Array], jax.Array]]:
    """Priestley-Chao kernel regression with a Gaussian kernel, as a function-valued target.

    With records sorted by x, f(t) = (1/h) sum_{i >= 2} (x_i - x_{i-1}) K((t - x_i) / h) y_i. If
    several records have the same x, only the record with the least y counts.

    Args:
        bandwidth: h, above 0, in the units of x.

    Returns:
        A target, which maps {"x": (n,), "y": (n,)} to a function of points of shape (1,) in [0, 1].
        Use it with `dpjax.evaluate_on_lattice`.

    Raises:
        TypeError: if the bandwidth is not a number.
        ValueError: if the bandwidth is not above 0.

    Formal guarantees:
        No global bound is known: a single distant record can make a gap arbitrarily long. The
        target sorts its records, so it ignores their order.

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
        regularization: lambda, above 0. It adds lambda n K(0) to the denominator, which bounds the
            influence of a record at points with few records nearby.

    Returns:
        A target with a known `sensitivity`, in linf. It maps {"x": (n,), "y": (n,)} to a function
        of points of shape (1,) in [0, 1]. Use it with `dpjax.evaluate_on_lattice`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is not above 0.

    Formal guarantees:
        The linf sensitivity under replace-one, on any lattice, is min(2, 4 / (1 + lambda n)) plus
        rounding. The curve is between -1 and 1. Removing a record changes it by at most 2 K(0) /
        (K(0) + lambda n K(0)), and adding another record changes it by at most as much. The proof
        needs only that a response times its kernel is at most the kernel, even after rounding.
        Rounding of the two averages, their sum and quotient adds at most 20 eps if lambda and 1 / n
        are well above eps. Kernels are added up exactly, in fixed point, so the order of the
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
        # A record whose x is NaN or infinite has weight 0. If y is NaN, it counts as 0.
        y = clip_and_replace_nan(y, -1, 1)

        def curve(point: jax.Array) -> jax.Array:
            kernel = gaussian_kernel(point[0].astype(x.dtype), x, h)
            weight = jnp.maximum(average(kernel, 1.0) + share, np.finfo(x.dtype).tiny)
            return average(kernel * y, 1.0) / weight

        return curve

    def bound(n: int | None, dtype: np.dtype) -> list[Fraction]:
        size, exactly = _checks.integer("n", n, least=1), Fraction(check_strength(share))
        # Averages above this number have a bound on their relative error, and smaller averages have
        # a bound on their absolute error.
        least = Fraction(1, 2 ** bits_of_a_digit(size, dtype))
        rounding = 20 * unit(dtype) * (1 + least / exactly)
        return [min(4 / (1 + exactly * size) + rounding, 2 + 20 * unit(dtype))]

    return BoundedTarget(regress, bound=bound, norms=("linf",))


@jax.jit  # The function is jitted because JAX caches its trace, so targets are traced faster.
def _weighted(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sorted x, and for each of them the product gap * least.

    `gap` is the distance from the previous x. `least` is the least y of all records at x.
    """
    # On a CPU, XLA sorts integers six times faster than pairs of floats. So only the bits of x are
    # sorted, as integers, and a binary search then finds the position of each y.
    keys = order_like_integers(lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"))
    keys = jnp.where(keys == -1, 0, keys)  # -0.0 and 0.0 are the same x.
    in_order = lax.sort(keys)
    firsts = count_below(in_order, keys)
    # If several records have the same x, their least y is stored at the first of them. The minimum
    # of floats does not depend on their order, unless one of them is NaN.
    least = jnp.full_like(y, jnp.inf).at[firsts].min(jnp.where(jnp.isnan(y), jnp.inf, y))
    x = lax.bitcast_convert_type(order_like_integers(in_order), x.dtype)
    gaps = jnp.diff(x, prepend=x[:1])
    return x, jnp.where(gaps > 0, gaps * least, 0)
