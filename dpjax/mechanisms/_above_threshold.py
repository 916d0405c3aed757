"""The sparse vector technique: finds queries above a threshold, and pays only for these queries.

docs/proofs/sparse-vector.md has the proofs.
"""

import dataclasses
import functools
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, is_float, legendre_rule, outward
from dpjax.mechanisms._noisy_arrays import OnGrid, as_number
from dpjax.mechanisms._start import begin, check_one_array
from dpjax.random._grid_fit import Calibration
from dpjax.random._keys import check_key, key_for_each
from dpjax.random._noise import LAPLACE, Lattice
from dpjax.random._release import ComparisonNoise, first_above, lattice_laplace, noisy_units
from dpjax.release._draw import refuse_batch
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._norms import grid_dtype, rounding_norm

# `log_prob` integrates numerically over the noise of the threshold: from -24 to 24 scales, in 48
# panels that are narrower near 0, with 4 Gauss-Legendre nodes in each.
_REACH, _PANELS, _NODES = 24.0, 48, 4


@frozen_pytree
class SparseVectorState:
    """The secret state of an `AboveThreshold` between two queries.

    Attributes:
        key: the key that draws the noise of all later queries.
        noisy_threshold: the threshold plus its noise, in steps of the grid.
        remaining: how many more positive answers may be given.

    Formal guarantees:
        None of its own. The mechanism's guarantee is void if one state answers two queries, or if a
        state is published.
    """

    key: Key
    noisy_threshold: Limbs
    remaining: jax.Array

    def __repr__(self) -> str:
        return f"SparseVectorState(remaining={self.remaining})"


@frozen_pytree
class AboveThreshold(OnGrid, SensitivityMechanism):
    """Says which queries are above a threshold; made by `above_threshold`.

    Attributes:
        sensitivity: the largest change of any query, norm "linf".
        epsilon: the epsilon of the guarantee, for all answers together.
        threshold: the number with which queries are compared.
        positives: the largest number of positive answers.
        monotone: whether one record changes all queries in the same direction.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    threshold: Scalar
    positives: int = static()
    monotone: bool = static()

    _scale_name = "scale of the noise of a query"

    @property
    def _lattice(self) -> Lattice | None:
        return LAPLACE.lattice

    def _in_units_of(self, unit: float, larger: float) -> Self:
        return dataclasses.replace(
            super()._in_units_of(unit, larger), threshold=self.threshold / unit
        )

    def _check_structure(self, value: Value) -> None:
        check_one_array(value, "queries' answers, shape (K,)")

    def _before_noise(self, value: Value) -> PyTree:
        # The cast serves only to calibrate the noise, which depends on the shape and the dtype. The
        # draw rounds the original integers to the grid.
        return value.astype(jnp.result_type(float))

    @property
    def _charged(self) -> int:
        """Returns the factor of Delta in the scale of the queries' noise: 2c, or c if monotone."""
        return self.positives * (1 if self.monotone else 2)

    def _calibration(self, arrays: PyTree) -> Calibration:
        return self._calibrated(self._charged * (1 + self._charged ** (-2 / 3)), arrays)

    def _threshold_calibration(self, arrays: PyTree) -> Calibration:
        return self._calibrated(1 + self._charged ** (2 / 3), arrays)

    def _calibrated(self, multiplier: float, arrays: PyTree) -> Calibration:
        return Calibration(
            multiplier * self.sensitivity.value / self.epsilon,
            self.sensitivity.value,
            self.epsilon,
            rounding_norm("linf", arrays),
            # Rounded probabilities in noise tables add to the privacy loss of this many draws: one
            # for the threshold, and one for each positive answer. Negative answers cost nothing.
            1 + self.positives,
            self.sensitivity.zero_allowed,
            grid_dtype(arrays),
        )

    def _noise(self) -> ComparisonNoise:
        answer = jnp.zeros(1)
        return ComparisonNoise.of(self._calibration(answer), self._threshold_calibration(answer))

    def _check_fit(self, arrays: PyTree, calibration: Calibration) -> None:
        super()._check_fit(arrays, calibration)
        super()._check_fit(arrays, self._threshold_calibration(arrays))

    def _draw(self, key: Key, value: Value) -> jax.Array:
        return first_above(key, value, self.threshold, self._noise(), self.positives)

    def start(self, key: Key) -> SparseVectorState:
        """Draws the noise of the threshold, for queries that come one by one.

        Args:
            key: a key from `dpjax.random.secure_key`, used for nothing else. If a ledger is open,
                it records the key and is charged for all later answers now.

        Returns:
            A `SparseVectorState`, for `step`. Keep it secret.

        Raises:
            TypeError: if the key is not a typed key, or a ledger is open inside `jit` or `vmap`.
            ValueError: if a ledger has recorded the key before, or if the sensitivity was sampled,
                because a sample is not valid for queries that depend on earlier answers.
            BudgetExceededError: if the remaining budget of an open `dpjax.Ledger` is too small.
        """
        check_key(key)
        if self.sensitivity.identity is not None:
            raise ValueError(
                "sensitivity must be a global bound for queries that come one by one, got a "
                "sampled sensitivity, which is only valid for queries that were chosen in "
                "advance: pass a bound by dpjax.assume_sensitivity, or release all queries at "
                "once"
            )
        refuse_batch(self)
        self._check_unclamped()
        self._check_value(jax.ShapeDtypeStruct((1,), jnp.result_type(float)))
        return pay_and_draw(
            lambda: _start(self, key),
            key,
            self,
            guarantee=guarantee_under(key, self.guarantee),
            what=type(self).__name__,
        ).value

    def step(self, state: SparseVectorState, query: PyTree) -> tuple[SparseVectorState, jax.Array]:
        """Answers one query. The query may depend on earlier answers.

        Use each state for one query only. Use the returned state for the next query.

        Args:
            state: the state from `start`, or from the previous step.
            query: the value of the query on the private database, a real scalar. One record may
                change it by at most the sensitivity. NaN counts as 0.

        Returns:
            The next state, and whether the query is above the threshold. The answer is always False
            after `positives` positive answers, or if a traced parameter is invalid.

        Raises:
            TypeError: if the query is not a real number.
            ValueError: if the query is not a scalar, the mechanism is a batch of mechanisms, or
                `vmap` maps over queries but not over states.
        """
        refuse_batch(self)
        self._check_unclamped()
        answer = _checks.real_arrays("query", query)
        if not jax.tree_util.all_leaves([answer]) or answer.shape != ():
            raise ValueError(f"query must be a scalar, got {_checks.described(answer)}")
        with jax.debug_nans(False), jax.debug_infs(False):
            return _step(self, state, answer)

    def clamped(self, value: Value) -> Value:
        """The answers after clamping: NaN becomes 0, and every other number is clamped to `range`.

        Args:
            value: an array of queries' answers.

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        answers = _checks.real_arrays("value", value)
        if not is_float(answers):
            return answers
        high = jnp.asarray(self.range()[1]).astype(answers.dtype)
        high = jnp.minimum(high, float(jnp.finfo(answers.dtype).max))
        return jnp.clip(jnp.where(jnp.isnan(answers), 0, answers), -high, high)

    def range(self) -> tuple[Scalar, Scalar]:
        """The interval to which answers are clamped.

        Both ends are farther from 0 than 10^13 times the sensitivity.
        """
        exponent = self._noise().numbers.exponent
        high = as_number(power_of_two(exponent, jnp.result_type(float)) * 2.0**61)
        return -high, high

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        answers = self.clamped(value)
        self._check_value(answers)
        noise, dtype = self._noise(), compute_dtype(answers.dtype)
        places, count = jnp.asarray(output), answers.size
        gaps = (answers.astype(dtype) - jnp.asarray(self.threshold, dtype)) / noise.numbers.scale
        above = jnp.any(jnp.arange(count)[:, None] == places[None, :], axis=1)
        # Queries after the last positive answer do not affect the output.
        last = jnp.where(places[-1] < count, places[-1], count)
        asked = jnp.arange(count) <= last
        nodes, log_weights = (jnp.asarray(x, dtype) for x in _threshold_rule())
        lead = gaps[:, None] - nodes[None, :] * (noise.threshold.scale / noise.numbers.scale)
        found = logsumexp(
            _selected_sum(asked & above, LAPLACE.log_cdf(lead))
            + _selected_sum(asked & ~above, LAPLACE.log_cdf(-lead))
            + log_weights
        )
        inside = (places >= 0) & (places <= count)
        ordered = (places[1:] > places[:-1]) | ((places[1:] == count) & (places[:-1] == count))
        possible = (places.shape == (self.positives,)) & jnp.all(inside) & jnp.all(ordered)
        return jnp.where(possible, found, -jnp.inf)

    def margin(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> Scalar:
        """How far an answer must be from the threshold to be compared correctly, at a confidence.

        Args:
            confidence: in (0, 1).
            shape: (K,), for K queries. Simultaneous bounds need `shape` or `like`.
            like: instead of a shape, an array or `jax.ShapeDtypeStruct` of answers.
            simultaneous: whether the confidence is for the first K comparisons together, instead of
                for each comparison.

        Returns:
            A scalar in the units of the answers, including the error of rounding to the grid.
        """
        if simultaneous and not shape and like is None:
            raise ValueError("shape must be (K,), the number of queries, got ()")
        arrays, _ = self._asked(shape or (1,) if like is None else shape, like)
        tail = (1 - _checks.fraction("confidence", confidence)) / 2
        queries = arrays.size if simultaneous else 1
        noise = self._noise()
        # Half of the failure probability is allotted to the noise of the threshold, and half to the
        # noise of the queries.
        line = noise.threshold.scale * -math.log(tail)
        # The query, the threshold and both noises are rounded, each by at most half a step.
        steps = 2 * power_of_two(noise.numbers.exponent, jnp.result_type(float))
        return as_number(line + noise.numbers.scale * math.log(queries / tail) + steps)


def above_threshold(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    threshold: Scalar,
    positives: int = 1,
    monotone: bool = False,
) -> AboveThreshold:
    """The sparse vector technique: finds the first c queries above a threshold.

    Let T be the threshold and q_i the i-th query. The mechanism tests q_i + nu_i >= T + rho for one
    query after the other, until c tests have succeeded. The noise rho is drawn once, and nu_i is
    drawn for every query. Queries below the threshold cost nothing, however many there are. The
    Laplace noises rho and nu_i have scales Delta / epsilon_1 and 2 c Delta / epsilon_2, with
    epsilon_1 + epsilon_2 = epsilon. The split epsilon_2 = (2c)^(2/3) epsilon_1 minimizes the
    variance of nu_i - rho. For monotone queries, c replaces 2c.

    The release contains only the positions of the queries. To release the values of these c
    queries, too, spend another epsilon: `dpjax.laplace(c * Delta, other)` on
    `queries[release.value]` (Algorithm 7). Do not publish q_i + nu_i instead, because it reveals
    the threshold's noise.

    Args:
        sensitivity: a `Sensitivity` of the queries in the norm "linf", or a number, which is taken
            as a global bound in that norm.
        epsilon: the epsilon of all answers together; finite, above 0.
        threshold: T, a public number in the units of the queries. If each query has its own
            threshold, let the target subtract it from the query, and pass 0.
        positives: c, the number of positive answers, at least 1.
        monotone: your promise that changing one record never changes two queries in opposite
            directions. The promise is true for counts under add-or-remove-one. Under replace-one,
            it is true for counts of x > t for several t, but false for the counts of several bins.

    Returns:
        An `AboveThreshold`: `mechanism(key, queries)` takes answers of shape (K,), and releases the
        positions of the first c answers above the threshold, int32 of shape (c,). If fewer than c
        answers are above the threshold, the remaining entries are K. If queries depend on earlier
        answers, call `state = mechanism.start(key)`, and then `state, above = mechanism.step(state,
        query)` for each query.

    Raises:
        TypeError: if a parameter has the wrong type.
        ValueError: if a number is out of range or the sensitivity's norm is not linf; at a release,
            if the queries are not one array of shape (K,).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP if
        the sensitivity is a global bound. The guarantee holds for the integer noise that is
        actually drawn, by the proof in docs/proofs/sparse-vector.md. The scales are slightly larger
        than above, to cover rounding to the grid and the finite tables of the noise. Only the noise
        of the threshold and of the c positive answers adds privacy loss. All K comparisons are
        made, so the running time does not reveal the position of the last positive answer.

        Some published variants are not private at any epsilon (Lyu, Su and Li, section 3): variants
        without noise on queries, without a limit on positive answers, or that release q_i + nu_i.
        If the noise on queries does not grow with c, the true cost is epsilon (1 + 6c) / 4. If all
        queries share one draw of noise, their order is released exactly.

    Source:
        Lyu, Su and Li (2017), Algorithms 1 and 7, with their split of epsilon and their theorem on
        monotone queries; Dwork, Naor, Reingold, Rothblum and Vadhan (2009).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.above_threshold(1.0, epsilon=1.0, threshold=500.0, positives=2)
        >>> queries = jnp.array([3.0, 900.0, 20.0, 1100.0, 1000.0])
        >>> mechanism(dpjax.random.seeded_key(0), queries).value
        Array([1, 3], dtype=int32)
    """
    sensitivity, epsilon = begin("linf", sensitivity, epsilon)
    if sensitivity.zero_allowed:
        raise ValueError(
            "sensitivity must be above 0, got one made with allow_zero=True: if the queries do not"
            " depend on the records, compare them without a mechanism"
        )
    line = _checks.finite("threshold", threshold)
    if _checks.is_traced(line):
        epsilon = jnp.where(jnp.isnan(line), jnp.nan, outward(epsilon, math.inf))
    count = _checks.integer("positives", positives, least=1, most=2**31 - 1)
    if not isinstance(monotone, (bool, np.bool_)):
        raise TypeError(f"monotone must be True or False, got {_checks.shown(monotone)}")
    return AboveThreshold(sensitivity, epsilon, line, count, bool(monotone))


@jax.jit
def _start(mechanism: AboveThreshold, key: Key) -> SparseVectorState:
    first, rest = jax.random.split(key_for_each(key, mechanism.threshold))
    noise = mechanism._noise()
    line = noisy_units(mechanism.threshold, lattice_laplace(first, ()), noise.threshold)
    remaining = jnp.where(noise.is_usable, mechanism.positives, 0).astype(jnp.int32)
    return SparseVectorState(rest, line, remaining)


@jax.jit
def _step(
    mechanism: AboveThreshold, state: SparseVectorState, query: jax.Array
) -> tuple[SparseVectorState, jax.Array]:
    now, later = jax.random.split(key_for_each(state.key, query))
    noisy = noisy_units(query, lattice_laplace(now, ()), mechanism._noise().numbers)
    above = ~_limbs.less(noisy, state.noisy_threshold) & (state.remaining > 0)
    remaining = state.remaining - above.astype(jnp.int32)
    return SparseVectorState(later, state.noisy_threshold, remaining), above


@functools.lru_cache
def _threshold_rule() -> tuple[np.ndarray, np.ndarray]:
    """Returns quadrature nodes, and their log weights under the standard Laplace density."""
    nodes, log_weights = legendre_rule(_NODES)
    ends = _REACH * np.linspace(0, 1, _PANELS + 1) ** 2
    half = np.diff(ends)[:, None] / 2
    points = (ends[:-1, None] + half * (nodes + 1)[None, :]).ravel()
    logs = (log_weights[None, :] + np.log(half)).ravel() - points - math.log(2)
    return np.concatenate([-points[::-1], points]), np.concatenate([logs[::-1], logs])


def _selected_sum(selected: jax.Array, terms: jax.Array) -> jax.Array:
    """Returns the sum of the selected rows, as a matrix product to save memory in a batch."""
    return jnp.dot(selected.astype(terms.dtype), terms, precision="highest")
