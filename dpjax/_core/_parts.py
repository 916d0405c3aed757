"""Records in parts, which a query adds up one by one, so they need not fit into memory together."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._records import PaddedRecords
from dpjax._core._types import PyTree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Records in parts, each of which fits into memory; every record is in one part.

    Attributes:
        each: maps a function of an iterator of parts to the function's results, which together
            cover all parts. The function may run in other processes.
        like: a part, for structure, shapes and dtypes.
        slots: a public number that is known to be enough for the records of all parts.
        holds_whole_people: whether all records of a person are in one part, in their order.
    """

    each: Callable[[Callable[[Iterator[PaddedRecords]], Any]], Iterator[Any]]
    like: PaddedRecords
    slots: int
    holds_whole_people: bool = False


@frozen_pytree
class Summed:
    """The totals of a query, which it accepts in place of records. They are as private as these.

    Attributes:
        totals: the totals of the query.
        slots: the number of slots, as in `Parts`.
    """

    totals: PyTree
    slots: int = static()


@dataclasses.dataclass(frozen=True, eq=False)
class Unsummed:
    """A pass over parts that runs only after the release is paid for.

    Attributes:
        shapes: the shapes of the result.
        compute: makes the pass.
    """

    shapes: Summed
    compute: Callable[[], Summed]


@runtime_checkable
class AddsUp(Protocol):
    """A target whose value on records is a function of totals of their parts."""

    def over(self, parts: Parts) -> Unsummed:
        """The pass that adds up these parts."""
        ...
