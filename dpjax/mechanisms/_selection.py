"""Private selection of an option with a high score: exponential mechanism and permute-and-flip."""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._accuracy import UNKNOWN, Accuracy
from dpjax._core._losses import LogPmf, PairLoss
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import NoiseKind, Scalar, Sensitivity
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax.mechanisms._noisy_arrays import ArrayOrShape, OnGrid, as_number, whole
from dpjax.mechanisms._start import begin, check_noise, check_one_array
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import EXPONENTIAL, Lattice
from dpjax.random._release import shares_programs, usable_scale
from dpjax.random._selected_index import (
    clamped_scores,
    exponential_index,
    float_index,
    largest_gap,
    permute_and_flip_index,
    remaining_scores,
    score_gaps,
    without_weight,
)
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.sensitivity._norms import grid_dtype, rounding_norm


@dataclasses.dataclass(frozen=True)
class SelectionRule:
    """A rule of selection: functions that draw an index and compute log probabilities.

    Attributes:
        draw: `draw(key, scores, calibration)` draws an index. An optional fourth argument gives log
            weights.
        draw_in_floats: like `draw`, but with noise in floats.
        log_pmf: maps scores / temperature, shape (K,), to log probabilities, shape (K,).
        bounded_range: whether the privacy losses of all options, on any pair of neighbors, lie in
            an interval of length epsilon.

    Formal guarantees:
        None of its own.
    """

    draw: Callable[..., jax.Array]
    draw_in_floats: Callable[..., jax.Array]
    log_pmf: LogPmf
    bounded_range: bool = False


def sum_of_group_maxima(difference: jax.Array) -> jax.Array:
    """A norm of scores in groups: the sum over groups of the largest magnitude in a group.

    Args:
        difference: the difference of two values, floats with a leading axis of groups.

    Returns:
        A scalar.

    Raises:
        TypeError: if the difference is not an array.

    Formal guarantees:
        If options are selected in several groups, the total privacy loss is proportional to this
        norm, not to the number of groups. A group whose scores do not change costs nothing.

    Source:
        The argument above.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> float(queries.sum_of_group_maxima(jnp.array([[0.0, -2.0], [0.0, 0.0], [1.0, 1.0]])))
        3.0
    """
    largest = jnp.max(jnp.abs(difference), axis=range(1, difference.ndim), initial=0)
    return jnp.sum(largest)


@frozen_pytree
class SelectionMechanism(OnGrid, SensitivityMechanism):
    """Selects a response by its score; made by `exponential` or `permute_and_flip`.

    Attributes:
        sensitivity: the sensitivity of the scores, norm "linf" or "range".
        epsilon: the epsilon of the guarantee.
        rule: the rule of selection.
        exact: whether the noise is exact. Noise in floats has no guarantee.
        log_base: log weights of the responses; None for equal weights.
        count: the number of selections, each at epsilon / count. With groups, the number of
            selections in one group.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    rule: SelectionRule = static()
    exact: bool = static(default=True)
    log_base: tuple[float, ...] | None = static(default=None)
    count: int = static(default=1)
    _is_single: ClassVar[bool] = True

    @property
    def _by_group(self) -> bool:
        return self.norm is sum_of_group_maxima

    _scale_name = "2 sensitivity / epsilon"

    @property
    def _most_range(self) -> Scalar:
        """Bounds how much one record changes the difference between two scores."""
        return self.sensitivity.value * (1 if self.norm == "range" else 2)

    @property
    def zcdp(self) -> tuple[float, float]:
        """For the exponential mechanism, rho = epsilon^2 / 8 and delta = 0, by its bounded range.

        Dong, Durfee and Rogers (2020); Cesar and Rogers (2021).
        """
        # The privacy loss of each of `count` selections lies in an interval of length epsilon /
        # count. So the squared lengths add up to epsilon^2 / count. With groups, a record may
        # change two groups. If their intervals have lengths a and b, then a + b <= epsilon / count,
        # so the sum of squares is no larger.
        rho, delta = super().zcdp
        return (rho / 4 if self.rule.bounded_range else rho) / self.count, delta

    @property
    def _lattice(self) -> Lattice | None:
        return EXPONENTIAL if self.exact else None

    def _check_structure(self, value: Value) -> None:
        check_one_array(value, "scores over the response set, shape (K,)")
        if self.log_base is not None and value.size != len(self.log_base):
            raise ValueError(
                f"value must have one score for each of the {len(self.log_base)} weights of"
                f" log_base, got {value.size}"
            )

    def _calibration(self, arrays: PyTree) -> Calibration:
        return Calibration(
            self._most_range / self.epsilon * self.count,
            self.sensitivity.value,
            self.epsilon / self.count,
            self._rounding(arrays),
            # How many times the proof charges the error of the noise tables. Without groups, this
            # is once for each of the two neighbors. With groups, it is twice for each of them,
            # because a replaced record changes two groups.
            4 if self._by_group else 2,
            self.sensitivity.zero_allowed,
            grid_dtype(arrays),
        )

    def _rounding(self, arrays: PyTree) -> Scalar:
        # The norm `sum_of_group_maxima` of a vector of ones is the number of groups.
        if self._by_group:
            return float(len(arrays) * is_float(arrays))
        return rounding_norm(self.norm, arrays)

    def _in_pieces(self, value: TreeSpec) -> Callable[[Key, Value], Value] | None:
        if self._is_single or not shares_programs(value.tree()):
            return None
        return jax.tree.map(jnp.asarray, self)._draw

    def _accuracy(self, value: Value) -> Accuracy:
        if self._is_single:
            return UNKNOWN
        scale, step = self.effective_scale(like=value), self.grid_for(like=value)
        facts = {"scale": float(scale), "step": float(step), "whole": not is_float(value)}
        return Accuracy.of("selections", {**facts, "rows": self.count, "options": value.shape[-1]})

    def _draw(self, key: Key, value: Value) -> jax.Array:
        draw = self.rule.draw if self.exact else self.rule.draw_in_floats
        base = () if self.log_base is None else (self.log_base,)
        return draw(key, value, self._calibration(value), *base)

    def range(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        *,
        like: PyTree = None,
    ) -> tuple[Scalar, Scalar]:
        """The range to which gaps from the best score are clamped.

        The largest gap is about 2^18 scales. A response with this gap is never selected. Scores
        themselves are not clamped, except that infinity becomes the largest float.

        Args:
            shape: the shape of the scores; the range does not depend on it.
            dtype: the dtype of the scores; by default JAX's default float.
            like: instead of both, an array or `jax.ShapeDtypeStruct` of scores.

        Returns:
            0 and the largest gap, in the units of the scores.
        """
        scores, calibration = self._asked(shape, like, dtype)
        return 0.0, as_number(self._largest_gap(scores, calibration))

    def pair_loss(self, value: Value) -> PairLoss:
        lattice = self._lattice
        if lattice is None or self.sensitivity.zero_allowed or not self._is_single:
            return super().pair_loss(value)  # The loss of several selections is not implemented.
        scores, calibration = self._asked(None, value)
        scale = float(self._scale_drawn(scores, calibration))
        step = float(self._spacing(scores, calibration)) if is_float(scores) else 0.0
        return PairLoss(
            "range" if self.rule.bounded_range else "pure",
            # Adding the same number to all scores does not change the probabilities. So the loss
            # depends on the range of the changes.
            lambda moved: _range_at_most(moved, exact=is_float(scores)) / scale,
            float(self.epsilon),
            2 * step / scale,
            float(calibration.coordinates) * lattice.certificate.loss,
            0.0,
            lambda scores: (scores, -scores if is_float(scores) else ~scores),
            logits=lambda arrays: self._logits(arrays[0], calibration),
            log_pmf=self.rule.log_pmf,
            options=scores.size,
        )

    def _largest_gap(self, scores: ArrayOrShape, calibration: Calibration) -> jax.Array:
        dtype = compute_dtype(scores.dtype)
        if not self.exact or calibration.zero_allowed:
            return jnp.asarray(jnp.finfo(dtype).max, dtype)
        return largest_gap(calibration.fit(EXPONENTIAL, scores.dtype), dtype)

    def clamped(self, value: Value) -> Value:
        """The scores after clamping: infinity becomes the largest float, and NaN the lowest score.

        Integers do not change.

        Args:
            value: an array of scores.

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        scores = _checks.real_arrays("value", value)
        return clamped_scores(scores) if is_float(scores) else scores

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        scores = self._checked(value)
        logits = self._logits(scores, self._calibration(scores))
        return log_prob_of_index(self.rule.log_pmf(logits), jnp.asarray(output))

    def _logits(self, scores: jax.Array, calibration: Calibration) -> jax.Array:
        """Returns log(weight / largest weight) - (best score - score) / scale for each response.

        The scale is the one with which responses are drawn: it is enlarged to cover rounding.
        """
        # Only responses with a positive weight count for the best score.
        gaps = score_gaps(remaining_scores(scores, without_weight(self.log_base)))
        gaps = jnp.minimum(gaps, self._largest_gap(scores, calibration).astype(gaps.dtype))
        logits = -gaps / usable_scale(self._scale_drawn(scores, calibration), gaps.dtype)
        if self.log_base is None:
            return logits
        return logits + jnp.asarray(np.subtract(self.log_base, max(self.log_base)), gaps.dtype)

    def score_gap(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> Scalar:
        """A bound on the gap between the best score and the score of the selected response.

        A response with gap g is selected with probability at most exp(-epsilon g / (2 Delta)). With
        weights, this probability may be larger by the factor (largest weight) / (smallest weight).
        If `simultaneous`, the selected response has a gap within the bound with probability at
        least `confidence`. Otherwise the confidence is for each response alone: a response with a
        gap beyond the bound is selected with probability at most 1 - `confidence`.

        Args:
            confidence: in (0, 1).
            shape: (K,), for K responses. Simultaneous bounds need `shape` or `like`.
            like: instead of a shape, an array or `jax.ShapeDtypeStruct` of scores.
            simultaneous: whether the confidence is for all responses together, instead of for each
                response.

        Returns:
            A scalar in the units of the scores, including the error of rounding scores to the grid.
        """
        if simultaneous and not shape and like is None:
            raise ValueError("shape must be (K,), the number of responses, got ()")
        scores, calibration = self._asked(shape, like)
        tail = 1 - _checks.fraction("confidence", confidence)
        responses = self._responses(scores) if simultaneous else 1
        weights = 0.0 if self.log_base is None else max(self.log_base) - min(self.log_base)
        gap = self._scale_drawn(scores, calibration) * (math.log(responses / tail) + weights)
        # A gap is the difference of two scores, each of which is rounded by at most half a step.
        return gap + self._spacing(scores, calibration) if is_float(scores) else whole(gap)

    def _responses(self, scores: jax.ShapeDtypeStruct) -> int:
        """Returns the total number of options in all selections."""
        return scores.size


def _range_at_most(moved: tuple[jax.Array, jax.Array], *, exact: bool) -> jax.Array:
    """Bounds the range of a difference, which is its maximum minus its minimum.

    Args:
        moved: the difference of two arrays of scores, and the difference of their negatives.
        exact: True for scores that are floats: `PairLoss.rounding` covers their rounding error.
            False for integers: their differences are cast to float32, and this function adds the
            error of the cast.
    """
    upper, lower = map(jnp.max, moved)
    largest, eps = jnp.maximum(upper, lower), float(jnp.finfo(jnp.float32).eps)
    hidden = jnp.where(largest < 1 / eps, 0, 2 * eps * largest)
    return upper + lower if exact else upper + lower + hidden


def log_prob_of_index(log_pmf: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the log probability of an index; -inf if the index is out of range."""
    possible = (index >= 0) & (index < log_pmf.size)
    return jnp.where(possible, log_pmf[jnp.clip(index, 0, log_pmf.size - 1)], -jnp.inf)


def select_by(
    rule: SelectionRule,
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    noise: NoiseKind,
    log_base: ArrayLike | None,
) -> SelectionMechanism:
    """Makes the selection mechanism of a rule, after checking the arguments."""
    exact = check_noise(noise)
    norm = "range" if getattr(sensitivity, "norm", "linf") == "range" else "linf"
    sensitivity, epsilon = begin(norm, sensitivity, epsilon)
    base = None if log_base is None else log_weights("log_base", log_base)
    return SelectionMechanism(sensitivity, epsilon, rule, exact, base)


def log_weights(name: str, weights: ArrayLike) -> tuple[float, ...]:
    """Checks public log weights of all responses, at least one of which must be above -inf."""
    if _checks.is_traced(weights):
        raise TypeError(
            f"{name} must be known when the mechanism is made, got a traced array: make the"
            " mechanism outside of jit and vmap"
        )
    found = _checks.host_numbers(name, weights).astype(np.float64)
    if found.ndim != 1 or not found.size or np.isnan(found).any() or not found.max() < math.inf:
        raise ValueError(f"{name} must be log weights of shape (K,), got {_checks.shown(weights)}")
    if found.max() == -math.inf:
        raise ValueError(f"{name} must be above -inf for at least one response, got only -inf")
    return tuple(found.tolist())


EXPONENTIAL_RULE = SelectionRule(
    bounded_range=True,
    draw=exponential_index,
    draw_in_floats=partial(float_index, flip=False),
    log_pmf=jax.nn.log_softmax,
)


def exponential(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    noise: NoiseKind = "exact",
    log_base: ArrayLike | None = None,
) -> SelectionMechanism:
    """The exponential mechanism: selects r with probability ~ exp(epsilon score_r / (2 Delta)).

    The implementation uses rejection sampling: a uniformly random r is accepted with probability
    exp(epsilon (score_r - best) / (2 Delta)), otherwise another r is drawn. So the running time
    depends slightly on the scores. `permute_and_flip` has the same guarantee, and its running time
    does not depend on the scores. Its expected gap between the best score and the selected score is
    never larger.

    Args:
        sensitivity: a `Sensitivity` of the scores in the norm "linf", or a number, taken as a
            global bound in this norm. The norm may also be "range": the largest change of a score
            minus the smallest change, which is at most twice the norm "linf". With "range", the
            exponent is epsilon score / Delta, without the 2.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.
        log_base: shape (K,), public logarithms of weights, which multiply the probabilities before
            they are normalized; -inf for a response that is never selected.

    Returns:
        A `SelectionMechanism`: `mechanism(key, scores)` takes scores of shape (K,) and releases an
        index, int32. NaN counts as the lowest score.

    Raises:
        TypeError: if epsilon or the sensitivity is not a number.
        ValueError: if epsilon or the sensitivity is not positive and finite, the sensitivity has
            another norm, or log_base does not consist of log weights; at a release, if the scores
            are not one array of shape (K,).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation; epsilon-DP if
        the sensitivity is a global bound. The guarantee holds for the integers that are actually
        drawn, given uniform random bits. `effective_scale` covers the rounding of float scores.
        noise="float" has no guarantee. docs/proofs/posterior-sampler.md has the proofs for the norm
        "range" and for weights.

    Source:
        McSherry and Talwar (2007); Rubinstein and Aldà (2017), Corollary 13.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.exponential(1.0, epsilon=1.0)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.array([1000.0, 5.0, 0.0]))
        >>> int(release.value)
        0
    """
    return select_by(EXPONENTIAL_RULE, sensitivity, epsilon, noise, log_base)


_NODES = 12  # The number of nodes in each interval between two powers of two.


@lru_cache
def _rule(options: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three arrays: the nodes t of a quadrature rule, the numbers 1 - t, and the weights.

    The rule gives the integral in `_log_pmf` with a relative error below 2^-40, see
    docs/proofs/privacy-profile.md.
    """
    halvings = (options - 1).bit_length()
    # The integrand is a polynomial of degree options - 1, so Gauss-Legendre quadrature with
    # options / 2 nodes is exact.
    ends, count = np.array([0.0, 1.0]), -(-options // 2)
    if count > _NODES * (1 + halvings):
        ends, count = np.append(0.0, 0.5 ** np.arange(halvings, -1, -1)), _NODES
    nodes, weights = scipy.special.roots_legendre(count)
    half = np.diff(ends)[:, None] / 2
    from_0 = ends[:-1, None] + half * (1 + nodes)
    # Computing 1 - `from_0` would lose digits near t = 1.
    to_1 = 1 - ends[1:, None] + half * (1 - nodes)
    return from_0.ravel(), to_1.ravel(), (half * weights).ravel()


def _log_pmf(logits: jax.Array) -> jax.Array:
    """Returns log(p_i integral_0^1 prod_{j != i} (1 - t p_j) dt), with p_j = exp(logit_j).

    No subtraction cancels: in float32 the relative error for K options is at most K * 2^-21.
    """
    logits = logits - jnp.max(logits)
    absent = 1 - jnp.minimum(jnp.exp(logits), 1)

    # The scan processes one node at a time. All nodes at once would need too much memory in a
    # batch.
    def add(total: jax.Array, node: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        t, rest, weight = node
        factors = rest + t * absent
        return total + weight * jnp.prod(factors) / factors, None

    rule = tuple(jnp.asarray(x, logits.dtype) for x in _rule(logits.size))
    # The initial zeros are `0 * absent`, because under `shard_map` the initial carry of a loop must
    # vary over the same devices as the final carry.
    total, _ = lax.scan(add, 0 * absent, rule)
    return logits + jnp.log(total)


PERMUTE_AND_FLIP_RULE = SelectionRule(
    draw=permute_and_flip_index,
    draw_in_floats=partial(float_index, flip=True),
    log_pmf=_log_pmf,
)


def permute_and_flip(
    sensitivity: Sensitivity | float,
    epsilon: Scalar,
    *,
    noise: NoiseKind = "exact",
    log_base: ArrayLike | None = None,
) -> SelectionMechanism:
    """Permute-and-flip: visits responses in random order, and selects r with probability p_r.

    Here p_r = exp(epsilon (score_r - best) / (2 Delta)). The implementation adds exponential noise
    to epsilon score_r / (2 Delta), and selects the response with the largest sum. The distribution
    of the selected response is the same. The expected gap between the best score and the selected
    score is at most as large as for the exponential mechanism, and can be half as large.

    Args:
        sensitivity: as for `exponential`.
        epsilon: finite, above 0.
        noise: "exact", or "float" for sweeps where nothing is published.
        log_base: as for `exponential`. The log weights are multiplied by 2 Delta / epsilon and
            added to the scores.

    Returns:
        A `SelectionMechanism`, as from `exponential`.

    Raises:
        TypeError: as for `exponential`.
        ValueError: as for `exponential`.

    Formal guarantees:
        Those of `exponential`.

    Source:
        McKenna and Sheldon (2020), Theorem 1; Ding et al. (2021) for report-noisy-max.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.permute_and_flip(1.0, epsilon=1.0)
        >>> release = mechanism(dpjax.random.seeded_key(0), jnp.array([1000.0, 5.0, 0.0]))
        >>> int(release.value)
        0
    """
    return select_by(PERMUTE_AND_FLIP_RULE, sensitivity, epsilon, noise, log_base)
