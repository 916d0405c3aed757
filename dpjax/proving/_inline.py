"""Lemmas of what a program computes in several operations of its own."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Equation, aval
from dpjax.proving import _means as means
from dpjax.proving._exponentials import log_softmax, logsumexp, softmax
from dpjax.proving._norm_clips import clipped
from dpjax.proving._pending import carried
from dpjax.proving._slices import Program, is_program_of
from dpjax.proving._value import Abstract, Difference, make

Values = Mapping[jex.Var, Abstract | None]
# By its last operation: the name to show, the function, and what is known of it along axes.
_OF_A_MAXIMUM: dict[str, tuple[str, Callable[..., jax.Array], Callable[..., Abstract | None]]] = {
    "div": ("softmax", jax.nn.softmax, lambda x, axes: softmax(x, *axes)),
    "sub": ("log_softmax", jax.nn.log_softmax, lambda x, axes: log_softmax(x, *axes)),
    "add": ("logsumexp", jax.nn.logsumexp, logsumexp),
}


def improved(
    program: Program, equation: Equation, values: Values, walked: Abstract | None
) -> tuple[str, Abstract] | None:
    """The lemma that the program up to an operation is an instance of, and the better bound."""
    name = equation.primitive.name
    operands: Any = [values.get(x) for x in equation.invars if isinstance(x, jex.Var)]
    # A lemma takes an array for the same in all of its uses.
    if any(x is not None and x.pending.coarse for x in operands):
        return None
    found = clipped(program, equation, values) if name in ("div", "mul") else None
    if found is not None:
        operands: Any = [values[x] for x in equation.invars]  # type: ignore[index]
        joined = carried(name, equation.params, operands, found)
        return "clip by norm", meet(walked, dataclasses.replace(found, pending=joined))
    if walked is not None and (mean := means.known(program, equation, values)):
        found = dataclasses.replace(mean[1], pending=walked.pending)
        return mean[0], meet(walked, found)
    if name not in _OF_A_MAXIMUM:
        return None
    shown, function, lemma = _OF_A_MAXIMUM[name]
    for maximum in program.sources(equation.outvars[0], "reduce_max"):
        variable, axes = maximum.invars[0], tuple(maximum.params["axes"])
        if isinstance(variable, jex.Literal):
            continue
        x = values.get(variable)
        if x is None or x.is_public or not x.is_finite or x.dtype.kind != "f" or x.pending.coarse:
            continue
        if name != "add" and len(axes) != 1:
            continue
        part = program.between(variable, equation.outvars[0])
        axis: Any = axes[0] if len(axes) == 1 else axes
        if is_program_of(function, part, x.shape, x.dtype, axis=axis):
            found = lemma(x, axes)
            if found is not None and (found.shape, found.dtype) == _type(equation):
                # A quotient has a denominator of at most so many bits.
                bits = x.pending.bits + math.log2(math.prod(x.shape)) + 1
                joined = x.pending.having(bits=bits, terms=1)
                return shown, meet(walked, dataclasses.replace(found, pending=joined))
    return None


def _type(equation: Equation) -> tuple[tuple[int, ...], np.dtype]:
    made = aval(equation.outvars[0])
    return tuple(made.shape), np.dtype(made.dtype)


def meet(first: Abstract | None, second: Abstract) -> Abstract:
    """Both are true of one array, so the better of every bound is."""
    if first is None or first.axis != second.axis:
        return second
    low, high = np.maximum(first.low, second.low), np.minimum(first.high, second.high)

    def better(a: Difference, b: Difference) -> tuple[np.ndarray, float, float]:
        return np.minimum(a.each, b.each), min(a.l1, b.l1), min(a.l2, b.l2)

    return make(
        first.shape, first.dtype, low, high, first.axis, better(first.changed, second.changed),
        better(first.others, second.others), whole=first.whole,
        l2_of_row=min(first.l2_of_row, second.l2_of_row), source=first.source,
        pending=first.pending, apart=min(first.apart, second.apart),
    )  # fmt: skip
