"""Splits the box of a record into small boxes, to bound how much a record changes a sum.

Let g(x) be the row that a program computes from record x alone. Replacing x by y changes this row
from g(x) to g(y). Every record is in one of the boxes, so max ||g(x) - g(y)|| is at most the
largest bound over all pairs of boxes. A box is dropped when its bound with every other box is at
most a threshold, and the final bound is never below this threshold. So the final bound is valid for
any threshold, and whenever the search stops. docs/proofs/boxes.md has the proof.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from dpjax._core._bounds import Ball, Bound, Categories, Interval, PaddedRecordBounds, RecordBounds
from dpjax._core._types import Database
from dpjax._tracing._programs import Program
from dpjax.proving import _rounding as rounding
from dpjax.proving._add_remove import inputs_of
from dpjax.proving._elementwise import nearest_to_zero
from dpjax.proving._record_parts import Key, Part, RecordWalk, enclosed, slopes_of
from dpjax.proving._slots import Slots, Tracked
from dpjax.proving._value import Abstract, RefusalError, Tighter, difference

Array = np.ndarray
# Limits, in this order: boxes in one call of the compiled program, boxes that are kept, pairs of
# boxes, and entries in a table of pairs.
_AT_ONCE, _MOST_BOXES, _MOST_PAIRS, _MOST_NUMBERS = 2**13, 2**18, 2**25, 2**24
# A call of the compiled program usually computes `_MANY_NUMBERS` floats, in about a second. It
# never computes more than `_TOO_MANY_NUMBERS`, which need a few GB of memory.
_MANY_NUMBERS, _TOO_MANY_NUMBERS = 2**24, 2**27
# The largest number of coordinates that `farthest_apart` moves to the ends of their ranges.
_MOST_MOVED = 16
# Let d be the largest distance of the rows of two sampled records. The search drops a box if
# its bound is at most CLOSE * d, and stops when all bounds are at most ENOUGH * d.
CLOSE, ENOUGH = 1.001, 1.01


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Boxes of records x, with bounds on g(x), the row computed from x, over each box.

    Attributes:
        low: the lower endpoints of the boxes, of shape (boxes, coordinates of a record).
        high: the upper endpoints.
        least: lower bounds on g, of shape (boxes, entries of g).
        most: upper bounds on g.
    """

    low: Array
    high: Array
    least: Array
    most: Array

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, chosen: Any) -> "Boxes":
        return Boxes(*(x[chosen] for x in vars(self).values()))

    def joined(self, *others: "Boxes") -> "Boxes":
        arrays = zip(*(vars(x).values() for x in (self, *others)), strict=True)
        return Boxes(*map(np.concatenate, arrays))


class Columns(NamedTuple):
    """The coordinates of a record in one array of a database.

    Attributes:
        place: which coordinates of the record these are.
        shape: the shape of one record in the array.
        bound: the public bounds on the records of the array.
        dtype: the dtype of the array.
    """

    place: slice
    shape: tuple[int, ...]
    bound: Bound
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """The coordinates of a record in all arrays of a database.

    The methods make boxes and halve them. A box is a product of intervals, one for each coordinate.

    Attributes:
        arrays: the coordinates in each array.
    """

    arrays: Sequence[Columns]

    def repeated(self, numbers: Sequence[float]) -> Array:
        """Returns one record, as an array with one row of coordinates.

        `numbers` has one number for each array of the database. All coordinates of the record in
        that array are equal to this number.
        """
        sizes = [math.prod(x.shape) for x in self.arrays]
        return np.repeat(np.asarray(numbers, float), sizes)[None]

    def whole_box(self) -> tuple[Array, Array]:
        """Returns the lower and the upper endpoints of the box that contains all records."""
        low, high = zip(*(x.bound.ends for x in self.arrays), strict=True)
        return self.repeated(low), self.repeated(high)

    def halved(self, low: Array, high: Array, axis: int) -> tuple[Array, Array]:
        """Returns the endpoints of the halves of boxes along an axis, two for each box.

        A box that has no width along this axis is halved along its widest axis. Every record in a
        box is in one of its halves.
        """
        widths, rows = high - low, np.arange(len(low))
        axes = np.where(widths[:, axis] > 0, axis, widths.argmax(1))
        a, b = low[rows, axes], high[rows, axes]
        below = above = (a + b) / 2
        for place, _, bound, dtype in self.arrays:
            if isinstance(bound, Categories):
                values = np.sort(bound.values)
                middle = (np.searchsorted(values, a) + np.searchsorted(values, b)) // 2
                ends = [values.take(k, mode="clip") for k in (middle, middle + 1)]
            elif dtype.kind != "f":
                ends = [np.floor((a + b) / 2), np.floor((a + b) / 2) + 1]
            else:
                continue
            here = (axes >= place.start) & (axes < place.stop)
            below, above = np.where(here, ends[0], below), np.where(here, ends[1], above)
        first, second = high.copy(), low.copy()
        first[rows, axes], second[rows, axes] = below, np.minimum(above, b)
        lows, highs = (
            np.stack(x, 1).reshape(-1, len(widths.T)) for x in ((low, second), (first, high))
        )
        return lows, highs

    def inside(self, low: Array, high: Array) -> Array:
        """Returns which boxes may contain a record: those that intersect all balls of records."""
        found = np.ones(len(low), bool)
        for place, _, bound, dtype in self.arrays:
            if isinstance(bound, Ball):
                nearest = nearest_to_zero(low[:, place], high[:, place])
                # The clamp rounds when it computes the norm of a record, and when it scales the
                # record. So a clamped record may be slightly longer than the radius.
                count = place.stop - place.start
                radius = bound.radius * (1 + (count + 16) * 4 * rounding.unit(dtype))
                found &= np.sqrt((nearest**2).sum(1)) <= radius * (1 + 2.0**-30)
        return found


class Enclosure:
    """Bounds g(x), the row of a record x, over many boxes in one compiled program."""

    def __init__(
        self, ends: Callable[..., Any], coordinates: Coordinates, n: int, numbers: int
    ) -> None:
        self.coordinates, self.n = coordinates, n
        self.lanes = max(1, min(_AT_ONCE // n, _MANY_NUMBERS // numbers))
        self.size = self.lanes * n  # The number of boxes in one call.
        self.run, self.count = jax.jit(jax.vmap(ends)), 0

    def __call__(self, low: Array, high: Array) -> Boxes:
        """Returns the boxes with the given endpoints, and bounds on g over each box."""
        found, size = [], self.size
        with jax.enable_x64(True):
            for start in range(0, len(low), size):
                rows = min(size, len(low) - start)
                # Each row of the arrays is one box. In the last call, unused rows repeat the first
                # box of this call.
                chosen = np.where(np.arange(size) < rows, start + np.arange(size), start)
                ends = [self._leaves(x[chosen]) for x in (low, high)]
                made = self.run(list(zip(*ends, strict=True)))
                found.append([np.asarray(x).reshape(size, -1)[:rows] for x in made])
        self.count += len(low)
        least, most = (np.concatenate(x) for x in zip(*found, strict=True))
        return Boxes(low, high, least, most)

    def _leaves(self, rows: Array) -> list[Array]:
        found = list[Array]()
        for place, shape, _, dtype in self.coordinates.arrays:
            leaf = rows[:, place].reshape(self.lanes, self.n, *shape)
            found.append(leaf.astype(float if dtype.kind == "f" else dtype))
        return found


class Split(NamedTuple):
    """The result of the search over boxes, for an array whose rows each depend on one record.

    Attributes:
        pair: the two records, among all sampled ones, whose rows are farthest apart.
        boxes: the number of boxes for which a row was bounded.
        tighter: bounds on the array. The proof of the whole program uses them in place of bounds
            that follow from the rules of single operations.
    """

    pair: tuple[Array, Array]
    boxes: int
    tighter: dict[Key, Tighter]


def norms(moves: Array, norm: str) -> Array:
    """Returns norms along the last axis, rounded up."""
    if norm == "linf":
        return moves.max(-1)
    found = moves.sum(-1) if norm == "l1" else np.sqrt((moves**2).sum(-1))
    return found * (1 + 2.0**-40)


def farthest(part: Part, enclose: Enclosure, norm: str, end: float, fixed: Boxes | None) -> Split:
    """Bounds the distance of the rows g(x) and g(y) of any two records x and y.

    If `fixed` is given, y is an empty slot, and its row g(y) is `fixed`.

    The search halves the boxes with the largest bounds, until the bound is close to the distance of
    two known records, or until `time.monotonic()` reaches `end`.
    """
    alive = enclose(*enclose.coordinates.whole_box())
    others = [] if fixed is None else [fixed]
    low, high = _hull(alive.joined(*others))
    each, reach = high - low, (np.inf, -np.inf)
    # Under add-or-remove-one, the second record of a pair is always an empty slot.
    second = alive.high[0] if fixed is None else fixed.low[0]
    pair, threshold = _Farthest(norm, fixed, (alive.low[0], second)), 0.0
    while True:
        scores = _scores(alive, norm, fixed)
        pair.sample(enclose, alive[np.argsort(-scores)[: _AT_ONCE // 4]])
        threshold = max(threshold, CLOSE * pair.distance)
        kept = ~(scores <= threshold)
        reach = _hull(alive[~kept], *reach)
        alive, scores = alive[kept], scores[kept]
        most = scores.max(initial=0.0)
        room = max(0, min(_MOST_BOXES, _MOST_NUMBERS // len(low)) - len(alive))
        bad = np.count_nonzero(~(scores <= (threshold + most) / 2))
        worst = np.argsort(-scores)[: min(room, max(bad, enclose.size // 2))]
        chosen = np.sort(worst[_can_halve(alive[worst])])
        near = most <= ENOUGH * pair.distance
        if near or not len(chosen) or time.monotonic() > end:
            break
        halves = _halved(enclose, alive[chosen], scores[chosen], norm, end)
        alive = alive[np.delete(np.arange(len(alive)), chosen)].joined(*halves)
    bound, left = max(threshold, float(most)), alive.joined(*others)
    low, high = _hull(left)
    each = np.minimum(each, np.maximum(threshold, high - low) if len(alive) else threshold)
    low, high = _hull(left, *reach)
    in_norm = {} if norm == "linf" else {norm: float(rounding.up(bound))}
    facts = _facts(part.value, low, high, rounding.up(np.minimum(each, bound)), in_norm)
    return Split(pair.records, enclose.count, dict.fromkeys(part.keys, facts))


def _facts(x: Abstract, low: Array, high: Array, each: Array, norms: dict[str, float]) -> Tighter:
    """Returns bounds on the array x, from bounds on one row and on the distance of two rows."""
    assert x.axis is not None
    shape = [1 if k == x.axis else size for k, size in enumerate(x.shape)]
    low, high, each = (bound.reshape(shape) for bound in (low, high, each))
    return Tighter(x.axis, low, high, difference(each, x.shape, x.axis, whole=x.whole, **norms))


def _hull(boxes: Boxes, low: Any = np.inf, high: Any = -np.inf) -> tuple[Array, Array]:
    """Returns bounds on g(x), the row of record x, that are valid for x in any of the boxes.

    The bounds are extended to contain `low` and `high`.
    """
    least = np.minimum(boxes.least.min(0, initial=np.inf), low)
    return least, np.maximum(boxes.most.max(0, initial=-np.inf), high)


def _scores(boxes: Boxes, norm: str, fixed: Boxes | None) -> Array:
    """Returns, for each box, a bound on ||g(x) - g(y)|| for x in this box and y in any box.

    If `fixed` is given, y is in the boxes of `fixed`.
    """
    count, entries = boxes.least.shape
    # If there are too many pairs of boxes, boxes with neighboring indices form groups. Then bounds
    # over a whole group replace those over its boxes.
    size = 1 if norm != "linf" else max(1, count)
    size = max(size, math.ceil(count * count * entries / _MOST_PAIRS))
    starts = np.arange(0, count, size)
    others = boxes if fixed is None else fixed
    least, most = (
        how.reduceat(x, starts if fixed is None else [0])
        for how, x in ((np.minimum, others.least), (np.maximum, others.most))
    )
    found, step = np.zeros(count), max(1, 2**20 // max(1, len(least) * entries))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        a, b = boxes.least[rows, None], boxes.most[rows, None]
        moves = np.maximum(b - least, most - a)
        found[rows] = norms(moves * (1 + 2.0**-40), norm).max(1)
    # NaN is replaced by infinity, because a later maximum of bounds may ignore NaN.
    return np.where(found >= 0, found, np.inf)


def _can_halve(boxes: Boxes) -> Any:
    """Returns which boxes are wide enough to be halved in float64."""
    size = np.maximum(np.abs(boxes.low), np.abs(boxes.high))
    return np.any(boxes.high - boxes.low > size * 2.0**-40 + 2.0**-900, 1)


def _halved(enclose: Enclosure, boxes: Boxes, scores: Array, norm: str, end: float) -> list[Boxes]:
    """Halves boxes until `time.monotonic()` reaches `end`, and returns the other boxes whole."""
    axes = _order(enclose, boxes, scores, norm)
    low, high, parents = boxes.low, boxes.high, np.arange(len(boxes))
    # If there are only a few boxes, they are halved along several axes at once.
    for axis in axes[: max(1, int(math.log2(max(1, _AT_ONCE // 4 / len(low)))))]:
        low, high = enclose.coordinates.halved(low, high, axis)
        parents = np.repeat(parents, 2)
    inside = enclose.coordinates.inside(low, high)
    low, high, parents = low[inside], high[inside], parents[inside]
    found, size = [], enclose.size
    for start in range(0, len(low), size):
        if time.monotonic() > end:
            found.append(boxes[np.unique(parents[start:])])
            break
        found.append(enclose(low[start : start + size], high[start : start + size]))
    return found


def _order(enclose: Enclosure, boxes: Boxes, scores: Array, norm: str) -> list[int]:
    """Returns the axes, sorted by how much halving along them tightens the worst bounds."""
    count = boxes.low.shape[1]
    rows = max(1, enclose.size // (2 * count))
    some = boxes[np.argsort(-scores)[:rows]]
    low, high = _hull(boxes)
    halves = [enclose.coordinates.halved(some.low, some.high, axis) for axis in range(count)]
    found = enclose(*map(np.concatenate, zip(*halves, strict=True)))
    moves = np.maximum(found.most - low, high - found.least)
    worst = norms(moves, norm).reshape(count, -1, 2).max(2).mean(1)
    return np.argsort(worst, kind="stable").tolist()


class _Farthest:
    """The pair of sampled records x, y whose rows g(x), g(y) are farthest apart.

    Records that were not sampled may be farther apart.
    """

    def __init__(self, norm: str, fixed: Boxes | None, records: tuple[Array, Array]) -> None:
        self.norm, self.fixed, self.records = norm, fixed, records
        self.distance, self.kept = 0.0, None

    def sample(self, enclose: Enclosure, boxes: Boxes) -> None:
        """Samples a record in each box: each coordinate is the middle or an end of its range."""
        low, high = enclose.coordinates.whole_box()
        middle = (boxes.low + boxes.high) / 2
        middle = np.where(boxes.low <= low, low, np.where(boxes.high >= high, high, middle))
        for place, _, bound, dtype in enclose.coordinates.arrays:
            if dtype.kind != "f":
                middle[:, place] = np.floor(middle[:, place])
            if isinstance(bound, Ball):
                length = np.sqrt((middle[:, place] ** 2).sum(1, keepdims=True))
                middle[:, place] *= bound.radius / np.maximum(length, bound.radius)
            if isinstance(bound, Categories):
                values = np.sort(bound.values)
                middle[:, place] = values[np.searchsorted(values, boxes.low[:, place])]
        points = enclose(middle, middle)
        points = points if self.kept is None else self.kept.joined(points)
        rows = (points.least + points.most) / 2
        others = rows if self.fixed is None else (self.fixed.least + self.fixed.most) / 2
        far, partner = np.zeros(len(rows)), np.zeros(len(rows), int)
        ends = np.arange(len(others))
        if self.fixed is None and self.norm == "linf":
            ends = np.unique(np.concatenate([rows.argmax(0), rows.argmin(0)]))
        for start in range(0, len(rows), 64):
            some = slice(start, start + 64)
            apart = norms(np.abs(rows[some, None] - others[ends]), self.norm)
            far[some], partner[some] = apart.max(1), ends[apart.argmax(1)]
        first = int(far.argmax())
        if far[first] > self.distance:
            self.distance = float(far[first])
            second = (self.fixed or points)[[partner[first]]].low[0]
            self.records = points.low[first], second
        best = np.argsort(-far)[:256]
        if self.fixed is None:
            best = np.unique(np.concatenate([best, partner[best]]))
        self.kept = points[best]


def split(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Abstract],
    public: RecordBounds,
    norm: str,
    end: float,
) -> list[Split]:
    """Bounds each array that is computed for each record alone, by splitting the box of a record.

    Args:
        jaxpr: the program after the clamp, whose last inputs are the clamped records.
        consts: its constants.
        inputs: the abstract values of the clamped records.
        public: the bounds on the records.
        norm: the norm of the proof.
        end: the time, as by `time.monotonic`, at which the search stops.
    """
    found = list[Split]()
    known = enclosures(jaxpr, consts, inputs, public)
    for k, (part, enclose) in enumerate(known):
        now = time.monotonic()
        share = (end - now) / (len(known) - k)
        fixed = None
        if isinstance(public, PaddedRecordBounds):  # `present` is 0 for an empty slot.
            row = enclose.coordinates.repeated([*public.empty_row[:-1], 0.0])
            fixed = enclose(row, row)
        found.append(farthest(part, enclose, norm, now + share, fixed))
    return found


def enclosures(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], inputs: Sequence[Abstract], public: RecordBounds
) -> list[tuple[Part, Enclosure]]:
    """Returns the parts of a program that can be bounded over any box of possible records.

    The `Enclosure` of a part computes these bounds.
    """
    walk = RecordWalk()
    rows = [Tracked(x, x, Slots(0)) for x in inputs]
    if isinstance(public, PaddedRecordBounds):
        rows = inputs_of(inputs, public)
    # This walk uses no lemmas, so it may refuse an operation that combines records. By then, it has
    # found all earlier arrays whose rows each depend on one record.
    with contextlib.suppress(RefusalError):
        walk.run(jaxpr, consts, [None] * (len(jaxpr.invars) - len(rows)) + rows)
    coordinates = coordinates_of(inputs, public)
    shapes = [x.value.shape for x in walk.made if x.value.axis is not None]
    numbers = max(1, sum(map(math.prod, shapes)) * (1 + slopes_of(jaxpr)))
    if numbers > _TOO_MANY_NUMBERS:
        raise RefusalError(
            f"the search that effort= asks for would compute {numbers:,} numbers at once for "
            f"{inputs[0].n:,} records, which exceeds the limit of {_TOO_MANY_NUMBERS:,}. Call "
            "prove_sensitivity without effort="
        )
    known = ((part, enclosed(jaxpr, consts, walk.facts, part)) for part in walk.parts())
    return [
        (part, Enclosure(ends, coordinates, inputs[0].n, numbers))
        for part, ends in known
        if ends is not None
    ]


def coordinates_of(inputs: Sequence[Abstract], public: RecordBounds) -> Coordinates:
    """Returns the coordinates of a record."""
    bounds = list(public.leaves)
    if isinstance(public, PaddedRecordBounds):  # `present` is 1 for a record that is in its slot.
        bounds[-1] = Interval(1.0, 1.0)
    shapes, dtypes = [x.shape[1:] for x in inputs], [x.dtype for x in inputs]
    ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
    return Coordinates(list(map(Columns, map(slice, ends, ends[1:]), shapes, bounds, dtypes)))


def farthest_apart(
    program: Program,
    specs: Database,
    coordinates: Coordinates,
    pairs: Sequence[tuple[Array, Array]],
    norm: str,
) -> float:
    """Searches for two neighboring databases with distant values, and returns their distance.

    The search starts from the given pairs of records. Then it changes one coordinate at a time: of
    the first record, of the second record, or of all other records. The new number is an endpoint
    or the middle of the coordinate's range.
    """
    leaves = jax.tree.leaves(specs)
    run = jax.jit(jex.jaxpr_as_fun(program.jaxpr))

    def apart(first: Array, second: Array, other: Array) -> float:
        pair = [_with_others(leaves, coordinates, record, other) for record in (first, second)]
        values = [run(*database) for database in pair]
        rows = [np.concatenate([np.ravel(x).astype(float) for x in value]) for value in values]
        distance = norms(np.abs(rows[0] - rows[1]), norm) * (1 - 2.0**-30)
        return float(np.nan_to_num(distance, posinf=0.0))

    starts = [(*pair, other) for pair in pairs for other in (*pair, (pair[0] + pair[1]) / 2)]
    best = max(starts, key=lambda x: apart(*x))
    reached, (low, high) = apart(*best), coordinates.whole_box()
    # Coordinates with only one possible value, such as `present`, are not changed. So an empty slot
    # stays empty.
    axes = np.flatnonzero(low[0] < high[0])[:_MOST_MOVED].tolist()
    for k, axis in itertools.product(range(3), axes):
        for place in {float(a * low[0, axis] + (1 - a) * high[0, axis]) for a in (0, 0.5, 1)}:
            moved = [x.copy() for x in best]
            moved[k][axis] = place
            if (found := apart(*moved)) > reached:
                reached, best = found, tuple(moved)
    return reached


def _with_others(
    leaves: Sequence[Any], coordinates: Coordinates, record: Array, other: Array
) -> list[Array]:
    """Returns a database whose first record is `record`, and whose other records are `other`."""
    found = list[Array]()
    for leaf, (place, _, _, dtype) in zip(leaves, coordinates.arrays, strict=True):
        rows = np.tile(other[place], (leaf.shape[0], 1))
        rows[0] = record[place]
        rows = rows if dtype.kind == "f" else np.floor(rows)
        found.append(rows.reshape(leaf.shape).astype(dtype))
    return found
