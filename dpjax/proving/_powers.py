"""The rule of powers with a public exponent."""

import numpy as np

from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import lipschitz
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract

_LARGEST_EXPONENT = 64


def power(x: Abstract, exponent: Abstract, *, dtype: np.dtype) -> Abstract:
    """x^y for numbers above 0: monotone, with slope |y| x^(y - 1) at one of the ends.

    Rounding is that of exp(y log x), whose operand is off by u |y log x|, in each of the steps that
    a compiler may take.
    """
    if not exponent.is_known or dtype.kind != "f" or not x.dtype == exponent.dtype == dtype:
        raise RefusalError("a power has a rule where its exponent is one public float")
    if x.low.min() < rounding.SMALLEST_DENOMINATOR or exponent.low.size != 1:
        raise RefusalError(
            f"the base of a power lies in [{x.low.min():.3g}, {x.high.max():.3g}] and may be 0 or"
            " negative: clamp it from below, as by jnp.maximum"
        )
    y = float(exponent.low.flat[0])
    if exponent.shape or not abs(y) <= _LARGEST_EXPONENT:
        raise RefusalError(f"a power of this form has no rule, with exponent {y:.3g}")
    ends = x.low**y, x.high**y
    low, high = np.minimum(*ends), np.maximum(*ends)
    gain = abs(y) * np.maximum(x.low ** (y - 1), x.high ** (y - 1)) * (1 + 2.0**-30)
    logs = np.maximum(np.abs(np.log(x.low)), np.abs(np.log(x.high)))
    units = 2 * rounding.elementary(dtype) + 16 * abs(y) * (logs + 1)
    if not np.isfinite(high).all():
        raise RefusalError("the power may overflow: rescale")
    # The exponential of an error, and what the host rounds.
    theta = np.expm1(units * rounding.unit(dtype)) + 2.0**-40
    gain = rounding.up(gain) + 2.0**-500
    return lipschitz((x,), x.shape, x.axis, dtype, (low, high), (gain,), relative=theta)
