"""The notebooks: what is stored is whole, and what executes them notices what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / "notebooks" / "run.py"
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)

VERDICT = """
from verdicts import SMALL, verdict
verdict("holds", "Two is even.", supported_by={"2 % 2 is 0": 2 % 2 == 0})
"""
BROKEN_VERDICT = VERDICT.replace("2 == 0", "2 == 1")
WRONG_WORD = VERDICT.replace('"holds"', '"does not hold"')


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def shown(path):
    """All outputs, as text."""
    return json.dumps([cell["outputs"] for cell in code_cells(path)])


@notebooks
def test_every_cell_was_executed_in_order_without_error(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    assert "stderr" not in shown(path)


@notebooks
def test_a_notebook_draws_and_judges(path):
    assert "image/png" in shown(path)
    calls = sum("".join(cell["source"]).count("verdict(") for cell in code_cells(path))
    assert calls == shown(path).count("**Verdict: ") > 0


@notebooks
def test_a_notebook_is_small_and_says_nothing_of_where_it_was_executed(path):
    text = path.read_text()
    assert len(text) < 2**20
    assert not re.search(r"/(?:home|root|tmp|work|Users|usr)/", text)
    assert not any(cell["metadata"] for cell in json.loads(text)["cells"])


@notebooks
def test_the_gallery_and_the_site_link_to_it(path):
    link = f"notebooks/{path.name}"
    assert f"]({link})" in (ROOT / "docs" / "gallery.md").read_text()
    assert f": {link}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.fixture
def execute(tmp_path, environment):
    """Executes a notebook of one cell by the runner: the process, and the file afterwards."""

    def run(code, **variables):
        path = tmp_path / "one.ipynb"
        cell = {"cell_type": "code", "id": "a", "execution_count": None, "outputs": []}
        cell |= {"source": code, "metadata": {"execution": {"started": "now"}}}
        content = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(content))
        done = subprocess.run(
            [sys.executable, RUN, path],
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
        return done, json.loads(path.read_text())

    return run


def test_a_notebook_that_passes_is_written_and_keeps_no_times(execute):
    done, written = execute(VERDICT, DPJAX_NOTEBOOKS="full")
    assert done.returncode == 0, done.stderr
    (cell,) = written["cells"]
    assert "**Verdict: holds.** Two is even." in str(cell["outputs"])
    assert cell["metadata"] == {}
    assert set(written["metadata"]["language_info"]) == {"name"}


def test_a_small_execution_writes_nothing(execute):
    done, written = execute(VERDICT + "assert SMALL", DPJAX_NOTEBOOKS="small")
    assert done.returncode == 0, done.stderr
    assert not written["cells"][0]["outputs"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        (BROKEN_VERDICT, "no longer true"),
        (WRONG_WORD, "the notebook 'does not hold'"),
    ],
)
def test_errors_and_broken_verdicts_fail_and_are_not_written(execute, code, message):
    done, written = execute(code, DPJAX_NOTEBOOKS="full")
    assert done.returncode == 1
    assert message in done.stderr
    assert not written["cells"][0]["outputs"]


def test_an_unknown_size_is_refused(execute):
    done, _ = execute(VERDICT, DPJAX_NOTEBOOKS="tiny")
    assert done.returncode != 0
    assert "got 'tiny'" in done.stderr
