"""Tests of a mechanism's draws against the density and the guarantee that it states."""

import math

import jax.numpy as jnp
import numpy as np
import scipy

from dpjax._core._types import Value
from dpjax.auditing import _features as features

# The allowed error of a mean, in standard errors: a false alarm once in 500 million means.
_SIGMAS = 6.0
# Relative rounding error of a log probability in float32, summed over some coordinates.
_ROUNDING = 1e-4
# If ratios exceed e^6, their mean depends on draws that are too rare.
_LARGEST_LOG_RATIO = 6.0
# Bounds for a fitted density: on its outputs, the draws of each, and the number of floats.
_MOST_OUTPUTS, _LEAST_SEEN, _MOST_FLOATS = 64, 64, 32
# The fitted density has lighter tails than any noise, and is cut off at these quantiles.
_NARROWER, _ENDS = 0.8, (0.01, 0.99)


def wrong_ratio(here: np.ndarray, there: np.ndarray, rounding: float = _ROUNDING) -> str | None:
    """Describes how the mean of p' / p differs from 1, on draws of p.

    Args:
        here: log p of every draw.
        there: log p', for any density p'.
        rounding: an additional error that is allowed.

    Returns:
        A description, or None if the mean is 1 up to chance.
    """
    ratio = np.exp(there - here)
    margin = _SIGMAS * ratio.std() / math.sqrt(len(ratio)) + rounding
    if abs(ratio.mean() - 1) <= margin:
        return None
    return f"the mean ratio is {ratio.mean():.4f}, not 1"


def depends_on_rare_draws(here: np.ndarray, there: np.ndarray) -> bool:
    """Whether the mean of p' / p is too uncertain for a test."""
    log_ratio = (there - here)[np.isfinite(there)]
    return bool(log_ratio.max(initial=-math.inf) > np.median(log_ratio) + _LARGEST_LOG_RATIO)


def excess_loss(here: np.ndarray, there: np.ndarray, epsilon: float, delta: float) -> str | None:
    """Describes how the privacy loss exceeds (epsilon, delta), on draws of p; else None."""
    excess = np.maximum(0.0, -np.expm1(epsilon + _ROUNDING - (here - there)))
    if excess.mean() <= delta + _SIGMAS * excess.std() / math.sqrt(len(excess)):
        return None
    return f"the privacy loss exceeds epsilon by delta {excess.mean():.3g}, promised {delta:g}"


def wrong_total(outputs: Value, log_probs: np.ndarray) -> str | None:
    """Describes how the total of a stated density differs from 1.

    A density q is fitted to half of the draws. On the other half, q / p must average 1. q covers
    the integers that are drawn most often, each with its own normal density of the floats.

    Args:
        outputs: of the mechanism, a batch.
        log_probs: log p of each.

    Returns:
        A description. None if the total is 1 up to chance, or if no q is close to p: no integers
        are drawn often, or the floats are too many or linearly dependent.
    """
    integers, floats, precision = _columns(outputs)
    half = len(log_probs) // 2
    _, codes = np.unique(integers, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    seen = np.bincount(codes[:half], minlength=codes.max() + 1)
    often = np.argsort(-seen, kind="stable")[:_MOST_OUTPUTS]
    often = often[seen[often] >= _LEAST_SEEN]
    log_q = np.full(len(log_probs) - half, -math.inf)
    for code in often:
        fitted = _log_normal(floats[:half][codes[:half] == code], floats[half:])
        if fitted is None:
            return None
        share = math.log(seen[code] / seen[often].sum())
        log_q = np.where(codes[half:] == code, share + fitted, log_q)
    if not np.isfinite(log_q).any() or depends_on_rare_draws(log_probs[half:], log_q):
        return None
    # A float of few bits stands for an interval, whose width depends on the float.
    wrong = wrong_ratio(log_probs[half:], log_q, _ROUNDING + 8 * precision)
    return wrong and f"of a density fitted to the draws, {wrong}"


def _columns(outputs: Value) -> tuple[np.ndarray, np.ndarray, float]:
    """The integers, the floats, and the precision of the floats."""
    arrays = features.matrices(outputs)
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    integers = [x for x in arrays if not jnp.issubdtype(x.dtype, jnp.floating)]
    none = np.zeros((len(arrays[0]), 0))
    return (
        np.concatenate([none.astype(int), *integers], axis=1),
        np.concatenate([none, *(x.astype(float) for x in floats)], axis=1),
        max((float(jnp.finfo(x.dtype).eps) for x in floats), default=0.0),
    )


def _log_normal(known: np.ndarray, floats: np.ndarray) -> np.ndarray | None:
    """Log density of a truncated normal fitted to known rows; None if no fit is possible."""
    varied = np.ptp(known, axis=0) > 0
    same = np.all(floats[:, ~varied] == known[0, ~varied], axis=1)
    known, floats = known[:, varied], floats[:, varied]
    dims = known.shape[1]
    if dims == 0:
        return np.where(same, 0.0, -math.inf)
    if dims > _MOST_FLOATS or len(known) < 8 * dims:
        return None
    center = np.median(known, axis=0)
    inner = np.clip(known, *np.quantile(known, (0.05, 0.95), axis=0)) - center
    covariance = inner.T @ inner / len(known)
    if np.linalg.cond(covariance) > 1e10:
        return None
    root = np.linalg.cholesky(covariance)
    whitened, mapped = (np.linalg.solve(root, (x - center).T).T for x in (known, floats))
    low, high = np.quantile(whitened, _ENDS, axis=0)
    inside = np.all((low <= mapped) & (mapped <= high), axis=1) & same
    mass = scipy.special.ndtr(high / _NARROWER) - scipy.special.ndtr(low / _NARROWER)
    scales = np.log(np.diagonal(root) * (_NARROWER * math.sqrt(2 * math.pi))) + np.log(mass)
    log_density = -np.sum((mapped / _NARROWER) ** 2, axis=1) / 2 - np.sum(scales)
    return np.where(inside, log_density, -math.inf)
