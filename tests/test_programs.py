"""Traced programs: equal fingerprints make equal programs, and different ones do not."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import targets
from dpjax._programs import Program, digest

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)


def trace(function, *arguments):
    return Program.trace("target", function, *(arguments or (RECORDS,)))


def fingerprint(function, *arguments):
    return trace(function, *arguments).fingerprint


def scaled(factor):
    return lambda x: jnp.sum(x) * factor


def test_names_do_not_matter():
    def first(database):
        total = jnp.sum(database)
        return total * 2

    def second(other_name):
        return 2 * jnp.sum(other_name)

    @jax.jit
    def compiled(x):
        return x * 2

    @jax.jit
    def otherwise(y):
        return y * 2

    def swapped(x):
        return jnp.sum(x) * 2

    assert fingerprint(first) == fingerprint(swapped)
    assert fingerprint(compiled) == fingerprint(otherwise)
    assert fingerprint(first) != fingerprint(second)  # 2 * x is another program than x * 2.


def test_the_same_function_traced_anew():
    assert fingerprint(scaled(2.0)) == fingerprint(scaled(2.0))
    assert trace(scaled(2.0)) == trace(scaled(2.0))
    assert hash(trace(scaled(2.0))) == hash(trace(scaled(2.0)))
    assert trace(scaled(2.0)) != "a program"


DIFFERENT = {
    "literals": (scaled(2.0), scaled(3.0)),
    "nearly equal literals": (scaled(1.0), scaled(float(np.nextafter(np.float32(1), 2)))),
    "signs of zero": (scaled(0.0), scaled(-0.0)),
    "arrays": (scaled(np.ones(3, np.float32)), scaled(np.array([1, 1, 2], np.float32))),
    "large arrays": (
        scaled(np.zeros(5000, np.float32)),
        scaled(np.eye(1, 5000, 2500, np.float32)[0]),
    ),
    "operations": (jnp.sin, jnp.cos),
    "order of arguments": (lambda x: x - jnp.sum(x), lambda x: jnp.sum(x) - x),
    "order of operations": (lambda x: jnp.sin(jnp.cos(x)), lambda x: jnp.cos(jnp.sin(x))),
    "parameters": (lambda x: x.reshape(2, 2).sum(0), lambda x: x.reshape(2, 2).sum(1)),
    "dtypes": (lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.int16)),
    "outputs": (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
    "keys": (
        lambda x: jax.random.permutation(jax.random.key(0), x),
        lambda x: jax.random.permutation(jax.random.key(1), x),
    ),
    "inside jit": (jax.jit(scaled(2.0)), jax.jit(scaled(3.0))),
    "inside a loop": tuple(
        lambda x, f=f: lax.fori_loop(0, 3, lambda i, c: c * f, x) for f in (2.0, 3.0)
    ),
    "inside a branch": tuple(
        lambda x, f=f: lax.cond(x[0] > 0, lambda y: y * f, lambda y: y, x) for f in (2.0, 3.0)
    ),
    "the length of a scan": tuple(
        lambda x, n=n: lax.scan(lambda c, _: (c * 2, None), x, None, length=n)[0] for n in (3, 4)
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_a_program_computes_does_matter(what):
    first, second = DIFFERENT[what]
    assert fingerprint(first) == fingerprint(first)
    assert fingerprint(first) != fingerprint(second)


def test_shapes_and_structure_matter():
    assert fingerprint(jnp.sum) != fingerprint(jnp.sum, jax.ShapeDtypeStruct((5,), jnp.float32))
    assert trace(lambda x: {"a": x}) != trace(lambda x: {"b": x})
    assert trace(lambda x: x["a"], {"a": RECORDS}) != trace(lambda x: x["b"], {"b": RECORDS})


def test_an_array_that_was_changed_in_place_matters():
    weights = np.ones(4, np.float32)

    def target(x):
        return x * weights

    before = fingerprint(target)
    weights[2] = 5.0
    assert fingerprint(target) != before


def test_a_program_that_changed_since_is_refused():
    weights = np.ones(4, np.float32)
    program = trace(lambda x: x * weights)
    program.check_unchanged("target")
    weights[2] = 5.0
    with pytest.raises(ValueError, match="target has changed since it was traced"):
        program.check_unchanged("target")


def test_a_program_notices_another_configuration():
    program = trace(jnp.sum)
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX's configuration"):
        program.check_unchanged("target")
    program.check_unchanged("target")


def host(factor):
    return lambda x: np.asarray(x) * factor


def from_host(function):
    return lambda x: jax.pure_callback(function, RECORDS, x)


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["function", "partial"])
def test_host_functions_are_part_of_the_program(wrap):
    assert fingerprint(from_host(wrap(host(2.0)))) == fingerprint(from_host(wrap(host(2.0))))
    assert fingerprint(from_host(wrap(host(2.0)))) != fingerprint(from_host(wrap(host(3.0))))
    array = np.arange(3000.0, dtype=np.float32)
    other = np.where(array == 1500, 0, array)
    assert fingerprint(from_host(wrap(host(array)))) != fingerprint(from_host(wrap(host(other))))


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: lambda x: lax.map(lambda _: f(x), jnp.arange(2))],
    ids=["alone", "jit", "loop"],
)
def test_only_programs_that_call_the_host_know_an_origin(wrap):
    assert len(trace(wrap(jnp.sin)).jaxpr.jaxpr.invars) == 1
    assert len(trace(wrap(from_host(host(2.0)))).jaxpr.jaxpr.invars) == 2


def test_the_origin_is_no_input_that_is_used():
    target = targets.host(host(2.0), output=RECORDS)
    assert trace(target).uses_input()
    assert not trace(lambda x: target(jnp.ones(4))).uses_input()


def test_rules_of_differentiation_do_not_matter():
    # They are functions with an address of their own, and are not run.
    for function in (jax.nn.relu, jax.nn.softplus, jax.nn.logsumexp, jax.nn.sigmoid):
        assert fingerprint(lambda x, f=function: f(x)) == fingerprint(lambda x, f=function: f(x))


def test_a_program_computes_what_the_function_does():
    def function(x, y):
        return {"a": jnp.sort(x) * y["b"], "c": (jnp.sum(y["b"]),)}

    x, y = jnp.array([3.0, 1.0, 2.0, 0.0]), {"b": jnp.arange(4.0)}
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, y))
    jax.tree.map(np.testing.assert_array_equal, trace(function, *specs)(x, y), function(x, y))


def test_matrix_products_run_at_the_highest_precision():
    assert "HIGHEST" in str(trace(lambda x: x @ x).jaxpr)


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (lambda x: x, True),
        (lambda x: (jnp.ones(2), jnp.sum(x)), True),
        (lambda x: jnp.ones(2), False),
        (lambda x: jnp.zeros(2) if jnp.sum(x) is x else jnp.ones(2), False),
        (lambda x: lax.fori_loop(0, 2, lambda i, c: c * x[0], 1.0), True),
    ],
)
def test_whether_a_program_uses_its_input(function, uses):
    assert trace(function).uses_input() == uses


def test_the_largest_array_may_be_inside():
    @jax.jit
    def inner(x):
        return jnp.sum(x[:, None] * x[None, :])

    assert trace(lambda x: x[0]).largest_array() == 16
    assert trace(lambda x: inner(x)).largest_array() == 64


def test_digests_tell_nested_values_apart():
    values = [
        "a", ("a",), ("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",)), None, "None", 1, "1", 1.0,
        True, {"a": 1}, {"a": 2}, {"b": 1}, frozenset("ab"), np.float32(1), np.float64(1),
        np.ones(2), np.ones((2, 1)), np.ones(2, np.float32), [1, 2], [12],
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest(jnp.ones(2)) == digest(np.ones(2, np.float32))
    assert len(digest("a")) == 32


SCALE = 1.0


def _scaled(x):
    return x * SCALE


class _Model:
    factor = 1.0

    def predict(self, x):
        return x * self.factor


def _through_a_helper(x):
    return np.float32(_scaled(x))


def _in_a_lambda(x):
    return np.float32(sum(map(lambda v: v * SCALE, [x])))


def _in_a_generator(x):
    return np.float32(sum(v * SCALE for v in [x]))


def _by_a_class(x):
    return np.float32(_Model().predict(x))


@pytest.mark.parametrize("function", [_through_a_helper, _in_a_lambda, _in_a_generator])
def test_globals_of_host_functions_count_wherever_they_are_named(function, monkeypatch):
    before = digest(function)
    assert digest(function) == before
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert digest(function) != before


def test_attributes_of_classes_count(monkeypatch):
    before, instance = digest(_by_a_class), digest(_Model().predict)
    monkeypatch.setattr(_Model, "factor", 2.0)
    assert digest(_by_a_class) != before
    assert digest(_Model().predict) != instance


def test_recursive_functions_have_a_fingerprint():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert digest(even) == digest(even) != digest(odd)
