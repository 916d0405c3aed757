"""The README's examples run as typed."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["first", "grid", "own mechanism"])
def test_example_runs(example, capsys):
    namespace = {}
    exec(example, namespace)
    if "release" in namespace:
        assert repr(namespace["release"].guarantee) in README.read_text()


def test_the_grid_costs_what_the_readme_says():
    namespace = {}
    exec(EXAMPLES[1], namespace)
    mechanism = namespace["mechanism"]
    assert mechanism.grid == 2.0**-17
    assert 0 < mechanism.effective_scale() - 1 < 1e-4
    assert 0 < mechanism.effective_scale((10**6,)) - 1 < 1e-3
    assert mechanism.range((10**6,))[1] > 1e18


def test_own_mechanism_takes_under_thirty_lines():
    assert len(EXAMPLES[2].splitlines()) < 30
