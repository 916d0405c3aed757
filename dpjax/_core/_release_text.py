"""How the value of a release prints: with its interval, rounded outward, in one line."""

import math
from collections.abc import Callable

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, estimate, interval
from dpjax._core._types import Value

_CONFIDENCE = 0.95
_MOST_SIMULATED = 500  # Numbers in a release that is simulated to print it.
_MOST_SHOWN = 6


def described(value: Value, accuracy: Accuracy) -> str:
    """A value as it prints: plainly, or as `3.2 ± 0.4 (95%)`."""
    measured = jax.tree.leaves(accuracy.measured)
    simulated = bool(accuracy.facts.get("simulated"))
    if (
        accuracy.kind == ""
        or any(map(_checks.is_traced, (*measured, *jax.tree.leaves(value))))
        or (simulated and sum(np.size(leaf) for leaf in measured) > _MOST_SIMULATED)
    ):
        return repr(value)
    try:
        low, high = interval(value, accuracy, _CONFIDENCE, simultaneous=False)
    except ValueError:  # No interval follows from this release; `interval` says why.
        return repr(value)
    centers = jax.tree.map(np.asarray, estimate(value, accuracy))
    texts = jax.tree.map(_with_ends, centers, low, high)
    how = f"({_CONFIDENCE:.0%}{', simulated' if simulated else ''})"
    if jax.tree_util.all_leaves([value]):
        return f"{texts} {how}"
    paths, _ = jax.tree_util.tree_flatten_with_path(texts)
    named = (
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}: {text}" for path, text in paths
    )
    return f"{', '.join(named)} {how}"


def _with_ends(center: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """Numbers and the largest distance to an end; the ends of a number far from their middle."""
    below, above = center - low, high - center
    reach = float(np.max(np.maximum(below, above), initial=0.0))
    if not math.isfinite(reach):
        return np.array2string(center)
    step = 10.0 ** (math.floor(math.log10(reach)) - 1) if reach > 0 else 0.0
    if step > 0 and np.all(center % 1 == 0) and reach % 1 == 0:
        step = max(step, 1.0)
    if center.ndim == 0 and abs(below - above) > 0.1 * reach:
        ends = (
            f"[{_rounded(float(low), step, math.floor)}, {_rounded(float(high), step, math.ceil)}]"
        )
        return f"{_rounded(float(center), step, round)} in {ends}"
    shown = _array(center, step)
    # Numbers are printed to the nearest step, half of which the interval must cover.
    exact = step == 0 or bool(np.all(np.round(center / step) * step == center))
    sign = "±" if np.all(np.maximum(below, above) > 0.9 * reach) else "± up to"
    return f"{shown} {sign} {_rounded(reach + (0 if exact else step / 2), step, math.ceil)}"


def _rounded(number: float, step: float, rounding: Callable[[float], int]) -> str:
    """A number as a multiple of a power of ten."""
    if step == 0:
        return f"{number:g}"
    # A number that prints with these digits is such a multiple, whatever the division rounds.
    times = number / step
    near = round(times)
    whole = near if abs(times - near) < 1e-9 * max(1, abs(times)) else rounding(times)
    digits = max(0, -round(math.log10(step)))
    return f"{whole * step:.{digits}f}"


def _array(center: np.ndarray, step: float) -> str:
    if center.ndim == 0:
        return _rounded(float(center), step, round)
    flat = [_rounded(float(x), step, round) for x in center.ravel()[: _MOST_SHOWN + 1]]
    if center.size <= _MOST_SHOWN:
        return f"[{' '.join(flat)}]"
    return f"[{' '.join(flat[:3])} ...] of shape {center.shape}"
