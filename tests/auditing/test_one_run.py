"""Lower bounds from one run: recorded values, the law that they rest on, and their level."""

import math

import numpy as np
import pytest
import scipy

from dpjax.auditing import one_run_epsilon
from dpjax.auditing._audit import chance


@pytest.mark.parametrize(
    ("m", "r", "v", "epsilon"), [(1000, 600, 600, 5.2704), (100, 100, 100, 3.4902)]
)
def test_the_values_of_the_paper(m, r, v, epsilon):
    found = one_run_epsilon(canaries=m, guesses=r, correct=v, delta=1e-5, p=0.05)
    assert found == pytest.approx(epsilon, abs=5e-5)


def test_without_delta_it_inverts_the_binomial():
    """All of r right has probability (e^epsilon / (1 + e^epsilon))^r."""
    for r in (5, 40, 1000):
        q = 0.05 ** (1 / r)
        found = one_run_epsilon(canaries=1000, guesses=r, correct=r)
        assert math.log(q / (1 - q)) * (1 - 1e-6) < found <= math.log(q / (1 - q))


def test_the_chance_grows_with_epsilon():
    """So what is refuted is refuted with all that is smaller, and one level covers them all."""
    random = np.random.default_rng(0)
    for _ in range(10):
        m = int(random.integers(1, 3000))
        r = int(random.integers(1, m + 1))
        v = int(random.integers(1, r + 1))
        delta = 10 ** random.uniform(-7, -2)
        chances = np.array([chance(m, r, v, x, delta) for x in np.linspace(0, 12, 80)])
        below = chances[: np.argmax(chances >= 0.5)] if np.any(chances >= 0.5) else chances
        assert np.all(np.diff(below) >= -1e-12)


def test_one_in_twenty_bounds_of_randomized_response_is_too_high():
    """Each coin is guessed right with probability e^eps / (1 + e^eps), as under the tightest law.

    The rate is p at most and, binomials being discrete, not far below. Of 4000 bounds more than
    259 are too high with probability 1e-4 at the rate .05; fewer than 60 would show no power.
    """
    epsilon, r = 1.0, 300
    random = np.random.default_rng(1)
    right, runs = np.unique(
        random.binomial(r, 1 / (1 + math.exp(-epsilon)), 4000), return_counts=True
    )
    bounds = [one_run_epsilon(canaries=r, guesses=r, correct=int(v)) for v in right]
    too_high = np.sum(runs[np.array(bounds) > epsilon])
    assert 60 <= too_high <= scipy.stats.binom.isf(1e-4, 4000, 0.05)


def test_more_mistakes_more_delta_and_more_canaries_show_less():
    base = {"canaries": 200, "guesses": 100, "correct": 95, "delta": 1e-5, "p": 0.05}
    best = one_run_epsilon(**base)
    for change in ({"correct": 94}, {"canaries": 400}, {"delta": 1e-4}, {"p": 0.01}):
        assert 0 < one_run_epsilon(**base | change) < best


def test_half_right_refutes_nothing():
    assert one_run_epsilon(canaries=100, guesses=100, correct=50) == 0.0
    assert one_run_epsilon(canaries=100, guesses=0, correct=0) == 0.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"correct": 101}, "correct"),
        ({"guesses": 201}, "guesses"),
        ({"canaries": 0}, "canaries"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -0.1}, "delta"),
        ({"p": 0.5}, "p must be"),
        ({"p": 0.0}, "p must be"),
    ],
)
def test_bad_parameters_are_refused(change, named):
    base = {"canaries": 200, "guesses": 100, "correct": 95, "delta": 0.0, "p": 0.05}
    with pytest.raises(ValueError, match=named):
        one_run_epsilon(**base | change)
