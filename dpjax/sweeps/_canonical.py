"""What a coordinate is, whatever it was given as: what cells are known by, and their keys."""

import enum
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax._fingerprints import digest


def fingerprint_of_value(name: str, value: Any) -> bytes:
    """128 bits for a parameter and its value; alike for values that a function sees alike.

    A number counts as JAX holds it, whatever its dtype: 1, 1.0 and float32's 1 are one value, and
    so are 0.0 and -0.0. A function or a member of an enumeration counts by its name.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is None)
    parts = tuple((jax.tree_util.keystr(path), _canonical(name, leaf)) for path, leaf in leaves)
    return bytes.fromhex(digest(name, parts))


def as_seen(name: str, value: Any) -> np.ndarray:
    """Numbers in the dtype that JAX holds them in; what that changes beyond rounding is refused."""
    if jnp.issubdtype(getattr(value, "dtype", object), jax.dtypes.prng_key):
        raise TypeError(
            f"{name} must be numbers, got keys: make them of the key that the function is given"
        )
    array = _checks.host_numbers(name, value)
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    with np.errstate(all="ignore"):
        seen = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    overflow = np.isfinite(array) != np.isfinite(seen) if floats else seen != array
    if np.any(overflow):
        raise ValueError(f"{name} must fit {seen.dtype}, got {_checks.shown(value)}: enable x64")
    return seen


def name_of(value: Any) -> str | None:
    """The name of a function or of a member of an enumeration; None of anything else."""
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__name__", None) if callable(value) else None


def _canonical(name: str, leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (bool, np.bool_)):
        return "constant", str(leaf)
    if (text := leaf if isinstance(leaf, str) else name_of(leaf)) is not None:
        return "text", text
    if isinstance(leaf, int):
        return "number", str(leaf)  # A static one may exceed JAX's integers.
    array = as_seen(name, leaf)
    if array.ndim:
        return "array", array
    if array.dtype == bool:
        return "constant", str(bool(array))
    if np.isnan(array):
        raise ValueError(f"{name} must not hold NaN, which is no place on a grid")
    number = float(array) if jnp.issubdtype(array.dtype, jnp.floating) else int(array)
    return "number", str(number if np.isinf(array) else Fraction(number))
