"""Sums of per-example gradients, each of which is clipped to a norm."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, PyTree
from dpjax._core._values import NeighboringRelation, Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype
from dpjax._tracing import _shards
from dpjax.learning._per_example import PerExample, explained, per_example, traced
from dpjax.learning._rounding import Digits, Sum, in_microbatches, root_of_squares, slack
from dpjax.learning._sampling import Batch, Turn
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity


def _refuse_to_take_apart(*_: object) -> NoReturn:
    raise TypeError(
        "a ClippedSum cannot be transformed, added to another ClippedSum, or returned from jit, "
        "vmap, scan or shard_map: its norm bound holds for this sum only. Add "
        "learning.gaussian_noise in front of the optimizer, as in optax.chain(noise, "
        "optimizer), and update the optimizer in the function that clips. To accumulate "
        "gradients, as optax.MultiSteps does, use learning.clipped_in_parts. If no noise is "
        "needed, return the attribute value of the ClippedSum instead"
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False, slots=True)
class ClippedSum:
    """The sum of clipped per-example gradients of a batch, and how much one record can change it.

    Until noise is added, the sum is private data, like the batch. The sum and its norm bound must
    stay together. So a `ClippedSum` refuses `jax.tree.map` and transformations of optax, and cannot
    be returned from `jit` or `scan`. In the function that made a `ClippedSum`, add noise to it, or
    return its `value`.

    Attributes:
        norm_bound: the largest change of the sum in l2 if a record is added or removed, rounding
            included.
        within: the number of examples whose gradient is within the clip norm, minus the number of
            the other examples. It is private; adaptive clipping releases it with noise.
        private_losses: shape (batch,), the loss of each example; 0 in empty slots. The losses have
            no noise: publishing them, or their mean, would reveal the records.
        private_aux: the aux that the loss returns, with a leading axis of examples; 0 in empty
            slots. None without `has_aux`. It is private, like the losses.
        slots: the number of slots of the batch, public. The norm of the sum is at most
            `slots * norm_bound`.
        drawn_by: an identifier of the sampling that drew the batch; 0 if the caller chose the
            records.
        turn: the step for which the batch was drawn (-1 if it may be used in every step), and a
            number that identifies the key of its bins.

    Formal guarantees:
        See `clipped_gradients`, the only function that makes a `ClippedSum`.
    """

    _value: PyTree
    norm_bound: Scalar
    within: jax.Array
    private_losses: jax.Array
    private_aux: PyTree
    slots: int
    drawn_by: int
    turn: Turn

    # Arithmetic on a `ClippedSum` raises an error. Otherwise an optimizer chain without noise would
    # pass the private sum itself to the optimizer.
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse_to_take_apart
    __mul__ = __rmul__ = __truediv__ = _refuse_to_take_apart

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            "a ClippedSum can only be made by learning.clipped_gradients, not from its fields"
        )

    @property
    def value(self) -> PyTree:
        """The sum: a pytree like the parameters, in float32 or wider."""
        # This returns new containers each time, because a caller may change a dict in place.
        return jax.tree.map(jnp.asarray, self._value)

    def sensitivity(self, relation: NeighboringRelation | None = None) -> Sensitivity:
        """The largest change by one record: `norm_bound`, or twice that under replace-one.

        Add noise to the sum before you divide by the batch size, because this bound does not cover
        the rounding error of the division.

        Args:
            relation: which batches are neighbors; None for the relation of an open ledger, else
                add-or-remove-one.

        Returns:
            A `Sensitivity` in the norm l2.
        """
        relation = relation_or_inherited(relation, NeighboringRelation.ADD_OR_REMOVE_ONE)
        records = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
        return assume_sensitivity(records * self.norm_bound, norm="l2", relation=relation)


def sealed(*parts: object) -> ClippedSum:
    """Makes a `ClippedSum` from its fields, in the order of their definition.

    Only code that computed the norm bound may call this function.
    """
    made = object.__new__(ClippedSum)
    for field, part in zip(dataclasses.fields(ClippedSum), parts, strict=True):
        object.__setattr__(made, field.name, part)
    return made


jax.tree_util.register_pytree_node(ClippedSum, _refuse_to_take_apart, _refuse_to_take_apart)


# Outside of this range of clip norms, squares may overflow or underflow in float32.
LEAST_NORM, LARGEST_NORM = 1e-10, 1e10


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGradients:
    """Sums of clipped per-example gradients of a loss; made by `clipped_gradients`.

    Attributes:
        loss: the loss of one example.
        clip_norm: the default norm to which gradients are clipped; a tree has one norm for each
            subtree of the parameters.
        microbatch_size: the number of examples that are in memory together.
        argnums: the arguments of the loss whose gradients are clipped.
        has_aux: whether the loss returns more than a number.

    Formal guarantees:
        See `clipped_gradients`.
    """

    loss: Callable[..., PyTree]
    clip_norm: PyTree
    microbatch_size: int
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False

    def __call__(self, *arguments: PyTree, clip_norm: PyTree | None = None) -> ClippedSum:
        """The sum over a batch: `clipped(parameters, examples, batch)`.

        Args:
            *arguments: the arguments of the loss, but with many examples in place of one, and then
                the batch. Parameters are pytrees of float arrays. Parameters and other arguments
                are public. Inside `jax.shard_map`, they are equal on all shards. Examples are a
                pytree of arrays with a leading axis of slots. Inside `jax.shard_map`, pass only the
                slots of this shard. The batch is the `Batch` that the sampling drew. Outside of
                `jax.shard_map` you may choose the records yourself. Then the batch is a mask of the
                slots that contain a record, or True if all slots do. No record may be in two slots.
            clip_norm: replaces the clip norm of the object, for adaptive clipping. A traced clip
                norm that is out of range gives NaN.

        Returns:
            A `ClippedSum`.

        Raises:
            TypeError: if the parameters are not float arrays.
            ValueError: if the batch or the clip norm is not as described; inside `jax.shard_map`,
                if parameters vary over shards, or if JAX's check for that is off.
        """
        if len(arguments) < 3:
            raise ValueError(
                "the last argument must be the batch, as in clipped(parameters, examples, batch),"
                f" got {len(arguments)} arguments: pass what sampling(key) returned, or a mask, or"
                " True if no slot is empty"
            )
        *given, examples, batch = arguments
        size = _batch_size(examples)
        mask, slots = Batch.filled_slots(batch, size, _shards.varying_axes(examples))
        norm = self._norm if clip_norm is None else _checked_norms(clip_norm)
        self._parameters(given)
        # With `jax_debug_nans`, JAX would raise an error at a NaN in a private loss, and so reveal
        # it.
        with jax.debug_nans(False), jax.debug_infs(False):
            value, bound, within, losses, aux = self._compiled(tuple(given), examples, mask, norm)
        drawn = (batch.drawn_by, batch.turn) if isinstance(batch, Batch) else (0, Turn())
        return sealed(value, bound, within, losses, aux, slots, *drawn)

    def explain(self, *arguments: PyTree) -> PyTree:
        """Describes how the gradients of every parameter are clipped.

        Args:
            *arguments: the arguments of the loss. For the last argument, the example, shapes and
                dtypes suffice.

        Returns:
            A pytree of strings, with the structure of the parameters. A string begins with "dense",
            "embedding" or "convolution" if the norm is computed from the layer's input and the
            gradient of the layer's output. It begins with "elementwise" if the parameter is used
            only in elementwise sums and products. Then the gradient of an example is no larger than
            the result of such an operation. Otherwise the string begins with "formed for each
            example".
        """
        *given, example = arguments
        parameters = self._parameters(given)
        program = traced(self.loss, given, example, argnums=self.argnums, has_aux=self.has_aux)
        return jax.tree.unflatten(jax.tree.structure(parameters), explained(program))

    def norms(self, *arguments: PyTree) -> PyTree:
        """The norm of each example's gradient. It is private data, like the examples.

        Args:
            *arguments: the arguments of the loss, but with many examples in place of one.

        Returns:
            An array of shape (batch,). If the clip norm is a tree, a tree of such arrays with the
            same structure. On public examples, these norms help to choose a clip norm.
        """
        *given, examples = arguments
        _batch_size(examples)
        self._parameters(given)
        return self._compiled_norms(tuple(given), examples)

    def _parameters(self, given: Sequence[PyTree]) -> PyTree:
        """Returns the arguments whose gradients are clipped, in the structure of `jax.grad`."""
        chosen = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if not all(0 <= number < len(given) for number in chosen):
            raise ValueError(
                f"argnums={self.argnums} must be positions of arguments in front of the examples"
            )
        found = tuple(given[number] for number in chosen)
        leaves = jax.tree.leaves(found)
        if not leaves or not all(
            isinstance(x, float) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating))
            for x in leaves
        ):
            raise TypeError(
                "parameters must be float arrays: if a model also has leaves of other types, "
                "pass only its float arrays and close over the rest (equinox.partition or "
                f"flax.nnx.split separates them), got {_checks.described(found)}"
            )
        return found if isinstance(self.argnums, tuple) else found[0]

    @functools.cached_property
    def _norm(self) -> PyTree:
        return _checked_norms(self.clip_norm)

    @functools.cached_property
    def _compiled(self) -> Callable[..., tuple[PyTree, jax.Array, jax.Array, jax.Array, PyTree]]:
        return jax.jit(_shards.placed_by_xla(self._sum))

    @functools.cached_property
    def _compiled_norms(self) -> Callable[..., PyTree]:
        def own(given: Sequence[PyTree], examples: Database) -> PyTree:
            groups = _groups(self.clip_norm, self._parameters(given))
            found = self._gradients(given, examples).norms(groups)
            structure = jax.tree.structure(self.clip_norm)
            return jax.tree.unflatten(structure, [found[i] for i in range(len(found))])

        def norms(given: Sequence[PyTree], examples: Database) -> PyTree:
            return _shards.on_each(_axes(given, examples), own, given, examples)

        return jax.jit(_shards.placed_by_xla(norms))

    def _gradients(self, given: Sequence[PyTree], examples: Database) -> PerExample:
        """Computes the gradients of a batch, from the loss traced for the shapes of one example."""

        def row(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        one = jax.tree.map(row, examples)
        program = traced(self.loss, given, one, argnums=self.argnums, has_aux=self.has_aux)
        # Converts Python floats to arrays, as `jit` does.
        given = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, given)
        return per_example(program, given, examples)

    def _sum(
        self, given: Sequence[PyTree], examples: Database, mask: jax.Array, clip_norm: PyTree
    ) -> tuple[PyTree, jax.Array, jax.Array, jax.Array, PyTree]:
        """Returns the sum, its norm bound, a count of examples, the losses and the aux.

        Adaptive clipping uses the count: the number of examples whose gradient is within the clip
        norm, minus the number of the other examples.
        """
        axes = _axes((given, clip_norm), examples, mask)
        part, size = min(len(mask), self.microbatch_size), len(mask) * _shards.shard_count(axes)
        groups = _groups(clip_norm, self._parameters(given))
        # `jit` converts all arguments to arrays, but not under `jax.disable_jit`.
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(self._parameters(given))]
        norms = [jnp.asarray(norm) for norm in jax.tree.leaves(clip_norm)]
        roundings: list[int] = []

        def written(norms: list[jax.Array]) -> list[Digits]:
            return [
                Digits.of(compute_dtype(leaf.dtype), clip_norm=norms[group], batch=size)
                for leaf, group in zip(leaves, groups, strict=True)
            ]

        def own(
            given: Sequence[PyTree], examples: Database, mask: jax.Array, norms: list[jax.Array]
        ) -> tuple[Sum, PyTree]:
            def add_up(examples: Database, mask: jax.Array) -> tuple[Sum, PyTree]:
                gradients = self._gradients(given, examples)
                roundings.append(gradients.terms)
                return _clipped(gradients, mask, norms, groups)

            if part == size:
                return add_up(examples, mask)
            return in_microbatches(add_up, (examples, mask), part, leaves, written(norms))

        found, (losses, aux) = _shards.on_each(axes, own, given, examples, mask, norms)
        # After `psum`, every shard has the sum of `found` over all shards.
        total, within = lax.psum(found, tuple(sorted(axes))) if axes else found
        if part < size:
            total = [x.read(digits) for x, digits in zip(written(norms), total, strict=True)]
        # The norm bound includes a bound on rounding errors. The bound on rounding errors is for a
        # single device, which rounds at least as much as several devices. So the noise does not
        # depend on the number of devices.
        part = min(size, self.microbatch_size)
        charged = slack(leaves, terms=max(roundings), part=part, batch=size)
        value = jax.tree.unflatten(jax.tree.structure(self._parameters(given)), total)
        return value, root_of_squares(norms) * (1 + charged), within, losses, aux


def refuse_varying(name: str, tree: PyTree) -> None:
    """Raises an error for values that must be the same on all shards, and are not."""
    if axes := _shards.varying_axes(tree):
        raise ValueError(
            f"{name} must be the same on all shards, got values that vary over the mesh axes"
            f" {sorted(axes)}: pass them with in_specs=PartitionSpec(), without jax.lax.pcast; for"
            " separate trainings use jax.vmap"
        )


def _axes(replicated: PyTree, examples: Database, mask: jax.Array | None = None) -> frozenset[str]:
    """Returns the mesh axes over which a batch is sharded.

    Along these axes, shards have different examples.
    """
    _shards.refuse_unchecked()
    refuse_varying("parameters and clip_norm", replicated)
    axes = _shards.varying_axes((examples, mask))
    if any(_shards.varying_axes(x) != axes for x in jax.tree.leaves(examples)):
        raise ValueError(
            f"examples must all be sharded over {sorted(axes)}, like the mask and other examples:"
            " examples that are not sharded would be counted once on every shard"
        )
    return axes


def _groups(clip_norm: PyTree, parameters: PyTree) -> list[int]:
    """Returns the index of the clip norm that applies to each parameter."""
    norms, structure = jax.tree.flatten(clip_norm)
    numbers = jax.tree.unflatten(structure, range(len(norms)))
    try:
        groups = jax.tree.leaves(jax.tree.broadcast(numbers, parameters))
    except ValueError:
        groups = []
    if len(set(groups)) != len(norms) or not groups:
        raise ValueError(
            "clip_norm must be a number, or a tree of numbers with one number for each subtree "
            f"of the parameters, {_checks.described(parameters)}, got {_checks.shown(clip_norm)}"
        )
    return groups


def _clipped(
    gradients: PerExample, mask: jax.Array, limits: Sequence[jax.Array], groups: Sequence[int]
) -> tuple[Sum, PyTree]:
    """Returns the clipped sum of gradients, the losses and the aux.

    An empty slot may contain a copy of a record. So its loss and aux are set to 0.
    """

    def of_records(x: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    norms = gradients.norms(groups)
    finite = [jnp.isfinite(norm) for norm in norms.values()]
    usable = functools.reduce(jnp.logical_and, finite, mask & jnp.isfinite(gradients.losses))
    factors, within = dict[int, jax.Array](), usable
    for group, norm in norms.items():
        limit = limits[group].astype(norm.dtype)
        factors[group] = jnp.where(usable, jnp.minimum(1, limit / norm), 0)
        within &= norm <= limit
    total = gradients.total([factors[group] for group in groups])
    count = jnp.sum(jnp.where(mask, jnp.where(within, 1, -1), 0), dtype=jnp.int32)
    return (total, count), jax.tree.map(of_records, (gradients.losses, gradients.aux))


def _checked_norms(clip_norm: PyTree) -> PyTree:
    """Checks clip norms, and converts them to the default float dtype.

    A traced clip norm that is out of range becomes NaN.
    """

    def checked(clip_norm: Scalar) -> Scalar:
        if isinstance(clip_norm, (int, float)) and clip_norm in (0, math.inf):
            raise ValueError(
                f"clip_norm must be a finite number above 0, got {clip_norm}: to freeze parameters,"
                " leave them out of argnums instead of clipping to 0. Without clipping there is no"
                " guarantee: if you need none, use jax.grad of the sum of the losses"
            )
        return checked_norm("clip_norm", clip_norm)

    return jax.tree.map(checked, clip_norm, is_leaf=lambda x: x is None)


def checked_norm(name: str, norm: Scalar) -> Scalar:
    """Checks one clip norm; a traced one becomes NaN if it is out of range."""
    norm = _checks.positive(name, norm)
    if _checks.is_traced(norm):
        usable = (norm >= LEAST_NORM) & (norm <= LARGEST_NORM)
        return jnp.where(usable, norm, jnp.nan).astype(jnp.result_type(float))
    if not LEAST_NORM <= norm <= LARGEST_NORM:
        raise ValueError(
            f"{name} must be a number from {LEAST_NORM:g} to {LARGEST_NORM:g}, got {norm}"
        )
    return norm


def _batch_size(examples: Database) -> int:
    leaves = jax.tree.leaves(examples)
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            continue
        _checks.refuse_foreign_dtype("examples", leaf)
        if getattr(getattr(leaf, "dtype", None), "kind", "") in set("OSUMm"):
            raise TypeError(
                f"examples must be arrays of numbers, got {_checks.described(examples)}: encode "
                "texts and dates as numbers first"
            )
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        given = _checks.described(examples)
        raise ValueError(
            f"examples must be arrays with a common leading axis, not empty, got {given}"
        )
    ((size,),) = sizes
    return size


def clipped_gradients(
    loss: Callable[..., PyTree],
    *,
    clip_norm: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    microbatch_size: int = 256,
) -> ClippedGradients:
    """Sums of per-example gradients, each clipped to a norm, at about the cost of one gradient.

    Computes sum_i min(1, C / ||g_i||) g_i, where g_i is the gradient of the loss of example i. Most
    g_i are never stored in memory. For example, suppose that a dense layer is applied to one vector
    per example. Then g_i is the outer product of the layer's input and the gradient of its output.
    Its norm is the product of two norms, and the sum is one matrix product. The loss is any JAX
    function, of plain JAX, Equinox or Flax: its layers are found in the traced program, and no
    layer is wrapped. `explain` says how the gradients of each parameter are clipped.

    As for `jax.value_and_grad`, the loss may take more arguments before the example, and may
    return aux. The sum contains the losses and aux as `private_losses` and `private_aux`. They are
    private numbers of the records, and no noise protects them. Noise is added only to the sum, so
    do not publish losses or aux.

    A batch may be spread over devices, under `jit` or inside `jax.shard_map`. In `jax.shard_map`
    each shard clips its own examples, and every shard receives the sum over all shards.

    Args:
        loss: `loss(parameters, example)`, the loss of one example, a scalar; a pure JAX function.
            Other arguments come before the example, and are the same for all examples.
        clip_norm: C, from 1e-10 to 1e10, public. A tree of several norms, one for each subtree of
            the parameters, clips each subtree to its own norm: `{"body": 1.0, "head": 0.1}`.
            `norm_bound` is then the root of the sum of their squares.
        argnums: the index, or indices, of the arguments to differentiate, from 0. With several
            arguments, one norm bounds all gradients together, and the sum is a tuple.
        has_aux: whether the loss returns `(loss, aux)`, where aux is a pytree of arrays.
        microbatch_size: how many examples are in memory together; larger batches are processed in
            several microbatches. Memory and the rounding error in `norm_bound` both grow with the
            microbatch size: in float32, rounding adds .3% to the norm bound at 128, 1.2% at 256,
            and 4.8% at 512.

    Returns:
        A `ClippedGradients`: `clipped(parameters, examples, batch)` is a `ClippedSum`. Under `jit`,
        all batches of one shape share a program.

    Raises:
        TypeError: if the loss is not a function or a parameter not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Take a batch, and remove the record in one slot. The slot is then empty (its mask is False),
        or the record in the last slot takes its place. The two computed sums are at most
        `norm_bound` = C (1 + rho) apart in the norm l2. If a different record is put into the slot,
        they are at most twice as far apart. rho covers the rounding of norms, factors and sums, for
        any order in which XLA adds. An example whose loss or gradient is not finite counts as zero,
        and does not affect other examples. This assumes that the contribution of an example depends
        on this example and its slot alone, as in every program that `vmap` makes. So the loss must
        not use anything computed from the batch, such as its mean, neither by closure nor as an
        argument. Losses and aux have no bound.

        Over shards, the bound is the bound of one shard, not a sum of bounds. A slot is on one
        shard, so the sums of the other shards are equal in both batches. Shards are added up as
        integers, so the totals differ exactly as the sums of that one shard do. rho is computed for
        the microbatches of a single device, which round more. So the bound does not depend on the
        number of shards.

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
    norms = _checked_norms(clip_norm)
    for norm in jax.tree.leaves(norms):
        _checks.host_only("clip_norm", norm, "clipped(..., clip_norm=)")
    size = _checks.integer("microbatch_size", microbatch_size, least=1, most=2**20)
    several = isinstance(argnums, Sequence)
    numbers = tuple(
        _checks.integer("argnums", x, least=0) for x in (argnums if several else (argnums,))
    )
    if len(numbers) != len(set(numbers)) or not numbers:
        raise ValueError(f"argnums must be distinct positions of arguments, got {argnums}")
    return ClippedGradients(loss, norms, size, numbers if several else numbers[0], bool(has_aux))
