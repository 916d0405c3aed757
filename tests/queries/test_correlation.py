"""The interval of a correlation covers, whatever the correlation and the noise are."""

import jax
import numpy as np
import pytest
import scipy

import dpjax
from dpjax.queries._private_release import draws_of

N, RUNS = 4000, 400
# At a coverage of .95, fewer releases hold the truth with probability 1e-6.
LEAST = int(scipy.stats.binom.isf(1 - 1e-6, RUNS, 0.95))
# The deviation of both columns in units of their bounds, the correlation, and epsilon.
CASES = {"near": (0.1, 0.99, 1.0), "middle": (0.15, -0.6, 0.5), "none": (0.3, 0.0, 0.2)}


ENDS = {"x": (-1, 1), "y": (-1, 1)}


def columns_of(name):
    spread, wanted, _ = CASES[name]
    x, y = np.random.default_rng(0).normal(size=(2, N))
    y = wanted * x + np.sqrt(1 - wanted**2) * y
    return np.clip(spread * np.stack([x, y]), -1, 1)


def test_an_end_is_a_correlation_under_which_the_release_is_barely_likely():
    columns = columns_of("middle")
    table = dpjax.PrivateTable(dict(zip("xy", columns, strict=True)), most_rows=N)
    key = dpjax.random.seeded_key(0)
    release = table.correlation("x", "y", bounds=ENDS, epsilon=0.5, key=key)
    matrices = np.asarray(draws_of(release.accuracy.measured, release.accuracy.facts)[1], float)
    roots = np.sqrt(matrices[:, 0, 0] * matrices[:, 1, 1])
    released = matrices[0, 0, 1] / roots[0]
    assert abs(released - release.value) < 1e-5
    for end, side in zip(release.interval(), (1, -1), strict=True):
        again = (end * roots[0] + matrices[1:, 0, 1] - matrices[0, 0, 1]) / roots[1:]
        assert abs(np.mean(side * (again - released) >= 0) - 0.025) < 0.001


def test_intervals_of_groups_hold_at_once():
    """In as many simulated releases as they say, they contain the correlations of all groups."""
    columns = columns_of("middle")
    table = dpjax.PrivateTable(
        {**dict(zip("xy", columns, strict=True)), "g": np.arange(N) % 3}, most_rows=N
    )
    key = dpjax.random.seeded_key(0)
    of = {"by": {"g": [0, 1, 2]}, "bounds": ENDS, "epsilon": 2.0, "key": key}
    release = table.correlation("x", "y", **of)
    matrices = np.asarray(draws_of(release.accuracy.measured, release.accuracy.facts)[1], float)
    roots = np.sqrt(matrices[..., 0, 0] * matrices[..., 1, 1])
    moved, value = matrices[1:, :, 0, 1] - matrices[0, :, 0, 1], np.asarray(release.value)

    def share_inside(confidence, *, simultaneous):
        low, high = release.interval(confidence, simultaneous=simultaneous)
        below, above = ((end * roots[0] + moved) / roots[1:] for end in (low, high))
        return np.mean(np.all((below <= value) & (value <= above), axis=1))

    for confidence in (0.02, 0.95):
        assert abs(share_inside(confidence, simultaneous=True) - confidence) < 0.001
    assert share_inside(0.95, simultaneous=False) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_cover_however_near_to_one(name):
    """And the interval is not [-1, 1]."""
    columns, epsilon = columns_of(name), CASES[name][2]
    truth = np.corrcoef(columns)[0, 1]
    table = dpjax.PrivateTable(dict(zip("xy", columns, strict=True)), most_rows=N)
    held, width = 0, 0.0
    for key in jax.random.split(dpjax.random.seeded_key(0), RUNS):
        low, high = table.correlation("x", "y", bounds=ENDS, epsilon=epsilon, key=key).interval()
        held, width = held + (low <= truth <= high), width + (high - low) / RUNS
    assert held >= LEAST
    assert width < 1
