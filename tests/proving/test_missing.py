"""Records that may be NaN: proofs treat NaN soundly, and releases leave it to the target."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import lt_to_p

import dpjax
from all_pairs import N, all_pairs, bounds_of
from dpjax.proving import Ball, Interval, NoProofError
from dpjax.proving._exact_sums import ExactScatter, ExactSum
from dpjax.proving._exact_variances import ExactVariance
from dpjax.queries import PaddedRecords
from random_programs import distance
from white_box import check_every_step

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "500"))
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
NAN = float("nan")
KEY = dpjax.random.seeded_key(0)
LOW, HIGH = -0.5, 1.0
BOUNDS = Interval(LOW, HIGH, missing=True)
SPEC = jax.ShapeDtypeStruct((N,), jnp.float32)
FIRST, SECOND = all_pairs((LOW, HIGH, NAN))
BOTH = np.array([0.25, 0.5], np.float32)


@pytest.fixture(autouse=True, scope="module")
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def answered_mean(x):
    return jnp.nansum(x) / jnp.maximum(jnp.sum(~jnp.isnan(x)), 2)


PROVED = {
    "nansum": jnp.nansum,
    "nan_to_num": lambda x: jnp.nan_to_num(x, nan=0.25).sum(),
    "mean of those who answered": answered_mean,
    "mean with where": lambda x: jnp.sum(x, where=~jnp.isnan(x)) / 3,
    "number of missing": lambda x: jnp.isnan(x).sum(),
    "number of answers": lambda x: jnp.isfinite(x).sum(),
    "filled": lambda x: jnp.where(jnp.isnan(x), 0.25, x),
    "filled far away": lambda x: jnp.where(jnp.isnan(x), 7.0, x).sum(),
    "filled by its order": lambda x: jnp.where(x > 0.3, x, -2.0).sum(),
    "filled where it equals itself": lambda x: jnp.where(x == x, x, -2.0).sum(),
    "is finite": lambda x: jnp.where(jnp.isfinite(x), 3 * x, 0.0).sum(),
    "not nan": lambda x: jnp.where(~jnp.isnan(x), x, 2.0).sum(),
    "nan or negative": lambda x: jnp.where(jnp.isnan(x) | (x < 0), 2.0, x).sum(),
    "a number and positive": lambda x: jnp.where(~jnp.isnan(x) & (x > 0), x, 2.0).sum(),
    "arithmetic": lambda x: jnp.nansum(2 * x + 1 - x * x),
    "quotient": lambda x: jnp.nansum((1 - x) / (x + 2)),
    "power": lambda x: jnp.nansum(abs(-x) ** 3),
    "two operands": lambda x: jnp.nansum(x * (x > 0) + jnp.sin(jnp.nan_to_num(x))),
    "clipped": lambda x: jnp.nansum(jnp.clip(x, 0.5, 0.75)),
    "filled after a clip": lambda x: jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, 0.5, 0.75)).sum(),
    "raised": lambda x: jnp.nansum(jnp.maximum(x, 0.9)),
    "lt": lambda x: x < 2,
    "le": lambda x: x <= 2,
    "gt": lambda x: x > -2,
    "ge": lambda x: x >= -2,
    "eq": lambda x: x == HIGH,
    "ne": lambda x: x != 2,
    "one-hot": lambda x: (x[:, None] == np.array([LOW, HIGH], np.float32)).sum(0),
    "one-hot of missing too": lambda x: (
        jnp.nan_to_num(x, nan=3.0)[:, None] == np.array([LOW, HIGH, 3], np.float32)
    ).sum(0),
    "columns": lambda x: jnp.nansum(x[:, None] * BOTH, axis=0),
    "reshaped": lambda x: jnp.nansum((x[:, None] * BOTH).reshape(N, 1, 2), axis=(0, 1)),
    "stacked": lambda x: jnp.nansum(jnp.stack([x, -x], 1), axis=0),
    "joined": lambda x: jnp.nansum(jnp.concatenate([x, 2 * x])),
    "reversed": lambda x: jnp.nansum(x[::-1] * np.array([0.2, 0.5, 1], np.float32)),
    "later records": lambda x: jnp.nansum(x[1:] - x[:-1]),
    "variance of filled": lambda x: jnp.var(jnp.where(jnp.isnan(x), 0.25, x)),
    "sorted after filling": lambda x: jnp.sort(jnp.where(jnp.isnan(x), 9.0, x)),
}


@pytest.fixture(scope="module")
def moved():
    run = jax.jit(jax.vmap(lambda x: {name: rule(x) for name, rule in PROVED.items()}))
    return run(FIRST), run(SECOND)


@pytest.mark.parametrize("name", PROVED)
def test_no_pair_lies_further_apart(name, moved):
    found = bounds_of(PROVED[name], SPEC, BOUNDS)
    first, second = moved[0][name], moved[1][name]
    for norm, bound in found.items():
        reached = distance(first, second, norm).max()
        assert np.isfinite(reached)
        assert reached <= bound <= 4.1 * reached, (norm, reached, bound)


REFUSED = {
    "nothing done": (lambda x: x, "the value may be NaN"),
    "sum": (lambda x: x.sum(), "no proof for reduce_sum"),
    "sum plus one": (lambda x: (x + 1).sum(), "no proof for reduce_sum"),
    "mean": (jnp.mean, "no proof for reduce_sum"),
    "nanmean without a floor": (lambda x: jnp.nanmean(x), "Bound it away from 0"),
    "sort": (lambda x: jnp.sort(x)[0], "no proof for sort"),
    "median": (jnp.median, "infinite or NaN"),
    "maximum": (jnp.max, "no proof for reduce_max"),
    "exp": (lambda x: jnp.nansum(jnp.exp(x)), "no proof for exp"),
    "an integer": (lambda x: x.astype(int).sum(), "int32 cannot represent"),
    "a boolean": (lambda x: x.astype(bool).sum(), "bool cannot represent"),
    "16 bits": (lambda x: jnp.nansum(x.astype(jnp.bfloat16)), "bfloat16 cannot represent"),
    "0 times NaN": (lambda x: jnp.isnan(0 * x).sum(), "may be NaN on some databases"),
    "power 0": (lambda x: lax.integer_pow(x, 0).sum(), "x ** 0"),
    "dot": (lambda x: x @ x, "no proof for dot_general"),
    "softmax": (jax.nn.softmax, "no proof for reduce_max"),
    "variance": (jnp.var, "no proof for reduce_sum"),
    "norm clip": (lambda x: jnp.nansum(x / jnp.maximum(1, jnp.sqrt(jnp.sum(x * x)))), "reduce_sum"),
    "filled in another array": (lambda x: jnp.where(jnp.isnan(x[::-1]), 0.0, x), "may be NaN"),
    "filled where another is missing": (
        lambda x: jnp.where(jnp.isnan(jnp.where(x > 0, x[::-1], x)), 0.0, x), "may be NaN"
    ),
    "filled where a choice is missing": (
        lambda x: jnp.where(jnp.isnan(jnp.where(x > 0, 1.0, x)), 0.0, x + x[::-1]), "may be NaN"
    ),
    "filled elsewhere": (lambda x: jnp.where(jnp.isnan(x), x, 0.0), "may be NaN"),
    "filled where small": (lambda x: jnp.where(x > 0.3, 0.0, x), "may be NaN"),
    "nan and negative": (lambda x: jnp.where(jnp.isnan(x) & (x < 0), 0.0, x), "may be NaN"),
    "not less": (lambda x: jnp.where(~(x <= 0.3), x, 0.0), "may be NaN"),
    "xor": (lambda x: jnp.where(jnp.isnan(x) ^ (x > 0), 0.0, x), "may be NaN"),
    "total order": (lambda x: lt_to_p.bind(x, jnp.zeros_like(x)), "order of numbers that may"),
    "maximum with -inf": (lambda x: jnp.maximum(x, -jnp.inf), "infinite or NaN"),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda _, c: c + x, x), "no proof for scan"),
    "an exact sum": (ExactSum(0), "must be finite numbers"),
    "an exact sum by place": (
        lambda x: ExactScatter(0, 1)(jnp.zeros(1), jnp.zeros((N, 1), int), x), "finite updates"
    ),
    "an exact variance": (ExactVariance(0.0, 0, float(N)), "only over the axis of the records"),
    "a branch": (lambda x: lax.cond((x > 0).sum() > 1, lambda: x, lambda: -x), "a cond or switch"),
    "shuffled by a table": (lambda x: x[np.array([2, 0, 1])], "do not support NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_nan_is_refused(name):
    target, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)):  # And not that the value is public.
        dpjax.prove_sensitivity(target, SPEC, bounds=BOUNDS, norm="l1")
    with pytest.raises(NoProofError):
        dpjax.prove_sensitivity(
            lambda d: target(d.records), padded(), bounds=BOUNDS, norm="l1", relation=ADDED
        )


def test_a_refusal_names_the_line_and_a_remedy():
    with pytest.raises(NoProofError, match=r"test_missing\.py:\d+: an operand may.*jnp\.where"):
        dpjax.prove_sensitivity(lambda x: x.sum(), SPEC, bounds=BOUNDS, norm="l1")


def padded(n=N):
    return PaddedRecords(
        jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.bool_)
    )


ADDED_PROVED = {
    "sum": lambda d: jnp.sum(d.records, where=d.present & ~jnp.isnan(d.records)),
    "nansum": lambda d: jnp.nansum(d.records),
    "number of missing": lambda d: jnp.isnan(d.records).sum(),
    "number of answers": lambda d: (d.present & ~jnp.isnan(d.records)).sum(),
    "filled": lambda d: jnp.where(jnp.isnan(d.records), 0.25, d.records).sum(),
    "shifted": lambda d: (jnp.where(jnp.isnan(d.records), 0.25, d.records + 1) * d.present).sum(),
    "above": lambda d: 10 * (d.records > -2).sum() + d.present.sum(),
    "one-hot": lambda d: (
        (d.records[:, None] == np.array([LOW, HIGH], np.float32)) & d.present[:, None]
    ).sum(0),
    "sorted": lambda d: jnp.sort(jnp.nan_to_num(d.records, nan=0.3)),
}


@pytest.fixture(scope="module")
def every_database():
    """All databases over {low, high, NaN, no record}, and all pairs of neighbors in any slots."""
    places = np.array(np.meshgrid(*[range(4)] * N)).reshape(N, -1).T
    values = np.array([LOW, HIGH, NAN, 7.0], np.float32)
    held = np.stack([(places == k).sum(1) for k in range(3)], 1)
    lost = held[:, None] - held[None]
    pairs = np.argwhere((lost >= 0).all(-1) & (lost.sum(-1) == 1)).T
    return PaddedRecords(values[places], places < 3), pairs


@pytest.mark.parametrize("name", ADDED_PROVED)
def test_no_pair_of_padded_records_lies_further_apart(name, every_database):
    database, pairs = every_database
    for relation in (ADDED, None):
        bounds = BOUNDS if relation is ADDED else PaddedRecords(BOUNDS, (0, 1))
        found = dpjax.prove_sensitivity(
            ADDED_PROVED[name], padded(), bounds=bounds, norm="l1", relation=relation
        )
        assert found.bounds is not None
        clamped = found.bounds.enforced_on(ADDED_PROVED[name])
        values = jax.jit(jax.vmap(clamped))(database)
        if relation is ADDED:
            first, second = pairs
        else:  # One slot holds something else.
            keys = np.where(database.present, np.nan_to_num(database.records, nan=9.0), -9.0)
            first, second = np.argwhere((keys[:, None] != keys[None]).sum(-1) == 1).T
        reached = distance(values[first], values[second], "l1").max()
        assert np.isfinite(reached)
        assert reached <= found.value <= 4 * reached, (relation, reached, found.value)


def test_nan_goes_to_float64_and_back():
    with jax.enable_x64(True):
        target = lambda x: jnp.nansum(x.astype(jnp.float64).astype(jnp.float32))  # noqa: E731
        found = dpjax.prove_sensitivity(target, SPEC, bounds=BOUNDS, norm="l1")
        assert 1.5 <= found.value <= 1.51


def test_a_release_keeps_nan_for_the_target():
    """Exact: the share of 1,000 records that are missing, and the mean of the others."""
    rows = np.random.default_rng(0).uniform(0, 1, 1000).astype(np.float32)
    rows[::4] = NAN
    target = lambda x: jnp.stack(  # noqa: E731
        [jnp.nansum(x) / jnp.maximum(jnp.sum(~jnp.isnan(x)), 500), jnp.isnan(x).mean()]
    )
    bounds = Interval(0, 1, missing=True)
    found = dpjax.prove_sensitivity(target, rows, bounds=bounds, norm="l1")
    released = dpjax.privatize(target, dpjax.laplace(found, epsilon=1e4))(KEY, rows)
    np.testing.assert_allclose(released.value, [np.nanmean(rows), 0.25], atol=0.001)
    old = dpjax.prove_sensitivity(target, rows, bounds=(0, 1), norm="l1")
    released = dpjax.privatize(target, dpjax.laplace(old, epsilon=1e4))(KEY, rows)
    np.testing.assert_allclose(released.value, [0.75 * np.nanmean(rows), 0.0], atol=0.001)


def test_the_clamp_keeps_one_nan_and_bounds_all_numbers():
    rows = np.array([NAN, -NAN, np.inf, -np.inf, 7.0, 1e-40], np.float32)
    clamped = np.asarray(Interval(0.5, 1, missing=True).clamp(rows))
    np.testing.assert_array_equal(clamped, np.array([NAN, NAN, 1, 0.5, 1, 0.5], np.float32))
    assert len({x.tobytes() for x in clamped[:2]}) == 1


def test_only_floats_may_be_missing():
    spec = jax.ShapeDtypeStruct((N,), jnp.int32)
    with pytest.raises(
        (TypeError, OverflowError, ValueError), match="missing=True need a float dtype"
    ):
        dpjax.prove_sensitivity(jnp.sum, spec, bounds=Interval(0, 1, missing=True), norm="l1")


# Random programs, every intermediate value of which is compared with its bounds.

STEPS = {
    "plus one": lambda x: x + 1,
    "half": lambda x: x * 0.5,
    "square": jnp.square,
    "minus": lambda x: -x,
    "abs": jnp.abs,
    "over": lambda x: x / 3,
    "clip": lambda x: jnp.clip(x, -0.25, 0.75),
    "low": lambda x: jnp.minimum(x, 0.25),
    "fill": lambda x: jnp.where(jnp.isnan(x), 0.5, x),
    "fill far": lambda x: jnp.where(jnp.isfinite(x), x, -3.0),
    "positive": lambda x: jnp.where(x > 0, x, 0.125),
    "not positive": lambda x: jnp.where(~(x > 0), x, 0.125),
    "choose": lambda x: jnp.where(x[::-1] > 0, x, 2 * x),
    "is nan": lambda x: jnp.isnan(x).astype(x.dtype),
    "above": lambda x: (x > 0.3).astype(x.dtype),
    "equal": lambda x: (x == x).astype(x.dtype),
    "reverse": lambda x: x[::-1],
    "both": lambda x: x + x[::-1],
    "times": lambda x: x * x[::-1],
    "itself": lambda x: x - x,
    "where it is a number": lambda x: jnp.where((x == x) & (x < 9), x - 1, 0.0),
    "where either": lambda x: jnp.where(jnp.isnan(x) | (x > 0.5), 0.75, x),
}


def attack(seed, count):
    rng, proved = np.random.default_rng(seed), 0
    for _ in range(count):
        names = rng.choice(list(STEPS), rng.integers(1, 6)).tolist()

        def target(x, names=names):
            for name in names:
                x = STEPS[name](x)
            return jnp.nansum(jnp.where(jnp.isnan(x), 0.25, x))

        proved += check_every_step(target, SPEC, BOUNDS, FIRST, SECOND)
    return proved


def test_every_step_of_random_programs_stays_within_its_bounds():
    assert attack(0, 12) >= 8
    assert check_every_step(lambda x: jnp.isnan(0.5 * x - 1).sum(), SPEC, BOUNDS, FIRST, SECOND)
    assert not check_every_step(lambda x: jnp.isnan(0 * x).sum(), SPEC, BOUNDS, FIRST, SECOND)


@pytest.mark.slow
def test_every_step_of_many_random_programs_stays_within_its_bounds():
    assert attack(SEED, COUNT) >= 0.5 * COUNT


def test_a_ball_holds_no_missing_numbers():
    """NaN becomes 0 there, as before."""
    found = dpjax.prove_sensitivity(
        lambda x: x.sum(0), jax.ShapeDtypeStruct((N, 2), jnp.float32), bounds=Ball(1.0), norm="l2"
    )
    assert 2 <= found.value <= 2.01
