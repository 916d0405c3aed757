"""Random programs: no pair of neighbors lies further apart than was proved."""

import os

import jax
import numpy as np
import pytest

import dpjax
import random_programs as programs

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "1000"))


def attack(seed, count, dtype):
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        words, target = programs.program(rng)
        norm = str(rng.choice(programs.NORMS))
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            spec = programs.spec(dtype)
            try:
                found = dpjax.global_sensitivity(target, spec, bounds=(-1, 1), norm=norm)
            except dpjax.proving.NoProofError:
                continue
            except ValueError as error:
                if "public" not in str(error):
                    raise
                continue
            proved += 1
            reached = programs.best_attack(target, rng, norm, dtype)
        assert reached <= found.value, (seed, words, norm, reached, found.value)
    return proved


def test_random_programs_stay_within_their_bounds():
    assert attack(0, 8, np.float32) >= 5


def test_every_word_is_a_program():
    """One that raised would count as a program without a proof."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for step in programs.STEPS.values():
            assert jax.eval_shape(step, programs.spec(np.float32)).shape == (6, 2)
        for end in programs.ENDS.values():
            jax.eval_shape(end, programs.spec(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_many_random_programs_stay_within_their_bounds(x64):
    with jax.enable_x64(x64):
        assert attack(SEED, COUNT, np.float64 if x64 else np.float32) >= 0.3 * COUNT
