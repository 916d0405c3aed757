"""Bounds and edges of a table may be dates, times and durations."""

import datetime
from decimal import Decimal

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
from dpjax._core._moments import Moments

KEY = dpjax.random.seeded_key(3)
SHARP = {"epsilon": 1e6, "key": KEY}
DAYS = np.datetime64("2020-01-01", "D") + np.arange(100) % 50
TIMES = DAYS.astype("M8[ms]") + np.timedelta64(6, "h")
TABLE = dpjax.PrivateTable(
    {
        "day": pl.Series(DAYS),
        "time": pd.Series(TIMES),
        "stay": pd.Series(TIMES - TIMES[0]),
        "age": np.arange(100),
    },
    most_rows=200,
)
FIRST, LAST = datetime.date(2019, 12, 1), datetime.date(2020, 12, 1)
EPOCH = datetime.date(1970, 1, 1)


def test_bounds_may_be_dates_times_and_durations():
    mean = TABLE.mean("day", bounds=(FIRST, LAST), **SHARP)
    same = TABLE.mean("day", bounds=((FIRST - EPOCH).days, (LAST - EPOCH).days), **SHARP)
    assert mean.value == same.value
    assert mean.value == pytest.approx(DAYS.astype(int).mean(), abs=0.01)
    seconds = TABLE.mean("time", bounds={"time": (FIRST, pd.Timestamp(LAST))}, **SHARP)
    assert seconds.value == pytest.approx(TIMES.astype(int).mean() / 1000, abs=500)
    stay = TABLE.mean("stay", bounds=(0, datetime.timedelta(days=60)), **SHARP)
    assert stay.value == pytest.approx(24.5 * 86400, abs=100)


def test_edges_of_buckets_may_be_dates():
    edges = [FIRST, datetime.date(2020, 1, 11), np.datetime64("2020-02-01"), LAST]
    assert TABLE.histogram("day", edges, **SHARP).value.tolist() == [20, 42, 38]


def test_another_kind_is_refused():
    with pytest.raises(
        TypeError, match="a column of durations can only be compared with durations"
    ):
        TABLE.mean("stay", bounds=(FIRST, LAST), epsilon=1.0)
    with pytest.raises(TypeError, match="column 'age' must hold dates, times or durations"):
        TABLE.mean("age", bounds=(FIRST, LAST), epsilon=1.0)


def test_answers_are_dates_times_and_durations():
    mean = TABLE.mean("day", bounds=(FIRST, LAST), epsilon=1e5, key=KEY)
    frame = mean.to_frame()
    assert frame["value"].dtype.kind == "M"
    off = frame["value"].iloc[0] - pd.Timestamp("2020-01-25 12:00")
    assert abs(off) < pd.Timedelta(1, "min")
    assert frame["low"].iloc[0] <= frame["value"].iloc[0] <= frame["high"].iloc[0]
    assert repr(mean).startswith("Release(2020-01-25T12:00:04")
    stay = TABLE.mean("stay", bounds=(0, datetime.timedelta(days=60)), epsilon=10.0, key=KEY)
    assert "hours (95%)" in repr(stay)
    assert stay.to_frame()["value"].dtype.kind == "m"
    saved = dpjax.Release.from_dict(mean.to_dict())
    assert repr(saved) == repr(mean)


def test_a_mean_of_times_or_of_large_numbers_has_the_digits_of_float64():
    times = np.datetime64("2024-01-01T00:00:00", "s") + np.arange(101)
    frame = {"time": times, "large": 2**40 + np.arange(101), "g": np.arange(101) % 2}
    bounds = {"time": (times[0], times[-1]), "large": (2**40, 2**40 + 100)}
    table = dpjax.PrivateTable(frame, most_rows=200)
    for by in (None, {"g": [0, 1]}):
        time = table.mean("time", bounds=bounds, by=by, **SHARP)
        large = table.mean("large", bounds=bounds, by=by, **SHARP)
        np.testing.assert_allclose(time.value - times[50].astype(int), 0, atol=0.01)
        np.testing.assert_allclose(large.value - 2**40, 50, atol=0.01)
        low, high = large.interval()
        assert np.all((low <= large.value) & (large.value <= high))
        saved = dpjax.Release.from_dict(large.to_dict())
        np.testing.assert_array_equal(saved.to_frame(), large.to_frame())


def test_a_sum_of_many_numbers_has_the_digits_of_float64():
    numbers = np.random.default_rng(0).uniform(0, 1, 30_000)
    table = dpjax.PrivateTable({"x": numbers, "g": np.arange(30_000) % 2}, most_rows=2**15)
    for by, truth in ((None, numbers.sum()), ({"g": [1]}, numbers[1::2].sum())):
        found = table.sum("x", bounds=(0, 1), by=by, **SHARP)
        assert found.value.dtype == np.float64
        # The grid of the noise has steps of 2^-14; floats near 15,000 have steps of 2^-10.
        np.testing.assert_allclose(np.ravel(found.value), truth, atol=2.0**-13)
        low, high = found.interval()
        assert np.all((low <= truth) & (truth <= high))
        saved = dpjax.Release.from_dict(found.to_dict())
        np.testing.assert_array_equal(saved.to_frame(), found.to_frame())


def test_quantiles_of_times_by_group_are_times():
    ends = {"time": (FIRST, LAST)}
    asked = {"bounds": ends, "by": {"age": [1, 2]}, "epsilon": 50.0, "key": KEY}
    found = TABLE.quantiles("time", [0.5], **asked).to_frame()
    assert found["value"].dtype.kind == "M"
    assert found.index.names == ["age", "quantile"]
    assert TABLE.variance("day", bounds=(FIRST, LAST), **SHARP).to_frame()["value"].dtype == float


@pytest.mark.parametrize(
    ("kind", "number", "reach", "printed"),
    [
        ("dates", 18_286.5, 3.0, "2020-01-25 ± 4 days"),
        ("dates", 18_286.5, 0.5, "2020-01-25T12:00 ± 12.1 hours"),
        ("times", 1_579_953_600.0, 200.0, "2020-01-25T12:00:00 ± 3.4 minutes"),
        ("times", 0.5, 0.25, "1970-01-01T00:00:00.500 ± 0.3 seconds"),
        ("durations", 86400.0, 7200.0, "24.0 ± 2.1 hours"),
    ],
)
def test_an_error_prints_in_a_unit_of_its_size(kind, number, reach, printed):
    assert Moments(kind).with_reach(np.asarray(number), reach, 1) == printed


def test_many_dates_print_as_the_first_ones():
    found = TABLE.mean("day", bounds=(FIRST, LAST), by={"age": range(8)}, epsilon=10.0, key=KEY)
    assert "...] of shape (8,) ± " in repr(found)
    assert repr(found).startswith("Release([20")
    assert "Release([2014-11-10 2059-09-19], " in repr(TABLE.bounds("day", epsilon=5.0, key=KEY))


@pytest.mark.parametrize("library", [pd.Series, pl.Series, np.asarray])
def test_keys_of_groups_may_be_dates(library):
    frame = {"day": library(DAYS.astype("M8[ms]")), "site": np.arange(100) % 2}
    table = dpjax.PrivateTable(frame, most_rows=200)
    keys = [datetime.date(2020, 1, 1), np.datetime64("2020-01-03"), np.datetime64("2021-01-01")]
    found = table.count(by={"day": keys}, epsilon=100.0, key=KEY)
    assert found.value.tolist() == [2, 2, 0]
    named = [f"{day}T00:00:00" for day in keys]
    assert found.to_frame().index.tolist() == named
    asked = {"day": keys, "site": [0, 1]}
    by_site = table.crosstab(["day", "site"], keys=asked, epsilon=100.0, key=KEY)
    assert by_site.value.tolist() == [[2, 0], [2, 0], [0, 0]]
    with pytest.raises(ValueError, match="keys of column 'day' must be whole days or seconds"):
        table.count(by={"day": [np.datetime64("2020-01-01T00:00:00.5")]}, epsilon=1.0)
    days = TABLE.count(by={"day": keys}, epsilon=100.0, key=KEY).to_frame()
    assert days.index.tolist() == [str(day) for day in keys]


LATE = datetime.date(2020, 2, 1)
ARE_LATE = np.datetime64(LATE) <= DAYS
PREDICATES = {
    "at the right": (lambda row: row["day"] >= LATE, ARE_LATE),
    "at the left": (lambda row: LATE <= row["day"], ARE_LATE),  # noqa: SIM300
    "of NumPy": (lambda row: np.datetime64(LATE) <= row["day"], ARE_LATE),
    "a time": (
        lambda row: (row["time"] != pd.Timestamp("2020-01-01 06:00")) & (row["age"] < 50),
        (np.arange(100) % 50 > 0) & (np.arange(100) < 50),
    ),
    "a duration": (lambda row: row["stay"] > datetime.timedelta(1), np.arange(100) % 50 > 1),
    "a number": (lambda row: (row["day"] - 18262) % 2 == 0, np.arange(100) % 2 == 0),
    "by a function": (lambda row: ~jnp.isnan(row["day"]), np.ones(100, bool)),
    "two columns": (lambda row: row["time"] > row["day"] * 86400, np.ones(100, bool)),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_a_predicate_may_compare_dates(name):
    where, expected = PREDICATES[name]
    assert TABLE._asked("count", (), where=where).present[:100].tolist() == expected.tolist()


def test_a_predicate_refuses_another_kind():
    with pytest.raises(TypeError, match="a column of dates can only be compared with dates"):
        TABLE.count(where=lambda row: row["day"] > datetime.timedelta(3), epsilon=1.0)


def test_intervals_of_spreads_cover_the_rounding_of_integers_above_2_53():
    """Only even integers are floats there, so the variance of the floats is off by more than 1."""
    numbers = 2**53 + np.arange(1000) % 4
    table = dpjax.PrivateTable({"x": numbers}, most_rows=1100)
    found = table.variance("x", bounds=(2**53, 2**53 + 4), **SHARP)
    assert found.value["variance"] > 2 * 1.25
    low, high = found.interval(0.95)
    assert low["variance"] <= 1.25 <= high["variance"]


def test_the_mean_beside_a_variance_is_as_narrow_as_the_numbers_allow():
    numbers = 1e9 + np.random.default_rng(0).uniform(0, 100, 1000)
    table = dpjax.PrivateTable({"x": numbers}, most_rows=1100)
    low, high = table.variance("x", bounds=(1e9, 1e9 + 100), **SHARP).interval(0.95)
    assert low["mean"] <= numbers.mean() <= high["mean"] < low["mean"] + 0.1
    assert low["variance"] <= numbers.var() <= high["variance"] < low["variance"] + 10


def test_spreads_and_quantiles_of_times_and_of_large_numbers_have_the_digits_of_float64():
    """In float32 a time is off by a minute, and a number near 2^40 by 2^16."""
    times = np.datetime64("2024-01-01T00:00:00", "s") + np.arange(101)
    frame = {
        "time": times,
        "large": pa.chunked_array([pa.array(2**40 + np.arange(101))]),
        "whole": pd.array(2**40 + np.arange(101), "Int64"),
        "exact": pl.Series([Decimal(2**40) + i for i in range(101)]),
        "g": np.arange(101) % 2,
    }
    ends = (2**40, 2**40 + 100)
    bounds = {"time": (times[0], times[-1]), "large": ends, "whole": ends, "exact": ends}
    table = dpjax.PrivateTable(frame, most_rows=200)
    for by in (None, {"g": [1]}):
        spread = np.var(np.arange(101.0)[1::2] if by else np.arange(101.0))
        for column, low in (("large", 2**40), ("whole", 2**40), ("exact", 2**40)):
            found = table.variance(column, bounds=bounds, by=by, **SHARP).value
            np.testing.assert_allclose(found["mean"] - float(low), 50, atol=0.05)
            np.testing.assert_allclose(found["variance"], spread, atol=0.5)
        together = table.covariance(["large", "whole"], bounds=bounds, by=by, **SHARP).value
        np.testing.assert_allclose(
            together["mean"] - 2.0**40, np.full_like(together["mean"], 50), atol=0.1
        )
        np.testing.assert_allclose(
            together["covariance"], np.full_like(together["covariance"], spread), atol=1
        )
    found = table.quantiles("time", [0.5], bounds=bounds, **SHARP).value
    np.testing.assert_allclose(found - float(times[50].astype(int)), 0, atol=1)
    found = table.quantiles("exact", [0.5], bounds=bounds, **SHARP).value
    np.testing.assert_allclose(found - 2.0**40, 50, atol=1)
