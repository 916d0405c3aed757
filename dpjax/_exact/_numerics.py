"""Numerics: float dtypes, outward rounding, extrema, counting, and confidence limits."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, SupportsFloat, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.typing import ArrayLike, DTypeLike

_LEAST = np.finfo(np.float32).tiny
# A generous bound on the relative error of SciPy's inverse incomplete beta functions.
_BETA_ROUNDING = 1e-9
# A `TailBand` has several points, and a limit for each point. The rank of each point is `_RATIO`
# times the rank of the point before. For a number x between two points, the limit of the lower
# point is used. It is at most about `_RATIO` times the limit that would be computed for x itself.
_RATIO = 1.05
# A bound on the relative rounding error of a sum of products of numbers in [0, 1].
_SUM = 1e-12


def float_limits(dtype: DTypeLike) -> "np.finfo[np.floating]":
    """Returns the limits of a float dtype, including bfloat16, with the type of `np.finfo`."""
    return cast("np.finfo[np.floating]", jnp.finfo(dtype))


def compute_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype to compute in: at least float32, and JAX's default float for integers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(jnp.result_type(float))
    return np.promote_types(np.dtype(dtype), np.float32)


def is_float(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """Whether the dtype of an array is a float."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def is_key(x: Any) -> bool:
    """Whether an array, or a description of one, has a dtype of keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def order_like_integers(bits: jax.Array) -> jax.Array:
    """Maps the bits of floats, as signed integers, to integers that are ordered like the floats.

    The map is its own inverse.
    """
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def extremum(x: jax.Array, reduce: Callable[[jax.Array], jax.Array], *, largest: bool) -> jax.Array:
    """Returns the largest or smallest float; NaN if any float is NaN.

    It reduces integers that are ordered like the floats, because XLA may ignore NaN when it reduces
    floats on a CPU.
    """
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    whole = jnp.dtype(f"int{8 * wide.dtype.itemsize}")
    beyond = jnp.iinfo(whole).max if largest else jnp.iinfo(whole).min  # The bits of a NaN.
    ordered = order_like_integers(lax.bitcast_convert_type(wide, whole))
    found = order_like_integers(reduce(jnp.where(jnp.isnan(wide), beyond, ordered)))
    return lax.bitcast_convert_type(found, wide.dtype).astype(x.dtype)


def count_below(ascending: jax.Array, numbers: jax.Array, *, or_equal: bool = False) -> jax.Array:
    """Returns, for each number, how many entries of a sorted array are below it.

    With `or_equal`, equal entries count, too.

    No number is below NaN, and NaN is below no number. But `jnp.searchsorted` would treat NaN as
    the largest number. `jnp.searchsorted` also takes three times as long, because it tracks both
    ends of an interval.
    """
    ascending, compare = jnp.asarray(ascending), jnp.less_equal if or_equal else jnp.less

    def before(place: jax.Array) -> jax.Array:
        return compare(ascending.at[place].get(mode="promise_in_bounds"), numbers)

    return bisected(before, len(ascending), numbers.shape)


def bisected(
    before: Callable[[jax.Array], jax.Array], count: int, shape: tuple[int, ...]
) -> jax.Array:
    """Returns how many of `count` sorted entries come before each element of an array.

    Args:
        before: takes an index from 0 to count - 1 for each element, as an array of this shape, or
            one index for all. Returns whether the entry at the index comes before the element.
        count: the number of entries.
        shape: the shape of the array.
    """
    if count == 0:
        return jnp.zeros(shape, jnp.int32)
    digits = count.bit_length()

    def digit(i: ArrayLike, found: jax.Array) -> jax.Array:
        more = found + (jnp.int32(1) << (digits - 1 - i))
        return jnp.where((more <= count) & before(jnp.minimum(more, count) - 1), more, found)

    # Under `shard_map`, if the results of a loop vary over devices, the initial carry must be an
    # array that varies, too. So the first digit is computed from the data, before the loop. The
    # count starts as the scalar 0. It is not an array of zeros, because XLA would fold that
    # constant at compile time.
    return lax.fori_loop(1, digits, digit, digit(0, jnp.int32(0)))


def round_up(exact: Fraction) -> float:
    """Returns the smallest float64 that is at least `exact`; raises ValueError if there is none."""
    try:
        nearest = float(exact)
    except OverflowError:
        raise ValueError(
            "the bound must not exceed the largest float64, got a larger number: rescale the target"
        ) from None
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def outward(number: Any, toward: float) -> Any:
    """Converts a float64 to JAX's default float; `toward` is inf to round up, -inf to round down.

    Without x64, JAX converts float64 to float32 and rounds to nearest, which is the wrong direction
    half of the time. This affects Python floats, float64 arrays of NumPy, and JAX arrays that were
    made under x64. Other values are returned as they are.
    """
    array = isinstance(number, (np.ndarray, jax.Array)) and not isinstance(number, jax.core.Tracer)
    is_float64 = number.dtype == np.float64 if array else isinstance(number, float)
    if not is_float64 or jnp.result_type(float) == np.float64:
        return number
    wide = np.asarray(number)
    with np.errstate(all="ignore"):
        narrow = wide.astype(np.float32)
        inward = narrow < wide if toward > 0 else narrow > wide
        narrow = np.where(inward, np.nextafter(narrow, np.float32(toward)), narrow)
    # A device may flush subnormal numbers to 0, so they are replaced by the smallest normal number.
    if toward > 0:
        narrow = np.where(wide > 0, np.maximum(narrow, _LEAST), narrow)
    return float(narrow) if isinstance(number, float) else narrow


def bisect(
    holds: Callable[[float], bool], low: float, high: float, *, in_logarithms: bool = False
) -> tuple[float, float]:
    """Finds by bisection where a predicate changes from true to false.

    Returns:
        Two neighboring floats, or nearly so. The predicate is true at the first one if it is true
        at `low`, and false at the second one if it is false at `high`.
    """
    while low < (middle := math.sqrt(low * high) if in_logarithms else (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def sum_up(terms: Iterable[SupportsFloat]) -> float:
    """Returns the sum of concrete numbers, rounded up to a float64."""
    numbers = [float(term) for term in terms]
    if not all(math.isfinite(number) for number in numbers):
        return math.fsum(numbers)
    return round_up(sum(map(Fraction, numbers), Fraction(0)))


def log_difference(larger: jax.Array, smaller: jax.Array) -> jax.Array:
    """Returns log(exp(larger) - exp(smaller)).

    If `smaller` is -inf, the result is exactly `larger`. If both are equal, the result is -inf.
    """
    gap = jnp.where(larger > smaller, smaller - larger, -jnp.inf)
    return jnp.where(larger > smaller, larger + jnp.log(-jnp.expm1(gap)), -jnp.inf)


@functools.lru_cache
def legendre_rule(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes on [-1, 1] and the log weights of Gauss-Legendre quadrature.

    The host computes them in float64, by NumPy: importing `scipy.special` instead would take longer
    than counting the rows of a table.
    """
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return nodes, np.log(weights)


def clopper_pearson_lower(hits: ArrayLike, trials: int, error: float) -> np.ndarray:
    """Returns a lower limit of a probability, from the number of hits in `trials` trials.

    The true probability is below the limit with probability at most `error`.
    """
    hits = np.asarray(hits, float)
    # For 0 hits the limit is 0, but SciPy needs valid parameters in this case, too.
    limit = scipy.special.betaincinv(np.maximum(hits, 0.5), trials - hits + 1, error)
    return np.where(hits <= 0, 0.0, limit * (1 - _BETA_ROUNDING))


def clopper_pearson_upper(hits: ArrayLike, trials: int, error: float) -> np.ndarray:
    """Returns an upper limit of a probability, from the number of hits in `trials` trials.

    The true probability is above the limit with probability at most `error`.
    """
    hits = np.asarray(hits, float)
    limit = scipy.special.betainccinv(hits + 1, np.maximum(trials - hits, 0.5), error)
    return np.where(hits >= trials, 1.0, np.minimum(limit * (1 + _BETA_ROUNDING), 1.0))


@dataclasses.dataclass(frozen=True, eq=False)
class TailBand:
    """Simultaneous upper limits of P(X > x) for many x (docs/proofs/privacy-profile.md).

    Attributes:
        points: some of m independent draws of X, in descending order.
        limits: an upper limit of P(X > x) for each point, in ascending order.
    """

    points: np.ndarray
    limits: np.ndarray

    @classmethod
    def of(cls, draws: np.ndarray, error: Fraction) -> "TailBand":
        """Returns the band for independent draws, which fails with probability at most `error`.

        NaN counts as infinity. The ranks depend only on the number of draws.
        """
        m = draws.size
        steps = math.ceil(math.log(m) / math.log(_RATIO)) + 1
        ranks = np.unique(np.minimum(np.ceil(_RATIO ** np.arange(steps)), m)).astype(np.int64)
        ordered = np.sort(np.where(np.isnan(draws), np.inf, draws), stable=True)[::-1]
        each = float(error / len(ranks)) * (1 - 1e-15)
        limits = clopper_pearson_upper(ranks - 1, m, each)
        return cls(ordered[ranks - 1], np.maximum.accumulate(limits))

    def least(self, covered: np.ndarray) -> float:
        """Returns the smallest limit of the points that `covered` selects; 1 if it selects none."""
        return float(np.min(self.limits, where=covered, initial=1.0))

    def mean(self, curve: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns an upper limit of E[curve(X)], for every nondecreasing curve into [0, 1].

        Above the largest point, `curve` is assumed to be 1.

        Args:
            curve: a function of the array of points, which returns an array with a leading axis for
                the points.
        """
        values = curve(self.points)
        masses = np.diff(np.append(self.limits, 1.0))
        return np.minimum((self.limits[0] + masses @ values) * (1 + _SUM), 1.0)
