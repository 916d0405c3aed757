"""AIM: measures noisy marginals and fits a model to them, which selects the next marginals.

docs/proofs/synthetic.md has the proof.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import Key
from dpjax._core._values import NeighboringRelation, Sensitivity
from dpjax._exact._numerics import round_up
from dpjax.accounting._adaptive import PrivacyFilter
from dpjax.accounting._composition import SHARE, charged
from dpjax.mechanisms._additive import AdditiveMechanism, gaussian
from dpjax.mechanisms._gaussian_multipliers import epsilon_of_multiplier
from dpjax.mechanisms._selection import SelectionMechanism, exponential
from dpjax.queries._counts import histogram_query
from dpjax.queries._graphical_model import (
    Columns,
    GraphicalModel,
    Measurement,
    Sizes,
    cells_of_model,
    independent,
)
from dpjax.queries._query import Query
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.targets._known_sensitivity import VectorNorm

Marginals: TypeAlias = Callable[[Columns], np.ndarray]
"""Maps some columns to the exact number of rows in each of their cells."""

Estimate: TypeAlias = Callable[[Sequence[Measurement]], GraphicalModel]

# The fraction of the budget that pays for the marginals of single columns, and the fraction of a
# step's budget that pays for choosing a marginal. The rest of the step's budget pays for measuring
# the chosen marginal.
_OF_COLUMNS, _OF_CHOICE = 0.1, 0.1
# A run chooses this many marginals per column of the table. If a stage lowers the noise, each later
# measurement costs more, so the run chooses fewer marginals.
_PER_COLUMN = 2
# A stage measures 1 / _STAGES marginals per column. After each stage, the model is fitted again.
_STAGES = 4
_LARGEST_SCORE, _LARGEST_WEIGHT = 2**30, 64
# The mean absolute value of Gaussian noise with standard deviation 1.
_MEAN_DISTANCE = math.sqrt(2 / math.pi)
# When `gaussian` computes the epsilon for a given noise scale, it rounds epsilon up by less than
# this fraction.
_ROUNDED_UP = 2e-4


@dataclasses.dataclass(frozen=True)
class Plan:
    """The public parameters of a run of AIM, such as the marginals that it may measure.

    Attributes:
        sizes: the number of categories of each column, by its name.
        weights: the weight of each set of columns that may be chosen, from 1 to 64.
        most_cells: the largest number of cells that the tables of the model may have together.
        relation: which tables are neighbors.
        of_rows: maps a query of all rows to the same query of only the rows that are used.
    """

    sizes: Sizes
    weights: Mapping[Columns, int]
    most_cells: int
    relation: NeighboringRelation
    of_rows: Callable[[Query], Query]

    def cells(self, columns: Columns) -> int:
        """Returns the number of cells of the marginal of `columns`."""
        return math.prod(self.sizes[name] for name in columns)

    def reach(self, columns: Columns, norm: VectorNorm) -> Sensitivity:
        """Returns the sensitivity of the marginal of `columns` in the given norm."""
        counts = self.of_rows(histogram_query(self.cells(columns)))
        return _outside(counts.sensitivity(norm, relation=self.relation))

    @functools.cached_property
    def reach_of_scores(self) -> Sensitivity:
        """Returns the sensitivity of scores: the largest product of weight and l1 sensitivity."""
        reaches = {name: self.reach(name, "l1") for name in self.weights}
        moved = [Fraction(float(reaches[name].value)) * w for name, w in self.weights.items()]
        one = next(iter(reaches.values()))
        return dataclasses.replace(one, value=round_up(max(moved)), norm="linf")

    @property
    def most_drawn(self) -> int:
        """Returns how many random numbers a release draws at most: one per candidate or cell."""
        return max(len(self.weights), *map(self.cells, self.weights))


def _outside(known: Sensitivity) -> Sensitivity:
    """Returns `known` without its allowance for float rounding, as the values are integers."""
    plain = assume_sensitivity(known.value, norm=known.norm, relation=known.relation)
    return dataclasses.replace(plain, privacy_unit=known.privacy_unit, notes=known.notes)


def plan_of(
    sizes: Sizes,
    workload: Mapping[Columns, float],
    most_cells: int,
    relation: NeighboringRelation,
    of_rows: Callable[[Query], Query],
) -> Plan:
    """Returns the `Plan` for a workload, which maps sets of columns to weights.

    AIM may choose any subset of one of these sets. The weight of a subset is a sum over all sets of
    the workload: the weight of the set times the number of columns that the set and the subset
    share. Weights are then scaled to integers.
    """
    shared = dict[Columns, float]()
    for columns in workload:
        for size in range(1, len(columns) + 1):
            shared |= dict.fromkeys(itertools.combinations(columns, size), 0.0)
    for one in shared:
        shared[one] = math.fsum(w * len({*one} & {*other}) for other, w in workload.items())
    most = max(shared.values())
    weights = {one: max(1, round(_LARGEST_WEIGHT * w / most)) for one, w in shared.items()}
    fitting = {
        one: w for one, w in weights.items() if math.prod(map(sizes.__getitem__, one)) <= most_cells
    }
    return Plan(sizes, fitting, most_cells, relation, of_rows)


def check_budget(plan: Plan, budget: PrivacyFilter) -> None:
    """Raises a `ValueError` if no noise, however large, fits into `budget`.

    The check uses public numbers only.
    """
    names = [(name,) for name in plan.sizes]
    gaussian_at(plan.reach(names[0], "l2"), budget._most)
    # `releases` is an upper bound: each stage except the first and the last spends at least a fixed
    # fraction of the budget, and the last stage spends all that is left.
    releases = len(names) * (2 * _PER_COLUMN + 4)
    drawn = releases * plan.most_drawn
    epsilon, delta = charged(budget.epsilon * (1 - SHARE), budget.delta, drawn)
    if epsilon > budget.epsilon or delta > budget.delta:
        raise ValueError(
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g} are too small for noise in "
            f"{drawn} cells: take a larger epsilon or delta, or a smaller most_cells"
        )


def aim(
    key: Key, counts: Marginals, plan: Plan, budget: PrivacyFilter, estimate: Estimate
) -> GraphicalModel:
    """Fits a model of a table to noisy marginals. Each is paid for before its noise is drawn.

    A stage chooses some marginals where the model has large errors, measures them, and estimates
    the model again. If the model changed by less than the noise, the next stage measures with a
    quarter of the variance.
    """
    run = _Run(key, counts, plan, budget)
    names = [(name,) for name in plan.sizes]
    each = (_OF_COLUMNS if len(names) > 1 else 1.0) * run.left / len(names)
    measured = [run.measure(name, each) for name in names]
    model = independent(plan.sizes, measured)
    choices = max(1, math.ceil(len(names) / _STAGES))
    rho, is_last = run.left / (_PER_COLUMN * len(names)), len(names) == 1
    while not is_last:
        if is_last := run.left < 2 * choices * rho:
            rho = run.left / choices
        found = list[Measurement]()
        for _ in range(choices):
            sets = [[one.columns for one in some] for some in (measured, found)]
            chosen = run.choose(model, rho, *sets)
            found.append(run.measure(chosen, (1 - _OF_CHOICE) * rho))
        measured += found
        before, model = model, estimate(measured)
        if _is_below_noise(before, model, found):
            rho *= 4
    return model


def _is_below_noise(
    before: GraphicalModel, after: GraphicalModel, measured: Iterable[Measurement]
) -> bool:
    """Whether the model changed by less than the noise of the measurements made in between."""
    moved = sum(np.abs(after.counts(x.columns) - before.counts(x.columns)).sum() for x in measured)
    return moved <= sum(_MEAN_DISTANCE * x.scale * x.counts.size for x in measured)


class _Run:
    """Makes the releases of one run of AIM: choices and measurements.

    Each release is paid for before its noise is drawn.
    """

    def __init__(self, key: Key, counts: Marginals, plan: Plan, budget: PrivacyFilter) -> None:
        self.counts, self.plan, self.budget = counts, plan, budget
        self._keys: Iterator[Key] = map(
            functools.partial(jax.random.fold_in, key), itertools.count()
        )

    @property
    def left(self) -> float:
        """Returns the part of the budget that is not spent, as a rho of zCDP."""
        return self.budget.remaining * self.budget._most

    def measure(self, columns: Columns, rho: float) -> Measurement:
        """Releases the marginal of `columns` with Gaussian noise that costs at most `rho`."""
        mechanism = gaussian_at(self.plan.reach(columns, "l2"), rho)
        self.budget.admit(mechanism)
        exact = self.counts(columns).astype(np.int32)
        noisy = mechanism.unpaid_draw(next(self._keys), jnp.asarray(exact.ravel()))
        return Measurement(columns, np.asarray(noisy).reshape(exact.shape), float(mechanism.scale))

    def choose(
        self,
        model: GraphicalModel,
        rho: float,
        measured: Sequence[Columns],
        just_now: Sequence[Columns],
    ) -> Columns:
        """Chooses a marginal where the model's error exceeds the noise. This costs `rho` / 10.

        Marginals that were measured in the current stage are excluded, because the model does not
        include these measurements yet.
        """
        mechanism = selection_at(self.plan.reach_of_scores, _OF_CHOICE * rho)
        names, spent = list(self.plan.weights), 1 - self.budget.remaining
        self.budget.admit(mechanism)
        scores = np.full(len(names), -_LARGEST_SCORE, np.int64)
        for place in self._fitting([*measured, *just_now], spent):
            if names[place] in just_now:
                continue
            scores[place] = self._score(names[place], model, (1 - _OF_CHOICE) * rho)
        low_to_high = np.clip(scores, -_LARGEST_SCORE, _LARGEST_SCORE).astype(np.int32)
        place = mechanism.unpaid_draw(next(self._keys), jnp.asarray(low_to_high))
        return names[int(place)]

    def _fitting(self, measured: Sequence[Columns], spent: float) -> list[int]:
        """Returns the indices of the column sets that keep the model small enough.

        A model may have `plan.most_cells` cells times the fraction of the budget that is spent so
        far. Column sets that were already measured are always included.
        """
        plan, most = self.plan, spent * self.plan.most_cells
        return [
            place
            for place, one in enumerate(plan.weights)
            if one in measured or cells_of_model(plan.sizes, [*measured, one]) <= most
        ]

    def _score(self, columns: Columns, model: GraphicalModel, rho: float) -> int:
        """Returns the weight of a marginal times (the model's error in it - the expected noise).

        The counts of the model are rounded to integers, so a score is an integer. If a record
        changes the marginal by v, it changes the score by at most the weight times ||v||_1.
        """
        expected = np.rint(model.counts(columns)).astype(np.int64)
        distance = int(np.abs(self.counts(columns) - expected).sum())
        noise = self.plan.reach(columns, "l2").value / math.sqrt(2 * rho)
        return self.plan.weights[columns] * (distance - int(_MEAN_DISTANCE * noise * expected.size))


def gaussian_at(sensitivity: Sensitivity, rho: float) -> AdditiveMechanism:
    """Returns Gaussian noise whose zCDP cost is at most `rho`, and only slightly less."""
    ratio = math.sqrt(2 * rho)  # The ratio of the sensitivity to the noise.
    # `gaussian` needs a delta, although neither the noise nor its rho depends on it. This delta
    # makes epsilon close to the ratio.
    delta = min(0.25, ratio / 10)
    epsilon = epsilon_of_multiplier(1 / ratio, delta, None)
    if epsilon is None:
        raise ValueError(
            f"epsilon is out of range: no Gaussian noise with zCDP cost rho={rho:g} is available"
        )
    return gaussian(sensitivity, epsilon * (1 - _ROUNDED_UP), delta)


def selection_at(sensitivity: Sensitivity, rho: float) -> SelectionMechanism:
    """Returns the exponential mechanism whose zCDP cost, epsilon^2 / 8, is at most `rho`."""
    return exponential(sensitivity, math.sqrt(8 * rho) * (1 - 1e-9))
