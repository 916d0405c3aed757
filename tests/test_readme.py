"""The README's examples run as typed."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["first", "own mechanism"])
def test_example_runs(example, capsys):
    namespace = {}
    exec(example, namespace)
    if "release" in namespace:
        assert repr(namespace["release"].guarantee) in README.read_text()


def test_own_mechanism_takes_under_thirty_lines():
    assert len(EXAMPLES[1].splitlines()) < 30
