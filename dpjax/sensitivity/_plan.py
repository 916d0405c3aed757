"""A sampling before anything is drawn: its programs, sizes and devices, and its identity."""

import dataclasses
import functools
from typing import Literal, Self

import jax
import numpy as np

from dpjax._core._values import Method, OperatingPoint
from dpjax._running._compiler import compilation
from dpjax._running._layout import Layout, placed
from dpjax._running._processes import Team
from dpjax._tracing._fingerprints import digest
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair

# Given gamma alone, the least m would take the largest distance seen, which costs utility.
PAIRS_OVER_LEAST = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """Pairs to draw on the devices of one or several processes.

    Attributes:
        key: of threefry, where this host's devices can use it.
        pair: one random pair, and how far the target moves on it.
        layout: which device computes which pairs.
        team: the processes that sample together.
    """

    key: jax.Array
    pair: RandomPair
    layout: Layout
    team: Team

    @classmethod
    def of(
        cls, key: jax.Array, pair: RandomPair, layout: Layout, team: Team, *more: object
    ) -> Self:
        """Places the key, and refuses processes that were called differently."""
        made = cls(placed(key, layout), pair, layout, team, *more)
        # None of the processes could notice that.
        if len(layout.local) < len(layout.devices) and len(team.meet(digest(made.run))) > 1:
            raise ValueError(
                "processes must make the same call, with one key, target, oracle and size, and"
                " compile it alike, for one model of processor or device, with one XLA_FLAGS and"
                " one version of JAX: at least two of them differ. Make the key from one seed, or"
                " broadcast it"
            )
        return made

    @functools.cached_property
    def words(self) -> np.ndarray:
        """The words of the key, on the host."""
        return np.asarray(jax.random.key_data(self.key))

    @functools.cached_property
    def run(self) -> dict[str, str | int]:
        """All facts that decide the bits of the distances; a checkpoint must agree on them."""
        return {
            "key": digest(self.words),
            "target": self.pair.target.fingerprint,
            "oracle": self.pair.oracle.fingerprint,
            "norm": self.pair.norm.fingerprint,
            "positions": self.pair.positions,
            "shortcut": self.pair.shortcut,
            "probes": "at two positions",  # Files of before had other probes.
            "n": self.pair.n,
            "m": self.layout.m,
            "chunk size": self.layout.size,
            **compilation(self.layout.devices),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(Sampling):
    """A sampling from which one distance is selected.

    Attributes:
        point: how many pairs of each position, and which order statistic of their distances.
        confidence: of the statement for all positions at once; None for the marginal statement.
    """

    point: OperatingPoint
    confidence: float | None

    @functools.cached_property
    def identity(self) -> str:
        """Equal for samplings that are one event: that draw the same pairs and select alike."""
        programs = (program.fingerprint for program in self.pair.programs)
        return digest(self.words, *programs, self.pair.positions, self.point)


def point_of_each(
    positions: int,
    *,
    m: int | None,
    gamma: float | None,
    method: Method,
    confidence: float | Literal["default"] | None,
    over_least: int = PAIRS_OVER_LEAST,
    most: int = MOST_SAMPLED_PAIRS,
) -> tuple[OperatingPoint, float | None]:
    """The operating point of each position, and the confidence in all of them together."""
    stated = operating_point(m=m, gamma=gamma, method=method, confidence=confidence).confidence
    # For the worst of n positions to be covered, every one of them must be: a union bound.
    each = confidence_of_each(stated, positions)
    point = operating_point(m=m, gamma=gamma, method=method, confidence=each)
    if m is None:
        m = max(point.m, min(over_least * point.m, most))
        point = operating_point(m=m, gamma=gamma, method=method, confidence=each)
    if point.m > MOST_SAMPLED_PAIRS:
        raise ValueError(f"m must be at most {MOST_SAMPLED_PAIRS} to be sampled, got {point.m}")
    return point, stated
