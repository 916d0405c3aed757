"""`audit`: lower bounds on epsilon and delta from outputs; `verify`: a bound as an assertion."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Guarantee, Release, guarantee_in
from dpjax._exact._numerics import is_float
from dpjax.auditing._events import (
    ChosenEvent,
    Event,
    Evidence,
    Experiment,
    Question,
    choose,
    propose,
)
from dpjax.auditing._outputs import SamplePlan, Sampler, exact_numbers, lowest_set_bit, matrices
from dpjax.random._keys import check_sampling_key
from dpjax.sensitivity._norms import distance


def claim_of(mechanism: object) -> Guarantee | None:
    """Returns the guarantee of a mechanism; None if it has none or an infinite epsilon."""
    guarantee = guarantee_in(mechanism)
    return guarantee if guarantee and math.isfinite(float(guarantee.epsilon)) else None


def as_clamped(mechanism: object, value: Value) -> Value:
    """Returns the value to which noise is added, by `mechanism.clamped`.

    If there is no method `clamped`, NaN becomes 0, and infinities become the largest floats.
    """
    clamped = getattr(mechanism, "clamped", None)
    if clamped is not None:
        return clamped(value)
    return jax.tree.map(lambda leaf: jnp.nan_to_num(leaf) if is_float(leaf) else leaf, value)


@dataclasses.dataclass(frozen=True)
class StatedGrid:
    """The grid that a mechanism states for each array of its outputs."""

    # The spacings of the grids are 2^exponent; None for an array without a grid.
    exponents: tuple[int | None, ...]

    @classmethod
    def of(cls, mechanism: object, value: Value) -> "StatedGrid":
        """Reads `mechanism.grids`. If there is no method `grids`, no array has a grid."""
        grids = getattr(mechanism, "grids", None)
        spacings = () if grids is None else map(float, jax.tree.leaves(grids(value)))
        return cls(tuple(math.frexp(x)[1] - 1 if x > 0 else None for x in spacings))

    def misses(self, outputs: PyTree) -> np.ndarray:
        """Returns which outputs of a batch are not on a grid of half the stated spacing.

        Half of the spacing is allowed, because a compiled mechanism rounds differently, and may
        then choose a grid with half of the spacing that it states.
        """
        arrays = matrices(outputs)
        missed = np.zeros(len(arrays[0]), bool)
        for array, exponent in zip(arrays, self.exponents, strict=False):
            if exponent is not None:
                lowest = lowest_set_bit(exact_numbers(array))
                missed |= np.any(lowest < exponent - 1, axis=1)
        return missed

    def __str__(self) -> str:
        powers = sorted({x for x in self.exponents if x is not None})
        return "multiples of " + " or ".join(f"2^{power}" for power in powers) if powers else ""


@dataclasses.dataclass(frozen=True, eq=False)
class AuditResult:
    """A statistical lower bound on epsilon or delta, and the event that proves it.

    Attributes:
        epsilon: the lower bound, or the epsilon at which delta was bounded.
        delta: the lower bound, or the delta at which epsilon was bounded.
        bounded: the name of the quantity that was bounded: "epsilon" or "delta".
        claimed: the mechanism's own claim for that quantity; None if it makes no claim.
        confidence: a lower bound on the probability, over the samples, that the bound is correct.
        samples: the number of outputs of each of the two values.
        event: the event whose probabilities were bounded.
        swapped: whether `event` is likelier under `neighbor` than under `value`.
        probability: a lower limit of the event's probability under the value where it is likelier.
        other_probability: an upper limit of the event's probability under the other value.
        value: the first input of the mechanism.
        neighbor: the second input.
        off_grid: the number of outputs, of either value, that are not on the grid that the
            mechanism states.
        grid: a description of that grid; empty if the mechanism states none.

    Formal guarantees:
        With probability at least `confidence` over the samples, every (epsilon', delta')-DP claim
        below the bound is false for the pair `value`, `neighbor`. A low bound proves nothing: a
        mechanism may reveal more on another pair, or by an event that was not tried.
    """

    epsilon: float
    delta: float
    bounded: str
    claimed: float | None
    confidence: float
    samples: int
    event: Event
    swapped: bool
    probability: float
    other_probability: float
    value: Value
    neighbor: Value
    off_grid: int = 0
    grid: str = ""

    @property
    def bound(self) -> float:
        """The lower bound: `epsilon` or `delta`, as `bounded` says."""
        return self.epsilon if self.bounded == "epsilon" else self.delta

    def __str__(self) -> str:
        at = ("delta", self.delta) if self.bounded == "epsilon" else ("epsilon", self.epsilon)
        likelier, other = ("neighbor", "value") if self.swapped else ("value", "neighbor")
        claimed = "" if self.claimed is None else f", claimed {self.claimed:.6g}"
        strayed = f"; {self.off_grid:,} outputs are not {self.grid}" if self.off_grid else ""
        return (
            f"{self.bounded} is at least {self.bound:.4g} at {at[0]} {at[1]:.6g}{claimed}"
            f" (confidence {self.confidence:.8g}, {self.samples:,} samples of each value):"
            f" the event [{self.event.description}] has probability at least"
            f" {self.probability:.4g} under {likelier}, at most {self.other_probability:.4g}"
            f" under {other}{strayed}"
        )

    def __repr__(self) -> str:
        return f"AuditResult({self})"


Pair = tuple[Value, Value]
Pairs = Iterable[Pair] | Callable[[Key], Iterable[Pair]]

_LEAST_SAMPLES = 100
# A bound on the relative rounding error of a distance between floating-point values.
ROUNDING_OF_DISTANCE = 1e-6
# The number of samples of each value in the pilot audit, which chooses among candidate pairs.
_PILOT = 2**14
# An audit tests a few events. This fraction of the failure probability is allotted to each event
# after the first. The first event gets the rest.
_LATER = 1 / 8


def audit(
    key: Key,
    mechanism: Callable[[Key, Value], Release | Value],
    *,
    value: Value | None = None,
    neighbor: Value | None = None,
    pairs: Pairs | None = None,
    delta: float | None = None,
    at_epsilon: float | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
    jit: bool = True,
) -> AuditResult:
    """Measures a lower bound on epsilon, or on delta, from the outputs of a mechanism.

    It returns the bound, and does not compare it with a claim; `verify` raises an error if the
    bound refutes a claim. `check_conformance` checks a factory of mechanisms, and everything that
    the mechanisms claim about themselves.

    Half of the samples are used to choose up to three events, from a common event to a rare but
    revealing one. The other half is used to bound the probabilities of these events under the two
    values. The bounds are Clopper-Pearson limits that together fail with probability at most 1 -
    confidence. The events are chosen from:

    - high likelihood ratios, if the mechanism has a `log_prob`;
    - thresholds, and coarse and fine intervals, of single numbers and of projections;
    - exact outputs;
    - stored bits of numbers, which reveal noise in floating point;
    - numbers that are not on the grid that contains nearly all numbers.

    An event may be likelier under either value. If the mechanism states the grid of its outputs
    (`mechanism.grids`), the audit counts the outputs that are not on that grid. A single such
    output shows that the program does not compute the proved mechanism.

    Args:
        key: a typed key. Samples are fresh only if nothing else uses the key.
        mechanism: a pure JAX function `mechanism(key, value)` that returns a release or any pytree
            of real arrays. It runs under `jit` and `vmap` over keys.
        value: an input of the mechanism, a pytree of real arrays.
        neighbor: another input; the bound is about this pair, in both directions.
        pairs: candidates for the worst pair, instead of `value` and `neighbor`: an iterable of
            pairs, or a function from a key to an iterable. A pilot with its own samples chooses one
            of them.
        delta: the delta at which to bound epsilon; by default the delta of `mechanism.guarantee`,
            or 0.
        at_epsilon: bounds delta at this epsilon, instead of bounding epsilon.
        samples: the number of outputs of each value, at least 100; the pilot uses more.
        confidence: the confidence of the bound, in (0, 1).
        jit: whether to compile the mechanism, or to run its operations one by one. The last bits of
            noise in floating point depend on that.

    Returns:
        An `AuditResult`.

    Raises:
        TypeError: if the key is not a typed key of a supported implementation, or outputs are not
            real arrays; if both a pair and candidates are given, or neither; or if both delta and
            at_epsilon are given.
        ValueError: if a number is out of range, `pairs` is empty, or the mechanism's outputs for
            the two values differ in shape or dtype.

    Formal guarantees:
        With probability at least `confidence` over the samples, the bound does not exceed the true
        epsilon or delta of the pair. The samples that bound an event are drawn after it is chosen,
        so this is true for any event. An audit can show that a mechanism is broken, but never that
        it is private. If a mechanism was calibrated by samples (gamma above 0), a bound above its
        epsilon contradicts its claim only for a pair within the sensitivity.

        At epsilon 1, the bound for Laplace noise or randomized response reaches .95 with 30,000
        samples, and .99 with 800,000. For Laplace noise, 100,000 samples detect that an interval of
        probability .0036 is never drawn. If one of 2^10 draws has floating-point noise, detection
        takes 400,000 samples, or a single such draw if the mechanism states a grid.

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
    samples = _checks.integer("samples", samples, least=_LEAST_SAMPLES)
    confidence = _checks.fraction("confidence", confidence)
    question = _question(mechanism, delta, at_epsilon)
    key_pairs, key_pilot, key_audit = jax.random.split(key, 3)
    candidates = _candidates(key_pairs, value, neighbor, pairs)
    sampler = Sampler(_checks.function("mechanism", mechanism), jit)
    pair = _worst(key_pilot, sampler, candidates, question, 1 - confidence)
    return _audit_pair(key_audit, sampler, pair, question, samples, confidence)


def audit_curve(
    key: Key,
    mechanism: Callable[[Key, Value], Release | Value],
    *,
    value: Value,
    neighbor: Value,
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
        neighbor: another input.
        delta: the delta at which to bound epsilon, as for `audit`.
        at_epsilon: bounds delta at this epsilon, instead of bounding epsilon.
        samples: the number of outputs of each value, for every audit.
        confidence: the confidence of every single bound.
        jit: whether to run the mechanism compiled, as for `audit`.

    Returns:
        An `AuditResult` for every entry of `samples`.

    Raises:
        TypeError: as for `audit`.
        ValueError: as for `audit`, or if `samples` is empty.

    Formal guarantees:
        Each single result has the guarantee of `audit`, and the results share no samples. The
        highest of many results has less confidence.

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
    counts = [_checks.integer("samples", count, least=_LEAST_SAMPLES) for count in samples]
    confidence = _checks.fraction("confidence", confidence)
    if not counts:
        raise ValueError("samples must list at least one sample size, got none")
    question = _question(mechanism, delta, at_epsilon)
    sampler = Sampler(_checks.function("mechanism", mechanism), jit)
    pair = _checked_pair((value, neighbor))
    return tuple(
        _audit_pair(one_key, sampler, pair, question, count, confidence)
        for one_key, count in zip(jax.random.split(key, len(counts)), counts, strict=True)
    )


def _question(mechanism: object, delta: float | None, at_epsilon: float | None) -> Question:
    if at_epsilon is not None:
        if delta is not None:
            raise TypeError(
                "delta and at_epsilon must not both be given: the audit bounds epsilon at a given"
                " delta, or delta at a given epsilon"
            )
        return Question("delta", _checks.non_negative("at_epsilon", at_epsilon))
    claim = claim_of(mechanism)
    # At the claimed delta, a lower bound above the claimed epsilon refutes the claim.
    by_default = 0.0 if claim is None else float(claim.delta)
    at: float = _checks.non_negative("delta", by_default if delta is None else delta)
    if at >= 1:
        raise ValueError(f"delta must be below 1, got {at:g}")
    return Question("epsilon", at)


def _candidates(
    key: Key, value: Value | None, neighbor: Value | None, pairs: Pairs | None
) -> list[Pair]:
    if pairs is None:
        if value is None or neighbor is None:
            raise TypeError("either value and neighbor, or pairs, must be given, got neither")
        return [_checked_pair((value, neighbor))]
    if value is not None or neighbor is not None:
        raise TypeError("either value and neighbor, or pairs, must be given, got both")
    found = [_checked_pair(pair) for pair in (pairs(key) if callable(pairs) else pairs)]
    if not found:
        raise ValueError("pairs must contain at least one pair, got none")
    return found


def _checked_pair(pair: Pair) -> Pair:
    value, neighbor = pair
    return _checks.real_arrays("value", value), _checks.real_arrays("neighbor", neighbor)


def _worst(
    key: Key, sampler: Sampler, candidates: list[Pair], question: Question, error: float
) -> Pair:
    """Returns the pair with the largest expected bound, judged by a small audit of each pair."""
    if len(candidates) == 1:
        return candidates[0]
    promises: list[tuple[float, float]] = []
    for pilot_key, pair in zip(jax.random.split(key, len(candidates)), candidates, strict=True):
        plan = sampler.plan(pilot_key, *pair, _PILOT)
        experiment = Experiment(question, error, plan.learning)
        first, *_ = _learn(pilot_key, sampler, pair, plan, experiment)
        # To choose an event, its error probability was divided by `caution`.
        # A larger caution means a more reliable event, so `max` compares cautions first. If they
        # are equal, it compares the expected bounds.
        promises.append((first.caution, first.promise))
    return candidates[promises.index(max(promises))]


def _learn(
    key: Key, sampler: Sampler, pair: Pair, plan: SamplePlan, experiment: Experiment
) -> list[ChosenEvent]:
    """Returns the events to test: one sample proposes them, a second sample chooses among them."""
    here, there, here_again, there_again = (
        sampler.draw(one_key, x, plan.learning, plan.batch)
        for one_key, x in zip(jax.random.split(key, 4), pair * 2, strict=True)
    )
    evidence = Evidence(sampler, *pair, here, there, plan.batch)
    return choose(propose(evidence), here_again, there_again, experiment)


def _audit_pair(
    key: Key, sampler: Sampler, pair: Pair, question: Question, samples: int, confidence: float
) -> AuditResult:
    """Chooses events, and then bounds their probabilities with fresh samples."""
    key_learn, *keys_bound = jax.random.split(key, 3)
    plan = sampler.plan(key, *pair, samples)
    error, trials = 1 - confidence, plan.bounding
    choices = _learn(key_learn, sampler, pair, plan, Experiment(question, error, trials))
    grid = StatedGrid.of(sampler.mechanism, pair[0])
    # The last count is the number of outputs that are not on the grid. It is not an event.
    counted = [*(choice.event.predicate for choice in choices), grid.misses]
    found = [
        np.sum([[np.sum(p(outputs)) for p in counted] for outputs in batches], axis=0)
        for batches in (
            sampler.batches(one_key, x, trials, plan.batch)
            for one_key, x in zip(keys_bound, pair, strict=True)
        )
    ]
    # The number of outputs in each event, for each value; shape (2, events).
    hits = np.stack(found)
    bounds: list[tuple[float, float, float]] = []
    for choice, part, counts in zip(choices, _parts(len(choices)), hits.T[:-1], strict=True):
        likelier, other = counts[::-1] if choice.swapped else counts
        experiment = Experiment(question, part * error, trials)
        bound, lower, upper = map(float, experiment.answer(likelier, other, choice.share))
        bounds.append((max(0.0, bound), lower, upper))
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
    """Returns the fraction of the error probability that is allotted to each event.

    The first event has the largest fraction, because it likely gives the best bound.
    """
    rest = count - 1
    return [1 - _LATER * rest, *[_LATER] * rest]


def _claimed(mechanism: object, question: Question) -> float | None:
    """Returns the claimed epsilon or delta; None if nothing is claimed about the question.

    A lower bound above this number refutes the claim.
    """
    claim = claim_of(mechanism)
    if claim is None:
        return None
    epsilon, delta = float(claim.epsilon), float(claim.delta)
    if question.bounded == "epsilon":
        return epsilon if question.at >= delta else None
    return delta if question.at >= epsilon else None


def verify(
    key: Key,
    mechanism: Callable[[Key, Value], Release | Value],
    *,
    value: Value | None = None,
    neighbor: Value | None = None,
    pairs: Pairs | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int = 100_000,
    confidence: float = 0.999_999,
    jit: bool = True,
) -> AuditResult:
    """Raises an error if an audit refutes a claim of (epsilon, delta)-differential privacy.

    This is `audit` as an assertion, for test suites: it reads the claim of the mechanism, refuses
    pairs that the claim does not cover, and raises AssertionError if the bound refutes the claim.
    If the claim is true, it fails once in a million runs. `check_conformance` checks more, but only
    mechanisms written for dpjax.

    Args:
        key: a typed key.
        mechanism: `mechanism(key, value)`, as for `audit`.
        value: an input of the mechanism, a pytree of real arrays.
        neighbor: another input, as far from `value` as one record of a database can move it.
        pairs: candidates for the worst pair instead of these two, as for `audit`.
        epsilon: the claim; by default from `mechanism.guarantee`.
        delta: the claim; by default 0 if epsilon is given, else from the guarantee.
        samples: the number of outputs of each value, at least 100.
        confidence: a lower bound on the probability that a true claim is not refuted.
        jit: whether to run the mechanism compiled, as for `audit`.

    Returns:
        The `AuditResult`, which does not refute the claim.

    Raises:
        AssertionError: if the audit refutes the claim; the message names the claim, the bound and
            the event. Also if an output is not on the grid that the mechanism states.
        TypeError: as for `audit`, or if the mechanism has no guarantee and none is given.
        ValueError: as for `audit`. Also if the claim is the mechanism's own and a pair is farther
            apart than its sensitivity, since the claim does not cover such pairs. Before
            measuring the distance, `mechanism.clamped` replaces NaN and numbers out of range.
            Without this method, NaN counts as 0, and an infinity as the largest float.

    Formal guarantees:
        A claim that is true for all pairs is refuted with probability at most 1 - confidence over
        the samples. A claim that passes may still be wrong. At epsilon 1, 100,000 samples refute a
        noise scale that is 10% too low, and floating-point noise.

    Source:
        See `audit`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> def noisy(key, count):
        ...     return count + jax.random.laplace(key)
        >>> dpjax.auditing.verify(
        ...     jax.random.key(0),
        ...     noisy,
        ...     value=jnp.asarray(0.0),
        ...     neighbor=jnp.asarray(1.0),
        ...     epsilon=1.0,
        ... )
        Traceback (most recent call last):
        ...
        AssertionError: this mechanism claims epsilon 1, delta 0; the auditor refutes it: ...
    """
    if epsilon is None:
        if delta is not None:
            raise TypeError("delta must be given together with epsilon, got only delta")
        claim = claim_of(mechanism)
        if claim is None:
            raise TypeError("epsilon must be given, as this mechanism states no finite epsilon")
        epsilon, delta = float(claim.epsilon), float(claim.delta)
        if value is not None and neighbor is not None:
            _check_distance(mechanism, (value, neighbor))
        pairs = pairs if pairs is None else _within_claim(mechanism, pairs)
    most = float(_checks.non_negative("epsilon", epsilon))
    result = audit(
        key,
        mechanism,
        value=value,
        neighbor=neighbor,
        pairs=pairs,
        delta=0.0 if delta is None else delta,
        samples=samples,
        confidence=confidence,
        jit=jit,
    )
    if result.epsilon > most:
        raise AssertionError(
            f"this mechanism claims epsilon {most:.6g}, delta {result.delta:.6g};"
            f" the auditor refutes it: {result}"
        )
    if result.off_grid:
        raise AssertionError(
            f"this mechanism claims that its outputs are {result.grid}, but {result.off_grid:,}"
            f" outputs are not: {result}"
        )
    return result


def _within_claim(mechanism: object, pairs: Pairs) -> Pairs:
    """Returns the same pairs, but raises an error at a pair that the guarantee does not cover."""

    def checked(key: Key) -> Iterable[Pair]:
        for pair in pairs(key) if callable(pairs) else pairs:
            _check_distance(mechanism, pair)
            yield pair

    return checked


def _check_distance(mechanism: object, pair: Pair) -> None:
    norm, sensitivity = (getattr(mechanism, name, None) for name in ("norm", "sensitivity"))
    if norm is None or sensitivity is None:
        return  # The mechanism does not state which pairs its guarantee covers.
    value, neighbor = (as_clamped(mechanism, _checks.real_arrays("value", x)) for x in pair)
    length, most = float(distance(norm, value, neighbor)), float(sensitivity.value)
    if length > most * (1 + ROUNDING_OF_DISTANCE):
        raise ValueError(
            f"neighbor must be within the sensitivity {most:g} of value, got distance {length:g}:"
            " the mechanism's guarantee does not cover such a pair"
        )
