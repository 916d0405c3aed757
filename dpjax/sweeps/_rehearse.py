"""`rehearse`: releases of simulated databases, which show how large the noise of a release is."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Inside, Mechanism, Oracle, Target
from dpjax.mechanisms._noisy_arrays import CoordinatewiseMechanism
from dpjax.mechanisms._selection import SelectionMechanism
from dpjax.random._keys import check_key
from dpjax.release._known_sensitivity import covering, needed, plan_of
from dpjax.release._privatize import accepting_values, as_released, privatize
from dpjax.sweeps._axes import REPEAT
from dpjax.sweeps._sweep import sweep

if TYPE_CHECKING:
    from xarray import Dataset

_LEAST_DRAWS = 20  # Fewer draws would not be enough to estimate a spread.
_MECHANISM, _DRAW = "mechanism", "draw"
_MOSTLY_NOISE = 3  # If the ratio of noise to spread is at least this, a release is mostly noise.
_PAGE = "docs/when-it-works.md"


def rehearse(
    key: Key,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    mechanisms: Mechanism | Sequence[Mechanism] | Mapping[str, Mechanism],
    draws: int = 200,
) -> "Dataset":
    """Shows what releases would look like, on databases that the oracle draws.

    It compares the noise with the spread: the variation of the answer between the databases. The
    spread is the sampling error: the answer varies because only n people are asked. A release has
    this error even without noise. The result helps you to choose a mechanism, or to decide not to
    publish. Only public data are used.

    Args:
        key: a typed key of `dpjax.random.seeded_key` or `secure_key`, used for nothing else.
        target: the function to be released, or a query.
        oracle: draws plausible databases, `oracle(key, n)`.
        n: number of records of a database.
        mechanisms: one or several with additive noise, calibrated to the sensitivity of the target.
            In a dict, the keys are their names. In a list, each is named after its noise. A proved
            sensitivity clamps records, and the noise then includes the effect of the clamp.
            Mechanisms may also be selections. Then the answers are the best scores, the releases
            are the scores of the selected options, and the noise is their difference. Next to
            selections, a mechanism with additive noise selects the options with the largest noisy
            scores.
        draws: number of databases. For light tails, 200 give the ratio to about 10%.

    Returns:
        An `xarray.Dataset` (needs the extra "sweep") over `mechanism`, `draw`, and the dimensions
        of the target's arrays.

        - `noise_over_spread`, for each mechanism: the root mean square of the noise divided by that
          of the spread, for all numbers of the value together. It is infinite if the answer never
          varies, and NaN if the answer is not always finite;
        - `noise_over_spread_each`: the same for every single number;
        - `verdict`: what this means, in a sentence;
        - `value` and `released`: the answers on the drawn databases, and their releases. Arrays in
          a tree get names with their keys, as in `dpjax.sweep`.

        The coordinates `guarantee` and `relation` describe each mechanism's guarantee.
        `dpjax.plotting.rehearsal` plots the result.

    Raises:
        ModuleNotFoundError: if xarray is not installed.
        TypeError: if the key, the target or the oracle is of another type, or a mechanism neither
            adds noise to the value nor selects by it.
        ValueError: if a mechanism is for another target, n, or value, or for a proof about other
            records; if no mechanism is given, or two have the same name; if draws or n are out of
            range.

    Formal guarantees:
        None are needed: no private data are used, so you may look at all results before you choose.
        Nothing is debited from ledgers. Every database and every draw of noise has its own key.

    Source:
        None.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> found = dpjax.rehearse(
        ...     dpjax.random.seeded_key(0),
        ...     jnp.mean,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=1000,
        ...     mechanisms={f"epsilon {x:g}": dpjax.laplace(0.001, x) for x in (1.0, 0.01)},
        ... )
        >>> for verdict in found.verdict.values:
        ...     print(verdict)
        epsilon 1: noise is 0.14 of the sampling spread. Publish.
        epsilon 0.01: noise is 12 times the sampling spread. Do not publish: see ...
    """
    check_key(key)
    _checks.host_only("rehearse", key, "mechanism.unpaid_draw")
    _checks.function("oracle", oracle)
    n = _checks.integer("n", n, least=1)
    draws = _checks.integer("draws", draws, least=_LEAST_DRAWS)
    named = _named(mechanisms)
    # This raises any error that a release would raise, before anything is drawn.
    drawn = TreeSpec.of(jax.eval_shape(lambda key: oracle(key, n), key))
    for name, mechanism in named.items():
        _check(name, mechanism, target, n, drawn)
    inside = {name: _plan_of_release(target, mechanism) for name, mechanism in named.items()}
    selecting = [name for name, one in named.items() if isinstance(one, SelectionMechanism)]

    def release_all(key: Key) -> dict[str, PyTree]:
        key_database, key_noise = jax.random.split(key)
        database = oracle(key_database, n)
        value = answer = target(database)
        released: list[Value] = []
        drawn: dict[str, Value] = {}
        for i, (name, one) in enumerate(inside.items()):
            # Some queries do not release the answer itself, but numbers from which `published` then
            # computes the answer.
            exact = one.target(database)
            drawn[name] = one.mechanism.unpaid_draw(jax.random.fold_in(key_noise, i), exact)
            if name not in selecting:
                drawn[name] = one.published(drawn[name]) if one.published else drawn[name]
        for name, found in drawn.items():
            if selecting:
                # If a mechanism selects by scores, the noisy scores of the other mechanisms are
                # turned into selections, too: the k options with the largest noisy scores. The
                # first mechanism that selects determines k.
                like = drawn[next(iter(selecting))]
                chosen = found if name in selecting else _largest(found, like)
                answer, found = _best_and_selected(value, chosen)
            _check_alike(name, answer, found, released)
            released.append(found)
        return {"value": answer, "released": released}

    found = sweep(key, release_all, repeats=draws).rename({REPEAT: _DRAW})
    return _summary(found, named)


def _named(mechanisms: Any) -> dict[str, Any]:
    if isinstance(mechanisms, Mapping):
        pairs = list(mechanisms.items())
    else:
        listed = mechanisms if isinstance(mechanisms, (list, tuple)) else [mechanisms]
        laws = [getattr(x, "noise", None) or getattr(x, "rule", None) for x in listed]
        pairs = [(getattr(law, "name", "?"), x) for law, x in zip(laws, listed, strict=True)]
    kinds = CoordinatewiseMechanism, SelectionMechanism
    for name, mechanism in pairs:
        if not isinstance(mechanism, kinds):
            raise TypeError(
                f"mechanisms must add noise to numbers or select by scores, got"
                f" {type(mechanism).__name__}; study other mechanisms with dpjax.sweep and"
                " mechanism.unpaid_draw"
            )
        if not isinstance(name, str):
            raise TypeError(f"mechanisms must have strings as names, got {_checks.shown(name)}")
    if not pairs:
        raise ValueError("mechanisms must contain at least one mechanism, got none")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(
            f"mechanisms must have distinct names, got {[name for name, _ in pairs]}: give a dict"
            " from names to mechanisms"
        )
    return dict(pairs)


def _check(name: str, mechanism: Mechanism, target: Target, n: int, drawn: TreeSpec) -> None:
    """Raises an error if a release of the drawn databases would raise one."""
    privatize(target, mechanism)
    of = mechanism.sensitivity.n
    if of is not None and of != n:
        raise ValueError(f"mechanism {name!r} is for databases of n={of} records, got n={n}")
    proved = mechanism.sensitivity.bounds is not None
    if proved and drawn != (records := mechanism.sensitivity.records):
        raise ValueError(
            f"oracle must draw records like those in the proof for mechanism {name!r}: the proof is"
            f" for {records}, got {drawn}"
        )
    covering(mechanism, needed(target, mechanism.sensitivity, drawn))


def _plan_of_release(target: Target, mechanism: Mechanism) -> Inside:
    """Returns how a release computes the value, and which mechanism adds noise to it."""
    sensitivity = mechanism.sensitivity
    if sensitivity.bounds is None:
        return plan_of(target, mechanism)
    return Inside(as_released(target, sensitivity), accepting_values(mechanism))


def _largest(noisy: jax.Array, selected: jax.Array) -> jax.Array:
    """Returns the options with the largest noisy scores, as many as `selected` contains."""
    if not jax.tree_util.all_leaves([noisy]) or noisy.ndim - selected.ndim not in (0, 1):
        raise TypeError(
            "target must return one array of scores, because a mechanism selects by score"
        )
    count = selected.shape[-1] if noisy.ndim == selected.ndim else 1
    return lax.top_k(noisy, count)[1].reshape(selected.shape)


def _best_and_selected(scores: jax.Array, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the best scores of each row in order, and the scores of the selected options."""
    each = selected if selected.ndim == scores.ndim else selected[..., None]
    best = jnp.sort(scores, axis=-1)[..., ::-1][..., : each.shape[-1]]
    found = jnp.take_along_axis(scores, each, axis=-1)
    return best.reshape(selected.shape), found.reshape(selected.shape)


def _check_alike(name: str, value: Value, released: Value, others: list[Value]) -> None:
    if jax.tree.structure(value) != jax.tree.structure(released):
        raise TypeError(
            f"mechanism {name!r} must release numbers like those of the target, got"
            f" {_checks.described(released)}"
        )
    for other in others:
        if jax.tree.map(jnp.shape, other) != jax.tree.map(jnp.shape, released):
            raise TypeError(f"mechanism {name!r} must select as many options as the others do")


def _summary(found: "Dataset", named: Mapping[str, Mechanism]) -> "Dataset":
    """Compares each mechanism's error with the spread of answers, and adds a verdict in words."""
    xarray = _checks.extra("xarray", "sweep")
    variables: dict[str, tuple[tuple[Hashable, ...], np.ndarray]] = {}
    for name in [str(name) for name in found if str(name).startswith("value")]:
        suffix, dims = name.removeprefix("value"), found[name].dims
        rows = [found[f"released_{i}{suffix}"].values for i in range(len(named))]
        variables[name] = dims, found[name].values
        variables[f"released{suffix}"] = (_MECHANISM, *dims), np.stack(rows)
    value = _numbers(variables, "value", 1)
    finite = np.asarray(np.isfinite(value).all(axis=1))
    with np.errstate(all="ignore"):  # Infinite and undefined ratios have verdicts of their own.
        error = _numbers(variables, "released", 2) - value
        noise, spread = np.mean(error**2, axis=1), np.var(value, axis=0, ddof=1)
        each, together = np.sqrt(noise / spread), np.sqrt(noise.sum(1) / spread.sum())
    selects = any(isinstance(one, SelectionMechanism) for one in named.values())
    verdicts = [
        f"{name}: {_verdict(_measured(one, selects), ratio, ratios, finite)}"
        for (name, one), ratio, ratios in zip(named.items(), together.tolist(), each, strict=True)
    ]
    guarantees = [mechanism.guarantee for mechanism in named.values()]
    return xarray.Dataset(
        {
            "noise_over_spread": (_MECHANISM, together),
            "noise_over_spread_each": ((_MECHANISM, "number"), each),
            "verdict": (_MECHANISM, np.array(verdicts, object)),
            **variables,
        },
        {
            _MECHANISM: np.array(list(named), object),
            "guarantee": (_MECHANISM, np.array(list(map(str, guarantees)), object)),
            "relation": (_MECHANISM, np.array([x.neighbors for x in guarantees], object)),
        },
        {name: found.attrs[name] for name in ("versions", "backend", "key")},
    )


def _numbers(
    variables: Mapping[str, tuple[tuple[Hashable, ...], np.ndarray]], start: str, axes: int
) -> np.ndarray:
    """Flattens axes after the first `axes`. Casts to float64, because results are subtracted."""
    arrays = [array for name, (_, array) in variables.items() if name.startswith(start)]
    rows = [x.astype(np.float64).reshape(*x.shape[:axes], -1) for x in arrays]
    return np.concatenate(rows, axis=axes)


def _measured(mechanism: Mechanism, selects: bool) -> str:
    """Returns how a verdict names the error of a mechanism."""
    if selects:
        return "the score that noise costs"
    clamps = mechanism.sensitivity.bounds is not None
    return "the error by noise and by the clamp" if clamps else "noise"


def _verdict(what: str, ratio: float, each: np.ndarray, finite: np.ndarray) -> str:
    if not finite.all():
        return (
            f"the answer is not finite on {(~finite).sum()} of {finite.size} drawn databases."
            " Change the target or the oracle."
        )
    if math.isnan(ratio):
        return "neither the answer nor the noise varies."
    if math.isinf(ratio):
        return "the answer is the same on all drawn databases. Do not publish: only noise varies."
    size = f"{ratio:.2g}" if ratio < 1 else f"{ratio:.2g} times"
    said = f"{what} is {size} {'of ' if ratio < 1 else ''}the sampling spread"
    drowned = int((each > 1).sum())
    if ratio >= _MOSTLY_NOISE:
        return f"{said}. Do not publish: see {_PAGE}."
    if ratio >= 1:
        return f"{said}. Publish only if you must: more people or fewer numbers help, see {_PAGE}."
    if drowned:
        some = f"{drowned} of {each.size} numbers"
        return f"{said}, but above it in {some}. Publish: those are mostly noise."
    return f"{said}. Publish."
