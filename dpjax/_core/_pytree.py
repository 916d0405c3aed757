"""Frozen dataclasses that are JAX pytrees, and descriptions of pytrees of arrays."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax

from dpjax._core import _checks
from dpjax._core._types import PyTree, TreeDef
from dpjax._exact._numerics import outward

T = TypeVar("T")


def static(**options: Any) -> Any:
    """Declares a dataclass field as part of the pytree's structure: compared, never traced."""
    return dataclasses.field(metadata={"static": True}, **options)


def up(**options: Any) -> Any:
    """Declares a dataclass field that is rounded up when flattening converts it to float32."""
    return dataclasses.field(metadata={"toward": math.inf}, **options)


def down(**options: Any) -> Any:
    """Declares a dataclass field that is rounded down when flattening converts it to float32."""
    return dataclasses.field(metadata={"toward": -math.inf}, **options)


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static, up, down)
)
def frozen_pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose fields are leaves unless declared as `static()`.

    Instances are compared by identity. If `__eq__` compared arrays, instances would be unhashable,
    and `jit(instance)` would fail. JAX runs `__post_init__` at every unflatten, so checks belong in
    a factory function. Only a class with fields declared as `up()` or `down()` may have checks in
    `__post_init__`, because unflattening does not run it for such a class.
    """
    frozen: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    if any("toward" in field.metadata for field in dataclasses.fields(frozen)):
        return register_rounded(frozen)
    return jax.tree_util.register_dataclass(frozen)


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, static, up, down)
)
def made_by_factory(cls: type[T]) -> type[T]:
    """Makes a `frozen_pytree` whose constructor raises an error.

    A factory function creates its instances by `made`.

    The fields must fit together, so users must not change single fields. The class must have a
    field declared as `up()` or `down()`. Without such a field, unflattening would call the
    constructor, and the constructor raises an error.
    """

    def refuse(self: object) -> None:
        # `dataclasses.replace(mechanism, epsilon=0.1)` would change the guarantee but not the
        # noise.
        raise TypeError(
            f"a {type(self).__name__} must be made by its factory function, and its fields cannot"
            " be replaced, because its noise is calibrated to its epsilon, delta and sensitivity:"
            " call the factory function with the new values"
        )

    cls.__post_init__ = refuse  # type: ignore[attr-defined]
    return frozen_pytree(cls)


def register_rounded(cls: type[T], check: Callable[[T], None] | None = None) -> type[T]:
    """Registers a dataclass with `up()` or `down()` fields as a pytree.

    JAX calls `check` with each instance that it flattens.
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    constants = [field.name for field in fields if "static" in field.metadata]
    toward = {f.name: f.metadata.get("toward") for f in fields if f.name not in constants}

    def flatten(value: T) -> tuple[list[PyTree], tuple[object, ...]]:
        if check is not None:
            check(value)
        state = vars(value)
        leaves = [state[x] if to is None else outward(state[x], to) for x, to in toward.items()]
        return leaves, tuple(state[x] for x in constants)

    def flatten_with_keys(value: T) -> tuple[list[tuple[object, PyTree]], tuple[object, ...]]:
        leaves, metadata = flatten(value)
        keys = map(jax.tree_util.GetAttrKey, toward)
        return list(zip(keys, leaves, strict=True)), metadata

    def unflatten(metadata: tuple[object, ...], leaves: Iterable[PyTree]) -> T:
        # `__init__` is not called, because its checks would refuse the objects that `vmap`
        # (in_axes) and `tree.map` put in place of numbers.
        value = cls.__new__(cls)
        vars(value).update(zip((*toward, *constants), (*leaves, *metadata), strict=True))
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def made(cls: type[T], *parts: Any, **named: Any) -> T:
    """Creates an instance without checks, for code that knows that the fields fit together.

    Fields are given in order or by name. All other fields get their default values.
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    value = object.__new__(cls)
    names = [field.name for field in fields]
    known = dict(zip(names, parts, strict=False)) | named
    vars(value).update({f.name: known.get(f.name, f.default) for f in fields})
    return value


def changed(value: T, **fields: Any) -> T:
    """Returns a copy of an instance with some fields changed. Like `made`, it checks nothing."""
    return made(type(value), **(vars(value) | fields))


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """Structure, shapes and dtypes of a pytree of arrays.

    It is hashable, so that it can be a static argument of `jit`.
    """

    structure: TreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "TreeSpec":
        """Returns the description of a pytree of arrays, tracers or `jax.ShapeDtypeStruct`s."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))

    def tree(self) -> PyTree:
        """Returns the pytree with a `jax.ShapeDtypeStruct` at every leaf."""
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def form(self) -> tuple[object, ...]:
        """The structure and the shapes, without dtypes."""
        return self.structure, *(leaf.shape for leaf in self.leaves)

    def argument(self, index: int) -> "TreeSpec":
        """Returns the description of the item at `index`, if the pytree is a tuple."""
        return TreeSpec.of(self.tree()[index])

    def __repr__(self) -> str:
        return _checks.described(self.tree())
