"""No LAPACK call of a program takes more than one matrix on a CPU, whatever is mapped over it."""

import re

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._tracing._programs import Program

RECORDS = jax.ShapeDtypeStruct((10, 4), jnp.float32)
EYE = np.eye(4, dtype=np.float32)


def gram(d):
    return d.T @ d + EYE


@custom_vmap
def inverse_by_a_rule(matrix):
    return jnp.linalg.inv(matrix)


@inverse_by_a_rule.def_vmap
def _(axis_size, mapped, matrices):
    return jnp.linalg.inv(matrices), True


TARGETS = {
    "solve": lambda d: jnp.linalg.solve(gram(d), d[0]),
    "cholesky": lambda d: jnp.linalg.cholesky(gram(d)),
    "cho_solve": lambda d: jsl.cho_solve(jsl.cho_factor(gram(d)), d[0]),
    "eigh": lambda d: jnp.linalg.eigh(gram(d))[0],
    "eig": lambda d: jnp.abs(jnp.linalg.eig(gram(d))[0]).sum(),
    "svd": lambda d: jnp.linalg.svd(d, compute_uv=False),
    "qr": lambda d: jnp.abs(jnp.linalg.qr(d)[1]),
    "lstsq": lambda d: jnp.linalg.lstsq(d[:, :3], d[:, 3])[0],
    "triangular_solve": lambda d: jsl.solve_triangular(jnp.tril(gram(d)), d[0]),
    "tridiagonal_solve": lambda d: lax.linalg.tridiagonal_solve(
        d[:5, 0] / 9, 3 + d[:5, 1], d[:5, 2] / 9, d[:5, :2]
    ),
    "schur": lambda d: jnp.abs(jsl.schur(gram(d))[0]).sum(),
    "batched": lambda d: jnp.linalg.inv(
        d.reshape(5, 2, 4, 1) * d.reshape(5, 2, 1, 4) + EYE[None, None]
    ).sum((0, 1)),
    "scan": lambda d: lax.scan(
        lambda c, x: (jnp.linalg.solve(jnp.outer(x, x) + EYE, c + x), None), d[0], d
    )[0],
    "while": lambda d: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.linalg.inv(c[1] + EYE)), (0, d.T @ d)
    )[1],
    "cond": lambda d: lax.cond(d[0, 0] > 0, jnp.linalg.inv, jnp.linalg.cholesky, gram(d)),
    "derivative": lambda d: jax.grad(jax.checkpoint(lambda a: jnp.linalg.slogdet(a)[1]))(gram(d)),
    "jit": lambda d: jax.jit(jnp.linalg.inv)(gram(d)),
    "rule": lambda d: inverse_by_a_rule(gram(d)),
    "sharded": lambda d: jax.shard_map(
        jnp.linalg.inv,
        mesh=jax.make_mesh((1,), ("x",)),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )(gram(d)),
    "shared": lambda d: jsl.solve_triangular(jnp.asarray(2 * EYE), d[0]),
}
targets = pytest.mark.parametrize("name", TARGETS)


def records(shape=()):
    values = np.random.default_rng(20170611).normal(size=(*shape, *RECORDS.shape))
    return values.astype(np.float32)


def axes_of_calls(function, *arguments):
    """The number of axes of every array that the lowered program hands to LAPACK."""
    text = jax.jit(function).lower(*arguments).as_text()
    calls = re.findall(r"custom_call @lapack_\w+.*?: \((.*?)\) ->", text)
    return [shape.count("x") for shape in re.findall(r"tensor<((?:\d+x)+)", " ".join(calls))]


@targets
def test_lapack_takes_one_matrix_at_a_time(name):
    program = Program.trace("target", TARGETS[name], RECORDS)
    axes = axes_of_calls(jax.vmap(jax.vmap(program)), records((3, 2)))
    assert axes
    assert max(axes) <= 2


def test_without_the_cure_it_takes_them_all():
    """The power of the test above."""
    axes = axes_of_calls(jax.vmap(TARGETS["solve"]), records((3,)))
    assert max(axes) == 3


@pytest.mark.parametrize("name", ["solve", "batched", "scan", "cond", "derivative", "rule"])
def test_the_values_are_those_of_the_target(name):
    program = Program.trace("target", TARGETS[name], RECORDS)
    databases = records((5,))
    expected = np.stack([jax.jit(TARGETS[name])(d) for d in databases])
    np.testing.assert_allclose(
        jax.jit(jax.vmap(program))(databases), expected, rtol=2e-4, atol=2e-5
    )


def test_there_may_be_no_matrix():
    none = lambda d: jnp.sum(jnp.linalg.inv(d[:0, :, None] * d[:0, None]))  # noqa: E731
    program = Program.trace("target", none, RECORDS)
    assert jax.vmap(program)(records((5,))).tolist() == [0.0] * 5


def test_a_function_that_is_called_again_is_compiled_once():
    def solves(count):
        def target(d):
            x = d[0]
            for _ in range(count):
                x = jnp.linalg.solve(gram(d), x)
            return x

        program = Program.trace("target", target, RECORDS)
        return len(axes_of_calls(jax.vmap(program), records((3,))))

    assert solves(5) == solves(1) > 0


def test_other_backends_keep_the_batch():
    program = Program.trace("target", TARGETS["cholesky"], RECORDS)
    traced = jax.jit(jax.vmap(program)).trace(records((3,)))
    assert "tensor<3x4x4xf32>" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "while" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_programs_can_be_differentiated():
    program = Program.trace("target", TARGETS["cholesky"], RECORDS)
    found = jax.grad(lambda d: jnp.sum(program(d)))(jnp.asarray(records()))
    expected = jax.grad(lambda d: jnp.sum(TARGETS["cholesky"](d)))(jnp.asarray(records()))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_programs_without_lapack_run_as_they_were_traced():
    program = Program.trace("target", jnp.mean, RECORDS)
    again = jax.make_jaxpr(program)(RECORDS)
    assert str(again) == str(program.jaxpr)
