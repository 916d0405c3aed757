"""Scores of outputs: high if an output is likelier under value, low if under neighbor."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from dpjax._core._types import Value
from dpjax.auditing import _outputs as features
from dpjax.auditing._outputs import Code, Coordinate, Sampler

_COORDINATES = 8  # At most this many numbers of an output have scores of their own.
# Log likelihood ratios are rounded to this fraction of the largest ratio, so that ratios that
# differ only by rounding become equal.
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
    gaps = _gaps(evidence)
    directions = _shifts(evidence) if gaps is None else gaps
    chosen = features.coordinates(evidence.here, list(map(np.abs, directions)), _COORDINATES)
    for coordinate in chosen:
        yield _number(coordinate.name, lambda x, c=coordinate: c(x).astype(float))
    yield _number("count of NaN", _count_nan)
    yield _frequencies(features.whole_output(evidence.here, evidence.there), evidence)
    tables = [[_frequencies(code, evidence) for code in _kinds(c, evidence)] for c in chosen]
    if len(chosen) > 1:
        yield from _directions(evidence)
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


def _directions(evidence: Evidence) -> Iterator[Score]:
    gaps = _gaps(evidence)
    if gaps is not None:
        yield _number("output . (value - neighbor)", _projection(gaps))
    yield _number("output . (difference of the mean outputs)", _projection(_shifts(evidence)))


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
    """Returns `value` and `neighbor`; None if outputs have another structure or other shapes."""
    value = features.value_like(evidence.here, evidence.value)
    neighbor = features.value_like(evidence.here, evidence.neighbor)
    return None if value is None or neighbor is None else (value, neighbor)


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
