"""The layer table of the design: a level imports lower levels only, and nothing undeclared."""

import ast
import graphlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import dpjax

PACKAGE = Path(dpjax.__file__).parent

# Module, or topic (its own files import each other) -> level, and what may be imported.
LEVELS = {
    "_version": 0,
    "_pytree": 0,
    "_checks": 0,
    "_numerics": 0,
    "_kernels": 0,
    "_limbs": 0,
    "_grid": 0,
    "_fixed_point": 0,
    "_affine": 0,
    "_lapack": 0,
    "_origins": 0,
    "_by_value": 0,
    "_durable": 0,
    "_host_code": 0,
    "_walks": 0,
    "_fingerprints": 0,
    "_programs": 0,
    "_records": 0,
    "_letters": 0,
    "base": 1,
    "_sum_targets": 2,
    "_shaped_norm": 2,
    "operating_points": 2,
    "norms": 2,
    "neighbors": 2,
    "order_statistics": 2,
    "oracles": 2,
    "random": 2,
    "sensitivity": 3,
    "mechanisms": 3,
    "accounting": 3,
    "targets": 4,
    "learning": 5,
    "auditing": 5,
    "queries": 5,
    "sweeps": 5,
    "attacks": 6,
    "plotting": 7,
}
MAY_IMPORT_UP_TO = {
    **{name: level - 1 for name, level in LEVELS.items()},
    # The files of level 0 share a level; an import cycle among them is caught below.
    **{name: 0 for name, level in LEVELS.items() if level == 0},
}
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
OPTAX = {"targets", "learning"}


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def topic(module):
    """The row of the table: dpjax.mechanisms._laplace -> mechanisms."""
    return module.split(".")[1]


def distributions(requirements):
    """The modules that requirements install, which have the names of their distributions."""
    return {re.match(r"[\w-]+", text).group().replace("-", "_") for text in requirements}


def imported(module):
    """The modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative path"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module


INTERNAL = {
    module: {name for name in imported(module) if name.split(".")[0] == "dpjax"} for module in FILES
}
modules = pytest.mark.parametrize("module", [module for module in FILES if "." in module])


def test_every_module_has_a_row():
    assert {topic(module) for module in FILES if "." in module} <= set(LEVELS)
    assert "dpjax.mechanisms._laplace" in FILES


@modules
def test_levels_import_lower_levels_only(module):
    for name in INTERNAL[module]:
        assert "." in name, f"{module} imports the whole package"
        if topic(name) != topic(module):
            level, most = LEVELS[topic(name)], MAY_IMPORT_UP_TO[topic(module)]
            assert level <= most, f"{module} (up to level {most}) imports {name} (level {level})"


def test_mechanisms_never_import_the_sampler():
    for module in FILES:
        if module.startswith("dpjax.mechanisms"):
            assert not {name for name in INTERNAL[module] if topic(name) == "sensitivity"}
        if module.startswith("dpjax.sensitivity"):
            assert not {name for name in INTERNAL[module] if topic(name) == "mechanisms"}


def test_there_are_no_import_cycles():
    # A topic's __init__ only re-exports, so files import the file that holds the code.
    tuple(graphlib.TopologicalSorter(INTERNAL).static_order())


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


@pytest.mark.parametrize("module", [m for m, path in FILES.items() if path.name == "__init__.py"])
def test_topics_only_re_export(module):
    """By hand, `x as x`, so that the public surface can be read off."""
    for node in ast.parse(FILES[module].read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.Expr), f"{module} holds code"  # The docstring
            assert isinstance(node.value, ast.Constant)


def test_code_inside_a_topic_is_private():
    inside_a_topic = [module for module in FILES if module.count(".") > 1]
    assert [module for module in inside_a_topic if not module.split(".")[-1].startswith("_")] == []


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
