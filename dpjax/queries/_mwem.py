"""MWEM: a table for many linear queries, learned from noisy answers to a few of them.

In each round, the exponential mechanism selects a query that the table answers badly so far. The
round measures the answer of this query with Laplace noise, and multiplies the cells of the table by
factors that improve the table's answer. True answers are integers, and so are the errors that serve
as scores. The table is computed from releases alone, so its rounding costs no privacy.

The selection draws an index by rejection sampling, so a try may fail and is then repeated. A single
loop over all tries starts fewer kernels on a GPU than a loop over rounds with an inner loop over
tries.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import NeighboringRelation, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism, laplace
from dpjax.mechanisms._selection import SelectionMechanism, exponential
from dpjax.mechanisms._start import begin
from dpjax.queries._counts import check_cells
from dpjax.queries._workload import Workload
from dpjax.random._release import add_drawn, noise_ahead
from dpjax.random._selected_index import tried_index
from dpjax.release._mechanism import SensitivityMechanism

# More updates than this would take hours.
_MOST_UPDATES = 10**8
_LARGEST = 2**31 - 2
_LARGEST_FLOAT = 2.0**31 - 2.0**7  # The largest float32 below 2^31.
# The number of updates that a GPU computes in one kernel. A kernel with more updates would take
# long to compile.
_MOST_AT_ONCE = 16


class Measured(NamedTuple):
    """The results of one try to select and measure a query; a round tries until it selects one.

    Attributes:
        found: whether a query was selected; if not, the round tries again.
        tries: the position where the random numbers of the next try of this round start.
        query: the index of the query.
        answer: its noisy answer.
        log_prob: the log probability of the query and its answer; None in a release.
    """

    found: jax.Array
    tries: jax.Array
    query: jax.Array
    answer: jax.Array
    log_prob: PyTree = None


# A function that computes the results of a try. It is given the index of the round, the position
# where the random numbers of the try start, and the table's answers (integers).
_Measure: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], Measured]
_Counted: TypeAlias = tuple[jax.Array, jax.Array]


class _State(NamedTuple):
    """The state between two tries.

    Attributes:
        number: the number of finished rounds.
        tries: the position where the random numbers of the next try start.
        log_weights: the log weights of the cells of the table.
        total: the table at the start of a round, summed over the rounds so far.
        rows: the weights of each measured query, for the updates of later rounds.
        measured: the results of every round.
    """

    number: jax.Array
    tries: jax.Array
    log_weights: jax.Array
    total: jax.Array
    rows: jax.Array
    measured: Measured


@frozen_pytree
class MwemTable:
    """A table that answers a workload, and the measurements behind it; made by `mwem`.

    Attributes:
        average: the table at the start of a round, averaged over all rounds; floats of the shape of
            the workload's table. `Mwem.error` bounds its error. Pass it to `workload.answers`.
        last: the table after the last round, which is usually better in practice.
        queries: int32 of shape (rounds,), the index of the query measured in each round.
        measurements: shape (rounds,), the noisy answers to these queries.

    Formal guarantees:
        Those of the release that contains this table.
    """

    average: jax.Array
    last: jax.Array
    queries: jax.Array
    measurements: jax.Array


@frozen_pytree
class Mwem(SensitivityMechanism):
    """Multiplicative weights and the exponential mechanism; made by `mwem`.

    Attributes:
        sensitivity: a bound on how much one record changes any single answer.
        epsilon: the epsilon of the guarantee.
        workload: the queries.
        rounds: the number of rounds; each measures one query.
        records: the number of records, or a public guess.
        replays: how often a round repeats the updates of all measurements so far.

    Formal guarantees:
        The guarantees of `mwem`.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    workload: Workload = static()
    rounds: int = static()
    records: int = static()
    replays: int = static()

    @property
    def selection(self) -> SelectionMechanism:
        """The mechanism that selects a badly answered query in each round."""
        return exponential(self.sensitivity, self._part)

    @property
    def measurement(self) -> AdditiveMechanism:
        """Adds noise to one answer, in each round."""
        return laplace(dataclasses.replace(self.sensitivity, norm="l1"), self._part)

    @property
    def _part(self) -> Scalar:
        # The rounding of this division is covered by the margin that the mechanism adds to its
        # noise scale.
        return self.epsilon / (2 * self.rounds)

    @property
    def zcdp(self) -> tuple[float, float]:
        """The zCDP cost of all rounds: selections, which have bounded range, and measurements."""
        spent = self.selection.zcdp[0] + self.measurement.zcdp[0]
        return self.rounds * spent * (1 + 1e-12), 0.0

    def _check_value(self, value: Value) -> None:
        one_array = jax.tree_util.all_leaves([value]) and value.shape == self.workload.shape
        if not one_array or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(
                f"value must be the answers of the workload, integers of shape"
                f" {self.workload.shape}, got {_checks.described(value)}"
            )
        self.selection._check_value(jax.ShapeDtypeStruct(value.shape, jnp.uint32))
        self.measurement._check_value(jax.ShapeDtypeStruct((), jnp.int32))

    def _draw(self, key: Key, value: Value) -> MwemTable:
        selection, measurement, truth = self.selection, self.measurement, self.clamped(value)
        of_scores = selection._calibration(jax.ShapeDtypeStruct(truth.shape, jnp.uint32))
        of_answer = measurement._calibration(jax.ShapeDtypeStruct((), jnp.int32))

        def keys_of_round(number: jax.Array) -> jax.Array:
            return jax.random.split(jax.random.fold_in(key, number))

        keys = jax.vmap(keys_of_round)(jnp.arange(self.rounds, dtype=jnp.uint32))
        noise = noise_ahead(keys[:, 1], measurement.noise)

        def measure(number: jax.Array, tries: jax.Array, answers: jax.Array) -> Measured:
            errors = _errors(truth, answers)
            tried, found, query = tried_index(keys[number, 0], tries, errors, of_scores)
            drawn = jax.tree.map(lambda limb: limb[number], noise)
            noisy = add_drawn(drawn, truth[query], of_answer, measurement.noise).astype(float)
            # Under `vmap`, a lane whose try succeeded may wait for other lanes. It then repeats its
            # try with the same random numbers, and selects the same query again.
            tries = jnp.where(found, tries, tried)
            answer = jnp.where(query < 0, jnp.nan, noisy)
            return Measured(_in_all_lanes(found), tries, query, answer)

        average, last, measured = self._learned(measure)
        return MwemTable(average, last, measured.query, measured.answer)

    def _learned(self, measure: _Measure) -> tuple[jax.Array, jax.Array, Measured]:
        """Runs all rounds.

        Returns the average of the tables with which the rounds start, the table after the last
        round, and the results of every round.
        """
        dtype, cells = jnp.result_type(float), math.prod(self.workload.cells)
        zeros, number = jnp.zeros(cells, dtype), jnp.zeros((), jnp.int32)
        tries = number.astype(jnp.uint32)
        one = jax.eval_shape(measure, number, tries, jnp.zeros(self.workload.shape, jnp.int32))
        measured = jax.tree.map(lambda x: jnp.zeros((self.rounds, *x.shape), x.dtype), one)
        rows = jnp.zeros((self.rounds, cells), dtype)
        end = lax.while_loop(
            lambda state: state.number < self.rounds,
            functools.partial(self._try, measure),
            _State(number, tries, zeros, zeros, rows, measured),
        )
        last = self._table(end.log_weights)
        # If a traced parameter is invalid, all tables except the first are NaN. Then the average is
        # NaN.
        average = jnp.where(jnp.any(jnp.isnan(last)), jnp.nan, end.total / self.rounds)
        shape = self.workload.cells
        return average.reshape(shape), last.reshape(shape), end.measured

    def _try(self, measure: _Measure, state: _State) -> _State:
        number, dtype, n = state.number, state.rows.dtype, self.records
        table = self._table(state.log_weights)
        answers = self.workload.answers(table.reshape(self.workload.cells))
        integers = jnp.clip(jnp.round(answers), -_LARGEST_FLOAT, _LARGEST_FLOAT).astype(jnp.int32)
        now = measure(number, state.tries, integers)
        # If this try selected no query, the next try overwrites these entries.
        row = self.workload.row(now.query).ravel().astype(dtype) / self._entry
        rows = state.rows.at[number].set(row)
        measured = jax.tree.map(lambda all, one: all.at[number].set(one), state.measured, now)
        answers = jnp.clip(measured.answer.astype(dtype) / self._entry, -n, n)
        updates = jnp.where(now.found, 1 + self.replays * (number + 1), 0)
        return _State(
            number + now.found.astype(jnp.int32),
            jnp.where(now.found, 0, now.tries),
            self._updated(state.log_weights, rows, answers, number, updates),
            jnp.where(now.found, state.total + table, state.total),
            rows,
            measured,
        )

    def _updated(
        self,
        log_weights: jax.Array,
        rows: jax.Array,
        answers: jax.Array,
        number: jax.Array,
        updates: jax.Array,
    ) -> jax.Array:
        """Returns the log weights after a round's updates.

        The first update uses the new query, whose index is `number`. The other updates cycle
        through all measured queries, from the first query to the new one.
        """
        several = min(self.rounds, _MOST_AT_ONCE)

        @jax.jit  # Jitted so that it is traced once, although a block of updates calls it often.
        def update(log_weights: jax.Array, row: jax.Array, answer: jax.Array) -> jax.Array:
            error = answer - jnp.vdot(row, self._table(log_weights))
            return log_weights + error / (2 * self.records) * row

        def one(state: _Counted) -> _Counted:
            i, log_weights = state
            which = (number + i) % (number + 1)
            return i + 1, update(log_weights, rows[which], answers[which])

        def several_at_once(state: _Counted) -> _Counted:
            i, log_weights = state
            numbers = i + jnp.arange(several, dtype=i.dtype)
            which = (number + numbers) % (number + 1)
            # An update by a row of zeros does not change the weights.
            some = jnp.where((numbers < updates)[:, None], rows[which], 0)
            # XLA fuses all these updates into one kernel only if each row is a separate array.
            given = lax.optimization_barrier((tuple(jnp.unstack(some)), answers[which]))
            for row, answer in zip(*given, strict=True):
                log_weights = update(log_weights, row, answer)
            return i + several, log_weights

        def repeated(step: Callable[[_Counted], _Counted], log_weights: jax.Array) -> jax.Array:
            start = jnp.zeros_like(updates), log_weights
            return lax.while_loop(lambda state: state[0] < updates, step, start)[1]

        return lax.platform_dependent(
            log_weights,
            cpu=functools.partial(repeated, one),
            default=functools.partial(repeated, several_at_once),
        )

    def _table(self, log_weights: jax.Array) -> jax.Array:
        return self.records * jax.nn.softmax(log_weights)

    @property
    def _entry(self) -> float:
        """Returns the largest magnitude of an entry of the queries."""
        return self.workload._integers.reach("linf", NeighboringRelation.ADD_OR_REMOVE_ONE)

    def clamped(self, value: Value) -> jax.Array:
        """The answers that the mechanism uses: int32, clipped to [-(2^31 - 2), 2^31 - 2].

        Args:
            value: integers of shape (queries,).

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        answers = _checks.saturating_cast(_checks.real_arrays("value", value), jnp.int32)
        return jnp.clip(answers, -_LARGEST, _LARGEST)

    def log_prob(self, output: MwemTable, value: Value) -> jax.Array:
        selection, measurement, truth = self.selection, self.measurement, self.clamped(value)

        def measure(number: jax.Array, tries: jax.Array, answers: jax.Array) -> Measured:
            query, noisy = queries[number], measurements[number]
            chosen = selection.log_prob(query, _errors(truth, answers))
            of_answer = measurement.log_prob(noisy.astype(jnp.int32), truth[query])
            return Measured(jnp.array(True), tries, query, noisy, chosen + of_answer)

        queries, measurements = jnp.asarray(output.queries), jnp.asarray(output.measurements)
        return jnp.sum(self._learned(measure)[-1].log_prob)

    def error(self, *, confidence: float = 0.95) -> Scalar:
        """A bound on the error of all answers of the average table at once.

        It is sqrt(4 n^2 E^2 ln N / T + a^2 U / T) + b, for n records, N cells, T rounds, and U
        updates in all rounds. E is the largest magnitude of an entry of the queries. The number a
        bounds the errors of all measurements. The number b bounds, for every round, the largest
        error of any query minus the error of the query that the round selects.

        Args:
            confidence: the probability that the bound is correct, in (0, 1).

        Returns:
            A scalar. It is valid if `records` is the true number of records, and no record is out
            of range.
        """
        missed = (1 - _checks.fraction("confidence", confidence)) / (2 * self.rounds)
        answer = jax.ShapeDtypeStruct((), jnp.int32)
        scores = jax.ShapeDtypeStruct(self.workload.shape, jnp.uint32)
        off = self.measurement.error(confidence=1 - missed, like=answer)
        gap = self.selection.score_gap(confidence=1 - missed, like=scores, simultaneous=True)
        # The number of updates in an average round.
        updates = 1 + self.replays * (self.rounds + 1) / 2
        learned = 4 * (self.records * self._entry) ** 2 / self.rounds
        cells = math.prod(self.workload.cells)
        # The true answer and the table's answer are each rounded to an integer, with an error of at
        # most 1/2.
        return (learned * math.log(cells) + off**2 * updates) ** 0.5 + gap + 1


def mwem(
    workload: Workload,
    epsilon: Scalar,
    *,
    rounds: int,
    records: int,
    replays: int = 10,
    relation: NeighboringRelation | None = None,
) -> Mwem:
    """MWEM: answers to all linear queries of a workload, from noisy answers to a few of them.

    Use it if there are many queries and few records, or if epsilon is small. Its error grows with
    the logarithm of the number of queries, while noise on every answer grows at least with the
    square root. More rounds learn from more queries, but each measurement has more noise.

    It is for small tables, whose cells all fit into memory. For tables with many columns, or if you
    want rows instead of answers, use `PrivateTable.synthetic`.

    Args:
        workload: from `linear_workload` or `marginal_workload`. Each round stores its whole table,
            in floats.
        epsilon: finite, above 0; each round spends epsilon / (2 rounds) twice.
        rounds: T, at most 2^16.
        records: n if it is public, as under replace-one; otherwise a public guess, or a noisy
            count, which costs extra budget.
        replays: how often each round repeats the updates of all measurements so far, at most 2^10.
            With 0, this is the algorithm that the paper analyzes, which learns slowly because its
            steps are small.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.

    Returns:
        A `Mwem`, which releases an `MwemTable`: `mechanism(key, answers)` takes
        `workload(database)`, and `dpjax.privatize(workload, mechanism)` takes the database.

    Raises:
        TypeError: if epsilon is not a number, or `workload` is not a `Workload`.
        ValueError: if a parameter is out of range; at a release, if the value does not have the
            structure of the workload's answers.

    Formal guarantees:
        epsilon-DP under the relation. There are T selections and T measurements at epsilon / (2 T)
        each, and a record changes no answer by more than the workload's `sensitivity("linf")`. The
        guarantee is exact: true answers are integers, each draw has a separate key, and the table
        depends on releases only. The guarantee is valid for any `records`; only the accuracy
        depends on it, see `error`.

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
    if type(workload) is not Workload:
        raise TypeError(f"workload must be a Workload, got {_checks.shown(workload)}")
    check_cells(dict(enumerate(workload.cells)))  # Each round computes the whole table.
    sensitivity = workload.sensitivity("linf", relation=relation_or_inherited(relation))
    sensitivity, epsilon = begin("linf", sensitivity, epsilon)
    rounds = _checks.integer("rounds", rounds, least=1, most=2**16)
    records = _checks.integer("records", records, least=1, most=_LARGEST)
    replays = _checks.integer("replays", replays, least=0, most=2**10)
    if (updates := replays * rounds * (rounds + 1) // 2) > _MOST_UPDATES:
        raise ValueError(
            f"rounds and replays must make at most {_MOST_UPDATES:,} updates, got {updates:,} "
            f"updates for rounds={rounds} and replays={replays}"
        )
    return Mwem(sensitivity, epsilon, workload, rounds, records, replays)


def _errors(truth: jax.Array, answers: jax.Array) -> jax.Array:
    """Returns absolute differences of int32 numbers as uint32, because they may overflow."""
    above, below = truth.astype(jnp.uint32), answers.astype(jnp.uint32)
    return jnp.where(truth > answers, above - below, below - above)


@custom_vmap
def _in_all_lanes(found: jax.Array) -> jax.Array:
    """Whether every lane of a `vmap` has found a query. Lanes begin each round together."""
    return found


@_in_all_lanes.def_vmap
def _(axis_size: int, batched: list[bool], found: jax.Array) -> tuple[jax.Array, bool]:
    return _in_all_lanes(jnp.all(found, axis=0) if batched[0] else found), False
