"""How far a reader has to go: `python tests/hops.py` follows the calls of the main functions.

A call is followed by name: of a function, or of a method that one class alone defines among the
modules that the caller imports, also by way of others. For `privatize`, a mechanism is the Laplace
mechanism. A class that is made leads to its `__call__`. The numbers compare versions of the
package. They are not the functions that a run enters. An annotation is no call, and neither is a
class that `isinstance` or `except` names. A local name is not that of a function elsewhere.
"""

import ast
import collections
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dpjax"
# What `mechanism(key, value)` and `mechanism._draw` are in the examples of the README.
LAPLACE = {
    "mechanism": "SensitivityMechanism.__call__",
    "unpaid_draw": "SensitivityMechanism.unpaid_draw",
    "_draw": "CoordinatewiseMechanism._draw",
    "_calibration": "AdditiveMechanism._calibration",
    "_lattice": "CoordinatewiseMechanism._lattice",
}
# The main functions, and whose methods they call without importing them.
STARTS = {"privatize": LAPLACE, "sample_sensitivity": {}, "clipped_gradients": {}}
# Methods that arrays and containers have too: whose they are cannot be told by name.
COMMON = set().union(*map(dir, (dict, list, str, set, tuple, int, object, Path))) | {
    *("value", "shape", "dtype", "norm", "at", "where", "sum", "add", "name", "dot", "mean"),
    *("sample", "take"),
}


def modules():
    """The syntax tree of every module, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: ast.parse(path.read_text()) for name, path in found.items()}


class Calls:
    """Which definition names which: a graph of (module, name)."""

    def __init__(self, dispatch):
        trees = modules()
        self.dispatch = dispatch
        self.defined = {name: dict(_definitions(tree)) for name, tree in trees.items()}
        self.imported = {name: _imports(tree, trees) for name, tree in trees.items()}
        self.methods = collections.defaultdict(list)
        for module, names in self.defined.items():
            for name in names:
                if "." in name:
                    self.methods[name.split(".")[1]].append((module, name))
        self.known = {name: self._known(name) for name in trees}

    def _known(self, module):
        """The modules that a module imports, also by way of others."""
        found, waiting = {module}, [module]
        while waiting:
            for whole, name in self.imported[waiting.pop()].values():
                target = whole if whole in self.defined else f"{whole}.{name}"
                if target in self.defined and target not in found:
                    found.add(target)
                    waiting.append(target)
        return found

    def of(self, module, name):
        """What a definition calls."""
        node = self.defined[module][name]
        if isinstance(node, ast.ClassDef):
            made = [f"{name}.{method}" for method in ("__init__", "__post_init__", "__call__")]
            return {(module, one) for one in made if one in self.defined[module]}
        found, local = set(), _local(node)
        for part in _executed(node):
            if isinstance(part, ast.Name) and part.id not in local:
                found |= self._named(module, part.id)
            elif isinstance(part, ast.Attribute):
                found |= self._attribute(module, name.split(".")[0], part)
            if isinstance(part, ast.Call) and getattr(part.func, "id", "") in self.dispatch:
                found |= self._dispatched(part.func.id)
        return found - {(module, name)}

    def _named(self, module, name):
        while name not in self.defined.get(module, {}):
            if name not in self.imported.get(module, {}):
                return set()
            module, name = self.imported[module][name]
        return {(module, name)}

    def _attribute(self, module, holder, part):
        owner = getattr(part.value, "id", None)
        if owner in ("self", "cls") and f"{holder}.{part.attr}" in self.defined[module]:
            return {(module, f"{holder}.{part.attr}")}
        if owner in self.imported[module]:
            whole = ".".join(filter(None, self.imported[module][owner]))
            if part.attr in self.defined.get(whole, {}):
                return {(whole, part.attr)}
        for known, name in self._named(module, owner) if owner else ():
            if f"{name}.{part.attr}" in self.defined[known]:
                return {(known, f"{name}.{part.attr}")}
        if part.attr in self.dispatch:
            return self._dispatched(part.attr)
        candidates = [] if part.attr in COMMON else self.methods[part.attr]
        candidates = [one for one in candidates if one[0] in self.known[module]]
        return set(candidates) if len(candidates) == 1 else set()

    def _dispatched(self, word):
        name = self.dispatch[word]
        return {found for found in self.methods[name.split(".")[1]] if found[1] == name}


def _definitions(tree):
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            methods = (x for x in node.body if isinstance(x, ast.FunctionDef))
            yield from ((f"{node.name}.{method.name}", method) for method in methods)


def _local(function):
    """The names of its arguments, variables and inner functions."""
    parts = list(ast.walk(function))[1:]
    stored = (x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    arguments = (x.arg for x in parts if isinstance(x, ast.arg))
    return {*stored, *arguments, *(x.name for x in parts if isinstance(x, ast.FunctionDef))}


def _executed(node):
    """A node with the nodes inside of it, without annotations and tests of a class."""
    yield node
    for name, part in ast.iter_fields(node):
        if name in ("annotation", "returns") or (
            name == "type" and isinstance(node, ast.ExceptHandler)
        ):
            continue
        parts = part if isinstance(part, list) else [part]
        if name == "args" and getattr(getattr(node, "func", 0), "id", "") == "isinstance":
            parts = parts[:1]
        for one in parts:
            if isinstance(one, ast.AST):
                yield from _executed(one)


def _imports(tree, trees):
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpjax"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = (
                    (whole, "") if whole in trees else (node.module, alias.name)
                )
    return found


def reached(calls, start):
    """The functions that a function leads to, and how many calls deep each of them is."""
    depth, waiting = {start: 0}, collections.deque([start])
    while waiting:
        here = waiting.popleft()
        for there in sorted(calls.of(*here) - set(depth)):
            depth[there] = depth[here] + 1
            waiting.append(there)
    return {
        (module, name): deep
        for (module, name), deep in depth.items()
        if not isinstance(calls.defined[module][name], ast.ClassDef)
    }


def main():
    """Prints a line for each of the main functions."""
    for name, dispatch in STARTS.items():
        calls = Calls(dispatch)
        ((module, _),) = calls._named("dpjax", name) or calls._named("dpjax.learning", name)
        found = reached(calls, (module, name))
        nodes = [calls.defined[module][one] for module, one in found]
        lines = sum(node.end_lineno - node.lineno + 1 for node in nodes)
        files = len({module for module, _ in found})
        print(
            f"{name}: {len(found)} functions in {files} files, {lines} lines,"
            f" {max(found.values())} calls deep"
        )


if __name__ == "__main__":
    main()
