"""The likelihood ratio attack: all other models help to attack each model."""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks

ShadowAttackMode = Literal["online", "offline"]
LiraVariance = Literal["record", "pooled"]


class _Fit(NamedTuple):
    """Gaussians for every record, fitted without the attacked model: shape (models, records)."""

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
    model's score. One is fitted to the other models that were trained on the record, one to those
    that were not. Offline, the attack ignores models that were trained on the record. The result is
    the number of standard deviations by which the score exceeds the mean of the others.

    Args:
        scores: of `ShadowModels`, shape (models, records), finite: higher for members.
        members: of `ShadowModels`, of the same shape.
        mode: "online" or "offline".
        variance: "record" for a variance of each record, or "pooled" for one of all records, which
            is better below about 64 models.

    Returns:
        An array of the same shape, higher where the attacked model was trained on the record; 0
        where the other models are too few for a fit.

    Raises:
        ValueError: if scores and members do not share a shape of two axes, or a word is unknown.

    Formal guarantees:
        No fit that attacks a model uses its own scores or memberships. So its coins are as hard to
        guess as its release makes them. Scores of one model depend on each other, and the fits
        connect the scores of all models: pass confidence=None to `roc_curve`.

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


def one_of_each_model(
    name: str, scores: ArrayLike, members: ArrayLike
) -> tuple[jax.Array, jax.Array]:
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
    # Subtracting one term from a sum loses fewer digits when the sum is centered.
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
    limits = np.finfo(values.dtype)
    # If all models agree, the variance is rounding error. The floor keeps it from dividing by 0.
    floor = float(limits.eps) * jnp.mean(values**2) + float(limits.tiny)
    spread = jnp.maximum(deviations / jnp.maximum(freedom, 1.0), floor)
    return _Fit(mean, spread, is_known)


def _log_density(values: jax.Array, fit: _Fit) -> jax.Array:
    """Log density up to a constant."""
    return -((values - fit.mean) ** 2 / fit.variance + jnp.log(fit.variance)) / 2
