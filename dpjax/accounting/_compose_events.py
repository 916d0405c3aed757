"""Several releases of dp-accounting's events at once, every one of them counted."""

import math
from typing import Any, Literal, get_args

from dpjax._core import _checks
from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._left_out_orders import left_out_orders_hidden

# Whose count an accountant of dp-accounting forgets: in PLDAccountant of 0.6.0, and in
# RdpAccountant of what follows it.
_COUNT_FORGOTTEN = ("RandomizedResponseDpEvent", "ExponentialMechanismDpEvent")
# Whose noise multiplier says all, whichever relation their sensitivity is for.
_OF_A_SENSITIVITY = (
    *("GaussianDpEvent", "LaplaceDpEvent", "DiscreteLaplaceDpEvent", "ZCDpEvent"),
    *("NoOpDpEvent", "NonPrivateDpEvent"),
)
_MOST = 10**5
_OUTWARD = 1 + 1e-9


@left_out_orders_hidden()
def compose_events(
    *events: Any,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    method: Literal["pld", "renyi"] = "pld",
) -> Guarantee:
    """What releases promise together, by an accountant of dp-accounting.

    Args:
        *events: events of dp-accounting, as `mechanism.dp_event`, composed ones too.
        delta: of the guarantee, in (0, 1).
        relation: which databases are neighbors. Noise multipliers are relative to the sensitivity
            under it, as those of `mechanism.dp_event` are; but where an event is sampled, or
            randomized response, all of them are relative to the norm of one record's contribution,
            of which a replaced one changes twice as much.
        method: "pld", by privacy loss distributions, or "renyi".

    Returns:
        A `Guarantee` with gamma 0: gamma is in no event, add it by `compose`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if there is no event, or one is none of dp-accounting's.
        ValueError: if a parameter is out of range, an event holds NaN, the accountant does not know
            an event under the relation, or randomized response or the exponential mechanism counts
            beyond 10^5.

    Formal guarantees:
        That of the accountant, with the counts that it forgets: those of randomized response (of
        dp-accounting 0.6) and of the exponential mechanism (of later versions), which are composed
        one by one.

    Source:
        dp-accounting.

    Example:
        >>> import dpjax
        >>> events = [dpjax.gaussian(1.0, 1.0, 1e-6).dp_event] * 3
        >>> dpjax.accounting.compose_events(*events, delta=1e-5)
        (epsilon=1.59808, delta=1e-05)-DP
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    delta = _checks.fraction("delta", delta)
    _checks.choice("method", method, get_args(Literal["pld", "renyi"]))
    relation = NeighboringRelation(relation)
    if not events or not all(isinstance(event, accounting.DpEvent) for event in events):
        raise TypeError(f"events must be those of dp-accounting, got {_checks.shown(events)}")
    for event in events:
        if any(map(math.isnan, _numbers(event))):
            raise ValueError(f"events must not hold NaN, which accountants take for 0, got {event}")
    kinds = {"pld": accounting.pld.PLDAccountant, "renyi": accounting.rdp.RdpAccountant}
    relations = accounting.NeighboringRelation
    plain = all(name in _OF_A_SENSITIVITY for event in events for name in _names(accounting, event))
    replaced = relation is NeighboringRelation.REPLACE_ONE and not plain
    accountant = kinds[method](
        neighboring_relation=relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
    )
    for event in events:
        if replaced and method == "renyi":
            event = _of_two_contributions(accounting, event)
        try:
            add_event(accounting, accountant, event, 1)
        except accounting.UnsupportedEventError as error:
            raise ValueError(f"{event} is not known to {method} under {relation}") from error
    if method == "renyi" and min(accountant.rdp) < 0:
        raise ValueError('events must not have divergences lost in rounding: use method="pld"')
    return Guarantee(accountant.get_epsilon(delta) * _OUTWARD, delta, relation=relation)


def _numbers(event: Any) -> list[float]:
    """All numbers in an event and in those that it is made of."""
    if isinstance(event, (list, tuple)):
        return [number for one in event for number in _numbers(one)]
    if isinstance(event, (int, float)):
        return [float(event)]
    fields = getattr(event, "__attrs_attrs__", ())
    return _numbers([getattr(event, field.name) for field in fields])


def _names(accounting: Any, event: Any) -> set[str]:
    """The kinds of all events that are composed."""
    if isinstance(event, accounting.SelfComposedDpEvent):
        return _names(accounting, event.event)
    if isinstance(event, accounting.ComposedDpEvent):
        return set().union(*(_names(accounting, one) for one in event.events))
    return {type(event).__name__}


def _of_two_contributions(accounting: Any, event: Any) -> Any:
    """An event with half of the noise multipliers, which is what PLDAccountant takes them for.

    RdpAccountant takes the same ones as relative to what a replaced record changes.
    """
    if isinstance(event, accounting.ComposedDpEvent):
        halved = [_of_two_contributions(accounting, one) for one in event.events]
        return accounting.ComposedDpEvent(halved)
    fields = {x.name: getattr(event, x.name) for x in getattr(event, "__attrs_attrs__", ())}
    if "event" in fields:
        fields["event"] = _of_two_contributions(accounting, event.event)
    elif "noise_multiplier" in fields:
        fields["noise_multiplier"] = event.noise_multiplier / 2
    return type(event)(**fields)


def add_event(accounting: Any, accountant: Any, event: Any, count: int) -> None:
    """Composes an event a number of times, one by one where the count would be forgotten."""
    if isinstance(event, accounting.SelfComposedDpEvent):
        add_event(accounting, accountant, event.event, event.count * count)
    elif isinstance(event, accounting.ComposedDpEvent):
        for one in event.events:
            add_event(accounting, accountant, one, count)
    elif type(event).__name__ in _COUNT_FORGOTTEN:
        if count > _MOST:
            raise ValueError(f"count of {event} must be at most {_MOST}, got {count}")
        for _ in range(count):
            accountant.compose(event)
    else:
        accountant.compose(event, count)
