"""Sums of per-example gradients, each clipped to a norm."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import _checks, _shards
from dpjax._numerics import compute_dtype
from dpjax.base import Scalar
from dpjax.learning._clipped_sum import ClippedSum, sealed
from dpjax.learning._per_example import PerExample, per_example
from dpjax.learning._rounding import from_digits, no_digits, slack, to_digits
from dpjax.learning._uses import explained, traced

# Beyond these, squares of float32 come near the ends of what there is.
LEAST_NORM, LARGEST_NORM = 1e-10, 1e10


@dataclasses.dataclass(frozen=True)
class ClippedGradients:
    """Sums of clipped per-example gradients of a loss; made by `clipped_gradients`.

    Attributes:
        loss: of one example.
        clip_norm: what gradients are clipped to, unless a call says otherwise.
        microbatch_size: how many examples are looked at at once.

    Formal guarantees:
        Those of `clipped_gradients`.
    """

    loss: Callable[[Any, Any], Any]
    clip_norm: float
    microbatch_size: int

    def __call__(
        self, parameters: Any, examples: Any, mask: Any = None, *, clip_norm: Scalar | None = None
    ) -> ClippedSum:
        """The sum over a batch.

        Args:
            parameters: a pytree of float arrays; inside `jax.shard_map` the same on all shards.
            examples: a pytree of arrays with a leading axis of the batch; inside `jax.shard_map`
                of the slots of this shard, whose records no other shard has.
            mask: the sampling's booleans of shape (batch,); an example where it is False counts as
                absent. True, if no slot is empty.
            clip_norm: instead of that of the object, for adaptive clipping; a traced one out of
                range gives NaN.

        Returns:
            A `ClippedSum`.

        Raises:
            TypeError: if the parameters are not float arrays.
            ValueError: if the batch or the clip norm is not as described; inside `jax.shard_map`,
                if parameters vary over shards, or JAX does not check it.
        """
        size = _batch_size(examples)
        if mask is True:
            mask = jnp.ones(size, bool)
        if not _is_mask(mask, size):
            raise ValueError(
                f"mask must be the sampling's booleans of shape ({size},), or True if no slot is"
                f" empty, got {_checks.described(mask)}: else empty slots count as records"
            )
        norm = _checked_norm(self.clip_norm if clip_norm is None else clip_norm)
        return sealed(*self._compiled(_float_arrays(parameters), examples, mask, norm))

    def explain(self, parameters: Any, example: Any) -> Any:
        """Says of every parameter how its gradients are clipped.

        Args:
            parameters: a pytree of float arrays.
            example: one example, or its shapes.

        Returns:
            A pytree like the parameters of texts that begin with "dense", "embedding" or
            "convolution", where the norm follows from what goes into the layer and the gradient of
            what comes out of it; with "elementwise", where a gradient for each example is no larger
            than what the layer computes anyway; else with "formed for each example".
        """
        leaves, structure = jax.tree.flatten(_float_arrays(parameters))
        texts = explained(traced(self.loss, parameters, example), leaves)
        return jax.tree.unflatten(structure, texts)

    def norms(self, parameters: Any, examples: Any) -> jax.Array:
        """The norm of each example's gradient, as private as the examples.

        Args:
            parameters: a pytree of float arrays.
            examples: a pytree of arrays with a leading axis of the batch.

        Returns:
            An array of shape (batch,), to choose a clip norm by on public examples.
        """
        _batch_size(examples)
        return self._compiled_norms(_float_arrays(parameters), examples)

    @functools.cached_property
    def _compiled(self) -> Callable[..., tuple[Any, jax.Array, jax.Array]]:
        return jax.jit(_shards.placed_by_xla(self._sum))

    @functools.cached_property
    def _compiled_norms(self) -> Callable[..., jax.Array]:
        def own(parameters: Any, examples: Any) -> jax.Array:
            program = traced(self.loss, parameters, _first(examples))
            leaves, data = jax.tree.leaves(parameters), jax.tree.leaves(examples)
            return jnp.sqrt(per_example(program, leaves, data).squared_norms)

        def norms(parameters: Any, examples: Any) -> jax.Array:
            return _shards.on_each(_axes(parameters, examples), own, parameters, examples)

        return jax.jit(_shards.placed_by_xla(norms))

    def _sum(
        self, parameters: Any, examples: Any, mask: jax.Array, norm: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        axes = _axes((parameters, norm), examples, mask)
        part, size = min(len(mask), self.microbatch_size), len(mask) * _shards.shard_count(axes)
        leaves, structure = jax.tree.flatten(parameters)
        norm = jnp.asarray(norm)  # Which `jit` does, unless it is disabled.
        roundings = []

        def own(parameters: Any, examples: Any, mask: jax.Array, norm: jax.Array) -> Any:
            program = traced(self.loss, parameters, _first(examples))

            def add_up(data: list[jax.Array], mask: jax.Array) -> tuple[list[jax.Array], jax.Array]:
                gradients = per_example(program, jax.tree.leaves(parameters), data)
                roundings.append(gradients.terms)
                return _clipped(gradients, mask, norm)

            batch = jax.tree.leaves(examples), mask
            if part == size:
                return add_up(*batch)
            return _in_microbatches(add_up, batch, part, size, leaves, norm)

        found = _shards.on_each(axes, own, parameters, examples, mask, norm)
        total, within = _shards.summed_over_shards(found, axes)
        if part < size:
            total = _from_integers(total, size, leaves, norm)
        narrowest = min((x.dtype for x in total), key=lambda dtype: dtype.itemsize)
        # As on one device, whose microbatches are no smaller: so the noise is the same.
        part = min(size, self.microbatch_size)
        charged = slack(leaves, terms=max(roundings), part=part, batch=size, dtype=narrowest)
        return jax.tree.unflatten(structure, total), norm * (1 + charged), within


def _axes(replicated: Any, examples: Any, mask: Any = None) -> frozenset[Any]:
    """The axes of devices over which a batch is spread: every shard holds other examples."""
    _shards.refuse_unchecked()
    if shared := _shards.varying_axes(replicated):
        raise ValueError(
            "parameters and clip_norm must be the same on all shards, got some that vary over"
            f" {sorted(shared)}: give them in_specs=PartitionSpec(); trainings of their own go"
            " under jax.vmap"
        )
    axes = _shards.varying_axes((examples, mask))
    if any(_shards.varying_axes(x) != axes for x in jax.tree.leaves(examples)):
        raise ValueError(
            f"examples must all be sharded over {sorted(axes)}, as the mask or some of them are:"
            " an example that every shard holds would count once for each"
        )
    return axes


def _clipped(
    gradients: PerExample, mask: jax.Array, norm: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The clipped sum, and how many more examples are within the norm than not."""
    norms = jnp.sqrt(gradients.squared_norms)
    norm = norm.astype(norms.dtype)
    usable = mask & jnp.isfinite(gradients.losses) & jnp.isfinite(norms)
    factors = jnp.where(usable, jnp.minimum(1, norm / norms), 0)
    within = jnp.where(usable & (norms <= norm), 1, -1)
    return gradients.total(factors), jnp.sum(jnp.where(mask, within, 0), dtype=jnp.int32)


def _in_microbatches(
    add_up: Callable[..., tuple[list[jax.Array], jax.Array]],
    batch: tuple[list[jax.Array], jax.Array],
    part: int,
    size: int,
    leaves: list[jax.Array],
    norm: jax.Array,
) -> tuple[list[list[jax.Array]], jax.Array]:
    """Adds up microbatches one after the other, in integers: no order of them counts."""

    def step(carry: Any, microbatch: Any) -> Any:
        total, within = add_up(*microbatch)
        digits = [to_digits(x, norm.astype(x.dtype), size) for x in total]
        return jax.tree.map(jnp.add, carry, (digits, within)), None

    nothing = [no_digits(x.shape, compute_dtype(x.dtype), size) for x in leaves]
    parts = jax.tree.map(lambda x: _in_parts(x, part), batch)
    return lax.scan(step, (nothing, jnp.int32(0)), parts)[0]


def _from_integers(
    digits: list[list[jax.Array]], size: int, leaves: list[jax.Array], norm: jax.Array
) -> list[jax.Array]:
    dtypes = [compute_dtype(leaf.dtype) for leaf in leaves]
    return [
        from_digits(x, norm.astype(dtype), size, dtype)
        for x, dtype in zip(digits, dtypes, strict=True)
    ]


def _in_parts(x: jax.Array, part: int) -> jax.Array:
    """Microbatches, padded with the first example, and with False in a mask.

    Each has a slot in every stretch of the batch: where devices hold a stretch each, all have work.
    """
    missing = -len(x) % part
    if missing:
        first = jnp.zeros_like(x[:1]) if x.dtype == bool and x.ndim == 1 else x[:1]
        x = jnp.concatenate([x, *[first] * missing])
    return jnp.swapaxes(x.reshape(part, -1, *x.shape[1:]), 0, 1)


def _is_mask(mask: Any, size: int) -> bool:
    return getattr(mask, "shape", None) == (size,) and mask.dtype == bool


def _checked_norm(clip_norm: Scalar) -> Any:
    """A clip norm in range, in floats as wide as there are; NaN where a traced one is not."""
    norm = _checks.positive("clip_norm", clip_norm)
    if _checks.is_traced(norm):
        usable = (norm >= LEAST_NORM) & (norm <= LARGEST_NORM)
        return jnp.where(usable, norm, jnp.nan).astype(jnp.result_type(float))
    if not LEAST_NORM <= norm <= LARGEST_NORM:
        raise ValueError(
            f"clip_norm must be a number from {LEAST_NORM:g} to {LARGEST_NORM:g}, got {norm}"
        )
    return norm


def _first(examples: Any) -> Any:
    """The shapes of one example."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)


def _batch_size(examples: Any) -> int:
    for leaf in jax.tree.leaves(examples):
        _checks.refuse_foreign_dtype("examples", leaf)
        if getattr(getattr(leaf, "dtype", None), "kind", "") in set("OSUMm"):
            raise TypeError(
                f"examples must be arrays of numbers, got {_checks.described(examples)}: encode"
                " texts and dates before"
            )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(examples)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        raise ValueError(
            "examples must be arrays with a common leading axis of at least one example, got"
            f" {_checks.described(examples)}"
        )
    ((size,),) = sizes
    return size


def _float_arrays(parameters: Any) -> Any:
    leaves = jax.tree.leaves(parameters)
    if not leaves or not all(
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves
    ):
        raise TypeError(
            "parameters must be float arrays; of a model that holds other things keep the float"
            " arrays and close over the rest, as by equinox.partition or flax.nnx.split; got"
            f" {_checks.described(parameters)}"
        )
    return parameters


def clipped_gradients(
    loss: Callable[[Any, Any], Any], *, clip_norm: float, microbatch_size: int = 256
) -> ClippedGradients:
    """Sums of per-example gradients, each clipped to a norm, at about the cost of one gradient.

    Computes sum_i min(1, C / ||g_i||) g_i, where g_i is the gradient of the loss of example i, and
    forms no g_i where it need not: of a dense layer that sees one vector of every example, g_i is
    the outer product of what goes in and the gradient of what comes out, so its norm is the product
    of two norms, and the sum is one matrix product. The loss is any JAX function, of plain JAX,
    Equinox or Flax: its layers are found in the traced program, none is wrapped. The object's
    `explain` says which way each parameter goes.

    A batch may be spread over devices, under `jit` or inside `jax.shard_map`. There each shard
    clips its own examples, the sum is that over all shards, and it is the same on each of them.

    Args:
        loss: `loss(parameters, example)`, the loss of one example, a scalar; a pure JAX function.
        clip_norm: C, from 1e-10 to 1e10, public.
        microbatch_size: how many examples are looked at at once; a larger batch is cut into parts.
            Memory grows with it, and so does what rounding adds to `norm_bound`: for float32 .2% at
            128, .8% at 256, 3% at 512.

    Returns:
        A `ClippedGradients`: `clipped(parameters, examples, mask)` is a `ClippedSum`. Under `jit`,
        all masks of one shape share a program.

    Raises:
        TypeError: if the loss is not a function or a parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Let two batches have the same slots, one of which holds a record in one batch and none in
        the other (its mask is False). Then the sums, as they are computed in floats, are at most
        `norm_bound` = C (1 + rho) apart in the norm l2; where the slot holds another record, twice
        that. rho covers the rounding of norms, of factors and of sums, for any order in which XLA
        adds. An example whose loss or gradient is not finite counts as zero, and does not touch
        what others contribute. Assumed is that what an example contributes depends on it and its
        slot alone, as in every program that `vmap` makes: the loss closes over nothing that is made
        of the batch, such as its mean.

        Over shards the bound is that of one shard, not a sum of bounds. A slot is on one shard, so
        the sums of the others are equal in both batches. Shards are added up as integers, so the
        totals differ by what that one shard differs by. The bound is charged for microbatches of
        one device, which round more. So it does not depend on the number of shards.

    Source:
        Goodfellow, "Efficient per-example gradient computations" (2015); Lee and Kifer, "Scaling up
        differentially private deep learning with fast per-example gradient clipping" (2021); Abadi
        et al., "Deep learning with differential privacy" (2016).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import learning
        >>> def loss(w, example):
        ...     return jnp.dot(w, example)
        >>> clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        >>> examples = jnp.array([[0.0, 2.0], [0.5, 0.0], [jnp.nan, 0.0]])
        >>> clipped(jnp.zeros(2), examples, True).value.tolist()
        [0.5, 1.0]
    """
    _checks.function("loss", loss)
    norm = _checked_norm(clip_norm)
    _checks.host_only("clip_norm", norm, "clipped(..., clip_norm=)")
    size = _checks.integer("microbatch_size", microbatch_size, least=1, most=2**20)
    return ClippedGradients(loss, norm, size)
