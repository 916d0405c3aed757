"""Traced programs whose arrays are their own.

JAX keeps the arrays that a function closes over by reference, and finds compiled programs by
fingerprints. Somebody who writes to such an array would change what is compiled later, for another
device or inside of another program, though not the fingerprint.

An array of NumPy that JAX has to convert (of 64 bits, without x64) is converted once, and found by
its address for as long as anybody holds what was made of it. Who keeps a traced program keeps the
old numbers for all programs that are traced later. So here nobody keeps one.
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
    """The same program with copies of all arrays in it, which nobody else can write to.

    It is the same object where there are none, and so are inner programs, because JAX keeps what it
    knows of programs by the object.
    """
    return _Copies(_copy).of(program)


def with_views(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with views of the arrays of NumPy in it: they show what is written to them.

    JAX finds a converted array as long as itself is held, not its memory.
    """
    return _Copies(_view).of(program)


class _Copies:
    """Copies, each once: what two places share they go on sharing."""

    def __init__(self, copy: Callable[[Any], Any]):
        self._copy = copy
        self._made = dict[int, tuple[Any, Any]]()

    def of(self, value: Any) -> Any:
        """A program, a parameter of an operation or an array, with copies of all arrays in it."""
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
            self._made[id(value)] = value, copy(value)  # Alive, so no other has its address.
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
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        own = array.copy()
        own.flags.writeable = False
        return own
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # Keys are copied when they are made.
        return array
    with jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True)
