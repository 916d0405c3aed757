"""Columns of every kind from every library, for tests of what dpjax makes of them."""

import datetime
import decimal
import math

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

BIG = [5_000_000_001, 20240131, -(2**40), 7, 5_000_000_001, 2_147_483_647]
KINDS = {
    "ints": ([1, 2, 2, 3, -1, 1], "int64"),
    "small ints": ([1, 2, 2, 3, 0, 1], "uint8"),
    "ints of 32 bits": ([20240131, 2**24 + 1, 2**24, 3, -1, 20240131], "int32"),
    "big ints": (BIG, "int64"),
    "ids": ([2**60 + 1, 2**60 + 1, 2**60, 3, 4, 5], "int64"),
    "whole floats": ([20240131.0, 20240201.0, 5e9 + 1, 3.0, -1.0, 20240131.0], "float64"),
    "floats": ([0.1, 20240131.0, math.nan, 3.0, -1.5, 2.0**24 + 1], "float64"),
    "floats of 32 bits": ([0.5, math.nan, 2.0, 3.0, -1.5, 2.0], "float32"),
    "booleans": ([True, False, True, True, False, False], "bool"),
    "texts": (["a", "b", "a", "", "ä", "2"], "str"),
    "decimals": ([decimal.Decimal(x) for x in ("0.10", "2.00", "2.00", "-1.50", "3", "7")], "dec"),
}
# Those that count as numbers, in whole milliseconds and before 1970 too.
UTC = datetime.UTC
TIMES = [
    datetime.datetime(2024, 1, 31, 5, 6, 7, 89_000),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000),
    datetime.datetime(1, 1, 1),
]
MOMENTS = {
    "dates": ([datetime.date(2024, 1, 31), datetime.date(1969, 7, 20)], "date"),
    "times": (TIMES, "times"),
    "times of a zone": ([time.replace(tzinfo=UTC) for time in TIMES], "zone"),
    "durations": ([datetime.timedelta(3, 4, 5000), datetime.timedelta(-1)], "durations"),
}
ARROW = {"str": pa.string(), "date": pa.date32(), "dec": pa.decimal128(20, 2), "bool": pa.bool_()}
ARROW |= {
    "times": pa.timestamp("us"),
    "zone": pa.timestamp("ms", "Europe/Berlin"),
    "durations": pa.duration("ms"),
}
NUMPY = {"str": "U", "date": "M8[D]", "times": "M8[us]", "durations": "m8[ms]"}
NULLABLE = {"str": "string", "bool": "boolean", "float64": "Float64", "float32": "Float32"}


def arrow_type(dtype):
    return ARROW.get(dtype) or pa.from_numpy_dtype(dtype)


def of_numpy(values, dtype):
    if dtype in ("dec", "zone"):
        pytest.skip("NumPy has no decimals and no zones")
    return np.array(values, NUMPY.get(dtype, dtype))


def of_pandas(values, dtype):
    if dtype in ("dec", "date"):
        pytest.skip("pandas has decimals and dates of Arrow alone")
    own = {"times": "M8[us]", "durations": "m8[us]", "zone": "datetime64[us, UTC]"}
    return pd.Series(values, dtype=own.get(dtype, dtype))


def of_nullable(values, dtype):
    if dtype in ("dec", "date", "times", "zone", "durations"):
        pytest.skip("pandas has none of these")
    return pd.Series(values, dtype=NULLABLE.get(dtype, dtype.replace("i", "I").replace("u", "U")))


def of_categories(values, dtype):
    return of_pandas(values, dtype).astype("category")


def of_pandas_on_arrow(values, dtype):
    return pd.Series(pd.array(values, pd.ArrowDtype(arrow_type(dtype))))


def of_polars(values, dtype):
    return pl.Series(pl.from_arrow(pa.array(values, arrow_type(dtype), from_pandas=True)))


def of_arrow(values, dtype):
    return pa.chunked_array([pa.array(values, arrow_type(dtype), from_pandas=True)])


def of_arrow_dictionary(values, dtype):
    return of_arrow(values, dtype).dictionary_encode()


LOADERS = {
    loader.__name__[3:]: loader
    for loader in (of_numpy, of_pandas, of_nullable, of_categories, of_pandas_on_arrow, of_polars)
} | {"arrow": of_arrow, "arrow_dictionary": of_arrow_dictionary}


def missing_at(values, dtype, loader):
    """The same column whose second entry is missing, and None where the dtype has no such thing."""
    floats = dtype.startswith("float")
    if loader in ("numpy", "pandas") and not floats:
        return None
    if loader == "categories":
        column = of_categories(values, dtype)
        column[1] = None
        return column
    gap = math.nan if floats else None
    return LOADERS[loader]([gap if i == 1 else x for i, x in enumerate(values)], dtype)
