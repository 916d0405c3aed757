"""Conversion and checks of databases: pytrees of arrays with a common leading axis of records."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Refused, check_usable, in_64_bits, is_column, is_numbers
from dpjax._core._frames import columns, place_of
from dpjax._core._guarantee import RECORD, NeighboringRelation
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Database, PyTree


@frozen_pytree
class PaddedRecords:
    """Records in a public number of slots; queries ignore empty slots.

    `dpjax.queries.padded_records` and `parts` make them from a capacity. If you make one yourself,
    you promise that its number of slots is public. It must not depend on the number of records.

    Attributes:
        records: a pytree of arrays, whose leading axis is the slots. The contents of an empty slot
            do not matter.
        present: booleans of shape (slots,): whether each slot contains a record.

    Formal guarantees:
        Shapes, running time and errors of a release depend on the number of slots, never on how
        many slots contain a record.
    """

    records: Database
    present: jax.Array


def exact_records(name: str, database: Database, *, least: int = 1) -> tuple[Database, int]:
    """Converts a database without rounding, and returns it with its number of records.

    A table becomes a dict of its columns. Columns whose dtype JAX does not have become `Numbers`.
    Whether an error is raised depends only on structure, dtypes and sizes.
    """
    count = "n" if least == 1 else f"at least {least}"
    wanted = f"{name} must be arrays with a common leading axis of {count} records"
    tree = columns(name, database)
    leaves = jax.tree.leaves(tree, is_leaf=is_column)
    if not leaves:
        # If a column has a dtype that is refused, the error is about this column.
        for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Refused)):
            check_usable(leaf)
        raise ValueError(f"{name} must contain at least one array, got {_checks.shown(tree)}")
    # This check comes first, because each number in a list of numbers is a leaf of the pytree, and
    # converting every leaf would take long.
    if any(np.shape(leaf) == () for leaf in leaves if not callable(leaf) and not is_column(leaf)):
        raise ValueError(
            f"{wanted}, got {_checks.described(tree)}; convert a list of numbers to an array by "
            "numpy.asarray first"
        )

    def converted(path: tuple[object, ...], leaf: PyTree) -> PyTree:
        return _exact(place_of(name, path), leaf)

    records = jax.tree_util.tree_map_with_path(converted, tree, is_leaf=is_column)
    arrays = jax.tree.leaves(records)
    if least:
        _checks.check_not_empty(name, jax.tree.leaves(records, is_leaf=is_numbers))
    sizes = {leaf.shape[0] for leaf in arrays}
    if len(sizes) != 1 or min(sizes) < least:
        raise ValueError(f"{wanted}, got {_checks.described(records)}")
    (n,) = sizes
    if isinstance(records, PaddedRecords):
        present = records.present
        # If there were more booleans than slots, a record could count more than once.
        if (is_column(present) and not is_numbers(present)) or present.shape != (n,):
            raise ValueError(
                f"present must be one boolean for each of {n} slots, got"
                f" {_checks.described(present)}"
            )
        records = PaddedRecords(records.records, as_dtype(present, bool))
    return records, n


def record_arrays(name: str, database: Database, *, least: int = 1) -> tuple[Database, int]:
    """Converts a database to JAX arrays, and returns it with its number of records.

    Numbers are clamped to the range of the JAX dtype. Missing numbers become NaN.
    """
    records, n = exact_records(name, database, least=least)

    def narrow(leaf: jax.Array | Numbers) -> jax.Array:
        return as_dtype(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(narrow, records, is_leaf=is_numbers), n


def public_arrays(name: str, records: Database, *, least: int = 1) -> tuple[Database, int]:
    """Converts public records to JAX arrays. Returns the arrays and the number of records.

    Integers that JAX cannot represent are refused instead of clamped.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        columns(name, records), is_leaf=is_column
    ):
        numbers = leaf.on_host()[0] if isinstance(leaf, Numbers) else leaf
        if isinstance(numbers, np.ndarray) and numbers.dtype.kind in "iu":
            limits = np.iinfo(jax.dtypes.canonicalize_dtype(numbers.dtype))
            if np.any(numbers < limits.min) or np.any(numbers > limits.max):
                raise ValueError(
                    f"{place_of(name, path)} must be integers from {limits.min} to {limits.max},"
                    f" got {numbers.dtype} integers outside of this range, which JAX cannot"
                    ' represent without x64: convert them to floats by .astype("float64")'
                )
    return record_arrays(name, records, least=least)


def shapes_of_columns(name: str, records: Database) -> Database:
    """Returns the records with each converted column replaced by a `jax.ShapeDtypeStruct`."""

    def shape(leaf: PyTree) -> PyTree:
        is_numpy = isinstance(leaf, np.ndarray) or is_numbers(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if is_numpy else None
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if is_numpy else leaf

    return jax.tree.map(shape, columns(name, records), is_leaf=is_numbers)


def as_dtype(leaf: jax.Array | Numbers, dtype: DTypeLike) -> jax.Array:
    """Casts numbers to a dtype, clamping them to its range. Floats need a float dtype."""
    with in_64_bits(leaf):
        array = leaf.array() if isinstance(leaf, Numbers) else leaf
        if np.dtype(dtype).kind == "b":
            return array.astype(bool)
        if jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(float)
        return _checks.saturating_cast(array, dtype)


def _exact(place: str, leaf: Any) -> PyTree:
    """Converts a column to an array on the device, or to `Numbers`."""
    if is_column(leaf):
        return jax.tree.map(jnp.asarray, leaf)
    found = _wide(place, leaf)
    return _checks.real_array(place, leaf) if found is None else jax.tree.map(jnp.asarray, found)


def _wide(place: str, leaf: Any) -> Numbers | None:
    """Returns exact `Numbers` for a column that JAX would round or wrap; None for others."""
    if callable(leaf) or _checks.is_traced(leaf):
        return None
    _checks.refuse_foreign_dtype(place, leaf)
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iuf" or dtype.itemsize != 8:
        return None
    native = dtype.newbyteorder("=")
    exact = jax.dtypes.canonicalize_dtype(native) == native
    return None if exact else Numbers.of(np.asarray(leaf, native))


def check_padded(database: Database) -> None:
    """Refuses a database whose array shapes reveal a private number of records."""
    if not isinstance(database, PaddedRecords):
        raise ValueError(
            "under add-or-remove-one, and for people with several rows, the number of records is"
            " private, but the shape of an array reveals it: pass"
            " dpjax.queries.padded_records(database, capacity=...)"
        )


# Databases that are stored in several parts. A query adds up totals of the parts one by one, so
# that only one part at a time must fit into memory.


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Records in several parts. Each part fits into memory, and each record is in one part.

    Attributes:
        each: `each(function)` calls `function` with an iterator of parts, perhaps several times and
            in other processes, and returns an iterator of the results. Together, the calls get
            every part once.
        like: an example of a part, with its structure, shapes and dtypes.
        slots: a public number, which is at least the number of records of all parts together.
        holds_whole_people: whether all records of a person are in the same part, in their order.
    """

    each: Callable[[Callable[[Iterator[PaddedRecords]], Any]], Iterator[Any]]
    like: PaddedRecords
    slots: int
    holds_whole_people: bool = False

    def check(self, relation: NeighboringRelation, privacy_unit: str) -> None:
        """Refuses replace-one. Refuses people as privacy unit if a person may be in two parts."""
        if privacy_unit != RECORD and not self.holds_whole_people:
            raise TypeError(
                'target must be a query with the privacy unit "record" if the database comes in '
                "parts, because a person may be in several parts, got a query with the privacy "
                f"unit {privacy_unit}"
            )
        if relation is NeighboringRelation.REPLACE_ONE:
            raise ValueError(
                "relation must be add-or-remove-one for a database in parts, because the number of"
                " its records is private"
            )

    def check_count(self, n: int) -> None:
        """Refuses more records than the public number of slots."""
        if n > self.slots:
            raise ValueError(
                "most_rows must be enough for every possible table, got "
                f"most_rows={self.slots} for {n} rows"
            )


@frozen_pytree
class Summed:
    """Totals over all parts. A query has computed them, and accepts them in place of the records.

    The totals are private data, like the records.

    Attributes:
        totals: the totals.
        slots: the public number of slots, as in `Parts`.
    """

    totals: PyTree
    slots: int = static()


@dataclasses.dataclass(frozen=True, eq=False)
class Unsummed:
    """A computation over all parts that has not run yet. It runs only after a ledger has paid.

    Attributes:
        shapes: the shapes and dtypes of the result.
        compute: a function that reads all parts and returns the result.
    """

    shapes: Summed
    compute: Callable[[], Summed]


@runtime_checkable
class AddsUp(Protocol):
    """A target whose value is computed from sums that can be added up over parts of the records."""

    def over(self, parts: Parts) -> Unsummed:
        """Returns the computation that adds up the totals of all parts, without running it."""
        ...
