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
        shift: a seminorm. It maps the difference of the released arrays to their distance in units
            of the noise. For pure families this bounds the loss; for Gaussian noise it is the
            distance in standard deviations.
        nominal: the shift of a pair at the distance that the noise is calibrated to.
        rounding: the most that rounding to the grid adds to a shift.
        loss: the loss from the noise tables, for the whole release.
        missed: the mass that these tables miss, for the whole release.
        shifts: for Laplace noise, maps that difference to the shift of every coordinate, in scales;
            None for other families.
        logits: for a selection, maps the arrays to each option's log weight (with a largest weight
            of 1) minus its gap over the scale; None for other mechanisms.
        log_pmf: for a selection, maps logits to log probabilities.
        options: the number of options of a selection.
        arrays: maps the target's value to the arrays; None if the value is the arrays.

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
