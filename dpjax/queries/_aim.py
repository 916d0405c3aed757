"""AIM: measures noisy marginals and fits a model to them, which selects the next marginals.

docs/proofs/synthetic.md has the proof.
"""

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

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
from dpjax.queries._query import Query
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.targets._known_sensitivity import VectorNorm

# A graphical model of categorical columns. Columns are eliminated one after the other. The next
# column is always the one whose elimination makes the smallest table. So the distribution is a
# product of conditionals: each column is conditional on some columns that are eliminated later.
# Everything is computed from releases, on the host, in float64.


Columns: TypeAlias = tuple[str, ...]
Sizes: TypeAlias = Mapping[str, int]
"""The number of cells of each column."""

Potentials: TypeAlias = Mapping[Columns, np.ndarray]
"""Logarithms of factors, each with an axis for each of its columns."""


@dataclasses.dataclass(frozen=True)
class Conditional:
    """The conditional distribution of one column of a graphical model, given its parent columns.

    Attributes:
        name: the name of the column.
        parents: the columns that this column is conditional on. They are drawn first.
        table: conditional probabilities. The last axis is for the column, and the other axes are
            for its parents.
    """

    name: str
    parents: Columns
    table: np.ndarray


@dataclasses.dataclass(frozen=True)
class GraphicalModel:
    """A probability distribution of the rows of a table, and an estimate of the number of rows.

    Attributes:
        sizes: the number of cells of each column.
        conditionals: the conditionals, in an order in which rows can be drawn.
        total: the number of rows.
    """

    sizes: Sizes
    conditionals: tuple[Conditional, ...]
    total: float

    def counts(self, columns: Columns) -> np.ndarray:
        """Returns the expected number of rows in each cell of a marginal, of at most 52 columns."""
        needed, used = set(columns), list[Conditional]()
        for one in reversed(self.conditionals):  # Children come before their parents.
            if one.name in needed:
                needed |= set(one.parents)
                used.append(one)
        letters = dict(zip(sorted(needed), string.ascii_letters, strict=False))
        terms = ["".join(letters[name] for name in (*one.parents, one.name)) for one in used]
        product = ",".join(terms) + "->" + "".join(letters[name] for name in columns)
        tables = [one.table for one in used]
        order = _order(product, tuple(table.shape for table in tables))
        return self.total * np.einsum(product, *tables, optimize=order)

    def rows(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Draws `rows` rows. Returns an array of category indices for each column.

        Sampling is stratified among the rows whose parent columns have equal values: the number of
        rows in each cell of a column differs from its expected number by less than two.
        """
        drawn = dict[str, np.ndarray]()
        for one in self.conditionals:
            shape = [self.sizes[name] for name in one.parents]
            parent = np.zeros(rows, np.int64)
            for name, size in zip(one.parents, shape, strict=True):
                parent = parent * size + drawn[name]
            table = one.table.reshape(-1, self.sizes[one.name])
            drawn[one.name] = _stratified(rng, parent, table)
        return {name: drawn[name] for name in self.sizes}


@functools.lru_cache(maxsize=4096)
def _order(product: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Returns an order of contraction for `einsum` in which intermediate tables are small."""
    return np.einsum_path(product, *map(np.empty, shapes), optimize="greedy")[0]


def _stratified(rng: np.random.Generator, parent: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Draws a category for each row, with the probabilities in row `parent` of `table`."""
    rows, cells = len(parent), table.shape[1]
    mixed = rng.permutation(rows)
    order = mixed[np.argsort(parent[mixed], kind="stable")]
    ordered = parent[order]
    members = np.bincount(ordered, minlength=len(table))
    rank = np.arange(rows) - (np.cumsum(members) - members)[ordered]
    share = (rank + rng.random(rows)) / members[ordered]
    ends = np.cumsum(table, axis=1)
    ends /= np.maximum(ends[:, -1:], np.finfo(float).tiny)
    # `searchsorted` looks up all rows at once, because row i of the table has its own interval,
    # from 2 i to 2 i + 1.
    steps = (2 * np.arange(len(table))[:, None] + ends).ravel()
    found = np.searchsorted(steps, 2 * ordered + share, side="right") - ordered * cells
    chosen = np.empty(rows, np.int32)
    chosen[order] = np.clip(found, 0, cells - 1)
    return chosen


def model_of(sizes: Sizes, potentials: Potentials, total: float) -> GraphicalModel:
    """Returns the model with probabilities proportional to exp(sum of `potentials`)."""
    factors, found = list(potentials.items()), list[Conditional]()
    for name, parents in eliminated(sizes, potentials):
        axes = (*parents, name)
        table = np.zeros([sizes[one] for one in axes])
        for columns, factor in factors:
            if name in columns:
                table += _spread(columns, factor, axes)
        factors = [one for one in factors if name not in one[0]]
        largest = table.max(axis=-1, keepdims=True)
        summed = np.log(np.exp(table - largest).sum(axis=-1)) + largest[..., 0]
        found.append(Conditional(name, parents, np.exp(table - summed[..., None])))
        factors.append((parents, summed))
    return GraphicalModel(sizes, tuple(reversed(found)), total)


def _spread(columns: Columns, factor: np.ndarray, axes: Columns) -> np.ndarray:
    """Reshapes the factor of `columns` to the axes `axes`.

    Axes that the factor lacks have length 1.
    """
    order = sorted(range(len(columns)), key=lambda i: axes.index(columns[i]))
    shape = [factor.shape[columns.index(one)] if one in columns else 1 for one in axes]
    return factor.transpose(order).reshape(shape)


def eliminated(sizes: Sizes, sets: Iterable[Columns]) -> list[tuple[str, Columns]]:
    """Returns the columns in the order of their elimination, each with its parents.

    To eliminate a column, all potentials that contain it become one table. The parents of the
    column are the other columns of this table.
    """
    linked = {name: set[str]() for name in sizes}
    for columns in sets:
        for name in columns:
            linked[name] |= {*columns} - {name}
    found = list[tuple[str, Columns]]()
    while linked:
        name = min(linked, key=lambda one: math.prod(sizes[x] for x in (one, *linked[one])))
        others = linked.pop(name)
        for one in others:
            linked[one] = (linked[one] | others) - {one, name}
        found.append((name, tuple(one for one in sizes if one in others)))
    return found


def cells_of_model(sizes: Sizes, sets: Sequence[Columns]) -> int:
    """Returns the number of cells of a model that has potentials on these column sets."""
    tables = eliminated(sizes, sets)
    return sum(math.prod(sizes[one] for one in (name, *parents)) for name, parents in tables)


# The following functions fit a graphical model to noisy marginals, by mirror descent on the host.
# They are not compiled: each stage of AIM has a different set of marginals, so a compiled program
# would be used only once.


_STEPS = 150
# A step that lowers the loss multiplies the step size by the first number, another step by the
# second.
_GROWS, _SHRINKS = 1.1, 0.5
_ENOUGH = 1e-7  # Stop when a successful step reduces the loss by less than this.


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A noisy marginal: a count for each combination of the categories of some columns.

    Attributes:
        columns: the columns, in the order of the axes of the counts.
        counts: the noisy counts.
        scale: the standard deviation of the noise.
    """

    columns: Columns
    counts: np.ndarray
    scale: float


@dataclasses.dataclass(frozen=True)
class _Fit:
    """A model with its potentials, its marginals, its loss, and the gradient of the loss.

    The gradient is with respect to the marginals.
    """

    potentials: Potentials
    model: GraphicalModel
    marginals: Mapping[Columns, np.ndarray]
    loss: float
    gradient: Mapping[Columns, np.ndarray]


class Estimator:
    """Fits a model to a growing list of measurements. Each fit starts from the previous potentials.

    The loss is the sum of the squared errors of the measurements, each divided by the variance of
    its noise. Mirror descent adjusts the potentials of the model. The first fit starts at the
    uniform distribution.

    This is Algorithm 1 of McKenna, Sheldon and Miklau (2019). The step size grows after a good
    step, and a line search shrinks it after a bad step.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._potentials, self._step = sizes, dict[Columns, np.ndarray](), 0.0

    def __call__(self, measurements: Sequence[Measurement]) -> GraphicalModel:
        """Returns the model that minimizes the loss of all the given measurements."""
        total, merged = total_of(measurements), _merged(measurements)
        sets = _largest([one.columns for one in merged])
        first = 1 / (total * max(1 / one.scale**2 for one in merged))
        fit, step = self._fit(self._started(sets), merged, total), self._step or first
        for _ in range(_STEPS):
            moved = {
                name: fit.potentials[name] - step * fit.gradient[name] for name in fit.potentials
            }
            tried = self._fit(moved, merged, total)
            expected = math.fsum(
                float(np.sum(fit.gradient[name] * (fit.marginals[name] - tried.marginals[name])))
                for name in moved
            )
            gained = fit.loss - tried.loss
            if not gained >= expected / 2:
                step *= _SHRINKS
                continue
            fit, step = tried, step * _GROWS
            if gained <= _ENOUGH * fit.loss:
                break
        self._potentials, self._step = dict(fit.potentials), step
        return fit.model

    def _started(self, sets: Sequence[Columns]) -> dict[Columns, np.ndarray]:
        """Returns potentials on `sets` with the same sum as the potentials of the previous fit.

        Each previous potential is added to the potential of a set that contains its columns.
        """
        found = {name: np.zeros([self._sizes[one] for one in name]) for name in sets}
        for name, potential in self._potentials.items():
            holder = _holder(name, sets)
            shape = [self._sizes[one] if one in name else 1 for one in holder]
            found[holder] = found[holder] + potential.reshape(shape)
        return found

    def _fit(
        self, potentials: Potentials, measurements: Sequence[Measurement], total: float
    ) -> _Fit:
        model = model_of(self._sizes, potentials, total)
        marginals = {name: model.counts(name) for name in potentials}
        loss, gradient = 0.0, {name: np.zeros_like(one) for name, one in marginals.items()}
        for one in measurements:
            holder = _holder(one.columns, list(potentials))
            others = tuple(i for i, name in enumerate(holder) if name not in one.columns)
            off = marginals[holder].sum(axis=others) - one.counts
            loss += float(np.sum(off**2)) / one.scale**2 / 2
            gradient[holder] += np.expand_dims(off / one.scale**2, others)
        return _Fit(potentials, model, marginals, loss, gradient)


def independent(sizes: Sizes, measurements: Sequence[Measurement]) -> GraphicalModel:
    """Returns a model of independent columns, from one measurement of each column."""
    total = total_of(measurements)
    with np.errstate(divide="ignore"):
        logs = {one.columns: np.log(_on_simplex(one.counts / total)) for one in measurements}
    return model_of(sizes, logs, total)


def total_of(measurements: Sequence[Measurement]) -> float:
    """Estimates the number of rows: the average of the marginals' sums, weighted by precisions."""
    weights = [1 / (one.scale**2 * one.counts.size) for one in measurements]
    return max(1.0, float(np.average([one.counts.sum() for one in measurements], weights=weights)))


def _on_simplex(numbers: np.ndarray) -> np.ndarray:
    """Returns the probability vector that is nearest to `numbers` in the l2 norm."""
    falling = np.sort(numbers)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(numbers) + 1)
    return np.maximum(numbers - excess[np.flatnonzero(falling > excess)[-1]], 0)


def _merged(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Merges measurements of the same columns into one average, weighted by inverse variances."""
    by_columns = dict[Columns, list[Measurement]]()
    for one in measurements:
        by_columns.setdefault(one.columns, []).append(one)
    found = list[Measurement]()
    for columns, several in by_columns.items():
        weights = [1 / one.scale**2 for one in several]
        counts = np.average([one.counts for one in several], axis=0, weights=weights)
        found.append(Measurement(columns, counts, 1 / math.sqrt(math.fsum(weights))))
    return found


def _largest(sets: Sequence[Columns]) -> list[Columns]:
    """Returns the column sets that are not subsets of other column sets in the list."""
    return [one for one in sets if not any({*one} < {*other} for other in sets)]


def _holder(columns: Columns, sets: Sequence[Columns]) -> Columns:
    return next(one for one in sets if {*columns} <= {*one})


# The following code chooses and measures marginals.


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
        known = counts.sensitivity(norm, relation=self.relation)
        # The returned sensitivity has no allowance for float rounding, because the values are
        # integers.
        plain = assume_sensitivity(known.value, norm=norm, relation=known.relation)
        return dataclasses.replace(plain, privacy_unit=known.privacy_unit, notes=known.notes)

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
    """Whether the new measurements `measured` changed the model by less than their noise."""
    moved = sum(np.abs(after.counts(x.columns) - before.counts(x.columns)).sum() for x in measured)
    return moved <= sum(_MEAN_DISTANCE * x.scale * x.counts.size for x in measured)


class _Run:
    """Makes the releases of one run of AIM: choices and measurements.

    Each release is paid for before its noise is drawn.
    """

    def __init__(self, key: Key, counts: Marginals, plan: Plan, budget: PrivacyFilter) -> None:
        self.counts, self.plan, self.budget = counts, plan, budget
        self._keys = (jax.random.fold_in(key, i) for i in itertools.count())

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
        self, model: GraphicalModel, rho: float, measured: list[Columns], just_now: list[Columns]
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
        """Returns the indices of the column sets that may be measured next.

        The model that includes the set may have at most `spent` * `plan.most_cells` cells. `spent`
        is the fraction of the budget that is spent so far. Measured sets are always returned.
        """
        plan, most = self.plan, spent * self.plan.most_cells
        return [
            place
            for place, one in enumerate(plan.weights)
            if one in measured or cells_of_model(plan.sizes, [*measured, one]) <= most
        ]

    def _score(self, columns: Columns, model: GraphicalModel, rho: float) -> int:
        """Returns the score of a marginal: weight * (error of the model - expected noise).

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
