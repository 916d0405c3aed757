"""The subset envelope: losses against their definition, exact probabilities, and what it is for."""

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.mechanisms._subset_envelope import BlockDesign, doubled_scores, losses_at_ends

DESIGNS = [BlockDesign(8, 3, 1), BlockDesign(9, 2, 3), BlockDesign(11, 3, 2), BlockDesign(7, 1, 1)]
designs = pytest.mark.parametrize("design", DESIGNS, ids=str)
PAIRS = 2500  # Of each design: 10^4 together.


def least_hitting(subsets, chosen, blocks):
    """The size of the smallest set of blocks that meets all chosen subsets, by trying all."""
    for count in range(len(blocks) + 1):
        for hit in itertools.combinations(blocks, count):
            if all(set(hit) & set(subset) for subset in subsets[chosen].tolist()):
                return count
    raise AssertionError


@pytest.mark.parametrize("design", [BlockDesign(6, 2, 1), BlockDesign(7, 2, 2)], ids=str)
def test_losses_are_those_of_the_definition(design):
    results = np.random.default_rng(0).integers(0, 6, design.evaluations).astype(np.float32)
    thresholds = np.asarray(design.thresholds(jnp.asarray(results)))
    assert thresholds.size == design.most_losses
    ends = np.cumsum((0, *design.lengths))
    for y in np.arange(-1, 6) + 0.5:
        expected = 0
        for a, b in itertools.pairwise(ends):
            inside = (design.subsets[:, 0] >= a) & (design.subsets[:, 0] < b)
            expected += least_hitting(design.subsets, inside & (results > y), range(a, b))
        assert np.sum(thresholds > y) == expected


@functools.partial(jax.jit, static_argnames="design")
def scores_of(design, results):
    inner = jnp.linspace(-50.0, 50.0, 129)[1:-1]

    def one(row):
        return doubled_scores(design.thresholds(row), inner)

    return jax.vmap(one)(results)


@designs
def test_exact_probabilities_of_adversarial_neighbors_keep_epsilon(design):
    """A changed block changes every result that it is in, as an adversary likes."""
    generator = np.random.default_rng(23)
    center = 10 * generator.standard_cauchy((PAIRS, 1))
    spread = generator.choice([0.0, 0.05, 1.0, 30.0], (PAIRS, 1))
    here = center + spread * generator.standard_cauchy((PAIRS, design.evaluations))
    block = generator.integers(design.blocks, size=PAIRS)
    hit = np.any(design.subsets[None] == block[:, None, None], axis=-1)
    # All up, all down, or each at random.
    direction = generator.choice([-1.0, 1.0], (PAIRS, design.evaluations))
    direction[: PAIRS // 2] = direction[: PAIRS // 2, :1]
    there = np.where(hit, 1e9 * direction, here)
    moved = np.asarray(scores_of(design, here)) - np.asarray(scores_of(design, there))
    assert np.abs(moved).max() == 2
    log_p, log_q = (
        jax.nn.log_softmax(np.asarray(scores_of(design, x), float) / 4) for x in (here, there)
    )
    largest = float(np.abs(log_p - log_q).max())
    assert largest <= 1 + 1e-5
    # Power: with half of the factor, no more than .5 would be left.
    assert largest > 0.8


def chaos(records):
    """No continuity anywhere, NaN for a third of all databases, and infinities."""
    mixed = jnp.sum(jnp.sin(1e4 * records) * 1e4)
    result = 50 * jnp.sin(mixed)
    result = jnp.where(records.sum() % 1 < 0.33, jnp.nan, result)
    return jnp.where(records.max() > 0.99, jnp.inf, result)


def test_a_chaotic_program_keeps_epsilon_to_the_end():
    """From records to exact probabilities: the mechanism as it is released."""
    mechanism = dpjax.subset_envelope(
        chaos, 1.0, lower=-50.0, upper=50.0, blocks=9, size=3, groups=1, candidates=32
    )
    generator = np.random.default_rng(0)
    here = generator.random((200, 28)).astype(np.float32)
    there = here.copy()
    there[np.arange(200), generator.integers(28, size=200)] = generator.random(200)

    @jax.jit
    @functools.partial(jax.vmap)
    def log_pmf(database):
        scores, _ = mechanism._scores(database)
        return scores, jax.vmap(mechanism.selection.log_prob, (0, None))(jnp.arange(32), scores)

    (scores, p), (others, q) = log_pmf(here), log_pmf(there)
    assert np.abs(scores - others).max() == 2
    assert np.abs(p - q).max() <= 1 + 1e-5
    np.testing.assert_allclose(np.exp(p).sum(axis=1), 1, rtol=1e-4)


def test_nan_counts_as_the_lowest_result():
    mechanism = dpjax.subset_envelope(
        jnp.max, 1.0, lower=0.0, upper=1.0, blocks=5, size=1, candidates=4
    )
    x = jnp.array([0.3, 0.3, 0.8, 0.8, jnp.nan])
    found = mechanism.scores(x)
    np.testing.assert_array_equal(found, mechanism.scores(x.at[4].set(-jnp.inf)))
    np.testing.assert_array_equal(found, [-1.5, 0.0, -0.5, -0.5])


def test_losses_begin_at_all_blocks_and_end_at_none():
    left, right = losses_at_ends(jnp.array([-3.0, 0.5, 9.0]), jnp.array([0.0, 1.0]))
    assert (left.tolist(), right.tolist()) == ([3, 2, 1], [2, 1, 0])


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_probability_outside_is_attained_by_a_constant(epsilon):
    mechanism = dpjax.subset_envelope(
        lambda x: 0.3 + 0 * x[0], epsilon, lower=0.0, upper=1.0, blocks=12, size=3, groups=2
    )
    scores = mechanism.scores(jnp.zeros(24))
    assert int(jnp.sum(scores == 0)) == 1
    selected = jax.nn.softmax(epsilon / 2 * np.asarray(scores, float))
    assert 1 - selected.max() == pytest.approx(mechanism.outside, rel=1e-2)
    assert 1 - selected.max() <= mechanism.outside
    assert mechanism.design.most_losses == 8


def test_sorted_records_do_not_matter_to_an_average():
    mechanism = dpjax.subset_envelope(
        jnp.mean, 1.0, lower=0.0, upper=1.0, blocks=12, size=3, groups=2, candidates=20
    )
    scores = mechanism.scores(jnp.linspace(0, 1, 1200))
    assert int(jnp.argmax(scores)) in (9, 10)


def test_trees_dtypes_and_leftover_records():
    """The last records of a size that the blocks do not divide change nothing."""
    mechanism = dpjax.subset_envelope(
        lambda d: jnp.sum(d["a"]) > 3, 1.0, lower=0.0, upper=1.0, blocks=4, size=2, groups=1
    )
    key = dpjax.random.seeded_key(0)
    database = {"a": jnp.arange(11, dtype="uint8"), "b": jnp.zeros((11, 2), "bfloat16")}
    other = {"a": database["a"].at[8:].set(255), "b": database["b"].at[9:].set(jnp.nan)}
    one, two = mechanism(key, database), mechanism(key, other)
    assert one.value.index == two.value.index
    assert one.guarantee.epsilon == 1


def test_few_subsets_at_a_time_have_the_same_results(monkeypatch):
    design, database = BlockDesign(9, 3, 1), jnp.sin(jnp.arange(90.0))
    together = design.evaluate(jnp.max, database, 1)
    monkeypatch.setattr("dpjax.mechanisms._subset_envelope._MOST_BYTES", 2**10)
    np.testing.assert_array_equal(together, design.evaluate(jnp.max, database, 2**7))


def test_code_on_the_host_fails_in_silence():
    def fails(records):
        raise ValueError(records)

    target = dpjax.targets.host(fails, output=jnp.zeros(()))
    mechanism = dpjax.subset_envelope(
        target, 1.0, lower=0.0, upper=1.0, blocks=4, size=2, groups=1, candidates=8
    )
    scores = mechanism.scores(jnp.ones(8))
    assert int(jnp.argmax(scores)) == 0


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_whose_bits_come_from_the_first_subset_are_refused(kind, key):
    """One record of it moved all results, and scores by 3."""

    def drawn(records):
        seed = records.sum().astype(jnp.int32)
        return jax.random.uniform(jax.random.key(seed, impl=kind))

    mechanism = dpjax.subset_envelope(
        drawn, 1.0, lower=0.0, upper=1.0, blocks=4, size=2, groups=1, candidates=8
    )
    with pytest.raises(ValueError, match="draw"):
        mechanism(key, jnp.zeros(8))


def test_a_worker_that_dies_changes_no_other_subset():
    """All subsets of its batch failed, so one record moved every result."""

    def dies(records):
        if records.max() > 5 and multiprocessing.parent_process():
            os._exit(1)
        return float(records.max())

    target = dpjax.targets.host(dies, output=jnp.zeros(()), jobs=2)
    mechanism = dpjax.subset_envelope(
        target, 1.0, lower=0.0, upper=8.0, blocks=4, size=1, candidates=8
    )
    here, there = jnp.array([1.5, 2.5, 3.5, 4.5]), jnp.array([9.0, 2.5, 3.5, 4.5])
    assert jnp.abs(mechanism.scores(here) - mechanism.scores(there)).max() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size"),
        ({"blocks": 5, "size": 6}, "size"),
        ({"groups": 7}, "each group"),
        ({"blocks": 21, "size": 2, "groups": 1}, "each group"),
        ({"candidates": 1}, "candidates"),
        ({"upper": 0.0}, "lower"),
    ],
)
def test_bad_parameters_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dpjax.subset_envelope(jnp.mean, 1.0, **({"lower": 0.0, "upper": 1.0} | change))


def drawn_by_rbg(x):
    """Under `vmap`, all subsets get bits of the first one's key."""
    seed = jax.lax.bitcast_convert_type(jnp.mean(x), jnp.int32)
    return jax.random.uniform(jax.random.key(seed, impl="rbg"))


def test_bad_programs_and_databases_are_refused(key):
    def envelope(target):
        return dpjax.subset_envelope(target, 1.0, lower=0.0, upper=1.0, blocks=4, size=2, groups=1)

    with pytest.raises(ValueError, match="rbg"):
        envelope(drawn_by_rbg)(key, jnp.zeros(8))
    with pytest.raises(ValueError, match="at least as many records"):
        envelope(jnp.mean)(key, jnp.zeros(3))
    with pytest.raises(ValueError, match="common leading axis"):
        envelope(jnp.mean)(key, (jnp.zeros(8), jnp.zeros(9)))
    with pytest.raises(ValueError, match="one number"):
        envelope(lambda x: x[:2])(key, jnp.zeros(8))
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda a: envelope(lambda x: a * x.sum()).scores(jnp.zeros(8)))(1.0)


def r_squared(database):
    """Of a linear regression with an intercept."""
    x, y = database
    x, y = x - x.mean(axis=0, keepdims=True), y - y.mean()
    # A little ridge, so that few records do not divide by zero.
    slopes = jnp.linalg.solve(x.T @ x + 1e-6 * jnp.eye(x.shape[1]), x.T @ y)
    return 1 - jnp.sum((y - x @ slopes) ** 2) / jnp.sum(y**2)


@pytest.mark.slow
def test_r_squared_of_ten_features():
    """n = 1100, epsilon 1: the errors of the issue, and of the best sample-and-aggregate."""
    keys = jax.random.split(jax.random.key(23), (12, 2))
    scale = {"epsilon": 1.0, "lower": 0.0, "upper": 1.0}
    mechanisms = {
        "envelope": dpjax.subset_envelope(r_squared, **scale),
        **{
            f"sample-and-aggregate, {b}": dpjax.subset_envelope(
                r_squared, **scale, blocks=b, size=1, groups=1
            )
            for b in (12, 16, 22)
        },
    }
    middles = (np.arange(1024) + 0.5) / 1024
    errors = {name: [] for name in mechanisms}
    weights = {name: [] for name in mechanisms}
    for one, other in keys:
        x = jax.random.normal(one, (1100, 10))
        y = x @ jnp.full(10, 0.2) + jax.random.normal(other, (1100,))
        truth = float(r_squared((x, y)))
        for name, mechanism in mechanisms.items():
            scores = np.asarray(mechanism.scores((x, y)), float)
            weights[name].append(np.asarray(jax.nn.softmax(scores / 2)))
            errors[name].append(np.abs(middles - truth))

    def quantile(name, p):
        off, weight = np.concatenate(errors[name]), np.concatenate(weights[name]) / 12
        order = np.argsort(off)
        return off[order][np.searchsorted(np.cumsum(weight[order]), p)]

    assert mechanisms["envelope"].design.evaluations <= 4400
    assert quantile("envelope", 0.5) <= 0.045
    assert quantile("envelope", 0.9) <= 0.11
    best = min(quantile(name, 0.5) for name in mechanisms if name != "envelope")
    print({name: (quantile(name, 0.5), quantile(name, 0.9)) for name in mechanisms})
    assert quantile("envelope", 0.5) <= best / 2
    assert math.isclose(sum(w.sum() for w in weights["envelope"]), 12, rel_tol=1e-3)


def envelope(target):
    return dpjax.subset_envelope(target, 50.0, lower=0, upper=10, blocks=16, size=1, candidates=64)


def test_the_program_that_is_drawn_from_is_the_one_that_was_checked():
    """One that mixes subsets under vmap takes the place of one that was accepted."""

    mixes = False
    mechanism = envelope(lambda x: drawn_by_rbg(x) if mixes else jnp.mean(x))
    records = jnp.zeros(64).at[5].set(9.0)
    assert mechanism(dpjax.random.seeded_key(1), records).value.index == 0
    mixes = True
    for key in (dpjax.random.secure_key(), dpjax.random.seeded_key(1)):
        with pytest.raises(ValueError, match="must not draw with rbg keys"):
            mechanism(key, records)


def test_a_function_that_reads_state_is_traced_once_for_a_release(key):
    """The first trace is checked. A second one would be drawn from."""
    count = itertools.count()
    mechanism = envelope(lambda x: jnp.mean(x) + next(count))
    first, second = (mechanism(key, jnp.full(64, 0.5)).value.value for _ in "ab")
    assert (float(first), float(second)) == pytest.approx((0.5, 1.5), abs=0.1)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """All of them are equal. They compute different numbers."""

    factor: float = dataclasses.field(compare=False)

    def __call__(self, x):
        return jnp.mean(x) * self.factor


def test_a_release_is_of_its_own_target(key):
    records = jnp.full(64, 0.5)
    for factor in (1.0, 10.0):
        mechanism = envelope(Scaled(factor))
        middle = float(mechanism(key, records).value.value)
        assert middle == pytest.approx(0.5 * factor, abs=0.1)
        best = (int(np.argmax(mechanism.scores(records))) + 0.5) * 10 / 64
        assert best == pytest.approx(0.5 * factor, abs=0.1)


def test_a_release_is_of_what_its_target_closes_over_by_then(key):
    factors, records = [1.0], jnp.full(64, 0.5)
    mechanism = envelope(lambda x: jnp.mean(x) * factors[0])
    assert float(mechanism(key, records).value.value) == pytest.approx(0.5, abs=0.1)
    factors[0] = 10.0
    assert float(mechanism(key, records).value.value) == pytest.approx(5, abs=0.1)


def test_an_audit_finds_no_value_off_a_grid_because_values_have_none():
    mechanism = dpjax.subset_envelope(
        jnp.mean, 1.0, lower=0.0, upper=1.0, blocks=8, size=3, groups=1, candidates=10
    )
    records = jnp.linspace(0, 1, 8)
    moved = records.at[0].set(1.0)
    result = dpjax.auditing.audit(
        dpjax.random.seeded_key(0), mechanism, value=records, neighbor=moved, samples=2_000
    )
    assert result.off_grid == 0
