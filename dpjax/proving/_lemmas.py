"""Functions of JAX whose sensitivity is known better than their operations show.

A lemma applies to an inner program with the fingerprint of the function itself, traced anew on the
same shapes. Its name only says which function to compare with.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Equation, aval, equations
from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, make

Lemma = Callable[[Abstract], Abstract]
_EXACT_PLACES = 2**23


def known(equation: Equation, inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """The value of an inner program by a lemma; None where there is none."""
    name = equation.params.get("name")
    if name not in _LEMMAS or not operands:
        return None
    function, lemma = _LEMMAS[name]
    x, *public = operands
    records_only = x.axis == 0 and x.others.is_zero and x.dtype.kind == "f" and x.is_finite
    no_correction = all(p.is_known and not p.low.any() for p in public)
    if not records_only or not no_correction or x.n < 2:
        return None
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    reference = jax.make_jaxpr(lambda records: function(records, axis=0))(spec)
    calls = [e for e in equations(reference.jaxpr) if e.params.get("name") == name]
    if len(calls) != 1 or digest(calls[0].params["jaxpr"]) != digest(inner):
        return None
    found = lemma(x)
    expected = aval(equation.outvars[0])
    return found if (expected.shape, expected.dtype) == (found.shape, found.dtype) else None


def _variance(x: Abstract) -> Abstract:
    """One record moves a variance by at most w^2 (n - 1) / n^2; w is the width of its range.

    With the mean m and the variance v of the n - 1 other records, the variance of all is
    v (n - 1) / n + (x_i - m)^2 (n - 1) / n^2, and x_i, x_i' and m lie in one interval of length w.

    In floats: the mean is off by at most e = (gamma_n + 16 u) max|x|. The mean of (x_j - m - e)^2
    exceeds the variance by e^2, and is at most (w + e)^2. Its rounding is relative to that.
    """
    n, u = x.n, rounding.unit(x.dtype)
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    width = rounding.up(high - low)
    sizes = np.maximum(np.abs(low), np.abs(high))
    gamma = rounding.sum_units(n, x.dtype)
    off = (gamma + 16 * u) * sizes + 8 * rounding.tiny(x.dtype) * (n + 1)
    relative = 2 * (gamma + 32 * u)
    if gamma > 2.0**-6:
        relative = math.inf
    error = off**2 + relative * (width + 2 * off) ** 2
    error = rounding.up(error + 16 * rounding.tiny(x.dtype) * (n + 1) * (1 + sizes))
    moves = rounding.up(width**2 * ((n - 1) / n**2))
    each = np.where(x.changed.each[0] > 0, rounding.up(moves + 2 * error), 0.0)
    ends = np.zeros_like(each), rounding.up(width**2 / 4 + error)
    moved = each, math.inf, math.inf
    return make(x.shape[1:], x.dtype, *ends, None, moved, moved)


def _median(x: Abstract) -> Abstract:
    """Of an even number of records: half of what one record moves.

    It is the mean of two neighboring order statistics. Sorting moves no arrays further apart in l1,
    so both together move by at most as much as the record.
    JAX computes their places in floats: beyond `_EXACT_PLACES` it may take another one, twice.
    """
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = 8 * rounding.unit(x.dtype) * sizes + 16 * rounding.tiny(x.dtype)
    share = 1.0 if x.n % 2 or x.n > _EXACT_PLACES else 0.5
    each = np.where(x.changed.each[0] > 0, x.changed.each[0] * share + 2 * error, 0.0)
    ends = rounding.widened(low, high, error)
    moved = rounding.up(each), math.inf, math.inf
    return make(x.shape[1:], x.dtype, *ends, None, moved, moved)


_LEMMAS: dict[str, tuple[Callable[..., Any], Lemma]] = {
    "_var": (jnp.var, _variance),
    "median": (jnp.median, _median),
}
