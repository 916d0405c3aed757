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

Sums by place have one A and one B for each place. If a record leaves a place, its b_i' at this
place is 0. So the lemma is true for each place, and at most two places change.

In sums over pairs of records, one record changes several terms, and the bound is multiplied by the
number of these terms.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Equation, aval
from dpjax.proving import _rounding as rounding
from dpjax.proving._norm_clips import At, Scope, Search
from dpjax.proving._pending import flattened
from dpjax.proving._value import Abstract, as_dense, meet

_DEPTH = 12
_Interval = tuple[float, float]


class _Sum(NamedTuple):
    """A sum over records.

    Attributes:
        terms: one array, or two arrays whose product is summed.
        form: facts about the sum. Two sums with equal facts add up terms at the same indices.
        places: for a sum by place, the place of each term.
    """

    terms: tuple[At, ...]
    form: tuple[Any, ...]
    places: At | None = None


@dataclasses.dataclass
class _Ratios:
    """Finds sums, and the terms of sums, in a program."""

    search: Search
    root: Scope
    values: Mapping[jex.Var, Abstract | None]

    def plain(self, at: At) -> At:
        """Returns the variable before casts, if these change a number at most by rounding."""
        node = self.search.node(at)
        if node.name == "convert_element_type":
            kinds = [np.dtype(aval(x).dtype) for x in (node.equation.invars[0], node.atom)]
            wide = all(x.kind != "f" or x.itemsize >= 4 for x in kinds)
            # Other casts change a number by more: a cast to booleans turns 5 into 1, and a cast to
            # integers turns 1.9 into 1.
            cut = {"b": kinds[0].kind != "b", "f": False}.get(kinds[1].kind, kinds[0].kind == "f")
            if wide and not cut:
                return self.plain(node.operands[0])
        return node.atom, node.scope

    def value(self, at: At) -> Abstract | None:
        atom, scope = at
        if isinstance(atom, jex.Literal) or scope is not self.root:
            return None
        return self.values.get(atom)

    def range_of(self, at: At) -> _Interval | None:
        """Returns the range of a term; None if it is unknown."""
        if (number := self.search.number(at)) is not None:
            return number, number
        if np.dtype(aval(at[0]).dtype).kind == "b":
            return 0.0, 1.0
        x = self.value(at)
        return None if x is None else (float(x.low.min()), float(x.high.max()))

    def same(self, first: At, second: At, depth: int = _DEPTH) -> bool:
        """Whether two variables are computed by the same operations from the same variables."""
        a, b = self.search.node(first), self.search.node(second)
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

    def sum(self, at: At) -> _Sum | None:
        """Returns the sum over records that a variable is; None for other variables."""
        node = self.search.node(self.plain(at))
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
        if node.name == "scatter-add" and self.search.number(node.operands[0]) == 0:
            places, out = xs[1], aval(node.equation.outvars[0]).shape
            if places is not None and places.others.is_zero and not places.apart:
                form = shape, (0,), out, str(params["mode"]), str(params["dimension_numbers"])
                return _Sum((node.operands[2],), form, node.operands[1])
        return None

    def scaled(self, at: At) -> tuple[float, At]:
        """Returns a positive public factor, and the variable that it multiplies.

        The factor is 1 if there is no product.
        """
        node = self.search.node(at)
        for one, other in (node.operands, node.operands[::-1]) if node.name == "mul" else ():
            number = self.search.number(other)
            if number is not None and 2.0**-30 <= number <= 2.0**30:
                return number, one
        return 1.0, at

    def factor(self, a: tuple[At, ...], b: At) -> _Interval | None:
        """Returns an interval of numbers m with a = m b; `a` is one array or a product of two."""
        if len(a) == 2:
            for one, other in (a, a[::-1]):
                if (found := _times(self.factor((one,), b), self.range_of(other))) is not None:
                    return found
            return None
        at = self.plain(a[0])
        if self.same(at, b):
            return 1.0, 1.0
        if (number := self.search.number(b)) is not None:
            found = self.range_of(a[0])
            return None if found is None or number <= 0 else (found[0] / number, found[1] / number)
        node = self.search.node(at)
        if node.name == "mul":
            return self.factor(tuple(node.operands), b)
        if node.name == "and":
            found = [self.factor((operand,), b) for operand in node.operands]
            known = next((x for x in found if x is not None), None)
            return None if known is None else (min(known[0], 0.0), max(known[1], 0.0))
        return None

    def divisor(self, at: At) -> At | None:
        """Returns the sum B in a divisor B, max(B, c), or where(B > 0, B, 1) for counts B."""
        at = self.plain(at)
        node = self.search.node(at)
        if node.name == "max":
            for one, other in (node.operands, node.operands[::-1]):
                if self.search.number(other) is not None:
                    return self.plain(one)
        if node.name == "select_n" and len(node.operands) == 3:
            which, at_zero, count = self.search.node(node.operands[0]), *node.operands[1:]
            x = self.value(self.plain(count))
            if which.name == "gt" and x is not None and x.whole and x.low.min() >= 0:
                compared, zero = which.operands
                numbers = self.search.number(zero), self.search.number(at_zero)
                if numbers == (0, 1) and self.same(compared, count):
                    return self.plain(count)
        return at


def _times(first: _Interval | None, second: _Interval | None) -> _Interval | None:
    if first is None or second is None:
        return None
    products = [x * y for x in first for y in second]
    return min(products), max(products)


def ratio(equation: Equation, search: Search, walked: Abstract) -> Abstract | None:
    """Returns the value of a quotient of two sums over the records; None for other quotients."""
    values, root = search.values, search.root
    reader = _Ratios(search, root, values)
    top, bottom = ((atom, root) for atom in equation.invars)
    by = reader.value(bottom)
    divisor = reader.divisor(bottom) if by is not None else None
    if by is None or divisor is None or aval(equation.invars[0]).shape != by.shape:
        return None
    scale, top = reader.scaled(top)
    a, b = reader.sum(top), reader.sum(divisor)
    if a is None or b is None or len(b.terms) != 1 or a.form != b.form:
        return None
    if a.places is not None and not reader.same(a.places, b.places):  # type: ignore[arg-type]
        return None
    terms = [x for x in map(reader.value, (*a.terms, *b.terms)) if x is not None]
    # If a term is itself a sum, a compiler may merge it into the sum of terms, which changes the
    # rounding. The b_i occur in both sums, so both uses must see the same numbers.
    if any(flattened(x)[0] > 1 or x.pending.coarse or x.nan for x in terms) or terms[-1].apart:
        return None
    weights, limits = terms[-1], reader.factor(a.terms, reader.plain(b.terms[0]))
    least = float(by.low.min())
    if limits is None or weights.low.min() < 0 or least < 2.0**-30:
        return None
    limits = (scale * limits[0], scale * limits[1])
    # `moving` is the number of terms that one record changes.
    moving, axes = 1.0, a.form[1]
    if not all(x.is_public or ((x.axis,) == axes and x.others.is_zero) for x in terms):
        moving = sum(as_dense(x).others.count for x in terms)
        if walked.shape or not math.isfinite(moving):
            return None
    low, high = min(limits[0], 0.0), max(limits[1], 0.0)
    # Both sums, two casts and the product of two terms are rounded. The errors are relative to the
    # sum of b_i.
    dtype, n = walked.dtype, math.prod(weights.shape)
    gamma = rounding.sum_units(n, dtype) + 80 * rounding.unit(dtype)
    if gamma > 2.0**-6:
        return None
    size = max(high, -low)
    error = rounding.of_quotient(gamma, dtype) * size
    error = float(rounding.up(error + 64 * rounding.tiny(dtype) * (n + 1) * (1 + size) / least))
    most = (high - low) * float(weights.high.max()) * moving / least
    most = float(rounding.up(most * (1 + 4 * gamma)))
    entries = math.prod(walked.shape)
    # At most two places change, but a float sum may be rounded differently at every place.
    count = entries if a.places is None else min(2, entries)
    l1, l2 = most * count + 2 * error * entries, most * math.sqrt(count)
    l2 += 2 * error * math.sqrt(entries)
    bounds = np.array(most + 2 * error), float(rounding.up(l1)), float(rounding.up(l2))
    return meet(walked, low - error, high + error, bounds, bounds)
