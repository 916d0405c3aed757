"""The shared odd inputs are used by every room, and their checks can fail."""

from pathlib import Path

import numpy as np
import pytest

import odd_inputs

ROOMS = (
    "accounting", "attacks", "auditing", "learning", "mechanisms", "oracles", "queries",
    "sensitivity", "sweeps", "targets",
)  # fmt: skip
PLAIN = np.asarray([1.0, 0.0, 1.0])


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_table(room):
    table = Path(__file__).with_name(room) / "test_odd_inputs.py"
    assert "import odd_inputs" in table.read_text()


def test_a_mask_that_is_dropped_fails():
    def drops(array):
        if np.asarray(array).dtype.kind not in "biuf":
            raise TypeError("array must hold numbers")
        return np.sum(np.asarray(array))

    with pytest.raises(AssertionError, match=r"masked: gave [\s\S]*masked integers: gave"):
        odd_inputs.assert_refused(drops, odd_inputs.hiding(PLAIN), "array")
    with pytest.raises(AssertionError, match="complex64: TypeError: array must"):
        odd_inputs.assert_refused(drops, odd_inputs.hiding(PLAIN), "value")


def test_an_integer_that_wraps_fails():
    def wraps(array):
        with np.errstate(all="ignore"):
            return np.asarray(array).astype("int32").astype(float)

    with pytest.raises(AssertionError, match=r"2\^32 \+ 1: gave"):
        odd_inputs.assert_released(wraps, odd_inputs.wide_numbers(PLAIN), lambda x: x)


def test_a_refusal_that_depends_on_a_number_fails():
    def refuses(array):
        if np.isnan(array).any():
            raise ValueError("array must be finite")
        return 0.0

    odds = list(odd_inputs.strange_numbers(PLAIN))
    with pytest.raises(AssertionError, match="nan at 0: ValueError"):
        odd_inputs.assert_released(refuses, odds)
    odd_inputs.assert_released(lambda array: 0.0, odds)
