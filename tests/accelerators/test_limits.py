"""Each limit is seen to fail, on programs that break one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accelerators import limits
from accelerators.check import checked
from accelerators.facts import Facts, facts_of
from accelerators.programs import Call

ALLOWED = {"temporary_mib": 1, "launches": 20, "loops": 0, "wide": 0}
VECTOR = jax.ShapeDtypeStruct((1000,), jnp.float32)


def problems(function, argument=VECTOR):
    return limits.broken(facts_of(jax.jit(function).lower(argument)), ALLOWED)


def test_a_plain_program_breaks_no_limit():
    assert problems(lambda x: jnp.sum(jnp.exp(x))) == []


def test_a_callback_is_found():
    def planted(x):
        return jax.pure_callback(lambda x: np.sin(x), VECTOR, x)

    assert problems(planted) == ["it calls the host"]


def test_a_program_that_jaxlib_cannot_read_is_not_counted_and_a_callback_is_found(monkeypatch):
    def unreadable(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", unreadable)
    assert facts_of(jax.jit(jnp.cumsum).lower(VECTOR)).launches is None
    test_a_callback_is_found()


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


def test_memory_of_the_host_is_found():
    facts = Facts(0.0, 0, 8, 0.0, 0.0, 1, 0, 0, 0, False)
    assert limits.broken(facts, ALLOWED) == ["it takes 8 bytes of the host's memory"]


def test_a_program_that_does_not_compile_is_found():
    planted = jax.jit(lambda x: jax.ffi.ffi_call("no_such_kernel", VECTOR)(x))
    facts, (problem,) = checked("cuda", "order statistic", lambda: Call(planted, (VECTOR,)))
    assert facts is None
    assert "no_such_kernel" in problem


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_program_without_a_row_is_found(platform):
    _, found = checked(platform, "planted", lambda: Call(jax.jit(jnp.sum), (VECTOR,)))
    assert found == [f"limits.toml has no row for it under [{platform}]"]


def test_a_program_with_a_row_is_held_to_it():
    call = Call(jax.jit(lambda x: jax.pure_callback(np.sin, VECTOR, x)), (VECTOR,))
    _, found = checked("cuda", "order statistic", lambda: call)
    assert found == ["it calls the host"]


def test_the_table_names_programs_that_there_are():
    from accelerators.programs import QUICK, programs

    names = programs(jax.devices() * 4)
    assert set(QUICK) <= set(names)
    table = limits.read()
    assert set(table) == {"all", "cuda", "tpu"}
    for platform in ("cuda", "tpu"):
        assert set(table[platform]) <= set(names)
        assert set(QUICK) <= set(table[platform])
        for row in table[platform].values():
            assert {"launches", "loops", "wide"} <= set(row)
