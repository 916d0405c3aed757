"""Intervals around numbers with additive noise, from the scale of the noise."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, intervals_of
from dpjax._core._types import PyTree, Value
from dpjax.random._facade import GAUSSIAN, LAPLACE, Noise

# Covers the tables of the noise, and scales that are known in float32.
OUTWARD_QUANTILE = 1 + 2.0**-20
KNOWN_NOISE = {noise.name: noise for noise in (LAPLACE, GAUSSIAN)}


def noise_quantile(noise: Noise, confidence: float, together: int = 1) -> float:
    """The value, in scales, that so many coordinates of noise keep within at a confidence.

    Each of d independent coordinates may exceed it with probability 1 - confidence^(1/d).
    """
    confidence = _checks.fraction("confidence", confidence)
    return OUTWARD_QUANTILE * noise.tail_quantile(-math.expm1(math.log(confidence) / together))


def around_noise(
    noise: Noise,
    leaves: Sequence[tuple[int, bool]],
    scales: Sequence[ArrayLike],
    steps: Sequence[ArrayLike],
    **facts: object,
) -> Accuracy:
    """Describes arrays with noise, by their sizes, whether they hold integers, scales and grids."""
    known = KNOWN_NOISE.get(noise.name)
    if known is None or known.tail_quantile is not noise.tail_quantile:
        return Accuracy.of("", {"why": f"quantiles of {noise.name} noise are not stored"})
    arrays = [
        {"scale": np.asarray(scale).tolist(), "step": np.asarray(step).tolist(), "whole": whole}
        for (_, whole), scale, step in zip(leaves, scales, steps, strict=True)
    ]
    coordinates = sum(size for size, _ in leaves)
    about = {"noise": noise.name, "arrays": arrays, "coordinates": coordinates, **facts}
    return Accuracy.of("noise", about)


def noise_bounds(facts: dict[str, Any], confidence: float, together: int) -> list[np.ndarray]:
    """A bound on the distance of each array from the truth, for so many coordinates at once."""
    quantile = noise_quantile(KNOWN_NOISE[facts["noise"]], confidence, together)

    def bound(array: dict[str, Any]) -> np.ndarray:
        noise = np.asarray(array["scale"]) * quantile
        # An integer is wrong by an integer. Floats are rounded to a grid, and the noise too.
        return np.floor(noise + 0.5) if array["whole"] else noise + np.asarray(array["step"])

    return [bound(array) for array in facts["arrays"]]


@intervals_of("noise")
def _around_noise(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """The value plus and minus the noise and the rounding."""
    del measured
    leaves, structure = jax.tree.flatten(value)
    together = facts["coordinates"] if simultaneous else 1
    low, high = [], []
    for leaf, bound in zip(leaves, noise_bounds(facts, confidence, together), strict=True):
        center = as_floats(leaf)
        reach = bound + rounding_to(leaf.dtype) * np.abs(center)
        low.append(np.maximum(center - reach, facts.get("lower", -np.inf)))
        high.append(np.minimum(center + reach, facts.get("upper", np.inf)))
    return structure.unflatten(low), structure.unflatten(high)


def as_floats(array: np.ndarray) -> np.ndarray:
    """float64; NaN for the integer that marks a bad traced parameter."""
    if not np.issubdtype(array.dtype, np.signedinteger):
        return array.astype(np.float64)
    return np.where(array == np.iinfo(array.dtype).min, np.nan, array.astype(np.float64))


def rounding_to(dtype: np.dtype) -> float:
    """The relative error of a float that was rounded to a dtype, and is rounded in float64."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return max(2.0**-51, float(jnp.finfo(dtype).eps))
