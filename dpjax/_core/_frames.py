"""Exact conversion of tables and columns of pandas, polars, Arrow and other libraries.

The library narwhals reads the tables. NumPy and JAX arrays are converted without it. The conversion
depends only on the dtype of a column, never on its entries. Even the fact that some entries are
missing is private.
"""

import dataclasses
import functools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._columns import Numbers, Refused, Texts, fingerprints, is_column
from dpjax._core._moments import Moments, in_seconds, moments_of_numpy, numbers_of_numpy
from dpjax._core._types import Database, PyTree

# Libraries whose tables and columns are converted by narwhals. Tables of the second group are lazy.
_EAGER = frozenset({"pandas", "polars", "pyarrow", "modin", "cudf", "narwhals"})
_LAZY = frozenset({"dask", "dask_expr", "duckdb", "_duckdb", "ibis", "pyspark", "sqlframe"})


def columns(name: str, database: Database) -> Database:
    """Converts the tables of a database to dicts of NumPy arrays, `Numbers` and `Texts`.

    Raises:
        ModuleNotFoundError: if a table needs narwhals, which is not installed.
        TypeError: if a column that is not part of a table contains neither numbers nor texts nor
        dates. In a table, such a column becomes `Refused`, which raises an error when it is used.
        ValueError: if two columns of a table have the same name.
    """

    def tables(path: tuple[Any, ...], leaf: PyTree) -> PyTree:
        table = as_table(leaf)
        if table is None:
            return exact_column(place_of(name, path), leaf, named=bool(path))
        return {key: exact_column(f"column {key!r}", x) for key, x in table.items()}

    return jax.tree_util.tree_map_with_path(tables, database, is_leaf=is_column)


def place_of(name: str, path: tuple[Any, ...]) -> str:
    """Returns the text by which messages refer to a column.

    It contains the name of the column, or its path in a pytree without names.
    """
    if not path:
        return name
    key = getattr(path[-1], "key", path[-1])
    if isinstance(key, (str, int)):
        return f"column {key!r} of {name}"
    return name + jax.tree_util.keystr(path)


def as_table(leaf: PyTree) -> dict[str, Any] | None:
    """Returns the columns of a table by name, after computing a lazy table.

    The result is None for anything but a table.
    """
    if not _is_of_a_library(leaf):
        return None
    nw, found = _wrapped("database", leaf)
    if isinstance(found, nw.Series):
        return None
    frame = found.collect() if isinstance(found, nw.LazyFrame) else found
    return {name: frame.get_column(name) for name in frame.columns}


def table_of_columns(name: str, table: PyTree) -> dict[str, Any]:
    """Returns the columns of a table, or of a dict of columns, by name and unconverted."""
    found = as_table(table)
    found = table if found is None else found
    if not isinstance(found, Mapping) or not found or not all(isinstance(x, str) for x in found):
        # Entries are private, so the error shows only the names of columns, or only types.
        named = isinstance(found, Mapping)
        got = f"the columns {_checks.shown(list(found))}" if named else _checks.described(table)
        raise TypeError(
            f"{name} must be a table whose columns have strings as names, or a dict of columns, got"
            f" {got}" + (": rename its columns" if named and found else "")
        )
    return dict(found)


def exact_column(place: str, leaf: PyTree, *, named: bool = True) -> PyTree:
    """Converts a column to a dtype that does not depend on which of its entries are missing.

    If no query supports the dtype, a column with a name becomes `Refused`, and a column without a
    name raises an error at once.
    """
    if is_column(leaf) or isinstance(leaf, (jax.Array, type, Refused)) or callable(leaf):
        return leaf
    _checks.refuse_masked(place, leaf)
    if isinstance(leaf, np.ndarray):
        found = _of_numpy(leaf)
    elif _is_of_a_library(leaf):
        found = _of_series(_wrapped(place, leaf)[1])
    else:
        return leaf
    if found is None:
        refused = Refused(
            f"{place} must be numbers, texts, dates or times, got the dtype {dtype_of(leaf)}: cast"
            " it to one of these, or leave it out"
        )
        return refused if named else refused.refuse()
    if isinstance(found, Texts) and not named:
        is_object = str(dtype_of(leaf)) == "object"
        or_floats = ', or convert it by .astype("float64")' if is_object else ""
        raise TypeError(
            f"{place} must be numbers, got the dtype {dtype_of(leaf)}: convert its texts to "
            "their positions in a public list, for example by "
            "pandas.Index(public).get_indexer(column), or pass a table with this column, and "
            f"count its texts by dpjax.queries.by{or_floats}"
        )
    return found


def moments_of(leaf: PyTree) -> Moments | None:
    """Returns the `Moments` of a column of dates, times or durations; None for other columns."""
    if not _is_of_a_library(leaf):
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.kind not in "mM":
            return None
        return moments_of_numpy(dtype)
    nw, series = _wrapped("column", leaf)
    if series.dtype in (nw.Categorical, nw.Enum):
        categories = _categories(series)
        return None if categories is None else moments_of(categories)
    kinds = {nw.Date: "dates", nw.Datetime: "times", nw.Duration: "durations"}
    return next((Moments(kind) for of, kind in kinds.items() if series.dtype == of), None)


def texts_of(leaf: PyTree) -> np.ndarray:
    """Returns the entries of a column of texts or of objects, as a NumPy array of objects."""
    if not _is_of_a_library(leaf):
        return np.asarray(leaf, object)
    series = _wrapped("column", leaf)[1]
    arrow = _arrow_of(series)
    # If an Arrow dictionary were converted to NumPy, its missing entries would look like texts.
    return _objects(series.to_list() if arrow is None else _entries_of_arrow(arrow))


def _objects(entries: Sequence[object]) -> np.ndarray:
    """Returns an array with one object for each entry, also if all entries are equally long."""
    return np.fromiter(entries, object, len(entries))


_TEXTS_OF_ARROW = {"string", "large_string", "string_view"}


def _entries_of_arrow(array: Any) -> list[Any]:
    """Returns the entries of an Arrow array.

    Arrow does not check that its strings are valid UTF-8. Invalid bytes are kept as surrogates,
    because an error would show that one of the rows contains them.
    """
    if str(array.type).startswith("dictionary"):
        array = _with_wide_indices(array).cast(array.type.value_type)
    if str(array.type) not in _TEXTS_OF_ARROW:
        return array.to_pylist()
    entries = array.cast("large_binary").to_pylist()
    return [x if x is None else x.decode("utf-8", "surrogateescape") for x in entries]


def dtype_of(leaf: PyTree) -> object:
    """Returns the dtype of a column, as an object of the library that the column comes from."""
    native = leaf.to_native() if hasattr(leaf, "to_native") else leaf
    found = getattr(native, "dtype", getattr(native, "type", ""))
    # NumPy's dtype of strings contains the length of the longest one, which is private.
    return "str" if isinstance(found, np.dtype) and found.kind == "U" else found


def _is_of_a_library(leaf: object) -> bool:
    """Whether a value is an object of a library of tables, or of a subclass of its classes."""
    if isinstance(leaf, (np.ndarray, jax.Array, type)):
        return False
    return any(root_of(cls) in _EAGER | _LAZY for cls in type(leaf).__mro__)


def root_of(cls: type) -> str:
    """Returns the name of the top-level package that defines a class."""
    return cls.__module__.partition(".")[0]


def _wrapped(place: str, leaf: Any) -> tuple[Any, Any]:
    """Returns the module narwhals, and a table or column wrapped by it."""
    nw = _checks.extra("narwhals", "table")
    try:
        found = nw.from_native(_as_series(leaf), pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError as error:
        told = " ".join(str(error).split())
        raise ValueError(f"columns of a table must have distinct names: {told}") from error
    if not isinstance(found, (nw.DataFrame, nw.LazyFrame, nw.Series)):
        raise TypeError(
            f"{place} must be a table or a column of a table, got a {type(leaf).__name__}: pass the"
            " table itself, and name its columns"
        )
    return nw, found


def _as_series(leaf: Any) -> Any:
    """Converts columns and batches that narwhals does not accept to types that it accepts."""
    root = root_of(type(leaf))
    if root == "dask":
        return leaf.compute()
    library: Any = sys.modules.get(root)
    if root == "pyarrow":
        if isinstance(leaf, library.RecordBatch):
            return library.Table.from_batches([leaf])
        return library.chunked_array([leaf]) if isinstance(leaf, library.Array) else leaf
    if root == "pandas" and isinstance(
        leaf, (library.Index, library.api.extensions.ExtensionArray)
    ):
        return library.Series(leaf, dtype=leaf.dtype)
    return leaf


def _of_numpy(leaf: np.ndarray) -> np.ndarray | Texts | None:
    if leaf.dtype.kind in "UOT":
        return _texts(leaf)
    if leaf.dtype.kind not in "mM":
        return leaf
    moments = moments_of_numpy(leaf.dtype)
    return None if moments is None else numbers_of_numpy(moments, leaf)


def _of_series(series: Any) -> np.ndarray | Numbers | Texts | None:
    """Converts one column of a table to an array, `Numbers` or `Texts`.

    The result is None if no query supports the column's dtype.
    """
    nw = sys.modules["narwhals"]
    native, dtype = series.to_native(), getattr(series.to_native(), "dtype", None)
    held_by_numpy = isinstance(dtype, np.dtype) and not series.implementation.is_cudf()
    if held_by_numpy:
        # To distinguish strings from other objects, narwhals would look at the entries, which are
        # private.
        return _of_numpy(np.asarray(native)) if dtype.kind in "iufbmMO" else None
    dtype: Any = series.dtype
    if dtype in (nw.Categorical, nw.Enum):
        return _of_categories(series)
    arrow = _arrow_of(series) if dtype == nw.String else None
    if arrow is not None:
        return _of_dictionary(arrow.dictionary_encode())
    if dtype in (nw.String, nw.Object):
        return _texts(texts_of(series))
    known = ~series.is_null().to_numpy()
    if dtype == nw.Date:
        return np.where(known, _integers(series, nw.Int32).astype(np.float64), np.nan)
    if dtype in (nw.Datetime, nw.Duration):
        return in_seconds(_integers(series, nw.Int64), known, dtype.time_unit)
    if dtype == nw.Boolean:
        return Numbers.of(_integers(series, nw.UInt8).astype(bool), known)
    if dtype.is_integer():
        return Numbers.of(_integers(series, dtype), known) if dtype != nw.Int128 else None
    if dtype.is_decimal():
        # Libraries differ in how they round decimals to floats, but they all parse strings in the
        # same way.
        series = series.cast(nw.String).cast(nw.Float64)
    elif not dtype.is_float():
        return None
    return series.to_numpy()


def _integers(series: Any, dtype: Any) -> np.ndarray:
    """Casts a column to an integer dtype, with 0 for missing entries."""
    return series.cast(dtype).fill_null(0).to_numpy()


def _of_categories(series: Any) -> np.ndarray | Numbers | Texts | None:
    """Converts a categorical column to a column with the dtype of its categories."""
    dictionary = _arrow_of(series)
    if dictionary is not None:
        return _of_dictionary(dictionary)
    if not series.implementation.is_pandas_like():
        return _texts(texts_of(series))
    native = series.to_native()
    return _of_codes(native.dtype.categories, np.asarray(native.cat.codes))


def _arrow_of(series: Any) -> Any:
    """Returns the Arrow array of a column; None if another library stores it."""
    native = series.to_native()
    if series.implementation.is_pyarrow():
        return native
    # A column of pandas may be stored in an Arrow array.
    dtype = native.dtype
    is_arrow = hasattr(dtype, "pyarrow_dtype") or getattr(dtype, "storage", "") == "pyarrow"
    return sys.modules["pyarrow"].chunked_array([series.to_arrow()]) if is_arrow else None


def _with_wide_indices(array: Any) -> Any:
    """Returns a dictionary-encoded array whose indices have 32 bits.

    The chunks may be joined later. Together they may have more distinct entries than narrow indices
    can number.
    """
    pyarrow, kind = sys.modules["pyarrow"], array.type
    wide = [
        pyarrow.DictionaryArray.from_arrays(chunk.indices.cast("int32"), chunk.dictionary)
        for chunk in array.chunks
    ]
    return pyarrow.chunked_array(wide, pyarrow.dictionary("int32", kind.value_type))


def _of_dictionary(native: Any) -> np.ndarray | Numbers | Texts | None:
    """Converts a dictionary-encoded column of Arrow, hashing each distinct string only once."""
    whole = _with_wide_indices(native).unify_dictionaries().combine_chunks()
    codes = whole.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
    categories = whole.dictionary
    # If the strings remained an Arrow array, `exact_column` would dictionary-encode them again.
    if str(categories.type) in _TEXTS_OF_ARROW:
        categories = _objects(_entries_of_arrow(categories))
    return _of_codes(categories, codes)


def _of_codes(categories: Any, codes: np.ndarray) -> np.ndarray | Numbers | Texts | None:
    """Replaces each code by its category. Negative codes are missing entries."""
    found = exact_column("column", categories)
    if isinstance(found, Refused):
        return None
    if isinstance(found, Texts):
        words = np.concatenate([np.asarray(found.words), np.zeros((1, 4), np.uint32)])
        return Texts(words[codes])
    known = None
    if isinstance(found, Numbers):
        found, known = found.on_host()
    # The code -1 selects the last entry, which is appended here. So even an empty list of
    # categories has an entry to select.
    found = np.append(found, np.zeros(1, found.dtype))
    there = np.append(np.ones(len(found) - 1, bool) if known is None else known, False)[codes]
    if found.dtype.kind == "f":
        return np.where(there, found[codes], found.dtype.type(np.nan))
    return Numbers.of(found[codes], there)


def _categories(series: Any) -> Any:
    """Returns an object whose dtype is that of the categories; None for categories of polars.

    Categories of polars are always strings.
    """
    dictionary = _arrow_of(series)
    if dictionary is not None:
        return sys.modules["pyarrow"].array([], dictionary.type.value_type)
    return series.to_native().dtype.categories if series.implementation.is_pandas_like() else None


def _texts(texts: np.ndarray) -> Texts:
    return Texts(fingerprints(texts.ravel()).reshape(*texts.shape, 4))


# Tables larger than memory, which are read batch by batch or partition by partition.
#
# Every pass reads the source again from its start. Nothing in the code below depends on the entries
# of the tables.


T = TypeVar("T")
Table = dict[str, Any]
"""Columns by name, as objects of the library that they come from."""

_WANTED = (
    "a function that returns a new iterator of tables at every call, a pyarrow dataset or"
    " ParquetFile, a LazyFrame of polars, a Dask DataFrame, or a Dataset of Ray"
)


@dataclasses.dataclass(frozen=True)
class Batches:
    """A table that is read in batches, each of which fits into memory.

    Attributes:
        name: the name of the argument, for messages.
        like: returns a table with the same columns, which may be empty.
        tables: given names of columns and a number of rows, returns a new iterator of tables. A
            table may have more rows than that number.
        on_partitions: given names of columns and a function of a table, returns an iterator of the
            function's results on all partitions. The function runs where each partition is stored.
            None if the source has no partitions.
    """

    name: str
    like: Callable[[], Any]
    tables: Callable[[Sequence[str], int], Iterator[Any]]
    on_partitions: Callable[[Sequence[str], Callable[[Any], Any]], Iterator[Any]] | None = None

    def first(self, rows: int) -> Table:
        """Returns at most `rows` rows; only the names and dtypes of the columns matter."""
        columns = table_of_columns(self.name, self.like())
        return {name: column[:rows] for name, column in columns.items()}

    def each(
        self, names: Sequence[str], rows: int, function: Callable[[Iterator[Table]], T]
    ) -> Iterator[T]:
        """Calls `function` on an iterator of batches, and yields the result.

        Batches have at most `rows` rows. For a source with partitions, this yields one result per
        partition; for any other source, a single result.
        """
        if self.on_partitions is None:
            yield function(in_batches(self.name, self.tables(names, rows), names, rows))
            return
        of_table = functools.partial(_of_table, self.name, names, rows, function)
        yield from self.on_partitions(names, of_table)


def _of_table(
    name: str, names: Sequence[str], rows: int, function: Callable[[Iterator[Table]], T], table: Any
) -> T:
    return function(in_batches(name, iter([table]), names, rows))


def in_batches(
    name: str, tables: Iterator[Any], names: Sequence[str], rows: int
) -> Iterator[Table]:
    """Yields the columns `names` of some tables, in batches of at most `rows` rows."""
    for table in tables:
        given = table_of_columns(name, table)
        columns = {x: _column(name, given, x) for x in names}
        n = len(next(iter(columns.values())))
        for start in range(0, n, rows):
            yield {x: column[start : start + rows] for x, column in columns.items()}


def _column(name: str, columns: Table, wanted: str) -> Any:
    if wanted not in columns:
        raise ValueError(
            f"column must be one of {_checks.shown(list(columns))} of {name}, got"
            f" {_checks.shown(wanted)}"
        )
    return columns[wanted]


def batches_of(name: str, source: Any) -> Batches | None:
    """Returns the batches of a source that may not fit into memory; None for other values.

    Raises:
        TypeError: for an iterator, which could be read only once.
    """
    if isinstance(source, Iterator):
        raise TypeError(
            f"{name} must be {_WANTED}; got an iterator, which can be read only once, but every"
            " statistic reads the table again: pass a function that returns a new iterator"
        )
    root = root_of(type(source))
    if root == "pyarrow" and hasattr(source, "iter_batches"):
        like = source.schema_arrow.empty_table
        read = source.iter_batches
        return Batches(name, like, lambda names, rows: read(batch_size=rows, columns=list(names)))
    if root == "pyarrow" and hasattr(source, "get_fragments"):
        like = source.schema.empty_table
        return Batches(name, like, lambda names, rows: _of_dataset(source, names, rows))
    if root == "polars" and hasattr(source, "collect_batches"):
        like = source.head(0).collect
        return Batches(
            name,
            like,
            lambda names, rows: source.select(list(names)).collect_batches(
                chunk_size=rows, maintain_order=True
            ),
        )
    if root == "dask":
        return Batches(
            name,
            lambda: source.get_partition(0).head(0),
            lambda names, rows: iter([]),
            lambda names, function: _on_dask(source, names, function),
        )
    if root == "ray" and hasattr(source, "map_batches"):
        return Batches(
            name,
            lambda: _like_ray(source.schema()),
            lambda names, rows: iter([]),
            lambda names, function: _on_ray(source, names, function),
        )
    if callable(source) and not hasattr(source, "columns"):
        make: Any = source
        # `_first` refuses an iterator without tables. So the iterator must yield a table even if
        # there are no rows. Otherwise the error would reveal that there are no rows, which is
        # private.
        return Batches(name, lambda: _first(name, make), lambda names, rows: iter(make()))
    return None


def _first(name: str, make: Callable[[], Iterable[Any]]) -> Any:
    tables = make()
    if isinstance(tables, Iterator) and make() is tables:
        raise TypeError(
            f"{name} must return a new iterator at every call, because every pass reads the table "
            "again, got the same iterator twice: make the iterator inside of the function"
        )
    for table in tables:
        return table
    raise ValueError(
        f"{name} must return an iterator of at least one table (which may have no rows), got an "
        "iterator of no tables"
    )


def _of_dataset(source: Any, names: Sequence[str], rows: int) -> Iterator[Any]:
    # With threads, Arrow would read the rest of the file into memory while a batch is being used.
    options: dict[str, Any] = {"batch_readahead": 2, "fragment_readahead": 1, "use_threads": False}
    if getattr(getattr(source, "format", None), "default_extname", "") == "parquet":
        # With `pre_buffer`, Arrow would keep in memory all parts of a file that it has read, until
        # the end of the file.
        parquet = sys.modules["pyarrow.dataset"].ParquetFragmentScanOptions
        options["fragment_scan_options"] = parquet(pre_buffer=False)
    return source.to_batches(columns=list(names), batch_size=rows, **options)


def _on_dask(source: Any, names: Sequence[str], function: Callable[[Any], T]) -> Iterator[T]:
    """Applies `function` to every partition, on the worker that Dask chooses."""
    dask = sys.modules["dask"]
    parts = source[list(names)].to_delayed()
    yield from dask.compute(*(dask.delayed(function)(part) for part in parts))


def _like_ray(schema: Any) -> Any:
    """Returns an empty Arrow table with Ray's schema. Workers convert all blocks to Arrow."""
    columns = zip(schema.names, schema.types, strict=True)
    return sys.modules["pyarrow"].schema(list(columns)).empty_table()


def _on_ray(source: Any, names: Sequence[str], function: Callable[[Any], T]) -> Iterator[T]:
    """Applies `function` to every block, on the worker that Ray chooses."""

    def of_block(block: Any) -> dict[str, list[bytes]]:
        return {"result": [pickle.dumps(function(block))]}

    blocks = source.select_columns(list(names))
    results = blocks.map_batches(of_block, batch_size=None, batch_format="pyarrow")
    for row in results.iter_rows():
        yield pickle.loads(row["result"])
