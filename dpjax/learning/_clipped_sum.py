"""A sum of clipped gradients that cannot be separated from its norm bound."""

import dataclasses
from typing import NoReturn

import jax
import jax.numpy as jnp

from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import PyTree
from dpjax._core._values import NeighboringRelation, Scalar, Sensitivity
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity


def _refuse_to_take_apart(*_: object) -> NoReturn:
    raise TypeError(
        "a ClippedSum cannot be transformed, added to another one, or leave jit, vmap, scan or"
        " shard_map: its norm bound is that of this very sum. Add learning.gaussian_noise in front"
        " of the optimizer, as in optax.chain(noise, optimizer), and in the function that clips. To"
        " accumulate gradients, as optax.MultiSteps does, use learning.clipped_in_parts. Return its"
        " value where no noise is needed"
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False, slots=True)
class ClippedSum:
    """The sum of clipped per-example gradients of a batch, and how far one record moves it.

    As private as the batch, until it gets noise. Its parts belong together, so nothing takes them
    apart: no `jax.tree.map`, no transformation of optax, no boundary of `jit` or `scan`. Hand it to
    the noise in the function that made it, or return its `value`.

    Attributes:
        norm_bound: how far adding or removing a record moves it in the norm l2, rounding included.
        within: the number of examples within the clip norm minus the number of others; for adaptive
            clipping. Private.
        private_losses: shape (batch,), the loss of each example; 0 in empty slots. No noise covers
            them: who sees them, or their mean, sees the records.
        private_aux: what the loss returns besides, for each example, with a leading axis of the
            batch; 0 in empty slots. None without `has_aux`. As private as the losses.
        slots: how many the batch has, public. The sum is at most so many norm bounds long.
        drawn_by: says which sampling drew the batch; 0 if it is of the caller's own choice.

    Formal guarantees:
        Those of `clipped_gradients`, which alone makes it.
    """

    _value: PyTree
    norm_bound: Scalar
    within: jax.Array
    private_losses: jax.Array
    private_aux: PyTree
    slots: int
    drawn_by: int

    # An optimizer without noise in front of it computes with its gradients.
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse_to_take_apart
    __mul__ = __rmul__ = __truediv__ = _refuse_to_take_apart

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            "a ClippedSum is made by learning.clipped_gradients alone, and has no other parts than"
            " those it was made with"
        )

    @property
    def value(self) -> PyTree:
        """The sum, a pytree like the parameters; at least float32."""
        # Made anew each time: a dictionary can be written to.
        return jax.tree.map(jnp.asarray, self._value)

    def sensitivity(
        self,
        relation: NeighboringRelation | None = None,
    ) -> Sensitivity:
        """How far a record moves the sum: `norm_bound`, or twice that where it is replaced.

        Of the sum as it is: divide by a batch size after the noise, for a quotient of floats is
        rounded once more.

        Args:
            relation: which batches are neighbors; None for that of an open ledger, else
                add-or-remove-one.

        Returns:
            A `Sensitivity` in the norm l2.
        """
        relation = relation_or_inherited(relation, NeighboringRelation.ADD_OR_REMOVE_ONE)
        records = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
        return assume_sensitivity(records * self.norm_bound, norm="l2", relation=relation)


def sealed(
    value: PyTree,
    norm_bound: Scalar,
    within: jax.Array,
    *,
    slots: int,
    drawn_by: int = 0,
    losses: jax.Array | None = None,
    aux: PyTree = None,
) -> ClippedSum:
    """A sum whose norm bound is known to be right."""
    losses = jnp.zeros(slots) if losses is None else losses
    kept = jax.tree.map(jnp.asarray, value)
    parts: tuple[object, ...] = (kept, norm_bound, within, losses, aux, slots, drawn_by)
    made = object.__new__(ClippedSum)
    for field, part in zip(dataclasses.fields(ClippedSum), parts, strict=True):
        object.__setattr__(made, field.name, part)
    return made


jax.tree_util.register_pytree_node(ClippedSum, _refuse_to_take_apart, _refuse_to_take_apart)
