"""Entries as users have them: large integers, categories of Arrow, and objects of pandas."""

import datetime
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
from dpjax._core._frames import texts_of

BIG = 2**53
EVEN = [BIG, BIG + 1, BIG + 2, BIG + 3, None]
TABLES = {
    "pandas": pd.DataFrame({"id": pd.array(EVEN, "Int64")}),
    "polars": pl.DataFrame({"id": EVEN}, schema={"id": pl.Int64}),
    "arrow": pa.table({"id": pa.array(EVEN, pa.uint64())}),
}
COMPARISONS = {
    name: getattr(operator, name) for name in ("eq", "ne", "gt", "le")
}  # Of NumPy, all are false for NaN but `ne`.


def rows(table, predicate):
    release = dpjax.PrivateTable(table, most_rows=8).count(where=predicate, epsilon=200.0)
    return int(release.value)


@pytest.mark.parametrize("library", TABLES)
def test_a_predicate_compares_large_integers_exactly(library):
    """In float64, 2^53 and 2^53 + 1 are one number. The integers may be on either side."""
    for name, compare in COMPARISONS.items():
        for public in (BIG + 1, np.int64(BIG + 1), 0.5):
            wanted = sum(name == "ne" if x is None else compare(x, public) for x in EVEN)
            predicate = functools.partial(lambda compare, y, row: compare(row["id"], y), compare)
            assert rows(TABLES[library], functools.partial(predicate, public)) == wanted, name
    assert rows(TABLES[library], lambda row: np.int64(BIG + 1) < row["id"]) == 2
    assert rows(TABLES[library], lambda row: row["id"] == row["id"]) == 4


def test_a_large_integer_is_a_number_for_all_functions():
    table = TABLES["polars"]
    assert rows(table, lambda row: jnp.isnan(row["id"])) == 1
    assert rows(table, lambda row: row["id"] / 2 > BIG / 2 + 0.5) == 2
    assert rows(table, lambda row: row["id"].astype(float) - BIG < 1) == 2
    assert rows(table, lambda row: jax.jit(jnp.isnan)(row["id"])) == 1


def test_unsigned_integers_compare_with_negative_numbers():
    """JAX would convert -1 to the largest unsigned integer. All are compared as in Python."""
    numbers = [0, 5, 2**31 + 5]
    for dtype in ("uint32", "uint64"):
        known = [*numbers, 2**63 + 5] if dtype == "uint64" else numbers
        table = {"x": np.array(known, dtype)}
        for public in (-1, 2**63 + 5 if dtype == "uint64" else 5):
            for name in ("eq", "gt"):
                compare = COMPARISONS[name]
                predicate = functools.partial(lambda compare, y, row: compare(row["x"], y), compare)
                found = rows(table, functools.partial(predicate, public))
                assert found == sum(compare(x, public) for x in known), (dtype, name, public)


@pytest.mark.parametrize(
    "predicate",
    [
        lambda row: row["id"] > 0 and row["id"] < 9,
        lambda row: row["id"] and row["id"] > 0,
        lambda row: row["ward"] in ("A", "B"),
        lambda row: row["day"] and row["id"] > 0,
    ],
    ids=["and", "a number", "in", "a date"],
)
def test_a_predicate_that_python_would_decide_is_refused(predicate):
    """Otherwise `row["day"] and other` would be `other`."""
    day = datetime.date(2020, 1, 1)
    frame = pl.DataFrame({"id": [1, None], "ward": ["A", "B"], "day": [day, None]})
    with pytest.raises(TypeError, match=r"where must be JAX code.* conditions by & and \|"):
        rows(frame, predicate)


def test_errors_about_a_table_show_no_entries():
    secret = 731.25
    frame = pd.DataFrame([[secret, 1.0]])
    columns = pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])
    for bad in (
        frame,
        frame.set_axis(columns, axis=1),
        [{"x": secret}],
        [frame],
        {"x": secret},
        frame[0],
        pa.array([secret]),
    ):
        with pytest.raises(TypeError) as refused:
            dpjax.PrivateTable(bad, most_rows=8)
        assert str(secret) not in str(refused.value), str(refused.value)
    with pytest.raises(TypeError, match=r"got the columns \[0, 1\]: rename its columns"):
        dpjax.PrivateTable(frame, most_rows=8)
    table = dpjax.PrivateTable({"x": np.ones(2)}, most_rows=8)
    with pytest.raises(TypeError, match=r"columns must be a list of names, such as \['x'\]"):
        table.covariance("x", bounds={"x": (0, 1)}, epsilon=1.0)


def test_a_category_of_arrow_is_its_text_or_number():
    values = {"text": ["x", None, "y", "x"], "number": [5, None, BIG + 1, 5]}
    arrow = pa.table({name: pa.array(x).dictionary_encode() for name, x in values.items()})
    for frame in (arrow, arrow.to_pandas(types_mapper=pd.ArrowDtype)):
        table = dpjax.PrivateTable(frame, most_rows=8)
        keys = {"text": ["x", "y", "z"], "number": [5, BIG, BIG + 1]}
        for name, public in keys.items():
            counts = table.count(by={name: public}, epsilon=200.0)
            assert counts.value.tolist() == [values[name].count(key) for key in public]


def test_objects_of_pandas_are_texts_and_errors_say_so():
    day = datetime.date(2020, 1, 1)
    frame = pd.DataFrame({"day": np.array([day, None], object), "x": [1.0, 2.0]})
    table = dpjax.PrivateTable(frame, most_rows=8)
    for of_dates in (
        lambda: table.mean("day", bounds=(day, day + datetime.timedelta(9)), epsilon=1.0),
        lambda: table.histogram("day", [day, day + datetime.timedelta(9)], epsilon=1.0),
        lambda: table.count(by={"day": [day]}, epsilon=1.0),
        lambda: table.count(by={"x": [day]}, epsilon=1.0),
    ):
        with pytest.raises(
            TypeError, match=r"must hold dates, .* convert it by pandas.to_datetime"
        ):
            of_dates()
    for of_numbers in (
        lambda: table.mean("day", bounds=(0, 1), epsilon=1.0),
        lambda: table.count(where=lambda row: row["day"] < day, epsilon=1.0),
    ):
        with pytest.raises(TypeError, match="column of dtype object counts as texts"):
            of_numbers()
    assert int(table.count(by={"day": ["2020-01-01"]}, epsilon=200.0).value[0]) == 1


@pytest.mark.parametrize("last", [("A", "B"), ("A", "B", "C"), None])
def test_the_length_of_one_object_changes_no_other_entry(last):
    """NumPy makes one array of two axes of objects that are all of one length."""
    objects = pl.Series("c", [("A", "B")] * 9 + [last], dtype=pl.Object)
    found = texts_of(objects)
    assert found.shape == (10,)
    assert found[0] == ("A", "B")
    table = dpjax.PrivateTable({"c": objects}, most_rows=16)
    assert int(table.count(by={"c": ["A"]}, epsilon=200.0).value[0]) == 0


def of_arrow(texts):
    table = pa.table({"c": pa.array(texts, pa.binary()).view(pa.string())})
    pandas = table.to_pandas(types_mapper=pd.ArrowDtype)
    return table, pandas, pandas.astype({"c": pd.StringDtype("pyarrow")})


@pytest.mark.parametrize("last", [b"b", b"\xff"])
def test_invalid_utf_8_in_one_row_raises_no_error(last):
    """Neither Arrow nor a file of Parquet checks it."""
    for frame in of_arrow([b"a"] * 9 + [last]):
        table = dpjax.PrivateTable(frame, most_rows=16)
        assert int(table.count(by={"c": ["a"]}, epsilon=200.0).value[0]) == 9
        assert len(set(texts_of(frame["c"]))) == 2


@pytest.mark.parametrize("more", [7, 8, 100])
def test_chunks_of_narrow_indices_may_have_many_distinct_entries_together(more):
    """Indices of 8 bits count to 127, and a row with the 129th entry would be an error."""
    chunks = [
        pa.Table.from_pandas(pd.DataFrame({"c": pd.Categorical([f"{p}{i}" for i in range(n)])}))
        for p, n in (("a", 120), ("b", more))
    ]
    table = dpjax.PrivateTable(pa.concat_tables(chunks), most_rows=256)
    counts = table.count(by={"c": ["a1", "b1", "c"]}, epsilon=200.0).value
    assert counts.tolist() == [1, 1, 0]


def test_what_nothing_is_known_about_prints_so():
    table = dpjax.PrivateTable({"x": np.arange(9.0), "y": np.arange(9.0)}, most_rows=9)
    how = {"bounds": {"x": (0, 9), "y": (0, 9)}, "epsilon": 0.01, "key": dpjax.random.seeded_key(0)}
    printed = str(table.regression("y", ["x"], **how))
    assert "± inf" in printed
    assert "\n" not in printed
