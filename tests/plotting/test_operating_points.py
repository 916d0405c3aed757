"""Operating points: how many pairs, and how far above the quantile."""

import numpy as np
import pytest

import dpjax
from dpjax.plotting import least_pairs, overestimate


def exponential(u):
    return -np.log1p(-u)


def test_each_method_has_its_curve_in_order(ax):
    gammas = (0.1, 0.01, 0.05)
    points = [dpjax.operating_point(gamma=gamma) for gamma in gammas]
    points += [dpjax.operating_point(gamma=gamma, method="dkw") for gamma in gammas]
    least_pairs(points, ax=ax)
    exact, dkw = ax.get_lines()
    assert exact.get_label() == "exact, confidence 0.99"
    assert dkw.get_label() == "dkw, marginal"
    assert exact.get_xdata().tolist() == [0.01, 0.05, 0.1]
    # The table of the design.
    assert exact.get_ydata().tolist() == [459, 90, 44]
    assert dkw.get_ydata().tolist() == [41_971, 1_305, 285]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_averages_are_those_of_exponentials(ax):
    """E G_(k) of m exponentials is H_m - H_(m-k)."""
    points = [dpjax.operating_point(m=m, gamma=0.05) for m in (900, 90, 9_000)]
    overestimate(points, exponential, ax=ax)
    curve, one = ax.get_lines()
    assert curve.get_xdata().tolist() == [90, 900, 9_000]
    for point, found in zip(points, np.asarray(curve.get_ydata())[[1, 0, 2]], strict=True):
        mean = sum(1 / i for i in range(point.m - point.k + 1, point.m + 1))
        assert found == pytest.approx(mean / exponential(0.95), rel=1e-3)
    assert set(one.get_ydata()) == {1}
    assert curve.get_label() == "gamma = 0.05, exact, confidence 0.99"


def test_no_points_are_refused(ax):
    with pytest.raises(ValueError, match="points must hold at least one"):
        least_pairs([], ax=ax)
    with pytest.raises(ValueError, match="points must hold at least one"):
        overestimate([], exponential, ax=ax)
