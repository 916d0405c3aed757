"""Functions that clamp private records to public intervals and balls."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype, is_float


def check_known(name: str, value: object) -> None:
    """Raises an error for a traced parameter that must be concrete when the target is made."""
    if _checks.is_traced(value):
        raise TypeError(f"{name} must be known when the target is made, got {_checks.shown(value)}")


def check_interval(lower: float, upper: float) -> tuple[float, float]:
    """Checks that two public numbers are finite and in order, and returns them."""
    check_known("lower", lower)
    check_known("upper", upper)
    low, high = _checks.finite("lower", lower), _checks.finite("upper", upper)
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    return low, high


def middle_and_half(low: float, high: float) -> tuple[float, float]:
    """Returns the middle of an interval and half of its length, without overflow."""
    return low / 2 + high / 2, high / 2 - low / 2


def clamp(x: jax.Array, lower: float, upper: float) -> jax.Array:
    """Converts numbers to floats and clamps them to [lower, upper]; NaN counts as lower.

    The ends are rounded inward to the dtype. If they were rounded to nearest, their difference
    could exceed upper - lower, and a sensitivity computed from these numbers would be wrong.
    """
    numbers = comparable(x)
    # NumPy integers of 8 bits would wrap around: -np.int8(-128) is -128.
    low = _round_up(float(lower), numbers.dtype)
    high = 0 - _round_up(-float(upper), numbers.dtype)
    if low > high:
        raise ValueError(
            f"lower and upper must have a {numbers.dtype} number between them, got {lower!r} and"
            f" {upper!r}"
        )
    return clip_and_replace_nan(numbers, jnp.asarray(low), jnp.asarray(high), nan=low)


def clip_and_replace_nan(
    x: jax.Array, lower: ArrayLike, upper: ArrayLike, *, nan: ArrayLike = 0
) -> jax.Array:
    """Clips floats to [lower, upper], and replaces NaN by `nan`."""
    return jnp.clip(jnp.where(jnp.isnan(x), nan, x), lower, upper)


def comparable(numbers: jax.Array) -> jax.Array:
    """Converts to floats, and replaces subnormal floats by 0.

    A comparison with a subnormal float depends on threads and devices.
    """
    return without_subnormals(numbers.astype(compute_dtype(numbers.dtype)))


def without_subnormals(numbers: jax.Array) -> jax.Array:
    """Replaces subnormal floats by 0, as some operations of XLA do."""
    if not is_float(numbers):
        return numbers
    # `ml_dtypes`, which this `finfo` comes from, has no type annotations.
    subnormal = jnp.abs(numbers) < jnp.finfo(numbers.dtype).tiny  # pyright: ignore
    return jnp.where(subnormal, 0, numbers)  # pyright: ignore


def increasing(wanted: str, numbers: ArrayLike | Sequence[float], *, least: int) -> np.ndarray:
    """Checks that there are at least `least` increasing numbers, and returns them in float64.

    `wanted` is the beginning of the error message.
    """
    try:
        array = np.array(numbers, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {_checks.shown(numbers)}") from error
    if array.ndim != 1 or array.size < least or not np.all(array[1:] > array[:-1]):
        raise ValueError(f"{wanted}, got {_checks.shown(numbers)}")
    array.setflags(write=False)  # Programs that contain a read-only array can be cached.
    return array


def _round_up(number: float, dtype: np.dtype) -> np.ndarray:
    """Returns the least float of a dtype that is at least `number` and is not subnormal.

    Some devices replace a subnormal end of an interval by 0, which may be outside of the interval.
    """
    largest, tiny = float(np.finfo(dtype).max), np.finfo(dtype).tiny
    rounded = np.asarray(np.clip(number, -largest, largest), dtype)
    if float(rounded) < number:
        with np.errstate(over="ignore"):
            rounded = np.nextafter(rounded, np.asarray(np.inf, dtype))
    if 0 < abs(rounded) < tiny:
        rounded = np.asarray(tiny if rounded > 0 else 0, dtype)
    return rounded


def into_unit_ball(x: jax.Array) -> jax.Array:
    """Scales vectors along the last axis down to length 1; NaN counts as 0.

    Vectors of length at most 1 do not change. Computed lengths are rounded up, so no result is
    longer than 1. Results are float32 or wider.
    """
    # This limit is far above any useful feature, and its square is finite. Without the clip, an
    # infinite feature would lead to infinity / infinity.
    x = clip_and_replace_nan(x.astype(compute_dtype(x.dtype)), -1e15, 1e15)
    length = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    margin = 1 + (x.shape[-1] + 8) * float(np.finfo(x.dtype).eps)
    return x / jnp.maximum(length * margin, 1)
