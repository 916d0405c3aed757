"""The abstract value: the facts about one array of a traced program that a walk computes.

Consider public bounds B on a record, a number n of records, and a traced program. A *pair* is two
databases D and D' of n records within B that differ in record i only. `Abstract` describes one
variable x of the program. It represents a set of families of arrays x(D), its *concretization*
(Cousot and Cousot, 1977). A family is in this set if for every pair D, D':

1. low <= x(D) <= high in every entry, and x(D) contains no NaN and no infinity. If a device flushes
   subnormal numbers to 0, the flushed x(D) is also in this range.
2. If `axis` is None: |x(D) - x(D')| <= others.each in every entry, and the l1 and l2 norms of the
   difference are at most others.l1 and others.l2. At most others.count entries differ. Then
   `changed` equals `others`.
3. If `axis` is k: axis k indexes the records. Row i of the difference is within `changed`, and
   every other row is within `others`, for each of the four bounds.
4. If `whole`, all entries of x(D) are integers. If j is in `tied`, x(D) is constant along axis j.
5. No row of x(D) has an l1 norm above `l1_of_row`, or an l2 norm above `l2_of_row`.
6. `pending` says which operations a compiler may still merge with later ones (`_pending.py`).
7. Two uses of one entry of x(D) differ by at most `apart`. If `off` is (r, a), let v be the exact
   result of the operation that computed x, for its computed operands. Then the rounding error of
   this operation alone is at most r |v| + a. For a sum of terms t, |v| is replaced by the sum of
   |t|.
8. If `nan` is not empty, entries may also be NaN, and 1, 2, 3, 5 and 7 are about the other entries.
   An entry is NaN if and only if the same entry of a `Source` in `nan` is NaN. A source is an array
   of the same shape. An entry that is NaN on only one database counts as an entry that changes, so
   `each` is above 0 there.
9. If `replaced` is finite, x(D) is a sorted vector. To get x(D') from x(D), at most `replaced`
   entries are replaced by other numbers, and the result is sorted.
10. If `refusal` is set, none of the above holds: x(D) may be infinite. Only the walk sees such a
   value, and only `_cells.py` uses it.
11. For (source, answer) in `answers`, a boolean x(D) has this answer where the source is NaN.

x(D) is the array *as computed*, in the dtype of the device. A compiler may compute x again for each
operation that uses x, and may round it differently each time. But the same use is rounded in the
same way on D and on D'. So if the inputs of an entry are equal on D and D', the entry is equal,
too. Lemmas that read an array twice add `apart`.

Theorem. Suppose that every input is in its concretization, and that every rule maps values in the
concretizations of its operands into the concretization of its result. Then one record changes the
output by at most `norm_of`. The proof is by induction over the operations:
docs/proofs/global-sensitivity.md. The docstring of each rule states its induction step.

Bounds are stored compactly. If an axis has length 1 in `low`, `high` or `each`, its one number
bounds all entries along this axis.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.proving import _rounding as rounding

# Bounds on the difference of two arrays: on each entry, on the l1 norm, and on the l2 norm.
Moves = tuple[np.ndarray, float, float]


class RefusalError(Exception):
    """Raised by a rule that cannot bound its operation.

    The walk over the program adds the source line to the message.
    """


class RangeRefusalError(RefusalError):
    """Raised by a rule whose operands may be outside of its domain."""


class OverflowRefusalError(RefusalError):
    """Raised if operations may overflow after a compiler merged them.

    Then no lemma applies, because lemmas assume that nothing overflows.
    """


@dataclasses.dataclass(frozen=True)
class Pending:
    """Operations on an array that a compiler may merge with later ones; see `_pending.py`.

    Attributes:
        shift: the sum of |c| over the constants c that were added.
        starts: one pair (token, count) for each earlier sum. The token identifies the sum, and
            count is the number of its terms. If the program adds a number to the sum later, a
            compiler may use the number as the initial value of the sum.
        load: the sum of the magnitudes of all terms of the sums in `starts`.
        terms: how many terms this array contributes to a later sum, if a compiler flattens it.
        weight: the sum of the magnitudes of these terms.
        factor: the product of the constants by which the sum was multiplied afterwards.
        bits: for a product, the sum of |log2 f| over its public factors f.
        coarse: whether 16-bit floats were used, so that a compiler may round the array differently
            for each use.
        single: whether the array may be one number surrounded by zeros (`check_surrounded`).
        padded: whether it may be one number surrounded by padding, although `low` and `high` do not
            show the padding.
        hidden: whether a compiler may know its numbers more precisely than its range does.
        cut: whether it contains floats that were truncated to integers.
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
        """Returns the pending operations of a new sum.

        If the program adds a number to this sum later, a compiler may use the number as the initial
        value of the sum.
        """
        return Pending(starts=frozenset([(object(), count)]), load=load)

    @staticmethod
    def of_all(all_: "Sequence[Pending]") -> "Pending":
        """Returns the pending operations of several operands together.

        If two operands use the same sum, it counts only once.
        """
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
    def flags(all_: "Iterable[Pending]") -> dict[str, bool]:
        """Returns the flags of an array computed from others. A flag is set if any other has it."""
        found = list(all_)
        names = ("coarse", "single", "padded", "hidden", "cut")
        return {name: any(getattr(p, name) for p in found) for name in names}

    def having(self, **fields: Any) -> "Pending":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **fields)


NOTHING = Pending()


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """An array that may contain NaN.

    Attributes:
        within: other sources. If there are any, this array is NaN only where one of them is NaN.
    """

    within: "frozenset[Source]" = frozenset()

    @staticmethod
    def new(*operands: "Abstract") -> "frozenset[Source]":
        """Returns a set of one new `Source`.

        The source is NaN only where an operand is NaN. Without operands, it may be NaN anywhere.
        """
        return frozenset([Source(frozenset[Source]().union(*(x.nan for x in operands)))])

    def says(self, answer: bool, answers: "frozenset[tuple[Source, bool]]") -> bool:
        """Whether a boolean array equals `answer` wherever this source is NaN.

        `answers` are the facts that are known about the boolean array (`Abstract.answers`).
        """
        if (self, answer) in answers:
            return True
        return bool(self.within) and all(x.says(answer, answers) for x in self.within)


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Bounds on a difference of arrays: its entries, its l1 and l2 norm, and how many are not 0."""

    each: np.ndarray
    l1: float
    l2: float
    count: float = math.inf

    @property
    def is_zero(self) -> bool:
        return self.l1 == 0

    @property
    def moves(self) -> Moves:
        return self.each, self.l1, self.l2


def difference(
    each: np.ndarray,
    shape: Sequence[int],
    axis: int | None,
    *,
    l1: float = math.inf,
    l2: float = math.inf,
    count: float = math.inf,
    whole: bool = False,
) -> Difference:
    """Returns the given bounds on a change, each tightened by what the others imply.

    If `axis` is given, it is the axis of records, and the bounds are on the change of one row.
    """
    each = over(np.asarray(each, float), axis)  # Any row may be the one that changes.
    if whole:  # For example, an integer of at most 2.3 is at most 2.
        each, l1 = np.floor(each), float(np.floor(l1))
    counted = [size for k, size in enumerate(shape) if k != axis]
    # One stored bound may stand for several entries; `copies` is their number. `room` covers the
    # rounding error of a sum of bounds on the host.
    copies = math.prod(counted) / max(1, each.size)
    room = 1 + (each.size + 100) * 2.0**-52
    if each.size == 0:
        return Difference(each, 0.0, 0.0, 0.0)
    # For the change d of a row: ||d||_2 <= ||d||_1 <= sqrt(entries) ||d||_2, and no entry of d
    # exceeds ||d||_2.
    l1 = min(l1, float(each.sum()) * copies * room)
    l2 = min(l2, l1, rounding.norm2(each, copies) * room)
    l1 = min(l1, math.sqrt(math.prod(counted)) * l2 * room)
    if whole:
        l1 = math.floor(l1)
    count = min(count, float((each > 0).sum()) * copies * room, l1 if whole else math.inf)
    if count < math.prod(counted):
        largest = float(each.max())
        l1, l2 = min(l1, count * largest * room), min(l2, math.sqrt(count) * largest * room)
    each = np.minimum(each, l2)
    return Difference(np.floor(each) if whole else each, l1, l2, count)


@dataclasses.dataclass(frozen=True, eq=False)
class Abstract:
    """The abstract value of one array; the docstring of this module explains the fields."""

    shape: tuple[int, ...]
    dtype: np.dtype
    low: np.ndarray
    high: np.ndarray
    axis: int | None
    changed: Difference
    others: Difference
    whole: bool = False
    tied: frozenset[int] = frozenset()
    l1_of_row: float = math.inf
    l2_of_row: float = math.inf
    source: object | None = None
    pending: Pending = NOTHING
    apart: float = 0.0
    nan: frozenset[Source] = frozenset()
    answers: frozenset[tuple[Source, bool]] = frozenset()
    off: tuple[float, float] | None = None
    replaced: float = math.inf
    refusal: RefusalError | None = None

    @property
    def origin(self) -> object:
        """An earlier array whose rows have the same entries, possibly in another order."""
        return self if self.source is None else self.source

    @property
    def n(self) -> int:
        """The number of records."""
        assert self.axis is not None
        return self.shape[self.axis]

    @property
    def is_public(self) -> bool:
        """Whether no record changes the array."""
        return self.changed.is_zero and self.others.is_zero

    @property
    def is_known(self) -> bool:
        """Whether the array is the same on all databases, and all its entries are known."""
        return self.is_public and bool((self.low == self.high).all())

    @property
    def is_finite(self) -> bool:
        """Whether the range is finite. Only constants may contain infinities."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    @property
    def magnitude(self) -> np.ndarray:
        """Bounds on the magnitude of each entry."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclasses.dataclass(frozen=True, eq=False)
class Tighter:
    """Additional facts about an array with an axis of records, of which only one row changes.

    Attributes:
        axis: the axis of records.
        low: lower bounds on the entries, with length 1 along the axis of records.
        high: upper bounds on the entries, in the same shape.
        changed: bounds on the change of the changed row.
    """

    axis: int
    low: np.ndarray
    high: np.ndarray
    changed: Difference

    def of(self, x: Abstract) -> Abstract:
        """Returns x with these facts added.

        If x has another axis of records, may change in several rows or may be NaN, it is returned
        unchanged.
        """
        if x.axis != self.axis or not x.others.is_zero or x.nan:
            return x
        return meet(x, self.low, self.high, self.changed.moves)


def over(array: np.ndarray, axis: int | None) -> np.ndarray:
    """Returns the maximum along the axis of records, and keeps this axis with length 1.

    If there is no axis of records, the array is returned unchanged, and so is a single number.
    """
    return array if axis is None or not array.ndim else array.max(axis=axis, keepdims=True)


def check_dtype(dtype: Any) -> None:
    """Refuses random keys, and all other dtypes without rules."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise RefusalError("proofs do not support random bits. Draw them outside of the target")
    if dtype not in rounding.KNOWN:
        raise RefusalError(
            f"proofs do not support {dtype}. Compute in float32, float64, or integers of 8 to 64 "
            "bits"
        )


def constant(value: object) -> Abstract:
    """Returns the abstract value of a constant.

    The constant may contain NaN and infinities, although few rules accept such numbers.
    """
    check_dtype(getattr(value, "dtype", np.dtype(float)))
    array = np.asarray(value)
    check_dtype(array.dtype)
    numbers = array.astype(float)
    # float64 on the host represents integers up to 2^53 exactly.
    if array.dtype.kind in "iu" and np.abs(numbers).max(initial=0) > 2.0**52:
        raise RefusalError("proofs do not support integers beyond 2^52")
    none = Difference(np.zeros((1,) * array.ndim), 0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        whole = bool((np.floor(numbers) == numbers).all())
    pending = Pending(coarse=array.dtype in rounding.NARROW)
    ends = numbers, numbers
    return Abstract(array.shape, array.dtype, *ends, None, none, none, whole, pending=pending)


def rounded_up(each: np.ndarray, l1: float | np.ndarray, l2: float | np.ndarray) -> Moves:
    """Rounds up the bounds on a difference, to cover rounding errors on the host."""
    return rounding.up(each), float(rounding.up(l1)), float(rounding.up(l2))


def erring(
    moves: Moves,
    error: np.ndarray | float,
    shape: Sequence[int],
    axis: int | None,
    count: float = math.inf,
) -> Moves:
    """Returns bounds on the difference of two computed values, from those of the exact values.

    The error of each computed value is at most `error`. So twice this error is added to the bounds
    for entries that change. At most `count` entries change. An entry that does not change has equal
    inputs, so both of its values are rounded alike. If there is an axis of records, the bounds are
    on one row.
    """
    each, l1, l2 = moves
    slips = np.where(each > 0, 2 * over(np.asarray(error, float), axis), 0.0)
    copies = math.prod(s for k, s in enumerate(shape) if k != axis) / max(1, slips.size)
    room, largest = 1 + slips.size * 2.0**-52, float(slips.max(initial=0.0))
    slip1, slip2 = float(slips.sum()) * copies * room, rounding.norm2(slips, copies) * room
    if count < slips.size * copies:
        slip1, slip2 = min(slip1, count * largest), min(slip2, math.sqrt(count) * largest)
    return rounded_up(each + slips, l1 + slip1, l2 + slip2)


def flushed(moves: Moves, flush: float, shape: Sequence[int]) -> Moves:
    """Returns bounds on a difference after an operation that is exact except for flushing to 0.

    If nothing is flushed, the bounds on entries stay exactly the same. Loops need this property,
    because they search for abstract values that a step does not change.
    """
    each, l1, l2 = moves
    count = math.prod(shape) * flush
    each = each + np.where(each > 0, flush, 0.0)
    return each, float(rounding.up(l1 + count)), float(rounding.up(l2 + count))


def make(
    shape: Sequence[int],
    dtype: np.dtype,
    low: np.ndarray,
    high: np.ndarray,
    axis: int | None,
    changed: Moves,
    others: Moves,
    *,
    whole: bool = False,
    tied: frozenset[int] = frozenset(),
    l1_of_row: float = math.inf,
    l2_of_row: float = math.inf,
    source: object | None = None,
    pending: Pending = NOTHING,
    apart: float = math.inf,
    counts: Sequence[float] = (math.inf, math.inf),
) -> Abstract:
    """Makes an abstract value.

    Bounds on changes, and `apart`, are reduced to the width of the range if they exceed it.
    `counts` are bounds on how many entries differ in the changed row, and in any other row.

    Raises:
        RefusalError: if the range is not finite, or too large for the dtype.
    """
    shape, dtype = tuple(map(int, shape)), np.dtype(dtype)
    low, high = np.asarray(low, float), np.asarray(high, float)
    # Empty arrays are refused, because an extremum over no entries would be infinite.
    if math.prod(shape) == 0:
        raise RefusalError("proofs do not support empty arrays. Leave out arrays without entries")
    _check_range(low, high, dtype)
    _check_places(low, shape)
    _check_places(high, shape)
    if whole:  # An integer in [low, high] is also between the ends rounded to integers.
        low, high = np.ceil(low), np.floor(high)
    else:  # A subnormal number may be flushed to 0.
        least = rounding.tiny(dtype)
        low = np.where((low > 0) & (low < least), 0.0, low)
        high = np.where((high < 0) & (high > -least), 0.0, high)
    # Two numbers in [low, high] differ by at most `high - low`, even if the rule only has weaker
    # bounds on changes.
    width = rounding.up(over(high - low, axis))
    made = []
    kinds = list(zip((changed, others), counts, strict=True))
    for (each, l1, l2), count in kinds if axis is not None else kinds[1:]:
        each = np.minimum(*np.broadcast_arrays(np.asarray(each, float), width))
        _check_places(each, shape)
        made.append(difference(each, shape, axis, l1=l1, l2=l2, count=count, whole=whole))
    largest = over(np.maximum(np.abs(low), np.abs(high)), axis)
    row = difference(largest, shape, axis, l1=l1_of_row, l2=l2_of_row)
    return Abstract(
        shape, dtype, low, high, axis, made[0], made[-1], whole, tied, row.l1, row.l2,
        source, pending, min(apart, float(rounding.up((high - low).max()))),
    )  # fmt: skip


_NO_BOUND: Moves = np.array(math.inf), math.inf, math.inf


def meet(
    x: Abstract,
    low: np.ndarray | float = -math.inf,
    high: np.ndarray | float = math.inf,
    changed: Moves = _NO_BOUND,
    others: Moves = _NO_BOUND,
    *,
    l1_of_row: float = math.inf,
    l2_of_row: float = math.inf,
    apart: float = math.inf,
    counts: Sequence[float] = (math.inf, math.inf),
) -> Abstract:
    """Returns the value with additional bounds: the tighter of each old and new bound."""

    def better(d: Difference, moves: Moves) -> Moves:
        each = np.broadcast_to(moves[0], np.broadcast_shapes(moves[0].shape, d.each.shape))
        return np.minimum(d.each, each), min(d.l1, moves[1]), min(d.l2, moves[2])

    found = make(
        x.shape, x.dtype, np.maximum(x.low, low), np.minimum(x.high, high), x.axis,
        better(x.changed, changed), better(x.others, others), whole=x.whole, tied=x.tied,
        l1_of_row=min(x.l1_of_row, l1_of_row), l2_of_row=min(x.l2_of_row, l2_of_row),
        source=x.source, pending=x.pending, apart=min(x.apart, apart),
        counts=(min(x.changed.count, counts[0]), min(x.others.count, counts[1])),
    )  # fmt: skip
    kept: Any = {"nan": x.nan, "answers": x.answers, "off": x.off, "replaced": x.replaced}
    return dataclasses.replace(found, **kept)


def result_of(
    operands: Abstract | Sequence[Abstract], low: np.ndarray, high: np.ndarray,
    moved: Callable[..., Moves], **more: Any,
) -> Abstract:  # fmt: skip
    """Makes the result of an operation on aligned operands.

    By default, it has the shape, dtype and axis of the first operand.

    Args:
        operands: the operands whose changes determine how the result changes.
        low: lower bounds on the entries of the result.
        high: upper bounds on the entries of the result.
        moved: a function from one difference of each operand to bounds on the difference of the
            result. It is called twice: for the changed row, and for the other rows.
        **more: other arguments of `make`, such as another shape, dtype or axis.
    """
    xs = [operands] if isinstance(operands, Abstract) else operands
    kind = {"shape": xs[0].shape, "dtype": xs[0].dtype, "axis": xs[0].axis}
    moves = moved(*(x.changed for x in xs)), moved(*(x.others for x in xs))
    return make(low=low, high=high, changed=moves[0], others=moves[1], **(kind | more))


def changing_with(
    operands: Abstract | Sequence[Abstract], low: np.ndarray, high: np.ndarray,
    moved: Callable[..., Any], **more: Any,
) -> Abstract:  # fmt: skip
    """Makes the result of an operation that combines entries at the same index.

    An entry changes only if an entry of an operand does. Then it changes by at most `moved`, a
    function of the changes of these entries. The other arguments are those of `result_of`.
    """

    def moves(*ds: Difference) -> Moves:
        changes = np.logical_or.reduce(np.broadcast_arrays(*(d.each > 0 for d in ds)))
        return np.where(changes, moved(*(d.each for d in ds)), 0.0), math.inf, math.inf

    return result_of(operands, low, high, moves, **more)


def anywhere(*_: Any) -> float:
    """Returns infinity. In `changing_with`, this allows any change within the result's range."""
    return math.inf


def _check_places(array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuses bounds that are NaN, or that do not broadcast to the shape of their array."""
    pairs = zip(array.shape, shape, strict=True) if array.ndim == len(shape) else ((0, 1),)
    if any(size not in (1, places) for size, places in pairs) or np.isnan(array).any():
        raise RefusalError(
            f"a rule returned NaN, or bounds of shape {array.shape} for an array of shape {shape}"
        )


def _check_range(low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> None:
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefusalError("the value may be infinite or NaN")
    if (low > high).any():
        raise RefusalError("the interval of the value is empty")
    largest = max(np.abs(low).max(), np.abs(high).max())
    check_dtype(dtype)
    if dtype.kind == "b" and (np.ceil(low).min() < 0 or np.floor(high).max() > 1):
        raise RefusalError(
            "proofs do not support sums and products of booleans. Convert the booleans to numbers "
            "first"
        )
    if rounding.is_float(dtype) and largest > rounding.largest(dtype):
        raise RefusalError(
            f"the value may be as large as {largest:.3g}, so it may overflow. Rescale the records"
        )
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if largest > 2.0**52 or low.min() < info.min or high.max() > info.max:
            raise RefusalError(
                f"the value may be as large as {largest:.3g}, so {dtype} may overflow. Convert the "
                "operands to a wider dtype"
            )
