"""The table of operations: one row for each JAX primitive that proofs support."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import names, primitives
from dpjax.proving import _choices as choices
from dpjax.proving import _elementwise as elementwise
from dpjax.proving import _exact_sums as sums
from dpjax.proving import _functions as functions
from dpjax.proving import _layout as layout
from dpjax.proving import _orders as orders
from dpjax.proving import _places as places
from dpjax.proving import _reductions as reductions
from dpjax.proving import _slots as slots
from dpjax.proving import _windows as windows
from dpjax.proving._choices import compare, equal, less
from dpjax.proving._pending import PRODUCT, Merging
from dpjax.proving._slots import Rule as SlotRule
from dpjax.proving._slots import Tightening, at_one_place
from dpjax.proving._value import Abstract, constant

ANY = Merging()
NEVER_UNDONE = Merging(undone=False)
MOVES = Merging(dropped=True)
SUM, XOR, PLACES = Merging("sum"), Merging("xor"), Merging("places")
COMPARISON = Merging("comparison", undone=False)
QUOTIENT = Merging("quotient", dropped=True)
POWER, CONTRACTION, REDUCTION = Merging("power"), Merging("contraction"), Merging("reduction")


class Operation(NamedTuple):
    """What a proof needs to know about one JAX primitive.

    Attributes:
        rule: computes the abstract value of the result, or a list of several. Its arguments are the
            abstract values of the operands and, by keyword, the parameters of the primitive. If it
            is None, the operation is refused, except `scan`, whose rule is in `_loops.py`.
        slots: under add-or-remove-one, how the result depends on which slot contains which record.
            If it is None, the operands must be public under this relation.
        merging: how a compiler may merge the operation with others. `ANY` allows every kind of
            merging.
        tighter: computes a tighter bound on the result, under add-or-remove-one.
        narrow: whether the rule accepts floats of 16 bits.
        exact: computes the exact form of a sum over records, or None. Its arguments are those of
            the rule.
        cpu_only: whether the bound on its rounding is valid on CPUs only.
        remedy: what to do instead, for the error message if the operation is refused.
        instead: what to do instead, for `explain()` if the bound is much larger than the changes
            over random neighbors.
    """

    rule: Callable[..., Abstract | list[Abstract]] | None = None
    slots: SlotRule | None = None
    merging: Merging = ANY
    tighter: Tightening | None = None
    narrow: bool = False
    exact: Callable[..., sums.ExactSums | sums.ExactScatter | None] | None = None
    cpu_only: bool = False
    remedy: str = "write it in other operations"
    instead: str = "clip what each record adds to the sum, with jnp.clip or by its norm"


_CENTERED = "jnp.var, jnp.std and jnp.cov of the records are proved as a whole"
_SOFTMAX = "jax.nn.softmax and jax.nn.logsumexp are proved as a whole"
_DIVISION = (
    "jax.nn.softmax, or a division by a maximum of a number and the norm, is proved as a whole;"
    " else raise the least denominator"
)
_BOTH = "multiply by public numbers, or clip both factors first"
_ROOT = "add a number before the root, or use jnp.std"
_STEPS = "clip what each step carries, or take fewer steps"
_FEWER = "take fewer steps, or clip after each of them"
_WHILE = "unroll a loop of a fixed number of steps in Python"
_TAKEN = "take rows by jax.lax.scan over them, or at public places"
_KERNEL = "convolve records, as the batch, with a public kernel"
_MATRIX = "release the matrix, for example x.T @ x, and decompose or solve what was released"
_WAVES = "multiply by a public matrix, for example x @ numpy.cos(angles) and x @ numpy.sin(angles)"
_LOGARITHMS = "add up logarithms, as by jnp.exp(jnp.log(x).sum())"
_POINTS = "interpolate the function on the records between public points by jnp.interp"
_SCORES = "release the scores, or use dpjax.exponential"
_TOTAL_ORDER = COMPARISON._replace(undone=True)
_LOOKUP = PLACES._replace(dropped=True)

# One row, one line.
# fmt: off
OPERATIONS: dict[str, Operation] = {
    # Arithmetic.
    "add": Operation(elementwise.add, at_one_place, SUM),
    "add_any": Operation(elementwise.add, at_one_place, SUM),
    "sub": Operation(partial(elementwise.add, sign=-1), at_one_place, SUM, instead=_CENTERED),
    "mul": Operation(elementwise.multiply, at_one_place, PRODUCT, instead=_BOTH),
    "div": Operation(elementwise.quotient, at_one_place, QUOTIENT, instead=_DIVISION),
    "rem": Operation(elementwise.remainder, at_one_place),
    "neg": Operation(elementwise.negative, at_one_place, MOVES, remedy=_POINTS),
    "abs": Operation(elementwise.absolute, at_one_place),
    "square": Operation(elementwise.SQUARE, at_one_place, POWER, instead=_CENTERED),
    "integer_pow": Operation(elementwise.integer_power, at_one_place, POWER, instead=_CENTERED),
    "pow": Operation(functions.power, at_one_place, POWER),
    "exp2": Operation(functions.exp2, at_one_place),
    "max": Operation(partial(elementwise.extremum, largest=True), at_one_place, MOVES),
    "min": Operation(partial(elementwise.extremum, largest=False), at_one_place, MOVES),
    "clamp": Operation(elementwise.clamp, at_one_place, MOVES),
    # Elementary functions.
    "exp": Operation(functions.EXP, at_one_place, instead=_SOFTMAX),
    "expm1": Operation(functions.EXPM1, at_one_place),
    "log": Operation(functions.LOG, at_one_place),
    "log1p": Operation(functions.LOG1P, at_one_place),
    "tanh": Operation(functions.TANH, at_one_place, NEVER_UNDONE),
    "atan": Operation(functions.ATAN, at_one_place),
    "atan2": Operation(functions.arctangent, at_one_place),
    "logistic": Operation(functions.LOGISTIC, at_one_place),
    "erf": Operation(functions.ERF, at_one_place, NEVER_UNDONE),
    "rsqrt": Operation(functions.RSQRT, at_one_place),
    "sqrt": Operation(functions.square_root, at_one_place, instead=_ROOT),
    "sin": Operation(partial(functions.wave, peak=np.pi / 2), at_one_place, NEVER_UNDONE),
    "cos": Operation(partial(functions.wave, peak=0.0), at_one_place, NEVER_UNDONE),
    # Steps, comparisons, logic, and choices.
    "floor": Operation(partial(elementwise.steps, np.floor), at_one_place, NEVER_UNDONE),
    "ceil": Operation(partial(elementwise.steps, np.ceil), at_one_place, NEVER_UNDONE),
    "round": Operation(partial(elementwise.steps, np.round), at_one_place, NEVER_UNDONE),
    "sign": Operation(partial(elementwise.steps, np.sign), at_one_place, NEVER_UNDONE),
    "lt": Operation(partial(compare, less), at_one_place, COMPARISON),
    "gt": Operation(partial(compare, less, swapped=True), at_one_place, COMPARISON),
    "le": Operation(partial(compare, less, swapped=True, negated=True), at_one_place, COMPARISON),
    "ge": Operation(partial(compare, less, negated=True), at_one_place, COMPARISON),
    "lt_to": Operation(partial(compare, less, total_order=True), at_one_place, _TOTAL_ORDER),
    "eq": Operation(partial(compare, equal), at_one_place, COMPARISON),
    "ne": Operation(partial(compare, equal, negated=True), at_one_place, COMPARISON),
    "and": Operation(partial(choices.logic, np.minimum), at_one_place),
    "or": Operation(partial(choices.logic, np.maximum), at_one_place),
    "xor": Operation(partial(choices.logic, None), at_one_place, XOR),
    "not": Operation(choices.negation, at_one_place),
    "is_finite": Operation(choices.is_finite, at_one_place, NEVER_UNDONE),
    "select_n": Operation(choices.select, at_one_place, MOVES),
    "convert_element_type": Operation(choices.convert, at_one_place, MOVES, narrow=True),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"),
                    Operation(layout.same, at_one_place, MOVES, narrow=True)),
    # Sums, products, extrema, and sorts.
    "reduce_sum": Operation(reductions.sum_over, slots.reduced, REDUCTION, exact=sums.planned_sum),
    "reduce_max": Operation(partial(orders.extremum_over, largest=True), slots.reduced, MOVES),
    "reduce_min": Operation(partial(orders.extremum_over, largest=False), slots.reduced, MOVES),
    "reduce_or": Operation(partial(orders.any_or_all, largest=True), slots.reduced),
    "reduce_and": Operation(partial(orders.any_or_all, largest=False), slots.reduced),
    "cumsum": Operation(reductions.cumulative_sum, slots.accumulated, MOVES,
                        exact=sums.planned_cumulative),
    "cumprod": Operation(reductions.cumulative_product, slots.accumulated),
    "cummax": Operation(partial(orders.cumulative_extremum, largest=True), slots.accumulated,
                        MOVES),
    "cummin": Operation(partial(orders.cumulative_extremum, largest=False), slots.accumulated,
                        MOVES),
    "top_k": Operation(orders.top_k, merging=MOVES),
    **dict.fromkeys(("argmax", "argmin"), Operation(orders.place_of_extremum, slots.chosen,
                                                    NEVER_UNDONE, remedy=_SCORES)),
    "sort": Operation(orders.sort, slots.ordered, MOVES),
    "dot_general": Operation(reductions.contract, slots.multiplied, CONTRACTION,
                             slots.tight_products, narrow=True, exact=sums.planned_product),
    "conv_general_dilated": Operation(windows.convolve, merging=CONTRACTION, cpu_only=True,
                                      remedy=_KERNEL),
    "reduce_window_sum": Operation(windows.pooled_sum, exact=sums.planned_windows),
    "reduce_window_max": Operation(partial(windows.pooled_extremum, largest=True), merging=MOVES),
    "reduce_window_min": Operation(partial(windows.pooled_extremum, largest=False), merging=MOVES),
    # Rearrangements of entries.
    "broadcast_in_dim": Operation(layout.broadcast, slots.broadcast, MOVES, narrow=True),
    "reshape": Operation(layout.reshape, slots.reshaped, MOVES, narrow=True),
    "squeeze": Operation(layout.squeeze, slots.squeezed, MOVES, narrow=True),
    "transpose": Operation(layout.transpose, slots.transposed, MOVES, narrow=True),
    "slice": Operation(layout.cut, slots.sliced, MOVES, narrow=True),
    "split": Operation(layout.split, merging=MOVES),
    "dynamic_slice": Operation(layout.dynamic_slice, merging=MOVES, remedy=_TAKEN),
    "concatenate": Operation(layout.join, slots.joined, MOVES, narrow=True),
    "stack": Operation(layout.stack, slots.stacked, MOVES),
    "tile": Operation(layout.tile, merging=MOVES),
    "rev": Operation(layout.reverse, slots.reversed_, MOVES),
    "pad": Operation(layout.pad, merging=MOVES),
    "iota": Operation(layout.iota, slots.numbered),
    # Gathers and scatters.
    "gather": Operation(places.gather, slots.gathered, _LOOKUP, slots.tight_lookup),
    **dict.fromkeys(("scatter-add", "scatter_add"),
                    Operation(places.scatter_add, slots.scattered, PLACES, slots.tight_sums,
                              exact=sums.planned_scatter)),
    "scatter-max": Operation(partial(places.scatter_extremum, largest=True), slots.scattered,
                             PLACES),
    "scatter-min": Operation(partial(places.scatter_extremum, largest=False), slots.scattered,
                             PLACES),
    "scatter": Operation(places.scatter_set, slots.scattered, PLACES),
    # Loops. The walk visits the body of a `scan`; see _loops.py.
    "scan": Operation(remedy=_STEPS, instead=_FEWER),
    "while": Operation(remedy=_WHILE),
    # The walk visits the branches of a `cond`; see _walk.py.
    "cond": Operation(remedy="use jnp.where, and the same code on all platforms"),
    "platform_index": Operation(layout.platform_index),
    # Operations without a rule.
    "pure_callback": Operation(remedy="write it in JAX"),
    "fft": Operation(remedy=_WAVES),
    "reduce_prod": Operation(remedy=_LOGARITHMS),
    **dict.fromkeys(("digamma", "erf_inv", "lgamma"), Operation(remedy=_POINTS)),
    **dict.fromkeys(("lu", "cholesky", "qr", "svd", "eigh", "eig", "triangular_solve"),
                    Operation(remedy=_MATRIX)),
}
# fmt: on


def operation_of(name: str) -> Operation:
    """Returns the row of a primitive. A primitive that is not in the table has no rule."""
    return OPERATIONS.get(name, Operation())


_MOVING = names("slice dynamic_slice squeeze reshape broadcast_in_dim")


def rearranged(
    name: str, parameters: Mapping[str, Any], integers: np.ndarray, rest: Sequence[Abstract] = ()
) -> np.ndarray | None:
    """Returns known integers after an operation that only moves entries.

    The result is None for all other operations.
    """
    if name not in _MOVING:
        return None
    found: Any = OPERATIONS[name].rule(constant(integers), *rest, **parameters)  # type: ignore[misc]
    return np.broadcast_to(found.low, found.shape).astype(int)


@functools.lru_cache(maxsize=64)
def runs_on_cpu_only(jaxpr: jex.Jaxpr) -> bool:
    """Whether a proof about this program is valid on CPUs only."""
    return any(operation_of(name).cpu_only for name in primitives(jaxpr))
