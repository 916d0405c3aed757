"""The pages name files and tests that exist."""

import ast
import collections
import importlib
import math
import re
from pathlib import Path

import jax
import pytest

import dpjax
from tables import for_each

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE]
pages = for_each("page", PAGES)
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


@pages
def test_formulas_are_closed(page):
    """A `$` without a partner would stand on the page as it is, and hide the formulas after it."""
    words = re.sub(r"`[^`]*`", "", prose(page))
    open_ones = [text for text in re.split(r"\n\s*\n", words) if text.count("$") % 2]
    assert not open_ones


@pages
def test_headings_and_names_of_the_reference_stand_alone(page):
    lines = ["", *prose(page).splitlines(), ""]
    glued = [
        line
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
        if re.match(r"#+ |::: ", line) and (before.strip() or after.strip())
    ]
    assert not glued


@pages
def test_nothing_is_said_twice(page):
    """As a merge leaves it that keeps both sides. Rows of measured tables may begin alike."""
    measured = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)
    beginnings = [line[:60] for line in measured.sub("", prose(page)).splitlines()]
    counts = collections.Counter(text for text in beginnings if len(text) == 60)
    assert not [text for text, count in counts.items() if count > 1]


def test_names_are_found():
    found = dict(names(ROOT / "docs" / "security.md"))
    assert found["tests/exact/test_grid.py"] in (
        "test_halves_go_up",
        "test_no_two_numbers_move_apart",
    )
    assert "_core/_values.py" in dict(names(ROOT / "docs" / "architecture.md"))


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


def examples(page):
    """All code in Python of a page, which runs from top to bottom."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))


@pages
def test_what_the_code_of_a_page_imports_exists(page):
    """The code itself runs in a slow test."""
    imports = [x for x in ast.walk(ast.parse(examples(page))) if isinstance(x, ast.ImportFrom)]
    of_dpjax = [x for x in imports if (x.module or "").split(".")[0] == "dpjax"]
    gone = [
        f"{one.module}.{alias.name}"
        for one in of_dpjax
        for alias in one.names
        if not hasattr(importlib.import_module(one.module), alias.name)
    ]
    assert not gone


# Whose code takes more than one machine, or is the README's.
NOT_RUN = ("scale.md", "index.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in SITE if examples(page) and page.name not in NOT_RUN],
    ids=lambda page: page.stem,
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(examples(page), page.name, "exec"), namespace)
    if page.stem == "when-it-works":
        printed = re.findall(r"^epsilon .*", page.read_text(), flags=re.MULTILINE)
        assert namespace["rehearsal"].verdict.values.tolist() == printed
    if page.stem == "sweeps":
        assert namespace["average"].sizes == {"n": 2, "epsilon": 3}
        assert (tmp_path / "errors.nc").exists()
        assert namespace["grid"].k.min() > 0


def test_the_start_page_has_the_example_of_the_readme():
    """Which is run by tests/test_readme.py."""
    assert examples(ROOT / "docs" / "index.md") in examples(ROOT / "README.md")


def test_code_is_not_cut_on_a_narrow_page():
    """A page of 1280 pixels shows 76 columns."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    code = {page: examples(page).splitlines() for page in pages}
    wide = [f"{page.name}: {line}" for page in pages for line in code[page] if len(line) > 76]
    assert not wide


def test_the_site_leads_to_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in SITE]
    linked = set(re.findall(r"[:-] (\S+\.md)$", navigation, re.MULTILINE))
    missing = [page for page in pages if page not in linked]
    assert not missing
