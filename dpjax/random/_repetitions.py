"""The random number of runs of a tuning: integers from random bits, with exact probabilities.

Every decision is the toss of a coin with a rational probability. Random bits are compared with the
binary digits of the probability, until a bit differs. So all probabilities are exact, without
floats. docs/proofs/tuning.md has the proof.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TypeAlias

import jax
import numpy as np

from dpjax._core._types import Key
from dpjax._exact._numerics import bisect
from dpjax.random._chacha20 import bits_of_child_on_host

Coin: TypeAlias = Callable[[Fraction], bool]
"""Is true with exactly the given probability."""

_OUTWARD = 1 + 1e-9
# gamma is rounded to a multiple of 2^-32, and the mean of a Poisson distribution to a multiple of
# 2^-16.
_GAMMA_BITS, _MEAN_BITS = 32, 16
# The number of attempts in a draw is at most a small multiple of 1 / gamma. So gamma must be at
# least this number.
_LEAST_GAMMA = 1e-4


class Coins:
    """Independent coins of one key. A toss takes two random bits on average."""

    def __init__(self, key: Key) -> None:
        self._bits = _bits_of(np.asarray(jax.random.key_data(key)))

    def __call__(self, probability: Fraction) -> bool:
        """Returns True with exactly this probability.

        It compares a uniform number with the probability, by the first binary digit that differs.
        """
        rest, whole = probability.numerator, probability.denominator
        if rest >= whole:
            return True
        while rest:
            rest *= 2
            digit = rest >= whole
            rest -= whole if digit else 0
            if (bit := self.bit()) != digit:
                return bit < digit
        return False  # All further digits of the probability are 0.

    def bit(self) -> int:
        """Returns a random bit."""
        return next(self._bits)

    def below(self, count: int) -> int:
        """Returns a uniform integer from 0 to `count` - 1."""
        while True:
            drawn = 0
            for _ in range((count - 1).bit_length()):
                drawn = 2 * drawn + self.bit()
            if drawn < count:
                return drawn


def _bits_of(key_data: np.ndarray) -> Iterator[int]:
    for block in itertools.count():
        words = bits_of_child_on_host(key_data, block)
        yield from np.unpackbits(words.astype("<u4").view(np.uint8)).tolist()


@dataclasses.dataclass(frozen=True)
class Repetitions:
    """The distribution of the number of runs, K; made by `repetitions`.

    Attributes:
        shape: eta of a truncated negative binomial distribution, in (-1, 1]: 1 gives the geometric
            distribution, and 0 the logarithmic one. None for a Poisson distribution.
        gamma: the other parameter of this distribution. The probability of k = 1, 2, ... is
            proportional to (1 - gamma)^k (1 + eta)(2 + eta)...(k - 1 + eta) / k!.
        poisson_mean: the mean of a Poisson distribution.
    """

    shape: Fraction | None
    gamma: Fraction = Fraction(1)
    poisson_mean: Fraction = Fraction(0)

    @property
    def mean(self) -> float:
        """The expected number of runs, rounded up."""
        if self.shape is None:
            return float(self.poisson_mean) * _OUTWARD
        return _mean(float(self.shape), float(self.gamma)) * _OUTWARD

    def tail(self, count: int) -> float:
        """Returns a bound on the probability of more than `count` runs, rounded up."""
        if self.shape is None:
            # This is Chernoff's bound.
            mean = float(self.poisson_mean)
            if count <= mean:
                return 1.0
            return math.exp(count - mean - count * math.log(count / mean)) * _OUTWARD
        # The ratio of this distribution to a geometric one decreases in k, because eta is at most
        # 1. So the tail of the geometric distribution is a bound.
        return float(1 - self.gamma) ** count * _OUTWARD

    def draw(self, coin: Coin) -> int:
        """Draws the number of runs by independent coins."""
        pieces = 1 if self.shape is not None else self.pieces
        return sum(_accepted(self.attempt, coin) for _ in range(pieces))

    @property
    def pieces(self) -> int:
        """The number of Poisson variables that are added up. Each has a mean of at most 1/2."""
        return math.ceil(2 * self.poisson_mean)

    def attempt(self, coin: Coin) -> int | None:
        """Attempts to draw the number of runs; None if the attempt fails.

        If the distribution is Poisson, the number of runs is a sum of `pieces` variables, and this
        method attempts to draw one of them. Given success, the result has the right distribution.
        """
        if self.shape is None:
            twice, count = 2 * self.poisson_mean / self.pieces, 0
            while coin(Fraction(1, 2)):
                count += 1
                if not coin(twice / count):
                    return None
            return count
        count = 1
        while self.gamma < 1 and coin(1 - self.gamma):
            if not coin((count + self.shape) / (count + 1)):
                return None
            count += 1
        return count


def repetitions(runs: float, shape: float) -> Repetitions:
    """Returns the distribution of the number of runs with a mean near `runs`.

    Args:
        runs: above 1.
        shape: in (-1, 1], or infinity for a Poisson distribution.
    """
    if math.isinf(shape):
        return Repetitions(None, poisson_mean=_rounded(runs, _MEAN_BITS))
    # At a tiny gamma, the mean would overflow.
    tiny = _LEAST_GAMMA / 2
    _, high = bisect(lambda gamma: gamma < tiny or _mean(shape, gamma) > runs, 0.0, 1.0)
    if high < _LEAST_GAMMA:
        raise ValueError(
            f"runs must be smaller for shape={shape:g}, whose distribution has a long tail, got"
            f" {runs:g}: choose a larger shape"
        )
    return Repetitions(Fraction(shape), _rounded(high, _GAMMA_BITS))


def _rounded(number: float, bits: int) -> Fraction:
    return Fraction(max(1, round(Fraction(number) * 2**bits)), 2**bits)


def _mean(shape: float, gamma: float) -> float:
    """Returns the mean of a truncated negative binomial distribution."""
    if gamma in (0, 1):
        return math.inf if gamma == 0 else 1.0
    log_gamma = math.log(gamma)
    exponent = shape * log_gamma
    of_power = math.expm1(exponent) / exponent if exponent else 1.0
    return (gamma - 1) / (gamma * of_power * log_gamma)


def _accepted(attempt: Callable[[Coin], int | None], coin: Coin) -> int:
    while (found := attempt(coin)) is None:
        pass
    return found
