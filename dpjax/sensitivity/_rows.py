"""Some rows of what a program returns, computed from the rows they depend on.

An oracle draws n + 1 records, and a sum over records moves by two of them. Most operations that
make records treat every row alike, and the bits of a counter-based generator can be had at any
place: so two rows cost what two rows cost. Where an operation is not known to treat rows alike, all
of its rows are computed, and two are taken.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from dpjax._programs import Program
from dpjax.random import _chacha20

_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"))
_CONTROL = frozenset(("while", "scan", "cond"))
_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "rem", "pow", "integer_pow", "neg", "sign", "abs", "max"),
        *(
            "min",
            "and",
            "or",
            "xor",
            "not",
            "shift_left",
            "shift_right_logical",
            "population_count",
        ),
        *("shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "clamp"),
        *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "logistic"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
        *("erf", "erfc", "erf_inv", "floor", "ceil", "round", "is_finite", "nextafter", "copy"),
        *("convert_element_type", "random_fold_in", "population_count"),
    )
)
# One operand, and every row is made of its row alone.
_ROWWISE = frozenset(("bitcast_convert_type", "random_wrap", "random_unwrap"))


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
    return jax.tree.unflatten(program.outputs.structure, [x.rows(rows) for x in outputs])


class _Known:
    """An array that is there."""

    def __init__(self, value: Any):
        self._value = value
        self.shape = np.shape(value)

    def full(self) -> Any:
        return self._value

    def rows(self, rows: jax.Array) -> Any:
        return jnp.asarray(self._value).at[rows].get(mode="promise_in_bounds")


class _Output:
    """One output of an operation, computed when it is asked for: whole, or some rows of it."""

    def __init__(self, operation: "_Operation", place: int):
        self._operation, self._place = operation, place
        self.shape = operation.equation.outvars[place].aval.shape

    def full(self) -> Any:
        return self._operation.full()[self._place]

    def rows(self, rows: jax.Array) -> Any:
        found = self._operation.rows(rows)
        if found is not None:
            return found[self._place]
        return _Known(self.full()).rows(rows)


class _Operation:
    """One line of a program, with its operands."""

    def __init__(self, equation: Any, operands: list[Any]):
        self.equation, self.operands = equation, operands
        self._rows: list[tuple[jax.Array, list[Any] | None]] = []
        self._full: list[Any] | None = None

    def full(self) -> list[Any]:
        """All rows of all outputs."""
        if self._full is None:
            self._full = self.run([x.full() for x in self.operands])
        return self._full

    def rows(self, rows: jax.Array) -> list[Any] | None:
        """Some rows of all outputs; None where the operation may not treat rows alike."""
        for known, found in self._rows:
            if known is rows:
                return found
        rule = _RULES.get(self.equation.primitive.name)
        found = None if rule is None else rule(self, rows)
        self._rows.append((rows, found))
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.equation.outvars[0].aval.shape

    def has_rows(self, operand: Any) -> bool:
        """Whether the operand's rows are those of the output."""
        return operand.shape[:1] == self.shape[:1] and len(operand.shape) > 0

    def run(self, values: list[Any]) -> list[Any]:
        """The operation on other operands."""
        out = self.equation.primitive.bind(*values, **self.equation.params)
        return list(out) if self.equation.primitive.multiple_results else [out]


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


def _elementwise(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    rank = len(operation.shape)
    values = []
    for operand in operation.operands:
        if operation.has_rows(operand) and len(operand.shape) == rank:
            values.append(operand.rows(rows))
        elif operand.shape[:1] in ((), (1,)):
            values.append(operand.full())
        else:
            return None
    return operation.run(values)


def _rowwise(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (operand,) = operation.operands
    return operation.run([operand.rows(rows)]) if operation.has_rows(operand) else None


def _along(name: str) -> "_Rule":
    """For operations along some axes: rows are treated alike if the first is none of them."""

    def rule(operation: _Operation, rows: jax.Array) -> list[Any] | None:
        axes = operation.equation.params[name]
        if 0 in (axes if isinstance(axes, tuple) else (axes,)):
            return None
        if not all(operation.has_rows(x) for x in operation.operands):
            return None
        return operation.run([x.rows(rows) for x in operation.operands])

    return rule


def _broadcast(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    if len(operation.operands) != 1:
        return None
    (operand,) = operation.operands
    axes = tuple(int(axis) for axis in operation.equation.params["broadcast_dimensions"])
    spread = axes[:1] == (0,) and operation.has_rows(operand)
    x = operand.rows(rows) if spread else operand.full()
    return [lax.broadcast_in_dim(x, (len(rows), *operation.shape[1:]), axes)]


def _reshape(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (operand, *_) = operation.operands
    ordered = operation.equation.params.get("dimensions") is None
    if len(operation.operands) != 1 or not ordered or not operation.has_rows(operand):
        return None
    return [lax.reshape(operand.rows(rows), (len(rows), *operation.shape[1:]))]


def _transpose(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (operand,) = operation.operands
    first = operation.equation.params["permutation"][0]
    return operation.run([operand.rows(rows)]) if first == 0 else None


def _slice(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (operand,) = operation.operands
    names = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (operation.equation.params[name] for name in names)
    step = 1 if strides is None else strides[0]
    chosen = operand.rows(rows * step + starts[0])
    limits = (len(rows), *limits[1:])
    strides = None if strides is None else (1, *strides[1:])
    return [lax.slice(chosen, (0, *starts[1:]), limits, strides)]


def _iota(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    dtype, axis = (operation.equation.params[name] for name in ("dtype", "dimension"))
    shape = (len(rows), *operation.shape[1:])
    if axis > 0:
        return [lax.broadcasted_iota(dtype, shape, axis)]
    return [lax.broadcast_in_dim(rows.astype(dtype), shape, (0,))]


def _gather(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    table, indices = operation.operands
    numbers = operation.equation.params["dimension_numbers"]
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if batched or 0 in numbers.offset_dims or not operation.has_rows(indices):
        return None
    return operation.run([table.full(), indices.rows(rows)])


def _dot_general(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    left, right = operation.operands
    (contracted, _), (batched, _) = operation.equation.params["dimension_numbers"]
    if batched or 0 in contracted or not operation.has_rows(left):
        return None
    return operation.run([left.rows(rows), right.full()])


def _random_bits(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (key,) = operation.operands
    width, shape = (operation.equation.params[name] for name in ("bit_width", "shape"))
    if len(key.shape) > 0:
        return _rowwise(operation, rows)
    generator = _generator(key.full())
    if generator is None or math.prod(shape) >= 2**31 or width == 64:
        return None
    stride = math.prod(shape[1:])
    first = rows.astype(jnp.uint32)[:, None] * np.uint32(stride)
    places = (first + jnp.arange(stride, dtype=jnp.uint32)[None]).reshape(-1)
    bits = generator.bits(jax.random.key_data(key.full()), places, math.prod(shape))
    return [bits.reshape(len(rows), *shape[1:]).astype(f"uint{width}")]


def _random_split(operation: _Operation, rows: jax.Array) -> list[Any] | None:
    (key,) = operation.operands
    if len(key.shape) > 0:
        return _rowwise(operation, rows)
    generator = _generator(key.full())
    if generator is None or len(operation.shape) != 1:
        return None
    children = generator.children(jax.random.key_data(key.full()), rows.astype(jnp.uint32))
    return [jax.random.wrap_key_data(children, impl=jax.random.key_impl(key.full()))]


class _Generator(NamedTuple):
    """A counter-based generator.

    Attributes:
        bits: takes key data, places and m to the words at these places of `bits(key, (m,))`.
        children: takes key data and places to the data of these children of `split(key, m)`.
    """

    bits: Callable[[jax.Array, jax.Array, int], jax.Array]
    children: Callable[[jax.Array, jax.Array], jax.Array]


def _threefry(key_data: jax.Array, places: jax.Array) -> Any:
    first, second = (jnp.broadcast_to(word, places.shape) for word in key_data)
    return threefry2x32_p.bind(first, second, jnp.zeros_like(places), places)


def _threefry_bits(key_data: jax.Array, places: jax.Array, _: int) -> jax.Array:
    high, low = _threefry(key_data, places)
    return high ^ low


def _threefry_children(key_data: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.stack(_threefry(key_data, places), axis=-1)


def _generator(key: jax.Array) -> _Generator | None:
    implementation: Any = jax.random.key_impl(key)
    if implementation == _chacha20.CHACHA20:
        return _Generator(_chacha20.bits_at, _chacha20.children_at)
    configuration: Any = jax.config
    if implementation == "threefry2x32" and configuration.jax_threefry_partitionable:
        return _Generator(_threefry_bits, _threefry_children)
    return None


_Rule = Callable[[_Operation, jax.Array], list[Any] | None]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_ROWWISE, _rowwise),
    **{f"reduce_{name}": _along("axes") for name in ("sum", "prod", "max", "min", "and", "or")},
    "argmax": _along("axes"),
    "argmin": _along("axes"),
    "cumsum": _along("axis"),
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "rev": _along("dimensions"),
    "squeeze": _along("dimensions"),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "iota": _iota,
    "gather": _gather,
    "dot_general": _dot_general,
    "random_bits": _random_bits,
    "random_split": _random_split,
}
