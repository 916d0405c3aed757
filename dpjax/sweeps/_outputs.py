"""The arrays that a function returns for one cell."""

import dataclasses

import jax
import numpy as np

from dpjax._core._pytree import TreeSpec


@dataclasses.dataclass(frozen=True)
class Output:
    """One array of a cell."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of the dimensions of one cell's array."""
        return tuple(f"{self.name}_dim_{i}" for i in range(len(self.shape)))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


def outputs_of(spec: TreeSpec) -> tuple[Output, ...]:
    """The arrays of a value, named by their keys and attributes, or "value"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(spec.tree())
    outputs = tuple(Output(name_of_path(path), leaf.shape, leaf.dtype) for path, leaf in leaves)
    names = [output.name for output in outputs]
    if len(set(names)) < len(names):
        raise ValueError(f"function must give its outputs distinct names, got {', '.join(names)}")
    return outputs


def name_of_path(path: tuple[object, ...]) -> str:
    """Joins keys and attributes; "value" stands for an array without a name."""
    named = (jax.tree_util.DictKey, jax.tree_util.GetAttrKey)
    start = () if path and isinstance(path[0], named) else ("value",)
    parts = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return "_".join((*start, *parts))
