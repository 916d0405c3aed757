"""The likelihood ratio attack: each model is attacked by means of all the others."""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from dpjax import _checks

ShadowAttackMode = Literal["online", "offline"]
LiraVariance = Literal["record", "pooled"]


class _Fit(NamedTuple):
    """Gaussians for every record, from all models but the attacked one: shape (models, records)."""

    mean: jax.Array
    variance: jax.Array
    is_known: jax.Array


def lira(
    scores: Any,
    members: Any,
    *,
    mode: ShadowAttackMode = "online",
    variance: LiraVariance = "record",
) -> jax.Array:
    """The likelihood ratio attack (LiRA) on every model of a set of shadow models.

    Online, the score of a record is the log ratio of two Gaussian densities of what the attacked
    model says of it, fitted to the other models that were trained on the record and to those that
    were not. Offline, models that were trained on it are not looked at: it is the number of
    standard deviations that the attacked model is above the mean of the others.

    Args:
        scores: of `ShadowModels`, shape (models, records), finite: higher for members.
        members: of `ShadowModels`, of the same shape.
        mode: "online" or "offline".
        variance: "record" for one of each record, or "pooled" for one of all records, which is
            better below some 64 models.

    Returns:
        An array of that shape, higher where the attacked model was trained on the record; 0 where
        the others are too few to tell.

    Raises:
        ValueError: if the shapes are not alike and of two axes, or a word is none of those.

    Formal guarantees:
        What a model says, and whether it was trained on a record, is in no fit that it is attacked
        by: its coins are as hard to guess as its release makes them. Scores of one model depend on
        each other, and so do those of models, by the fits: pass confidence=None to `roc_curve`.

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
    return _compiled(*one_of_each_model("scores", scores, members), mode=mode, variance=variance)


def one_of_each_model(name: str, scores: Any, members: Any) -> tuple[jax.Array, jax.Array]:
    """Scores as floats and members as booleans, each of shape (models, records)."""
    values = jnp.asarray(_checks.real_arrays(name, scores))
    inside = jnp.asarray(_checks.booleans("members", members))
    if values.ndim != 2 or values.shape != inside.shape:
        raise ValueError(
            f"{name} and members must both have the shape (models, records), got"
            f" {values.shape} and {inside.shape}"
        )
    return values.astype(jnp.result_type(float)), inside


@functools.partial(jax.jit, static_argnames=("mode", "variance"))
def _compiled(
    values: jax.Array, inside: jax.Array, *, mode: ShadowAttackMode, variance: LiraVariance
) -> jax.Array:
    # Sums from which one term is taken lose less about their center.
    values = values - jnp.mean(values, axis=0, keepdims=True)
    out = _fit_to_others(values, ~inside, variance)
    if mode == "offline":
        return jnp.where(out.is_known, (values - out.mean) / jnp.sqrt(out.variance), 0.0)
    into = _fit_to_others(values, inside, variance)
    ratio = _log_density(values, into) - _log_density(values, out)
    return jnp.where(into.is_known & out.is_known, ratio, 0.0)


def _fit_to_others(values: jax.Array, chosen: jax.Array, variance: LiraVariance) -> _Fit:
    weights = chosen.astype(values.dtype)
    count, total, squares = (
        jnp.sum(terms, axis=0, keepdims=True) - terms
        for terms in (weights, weights * values, weights * values**2)
    )
    mean = total / jnp.maximum(count, 1.0)
    deviations = jnp.maximum(squares - count * mean**2, 0.0)
    freedom = jnp.maximum(count - 1, 0.0)
    is_known = count >= 2
    if variance == "pooled":
        deviations = jnp.sum(deviations, axis=1, keepdims=True)
        freedom = jnp.sum(freedom, axis=1, keepdims=True)
        is_known = count >= 1
    limits = jnp.finfo(values.dtype)
    # What rounding leaves of models that all say the same.
    floor = limits.eps * jnp.mean(values**2) + limits.tiny
    spread = jnp.maximum(deviations / jnp.maximum(freedom, 1.0), floor)
    return _Fit(mean, spread, is_known)


def _log_density(values: jax.Array, fit: _Fit) -> jax.Array:
    """But for a constant."""
    return -((values - fit.mean) ** 2 / fit.variance + jnp.log(fit.variance)) / 2
