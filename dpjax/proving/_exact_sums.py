"""Sums over records as sums of integers, in a program that a release compiles for itself.

The error of a float sum grows with the number of its terms, because a compiler chooses the order.
The proof knows a range for each term. So each term is rounded to a grid, a power of two times the
range. Integers add up exactly, in any order, and the total is rounded once.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._proof import PaddedRecordBounds, RecordBounds
from dpjax._core._types import Database, Value
from dpjax._exact._fixed_point import bits_of_a_digit, digits_of
from dpjax._exact._numerics import float_limits
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Equation, aval, called, live, parts
from dpjax.proving import _rounding as rounding
from dpjax.proving._reductions import axes_after, total_over
from dpjax.proving._value import Abstract, Difference, Moves, Pending, RefusalError, erring, make

_NAME = "exact_sum"
# For ranges with these exponents, all powers of two in this file are floats.
_EXPONENTS = range(-60, 61)
_FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
# Digits multiply a term by powers of 2, up to 2 to this number.
_BITS_OF_DIGITS = 52
# A matrix product is a sum of separate products: at most this many for each record.
_MOST_PRODUCTS = 2**10
# Sums with a smaller rounding error stay sums of floats.
_WORTH_IT = 2.0**-7
# Columns share one grid. With ranges further apart than this factor, the smaller column would lose
# digits, so its sum stays a sum of floats.
_MOST_UNLIKE = 16.0
# The relative error of a few operations in float64, tiny beside the rounding to float32.
_OF_FLOAT64 = 16 * 2.0**-53

# The place of a sum in a program, as in `Step.path`.
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ExactSum:
    """A sum of terms within [-2^exponent, 2^exponent], divided by a number above 0.

    It computes S 2^exponent / divisor for an integer sum S of terms on a grid. The terms are
    split into digits so short that their sums fit into integers. The total is formed in float64,
    with an error of a few of its units, and is rounded to the dtype of the terms.
    """

    axes: tuple[int, ...]
    exponent: int
    divisor: float = 1.0

    @property
    def name(self) -> str:
        """Encodes all fields."""
        axes = "_".join(map(str, self.axes))
        return f"{_NAME}_{axes}_at_{self.exponent - _EXPONENTS[0]}_by_{_hex(self.divisor)}"

    @staticmethod
    def named(name: str) -> "ExactSum | None":
        """The sum that a name encodes; None for another name."""
        try:
            axes, _, rest = name.removeprefix(f"{_NAME}_").partition("_at_")
            exponent, _, divisor = rest.partition("_by_")
            number = float(np.uint64(int(divisor, 16)).view(np.float64))
            found = ExactSum(
                tuple(map(int, axes.split("_"))), int(exponent) + _EXPONENTS[0], number
            )
        except ValueError:
            return None
        return found if found.name == name else None

    def count(self, shape: Sequence[int]) -> int:
        return math.prod(shape[k] for k in self.axes)

    def __call__(self, terms: jax.Array) -> jax.Array:
        def exact_sum(terms: jax.Array) -> jax.Array:
            digits, bits = digits_of(terms, self.count(terms.shape), self.exponent)
            zeros = tuple(np.zeros((), x.dtype) for x in digits)
            sums = lax.reduce(
                tuple(digits), zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)),
                self.axes,
            )  # fmt: skip
            total: Any = 0.0
            for digit_sum in reversed(sums):
                total = (total + lax.convert_element_type(digit_sum, jnp.float64)) * 2.0**-bits
            total = total * 2.0**self.exponent / self.divisor
            return lax.convert_element_type(total, terms.dtype)

        exact_sum.__name__ = self.name
        with jax.enable_x64(True):
            return jax.jit(exact_sum)(terms)


def _hex(number: float) -> str:
    return f"{int(np.float64(number).view(np.uint64)):016x}"


def _call(kind: ExactSum, terms: Any) -> Equation:
    """The call of an exact sum of terms of this shape and dtype."""
    (equation,) = jax.make_jaxpr(kind)(jax.ShapeDtypeStruct(terms.shape, terms.dtype)).jaxpr.eqns
    return equation


@functools.lru_cache(maxsize=512)
def _digest(kind: ExactSum, shape: tuple[int, ...], dtype: np.dtype) -> str:
    return digest(_call(kind, jax.ShapeDtypeStruct(shape, dtype)).params["jaxpr"])


def of_call(equation: Equation, inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """The value of an exact sum; None if the inner program is not one.

    The name alone proves nothing: it tells which sum must equal the inner program.
    """
    kind = ExactSum.named(str(equation.params.get("name")))
    if kind is None or len(operands) != 1 or operands[0].dtype not in _FLOATS:
        return None
    (x,) = operands
    if digest(inner) != _digest(kind, x.shape, x.dtype):
        return None
    return summed_exactly(x, kind)


def summed_exactly(x: Abstract, kind: ExactSum) -> Abstract:
    """The value of an exact sum.

    A term is rounded by up to half a step of the grid. So a term that moves by d moves by at most
    d + step in the sum, and a term that does not move has the same integer. If `apart` is above 0,
    a compiler may compute a term anew for each digit, with other roundings. Then a digit may be off
    by 1. The total is rounded once, to the nearest float.
    """
    largest = float(x.magnitude.max())
    if x.nan or x.pending.coarse or not largest <= 2.0**kind.exponent or not kind.divisor > 0:
        raise RefusalError("the terms of an exact sum must be numbers within its range")
    # Digits multiply terms by powers of 2, and a compiler may combine these with public factors.
    if x.pending.bits + abs(kind.exponent) + _BITS_OF_DIGITS > rounding.most_bits(x.dtype):
        raise RefusalError("the factors of an exact sum may overflow together: rescale the records")
    count, (shape, axis) = kind.count(x.shape), axes_after(x, kind.axes)
    limits = float_limits(x.dtype)
    bits = bits_of_a_digit(count, x.dtype)
    length = bits * math.ceil((limits.nmant + 2) / bits)
    off = 2.0 ** (kind.exponent - length - 1)
    if x.apart:
        off += x.apart + 2 * 2.0 ** (kind.exponent - bits)
    scale, room = 1 / kind.divisor, 1 + (count + 100) * 2.0**-52
    low, high = (total_over(end, x.shape, kind.axes) for end in (x.low, x.high))
    slack = count * off + (room - 1) * total_over(x.magnitude, x.shape, kind.axes)
    low, high = rounding.widened(low - slack, high + slack, np.zeros(()))
    low, high = low * scale, high * scale
    largest = np.maximum(np.maximum(np.abs(low), np.abs(high)), 2.0**-500)
    final = _OF_FLOAT64 * count * 2.0**kind.exponent * scale + 4 * rounding.tiny(x.dtype)
    if x.dtype == np.float32:
        final = final + _nearest(largest, rounding.unit(x.dtype))
    final = rounding.up(final)
    width = math.prod(x.shape[k] for k in kind.axes if k != x.axis)
    rest = x.n - 1 if x.axis in kind.axes else 0
    short = [1 if k == x.axis else size for k, size in enumerate(x.shape)]

    def moved(*both: Difference) -> Moves:
        (e1, a1, b1), (e2, a2, b2) = (
            erring((d.each, d.l1, d.l2), off, x.shape, x.axis) for d in both
        )
        l1, l2 = a1 + rest * a2, math.sqrt(width) * (b1 + rest * b2)
        each = total_over(e1, short, kind.axes) + rest * total_over(e2, short, kind.axes)
        each = rounding.up(np.minimum(each * room, l1) * scale)
        l1, l2 = float(rounding.up(l1 * scale)), float(rounding.up(l2 * scale))
        return erring((each, l1, l2), final, shape, axis)

    low, high = rounding.widened(low, high, final)
    if (x.low >= 0).all():
        low = np.maximum(low, 0.0)
    changed, others = moved(x.changed, x.others), moved(x.others, x.others)
    apart = count * 2 * off * scale if x.apart else 0.0
    return make(
        shape, x.dtype, low, high, axis, changed, changed if axis is None else others,
        pending=Pending().having(**Pending.flags([x.pending])),
        apart=float(rounding.up(apart + 2 * float(final.max()))),
    )  # fmt: skip


def _nearest(largest: np.ndarray, unit: float) -> np.ndarray:
    """How far a number up to `largest` may lie from the nearest float.

    Floats up to 2^e are within 2^(e - 1) u of each number, and those above within 2^e u. A number
    just above 2^e is rounded to 2^e.
    """
    power = np.exp2(np.frexp(largest)[1] - 1.0)  # The largest power of 2 up to `largest`.
    return np.minimum(np.maximum(power * unit / 2, largest - power), power * unit)


def exponent_of(equation: Equation, operands: Sequence[Abstract]) -> int | None:
    """The exponent of the range of terms, if an operation is a sum that may be exact."""
    if equation.primitive.name == "reduce_sum":
        return planned(operands[0], equation.params["axes"])
    if equation.primitive.name == "dot_general":
        first, second = operands
        return planned_product(first, second, equation.params)
    return None


def planned(x: Abstract, axes: Sequence[int]) -> int | None:
    """The exponent of the range of a float sum over records; None if it stays a float sum."""
    if x.axis is None or x.axis not in axes or x.is_public or x.nan or x.pending.coarse:
        return None
    return _exponent(*_largest(x, axes), math.prod(x.shape[k] for k in axes), x.dtype)


def planned_product(first: Abstract, second: Abstract, parameters: Any) -> int | None:
    """As `planned`, for a `dot_general` that sums over the records."""
    (ca, cb), (ba, _) = parameters["dimension_numbers"]
    pairs = ((first, ca), (second, cb))
    free = [x.shape[k] for x, summed in pairs for k in range(len(x.shape)) if k not in summed]
    if not (first.axis in ca or second.axis in cb) or ba or math.prod(free) > _MOST_PRODUCTS:
        return None
    dtypes = {first.dtype, second.dtype, parameters.get("preferred_element_type") or first.dtype}
    if len(set(map(np.dtype, dtypes))) > 1 or any(x.nan or x.pending.coarse for x, _ in pairs):
        return None
    (largest_a, least_a), (largest_b, least_b) = (_largest(x, summed) for x, summed in pairs)
    # The margin covers the rounding of a product.
    largest, least = largest_a * largest_b * (1 + 2.0**-18), least_a * least_b
    return _exponent(largest, least, math.prod(first.shape[k] for k in ca), first.dtype)


def _largest(x: Abstract, axes: Sequence[int]) -> tuple[float, float]:
    """The largest term of the column with the largest terms, and of that with the smallest ones."""
    columns = np.max(x.magnitude, axis=tuple(axes))
    moving = columns[columns > 0]
    return float(columns.max()), float(moving.min(initial=math.inf))


def _exponent(largest: float, least: float, count: int, dtype: np.dtype) -> int | None:
    """The exponent of the range of terms; None if floats do as well, or integers do not fit.

    Args:
        largest: the largest term.
        least: the largest term of the column with the smallest terms.
        count: the number of terms.
        dtype: of the terms.
    """
    if dtype not in _FLOATS or not 0 < largest < 2.0 ** _EXPONENTS[-1]:
        return None
    if largest > _MOST_UNLIKE * least or math.frexp(largest)[1] < _EXPONENTS[0]:
        return None
    # A bound on the rounding error of a float sum, in units of the largest term.
    if count * rounding.sum_units(count, dtype) < _WORTH_IT:
        return None
    try:
        bits_of_a_digit(count, dtype)
    except ValueError:
        return None
    return math.frexp(largest)[1]


class _Exact(RecordBounds):
    """Bounds on records, with sums of the target that a release computes exactly.

    Attributes:
        sums: pairs of the place of a sum in the target and the exponent of its range.
    """

    sums: tuple[tuple[Path, int], ...] = ()

    def enforced_on(self, target: Callable[[Database], Value]) -> Callable[[Database], Value]:
        """The target of the clamped database, with exact sums."""

        @functools.wraps(target, updated=())
        def clamped_target(database: Database) -> Value:
            return _with_exact_sums(target, dict(self.sums), jax.jit(self.clamp)(database))

        return clamped_target


@dataclasses.dataclass(frozen=True)
class ExactBounds(_Exact):
    """Exact sums under replace-one."""

    sums: tuple[tuple[Path, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ExactPaddedBounds(_Exact, PaddedRecordBounds):
    """Exact sums of padded records, under add-or-remove-one."""

    sums: tuple[tuple[Path, int], ...] = ()


def with_sums(public: RecordBounds, sums: dict[Path, int]) -> RecordBounds:
    """The same bounds, for a target with exact sums."""
    kind = ExactPaddedBounds if isinstance(public, PaddedRecordBounds) else ExactBounds
    return kind(public.leaves, tuple(sorted(sums.items())))


def _with_exact_sums(
    target: Callable[[Database], Value], sums: dict[Path, int], database: Database
) -> Value:
    program, shapes = jax.make_jaxpr(target, return_shape=True)(database)
    exact = jex.ClosedJaxpr(_rewritten(program.jaxpr, sums, ()), program.consts)
    outputs = jex.jaxpr_as_fun(exact)(*jax.tree.leaves(database))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _rewritten(jaxpr: jex.Jaxpr, sums: dict[Path, int], path: Path) -> jex.Jaxpr:
    """A program with exact sums at some places. A sum includes its division by a literal."""
    operations, made = live(jaxpr), list[Equation]()
    uses = Counter(x for e in operations for x in e.invars if isinstance(x, jex.Var))
    uses.update(x for x in jaxpr.outvars if isinstance(x, jex.Var))
    divided: dict[Any, Equation] = {e.invars[0]: e for e in operations if _divides(e)}
    dropped = set[int]()
    for count, equation in enumerate(operations):
        here = (*path, count)
        if here in sums and equation.primitive.name in ("reduce_sum", "dot_general"):
            (result,), divisor = equation.outvars, 1.0
            quotient = divided.get(result) if uses[result] == 1 else None
            if quotient is not None:
                dropped.add(id(quotient))
                (result,), divisor = quotient.outvars, float(quotient.invars[1].val)  # type: ignore[union-attr]
            call = _call_of(equation, sums[here], divisor)
            given = {"invars": equation.invars, "source_info": equation.source_info}
            made.append(call.replace(outvars=[result], **given))
        elif id(equation) not in dropped:
            if called(equation) and any(place[: len(here)] == here for place in sums):
                equation = equation.replace(params=_inside(equation.params, sums, here))
            made.append(equation)
    return jaxpr.replace(eqns=made)


def _call_of(equation: Equation, exponent: int, divisor: float) -> Equation:
    """The call of an exact sum, or of one of products, in place of an operation."""
    if equation.primitive.name == "reduce_sum":
        kind = ExactSum(tuple(sorted(equation.params["axes"])), exponent, divisor)
        return _call(kind, aval(equation.invars[0]))
    (ca, cb), _ = equation.params["dimension_numbers"]

    @jax.jit
    def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
        # The axes are the free ones of a, the free ones of b, and the summed ones.
        free_a, free_b = ([k for k in range(x.ndim) if k not in c] for x, c in ((a, ca), (b, cb)))
        middle, end = len(free_a), len(free_a) + len(free_b)
        a, b = a.transpose([*free_a, *ca]), b.transpose([*free_b, *cb])
        shape = (*a.shape[:middle], *b.shape[: len(free_b)], *a.shape[middle:])
        summed = tuple(range(end, len(shape)))
        a = lax.broadcast_in_dim(a, shape, (*range(middle), *summed))
        b = lax.broadcast_in_dim(b, shape, tuple(range(middle, len(shape))))
        return ExactSum(summed, exponent, divisor)(a * b)

    specs = [jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype) for x in equation.invars]
    (call,) = jax.make_jaxpr(exact_product)(*specs).jaxpr.eqns
    return call


def _inside(parameters: dict[str, Any], sums: dict[Path, int], path: Path) -> dict[str, Any]:
    name = "jaxpr" if "jaxpr" in parameters else "call_jaxpr"
    body, consts = parts(parameters[name])
    changed = _rewritten(body, sums, path)
    closed = isinstance(parameters[name], jex.ClosedJaxpr)
    return parameters | {name: jex.ClosedJaxpr(changed, consts) if closed else changed}


def _divides(equation: Equation) -> bool:
    """Whether an operation divides a variable by a literal of its dtype above 0."""
    if equation.primitive.name != "div":
        return False
    number, divisor = equation.invars
    if not isinstance(number, jex.Var) or not isinstance(divisor, jex.Literal):
        return False
    same = aval(divisor).dtype == aval(number).dtype and not np.ndim(divisor.val)
    return same and 2.0**-60 <= float(divisor.val) <= 2.0**60
