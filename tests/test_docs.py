"""The pages name files and tests that exist."""

import math
import re
from pathlib import Path

import pytest

import dpjax

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
# Whose names a page may leave the folder out of.
FOLDERS = (ROOT, ROOT / "dpjax")


def prose(page):
    """The text without blocks of code, which name files of the reader's."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def names(page):
    """Files, and tests in them: `path` or `path::test`, in backticks or as the end of a link."""
    found = re.findall(
        r"[`(]([\w./-]+\.(?:py|md|toml|cff|json))(?:::(\w+))?[^`)\s]*[`)]", prose(page)
    )
    return [(path, test) for path, test in found if not re.search("[A-Z]{4}", Path(path).stem)]


def located(page, path):
    places = [folder / path for folder in (page.parent, *FOLDERS)]
    return next((place for place in places if place.is_file()), None)


@pages
def test_files_that_a_page_names_exist(page):
    missing = [path for path, _ in names(page) if located(page, path) is None]
    assert not missing


@pages
def test_tests_that_a_page_names_exist(page):
    for path, test in names(page):
        if test:
            assert re.search(rf"^def {test}\(", located(page, path).read_text(), re.MULTILINE), test


def test_names_are_found():
    found = dict(names(ROOT / "docs" / "security.md"))
    assert found["tests/test_grid.py"] in ("test_halves_go_up", "test_no_two_numbers_move_apart")
    assert "base.py" in dict(names(ROOT / "docs" / "architecture.md"))


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {dpjax.__version__}\n" in citation


def test_the_guide_says_what_few_pairs_cost():
    """E G_(k) of m exponentials is H_m - H_(m-k), and the quantile log(1 / gamma)."""
    guide = " ".join((ROOT / "docs" / "when-it-works.md").read_text().split())
    for m in (90, 900, 9000):
        k = dpjax.operating_point(m=m, gamma=0.05).k
        overshoot = sum(1 / i for i in range(m - k + 1, m + 1)) / math.log(1 / 0.05)
        assert re.search(rf"{overshoot:.2f} times[^,]* at m = {m:,}", guide)


@pytest.mark.slow
def test_the_example_of_the_guide_runs():
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "when-it-works.md").read_text(), flags=re.DOTALL
    )
    namespace = {}
    exec(example, namespace)
    assert 0.05 < namespace["ratio"] < 0.2
