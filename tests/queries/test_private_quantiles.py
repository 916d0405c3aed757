"""Quantiles with intervals: the guarantee by enumeration, the law of the draws, and coverage."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._core._accuracy import Accuracy, interval
from dpjax.queries import padded_records, private_quantiles
from dpjax.queries._private_quantiles import _estimates, _reach_of_excess
from dpjax.queries._rank_search import Ranks, _scores_between, rank_search, thresholds

ADDED = "add-or-remove-one"
QUARTERS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def search(*, reach=1.0, epsilon=1.0, probabilities=QUARTERS, capacity=16):
    sensitivity = dpjax.assume_sensitivity(reach, norm="l1")
    return rank_search(sensitivity, epsilon, probabilities=probabilities, capacity=capacity)


@pytest.fixture(scope="module")
def log_probs():
    """Log probabilities of extreme outputs on all small histograms of two cells."""
    histograms = np.array(list(itertools.product(range(4), repeat=2)))
    outputs = [
        Ranks(np.array(edges, "int32"), np.full(thresholds(np.zeros(3, int), 2, 1).size - 1, count))
        for edges in itertools.combinations_with_replacement(range(3), 3)
        for count in (-99, 99)
    ]
    stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x), "int32"), *outputs)

    def table(mechanism):
        of_outputs = jax.vmap(mechanism.log_prob, (0, None))
        of_all = jax.jit(jax.vmap(of_outputs, (None, 0)))(stacked, histograms.astype("int32"))
        return histograms, np.asarray(of_all, float)

    return table


@pytest.mark.parametrize("reach", [1, 2])
def test_every_pair_of_histograms_is_within_epsilon(log_probs, reach):
    """Added and removed records move a histogram by 1 in l1, and replaced ones by 2."""
    histograms, found = log_probs(search(reach=float(reach)))
    losses = [
        np.max(np.abs(found[i] - found[j]))
        for i, j in itertools.combinations(range(len(histograms)), 2)
        if np.abs(histograms[i] - histograms[j]).sum() <= reach
    ]
    # Noise on integers loses epsilon up to .01%.
    assert max(losses) <= 1.0002
    # Power: counts alone lose two thirds, and a search at the wrong scale would show.
    assert max(losses) > 0.8


def test_draws_follow_the_stated_probabilities():
    mechanism = search(probabilities=QUARTERS[:2], epsilon=3.0)
    counts = np.array([2, 0, 5], "int32")
    below = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), "int32")
    edges = np.array(list(itertools.product(range(4), repeat=2)), "int32")
    of_edges = jax.jit(jax.vmap(mechanism._log_prob_of_edges, (0, None)))
    expected = np.exp(np.asarray(of_edges(edges, below), float))
    assert expected.sum() == pytest.approx(1, abs=1e-5)
    # Groups are drawn independently, so one release of 4,000 equal groups is 4,000 draws.
    drawn = mechanism(dpjax.random.seeded_key(1), np.tile(counts, (4000, 1))).value.edges
    seen = np.mean(np.all(np.asarray(drawn)[:, None] == edges, axis=-1), axis=0)
    # Sixteen frequencies all stay within 5 standard errors except for one key in 10^5.
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / 4000) + 1e-3)
    assert np.abs(seen - np.roll(expected, 1)).max() > 0.1  # Power.


def test_no_record_is_in_two_segments_of_one_depth():
    """Edges are in order at any scale. Scores of many digits in few slots hardly differ in noise.

    An edge outside of its segment was possible then: 22% of releases, whose segments overlapped.
    What else reaches it: a small epsilon, and many groups.
    """
    digits = tuple(map(Fraction, ("0.1234567", "0.3456789", "0.7654321")))
    counts = np.zeros(64, "int32")
    counts[[10, 30]] = 50
    mechanism = search(probabilities=digits, epsilon=0.05, capacity=100)
    edges = mechanism(dpjax.random.seeded_key(4), np.tile(counts, (500, 1))).value.edges
    assert np.all(np.diff(edges, axis=1) >= 0)
    assert len(np.unique(edges)) > 60  # Power: the noise alone decides.
    below = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), "int32")
    backwards = jnp.array([5, 3, 9], jnp.int32)
    assert mechanism._log_prob_of_edges(backwards, below) == -np.inf
    assert mechanism._log_prob_of_edges(jnp.sort(backwards), below) > -20


def test_no_record_is_in_more_searches_than_share_epsilon():
    for count in range(1, 40):
        probabilities = tuple(Fraction(i, count + 1) for i in range(1, count + 1))
        mechanism = search(probabilities=probabilities, epsilon=1.0)
        nodes = mechanism.nodes
        searches = [sum(x.left <= gap < x.right for x in nodes) for gap in range(count + 1)]
        of_search = 1 - float(mechanism.measurement.epsilon)
        assert max(searches) * float(mechanism.selection(nodes[-1]).epsilon) <= of_search + 1e-6


def test_a_large_table_is_searched_for_the_quantile_that_was_asked_for():
    """With room for 5 10^8 rows, .9 was rounded to 1, since scores had to fit into int32."""
    mechanism = search(probabilities=(Fraction(9, 10),), capacity=2**29)
    assert [node.share for node in mechanism.nodes] == [Fraction(9, 10)]
    counts = np.full(10, 5 * 10**7, "int32")
    edges = mechanism(dpjax.random.seeded_key(5), np.tile(counts, (20, 1))).value.edges
    assert np.all(np.asarray(edges) == 9)
    scores, _ = _scores_between(
        jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), "int32"), 0, 10, 9, 10
    )
    exact = [-abs(10 * j * 5 * 10**7 - 9 * 5 * 10**8) for j in range(11)]
    assert scores.tolist() == [max(score, -(2**30)) for score in exact]


@pytest.fixture(scope="module")
def many_draws():
    """2,000 releases about one skewed column with ties: quartiles, median and maximum."""
    column = np.random.default_rng(3).lognormal(7, 0.8, 900).clip(0, 8000)
    column[:100] = 3000.0
    counts = np.histogram(column, np.linspace(0, 8000, 257))[0].astype("int32")
    mechanism = search(probabilities=QUARTERS, capacity=900)
    ranks = mechanism(dpjax.random.seeded_key(2), np.tile(counts, (2000, 1))).value
    facts = mechanism.facts(256) | {
        "asked": [0.25, 0.5, 0.75, 1.0],
        "places": [0, 1, 2, 2],
        "lower": 0.0,
        "upper": 8000.0,
        "scalar": False,
        "groups": 2000,
    }
    return column, jax.tree.map(np.asarray, ranks), facts


def ends_of(ranks, facts, confidence):
    accuracy = Accuracy.of("ranks", facts, ranks._asdict())
    return interval(np.zeros(0), accuracy, confidence, False)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_intervals_cover_and_are_no_wider_than_needed(many_draws, confidence):
    column, ranks, facts = many_draws
    low, high = ends_of(ranks, facts, confidence)
    truth = np.quantile(column, facts["asked"])
    covered = np.mean((low <= truth) & (truth <= high), axis=0)
    # A share of 2,000 is off by 5 standard errors once in 10^6 keys.
    assert np.all(covered >= confidence - 5 * np.sqrt(confidence * (1 - confidence) / 2000))
    # In ranks. Thresholds are at powers of two, so an end is up to twice as far as the noise alone.
    reach = 1.96 * 1.5 * np.sqrt(2 * 0.25 * 56) + 1
    sorted_column = np.sort(column)
    inside = np.searchsorted(sorted_column, high[:, 1]) - np.searchsorted(sorted_column, low[:, 1])
    if confidence == 0.95:
        assert reach < np.mean(inside) / 2 < 2 * reach


def test_estimates_are_near_and_in_order(many_draws):
    column, ranks, facts = many_draws
    found = _estimates(Ranks(*ranks), facts)[:, :3]
    missed = np.stack([np.searchsorted(np.sort(column), x) for x in found]) - 900 * np.array(
        [0.25, 0.5, 0.75]
    )
    error = np.sqrt(np.mean(missed**2, axis=0))
    assert np.all(error < 15), error
    assert np.mean(np.all(np.diff(found, axis=-1) >= 0, axis=-1)) > 0.99


@pytest.mark.parametrize("normal", [1.96, 2.576])
def test_the_reach_of_a_sum_of_noise_is_its_quantile(normal):
    rng, left, right = np.random.default_rng(0), 3, 9
    noise = np.round(rng.laplace(0, 1.5, (200_000, 12)))
    total = 0.75 * noise[:, :left].sum(axis=1) - 0.25 * noise[:, left:].sum(axis=1)
    reach = _reach_of_excess(np.array(left), np.array(right), 0.25, 1.5, normal) - 1
    share = {1.96: 0.975, 2.576: 0.995}[normal]
    assert reach == pytest.approx(np.quantile(total, share), rel=0.04)


NUMBERS = np.linspace(0, 100, 3000, dtype="float32")


def test_one_quantile_several_and_both_ends():
    database = padded_records(NUMBERS, capacity=4000)
    keys = iter(jax.random.split(dpjax.random.seeded_key(5), 4))

    def ask(probabilities):
        return private_quantiles(
            next(keys), database, probabilities, lower=0, upper=100, epsilon=2.0, relation=ADDED
        )

    one = ask(0.5)
    assert one.value.shape == ()
    low, high = one.interval(0.999)
    assert low < 50 < high
    assert high - low < 5
    several = ask((1, 0.9, 0, Fraction(1, 3)))
    assert several.value.shape == (4,)
    low, high = several.interval(0.999)
    assert high[0] == 100
    assert low[2] == 0
    assert np.all((low <= [100, 90.5, 0.1, 34]) & (high >= [99.8, 89.5, 0, 32.5]))
    assert np.all(np.abs(np.asarray(several.value) - [99, 90, 1, 33]) < 3)
    again = dpjax.Release.from_dict(several.to_dict())
    np.testing.assert_array_equal(again.interval(0.9), several.interval(0.9))
    wide, one_by_one = several.interval(0.9, simultaneous=True), several.interval(0.9)
    assert np.all((wide[0] <= one_by_one[0]) & (wide[1] >= one_by_one[1]))


def test_groups_have_quantiles_of_their_own():
    table = {"group": np.arange(3000) % 3, "x": NUMBERS + 100 * (np.arange(3000) % 3)}
    release = private_quantiles(
        dpjax.random.seeded_key(6),
        table,
        [0.5, 0.25],
        lower=0,
        upper=300,
        epsilon=4.0,
        by={"group": [2, 0, 1, 7]},
    )
    assert release.value.shape == (4, 2)
    assert release.guarantee.epsilon == 4.0
    expected = np.array([[250, 225], [50, 25], [150, 125]])
    assert np.all(np.abs(np.asarray(release.value)[:3] - expected) < 8)
    low, high = release.interval(0.95)
    # Nothing is known of an empty group.
    assert np.all(high[3] - low[3] > 200)
    assert np.all(high[:3] - low[:3] < 20)


def test_bad_arguments_are_refused():
    key, ends = dpjax.random.seeded_key(0), {"lower": 0, "upper": 1, "epsilon": 1.0}
    for wrong in (-0.1, 1.5, np.nan, True):
        with pytest.raises((ValueError, TypeError), match="probability"):
            private_quantiles(key, NUMBERS, wrong, **ends)
    with pytest.raises(ValueError, match="at least one"):
        private_quantiles(key, NUMBERS, [], **ends)
    with pytest.raises(ValueError, match=r"shape \(n,\)"):
        private_quantiles(key, NUMBERS[:, None], 0.5, **ends)
    with pytest.raises(ValueError, match="padded_records"):
        private_quantiles(key, NUMBERS, 0.5, **ends, relation=ADDED)
    with pytest.raises(TypeError, match="runs on the host"):
        jax.jit(lambda key: private_quantiles(key, NUMBERS, 0.5, **ends).value)(key)
    with pytest.raises(ValueError, match="capacity must be"):
        search(capacity=2**30)
    with pytest.raises(ValueError, match="integers of shape"):
        search()(key, np.zeros((3, 2)))


def test_cells_are_as_many_as_there_are_floats_between_the_bounds():
    """1024 cells of 8 floats had 9 edges, and the estimates were refused after the payment."""
    column = 1e15 + np.arange(300) % 2
    found = private_quantiles(
        dpjax.random.seeded_key(0), column, 0.3, lower=1e15, upper=1e15 + 1, epsilon=50.0
    )
    low, high = found.interval()
    assert low <= 1e15 + 0.125
    assert high >= 1e15
    with pytest.raises(ValueError, match="bounds must be further apart in float64"):
        private_quantiles(
            dpjax.random.seeded_key(0), column, 0.3, lower=1e15, upper=1e15 + 0.125, epsilon=50.0
        )
