"""The list of tests that take long names tests that exist, or they would run with the fast ones."""

import re
from pathlib import Path

import pytest

from cpu_time import long_tests

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
