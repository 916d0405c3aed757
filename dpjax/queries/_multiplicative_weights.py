"""Multiplicative weights: a public table learned from noisy answers to one query after the other.

A selection of a query is a try that may fail. A loop over tries, not over rounds, starts the fewest
kernels on a GPU.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core._types import PyTree
from dpjax.queries._workload import Workload

_LARGEST_FLOAT = 2.0**31 - 2.0**7  # The largest float32 below 2^31.
# A GPU computes so many updates in one kernel. More compile for long.
_MOST_AT_ONCE = 16


class Measured(NamedTuple):
    """What a round measures.

    Attributes:
        found: whether a query was selected; if not, the round tries again.
        tries: where the next try of this round starts.
        query: the query.
        answer: its noisy answer.
        more: more results of the round.
    """

    found: jax.Array
    tries: jax.Array
    query: jax.Array
    answer: jax.Array
    more: PyTree = None


# Takes the number of the round, where its try starts, and the answers of the table as integers.
_Measure: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], Measured]
_Counted: TypeAlias = tuple[jax.Array, jax.Array]


class _State(NamedTuple):
    """What the rounds so far have learned.

    Attributes:
        number: of rounds.
        tries: where the next try starts.
        log_weights: of the cells.
        total: the sum of tables.
        rows: of the queries that were measured, which later rounds replay.
        answers: the noisy answers of these.
        measured: what every round measured.
    """

    number: jax.Array
    tries: jax.Array
    log_weights: jax.Array
    total: jax.Array
    rows: jax.Array
    answers: jax.Array
    measured: Measured


@dataclasses.dataclass(frozen=True)
class MultiplicativeWeights:
    """How to learn a table.

    Attributes:
        workload: the queries.
        rounds: the number of rounds.
        records: the number of records.
        replays: how often a round repeats the updates of all measurements so far.
        entry: the largest magnitude of an entry of a query.
    """

    workload: Workload
    rounds: int
    records: int
    replays: int
    entry: float

    def learn(self, measure: _Measure) -> tuple[jax.Array, jax.Array, Measured]:
        """The average and the last table of the rounds, and what every round measured."""
        state = self._start(measure)
        end = lax.while_loop(
            lambda state: state.number < self.rounds, functools.partial(self._try, measure), state
        )
        last = self._table(end.log_weights)
        # A bad traced parameter gives NaN in all tables but the first.
        average = jnp.where(jnp.any(jnp.isnan(last)), jnp.nan, end.total / self.rounds)
        cells = self.workload.cells
        return average.reshape(cells), last.reshape(cells), end.measured

    def _start(self, measure: _Measure) -> _State:
        dtype, cells = jnp.result_type(float), math.prod(self.workload.cells)
        zeros, number = jnp.zeros(cells, dtype), jnp.zeros((), jnp.int32)
        tries = number.astype(jnp.uint32)
        one = jax.eval_shape(measure, number, tries, jnp.zeros(self.workload.shape, jnp.int32))
        return _State(
            number,
            tries,
            zeros,
            zeros,
            jnp.zeros((self.rounds, cells), dtype),
            jnp.zeros(self.rounds, dtype),
            jax.tree.map(lambda x: jnp.zeros((self.rounds, *x.shape), x.dtype), one),
        )

    def _try(self, measure: _Measure, state: _State) -> _State:
        number, dtype, n = state.number, state.rows.dtype, self.records
        table = self._table(state.log_weights)
        answers = self.workload.answers(table.reshape(self.workload.cells))
        integers = jnp.clip(jnp.round(answers), -_LARGEST_FLOAT, _LARGEST_FLOAT).astype(jnp.int32)
        now = measure(number, state.tries, integers)
        # A round that tries again overwrites these.
        row = self.workload.row(now.query).ravel().astype(dtype) / self.entry
        rows = state.rows.at[number].set(row)
        answer = jnp.clip(now.answer / self.entry, -n, n)
        answers = state.answers.at[number].set(answer)
        updates = jnp.where(now.found, 1 + self.replays * (number + 1), 0)
        return _State(
            number + now.found.astype(jnp.int32),
            jnp.where(now.found, 0, now.tries),
            self._updated(state.log_weights, rows, answers, number, updates),
            jnp.where(now.found, state.total + table, state.total),
            rows,
            answers,
            jax.tree.map(lambda all, one: all.at[number].set(one), state.measured, now),
        )

    def _updated(
        self,
        log_weights: jax.Array,
        rows: jax.Array,
        answers: jax.Array,
        number: jax.Array,
        updates: jax.Array,
    ) -> jax.Array:
        """The log weights after updates: for the new query first, then for all in turn."""
        several = min(self.rounds, _MOST_AT_ONCE)

        @jax.jit  # Traced once for several.
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
            # A row of zeros changes nothing.
            some = jnp.where((numbers < updates)[:, None], rows[which], 0)
            # Arrays of their own: XLA makes one kernel of all these updates.
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
