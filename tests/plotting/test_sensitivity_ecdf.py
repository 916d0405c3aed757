"""The distribution of distances: steps, bands, and the order statistic."""

import math

import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.plotting import sensitivity_ecdf

DISTANCES = np.random.default_rng(20170611).exponential(size=200)
POINT = dpjax.operating_point(m=200, gamma=0.1)


def labeled(artists, start):
    (found,) = (artist for artist in artists if str(artist.get_label()).startswith(start))
    return found


def band_at(ax, start, x):
    """Lower and upper end of a band right of a place."""
    path = labeled(ax.collections, start).get_paths()[0].vertices
    return [np.interp(x, *np.array(sorted(map(tuple, side))).T) for side in halves(path)]


def halves(vertices):
    """The lower and the upper edge of a polygon of `fill_between`."""
    turn = len(vertices) // 2
    first, second = vertices[1:turn], vertices[turn + 1 : -1]
    return sorted((first, second), key=lambda side: side[:, 1].sum())


def test_steps_are_those_of_the_empirical_distribution(ax):
    line = labeled(sensitivity_ecdf(DISTANCES, ax=ax).get_lines(), "200 sampled pairs")
    assert line.get_drawstyle() == "steps-post"
    x, y = line.get_data()
    np.testing.assert_array_equal(x[1:], np.sort(DISTANCES))
    np.testing.assert_allclose(y, np.arange(201) / 200)


def test_the_chosen_order_statistic_is_marked(ax):
    sensitivity_ecdf(DISTANCES, POINT, unit="mm", ax=ax)
    marker = labeled(ax.get_lines(), "order statistic")
    k = POINT.k
    assert marker.get_xdata() == [np.sort(DISTANCES)[k - 1]]
    assert marker.get_ydata() == [k / 200]
    for text in (f"k = {k} of 200", "gamma = 0.1", "confidence 0.99"):
        assert text in marker.get_label()
    assert list(labeled(ax.get_lines(), "1 - gamma").get_ydata()) == [0.9, 0.9]
    assert ax.get_xlabel().endswith("[mm]")


def test_bands_are_those_of_massart_and_of_clopper_and_pearson(ax):
    sensitivity_ecdf(DISTANCES, bands=["dkw", "beta"], confidence=0.95, ax=ax)
    ordered, width = np.sort(DISTANCES), math.sqrt(math.log(2 / 0.05) / 400)
    for count in (1, 57, 150, 199):
        middle = (ordered[count - 1] + ordered[count]) / 2
        share = count / 200
        expected = max(share - width, 0), min(share + width, 1)
        np.testing.assert_allclose(band_at(ax, "DKW band", middle), expected)
        interval = stats.binomtest(count, 200).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose(band_at(ax, "exact Beta band", middle), interval, rtol=1e-6)


def test_the_true_distribution_is_drawn_where_it_is_known(ax):
    sensitivity_ecdf(DISTANCES, cdf=stats.expon.cdf, ax=ax)
    x, y = labeled(ax.get_lines(), "true distribution").get_data()
    np.testing.assert_allclose(y, stats.expon.cdf(x))
    assert x[-1] == DISTANCES.max()


def test_of_many_pairs_some_steps_are_drawn_and_the_chosen_one(ax):
    m = 50_000
    point = dpjax.operating_point(m=m, gamma=0.01)
    distances = np.random.default_rng(0).permutation(np.arange(1.0, m + 1))
    sensitivity_ecdf(distances, point, ax=ax)
    x, y = labeled(ax.get_lines(), "50000 sampled pairs").get_data()
    assert len(x) < 2_100
    assert {1, point.k, m} <= set(x.tolist())
    np.testing.assert_allclose(y[1:], x[1:] / m)


def test_infinite_distances_count_and_are_not_drawn(ax):
    distances = np.array([1.0, np.inf, -1.0, 2.0, np.nan])
    sensitivity_ecdf(distances, dpjax.operating_point(m=5, confidence=None), ax=ax)
    x, y = labeled(ax.get_lines(), "5 sampled pairs").get_data()
    assert (x.tolist(), y.tolist()) == ([1.0, 1.0, 2.0], [0.0, 0.2, 0.4])
    assert "k = 5 of 5: inf" in labeled(ax.get_lines(), "order statistic").get_label()


def test_what_does_not_fit_is_refused(ax):
    for arguments, message in (
        ((np.zeros((2, 2)),), r"distances must have shape \(m,\)"),
        ((np.full(3, np.inf),), "distances must hold a finite number"),
        ((DISTANCES[:-1], POINT), "point must have m=199, the number of distances"),
        ((DISTANCES, dpjax.assume_sensitivity(1.0, norm="l1")), "got m=None"),
    ):
        with pytest.raises(ValueError, match=message):
            sensitivity_ecdf(*arguments, ax=ax)
    with pytest.raises(ValueError, match="bands must be"):
        sensitivity_ecdf(DISTANCES, bands=["normal"], ax=ax)
    with pytest.raises(ValueError, match="confidence must be"):
        sensitivity_ecdf(DISTANCES, confidence=1.0, ax=ax)
