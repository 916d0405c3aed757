"""A lemma for clipping a whole array, such as a mean gradient, by its norm."""

import math

import numpy as np

from dpjax._tracing._walks import Equation
from dpjax.proving import _rounding as rounding
from dpjax.proving._norm_clips import Search, error_of
from dpjax.proving._scopes import Scope
from dpjax.proving._value import Abstract, make


def projected(scope: Scope, equation: Equation, walked: Abstract | None) -> Abstract | None:
    """Returns the value of x / max(f ||x||, c), where the norm is that of the whole array.

    It is 1 / c times the projection of x to the ball of radius c / f. A projection to a convex set
    does not increase distances in l2. The norm has a relative error theta, tiny squares may
    underflow, and the norm may be that of another use of x.
    """
    first, second = equation.invars
    x = scope.value(first)
    if (
        walked is None
        or x is None
        or x.axis is not None
        or x.is_public
        or x.dtype.kind != "f"
        or x.nan
    ):
        return None
    search = Search(scope, x=first)
    node = search.node((second, scope))
    if node.name == "broadcast_in_dim":
        node = search.node(node.operands[0])
    for one, other in (node.operands, node.operands[::-1]) if node.name == "max" else ():
        number = search.number(other)
        if number is None or not 2.0**-30 <= number <= 2.0**30:
            continue
        norm = search.above(one)
        if norm is None or search.loose or norm.summed != tuple(range(len(x.shape))):
            continue
        count, least = math.prod(x.shape), number / norm.factor
        theta = error_of(x, count)
        vanished = 2 * math.sqrt(2 * count * rounding.tiny(x.dtype))
        slack = x.apart * math.sqrt(count)
        relative = 2 * theta + 2 * (vanished + slack) / least
        if relative > 2.0**-6 or search.centered is not None:
            return None
        radius = float(rounding.up((1 + 2 * relative) / norm.factor))
        off = 2 * relative * radius + 64 * count * rounding.tiny(x.dtype) * (1 + 1 / number)
        l2 = float(rounding.up(x.others.l2 / number * (1 + 2.0**-30) + 2 * off))
        ends, moved = np.full((1,) * len(x.shape), radius), (np.asarray(l2), math.inf, l2)
        return make(x.shape, x.dtype, -ends, ends, None, moved, moved, l2_of_row=radius)
    return None
