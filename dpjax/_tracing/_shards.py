"""Helpers for code inside `jax.shard_map`: mesh axes, checks, and operations on known numbers."""

import contextlib
from collections.abc import Callable, Generator
from typing import TypeAlias

import jax
import jax.core
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from dpjax._core._types import PyTree
from dpjax._tracing import _walks

Axes: TypeAlias = frozenset[str]


def varying_axes(tree: PyTree) -> Axes:
    """Returns the mesh axes over which at least one array of a pytree may vary.

    The set is empty outside `jax.shard_map`, and inside `jax.shard_map` with check_vma=False.
    """
    return Axes().union(*map(_axes, jax.tree.leaves(tree)))


def refuse_unchecked() -> None:
    """Refuses `jax.shard_map` with check_vma=False, where JAX does not track varying axes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and _axes(lax.axis_index(manual)) != frozenset(manual):
        raise ValueError(
            "noise and clipped sums need jax.shard_map with check_vma=True over the mesh axes "
            f"{sorted(manual)}, because JAX cannot otherwise check that all devices agree: use "
            "jax.shard_map with check_vma=True, its default, and not jax.pmap"
        )


def refuse_inside(what: str, instead: str) -> None:
    """Refuses a call inside `jax.shard_map`, where it would run once on every device."""
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"{what} must be outside of jax.shard_map and jax.pmap, got shards over"
            f" {sorted(manual)}: {instead}"
        )


def on_each(axes: Axes, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Calls a function on each shard. Gradients inside the function are those of one shard.

    Inside `jax.shard_map`, a gradient with respect to a replicated array is summed over all shards.
    To prevent this, the function is first traced on plain shapes, where no array is replicated.
    Then the traced function runs on the arrays of the shard.
    """
    if not axes:
        return function(*arguments)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    traced, outputs = jax.make_jaxpr(jax.jit(function), return_shape=True)(*plain)

    def varying(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    def call(equation: _walks.Equation, operands: list[jax.Array]) -> list[jax.Array]:
        parameters = equation.primitive.get_bind_params(equation.params)
        return _walks.bind(equation, parameters, list(map(varying, operands)))

    found = _walks.run(traced, jax.tree.leaves(arguments), call)
    return jax.tree.unflatten(jax.tree.structure(outputs), list(map(varying, found)))


def placed_by_xla(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wraps a function so that mesh axes of type `Explicit` are treated as `Auto` inside it.

    The outputs are replicated over these axes.
    """

    def placed(*arguments: PyTree) -> PyTree:
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
        typed = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
        if not typed:
            return function(*arguments)
        types = zip(typed[0].axis_names, typed[0].axis_types, strict=True)
        axes = tuple(name for name, kind in types if kind is AxisType.Explicit)
        with jax.sharding.use_abstract_mesh(typed[0]):
            automatic = jax.sharding.auto_axes(function, axes=axes, out_sharding=PartitionSpec())
            return automatic(*arguments)

    return placed


@contextlib.contextmanager
def computing_now() -> Generator[None]:
    """A context in which JAX executes operations on known numbers instead of tracing them.

    `jax.ensure_compile_time_eval` alone is not enough: inside an eager `shard_map`, the result of
    any operation would be an array of shards. No operation in the context may have a traced
    operand.
    """
    with jax.ensure_compile_time_eval(), jax.core.eval_context():
        yield


def shard_count(axes: Axes) -> int:
    """Returns the number of shards along all given mesh axes together."""
    return lax.axis_size(tuple(sorted(axes))) if axes else 1


def _axes(array: jax.Array) -> Axes:
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    if kind is None:
        return frozenset()
    return frozenset(kind.varying | kind.unreduced | kind.reduced)
