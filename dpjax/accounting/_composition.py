"""What several releases promise together: host arithmetic in float64, rounded outward.

docs/proofs/sampled-sensitivity.md has the proofs.
"""

import hashlib
import math
import uuid
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from dpjax._core import _checks
from dpjax._core._values import Guarantee, Release, SampledEvent
from dpjax._exact._numerics import round_up, sum_up


def compose(*guarantees: Guarantee) -> Guarantee:
    """What several releases on one database promise together.

    Valid only for targets, sizes, norms and oracles that were fixed without the private data and
    without earlier releases of it: after a release the database is no longer a draw from the
    oracle, and choosing the second target by the first answer can make its pairs exceed the
    estimate with probability .75 where gamma said .057.

    epsilon and delta add. Each sampled sensitivity counts once, however many releases used it:
    gamma and 1 - confidence add over distinct samplings. If any of them is marginal, so is the
    result, and a (gamma, C) counts as marginal gamma + 1 - C. Where a guarantee and its samplings
    disagree, because one was changed by hand, the worse counts.

    Args:
        *guarantees: of the releases.

    Returns:
        A `Guarantee` in float64, every sum rounded up.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if there is none, if one is a batch or NaN, or if their neighboring relations or
            group sizes differ.

    Formal guarantees:
        (sum epsilon, sum delta, sum gamma)-random DP for the joint release, under the restriction
        above. gamma and delta are capped at 1, confidence at 0.

    Source:
        Dwork and Roth (2014), Theorem 3.16, and a union bound over the samplings.

    Example:
        >>> import dpjax
        >>> one = dpjax.laplace(0.01, epsilon=0.5).guarantee
        >>> dpjax.accounting.compose(one, one)
        (epsilon=1, delta=0)-DP
    """
    if not guarantees:
        raise ValueError("guarantees must hold at least one, got none")
    known = [concrete(guarantee) for guarantee in guarantees]
    relations = {guarantee.relation for guarantee in known}
    if len(relations) > 1:
        raise ValueError(
            f"guarantees must share a neighboring relation, got {sorted(map(str, relations))}"
        )
    sizes = {guarantee.group_size for guarantee in known}
    if len(sizes) > 1:
        raise ValueError(f"guarantees must be for groups of one size, got {sorted(sizes)}")
    events = _distinct_events(known)
    gamma, confidence = _joint(events)
    return Guarantee(
        sum_up(guarantee.epsilon for guarantee in known),
        min(1.0, sum_up(guarantee.delta for guarantee in known)),
        gamma,
        confidence,
        events,
        known[0].relation,
        tuple(dict.fromkeys(note for guarantee in known for note in guarantee.notes)),
        known[0].group_size,
    )


def group(guarantee: Guarantee, size: int) -> Guarantee:
    """What a guarantee promises to a group of t people.

    t * epsilon, t * gamma, and delta (e^(t epsilon) - 1) / (e^epsilon - 1), by walking from D to D'
    one record at a time.

    Args:
        guarantee: for one person.
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
        (epsilon=1.5, delta=0)-DP, for groups of 3
    """
    one = concrete(guarantee)
    size = _checks.integer("size", size, least=1, most=10**9)
    events = tuple(
        SampledEvent(min(1.0, _times(event.gamma, size)), event.confidence, event.identity)
        for event in _distinct_events([one])
    )
    gamma, confidence = _joint(events)
    epsilon, delta = _times(one.epsilon, size), _group_delta(one, size)
    people = size * one.group_size
    return Guarantee(epsilon, delta, gamma, confidence, events, one.relation, one.notes, people)


def transfer(guarantee: Guarantee, *, kl: float, n: int) -> Guarantee:
    """What a guarantee under the oracle P promises when records really come from Q.

    gamma grows by sqrt((n + 1) tau / 2), Pinsker's bound on the total variation between the n + 1
    records of a pair under P and under Q; for groups of t by sqrt((n + t) tau / 2).

    Args:
        guarantee: under P, for databases of n records.
        kl: tau, an upper bound on KL(P || Q) for one record, 0 or above.
        n: number of records, at least 1.

    Returns:
        A `Guarantee` under Q, gamma capped at 1 and rounded up.

    Raises:
        TypeError: if the guarantee is not concrete or a parameter is not a number.
        ValueError: if tau is negative or n below 1.

    Formal guarantees:
        Assumes i.i.d. records. Applies once to everything that the guarantee covers: compose
        first, transfer last. A guarantee with gamma 0 holds under any Q and stays as it is.

    Source:
        Rubinstein and Aldà (2017), Proposition 8.

    Example:
        >>> import dpjax
        >>> sampled = dpjax.Guarantee(1.0, gamma=0.05, confidence=0.99)
        >>> dpjax.accounting.transfer(sampled, kl=1e-6, n=999)
        (epsilon=1, delta=0, gamma=0.0723607)-random DP, confidence 0.99
    """
    under_p = concrete(guarantee)
    tau = _checks.non_negative("kl", kl)
    n = _checks.integer("n", n, least=1)
    events = _distinct_events([under_p])
    if not events:
        return under_p
    shift = math.nextafter(math.sqrt((n + under_p.group_size) * tau / 2), math.inf) if tau else 0.0
    gamma, confidence = _joint(events)
    moved = min(1.0, sum_up((gamma, shift)))
    name = "|".join((*sorted(event.identity for event in events), repr((tau, n))))
    identity = hashlib.sha256(name.encode()).hexdigest()[:32]
    event = SampledEvent(moved, confidence, identity)
    return Guarantee(
        under_p.epsilon,
        under_p.delta,
        moved,
        confidence,
        (event,),
        under_p.relation,
        under_p.notes,
        under_p.group_size,
    )


def post_process(release: Release, function: Callable[[Any], Any]) -> Release:
    """What a function makes of a release, under the same guarantee.

    Args:
        release: of a mechanism.
        function: of its value, and of public things; not of the private database.

    Returns:
        A `Release`.

    Raises:
        TypeError: if the release is none, or the function not a function.

    Formal guarantees:
        Those of the release: nothing that is computed from a release alone loses privacy. That the
        function knows nothing else that is private is yours to keep.

    Source:
        Dwork and Roth (2014), Proposition 2.1.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> counts = dpjax.laplace(1.0, 1.0)(dpjax.random.seeded_key(0), jnp.array([3, 0, 5]))
        >>> positive = dpjax.accounting.post_process(counts, lambda x: jnp.maximum(x, 0))
        >>> positive.guarantee
        (epsilon=1, delta=0)-DP, seeded key
    """
    if not isinstance(release, Release):
        raise TypeError(f"release must be a Release, got {_checks.shown(release)}")
    return Release(_checks.function("function", function)(release.value), release.guarantee)


def concrete(guarantee: Any) -> Guarantee:
    """The same guarantee with Python numbers for leaves."""
    if not isinstance(guarantee, Guarantee):
        raise TypeError(f"guarantee must be a Guarantee, got {_checks.shown(guarantee)}")

    def number(name: str, value: Any) -> Any:
        if _checks.is_traced(value):
            raise TypeError(f"guarantee.{name} is traced, but accounting runs on the host")
        if np.ndim(value) > 0:
            raise ValueError(f"guarantee.{name} must be one number, got shape {np.shape(value)}")
        if value is not None and math.isnan(value):
            raise ValueError(f"guarantee.{name} is NaN: a traced parameter was out of range")
        return value if value is None else float(value)

    events = tuple(
        SampledEvent(
            number("gamma", event.gamma), number("confidence", event.confidence), event.identity
        )
        for event in guarantee.events
    )
    return Guarantee(
        number("epsilon", guarantee.epsilon),
        number("delta", guarantee.delta),
        number("gamma", guarantee.gamma),
        number("confidence", guarantee.confidence),
        events,
        guarantee.relation,
        guarantee.notes,
        guarantee.group_size,
    )


def _distinct_events(guarantees: list[Guarantee]) -> tuple[SampledEvent, ...]:
    """The samplings behind some guarantees, each once; one that is written by hand is its own."""
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
    """The events of a guarantee, the first as bad as it takes where gamma was changed by hand."""
    first, *others = guarantee.events
    gamma, confidence = _joint(guarantee.events)
    if guarantee.confidence is None and confidence is not None:
        first = _as_marginal(first)
        gamma, confidence = _joint((first, *others))
    stated, doubt, known_doubt = Fraction(float(guarantee.gamma)), Fraction(0), Fraction(0)
    if guarantee.confidence is not None:
        doubt = 1 - Fraction(float(guarantee.confidence))
    if confidence is None:  # Then doubt counts as gamma.
        stated, doubt = stated + doubt, known_doubt
    else:
        known_doubt = 1 - Fraction(confidence)
    raised = Fraction(float(first.gamma)) + max(Fraction(0), stated - Fraction(gamma))
    lowered = first.confidence
    if lowered is not None:
        more = max(Fraction(0), doubt - known_doubt)
        lowered = max(0.0, -round_up(more - Fraction(float(lowered))))
    return (SampledEvent(min(1.0, round_up(raised)), lowered, first.identity), *others)


def _worse(event: SampledEvent, other: SampledEvent) -> SampledEvent:
    """Two statements about one sampling, as the weaker of both."""
    if event.confidence is None or other.confidence is None:
        event, other = _as_marginal(event), _as_marginal(other)
        confidence = None
    else:
        confidence = min(event.confidence, other.confidence)
    return SampledEvent(max(event.gamma, other.gamma), confidence, event.identity)


def _as_marginal(event: SampledEvent) -> SampledEvent:
    """The same event over the samples and a pair together: doubt counts as gamma."""
    if event.confidence is None:
        return event
    gamma = Fraction(float(event.gamma)) + 1 - Fraction(float(event.confidence))
    return SampledEvent(min(1.0, round_up(gamma)), None, event.identity)


def _joint(events: tuple[SampledEvent, ...]) -> tuple[float, float | None]:
    """Gamma and confidence of several events at once."""
    gamma = sum((Fraction(float(event.gamma)) for event in events), Fraction(0))
    confidences = [float(event.confidence) for event in events if event.confidence is not None]
    doubt = sum((1 - Fraction(confidence) for confidence in confidences), Fraction(0))
    if len(confidences) < len(events):
        return min(1.0, round_up(gamma + doubt)), None
    return min(1.0, round_up(gamma)), max(0.0, -round_up(doubt - 1))


def _times(value: Any, factor: int) -> float:
    if not math.isfinite(value) or abs(float(value)) > 1e300:
        return float(value) * factor  # Nothing is promised under an infinite epsilon.
    return round_up(Fraction(float(value)) * factor)


def _group_delta(guarantee: Guarantee, size: int) -> float:
    epsilon, delta = float(guarantee.epsilon), float(guarantee.delta)
    if delta == 0 or size == 1:
        return delta
    if size * epsilon > 700:
        return 1.0
    steps = math.expm1(size * epsilon) / math.expm1(epsilon) if epsilon > 0 else size
    return min(1.0, delta * steps * (1 + 1e-12))
