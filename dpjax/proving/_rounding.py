"""Outward rounding on the host, and bounds on the rounding errors of a device.

The host computes bounds in float64, and multiplies sums and products of bounds by 1 + 2^-44. This
covers the rounding errors of the host: no formula in `proving` has more than 100 consecutive
operations, and sums of N terms are increased by N + 100 units.

The device computes v (1 + theta) + eta instead of the exact value v. |theta| is at most a few u,
where u = eps / 2 is the unit roundoff. |eta| is at most a few times the smallest normal number,
because a device may flush subnormal numbers to 0. A compiler may fuse a product and a sum into one
FMA, which rounds less. It may also multiply by the reciprocal of a constant instead of dividing;
`DIVISION` covers that.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dpjax._core._bounds import LARGEST

# Bounds on the relative error in units of u: for sums and products, and for quotients and square
# roots. A device that follows IEEE 754 is within one u. XLA documents no bound, so these numbers
# include a margin.
ARITHMETIC, DIVISION = 2, 8
# If a denominator has a smaller magnitude than this, XLA might rewrite the program. The new program
# might overflow although the original does not.
SMALLEST_DENOMINATOR = 1 / LARGEST
_INFLATION = 1 + 2.0**-44
_FLOOR = 2.0**-900


def up(bound: np.ndarray | float) -> np.ndarray:
    """Rounds a nonnegative bound up, to cover the rounding of the host. 0 remains 0."""
    return np.asarray(bound, float) * _INFLATION


def times(first: np.ndarray | float, second: np.ndarray | float) -> np.ndarray:
    """Returns a product of bounds, rounded up. It is above 0 if both factors are."""
    if isinstance(first, float) and isinstance(second, float):  # Much faster than with arrays.
        positive = first > 0 and second > 0
        found = max(float(first) * float(second) * _INFLATION, _FLOOR) if positive else 0.0
        return np.asarray(found)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = np.asarray(up(np.multiply(first, second)))
    positive = (np.asarray(first) > 0) & (np.asarray(second) > 0)
    return np.where(positive, np.maximum(product, _FLOOR), 0.0)


def widened(
    low: np.ndarray, high: np.ndarray, below: np.ndarray, above: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Widens an interval by the errors at its endpoints, and by the rounding of the host."""
    slack, above = 2.0**-44, below if above is None else above
    return low - np.abs(low) * slack - below, high + np.abs(high) * slack + above


# Floats of 16 bits. A compiler may use more than 16 bits for some operations.
NARROW = frozenset((np.dtype(np.float16), np.dtype(jnp.bfloat16)))
_WIDE = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
_INTEGERS = (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
USUAL = _WIDE | frozenset(map(np.dtype, ("bool", *_INTEGERS)))
# The dtypes that have rules. NumPy's `kind` cannot replace this list, because float8_e5m2 and
# float32 have the same kind.
KNOWN = USUAL | NARROW


def is_float(dtype: np.dtype) -> bool:
    """Whether operations in this dtype are rounded."""
    return dtype in _WIDE or dtype in NARROW


def unit(dtype: np.dtype) -> float:
    """Returns the unit roundoff u; 0 for integers and booleans, which are exact."""
    return float(jnp.finfo(dtype).eps) / 2 if is_float(dtype) else 0.0


def elementary(dtype: np.dtype) -> float:
    """Returns a bound on the error of an elementary function, divided by the unit roundoff u.

    XLA's implementations for CPUs and GPUs have errors up to about 8 u in float32. In float64,
    log1p on a CPU has an error of 128 u near -0.414.
    """
    return 1024.0 if dtype.itemsize == 8 else 128.0


def of_quotient(error: float, dtype: np.dtype) -> float:
    """Returns the relative error of a quotient of two numbers with relative error e <= 1/3.

    Before it is rounded, the quotient has a relative error of at most 2 e / (1 - e) <= 1. So it is
    at most twice the true quotient. Rounding changes it by at most `DIVISION` * u times itself, so
    by at most 2 `DIVISION` * u times the true quotient.
    """
    return 2 * error / (1 - error) + 2 * DIVISION * unit(dtype)


def norm2(numbers: np.ndarray | Sequence[float], copies: float = 1.0) -> float:
    """Returns the l2 norm of bounds, each counted `copies` times.

    It is above 0 if any bound is above 0.
    """
    array = np.asarray(numbers, float)
    largest = float(array.max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return largest
    # Without scaling, squares of small numbers would underflow to 0. Scaling by a power of 2 is
    # exact.
    scale = 2.0 ** np.frexp(largest)[1]
    return float(scale * np.sqrt(((array / scale) ** 2).sum() * copies))


def tiny(dtype: np.dtype) -> float:
    """Returns the smallest normal number; 0 for integers."""
    return float(jnp.finfo(dtype).tiny) if is_float(dtype) else 0.0


def largest(dtype: np.dtype) -> float:
    """Returns the largest magnitude that a proof allows in a dtype."""
    return min(LARGEST, float(jnp.finfo(dtype).max) / 2) if is_float(dtype) else 2.0**52


def most_bits(dtype: np.dtype) -> float:
    """Returns a bound that keeps the product of some factors f from overflow and underflow.

    If the sum of |log2 f| over all factors is at most this bound, no product of some of the factors
    overflows or underflows.
    """
    return float(min(jnp.finfo(dtype).maxexp, -jnp.finfo(dtype).minexp)) - 2


def sum_units(count: int, dtype: np.dtype) -> float:
    """Returns gamma, the relative error of a sum of `count` terms in any order.

    See Higham 2002, equation 4.6.
    """
    steps = (count + 4) * unit(dtype)
    return steps / (1 - steps) if steps < 0.5 else np.inf


def exact_integers(dtype: np.dtype) -> float:
    """Returns the largest magnitude up to which sums of integers are exact, in any order."""
    return 2.0 ** (jnp.finfo(dtype).nmant + 1) if is_float(dtype) else 2.0**52


def holds(low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a dtype can represent all integers in an interval."""
    largest = max(float(np.abs(low).max()), float(np.abs(high).max()))
    return dtype.kind != "f" or largest <= exact_integers(dtype)
