"""Frozen dataclasses that JAX can take apart, and descriptions of trees of arrays."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A dataclass field that belongs to the structure of the tree: it is compared, never traced."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static)
)
def frozen_pytree(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass whose fields are leaves unless declared `static()`.

    Compared by identity: an `__eq__` over arrays would make `jit(instance)` fail with "unhashable".
    JAX runs `__post_init__` again at every unflatten, so checks belong in a factory.
    """
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    return jax.tree_util.register_dataclass(made)


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """Structure, shapes and dtypes of a tree of arrays; hashable, so it can be static."""

    structure: Any  # a PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: Any) -> "TreeSpec":
        """The description of a tree of arrays, tracers or shape structs."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))

    def tree(self) -> Any:
        """The same tree with a `jax.ShapeDtypeStruct` at every leaf."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def argument(self, index: int) -> "TreeSpec":
        """The description of one of the items of a tuple."""
        return TreeSpec.of(self.tree()[index])

    def __repr__(self) -> str:
        described = [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in self.leaves]
        return str(jax.tree.unflatten(self.structure, described))
