"""Events, which are sets of outputs, and the choice of those that give the best bounds."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.typing import ArrayLike

from dpjax._core._types import Value
from dpjax._core._values import Release
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.auditing._scores import Score


@dataclasses.dataclass(frozen=True)
class Question:
    """The quantity to bound: "epsilon" at a given delta, or "delta" at a given epsilon.

    Under (epsilon, delta)-DP, the probabilities p and q of any event satisfy
    p <= exp(epsilon) q + delta. So a lower limit of p and an upper limit of q bound epsilon and
    delta from below.
    """

    bounded: str
    at: float

    def answer(self, lower: ArrayLike, upper: ArrayLike) -> np.ndarray:
        """Returns the bound that follows from a lower limit of p and an upper limit of q.

        A bound below 0 proves nothing.
        """
        lower, upper = np.asarray(lower), np.asarray(upper)
        with np.errstate(divide="ignore", over="ignore"):
            if self.bounded == "epsilon":
                return np.log(np.maximum(lower - self.at, 0.0) / upper)
            return lower - np.exp(self.at) * upper


# For each score, `_EVEN` thresholds have evenly spaced ranks in the sample. Toward each end, the
# ranks of `_TAIL` more thresholds are geometrically spaced.
_EVEN, _TAIL = 256, 48
# While an event is being chosen, the error probability is divided by one of these numbers, the
# caution. A larger caution widens the limits, so that no event is chosen only because of a chance
# fluctuation of the sample. The first caution widens the limits by three standard errors of the
# sample. It would reject every event if events are rare, epsilon is small or samples are few. The
# smaller cautions are for these cases.
_CAUTIONS = (1e5, 30.0, 1.0)
# A later score is preferred to an earlier score only if it improves the bound by this fraction,
# because earlier scores have events that are simpler to describe.
_MARGIN = 0.01
# The error probability is divided between two limits: one of these fractions is for the lower
# limit, and the rest is for the upper limit.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """A set of outputs, learned or given.

    Attributes:
        description: a description of the set in words.
        predicate: maps a batch of outputs, a tree of arrays with a leading axis, to booleans.

    Formal guarantees:
        An event is a function of the output alone, so a privacy guarantee bounds its probability.
    """

    description: str
    predicate: Callable[[Value], np.ndarray]

    def contains(self, output: Release | Value) -> bool:
        """Whether one output, or one release, is in the event.

        Args:
            output: the mechanism's output for one key.

        Returns:
            A boolean.
        """
        output = output.value if isinstance(output, Release) else output
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], output)
        return bool(self.predicate(one)[0])

    def __repr__(self) -> str:
        return f"Event({self.description})"


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenEvent:
    """An event and its test, fixed before the outputs of the test are drawn."""

    event: Event
    swapped: bool  # Whether the event is more probable under the neighbor than under the value.
    share: float  # The fraction of the error probability for the lower limit.
    caution: float  # The number by which the error probability was divided during the choice.
    promise: float  # The bound that is expected at this caution; below 0 if it proves nothing.


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The test of a chosen event, on fresh outputs."""

    question: Question
    error: float  # 1 - confidence.
    trials: int  # The number of outputs of each value.

    def answer(
        self, likelier: ArrayLike, other: ArrayLike, share: float = 0.5, caution: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a bound on epsilon or delta from the counts of an event, and two limits.

        `likelier` and `other` are the numbers of outputs in the event for two values of the input.
        The limits are a lower limit of the event's probability for the first value, and an upper
        limit for the second value. Each limit is wrong with at most its share of the error
        probability. So the probability that one of them is wrong is at most the error probability.
        """
        lower = clopper_pearson_lower(likelier, self.trials, share * self.error / caution)
        upper = clopper_pearson_upper(other, self.trials, (1 - share) * self.error / caution)
        return self.question.answer(lower, upper), lower, upper


def choose(
    scores: Iterable[Score], here: Value, there: Value, experiment: Experiment
) -> list[ChosenEvent]:
    """Returns the events with the largest expected bounds.

    An event is the set of outputs whose score is at least, or at most, a threshold. To choose an
    event, bounds are computed at a smaller error probability: the error probability divided by a
    number, the caution. At most one event is returned for each caution in `_CAUTIONS`, the largest
    caution first. A smaller caution admits rarer events. Scores must be in order of preference.
    """
    tallies = [_tally(score, here, there, experiment) for score in scores]
    best = [_best(tallies, experiment, caution) for caution in _CAUTIONS]
    promising = [choice for choice in best if choice.promise > 0] or best[-1:]
    distinct: dict[tuple[object, bool], ChosenEvent] = {}
    for choice in promising:
        distinct.setdefault((choice.event.predicate, choice.swapped), choice)
    return list(distinct.values())


@dataclasses.dataclass(frozen=True, eq=False)
class _Tally:
    """Two counts for each threshold.

    One is the number of outputs whose score is at least the threshold. The other is the number of
    outputs whose score is at most the threshold.
    """

    score: Score
    thresholds: np.ndarray
    # Shape (2, 2, thresholds): the first axis is for value and neighbor, and the second for "at
    # least" and "at most" the threshold.
    counts: np.ndarray


def _tally(score: Score, here: Value, there: Value, experiment: Experiment) -> _Tally:
    samples = [np.sort(x[~np.isnan(x)]) for x in map(score.evaluate, (here, there))]
    thresholds = _thresholds(np.concatenate(samples))
    counts = np.stack([_counts(sample, thresholds) for sample in samples])
    # Counts are scaled from the number of outputs in the sample to the number in the experiment.
    size = len(jax.tree.leaves(here)[0])
    return _Tally(score, thresholds, counts * (experiment.trials / size))


def _best(tallies: list[_Tally], experiment: Experiment, caution: float) -> ChosenEvent:
    best, *others = (_best_threshold(tally, experiment, caution) for tally in tallies)
    for choice in others:
        if choice.promise > best.promise + _MARGIN * abs(best.promise):
            best = choice
    return best


def _best_threshold(tally: _Tally, experiment: Experiment, caution: float) -> ChosenEvent:
    orders = tally.counts, tally.counts[::-1]
    promises = np.stack([experiment.answer(*counts, caution=caution)[0] for counts in orders])
    best = np.unravel_index(np.argmax(promises), promises.shape)
    swapped, side, position = (int(index) for index in best)
    likelier, other = orders[swapped][:, side, position]
    shares = [float(experiment.answer(likelier, other, share)[0]) for share in _SHARES]
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

    def __call__(self, outputs: Value) -> np.ndarray:
        numbers = self.score.evaluate(outputs)
        return numbers >= self.threshold if self.at_least else numbers <= self.threshold


def _counts(sample: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Returns how many entries are at least, and how many are at most, each threshold."""
    at_least = len(sample) - np.searchsorted(sample, thresholds, "left")
    return np.stack([at_least, np.searchsorted(sample, thresholds, "right")])


def _thresholds(sample: np.ndarray) -> np.ndarray:
    distinct = np.unique(sample)
    if len(distinct) <= _EVEN + 2 * _TAIL:
        # If all scores are NaN, no output is in any event, whatever the threshold.
        return distinct if len(distinct) else np.zeros(1)
    ends = np.geomspace(1, len(sample), _TAIL) - 1
    ranks = np.concatenate([np.linspace(0, len(sample) - 1, _EVEN), ends, len(sample) - 1 - ends])
    return np.unique(np.sort(sample)[np.round(ranks).astype(int)])
