"""MWEM: a table that answers many linear queries, learned from noisy answers to the worst of them.

Each round selects the query that the table so far answers worst, by the exponential mechanism,
measures it with Laplace noise, and multiplies the cells of the table so that it answers better. The
true answers are integers and so are the errors that select: the table is public, and how it is
rounded costs nothing.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._values import NeighboringRelation, Norm, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.mechanisms._exponential import exponential
from dpjax.mechanisms._laplace import laplace
from dpjax.mechanisms._mechanism import SensitivityMechanism, begin
from dpjax.mechanisms._selection import SelectionMechanism
from dpjax.queries._workload import Workload

# More would take hours.
_MOST_UPDATES = 10**8
_LARGEST = 2**31 - 2
_LARGEST_FLOAT = 2.0**31 - 2.0**7  # As float32 has it.


@frozen_pytree
class MwemTable:
    """A table that answers a workload, and what it was made of; made by `mwem`.

    Attributes:
        average: of the tables that rounds began with, floats of the shape of the workload's table;
            its error has a bound. Hand it to `workload.answers`.
        last: the table after the last round, which in practice is the better one.
        queries: int32 of shape (rounds,), which query was measured in each round.
        measurements: of shape (rounds,), its noisy answer.

    Formal guarantees:
        Those of the release that it is the value of.
    """

    average: jax.Array
    last: jax.Array
    queries: jax.Array
    measurements: jax.Array


@frozen_pytree
class Mwem(SensitivityMechanism):
    """Multiplicative weights and the exponential mechanism; made by `mwem`.

    Attributes:
        sensitivity: how far one record moves any one answer.
        epsilon: of the guarantee.
        workload: the queries.
        rounds: how many of them are measured.
        records: of the database, or a public guess.
        replays: how often a round repeats the updates of all measurements so far.

    Formal guarantees:
        Those of the factory that made it.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    workload: Workload = static()
    rounds: int = static()
    records: int = static()
    replays: int = static()

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "linf"

    @property
    def selection(self) -> SelectionMechanism:
        """Of a round: which query is answered worst."""
        return exponential(self.sensitivity, self._part)

    @property
    def measurement(self) -> AdditiveMechanism:
        """Of a round: the noise of one answer."""
        return laplace(dataclasses.replace(self.sensitivity, norm="l1"), self._part)

    @property
    def _part(self) -> Scalar:
        # What rounds in the division, the margin of the scale covers.
        return self.epsilon / (2 * self.rounds)

    @property
    def zcdp(self) -> tuple[float, float]:
        """Of selections with bounded range, and of measurements."""
        spent = [self.selection.zcdp[0], self.measurement.zcdp[0]]
        return self.rounds * math.fsum(spent) * (1 + 1e-12), 0.0

    def _check_value(self, value: Any) -> None:
        one_array = jax.tree_util.all_leaves([value]) and value.shape == self.workload.shape
        if not one_array or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                f"value must be the answers of the workload, integers of shape"
                f" {self.workload.shape}, got {_checks.described(value)}"
            )
        self.selection._check_value(jax.ShapeDtypeStruct(value.shape, jnp.uint32))
        self.measurement._check_value(jax.ShapeDtypeStruct((), jnp.int32))

    def _draw(self, key: jax.Array, value: Any) -> MwemTable:
        selection, measurement, truth = self.selection, self.measurement, self.clamped(value)

        def measure(number: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array, None]:
            key_selection, key_measurement = jax.random.split(jax.random.fold_in(key, number))
            query = selection._draw(key_selection, _errors(truth, answers))
            noisy = measurement._draw(key_measurement, truth[query])
            return query, jnp.where(query < 0, jnp.nan, noisy.astype(float)), None

        numbers = jnp.arange(self.rounds, dtype=jnp.uint32)
        average, last, (queries, measurements, _) = self._learn(measure, numbers)
        return MwemTable(average, last, queries, measurements)

    def _learn(
        self, measure: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array, Any]], rounds: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The average of the tables that rounds begin with, the last table, and what was seen."""
        workload, n, dtype = self.workload, self.records, jnp.result_type(float)

        def table_of(log_weights: jax.Array) -> jax.Array:
            return n * jax.nn.softmax(log_weights)

        def one_round(state: Any, now: Any) -> Any:
            number, given = now
            log_weights, total, rows, measured = state
            table = table_of(log_weights)
            answers = workload.answers(table.reshape(workload.cells))
            query, noisy, seen = measure(given, _in_integers(answers))
            rows = rows.at[number].set(workload.row(query).ravel().astype(dtype) / self._entry)
            measured = measured.at[number].set(jnp.clip(noisy / self._entry, -n, n))

            def update(i: jax.Array, log_weights: jax.Array) -> jax.Array:
                which = (number + i) % (number + 1)  # The new one, then all in turns.
                error = measured[which] - jnp.vdot(rows[which], table_of(log_weights))
                return log_weights + error / (2 * n) * rows[which]

            updates = 1 + self.replays * (number + 1)
            log_weights = lax.fori_loop(0, updates, update, log_weights)
            return (log_weights, total + table, rows, measured), (query, noisy, seen)

        cells = math.prod(workload.cells)
        nothing = jnp.zeros(cells, dtype)
        known = jnp.zeros((self.rounds, cells), dtype), jnp.zeros(self.rounds, dtype)
        numbered = jnp.arange(self.rounds, dtype=jnp.int32), rounds
        (log_weights, total, *_), seen = lax.scan(one_round, (nothing, nothing, *known), numbered)
        last = table_of(log_weights)
        # Where a parameter was bad, the first table is a good one all the same.
        average = jnp.where(jnp.any(jnp.isnan(last)), jnp.nan, total / self.rounds)
        return average.reshape(workload.cells), last.reshape(workload.cells), seen

    @property
    def _entry(self) -> float:
        """The largest entry of a query in magnitude."""
        return self.workload.reach("linf", NeighboringRelation.ADD_OR_REMOVE_ONE)

    def clamped(self, value: Any) -> Any:
        """Answers as they count: int32, saturating.

        Args:
            value: integers of shape (queries,).

        Returns:
            An array of the same shape, as private as the value.
        """
        answers = _checks.saturating_cast(_checks.real_arrays("value", value), jnp.int32)
        return jnp.clip(answers, -_LARGEST, _LARGEST)

    def log_prob(self, output: Any, value: Any) -> jax.Array:
        selection, measurement, truth = self.selection, self.measurement, self.clamped(value)

        def measure(drawn: Any, answers: jax.Array) -> Any:
            query, measured = drawn
            chosen = selection.log_prob(query, _errors(truth, answers))
            noisy = measurement.log_prob(measured.astype(jnp.int32), truth[query])
            return query, measured, chosen + noisy

        drawn = jnp.asarray(output.queries), jnp.asarray(output.measurements)
        *_, (_, _, log_probs) = self._learn(measure, drawn)
        return jnp.sum(log_probs)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the distance of every answer of the average from the truth, at a confidence.

        sqrt(4 n^2 E^2 ln N / T + a^2 U / T) + b, with N cells, entries of the queries up to E and U
        updates in all rounds. a bounds the error of the measurements. b bounds how much worse
        another query may be answered than the selected one.

        Args:
            confidence: the probability, at least, that all answers keep the bound; in (0, 1).

        Returns:
            A scalar; a bound where `records` is how many records there are, none out of range.
        """
        missed = (1 - _checks.fraction("confidence", confidence)) / (2 * self.rounds)
        answer = jax.ShapeDtypeStruct((), jnp.int32)
        scores = jax.ShapeDtypeStruct(self.workload.shape, jnp.uint32)
        off = self.measurement.error(confidence=1 - missed, like=answer)
        gap = self.selection.score_gap(confidence=1 - missed, like=scores, simultaneous=True)
        updates = 1 + self.replays * (self.rounds + 1) / 2  # In an average round.
        learned = 4 * (self.records * self._entry) ** 2 / self.rounds
        cells = math.prod(self.workload.cells)
        # The two answers that are compared are rounded to integers: 1/2 each.
        return (learned * math.log(cells) + off**2 * updates) ** 0.5 + gap + 1


def mwem(
    workload: Workload,
    epsilon: Scalar,
    *,
    rounds: int,
    records: int,
    replays: int = 10,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
) -> Mwem:
    """MWEM: answers to all linear queries of a workload, at the price of a few of them.

    It pays off where queries are many, records few or epsilon small: its error grows with the
    logarithm of the number of queries, that of noise on all answers with its root or faster. More
    rounds learn more and measure worse.

    Args:
        workload: as of `linear_workload` or `marginal_workload`; its table is formed,
            in floats, once for every round.
        epsilon: finite, above 0; each round spends epsilon / (2 rounds) twice.
        rounds: T, at most 2^16.
        records: n, which is public under replace-one; else a public guess, or a noisy count that
            is paid for besides.
        replays: after each round the updates of all measurements so far are repeated so often, at
            most 2^10; 0 is the algorithm as it was analyzed, whose steps are small.
        relation: which databases are neighbors.

    Returns:
        A `Mwem`: `mechanism(key, answers)` takes `workload(database)`, and
        `dpjax.privatize(workload, mechanism)` the database; it releases an `MwemTable`.

    Raises:
        TypeError: if epsilon is not a number, or the workload is none.
        ValueError: if a parameter is out of range; at a release, if the value is not like the
            answers of the workload.

    Formal guarantees:
        epsilon-DP under the relation: T selections and T measurements, each with epsilon / (2 T),
        for a record moves no answer by more than the workload's `sensitivity("linf")`. Exact: true
        answers are integers, each draw has a key of its own, and the table is made of what has been
        released. Whatever `records` is, it is private; `error` says how accurate.

    Source:
        Hardt, Ligett and McSherry, "A simple and practical algorithm for differentially private
        data release" (2012), Figure 1 and Theorem 2.2.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> workload = queries.marginal_workload({"a": 2, "b": 2}, [("a",), ("b",)])
        >>> mechanism = queries.mwem(workload, 1.0, rounds=4, records=100)
        >>> people = {"a": jnp.arange(100) % 2, "b": jnp.zeros(100, int)}
        >>> private_table = dpjax.privatize(workload, mechanism)
        >>> release = private_table(dpjax.random.seeded_key(0), people)
        >>> workload.answers(release.value.last).shape
        (4,)
    """
    if not isinstance(workload, Workload):
        raise TypeError(f"workload must be a Workload, got {_checks.shown(workload)}")
    sensitivity = workload.sensitivity("linf", relation=NeighboringRelation(relation))
    sensitivity, epsilon = begin("linf", sensitivity, epsilon)
    rounds = _checks.integer("rounds", rounds, least=1, most=2**16)
    records = _checks.integer("records", records, least=1, most=_LARGEST)
    replays = _checks.integer("replays", replays, least=0, most=2**10)
    if (updates := replays * rounds * (rounds + 1) // 2) > _MOST_UPDATES:
        raise ValueError(
            f"rounds and replays must make at most {_MOST_UPDATES:,} updates, got {rounds} and"
            f" {replays}: {updates:,}"
        )
    return Mwem(sensitivity, epsilon, workload, rounds, records, replays)


def _errors(truth: jax.Array, answers: jax.Array) -> jax.Array:
    """How far integers are apart, which always fits: int32 differences may not."""
    above, below = truth.astype(jnp.uint32), answers.astype(jnp.uint32)
    return jnp.where(truth > answers, above - below, below - above)


def _in_integers(answers: jax.Array) -> jax.Array:
    rounded = jnp.round(answers)
    return jnp.clip(rounded, -_LARGEST_FLOAT, _LARGEST_FLOAT).astype(jnp.int32)
