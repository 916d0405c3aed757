"""The robust membership inference attack: a record against records of the population."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax.attacks._lira import ShadowAttackMode, one_of_each_model


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

    The score of a record x under a model is a fraction of the population z. It counts those with
    p(x | model) / p(x) >= threshold p(z | model) / p(z). Here p(z) averages p(z | other) over the
    other models. Online, p(x) averages two averages: over other models trained on x, and over those
    not trained on x. Offline, the former is unknown. With p the latter, it is assumed to be
    slope p + 1 - slope.

    Args:
        likelihoods: p(x | model), shape (models, records), above 0: the probabilities of the true
            labels, such as `jax.nn.sigmoid` of scores that are logits.
        members: of `ShadowModels`, of the same shape.
        population: p(z | model), shape (models, others), for records that no model was trained on.
        mode: "online" or "offline".
        threshold: of the ratio, above 0; the paper's gamma.
        slope: how strongly the probability of a record after training on it follows its probability
            without, in [0, 1]; offline only; the paper's a.

    Returns:
        An array of the shape of likelihoods, in [0, 1], higher where the attacked model was trained
        on the record. Scores are multiples of 1 / others, which limits the false positive rates
        that thresholds can reach.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if shapes do not fit, a parameter is out of range, or the mode is unknown.

    Formal guarantees:
        As for `lira`, no average that attacks a model includes that model.

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
        raise ValueError(
            f"population must have the shape (models, others), {len(of_records)} models, got"
            f" {of_population.shape}"
        )
    of_population = of_population.astype(of_records.dtype)
    return _compiled(of_records, inside, of_population, threshold, slope, mode=mode)


@functools.partial(jax.jit, static_argnames="mode")
def _compiled(
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
        # The assumption of `slope` raises p(x). It must raise p(z) alike, to compare the two.
        p_x, p_z = (((1 + slope) * p + 1 - slope) / 2 for p in (outside, p_z))
    return _part_at_most(of_population / p_z, of_records / p_x / threshold)


def _average_of_others(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Averages over the chosen models without the attacked one; over all others if none is left."""
    weights = chosen.astype(values.dtype)
    count, total = (
        jnp.sum(terms, axis=0, keepdims=True) - terms for terms in (weights, weights * values)
    )
    plain = (jnp.sum(values, axis=0, keepdims=True) - values) / max(len(values) - 1, 1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), plain)


def _part_at_most(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """The fractions of each row of values that are at most each bound of the row."""
    find = jax.vmap(functools.partial(jnp.searchsorted, side="right"))
    return find(jnp.sort(values, axis=1), bounds).astype(values.dtype) / values.shape[1]
