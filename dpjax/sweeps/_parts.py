"""The parts of a sweep: one for each choice of the static parameters, each with its program."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee
from dpjax._running._layout import Device
from dpjax._running._memory import fitting
from dpjax._tracing._programs import Program
from dpjax.sweeps._axes import Axis
from dpjax.sweeps._cell_keys import fingerprint_of_cell, words_of_cells
from dpjax.sweeps._cut import Cut, cut_at_draws
from dpjax.sweeps._outputs import Output, outputs_of

# An interruption should lose at most one of this many chunks. Smaller chunks than this are slow.
_CHUNKS, _LEAST_CELLS = 16, 64
_LEAST = 2  # XLA compiles a batch of one to a different program, which rounds differently.


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The cells of one choice of the static parameters.

    Attributes:
        name: of the part, for messages.
        fingerprint: of the choice.
        program: maps a key and the traced parameters to the outputs.
        outputs: of a cell.
        words: to fold into the key, for every cell. The repeat moves fastest, then the last of the
            traced parameters, in the given order.
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
        """The program in the pieces that chunks run."""
        return cut_at_draws(self.program)

    @property
    def relation(self) -> str | None:
        """The neighboring relation of the guarantees that the function returns, if it is one."""

        def is_guarantee(node: object) -> bool:
            return isinstance(node, Guarantee)

        nodes = jax.tree.leaves(self.program.outputs.tree(), is_leaf=is_guarantee)
        relations = {str(node.relation) for node in nodes if is_guarantee(node)}
        return relations.pop() if len(relations) == 1 else None

    def default_chunk_size(self, device: Device | None) -> int:
        """Cells in a chunk: a power of two, by memory and by the number of cells."""
        parts = max(_LEAST_CELLS, _power_of_two(len(self) / _CHUNKS))
        most = min(parts, max(_LEAST, _power_of_two(len(self))))
        return min(most, fitting(self.program.largest_array, device))


def parts_of(
    function: Callable[..., PyTree],
    key: Key,
    traced: Sequence[Axis],
    static: Sequence[Axis],
    repeats: int,
) -> list[Part]:
    """Traces all parts, and refuses outputs that differ, before any cell is computed."""
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
    chosen = {axis.name: axis.values[i] for axis, i in zip(static, choice, strict=True)}
    labels = {
        axis.name: axis.coordinates[axis.name][i] for axis, i in zip(static, choice, strict=True)
    }

    def of_a_cell(key: Key, values: dict[str, PyTree]) -> PyTree:
        return function(key, **chosen, **values)

    key_spec = jax.ShapeDtypeStruct((), key.dtype)
    values = {axis.name: axis.spec_of_value() for axis in traced}
    program = Program.trace("function", of_a_cell, key_spec, values)
    if not program.is_concrete:
        raise TypeError("function closes over a traced value, but sweep runs on the host")
    _ = program.fingerprint  # Now: tracing the next part may write to what this one closes over.
    known = {axis.name: axis.fingerprints[i] for axis, i in zip(static, choice, strict=True)}
    return Part(
        ", ".join(f"{name}={label}" for name, label in labels.items()),
        fingerprint_of_cell(known[name] for name in sorted(known)).hex(),
        program,
        outputs_of(program.outputs),
        _words(traced, known, repeats),
    )


def _words(traced: Sequence[Axis], known: dict[str, bytes], repeats: int) -> np.ndarray:
    names = [*(axis.name for axis in traced), *known]
    by_name = sorted(range(len(names)), key=lambda i: names[i])
    grid = itertools.product(*(axis.fingerprints for axis in traced))
    static = tuple(known.values())
    cells = [fingerprint_of_cell((point + static)[i] for i in by_name) for point in grid]
    return words_of_cells(cells, np.arange(repeats))


def _power_of_two(number: float) -> int:
    """The least power of two that is not below a number."""
    return 2 ** max(0, (int(np.ceil(number)) - 1).bit_length())
