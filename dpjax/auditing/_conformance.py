"""What every mechanism must do, as checks that a mechanism of one's own can be put through."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _checks
from dpjax.auditing._claims import as_clamped
from dpjax.base import Guarantee, Mechanism, Release, Sensitivity
from dpjax.norms import distance
from dpjax.random._keys import check_key

# Standard errors that a mean may be off: a false alarm once in 1.7 million checks.
_SIGMAS = 5.0
# Releases of one program.
_BATCH = 2**12
# Keys under which strange values are compared, each exactly.
_STRANGE_DRAWS = _BATCH
# Relative rounding error of a log probability in float32, summed over some coordinates.
_ROUNDING = 1e-4


@dataclasses.dataclass(frozen=True)
class _Case:
    factory: Callable[..., Mechanism]
    value: Any
    neighbor: Any
    key: jax.Array
    sensitivity: float | None
    epsilon: float
    draws: int

    def make(self, sensitivity: Any = None, epsilon: Any = None) -> Mechanism:
        epsilon = self.epsilon if epsilon is None else epsilon
        if self.sensitivity is None:
            return self.factory(epsilon)
        return self.factory(self.sensitivity if sensitivity is None else sensitivity, epsilon)


def check_conformance(
    key: jax.Array,
    factory: Callable[..., Mechanism],
    *,
    value: Any,
    neighbor: Any,
    sensitivity: float | None = 1.0,
    epsilon: float = 1.0,
    draws: int = 100_000,
) -> None:
    """Puts a mechanism through everything that dpjax expects of one; silent if it passes.

    The checks: it is a function of the key; it works under `jit` and `vmap` over keys, epsilons and
    sensitivities; a new epsilon does not trace it again; its guarantee says the epsilon that was
    asked for and carries gamma, confidence and identity of a sampled sensitivity; bad parameters
    raise, or become NaN where traced; NaN, infinities and what is out of range are released, under
    each of the keys, like what they become by `mechanism.clamped` (without that method: NaN like
    0, an infinity like the largest float); and on the pair `value`, `neighbor` its draws have the
    distribution that `log_prob` states and keep the guarantee.

    Args:
        key: a typed key.
        factory: `factory(sensitivity, epsilon)` makes the mechanism; `factory(epsilon)` where
            `sensitivity` is None.
        value: a value of the target, a pytree of real arrays.
        neighbor: another, within `sensitivity` of it in the mechanism's norm; at that distance,
            the check of the guarantee is sharp.
        sensitivity: a global bound, or None for a mechanism that takes none.
        epsilon: of the mechanism under test.
        draws: how many to test the distribution on.

    Returns:
        None.

    Raises:
        AssertionError: naming the check that failed.
        TypeError: if the key is not a typed key.
        ValueError: if `neighbor` is further from `value` than `sensitivity`.

    Formal guarantees:
        A mechanism that fails is broken, but for a false alarm in one of a million runs. One that
        passes may still be broken elsewhere: one pair is tested (in both directions, and stretched
        to twice the sensitivity), and `log_prob` is trusted for the tails. 100,000 draws at epsilon
        1 tell a scale that is 10% too low.

    Source:
        The likelihood ratio p'(Y) / p(Y) of the neighbor averages 1 over draws Y of p.

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
    mechanism = case.make()
    length = float(distance(mechanism.norm, case.value, case.neighbor))
    if length > float(mechanism.sensitivity.value) * (1 + 1e-6):
        raise ValueError(
            f"neighbor must be within the sensitivity of value, got distance {length:g}"
        )
    for check in _CHECKS:
        check(case)


def _releases(case: _Case) -> None:
    mechanism = case.make()
    first = mechanism(case.key, case.value)
    _require(isinstance(first, Release), f"a release must be a dpjax.Release, got {type(first)}")
    again = mechanism(case.key, case.value)
    _require(_same(first.value, again.value), "the same key must give the same release")
    traces = []

    @jax.jit
    def release(mechanism: Mechanism, key: jax.Array, value: Any) -> Release:
        traces.append(1)
        return mechanism(key, value)

    jitted = release(mechanism, case.key, case.value)
    _require(_close(first.value, jitted.value), "jit must not change a release")
    release(case.make(epsilon=case.epsilon / 2), case.key, case.value)
    _require(len(traces) == 1, "a new epsilon must not trace the mechanism again")


def _depends_on_the_key(case: _Case) -> None:
    outputs = jax.tree.map(lambda x: x[:64], _draws(case, case.make(), case.draws))
    varied = [np.any(np.asarray(x) != np.asarray(x)[:1]) for x in jax.tree.leaves(outputs)]
    _require(all(varied), "every array of a release must depend on the key")


def _guarantees(case: _Case) -> None:
    mechanism = case.make()
    guarantee = mechanism.guarantee
    _require(isinstance(guarantee, Guarantee), "guarantee must be a dpjax.Guarantee")
    _require(guarantee.epsilon == case.epsilon, "guarantee.epsilon must be the one asked for")
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
    """Under vmap; and a bad traced parameter gives NaN (a negative integer), and says so."""
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
    promised = batch.guarantee.epsilon
    _require(np.allclose(promised[:2], good), "vmap must keep the guarantees apart")
    _require(
        np.allclose(made.guarantee.epsilon[:2], good), "vmap must be able to return mechanisms"
    )
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
    _assert_raises("a raw key", lambda: case.make()(jax.random.key_data(case.key), case.value))
    if case.sensitivity is not None:
        wrong = dataclasses.replace(case.make().sensitivity, norm=_another_norm)
        _assert_raises("a sensitivity in another norm", lambda: case.make(sensitivity=wrong))


def _sanitizes(case: _Case) -> None:
    """What a private value holds never decides whether or how a release happens.

    Under every key the release of a strange value is that of what it is said to become.
    """
    mechanism = case.make()
    for name, value in _strange_values(case.value):
        drawn = _draws(dataclasses.replace(case, value=value), mechanism, _STRANGE_DRAWS)
        finite = all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(drawn))
        _require(finite, f"a value of {name} must become finite")
        plain = dataclasses.replace(case, value=jax.jit(as_clamped)(mechanism, value))
        _require(
            _same(drawn, _draws(plain, mechanism, _STRANGE_DRAWS)),
            f"a value of {name} must be released like what it becomes (by `clamped`, or else 0 for"
            " NaN and the largest float): something else tells that it was there",
        )


def _keeps_its_guarantee(case: _Case) -> None:
    _matches_its_log_prob(case)
    _matches_its_log_prob(dataclasses.replace(case, value=case.neighbor, neighbor=case.value))
    if case.sensitivity is not None:
        # A mechanism that ignores its sensitivity may pass at one, but not at twice as much.
        stretched = jax.tree.map(lambda x, y: x + 2 * (y - x), case.value, case.neighbor)
        _matches_its_log_prob(
            dataclasses.replace(case, sensitivity=2 * case.sensitivity, neighbor=stretched)
        )


def _matches_its_log_prob(case: _Case) -> None:
    """Draws have the stated density, and the loss on the neighbor keeps (epsilon, delta)."""
    mechanism = case.make()
    outputs = _draws(case, mechanism, case.draws)
    here = np.asarray(_log_probs(mechanism, outputs, case.value), float)
    there = np.asarray(_log_probs(mechanism, outputs, case.neighbor), float)
    _require(np.all(np.isfinite(here)), "log_prob must be finite on what was drawn")
    ratio = np.exp(there - here)
    margin = _SIGMAS * ratio.std() / math.sqrt(case.draws) + _ROUNDING
    _require(
        abs(ratio.mean() - 1) <= margin,
        f"draws must have the density of log_prob: the mean ratio is {ratio.mean():.4f}, not 1",
    )
    excess = np.maximum(0.0, -np.expm1(case.epsilon + _ROUNDING - (here - there)))
    delta = float(mechanism.guarantee.delta)
    _require(
        excess.mean() <= delta + _SIGMAS * excess.std() / math.sqrt(case.draws),
        f"the privacy loss exceeds epsilon by delta {excess.mean():.3g}, promised {delta:g}",
    )


def _bounds_its_error(case: _Case) -> None:
    for probability in (0.5, 0.95):
        errors = jax.tree.leaves(case.make().error_quantile(probability))
        _require(
            all(np.all((x >= 0) & (x < math.inf)) for x in errors),
            "error_quantile must be finite, 0 or above",
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


def _draws(case: _Case, mechanism: Mechanism, count: int) -> Any:
    """In batches of one size, so that all counts share a program."""
    keys = jax.random.split(case.key, (math.ceil(count / _BATCH), _BATCH))
    batches = [
        jax.device_get(_released_values(mechanism, keys[i], case.value)) for i in range(len(keys))
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *batches)


@jax.jit
def _released_values(mechanism: Mechanism, keys: jax.Array, value: Any) -> Any:
    return jax.vmap(lambda key: mechanism(key, value).value)(keys)


@jax.jit
def _log_probs(mechanism: Mechanism, outputs: Any, value: Any) -> jax.Array:
    return jax.vmap(mechanism.log_prob, in_axes=(0, None))(outputs, value)


def _another_norm(difference: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(difference)]))


def _strange_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of nothing but NaN or an infinity, for integers the ends; and with a single NaN."""
    for strange in (math.nan, math.inf, -math.inf):
        filled = jax.tree.map(lambda x, s=strange: _filled(x, s), value)
        yield f"{strange}", filled
    if any(leaf.size > 1 for leaf in jax.tree.leaves(value)):
        yield "one nan", jax.tree.map(lambda x: _filled(x, math.nan, count=1), value)


def _filled(leaf: jax.Array, strange: float, count: int | None = None) -> jax.Array:
    filled = np.array(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        strange = jnp.iinfo(leaf.dtype).min if strange < 0 else jnp.iinfo(leaf.dtype).max
    filled.ravel()[:count] = strange
    return jnp.asarray(filled)


def _same(tree: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def _close(tree: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.allclose(np.asarray(x, float), np.asarray(y, float), rtol=1e-5) for x, y in pairs)


def _require(holds: Any, message: str) -> None:
    if not holds:  # Not an assert statement: those vanish under `python -O`.
        raise AssertionError(message)


def _assert_raises(what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (TypeError, ValueError):
        return
    raise AssertionError(f"{what} must be refused")
