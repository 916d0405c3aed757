"""Lemmas of means that a program writes out: variances in two ways, and weighted means.

docs/proofs/global-sensitivity.md has the proofs. Other records stand still in all of them.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._walks import Atom, Equation
from dpjax.proving import _rounding as rounding
from dpjax.proving._lemmas import mean_error, variance
from dpjax.proving._pending import flattened
from dpjax.proving._slices import Program, is_program_of
from dpjax.proving._value import Abstract, make

Square = Callable[[jax.Array], jax.Array]
Values = Mapping[jex.Var, Abstract | None]
_LARGEST_ERROR = 2.0**-6


def known(program: Program, equation: Equation, values: Values) -> tuple[str, Abstract] | None:
    """The lemma that the program up to an operation is an instance of, and its bound."""
    name = equation.primitive.name
    if name == "div" and (found := _weighted_mean(program, equation, values)) is not None:
        return "weighted mean", found
    if name not in _VARIANCES:
        return None
    for total in program.sources(equation.outvars[0], "reduce_sum"):
        x, variable = _summed_records(program, total.invars[0], values)
        part = None if variable is None else program.between(variable, equation.outvars[0])
        if x is None or part is None or not {e.primitive.name for e in part.eqns} <= _NAMES:
            continue
        for function, lemma in _VARIANCES[name]:
            with jax.numpy_rank_promotion("allow"):
                is_one = is_program_of(function, part, x.shape, x.dtype)
            if is_one and (found := lemma(x)) is not None:
                return "variance", found
    return None


def _summed_records(
    program: Program, atom: Atom, values: Values
) -> tuple[Abstract | None, jex.Var | None]:
    """An array by record that is summed, perhaps squared first."""
    squared = program.definition(atom)
    if squared is not None and squared.primitive.name in ("integer_pow", "square", "mul"):
        atom = squared.invars[0]
    if isinstance(atom, jex.Literal):
        return None, None
    x = values.get(atom)
    return (x, atom) if x is not None and _is_of_records(x) else (None, None)


def _is_of_records(x: Abstract) -> bool:
    return x.axis == 0 and x.others.is_zero and x.dtype.kind == "f" and x.is_finite and x.n > 1


def _by_moments(x: Abstract) -> Abstract | None:
    """The mean of squares less the square of the mean: a variance, but for its rounding.

    With M the largest |x|, the mean of squares is off by (gamma_n + 10 u) M^2. The mean is off by
    e, so the squared mean by e (2 M + e) and 2 u M^2, and the difference by 2 u M^2.
    """
    exact = variance(x, 0.0)
    gamma = rounding.sum_units(x.n, x.dtype) + 16 * rounding.unit(x.dtype)
    if exact is None or gamma > _LARGEST_ERROR:
        return None
    largest = x.magnitude.max(axis=0)
    off = mean_error(x, largest)
    error = 2 * gamma * largest**2 + off * (2 * largest + off)
    error = error + 16 * rounding.tiny(x.dtype) * (x.n + 1) * (1 + largest)
    error = rounding.up(np.broadcast_to(error, np.broadcast_shapes(error.shape, exact.low.shape)))
    each = np.where(exact.others.each > 0, exact.others.each + 2 * error, 0.0)
    moved = rounding.up(each), math.inf, math.inf
    ends = rounding.widened(exact.low, exact.high, error)
    return make(exact.shape, exact.dtype, *ends, None, moved, moved)


def _weighted_mean(program: Program, equation: Equation, values: Values) -> Abstract | None:
    """It moves by at most the width of the numbers, times the largest share of one record.

    The sums are off by gamma_n, relative to their terms, and the quotient by 8 u. The weights of
    both sums are uses apart.
    """
    over, weights = (_summed(program, atom) for atom in equation.invars)
    product = None if over is None else program.definition(over)
    if weights is None or product is None or product.primitive.name != "mul":
        return None
    operands = [atom for atom in product.invars if atom is not weights]
    if len(operands) != 1 or isinstance(operands[0], jex.Literal):
        return None
    x, w = values.get(operands[0]), values.get(weights)
    if x is None or w is None or not (_is_of_records(x) and _is_of_records(w)):
        return None
    if flattened(w)[0] > 1:  # The sum of weights may become one sum of all their terms.
        return None
    least, most = float(w.low.min()), float(w.high.max())
    if x.shape != w.shape or len(x.shape) != 1 or least < 2.0**-30:
        return None
    gamma = rounding.sum_units(x.n, x.dtype) + 16 * rounding.unit(x.dtype) + w.apart / least
    if gamma > _LARGEST_ERROR:
        return None
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    error = rounding.of_quotient(gamma, x.dtype) * np.maximum(np.abs(low), np.abs(high))
    error = rounding.up(error + 64 * rounding.tiny(x.dtype) * (x.n + 1) * (1 + 1 / least))
    share = most / ((x.n - 1) * least + most)
    each = rounding.up(rounding.up(share * (high - low)) + 2 * error)
    moved = each, math.inf, math.inf
    return make((), x.dtype, *rounding.widened(low, high, error), None, moved, moved)


def _summed(program: Program, atom: Atom) -> jex.Var | None:
    """The array of one axis that a number is the sum of."""
    total = program.definition(atom)
    if total is None or total.primitive.name != "reduce_sum" or tuple(total.params["axes"]) != (0,):
        return None
    return None if isinstance(total.invars[0], jex.Literal) else total.invars[0]


def _centered(square: Square, *, keepdims: bool) -> Square:
    return lambda x: square(x - x.mean(0, keepdims=keepdims)).mean(0)


def _moments(inner: Square, outer: Square) -> Square:
    return lambda x: inner(x).mean(0) - outer(x.mean(0))


_SQUARES: tuple[Square, ...] = (lambda x: x**2, lambda x: x * x, jnp.square)
_NAMES = frozenset(
    ("reduce_sum", "div", "sub", "mul", "square", "integer_pow", "broadcast_in_dim", "reshape")
)
# By the last operation: programs of a variance along the records, each with its lemma.
_VARIANCES: dict[str, list[tuple[Square, Callable[[Abstract], Abstract | None]]]] = {
    "div": [
        (_centered(square, keepdims=keepdims), lambda x: variance(x, 0.0))
        for square in _SQUARES
        for keepdims in (False, True)
    ],
    "sub": [(_moments(a, b), _by_moments) for a in _SQUARES for b in _SQUARES],
}
