"""Some rows of what a program returns, computed from the rows they depend on.

An oracle draws n + 1 records, and a sum over records moves by two of them. Most operations that
make records treat every row alike, and the bits of a counter-based generator can be had at any
place: so two rows cost what two rows cost. Where an operation is not known to treat rows alike, all
of its rows are computed, and two are taken.
"""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._programs import Program
from dpjax.sensitivity._row_rules import RULES, Rows, run

_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"))
_CONTROL = frozenset(("while", "scan", "cond"))


def treats_rows(program: Program) -> bool:
    """Whether every operation can be run one by one here: an unknown kind of call cannot."""

    def known(jaxpr: Any) -> bool:
        return all(
            not (inner := list(jex.jaxprs_in_params(equation.params)))
            or equation.primitive.name in _CONTROL
            or (equation.primitive.name in _CALLS and all(map(known, inner)))
            for equation in jaxpr.eqns
        )

    return known(program.jaxpr.jaxpr)


def rows_of(program: Program, rows: jax.Array, *arguments: Any) -> Any:
    """The same pytree that the program returns, with these rows of all of its arrays.

    Args:
        program: returns arrays with a common leading axis.
        rows: int32, shape (r,), in range.
        *arguments: of the program.

    Returns:
        Arrays with leading axis r: the same numbers, to rounding.
    """
    inputs = [_Known(x) for x in jax.tree.leaves(arguments)]
    outputs = _build(program.jaxpr.jaxpr, program.jaxpr.consts, inputs)
    chosen = Rows(rows)
    return jax.tree.unflatten(program.outputs.structure, [x.rows(chosen) for x in outputs])


class _Known:
    """An array that is there."""

    def __init__(self, value: Any):
        self._value = value
        self.shape = np.shape(value)

    def full(self) -> Any:
        return self._value

    def rows(self, rows: Rows) -> Any:
        return jnp.asarray(self._value).at[rows.indices].get(mode="promise_in_bounds")


class _Output:
    """One output of an operation, computed when it is asked for: whole, or some rows of it."""

    def __init__(self, operation: "_Operation", place: int):
        self._operation, self._place = operation, place
        self.shape = operation.equation.outvars[place].aval.shape

    def full(self) -> Any:
        return self._operation.full()[self._place]

    def rows(self, rows: Rows) -> Any:
        found = self._operation.rows(rows)
        if found is not None:
            return found[self._place]
        return _Known(self.full()).rows(rows)


class _Operation:
    """One line of a program, with its operands."""

    def __init__(self, equation: Any, operands: list[Any]):
        self.equation, self.operands = equation, operands
        self._rows: dict[Rows, list[Any] | None] = {}
        self._full: list[Any] | None = None

    def full(self) -> list[Any]:
        """All rows of all outputs."""
        if self._full is None:
            self._full = run(self.equation, [x.full() for x in self.operands])
        return self._full

    def rows(self, rows: Rows) -> list[Any] | None:
        """Some rows of all outputs; None where the operation may not treat rows alike."""
        if rows not in self._rows:
            rule = RULES.get(self.equation.primitive.name)
            self._rows[rows] = None if rule is None else rule(self.equation, self.operands, rows)
        return self._rows[rows]


def _build(jaxpr: Any, constants: Any, inputs: list[Any]) -> list[Any]:
    nodes: dict[Any, Any] = {v: _Known(x) for v, x in zip(jaxpr.constvars, constants, strict=True)}
    nodes.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return _Known(np.asarray(atom.val, _dtype(atom)))
        return nodes[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            outputs = _build(inner.jaxpr, inner.consts, operands)
        else:
            operation = _Operation(equation, operands)
            outputs = [_Output(operation, i) for i in range(len(equation.outvars))]
        nodes.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype
