"""How much a release can lose on one pair of databases."""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax

from dpjax._core._types import PyTree, Value

LossFamily = Literal["laplace", "range", "pure", "gaussian"]
"""Which curve bounds the release of a pair, see `dpjax.privacy_profile`."""

LogPmf: TypeAlias = Callable[[jax.Array], jax.Array]
"""Takes the logits of a selection to the logarithms of its probabilities."""


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The privacy loss of a release on a pair, as a function of how far its values are apart.

    Attributes:
        family: the family of the curve.
        shift: takes the difference of the arrays that are released to their distance in units of
            the noise: a seminorm. For pure families it bounds the loss, for Gaussian noise it is
            the distance in standard deviations.
        nominal: the shift of a pair at the distance that the noise is calibrated to.
        rounding: at most so much does rounding to the grid add to a shift.
        loss: of the tables of the noise, for the whole release.
        missed: the mass that these tables miss, for the whole release.
        shifts: for Laplace noise, takes that difference to the shift of every coordinate in scales;
            None for other families.
        logits: for a selection, takes these arrays to minus the gap of each option over the scale,
            plus its log weight, where the largest weight is 1; None for other mechanisms.
        log_pmf: of a selection, takes logits to logarithms of probabilities.
        options: how many a selection has.
        arrays: takes the target's value to the arrays; None where they are the value.

    Formal guarantees:
        Let H be the hockey-stick divergence of the family at the shift plus `rounding`. The release
        of a pair has at most e^loss H(e - 2 loss) + (1 + e^e) missed at every e.
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
