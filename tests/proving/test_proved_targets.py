"""How tight proofs are: 33 functions, beside the farthest neighbors that are known."""

import pathlib
import re

import pytest

import dpjax
from dpjax.proving import NoProofError
from proved_targets import TARGETS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proofs" / "global-sensitivity.md"


def shown_ratios():
    """The ratios of the page, by function."""
    return dict(re.findall(r"^\| ([^|]+) \| l\S+ \| \S+ \| (\S+) \|$", PAGE.read_text(), re.M))


@pytest.mark.parametrize("name", TARGETS)
def test_proofs_are_as_tight_as_the_page_says(name):
    target, records, bounds, norm, truth, limit = TARGETS[name]
    if truth is None:
        with pytest.raises(NoProofError, match="lu"):
            dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
        assert shown_ratios()[name] == "refused"
        return
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
    assert truth * (1 - 1e-5) <= found.value <= limit * truth
    assert float(shown_ratios()[name]) == pytest.approx(found.value / truth, abs=2e-3)
    assert (found.gamma, found.confidence, found.method) == (0, 1, "proved")


def test_the_page_has_all_of_them():
    assert set(shown_ratios()) == set(TARGETS)
