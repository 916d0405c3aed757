"""Which tests take long: `make test-times` measures them, and renews `long_tests.txt`.

`conftest.py` marks the tests of that file as slow, so `make test` leaves them to `make test-long`.
Tests that must fail on a mutant stay in the fast set unless they take much longer than others.
"""

import json
import resource
import time
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIST, MEASURED = HERE / "long_tests.txt", HERE.parent / "build" / "cpu_times.jsonl"
# Of the time of all tests: fast and slow machines choose alike. A fortieth of the tests takes half
# of the time, and most of these kill mutants.
LIMIT, LIMIT_OF_KILLERS = 1.5e-4, 1e-3


def long_tests():
    """The tests that are marked as slow, because they take long."""
    return set(LIST.read_text().splitlines())


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
    """Writes the list, from what was measured."""
    times = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    mutants = tomllib.loads((HERE / "mutation" / "mutants.toml").read_text())["mutant"]
    killers = {killer for mutant in mutants for killer in mutant["killers"]}
    total = sum(seconds for _, seconds in times)
    chosen = {}
    for test, seconds in times:
        kills = not killers.isdisjoint({test, test.split("[")[0]})
        if seconds > total * (LIMIT_OF_KILLERS if kills else LIMIT):
            chosen[test] = seconds
    LIST.write_text("".join(f"{test}\n" for test in sorted(chosen)))
    share = sum(chosen.values()) / total
    print(f"{len(chosen)} of {len(times)} tests take {share:.0%} of the time")


if __name__ == "__main__":
    main()
