"""The abstract value: what is known of an array of a traced program on every pair of neighbors.

Fix public bounds B, a number n of records, and a traced program. A *pair* is two databases of n
records within B that differ in record i alone. `Abstract` describes one variable x of the program.
Its concretization is the set of all families of arrays x(D) such that, for every pair D, D':

1. low <= x(D) <= high elementwise, and x(D) holds no NaN and no infinity. Where a device flushes
   subnormal numbers to 0, so may x(D).
2. If `axis` is None: |x(D) - x(D')| <= others.each elementwise, and the l1 and l2 norms of the
   whole difference are at most others.l1 and others.l2. `changed` equals `others` then.
3. If `axis` is k: axis k counts the records. The row i of the difference is within `changed`, and
   every other row is within `others`, in the same three senses.
4. If `whole`, all entries of x(D) are integers. If j is in `tied`, x(D) does not vary along axis j.
5. l2_of_row bounds the l2 norm of each row of x(D) itself.
6. `pending` says what a compiler may join with operations to come; _pending.py has the list.
7. Two uses of one entry of x(D) are at most `apart` from each other.

x(D) is the array *as computed* on D, in the dtype that runs. Each use of it may see another
rounding of the same exact operation, as fusion makes it, but the same one on D and on D' at one
place. So an entry whose inputs do not differ does not differ. Lemmas that read an array twice
count `apart`.

Theorem. If every input is in its concretization, and every rule takes values in concretizations to
a value in the concretization of its output, the output differs by at most `norm_of` of it on every
pair. Proof: induction over the equations, docs/proofs/global-sensitivity.md. Each rule states its
own step.

Arrays are kept short: an axis of length 1 in `low`, `high` or `each` stands for all of its places.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._pending_facts import NOTHING, Pending
from dpjax.proving._refusal import RefusalError


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Bounds on a difference of two arrays: elementwise, in l1 and in l2."""

    each: np.ndarray
    l1: float
    l2: float

    @property
    def is_zero(self) -> bool:
        return self.l1 == 0


def difference(
    each: np.ndarray,
    shape: Sequence[int],
    axis: int | None,
    *,
    l1: float = math.inf,
    l2: float = math.inf,
    whole: bool = False,
) -> Difference:
    """The tightest bounds that follow from the given ones."""
    each = over(np.asarray(each, float), axis)  # Any row may be the one that moves.
    if whole:  # An integer below 2.3 is at most 2.
        each, l1 = np.floor(each), float(np.floor(l1))
    counted = [size for k, size in enumerate(shape) if k != axis]
    copies = math.prod(counted) / max(1, each.size)
    room = 1 + (each.size + 100) * 2.0**-52
    if each.size == 0:
        return Difference(each, 0.0, 0.0)
    l1 = min(l1, float(each.sum()) * copies * room)
    l2 = min(l2, l1, rounding.norm2(each, copies) * room)
    l1 = min(l1, math.sqrt(math.prod(counted)) * l2 * room)
    if whole:
        l1 = math.floor(l1)
    each = np.minimum(each, l2)
    return Difference(np.floor(each) if whole else each, l1, l2)


@dataclasses.dataclass(frozen=True, eq=False)
class Abstract:
    """What is known of one array; see the module."""

    shape: tuple[int, ...]
    dtype: np.dtype
    low: np.ndarray
    high: np.ndarray
    axis: int | None
    changed: Difference
    others: Difference
    whole: bool = False
    tied: frozenset[int] = frozenset()
    l2_of_row: float = math.inf
    source: object | None = None
    pending: Pending = NOTHING
    apart: float = 0.0

    @property
    def origin(self) -> object:
        """The array whose entries these are, row by row, perhaps in another order in a row."""
        return self if self.source is None else self.source

    @property
    def n(self) -> int:
        """The number of records."""
        assert self.axis is not None
        return self.shape[self.axis]

    @property
    def is_public(self) -> bool:
        """Whether no record moves it."""
        return self.changed.is_zero and self.others.is_zero

    @property
    def is_known(self) -> bool:
        """Whether it is one public array."""
        return self.is_public and bool((self.low == self.high).all())

    @property
    def is_finite(self) -> bool:
        """Whether its range is; that of a constant may not be."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    @property
    def magnitude(self) -> np.ndarray:
        return np.maximum(np.abs(self.low), np.abs(self.high))


def over(array: np.ndarray, axis: int | None) -> np.ndarray:
    """The maximum along the axis of records, which becomes 1."""
    return array if axis is None else array.max(axis=axis, keepdims=True)


def check_dtype(dtype: Any) -> None:
    """Refuses dtypes that no rule knows, also those that JAX will have one day."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise RefusalError("random bits have no rule: draw them outside of the target")
    if dtype not in rounding.KNOWN:
        raise RefusalError(
            f"{dtype} has no rule: compute in float32, float64, or integers of 8 to 64 bits"
        )


def constant(value: object) -> Abstract:
    """One public array. It may hold NaN and infinities; few rules take them."""
    check_dtype(getattr(value, "dtype", np.dtype(float)))
    array = np.asarray(value)
    check_dtype(array.dtype)
    numbers = array.astype(float)
    if array.dtype.kind in "iu" and np.abs(numbers).max(initial=0) > 2.0**52:
        raise RefusalError("integers beyond 2^52 have no rule")
    none = Difference(np.zeros((1,) * array.ndim), 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        whole = bool((np.floor(numbers) == numbers).all())
    found = Abstract(array.shape, array.dtype, numbers, numbers, None, none, none, whole=whole)
    if array.dtype in rounding.NARROW:
        found = dataclasses.replace(found, pending=Pending(coarse=True))
    return found


def make(
    shape: Sequence[int],
    dtype: np.dtype,
    low: np.ndarray,
    high: np.ndarray,
    axis: int | None,
    changed: tuple[np.ndarray, float, float],
    others: tuple[np.ndarray, float, float],
    *,
    whole: bool = False,
    tied: frozenset[int] = frozenset(),
    l2_of_row: float = math.inf,
    source: object | None = None,
    pending: Pending = NOTHING,
    apart: float = math.inf,
) -> Abstract:
    """An abstract value whose differences are capped by its range, as is what uses are apart.

    Raises:
        RefusalError: if the range is not finite, or too large for its dtype.
    """
    shape, dtype = tuple(shape), np.dtype(dtype)
    low, high = np.asarray(low, float), np.asarray(high, float)
    if math.prod(shape) == 0:
        raise RefusalError("an empty array has no rule")
    _check_range(low, high, dtype)
    _check_places(low, shape)
    _check_places(high, shape)
    if whole:
        low, high = np.ceil(low), np.floor(high)
    else:  # A subnormal may be flushed to 0.
        least = rounding.tiny(dtype)
        low = np.where((low > 0) & (low < least), 0.0, low)
        high = np.where((high < 0) & (high > -least), 0.0, high)
    width = rounding.up(over(high - low, axis))
    made = []
    for each, l1, l2 in (changed, others) if axis is not None else (others,):
        each = np.minimum(*np.broadcast_arrays(np.asarray(each, float), width))
        _check_places(each, shape)
        made.append(difference(each, shape, axis, l1=l1, l2=l2, whole=whole))
    largest = over(np.maximum(np.abs(low), np.abs(high)), axis)
    row = difference(largest, shape, axis).l2
    return Abstract(
        shape, dtype, low, high, axis, made[0], made[-1], whole, tied, min(l2_of_row, row),
        source, pending, min(apart, float(rounding.up((high - low).max()))),
    )  # fmt: skip


def _check_places(array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuses what would be counted at other places than those of the shape."""
    pairs = zip(array.shape, shape, strict=True) if array.ndim == len(shape) else ((0, 1),)
    if any(size not in (1, places) for size, places in pairs) or np.isnan(array).any():
        raise RefusalError(f"a rule gave NaN, or numbers of shape {array.shape} for {shape}")


def _check_range(low: np.ndarray, high: np.ndarray, dtype: np.dtype) -> None:
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefusalError("the value may be infinite or NaN")
    if (low > high).any():
        raise RefusalError("the interval of the value is empty")
    largest = max(np.abs(low).max(), np.abs(high).max())
    check_dtype(dtype)
    if dtype.kind == "b" and (np.ceil(low).min() < 0 or np.floor(high).max() > 1):
        raise RefusalError("sums and products of booleans have no rule: convert to a number")
    if rounding.is_float(dtype) and largest > rounding.largest(dtype):
        raise RefusalError(f"the value may be as large as {largest:.3g}, and may overflow: rescale")
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if largest > 2.0**52 or low.min() < info.min or high.max() > info.max:
            raise RefusalError(f"{dtype} may overflow: the value may be as large as {largest:.3g}")


def as_dense(x: Abstract) -> Abstract:
    """The same array, seen without its axis of records.

    One row is within `changed` and n - 1 rows are within `others`, so norms add up like this.
    """
    if x.axis is None:
        return x
    rest = x.n - 1
    each = np.maximum(x.changed.each, x.others.each if rest else 0.0)
    l1 = float(rounding.up(x.changed.l1 + rest * x.others.l1))
    l2 = float(rounding.up(rounding.norm2([x.changed.l2, math.sqrt(rest) * x.others.l2])))
    dense = difference(each, x.shape, None, l1=l1, l2=l2, whole=x.whole)
    return dataclasses.replace(
        x, axis=None, changed=dense, others=dense, l2_of_row=math.inf, source=None
    )


def as_rows(x: Abstract, axis: int) -> Abstract:
    """The same array, seen as rows along an axis: a row differs by at most what all of it does."""
    if x.axis == axis:
        return x
    x = as_dense(x)
    each = x.others.each
    if not x.is_public and not without_middle(each, x.shape, axis).any():
        # _surrounded.py refuses sums of it, and would not know it by its rows.
        raise RefusalError(f"numbers that move at one place of axis {axis} alone are no rows")
    each = over(each, axis)
    row = difference(each, x.shape, axis, l1=x.others.l1, l2=x.others.l2, whole=x.whole)
    norm = difference(over(x.magnitude, axis), x.shape, axis).l2
    return dataclasses.replace(x, axis=axis, changed=row, others=row, l2_of_row=norm, source=None)


def without_middle(array: np.ndarray, shape: Sequence[int], axis: int) -> np.ndarray:
    """All but the middle place of an axis; all of them where none is in the middle."""
    size = shape[axis]
    if array.shape[axis] == 1 or size % 2 == 0:
        return array
    return np.delete(array, size // 2, axis)


def stretched(x: Abstract, shape: Sequence[int]) -> Abstract:
    """The array, repeated along axes of length 1, or a scalar repeated everywhere."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if not x.shape:
        x = reshaped_scalar(x, len(shape))
    if len(x.shape) != len(shape):
        raise RefusalError(f"shapes {x.shape} and {shape} have no rule")
    repeated = {k for k, size in enumerate(shape) if x.shape[k] != size}
    if any(x.shape[k] != 1 for k in repeated):
        raise RefusalError(f"shapes {x.shape} and {shape} have no rule")
    if x.axis in repeated:
        x = as_dense(x)
    copies = math.prod(shape[k] for k in repeated)

    def more(d: Difference) -> Difference:
        l1, l2 = d.l1 * copies, d.l2 * math.sqrt(copies)
        return difference(
            d.each, shape, x.axis, l1=float(rounding.up(l1)), l2=float(rounding.up(l2)),
            whole=x.whole,
        )  # fmt: skip

    changed, others = more(x.changed), more(x.others)
    norm = float(rounding.up(x.l2_of_row * math.sqrt(copies)))
    tied = x.tied | repeated
    return dataclasses.replace(
        x,
        shape=shape,
        changed=changed,
        others=others,
        tied=tied,
        l2_of_row=norm,
        source=None,
    )


def reshaped_scalar(x: Abstract, rank: int) -> Abstract:
    """A scalar as an array of one element."""
    ones = (1,) * rank
    d = dataclasses.replace(x.others, each=x.others.each.reshape(ones))
    return dataclasses.replace(
        x, shape=ones, low=x.low.reshape(ones), high=x.high.reshape(ones), changed=d, others=d
    )


def aligned(*values: Abstract) -> tuple[list[Abstract], tuple[int, ...], int | None]:
    """Values of one shape, with one axis of records or none."""
    rank = max(len(x.shape) for x in values)
    full = [x if x.shape else reshaped_scalar(x, rank) for x in values]
    shape = np.broadcast_shapes(*(x.shape for x in full))
    full = [stretched(x, shape) for x in full]
    axes = [x.axis for x in full if x.axis is not None]
    if not axes:
        return full, shape, None
    return [as_rows(x, axes[0]) for x in full], shape, axes[0]


def norm_of(outputs: Sequence[Abstract], norm: str) -> float:
    """A bound on the norm of the difference of all outputs together."""
    found = [as_dense(x).others for x in outputs]
    if norm == "l1":
        bound = sum(d.l1 for d in found)
    elif norm == "l2":
        bound = rounding.norm2([d.l2 for d in found])
    else:
        bound = max(float(d.each.max()) for d in found)
    return float(rounding.up(rounding.up(bound)))
