"""Databases as they are handed over: trees of arrays with a common leading axis of records."""

import functools
import hashlib
from collections.abc import Iterable

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Database, PyTree

_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool")


@frozen_pytree
class PaddedRecords:
    """Records in a public number of slots; an empty slot counts as no record in any query.

    `dpjax.queries.padded_records` and `parts` make them from a capacity. If you make one yourself,
    you promise that its number of slots is public: it must not come from the number of records.

    Attributes:
        records: a pytree of arrays, whose leading axis is the slots. The contents of an empty slot
            do not matter.
        present: booleans of shape (slots,), which of them hold a record.

    Formal guarantees:
        Shapes, time and refusals depend on the number of slots, never on how many are taken.
    """

    records: Database
    present: jax.Array


@frozen_pytree
class Texts:
    """A column of texts as fingerprints of 128 bits, which compare like the texts.

    Attributes:
        words: uint32 of shape (n, 4); 0 where there is no text.
    """

    words: jax.Array | np.ndarray

    def __repr__(self) -> str:
        return "texts"


def fingerprints(texts: Iterable[object]) -> np.ndarray:
    """The words of `Texts`, each computed from its own text alone."""

    @functools.cache  # A column repeats its texts, and to hash them takes longer than a release.
    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    digests = [digest(text) if isinstance(text, str) else bytes(16) for text in texts]
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 4)


def record_arrays(name: str, database: Database, *, least: int = 1) -> tuple[Database, int]:
    """The arrays of a database, and its number of records; a table is a dict of its columns.

    Refusals depend on structure, dtypes and sizes alone.
    """
    count = "n" if least == 1 else f"at least {least}"
    wanted = f"{name} must be arrays with a common leading axis of {count} records"
    tree = columns(database)
    leaves = jax.tree.leaves(tree)
    # Before anything is converted: a list of numbers has as many leaves as numbers.
    if any(np.shape(leaf) == () for leaf in leaves if not callable(leaf)):
        raise ValueError(
            f"{wanted}, got {_checks.described(tree)}; if that is a list of numbers,"
            " pass numpy.asarray of it"
        )
    records = _checks.real_arrays(name, tree)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(records)}
    if len(sizes) != 1 or min(sizes) < least:
        raise ValueError(f"{wanted}, got {_checks.described(records)}")
    (n,) = sizes
    # More booleans than slots would count a record more than once.
    if isinstance(records, PaddedRecords) and records.present.shape != (n,):
        raise ValueError(
            f"present must be one boolean for each of {n} slots, got"
            f" {_checks.described(records.present)}"
        )
    return records, n


def check_padded(database: Database) -> None:
    """Refuses a database whose arrays show its number of records, where that is private."""
    if not isinstance(database, PaddedRecords):
        raise ValueError(
            "under add-or-remove-one the number of records is private, and an array shows it: pass"
            " dpjax.queries.padded_records(database, capacity=...)"
        )


def columns(database: Database) -> Database:
    """A database with tables as dicts of their columns, and columns of texts as `Texts`."""
    tables = jax.tree.map(_columns_of_a_table, database)

    def column(path: tuple[object, ...], leaf: PyTree) -> PyTree:
        """One with a name, in a dtype that does not depend on which of its entries are missing.

        Texts become `Texts`. Numbers of polars and Arrow become floats, with NaN for missing ones.
        """
        if not path or not isinstance(path[-1], jax.tree_util.DictKey):
            return leaf
        if _holds_texts(leaf):
            # NumPy forgets which texts of an Arrow dictionary are missing.
            texts = np.asarray(leaf.to_pylist() if hasattr(leaf, "to_pylist") else leaf, object)
            return Texts(fingerprints(texts.ravel()).reshape(*texts.shape, 4))
        # Nullable columns of pandas are refused later: NumPy makes different dtypes of them.
        is_arrow = hasattr(leaf, "to_pylist") or hasattr(leaf, "to_arrow")
        if is_arrow and _kind(leaf).startswith(_NUMBERS):
            return np.asarray(leaf.to_numpy(), np.float64)
        return leaf

    return jax.tree_util.tree_map_with_path(column, tables)


def _holds_texts(leaf: PyTree) -> bool:
    """Whether a column is one of texts, by its dtype alone: what is missing is private."""
    dtype = getattr(leaf, "dtype", None)
    if hasattr(leaf, "mask") and hasattr(leaf, "filled"):
        return False  # A mask hides something, so it is refused later.
    categories = getattr(dtype, "categories", None)
    if hasattr(categories, "dtype"):
        return _holds_texts(categories)
    if isinstance(dtype, np.dtype):
        return dtype.kind in "UOT"
    name, *_ = _kind(leaf).removeprefix("dictionary<values=").split(",")
    return name in ("str", "string", "large_string", "string_view", "categorical")


def _kind(leaf: PyTree) -> str:
    """The name of a dtype of pandas or polars, or of a type of Arrow."""
    return str(getattr(leaf, "dtype", getattr(leaf, "type", ""))).lower()


def _columns_of_groups(groups: PyTree) -> PyTree:
    """The columns of `frame.groupby("cut")["price"]`, a group and a number for each record."""
    name, values = groups.keys, groups.obj
    if groups.ndim != 1 or not isinstance(name, (str, int)):
        raise TypeError(
            'groups must be those of one column and hold one, as frame.groupby("cut")["price"]; for'
            " others pass the frame itself, and name the columns"
        )
    # The column itself. An index of groups has a dtype that pandas takes from private values.
    grouper = groups._grouper if hasattr(groups, "_grouper") else groups.grouper  # pandas 2.1.
    return {name: grouper.groupings[0].grouping_vector, values.name: values}


def _columns_of_a_table(leaf: PyTree) -> PyTree:
    """The columns of a DataFrame, each with its own dtype; anything else stays as it is.

    Known by its attributes, so that no library of tables is imported, nor missed.
    """
    if isinstance(leaf, type):
        return leaf
    if hasattr(leaf, "ngroups") and hasattr(leaf, "indices"):
        return _columns_of_groups(leaf)
    if hasattr(leaf, "column_names"):  # Of Arrow.
        columns = list(leaf.column_names)
    elif hasattr(leaf, "columns") and hasattr(leaf, "dtypes"):
        columns = list(leaf.columns)
    else:
        return leaf
    if len(set(columns)) < len(columns):
        raise ValueError(
            f"columns of a table must have names of their own, got {_checks.shown(columns)}"
        )
    return {column: leaf[column] for column in columns}
