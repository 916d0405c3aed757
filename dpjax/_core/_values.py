"""The interfaces of dpjax and the values that travel between its parts."""

import dataclasses
import decimal
import enum
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeGuard

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, down, frozen_pytree, static, up
from dpjax._core._types import Database, Key, PyTree, Scalar, Value

__all__ = [
    "Guarantee",
    "Mechanism",
    "Method",
    "NeighboringRelation",
    "NoiseKind",
    "Norm",
    "OperatingPoint",
    "Oracle",
    "Positions",
    "Release",
    "SampledEvent",
    "Scalar",
    "Sensitivity",
    "Target",
    "describe_confidence",
    "guarantee_in",
    "is_mechanism",
    "norm_name",
]

Target = Callable[[Database], Value]
"""A pure JAX function of a database: a pytree of arrays with a common leading axis of n records."""


class Oracle(Protocol):
    """A public model of plausible databases: `oracle(key, n)` draws n exchangeable records.

    The result is a pytree of arrays with leading axis n. All the records of a pair of neighboring
    databases come from one call, so records that share a hidden cause keep sharing it.
    """

    def __call__(self, key: Key, n: int, /) -> Database:
        """Draws a database of n records."""
        ...


Norm = Literal["l1", "l2", "linf", "hamming"] | Callable[[Value], jax.Array]
"""The name of a norm, or a function that takes the difference of two target values, a pytree of
float arrays, to a scalar."""

Positions = Literal["last", "average", "each"]
"""Which record of a pair of databases changes, see `dpjax.sample_sensitivity`."""

Method = Literal["exact", "dkw"]
"""How an operating point is found, see `dpjax.operating_point`."""

NoiseKind = Literal["exact", "float"]
"""Integer noise, or noise in floats, for sweeps where nothing is published."""


class NeighboringRelation(enum.Enum):
    """Which two databases count as neighbors.

    Attributes:
        REPLACE_ONE: both have n records and differ in one of them.
        ADD_OR_REMOVE_ONE: one of them has one record more.

    Formal guarantees:
        A guarantee under one relation says nothing about the other: replacing a record is removing
        one and adding another, at twice the epsilon.
    """

    REPLACE_ONE = "replace-one"
    ADD_OR_REMOVE_ONE = "add-or-remove-one"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """The number of pairs to sample, the order statistic to take, and the promise that follows.

    Attributes:
        m: number of random pairs of neighboring databases.
        k: the order statistic, counted from 1, that becomes the estimate of the sensitivity.
        gamma: the probability over random pairs that may be left uncovered.
        rho: the free parameter of Theorem 15 (method "dkw"), else None.
        method: "exact" or "dkw".
        confidence: the probability over the samples that gamma holds, or None where the statement
            is marginal: over the samples and a fresh pair together.

    Formal guarantees:
        Those of `dpjax.operating_point`, which makes it.
    """

    m: int
    k: int
    gamma: float
    rho: float | None
    method: str
    confidence: float | None

    def __str__(self) -> str:
        rho = "" if self.rho is None else f", rho={self.rho:.4g}"
        return (
            f"m={self.m}, k={self.k}, gamma={_number(self.gamma)}{rho}"
            f" ({self.method}, {describe_confidence(self.confidence)})"
        )


@frozen_pytree
class SampledEvent:
    """The event that one sampled sensitivity covers the pair of databases at hand.

    Attributes:
        gamma: the probability over random pairs that it does not.
        confidence: the probability over the samples that gamma holds; None where marginal.
        identity: which sampling it was; releases under equal identities share the event.

    Formal guarantees:
        Everything that was released under one event fails together, so its gamma counts once.
    """

    gamma: Scalar = up()
    confidence: Scalar | None = down()
    identity: str = static()

    def __post_init__(self) -> None:
        _check_number("gamma", self.gamma, 1)
        if self.confidence is not None:
            _check_number("confidence", self.confidence, 1)

    def __repr__(self) -> str:
        statement = f"gamma={_number(self.gamma)}, {describe_confidence(self.confidence)}"
        return f"SampledEvent({statement}, {self.identity})"


@frozen_pytree
class Guarantee:
    """What a release promises: (epsilon, delta, gamma)-random differential privacy.

    On all pairs of neighboring databases but those of probability gamma under the oracle, every set
    of outputs S satisfies P(M(D) in S) <= exp(epsilon) P(M(D') in S) + delta. At gamma = .05 and
    n = 1000, on average over databases, up to 50 people, typically the outliers, may be less
    protected than epsilon says.

    Attributes:
        epsilon: the bound on the log ratio of probabilities.
        delta: the additive slack.
        gamma: the probability over random pairs that the bound fails; 0 is differential privacy.
        confidence: the probability over the samples that gamma holds; 1 without samples; None where
            gamma is over the samples and the pair together ("marginal", the weaker statement).
        events: the samplings that gamma stands for; empty without samples.
        relation: which databases are neighbors.
        notes: other facts that a reader must know, such as "no noise".
        group_size: in how many records neighboring databases differ.

    Raises:
        TypeError: if a number is not a real number, or another attribute is of another type.
        ValueError: if epsilon is negative or NaN, or delta, gamma or confidence outside [0, 1], or
            group_size below 1. NaN in an array is no error: it marks a bad traced parameter.

    Formal guarantees:
        The statement above, for the mechanism run once. `dpjax.accounting` composes several. Where
        its numbers become float32, as on the way out of `jit`, they are rounded outward: epsilon,
        delta and gamma up, the confidence down. So they are in print, except for a part of 2^-50,
        which sums in float64 add to decimals. Traced numbers, and what `jax.tree.map` or pickles
        make, are not checked here, but wherever dpjax uses a guarantee.
    """

    epsilon: Scalar = up()
    delta: Scalar = up(default=0.0)
    gamma: Scalar = up(default=0.0)
    confidence: Scalar | None = down(default=1.0)
    events: tuple[SampledEvent, ...] = ()
    relation: NeighboringRelation = static(default=NeighboringRelation.REPLACE_ONE)
    notes: tuple[str, ...] = static(default=())
    group_size: int = static(default=1)

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
        if not all(isinstance(event, SampledEvent) for event in self.events):
            raise TypeError(f"events must be SampledEvents, got {_checks.shown(self.events)}")

    def __repr__(self) -> str:
        budget = f"epsilon={_number(self.epsilon)}, delta={_number(self.delta)}"
        if not self.events and _is(self.gamma, 0) and _is(self.confidence, 1):
            statement = f"({budget})-DP"
        else:
            statement = f"({budget}, gamma={_number(self.gamma)})-random DP, " + (
                describe_confidence(self.confidence)
            )
        if self.relation is not NeighboringRelation.REPLACE_ONE:
            statement += f", under {self.relation}"
        if _is(self.epsilon, math.inf):
            statement = "no guarantee"
        group = (f"for groups of {self.group_size}",) if self.group_size > 1 else ()
        return ", ".join((statement, *group, *self.notes))


@frozen_pytree
class Sensitivity:
    """How far the target moves when one record changes: sampled, or a bound from analysis.

    Made by `dpjax.sample_sensitivity` or `dpjax.analytic_sensitivity`, never by hand.

    Attributes:
        value: the estimate, or the bound, in the units of the target's output.
        gamma: the probability over random pairs that the true distance exceeds it.
        confidence: the probability over the samples that gamma holds; None where marginal.
        norm: how distances between outputs were measured.
        n: number of records of a database; None where the bound holds for any.
        relation: which databases are neighbors.
        m: number of pairs sampled; None for a bound.
        k: the order statistic taken; None for a bound.
        method: "exact", "dkw" or "analytic".
        positions: which record of a pair was changed: "last", "average" or "each".
        chunk_size: pairs in a chunk; distances are reproducible for one chunk size and backend.
        zero_allowed: whether the value is 0, hence no noise, as was asked for by name.
        identity: names the sampling (key, target, oracle, norm, operating point); None for a bound.
        target: fingerprint of the traced target; None for a bound.
        records: structure, shapes and dtypes of a database; None for a bound.
        outputs: structure, shapes and dtypes of the target's value; None for a bound.

    Formal guarantees:
        With probability at least `confidence` over the samples, a random pair of neighboring
        databases lies further apart than `value` with probability at most `gamma`; if `confidence`
        is None, with probability at most `gamma` over both. A bound has gamma 0 and confidence 1.
    """

    value: Scalar
    gamma: Scalar = up()
    confidence: Scalar | None = down()
    norm: Norm = static()
    n: int | None = static()
    relation: NeighboringRelation = static(default=NeighboringRelation.REPLACE_ONE)
    m: int | None = static(default=None)
    k: int | None = static(default=None)
    method: str = static(default="analytic")
    positions: Positions = static(default="last")
    chunk_size: int | None = static(default=None)
    zero_allowed: bool = static(default=False)
    identity: str | None = static(default=None)
    target: str | None = static(default=None)
    records: TreeSpec | None = static(default=None)
    outputs: TreeSpec | None = static(default=None)

    def __repr__(self) -> str:
        size = "any n" if self.n is None else f"n={self.n}"
        text = f"Sensitivity({_number(self.value)} in {norm_name(self.norm)}, {size}"
        text += f", {self.relation}; {self.method}"
        if self.m is not None:
            text += f", m={self.m}, k={self.k}, gamma={_number(self.gamma)}"
            text += f", {describe_confidence(self.confidence)}"
        return text + (f", positions={self.positions})" if self.positions != "last" else ")")


@frozen_pytree
class Release:
    """A published value and the guarantee that it was published under; nothing else.

    Attributes:
        value: the noisy value.
        guarantee: of publishing it.

    Formal guarantees:
        Holds neither the database nor the target's exact value, so it may be stored and sent.
    """

    value: Value
    guarantee: Guarantee

    def __repr__(self) -> str:
        return f"Release({self.value!r}, {self.guarantee!r})"


class Mechanism(Protocol):
    """A keyed randomized map from target values to releases, calibrated to a sensitivity.

    A frozen pytree: epsilon, delta and the sensitivity's value are leaves, norm and sizes are
    static, so a mechanism passes through `jit` and `vmap` like an array. Mechanisms that add noise
    also have `error(confidence=...)`, a bound on the distance of a release from the true value.
    """

    @property
    def norm(self) -> Norm:
        """The norm in which the sensitivity must have been measured."""
        ...

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity that the noise is calibrated to."""
        ...

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release."""
        ...

    @property
    def zcdp(self) -> tuple[float, float]:
        """The cost of one release: rho and delta of approximate zCDP."""
        ...

    @property
    def dp_event(self) -> Any:
        """The epsilon-delta part of one release, for the accountants of dp-accounting."""
        ...

    def __call__(self, key: Key, value: Value, /) -> Release:
        """Releases a value of the target; open ledgers pay for it first."""
        ...

    def unpaid_draw(self, key: Key, value: Value, /) -> Value:
        """The value of a release, for code that has paid: no ledger hears of this draw."""
        ...

    def log_prob(self, output: Value, value: Value, /) -> jax.Array:
        """Log density (log probability where outputs are discrete) of a released value."""
        ...

    def clamped(self, value: Value, /) -> Value:
        """The value that is released instead of this one: finite and in range."""
        ...

    def grids(self, value: Value, /) -> PyTree:
        """The spacing of each array of a release, 0 for none; an empty tree states nothing."""
        ...


def is_mechanism(candidate: object) -> TypeGuard[Mechanism]:
    """Whether something has the sensitivity that noise is calibrated to, as mechanisms do."""
    return isinstance(getattr(candidate, "sensitivity", None), Sensitivity)


def guarantee_in(candidate: object) -> Guarantee | None:
    """The guarantee of a mechanism, of a release, or of something else that has one."""
    found = candidate if isinstance(candidate, Guarantee) else getattr(candidate, "guarantee", None)
    return found if isinstance(found, Guarantee) else None


def norm_name(norm: Norm) -> str:
    """A norm's name, for messages."""
    return norm if isinstance(norm, str) else getattr(norm, "__name__", repr(norm))


def describe_confidence(confidence: Scalar | None) -> str:
    """How a confidence is printed; a marginal statement must never read as the stronger one."""
    if confidence is None:
        return "marginal"
    return f"confidence {_number(confidence, decimal.ROUND_FLOOR)}"


def _check_number(name: str, value: Value, most: float) -> None:
    """Refuses a known number outside [0, most]."""
    if isinstance(value, float) and 0 <= value <= most:
        return
    if _checks.is_traced(value) or not getattr(value, "is_fully_addressable", True):
        return
    array = np.asarray(jax.device_get(value) if isinstance(value, jax.Array) else value)
    expected = "a number, 0 or above" if most == math.inf else f"a number from 0 to {most}"
    if not any(jax.numpy.issubdtype(array.dtype, kind) for kind in (np.integer, np.floating)):
        raise TypeError(f"{name} must be {expected}, got {_checks.shown(value)}")
    inside = (array >= 0) & (array <= most)
    if isinstance(value, (jax.Array, np.ndarray)):
        inside |= np.isnan(array)  # The mark of a bad traced parameter.
    if not np.all(inside):
        raise ValueError(f"{name} must be {expected}, got {_number(value)}")


def _number(value: Value, rounding: str = decimal.ROUND_CEILING) -> str:
    if _checks.is_traced(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
        return str(value)
    array = np.asarray(value)
    if array.ndim > 0:
        return np.array2string(array, formatter={"all": lambda x: _digits(x, rounding)})
    return _digits(array[()], rounding)


def _digits(number: Any, rounding: str) -> str:
    """Six digits, rounded outward; all where six would make a certainty of a near-certainty."""
    text, every_digit = f"{number:.6g}", str(number)
    if not np.isfinite(number):
        return text
    exact, short = decimal.Decimal(every_digit), decimal.Decimal(text)
    # Sums of decimals in float64 are a few units in the last place above the decimal.
    is_short = abs(short - exact) <= abs(exact) * decimal.Decimal(2) ** -50
    if short == exact or (is_short and not exact < short == 1):
        return text
    if text in ("0", "1"):
        return every_digit
    return f"{float(decimal.Context(6, rounding).create_decimal(every_digit)):.6g}"


def _is(value: Value, number: float) -> bool:
    return not _checks.is_traced(value) and bool(np.all(np.asarray(value) == number))


def __dir__() -> list[str]:
    return __all__
