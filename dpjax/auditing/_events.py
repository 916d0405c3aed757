"""Events, which are sets of outputs, and the choice of those that give the best bounds."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jax.typing import ArrayLike

from dpjax._core._types import Value
from dpjax._core._values import Release
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.auditing import _outputs as features
from dpjax.auditing._outputs import Code, Coordinate, Sampler

_COORDINATES = 8  # At most this many numbers of an output have scores of their own.
# Log likelihood ratios are rounded to multiples of `_RESOLUTION` times the largest ratio, so that
# ratios that differ only by floating-point errors become equal.
_RESOLUTION = 2.0**-10
_NAMED = 3  # A description names at most this many kinds of output.


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A number for every output of a batch. Comparing it with a threshold defines an event.

    `evaluate` maps a batch of outputs to numbers; an output with score NaN is in no event.
    `describe` describes the event that the score is at least (True) or at most (False) a threshold.
    """

    evaluate: Callable[[Value], np.ndarray]
    describe: Callable[[bool, float], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """The outputs from which scores are learned.

    `here` contains outputs for `value`, and `there` contains outputs for `neighbor`.
    """

    sampler: Sampler
    value: Value
    neighbor: Value
    here: Value
    there: Value
    batch: int


def propose(evidence: Evidence) -> Iterator[Score]:
    """Yields all scores, with the simplest descriptions first."""
    if hasattr(evidence.sampler.mechanism, "log_prob"):
        yield _likelihood_ratio(evidence)
    gaps, shifts = _gaps(evidence), _shifts(evidence)
    directions = shifts if gaps is None else gaps
    chosen = features.coordinates(evidence.here, list(map(np.abs, directions)), _COORDINATES)
    for coordinate in chosen:
        yield _number(coordinate.name, lambda x, c=coordinate: c(x).astype(float))
    yield _number("count of NaN", _count_nan)
    yield _frequencies(features.whole_output(evidence.here, evidence.there), evidence)
    tables = [[_frequencies(code, evidence) for code in _kinds(c, evidence)] for c in chosen]
    if len(chosen) > 1:
        if gaps is not None:
            yield _number("output . (value - neighbor)", _projection(gaps))
        yield _number("output . (difference of the mean outputs)", _projection(shifts))
        yield _sum_of([coarsest for coarsest, *_ in tables])
    for coordinate, of_one in zip(chosen, tables, strict=True):
        yield from of_one
        # If a number has bins, it takes many values, so its bits may distinguish the two inputs.
        if len(of_one) > 1:
            yield from _bit_scores(coordinate, evidence)


def _number(name: str, evaluate: Callable[[Value], np.ndarray]) -> Score:
    return Score(evaluate, lambda least, t: f"{name} {'>=' if least else '<='} {t:.6g}")


def _likelihood_ratio(evidence: Evidence) -> Score:
    def ratios(outputs: Value) -> np.ndarray:
        pair = evidence.value, evidence.neighbor
        return evidence.sampler.log_ratios(outputs, *pair, evidence.batch)

    learned = np.concatenate([ratios(evidence.here), ratios(evidence.there)])
    unit = _RESOLUTION * np.max(np.abs(learned), initial=0.0, where=np.isfinite(learned))
    unit = unit if unit > 0 else 1.0
    return _number(
        "log likelihood ratio of value over neighbor",
        lambda outputs: np.round(ratios(outputs) / unit) * unit,
    )


def _count_nan(outputs: Value) -> np.ndarray:
    found = [np.isnan(matrix.astype(float)) for matrix in features.matrices(outputs)]
    return np.sum([np.sum(nan, axis=1) for nan in found], axis=0, dtype=float)


def _kinds(coordinate: Coordinate, evidence: Evidence) -> list[Code]:
    """Returns codes of a number: its exact value if it takes few values, or else bins."""
    here, there = evidence.here, evidence.there
    if features.takes_few_values(coordinate, here, there):
        return [features.exact_value(coordinate, here, there)]
    return [features.bins(coordinate, here, there, count) for count in features.BINS]


def _bit_scores(coordinate: Coordinate, evidence: Evidence) -> Iterator[Score]:
    """Yields scores that depend on the bits in which a number is stored."""
    yield _grain(coordinate)
    yield _frequencies(features.grain_and_binade(coordinate), evidence)
    yield _frequencies(features.low_bits_and_binade(coordinate), evidence)
    ends = _ends(evidence)
    pair = ends and tuple(end[coordinate.leaf][coordinate.index] for end in ends)
    code = features.off_the_grid(coordinate, evidence.here, evidence.there, pair)
    yield _frequencies(code, evidence)
    if pair is not None:
        yield _frequencies(features.grains_of_differences(coordinate, *pair), evidence)


def _grain(coordinate: Coordinate) -> Score:
    def describe(least: bool, threshold: float) -> str:
        if least:
            return f"{coordinate.name} is a multiple of 2^{threshold:.0f}"
        return f"{coordinate.name} is not a multiple of 2^{threshold + 1:.0f}"

    return Score(features.grain(coordinate), describe)


def _frequencies(code: Code, evidence: Evidence) -> Score:
    """Scores an output by the log ratio of its code's frequencies under the two values.

    The score is 0 for a code that was not seen.
    """
    here, there = code.encode(evidence.here), code.encode(evidence.there)
    kinds, counts = np.unique(np.concatenate([here, there]), return_counts=True)
    # A code that occurs only once is not evidence for either value.
    kinds, counts = kinds[counts > 1], counts[counts > 1]
    # One is added to each count. Otherwise a rare code that occurs under only one value would have
    # an infinite score.
    ratios = np.log1p(_occurrences(kinds, here)) - np.log1p(_occurrences(kinds, there))

    def evaluate(outputs: Value) -> np.ndarray:
        if not len(kinds):
            return np.zeros(len(features.matrices(outputs)[0]))
        codes = code.encode(outputs)
        position = np.minimum(np.searchsorted(kinds, codes), len(kinds) - 1)
        return np.where(kinds[position] == codes, ratios[position], 0.0)

    def describe(least: bool, threshold: float) -> str:
        inside = ratios >= threshold if least else ratios <= threshold
        # Codes that were not seen have ratio 0 and cannot be listed. If the event contains them,
        # the complement of the event is listed instead.
        inverted = threshold <= 0 if least else threshold >= 0
        listed = np.flatnonzero(inside ^ inverted)
        commonest = listed[np.argsort(-counts[listed], kind="stable")][:_NAMED]
        named = ", ".join(code.label(int(kinds[i])) for i in commonest)
        more = len(listed) - len(commonest)
        more = f", and {more} more" if more else ""
        return f"{code.name} {'not in' if inverted else 'in'} {{{named}{more}}}"

    return Score(evaluate, describe)


def _occurrences(kinds: np.ndarray, codes: np.ndarray) -> np.ndarray:
    codes = np.sort(codes)
    return np.searchsorted(codes, kinds, "right") - np.searchsorted(codes, kinds, "left")


def _sum_of(tables: list[Score]) -> Score:
    """Adds up scores, each a log likelihood ratio of one number of an output.

    The sum would be the log likelihood ratio of the output if its numbers were independent.
    """

    def evaluate(outputs: Value) -> np.ndarray:
        return np.sum([table.evaluate(outputs) for table in tables], axis=0)

    return _number("sum of the log ratios of frequencies of every number", evaluate)


def _projection(directions: list[np.ndarray]) -> Callable[[Value], np.ndarray]:
    def evaluate(outputs: Value) -> np.ndarray:
        with np.errstate(all="ignore"):  # An output with score NaN is in no event.
            terms = [
                matrix.astype(np.result_type(matrix, np.float32)) @ direction
                for matrix, direction in zip(features.matrices(outputs), directions, strict=True)
            ]
        return np.sum(terms, axis=0, dtype=float)

    return evaluate


def _ends(evidence: Evidence) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Returns the flat arrays of value and neighbor; None if shapes are not those of outputs."""
    ends = evidence.value, evidence.neighbor
    shapes = jax.tree.map(np.shape, features.rows_of(evidence.here, 0))
    if any(jax.tree.map(np.shape, end) != shapes for end in ends):
        return None
    value, neighbor = (list(map(np.ravel, jax.tree.leaves(end))) for end in ends)
    return value, neighbor


def _gaps(evidence: Evidence) -> list[np.ndarray] | None:
    """Returns value - neighbor; None if it is 0, or if its shapes are not those of the outputs."""
    ends = _ends(evidence)
    if ends is None:
        return None
    pairs = zip(*ends, strict=True)
    with np.errstate(all="ignore"):
        gaps = [np.nan_to_num(x.astype(float) - y.astype(float)) for x, y in pairs]
    return gaps if any(np.any(gap != 0) for gap in gaps) else None


def _shifts(evidence: Evidence) -> list[np.ndarray]:
    """Returns, for every number of an output, the difference of means divided by the variance."""
    matrices = (features.matrices(outputs) for outputs in (evidence.here, evidence.there))
    shifts: list[np.ndarray] = []
    for here, there in zip(*matrices, strict=True):
        with np.errstate(all="ignore"):
            shift = here.mean(axis=0, dtype=float) - there.mean(axis=0, dtype=float)
            spread = here.var(axis=0, dtype=float) + there.var(axis=0, dtype=float)
            shifts.append(np.nan_to_num(shift / (spread + 1e-6 * np.max(spread) + 1e-30)))
    return shifts


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
        """Returns a lower bound on epsilon or delta, from limits of the probabilities of an event.

        Args:
            lower: a lower limit of the event's probability for one value of the input.
            upper: an upper limit of the event's probability for the other value.

        Returns:
            The lower bound. If it is below 0, it proves nothing.
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

    An event is the set of outputs whose score is at least, or at most, a threshold. While an event
    is being chosen, the error probability is divided by a number from `_CAUTIONS`, its caution. For
    each caution, at most one event is returned, the largest caution first. A smaller caution admits
    rarer events. Scores must be in order of preference.
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
    # Shape (2, 2, thresholds). The first index selects the value or its neighbor. The second index
    # selects the number of scores that are at least the threshold, or at most the threshold.
    counts: np.ndarray


def _tally(score: Score, here: Value, there: Value, experiment: Experiment) -> _Tally:
    samples = [np.sort(x[~np.isnan(x)]) for x in map(score.evaluate, (here, there))]
    thresholds = _thresholds(np.concatenate(samples))
    at_least = [len(x) - np.searchsorted(x, thresholds, "left") for x in samples]
    at_most = [np.searchsorted(x, thresholds, "right") for x in samples]
    counts = np.stack([at_least, at_most], axis=1)
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
            tally.score.describe(at_least, threshold), _Threshold(tally.score, at_least, threshold)
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


def _thresholds(sample: np.ndarray) -> np.ndarray:
    distinct = np.unique(sample)
    if len(distinct) <= _EVEN + 2 * _TAIL:
        # If all scores are NaN, the event of every threshold is empty, so one arbitrary threshold
        # is enough.
        return distinct if len(distinct) else np.zeros(1)
    ends = np.geomspace(1, len(sample), _TAIL) - 1
    ranks = np.concatenate([np.linspace(0, len(sample) - 1, _EVEN), ends, len(sample) - 1 - ends])
    return np.unique(np.sort(sample)[np.round(ranks).astype(int)])
