"""The sparse vector technique: which queries are above a threshold, paid by how many are.

docs/proofs/sparse-vector.md has the proofs.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, legendre_rule, outward
from dpjax.mechanisms._lattice_mechanism import LatticeMechanism, as_number
from dpjax.mechanisms._mechanism import begin
from dpjax.random._facade import (
    LAPLACE,
    Calibration,
    ComparisonNoise,
    Lattice,
    check_key,
    first_above,
    key_for_each,
    lattice_noise,
    noisy_units,
)
from dpjax.release._prepared import prepared
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._norms import grid_dtype, rounding_norm

# The quadrature of log_prob: how many scales of the threshold's noise on either side, in panels
# that are narrower where the density is higher, and nodes of a panel.
_REACH, _PANELS, _NODES = 24.0, 48, 4


@frozen_pytree
class SparseVectorState:
    """What the next query of an `AboveThreshold` is compared with.

    Attributes:
        key: of the noise to come.
        noisy_threshold: in steps of the grid.
        remaining: how many positive answers are left.

    Formal guarantees:
        None of its own: it is a secret. The promise fails for two queries to one state, and for a
        state that is shown.
    """

    key: Key
    noisy_threshold: Limbs
    remaining: jax.Array

    def __repr__(self) -> str:
        return f"SparseVectorState(remaining={self.remaining})"


@frozen_pytree
class AboveThreshold(LatticeMechanism):
    """Says which queries are above a threshold; made by `above_threshold`.

    Attributes:
        sensitivity: how far any query moves, norm "linf".
        epsilon: of the guarantee, for all answers together.
        threshold: that queries are compared with.
        positives: how many positive answers are given.
        monotone: whether one record moves all queries in the same direction.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    threshold: Scalar
    positives: int = static()
    monotone: bool = static()

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "linf"

    _scale_name = "scale of the noise of a query"

    @property
    def _lattice(self) -> Lattice | None:
        return LAPLACE.lattice

    def _check_structure(self, value: Value) -> None:
        if not jax.tree_util.all_leaves([value]) or value.ndim != 1:
            raise ValueError(
                "value must be one array of queries' answers, shape (K,), got"
                f" {jax.tree.map(lambda leaf: leaf.shape, value)}; use jax.vmap for a batch"
            )

    def _before_noise(self, value: Value) -> PyTree:
        # For shapes and dtypes: the draw rounds integers to the grid as they are.
        return value.astype(jnp.result_type(float))

    @property
    def _charged(self) -> int:
        """The scales of a query's noise that the sensitivity is charged for positive answers."""
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
            # Negative answers cost nothing, so neither do the tables of their noise.
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
            key: a key from `dpjax.random.secure_key`, used for nothing else. An open ledger claims
                it, and pays for all answers to come.

        Returns:
            A `SparseVectorState`, for `step`. Keep it secret.

        Raises:
            TypeError: if the key is not a typed key, or a ledger is open inside `jit` or `vmap`.
            ValueError: if a ledger knows the key; if the sensitivity was sampled, since nothing is
                known then of queries that are chosen by answers.
            BudgetExceededError: if an open `dpjax.Ledger` has too little left.
        """
        check_key(key)
        if self.sensitivity.identity is not None:
            raise ValueError(
                "sensitivity must be a global bound for queries that come one by one: a sampled one"
                " speaks of those that were sampled, fixed in advance"
            )
        prepared(self)  # Refuses a batch.
        self._check_value(jax.ShapeDtypeStruct((1,), jnp.result_type(float)))
        return pay_and_draw(
            lambda: _start(self, key),
            key,
            self,
            guarantee=guarantee_under(key, self.guarantee),
            what=type(self).__name__,
        ).value

    def step(self, state: SparseVectorState, query: PyTree) -> tuple[SparseVectorState, jax.Array]:
        """Answers one query, which may be chosen by the answers before it.

        A state serves one query: go on with the one that is returned.

        Args:
            state: of `start`, or of the step before.
            query: its answer on the private database, a real scalar that one record moves by the
                sensitivity at most. NaN counts as 0.

        Returns:
            The next state, and whether the query is above the threshold: False for good once as
            many as `positives` were, and where a traced parameter was bad.

        Raises:
            TypeError: if the query is not a real number.
            ValueError: if it is not a scalar, or `vmap` maps over queries and not over states.
        """
        answer = _checks.real_arrays("query", query)
        if not jax.tree_util.all_leaves([answer]) or answer.shape != ():
            raise ValueError(f"query must be a scalar, got {_checks.described(answer)}")
        with jax.debug_nans(False), jax.debug_infs(False):
            return _step(self, state, answer)

    def clamped(self, value: Value) -> Value:
        """Answers as they are compared: NaN as 0, and numbers out of `range` as its nearer end.

        Args:
            value: an array of queries' answers.

        Returns:
            An array of the same shape, as private as the value.
        """
        answers = _checks.real_arrays("value", value)
        if not jnp.issubdtype(answers.dtype, jnp.floating):
            return answers
        high = jnp.asarray(self.range()[1]).astype(answers.dtype)
        high = jnp.minimum(high, float(jnp.finfo(answers.dtype).max))
        return jnp.clip(jnp.where(jnp.isnan(answers), 0, answers), -high, high)

    def range(self) -> tuple[Scalar, Scalar]:
        """Between which answers nothing is clamped: 2^61 steps of the grid, 10^13 sensitivities."""
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
        # Nothing after the last positive answer is compared.
        last = jnp.where(places[-1] < count, places[-1], count)
        asked = jnp.arange(count) <= last
        nodes, log_weights = _threshold_rule(dtype)
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
        """The distance from the threshold at which a comparison is right, at a confidence.

        For each query that is compared; simultaneous: for the first K of them at once.

        Args:
            confidence: in (0, 1).
            shape: (K,), the number of queries; it, or `like`, is needed where simultaneous.
            like: instead of a shape, an array or `jax.ShapeDtypeStruct` of answers.
            simultaneous: for all queries at once.

        Returns:
            A scalar in the units of the answers; it covers the rounding to the grid.
        """
        if simultaneous and not shape and like is None:
            raise ValueError("shape must be (K,), the number of queries, got ()")
        arrays, _ = self._asked(shape or (1,) if like is None else shape, like)
        tail = (1 - _checks.fraction("confidence", confidence)) / 2
        queries = arrays.size if simultaneous else 1
        noise = self._noise()
        # One half of the tail for the threshold's noise, the other for that of the queries.
        line = noise.threshold.scale * -math.log(tail)
        # Query, threshold and their noise are each rounded by half a step.
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
    """The sparse vector technique: which queries are above a threshold, for the price of c of them.

    Compares q_i + nu_i >= T + rho for one query after the other, until c of them were above: rho is
    drawn once, nu_i for every query. However many are below, they cost nothing. Laplace noise of
    scales Delta / epsilon_1 and 2 c Delta / epsilon_2, with epsilon_2 = (2c)^(2/3) epsilon_1, the
    split that makes their difference smallest; for monotone queries c instead of 2c.

    Only places are released. For c numbers spend another epsilon on them:
    `dpjax.laplace(c * Delta, other)` of `queries[release.value]` (Algorithm 7). Publishing
    q_i + nu_i instead gives the threshold's noise away.

    Args:
        sensitivity: a `Sensitivity` of the queries in the norm "linf", or a number, taken as a
            global bound in it.
        epsilon: finite, above 0; of all answers together.
        threshold: T, a public number in the units of the queries. For a threshold of its own for
            each query let the target subtract them.
        positives: c, how many positive answers are given, at least 1.
        monotone: your promise that replacing one record moves no two queries in opposite
            directions. Counts do under add-or-remove-one; under replace-one counts of x > t for
            several t do, but not counts in several bins.

    Returns:
        An `AboveThreshold`: `mechanism(key, queries)` takes answers of shape (K,) and releases the
        first c places above, int32 of shape (c,), K where there are no more. Queries that are
        chosen by the answers before: `state = mechanism.start(key)`, then
        `state, above = mechanism.step(state, query)`.

    Raises:
        TypeError: if a parameter is not of its kind.
        ValueError: if a number is out of range or the sensitivity's norm is not linf; at a release,
            if the queries are not one array of shape (K,).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP where
        the sensitivity is a global bound. Holds for the integers that are drawn. On a grid of
        step g a query moves by at most d = ceil(Delta / g) steps, and integer noise M of scale b
        steps has P(M = k) <= e^(|s| / b) P(M = k + s). Fix an output, and let rho be d steps higher
        on the neighbor, for e^(d / b_1). Each negative answer is then at least as likely as it was,
        at no charge; each of the c positive ones needs a nu_i that is at most 2 d steps higher, for
        e^(2 d / b_2). If no query falls, and none rises more than d, d is enough; if none rises,
        rho stays and d is enough. What comes after the c-th is not looked at. The scales cover
        d g <= Delta + g and the tables of the 1 + c noises that are charged. All K comparisons are
        made, so the time does not tell where the last one was.

        Published variants without one of these are not private, however large epsilon (Lyu, Su and
        Li, section 3): no noise on queries, no limit on positive answers, or q_i + nu_i released
        along with them; noise on queries that does not grow with c costs (1 + 6c) / 4 epsilon. One
        noise for all queries makes answers exact relative to each other.

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
            "sensitivity must be above 0, got one that may be 0: compare without noise"
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
    line = noisy_units(mechanism.threshold, lattice_noise(first, ()), noise.threshold)
    remaining = jnp.where(noise.is_usable, mechanism.positives, 0).astype(jnp.int32)
    return SparseVectorState(rest, line, remaining)


@jax.jit
def _step(
    mechanism: AboveThreshold, state: SparseVectorState, query: jax.Array
) -> tuple[SparseVectorState, jax.Array]:
    now, later = jax.random.split(key_for_each(state.key, query))
    noisy = noisy_units(query, lattice_noise(now, ()), mechanism._noise().numbers)
    above = ~_limbs.less(noisy, state.noisy_threshold) & (state.remaining > 0)
    remaining = state.remaining - above.astype(jnp.int32)
    return SparseVectorState(later, state.noisy_threshold, remaining), above


@functools.lru_cache
def _half_rule() -> tuple[np.ndarray, np.ndarray]:
    """Nodes above 0, and log weights for the density of standard Laplace noise."""
    nodes, log_weights = legendre_rule(_NODES)
    ends = _REACH * np.linspace(0, 1, _PANELS + 1) ** 2
    half = np.diff(ends)[:, None] / 2
    points = ends[:-1, None] + half * (nodes + 1)[None, :]
    return points.ravel(), (log_weights[None, :] + np.log(half) - points).ravel() - math.log(2)


def _threshold_rule(dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    points, log_weights = _half_rule()
    nodes = jnp.asarray(np.concatenate([-points[::-1], points]), dtype)
    return nodes, jnp.asarray(np.concatenate([log_weights[::-1], log_weights]), dtype)


def _selected_sum(selected: jax.Array, terms: jax.Array) -> jax.Array:
    """The sum of some rows: as a product, which takes less memory for a batch of selections."""
    return jnp.dot(selected.astype(terms.dtype), terms, precision="highest")
