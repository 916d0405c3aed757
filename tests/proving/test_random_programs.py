"""Random programs: no pair of neighbors lies further apart than was proved."""

import jax
import numpy as np
import pytest

import dpjax
import random_programs as programs


def attack(seed, count, dtype):
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        words, target = programs.program(rng)
        norm = rng.choice(programs.NORMS)
        try:
            found = dpjax.global_sensitivity(
                target, programs.spec(dtype), bounds=(-1, 1), norm=str(norm)
            )
        except ValueError:  # No proof, or no record moves the value.
            continue
        proved += 1
        reached = programs.best_attack(target, rng, norm, dtype)
        assert reached <= found.value, (words, norm, reached, found.value)
    return proved


def test_random_programs_stay_within_their_bounds():
    assert attack(0, 8, np.float32) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_many_random_programs_stay_within_their_bounds(x64):
    with jax.enable_x64(x64):
        assert attack(1, 1000, np.float64 if x64 else np.float32) >= 300
