"""Parts of a program that compute a known function of one variable.

JAX traces `jax.nn.softmax` and others into the operations of their caller. So a lemma compares the
operations between two variables with those of the function, traced anew on the same shape. Both
must have one fingerprint; names of functions play no part.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.extend.core as jex
import numpy as np

from dpjax._tracing._fingerprints import digest
from dpjax._tracing._walks import Atom, Equation, called, live, parts

_DEPTH = 16


class Program:
    """The operations of a program, by the variables that they compute."""

    def __init__(self, jaxpr: jex.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.made = {v: (k, e) for k, e in enumerate(jaxpr.eqns) for v in e.outvars}

    def definition(self, atom: Atom) -> Equation | None:
        """The operation that computes a variable; None for inputs, constants and literals."""
        found = self.made.get(atom) if isinstance(atom, jex.Var) else None
        return None if found is None else found[1]

    def sources(self, atom: Atom, name: str) -> Iterator[Equation]:
        """The operations of one name that a variable is computed from, within a few steps."""
        seen, front = set[int](), [atom]
        for _ in range(_DEPTH):
            made = [e for e in map(self.definition, front) if e is not None and id(e) not in seen]
            seen.update(map(id, made))
            yield from (e for e in made if e.primitive.name == name)
            front = [x for e in made for x in e.invars]

    def between(self, start: jex.Var, end: jex.Var) -> jex.Jaxpr | None:
        """The program from one variable to another; None if it needs anything else."""
        needed, places = {end}, set[int]()
        while needed:
            variable = needed.pop()
            if variable not in self.made:
                return None
            place, equation = self.made[variable]
            if place not in places:
                places.add(place)
                needed |= {x for x in equation.invars if isinstance(x, jex.Var)} - {start}
            if len(places) > _DEPTH:
                return None
        return jex.Jaxpr(
            constvars=[],
            invars=[start],
            outvars=[end],
            eqns=[self.jaxpr.eqns[k] for k in sorted(places)],
            effects=self.jaxpr.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )


def is_program_of(
    function: Callable[..., jax.Array],
    part: jex.Jaxpr | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    **static: object,
) -> bool:
    """Whether a part of a program has the fingerprint of a function of an array."""
    if part is None:
        return False
    with jax.default_matmul_precision("highest"):
        spec = jax.ShapeDtypeStruct(shape, dtype)
        whole = jax.make_jaxpr(functools.partial(function, **static))(spec).jaxpr
    while len(whole.eqns) == 1 and (inner := called(whole.eqns[0])):  # It is compiled on its own.
        whole, _ = parts(inner)
    names = [[e.primitive.name for e in live(jaxpr)] for jaxpr in (part, whole)]
    return names[0] == names[1] and digest(part) == digest(whole)
