"""Recovered fractions: what is drawn is what was found, what is expected, and what is allowed."""

import numpy as np
import pytest

import dpjax
from dpjax import plotting
from dpjax.attacks import expected_recovered_fraction, guessing_bound

C = [1.0, 0.1, 10.0]


def test_fractions_are_drawn_in_order_beside_what_is_expected(ax):
    assert plotting.recovered_fraction(C, {"LP": [0.8, 1.0, 0.5]}, ax=ax) is ax
    expected, found = ax.get_lines()
    assert found.get_xdata().tolist() == sorted(C)
    assert found.get_ydata().tolist() == [1.0, 0.8, 0.5]
    assert np.array_equal(expected.get_ydata(), expected_recovered_fraction(expected.get_xdata()))
    assert ax.get_xscale() == "log"


def test_a_guarantee_is_a_line(ax):
    guarantee = dpjax.Guarantee(1.0, 1e-5)
    *_, line = plotting.recovered_fraction(C, {}, guarantee=guarantee, ax=ax).get_lines()
    assert list(line.get_ydata()) == [guessing_bound(guarantee)] * 2
    assert line.get_label() == "most under (1, 1e-05)-DP"


def test_what_cannot_be_drawn_is_refused(ax):
    with pytest.raises(TypeError, match="recovered"):
        plotting.recovered_fraction(C, [0.8, 1.0, 0.5], ax=ax)
    with pytest.raises(ValueError, match="recovered"):
        plotting.recovered_fraction(C, {"LP": [0.8]}, ax=ax)
    for bad in ([], [0.0], 1.0):
        with pytest.raises(ValueError, match="c must be"):
            plotting.recovered_fraction(bad, {}, ax=ax)
