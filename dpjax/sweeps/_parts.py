"""`Part`: the cells for one choice of the static parameters, and the programs that compute them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee
from dpjax._running._devices import Device, fitting
from dpjax._tracing._programs import Program, check_concrete
from dpjax._tracing._walks import Equation, aval, bind, called, equations, parts, run
from dpjax.random._chacha20 import generates_words
from dpjax.random._keys import forwards_key
from dpjax.sweeps._axes import Axis, Output, fingerprint_of_cell, outputs_of, words_of_cells

_RANDOM = frozenset(("random_bits", "random_fold_in", "random_split"))
# A random draw of at most `_MOST_VALUES` values gets a separate program. A larger draw does not,
# because its result would need additional memory. If there are more than `_MOST_DRAWS` small draws,
# none gets a separate program, because hundreds of small programs take longer to compile.
_MOST_VALUES, _MOST_DRAWS = 2**14, 16


class Cut(NamedTuple):
    """A program that takes a key and values, split into a program for each random draw and a rest.

    Attributes:
        draws: for each draw, a program that takes the key.
        rest: a program that takes the key, the values, and the results of all draws.
    """

    draws: tuple[Program, ...]
    rest: Program


class _Value:
    """An input, a constant or a result of a program."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """An equation of a program, with its inputs and outputs."""

    equation: Equation
    operands: list[_Value]
    outputs: list[_Value]


def cut_at_draws(program: Program) -> Cut:
    """Splits off the small random draws of a program whose inputs are a key and values.

    Without cuts, each choice of static parameters would compile ChaCha20 and the noise tables
    again. A sweep has one program for each choice. The cuts of a program depend only on this
    program. So the bits of its results do not depend on the other choices in the sweep.
    """
    return Cut((), program) if program.calls_host else _Walked(program).cut()


class _Walked:
    """Walks through the equations of a program. Inlines calls of functions that draw."""

    def __init__(self, program: Program):
        self.program = program
        self._steps = list[_Step]()
        self._constants = dict[_Value, Any]()
        self._inputs = [_Value() for _ in program.jaxpr.jaxpr.invars]
        self._outputs = run(program.jaxpr, self._inputs, self._walk, self._constant)

    def cut(self) -> Cut:
        """Returns the draws that the outputs need, and the rest of the program."""
        draws = [step for step in self._from_key() if self._is_small(step)]
        needed = self._needed(self._outputs, [value for step in draws for value in step.outputs])
        draws = [step for step in draws if not needed.isdisjoint(step.outputs)]
        # A program with effects is never cut, because it may write to arrays that are not among its
        # outputs.
        if not 0 < len(draws) <= _MOST_DRAWS or any(step.equation.effects for step in self._steps):
            return Cut((), self.program)

        def rest(key: Key, values: PyTree, *drawn: list[jax.Array]) -> PyTree:
            known = dict(zip(self._inputs, jax.tree.leaves((key, values)), strict=True))
            for step, arrays in zip(draws, drawn, strict=True):
                known.update(zip(step.outputs, _with_keys(key, step, arrays), strict=True))
            leaves = self._evaluated(self._outputs, known)
            return jax.tree.unflatten(self.program.outputs.structure, leaves)

        programs = tuple(map(self._program, draws))
        inputs = *self.program.inputs.tree(), *(draw.outputs.tree() for draw in programs)
        # `Program.trace` is not called here, because the whole program was already checked.
        jaxpr = jax.make_jaxpr(rest)(*inputs)
        left = dataclasses.replace(self.program, jaxpr=jaxpr, inputs=TreeSpec.of(inputs))
        return Cut(programs, left)

    def _walk(self, equation: Equation, operands: list[_Value]) -> list[_Value]:
        inner = called(equation)
        if inner and any(_is_random(x) or forwards_key(x) for x in equations(parts(inner)[0])):
            return run(inner, operands, self._walk, self._constant)
        if forwards_key(equation):
            return operands[:1]
        self._steps.append(_Step(equation, operands, [_Value() for _ in equation.outvars]))
        return self._steps[-1].outputs

    def _constant(self, known: Any) -> _Value:
        value = _Value()
        self._constants[value] = known
        return value

    def _from_key(self) -> list[_Step]:
        """Returns the random operations that depend only on the key and on constants."""
        found, known, from_key = list[_Step](), {*self._constants}, {self._inputs[0]}
        for step in self._steps:
            if others := {operand for operand in step.operands if operand not in known}:
                if others <= from_key:
                    from_key.update(step.outputs)
                    found += [step] if _is_random(step.equation) else []
            else:
                known.update(step.outputs)
        return found

    def _is_small(self, step: _Step) -> bool:
        """Whether a step draws few numbers or keys, and the keys are of the input key's kind."""
        drawn, kind = [*map(aval, step.equation.outvars)], self.program.inputs.leaves[0].dtype
        kinds = {x.dtype for x in drawn if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}
        return kinds <= {kind} and 0 < sum(x.size for x in drawn) <= _MOST_VALUES

    def _program(self, step: _Step) -> Program:
        def draw(key: Key) -> list[jax.Array]:
            return _as_words(step, self._evaluated(step.outputs, {self._inputs[0]: key}))

        key, _ = self.program.inputs.tree()
        return Program.trace("function", draw, key)

    def _needed(self, wanted: Sequence[_Value], known: Collection[_Value]) -> set[_Value]:
        """Returns all values that are needed to compute `wanted` from `known`."""
        needed, ends = set(wanted), set(known)
        for step in reversed(self._steps):
            if any(value in needed and value not in ends for value in step.outputs):
                needed.update(step.operands)
        return needed

    def _evaluated(self, wanted: Sequence[_Value], known: Mapping[_Value, Any]) -> list[Any]:
        values, needed = {**self._constants, **known}, self._needed(wanted, known)
        for step in self._steps:
            if needed.isdisjoint(step.outputs) or step.outputs[0] in values:
                continue
            operands = [values[operand] for operand in step.operands]
            outputs = bind(step.equation, step.equation.params, operands)
            values.update(zip(step.outputs, outputs, strict=True))
        return [values[value] for value in wanted]


def _is_random(equation: Equation) -> bool:
    return equation.primitive.name in _RANDOM or generates_words(equation)


def _is_key(variable: Any) -> bool:
    return jnp.issubdtype(aval(variable).dtype, jax.dtypes.prng_key)


def _as_words(step: _Step, drawn: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of a draw, with keys as words: a program cannot return keys."""
    outputs = zip(drawn, step.equation.outvars, strict=True)
    return [jax.random.key_data(x) if _is_key(variable) else x for x, variable in outputs]


def _with_keys(key: Key, step: _Step, drawn: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of a draw. Words of keys become keys of the same kind as `key`."""
    wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    outputs = zip(drawn, step.equation.outvars, strict=True)
    return [wrap(x) if _is_key(variable) else x for x, variable in outputs]


# An interruption loses the work of about one of `_CHUNKS` chunks. Chunks of fewer than
# `_LEAST_CELLS` cells would be inefficient.
_CHUNKS, _LEAST_CELLS = 16, 64
_LEAST = 2  # XLA compiles a batch of one cell in another way, with different rounding.


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The cells for one choice of the static parameters.

    Attributes:
        name: the name of the part, for messages.
        fingerprint: the fingerprint of the choice.
        program: maps a key and the traced parameters to the outputs.
        outputs: the outputs of a cell.
        words: uint32 of shape (cells, 5). Row i contains the words that are folded into the key of
            cell i. From cell to cell, the repeat varies fastest, then the last traced parameter.
    """

    name: str
    fingerprint: str
    program: Program
    outputs: tuple[Output, ...]
    words: np.ndarray

    def __len__(self) -> int:
        return len(self.words)

    @functools.cached_property
    def cut(self) -> Cut:
        """Returns the program, split into a program for each small random draw and the rest."""
        return cut_at_draws(self.program)

    @property
    def relation(self) -> str | None:
        """Returns the neighboring relation of the guarantees that the function returns.

        It is None if there are no guarantees or their relations differ.
        """

        def is_guarantee(node: object) -> bool:
            return isinstance(node, Guarantee)

        nodes = jax.tree.leaves(self.program.outputs.tree(), is_leaf=is_guarantee)
        relations = {node.neighbors for node in nodes if is_guarantee(node)}
        return relations.pop() if len(relations) == 1 else None

    def default_chunk_size(self, device: Device | None) -> int:
        """Returns the number of cells in a chunk: a power of two.

        It depends on the memory of the device and on the number of cells.
        """
        share = -(-len(self) // _CHUNKS)
        by_share, by_all = (2 ** (max(x, 1) - 1).bit_length() for x in (share, len(self)))
        most = min(max(_LEAST_CELLS, by_share), max(_LEAST, by_all))
        return min(most, fitting(self.program.largest_array, device))


def parts_of(
    function: Callable[..., PyTree],
    key: Key,
    traced: Sequence[Axis],
    static: Sequence[Axis],
    repeats: int,
) -> list[Part]:
    """Traces all parts before any cell is computed.

    Raises an error if the outputs of two parts differ in names, shapes or dtypes.
    """
    parts = [
        _trace(function, key, traced, static, choice, repeats)
        for choice in itertools.product(*(range(len(axis)) for axis in static))
    ]
    for part in parts:
        part.program.check_unchanged("function")
    for part in parts[1:]:
        if part.outputs != parts[0].outputs:
            raise ValueError(
                "function must return arrays of the same names, shapes and dtypes for all choices"
                f" of static parameters, got ({', '.join(map(str, parts[0].outputs))}) at"
                f" {parts[0].name} and ({', '.join(map(str, part.outputs))}) at {part.name}"
            )
    return parts


def _trace(
    function: Callable[..., PyTree],
    key: Key,
    traced: Sequence[Axis],
    static: Sequence[Axis],
    choice: tuple[int, ...],
    repeats: int,
) -> Part:
    places = list(zip(static, choice, strict=True))
    chosen = {axis.name: axis.values[i] for axis, i in places}
    known = {axis.name: axis.fingerprints[i] for axis, i in places}

    def of_a_cell(key: Key, values: dict[str, PyTree]) -> PyTree:
        return function(key, **chosen, **values)

    key_spec = jax.ShapeDtypeStruct((), key.dtype)
    values = {axis.name: axis.spec_of_value() for axis in traced}
    program = Program.trace("function", of_a_cell, key_spec, values)
    check_concrete("function", "call sweep", program)
    # For the next part, the function runs again, which may change an array that the function closes
    # over. So the program of this part is hashed now.
    _ = program.fingerprint
    names = sorted([*(axis.name for axis in traced), *known])
    cells = list[bytes]()
    for point in itertools.product(*(axis.fingerprints for axis in traced)):
        of_cell = known | dict(zip((axis.name for axis in traced), point, strict=True))
        cells.append(fingerprint_of_cell(of_cell[name] for name in names))
    return Part(
        ", ".join(f"{axis.name}={axis.coordinates[axis.name][i]}" for axis, i in places),
        fingerprint_of_cell(known[name] for name in sorted(known)).hex(),
        program,
        outputs_of(program.outputs),
        words_of_cells(cells, np.arange(repeats)),
    )
