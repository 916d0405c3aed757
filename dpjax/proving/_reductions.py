"""Rules of sums, matrix products, extrema, and sorts.

If an operation reduces over the records, `changed` bounds the change of one row, and `others`
bounds the change of each of the n - 1 other rows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from dpjax.proving import _rounding as rounding
from dpjax.proving._choices import convert
from dpjax.proving._elementwise import multiply
from dpjax.proving._layout import accumulated, along, broadcast, transpose
from dpjax.proving._pending import PRODUCT, carried, flattened
from dpjax.proving._rows import without_middle
from dpjax.proving._value import (
    Abstract,
    Difference,
    Moves,
    Pending,
    RefusalError,
    erring,
    make,
    meet,
    over,
    result_of,
)

_MOST_PRODUCTS = 2**24
_HIGHEST = (lax.Precision.HIGHEST, (lax.Precision.HIGHEST, lax.Precision.HIGHEST))


def check_surrounded(x: Abstract, axes: Iterable[int], start: float) -> None:
    """Refuses sums and extrema of an array that may be one entry with equal padding on both sides.

    XLA miscompiles them. It folds padding into the window of a sum. If a single entry has equal
    padding on both sides, XLA replaces every result by this entry. It does so even for a result
    whose window does not contain the entry. So compiled code computes [x, x, x] for
    `cumsum([0, x, 0])`. The zeros may come from padding or from any other operation, such as a
    scatter of one number to an index that XLA knows.

    Args:
        x: the operand.
        axes: the axes along which the operation reduces.
        start: the start value of the reduction, such as 0 for a sum.
    """
    if x.is_known and (x.low == start).all():
        return
    for axis in axes:
        if x.shape[axis] < 3 or x.shape[axis] % 2 == 0:
            continue
        low, high = (without_middle(array, x.shape, axis) for array in (x.low, x.high))
        moves = [without_middle(d.each, x.shape, axis).any() for d in (x.changed, x.others)]
        public = not any(moves) and bool((low <= start).all() and (start <= high).all())
        # A number may equal `start` although its range is a small interval around `start`: rules
        # widen ranges by rounding errors, even for operations that XLA simplifies away.
        slack = 0.0 if x.whole else 2.0**20 * rounding.tiny(x.dtype)
        off = max(np.abs(low - start).max(), np.abs(high - start).max())
        if public or off <= slack or x.pending.single or x.pending.padded:
            raise RefusalError(
                f"along axis {axis}, the operand may be {start:g} everywhere except for one entry "
                "in the middle. XLA miscompiles this operation on such an operand. Pad the operand "
                f"on one side only, or leave out the entries that are {start:g}"
            )


def start_of_extremum(dtype: np.dtype, *, largest: bool) -> float:
    """Returns the number at which JAX starts a maximum or minimum of windows."""
    if dtype.kind not in "iu":
        return -math.inf if largest else math.inf
    return float(np.iinfo(dtype).min if largest else np.iinfo(dtype).max)


def check_cut(x: Abstract) -> None:
    """Refuses sums of truncated floats if XLA may know that all terms are the same number.

    XLA replaces a cumulative sum of equal numbers by multiples of this number. It wrongly uses the
    number before truncation.
    """
    if x.dtype.kind == "f" and x.pending.cut and (x.is_public or x.pending.hidden):
        raise RefusalError(
            "proofs do not support a sum of public floats that were truncated to integers. Use "
            "jnp.floor instead of truncation"
        )


def check_sums(units: float, count: int, dtype: np.dtype) -> None:
    """Refuses sums of so many terms that no bound on their rounding error is known."""
    if not math.isfinite(units):
        raise RefusalError(
            f"a sum of {count} numbers in {dtype} may lose all digits. Use float64 instead"
        )


def check_highest(precision: Any, dtype: np.dtype) -> None:
    """Refuses products of floats that a device may compute with fewer digits."""
    if dtype.kind == "f" and precision not in _HIGHEST:
        raise RefusalError(
            f"proofs do not support precision {precision}. Leave out precision= to use the highest"
        )


class Sums(NamedTuple):
    """The rounding of sums in any order: sum x_i (1 + theta_i), with |theta_i| <= gamma.

    Attributes:
        exact: whether the terms are integers whose sums the dtype can represent.
        gamma: the bound on |theta_i| (Higham 2002); 0 if the sums are exact.
        flush: the error from numbers that are flushed to 0.
        sizes: bounds on the sums of magnitudes.
        host: the relative rounding error of the same sums on the host.
        pending: the number of terms, and the sum of their magnitudes. Later rules need them,
            because a compiler may flatten a sum of these sums to one sum of all terms.
    """

    exact: bool
    gamma: float
    flush: float | np.ndarray
    sizes: np.ndarray
    host: float
    pending: Pending

    @staticmethod
    def of(x: Abstract, count: int, sizes: np.ndarray) -> "Sums":
        """Returns bounds on the rounding errors of sums of `count` entries of x.

        `sizes` are the sums of the magnitudes of these entries.
        """
        terms, weight = flattened(x)
        host = (count + 100) * 2.0**-52
        sizes = np.maximum(sizes, count * weight) * (1 + host)
        # Sums of integers are exact if the dtype can represent all partial sums.
        exact = x.whole and rounding.holds(sizes, sizes, x.dtype)
        gamma = 0.0 if exact else rounding.sum_units(count * terms, x.dtype)
        check_sums(gamma, count, x.dtype)
        flush = 0.0 if exact else 4 * rounding.tiny(x.dtype) * (count + 1)
        pending = Pending(terms=count * terms, weight=float(sizes.max()))
        return Sums(exact, gamma, flush, sizes, 0.0 if exact else host, pending)

    @property
    def error(self) -> np.ndarray:
        """A bound on the error of a sum. It covers the rounding of the bounds on the host."""
        return rounding.up((self.gamma + self.host) * self.sizes + self.flush)


# A function that bounds the rounding errors of sums. Its arguments are the terms, the number of
# terms in a sum, and the sums of the magnitudes of the terms.
SumsOf = Callable[[Abstract, int, np.ndarray], Sums]


def axes_after(x: Abstract, axes: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    """Returns the shape without some axes, and the axis of records in it."""
    shape = tuple(size for k, size in enumerate(x.shape) if k not in axes)
    if x.axis is None or x.axis in axes:
        return shape, None
    return shape, x.axis - sum(k < x.axis for k in axes)


def total_over(array: np.ndarray, shape: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """Returns the sum of bounds over axes of an array with this shape.

    If `array` has length 1 along an axis, its one bound is valid for all entries along this axis.
    """
    return array.sum(tuple(axes)) * math.prod(shape[k] // array.shape[k] for k in axes)


def sum_over(x: Abstract, axes: Sequence[int], sums_of: SumsOf = Sums.of, **_: Any) -> Abstract:
    """Returns the value of a sum over some axes, which may include the axis of records."""
    axes = tuple(k % len(x.shape) for k in axes)
    shape, axis = axes_after(x, axes)
    count = math.prod(x.shape[k] for k in axes)
    room = 1 + (count + 100) * 2.0**-52
    sums = sums_of(x, count, total_over(x.magnitude, x.shape, axes))
    low = total_over(x.low - np.abs(x.low) * sums.gamma, x.shape, axes)
    high = total_over(x.high + np.abs(x.high) * sums.gamma, x.shape, axes)
    joined = sums.gamma * sums.sizes if sums.pending.terms > count else 0.0
    slack = sums.host * sums.sizes + sums.flush + joined
    low, high = rounding.widened(low, high, slack)
    error = sums.gamma * sums.sizes + sums.flush
    # A sum of entries of a row is at most the l1 norm of the row.
    row = float(rounding.up(x.l1_of_row * (x.n if x.axis in axes else 1)))
    low, high = (np.clip(end, -row - error, row + error) for end in (low, high))
    off = over(error, axis)
    entries = math.prod(size for k, size in enumerate(shape) if k != axis)
    row += float(rounding.up(off.sum())) * entries / off.size
    if (x.low >= 0).all():  # A sum of nonnegative numbers is nonnegative, however it is rounded.
        low = np.maximum(low, 0.0)
    width = math.prod(x.shape[k] for k in axes if k != x.axis)
    rest = x.n - 1 if x.axis in axes else 0
    short = [1 if k == x.axis else size for k, size in enumerate(x.shape)]

    def moved(first: Difference, second: Difference) -> Moves:
        l1, l2 = first.l1 + rest * second.l1, math.sqrt(width) * (first.l2 + rest * second.l2)
        each = total_over(first.each, short, axes) + rest * total_over(second.each, short, axes)
        return erring((np.minimum(each * room, l1), l1, l2), error, shape, axis)

    changed, others = moved(x.changed, x.others), moved(x.others, x.others)
    counts = [math.inf, math.inf]
    # If a compiler flattens a sum of sums, the sum may be rounded differently even where no summand
    # changes. Then the number of changed entries is not bounded.
    if sums.pending.terms <= count:
        counts = [d.count + (rest * x.others.count if rest else 0.0) for d in (x.changed, x.others)]
    if axis is None:
        counts[1] = counts[0]
    found = make(
        shape, x.dtype, low, high, axis, changed, changed if axis is None else others,
        whole=sums.exact, pending=sums.pending, counts=counts, l1_of_row=row,
        apart=float(rounding.up(count * x.apart + 2 * float(error.max()))),
    )  # fmt: skip
    return dataclasses.replace(
        found, off=(sums.gamma, sums.flush) if sums.pending.terms == count else None
    )


def cumulative_sum(
    x: Abstract, axis: int, reverse: bool, sums_of: SumsOf = Sums.of, **_: Any
) -> Abstract:
    """Returns the value of a cumulative sum.

    Let N be the length of the axis. Each result is a sum of at most N terms, and each term is in at
    most N results.

    If the sum runs over the records, a row that changes by d changes at most N results by d. Then
    the l1 norm of a difference grows by a factor of at most N, and the l2 norm by sqrt(N).
    Otherwise, each row is multiplied by a matrix of zeros and ones. The norms of this matrix are at
    most N.
    """
    check_surrounded(x, [axis], 0.0)
    check_cut(x)
    count = x.shape[axis]
    room = 1 + (count + 100) * 2.0**-52

    def added(array: np.ndarray) -> np.ndarray:
        return accumulated(along(array, axis, count), axis, np.add, reverse=reverse)

    sums = sums_of(x, count, added(x.magnitude))
    rows = None if x.axis == axis else x.axis

    def moved(each: np.ndarray, l1: float, l2: float) -> Moves:
        each = np.minimum(each, l1)  # A sum of changes is at most their l1 norm.
        return erring((each, l1 * count, l2), sums.error, x.shape, rows)

    if x.axis == axis:
        c, o, rest = x.changed, x.others, x.n - 1
        l1, l2 = c.l1 + rest * o.l1, c.l2 + rest * o.l2
        changed = others = moved(c.each + rest * o.each, l1, l2 * math.sqrt(count))
    else:
        # The new l2 norm has two bounds: N times the old l2 norm, and sqrt(N) times the old l1
        # norm. The second one is true because a change of one entry by d changes the vector of
        # results by at most sqrt(N) d in l2. If several entries change, sum this bound over the
        # entries.
        changed, others = (
            moved(
                rounding.up(added(d.each) * room), d.l1, min(d.l2 * count, d.l1 * math.sqrt(count))
            )
            for d in (x.changed, x.others)
        )
    low, high = rounding.widened(added(x.low), added(x.high), sums.error)
    return make(
        x.shape, x.dtype, low, high, rows, changed, others, whole=sums.exact,
        pending=sums.pending,
        apart=float(rounding.up(count * x.apart + 2 * float(sums.error.max()))),
    )  # fmt: skip


def cumulative_product(x: Abstract, axis: int, reverse: bool, **_: Any) -> Abstract:
    """Returns the value of a cumulative product along an axis, computed in any order.

    Let P be the product of max(1, |x_i|). If one factor after the other is changed, the product
    changes by at most P sum |x_i - x_i'|.
    """
    if x.axis == axis or x.dtype.kind != "f":
        raise RefusalError(
            "proofs support neither products over records nor products of integers. Sum the "
            "logarithms of the factors instead"
        )
    check_surrounded(x, [axis], 1.0)
    check_cut(x)
    count = x.shape[axis]

    def running(array: np.ndarray, of: Any) -> np.ndarray:
        return accumulated(along(array, axis, count), axis, of, reverse=reverse)

    top = running(np.maximum(x.magnitude, 1.0), np.multiply)
    if not top.max() < _MOST_OF_PRODUCT:
        raise RefusalError("a product may be large. Clip its factors to [-1, 1]")
    room = 1 + (count + 100) * 2.0**-50
    theta = math.expm1(2 * count * rounding.ARITHMETIC * rounding.unit(x.dtype))
    error = rounding.up(theta * top + 4 * count * rounding.tiny(x.dtype) * top)
    low, high = -top, top
    if x.low.min() >= 0:
        low, high = running(x.low, np.multiply), running(x.high, np.multiply)

    def moved(d: Difference) -> Moves:
        each = over(top, x.axis) * running(d.each, np.add) * room
        return erring((each, math.inf, math.inf), error, x.shape, x.axis)

    low, high = rounding.widened(low, high, error)
    low = np.maximum(low, 0.0) if x.low.min() >= 0 else low
    apart = float(rounding.up(top.max() * count * x.apart + 2 * float(error.max())))
    return result_of(x, low, high, moved, apart=apart)


_MOST_OF_PRODUCT = 2.0**20


def contract(
    first: Abstract, second: Abstract, *, dimension_numbers: Any, precision: Any = None,
    preferred_element_type: Any = None, **_: Any,
) -> Abstract:  # fmt: skip
    """Returns the value of a `dot_general`: products of all pairs of entries, then their sum.

    In three cases, there is a tighter bound on the l2 norm of the change of the result:

    - If B is public, ||X B - Y B||_F <= ||B||_2 ||X - Y||_F.
    - If the sum is over the records alone, the result is a sum of outer products a b^T. Here a and
      b are the rows of a record in the two operands. If they change to a' and b', the product
      changes by at most |a| |b - b'| + |b'| |a - a'|.
    - If a and b are the same row r, let s be the row that replaces it, and R a bound on the norm of
      a row. Then ||r r^T - s s^T||_F^2 = |r|^4 + |s|^4 - 2 (r.s)^2 <= 2 R^4.
    """
    dtype = np.dtype(preferred_element_type or first.dtype)
    kinds = {first.dtype.kind, second.dtype.kind}
    mixed = len(kinds) > 1 and kinds <= {"f", "i", "u", "b"}
    if mixed and dtype.kind == "f" and dtype.itemsize >= 4:
        # XLA converts both operands to the dtype of the sums.
        first, second = (x if x.dtype.kind == "f" else convert(x, dtype) for x in (first, second))
    check_highest(precision, dtype)
    (ca, cb), (ba, bb) = dimension_numbers
    narrow = first.dtype in rounding.NARROW
    if first.dtype != second.dtype or dtype != (np.float32 if narrow else first.dtype):
        remedy = "Ask for preferred_element_type=jnp.float32"
        if not narrow:
            remedy = f"Convert both to {dtype} first"
        raise RefusalError(
            f"proofs do not support a product of {first.dtype} and {second.dtype} in {dtype}. "
            f"{remedy}"
        )
    # Both arrays get the same axes: batch, free axes of a, free axes of b, summed axes. The free
    # axes of one array have length 1 in the other.
    free_a = [k for k in range(len(first.shape)) if k not in (*ca, *ba)]
    free_b = [k for k in range(len(second.shape)) if k not in (*cb, *bb)]
    a, b = transpose(first, [*ba, *free_a, *ca]), transpose(second, [*bb, *free_b, *cb])
    batch, middle, end = len(ba), len(ba) + len(free_a), len(ba) + len(free_a) + len(free_b)
    summed = list(range(end, end + len(ca)))
    sizes_a, sizes_b = [first.shape[k] for k in free_a], [second.shape[k] for k in free_b]
    both, terms_of = [first.shape[k] for k in ba], [first.shape[k] for k in ca]
    x = broadcast(a, [*both, *sizes_a, *[1] * len(sizes_b), *terms_of], [*range(middle), *summed])
    places = [*range(batch), *range(middle, end), *summed]
    y = broadcast(b, [*both, *[1] * len(sizes_a), *sizes_b, *terms_of], places)
    if math.prod(np.broadcast_shapes(x.low.shape, y.low.shape)) > _MOST_PRODUCTS:
        raise RefusalError(
            "the product of two arrays has too many terms for a proof. Use fewer columns"
        )
    products = multiply(x, y, dtype=dtype)
    if not summed:
        return products
    load = float(rounding.up(total_over(products.magnitude, products.shape, summed)).max())
    pending = carried(PRODUCT, {}, (x, y), products)
    if narrow:
        # Tensor cores align all terms with the largest term. So each term may have an error of up
        # to 2 u times the largest term, where u is the unit roundoff. To cover this error, each
        # term counts as a sum of four terms, and the magnitudes of the four add up to the largest
        # term.
        top = float(products.magnitude.max())
        terms, weight = max(4, pending.terms), max(top, pending.weight)
        pending = pending.having(terms=terms, weight=weight, factor=1.0)
    found = sum_over(dataclasses.replace(products, pending=pending), summed)
    terms, weight = found.pending.terms, found.pending.weight
    start = Pending.of_sum(terms, max(load, weight))
    # A compiler may rewrite a product with a vector as a sum, and batched products as one sum.
    if batch or 1 in (math.prod(sizes_a), math.prod(sizes_b)):
        start = start.having(terms=terms, weight=start.load)
    off = None
    # `off` bounds the rounding of the products and of the sum. It stays None if integers were
    # converted to floats above, because it does not include the rounding of this conversion.
    if found.off is not None and products.off is not None and len(kinds) == 1:
        (gamma, flush), (relative, absolute) = found.off, products.off
        off = gamma + relative * (1 + gamma), flush + 2 * math.prod(terms_of) * absolute
    found = dataclasses.replace(found, pending=start, off=off)
    # The bounds above are for exact numbers. Now the rounding error of each entry is added, for
    # both databases.
    sizes = rounding.up(products.magnitude)
    sizes = np.maximum(total_over(sizes, products.shape, summed), weight)
    units = 0.0 if found.whole else rounding.sum_units(terms, dtype) + 4 * rounding.unit(dtype)
    slip = units * sizes + 8 * rounding.tiny(dtype) * terms
    found = meet(found, *_within_norms((first, x, ca), (second, y, cb), summed, slip))
    outer_moves = None if batch else outer(first, second, ca, cb)
    public = None if batch else _public_factor(first, second, ca, cb)
    if outer_moves is None and public is None:
        return found
    short = over(slip, found.axis)
    entries = math.prod(s for k, s in enumerate(found.shape) if k != found.axis)
    off1 = float(short.sum()) * entries / short.size
    off2 = rounding.norm2(short, entries / short.size)

    def moves(d: Difference, linf: float, l1: float, l2: float) -> Moves:
        if d.is_zero:
            return d.each, 0.0, 0.0
        l1, l2 = l1 * (1 + 2.0**-30) + 2 * off1, l2 * (1 + 2.0**-30) + 2 * off2
        each = np.where(d.each > 0, linf * (1 + 2.0**-30) + 2 * short, 0.0)
        return rounding.up(each), float(rounding.up(l1)), float(rounding.up(l2))

    if outer_moves is not None:
        moved = moves(found.changed, outer_moves[1], *outer_moves)
        found = meet(found, changed=moved, others=moved)
    if public is not None:
        x, most, column, norm = public
        row = float(rounding.up(norm * x.l2_of_row + off2)) if x.axis is not None else math.inf
        changed, others = (
            moves(d, most * e.l1, column * e.l1, norm * e.l2)
            for d, e in ((found.changed, x.changed), (found.others, x.others))
        )
        found = meet(found, changed=changed, others=others, l2_of_row=row)
    return found


_Factor = tuple[Abstract, Abstract, Sequence[int]]


def _within_norms(
    first: _Factor, second: _Factor, summed: Sequence[int], slip: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of a dot product, by |a . b| <= |a| |b|.

    The norm of a factor is bounded by the l2 norm of its row, and by the range of its entries.

    Each factor is a tuple: an array, this array broadcast to the axes of the products, and the axes
    of the array that are summed.
    """
    norms = list[Any]()
    for x, full, axes in (first, second):
        norm = np.sqrt(total_over(full.magnitude**2, full.shape, summed)) * (1 + 2.0**-30)
        by_record = x.axis is not None and x.axis not in axes
        norms.append(np.minimum(norm, x.l2_of_row) if by_record else norm)
    radius = rounding.up(norms[0] * norms[1] * (1 + 2.0**-30) + slip)
    return -radius, radius


def _public_factor(
    a: Abstract, b: Abstract, ca: Any, cb: Any
) -> tuple[Abstract, float, float, float] | None:
    """Returns one factor of a product, and three bounds on the other factor, a public matrix.

    The three numbers bound the magnitudes of entries, the l1 norms of rows, and the largest
    singular value of this matrix. The result is None if there is no such matrix.
    """
    for x, matrix, cx, cm in ((a, b, ca, cb), (b, a, cb, ca)):
        public = matrix.is_public and matrix.is_finite
        if not public or x.axis in cx or matrix.low.size > 2**20:
            continue
        free = [k for k in range(len(matrix.shape)) if k not in cm]
        rows = math.prod(matrix.shape[k] for k in cm)
        low, high = (
            np.broadcast_to(ends, matrix.shape).transpose([*cm, *free]).reshape(rows, -1)
            for ends in (matrix.low, matrix.high)
        )
        # The matrix is within (high - low) / 2 of the middle of its range. So its norm exceeds the
        # norm of the middle by at most the norm of (high - low) / 2.
        off = float(np.linalg.norm(high - low)) / 2
        norm = (float(np.linalg.norm((low + high) / 2, 2)) + off) * (1 + 1e-9)
        sizes = np.maximum(np.abs(low), np.abs(high))
        return x, float(sizes.max()), float(sizes.sum(1).max()) * (1 + 1e-9), norm
    return None


def outer(a: Abstract, b: Abstract, ca: Any, cb: Any) -> tuple[float, float] | None:
    """Returns how much a sum of a b^T over the records changes, in the l1 and the l2 norm.

    It changes by at most |a| |b - b'| + |b'| |a - a'|, and by at most |a| |b| + |a'| |b'|.
    """
    by_record = len(ca) == 1 and a.axis == ca[0] and b.axis == cb[0]
    if not by_record or not (a.others.is_zero and b.others.is_zero):
        return None
    (l1, pa), (m1, pb) = (a.changed.l1, a.l1_of_row), (b.changed.l1, b.l1_of_row)
    (l2, ra), (m2, rb) = (a.changed.l2, a.l2_of_row), (b.changed.l2, b.l2_of_row)
    l1, l2 = min(pa * m1 + pb * l1, 2 * pa * pb), min(ra * m2 + rb * l2, 2 * ra * rb)
    if a.origin is b.origin and not a.pending.coarse:
        apart = max(a.apart, b.apart) * math.sqrt(math.prod(a.shape) / a.n)
        l2 = min(l2, math.sqrt(2) * (max(ra, rb) + apart) ** 2)
    return l1, l2
