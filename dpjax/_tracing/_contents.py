"""What a function is made of, where none of it can change without being seen.

JAX keeps the trace of a function by its identity, and would hide that something it closes over is
another by now. So programs are traced anew at every call, which takes milliseconds. But many
functions are made of code, numbers and functions of JAX alone: with the same contents they are
traced to the same program. Whatever else a function reaches, such as a list, an array, an object or
a function of NumPy, leaves its contents unknown, and it is traced anew.
"""

import builtins
import dataclasses
import dis
import functools
import itertools
import math
import struct
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

_ATOMS = frozenset((bool, int, str, bytes, type(None), type(...)))
_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float"),
        *("frozenset", "int", "isinstance", "len", "list", "map", "max", "min", "pow", "range"),
        *("reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"),
        *("IndexError", "KeyError", "TypeError", "ValueError"),
    )
)
_SCALARS = frozenset(np.sctypeDict.values())
# Functions of JAX that read or do more than their arguments say.
_IMPURE = frozenset(
    (
        *("clear_caches", "default_backend", "devices", "device_count", "fromfile", "live_arrays"),
        *("load", "local_device_count", "local_devices", "process_count", "process_index"),
        *("save", "savez", "update"),
    )
)
# Code of ours that computes with what it is given, and with nothing else.
_OURS = (
    *("dpjax._exact.", "dpjax.oracles.", "dpjax.sensitivity.", "dpjax.targets."),
    "dpjax.mechanisms._bernstein_polynomial",
)

_Path = tuple[str, ...]


class _UnknownError(Exception):
    """Raised for what may change."""


def contents_of(function: Callable[..., object]) -> Hashable | None:
    """A value that functions share only if they compute the same, or None if that is not known."""
    try:
        return _contents(function, ())
    except (_UnknownError, RecursionError):
        return None


def _contents(value: Any, around: tuple[types.FunctionType, ...]) -> Hashable:
    """Of a value that was found in these functions."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind in (float, complex):  # By their bits: zeros have signs, and so has NaN.
        return kind, struct.pack("<2d", value.real, value.imag)
    if kind is tuple:
        return kind, *(_contents(x, around) for x in value)
    if kind is functools.partial:
        parts = value.func, value.args, *sorted({**value.keywords, **vars(value)}.items())
        return kind, *(_contents(x, around) for x in parts)
    if _is_of_jax(kind, value) or _is_of_python(kind, value):
        return kind, value
    if kind is types.FunctionType:
        return _of_function(value, around)
    if dataclasses.is_dataclass(value) and _is_ours(kind.__module__) and _is_frozen(kind):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return kind, *(_contents(x, around) for x in fields)
    raise _UnknownError


def _of_function(function: types.FunctionType, around: tuple[types.FunctionType, ...]) -> Hashable:
    if function in around:
        return "again", around.index(function)
    code, variables = function.__code__, function.__globals__
    closure = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    parts: list[object] = [function.__defaults__]
    parts += sorted((function.__kwdefaults__ or {}).items())
    parts += sorted(vars(function).items())
    if _is_ours(variables.get("__name__")):
        parts += map(_in_cell, closure.values())
    else:
        for name, *attributes in _paths(code):
            value = _in_cell(closure[name]) if name in closure else _global(variables, name)
            parts.append(_attribute(value, attributes))
    return code, *(_contents(x, (*around, function)) for x in parts)


def _in_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # Nothing has been assigned yet.
        raise _UnknownError from None


def _global(variables: dict[str, Any], name: str) -> object:
    return variables[name] if name in variables else getattr(builtins, name, _UnknownError)


def _attribute(value: object, names: list[str]) -> object:
    """What stands in a module, or in a module inside of it, under these names."""
    for name in names:
        if not isinstance(value, types.ModuleType):
            break
        value = getattr(value, name, _UnknownError)
    return value


def _paths(code: types.CodeType) -> tuple[_Path, ...]:
    paths = _paths_in(code)
    if paths is None:
        raise _UnknownError
    return paths


@functools.lru_cache(1024)
def _paths_in(code: types.CodeType) -> tuple[_Path, ...] | None:
    """The variables from outside that code reads, and which of their attributes.

    None if it imports, defines a class, or writes to anything outside.
    """
    found, outside = set[_Path](), set(code.co_freevars)
    for inner in _codes(code):
        operations = list(dis.get_instructions(inner))
        for i, operation in enumerate(operations):
            name, variable = operation.opname, operation.argval
            if name == "LOAD_GLOBAL" or ("DEREF" in name and variable in outside):
                after = itertools.takewhile(_takes_attribute, operations[i + 1 :])
                found.add((variable, *(x.argval for x in after)))
            elif "GLOBAL" in name or name.endswith(("_NAME", "_CLASS")):
                return None
            if name.startswith(("STORE", "DELETE")) and (
                "ATTR" in name or ("DEREF" in name and variable in outside)
            ):
                return None
    return tuple(sorted(found))


def _takes_attribute(operation: dis.Instruction) -> bool:
    return operation.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_of_jax(kind: type, value: Any) -> bool:
    """Whether a module of JAX has a function, a class or a dtype under its name."""
    theirs = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
    if not (theirs or kind is types.FunctionType or issubclass(kind, type)):
        return False  # An object of the user's may answer any question.
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not (isinstance(module, str) and isinstance(name, str) and module.startswith("jax.")):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value and name not in _IMPURE


def _is_of_python(kind: type, value: Any) -> bool:
    """Whether it is a pure function or a type of Python's or NumPy's."""
    if kind is types.BuiltinFunctionType:
        return value.__self__ is math or value in _BUILTINS
    return issubclass(kind, type) and (value in _BUILTINS or value in _SCALARS)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.startswith(_OURS)


def _is_frozen(kind: type) -> bool:
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen
