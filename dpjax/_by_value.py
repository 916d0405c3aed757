"""Functions pickled by value, with all that they reach of the user's.

cloudpickle pickles what a module holds by reference, and other processes import it anew, without
what has been assigned since. Here that is done for Python and for installed packages only.

Its `register_pickle_by_value` alone does not do. It gives every class another random number in
every process, so fingerprints would differ. A copy, when it is unpickled, finds the class that it
was made of, and sets its attributes back. Sets keep the order of the process, code its file and
lines, and arrays of JAX stay such, for which code that JAX calls back would wait for ever.
"""

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
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpjax import _checks

PROTOCOL = 4
_PYTHON = pathlib.Path(os.__file__).parent
# In the namespace of a class: what readers and debuggers look at, and what pickle itself keeps.
_NO_BEHAVIOR = frozenset(
    (
        *("__doc__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__", "__slotnames__"),
    )
)
_POINTERS = ("ctypes", "_ctypes", "_cffi_backend")


class UnknownCodeError(TypeError):
    """Raised for code on the host that has no fingerprint."""


@functools.cache
def pickler() -> Any:
    """cloudpickle, but for what `_taken_apart` decides."""
    cloudpickle = _checks.extra("cloudpickle", "host")

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            parts = _taken_apart(obj)
            return cloudpickle.Pickler.reducer_override(self, obj) if parts is None else parts

    return Pickler


def _taken_apart(value: Any) -> Any:
    """What to pickle a value as; None to leave that to cloudpickle."""
    if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
        raise UnknownCodeError(f"the module {value.__name__} as a whole")
    if isinstance(value, (types.FunctionType, type)) and _is_importable(value):
        return NotImplemented if isinstance(value, types.FunctionType) else None
    if isinstance(value, types.FunctionType):
        return _function_apart(value)
    if isinstance(value, type) and value.__module__ != "builtins":
        return _class_apart(value)
    if isinstance(value, functools._lru_cache_wrapper) and not _is_importable(value):
        return _cached, (value.__wrapped__, value.cache_parameters())
    if isinstance(value, typing.TypeVar):
        return typing.TypeVar, (value.__name__,)
    if isinstance(value, jax.Array):
        # Code that JAX calls back must not use JAX.
        return np.asarray(value).__reduce_ex__(PROTOCOL)
    if isinstance(value, io.TextIOWrapper):
        raise UnknownCodeError("an open file")
    if any(base.__module__ in _POINTERS for base in inspect.getmro(type(value))):
        raise UnknownCodeError(f"an object of {type(value).__module__}, which holds addresses")
    return None


def _function_apart(function: types.FunctionType) -> Any:
    codes = list(_codes(function.__code__))
    _refuse_imports(function, codes)
    names = {name for code in codes for name in code.co_names}
    variables = function.__globals__
    used = sorted(set().union(*map(_global_names, codes)) & variables.keys())
    cells = function.__closure__ or ()
    state = {
        "imports": Imports(_submodules([variables[name] for name in used], names)),
        "globals": {name: _excerpt(variables[name], names, {}) for name in used},
        "closure": [_contents(cell) for cell in cells],
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
        "attributes": dict(vars(function)),
    }
    made_from = (function.__code__, function.__module__, function.__qualname__, len(cells))
    return _new_function, made_from, state, None, None, _fill_function


def _new_function(code: Any, module: str, qualname: str, cells: int) -> types.FunctionType:
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


class Imports:
    """Modules that a process has to import, which is no part of what a function is."""

    def __init__(self, modules: list[str]):
        self.modules = modules


def _submodules(values: list[Any], names: set[str]) -> list[str]:
    """What is imported of packages, and may be looked up there by these names."""
    modules = [value for value in values if isinstance(value, types.ModuleType)]
    packages = tuple(f"{x.__name__}." for x in modules if is_installed(x.__name__))
    found = [module for module in list(sys.modules) if module.startswith(packages)]
    return [module for module in found if names.issuperset(module.split(".")[1:])]


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # Nothing has been assigned yet.
        return ()


def _class_apart(cls: type) -> Any:
    """As cloudpickle does it, but the copy is a class of its own, and not the one that is there."""
    cloudpickle = _checks.extra("cloudpickle.cloudpickle", "host")
    parts: Any = cloudpickle._dynamic_class_reduce(cls)
    make, arguments, (namespace, slots), *rest = parts
    untracked = (*arguments[:-2], None, arguments[-1])
    kept = {name: namespace[name] for name in namespace if name not in _NO_BEHAVIOR}
    return make, untracked, (kept, slots), *rest


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _global_names(code: types.CodeType) -> set[str]:
    operations = dis.get_instructions(code)
    return {x.argval for x in operations if "GLOBAL" in x.opname or x.opname == "LOAD_NAME"}


def _refuse_imports(function: types.FunctionType, codes: list[types.CodeType]) -> None:
    """Refuses imports, inside of a function, of modules that each process imports for itself."""
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


def _excerpt(value: Any, names: set[str], made: dict[int, Any]) -> Any:
    """In the place of a module of the user's, what a function may look up there, by these names."""
    if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
        return value
    if id(value) not in made:
        excerpt = made[id(value)] = types.SimpleNamespace()
        for name in sorted(names & vars(value).keys()):
            setattr(excerpt, name, _excerpt(vars(value)[name], names, made))
    return made[id(value)]


def _is_importable(value: Any) -> bool:
    """Whether a function or class is what an installed module has under its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or not is_installed(module):
        return False
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module]) is value
    except (AttributeError, KeyError):
        return False


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
    return _lies_in_packages(file) or (
        file in (None, "built-in", "frozen") and top in sys.stdlib_module_names
    )


@functools.cache
def _lies_in_packages(file: str | None) -> bool:
    path = pathlib.Path(file or "")
    packages = {"site-packages", "dist-packages"}
    return _PYTHON in path.parents or not packages.isdisjoint(path.parts)
