"""Canonical forms of coordinates, from which fingerprints and keys of cells are made."""

import enum
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._tracing._fingerprints import digest


def fingerprint_of_value(name: str, value: PyTree) -> bytes:
    """128 bits for a parameter and its value, equal for values that are equal to the function.

    A number counts as JAX holds it, for any dtype: 1, 1.0 and float32's 1 are one value, and so are
    0.0 and -0.0. A function or a member of an enumeration counts by its name.
    """

    def is_none(node: object) -> bool:
        return node is None

    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_none)
    parts = tuple((jax.tree_util.keystr(path), _canonical(name, leaf)) for path, leaf in leaves)
    return bytes.fromhex(digest(name, parts))


def as_held(name: str, value: ArrayLike) -> np.ndarray:
    """Numbers in the dtype in which JAX holds them; refuses numbers that do not fit."""
    if jnp.issubdtype(getattr(value, "dtype", object), jax.dtypes.prng_key):
        raise TypeError(
            f"{name} must be numbers, got keys: derive keys from the key that the function takes"
        )
    array = _checks.host_numbers(name, value)
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    with np.errstate(all="ignore"):
        held = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    overflow = np.isfinite(array) != np.isfinite(held) if floats else held != array
    if np.any(overflow):
        raise ValueError(f"{name} must fit {held.dtype}, got {_checks.shown(value)}: enable x64")
    return held


def name_of(value: object) -> str | None:
    """The name of a function or of a member of an enumeration; None for other values."""
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__name__", None) if callable(value) else None


def _canonical(name: str, leaf: PyTree) -> tuple[str, str | np.ndarray]:
    if leaf is None or isinstance(leaf, (bool, np.bool_)):
        return "constant", str(leaf)
    if isinstance(leaf, str):
        return "text", leaf
    if (text := name_of(leaf)) is not None:
        return "text", text
    if isinstance(leaf, int):
        return "number", str(leaf)  # A static integer may exceed JAX's integers.
    array = as_held(name, leaf)
    if array.ndim:
        return "array", array
    if array.dtype == bool:
        return "constant", str(bool(array))
    if np.isnan(array):
        raise ValueError(f"{name} must not hold NaN, which cannot be a coordinate")
    number = float(array) if jnp.issubdtype(array.dtype, jnp.floating) else int(array)
    return "number", str(number if np.isinf(array) else Fraction(number))
