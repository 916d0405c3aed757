"""Propose-test-release for quantiles: noise for a proposed bound on the local sensitivity.

A private test first decides whether the bound is true for all databases near the private database.
docs/proofs/propose-test-release.md has the proofs.
"""

import math

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, made, made_by_factory, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, outward
from dpjax.mechanisms._noise_intervals import noise_quantile
from dpjax.mechanisms._noisy_arrays import as_number
from dpjax.mechanisms._smooth_quantile import (
    OrderedRecords,
    QuantileMechanism,
    check_bounds,
    check_probability,
    rank_of,
    replacements_until,
    rounding_of_a_release,
)
from dpjax.mechanisms._start import begin
from dpjax.random._grid_fit import GridFit
from dpjax.random._noise import LAPLACE
from dpjax.random._release import integer_fit, laplace_steps, steps_to_float

# The spacing of the grid is a power of two such that the proposed bound is 2^11 to 2^12 steps.
_BOUND_BITS = 12
# The bound must be at least this fraction of upper - lower. Then upper - lower is less than 2^30
# steps of the grid.
_LEAST_BOUND = 2.0**-17
# This factor covers the rounding errors of `least_distance` in float32.
_OUTWARD_DISTANCE = 1 + 2.0**-18
# Both epsilon and epsilon / `scales` must be at least this number. Then the noise of an answer has
# a scale of at most 2^41 steps, and `least_distance` is below 2^30.
_LEAST_EPSILON = 2.0**-28


@frozen_pytree
class Reply:
    """The value of a release by `ProposeTestRelease`: an answer, or the fact that there is none.

    Attributes:
        answered: 1 if the test passed, 0 if it failed, -1 if a traced parameter was bad.
        value: the answer; 0 if the test failed.

    Formal guarantees:
        None of its own. The fact that there is no answer is part of the release, and the guarantee
        of the mechanism covers it.
    """

    answered: jax.Array
    value: jax.Array

    def __repr__(self) -> str:
        return f"Reply(answered={self.answered}, value={self.value})"


@made_by_factory
class ProposeTestRelease(QuantileMechanism):
    """Answers only if the bound holds for all nearby databases; made by `propose_test_release`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one record changes.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee.
        scales: log(1 / (2 delta)). The test passes if the noisy distance exceeds this many scales
            of its noise.
        bound: the bound on the local sensitivity, as proposed.
        lower: the lower bound of the records.
        upper: the upper bound of the records.
        probabilities: the probabilities of the quantile, or of the two quantiles whose difference
            is released.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    delta: Scalar = up()
    scales: Scalar = up()
    bound: Scalar
    lower: float
    upper: float
    probabilities: tuple[float, ...] = static()

    @property
    def _exponent(self) -> jax.Array:
        bound = jnp.asarray(self.bound, jnp.float32)
        bound = jnp.where(bound > 0, bound, 1)
        return (jnp.frexp(bound)[1] - _BOUND_BITS).astype(jnp.int32)

    @property
    def _bound_steps(self) -> jax.Array:
        """Returns the bound in steps of the grid, rounded down; NaN if the bound is NaN."""
        bound = jnp.asarray(self.bound, jnp.float32)
        return jnp.floor(bound * power_of_two(-self._exponent, jnp.float32))

    def _fits(self) -> tuple[GridFit, GridFit]:
        """Returns the noise of the distance and of the answer, each for half of epsilon."""
        steps = self._bound_steps
        return (
            integer_fit(2 / self.epsilon, 1.0, self.epsilon, 2),
            integer_fit(2 * steps / self.epsilon, steps, self.epsilon, 2),
        )

    @property
    def least_distance(self) -> jax.Array:
        """The test passes if the noisy distance exceeds this number of records."""
        fit, _ = self._fits()
        return jnp.ceil(fit.scale * jnp.asarray(self.scales, jnp.float32) * _OUTWARD_DISTANCE)

    def _measured(self, value: jax.Array) -> tuple[Limbs, jax.Array]:
        """Returns the statistic in steps of the grid, and the distance that the test uses."""
        records = OrderedRecords.of(value, (self.lower, self.upper), self._exponent)
        ranks = [rank_of(p, records.n) for p in self.probabilities]
        bound = self._bound_steps
        bound = jnp.where(bound > 0, bound, 1).astype(jnp.int32)
        distances = [replacements_until(records, rank, bound) for rank in ranks]
        # `records.steps` counts from the lower bound, and `absolute` converts this to steps from 0.
        if len(ranks) == 1:
            statistic = records.absolute(records.steps[ranks[0]])
        else:
            statistic = _limbs.from_integers(records.steps[ranks[1]] - records.steps[ranks[0]])
        return statistic, jnp.stack(distances).min()

    def _draw(self, key: Key, value: Value) -> Reply:
        statistic, distance = self._measured(value)
        test, answer = self._fits()
        least = self.least_distance
        usable = ~(jnp.isnan(test.scale) | jnp.isnan(answer.scale))
        far = _limbs.from_integers(jnp.where(usable, least, 0).astype(jnp.int32))
        of_distance, of_answer = laplace_steps(key, test, answer)
        passed = _limbs.less(far, _limbs.add(_limbs.from_integers(distance), of_distance))
        total = _limbs.add(statistic, of_answer)
        dtype = compute_dtype(value.dtype)
        number = jnp.where(passed, steps_to_float(total, self._exponent, dtype), 0).astype(dtype)
        return Reply(
            jnp.where(usable, passed.astype(jnp.int32), -1), jnp.where(usable, number, jnp.nan)
        )

    def grids(self, value: Value) -> PyTree:
        """The grid spacing of answers, in a `Reply`; it does not depend on `value`."""
        del value
        return Reply(jnp.float32(0), power_of_two(self._exponent, jnp.float32))

    def distance(self, value: Value) -> jax.Array:
        """How many records must be replaced until the local sensitivity exceeds the bound.

        This number is as private as the records. To choose a bound, call this method on public or
        simulated records. If the distance is below `least_distance`, the test will rarely pass.

        Args:
            value: an array of records, shape (n,).

        Returns:
            An int32 scalar.
        """
        return _distance(self, self._checked(value))

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = self._checked(value)
        dtype = compute_dtype(value.dtype)
        statistic, distance = self._measured(value)
        test, answer = self._fits()
        # The probability P(distance + M > least) of the integer noise M is approximated by the
        # continuous distribution, with the usual continuity correction of 1/2.
        margin = (distance.astype(dtype) - self.least_distance.astype(dtype) - 0.5) / test.scale
        center = steps_to_float(statistic, self._exponent, dtype)
        scale = (answer.scale * power_of_two(self._exponent, jnp.float32)).astype(dtype)
        error = (jnp.asarray(output.value, dtype) - center) / scale
        density = LAPLACE.log_density(error) - jnp.log(scale)
        answered = jnp.asarray(output.answered)
        is_silence = (answered == 0) & (jnp.asarray(output.value) == 0)
        silent = jnp.where(is_silence, LAPLACE.log_cdf(-margin), -jnp.inf)
        return jnp.where(answered == 1, LAPLACE.log_cdf(margin) + density, silent)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the distance of an answer from the true statistic, if there is an answer.

        Args:
            confidence: the probability, at least, that the error of an answer is within the bound;
                in (0, 1).

        Returns:
            A scalar in the units of the records, including the error of rounding to the grid and to
            floats.
        """
        noise = self._fits()[1].scale * noise_quantile(LAPLACE, confidence)
        # The noise and each quantile are rounded by at most half a step.
        steps = noise + (1 + len(self.probabilities)) / 2
        bound = as_number(steps * power_of_two(self._exponent, jnp.float32))
        # A difference of two quantiles is at most upper - lower.
        largest = max(abs(self.lower), abs(self.upper), self.upper - self.lower)
        return bound + rounding_of_a_release(largest + bound)


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

    You propose a bound on the local sensitivity. The mechanism counts how many records must be
    replaced until the bound fails, and adds noise to this distance. If the noisy distance exceeds
    log(1 / (2 delta)) scales of the noise, it releases the statistic with noise of scale 2 bound /
    epsilon. Otherwise it releases that there is no answer.

    Args:
        epsilon: finite, above 0. Half of it pays for the test.
        delta: in (0, 1).
        bound: the proposed bound, in the units of the records, at least 2^-17 (upper - lower). It
            must be public: choose it from public data, or from the noise that you accept.
        lower: the lower bound of the records, which are clamped; public.
        upper: the upper bound of the records, public.
        probability: p, for the ceil(p n)-th smallest record, as in `targets.quantile`; or two
            probabilities, for the difference of their quantiles: (0.25, 0.75) is the interquartile
            range.

    Returns:
        A `ProposeTestRelease`: `mechanism(key, records)` takes numbers of shape (n,), and releases
        a `Reply`. NaN counts as `lower`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range, if `lower` and `upper` or two probabilities are
            out of order, or if epsilon is so small that no database passes the test; at a release,
            if the value is not one array of records.

    Formal guarantees:
        (epsilon, delta)-DP when one record is replaced, for the integers that are drawn. On every
        pair of neighbors, either the release is epsilon-DP, or each database passes the test with
        probability at most delta. docs/proofs/propose-test-release.md has the proof.

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
    # Concrete numbers are computed on the host, because a tiny delta would be 0 in float32.
    traced = _checks.is_traced(delta)
    scales = jnp.maximum(-jnp.log(2 * delta), 0) if traced else max(-math.log(2 * delta), 0.0)
    in_range = (least <= proposed) & (proposed <= most)
    carried = (epsilon >= _LEAST_EPSILON) & (epsilon >= _LEAST_EPSILON * scales)
    if _checks.any_traced(epsilon, delta, proposed):
        epsilon = jnp.where(in_range & carried, outward(epsilon, math.inf), jnp.nan)
    elif not in_range:
        raise ValueError(f"bound must be in [{least:g}, {most:g}], got {proposed:g}")
    elif not carried:
        raise ValueError(
            f"epsilon={epsilon:g} is too small for delta={delta:g}: no database would get an answer"
        )
    numbers = epsilon, delta, scales, proposed, low, high, _probabilities(probability)
    return made(ProposeTestRelease, sensitivity, *numbers)


@jax.jit
def _distance(mechanism: ProposeTestRelease, value: jax.Array) -> jax.Array:
    return mechanism._measured(value)[1]


def _probabilities(probability: float | tuple[float, float]) -> tuple[float, ...]:
    given = probability if isinstance(probability, tuple) else (probability,)
    checked = tuple(map(check_probability, given))
    if len(checked) not in (1, 2) or list(checked) != sorted(set(checked)):
        raise ValueError(
            f"probability must be one number, or two in increasing order, got {probability}"
        )
    return checked
