"""Propose-test-release: a bound that is guessed, tested in private, and used if it holds widely.

docs/proofs/propose-test-release.md has the proofs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, outward
from dpjax.mechanisms._lattice_mechanism import as_number
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin
from dpjax.mechanisms._noise_intervals import noise_quantile
from dpjax.mechanisms._ordered_records import (
    OrderedRecords,
    check_bounds,
    check_records,
    clamped_records,
    rank_of,
    replacements_until,
    rounding_of_a_release,
)
from dpjax.random._facade import LAPLACE, GridFit, integer_fit, laplace_steps, steps_to_float

# The proposed bound has between 2^11 and 2^12 steps of the grid, rounded down.
_BOUND_BITS = 12
# What a proposed bound is at least, of the distance of the bounds of records, so that these are
# less than 2^30 steps apart.
_LEAST_BOUND = 2.0**-17
# Covers the float32 roundings of the least distance that is answered.
_OUTWARD_DISTANCE = 1 + 2.0**-18
# Of each scale that a noisy distance must exceed: noise of an answer has at most 2^41 steps, and
# the least distance that is answered is below 2^30.
_LEAST_EPSILON = 2.0**-28


@frozen_pytree
class Reply:
    """What a test lets pass; made by a `ProposeTestRelease`.

    Attributes:
        answered: 1 where the test passed, else 0; -1 where a traced parameter was bad.
        value: the answer; 0 without one.

    Formal guarantees:
        None of its own: silence is part of the release too.
    """

    answered: jax.Array
    value: jax.Array

    def __repr__(self) -> str:
        return f"Reply(answered={self.answered}, value={self.value})"


@frozen_pytree
class ProposeTestRelease(SensitivityMechanism):
    """Answers where the proposed bound holds far around; made by `propose_test_release`.

    Attributes:
        sensitivity: one record changes, norm "hamming".
        epsilon: of the guarantee.
        delta: of the guarantee.
        scales: how many scales of its noise a noisy distance must exceed, log(1 / (2 delta)).
        bound: on the local sensitivity, as proposed.
        lower: of the records.
        upper: of the records.
        probabilities: of the quantile, or of the two quantiles whose difference is meant.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    delta: Scalar = up()
    scales: Scalar = up()
    bound: Scalar
    lower: float
    upper: float
    probabilities: tuple[float, ...] = static()

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "hamming"

    def _delta(self) -> Scalar:
        return self.delta

    def _check_value(self, value: Value) -> None:
        check_records(value)

    @property
    def _exponent(self) -> jax.Array:
        bound = jnp.asarray(self.bound, jnp.float32)
        bound = jnp.where(bound > 0, bound, 1)
        return (jnp.frexp(bound)[1] - _BOUND_BITS).astype(jnp.int32)

    @property
    def _bound_steps(self) -> jax.Array:
        """The bound in steps; NaN where it is none."""
        bound = jnp.asarray(self.bound, jnp.float32)
        return jnp.floor(bound * power_of_two(-self._exponent, jnp.float32))

    def _fits(self) -> tuple[GridFit, GridFit]:
        """The noise of the distance and of the answer: half of epsilon for each."""
        steps = self._bound_steps
        return (
            integer_fit(2 / self.epsilon, 1.0, self.epsilon, 2),
            integer_fit(2 * steps / self.epsilon, steps, self.epsilon, 2),
        )

    @property
    def least_distance(self) -> jax.Array:
        """What a noisy distance must exceed: so many scales of its noise, rounded up."""
        fit, _ = self._fits()
        return jnp.ceil(fit.scale * jnp.asarray(self.scales, jnp.float32) * _OUTWARD_DISTANCE)

    def _measured(self, value: jax.Array) -> tuple[OrderedRecords, jax.Array, jax.Array]:
        """The records in order, the statistic in steps, and its distance from instability."""
        records = OrderedRecords.of(value, (self.lower, self.upper), self._exponent)
        ranks = [rank_of(p, records.n) for p in self.probabilities]
        bound = self._bound_steps
        bound = jnp.where(bound > 0, bound, 1).astype(jnp.int32)
        distances = [replacements_until(records, rank, bound) for rank in ranks]
        return records, self._statistic(records, ranks), jnp.stack(distances).min()

    def _statistic(self, records: OrderedRecords, ranks: list[int]) -> jax.Array:
        if len(ranks) == 1:
            return records.steps[ranks[0]]
        return records.steps[ranks[1]] - records.steps[ranks[0]]

    def _center(self, records: OrderedRecords, statistic: jax.Array) -> Limbs:
        """In steps above 0: a difference of quantiles has no lowest one."""
        if len(self.probabilities) == 1:
            return records.absolute(statistic)
        return _limbs.from_integers(statistic)

    def _draw(self, key: Key, value: Value) -> Reply:
        records, statistic, distance = self._measured(value)
        test, answer = self._fits()
        least = self.least_distance
        usable = ~(jnp.isnan(test.scale) | jnp.isnan(answer.scale))
        far = _limbs.from_integers(jnp.where(usable, least, 0).astype(jnp.int32))
        of_distance, of_answer = laplace_steps(key, test, answer)
        passed = _limbs.less(far, _limbs.add(_limbs.from_integers(distance), of_distance))
        total = _limbs.add(self._center(records, statistic), of_answer)
        dtype = compute_dtype(value.dtype)
        number = jnp.where(passed, steps_to_float(total, records.exponent, dtype), 0).astype(dtype)
        return Reply(
            jnp.where(usable, passed.astype(jnp.int32), -1), jnp.where(usable, number, jnp.nan)
        )

    def grids(self, value: Value) -> PyTree:
        """What each number of a release is a multiple of; 0 for the one that is no number.

        Args:
            value: an array of records; its contents do not matter.

        Returns:
            A `Reply` of scalars.
        """
        del value
        return Reply(jnp.float32(0), power_of_two(self._exponent, jnp.float32))

    def clamped(self, value: Value) -> Value:
        """Records as they are ordered: between the bounds, NaN as the lower one.

        Args:
            value: an array of records.

        Returns:
            An array of the same shape, as private as the value.
        """
        return clamped_records(value, self.lower, self.upper)

    def distance(self, value: Value) -> jax.Array:
        """How many replacements lead to a database that the bound does not hold for: private.

        Run it on public or drawn records, to choose a bound: below `least_distance` there will
        hardly be an answer.

        Args:
            value: an array of records, shape (n,).

        Returns:
            An int32 scalar.
        """
        records = _checks.real_arrays("value", value)
        self._check_value(records)
        return _distance(self, records)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = _checks.real_arrays("value", value)
        self._check_value(value)
        dtype = compute_dtype(value.dtype)
        records, statistic, distance = self._measured(value)
        test, answer = self._fits()
        # P(distance + M > least), of integer noise: half a step above it.
        margin = (distance.astype(dtype) - self.least_distance.astype(dtype) - 0.5) / test.scale
        center = steps_to_float(self._center(records, statistic), records.exponent, dtype)
        scale = (answer.scale * power_of_two(records.exponent, jnp.float32)).astype(dtype)
        error = (jnp.asarray(output.value, dtype) - center) / scale
        density = LAPLACE.log_density(error) - jnp.log(scale)
        answered = jnp.asarray(output.answered)
        is_silence = (answered == 0) & (jnp.asarray(output.value) == 0)
        silent = jnp.where(is_silence, LAPLACE.log_cdf(-margin), -jnp.inf)
        return jnp.where(answered == 1, LAPLACE.log_cdf(margin) + density, silent)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the distance of an answer from the true statistic; silence has no error.

        Args:
            confidence: the probability, at least, that an answer keeps the bound; in (0, 1).

        Returns:
            A scalar in the units of the records; it covers the rounding to the grid and to floats.
        """
        noise = self._fits()[1].scale * noise_quantile(LAPLACE, confidence)
        # The noise and each quantile are rounded by half a step.
        steps = noise + (1 + len(self.probabilities)) / 2
        bound = as_number(steps * power_of_two(self._exponent, jnp.float32))
        # Ranges are at most upper - lower.
        largest = max(abs(self.lower), abs(self.upper), self.upper - self.lower)
        return bound + rounding_of_a_release(largest + bound)

    @property
    def dp_event(self) -> Any:
        """An event that no accountant knows."""
        return _checks.extra("dp_accounting", "accounting").UnsupportedDpEvent()


def propose_test_release(
    epsilon: Scalar,
    delta: Scalar,
    *,
    bound: Scalar,
    lower: float,
    upper: float,
    probability: float | tuple[float, float] = 0.5,
) -> ProposeTestRelease:
    """Propose-test-release for a quantile or an interquantile range.

    You propose a bound on the local sensitivity. How many records would have to be replaced before
    it fails gets noise, and must exceed log(1 / (2 delta)) scales of it; then the statistic is
    released with noise of scale 2 bound / epsilon. Else there is no answer, and that is the answer.

    Args:
        epsilon: finite, above 0; half of it goes to the test.
        delta: in (0, 1).
        bound: proposed, public, in the units of the records: chosen on public data, or for its
            noise. At least 2^-17 of upper - lower.
        lower: of the records, which are clamped; public.
        upper: of the records, public.
        probability: of the quantile: the ceil(p n)-th smallest record, as `targets.quantile` has
            it; or two of them, for their difference: (0.25, 0.75) is the interquartile range.

    Returns:
        A `ProposeTestRelease`: `mechanism(key, records)` takes numbers of shape (n,), NaN as lower,
        and releases a `Reply`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if one is out of range or a pair out of order, or epsilon is so small that no
            database passes the test; at a release, if the value is not one array of records.

    Formal guarantees:
        (epsilon, delta)-DP when one record is replaced, for the integers that are drawn: on
        every pair of neighbors the release is epsilon-DP, or passes the test with probability at
        most delta on both. For let d be the least number of replacements after which the local
        sensitivity of a quantile exceeds the bound; it moves by 1 at most. Where the statistics of
        two neighbors are within the bound of each other, testing and answering cost epsilon / 2
        each. Where they are not, d = 0 for both, the tests have one distribution, and both pass
        with probability e^(-t) / 2 <= delta, t the scales that must be exceeded. A replacement
        moves all quantiles in one direction, so the difference of two moves by no more than one of
        them does, and the lesser of their distances serves it.

    Source:
        Dwork and Lei (2009); the distance as in Nissim, Raskhodnikova and Smith (2007), section 3.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> median = dpjax.propose_test_release(1.0, 1e-6, bound=1.0, lower=0.0, upper=1000.0)
        >>> ages = jnp.arange(10_000) % 100
        >>> int(median(dpjax.random.seeded_key(0), ages).value.answered)
        1
    """
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    delta = _checks.fraction("delta", delta)
    low, high = check_bounds(lower, upper)
    proposed = _checks.positive("bound", bound)
    least, most = _LEAST_BOUND * (high - low), high - low
    # On the host where it can be: as a leaf a tiny delta would be rounded up.
    scales = _scales(delta)
    in_range = (least <= proposed) & (proposed <= most)
    carried = (epsilon >= _LEAST_EPSILON) & (epsilon >= _LEAST_EPSILON * scales)
    if any(map(_checks.is_traced, (epsilon, delta, proposed))):
        epsilon = jnp.where(in_range & carried, outward(epsilon, math.inf), jnp.nan)
    elif not in_range:
        raise ValueError(f"bound must be in [{least:g}, {most:g}], got {proposed:g}")
    elif not carried:
        raise ValueError(
            f"epsilon={epsilon:g} is too small for delta={delta:g}: no database would be answered"
        )
    return ProposeTestRelease(
        sensitivity, epsilon, delta, scales, proposed, low, high, _probabilities(probability)
    )


def _scales(delta: Scalar) -> Scalar:
    """log(1 / (2 delta)), or 0; NaN where a traced delta is bad."""
    if _checks.is_traced(delta):
        return jnp.maximum(-jnp.log(2 * delta), 0)
    return max(-math.log(2 * delta), 0.0)


@jax.jit
def _distance(mechanism: ProposeTestRelease, value: jax.Array) -> jax.Array:
    return mechanism._measured(value)[2]


def _probabilities(probability: float | tuple[float, float]) -> tuple[float, ...]:
    given = probability if isinstance(probability, tuple) else (probability,)
    checked = tuple(_checks.fraction("probability", p) for p in given)
    if any(map(_checks.is_traced, checked)):
        raise TypeError("probability must be known when the mechanism is made")
    if len(checked) not in (1, 2) or list(checked) != sorted(set(checked)):
        raise ValueError(f"probability must be one number, or two in order, got {probability}")
    return checked
