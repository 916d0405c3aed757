"""Events of outputs, and the choice of the one that shows the most."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from dpjax._core._values import Release
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.auditing._confidence_limits import Question
from dpjax.auditing._scores import Score

# Thresholds tried per score: evenly over the sample, and geometrically towards both ends.
_EVEN, _TAIL = 256, 48
# While choosing, the error is divided by the first of these, so that no event wins by chance: the
# limits then move by three standard errors of the sample that chooses. For rare events, and where
# nothing is left, with small epsilons or few samples, by the next ones.
_CAUTIONS = (1e5, 30.0, 1.0)
# An event further down the list must promise this much more, so that simple events win.
_MARGIN = 0.01
# Shares of the error that may go to the lower one of the two limits.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """A set of outputs, learned or given.

    Attributes:
        description: which outputs are in it.
        predicate: a batch of outputs, a tree of arrays with a leading axis, to booleans.

    Formal guarantees:
        A function of the output alone, so that every claim of privacy speaks of it.
    """

    description: str
    predicate: Callable[[Any], np.ndarray]

    def contains(self, output: Any) -> bool:
        """Whether one output, or one release, is in the event.

        Args:
            output: what the mechanism gives for one key.

        Returns:
            A boolean.
        """
        output = output.value if isinstance(output, Release) else output
        return bool(self.predicate(jax.tree.map(lambda leaf: np.asarray(leaf)[None], output))[0])

    def __repr__(self) -> str:
        return f"Event({self.description})"


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenEvent:
    """An event and how to test it, fixed before the outputs that it is tested on are drawn.

    Attributes:
        event: the set of outputs.
        swapped: whether it is the likelier one under neighbor.
        share: of the error, for the lower limit.
        caution: how much stricter it was chosen than it will be tested.
        promise: the bound to expect at that caution, below 0 where there is none.

    Formal guarantees:
        None of its own.
    """

    event: Event
    swapped: bool
    share: float
    caution: float
    promise: float


@dataclasses.dataclass(frozen=True)
class Experiment:
    """How a chosen event will be tested.

    Attributes:
        question: what is to be bounded.
        error: 1 - confidence.
        trials: outputs of each value.

    Formal guarantees:
        None of its own.
    """

    question: Question
    error: float
    trials: int

    def answer(self, likelier: Any, other: Any, share: Any = 0.5, caution: float = 1.0) -> Any:
        """The bound that counts of an event under the two values would give."""
        lower = clopper_pearson_lower(likelier, self.trials, share * self.error / caution)
        upper = clopper_pearson_upper(other, self.trials, (1 - share) * self.error / caution)
        return self.question.answer(lower, upper)


def choose(
    scores: Iterable[Score], here: Any, there: Any, experiment: Experiment
) -> list[ChosenEvent]:
    """The events, among all thresholds of all scores, that should show the most.

    One for every caution, the strictest first: the less caution, the rarer an event may be. Scores
    come in the order of preference.
    """
    tallies = [_tally(score, here, there, experiment) for score in scores]
    best = [_best(tallies, experiment, caution) for caution in _CAUTIONS]
    promising = [choice for choice in best if choice.promise > 0] or best[-1:]
    distinct: dict[Any, ChosenEvent] = {}
    for choice in promising:
        distinct.setdefault((choice.event.predicate, choice.swapped), choice)
    return list(distinct.values())


@dataclasses.dataclass(frozen=True, eq=False)
class _Tally:
    """How often a score is at least, and at most, some thresholds.

    Attributes:
        score: the score.
        thresholds: numbers.
        counts: shape (2, 2, thresholds): here and there; at least and at most.

    Formal guarantees:
        None of its own.
    """

    score: Score
    thresholds: np.ndarray
    counts: np.ndarray


def _tally(score: Score, here: Any, there: Any, experiment: Experiment) -> _Tally:
    samples = [_sorted_numbers(score.evaluate(outputs)) for outputs in (here, there)]
    thresholds = _thresholds(np.concatenate(samples))
    counts = np.stack([_counts(sample, thresholds) for sample in samples])
    # Frequencies are carried over to the number of outputs of the experiment.
    size = len(jax.tree.leaves(here)[0])
    return _Tally(score, thresholds, counts * (experiment.trials / size))


def _best(tallies: list[_Tally], experiment: Experiment, caution: float) -> ChosenEvent:
    best: ChosenEvent | None = None
    for tally in tallies:
        choice = _best_threshold(tally, experiment, caution)
        if best is None or choice.promise > best.promise + _MARGIN * abs(best.promise):
            best = choice
    if best is None:
        raise ValueError("scores must not be empty")
    return best


def _best_threshold(tally: _Tally, experiment: Experiment, caution: float) -> ChosenEvent:
    orders = tally.counts, tally.counts[::-1]
    promises = np.stack([experiment.answer(*counts, caution=caution) for counts in orders])
    best = np.unravel_index(np.argmax(promises), promises.shape)
    swapped, side, position = (int(index) for index in best)
    likelier, other = orders[swapped][:, side, position]
    shares = [float(experiment.answer(likelier, other, share)) for share in _SHARES]
    at_least, threshold = side == 0, float(tally.thresholds[position])
    return ChosenEvent(
        Event(
            tally.score.describe(at_least, threshold),
            _Threshold(tally.score, at_least, threshold),
        ),
        bool(swapped),
        _SHARES[int(np.argmax(shares))],
        caution,
        float(promises[best]),
    )


@dataclasses.dataclass(frozen=True)
class _Threshold:
    score: Score
    at_least: bool
    threshold: float

    def __call__(self, outputs: Any) -> np.ndarray:
        numbers = self.score.evaluate(outputs)
        return numbers >= self.threshold if self.at_least else numbers <= self.threshold


def _sorted_numbers(numbers: np.ndarray) -> np.ndarray:
    return np.sort(numbers[~np.isnan(numbers)])


def _counts(sample: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """How many are at least, and how many are at most, every threshold."""
    at_least = len(sample) - np.searchsorted(sample, thresholds, "left")
    return np.stack([at_least, np.searchsorted(sample, thresholds, "right")])


def _thresholds(sample: np.ndarray) -> np.ndarray:
    distinct = np.unique(sample)
    if len(distinct) <= _EVEN + 2 * _TAIL:
        # 0 stands in where there is nothing but NaN.
        return distinct if len(distinct) else np.zeros(1)
    ends = np.geomspace(1, len(sample), _TAIL) - 1
    ranks = np.concatenate([np.linspace(0, len(sample) - 1, _EVEN), ends, len(sample) - 1 - ends])
    return np.unique(np.sort(sample)[np.round(ranks).astype(int)])
