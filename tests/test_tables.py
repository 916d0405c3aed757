"""A table that one test checks: every row that fails is told."""

import pytest

from tables import for_each


@for_each("number", [1, 2, 3, 4])
def even(number):
    assert number % 2 == 0


@for_each("number, other", [(1, 1), (0, 0)])
def quotients(number, other, key):
    assert number / other == 1


def test_every_row_that_fails_is_told():
    with pytest.raises(AssertionError, match=r"^2 of 4 rows fail") as told:
        even()
    assert [line for line in str(told.value).splitlines() if line in set("1234")] == ["1", "3"]


def test_a_row_that_does_not_run_is_no_assertion():
    """Mutants must be killed by assertions."""
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        quotients(key=None)
