"""Rules of contractions and of adding up at places that records choose."""

import dataclasses
import math
from typing import Any

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import multiply
from dpjax.proving._layout import broadcast, check_places, transpose
from dpjax.proving._pending import carried
from dpjax.proving._pending_facts import Pending
from dpjax.proving._reductions import _summed, sum_over
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, Difference, difference, make

_MOST_PRODUCTS = 2**24


def contract(first: Abstract, second: Abstract, dimensions: Any, dtype: np.dtype) -> Abstract:
    """dot_general: the product of every pair of entries, then their sum.

    The l2 norm has a better bound in two cases. If B is public, ||X B - Y B|| <= ||B||_2 ||X - Y||.
    If the sum runs over the records alone, a b^T moves by at most |a| |b - b'| + |b'| |a - a'|. If
    a and b are one row r, ||r r^T - s s^T||_F^2 = |r|^4 + |s|^4 - 2 (r.s)^2 <= 2 R^4.
    """
    (ca, cb), (ba, bb) = dimensions
    narrow = first.dtype in rounding.NARROW
    if first.dtype != second.dtype or dtype != (np.float32 if narrow else first.dtype):
        raise RefusalError(
            f"a product of {first.dtype} and {second.dtype} in {dtype} has no rule: in 16 bits, ask"
            " for preferred_element_type=jnp.float32"
        )
    fa = [k for k in range(len(first.shape)) if k not in (*ca, *ba)]
    fb = [k for k in range(len(second.shape)) if k not in (*cb, *bb)]
    a, b = transpose(first, [*ba, *fa, *ca]), transpose(second, [*bb, *fb, *cb])
    batch, free, rank = len(ba), len(fa) + len(fb), len(ba) + len(fa) + len(fb) + len(ca)
    summed = list(range(batch + free, rank))
    shape = tuple(first.shape[k] for k in [*ba, *fa]) + tuple(second.shape[k] for k in [*fb, *cb])
    places_a = [*range(batch + len(fa)), *summed]
    places_b = [*range(batch), *range(batch + len(fa), rank)]
    a_shape, b_shape = list(shape), list(shape)
    for k in range(batch + len(fa), batch + free):
        a_shape[k] = 1
    for k in range(batch, batch + len(fa)):
        b_shape[k] = 1
    x, y = broadcast(a, a_shape, places_a), broadcast(b, b_shape, places_b)
    if math.prod(np.broadcast_shapes(x.low.shape, y.low.shape)) > _MOST_PRODUCTS:
        raise RefusalError("the product of two arrays has too many terms to walk")
    if not summed:
        return multiply(x, y, dtype=dtype)
    products = multiply(x, y, dtype=dtype)
    load = float(rounding.up(_summed(products.magnitude, products.shape, summed)).max())
    products = dataclasses.replace(products, pending=carried("mul", {}, (x, y), products))
    if narrow:  # Tensor cores cut digits of all terms below the largest one, up to 2 u of it.
        products = _as_four(products)
    found = sum_over(products, summed)
    terms, weight = found.pending.terms, found.pending.weight
    start = Pending.of_sum(terms, max(load, weight))
    # Compilers take a product with a vector for a sum, and sum over batches in one product.
    free_sizes = [math.prod(x.shape[k] for k in f) for x, f in ((first, fa), (second, fb))]
    if batch or min(free_sizes) == 1:
        start = start.having(terms=terms, weight=start.load)
    found = dataclasses.replace(found, pending=start)
    bounds = (
        _public_factor(first, second, ca, cb, batch),
        _outer(first, second, ca, cb, batch),
    )
    l2s = [l2 for l2 in bounds if l2 is not None]
    if not l2s:
        return found
    # Rounding of each entry, in both databases, on top of the real bound.
    sizes = rounding.up(products.magnitude)
    copies = math.prod(shape[k] // sizes.shape[k] for k in summed)
    units = rounding.sum_units(terms, dtype) + 4 * rounding.unit(dtype)
    sizes = np.maximum(sizes.sum(tuple(summed)) * copies, weight)
    exact = 0.0 if found.whole else units
    slip = 2 * (exact * sizes + 8 * rounding.tiny(dtype) * terms)
    repeats = math.prod(found.shape) / max(1, slip.size)
    slip = rounding.norm2(slip, repeats)

    def better(d: Difference, l2: float) -> Difference:
        if d.is_zero:
            return d
        l2 = float(rounding.up(l2 * (1 + 2.0**-30) + slip))
        return difference(
            d.each, found.shape, found.axis, l1=d.l1, l2=min(l2, d.l2), whole=found.whole
        )

    changed = better(found.changed, min(l2[0] for l2 in l2s))
    others = better(found.others, min(l2[1] for l2 in l2s))
    return dataclasses.replace(found, changed=changed, others=others)


def _as_four(x: Abstract) -> Abstract:
    """Numbers of which each is rounded as a sum of four."""
    top = float(x.magnitude.max())
    terms, weight = max(4, x.pending.terms), max(top, x.pending.weight)
    pending = x.pending.having(terms=terms, weight=weight, factor=1.0)
    return dataclasses.replace(x, pending=pending)


def _public_factor(
    a: Abstract, b: Abstract, ca: Any, cb: Any, batch: int
) -> tuple[float, float] | None:
    for x, matrix, cx, cm in ((a, b, ca, cb), (b, a, cb, ca)):
        public = matrix.is_public and matrix.is_finite
        if batch or not public or x.axis in cx or matrix.low.size > 2**20:
            continue
        free = [k for k in range(len(matrix.shape)) if k not in cm]
        rows = math.prod(matrix.shape[k] for k in cm)
        low, high = (
            np.broadcast_to(ends, matrix.shape).transpose([*cm, *free]).reshape(rows, -1)
            for ends in (matrix.low, matrix.high)
        )
        # What is known up to a radius is off by at most the norm of the radius.
        off = float(np.linalg.norm(high - low)) / 2
        largest = (float(np.linalg.norm((low + high) / 2, 2)) + off) * (1 + 1e-9)
        return largest * x.changed.l2, largest * x.others.l2
    return None


def _outer(a: Abstract, b: Abstract, ca: Any, cb: Any, batch: int) -> tuple[float, float] | None:
    by_record = len(ca) == 1 and a.axis == ca[0] and b.axis == cb[0] and not batch
    if not by_record or not (a.others.is_zero and b.others.is_zero):
        return None
    ra, rb = a.l2_of_row, b.l2_of_row
    l2 = ra * b.changed.l2 + rb * a.changed.l2
    if a.origin is b.origin and not a.pending.coarse:
        apart = max(a.apart, b.apart) * math.sqrt(math.prod(a.shape) / a.n)
        l2 = min(l2, math.sqrt(2) * (max(ra, rb) + apart) ** 2)
    return l2, l2


def add_at_places(
    start: Abstract, places: Abstract, updates: Abstract, numbers: Any, mode: str
) -> Abstract:
    """scatter_add of one number a record into a public array of one axis: a histogram.

    A record adds u at its place i, or nothing beyond the ends. Its replacement takes u away at i
    and adds u' at i'. So the sum moves by at most |u| + |u'| in l1 and, if i and i' differ,
    sqrt(u^2 + u'^2) in l2; if they agree, |u - u'|.
    """
    plain = (
        len(start.shape) == 1
        and len(updates.shape) == 1
        and len(places.shape) == 2
        and places.shape[1] == 1
        and tuple(numbers.update_window_dims) == ()
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.operand_batching_dims) == ()
    )
    if not plain or not start.is_public or {places.axis, updates.axis} - {0, None}:
        raise RefusalError(
            "a scatter of this form has no rule: add one number per record to one axis"
        )
    check_places(places, start.shape[0])
    if start.dtype != updates.dtype:
        raise RefusalError("a scatter of these dtypes has no rule")
    public = places.is_public and updates.is_public
    by_record = places.others.is_zero and updates.others.is_zero
    if not public and not (by_record and 0 in (places.axis, updates.axis)):
        raise RefusalError("places or numbers depend on several records: no rule")
    inside = places.low.min() >= 0 and places.high.max() < start.shape[0]
    if not inside and mode not in ("fill_or_drop", "clip"):
        raise RefusalError("a place may be out of bounds: clip the index")
    n, dtype = updates.shape[0], start.dtype
    top = float(updates.magnitude.max())
    one_sign = updates.low.min() >= 0 or updates.high.max() <= 0
    l1, l2 = 2 * top, math.sqrt(2) * top * (1 + 2.0**-40)
    if not one_sign:
        l2 = 2 * top
    each = top if one_sign else 2 * top
    whole = start.whole and updates.whole
    sizes = float(start.magnitude.max()) + n * top
    whole = whole and (dtype.kind != "f" or sizes <= rounding.exact_integers(dtype))
    slip = 0.0
    if not whole:
        slip = rounding.sum_units(n + 1, dtype) * sizes + 4 * rounding.tiny(dtype) * (n + 1)
    low = start.low + n * min(0.0, float(updates.low.min()))
    high = start.high + n * max(0.0, float(updates.high.max()))
    low, high = rounding.widened(low, high, np.asarray(slip))
    bins = start.shape[0]
    if public:
        l1 = l2 = each = 0.0
        slip = 0.0 if whole else slip
    moved = (
        np.full((1,), float(rounding.up(each + 2 * slip))),
        float(rounding.up(l1 + 2 * slip * bins)),
        float(rounding.up(l2 + 2 * slip * math.sqrt(bins))),
    )
    found = make(start.shape, dtype, low, high, None, moved, moved, whole=whole)
    pending = Pending.of_sum(n, sizes).having(single=n == 1)
    return dataclasses.replace(found, pending=pending)
