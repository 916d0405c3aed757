"""What is the same at every release of a mechanism, found at the first one.

To take a mechanism apart and to check it takes longer than to draw. It is frozen, so what holds of
its numbers and of the shapes and dtypes of a value holds for good; of tracers nothing is kept.
"""

import dataclasses
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._values import Sensitivity
from dpjax.random._facade import key_for_each


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The structure of a mechanism without where its sensitivity comes from.

    There is one for each structure, compared by identity: to compare the structures of nested
    dataclasses takes longer than to draw.
    """

    structure: Any  # a PyTreeDef

    def mechanism(self, numbers: list[Any]) -> Any:
        """A mechanism with these leaves."""
        return jax.tree.unflatten(self.structure, numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A mechanism as a program takes it.

    Attributes:
        form: the structure.
        numbers: the leaves.
        accepted: structures, shapes and dtypes of the values that its checks have accepted.
    """

    form: Form
    numbers: list[Any]
    accepted: set[Any]

    def draw(self, key: jax.Array, value: Any) -> Any:
        """The noisy value."""
        if not any(map(_checks.is_traced, (key, *self.numbers, *jax.tree.leaves(value)))):
            mechanism = self.form.mechanism(self.numbers)
            if mechanism._compiles_in_pieces(value):
                # What is computed with arrays rounds as it does in a compiled program.
                return jax.tree.map(jnp.asarray, mechanism)._draw(key, value)
        return _compiled_draw(self.form, self.numbers, key, value)


@functools.partial(jax.jit, static_argnums=0)
def _compiled_draw(form: Form, numbers: list[Any], key: jax.Array, value: Any) -> Any:
    # Inside of another program the numbers may be constants, and a quotient of these be rounded
    # twice: every program computes with them as this one does alone.
    mechanism = form.mechanism(lax.optimization_barrier(numbers))
    return mechanism._draw(key_for_each(key, value), value)


# By mechanism, and by whether JAX has float64: if not, numbers are rounded outward.
_PREPARED: weakref.WeakKeyDictionary[Any, dict[bool, Prepared]] = weakref.WeakKeyDictionary()


def prepared(mechanism: Any) -> Prepared:
    """A mechanism, ready to be drawn from; a batch is refused."""
    configuration: Any = jax.config
    found = _PREPARED.get(mechanism, {}).get(configuration.jax_enable_x64)
    return _prepare(mechanism, configuration.jax_enable_x64) if found is None else found


def _prepare(mechanism: Any, x64: bool) -> Prepared:
    leaves = jax.tree.leaves(mechanism)
    _check_not_a_batch(leaves)
    numbers, structure = jax.tree.flatten(_without_origin(mechanism))
    made = Prepared(_form(structure), numbers, set())
    if not any(map(_checks.is_traced, leaves)):
        _PREPARED.setdefault(mechanism, {})[x64] = made
    return made


@functools.lru_cache
def _form(structure: Any) -> Form:
    return Form(structure)


def _without_origin(mechanism: Any) -> Any:
    """The mechanism without where its sensitivity comes from, which decides nothing in a draw."""
    whole = mechanism.sensitivity
    bare = Sensitivity(
        whole.value, 0.0, 1.0, whole.norm, None, whole.relation, zero_allowed=whole.zero_allowed
    )
    return dataclasses.replace(mechanism, sensitivity=bare)


def _check_not_a_batch(leaves: list[Any]) -> None:
    shapes = {np.shape(leaf) for leaf in leaves} - {()}
    if shapes:
        raise ValueError(
            f"mechanism must be a single one, got a batch of shape {shapes.pop()}: release with"
            " jax.vmap(lambda mechanism, key: mechanism(key, value))(mechanisms, keys)"
        )
