"""The number of runs of a tuning: exact probabilities, from a tree of all decisions."""

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
import scipy

from dpjax.random import _repetitions
from dpjax.random._repetitions import Coins, Repetitions, repetitions


def law_of(attempt, most):
    """The probabilities of the results of an attempt, by all paths with at most `most` coins."""
    found, paths = {}, [()]
    for _ in range(most):
        longer = []
        for path in paths:
            flips, chance = iter(path), Fraction(1)

            def coin(probability, flips=flips):
                nonlocal chance
                shown = next(flips)  # Ends the attempt if the path is too short.
                chance *= probability if shown else 1 - probability
                return shown

            try:
                result = attempt(coin)
            except StopIteration:
                longer += [(*path, True), (*path, False)]
                continue
            if next(flips, None) is None and chance:
                found[result] = found.get(result, 0) + chance
        paths = longer
    return found


@pytest.mark.parametrize(
    "shape", [Fraction(1), Fraction(0), Fraction(-1, 2), Fraction(1, 2)], ids=str
)
def test_runs_have_the_probabilities_of_the_negative_binomial_distribution(shape):
    """Exactly proportional to (1 - gamma)^k (1 + eta) ... (k - 1 + eta) / k!, as fractions."""
    gamma = Fraction(2, 7)
    found = law_of(Repetitions(shape, gamma).attempt, 9)
    weights = {1: 1 - gamma}
    for k in range(1, 4):
        weights[k + 1] = weights[k] * (1 - gamma) * (k + shape) / (k + 1)
    assert len({found[k] / weights[k] for k in weights}) == 1


def test_runs_have_the_probabilities_of_the_poisson_distribution():
    """Pieces of a mean of 3/7 have probabilities proportional to (3/7)^k / k!; seven of them: 3."""
    law = Repetitions(None, poisson_mean=Fraction(3))
    assert law.pieces == 6
    found = law_of(law.attempt, 9)
    ratios = {found[k] * math.factorial(k) / Fraction(1, 2) ** k for k in range(4)}
    assert len(ratios) == 1
    uneven = Repetitions(None, poisson_mean=Fraction(13, 10))
    assert uneven.pieces == 3
    found = law_of(uneven.attempt, 9)
    assert found[2] / found[1] == Fraction(13, 60)


def test_a_coin_has_its_probability_to_the_last_bit(monkeypatch):
    """By all strings of 12 bits; those that decide nothing have what is left."""
    for probability in (
        Fraction(1, 3),
        Fraction(5, 8),
        Fraction(1),
        Fraction(0),
        Fraction(99, 100),
    ):
        heads = undecided = 0
        for bits in itertools.product((0, 1), repeat=12):
            coins = object.__new__(Coins)
            given = iter(bits)
            monkeypatch.setattr(coins, "bit", lambda given=given: next(given), raising=False)
            try:
                heads += coins(probability)
            except (StopIteration, RuntimeError):
                undecided += 1
        assert heads <= probability * 2**12 <= heads + undecided
        assert undecided <= 1


def test_a_choice_is_uniform(monkeypatch):
    counts = np.zeros(3, int)
    for bits in itertools.product((0, 1), repeat=2):
        coins, given = object.__new__(Coins), iter(bits)
        monkeypatch.setattr(coins, "bit", lambda given=given: next(given), raising=False)
        try:
            counts[coins.below(3)] += 1
        except StopIteration:
            continue  # 3 is drawn again.
    assert counts.tolist() == [1, 1, 1]


def test_bits_are_those_of_the_key_and_none_is_used_twice(keys):
    """1,500 bits take three blocks, which are different; another key has other bits."""
    drawn = [Coins(keys(i)) for i in (1, 1, 2)]
    bits = np.array([[coins.bit() for _ in range(1500)] for coins in drawn])
    assert np.array_equal(bits[0], bits[1])
    for other in (bits[2], np.roll(bits[0], 512)):
        assert 0.4 < np.mean(bits[0] == other) < 0.6
    words = np.asarray(jax.random.bits(jax.random.fold_in(keys(1), 0), (16,), "uint32"))
    own = np.unpackbits(words.astype("<u4").view(np.uint8))
    assert np.array_equal(bits[0][:512], own)


@pytest.mark.parametrize("shape", [1.0, 0.0, -0.5, 0.5, math.inf])
def test_drawn_numbers_have_the_distribution(shape, keys):
    """A chi-squared test of 400 draws at a false-alarm rate of 1e-6; half the mean fails it."""
    law, coins = repetitions(3.0, shape), Coins(keys(7))
    drawn = [law.draw(coins) for _ in range(400)]
    counts = np.bincount(np.minimum(drawn, 6), minlength=7)

    def chi_squared(mean):
        expected = 400 * probabilities(repetitions(mean, shape), 6)
        seen = expected > 0
        return np.sum((counts - expected)[seen] ** 2 / expected[seen])

    limit = scipy.stats.chi2.isf(1e-6, 6)
    assert chi_squared(3.0) < limit < chi_squared(1.5)


def probabilities(law, most):
    """P(K = 0), ..., P(K = most - 1), and P(K >= most)."""
    if law.shape is None:
        first = scipy.stats.poisson.pmf(np.arange(most), float(law.poisson_mean))
    else:
        weights = [0.0, 1.0]
        for k in range(1, 20_000):
            weights.append(weights[-1] * float(1 - law.gamma) * (k + float(law.shape)) / (k + 1))
        first = (np.array(weights) / sum(weights))[:most]
    return np.append(first, 1 - first.sum())


@pytest.mark.parametrize("shape", [1.0, 0.0, -0.5, math.inf])
def test_means_and_tails_are_upper_bounds(shape):
    law = repetitions(5.0, shape)
    most = 20_000
    weights = probabilities(law, most)
    mean = np.sum(np.arange(most) * weights[:-1])
    assert mean <= law.mean <= 5.001
    assert law.mean == pytest.approx(mean, rel=1e-6)
    for count in (1, 5, 20, 100):
        assert 1 - np.sum(weights[: count + 1]) <= law.tail(count) + 1e-12
    assert law.tail(1000) < 1e-3


def test_gamma_is_the_one_of_dp_accounting():
    accountant = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    for shape, mean in ((0.0, 7.0), (0.5, 30.0), (1.0, 12.0)):
        theirs = accountant._gamma_truncated_negative_binomial(shape, mean)
        assert float(repetitions(mean, shape).gamma) == pytest.approx(theirs, rel=1e-6)
    assert _repetitions._LEAST_GAMMA > 2**-32


@pytest.mark.parametrize("shape", [1.0, 0.0, -0.5])
def test_a_mean_just_above_one_is_one_run(shape):
    """gamma is rounded to 1."""
    law = repetitions(1 + 1e-12, shape)
    assert law.gamma == 1
    assert law.tail(1) == 0
    assert law.draw(lambda probability: probability == 1) == 1


def test_a_mean_beyond_every_gamma_is_refused():
    for runs, shape in ((1e6, -0.99), (1e308, -0.99), (1e308, 1.0)):
        with pytest.raises((ValueError, OverflowError), match="runs must be smaller for shape="):
            repetitions(runs, shape)
