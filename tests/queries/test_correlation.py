"""The interval of a correlation covers, whatever the correlation and the noise are."""

import jax
import numpy as np
import pytest
import scipy

import dpjax

N, RUNS = 4000, 400
# At a coverage of .95, fewer releases hold the truth with probability 1e-6; with intervals of the
# quantiles of simulated correlations, as many or more do with probability .02 at most.
LEAST = int(scipy.stats.binom.isf(1 - 1e-6, RUNS, 0.95))
# The deviation of both columns in units of their bounds, the correlation, and epsilon.
CASES = {"near": (0.1, 0.99, 1.0), "middle": (0.15, -0.6, 0.5), "none": (0.3, 0.0, 0.2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_cover_however_near_to_one(name):
    """And the interval is not [-1, 1]."""
    spread, wanted, epsilon = CASES[name]
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, N))
    y = wanted * x + np.sqrt(1 - wanted**2) * y
    columns = np.clip(spread * np.stack([x, y], axis=1), -1, 1)
    truth = np.corrcoef(columns.T)[0, 1]
    table = dpjax.PrivateTable({"x": columns[:, 0], "y": columns[:, 1]}, most_rows=N)
    ends = {"x": (-1, 1), "y": (-1, 1)}
    held, width = 0, 0.0
    for key in jax.random.split(dpjax.random.seeded_key(0), RUNS):
        low, high = table.correlation("x", "y", bounds=ends, epsilon=epsilon, key=key).interval()
        held, width = held + (low <= truth <= high), width + (high - low) / RUNS
    assert held >= LEAST
    assert width < 1
