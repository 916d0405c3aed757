"""One row for each elementary function with a rule of proofs: all tests of such rules read it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from dpjax.proving import _rounding as rounding


class Row(NamedTuple):
    """A function, how exactly devices must compute it, and a program for the rule.

    Attributes:
        device: the function of JAX.
        host: the same function, in the widest floats of the host.
        interval: where errors are measured.
        program: of records in [-1, 1]. On all pairs over three values a coordinate, it must show a
            rule that claims three quarters of a move. None if another row shows it.
        relative: whether the error is relative to the value, also below 1.
        units: a bound on the error in units of the unit roundoff, if it is another than that of
            elementary functions.
    """

    device: Callable[..., Any]
    host: Callable[..., Any]
    interval: tuple[float, float]
    program: Callable[..., Any] | None
    relative: bool = False
    units: float | None = None


def _logistic(x):
    return 1 / (1 + np.exp(-x))


def _erf(x):
    return scipy.special.erf(x.astype(float))


def _rsqrt(x):
    return 1 / np.sqrt(x)


def _angle(x):
    return jnp.arctan2(x, jnp.full_like(x, 0.7))


# fmt: off
ELEMENTARY = {
    "exp": Row(jnp.exp, np.exp, (-80, 40), jnp.exp, relative=True),
    "log": Row(jnp.log, np.log, (2.0**-60, 4), lambda x: jnp.log(x + 1.5)),
    "log1p": Row(jnp.log1p, np.log1p, (-0.999, 4), lambda x: jnp.log1p(x / 2)),
    "log1p near -.414": Row(jnp.log1p, np.log1p, (-0.41422, -0.4142), None),
    "expm1": Row(jnp.expm1, np.expm1, (-80, 40), jnp.expm1),
    "tanh": Row(jnp.tanh, np.tanh, (-25, 25), lambda x: jnp.tanh(3 * x)),
    "atan": Row(jnp.arctan, np.arctan, (-25, 25), lambda x: jnp.arctan(3 * x)),
    "atan2": Row(_angle, lambda x: np.arctan2(x, 0.7), (-25, 25), lambda x: _angle(3 * x)),
    "logistic": Row(jax.nn.sigmoid, _logistic, (-80, 80), lambda x: jax.nn.sigmoid(5 * x)),
    "erf": Row(lax.erf, _erf, (-6, 6), lax.erf),
    "sin": Row(jnp.sin, np.sin, (-4096, 4096), lambda x: jnp.sin(7 * x)),
    "cos": Row(jnp.cos, np.cos, (-4096, 4096), lambda x: jnp.cos(7 * x)),
    "rsqrt": Row(lax.rsqrt, _rsqrt, (2.0**-60, 4), lambda x: lax.rsqrt(x + 1.25), relative=True),
    "sqrt": Row(jnp.sqrt, np.sqrt, (2.0**-60, 4), lambda x: jnp.sqrt(x + 1), True,
                rounding.DIVISION),
}
# fmt: on
