"""Basic composition of guarantees, and their price under another relation or for a group.

Host arithmetic in float64, rounded outward. docs/proofs/sampled-sensitivity.md proves composition.

Replacing a record removes one and adds another. So under replace-one, a guarantee under
add-or-remove-one counts as a guarantee for two steps. The converse does not hold:
docs/proofs/groups.md.
"""

import dataclasses
import math
import uuid
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._guarantee import concrete
from dpjax._core._risk import LOSS_OF_TABLES, MASS_OF_TABLES
from dpjax._core._types import Scalar, Value
from dpjax._core._values import (
    Guarantee,
    Mechanism,
    NeighboringRelation,
    Release,
    SampledEvent,
    guarantee_in,
)
from dpjax._exact._numerics import round_up, sum_up


def compose(*guarantees: Guarantee) -> Guarantee:
    """Composes the guarantees of several releases on one database.

    Targets, sizes, norms and oracles must have been fixed without the private data and without
    earlier releases of it. Given the result of a release, the database is no longer a draw from the
    oracle. In an example where the first answer decides the second target, pairs exceed the
    estimate with probability .75, although gamma is .057.

    If the neighboring relations differ, the result is under replace-one. A guarantee under
    add-or-remove-one is first converted to replace-one: to a known one, as for Gaussian noise and
    DP-SGD, or else to (2 epsilon, (1 + e^epsilon) delta). It must have gamma 0.

    epsilon and delta add. gamma and 1 - confidence add over distinct samplings: each sampled
    sensitivity counts once, for any number of releases. If one sampling is marginal, so is the
    result, and a sampling with gamma at confidence C counts as a marginal one with gamma + 1 - C.
    If a guarantee was changed by hand and disagrees with its samplings, the weaker statement
    counts.

    Args:
        *guarantees: one for each release.

    Returns:
        A `Guarantee` in float64, every sum rounded up.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if no guarantee is given, if one is a batch or NaN, or if their group sizes or
            privacy units differ.

    Formal guarantees:
        (sum epsilon, sum delta, sum gamma)-random DP for the joint release, under the restriction
        above. gamma and delta are capped at 1, confidence at 0.

    Source:
        Dwork and Roth (2014), Theorem 3.16, and a union bound over the samplings.

    Example:
        >>> import dpjax
        >>> one = dpjax.laplace(0.01, epsilon=0.5).guarantee
        >>> dpjax.accounting.compose(one, one)
        (epsilon=1, delta=0)-DP, under replace-one
    """
    if not guarantees:
        raise ValueError("guarantees must hold at least one, got none")
    known = [concrete(guarantee) for guarantee in guarantees]
    relation = common_relation(known)
    known = [under(guarantee, relation) for guarantee in known]
    sizes = {guarantee.group_size for guarantee in known}
    if len(sizes) > 1:
        raise ValueError(f"guarantees must have the same group size, got {sorted(sizes)}")
    unit = common_unit(known)
    events = distinct_events(known)
    gamma, confidence = joint(events)
    epsilon = sum_up(guarantee.epsilon for guarantee in known)
    delta = min(1.0, sum_up(guarantee.delta for guarantee in known))
    return Guarantee(
        epsilon,
        delta,
        gamma,
        confidence,
        events,
        relation,
        tuple(dict.fromkeys(note for guarantee in known for note in guarantee.notes)),
        known[0].group_size,
        price_added_up(known, epsilon, delta),
        unit,
    )


def group(guarantee: Guarantee, size: int) -> Guarantee:
    """The guarantee for a group of t people.

    It has t * epsilon, t * gamma, and delta (e^(t epsilon) - 1) / (e^epsilon - 1). The proof walks
    from D to D' one record at a time.

    Args:
        guarantee: the guarantee for one person.
        size: t, at least 1.

    Returns:
        A `Guarantee`, rounded up.

    Raises:
        TypeError: if the guarantee is not concrete or t is not an integer.
        ValueError: if t is out of range, or the guarantee is a batch or NaN.

    Formal guarantees:
        (t epsilon, ..., t gamma)-random DP for databases that differ in t records.

    Source:
        Dwork and Roth (2014), Theorem 2.2; Vadhan (2017), Lemma 2.2, for delta.

    Example:
        >>> import dpjax
        >>> dpjax.accounting.group(dpjax.laplace(0.01, epsilon=0.5).guarantee, 3)
        (epsilon=1.5, delta=0)-DP, under replace-one, for groups of 3
    """
    one = concrete(guarantee)
    size = _checks.integer("size", size, least=1, most=10**9)
    events = tuple(
        dataclasses.replace(event, gamma=min(1.0, times(event.gamma, size)))
        for event in distinct_events([one])
    )
    gamma, confidence = joint(events)
    return dataclasses.replace(
        one,
        epsilon=times(one.epsilon, size),
        delta=delta_of_steps(float(one.epsilon), float(one.delta), size),
        gamma=gamma,
        confidence=confidence,
        events=events,
        group_size=size * one.group_size,
        replacing=one.replacing if size == 1 else None,
    )


_PROCESSED = Accuracy.of(
    "",
    {
        "why": (
            "it was post-processed, and the function may change the errors in any way: if the"
            " function is monotone, apply it to the ends of the first release's interval"
        )
    },
)


def post_process(release: Release, function: Callable[[Value], Value]) -> Release:
    """Applies a function to the value of a release, under the same guarantee.

    Args:
        release: the release of a mechanism.
        function: maps the value of the release to another value. It may use public information, but
            not the private database.

    Returns:
        A `Release`.

    Raises:
        TypeError: if `release` is not a `Release`, or `function` not a function.

    Formal guarantees:
        Those of the release: a computation on a release alone loses no privacy. dpjax cannot check
        that the function uses nothing else that is private.

    Source:
        Dwork and Roth (2014), Proposition 2.1.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> counts = dpjax.laplace(1.0, 1.0)(dpjax.random.seeded_key(0), jnp.array([3, 0, 5]))
        >>> positive = dpjax.accounting.post_process(counts, lambda x: jnp.maximum(x, 0))
        >>> positive.guarantee
        (epsilon=1, delta=0)-DP, under replace-one, seeded key
    """
    if not isinstance(release, Release):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"release must be a Release, got {_checks.shown(release)}")
    value = _checks.function("function", function)(release.value)
    return Release(value, release.guarantee, _PROCESSED)


def distinct_events(guarantees: list[Guarantee]) -> tuple[SampledEvent, ...]:
    """The distinct samplings of some guarantees, each with its weakest statement.

    A gamma that was written by hand, without a sampling, counts as a sampling of its own with a
    random identity. So composing it with itself counts it twice.
    """
    distinct: dict[str, SampledEvent] = {}
    for guarantee in guarantees:
        if guarantee.events:
            events = _with_own_statement(guarantee)
        elif guarantee.gamma > 0 or guarantee.confidence != 1:
            events = (SampledEvent(guarantee.gamma, guarantee.confidence, uuid.uuid4().hex),)
        else:
            events = ()
        for event in events:
            known = distinct.get(event.identity, event)
            distinct[event.identity] = _worse(known, event)
    return tuple(distinct.values())


def _with_own_statement(guarantee: Guarantee) -> tuple[SampledEvent, ...]:
    """The events of a guarantee, weakened to promise no more than its fields do.

    A guarantee states gamma and confidence twice: in its own fields, and by its events together.
    They differ if a user changed one by hand, as by `dataclasses.replace`. Composition adds up
    events, so it would lose a gamma that was raised, or a confidence that was lowered, in the
    fields. So the difference is added to the first event; any event would do, since they add up.
    The difference is never negative: fields that promise more than the events are ignored.
    """
    first, *others = guarantee.events
    gamma, confidence = joint(guarantee.events)
    # A marginal guarantee must stay marginal. One marginal event makes the composition marginal.
    if guarantee.confidence is None and confidence is not None:
        first = _as_marginal(first)
        gamma, confidence = joint((first, *others))
    nothing = Fraction(0)
    stated_gamma = Fraction(float(guarantee.gamma))
    doubt = nothing if guarantee.confidence is None else 1 - Fraction(float(guarantee.confidence))
    if confidence is None:
        # The events together are marginal, so the guarantee is converted to a marginal one for the
        # comparison: its 1 - C is added to gamma, since marginal events have no confidence.
        stated_gamma, more_doubt = stated_gamma + doubt, nothing
    else:
        more_doubt = max(nothing, doubt - (1 - Fraction(confidence)))
    more_gamma = max(nothing, stated_gamma - Fraction(gamma))
    charged = min(1.0, round_up(Fraction(float(first.gamma)) + more_gamma))
    lowered = first.confidence
    if lowered is not None:  # C - more_doubt, rounded down.
        lowered = max(0.0, -round_up(more_doubt - Fraction(float(lowered))))
    # A gamma that was raised by hand may depend on all records, not only on the deciding ones.
    records = first.records if more_gamma == 0 else None
    return (SampledEvent(charged, lowered, first.identity, records), *others)


def _worse(event: SampledEvent, other: SampledEvent) -> SampledEvent:
    """The weaker of two statements about one sampling, in gamma and in confidence."""
    if event.confidence is None or other.confidence is None:
        event, other = _as_marginal(event), _as_marginal(other)
        confidence = None
    else:
        confidence = min(event.confidence, other.confidence)
    records = event.records if event.records == other.records else None
    return SampledEvent(max(event.gamma, other.gamma), confidence, event.identity, records)


def _as_marginal(event: SampledEvent) -> SampledEvent:
    """The same event as a marginal statement, with 1 - C added to gamma."""
    if event.confidence is None:
        return event
    gamma = Fraction(float(event.gamma)) + 1 - Fraction(float(event.confidence))
    return dataclasses.replace(event, gamma=min(1.0, round_up(gamma)), confidence=None)


def joint(events: tuple[SampledEvent, ...]) -> tuple[float, float | None]:
    """Gamma and confidence of a union of events; the confidence is None if any event has none."""
    gamma = sum((Fraction(float(event.gamma)) for event in events), Fraction(0))
    confidences = [float(event.confidence) for event in events if event.confidence is not None]
    doubt = sum((1 - Fraction(confidence) for confidence in confidences), Fraction(0))
    if len(confidences) < len(events):
        return min(1.0, round_up(gamma + doubt)), None
    return min(1.0, round_up(gamma)), max(0.0, -round_up(doubt - 1))


def under(guarantee: Guarantee, relation: NeighboringRelation) -> Guarantee:
    """The guarantee under another relation, rounded up. Raises if it implies no such guarantee.

    A gamma is refused, since dpjax samples under replace-one alone. So a gamma under
    add-or-remove-one was written by hand, and the sizes of its random pairs are unknown.
    """
    known = concrete(guarantee)
    if known.relation is relation:
        return known
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"guarantee under {known.relation}, for groups of {known.group_size}, implies nothing"
            f" under {relation}, where the number of records is private, got {known}: make it under"
            f" {relation}, or keep the budget under {NeighboringRelation.REPLACE_ONE}, as by"
            " Ledger(..., relation=), which accepts both"
        )
    if known.events or known.gamma > 0 or known.confidence != 1:
        raise ValueError(
            f"guarantee must have gamma 0 to hold under {relation}, got {known}: its random pairs"
            " have other sizes; sample under replace-one"
        )
    epsilon, delta = price_in_replace_one(known)
    return dataclasses.replace(
        known, epsilon=epsilon, delta=delta, relation=relation, replacing=None
    )


def price_in_replace_one(known: Guarantee) -> tuple[float, float]:
    """Epsilon and delta under replace-one: those that the release knows, or those of two steps.

    The known numbers are ignored if a user has changed the epsilon or delta that they belong to.
    """
    epsilon, delta = float(known.epsilon), float(known.delta)
    if known.replacing is not None and known.replacing[2:] == (epsilon, delta):
        return known.replacing[:2]
    return times(epsilon, 2), delta_of_steps(epsilon, delta, 2)


def price_added_up(
    guarantees: list[Guarantee], epsilon: float, delta: float
) -> tuple[float, float, float, float] | None:
    """The field `replacing` of several releases together; None if no release has one."""
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
        return number * factor  # It may overflow to infinity, which is no guarantee.
    return round_up(Fraction(number) * factor)


def delta_of_steps(epsilon: float, delta: float, size: int) -> float:
    """The delta of t steps: (e^(t epsilon) - 1) / (e^epsilon - 1) times the delta of one."""
    if delta == 0 or size == 1:
        return delta
    if size * epsilon > 700:
        return 1.0
    steps = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon > 0 else size
    return min(1.0, delta * steps * (1 + 1e-12))


class _InReplaceOne:
    """Presents a mechanism under add-or-remove-one to accountants as one under replace-one.

    Attributes:
        guarantee: the guarantee of the release.
        zcdp: rho and delta: two steps have 4 rho (Bun and Steinke 2016, Proposition 1.9).
        dp_event: that of Laplace or Gaussian noise with twice the shift; None for others.
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


def release_under(release: Any, relation: NeighboringRelation) -> Any:
    """A mechanism or guarantee under another relation.

    Objects without a guarantee are unchanged.
    """
    promised = guarantee_in(release)
    if promised is None or concrete(promised).relation is relation:
        return release
    if isinstance(release, Guarantee) or getattr(release, "zcdp", None) is None:
        return under(promised, relation)
    under(promised, relation)  # Refuses the converse.
    return _InReplaceOne(release)


def common_relation(releases: list[Guarantee]) -> NeighboringRelation:
    """The relation of all releases, or replace-one if they differ."""
    relations = {release.relation for release in releases}
    return relations.pop() if len(relations) == 1 else NeighboringRelation.REPLACE_ONE


def common_unit(releases: list[Guarantee]) -> str:
    """The privacy unit that all releases share. Several units are refused."""
    units = dict.fromkeys(release.privacy_unit for release in releases)
    if len(units) > 1:
        raise ValueError(
            "guarantees must have the same privacy unit, because a guarantee for one unit implies"
            f" nothing for another, got {' and '.join(map(repr, units))}: make all releases for one"
            " of them, and keep a ledger for each unit"
        )
    return next(iter(units))


SHARE = 2.0**-10  # The share of delta that pays for the noise tables.


def charged(epsilon: float, delta: float, dims: int) -> tuple[float, float]:
    """Turns (epsilon, delta (1 - 2^-10)) of ideal noise into (epsilon, delta) of drawn noise.

    Outside of a mass m, drawn probabilities P' are within a factor e^c of the ideal P. So
    P'(S) <= e^c P(S) + m <= e^c (e^epsilon Q(S) + delta) + m, and Q(S) <= e^c Q'(S) + m.

    Args:
        epsilon: the epsilon of the ideal noise.
        delta: the delta of the final guarantee.
        dims: how many noisy numbers are drawn. If it is 0, nothing is added.
    """
    if dims == 0:
        return epsilon, delta
    loss, missed = LOSS_OF_TABLES * dims, MASS_OF_TABLES * dims
    grown = epsilon + 2 * loss
    if not grown < 500:
        return math.inf, math.inf
    needed = delta * (1 - SHARE) * math.exp(loss) + missed * (1 + math.exp(grown))
    return grown * (1 + 2**-50), needed * (1 + 1e-9)
