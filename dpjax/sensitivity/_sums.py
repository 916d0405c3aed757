"""Targets f(D) = finish(sum over records of a statistic), with a shortcut for their distances.

If `finish` is affine, the distance depends only on two records: the replaced record and its
replacement.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Norm
from dpjax._exact._grid import average
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax._tracing._evaluate import vmapped
from dpjax._tracing._programs import Program
from dpjax._tracing._walks import Equation, aval, bind, called, names, run, specs
from dpjax.sensitivity._norms import difference, distance, length

_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
# Primitives that move or copy the elements of their operand, without arithmetic.
_MOVES = names("reshape broadcast_in_dim transpose slice rev squeeze expand_dims copy copy_p")
# Primitives that add or negate the elements of their operand.
_LINEAR = names("reduce_sum cumsum neg")
# Primitives that add, subtract or concatenate several operands.
_SUMS = names("add sub add_any concatenate")
# Primitives that select elements of their first operand, at indices given by the other operands.
_CHOICES = names("gather dynamic_slice")
# An array, and a flag that is True if the array depends on the inputs of the program. If the flag
# is True, the value is an affine function of the inputs, and the array contains only the linear
# part of this function.
_Known: TypeAlias = tuple[jax.Array, bool]


def sum_of_rows(x: jax.Array) -> jax.Array:
    """Sums over the leading axis. Integers that are too narrow for `jnp.sum` are widened."""
    wider = _WIDER.get(x.dtype.name)
    return jnp.sum(x if wider is None else x.astype(wider), axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Summable:
    """A target f(D) = finish(sum of statistic(record)), made by `dpjax.targets.summable`.

    Attributes:
        statistic: maps one record, a pytree without the leading axis, to a pytree of real arrays.
        finish: maps the sum of the statistics, or their average, to the value.
        average: whether the sum is divided by the number of records first.
        largest: None, or a public bound on the magnitudes of all statistics. With a bound,
            statistics must be floats and be averaged, and their sum is exact. The bound must
            broadcast to the shape of the statistic.

    Formal guarantees:
        A sum ignores the order of the records: exactly if `largest` is given, otherwise up to
        rounding.
    """

    statistic: Callable[[PyTree], PyTree]
    finish: Callable[[PyTree], Value]
    average: bool
    largest: PyTree = None

    def __call__(self, database: Database) -> Value:
        """The value on a database, a pytree of arrays with leading axis n."""
        statistics = vmapped(self.statistic, database)
        if self.largest is not None:
            return self.finish(jax.tree.map(lambda x: average(x, self.largest), statistics))
        total = jax.tree.map(sum_of_rows, statistics)
        return self.finish_sum(total, len(jax.tree.leaves(database)[0]))

    def finish_sum(self, total: PyTree, n: int) -> Value:
        """Computes the value from the sum over n records."""
        if self.average:
            total = jax.tree.map(lambda x: x / n, total)
        return self.finish(total)


@dataclasses.dataclass(frozen=True)
class SumOfRecords:
    """The traced parts of a target: the statistic of a record, and the function of the sum.

    Attributes:
        statistic: maps a record to an array.
        finish: maps the sum over all n records to the value.
        affine: whether finish is affine. If so, a distance depends only on the two records that
            differ.
        n: number of records.
    """

    statistic: Program
    finish: Program
    affine: bool
    n: int

    @classmethod
    def trace(cls, target: Summable, database: Database) -> "SumOfRecords":
        """Traces the statistic of a record, and the function of the sum, for these shapes."""
        n = jax.tree.leaves(database)[0].shape[0]
        record = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), database)
        statistic = Program.trace("statistic", target.statistic, record)
        rows = (x.update(shape=(n, *x.shape)) for x in specs(statistic.jaxpr.out_avals))
        sums = [jax.eval_shape(sum_of_rows, x) for x in rows]
        total = jax.tree.unflatten(statistic.outputs.structure, sums)
        finish = Program.trace("finish", lambda total: target.finish_sum(total, n), total)
        return cls(statistic, finish, is_affine(finish.jaxpr), n)

    def distance_of_records(self, norm: Norm, old: PyTree, new: PyTree) -> jax.Array:
        """Returns the distance when `old` is replaced by `new`, if `finish` is affine."""
        statistics = self.statistic(new), self.statistic(old)
        moved = difference(*statistics)
        leaves = linear_part(self.finish.jaxpr, jax.tree.leaves(moved))
        found = length(norm, jax.tree.unflatten(self.finish.outputs.structure, leaves))
        # A sum of n integers of this magnitude might exceed the range of its dtype and wrap around.
        # Then the distance is not known, and counts as infinite.
        totals = self.finish.inputs.argument(0).leaves
        wraps = jnp.zeros((), bool)
        for statistic in statistics:
            for x, total in zip(jax.tree.leaves(statistic), totals, strict=True):
                if not is_float(total):
                    most = jnp.iinfo(total.dtype).max // self.n
                    magnitude = jnp.abs(x.astype(jnp.float32))
                    wraps |= jnp.max(magnitude) > float(most)
        return jnp.where(wraps, jnp.inf, found)

    def distance(
        self, norm: Norm, records: Database, position: jax.Array | int
    ) -> tuple[jax.Array, Value]:
        """Returns the distance of a pair, and the value on the first database of the pair.

        The function `finish` may be any function. `records` has n + 1 records: the n records of the
        first database, and then the replacement of the record at `position`. The two databases
        share n - 1 records, and the sum over these is computed once. Then the replaced record is
        added for one database, and the replacement for the other.
        """
        statistics = jax.vmap(self.statistic)(records)
        n = jax.tree.leaves(records)[0].shape[0] - 1
        places, position = jnp.arange(n + 1, dtype=jnp.int32), jnp.asarray(position, jnp.int32)
        shared = (places != position) & (places != n)

        def common(x: jax.Array) -> jax.Array:
            kept = jnp.expand_dims(shared, tuple(range(1, x.ndim)))
            return sum_of_rows(jnp.where(kept, x, jnp.zeros_like(x)))

        def value_with(last: jax.Array | int) -> Value:
            return self.finish(
                jax.tree.map(lambda s, x: s + x[last].astype(s.dtype), total, statistics)
            )

        total = jax.tree.map(common, statistics)
        value, other = value_with(position), value_with(n)
        return distance(norm, value, other), value


# The following functions recognize and evaluate affine programs.


class NotAffineError(Exception):
    """Raised if a primitive is not known to be affine. The message is the name of the primitive."""


def is_affine(program: jex.ClosedJaxpr) -> bool:
    """Whether every primitive of a program on real arrays is affine in the inputs.

    Derivatives cannot decide this: rounding has the derivative 0, but is not affine.
    """
    avals = map(aval, program.jaxpr.invars)
    inputs = [jax.ShapeDtypeStruct(x.shape, compute_dtype(x.dtype)) for x in avals]
    try:
        jax.eval_shape(functools.partial(linear_part, program), inputs)
    except NotAffineError:
        return False
    return True


def linear_part(program: jex.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes f(x) - f(0) for an affine program f, without the rounding error of a subtraction.

    Args:
        program: an affine program.
        inputs: float arrays of the shapes of its inputs.

    Returns:
        Float arrays of the shapes of its outputs.

    Raises:
        NotAffineError: if an operation is not known to be affine.
    """
    outputs = run(program, [(x, True) for x in inputs], _apply, lambda value: (value, False))
    avals = map(aval, program.jaxpr.outvars)
    return [
        x if depends else jnp.zeros(found.shape, compute_dtype(found.dtype))
        for (x, depends), found in zip(outputs, avals, strict=True)
    ]


def _apply(equation: Equation, operands: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    values = [x for x, _ in operands]
    depends = [d for _, d in operands]
    if inner := called(equation):
        return run(inner, operands, _apply, lambda value: (value, False))
    if list(jex.jaxprs_in_params(equation.params)):
        raise NotAffineError(name)
    parameters = dict(equation.params)
    if "preferred_element_type" in parameters:
        parameters["preferred_element_type"] = None
    if name in _MOVES or not any(depends):
        return [(x, any(depends)) for x in bind(equation, parameters, values)]
    if name == "convert_element_type":
        old, new = aval(equation.invars[0]).dtype, parameters["new_dtype"]
        narrower = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        narrower = narrower and jnp.finfo(new).nmant < jnp.finfo(old).nmant
        # A conversion to fewer bits rounds, and rounding is not affine.
        if old != new and (narrower or not jnp.issubdtype(new, jnp.floating)):
            raise NotAffineError(name)
        return [(values[0] if old == new else values[0].astype(new), True)]
    if not jnp.issubdtype(aval(equation.outvars[0]).dtype, jnp.floating):
        # Integer arithmetic wraps around, and integer division rounds, so neither is affine.
        raise NotAffineError(name)
    # The linear part is computed in floats even if the program computes with integers, so constants
    # are converted to floats.
    dtype = next(x.dtype for x, d in operands if d)
    if name in _SUMS:
        # Added constants cancel in f(x) - f(0), so they are replaced by 0.
        values = [x if d else jnp.zeros_like(x, dtype) for x, d in operands]
    else:
        by_one = name in ("mul", "dot_general") and sum(depends) == 1
        by_first = (name == "div" or name in _CHOICES) and depends[0] and not any(depends[1:])
        if not (name in _LINEAR or by_one or by_first):
            raise NotAffineError(name)
        # In `_CHOICES`, the other operands are indices, which stay integers.
        if name not in _CHOICES:
            values = [x if d else jnp.asarray(x).astype(dtype) for x, d in operands]
    return [(x, True) for x in bind(equation, parameters, values)]
