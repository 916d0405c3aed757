"""Recognizes t softmax(x) where it is computed as (t / sum_j exp x_j) exp x_i.

The gradient of `jax.nn.log_softmax`, and so of a cross entropy, contains this product. JAX computes
the exponentials and their sum in one inner program, and the product in another one. So the walk
marks the abstract values of these arrays: an abstract value stands for one array.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpjax.proving import _lemmas as lemmas
from dpjax.proving._value import Abstract


class Mark(NamedTuple):
    """A part of a softmax.

    Attributes:
        x: the operand of the softmax.
        axis: the axis of the softmax.
        of: the exponentials of x minus its maximum; None if these are the marked array itself.
        places: if the marked array is the sum of the exponentials, or t over this sum: for each of
            its axes the axis of x with the same index, or None if the array only repeats its
            numbers along this axis.
        t: the numerator of t over the sum.
    """

    x: Abstract
    axis: int
    of: Abstract | None = None
    places: tuple[int | None, ...] = ()
    t: Abstract | None = None


Marks = Mapping[Abstract, Mark]


def marked(
    name: str, params: Mapping[str, Any], operands: Sequence[Abstract], marks: Marks
) -> Mark | None:
    """Returns which part of a softmax an operation computes; None if it computes none."""
    known = [marks.get(x) for x in operands]
    if name == "div" and known[1] is not None:
        (t, total), mark = operands, known[1]
        rows = tuple(1 if k == mark.axis else size for k, size in enumerate(mark.x.shape))
        usual = mark.of is not None and mark.t is None and t.shape == total.shape == rows
        return mark._replace(t=t) if usual and _is_along(mark, total.shape) else None
    if not known or known[0] is None:
        return None
    (x, *_), mark = operands, known[0]
    if name == "reduce_sum":
        axes = tuple(params["axes"])
        if mark.of is None:
            rows = tuple(k for k in range(len(x.shape)) if k != mark.axis)
            return mark._replace(of=x, places=rows) if axes == (mark.axis,) else None
        return _kept(mark, x, [k for k in range(len(x.shape)) if k not in axes])
    if mark.of is None:
        return None
    if name == "squeeze":
        dropped = {k % len(x.shape) for k in params["dimensions"]}
        return _kept(mark, x, [k for k in range(len(x.shape)) if k not in dropped])
    places: list[int | None] = []
    if name == "broadcast_in_dim":
        places = [None] * len(params["shape"])
        for old, new in enumerate(params["broadcast_dimensions"]):
            if x.shape[old] == params["shape"][new]:
                places[new] = mark.places[old]
        return mark._replace(places=tuple(places))
    if name == "reshape":
        # Axes of length 1 may come or go, but the order of all others stays.
        long = [k for k, size in enumerate(x.shape) if size > 1]
        after = [size for size in params["new_sizes"] if size > 1]
        if after != [x.shape[k] for k in long]:
            return None
        rest = iter(long)
        places = [mark.places[next(rest)] if size > 1 else None for size in params["new_sizes"]]
        return mark._replace(places=tuple(places))
    return None


def _kept(mark: Mark, x: Abstract, axes: Sequence[int]) -> Mark | None:
    """Returns the mark after axes of length 1 are removed."""
    if any(size != 1 for k, size in enumerate(x.shape) if k not in axes):
        return None
    return mark._replace(places=tuple(mark.places[k] for k in axes))


def _is_along(mark: Mark, shape: Sequence[int]) -> bool:
    """Whether an array has the same rows as x, and the same number in each entry of a row."""
    if len(shape) != len(mark.x.shape) or len(mark.places) != len(shape):
        return False
    rows = [k for k, size in enumerate(mark.x.shape) if k != mark.axis and size > 1]
    return all(mark.places[k] == k for k in rows) and mark.places[mark.axis] is None


def product(name: str, operands: Sequence[Abstract], marks: Marks) -> Abstract | None:
    """Returns the value of t softmax(x); None for other operations."""
    for one, other in (operands, operands[::-1]) if name == "mul" else ():
        mark = marks.get(other)
        if mark is None or mark.t is None or mark.of is not one:
            continue
        t, usual = mark.t, not (mark.t.nan or mark.t.pending.coarse) and mark.t.is_finite
        if usual and t.dtype == mark.x.dtype and _is_along(mark, other.shape):
            return lemmas.shared(mark.x, t, (mark.axis,))
    return None
