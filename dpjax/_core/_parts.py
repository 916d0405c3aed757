"""Records in parts, which a query adds up one after the other instead of holding them all."""

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
        each: takes a function of an iterator of parts to its results, which all together are about
            all parts. It may run in other processes.
        like: a part, for structure, shapes and dtypes.
        slots: a public number that is known to be enough for the records of all parts.
    """

    each: Callable[[Callable[[Iterator[PaddedRecords]], Any]], Iterator[Any]]
    like: PaddedRecords
    slots: int


@frozen_pytree
class Summed:
    """What a query adds up over records, which it takes in their place. It is as private as these.

    Attributes:
        totals: the totals of the query.
        slots: that of `Parts`.
    """

    totals: PyTree
    slots: int = static()


@dataclasses.dataclass(frozen=True, eq=False)
class Unsummed:
    """A pass over parts that is still to be made, after the release is paid for.

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
