"""Bounds and edges of a table may be dates, times and durations."""

import datetime

import numpy as np
import pandas as pd
import polars as pl
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
    with pytest.raises(TypeError, match="must be a finite number"):
        TABLE.mean("age", bounds=(FIRST, LAST), epsilon=1.0)


def test_answers_are_dates_times_and_durations():
    mean = TABLE.mean("day", bounds=(FIRST, LAST), epsilon=1e5, key=KEY)
    frame = mean.to_frame()
    assert frame["value"].dtype.kind == "M"
    assert frame["value"].iloc[0] == pd.Timestamp("2020-01-25 12:00")
    assert frame["low"].iloc[0] <= frame["value"].iloc[0] <= frame["high"].iloc[0]
    assert repr(mean).startswith("Release(2020-01-25T12:00:00 ± 13.")
    stay = TABLE.mean("stay", bounds=(0, datetime.timedelta(days=60)), epsilon=10.0, key=KEY)
    assert "hours (95%)" in repr(stay)
    assert stay.to_frame()["value"].dtype.kind == "m"
    saved = dpjax.Release.from_dict(mean.to_dict())
    assert repr(saved) == repr(mean)


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
