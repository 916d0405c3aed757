"""The example of R's dapper: its printed posterior, the exact one, and ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

# "Getting started with dapper: randomized response", from its version 1.0.1 on CRAN: 400 people
# report their sex (1: male) and whether a university admitted them (1: yes), by two coins each.
REPORTS = {(1, 1): 104, (1, 0): 120, (0, 1): 74, (0, 0): 102}
# What its `summary` prints for the shares of the four pairs, under a uniform prior.
DAPPER = {
    "mean": (0.281, 0.336, 0.111, 0.272),
    "sd": (0.0610, 0.0638, 0.0548, 0.0601),
    "5%": (0.182, 0.235, 0.0250, 0.172),
    "95%": (0.382, 0.444, 0.206, 0.372),
    "effective size": (362, 431, 282, 389),
}
COIN = np.array([[3, 1], [1, 3]]) / 4
SIDE = 70


def exact_posterior(counts=REPORTS):
    """Shares on a grid, and their weights. Each report is drawn independently, given the shares."""
    corners = np.stack(np.meshgrid(*[np.arange(SIDE) + 0.5] * 3, indexing="ij"), -1).reshape(-1, 3)
    shares = np.column_stack([corners, SIDE + 1 - corners.sum(axis=1)]) / (SIDE + 1)
    shares = shares[shares[:, 3] > 0]
    reported = np.einsum("ab,nbc,cd->nad", COIN, shares.reshape(-1, 2, 2), COIN)
    logs = np.log(reported.reshape(-1, 4)) @ np.array(list(counts.values()))
    weights = np.exp(logs - logs.max())
    return shares, weights / weights.sum()


def summary(shares, weights):
    mean = weights @ shares
    below = [weights @ (shares <= x) for x in (DAPPER["5%"], DAPPER["95%"])]
    return mean, np.sqrt(weights @ (shares - mean) ** 2), *below


def errors_of_dapper(shares, weights):
    """The errors of its printed numbers, in standard errors of its Markov chains."""
    mean, sd, low, high = summary(shares, weights)
    each = np.sqrt(np.array(DAPPER["effective size"]))
    return np.concatenate(
        [
            (DAPPER["mean"] - mean) / sd * each,
            (DAPPER["sd"] - sd) / sd * each * np.sqrt(2),
            (low - 0.05) / np.sqrt(0.05 * 0.95) * each,
            (high - 0.95) / np.sqrt(0.05 * 0.95) * each,
        ]
    )


def test_the_exact_posterior_has_the_numbers_that_dapper_prints():
    """16 numbers, at 4.5 standard errors each. A report without a coin is told from the truth."""
    shares, weights = exact_posterior()
    assert np.abs(errors_of_dapper(shares, weights)).max() < 4.5
    naive = np.log(shares) @ np.array(list(REPORTS.values()))
    naive = np.exp(naive - naive.max())
    assert np.abs(errors_of_dapper(shares, naive / naive.sum())).max() > 4.5


PAIRS = jnp.array(list(REPORTS), jnp.int32)


def uniform_shares(key):
    """A uniform point of the simplex."""
    intervals = -jnp.log1p(-jax.random.uniform(key, (4,)))
    return intervals / jnp.sum(intervals)


def people(key, shares, n):
    """Pairs of sex and admission."""
    ends = jnp.cumsum(shares)[None, :3]
    return PAIRS[jnp.sum(jax.random.uniform(key, (n, 1)) > ends, axis=1)]


def of_reports(keys, counts, draws):
    """The posterior of shares given reports, which no weighted simulation would meet."""
    return dpjax.posterior(
        keys(1),
        np.repeat(np.array(list(counts), np.int32), list(counts.values()), axis=0),
        dpjax.privatize(lambda pairs: pairs, dpjax.two_coins()),
        prior=uniform_shares,
        model=people,
        n=sum(counts.values()),
        draws=draws,
        method="tempered",
    )


@pytest.mark.slow
def test_a_tenth_of_the_reports_has_the_exact_posterior(keys):
    """78 released bits. Shares of one column are told from the truth."""
    counts = {pair: count // 10 for pair, count in REPORTS.items()}
    found = of_reports(keys, counts, 4096)
    exact = summary(*exact_posterior(counts))
    ours = summary(np.asarray(found.theta, np.float64), found.weights)
    # The size is estimated from 16 runs, so it may be too large by a half.
    error = 4.5 * np.sqrt(1.5 / found.effective_size)
    assert np.abs((ours[0] - exact[0]) / exact[1]).max() < error
    assert np.abs(ours[1] / exact[1] - 1).max() < error / np.sqrt(2)
    for level in (2, 3):
        assert np.abs(ours[level] - exact[level]).max() < error / 2
    other = summary(*exact_posterior({pair: counts[pair[1], 1 - pair[0]] for pair in counts}))
    assert np.abs((other[0] - exact[0]) / exact[1]).max() > error


@pytest.mark.slow
def test_all_reports_are_too_many_and_are_refused(keys):
    """Populations of 400 people do not reach 800 bits in so few moves; the runs disagree."""
    with pytest.raises(ValueError, match="16 independent runs disagree"):
        of_reports(keys, REPORTS, 1024)
