"""Workloads: many linear queries of one contingency table, each a weighted sum of its cells."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import Database
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax.queries._counts import (
    check_cells,
    combinations,
    contingency_query,
    histogram_query,
    query_of_tables,
    sizes_of_attributes,
)
from dpjax.queries._query import IntegerQuery, Query
from dpjax.queries._totals import Addend, Totals, saturated
from dpjax.targets._known_sensitivity import VectorNorm, norm_up, sqrt_up

_LARGEST_ENTRY = 2**15
# The columns of a matrix are compared pairwise only if all comparisons read at most this many
# entries, which takes about ten seconds.
_MOST_COMPARED = 2**31
# On a GPU, one kernel computes all marginals if their sums have at most this many terms in total.
# For longer sums, the cost of starting a kernel for each marginal is negligible.
_MOST_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Workload(Query):
    """Linear queries of the table of counts h of a database: the vector A h, where A is public.

    As a `Query`, it answers all queries at once: its value has the shape (queries,).

    Attributes:
        cells: the shape of the table h.
        answers: maps a table of floats, such as a histogram or a distribution, to all answers. This
            map is linear.

    Formal guarantees:
        The guarantees of a `Query`. The sensitivity is the largest norm of a column of A, or of the
        difference of two columns, so it is attained. A `linear_workload` of very many cells does
        not compare its columns: then the sensitivity may be larger. In the norm linf, the
        sensitivity bounds how much a record changes any single answer.
    """

    cells: tuple[int, ...]
    answers: Callable[[jax.Array], jax.Array]
    _table: Callable[[], Query]

    @property
    def table(self) -> Query:
        """A query of the table of counts. Refuses a table that is too large to store."""
        return self._table()

    def row(self, query: int | jax.Array) -> jax.Array:
        """The weights of the cells in one query, as floats. It works in `jit` with a traced index.

        Args:
            query: the index of the query among the answers.

        Returns:
            An array of the shape of the table.
        """
        return self.combination(jax.nn.one_hot(query, self.shape[0]))

    def combination(self, weights: jax.Array) -> jax.Array:
        """The weights of the cells in a weighted sum of queries: the transpose of `answers`.

        Args:
            weights: floats of shape (queries,).

        Returns:
            An array of the shape of the table.
        """
        table = jax.ShapeDtypeStruct(self.cells, weights.dtype)
        # `linear_transpose` has no type annotations.
        return jax.linear_transpose(self.answers, table)(weights)[0]  # pyright: ignore


def linear_workload(matrix: ArrayLike | Sequence[Sequence[int]]) -> Workload:
    """The linear queries of a matrix.

    Args:
        matrix: A, integers of shape (queries, cells), in magnitude at most 2^15, known before
            tracing. Multiply fractions by a common denominator first.

    Returns:
        A `Workload` of a table of shape (cells,). A database has one integer for each of its n
        records: the index of the record's cell, from 0 to cells - 1. A record with another number
        is not counted. The integers may be stored as floats, as in `histogram_query`.

    Raises:
        TypeError: if the matrix does not contain integers.
        ValueError: if the matrix has another shape, only zeros, or an entry out of range; on a
            database, if it does not have shape (n,).

    Formal guarantees:
        The guarantees of `Workload`. Under add-or-remove-one the sensitivity is the largest norm of
        a column. Under replace-one it is the largest norm of a column or of the difference of two
        columns. Both are attained, with one exception: in the norms l1 and l2, comparing all
        columns takes cells^2 * queries operations. If that is more than 2^31, the sensitivity under
        replace-one is twice the largest norm of a column instead (triangle inequality), which may
        not be attained.

    Source:
        Hardt and Talwar (2010), for the geometry of linear queries; Li, Hay, Rastogi, Miklau and
        McGregor (2010), for the norms of columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> prefixes = queries.linear_workload([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
        >>> prefixes(jnp.array([0, 2, 2])).tolist()
        [1, 1, 3]
        >>> prefixes.sensitivity().value
        3.0
    """
    entries = _integer_matrix(matrix)
    queries, cells = entries.shape
    table, data = histogram_query(cells), entries.tobytes()

    def finish(totals: Totals) -> jax.Array:
        products = _limbs.multiply(_limbs.from_integers(jnp.asarray(entries.T)), totals[0])
        return saturated(_limbs.total(products))

    def answers(table: jax.Array) -> jax.Array:
        return jnp.asarray(entries, table.dtype) @ table

    # The cache of `_largest_move` is not stored in the query, because a query that contains a cache
    # would be traced again at each release.
    integers = IntegerQuery(
        addends=table._integers.addends,
        finish=finish,
        shape=(queries,),
        reach=lambda norm, relation: _largest_move(data, queries, norm, relation),
        one_way=bool(np.all(entries >= 0)),
    )
    return Workload(integers, (cells,), answers, lambda: table)


def marginal_workload(
    categories: Mapping[str, int], marginals: Sequence[Sequence[str]]
) -> Workload:
    """Marginals of a contingency table, each over some of its attributes.

    Marginals are counted directly from the records. The whole table may have any size, because it
    is never stored, except by `table`, `answers` and `row`.

    Args:
        categories: the number of categories of each attribute, as for `contingency_query`.
        marginals: the attributes of each marginal: at least one, and distinct.

    Returns:
        A `Workload`. Its answers are the cells of the first marginal, then the cells of the next
        marginal, and so on. Within a marginal, the last of its attributes varies fastest. The table
        of the workload has an axis for every attribute.

    Raises:
        TypeError: if a number of categories is not an integer.
        ValueError: if a number is out of range, there is no marginal, or a marginal has unknown or
            repeated attributes, or 2^31 - 1 cells or more; on a database, if a column is missing.

    Formal guarantees:
        Every record is in one cell of each of the k marginals. Under add-or-remove-one the
        sensitivity is k in the norm l1, sqrt(k) in l2, and 1 in linf. Under replace-one it is 2 k,
        sqrt(2 k) and 1, because the two records may differ in every attribute. All are attained.

    Source:
        Barak, Chaudhuri, Dwork, Kale, McSherry and Talwar (2007).

    Example:
        >>> import dpjax
        >>> import jax.numpy as jnp
        >>> from dpjax import queries
        >>> pairs = queries.marginal_workload({"a": 2, "b": 2, "c": 3}, [("a", "b"), ("c",)])
        >>> people = {"a": jnp.array([0, 1]), "b": jnp.array([1, 1]), "c": jnp.array([2, 2])}
        >>> pairs(people).tolist()
        [0, 1, 0, 1, 0, 0, 2]
        >>> pairs.sensitivity(relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE).value
        2.0
    """
    sizes = sizes_of_attributes(categories)
    chosen = tuple(_attributes(marginal, sizes) for marginal in marginals)
    if not chosen:
        raise ValueError("marginals must contain at least one marginal, got none")
    tables = [{name: sizes[name] for name in marginal} for marginal in chosen]
    cells = tuple(map(check_cells, tables))

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        return [combinations(records, present, one) for one in tables]

    def one_by_one(table: jax.Array) -> jax.Array:
        return jnp.concatenate([_summed(table, tuple(sizes), x).ravel() for x in chosen])

    def at_once(table: jax.Array) -> jax.Array:
        return _summed_at_once(table.ravel(), sizes, chosen)

    def answers(table: jax.Array) -> jax.Array:
        if len(chosen) * table.size > _MOST_AT_ONCE:
            return one_by_one(table)
        # Only a GPU starts a separate kernel for each sum, so other devices sum one by one.
        return lax.platform_dependent(table, cpu=one_by_one, tpu=one_by_one, default=at_once)

    integers = query_of_tables(addends, cells, (sum(cells),))
    return Workload(integers, tuple(sizes.values()), answers, lambda: contingency_query(sizes))


def _attributes(marginal: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    names = tuple(marginal)
    if isinstance(marginal, str) or not names or len({*names} & {*sizes}) < len(names):
        raise ValueError(
            f"marginals must be distinct names of {tuple(sizes)}, got {_checks.shown(marginal)}"
        )
    return names


def _summed(table: jax.Array, attributes: tuple[str, ...], chosen: tuple[str, ...]) -> jax.Array:
    """Returns the marginal of a table over the chosen attributes, in the given order."""
    others = tuple(axis for axis, name in enumerate(attributes) if name not in chosen)
    left = [name for name in attributes if name in chosen]
    return jnp.sum(table, axis=others).transpose([left.index(name) for name in chosen])


def _summed_at_once(
    table: jax.Array, sizes: Mapping[str, int], chosen: Sequence[tuple[str, ...]]
) -> jax.Array:
    """Returns all marginals of a flat table, concatenated.

    Marginals of equal size share one sum.
    """
    upward = np.cumprod([1, *list(sizes.values())[:0:-1]])
    strides = dict(zip(sizes, map(int, upward[::-1]), strict=True))

    def places(names: Iterable[str]) -> np.ndarray:
        """Returns the flat indices of all cells in which the attributes not in `names` are 0."""
        axes = (strides[name] * np.arange(sizes[name], dtype=np.int32) for name in names)
        return functools.reduce(np.add.outer, axes, np.zeros((), np.int32)).ravel()

    starts = [places(names) for names in chosen]
    rests = [places(name for name in sizes if name not in names) for names in chosen]
    answers = dict[int, jax.Array]()
    for size in {len(start) for start in starts}:
        group = [i for i, start in enumerate(starts) if len(start) == size]
        start, rest = (jnp.asarray([some[i] for i in group]) for some in (starts, rests))
        sums = jnp.sum(table[start[:, :, None] + rest[:, None, :]], axis=-1)
        answers.update(zip(group, jnp.unstack(sums), strict=True))
    return jnp.concatenate([answers[i] for i in range(len(chosen))])


def _integer_matrix(matrix: ArrayLike | Sequence[Sequence[int]]) -> np.ndarray:
    wanted = f"matrix must hold integers from -{_LARGEST_ENTRY} to {_LARGEST_ENTRY}"
    if _checks.is_traced(matrix):
        raise TypeError("matrix must be known before tracing")
    array = np.asarray(matrix)
    if not (np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        raise TypeError(f"{wanted}, got {_checks.shown(matrix)}")
    if array.ndim != 2 or not np.any(array) or np.max(np.abs(array.astype(float))) > _LARGEST_ENTRY:
        raise ValueError(
            f"{wanted}, with shape (queries, cells), and not all 0, got {_checks.shown(array)}"
        )
    entries = array.astype(np.int32)
    entries.setflags(write=False)  # Read-only, so that programs that contain it can be cached.
    return entries


@functools.lru_cache(16)
def _largest_move(data: bytes, rows: int, norm: VectorNorm, relation: NeighboringRelation) -> float:
    entries = np.frombuffer(data, np.int32).reshape(rows, -1)
    # A record out of range is not counted, which corresponds to a column of zeros.
    columns = np.unique(np.vstack([0 * entries[:, 0], entries.T]), axis=0)
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return _norm_of_power_sum(_power_sums(columns, norm).max(), norm)
    if norm == "linf":
        return float((columns.max(axis=0) - columns.min(axis=0)).max())
    if len(columns) * columns.size > _MOST_COMPARED:
        return 2 * _norm_of_power_sum(_power_sums(columns, norm).max(), norm)
    longest = max(_power_sums(columns - other, norm).max() for other in columns)
    return _norm_of_power_sum(longest, norm)


def _power_sums(rows: np.ndarray, norm: VectorNorm) -> np.ndarray:
    """Returns the l1 norm, squared l2 norm, or linf norm of each row."""
    sizes = np.abs(rows.astype(np.int64))
    if norm == "linf":
        return sizes.max(axis=1)
    return (sizes if norm == "l1" else sizes**2).sum(axis=1)


def _norm_of_power_sum(total: np.integer, norm: VectorNorm) -> float:
    return sqrt_up(Fraction(int(total))) if norm == "l2" else norm_up([Fraction(int(total))], norm)
