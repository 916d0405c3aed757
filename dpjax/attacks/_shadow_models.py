"""Shadow models: one training on many random databases, with each model's scores of records."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._records import record_arrays
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Release
from dpjax._exact._numerics import compute_dtype
from dpjax.attacks._many_runs import many_runs, released_value
from dpjax.random._facade import check_sampling_key, sampling_key

ModelQuery = Callable[[Value, PyTree], jax.Array]


@frozen_pytree
class ShadowModels:
    """Scores of records by many models, each trained on some of the records.

    Attributes:
        scores: shape (models, records): the answer of every model about every record.
        members: shape (models, records): which records a model was trained on.
        population: shape (models, others): scores of records that no model was trained on; or None.

    Formal guarantees:
        A fair coin decides whether a record is in a database, independently of all other models.
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

    Records i and n + i of 2 n records compete for place i of a database. For each place and model,
    a fair coin decides which of the two is trained on. So databases keep their size n, as in
    replace-one. The coins of one model say nothing about another's. So `lira` and `rmia` attack
    each model with the help of the others.

    Args:
        key: a typed key, of the chacha20 implementation if `train` requires it.
        train: a pure JAX function `train(key, database)` that returns a model: any pytree of
            arrays, or a `Release` of one, as `dpjax.privatize(target, mechanism)` does. To train
            without privacy, ignore the key: `lambda key, database: target(database)`.
        records: a pytree of arrays with leading axis 2 n.
        query: `query(model, record)`, a finite number: the attacker's question about a record, such
            as the `logit_confidence` of its label.
        models: the number of models, at least 1.
        population: more records, on which no model is trained, for `rmia`.
        chunk_size: models at a time; by default as many as fit in memory.

    Returns:
        The `ShadowModels`. The models themselves are not kept.

    Raises:
        TypeError: if the key is not a typed key of a usable implementation, or train or query is
            not a function.
        ValueError: if the number of records is odd, a number is out of range, or query does not
            return a scalar.

    Formal guarantees:
        Those of `ShadowModels`. Under (epsilon, delta)-DP, and given all other models,
        `auditing.one_run_epsilon` bounds how well the coins of a model can be guessed: they are
        paired canaries.

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
            f"records must be even in number, since they compete in pairs, got {count}"
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
        answers = [_answers(query, model, asked) for asked in (candidates, *others)]
        return jnp.concatenate([first, ~first]), answers

    arguments = sampling_key(key_coins), key_models, candidates, others
    members, (scores, *rest) = many_runs(
        "models", run, arguments, count=models, chunk_size=chunk_size
    )
    return ShadowModels(scores, members, rest[0] if rest else None)


def logit_confidence(logits: jax.Array, label: jax.Array) -> jax.Array:
    """log(p / (1 - p)), where p is the probability of a label under the softmax of logits.

    It is nearly Gaussian over models, as `lira` assumes, and finite even where p rounds to 1.

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
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floats, got dtype {logits.dtype}")
    logits = logits.astype(compute_dtype(logits.dtype))
    classes = logits.shape[-1]
    if classes < 2:
        raise ValueError(f"logits must have at least two classes, got {classes}")
    true = jax.nn.one_hot(label, classes, dtype=bool)
    of_label = jnp.sum(jnp.where(true, logits, 0.0), axis=-1)
    return of_label - jax.nn.logsumexp(jnp.where(true, -math.inf, logits), axis=-1)


def _winners(first: jax.Array, leaf: jax.Array) -> jax.Array:
    """The record that wins each place by its coin."""
    coins = first.reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(coins, leaf[: len(first)], leaf[len(first) :])


def _answers(query: ModelQuery, model: Value, records: Database) -> jax.Array:
    answers = jnp.asarray(jax.vmap(query, (None, 0))(model, records))
    if answers.ndim != 1:
        raise ValueError(f"query must return one number, got shape {answers.shape[1:]}")
    return answers.astype(jnp.result_type(float))
