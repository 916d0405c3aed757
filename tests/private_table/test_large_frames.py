"""Tables larger than memory: the bits of the same table in memory, from every source."""

import datetime

import jax
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import dpjax
from dpjax.tables import _large_frame

KEY = dpjax.random.seeded_key(3)
N, MOST = 1000, 2000
GENERATOR = np.random.default_rng(0)
FRAME = pl.DataFrame(
    {
        "ward": np.array(["north", "east", "south"])[GENERATOR.integers(0, 3, N)],
        "cost": GENERATOR.gamma(2, 100, N).round(2),
        "age": pl.Series(GENERATOR.integers(0, 90, N)).replace({7: None}),
        "day": [datetime.date(2020, 1, 1) + datetime.timedelta(days=i % 300) for i in range(N)],
        "tags": [[1]] * N,
    }
)
BY, BOUNDS = {"ward": ["east", "north"]}, {"bounds": (0, 500)}
STATISTICS = {
    "count": lambda table: table.count(epsilon=1.0, key=KEY),
    "count where": lambda table: table.count(
        where=lambda row: (row["age"] > 30) & (row["ward"] != "east"), epsilon=1.0, key=KEY
    ),
    "crosstab": lambda table: table.crosstab(
        ["ward", "age"], keys={"age": range(20), **BY}, epsilon=1.0, key=KEY
    ),
    "histogram": lambda table: table.histogram("age", [0, 20, 90], by=BY, epsilon=1.0, key=KEY),
    "sum": lambda table: table.sum("age", bounds=(0, 90), epsilon=1.0, key=KEY),
    "mean": lambda table: table.mean("cost", **BOUNDS, by=BY, epsilon=1.0, key=KEY),
    "variance": lambda table: table.variance("cost", **BOUNDS, epsilon=1.0, key=KEY),
    "quantiles": lambda table: table.quantiles(
        "cost", [0.5], **BOUNDS, by=BY, epsilon=1.0, key=KEY
    ),
    "top": lambda table: table.top("age", 3, keys=range(90), epsilon=1.0, key=KEY),
    "range": lambda table: table.bounds("cost", epsilon=1.0, key=KEY),
    "covariance": lambda table: table.covariance(
        ["cost", "age"], bounds={"cost": (0, 500), "age": (0, 90)}, by=BY, epsilon=1.0, key=KEY
    ),
    "line": lambda table: table.regression(
        "cost", ["age"], bounds={"cost": (0, 500), "age": (0, 90)}, epsilon=1.0, key=KEY
    ),
    "days": lambda table: table.mean("day", bounds=(18_000, 19_000), epsilon=1.0, key=KEY),
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The frame in batches of 128 rows."""
    monkeypatch.setattr(_large_frame, "ROWS", 128)
    path = tmp_path / "a.parquet"
    pq.write_table(FRAME.to_arrow(), path, row_group_size=300)
    return {
        "frames": lambda: (FRAME[i : i + 300] for i in range(0, N, 300)),
        "dataset": ds.dataset(path),
        "lazy": pl.scan_parquet(path),
    }


@pytest.mark.parametrize("name", STATISTICS)
def test_batches_have_the_bits_of_the_table_in_memory(name, sources):
    ask = STATISTICS[name]
    whole = ask(dpjax.PrivateTable(FRAME, most_rows=MOST))
    for source in sources.values():
        found = ask(dpjax.PrivateTable(source, most_rows=MOST))
        jax.tree.map(np.testing.assert_array_equal, found.value, whole.value)
        assert found.guarantee == whole.guarantee
        assert repr(found) == repr(whole)


def test_a_pass_reads_the_columns_that_it_uses(sources, monkeypatch):
    dataset = sources["dataset"]
    asked = []

    class Watched:
        def __getattr__(self, name):
            return getattr(dataset, name)

        def to_batches(self, columns, **options):
            asked.append(columns)
            return dataset.to_batches(columns, **options)

    Watched.__module__ = "pyarrow.dataset"
    table = dpjax.PrivateTable(Watched(), most_rows=MOST)
    table.mean("cost", **BOUNDS, by=BY, where=lambda row: row["age"] > 3, epsilon=1.0, key=KEY)
    table.count(epsilon=1.0, key=KEY)
    assert [sorted(columns) for columns in asked] == [["age", "cost", "ward"], ["ward"]]


def test_a_statistic_that_does_not_add_up_refuses_batches(sources):
    table = dpjax.PrivateTable(sources["lazy"], most_rows=MOST)
    with pytest.raises(TypeError, match=r"frame must fit into memory .* column 'age'"):
        table.k_means(["age"], clusters=2, bounds=(0, 90), epsilon=1.0, delta=1e-6, key=KEY)
    replaced = dpjax.PrivateTable(
        sources["lazy"], most_rows=MOST, relation=dpjax.NeighboringRelation.REPLACE_ONE
    )
    with pytest.raises(ValueError, match="must be add-or-remove-one for a database in parts"):
        replaced.mean("cost", **BOUNDS, epsilon=1.0, key=KEY)
    with pytest.raises(TypeError, match="column 'tags' must be numbers, texts, dates or times"):
        table.mean("tags", **BOUNDS, epsilon=1.0, key=KEY)
    few = dpjax.PrivateTable(sources["lazy"], most_rows=N - 1)
    with pytest.raises(ValueError, match="most_rows must be enough for every possible table"):
        few.count(epsilon=1.0, key=KEY)


def test_a_table_without_rows_is_no_refusal(sources):
    nobody = dpjax.PrivateTable(lambda: [FRAME.head(0)], most_rows=10)
    assert abs(nobody.count(epsilon=1e6, key=KEY).value) == 0
    schema = pa.schema([("x", "double")])
    assert (
        dpjax.PrivateTable(ds.dataset(schema.empty_table()), most_rows=10)
        .count(epsilon=1e6, key=KEY)
        .value
        == 0
    )
