"""What a function is made of: programs are kept only where nothing of that can change."""

import collections
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import targets
from dpjax._tracing._contents import contents_of, functions_of_the_user
from dpjax._tracing._programs import Program, _unchanging, is_plain
from dpjax.sensitivity._sums import Summable

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)
FACTOR = 2.0
own_sum = jnp.sum
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
        return total + x[i] * jnp.pi

    return lax.fori_loop(0, len(x), step, jnp.float32(0))


def through_modules(x):
    return jnp.linalg.norm(x, ord=jnp.inf) + jax.nn.softmax(
        jax.random.normal(jax.random.key(0), (4,))
    )


def recursive(x, depth):
    return recursive(x, depth - 1) * 2 if depth else jnp.sum(x)


def module_in_a_cell():
    import jax.numpy as inner

    return lambda x: inner.sum(x)


KNOWN = {
    "JAX's": lambda: jnp.mean,
    "compiled by JAX": lambda: jnp.sin,
    "of its argument": lambda: lambda x: x.sum() * 2.0,
    "an inner function": lambda: in_steps,
    "modules": lambda: through_modules,
    "a dtype": lambda: lambda x: x.astype(jnp.float16),
    "a transformation": lambda: lambda x: jax.vmap(lambda y: jax.grad(jnp.sin)(y))(x),
    "a sum": lambda: targets.summable(lambda x: x * 2.0, average=True),
    "a density": lambda: targets.kernel_density_on_lattice(bandwidth=0.1, degree=3, dims=1),
    "a lattice": lambda: dpjax.evaluate_on_lattice(
        lambda x: lambda t: jnp.mean(x) * t[0], degree=3, dims=1
    ),
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


def of_its_name(x):
    return jnp.sum(x) * len(of_its_name.__name__)


def of_its_variables(x):
    return jnp.sum(x) * (lambda: 0).__globals__["FACTOR"]


def patched(x):
    return x.something_of_a_test()


def with_builtins_of_its_own():
    variables = {"jnp": jnp, "__builtins__": {"abs": lambda x: x * 2.0}}
    exec("def target(x): return abs(jnp.sum(x))", variables)
    return variables["target"]


def with_another_method():
    target = targets.summable(lambda x: x)
    object.__setattr__(target, "finish_sum", lambda total, n: total * n)
    return target


UNKNOWN = {
    "a number": lambda: scaled(2.0),
    "a global number": by_a_global,
    "a helper": lambda: lambda x: helper(x),
    "a helper of JAX alone": lambda: lambda x: in_steps(x),
    "recursion": lambda: lambda x: recursive(x, 3),
    "a module in a cell": module_in_a_cell,
    "a partial": lambda: functools.partial(jnp.quantile, q=0.5),
    "a default number": lambda: lambda x, factor=2.0: jnp.sum(x) * factor,
    "a keyword number": lambda: lambda x, *, factor=2.0: jnp.sum(x) * factor,
    "a number of NumPy's": lambda: lambda x: jnp.sum(x) * np.pi,
    "a function of Python's modules": lambda: lambda x: jnp.sum(x) * math.sqrt(2),
    "its name": lambda: of_its_name,
    "its variables": lambda: of_its_variables,
    "a method that somebody adds to arrays": lambda: patched,
    "an attribute of a function": lambda: lambda x: jnp.sum(x) * jnp.sum.weight,
    "a set": lambda: lambda x: sum(x[i] * 2.0**i for i in range(4) if i in {0, 2}),
    "built-ins of its own": with_builtins_of_its_own,
    "a method that was replaced": with_another_method,
    "a rule that may be another": lambda: lambda x: jax.nn.relu(x),
    "a function under a name of its own": lambda: lambda x: own_sum(x),
    "registered classes": lambda: lambda x: x * len(jax.tree.leaves(range(4))),
    "text of a number": lambda: lambda x: x * len(f"{jnp.finfo('float32').max!r}"),
    "nested tuples": lambda: Summable(jnp.sum, jnp.sum, False, ((1.0,),)),
    "printing options": lambda: lambda x: x * jnp.get_printoptions()["precision"],
    "a list": lambda: closing_over([2.0], lambda x: x[0]),
    "a dict": lambda: closing_over({"a": 2.0}, lambda x: x["a"]),
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


def test_what_dpjax_makes_holds_no_function_that_may_change():
    made = (
        dpjax.targets.moments(order=2, lower=0, upper=4),
        dpjax.targets.logistic_regression(regularization=0.1),
        dpjax.queries.linear_workload([[1, 0], [1, 1]]),
    )
    assert [functions_of_the_user(one) for one in made] == [(), (), ()]


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


def test_one_that_was_kept_may_have_other_code_by_now():
    first, second = (lambda x: jnp.sum(x) * 2.0 for _ in range(2))
    assert value(first) == value(second) == 12
    first.__code__ = (lambda x: jnp.max(x)).__code__
    jax.clear_caches()
    assert value(second) == 12
    assert value(first) == 3


def test_functions_of_a_loop_are_those_of_their_turns():
    """All close over one variable, which has moved on when others are traced."""

    def values(n):
        found = []
        for factor in (1.0, 2.0, 3.0):
            records = jax.ShapeDtypeStruct((n,), jnp.float32)
            program = Program.trace("target", lambda x: jnp.sum(x) * factor, records)  # noqa: B023
            found.append(float(program(jnp.ones(n))))
        return found

    for n in (10, 20, 10):
        assert values(n) == [n, 2 * n, 3 * n]
        jax.clear_caches()


def test_a_module_of_the_user_may_change(monkeypatch):
    module = types.ModuleType("made")
    module.factor = 2.0
    monkeypatch.setitem(globals(), "made", module)

    def target(x):
        return jnp.sum(x) * made.factor  # noqa: F821

    assert value(target) == 12
    module.factor = 3.0
    assert value(target) == 18


def test_a_function_of_jax_may_be_replaced(monkeypatch):
    def target(x):
        return jnp.mean(x)

    assert value(target) == 1.5
    monkeypatch.setattr(jnp, "mean", jnp.max)
    assert value(target) == 3
    factor = 2.0
    monkeypatch.setattr(jnp, "mean", functools.wraps(jnp.mean)(lambda x: jnp.sum(x) * factor))
    assert value(target) == 12
    factor = 3.0
    assert value(target) == 18


def test_a_name_of_jax_that_another_function_took_is_not_believed():
    @functools.wraps(jnp.mean)
    def mean(x):
        return jnp.sum(x) * factors[0]

    factors = [2.0]
    assert mean.__module__ == jnp.mean.__module__
    assert contents_of(lambda x: mean(x)) is None


@pytest.mark.parametrize(
    ("some", "other"), [(0.0, -0.0), (np.nan, -np.nan), (1, 1.0), (1, True), (None, 0)], ids=str
)
def test_equal_numbers_that_compute_something_else_are_told_apart(some, other):
    first, second = (contents_of(Summable(jnp.sum, jnp.sum, True, x)) for x in (some, other))
    assert None not in (first, second)
    assert first != second


def test_other_code_is_told_apart():
    functions = (lambda x: jnp.sum(x)), (lambda x: jnp.sum(x) * 3.0), jnp.sum, jnp.mean
    contents = [contents_of(function) for function in functions]
    assert None not in contents
    assert len(set(contents)) == len(functions)


def test_variables_of_another_module_are_its_own():
    text = "def target(x): return module.sum(x)"
    modules = [{"module": jnp}, {"module": types.SimpleNamespace(sum=jnp.max)}, {"module": jnp}]
    for variables in modules:
        exec(text, variables)
    targets = [variables["target"] for variables in modules]
    assert [contents_of(target) is None for target in targets] == [False, True, False]
    assert [value(target) for target in targets] == [6, 3, 6]
    modules[0]["module"] = modules[1]["module"]
    jax.clear_caches()
    assert [value(target) for target in targets] == [3, 3, 6]


def test_sets_that_compare_equal_are_iterated_in_their_order():
    first, second = (
        lambda x: jnp.stack([x[i % 4] for i in tuple({0, 8, 1})]),
        lambda x: jnp.stack([x[i % 4] for i in tuple({8, 0, 1})]),
    )
    assert contents_of(first) is contents_of(second) is None


def test_records_of_a_class_are_traced_anew():
    """Its instances compare as it likes, such as 2 and 2.0."""
    Records = collections.namedtuple("Records", "x")
    assert is_plain(({"a": [RECORDS], "b": (None, RECORDS)},))
    assert not is_plain((Records(RECORDS),))
    assert not is_plain(({1: RECORDS},))

    def target(records):
        return records[0] * 2.0

    programs = [Program.trace("target", target, Records(RECORDS)) for _ in range(2)]
    assert programs[0] is not programs[1]


def test_keys_are_made_as_is_set_now():
    def target(x):
        return x * jax.random.normal(jax.random.key(0))

    threefry = trace(target)
    with jax.default_prng_impl("rbg"):
        rbg = trace(target)
    assert trace(target) is threefry
    assert "rbg" in str(rbg.jaxpr)
    assert "rbg" not in str(threefry.jaxpr)


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


def test_a_setting_without_a_hash_is_none_of_ours(monkeypatch):
    settings = {**jax.config.values, "jax_pjrt_client_create_options": {"a": 1}}
    monkeypatch.setattr(type(jax.config), "values", settings)
    assert value(lambda x: jnp.sum(x)) == 6


def test_programs_of_a_function_do_not_pile_up():
    def target(x):
        return jnp.sum(x)

    for n in range(1, 80):
        Program.trace("target", target, jax.ShapeDtypeStruct((n,), jnp.float32))
    kept = _unchanging("target", target, (RECORDS,))
    assert 0 < len(kept.programs) <= 64
