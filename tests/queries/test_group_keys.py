"""Private keys: which groups exist, published where enough people are in them."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax.queries import _group_keys

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
both_relations = pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)
KEY = dpjax.random.seeded_key(5)
LOOSE = {"epsilon": 1e4, "delta": 0.4}


def counts_of(column, at_most):
    """Keys and how many people have them."""
    _, words, known = _group_keys._entries(np.asarray(column))
    found, counts = _group_keys._sorted_counts(words, known, at_most=at_most)
    keys = _group_keys.integers_of(found[counts > 0])
    return dict(zip(keys, counts[counts > 0].tolist(), strict=True))


NOBODY = {
    "integers": np.zeros(0, "int32"),
    "big integers": np.zeros(0, "int64"),
    "floats": np.zeros(0),
    "nullable": pd.Series([], dtype="Int64"),
    "texts": np.zeros(0, "U"),
    "texts of pandas": pd.Series([], dtype="string"),
    "several groups": np.zeros((0, 3), "int64"),
}


@pytest.mark.parametrize("kind", NOBODY)
def test_that_nobody_is_there_is_private(kind):
    """A refusal would tell an empty column from one of a single record.

    What else has a private number of records: `padded_records`, which has its own test.
    """

    def released():
        options = {"relation": ADD, "capacity": 5, "epsilon": 1.0, "delta": 1e-6}
        try:
            return queries.group_keys(KEY, NOBODY[kind], **options).value
        except ValueError as refused:
            return refused

    assert released() == ()
    with pytest.raises(ValueError, match="column must not be empty"):
        queries.group_keys(KEY, NOBODY[kind], epsilon=1.0, delta=1e-6)


def test_every_person_counts_once_in_each_of_its_first_groups():
    people = [[3, 3, -1], [np.nan, 3, 7], [7, -1, 3], [0.5, np.inf, -1]]
    assert counts_of(people, 3) == {-1: 3, 3: 3, 7: 2}
    assert counts_of(people, 2) == {-1: 3, 3: 2, 7: 2}
    assert counts_of(people, 1) == {-1: 1, 3: 2, 7: 1}
    assert counts_of([5, 5, 2], 1) == {2: 1, 5: 2}
    assert counts_of([np.nan, 0.5], 1) == {}
    column = np.random.default_rng(0).integers(-40, 40, 500)
    keys, counts = np.unique(column, return_counts=True)
    assert counts_of(column, 1) == dict(zip(keys.tolist(), counts.tolist(), strict=True))


def published_with(mechanism, threshold, count, size):
    """The probability that a group of so many people is published, from the exact noise."""
    if count == 0:
        return 0.0
    outputs = jnp.arange(threshold, threshold + 4000)
    value = jnp.int32(count)
    logs = jax.vmap(lambda y: mechanism.log_prob(y, value))(outputs)
    return float(jnp.sum(jnp.exp(logs)))


@both_relations
@pytest.mark.parametrize("at_most", [1, 2])
def test_neighbors_are_within_epsilon_and_delta(relation, at_most):
    """All pairs of small neighbors: the hockey-stick divergence of the sets that are published."""
    epsilon, delta, domain = 0.8, 0.05, range(3)
    reach = at_most * (2 if relation is REPLACE else 1)
    mechanism = dpjax.discrete_laplace(float(reach), epsilon)
    size = jax.ShapeDtypeStruct((8,), jnp.int32)
    threshold = _group_keys._threshold(mechanism, size, delta / reach)
    chance = [published_with(mechanism, threshold, count, size) for count in range(9)]
    assert chance[1] <= delta / reach < chance[2]  # A threshold less by 1 would fail.
    records = [x for k in range(at_most + 1) for x in itertools.combinations(domain, k)]

    def law(counts):
        out = np.ones(1)
        for count in counts:
            out = np.concatenate([out * (1 - chance[count]), out * chance[count]])
        return out

    def having(base, record):
        return [count + (key in record) for key, count in enumerate(base)]

    worst = 0.0
    for base in itertools.product((0, 1, 5), repeat=3):
        others = records if relation is REPLACE else [()]
        for x, y in itertools.product(records, others):
            one, two = law(having(base, x)), law(having(base, y))
            for p, q in ((one, two), (two, one)):
                worst = max(worst, np.maximum(p - math.exp(epsilon) * q, 0).sum())
    assert 0.45 * delta < worst <= delta * (1 + 1e-6)


def test_the_threshold_covers_the_noise_that_is_drawn():
    """P(Z >= m) = a^m / (1 + a) with a = exp(-1 / b), down to 1e-12."""
    for epsilon, delta in ((1.0, 1e-6), (0.1, 1e-12), (3.0, 1e-3)):
        mechanism = dpjax.discrete_laplace(2.0, epsilon)
        size = jax.ShapeDtypeStruct((1000,), jnp.int32)
        m = _group_keys._threshold(mechanism, size, delta / 2) - 1
        scale = mechanism.effective_scale(like=size)
        both = 1 + math.exp(-1 / scale)
        assert math.exp(-m / scale) / both <= delta / 2
        assert math.exp(-(m - 1 - 1e-4 * m) / scale) / both > delta / 2


@pytest.mark.parametrize("most", [2, 0], ids=["small chunks", "large chunks"])
def test_the_noise_of_chunks_is_independent_and_of_the_scale_of_all_counts(most, monkeypatch):
    """The scale within 5%: false alarms below 1e-9. A scale for a chunk alone is told apart."""
    monkeypatch.setattr(_group_keys, "_CHUNK", 2**7)
    monkeypatch.setattr(_group_keys, "_LARGE_CHUNK", 2**9)
    monkeypatch.setattr(_group_keys, "_MANY", most * 2**7)
    counts, scales = np.arange(2**14 + 5, dtype=np.int32), []

    def add_noise(key, value, calibration, noise):
        scales.append((len(value), int(calibration.coordinates)))
        return kept(key, value, calibration, noise)

    kept = _group_keys.add_noise
    monkeypatch.setattr(_group_keys, "add_noise", add_noise)
    mechanism = dpjax.discrete_laplace(2.0, 0.1)
    noise = _group_keys._noisy(KEY, counts, mechanism, len(counts)) - counts
    assert noise.shape == counts.shape
    for some in (0, 1, 2**7, 2**10 + 1):  # The other counts are 0, and are left out.
        first = _group_keys._noisy(KEY, counts[:some], mechanism, len(counts))
        assert first.tolist() == (noise + counts)[:some].tolist()
    assert {*scales} == {(2**7 if most else 2**9, len(counts))}
    assert abs(np.abs(noise).mean() / 20 - 1) < 0.05
    parts = noise[: 2**14].reshape(-1, 2**7)
    assert len(np.unique(parts, axis=0)) == len(parts)  # No two chunks have the same noise.


@both_relations
def test_large_groups_are_published_and_lonely_people_are_not(relation):
    capacity = 1000 if relation is ADD else None
    options = {"relation": relation, "capacity": capacity, "epsilon": 1.0, "delta": 1e-6}
    cities = np.repeat(["Kiel", "Bonn", "Ulm", ""], [400, 300, 1, 200])
    frame = pd.DataFrame({"city": cities})
    for column in (cities, frame["city"], frame["city"].astype("category")):
        release = queries.group_keys(KEY, column, **options)
        assert release.value == ("", "Bonn", "Kiel")
    assert release.guarantee.epsilon == 1.0
    assert release.guarantee.delta == 1e-6
    assert release.guarantee.relation is relation
    found = queries.group_keys(KEY, frame["city"].where(cities != "Bonn"), **options)
    assert found.value == ("", "Kiel")
    numbers = queries.group_keys(KEY, np.repeat([7, -3, 2], [300, 100, 1]), **options)
    assert numbers.value == (-3, 7)
    assert queries.group_keys(KEY, np.arange(5), **options).value == ()
    counted = queries.by(queries.counting_query(), column="city", keys=release.value)
    assert counted(frame).tolist() == [200, 300, 400]


def test_a_person_in_several_groups_costs_more():
    pairs = np.stack([np.arange(300) % 2, 2 + np.arange(300) % 3], axis=1)
    release = queries.group_keys(KEY, pairs, epsilon=1.0, delta=1e-6, at_most=2)
    assert release.value == (0, 1, 2, 3, 4)
    assert queries.group_keys(KEY, pairs, epsilon=1.0, delta=1e-6).value == (0, 1)
    one, two = (
        _group_keys._threshold(
            dpjax.discrete_laplace(reach, 1.0),
            jax.ShapeDtypeStruct((600,), jnp.int32),
            1e-6 / reach,
        )
        for reach in (2.0, 4.0)
    )
    assert two > 2 * one - 2


@both_relations
def test_noise_and_threshold_are_those_of_all_groups_that_change(relation, monkeypatch):
    found = []

    def threshold(mechanism, _, passed):
        found.append((mechanism.scale, passed))
        return 1

    monkeypatch.setattr(_group_keys, "_threshold", threshold)
    capacity = 9 if relation is ADD else None
    options = {"relation": relation, "capacity": capacity, "epsilon": 0.5, "delta": 1e-6}
    times = 2 if relation is REPLACE else 1
    for shape, at_most, most in (((9,), 1, 1), ((9,), 3, 1), ((9, 4), 3, 3), ((9, 4), 9, 4)):
        release = queries.group_keys(KEY, np.zeros(shape, int), at_most=at_most, **options)
        assert set(release.value) <= {0}  # Never a group that nobody is in.
        assert found.pop() == (times * most / 0.5, 1e-6 / (times * most))


def test_a_ledger_pays_every_time(tmp_path):
    ledger = dpjax.Ledger(tmp_path / "keys.db", epsilon=2, delta=1e-5)
    with ledger:
        for _ in range(2):
            queries.group_keys(dpjax.random.secure_key(), np.arange(9), epsilon=1, delta=1e-6)
        with pytest.raises(dpjax.BudgetExceededError):
            queries.group_keys(dpjax.random.secure_key(), np.arange(9), epsilon=1, delta=1e-6)
        with pytest.raises(ValueError, match="too small"):
            queries.group_keys(dpjax.random.secure_key(), np.arange(9), epsilon=1e-16, delta=0.1)
    assert (ledger.spent.epsilon, ledger.spent.delta) == (2.0, 2e-6)
    assert [row["what"] for row in ledger.history()] == ["group keys"] * 2


def test_what_is_no_column_of_keys_is_refused():
    nine = np.arange(9)

    def tried(column=nine, **arguments):
        return queries.group_keys(KEY, column, **{**LOOSE, **arguments})

    for arguments in ({"delta": 0}, {"delta": 1}, {"epsilon": 0}, {"at_most": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            tried(**arguments)
    for arguments in ({"capacity": 20}, {"relation": ADD}, {"relation": ADD, "capacity": 3}):
        with pytest.raises(ValueError, match="capacity must be"):
            tried(**arguments)
    with pytest.raises(ValueError, match="shape"):
        tried(np.zeros((2, 2, 2), int))
    with pytest.raises(TypeError, match="mask"):
        tried(np.ma.array([1, 2], mask=[0, 1]))
    with pytest.raises(TypeError, match="jit"):
        jax.jit(tried)(jnp.arange(3))


def test_parameters_at_their_ends():
    """Refused before anything is paid, or released: no public number overflows on the way."""
    with pytest.raises(ValueError, match="epsilon=1e-09 is too small: the threshold"):
        queries.group_keys(KEY, np.arange(3), epsilon=1e-9, delta=1e-6)
    with pytest.raises(ValueError, match="delta=5e-324 is too small"):
        queries.group_keys(KEY, np.arange(3), epsilon=1.0, delta=5e-324)
    most = [queries.group_keys(KEY, np.full(9, 3), at_most=m, **LOOSE).value for m in (1, 2**40)]
    assert most == [(3,), (3,)]
