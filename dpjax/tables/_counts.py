"""Statistics of a table that are computed from noisy counts, such as the most frequent keys."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._labels import Labels
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Key
from dpjax._core._values import Release
from dpjax._tracing._programs import Unchanging
from dpjax.mechanisms._additive import AdditiveMechanism, discrete_laplace
from dpjax.queries._counts import histogram_query
from dpjax.queries._people import PerPerson
from dpjax.release._privatize import privatize
from dpjax.tables._asked_table import AskedTable
from dpjax.tables._distinct import CELL, WORDS, DistinctCount, words_of
from dpjax.tables._frame import Column, End
from dpjax.tables._groups import By, Cells, buckets_of, codes_of, keys_of
from dpjax.tables._large_frame import structure_of
from dpjax.tables._question import Cost, Question
from dpjax.tables._where import Where

_NO_INTERVAL = "its ends are powers of two, and most numbers of the column lie between them"


class CountsOfTable(AskedTable):
    """The statistics of a table that are computed from noisy counts of rows or entries."""

    def count(
        self,
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The number of rows, in total or in each group.

        Args:
            by: the columns of the groups and their keys; `PrivateTable` explains all arguments.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            error: the error of each count, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers, with an axis for each column of `by`.
        """
        asked = self._asked("count", (), by=by, where=where)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, (), lambda _, asked: asked.cells, cost, key)

    def crosstab(
        self,
        columns: Sequence[str],
        *,
        keys: Mapping[str, Any],
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """A contingency table: how many rows have each combination of keys of some columns.

        Args:
            columns: the names of the columns, in the order of the axes of the table.
            keys: the public keys of each column.
            where: a predicate on a row; `PrivateTable` explains all arguments.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            error: the error of each count, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers, with an axis for each column.
        """
        if isinstance(columns, str) or set(columns) != set(keys):
            raise ValueError(
                f"keys must be given for each of the columns {_checks.shown(columns)}, and for "
                f"no other column, got keys for {_checks.shown(list(keys))}"
            )
        asked = self._asked("crosstab", (), by={name: keys[name] for name in columns}, where=where)
        cost = self._cost(epsilon, share, error, delta=delta)
        return self._counted(asked, (), lambda _, asked: asked.cells, cost, key)

    def histogram(
        self,
        column: str,
        buckets: Sequence[End],
        *,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The number of entries of a column in each bucket, in total or in each group.

        Args:
            column: the name of a column of numbers.
            buckets: public, increasing edges. A bucket includes its lower edge, and the last bucket
                also its upper edge. Numbers outside of all buckets are not counted; the first edge
                may be -inf, and the last edge inf.
            by: the columns of the groups and their keys; `PrivateTable` explains all arguments.
            where: a predicate on a row; see `PrivateTable`.
            per_person: None counts rows. With "sum", each person counts once in each group, in the
                bucket of the sum of the person's numbers; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            error: the error of each count, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers. The buckets are along the last axis.
        """
        structure = structure_of(self._frame)
        edges = [structure.number(column, edge) for edge in buckets]
        labels, _ = buckets_of(structure[column], edges)
        rows = {"by": by, "where": where, "per_person": per_person}
        asked = self._asked("histogram", [column], about=labels, **rows)
        cost = self._cost(epsilon, share, error, delta=delta)

        def cells_of(table: AskedTable, asked: Question) -> Cells:
            return asked.cells.split(column, *buckets_of(table._column(asked, column), edges))

        return self._counted(asked, ((column, labels),), cells_of, cost, key)

    def count_distinct(
        self,
        column: str,
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        error: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The number of distinct entries of a column, in total or in each group.

        Args:
            column: the name of a column of texts or numbers. Missing entries are not counted. In a
                table with `person`, the number of entries of a person is limited; see `groups` in
                `PrivateTable`.
            by: the columns of the groups and their keys; `PrivateTable` explains all arguments.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            error: the error of each count, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of integers, with an axis for each column of `by`.
        """
        asked = self._asked("count_distinct", [column], by=by, where=where, once=True)
        about = asked.people.about if asked.people else {}
        target = DistinctCount(asked.cells.shape, asked.people, **about)
        mechanism = self._cost(epsilon, share, error, delta=delta).cheapest(target)
        private = privatize(target, mechanism)

        def entries(table: AskedTable, asked: Question) -> PaddedRecords:
            used = table._frame[column]
            records = {CELL: asked.cells.codes, WORDS: words_of(used)}
            return PaddedRecords(records, asked.present & used.known)  # pyright: ignore[reportArgumentType]

        database = self._records(asked, entries)
        release = self._paid(lambda key: private(key, database, name=asked.name), key)
        return dataclasses.replace(release, labels=Labels(asked.statistic, asked.cells.axes))

    def top(
        self,
        column: str,
        k: int,
        *,
        keys: Any = None,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The k most frequent keys of a column, the most frequent first.

        Args:
            column: the name of a column of texts or integers.
            k: how many keys, at least 1.
            keys: the public keys to choose from. None finds the keys that occur in enough rows, as
                `keys` does, and needs a delta; then the result may have fewer than k keys. In a
                table with `person`, keys are ranked by people.
            by: columns and their keys.
            where: a predicate on a row; `PrivateTable` explains all arguments.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of a tuple of keys; with `by`, of a dict with such a tuple for each group.
        """
        k = _checks.integer("k", k, least=1)
        cost = self._cost(epsilon, share, delta=delta)
        if keys is None:
            asked = self._asked("top", [column], by=by, where=where, once=True)
            found = self._known_groups(asked, column, cost, key)
            value = {group: _most(*some, k=k) for group, some in found.value.items()}
        else:
            structure = structure_of(self._frame)
            known = keys_of(column, keys, structure)
            about = known if self._people is None else (known, "of people")
            rows = {"by": by, "where": where, "once": True, "among": known}
            asked = self._asked("top", [column], about=about, **rows)
            asked = asked.once_in_each(asked.cells.size * len(known))

            def cells_of(table: AskedTable, asked: Question) -> Cells:
                return asked.cells.split(column, known, codes_of(table._frame[column], known))

            found = self._counted(asked, ((column, known),), cells_of, cost, key)
            counts = np.asarray(found.value).reshape(-1, len(known))
            # Each row is in one cell, so releasing all noisy counts costs epsilon once, and sorting
            # them costs nothing. Selecting the k keys one by one would instead divide epsilon by k.
            value = {
                group: _most(known, each, k)
                for group, each in zip(asked.cells.groups, counts, strict=True)
            }
        return _by_group(value, found, asked)

    def keys(
        self,
        column: str,
        *,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The keys that occur in enough rows of a column. A public list of keys is not needed.

        In a table with `person`, these are the keys that enough people have. The argument `groups`
        of `PrivateTable`, or else `rows`, limits how many keys of a person count.

        Args:
            column: the name of a column of texts or integers.
            by: columns and their keys.
            where: a predicate on a row; `PrivateTable` explains all arguments.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee, required if the ledger has none.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of a tuple of keys in increasing order, which `by=` accepts; see
            `dpjax.queries.group_keys`. With `by`, a dict with such a tuple for each group.
        """
        asked = self._asked("keys", [column], by=by, where=where, once=True)
        found = self._known_groups(asked, column, self._cost(epsilon, share, delta=delta), key)
        value = {group: known for group, (known, _) in found.value.items()}
        return _by_group(value, found, asked)

    def bounds(
        self,
        column: str,
        *,
        by: By | None = None,
        where: Where | None = None,
        per_person: PerPerson | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """A range of a column that contains nearly all of its numbers, between powers of two.

        The numbers are counted with noise, in buckets between powers of two and their negatives.
        The range goes from the first to the last bucket whose noisy count is large enough. A bucket
        of numbers much larger than those in the fullest bucket would make the range much wider, so
        such a bucket needs a higher noisy count.

        Args:
            column: the name of a column of numbers.
            by: columns and their keys.
            where: a predicate on a row; `PrivateTable` explains all arguments.
            per_person: "sum" for a range of people's sums; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of the lower and the upper end of the range, in total or in each group. The
            ends are NaN if there are too few numbers.

        Formal guarantees:
            The guarantee of a histogram. With probability .999 the fullest bucket contains a
            number. An empty bucket of numbers 2^k times as large as those of the fullest bucket is
            in the range with a probability of at most .05 / 8^k, so the range is 2^k times too wide
            with a probability of less than .12 / 8^k. Numbers may be outside the range: in each
            bucket of numbers 2^k times as large, about (3 + 2.1 k) / epsilon of them.

        Source:
            Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson, "Differentially private
            SQL with bounded user contribution" (2020), for approximate bounds.
        """
        asked = self._asked("bounds", [column], by=by, where=where, per_person=per_person)
        return self._range(asked, column, self._cost(epsilon, share, delta=None), key)

    def _range(self, asked: Question, column: str, cost: Cost, key: Key | None) -> Release:
        """Releases a range of the numbers of a column in each group of a question."""
        price = cost.price()
        query = asked.of_people(histogram_query(asked.cells.size * BUCKETS))
        sensitivity = query.sensitivity("l1", relation=self.relation)
        mechanism = discrete_laplace(sensitivity, price.epsilon)
        private = privatize(Unchanging("bounds", query), mechanism)

        def codes_in(table: AskedTable, asked: Question) -> PaddedRecords:
            found = asked.cells.split(
                column, tuple(range(BUCKETS)), powers_of(table._column(asked, column))
            )
            return PaddedRecords(found.codes, asked.present)  # pyright: ignore[reportArgumentType]

        database = self._records(asked, codes_in)
        counts = self._paid(lambda key: private(key, database, name=asked.name), key)
        in_groups = np.asarray(counts.value).reshape(*asked.cells.shape, BUCKETS)
        ends = jnp.asarray(np.apply_along_axis(range_of, -1, in_groups, mechanism), float)
        axes = (("", (("end", ("lower", "upper")),)),)
        labels = Labels(asked.statistic, asked.cells.axes, axes, asked.moments)
        return Release(ends, counts.guarantee, Accuracy.of("", {"why": _NO_INTERVAL}), labels)


def _most(keys: Sequence[Any], counts: np.ndarray, k: int) -> tuple[Any, ...]:
    """Returns the k keys with the largest counts."""
    return tuple(keys[int(place)] for place in np.argsort(-counts, kind="stable")[:k])


def _by_group(value: Mapping[Any, tuple[Any, ...]], found: Release, asked: Question) -> Release:
    """Returns a release of the keys of each group, or of all rows if there are no groups."""
    keys = dict(value) if asked.cells.axes else next(iter(value.values()))
    return Release(keys, found.guarantee, labels=Labels(asked.statistic, asked.cells.axes))


# The following functions find the range of a column by a private histogram whose edges are powers
# of two.


_EXPONENTS = range(-20, 64)
# The middle bucket contains all numbers closer to 0 than the least power of two.
LEAST = 2.0 ** _EXPONENTS[0]
EDGES = np.array([*(-(2.0**e) for e in reversed(_EXPONENTS)), *(2.0**e for e in _EXPONENTS)])
BUCKETS = len(EDGES) - 1
# For each bucket, the exponent of its edge nearer to 0. The middle bucket, which has no such edge,
# gets the least exponent minus 1.
_OCTAVES = np.array([*reversed(_EXPONENTS[:-1]), _EXPONENTS[0] - 1, *_EXPONENTS[:-1]])
# The probability that the fullest bucket contains numbers.
_CONFIDENCE = 0.999
# A bucket in the octave of the fullest bucket is in the range if its noisy count is at least
# `_NEEDED` times the scale of the noise. This factor grows by `_LARGER` for each octave above, and
# by `_SMALLER` for each octave below. Each octave above doubles the range, so its buckets should
# rarely be included if they are empty. With `_LARGER`, the probability of this error is divided by
# 8 for each octave above.
_NEEDED, _LARGER, _SMALLER = 3.0, 3 * math.log(2), math.log(2)


def powers_of(column: Column) -> np.ndarray:
    """Returns the bucket of each entry. The outer buckets include all numbers beyond them.

    Buckets of positive numbers include their lower edge. Buckets of negative numbers include their
    upper edge.
    """
    numbers = column.numbers()
    below = np.searchsorted(EDGES, numbers, side="right") - 1
    from_above = np.searchsorted(EDGES, numbers, side="left") - 1
    found = np.clip(np.where(numbers < 0, from_above, below), 0, BUCKETS - 1)
    return np.where(column.known, found, -1).astype(np.int32)


def range_of(counts: np.ndarray, mechanism: AdditiveMechanism) -> np.ndarray:
    """Returns the range from the first to the last bucket with a large enough noisy count.

    The range is NaN if the largest noisy count could be the noise of an empty bucket.
    """
    # With probability `_CONFIDENCE`, the noise of every empty bucket is at most `sure`.
    confidence = 1 - 2 * (1 - _CONFIDENCE) / BUCKETS
    sure = float(mechanism.error(confidence=confidence, like=np.int32(0)))
    fullest = int(np.argmax(counts))
    if not counts[fullest] > sure:
        return np.array([math.nan, math.nan])
    held = np.flatnonzero(counts >= _needed(fullest, mechanism, sure))
    middle = BUCKETS // 2
    low = 0.0 if held[0] == middle else EDGES[held[0]]
    high = 0.0 if held[-1] == middle else EDGES[held[-1] + 1]
    return np.array([low, high])


def _needed(fullest: int, mechanism: AdditiveMechanism, sure: float) -> np.ndarray:
    """Returns, for each bucket, the smallest noisy count at which the bucket is in the range."""
    octaves = _OCTAVES - _OCTAVES[fullest]
    scale = float(mechanism.effective_scale(like=np.int32(0)))
    larger = scale * (_NEEDED + _LARGER * octaves)
    # The noise of an empty bucket rarely exceeds `sure`. A bucket nearer to 0 than the fullest
    # bucket hardly widens the range, so its threshold need not be above `sure`.
    smaller = np.minimum(scale * (_NEEDED - _SMALLER * octaves), sure)
    # Noisy counts are integers. A bucket whose noisy count is 0 or less is not included.
    return np.maximum(np.where(octaves > 0, larger, smaller), 1)
