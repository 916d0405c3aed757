"""Values with numbers that no target should give, and that private data may make it give."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Integers become the ends of their dtype.
_STRANGE = {
    "nan": (math.nan,),
    "inf": (math.inf,),
    "-inf": (-math.inf,),
    "the largest float": ("max",),
    "minus the largest float": ("min",),
    "-0.0": (-0.0,),
    "both infinities and nan": (math.inf, -math.inf, math.nan),
}
_STRANGE_INTEGERS = ("inf", "-inf")


def strange_values(value: Any, count: int) -> Iterator[tuple[str, Any]]:
    """Batches of values like one, by kind of strange numbers.

    The first of each batch holds nothing else, and then each coordinate is the only strange one, in
    turns: all of them, where there are fewer than `count`.

    Args:
        value: a pytree of arrays.
        count: the size of a batch.

    Yields:
        What is strange, and a pytree with a leading axis.
    """
    leaves, structure = jax.tree.flatten(value)
    floating = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    for name in _STRANGE if floating else _STRANGE_INTEGERS:
        yield name, jax.tree.unflatten(structure, _batches(leaves, _STRANGE[name], count))


def _batches(leaves: list[Any], strange: tuple[Any, ...], count: int) -> list[np.ndarray]:
    sizes = [np.size(leaf) for leaf in leaves]
    # -1 where all coordinates are strange.
    places = np.resize(np.arange(-1, sum(sizes)), count)
    batches, start = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        numbers = np.array([_as_number(x, np.dtype(leaf.dtype)) for x in strange], leaf.dtype)
        indices = np.arange(start, start + size)
        chosen = (places[:, None] == -1) | (places[:, None] == indices)
        filled = np.where(chosen, np.resize(numbers, size), np.ravel(leaf))
        batches.append(filled.astype(leaf.dtype).reshape(count, *np.shape(leaf)))
        start += size
    return batches


def _as_number(strange: Any, dtype: np.dtype) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        limits = {"max": jnp.finfo(dtype).max, "min": jnp.finfo(dtype).min}
        return limits.get(strange, strange)
    if strange == 0:
        return 0
    limits = jnp.iinfo("uint1" if dtype.kind == "b" else dtype)
    return limits.min if strange in ("min", -math.inf) else limits.max
