"""The plot of regret: bounds against T, and marks where regret was realized."""

import numpy as np
import pytest

from dpjax import learning, plotting

PRIVATE = {"epsilon": 1.0, "delta": 1e-6}


def test_bounds_are_drawn_and_what_was_realized(ax):
    steps, realized = [100, 10_000], {"private, advanced composition": [0.9, 0.4]}
    assert plotting.regret_bounds(steps, experts=10, realized=realized, ax=ax, **PRIVATE) is ax
    free, better, lecture, marks = ax.get_lines()
    assert free.get_ydata()[1] == learning.regret_bound(steps=10_000, experts=10)
    assert [curve.get_ydata()[1] for curve in (free, better, lecture)] == pytest.approx(
        [0.030, 0.107, 0.485], abs=5e-4
    )
    assert marks.get_linestyle() == "None"
    assert list(marks.get_ydata()) == [0.9, 0.4]
    assert np.array_equal(marks.get_xdata(), steps)


def test_a_curve_of_another_name_is_refused(ax):
    with pytest.raises(ValueError, match="realized"):
        plotting.regret_bounds([10], experts=2, realized={"private": [0.1]}, ax=ax, **PRIVATE)
