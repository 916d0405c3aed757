"""Public descriptions of the error of a release, and the confidence intervals they imply."""

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
    """A description of the error of a release. It contains only public and released numbers.

    Attributes:
        kind: the name of the function that computes intervals; "" if no interval is known.
        public: public numbers and strings, as a JSON string.
        measured: the noisy numbers from which the value was computed. The guarantee of the release
            covers them.
    """

    kind: str = static()
    public: str = static(default="{}")
    measured: PyTree = None

    @classmethod
    def of(cls, kind: str, public: dict[str, Any], measured: PyTree = None) -> "Accuracy":
        """Makes an `Accuracy` of a kind, with a dict of public facts."""
        return cls(kind, json.dumps(public, sort_keys=True), measured)

    @property
    def facts(self) -> dict[str, Any]:
        """The public numbers and strings, as a dict."""
        return json.loads(self.public)

    def having(self, **facts: object) -> "Accuracy":
        """Returns a copy with these public facts added or replaced."""
        return Accuracy.of(self.kind, {**self.facts, **facts}, self.measured)


UNKNOWN = Accuracy("")
"""The accuracy of a release whose error is unknown."""


class KnowsAccuracy(abc.ABC):
    """A target that computes the accuracy of its releases from facts unknown to the mechanism."""

    @abc.abstractmethod
    def _accuracy_of(
        self, noise: Accuracy, relation: NeighboringRelation, value: Value, database: Database
    ) -> Accuracy:
        """Returns the accuracy of a release of this target, computed from public facts alone.

        Args:
            noise: the mechanism's description of its noise.
            relation: which databases are neighbors. It determines which facts are public.
            value: the noisy value that the mechanism returned.
            database: the database. Only its public facts may be used, such as the number of records
                under replace-one.
        """


Intervals: TypeAlias = Callable[[Value, PyTree, dict[str, Any], float, bool], Ends]
"""Takes the value, measured numbers, public facts, a confidence, and whether the confidence is for
all intervals together. Returns the ends of the intervals."""

_INTERVALS: dict[str, Intervals] = {}
CONFIDENCE = 0.95
"""The confidence of the intervals that releases print, and of those in their tables and files."""


def intervals_of(kind: str) -> Callable[[Intervals], Intervals]:
    """Registers the decorated function as the one that computes intervals for a `kind`."""

    def register(function: Intervals) -> Intervals:
        _INTERVALS[kind] = function
        return function

    return register


def is_kind(kind: str) -> bool:
    """Whether `kind` is a kind of `Accuracy` that this version of dpjax knows."""
    return kind == "" or kind in _INTERVALS


def interval(
    value: Value,
    accuracy: Accuracy,
    confidence: float,
    simultaneous: bool,
    at_least: ArrayLike | None = None,
) -> Ends:
    """Returns the lower and upper ends of a confidence interval for each released number."""
    confidence = _checks.fraction("confidence", confidence)
    for leaf in jax.tree.leaves((value, accuracy.measured)):
        _checks.host_only("interval", leaf, "mechanism.error")
    facts = accuracy.facts
    if accuracy.kind == "":
        raise ValueError(
            "no interval is known for this release: "
            + facts.get(
                "why",
                "its mechanism was traced, or does not know its error. If the mechanism has a "
                "method `error`, use this method to bound the error",
            )
        )
    value, measured = jax.tree.map(np.asarray, (value, accuracy.measured))
    if at_least is not None:
        if accuracy.kind != "quantiles" or measured["n"] is not None:
            raise ValueError(
                "at_least must be None for this release: only intervals of quantiles use it, and "
                "only if the number of records is private"
            )
        groups = measured["numbers"].shape[:-1]
        known = _checks.host_numbers("at_least", at_least).astype(np.float64)
        if known.shape not in ((), groups) or np.isnan(known).any():
            raise ValueError(
                "at_least must be one number, or an array with a number for each of the groups "
                f"{groups}, got {_checks.shown(at_least)}"
            )
        measured = {**measured, "n": np.broadcast_to(known, groups)}
    ends = _INTERVALS[accuracy.kind](value, measured, facts, confidence, simultaneous)
    return jax.tree.map(np.float64, ends[0]), jax.tree.map(np.float64, ends[1])


def known_interval(value: Value, accuracy: Accuracy) -> Ends | None:
    """Returns the intervals with the usual confidence; None if no interval is known."""
    try:
        return interval(value, accuracy, CONFIDENCE, simultaneous=False)
    except ValueError:
        return None


def estimate(value: Value, accuracy: Accuracy) -> PyTree:
    """Returns the numbers for which `interval` returns intervals."""
    if accuracy.kind == "quantiles":
        return accuracy.measured["numbers"]
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), value)
