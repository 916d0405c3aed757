"""Tables of libraries: every kind of column from every library against what Python says of it.

The class of the defects: a library that rounds, wraps or guesses, and dtypes that follow entries.
What queries answer is in tests/queries/test_columns.py.
"""

import datetime
import decimal
import math
import sys

import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
from dpjax import queries
from dpjax._core._columns import Numbers, Refused, Texts, as_text
from dpjax._core._frames import columns, dtype_of, exact_column, moments_of, table_of_columns
from dpjax._core._moments import Moments
from dpjax._core._records import exact_records
from loaders import KINDS, LOADERS, MOMENTS, UTC, missing_at, of_arrow, of_polars
from tables import for_each

KEY = dpjax.random.seeded_key(5)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)


def numbers_of(column):
    """The numbers of a column as Python has them, None for a missing one; or words of texts."""
    records, _ = exact_records("database", {"x": column})
    leaf = records["x"]
    if isinstance(leaf, Texts):
        return np.asarray(leaf.words).tolist()
    held, known = leaf.on_host() if isinstance(leaf, Numbers) else (np.asarray(leaf), None)
    numbers = np.where(True if known is None else known, held.astype(object), None)
    return [None if x is None or x != x else x for x in numbers.tolist()]


def as_number(entry):
    """What an entry counts as: exactly, or as the nearest float."""
    if isinstance(entry, datetime.timedelta):
        return entry / datetime.timedelta(seconds=1)
    if isinstance(entry, datetime.datetime):
        return (entry.replace(tzinfo=UTC) - EPOCH) / datetime.timedelta(seconds=1)
    if isinstance(entry, datetime.date):
        return (entry - EPOCH.date()).days
    return None if entry != entry else float(entry) if isinstance(entry, decimal.Decimal) else entry


def loaded(kind):
    """The column of each library that has the kind."""
    values, dtype = (KINDS | MOMENTS)[kind]
    for loader, load in LOADERS.items():
        try:
            yield loader, load(values, dtype)
        except pytest.skip.Exception:
            continue


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@for_each("kind", KINDS | MOMENTS)
def test_every_library_gives_the_numbers_of_python(kind, x64):
    values, dtype = (KINDS | MOMENTS)[kind]
    with jax.enable_x64(x64):
        texts = numbers_of(np.array(values, "U")) if kind == "texts" else None
        right = texts or [as_number(value) for value in values]
        for loader, column in loaded(kind):
            assert numbers_of(column) == right, loader
            gap = missing_at(values, dtype, loader)
            if gap is not None:
                missing = [[0] * 4 if texts else None]
                assert numbers_of(gap) == [right[0], *missing, *right[2:]], loader


DECIMALS = [
    decimal.Decimal(text)
    for text in ("0.1", "123456789012345.67", "99999999999999999.99", "-0.07", "1234567890.15")
]


def test_decimals_become_the_nearest_floats_in_every_library():
    """Arrow rounds two decimals of three wrongly if it casts them, and polars large ones."""
    right = [float(x) for x in DECIMALS]
    for load in (of_arrow, of_polars, LOADERS["pandas_on_arrow"]):
        assert numbers_of(load(DECIMALS, "dec")) == right
    mixed = np.random.default_rng(0).integers(-(10**17), 10**17, 500)
    mixed = [decimal.Decimal(int(x)).scaleb(-2) for x in mixed]
    for load in (of_arrow, of_polars):
        assert numbers_of(load(mixed, "dec")) == [float(x) for x in mixed]


@pytest.mark.parametrize("kind", ["ints", "floats", "decimals", "dates"])
def test_a_release_has_the_same_bits_from_every_library(kind):
    values, _ = (KINDS | MOMENTS)[kind]
    numbers = [as_number(x) for x in values]
    plain = np.array([math.nan if x is None else x for x in numbers])
    # Whether a dtype may lack an entry decides whether n is private. Here it is public for all.
    ends = {"lower": -10, "upper": 50_000, "missing": "lower"}
    expected = queries.private_mean(KEY, plain, epsilon=1.0, **ends).value
    for loader, column in loaded(kind):
        if loader != "categories":
            got = queries.private_mean(KEY, column, epsilon=1.0, **ends).value
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), loader


def test_the_same_time_has_the_same_bits_in_every_resolution():
    """A float of nanoseconds would round twice."""
    generator = np.random.default_rng(0)
    micros = generator.integers(-(2**52), 2**52, 500).astype("M8[us]")
    expected = [as_number(x) for x in micros.tolist()]
    for column in (
        micros,
        micros.astype("M8[ns]"),
        pd.Series(micros.astype("M8[ns]")),
        pd.Series(micros).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        pl.Series(micros).cast(pl.Datetime("ns")),
        pa.array(micros).cast(pa.timestamp("ns")),
    ):
        assert numbers_of(column) == pytest.approx(expected, rel=0, abs=2.0**-21)
        assert numbers_of(column) == numbers_of(micros)
    seconds = micros.astype("M8[s]")
    for unit in ("ms", "us", "m8"):
        other = seconds - np.datetime64(0, "s") if unit == "m8" else seconds.astype(f"M8[{unit}]")
        assert numbers_of(other) == numbers_of(seconds)


def test_units_of_numpy():
    for unit, of_one in {
        "W": 7,
        "D": 1,
        "h": 3600,
        "m": 60,
        "s": 1,
        "ms": 1e-3,
        "ns": 1e-9,
    }.items():
        assert numbers_of(np.array([1, "NaT"], f"M8[{unit}]")) == [of_one, None]
    for unit in ("Y", "M", "25s"):
        with pytest.raises(TypeError, match="must be numbers, texts, dates or times, got"):
            exact_column("column", np.array([1], f"M8[{unit}]"), named=False)


def test_no_date_is_refused_for_what_it_says():
    """Dates of Arrow and times of NumPy go further than 9999."""
    far = pa.array([2**31 - 1, -(2**31), None], pa.int32()).cast(pa.date32())
    assert numbers_of(far) == [2**31 - 1, -(2**31), None]
    assert numbers_of(pl.Series([2**31 - 1], dtype=pl.Int32).cast(pl.Date)) == [2**31 - 1]
    assert numbers_of(np.array([2**62], "M8[W]")) == [2.0**62 * 7]
    assert numbers_of(pd.Series(np.array([2**62, "NaT"], "M8[s]"))) == [2.0**62, None]


def test_bounds_and_results_may_be_moments():
    day = datetime.date(1990, 1, 1)
    noon = datetime.datetime(1990, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    dates, times, durations = Moments("dates"), Moments("times"), Moments("durations")
    for moment in (day, datetime.datetime(1990, 1, 1), np.datetime64("1990-01-01"), 7305):
        assert dates.number(moment) == 7305
    assert dates.number(datetime.datetime(1990, 1, 1, 6)) == 7305.25
    for moment in (noon, pd.Timestamp(noon), np.datetime64("1990-01-01T10:00", "ms")):
        assert times.number(moment) == 7305 * 86400 + 36000
    assert durations.number(datetime.timedelta(minutes=2)) == 120
    assert durations.number(np.timedelta64(1, "h")) == 3600
    for moments, other in ((dates, datetime.timedelta(1)), (durations, day)):
        with pytest.raises(TypeError, match="can only be compared with"):
            moments.number(other)
    strange = [(dates, x) for x in (np.datetime64("1990-01"), np.datetime64(1, "2s"))]
    for moments, other in (*strange, (durations, np.timedelta64(3, "M"))):
        with pytest.raises((TypeError, KeyError), match="a unit of NumPy from weeks to nanosec"):
            moments.number(other)
    assert dates.moments([7305.2, np.nan]).tolist() == [day, None]
    assert times.moments(times.number(noon)).tolist() == datetime.datetime(1990, 1, 1, 10)
    assert durations.moments([0.5, -np.inf]).dtype == "m8[us]"
    for moments in (dates, times, durations):
        for loader, column in loaded(moments.kind):
            assert moments_of(column) == moments, loader
    assert moments_of(np.ones(3)) is moments_of(pl.Series([1])) is None


UNUSABLE = {
    "lists": pl.Series([[1], None]),
    "binary": pl.Series([b"a", None]),
    "nothing": pl.Series([None, None]),
    "128 bits": pl.Series([1, None], dtype=pl.Int128),
    "time of day": pa.array([1, None], pa.time32("s")),
    "structs": pa.array([{"a": 1}, None]),
    "intervals": pd.Series(pd.interval_range(0, 2)),
    "periods": pd.Series(pd.period_range("2020", periods=2)),
    "complex": pd.Series([1j, 2]),
    "categories of intervals": pd.Series(pd.interval_range(0, 2)).astype("category"),
}


@for_each("kind", UNUSABLE)
def test_a_column_is_refused_by_name_where_it_is_used(kind):
    column = UNUSABLE[kind]
    table = {"x": np.array([1.0, 5.0]), "bad": column}
    assert queries.counting_query()(table) == 2
    assert queries.counting_query(lambda row: row["x"] > 2)(table) == 1
    for predicate in (
        lambda row: row["bad"] == 1,
        lambda row: ~row["bad"],
        lambda row: jax.numpy.isnan(row["bad"]),
        lambda row: row["bad"] or True,
        lambda row: 1 - row["bad"] < 0,
    ):
        with pytest.raises(TypeError, match=r"column 'bad'.* must be numbers, texts") as told:
            queries.counting_query(predicate)(table)
        assert f"got the dtype {dtype_of(column)}" in str(told.value)
    for lone in (column, {"bad": column}):
        with pytest.raises(
            TypeError, match="must be numbers, texts, dates or times, got the dtype"
        ):
            exact_records("database", lone)


def test_an_unusable_column_is_refused_for_its_dtype_alone():
    one, other = (
        columns("database", pl.DataFrame({"x": pl.Series(x, dtype=pl.List(int))}))["x"]
        for x in ([[1], [2, 3]], [None, None, None])
    )
    assert isinstance(one, Refused)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_an_oracle_may_have_a_column_that_nothing_uses(key):
    frame = pl.DataFrame({"x": [1.0, 2.0, 3.0], "tags": [[1], [], [2]]})
    oracle = dpjax.oracles.resample(frame)
    target = lambda d: jax.numpy.mean(d["x"])  # noqa: E731
    sensitivity = dpjax.sample_sensitivity(key, target, oracle, n=3, norm="l1", gamma=0.2)
    release = dpjax.privatize(target, dpjax.laplace(sensitivity, 1e6))(key, frame)
    assert release.value == pytest.approx(2.0, abs=1e-3)


def test_entries_do_not_decide_how_objects_of_pandas_are_read():
    """Narwhals tells texts from objects by looking at them."""
    told = set()
    for entries in (["a", "b"], [1, "a"], [None, None], [[1], {}], [1.5, 2]):
        column = pd.Series(entries, dtype=object)
        assert isinstance(exact_column("column", column), Texts)
        with pytest.raises(TypeError, match="dtype object: convert its texts") as refusal:
            exact_column("column", column, named=False)
        told.add(str(refusal.value))
    assert len(told) == 1


def test_numbers_in_a_column_of_objects_are_different_entries():
    """Decimals of pandas were no entries unless they were whole, and counts of them were 0."""
    kinds = [
        decimal.Decimal("1.10"),
        1.1,
        decimal.Decimal("11E-1"),
        decimal.Decimal("-0.070"),
        -0.07,
    ]
    column = pd.Series([*kinds, 3.0, 3, decimal.Decimal("NaN"), math.nan, None], dtype=object)
    texts = [as_text(entry) for entry in column]
    assert texts == ["1.1", "1.1", "1.1", "-0.07", "-0.07", "3", "3", None, None, None]
    table = dpjax.PrivateTable({"price": column}, most_rows=16)
    assert int(table.count_distinct("price", epsilon=1e4, key=KEY).value) == 3
    named = table.keys("price", epsilon=1e4, delta=0.4, key=KEY).value
    assert named == ("-0.07", "1.1", "3")


def test_all_that_holds_columns_is_a_table():
    table = {"x": [1, None, 3], "y": ["a", "b", None]}
    frame = pl.DataFrame(table)
    form = jax.tree.map(np.asarray, columns("database", frame))
    for other in (
        frame.lazy(),
        frame.to_arrow(),
        frame.to_arrow().to_batches()[0],
        pd.DataFrame({"x": pd.array(table["x"], "Int64"), "y": pd.array(table["y"], "string")}),
        {"x": pd.array(table["x"], "Int64"), "y": pd.Index(table["y"])},
        {name: frame.get_column(name).to_arrow() for name in table},
    ):
        found = columns("database", other)
        assert jax.tree.structure(found) == jax.tree.structure(form), type(other)
        jax.tree.map(np.testing.assert_array_equal, found, form)
        if not isinstance(other, dict):
            assert list(table_of_columns("frame", other)) == ["x", "y"]
    for grouped in (pd.DataFrame(table).groupby("y")["x"], frame.group_by("y"), pl.col("x")):
        with pytest.raises(TypeError, match="pass the table itself, and name its columns"):
            columns("database", grouped)


def test_without_narwhals_tables_are_refused_and_arrays_are_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    for frame in (pd.DataFrame({"x": [1]}), pl.Series([1]), {"x": pa.array([1])}):
        with pytest.raises(ModuleNotFoundError, match=r"narwhals .* pip install 'dpjax\[table\]'"):
            exact_records("database", frame)
    arrays = {"x": np.arange(2), "t": np.array(["a", "b"]), "d": np.array([1, 2], "M8[D]")}
    _, n = exact_records("database", arrays)
    assert n == 2
