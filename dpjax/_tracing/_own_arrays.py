"""Copies of the arrays in a jaxpr, so that a traced program cannot change after it was traced.

A jaxpr contains references to the arrays that its function closes over. If a caller changed such
an array, the program would compute something else, but its fingerprint would stay the same. So a
`Program` has copies of these arrays.

Without x64, JAX converts 64-bit NumPy arrays. It caches the result by the `id` of the array, as
long as a jaxpr refers to the array. So if the caller changed the array, later traces would use
the old numbers from this cache. To prevent this, a `Program` refers to a view of the caller's
array, not to the array itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._tracing._walks import Atom, Equation, aval, parts


def with_own_arrays(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns the jaxpr with copies of all its arrays, which no other code can change.

    A jaxpr or inner jaxpr without arrays is returned as the same object, because JAX's caches use
    jaxprs as keys.
    """
    return _Copies(_copy).of(program)


def with_views(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns the jaxpr with views of its NumPy arrays, which show later changes of the arrays."""
    return _Copies(_view).of(program)


class _Copies:
    """Copies the arrays in a jaxpr. An array that occurs several times is copied only once."""

    def __init__(self, copy: Callable[[Any], Any]):
        self._copy = copy
        self._made = dict[int, tuple[Any, Any]]()

    def of(self, value: Any) -> Any:
        """Returns `value`, with copies of all arrays in it.

        `value` is a jaxpr, a parameter of an operation, or an array.
        """
        if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
            return self._once(value, self._program)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(x is y for x, y in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, (np.ndarray, jax.Array)) and not _checks.is_traced(value):
            return self._once(value, self._copy)
        return value

    def _once(self, value: Any, copy: Callable[[Any], Any]) -> Any:
        if id(value) not in self._made:
            # A reference to the value keeps it alive, so that no other object can get the same
            # `id`.
            self._made[id(value)] = value, copy(value)
        return self._made[id(value)][1]

    def _program(self, program: Any) -> Any:
        jaxpr, constants = parts(program)
        equations = [self._equation(equation) for equation in jaxpr.eqns]
        outputs = [self._atom(atom) for atom in jaxpr.outvars]
        own = [self.of(constant) for constant in constants]
        old = [*jaxpr.eqns, *jaxpr.outvars, *constants]
        if all(x is y for x, y in zip([*equations, *outputs, *own], old, strict=True)):
            return program
        copied = jaxpr.replace(eqns=equations, outvars=outputs)
        return jex.ClosedJaxpr(copied, own) if isinstance(program, jex.ClosedJaxpr) else copied

    def _equation(self, equation: Equation) -> Equation:
        inputs = [self._atom(atom) for atom in equation.invars]
        parameters = {name: self.of(value) for name, value in equation.params.items()}
        same = all(x is y for x, y in zip(inputs, equation.invars, strict=True))
        if same and all(parameters[name] is x for name, x in equation.params.items()):
            return equation
        return equation.replace(invars=inputs, params=parameters)

    def _atom(self, atom: Atom) -> Atom:
        if not isinstance(atom, jex.Literal):
            return atom
        own = self.of(atom.val)
        return atom if own is atom.val else jex.Literal(own, aval(atom))


def _view(array: Any) -> Any:
    """Returns a view of a NumPy array.

    A view shares the memory of the array. But it is a different object, so JAX's cache of converted
    arrays has no entry for it.
    """
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        own = array.copy()
        own.flags.writeable = False
        return own
    # Arrays of keys need no copy, because they cannot be changed in place.
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    with jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True)
