"""Scores of quantiles against their definition, and their sensitivity over all small databases."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core._values import NeighboringRelation
from dpjax.queries import quantile_scores, select_each

GRID = [0.0, 1.0, 2.0]
VALUES = np.array([np.nan, 0.0, 0.5, 1.0, np.inf], "float32")
PROBABILITIES = (0.5, 0.25, 0.9)


def every_database(n):
    return np.array(list(itertools.product(VALUES, repeat=n)))


@pytest.fixture(scope="module")
def tables():
    """Scores of all databases of 3 and of 4 records, by p: an axis for each record."""
    scored = jax.jit(jax.vmap(quantile_scores(PROBABILITIES, grid=GRID)))
    unit = quantile_scores(PROBABILITIES, grid=GRID).denominator
    found = {}
    for n in (3, 4):
        scores = np.asarray(scored(every_database(n)), float) / unit
        scores = scores.reshape(*[len(VALUES)] * n, len(PROBABILITIES), len(GRID))
        found[n] = dict(zip(PROBABILITIES, np.moveaxis(scores, -2, 0), strict=True))
    return found


def by_definition(records, p, r):
    """Minus the ranks that r misses the p-quantile by."""
    x = [-np.inf if np.isnan(record) else record for record in records]
    p, n = Fraction(str(p)), len(x)
    below, above = sum(y < r for y in x), sum(y > r for y in x)
    return float(-max(0, below - p * n, above - (1 - p) * n))


def test_scores_are_ranks_missed(tables):
    for n, p in itertools.product((3, 4), PROBABILITIES):
        expected = [[by_definition(x, p, r) for r in GRID] for x in every_database(n)]
        np.testing.assert_allclose(tables[n][p].reshape(-1, len(GRID)), expected, atol=1e-6)


def test_a_median_on_the_grid_is_best(tables):
    for records, scores in zip(every_database(3), tables[3][0.5].reshape(-1, 3), strict=True):
        median = np.sort(np.nan_to_num(records, nan=-np.inf, posinf=np.inf))[1]
        if median in GRID:
            assert scores[GRID.index(median)] == 0


@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_sensitivity_is_attained_and_never_exceeded(p, tables):
    scores = quantile_scores(p, grid=GRID)
    unit = scores.denominator
    replaced = max(np.ptp(tables[4][p], axis=record).max() for record in range(4))
    assert replaced == scores.sensitivity().value / unit == 1
    added = np.abs(tables[4][p] - tables[3][p][:, :, :, None]).max()
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    assert added == pytest.approx(scores.sensitivity(relation=relation).value / unit)
    assert added == pytest.approx(max(p, 1 - p))
    assert scores.sensitivity(relation=relation).relation is relation


def test_empty_slots_are_no_records(tables):
    scores = quantile_scores(PROBABILITIES, grid=GRID)
    slots = jnp.array([1, np.nan, 0, np.inf])
    present = jnp.array([True, True, False, True])
    found = jax.jit(scores)(dpjax.queries.PaddedRecords(slots, present))
    for row, p in zip(np.asarray(found), PROBABILITIES, strict=True):
        np.testing.assert_allclose(row / scores.denominator, tables[3][p][3, 0, 4], atol=1e-6)


def test_one_sensitivity_covers_several_quantiles():
    scores = quantile_scores((0.25, 0.5), grid=GRID)
    assert scores.denominator == 4
    assert scores.sensitivity().value == 4
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    assert scores.sensitivity(relation=relation).value == 3
    fine = quantile_scores(Fraction(1, 2**53 + 1), grid=GRID)  # No float64 is its denominator.
    assert fine.sensitivity().value > fine.denominator


def test_probabilities_are_the_decimals_that_they_print_as():
    assert quantile_scores(0.1, grid=GRID).denominator == 10
    assert quantile_scores(Fraction(1, 3), grid=GRID).numerators == (1,)
    for wrong in (0.0, 1.0, -0.5, np.nan, Fraction(3, 2)):
        with pytest.raises(ValueError, match="probability must be strictly between 0 and 1"):
            quantile_scores(wrong, grid=GRID)
    with pytest.raises(ValueError, match=r"between 0 and 1, as 0\.5 for 50%, got 50"):
        quantile_scores(50, grid=GRID)
    with pytest.raises(ValueError, match="at least one"):
        quantile_scores((), grid=GRID)


def test_bad_grids_and_databases_are_refused():
    for grid in ([1.0, 1.0], [2.0, 1.0], [0.0, np.inf], [np.nan], [], [[0.0]]):
        with pytest.raises(ValueError, match="grid must be increasing finite numbers"):
            quantile_scores(0.5, grid=grid)
    with pytest.raises(ValueError, match=r"shape \(n,\)"):
        quantile_scores(0.5, grid=GRID)(jnp.zeros((3, 2)))
    many = jax.ShapeDtypeStruct((3 * 10**6,), "float32")
    with pytest.raises(ValueError, match=r"n=3000000 records are too many, .* 1/1000 of a rank"):
        jax.eval_shape(quantile_scores(0.999, grid=GRID), many)


# Releases.


def draws(mechanism, scores, seed):
    keys = jax.random.split(dpjax.random.seeded_key(seed), 64)
    return np.asarray(jax.jit(jax.vmap(lambda key: mechanism(key, scores).value))(keys))


def test_released_quantiles_are_within_the_stated_ranks():
    records = np.arange(300.0, dtype="float32")
    scores = quantile_scores((0.25, 0.75), grid=range(300))
    mechanism = select_each(scores.sensitivity(), epsilon=1.0, count=2)
    found = scores(records)
    drawn = draws(mechanism, found, 5)
    bound = scores.error(mechanism, confidence=0.5)
    units = scores.denominator
    # Scores are integers, so a gap of a fraction of one is none.
    assert bound == np.floor(units * 2 * 2 * np.log(2 * 300 / 0.5)) / units
    missed = -np.asarray(found) / scores.denominator
    for row, indices in zip(missed, drawn.T, strict=True):
        off = row[indices] - row.min()
        # Power: a wrong scale by a factor of 3 would show.
        assert bound / 30 < off.mean() < bound / 3
        assert np.mean(off <= bound) >= 0.5
    np.testing.assert_array_equal(scores._numbers(drawn), drawn)
    # No index: no number.
    np.testing.assert_array_equal(scores._numbers(jnp.array([7, -1])), [7, np.nan])
    np.testing.assert_array_equal(scores._indices(scores._numbers(drawn)), drawn)


@pytest.mark.parametrize("grid", [range(0, 300, 3), np.linspace(-0.7, 299.3, 101)], ids=str)
def test_a_release_is_numbers_of_the_grid_and_not_their_places(grid):
    """Through all that releases: `jit`, `vmap`, a ledger, a sampled sensitivity, JSON.

    A mechanism that is called with scores alone does not know the grid, and gives places.
    """
    records = np.arange(300.0, dtype="float32")
    scores = quantile_scores((0.25, 0.5, 0.75), grid=grid)
    mechanism = select_each(scores.sensitivity(), epsilon=1.0, count=3)
    private, key = dpjax.privatize(scores, mechanism), dpjax.random.seeded_key(4)
    places = np.asarray(mechanism(key, scores(records)).value)
    expected = np.asarray(list(grid))[places].astype("float32").tolist()
    release = private(key, records)
    assert release.value.tolist() == expected
    assert jax.jit(private)(key, records).value.tolist() == expected
    assert jax.vmap(lambda key: private(key, records).value)(key[None]).tolist() == [expected]
    low, high = release.interval(confidence=0.9)
    assert np.all((low <= np.float64(release.value) + 1e-4) & (release.value <= high + 1e-4))
    again = dpjax.Release.from_dict(release.to_dict())
    assert repr(again) == repr(release)
    ratio = dpjax.attacks.likelihood_ratio(scores, mechanism)
    stated = mechanism.log_prob(places, scores(records))
    other = mechanism.log_prob(places, scores(records[::-1] * 0.9))
    assert float(ratio(release.value, records, records[::-1] * 0.9)) == float(stated - other)


def test_quantiles_are_drawn_independently():
    """Equal rows under one key: each has its own noise."""
    drawn = draws(select_each(1.0, epsilon=1.0, count=2), np.zeros((2, 300), int), 6)
    # Of 64 pairs .2 agree on average: more than 6 do once in 10^8 keys.
    assert np.sum(drawn[:, 0] == drawn[:, 1]) <= 6


def test_rows_of_several_counts_share_a_program_and_select_as_in_one_of_their_own(
    compilations,
):
    key, rng = dpjax.random.seeded_key(3), np.random.default_rng(3)
    for count, compiles in ((1, True), (3, False), (5, True)):
        scores = jnp.asarray(rng.integers(0, 9, (count, 6)), "int32")
        mechanism, found = select_each(1.0, epsilon=3.0, count=count), []
        seen = compilations(lambda: found.append(mechanism(key, scores).value))  # noqa: B023
        assert ("jit(_indices_of_rows)" in seen) == compiles, seen
        alone = jax.jit(lambda key, scores: mechanism(key, scores).value)(key, scores)  # noqa: B023
        np.testing.assert_array_equal(found[0], alone)


def test_each_selection_is_calibrated_as_one_at_its_part_of_epsilon():
    """Its loss is charged to that part too, not to all of epsilon."""
    together = select_each(2.5, epsilon=1.2, count=3)._calibration(jnp.zeros((3, 7)))
    alone = dpjax.exponential(2.5, 1.2 / 3)._calibration(jnp.zeros(7))
    for name in ("scale", "sensitivity", "epsilon", "rounding", "coordinates"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-12), name


def test_each_selection_gets_its_part_of_epsilon():
    scores = np.array([[0, 1], [1, 0]])
    mechanism = select_each(1.0, epsilon=2.0, count=2)
    log_prob = float(jax.jit(mechanism.log_prob)(np.array([1, 1]), scores))
    share = 1 / (1 + np.exp(-0.5))
    assert log_prob == pytest.approx(np.log(share * (1 - share)), rel=1e-4)
    assert mechanism.guarantee.epsilon == 2.0
    assert mechanism.zcdp[0] == pytest.approx(2.0**2 / 16, rel=1e-9)
    with pytest.raises(ValueError, match=r"shape \(2, K\), got \(3, 2\)"):
        mechanism(dpjax.random.seeded_key(0), np.zeros((3, 2)))


@pytest.mark.slow
def test_a_large_grid_in_one_call():
    records = np.random.default_rng(1).exponential(size=10**6).astype("float32")
    scores = quantile_scores((0.1, 0.5, 0.99), grid=np.linspace(0, 20, 10**5))
    mechanism = select_each(scores.sensitivity(), epsilon=1.0, count=3)
    release = dpjax.privatize(scores, mechanism)(dpjax.random.seeded_key(7), records)
    bound = scores.error(mechanism, confidence=1 - 1e-6)
    for number, p in zip(release.value.tolist(), (0.1, 0.5, 0.99), strict=True):
        # Neighbors on the grid are at most 200 records apart.
        assert -by_definition(records.tolist(), p, number) <= bound + 200
