"""Broken copies of the package, and the tests that must fail on them.

A test that nothing can make fail checks nothing. Every promise of docs/security.md is broken in at
least one way, on a copy, and each test that the page names for it must say so: by an assertion of
its own, for a program that does not run would fail any test.
"""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.choice import CHOSEN, MUTANTS, TABLE, broken_text
from tables import for_each

ROOT = Path(__file__).resolve().parents[2]


def promises():
    """The tests that the page names, by promise."""
    page = (ROOT / "docs" / "security.md").read_text()
    tables = [text for text in page.split("\n\n") if text.startswith("| Promise |")]
    rows = [row.strip("| ").split(" | ") for table in tables for row in table.splitlines()[2:]]
    return {promise: set(re.findall(r"`([^`]+)`", tests)) for promise, _, tests in rows}


def function_of(test):
    """A test without its parameters."""
    return test.split("[")[0]


@functools.cache
def functions_in(file):
    body = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def killers(mutants):
    """The tests that must fail on some of these mutants, without their parameters."""
    return {function_of(test) for mutant in mutants for test in mutant["killers"]}


# The table and the page.


def test_no_two_mutants_share_a_name():
    assert len(MUTANTS) == len(TABLE)


@for_each("test", sorted(set.union(*promises().values()) | killers(TABLE)))
def test_what_is_named_exists(test):
    file, _, name = test.partition("::")
    assert name in functions_in(file)


@for_each("promise", promises())
def test_every_test_of_a_promise_has_seen_it_broken(promise):
    mutants = [mutant for mutant in TABLE if promise.startswith(mutant.get("promise", "?"))]
    assert killers(mutants) == promises()[promise]


@for_each("name", MUTANTS)
def test_a_mutant_breaks_one_place_of_one_promise(name):
    mutant = MUTANTS[name]
    file, text = broken_text(mutant)
    compile(text, file, "exec")
    if "promise" in mutant:
        assert sum(promise.startswith(mutant["promise"]) for promise in promises()) == 1


# The mutants.


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and its tests, apart from the checkout; programs that are the same are shared."""
    root = tmp_path_factory.mktemp("mutation")
    for folder in ("dpjax", "tests"):
        no_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=no_bytecode)
    shutil.copy(ROOT / "pyproject.toml", root)
    compiled = ROOT / ".pytest_cache"
    compiled.mkdir(exist_ok=True)
    (root / ".pytest_cache").symlink_to(compiled)
    return root


@pytest.fixture(scope="module")
def outcomes(copy, environment):
    """Runs tests on the copy: for each that ran, "passed", "asserted" or what else there was."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("server.py")],
        cwd=copy,
        env=environment(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE=""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(tests):
        print(json.dumps(tests), file=server.stdin, flush=True)
        assert server.stdout.readline() == "done\n"
        report = copy / "outcomes.json"
        assert report.exists(), (copy / "printed.txt").read_text()
        return json.loads(report.read_text())

    with server:
        yield run


@pytest.mark.slow
@pytest.mark.skipif(not CHOSEN, reason="no mutant of what changed")
def test_the_copy_itself_passes(outcomes):
    mutants = [MUTANTS[name] for name in CHOSEN]
    found = outcomes(sorted({test for mutant in mutants for test in mutant["killers"]}))
    assert set(found.values()) == {"passed"}
    assert set(map(function_of, found)) == killers(mutants)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_mutant_is_killed(name, copy, outcomes):
    mutant = MUTANTS[name]
    file, text = broken_text(mutant)
    (copy / file).write_text(text)
    # A time of its own, or Python could take the bytecode of another mutant for this one's.
    seconds = 1 + list(MUTANTS).index(name)
    os.utime(copy / file, (seconds, seconds))
    try:
        found = outcomes(mutant["killers"])
    finally:
        shutil.copy2(ROOT / file, copy / file)
    for killer in mutant["killers"]:
        ends = {end for test, end in found.items() if killer in (test, function_of(test))}
        assert "asserted" in ends, ends
