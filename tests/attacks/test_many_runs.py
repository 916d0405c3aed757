"""Many runs as one program: the same whatever the chunks, compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.attacks._membership_trials import many_runs


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 100])
def test_runs_are_the_same_in_any_chunks(chunk_size):
    runs = many_runs(
        "runs", lambda i, x: (i, x * i), (jnp.uint32(3),), count=23, chunk_size=chunk_size
    )
    assert np.array_equal(runs[0], np.arange(23))
    assert np.array_equal(runs[1], 3 * np.arange(23))


def test_a_function_that_is_traced_anew_is_not_compiled_again(compilations):
    def run():
        return many_runs("runs", lambda i, x: i + x, (jnp.uint32(5),), count=9, chunk_size=4)

    assert compilations(run)
    assert not compilations(run)


def test_under_vmap_the_function_may_close_over_what_is_mapped():
    def of(x):
        return many_runs("runs", lambda i: i * x, (), count=5, chunk_size=2)

    found = jax.vmap(of)(jnp.arange(3, dtype=jnp.uint32))
    assert np.array_equal(found, np.arange(3)[:, None] * np.arange(5))
