"""What a guarantee under add-or-remove-one is worth under replace-one.

To replace a record is to remove one and to add another: two steps. The other direction does not
hold. docs/proofs/groups.md has the proofs.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any, overload

from dpjax._core._guarantee import concrete
from dpjax._core._types import Scalar
from dpjax._core._values import Guarantee, Mechanism, NeighboringRelation, guarantee_in
from dpjax._exact._numerics import round_up


def under(guarantee: Guarantee, relation: NeighboringRelation) -> Guarantee:
    """The guarantee under another relation, rounded up; refused where it follows from none.

    A gamma is refused. dpjax samples under replace-one alone, so one under add-or-remove-one was
    written by hand, and does not say which sizes its random pairs have.
    """
    known = concrete(guarantee)
    if known.relation is relation:
        return known
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"guarantee is for databases that differ by {known.relation}, groups of"
            f" {known.group_size}, which says nothing under {relation}, where the number of records"
            f" is private, got {known}: make it under {relation}, or keep the budget under"
            f" {NeighboringRelation.REPLACE_ONE}, as by Ledger(..., relation=), which takes both"
        )
    if known.events or known.gamma > 0 or known.confidence != 1:
        raise ValueError(
            f"guarantee must have gamma 0 to be one under {relation}, got {known}: its random pairs"
            " have other sizes; sample under replace-one"
        )
    epsilon, delta = price_in_replace_one(known)
    return dataclasses.replace(
        known, epsilon=epsilon, delta=delta, relation=relation, replacing=None
    )


def price_in_replace_one(known: Guarantee) -> tuple[float, float]:
    """Epsilon and delta under replace-one: the release's own, if they are known, or of two steps.

    The own ones do not count if a user has changed what they belong to.
    """
    epsilon, delta = float(known.epsilon), float(known.delta)
    if known.replacing is not None and known.replacing[2:] == (epsilon, delta):
        return known.replacing[:2]
    return times(epsilon, 2), delta_of_steps(epsilon, delta, 2)


def price_added_up(
    guarantees: list[Guarantee], epsilon: float, delta: float
) -> tuple[float, float, float, float] | None:
    """`replacing` of releases together, if one or more of them have their own."""
    if all(one.replacing is None for one in guarantees):
        return None
    prices = [price_in_replace_one(one) for one in guarantees]
    if not all(math.isfinite(price) for price, _ in prices):
        return None
    sums = [
        round_up(sum(map(Fraction, column), Fraction(0))) for column in zip(*prices, strict=True)
    ]
    return sums[0], min(1.0, sums[1]), epsilon, delta


def times(value: Scalar, factor: int) -> float:
    """A multiple, rounded up."""
    number = float(value)
    if not number < 1e300:
        return number * factor  # It may overflow to infinity, which promises nothing.
    return round_up(Fraction(number) * factor)


def delta_of_steps(epsilon: float, delta: float, size: int) -> float:
    """The delta of so many steps, (e^(t epsilon) - 1) / (e^epsilon - 1) times that of one."""
    if delta == 0 or size == 1:
        return delta
    if size * epsilon > 700:
        return 1.0
    steps = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon > 0 else size
    return min(1.0, delta * steps * (1 + 1e-12))


class _InReplaceOne:
    """A release by a mechanism under add-or-remove-one, as accountants of replace-one take it.

    Attributes:
        guarantee: of the release.
        zcdp: rho and delta: two steps have 4 rho (Bun and Steinke 2016, Proposition 1.9).
        dp_event: Laplace and Gaussian noise at a shift that is twice as long; None for others.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism: Any = mechanism
        self.guarantee = under(mechanism.guarantee, NeighboringRelation.REPLACE_ONE)

    @property
    def zcdp(self) -> tuple[float, float]:
        known = getattr(self._mechanism, "zcdp", None)
        if known is not None and known[1] == 0:
            return 4 * known[0], 0.0
        epsilon, delta = float(self.guarantee.epsilon), float(self.guarantee.delta)
        return epsilon**2 / 2 * (1 + 1e-12), delta

    @property
    def dp_event(self) -> Any:
        event: Any = getattr(self._mechanism, "dp_event", None)
        if type(event).__name__ in ("GaussianDpEvent", "LaplaceDpEvent"):
            return type(event)(noise_multiplier=event.noise_multiplier / 2)
        return None


@overload
def release_under(release: Guarantee, relation: NeighboringRelation) -> Guarantee: ...
@overload
def release_under(release: object, relation: NeighboringRelation) -> Any: ...
def release_under(release: object, relation: NeighboringRelation) -> Any:
    """A mechanism or guarantee under another relation; something without a guarantee as it is."""
    promised = guarantee_in(release)
    if promised is None or concrete(promised).relation is relation:
        return release
    if isinstance(release, Guarantee) or getattr(release, "zcdp", None) is None:
        return under(promised, relation)
    under(promised, relation)  # Refuses the converse.
    mechanism: Any = release
    return _InReplaceOne(mechanism)


def common_relation(releases: list[Guarantee]) -> NeighboringRelation:
    """The relation of all releases, or replace-one, which takes both."""
    relations = {release.relation for release in releases}
    return relations.pop() if len(relations) == 1 else NeighboringRelation.REPLACE_ONE
