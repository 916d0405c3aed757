"""Loops of many steps, on all pairs of neighbors over three values."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of, traced
from dpjax.proving import NoProofError, _prove_sensitivity
from dpjax.proving import _loops as loops
from dpjax.proving._loops import closed
from dpjax.proving._value import RefusalError, constant
from dpjax.proving._walk import Walk
from random_programs import distance

WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)
TABLE = np.array([[1.0, -0.5]], np.float32)


def over(step, x, start=0.0, **more):
    return lax.scan(step, jnp.float32(start), x, **more)


def averaged(c, r):
    return 0.5 * c + r, c


def with_sum(c, r):
    return (total := c + r), total


def two_carries(c, r):
    fast, slow = c
    return (jnp.clip(fast + r, -1, 1), 0.7 * slow + 0.3 * fast), fast * slow


PROGRAMS = {
    "average of the last": lambda x: over(averaged, x)[0],
    "averages": lambda x: over(averaged, x)[1],
    "averages from the end": lambda x: over(averaged, x, reverse=True)[1],
    "averages from a private start": lambda x: over(averaged, x, x.mean()),
    "averages of centered records": lambda x: over(averaged, x - x.mean()),
    "sum": lambda x: over(with_sum, x)[0],
    "sum from 3": lambda x: over(with_sum, x, 3.0)[0],
    "sum from a private start": lambda x: over(with_sum, x, x.max())[0],
    "partial sums": lambda x: over(with_sum, x, 0.5)[1],
    "partial sums from the end": lambda x: over(with_sum, x, reverse=True)[1],
    "sum of squares": lambda x: over(lambda c, r: (r * r + c, None), x)[0],
    "weighted sum": lambda x: over(lambda c, r: (c + r[0] * r[1], None), (x, WEIGHTS))[0],
    "sum of rows": lambda x: lax.scan(
        lambda c, r: (c + r @ TABLE, None), jnp.zeros(2), x[:, None]
    )[0],
    "count": lambda x: lax.scan(lambda c, r: (c + (r > 0.1).astype(int), None), 0, x)[0],
    "maximum": lambda x: over(lambda c, r: (jnp.maximum(c, r), c), x, -1.0),
    "sum, clipped": lambda x: over(lambda c, r: (jnp.clip(c + r, -0.5, 1.5), c), x),
    "steps of jumps": lambda x: over(lambda c, r: (jnp.where(c > 0.2, 0.5 * r, r), c), x),
    "two carries": lambda x: lax.scan(two_carries, (jnp.float32(0), jnp.float32(0)), x),
    "each record": lambda x: lax.map(lambda r: jnp.tanh(3 * r), x),
    "each record, beside all": lambda x: lax.map(lambda r: r * x.sum(), x),
    "one record": lambda x: over(lambda c, r: (r, c), x),
    "a loop beside records": lambda x: lax.fori_loop(
        0, 4, lambda i, c: 0.5 * c + x.mean() * i.astype(c.dtype), jnp.float32(0)
    ),
    "a carry of each record": lambda x: lax.scan(
        lambda c, w: (jnp.tanh(0.5 * c + w * x), c.sum()), jnp.zeros(N), WEIGHTS
    ),
    "results of public steps": lambda x: lax.scan(
        lambda c, w: (c, jnp.maximum(w * x, 0)), 0, WEIGHTS
    )[1],
    "sum beside records": lambda x: lax.scan(
        lambda c, w: (c + w * x, None), jnp.zeros(N), WEIGHTS
    )[0],
    "steps that count back": lambda x: lax.fori_loop(
        0, 4, lambda i, c: (c[0] + -2, jnp.maximum(c[1], c[0].astype(x.dtype) * x.mean())),
        (jnp.int32(3), jnp.float32(0)),
    )[1],
}  # fmt: skip


@pytest.fixture
def never_unrolled(monkeypatch):
    """Loops of few steps as if they had many."""
    monkeypatch.setattr(loops, "_MOST_OPERATIONS", 0)
    monkeypatch.setattr(loops, "_MOST_UNROLLED", 0)


@pytest.fixture(scope="module")
def moved():
    run = jax.jit(jax.vmap(lambda x: {name: target(x) for name, target in PROGRAMS.items()}))
    first, second = all_pairs(VALUES)
    return run(first), run(second)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_pair_lies_further_apart(program, moved, never_unrolled):
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    for norm, bound in bounds_of(PROGRAMS[program], spec, (-1, 1)).items():
        farthest = distance(moved[0][program], moved[1][program], norm).max()
        assert 0 < farthest <= bound


MANY = jax.ShapeDtypeStruct((5000,), jnp.float32)
# With how far one record moves it, in l1.
KNOWN = {
    "average": (lambda x: over(lambda c, r: (0.9 * c + 0.1 * r, None), x)[0], 0.1),
    "averages": (lambda x: over(lambda c, r: (0.9 * c + 0.1 * r, c), x)[1].max(), 0.1),
    "count": (lambda x: lax.scan(lambda c, r: (c + (r > 0.1).astype(int), None), 0, x)[0], 1),
    "map": (lambda x: lax.map(jnp.square, x), 1),
    "maximum": (lambda x: over(lambda c, r: (jnp.maximum(c, r), None), x)[0], 1),
    "sum of integers": (lambda x: over(with_sum, jnp.round(x))[0], 1),
    # Steps that are walked one by one are refused for the product of their factors.
    "halves": (lambda x: lax.fori_loop(0, 300, lambda i, c: c / 2 + x.mean(), x.mean()), 2 / 5000),
    "toward the mean": (
        lambda x: lax.fori_loop(0, 3000, lambda i, c: 0.9 * c + 0.1 * x.mean(), jnp.float32(0)),
        1 / 5000,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_bounds_of_long_loops(name):
    target, truth = KNOWN[name]
    found = dpjax.prove_sensitivity(target, MANY, bounds=(0, 1), norm="l1")
    assert truth * 0.99 <= found.value <= truth * 1.02 + 1e-5


def test_a_map_of_few_records_keeps_its_rows():
    few = jax.ShapeDtypeStruct((20,), jnp.float32)
    assert bounds_of(lambda x: lax.map(jnp.square, x), few, (0, 1))["l1"] < 1.01
    assert bounds_of(lambda x: over(with_sum, x)[0], few, (0, 1))["l1"] < 1.01


def test_a_loop_that_a_compiler_keeps_multiplies_no_factors_of_its_steps():
    """Walked step by step, 500 factors of .5 would underflow."""
    few = jax.ShapeDtypeStruct((500,), jnp.float32)
    assert bounds_of(lambda x: over(averaged, x)[0], few, (0, 1))["l1"] < 1.01


def test_a_loop_rounds_the_sum_that_it_carries():
    """All of 2100 additions round a number near 2^24: below it by less than above."""
    n = 2101

    def target(x):
        return over(lambda c, r: (c + r, None), x, 2.0**24 - 2200)[0]

    first, second = (np.full(n, 1.4, np.float32) for _ in range(2))
    first[0], second[0] = 0, 2200
    run = jax.jit(target)
    apart = float(run(second)) - float(run(first))
    found = bounds_of(target, jax.ShapeDtypeStruct((n,), jnp.float32), (0, 2200))
    assert 4000 < apart <= found["linf"]
    at_zero = bounds_of(lambda x: over(with_sum, x)[0], MANY, (0, 1))["linf"]
    assert at_zero >= 1 + 2 * 5000**2 * 2.0**-24


def test_sums_of_sums_are_rounded_by_each_term_of_a_step():
    """A compiler may start the sum of a step at what the loop carries."""
    table = np.ones((10, 2), np.float32)
    spec = jax.ShapeDtypeStruct((3000, 2, 10), jnp.float32)
    step = lambda c, r: (c + r @ table, None)  # noqa: E731
    found = bounds_of(lambda x: lax.scan(step, jnp.zeros((2, 2)), x)[0], spec, (0, 1))
    assert found["linf"] >= 10 + 2 * (3000 * 10) ** 2 * 2.0**-24


REFUSED = {
    "no bound was found": lambda x: over(lambda c, r: (1.01 * c + r, None), x)[0],
    "might reach": lambda x: over(lambda c, r: (c + jnp.maximum(c, r), None), x)[0],
    "5000 steps": lambda x: over(lambda c, r: (c * c + r, None), x)[0],
    "infinite": lambda x: over(lambda c, r: (jnp.maximum(c, r), None), x, -jnp.inf)[0],
    "indices are public": lambda x: lax.fori_loop(0, 5000, lambda i, c: c + x[i], jnp.float32(0)),
    "more operations": lambda x: lax.scan(
        lambda c, r: (0.5 * c + r, None), jnp.float32(0), x, unroll=2
    )[0],
    "cumprod": lambda x: over(lambda c, r: (c + lax.cumprod(x)[0], None), x)[0],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_close_is_refused_with_its_line(why):
    with pytest.raises(NoProofError, match=why) as refusal:
        dpjax.prove_sensitivity(REFUSED[why], MANY, bounds=(0, 1), norm="l1")
    assert "test_loops.py" in str(refusal.value)
    assert "Or sample it" in str(refusal.value)


def descent(x, steps):
    step = lambda i, w: w - 0.01 * (w - x).mean()  # noqa: E731
    return lax.fori_loop(0, steps, step, jnp.float32(0))


def test_a_loop_whose_factors_overflow_in_the_end_is_refused_after_a_few_steps(monkeypatch):
    walked, run = [], Walk.run
    monkeypatch.setattr(Walk, "run", lambda *args: (walked.append(1), run(*args))[1])
    with pytest.raises(RefusalError, match="the public factors"):
        bounds_of(lambda x: descent(x, 60), jax.ShapeDtypeStruct((N,), jnp.float32), (0, 1))
    assert len(walked) < 10


def test_a_loop_whose_later_steps_multiply_by_1_is_proved():
    """Three steps grow the product of factors, but no later step does."""
    rates = np.where(np.arange(60) < 4, 0.05, 1).astype(np.float32)
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    for target in (
        lambda x: lax.scan(lambda w, r: (w * r, None), x.mean(), rates)[0],
        lambda x: lax.fori_loop(0, 60, lambda i, w: w * jnp.where(i < 4, 0.05, 1.0), x.mean()),
    ):
        found = np.inf
        with contextlib.suppress(RefusalError):
            found = bounds_of(target, spec, (0, 1))["l1"]
        assert found < 1


def test_what_was_not_walked_holds_nothing():
    """The first step takes 0 to a fraction: from then on, values are no integers."""
    seen = []

    def step(carry):
        seen.append(carry[0].whole)
        if carry[0].whole:
            return [dataclasses.replace(constant(np.float32(0)), whole=False)]
        return [constant(np.minimum(2 * carry[0].high + 0.25, np.float32(0.75)))]

    (found,) = closed(step, [constant(np.float32(0))], 100)
    assert seen[0]
    assert not seen[-1]
    assert found.low.item() == 0
    assert found.high.item() >= 0.75
    with pytest.raises(RefusalError, match="no bound was found"):
        closed(
            lambda carry: [constant(2 * carry[0].high + np.float32(1))],
            [constant(np.float32(0))],
            9,
        )


def test_a_loop_without_a_proof_step_by_step_is_walked_again_at_the_same_places():
    """The product of all factors may overflow. The clip in each step is what an invariant needs."""

    def target(x):
        return lax.fori_loop(0, 100, lambda i, y: jnp.clip(y * (2.0 + i) + x.sum(), -1, 1), x[0])

    walk, _ = _prove_sensitivity._walk(*traced(target, MANY, (0, 1)))
    (path,) = {step.path for step in walk.steps if step.operation == "reduce_sum"}
    assert len(path) == 2


def test_explain_shows_the_body_once():
    found = dpjax.prove_sensitivity(
        lambda x: over(lambda c, r: (jnp.tanh(0.5 * c + r), None), x)[0],
        MANY,
        bounds=(0, 1),
        norm="l1",
    )
    assert found.explain().count("tanh float32") == 1
