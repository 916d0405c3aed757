"""`Guarantee` and its parts: checks of their numbers, outward rounding, and printing."""

import dataclasses
import decimal
import enum
import math
from typing import Any

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import down, frozen_pytree, static, up
from dpjax._core._types import Scalar, Value


class NeighboringRelation(enum.Enum):
    """Which two databases count as neighbors.

    Attributes:
        REPLACE_ONE: both databases have n records, and differ in one record.
        ADD_OR_REMOVE_ONE: one of the databases has one record more. Both have the same public
            number of slots, and differ in whether one slot contains a record.

    Formal guarantees:
        To replace a record is to remove one and add another. So a guarantee under add-or-remove-one
        implies a guarantee under replace-one with about twice the epsilon. The converse is false,
        because under replace-one the number of records is public.
    """

    REPLACE_ONE = "replace-one"
    ADD_OR_REMOVE_ONE = "add-or-remove-one"

    def __str__(self) -> str:
        return self.value


RECORD = "record"  # The default privacy unit.
NUMBERS = ("epsilon", "delta", "gamma", "confidence")  # Fields of a guarantee.


def check_privacy_unit(unit: object) -> None:
    """Refuses a privacy unit that is not a nonempty string."""
    if not isinstance(unit, str):
        raise TypeError(f"privacy_unit must be a string, got {_checks.shown(unit)}")
    if not unit.strip():
        raise ValueError(
            f'privacy_unit must name what a guarantee protects, such as "record", got {unit!r}'
        )


def per_unit(unit: str) -> str:
    """Returns the text that is printed after a relation to state the privacy unit.

    It is empty for the default unit, a record.
    """
    return "" if unit == RECORD else f", per {unit}"


class _ComparedByFields:
    """Values of a class are equal if their fields state the same numbers."""

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        compared = _compared(self)
        return compared is not None and compared == _compared(other)

    def __hash__(self) -> int:
        return hash(_compared(self) or id(self))


@frozen_pytree
class SampledEvent(_ComparedByFields):
    """The event that a sampled sensitivity covers a random pair of databases.

    Attributes:
        gamma: the probability that a random pair is not covered.
        confidence: the probability over the samples that the statement about gamma is true; None
            if the statement is marginal.
        identity: a hash of the sampling. Releases with the same identity share the event.
        records: the number of independently drawn records that determine whether a pair is covered;
            None if all records of the pair may matter.

    Formal guarantees:
        The guarantees of all releases that share an event fail on the same pairs, so gamma counts
        only once.
    """

    gamma: Scalar = up()
    confidence: Scalar | None = down()
    identity: str = static()
    records: int | None = static(default=None)

    def __post_init__(self) -> None:
        _check_number("gamma", self.gamma, 1)
        if self.confidence is not None:
            _check_number("confidence", self.confidence, 1)
        if self.records is not None:
            _checks.integer("records", self.records, least=1)

    def __repr__(self) -> str:
        statement = f"gamma={shown_number(self.gamma)}, {describe_confidence(self.confidence)}"
        return f"SampledEvent({statement}, {self.identity})"


@frozen_pytree
class Guarantee(_ComparedByFields):
    """The guarantee of a release: (epsilon, delta, gamma)-random differential privacy.

    Except with probability gamma over a random pair of neighboring databases from the oracle, every
    set of outputs S satisfies P(M(D) in S) <= exp(epsilon) P(M(D') in S) + delta. At gamma = .05
    and n = 1000, on average over databases, up to 50 people, typically the outliers, may be less
    protected than epsilon says.

    Attributes:
        epsilon: the bound on the log ratio of probabilities.
        delta: the additive slack.
        gamma: the probability that the bound fails on a random pair; 0 is differential privacy.
        confidence: the probability over the samples that the statement about gamma is true; 1 if
            nothing was sampled; None if gamma is a probability over samples and pair together
            ("marginal", the weaker statement).
        events: the samplings whose gammas add up to gamma; empty if nothing was sampled.
        relation: which databases are neighbors.
        notes: other facts that a reader must know, such as "no noise".
        group_size: the number of records in which neighboring databases differ.
        replacing: four numbers, under add-or-remove-one: the epsilon and delta of the same release
            under replace-one, followed by the epsilon and delta under add-or-remove-one for which
            they were computed. None if only (2 epsilon, (1 + e^epsilon) delta) is known.
        privacy_unit: whose data neighboring databases differ in: "record" means one row, and
            "person (id)" means all rows with one value of the column `id`. Guarantees with
            different units do not compose.

    Raises:
        TypeError: if a number is not a real number, or another attribute is of another type.
        ValueError: if epsilon is negative or NaN, or delta, gamma or confidence outside [0, 1], or
            group_size below 1, or the privacy unit an empty string. NaN in an array is allowed: it
            marks a bad traced parameter.

    Formal guarantees:
        The statement above is about one run of the mechanism. `dpjax.accounting` composes the
        guarantees of several runs. When `jit` returns a guarantee, its numbers become float32.
        This conversion rounds outward: epsilon, delta and gamma up, and the confidence down.
        Printed numbers are rounded outward, too, except that a relative difference of 2^-50, the
        rounding error of float64 sums, is ignored. Traced numbers, and guarantees made by
        `jax.tree.map` or pickle, are not checked here, but later, when dpjax uses them.

        Two guarantees are equal if all fields are equal. A guarantee with tracers, or with several
        numbers in a field, is equal only to itself.
    """

    epsilon: Scalar = up()
    delta: Scalar = up(default=0.0)
    gamma: Scalar = up(default=0.0)
    confidence: Scalar | None = down(default=1.0)
    events: tuple[SampledEvent, ...] = ()
    relation: NeighboringRelation = static(default=NeighboringRelation.REPLACE_ONE)
    notes: tuple[str, ...] = static(default=())
    group_size: int = static(default=1)
    replacing: tuple[float, float, float, float] | None = static(default=None)
    privacy_unit: str = static(default=RECORD)

    def __post_init__(self) -> None:
        _check_number("epsilon", self.epsilon, math.inf)
        _check_number("delta", self.delta, 1)
        _check_number("gamma", self.gamma, 1)
        if self.confidence is not None:
            _check_number("confidence", self.confidence, 1)
        _checks.integer("group_size", self.group_size, least=1)
        if not isinstance(self.relation, NeighboringRelation):
            raise TypeError(
                f"relation must be a NeighboringRelation, got {_checks.shown(self.relation)}"
            )
        check_privacy_unit(self.privacy_unit)
        for number in self.replacing or ():
            _check_number("replacing", number, math.inf)
        if not all(isinstance(event, SampledEvent) for event in self.events):
            raise TypeError(
                f"events must be a tuple of SampledEvents, got {_checks.shown(self.events)}"
            )

    @property
    def neighbors(self) -> str:
        """The relation in words, with the privacy unit unless it is a record."""
        return f"{self.relation}{per_unit(self.privacy_unit)}"

    def __repr__(self) -> str:
        budget = f"epsilon={shown_number(self.epsilon)}, delta={shown_number(self.delta)}"
        if not self.events and _is(self.gamma, 0) and _is(self.confidence, 1):
            statement = f"({budget})-DP"
        else:
            statement = f"({budget}, gamma={shown_number(self.gamma)})-random DP, " + (
                describe_confidence(self.confidence)
            )
        statement += f", under {self.neighbors}"
        if _is(self.epsilon, math.inf):
            statement = "no guarantee"
        group = (f"for groups of {self.group_size}",) if self.group_size > 1 else ()
        return ", ".join((statement, *group, *self.notes))


def _compared(value: Any) -> tuple[object, ...] | None:
    """Returns the fields of a value as a tuple, with arrays of one number as floats.

    The result is None if a field is traced, has several numbers, or is not on this host.
    """
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for i, field in enumerate(fields):
        if isinstance(field, (np.ndarray, np.generic, jax.Array)):
            if _checks.is_traced(field) or field.ndim > 0 or not _is_here(field):
                return None
            fields[i] = float(field.item())
    return tuple(fields)


def _is_here(array: Any) -> bool:
    return getattr(array, "is_fully_addressable", True)


def concrete(guarantee: object) -> Guarantee:
    """Returns a copy of a guarantee whose numbers are Python floats.

    It raises an error for other objects, and for numbers that are traced, batched or NaN.
    """
    if not isinstance(guarantee, Guarantee):
        raise TypeError(f"guarantee must be a Guarantee, got {_checks.shown(guarantee)}")

    def number(name: str, value: Scalar | None) -> Any:
        if value is None:
            return None  # Only `confidence` may be None: the statement is then marginal.
        if _checks.is_traced(value):
            raise TypeError(
                f"guarantee.{name} must be a concrete number, because accounting runs on the "
                "host, got a traced value: call it outside of jit and vmap"
            )
        if np.ndim(value) > 0:
            raise ValueError(f"guarantee.{name} must be one number, got shape {np.shape(value)}")
        if math.isnan(value):
            raise ValueError(
                f"guarantee.{name} must not be NaN. NaN means that a traced parameter was out of "
                "range: check the mechanism's parameters"
            )
        return float(value)

    # The guarantee is rebuilt from its fields, so that its constructor checks them: a subclass, or
    # an unflattened guarantee, may have skipped the checks.
    events = tuple(
        SampledEvent(
            number("gamma", x.gamma), number("confidence", x.confidence), x.identity, x.records
        )
        for x in guarantee.events
    )
    fields = {field.name: getattr(guarantee, field.name) for field in dataclasses.fields(Guarantee)}
    numbers = {name: number(name, fields[name]) for name in NUMBERS}
    return Guarantee(**{**fields, **numbers, "events": events})


def describe_confidence(confidence: Scalar | None) -> str:
    """Returns the text of a confidence over the samples.

    "marginal" says that gamma is a probability over the samples and a fresh pair together.
    """
    if confidence is None:
        return "marginal"
    return f"confidence {shown_number(confidence, decimal.ROUND_FLOOR)}"


def _check_number(name: str, value: Value, most: float) -> None:
    """Refuses a number outside [0, most], except a traced number or one on another host."""
    if isinstance(value, float) and 0 <= value <= most:
        return
    if _checks.is_traced(value) or not _is_here(value):
        return
    array = np.asarray(jax.device_get(value) if isinstance(value, jax.Array) else value)
    expected = "a number, 0 or above" if most == math.inf else f"a number from 0 to {most}"
    if not any(jax.numpy.issubdtype(array.dtype, kind) for kind in (np.integer, np.floating)):
        raise TypeError(f"{name} must be {expected}, got {_checks.shown(value)}")
    inside = (array >= 0) & (array <= most)
    if isinstance(value, (jax.Array, np.ndarray)):
        inside |= np.isnan(array)  # NaN marks a bad traced parameter.
    if not np.all(inside):
        raise ValueError(f"{name} must be {expected}, got {shown_number(value)}")


def shown_number(value: Value, rounding: str = decimal.ROUND_CEILING) -> str:
    """Returns a number as text, rounded outward to six digits.

    If six digits would show 0 or 1 for a number that is neither 0 nor 1, all digits are shown.
    """
    if _checks.is_traced(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
        return str(value)
    array = np.asarray(value)
    if array.ndim > 0:
        return np.array2string(array, formatter={"all": lambda x: shown_number(x, rounding)})
    number: Any = array[()]
    text, every_digit = f"{number:.6g}", str(number)
    if not np.isfinite(number):
        return text
    exact, short = decimal.Decimal(every_digit), decimal.Decimal(text)
    # A float64 sum of decimals may exceed the true sum by a few units in the last place. This error
    # is ignored here.
    is_short = abs(short - exact) <= abs(exact) * decimal.Decimal(2) ** -50
    if short == exact or (is_short and not exact < short == 1):
        return text
    if text in ("0", "1"):
        return every_digit
    return f"{float(decimal.Context(6, rounding).create_decimal(every_digit)):.6g}"


def _is(value: Value, number: float) -> bool:
    return not _checks.is_traced(value) and bool(np.all(np.asarray(value) == number))
