"""Functions of JAX whose sensitivity is known better than their operations show.

A lemma applies to an inner program with the fingerprint of the function itself, traced anew on the
same shapes. Its name only says which function to compare with.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Equation, aval, equations
from dpjax.proving import _rounding as rounding
from dpjax.proving._pending import flattened
from dpjax.proving._pending_facts import Pending
from dpjax.proving._value import Abstract, make

Lemma = Callable[..., Abstract | None]


def known(equation: Equation, inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """The value of an inner program by a lemma; None where there is none."""
    if not operands:
        return None
    if equation.params.get("name") == "searchsorted":
        return _places(inner, operands)
    x, *public = operands
    records_only = x.axis == 0 and x.others.is_zero and x.dtype.kind == "f" and x.is_finite
    scalars = all(p.is_known and not p.shape for p in public)
    if not records_only or not scalars or x.n < 2:
        return None
    expected = aval(equation.outvars[0])
    for function, lemma in _LEMMAS.get(str(equation.params.get("name")), ()):
        if _fingerprint(function, x, str(equation.params["name"])) == digest(inner):
            numbers = [float(p.low) for p in public]
            found = lemma(x, *numbers)
            if found and (expected.shape, expected.dtype) == (found.shape, found.dtype):
                return dataclasses.replace(found, pending=_pending(x, found, *numbers))
    return None


def _pending(x: Abstract, found: Abstract, correction: float = 0.0) -> Pending:
    """That of a sum over the records of squares or products, over n less a correction."""
    load, divisor = float(found.magnitude.max()), x.n - correction
    bits = 2 * x.pending.bits + abs(math.log2(divisor)) + 1
    return Pending.of_sum(x.n, load).having(
        terms=x.n, weight=load, factor=1 / divisor, bits=bits, shift=x.pending.shift
    )


def _fingerprint(function: Callable[..., Any], x: Abstract, name: str) -> str | None:
    """That of the inner program which a function of JAX calls by this name."""
    with jax.default_matmul_precision("highest"):
        reference = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    calls = [e for e in equations(reference.jaxpr) if e.params.get("name") == name]
    return digest(calls[0].params["jaxpr"]) if len(calls) == 1 else None


def _places(inner: Any, operands: Sequence[Abstract]) -> Abstract | None:
    """`jnp.searchsorted` of each number in a public array of k levels: an integer from 0 to k."""
    if len(operands) != 2 or not operands[0].is_public or not operands[1].is_finite:
        return None
    levels, x = operands
    if len(levels.shape) != 1 or levels.dtype != x.dtype:
        return None
    specs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands]
    for side in ("left", "right"):
        reference = jax.make_jaxpr(lambda a, v, side=side: jnp.searchsorted(a, v, side=side))
        if digest(reference(*specs).jaxpr.eqns[0].params["jaxpr"]) != digest(inner):
            continue
        top = np.full((1,) * len(x.shape), float(levels.shape[0]))
        moved = [
            (np.where(d.each > 0, top, 0.0), math.inf, math.inf) for d in (x.changed, x.others)
        ]
        return make(x.shape, np.dtype(np.int32), 0 * top, top, x.axis, *moved, whole=True)
    return None


def variance(x: Abstract, correction: float) -> Abstract | None:
    """One record moves a variance by at most w^2 (n - 1) / n^2; w is the width of its range.

    With the mean m and the variance v of the n - 1 other records, the variance of all is
    v (n - 1) / n + (x_i - m)^2 (n - 1) / n^2, and x_i, x_i' and m lie in one interval of length w.
    A correction c multiplies all of it by n / (n - c).

    In floats: the mean is off by at most e = (gamma_n + 16 u) max|x|. The mean of (x_j - m - e)^2
    exceeds the variance by e^2, so it is at most w^2 / 4 + e^2. Its rounding is relative to that.
    """
    n = x.n
    if not 0 <= correction <= n - 1:
        return None
    scale = n / (n - correction)
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    width, off, relative = _centered(x, low, high)
    if not math.isfinite(relative):
        return None
    error = (off**2 + relative * (width / 2 + 2 * off) ** 2) * scale
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = rounding.up(error + 16 * rounding.tiny(x.dtype) * (n + 1) * (1 + sizes) * scale)
    moves = rounding.up(width**2 * ((n - 1) / n**2) * scale)
    each = np.where(x.changed.each[0] > 0, rounding.up(moves + 2 * error), 0.0)
    ends = np.zeros_like(each), rounding.up(width**2 / 4 * scale + error)
    moved = each, math.inf, math.inf
    return make(x.shape[1:], x.dtype, *ends, None, moved, moved)


def _covariance(x: Abstract, over: float) -> Abstract | None:
    """One record moves a scatter by a rank-two matrix: docs/proofs/global-sensitivity.md.

    `over` is what the scatter of n records is divided by, n or n - 1. Entry (p, q) moves by at most
    w_p w_q (n - 1) / n / over, and the whole by at most |w|^2 or 4 R^2 in l2, R a radius of rows.
    """
    if len(x.shape) != 2:
        return None
    n = x.n
    low, high = (np.broadcast_to(end, (end.shape[0], x.shape[1])) for end in (x.low, x.high))
    width, off, relative = _centered(x, low.min(axis=0), high.max(axis=0))
    if not math.isfinite(relative):
        return None
    share = (n - 1) / n / over
    sides = width / 2 + 2 * off
    tiny = 16 * rounding.tiny(x.dtype) * (n + 1)
    error = off[:, None] * off + relative * sides[:, None] * sides
    error = (error + x.apart * (sides[:, None] + sides)) * (n / over)  # Both factors are uses.
    error = rounding.up(error + tiny * (1 + sides[:, None] + sides))
    products = rounding.up(width[:, None] * width)
    radius = min(float(rounding.norm2(width)) ** 2, 4 * x.l2_of_row**2)
    still = np.broadcast_to(x.changed.each[0], width.shape) == 0
    fixed = still[:, None] & still
    each = np.where(fixed, 0.0, rounding.up(products * share + 2 * error))
    l2 = float(rounding.up(radius * share + 2 * rounding.norm2(np.where(fixed, 0.0, error))))
    largest = rounding.up(products * (n / over) / 4 + error)
    moved = each, math.inf, l2
    return make(each.shape, x.dtype, -largest, largest, None, moved, moved)


def _centered(
    x: Abstract, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Widths; errors of computed means; the relative error of sums of centered squares."""
    gamma = rounding.sum_units(x.n, x.dtype)
    off = mean_error(x, np.maximum(np.abs(low), np.abs(high)))
    relative = 2 * (gamma + 32 * rounding.unit(x.dtype)) if gamma <= 2.0**-6 else math.inf
    return rounding.up(high - low), off, relative


def mean_error(x: Abstract, sizes: np.ndarray) -> np.ndarray:
    """Of a computed mean of records of at most these sizes, which may be sums themselves.

    The mean of the same records, as another use of them rounds, is `apart` from that.
    """
    terms, weight = flattened(x)
    gamma = rounding.sum_units(x.n * terms, x.dtype) + 16 * rounding.unit(x.dtype)
    flush = 8 * rounding.tiny(x.dtype) * (x.n * terms + 1)
    return gamma * np.maximum(sizes, weight) + flush + x.apart


def _median(x: Abstract) -> Abstract:
    """Of an even number of records: half of what one record moves.

    It is the mean of two neighboring order statistics. Sorting moves no arrays further apart in l1,
    so both together move by at most as much as the record.
    JAX computes their places in these floats, and halves: beyond those that are exact it may take
    another one, twice.
    """
    low, high = x.low.min(axis=0), x.high.max(axis=0)
    sizes = np.maximum(np.abs(low), np.abs(high))
    error = 8 * rounding.unit(x.dtype) * sizes + 16 * rounding.tiny(x.dtype)
    inexact = x.n > rounding.exact_integers(x.dtype) / 2
    share = 1.0 if x.n % 2 or inexact else 0.5
    each = np.where(x.changed.each[0] > 0, x.changed.each[0] * share + 2 * error, 0.0)
    ends = rounding.widened(low, high, error)
    moved = rounding.up(each), math.inf, math.inf
    return make(x.shape[1:], x.dtype, *ends, None, moved, moved)


# By the name of the inner program: functions that call it, each with its lemma.
_LEMMAS: dict[str, list[tuple[Callable[..., Any], Lemma]]] = {
    "_var": [(lambda x: jnp.var(x, axis=0), variance)],
    "median": [(lambda x: jnp.median(x, axis=0), _median)],
    "cov": [
        (lambda x: jnp.cov(x, rowvar=False), lambda x: _covariance(x, x.n - 1)),
        (lambda x: jnp.cov(x, rowvar=False, bias=True), lambda x: _covariance(x, x.n)),
    ],
}
