"""A private test of an oracle: are the records plausible as a draw from it?"""

import dataclasses
from collections.abc import Callable
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static, up
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Norm, Oracle, Scalar, Sensitivity
from dpjax._tracing._lanes import program_of_a_number
from dpjax._tracing._programs import Program, kept_jit
from dpjax.mechanisms._additive import AdditiveMechanism, laplace
from dpjax.mechanisms._start import begin
from dpjax.random._keys import check_key, sampling_key
from dpjax.release._mechanism import SensitivityMechanism

# Databases that fix the bins and the weights of the test.
_PILOTS = 32
_LARGEST = float(np.finfo(np.float32).max)

Score: TypeAlias = Callable[[PyTree], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class _Expected:
    """Counts of an oracle's records in public bins, without noise.

    Two instances are equal if their contents are.

    Attributes:
        edges: the edges between the bins.
        mean: the mean of the counts.
        variance: the variance of the counts.
        simulated: counts of drawn databases, shape (simulations, bins).
    """

    edges: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    simulated: np.ndarray

    def _content(self) -> tuple[bytes, ...]:
        return tuple(np.asarray(x).tobytes() for x in vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Expected) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


@frozen_pytree
class OraclePlausibility:
    """Noisy counts of the records in public bins, and how rarely the oracle deviates as much.

    Attributes:
        p_value: the share of databases, including this one, that deviate at least as much.
        counts: the counts of the records in the bins, with noise; integers that may be negative.

    Formal guarantees:
        Those of the mechanism that released it. A small p-value refutes the oracle. A large one
        certifies nothing.
    """

    p_value: jax.Array
    counts: jax.Array

    def __repr__(self) -> str:
        return f"OraclePlausibility(p_value={self.p_value}, counts={self.counts})"


@frozen_pytree
class OracleCheck(SensitivityMechanism):
    """Compares the records with an oracle; made by `check_oracle`.

    Attributes:
        sensitivity: one record changes, norm "hamming".
        epsilon: the epsilon of the guarantee.
        score: the score of a record.
        expected: counts of the oracle's records in the bins.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    score: Score = static()
    expected: _Expected = static()
    _calls_user = True

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity: "hamming"."""
        return "hamming"

    @property
    def counting(self) -> AdditiveMechanism:
        """Adds noise to the counts: a replaced record leaves one bin and enters another."""
        return laplace(2.0, self.epsilon)

    @property
    def edges(self) -> np.ndarray:
        """The public edges of the bins: quantiles of the score under the oracle."""
        return self.expected.edges

    def _check_value(self, value: Value) -> None:
        self._check_records(value)
        _program_of(self.score, value)
        self.counting._check_value(jax.ShapeDtypeStruct(self.expected.mean.shape, jnp.int32))

    def _check_records(self, value: Value) -> None:
        n = self.sensitivity.n
        if {leaf.shape[:1] for leaf in jax.tree.leaves(value)} != {(n,)}:
            raise ValueError(
                f"value must be arrays with a common leading axis of n={n} records, got"
                f" {_checks.described(value)}"
            )

    def _frozen(self, value: TreeSpec) -> Self:
        arrays = value.tree()
        self._check_records(arrays)
        return dataclasses.replace(self, score=_program_of(self.score, arrays))

    def _draw(self, key: Key, value: Value) -> OraclePlausibility:
        expected, counting = self.expected, self.counting
        key_counts, key_simulated = jax.random.split(key)
        counts = counting._draw(key_counts, _counts(self.score, expected.edges, value))
        simulated = jnp.asarray(expected.simulated)
        keys = jax.random.split(key_simulated, len(simulated))
        noisy = jax.vmap(counting._draw)(keys, simulated)
        # The test is valid with any fixed weights. Inverse variances make it powerful.
        variance = expected.variance + 2 * jnp.square(2 / jnp.asarray(self.epsilon, jnp.float32))

        def deviation(counts: jax.Array) -> jax.Array:
            off = counts.astype(jnp.float32) - expected.mean
            return jnp.sum(jnp.square(off) / variance)

        # A sum may round differently alone and in a batch. The factor makes sure that equal counts
        # still count as deviating as much.
        least = deviation(counts) * (1 - (counts.size + 8) * float(np.finfo(np.float32).eps))
        as_much = jnp.sum(jax.vmap(deviation)(noisy) >= least, dtype=jnp.float32)
        p_value = (1 + as_much) / float(1 + len(simulated))
        # A bad traced epsilon becomes NaN in the p-value, and -1 in the counts.
        bad = ~(jnp.asarray(self.epsilon) > 0)
        return OraclePlausibility(jnp.where(bad, jnp.nan, p_value), jnp.where(bad, -1, counts))

    def clamped(self, value: Value) -> Value:
        """The records as they are: the score sees all of them.

        Args:
            value: a pytree of arrays of records.

        Returns:
            The same arrays.
        """
        return _checks.real_arrays("value", value)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        """Log probability of the counts. The p-value adds public randomness to them alone.

        Args:
            output: an `OraclePlausibility`.
            value: a database.

        Returns:
            A scalar.
        """
        value = _checks.real_arrays("value", value)
        self._check_value(value)
        return self.counting.log_prob(
            output.counts, _counts(self.score, self.expected.edges, value)
        )

    def power(
        self, key: Key, alternative: Oracle, *, level: float = 0.05, trials: int = 200
    ) -> float:
        """How often the test would refute the oracle, if records came from another one.

        Args:
            key: a typed key of `dpjax.random`.
            alternative: draws databases as the oracle does.
            level: the level of the p-value, below which the oracle counts as refuted.
            trials: the number of databases that are drawn.

        Returns:
            The share of databases with a p-value of at most `level`. It is public: nothing private
            goes in.
        """
        check_key(key)
        level = float(_checks.fraction("level", level))
        trials = _checks.integer("trials", trials, least=1)
        n = self.sensitivity.n
        assert n is not None

        def p_value(keys: tuple[Key, Key]) -> jax.Array:
            key_release, key_database = keys
            return self._draw(key_release, alternative(key_database, n)).p_value

        keys = jax.random.split(key, trials), jax.random.split(sampling_key(key), trials)
        found = jax.jit(lambda keys: lax.map(p_value, keys))(keys)
        return float(np.mean(np.asarray(found) <= level * (1 + 1e-6)))


def check_oracle(
    key: Key,
    oracle: Oracle,
    score: Score | None = None,
    *,
    n: int,
    epsilon: Scalar,
    quantiles: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99),
    simulations: int = 999,
) -> OracleCheck:
    """A private test of whether the database is plausible as a draw from an oracle.

    Random DP rests on its oracle. The mechanism counts the records in bins of a public score, adds
    noise, and compares the counts with those of databases from the oracle, under the same noise.

    Args:
        key: a typed key, for the databases from the oracle, which are drawn here.
        oracle: draws databases; its records may depend on each other.
        score: takes one record to a number; None for `oracle.log_prob`. It must be public. NaN
            counts as the lowest.
        n: records of a database; public.
        epsilon: finite, above 0.
        quantiles: of the score under the oracle, in order: the edges of the bins.
        simulations: databases that the p-value compares with, at least 19.

    Returns:
        An `OracleCheck`: `mechanism(key, database)` releases an `OraclePlausibility` with `p_value`
        and `counts`. `mechanism.power(key, alternative)` estimates in advance how often the test
        refutes the oracle, if the records come from another one.

    Raises:
        TypeError: if the oracle has no `log_prob` and no score is given, or an argument has the
            wrong type.
        ValueError: if a number is out of range; at a release, if there are not n records.

    Formal guarantees:
        epsilon-DP when one record is replaced, for any oracle and score, with gamma 0: the counts
        move by 2 in l1, and the rest is computed from them and public numbers. A ledger pays for it
        like for any other release.

        If the database is a draw from the oracle, P(p_value <= a) <= a, over the databases drawn
        here, the private database and the noise, because the counts of all databases are
        exchangeable. The edges come from other draws, so they need not be the true quantiles. The
        test can only refute an oracle. You may test first and release only if the oracle passes:
        the probability that a pair is bad and is released remains at most gamma.

    Source:
        Barnard (1963) for the test; Awan and Wang (2022), Kazan et al. (2023) and Canonne et al.
        (2019) for tests under differential privacy.

    Example:
        >>> import jax
        >>> import dpjax
        >>> oracle = dpjax.oracles.independent(jax.random.exponential, log_prob=lambda x: -x)
        >>> check = dpjax.check_oracle(jax.random.key(0), oracle, n=1000, epsilon=1.0)
        >>> records = 2 * oracle(jax.random.key(1), 1000)
        >>> float(check(dpjax.random.seeded_key(2), records).value.p_value)
        0.0010000000474974513
    """
    key = sampling_key(key)
    if _checks.is_traced(key):
        raise TypeError("key must be concrete: make the check outside of jit and vmap")
    n = _checks.integer("n", n, least=1)
    simulations = _checks.integer("simulations", simulations, least=19)
    cuts = tuple(float(_checks.fraction("quantiles", x)) for x in quantiles)
    if not cuts or list(cuts) != sorted(set(cuts)):
        raise ValueError(f"quantiles must be numbers in order, got {quantiles}")
    _checks.function("oracle", oracle)
    if score is None:
        score = getattr(oracle, "log_prob", None)
        if score is None:
            raise TypeError("score must be a function of a record: the oracle has no log_prob")
    _checks.function("score", score)
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    with jax.ensure_compile_time_eval():
        expected = _simulated(key, oracle, score, n, cuts, simulations)
    return OracleCheck(dataclasses.replace(sensitivity, n=n), epsilon, score, expected)


def _program_of(score: Score, database: Database) -> Program:
    """The score of one record as a program that never mixes records under `vmap`."""
    if isinstance(score, Program):
        return score
    record = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), database)
    return program_of_a_number("score", score, record)


def _scores_of(score: Score, database: Database) -> jax.Array:
    (found,) = jax.tree.leaves(jax.vmap(_program_of(score, database))(database))
    found = found.astype(jnp.float32)
    return jnp.clip(jnp.where(jnp.isnan(found), -_LARGEST, found), -_LARGEST, _LARGEST)


def _counts(score: Score, edges: np.ndarray | jax.Array, database: Database) -> jax.Array:
    """The records in each bin, int32: a record is in exactly one."""
    bins = jnp.searchsorted(jnp.asarray(edges), _scores_of(score, database), side="right")
    return jnp.zeros(len(edges) + 1, jnp.int32).at[bins].add(1)


def _edges(scores: np.ndarray, cuts: tuple[float, ...]) -> np.ndarray:
    """Edges slightly below each quantile, in the middle between two scores.

    Two programs may round the same score differently. So no edge lies at a score, where many
    records could change their bin.
    """
    ordered = np.sort(scores.astype(np.float64), axis=None)
    quantiles = ordered[[int(cut * (ordered.size - 1)) for cut in cuts]]
    inside = ordered[np.abs(ordered) < _LARGEST]
    low, high = inside[[inside.size // 10, -1 - inside.size // 10]] if inside.size else (0.0, 0.0)
    apart = np.maximum((high - low) * 2.0**-10, np.abs(quantiles) * 2.0**-20)
    above = np.searchsorted(ordered, quantiles - apart)
    least = ordered[0] - (max(high - low, abs(ordered[0])) * 2.0**-10 or 1.0)
    middle = np.where(above > 0, (ordered[above - 1] + ordered[above]) / 2, least)
    return np.clip(middle, -_LARGEST, _LARGEST).astype(np.float32)


def _simulated(
    key: Key, oracle: Oracle, score: Score, n: int, cuts: tuple[float, ...], simulations: int
) -> _Expected:
    key_pilots, key_databases = jax.random.split(key)
    pilots = jax.random.split(key_pilots, _PILOTS)
    spec = jax.ShapeDtypeStruct((), key.dtype)
    # Programs with equal fingerprints are compiled once.
    drawn = Program.trace("oracle", lambda key: oracle(key, n), spec)
    scored = _program_of(score, drawn.outputs.tree())
    scores = _scores_of_drawn(pilots, oracle=drawn, score=scored)
    edges = _edges(np.asarray(scores), cuts)

    def simulate(keys: Key) -> np.ndarray:
        return np.asarray(_counts_of_drawn(keys, edges, oracle=drawn, score=scored))

    piloted = simulate(pilots)
    mean = piloted.mean(axis=0)
    # Counts of a few databases may coincide by chance, so the variance gets a lower limit.
    variance = np.maximum(piloted.var(axis=0), np.maximum(mean * (1 - mean / n), 1.0))
    databases = simulate(jax.random.split(key_databases, simulations))
    return _Expected(edges, mean.astype(np.float32), variance.astype(np.float32), databases)


@kept_jit("oracle", "score")
def _scores_of_drawn(keys: Key, *, oracle: Program, score: Program) -> jax.Array:
    """The scores of the records of a database for each key."""
    return lax.map(lambda key: _scores_of(score, oracle(key)), keys)


@kept_jit("oracle", "score")
def _counts_of_drawn(keys: Key, edges: np.ndarray, *, oracle: Program, score: Program) -> jax.Array:
    """The counts in each bin of a database for each key."""
    return lax.map(lambda key: _counts(score, edges, oracle(key)), keys)
