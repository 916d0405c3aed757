"""`compose_events`: composition of `DpEvent`s by the accountants of dp-accounting."""

import contextlib
import logging
import math
import threading
from collections.abc import Generator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD, check_privacy_unit
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._values import Guarantee, NeighboringRelation

if TYPE_CHECKING:
    from dp_accounting import DpEvent

AccountingMethod = Literal["pld", "renyi"]


@contextlib.contextmanager
def left_out_orders_hidden() -> Generator[None]:
    """Hides the warning of dp-accounting that it omits a Renyi order, in this thread only.

    dp-accounting omits an order if its series does not converge for this order. The remaining
    orders still give a valid bound on epsilon, so users need not act. Other messages, and messages
    of other threads, are not hidden.
    """
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or "Excluding this order" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


# Events for which dp-accounting ignores how often they are repeated: PLDAccountant does so in
# version 0.6.0, and RdpAccountant in later versions.
_COUNT_FORGOTTEN = ("RandomizedResponseDpEvent", "ExponentialMechanismDpEvent")
# Events whose noise multiplier is relative to the sensitivity, and so means the same under
# add-or-remove-one and under replace-one.
_OF_A_SENSITIVITY = (
    *("GaussianDpEvent", "LaplaceDpEvent", "DiscreteLaplaceDpEvent", "ZCDpEvent"),
    *("NoOpDpEvent", "NonPrivateDpEvent"),
)
_MOST = 10**5
_OUTWARD = 1 + 1e-9


@left_out_orders_hidden()
def compose_events(
    *events: "DpEvent",
    delta: float,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
    method: AccountingMethod = "pld",
) -> Guarantee:
    """Composes events by an accountant of the package dp-accounting.

    Args:
        *events: events of dp-accounting, such as `mechanism.dp_event`, including composed ones.
        delta: the delta of the guarantee, in (0, 1).
        relation: which databases are neighbors. None takes the relation of an open ledger, or
            replace-one if no ledger is open. Noise multipliers are relative to the sensitivity
            under this relation, as in `mechanism.dp_event`. But if any event is sampled or is
            randomized response, all multipliers are relative to the norm of one record's
            contribution. Then replacing a record changes the sum by up to twice this norm.
        privacy_unit: the unit of data in which neighbors differ, as in `Guarantee`. Events do not
            state their unit, so you must make sure that all events are for this unit.
        method: "pld", by privacy loss distributions, or "renyi".

    Returns:
        A `Guarantee` with gamma 0, because events have no gamma. Add a gamma by `compose`.

    Raises:
        ModuleNotFoundError: if dp-accounting, of the extra `accounting`, is not installed.
        TypeError: if no event is given, or an argument is not an event of dp-accounting.
        ValueError: if a parameter is out of range, an event contains NaN, a Renyi divergence is
            negative because of rounding, the accountant does not support an event under the
            relation, or randomized response or the exponential mechanism is repeated more than 10^5
            times.

    Formal guarantees:
        As for the accountant of dp-accounting. Some accountants ignore how often an event is
        repeated: for randomized response in version 0.6, and for the exponential mechanism in later
        versions. dpjax composes these events one by one.

    Source:
        dp-accounting.

    Example:
        >>> import dpjax
        >>> events = [dpjax.gaussian(1.0, 1.0, 1e-6).dp_event] * 3
        >>> dpjax.accounting.compose_events(*events, delta=1e-5)
        (epsilon=1.59808, delta=1e-05)-DP, under replace-one
    """
    accounting = _checks.extra("dp_accounting", "accounting")
    delta = _checks.fraction("delta", delta)
    _checks.choice("method", method, get_args(AccountingMethod))
    check_privacy_unit(privacy_unit)
    relation = relation_or_inherited(relation)
    if not events or not all(isinstance(event, accounting.DpEvent) for event in events):
        raise TypeError(f"events must be dp_accounting.DpEvents, got {_checks.shown(events)}")
    for event in events:
        if any(map(math.isnan, _numbers(event))):
            raise ValueError(f"events must not contain NaN, got {event}")
    composed = [part for event in events for part in _composed(accounting, event)]
    plain = all(type(event).__name__ in _OF_A_SENSITIVITY for event, _ in composed)
    replaced = relation is NeighboringRelation.REPLACE_ONE and not plain
    kinds = {"pld": accounting.pld.PLDAccountant, "renyi": accounting.rdp.RdpAccountant}
    relations = accounting.NeighboringRelation
    accountant = kinds[method](
        neighboring_relation=relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
    )
    for event, count in composed:
        if replaced and method == "renyi":
            event = _of_two_contributions(accounting, event)
        try:
            compose_times(accountant, event, count)
        except accounting.UnsupportedEventError as error:
            raise ValueError(
                f'method="{method}" does not support the event {event} under {relation}'
            ) from error
    if method == "renyi" and min(accountant.rdp) < 0:
        raise ValueError(
            "events must have Renyi divergences that float64 can represent, got a divergence "
            'that is too small: use method="pld"'
        )
    epsilon = accountant.get_epsilon(delta) * _OUTWARD
    return Guarantee(epsilon, delta, relation=relation, privacy_unit=privacy_unit)


def compose_times(accountant: Any, event: Any, count: int) -> None:
    """Composes an event `count` times, by a loop if the accountant would ignore `count`."""
    if type(event).__name__ not in _COUNT_FORGOTTEN:
        accountant.compose(event, count)
        return
    if count > _MOST:
        raise ValueError(f"{event} must be repeated at most {_MOST} times, got {count} times")
    for _ in range(count):
        accountant.compose(event)


def _fields(event: object) -> dict[str, object]:
    """Returns the fields of an event by name. Events of dp-accounting are attrs classes."""
    return {x.name: getattr(event, x.name) for x in getattr(event, "__attrs_attrs__", ())}


def _numbers(part: object) -> list[float]:
    """Returns all numbers in an event, including those of nested events."""
    if isinstance(part, (int, float)):
        return [float(part)]
    parts: Any = part if isinstance(part, (list, tuple)) else _fields(part).values()
    return [number for one in parts for number in _numbers(one)]


def _composed(accounting: ModuleType, event: Any, count: int = 1) -> Iterator[tuple[Any, int]]:
    """Splits a composed event into simple events, each with the number of its repetitions."""
    if isinstance(event, accounting.SelfComposedDpEvent):
        yield from _composed(accounting, event.event, event.count * count)
    elif isinstance(event, accounting.ComposedDpEvent):
        for one in event.events:
            yield from _composed(accounting, one, count)
    else:
        yield event, count


def _of_two_contributions(accounting: ModuleType, event: Any) -> Any:
    """Returns an event with halved noise multipliers, for RdpAccountant under replace-one.

    Under replace-one, PLDAccountant expects noise multipliers relative to the contribution of one
    record. RdpAccountant expects noise multipliers relative to the change when a record is
    replaced, which may be twice as large.
    """
    if isinstance(event, accounting.ComposedDpEvent):
        halved = [_of_two_contributions(accounting, one) for one in event.events]
        return accounting.ComposedDpEvent(halved)
    fields = _fields(event)
    if "event" in fields:
        fields["event"] = _of_two_contributions(accounting, event.event)
    elif "noise_multiplier" in fields:
        fields["noise_multiplier"] = event.noise_multiplier / 2
    return type(event)(**fields)
