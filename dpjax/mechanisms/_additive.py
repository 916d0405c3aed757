"""Additive noise: independent coordinates at a scale proportional to the sensitivity."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax._pytree import frozen_pytree, static
from dpjax.base import Norm, Scalar, Sensitivity
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin, quantile_level
from dpjax.random._noise import Noise
from dpjax.random._release import OUTWARD, add_noise, centered, check_scale, usable_scale


@frozen_pytree
class AdditiveMechanism(SensitivityMechanism):
    """Adds noise to every coordinate of a pytree; made by `additive`, `laplace` or `gaussian`.

    Attributes:
        sensitivity: what the noise is calibrated to.
        epsilon: of the guarantee.
        delta: of the guarantee.
        scale: of the noise, in the units of the value.
        norm: in which the sensitivity is measured.
        noise: the distribution at scale 1.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar
    delta: Scalar
    scale: Scalar
    norm: Norm = static()
    noise: Noise = static()

    def _delta(self) -> Scalar:
        return self.delta

    def _draw(self, key: jax.Array, value: Any) -> Any:
        return add_noise(
            key, value, self.scale, self.noise, zero_allowed=self.sensitivity.zero_allowed
        )

    def _check_value(self, value: Any) -> None:
        zero_allowed = self.sensitivity.zero_allowed
        check_scale("scale of the noise", self.scale, value, zero_allowed=zero_allowed)

    def effective_scale(self, shape: tuple[int, ...] = ()) -> Scalar:
        """The scale really drawn for a value of a shape: nominal, with the margin for rounding."""
        del shape  # Floating-point noise has no grid, hence no charge that grows with the size.
        return self.scale * OUTWARD

    def log_prob(self, output: Any, value: Any) -> jax.Array:
        value = _checks.real_arrays("value", value)
        return sum_over_leaves(
            lambda y, x: additive_log_prob(y, x, self.scale, self.noise), output, value
        )

    def error_quantile(
        self, probability: float, *, shape: tuple[int, ...] = (), simultaneous: bool = False
    ) -> Scalar:
        level = quantile_level(probability, shape, simultaneous)
        return self.scale * self.noise.magnitude_quantile(level)

    @property
    def dp_event(self) -> Any:
        if self.noise.dp_event is None:
            return super().dp_event
        if self.sensitivity.zero_allowed:
            return _checks.extra("dp_accounting", "accounting").NonPrivateDpEvent()
        return self.noise.dp_event(float(self.scale) / float(self.sensitivity.value))


def additive(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    norm: Norm,
    noise: Noise,
    delta: Scalar = 0.0,
    multiplier: Callable[[Scalar, Scalar], Scalar] | None = None,
) -> AdditiveMechanism:
    """A mechanism of your own: a norm, and noise whose log density is Lipschitz in it.

    Releases value + scale * Z with scale = Delta * multiplier(epsilon, delta), by default
    Delta / epsilon.

    Args:
        sensitivity: a `Sensitivity` in `norm`, or a number, taken as a global bound in it.
        epsilon: finite, above 0.
        norm: a norm's name, or a function of the difference of two values.
        noise: the distribution of Z.
        delta: 0, or a number in (0, 1) that the multiplier takes into account.
        multiplier: scale over sensitivity.

    Returns:
        An `AdditiveMechanism`.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if a parameter is out of range or the sensitivity is in another norm.

    Formal guarantees:
        You promise that the noise at scale multiplier(epsilon, delta), shifted by any vector of
        norm 1, is (epsilon, delta)-indistinguishable from itself; for the default multiplier,
        that its log density changes by at most the norm of the shift. The rest follows:
        (epsilon, delta, gamma)-random DP under the sensitivity's neighboring relation.

    Source:
        Rubinstein and Aldà (2017), Definition 9.

    Example:
        >>> from dpjax.mechanisms import additive
        >>> from dpjax.random import LAPLACE
        >>> additive(0.5, 1.0, norm="l1", noise=LAPLACE).scale
        0.5
    """
    sensitivity, epsilon = begin(norm, sensitivity, epsilon)
    if _checks.is_traced(delta) or not np.array_equal(delta, 0):
        delta = _checks.fraction("delta", delta)
    unit = 1 / epsilon if multiplier is None else multiplier(epsilon, delta)
    if _checks.is_traced(unit):
        epsilon = jnp.where(jnp.isnan(unit), jnp.nan, epsilon)
    scale = sensitivity.value * unit
    if not _checks.is_traced(scale) and not math.isfinite(scale):
        raise ValueError(f"epsilon={epsilon} is too small: the scale of the noise overflows")
    return AdditiveMechanism(sensitivity, epsilon, delta, scale, norm, noise)


def additive_log_prob(output: jax.Array, x: jax.Array, scale: Scalar, noise: Noise) -> jax.Array:
    """Log density of one noisy array; log probability where it holds integers."""
    usable = usable_scale(scale, x.dtype)
    output = jnp.asarray(output)
    if output.shape != x.shape:
        raise ValueError(f"output must be of the value's shape {x.shape}, got {output.shape}")
    center = centered(x)
    # Integers are subtracted as such: both fit 30 bits, where floats would lose the last ones.
    error = (output.astype(center.dtype) - center).astype(usable.dtype) / usable
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sum(noise.log_density(error) - jnp.log(usable))
    half = 0.5 / usable
    return jnp.sum(noise.log_interval(error - half, error + half))


def sum_over_leaves(function: Callable[..., jax.Array], *trees: Any) -> jax.Array:
    """Sums a function of corresponding leaves."""
    terms = jax.tree.leaves(jax.tree.map(function, *trees))
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    return jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
