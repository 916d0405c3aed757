"""Tables larger than memory: the bits of the same table in memory, from every source."""

import datetime
import itertools
import tempfile
import time

import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import dpjax
from dpjax._core._frames import batches_of
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


def test_memory_is_that_of_a_batch_however_slowly_batches_are_used(tmp_path):
    """Threads of Arrow would read the file to its end."""
    path, rows = tmp_path / "a.parquet", 2**14
    numbers = np.random.default_rng(0).uniform(size=2**21)
    pq.write_table(pa.table({"x": numbers}), path, row_group_size=2 * rows)
    batches = batches_of("frame", ds.dataset(path)).each(["x"], rows, lambda tables: tables)
    before = pa.total_allocated_bytes()
    tables = next(batches)
    next(tables)
    time.sleep(0.2)
    assert pa.total_allocated_bytes() - before < numbers.nbytes / 4


# Ids of 6 people and of nobody. Rows of a person are in several batches of 4.
IDS = np.array([3, 1, 3, 3, 2, 1, 9, 3, 2, 9, 9, 1, 4, 3, 5, 3, -1, 2**40], np.int64)
VISITS = pd.DataFrame(
    {
        "id": pd.array(IDS, "Int64").copy(),
        "ward": np.array(["a", "b"])[np.arange(len(IDS)) % 2],
        "cost": np.arange(len(IDS), dtype=float),
        "day": np.arange(len(IDS))[::-1].copy(),
    }
)
VISITS.loc[VISITS["id"] == -1, "id"] = pd.NA
OF_PEOPLE = {
    "id": {"rows": 2},
    "id and groups": {"rows": 1, "groups": {"ward": 1}},
    "order": {"rows": 2, "order": "day"},
}
ASK_PEOPLE = {
    "count": lambda table: table.count(by={"ward": ["a", "b"]}, epsilon=1.0, key=KEY),
    "where": lambda table: table.count(where=lambda row: row["day"] > 4, epsilon=1.0, key=KEY),
    "mean": lambda table: table.mean("cost", bounds=(0, 20), epsilon=1.0, key=KEY),
    "sums": lambda table: table.sum(
        "cost", bounds=(0, 20), by={"ward": ["a", "b"]}, per_person="sum", epsilon=1.0, key=KEY
    ),
    "histogram of sums": lambda table: table.histogram(
        "cost", [0, 5, 10, 99], per_person="sum", epsilon=1e6, key=KEY
    ),
    "quantiles": lambda table: table.quantiles(
        "cost", [0.5], bounds=(0, 20), by={"ward": ["a", "b"]}, epsilon=1.0, key=KEY
    ),
}


def batches_of_visits(frame, rows):
    return lambda: (frame[i : i + rows] for i in range(0, len(frame), rows))


@pytest.mark.parametrize("name", OF_PEOPLE)
def test_a_person_in_several_batches_counts_as_in_memory(name, monkeypatch):
    monkeypatch.setattr(_large_frame, "ROWS", 8)
    how = {"person": "id", "most_rows": 64, **OF_PEOPLE[name]}
    for frame in (VISITS, VISITS.assign(id=VISITS["id"].astype(str))):
        whole = dpjax.PrivateTable(frame, **how)
        parts = dpjax.PrivateTable(batches_of_visits(frame, 4), **how)
        for ask in ASK_PEOPLE.values():
            expected, found = ask(whole), ask(parts)
            jax.tree.map(np.testing.assert_array_equal, found.value, expected.value)
            assert found.guarantee == expected.guarantee
            assert repr(found) == repr(expected)


def test_the_rows_of_people_that_count_are_those_of_the_whole_table(monkeypatch):
    """Small tables drawn at random: exact counts, so one row too many for a person shows."""
    monkeypatch.setattr(_large_frame, "ROWS", 4)
    generator = np.random.default_rng(5)
    for _ in range(12):
        ids = generator.integers(0, 4, 12)
        frame = pd.DataFrame({"id": ids, "ward": generator.integers(0, 2, 12)})
        how = {"person": "id", "most_rows": 16, "rows": 1, "groups": {"ward": 1}}
        by = {"by": {"ward": [0, 1]}, "epsilon": 1e6, "key": KEY}
        found = dpjax.PrivateTable(batches_of_visits(frame, 2), **how).count(**by).value
        sums = dpjax.PrivateTable(batches_of_visits(frame, 2), **{**how, "rows": 2}).sum(
            "ward", bounds=(0, 1.5), per_person="sum", epsilon=1e6, key=KEY
        )
        two = frame.groupby("id").head(2).groupby("id")["ward"].sum()
        assert float(sums.value) == pytest.approx(two.clip(0, 1.5).sum(), abs=1e-3)
        first = frame.drop_duplicates("id")["ward"]
        assert found.tolist() == [int((first == 0).sum()), int((first == 1).sum())]


def test_no_person_in_batches_moves_counts_further_than_the_noise_covers(monkeypatch):
    """All rows of a person are left out. Rows of both people are in several batches."""
    monkeypatch.setattr(_large_frame, "ROWS", 4)
    how = {"person": "id", "most_rows": 8, "rows": 2, "groups": {"ward": 1}}
    by = {"by": {"ward": [0, 1]}, "epsilon": 100.0, "key": KEY}
    moved = []
    for wards in itertools.product((0, 1), repeat=2):
        frame = pd.DataFrame({"id": [1, 2, 1, 2, 1], "ward": [*wards, 1, 0, 1]})

        def counts(frame):
            release = dpjax.PrivateTable(batches_of_visits(frame, 2), **how).count(**by)
            assert release.accuracy.facts["arrays"][0]["scale"] == pytest.approx(0.02, rel=1e-3)
            return np.asarray(release.value)

        whole = counts(frame)
        moved += [np.abs(whole - counts(frame[frame["id"] != one])).sum() for one in (1, 2)]
    assert max(moved) == 2  # The scale is that of two rows at epsilon 100.


def test_no_file_of_private_rows_outlives_an_error(tmp_path, monkeypatch):
    """Also not as long as the error itself, which a notebook keeps."""
    monkeypatch.setattr(_large_frame, "ROWS", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []

    def fail(*totals):
        made.extend(tmp_path.glob("*/*"))
        raise OSError("of a disk")

    monkeypatch.setattr("dpjax.queries._totals.added", fail)
    table = dpjax.PrivateTable(batches_of_visits(VISITS, 4), most_rows=64, person="id", rows=1)
    with pytest.raises(OSError, match="of a disk") as kept:
        table.count(epsilon=1.0, key=KEY)
    assert made
    assert not list(tmp_path.iterdir())
    del kept


def test_a_batch_whose_integers_alone_may_be_missing_is_refused():
    """The first batch says that none can be, so a missing one would count as 0."""
    whole = pd.DataFrame({"id": [1, 2], "age": [4, 4]})
    nullable = whole.assign(age=pd.array([None, None], "Int64"))
    table = dpjax.PrivateTable(
        lambda: iter([whole, nullable]), most_rows=8, person="id", rows=2, missing="lower"
    )
    with pytest.raises(TypeError, match="got int64 and nullable int64"):
        table.sum("age", bounds=(-5, 5), epsilon=1.0, key=KEY)


@pytest.mark.parametrize("people", [{}, {"person": "id", "rows": 2}], ids=["rows", "people"])
def test_a_batch_of_another_kind_is_refused(people):
    """One missing id makes pandas read all ids of a batch as floats, in which large ones meet."""
    ids = pd.DataFrame({"id": [2**60, 2**60 + 1]}), pd.DataFrame({"id": [2**60 + 1, None]})
    day, midnight = datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)
    days = [pl.DataFrame({"id": [1], "day": [each]}) for each in (day, midnight)]
    asked = (
        (ids, lambda table: table.count(where=lambda row: row["id"] > 2**60, epsilon=1.0)),
        (days, lambda table: table.mean("day", bounds=(day, datetime.date(2021, 1, 1)), epsilon=1)),
    )
    for batches, ask in asked:
        table = dpjax.PrivateTable(lambda batches=batches: iter(batches), most_rows=8, **people)
        with pytest.raises(TypeError, match=r"one dtype in all batches, got (int64|dates) and"):
            ask(table)


def test_partitions_without_an_order_are_refused_for_people():
    dask = pytest.importorskip("dask.dataframe")
    with pytest.raises(ValueError, match="frame must have batches in a fixed order"):
        dpjax.PrivateTable(
            dask.from_pandas(VISITS[["ward", "cost"]], npartitions=2),
            person="ward",
            rows=1,
            most_rows=64,
        )
