"""Recognizes t softmax(x) where it is computed as (t / sum_j exp x_j) exp x_i.

The gradient of `jax.nn.log_softmax`, and so of a cross entropy, contains this product. JAX computes
the exponentials and their sum in one inner program, and the product in another one. So the walk
marks the abstract values of these arrays: an abstract value stands for one array.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.proving import _lemmas as lemmas
from dpjax.proving._operations import rearranged
from dpjax.proving._value import Abstract


class Mark(NamedTuple):
    """Says which part of a softmax an array (the marked array) is.

    Attributes:
        x: the operand of the softmax.
        axis: the axis of the softmax.
        of: the exponentials of x minus its maximum; None if the marked array is these exponentials.
        rows: if the marked array is the sum of the exponentials, or t over this sum: for each
            entry, the index of its sum.
        t: the numerator of t over the sum.
    """

    x: Abstract
    axis: int
    of: Abstract | None = None
    rows: np.ndarray = np.zeros(0, int)
    t: Abstract | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sums, which keep the axis of the softmax with length 1."""
        return tuple(1 if k == self.axis else size for k, size in enumerate(self.x.shape))

    @property
    def is_along(self) -> bool:
        """Whether each entry of the marked array is at the index of its sum in x."""
        if self.rows.ndim != len(self.shape):
            return False
        sums = np.arange(math.prod(self.shape)).reshape(self.shape)
        return bool((self.rows == sums).all())


Marks = Mapping[Abstract, Mark]


def marked(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], marks: Marks
) -> Mark | None:
    """Returns which part of a softmax an operation computes; None if it computes none."""
    known = [marks.get(x) for x in operands]
    if name == "div" and known[1] is not None:
        (t, total), mark = operands, known[1]
        usual = mark.of is not None and mark.t is None and t.shape == total.shape == mark.shape
        return mark._replace(t=t) if usual and mark.is_along else None
    if not known or known[0] is None:
        return None
    (x, *_), mark = operands, known[0]
    if mark.of is None:
        if name != "reduce_sum" or tuple(params["axes"]) != (mark.axis,):
            return None
        rows = np.arange(math.prod(mark.shape)).reshape(mark.shape).squeeze(mark.axis)
        return mark._replace(of=x, rows=rows)
    if name == "reduce_sum" and all(x.shape[k] == 1 for k in params["axes"]):
        return mark._replace(rows=mark.rows.squeeze(params["axes"]))
    rows = rearranged(name, params, mark.rows, operands[1:])
    return None if rows is None else mark._replace(rows=rows)


def product(name: str, operands: Sequence[Abstract], marks: Marks) -> Abstract | None:
    """Returns the value of t softmax(x); None for other operations."""
    for one, other in (operands, operands[::-1]) if name == "mul" else ():
        mark = marks.get(other)
        if mark is None or mark.t is None or mark.of is not one:
            continue
        t, usual = mark.t, not (mark.t.nan or mark.t.pending.coarse) and mark.t.is_finite
        if usual and t.dtype == mark.x.dtype and mark.is_along:
            return lemmas.shared(mark.x, t, (mark.axis,))
    return None
