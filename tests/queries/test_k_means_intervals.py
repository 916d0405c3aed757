"""Intervals of clusters: of what the last iteration counted and added up."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import dpjax
from dpjax import queries
from dpjax.mechanisms._noise_intervals import noise_bounds
from dpjax.queries._k_means import _of_clusters

ARRAY = {"scale": 5.0, "step": 1.0, "whole": True}
FACTS = {"noise": "gaussian", "arrays": [ARRAY], "coordinates": 9, "unit": 1.0, "least": 5.0}
FACTS |= {"middle": [1.0, -1.0], "size": 2.0, "edge": 1e-5}


@pytest.mark.parametrize("simultaneous", [False, True])
def test_an_interval_has_all_quotients_within_the_noise(simultaneous):
    """The third center was shortened and the fourth was kept: nothing is known but the ball."""
    unit = np.array([[0.5, -0.2], [0.0, 0.1], [0.6, 0.8], [0.2, 0.3]])
    value = {"centers": 2 * unit + [1.0, -1.0], "counts": np.array([100.0, 40.0, 80.0, 4.9])}
    low, high = _of_clusters(value, None, FACTS, 0.9, simultaneous)
    (bound,) = noise_bounds(FACTS, 0.9, 9 if simultaneous else 2)
    for row, sign, side in itertools.product((0, 1), (-1, 1), (-1, 1)):
        count = value["counts"][row]
        center = (unit[row] * count + sign * bound) / (count + side * bound)
        assert np.all(low["centers"][row] <= 2 * center + [1.0, -1.0])
        assert np.all(high["centers"][row] >= 2 * center + [1.0, -1.0])
    width = (high["centers"] - low["centers"])[:2]
    assert np.all(width < 8 * bound / (value["counts"][:2, None] - bound))
    np.testing.assert_allclose(low["centers"][2:], [[-1.0, -3.0]] * 2, atol=1e-5)
    np.testing.assert_allclose(high["centers"][2:], [[3.0, 1.0]] * 2, atol=1e-5)
    (alone,) = noise_bounds(FACTS, 0.9, 9 if simultaneous else 1)
    assert np.all(high["counts"] >= value["counts"] + alone)
    assert low["counts"][3] == 0


@pytest.mark.slow
def test_intervals_cover_the_means_of_clusters():
    """Three clusters so far apart that the last iteration assigns every record to its own.

    More misses than allowed happen once in 10^7 keys. Half of an interval fails: power.
    """
    centers = np.array([[0.5, 0.5], [-0.5, 0.0], [0.3, -0.6]])
    noise = 0.05 * np.random.default_rng(0).normal(size=(3, 500, 2))
    points = (centers[:, None] + noise).astype("float32")

    def private(key):
        terms = {"clusters": 3, "radius": 1.0, "epsilon": 5.0, "delta": 1e-6}
        return queries.private_k_means(key, jnp.asarray(points.reshape(-1, 2)), **terms)

    keys = jax.random.split(dpjax.random.seeded_key(2), 400)
    release = jax.jit(jax.vmap(private))(keys)
    truth = points.mean(axis=1, dtype=float)
    found = np.asarray(release.value["centers"])
    who = np.linalg.norm(found[:, :, None] - truth, axis=-1).argmin(axis=-1)
    assert np.all(np.sort(who, axis=1) == np.arange(3))
    most = scipy.stats.binom.isf(1e-7, len(keys), 0.1)

    def misses(low, high, together):
        outside = (truth[who] < low["centers"]) | (truth[who] > high["centers"])
        counts = (low["counts"] > 500) | (high["counts"] < 500)
        every = np.concatenate([outside.reshape(len(keys), -1), counts], axis=1)
        return np.sum(every.any(axis=1)) if together else np.sum(every, axis=0).max()

    for together in (False, True):
        low, high = release.interval(0.9, simultaneous=together)
        assert misses(low, high, together) <= most
        halves = [jax.tree.map(lambda a, b, t=t: a + t * (b - a), low, high) for t in (0.25, 0.75)]
        assert misses(*halves, together) > most


@pytest.mark.slow
def test_a_release_of_clusters_is_kept_with_its_intervals(key):
    points = np.array([[0.5, 0.0], [-0.5, 0.0]]).repeat(300, axis=0)
    terms = {"clusters": 2, "radius": 1.0, "epsilon": 5.0, "delta": 1e-6}
    release = queries.private_k_means(key, points, **terms)
    again = dpjax.Release.from_dict(json.loads(json.dumps(release.to_dict())))
    for one, other in zip(release.interval(), again.interval(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
