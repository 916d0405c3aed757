"""Reads how a variable of a program was computed, for lemmas about several operations."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import JITS, Atom, Equation, aval, called, parts
from dpjax.proving._value import Abstract

# Searches go backward from a variable: `Scope` by at most `_DEPTH` operations, and `Reader` by at
# most `MOST_STEPS`.
_DEPTH, MOST_STEPS = 16, 40


@dataclasses.dataclass(eq=False)
class Scope:
    """A program: the operation that computes each variable, and the abstract value of it.

    Attributes:
        jaxpr: the program.
        values: the abstract values so far; None for operations that were refused. The values in an
            inner program are not known.
        inputs: for an inner program, the variables that its caller passes.
    """

    jaxpr: jex.Jaxpr
    values: Mapping[jex.Var, Abstract | None] = dataclasses.field(default_factory=dict)
    inputs: "Mapping[jex.Var, At]" = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made = {v: e for e in self.jaxpr.eqns for v in e.outvars}

    def definition(self, atom: Atom) -> Equation | None:
        """Returns the operation that computes a variable; None for inputs and literals."""
        return self.made.get(atom) if isinstance(atom, jex.Var) else None

    def value(self, atom: Atom) -> Abstract | None:
        """Returns the abstract value of a variable; None for literals and refused operations."""
        found = self.values.get(atom) if isinstance(atom, jex.Var) else None
        return None if found is None or found.refusal else found

    def sources(self, atom: Atom, name: str) -> Iterator[Equation]:
        """Yields the operations of this name that a variable depends on.

        The search goes back at most `_DEPTH` operations.
        """
        seen, front = set[int](), [atom]
        for _ in range(_DEPTH):
            made = [e for e in map(self.definition, front) if e is not None and id(e) not in seen]
            seen.update(map(id, made))
            yield from (e for e in made if e.primitive.name == name)
            front = [x for e in made for x in e.invars]

    def between(self, start: Atom, end: Atom) -> jex.Jaxpr | None:
        """Returns the program that computes `end` from `start`; None if it needs other inputs."""
        needed, chosen = {end}, set[int]()
        while needed:
            equation = self.definition(needed.pop())
            if equation is None:
                return None
            if id(equation) not in chosen:
                chosen.add(id(equation))
                # The search stops at `start`. If it reaches another input, which no operation
                # computes, the result is None.
                needed |= {x for x in equation.invars if isinstance(x, jex.Var)} - {start}
            if len(chosen) > _DEPTH:
                return None
        return self.jaxpr.replace(
            constvars=[],
            invars=[start],
            outvars=[end],
            eqns=[e for e in self.jaxpr.eqns if id(e) in chosen],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )


At: TypeAlias = tuple[Atom, Scope]


class Node(NamedTuple):
    """A variable, with the operation that computes it, if there is one."""

    atom: Atom
    scope: Scope
    equation: Any = None

    @property
    def name(self) -> str:
        return "" if self.equation is None else self.equation.primitive.name

    @property
    def operands(self) -> list[At]:
        return [(atom, self.scope) for atom in self.equation.invars]


@dataclasses.dataclass
class Reader:
    """Reads a program backward, from a variable to the variables that it was computed from.

    Attributes:
        root: the program.
        steps: how many operations the reader has passed. It stops after `MOST_STEPS` of them.
            Lemmas use this limit to bound the rounding error.
    """

    root: Scope
    steps: int = 0

    def node(self, at: At) -> Node:
        """Returns the operation that computes a variable, even if it is in an inner program."""
        atom, scope = at
        while True:
            self.steps += 1
            if isinstance(atom, jex.Literal) or self.steps > MOST_STEPS:
                return Node(atom, scope)
            if atom in scope.inputs:
                atom, scope = scope.inputs[atom]
                continue
            equation = scope.definition(atom)
            if equation is None or equation.primitive.name not in JITS:
                return Node(atom, scope, equation)
            inner, consts = parts(called(equation))
            if consts:  # The values of the constants in the inner program are not known here.
                return Node(atom, scope)
            outer = [(operand, scope) for operand in equation.invars]
            scope = Scope(inner, inputs=dict(zip(inner.invars, outer, strict=True)))
            atom = inner.outvars[equation.outvars.index(atom)]

    def number(self, at: At) -> float | None:
        """Returns the public number that all entries of an array are equal to; otherwise None."""
        node = self.node(at)
        if isinstance(node.atom, jex.Literal):
            literal = np.asarray(node.atom.val, aval(node.atom).dtype)
            return float(literal) if literal.ndim == 0 else None
        known = node.scope.value(node.atom)
        if known is not None and known.is_known:
            first = float(known.low.flat[0])
            return first if (known.low == first).all() else None
        if node.name not in ("convert_element_type", "broadcast_in_dim"):
            return None
        # A cast to float rounds the number. The error bounds of lemmas include this rounding. A
        # cast to an integer may turn 1.9 into 1.
        dtype = np.dtype(aval(node.equation.outvars[0]).dtype)
        number = self.number(node.operands[0])
        is_float = dtype.kind == "f" and dtype.itemsize >= 4
        return number if is_float or number is None or _is_kept(number, dtype) else None


def _is_kept(number: float, dtype: np.dtype) -> bool:
    """Whether a cast to an integer dtype keeps the number, which is below 2^53."""
    if dtype.kind not in "iu" or abs(number) >= 2**53 or not number.is_integer():
        return False
    return np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
