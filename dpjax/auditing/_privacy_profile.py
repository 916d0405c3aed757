"""`privacy_profile`: how private releases are at every epsilon, computed from sampled pairs."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._guarantee import SampledEvent, shown_number
from dpjax._core._losses import LossFamily, PairLoss, Risk
from dpjax._core._pytree import TreeSpec
from dpjax._core._values import (
    Guarantee,
    Mechanism,
    NeighboringRelation,
    OperatingPoint,
    Oracle,
    Positions,
    Sensitivity,
    Target,
    describe_confidence,
)
from dpjax._exact._numerics import TailBand
from dpjax._tracing._fingerprints import digest
from dpjax.auditing._profile_pairs import Joint, log_of_chances, relative_distances
from dpjax.random._keys import sampling_key
from dpjax.release._known_sensitivity import covering, needed, plan_of
from dpjax.release._privatize import as_released, privatize
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS

# A generous bound on the relative rounding error of the closed forms below.
_ERROR = 1e-12
_LEAST = 1e-300
_FARTHEST = 1e150


@dataclasses.dataclass(frozen=True)
class PairCurve:
    """Bounds the divergence of several releases on a pair of databases.

    The bound depends on the pair's relative distance, which `_profile_pairs` defines.

    Attributes:
        family: the kind of privacy profile that bounds the composition of all releases without
            Gaussian noise: "laplace", "range" or "pure".
        loss: the total privacy loss of the releases without Gaussian noise, at
            relative distance 1.
        deviations: the joint shift of all releases with Gaussian noise, in standard deviations, at
            relative distance 1.
        slack: the privacy loss that the noise tables add.
        missed: the probability of noise outside the tables.
        chances: the log of a factor. The factor covers rounding errors in the probabilities of
            sampled outputs.
    """

    family: LossFamily
    loss: float
    deviations: float
    slack: float
    missed: float
    chances: float = 0.0

    def is_pure(self, distance: np.ndarray, epsilon: float) -> np.ndarray:
        """Whether the releases are (epsilon, 0)-DP on pairs with these relative distances."""
        largest = (self.loss * distance + 2 * self.slack) * (1 + _ERROR)
        return (largest <= epsilon) & (self.deviations == 0)

    def delta(self, distance: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Returns the divergence at epsilon, rounded up. It increases with the relative distance.

        The two arrays are broadcast against each other.
        """
        distance, epsilon = np.broadcast_arrays(distance, epsilon)
        finite = np.where(np.isfinite(distance), distance, 0.0)
        epsilon = self._charged(epsilon)
        drawn = self._drawn(self._ideal(finite, epsilon - 2 * self.slack), epsilon)
        return np.where(np.isfinite(distance), drawn, 1.0)

    def of_losses(self, loss: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Returns the contribution of an output with this privacy loss to the divergence."""
        epsilon = self._charged(epsilon)
        ideal = -np.expm1(np.minimum(epsilon - 2 * self.slack - loss, 0.0))
        return self._drawn(math.exp(self.chances) * ideal, epsilon)

    def _charged(self, epsilon: np.ndarray) -> np.ndarray:
        """Caps epsilon. The delta at the cap is valid for every larger epsilon, too.

        The noise tables add `missed` times 1 + e^epsilon to delta, which is large for large
        epsilons, so without the cap the bound would be looser.
        """
        return np.minimum(epsilon, -math.log(self.missed) / 2) if self.missed else epsilon

    def _drawn(self, ideal: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Converts the divergence of ideal noise to that of noise from tables, rounded up."""
        missed = self.missed * (1 + np.exp(epsilon)) if self.missed else 0.0
        return np.minimum((math.exp(self.slack) * ideal + missed) * (1 + _ERROR), 1.0)

    def _ideal(self, distance: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        pure, deviations = self.loss * distance, self.deviations * distance
        if self.deviations == 0:
            return _FAMILIES[self.family](pure, epsilon)
        # All releases without Gaussian noise together are bounded by one randomized response,
        # whose privacy loss is either +pure or -pure.
        up = 1 / (1 + np.exp(-pure))
        return up * gaussian(deviations, epsilon - pure) + (1 - up) * gaussian(
            deviations, epsilon + pure
        )


def laplace(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The divergence of Laplace noise if the sum of all coordinates' shifts is `a` noise scales."""
    return _both_signs(epsilon, lambda e: -np.expm1(np.minimum((e - a) / 2, 0)))


def bounded_range(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Returns the largest divergence if all privacy losses are in an interval of length a."""

    def at(e: np.ndarray) -> np.ndarray:
        above = np.where(a > e, a, 1.0)
        found = np.expm1(np.minimum((e - above) / 2, 0)) ** 2 / -np.expm1(-above)
        return np.where(a > e, found, 0.0)

    return _both_signs(epsilon, at)


def pure(a: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Returns the largest divergence if all privacy losses are in [-a, a].

    Randomized response attains it.
    """
    return _both_signs(epsilon, lambda e: -np.expm1(np.minimum(e - a, 0)) / (1 + np.exp(-a)))


def gaussian(mu: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The divergence of normal noise that is shifted by mu standard deviations, rounded up."""
    safe = np.where(mu > 0, mu, 1.0)
    # For larger values of epsilon, the logarithms below would be infinite.
    epsilon = np.minimum(epsilon, _FARTHEST * safe)
    high = scipy.special.log_ndtr(safe / 2 - epsilon / safe)
    low = epsilon + scipy.special.log_ndtr(-safe / 2 - epsilon / safe)
    # Subtracting two nearly equal numbers loses digits. `error` bounds the relative error of the
    # result.
    error = 1e-14 * (1 + np.abs(high) + np.abs(low) + np.abs(epsilon))
    with np.errstate(under="ignore"):
        found = np.exp(high) * np.minimum(-np.expm1(np.minimum(low - high, 0)) + error, 1.0)
        # The divergence is above 0, so it must not underflow to 0.
        found = np.maximum(found, _LEAST)
    return np.where(mu > 0, found, np.maximum(-np.expm1(np.minimum(epsilon, 0)), 0.0))


def _both_signs(epsilon: np.ndarray, at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Extends a divergence to epsilon < 0, for pairs whose privacy loss is symmetric.

    The divergence must be the same if the two databases are swapped.
    """
    found = np.maximum(at(np.abs(epsilon)), 0.0)
    with np.errstate(under="ignore"):
        return np.where(epsilon >= 0, found, 1 - np.exp(-np.abs(epsilon)) * (1 - found))


_FAMILIES = {"laplace": laplace, "range": bounded_range, "pure": pure}


# The epsilons in the printed table, as multiples of the sum of the epsilons of all releases.
_MULTIPLES = (0, 0.25, 0.5, 1, 1.5, 2, 4)
_POINTS = 1000  # The number of epsilons in a `Risk`. More of them only make it tighter.
# The smallest gamma of the sampled sensitivities determines the number of probes. If no sensitivity
# was sampled, `_GAMMA` is used instead.
_GAMMA = 0.05


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrivacyProfile:
    """The joint privacy of one or several releases; `dpjax.privacy_profile` makes it.

    Attributes:
        epsilon: the sum of the mechanisms' epsilons.
        default_delta: the sum of the mechanisms' deltas.
        n: the number of records of a database.
        m: the number of pairs.
        confidence: the confidence of all statements together.
        band: limits of the distribution of the relative distances of pairs. A relative distance is
            the distance of a pair's values divided by the distance to which noise is calibrated.
        curve: the hockey-stick divergence of a pair, as a function of its relative distance.
        identity: the fingerprint of the sampling.
        notes: other facts that a reader must know.
        losses: limits of the distribution of the privacy losses of one release about each pair;
            None if `curve` is exact.

    Formal guarantees:
        Those of `dpjax.privacy_profile`, for all epsilons at once.
    """

    epsilon: float
    default_delta: float
    n: int
    m: int
    confidence: float
    band: TailBand
    curve: PairCurve
    identity: str
    notes: tuple[str, ...] = ()
    losses: TailBand | None = None

    def gamma(self, epsilon: float, delta: float | None = None) -> float:
        """A bound on the fraction of pairs that are not (epsilon, delta)-indistinguishable.

        Args:
            epsilon: 0 or above.
            delta: from 0 to 1; by default the sum of the mechanisms' deltas.

        Returns:
            A number from 0 to 1.

        Raises:
            TypeError: if an argument is not a number.
            ValueError: if an argument is out of range.
        """
        epsilon = _checks.non_negative("epsilon", epsilon)
        delta = self.default_delta if delta is None else _checks.non_negative("delta", delta)
        points = self.band.points
        covered = self.curve.is_pure(points, epsilon)
        return self.band.least(covered | (self.curve.delta(points, np.asarray(epsilon)) <= delta))

    def delta(self, epsilon: ArrayLike) -> float | np.ndarray:
        """The expected hockey-stick divergence of a random pair: its delta at epsilon, on average.

        An attacker who sees a random pair and its release does not learn which of the two databases
        was released: the two cases are (epsilon, delta)-indistinguishable.

        Args:
            epsilon: a number, or an array of them, 0 or above.

        Returns:
            A number from 0 to 1, or an array of them.

        Raises:
            TypeError: if epsilon does not hold real numbers.
            ValueError: if an epsilon is negative or not finite.
        """
        known = _checks.host_numbers("epsilon", epsilon).astype(np.float64)
        if not np.all((known >= 0) & (known < math.inf)):
            raise ValueError(f"epsilon must be finite and 0 or above, got {_checks.shown(epsilon)}")
        asked = known.reshape(1, -1)
        found = self.band.mean(lambda x: self.curve.delta(x[:, None], asked))
        if self.losses is not None:
            sampled = self.losses.mean(lambda x: self.curve.of_losses(x[:, None], asked))
            found = np.minimum(found, sampled)
        return found.reshape(known.shape) if known.ndim else float(found[0])

    @property
    def advantage(self) -> float:
        """The mean total variation distance: the advantage of an attacker who knows the pair."""
        return float(self.delta(0.0))

    @property
    def risk(self) -> Risk:
        """What an attacker can learn about a random pair: which of its two databases was released.

        The bounds are averages over pairs, and hold with the confidence of the profile.
        """
        epsilons = np.linspace(0.0, 8 * self.epsilon + 1, _POINTS)
        replaced = NeighboringRelation.REPLACE_ONE
        return Risk(epsilons, np.asarray(self.delta(epsilons)), "losses", replaced)

    def guarantee(self, epsilon: float, delta: float | None = None) -> Guarantee:
        """The guarantee of all releases together at an epsilon of your choice.

        Args:
            epsilon: finite, 0 or above.
            delta: as for `gamma`.

        Returns:
            A `Guarantee`. Its gamma is the result of the method `gamma`.

        Raises:
            TypeError: if an argument is not a number.
            ValueError: if an argument is out of range.
        """
        gamma = self.gamma(epsilon, delta)
        delta = self.default_delta if delta is None else delta
        event = SampledEvent(gamma, self.confidence, self.identity)
        return Guarantee(float(epsilon), delta, gamma, self.confidence, (event,), notes=self.notes)

    def __repr__(self) -> str:
        notes = "".join(f", {note}" for note in self.notes)
        stated = describe_confidence(self.confidence)
        lines = [
            f"PrivacyProfile: n={self.n}, m={self.m}, {stated}{notes}",
            f"{'epsilon':>10} {'gamma':>12} {'delta':>12}",
        ]
        for multiple in _MULTIPLES:
            epsilon = multiple * self.epsilon
            gamma, delta = _shown(self.gamma(epsilon)), _shown(float(self.delta(epsilon)))
            lines.append(f"{epsilon:10.4g} {gamma:>12} {delta:>12}")
        return "\n".join(lines)


def privacy_profile(
    key: jax.Array,
    releases: tuple[Target, Mechanism] | Sequence[tuple[Target, Mechanism]],
    oracle: Oracle,
    *,
    n: int,
    m: int,
    confidence: float = 0.99,
) -> PrivacyProfile:
    """Computes the joint privacy of releases about one database, for all epsilons at once.

    The profile is computed from sampled pairs of databases. The guarantee of a sampled sensitivity
    has one gamma, a bound on the fraction of pairs that the sensitivity does not cover. This
    guarantee says nothing about the pairs that are not covered. The profile also bounds the privacy
    loss of these pairs. For several releases, the profile adds up their losses on each pair.
    `dpjax.accounting.compose` adds up the gammas of the releases, as if two releases never left the
    same pair uncovered.

    The function draws m pairs of neighboring databases. Let the values of a pair be at distance G.
    The pair has the loss a = epsilon G / Delta, where Delta is the mechanism's sensitivity. Its
    hockey-stick divergence at e is at most

        Laplace, Bernstein:             1 - exp((e - a) / 2)
        exponential:                    (1 - exp((e - a) / 2))^2 / (1 - exp(-a))
        permute-and-flip, and mixtures: (exp(a) - exp(e)) / (1 + exp(a))
        Gaussian, shaped Gaussian:      Phi(u / 2 - e / u) - exp(e) Phi(-u / 2 - e / u)

    or 0 if this is negative, with u = G / sigma. For selections, G is half the range of the
    difference of scores. For several releases, losses a add up, and so do squares of u.

    These are the largest divergences among values at that distance. For Laplace noise on several
    coordinates, for several releases, and for selections, there is a second estimate. It draws one
    release about each pair, with privacy loss L, and averages max(0, 1 - exp(e - L)).

    Args:
        key: a typed key, as for `dpjax.sample_sensitivity`. Under the same key, the pairs differ
            from the pairs of that function.
        releases: (target, mechanism), or a list of these, all published about one database.
        oracle: as for `dpjax.sample_sensitivity`.
        n: the number of records of a database, at least 1.
        m: the number of pairs, at least 1.
        confidence: the probability, over the sampled pairs, that all statements of the profile are
            true.

    Returns:
        A `PrivacyProfile`, with `.gamma(epsilon)`, `.delta(epsilon)`, `.advantage` and
        `.guarantee(epsilon)`. It prints as a table; `dpjax.plotting.privacy_profile` draws it.

    Raises:
        TypeError: if an argument has the wrong type, or the loss of a mechanism on one pair is not
            known, because it has no noise, noise in floats, or noise of a private scale.
        ValueError: if a size is out of range, a mechanism is for another n or another relation
            than replace-one, a target is not the sampled one, the oracle draws other arrays, or
            `dpjax.sample_sensitivity` would refuse a target.

    Formal guarantees:
        Neighbors are replace-one, noise is exact, and the database is a draw from the oracle.
        Choose releases, oracle, n, m and confidence without the private data, and without releases
        about it. With probability at least `confidence` over the pairs, these statements are true
        for all epsilons and deltas at once. The joint release is
        (epsilon, delta, gamma(epsilon, delta))-random DP. And for every event S, a random pair
        D, D' and its release Y satisfy
        P((D, D', Y) in S) <= e^epsilon P((D', D, Y) in S) + delta(epsilon).

        Pairs that are farther apart than all sampled pairs count with divergence 1. If there is a
        second estimate, each estimate gets half of 1 - confidence, and `delta` is the smaller one.
        Distances are increased to cover rounding, as in `dpjax.sample_sensitivity`, and the grids
        and tables of the noise. The guarantee covers all releases together: do not compose it with
        the guarantees of the single releases.

        If a sensitivity was sampled for all positions, the profile averages over positions.
        Otherwise it is valid for pairs that differ in the last record. For a position drawn
        uniformly, gamma and delta are larger by up to 2 g. Here g is the fraction of databases on
        which a random rotation changes the targets by more than half of the margin for rounding.
        For a fixed position they are larger by up to 4 g, where g is defined with a quarter of the
        margin. Probes rarely detect a g below the gammas of the sensitivities
        (docs/proofs/sampled-sensitivity.md).

    Source:
        docs/proofs/privacy-profile.md; Zhu, Dong and Wang (2022) for domination; Balle and Wang
        (2018), Theorem 8; Dong, Durfee and Rogers (2020) for bounded range.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> def oracle(key, n):
        ...     return jax.random.exponential(key, (n,))
        >>> key_sample, key_profile = jax.random.split(dpjax.random.seeded_key(0))
        >>> sensitivity = dpjax.sample_sensitivity(
        ...     key_sample, jnp.mean, oracle, n=100, norm="l1", gamma=0.05
        ... )
        >>> release = jnp.mean, dpjax.laplace(sensitivity, epsilon=1.0)
        >>> profile = dpjax.privacy_profile(key_profile, release, oracle, n=100, m=10_000)
        >>> profile.gamma(1.0) < 0.06, profile.gamma(2.0) < 0.01, profile.delta(1.0) < 0.02
        (True, True, True)
    """
    key = sampling_key(key)
    _checks.host_only("privacy_profile", key, "a profile that was made before")
    pairs = _as_pairs(releases)
    n = _checks.integer("n", n, least=1)
    m = _checks.integer("m", m, least=1, most=MOST_SAMPLED_PAIRS)
    confidence = _checks.fraction("confidence", confidence)
    joint = _joint(pairs, oracle, n)
    # Each target is first evaluated on a few databases, to check it. The smallest gamma of the
    # sensitivities determines how many databases these checks need.
    gammas = [float(x.sensitivity.gamma) for _, x in pairs if float(x.sensitivity.gamma) > 0]
    point = OperatingPoint(m, m, min(gammas, default=_GAMMA), None, "exact", confidence)
    distances, drawn, identity = relative_distances(key, joint, oracle, n=n, point=point)
    error, losses = 1 - Fraction(confidence), None
    if drawn is not None:
        error /= 2
        losses = TailBand.of(drawn, error)
    return PrivacyProfile(
        epsilon=sum(float(x.guarantee.epsilon) for _, x in pairs),
        default_delta=min(1.0, sum(float(x.guarantee.delta) for _, x in pairs)),
        n=n,
        m=m,
        confidence=confidence,
        band=TailBand.of(distances, error),
        curve=_curve(joint),
        identity=digest(identity, joint.pure, joint.deviations, "profile"),
        notes=() if joint.positions == "last" else ("averaged over positions",),
        losses=losses,
    )


def _as_pairs(releases: Any) -> list[tuple[Target, Mechanism]]:
    def is_release(pair: Any) -> bool:
        two = isinstance(pair, tuple) and len(pair) == 2
        return two and isinstance(getattr(pair[1], "sensitivity", None), Sensitivity)

    listed = [releases] if is_release(releases) else releases
    if not isinstance(listed, (list, tuple)) or not listed or not all(map(is_release, listed)):
        raise TypeError(
            "releases must be a pair (target, mechanism), or a list of such pairs, got"
            f" {_checks.shown(releases)}"
        )
    return list(listed)


def _joint(pairs: list[tuple[Target, Mechanism]], oracle: Oracle, n: int) -> Joint:
    """Returns the joint privacy loss of the releases.

    Raises any error that a release would raise.
    """
    _checks.function("oracle", oracle)
    known = dict.fromkeys(x.sensitivity.records for _, x in pairs)
    records = tuple(x for x in known if x is not None)
    # The oracle is traced later, and its arrays are checked then.
    if records:
        drawn = records[0].tree()
    else:
        drawn = jax.eval_shape(lambda key: oracle(key, n), jax.random.key(0))
    losses: list[PairLoss] = []
    targets: list[Target] = []
    for target, mechanism in pairs:
        privatize(target, mechanism)  # This raises any error that a release would raise.
        sensitivity = mechanism.sensitivity
        covering(mechanism, needed(target, sensitivity, TreeSpec.of(drawn)))
        inside = plan_of(target, mechanism)
        targets.append(as_released(inside.target, sensitivity))
        if _checks.any_traced(mechanism):
            raise TypeError(
                "mechanisms must be concrete, got a traced one: call privacy_profile outside of jit"
            )
        if sensitivity.n not in (None, n):
            raise ValueError(f"n must be {sensitivity.n}, the n of a sensitivity, got n={n}")
        if sensitivity.relation is not NeighboringRelation.REPLACE_ONE:
            raise ValueError(f"mechanisms must be for replace-one, got {sensitivity.relation}")
        pair_loss = getattr(inside.mechanism, "pair_loss", None)
        if pair_loss is None:
            name = type(inside.mechanism).__name__
            raise TypeError(f"mechanisms must have a known privacy loss on a pair, got a {name}")
        losses.append(pair_loss(jax.eval_shape(inside.target, drawn)))
    sampled: set[Positions] = {mechanism.sensitivity.positions for _, mechanism in pairs}
    return Joint(
        tuple(targets),
        tuple(losses),
        math.fsum(loss.nominal for loss in losses if loss.family != "gaussian"),
        math.hypot(*(loss.nominal for loss in losses if loss.family == "gaussian")),
        "last" if sampled == {"last"} else "average",
        records,
    )


def _curve(joint: Joint) -> PairCurve:
    families: list[LossFamily] = [x.family for x in joint.losses if x.family != "gaussian"]
    # Several Laplace mechanisms together are treated as one Laplace mechanism with a larger shift.
    # No closed form is known for other families, so their composition is treated as an arbitrary
    # epsilon-DP mechanism.
    alike = set(families) == {"laplace"} or len(families) == 1
    return PairCurve(
        families[0] if alike else "pure",
        joint.pure,
        joint.deviations,
        math.fsum(loss.loss for loss in joint.losses),
        math.fsum(loss.missed for loss in joint.losses),
        log_of_chances(joint),
    )


def _shown(probability: float) -> str:
    """Returns a probability as a string, rounded up; "1" above 1 - 10^-6."""
    return "1" if probability > 1 - 1e-6 else shown_number(probability)
