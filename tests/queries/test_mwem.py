"""MWEM: the algorithm without noise, its noise, what it promises, and where it pays off."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpjax
from dpjax import queries
from dpjax.queries import _mwem
from dpjax.queries._mwem import Measured

MATRIX = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, -1], [0, 0, 2, 2]])
WORKLOAD = queries.linear_workload(MATRIX)
COUNTS = np.array([9, 1, 4, 6])
RECORDS, ROUNDS = 20, 2
TRUTH = jnp.asarray(MATRIX @ COUNTS, jnp.int32)
NEIGHBORS = [
    jnp.asarray(MATRIX @ (COUNTS - np.eye(4, dtype=int)[i] + np.eye(4, dtype=int)[j]), jnp.int32)
    for i, j in itertools.permutations(range(4), 2)
]
ADD_OR_REMOVE_ONE = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE


def mechanism_at(epsilon, **options):
    options = {"rounds": ROUNDS, "records": RECORDS, "replays": 1} | options
    return queries.mwem(WORKLOAD, epsilon, **options)


@pytest.fixture(scope="module")
def draws():
    """Many releases at an epsilon, of one program."""

    @jax.jit
    def release(keys, epsilon):
        return jax.vmap(lambda key: mechanism_at(epsilon)(key, TRUTH).value)(keys)

    keys = jax.random.split(dpjax.random.seeded_key(0), 2**12)
    return lambda epsilon: jax.tree.map(np.asarray, release(keys, jnp.float32(epsilon)))


def learned(queries_asked, measurements):
    """Multiplicative weights on the host, in float64: every table that a round begins with."""
    weights, tables = np.ones(4), []
    for number in range(len(queries_asked)):
        tables.append(RECORDS * weights / weights.sum())
        turns = [number, *range(number + 1)]
        for turn in turns:
            row, measured = MATRIX[queries_asked[turn]] / 2, measurements[turn] / 2
            answer = row @ weights / weights.sum() * RECORDS
            weights = weights * np.exp((measured - answer) / (2 * RECORDS) * row)
    return np.array([*tables, RECORDS * weights / weights.sum()])


def test_without_noise_it_asks_the_worst_query_and_learns_by_multiplicative_weights(draws):
    found, truth = draws(1e5), np.asarray(TRUTH)
    asked = []
    for _ in range(ROUNDS):
        answers = MATRIX @ learned(asked, truth[asked])[-1]
        asked.append(int(np.argmax(np.abs(np.rint(answers) - truth))))
    assert np.all(found.queries == asked)
    assert np.all(found.measurements == truth[asked])
    tables = learned(asked, found.measurements[0])
    np.testing.assert_allclose(found.average[0], tables[:-1].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.last[0], tables[-1], rtol=1e-5)


def test_updates_in_blocks_are_those_one_by_one(monkeypatch):
    """On a GPU three updates are one block, so that the last round has two."""
    asked, answers = np.array([0, 2, 3]), np.array([4.0, -3.0, 15.0])

    def measure(number, tries, _):
        query, answer = jnp.asarray(asked)[number], jnp.asarray(answers, jnp.float32)[number]
        return Measured(jnp.array(True), tries, query, answer)

    def elsewhere(*operands, default, **_):
        return default(*operands)

    monkeypatch.setattr(_mwem.lax, "platform_dependent", elsewhere)
    learner = queries.mwem(WORKLOAD, 1.0, rounds=3, records=RECORDS, replays=1)
    _, last, _ = jax.jit(lambda: learner._learned(measure))()
    np.testing.assert_allclose(last, learned(asked, answers)[-1], rtol=1e-5)


def test_noise_is_that_of_its_parts(draws):
    """Chi-squared and averages of 4096 draws, at 10^-6 each; half the noise would be far off."""
    epsilon = 2.0
    found = draws(epsilon)
    errors = np.abs(np.rint(MATRIX @ np.full(4, RECORDS / 4)) - np.asarray(TRUTH))
    # Both parts of a round have epsilon / 4, and a record moves an answer by 2.
    weights = np.exp(epsilon / 4 * errors / (2 * 2))
    counts = np.bincount(found.queries[:, 0], minlength=4)
    assert scipy.stats.chisquare(counts, 2**12 * weights / weights.sum()).pvalue > 1e-6
    noise = found.measurements - np.asarray(TRUTH)[found.queries]
    scale = 2 / (epsilon / 4)
    assert np.all(np.abs(np.abs(noise).mean(axis=0) / scale - 1) < 5 / np.sqrt(2**12))
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / np.sqrt(2**12)


def test_neighbors_are_within_epsilon(draws):
    epsilon = 2.0
    mechanism, found = mechanism_at(epsilon), draws(epsilon)
    far = SimpleNamespace(queries=jnp.asarray([3, 3]), measurements=jnp.asarray([900.0, 900.0]))

    @jax.jit
    def log_probs(asked, measured, truth):
        def one(asked, measured):
            output = SimpleNamespace(queries=asked, measurements=measured)
            return mechanism.log_prob(output, truth)

        return jax.vmap(one)(asked, measured)

    asked = jnp.concatenate([jnp.asarray(found.queries[:500]), far.queries[None]])
    measured = jnp.concatenate([jnp.asarray(found.measurements[:500]), far.measurements[None]])
    here = log_probs(asked, measured, TRUTH)
    losses = np.array([log_probs(asked, measured, neighbor) - here for neighbor in NEIGHBORS])
    assert np.max(np.abs(losses)) <= epsilon * (1 + 1e-5)
    # Both measurements spend all of their halves where noise is far out.
    assert np.max(np.abs(losses[:, -1])) >= epsilon / 2 * (1 - 1e-3)


@pytest.mark.parametrize("relation", dpjax.NeighboringRelation)
def test_the_guarantee_is_that_of_all_parts(relation):
    mechanism = mechanism_at(0.7, rounds=7, relation=relation)
    parts = [mechanism.selection.guarantee.epsilon, mechanism.measurement.guarantee.epsilon]
    assert 7 * sum(parts) == pytest.approx(0.7, rel=1e-12)
    assert mechanism.sensitivity.value == 2
    assert (mechanism.guarantee.epsilon, mechanism.guarantee.delta) == (0.7, 0)
    assert mechanism.guarantee.relation is relation
    assert mechanism.zcdp[0] == pytest.approx(7 * 0.05**2 * (1 / 8 + 1 / 2))


def test_what_was_asked_for_is_public():
    mechanism, key = mechanism_at(1.0), dpjax.random.seeded_key(0)
    for value in (jnp.zeros(3, int), jnp.zeros(4), {"a": TRUTH, "b": TRUTH}):
        with pytest.raises(ValueError, match="answers of the workload"):
            mechanism(key, value)
    for options in ({"rounds": 0}, {"records": 0}, {"replays": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            mechanism_at(1.0, **options)
    with pytest.raises(TypeError, match="workload"):
        queries.mwem(MATRIX, 1.0, rounds=1, records=1)
    with pytest.raises(ValueError, match="at most 100,000,000 updates"):
        queries.mwem(WORKLOAD, 1.0, rounds=2**16, records=1, replays=2**10)


def test_an_error_is_that_of_all_rounds_at_once():
    """2 T parts may miss, each with a 2 T-th of the probability."""
    mechanism = mechanism_at(1.0, rounds=5)
    missed = 0.1 / (2 * 5)
    # Laplace noise of one answer, and the gap of the exponential mechanism.
    part, reach = 1.0 / (2 * 5), mechanism.sensitivity.value
    off = np.floor(reach / part * np.log(1 / missed) + 0.5)
    worse = np.floor(2 * reach / part * np.log(len(MATRIX) / missed))
    learned = 4 * (RECORDS * 2) ** 2 * np.log(4) / 5
    bound = (learned + off**2 * (1 + (5 + 1) / 2)) ** 0.5 + worse + 1
    assert float(mechanism.error(confidence=0.9)) == pytest.approx(bound, rel=1e-3)


@pytest.mark.slow
def test_the_average_keeps_its_bound():
    """Where that says something: the uniform table is worse. Each draw may fail once in ten."""
    mechanism = mechanism_at(1e6, rounds=1600, replays=0)
    keys = jax.random.split(dpjax.random.seeded_key(1), 16)
    release = jax.jit(jax.vmap(lambda key: mechanism(key, TRUTH).value))
    tables = np.asarray(release(keys).average, float)
    errors = np.abs(tables @ MATRIX.T - np.asarray(TRUTH)).max(axis=1)
    bound = float(mechanism.error(confidence=0.9))
    assert np.all(errors <= bound)
    uniform = np.abs(MATRIX @ np.full(4, RECORDS / 4) - np.asarray(TRUTH)).max()
    assert bound < uniform


@pytest.mark.slow
@pytest.mark.parametrize("sensitivity", [2, 0.2])
def test_the_auditor_refutes_a_sensitivity_that_is_too_small_and_no_other(key, sensitivity):
    claimed = dpjax.assume_sensitivity(sensitivity, norm="linf")
    mechanism = dataclasses.replace(mechanism_at(1.0), sensitivity=claimed)
    truth, neighbor = jnp.asarray([10, 10, 10, 10]), jnp.asarray([10, 10, 8, 12])
    result = dpjax.auditing.audit(
        key, mechanism, value=truth, neighbor=neighbor, samples=200_000, confidence=0.999
    )
    assert result.claimed == 1
    assert (result.bound > 1) == (sensitivity < 2)


def tumors():
    """569 real records: eight measurements of each, above their median or not."""
    datasets = pytest.importorskip("sklearn.datasets")
    measured = datasets.load_breast_cancer().data[:, :8]
    return (measured > np.median(measured, axis=0)).astype(np.int32)


def two_groups():
    """400 records of two groups, each of which mostly gives the same answers."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 400)[:, None]
    return np.where(rng.random((400, 8)) < 0.1, 1 - group, group).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("records", [tumors, two_groups])
def test_it_beats_noise_on_every_answer_where_there_are_many(records):
    """All marginals of three of eight attributes; with enough epsilon, it is the other way."""
    table = records()
    names = [f"attribute {i}" for i in range(8)]
    people = {name: jnp.asarray(column) for name, column in zip(names, table.T, strict=True)}
    workload = queries.marginal_workload(
        dict.fromkeys(names, 2), list(itertools.combinations(names, 3))
    )
    truth = np.asarray(workload(people))
    keys = jax.random.split(dpjax.random.seeded_key(2), 8)

    @jax.jit
    def answers(keys, epsilon):
        mechanism = queries.mwem(workload, epsilon, rounds=10, records=len(table))
        laplace = dpjax.laplace(workload.sensitivity(), epsilon)
        one = jax.vmap(lambda key: workload.answers(mechanism(key, truth).value.last))(keys)
        return one, jax.vmap(lambda key: laplace(key, truth).value)(keys)

    def errors(epsilon):
        return [np.abs(np.asarray(x) - truth).mean() for x in answers(keys, jnp.float32(epsilon))]

    ours, noisy = errors(1.0)
    uniform = np.abs(truth - len(table) / 8).mean()
    assert ours < 0.5 * noisy
    assert ours < 0.8 * uniform
    ours, noisy = errors(1000.0)
    assert noisy < 0.1 * ours
