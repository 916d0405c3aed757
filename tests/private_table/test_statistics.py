"""Statistics of a table say what NumPy says of the rows that count, in units of the columns."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpjax
from dpjax.tables._counts import _OCTAVES, BUCKETS, EDGES, _needed, range_of

N, SLOTS = 4000, 5000
GENERATOR = np.random.default_rng(0)
X = GENERATOR.uniform(20, 80, N)
Z = GENERATOR.uniform(-2, 2, N)
FRAME = {
    "x": X,
    "z": Z,
    "y": 3 * X - 10 * Z + GENERATOR.normal(0, 5, N) + 7,
    "g": np.where(np.arange(N) % 4 == 0, "a", "b"),
    "id": np.arange(N) % 5 * 2**40,
}
BOUNDS = {"x": (20, 80), "z": (-2, 2), "y": (0, 300)}
# So much that noise is far below the numbers.
EPSILON, DELTA = 200.0, 1e-6
KEY = dpjax.random.seeded_key(0)
ONE = dpjax.assume_sensitivity(1.0, norm="l1")


@pytest.fixture(scope="module")
def table():
    return dpjax.PrivateTable(FRAME, most_rows=SLOTS)


def inside(release, truth, part=None):
    """Whether the interval holds the truth, and is short."""
    low, high = release.interval()
    low, high = (low, high) if part is None else (low[part], high[part])
    assert np.all((low <= truth) & (truth <= high))
    assert np.all(high - low < 0.2 * np.max(np.abs(truth)))


def test_a_line_is_in_units_of_the_columns(table):
    release = table.regression("y", ["x", "z"], bounds=BOUNDS, epsilon=EPSILON, key=KEY)
    exact = np.linalg.lstsq(np.stack([X, Z, np.ones(N)], axis=1), FRAME["y"])[0]
    inside(release, exact[:2], "weights")
    assert abs(release.value["intercept"] - exact[2]) < 0.5
    assert list(release.to_frame().index) == [("intercept", ""), ("weights", "x"), ("weights", "z")]


def test_a_correlation_is_between_its_ends(table):
    of = {"bounds": BOUNDS, "epsilon": EPSILON, "key": KEY}
    release = table.correlation("y", "x", by={"g": ["a", "b"]}, **of)
    exact = [np.corrcoef(FRAME["y"][FRAME["g"] == g], X[FRAME["g"] == g])[0, 1] for g in ("a", "b")]
    inside(release, np.array(exact))


def test_a_correlation_with_a_constant_is_unknown():
    flat = dpjax.PrivateTable({"x": np.full(N, 0.5), "y": X}, most_rows=SLOTS)
    ends = {"x": (0, 1), "y": (20, 80)}
    for seed in range(4):
        of = {"bounds": ends, "epsilon": 1.0, "key": dpjax.random.seeded_key(seed)}
        assert flat.correlation("x", "y", **of).interval() == (-1, 1)


def test_a_narrow_column_has_a_slope_and_a_correlation():
    """Its variance is far below the noise on a wide column's, but far above its own."""
    narrow, wide = 0.03 * X, 60 * X / 80
    frame = {"narrow": narrow, "wide": wide, "y": 40 * narrow + GENERATOR.normal(0, 5, N)}
    table = dpjax.PrivateTable(frame, most_rows=SLOTS)
    bounds = {"narrow": (0, 9), "wide": (0, 60), "y": (0, 100)}
    for name in ("narrow", "wide"):
        slope = np.polyfit(frame[name], frame["y"], 1)[0]
        line = table.regression("y", [name], bounds=bounds, epsilon=3.0, key=KEY)
        low, high = line.interval()
        assert low["weights"][0] < slope < high["weights"][0] < low["weights"][0] + 0.6 * slope
        exact = np.corrcoef(frame[name], frame["y"])[0, 1]
        low, high = table.correlation(name, "y", bounds=bounds, epsilon=3.0, key=KEY).interval()
        assert low < exact < high < low + 0.4


def test_covariances_and_components_are_in_units_of_the_columns(table):
    of = {"bounds": BOUNDS, "epsilon": EPSILON, "key": KEY}
    release = table.covariance(["x", "z"], **of)
    exact = np.cov(np.stack([X, Z]), bias=True)
    inside(release, exact, "covariance")
    inside(release, np.array([X.mean(), Z.mean()]), "mean")
    first = table.pca(["x", "z"], components=1, **of)
    assert abs(first.value["variances"][0] - np.linalg.eigvalsh(exact)[-1]) < 1
    assert np.all(np.abs(first.value["components"][0]) - [1, 0] < 0.02)


def test_quantiles_stand_in_order_and_have_intervals(table):
    release = table.quantiles("x", [0.25, 0.5], bounds=(0, 100), epsilon=2.0, key=KEY)
    low, high = release.interval()
    exact = np.quantile(X, [0.25, 0.5])
    assert np.all((low <= exact) & (exact <= high))
    assert list(release.to_frame().index) == [0.25, 0.5]


def test_different_entries_are_counted_once(table):
    of = {"epsilon": EPSILON, "key": KEY}
    assert int(table.count_distinct("id", **of).value) == 5
    assert table.count_distinct("g", by={"g": ["b", "c"]}, **of).value.tolist() == [1, 0]
    some = {
        "t": np.array(["u", "v", None, "u", ""], object),
        "x": np.array([0.0, -0.0, np.nan, 1, 1]),
    }
    odd = dpjax.PrivateTable(some, most_rows=8)
    assert int(odd.count_distinct("t", **of).value) == 3
    assert int(odd.count_distinct("x", **of).value) == 2


def test_keys_are_those_that_many_rows_have(table, tmp_path):
    rare = {**FRAME, "g": np.append(FRAME["g"][:-1], "rare")}
    with dpjax.Ledger(tmp_path / "keys.db", epsilon=10, delta=1e-6) as ledger:
        asked = dpjax.PrivateTable(rare, most_rows=SLOTS, ledger=ledger)
        keys = asked.keys("g", epsilon=1.0)
        assert keys.value == ("a", "b")
        assert asked.top("g", 1, epsilon=1.0).value == ("b",)
        assert asked.keys("id", epsilon=1.0).value == tuple(k * 2**40 for k in range(5))
        spent = ledger.spent.epsilon
        assert asked.keys("g", epsilon=1.0).value == ("a", "b")
        assert ledger.spent.epsilon == spent  # It was paid for.
        assert asked.count(by={"g": keys}, epsilon=1.0).value.shape == (2,)
    some = table.keys("g", where=lambda row: row["g"] == "a", epsilon=1.0, delta=1e-6, key=KEY)
    assert some.value == ("a",)
    with pytest.raises(ValueError, match="delta must be above 0"):
        table.top("g", 1, epsilon=1.0)
    assert table.top("g", 1, keys=["a", "b"], epsilon=1.0, key=KEY).value == ("b",)


def test_keys_and_ranges_by_group():
    at = np.arange(N)
    frame = {
        "g": FRAME["g"],
        "text": np.array(["u", "v w", "", None, "x"], object)[at % 4 + (at == 7)],
        "whole": np.where(at % 4 == 0, -5, at % 3 + 10),
        "h": at % 2,
    }
    table = dpjax.PrivateTable(frame, most_rows=SLOTS)
    by, how = {"g": ["b", "a", "z"]}, {"epsilon": 9.0, "delta": 1e-6, "key": KEY}
    assert table.keys("text", by=by, **how).value == {"b": ("", "v w"), "a": ("u",), "z": ()}
    whole = table.keys("whole", by=by, **how)
    assert whole.value == {"b": (10, 11, 12), "a": (-5,), "z": ()}
    assert whole.to_frame().index.tolist() == [("b", 1), ("b", 2), ("b", 3), ("a", 1)]
    both = table.keys("whole", by={"g": ["a"], "h": [0, 1]}, **how)
    assert both.value == {("a", 0): (-5,), ("a", 1): ()}
    assert both.to_frame().index.names == ["g", "h", "rank"]
    of_some = table.keys("text", by=by, where=lambda row: row["whole"] > 10, **how)
    assert of_some.value == {"b": ("", "v w"), "a": (), "z": ()}
    rare = np.where((at % 4 > 0) & (at % 100 < 50), 11, frame["whole"])
    asked = dpjax.PrivateTable({**frame, "whole": rare}, most_rows=SLOTS)
    most = {"b": (11,), "a": (-5,), "z": ()}
    assert asked.top("whole", 1, by=by, **how).value == most
    public = asked.top("whole", 2, keys=[-5, 11], by={"g": ["a", "b"]}, **how)
    assert public.value == {"a": (-5, 11), "b": (11, -5)}
    assert "11" in public._repr_html_()
    ranges = asked.bounds("whole", by=by, epsilon=9.0, key=KEY)
    np.testing.assert_array_equal(ranges.value, [[8, 16], [-8, -4], [np.nan] * 2])
    assert len(ranges.to_frame()) == 6


def test_a_range_is_between_powers_of_two(table):
    assert table.bounds("x", epsilon=1.0, key=KEY).value.tolist() == [16, 128]
    assert table.bounds("z", epsilon=1.0, key=KEY).value.tolist() == [-2, 2]
    empty = dpjax.PrivateTable({"x": np.ones(2)}, most_rows=SLOTS)
    assert np.isnan(empty.bounds("x", epsilon=1.0, key=KEY).value).all()
    with pytest.raises(ValueError, match="found no range"):
        empty.mean("x", bounds=None, epsilon=1.0, key=KEY)


def test_a_bucket_of_larger_numbers_needs_a_larger_count():
    """One threshold for all buckets made one release of a thousand useless: an empty bucket of
    numbers to 10^18 was in the range.
    """
    middle, mechanism = BUCKETS // 2, dpjax.discrete_laplace(ONE, 1.0)
    rows = (
        # (sign, exponent, count, whether the bucket is in the range), where [32, 64) is the fullest
        (1, 6, 5, False),
        (1, 6, 6, True),
        (1, 15, 23, False),
        (1, 15, 24, True),
        (-1, 5, 3, False),
        (-1, 5, 4, True),
        (-1, 6, 5, False),
        (1, 2, 5, False),
        (1, 2, 6, True),
        (-1, -15, 14, True),
    )
    for sign, exponent, count, held in rows:
        counts = np.zeros(BUCKETS)
        counts[middle + 5 + 21] = 1000
        place = middle + sign * (exponent + 21)
        counts[place] = count
        low, high = range_of(counts, mechanism)
        assert (low <= EDGES[place] and EDGES[place + 1] <= high) == held, (exponent, count)
    noise = np.random.default_rng(0).geometric(1 - np.exp(-1), (2, 20_000, BUCKETS))
    chosen = noise[0] - noise[1] >= _needed(middle + 26, mechanism, 14.0)
    for octaves, bound in ((1, 0.12 / 8), (2, 0.12 / 64)):
        wider = np.mean(np.any(chosen[:, 5 + octaves <= _OCTAVES], axis=1))
        # A share of 20,000 is further off once in 10^6 seeds.
        assert bound / 4 < wider < bound + 5 * np.sqrt(bound / 20_000)


def test_a_range_that_is_found_is_paid_for(table, tmp_path):
    median = table.quantiles("x", 0.5, bounds=None, epsilon=4.0, key=KEY)
    assert median.guarantee.epsilon == 4
    assert f", found in {median.labels.found}, (epsilon=4," in repr(median)
    release = table.mean("x", bounds=None, epsilon=4.0, key=KEY)
    assert release.guarantee.epsilon == 4
    assert repr(table.bounds("x", epsilon=4.0, key=KEY)).startswith("Release([16 128], (epsilon=4,")
    assert release.labels.found == "[16, 128]"
    assert ", found in [16, 128], (epsilon=4," in repr(release)
    inside(release, X.mean())
    with dpjax.Ledger(tmp_path / "range.db", epsilon=10) as ledger:
        asked = dpjax.PrivateTable(FRAME, most_rows=SLOTS, ledger=ledger)
        assert asked.mean("x", bounds=None, epsilon=4.0).guarantee.epsilon == 4
        assert ledger.spent.epsilon == 4


def test_clusters_are_in_units_of_the_columns():
    two = {"x": np.where(np.arange(N) % 2, 10.0, 90.0), "y": np.where(np.arange(N) % 2, 1.0, -1.0)}
    table = dpjax.PrivateTable(two, most_rows=SLOTS)
    of = {"bounds": {"x": (0, 100), "y": (-2, 2)}, "epsilon": 2.0, "key": KEY}
    with pytest.raises(ValueError, match="delta must be above 0"):
        table.k_means(["x", "y"], clusters=2, **of)
    release = table.k_means(["x", "y"], clusters=2, delta=1e-6, **of)
    centers = release.value["centers"][np.argsort(release.value["centers"][:, 0])]
    np.testing.assert_allclose(centers, [[10, 1], [90, -1]], atol=1)
    low, high = release.interval()
    assert np.all(low["centers"] <= high["centers"])


def test_clusters_by_group_cost_what_one_group_costs(tmp_path):
    odd = np.arange(N) % 2
    two = {
        "x": np.where(odd, 10.0, 90.0),
        "y": np.where(odd, 1.0, -1.0),
        "g": np.arange(N) % 4 // 2,
    }
    of = {"clusters": 2, "bounds": {"x": (0, 100), "y": (-2, 2)}, "by": {"g": [1, 0]}}
    with dpjax.Ledger(tmp_path / "clusters.db", epsilon=4, delta=1e-6) as ledger:
        table = dpjax.PrivateTable(two, most_rows=SLOTS, ledger=ledger)
        release = table.k_means(["x", "y"], epsilon=4.0, **of)
        spent = ledger.spent
        assert spent.epsilon == pytest.approx(4, abs=1e-6)
        assert spent.delta == pytest.approx(1e-6, rel=1e-6)
        again = table.k_means(["x", "y"], epsilon=4.0, **of)  # It was paid for.
        assert ledger.spent == spent
    np.testing.assert_array_equal(again.value["centers"], release.value["centers"])
    for centers in release.value["centers"]:
        ordered = centers[np.argsort(centers[:, 0])]
        np.testing.assert_allclose(ordered, [[10, 1], [90, -1]], atol=2)
    np.testing.assert_allclose(release.value["counts"], N / 4, atol=60)
    assert "g" in release.to_frame().index.names
    low, high = release.interval(simultaneous=True)
    assert np.all((low["counts"] <= N / 4) & (high["counts"] >= N / 4))


def test_tables_of_all_libraries_are_one():
    """Also with missing entries, in the dtypes of each library."""
    entries = {"g": ["a", None, "b", "a"], "x": [1.0, 2.0, None, 4.0], "n": [1, None, 3, 3]}
    frames = {
        "polars": pl.DataFrame(entries),
        "arrow": pa.table(entries),
        "pandas": pd.DataFrame(entries).astype({"g": "category", "n": "Int64"}),
        "dict": {
            "g": np.array(entries["g"], object),
            "x": np.array(entries["x"], float),
            "n": np.array(entries["n"], float),
        },
    }
    of = {"epsilon": EPSILON, "key": KEY}
    for library, frame in frames.items():
        table = dpjax.PrivateTable(frame, most_rows=8)
        assert table.count(by={"g": ["a", "b"]}, **of).value.tolist() == [2, 1], library
        large = table.count(where=lambda row: (row["x"] > 1) & (row["g"] == "a"), **of)
        assert int(large.value) == 1, library
        assert table.count(by={"n": [1, 3]}, **of).value.tolist() == [1, 2], library
        assert abs(table.mean("x", bounds=(0, 10), **of).value - 7 / 3) < 0.1, library


COUNTED = {
    "count": lambda t, **a: t.count(by={"g": ["a", "b"]}, **a),
    "crosstab": lambda t, **a: t.crosstab(["g"], keys={"g": ["a", "b"]}, **a),
    "histogram": lambda t, **a: t.histogram("x", [0, 50, 100], **a),
    "count_distinct": lambda t, **a: t.count_distinct("id", **a),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_get_discrete_laplace_noise(table, name):
    """At epsilon 4 it is 0 with probability .964, so that the 95% interval is one integer."""
    release = COUNTED[name](table, epsilon=4.0, key=KEY)
    assert release.accuracy.facts["noise"] == "discrete laplace"
    low, high = release.interval()
    np.testing.assert_array_equal(low, high)
    low, high = release.interval(0.97)
    np.testing.assert_array_equal(high - low, 2 * np.ones_like(low))
    assert release.guarantee.epsilon == 4


def test_components_that_nearly_tie_have_no_direction():
    """Two columns of one variance, and two of very different ones as the control."""
    spread = {"x": GENERATOR.uniform(-1, 1, N), "z": GENERATOR.uniform(-1, 1, N)}
    of = {"components": 1, "bounds": {"x": (-1, 1), "z": (-1, 1)}, "epsilon": 0.2, "key": KEY}
    tied = dpjax.PrivateTable(spread, most_rows=SLOTS).pca(["x", "z"], **of)
    low, high = tied.interval()
    np.testing.assert_array_equal(low["components"], -np.ones((1, 2)))
    np.testing.assert_array_equal(high["components"], np.ones((1, 2)))
    clear = dpjax.PrivateTable({**spread, "z": spread["z"] / 5}, most_rows=SLOTS)
    low, high = clear.pca(["x", "z"], **of).interval()
    assert np.all(high["components"] - low["components"] < 1)
