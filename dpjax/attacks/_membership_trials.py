"""`membership_trials`: an attacker guesses which of two neighbors a release was computed from."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Mechanism, Oracle, Release, Target
from dpjax._running._devices import fitting
from dpjax._tracing._programs import Program, kept_jit
from dpjax.attacks._linear_queries import common_floats, wrong_shape
from dpjax.random._keys import check_sampling_key, sampling_key
from dpjax.release._known_sensitivity import plan_of
from dpjax.sensitivity._pairs import neighboring_pair

_MOST_RUNS = 2**32 - 1


def many_runs(
    name: str,
    run: Callable[..., PyTree],
    arguments: tuple[PyTree, ...],
    *,
    count: int,
    chunk_size: int | None,
) -> PyTree:
    """Returns `run(index, *arguments)` for index = 0, ..., count - 1, stacked.

    All chunks run the same program, even the last one. Functions with the same trace share a
    compiled program.
    """
    _checks.integer(name, count, least=1, most=_MOST_RUNS)
    specs = TreeSpec.of(arguments).tree()
    program = Program.trace("run", run, jax.ShapeDtypeStruct((), jnp.uint32), *specs)
    size = fitting(program.largest_array, None)
    if chunk_size is not None:
        size = _checks.integer("chunk_size", chunk_size, least=1)
    chunks = -(-count // size)
    mapped = _compiled_runs if program.is_concrete else _mapped_runs
    found = mapped(arguments, program=program, chunks=chunks, size=min(size, count))
    return jax.tree.map(operator.itemgetter(slice(count)), found)


def _mapped_runs(
    arguments: tuple[PyTree, ...], *, program: Program, chunks: int, size: int
) -> PyTree:
    def one(index: jax.Array) -> PyTree:
        return program(index, *arguments)

    def chunk(start: jax.Array) -> PyTree:
        return jax.vmap(one)(start + jnp.arange(size, dtype=jnp.uint32))

    starts = jnp.arange(chunks, dtype=jnp.uint32) * jnp.uint32(size)
    return jax.tree.map(jnp.concatenate, lax.map(chunk, starts))


_compiled_runs = kept_jit("program", "chunks", "size")(_mapped_runs)


def released_value(released: Release | Value) -> Value:
    """Returns the value of a `Release`. Any other object is returned unchanged."""
    return released.value if isinstance(released, Release) else released


MembershipScore = Callable[[Value, Database, Database], jax.Array]

_MOST_RECORDS = 2**30 - 1


def membership_trials(
    key: Key,
    release: Callable[[Key, Database], Release | Value],
    oracle: Oracle,
    *,
    score: MembershipScore,
    n: int,
    trials: int,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attacks many releases, each for a new random pair of databases, so scores are independent.

    A trial draws n + 1 records, and makes two databases of them that differ in one record at a
    random position. A fair coin decides which of the two is released, and the attacker scores the
    release. Thousands of trials, each with its own training, run as one program.

    Args:
        key: a typed key, of the chacha20 implementation if `release` requires it.
        release: a pure JAX function `release(key, database)`, such as a training, or
            `dpjax.privatize(target, mechanism)`. It returns any pytree of arrays, or a `Release`,
            whose value is attacked.
        oracle: draws the records, as for `dpjax.sample_sensitivity`.
        score: `score(value, database, neighbor)`, a number. It should be higher if the value was
            released from `database`. The attacker knows both databases, but not the coin. See
            `likelihood_ratio`.
        n: records of a database, at least 1.
        trials: the number of trials, at least 1.
        chunk_size: trials at a time; by default as many as fit in memory.

    Returns:
        The scores, and whether `database` was released, both of shape (trials,). `roc_curve` takes
        both.

    Raises:
        TypeError: if the key is not a typed key of a usable implementation, a parameter that must
            be a function is not, or a function does not return real arrays.
        ValueError: if a number is out of range, or score does not return a scalar.

    Formal guarantees:
        Trials are independent, and coins are fair. Let `release` be (epsilon, delta)-DP except on a
        fraction gamma of all pairs. Then at every threshold of every score, the true positive rate
        is at most e^epsilon FPR + delta + gamma, and the true negative rate is at most e^epsilon
        FNR + delta + gamma. If `release` samples its own sensitivity in every trial, this is true
        for a marginal gamma, which is a probability over samples and pairs together. For a gamma
        with confidence C over the samples, 1 - C is added to the bound.

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

    def trial(index: jax.Array, key_pairs: Key, key_releases: Key) -> tuple[jax.Array, jax.Array]:
        key_records, key_draws = jax.random.split(jax.random.fold_in(key_pairs, index))
        position, coin = jnp.divmod(jax.random.randint(key_draws, (), 0, 2 * n), 2)
        neighbor, database = neighboring_pair(oracle(key_records, n + 1), position)
        is_member = coin == 1
        chosen = jax.tree.map(functools.partial(jnp.where, is_member), database, neighbor)
        value = released_value(release(jax.random.fold_in(key_releases, index), chosen))
        return _number(score(value, database, neighbor)), is_member

    arguments = sampling_key(key_pairs), key_releases
    return many_runs("trials", trial, arguments, count=trials, chunk_size=chunk_size)


def likelihood_ratio(target: Target, mechanism: Mechanism) -> MembershipScore:
    """The log likelihood ratio of two databases: the best score for a release by a mechanism.

    Args:
        target: the released function of a database.
        mechanism: the mechanism that releases it, with a `log_prob` for its distribution.

    Returns:
        A function of a released value and two databases, for `membership_trials`.

    Raises:
        TypeError: if the target is not a function, or the mechanism has no `log_prob`.

    Formal guarantees:
        If `log_prob` is the log density of releases, no attack has a higher true positive rate at
        any false positive rate, on one pair of databases or on random pairs.

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
    if not callable(getattr(mechanism, "log_prob", None)):
        raise TypeError(f"mechanism must have a log_prob, got {_checks.shown(mechanism)}")

    inside = plan_of(target, mechanism)

    def score(value: Value, database: Database, neighbor: Database) -> jax.Array:
        drawn = inside.read(value)
        of_the_database = inside.mechanism.log_prob(drawn, inside.target(database))
        return of_the_database - inside.mechanism.log_prob(drawn, inside.target(neighbor))

    return score


def _number(score: jax.typing.ArrayLike) -> jax.Array:
    if jnp.shape(score) != ():
        raise ValueError(f"score must be one number, got shape {jnp.shape(score)}")
    return jnp.asarray(score).astype(jnp.result_type(float))


# Tracing attack: guesses whether a person was in a group whose means were published.


def tracing_scores(records: jax.Array, means: jax.Array, population: jax.Array) -> jax.Array:
    """Scores how close records are to published means, compared with the records of strangers.

    Let y be a record, q the published means and p the means in the population. The score is
    sum_j (y_j - p_j) (q_j - p_j) / (p_j (1 - p_j)), divided by its standard deviation for a
    stranger. For a stranger and many attributes, the score is nearly standard normal, for any
    published means. So it exceeds a threshold z with probability about 1 - Phi(z). Now let the
    published means be the exact means of n members. The average score of the members is
    sqrt(d / n), so means of many attributes of few people reveal who the members are. Works inside
    `jit`.

    Args:
        records: attributes in [0, 1] of the people to trace, shape (d,), or (..., d) for many.
        means: the published means of the attributes, shape (d,).
        population: the means in the population, or in a sample of other people, strictly between 0
            and 1, shape (d,).

    Returns:
        The scores in standard deviations, shape (...).

    Raises:
        TypeError: if an argument is not real numbers.
        ValueError: if the shapes do not fit.

    Formal guarantees:
        Let a stranger's attributes be independent bits with the means of the population. Then,
        given the published means, the score has mean 0 and variance 1 exactly. If strangers are
        drawn like members, then under (epsilon, delta)-DP the rate of members beyond a threshold
        exceeds the rate of strangers by at most 2 b - 1, where b is the `guessing_bound`.

    Source:
        Homer et al. (2008); Dwork, Smith, Steinke, Ullman and Vadhan (2015), for the inner product
        and the number of attributes that it needs.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> means, population = jnp.array([1.0, 0.0, 0.5]), jnp.array([0.5, 0.5, 0.5])
        >>> records = jnp.array([[1, 0, 1], [0, 1, 1]])
        >>> dpjax.attacks.tracing_scores(records, means, population).round(2)
        Array([ 1.41, -1.41], dtype=float32)
    """
    people, published, expected = common_floats(records=records, means=means, population=population)
    if expected.ndim != 1 or published.shape != expected.shape:
        raise wrong_shape("means and population must have one shape (d,)", published, expected)
    if people.shape[-1:] != expected.shape:
        raise wrong_shape(f"records must have shape (..., {len(expected)})", people)
    return _scores(people, published, expected)


@jax.jit
def _scores(records: jax.Array, means: jax.Array, population: jax.Array) -> jax.Array:
    variance = population * (1 - population)
    slope = (means - population) / variance
    scores = jnp.matmul(records, slope, precision=jax.lax.Precision.HIGHEST) - population @ slope
    return scores / jnp.sqrt(jnp.sum(jnp.square(slope) * variance))
