"""Curves of attacks: what is drawn is what was found, with its limits, and what is allowed."""

import numpy as np
import pytest

from dpjax import Guarantee, plotting
from dpjax.attacks import highest_true_positive_rate, roc_curve


@pytest.fixture
def attack():
    random = np.random.default_rng(0)
    members = random.random(2000) < 0.5
    return random.normal(size=2000) + members, members


def test_a_curve_its_band_the_claim_and_guessing(attack, ax):
    curve, guarantee = roc_curve(*attack), Guarantee(1.0, gamma=0.05)
    plotting.roc_curve({"attack": curve}, guarantee, ax=ax)
    found, allowed, guessing = ax.get_lines()
    rates = found.get_xdata()
    for rate, drawn in zip(rates[::40], found.get_ydata()[::40], strict=True):
        assert drawn == max(y for x, y in zip(*curve.points(), strict=True) if x <= rate)
    (band,) = ax.collections
    corners = band.get_paths()[0].vertices
    for limit in curve.limits(rates):
        assert set(limit.round(9)) <= set(corners[:, 1].round(9))
    assert np.array_equal(allowed.get_ydata(), highest_true_positive_rate(guarantee, rates))
    assert np.array_equal(guessing.get_ydata(), rates)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_curves_without_limits_get_no_band(attack, ax):
    plotting.roc_curve({"attack": roc_curve(*attack, confidence=None)}, ax=ax)
    assert not ax.collections
    assert len(ax.get_lines()) == 2


def test_no_curve_is_refused(ax):
    with pytest.raises(ValueError, match="curves"):
        plotting.roc_curve({}, ax=ax)
