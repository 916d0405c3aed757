"""The layer table of the design: a level imports lower levels only, and nothing undeclared."""

import ast
import functools
import graphlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import dpjax
from tables import for_each

PACKAGE = Path(dpjax.__file__).parent
DOCS = PACKAGE.parent / "docs"

# Room (its own files import each other) -> level; a room imports lower levels only.
LEVELS = {
    "_version": 0,
    "_exact": 0,
    "_files": 0,
    "_core": 1,
    "_tracing": 2,
    "oracles": 3,
    "proving": 3,
    "random": 3,
    "_running": 3,
    "release": 4,
    "sensitivity": 4,
    "accounting": 4,
    "mechanisms": 5,
    "targets": 5,
    "auditing": 5,
    "attacks": 6,
    "queries": 6,
    "sweeps": 6,
    "learning": 7,
    "tables": 7,
    "population": 7,
    "plotting": 8,
}
# Files that other rooms must not import: raw noise is for `random/_release.py` alone.
INNER = {"dpjax.random._lattice", "dpjax.random._samples"}
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
OPTAX = {"targets", "learning"}


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def topic(module):
    """The row of the table: dpjax.mechanisms._additive -> mechanisms."""
    return module.split(".")[1]


def distributions(requirements):
    """The modules that requirements install, which have the names of their distributions."""
    return {re.match(r"[\w-]+", text).group().replace("-", "_") for text in requirements}


@functools.cache
def nodes(module):
    """All of the code of a file that runs, also inside functions."""
    tree = ast.parse(FILES[module].read_text())
    for node in ast.walk(tree):  # Checkers read types of optional packages; nothing imports them.
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return tuple(ast.walk(tree))


def imported(module):
    """The modules that a file imports anywhere."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative path"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module


@functools.cache
def internal(module):
    """What a file imports of the package."""
    return {name for name in imported(module) if name.split(".")[0] == "dpjax"}


SAMPLER = {f"dpjax.sensitivity.{name}" for name in ("_sampler", "_samples", "_pairs", "_loop")}
modules = for_each("module", [module for module in FILES if "." in module])


def test_every_module_has_a_row():
    assert {topic(module) for module in FILES if "." in module} <= set(LEVELS)
    assert "dpjax.mechanisms._additive" in FILES


@modules
def test_levels_import_lower_levels_only(module):
    for name in internal(module):
        assert "." in name, f"{module} imports the whole package"
        if topic(name) != topic(module):
            level, above = LEVELS[topic(name)], LEVELS[topic(module)]
            assert level < above, f"{module} (level {above}) imports {name} (level {level})"


@modules
def test_raw_noise_stays_in_its_room(module):
    assert topic(module) == "random" or not INNER & internal(module)


def test_mechanisms_never_import_the_sampler():
    for module in FILES:
        if module.startswith("dpjax.mechanisms"):
            assert not SAMPLER & internal(module)
        if module.startswith("dpjax.sensitivity"):
            assert not {name for name in internal(module) if topic(name) == "mechanisms"}


def test_there_are_no_import_cycles():
    # A topic's __init__ only re-exports, so files import the file that holds the code.
    tuple(graphlib.TopologicalSorter({module: internal(module) for module in FILES}).static_order())


@modules
def test_nothing_undeclared_is_imported(module):
    allowed = distributions(PROJECT["dependencies"]) | sys.stdlib_module_names | {"dpjax"}
    if topic(module) not in OPTAX:
        allowed -= {"optax"}
    if topic(module) == "plotting":
        allowed |= {"matplotlib"}
    assert {name.split(".")[0] for name in imported(module)} <= allowed


def test_nothing_declared_goes_unused():
    used = {name.split(".")[0] for module in FILES for name in imported(module)}
    # jaxlib is JAX's other half, and its version has to fit.
    assert distributions(PROJECT["dependencies"]) <= used | {"jaxlib"}


def test_extras_that_messages_name_bring_what_is_missing():
    code = "".join(map(Path.read_text, FILES.values()))
    wanted = re.findall(r'extra\("(\w+)[\w.]*", "(\w+)"\)', code)
    assert len(wanted) >= 4
    for module, extra in wanted:
        assert module in distributions(PROJECT["optional-dependencies"][extra])


@for_each("module", [m for m, path in FILES.items() if path.name == "__init__.py"])
def test_topics_only_re_export(module):
    """By hand, so that the public surface can be read off: `__all__` lists what is imported."""
    names, listed = [], []
    for node in ast.parse(FILES[module].read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert {alias.asname for alias in node.names} <= {
                alias.name for alias in node.names
            } | {None}
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            assert [target.id for target in node.targets] == ["__all__"]
            listed = ast.literal_eval(node.value)
        else:
            assert isinstance(node, ast.Expr), f"{module} holds code"  # The docstring
            assert isinstance(node.value, ast.Constant)
    assert sorted(names) == sorted(listed)


def test_code_inside_a_topic_is_private():
    inside_a_topic = [module for module in FILES if module.count(".") > 1]
    assert [module for module in inside_a_topic if not module.split(".")[-1].startswith("_")] == []


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_the_picture_of_the_rooms_is_current():
    spec = importlib.util.spec_from_file_location("draw_rooms", DOCS / "draw_rooms.py")
    draw_rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_rooms)
    for theme, colors in draw_rooms.COLORS.items():
        assert draw_rooms.picture(colors) == (DOCS / "images" / f"rooms-{theme}.svg").read_text()
