"""A column gives the right answer, or a refusal that names it, whichever library holds it.

The class of the defects: a number that a loader, NumPy or JAX holds in a narrower dtype than the
file had. What else reaches a column: every query, the keys of groups, `group_keys`, the shapes of
private statistics, `padded_records`, `parts`, and functions of records. Tried here: all of them,
for every loader and every kind of column, alone and in a table. Functions of the user that are
released themselves are in tests/release/test_database.py.
"""

import datetime
import decimal
import itertools
import math

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
import odd_inputs
from dpjax import queries

KEY = dpjax.random.seeded_key(5)
SHARP = {"epsilon": 1e6}
BIG = [5_000_000_001, 20240131, -(2**40), 7, 5_000_000_001, 2_147_483_647]
DAYS = [datetime.date(2024, 1, 31), datetime.date(2024, 2, 1)] * 3
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
    "dates": (DAYS, "date"),
    "decimals": ([decimal.Decimal(x) for x in ("0.10", "2.00", "2.00", "-1.50", "3", "7")], "dec"),
}
ARROW = {"str": pa.string(), "date": pa.date32(), "dec": pa.decimal128(20, 2), "bool": pa.bool_()}
NULLABLE = {"str": "string", "bool": "boolean", "float64": "Float64", "float32": "Float32"}


def arrow_type(dtype):
    return ARROW.get(dtype) or pa.from_numpy_dtype(dtype)


def of_numpy(values, dtype):
    if dtype == "dec":
        pytest.skip("NumPy has no decimals")
    return np.array(values, {"str": "U", "date": "M8[D]"}.get(dtype, dtype))


def of_pandas(values, dtype):
    if dtype == "dec":
        pytest.skip("pandas has decimals of Arrow alone")
    return pd.Series(values, dtype={"date": "M8[s]"}.get(dtype, dtype))


def of_nullable(values, dtype):
    if dtype in ("dec", "date"):
        pytest.skip("pandas has none that may be missing")
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

EDGES = [-(2.0**41), 0, 0.1, 2, 2**24 + 1, 20240131, 20240201, 4e9, 5e9 + 1, 1e19]
KEYS = [2, 7, 20240131, 20240201, 2**24, 2**24 + 1, 5_000_000_001, -(2**40), 2**60, 2**60 + 1]
GRID = [-1.5, 0, 0.1, 2, 3, 2**24, 20240131, 3e9, 5e9 + 1, 1e18]
REFUSED = ("texts", "dates")


def keys_of(kind):
    """Those that the dtype of a column holds."""
    if kind == "texts":
        return ["a", "", "2", "ä"]
    bits = {"floats of 32 bits": 24, "floats": 53, "whole floats": 53, "decimals": 53}.get(kind, 63)
    return [key for key in KEYS if abs(key) < 2**bits]


def numbers_of(kind):
    """The numbers of a column as exact fractions of Python; None for NaN."""
    return [None if x != x else x if isinstance(x, int) else float(x) for x in KINDS[kind][0]]


def ask_count(column):
    with odd_inputs.any_promotion():
        return queries.counting_query(lambda x: x == 20240131)(column)


def ask_histogram(column):
    return queries.histogram_query(EDGES)(column)


def ask_codes(column):
    return queries.histogram_query(4)(column)


def ask_sum(column):
    query = queries.sum_query(lower=-10, upper=6e9, capacity=6)
    return np.asarray(query(column), float) * query.unit


def ask_mean(column):
    return queries.private_mean(KEY, column, lower=-10, upper=6e9, **SHARP).value


def ask_quantiles(column):
    return queries.quantile_scores([0.25, 0.5], grid=GRID)(column)


def ask_groups(column):
    query = queries.by(queries.counting_query(), column="x", keys=ask_groups.keys)
    return query({"x": column, "y": np.ones(6, "float32")})


def ask_keys(column):
    many = queries.group_keys(KEY, column, epsilon=1e4, delta=0.4)
    return list(many.value)


ask_groups.keys = KEYS


def counts_between(numbers):
    known = [x for x in numbers if x is not None]
    pairs = itertools.pairwise(EDGES)
    return [sum(low <= x < high for x in known) for low, high in pairs]


def scores(numbers):
    numbers = [-math.inf if x is None else x for x in numbers]
    found = []
    for a in (1, 2):
        below = [4 * sum(x < r for x in numbers) - a * 6 for r in GRID]
        above = [4 * sum(x > r for x in numbers) - (4 - a) * 6 for r in GRID]
        found.append([-max(0, b, c) for b, c in zip(below, above, strict=True)])
    return found


def clamped(numbers):
    return [-10 if x is None else min(max(x, -10), 6e9) for x in numbers]


RIGHT = {
    ask_count: lambda numbers: numbers.count(20240131),
    ask_histogram: counts_between,
    ask_codes: lambda numbers: [numbers.count(code) for code in range(4)],
    ask_sum: lambda numbers: math.fsum(clamped(numbers)),
    ask_mean: lambda numbers: math.fsum(clamped(numbers)) / 6,
    ask_quantiles: scores,
    ask_groups: lambda numbers: [numbers.count(key) for key in ask_groups.keys],
    ask_keys: lambda numbers: sorted(
        {int(x) for x in numbers if x is not None and numbers.count(x) > 1}
    ),
}
# Totals are integers of 16 bits. A number of 2^31 for 5e9 would be off by far more.
TOLERANCE = {ask_sum: 6e9 * 2.0**-15, ask_mean: 6e9 * 2.0**-15 / 6}


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


@pytest.mark.parametrize("ask", RIGHT, ids=lambda ask: ask.__name__[4:])
@pytest.mark.parametrize("kind", KINDS)
def test_every_loader_gives_the_right_answer_or_a_refusal(kind, ask):
    values, dtype = KINDS[kind]
    for loader, load in LOADERS.items():
        try:
            column = load(values, dtype)
        except pytest.skip.Exception:
            continue
        if kind in REFUSED and not (kind == "texts" and ask in (ask_groups, ask_keys)):
            with pytest.raises(TypeError, match=r"(texts|date|timestamp|M8).*: (number|make)") as e:
                ask(column)
            assert ask is not ask_groups or "column 'x' of database" in str(e.value), loader
            continue
        ask_groups.keys = keys_of(kind)
        if kind == "texts":
            right = [2, 1, 1, 1] if ask is ask_groups else ["a"]
            without = right
        else:
            numbers = numbers_of(kind)
            right = RIGHT[ask](numbers)
            without = RIGHT[ask]([None if i == 1 else x for i, x in enumerate(numbers)])
        for found, expected in ((column, right), (missing_at(values, dtype, loader), without)):
            if found is None:
                continue
            got = ask(found)
            got = got if ask is ask_keys else np.asarray(got, float)
            if ask is ask_keys or ask not in TOLERANCE:
                np.testing.assert_array_equal(got, expected, f"{loader} {kind}")
            else:
                np.testing.assert_allclose(got, expected, atol=TOLERANCE[ask], err_msg=loader)
