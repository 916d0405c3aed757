"""The graphical model that fits noisy marginals best, by mirror descent on the host.

Each stage of AIM has another set of marginals, so a compiled program would be used only once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dpjax.queries._graphical_model import Columns, GraphicalModel, Potentials, Sizes, model_of

_STEPS = 150
_GROWS, _SHRINKS = 1.1, 0.5  # The factors of the step size after a good and a bad step.
_ENOUGH = 1e-7  # A descent ends at a good step whose relative gain is below this.


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Noisy counts of the cells of some columns.

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
    """Potentials, their model, its loss, and the gradient of the loss in the marginals."""

    potentials: Potentials
    model: GraphicalModel
    marginals: Mapping[Columns, np.ndarray]
    loss: float
    gradient: Mapping[Columns, np.ndarray]


class Estimator:
    """Fits a model to a growing list of measurements; each fit starts from the one before.

    The loss is the sum of the squared errors of the measurements, weighted by their precisions.
    Mirror descent preserves the form of the model, and its start has the largest entropy.

    McKenna, Sheldon and Miklau (2019), Algorithm 1. Steps grow, and a line search shrinks them.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._potentials, self._step = sizes, dict[Columns, np.ndarray](), 0.0

    def __call__(self, measurements: Sequence[Measurement]) -> GraphicalModel:
        """The model that fits all measurements so far."""
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
        """The potentials of the fit before, on sets of columns that contain all of its sets."""
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
    """A model from one marginal of each column, in which columns are independent."""
    total = total_of(measurements)
    with np.errstate(divide="ignore"):
        logs = {one.columns: np.log(_on_simplex(one.counts / total)) for one in measurements}
    return model_of(sizes, logs, total)


def total_of(measurements: Sequence[Measurement]) -> float:
    """The number of rows: the average sum of the marginals, weighted by their precisions."""
    weights = [1 / (one.scale**2 * one.counts.size) for one in measurements]
    return max(1.0, float(np.average([one.counts.sum() for one in measurements], weights=weights)))


def _on_simplex(numbers: np.ndarray) -> np.ndarray:
    """The nearest distribution in the norm l2."""
    falling = np.sort(numbers)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(numbers) + 1)
    return np.maximum(numbers - excess[np.flatnonzero(falling > excess)[-1]], 0)


def _merged(measurements: Sequence[Measurement]) -> list[Measurement]:
    """One measurement of each set of columns: the average weighted by precisions."""
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
    """The sets that no other set contains."""
    return [one for one in sets if not any({*one} < {*other} for other in sets)]


def _holder(columns: Columns, sets: Sequence[Columns]) -> Columns:
    return next(one for one in sets if {*columns} <= {*one})
