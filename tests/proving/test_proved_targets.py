"""How tight proofs are: 33 functions, beside the farthest neighbors that are known."""

import pathlib
import re

import pytest

import dpjax
from dpjax.proving import NoProofError
from proved_targets import TARGETS, of_size

MANY = of_size(100_000)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proofs" / "global-sensitivity.md"


def shown_ratios():
    """The ratios of the page at 100 and at 100,000 records, by function."""
    rows = re.findall(r"^\| ([^|]+) \| l\S+ \| \S+ \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.M)
    return {name: ratios for name, *ratios in rows}


@pytest.mark.parametrize("name", TARGETS)
def test_proofs_are_as_tight_as_the_page_says(name):
    target, records, bounds, norm, truth, limit = TARGETS[name]
    if truth is None:
        with pytest.raises(NoProofError, match="lu"):
            dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
        assert shown_ratios()[name] == ["refused", "refused"]
        return
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
    assert truth * (1 - 1e-5) <= found.value <= limit * truth
    few, many = map(float, shown_ratios()[name])
    assert few == pytest.approx(found.value / truth, abs=2e-3)
    target, records, bounds, norm, truth, _ = MANY[name]
    again = dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
    assert many == pytest.approx(again.value / truth, rel=5e-3)
    assert (found.gamma, found.confidence, found.method) == (0, 1, "proved")


def test_the_page_has_all_of_them():
    assert set(shown_ratios()) == set(TARGETS)
