"""The privacy loss of a release on one pair of databases."""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax

from dpjax._core._types import PyTree, Value

LossFamily = Literal["laplace", "range", "pure", "gaussian"]
"""The family of privacy profiles that bounds the loss, see `dpjax.privacy_profile`."""

LogPmf: TypeAlias = Callable[[jax.Array], jax.Array]
"""Maps the logits of a selection to log probabilities."""


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The privacy loss of a release on a pair, as a function of the difference of both values.

    Attributes:
        family: the family of privacy profiles.
        shift: a seminorm, which maps the difference of the released arrays to a distance in units
            of the noise. For pure families, the distance bounds the privacy loss. For Gaussian
            noise, it is in standard deviations.
        nominal: the shift of a pair at the distance to which the noise is calibrated.
        rounding: a bound on how much rounding to the grid can add to a shift.
        loss: the additional loss because noise is drawn from tables, for the whole release.
        missed: the probability that the tables omit, for the whole release.
        shifts: for Laplace noise, maps the difference of the released arrays to the shift of every
            coordinate, in units of the scale; None for other families.
        logits: for a selection, maps the released arrays to the logit of each option: its log
            weight (the largest weight is 1) minus its gap over the scale. None for other
            mechanisms.
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
