"""The base of mechanisms that take the records themselves, and release a quantile of them."""

from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Value
from dpjax._core._values import Norm, Scalar
from dpjax._exact._numerics import compute_dtype
from dpjax.mechanisms._start import check_one_array
from dpjax.release._mechanism import SensitivityMechanism


class QuantileMechanism(SensitivityMechanism):
    """Sorts records between the public bounds `lower` and `upper`; one record is replaced."""

    delta: Scalar
    lower: float
    upper: float
    norm: Norm = "hamming"

    def _delta(self) -> Scalar:
        return self.delta

    def _check_value(self, value: Value) -> None:
        check_one_array(value, "records, shape (n,)")

    def _checked(self, value: Value) -> jax.Array:
        """The records as an array; refuses anything else."""
        records = _checks.real_arrays("value", value)
        self._check_value(records)
        return records

    def clamped(self, value: Value) -> Value:
        """The records as they are sorted: between the bounds, with NaN as the lower one.

        Args:
            value: an array of records.

        Returns:
            An array of the same shape, as private as the value.
        """
        x = _checks.real_arrays("value", value)
        x = x.astype(compute_dtype(x.dtype))
        low, high = (jnp.asarray(bound).astype(x.dtype) for bound in (self.lower, self.upper))
        return jnp.clip(jnp.where(jnp.isnan(x), low, x), low, high)

    @property
    def dp_event(self) -> Any:
        """An event that no accountant knows: the privacy loss depends on the database."""
        return _checks.extra("dp_accounting", "accounting").UnsupportedDpEvent()


def check_bounds(lower: float, upper: float) -> tuple[float, float]:
    """Two public numbers in order, far enough apart for a grid between them."""
    low, high = _checks.finite("lower", lower), _checks.finite("upper", upper)
    if _checks.is_traced(low) or _checks.is_traced(high):
        raise TypeError("lower and upper must be known when the mechanism is made")
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    width = high - low
    if width < 2.0**-20 * max(abs(low), abs(high)) or not 1e-25 < width < 1e25:
        raise ValueError(
            "lower and upper must be further apart, and less than 1e25 apart, got"
            f" {low:g} and {high:g}"
        )
    return low, high


def check_probability(probability: float) -> float:
    """A number in (0, 1) that is known when the mechanism is made."""
    p = _checks.fraction("probability", probability)
    if _checks.is_traced(p):
        raise TypeError("probability must be known when the mechanism is made")
    return float(p)


def rounding_of_a_release(magnitude: Scalar) -> Scalar:
    """A bound on the last rounding, to float32, of a release of at most this magnitude.

    It is half a unit in the last place. The other half covers the rounding of the bound itself.
    """
    return magnitude * float(jnp.finfo(jnp.float32).eps)
