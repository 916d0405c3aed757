"""Statistics of several columns of a table: covariances, correlations, regression and clusters."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._labels import Labels
from dpjax._core._records import PaddedRecords, Parts
from dpjax._core._types import Key, PyTree, Scalar
from dpjax._core._values import Release
from dpjax.queries._k_means import Partition, private_k_means
from dpjax.queries._linear_regression import CORRELATION, _least_reach, _solution
from dpjax.queries._moments import _directions, _mean_and_covariance, released_moments
from dpjax.queries._private_release import STATISTICS, Statistic, Terms, released
from dpjax.queries._query import IntegerQuery, compiled, in_units_of
from dpjax.queries._second_moments import (
    Moments,
    bernstein_query,
    line_query,
    moments_of,
    sums_of_line,
)
from dpjax.tables._asked_table import AskedTable, identity
from dpjax.tables._float64 import covariance_of, in_float64
from dpjax.tables._frame import Bounds, Frame, bounds_of, numpy_of
from dpjax.tables._groups import By
from dpjax.tables._large_frame import structure_of
from dpjax.tables._question import Cost, Question
from dpjax.tables._where import Where


@dataclasses.dataclass(frozen=True)
class Box:
    """The box that the bounds of some columns span.

    Attributes:
        columns: the names of the columns.
        lower: the lower ends.
        upper: the upper ends.
        middle: the middle of the box.
        size: half the length of each edge. If `in_ball`, the half-axes of an ellipsoid through the
            corners of the box.
        in_ball: whether `vectors` scales this ellipsoid to the unit ball. Otherwise it scales the
            box to the cube [-1, 1]^d.
    """

    columns: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray
    middle: np.ndarray
    size: np.ndarray
    in_ball: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the middle and the size of the box in a form that JSON can store."""
        return {"middle": self.middle.tolist(), "size": self.size.tolist()}

    def vectors(self, frame: Frame) -> np.ndarray:
        """Returns the rows as vectors: clipped to the bounds, centered, and divided by `size`.

        The result for an entry depends on this entry alone. A missing number becomes the lower end
        of its bounds.
        """
        columns = [frame[name].numbers_or_nan() for name in self.columns]
        xp = numpy_of(*columns)
        numbers = xp.stack(columns, axis=1)
        lower, upper, middle, size = (
            xp.asarray(ends, numbers.dtype)[None]
            for ends in (self.lower, self.upper, self.middle, self.size)
        )
        clipped = xp.clip(xp.where(xp.isnan(numbers), lower, numbers), lower, upper)
        return ((clipped - middle) / size).astype(jnp.result_type(float))


def box_of(columns: Sequence[str], bounds: Bounds, frame: Frame, *, in_ball: bool = False) -> Box:
    """Returns the box of some columns, each with its own bounds."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, such as [{columns!r}], got {columns!r}")
    lower, upper = np.array([bounds_of(name, bounds, frame) for name in columns]).T
    stretch = math.sqrt(len(columns)) if in_ball else 1.0
    size = (upper / 2 - lower / 2) * stretch
    return Box(tuple(columns), lower, upper, lower / 2 + upper / 2, size, in_ball)


class RelationsOfTable(AskedTable):
    """The statistics of a table that relate several columns."""

    def covariance(
        self,
        columns: Sequence[str],
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The averages and the covariances of some columns, in total or in each group.

        Args:
            columns: the names of columns of numbers.
            bounds: the bounds of each column; see `PrivateTable`.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "covariance": ...}.
        """
        box = box_of(columns, bounds, structure_of(self._frame))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("covariance", columns, by=by, where=where, about=box.facts)
        facts, words = {**box.facts, "scalar": False}, tuple(columns)
        axes = {
            "mean": (("column", words),),
            "covariance": (("column", words), ("with", words)),
        }

        draw = self._of_moments(asked, box, cost, lambda m: _mean_and_covariance(m, facts), facts)
        return self._released(asked, lambda key: in_float64(draw(key), covariance_of), key, axes)

    def correlation(
        self,
        x: str,
        y: str,
        *,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """The correlation of two columns, in total or in each group.

        Args:
            x: the name of a column of numbers.
            y: the name of another column of numbers.
            bounds: the bounds of each column; see `PrivateTable`.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of numbers in [-1, 1]. Its interval inverts a simulated test. It is [-1, 1]
            if the noise could hide that a column is constant.
        """
        box = box_of((x, y), bounds, structure_of(self._frame))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("correlation", (x, y), by=by, where=where, about=box.facts)
        facts = {**box.facts, "statistic": CORRELATION, "degrees": [2, 2], "simulated": True}
        query = bernstein_query(
            lambda vectors: [vectors], degrees=[2, 2], capacity=self.most_rows, in_cube=True
        )
        database = self._vectors(asked, box)
        draw = self._simulated(asked, database, query, cost, facts, kind=CORRELATION)
        return self._released(asked, draw, key)

    def pca(
        self,
        columns: Sequence[str],
        *,
        components: int,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Principal components of some columns: the directions of the largest variances.

        Args:
            columns: the names of columns of numbers.
            components: how many components, at most as many as columns.
            bounds: the bounds of each column; see `PrivateTable`.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"mean": ..., "components": ..., "variances": ...}, where the component
            of the largest variance comes first. Intervals are simulated. If two variances are
            nearly equal, the directions of their components are uncertain, and so their intervals
            are wide.
        """
        box, words = box_of(columns, bounds, structure_of(self._frame)), tuple(columns)
        count = _checks.integer("components", components, least=1, most=len(words))
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("pca", columns, by=by, where=where, about=(box.facts, count))
        facts: dict[str, Any] = {**box.facts, "scalar": False, "statistic": "pca"}
        facts |= {"components": count, "simulated": True}
        each = ("component", tuple(range(1, count + 1)))
        axes = {
            "mean": (("column", words),),
            "components": (each, ("column", words)),
            "variances": (each,),
        }

        draw = self._of_moments(
            asked, box, cost, lambda m: _directions(m, facts)[0], facts, kind="bootstrap"
        )
        return self._released(asked, draw, key, axes)

    def regression(
        self,
        y: str,
        x: Sequence[str],
        *,
        bounds: Bounds,
        regularization: float = 0.0,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Least squares with an intercept, in total or in each group.

        Args:
            y: the name of the explained column.
            x: the names of the columns that explain it.
            bounds: the bounds of y and of each x; see `PrivateTable`.
            regularization: at least 0. This multiple of the identity is added to the average of x
                x^T, in units of the bounds, before it is inverted.
            by: the columns of the groups and their keys; see `PrivateTable`.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"weights": ..., "intercept": ...}, in units of the columns. Intervals
            are simulated. They have no ends if the noise could hide that columns x are collinear.
            With at most 3 columns x the noise is least.
        """
        frame, sums = structure_of(self._frame), sums_of_line(len(x))
        in_cube = "degrees" in sums
        of_x = box_of(x, bounds, frame, in_ball=not in_cube)
        of_y = box_of([y], bounds, frame)
        facts = facts_of_line(of_x, of_y, _checks.non_negative("regularization", regularization))
        facts |= sums
        cost = self._cost(epsilon, share, delta=delta)
        asked = self._asked("regression", [y, *x], by=by, where=where, about=facts)
        query = line_query(_parts, sums, dims=len(x), capacity=self.most_rows, in_cube=in_cube)
        draw = self._simulated(
            asked, self._vectors(asked, {"x": of_x, "y": of_y}), query, cost, facts
        )
        return self._released(asked, draw, key, {"weights": (("column", tuple(x)),)})

    def k_means(
        self,
        columns: Sequence[str],
        *,
        clusters: int,
        bounds: Bounds,
        by: By | None = None,
        where: Where | None = None,
        epsilon: float | None = None,
        share: float | None = None,
        delta: float | None = None,
        key: Key | None = None,
    ) -> Release:
        """Centers of clusters of rows, by k-means on numbers in units of their bounds.

        Args:
            columns: the names of columns of numbers.
            clusters: the number of clusters.
            bounds: the bounds of each column; see `PrivateTable`.
            by: the columns of the groups and their keys; see `PrivateTable`. Groups are disjoint,
                so all groups together cost one epsilon and one delta, under add-or-remove-one.
            where: a predicate on a row; see `PrivateTable`.
            epsilon: the epsilon of the guarantee.
            share: a fraction of the ledger's epsilon, instead of `epsilon`.
            delta: the delta of the guarantee, required if the ledger has none.
            key: a typed key for tests; None draws a new one.

        Returns:
            A `Release` of {"centers": ..., "counts": ...}, see `dpjax.queries.private_k_means`.
        """
        box = box_of(columns, bounds, structure_of(self._frame), in_ball=True)
        epsilon, delta = self._cost(epsilon, share, delta=delta).with_delta("for k-means")
        asked = self._asked("k_means", columns, by=by, where=where, about=(box.facts, clusters))
        groups = asked.cells.size if asked.cells.axes else None

        def vectors(table: AskedTable, asked: Question) -> PaddedRecords:
            found: Any = box.vectors(table._frame)
            return PaddedRecords(
                found if groups is None else (found, asked.cells.codes),
                asked.present,  # pyright: ignore[reportArgumentType]
            )

        database = Partition(self._records(asked, vectors), groups, asked.people)
        how = {"clusters": clusters, "radius": 1.0, "relation": self.relation, "name": asked.name}
        found = self._paid(
            lambda key: private_k_means(key, database, epsilon=epsilon, delta=delta, **how), key
        )
        centers = box.middle + box.size * np.asarray(found.value["centers"], np.float64)
        value = {**found.value, "centers": centers.astype(found.value["centers"].dtype)}
        if groups is not None:
            value = jax.tree.map(lambda x: x.reshape(*asked.cells.shape, *x.shape[1:]), value)
        number = ("cluster", tuple(range(1, clusters + 1)))
        axes = (("centers", (number, ("column", tuple(columns)))), ("counts", (number,)))
        labels, accuracy = Labels(asked.statistic, asked.cells.axes, axes), found.accuracy
        if accuracy.kind:
            accuracy = accuracy.having(**box.facts)
        return Release(value, found.guarantee, accuracy, labels)

    def _vectors(self, asked: Question, boxes: PyTree) -> PaddedRecords | Parts:
        """Returns a database of the rows as vectors, one for each box in `boxes`."""

        def vectors(table: AskedTable, asked: Question) -> PaddedRecords:
            return asked.database(jax.tree.map(lambda box: box.vectors(table._frame), boxes))

        return self._records(asked, vectors)

    def _of_moments(
        self,
        asked: Question,
        box: Box,
        cost: Cost,
        finish: Callable[[Moments], Any],
        facts: dict[str, Any],
        *,
        kind: str = "moments",
    ) -> Callable[[Key], Release]:
        """Releases a statistic of the noisy averages of some columns and of their products."""
        dims = len(box.columns)
        return functools.partial(
            released_moments,
            database=self._vectors(asked, box),
            vectors=identity,
            finish=finish,
            dims=dims,
            terms=Terms(**self._terms(asked, cost, self._query_of_moments(asked, dims))),
            what=asked.what,
            in_cube=True,
            kind=kind,
            facts=facts,
        )

    def _simulated(
        self,
        asked: Question,
        database: PaddedRecords | Parts,
        query: IntegerQuery,
        cost: Cost,
        facts: dict[str, Any],
        *,
        kind: str = "bootstrap",
    ) -> Callable[[Key], Release]:
        """Returns the release of a statistic whose intervals are simulated."""
        return functools.partial(
            released,
            database=database,
            make_query=lambda _: query,
            finish=functools.partial(statistic_of, facts=facts),
            terms=Terms(**self._terms(asked, cost, query)),
            what=asked.what,
            kind=kind,
            facts=facts,
        )


def _parts(records: PyTree) -> tuple[Any, Any]:
    """Returns the vectors x and y of a row, whose products a regression needs."""
    return records["x"], records["y"]


# The following functions compute regression lines from averages of scaled rows, and convert them to
# the units of the columns.


LINE = "line of a table"


def facts_of_line(x: Box, y: Box, regularization: float) -> dict[str, Any]:
    """Returns the public facts that the computation of a regression line needs."""
    # If rows are scaled to the unit ball, each column is also divided by the square root of the
    # number of columns.
    penalty = regularization / len(x.columns) if x.in_ball else regularization
    radii = {"x_radius": 1.0, "y_radius": 1.0, "regularization": penalty}
    return {**radii, "statistic": LINE, "simulated": True, "x": x.facts, "y": y.facts}


def statistic_of(
    query: IntegerQuery,
    value: jax.Array,
    n: jax.Array | None,
    scale: Scalar,
    facts: dict[str, Any],
) -> PyTree:
    """Computes a statistic from noisy sums in the query's integer units."""
    return _program(json.dumps(facts))(value, n, scale * query.unit, query.unit)


@functools.lru_cache
def _program(text: str) -> Callable[..., PyTree]:
    """Compiles a statistic as a function of noisy sums.

    `text` is the public facts about the statistic, in JSON. One program compiles faster than many
    single operations.
    """
    facts = json.loads(text)
    statistic = STATISTICS[facts["statistic"]]

    def of_sums(value: jax.Array, n: jax.Array | None, noise: Scalar, unit: float) -> PyTree:
        moments = moments_of(in_units_of(unit, value), n, noise, facts)
        return statistic.of_moments(moments, facts)[0]

    return compiled(of_sums)


def _line_of_moments(moments: Moments, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Returns the weights and the intercept of a line, and the matrix of the normal equations.

    Weights and intercept are in the units of the columns.
    """
    found, matrix = _solution(moments, facts)
    (y_size,), (y_middle,) = facts["y"]["size"], facts["y"]["middle"]
    ratio = y_size / np.asarray(facts["x"]["size"])
    middle = np.asarray(facts["x"]["middle"])
    weights = found["weights"] * jnp.asarray(ratio, found["weights"].dtype)
    # Converts the intercept at the middle of x's bounds to the intercept at x = 0.
    far = jnp.sum(found["weights"] * jnp.asarray(ratio * middle, found["weights"].dtype))
    return {"weights": weights, "intercept": y_middle + y_size * found["intercept"] - far}, matrix


STATISTICS[LINE] = Statistic(
    _line_of_moments, _least_reach, {"weights": np.inf, "intercept": np.inf}, relative=True
)
