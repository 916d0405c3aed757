"""Membership trials: one of two random neighbors is released; which one was it?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._values import Mechanism, Oracle, Target
from dpjax.attacks._many_runs import many_runs, released_value
from dpjax.random._facade import check_sampling_key, sampling_key
from dpjax.sensitivity._neighbors import neighboring_pair

MembershipScore = Callable[[Any, Any, Any], jax.Array]

_MOST_RECORDS = 2**30 - 1


def membership_trials(
    key: jax.Array,
    release: Callable[[jax.Array, Any], Any],
    oracle: Oracle,
    *,
    score: MembershipScore,
    n: int,
    trials: int,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attacks a fresh release of a fresh random pair in every trial: independent scores.

    A trial draws n + 1 records, makes of them two databases that differ in one record at a random
    position, tosses a coin for the one that is released, and scores the release. Thousands of
    trials, each with a training of its own, are one program.

    Args:
        key: a typed key, of the chacha20 implementation where `release` takes no other.
        release: `release(key, database)` gives a `Release`, whose value is attacked, or any pytree
            of arrays, as a pure JAX function: `dpjax.privatize(target, mechanism)`, or a training.
        oracle: draws the records, as for `dpjax.sample_sensitivity`.
        score: `score(value, database, neighbor)`, a number that is higher the more the released
            value looks like one of `database`: the attacker knows both, and not the coin. See
            `likelihood_ratio`.
        n: records of a database, at least 1.
        trials: how many, at least 1.
        chunk_size: trials at a time; by default as many as fit.

    Returns:
        The scores, and whether `database` was the one that was released, both of shape (trials,):
        what `roc_curve` takes.

    Raises:
        TypeError: if the key is not a typed key of a usable implementation, a function is none, or
            what they return is not real arrays.
        ValueError: if a number is out of range, or score does not return a scalar.

    Formal guarantees:
        Trials are independent, and coins fair. Where release is (epsilon, delta)-DP on all pairs
        but those of probability gamma, any threshold of any score has a true positive rate of at
        most e^epsilon FPR + delta + gamma, and so have its negatives. gamma is over samples and
        pairs together, or holds with confidence C over the samples, which adds 1 - C: to see that
        at work, let `release` sample its own sensitivity.

    Source:
        Yeom, Giacomelli, Fredrikson and Jha (2018) for the game; Kairouz, Oh and Viswanath (2015),
        Theorem 2.1, for the bound.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> mechanism = dpjax.laplace(1 / 10, epsilon=1.0)
        >>> scores, members = dpjax.attacks.membership_trials(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.privatize(jnp.mean, mechanism),
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     score=dpjax.attacks.likelihood_ratio(jnp.mean, mechanism),
        ...     n=10,
        ...     trials=1000,
        ... )
        >>> scores.shape, bool(jnp.max(scores) <= 1.0)
        ((1000,), True)
    """
    for name, function in (("release", release), ("oracle", oracle), ("score", score)):
        _checks.function(name, function)
    n = _checks.integer("n", n, least=1, most=_MOST_RECORDS)
    key_pairs, key_releases = jax.random.split(check_sampling_key(key))

    def trial(index: jax.Array, key_pairs: jax.Array, key_releases: jax.Array) -> Any:
        key_records, key_draws = jax.random.split(jax.random.fold_in(key_pairs, index))
        position, coin = jnp.divmod(jax.random.randint(key_draws, (), 0, 2 * n), 2)
        neighbor, database = neighboring_pair(oracle(key_records, n + 1), position)
        is_member = coin == 1
        chosen = jax.tree.map(lambda x, y: jnp.where(is_member, x, y), database, neighbor)
        value = released_value(release(jax.random.fold_in(key_releases, index), chosen))
        return _number(score(value, database, neighbor)), is_member

    arguments = sampling_key(key_pairs), key_releases
    return many_runs("trials", trial, arguments, count=trials, chunk_size=chunk_size)


def likelihood_ratio(target: Target, mechanism: Mechanism) -> MembershipScore:
    """The best score for the release of a target by a mechanism: the log of its likelihood ratio.

    Args:
        target: what is released.
        mechanism: by which; it must state its distribution, by `log_prob`.

    Returns:
        A function of a released value and two databases, for `membership_trials`.

    Raises:
        TypeError: if the target is not a function, or the mechanism has no `log_prob`.

    Formal guarantees:
        Where releases are drawn as `log_prob` says, no attack has a higher true positive rate at
        any false positive rate, on one pair of databases or over random pairs.

    Source:
        Neyman and Pearson (1933).

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> score = dpjax.attacks.likelihood_ratio(jnp.sum, dpjax.laplace(1.0, epsilon=0.5))
        >>> round(float(score(5.0, jnp.array([1.0, 1.0]), jnp.array([1.0, 0.0]))), 3)
        0.5
    """
    _checks.function("target", target)
    log_prob = _checks.function("log_prob of the mechanism", mechanism.log_prob)

    def score(value: Any, database: Any, neighbor: Any) -> jax.Array:
        return log_prob(value, target(database)) - log_prob(value, target(neighbor))

    return score


def _number(score: Any) -> jax.Array:
    if jnp.shape(score) != ():
        raise ValueError(f"score must be one number, got shape {jnp.shape(score)}")
    return jnp.asarray(score).astype(jnp.result_type(float))
