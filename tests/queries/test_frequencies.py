"""Frequencies from reports: unbiased, and intervals that cover, by enumeration of all counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.queries import frequencies

N = 100
MECHANISMS = {
    "two coins": dpjax.two_coins(),
    "randomized response": dpjax.randomized_response(3.0, 4),
    "optimized": dpjax.unary_encoding(1.0, 4),
    "symmetric": dpjax.unary_encoding(1.0, 4, flips="symmetric"),
}
each_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def probabilities(mechanism):
    """That an answer is reported by whom it is true of, and by others."""
    return tuple(weight / 2**32 for weight in mechanism.report_weights)


def reports_of(mechanism, count):
    """N reports, of which so many name answer 0."""
    named = (np.arange(N) < count).astype(int)
    if isinstance(mechanism, dpjax.mechanisms.UnaryEncoding):
        bits = np.zeros((N, mechanism.categories), int)
        bits[:, 0] = named
        return bits
    return 1 - named


@pytest.fixture(scope="module")
def found():
    """By mechanism, what is made of every count of answer 0: estimate, lower and upper limit."""
    tables = {}
    for name, mechanism in MECHANISMS.items():
        made = [frequencies(reports_of(mechanism, count), mechanism) for count in range(N + 1)]
        tables[name] = np.array([[x.estimates[0], x.lower[0], x.upper[0]] for x in made]).T
    return tables


def counts_of_a_population(mechanism, frequency):
    truth, lie = probabilities(mechanism)
    return stats.binom.pmf(np.arange(N + 1), N, lie + (truth - lie) * frequency)


def counts_among_people(mechanism, holders):
    """Of N people, so many of whom have the answer: two binomials."""
    truth, lie = probabilities(mechanism)
    have, have_not = (
        stats.binom.pmf(np.arange(size + 1), size, share)
        for size, share in ((holders, truth), (N - holders, lie))
    )
    return np.convolve(have, have_not)


@each_mechanism
def test_estimates_are_unbiased(name, found):
    estimates, _, _ = found[name]
    for holders in (0, 1, 37, N):
        among = counts_among_people(MECHANISMS[name], holders)
        assert among @ estimates == pytest.approx(holders / N, abs=1e-9)
        population = counts_of_a_population(MECHANISMS[name], holders / N)
        assert population @ estimates == pytest.approx(holders / N, abs=1e-9)


@each_mechanism
def test_intervals_cover(name, found):
    """At every frequency, of a population and among the people; and not by being everything."""
    _, lower, upper = found[name]
    for frequency in np.linspace(0, 1, 301):
        covers = (lower <= frequency) & (frequency <= upper)
        assert counts_of_a_population(MECHANISMS[name], frequency) @ covers >= 0.95
    for holders in range(N + 1):
        covers = (lower <= holders / N) & (holders / N <= upper)
        assert counts_among_people(MECHANISMS[name], holders) @ covers >= 0.95
    # Power: at half of the width they do not.
    middle, half = (lower + upper) / 2, (upper - lower) / 4
    narrow = np.abs(middle - 0.3) <= half
    assert counts_of_a_population(MECHANISMS[name], 0.3) @ narrow < 0.8


@pytest.mark.slow
@each_mechanism
def test_intervals_of_releases_cover(name, found, key):
    """4,000 surveys as they are drawn; a false alarm once in a million keys."""
    mechanism, people = MECHANISMS[name], np.arange(N) >= 30
    keys = jax.random.split(key, 4000)
    reports = jax.jit(jax.vmap(lambda key: mechanism(key, jnp.asarray(people)).value))(keys)
    bits = reports.ndim == 3
    named = np.sum(np.asarray(reports[..., 0] == 1 if bits else reports == 0), axis=1)
    _, lower, upper = found[name][:, named]
    hits = np.sum((lower <= 0.3) & (upper >= 0.3))
    assert stats.binom.cdf(hits, 4000, 0.95) > 1e-6
    # Power: at a third of the width they do not.
    middle, sixth = (lower + upper) / 2, (upper - lower) / 6
    assert stats.binom.cdf(np.sum(np.abs(middle - 0.3) <= sixth), 4000, 0.95) < 1e-6


def test_intervals_of_a_normal_distribution_would_not(found):
    """What is not used: a rare answer under a large epsilon is not covered."""
    mechanism = dpjax.randomized_response(8.0, 2)
    truth, lie = probabilities(mechanism)
    counts, frequency = np.arange(N + 1), 0.01
    half = 1.96 * np.sqrt(counts / N * (1 - counts / N) / N) / (truth - lie)
    wald = np.abs((counts / N - lie) / (truth - lie) - frequency) <= half
    made = [frequencies(reports_of(mechanism, count), mechanism) for count in range(8)]
    exact = np.array([x.lower[0] <= frequency <= x.upper[0] for x in made])
    population = counts_of_a_population(mechanism, frequency)
    assert population @ wald < 0.7
    assert population[:8] @ exact >= 0.95


def test_simultaneous_intervals_share_the_error():
    mechanism, reports = MECHANISMS["optimized"], reports_of(MECHANISMS["optimized"], 40)
    together = frequencies(reports, mechanism, simultaneous=True)
    alone = frequencies(reports, mechanism, confidence=1 - 0.05 / 4)
    np.testing.assert_allclose(together.upper, alone.upper, rtol=1e-9)
    assert (together.confidence, together.answers) == (0.95, N)
    assert together.lower[0] < frequencies(reports, mechanism).lower[0]


def test_probabilities_are_those_that_are_drawn():
    """With K that does not divide 2^32, lies are rounded up: the estimate knows."""
    mechanism = dpjax.randomized_response(1.0, 2**15)
    lie = int(mechanism.lie_weight) / 2**32
    truth = 1 - (2**15 - 1) * lie
    ideal = (np.e - 1) / (np.e + 2**15 - 1)
    assert abs((truth - lie) / ideal - 1) > 1e-3
    estimate = frequencies(np.zeros(N, int), mechanism).estimates[0]
    assert estimate == pytest.approx((1 - lie) / (truth - lie), rel=1e-9)


@pytest.mark.parametrize(
    "name", ["two coins", *(pytest.param(x, marks=pytest.mark.slow) for x in list(MECHANISMS)[1:])]
)
def test_a_million_answers_in_one_call(name, key):
    """A false alarm once in 10^6 keys."""
    mechanism = MECHANISMS[name]
    answers = np.arange(10**6) % 10 == 0
    made = frequencies(mechanism(key, jnp.asarray(answers)).value, mechanism, confidence=1 - 1e-6)
    assert made.answers == 10**6
    assert made.lower[1] <= 0.1 <= made.upper[1]
    assert made.upper[1] - made.lower[1] < 0.02


def test_reports_of_something_else_are_refused():
    mechanism = MECHANISMS["optimized"]
    for wrong in (np.zeros((5, 3), int), np.full((5, 4), 2), np.full((5, 4), -1), np.int32(0)):
        with pytest.raises(ValueError, match="this mechanism of 4 categories can release"):
            frequencies(wrong, mechanism)
    for wrong in (np.full(5, 4), np.full(5, -1), np.zeros(0, int)):
        with pytest.raises(ValueError, match="reports must be values that this mechanism"):
            frequencies(wrong, MECHANISMS["randomized response"])
    with pytest.raises(TypeError, match="reports must be integers, got dtype float64"):
        frequencies(np.zeros(5), mechanism)
    with pytest.raises(TypeError, match="mechanism must be made by randomized_response"):
        frequencies(np.zeros(5, int), dpjax.laplace(1.0, 1.0))
    with pytest.raises(ValueError, match="do not depend on answers"):
        frequencies(np.zeros(5, int), dpjax.randomized_response(1e-10))
    with pytest.raises(ValueError, match="confidence"):
        frequencies(np.zeros(5, int), MECHANISMS["two coins"], confidence=1.0)
