"""A mechanism in the form that compiled programs take, made at its first release and kept.

Taking a mechanism apart and checking a value takes longer than drawing noise. A mechanism is
frozen, so this work is done once. Nothing is kept of a mechanism that holds tracers: they live no
longer than their trace.
"""

import dataclasses
import functools
import weakref
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Scalar, TreeDef, Value
from dpjax._core._values import Sensitivity
from dpjax.random._facade import key_for_each


class Drawn(Protocol):
    """The part of a mechanism that noise is drawn with; a frozen pytree."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def sensitivity(self) -> Sensitivity: ...

    def _draw(self, key: Key, value: Value) -> Value: ...

    def _compiles_in_pieces(self, value: Value) -> bool: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The structure of a mechanism without the origin of its sensitivity.

    Each structure has one form, and forms are compared by identity. Comparing the structures of
    nested dataclasses takes longer than drawing noise.
    """

    structure: TreeDef

    def holding(self, numbers: list[Scalar]) -> Drawn:
        """A mechanism with these leaves."""
        return jax.tree.unflatten(self.structure, numbers)


_form = functools.lru_cache(Form)


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A mechanism in the form that a program takes.

    Attributes:
        form: the structure.
        numbers: the leaves.
        accepted: structures, shapes and dtypes of the values that its checks have accepted.
        accuracies: how far releases of such values may be off.
    """

    form: Form
    numbers: list[Scalar]
    accepted: set[PyTree]
    accuracies: dict[TreeSpec, Accuracy]

    def noisy_value(self, key: Key, value: Value) -> Value:
        """The value of a release."""
        if not any(map(_checks.is_traced, (key, *self.numbers, *jax.tree.leaves(value)))):
            mechanism = self.form.holding(self.numbers)
            if mechanism._compiles_in_pieces(value):
                # Arithmetic on arrays rounds as compiled programs do; Python floats would not.
                return jax.tree.map(jnp.asarray, mechanism)._draw(key, value)
        return _compiled_draw(self.form, self.numbers, key, value)


@functools.partial(jax.jit, static_argnums=0)
def _compiled_draw(form: Form, numbers: list[Scalar], key: Key, value: Value) -> Value:
    # Inside another program the numbers may be constants. XLA would fold them in its own way, and
    # round a quotient differently. Behind the barrier every program computes with them alike.
    mechanism = form.holding(lax.optimization_barrier(numbers))
    return mechanism._draw(key_for_each(key, value), value)


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
    numbers, structure = jax.tree.flatten(dataclasses.replace(mechanism, sensitivity=bare))
    made = Prepared(_form(structure), numbers, set(), {})
    if not any(map(_checks.is_traced, leaves)):
        _PREPARED.setdefault(mechanism, {})[x64] = made
    return made
