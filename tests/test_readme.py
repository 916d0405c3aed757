"""The README's examples run as typed, and so does the page on noise."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _examples(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


@pytest.mark.parametrize("example", _examples(README), ids=["table", "any", "model", "sampled"])
def test_example_runs(example, tmp_path, monkeypatch):
    """A guarantee in a comment is the guarantee that the example prints."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(example, namespace)
    if claimed := re.findall(r"print\(.*guarantee\)\s*# (.*)", example):
        assert claimed == [repr(namespace["release"].guarantee)]


def test_a_second_run_of_the_table_costs_nothing(tmp_path, monkeypatch, capsys):
    """The ledger returns what was paid for, so both runs print the same."""
    monkeypatch.chdir(tmp_path)
    (example,) = [code for code in _examples(README) if "PrivateTable" in code]
    printed = []
    for _ in range(2):
        namespace = {}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            exec(example, namespace)
        printed.append(capsys.readouterr().out)
        assert namespace["ledger"].spent.epsilon == 0.3
    assert printed[0] == printed[1] != ""


def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 150
    assert all(len(example.splitlines()) <= 25 for example in _examples(README))


def test_the_grid_costs_what_the_page_on_noise_says():
    namespace = {}
    exec(_examples((ROOT / "docs" / "guide" / "noise.md").read_text())[0], namespace)
    mechanism = namespace["mechanism"]
    assert mechanism.grid == 2.0**-17
    assert 0 < mechanism.effective_scale() - 1 < 1e-4
    assert 0 < mechanism.effective_scale((10**6,)) - 1 < 1e-3
    assert mechanism.range((10**6,))[1] > 1e18
