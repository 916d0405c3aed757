"""Rules for `vmap` that users write are left out: a batch computes what single values do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

import dpjax
from dpjax._tracing._evaluate import vmapped
from dpjax._tracing._programs import Program

RECORDS = jax.ShapeDtypeStruct((4,), jnp.float32)


def with_rule(function, rule):
    ruled = custom_vmap(function)
    ruled.def_vmap(rule)
    return ruled


def of_another_value(function):
    return with_rule(function, lambda size, mapped, x: (1000 * jax.vmap(function)(x), True))


def of_some_sizes(function):
    """Two lanes show nothing, and neither does one."""

    def rule(size, mapped, x):
        return jax.vmap(function)(x) * (1 if size <= 2 else 1000), True

    return with_rule(function, rule)


def that_mixes(function):
    return with_rule(function, lambda size, mapped, x: (jnp.cumsum(jax.vmap(function)(x), 0), True))


def that_raises(function):
    return with_rule(function, lambda size, mapped, x: 1 / 0)


def of_a_rule(function):
    return of_another_value(lambda x: of_another_value(function)(x))


RULES = {
    "another value": of_another_value,
    "some sizes": of_some_sizes,
    "mixing": that_mixes,
    "an error": that_raises,
    "in another": of_a_rule,
    "one after the other": sequential_vmap,
}


def derivative(function):
    """The rule of the tangents is JAX's, and calls the user's."""
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


def by_custom_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda x, t: (function(*x), t[0]))
    return wrapped


def in_shard_map(function):
    mesh, spec = jax.make_mesh((1,), ("one",)), jax.P()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


PLACES = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, y: f(y), x),
    "branch": lambda f: lambda x: lax.cond(x[0] < 9, f, lambda y: y, x),
    "checkpoint": jax.checkpoint,
    "custom_jvp": by_custom_jvp,
    "shard_map": in_shard_map,
    "derivative": derivative,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", RULES)
def test_a_program_runs_the_function_itself(name, place):
    function = lambda x: jnp.sin(x) * 2 + x[::-1]  # noqa: E731
    target, plain = (PLACES[place](f) for f in (RULES[name](function), function))
    program = Program.trace("target", target, RECORDS)
    for size in (1, 2, 3):
        x = jnp.asarray(np.random.default_rng(size).normal(size=(size, 4)), jnp.float32)
        expected = jax.vmap(plain)(x)
        for found in (
            jax.vmap(program)(x),
            jax.jit(jax.vmap(program))(x),
            vmapped(target, x),
            jnp.stack([program(one) for one in x]),
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_no_rule_is_a_part_of_the_program(name):
    plain, ruled = lambda x: x * 2, RULES[name](lambda x: x * 2)
    program = Program.trace("target", ruled, RECORDS)
    assert program == Program.trace("target", plain, RECORDS)
    program.check_unchanged("target")


def test_a_rule_of_dpjax_is_run():
    """For one key and many values, this one raises an error."""
    key = dpjax.random.seeded_key(0)
    release = lambda x: dpjax.laplace(1.0, 1.0)(key, x).value  # noqa: E731
    program = Program.trace("target", release, RECORDS)
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(program)(jnp.ones((2, 4)))


@pytest.mark.parametrize("name", RULES)
def test_what_is_sampled_proved_and_released_is_the_function(name, key):
    """In the target, the oracle and the norm at once."""
    uniform = lambda key, n: jax.random.uniform(key, (n,))  # noqa: E731
    target = RULES[name](lambda x: jnp.mean(x))
    oracle = lambda key, n: RULES[name](lambda x: x / 2)(uniform(key, n))  # noqa: E731
    norm = RULES[name](lambda x: jnp.abs(x))
    settings = {"n": 20, "gamma": 0.05, "m": 300}
    sampled = dpjax.sample_sensitivity(key, target, oracle, norm=norm, **settings)
    halves = lambda key, n: uniform(key, n) / 2  # noqa: E731
    plain = dpjax.sample_sensitivity(key, jnp.mean, halves, norm="l1", **settings)
    np.testing.assert_allclose(sampled.value, plain.value, rtol=1e-5)
    records = jnp.linspace(0, 1, 20)
    proved = dpjax.prove_sensitivity(target, records, bounds=(0.0, 1.0), norm="l1")
    assert 0.05 <= proved.value < 0.0501
    private = dpjax.privatize(target, dpjax.laplace(proved, 1e6))
    keys = jax.random.split(dpjax.random.seeded_key(1), 3)
    batch = jax.vmap(private)(keys, jnp.stack([records] * 3)).value
    np.testing.assert_allclose(batch, 0.5, atol=1e-3)
