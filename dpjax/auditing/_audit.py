"""Lower bounds on epsilon and delta from what a mechanism does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import clopper_pearson_lower, clopper_pearson_upper
from dpjax.auditing._batched_outputs import SamplePlan, Sampler
from dpjax.auditing._claims import StatedGrid, claim_of
from dpjax.auditing._confidence_limits import Question
from dpjax.auditing._events import ChosenEvent, Experiment, choose
from dpjax.auditing._result import AuditResult
from dpjax.auditing._scores import Evidence, propose
from dpjax.random._facade import check_sampling_key

Pair = tuple[Any, Any]
Pairs = Iterable[Pair] | Callable[[jax.Array], Iterable[Pair]]

_LEAST_SAMPLES = 100
# Samples of each value of a candidate pair, to see whether it is worth the audit.
_PILOT = 2**14
# The part of the error that goes to every event but the first one.
_LATER = 1 / 8


def audit(
    key: jax.Array,
    mechanism: Callable[[jax.Array, Any], Any],
    *,
    value: Any = None,
    neighbor: Any = None,
    pairs: Pairs | None = None,
    delta: float | None = None,
    at_epsilon: float | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
    jit: bool = True,
) -> AuditResult:
    """Bounds from below what a mechanism gives away, by the distribution of its outputs.

    Half of the samples chooses up to three events, from a common one to one that is rare and shows
    much; the other half bounds their probabilities under the two values by Clopper-Pearson limits,
    which share the error. The events: high likelihood ratios where the mechanism has a
    `log_prob`, thresholds, coarse and fine intervals of single numbers of an output and of
    projections, exact outputs, the stored bits of numbers, by which noise in floating point gives
    itself away, and numbers off the grid that nearly all of them lie on. Either value may be the
    one that an event speaks for. Where the mechanism states the grid of its outputs
    (`mechanism.grids`), those that are not on it are counted: one of them shows that what runs is
    not what was proved.

    Args:
        key: a typed key; the samples are fresh only if it was used for nothing else.
        mechanism: `mechanism(key, value)` gives a release or any pytree of real arrays, as a pure
            JAX function: it runs under `jit` and `vmap` over keys.
        value: an input of the mechanism, a pytree of real arrays.
        neighbor: another; the bound speaks of this pair, in both directions.
        pairs: instead of `value` and `neighbor`, candidates among which the audit looks for the
            worst: an iterable of pairs, or a function that makes one from a key. The pair is chosen
            by a pilot on samples of its own.
        delta: where to bound epsilon; by default the delta of `mechanism.guarantee`, or 0.
        at_epsilon: to bound delta at this epsilon instead.
        samples: how many outputs to draw of each value, the pilot aside, at least 100.
        confidence: of the bound, in (0, 1).
        jit: whether to run the mechanism compiled, or operation by operation, as it runs outside
            of `jit`. It tells in the last bits of noise in floating point.

    Returns:
        An `AuditResult`.

    Raises:
        TypeError: if the key is not a typed key of a usable implementation, outputs are not real
            arrays, or not exactly one of a pair and candidates, or both delta and at_epsilon, are
            given.
        ValueError: if a number is out of range, there is no candidate, or the mechanism's outputs
            for the two values differ in shape or dtype.

    Formal guarantees:
        With probability at least `confidence` over the samples, the bound is below the truth for
        the pair, whatever event was chosen: it is fixed before the samples that bound it. It says
        that a mechanism is broken, never that it is private. For a mechanism calibrated by samples
        (gamma above 0) a bound above its epsilon is no contradiction unless the pair is within
        the sensitivity.

        At epsilon 1, the bound on Laplace noise or randomized response reaches .95 of it with
        30,000 samples and .99 with 800,000. With Laplace noise at epsilon 1, 100,000 samples show
        an interval of mass .0036 that is never drawn; noise in floating point in one of 2^10 draws
        takes 400,000, or one draw where a grid is stated.

    Source:
        Clopper and Pearson (1934); Ding, Wang, Wang, Zhang and Kifer (2018), who split the samples;
        Mironov (2012) for the bits.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> result = dpjax.auditing.audit(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.randomized_response(1.0),
        ...     value=jnp.asarray([0]),
        ...     neighbor=jnp.asarray([1]),
        ... )
        >>> 0.9 < result.epsilon <= 1.0
        True
    """
    check_sampling_key(key)
    samples, confidence = check_effort(samples, confidence)
    question = _question(mechanism, delta, at_epsilon)
    key_pairs, key_pilot, key_audit = jax.random.split(key, 3)
    candidates = _candidates(key_pairs, value, neighbor, pairs)
    sampler = Sampler(_checks.function("mechanism", mechanism), jit)
    pair = _worst(key_pilot, sampler, candidates, question, 1 - confidence)
    return _audit_pair(key_audit, sampler, pair, question, samples, confidence)


def audit_curve(
    key: jax.Array,
    mechanism: Callable[[jax.Array, Any], Any],
    *,
    value: Any,
    neighbor: Any,
    delta: float | None = None,
    at_epsilon: float | None = None,
    samples: Sequence[int] = (1_000, 3_000, 10_000, 30_000, 100_000),
    confidence: float = 0.95,
    jit: bool = True,
) -> tuple[AuditResult, ...]:
    """Audits with more and more samples, for `dpjax.plotting.audit_curve`.

    Args:
        key: a typed key.
        mechanism: as for `audit`.
        value: an input of the mechanism.
        neighbor: another.
        delta: where to bound epsilon, as for `audit`.
        at_epsilon: to bound delta at this epsilon instead.
        samples: how many outputs to draw of each value, once for every audit.
        confidence: of every bound by itself.
        jit: whether to run the mechanism compiled, as for `audit`.

    Returns:
        An `AuditResult` for every entry of `samples`.

    Raises:
        TypeError: as `audit` does.
        ValueError: as `audit` does, or if `samples` is empty.

    Formal guarantees:
        Those of `audit`, for every result by itself: no samples are shared. Of many results, the
        highest one holds with less confidence.

    Source:
        None.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> results = dpjax.auditing.audit_curve(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.randomized_response(1.0),
        ...     value=jnp.asarray([0]),
        ...     neighbor=jnp.asarray([1]),
        ...     samples=(1_000, 10_000),
        ... )
        >>> [result.samples for result in results]
        [1000, 10000]
    """
    check_sampling_key(key)
    efforts = [check_effort(count, confidence) for count in samples]
    if not efforts:
        raise ValueError("samples must not be empty")
    question = _question(mechanism, delta, at_epsilon)
    sampler = Sampler(_checks.function("mechanism", mechanism), jit)
    pair = _checked_pair((value, neighbor))
    return tuple(
        _audit_pair(one_key, sampler, pair, question, count, confidence)
        for one_key, (count, confidence) in zip(
            jax.random.split(key, len(efforts)), efforts, strict=True
        )
    )


def check_effort(samples: Any, confidence: Any) -> tuple[int, float]:
    """A number of samples and a confidence that an audit can work with."""
    return (
        _checks.integer("samples", samples, least=_LEAST_SAMPLES),
        _checks.fraction("confidence", confidence),
    )


def _question(mechanism: Any, delta: Any, at_epsilon: Any) -> Question:
    if at_epsilon is not None:
        if delta is not None:
            raise TypeError("delta and at_epsilon must not both be given: one is to be bounded")
        return Question("delta", _checks.non_negative("at_epsilon", at_epsilon))
    claim = claim_of(mechanism)
    if delta is None:
        delta = 0.0 if claim is None else float(claim.delta)
    delta = _checks.non_negative("delta", delta)
    if delta >= 1:
        raise ValueError(f"delta must be below 1, got {delta:g}")
    return Question("epsilon", delta)


def _candidates(key: jax.Array, value: Any, neighbor: Any, pairs: Pairs | None) -> list[Pair]:
    if pairs is None:
        if value is None or neighbor is None:
            raise TypeError("value and neighbor must be given, or pairs")
        return [_checked_pair((value, neighbor))]
    if value is not None or neighbor is not None:
        raise TypeError("value and neighbor must not be given along with pairs")
    found = [_checked_pair(pair) for pair in (pairs(key) if callable(pairs) else pairs)]
    if not found:
        raise ValueError("pairs must hold at least one pair")
    return found


def _checked_pair(pair: Pair) -> Pair:
    value, neighbor = pair
    return _checks.real_arrays("value", value), _checks.real_arrays("neighbor", neighbor)


def _worst(
    key: jax.Array, sampler: Sampler, candidates: list[Pair], question: Question, error: float
) -> Pair:
    """The pair that shows the most in a small audit."""
    if len(candidates) == 1:
        return candidates[0]
    promises = []
    for pilot_key, pair in zip(jax.random.split(key, len(candidates)), candidates, strict=True):
        plan = sampler.plan(pilot_key, *pair, _PILOT)
        experiment = Experiment(question, error, plan.learning)
        first, *_ = _learn(pilot_key, sampler, pair, plan, experiment)
        promises.append((first.caution, first.promise))
    return candidates[promises.index(max(promises))]


def _learn(
    key: jax.Array, sampler: Sampler, pair: Pair, plan: SamplePlan, experiment: Experiment
) -> list[ChosenEvent]:
    """The events to test: proposed by one sample, chosen by another."""
    keys = jax.random.split(key, 4)
    value, neighbor = pair
    here, there, here_again, there_again = (
        sampler.draw(one_key, x, plan.learning, plan.batch)
        for one_key, x in zip(keys, (value, neighbor, value, neighbor), strict=True)
    )
    evidence = Evidence(sampler, value, neighbor, here, there, plan.batch)
    return choose(propose(evidence), here_again, there_again, experiment)


def _audit_pair(
    key: jax.Array,
    sampler: Sampler,
    pair: Pair,
    question: Question,
    samples: int,
    confidence: float,
) -> AuditResult:
    """Chooses events, then bounds their probabilities by samples that they have not seen."""
    key_learn, *keys_bound = jax.random.split(key, 3)
    plan = sampler.plan(key, *pair, samples)
    error, trials = 1 - confidence, plan.bounding
    choices = _learn(key_learn, sampler, pair, plan, Experiment(question, error, trials))
    grid = StatedGrid.of(sampler.mechanism, pair[0])
    counted = [*(choice.event.predicate for choice in choices), grid.misses]
    hits = np.stack(
        [
            _hits(counted, sampler.batches(one_key, x, trials, plan.batch))
            for one_key, x in zip(keys_bound, pair, strict=True)
        ]
    )
    bounds = [
        _limits(choice, hits[:, i], trials, part * error, question)
        for i, (choice, part) in enumerate(zip(choices, _parts(len(choices)), strict=True))
    ]
    best = max(range(len(bounds)), key=lambda i: bounds[i][0])
    choice, (bound, lower, upper) = choices[best], bounds[best]
    epsilon, delta = (bound, question.at) if question.bounded == "epsilon" else (question.at, bound)
    return AuditResult(
        epsilon=epsilon,
        delta=delta,
        bounded=question.bounded,
        claimed=_claimed(sampler.mechanism, question),
        confidence=confidence,
        samples=samples,
        event=choice.event,
        swapped=choice.swapped,
        probability=lower,
        other_probability=upper,
        off_grid=int(hits[:, -1].sum()),
        grid=str(grid),
        value=pair[0],
        neighbor=pair[1],
    )


def _parts(count: int) -> list[float]:
    """Of the error, for so many events; the first one is the likeliest to show the most."""
    rest = count - 1
    return [1 - _LATER * rest, *[_LATER] * rest]


def _limits(
    choice: ChosenEvent, hits: np.ndarray, trials: int, error: float, question: Question
) -> tuple[float, float, float]:
    """The bound that an event gives, and the limits of its probabilities."""
    likelier, other = hits[::-1] if choice.swapped else hits
    # Each limit fails with its share of the error, so both hold but for that error.
    lower = float(clopper_pearson_lower(likelier, trials, choice.share * error))
    upper = float(clopper_pearson_upper(other, trials, (1 - choice.share) * error))
    return max(0.0, float(question.answer(lower, upper))), lower, upper


def _hits(predicates: list[Callable[[Any], np.ndarray]], batches: Iterable[Any]) -> np.ndarray:
    """How many outputs are in every one of some events."""
    found = [[np.sum(predicate(outputs)) for predicate in predicates] for outputs in batches]
    return np.sum(found, axis=0)


def _claimed(mechanism: Any, question: Question) -> float | None:
    """The promise that a bound contradicts if it is higher."""
    claim = claim_of(mechanism)
    if claim is None:
        return None
    epsilon, delta = float(claim.epsilon), float(claim.delta)
    if question.bounded == "epsilon":
        return epsilon if question.at >= delta else None
    return delta if question.at >= epsilon else None
