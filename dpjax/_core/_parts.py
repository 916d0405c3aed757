"""Records in several chunks, which a query adds up one by one, so that memory suffices."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._records import PaddedRecords
from dpjax._core._types import PyTree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Records in several parts. Each part fits into memory, and each record is in one part.

    Attributes:
        each: calls a function of an iterator of parts, perhaps several times and in other
            processes, and returns an iterator of the results. Together, the calls see every part
            once.
        like: an example of a part, with its structure, shapes and dtypes.
        slots: a public number, which is at least the number of records of all parts together.
        holds_whole_people: whether each part contains all records of its people, in their order.
    """

    each: Callable[[Callable[[Iterator[PaddedRecords]], Any]], Iterator[Any]]
    like: PaddedRecords
    slots: int
    holds_whole_people: bool = False


@frozen_pytree
class Summed:
    """Totals that a query has added up over all parts, and accepts in place of the records.

    The totals are as private as the records.

    Attributes:
        totals: the totals.
        slots: the number of slots, as in `Parts`.
    """

    totals: PyTree
    slots: int = static()


@dataclasses.dataclass(frozen=True, eq=False)
class Unsummed:
    """A pass over all parts, which has not run yet. It runs only after a ledger has paid.

    Attributes:
        shapes: the shapes and dtypes of the result.
        compute: runs the pass and returns the result.
    """

    shapes: Summed
    compute: Callable[[], Summed]


@runtime_checkable
class AddsUp(Protocol):
    """A target whose value is a function of totals, which can be added up part by part."""

    def over(self, parts: Parts) -> Unsummed:
        """The pass that adds up the totals of these parts."""
        ...
