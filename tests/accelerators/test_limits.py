"""Each limit is seen to fail, on programs that break one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accelerators import limits
from accelerators.facts import facts_of

ALLOWED = {"temporary_mib": 1, "launches": 20, "loops": 0, "wide": 0}
VECTOR = jax.ShapeDtypeStruct((1000,), jnp.float32)


def problems(function, argument=VECTOR):
    return limits.broken(facts_of(jax.jit(function).lower(argument).compile()), ALLOWED)


def test_a_plain_program_breaks_no_limit():
    assert problems(lambda x: jnp.sum(jnp.exp(x))) == []


def test_a_callback_is_found():
    def planted(x):
        return jax.pure_callback(lambda x: np.sin(x), VECTOR, x)

    assert problems(planted) == ["it calls the host"]


def test_a_loop_that_depends_on_data_is_found():
    def planted(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.5 * x, x)

    assert problems(planted) == ["it has 1 loops, and 0 are allowed"]


def test_a_loop_of_known_length_counts_its_launches():
    found = problems(lambda x: jax.lax.fori_loop(0, 500, lambda _, x: jnp.cumsum(x), x))
    assert any("launches, and 20 are allowed" in problem for problem in found)


def test_a_loop_within_a_loop_counts_each_time():
    def inner(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.5 * x, x)

    (problem,) = problems(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: inner(x) + 1, x))
    assert problem == "it has 3 loops, and 0 are allowed"


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_arithmetic_on_64_bits_is_found(dtype):
    with jax.enable_x64(True):
        found = problems(lambda x: jnp.sum(x.astype(dtype) * 3))
    assert any("wide, and 0 are allowed" in problem for problem in found)
    assert any("compute with float64" in problem for problem in found) == (dtype == np.float64)


def test_memory_is_found():
    (problem,) = problems(lambda x: jnp.sum(jnp.sort(x[:, None] * x[None, :], axis=0)))
    assert "MiB of temporary memory, and 1 are allowed" in problem


def test_a_program_that_the_table_lacks_fails():
    facts = facts_of(jax.jit(jnp.exp).lower(VECTOR).compile())
    problems = limits.broken(facts, limits.allowed("cuda", "none of these"))
    assert problems == [
        f"it has {n} {name}, and limits.toml has no row for it"
        for name, n in (("launches", facts.launches), ("loops", 0), ("wide", 0))
    ]


def test_the_table_names_programs_that_there_are():
    from accelerators.programs import QUICK, programs

    names = programs(jax.devices() * 4)
    assert set(QUICK) <= set(names)
    table = limits.read()
    assert set(table) == {"all", "cuda", "tpu"}
    for platform in ("cuda", "tpu"):
        assert set(table[platform]) <= set(names)
        assert set(QUICK) <= set(table[platform])
