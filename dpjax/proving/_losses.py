"""Finds where a proof is loose, by comparing each step's bound with random neighbors.

The *ratio* of a step is its bound divided by the largest change of its result over random
neighbors. So the bound exceeds the true largest change by at most this factor. The *loss* of a step
is its ratio divided by the largest ratio of its operands.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core._bounds import Ball, Bound, Categories, RecordBounds
from dpjax._core._types import Database
from dpjax._tracing._shards import computing_now
from dpjax._tracing._walks import Equation, bind, called, live, parts, run
from dpjax.proving._operations import operation_of
from dpjax.proving._rows import norm_of
from dpjax.proving._walk import Step

Path = tuple[int, ...]
# A value, and the path of the step that computed it. The path is None for inputs and constants.
Traced = tuple[Any, Path | None]
_PAIRS, _MOST_NUMBERS = 256, 2**22
_WORTH_SAYING = 1.5


@dataclasses.dataclass
class Losses:
    """Adds lines to the steps of a proof that say which steps have loose bounds.

    The lines are computed once, when they are first needed.
    """

    jaxpr: jex.Jaxpr
    consts: Sequence[Any]
    specs: Database
    bounds: RecordBounds
    steps: Sequence[Step]
    norm: str
    x64: bool = dataclasses.field(default_factory=lambda: jnp.result_type(float) == jnp.float64)

    def __call__(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        if sum(math.prod(x.shape) for x in jax.tree.leaves(self.specs)) > _MOST_NUMBERS:
            return lines
        moved, operands = self._moved()
        ratios: dict[Path, float] = {}
        said: list[str] = []
        for step, line in zip(self.steps, lines, strict=True):
            said.append(line)
            bound, reached = norm_of([step.value], self.norm), moved.get(step.key, 0.0)
            known = [ratios[key] for key in operands.get(step.key, ()) if key in ratios]
            before = max(known, default=1.0)
            if bound == 0:
                continue
            # If no random neighbor changes the result of a step, the step's own loss is unknown.
            ratios[step.key] = max(1.0, bound / reached) if reached else before
            if (loss := ratios[step.key] / max(1.0, before)) >= _WORTH_SAYING:
                said.append(self._advice(step, loss, reached))
        return tuple(said)

    def _advice(self, step: Step, loss: float, reached: float) -> str:
        name = step.operation.split(":")[0]
        return (
            f"{'  ' * step.depth}^ {name}: up to {loss:.2g}x is lost here, because no random"
            f" neighbors move it by more than {reached:.4g} in {self.norm}: "
            f"{operation_of(name).instead}"
        )

    def _moved(self) -> tuple[dict[Path, float], dict[Path, list[Path]]]:
        """Returns, for each step, its largest change over random neighbors, and its operands.

        The operands are the steps whose results the step reads.
        """
        keys = [step.key for step in self.steps]
        operands: dict[Path, list[Path]] = {}

        def values(database: Database) -> list[jax.Array]:
            found: dict[Path, jax.Array] = {}
            leaves = [(x, None) for x in jax.tree.leaves(database)]
            inputs = leaves * (len(self.jaxpr.invars) // len(leaves))
            _evaluate(self.jaxpr, self.consts, inputs, (), found, operands)
            return [found.get(key, jnp.zeros(())) for key in keys]

        @jax.jit
        def moves(pairs: tuple[Database, Database]) -> jax.Array:
            def one(pair: tuple[Database, Database]) -> jax.Array:
                pairs = zip(values(pair[0]), values(pair[1]), strict=True)
                return jnp.stack([_distance(a, b, self.norm) for a, b in pairs])

            return jax.lax.map(one, pairs).max(0)

        with computing_now(), jax.enable_x64(self.x64):
            found = np.asarray(moves(self._pairs()), float)
        return dict(zip(keys, found.tolist(), strict=True)), operands

    def _pairs(self) -> tuple[Database, Database]:
        """Returns random pairs of neighbors, in which one record is mirrored, zeroed or redrawn."""
        leaves, structure = jax.tree.flatten(self.specs)
        numbers = sum(math.prod(x.shape) for x in leaves)
        count = max(1, min(_PAIRS, _MOST_NUMBERS // numbers))
        rng = np.random.default_rng(0)
        n = leaves[0].shape[0]
        place = np.arange(count), rng.integers(0, n, count)
        first, second = [], []
        for bound, leaf in zip(self.bounds.leaves, leaves, strict=True):
            rows = np.stack([_drawn(rng, bound, leaf, kind % 4) for kind in range(count)])
            other = rows.copy()
            fresh = np.stack([_drawn(rng, bound, leaf, kind // 4 % 2)[0] for kind in range(count)])
            # A third of the new records mirror the old ones, which changes an average the most.
            # Another third are 0, or as close to 0 as the bounds allow.
            if not isinstance(bound, Categories):
                low, high = bound.ends
                fresh[::3] = low + high - rows[place][::3]
                fresh[1::3] = np.clip(0, low, high)
            other[place] = fresh
            first.append(jnp.asarray(rows.astype(leaf.dtype)))
            second.append(jnp.asarray(other.astype(leaf.dtype)))
        return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def _drawn(
    rng: np.random.Generator, bound: Bound, leaf: jax.ShapeDtypeStruct, kind: int
) -> np.ndarray:
    """Returns random records within bounds.

    Args:
        rng: the random generator.
        bound: the bound on the records.
        leaf: the shape and dtype of the records.
        kind: 0 for random records, 1 for random corners of the bounds, 2 for copies of one corner,
            3 for copies of two corners.
    """
    shape = leaf.shape
    if isinstance(bound, Categories):
        rows = rng.choice(bound.values, shape)
    elif isinstance(bound, Ball):
        rows = rng.normal(size=shape)
        rows *= bound.radius / np.sqrt((rows**2).sum(tuple(range(1, len(shape))), keepdims=True))
        rows *= rng.random((shape[0], *(1,) * (len(shape) - 1))) if kind == 0 else 1.0
    else:
        share = rng.random(shape) if kind == 0 else rng.integers(0, 2, shape)
        rows = bound.low + share * (bound.high - bound.low)
        rows = rows if leaf.dtype.kind == "f" else np.floor(rows)
        if bound.missing:
            rows = np.where(rng.random(shape) < 0.25, np.nan, rows)
    if kind == 2:
        rows[:] = rows[0]
    if kind == 3:
        rows = rows[rng.integers(0, min(2, len(rows)), len(rows))]
    return rows


def _distance(a: jax.Array, b: jax.Array, norm: str) -> jax.Array:
    kind = jnp.result_type(float)
    moved = jnp.nan_to_num(jnp.abs(a.astype(kind) - b.astype(kind)), posinf=0.0)
    return jnp.linalg.norm(moved.ravel(), {"l1": 1, "l2": 2, "linf": jnp.inf}[norm])


def _evaluate(
    jaxpr: jex.Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Traced],
    path: Path,
    found: dict[Path, jax.Array],
    operands: dict[Path, list[Path]],
) -> list[Traced]:
    """Evaluates a program, and returns its outputs with the steps that computed them.

    Stores the value and the operands of each step in `found` and `operands`.
    """
    numbers = itertools.count()

    def operation(equation: Equation, given: list[Traced]) -> list[Traced]:
        here = (*path, next(numbers))
        if inner := called(equation):
            outputs = _evaluate(*parts(inner), given, here, found, operands)
        else:
            outputs = [(x, None) for x in bind(equation, equation.params, [x for x, _ in given])]
        keys = [(*here, k) for k in range(len(outputs))]
        for key, (value, _) in zip(keys, outputs, strict=True):
            found[key] = value
            operands[key] = [step for _, step in given if step is not None]
        pairs = zip(keys, outputs, strict=True)
        return [(value, key if source is None else source) for key, (value, source) in pairs]

    program = jex.ClosedJaxpr(jaxpr.replace(eqns=live(jaxpr)), list(consts))
    return run(program, inputs, operation, lambda value: (value, None))
