"""Intervals of a table hold the truth as often as they say."""

import numpy as np
import pytest
import scipy

import dpjax

N, RUNS = 4000, 400
# At a coverage of .95, one number has fewer hits than this with probability 1e-6; at .88 it has
# with probability .7.
LEAST = int(scipy.stats.binom.isf(1 - 1e-6, RUNS, 0.95))
# The same for more hits than this.
MOST = int(scipy.stats.binom.isf(1e-6, RUNS, 0.95))
GENERATOR = np.random.default_rng(1)
X = GENERATOR.uniform(0, 10, N)
Y = 2 * X + GENERATOR.normal(0, 4, N)
G = np.arange(N) % 3
BOUNDS = {"x": (0, 10), "y": (-20, 40)}
BY = {"g": [0, 1]}
CLIPPED = np.clip(Y, -20, 40)
STATISTICS = {
    "sum": (lambda t, **a: t.sum("x", bounds=BOUNDS, **a), X.sum()),
    "mean": (lambda t, **a: t.mean("x", bounds=BOUNDS, **a), X.mean()),
    "mean by": (
        lambda t, **a: t.mean("y", bounds=BOUNDS, by=BY, **a),
        [CLIPPED[g == G].mean() for g in BY["g"]],
    ),
    "count by": (lambda t, **a: t.count(by=BY, **a), [np.sum(g == G) for g in BY["g"]]),
    "histogram": (
        lambda t, **a: t.histogram("x", [0, 5, 10], **a),
        [np.sum(X < 5), np.sum(X >= 5)],
    ),
    "crosstab": (lambda t, **a: t.crosstab(["g"], keys=BY, **a), [np.sum(G == 0), np.sum(G == 1)]),
    "variance": (
        lambda t, **a: t.variance("x", bounds=BOUNDS, **a),
        {"mean": X.mean(), "variance": X.var()},
    ),
    "covariance": (
        lambda t, **a: t.covariance(["x", "y"], bounds=BOUNDS, **a),
        {"mean": np.array([X.mean(), CLIPPED.mean()]), "covariance": np.cov(X, CLIPPED, bias=True)},
    ),
    "quantiles": (
        lambda t, **a: t.quantiles("x", [0.25, 0.5], bounds=BOUNDS, **a),
        np.quantile(X, [0.25, 0.5]),
    ),
    "median": (lambda t, **a: t.quantiles("x", [0.5], bounds=BOUNDS, **a), [np.median(X)]),
    "correlation": (
        lambda t, **a: t.correlation("x", "y", bounds=BOUNDS, **a),
        np.corrcoef(X, CLIPPED)[0, 1],
    ),
    "regression": (
        lambda t, **a: t.regression("y", ["x"], bounds=BOUNDS, **a),
        dict(zip(("weights", "intercept"), np.polyfit(X, CLIPPED, 1), strict=True)),
    ),
}
# Three rows of each person. Many sums are above the bound, and many people have each entry.
ID, ENTRY = np.arange(N) // 3, np.arange(N) % 7
SUMS = np.clip([X[person == ID][:2].sum() for person in range(ID[-1] + 1)], 0, 12)
OF_PEOPLE = {
    "sum of sums": (
        lambda t, **a: t.sum("x", bounds=(0, 12), per_person="sum", **a),
        SUMS.sum(),
    ),
    "mean of sums": (
        lambda t, **a: t.mean("x", bounds=(0, 12), per_person="sum", **a),
        SUMS.mean(),
    ),
    "variance of sums": (
        lambda t, **a: t.variance("x", bounds=(0, 12), per_person="sum", **a),
        {"mean": SUMS.mean(), "variance": SUMS.var()},
    ),
    "median of sums": (
        lambda t, **a: t.quantiles("x", [0.5], bounds=(0, 12), per_person="sum", **a),
        [np.median(SUMS)],
    ),
    "count_distinct": (lambda t, **a: t.count_distinct("entry", **a), 7),
    "count_distinct by": (lambda t, **a: t.count_distinct("entry", by=BY, **a), [7, 7]),
}
# Their intervals do not cover more, either. Those of integers do, and those of quantiles, which end
# at thresholds; docs/how-to/intervals.md says how much.
SHARP = ("sum", "mean", "mean by", "variance", "covariance", "correlation")


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_intervals_hold_the_truth(name):
    """Over all numbers a false alarm is rarer than 10^-4."""
    table = dpjax.PrivateTable({"x": X, "y": Y, "g": G}, most_rows=5000)
    held = hits(*STATISTICS[name], table)
    assert np.min(held) >= LEAST, held
    if name in SHARP:
        assert np.max(held) <= MOST, held


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PEOPLE)
def test_intervals_of_people_hold_the_truth(name):
    """Over all numbers a false alarm is rarer than 10^-5."""
    frame = {"x": X, "id": ID, "entry": ENTRY, "g": G}
    table = dpjax.PrivateTable(frame, most_rows=5000, person="id", rows=2)
    held = hits(*OF_PEOPLE[name], table)
    assert np.min(held) >= LEAST, held
    if name in ("sum of sums", "mean of sums", "variance of sums"):
        assert np.max(held) <= MOST, held


def hits(ask, truth, table, runs=RUNS):
    """How many releases hold the truth, for each number."""
    held = []
    for run in range(runs):
        low, high = ask(table, epsilon=1.0, key=dpjax.random.seeded_key(run)).interval()
        parts = [(low, high, truth)]
        if isinstance(truth, dict):
            parts = [(low[part], high[part], truth[part]) for part in truth]
        inside = [
            np.ravel((np.asarray(a) <= x) & (np.asarray(x) <= np.asarray(b))) for a, b, x in parts
        ]
        held.append(np.concatenate(inside))
    return np.sum(held, axis=0)
