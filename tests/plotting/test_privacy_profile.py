"""The curves of a profile are its limits, and the axes say so."""

import types

import numpy as np

from dpjax.plotting import privacy_profile

PROFILE = types.SimpleNamespace(
    epsilon=2.0,
    confidence=0.9,
    gamma=lambda epsilon: 0.5 * np.exp(-epsilon),
    delta=lambda epsilon: 0.1 * np.exp(-2 * np.asarray(epsilon)),
)


def line(ax, start):
    (found,) = (x for x in ax.get_lines() if str(x.get_label()).startswith(start))
    return found


def test_curves_are_gamma_and_delta(ax):
    privacy_profile(PROFILE, ax=ax)
    for start, expected in (("gamma", PROFILE.gamma), ("delta", PROFILE.delta)):
        x, y = line(ax, start).get_data()
        assert (x[0], x[-1]) == (0, 8)
        np.testing.assert_allclose(y, expected(x))


def test_the_epsilon_of_the_mechanisms_is_marked_and_the_confidence_stated(ax):
    privacy_profile(PROFILE, ax=ax)
    assert list(line(ax, "epsilon of the mechanisms").get_xdata()) == [2.0, 2.0]
    assert ax.get_yscale() == "log"
    assert ax.get_ylabel() == "limit, confidence 0.9"
