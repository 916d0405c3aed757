"""Several selections that share an epsilon: one in each row of scores, or the k best options."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._pair_loss import PairLoss
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax.mechanisms._noisy_arrays import LatticeMechanism
from dpjax.mechanisms._selection import EXPONENTIAL_RULE, SelectionMechanism, log_prob_of_index
from dpjax.mechanisms._start import begin
from dpjax.random._facade import (
    Calibration,
    indices_of_rows,
    peeled_indices,
    remaining_scores,
    shares_programs,
)
from dpjax.sensitivity._norms import is_float


def sum_of_group_maxima(difference: jax.Array) -> jax.Array:
    """The largest magnitude in each group along the leading axis, added up: a norm of scores.

    Args:
        difference: of two values, floats with a leading axis of groups.

    Returns:
        A scalar.

    Raises:
        TypeError: if the difference is not an array.

    Formal guarantees:
        Selections in disjoint groups cost what it measures, and not the number of groups: a group
        whose scores do not move costs nothing.

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
class SeveralSelections(SelectionMechanism):
    """Selects an option of each row by its score; made by `select_each`.

    Attributes:
        count: number of selections, each at epsilon / count; by group, in each of them. Others are
            as in `SelectionMechanism`, where the norm may also be `sum_of_group_maxima`.

    Formal guarantees:
        Those of the factory that made it.
    """

    count: int = static(default=1)

    _scale_name = "2 count sensitivity / epsilon"

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity: "linf", "range", or `sum_of_group_maxima`."""
        return self.sensitivity.norm

    @property
    def _by_group(self) -> bool:
        return self.norm is sum_of_group_maxima

    @property
    def zcdp(self) -> tuple[float, float]:
        """epsilon^2 / (8 count) and 0: each selection has a bounded range of epsilon / count."""
        # By group too: ranges of two groups add up to epsilon / count, so their squares to less.
        rho, delta = super().zcdp
        return rho / self.count, delta

    def _check_structure(self, value: Value) -> None:
        groups = 1 if self._by_group else 0
        one_array = jax.tree_util.all_leaves([value]) and value.ndim == groups + 2
        if not one_array or value.shape[groups] != self.count:
            shape = ", ".join(("groups",) * groups + (str(self.count), "K"))
            raise ValueError(
                f"value must be one array of scores, shape ({shape}), got"
                f" {jax.tree.map(lambda leaf: leaf.shape, value)}"
            )

    def _calibration(self, arrays: PyTree) -> Calibration:
        together = super()._calibration(arrays)
        return dataclasses.replace(
            together,
            scale=together.scale * self.count,
            epsilon=together.epsilon / self.count,
            # A replaced record changes two groups, and the tables are charged in both.
            coordinates=together.coordinates * (2 if self._by_group else 1),
        )

    def _rounding(self, arrays: PyTree) -> Scalar:
        if self._by_group:  # The norm of ones: in each group the largest is 1.
            return float(len(arrays) * is_float(arrays))
        return super()._rounding(arrays)

    def _compiles_in_pieces(self, value: Value) -> bool:
        return shares_programs(value)

    def _draw(self, key: Key, value: Value) -> jax.Array:
        rows = value.reshape(-1, value.shape[-1])
        return indices_of_rows(key, rows, self._calibration(value)).reshape(value.shape[:-1])

    def _accuracy(self, value: Value) -> Accuracy:
        scale, step = self.effective_scale(like=value), self.grid_for(like=value)
        facts = {"scale": float(scale), "step": float(step), "whole": not is_float(value)}
        return Accuracy.of("selections", {**facts, "rows": self.count, "options": value.shape[-1]})

    def pair_loss(self, value: Value) -> PairLoss:
        return LatticeMechanism.pair_loss(self, value)  # What several cost is not known.

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        scores = _checks.real_arrays("value", value)
        self._check_value(scores)

        def of_row(index: jax.Array, row: jax.Array) -> jax.Array:
            return log_prob_of_index(self.rule.log_pmf(self._logits(row)), index)

        outputs = _checks.real_arrays("output", output).ravel()
        return jax.vmap(of_row)(outputs, scores.reshape(-1, scores.shape[-1])).sum()


def select_each(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, count: int
) -> SeveralSelections:
    """The exponential mechanism in each of several rows of scores, for one epsilon.

    Args:
        sensitivity: a `Sensitivity` of all scores in the norm "linf" or "range", or a number, taken
            as a global bound in linf. In the norm `sum_of_group_maxima` it is that of scores by
            group.
        epsilon: of all selections together; finite, above 0. Each is made at epsilon / count.
        count: number of rows, at least 1; by group, the number of rows of one group.

    Returns:
        A `SeveralSelections`: `mechanism(key, scores)` takes scores of shape (count, K) and
        releases indices of shape (count,), int32, drawn independently. NaN counts as the lowest
        score. `mechanism.score_gap(shape=(count, K), simultaneous=True)` bounds the gap of every
        selected score to the best one of its row, with probability .95. By group, scores and
        indices have a leading axis of groups.

    Raises:
        TypeError: as for `dpjax.exponential`.
        ValueError: as for `dpjax.exponential`, but scores have shape (count, K).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation, by basic
        composition of `dpjax.exponential`. Each selection has a bounded range, so all together are
        epsilon^2 / (8 count)-zCDP (`mechanism.zcdp`). At a delta above 0,
        `dpjax.accounting.compose_at` by "zcdp" then finds less than epsilon for many selections.
        Exact given uniform bits. By group, a selection costs in proportion to how far the scores of
        its group move. `sum_of_group_maxima` adds that up, so the number of groups costs nothing.

    Source:
        McSherry and Talwar (2007); Dwork and Roth (2014), Theorem 3.16; Cesar and Rogers (2021).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.queries.select_each(1.0, epsilon=2.0, count=2)
        >>> scores = jnp.array([[1000, 5, 0], [0, 0, 1000]])
        >>> mechanism(dpjax.random.seeded_key(0), scores).value.tolist()
        [0, 2]
    """
    sensitivity, epsilon = begin(norm_of_scores(sensitivity), sensitivity, epsilon)
    count = _checks.integer("count", count, least=1)
    return SeveralSelections(sensitivity, epsilon, EXPONENTIAL_RULE, count=count)


def norm_of_scores(sensitivity: Sensitivity | float) -> Norm:
    """The norm that selections take a sensitivity in: "linf", if it is in none of the others."""
    found: Norm = getattr(sensitivity, "norm", "linf")
    return found if found in ("range", sum_of_group_maxima) else "linf"


@frozen_pytree
class TopK(SeveralSelections):
    """Selects k options by their scores, without replacement; made by `top_k`.

    The attributes are those of `SeveralSelections`, with k as its count.

    Formal guarantees:
        Those of the factory that made it.
    """

    def _check_structure(self, value: Value) -> None:
        if not self._by_group:
            SelectionMechanism._check_structure(self, value)
        elif not jax.tree_util.all_leaves([value]) or value.ndim != 2:
            raise ValueError(
                "value must be one array of scores, shape (groups, K), got"
                f" {jax.tree.map(lambda leaf: leaf.shape, value)}"
            )
        if value.shape[-1] < self.count:
            raise ValueError(
                f"value must hold at least k={self.count} scores, got {value.shape[-1]}"
            )

    def _draw(self, key: Key, value: Value) -> jax.Array:
        calibration = self._calibration(value)
        if not self._by_group:
            return peeled_indices(key, value, calibration, self.count)
        keys = jax.random.split(key, len(value))
        return jax.vmap(lambda one, scores: peeled_indices(one, scores, calibration, self.count))(
            keys, value
        )

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        scores = _checks.real_arrays("value", value)
        self._check_value(scores)
        outputs = _checks.real_arrays("output", output)
        if self._by_group:
            return jnp.sum(jax.vmap(self._log_prob_of_one)(outputs, scores))
        return self._log_prob_of_one(outputs, scores)

    def _log_prob_of_one(self, output: jax.Array, scores: jax.Array) -> jax.Array:
        def peel(taken: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = jnp.where(taken, -jnp.inf, self._logits(remaining_scores(scores, taken)))
            term = log_prob_of_index(self.rule.log_pmf(logits), index)
            return taken.at[index].set(True), term

        nothing = jnp.zeros(scores.shape, bool)
        _, terms = lax.scan(peel, nothing, output)
        return jnp.sum(terms)

    def _responses(self, scores: jax.ShapeDtypeStruct) -> int:
        return self.count * scores.size


def top_k(sensitivity: Sensitivity | float, epsilon: Scalar, *, k: int) -> TopK:
    """The k options with the largest scores, in order: a race with Gumbel noise.

    Option i is the j-th with probability ~ exp(epsilon score_i / (2 k Delta)) among those that are
    left. The k largest scores with Gumbel noise of scale 2 k Delta / epsilon, drawn once, have the
    same distribution (docs/proofs/shorter.md). Laplace noise would give another one, and need
    another proof. Ties of Gumbel noise from floats or tables would change it, too. So k exact
    selections are drawn, one after the other.

    Args:
        sensitivity: a `Sensitivity` of the scores in the norm "linf" or "range", or a number, taken
            as a global bound in linf under replace-one. Adding one number to all scores changes
            nothing, so "range" halves the noise where a record moves all scores the same way, as it
            does counts under add-or-remove-one. In the norm `sum_of_group_maxima` it is that of
            scores by group, (groups, K).
        epsilon: of all k together; finite, above 0.
        k: at least 1, at most the number of scores.

    Returns:
        A `TopK`: `mechanism(key, scores)` takes scores of shape (K,) and releases indices of shape
        (k,), int32, all different; by group, (groups, k). NaN counts as the lowest score.
        `mechanism.score_gap(shape=(K,), simultaneous=True)` bounds how far any of them may score
        below the true k-th best, with probability .95.

    Raises:
        TypeError: as for `dpjax.exponential`.
        ValueError: as for `dpjax.exponential`, or if there are fewer than k scores.

    Formal guarantees:
        Those of `dpjax.queries.select_each` with count=k: (epsilon, 0, gamma)-random DP by basic
        composition, and epsilon^2 / (8 k)-zCDP. Exact given uniform bits.

    Source:
        Durfee and Rogers (2019), Lemma 4.2, for one-shot Gumbel noise; McSherry and Talwar (2007).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.queries.top_k(1.0, epsilon=2.0, k=2)
        >>> births = jnp.array([3, 9000, 14, 5000])
        >>> mechanism(dpjax.random.seeded_key(0), births).value.tolist()
        [1, 3]
    """
    sensitivity, epsilon = begin(norm_of_scores(sensitivity), sensitivity, epsilon)
    k = _checks.integer("k", k, least=1)
    return TopK(sensitivity, epsilon, EXPONENTIAL_RULE, count=k)
