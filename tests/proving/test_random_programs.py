"""Random programs: no pair of neighbors lies further apart than was proved."""

import os

import jax
import numpy as np
import pytest

import dpjax
import random_graphs as graphs
import random_programs as programs

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "1000"))


def proved_bound(target, spec, bounds, norm):
    """None if there is none."""
    try:
        return dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm).value
    except dpjax.proving.NoProofError:
        return None
    except ValueError as error:
        if "public" not in str(error):
            raise
        return None


def attack(seed, count, dtype):
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        words, target = programs.program(rng)
        norm = str(rng.choice(programs.NORMS))
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            bound = proved_bound(target, programs.spec(dtype), (-1, 1), norm)
            if bound is None:
                continue
            proved += 1
            reached = programs.best_attack(target, rng, norm, dtype)
        assert reached <= bound, (seed, words, norm, reached, bound)
    return proved


def attack_graphs(seed, count, dtype):
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        names = rng.choice(list(graphs.ALL_BOUNDS), rng.integers(1, 4), replace=False).tolist()
        said, target = graphs.program(rng, names, dtype)
        norm = str(rng.choice(programs.NORMS))
        bounds = {name: graphs.ALL_BOUNDS[name] for name in names}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            bound = proved_bound(target, graphs.specs(names, dtype), bounds, norm)
            if bound is None:
                continue
            proved += 1
            reached = graphs.best_attack(target, rng, names, norm, dtype)
        assert reached <= bound, (seed, names, said, norm, reached, bound)
    return proved


def test_random_programs_stay_within_their_bounds():
    assert attack(0, 8, np.float32) >= 5


def test_random_graphs_stay_within_their_bounds():
    assert attack_graphs(0, 6, np.float32) >= 4


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


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_many_random_graphs_stay_within_their_bounds(x64):
    with jax.enable_x64(x64):
        assert attack_graphs(SEED, COUNT, np.float64 if x64 else np.float32) >= 0.7 * COUNT
