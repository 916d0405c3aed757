"""Computes the clipped sum of a batch too large for memory, by loading its examples in chunks."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Scalar
from dpjax.learning._clipping import ClippedGradients, ClippedSum, sealed
from dpjax.learning._rounding import Digits, slack
from dpjax.learning._sampling import Batch, BatchSampling


def clipped_in_parts(
    key: Key,
    clipped: ClippedGradients,
    parameters: PyTree,
    *,
    sampling: BatchSampling,
    examples: Callable[[jax.Array], Database],
    parts: int,
    present: jax.Array | None = None,
    step: Scalar | None = None,
    clip_norm: PyTree | None = None,
) -> ClippedSum:
    """The clipped sum of a batch that does not fit into memory.

    Draws one batch, and splits its slots into parts that are loaded one after the other. Batches
    that were drawn separately cannot be combined into one: a record could be in several of them,
    and the accounting does not cover that.

    Args:
        key: as for `sampling`.
        clipped: the clipped gradients of the loss, from `clipped_gradients`.
        parameters: a pytree of float arrays.
        sampling: draws the batch.
        examples: `examples(indices)` loads the records at these indices: a pytree of arrays with
            one row for each index. A row may depend only on its own index.
        parts: the number of parts, from 1 to the number of slots. All parts have the same size and
            share a program.
        present: the slots that contain a record, as for `sampling`; None if all slots do.
        step: the number of the step, if `sampling` needs it.
        clip_norm: as for `clipped`.

    Returns:
        A `ClippedSum` of the whole batch.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Formal guarantees:
        The guarantee of `clipped_gradients`, for the whole batch: a record is in one slot of one
        part. The sums of the parts are rounded to integers and added up. The norm bound includes
        the rounding errors.

    Source:
        See `clipped_gradients`.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> database = jnp.ones((1000, 2))
        >>> total = learning.clipped_in_parts(
        ...     dpjax.random.secure_key(),
        ...     learning.clipped_gradients(loss, clip_norm=1.0),
        ...     jnp.zeros(2),
        ...     sampling=learning.poisson_sampling(1000, batch_size=100),
        ...     examples=lambda indices: database[indices],
        ...     parts=4,
        ... )
        >>> bool(total.norm_bound < 1.01)
        True
    """
    _checks.instance("clipped", clipped, ClippedGradients, "clipped_gradients")
    _checks.instance("sampling", sampling, BatchSampling, "a function such as poisson_sampling")
    parts = _checks.integer("parts", parts, least=1, most=sampling.capacity)
    load = _checks.function("examples", examples)
    size = math.ceil(sampling.capacity / parts)
    batch = parts * size
    drawn = sampling(key, present, step=step)
    mask, _ = Batch.filled_slots(drawn, sampling.capacity)
    indices, mask = (jnp.pad(x, (0, batch - sampling.capacity)) for x in (drawn.indices, mask))

    def sum_from(start: int) -> ClippedSum:
        part = slice(start, start + size)
        return clipped(parameters, load(indices[part]), mask[part], clip_norm=clip_norm)

    def joined(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate(arrays)[: sampling.capacity]

    # With `jax_debug_nans`, JAX would raise an error at a NaN in a private record, and so reveal
    # it.
    with jax.debug_nans(False), jax.debug_infs(False):
        first = sum_from(0)
        scale = bound = first.norm_bound
        total, within = _digits(first.value, scale, batch), first.within
        of_records = [(first.private_losses, first.private_aux)]
        for start in range(size, batch, size):
            one = sum_from(start)
            # A norm bound covers rounding, so it depends on the shapes of the examples. Different
            # parts may load examples of different shapes. So the largest norm bound is used.
            bound = jnp.maximum(bound, one.norm_bound)
            digits = _digits(one.value, scale, batch)
            total, within = jax.tree.map(jnp.add, total, digits), within + one.within
            of_records.append((one.private_losses, one.private_aux))
        value, bound = _whole(total, first.value, scale, bound, batch)
        losses, aux = jax.tree.map(joined, *of_records)
        return sealed(value, bound, within, losses, aux, batch, drawn.drawn_by, drawn.turn)


@functools.partial(jax.jit, static_argnames="batch")
def _digits(value: PyTree, scale: Scalar, batch: int) -> PyTree:
    """Converts a sum to integer digits, which can be added without rounding."""
    scale = jnp.asarray(scale)
    return jax.tree.map(lambda x: Digits.of(x.dtype, clip_norm=scale, batch=batch).write(x), value)


@functools.partial(jax.jit, static_argnames="batch")
def _whole(
    digits: PyTree, like: PyTree, scale: Scalar, norm_bound: Scalar, batch: int
) -> tuple[PyTree, jax.Array]:
    """Converts digits back to a sum.

    Also returns the norm bound, increased to cover the rounding errors of the conversion.
    """

    def read(leaf: jax.Array, digits: list[jax.Array]) -> jax.Array:
        return Digits.of(leaf.dtype, clip_norm=jnp.asarray(scale), batch=batch).read(digits)

    # Replacing a record may change the sums of two parts, but `slack` covers the conversion of one
    # sum. So `slack` is called with twice the batch size.
    charged = slack(jax.tree.leaves(like), terms=0, part=0, batch=2 * batch)
    return jax.tree.map(read, like, digits), jnp.asarray(norm_bound) * (1 + charged)
