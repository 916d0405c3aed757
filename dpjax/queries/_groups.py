"""Groups of records by the public keys of a column, and queries for every group at once."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NotRequired, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Texts, check_usable, fingerprints, in_64_bits
from dpjax._core._frames import columns
from dpjax._core._guarantee import RECORD
from dpjax._core._types import Database, PyTree
from dpjax._core._values import NeighboringRelation
from dpjax._exact import _limbs
from dpjax._exact._numerics import bisected
from dpjax.mechanisms._selection import sum_of_group_maxima
from dpjax.queries._counts import largest_whole, of_each_record
from dpjax.queries._padded_records import PaddedRecords, complete, padded_records, present_records
from dpjax.queries._quantiles import QuantileScores
from dpjax.queries._query import IntegerQuery, Query, Reach
from dpjax.queries._totals import Addend, Totals, in_groups, of_each_group
from dpjax.targets._clamping import comparable
from dpjax.targets._known_sensitivity import VectorNorm, norm_up

Column: TypeAlias = str | int | Callable[[PyTree], Any]
"""A column of the records by its name or index, or a function of one record."""

By: TypeAlias = Mapping[str | int, Sequence[int] | Sequence[str]]
"""Columns by name or index, each with its public keys."""

_LARGEST_KEY = 2**63 - 1
ONE_ARRAY = (jax.Array, np.ndarray, Numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a column, one per public key.

    A query receives the column named by `of`; if `of` is None, all except the column of groups.
    """

    column: Column
    keys: tuple[int, ...] | tuple[str, ...]
    of: str | int | None = None

    def of_records(self, records: Database, present: jax.Array) -> jax.Array:
        """Returns the group of each record, as the index of its key; below 0 if it is in no group.

        The group of a record depends only on the record itself, and the computation is the same in
        every slot. So each record is in at most one group.
        """
        column = keys_of(self.column, records)
        if isinstance(self.keys[0], str) != isinstance(column, Texts):
            kind = "texts" if isinstance(column, Texts) else "numbers"
            raise TypeError(
                f"keys must be {kind}, like the entries of their column, got"
                f" {_checks.shown(self.keys)}"
            )
        if isinstance(column, Texts):
            wanted, words = fingerprints(self.keys), jnp.asarray(column.words)
            known = present
        else:
            self._check_held_by(column.dtype if isinstance(column, jax.Array) else column.of_dtype)
            with jax.enable_x64(True):
                codes, whole = integer_keys(column)
                known = present & whole
                words = jnp.stack(_limbs.from_integers(codes)[::-1], axis=-1)
            keys = np.array(self.keys, "<i8")
            wanted = keys.view("<u4").astype(np.uint32).reshape(-1, 2)
        return jnp.where(known, _places(words, wanted), -1)

    def _check_held_by(self, dtype: np.dtype) -> None:
        """Refuses keys that are integers which this float dtype cannot represent exactly."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return
        largest = max(map(abs, map(int, self.keys)))
        if largest >= largest_whole(dtype):
            raise ValueError(
                f"keys must be below {largest_whole(dtype)} in a column of {dtype}, because "
                f"{dtype} cannot distinguish larger integers, got {largest}: pass the column as "
                f"integers{' or float64' if dtype.itemsize < 8 else ''}, or as texts"
            )

    @property
    def named(self) -> tuple[tuple[str, int], ...]:
        """Returns the column's name and number of keys; nothing for a column without a name."""
        return ((self.column, len(self.keys)),) if isinstance(self.column, str) else ()

    def inside(self, records: Database) -> Database:
        """Returns what the query receives: one column, or all except the column of groups."""
        if self.of is not None:
            return picked(records, self.of)
        return records if callable(self.column) else without(records, self.column)


def exact_numbers(column: jax.Array | Numbers) -> tuple[jax.Array, jax.Array]:
    """Returns a column's numbers without rounding, and a mask that is false for missing numbers.

    Only a column of a table says which numbers are missing. For a plain array the mask is all true.
    """
    if isinstance(column, Numbers):
        return column.exact()
    return column, jnp.ones(column.shape, bool)


def integer_keys(column: jax.Array | Numbers) -> tuple[jax.Array, jax.Array]:
    """Converts numbers to int64 keys, and returns which are valid keys.

    Call this with x64 enabled.
    """
    numbers, known = exact_numbers(column)
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        largest, numbers = largest_whole(numbers.dtype), comparable(numbers)
        known &= (jnp.abs(numbers) < largest) & (numbers == jnp.floor(numbers))
    elif numbers.dtype == jnp.uint64:
        known &= numbers <= np.uint64(_LARGEST_KEY)
    return jnp.where(known, numbers, jnp.zeros_like(numbers)).astype(jnp.int64), known


def groups(column: Column, keys: object, of: str | int | None = None) -> Groups:
    """Checks the arguments of `by`, and returns the `Groups` of the column."""
    if not callable(column):
        check_name("column", column, ", or a function of a record")
    return Groups(column, _checked_keys(keys), of)


def check_name(name: str, column: object, others: str = "") -> None:
    """Raises an error unless `column` is the name or the index of a column.

    The error message contains `name`, the name of the argument, and `others`, a text that says what
    else is allowed.
    """
    if isinstance(column, bool) or not isinstance(column, (str, int)):
        raise TypeError(
            f"{name} must be the name or index of a column{others}, got {_checks.shown(column)}"
        )


def groups_of(by: By | None) -> tuple[Groups, ...]:
    """Returns the `Groups` of each column in `by`.

    The first column is the outermost axis of a value.
    """
    if by is None:
        return ()
    if not isinstance(by, Mapping) or not by or any(map(callable, by)):
        raise TypeError(
            f'by must be a dict of public keys, as {{"cut": ["Fair"]}}, got {_checks.shown(by)}'
        )
    return tuple(groups(column, keys) for column, keys in by.items())


def inside_groups(records: Database, by: By | None) -> Database:
    """Returns the records without the columns that define groups."""
    for one in groups_of(by):
        records = one.inside(records)
    return records


def each_group(function: Callable[..., PyTree], by: By | None) -> Callable[..., PyTree]:
    """Vectorizes a function of one group's value over all groups: one `vmap` per column."""
    for _ in by or ():
        function = jax.vmap(function)
    return function


def _checked_keys(keys: object) -> tuple[int, ...] | tuple[str, ...]:
    wanted = "keys must be a sequence of public integers or texts, without repeats"
    if isinstance(keys, (str, set, frozenset, Mapping)) or not hasattr(keys, "__iter__"):
        raise TypeError(f"{wanted}, got {_checks.shown(keys)}")
    if _checks.is_traced(keys):
        raise TypeError(
            f"{wanted}, got traced values: pass them as Python values, known before tracing"
        )
    found: list[Any] = [_plain(key, wanted) for key in keys]  # pyright: ignore
    if not found or len({isinstance(key, str) for key in found}) > 1:
        raise TypeError(
            f"keys must be integers only or texts only, at least one key, got {_checks.shown(keys)}"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"{wanted}, got {_checks.shown(keys)}")
    return tuple(found)


def _plain(key: object, wanted: str) -> int | str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (bool, np.bool_)):
        return int(key)
    if isinstance(key, jax.Array) and key.shape == ():
        key = np.asarray(key)[()]
    if not isinstance(key, numbers.Integral):
        raise TypeError(f"{wanted}, got {_checks.shown(key)}; round floats to integers first")
    return _checks.integer("keys", key, least=-_LARGEST_KEY - 1, most=_LARGEST_KEY)


def _places(words: jax.Array, wanted: np.ndarray) -> jax.Array:
    """Returns the index in `wanted` of each row of `words`, by bisection; -1 if absent."""
    order = np.lexsort(wanted.T[::-1])
    ascending = jnp.asarray(wanted[order])
    # Only as many words are compared as are needed to distinguish all keys; usually one.
    needed = next(w for w in range(1, 5) if len(np.unique(wanted[:, :w], axis=0)) == len(wanted))

    def before(row: jax.Array) -> jax.Array:
        """Returns, for each row of `words`, whether the key `ascending[row]` sorts before it."""
        found = jnp.zeros(row.shape, bool)
        for word in range(needed - 1, -1, -1):
            one = ascending[:, word].at[row].get(mode="promise_in_bounds")
            other = words[..., word]
            found = (one < other) | ((one == other) & found)
        return found

    place = bisected(before, len(wanted), words.shape[:-1])
    same = jnp.all(ascending.at[place].get(mode="clip") == words, axis=-1)
    return jnp.where(same, jnp.asarray(order, jnp.int32).at[place].get(mode="clip"), -1)


def keys_of(column: Column, records: Database) -> jax.Array | Numbers | Texts:
    """Returns the key of every record: an entry of the column, or the value of a function."""
    found = _computed(column, records) if callable(column) else picked(records, column)
    check_usable(found)
    n = jax.tree.leaves(records)[0].shape[0]
    if isinstance(found, (jax.Array, Numbers, Texts)) and found.shape == (n,):
        return found
    raise ValueError(
        f"column={_checks.shown(column)} must hold one integer or text for each of {n} records,"
        f" got {_checks.described(found)}"
    )


def _computed(column: Callable[[PyTree], Any], records: Database) -> jax.Array | Texts:
    """Evaluates the function `column` on every record, by the same program in every slot.

    A function that rounds runs on one record at a time, like the predicates of `counting_query`.
    """
    with in_64_bits(records):
        found = of_each_record("column", column, records)
    if isinstance(found, jax.Array) and jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(
            f"column must give an integer for each record, got {found.dtype}: convert floats to "
            "integers, for example by jnp.floor(x).astype(int)"
        )
    return found


def columns_of(records: Database) -> dict[str | int, PyTree]:
    """Returns the columns of a table, a tuple or an array of shape (n, d), by name or index."""
    if isinstance(records, ONE_ARRAY):
        # Only the columns of a matrix count as columns. An array of another rank has none, because
        # one of the axes of a record could be mistaken for columns.
        return {j: records[:, j] for j in range(records.shape[1] if records.ndim == 2 else 0)}
    return dict(records) if isinstance(records, Mapping) else dict(enumerate(records))


def picked(records: Database, column: str | int) -> PyTree:
    """Returns the column with this name or index."""
    try:
        return columns_of(records)[column]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"database must have a column {column!r}, got {_checks.described(records)}"
        ) from error


def without(records: Database, column: str | int) -> PyTree:
    """Returns all columns of `records` except `column`.

    If a single column remains, the result is its array. If no column would remain, the records are
    returned unchanged.
    """
    rest = {name: x for name, x in columns_of(records).items() if name != column}
    if len(rest) == 1:
        return next(iter(rest.values()))
    if isinstance(records, ONE_ARRAY) and records.ndim == 2:
        return records[:, np.array([*rest] or [0])]
    if not rest:
        return picked(records, column)
    return rest if isinstance(records, Mapping) else [*rest.values()]


_BY_GROUP: Any = sum_of_group_maxima  # Groups use this in place of a `VectorNorm`.


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedQuery(Query):
    """A query for every group at once, made by `by`.

    Its sensitivity is also known in the norm `sum_of_group_maxima`.

    Attributes:
        keys: the public keys of the groups, in the order of the first axis of the value.
        named_groups: the columns with names, each with the number of its keys, including the
            columns of an inner grouped query.

    Formal guarantees:
        The guarantees of `by`.
    """

    keys: tuple[int, ...] | tuple[str, ...]
    named_groups: tuple[tuple[str, int], ...] = ()

    norms = (*Query.norms, _BY_GROUP)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GroupedScores(QuantileScores):
    """Scores of quantiles for every group at once, shape (groups, quantiles, candidates).

    Made by `by`.

    Attributes:
        groups: the groups.
        keys: the public keys of the groups, in order.
        named_groups: contains (column, number of its keys) if the column has a name. Otherwise it
            is empty.

    Formal guarantees:
        The guarantees of `by`.
    """

    groups: Groups
    keys: tuple[int, ...] | tuple[str, ...]
    named_groups: tuple[tuple[str, int], ...]

    norms = (_BY_GROUP,)
    _n_is_private = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of groups, of quantiles, and of candidates."""
        return len(self.keys), *super().shape

    def partial(self, records: Database, present: jax.Array) -> Totals:
        """Like `QuantileScores.partial`, for each group."""
        group = self.groups.of_records(records, present)
        return self.partial_of(self.groups.inside(records), group, len(self.keys))

    def finish(self, totals: Totals) -> jax.Array:
        """The scores of each group, from the totals of all parts of the records."""
        return jax.vmap(super().finish)(of_each_group(totals, len(self.keys)))

    def _bound(
        self, norm: VectorNorm, relation: NeighboringRelation, n: int | None, dtype: DTypeLike
    ) -> float:
        reach = functools.partial(super()._bound, n=n, dtype=dtype)
        return reach_by_group(reach, len(self.keys))(norm, relation)


class _By(TypedDict):
    column: Column
    keys: Sequence[int] | Sequence[str]
    of: NotRequired[str | int | None]


@overload
def by(query: Query, **how: Unpack[_By]) -> GroupedQuery: ...


@overload
def by(query: QuantileScores, **how: Unpack[_By]) -> GroupedScores: ...


def by(
    query: Query | QuantileScores,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
) -> GroupedQuery | GroupedScores:
    """A query for every group at once.

    Its value has a leading axis of groups, one for each public key.

    Args:
        query: any `Query`, including a query that is already by group, or the scores of quantiles.
        column: the column with the key of each record: the name of a column of a table, the index
            of a column of an array of shape (n, d) or of a tuple, or a function of one record.
            Texts are compared with texts; in a column of objects, a number becomes the text of its
            digits. Integers are compared exactly, even with floats that are whole numbers. A
            function must return an integer, a boolean or a text, and runs as described for
            `counting_query`.
        keys: the public keys of the groups: distinct 64-bit integers or texts. A record whose key
            is missing or not in this list is in no group.
        of: the name or index of the column that the query receives; None for all other columns. If
            only one other column is left, the query receives it as an array. If `column` is a
            function, None means that the query receives all columns.

    Returns:
        A `GroupedQuery`, which `dpjax.privatize` releases. For scores of quantiles, it returns a
        `GroupedScores`, to be released by `select_each` with the count of one group. For `top_k`,
        use a grouped histogram with its sensitivity in the norm `sum_of_group_maxima`.

    Raises:
        TypeError: if an argument has another type, such as keys that are floats; on a database, if
            the column contains texts and the keys are numbers, or vice versa.
        ValueError: if keys repeat or are out of range; on a database, if a column is missing, or it
            contains floats that cannot distinguish a key from other integers.

    Formal guarantees:
        The groups are disjoint for any records. Under add-or-remove-one a record affects one group,
        so the sensitivity is the query's own in every norm. Under replace-one a record may change
        within a group, or leave one group and enter another. Let A and R be the query's
        sensitivities under add-or-remove-one and replace-one. Then the sensitivity by group is
        max(R, 2 A) in the norm l1, max(R, sqrt(2) A) in l2, and max(R, A) in linf.
        docs/proofs/groups.md has the proof. `error` covers all groups at once. The size of a group
        is private under both relations, so never divide by it.

    Source:
        McSherry (2009), Theorem 4, for parallel composition.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> diamonds = {"cut": np.array(["Fair", "Ideal", "Ideal"]), "price": np.array([4, 2, 3])}
        >>> total = queries.sum_query(lower=0, upper=10, capacity=100)
        >>> prices = queries.by(total, column="cut", keys=["Ideal", "Good", "Fair"])
        >>> prices(diamonds).tolist()
        [5.0, 0.0, 4.0]
    """
    which = groups(column, keys, of)
    if getattr(query, "privacy_unit", RECORD) != RECORD:
        raise TypeError(
            "query must be about rows, got a query by person: a person may be in several "
            "groups. Group the rows first, as in by_person(by(query, ...), ...)"
        )
    if type(query) is QuantileScores:
        scores = vars(query)
        return GroupedScores(**scores, groups=which, keys=which.keys, named_groups=which.named)
    if not isinstance(query, Query):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "query must be a Query, such as a count, a sum or a histogram, or scores of quantiles,"
            f" got {_checks.shown(query)}; release other statistics group by group, inside `with"
            " ledger.parallel()`"
        )
    # If `of` is given, the query receives only this column, not the table. The names in its
    # `named_groups` then do not refer to columns of the table, so they are left out.
    inner = query.named_groups if isinstance(query, GroupedQuery) and of is None else ()
    integers = integers_by_group(query._integers, which)
    return GroupedQuery(integers, which.keys, (*which.named, *inner))


def integers_by_group(query: IntegerQuery, which: Groups) -> IntegerQuery:
    """Returns the integers of `query` for every group of `which`, along the first axis."""
    count = len(which.keys)

    def addends(records: Database, present: jax.Array) -> list[Addend]:
        group = which.of_records(records, present)
        inside = query.addends_of(which.inside(records), present)
        return [in_groups(one, group, count) for one in inside]

    def finish(totals: Totals) -> jax.Array:
        return jax.vmap(query.finish)(of_each_group(totals, count))

    return query.with_reach(
        lambda reach: reach_by_group(reach, count),
        addends=addends,
        as_given=True,
        finish=finish,
        shape=(count, *query.shape),
    )


def split_by(
    database: Database,
    *,
    column: Column,
    keys: Sequence[int] | Sequence[str],
    of: str | int | None = None,
    capacity: int | None = None,
) -> dict[int | str, PaddedRecords]:
    """The records of each group, for separate releases.

    Each group gets as many slots as the database. Use this function if `by` does not support your
    release.

    Args:
        database: a `PaddedRecords`; or a pytree of arrays or a table, with a capacity.
        column: as for `by`.
        keys: as for `by`.
        of: as for `by`.
        capacity: the number of slots, public, as for `padded_records`; None if the database already
            has slots.

    Returns:
        A dict from each key to a `PaddedRecords`. Its shape reveals neither the number of records
        of the group nor the number of records of the database.

    Raises:
        TypeError: as `by` does.
        ValueError: as `by` does; or if arrays are given without a capacity, or `PaddedRecords` with
            a capacity.

    Formal guarantees:
        The parts are disjoint, by the proof of `by`. So under add-or-remove-one, releases about
        different parts cost only as much as the most expensive part: see `ledger.parallel`. A
        capacity equal to the number of records would reveal that number, for example by the grid
        and the noise of a sum.

    Source:
        The argument above.

    Example:
        >>> import numpy as np
        >>> from dpjax import queries
        >>> table = {"sex": np.array([0, 1, 1]), "age": np.array([40, 50, 60])}
        >>> found = queries.split_by(table, column="sex", keys=[0, 1], capacity=4)
        >>> {key: part.present.tolist() for key, part in found.items()}
        {0: [True, False, False, False], 1: [False, True, True, False]}
    """
    if isinstance(database, PaddedRecords) != (capacity is None):
        raise ValueError(
            "capacity must be a public number of slots for a table or arrays, because their shape"
            f" reveals the number of records. It must be None for PaddedRecords, got {capacity} and"
            f" {type(database).__name__}"
        )
    if capacity is not None:
        database = padded_records(database, capacity=capacity)
    which = groups(column, keys, of)
    group = which.of_records(*present_records(database))
    inside = which.inside(columns("database", database.records))  # As given.
    return {key: PaddedRecords(inside, group == place) for place, key in enumerate(which.keys)}


def reach_by_group(reach: Reach, groups: int) -> Reach:
    """Returns the sensitivity of the values of all groups together.

    `reach` is the sensitivity of the value of one group.
    """

    def by_group(norm: VectorNorm, relation: NeighboringRelation) -> float:
        # The norm of all values is computed in two steps: the norm `within` of the value of each
        # group, and then the norm `across` of the vector of these norms. docs/proofs/groups.md has
        # the proof.
        across, within = ("l1", "linf") if norm is _BY_GROUP else (norm, norm)
        added = reach(within, NeighboringRelation.ADD_OR_REMOVE_ONE)
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return added
        # With a single group, a replaced record cannot leave one group and enter another.
        changed = [Fraction(added)] * min(2, groups)
        return max(reach(within, relation), norm_up(changed, across))

    return by_group


@functools.lru_cache(maxsize=64)  # Cached, so that equal queries are traced only once.
def of_complete(query: IntegerQuery) -> IntegerQuery:
    """Returns `query` restricted to records without missing numbers. Other records count as absent.

    The complete records are treated as a group. A record that is replaced may enter or leave this
    group. So the sensitivity is that of the query for a single group.
    """

    def addends(records: Database, present: jax.Array) -> Sequence[Addend]:
        return query.addends(records, present & complete(records))

    return query.with_reach(lambda reach: reach_by_group(reach, 1), addends=addends)
