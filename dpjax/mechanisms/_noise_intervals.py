"""Confidence intervals of arrays to which noise was added, and the quantiles of the noise."""

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
from dpjax.random._noise import DISCRETE_LAPLACE, GAUSSIAN, LAPLACE, Noise

# Quantiles are multiplied by this factor. It covers the errors of the noise tables, and of scales
# in float32.
OUTWARD_QUANTILE = 1 + 2.0**-20
KNOWN_NOISE = {noise.name: noise for noise in (LAPLACE, DISCRETE_LAPLACE, GAUSSIAN)}


def noise_quantile(noise: Noise, confidence: float, together: int = 1) -> float:
    """Bounds the noise of d = `together` coordinates, in units of the scale.

    With probability at least `confidence`, no coordinate exceeds the bound. For this, each of the d
    independent coordinates exceeds it with probability at most 1 - confidence^(1/d).
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
    """Returns the `Accuracy` of arrays to which noise was added.

    Args:
        noise: the distribution at scale 1.
        leaves: for each array, its size, and whether it contains integers.
        scales: the scale of the noise of each array.
        steps: a bound on the total rounding error of each array: usually the spacing of its grid.
        **facts: other public facts, such as bounds on the values.
    """
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
    """Bounds the errors of each array, simultaneously for `together` coordinates."""
    noise = KNOWN_NOISE[facts["noise"]]
    quantile = noise_quantile(noise, confidence, together)

    def bound(array: dict[str, Any]) -> np.ndarray:
        scale = np.asarray(array["scale"])
        if array["whole"]:
            return np.asarray(noise.whole_bound(quantile, scale))
        # The value and the noise are each rounded by at most half a step of the grid.
        return scale * quantile + np.asarray(array["step"])

    return [bound(array) for array in facts["arrays"]]


@intervals_of("noise")
def _around_noise(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns intervals around the value that cover the noise and all rounding."""
    del measured
    leaves, structure = jax.tree.flatten(value)
    together = facts["coordinates"] if simultaneous else 1
    low, high = [], []
    for leaf, bound in zip(leaves, noise_bounds(facts, confidence, together), strict=True):
        center = as_floats(leaf)
        size = np.abs(center)
        reach = bound + rounding_to(leaf.dtype) * size
        if leaf.dtype.kind in "iu":  # float64 cannot represent all integers above 2^53.
            reach = np.where(size + reach < 2.0**53, reach, reach + 2.0**-52 * (size + reach))
        low.append(np.maximum(center - reach, facts.get("lower", -np.inf)))
        high.append(np.minimum(center + reach, facts.get("upper", np.inf)))
    return structure.unflatten(low), structure.unflatten(high)


def as_floats(array: np.ndarray) -> np.ndarray:
    """Casts to float64. The least integer, the mark of an invalid traced parameter, becomes NaN."""
    if not np.issubdtype(array.dtype, np.signedinteger):
        return array.astype(np.float64)
    return np.where(array == np.iinfo(array.dtype).min, np.nan, array.astype(np.float64))


def rounding_to(dtype: np.dtype) -> float:
    """Bounds the relative error of a few operations in float64 and of rounding to this dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return max(2.0**-51, float(jnp.finfo(dtype).eps))
