"""Functions pickled by value, with all code and values of the user that they reach.

cloudpickle pickles functions of modules by reference. Another process imports the module anew, and
misses values that were assigned later. Here only Python and installed packages are left to imports.

The public `register_pickle_by_value` of cloudpickle is not enough, and pickled bytes are no
fingerprint. `tests/tracing/test_public_cloudpickle.py` has an example for each reason:

- Every class has another random number in every process, and sets keep its order.
- Code keeps its file and lines, so a comment would count.
- A copy that is unpickled finds the class that it was made of, and sets its attributes back.
- A module is pickled whole: a lock that a function does not name stands in its way.
- Arrays of JAX stay arrays of JAX, and code that JAX calls back would wait for them for ever.
"""

import dataclasses
import dis
import functools
import importlib.util
import inspect
import io
import os
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax
import numpy as np

from dpjax._core import _checks

PROTOCOL = 4
_PYTHON = pathlib.PurePath(os.__file__).parent
# Entries of the namespace of a class for readers and debuggers, and those that pickle keeps there.
_NO_BEHAVIOR = frozenset(
    (
        *("__doc__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__", "__slotnames__"),
    )
)
_POINTERS = ("ctypes", "_ctypes", "_cffi_backend")
Cached: Any = type(functools.cache(len))


class UnknownCodeError(TypeError):
    """Raised for code on the host that has no fingerprint."""


@functools.cache
def pickler() -> Any:
    """The pickler of cloudpickle, which takes some values apart in another way."""
    cloudpickle = _checks.extra("cloudpickle", "host")

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.ModuleType) and not is_installed(obj.__name__):
                raise UnknownCodeError(f"the module {obj.__name__} as a whole")
            if isinstance(obj, types.FunctionType):
                # pickle itself takes functions by reference, and cloudpickle might not.
                return NotImplemented if _is_importable(obj) else _function_apart(obj)
            if isinstance(obj, type):
                if obj.__module__ == "builtins" or _is_importable(obj):
                    return cloudpickle.Pickler.reducer_override(self, obj)
                return _class_apart(obj)
            if isinstance(obj, Cached) and not _is_importable(obj):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            if isinstance(obj, typing.TypeVar):
                return typing.TypeVar, (obj.__name__,)
            if isinstance(obj, jax.Array):
                # Code that JAX calls back must not use JAX.
                return np.asarray(obj).__reduce_ex__(PROTOCOL)
            if isinstance(obj, io.TextIOWrapper):
                raise UnknownCodeError("an open file")
            if any(base.__module__ in _POINTERS for base in inspect.getmro(type(obj))):
                raise UnknownCodeError(f"an object of {type(obj).__module__} holds addresses")
            return cloudpickle.Pickler.reducer_override(self, obj)

    return Pickler


def _function_apart(function: types.FunctionType) -> tuple[object, ...]:
    codes = list(_codes(function.__code__))
    _refuse_imports(function, codes)
    names = {name for code in codes for name in code.co_names}
    variables = function.__globals__
    operations = [x for code in codes for x in dis.get_instructions(code)]
    used = sorted(
        {x.argval for x in operations if "GLOBAL" in x.opname or x.opname == "LOAD_NAME"}
        & variables.keys()
    )
    # Submodules of packages, which the function may look up there by these names.
    modules = [variables[x] for x in used if isinstance(variables[x], types.ModuleType)]
    packages = tuple(f"{x.__name__}." for x in modules if is_installed(x.__name__))
    inside = [module for module in list(sys.modules) if module.startswith(packages)]
    imports = [module for module in inside if names.issuperset(module.split(".")[1:])]
    cells = function.__closure__ or ()
    state = {
        "imports": Imports(imports),
        "globals": {name: _excerpt(variables[name], names, {}) for name in used},
        "closure": [_contents(cell) for cell in cells],
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
        "attributes": dict(vars(function)),
    }
    made_from = (function.__code__, function.__module__, function.__qualname__, len(cells))
    return _new_function, made_from, state, None, None, _fill_function


def _new_function(
    code: types.CodeType, module: str, qualname: str, cells: int
) -> types.FunctionType:
    variables = {"__name__": module, "__builtins__": __builtins__}
    closure = tuple(types.CellType() for _ in range(cells))
    function = types.FunctionType(code, variables, closure=closure)
    function.__qualname__ = qualname
    return function


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for module in state["imports"].modules:
        importlib.import_module(module)
    function.__globals__.update(state["globals"])
    for cell, contents in zip(function.__closure__ or (), state["closure"], strict=True):
        if contents:
            (cell.cell_contents,) = contents
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["keyword defaults"]
    vars(function).update(state["attributes"])


@dataclasses.dataclass(frozen=True, eq=False)
class Imports:
    """Modules that a process has to import; no part of a function's fingerprint."""

    modules: list[str]


def _contents(cell: types.CellType) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # Nothing has been assigned yet.
        return ()


def _class_apart(cls: type) -> tuple[object, ...]:
    """As cloudpickle does it, but the copy is a new class, even where the original exists."""
    cloudpickle = _checks.extra("cloudpickle.cloudpickle", "host")
    parts: Any = cloudpickle._dynamic_class_reduce(cls)
    make, arguments, (namespace, slots), *rest = parts
    untracked = (*arguments[:-2], None, arguments[-1])
    kept = {name: namespace[name] for name in namespace if name not in _NO_BEHAVIOR}
    return make, untracked, (kept, slots), *rest


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    return functools.lru_cache(**parameters)(function)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _refuse_imports(function: types.FunctionType, codes: list[types.CodeType]) -> None:
    """Refuses imports inside of a function, but for installed modules: they cannot be frozen."""
    for code in codes:
        operations = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
        for before, operation in zip(operations, operations[2:], strict=False):
            if operation.opname == "IMPORT_NAME":
                relative = before.argval > 0
                name = function.__globals__.get("__package__") if relative else operation.argval
                if not is_installed(name or ""):
                    raise UnknownCodeError(
                        f"{operation.argval}, imported inside of {function.__qualname__}: import it"
                        " at the top of the file"
                    )


def _excerpt(value: object, names: set[str], made: dict[int, object]) -> object:
    """A value; for a module of the user, only the entries with these names."""
    if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
        return value
    if id(value) not in made:
        excerpt = made[id(value)] = types.SimpleNamespace()
        for name in sorted(names & vars(value).keys()):
            setattr(excerpt, name, _excerpt(vars(value)[name], names, made))
    return made[id(value)]


def _is_importable(value: object) -> bool:
    """Whether an installed module has a function or class under its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or not is_installed(module):
        return False
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module]) is value
    except (AttributeError, KeyError):
        return False


@functools.lru_cache(maxsize=1024)
def _is_recorded(file: str) -> bool:
    """Whether an installer put a file where it is, as `pip install --target` does in any folder.

    An editable package is none: its record does not name the files that somebody edits.
    """
    path = pathlib.PurePath(file)
    return any(
        path.relative_to(folder).as_posix() in map(str, found.files or ())
        for folder in path.parents
        for found in metadata.distributions(path=[str(folder)])
        if found.read_text("RECORD")
    )


def is_installed(name: str) -> bool:
    """Whether a module is a part of Python, of dpjax, or of an installed package."""
    top = name.partition(".")[0]
    if top in ("dpjax", "__main__"):
        return top == "dpjax"
    module = sys.modules.get(name) or sys.modules.get(top)
    if module is not None:
        file = getattr(module, "__file__", None)
    else:
        file = getattr(importlib.util.find_spec(top) if top else None, "origin", None)
    path = pathlib.PurePath(file or "")
    if _PYTHON in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    if file in (None, "built-in", "frozen"):
        return top in sys.stdlib_module_names
    return _is_recorded(file)
