"""Evaluates a public predicate on every row, and computes a fingerprint of its program."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import Numbers, for_functions, in_64_bits
from dpjax._core._frames import moments_of
from dpjax._core._moments import Moments
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._records import exact_records
from dpjax._core._types import Database, PyTree
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import Program, evaluate_alone, needs_no_values
from dpjax.queries._counts import of_each_record
from dpjax.tables._frame import Column, Frame

Where: TypeAlias = Callable[[dict[str, Any]], Any]
"""Maps one row, a dict of its columns, to a boolean."""

_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class _Entry(np.lib.mixins.NDArrayOperatorsMixin):
    """An entry of a row. It supports Python's operators. JAX functions convert it to a number."""

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # JAX looks for protocols that an entry does not have.
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())  # An error, as for any number of a row.

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        """Calls the JAX function of the same name. NumPy calls this method for every operator."""
        if method != "__call__" or how:
            return NotImplemented
        # NumPy converts a number, date or time on the left of an operator to an array without axes.
        plain = [x[()] if isinstance(x, np.ndarray) else x for x in inputs]
        return self._applied(ufunc, plain)

    def _applied(self, ufunc: np.ufunc, inputs: list[Any]) -> Any:
        return getattr(jnp, ufunc.__name__)(*map(self._number, inputs))

    def _number(self, other: Any) -> Any:
        return other.__jax_array__() if isinstance(other, _Entry) else other


@frozen_pytree
class _Moment(_Entry):
    """A date, time or duration in a row.

    The class stores it as a number, and compares it with other dates, times or durations.
    """

    number: jax.Array
    moments: Moments = static()

    def __jax_array__(self) -> jax.Array:
        return self.number

    def _number(self, other: Any) -> Any:
        return other.number if isinstance(other, _Moment) else self.moments.number(other)


@frozen_pytree
class _Whole(_Entry):
    """A 64-bit integer in a row, which may be missing or unsigned.

    A float would represent a missing number as NaN, but would round integers beyond 2^53. So
    comparisons with integers use the integer itself.
    """

    number: jax.Array
    known: jax.Array

    def __jax_array__(self) -> jax.Array:
        return jnp.where(self.known, self.number.astype(float), jnp.nan)

    def _applied(self, ufunc: np.ufunc, inputs: list[Any]) -> Any:
        if ufunc not in _COMPARISONS or not all(map(self._is_exact, inputs)):
            return super()._applied(ufunc, inputs)
        numbers = (x.number if isinstance(x, _Whole) else jnp.asarray(x, self.number.dtype)
                   for x in inputs)  # fmt: skip
        known = [x.known for x in inputs if isinstance(x, _Whole)]
        # A missing number behaves like NaN: every comparison with a missing number is false, except
        # `!=`.
        found = getattr(jnp, ufunc.__name__)(*numbers)
        return jnp.where(functools.reduce(jnp.logical_and, known), found, ufunc is np.not_equal)

    def _is_exact(self, other: Any) -> bool:
        """Whether a number can be converted to the dtype of this one without rounding."""
        if isinstance(other, (_Whole, jax.Array)):
            number = other.number if isinstance(other, _Whole) else other
            return number.dtype == self.number.dtype
        limits = np.iinfo(self.number.dtype)
        return isinstance(other, (int, np.integer)) and limits.min <= int(other) <= limits.max


def _entries(column: Column) -> PyTree:
    """Returns the entries of a column in the form that `_of_row` accepts."""
    found, dtype = column.with_gaps(), column.entries.dtype
    wide = isinstance(found, Numbers) and dtype.itemsize == 8
    # JAX would convert a negative number to the dtype of unsigned integers, where it wraps around.
    if wide or (dtype == np.uint64 and not column.is_text):
        return Numbers.of(column.entries), column.known
    return Numbers.of(column.entries) if dtype == np.uint32 and not column.is_text else found


def _of_row(frame: Frame, name: str, entry: PyTree) -> PyTree:
    """Returns an entry in the form in which a predicate receives it."""
    if isinstance(entry, tuple):
        return _Whole(*entry)
    moments = moments_of(frame.columns[name])
    return entry if moments is None else _Moment(entry, moments)


class _Asked(Mapping[str, PyTree]):
    """A row of zeros that records which columns a predicate uses."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.names = frame, dict[str, None]()

    def __getitem__(self, name: str) -> PyTree:
        column = _entries(self.frame[name])
        self.names[name] = None
        zeros = for_functions(jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), column))
        return _of_row(self.frame, name, zeros)

    def __iter__(self) -> Iterator[str]:
        return iter(self.frame.columns)

    def __len__(self) -> int:
        return len(self.frame.columns)


def rows_where(predicate: Where, frame: Frame) -> tuple[np.ndarray, str]:
    """Returns which slots satisfy a predicate, and a fingerprint of its program and columns.

    The same program evaluates the predicate on one row at a time, as in `queries.counting_query`.
    So whether a row counts depends on this row alone.
    """
    _checks.function("where", predicate)
    names = _columns_of(predicate, frame)
    records, _ = exact_records("where", {name: _entries(frame[name]) for name in names})

    def asked(row: dict[str, PyTree]) -> Any:
        return predicate({name: _of_row(frame, name, entry) for name, entry in row.items()})

    def total(records: Database) -> jax.Array:
        with in_64_bits(records):
            answers = of_each_record("where", asked, records)
        one_array = jax.tree_util.all_leaves([answers]) and answers.shape == (frame.slots,)
        if not one_array or answers.dtype != bool:
            raise TypeError(
                f"where must give a boolean for each row, got {_checks.described(answers)}: compare"
                ' columns of one row, as in lambda row: row["age"] >= 18'
            )
        return answers

    program = Program.trace("where", total, records)
    # The program does not contain the names of the columns, so they are added to the fingerprint.
    fingerprint = digest(sorted(names), program.fingerprint)
    found = evaluate_alone(records, program=program)
    return found if _checks.is_traced(found) else np.asarray(found), fingerprint


def _columns_of(predicate: Where, frame: Frame) -> list[str]:
    """Returns the names of the columns that a predicate uses."""
    asked = _Asked(frame)
    if any(map(_checks.is_traced, jax.tree.leaves(dict(frame.columns)))):
        for name in frame.columns:
            frame[name]  # Converts a simulated column outside of the trace below.
    with jax.enable_x64(True), needs_no_values("where"):
        jax.eval_shape(lambda: predicate(asked))  # pyright: ignore[reportArgumentType]
    if not asked.names:
        raise ValueError("where= must depend on a column of the row, but it uses no column")
    return list(asked.names)
