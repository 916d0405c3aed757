"""The robust membership inference attack: a record against records of the population."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from dpjax import _checks
from dpjax.attacks._lira import ShadowAttackMode, one_of_each_model


def rmia(
    likelihoods: Any,
    members: Any,
    population: Any,
    *,
    mode: ShadowAttackMode = "online",
    threshold: float = 1.0,
    slope: float = 0.3,
) -> jax.Array:
    """The robust membership inference attack (RMIA) on every model of a set of shadow models.

    The score of a record x under a model is the part of the population z for which p(x | model) /
    p(x) is at least `threshold` times p(z | model) / p(z). p(z) is the average of p(z | other) over
    the other models. Online, p(x) is the average of its average over those trained on x and its
    average over those that are not. Offline the former is not known, and taken to be slope p + 1 -
    slope, p the latter.

    Args:
        likelihoods: p(x | model), shape (models, records), above 0: the probabilities of the true
            labels, as `jax.nn.sigmoid` of scores that are logits.
        members: of `ShadowModels`, of the same shape.
        population: p(z | model), shape (models, others), for records that no model was trained on.
        mode: "online" or "offline".
        threshold: of the ratio, above 0; the paper's gamma.
        slope: how much the probability of a record that is trained on depends on the one that it
            has otherwise, in [0, 1]; offline only; the paper's a.

    Returns:
        An array of the shape of likelihoods, in [0, 1], higher where the attacked model was trained
        on the record. Its steps are 1 / others, and so are those of false positive rates that it
        can tell apart.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if shapes do not fit, a parameter is out of range, or the mode is none of those.

    Formal guarantees:
        As for `lira`, what is attacked is in no average that it is compared with.

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
    everyone = jnp.ones(of_population.shape, bool)
    p_z = _average_of_others(of_population, everyone)
    outside = _average_of_others(of_records, ~inside)
    if mode == "online":
        p_x = (_average_of_others(of_records, inside) + outside) / 2
    else:
        # The population is averaged as records are, whose probabilities this raises.
        p_x, p_z = (((1 + slope) * p + 1 - slope) / 2 for p in (outside, p_z))
    return _part_at_most(of_population / p_z, of_records / p_x / threshold)


def _average_of_others(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Over the chosen models but one; of all others where none is chosen."""
    weights = chosen.astype(values.dtype)
    count, total = (
        jnp.sum(terms, axis=0, keepdims=True) - terms for terms in (weights, weights * values)
    )
    plain = (jnp.sum(values, axis=0, keepdims=True) - values) / max(len(values) - 1, 1)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), plain)


def _part_at_most(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """Of each row of values the part that is at most each of its bounds."""
    find = jax.vmap(lambda row, at: jnp.searchsorted(row, at, side="right"))
    return find(jnp.sort(values, axis=1), bounds).astype(values.dtype) / values.shape[1]
