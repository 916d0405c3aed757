"""Gamma of records: points, limits, and a feature that fits."""

import types

import numpy as np
import pytest

import odd_inputs
from dpjax.plotting import gamma_by_record

FOUND = types.SimpleNamespace(
    confidence=0.9,
    uncovered=np.array([0, 5, 10]),
    estimates=np.array([0.0, 0.5, 1.0]),
    lower=np.array([0.0, 0.2, 0.7]),
    upper=np.array([0.3, 0.8, 1.0]),
)
FEATURE = np.array([1.0, 0.0, 1.0])


def test_points_and_limits_are_where_they_belong(ax):
    gamma_by_record(FOUND, FEATURE, unit="mm", ax=ax)
    (points,) = ax.get_lines()
    np.testing.assert_array_equal(points.get_data(), [FEATURE, FOUND.estimates])
    (limits,) = ax.collections
    for i, (low, high) in enumerate(limits.get_segments()):
        np.testing.assert_allclose(
            [low, high], [[FEATURE[i], x[i]] for x in (FOUND.lower, FOUND.upper)]
        )
    assert limits.get_label() == "limits, 0.9 for all"
    assert ax.get_xlabel() == "record [mm]"
    low, high = ax.get_ylim()
    assert low < 0
    assert high > 1


def test_a_feature_holds_a_number_for_each_record(ax):
    with pytest.raises(ValueError, match=r"feature must have shape \(3,\)"):
        gamma_by_record(FOUND, FEATURE[:2], ax=ax)
    odds = odd_inputs.hiding(FEATURE)
    odd_inputs.assert_refused(lambda x: gamma_by_record(FOUND, x, ax=ax), odds, "^feature ")
