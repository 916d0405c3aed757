"""It always answers: fresh processes that sample and release what leaves XLA, idle and busy."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp, dpjax
import jax.scipy.linalg as jsl

def gram(d):
    return d.T @ d + jnp.eye(32)

TARGETS = {
    "solve": lambda d: jnp.linalg.solve(gram(d), d.sum(0)),
    "several": lambda d: (
        jnp.linalg.solve(gram(d), d.sum(0)),
        jnp.linalg.eigh(gram(d))[0],
        jnp.linalg.det(gram(d) / 99),
    ),
    "cholesky": lambda d: jnp.linalg.cholesky(gram(d)),
    "eigh": lambda d: jnp.linalg.eigh(gram(d))[0],
    "svd": lambda d: jnp.linalg.svd(gram(d), compute_uv=False),
    "qr": lambda d: jnp.abs(jnp.linalg.qr(gram(d))[1]),
    "lstsq": lambda d: jnp.linalg.lstsq(gram(d), d.sum(0))[0],
    "triangular_solve": lambda d: jsl.solve_triangular(jnp.tril(gram(d)), d.sum(0)),
    "fft": lambda d: jnp.abs(jnp.fft.fft2(gram(d))),
    "loop": lambda d: jax.lax.fori_loop(
        0,
        3,
        lambda i, x: jax.lax.cond(i == 1, jnp.linalg.inv, jnp.linalg.cholesky, x + gram(d)),
        gram(d),
    ),
}
target = TARGETS[sys.argv[1]]
key = dpjax.random.seeded_key(int(sys.argv[2]))
mesh = jax.make_mesh((jax.device_count(),), ("devices",)) if jax.device_count() > 1 else None
sensitivity = dpjax.sample_sensitivity(
    key, target, lambda key, n: jax.random.normal(key, (n, 32)), n=200, m=300, gamma=0.1,
    norm="l2", mesh=mesh, chunk_size=64, allow_cancellation=True)
private = dpjax.privatize(target, dpjax.gaussian(sensitivity, epsilon=0.5, delta=1e-6))
databases = jax.random.normal(jax.random.key(1), (8, 200, 32))
jax.block_until_ready(private(key, databases[0]))
jax.block_until_ready(jax.jit(jax.vmap(private))(jax.random.split(key, 8), databases))
"""
TARGETS = (
    *("solve", "several", "cholesky", "eigh", "svd", "qr", "lstsq", "triangular_solve", "fft"),
    "loop",
)


@pytest.fixture
def busy():
    """Three processes beside the test that use all the time there is."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for process in others:
        process.kill()
        process.wait()


def answers(run_python, target, count, **settings):
    for seed in range(count):
        program = f"import sys; sys.argv = ['', {target!r}, '{seed}']\n" + PROGRAM
        run_python(program, timeout=300, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_process_answers(run_python, target):
    answers(run_python, target, 8)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_process_answers_beside_others(run_python, target, busy):
    answers(run_python, target, 8)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_process_answers_on_eight_devices(run_python, target, busy):
    answers(run_python, target, 4, devices=8)


@pytest.mark.slow
def test_ridge_regression_written_by_a_user_answers(run_python):
    answers(run_python, "solve", 1)
