"""Histograms against NumPy, and their bound."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

EDGES = [-1.0, 0.0, 0.5, 2.0]
NORMS = {"l1": 1, "l2": 2, "linf": np.inf}


def counts(x, edges=EDGES):
    return np.asarray(targets.histogram(edges=edges)(jnp.asarray(x)))


def test_counts_are_those_of_numpy():
    x = np.random.default_rng(0).uniform(-1, 2, size=500).astype("float32")
    np.testing.assert_array_equal(counts(x), np.histogram(x, EDGES)[0])


def test_edges_belong_to_the_bin_above():
    np.testing.assert_array_equal(counts(np.float32(EDGES)), [1, 1, 2])


def test_every_record_counts_once():
    np.testing.assert_array_equal(counts(np.float32([-9, -np.inf, np.nan])), [3, 0, 0])
    np.testing.assert_array_equal(counts(np.float32([9, np.inf, 3e38])), [0, 0, 3])
    np.testing.assert_array_equal(counts(np.arange(-3, 4)), [3, 1, 3])
    np.testing.assert_array_equal(counts(np.float32([-9, 9, np.nan]), [0, 1]), [3])


def test_counts_are_exact_integers(key):
    got = counts(np.zeros(7, "float32"))
    assert got.dtype == "int32"
    release = dpjax.privatize(
        targets.histogram(edges=EDGES), dpjax.laplace(targets.histogram_bound(), 1.0)
    )(key, jnp.zeros(7))
    assert release.value.dtype == "int32"


@pytest.mark.parametrize("norm", NORMS)
def test_bound_is_attained(norm):
    moved = counts(np.zeros(4, "float32")) - counts(np.float32([0, 0, 0, 1]))
    bound = targets.histogram_bound(norm=norm)
    assert np.linalg.norm(moved, NORMS[norm]) == pytest.approx(bound, rel=1e-15)
    assert np.linalg.norm(moved, NORMS[norm]) <= bound


@pytest.mark.parametrize(
    ("edges", "error"),
    [
        ([0.0], ValueError),
        ([0.0, 0.0], ValueError),
        ([1.0, 0.0], ValueError),
        ([0.0, np.inf], ValueError),
        ([0.0, np.nan, 1.0], ValueError),
        ([[0.0, 1.0]], ValueError),
        (["a", "b"], (TypeError, ValueError)),
        (None, (TypeError, ValueError)),
    ],
)
def test_bad_edges_are_refused(edges, error):
    with pytest.raises(error, match="edges must be at least 2"):
        targets.histogram(edges=edges)


def test_records_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="numbers"):
        counts(np.ones((3, 2), "float32"))
    with pytest.raises(ValueError, match="norm must be"):
        targets.histogram_bound(norm="l3")
