"""How operations treat rows: for each known one, some rows of its outputs from its operands' rows.

A rule takes a line of a program, its operands, which give all or some of their rows, and the rows
that are asked for. It returns these rows of all outputs, or None where the line may not treat rows
alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows base * step + start; equal ones are computed once, however they were reached.

    Attributes:
        base: int32, shape (r,), the same for all rows of a program.
        step: 1 or more.
        start: 0 or more.
    """

    base: jax.Array = dataclasses.field(compare=False)
    step: int = 1
    start: int = 0

    @functools.cached_property
    def indices(self) -> jax.Array:
        """Where they are."""
        plain = self.step == 1 and self.start == 0
        return self.base if plain else self.base * self.step + self.start

    def __len__(self) -> int:
        return len(self.base)

    def of_operand(self, start: int, step: int) -> "Rows":
        """Where these rows of a slice come from."""
        return Rows(self.base, self.step * step, self.start * step + start)


class Operand(Protocol):
    """An array that may not have been computed yet."""

    shape: tuple[int, ...]

    def full(self) -> Any:
        """All of it."""

    def rows(self, rows: Rows) -> Any:
        """Some of its rows."""


Rule = Callable[[Any, list[Any], Rows], list[Any] | None]

# Every element of the output is made of the elements at its place.
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "rem", "pow", "integer_pow", "neg", "sign", "abs", "max", "min"),
    *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("population_count", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "clamp", "is_finite"),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "logistic"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
    *("erf", "erfc", "erf_inv", "floor", "ceil", "round", "nextafter", "copy"),
    *("convert_element_type", "random_fold_in"),
)
# One operand, and every row is made of its row alone.
_ROWWISE = ("bitcast_convert_type", "random_wrap", "random_unwrap")


def run(equation: Any, values: list[Any]) -> list[Any]:
    """The operation of a line, on other operands."""
    out = equation.primitive.bind(*values, **equation.params)
    return list(out) if equation.primitive.multiple_results else [out]


def _shape(equation: Any) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


def _has_rows(equation: Any, operand: Operand) -> bool:
    """Whether the operand's rows are those of the output."""
    return operand.shape[:1] == _shape(equation)[:1] and len(operand.shape) > 0


def _elementwise(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    rank = len(_shape(equation))
    values = []
    for operand in operands:
        if _has_rows(equation, operand) and len(operand.shape) == rank:
            values.append(operand.rows(rows))
        elif operand.shape[:1] in ((), (1,)):
            values.append(operand.full())
        else:
            return None
    return run(equation, values)


def _rowwise(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (operand,) = operands
    return run(equation, [operand.rows(rows)]) if _has_rows(equation, operand) else None


def _along(name: str) -> Rule:
    """For operations along some axes: rows are treated alike if the first is none of them."""

    def rule(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
        axes = equation.params[name]
        if 0 in (axes if isinstance(axes, tuple) else (axes,)):
            return None
        if not all(_has_rows(equation, x) for x in operands):
            return None
        return run(equation, [x.rows(rows) for x in operands])

    return rule


def _broadcast(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    if len(operands) != 1:
        return None
    (operand,) = operands
    axes = tuple(int(axis) for axis in equation.params["broadcast_dimensions"])
    spread = axes[:1] == (0,) and _has_rows(equation, operand)
    x = operand.rows(rows) if spread else operand.full()
    return [lax.broadcast_in_dim(x, (len(rows), *_shape(equation)[1:]), axes)]


def _reshape(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (operand, *_) = operands
    ordered = equation.params.get("dimensions") is None
    if len(operands) != 1 or not ordered or not _has_rows(equation, operand):
        return None
    return [lax.reshape(operand.rows(rows), (len(rows), *_shape(equation)[1:]))]


def _transpose(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (operand,) = operands
    first = equation.params["permutation"][0]
    return run(equation, [operand.rows(rows)]) if first == 0 else None


def _slice(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (operand,) = operands
    names = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (equation.params[name] for name in names)
    step = 1 if strides is None else strides[0]
    chosen = operand.rows(rows.of_operand(starts[0], step))
    limits = (len(rows), *limits[1:])
    strides = None if strides is None else (1, *strides[1:])
    return [lax.slice(chosen, (0, *starts[1:]), limits, strides)]


def _iota(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    dtype, axis = (equation.params[name] for name in ("dtype", "dimension"))
    shape = (len(rows), *_shape(equation)[1:])
    if axis > 0:
        return [lax.broadcasted_iota(dtype, shape, axis)]
    return [lax.broadcast_in_dim(rows.indices.astype(dtype), shape, (0,))]


def _gather(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    table, indices = operands
    numbers = equation.params["dimension_numbers"]
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if batched or 0 in numbers.offset_dims or not _has_rows(equation, indices):
        return None
    return run(equation, [table.full(), indices.rows(rows)])


def _dot_general(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    left, right = operands
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    if batched or 0 in contracted or not _has_rows(equation, left):
        return None
    return run(equation, [left.rows(rows), right.full()])


def _random_bits(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (key,) = operands
    width, shape = (equation.params[name] for name in ("bit_width", "shape"))
    if len(key.shape) > 0:
        return _rowwise(equation, operands, rows)
    if not _has_places(key.full()) or math.prod(shape) >= 2**31 or width == 64:
        return None
    stride = math.prod(shape[1:])
    first = rows.indices.astype(jnp.uint32)[:, None] * np.uint32(stride)
    places = (first + jnp.arange(stride, dtype=jnp.uint32)[None]).reshape(-1)
    high, low = _threefry(key.full(), places)
    return [(high ^ low).reshape(len(rows), *shape[1:]).astype(f"uint{width}")]


def _random_split(equation: Any, operands: list[Any], rows: Rows) -> list[Any] | None:
    (key,) = operands
    if len(key.shape) > 0:
        return _rowwise(equation, operands, rows)
    if not _has_places(key.full()) or len(_shape(equation)) != 1:
        return None
    children = jnp.stack(_threefry(key.full(), rows.indices.astype(jnp.uint32)), axis=-1)
    return [jax.random.wrap_key_data(children, impl=jax.random.key_impl(key.full()))]


def _threefry(key: jax.Array, places: jax.Array) -> Any:
    """The two words at these places of a key's stream."""
    first, second = (jnp.broadcast_to(word, places.shape) for word in jax.random.key_data(key))
    return threefry2x32_p.bind(first, second, jnp.zeros_like(places), places)


def _has_places(key: jax.Array) -> bool:
    """Whether the bits at a place depend on key and place alone."""
    configuration: Any = jax.config
    implementation: Any = jax.random.key_impl(key)
    return implementation == "threefry2x32" and configuration.jax_threefry_partitionable


RULES: dict[str, Rule] = {
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
