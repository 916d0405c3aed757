"""Sources that are read in batches: all their rows, once each, at every pass."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dpjax._core._frames import batches_of, exact_column
from tables import for_each

N, ROWS = 1000, 128
FRAME = pd.DataFrame({"x": np.arange(N) * 0.5, "t": np.array(["a", "b"])[np.arange(N) % 2]})


def of_frames(_):
    return lambda: (FRAME[i : i + 300] for i in range(0, N, 300))


def of_dicts(_):
    return lambda: [{name: FRAME[name].to_numpy() for name in FRAME}]


def of_file(path):
    pq.write_table(pa.Table.from_pandas(FRAME), path, row_group_size=400)
    return pq.ParquetFile(path)


def of_dataset(path):
    of_file(path)
    return ds.dataset(path)


def of_lazy(path):
    of_file(path)
    return pl.scan_parquet(path)


SOURCES = {one.__name__: one for one in (of_frames, of_dicts, of_file, of_dataset, of_lazy)}


@for_each("name", SOURCES)
def test_every_pass_has_all_rows_once(name, tmp_path):
    source = batches_of("frame", SOURCES[name](tmp_path / "a.parquet"))
    first = source.first(ROWS)
    assert list(first) == ["x", "t"]
    assert all(len(column) <= ROWS for column in first.values())
    for wanted in (["x"], ["t", "x"]):
        for _ in range(2):
            ((found, sizes),) = source.each(wanted, ROWS, read)
            assert sorted(found["x"]) == FRAME["x"].tolist()
            assert list(found) == sorted(wanted)
            assert max(sizes) <= ROWS


def read(batches):
    """All numbers and texts, and the sizes of batches."""
    columns, sizes = {}, []
    for batch in batches:
        sizes.append(len(next(iter(batch.values()))))
        for name, column in sorted(batch.items()):
            found = exact_column(name, column)
            rows = found.words if hasattr(found, "words") else found
            columns.setdefault(name, []).extend(np.asarray(rows).tolist())
    return dict(sorted(columns.items())), sizes


def test_what_can_be_read_once_is_refused():
    with pytest.raises(TypeError, match=r"got an iterator, .*: pass a function that returns"):
        batches_of("frame", iter([FRAME]))


def test_what_is_in_memory_is_no_source():
    for frame in (FRAME, {"x": FRAME["x"]}, pa.table({"x": [1]}), pl.DataFrame({"x": [1]})):
        assert batches_of("frame", frame) is None


def test_names_and_tables_are_checked():
    with pytest.raises(ValueError, match=r"column must be one of .*'x', 't'.* of frame, got 'y'"):
        list(batches_of("frame", lambda: [FRAME]).each(["y"], ROWS, list))
    with pytest.raises(ValueError, match="frame must return an iterator of at least one table"):
        batches_of("frame", lambda: []).first(ROWS)
    with pytest.raises(
        TypeError, match="frame must be a table whose columns have strings as names, or"
    ):
        batches_of("frame", lambda: [np.ones(3)]).first(ROWS)
