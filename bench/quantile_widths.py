"""How wide intervals of a private median are, beside the best that a known density allows.

A median of 20,000 lognormal numbers is released often, under add-or-remove-one. Errors and
half-widths of 95% intervals are in ranks, times epsilon. The best interval has the same noise on
its counts, but thresholds in places that only somebody who knows the numbers can choose: equally
spaced in ranks around the true median. The best spacing and number of them are searched.
"""

import argparse
import itertools

import jax
import numpy as np

import dpjax
from dpjax.queries import padded_records, private_quantiles
from dpjax.queries._private_quantiles import _reach_of_excess
from dpjax.queries._rank_search import _SEARCH_ONE

N, NORMAL = 20_000, 1.959964
SPACINGS, EACH_SIDE = range(3, 25), (1, 2, 3, 4, 5, 6, 8)


def ours(epsilon: float, runs: int) -> tuple[float, float, float]:
    """The error, its 95% quantile and the half-width of an interval, in ranks."""
    numbers = np.sort(np.random.default_rng(7).lognormal(7.8, 0.8, N).clip(0, 20_000))
    records = padded_records(numbers.astype("float32"), capacity=N + N // 10)
    found, half = [], []
    for key in jax.random.split(dpjax.random.seeded_key(0), runs):
        how = {"lower": 0.0, "upper": 20_000.0, "epsilon": epsilon}
        release = private_quantiles(key, records, 0.5, relation="add-or-remove-one", **how)
        low, high = (np.searchsorted(numbers, end) for end in release.interval(0.95))
        found.append(np.searchsorted(numbers, float(release.value)) - N / 2)
        half.append((high - low) / 2)
    errors = np.abs(found)
    return float(np.sqrt(np.mean(errors**2))), float(np.quantile(errors, 0.95)), np.mean(half)


def best(share: float, draws: int) -> tuple[float, int, int]:
    """The least half-width, in ranks times epsilon, with its spacing and number of thresholds."""
    tried = itertools.product(SPACINGS, EACH_SIDE, (0, 0.5))
    found = []
    for spacing, side, shift in tried:
        places = (np.arange(-side, side + 1) + shift) * spacing
        found.append((half_width(places, share, draws), spacing, 2 * side + 1))
    return min(found)


def half_width(places: np.ndarray, share: float, draws: int) -> float:
    """The average half-width of intervals that end at thresholds with these ranks.

    Places are ranks from the true median, times epsilon. Counts get this share of epsilon.
    """
    ranks = np.concatenate([[-N / 2], places, [N / 2]])
    cells = len(ranks) - 1
    noise = np.random.default_rng(0).laplace(0, 1 / share, (draws, cells))
    before = np.arange(cells + 1)
    reach = _reach_of_excess(before, cells - before, 0.5, 1 / share, NORMAL) - 1
    below = np.concatenate([np.zeros((draws, 1)), np.cumsum(noise, axis=1)], axis=1)
    excess = ranks + below - below[:, -1:] / 2
    possible = (excess[:, :-1] <= reach[:-1]) & (excess[:, 1:] >= -reach[1:])
    first, last = possible.argmax(axis=1), cells - possible[:, ::-1].argmax(axis=1)
    return float(np.mean(ranks[last] - ranks[first]) / 2)


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.1, 1.0])
    asked = parser.parse_args()
    for epsilon in asked.epsilons:
        rms, at_95, half = (epsilon * x for x in ours(epsilon, asked.runs))
        print(f"epsilon {epsilon}: error {rms:.1f}, its 95% {at_95:.1f}, half-width {half:.1f}")
    for share in (1 - _SEARCH_ONE, 1.0):
        half, spacing, count = best(share, asked.draws)
        print(f"best, {share:.2g} of epsilon: {half:.1f} ({count} thresholds, {spacing} apart)")


if __name__ == "__main__":
    main()
