"""Argument checks: a bad concrete parameter raises an error, and a bad traced one becomes NaN."""

import importlib
import math
import operator
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax._core._types import PyTree, Scalar, Value
from dpjax._exact._numerics import compute_dtype

F = TypeVar("F", bound=Callable[..., object])
# The type of numbers that a check returns: Python floats, or traced arrays.
Number = TypeVar("Number", float, jax.Array, Scalar)


class _Brief(reprlib.Repr):
    """Abbreviates values in error messages.

    Arrays and tables may be private, so only dtypes and shapes of arrays, and types of tables, are
    shown.
    """

    def repr_instance(self, x: Any, level: int) -> str:
        array = hasattr(x, "dtype") and hasattr(x, "shape")
        if array and (x.shape != () or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return f"{x.dtype}{list(x.shape)}"
        if hasattr(type(x), "columns") or type(x).__module__.partition(".")[0] == "pyarrow":
            return f"a {type(x).__name__}"
        return super().repr_instance(x, level)


_BRIEF = _Brief()
_BRIEF.maxdict, _BRIEF.maxstring, _BRIEF.maxother = 12, 80, 200


def shown(value: object) -> str:
    """Returns a short text that represents a value, for error messages."""
    return _BRIEF.repr(value)


def described(tree: PyTree) -> str:
    """Returns a short text of a pytree for error messages, with dtype and shape of each leaf."""

    def of_leaf(leaf: PyTree) -> str:
        if is_column(leaf):
            return repr(leaf)
        array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        return f"{leaf.dtype}{list(leaf.shape)}" if array else type(leaf).__name__

    def is_column(node: PyTree) -> bool:  # `Numbers` and `Texts` have this attribute.
        return getattr(node, "is_column", False) is True

    text = jax.tree.map(of_leaf, tree, is_leaf=is_column)
    return text if isinstance(text, str) else shown(text)


def is_traced(value: object) -> bool:
    """Whether a value is a JAX tracer, so that its number is not known yet."""
    return isinstance(value, jax.core.Tracer)


def any_traced(*trees: PyTree) -> bool:
    """Whether any leaf of these pytrees is a tracer, so that its number is not known yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def _scalar(name: str, value: Value, expected: str, valid: Callable[[Any], ArrayLike]) -> Any:
    if is_traced(value):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.number):
            raise ValueError(
                f"{name} must be {expected}, got a traced {value.dtype} of shape {value.shape}: "
                "to use several values, map over them by jax.vmap"
            )
        value = value.astype(compute_dtype(value.dtype))
        return jnp.where(valid(value), value, jnp.nan)
    no_number = (bool, np.bool_, str, np.ma.MaskedArray, type(None))
    if isinstance(value, no_number) or np.ndim(value) != 0:
        raise TypeError(f"{name} must be {expected}, got {shown(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be {expected}, got {shown(value)}") from error
    except OverflowError as error:  # The integer is larger than the largest float.
        raise ValueError(f"{name} must be {expected}, got {shown(value)}") from error
    if not valid(number):
        raise ValueError(f"{name} must be {expected}, got {number:g}")
    return number


def positive(name: str, value: Number) -> Number:
    """Checks that a number is finite and above 0."""
    return _scalar(name, value, "a finite number above 0", lambda x: (x > 0) & (x < math.inf))


def concrete_positive(name: str, value: Number, instead: str = "a concrete number") -> Number:
    """Checks that a number is finite, above 0, and not traced."""
    number = positive(name, value)
    host_only(name, number, instead)
    return number


def non_negative(name: str, value: Number) -> Number:
    """Checks that a number is finite and not negative."""
    return _scalar(name, value, "a finite number, 0 or above", lambda x: (x >= 0) & (x < math.inf))


def finite(name: str, value: Number) -> Number:
    """Checks that a number is finite."""
    return _scalar(name, value, "a finite number", lambda x: (x > -math.inf) & (x < math.inf))


def fraction(name: str, value: Number) -> Number:
    """Checks that a number is strictly between 0 and 1."""
    expected = "strictly between 0 and 1"
    if name in ("probability", "confidence") and type(value) in (int, float) and 1 < value <= 100:
        expected += f", as {value / 100:g} for {value:g}%"
    return _scalar(name, value, expected, lambda x: (x > 0) & (x < 1))


def integer(name: str, value: Value, *, least: int, most: int | None = None) -> int:
    """Checks that a value is a concrete integer in a range."""
    expected = f"an integer of at least {least}" + (f" and at most {most}" if most else "")
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}, got {shown(value)}") from error
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be {expected}, got {number}")
    return number


def choice(name: str, value: Value, choices: tuple[str, ...]) -> str:
    """Checks that a value is one of a few strings."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {shown(value)}")
    return value


def extra(module: str, name: str) -> Any:
    """Imports an optional dependency, or says which extra installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{module} is not installed; run: pip install 'dpjax[{name}]'"
        ) from error


def is_staging() -> bool:
    """Whether JAX is tracing a program, so that operations are recorded instead of executed."""
    return is_traced(lax.convert_element_type(np.float32(0), np.int32))


def host_only(name: str, value: Value, instead: str) -> None:
    """Refuses a traced value. The error message tells the user to call `instead`."""
    if is_traced(value):
        raise TypeError(
            f"{name} runs on the host, so it cannot be called inside of jit or vmap: use "
            f"{instead} there"
        )


def exactly_one(**given: object) -> None:
    """Checks that exactly one of several arguments is not None."""
    if sum(value is not None for value in given.values()) != 1:
        values = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        raise ValueError(f"one of {' and '.join(given)} must be given, got {values}")


def instance(name: str, value: object, kind: Any, makers: str) -> None:
    """Checks that a value has the type `kind`, which may be a union of types.

    The error message names `makers`, the functions that make such values.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be made by {makers}, got {described(value)}")


def function(name: str, value: F) -> F:
    """Checks that a value is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}: {shown(value)}")
    return value


def real_shapes(name: str, tree: PyTree) -> PyTree:
    """Returns the shapes and dtypes that `real_arrays` would return, as `ShapeDtypeStruct`s.

    Leaves of the tree may themselves be `jax.ShapeDtypeStruct`s.
    """
    return real_arrays(name, tree, _real_shape)


def host_numbers(name: str, value: Value) -> np.ndarray:
    """Converts public real numbers to a NumPy array without changing their dtype."""
    return np.asarray(_real_numbers(name, value))


def booleans(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Converts public booleans to an array; they may be given as 0 and 1."""
    if isinstance(value, jax.Array) and is_traced(value):
        return value.astype(bool)
    array = host_numbers(name, value)
    if not np.isin(array, (0, 1)).all():
        raise ValueError(
            f"{name} must be True or False, or 1 or 0, got {described(array)} with other numbers"
        )
    return array.astype(bool)


def _real_shape(name: str, leaf: ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = real_array(name, leaf)
    _check_real_dtype(name, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def real_array(name: str, leaf: ArrayLike) -> jax.Array:
    """Converts real numbers to a JAX array, clamping them to the range of its dtype."""
    if callable(leaf):
        raise TypeError(
            f"{name} must be arrays, got a function, {shown(leaf)}. If a model contains functions,"
            " keep only its arrays, for example by equinox.partition(model, equinox.is_array). If"
            " the target returns a function on [0, 1]^dims, release it with"
            " dpjax.evaluate_on_lattice and dpjax.bernstein"
        )
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        # NumPy would convert a larger integer to an array of dtype object.
        leaf = max(min(leaf, 2**63 - 1), -(2**63))
    numbers = _real_numbers(name, leaf)
    return saturating_cast(numbers, jax.dtypes.canonicalize_dtype(numbers.dtype))


def _real_numbers(name: str, leaf: ArrayLike) -> jax.Array | np.ndarray:
    """Converts real numbers, unless they are a JAX array, to a NumPy array."""
    refuse_foreign_dtype(name, leaf)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        # Some file formats store big-endian numbers, which JAX does not accept.
        if not leaf.dtype.isnative:
            leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    _check_real_dtype(name, leaf)
    return leaf


def real_arrays(
    name: str,
    tree: PyTree,
    convert: Callable[[str, PyTree], jax.Array | jax.ShapeDtypeStruct] = real_array,
) -> PyTree:
    """Converts every leaf of a pytree to a real JAX array; refuses a pytree without leaves."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        raise ValueError(f"{name} must contain at least one array, got {shown(tree)}")
    converted = [convert(name, leaf) for leaf in leaves]
    check_not_empty(name, converted)
    return jax.tree.unflatten(structure, converted)


def check_not_empty(name: str, leaves: list[Any]) -> None:
    """Refuses trees whose arrays are all empty."""
    if all(leaf.size == 0 for leaf in leaves):
        raise ValueError(f"{name} must not be empty, got an array of shape {leaves[0].shape}")


def count_records(name: str, tree: PyTree) -> int:
    """Returns the length n of the leading axis that all arrays of a pytree share."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"{name} must be arrays with a common leading axis of n records, got {described(tree)}"
        )
    ((n,),) = sizes
    return n


def refuse_masked(name: str, leaf: object) -> None:
    """Refuses masked arrays: conversion would drop the mask and use the hidden numbers."""
    # Looking for these attributes also recognizes masked arrays of other libraries.
    if hasattr(leaf, "mask") and hasattr(leaf, "filled"):
        raise TypeError(
            f"{name} must be arrays without a mask, got a {type(leaf).__name__}: conversion "
            "would drop the mask and use the hidden numbers; fill in missing numbers by "
            ".filled(value)"
        )


def refuse_foreign_dtype(name: str, leaf: object) -> None:
    """Refuses masked arrays, and columns whose dtype is not a NumPy dtype.

    NumPy would convert such a column to a dtype that depends on whether values are missing. Whether
    values are missing may be private.
    """
    refuse_masked(name, leaf)
    dtype = getattr(leaf, "dtype", None)
    if hasattr(leaf, "to_numpy") and not isinstance(dtype, np.dtype):
        raise TypeError(
            f"{name} must be arrays, got a {type(leaf).__name__} of dtype {dtype}, which is not "
            "a NumPy dtype: fill in missing values, and pass .to_numpy() of every column"
        )


def _check_real_dtype(name: str, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> None:
    real = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
    # For NumPy, durations are a kind of integer, but they are not real numbers.
    real &= not jnp.issubdtype(leaf.dtype, np.timedelta64)
    if not (real or leaf.dtype == bool):
        raise TypeError(f"{name} must contain real numbers or booleans, got dtype {leaf.dtype}")


def saturating_cast(array: PyTree, dtype: DTypeLike) -> jax.Array:
    """Casts an array to another dtype of the same kind, clamping to the range of both dtypes.

    A cast of private values must neither wrap around nor raise an error, however NumPy and JAX are
    configured. NaN remains NaN, and the release decides later how to treat it.
    """
    dtype, is_jax = np.dtype(dtype), isinstance(array, jax.Array)
    if is_jax and not is_traced(array) and array.dtype == dtype and not array.weak_type:
        return array
    numpy = jnp if is_jax else np
    with np.errstate(all="ignore"), jax.debug_nans(False), jax.debug_infs(False):
        if array.dtype == dtype or np.dtype(bool) in (array.dtype, dtype):
            return jnp.asarray(array, dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            low = max(jnp.iinfo(dtype).min, jnp.iinfo(array.dtype).min)
            high = min(jnp.iinfo(dtype).max, jnp.iinfo(array.dtype).max)
        else:
            high = min(float(jnp.finfo(dtype).max), float(jnp.finfo(array.dtype).max))
            low = -high
        low, high = numpy.asarray(low, array.dtype), numpy.asarray(high, array.dtype)
        return jnp.asarray(numpy.clip(array, low, high).astype(dtype))
