"""`shadow_models` trains on many random databases; `lira` and `rmia` attack the models."""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._records import record_arrays
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Release
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax.attacks._linear_queries import wrong_shape
from dpjax.attacks._membership_trials import many_runs, released_value
from dpjax.random._keys import check_sampling_key, sampling_key

ModelQuery = Callable[[Value, PyTree], jax.Array]


@frozen_pytree
class ShadowModels:
    """Scores of records by many models, each trained on some of the records.

    Attributes:
        scores: shape (models, records): the answer of every model about every record.
        members: shape (models, records): which records a model was trained on.
        population: shape (models, others): scores of records that no model was trained on; or None.

    Formal guarantees:
        For each model, a fair coin decides whether a record is in the model's database. The coins
        of different models are independent.
    """

    scores: jax.Array
    members: jax.Array
    population: jax.Array | None

    def __repr__(self) -> str:
        others = "" if self.population is None else f", population {self.population.shape}"
        return f"ShadowModels(scores {self.scores.shape}{others})"


def shadow_models(
    key: Key,
    train: Callable[[Key, Database], Release | Value],
    records: Database,
    *,
    query: ModelQuery,
    models: int,
    population: Database | None = None,
    chunk_size: int | None = None,
) -> ShadowModels:
    """Trains many models on random halves of some records, as one program.

    There are 2 n records. For each model and each position i, a fair coin puts record i or record
    n + i at position i of the model's database. So all databases have size n, as under replace-one.
    The coins of different models are independent, so `lira` and `rmia` may use all other models to
    attack one of them.

    Args:
        key: a typed key, of the chacha20 implementation if `train` requires it.
        train: a pure JAX function `train(key, database)` that returns a model: any pytree of
            arrays, or a `Release` of one, as `dpjax.privatize(target, mechanism)` does. To train
            without privacy, ignore the key: `lambda key, database: target(database)`.
        records: a pytree of arrays with leading axis 2 n.
        query: `query(model, record)`, a finite number: the attacker's score of a record, such as
            the `logit_confidence` of its label.
        models: the number of models, at least 1.
        population: more records, on which no model is trained, for `rmia`.
        chunk_size: models at a time; by default as many as fit in memory.

    Returns:
        The `ShadowModels`: scores, without the models.

    Raises:
        TypeError: if the key is not a typed key of a usable implementation, or train or query is
            not a function.
        ValueError: if the number of records is odd, a number is out of range, or query does not
            return a scalar.

    Formal guarantees:
        As for `ShadowModels`. The two records of a position are a pair of canaries. So under
        (epsilon, delta)-DP, and given all other models, `auditing.one_run_epsilon` bounds how well
        a model's coins can be guessed.

    Source:
        Shokri, Stronati, Song and Shmatikov (2017); Carlini, Chien, Nasr, Song, Terzis and Tramèr
        (2022), for halves of one set of records; Steinke, Nasr and Jagielski (2023) for pairs.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> found = dpjax.attacks.shadow_models(
        ...     dpjax.random.seeded_key(0),
        ...     lambda key, database: jnp.sum(database),
        ...     jnp.array([1.0, 10.0, 0.0, 0.0]),
        ...     query=lambda total, record: total,
        ...     models=100,
        ... )
        >>> found.scores.shape, sorted(set(found.scores[:, 0].tolist()))
        ((100, 4), [0.0, 1.0, 10.0, 11.0])
    """
    for name, function in (("train", train), ("query", query)):
        _checks.function(name, function)
    candidates, count = record_arrays("records", records, least=2)
    if count % 2:
        raise ValueError(
            "records must contain an even number of records, because a coin chooses one of every"
            f" two, got {count}"
        )
    others = () if population is None else (record_arrays("population", population)[0],)
    key_coins, key_models = jax.random.split(check_sampling_key(key))

    def run(
        index: jax.Array,
        key_coins: Key,
        key_models: Key,
        candidates: Database,
        others: tuple[Database, ...],
    ) -> tuple[jax.Array, list[jax.Array]]:
        first = jax.random.bernoulli(jax.random.fold_in(key_coins, index), 0.5, (count // 2,))
        database = jax.tree.map(functools.partial(_winners, first), candidates)
        model = released_value(train(jax.random.fold_in(key_models, index), database))
        # Only the answers are returned. If all models were returned, they might not fit in memory.
        answers = [_answers(query, model, asked) for asked in (candidates, *others)]
        return jnp.concatenate([first, ~first]), answers

    arguments = sampling_key(key_coins), key_models, candidates, others
    members, (scores, *rest) = many_runs(
        "models", run, arguments, count=models, chunk_size=chunk_size
    )
    return ShadowModels(scores, members, rest[0] if rest else None)


def logit_confidence(logits: jax.Array, label: jax.Array) -> jax.Array:
    """log(p / (1 - p)), where p is the probability of a label under the softmax of logits.

    It is nearly Gaussian over models, as `lira` assumes, and finite even if p rounds to 1.

    Args:
        logits: shape (..., classes).
        label: integers of shape (...): the true class.

    Returns:
        Shape (...).

    Raises:
        TypeError: if logits are not floats.
        ValueError: if there are fewer than two classes.

    Formal guarantees:
        None.

    Source:
        Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022), Section IV.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.attacks.logit_confidence(jnp.array([0.0, 3.0]), jnp.array(1)))
        3.0
    """
    logits = jnp.asarray(_checks.real_arrays("logits", logits))
    if not is_float(logits):
        raise TypeError(f"logits must be floats, got dtype {logits.dtype}")
    logits = logits.astype(compute_dtype(logits.dtype))
    classes = logits.shape[-1]
    if classes < 2:
        raise ValueError(f"logits must have at least two classes, got {classes}")
    true = jax.nn.one_hot(label, classes, dtype=bool)
    # log(p / (1 - p)) is the logit of the label minus the logsumexp of all other logits.
    of_label = jnp.sum(jnp.where(true, logits, 0.0), axis=-1)
    return of_label - jax.nn.logsumexp(jnp.where(true, -math.inf, logits), axis=-1)


def _winners(first: jax.Array, leaf: jax.Array) -> jax.Array:
    """For n coins, returns candidate i where first[i] is true, and candidate n + i elsewhere."""
    coins = first.reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(coins, leaf[: len(first)], leaf[len(first) :])


def _answers(query: ModelQuery, model: Value, records: Database) -> jax.Array:
    answers = jnp.asarray(jax.vmap(query, (None, 0))(model, records))
    if answers.ndim != 1:
        raise ValueError(f"query must return one number, got shape {answers.shape[1:]}")
    return answers.astype(jnp.result_type(float))


ShadowAttackMode = Literal["online", "offline"]
LiraVariance = Literal["record", "pooled"]


class _Fit(NamedTuple):
    """For every attacked model and record, a normal distribution fitted to the other models."""

    mean: jax.Array
    variance: jax.Array
    is_known: jax.Array


def lira(
    scores: ArrayLike,
    members: ArrayLike,
    *,
    mode: ShadowAttackMode = "online",
    variance: LiraVariance = "record",
) -> jax.Array:
    """The likelihood ratio attack (LiRA) on every model of a set of shadow models.

    Online, the result for a record is the log ratio of two Gaussian densities at the attacked
    model's score. One is fitted to the scores of other models that were trained on the record, and
    one to those of other models that were not. Offline, the attack ignores models that were trained
    on the record. The result is then the number of standard deviations by which the score exceeds
    the mean of the other models.

    Args:
        scores: the scores of `ShadowModels`, shape (models, records), finite, higher for members.
        members: of `ShadowModels`, of the same shape.
        mode: "online" or "offline".
        variance: "record" for a variance of each record, or "pooled" for one variance of all, which
            is better for fewer than about 64 models.

    Returns:
        An array of the same shape, higher where the attacked model was trained on the record; 0 if
        there are too few other models for a fit.

    Raises:
        ValueError: if scores and members do not share a shape of two axes, or a word is unknown.

    Formal guarantees:
        The fits for attacking a model use neither its scores nor its memberships. So an attack
        learns about the coins of a model only from that model. Results for one model depend on each
        other, and those for different models do, too, by the fits: pass confidence=None to
        `roc_curve`.

    Source:
        Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022), Algorithm 1 and Section VI.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random((64, 500)) < 0.5
        >>> scores = random.normal(size=(64, 500)) + 2 * members
        >>> found = dpjax.attacks.lira(scores, members)
        >>> round(dpjax.attacks.roc_curve(found, members, confidence=None).area, 1)
        0.9
    """
    _checks.choice("mode", mode, get_args(ShadowAttackMode))
    _checks.choice("variance", variance, get_args(LiraVariance))
    return _likelihood_ratios(
        *one_of_each_model("scores", scores, members), mode=mode, variance=variance
    )


def one_of_each_model(
    name: str, scores: ArrayLike, members: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Checks scores and members of shape (models, records). Returns them as floats and booleans."""
    values = jnp.asarray(_checks.real_arrays(name, scores))
    inside = jnp.asarray(_checks.booleans("members", members))
    if values.ndim != 2 or values.shape != inside.shape:
        wanted = f"{name} and members must both have the shape (models, records)"
        raise wrong_shape(wanted, values, inside)
    return values.astype(jnp.result_type(float)), inside


@functools.partial(jax.jit, static_argnames=("mode", "variance"))
def _likelihood_ratios(
    values: jax.Array, inside: jax.Array, *, mode: ShadowAttackMode, variance: LiraVariance
) -> jax.Array:
    # Centered values lose fewer digits when `_fit_to_others` subtracts one term from a sum.
    values = values - jnp.mean(values, axis=0, keepdims=True)
    out = _fit_to_others(values, ~inside, variance)
    if mode == "offline":
        return jnp.where(out.is_known, (values - out.mean) / jnp.sqrt(out.variance), 0.0)
    into = _fit_to_others(values, inside, variance)
    ratio = _log_density(values, into) - _log_density(values, out)
    return jnp.where(into.is_known & out.is_known, ratio, 0.0)


def _fit_to_others(values: jax.Array, chosen: jax.Array, variance: LiraVariance) -> _Fit:
    weights = chosen.astype(values.dtype)
    parts = (weights, weights * values, weights * values**2)
    count, total, squares = map(_summed_over_others, parts)
    mean = total / jnp.maximum(count, 1.0)
    deviations = jnp.maximum(squares - count * mean**2, 0.0)
    freedom = jnp.maximum(count - 1, 0.0)
    is_known = count >= 2
    if variance == "pooled":
        deviations = jnp.sum(deviations, axis=1, keepdims=True)
        freedom = jnp.sum(freedom, axis=1, keepdims=True)
        is_known = count >= 1
    limits = np.finfo(values.dtype)
    # If all models give equal values, the computed variance is only a rounding error, and may be 0.
    floor = float(limits.eps) * jnp.mean(values**2) + float(limits.tiny)
    spread = jnp.maximum(deviations / jnp.maximum(freedom, 1.0), floor)
    return _Fit(mean, spread, is_known)


def _log_density(values: jax.Array, fit: _Fit) -> jax.Array:
    """Returns the log density of the fitted normal distributions, up to a constant."""
    return -((values - fit.mean) ** 2 / fit.variance + jnp.log(fit.variance)) / 2


def rmia(
    likelihoods: ArrayLike,
    members: ArrayLike,
    population: ArrayLike,
    *,
    mode: ShadowAttackMode = "online",
    threshold: float = 1.0,
    slope: float = 0.3,
) -> jax.Array:
    """The robust membership inference attack (RMIA) on every model of a set of shadow models.

    The score of a record x under a model is the fraction of population records z with p(x | model)
    / p(x) >= threshold p(z | model) / p(z). Here p(z) averages p(z | other) over the other models.
    In the online mode, p(x) is the mean of two averages: over other models trained on x, and over
    other models not trained on x. In the offline mode, only the second average is known. If it is
    q, the first average is assumed to be slope * q + 1 - slope.

    Args:
        likelihoods: p(x | model), shape (models, records), above 0: the probabilities of the true
            labels, such as `jax.nn.sigmoid` of scores that are logits.
        members: of `ShadowModels`, of the same shape.
        population: p(z | model), shape (models, others), for records that no model was trained on.
        mode: "online" or "offline".
        threshold: the threshold of the ratio, above 0; the paper's gamma.
        slope: the paper's a, in [0, 1]; offline only. The slope of a record's probability after
            training on it, as a linear function of its probability without.

    Returns:
        An array of the shape of likelihoods, in [0, 1], higher where the attacked model was trained
        on the record. Scores are multiples of 1 / others, which limits the false positive rates
        that thresholds can reach.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if shapes do not fit, a parameter is out of range, or the mode is unknown.

    Formal guarantees:
        As for `lira`, the averages for attacking a model do not include that model.

    Source:
        Zarifzadeh, Liu and Shokri (2024), Algorithm 1.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random((8, 1000)) < 0.5
        >>> found = dpjax.attacks.rmia(
        ...     jax.nn.sigmoid(random.normal(size=(8, 1000)) + 2 * members),
        ...     members,
        ...     jax.nn.sigmoid(random.normal(size=(8, 1000))),
        ... )
        >>> round(dpjax.attacks.roc_curve(found, members, confidence=None).area, 1)
        0.9
    """
    _checks.choice("mode", mode, get_args(ShadowAttackMode))
    threshold = _checks.positive("threshold", threshold)
    slope = _checks.non_negative("slope", slope)
    if slope > 1:
        raise ValueError(f"slope must be at most 1, got {slope:g}")
    of_records, inside = one_of_each_model("likelihoods", likelihoods, members)
    of_population = jnp.asarray(_checks.real_arrays("population", population))
    if of_population.ndim != 2 or len(of_population) != len(of_records):
        wanted = f"population must have the shape (models, others) with {len(of_records)} models"
        raise wrong_shape(wanted, of_population)
    of_population = of_population.astype(of_records.dtype)
    return _robust_scores(of_records, inside, of_population, threshold, slope, mode=mode)


@functools.partial(jax.jit, static_argnames="mode")
def _robust_scores(
    of_records: jax.Array,
    inside: jax.Array,
    of_population: jax.Array,
    threshold: jax.Array,
    slope: jax.Array,
    *,
    mode: ShadowAttackMode,
) -> jax.Array:
    p_z = _average_of_others(of_population, jnp.ones(of_population.shape, bool))
    outside = _average_of_others(of_records, ~inside)
    if mode == "online":
        p_x = (_average_of_others(of_records, inside) + outside) / 2
    else:
        # The offline approximation by `slope` makes p(x) larger. The same transformation is applied
        # to p(z), so that the ratios are comparable.
        p_x, p_z = (((1 + slope) * p + 1 - slope) / 2 for p in (outside, p_z))
    return _part_at_most(of_population / p_z, of_records / p_x / threshold)


def _summed_over_others(terms: jax.Array) -> jax.Array:
    """Returns, for each attacked model, the sum over all other models: the total minus its term."""
    return jnp.sum(terms, axis=0, keepdims=True) - terms


def _average_of_others(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Averages over the chosen models except the attacked model.

    If no chosen model is left, averages over all models except the attacked model.
    """
    weights = chosen.astype(values.dtype)
    count, total = map(_summed_over_others, (weights, weights * values))
    plain = _summed_over_others(values) / max(len(values) - 1, 1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), plain)


def _part_at_most(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """Returns, for each row, the fraction of its values that are at most each of its bounds."""
    find = jax.vmap(functools.partial(jnp.searchsorted, side="right"))
    return find(jnp.sort(values, axis=1), bounds).astype(values.dtype) / values.shape[1]
