"""Fingerprints of code on the host: different functions differ in them, equal ones do not."""

import enum
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._tracing._host_code import HostCode, fingerprint


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


DIFFERENT = {
    "constants": (lambda x: x + 1, lambda x: x + 2),
    "types of constants": (lambda x: (x, 1), lambda x: (x, 1.0)),
    "booleans": (lambda x: (x, 1), lambda x: (x, True)),
    "signs of zero": (lambda x: (x, 0.0), lambda x: (x, -0.0)),
    "structure of constants": (lambda x: (x, ((1,), 2)), lambda x: (x, (1, (2,)))),
    "sets": (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    "text and bytes": (lambda x: "a", lambda x: b"a"),
    "names": (lambda x: x.real, lambda x: x.imag),
    "arguments": (lambda a, b: a - b, lambda b, a: b - a),
    "keywords": (lambda a, *, b: (a, b), lambda a, *, c: (a, c)),
    "kinds of arguments": (lambda a, b: (a, b), lambda a, /, b: (a, b)),
    "collected arguments": (lambda a: a, lambda *a: a),
    "inner functions": (lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)),
    "functions of packages": (np.mean, np.median),
    "methods of built-in objects": ([1].index, [2].index),
    "members": (functools.partial(max, Kind.ONE), functools.partial(max, Kind.TWO)),
    "dtypes": (np.zeros(2, "int32").__add__, np.zeros(2, "uint32").__add__),
    "shapes": (np.zeros((2, 1)).__add__, np.zeros((1, 2)).__add__),
    "aliases": tuple(
        functools.partial(max, [one, other, again])
        for one, other in [([1], [1])]
        for again in (one, other)
    ),
    "order in memory": (np.zeros((2, 2)).__add__, np.zeros((2, 2), order="F").__add__),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_functions_have_different_fingerprints(what):
    first, second = (HostCode(function).fingerprint for function in DIFFERENT[what])
    assert first != second


def test_equal_dtypes_count_as_one():
    """Whether arrays share the object of their dtype depends on how they were made."""
    one, other = (np.dtype([("a", "f4")]) for _ in range(2))
    shared, apart = ([np.zeros(2, one), np.zeros(2, last)] for last in (one, other))
    assert one is not other
    assert HostCode(shared.index).fingerprint == HostCode(apart.index).fingerprint


def test_the_copy_holds_arrays_of_numpy():
    """Code that JAX calls back must not wait for JAX."""
    values = jnp.arange(3.0)
    assert type(HostCode(lambda x: values).run(0)) is np.ndarray


def test_equal_sets_count_as_one():
    """The order of a set depends on what it was made from, and on the process for texts."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert list(one) != list(other)
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(set(one)) == fingerprint(set(other))


def test_what_is_caught_counts():
    def function(x):
        try:
            return 1 / x
        except ZeroDivisionError:
            return 0.0

    caught = function.__code__
    uncaught = types.FunctionType(caught.replace(co_exceptiontable=b""), globals(), "function")
    uncaught.__qualname__ = function.__qualname__
    assert HostCode(function).fingerprint != HostCode(uncaught).fingerprint


def test_comments_lines_and_notes_do_not_count():
    sources = ("def f(x):\n    return x", "\n\n# Said.\ndef f(x: int) -> 'float':\n    return x")
    found = set()
    for source in sources:
        scope = {"__name__": "__main__"}
        exec(compile(source, f"{len(source)}.py", "exec"), scope)
        found.add(HostCode(scope["f"]).fingerprint)
    assert len(found) == 1


def test_recursion_ends():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    ring = [even]
    ring.append(ring)
    assert HostCode(even).fingerprint == HostCode(even).fingerprint != HostCode(odd).fingerprint
    assert (HostCode(even).run(4), HostCode(even).run(3)) == (True, False)
    assert HostCode(lambda x: ring[1][1][0](x)).run(4) is True


PROCESS = """
import collections, dataclasses, enum, functools
import numpy as np
from sklearn.ensemble import RandomForestRegressor
from dpjax._tracing._host_code import HostCode

class Kind(enum.Enum):
    ONE = "one"

@dataclasses.dataclass
class Base:
    words: frozenset = frozenset({"a", "b", "c", "d"})
    def __call__(self, x):
        return x in {"one", "two", "three"} or x in self.words

class Child(Base):
    @property
    def kind(self):
        return Kind.ONE, {Kind.ONE: {"x", "y", "z"}}
    def __call__(self, x):
        return super().__call__(x) or self.kind

@functools.lru_cache
def cached(x):
    return np.mean(x)

class Pair(collections.namedtuple("Pair", "a b")):
    def __call__(self, x):
        return cached(x)

x = np.arange(8.0)[:, None]
forest = RandomForestRegressor(3, random_state=0).fit(x, x[:, 0])
random = np.random.default_rng(0)
for function in (Child(), Pair(1, 2), forest.predict, random.normal, {"k": {1, "a"}}.get, np.sum):
    print(HostCode(function).fingerprint)
"""


@pytest.mark.slow
def test_processes_agree(run_python):
    printed = {run_python(PROCESS, PYTHONHASHSEED=seed) for seed in ("0", "1", "2")}
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 6
