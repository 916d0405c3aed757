"""Tables larger than memory, which are read batch by batch or partition by partition.

Every pass reads the source again from the start. Nothing in this file depends on the entries of
tables.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from dpjax._core import _checks
from dpjax._core._frames import root_of, table_of_columns

T = TypeVar("T")
Table = dict[str, Any]
"""Columns by name, as objects of the library that they come from."""

_WANTED = (
    "a function that returns a new iterator of tables at every call, a pyarrow dataset or"
    " ParquetFile, a LazyFrame of polars, or a Dask DataFrame"
)


@dataclasses.dataclass(frozen=True)
class Batches:
    """A table in batches, each of which fits into memory.

    Attributes:
        name: the name of the argument, for messages.
        like: returns a table with the same columns, which may be empty.
        tables: maps names of columns and a number of rows to a new iterator of tables. These
            tables may have more rows than asked for.
        on_partitions: maps names of columns and a function of a table to an iterator of the
            function's results on all partitions. The function runs where each partition is stored.
            None if the source has no partitions.
    """

    name: str
    like: Callable[[], Any]
    tables: Callable[[Sequence[str], int], Iterator[Any]]
    on_partitions: Callable[[Sequence[str], Callable[[Any], Any]], Iterator[Any]] | None = None

    def first(self, rows: int) -> Table:
        """A table of at most `rows` rows, from which to read the names and dtypes of columns."""
        columns = table_of_columns(self.name, self.like())
        return {name: column[:rows] for name, column in columns.items()}

    def each(
        self, names: Sequence[str], rows: int, function: Callable[[Iterator[Table]], T]
    ) -> Iterator[T]:
        """Calls a function of an iterator of batches, and yields its results.

        Batches have at most `rows` rows. A source with partitions yields one result for each
        partition, and any other source yields a single result.
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
    """Some columns of tables, in batches of at most `rows` rows."""
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
    """The batches of a source that does not fit into memory; None for any other value.

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
        return Batches(name, like, lambda names, rows: _of_parquet(source, names, rows))
    if root == "pyarrow" and hasattr(source, "get_fragments"):
        like = source.schema.empty_table
        return Batches(name, like, lambda names, rows: _of_dataset(source, names, rows))
    if root == "polars" and hasattr(source, "collect_batches"):
        like = source.head(0).collect
        return Batches(name, like, lambda names, rows: _of_lazy(source, names, rows))
    if root == "dask":
        return Batches(
            name,
            lambda: source.get_partition(0).head(0),
            lambda names, rows: iter([]),
            lambda names, function: _on_dask(source, names, function),
        )
    if callable(source) and not hasattr(source, "columns"):
        make: Any = source
        # The iterator must contain at least one table, even if the table has no rows. Otherwise an
        # error would reveal that there are no rows, which is private.
        return Batches(name, lambda: _first(name, make()), lambda names, rows: iter(make()))
    return None


def _first(name: str, tables: Iterable[Any]) -> Any:
    for table in tables:
        return table
    raise ValueError(
        f"{name} must return an iterator of at least one table, which may have no rows, got none"
    )


def _of_parquet(source: Any, names: Sequence[str], rows: int) -> Iterator[Any]:
    return source.iter_batches(batch_size=rows, columns=list(names))


def _of_dataset(source: Any, names: Sequence[str], rows: int) -> Iterator[Any]:
    # If Arrow used threads, it would read the rest of the file into memory while a batch is in use.
    options: dict[str, Any] = {"batch_readahead": 2, "fragment_readahead": 1, "use_threads": False}
    if getattr(getattr(source, "format", None), "default_extname", "") == "parquet":
        # With `pre_buffer`, Arrow keeps all that it has read of a file in memory until the file
        # ends.
        parquet = sys.modules["pyarrow.dataset"].ParquetFragmentScanOptions
        options["fragment_scan_options"] = parquet(pre_buffer=False)
    return source.to_batches(columns=list(names), batch_size=rows, **options)


def _of_lazy(source: Any, names: Sequence[str], rows: int) -> Iterator[Any]:
    return source.select(list(names)).collect_batches(chunk_size=rows, maintain_order=True)


def _on_dask(source: Any, names: Sequence[str], function: Callable[[Any], T]) -> Iterator[T]:
    """Applies a function to every partition, where Dask's scheduler places it."""
    dask = sys.modules["dask"]
    parts = source[list(names)].to_delayed()
    yield from dask.compute(*(dask.delayed(function)(part) for part in parts))
