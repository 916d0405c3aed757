"""The checks that every mechanism must pass, whether it is dpjax's own or a user's."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Scalar, Value
from dpjax._core._values import Guarantee, Mechanism, Release, Sensitivity
from dpjax._exact._numerics import is_float
from dpjax.auditing._audit import ROUNDING_OF_DISTANCE, as_clamped
from dpjax.auditing._moves import double_moves, single_moves, strange_values
from dpjax.auditing._outputs import in_batches, joined, matrices, rows_of
from dpjax.random._keys import check_key
from dpjax.sensitivity._norms import distance

_BATCH = 2**12  # The number of releases that one compiled program draws.
# The tests of single coordinates share this number of batches. A test of two coordinates uses one
# batch.
_BATCHES_OF_SINGLES = 64
# The allowed error of a mean, in standard errors. A test of a mean gives a false alarm once in 500
# million.
_SIGMAS = 6.0
# A bound on the relative rounding error of a ratio of two probabilities. The log probabilities are
# computed in float32, and outputs may have several coordinates.
_ROUNDING = 1e-4
# If a ratio exceeds e^6 times the median, the mean of the ratios depends on draws that are too rare
# to test.
_LARGEST_LOG_RATIO = 6.0
# Limits for fitting a density: the largest number of integer outcomes, the least number of draws of
# an outcome, and the largest number of float coordinates.
_MOST_OUTPUTS, _LEAST_SEEN, _MOST_FLOATS = 64, 64, 32
# The fitted density has `_NARROWER` times the standard deviation of the draws. It is truncated at
# the quantiles `_ENDS` of the draws.
_NARROWER, _ENDS = 0.8, (0.01, 0.99)


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """The results of `check_conformance` for a mechanism that passed; prints as a table.

    Attributes:
        mechanism: the name of its type.
        guarantee: the guarantee of the tested mechanism.
        draws: the number of releases that were tested against `log_prob`.
        moves: the number of other values that the value was compared with.
        ratio_error: the largest difference between 1 and the mean of p(Y | other value) / p(Y |
            value) over the draws Y.
        largest_loss: the largest privacy loss of a draw: log p(Y | value) - log p(Y | other value),
            for other values within the sensitivity.
        delta: the largest estimate of delta at the guarantee's epsilon. The draws give one estimate
            for each other value.
        checks: maps the name of each check to a sentence about its result.

    Formal guarantees:
        See `check_conformance`.
    """

    mechanism: str
    guarantee: Guarantee
    draws: int
    moves: int
    ratio_error: float
    largest_loss: float
    delta: float
    checks: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"{self.mechanism} conforms: {self.guarantee}; {self.draws:,} draws"]
        return "\n".join([*lines, *(f"{name:<11} {found}" for name, found in self.checks.items())])


@dataclasses.dataclass(frozen=True)
class _Case:
    factory: Callable[..., Mechanism]
    value: Value
    neighbor: Value
    key: Key
    sensitivity: float | None
    epsilon: float
    draws: int

    def make(
        self, sensitivity: Sensitivity | Scalar | None = None, epsilon: Scalar | None = None
    ) -> Mechanism:
        epsilon = self.epsilon if epsilon is None else epsilon
        if self.sensitivity is None:
            return self.factory(epsilon)
        return self.factory(self.sensitivity if sensitivity is None else sensitivity, epsilon)

    @functools.cached_property
    def mechanism(self) -> Mechanism:
        return self.make()

    @functools.cached_property
    def keys(self) -> Key:
        """Returns a key for each draw.

        Keys are in batches of one size, so that one compiled program draws all batches.
        """
        return jax.random.split(self.key, (math.ceil(self.draws / _BATCH), _BATCH))

    @functools.cached_property
    def outputs(self) -> Value:
        """Returns outputs of the mechanism for the value."""
        values = jax.tree.map(lambda x: np.broadcast_to(x, (_BATCH, *x.shape)), self.value)
        return joined([_released_values(self.mechanism, keys, values) for keys in self.keys])

    def log_probs(self, value: Value, batches: int | None = None) -> np.ndarray:
        """Returns the log probabilities of the outputs, if `value` were the exact value.

        `batches` limits the computation to the first batches of outputs; None takes all.
        """
        outputs = rows_of(self.outputs, slice(batches and batches * _BATCH))
        return in_batches(lambda batch: _log_probs(self.mechanism, batch, value), outputs, _BATCH)


def check_conformance(
    key: Key,
    factory: Callable[..., Mechanism],
    *,
    value: Value,
    neighbor: Value,
    sensitivity: float | None = 1.0,
    epsilon: float = 1.0,
    draws: int = 100_000,
) -> ConformanceReport:
    """Runs all of dpjax's checks on a mechanism that you wrote, and reports their results.

    `audit` and `verify` only use outputs, and search for an event that refutes a claim. This
    function also uses the factory and the mechanism's methods, and checks all of the following:

    - A release is a function of the key. It works under `jit`, and under `vmap` over keys, epsilons
      and sensitivities. A new epsilon does not trace the mechanism again.
    - The guarantee has the requested epsilon. If the sensitivity was sampled, the guarantee has its
      gamma, confidence and identity.
    - Bad parameters raise an error, or give NaN if they are traced.
    - `mechanism.clamped` replaces NaN, infinities, numbers out of range and -0.0. A value with such
      numbers, in all coordinates or in one, is released like its replacement.
    - Draws have the density that `log_prob` states. That density integrates to 1 and satisfies the
      guarantee. The check compares `value` with `neighbor`, and with values in which one coordinate
      of `value` moves as far as the norm allows.
    - No two coordinates share noise.
    - The `error` method, if there is one, returns finite bounds.

    Args:
        key: a typed key.
        factory: `factory(sensitivity, epsilon)` makes the mechanism, or `factory(epsilon)` if
            `sensitivity` is None.
        value: a value of the target, a pytree of real arrays.
        neighbor: another value, at most `sensitivity` away in the mechanism's norm. The check of
            the guarantee is sharpest at exactly that distance.
        sensitivity: a global bound, or None for a mechanism without one.
        epsilon: the epsilon of the tested mechanism.
        draws: the number of draws that test the distribution.

    Returns:
        A `ConformanceReport`: each check with its result, the number of draws, and the largest
        privacy loss and delta in them.

    Raises:
        AssertionError: with the name of the failed check.
        TypeError: if the key is not a typed key.
        ValueError: if `neighbor` is further from `value` than `sensitivity`.

    Formal guarantees:
        A mechanism that fails is broken, up to a false alarm in one of a million runs, for up to a
        hundred coordinates. A mechanism that passes may still be broken elsewhere. Only values
        around one pair are tested: the pair in both directions, and the pair stretched to twice the
        sensitivity. In the tails, `log_prob` is trusted. With more than 11 coordinates, only 64
        pairs of coordinates are tested for shared noise. The integral of `log_prob`'s density is
        tested for up to 32 linearly independent floats, and for integers that are drawn often.
        100,000 draws at epsilon 1 detect a scale that is 10% too low.

    Source:
        The likelihood ratio p'(Y) / p(Y) has mean 1 over draws Y of p, for any density p'.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> dpjax.auditing.check_conformance(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.laplace,
        ...     value=jnp.zeros(2),
        ...     neighbor=jnp.array([1.0, 0.0]),
        ... )
        AdditiveMechanism conforms: (epsilon=1, delta=0)-DP, under replace-one; 102,400 draws
        release     the same for the same key, under jit and under vmap; one trace for all epsilons
        ...
        density     mean likelihood ratios within 0... of 1 on ... moves; largest loss 1, delta 0
        error       at most 2.996 at confidence 0.95
    """
    check_key(key)
    case = _Case(
        factory,
        _checks.real_arrays("value", value),
        _checks.real_arrays("neighbor", neighbor),
        key,
        sensitivity,
        epsilon,
        draws,
    )
    mechanism = case.mechanism
    length = float(distance(mechanism.norm, case.value, case.neighbor))
    if length > float(mechanism.sensitivity.value) * (1 + ROUNDING_OF_DISTANCE):
        raise ValueError(f"neighbor must be within the sensitivity, got distance {length:g}")
    checks = {
        "release": _releases(case),
        "guarantee": _guarantees(case),
        "parameters": f"{_refuses(case)}; {_works_over_grids(case)}",
        "values": _sanitizes(case),
    }
    fits = _keeps_its_guarantee(case)
    ratio_error, largest_loss, delta = (max(x) for x in zip(*fits, strict=True))
    checks["density"] = (
        f"mean likelihood ratios within {ratio_error:.2g} of 1 on {len(fits)} moves; largest loss"
        f" {largest_loss:.4g}, delta {delta:.2g}"
    )
    checks["error"] = _bounds_its_error(case)
    count = len(jax.tree.leaves(case.outputs)[0])
    return ConformanceReport(
        type(mechanism).__name__,
        mechanism.guarantee,
        count,
        len(fits),
        ratio_error,
        largest_loss,
        delta,
        checks,
    )


def _releases(case: _Case) -> str:
    first = case.mechanism(case.key, case.value)
    _require(isinstance(first, Release), f"a release must be a dpjax.Release, got {type(first)}")
    again = case.mechanism(case.key, case.value)
    _require(_same(first.value, again.value), "the same key must give the same release")
    alone, batched = case.mechanism(case.keys[0, 0], case.value).value, rows_of(case.outputs, 0)
    _require(_same(alone, batched, 1e-5), "jit must not change a release, nor vmap")
    before = len(_TRACES)
    _ = dataclasses.replace(case, epsilon=case.epsilon / 2, draws=1).outputs
    _require(len(_TRACES) == before, "a new epsilon must not trace the mechanism again")
    varied = [np.any(x != x[:1]) for x in jax.tree.leaves(case.outputs)]
    _require(all(varied), "every array of a release must depend on the key")
    return "the same for the same key, under jit and under vmap; one trace for all epsilons"


def _guarantees(case: _Case) -> str:
    mechanism = case.mechanism
    guarantee = mechanism.guarantee
    _require(isinstance(guarantee, Guarantee), "guarantee must be a dpjax.Guarantee")
    _require(guarantee.epsilon == case.epsilon, "guarantee.epsilon must be the requested one")
    _require(guarantee.gamma == 0, "guarantee.gamma must be 0 for a global bound")
    if case.sensitivity is None:
        return "has the requested epsilon"
    sampled = Sensitivity(
        case.sensitivity, 0.05, 0.99, mechanism.norm, None, m=90, k=90, identity="sampled"
    )
    promised = case.make(sampled).guarantee
    _require(
        (promised.gamma, promised.confidence) == (0.05, 0.99),
        "guarantee must carry gamma and confidence of the sensitivity",
    )
    _require(
        [event.identity for event in promised.events] == ["sampled"],
        "guarantee must carry the identity of the sensitivity",
    )
    return "has the requested epsilon, and the gamma and confidence of a sampled sensitivity"


def _works_over_grids(case: _Case) -> str:
    """Checks that the mechanism works under vmap.

    Invalid traced parameters must give a release of NaN (or a negative integer), and an epsilon of
    NaN.
    """
    good = np.asarray([case.epsilon / 2, case.epsilon])
    bad = np.asarray([0.0, -1.0, np.nan, np.inf])
    epsilons = jnp.asarray(np.concatenate([good, bad, np.full(4, case.epsilon)]))
    scales = jnp.asarray(np.concatenate([np.full(6, case.sensitivity or 1.0), bad]))
    if case.sensitivity is None:
        epsilons, scales = epsilons[:6], scales[:6]

    def release(epsilon: jax.Array, sensitivity: jax.Array) -> tuple[Mechanism, Release]:
        mechanism = case.make(sensitivity, epsilon)
        return mechanism, mechanism(case.key, case.value)

    made, batch = jax.jit(jax.vmap(release))(epsilons, scales)
    # `vmap` does not add an axis to constants, so they are broadcast here.
    returned = np.broadcast_to(made.guarantee.epsilon, epsilons.shape)
    promised = np.broadcast_to(batch.guarantee.epsilon, epsilons.shape)
    _require(np.allclose(promised[:2], good), "vmap must keep the guarantees apart")
    _require(np.allclose(returned[:2], good), "vmap must be able to return mechanisms")
    _require(np.all(np.isnan(promised[2:])), "a bad epsilon must show as NaN")
    for leaf in jax.tree.leaves(batch.value):
        closed = jnp.isnan(leaf[2:]) if is_float(leaf) else leaf[2:] < 0
        _require(bool(jnp.all(closed)), "a bad traced parameter must not give a release")
    return "bad traced ones give no release"


def _refuses(case: _Case) -> str:
    def another_norm(difference: Value) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(difference)]))

    raw = jax.random.key_data(case.key)
    calls: dict[str, Callable[[], object]] = {"a raw key": lambda: case.mechanism(raw, case.value)}
    for bad in (0.0, -1.0, math.nan, math.inf):
        calls[f"epsilon={bad}"] = lambda bad=bad: case.make(epsilon=bad)
        if case.sensitivity is not None:
            calls[f"sensitivity={bad}"] = lambda bad=bad: case.make(sensitivity=bad)
    if case.sensitivity is not None:
        wrong = dataclasses.replace(case.mechanism.sensitivity, norm=another_norm)
        calls["a sensitivity in another norm"] = lambda: case.make(sensitivity=wrong)
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"{what} must be refused")
    return f"{len(calls)} bad ones are refused"


def _sanitizes(case: _Case) -> str:
    """Checks that special numbers in a private value do not change how a release is made.

    Under the same key, a value with special numbers must be released exactly like its clamped
    replacement.
    """
    keys = case.keys[0]
    found = list[str]()
    for name, values in strange_values(case.value, _BATCH):
        drawn = jax.device_get(_released_values(case.mechanism, keys, values))
        finite = all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(drawn))
        _require(finite, f"a value of {name} must become finite")
        plain = jax.tree.map(_without_sign_of_zero, _clamped(case.mechanism, values), values)
        _require(
            _same(drawn, _released_values(case.mechanism, keys, plain)),
            f"a value of {name}, alone or among others, must be released like its replacement by"
            " `clamped`; otherwise a release reveals it",
        )
        found.append(name)
    return f"released like their replacements: {', '.join(found)}"


# Let p be the density of the outputs for one value, and p' their density for another value. Outputs
# are drawn from p. The three numbers are the distance of the mean of p' / p from 1, the largest
# log(p / p'), and an estimate of the delta at the claimed epsilon.
_Fit = tuple[float, float, float]


def _keeps_its_guarantee(case: _Case) -> list[_Fit]:
    swapped = dataclasses.replace(case, value=case.neighbor, neighbor=case.value)
    fits = [_fits_neighbor(case), *_moves_with_each_coordinate(case), _fits_neighbor(swapped)]
    if case.sensitivity is not None:
        # This detects a mechanism that ignores its sensitivity. Such a mechanism may pass at one
        # sensitivity, but then it fails at twice this sensitivity.
        stretched = jax.tree.map(lambda x, y: x + 2 * (y - x), case.value, case.neighbor)
        doubled = 2 * case.sensitivity
        fits.append(
            _fits_neighbor(dataclasses.replace(case, sensitivity=doubled, neighbor=stretched))
        )
    return fits


def _fits_neighbor(case: _Case) -> _Fit:
    """Checks that draws have the stated density, and that the loss satisfies (epsilon, delta)."""
    here = case.log_probs(case.value)
    _require(np.all(np.isfinite(here)), "log_prob must be finite on draws")
    return _fits_density(case, "the neighbor", here, case.log_probs(case.neighbor))


def _moves_with_each_coordinate(case: _Case) -> list[_Fit]:
    """Checks each coordinate, to detect shared noise and coordinates without noise.

    `neighbor` may leave some coordinates unchanged.
    """
    here = case.log_probs(case.value)
    norm, most = case.mechanism.norm, float(case.mechanism.sensitivity.value)
    singles = single_moves(norm, most, case.value, case.neighbor)
    batches = math.ceil(_BATCHES_OF_SINGLES / max(1, len(singles)))
    fits = list[_Fit]()
    for name, moved in singles:
        there = case.log_probs(moved, batches)
        fits.append(_fits_density(case, name, here[: len(there)], there))
    seed = int(jax.random.bits(case.key))
    for name, moved in double_moves(norm, most, case.value, case.neighbor, seed):
        there = case.log_probs(moved, 1)
        if not _depends_on_rare_draws(here[: len(there)], there):
            _has_mean_ratio_1(name, here[: len(there)], there)
    wrong = wrong_total(case.outputs, here)
    _require(wrong is None, f"log_prob must be the logarithm of a density with integral 1: {wrong}")
    return fits


def _fits_density(case: _Case, name: str, here: np.ndarray, there: np.ndarray) -> _Fit:
    """Checks that draws have the stated density p, and that the loss satisfies (epsilon, delta).

    The loss is log(p / p'), where p' is the density of an output for another value. `here` is log p
    of each draw, and `there` is log p'.
    """
    ratio_error = _has_mean_ratio_1(name, here, there)
    delta = float(case.mechanism.guarantee.delta)
    excess = np.maximum(0.0, -np.expm1(case.epsilon + _ROUNDING - (here - there)))
    _require(
        excess.mean() <= delta + _SIGMAS * excess.std() / math.sqrt(len(excess)),
        f"for {name} the privacy loss exceeds epsilon by delta {excess.mean():.3g}, promised"
        f" {delta:g}",
    )
    return ratio_error, float(np.max(here - there)), float(excess.mean())


def _has_mean_ratio_1(name: str, here: np.ndarray, there: np.ndarray) -> float:
    mean, margin = _mean_ratio(here, there)
    _require(
        abs(mean - 1) <= margin + _ROUNDING,
        f"draws must have the density of log_prob: for {name} the mean ratio is {mean:.4f}, not 1",
    )
    return abs(mean - 1)


def _bounds_its_error(case: _Case) -> str:
    error = getattr(case.mechanism, "error", None)
    if error is None:
        # The method `error` is optional, because only mechanisms that add noise have one.
        return "not stated"
    like = {"like": case.value} if "like" in inspect.signature(error).parameters else {}
    largest = 0.0
    for confidence in (0.5, 0.95):
        errors = jax.tree.leaves(error(confidence=confidence, **like))
        finite = all(np.all((x >= 0) & (x < math.inf)) for x in errors)
        _require(finite, "error must be finite, 0 or above")
        largest = max(float(np.max(x, initial=0.0)) for x in errors)
    return f"at most {largest:.4g} at confidence 0.95"


_TRACES: list[None] = []  # The function below appends an entry to this list whenever JAX traces it.


@jax.jit
def _released_values(mechanism: Mechanism, keys: Key, values: Value) -> Value:
    _TRACES.append(None)
    return jax.vmap(mechanism)(keys, values).value


@jax.jit
def _clamped(mechanism: Mechanism, values: Value) -> Value:
    return jax.vmap(as_clamped, in_axes=(None, 0))(mechanism, values)


@jax.jit
def _log_probs(mechanism: Mechanism, outputs: Value, value: Value) -> jax.Array:
    return jax.vmap(mechanism.log_prob, in_axes=(0, None))(outputs, value)


def _without_sign_of_zero(clamped: ArrayLike, value: np.ndarray) -> np.ndarray:
    """Returns a clamped array without -0.0, in the dtype of the value if the cast is exact.

    Then the program that was compiled for the value releases the clamped array, too.
    """
    clamped = np.asarray(clamped)
    clamped = np.where(clamped == 0, np.zeros_like(clamped), clamped)
    with np.errstate(all="ignore"):
        same = clamped.astype(value.dtype)
    return same if np.array_equal(same, clamped) else clamped


def _same(tree: PyTree, other: PyTree, tolerance: float = 0.0) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    if tolerance == 0.0:
        return all(np.array_equal(x, y) for x, y in pairs)
    pairs = ((np.asarray(x, float), np.asarray(y, float)) for x, y in pairs)
    return all(np.allclose(x, y, rtol=tolerance) for x, y in pairs)


def _require(holds: object, message: str) -> None:
    if not holds:  # This is not an `assert` statement, because `python -O` would remove it.
        raise AssertionError(message)


def _mean_ratio(here: np.ndarray, there: np.ndarray) -> tuple[float, float]:
    """Returns the mean of p' / p over draws of p, and how far from 1 it may be by chance.

    Args:
        here: log p of every draw.
        there: log p', for any density p'.
    """
    ratio = np.exp(there - here)
    return float(ratio.mean()), float(_SIGMAS * ratio.std() / math.sqrt(len(ratio)))


def _depends_on_rare_draws(here: np.ndarray, there: np.ndarray) -> bool:
    """Whether the mean of p' / p over draws of p depends on draws that are too rare to test.

    Args:
        here: log p of every draw.
        there: log p', for any density p'.
    """
    log_ratio = (there - here)[np.isfinite(there)]
    return bool(log_ratio.max(initial=-math.inf) > np.median(log_ratio) + _LARGEST_LOG_RATIO)


def wrong_total(outputs: Value, log_probs: np.ndarray) -> str | None:
    """Describes how the integral of a stated density differs from 1.

    Let p be the stated density. Another density, q, is fitted to half of the draws. Over the other
    half, q / p must average 1. An output contains integers and floats. q is a mixture with one
    component for each of the most frequent values of the integers. In a component, the floats have
    a truncated normal density.

    Args:
        outputs: the outputs of the mechanism, a batch.
        log_probs: log p of each.

    Returns:
        A description, or None if the total is 1 up to chance. Also None if no suitable q is found.
        Then no values of the integers are frequent, or there are too many floats, or the floats are
        linearly dependent.
    """
    integers, floats, precision = _columns(outputs)
    half = len(log_probs) // 2
    _, codes = np.unique(integers, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    seen = np.bincount(codes[:half], minlength=codes.max() + 1)
    often = np.argsort(-seen, kind="stable")[:_MOST_OUTPUTS]
    often = often[seen[often] >= _LEAST_SEEN]
    log_q = np.full(len(log_probs) - half, -math.inf)
    for code in often:
        fitted = _log_normal(floats[:half][codes[:half] == code], floats[half:])
        if fitted is None:
            return None
        share = math.log(seen[code] / seen[often].sum())
        log_q = np.where(codes[half:] == code, share + fitted, log_q)
    if not np.isfinite(log_q).any() or _depends_on_rare_draws(log_probs[half:], log_q):
        return None
    mean, margin = _mean_ratio(log_probs[half:], log_q)
    # A float of a narrow dtype represents an interval of numbers, whose width depends on the float.
    if abs(mean - 1) <= margin + _ROUNDING + 8 * precision:
        return None
    return f"of a density fitted to the draws, the mean ratio is {mean:.4f}, not 1"


def _columns(outputs: Value) -> tuple[np.ndarray, np.ndarray, float]:
    """Splits outputs into integers and floats, and returns the precision of the floats."""
    arrays = matrices(outputs)
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    integers = [x for x in arrays if not jnp.issubdtype(x.dtype, jnp.floating)]
    none = np.zeros((len(arrays[0]), 0))
    return (
        np.concatenate([none.astype(int), *integers], axis=1),
        np.concatenate([none, *(x.astype(float) for x in floats)], axis=1),
        max((float(jnp.finfo(x.dtype).eps) for x in floats), default=0.0),
    )


def _log_normal(known: np.ndarray, floats: np.ndarray) -> np.ndarray | None:
    """Returns the log density of a truncated normal that is fitted to `known`; None if it fails."""
    varied = np.ptp(known, axis=0) > 0
    same = np.all(floats[:, ~varied] == known[0, ~varied], axis=1)
    known, floats = known[:, varied], floats[:, varied]
    dims = known.shape[1]
    if dims == 0:
        return np.where(same, 0.0, -math.inf)
    if dims > _MOST_FLOATS or len(known) < 8 * dims:
        return None
    center = np.median(known, axis=0)
    inner = np.clip(known, *np.quantile(known, (0.05, 0.95), axis=0)) - center
    covariance = inner.T @ inner / len(known)
    if np.linalg.cond(covariance) > 1e10:
        return None
    root = np.linalg.cholesky(covariance)
    whitened, mapped = (np.linalg.solve(root, (x - center).T).T for x in (known, floats))
    low, high = np.quantile(whitened, _ENDS, axis=0)
    inside = np.all((low <= mapped) & (mapped <= high), axis=1) & same
    mass = scipy.special.ndtr(high / _NARROWER) - scipy.special.ndtr(low / _NARROWER)
    scales = np.log(np.diagonal(root) * (_NARROWER * math.sqrt(2 * math.pi))) + np.log(mass)
    log_density = -np.sum((mapped / _NARROWER) ** 2, axis=1) / 2 - np.sum(scales)
    return np.where(inside, log_density, -math.inf)
