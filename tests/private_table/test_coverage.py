"""Intervals of a table hold the truth as often as they say."""

import numpy as np
import pytest

import dpjax

N, RUNS = 4000, 100
# At a coverage of .95 fewer runs than this hold the truth with probability .012, at .85 with .83.
LEAST = 89
GENERATOR = np.random.default_rng(1)
X = GENERATOR.uniform(0, 10, N)
Y = 2 * X + GENERATOR.normal(0, 4, N)
BOUNDS = {"x": (0, 10), "y": (-20, 40)}
STATISTICS = {
    "mean": (lambda t, **a: t.mean("x", bounds=BOUNDS, **a), X.mean()),
    "correlation": (
        lambda t, **a: t.correlation("x", "y", bounds=BOUNDS, **a),
        np.corrcoef(X, Y)[0, 1],
    ),
    "regression": (
        lambda t, **a: t.regression("y", ["x"], bounds=BOUNDS, **a),
        dict(zip(("weights", "intercept"), np.polyfit(X, Y, 1), strict=True)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_intervals_hold_the_truth(name):
    ask, truth = STATISTICS[name]
    table = dpjax.PrivateTable({"x": X, "y": Y}, most_rows=5000)
    held = []
    for run in range(RUNS):
        low, high = ask(table, epsilon=1.0, key=dpjax.random.seeded_key(run)).interval()
        parts = [(low, high, truth)]
        if isinstance(truth, dict):
            parts = [(low[part], high[part], truth[part]) for part in truth]
        held.append([bool(np.all((a <= x) & (x <= b))) for a, b, x in parts])
    assert np.min(np.sum(held, axis=0)) >= LEAST, np.sum(held, axis=0)
