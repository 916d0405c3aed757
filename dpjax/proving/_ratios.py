"""A lemma for ratios of two sums over the records, such as the mean of a group or a precision.

Let A = sum_i a_i and B = sum_i b_i, with b_i in [0, b] and a_i = m_i b_i for m_i in [l, h]. Define
l0 = min(l, 0) and h0 = max(h, 0). Let C be B, or the maximum of B and a number, with C >= c > 0.

Lemma. A / C is in [l0, h0], and one record changes it by at most (h0 - l0) b / c.

Proof. A is in [l B, h B], and 0 <= B / C <= 1, so A / C is in [l0, h0]. For a neighbor with A' and
C', let R = A' / C'. Then

    A / C - A' / C' = ((A - A') - R (C - C')) / C .

C - C' is t (B - B') for some t in [0, 1], because a maximum does not increase a difference, and
does not change its sign. Let r = t R, which is in [l0, h0]. For the changed record i, the numerator
is b_i (m_i - r) - b_i' (m_i' - r). If both terms have the same sign, their difference is at most
the larger term. Otherwise, it is at most b (|m_i - r| + |m_i' - r|) <= b (h0 - l0).

Sums by place, such as those of `jax.ops.segment_sum`, have one A and one B for each place. If a
record leaves a place, its b_i' at this place is 0. So the lemma is true for each place, and at most
two places change.

In sums over pairs of records, one record changes several terms, and the bound is multiplied by the
number of these terms.

*Means.* If C is B and b_i >= k > 0, the same is true without the number 0, and with a smaller
factor: A / C is in [l, h], and it changes by at most (h - l) b / ((n - 1) k + b). Proof: let M be
the same ratio for all records except i. Then A / C is M + t (m_i - M) for the weight t = b_i / B,
which is at most b / ((n - 1) k + b). So both values are on a segment of this fraction of h - l.

*Shares.* If A is a sum by place of numbers b_i >= 0, and C >= B for the sum B of all these numbers,
all entries of A / C add up to at most 1, and one record changes them by at most 2 b / c in l1.
Proof: let the record move from place p to place q, and let d = C - C' = t (b_i - b_i') as above,
with d >= 0 after swapping the databases. With R = A' / C', the numerator is b_i - R_p d at p,
-b_i' - R_q d at q, and -R_g d elsewhere. Since d <= b_i and the R_g add up to at most 1, the l1
norm is at most b_i - R_p d + b_i' + (1 - R_p) d <= b_i + b_i' + d <= 2 max(b_i, b_i'). If p = q, it
is at most |b_i - b_i' - R_p d| + (1 - R_p) d <= 2 (b_i - b_i').
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Equation, aval
from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import flattened
from dpjax.proving._rows import as_dense
from dpjax.proving._scopes import At, Reader, Scope
from dpjax.proving._value import Abstract, meet

_DEPTH = 12
_Interval = tuple[float, float]


class _Sum(NamedTuple):
    """A sum over records.

    Attributes:
        terms: one array, or two arrays whose product is summed.
        form: facts about the sum. Two sums with equal facts add up terms at the same indices.
        places: for a sum by place (a scatter-add), the index to which each term is added.
        more: arrays of the same shape whose sums are added to this sum.
    """

    terms: tuple[At, ...]
    form: tuple[Any, ...]
    places: At | None = None
    more: tuple[At, ...] = ()


class _Divisor(NamedTuple):
    """The divisor C of a quotient: a sum B over records, or the maximum of B and a number.

    Attributes:
        sum: the variable that is B.
        raised: whether C is a maximum.
        places: the axes of the quotient along which B varies.
    """

    sum: At
    raised: bool
    places: tuple[int, ...]


class _Ratios(Reader):
    """Finds sums, and the terms of sums, in a program."""

    def node(self, at: At) -> Any:
        """Returns the operation that computes a variable."""
        self.steps = 0  # The error of the lemma does not depend on the length of the search.
        return super().node(at)

    def plain(self, at: At) -> At:
        """Returns the variable before all casts that change a number at most by rounding."""
        node = self.node(at)
        if node.name == "convert_element_type":
            kinds = [np.dtype(aval(x).dtype) for x in (node.equation.invars[0], node.atom)]
            wide = all(x.kind != "f" or x.itemsize >= 4 for x in kinds)
            # A float32 number that is cast to float64 keeps the rounding errors of float32.
            wide &= kinds[0].kind != "f" or kinds[1].itemsize <= kinds[0].itemsize
            # Other casts change a number by more: a cast to booleans turns 5 into 1, and a cast to
            # integers turns 1.9 into 1.
            cut = {"b": kinds[0].kind != "b", "f": False}.get(kinds[1].kind, kinds[0].kind == "f")
            if wide and not cut:
                return self.plain(node.operands[0])
        return node.atom, node.scope

    def value(self, at: At) -> Abstract | None:
        return at[1].value(at[0])

    def range_of(self, at: At) -> _Interval | None:
        """Returns the range of a term; None if it is unknown."""
        if (number := self.number(at)) is not None:
            return number, number
        if np.dtype(aval(at[0]).dtype).kind == "b":
            return 0.0, 1.0
        node = self.node(at)  # An array of an inner program may be an operand of the program.
        x = node.scope.value(node.atom)
        return None if x is None else (float(x.low.min()), float(x.high.max()))

    def same(self, first: At, second: At, depth: int = _DEPTH) -> bool:
        """Whether two variables are computed by the same operations from the same variables."""
        a, b = self.node(first), self.node(second)
        if a.atom is b.atom and a.scope is b.scope:
            return True
        known = [self.value((x.atom, x.scope)) for x in (a, b)]
        if all(x is not None and x.is_known and not x.apart for x in known):
            x, y = known
            return (x.shape, x.dtype) == (y.shape, y.dtype) and bool((x.low == y.low).all())  # type: ignore[union-attr]
        if isinstance(a.atom, jex.Literal) and isinstance(b.atom, jex.Literal):
            alike = aval(a.atom).dtype == aval(b.atom).dtype
            return alike and bool(np.all(np.asarray(a.atom.val) == np.asarray(b.atom.val)))
        if not depth or not a.name or a.name != b.name or a.equation.effects:
            return False
        if a.equation.params != b.equation.params or len(a.operands) != len(b.operands):
            return False
        if len(a.equation.outvars) != 1 or len(b.equation.outvars) != 1:
            return False
        pairs = zip(a.operands, b.operands, strict=True)
        return all(self.same(x, y, depth - 1) for x, y in pairs)

    def by_record(self, at: At) -> At:
        """If each record's row repeats a single number, returns the vector of these numbers.

        Other arrays are returned unchanged.
        """
        start = at
        while True:
            at = self.plain(at)
            node, x = self.node(at), self.value(at)
            if x is None or x.axis is None:
                return start
            if len(x.shape) == 1:
                return at
            if node.name != "broadcast_in_dim":
                return start
            at = node.operands[0]
            below = self.value(self.plain(at))
            if below is None or below.axis is None:
                return start
            if below.n != x.n or len(aval(at[0]).shape) != len(below.shape):
                return start

    def sum(self, at: At) -> _Sum | None:
        """Returns the terms if a variable is a sum over records; otherwise None."""
        node = self.node(self.plain(at))
        if node.name == "add":
            one, other = (self.sum(operand) for operand in node.operands)
            if one is None or other is None or one.form != other.form or one.places or other.places:
                return None
            plain = len(one.terms) == len(other.terms) == 1
            return one._replace(more=(*one.more, *other.terms, *other.more)) if plain else None
        xs = [self.value(operand) for operand in node.operands] if node.name else []
        if not xs or xs[-1] is None:
            return None
        shape, params = xs[-1].shape, node.equation.params
        if node.name == "reduce_sum":
            axes = tuple(params["axes"])
            if axes == (xs[-1].axis,) or axes == tuple(range(len(shape))):
                return _Sum(tuple(node.operands), (shape, axes))
        if len(shape) != 1:
            return None
        if node.name == "dot_general" and all(x is not None for x in xs):
            vectors = params["dimension_numbers"] == (((0,), (0,)), ((), ()))
            return _Sum(tuple(node.operands), (shape, (0,))) if vectors else None
        if node.name == "scatter-add" and self.number(node.operands[0]) == 0:
            places, out = xs[1], aval(node.equation.outvars[0]).shape
            if places is not None and places.others.is_zero and not places.apart:
                form = shape, (0,), out, str(params["mode"]), str(params["dimension_numbers"])
                return _Sum((node.operands[2],), form, node.operands[1])
        return None

    def scaled(self, at: At) -> tuple[float, At]:
        """Returns a positive public factor, and the variable that it multiplies.

        The factor is 1 if there is no product.
        """
        node = self.node(self.plain(at))
        for one, other in (node.operands, node.operands[::-1]) if node.name == "mul" else ():
            number = self.number(other)
            if number is not None and 2.0**-30 <= number <= 2.0**30:
                return number, one
        return 1.0, at

    def factor(self, a: tuple[At, ...], b: At) -> _Interval | None:
        """Returns (l, h) such that every a_i is b_i times a number in [l, h]; None if unknown.

        `a` is a tuple of one or two arrays. For two arrays, a_i is the product of their entries. If
        b has one number for each record, a may have several entries for each record.
        """
        if len(a) == 2:
            for one, other in (a, a[::-1]):
                first, second = self.factor((one,), b), self.range_of(other)
                if first is not None and second is not None:
                    products = [x * y for x in first for y in second]
                    return min(products), max(products)
            return None
        at = self.plain(a[0])
        if self.same(at, b) or self.same(self.by_record(at), b):
            return 1.0, 1.0
        if (number := self.number(b)) is not None:
            found = self.range_of(a[0])
            return None if found is None or number <= 0 else (found[0] / number, found[1] / number)
        node = self.node(at)
        if node.name == "mul":
            return self.factor(tuple(node.operands), b)
        if node.name == "select_n" and self.number(node.operands[1]) == 0:
            # where(chosen, x, 0) equals chosen * x, because `chosen` is 0 or 1.
            chosen, *_, x = node.operands
            return self.factor((chosen, x), b) if len(node.operands) == 3 else None
        if node.name == "and":
            found = [self.factor((operand,), b) for operand in node.operands]
            known = next((x for x in found if x is not None), None)
            return None if known is None else (min(known[0], 0.0), max(known[1], 0.0))
        return None

    def factor_of_sum(self, a: tuple[At, ...], bs: Sequence[At]) -> _Interval | None:
        """Returns (l, h) such that every a is b_1 + b_2 + ... times a number in [l, h].

        The b_k must be at least 0. The result is None if no such numbers are known.

        Let 0 <= a <= h_k b_k with known numbers h_k > 0, for all k in a set K. Then a / h_k <= b_k.
        The sum of these inequalities over K shows that a times the sum of 1 / h_k over K is at most
        b_1 + b_2 + ...
        """
        found = [self.factor(a, b) for b in bs]
        known = [x for x in found if x is not None]
        if not known or len(bs) == 1:
            return known[0] if known else None
        low, high = (pick(x[k] for x in known) for k, pick in enumerate((max, min)))
        if low < 0 or high <= 0:
            return min(low, 0.0), max(high, 0.0)
        return 0.0, 1 / sum(1 / h for _, h in known) * (1 + 2.0**-50)

    def divisor(self, at: At) -> _Divisor:
        """Finds the sum B in a divisor of the form B, max(B, c), or where(B > 0, B, 1).

        The last form is supported only if the entries of B are counts.
        """
        at = self.plain(at)
        raised, places = False, tuple(range(len(aval(at[0]).shape)))
        while True:
            node = self.node(at)
            if node.name == "max" and not raised:
                # If all weights are public, both operands are public numbers.
                raised, pairs = True, zip(node.operands, node.operands[::-1], strict=True)
                sums = [one for one, other in pairs if self.number(other) is not None]
                if not sums:
                    break
                at = self.plain(sums[0])
            elif node.name == "broadcast_in_dim":
                kept = node.equation.params["broadcast_dimensions"]
                before, after = (aval(x).shape for x in (node.equation.invars[0], node.atom))
                if any(a != b for a, b in zip(before, (after[k] for k in kept), strict=True)):
                    break
                places, at = tuple(places[k] for k in kept), self.plain(node.operands[0])
            else:
                break
        node = self.node(at)
        if node.name == "select_n" and len(node.operands) == 3:
            which, at_zero, count = self.node(node.operands[0]), *node.operands[1:]
            x = self.value(self.plain(count))
            if which.name == "gt" and x is not None and x.whole and x.low.min() >= 0:
                compared, zero = which.operands
                numbers = self.number(zero), self.number(at_zero)
                if numbers == (0, 1) and self.same(compared, count):
                    return _Divisor(self.plain(count), True, places)
        return _Divisor(at, raised, places)


class _Quotient(NamedTuple):
    """Facts about a quotient A / C, where A is the sum of a_i = m_i b_i over the records.

    The divisor C is the sum B of the b_i, or the maximum of B and a number.

    Attributes:
        low: a lower bound on all m_i. Its shape broadcasts to that of the quotient.
        high: an upper bound on all m_i, in the same shape.
        terms: the arrays that contain the a_i and the b_i.
        weights: one or several arrays. Their sum is the array of the b_i.
        moving: the number of terms that one record changes.
        spread: "all" if all entries of A / C may change; "places" if at most two entries may
            change; "shares" if the entries add up to at most 1 (*Shares*, above).
    """

    low: np.ndarray
    high: np.ndarray
    terms: Sequence[Abstract]
    weights: Sequence[Abstract]
    moving: float = 1.0
    spread: str = "all"


def _quotient(reader: _Ratios, top: At, divisor: _Divisor, shape: tuple[int, ...]) -> Any:
    """Returns facts about A / C if A and B are sums over the same records; otherwise None.

    `top` is A. `divisor` is C, which is the sum B or a maximum of B and a number.
    """
    a, b = reader.sum(top), reader.sum(divisor.sum)
    if b is None or len(b.terms) != 1:
        return None
    if a is None:
        return _of_rows(reader, top, divisor, b, shape)
    bs = [reader.plain(at) for at in (b.terms[0], *b.more)]
    terms = [reader.value(x) for x in (*a.terms, *b.terms, *b.more)]
    weights = [reader.value(x) for x in (*b.terms, *b.more)]
    if a.more or any(x is None for x in weights):
        return None
    known: Any = [x for x in terms if x is not None]
    alone = len(bs) == 1 and a.places is not None and not divisor.places
    if alone and reader.same(bs[0], reader.plain(top)):
        number = reader.value(a.terms[0])
        if number is None or number.axis not in (0, None) or not number.others.is_zero:
            return None
        one = np.array(1.0)
        return _Quotient(0 * one, one, [number], [number], spread="shares")
    every = tuple(range(len(shape)))
    alike = a.form == b.form and divisor.places == every and aval(divisor.sum[0]).shape == shape
    vector = b.form == ((weights[0].n,), (0,)) if weights[0].axis == 0 else False  # type: ignore[union-attr]
    repeated = vector and not divisor.places and a.places is None and a.form[0] != b.form[0]
    if not alike and not repeated:
        return None
    if alike and a.places is not None and not reader.same(a.places, b.places):  # type: ignore[arg-type]
        return None
    limits, moving = reader.factor_of_sum(a.terms, bs), 1.0
    if limits is None:
        return None
    axes = {id(x): a.form[1] for x in terms[: len(a.terms)]} | {id(x): b.form[1] for x in weights}
    if repeated and len(a.form[1]) != 1:
        return None
    if not all(x.is_public or ((x.axis,) == axes[id(x)] and x.others.is_zero) for x in known):
        moving = sum(as_dense(x).others.count for x in known)
        if shape or not math.isfinite(moving):
            return None
    low, high = map(np.array, limits)
    spread = "all" if a.places is None else "places"
    return _Quotient(low, high, known, weights, moving, spread)  # type: ignore[arg-type]


def _of_rows(
    reader: _Ratios, top: At, divisor: _Divisor, b: _Sum, shape: tuple[int, ...]
) -> _Quotient | None:
    """Returns facts about w^T x divided by the sums of the columns of w, such as weighted means."""
    node = reader.node(top)
    if node.name != "dot_general" or b.more or b.places is not None:
        return None
    (ca, cb), batch = node.equation.params["dimension_numbers"]
    w = reader.value(reader.plain(b.terms[0]))
    given: list[Any] = [reader.value(operand) for operand in node.operands]
    if batch != ((), ()) or w is None or w.axis is None or b.form[1] != (w.axis,):
        return None
    if any(x is None or (x.axis,) != tuple(c) for x, c in zip(given, (ca, cb), strict=True)):
        return None
    for k in (0, 1):
        at, x = node.operands[k], given[1 - k]
        made = reader.node(reader.plain(at))
        if made.name == "transpose":
            at = made.operands[0]
        mine, theirs = len(given[k].shape) - 1, len(x.shape) - 1
        first = 0 if k == 0 else theirs
        if len(w.shape) > 2 or not reader.same(reader.plain(at), reader.plain(b.terms[0])):
            continue
        # The divisor must vary along those axes of the quotient that index the columns of w, and
        # along no other axis.
        columns = tuple(range(first, first + mine))
        if divisor.places != columns or aval(divisor.sum[0]).shape != shape[first : first + mine]:
            continue
        rest = [size for j, size in enumerate(x.shape) if j != x.axis]
        ones = (1,) * mine
        full = (*ones, *rest) if k == 0 else (*rest, *ones)
        ends = x.low.min(x.axis), x.high.max(x.axis)
        low, high = (np.broadcast_to(end, rest).reshape(full) for end in ends)
        if not all(y.is_public or y.others.is_zero for y in (x, w)):
            return None
        return _Quotient(low, high, [x, w], [w])
    return None


def ratio(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of a quotient of two sums over the records; None for other quotients."""
    reader = _Ratios(scope)
    top, bottom = ((atom, scope) for atom in equation.invars)
    by = reader.value(bottom)
    if walked is None or by is None or aval(equation.invars[0]).shape != walked.shape:
        return None
    divisor, (scale, top) = reader.divisor(bottom), reader.scaled(top)
    found = _quotient(reader, top, divisor, walked.shape)
    # If a term is itself a sum, a compiler may merge it into the sum of terms, which changes the
    # rounding.
    if found is None or any(flattened(x)[0] > 1 or x.pending.coarse or x.nan for x in found.terms):
        return None
    weights, least = found.weights, float(by.low.min())
    if any(x.low.min() < 0 for x in weights) or least < 2.0**-30:
        return None
    # Roundings occur in the sums of the dividend and the divisor, in two casts, and in the product
    # of two terms. All errors are relative to the sum of b_i.
    dtype, n = walked.dtype, math.prod(weights[0].shape)
    added = n * len(weights)
    if found.spread == "shares":
        # Each entry of the dividend A is a sum, and the divisor is the sum of all entries of A. So
        # each term is rounded twice: in the sum of its entry of A, and in the sum of all entries.
        added = 2 * added + math.prod(walked.shape)
    gamma = rounding.sum_units(added, dtype) + 80 * rounding.unit(dtype)
    if gamma > 2.0**-6:
        return None
    low, high = np.minimum(scale * found.low, 0.0), np.maximum(scale * found.high, 0.0)
    size = float(max(high.max(), -low.min()))
    error = rounding.of_quotient(gamma, dtype) * size
    error += 64 * rounding.tiny(dtype) * (n + 1) * (1 + size) / least
    # Both sums use the same weights b_i. A compiler may round a weight differently for each sum.
    error += size * n * sum(x.apart for x in weights) / least
    error = float(rounding.up(error))
    if not math.isfinite(error):
        return None
    largest = sum(float(x.high.max()) for x in weights)
    smallest = sum(float(x.low.min()) for x in weights)
    fraction = largest * found.moving / least
    ends, width = (low, high), high - low
    if not divisor.raised and found.moving == 1 and found.spread == "all" and smallest > 0:
        axis = found.terms[-1].axis
        records = weights[0].shape[axis] if axis is not None else 1
        own = largest / ((records - 1) * smallest + largest)
        ends = scale * found.low, scale * found.high
        if own * (ends[1] - ends[0]).max() < fraction * width.max():
            fraction, width = own, ends[1] - ends[0]
    most = np.broadcast_to(rounding.up(width * fraction * (1 + 4 * gamma)), walked.shape)
    entries = math.prod(walked.shape)
    slip1, slip2 = 2 * error * entries, 2 * error * math.sqrt(entries)
    if found.spread == "all":
        l1, l2 = float(most.sum()), rounding.norm2(most)
    else:
        # If `spread` is "places", entries at two indices change. If it is "shares", the l1 norm of
        # the whole change is at most twice the bound on one entry. In both cases, float sums may be
        # rounded differently at every index.
        count = min(2, entries)
        l1, l2 = float(most.max()) * count, float(most.max()) * math.sqrt(count)
    room = 1 + (entries + 100) * 2.0**-52
    bounds = (
        most + 2 * error,
        float(rounding.up(l1 * room + slip1)),
        float(rounding.up(l2 * room + slip2)),
    )
    row = float(rounding.up(scale + error * entries)) if found.spread == "shares" else math.inf
    return meet(walked, ends[0] - error, ends[1] + error, bounds, bounds, l1_of_row=row)
