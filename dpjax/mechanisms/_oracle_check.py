"""`check_oracle`: a private test of the hypothesis that an oracle generated the records."""

import dataclasses
from collections.abc import Callable
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Oracle, Scalar
from dpjax._tracing._lanes import program_of_a_number
from dpjax._tracing._programs import Program, kept_jit
from dpjax._tracing._shards import computing_now
from dpjax.mechanisms._additive import AdditiveMechanism, laplace
from dpjax.mechanisms._start import begin
from dpjax.random._keys import check_key, sampling_key
from dpjax.release._mechanism import SensitivityMechanism

# The number of simulated databases that determine the bins and the weights of the test.
_PILOTS = 32
_LARGEST = float(np.finfo(np.float32).max)

Score: TypeAlias = Callable[[PyTree], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class _Expected:
    """Histograms without noise, in public bins, of databases that an oracle draws.

    Two instances are equal if all arrays are equal.

    Attributes:
        edges: the edges between the bins.
        mean: the mean of the counts.
        variance: the variance of the counts.
        simulated: counts of databases drawn from the oracle, shape (simulations, bins).
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
    """The result of a test of an oracle: noisy counts of records in public bins, and a p-value.

    Attributes:
        p_value: the fraction of databases whose noisy counts deviate from the mean at least as much
            as those of the private database. The databases are the simulated ones and the private
            one.
        counts: the counts of the records in the bins, with noise; integers that may be negative.

    Formal guarantees:
        Those of the mechanism that released this result. A small p-value is evidence against the
        oracle. A large p-value proves nothing.
    """

    p_value: jax.Array
    counts: jax.Array

    def __repr__(self) -> str:
        return f"OraclePlausibility(p_value={self.p_value}, counts={self.counts})"


@frozen_pytree
class OracleCheck(SensitivityMechanism):
    """Compares the records with an oracle; made by `check_oracle`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one record changes.
        epsilon: the epsilon of the guarantee.
        score: maps a record to its score.
        expected: counts of the oracle's records in the bins.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    score: Score = static()
    expected: _Expected = static()
    _calls_user = True

    @property
    def counting(self) -> AdditiveMechanism:
        """The mechanism for the counts: a replaced record leaves one bin and enters another."""
        return _counting(self.epsilon)

    @property
    def edges(self) -> np.ndarray:
        """The public edges of the bins: quantiles of the score under the oracle."""
        return self.expected.edges

    def _check_value(self, value: Value) -> None:
        self._check_records(value)
        _program_of(self.score, value)
        self.counting._check_value(jax.ShapeDtypeStruct(self.expected.mean.shape, jnp.int32))

    def _check_records(self, value: Value) -> None:
        if _checks.count_records("value", value) != self.sensitivity.n:
            described = _checks.described(value)
            raise ValueError(f"value must have n={self.sensitivity.n} records, got {described}")

    def _frozen(self, value: TreeSpec) -> Self:
        arrays = value.tree()
        self._check_records(arrays)
        return dataclasses.replace(self, score=_program_of(self.score, arrays))

    def _in_pieces(self, value: TreeSpec) -> Callable[[Key, Value], Value] | None:
        # All checks with this score share one compiled program, because the expected counts are an
        # argument of the program.
        del value
        return jax.tree.map(jnp.asarray, self)._draw

    def _draw(self, key: Key, value: Value) -> OraclePlausibility:
        score = _program_of(self.score, value)
        return _kept_plausibility(key, value, self.epsilon, vars(self.expected), score=score)

    def clamped(self, value: Value) -> Value:
        """The records without a change, because the mechanism does not clamp them.

        Args:
            value: a pytree of arrays of records.

        Returns:
            The same arrays.
        """
        return _checks.real_arrays("value", value)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        """Log probability of the counts, without the p-value.

        The p-value depends only on the counts and public randomness.

        Args:
            output: an `OraclePlausibility`.
            value: a database.

        Returns:
            A scalar.
        """
        value = self._checked(value)
        return self.counting.log_prob(
            output.counts, _counts(self.score, self.expected.edges, value)
        )

    def power(
        self, key: Key, alternative: Oracle, *, level: float = 0.05, trials: int = 200
    ) -> float:
        """The probability that the test refutes the oracle if records come from another oracle.

        Args:
            key: a typed key of `dpjax.random`.
            alternative: the other oracle, from which databases are drawn.
            level: the significance level of the test.
            trials: the number of drawn databases.

        Returns:
            The fraction of databases with a p-value of at most `level`. It is public, because it
            does not depend on private data.
        """
        check_key(key)
        level = float(_checks.fraction("level", level))
        trials = _checks.integer("trials", trials, least=1)
        n = self.sensitivity.n
        assert n is not None

        key_database = sampling_key(key)
        spec = jax.ShapeDtypeStruct((), key_database.dtype)
        drawn = Program.trace("alternative", lambda key: alternative(key, n), spec)
        score = _program_of(self.score, drawn.outputs.tree())
        keys = jax.random.split(key, trials), jax.random.split(key_database, trials)
        expected = vars(self.expected)
        found = _p_values(keys, self.epsilon, expected, oracle=drawn, score=score)
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

    The guarantee of random DP assumes that the private database is a draw from the oracle. The
    mechanism counts the records in bins of a public score, and adds noise. Then it compares the
    noisy counts with noisy counts of databases from the oracle.

    Args:
        key: a typed key, for drawing databases from the oracle.
        oracle: draws databases; its records may depend on each other.
        score: a public function that maps one record to a number; None for `oracle.log_prob`. NaN
            counts as the lowest score.
        n: the number of records in a database; public.
        epsilon: finite, above 0.
        quantiles: the bins have their edges at these quantiles of the score under the oracle, in
            increasing order.
        simulations: the number of drawn databases for the p-value, at least 19.

    Returns:
        An `OracleCheck`: `mechanism(key, database)` releases an `OraclePlausibility` with `p_value`
        and `counts`. `mechanism.power(key, alternative)` estimates in advance how often the test
        refutes the oracle if the records come from an alternative oracle.

    Raises:
        TypeError: if the oracle has no `log_prob` and no score is given, or an argument has the
            wrong type.
        ValueError: if a number is out of range; at a release, if there are not n records.

    Formal guarantees:
        epsilon-DP when one record is replaced, for any oracle and score, with gamma 0. Proof: a
        replaced record changes the counts by 2 in l1, and everything else is computed from the
        noisy counts and public numbers. A ledger pays for the test as for any other release.

        If the database is a draw from the oracle, P(p_value <= a) <= a over the databases drawn
        here, the private database and the noise, because the noisy counts of all databases are
        exchangeable. The edges are estimated from separate draws, so the test is valid even if they
        are not the true quantiles. The test can only refute an oracle, not confirm it. You may test
        first, and release only if the oracle passes. The probability that the test passes and the
        sensitivity does not cover the pair remains at most gamma.

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
        raise ValueError(
            f"quantiles must be different numbers in increasing order, got {quantiles}"
        )
    _checks.function("oracle", oracle)
    if score is None:
        score = getattr(oracle, "log_prob", None)
        if score is None:
            raise TypeError(
                "score must be a function of one record, because this oracle has no log_prob to "
                "use instead"
            )
    _checks.function("score", score)
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    with computing_now():
        expected = _simulated(key, oracle, score, n, cuts, simulations)
    return OracleCheck(dataclasses.replace(sensitivity, n=n), epsilon, score, expected)


def _program_of(score: Score, database: Database) -> Program:
    """Traces the score of one record, and refuses a score that may mix records under `vmap`."""
    if isinstance(score, Program):
        return score
    record = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), database)
    return program_of_a_number("score", score, record)


def _scores_of(score: Score, database: Database) -> jax.Array:
    (found,) = jax.tree.leaves(jax.vmap(_program_of(score, database))(database))
    found = found.astype(jnp.float32)
    return jnp.clip(jnp.where(jnp.isnan(found), -_LARGEST, found), -_LARGEST, _LARGEST)


def _counts(score: Score, edges: np.ndarray | jax.Array, database: Database) -> jax.Array:
    """Returns the number of records in each bin, int32. Each record is in exactly one bin."""
    bins = jnp.searchsorted(jnp.asarray(edges), _scores_of(score, database), side="right")
    return jnp.zeros(len(edges) + 1, jnp.int32).at[bins].add(1)


def _counting(epsilon: Scalar) -> AdditiveMechanism:
    return laplace(2.0, epsilon)


def plausibility(
    key: Key,
    database: Database,
    epsilon: Scalar,
    expected: dict[str, jax.Array],
    *,
    score: Program,
) -> OraclePlausibility:
    """Compares noisy counts of a database with noisy counts of simulated databases."""
    counting = _counting(epsilon)
    key_counts, key_simulated = jax.random.split(key)
    counts = counting._draw(key_counts, _counts(score, expected["edges"], database))
    simulated = jnp.asarray(expected["simulated"])
    keys = jax.random.split(key_simulated, len(simulated))
    noisy = jax.vmap(counting._draw)(keys, simulated)
    # The test is valid with any constant weights. Inverse variances make it more powerful.
    variance = expected["variance"] + 2 * jnp.square(2 / jnp.asarray(epsilon, jnp.float32))

    def deviation(counts: jax.Array) -> jax.Array:
        off = counts.astype(jnp.float32) - expected["mean"]
        return jnp.sum(jnp.square(off) / variance)

    # XLA may round a sum differently inside a batch than outside. With this factor, simulated
    # counts that are equal to the private counts always satisfy `>= least`.
    least = deviation(counts) * (1 - (counts.size + 8) * float(np.finfo(np.float32).eps))
    as_much = jnp.sum(jax.vmap(deviation)(noisy) >= least, dtype=jnp.float32)
    p_value = (1 + as_much) / float(1 + len(simulated))
    # If a traced epsilon is invalid, the p-value is NaN and the counts are -1.
    bad = ~(jnp.asarray(epsilon) > 0)
    return OraclePlausibility(jnp.where(bad, jnp.nan, p_value), jnp.where(bad, -1, counts))


_kept_plausibility = kept_jit("score")(plausibility)


@kept_jit("oracle", "score")
def _p_values(
    keys: tuple[Key, Key],
    epsilon: Scalar,
    expected: dict[str, jax.Array],
    *,
    oracle: Program,
    score: Program,
) -> jax.Array:
    """Returns the p-value of a database drawn from an alternative oracle, for each pair of keys."""

    def p_value(keys: tuple[Key, Key]) -> jax.Array:
        key, key_database = keys
        return plausibility(key, oracle(key_database), epsilon, expected, score=score).p_value

    return lax.map(p_value, keys)


def _edges(scores: np.ndarray, cuts: tuple[float, ...]) -> np.ndarray:
    """Returns the edges of bins: each is slightly below a quantile, halfway between two scores.

    Two compiled programs may round the same score differently. If an edge were equal to a score,
    all records with this score could move to another bin. So edges are kept away from scores.
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
    # Tracing gives the oracle and the score fingerprints. Programs with equal fingerprints are
    # compiled only once.
    drawn = Program.trace("oracle", lambda key: oracle(key, n), spec)
    scored = _program_of(score, drawn.outputs.tree())
    scores = _scores_of_drawn(pilots, oracle=drawn, score=scored)
    edges = _edges(np.asarray(scores), cuts)

    def simulate(keys: Key) -> np.ndarray:
        return np.asarray(_counts_of_drawn(keys, edges, oracle=drawn, score=scored))

    piloted = simulate(pilots)
    mean = piloted.mean(axis=0)
    # The few pilot databases may have equal counts by chance. So the variance is at least the
    # variance for independent records, and at least 1.
    variance = np.maximum(piloted.var(axis=0), np.maximum(mean * (1 - mean / n), 1.0))
    databases = simulate(jax.random.split(key_databases, simulations))
    return _Expected(edges, mean.astype(np.float32), variance.astype(np.float32), databases)


@kept_jit("oracle", "score")
def _scores_of_drawn(keys: Key, *, oracle: Program, score: Program) -> jax.Array:
    """Returns the scores of all records of the database that each key draws."""
    return lax.map(lambda key: _scores_of(score, oracle(key)), keys)


@kept_jit("oracle", "score")
def _counts_of_drawn(keys: Key, edges: np.ndarray, *, oracle: Program, score: Program) -> jax.Array:
    """Returns the count in each bin for the database that each key draws."""
    return lax.map(lambda key: _counts(score, edges, oracle(key)), keys)
