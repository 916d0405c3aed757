"""Privacy losses: of one release on a pair of databases, and of several releases together.

The joint loss is computed by dp-accounting.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from dpjax._core import _checks
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
