"""Finds a definition of the package by its name, and a pattern of code in it, in any layout."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCKS = (ast.If, ast.With, ast.Try, ast.For, ast.While)


@functools.cache
def _places():
    """The file, first line and last line of every definition, by name."""
    places = {}
    for file in sorted((ROOT / "dpjax").rglob("*.py")):
        inside = {}
        for name, node in _named(ast.parse(file.read_text()).body):
            decorators = [x.lineno for x in getattr(node, "decorator_list", [])]
            inside.setdefault(name, (file, min([node.lineno, *decorators]) - 1, node.end_lineno))
        module = f"{file.parent.name}.{file.stem}"
        places[module] = [(file, 0, file.read_text().count("\n") + 1)]
        for name, place in inside.items():
            for known_as in (name, f"{file.stem}.{name}", f"{module}.{name}"):
                places.setdefault(known_as, []).append(place)
    return places


def _named(body, outer="", inside_function=False):
    """Functions and classes, nested ones too, and what modules and classes assign."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield outer + node.name, node
            local = inside_function or isinstance(node, ast.FunctionDef)
            yield from _named(node.body, f"{outer}{node.name}.", local)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not inside_function:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for y in targets for x in ast.walk(y) if isinstance(x, ast.Name)]
            yield from ((outer + name, node) for name in names)
        elif isinstance(node, _BLOCKS):
            yield from _named([*node.body, *getattr(node, "orelse", [])], outer, inside_function)


def replaced(where, old, new):
    """The file of a definition, and its text with a pattern in the definition replaced.

    Args:
        where: a function, `Class.method` or `CONSTANT`; preceded by its module where several
            modules define one: `_module.function`, `room._module.function`. Or `room._module`.
        old: code that occurs once in it; white space does not matter.
        new: code to put there. Lines after the first are indented like the line that it is in.
    """
    ((file, first, last),) = _places().get(where, [(None, 0, 0)])
    assert file is not None, f"no definition is called {where}"
    lines = file.read_text().splitlines(keepends=True)
    code = "".join(lines[first:last])
    (found,) = re.finditer(_pattern(old), code)
    line = code[code.rfind("\n", 0, found.start()) + 1 : found.start()]
    space = line[: len(line) - len(line.lstrip(" "))]
    text = new.replace("\n", f"\n{space}")
    changed = code[: found.start()] + text + code[found.end() :]
    return file.relative_to(ROOT), "".join([*lines[:first], changed, *lines[last:]])


def _pattern(code):
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", code)))
