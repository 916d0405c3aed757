"""The plan of a sampling: its programs and sizes, and its identity."""

import dataclasses
import functools
from typing import Literal

import jax
from jax.sharding import Mesh

from dpjax._core._values import Method, Norm, OperatingPoint, Oracle, Positions, Target
from dpjax._running._compiler import compilation
from dpjax._running._layout import Layout, devices_of, placed
from dpjax._running._processes import Team
from dpjax._tracing._fingerprints import digest
from dpjax.sensitivity._chunks import pairs_in_a_chunk
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair

# Given gamma alone, the least m would take the largest distance seen, which costs utility.
_PAIRS_OVER_LEAST = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All that a sampling is, before anything is drawn.

    Attributes:
        key: of threefry, where this host's devices can use it.
        pair: one random pair, and how far the target moves on it.
        point: how many pairs of each position, and which order statistic of their distances.
        confidence: of the statement for all positions at once; None for the marginal statement.
        layout: which device computes which pairs.
        team: the processes that sample together.
    """

    key: jax.Array
    pair: RandomPair
    point: OperatingPoint
    confidence: float | None
    layout: Layout
    team: Team

    @classmethod
    def make(
        cls,
        key: jax.Array,
        target: Target,
        oracle: Oracle,
        *,
        n: int,
        norm: Norm,
        positions: Positions,
        m: int | None,
        gamma: float | None,
        method: Method,
        confidence: float | Literal["default"] | None,
        chunk_size: int | None,
        mesh: Mesh | None,
        team: Team,
    ) -> "Plan":
        """Traces the programs, and refuses those that cannot run."""
        pair = RandomPair.trace(key, target, oracle, n=n, norm=norm, positions=positions)
        stated = operating_point(m=m, gamma=gamma, method=method, confidence=confidence).confidence
        if not pair.is_concrete:
            raise TypeError(
                "target, oracle or norm closes over a traced value, but sample_sensitivity runs on"
                " the host: use dpjax.sensitivity_samples inside jit and vmap"
            )
        # For the worst of n positions to be covered, every one of them must be: a union bound.
        point = _sampled_point(m, gamma, method, confidence_of_each(stated, pair.positions_sampled))
        layout = Layout(
            devices_of(mesh, calls_host=pair.calls_host),
            point.m,
            pairs_in_a_chunk(pair, point.m, chunk_size),
        )
        plan = cls(placed(key, layout), pair, point, stated, layout, team)
        if layout.spans_hosts:
            check_same_call(team, plan.run)
        return plan

    @functools.cached_property
    def run(self) -> dict[str, str | int]:
        """All facts that decide the bits of the distances; a checkpoint must agree on them."""
        return run_of(self.key, self.pair, self.layout)

    @functools.cached_property
    def identity(self) -> str:
        """Equal for samplings that are one event: that draw the same pairs and select alike."""
        return digest(
            jax.random.key_data(self.key),
            self.pair.target.fingerprint,
            self.pair.oracle.fingerprint,
            self.pair.norm.fingerprint,
            self.pair.positions,
            self.point,
        )


def _sampled_point(
    m: int | None, gamma: float | None, method: Method, confidence: float | None
) -> OperatingPoint:
    point = operating_point(m=m, gamma=gamma, method=method, confidence=confidence)
    if m is None:
        m = min(_PAIRS_OVER_LEAST * point.m, MOST_SAMPLED_PAIRS)
        point = operating_point(m=m, gamma=gamma, method=method, confidence=confidence)
    if point.m > MOST_SAMPLED_PAIRS:
        raise ValueError(f"m must be at most {MOST_SAMPLED_PAIRS} to be sampled, got {point.m}")
    return point


def run_of(key: jax.Array, pair: RandomPair, layout: Layout) -> dict[str, str | int]:
    """All facts that decide the bits of the distances."""
    return {
        "key": digest(jax.random.key_data(key)),
        "target": pair.target.fingerprint,
        "oracle": pair.oracle.fingerprint,
        "norm": pair.norm.fingerprint,
        "positions": pair.positions,
        "shortcut": pair.shortcut,
        "n": pair.n,
        "m": layout.m,
        "chunk size": layout.size,
        **compilation(layout.devices),
    }


def check_same_call(team: Team, run: dict[str, str | int]) -> None:
    """Refuses a run whose processes were called differently, which none of them could notice."""
    if len(team.meet(digest(run))) > 1:
        raise ValueError(
            "processes must make the same call, with one key, target, oracle and size, and compile"
            " it alike, for one model of processor or device, with one XLA_FLAGS and one version of"
            " JAX: at least two of them differ. Make the key from one seed, or broadcast it"
        )
