"""Public intervals that private numbers are clamped to."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype


def check_interval(lower: Any, upper: Any) -> tuple[float, float]:
    """Two finite public numbers, in order."""
    low, high = _finite("lower", lower), _finite("upper", upper)
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    return low, high


def clamp(x: jax.Array, lower: float, upper: float) -> jax.Array:
    """Floats in [lower, upper], whose ends are rounded inward to the dtype; NaN counts as lower.

    Without that, float32 numbers would span more than the interval that a bound speaks of. Nor are
    there subnormal numbers, which some operations of XLA take for 0 and others do not.
    """
    dtype = compute_dtype(x.dtype)
    low, high = _round_inward(lower, upper, dtype)
    numbers = x.astype(dtype)
    numbers = jnp.where(jnp.abs(numbers) < jnp.finfo(dtype).tiny, 0, numbers)
    return jnp.clip(jnp.where(jnp.isnan(numbers), low, numbers), low, high)


def _finite(name: str, value: Any) -> float:
    wanted = f"{name} must be a finite number"
    if _checks.is_traced(value) or isinstance(value, (bool, np.bool_, str)) or np.ndim(value) != 0:
        raise TypeError(f"{wanted}, got {_checks.shown(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {_checks.shown(value)}") from error
    if not math.isfinite(number):
        raise ValueError(f"{wanted}, got {number:g}")
    return number


def _round_inward(lower: float, upper: float, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    largest = float(jnp.finfo(dtype).max)
    low, high = (np.asarray(np.clip(x, -largest, largest), dtype) for x in (lower, upper))
    with np.errstate(over="ignore"):
        if float(low) < lower:
            low = np.nextafter(low, np.asarray(math.inf, dtype))
        if float(high) > upper:
            high = np.nextafter(high, np.asarray(-math.inf, dtype))
    tiny = jnp.finfo(dtype).tiny
    if 0 < abs(low) < tiny:
        low = np.asarray(tiny if low > 0 else 0, dtype)
    if 0 < abs(high) < tiny:
        high = np.asarray(0 if high > 0 else -tiny, dtype)
    if low > high:
        raise ValueError(
            f"lower and upper must have a {dtype} between them, got {lower!r} and {upper!r}"
        )
    return jnp.asarray(low), jnp.asarray(high)
