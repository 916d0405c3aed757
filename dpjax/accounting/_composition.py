"""Basic composition of guarantees, group privacy, and conversion between neighboring relations.

The host computes in float64, and all roundings are outward. docs/proofs/sampled-sensitivity.md
proves the composition theorem.

Replacing a record means removing one record and adding another. So a guarantee under
add-or-remove-one, applied twice, gives a guarantee under replace-one. The converse is false, see
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
from dpjax._core._guarantee import SampledEvent, concrete
from dpjax._core._losses import LOSS_OF_TABLES, MASS_OF_TABLES
from dpjax._core._types import Scalar, Value
from dpjax._core._values import Guarantee, Mechanism, NeighboringRelation, Release, guarantee_in
from dpjax._exact._numerics import round_up, sum_up


def compose(*guarantees: Guarantee) -> Guarantee:
    """Composes the guarantees of several releases on one database.

    You must have chosen targets, sizes, norms and oracles without the private data and without
    earlier releases of it. The reason: given the result of a release, the database is no longer a
    draw from the oracle. For example, let the first answer determine the second target. The values
    of two neighbors can then be farther apart than the estimated sensitivity with probability .75,
    although gamma is .057.

    If the neighboring relations differ, the result is under replace-one. A guarantee under
    add-or-remove-one is first converted to replace-one. If the guarantee also states its epsilon
    and delta under replace-one, these are used. Guarantees of Gaussian noise and of DP-SGD state
    both. Any other guarantee becomes (2 epsilon, (1 + e^epsilon) delta). A guarantee that is
    converted must have gamma 0 and confidence 1.

    epsilon and delta are added up. gamma and 1 - confidence are added up over distinct samplings:
    each sampled sensitivity counts once, for any number of releases. If a sampling is marginal, the
    result is marginal, too. Then a sampling with gamma at confidence C counts as a marginal
    sampling with gamma + 1 - C. If a guarantee was changed by hand and contradicts its samplings,
    the weaker statement counts.

    Args:
        *guarantees: the guarantee of each release.

    Returns:
        A `Guarantee` with Python floats, every sum rounded up.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if no guarantee is given, if a guarantee is a batch or NaN, or if group sizes or
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
        raise ValueError("guarantees must contain at least one guarantee, got none")
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

    The new epsilon is t epsilon, the new gamma is t gamma, and the new delta is delta (e^(t
    epsilon) - 1) / (e^epsilon - 1). The proof changes one record after the other.

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
            " function is monotone, apply it to the ends of the original release's interval"
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
        The guarantee of the release: a function of a release alone costs no privacy. dpjax cannot
        check that the function uses no other private data.

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
    """Returns the distinct samplings of several guarantees, with their gammas and confidences.

    If two guarantees state different numbers for the same sampling, the weaker ones are returned.

    A guarantee with a gamma that was set by hand has no sampling. It gets a new sampling with a
    random identity. So if such a guarantee is composed with itself, its gamma counts twice.
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
    """Returns the guarantee's events, weakened if its own gamma or confidence is weaker.

    A guarantee states gamma and confidence twice: in its own fields, and by its events. The two
    statements differ if a user has changed a field, for example by `dataclasses.replace`. If a
    field is weaker (a larger gamma or a smaller confidence), the first event is weakened by the
    difference. Otherwise composition would ignore the field, because it adds up the gammas of
    events. If a field is stronger, the events are not changed.
    """
    first, *others = guarantee.events
    gamma, confidence = joint(guarantee.events)
    # A guarantee without a confidence is marginal: its gamma includes the probability that the
    # sampling went wrong. If the guarantee is marginal but no event is, the first event is made
    # marginal, so that compositions with this guarantee are marginal, too.
    if guarantee.confidence is None and confidence is not None:
        first = _as_marginal(first)
        gamma, confidence = joint((first, *others))
    nothing = Fraction(0)
    stated_gamma = Fraction(float(guarantee.gamma))
    doubt = nothing if guarantee.confidence is None else 1 - Fraction(float(guarantee.confidence))
    if confidence is None:
        # At least one event is marginal, so `joint` added 1 - confidence of each of the other
        # events to gamma. Here, too, 1 - confidence of the guarantee is added to its gamma, so that
        # the two gammas can be compared.
        stated_gamma, more_doubt = stated_gamma + doubt, nothing
    else:
        more_doubt = max(nothing, doubt - (1 - Fraction(confidence)))
    more_gamma = max(nothing, stated_gamma - Fraction(gamma))
    charged = min(1.0, round_up(Fraction(float(first.gamma)) + more_gamma))
    lowered = first.confidence
    if lowered is not None:  # The new confidence is `lowered` - `more_doubt`, rounded down.
        lowered = max(0.0, -round_up(more_doubt - Fraction(float(lowered))))
    # `records` says how many records determine gamma. A gamma that was raised by hand may depend on
    # all records.
    records = first.records if more_gamma == 0 else None
    return (SampledEvent(charged, lowered, first.identity, records), *others)


def _worse(event: SampledEvent, other: SampledEvent) -> SampledEvent:
    """Combines two statements about the same sampling: the larger gamma, the smaller confidence."""
    if event.confidence is None or other.confidence is None:
        event, other = _as_marginal(event), _as_marginal(other)
        confidence = None
    else:
        confidence = min(event.confidence, other.confidence)
    records = event.records if event.records == other.records else None
    return SampledEvent(max(event.gamma, other.gamma), confidence, event.identity, records)


def _as_marginal(event: SampledEvent) -> SampledEvent:
    """Returns an event without a confidence: the probability 1 - confidence is added to gamma.

    Its gamma is then a probability over the samples and a fresh pair together (a marginal
    statement).
    """
    if event.confidence is None:
        return event
    gamma = Fraction(float(event.gamma)) + 1 - Fraction(float(event.confidence))
    return dataclasses.replace(event, gamma=min(1.0, round_up(gamma)), confidence=None)


def joint(events: tuple[SampledEvent, ...]) -> tuple[float, float | None]:
    """Returns gamma and confidence of several events together.

    The confidence is None (marginal) if it is None for any of the events.
    """
    gamma = sum((Fraction(float(event.gamma)) for event in events), Fraction(0))
    confidences = [float(event.confidence) for event in events if event.confidence is not None]
    doubt = sum((1 - Fraction(confidence) for confidence in confidences), Fraction(0))
    if len(confidences) < len(events):
        return min(1.0, round_up(gamma + doubt)), None
    return min(1.0, round_up(gamma)), max(0.0, -round_up(doubt - 1))


def under(guarantee: Guarantee, relation: NeighboringRelation) -> Guarantee:
    """Converts a guarantee to another relation, rounded up, or raises ValueError.

    The error is raised if the guarantee implies nothing under that relation.

    A guarantee with gamma above 0 cannot be converted. dpjax samples only under replace-one, so a
    gamma under add-or-remove-one was set by hand, and nothing says for how many records it holds.
    """
    known = concrete(guarantee)
    if known.relation is relation:
        return known
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        raise ValueError(
            f"guarantee {known} cannot be converted to {relation}, because guarantees under "
            f"{known.relation} do not protect the number of records. Make the release under "
            f"{relation}, or pay from a budget under {known.relation}. Such a budget accepts both "
            "relations, for example Ledger(..., relation=dpjax.NeighboringRelation.REPLACE_ONE)"
        )
    if known.events or known.gamma > 0 or known.confidence != 1:
        raise ValueError(
            f"guarantee must have gamma 0 and confidence 1 to be converted to {relation}, got "
            f"{known}: gamma is a probability over pairs of databases with different numbers of "
            f"records, but under {relation} both databases have the same number. Sample the "
            f"sensitivity, or simulate the losses, under {relation} instead"
        )
    epsilon, delta = price_in_replace_one(known)
    return dataclasses.replace(
        known, epsilon=epsilon, delta=delta, relation=relation, replacing=None
    )


def price_in_replace_one(known: Guarantee) -> tuple[float, float]:
    """Converts a guarantee under add-or-remove-one to epsilon and delta under replace-one.

    The result is taken from the field `replacing`. If this field is None, the result is the cost of
    removing one record and adding another. `replacing` is ignored if a user has changed the epsilon
    or delta for which it was computed.
    """
    epsilon, delta = float(known.epsilon), float(known.delta)
    if known.replacing is not None and known.replacing[2:] == (epsilon, delta):
        return known.replacing[:2]
    return times(epsilon, 2), delta_of_steps(epsilon, delta, 2)


def price_added_up(
    guarantees: list[Guarantee], epsilon: float, delta: float
) -> tuple[float, float, float, float] | None:
    """Returns the field `replacing` of a composition.

    Its first two numbers are the composition's epsilon and delta under replace-one, and the last
    two are the arguments `epsilon` and `delta`. The result is None if no guarantee has this field,
    or if the first number would be infinite.
    """
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
    """Returns `value` times `factor`, rounded up."""
    number = float(value)
    if not number < 1e300:
        # The product may overflow to infinity, which is correct: it means that there is no
        # guarantee.
        return number * factor
    return round_up(Fraction(number) * factor)


def delta_of_steps(epsilon: float, delta: float, size: int) -> float:
    """Returns the delta of a group of `size` records, by group privacy.

    It is delta times (e^(size * epsilon) - 1) / (e^epsilon - 1).
    """
    if delta == 0 or size == 1:
        return delta
    if size * epsilon > 700:
        return 1.0
    steps = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon > 0 else size
    return min(1.0, delta * steps * (1 + 1e-12))


class _InReplaceOne:
    """A mechanism under add-or-remove-one, converted to replace-one for accountants.

    Attributes:
        guarantee: the guarantee under replace-one.
        zcdp: rho and delta under replace-one. Replacing a record is a removal and an addition. By
            group privacy, two such changes together cost 4 rho (Bun and Steinke 2016, Proposition
            1.9).
        dp_event: for Laplace and Gaussian noise, the event with half the noise multiplier; None for
            other mechanisms.
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
    """Converts a mechanism or guarantee to another relation.

    Other objects are returned unchanged.
    """
    promised = guarantee_in(release)
    if promised is None or concrete(promised).relation is relation:
        return release
    if isinstance(release, Guarantee) or getattr(release, "zcdp", None) is None:
        return under(promised, relation)
    under(promised, relation)  # If the conversion is impossible, this raises an error.
    return _InReplaceOne(release)


def common_relation(releases: list[Guarantee]) -> NeighboringRelation:
    """Returns the relation of all releases, or replace-one if their relations differ."""
    relations = {release.relation for release in releases}
    return relations.pop() if len(relations) == 1 else NeighboringRelation.REPLACE_ONE


def common_unit(releases: list[Guarantee]) -> str:
    """Returns the privacy unit of all releases, or raises an error if their units differ."""
    units = dict.fromkeys(release.privacy_unit for release in releases)
    if len(units) > 1:
        raise ValueError(
            "guarantees must have the same privacy unit, because a guarantee for one unit implies"
            f" nothing for another unit, got {' and '.join(map(repr, units))}: make all releases"
            " for the same unit, or keep a separate ledger for each unit"
        )
    return next(iter(units))


SHARE = 2.0**-10  # The fraction of delta that is set aside for the cost of noise tables.


def charged(epsilon: float, delta: float, dims: int) -> tuple[float, float]:
    """Converts the guarantee of ideal noise to a guarantee of noise that is drawn from tables.

    The ideal noise must be (epsilon, d)-DP for d = delta (1 - 2^-10). Let P and Q be the
    distributions of the output with ideal noise on two neighbors, and P' and Q' those with drawn
    noise. Let c be `LOSS_OF_TABLES` times dims, and m be `MASS_OF_TABLES` times dims. For every
    event S, P'(S) <= e^c P(S) + m and Q(S) <= e^c Q'(S) + m. With P(S) <= e^epsilon Q(S) + d, it
    follows that P'(S) <= e^(epsilon + 2 c) Q'(S) + e^c d + (1 + e^(epsilon + c)) m.

    Args:
        epsilon: the epsilon of the ideal noise.
        delta: the delta of the final guarantee, which includes the cost of the tables.
        dims: how many noisy numbers are drawn. If it is 0, no cost is added.

    Returns:
        The epsilon and delta of the noise that is drawn from tables.
    """
    if dims == 0:
        return epsilon, delta
    loss, missed = LOSS_OF_TABLES * dims, MASS_OF_TABLES * dims
    grown = epsilon + 2 * loss
    if not grown < 500:
        return math.inf, math.inf
    needed = delta * (1 - SHARE) * math.exp(loss) + missed * (1 + math.exp(grown))
    return grown * (1 + 2**-50), needed * (1 + 1e-9)
