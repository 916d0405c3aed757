"""What a function is made of: programs are kept only where nothing of that can change."""

import functools
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import targets
from dpjax._tracing._contents import contents_of
from dpjax._tracing._programs import Program

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)
FACTOR = 2.0
NOTHING = object()


def trace(function):
    return Program.trace("target", function, RECORDS)


def value(function):
    return float(trace(function)(jnp.arange(4, dtype=jnp.float32)))


def scaled(factor):
    return lambda x: jnp.sum(x) * factor


def by_a_global():
    return lambda x: jnp.sum(x) * FACTOR


def helper(x):
    return jnp.sum(x) * FACTOR


def in_steps(x):
    def step(i, total):
        return total + x[i] * math.sqrt(2) * np.pi

    return lax.fori_loop(0, len(x), step, jnp.float32(0))


def through_modules(x):
    return jnp.linalg.norm(x, ord=np.inf) + jax.nn.relu(jax.scipy.stats.norm.logpdf(x)).max()


def recursive(x, depth=3):
    return recursive(x, depth - 1) * 2 if depth else jnp.sum(x)


def module_in_a_cell():
    import jax.numpy as inner

    return lambda x: inner.sum(x)


KNOWN = {
    "JAX's": lambda: jnp.mean,
    "compiled by JAX": lambda: jnp.sin,
    "a number": lambda: scaled(2.0),
    "a global number": by_a_global,
    "a helper": lambda: lambda x: helper(x) + 1,
    "an inner function": lambda: in_steps,
    "modules": lambda: through_modules,
    "a module in a cell": module_in_a_cell,
    "recursion": lambda: recursive,
    "a partial": lambda: functools.partial(jnp.quantile, q=0.5),
    "a dtype": lambda: lambda x: x.astype(np.float16),
    "a sum": lambda: targets.summable(lambda x: x * 2.0, average=True),
    "a density": lambda: targets.kernel_density_on_lattice(bandwidth=0.1, degree=3, dims=1),
    "a lattice": lambda: dpjax.on_lattice(lambda x: lambda t: jnp.mean(x) * t[0], degree=3, dims=1),
}


@pytest.mark.parametrize("what", KNOWN)
def test_functions_of_the_same_contents_share_a_program(what):
    make = KNOWN[what]
    records = RECORDS if what != "a density" else jax.ShapeDtypeStruct((4, 1), jnp.float32)
    assert contents_of(make()) is not None
    programs = [Program.trace("target", make(), records) for _ in range(2)]
    assert programs[0] is programs[1]


def closing_over(thing, read):
    def target(x):
        return jnp.sum(x) * read(thing)

    return target


def with_default(helper):
    return lambda x, helper=helper: helper(x)


def with_attribute():
    def target(x):
        return jnp.sum(x) * target.factor

    target.factor = [2.0]
    return target


def counting():
    count = 0.0

    def target(x):
        nonlocal count
        count += 1
        return jnp.sum(x) * count

    return target


def storing_a_global(x):
    global NOTHING
    NOTHING = x.shape
    return jnp.sum(x)


def importing(x):
    import this_module_is_made_by_a_test as made

    return jnp.sum(x) * made.factor


def defining_a_class(x):
    class Inner:
        factor = 2.0

    return jnp.sum(x) * Inner.factor


def storing_an_attribute(x):
    jnp.something_of_a_test = 1
    return jnp.sum(x)


class Callable:
    factor = 2.0

    def __call__(self, x):
        return jnp.sum(x) * self.factor

    def method(self, x):
        return jnp.sum(x) * self.factor


class Number(float):
    """May hold more than the number."""


class Answering:
    """Answers any question, as mocks do."""

    def __getattr__(self, name):
        raise RuntimeError(name)


@jax.custom_jvp
def with_a_rule(x):
    return jnp.sum(x)


UNKNOWN = {
    "a list": lambda: closing_over([2.0], lambda x: x[0]),
    "a dict": lambda: closing_over({"a": 2.0}, lambda x: x["a"]),
    "a set": lambda: closing_over({2.0}, min),
    "a tuple of a list": lambda: closing_over(([2.0],), lambda x: x[0][0]),
    "an array": lambda: closing_over(np.ones(4), lambda x: x[0]),
    "a scalar of NumPy": lambda: scaled(np.float32(2)),
    "an array of JAX": lambda: scaled(jnp.float32(2)),
    "an object": lambda: closing_over(types.SimpleNamespace(factor=2.0), lambda x: x.factor),
    "an object that answers": lambda: closing_over(Answering(), lambda x: 2.0),
    "a subclass": lambda: scaled(Number(2.0)),
    "a function of an array": lambda: lambda x: closing_over(np.ones(4), lambda x: x[0])(x),
    "a helper with a list": lambda: with_default(closing_over([2.0], lambda x: x[0])),
    "a default": lambda: lambda x, factors=[2.0]: jnp.sum(x) * factors[0],
    "a keyword default": lambda: lambda x, *, factors=[2.0]: jnp.sum(x) * factors[0],
    "an attribute": with_attribute,
    "a count": counting,
    "a global that is written": lambda: storing_a_global,
    "an import": lambda: importing,
    "a class": lambda: defining_a_class,
    "an attribute that is written": lambda: storing_an_attribute,
    "a callable object": Callable,
    "a method": lambda: Callable().method,
    "a partial of a list": lambda: functools.partial(lambda f, x: jnp.sum(x) * f[0], [2.0]),
    "a partial's keyword": lambda: functools.partial(lambda x, f: jnp.sum(x) * f[0], f=[2.0]),
    "a cache": lambda: functools.cache(lambda x: jnp.sum(x)),
    "compiled by the user": lambda: jax.jit(lambda x: jnp.sum(x)),
    "mapped by the user": lambda: jax.vmap(lambda x: x * 2.0),
    "a rule of the user's": lambda: lambda x: with_a_rule(x),
    "NumPy's random numbers": lambda: lambda x: jnp.sum(x) * np.random.normal(),
    "a function of NumPy": lambda: lambda x: jnp.sum(x) * np.sqrt(2.0),
    "a module that is passed on": lambda: lambda x: (lambda module: module.sum(x))(jnp),
    "settings": lambda: lambda x: jnp.sum(x) * (2 if jax.config.jax_debug_nans else 3),
    "a file": lambda: lambda x: jnp.sum(x) * jnp.load("this file is not there"),
    "a built-in": lambda: lambda x: jnp.sum(x) * len(dir(NOTHING)),
    "evaluated text": lambda: lambda x: eval("x"),
    "a global that is not there": lambda: lambda x: x * not_there,  # noqa: F821
    "a key": lambda: lambda x: jax.random.normal(dpjax.random.secure_key()),
    "a sum of a list": lambda: targets.summable(closing_over([2.0], lambda x: x[0])),
    "code on the host": lambda: targets.host(lambda x: x, output=RECORDS),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_may_change_is_not_known(what):
    assert contents_of(UNKNOWN[what]()) is None


def test_a_number_may_be_assigned_anew(monkeypatch):
    assert value(by_a_global()) == 12
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert value(by_a_global()) == 18
    assert value(lambda x: helper(x) + 1) == 19


def test_a_cell_may_be_assigned_anew():
    factor = 2.0

    def target(x):
        return jnp.sum(x) * factor

    assert value(target) == 12
    factor = 3.0
    assert value(target) == 18


def test_a_function_may_be_replaced(monkeypatch):
    def target(x):
        return helper(x)

    assert value(target) == 12
    monkeypatch.setitem(globals(), "helper", lambda x: jnp.max(x))
    assert value(target) == 3


def test_its_code_and_defaults_may_be_replaced():
    def target(x, factor=2.0):
        return jnp.sum(x) * factor

    assert value(target) == 12
    target.__defaults__ = (3.0,)
    assert value(target) == 18
    target.__code__ = (lambda x, factor: jnp.max(x) * factor).__code__
    assert value(target) == 9


def test_a_module_of_the_user_may_change(monkeypatch):
    module = types.ModuleType("made")
    module.factor = 2.0
    monkeypatch.setitem(globals(), "made", module)

    def target(x):
        return jnp.sum(x) * made.factor  # noqa: F821

    assert contents_of(target) is not None
    assert value(target) == 12
    module.factor = 3.0
    assert value(target) == 18


def test_a_function_of_jax_may_be_replaced(monkeypatch):
    def target(x):
        return jnp.mean(x)

    assert value(target) == 1.5
    monkeypatch.setattr(jnp, "mean", jnp.max)
    assert value(target) == 3
    monkeypatch.setattr(jnp, "mean", lambda x: jnp.sum(x) * 2.0)
    assert value(target) == 12


def test_a_name_of_jax_that_another_function_took_is_not_believed():
    @functools.wraps(jnp.mean)
    def mean(x):
        return jnp.sum(x) * factors[0]

    factors = [2.0]
    assert mean.__module__ == jnp.mean.__module__
    assert contents_of(lambda x: mean(x)) is None


@pytest.mark.parametrize(
    ("some", "other"),
    [(0.0, -0.0), (np.nan, -np.nan), (1, 1.0), (1, True), (2.0, 2 + 0j), ("1", b"1")],
    ids=str,
)
def test_equal_numbers_that_compute_something_else_are_told_apart(some, other):
    assert contents_of(scaled(some)) != contents_of(scaled(other))


def test_other_code_is_told_apart():
    functions = scaled(2.0), lambda x: jnp.sum(x) * 2.0, lambda x: jnp.sum(x) * 3.0, jnp.sum
    assert len({contents_of(function) for function in functions}) == len(functions)


def test_recursion_is_told_apart():
    def swapping(swap):
        def first(x, depth=1):
            return (second if swap else first)(x, depth - 1) * 2 if depth else jnp.sum(x)

        def second(x, depth=1):
            return first(x, depth) + 1

        return first

    assert value(swapping(swap=False)) == 12
    assert value(swapping(swap=True)) == 14


def test_a_program_of_known_contents_follows_the_configuration(x64):
    del x64
    assert trace(lambda x: x.astype(float)).outputs.leaves[0].dtype == np.float64
    with jax.enable_x64(False):
        assert trace(lambda x: x.astype(float)).outputs.leaves[0].dtype == np.float32


def test_an_error_is_raised_at_every_call():
    def target(x):
        return jnp.sum(x) + jnp.ones(3).reshape(2)

    for _ in range(2):
        with pytest.raises(TypeError, match="reshape"):
            trace(target)


def test_a_sensitivity_is_that_of_the_function_as_it_is_now(monkeypatch):
    def oracle(key, n):
        return jax.random.uniform(key, (n,)) * FACTOR

    def sampled():
        key = dpjax.random.seeded_key(0)
        return dpjax.sample_sensitivity(key, jnp.mean, oracle, n=9, norm="l1", gamma=0.1)

    first = sampled()
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    np.testing.assert_allclose(sampled().value, 2 * first.value, rtol=1e-5)


def test_another_process_finds_nothing_kept():
    """Contents hold functions and classes themselves, which stay in their process."""
    assert contents_of(jnp.mean) == (type(jnp.mean), sys.modules["jax.numpy"].mean)
