"""Random programs: no pair of neighbors lies further apart than was proved."""

import itertools
import os

import jax
import numpy as np
import pytest

import dpjax
import random_graphs as graphs
import random_programs as programs
from dpjax.proving import _exact_sums
from white_box import check_every_step

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "1000"))
THREE, BASES = (-1.0, 0.25, 1.0), 12


def proved_bound(target, spec, bounds, norm):
    """The bound, and the program that a release computes; None if there is no bound."""
    try:
        found = dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm)
        return found.value, found.bounds.enforced_on(target)
    except dpjax.proving.NoProofError:
        return None
    except ValueError as error:
        if "no record changes" not in str(error):
            raise
        return None


def attack(seed, count, dtype):
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        words, target = programs.program(rng)
        norm = str(rng.choice(programs.NORMS))
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            known = proved_bound(target, programs.spec(dtype), (-1, 1), norm)
            if known is None:
                continue
            bound, released = known
            proved += 1
            reached = programs.best_attack(released, rng, norm, dtype)
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
            known = proved_bound(target, graphs.specs(names, dtype), bounds, norm)
            if known is None:
                continue
            bound, released = known
            proved += 1
            reached = graphs.best_attack(released, rng, names, norm, dtype)
        assert reached <= bound, (seed, names, said, norm, reached, bound)
    return proved


def neighbors(rng, count, dtype):
    """Random and corner pairs, and all neighbors, over three values, of a few databases of them."""
    first, second, place = programs.pairs(rng, count, dtype)
    rows = np.array(list(itertools.product(THREE, repeat=programs.DIMS)), dtype)
    bases = rng.choice(THREE, (BASES, programs.N, programs.DIMS)).astype(dtype)
    base, where, row = (
        x.ravel() for x in np.indices((len(bases), programs.N, len(rows)), sparse=False)
    )
    others = bases[base].copy()
    others[np.arange(len(base)), where] = rows[row]
    return (
        np.concatenate([first, bases[base]]),
        np.concatenate([second, others]),
        np.concatenate([place, where]),
    )


def attack_steps(seed, count, dtype):
    rng, proved = np.random.default_rng(seed), 0
    for _ in range(count):
        words, target = programs.program(rng)
        first, second, place = neighbors(rng, 300, dtype)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            try:
                proved += check_every_step(
                    target, programs.spec(dtype), (-1, 1), first, second, place
                )
            except AssertionError as error:
                raise AssertionError(seed, words) from error
    return proved


@pytest.fixture
def always_exact(monkeypatch):
    """Sums of few terms are exact, too."""
    monkeypatch.setattr(_exact_sums, "_WORTH_IT", 0.0)
    monkeypatch.setattr(_exact_sums, "_LEAST_BITS", {4: -np.inf, 8: -np.inf})


def test_exact_sums_in_random_programs_stay_within_their_bounds(always_exact):
    assert attack_steps(5, 6, np.float32) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_exact_sums_in_many_random_programs_stay_within_their_bounds(x64, always_exact):
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        assert attack_steps(SEED, COUNT // 4, dtype) >= 0.07 * COUNT
        assert attack(SEED, COUNT // 4, dtype) >= 0.07 * COUNT


def test_random_programs_stay_within_their_bounds():
    assert attack(0, 8, np.float32) >= 5


def test_random_graphs_stay_within_their_bounds():
    assert attack_graphs(0, 6, np.float32) >= 4


def test_every_step_of_random_programs_stays_within_its_bounds():
    assert attack_steps(0, 6, np.float32) >= 2


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


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_every_step_of_many_random_programs_stays_within_its_bounds(x64):
    with jax.enable_x64(x64):
        assert attack_steps(SEED, COUNT // 2, np.float64 if x64 else np.float32) >= 0.15 * COUNT
