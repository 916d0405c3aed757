"""Recognizes functions whose results never change, so that their traces can be cached.

JAX caches the trace of a function under the function object. It does not notice when a closed-over
value changes. So dpjax traces a function again at every call, which takes milliseconds. Two kinds
of functions need no second trace. The first kind is users' functions that call only functions of
JAX, close over no variables, and have no default arguments. The second kind is targets and oracles
of dpjax that consist of such functions and of numbers. All other functions count as unknown,
because a wrong guess could make a guarantee false.

The *contents* of a function are a hashable value: functions with equal contents compute the same
results.

A `Program` also has to keep its results. A jaxpr contains references to the arrays that its
function closes over. If a caller changed such an array, the program would compute something else,
but its fingerprint would stay the same. So a `Program` has copies of these arrays.

Without x64, JAX converts 64-bit NumPy arrays. It caches the result by the `id` of the array, as
long as a jaxpr refers to the array. So if the caller changed the array, later traces would use the
old numbers from this cache. To prevent this, a `Program` refers to a view of the caller's array,
not to the array itself.
"""

import builtins
import dataclasses
import dis
import enum
import fractions
import functools
import struct
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._tracing._host_code import codes_in
from dpjax._tracing._walks import Equation, aval, names, parts


def with_own_arrays(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns the jaxpr with copies of all its arrays, which no other code can change.

    A jaxpr or inner jaxpr without arrays is returned as the same object, because JAX's caches use
    jaxprs as keys.
    """
    return _Copies(_copy).of(program)


def with_views(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns the jaxpr with views of its NumPy arrays, which show later changes of the arrays."""
    return _Copies(_view).of(program)


class _Copies:
    """Copies the arrays in a jaxpr. An array that occurs several times is copied only once."""

    def __init__(self, copy: Callable[[Any], Any]):
        self._copy = copy
        self._made = dict[int, tuple[Any, Any]]()

    def of(self, value: Any) -> Any:
        """Returns `value`, with copies of all arrays in it.

        `value` is a jaxpr, an operation, one of its operands or parameters, or several of these. If
        nothing in it is copied, the result is the same object.
        """
        if isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
            return self._once(value, self._program)
        if isinstance(value, Equation):
            old = value.invars, *value.params.values()
            inputs, *parameters = new = self.of(old)
            named = dict(zip(value.params, parameters, strict=True))
            return value if new is old else value.replace(invars=inputs, params=named)
        if isinstance(value, jex.Literal):
            own = self.of(value.val)
            return value if own is value.val else jex.Literal(own, aval(value))
        if isinstance(value, (list, tuple)):
            items = [self.of(item) for item in value]
            if all(x is y for x, y in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, (np.ndarray, jax.Array)) and not _checks.is_traced(value):
            return self._once(value, self._copy)
        return value

    def _once(self, value: Any, copy: Callable[[Any], Any]) -> Any:
        if id(value) not in self._made:
            # A reference to the value keeps it alive, so that no other object can get the same
            # `id`.
            self._made[id(value)] = value, copy(value)
        return self._made[id(value)][1]

    def _program(self, program: Any) -> Any:
        jaxpr, constants = parts(program)
        old = jaxpr.eqns, jaxpr.outvars, constants
        equations, outputs, own = new = self.of(old)
        if new is old:
            return program
        copied = jaxpr.replace(eqns=equations, outvars=outputs)
        return jex.ClosedJaxpr(copied, own) if isinstance(program, jex.ClosedJaxpr) else copied


def _view(array: Any) -> Any:
    """Returns a view of a NumPy array.

    A view shares the memory of the array. But it is a different object, so JAX's cache of converted
    arrays has no entry for it.
    """
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        own = array.copy()
        own.flags.writeable = False
        return own
    # Arrays of keys need no copy, because they cannot be changed in place.
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    with jax.ensure_compile_time_eval():
        return jnp.array(array, copy=True)


_MODULES = jnp, jnp.fft, jnp.linalg, jax.lax, jax.lax.linalg, jax.nn, jax.random
_OF_JAX_ITSELF = jax.checkpoint, jax.grad, jax.jacfwd, jax.jacrev, jax.value_and_grad, jax.vmap
# Functions in the modules above that read files or settings, or whose results read files or
# settings when they are used.
_IMPURE = names(
    "array2string array_repr array_str finfo from_dlpack frombuffer fromfile get_printoptions",
    "iinfo load printoptions save savez set_printoptions",
)
# The types of functions, compiled functions, ufuncs and dtypes. Functions of type `jax.custom_jvp`
# are not included, because their derivative rules may be replaced.
_KINDS = type(jax.vmap), type(jnp.sin), type(jnp.add), type(jnp.float32)
_BUILTINS = names(
    "abs all any bool dict divmod enumerate float int isinstance len list map max min pow range",
    "reversed round sorted sum tuple zip",
)


# Functions that always compute the same results, by their `id` at the import of dpjax. If a
# function of a module is replaced later, the new function has another `id` and is not trusted.
_PURE = {
    id(value): value
    for value in (
        *_OF_JAX_ITSELF,
        *(getattr(builtins, name) for name in _BUILTINS),
        *(
            x
            for m in _MODULES
            for name, x in vars(m).items()
            if type(x) in _KINDS and name not in _IMPURE
        ),
    )
}
_ATTRIBUTES = frozenset(
    name
    for kind in (jax.Array, dict, list, tuple)
    for name in dir(kind)
    if not name.startswith("_")
)
# Modules of dpjax whose functions depend on nothing but their arguments.
_OURS = (
    *("dpjax._exact.", "dpjax.oracles.", "dpjax.sensitivity.", "dpjax.targets."),
    "dpjax.mechanisms._bernstein",
)
# Types of immutable values.
_CONSTANT = bool, int, float, str, bytes, types.NoneType, fractions.Fraction
# If a function uses a longer tuple, the contents of the function count as unknown, because reading
# the tuple could take longer than a trace.
_LONGEST = 16
# The name of a bytecode instruction ends with one of these suffixes if the instruction assigns an
# attribute or a global variable, imports a module, or defines a class. The suffixes cover all
# versions of Python.
_REFUSED = ("_GLOBAL", "_GLOBALS", "_NAME", "_ATTR", "_CLASS")


class _UnknownError(Exception):
    """Raised if a function uses something that may change later."""


def contents_of(function: Callable[..., object]) -> Hashable | None:
    """Returns the contents of a function; None if a later call may return a different result."""
    try:
        return _contents(function)
    except Exception:  # Reading attributes of a user's object may raise any error.
        return None


def functions_of_the_user(made: object) -> tuple[Callable[..., object], ...] | None:
    """Returns the user's functions inside an object of dpjax; None if a part is unknown.

    Only these functions may return a different result in a later call. The rest cannot change:
    objects of dpjax are frozen, and functions of dpjax never assign variables that they close over.
    """
    try:
        return tuple(_users_in(made, set()))
    except Exception:  # Reading attributes of a user's object may raise any error.
        return None


def _users_in(value: Any, seen: set[int]) -> Iterator[Callable[..., object]]:
    if id(value) in seen or id(value) in _PURE or _is_constant(value):
        return
    seen.add(id(value))
    kind = type(value)
    if kind in (tuple, frozenset):
        parts = value
    elif kind is types.MappingProxyType:
        parts = *value.keys(), *value.values()
    elif kind is types.FunctionType:
        if not _is_code_of(value, "dpjax.") or vars(value):
            yield value
            return
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        parts = *cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    elif kind is types.MethodType:
        parts = value.__self__, value.__func__
    elif kind is functools.partial:
        parts = value.func, *value.args, *value.keywords.values()
    elif dataclasses.is_dataclass(value) and kind.__module__.startswith("dpjax."):
        parts = [getattr(value, name) for name in _frozen_fields(value)]
    elif callable(value):
        yield value
        return
    else:
        raise _UnknownError
    for part in parts:
        yield from _users_in(part, seen)


def _is_constant(value: Any) -> bool:
    """Whether a value is a number, string, type or array that no code can change in place."""
    if isinstance(value, np.ndarray):
        return not value.flags.writeable and value.base is None
    if isinstance(value, jax.Array):
        return not _checks.is_traced(value)
    return type(value) in _CONSTANT or isinstance(value, (enum.Enum, np.generic, np.dtype, type))


def _is_code_of(function: types.FunctionType, packages: str | tuple[str, ...]) -> bool:
    """Whether a function is defined in a module whose name starts with one of `packages`."""
    name = function.__globals__.get("__name__")
    if not (isinstance(name, str) and name.startswith(packages)):
        return False
    return vars(sys.modules[name]) is function.__globals__


def _frozen_fields(value: Any) -> list[str]:
    """Returns the names of the fields of a frozen dataclass; raises an error for other objects."""
    names = [field.name for field in dataclasses.fields(value)]
    # An object that is not frozen may change. An additional attribute could replace a method.
    if not type(value).__dataclass_params__.frozen or not vars(value).keys() <= {*names}:
        raise _UnknownError
    return names


def _contents(value: Any) -> Hashable:
    kind = type(value)
    if kind in (bool, int, str, types.NoneType):
        return kind, value
    if kind is float:  # Floats are compared by their bits, because 0.0 == -0.0, and NaN != NaN.
        return kind, struct.pack("<d", value)
    if kind is tuple and len(value) <= _LONGEST and not any(type(x) is tuple for x in value):
        return kind, *map(_contents, value)
    if id(value) in _PURE:
        return "pure", id(value)
    if kind is types.FunctionType:
        return _of_ours(value) if _is_code_of(value, _OURS) else _of_users(value)
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(_OURS):
        return kind, *(_contents(getattr(value, name)) for name in _frozen_fields(value))
    raise _UnknownError


def _of_ours(function: types.FunctionType) -> Hashable:
    """Returns the contents of a function of dpjax: its code, default values and closure.

    Functions of dpjax never assign variables that they close over.
    """
    if vars(function) or function.__kwdefaults__:
        raise _UnknownError
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = function.__defaults__ or ()
    return function.__code__, tuple(map(_contents, defaults)), tuple(map(_contents, cells))


def _of_users(function: types.FunctionType) -> Hashable:
    code, variables = function.__code__, function.__globals__
    paths = _paths_in(code)
    if paths is None or vars(function) or function.__defaults__ or function.__kwdefaults__:
        raise _UnknownError
    found = list[Hashable]()
    for name, *attributes in paths:
        if name in variables and not attributes:
            # The user's module may assign another object to this global variable later.
            raise _UnknownError
        value = variables[name] if attributes else function.__builtins__[name]
        for attribute in attributes:
            if not any(value is module for module in (jax, *_MODULES)):
                raise _UnknownError
            value = getattr(value, attribute)
        # Examples are `jnp.pi` and `jnp.newaxis`.
        is_constant = isinstance(value, (float, types.NoneType))
        if id(value) not in _PURE and not is_constant:
            raise _UnknownError
        found.append(_contents(value))
    return code, tuple(found)


@functools.lru_cache(1024)
def _paths_in(code: types.CodeType) -> tuple[tuple[str, ...], ...] | None:
    """Returns the global variables that code reads, each with the attributes read from it.

    For example, code with `jnp.linalg.norm` gives ("jnp", "linalg", "norm"). The result is None if
    the code closes over a variable, assigns variables of an outer scope, imports modules, or
    defines classes.
    """
    if code.co_freevars:
        return None
    paths, others = list[tuple[str, ...]](), set[str]()
    for inner in codes_in(code):
        in_path = False
        for operation in dis.get_instructions(inner):
            name = operation.opname
            # Python 3.11 has a separate instruction LOAD_METHOD.
            if name in ("LOAD_ATTR", "LOAD_METHOD"):
                if in_path:
                    paths[-1] = *paths[-1], operation.argval
                else:
                    others.add(operation.argval)
                continue
            in_path = name == "LOAD_GLOBAL"
            if in_path:
                paths.append((operation.argval,))
            elif name.endswith(_REFUSED):
                return None
        if any(map(_has_no_order, inner.co_consts)):
            return None
    return tuple(paths) if others <= _ATTRIBUTES else None


def _has_no_order(constant: object) -> bool:
    """Whether a constant contains a set. Equal sets may be iterated in different orders."""
    if isinstance(constant, tuple):
        return any(map(_has_no_order, constant))
    return isinstance(constant, frozenset)
