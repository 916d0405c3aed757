"""The gamma of single records: exact cases, limits, and shares of people."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import oracles, targets
from dpjax.auditing._gamma_by_record import RecordGammas

ORACLE = oracles.independent(jax.random.exponential)
MEAN = targets.summable(lambda x: x, average=True)
DELTA = 3.05
LISTED = -np.log(1 - np.array([0.5, 0.9, 0.95, 0.99]))
N = 20


def gamma_of(r):
    """Of a record of Exp(1): the other one is beyond r + Delta, or below r - Delta."""
    return np.where(r > DELTA, 1 - np.exp(-(r - DELTA)), 0) + np.exp(-(r + DELTA))


def found(uncovered, pairs, drawn=False, confidence=0.99):
    return RecordGammas(np.zeros(len(uncovered)), uncovered, uncovered, pairs, drawn, confidence)


def by_record(key, target=MEAN, oracle=ORACLE, value=DELTA / N, **kwargs):
    bound = kwargs.pop("bound", dpjax.assume_sensitivity(value, norm="l1"))
    settings = {"n": N, "records": jnp.asarray(LISTED, jnp.float32), "pairs": 4000}
    return dpjax.gamma_by_record(key, target, oracle, sensitivity=bound, **settings | kwargs)


@pytest.mark.parametrize("target", [MEAN, jnp.mean])
def test_the_mean_of_exponentials(key, target):
    """The limits hold with probability .99; their width is the power."""
    result = by_record(key, target)
    true = gamma_of(LISTED)
    assert np.all((result.lower <= true) & (true <= result.upper))
    assert np.all(result.upper - result.lower < 0.06)
    with pytest.raises(ValueError, match="drawn"):
        result.share_above(0.5)


def test_a_coin_is_exact(key):
    """Records 0 and 1: the sum moves by 1 if the other one differs, and by 9 from 10."""
    coin = oracles.independent(lambda key: jax.random.bernoulli(key).astype(jnp.float32))
    total = targets.summable(lambda x: x)
    records = jnp.array([0.0, 1.0, 10.0])
    for value, expected in ((0.5, (0.5, 0.5, 1.0)), (1.5, (0.0, 0.0, 1.0))):
        result = by_record(key, total, coin, value, records=records, pairs=400)
        np.testing.assert_allclose(result.estimates, expected, atol=0.13)
        assert result.upper[2] == 1


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_limits_hold_for_all_records_at_once(runs):
    """More than 6 misses of 100 at a rate of .01 are a false alarm in 1 of 10^4."""
    rng, true = np.random.default_rng(0), gamma_of(LISTED)
    missed = 0
    for _ in range(runs):
        result = found(rng.binomial(500, true), 500)
        missed += not np.all((result.lower <= true) & (true <= result.upper))
    assert missed <= (6 if runs == 100 else 15)


@pytest.mark.parametrize("runs", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_the_share_of_people_above_one_half(runs):
    rng = np.random.default_rng(0)
    big = gamma_of(rng.exponential(size=10**6))
    shares = []
    for _ in range(runs):
        uncovered = rng.binomial(100, gamma_of(rng.exponential(size=2000)))
        result = found(uncovered, 100, drawn=True)
        shares.append((result.share_above(0.5), result.share_above(0.1)))
    shares = np.array(shares)
    assert np.all(shares >= [(big > 0.5).mean(), (big > 0.1).mean()])
    assert np.median(shares[:, 0]) <= 0.05


def test_drawn_records_share_the_confidence(key):
    drawn = by_record(key, records=50, pairs=50)
    assert drawn.drawn
    assert drawn.records.shape == (50,)
    assert np.all(drawn.upper >= found(drawn.uncovered, 50).upper)
    assert np.all(drawn.upper <= found(drawn.uncovered, 50, confidence=0.995).upper + 1e-12)
    assert "50 records" in repr(drawn)
    assert found(np.full(10, 50), 50, drawn=True).share_above(0.5) == 1


def test_a_distance_that_rounding_lowers_is_raised(key):
    """2^24 + 1 is 2^24 in float32, and does not lie within 2^24."""
    far = 2**24 + 1
    oracle = oracles.independent(lambda key: jax.random.randint(key, (), 0, 2) * jnp.int32(far))
    found = dpjax.gamma_by_record(
        key,
        lambda database: database.sum(),
        oracle,
        sensitivity=dpjax.assume_sensitivity(2.0**24, norm="l1"),
        n=1,
        records=jnp.array([0, far], jnp.int32),
        pairs=50,
    )
    assert np.all(found.upper > 0.5)
    assert np.all(found.estimates > 0.2)


def test_a_lower_limit_is_of_distances_as_they_are(key):
    """Integers above 2^24 are rounded in float32, so all of these pairs may lie further apart.

    None does: they differ by 2^24 + 2, and that is what is covered. What else reaches the limits is
    rounding of the target's own sums, and what probes find in the order of the records.
    """
    far, halves = 2**24 + 2, 2.0**-13
    oracle = oracles.independent(lambda key: jax.random.randint(key, (), 0, 2) * jnp.int32(far))
    settings = {"records": jnp.array([0, far], jnp.int32), "pairs": 50, "n": 1}
    by_integers = by_record(key, lambda x: x.sum(), oracle, float(far), **settings)
    # A float near 1000 is rounded to 2^-14, and the distance is exactly what is covered.
    coin = oracles.independent(lambda key: jax.random.bernoulli(key).astype(jnp.float32))
    settings = {"records": jnp.array([0.0, 1.0]), "pairs": 50, "n": 1}
    by_floats = by_record(key, lambda x: 1000 + halves * x.sum(), coin, halves, **settings)
    for found in (by_integers, by_floats):
        assert np.all(found.upper > 0.5)
        assert np.all(found.lower == 0)
    # Beyond what rounding may hide, a lower limit sees them.
    further = by_record(key, lambda x: 1000 + 8 * halves * x.sum(), coin, halves, **settings)
    assert np.all(further.lower > 0.1)


def test_what_is_refused(key):
    with pytest.raises(TypeError, match="record by record"):
        by_record(key, oracle=lambda key, n: jax.random.exponential(key, (n,)))
    for records in (jnp.ones((3, 2)), jnp.ones(3, int), jnp.float32(3), {"x": jnp.ones(3)}):
        with pytest.raises(ValueError, match="records must have the structure"):
            by_record(key, records=records)
    sampled = dpjax.sample_sensitivity(key, MEAN, ORACLE, n=N, norm="l1", m=100)
    with pytest.raises(ValueError, match="target"):
        by_record(key, jnp.sum, bound=sampled)


def test_a_sensitivity_for_other_pairs_is_refused(key):
    known = dpjax.assume_sensitivity(1.0, norm="l1")
    added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    for field, message in (
        ({"n": N + 1}, "n must be 21"),
        ({"relation": added}, "replace-one"),
        ({"positions": "average"}, "positions="),
    ):
        with pytest.raises(ValueError, match=message):
            by_record(key, bound=dataclasses.replace(known, **field))
    with pytest.raises(TypeError, match="Sensitivity"):
        by_record(key, bound=1.0)


def test_records_are_clamped_as_for_a_release(key):
    """By a bound that was proved for clamped ones: 0 and 2 differ only then."""

    def folded(database):
        return jnp.sum(jnp.minimum(database, 2 - database))

    records = jax.ShapeDtypeStruct((4,), jnp.float32)
    proved = dpjax.prove_sensitivity(folded, records, bounds=(0, 1), norm="l1")
    half = dataclasses.replace(proved, value=0.5)
    coins = oracles.independent(lambda key: 2.0 * jax.random.bernoulli(key).astype(jnp.float32))
    settings = {"n": 4, "records": jnp.array([0.0, 2.0]), "pairs": 100}
    found = by_record(key, folded, coins, bound=half, **settings)
    assert np.all(found.lower > 0.2)


IN_A_MESH = """
import jax, jax.numpy as jnp, dpjax
from dpjax import oracles, targets
oracle = oracles.independent(jax.random.exponential)
mean = targets.summable(lambda x: x, average=True)
settings = {"sensitivity": dpjax.assume_sensitivity(0.15, norm="l1"), "n": 20, "pairs": 50}
key = dpjax.random.seeded_key(0)
def uncovered():
    return dpjax.gamma_by_record(key, mean, oracle, records=3, **settings).uncovered.tolist()
alone = uncovered()
with jax.set_mesh(jax.make_mesh((2,), ("devices",))):
    assert uncovered() == alone
"""


@pytest.mark.slow
def test_a_mesh_around_the_call_changes_nothing(run_python):
    run_python(IN_A_MESH, devices=2)
