"""How many records there are: that satisfy something, of every bucket, of every combination."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import _checks
from dpjax._lanes import check_lanes, is_exact
from dpjax._numerics import compute_dtype
from dpjax.base import NeighboringRelation
from dpjax.queries._query import Query
from dpjax.targets._bounds import VectorNorm, norm_up

LARGEST_TABLE = 2**31 - 2


def counting_query(predicate: Callable[[Any], Any] | None = None) -> Query:
    """How many records satisfy a predicate.

    A predicate that compares numbers, and computes in integers, takes all records at once. One that
    rounds, divides or draws loops over the records, which is slow on an accelerator.

    Args:
        predicate: takes one record, the database's pytree without the leading axis, to a boolean;
            None for all records, whose number is private under add-or-remove-one only.

    Returns:
        A `Query`, whose value is an integer.

    Raises:
        TypeError: if the predicate is not a function; on a database, if it gives no boolean.

    Formal guarantees:
        One record moves the count by at most 1, under replace-one and under add-or-remove-one, and
        attains it. The predicate says the same of a record in every slot, and no record changes
        what it says of another: it runs on one record at a time, by one program, unless nothing in
        it rounds. Then subnormal numbers in records count as 0. The release lies
        within ln(1 / beta) / epsilon of the truth, and 1/2 for rounding, with probability 1 - beta:
        `error`.

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

    def total(records: Any, present: jax.Array) -> jax.Array:
        if predicate is None:
            return jnp.sum(present, dtype=jnp.int32)
        # Under `vmap` XLA computes the last rows by other instructions: there a record may get
        # another float, and one record that is removed would move all that follow.
        checked, program = check_lanes("predicate", predicate, records)
        if is_exact(program):
            holds = jax.vmap(checked)(jax.tree.map(without_subnormals, records))
        else:
            holds = lax.map(checked, records)
        one_array = isinstance(holds, jax.Array)
        if not one_array or holds.shape != present.shape or holds.dtype != bool:
            raise TypeError(
                f"predicate must give a boolean for each record, got {_checks.described(holds)} of"
                f" {present.size} records"
            )
        return jnp.sum(holds & present, dtype=jnp.int32)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        replaced = relation is NeighboringRelation.REPLACE_ONE
        return norm_up([Fraction(not (replaced and predicate is None))], norm)

    return Query(total=total, shape=(), reach=reach)


def histogram_query(buckets: int | Sequence[float]) -> Query:
    """How many records are in every bucket, for any number of buckets.

    Args:
        buckets: a number k, of records that are integers from 0 to k - 1, which are the buckets; or
            increasing edges, public, of records that are numbers, where bucket j holds
            edges[j] <= x < edges[j + 1]. The first edge may be -inf, the last one inf. What is in
            no bucket, as NaN, is not counted. Edges are rounded to the dtype of the records, and
            records of integers to JAX's default float. Floats may be codes too: one that is not
            whole, or from 2^24 on in float32, is in no bucket.

    Returns:
        A `Query` of shape (k,): takes n numbers to counts.

    Raises:
        TypeError: if the buckets are no numbers.
        ValueError: if the number is out of range or edges do not increase; on a database, if it
            does not have shape (n,).

    Formal guarantees:
        The buckets are disjoint: in the norm l1 one record moves them by 1 under add-or-remove-one,
        and by 2 under replace-one, where it leaves one and enters another; in l2 by 1 and sqrt(2),
        in linf by 1. So all counts together cost one epsilon, at the scale 1 / epsilon or
        2 / epsilon. All are within ln(k / beta) times the scale, and 1/2 for rounding, with
        probability 1 - beta: `error`.

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
        >>> dpjax.laplace(ages.sensitivity(), epsilon=1.0).scale
        2.0
    """
    if np.ndim(buckets) == 0:
        k = _checks.integer("buckets", buckets, least=1, most=LARGEST_TABLE)
        codes_of = _as_codes
    else:
        edges = _increasing_edges(buckets)
        k = len(edges) - 1

        def codes_of(records: Any) -> jax.Array:
            numbers = comparable(records)
            increasing = comparable(jnp.asarray(edges, numbers.dtype))
            found = jnp.searchsorted(increasing, numbers, side="right")
            return found.astype(jnp.int32) - 1  # NaN comes last.

    def total(records: Any, present: jax.Array) -> jax.Array:
        if jnp.shape(records) != present.shape:
            raise ValueError(f"records must be numbers, got {_checks.described(records)}")
        return count_codes(codes_of(records), present, k)

    return Query(total=total, shape=(k,), reach=reach_of_tables([k]))


def contingency_query(categories: Mapping[str, int]) -> Query:
    """How many records have every combination of some attributes.

    Args:
        categories: of every attribute, by its name: attribute a is an integer from 0 to
            categories[a] - 1. A record out of range is not counted. Floats are codes as in
            `histogram_query`.

    Returns:
        A `Query` whose value has an axis for every attribute, in their order. Databases are dicts,
        or tables, that have these columns of integers, and others of numbers.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if there is no attribute, one has fewer than 2 categories, or the table would
            have 2^31 - 1 cells or more; on a database, if a column is missing.

    Formal guarantees:
        Those of `histogram_query`: the cells are disjoint.

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

    def total(records: Any, present: jax.Array) -> jax.Array:
        return count_combinations(records, present, sizes)

    cells = math.prod(sizes.values())
    return Query(total=total, shape=tuple(sizes.values()), reach=reach_of_tables([cells]))


def sizes_of_attributes(categories: Mapping[str, int]) -> dict[str, int]:
    """The number of categories by attribute, in order."""
    if not isinstance(categories, Mapping) or not categories:
        raise ValueError(
            "categories must be the number of categories by attribute, at least one, got"
            f" {_checks.shown(categories)}"
        )
    sizes = {
        name: _checks.integer(f"categories[{name!r}]", size, least=2)
        for name, size in categories.items()
    }
    if math.prod(sizes.values()) > LARGEST_TABLE:
        raise ValueError(
            f"categories must make a table of at most {LARGEST_TABLE} cells, got {sizes}"
        )
    return sizes


def count_combinations(records: Any, present: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """The contingency table of these attributes."""
    missing = [name for name in sizes if not isinstance(records, Mapping) or name not in records]
    if missing:
        raise ValueError(
            f"database must have the columns {missing}, got {_checks.described(records)}"
        )
    cell = jnp.zeros(present.shape, jnp.int32)
    for name, size in sizes.items():
        if records[name].shape != present.shape:
            raise ValueError(f"column {name!r} must hold an integer for each record")
        codes = _as_codes(records[name])
        present &= (codes >= 0) & (codes < size)
        cell = cell * np.int32(size) + jnp.clip(codes, 0, size - 1)
    shape = tuple(sizes.values())
    return count_codes(cell, present, math.prod(shape)).reshape(shape)


def count_codes(codes: jax.Array, present: jax.Array, k: int) -> jax.Array:
    """How many of the codes are 0, ..., k - 1, among those that are present."""
    inside = present & (codes >= 0) & (codes < k)
    return jnp.zeros(k, jnp.int32).at[jnp.where(inside, codes, k)].add(1, mode="drop")


def reach_of_tables(cells: Sequence[int]) -> Callable[[VectorNorm, NeighboringRelation], float]:
    """How far a record moves several tables of counts: in each it is in one cell, or in none.

    Replaced, it may leave a cell of each and enter another, where there is one.
    """

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        entered = [1] * len(cells)
        if relation is NeighboringRelation.REPLACE_ONE:
            entered += [1 for k in cells if k > 1]
        return norm_up([Fraction(x) for x in entered], norm)

    return reach


def comparable(numbers: jax.Array) -> jax.Array:
    """As floats, but for subnormal ones: 0, which some threads and devices take them for."""
    return without_subnormals(numbers.astype(compute_dtype(numbers.dtype)))


def without_subnormals(numbers: jax.Array) -> jax.Array:
    """With 0 for subnormal floats."""
    if not jnp.issubdtype(numbers.dtype, jnp.floating):
        return numbers
    return jnp.where(jnp.abs(numbers) < jnp.finfo(numbers.dtype).tiny, 0, numbers)


def _as_codes(records: Any) -> jax.Array:
    """Codes as int32, -1 for a float that is no whole number, or too large to be exact.

    Floats are no error: one missing value, which is private, turns a column of integers into them.
    """
    if not jnp.issubdtype(records.dtype, jnp.floating):
        return _checks.saturating_cast(records, jnp.int32)
    numbers = comparable(records)
    exact = jnp.abs(numbers) < min(2.0 ** (jnp.finfo(records.dtype).nmant + 1), 2.0**31)
    whole = exact & (numbers == jnp.floor(numbers))
    return jnp.where(whole, numbers, -1).astype(jnp.int32)


def _increasing_edges(edges: Any) -> np.ndarray:
    wanted = "buckets must be a number of them, or at least 2 increasing edges"
    try:
        array = np.array(edges, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {_checks.shown(edges)}") from error
    if array.ndim != 1 or array.size < 2 or not np.all(array[1:] > array[:-1]):
        raise ValueError(f"{wanted}, got {_checks.shown(edges)}")
    return array
