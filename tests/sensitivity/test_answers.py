"""It always answers: a process that samples and releases what leaves XLA, on eight devices.

Batches of LAPACK calls wait for each other for ever if as many devices call as the pool has
threads (`dpjax/_tracing/_evaluate.py`). A library that hands over batches stops at the first call
of each target below but `triangular_solve` and `fft`, on an idle machine and on a busy one: once
each is enough. On one device it answered eight times out of eight, so nothing is tried there.
"""

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

from dpjax._running._progress import run_in_flight
from dpjax._tracing._programs import Program

PROGRAM = """
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

def sample_and_release(target, seed):
    key = dpjax.random.seeded_key(seed)
    mesh = jax.make_mesh((jax.device_count(),), ("devices",)) if jax.device_count() > 1 else None
    sensitivity = dpjax.sample_sensitivity(
        key, target, lambda key, n: jax.random.normal(key, (n, 32)), n=200, m=600, gamma=0.1,
        norm="l2", mesh=mesh, chunk_size=64, allow_cancellation=True)
    private = dpjax.privatize(target, dpjax.gaussian(sensitivity, epsilon=0.5, delta=1e-6))
    databases = jax.random.normal(jax.random.key(1), (8, 200, 32))
    jax.block_until_ready(private(key, databases[0]))
    jax.block_until_ready(jax.jit(jax.vmap(private))(jax.random.split(key, 8), databases))
"""
EVERY = """
for seed, target in enumerate(TARGETS.values()):
    sample_and_release(target, seed)
"""
# What the library did before, also with keys. It gives up after seconds of rest, not a minute.
BROKEN = """
from dpjax._running import _progress
from dpjax._tracing import _evaluate, _evaluate
from dpjax.sensitivity import _pairs
_evaluate._CONCERNED = frozenset()
_pairs.drawn = lambda draw, *arguments: draw(*arguments)
_progress._PATIENCE = 160
try:
    sample_and_release(TARGETS["solve"], 0)
except _progress.NoAnswerError as error:
    print(error)
"""


@pytest.mark.slow
def test_every_target_is_answered(run_python):
    run_python(PROGRAM + EVERY, devices=8, timeout=1200)


@pytest.mark.slow
@pytest.mark.skipif(
    jaxlib.version.__version_info__ >= (0, 11, 1), reason="this jaxlib cuts no batch into parts"
)
def test_a_library_that_hands_over_batches_does_not_answer(run_python):
    said = run_python(PROGRAM + BROKEN, devices=8, timeout=1200)
    assert said.startswith("a program has not finished")


@pytest.mark.parametrize(
    ("function", "order"), [(jnp.linalg.cholesky, "sfsfsfsf"), (jnp.sum, "sssfsfff")]
)
def test_steps_that_may_block_each_other_are_not_started_ahead(function, order):
    """Where a step will never be done, to start the next one would block the thread that waits."""
    done = []
    run_in_flight(
        range(4),
        lambda step: done.append("s"),
        lambda step: done.append("f"),
        programs=(Program.trace("target", function, jax.ShapeDtypeStruct((4, 4), "float32")),),
        device=jax.devices("cpu")[0],
    )
    assert "".join(done) == order
