"""Several selections at once: one option from each row of scores, or the top k options."""

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Key, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax.mechanisms._selection import (
    EXPONENTIAL_RULE,
    SelectionMechanism,
    log_prob_of_index,
    sum_of_group_maxima,
)
from dpjax.mechanisms._start import begin, check_one_array
from dpjax.random._selected_index import indices_of_rows, peeled_indices, remaining_scores


@frozen_pytree
class SeveralSelections(SelectionMechanism):
    """Selects one option for each row of scores; made by `select_each`.

    The attributes are those of `SelectionMechanism`; the norm may also be `sum_of_group_maxima`.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    _is_single = False
    _scale_name = "2 count sensitivity / epsilon"

    def _check_structure(self, value: Value) -> None:
        shape = f"(groups, {self.count}, K)" if self._by_group else f"({self.count}, K)"
        check_one_array(value, f"scores, shape {shape}", 3 if self._by_group else 2)
        if value.shape[-2] != self.count:
            raise ValueError(f"value must be of shape {shape}, got {value.shape}")

    def _draw(self, key: Key, value: Value) -> jax.Array:
        rows = value.reshape(-1, value.shape[-1])
        return indices_of_rows(key, rows, self._calibration(value)).reshape(value.shape[:-1])

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        return _log_prob_of_rows(self, output, value)


def select_each(
    sensitivity: Sensitivity | float, epsilon: Scalar, *, count: int
) -> SeveralSelections:
    """Selects an option from each row of scores by the exponential mechanism, for one epsilon.

    Args:
        sensitivity: a `Sensitivity` of all scores in the norm "linf" or "range", or a number, taken
            as a global bound in linf. For groups of rows, a `Sensitivity` in the norm
            `sum_of_group_maxima`.
        epsilon: the epsilon of all selections together; finite, above 0. Each selection spends
            epsilon / count.
        count: number of rows, at least 1; with groups, the number of rows of one group.

    Returns:
        A `SeveralSelections`: `mechanism(key, scores)` takes scores of shape (count, K) and
        releases indices of shape (count,), int32, drawn independently. NaN counts as the lowest
        score. `mechanism.score_gap(shape=(count, K), simultaneous=True)` bounds, with probability
        .95, how far every selected score is below the best score of its row. With groups, scores
        and indices have a leading axis of groups.

    Raises:
        TypeError: as for `dpjax.exponential`.
        ValueError: as for `dpjax.exponential`, but scores have shape (count, K).

    Formal guarantees:
        (epsilon, 0, gamma)-random DP under the sensitivity's neighboring relation, by basic
        composition of `dpjax.exponential`. The privacy loss of each selection has a bounded range,
        so all selections together are epsilon^2 / (8 count)-zCDP (`mechanism.zcdp`). So for many
        selections and a delta above 0, `dpjax.accounting.compose_at` by "zcdp" computes a smaller
        epsilon. The guarantee is exact given uniform random bits. With groups, the privacy loss of
        a selection is proportional to the change of its group's scores. `sum_of_group_maxima` adds
        up these changes, so groups that do not change cost nothing.

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
    """Returns the norm of a sensitivity.

    The result is "linf" for a number, and for a sensitivity in a norm that selections do not
    accept.
    """
    found: Norm = getattr(sensitivity, "norm", "linf")
    return found if found in ("range", sum_of_group_maxima) else "linf"


@frozen_pytree
class TopK(SelectionMechanism):
    """Selects k options by their scores, without replacement; made by `top_k`.

    It has the attributes of `SelectionMechanism`, and `count` is k. The norm may also be
    `sum_of_group_maxima`.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    _is_single = False
    _scale_name = "2 count sensitivity / epsilon"

    def _check_structure(self, value: Value) -> None:
        if self._by_group:
            check_one_array(value, "scores, shape (groups, K)", 2)
        else:
            super()._check_structure(value)
        if value.shape[-1] < self.count:
            raise ValueError(
                f"value must hold at least k={self.count} scores, got {value.shape[-1]}"
            )

    def _draw(self, key: Key, value: Value) -> jax.Array:
        calibration = self._calibration(value)
        if not self._by_group:
            return peeled_indices(key, value, calibration, self.count)
        keys = jax.random.split(key, len(value))
        return jax.vmap(peeled_indices, (0, 0, None, None))(keys, value, calibration, self.count)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        return _log_prob_of_rows(self, output, value)

    def _responses(self, scores: jax.ShapeDtypeStruct) -> int:
        return self.count * scores.size


def _log_prob_of_rows(mechanism: SelectionMechanism, output: Value, value: Value) -> jax.Array:
    """Returns the log probability that the options are selected in this order, in each row."""
    scores = mechanism._checked(value)
    calibration = mechanism._calibration(scores)

    def of_row(selected: jax.Array, row: jax.Array) -> jax.Array:
        def peel(taken: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = mechanism._logits(remaining_scores(row, taken), calibration)
            log_pmf = mechanism.rule.log_pmf(jnp.where(taken, -jnp.inf, logits))
            return taken.at[index].set(True), log_prob_of_index(log_pmf, index)

        return jnp.sum(lax.scan(peel, jnp.zeros(row.shape, bool), selected)[1])

    rows = scores.reshape(-1, scores.shape[-1])
    selected = _checks.real_arrays("output", output).reshape(len(rows), -1)
    return jnp.sum(jax.vmap(of_row)(selected, rows))


def top_k(sensitivity: Sensitivity | float, epsilon: Scalar, *, k: int) -> TopK:
    """The k options with the largest noisy scores, in order (one-shot Gumbel top-k).

    Options are selected one after the other. Among the options that are left, option i is selected
    with probability proportional to exp(epsilon score_i / (2 k Delta)). Selecting the k largest
    scores with Gumbel noise of scale 2 k Delta / epsilon has the same distribution
    (docs/proofs/shorter.md). But Gumbel noise in floats or from tables has ties, which change the
    distribution. So the implementation draws k exact selections.

    Args:
        sensitivity: a `Sensitivity` of the scores in the norm "linf" or "range", or a number, taken
            as a global bound in linf under replace-one. If a record changes all scores in the same
            direction, as it changes counts under add-or-remove-one, the norm "range" halves the
            noise. For groups of scores, shape (groups, K), the norm is `sum_of_group_maxima`.
        epsilon: the epsilon of all k selections together; finite, above 0.
        k: at least 1, at most the number of scores.

    Returns:
        A `TopK`: `mechanism(key, scores)` takes scores of shape (K,) and releases indices of shape
        (k,), int32, all different; with groups, the shape is (groups, k). NaN counts as the lowest
        score. `mechanism.score_gap(shape=(K,), simultaneous=True)` bounds, with probability .95,
        how far the score of any selected option is below the true k-th best score.

    Raises:
        TypeError: as for `dpjax.exponential`.
        ValueError: as for `dpjax.exponential`, or if there are fewer than k scores.

    Formal guarantees:
        As for `dpjax.queries.select_each` with count=k: (epsilon, 0, gamma)-random DP by basic
        composition, and epsilon^2 / (8 k)-zCDP. Both are exact given uniform random bits.

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
