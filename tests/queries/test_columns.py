"""A column gives the right answer, or a refusal that names it, whichever library holds it.

The class of the defects: a number that a loader, NumPy or JAX holds in a narrower dtype than the
file had. What else reaches a column: every query, the keys of groups, `group_keys`, the shapes of
private statistics, `padded_records`, `parts`, and functions of records. Tried here: all of them,
for every loader and every kind of column, alone and in a table. Functions of the user that are
released themselves are in tests/release/test_database.py.
"""

import itertools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
import odd_inputs
from dpjax import queries
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import exact_records
from loaders import BIG, KINDS, LOADERS, missing_at
from tables import for_each

KEY = dpjax.random.seeded_key(5)
SHARP = {"epsilon": 1e6}
EDGES = [-(2.0**41), 0, 0.1, 2, 2**24 + 1, 20240131, 20240201, 4e9, 5e9 + 1, 1e19]
KEYS = [2, 7, 20240131, 20240201, 2**24, 2**24 + 1, 5_000_000_001, -(2**40), 2**60, 2**60 + 1]
GRID = [-1.5, 0, 0.1, 2, 3, 2**24, 20240131, 3e9, 5e9 + 1, 1e18]


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
    return queries.sum_query(lower=-10, upper=6e9, capacity=6)(column)


def ask_mean(column):
    ends = {"lower": -10, "upper": 6e9}
    return queries.private_mean(KEY, column, missing="lower", **ends, **SHARP).value


def ask_mean_of_answers(column):
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


def answers(numbers):
    return [x for x in numbers if x is not None]


def clamped(numbers):
    return [-10 if x is None else min(max(x, -10), 6e9) for x in numbers]


RIGHT = {
    ask_count: lambda numbers: numbers.count(20240131),
    ask_histogram: counts_between,
    ask_codes: lambda numbers: [numbers.count(code) for code in range(4)],
    ask_sum: lambda numbers: math.fsum(clamped(numbers)),
    ask_mean: lambda numbers: math.fsum(clamped(numbers)) / 6,
    ask_mean_of_answers: lambda numbers: statistics.fmean(clamped(answers(numbers))),
    ask_quantiles: scores,
    ask_groups: lambda numbers: [numbers.count(key) for key in ask_groups.keys],
    ask_keys: lambda numbers: sorted(
        {int(x) for x in numbers if x is not None and numbers.count(x) > 1}
    ),
}
# Totals are integers of 16 bits. A number of 2^31 for 5e9 would be off by far more.
TOLERANCE = {
    ask_sum: 6e9 * 2.0**-15,
    ask_mean: 6e9 * 2.0**-15 / 6,
    ask_mean_of_answers: 6e9 * 2.0**-15 / 5,
}


def form_of(database):
    """All that a query sees of a database."""
    exact, _ = exact_records("database", database)
    return TreeSpec.of(exact), *(np.asarray(x).tobytes() for x in jax.tree.leaves(exact))


@pytest.mark.parametrize("kind", KINDS)
@for_each("ask", RIGHT)
def test_every_loader_gives_the_right_answer_or_a_refusal(kind, ask):
    """A query sees a column in its exact form alone, so it is asked once for each form."""
    values, dtype = KINDS[kind]
    answers = {}
    for loader, load in LOADERS.items():
        try:
            column = load(values, dtype)
        except pytest.skip.Exception:
            continue
        if kind == "texts" and ask not in (ask_groups, ask_keys):
            with pytest.raises(TypeError, match=r"must be numbers.*got the dtype .*: "):
                ask(column)
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
            form = loader if ask is ask_keys else form_of({"x": found})
            if ask is ask_keys or form not in answers:
                answers[form] = ask(found)
            got = answers[form]
            got = got if ask is ask_keys else np.asarray(got, float)
            if ask is ask_keys or ask not in TOLERANCE:
                np.testing.assert_array_equal(got, expected, f"{loader} {kind}")
            else:
                np.testing.assert_allclose(got, expected, atol=TOLERANCE[ask], err_msg=loader)


WORSE = {
    "ints": [2**62, -(2**63), 2**63 - 1, 2**31, -(2**31) - 1, 0],
    "big ints": [0] * 6,
    "floats": [math.inf, -math.inf, 1e308, 5e-324, -0.0, 1.0],
    "floats of 32 bits": [math.inf, -math.inf, 3e38, 1e-45, -0.0, 1.0],
    "texts": ["", "\x00", "nan", "None", "0", "-1"],
}


@pytest.mark.parametrize("kind", WORSE)
@for_each("ask", RIGHT)
def test_refusals_do_not_depend_on_values(kind, ask):
    """The same shape and dtype of an answer, or the same words, whatever the column holds."""
    values, dtype = KINDS[kind]
    ask_groups.keys = keys_of(kind)

    def outcome(column):
        try:
            found = ask(column)
            return None if ask is ask_keys else (np.shape(found), np.asarray(found).dtype)
        except TypeError as error:
            return str(error)

    for loader, load in LOADERS.items():
        assert outcome(load(values, dtype)) == outcome(load(WORSE[kind], dtype)), loader


@pytest.mark.parametrize("of", [jnp.asarray, np.asarray, pd.Series, pl.Series, pa.array])
def test_the_dtype_of_an_answer_does_not_follow_that_of_a_column(of):
    """The noise of a release is for the dtype of the value."""
    for query in (
        queries.counting_query(lambda x: x > 0),
        queries.histogram_query(4),
        queries.histogram_query([0, 1, 2]),
        queries.quantile_scores(0.5, grid=[0, 1]),
        queries.linear_workload([[1, 0], [0, 1]]),
    ):
        column = of(np.array([1, 0, 2]))
        assert query(column).dtype == jnp.int32
        assert jax.jit(query)(jnp.array([1, 0, 2])).dtype == jnp.int32
        by_group = queries.by(query, column="g", keys=[0, 1])
        assert by_group({"g": column, "x": column}).dtype == jnp.int32


def test_moments_are_those_of_integers_beyond_32_bits():
    """Means near the top of a narrow interval, of milliseconds since 1970 and of large cents."""
    start, day = 1_700_000_000_000, 86_400_000
    times = start + np.random.default_rng(0).integers(0, day, 4000)
    loaded = (times, pd.Series(times, dtype="Int64"), pl.Series(times), times.astype(float))
    for column in loaded:
        bounds = {"lower": start, "upper": start + day}
        query = queries.sum_query(lower=start, upper=start + day, capacity=4000)
        assert float(query(column)) == pytest.approx(float(times.sum()), rel=1e-6)
        mean = queries.private_mean(KEY, column, **bounds, **SHARP).value
        assert float(mean) == pytest.approx(times.mean(), abs=day / 500)
        spread = queries.private_variance(KEY, column, **bounds, **SHARP).value
        assert float(spread["variance"]) == pytest.approx(times.var(), rel=1e-2)


def test_vectors_and_lines_of_64_bits():
    """`in_ball` and regression: the nearest floats, where int32 would end at 2147483647."""
    generator = np.random.default_rng(0)
    x = generator.integers(-4_000_000_000, 4_000_000_000, (3000, 1))
    y = x[:, 0] // 2
    radii = {"x_radius": 4e9, "y_radius": 4e9, "epsilon": 40.0, "delta": 1e-6}
    line = queries.private_linear_regression(KEY, {"x": x, "y": y}, **radii).value
    assert float(line["weights"][0]) == pytest.approx(0.5, abs=1e-2)
    radius = {"radius": 4e9, "epsilon": 40.0, "delta": 1e-6}
    covariance = queries.private_covariance(KEY, x, **radius).value
    found = covariance["covariance"] if isinstance(covariance, dict) else covariance
    assert float(np.ravel(found)[0]) == pytest.approx(x.var(), rel=1e-2)


def test_slots_and_parts_keep_all_numbers():
    ids = np.array([2**60 + 1, 2**60, 5_000_000_001, 7])
    numbers = pd.Series([2**60 + 1, None, 5_000_000_001, 7], dtype="Int64")
    by_id = queries.by(queries.counting_query(), column="id", keys=[2**60, 2**60 + 1])
    for column, expected in ((ids, [1, 1]), (numbers, [0, 1])):
        table = {"id": column, "x": np.array([5e9 + 1, 5e9, 1.0, 2.0])}
        slots = queries.padded_records(table, capacity=9)
        assert by_id(slots).tolist() == expected
        parts = queries.split_by(slots, column="id", keys=[2**60, 2**60 + 1])
        counted = queries.histogram_query([0, 5e9 + 1, 6e9])
        assert [counted(part).tolist() for part in parts.values()] == [
            [expected[0], 0],
            [0, expected[1]],
        ]


def test_a_predicate_sees_all_bits_and_texts():
    table = pd.DataFrame({"id": [2**60 + 1, 2**60, 300], "sex": ["f", "m", None], "age": [1, 2, 3]})
    table = table.astype({"age": "uint8"})
    with odd_inputs.any_promotion():
        for predicate, expected in (
            (lambda r: r["id"] == 2**60 + 1, 1),
            (lambda r: r["id"] % 2 == 1, 1),
            (lambda r: r["id"] * 1.0 > 2.0**59, 2),
            (lambda r: r["age"] == 257, 0),
            (lambda r: r["age"] - 2 < 0, 1),
            (lambda r: r["sex"] == "f", 1),
            (lambda r: r["sex"] != "f", 2),
            (lambda r: (r["sex"] == "m") & (r["age"] > 1), 1),
        ):
            assert int(queries.counting_query(predicate)(table)) == expected
        with pytest.raises(TypeError, match="texts can only be compared with a text, got 1"):
            queries.counting_query(lambda r: r["sex"] == 1)(table)


NUMBERS, TEXTS = pd.DataFrame({"a": [0.1, 0.2], "b": [0.0, 0.3]}), pd.Series(["f", "m"])
INTERVALS = pd.DataFrame({"x": pd.interval_range(0, 2), "y": [1.0, 2.0]})
RADII = {"x_radius": 1.0, "y_radius": 1.0, "epsilon": 1.0, "delta": 1e-6}
ASKED = {
    "mean of a frame": (
        lambda: queries.private_mean(KEY, NUMBERS, lower=0, upper=1, epsilon=1.0),
        ["database must be numbers", "{'a': 'float64[2]'", "table[name]"],
    ),
    "frames in dicts": (
        lambda: queries.histogram_query(3)({"d": NUMBERS}),
        ["database must be numbers of shape (n,)", "{'d': {'a'", "table[name]"],
    ),
    "a frame as a column": (
        lambda: queries.contingency_query({"d": 2})({"d": NUMBERS}),
        ["column 'd' must be numbers", "'a': 'float64[2]'", "table[name]"],
    ),
    "a frame of groups": (
        lambda: queries.by(queries.counting_query(), column="d", keys=[1])({"d": NUMBERS}),
        ["column='d' must hold one integer or text", "'a': 'float64[2]'"],
    ),
    "texts in a table": (
        lambda: queries.contingency_query({"sex": 2})({"sex": TEXTS}),
        ["column 'sex' must be numbers", "got texts", "get_indexer", "queries.by"],
    ),
    "texts alone": (
        lambda: queries.histogram_query(4)(pl.Series(["a"])),
        ["database must be numbers", "String", "get_indexer", "queries.by"],
    ),
    "objects": (
        lambda: queries.counting_query()(np.array([1, None], object)),
        ["database must be numbers", "dtype object", '.astype("float64")'],
    ),
    "regression of a frame": (
        lambda: queries.private_linear_regression(KEY, NUMBERS, **RADII),
        ['"x": array of shape (n, d)', "{'a'", "numpy.stack"],
    ),
    "regression on a frame": (
        lambda: queries.private_linear_regression(KEY, {"x": NUMBERS, "y": TEXTS}, **RADII),
        ["x of database must be numbers of shape (n, d)", "{'a'", "numpy.stack"],
    ),
    "regression on a column": (
        lambda: queries.private_linear_regression(
            KEY, {"x": NUMBERS["a"], "y": NUMBERS["b"]}, **RADII
        ),
        ["x of database must be numbers of shape (n, d)", "float64[2]", "numpy.reshape"],
    ),
    "regression of texts": (
        lambda: queries.private_linear_regression(
            KEY, {"x": NUMBERS.to_numpy(), "y": TEXTS}, **RADII
        ),
        ["y of database must be numbers of shape (n,)", "got texts", "get_indexer"],
    ),
    "k-means of a frame": (
        lambda: queries.private_k_means(
            KEY, NUMBERS, clusters=2, radius=1.0, epsilon=1.0, delta=1e-6
        ),
        ["database must be numbers of shape (n, d)", "{'a'", "numpy.stack"],
    ),
    "lists": (
        lambda: queries.histogram_query([0, 1])(pl.Series([[1], [2]])),
        ["database must be numbers, texts, dates", "List(Int64)", "cast it to one", "leave it out"],
    ),
    "intervals": (
        lambda: queries.private_mean(
            KEY, INTERVALS, lower=0, upper=1, epsilon=1.0, by={"x": [1, 2]}
        ),
        ["column 'x' must be numbers, texts, dates", "interval[int64", "leave it out"],
    ),
    "numbers of groups": (
        lambda: queries.by(
            queries.sum_query(lower=0, upper=1, capacity=9), column="y", keys=[1], of="x"
        )(INTERVALS.astype({"y": "int64"})),
        ["column 'x' must be numbers, texts, dates", "interval[int64", "leave it out"],
    ),
    "a frame to prove": (
        lambda: dpjax.prove_sensitivity(
            lambda d: jnp.mean(d["a"]), pa.table({"a": [[1]], "b": [1.0]}), bounds=(0, 1), norm="l1"
        ),
        ["column 'a' must be numbers", "list<item: int64>", "cast it to one"],
    ),
    "a predicate": (
        lambda: queries.counting_query(lambda row: row["x"] > 1)(INTERVALS),
        ["column 'x' must be numbers, texts, dates", "interval[int64", "leave it out"],
    ),
    "public integers": (
        lambda: dpjax.oracles.resample(pd.DataFrame({"a": BIG})),
        ["column 'a' of records must be integers from", "int64", '.astype("float64")'],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_refusal_names_argument_column_dtype_and_remedy(name):
    entry, words = ASKED[name]
    with pytest.raises((TypeError, ValueError)) as refusal:
        entry()
    missing = [word for word in words if word not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"
