"""The private test of an oracle: its size and power, and that one record moves the counts by 2.

Sizes are shares of rejections at .05. They may exceed it by 3 standard errors.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.mechanisms._oracle_check import _counts, _program_of, plausibility
from dpjax.random import seeded_key

EXPONENTIAL = dpjax.oracles.independent(jax.random.exponential, log_prob=lambda x: -x)


def hidden_cause(key, n):
    """Records that share an unknown mean: they are exchangeable, and depend on each other."""
    key_mean, key_records = jax.random.split(key)
    return jax.random.normal(key_mean) + jax.random.normal(key_records, (n,))


@pytest.fixture(scope="module")
def check():
    return dpjax.check_oracle(jax.random.key(0), EXPONENTIAL, n=1000, epsilon=1.0, simulations=199)


def test_a_replaced_record_moves_the_counts_by_two(check):
    """With NaN, infinities and edges of bins, and no record outside of all bins."""
    records = jnp.concatenate([jnp.linspace(-2, 8, 990), jnp.zeros(10)])
    strange = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -check.edges[3], 3e38, -0.0])
    counts = np.array([_counts(check.score, check.edges, records.at[5].set(x)) for x in strange])
    assert np.all(counts.sum(axis=1) == 1000)
    assert np.abs(counts[:, None] - counts[None]).sum(axis=-1).max() == 2
    assert check.counting.sensitivity.value == 2
    assert check.guarantee.epsilon == 1


def test_what_refutes_and_what_does_not(check):
    key, key_data = seeded_key(1), jax.random.key(7)
    records = EXPONENTIAL(key_data, 1000)
    assert float(check(key, records).value.p_value) > 0.05
    wrong = check(key, 1.3 * records).value
    assert float(wrong.p_value) == pytest.approx(1 / 200)
    assert wrong.counts.shape == (8,)
    assert abs(int(wrong.counts.sum()) - 1000) < 100


def test_size_and_power(check):
    """At n = 1000 and epsilon 1; power .95 for a scale of 1.3, and none for the oracle."""
    assert check.power(seeded_key(1), lambda key, n: 1.3 * EXPONENTIAL(key, n)) >= 0.95
    size = check.power(seeded_key(2), EXPONENTIAL, trials=400)
    assert size <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_size_where_noise_exceeds_the_spread_of_counts():
    """At n = 100 and epsilon .1 the noise has eight times the spread of a count."""
    made = dpjax.check_oracle(jax.random.key(0), EXPONENTIAL, n=100, epsilon=0.1, simulations=199)
    size = made.power(seeded_key(2), EXPONENTIAL, trials=400)
    assert size <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(("n_atoms", "offset"), [(1, 0.0), (10, 0.3)])
def test_rounding_moves_no_atom_into_another_bin(n_atoms, offset):
    """Where the draw and the score are one program, XLA rounds once: fma(k, .1, -.3).

    Edges at atoms refuted every database of such an oracle: a third of its records changed bins.
    """

    def record(key):
        return jax.random.randint(key, (), 0, n_atoms).astype(jnp.float32) * jnp.float32(0.1)

    oracle = dpjax.oracles.independent(record, log_prob=lambda x: x - offset)
    made = dpjax.check_oracle(jax.random.key(0), oracle, n=500, epsilon=1.0, simulations=19)
    records = oracle(jax.random.key(1), 500)
    scores = records - offset
    gaps = np.abs(np.asarray(scores)[:, None] - made.edges)
    assert gaps.min() > 5e-5
    counts = _counts(made.score, made.edges, records)
    for ulps in (-3, 3):
        moved = scores + ulps * np.finfo(np.float32).eps
        assert np.array_equal(_counts(lambda x: x, made.edges, moved), counts)


def test_infinite_scores_leave_the_edges_finite():
    """NaN counts as the lowest. Finite scores lie on both sides of an edge still."""

    def score(x):
        return jnp.where(x < 0.3, jnp.nan, jnp.where(x < 0.8, x, jnp.inf))

    oracle = dpjax.oracles.independent(jax.random.uniform, log_prob=score)
    made = dpjax.check_oracle(jax.random.key(0), oracle, n=500, epsilon=1.0, simulations=19)
    assert np.all(np.isfinite(made.edges))
    assert np.all(np.diff(made.edges) >= 0)
    assert np.sum(made.expected.mean > 20) >= 4


def test_databases_that_deviate_alike_count_as_ties(check):
    """Without `jit`, a sum is rounded otherwise in a batch: one in seven was above its ties."""
    counts = np.array([13, 5, 40, 7, 19, 3, 11, 2])
    records = -np.repeat(np.append(check.edges[0] - 1, check.edges), counts)
    mean = np.random.default_rng(53).uniform(0, 40, 8).astype(np.float32)
    alike = np.tile(counts, (19, 1)).astype(np.int32)
    tied = dataclasses.replace(
        check,
        expected=dataclasses.replace(check.expected, mean=mean, simulated=alike),
        sensitivity=dataclasses.replace(check.sensitivity, n=100),
        epsilon=1000.0,  # Noise of scale 2 / 1,000 is 0.
    )
    records = jnp.asarray(records)
    score = _program_of(tied.score, records)
    found = plausibility(  # Operation by operation.
        seeded_key(0), records, tied.epsilon, vars(tied.expected), score=score
    )
    assert found.counts.tolist() == counts.tolist()
    assert float(found.p_value) == 1


def test_another_check_of_the_same_oracle_compiles_nothing(check, compilations):
    """Another key, another epsilon, and an oracle whose program is equal."""

    def use(seed, epsilon):
        oracle = dpjax.oracles.independent(jax.random.exponential, log_prob=lambda x: -x)
        made = dpjax.check_oracle(
            jax.random.key(seed), oracle, n=1000, epsilon=epsilon, simulations=199
        )
        found = made(seeded_key(seed), 2 * EXPONENTIAL(jax.random.key(7), 1000)).value
        power = made.power(seeded_key(seed), lambda key, n: 1.3 * EXPONENTIAL(key, n), trials=40)
        return found.counts, power

    use(0, 1.0)
    assert compilations(lambda: use(1, 2.0)[0]) == []
    assert not np.array_equal(use(1, 2.0)[0], use(2, 2.0)[0])


def drawn_by_rbg(x):
    """Under `vmap`, all records get bits of the first one's key."""
    seed = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.random.uniform(jax.random.key(seed, impl="rbg"))


def test_scores_that_touch_each_other_are_refused():
    """One record of 200 moved the counts by 60, and noise was for 2."""
    with pytest.raises(ValueError, match="score must not"):
        dpjax.check_oracle(jax.random.key(0), EXPONENTIAL, drawn_by_rbg, n=200, epsilon=1.0)


def test_a_ledger_pays_once(tmp_path, check):
    with dpjax.Ledger(tmp_path / "ledger", epsilon=1.5):
        check(dpjax.random.secure_key(), EXPONENTIAL(jax.random.key(0), 1000))
        with pytest.raises(dpjax.BudgetExceededError):
            check(dpjax.random.secure_key(), EXPONENTIAL(jax.random.key(0), 1000))


def test_odd_arguments_are_refused(check):
    def make(oracle=EXPONENTIAL, score=None, **changed):
        arguments = {"n": 10, "epsilon": 1.0, "simulations": 19} | changed
        return dpjax.check_oracle(jax.random.key(0), oracle, score, **arguments)

    with pytest.raises(TypeError, match="no log_prob"):
        make(hidden_cause)
    with pytest.raises(ValueError, match="one number"):
        make(hidden_cause, lambda x: jnp.stack([x, x]))
    with pytest.raises(ValueError, match="simulations"):
        make(simulations=18)
    with pytest.raises(ValueError, match="increasing order"):
        make(quantiles=(0.5, 0.25))
    with pytest.raises(ValueError, match="n=1000 records"):
        check(seeded_key(0), jnp.zeros(999))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["independent", "hidden cause"])
def test_size_over_fresh_bins_and_databases(name):
    """2,000 runs, with new bins and simulations every 80 of them."""
    oracle = {"independent": EXPONENTIAL, "hidden cause": hidden_cause}[name]
    shares = [
        dpjax.check_oracle(
            jax.random.key(i), oracle, lambda x: -x, n=200, epsilon=1.0, simulations=99
        ).power(seeded_key(i), oracle, trials=80)
        for i in range(25)
    ]
    assert np.mean(shares) <= 0.05 + 3 * np.std(shares) / math.sqrt(len(shares))
    assert np.mean(shares) >= 0.02


@pytest.mark.slow
def test_size_of_many_records():
    """Nominal probabilities of the bins would be refuted: at n = 10^5 the pilot's error shows."""
    shares = [
        dpjax.check_oracle(
            jax.random.key(i), EXPONENTIAL, n=10**5, epsilon=1.0, simulations=99
        ).power(seeded_key(i), EXPONENTIAL, trials=80)
        for i in range(10)
    ]
    assert np.mean(shares) <= 0.05 + 3 * np.std(shares) / math.sqrt(len(shares))


def scaled_check(factors):
    """A check whose score closes over `factors`, and 1,000 records in [0, 1]."""
    check = dpjax.check_oracle(
        jax.random.key(0),
        lambda key, n: jax.random.uniform(key, (n,)),
        n=1000,
        epsilon=100.0,
        simulations=19,
        score=lambda x: x * factors[0],
    )
    return check, jax.random.uniform(jax.random.key(9), (1000,))


def test_a_release_is_of_what_its_score_closes_over_by_then():
    """Of records in [0, 1], scores that are 10 times as large lie in other bins."""
    factors, key = [1.0], seeded_key(1)
    check, records = scaled_check(factors)
    before = check(key, records).value.counts
    factors[0] = 10.0
    after = check(key, records).value.counts
    assert int(after[-1]) > 800 > int(before[-1])


def test_a_release_inside_of_jit_is_of_what_its_score_closes_over_by_then():
    """A check with a traced epsilon shares its compiled draw with checks of the same structure."""
    factors, key = [1.0], seeded_key(1)
    check, records = scaled_check(factors)

    def last_count(epsilon):
        return dataclasses.replace(check, epsilon=epsilon)(key, records).value.counts[-1]

    before = jax.jit(last_count)(100.0)
    factors[0] = 10.0
    after = jax.jit(lambda epsilon: last_count(epsilon))(100.0)
    assert int(after) > 800 > int(before)
