"""A claim of privacy as an assertion, for test suites."""

from collections.abc import Callable, Iterable

from dpjax._core import _checks
from dpjax._core._types import Key, Value
from dpjax._core._values import Release
from dpjax.auditing._audit import AuditResult, Pair, Pairs, as_clamped, audit, claim_of
from dpjax.auditing._tested_values import ROUNDING_OF_DISTANCE
from dpjax.sensitivity._norms import distance


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
            raise TypeError("delta must come with an epsilon, got delta alone")
        claim = claim_of(mechanism)
        if claim is None:
            raise TypeError("epsilon must be given if the mechanism has no guarantee")
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
            f"this mechanism states that its outputs are {result.grid}, and its claim is about"
            f" such outputs; {result.off_grid:,} outputs are not: {result}"
        )
    return result


def _within_claim(mechanism: object, pairs: Pairs) -> Pairs:
    """The same pairs. Raises an error at a pair that the mechanism's guarantee does not cover."""

    def checked(key: Key) -> Iterable[Pair]:
        for pair in pairs(key) if callable(pairs) else pairs:
            _check_distance(mechanism, pair)
            yield pair

    return checked


def _check_distance(mechanism: object, pair: Pair) -> None:
    norm, sensitivity = (getattr(mechanism, name, None) for name in ("norm", "sensitivity"))
    if norm is None or sensitivity is None:
        return  # The mechanism does not say which pairs its guarantee covers.
    value, neighbor = (as_clamped(mechanism, _checks.real_arrays("value", x)) for x in pair)
    length, most = float(distance(norm, value, neighbor)), float(sensitivity.value)
    if length > most * (1 + ROUNDING_OF_DISTANCE):
        raise ValueError(
            f"neighbor must be within the sensitivity {most:g} of value, got distance {length:g}:"
            " the mechanism's guarantee does not cover such a pair"
        )
