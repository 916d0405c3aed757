"""Code on the host: whatever it reaches counts, and is frozen; what cannot be is refused."""

import collections
import ctypes
import dataclasses
import enum
import functools
import importlib
import operator
import sys
import threading
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from dpjax._tracing._host_code import HostCode

SCALE = 1.0
TABLE = {"scale": 1.0}


def by_a_global(x):
    return x * SCALE


def by_a_global_of_a_helper(x):
    return by_a_global(x)


def in_a_lambda(x):
    return sum(map(lambda v: v * SCALE, [x]))


def in_a_generator(x):
    return sum(v * SCALE for v in [x])


def by_a_global_dict(x):
    return x * TABLE["scale"]


class Model:
    shared = 1.0

    def __init__(self, scale=1.0):
        self.scale = scale

    def predict(self, x):
        return x * self.scale

    def by_the_class(self, x):
        return x * self.shared

    @classmethod
    def of_the_class(cls, x):
        return x * cls.shared

    @staticmethod
    def static(x):
        return x * SCALE

    @property
    def doubled(self):
        return 2 * self.scale

    def __call__(self, x):
        return x * self.doubled


class Child(Model):
    def predict(self, x):
        return super().by_the_class(x)


class Slots:
    __slots__ = ("scale",)

    def __call__(self, x):
        return x * self.scale


@dataclasses.dataclass
class Record:
    scale: float = 1.0
    parts: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, x):
        return x * (self.scale + sum(self.parts))


class Descriptor:
    def __init__(self, scale):
        self.scale = scale

    def __get__(self, instance, owner):
        return self.scale


class Described:
    scale = Descriptor(1.0)

    def __call__(self, x):
        return x * self.scale


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Listed(list):
    def __call__(self, x):
        return x * sum(self)


def by_a_class(x):
    return Model().by_the_class(x)


def by_a_descriptor(x):
    return Described()(x)


def decorated(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)

    return wrapper


@functools.lru_cache
def cached(x):
    return x * SCALE


def setting(target, name, value=2.0):
    return lambda patch: patch.setattr(target, name, value)


def calling(function, *arguments):
    return lambda patch: function(*arguments)


this = sys.modules[__name__]


def tripled(self, x):
    return 3 * x


change_global = setting(this, "SCALE")


def closure():
    cell = 1.0

    def change(patch):
        nonlocal cell
        cell = 2.0

    return lambda x: x * cell, change


def default():
    def function(x, scale=1.0):
        return x * scale

    return function, setting(function, "__defaults__", (2.0,))


def keyword_default():
    def function(x, *, scale=1.0):
        return x * scale

    return function, setting(function, "__kwdefaults__", {"scale": 2.0})


def attribute_of_the_function():
    def function(x):
        return function.scale * x

    function.scale = 1.0
    return function, setting(function, "scale")


def code():
    def function(x):
        return x * 1.0

    return function, setting(function, "__code__", (lambda x: x * 2.0).__code__)


def instance(method):
    def make():
        model = Model()
        return operator.attrgetter(method)(model), setting(model, "scale")

    return make


def slots():
    model = Slots()
    model.scale = 1.0
    return model, setting(model, "scale")


def record():
    model = Record()
    return model, calling(model.parts.append, 1.0)


def partial():
    values = [1.0]
    inner = functools.partial(lambda values, sign, x: x * values[0] * sign, values)
    return functools.partial(inner, 1), calling(values.__setitem__, 0, 2.0)


def inside(container):
    def make():
        model = Model()
        holder = container(model.predict)
        return lambda x: next(iter(holder))(x), setting(model, "scale")

    return make


def in_a_dict():
    functions = {"f": lambda x: x}
    return lambda x: functions["f"](x), calling(functions.update, {"f": lambda x: 2 * x})


def array():
    model = Model(np.ones(3))
    return lambda x: x * model.scale.sum(), calling(model.scale.__setitem__, 1, 5.0)


def array_of_objects():
    values = np.array([1.0, None], object)
    return lambda x: x * values[0], calling(values.__setitem__, 0, 2.0)


def array_of_jax():
    model = Model(jnp.float32(1))
    return model.predict, setting(model, "scale", jnp.float32(2))


def order_of_a_dict():
    values = {"a": 1.0, "b": 2.0}
    return lambda x: x * next(iter(values.values())), calling(
        lambda: values.update(a=values.pop("a"))
    )


def iterator():
    values = iter([1.0, 2.0, 3.0])
    return lambda x: x * next(values), calling(next, values)


def random_numbers():
    random = np.random.default_rng(0)
    return lambda x: x * random.normal(), calling(random.normal)


def estimator():
    x = np.arange(4.0)[:, None]
    model = LinearRegression().fit(x, x[:, 0])
    return lambda value: model.predict([[value]])[0], calling(model.fit, x, 2 * x[:, 0])


def aliases():
    first, second = [1.0], [1.0]
    pair = [first, second]

    def function(x):
        pair[0][0] += x
        return pair[1][0]

    def share(patch):
        pair[1] = first

    return function, share


REACHED = {
    "closure": closure,
    "default": default,
    "keyword default": keyword_default,
    "attribute of the function": attribute_of_the_function,
    "code": code,
    "global": lambda: (by_a_global, change_global),
    "global of a helper": lambda: (by_a_global_of_a_helper, change_global),
    "global in a lambda": lambda: (in_a_lambda, change_global),
    "global in a generator": lambda: (in_a_generator, change_global),
    "global dict": lambda: (by_a_global_dict, lambda patch: patch.setitem(TABLE, "scale", 2.0)),
    "instance": instance("predict"),
    "callable instance": instance("__call__"),
    "property": lambda: (Model(), setting(Model, "doubled", property(lambda self: 3.0))),
    "slots": slots,
    "dataclass": record,
    "class": lambda: (by_a_class, setting(Model, "shared")),
    "class of an instance": lambda: (Model().by_the_class, setting(Model, "shared")),
    "class method": lambda: (Model.of_the_class, setting(Model, "shared")),
    "base class": lambda: (Child().predict, setting(Model, "shared")),
    "method": lambda: (
        lambda x: Model().predict(x),
        setting(Model, "predict", lambda self, x: 3 * x),
    ),
    "static method": lambda: (Model.static, change_global),
    "descriptor": lambda: (by_a_descriptor, setting(vars(Described)["scale"], "scale")),
    "partial": partial,
    "wrapped": lambda: (decorated(by_a_global), change_global),
    "cached": lambda: (lambda x: cached(x + SCALE), change_global),
    "list": inside(lambda f: [f]),
    "tuple": inside(lambda f: (f,)),
    "set": inside(lambda f: {f}),
    "frozenset": inside(lambda f: frozenset([f])),
    "deque": inside(lambda f: collections.deque([f])),
    "nested": inside(lambda f: (f, [{"a": {1: (f,)}}])),
    "dict": in_a_dict,
    "order of a dict": order_of_a_dict,
    "subclass of list": lambda: ((values := Listed([1.0])), calling(values.append, 1.0)),
    "array": array,
    "array of objects": array_of_objects,
    "array of JAX": array_of_jax,
    "iterator": iterator,
    "random numbers": random_numbers,
    "estimator": estimator,
    "aliases": aliases,
}


@pytest.mark.parametrize("what", REACHED)
def test_whatever_is_reached_counts_and_is_frozen(what, monkeypatch):
    frozen = HostCode(REACHED[what]()[0])
    function, change = REACHED[what]()
    code = HostCode(function)
    assert code.fingerprint == frozen.fingerprint
    before = code.run(3.0)
    assert [code.run(3.0), frozen.run(3.0)] == [before, before]  # Nothing is kept between calls.
    code.check_unchanged()
    change(monkeypatch)
    changed = HostCode(function)
    assert changed.fingerprint != code.fingerprint
    assert code.run(3.0) == before != changed.run(3.0) == function(3.0)
    with pytest.raises(ValueError, match="has changed since the target was traced"):
        code.check_unchanged()


def test_the_copy_is_of_classes_too():
    """cloudpickle would find the class that is there, and set its attributes back."""
    code = HostCode(by_a_class)
    original = Model.shared
    try:
        Model.shared = 2.0
        assert code.run(3.0) == 3.0
        assert Model.shared == 2.0
    finally:
        Model.shared = original


# Modules of the user's.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user's: `house`, with a module `rooms`."""
    folder = tmp_path / "house"
    folder.mkdir()
    (folder / "__init__.py").write_text("size = 1.0\nimport threading\nlock = threading.Lock()\n")
    (folder / "rooms.py").write_text(
        "import house\n"
        "import house.rooms\n"
        "scale = 1.0\n"
        "def local(x):\n    return x * scale\n"
        "def by_the_package(x):\n    return x * house.size\n"
        "def by_a_module_of_it(x):\n    return x * house.rooms.scale\n"
        "def by_a_function_of_it(x):\n    return house.rooms.local(x)\n"
        "def by_a_function_inside(x):\n    return (lambda: x * house.size)()\n"
        "def imported_inside(x):\n    from house import size\n    return x * size\n"
        "def imported_relatively(x):\n    from . import size\n    return x * size\n"
        "def locked(x):\n    return house.lock and x\n"
        "def installed_inside(x):\n    import calendar\n    import numpy.fft\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield types.SimpleNamespace(
        house=importlib.import_module("house"), rooms=importlib.import_module("house.rooms")
    )
    del sys.modules["house"], sys.modules["house.rooms"]


@pytest.mark.parametrize(
    ("function", "module", "name"),
    [
        ("local", "rooms", "scale"),
        ("by_the_package", "house", "size"),
        ("by_a_function_inside", "house", "size"),
        ("by_a_module_of_it", "rooms", "scale"),
        ("by_a_function_of_it", "rooms", "scale"),
    ],
)
def test_variables_of_modules_count_and_are_frozen(package, function, module, name):
    function = getattr(package.rooms, function)
    code = HostCode(function)
    setattr(getattr(package, module), name, 2.0)
    assert HostCode(function).fingerprint != code.fingerprint
    assert (code.run(3.0), function(3.0)) == (3.0, 6.0)


def test_imports_of_modules_that_each_process_makes_for_itself_are_refused(package):
    for function in (package.rooms.imported_inside, package.rooms.imported_relatively):
        with pytest.raises(TypeError, match=r"imported inside of .*: import it at the top"):
            HostCode(function)
    assert HostCode(package.rooms.installed_inside).run(3.0) == 3.0


def test_only_what_a_function_names_of_a_module_is_looked_at(package):
    HostCode(package.rooms.by_the_package)
    with pytest.raises(TypeError, match=r"globals\.house\.lock, .*cannot pickle"):
        HostCode(package.rooms.locked)


# What cannot be frozen.


class Pointer(ctypes.Structure):
    pass


def refused_things(file):
    return {
        "generator": (i for i in range(3)),
        "file": file,
        "lock": threading.Lock(),
        "thread": threading.Thread(),
        "weak reference": weakref.ref(Model),
        "module": this,
        "library": ctypes.CDLL(None),
        "pointer": ctypes.pointer(Pointer()),
        "frame": sys._getframe(),
    }


def test_what_cannot_be_frozen_is_refused_with_the_way_out(tmp_path):
    with (tmp_path / "file").open("w+") as file:
        for name, thing in refused_things(file).items():
            for holder in (thing, [thing], {"a": (thing,)}, Model(thing)):
                with pytest.raises(TypeError) as error:
                    HostCode(functools.partial(by_a_global, holder))
                assert "functools.partial" in str(error.value), name
                assert 'version="name 1.2"' in str(error.value)


def test_the_message_says_where(tmp_path):
    model = Model({"inner": [Model(threading.Lock())]})
    with pytest.raises(
        TypeError, match=r"without a fingerprint: scale\.inner\.scale, TypeError: cannot"
    ):
        HostCode(model.predict)


def test_a_version_stands_for_a_function():
    lock = threading.Lock()

    def function(x):
        with lock:
            return x * SCALE

    one, same, other = (HostCode(function, version) for version in ("a 1", "a 1", "a 2"))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one.run is function


def test_packages_without_a_version_of_their_own_count_by_what_was_installed(tmp_path, monkeypatch):
    found = []
    for version in ("1.0", "2.0"):
        folder = tmp_path / version / "site-packages"
        (folder / "unversioned-1.dist-info").mkdir(parents=True)
        (folder / f"unversioned_{version[0]}.py").write_text("def double(x):\n    return 2 * x\n")
        info = folder / "unversioned-1.dist-info"
        info.joinpath("METADATA").write_text(f"Name: unversioned\nVersion: {version}\n")
        info.joinpath("top_level.txt").write_text(f"unversioned_{version[0]}\n")
        monkeypatch.syspath_prepend(str(folder))
        double = importlib.import_module(f"unversioned_{version[0]}").double
        found.append(HostCode(double).run._packages[f"unversioned_{version[0]}"])
    assert found == ["unversioned 1.0", "unversioned 2.0"]


@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("package", [False, True])
def test_packages_may_be_installed_in_any_folder(tmp_path, monkeypatch, editable, package):
    """`pip install --target` makes no site-packages. What somebody edits counts by its code.

    Where a file lies says nothing: an editable package has a record, too, without its files.
    """
    name = f"anywhere_{editable}_{package}".lower()
    file = f"{name}/__init__.py" if package else f"{name}.py"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("FACTOR = 2\n\ndef scale(x):\n    return FACTOR * x\n")
    info = tmp_path / f"{name}-3.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: 3.0\n")
    info.joinpath("top_level.txt").write_text(f"{name}\n")
    recorded = "" if editable else f"{file},,\n"
    info.joinpath("RECORD").write_text(f"{info.name}/METADATA,,\n{recorded}")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    before = HostCode(module.scale)
    monkeypatch.setattr(module, "FACTOR", 3)
    assert (HostCode(module.scale).fingerprint == before.fingerprint) != editable
    assert before.run._packages.get(name) == (None if editable else f"{name} 3.0")


def test_installed_packages_count_by_their_versions(monkeypatch):
    code = HostCode(np.median)
    assert code.run([3.0, 1.0, 2.0]) == 2.0
    monkeypatch.setattr(np, "__version__", "0.9")
    assert HostCode(np.median).fingerprint != code.fingerprint
    with pytest.raises(
        RuntimeError, match=r"numpy had version .* when the target was traced, .* has version 0\.9"
    ):
        code.run([3.0, 1.0, 2.0])  # So it is in a worker that has another one.
