"""Training on people with several examples: a person's loss is the average over their examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, PyTree
from dpjax.queries._truncation import ROWS, THERE, Truncation, padded_people

Loss = Callable[[PyTree, PyTree], Any]


def of_people(
    database: Database, loss: Loss, person: str | int, rows: int | None, most_people: int | None
) -> tuple[PaddedRecords, Loss, str, tuple[str, ...]]:
    """Returns people as records, a person's loss, the privacy unit, and notes for guarantees."""
    if rows is None or most_people is None:
        raise TypeError(
            "rows and most_people must be given with person: how many rows of a person are used,"
            f" and the number of slots for people, got rows={rows}, most_people={most_people}"
        )
    if isinstance(database, PaddedRecords):
        raise TypeError("database must be a table of rows if person is given, got slots")
    people = padded_people(database, person=person, rows=rows, capacity=most_people)
    truncation = Truncation(person, rows)
    return people, loss_of_person(loss), truncation.unit, (truncation.note,)


def loss_of_person(loss: Loss) -> Loss:
    """The average loss of a person's examples. Its gradient is the average of their gradients.

    A missing example is replaced by the person's first example with weight 0. An example of zeros
    might have a gradient of NaN, which remains NaN under weight 0.
    """
    _checks.function("loss", loss)

    def of_person(parameters: PyTree, person: PyTree) -> jax.Array:
        there = person[THERE]

        def filled(leaf: jax.Array) -> jax.Array:
            return jnp.where(there.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])

        losses = jax.vmap(lambda example: loss(parameters, example))(
            jax.tree.map(filled, person[ROWS])
        )
        count = jnp.maximum(jnp.sum(there, dtype=losses.dtype), 1)
        return jnp.sum(jnp.where(there, losses, jnp.zeros_like(losses))) / count

    return of_person
