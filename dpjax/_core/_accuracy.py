"""How far a release may be off, in public terms, and the intervals that follow from it."""

import abc
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._guarantee import NeighboringRelation
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Database, PyTree, Value

Ends: TypeAlias = tuple[PyTree, PyTree]
"""The lower ends and the upper ends of intervals, each of the structure of the estimates."""


@frozen_pytree
class Accuracy:
    """A description of how far a release may be off, made of public and released numbers.

    Attributes:
        kind: the name of the function that computes intervals; "" if no interval is known.
        public: numbers and words in JSON.
        measured: noisy numbers that the value was computed from, under the same guarantee.
    """

    kind: str = static()
    public: str = static(default="{}")
    measured: PyTree = None

    @classmethod
    def of(cls, kind: str, public: dict[str, Any], measured: PyTree = None) -> "Accuracy":
        """A description from a dict."""
        return cls(kind, json.dumps(public, sort_keys=True), measured)

    @property
    def facts(self) -> dict[str, Any]:
        """The public numbers and words."""
        return json.loads(self.public)

    def having(self, **facts: object) -> "Accuracy":
        """The same kind with more public facts."""
        return Accuracy.of(self.kind, {**self.facts, **facts}, self.measured)


UNKNOWN = Accuracy("")
"""Of releases that nothing is known about."""


class KnowsAccuracy(abc.ABC):
    """A target that knows more about the error of its releases than the mechanism does."""

    @abc.abstractmethod
    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        """How far a release of this target may be off, from public facts alone.

        Args:
            noise: the mechanism's own description.
            relation: which databases are neighbors. It determines which facts are public.
            value: the value that was drawn.
            database: only its public facts may be used: the number of records under replace-one.
        """


Intervals: TypeAlias = Callable[[Value, PyTree, dict[str, Any], float, bool], Ends]
"""Takes value, measured numbers, public facts, confidence, and whether it is for all at once."""

_INTERVALS: dict[str, Intervals] = {}


def intervals_of(kind: str) -> Callable[[Intervals], Intervals]:
    """Registers the function that makes intervals of a kind of description."""

    def register(function: Intervals) -> Intervals:
        _INTERVALS[kind] = function
        return function

    return register


def is_kind(kind: str) -> bool:
    """Whether intervals are implemented for descriptions of this kind."""
    return kind == "" or kind in _INTERVALS


def interval(
    value: Value,
    accuracy: Accuracy,
    confidence: float,
    simultaneous: bool,
    at_least: ArrayLike | None = None,
) -> Ends:
    """The interval of each number of a release."""
    confidence = _checks.fraction("confidence", confidence)
    for leaf in jax.tree.leaves((value, accuracy.measured)):
        _checks.host_only("interval", leaf, "mechanism.error")
    facts = accuracy.facts
    if accuracy.kind == "":
        raise ValueError(
            "no interval is known for this release: "
            + facts.get(
                "why",
                "its mechanism was traced, or does not know its error; some mechanisms have a"
                " method error",
            )
        )
    value, measured = jax.tree.map(np.asarray, (value, accuracy.measured))
    if at_least is not None:
        if accuracy.kind != "quantiles" or measured["n"] is not None:
            raise ValueError("at_least is only for quantiles of a private number of records")
        groups = measured["numbers"].shape[:-1]
        known = _checks.host_numbers("at_least", at_least).astype(np.float64)
        if known.shape not in ((), groups) or np.isnan(known).any():
            raise ValueError(
                f"at_least must be one number, or one for each of the groups {groups}, got"
                f" {_checks.shown(at_least)}"
            )
        measured = {**measured, "n": np.broadcast_to(known, groups)}
    ends = _INTERVALS[accuracy.kind](value, measured, facts, confidence, simultaneous)
    return jax.tree.map(np.float64, ends[0]), jax.tree.map(np.float64, ends[1])


def estimate(value: Value, accuracy: Accuracy) -> PyTree:
    """The numbers that intervals are about."""
    if accuracy.kind == "quantiles":
        return accuracy.measured["numbers"]
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), value)
