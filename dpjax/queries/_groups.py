"""Groups of records: the public keys of a column, and who is in which group."""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._columns import Texts, fingerprints
from dpjax._core._numbers import Numbers, for_functions, in_64_bits
from dpjax._core._types import Database, PyTree
from dpjax._tracing._lanes import check_lanes, is_exact
from dpjax.targets._interval import comparable, without_subnormals

Column: TypeAlias = str | int | Callable[[PyTree], Any]
"""A column of the records by its name or index, or a function of one record."""

By: TypeAlias = Mapping[str | int, Sequence[int] | Sequence[str]]
"""Columns by name or index, each with its public keys."""

_LARGEST_KEY = 2**63 - 1
ONE_ARRAY = (jax.Array, np.ndarray, Numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a column, one for each public key, and the column that is asked about."""

    column: Column
    keys: tuple[int, ...] | tuple[str, ...]
    of: str | int | None = None

    def split(self, records: Database, present: jax.Array) -> tuple[Database, jax.Array]:
        """The records that are asked about, and who is present in each group: (groups, slots).

        A slot is in the group of its own record, by the same computation in every slot. So each
        record is in one group, or in none.
        """
        column, known = _keys_of(self.column, records), present
        if isinstance(self.keys[0], str) != isinstance(column, Texts):
            kind = "texts" if isinstance(column, Texts) else "numbers"
            raise TypeError(
                f"keys must be {kind} as in their column, got {_checks.shown(self.keys)}"
            )
        if isinstance(column, Texts):
            wanted = jnp.asarray(fingerprints(self.keys))
            same = jnp.all(column.words[None] == wanted[:, None], axis=-1)
        else:
            self._check_held_by(column.dtype if isinstance(column, jax.Array) else column.of_dtype)
            with jax.enable_x64(True):
                codes, whole = integer_keys(column)
                known &= whole
                same = codes[None] == jnp.asarray(np.array(self.keys, np.int64))[:, None]
        return self.inside(records), same & known[None]

    def _check_held_by(self, dtype: np.dtype) -> None:
        """Refuses keys that floats of a dtype do not tell from their neighbors."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return
        largest = max(map(abs, map(int, self.keys)))
        if largest >= largest_whole(dtype):
            raise ValueError(
                f"keys must be below {largest_whole(dtype)} in a column of {dtype}, which does not"
                f" tell larger integers apart, got {largest}: give the column as integers"
                f"{' or float64' if dtype.itemsize < 8 else ''}, or as texts"
            )

    def inside(self, records: Database) -> Database:
        """The records that are asked about: one column, or all but that of the groups."""
        if self.of is not None:
            return _picked(records, self.of)
        return records if callable(self.column) else _without(records, self.column)


def integer_keys(column: jax.Array | Numbers) -> tuple[jax.Array, jax.Array]:
    """Numbers as keys, int64, and whether each is one; where JAX has 64 bits."""
    if isinstance(column, Numbers):
        numbers, known = column.exact()
    else:
        numbers, known = column, jnp.ones(column.shape, bool)
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        largest, numbers = largest_whole(numbers.dtype), comparable(numbers)
        known &= (jnp.abs(numbers) < largest) & (numbers == jnp.floor(numbers))
    elif numbers.dtype == jnp.uint64:
        known &= numbers <= np.uint64(_LARGEST_KEY)
    return jnp.where(known, numbers, jnp.zeros_like(numbers)).astype(jnp.int64), known


def largest_whole(dtype: np.dtype) -> int:
    """A power of two below which floats of a dtype hold every integer, and each as itself."""
    return 2 ** (int(jnp.finfo(dtype).nmant) + 1)  # pyright: ignore  # ml_dtypes has no types.


def groups(column: Column, keys: object, of: str | int | None = None) -> Groups:
    """Groups with keys that were checked."""
    if not callable(column) and (isinstance(column, bool) or not isinstance(column, (str, int))):
        raise TypeError(
            "column must be a name, an index or a function of a record, got"
            f" {_checks.shown(column)}"
        )
    return Groups(column, _checked_keys(keys), of)


def groups_of(by: By | None) -> tuple[Groups, ...]:
    """The groups of several columns, the first of them outermost."""
    if by is None:
        return ()
    if not isinstance(by, Mapping) or not by or any(map(callable, by)):
        raise TypeError(
            'by must give columns and their public keys, as {"cut": ["Fair", "Ideal"]}, got'
            f" {_checks.shown(by)}"
        )
    return tuple(groups(column, keys) for column, keys in by.items())


def inside_groups(records: Database, by: By | None) -> Database:
    """The records without the columns of groups."""
    for one in groups_of(by):
        records = one.inside(records)
    return records


def each_group(function: Callable[..., PyTree], by: By | None) -> Callable[..., PyTree]:
    """A function of one group's value, made to take the values of all."""
    for _ in by or ():
        function = jax.vmap(function)
    return function


def _checked_keys(keys: object) -> tuple[int, ...] | tuple[str, ...]:
    wanted = "keys must be integers or texts, public, in an order, without repeats"
    if isinstance(keys, (str, set, frozenset, Mapping)) or not hasattr(keys, "__iter__"):
        raise TypeError(f"{wanted}, got {_checks.shown(keys)}")
    if _checks.is_traced(keys):
        raise TypeError(f"{wanted}, known before tracing")
    found: list[Any] = [_plain(key, wanted) for key in keys]  # pyright: ignore
    if not found or len({isinstance(key, str) for key in found}) > 1:
        raise TypeError(f"{wanted}, all of one kind and at least one, got {_checks.shown(keys)}")
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


def _keys_of(column: Column, records: Database) -> jax.Array | Numbers | Texts:
    """The key of every record."""
    found = _computed(column, records) if callable(column) else _picked(records, column)
    n = jax.tree.leaves(records)[0].shape[0]
    if isinstance(found, (jax.Array, Numbers, Texts)) and found.shape == (n,):
        return found
    raise ValueError(
        f"column={_checks.shown(column)} must hold one integer or text for each of {n} records,"
        f" got {_checks.described(found)}"
    )


def _computed(column: Callable[[PyTree], Any], records: Database) -> jax.Array | Texts:
    """What a function gives for every record, by the same program in every slot.

    A function that rounds runs on one record at a time, as the predicates of `counting_query`.
    """
    with in_64_bits(records):
        records = for_functions(records)
        checked, program = check_lanes("column", column, records)
        if is_exact(program):
            found = jax.vmap(checked)(jax.tree.map(without_subnormals, records))
        else:
            found = lax.map(checked, records)
    if isinstance(found, jax.Array) and jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(
            f"column must give an integer for each record, got {found.dtype}: round it, as by"
            " jnp.floor(x).astype(int)"
        )
    return found


def _picked(records: Database, column: str | int) -> PyTree:
    """One column of a table, a tuple or an array of shape (n, d)."""
    try:
        if isinstance(records, ONE_ARRAY):
            # Of another array, some axis would count as that of the records.
            axis = range(records.shape[1] if records.ndim == 2 else 0)
            found = {j: records[:, j] for j in axis}
        else:
            found = records if isinstance(records, Mapping) else dict(enumerate(records))
        return found[column]  # pyright: ignore  # A column that is not there is refused below.
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"database must have a column {column!r}, got {_checks.described(records)}"
        ) from error


def _without(records: Database, column: str | int) -> PyTree:
    """The other columns; one alone as it is, and the column itself if there is no other."""
    if isinstance(records, ONE_ARRAY):
        others = [j for j in range(records.shape[1]) if j != column]
        return records[:, others[0] if len(others) == 1 else np.array(others or [0])]
    if isinstance(records, Mapping):
        rest: Any = {name: x for name, x in records.items() if name != column}
        alone = list(rest.values())
    else:
        rest = alone = [x for j, x in enumerate(records) if j != column]
    if not alone:
        return _picked(records, column)
    return alone[0] if len(alone) == 1 else rest
