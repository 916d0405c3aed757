"""A program is made of JAX's own operations, which count by name; what else there is may not.

An operation of somebody else's computes what its lowering, its rule for `vmap` and its `impl` say,
three times anything. It reaches a program by a target, an oracle, a norm, a statistic, a loss or a
predicate, at any depth, and so does a key of somebody else's implementation.
"""

import sys
import types

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import define_prng_impl
from jax.interpreters import batching, mlir

import dpjax
from dpjax import learning, queries
from dpjax._tracing._host_calls import is_own
from dpjax._tracing._programs import Program
from dpjax._tracing._walks import primitives

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)


def operation(computed, name="theirs", otherwise=None):
    """An operation that says it computes one thing, and computes another where it is run."""
    primitive = jex.Primitive(name)
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    primitive.def_impl(computed)
    lowered = mlir.lower_fun(otherwise or computed, multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    batching.primitive_batchers[primitive] = lambda xs, axes: (primitive.bind(*xs) * 2, axes[0])
    return primitive


@pytest.fixture
def installed(monkeypatch):
    """Makes operations those of an installed package."""

    def install(*primitives):
        module = types.ModuleType("a_library")
        module.__file__ = "/somewhere/site-packages/a_library.py"
        for i, primitive in enumerate(primitives):
            setattr(module, f"operation_{i}", primitive)
        monkeypatch.setitem(sys.modules, "a_library", module)
        return primitives[0]

    return install


def trace(function):
    return Program.trace("target", function, RECORDS)


def test_what_jax_defines_is_its_own():
    found = [x for x in vars(jex.primitives).values() if isinstance(x, jex.Primitive)]
    assert len(found) > 100
    assert all(map(is_own, found))
    # By the object: a name is anybody's.
    assert not is_own(jex.Primitive("sin"))


def custom_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda x, t: (x[0], t[0]))
    return wrapped


PLACES = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "while": lambda f: (
        lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (1, f(c[1])), (0, x))[1]
    ),
    "cond": lambda f: lambda x: lax.cond(x[0] < 9, f, lambda y: y, x),
    "custom_vmap": lambda f: jax.custom_batching.sequential_vmap(f),
    "custom_jvp": custom_jvp,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_operations_of_the_user_are_refused(place):
    strange = operation(jnp.sin, "sin")
    with pytest.raises(ValueError, match=r"target must be made of JAX's own .* got \['sin'\]"):
        trace(PLACES[place](strange.bind))


def test_they_are_refused_wherever_functions_come_in(key):
    strange = operation(jnp.sin).bind

    def sample(target=jnp.sum, oracle=jax.random.uniform, norm="l1"):
        draw = lambda key, n: oracle(key, (n,))  # noqa: E731
        return dpjax.sample_sensitivity(key, target, draw, n=4, norm=norm, m=90)

    with pytest.raises(ValueError, match="target must be made of"):
        sample(strange)
    with pytest.raises(ValueError, match="oracle must be made of"):
        sample(oracle=lambda key, shape: strange(jax.random.uniform(key, shape)))
    with pytest.raises(ValueError, match="norm must be made of"):
        sample(norm=lambda x: jnp.abs(strange(x)))
    with pytest.raises(ValueError, match="target must be made of"):
        sample(dpjax.targets.summable(strange))
    with pytest.raises(ValueError, match="loss must not use theirs"):
        learning.clipped_gradients(lambda w, x: w * strange(x), clip_norm=1.0)(
            jnp.float32(1), jnp.ones(3), True
        )
    with pytest.raises(ValueError, match="predicate must not use theirs"):
        queries.counting_query(lambda x: strange(x) > 0)(jnp.ones(3))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "vmap"])
def test_operations_of_a_library_are_what_they_say_in_every_place(place, installed):
    """What is lowered, and a rule for `vmap` that doubles, are not run any more."""
    theirs = installed(operation(lambda x: x + 1, otherwise=lambda x: x - 1))
    program, batch = trace(PLACES[place](theirs.bind)), jnp.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(program(batch[0]), batch[0] + 1)
    np.testing.assert_array_equal(jax.vmap(program)(batch), batch + 1)
    assert "theirs" not in primitives(program.jaxpr.jaxpr)


def test_operations_of_one_name_are_told_apart(installed):
    plus, minus = operation(lambda x: x + 1), operation(lambda x: x - 1)
    installed(plus, minus)
    assert trace(plus.bind) == trace(plus.bind)
    assert trace(plus.bind) != trace(minus.bind)


def test_operations_of_a_library_may_be_made_of_others(installed):
    inner = operation(lambda x: x * 3)
    outer = installed(operation(lambda x: inner.bind(jnp.sin(x)) + 1), inner)
    np.testing.assert_array_equal(trace(outer.bind)(jnp.zeros(4)), np.ones(4))


def printing(x):
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize(
    ("computed", "error", "message"),
    [
        (printing, ValueError, "must not call code outside of JAX"),
        (lambda x: np.sin(x), TypeError, "must be JAX code"),
        (lambda x: endless.bind(x), ValueError, r"got \['endless'\]"),
    ],
)
def test_what_a_library_hides_is_refused(computed, error, message, installed):
    theirs = installed(operation(computed), endless)
    with pytest.raises(error, match=message):
        trace(theirs.bind)


endless = operation(lambda x: endless.bind(x), "endless")


def keys_of(name, word):
    """Keys whose bits are all the same word."""
    return define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, width, shape: jnp.full(shape, word, jnp.uint32),
        fold_in=lambda key, data: key,
        name=name,
        tag="fry",
    )


@pytest.mark.parametrize("name", ["theirs", "threefry2x32"])
def test_keys_of_another_implementation_are_refused(name):
    def drawn(implementation):
        def target(x):
            words = jnp.stack([jnp.sum(x) * 0, 1]).astype(jnp.uint32)
            return x * jax.random.uniform(jax.random.wrap_key_data(words, impl=implementation))

        return target

    with pytest.raises(ValueError, match=f"target must draw with keys of JAX .* '{name}'"):
        trace(drawn(keys_of(name, 2**31)))
    constant = jax.random.key(0, impl=keys_of(name, 2**31))
    with pytest.raises(ValueError, match=f"target must draw with keys of JAX .* '{name}'"):
        trace(lambda x: x * jax.random.uniform(constant))
    for known in (jax.random.key(0), jax.random.key(0, impl="rbg"), dpjax.random.seeded_key(0)):
        trace(lambda x, key=known: x * jax.random.uniform(key))
