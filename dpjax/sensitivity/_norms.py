"""Norms, and the distances that they define between two values of a target."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype, extremum, is_float
from dpjax._tracing._programs import Program, Unchanging
from dpjax._tracing._shards import computing_now


def flat(tree: Value) -> jax.Array:
    """Concatenates all leaves of a pytree to one vector, in the widest float dtype of a leaf."""
    leaves = jax.tree.leaves(tree)
    widest = widest_float(leaves)
    return jnp.concatenate([leaf.reshape(-1).astype(widest) for leaf in leaves])


def widest_float(leaves: list[jax.Array]) -> np.dtype:
    """Returns the widest dtype in which float leaves are computed.

    If there are no float leaves, it is the default float.
    """
    floats = [leaf.dtype for leaf in leaves if is_float(leaf)]
    return max(map(compute_dtype, floats or [jnp.int32]), key=lambda dtype: dtype.itemsize)


def _l1(difference: Value) -> jax.Array:
    return jnp.sum(jnp.abs(flat(difference)))


def _l2(difference: Value) -> jax.Array:
    # The largest magnitude is factored out, because squares of small differences would underflow to
    # 0. Then the sensitivity, and so the noise, would be 0.
    sizes = jnp.abs(flat(difference))
    largest = jnp.max(sizes)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return safe * jnp.sqrt(jnp.sum(jnp.square(sizes / safe)))


def _linf(difference: Value) -> jax.Array:
    return _largest(jnp.abs(flat(difference)))


def _largest(x: jax.Array) -> jax.Array:
    return extremum(x, jnp.max, largest=True)


def _hamming(difference: Value) -> jax.Array:
    numbers = flat(difference)
    return jnp.sum(numbers != 0, dtype=numbers.dtype)


def _range(difference: Value) -> jax.Array:
    numbers = flat(difference)
    return _largest(numbers) + _largest(-numbers)


NORMS: dict[str, Callable[[Value], jax.Array]] = {
    "l1": Unchanging("norm", _l1),
    "l2": Unchanging("norm", _l2),
    "linf": Unchanging("norm", _linf),
    "hamming": Unchanging("norm", _hamming),
    "range": Unchanging("norm", _range),
}


def norm_function(norm: Norm) -> Callable[[Value], jax.Array]:
    """Returns the function of a norm. Refuses unknown names."""
    if callable(norm):
        return norm
    if not isinstance(norm, str) or norm not in NORMS:
        raise ValueError(
            f"norm must be a function or one of {tuple(NORMS)}, got {_checks.shown(norm)}"
        )
    return NORMS[norm]


def traced_norm(norm: Norm, value: Value) -> Program:
    """Traces a norm for differences of values of these shapes and dtypes."""
    moved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, compute_dtype(x.dtype)), value)
    return Program.trace("norm", norm_function(norm), moved)


def check_norm(sensitivity: Sensitivity) -> None:
    """Raises an error if a user's norm has changed since the sensitivity was sampled."""
    if sensitivity.distance is None or sensitivity.outputs is None:
        return
    found = traced_norm(sensitivity.norm, sensitivity.outputs.tree()).fingerprint
    if found != sensitivity.distance:
        raise ValueError(
            "norm must be the norm in which the sensitivity was sampled, but its fingerprint is "
            f"{found} instead of {sensitivity.distance}: its traced program, one of its constants, "
            "or JAX's configuration (float64, random numbers, disable_jit) has changed. Sample the "
            "sensitivity again, in this norm"
        )


def rounding_norm(norm: Norm, value: Value) -> Scalar:
    """Returns the norm of a vector that is 1 in float coordinates and 0 in integer coordinates.

    If every float coordinate has a rounding error of at most 1, this bounds the norm of the errors.
    The norm must be homogeneous, subadditive, and monotone in the magnitudes of the coordinates.
    The norm "range" is not monotone, but it is at most twice linf.
    """
    if norm == "range":
        return 2 * rounding_norm("linf", value)
    sizes = [leaf.size for leaf in jax.tree.leaves(value) if is_float(leaf)]
    count = sum(sizes)
    if norm in ("l1", "l2", "linf"):
        return {"l1": float(count), "l2": count**0.5, "linf": float(count > 0)}[str(norm)]
    with computing_now():
        ones = jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(is_float(leaf))), value)
        return norm_function(norm)(ones)


def grid_dtype(value: Value) -> np.dtype:
    """Returns the dtype in which the grid that all leaves share is computed."""
    floats = [leaf.dtype for leaf in jax.tree.leaves(value) if is_float(leaf)]
    wide = bool(floats) and all(dtype.itemsize == 8 for dtype in floats)
    return np.dtype("float64" if wide else "float32")


def difference(value: Value, other: Value) -> Value:
    """Subtracts two target values leaf by leaf, in floats and without integer wraparound."""

    def of_leaves(x: jax.Array, y: jax.Array) -> jax.Array:
        dtype = compute_dtype(x.dtype)
        if is_float(x):
            return x.astype(dtype) - y.astype(dtype)
        if x.dtype.itemsize < 4:  # This includes booleans.
            return (x.astype(jnp.int32) - y.astype(jnp.int32)).astype(dtype)
        # Signed subtraction may overflow. Unsigned subtraction of the smaller from the larger
        # number cannot.
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        magnitude = jnp.where(
            x > y, x.astype(unsigned) - y.astype(unsigned), y.astype(unsigned) - x.astype(unsigned)
        ).astype(dtype)
        return jnp.where(x > y, magnitude, -magnitude)

    return jax.tree.map(of_leaves, value, other)


def distance(norm: Norm, value: Value, other: Value) -> jax.Array:
    """Returns the norm of the difference of two target values; NaN counts as infinite.

    Args:
        norm: name or function.
        value: a pytree of real arrays.
        other: a pytree of the same structure, shapes and dtypes.

    Returns:
        A float scalar, 0 or above.
    """
    if norm == "range":
        refuse_integers(value)
    return length(norm, difference(value, other))


def refuse_integers(value: Value) -> None:
    """Refuses integers under the norm "range": large integers may become equal as floats."""
    if not all(is_float(leaf) for leaf in jax.tree.leaves(value)):
        raise ValueError(
            'norm="range" needs a target that returns floats, because casting large integers to'
            f" floats may hide a small range, got {_checks.described(value)}: let the target return"
            " floats"
        )


def length(norm: Norm, moved: Value) -> jax.Array:
    """Returns the norm of a difference; NaN counts as infinite."""
    found = norm_function(norm)(moved)
    found = found.astype(compute_dtype(found.dtype))
    return jnp.where(jnp.isnan(found), jnp.inf, found)


def resolution(norm: Norm, value: Value) -> jax.Array:
    """Returns the norm of the vector of all coordinates' units in the last place.

    The unit of a float x is eps |x|, and the unit of an integer is 0. The largest eps of all dtypes
    multiplies the norm, not the coordinates. Multiplying the coordinates would be wrong for norms
    such as "hamming", which counts every nonzero coordinate as 1.
    """
    if norm == "range":
        return 2 * resolution("linf", value)
    floats = [leaf.dtype for leaf in jax.tree.leaves(value) if is_float(leaf)]
    if not floats:
        return jnp.zeros((), compute_dtype(jnp.int32))
    coarsest = max(float(jnp.finfo(dtype).eps) for dtype in floats)

    def magnitude(leaf: jax.Array) -> jax.Array:
        dtype = compute_dtype(leaf.dtype)
        if not is_float(leaf):
            return jnp.zeros(leaf.shape, dtype)
        return jnp.abs(leaf).astype(dtype) * (float(jnp.finfo(leaf.dtype).eps) / coarsest)

    found = norm_function(norm)(jax.tree.map(magnitude, value))
    found = found.astype(compute_dtype(found.dtype)) * coarsest
    return jnp.where(jnp.isfinite(found), found, 0)
