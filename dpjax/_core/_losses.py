"""Privacy losses: of one release on a pair of databases, and of several releases together.

`Risk` bounds what an attacker can learn, from the whole distribution of the joint loss, which
dp-accounting computes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
import scipy
from numpy.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._guarantee import NeighboringRelation
from dpjax._core._types import PyTree, Value

LossFamily = Literal["laplace", "range", "pure", "gaussian"]
"""The family of privacy profiles that bounds the loss, see `dpjax.privacy_profile`."""

LogPmf: TypeAlias = Callable[[jax.Array], jax.Array]
"""Maps the logits of a selection to log probabilities."""


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The privacy loss of a release on a pair, as a function of the difference of its two values.

    Attributes:
        family: the family of privacy profiles.
        shift: a seminorm, which maps the difference of the released arrays to a distance in units
            of the noise. For pure families, the distance bounds the privacy loss. For Gaussian
            noise, it is in standard deviations.
        nominal: the shift of a pair whose values are as far apart as the mechanism's sensitivity.
        rounding: a bound on how much rounding to the grid can add to a shift.
        loss: the additional loss of the whole release, because its noise is drawn from tables.
        missed: the probability that the tables omit, for the whole release.
        shifts: for Laplace noise, maps the difference of the released arrays to the shift of every
            coordinate, in units of the scale; None for other families.
        logits: for a selection, maps the released arrays to the logit of each option: its log
            weight (the largest weight is 1) minus its gap to the best score over the scale. None
            for other mechanisms.
        log_pmf: for a selection, maps logits to log probabilities.
        options: the number of options of a selection.
        arrays: maps the target's value to the released arrays; None if they are the same.

    Formal guarantees:
        Let H be the hockey-stick divergence of the family at the shift plus `rounding`. At every
        epsilon e, the hockey-stick divergence of the release on the pair is at most
        e^loss H(e - 2 loss) + (1 + e^e) missed.
    """

    family: LossFamily
    shift: Callable[[PyTree], jax.Array]
    nominal: float
    rounding: float
    loss: float
    missed: float
    arrays: Callable[[Value], PyTree] | None = None
    shifts: Callable[[PyTree], list[jax.Array]] | None = None
    logits: Callable[[PyTree], jax.Array] | None = None
    log_pmf: LogPmf = jax.nn.log_softmax
    options: int = 0


# Bounds on the rounding errors of dp-accounting: the relative error of its sums of up to 10^5
# terms, and the absolute error of delta caused by its Fourier transforms.
_ROUNDING, TRANSFORMS = 1e-9, 1e-15
# Above this epsilon, exponentials would overflow. For such epsilons, adding up epsilons gives an
# equally tight bound.
LARGEST_EPSILON = 500.0


class LossKind(NamedTuple):
    """The type of the privacy loss distribution of one release, with its parameters.

    Attributes:
        name: "gaussian" or "laplace" for noise of this kind; "guarantee" if only epsilon and delta
            are known.
        first: the noise multiplier, or the epsilon of a guarantee.
        second: the delta of a guarantee, or 0.
        epsilon: the epsilon of the release's guarantee.
    """

    name: str
    first: float
    second: float
    epsilon: float


def kind_of_losses(accounting: ModuleType, event: Any, epsilon: float, delta: float) -> LossKind:
    """Returns the kind of the privacy loss of one release.

    If the event of dp-accounting describes Gaussian or Laplace noise, the kind comes from the
    event. Otherwise it comes from epsilon and delta.
    """
    if isinstance(event, accounting.GaussianDpEvent) and event.noise_multiplier > 0:
        return LossKind("gaussian", event.noise_multiplier * (1 - _ROUNDING), 0.0, epsilon)
    # For some mechanisms, the Laplace event has a larger epsilon than the guarantee. Then the
    # guarantee is the better bound.
    laplace = isinstance(event, accounting.LaplaceDpEvent)
    if laplace and event.noise_multiplier * epsilon > 1 - _ROUNDING:
        return LossKind("laplace", event.noise_multiplier * (1 - _ROUNDING), 0.0, epsilon)
    return LossKind("guarantee", epsilon, delta, epsilon)


def joint_losses(kinds: Mapping[LossKind, int]) -> Any:
    """Returns the joint loss distribution of several releases, rounded up.

    The result is None if an epsilon is above `LARGEST_EPSILON`.

    `kinds` maps each kind of loss to the number of releases of this kind.
    """
    distributions = _checks.extra("dp_accounting.pld.privacy_loss_distribution", "accounting")
    common = _checks.extra("dp_accounting.pld.common", "accounting")
    if max(kind.epsilon for kind in kinds) > LARGEST_EPSILON:
        return None
    joint = distributions.identity()
    for (name, first, second, _), count in kinds.items():
        if name == "gaussian":
            one = distributions.from_gaussian_mechanism(first / math.sqrt(count))
        elif name == "laplace":
            one = distributions.from_laplace_mechanism(first).self_compose(count)
        else:
            parameters = common.DifferentialPrivacyParameters(first, second)
            one = distributions.from_privacy_parameters(parameters).self_compose(count)
        joint = joint.compose(one)
    return joint


# Two bounds for one coordinate of noise, which hold for every noise table of dpjax. The first is on
# the privacy loss that a table adds, the second on the probability of noise outside the table. The
# certificate of each table, in `random/_lattice.py`, states its own bounds, which are not larger.
LOSS_OF_TABLES, MASS_OF_TABLES = 2.0**-46, 2.0**-118
# If the number of noisy coordinates is not known, the costs of noise tables are charged for this
# many coordinates.
MOST_DIMS = 2**20
# The number of (epsilon, delta) pairs in a privacy profile. Each pair gives a valid bound, so more
# pairs only make the result tighter.
_POINTS = 2000
_LEAST_DELTA = 1e-13
_OUTWARD = 1 + 1e-9

Basis = Literal["losses", "epsilon and delta"]


@dataclasses.dataclass(frozen=True, eq=False)
class Risk:
    """Bounds on what any attack can learn about one record from releases.

    The bounds hold for the worst pair of neighboring databases, and for an attacker who knows all
    other records. They use the whole distribution of the privacy loss, so they are tighter than
    bounds computed from a single epsilon and delta.

    Attributes:
        epsilons: numbers in ascending order. The first one is 0.
        deltas: for each epsilon, an upper bound on the least delta with (epsilon, delta)-DP.
        basis: "losses" if the loss distribution of every release is known; otherwise "epsilon and
            delta", because only the guarantee is known for some release.
        relation: which databases are neighbors.
        gamma: the fraction of pairs that sampled sensitivities do not cover.

    Formal guarantees:
        Each (epsilon, delta) gives two lines below the trade-off curve: a test with the false
        positive rate x has a false negative rate of at least 1 - delta - e^epsilon x and of at
        least e^-epsilon (1 - delta - x). Methods use the best line, so a coarse grid is valid.
        Results are rounded toward more risk. If gamma is above 0, the results hold for all pairs
        except this fraction.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    basis: Basis
    relation: NeighboringRelation
    gamma: float = 0.0

    @property
    def advantage(self) -> float:
        """The largest difference between true and false positive rates of a membership attack."""
        return float(self.deltas[0])

    def tradeoff(self, false_positive_rate: ArrayLike) -> np.ndarray:
        """The least false negative rate of any test between two neighboring databases.

        Args:
            false_positive_rate: in [0, 1], any shape.

        Returns:
            An array of the same shape, rounded down. One minus it bounds the true positive rate.

        Raises:
            ValueError: if a rate is out of range.
        """
        x = np.asarray(false_positive_rate, float)
        if not np.all((x >= 0) & (x <= 1)):
            raise ValueError(
                f"false_positive_rate must be in [0, 1], got {_checks.shown(false_positive_rate)}"
            )
        known = 1 - self.deltas
        found = [_least_error(one, self.epsilons, known) for one in x.ravel()]
        return np.reshape(found, x.shape)

    def reconstruction_bound(self, prior: float) -> float:
        """Bounds how often an attacker reconstructs a record.

        Args:
            prior: the success probability of the best guess without the releases, in [0, 1]. If a
                record has one of K equally likely values, this is 1 / K.

        Returns:
            The largest probability of success with the releases, rounded up.

        Raises:
            TypeError: if the prior is not a number.
            ValueError: if the prior is out of range.
        """
        prior = float(_checks.finite("prior", prior))
        if not 0 <= prior <= 1:
            raise ValueError(f"prior must be in [0, 1], got {prior}")
        return float(1 - self.tradeoff(prior))

    def __repr__(self) -> str:
        return f"Risk(advantage={self.advantage:.6g}, by {self.basis}, under {self.relation})"


def _least_error(x: float, epsilons: np.ndarray, known: np.ndarray) -> float:
    steep = known - np.exp(np.minimum(epsilons, 700.0)) * x
    flat = np.exp(-epsilons) * (known - x)
    return max(0.0, float(np.max(np.maximum(steep, flat))) - 1e-12)


def risk_of_losses(
    joint: Any,
    *,
    basis: Basis,
    relation: NeighboringRelation,
    gamma: float = 0.0,
    loss: float = 0.0,
    missed: float = 0.0,
    lost: float = 0.0,
    at_zero_only: bool = False,
) -> Risk:
    """Returns the risk of real releases, from the loss distribution of releases with ideal noise.

    Args:
        joint: the loss distribution of the ideal releases; None if no bound is known.
        basis: as in `Risk`.
        relation: as in `Risk`.
        gamma: as in `Risk`.
        loss: the densities of real and ideal releases differ by a factor of at most e^loss, except
            on a set of outputs.
        missed: the probability of this set of outputs.
        lost: a bound on the probability mass that convolutions lose.
        at_zero_only: whether the result has only the delta at epsilon 0, which is faster.
    """
    if joint is None:
        return Risk(np.zeros(1), np.ones(1), basis, relation, gamma)
    at_zero = float(joint.get_delta_for_epsilon(0.0))
    if at_zero_only:
        ideal, found = np.zeros(1), np.array([at_zero])
    else:
        # For large epsilons, delta decreases to a limit, which may be above 0.
        left = float(joint.get_delta_for_epsilon(LARGEST_EPSILON))
        largest = min(joint.get_epsilon_for_delta(left + _LEAST_DELTA), LARGEST_EPSILON)
        ideal = np.linspace(0.0, max(largest, 1e-6), _POINTS)
        found = np.asarray(joint.get_delta_for_epsilon(ideal))
        # `at_zero` replaces `found[0]`, so that the advantage does not depend on `at_zero_only`.
        # The two deltas may differ slightly, because dp-accounting adds up terms in a different
        # order for an array of epsilons.
        found[0] = at_zero
    found = found * _OUTWARD + TRANSFORMS + lost
    return Risk(*_charged(ideal, found, loss, missed), basis, relation, gamma)


def _charged(
    ideal: np.ndarray, deltas: np.ndarray, loss: float, missed: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns epsilons and deltas of noise from tables, given those of ideal noise.

    The formula is the one of `charged` in `dpjax.accounting`.

    A pair with epsilon 0 is added in front, because (e, delta)-DP implies (0, delta + tanh(e /
    2))-DP.
    """
    epsilons = ideal + 2 * loss
    drawn = deltas * math.exp(loss) + missed * (1 + np.exp(epsilons))
    first = drawn[0] + math.tanh(loss) * (1 + 1e-12)
    epsilons, drawn = np.append(0.0, epsilons), np.append(first, drawn)
    return epsilons, np.minimum(drawn, 1.0)


# Results are cached, because each method of `Risk` on a mechanism needs them, and computing them
# takes a second.
@functools.lru_cache(64)
def risk_of_kinds(
    kinds: tuple[tuple[LossKind, int], ...],
    relation: NeighboringRelation,
    gamma: float,
    dims: int,
) -> Risk:
    """Returns the risk of several releases, each with noise in at most `dims` coordinates.

    `kinds` has the kinds of their privacy losses, with the number of releases of each kind.
    """
    noisy = [kind.name != "guarantee" for kind, _ in kinds]
    basis: Basis = "losses" if all(noisy) else "epsilon and delta"
    ((first, count), *others) = kinds
    if not others and count == 1 and first.name == "guarantee" and first.epsilon <= LARGEST_EPSILON:
        return _risk_of_one(first.epsilon, first.second, relation, gamma)
    drawn = dims * sum(count for one, (_, count) in zip(noisy, kinds, strict=True) if one)
    loss, missed = drawn * LOSS_OF_TABLES, drawn * MASS_OF_TABLES
    if all(kind.name == "gaussian" and kind.epsilon <= LARGEST_EPSILON for kind, _ in kinds):
        mu = math.sqrt(sum(count / kind.first**2 for kind, count in kinds))
        ideal = np.linspace(0.0, min(LARGEST_EPSILON, mu * (mu / 2 + 8)), _POINTS)
        profile = _charged(ideal, _deltas_of_gaussian(mu, ideal), loss, missed)
        return Risk(*profile, basis, relation, gamma)
    joint = joint_losses(dict(kinds))
    return risk_of_losses(
        joint, basis=basis, relation=relation, gamma=gamma, loss=loss, missed=missed
    )


def _deltas_of_gaussian(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """Returns the least delta of Gaussian noise for each epsilon.

    The means for two neighbors are `mu` standard deviations apart.
    """
    above = scipy.special.ndtr(mu / 2 - epsilons / mu)
    below = np.exp(epsilons + scipy.special.log_ndtr(-mu / 2 - epsilons / mu))
    return np.maximum(above - below, 0.0) + 1e-12


def _risk_of_one(epsilon: float, delta: float, relation: NeighboringRelation, gamma: float) -> Risk:
    """Returns the risk of one release, from its epsilon and delta alone.

    It is the risk of randomized response that also reveals everything with probability delta. This
    mechanism is the least private of all (epsilon, delta)-DP mechanisms (Kairouz, Oh and Viswanath
    2015).
    """
    epsilons = np.linspace(0.0, epsilon, 64)
    # `excess` is (e^epsilon - e^x) / (e^epsilon + 1) for each x in `epsilons`, computed without
    # overflow.
    excess = -np.expm1(epsilons - epsilon) / (1 + math.exp(-epsilon))
    deltas = np.minimum((delta + (1 - delta) * excess) * (1 + 1e-12), 1.0)
    return Risk(epsilons, deltas, "epsilon and delta", relation, gamma)
