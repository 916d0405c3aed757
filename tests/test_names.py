"""One name means one thing: modules, and what they define, across the package."""

import ast
from pathlib import Path

import dpjax

PACKAGE = Path(dpjax.__file__).parent
# A plot has the name of what it shows.
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" and path.parent.name != "plotting"
]

# Names that several modules define, and why.
SHARED = {
    "__all__": "the public names of a module",
    "__dir__": "hides what a module imports",
    "T": "a type variable, which stands for anything",
}


def definitions(path):
    """The names that a module binds at its top level, imports aside."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (x.id for x in ast.walk(target) if isinstance(x, ast.Name))


DEFINED = {path: set(definitions(path)) for path in MODULES}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def shown(paths):
    return sorted(str(path.relative_to(PACKAGE)) for path in paths)


def test_no_two_modules_share_a_name():
    for path in MODULES:
        same = [x for x in MODULES if x.stem.strip("_") == path.stem.strip("_")]
        assert same == [path], shown(same)


def test_a_name_is_defined_in_one_module():
    """But for private ones, which whoever reads a file sees defined there."""
    names = set().union(*DEFINED.values())
    homes = {name: [path for path in MODULES if name in DEFINED[path]] for name in names}
    several = {name for name, paths in homes.items() if len(paths) > 1 and not is_private(name)}
    assert several == set(SHARED), {name: shown(homes[name]) for name in several - set(SHARED)}


def test_the_name_of_a_module_means_nothing_elsewhere():
    """A private name may be that of a module in another folder."""
    taken = [
        f"{name} in {shown([path])}"
        for path, names in DEFINED.items()
        for name in names
        for module in MODULES
        if module != path and module.stem.strip("_") == name.strip("_")
        if module.parent == path.parent or not is_private(name)
    ]
    assert taken == []
