"""The lists of tests that take long name tests that exist, and CI leaves out none that guards."""

import re
from pathlib import Path

import pytest

from cpu_time import function_of, killers, left_out, long_tests, longest_tests

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_of_the_list_exists():
    gone = []
    for test in sorted(long_tests()):
        path, name = test.split("[")[0].split("::")
        file = ROOT / path
        if not file.is_file() or not re.search(rf"^def {name}\(", file.read_text(), re.MULTILINE):
            gone.append(test)
    assert not gone


def test_every_row_of_the_list_exists(collected, pytestconfig):
    """Of the files of tests that are looked at as a whole."""
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("of some files only some tests are looked at")
    files = {test.split("::")[0] for test in collected}
    gone = {test for test in long_tests() if test.split("::")[0] in files} - collected
    assert not gone


def test_ci_leaves_out_no_test_that_must_fail_on_a_mutant():
    assert longest_tests() <= long_tests()
    guards = set(map(function_of, killers()))
    assert len(guards) > 500
    assert not [test for test in longest_tests() if function_of(test) in guards]


def test_a_row_is_left_out_where_another_one_runs():
    """Never the rows of a test that a mutant names, and of other tests at least one row runs."""
    guard = "tests/mechanisms/test_conformance.py::test_mechanism_conforms"
    assert guard in set(map(function_of, killers()))
    fast = {"a::test_x[0]", f"{guard}[laplace]"}
    known = {"a::test_x[1]", "a::test_y[0]", "a::test_y[1]", "a::test_z", f"{guard}[mwem]"}
    assert left_out(fast, known) == {"a::test_x[1]", "a::test_y[1]"}


def test_on_two_days_ci_runs_every_test_that_it_does_not_leave_out(collected):
    known = long_tests() & collected
    always = left_out(collected - known, known)
    days = [left_out(collected - known, known, day) for day in (331, 332)]
    assert days[0] & days[1] == always
    guards = set(map(function_of, killers()))
    assert not {test for test in days[0] | days[1] if function_of(test) in guards}
