"""A mechanism in the form that compiled programs take, made at its first release and kept.

Taking a mechanism apart and checking a value takes longer than drawing noise. A mechanism is
frozen, so this work is done once. Nothing is kept of a mechanism that holds tracers: they live no
longer than their trace.
"""

import dataclasses
import functools
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._pytree import TreeSpec, changed
from dpjax._core._types import Key, PyTree, Scalar, TreeDef, Value
from dpjax._core._values import Sensitivity
from dpjax._exact._kernels import written
from dpjax.random._facade import key_for_each


class Drawn(Protocol):
    """The part of a mechanism that noise is drawn with; a frozen pytree."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def sensitivity(self) -> Sensitivity: ...

    def _draw(self, key: Key, value: Value) -> Value: ...

    def _compiles_in_pieces(self, value: Value) -> bool: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A mechanism in the form that a program takes.

    Attributes:
        structure: of the mechanism, without the origin of its sensitivity.
        numbers: the leaves.
        compiled: draws as the mechanism does, from its numbers, a key and a value.
        known: kinds of keys and values that draws of the structure are compiled for.
        accepted: structures, shapes and dtypes of the values that its checks have accepted.
        accuracies: how far releases of such values may be off.
    """

    structure: TreeDef
    numbers: list[Scalar]
    compiled: Any  # A compiled function: JAX has no public type of it.
    known: set[tuple[np.dtype, TreeSpec, np.dtype]]
    accepted: set[PyTree]
    accuracies: dict[TreeSpec, Accuracy]

    def noisy_value(self, key: Key, value: Value) -> Value:
        """The value of a release."""
        if not any(map(_checks.is_traced, (key, *self.numbers, *jax.tree.leaves(value)))):
            mechanism: Drawn = jax.tree.unflatten(self.structure, self.numbers)
            if mechanism._compiles_in_pieces(value):
                # Arithmetic on arrays rounds as compiled programs do; Python floats would not.
                return jax.tree.map(jnp.asarray, mechanism)._draw(key, value)
        if _checks.is_staging():
            # In one program with the target, a value could be computed again for each of its uses,
            # and rounded in other ways. Noise hides one value, not the difference of two.
            value = jax.tree.map(written, value)
        return self.compiled(self.numbers, key, value)

    def compile(self, key: Key, value: TreeSpec) -> Future[None] | None:
        """Compiles the draw of values of these shapes, under a public key, if no one has yet.

        Returns:
            What XLA still has to do; None if that is nothing.
        """
        kind = key.dtype, value, jnp.result_type(float)
        if kind in self.known:
            return None
        mechanism: Drawn = jax.tree.unflatten(self.structure, self.numbers)
        if mechanism._compiles_in_pieces(value.tree()):
            # What this draws, nobody sees.
            zeros = (jax.device_put(np.zeros(x.shape, x.dtype)) for x in value.leaves)
            self.noisy_value(key, jax.tree.unflatten(value.structure, zeros))
        else:
            left = compiling(self.compiled.lower(self.numbers, key, value.tree()))

            def note(done: Future[None]) -> None:
                if done.exception() is None:  # Else the next release is refused unpaid, too.
                    self.known.add(kind)

            left.add_done_callback(note)
            return left
        self.known.add(kind)
        return None


def compiling(lowered: jax.stages.Lowered) -> Future[None]:
    """A program that XLA compiles, while Python goes on."""

    def compile_it() -> None:
        lowered.compile()

    pool = ThreadPoolExecutor(1)
    left = pool.submit(compile_it)
    pool.shutdown(wait=False)
    return left


@functools.lru_cache
def _compiled_draw(structure: TreeDef) -> tuple[Any, set[tuple[np.dtype, TreeSpec, np.dtype]]]:
    """The draw of all mechanisms of a structure, and what it is compiled for.

    It is looked up once for each mechanism. To compare the structures of nested dataclasses at
    every call, as `jax.jit` would, takes longer than drawing noise.
    """

    @jax.jit
    def draw(numbers: list[Scalar], key: Key, value: Value) -> Value:
        # Inside another program the numbers may be constants. XLA would fold them in its own way,
        # and round a quotient differently. Behind the barrier every program computes alike.
        mechanism: Drawn = jax.tree.unflatten(structure, lax.optimization_barrier(numbers))
        return mechanism._draw(key_for_each(key, value), value)

    return draw, set()


# By mechanism, and by whether JAX has float64: without it, numbers are rounded outward to float32.
_PREPARED: weakref.WeakKeyDictionary[Drawn, dict[bool, Prepared]] = weakref.WeakKeyDictionary()


def prepared(mechanism: Drawn) -> Prepared:
    """A mechanism, ready to be drawn from; a batch is refused."""
    configuration: Any = jax.config
    x64 = configuration.jax_enable_x64
    if (found := _PREPARED.get(mechanism, {}).get(x64)) is not None:
        return found
    leaves = jax.tree.leaves(mechanism)
    if shapes := {np.shape(leaf) for leaf in leaves} - {()}:
        raise ValueError(
            f"mechanism must be a single one, got a batch of shape {shapes.pop()}: release with"
            " jax.vmap(lambda mechanism, key: mechanism(key, value))(mechanisms, keys)"
        )
    # The draw does not depend on m, gamma or the identity of the samples. Left in, each of them
    # would make a program of its own.
    whole = mechanism.sensitivity
    bare = Sensitivity(
        whole.value, 0.0, 1.0, whole.norm, None, whole.relation, zero_allowed=whole.zero_allowed
    )
    numbers, structure = jax.tree.flatten(changed(mechanism, sensitivity=bare))
    made = Prepared(structure, numbers, *_compiled_draw(structure), set(), {})
    if not any(map(_checks.is_traced, leaves)):
        _PREPARED.setdefault(mechanism, {})[x64] = made
    return made
