"""A public model of a population, from which databases are drawn."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, Key, PyTree

Model: TypeAlias = Callable[[Key, PyTree, int], Database]
"""Draws n records of a population with parameters theta: `model(key, theta, n)`."""

NumberOfRecords: TypeAlias = int | Callable[[PyTree], Any]
"""The public number of records, or a function of theta that returns the private one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """Draws databases, given the parameters of a population.

    Attributes:
        model: draws records.
        n: the number of records, or a function of theta that computes it.
        capacity: the number of slots of padded records; None for plain arrays.
    """

    model: Model
    n: NumberOfRecords
    capacity: int | None

    @classmethod
    def of(cls, model: Model, n: NumberOfRecords, capacity: int | None) -> "Population":
        """Checks the arguments of the caller, and makes a `Population`."""
        _checks.function("model", model)
        if capacity is not None:
            capacity = _checks.integer("capacity", capacity, least=1)
        if not callable(n):
            n = _checks.integer("n", n, least=1, most=capacity)
        elif capacity is None:
            raise ValueError(
                "capacity must be given, because n is a function of theta: pass the number of"
                " slots of the PaddedRecords that the release took"
            )
        return cls(model, n, capacity)

    def database(self, key: Key, theta: PyTree) -> Database:
        """Draws one database in JAX."""
        slots = self.n if self.capacity is None else self.capacity
        assert not callable(slots)
        records = self.model(key, theta, slots)
        leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(records)}
        if leading != {(slots,)}:
            raise ValueError(
                "model must return arrays whose leading axis is the number of records that it is"
                f" asked for: asked for {slots}, got {_checks.described(records)}"
            )
        if self.capacity is None:
            return records
        count = self.n(theta) if callable(self.n) else self.n
        present = jnp.arange(slots) < jnp.round(jnp.asarray(count)).astype(jnp.int32)
        return PaddedRecords(records, present)
