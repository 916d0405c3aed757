"""The least epsilon of composed (epsilon, 0)-DP mechanisms, if nothing else is known about them.

The worst such mechanism is randomized response. Its privacy loss is epsilon with probability
e^epsilon / (1 + e^epsilon), and else -epsilon. Losses add up to a sum L. At a joint epsilon of e,
delta is the expectation of 1 - e^(e - L) where that is positive.
"""

import collections
import math

import numpy as np

# The most distinct sums of losses; where there are more, epsilons are rounded up to a common unit.
_MOST_POINTS = 2**16
_ROUNDING = 1e-9  # Covers a relative error of 2^-50 for each release.
MOST_RELEASES = 10**4


def optimal_epsilon(epsilons: list[float], delta: float) -> float:
    """The least joint epsilon at a delta, rounded up.

    Exact where few epsilons differ, as for k equal ones. Else every epsilon is first rounded up to
    a multiple of one unit, which is at most a sixteenth of their average.
    """
    counts = collections.Counter(epsilons)
    if math.prod(count + 1 for count in counts.values()) > _MOST_POINTS:
        unit = math.fsum(epsilons) / max(_MOST_POINTS, 16 * len(epsilons))
        losses, masses = _on_a_lattice(counts, unit)
    else:
        losses, masses = _exactly(counts)
    total = math.fsum(epsilons)

    def delta_at(epsilon: float) -> float:
        beyond = losses > epsilon  # Smaller losses add nothing to delta.
        return float(masses[beyond] @ -np.expm1(epsilon - losses[beyond]))

    allowed = delta * (1 - _ROUNDING) - 1e-300
    low, high = 0.0, total
    if allowed > 0 and delta_at(low) <= allowed:
        high = low
    for _ in range(100):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if delta_at(middle) <= allowed:
            high = middle
        else:
            low = middle
    # The last term covers the rounding of the losses.
    return min(total * (1 + 2**-50), high + total * 2.0**-40)


def _exactly(counts: dict[float, int]) -> tuple[np.ndarray, np.ndarray]:
    """All sums of losses and their probabilities."""
    losses, masses = np.zeros(1), np.ones(1)
    for epsilon, count in counts.items():
        lies = np.arange(count + 1)
        lying = _add_up(np.ones(1), [(1, epsilon)] * count)
        losses = np.add.outer(losses, epsilon * (count - 2.0 * lies)).ravel()
        masses = np.multiply.outer(masses, lying).ravel()
    return losses, masses


def _on_a_lattice(counts: dict[float, int], unit: float) -> tuple[np.ndarray, np.ndarray]:
    steps = [
        (steps, steps * unit)
        for epsilon, count in counts.items()
        # The factor keeps the division from rounding down below the next integer.
        for steps in [math.ceil(epsilon / unit * (1 + 2**-50))] * count
    ]
    masses = _add_up(np.ones(1), steps)
    total = sum(number for number, _ in steps)
    return unit * (total - 2.0 * np.arange(len(masses))), masses


def _add_up(masses: np.ndarray, steps: list[tuple[int, float]]) -> np.ndarray:
    """Probabilities of sums of losses: entry i is the sum that lies 2 i units below the largest."""
    total = len(masses) - 1 + sum(number for number, _ in steps)
    sums = np.zeros(total + 1)
    sums[: len(masses)] = masses
    end = len(masses)
    for number, epsilon in steps:
        shrunk = math.exp(-epsilon)
        end += number
        lying = shrunk / (1 + shrunk) * sums[: end - number]
        sums[:end] *= 1 / (1 + shrunk)
        sums[number:end] += lying
    return sums
