"""Broken copies of the package, and the tests that must fail on them.

A test that nothing can make fail checks nothing. Every promise of docs/security.md is broken in at
least one way, on a copy, and each test that the page names for it must say so: by an assertion of
its own, for a program that does not run would fail any test.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from code_patterns import replaced

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]
MUTANTS = {mutant["how"]: mutant for mutant in TABLE}


def promises():
    """The tests that the page names, by promise."""
    page = (ROOT / "docs" / "security.md").read_text()
    (table,) = (text for text in page.split("\n\n") if text.startswith("| Promise |"))
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    return {promise: set(re.findall(r"`([^`]+)`", tests)) for promise, _, tests in rows[2:]}


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


def broken_text(mutant):
    """The file of a mutant, and what is to be in it."""
    return replaced(mutant["where"], mutant["old"], mutant["new"])


# The table and the page.


def test_no_two_mutants_share_a_name():
    assert len(MUTANTS) == len(TABLE)


@pytest.mark.parametrize("test", sorted(set.union(*promises().values()) | killers(TABLE)))
def test_what_is_named_exists(test):
    file, _, name = test.partition("::")
    assert name in functions_in(file)


@pytest.mark.parametrize("promise", promises())
def test_every_test_of_a_promise_has_seen_it_broken(promise):
    mutants = [mutant for mutant in TABLE if promise.startswith(mutant.get("promise", "?"))]
    assert killers(mutants) == promises()[promise]


@pytest.mark.parametrize("name", MUTANTS)
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


@pytest.fixture
def outcomes(copy, environment):
    """Runs tests on the copy: for each that ran, "passed", "asserted" or what else there was."""

    def run(tests):
        report = copy / "report.xml"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", *tests],
            cwd=copy,
            # Files change faster than bytecode can tell.
            env=environment(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,  # A mutant may never return.
        )
        assert report.exists(), done.stdout + done.stderr
        return dict(map(outcome, ElementTree.parse(report).iter("testcase")))

    return run


def outcome(case):
    """The name of a test, and how it ended."""
    name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
    problem = next(iter(case), None)
    if problem is None:
        return name, "passed"
    # JAX and NumPy assert on behalf of the tests that call them, and so do the auditing tools.
    places = re.findall(r"^((?:tests|dpjax)/\S+):\d+: in ", problem.text, re.MULTILINE)
    asserted = (
        problem.tag == "failure"
        and problem.get("message").startswith(("assert", "AssertionError", "Failed"))
        and places[-1].startswith(("tests/", "dpjax/auditing/"))
    )
    return name, "asserted" if asserted else problem.text


@pytest.mark.slow
def test_the_copy_itself_passes(outcomes):
    found = outcomes(sorted({test for mutant in TABLE for test in mutant["killers"]}))
    assert set(found.values()) == {"passed"}
    assert set(map(function_of, found)) == killers(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name, copy, outcomes):
    mutant = MUTANTS[name]
    file, text = broken_text(mutant)
    (copy / file).write_text(text)
    try:
        found = outcomes(mutant["killers"])
    finally:
        shutil.copy(ROOT / file, copy / file)
    for killer in mutant["killers"]:
        ends = {end for test, end in found.items() if killer in (test, function_of(test))}
        assert "asserted" in ends, ends
