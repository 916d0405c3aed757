"""Counts of records: by predicate, by bucket, or by combination of attributes."""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._columns import check_numbers, comparing, for_functions
from dpjax._core._types import Database, PyTree
from dpjax._core._values import NeighboringRelation
from dpjax._exact._numerics import count_below
from dpjax._tracing._lanes import check_lanes, is_exact
from dpjax.queries._query import IntegerQuery, Query, Reach
from dpjax.queries._totals import LARGEST, Addend, Totals, cells_of_present, saturated
from dpjax.targets._clamping import comparable, increasing, without_subnormals
from dpjax.targets._known_sensitivity import VectorNorm, norm_up


def counting_query(predicate: Callable[[PyTree], jax.Array] | None = None) -> Query:
    """The number of records that satisfy a predicate.

    A predicate that only compares numbers, and computes in integers, runs on all records at once. A
    predicate that rounds, divides or draws random numbers runs in a loop over the records. This is
    slow on an accelerator.

    Args:
        predicate: maps one record, the database's pytree without the leading axis, to a boolean.
            None counts all records; the number of records is private only under add-or-remove-one.
            The predicate receives 64-bit columns as 64-bit arrays, even without x64, and missing
            numbers as NaN. Strings can be compared with strings.

    Returns:
        A `Query`, whose value is an integer.

    Raises:
        TypeError: if the predicate is not a function; on a database, if the predicate does not
            return a boolean.

    Formal guarantees:
        One record changes the count by at most 1, under replace-one and under add-or-remove-one,
        and some records change it by 1. The predicate gives the same answer for a record in every
        slot, and no record affects the answer for another, because one program runs on one record
        at a time. A predicate without rounding runs on all records at once; subnormal numbers then
        count as 0. With Laplace noise and probability 1 - beta, the release is within ln(1 / beta)
        / epsilon + 1/2 of the true count, where 1/2 is for rounding; see `error`.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> adults = queries.counting_query(lambda age: age >= 18)
        >>> int(adults(jnp.array([12.0, 40.0, 65.0])))
        2
    """
    if predicate is not None:
        _checks.function("predicate", predicate)

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        if predicate is None:
            return [Addend(cells_of_present(present), 1)]
        answers = of_each_record("predicate", predicate, records)
        one_array = jax.tree_util.all_leaves([answers]) and answers.shape == present.shape
        if not one_array or answers.dtype != bool:
            raise TypeError(
                f"predicate must give a boolean for each record, got {_checks.described(answers)}"
                f" of {present.size} records"
            )
        return [Addend(cells_of_present(answers & present), 1)]

    query = query_of_tables(addends, (1,), ())
    if predicate is None:  # A replaced record does not change the number of records.
        added = NeighboringRelation.ADD_OR_REMOVE_ONE
        query = dataclasses.replace(query, reach=lambda _, relation: float(relation is added))
    return Query(query)


def of_each_record(name: str, function: Callable[[PyTree], PyTree], records: Database) -> PyTree:
    """Applies a function of one record to every record, with the same program in every slot.

    A function whose operations round floats runs on one record at a time, because the result for a
    record must not depend on its slot. Under `vmap`, XLA computes the last rows with other
    instructions, which may round differently. If a record is removed, all later records move to
    other slots, so with `vmap` a count could change by 2 or more.
    """
    records = for_functions(records)
    checked, program = check_lanes(name, function, records)
    if is_exact(program):
        return jax.vmap(checked)(jax.tree.map(without_subnormals, records))
    return lax.map(checked, records)


def histogram_query(
    buckets: int | Sequence[float], *, outliers: Literal["drop", "clip"] = "drop"
) -> Query:
    """The number of records in each bucket, for any number of buckets.

    Args:
        buckets: a number k, or increasing edges, both public. With k buckets, each record is an
            integer code from 0 to k - 1, the index of its bucket; a code may be stored as a float.
            With edges, records are numbers, and bucket j contains edges[j] <= x < edges[j + 1]. As
            in NumPy, the last bucket includes its upper edge. The first edge may be -inf, and the
            last edge inf. Edges are rounded to the dtype of the records, if it is a float dtype.
            Integers are compared exactly below 2^53, and larger integers as the nearest float64.
        outliers: how to count NaN and records that are in no bucket. "drop" ignores them. "clip"
            counts a record in the nearest bucket, and NaN in the first bucket. A float code counts
            as NaN if it is not an integer, or if it is at least 2^24 in float32.

    Returns:
        A `Query` of shape (k,): maps n numbers to counts.

    Raises:
        TypeError: if the buckets are not numbers.
        ValueError: if the number of buckets is out of range, edges do not increase, or `outliers`
            is neither "drop" nor "clip"; when called, if the database does not have shape (n,).

    Formal guarantees:
        The buckets are disjoint. Under add-or-remove-one a record changes one count by 1, so the
        sensitivity is 1 in every norm. Under replace-one a record may leave one bucket and enter
        another, so the sensitivity is 2 in the norm l1, sqrt(2) in l2, and 1 in linf. So all counts
        together cost one epsilon, with Laplace noise of scale 1 / epsilon or 2 / epsilon. With
        probability 1 - beta all counts are within ln(k / beta) times the scale, plus 1/2 for
        rounding, of the true counts; see `error`.

    Source:
        Dwork, McSherry, Nissim and Smith (2006), Example 3; McSherry (2009), Theorem 4, for
        parallel composition.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> ages = queries.histogram_query([0, 18, 65, jnp.inf])
        >>> ages(jnp.array([17.9, 18.0, 40.0, -1.0])).tolist()
        [1, 2, 0]
        >>> queries.histogram_query([0, 1, 2])(jnp.array([1.0, 2.0, 2.1])).tolist()
        [0, 2]
        >>> clipped = queries.histogram_query([0, 18, 65], outliers="clip")
        >>> clipped(jnp.array([17.9, 18.0, 400.0, -1.0])).tolist()
        [2, 2]
        >>> dpjax.laplace(ages.sensitivity(), epsilon=1.0).scale
        2.0
    """
    _checks.choice("outliers", outliers, ("drop", "clip"))
    if np.ndim(buckets) == 0:
        k = _checks.integer("buckets", buckets, least=1, most=LARGEST)
        codes_of = as_codes
    else:
        wanted = "buckets must be a number of them, or at least 2 increasing edges"
        edges = increasing(wanted, buckets, least=2)
        k = len(edges) - 1

        def codes_of(records: jax.Array) -> jax.Array:
            with comparing(records):
                numbers = comparable(records)
                starts = comparable(jnp.asarray(edges, numbers.dtype))
                found = count_below(starts, numbers, or_equal=True)
                # The last bucket includes its upper edge.
                found = jnp.where(numbers == starts[-1], k, found)
                return jnp.where(jnp.isnan(numbers), -1, found - 1)

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        check_numbers("database", records, present.shape)
        codes = codes_of(records)
        codes = jnp.clip(codes, 0, k - 1) if outliers == "clip" else codes
        return [Addend(jnp.where(present & (codes < k), codes, -1).astype(jnp.int32), k)]

    return Query(query_of_tables(addends, (k,), (k,)))


def contingency_query(categories: Mapping[str, int]) -> Query:
    """The number of records with each combination of values of some attributes.

    Args:
        categories: the number of categories of each attribute, by its name. Attribute a is an
            integer from 0 to categories[a] - 1. A record with a value out of range is not counted.
            Codes may be stored as floats, as in `histogram_query`.

    Returns:
        A `Query` whose value has an axis for every attribute, in the given order. Databases are
        dicts or tables with these columns of codes, and possibly other columns of numbers.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if there is no attribute, an attribute has fewer than 2 categories, or the table
            would have 2^31 - 1 cells or more; on a database, if a column is missing.

    Formal guarantees:
        The guarantees of `histogram_query`: the cells are disjoint.

    Source:
        Dwork, McSherry, Nissim and Smith (2006), Example 3.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> table = queries.contingency_query({"smokes": 2, "region": 3})
        >>> people = {"smokes": jnp.array([0, 1, 1]), "region": jnp.array([2, 0, 0])}
        >>> table(people).tolist()
        [[0, 0, 1], [2, 0, 0]]
    """
    sizes = sizes_of_attributes(categories)

    check_cells(sizes)

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        return [combinations(records, present, sizes)]

    shape = tuple(sizes.values())
    return Query(query_of_tables(addends, (math.prod(shape),), shape))


def sizes_of_attributes(categories: Mapping[str, int]) -> Mapping[str, int]:
    """Returns an immutable copy of `categories`: the number of categories by attribute."""
    if not hasattr(categories, "items") or not categories:
        raise ValueError(
            "categories must map one or more names to numbers of categories, got"
            f" {_checks.shown(categories)}"
        )
    sizes = {
        name: _checks.integer(f"categories[{name!r}]", size, least=2)
        for name, size in categories.items()
    }
    return types.MappingProxyType(sizes)


def check_cells(sizes: Mapping[Any, int]) -> int:
    """Returns the number of cells of a contingency table, and refuses too large a table."""
    cells = math.prod(sizes.values())
    if cells > LARGEST:
        raise ValueError(
            f"categories must make at most {LARGEST} cells, got {cells:,} cells for {dict(sizes)}"
        )
    return cells


def combinations(records: Database, present: jax.Array, sizes: Mapping[str, int]) -> Addend:
    """Returns the `Addend` of a contingency table: each record adds 1 to its cell."""
    if not hasattr(records, "keys") or not sizes.keys() <= records.keys():
        raise ValueError(
            f"database must have the columns {[*sizes]}, got {_checks.described(records)}"
        )
    cell = jnp.zeros(present.shape, jnp.int32)
    for name, size in sizes.items():
        check_numbers(f"column {name!r}", records[name], present.shape)
        codes = as_codes(records[name])
        present &= (codes >= 0) & (codes < size)
        cell = cell * np.int32(size) + jnp.clip(codes, 0, size - 1)
    return Addend(jnp.where(present, cell, -1), math.prod(sizes.values()))


def query_of_tables(
    addends: Callable[[Database, jax.Array], Sequence[Addend]],
    cells: Sequence[int],
    shape: tuple[int, ...],
) -> IntegerQuery:
    """Returns the query of the counts in several tables.

    A record is in at most one cell of each table.
    """

    def finish(totals: Totals) -> jax.Array:
        return jnp.concatenate([saturated(x).ravel() for x in totals]).reshape(shape)

    reach = reach_of_tables(cells)
    return IntegerQuery(addends=addends, finish=finish, shape=shape, reach=reach, one_way=True)


def reach_of_tables(cells: Sequence[int]) -> Reach:
    """Returns the sensitivity of counts in several tables, if each table counts a record once.

    If a record is replaced, one count of each table may decrease by 1, and another count may
    increase by 1 if the table has more than one cell.
    """

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        entered = [1] * len(cells)
        if relation is NeighboringRelation.REPLACE_ONE:
            entered += [1 for k in cells if k > 1]
        return norm_up([Fraction(x) for x in entered], norm)

    return reach


def as_codes(records: jax.Array) -> jax.Array:
    """Converts codes to int32. Floats that are not integers, or too large to be exact, become -1.

    Floats must not raise an error. One missing value turns a column of integers into floats, so an
    error would reveal whether a value is missing, which is private.
    """
    if not jnp.issubdtype(records.dtype, jnp.floating):
        return _checks.saturating_cast(records, jnp.int32)
    numbers = comparable(records)
    exact = jnp.abs(numbers) < min(largest_whole(records.dtype), 2**31)
    whole = exact & (numbers == jnp.floor(numbers))
    return jnp.where(whole, numbers, -1).astype(jnp.int32)


def largest_whole(dtype: np.dtype) -> int:
    """Returns the power of two up to which a float dtype represents every integer exactly."""
    return 2 ** (int(jnp.finfo(dtype).nmant) + 1)  # pyright: ignore  # ml_dtypes has no types.
