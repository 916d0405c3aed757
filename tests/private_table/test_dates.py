"""Bounds and edges of a table may be dates, times and durations."""

import datetime

import numpy as np
import pandas as pd
import polars as pl
import pytest

import dpjax

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
    with pytest.raises(TypeError, match="a column of durations compares with its own kind"):
        TABLE.mean("stay", bounds=(FIRST, LAST), epsilon=1.0)
    with pytest.raises(TypeError, match="must be a finite number"):
        TABLE.mean("age", bounds=(FIRST, LAST), epsilon=1.0)
