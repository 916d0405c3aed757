"""Which arrays of a program take memory, by rule and by what XLA compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dpjax import targets
from dpjax._tracing._programs import Program

N = 128
ROW, TABLE = 4 * N, 4 * N * N


def table(x):
    return x[:, None] * x[None]


PROGRAMS = {
    "an input": (lambda x: x[0], ROW),
    "terms of a sum": (lambda x: jnp.sum(table(x)), ROW),
    "terms in an inner program": (lambda x: jax.jit(lambda y: jnp.exp(table(y)).sum())(x), ROW),
    "terms in a program with a rule": (lambda x: jnp.sum(jax.nn.relu(table(x))), ROW),
    "terms from an inner program": (lambda x: jnp.max(jax.jit(table)(x), axis=1), ROW),
    "two uses in the same sum": (lambda x: jnp.sum(table(x) + jnp.exp(table(x))), ROW),
    "a table of constants": (lambda x: x[0] * jnp.sum(jnp.sort(table(jnp.arange(64.0)))), ROW),
    "an output": (table, TABLE),
    "an output of an inner program": (lambda x: jax.jit(table)(x), TABLE),
    "terms of a sum, and an output": (lambda x: (jnp.sum(y := table(x)), y), TABLE),
    "terms of two sums": (lambda x: jnp.sum(jnp.exp(y := table(x))) + jnp.max(y), TABLE),
    "deviations from a mean": (lambda x: jnp.var(table(x)), TABLE),
    "what is sorted": (lambda x: jnp.sum(jnp.sort(table(x))), TABLE),
    "a factor of a product": (lambda x: jnp.sum(jnp.exp(table(x)) @ x), TABLE),
    "inside a loop": (lambda x: lax.map(lambda y: jnp.sum(y * table(x)), x), TABLE),
    "inside a loop in a loop": (
        lambda x: lax.map(lambda y: lax.map(lambda z: jnp.sum(y * z * table(x)), x), x),
        TABLE,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_largest_array_is_one_that_is_kept(name):
    function, expected = PROGRAMS[name]
    x = jax.ShapeDtypeStruct((N,), jnp.float32)
    program = Program.trace("function", function, x)
    assert program.largest_array_on_cpu == expected
    # An accelerator may keep them all.
    all_count = name.startswith(("terms", "two uses"))
    assert program.largest_array == (TABLE if all_count else expected)


@pytest.mark.parametrize(("function", "expected"), [x for x in PROGRAMS.values() if x[1] == ROW])
def test_a_batch_needs_no_more_than_a_few_of_them(function, expected):
    xs = jax.ShapeDtypeStruct((16, N), jnp.float32)
    found = jax.jit(jax.vmap(function)).lower(xs).compile().memory_analysis()
    assert found.temp_size_in_bytes <= 4 * 16 * expected


def test_densities_take_the_memory_of_the_records():
    target = targets.kernel_density_on_lattice(bandwidth=0.1, degree=10, dims=1)
    records = jax.ShapeDtypeStruct((5000, 1), jnp.float32)
    assert Program.trace("target", lambda x: target(x), records).largest_array_on_cpu == 4 * 5000
