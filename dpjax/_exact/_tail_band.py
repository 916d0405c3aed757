"""Upper limits of the tail of a distribution, at many order statistics at once."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from dpjax._exact._numerics import clopper_pearson_upper

# Ranks grow by this factor: limits between them are at most that much larger.
_RATIO = 1.05
# Relative error of a sum of products of numbers from 0 to 1.
_SUM = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class TailBand:
    """Limits of P(X > x) that hold at all points together; docs/proofs/privacy-profile.md.

    Attributes:
        points: some of m independent draws of X, the largest first.
        limits: an upper limit of P(X > x) for each of them, growing.
    """

    points: np.ndarray
    limits: np.ndarray

    @classmethod
    def of(cls, draws: np.ndarray, error: Fraction) -> "TailBand":
        """The band of independent draws, which fails with probability at most `error`.

        NaN counts as infinite. The ranks depend on the number of draws alone.
        """
        m = draws.size
        steps = math.ceil(math.log(m) / math.log(_RATIO)) + 1
        ranks = np.unique(np.minimum(np.ceil(_RATIO ** np.arange(steps)), m)).astype(np.int64)
        ordered = np.sort(np.where(np.isnan(draws), np.inf, draws), stable=True)[::-1]
        each = float(error / len(ranks)) * (1 - 1e-15)
        limits = clopper_pearson_upper(ranks - 1, m, each)
        return cls(ordered[ranks - 1], np.maximum.accumulate(limits))

    def least(self, covered: np.ndarray) -> float:
        """The limit of P(X > x) at the best covered point; 1 if none is."""
        return float(np.min(self.limits, where=covered, initial=1.0))

    def mean(self, curve: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """An upper limit of E curve(X), for every nondecreasing curve with values in [0, 1].

        The mass beyond the largest point counts 1.

        Args:
            curve: takes the points to an array with a leading axis for them.
        """
        values = curve(self.points)
        masses = np.diff(np.append(self.limits, 1.0))
        return np.minimum((self.limits[0] + masses @ values) * (1 + _SUM), 1.0)
