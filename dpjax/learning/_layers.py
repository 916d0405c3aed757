"""Layers that compute norms and sums of per-example gradients without storing these gradients.

A layer is an operation with two operands, one of which is a parameter. For each example, x is the
other operand, and g is the gradient of the loss with respect to the layer's output. A layer
computes the squared norm of each example's gradient, and the sum of the gradients, each multiplied
by a factor. Examples with factor 0 are ignored, even if they contain infinities.

A dense layer applied at several positions is not handled here. Its squared norms could be computed
from two Gram matrices, as <XX', GG'>. But if the outer products of an example nearly cancel,
float32 computes a norm far below the norm of the computed sum. Somebody could construct such a
record on purpose, and the noise would not cover it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._walks import aval, bind

# The rounding error of a sum grows with the number of terms. So sums of more terms than this are
# computed as sums of block sums.
_BLOCK = 4096
# A convolution kernel with more offsets than this would make a program with too many operations.
_MOST_OFFSETS = 81


class Gradients(NamedTuple):
    """The norms and weighted sums of one parameter's per-example gradients.

    The gradients themselves need not be stored.

    Attributes:
        squared_norms: shape (batch,). They include a bound on the error by underflow.
        total: maps factors of shape (batch,) to the sum of all gradients times their factors, in
            the shape of the operand.
        terms: an upper bound on the number of roundings in a squared norm.
    """

    squared_norms: jax.Array
    total: Callable[[jax.Array], jax.Array]
    terms: int


class Layer(NamedTuple):
    """A kind of operation with two operands, one of which may be a parameter.

    Attributes:
        name: the name of this kind of layer.
        why: a text that says why its norms are cheap to compute.
        takes: `takes(equation, operand)` says whether an equation of a jaxpr is such a layer, given
            which of its two operands is the parameter. The other operand is x.
        gradients: `gradients(equation, operand, x, g)` returns the `Gradients` of the parameter. g
            is the gradient with respect to the layer's output. x and g have a leading axis of
            examples.
    """

    name: str
    why: str
    takes: Callable[[jex.JaxprEqn, int], bool]
    gradients: Callable[[jex.JaxprEqn, int, jax.Array, jax.Array], Gradients]


def formed(gradients: jax.Array) -> Gradients:
    """Returns the `Gradients` of a parameter whose per-example gradients are stored in memory."""

    def total(factors: jax.Array) -> jax.Array:
        return jnp.tensordot(factors, kept(gradients, factors), 1, precision=lax.Precision.HIGHEST)

    gradients = gradients.astype(compute_dtype(gradients.dtype))
    squares, terms = squared_norms(gradients)
    return Gradients(squares, total, terms)


def squared_norms(x: jax.Array) -> tuple[jax.Array, int]:
    """Returns the squared norm of each example's row, and a bound on its number of roundings.

    Squares may underflow to 0, so a bound on the resulting error is added to the sum.
    """
    x = x.reshape(len(x), -1)
    size = x.shape[1]
    whole = size // _BLOCK * _BLOCK
    squares = jnp.square(x)
    lost = size * float(np.finfo(squares.dtype).tiny)
    if whole <= _BLOCK:
        return jnp.sum(squares, axis=1) + lost, size + 2
    blocks = jnp.sum(squares[:, :whole].reshape(len(x), -1, _BLOCK), axis=2)
    # Without this barrier, XLA merges the two sums into one sum, which has more rounding errors.
    blocks = lax.optimization_barrier(blocks)
    total = jnp.sum(blocks, axis=1) + jnp.sum(squares[:, whole:], axis=1) + lost
    return total, _BLOCK + size // _BLOCK + 4


def kept(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Sets a row to 0 if the factor of its example is 0, even if the row contains NaN."""
    return jnp.where(_column(factors, x) != 0, x, 0)


def _column(factors: jax.Array, x: jax.Array) -> jax.Array:
    return factors.reshape((-1,) + (1,) * (x.ndim - 1))


# Dense layers: a matrix times one vector per example. The gradient of the matrix is an outer
# product, whose norm is the product of two norms.


def _is_dense(equation: jex.JaxprEqn, operand: int) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    contracted, batched = equation.params["dimension_numbers"]
    other = aval(equation.invars[1 - operand])
    free = set(range(other.ndim)) - set(contracted[1 - operand])
    return not any(batched) and all(other.shape[axis] == 1 for axis in free)


def _dense(equation: jex.JaxprEqn, operand: int, x: jax.Array, g: jax.Array) -> Gradients:
    kernel, x = aval(equation.invars[operand]).shape, x.astype(g.dtype)
    # The bound on rounding assumes products in full float32 precision, so faster products of lower
    # precision are disabled.
    precise = {**equation.params, "precision": (lax.Precision.HIGHEST,) * 2}
    precise["preferred_element_type"] = g.dtype

    def total(factors: jax.Array) -> jax.Array:
        def apply(matrix: jax.Array) -> jax.Array:
            def one(vector: jax.Array) -> jax.Array:
                pair = (matrix, vector) if operand == 0 else (vector, matrix)
                return bind(equation, precise, pair)[0]

            return jax.vmap(one)(kept(x, factors))

        back = jax.linear_transpose(apply, jax.ShapeDtypeStruct(kernel, g.dtype))
        return back(_column(factors, g) * kept(g, factors))[0]

    (of_x, terms_of_x), (of_g, terms_of_g) = squared_norms(x), squared_norms(g)
    return Gradients(of_x * of_g, total, terms_of_x + terms_of_g + 1)


# Embedding layers look up rows of a table. If an example uses a row twice, its two gradients must
# be added before the norm is computed.


def _is_embedding(equation: jex.JaxprEqn, operand: int) -> bool:
    if equation.primitive.name != "gather" or operand != 0:
        return False
    table, indices = map(aval, equation.invars)
    numbers = equation.params["dimension_numbers"]
    output = aval(equation.outvars[0]).ndim
    # A lookup selects one index of the first axis, and all indices of every other axis. So its
    # start index along another axis must be 0: the mode CLIP ensures this, but other modes may drop
    # the slice for a nonzero index.
    clipped = equation.params["mode"] == lax.GatherScatterMode.CLIP
    return (
        table.ndim > 1
        and numbers.start_index_map[:1] == (0,)
        and (len(numbers.start_index_map) == 1 or clipped)
        and tuple(numbers.collapsed_slice_dims) in ((), (0,))
        and not (numbers.operand_batching_dims or numbers.start_indices_batching_dims)
        and tuple(equation.params["slice_sizes"]) == (1, *table.shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(indices.ndim - 1, output))
    )


def _embedding(equation: jex.JaxprEqn, operand: int, x: jax.Array, g: jax.Array) -> Gradients:
    table = aval(equation.invars[operand]).shape
    rows, indices = g.reshape(len(g), -1, math.prod(table[1:])), x[..., 0].reshape(len(x), -1)
    if indices.dtype.itemsize < 4:  # A narrow integer dtype might not represent the number of rows.
        indices = indices.astype(jnp.int32)
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, table[0] - 1)
    else:  # The result of an index out of bounds is a constant, so its gradient is 0.
        inside = (indices >= 0) & (indices < table[0])
        rows = jnp.where(inside[:, :, None], rows, 0)
    if indices.shape[1] > 1:
        same = indices[:, :, None] == indices[:, None, :]
        first = lax.argmax(same, 2, jnp.int32) == lax.broadcasted_iota(jnp.int32, indices.shape, 1)
        gathered = jnp.einsum(
            "bts,bsd->btd", same.astype(g.dtype), rows, precision=lax.Precision.HIGHEST
        )
        # If the rows of an example are not finite, its norm is NaN (zero times infinity is NaN),
        # and its gradient counts as zero.
        rows = jnp.where(first[:, :, None], gathered, 0)

    def total(factors: jax.Array) -> jax.Array:
        weighted = _column(factors, rows) * kept(rows, factors)
        flat = jnp.zeros((table[0], rows.shape[2]), g.dtype)
        return flat.at[indices].add(weighted, mode="drop").reshape(table)

    squares, terms = squared_norms(rows)
    return Gradients(squares, total, terms)


# Convolution layers multiply a kernel with patches of the input. The gradient of each example is
# stored, but one product computes the gradients of the whole batch. `vmap` would make grouped
# convolutions, which are slower.


def _is_convolution(equation: jex.JaxprEqn, operand: int) -> bool:
    if equation.primitive.name != "conv_general_dilated" or operand != 1:
        return False
    given, numbers = equation.params, equation.params["dimension_numbers"]
    kernel = aval(equation.invars[1]).shape
    return (
        given["feature_group_count"] == given["batch_group_count"] == 1
        and all(step == 1 for step in given["lhs_dilation"])
        and math.prod(kernel[axis] for axis in numbers.rhs_spec[2:]) <= _MOST_OFFSETS
    )


def _convolution(equation: jex.JaxprEqn, operand: int, x: jax.Array, g: jax.Array) -> Gradients:
    del operand
    numbers = equation.params["dimension_numbers"]
    kernel = aval(equation.invars[1]).shape
    offsets = tuple(kernel[axis] for axis in numbers.rhs_spec[2:])
    x, g = (_features_last(a, spec) for a, spec in ((x, numbers.lhs_spec), (g, numbers.out_spec)))
    x = x.astype(g.dtype)
    rows = g.reshape(len(g), -1, g.shape[-1])
    met = _patches(x, g.shape[2:-1], offsets, equation.params)
    patches = jnp.concatenate([patch.reshape(*rows.shape[:2], -1) for patch in met], axis=2)
    products = jnp.einsum("btk,btd->bkd", patches, rows, precision=lax.Precision.HIGHEST)
    gradients = formed(products)

    def total(factors: jax.Array) -> jax.Array:
        spatial = gradients.total(factors).reshape(*offsets, x.shape[-1], g.shape[-1])
        output_axis, input_axis, *axes = numbers.rhs_spec
        found = [*axes, input_axis, output_axis]
        return jnp.transpose(spatial, [found.index(axis) for axis in range(len(kernel))])

    return gradients._replace(total=total)


def _features_last(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
    """Transposes `x` to the axes (examples, batch, spatial axes, features).

    The first axis of `x` counts the examples. The batch axis belongs to the convolution of one
    example.
    """
    batch, features, *places = (axis + 1 for axis in spec)
    return jnp.transpose(x, (0, batch, *places, features))


def _patches(
    x: jax.Array, places: tuple[int, ...], offsets: tuple[int, ...], given: dict[str, Any]
) -> list[jax.Array]:
    """Returns, for each offset in the kernel, the input entries that it multiplies."""
    none = (0, 0, 0)
    padding = [none, none, *((low, high, 0) for low, high in given["padding"]), none]
    padded = lax.pad(x, jnp.zeros((), x.dtype), padding)
    strides, dilation = given["window_strides"], given["rhs_dilation"]
    found: list[jax.Array] = []
    for offset in np.ndindex(*offsets):
        starts = [i * step for i, step in zip(offset, dilation, strict=True)]
        met = [
            slice(start, start + (count - 1) * stride + 1, stride)
            for start, count, stride in zip(starts, places, strides, strict=True)
        ]
        found.append(padded[:, :, *met])
    return found


LAYERS = (
    Layer("dense", "norms of outer products", _is_dense, _dense),
    Layer("embedding", "norms of the rows that an example takes", _is_embedding, _embedding),
    Layer("convolution", "products with patches", _is_convolution, _convolution),
)
