"""Totals of cells against Python's integers; groups and parts against one evaluation for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import NeighboringRelation, queries
from dpjax._tracing._walks import equations
from dpjax.queries import _totals
from dpjax.queries._groups import groups as groups_of_keys
from dpjax.queries._groups import integers_by_group
from dpjax.queries._padded_records import present_records
from dpjax.queries._second_moments import _line_query, second_moments_query
from dpjax.queries._sums import centered_sums
from dpjax.queries._totals import Addend, added, cells_of_present, gram, totals_of

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
N = 600


def python_integers(limbs):
    high, low = (np.asarray(limb).astype(object) for limb in limbs)
    return (high - np.where(high >= 2**31, 2**32, 0)) * 2**32 + low


@pytest.fixture(scope="module")
def integers():
    """Rows of at most 2^20, in more than one block."""
    x = np.random.default_rng(0).integers(-(2**20), 2**20 + 1, (3000, 3)).astype("int32")
    x[:5] = 2**20, -(2**20), 2**20
    return x


def test_products_are_added_up_exactly(integers):
    found = jax.jit(gram, static_argnames="bits")(integers, bits=20)
    expected = integers.astype(object).T @ integers.astype(object)
    np.testing.assert_array_equal(python_integers(found), expected)
    assert np.abs(expected).max() > 2**49


@pytest.mark.parametrize("most", [2**22, 700], ids=["one block", "many blocks"])
@pytest.mark.parametrize("kind", ["short weights", "weights", "products"])
def test_rows_of_cells_are_added_up_exactly(integers, kind, most, monkeypatch):
    monkeypatch.setattr(_totals, "_MOST_DIGITS", most)
    cell = np.arange(3000, dtype="int32") % 4 - 1
    pairs = np.triu_indices(3)
    scale = 2**10 if kind == "weights" else 1
    x = integers * np.int32(scale)
    bits = 30 if kind == "weights" else 20
    products = pairs if kind == "products" else None

    @jax.jit
    def total(cell, x):
        return totals_of([Addend(cell, 3, x, bits, products)])

    exact = x.astype(object)
    exact = exact[:, pairs[0]] * exact[:, pairs[1]] if products else exact
    expected = [exact[cell == j].sum(axis=0) for j in range(3)]
    np.testing.assert_array_equal(python_integers(total(cell, x)[0]), expected)


def test_digits_of_a_block_of_rows_do_not_wrap():
    """A high digit of -1024 is the largest, and 2^21 of them are the end of int32."""
    assert -(2**20) >> 10 == -(2**30) >> 20 == -(2**40) >> 30 == -(2**10)
    assert _totals._ROWS * 2**10 < 2**31


def test_many_rows_of_the_largest_weight_do_not_wrap():
    """In one cell of two, 2^21 rows of -2^30 are -2^51: two blocks of the largest size."""
    n = 2**21
    weights = jnp.full((n, 1), -(2**30), jnp.int32)
    cell = jnp.where(jnp.arange(n) < n - 1, 1, -1).astype(jnp.int32)
    (total,) = jax.jit(lambda *x: totals_of([Addend(x[0], 2, x[1])]))(cell, weights)
    assert python_integers(total).ravel().tolist() == [0, -(2**30) * (n - 1)]


MATRIX = [[1, 0, 2, 0], [0, 3, -1, 0], [1, 1, 1, 0]]
PLAIN = {
    "everybody": queries.counting_query(),
    "count": queries.counting_query(lambda r: r > 0.5),
    "buckets": queries.histogram_query([-1, 0, 0.5, 2]),
    "clipped": queries.histogram_query(3, outliers="clip"),
    "sum": queries.sum_query(lower=-1, upper=2.5, capacity=N),
    "matrix": queries.linear_workload(MATRIX),
    "mean": centered_sums(-1.0, 2.5, N, 1),
    "variance": second_moments_query(lambda x: x[:, None] / 3, dims=1, capacity=N),
}
VECTORS = {
    "sums": queries.sum_query(lower=-1, upper=2, capacity=N, dims=3),
    "moments": second_moments_query(lambda x: x / 3, dims=3, capacity=N),
    "line": _line_query(lambda x: (x[:, :2], x[:, 2:]), dims=2, capacity=N),
}
CODES = {
    "contingency": queries.contingency_query({"a": 2, "b": 3}),
    "marginals": queries.marginal_workload({"a": 2, "b": 3}, [("b",), ("a", "b"), ("a",)]),
}
EVERY = PLAIN | VECTORS | CODES
SCORES = queries.quantile_scores([0.1, 0.5], grid=[-1.0, 0.0, 0.25, 0.25 + 1e-12, 2.0])


@functools.cache
def records_of(name):
    """Dirty records, of the shape that the query takes."""
    generator = np.random.default_rng(3)
    x = generator.choice(np.float32([np.nan, np.inf, -np.inf, -1, 0, 0.25, 1, 2, 3, 1e30]), (N, 3))
    x = np.where(generator.random((N, 3)) < 0.5, x, generator.normal(size=(N, 3)).astype("float32"))
    if name in VECTORS:
        return x
    if name in CODES:
        return {key: generator.integers(-1, 4, N) for key in "ab"}
    return x[:, 0]


def integers_of(name):
    return getattr(EVERY[name], "_integers", EVERY[name])


def table_with_groups(name):
    """The records beside two columns of groups, one of texts."""
    generator, records = np.random.default_rng(4), records_of(name)
    columns = records if isinstance(records, dict) else {"x": records}
    g = generator.choice([2**40, 7, -3, 5], N)
    t = generator.choice(np.array(["x", "yy", "none"], object), N)
    return {"g": g, **columns, "t": t}


@pytest.mark.parametrize("name", EVERY)
def test_all_groups_at_once_are_each_group_alone(name):
    """The same integers, so the same releases, as of the records of one group after the other."""
    table, query = table_with_groups(name), integers_of(name)
    inner = integers_by_group(query, groups_of_keys("t", ["yy", "nobody", "x"]))
    grouped = integers_by_group(inner, groups_of_keys("g", [7, 2**40, 6, -3]))
    slots = queries.PaddedRecords(table, jnp.arange(N) % 5 > 0)
    got = np.asarray(grouped(slots))
    assert got.shape == grouped.shape == (4, 3, *query.shape)
    assert got.dtype == np.int32
    for i, key in enumerate([7, 2**40, 6, -3]):
        for j, text in enumerate(["yy", "nobody", "x"]):
            here = (table["g"] == key) & (table["t"] == text) & (np.arange(N) % 5 > 0)
            alone = queries.PaddedRecords(records_of(name), jnp.asarray(here))
            np.testing.assert_array_equal(got[i, j], query(alone))


def test_quantiles_of_all_groups_at_once_are_those_of_each():
    table = {"g": table_with_groups("count")["g"], "x": records_of("count")}
    grouped = queries.by(SCORES, column="g", keys=[7, 6, 2**40])
    got = np.asarray(grouped(queries.PaddedRecords(table, jnp.arange(N) % 5 > 0)))
    for one, key in zip(got, [7, 6, 2**40], strict=True):
        here = jnp.asarray((table["g"] == key) & (np.arange(N) % 5 > 0))
        np.testing.assert_array_equal(one, SCORES(queries.PaddedRecords(table["x"], here)))
    halves = parts_of(grouped, table)
    np.testing.assert_array_equal(grouped.finish(halves), grouped(table))


def parts_of(query, records):
    """The totals of parts in another order, carried over the host and added up."""
    partial = jax.jit(query.partial)
    parts = [
        partial(*present_records(jax.tree.map(lambda x, k=k: x[k : k + 150], records)))
        for k in (300, 0, 450, 150)
    ]
    parts = jax.tree.map(np.asarray, parts)
    return functools.reduce(added, parts)


@pytest.mark.parametrize("name", EVERY)
def test_parts_add_up_to_the_whole(name):
    """To the same bits in any order."""
    query, records = integers_of(name), records_of(name)
    np.testing.assert_array_equal(query.finish(parts_of(query, records)), query(records))


def test_quantiles_of_parts_are_those_of_the_whole():
    records = records_of("count")
    np.testing.assert_array_equal(SCORES.finish(parts_of(SCORES, records)), SCORES(records))


@pytest.mark.parametrize("name", ["everybody", "sum", "buckets"])
def test_totals_go_beyond_the_records_of_32_bits(name):
    """A part of 600 records, 2^24 times: 10^10 records, doubled and not computed."""
    query, records = integers_of(name), records_of(name)
    part = query.partial(jnp.asarray(records), jnp.ones(N, bool))
    whole = part
    for _ in range(24):
        whole = added(whole, whole)
    for one, many in zip(part, whole, strict=True):
        np.testing.assert_array_equal(python_integers(one) * 2**24, python_integers(many))
    counts = np.asarray(query.finish(whole))
    assert counts.dtype == np.int32
    assert np.abs(counts).max() == 2**31 - 2


def test_a_thousand_groups_form_no_table_of_groups_and_records():
    """The largest array of the program has as many numbers as records, or cells."""
    n, groups = 5000, 1000
    query = integers_by_group(centered_sums(0.0, 1.0, n, 1), groups_of_keys("g", range(groups)))
    shapes = {"g": jax.ShapeDtypeStruct((n,), "int32"), "x": jax.ShapeDtypeStruct((n,), "float32")}
    program = jax.make_jaxpr(query)(shapes).jaxpr
    assert max(var.aval.size for step in equations(program) for var in step.outvars) < 20 * n


def test_groups_that_make_too_many_cells_are_refused():
    wide = queries.by(queries.histogram_query(2**21), column="g", keys=range(2**10))
    with pytest.raises(ValueError, match="keys must make at most 2147483646 cells"):
        jax.eval_shape(wide, {"g": jnp.zeros(3, int), "x": jnp.zeros(3, int)})


def test_cells_of_records_that_are_absent_add_nothing():
    cell = cells_of_present(jnp.array([True, False]))
    (total,) = totals_of([Addend(cell, 1, jnp.array([[5], [7]], jnp.int32))])
    assert python_integers(total).tolist() == [[5]]


def test_wide_tables_are_limited_by_their_marginals_alone():
    """66 pairs of 12 columns of 100 categories: the whole table has 10^24 cells."""
    names = [f"c{i}" for i in range(12)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    workload = queries.marginal_workload(dict.fromkeys(names, 100), pairs)
    generator = np.random.default_rng(0)
    people = {name: generator.integers(0, 100, 50) for name in names}
    counts = np.asarray(workload(people)).reshape(66, 100, 100)
    for (a, b), found in zip(pairs, counts, strict=True):
        expected = np.zeros((100, 100), int)
        np.add.at(expected, (people[a], people[b]), 1)
        np.testing.assert_array_equal(found, expected)
    assert workload.sensitivity("l1", relation=ADD).value == 66
    with pytest.raises(ValueError, match="at most 2147483646 cells"):
        workload.table  # noqa: B018
    with pytest.raises(ValueError, match="at most 2147483646 cells"):
        queries.marginal_workload(dict.fromkeys("abcdef", 100), [tuple("abcde")])
    with pytest.raises(ValueError, match="at most 2147483646 cells"):
        queries.mwem(workload, 1.0, rounds=1, records=50)
