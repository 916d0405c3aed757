"""What it costs that LAPACK gets one matrix at a time on a CPU, where batches may wait for ever."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._tracing._programs import Program
from harness import Race, Row, record

SIZES = ((512, 8), (64, 32), (8, 128))  # How many systems, and of how many equations.


def solve(matrix: jax.Array) -> jax.Array:
    """A system whose matrix is the database."""
    return jnp.linalg.solve(matrix, matrix[0])


def run(rounds: int = 30) -> None:
    """Against the batched call, alone in its program: two of them would wait for ever."""
    rows, found = [], {}
    for count, size in SIZES:
        generator = np.random.default_rng(0)
        matrices = generator.normal(size=(count, size, size)) + 4 * size**0.5 * np.eye(size)
        matrices = jnp.asarray(matrices, jnp.float32)
        program = Program.trace("target", solve, jax.ShapeDtypeStruct((size, size), jnp.float32))
        ways = {"dpjax": jax.jit(jax.vmap(program)), "batched": jax.jit(jax.vmap(solve))}
        values = {name: np.asarray(way(matrices)) for name, way in ways.items()}
        np.testing.assert_allclose(values["dpjax"], values["batched"], rtol=1e-3, atol=1e-5)
        race = Race(
            {name: partial(_finish, way, matrices) for name, way in ways.items()}, rounds=rounds
        )
        job = f"{count} systems of {size} equations"
        found[job] = race.seconds
        rows.append(Row(job, "batched LAPACK", race.seconds["dpjax"], race.seconds["batched"]))
    record("lapack", rows, race=race, sizes={"sizes": SIZES}, results=found)


def _finish(way: Callable[[jax.Array], jax.Array], matrices: jax.Array) -> None:
    way(matrices).block_until_ready()


if __name__ == "__main__":
    run()
