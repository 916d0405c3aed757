"""Values with strange numbers, which private data may make a target return."""

import math
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Value

_Strange = float | Literal["max", "min"]
# For integers, every entry stands for an end of their dtype.
_STRANGE: dict[str, tuple[_Strange, ...]] = {
    "nan": (math.nan,),
    "inf": (math.inf,),
    "-inf": (-math.inf,),
    "the largest float": ("max",),
    "minus the largest float": ("min",),
    "-0.0": (-0.0,),
    "both infinities and nan": (math.inf, -math.inf, math.nan),
}
_STRANGE_INTEGERS = ("inf", "-inf")


def strange_values(value: Value, count: int) -> Iterator[tuple[str, Value]]:
    """Batches of values with strange numbers, one batch for each kind.

    The first value of a batch holds strange numbers only. In each of the others one coordinate is
    strange, in turns. A batch covers all coordinates if there are fewer than `count`.

    Args:
        value: a pytree of arrays.
        count: the size of a batch.

    Yields:
        The name of the kind, and a pytree with a leading axis.
    """
    leaves, structure = jax.tree.flatten(value)
    floating = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    for name in _STRANGE if floating else _STRANGE_INTEGERS:
        yield name, jax.tree.unflatten(structure, _batches(leaves, _STRANGE[name], count))


def _batches(
    leaves: list[jax.Array], strange: tuple[_Strange, ...], count: int
) -> list[np.ndarray]:
    sizes = [np.size(leaf) for leaf in leaves]
    # At -1 all coordinates are strange.
    places = np.resize(np.arange(-1, sum(sizes)), count)
    batches: list[np.ndarray] = []
    start = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        numbers = np.array([_as_number(x, np.dtype(leaf.dtype)) for x in strange], leaf.dtype)
        indices = np.arange(start, start + size)
        chosen = (places[:, None] == -1) | (places[:, None] == indices)
        filled = np.where(chosen, np.resize(numbers, size), np.ravel(leaf))
        batches.append(filled.astype(leaf.dtype).reshape(count, *np.shape(leaf)))
        start += size
    return batches


def _as_number(strange: _Strange, dtype: np.dtype) -> float:
    if jnp.issubdtype(dtype, jnp.floating):
        largest = float(jnp.finfo(dtype).max)
        return {"max": largest, "min": -largest}[strange] if isinstance(strange, str) else strange
    if strange == 0:
        return 0
    limits = jnp.iinfo("uint1" if dtype.kind == "b" else dtype)
    return limits.min if strange in ("min", -math.inf) else limits.max
