"""A question to a table: the rows that a statistic counts, their groups, its public name, its cost.

The cost is given as epsilon, as a fraction of a budget, or as an error.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._labels import Axis, Labels
from dpjax._core._records import PaddedRecords
from dpjax._core._types import PyTree
from dpjax._core._values import NeighboringRelation, Release
from dpjax._exact._numerics import bisect
from dpjax._files._ledger_file import EPSILON_DIGITS
from dpjax._tracing._fingerprints import digest
from dpjax.accounting._ledger import FINGERPRINT
from dpjax.accounting._prices import float_down
from dpjax.mechanisms._additive import AdditiveMechanism, discrete_laplace, gaussian, laplace
from dpjax.queries._groups import By, by
from dpjax.queries._people import Contribution, RowsOfPeople
from dpjax.queries._query import IntegerQuery, Query
from dpjax.random._noise import GAUSSIAN
from dpjax.tables._distinct import DistinctCount
from dpjax.tables._frame import Column, numpy_of
from dpjax.tables._groups import Cells

AnyQuery: TypeAlias = Query | IntegerQuery | DistinctCount

PARTS = 4  # If bounds or keys are not given, epsilon / PARTS is spent on finding them.
_CONFIDENCE = 0.95
# If an error is given, the epsilon that reaches it is rounded up to this many digits.
_DIGITS = 4
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-4, 100.0


class Price(NamedTuple):
    """The epsilon and the delta of a release. If delta is None, the noise is Laplace noise."""

    epsilon: float
    delta: float | None


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a statistic, given by an epsilon or by an error; made by `cost_of`.

    Attributes:
        epsilon: the epsilon of the release; None if an error is given instead.
        error: the largest half-width of the 95% interval of each number.
        delta: the delta of the release; None means that the release takes the same fraction of the
            budget's delta as of its epsilon.
        budget: the budget of the ledger that pays; (0, 0) without a ledger.
        relation: the relation of the table.
    """

    epsilon: float | None
    error: float | None
    delta: float | None
    budget: tuple[Decimal, Decimal]
    relation: NeighboringRelation

    def price(self) -> Price:
        """Returns epsilon and delta of the release. The cost must be given by an epsilon."""
        assert self.epsilon is not None
        return self._at(self.epsilon)

    def with_delta(self, purpose: str) -> tuple[float, float]:
        """Returns epsilon and delta of the release. Refuses a cost without a delta."""
        epsilon, delta = self.price()
        if delta is None:
            raise ValueError(
                f"delta must be above 0 {purpose}: give a delta, or a ledger with a delta"
            )
        return epsilon, delta

    def split(self, parts: int, payments: int = 1) -> tuple[float, "Cost"]:
        """Returns p = epsilon / `parts`, and a `Cost` with the rest, epsilon - `payments` * p.

        A ledger rounds each payment up to `EPSILON_DIGITS` decimal digits. So p is rounded down to
        these digits. Then all payments together do not exceed one payment of the whole epsilon.
        """
        assert self.epsilon is not None
        whole, unit = Fraction(repr(self.epsilon)), Fraction(1, 10**EPSILON_DIGITS)
        part = math.floor(whole / parts / unit) * unit
        rest = float_down(whole - payments * part)
        return float_down(part), dataclasses.replace(self, epsilon=rest)

    def to_find(self, columns: int) -> tuple["Cost", "Cost"]:
        """Returns the cost of finding the cells of one column, and a `Cost` with the rest.

        All the columns together cost 1 / `PARTS` of epsilon, and of delta if it is given.
        """
        each, rest = self.split(PARTS * columns, payments=columns)
        found = dataclasses.replace(self, epsilon=each)
        if self.delta is None:
            return found, rest
        whole = Fraction(repr(float(_checks.fraction("delta", self.delta))))
        part = float_down(whole / (PARTS * columns))
        left = float_down(whole - columns * Fraction(repr(part)))
        return dataclasses.replace(found, delta=part), dataclasses.replace(rest, delta=left)

    def cheapest(self, query: AnyQuery) -> AdditiveMechanism:
        """Returns the mechanism with the least noise at the given epsilon.

        If an error is given instead, epsilon is the smallest one that reaches this error.
        """
        if self.error is None:
            return self._smaller(query, self.price())
        error = _checks.positive("error", self.error)

        def is_too_wide(epsilon: float) -> bool:
            return _width(query, self._smaller(query, self._at(epsilon))) > error

        if is_too_wide(_LARGEST_EPSILON):
            raise ValueError(
                f"error={self.error} is too small: it needs an epsilon above {_LARGEST_EPSILON:g}"
            )
        _, enough = bisect(is_too_wide, _LEAST_EPSILON, _LARGEST_EPSILON, in_logarithms=True)
        return self._smaller(query, self._at(_digits_up(enough)))

    def buys(self, query: IntegerQuery) -> Price:
        """Returns the price of a statistic of `query`. If its noise is Laplace, delta is None."""
        price = self.price()
        is_gaussian = self._smaller(query, price).noise is GAUSSIAN
        return price if is_gaussian else price._replace(delta=None)

    def _smaller(self, query: AnyQuery, price: Price) -> AdditiveMechanism:
        """Returns the mechanism with less noise: Laplace or, if there is a delta, Gaussian."""
        epsilon, delta = price
        pure = discrete_laplace if _counts(query) else laplace
        choices = [pure(query.sensitivity("l1", relation=self.relation), epsilon)]
        if delta is not None:
            in_l2 = query.sensitivity("l2", relation=self.relation)
            choices.append(gaussian(in_l2, epsilon, delta))
        return min(choices, key=lambda mechanism: _width(query, mechanism))

    def _at(self, epsilon: float) -> Price:
        if self.delta is not None:
            return Price(epsilon, float(_checks.fraction("delta", self.delta)))
        whole, delta = map(Fraction, self.budget)
        if delta == 0:
            return Price(epsilon, None)
        return Price(epsilon, float_down(min(Fraction(1), Fraction(repr(epsilon)) / whole) * delta))


def cost_of(
    epsilon: float | None,
    share: float | None,
    error: float | None = None,
    *,
    delta: float | None,
    budget: tuple[Decimal, Decimal],
    relation: NeighboringRelation,
) -> Cost:
    """Checks the arguments for the cost of a statistic, and returns the `Cost`."""
    given = {"epsilon": epsilon, "share": share, "error": error}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise TypeError(f"give exactly one of epsilon, share and error, got {named or 'none'}")
    if epsilon is not None:
        epsilon = float(_checks.positive("epsilon", epsilon))
    if share is not None:
        epsilon = _part_of(budget[0], share)
    return Cost(epsilon, error, delta, budget, relation)


def _part_of(whole: Decimal, share: float) -> float:
    """Returns a fraction of a budget's epsilon, rounded down to a float with few digits."""
    part = Fraction(Decimal(repr(float(_checks.positive("share", share)))))
    if part > 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    if whole == 0:
        raise ValueError(
            f"share={share} is a fraction of a ledger's budget, but the table has no ledger: "
            "pass ledger= to the table, or give epsilon instead"
        )
    return float_down(part * Fraction(whole))


def _counts(query: AnyQuery) -> bool:
    """Whether the results of a query are counts, and not sums on a grid."""
    return isinstance(query, DistinctCount) or (isinstance(query, Query) and not query._is_rounded)


def _width(query: AnyQuery, mechanism: AdditiveMechanism) -> float:
    # In a simulated table, columns are traced. The error does not depend on them, and is computed
    # at compile time.
    with jax.ensure_compile_time_eval():
        if isinstance(query, DistinctCount):
            like = jax.ShapeDtypeStruct(query.shape, jnp.int32)
            return float(mechanism.error(confidence=_CONFIDENCE, like=like))
        return query.error(mechanism, confidence=_CONFIDENCE, simultaneous=False)


def _digits_up(number: float) -> float:
    step = Decimal(10) ** (math.floor(math.log10(number)) + 1 - _DIGITS)
    return float((Decimal(number) / step).to_integral_value(ROUND_CEILING) * step)


GROUP, VALUE = "group", "value"


@dataclasses.dataclass(frozen=True)
class Question:
    """The rows that a statistic counts, its groups, and its name.

    Attributes:
        what: the name of the statistic without the columns, such as "mean".
        statistic: the name with columns, such as "mean of price".
        name: `statistic` with a fingerprint of all arguments, for a ledger.
        cells: the groups.
        present: which slots contain a row that counts. Whether a row counts depends only on this
            row or, if it belongs to a person, only on the rows of this person.
        relation: which tables are neighbors.
        again: asks the same question of another `PrivateTable`.
        people: how many rows of a person count; None if neighbors differ in one row.
        moments: "dates", "times" or "durations" if the answer is of that kind, else "".
        sums: one sum for each person in each group. If given, the statistic uses these sums instead
            of the numbers of its column.

    Formal guarantees:
        An added row changes a query of the rows that count by at most the reach of the query. A
        replaced row may start or stop counting. So under replace-one the rows that count are
        treated as a group: the reach of a grouped query covers rows that enter or leave a group.
    """

    what: str
    statistic: str
    name: str
    cells: Cells
    present: np.ndarray
    relation: NeighboringRelation
    again: Callable[[Any], "Question"]
    people: Contribution | None = None
    moments: str = ""
    sums: Column | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether the statistic is computed by group."""
        return (
            bool(self.cells.axes)
            or self.relation is NeighboringRelation.REPLACE_ONE
            or self.people is not None
        )

    @property
    def by(self) -> By | RowsOfPeople | None:
        """Returns the groups in the form that the functions of `dpjax.queries` accept."""
        if not self.is_grouped:
            return None
        groups: By = {GROUP: range(self.cells.size)}
        return groups if self.people is None else RowsOfPeople(groups, self.people)

    def of_people(self, query: Query) -> Query:
        """Returns the query. If the table has people, the result is a query of people."""
        return query if self.people is None else self.people.query(query)

    def pooled(self) -> "Question":
        """Returns the same question without groups: the rows of all groups are in a single group.

        So this group may contain all rows that a person has in several groups.
        """
        codes, people, again = self.cells.codes, self.people, self.again
        cells = Cells((), numpy_of(codes).where(codes >= 0, 0, -1).astype(np.int32))
        if people is not None:
            people = dataclasses.replace(people, rows=people.rows * people.blocks, blocks=1)
        return dataclasses.replace(
            self, cells=cells, people=people, again=lambda table: again(table).pooled()
        )

    def once_in_each(self, cells: int) -> "Question":
        """Returns this question, with the sensitivity for at most one row of a person in a cell.

        `cells` is the number of cells.
        """
        people = self.people
        if people is None:
            return self
        blocks = min(people.rows * people.blocks, cells)
        return dataclasses.replace(self, people=dataclasses.replace(people, rows=1, blocks=blocks))

    def database(self, value: PyTree) -> PaddedRecords:
        """Returns the database of a query: the columns, the groups, and which rows count."""
        if not self.is_grouped:
            return PaddedRecords(value, self.present)  # pyright: ignore[reportArgumentType]
        columns = value if isinstance(value, dict) else {VALUE: value}
        return PaddedRecords({**columns, GROUP: self.cells.codes}, self.present)  # pyright: ignore[reportArgumentType]

    def in_groups(self, query: Query) -> Query:
        """Applies a query of one column to each group."""
        if not self.is_grouped:
            return query
        return self.of_people(by(query, column=GROUP, keys=range(self.cells.size), of=VALUE))

    def labeled(self, release: Release, axes: Mapping[str, tuple[Axis, ...]]) -> Release:
        """Returns the release with one axis per column of groups, and with labels for its numbers.

        `axes` maps the name of each array in the value to its axes besides those of groups.
        """
        labels = Labels(self.statistic, self.cells.axes, tuple(axes.items()), self.moments)
        if not self.is_grouped:
            return dataclasses.replace(release, labels=labels)
        value, measured = jax.tree.map(
            lambda array: array.reshape((*self.cells.shape, *array.shape[1:])),
            (release.value, release.accuracy.measured),
        )
        accuracy = dataclasses.replace(release.accuracy, measured=measured)
        return dataclasses.replace(release, value=value, accuracy=accuracy, labels=labels)


def question_name(statistic: str, *asked: object) -> str:
    """Returns the name of a statistic in a ledger, with a fingerprint of all its arguments."""
    return f"{statistic}{FINGERPRINT}{digest(statistic, asked)[:16]}"
