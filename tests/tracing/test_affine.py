"""Which programs are affine, and their linear parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.sensitivity._sums import is_affine, linear_part

MATRIX = jnp.arange(6.0).reshape(2, 3)


def with_rule(function):
    own = jax.custom_jvp(function)
    own.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return own


CALLS = {"jit": jax.jit, "a derivative of its own": with_rule, "checkpoint": jax.checkpoint}
AFFINE = {
    **{f"under {name}": call(lambda x: MATRIX @ x + 1) for name, call in CALLS.items()},
    "itself": lambda x: x,
    "a constant": lambda x: jnp.ones(2),
    "scaled and moved": lambda x: 3 * x / 7 - jnp.arange(3.0) + 2,
    "a matrix product": lambda x: MATRIX @ x + 1,
    "parts": lambda x: {"sum": jnp.sum(x), "some": x[1:], "turned": x[::-1].reshape(3, 1).T},
    "a mean under jit": jax.jit(jnp.mean),
    "put together": lambda x: jnp.concatenate([jnp.ones(2), -x, x]),
    "differences": jnp.diff,
    "elements": lambda x: x[jnp.array([0, 2, 2])],
    "a constant's function": lambda x: x * jnp.exp(jnp.sin(jnp.arange(3.0))),
}
OTHERS = {
    **{f"a square under {name}": call(lambda x: x * x) for name, call in CALLS.items()},
    "a square": lambda x: x * x,
    "less precise": lambda x: x.astype(jnp.bfloat16),
    "a ratio": lambda x: x / (1 + jnp.sum(x)),
    "a division by it": lambda x: 1 / x,
    "a rounding": jnp.round,
    "a step": lambda x: jnp.where(x > 0, 1.0, 0.0),
    "a clamp": lambda x: jnp.clip(x, 0, 1),
    "an integer": lambda x: x.astype(jnp.int32),
    "an absolute value": jnp.abs,
    "a maximum": jnp.max,
    "a product of sums": lambda x: jnp.dot(x, x),
    "a loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x),
    "a branch": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda y: y, lambda y: -y, x),
    "a choice by it": lambda x: MATRIX[0][jnp.argmax(x)],
}


def traced(function, x):
    return jax.make_jaxpr(function)(x)


@pytest.mark.parametrize("name", AFFINE)
def test_affine_programs_are_known(name):
    function = AFFINE[name]
    x = jnp.array([0.5, -2.0, 3.0])
    program = traced(function, x)
    assert is_affine(program)
    found = linear_part(program, [x])
    ends = jax.tree.leaves(function(x)), jax.tree.leaves(function(jnp.zeros(3)))
    for linear, at_x, at_0 in zip(found, *ends, strict=True):
        expected = np.asarray(at_x, np.float32) - np.asarray(at_0, np.float32)
        np.testing.assert_allclose(np.asarray(linear, np.float32), expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_are_not(name):
    assert not is_affine(traced(OTHERS[name], jnp.array([0.5, -2.0, 3.0])))


def test_arithmetic_of_integers_wraps_and_is_not_affine():
    counts = jnp.array([3, 4])
    assert is_affine(traced(lambda x: x[::-1], counts))
    assert is_affine(traced(lambda x: x / 5 + 1, counts))
    for wrapping in (lambda x: x * 2, lambda x: x - 1, lambda x: -x, jnp.sum, lambda x: x // 2):
        assert not is_affine(traced(wrapping, counts))
    (found,) = linear_part(traced(lambda x: x / 4 + 1, counts), [jnp.array([2.0, -1.0])])
    np.testing.assert_array_equal(found, [0.5, -0.25])


def test_mixed_dtypes(x64):
    def program(count, mean):
        return count.astype(jnp.float32) + mean

    traced_program = jax.make_jaxpr(program)(jnp.ones(2, jnp.int32), jnp.ones(2, jnp.float32))
    assert is_affine(traced_program)
    (found,) = linear_part(traced_program, [jnp.ones(2, jnp.float64), jnp.ones(2, jnp.float32)])
    np.testing.assert_array_equal(found, [2.0, 2.0])


def test_nothing_cancels():
    """f(x) - f(0) in floats would lose the small x next to the large constant."""
    program = traced(lambda x: x + 1e8, jnp.float32(1e-4))
    assert float(linear_part(program, [jnp.float32(1e-4)])[0]) == np.float32(1e-4)
