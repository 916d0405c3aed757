"""Queries by group: against a loop over groups, and on all neighbors of small domains."""

import datetime
import decimal
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax.queries._groups import groups as groups_of_keys
from dpjax.queries._groups import integers_by_group
from dpjax.queries._second_moments import second_moments_query

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
both_relations = pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)
KEY = dpjax.random.seeded_key(3)
RBG = jax.random.key(0, impl="rbg")
CUTS = ["Good", "Fair", "Ideal", "none has this"]

# Key 9 is in no group. Missing and fractional keys are in none either.
KEYS = (0, 1)
DOMAIN = [(g, x) for g in (0.0, 1.0, 9.0, 0.5, np.nan) for x in (-1.0, 0.0, 2.0, 7.0)]
SMALL = {
    "everybody": queries.counting_query(),
    "count": queries.counting_query(lambda x: x > 0),
    "buckets": queries.histogram_query([-1, 0, 2]),
    "sum": queries.sum_query(lower=-1, upper=3, capacity=4),
    "moments": second_moments_query(lambda x: x[:, None] / 2, dims=1, capacity=4),
}
# How far a record moves the query, and all groups, under replace-one: in l1, l2 squared, linf.
REPLACED = {"everybody": (2, 2, 1), "count": (2, 2, 1), "buckets": (2, 2, 1)}


def table_of(n=300):
    generator = np.random.default_rng(0)
    cut = generator.choice(CUTS[:3], n)
    return pd.DataFrame({"cut": cut, "price": generator.integers(0, 9, n).astype(float)})


def databases(slots):
    """All databases of so many slots, where a slot may be empty."""
    numbers = np.array([*DOMAIN, (0.0, 0.0)], "float32")
    chosen = np.array(list(itertools.product(range(len(numbers)), repeat=slots)))
    return chosen, queries.PaddedRecords(numbers[chosen], chosen < len(DOMAIN))


def integers_of(name):
    """The integers of a small query, by group."""
    query = SMALL[name]
    return integers_by_group(getattr(query, "_integers", query), groups_of_keys(0, KEYS))


@pytest.fixture(scope="module")
def values():
    """The integers of small queries by group on all databases of two slots."""
    _, every = databases(2)
    found = {}
    for name in SMALL:
        grouped = integers_of(name)
        found[name] = np.asarray(jax.vmap(grouped)(every)).reshape(len(every.present), -1)
    return found


def neighbors(relation):
    """Pairs of databases of two slots that differ in the first slot."""
    chosen, _ = databases(2)
    empty = chosen[:, 0] == len(DOMAIN)
    for other in np.unique(chosen[:, 1]):
        same = chosen[:, 1] == other
        if relation is ADD:
            (nobody,) = np.flatnonzero(same & empty)
            yield from ((i, nobody) for i in np.flatnonzero(same & ~empty))
        else:
            yield from itertools.combinations(np.flatnonzero(same & ~empty), 2)


@both_relations
@pytest.mark.parametrize("name", SMALL)
def test_no_record_moves_the_groups_further(values, name, relation):
    """It may leave one group and enter another, change within one, or be in none."""
    grouped = integers_of(name)
    first, second = np.array(list(neighbors(relation))).T
    moved = values[name][first].astype(float) - values[name][second]
    for i, (norm, order) in enumerate(ORDS.items()):
        stated = grouped.reach(norm, relation)
        found = np.linalg.norm(moved, order, axis=1).max()
        assert found <= stated
        if name in REPLACED:
            squared = REPLACED[name][i] if relation is REPLACE else 1
            exact = squared**0.5 if norm == "l2" else squared
            assert found == pytest.approx(exact)
            assert stated == pytest.approx(exact)
        else:
            assert found > 0.6 * stated  # Records of this domain need not attain it.
    blocks = np.abs(moved.reshape(len(moved), len(KEYS), -1)).max(axis=2).sum(axis=1).max()
    assert blocks <= grouped.reach(queries.sum_of_group_maxima, relation)


def test_reach_is_that_of_the_query_or_of_two_groups():
    """max(R, 2 A), max(R, sqrt(2) A) and max(R, A), each attained by one of these."""
    wide, shifted = (
        queries.sum_query(lower=low, upper=high, capacity=2**10) for low, high in ((-8, 8), (7, 8))
    )
    for query, moved in ((wide, 16), (shifted, 8)):
        grouped = queries.by(query, column="g", keys=[1, 2])
        alone = queries.by(query, column="g", keys=[1])  # A record that leaves it enters no other.
        for norm, factor in {"l1": 2, "l2": 2**0.5, "linf": 1}.items():
            apart, added = (query.sensitivity(norm, relation=r).value for r in (REPLACE, ADD))
            # `sensitivity` of a query without groups is that of one group, so it is stated here.
            assert (apart, added) == (moved, 8)
            stated = grouped.sensitivity(norm).value
            assert stated >= max(apart, factor * added)
            assert stated == pytest.approx(max(apart, factor * added), rel=1e-12)
            assert grouped.sensitivity(norm, relation=ADD).value == added
            assert alone.sensitivity(norm).value == max(apart, added)


def test_all_groups_at_once_are_a_loop_over_groups():
    frame = table_of()
    for query in (SMALL["count"], SMALL["buckets"], queries.histogram_query(9)):
        grouped = queries.by(query, column="cut", keys=CUTS)
        for database in (frame, queries.padded_records(frame, capacity=400)):
            got = np.asarray(grouped(database))
            assert got.shape == grouped.shape == (4, *query.shape)
            for key, value in zip(grouped.keys, got, strict=True):
                part = queries.padded_records(frame["price"][frame["cut"] == key], capacity=300)
                np.testing.assert_array_equal(value, query(part))


def test_columns_may_be_named_or_computed():
    """And what is left is the record: one column as it is, or several."""
    codes, prices, x = np.array([2, 0, 2, 5]), np.array([1.0, 2.0, 4.0, 8.0]), np.arange(4.0)
    total = queries.sum_query(lower=0, upper=8, capacity=2**10)

    def sums(database, **arguments):
        grouped = queries.by(total, **{"keys": [0, 2], **arguments})
        return grouped(database).tolist()

    assert sums({"g": codes, "price": prices}, column="g") == [2.0, 5.0]
    assert sums((codes, prices), column=0) == [2.0, 5.0]
    assert sums(np.stack([prices, codes], axis=1), column=1) == [2.0, 5.0]
    assert sums({"g": codes, "price": prices, "x": x}, column="g", of="x") == [1.0, 2.0]
    assert sums(prices, column=lambda price: price >= 4, keys=[True, False]) == [12.0, 3.0]
    # This one rounds, so it runs in a loop over the records.
    half = {"column": lambda r: jnp.floor(r["x"] / 2).astype(int), "of": "price"}
    assert sums({"x": x, "price": prices}, keys=[1], **half) == [12.0]
    points = queries.by(queries.counting_query(lambda r: r[0] > r[1]), column=2, keys=[0])
    assert points(np.array([[2, 1, 0], [1, 2, 0], [2, 1, 1]])).tolist() == [1]
    twice = queries.by(total, column="g", keys=[0, 2])
    twice = queries.by(twice, column="x", keys=[0, 1, 2])
    value = twice({"g": codes, "price": prices, "x": x})
    assert value.tolist() == [[0.0, 1.0], [2.0, 0.0], [0.0, 4.0]]


def test_a_record_has_one_group_in_every_slot():
    """For a function that rounds, too: under `vmap` the last rows could get other floats."""
    x = np.random.default_rng(1).normal(size=37).astype("float32")

    def bucket(record):
        return jnp.floor(jnp.exp(record) * jnp.sin(record) * 1e6).astype(int) % 5

    grouped = queries.by(queries.counting_query(), column=bucket, keys=range(5))
    alone = np.stack([grouped(x[i : i + 1]) for i in range(37)])
    assert alone.sum() == 37
    for shift in range(1, 37, 7):
        np.testing.assert_array_equal(grouped(np.roll(x, shift)), alone.sum(axis=0))
    empty = queries.PaddedRecords(jnp.asarray(x), jnp.arange(37) % 3 == 0)
    np.testing.assert_array_equal(grouped(empty), alone[::3].sum(axis=0))


def test_keys_compare_exactly():
    """Saturated integers, floats that are no codes, and missing texts are in no group."""
    everybody = queries.counting_query()

    def counts(column, keys):
        return queries.by(everybody, column="g", keys=keys)({"g": column}).tolist()

    assert counts(np.array([-1, 1, 255]), [-1, 1]) == [1, 1]
    assert counts(np.float32([-1, np.nan, 0.5, np.inf, 2, 1e9]), [-1, 2, 0]) == [1, 1, 0]
    assert counts(np.array([2**40, 2**31 - 1, 7], "int64"), [2**31 - 2, 7]) == [0, 1]
    assert counts(np.array([255, 0], "uint8"), [-1, 255]) == [0, 1]
    assert counts(np.array([True, False, True]), [True, False]) == [2, 1]
    texts = ["a", "b", "", "a", "\ud800", "ä"]
    assert counts(np.array(texts, object), ["a", "", "ä", "\ud800"]) == [2, 1, 1, 1]
    missing = np.array(["a", None, np.nan, 3, "None", "nan", 0.5], object)
    assert counts(missing, ["a", "None", "nan", "3", "0.5"]) == [1, 1, 1, 1, 1]


def test_a_column_of_objects_holds_what_its_entries_say():
    """Also numbers: texts as keys gave 0 for each of them, in silence."""
    entries = [20240131, 2**70, np.int32(7), 7.0, decimal.Decimal("7.0"), True, np.bool_(False)]
    entries += [datetime.date(2024, 1, 31), math.inf, pd.NaT, pd.NA, b"7", "7", (7,), -3]
    entries += [decimal.Decimal(x) for x in ("NaN", "sNaN", "Infinity", "1e999999")] + [10**5000]
    found = queries.by(
        queries.counting_query(),
        column="g",
        keys=["20240131", str(2**70), "7", "1", "0", "2024-01-31", "inf", "NaT", "-3"],
    )({"g": pd.Series(entries, dtype=object)})
    assert found.tolist() == [1, 1, 4, 1, 1, 1, 0, 0, 1]


def test_keys_of_all_64_bits_are_told_apart():
    keys = [2**63 - 1, 2**63 - 2, -(2**63), 2**53 + 1, 2**31 - 1, 2**31]
    grouped = queries.by(queries.counting_query(), column="g", keys=keys)
    for column in (np.array(keys), pd.Series(keys, dtype="Int64")):
        assert grouped({"g": column}).tolist() == [1] * 6
    assert (
        grouped({"g": np.array([2**63, 2**64 - 1, 2**63 - 1], "uint64")}).tolist() == [1] + [0] * 5
    )
    assert grouped({"g": jnp.array([2**31 - 1, 0])}).tolist() == [0] * 4 + [1, 0]
    two = np.array([[2**53 + 1, 5], [2**53, 2**40]])
    assert queries.by(queries.histogram_query([0, 2**40 - 1]), column=0, keys=[2**53, 2**53 + 1])(
        two
    ).tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("column", "bits"),
    [(np.float64([1, 2]), 53), (np.float32([1, 2]), 24), (jnp.bfloat16([1, 2]), 8)],
    ids=["float64", "float32", "bfloat16"],
)
def test_keys_that_floats_do_not_tell_apart_are_refused(column, bits):
    """By dtype and keys, which are public: they would match other integers, or nobody."""

    def counts(keys):
        return queries.by(queries.counting_query(), column="g", keys=keys)({"g": column}).tolist()

    assert counts([2**bits - 1, 1]) == [0, 1]
    for key in (2**bits, -(2**bits)):
        with pytest.raises(ValueError, match=f"keys must be below {2**bits} in a column of"):
            counts([1, key])


def test_columns_of_texts_come_from_tables():
    """Of pandas: objects, texts and categories. Dtypes alone decide, never what is missing."""
    frame = table_of(20)
    grouped = queries.by(queries.histogram_query(9), column="cut", keys=CUTS)
    expected = np.asarray(grouped({"cut": frame["cut"].to_numpy(object), "price": frame["price"]}))
    for dtype in (object, "str", "string", "category"):
        holes = frame.assign(cut=frame["cut"].astype(dtype))
        np.testing.assert_array_equal(grouped(holes), expected)
        holes.loc[:, "cut"] = holes["cut"].where(np.arange(20) > 0)
        one = np.zeros_like(expected)
        one[CUTS.index(frame["cut"][0]), int(frame["price"][0])] = 1
        np.testing.assert_array_equal(grouped(holes), expected - one)
        np.testing.assert_array_equal(
            grouped(queries.padded_records(holes, capacity=30)), expected - one
        )
    with pytest.raises(ValueError, match=r"numbers of shape.*texts.*pass one column"):
        queries.private_mean(KEY, {"cut": frame["cut"]}, lower=0, upper=1, epsilon=1)
    nullable = frame.assign(price=frame["price"].astype("Int64"))
    np.testing.assert_array_equal(grouped(nullable), expected)
    with pytest.raises(TypeError, match="without a mask"):
        grouped({"cut": np.ma.array(frame["cut"].to_numpy(object)), "price": frame["price"]})


def test_what_is_no_group_is_refused():
    count = queries.counting_query()
    for keys in (1.0, "ab", {1, 2}, [1, "a"], [0.5], [], [None], jnp.array([1.5])):
        with pytest.raises(TypeError, match="keys must be"):
            queries.by(count, column="g", keys=keys)
    for keys in ([1, 1], [True, 1], ["a", "a"], [2**63]):
        with pytest.raises(ValueError, match="keys must be"):
            queries.by(count, column="g", keys=keys)
    for column in (None, 1.5, True):
        with pytest.raises(TypeError, match="column must be"):
            queries.by(count, column=column, keys=[1])
    with pytest.raises(TypeError, match=r"ledger\.parallel"):
        queries.by(jnp.mean, column="g", keys=[1])
    grouped = queries.by(count, column="g", keys=[1])
    for database in ({"h": np.arange(3)}, np.arange(3), {"g": np.ones((3, 2))}):
        with pytest.raises(ValueError, match="column"):
            grouped(database)
    with pytest.raises(TypeError, match="keys must be texts"):
        grouped({"g": np.array(["a", "b"])})
    with pytest.raises(TypeError, match="keys must be numbers"):
        queries.by(count, column="g", keys=["a"])({"g": np.arange(3)})
    with pytest.raises(TypeError, match=r"jnp\.floor"):
        queries.by(count, column=lambda x: x / 2, keys=[1])(np.arange(3.0))
    shaken = queries.by(count, column=lambda x: jax.random.randint(RBG, (), 0, 2), keys=[1])
    with pytest.raises(ValueError, match=r"Under jax\.vmap"):
        shaken(np.arange(3))
    for by in ([("g", [1])], {}, "g", {abs: [1]}):
        with pytest.raises(TypeError, match="by must be a dict"):
            queries.private_mean(KEY, {"g": np.ones(1)}, lower=0, upper=1, epsilon=1, by=by)


@both_relations
def test_all_groups_are_within_the_error_at_once(relation):
    """In 400 releases of 24 counts: .95 minus three standard errors, and not far above."""
    grouped = queries.by(queries.histogram_query(6), column="g", keys=range(4))
    generator = np.random.default_rng(2)
    people = {"g": generator.integers(0, 5, 200), "x": generator.integers(0, 6, 200)}
    exact = grouped(people)
    mechanism = dpjax.laplace(grouped.sensitivity("l1", relation=relation), 0.1)
    draws = jax.vmap(lambda key: mechanism.unpaid_draw(key, exact))(jax.random.split(KEY, 400))
    worst = np.abs(np.asarray(draws) - np.asarray(exact)).max(axis=(1, 2))
    inside = np.mean(worst <= grouped.error(mechanism))
    assert 0.95 - 3 * (0.95 * 0.05 / 400) ** 0.5 <= inside <= 0.99


# Quantiles and other selections.


@both_relations
@pytest.mark.parametrize("kind", ["quantiles", "largest"])
def test_selections_in_all_groups_cost_one_epsilon(kind, relation):
    """Log probabilities of all outputs, on all pairs of databases of two slots."""
    _, every = databases(2)
    epsilon = 2.0
    if kind == "quantiles":
        scores = queries.quantile_scores((0.25, 0.5), grid=[0.0, 1.0, 3.0])
        grouped = queries.by(scores, column=0, keys=KEYS)
        mechanism = queries.select_each(grouped.sensitivity(relation=relation), epsilon, count=2)
        options = [np.reshape(x, (2, 2)) for x in itertools.product(range(3), repeat=4)]
    else:
        grouped = queries.by(queries.histogram_query([-2, 0, 2, 9]), column=0, keys=KEYS)
        reach = grouped.sensitivity(queries.sum_of_group_maxima, relation=relation)
        mechanism = queries.top_k(reach, epsilon, k=2)
        orders = list(itertools.permutations(range(3), 2))
        options = [np.array(x) for x in itertools.product(orders, repeat=2)]
    values = jax.vmap(grouped)(every)
    distinct, place = np.unique(np.asarray(values), axis=0, return_inverse=True)
    place = place.reshape(-1)
    of_outputs = jax.vmap(mechanism.log_prob, (0, None))
    logs = np.asarray(
        jax.jit(jax.vmap(of_outputs, (None, 0)))(jnp.array(options), jnp.array(distinct)), float
    )
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-5)
    first, second = place[np.array(list(neighbors(relation)))].T
    assert np.abs(logs[first] - logs[second]).max() <= epsilon * (1 + 1e-5)
    assert mechanism.guarantee.epsilon == epsilon
    assert mechanism.guarantee.relation is relation


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_selections_by_group_attain_epsilon_for_any_division_between_two_groups(share):
    """The worst scores that the norm allows: the option selected falls, the others rise."""
    reach = dpjax.assume_sensitivity(8.0, norm=queries.sum_of_group_maxima)
    moved = np.array([8 * share, 8 * (1 - share), 0])[:, None]
    sign = np.array([-1, 1, 1])
    one_row = np.array([0, 1000, 0])[None] + np.zeros((3, 1))
    epsilon = 1.0
    for count, make in ((2, queries.select_each), (1, queries.top_k)):
        mechanism = make(reach, epsilon, **({"count": 2} if count == 2 else {"k": 1}))
        start = one_row.astype("int32")
        end = (one_row + moved * sign).astype("int32")
        output = np.zeros((3, 1), int)
        if count == 2:
            start, end = (np.repeat(x[:, None], 2, axis=1) for x in (start, end))
            output = np.zeros((3, 2), int)
        loss = float(mechanism.log_prob(output, start) - mechanism.log_prob(output, end))
        assert 0.99 * epsilon < loss <= epsilon * (1 + 1e-5)


def test_quantiles_of_groups_are_those_of_a_loop():
    frame = table_of()
    scores = queries.quantile_scores((0.25, 0.75), grid=np.arange(9.0))
    grouped = queries.by(scores, column="cut", keys=CUTS)
    value = np.asarray(grouped(frame))
    for key, found in zip(grouped.keys, value, strict=True):
        part = queries.padded_records(frame["price"][frame["cut"] == key], capacity=300)
        np.testing.assert_array_equal(found, scores(part))
    sharp = queries.select_each(grouped.sensitivity(), 1e4, count=2)
    release = dpjax.privatize(grouped, sharp)(KEY, frame)
    places = np.searchsorted(scores.grid, release.value)
    picked = np.take_along_axis(value, places[..., None], axis=2)[..., 0]
    np.testing.assert_array_equal(picked, value.max(axis=2))
    assert release.value.shape == (4, 2)
    assert grouped.error(sharp) < 1
    soft = queries.select_each(grouped.sensitivity(), 4.0, count=2)
    draws = jax.vmap(lambda key: soft.unpaid_draw(key, value))(jax.random.split(KEY, 400))
    at = np.broadcast_to(value, (400, *value.shape))
    scored = np.take_along_axis(at, np.asarray(draws)[..., None], axis=3)[..., 0]
    worse = (value.max(axis=2) - scored).max(axis=(1, 2)) / scores.denominator
    assert np.mean(worse <= grouped.error(soft)) >= 0.95 - 3 * (0.95 * 0.05 / 400) ** 0.5


def test_selections_by_group_refuse_other_shapes():
    """So that rows which all move are never taken for disjoint groups."""
    by_group = queries.by(SMALL["buckets"], column=0, keys=[0]).sensitivity(
        queries.sum_of_group_maxima
    )
    with pytest.raises(ValueError, match=r"\(groups, 2, K\)"):
        queries.select_each(by_group, 1.0, count=2)(KEY, jnp.zeros((2, 5), int))
    with pytest.raises(ValueError, match=r"\(groups, K\)"):
        queries.top_k(by_group, 1.0, k=2)(KEY, jnp.zeros(5, int))
    with pytest.raises(ValueError, match=r"\(2, K\)"):
        queries.select_each(1.0, 1.0, count=2)(KEY, jnp.zeros((3, 2, 5), int))
    with pytest.raises(ValueError, match="linf"):
        dpjax.exponential(by_group, 1.0)
    # Scores that are floats are rounded in each group.
    mechanism = queries.select_each(by_group, 1.0, count=2)
    assert mechanism.effective_scale((3, 2, 4)) > 4 * by_group.value
    # The tables are charged in two groups, each on both of the neighbors.
    counts = jax.ShapeDtypeStruct((3, 2, 4), jnp.int32)
    assert mechanism._calibration(counts).coordinates == 4


# Private statistics by group.


@both_relations
def test_private_statistics_by_group_are_those_of_the_groups(relation):
    frame, sharp = table_of(600), {"epsilon": 1e4, "relation": relation}
    by = {"cut": CUTS[:3]}
    slots = queries.padded_records(frame, capacity=700)
    parts = [frame["price"][frame["cut"] == cut].to_numpy() for cut in by["cut"]]
    means = np.array([part.mean() for part in parts])
    variances = [part.var() for part in parts]
    got = queries.private_mean(KEY, slots, lower=0, upper=8, by=by, **sharp).value
    np.testing.assert_allclose(got, means, atol=0.01)
    got = queries.private_mean(KEY, slots, lower=0, upper=8, by=by, missing="lower", **sharp).value
    np.testing.assert_allclose(got, means, atol=0.01)
    found = queries.private_variance(KEY, slots, lower=0, upper=8, by=by, **sharp).value
    np.testing.assert_allclose(found["mean"], means, atol=0.01)
    np.testing.assert_allclose(found["variance"], variances, atol=0.05)
    vectors = np.stack([np.arange(600) % 3, frame["price"] / 8, frame["price"] / 16], axis=1)
    vectors = queries.padded_records(vectors, capacity=700)
    keys = {"radius": 2.0, "by": {0: [2, 0]}, **sharp}
    both = queries.private_covariance(KEY, vectors, **keys).value
    assert both["mean"].shape == (2, 2)
    assert both["covariance"].shape == (2, 2, 2)
    for j, key in enumerate((2, 0)):
        inside = np.asarray(vectors.records)[:600][np.arange(600) % 3 == key, 1:]
        np.testing.assert_allclose(both["covariance"][j], np.cov(inside.T, ddof=0), atol=0.01)
    directions = queries.private_pca(KEY, vectors, components=1, **keys).value["components"]
    np.testing.assert_allclose(np.abs(directions[:, 0, 0]), 2 / 5**0.5, atol=0.02)


def test_a_regression_by_group_is_that_of_the_groups():
    x, group = np.linspace(-1, 1, 900), np.arange(900) % 3
    table = {"x": x[:, None], "y": np.array([0.5, -0.25, 0])[group] * x + 0.1 * group, "g": group}
    release = queries.private_linear_regression(
        KEY, table, x_radius=1.0, y_radius=1.0, epsilon=1e4, by={"g": [0, 1]}
    )
    np.testing.assert_allclose(release.value["weights"].ravel(), [0.5, -0.25], atol=0.01)
    np.testing.assert_allclose(release.value["intercept"], [0, 0.1], atol=0.01)


@both_relations
def test_a_mean_by_group_counts_its_group_in_private(relation):
    """With tiny epsilon the mean of a group that is constant is noisy: no true n is used."""
    people = {"g": np.zeros(100, int), "x": np.full(100, 4.0)}
    slots = queries.padded_records(people, capacity=100)
    arguments = {"lower": 0, "upper": 8, "epsilon": 0.05, "relation": relation}
    found = [
        float(queries.private_mean(key, slots, by={"g": [0]}, **arguments).value[0])
        for key in jax.random.split(KEY, 8)
    ]
    # 4 is the middle: its sum is 0 plus noise, and the noisy count divides it.
    assert np.ptp(found) > 0.5
    scale = {ADD: 2, REPLACE: 4}[relation] * 4 / 0.05
    query = integers_by_group(_centered(), groups_of_keys("g", [0, 1]))
    assert query.sensitivity("l1", relation=relation).value * query.unit / 0.05 == pytest.approx(
        scale, rel=1e-3
    )


def _centered():
    from dpjax.queries._sums import centered_sums

    return centered_sums(0.0, 8.0, 100, 1)


def test_two_columns_of_groups_make_two_axes():
    frame = table_of(200).assign(color=np.arange(200) % 2)
    by = {"cut": CUTS[:3], "color": [0, 1]}
    got = queries.private_mean(KEY, frame, lower=0, upper=8, epsilon=1e5, by=by).value
    expected = frame.groupby(["cut", "color"])["price"].mean().unstack().loc[CUTS[:3]]
    np.testing.assert_allclose(got, expected, atol=0.01)


def test_a_ledger_pays_once_for_the_medians_of_all_groups(tmp_path):
    """A loop over groups under a ledger used to give the first group's median to all."""
    ledger = dpjax.Ledger(tmp_path / "medians.db", epsilon=2, relation=ADD)
    cut = np.repeat(["Fair", "Good", "Ideal"], [100, 300, 600])
    frame = {"cut": cut, "price": np.repeat([100.0, 500.0, 900.0], [100, 300, 600])}
    scores = queries.quantile_scores(0.5, grid=np.linspace(0, 1000, 101))
    medians = queries.by(scores, column="cut", keys=["Fair", "Good", "Ideal"])
    mechanism = queries.select_each(medians.sensitivity(relation=ADD), epsilon=1.0, count=1)
    private = dpjax.privatize(medians, mechanism, ledger=ledger)
    release = private(KEY, queries.padded_records(frame, capacity=1000))
    assert release.value.ravel().tolist() == [100, 500, 900]
    assert ledger.spent.epsilon == 1.0
    # One part after the other, without a name: every answer is its own, and is paid for.
    single = queries.select_each(scores.sensitivity(relation=ADD), epsilon=0.25, count=1)
    one_by_one = dpjax.privatize(scores, single, ledger=ledger)
    for key, truth in (("Fair", 100), ("Good", 500), ("Ideal", 900)):
        part = queries.padded_records(frame["price"][cut == key], capacity=1000)
        found = one_by_one(dpjax.random.secure_key(), part)
        assert found.value.tolist() == [truth]
    assert ledger.spent.epsilon == 1.75


@pytest.mark.parametrize("shape", [(3,), (3, 3, 2), (3, 1, 3)], ids=str)
def test_only_a_table_has_columns(shape):
    """A column of another array would have another axis than that of the records.

    Then one record would be in all slots. A negative index is none either: it would pick a column,
    and leave it among the records.
    """
    records, keys = np.ones(shape), [0, 1]
    with pytest.raises(ValueError, match="database must have a column 0"):
        queries.split_by(
            records,
            column=lambda x: (x.ravel()[0] > 1).astype(int),
            keys=keys,
            of=0,
            capacity=4,
        )
    codes = np.array([0, 1, 1])
    for database in ((np.ones(3), codes), np.stack([codes, codes], axis=1)):
        with pytest.raises(ValueError, match="database must have a column -1"):
            queries.split_by(database, column=-1, keys=keys, capacity=4)
