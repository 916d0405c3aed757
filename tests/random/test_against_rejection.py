"""The noise of the tables against another way to draw it: rejection, in integers of any size.

Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy" (2020), Algorithms 1
to 3, in Python, where nothing rounds. Two-sample Kolmogorov-Smirnov tests: fixed seeds, a false
alarm once in 10^6 of them.
"""

import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpjax._exact import _limbs
from dpjax.random import GAUSSIAN, LAPLACE

COUNT, FALSE_ALARM = 20_000, 1e-6


def happens(generator, probability):
    """An event of a rational probability."""
    return generator.randrange(probability.denominator) < probability.numerator


def happens_exp(generator, exponent):
    """An event of probability exp(-exponent)."""
    while exponent > 1:
        if not happens_exp(generator, Fraction(1)):
            return False
        exponent -= 1
    trial = 1
    while happens(generator, exponent / trial):
        trial += 1
    return trial % 2 == 1


def discrete_laplace(generator, scale):
    """An integer x with probability proportional to exp(-|x| / scale), for an integer scale."""
    while True:
        low = generator.randrange(scale)
        if not happens_exp(generator, Fraction(low, scale)):
            continue
        high = 0
        while happens_exp(generator, Fraction(1)):
            high += 1
        magnitude, negative = low + scale * high, happens(generator, Fraction(1, 2))
        if magnitude or not negative:
            return -magnitude if negative else magnitude


def discrete_gaussian(generator, sigma):
    """An integer x with probability proportional to exp(-x^2 / (2 sigma^2)), sigma an integer."""
    scale = sigma + 1
    while True:
        x = discrete_laplace(generator, scale)
        excess = abs(x) - Fraction(sigma**2, scale)
        if happens_exp(generator, excess**2 / (2 * sigma**2)):
            return x


WAYS = {"laplace": (LAPLACE, discrete_laplace), "gaussian": (GAUSSIAN, discrete_gaussian)}


def in_units(integers, scale):
    return np.array([x / scale for x in integers])


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_tables_draw_what_rejection_draws(name, key):
    noise, draw = WAYS[name]
    generator, scale = random.Random(20170611), round(noise.lattice.resolution)
    expected = in_units((draw(generator, scale) for _ in range(COUNT)), scale)
    drawn = np.asarray(_limbs.to_float(noise.lattice.sample(key, (COUNT,)), np.float32)) / scale
    assert stats.ks_2samp(drawn, expected).pvalue > FALSE_ALARM
    assert stats.ks_2samp(np.abs(drawn), np.abs(expected)).pvalue > FALSE_ALARM
    # The power: a tenth more noise is found.
    assert stats.ks_2samp(1.1 * np.abs(drawn), np.abs(expected)).pvalue < FALSE_ALARM


def test_rejection_draws_what_it_should():
    """Against exact probabilities, at a scale where every integer counts."""
    generator = random.Random(20170611)
    found = [discrete_laplace(generator, 2) for _ in range(COUNT)]
    support = np.arange(-12, 13)
    mass = np.exp(-np.abs(support) / 2)
    counts = [found.count(x) for x in support]
    assert sum(counts) > 0.99 * COUNT
    assert stats.chisquare(counts, mass / mass.sum() * sum(counts)).pvalue > FALSE_ALARM
