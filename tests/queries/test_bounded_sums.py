"""Sums of numbers against exact rationals, and how far a record moves them."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax._exact import _limbs
from dpjax.queries._sums import coarse, coarse_reach

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
rounded = jax.jit(coarse, static_argnames="bits")
INTERVALS = [(-5.0, 100.0), (-3.0, 0.7), (5.0, 7.0), (0.0, 1e-20)]
UGLY = np.float32([0, np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-45])


def corners(low, high):
    """Records that reach furthest, and some that are strange."""
    within = np.float32([low, high, (low + high) / 2, np.nextafter(np.float32(high), 9)])
    return np.concatenate([within, UGLY])


def clamped(x, low, high):
    """A record as it counts; a missing number counts as none."""
    return Fraction(0 if np.isnan(x) else float(np.clip(np.float64(x), low, high)))


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_a_sum_is_within_a_unit_of_the_truth(low, high):
    generator = np.random.default_rng(0)
    x = np.concatenate([corners(low, high), generator.normal(size=300).astype("float32") * high])
    query = queries.sum_query(lower=low, upper=high, capacity=len(x))._integers
    # Bounds that are no float32 are rounded inward, and subnormal records count as 0.
    allowed = query.rounding * query.unit + len(x) * abs(high) * 2.0**-23
    truth = sum(clamped(number, low, high) for number in x)
    assert abs(int(query(jnp.asarray(x))) * Fraction(query.unit) - truth) <= allowed


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_no_record_moves_a_sum_further_and_one_moves_it_as_far(low, high):
    asked = queries.sum_query(lower=low, upper=high, capacity=3, dims=2)
    query = asked._integers
    records = corners(low, high)
    # Whatever is rounded away, depending on the others: databases of three records.
    others = np.random.default_rng(1).uniform(low, high, (64, 2, 2)).astype("float32")
    changed = np.stack([records, records], axis=1)

    def values(other, record, present):
        rows = jnp.concatenate([jnp.asarray(other), record[None]])
        return query(queries.PaddedRecords(rows, jnp.array([True, True, present])))

    over_records = jax.vmap(values, in_axes=(None, 0, None))
    found = np.asarray(
        jax.jit(jax.vmap(over_records, in_axes=(0, None, None)))(others, changed, True), np.int64
    )
    without = np.asarray(
        jax.jit(jax.vmap(values, in_axes=(0, None, None)))(others, changed[0], False)
    )
    replaced = np.abs(found[:, :, None] - found[:, None]).reshape(-1, 2)
    added = np.abs(found - without[:, None]).reshape(-1, 2)
    for norm, order in ORDS.items():
        for relation, moved in ((REPLACE, replaced), (ADD, added)):
            reach = query.sensitivity(norm, relation=relation).value
            largest = np.linalg.norm(moved, order, axis=1).max()
            assert (1 - 2.0**-14) * reach <= largest <= reach
            # In units of the records it is b - a, and the noise grows by what rounding adds.
            # A record that comes to miss its number leaves the sum.
            added_one = max(abs(low), abs(high))
            ends = {REPLACE: max(high - low, added_one), ADD: added_one}
            known = asked.sensitivity(norm, relation=relation)
            length = np.linalg.norm(np.ones(2), order)
            assert known.value == pytest.approx(ends[relation] * length, rel=1e-15)
            mechanism = dpjax.mechanisms.additive(known, 2.0, norm=norm, noise=dpjax.random.LAPLACE)
            drawn = asked._inside(mechanism).mechanism
            assert largest <= drawn.sensitivity.value * (1 + 1e-15)
            assert drawn.scale == pytest.approx(drawn.sensitivity.value / 2, rel=1e-15)
            assert drawn.scale * query.unit <= mechanism.scale * (1 + 2.0**-13)


def test_order_does_not_matter_and_empty_slots_count_nowhere():
    query = queries.sum_query(lower=5, upper=7, capacity=100)
    integers = query._integers
    x = np.random.default_rng(0).uniform(4, 8, 100).astype("float32")
    assert int(integers(jnp.asarray(x[::-1]))) == int(integers(jnp.asarray(x)))
    present = np.arange(100) < 60
    padded = queries.PaddedRecords(jnp.asarray(np.where(present, x, np.nan)), jnp.asarray(present))
    assert float(query(padded)) == pytest.approx(np.clip(x[:60], 5, 7).sum(), rel=1e-5)


def test_more_records_than_the_capacity_stop_at_the_end():
    query = queries.sum_query(lower=0, upper=1, capacity=2)
    assert int(query._integers(jnp.ones(2**16))) == 2**31 - 2
    assert float(query(jnp.ones(2**16))) == pytest.approx(2**15)


def test_totals_are_rounded_halves_up():
    numbers = [0, 1, -1, 7, 8, -8, -9, 23, 24, 2**40, -(2**40)]
    limbs = _limbs.Limbs(
        jnp.asarray([x >> 32 & 0xFFFFFFFF for x in numbers], "uint32"),
        jnp.asarray([x & 0xFFFFFFFF for x in numbers], "uint32"),
    )
    end = 2**31 - 2
    expected = [max(-end, min(end, math.floor(Fraction(x, 16) + Fraction(1, 2)))) for x in numbers]
    assert rounded(limbs, bits=4).tolist() == expected
    assert rounded(limbs, bits=0).tolist() == [max(-end, min(end, x)) for x in numbers]


@pytest.mark.parametrize("moved", [1, 5, 16, 20])
def test_rounding_a_total_is_charged(moved):
    numbers = np.arange(64, dtype="uint32")
    units = np.asarray(rounded(_limbs.Limbs(0 * numbers, numbers), bits=4))
    apart = np.abs(units[moved:] - units[:-moved]).max()
    for norm, order in ORDS.items():
        length = np.linalg.norm(np.ones(3), order)
        exact = Fraction(moved) * Fraction(length)
        assert apart * length <= coarse_reach(exact, dims=3, bits=4, norm=norm)


def test_numbers_are_those_of_the_integers_but_for_one_rounding(x64):
    """Beyond 2^24 a float32 rounds them: `error` and intervals have room for that."""
    query = queries.sum_query(lower=0, upper=1, capacity=2**20)
    integers, half = query._integers, float(jnp.finfo(jnp.result_type(float)).eps) / 2
    values = np.random.default_rng(0).integers(-(2**31) + 1, 2**31, 1000).astype(np.int32)
    for value, number in zip(values, query._in_units(jnp.asarray(values)), strict=True):
        exact = int(value) * Fraction(integers.unit)
        assert abs(Fraction(float(number)) - exact) <= Fraction(half) * abs(exact)
        assert abs(int(query._whole(number)) - int(value)) <= 2 * half * abs(int(value))
    assert np.isnan(query._in_units(jnp.int32(-(2**31))))
    records = np.full(10**5, np.float32(0.7))
    nearly_without_noise = dpjax.laplace(query.sensitivity(), epsilon=1e4)
    release = dpjax.privatize(query, nearly_without_noise)(dpjax.random.seeded_key(0), records)
    truth = records.sum(dtype=float)
    low, high = release.interval(0.999999)
    assert low <= truth <= high
    off = abs(float(release.value) - truth)
    error = query.error(nearly_without_noise, confidence=0.999999)
    assert off <= error < 1
    assert high - low <= 2 * error + 2 * integers.unit


@pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 100), (-0.3, 0.7), (18, 99.9)])
def test_the_difference_of_the_bounds_is_enough_noise(low, high, relation):
    """As the table of docs/how-to/queries.md says: what rounding adds, the noise covers.

    What else brings a number for a sum: groups, vectors, Gaussian noise, a sensitivity of one's
    own, a traced one; all go through `_inside`. A hair less is refused.
    """
    query = queries.sum_query(lower=low, upper=high, capacity=10**6, missing="lower")
    moved = {REPLACE: high - low, ADD: max(abs(low), abs(high))}[relation]
    records = queries.padded_records(np.linspace(low, high, 10), capacity=16)
    stated = dpjax.assume_sensitivity(moved, norm="l1", relation=relation)
    mechanism = dpjax.laplace(stated, 1.0)
    release = dpjax.privatize(query, mechanism)(dpjax.random.seeded_key(0), records)
    assert release.value.dtype == jnp.result_type(float)
    inside = query._inside(mechanism).mechanism
    assert inside.sensitivity.value >= query._integers.reach("l1", relation) * (1 - 1e-15)
    short = dpjax.assume_sensitivity(moved * (1 - 1e-9), norm="l1", relation=relation)
    with pytest.raises(ValueError, match="too small for this target"):
        dpjax.privatize(query, dpjax.laplace(short, 1.0))(dpjax.random.seeded_key(0), records)


@pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)
@pytest.mark.parametrize(
    ("low", "high", "capacity"), [(0.1, 1 / 3, 2**31 - 1), (0, 40_000.5, 9), (0, 600.7, 10**6)]
)
def test_a_sum_whose_unit_is_one_is_rounded_too(key, low, high, capacity, relation):
    """What else asks whether a query rounds: its noise, floats, intervals, `error` and proofs."""
    query = queries.sum_query(lower=low, upper=high, capacity=capacity)
    inside = query._integers
    assert inside.unit == 1
    mechanism = dpjax.laplace(query.sensitivity(relation=relation), 1.0)
    drawn = query._inside(mechanism).mechanism
    assert drawn.sensitivity.value * (1 + 1e-15) >= inside.sensitivity(relation=relation).value
    # A difference of so many units is attained: 2^31 - 1 records are 0.
    assert drawn.sensitivity.value >= math.ceil(high - low if relation is REPLACE else high)
    slots = queries.padded_records(np.float32([low, high]), capacity=3)
    release = dpjax.privatize(query, mechanism)(key, slots)
    assert release.value.dtype == query(slots).dtype == jnp.float32
    low_end, high_end = release.interval()
    quantile = -mechanism.scale * math.log(0.05)
    assert high_end - low_end >= 2 * quantile + inside.rounding
    with pytest.raises(ValueError, match="release by dpjax"):
        mechanism(key, query(slots))


def test_noise_is_the_same_integers_for_every_way_to_ask(key):
    """In `jit`, and for a bare number: integers of the grid, in the units of the records."""
    query = queries.sum_query(lower=0, upper=100, capacity=500)
    x = np.random.default_rng(0).uniform(0, 100, 500).astype("float32")
    integers = query._integers
    drawn = dpjax.laplace(integers.sensitivity(), 1.0)(key, integers(x)).value
    asked = int(drawn) * integers.unit
    for noise in (dpjax.laplace(query.sensitivity(), 1.0), dpjax.laplace(100.0, 1.0)):
        private = dpjax.privatize(query, noise)
        assert float(private(key, x).value) == float(jax.jit(private)(key, x).value) == float(asked)


def test_a_sum_that_a_ledger_kept_is_the_same_numbers(tmp_path):
    """It keeps the integers: what is returned again has the same units, interval and JSON."""
    query = queries.sum_query(lower=0, upper=100, capacity=500)
    ledger = dpjax.Ledger(tmp_path / "sums.db", epsilon=1)
    private = dpjax.privatize(query, dpjax.laplace(100.0, 0.5), ledger=ledger)
    first, again = (
        private(dpjax.random.secure_key(), np.full(400, 20.0), name="ages") for _ in range(2)
    )
    assert ledger.spent.epsilon == 0.5
    assert abs(float(first.value) - 8000) < 20_000
    assert first.to_dict() == again.to_dict()
    assert first.interval() == again.interval()
    (array,) = first.accuracy.facts["arrays"]
    assert array["scale"] == pytest.approx(200, rel=1e-3)


def test_floats_of_a_sum_get_no_noise_of_its_integers(key):
    """They are rounded, by more than the noise has to spare; counts are integers outside too."""
    query = queries.sum_query(lower=0, upper=100, capacity=500)
    mechanism = dpjax.laplace(query.sensitivity(), 1.0)
    for draw in (mechanism, mechanism.unpaid_draw):
        with pytest.raises(ValueError, match=r"release by dpjax\.privatize\(query, mechanism\)"):
            draw(key, query(np.ones(5)))
    line = dpjax.above_threshold(query.sensitivity("linf"), 1.0, threshold=1.0, positives=1)
    with pytest.raises(ValueError, match="release by"):
        line.start(key)
    count = queries.counting_query(lambda x: x > 0)
    dpjax.laplace(count.sensitivity(), 1.0)(key, count(np.ones(5)))
    # A sampled sensitivity is one of the floats.
    sampled = dpjax.sample_sensitivity(
        jax.random.key(0), query, lambda key, n: jax.random.uniform(key, (n,)), n=5, norm="l1", m=9
    )
    release = dpjax.privatize(query, dpjax.laplace(sampled, 1e6))(key, np.full(5, 20.0))
    assert float(release.value) == pytest.approx(100, rel=1e-3)
    # Nor is a proof of the integers one of the floats.
    with pytest.raises(dpjax.proving.NoProofError, match=r"Call target.sensitivity\(\)"):
        dpjax.prove_sensitivity(query, np.ones(5), bounds=(0, 1), norm="l1")


def test_selections_by_sums_release_indices(key):
    total = queries.sum_query(lower=0, upper=1, capacity=100)
    sums = queries.by(total, column="g", keys=[0, 1, 2])
    people = {"g": np.repeat([0, 1, 2], 30), "x": np.repeat([0.2, 0.9, 0.5], 30)}
    scores = sums.sensitivity("linf")
    best = dpjax.privatize(sums, dpjax.exponential(scores, 50.0))(key, people)
    assert int(best.value) == 1
    line = dpjax.above_threshold(scores, 100.0, threshold=20.0, positives=2)
    assert dpjax.privatize(sums, line)(key, people).value.tolist() == [1, 3]
    with pytest.raises(TypeError, match="must add noise to the sums, or make a selection"):
        dpjax.privatize(sums, _Foreign(dpjax.laplace(sums.sensitivity(), 1.0)))(key, people)


class _Foreign:
    """A mechanism of another library."""

    def __init__(self, mechanism):
        self.sensitivity, self.guarantee = mechanism.sensitivity, mechanism.guarantee
        self.sensitivity = dataclasses.replace(self.sensitivity, inside=False)


@pytest.mark.slow
def test_a_release_of_a_sum_has_the_noise_it_says(key):
    query = queries.sum_query(lower=-5, upper=100, capacity=1000, dims=500)
    records = queries.padded_records(np.full((8, 500), 20.0), capacity=8)
    for relation, moved in ((REPLACE, 105), (ADD, 100)):
        mechanism = dpjax.laplace(query.sensitivity(relation=relation), epsilon=50.0)
        release = dpjax.privatize(query, mechanism)(key, records)
        noise = np.abs(np.asarray(release.value) - 160)
        # The average of 500 |noise| of scale b varies by b / sqrt(500).
        assert noise.mean() == pytest.approx(moved * 500 / 50, rel=5 / 500**0.5)
        assert noise.max() < query.error(mechanism, confidence=1 - 1e-6)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"lower": 1, "upper": 0, "capacity": 3}, ValueError, "lower must be below"),
        ({"lower": 0, "upper": np.inf, "capacity": 3}, ValueError, "finite"),
        ({"lower": 0, "upper": 1, "capacity": 0}, ValueError, "capacity"),
        ({"lower": 0, "upper": 1e-30, "capacity": 3}, ValueError, "2\\^-90"),
        ({"lower": 0, "upper": 1, "capacity": 3, "dims": 0}, ValueError, "dims"),
    ],
)
def test_bad_parameters_are_refused(parameters, error, message):
    with pytest.raises(error, match=message):
        queries.sum_query(**parameters)


def test_records_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="shape"):
        queries.sum_query(lower=0, upper=1, capacity=3)(jnp.ones((3, 2)))
