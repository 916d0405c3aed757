"""The checks that every mechanism must pass, for dpjax's own and for users' mechanisms."""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Scalar, Value
from dpjax._core._values import Guarantee, Mechanism, Norm, Release, Sensitivity
from dpjax.auditing._audit import as_clamped
from dpjax.auditing._outputs import joined, matrices, rows_of
from dpjax.random._facade import check_key
from dpjax.sensitivity._norms import distance

# The allowed error of a mean, in standard errors: a false alarm once in 500 million means.
_SIGMAS = 6.0
# Relative rounding error of a log probability in float32, summed over some coordinates.
_ROUNDING = 1e-4
# If ratios exceed e^6, their mean depends on draws that are too rare.
_LARGEST_LOG_RATIO = 6.0
# Bounds for a fitted density: on its outputs, the draws of each, and the number of floats.
_MOST_OUTPUTS, _LEAST_SEEN, _MOST_FLOATS = 64, 64, 32
# The fitted density has lighter tails than any noise, and is cut off at these quantiles.
_NARROWER, _ENDS = 0.8, (0.01, 0.99)


def wrong_ratio(here: np.ndarray, there: np.ndarray, rounding: float = _ROUNDING) -> str | None:
    """Describes how the mean of p' / p differs from 1, on draws of p.

    Args:
        here: log p of every draw.
        there: log p', for any density p'.
        rounding: an additional error that is allowed.

    Returns:
        A description, or None if the mean is 1 up to chance.
    """
    ratio = np.exp(there - here)
    margin = _SIGMAS * ratio.std() / math.sqrt(len(ratio)) + rounding
    if abs(ratio.mean() - 1) <= margin:
        return None
    return f"the mean ratio is {ratio.mean():.4f}, not 1"


def depends_on_rare_draws(here: np.ndarray, there: np.ndarray) -> bool:
    """Whether the mean of p' / p is too uncertain for a test."""
    log_ratio = (there - here)[np.isfinite(there)]
    return bool(log_ratio.max(initial=-math.inf) > np.median(log_ratio) + _LARGEST_LOG_RATIO)


def excess_loss(here: np.ndarray, there: np.ndarray, epsilon: float, delta: float) -> str | None:
    """Describes how the privacy loss exceeds (epsilon, delta), on draws of p; else None."""
    excess = np.maximum(0.0, -np.expm1(epsilon + _ROUNDING - (here - there)))
    if excess.mean() <= delta + _SIGMAS * excess.std() / math.sqrt(len(excess)):
        return None
    return f"the privacy loss exceeds epsilon by delta {excess.mean():.3g}, promised {delta:g}"


def wrong_total(outputs: Value, log_probs: np.ndarray) -> str | None:
    """Describes how the total of a stated density differs from 1.

    A density q is fitted to half of the draws. On the other half, q / p must average 1. q covers
    the integers that are drawn most often, each with its own normal density of the floats.

    Args:
        outputs: of the mechanism, a batch.
        log_probs: log p of each.

    Returns:
        A description. None if the total is 1 up to chance, or if no q is close to p: no integers
        are drawn often, or the floats are too many or linearly dependent.
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
    if not np.isfinite(log_q).any() or depends_on_rare_draws(log_probs[half:], log_q):
        return None
    # A float of few bits stands for an interval, whose width depends on the float.
    wrong = wrong_ratio(log_probs[half:], log_q, _ROUNDING + 8 * precision)
    return wrong and f"of a density fitted to the draws, {wrong}"


def _columns(outputs: Value) -> tuple[np.ndarray, np.ndarray, float]:
    """The integers, the floats, and the precision of the floats."""
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
    """Log density of a truncated normal fitted to known rows; None if no fit is possible."""
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


# Relative rounding error of a distance between floats.
_ROUNDING_OF_DISTANCE = 1e-6
# If there are more pairs of coordinates, this many are chosen at random.
_MOST_PAIRS = 64

Moved = tuple[str, Value]
_Place = tuple[int, int]  # A leaf, and an index in it, flattened.
_distance = jax.jit(distance, static_argnums=0)


def single_moves(norm: Norm, most: float, value: Value, neighbor: Value) -> list[Moved]:
    """Values in which one coordinate moved up or down, each with a description.

    Args:
        norm: of distances.
        most: the largest distance from the value.
        value: a pytree of arrays.
        neighbor: another one. If the norm counts coordinates, it shows how far they may move.
    """
    found: list[Moved] = []
    for (place, step), sign in itertools.product(_steps(norm, most, value, neighbor), (1, -1)):
        moved = _moved(value, {place: sign * step})
        if 0 < float(_distance(norm, value, moved)) <= most * (1 + _ROUNDING_OF_DISTANCE):
            found.append((f"{_name(value, place)} moved by {sign * step:g}", moved))
    return found


def double_moves(norm: Norm, most: float, value: Value, neighbor: Value, seed: int) -> list[Moved]:
    """Values in which two coordinates moved; floats move by half of their step alone."""
    pairs = list(itertools.combinations(_steps(norm, most, value, neighbor), 2))
    if len(pairs) > _MOST_PAIRS:
        chosen = np.random.default_rng(seed).choice(len(pairs), _MOST_PAIRS, replace=False)
        pairs = [pairs[i] for i in chosen.tolist()]
    return [
        (
            f"{_name(value, one)} and {_name(value, other)} moved",
            _moved(value, {one: _part(value, one, first), other: _part(value, other, second)}),
        )
        for (one, first), (other, second) in pairs
    ]


def _steps(norm: Norm, most: float, value: Value, neighbor: Value) -> list[tuple[_Place, float]]:
    """The steps that each coordinate may move alone, without integers that may not move."""
    leaves, structure = jax.tree.flatten(value)
    zeros = jax.tree.unflatten(structure, [np.zeros(np.shape(x), "float32") for x in leaves])
    spreads = [
        float(np.ptp(np.concatenate([np.ravel(x), np.ravel(y)]).astype(float)))
        for x, y in zip(leaves, jax.tree.leaves(neighbor), strict=True)
    ]
    found: list[tuple[_Place, float]] = []
    for place in ((i, index) for i, leaf in enumerate(leaves) for index in range(np.size(leaf))):
        unit = float(_distance(norm, _moved(zeros, {place: 1.0}), zeros))
        step = most / unit * (1 - _ROUNDING_OF_DISTANCE / 4)
        if norm == "hamming":
            step = spreads[place[0]] or 1.0
        if not _is_float(leaves[place[0]]):
            step = math.floor(step * (1 + _ROUNDING_OF_DISTANCE))
        if step:
            found.append((place, step))
    return found


def _part(value: Value, place: _Place, step: float) -> float:
    return step / 2 if _is_float(jax.tree.leaves(value)[place[0]]) else step


def _moved(value: Value, steps: dict[_Place, float]) -> Value:
    leaves, structure = jax.tree.flatten(value)
    leaves = [np.array(leaf) for leaf in leaves]
    for (leaf, index), step in steps.items():
        array = leaves[leaf]
        if _is_float(array):
            array.reshape(-1)[index] += np.asarray(step, array.dtype)
        elif array.dtype == bool:
            array.reshape(-1)[index] ^= True
        else:
            limits = np.iinfo(array.dtype)
            moved = int(array.reshape(-1)[index]) + int(step)
            array.reshape(-1)[index] = min(max(moved, limits.min), limits.max)
    return jax.tree.unflatten(structure, leaves)


def _name(value: Value, place: _Place) -> str:
    path, leaf = jax.tree_util.tree_leaves_with_path(value)[place[0]]
    inside = np.unravel_index(place[1], np.shape(leaf))
    return f"value{jax.tree_util.keystr(path)}" + "".join(f"[{i}]" for i in inside)


def _is_float(leaf: np.ndarray) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


_Strange = float | Literal["max", "min"]
# For integers, every entry stands for an end of their dtype.
_STRANGE: dict[str, tuple[_Strange, ...]] = {
    "nan": (math.nan,),
    "inf": (math.inf,),
    "-inf": (-math.inf,),
    "the largest float": ("max",),
    "minus the largest float": ("min",),
    "-0.0": (-0.0,),
    "both infinities and nan": (math.inf, -math.inf, math.nan),
}
_STRANGE_INTEGERS = ("inf", "-inf")


def strange_values(value: Value, count: int) -> Iterator[tuple[str, Value]]:
    """Batches of values with strange numbers, one batch for each kind.

    The first value of a batch holds strange numbers only. In each of the others one coordinate is
    strange, in turns. A batch covers all coordinates if there are fewer than `count`.

    Args:
        value: a pytree of arrays.
        count: the size of a batch.

    Yields:
        The name of the kind, and a pytree with a leading axis.
    """
    leaves, structure = jax.tree.flatten(value)
    floating = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    for name in _STRANGE if floating else _STRANGE_INTEGERS:
        yield name, jax.tree.unflatten(structure, _batches(leaves, _STRANGE[name], count))


def _batches(
    leaves: list[jax.Array], strange: tuple[_Strange, ...], count: int
) -> list[np.ndarray]:
    sizes = [np.size(leaf) for leaf in leaves]
    # At -1 all coordinates are strange.
    places = np.resize(np.arange(-1, sum(sizes)), count)
    batches: list[np.ndarray] = []
    start = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        numbers = np.array([_as_number(x, np.dtype(leaf.dtype)) for x in strange], leaf.dtype)
        indices = np.arange(start, start + size)
        chosen = (places[:, None] == -1) | (places[:, None] == indices)
        filled = np.where(chosen, np.resize(numbers, size), np.ravel(leaf))
        batches.append(filled.astype(leaf.dtype).reshape(count, *np.shape(leaf)))
        start += size
    return batches


def _as_number(strange: _Strange, dtype: np.dtype) -> float:
    if jnp.issubdtype(dtype, jnp.floating):
        largest = float(jnp.finfo(dtype).max)
        return {"max": largest, "min": -largest}[strange] if isinstance(strange, str) else strange
    if strange == 0:
        return 0
    limits = jnp.iinfo("uint1" if dtype.kind == "b" else dtype)
    return limits.min if strange in ("min", -math.inf) else limits.max


_BATCH = 2**12  # Releases of one program.
# Batches of draws for all moves of single coordinates together. A move of two takes one batch.
_BATCHES_OF_SINGLES = 64


@runtime_checkable
class _BoundsItsError(Protocol):
    """A mechanism that adds noise; others select or lie."""

    def error(self, *, confidence: float, **like: Value) -> PyTree: ...


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
    def outputs(self) -> Value:
        """Draws for the value. Batches have one size, so any number of draws shares a program."""
        values = jax.tree.map(_copies, self.value)
        batches = [
            jax.device_get(_released_values(self.mechanism, keys, values))
            for keys in jax.random.split(self.key, (math.ceil(self.draws / _BATCH), _BATCH))
        ]
        return joined(batches)

    def log_probs(self, value: Value, batches: int | None = None) -> np.ndarray:
        """Log probabilities of the outputs, or of their first batches, under a value."""
        count = len(jax.tree.leaves(self.outputs)[0])
        found: list[np.ndarray] = []
        for start in range(0, count, _BATCH)[:batches]:
            batch = rows_of(self.outputs, slice(start, start + _BATCH))
            found.append(np.asarray(_log_probs(self.mechanism, batch, value), float))
        return np.concatenate(found)


def check_conformance(
    key: Key,
    factory: Callable[..., Mechanism],
    *,
    value: Value,
    neighbor: Value,
    sensitivity: float | None = 1.0,
    epsilon: float = 1.0,
    draws: int = 100_000,
) -> None:
    """Checks everything that dpjax expects of a mechanism; returns silently if it passes.

    It checks this list.

    - A release is a function of the key. It works under `jit`, and under `vmap` over keys, epsilons
      and sensitivities. A new epsilon does not trace the mechanism again.
    - The guarantee has the requested epsilon. It carries gamma, confidence and identity of a
      sampled sensitivity.
    - Bad parameters raise, or become NaN if traced.
    - `mechanism.clamped` replaces NaN, infinities, numbers out of range and -0.0. A value with such
      numbers, in all coordinates or in one, is released like its replacement.
    - Draws have the density that `log_prob` states, of total 1, and keep the guarantee. That is
      tested on the pair `value`, `neighbor`, and on moves of each coordinate of `value` alone, as
      far as the norm allows.
    - No two coordinates share noise.

    Args:
        key: a typed key.
        factory: `factory(sensitivity, epsilon)` makes the mechanism, or `factory(epsilon)` if
            `sensitivity` is None.
        value: a value of the target, a pytree of real arrays.
        neighbor: another value, within `sensitivity` of it in the mechanism's norm. At that
            distance the check of the guarantee is sharp.
        sensitivity: a global bound, or None for a mechanism without one.
        epsilon: of the tested mechanism.
        draws: the number of draws that test the distribution.

    Returns:
        None.

    Raises:
        AssertionError: with the name of the failed check.
        TypeError: if the key is not a typed key.
        ValueError: if `neighbor` is further from `value` than `sensitivity`.

    Formal guarantees:
        A mechanism that fails is broken, up to a false alarm in one of a million runs, for up to a
        hundred coordinates. A mechanism that passes may still be broken elsewhere. Only values
        around one pair are tested: the pair in both directions, and stretched to twice the
        sensitivity. `log_prob` is trusted for the tails. Of more than 11 coordinates, 64 pairs are
        tested for shared noise. The total of `log_prob` is tested for up to 32 linearly independent
        floats, and for integers that are drawn often. 100,000 draws at epsilon 1 detect a scale
        that is 10% too low.

    Source:
        The likelihood ratio p'(Y) / p(Y) averages 1 over draws Y of p, for any density p'.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> dpjax.auditing.check_conformance(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.laplace,
        ...     value=jnp.zeros(2),
        ...     neighbor=jnp.array([1.0, 0.0]),
        ... )
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
    if length > float(mechanism.sensitivity.value) * (1 + 1e-6):
        raise ValueError(
            f"neighbor must be within the sensitivity of value, got distance {length:g}"
        )
    for check in _CHECKS:
        check(case)


def _releases(case: _Case) -> None:
    first = case.mechanism(case.key, case.value)
    _require(isinstance(first, Release), f"a release must be a dpjax.Release, got {type(first)}")
    again = case.mechanism(case.key, case.value)
    _require(_same(first.value, again.value), "the same key must give the same release")
    key = jax.random.split(case.key, (math.ceil(case.draws / _BATCH), _BATCH))[0, 0]
    alone, batched = case.mechanism(key, case.value).value, rows_of(case.outputs, 0)
    _require(_close(alone, batched), "jit must not change a release, nor vmap")
    before = len(_TRACES)
    _ = dataclasses.replace(case, epsilon=case.epsilon / 2, draws=1).outputs
    _require(len(_TRACES) == before, "a new epsilon must not trace the mechanism again")


def _depends_on_the_key(case: _Case) -> None:
    varied = [np.any(x != x[:1]) for x in jax.tree.leaves(case.outputs)]
    _require(all(varied), "every array of a release must depend on the key")


def _guarantees(case: _Case) -> None:
    mechanism = case.mechanism
    guarantee = mechanism.guarantee
    _require(isinstance(guarantee, Guarantee), "guarantee must be a dpjax.Guarantee")
    _require(guarantee.epsilon == case.epsilon, "guarantee.epsilon must be the requested one")
    _require(guarantee.gamma == 0, "guarantee.gamma must be 0 for a global bound")
    if case.sensitivity is None:
        return
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


def _works_over_grids(case: _Case) -> None:
    """Works under vmap. A bad traced parameter gives NaN (a negative integer) and a NaN epsilon."""
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
    # Constants have no axis of lanes.
    returned = np.broadcast_to(made.guarantee.epsilon, epsilons.shape)
    promised = np.broadcast_to(batch.guarantee.epsilon, epsilons.shape)
    _require(np.allclose(promised[:2], good), "vmap must keep the guarantees apart")
    _require(np.allclose(returned[:2], good), "vmap must be able to return mechanisms")
    _require(np.all(np.isnan(promised[2:])), "a bad epsilon must show as NaN")
    for leaf in jax.tree.leaves(batch.value):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        closed = jnp.isnan(leaf[2:]) if floating else leaf[2:] < 0
        _require(bool(jnp.all(closed)), "a bad traced parameter must not give a release")


def _refuses(case: _Case) -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        _assert_raises(f"epsilon={bad}", lambda bad=bad: case.make(epsilon=bad))
        if case.sensitivity is not None:
            _assert_raises(f"sensitivity={bad}", lambda bad=bad: case.make(sensitivity=bad))
    _assert_raises("a raw key", lambda: case.mechanism(jax.random.key_data(case.key), case.value))
    if case.sensitivity is not None:
        wrong = dataclasses.replace(case.mechanism.sensitivity, norm=_another_norm)
        _assert_raises("a sensitivity in another norm", lambda: case.make(sensitivity=wrong))


def _sanitizes(case: _Case) -> None:
    """Checks that no number in a private value decides whether or how a release happens.

    Under every key a strange value has the release of its replacement.
    """
    keys = jax.random.split(case.key, _BATCH)
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


def _keeps_its_guarantee(case: _Case) -> None:
    _matches_its_log_prob(case)
    _moves_with_each_coordinate(case)
    _matches_its_log_prob(dataclasses.replace(case, value=case.neighbor, neighbor=case.value))
    if case.sensitivity is not None:
        # A mechanism that ignores its sensitivity may pass at one, but not at twice as much.
        stretched = jax.tree.map(lambda x, y: x + 2 * (y - x), case.value, case.neighbor)
        _matches_its_log_prob(
            dataclasses.replace(case, sensitivity=2 * case.sensitivity, neighbor=stretched)
        )


def _matches_its_log_prob(case: _Case) -> None:
    """Draws have the stated density, and the loss on the neighbor keeps (epsilon, delta)."""
    here = case.log_probs(case.value)
    _require(np.all(np.isfinite(here)), "log_prob must be finite on draws")
    _fits_density(case, "the neighbor", here, case.log_probs(case.neighbor))


def _moves_with_each_coordinate(case: _Case) -> None:
    """Finds coordinates without noise where the neighbor does not differ, and shared noise."""
    here = case.log_probs(case.value)
    norm, most = case.mechanism.norm, float(case.mechanism.sensitivity.value)
    singles = single_moves(norm, most, case.value, case.neighbor)
    batches = math.ceil(_BATCHES_OF_SINGLES / max(1, len(singles)))
    for name, moved in singles:
        there = case.log_probs(moved, batches)
        _fits_density(case, name, here[: len(there)], there)
    seed = int(jax.random.bits(case.key))
    for name, moved in double_moves(norm, most, case.value, case.neighbor, seed):
        there = case.log_probs(moved, 1)
        if not depends_on_rare_draws(here[: len(there)], there):
            wrong = wrong_ratio(here[: len(there)], there)
            _require(wrong is None, f"draws must have the density of log_prob: for {name} {wrong}")
    wrong = wrong_total(case.outputs, here)
    _require(wrong is None, f"log_prob must be that of a density with total 1: {wrong}")


def _fits_density(case: _Case, name: str, here: np.ndarray, there: np.ndarray) -> None:
    wrong = wrong_ratio(here, there)
    _require(wrong is None, f"draws must have the density of log_prob: for {name} {wrong}")
    wrong = excess_loss(here, there, case.epsilon, float(case.mechanism.guarantee.delta))
    _require(wrong is None, f"for {name} {wrong}")


def _bounds_its_error(case: _Case) -> None:
    if isinstance(case.mechanism, _BoundsItsError):
        accepted = inspect.signature(case.mechanism.error).parameters
        like = {"like": case.value} if "like" in accepted else {}
        for confidence in (0.5, 0.95):
            errors = jax.tree.leaves(case.mechanism.error(confidence=confidence, **like))
            _require(
                all(np.all((x >= 0) & (x < math.inf)) for x in errors),
                "error must be finite, 0 or above",
            )


_CHECKS: tuple[Callable[[_Case], None], ...] = (
    _releases,
    _depends_on_the_key,
    _guarantees,
    _refuses,
    _works_over_grids,
    _sanitizes,
    _keeps_its_guarantee,
    _bounds_its_error,
)


def _copies(leaf: jax.Array) -> np.ndarray:
    return np.broadcast_to(leaf, (_BATCH, *np.shape(leaf)))


_TRACES: list[None] = []  # One entry for every trace of the program below.


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
    """A clamped array without -0.0, in the dtype of the value if possible, to share a program."""
    clamped = np.asarray(clamped)
    clamped = np.where(clamped == 0, np.zeros_like(clamped), clamped)
    with np.errstate(all="ignore"):
        same = clamped.astype(value.dtype)
    return same if np.array_equal(same, clamped) else clamped


def _another_norm(difference: Value) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(difference)]))


def _same(tree: PyTree, other: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def _close(tree: PyTree, other: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.allclose(np.asarray(x, float), np.asarray(y, float), rtol=1e-5) for x, y in pairs)


def _require(holds: object, message: str) -> None:
    if not holds:  # `python -O` would remove an assert statement.
        raise AssertionError(message)


def _assert_raises(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (TypeError, ValueError):
        return
    raise AssertionError(f"{what} must be refused")
