"""Which tests take long: `make test-times` measures them, and renews two lists.

`conftest.py` marks the tests of `long_tests.txt` as slow, so `make test` leaves them to
`make test-long`. Tests that must fail on a mutant stay in the fast set unless they take much longer
than others. CI has no time for all that is long: `left_out` says which tests only `make test-slow`
runs, those of `longest_tests.txt` and rows for which others stand. Of the long tests that are left
and kill no mutant, `make test LONG=1` runs one half on commits of an even day, and the other half
on commits of an odd day.
"""

import json
import os
import re
import resource
import time
import zlib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIST, LONGEST = HERE / "long_tests.txt", HERE / "longest_tests.txt"
MUTANTS = HERE / "mutation" / "mutants.toml"
MEASURED = HERE.parent / "build" / "cpu_times.jsonl"
# Of the time of all tests: fast and slow machines choose alike. A fortieth of the tests takes half
# of the time, and most of these kill mutants.
LIMIT, LIMIT_OF_KILLERS, LIMIT_OF_CI = 1.5e-4, 1e-3, 6e-4
# Users copy the examples, so CI runs all of them.
WHOLE = {"tests/test_public_api.py::test_examples_run"}


def long_tests():
    """The tests that are marked as slow, because they take long."""
    return set(LIST.read_text().splitlines())


def longest_tests():
    """Those of them that CI leaves out, because they take very long and kill no mutant."""
    return set(LONGEST.read_text().splitlines())


def function_of(test):
    """A test without its row."""
    return test.split("[")[0]


def killers():
    """The tests that must fail on a mutant, by their names; those of promises are among them."""
    return set(re.findall(r'"(tests/[^"]+)"', MUTANTS.read_text()))


def left_out(fast, known, day=None):
    """The long tests that CI leaves to `make test-slow`.

    A row that kills no mutant is left out where another row of its test runs: a fast one, or else
    the first of the long ones. Where a mutant names a test or one of its rows, all rows run.

    Args:
        fast: the fast tests that there are.
        known: the long ones.
        day: of the commit, which leaves out half of the others that kill no mutant; None leaves
            out none of them.
    """
    guards = set(map(function_of, killers())) | WHOLE
    found, seen = longest_tests() & known, set(map(function_of, fast))
    for test in sorted(known - found):
        function = function_of(test)
        of_another_day = day is not None and (zlib.crc32(function.encode()) + day) % 2
        if function not in guards and (function in seen or of_another_day):
            found.add(test)
        seen.add(function)
    return found


def day_of_commit():
    """The day that `make test LONG=1` hands over, a number; None for all tests."""
    day = os.environ.get("DPJAX_DAY", "")
    return int(day) if day else None


def _cpu():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Measures a test with its fixtures; a plugin by `-p cpu_time`."""
    begin = _cpu()
    yield
    MEASURED.parent.mkdir(exist_ok=True)
    with MEASURED.open("a") as file:  # Of all workers: a line is written at once.
        file.write(json.dumps([item.nodeid, round(_cpu() - begin, 3)]) + "\n")


def main():
    """Writes the lists, from what was measured."""
    times = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    named = killers()
    guards = set(map(function_of, named)) | WHOLE
    total = sum(seconds for _, seconds in times)
    chosen, longest = {}, {}
    for test, seconds in times:
        kills = not named.isdisjoint({test, function_of(test)})
        if seconds > total * (LIMIT_OF_KILLERS if kills else LIMIT):
            chosen[test] = seconds
            if seconds > total * LIMIT_OF_CI and function_of(test) not in guards:
                longest[test] = seconds
    for file, tests in ((LIST, chosen), (LONGEST, longest)):
        file.write_text("".join(f"{test}\n" for test in sorted(tests)))
        share = sum(tests.values()) / total
        print(f"{file.name}: {len(tests)} of {len(times)} tests take {share:.0%} of the time")


if __name__ == "__main__":
    main()
