"""Lower bounds from one run: recorded values, the law that they rest on, and their level."""

import itertools
import math

import numpy as np
import pytest
import scipy
from scipy import special

from dpjax.auditing import one_run_epsilon
from dpjax.auditing._one_run import chance, least_mass
from dpjax.auditing._privacy_profile import gaussian


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


def most_likely(m, r, v, mu):
    """The largest P(v or more right guesses) of any mechanism that is nearly mu-Gaussian DP.

    A linear program over all mechanisms whose outputs are guesses of r of m coins, with the
    hockey-stick divergences of mu at 25 epsilons. Only these are bounded, so the result may be a
    little too large.
    """
    coins = list(itertools.product((0, 1), repeat=m))
    outputs = [
        dict(zip(chosen, guess, strict=True))
        for chosen in itertools.combinations(range(m), r)
        for guess in itertools.product((0, 1), repeat=r)
    ]
    pairs = [
        (i, j)
        for i, one in enumerate(coins)
        for j, other in enumerate(coins)
        if sum(a != b for a, b in zip(one, other, strict=True)) == 1
    ]
    epsilons = np.linspace(0, 6, 25)
    size, gaps = len(coins) * len(outputs), len(outputs) * len(pairs) * len(epsilons)
    right = [[sum(u[j] == g for j, g in o.items()) >= v for o in outputs] for u in coins]
    gain = np.concatenate([np.ravel(right) / len(coins), np.zeros(gaps)])
    exceeds = scipy.sparse.lil_matrix((gaps, size + gaps))
    total = scipy.sparse.lil_matrix((len(pairs) * len(epsilons), size + gaps))
    row = 0
    for i, j in pairs:
        for epsilon in epsilons:
            for o in range(len(outputs)):
                exceeds[row, i * len(outputs) + o] = 1
                exceeds[row, j * len(outputs) + o] = -math.exp(epsilon)
                exceeds[row, size + row] = -1
                total[row // len(outputs), size + row] = 1
                row += 1
    deltas = np.tile(gaussian(np.full(25, mu), epsilons), len(pairs))
    sums = scipy.sparse.kron(scipy.sparse.eye(len(coins)), np.ones(len(outputs)))
    equal = scipy.sparse.hstack([sums, scipy.sparse.csr_matrix((len(coins), gaps))])
    found = scipy.optimize.linprog(
        -gain,
        A_ub=scipy.sparse.vstack([exceeds, total]).tocsr(),
        b_ub=np.concatenate([np.zeros(gaps), deltas]),
        A_eq=equal.tocsr(),
        b_eq=np.ones(len(coins)),
    )
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize(("m", "r"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_no_mechanism_has_more_right_guesses_than_gaussian_dp_allows(m, r):
    """The best of all mechanisms, by a linear program; the bound is exact for one canary."""
    for mu, v in itertools.product((0.5, 1.5), range(1, r + 1)):
        found = most_likely(m, r, v, mu)
        assert least_mass(m, r, v, found * 0.99, mu) <= 1
        if m == 1:
            assert found == pytest.approx(special.ndtr(mu / 2), rel=1e-6)
            assert least_mass(m, r, v, found * 1.01, mu) > 1


def test_one_in_twenty_bounds_of_gaussian_scores_is_too_high_at_most():
    """Of 1000 bounds more than 77 are too high with probability 1e-4, at the rate of .05.

    Guesses of the clearest scores refute more than guesses without an assumption.
    """
    mu, m, r, delta = 1.0, 1000, 100, 1e-5
    random = np.random.default_rng(3)
    coins = random.integers(0, 2, (1000, m))
    scores = mu * (coins - 0.5) + random.normal(size=coins.shape)
    chosen = np.argsort(-np.abs(scores), axis=1)[:, :r]
    right = np.sum(np.take_along_axis((scores > 0) == coins, chosen, 1), axis=1)
    values, runs = np.unique(right, return_counts=True)
    run = {"canaries": m, "guesses": r, "delta": delta}
    known = [one_run_epsilon(**run, correct=int(v), losses="gaussian") for v in values]
    any_law = [one_run_epsilon(**run, correct=int(v)) for v in values]
    true = 4.3772  # gaussian(1.0, ...) with a noise of one sensitivity, at delta.
    assert np.sum(runs[np.array(known) > true]) <= scipy.stats.binom.isf(1e-4, 1000, 0.05)
    assert runs @ known > 1.4 * (runs @ any_law)
    assert runs @ known > 0.5 * true * 1000


def test_known_losses_refute_more_with_more_right_guesses():
    run = {"canaries": 300, "guesses": 100, "delta": 1e-5, "losses": "gaussian"}
    bounds = [one_run_epsilon(**run, correct=v) for v in range(40, 101, 5)]
    assert bounds[0] == 0
    assert np.all(np.diff(bounds) >= 0)
    assert bounds[-1] > 4
    assert one_run_epsilon(**run, correct=95, p=0.01) < one_run_epsilon(**run, correct=95)


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
        ({"losses": "laplace"}, "losses"),
        ({"losses": "gaussian"}, "delta must be above 0"),
    ],
)
def test_bad_parameters_are_refused(change, named):
    base = {"canaries": 200, "guesses": 100, "correct": 95, "delta": 0.0, "p": 0.05}
    with pytest.raises(ValueError, match=named):
        one_run_epsilon(**base | change)
