"""What is known of the operations that computed an array; _pending.py has the rules."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pending:
    """What a compiler may join with operations to come; _pending.py says which.

    Attributes:
        shift: the sum of the magnitudes of constants that were added.
        starts: the number of additions of each sum that may start at what is added to it, by a
            token of its own.
        load: the sum of the magnitudes of all that such sums add up.
        terms: the number of terms of a sum that may be a part of a sum of sums.
        weight: the sum of their magnitudes.
        factor: by what that sum was multiplied since.
        bits: the sum of |log2| of all factors of a product, but for those of the records.
        coarse: whether 16 bits hold a part of it, so that two uses may see different digits.
        single: whether it may be one number between zeros; _surrounded.py says what that means.
        padded: whether it may be such a number in padding, also where ranges do not show it.
        hidden: whether a compiler may know numbers of it that its range does not show.
        cut: whether it holds floats that were cut to integers.
    """

    shift: float = 0.0
    starts: frozenset[tuple[object, int]] = frozenset()
    load: float = 0.0
    terms: int = 1
    weight: float = 0.0
    factor: float = 1.0
    bits: float = 0.0
    coarse: bool = False
    single: bool = False
    padded: bool = False
    hidden: bool = False
    cut: bool = False

    @staticmethod
    def of_sum(count: int, load: float) -> "Pending":
        """That of a new sum, which may start at what is added to it."""
        return Pending(starts=frozenset([(object(), count)]), load=load)

    @staticmethod
    def of_all(all_: "Sequence[Pending]") -> "Pending":
        """That of arrays side by side; one sum in two of them is counted once."""
        sums = [p for p in all_ if p.terms > 1]
        return Pending(
            shift=sum(p.shift for p in all_),
            starts=frozenset[tuple[object, int]]().union(*(p.starts for p in all_)),
            load=sum(p.load for p in all_),
            terms=max((p.terms for p in sums), default=1),
            weight=sum(p.weight for p in sums),
            factor=sums[0].factor if len({p.factor for p in sums}) == 1 else 1.0,
            bits=max((p.bits for p in all_), default=0.0),
            **Pending.flags(all_),
        )

    @staticmethod
    def flags(all_: "Sequence[Pending]") -> dict[str, bool]:
        """What is true of an array that is made of others, if it is true of one of them."""
        names = ("coarse", "single", "padded", "hidden", "cut")
        return {name: any(getattr(p, name) for p in all_) for name in names}

    def having(self, **fields: Any) -> "Pending":
        """The same with other fields."""
        return dataclasses.replace(self, **fields)


NOTHING = Pending()
