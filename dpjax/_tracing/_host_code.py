"""`HostCode`: a copy of a Python function, and a fingerprint of everything it can reach.

A Python function depends on closures, defaults, globals, modules, classes and objects. All of these
may change, and may differ between processes. So when a target is traced, its host function is
pickled by value, together with all user code and values that it can reach. Every call, in any
process, starts from a fresh copy. Python and installed packages are not copied. They are identified
by name and version.

To compute the fingerprint, values are reduced to their parts as in pickling, and the parts are
hashed. Values that pickle cannot reduce, such as locks, generators and weak references, are
refused. Values that pickle would reduce wrongly, such as open files and pointers, are refused, too.
"""

import dataclasses
import dis
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import pathlib
import pickle
import platform
import sys
import types
import typing
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NoReturn

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import PyTree

PROTOCOL = 4
_PYTHON = pathlib.PurePath(os.__file__).parent
# Entries in the namespace of a class that do not affect its behavior. They are used for
# documentation, debugging and pickling only.
_NO_BEHAVIOR = frozenset(
    (
        *("__doc__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("__firstlineno__", "__static_attributes__", "__slotnames__"),
    )
)
_POINTERS = ("ctypes", "_ctypes", "_cffi_backend")
Cached: Any = type(functools.cache(len))


class UnknownCodeError(TypeError):
    """Raised for code on the host that cannot have a fingerprint."""


@functools.cache
def _distributions(package: str) -> list[str]:
    """Returns the names of the installed distributions that contain a package."""
    return sorted(set(metadata.packages_distributions().get(package, ())))


class HostCode:
    """A function on the host, with a copy of it from the time of tracing.

    Attributes:
        fingerprint: a hash. Functions with equal fingerprints compute the same results.
        run: the function that is called, in any process: the copy, or the original function if the
            user gave a version.
    """

    def __init__(
        self,
        function: Callable[[PyTree], PyTree],
        version: str | None = None,
        facts: Callable[[], object] | None = None,
    ):
        """Copies a function and computes its fingerprint.

        Args:
            function: the user's function.
            version: a string that the user changes whenever the function changes. It replaces the
                fingerprint of the code.
            facts: returns other values on which the function depends. It may raise an error to
                refuse the function.
        """
        self._function, self._version, self._facts = function, version, facts
        encoded = self._encoded()
        self.fingerprint = encoded.digest()
        self.run = function if version is not None else _Frozen(function, encoded.packages)

    def check_unchanged(self) -> None:
        """Raises an error if the function has changed since it was copied."""
        if self._encoded().digest() != self.fingerprint:
            raise ValueError(
                "a function on the host, or a value that it can reach, has changed since the target"
                " was traced: make the target again"
            )

    def _encoded(self) -> "_Encoder":
        facts = None if self._facts is None else self._facts()
        named = self._version is not None
        return _encoded((("version", self._version) if named else self._function, facts))


class HostCall:
    """The Python function of a JAX callback that runs a target on the host.

    dpjax recognizes its own callbacks by this class.

    Attributes:
        code: the function that the callback runs.
    """

    code: HostCode


class _Frozen:
    """A pickled function. Every call checks package versions, and runs a fresh copy."""

    def __init__(self, function: Callable[[PyTree], PyTree], packages: dict[str, str]):
        file = io.BytesIO()
        pickler()(file, protocol=PROTOCOL).dump(function)
        # The bytes are stored in an array, because joblib passes large arrays to its processes by a
        # shared file.
        self._pickled = np.frombuffer(file.getvalue(), np.uint8)
        self._packages = packages

    def __call__(self, argument: PyTree) -> PyTree:
        for name, version in self._packages.items():
            found = _version_of(name)
            if found != version:
                raise RuntimeError(
                    f"{name} had version {version} when the target was traced, but the process that"
                    f" runs it has version {found}: install the same version everywhere"
                )
        return pickle.loads(self._pickled.data)(argument)


def fingerprint(value: object) -> str:
    """Returns a 128-bit hash of a value and everything it can reach, equal in every process."""
    return _encoded(value).digest()


def _encoded(value: object) -> "_Encoder":
    encoder = _Encoder({}, [], {"python": _version_of("python")})
    try:
        encoder.encode(value)
    except UnknownCodeError:
        raise
    except Exception as error:  # Reducing a user's object to its parts may raise any error.
        encoder.refuse(f"{type(error).__name__}: {error}")
    return encoder


def _version_of(package: str) -> str:
    if package == "python":
        return platform.python_version()
    version = getattr(importlib.import_module(package), "__version__", None)
    if version is not None:
        return str(version)
    return ", ".join(f"{name} {metadata.version(name)}" for name in _distributions(package))


@dataclasses.dataclass(eq=False)
class _Encoder:
    """Hashes values, after reducing them to their parts as pickle does.

    A mutable object gets a number when it first occurs. Later occurrences are encoded by this
    number. So recursive objects can be hashed, and two references to one list differ from two equal
    lists.

    Attributes:
        numbers: the numbers of mutable objects, by `id`.
        path: the path to the current value, for messages.
        packages: the installed packages that have occurred, with their versions.
        kept: the objects that have numbers. They are kept alive, so that no new object gets the
            same `id`.
    """

    numbers: dict[int, int]
    path: list[str]
    packages: dict[str, str]
    kept: list[object] = dataclasses.field(default_factory=list)
    sha256: "hashlib._Hash" = dataclasses.field(default_factory=hashlib.sha256)

    def digest(self) -> str:
        """Returns a hash of all values so far, and of the versions of the packages they use."""
        sha256 = self.sha256.copy()
        sha256.update(repr(sorted(self.packages.items())).encode())
        return sha256.hexdigest()[:32]

    def encode(self, value: Any) -> None:
        """Hashes a value, with a tag for its type, and its length if it has one."""
        kind = type(value)
        if value is None or kind in (bool, float, complex):
            self._text("atom", repr(value))
        elif kind is int:
            self._text("int", hex(value))
        elif kind is str:
            self._text("str", value)
        elif kind is bytes:
            self._bytes("bytes", value)
        elif kind is tuple:
            self._sequence("tuple", value)
        elif kind is types.CodeType:
            self._code(value)
        elif kind in (set, frozenset):
            self._set(value)
        elif isinstance(value, np.dtype):
            self._dtype(value)
        elif not self._is_new(value) or kind is Imports:
            return
        elif kind is list:
            self._sequence("list", value)
        elif kind is dict:
            self._dict(value)
        elif kind is types.ModuleType and is_installed(value.__name__):
            self._name(value.__name__, "")
        else:
            self._parts(value)

    def _parts(self, value: Any) -> None:
        try:
            parts: Any = self._reduced(value)
        except UnknownCodeError as error:
            self.refuse(str(error))
        self.kept.append(parts)
        if parts is NotImplemented:
            self._name(value.__module__, value.__qualname__)
        elif isinstance(parts, str):
            self._name(pickle.whichmodule(value, parts), parts)  # type: ignore[attr-defined]
        else:
            function, arguments, state, items, pairs = (*parts, None, None, None)[:5]
            self._text("object", "")
            self.encode(function)
            self.encode(arguments)
            self.encode(state)
            self._sequence("items", [*(items or ())])
            self._sequence("pairs", [*(pairs or ())])

    def _reduced(self, value: Any) -> Any:
        parts = pickler()(io.BytesIO(), protocol=PROTOCOL).reducer_override(value)
        if parts is not NotImplemented or isinstance(value, (type, types.FunctionType)):
            return parts
        known = pickler().dispatch_table.get(type(value))
        return value.__reduce_ex__(PROTOCOL) if known is None else known(value)

    def _name(self, module: str, name: str) -> None:
        """Hashes a name in an installed module, which every process can import."""
        if not is_installed(module):
            self.refuse(f"{name} of the module {module}, which is not an installed package")
        package = module.partition(".")[0]
        if package not in sys.stdlib_module_names:
            self.packages[package] = _version_of(package)
        self._text("name", f"{module}:{name}")

    def _code(self, code: types.CodeType) -> None:
        self._text("code", "")
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
        self.encode((code.co_code, code.co_consts, code.co_exceptiontable, counts, names))

    def _dtype(self, dtype: np.dtype) -> None:
        """Hashes a dtype in a new encoder, so that equal dtypes have equal hashes.

        `self` would give a number to the dtype object. Then a second reference to the object would
        be hashed differently from an equal dtype object.
        """
        part = _Encoder({}, self.path, self.packages)
        part._parts(dtype)
        self._bytes("dtype", part.sha256.digest())

    def _dict(self, value: dict[Any, Any]) -> None:
        self._text("dict", str(len(value)))
        for key, item in value.items():
            self.encode(key)
            self.path.append(str(key) if isinstance(key, str) else type(key).__name__)
            self.encode(item)
            self.path.pop()

    def _set(self, value: Any) -> None:
        """Hashes the sorted hashes of the items of a set.

        Iteration over a set would give an order that differs between processes.
        """
        parts = []
        for item in value:
            part = _Encoder(dict(self.numbers), self.path, self.packages)
            part.encode(item)
            self.kept.append(part)
            parts.append(part.sha256.digest())
        self._bytes(type(value).__name__, b"".join(sorted(parts)))

    def _sequence(self, tag: str, items: Any) -> None:
        self._text(tag, str(len(items)))
        for item in items:
            self.encode(item)

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self.numbers
        number = self.numbers.setdefault(id(value), len(self.numbers))
        self.kept.append(value)
        if not new:
            self._text("again", str(number))
        return new

    def _text(self, tag: str, text: str) -> None:
        self._bytes(tag, text.encode("utf-8", "surrogatepass"))

    def _bytes(self, tag: str, data: Any) -> None:
        self.sha256.update(b"%s %d:" % (tag.encode(), len(data)))
        self.sha256.update(data)

    def refuse(self, what: str) -> NoReturn:
        where = ".".join(self.path)
        raise UnknownCodeError(
            "code on the host must have a fingerprint, so that a release can check that it runs "
            "the same code as the sampler did. But the code uses a value without a fingerprint: "
            f"{where + ', ' if where else ''}{what}. "
            "Pass the values that the function needs by functools.partial, or pass a version "
            'that you change whenever the code changes: targets.host(..., version="name 1.2")'
        )


# Pickling by value.
#
# cloudpickle pickles functions of a module by reference. Another process would then import the
# module, and would not see values that were assigned after the import. So here only functions of
# Python and of installed packages are pickled by reference.
#
# cloudpickle's public `register_pickle_by_value` is not enough, and pickled bytes cannot serve as a
# fingerprint. `tests/tracing/test_public_cloudpickle.py` has an example for each reason:
#
# - A pickled class contains a random number, and a pickled set has no defined order.
# - Pickled code includes its file and line numbers, so comments would change the fingerprint.
# - Unpickling a class in the same process returns the original class, and resets its attributes.
# - A module is pickled as a whole. This fails if it contains a lock, even if no function uses it.
# - A pickled JAX array becomes a JAX array. A JAX callback that uses it would wait forever.


@functools.cache
def pickler() -> Any:
    """Returns a subclass of cloudpickle's pickler that changes its rules for some types."""
    cloudpickle = _checks.extra("cloudpickle", "host")

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.ModuleType) and not is_installed(obj.__name__):
                raise UnknownCodeError(
                    f"the module {obj.__name__}, which is in a closure, a default or another "
                    "value, but must be a global variable"
                )
            if isinstance(obj, types.FunctionType):
                # NotImplemented makes pickle store the module and the name of the function.
                # cloudpickle might store its code instead.
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
                # JAX arrays become NumPy arrays, because a JAX callback must not use JAX.
                return np.asarray(obj).__reduce_ex__(PROTOCOL)
            if isinstance(obj, io.TextIOWrapper):
                raise UnknownCodeError("an open file")
            if any(base.__module__ in _POINTERS for base in inspect.getmro(type(obj))):
                raise UnknownCodeError(f"an object of {type(obj).__module__} contains addresses")
            return cloudpickle.Pickler.reducer_override(self, obj)

    return Pickler


def _function_apart(function: types.FunctionType) -> tuple[object, ...]:
    codes = list(codes_in(function.__code__))
    _refuse_imports(function, codes)
    names = {name for code in codes for name in code.co_names}
    variables = function.__globals__
    operations = [x for code in codes for x in dis.get_instructions(code)]
    used = sorted(
        {x.argval for x in operations if "GLOBAL" in x.opname or x.opname == "LOAD_NAME"}
        & variables.keys()
    )
    # The code may access a submodule as an attribute of an installed package. `imports` contains
    # each loaded submodule of these packages whose name occurs in the code.
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
    """Modules that a process must import before a call. Fingerprints ignore them."""

    modules: list[str]


def _contents(cell: types.CellType) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # The cell is still empty, because its variable has no value yet.
        return ()


def _class_apart(cls: type) -> tuple[object, ...]:
    """Reduces a class to its parts. Unlike with cloudpickle, each unpickling makes a new class."""
    cloudpickle = _checks.extra("cloudpickle.cloudpickle", "host")
    parts: Any = cloudpickle._dynamic_class_reduce(cls)
    make, arguments, (namespace, slots), *rest = parts
    untracked = (*arguments[:-2], None, arguments[-1])
    kept = {name: namespace[name] for name in namespace if name not in _NO_BEHAVIOR}
    return make, untracked, (kept, slots), *rest


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    return functools.lru_cache(**parameters)(function)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and of all functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def _refuse_imports(function: types.FunctionType, codes: list[types.CodeType]) -> None:
    """Refuses functions that import modules of the user: these cannot be copied."""
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
    """Replaces a module of the user by a namespace with only the entries in `names`."""
    if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
        return value
    if id(value) not in made:
        excerpt = made[id(value)] = types.SimpleNamespace()
        for name in sorted(names & vars(value).keys()):
            setattr(excerpt, name, _excerpt(vars(value)[name], names, made))
    return made[id(value)]


def _is_importable(value: object) -> bool:
    """Whether a function or class can be imported by its name from an installed module."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or not is_installed(module):
        return False
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module]) is value
    except (AttributeError, KeyError):
        return False


@functools.lru_cache(maxsize=1024)
def _is_recorded(file: str) -> bool:
    """Whether a file is listed in the RECORD of an installed package.

    This also recognizes packages that `pip install --target` has installed in any folder. The
    RECORD of an editable package does not list its files, so these files do not count as installed.
    """
    path = pathlib.PurePath(file)
    return any(
        path.relative_to(folder).as_posix() in map(str, found.files or ())
        for folder in path.parents
        for found in metadata.distributions(path=[str(folder)])
        if found.read_text("RECORD")
    )


def is_installed(name: str) -> bool:
    """Whether a module belongs to Python, to dpjax, or to an installed package."""
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
