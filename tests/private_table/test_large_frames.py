"""Tables larger than memory: the bits of the same table in memory, from every source."""

import collections
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
from dpjax.queries import _group_keys, _k_means
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
    "distinct": lambda table: table.count_distinct("cost", epsilon=1.0, key=KEY),
    "distinct by": lambda table: table.count_distinct("age", by=BY, epsilon=1.0, key=KEY),
    "keys": lambda table: table.keys("ward", epsilon=1.0, delta=1e-6, key=KEY),
    "keys by": lambda table: table.keys("age", by=BY, epsilon=5.0, delta=0.1, key=KEY),
    "texts by": lambda table: table.keys(
        "ward", by={"age": range(5)}, epsilon=5.0, delta=0.1, key=KEY
    ),
    "top of unknown": lambda table: table.top("day", 9, epsilon=5.0, delta=0.1, key=KEY),
    "clusters": lambda table: table.k_means(
        ["cost", "age"],
        bounds={"cost": (0, 500), "age": (0, 90)},
        clusters=3,
        **{"epsilon": 5.0, "delta": 1e-6, "key": KEY},
    ),
    "clusters by": lambda table: table.k_means(
        ["cost"], **BOUNDS, by=BY, clusters=2, epsilon=5.0, delta=1e-6, key=KEY
    ),
}
FOUND = {"keys": 3, "keys by": 2, "texts by": 5, "top of unknown": 9}


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
    assert len(whole.value) == FOUND[name] if name in FOUND else True
    for source in sources.values():
        found = ask(dpjax.PrivateTable(source, most_rows=MOST))
        jax.tree.map(np.testing.assert_array_equal, found.value, whole.value)
        assert found.guarantee == whole.guarantee
        assert repr(found) == repr(whole)


def test_distinct_rows_are_those_of_all_parts_whenever_they_are_merged(monkeypatch):
    generator = np.random.default_rng(2)
    for few, words in itertools.product((0, 5, 100), (1, 2, 5)):
        monkeypatch.setattr(_group_keys, "_FEW", few)
        rows = generator.integers(2**32 - 3, 2**32, (60, words), dtype=np.uint32)
        rows[::3, -1] = 7
        several = [(rows[i : i + 9], np.ones(9, int)[: 60 - i]) for i in range(0, 60, 9)]
        found, counts = _group_keys._merged(
            iter([_group_keys.distinct_rows([one]) for one in several]),
            (rows[:0], np.zeros(0, int)),
        )
        expected = collections.Counter(map(tuple, rows.tolist()))
        assert dict(zip(map(tuple, found.tolist()), counts.tolist(), strict=True)) == expected
        assert found.tolist() == sorted(found.tolist())


def test_clusters_read_the_table_once_for_each_step(sources):
    passes = []

    def frames():
        passes.append(1)
        return sources["frames"]()

    table = dpjax.PrivateTable(frames, most_rows=MOST)
    passes.clear()
    table.k_means(["cost"], **BOUNDS, clusters=2, epsilon=1.0, delta=1e-6, key=KEY)
    assert len(passes) == 5  # The start and four iterations.
    passes.clear()
    table.keys("ward", epsilon=1.0, delta=1e-6, key=KEY)
    assert len(passes) == 2  # Counts, and the texts of the published keys.


def test_a_ledger_pays_once_for_a_large_table(sources, tmp_path):
    """Nothing is read for a question that was paid for."""
    asked = {
        "keys": lambda table: table.keys("ward", epsilon=1.0),
        "distinct": lambda table: table.count_distinct("cost", epsilon=1.0),
        "clusters": lambda table: table.k_means(["cost"], **BOUNDS, clusters=2, epsilon=1.0),
    }
    read = []

    def frames():
        read.append(1)
        return sources["frames"]()

    def tables(frame, most_rows=MOST):
        with dpjax.Ledger(tmp_path / "ledger.db", epsilon=3, delta=1e-5) as ledger:
            yield dpjax.PrivateTable(frame, most_rows=most_rows, ledger=ledger)

    for table in tables(frames):
        first = {name: ask(table).value for name, ask in asked.items()}
        read.clear()
        for name, ask in asked.items():
            jax.tree.map(np.testing.assert_array_equal, ask(table).value, first[name])
        assert not read
    for table in tables(FRAME):  # Keys of the table in memory are the same question.
        assert asked["keys"](table).value == first["keys"]
    for table in tables(frames, MOST + 1):
        for ask in asked.values():
            with pytest.raises(dpjax.BudgetExceededError):
                ask(table)


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


def test_what_cannot_be_read_in_batches_is_refused(sources):
    table = dpjax.PrivateTable(sources["lazy"], most_rows=MOST)
    with pytest.raises(TypeError, match=r"frame must fit into memory .* column 'ward'"):
        table.synthetic(["ward"], rows=10, keys=BY, epsilon=1.0, delta=1e-6, key=KEY)
    batches = iter([FRAME])
    with pytest.raises(TypeError, match="every statistic reads the table again"):
        dpjax.PrivateTable(batches, most_rows=MOST)
    with pytest.raises(TypeError, match="got the same iterator twice: make the iterator inside"):
        dpjax.PrivateTable(lambda: batches, most_rows=MOST)
    replaced = dpjax.PrivateTable(
        sources["lazy"], most_rows=MOST, relation=dpjax.NeighboringRelation.REPLACE_ONE
    )
    of = {"epsilon": 1.0, "delta": 1e-6, "key": KEY}
    for ask in (
        lambda: replaced.mean("cost", **BOUNDS, epsilon=1.0, key=KEY),
        lambda: replaced.count_distinct("cost", epsilon=1.0, key=KEY),
        lambda: replaced.keys("ward", **of),
        lambda: replaced.k_means(["cost"], **BOUNDS, clusters=2, **of),
    ):
        with pytest.raises(ValueError, match="must be add-or-remove-one for a database in parts"):
            ask()
    with pytest.raises(TypeError, match="column 'tags' must be numbers, texts, dates or times"):
        table.mean("tags", **BOUNDS, epsilon=1.0, key=KEY)
    few = dpjax.PrivateTable(sources["lazy"], most_rows=N - 1)
    for ask in (
        lambda: few.count(epsilon=1.0, key=KEY),
        lambda: few.count_distinct("cost", epsilon=1.0, key=KEY),
        lambda: few.keys("ward", **of),
        lambda: few.k_means(["cost"], **BOUNDS, clusters=2, **of),
    ):
        with pytest.raises(ValueError, match="most_rows must be enough for every possible table"):
            ask()


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
    of = {"epsilon": 5.0, "delta": 1e-6, "key": KEY}
    assert nobody.keys("ward", **of).value == ()
    assert nobody.count_distinct("ward", epsilon=1e3, key=KEY).value == 0
    clusters = nobody.k_means(["cost"], **BOUNDS, clusters=2, **of)
    assert clusters.value["centers"].shape == (2, 1)


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
    "people": lambda table: table.count_distinct("id", epsilon=100.0, key=KEY),
    "keys": lambda table: table.keys("ward", epsilon=9.0, delta=0.1, key=KEY),
    "ids by": lambda table: table.keys(
        "id", by={"ward": ["a", "b"]}, epsilon=50.0, delta=0.9, key=KEY
    ),
    "top": lambda table: table.top("ward", 2, keys=["b", "a", "c"], epsilon=50.0, key=KEY),
    "range by": lambda table: table.sum(
        "cost", bounds=None, by={"ward": ["a", "b"]}, per_person="sum", epsilon=50.0, key=KEY
    ),
    "clusters": lambda table: table.k_means(
        ["cost"], bounds=(0, 20), clusters=2, epsilon=9.0, delta=0.1, key=KEY
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


def counted_keys(table, patch):
    """How many people have each key, and the l1 sensitivity of these counts."""
    read = []

    def noisy(key, counts, mechanism, size):
        read.append((counts, mechanism.scale * 0.5))
        return counts

    patch.setattr(_group_keys, "_noisy", noisy)
    patch.setattr(_group_keys, "_threshold", lambda *_: 1)  # All keys are published.
    keys = table.keys("ward", epsilon=0.5, delta=0.1).value
    ((counts, sensitivity),) = read
    found = dict(zip(keys, counts[counts > 0], strict=True))
    return [found.get(key, 0) for key in range(3)], sensitivity


def counted_entries(table, patch):
    del patch
    release = table.count_distinct("ward", by={"half": [0, 1]}, epsilon=100.0)
    return release.value, release.accuracy.facts["arrays"][0]["scale"] * 100


def clusters_of_wards(table, patch):
    """The totals of the first step, and their l2 sensitivity."""
    totals, noise = [], []

    def total_of_parts(*given, **how):
        totals.append([_k_means.coarse(total, 4) for total in total_of(*given, **how)])
        return total_of(*given, **how)

    def share_of(sensitivity, *given):
        noise.append(sensitivity.value)
        return share(sensitivity, *given)

    total_of, share = _k_means.total_of_parts, _k_means._share_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_k_means, "total_of_parts", total_of_parts)
        patch.setattr(_k_means, "_share_of", share_of)
        table.k_means(["ward"], bounds=(0, 2), clusters=2, epsilon=1.0, delta=0.1, key=KEY)
    return np.concatenate(totals[0]), noise[0]


@pytest.mark.parametrize(
    ("ask", "order", "least"),
    [(counted_keys, 1, 1), (counted_entries, 1, 1), (clusters_of_wards, 2, 0.7)],
    ids=["keys", "entries", "clusters"],
)
def test_no_person_in_batches_moves_keys_entries_or_clusters_further(
    ask, order, least, monkeypatch
):
    """Every table of these rows, and the same without all rows of a person."""
    monkeypatch.setattr(_large_frame, "ROWS", 4)
    how = {"person": "id", "most_rows": 8, "rows": 2}
    shares = []
    for wards in itertools.product((0, 1, 2), repeat=2):
        rows = {"id": [1, 2, 1, 2, 1], "ward": [*wards, 1, 0, 1], "half": [0, 1, 0, 0, 1]}
        frame = pd.DataFrame(rows)

        def found(frame):
            value, sensitivity = ask(
                dpjax.PrivateTable(batches_of_visits(frame, 2), **how), monkeypatch
            )
            return np.ravel(value).astype(float), sensitivity

        whole, sensitivity = found(frame)
        for one in (1, 2):
            without, _ = found(frame[frame["id"] != one])
            shares.append(np.linalg.norm(whole - without, order) / sensitivity)
    assert least <= max(shares) * (1 + 1e-3)
    assert max(shares) <= 1 + 1e-3


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
