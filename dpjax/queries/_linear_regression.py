"""Linear regression and the correlation of two columns, from noisy sums of products."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._accuracy import Ends, intervals_of
from dpjax._core._columns import check_numbers
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Key, PyTree, Scalar, Value
from dpjax._core._values import NeighboringRelation, Release
from dpjax.queries._groups import By, inside_groups
from dpjax.queries._padded_records import drops_missing, records_and_slots
from dpjax.queries._private_release import (
    CLEAR_OF_ITSELF,
    STATISTICS,
    Statistic,
    Terms,
    check_simulated,
    draws_of,
    released,
)
from dpjax.queries._query import IntegerQuery, compiled, in_units_of
from dpjax.queries._second_moments import Moments, line_query, moments_of, sums_of_line

CORRELATION = "correlation"


def _of_two(moments: Moments, facts: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the correlation and the covariance matrix of two coordinates.

    In the correlation, variances are raised to a floor, because noise may make them 0 or less.
    """
    covariance = moments.second - jnp.outer(moments.mean, moments.mean)
    least = jnp.maximum(jnp.diagonal(covariance), moments.noise)
    product = jnp.sqrt(least[0]) * jnp.sqrt(least[1])
    return jnp.clip(covariance[0, 1] / product, -1, 1), covariance


STATISTICS[CORRELATION] = Statistic(_of_two)


@intervals_of(CORRELATION)
def _of_correlation(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns the interval of the correlations that a simulated test does not reject.

    Let v and w be the released variances, c the released covariance and q = c / sqrt(v w). Adding
    simulated noise to the release changes them to v', w' and c'. If the true correlation were r, a
    release with this noise would have the covariance r sqrt(v w) + c' - c, and the variances v' and
    w'. Its correlation is at least q if and only if r >= (q sqrt(v' w') - c' + c) / sqrt(v w). The
    right side is computed for every simulated noise. The interval contains all r between two
    quantiles of these numbers. It is [-1, 1] if noise could hide that a variance is 0.
    """
    check_simulated(confidence)
    matrices = np.asarray(draws_of(measured, facts)[1], np.float64)
    variances, covariances = np.diagonal(matrices, axis1=-2, axis2=-1), matrices[..., 0, 1]
    known = np.min(variances[0], axis=-1) > 0
    released = np.where(known[..., None], variances[0], 1)
    errors = np.max(np.abs(variances[1:] - released) / released, axis=-1)
    known &= CLEAR_OF_ITSELF * np.quantile(errors, confidence, axis=0) < 1
    roots = np.prod(np.sqrt(np.maximum(variances[1:], 0)), axis=-1)
    root = np.prod(np.sqrt(released), axis=-1)
    center = covariances[0] / root
    turning = (center * roots - covariances[1:] + covariances[0]) / root
    ends = [(1 - confidence) / 2, 0.5, (1 + confidence) / 2]
    low, middle, high = np.quantile(turning, ends, axis=0)
    if simultaneous:
        # One factor scales the intervals of all groups around their medians, such that a fraction
        # `confidence` of the draws is inside all intervals at once.
        parts = (turning - middle) / np.where(turning > middle, high - middle, low - middle)
        factor = np.quantile(parts.reshape(len(parts), -1).max(axis=1), confidence)
        low, high = middle + factor * (low - middle), middle + factor * (high - middle)
    low, high = (np.where(known, np.clip(end, -1, 1), side) for end, side in ((low, -1), (high, 1)))
    return low.reshape(np.shape(value)), high.reshape(np.shape(value))


def private_linear_regression(
    key: Key,
    database: Database,
    *,
    x_radius: float,
    y_radius: float,
    epsilon: float,
    delta: float | None = None,
    regularization: float = 0.0,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "center"] = "drop",
) -> Release:
    """Least squares with an intercept, from noisy sums of products.

    x is clipped to the ball of its radius, and y to [-y_radius, y_radius]. Without a delta and for
    d <= 3, the release contains sums of products of Bernstein polynomials. These have degree 2 in
    each x_i / x_radius, and degree 1 in y / y_radius. Linear combinations of these sums are the
    sums of products of x and y. Otherwise, let v = (3/4, x / x_radius, y / y_radius) for each
    record. The release then contains the sums of v_i v_j over all records for i <= j, except the
    sum of the squares of the last coordinate.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: {"x": shape (n, d), "y": shape (n,)}; under add-or-remove-one a `PaddedRecords` of
            this dict. An infinite x or y counts as 0.
        x_radius: the largest norm of x that is not clipped, public.
        y_radius: the largest |y| that is not clipped, public.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is less for d <= 3.
        regularization: 0 or above; this multiple of the identity is added to the average of
            x x^T / x_radius^2.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`. The database contains
            these columns in addition to x and y.
        missing: "drop" leaves out a record with a missing number (NaN). "center" replaces a missing
            number in x or y by 0.

    Returns:
        A `Release` of {"weights": shape (d,), "intercept": ...}.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another structure, or n is
            private and the database is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. With Bernstein polynomials, an added record changes
        the sums by at most 1 in the norm l1, and a replaced record by at most 2. Without, one
        release has noise on 9 n / 16, on 3/4 of the sums of x and y, and on the sums of x x^T and
        x y, each entry once. In units of the radii and in the norm l2, an added record changes
        these numbers by at most 1.86. A replaced record changes them by at most 5/2 for d = 1, and
        2.74 for larger d. The proofs are in docs/proofs/shorter.md. The rest is post-processing. If
        an eigenvalue of the average of (1, x) (1, x)^T is below the size of the noise, it is
        increased to that size, so the weights are finite. Let all entries of the averages be within
        e of the true averages, and let s be the least eigenvalue of the solved system. The weights,
        in units of the radii, change by at most e ((d + 1) |w| + sqrt(d + 1)) / s.

    Source:
        Dwork, Talwar, Thakurta and Zhang (2014); Wang, "Revisiting differentially private linear
        regression" (2018), "sufficient statistics perturbation".

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> x = jnp.linspace(-1, 1, 10_000)
        >>> release = queries.private_linear_regression(
        ...     dpjax.random.secure_key(),
        ...     {"x": x[:, None], "y": 0.5 * x + 0.2},
        ...     x_radius=1.0,
        ...     y_radius=1.0,
        ...     epsilon=1.0,
        ...     delta=1e-6,
        ... )
        >>> abs(float(release.value["weights"][0]) - 0.5) < 0.05
        True
    """
    drops = drops_missing(missing, "center")
    x_radius = _checks.positive("x_radius", x_radius)
    y_radius = _checks.positive("y_radius", y_radius)
    regularization = _checks.non_negative("regularization", regularization)
    records, slots = records_and_slots(database)
    records = inside_groups(records, by)
    if not isinstance(records, Mapping) or set(records) != {"x", "y"}:
        raise ValueError(
            'database must be {"x": array of shape (n, d), "y": array of shape (n,)}, got '
            f"{_checks.described(records)}; to make it from a table, use "
            '{"x": numpy.stack([table[name] for name in names], axis=1), "y": table[name_of_y]}'
        )
    check_numbers("x of database", records["x"], (slots, None))
    check_numbers("y of database", records["y"], (slots,))
    dims = records["x"].shape[1]

    def parts(records: Database) -> tuple[jax.Array, jax.Array]:
        x, y = (records[name].astype(jnp.result_type(float)) for name in ("x", "y"))
        return x / x_radius, (y / y_radius)[:, None]

    numbers = {"x_radius": x_radius, "y_radius": y_radius, "regularization": regularization}
    sums = sums_of_line(dims if delta is None else None)

    def line(
        query: IntegerQuery, value: jax.Array, n: jax.Array | None, scale: Scalar
    ) -> dict[str, jax.Array]:
        return _line_of(json.dumps(sums))(value, n, scale * query.unit, query.unit, numbers)

    return released(
        key,
        database,
        lambda capacity: line_query(parts, sums, dims=dims, capacity=capacity),
        line,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by, drops),
        what="linear regression",
        kind="bootstrap",
        facts={**numbers, **sums, "statistic": "linear regression", "simulated": True},
    )


@functools.lru_cache
def _line_of(text: str) -> Callable[..., dict[str, jax.Array]]:
    """Compiles the regression line as a function of noisy sums.

    `text` is JSON with the facts that `sums_of_line` returns.
    """
    sums = json.loads(text)

    def line(
        value: jax.Array, n: jax.Array | None, noise: Scalar, unit: float, numbers: dict[str, float]
    ) -> dict[str, jax.Array]:
        return _solution(moments_of(in_units_of(unit, value), n, noise, sums), numbers)[0]

    return compiled(line)


def _solution(moments: Moments, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Returns the regression line, and the matrix of the normal equations, with regularization."""
    size = len(moments.mean)
    # The averages of the products (1, x) (1, x, y)^T, where x and y are divided by their radii. The
    # regularization is added below.
    one, mean = jnp.ones((1, 1)), moments.mean[None]
    products = jnp.block([[one, mean], [mean.T, moments.second]])
    penalty = jnp.full(size, facts["regularization"]).at[0].set(0)
    products = products[:-1].at[:, :-1].add(jnp.diag(penalty))
    matrix, right = products[:, :-1], products[:, -1]
    eigenvectors, values = lax.linalg.eigh(matrix)
    # Without this floor, noise could make an eigenvalue 0, and then the weights would be infinite.
    floor = moments.noise * math.sqrt(size)
    found = eigenvectors @ (eigenvectors.T @ right / jnp.maximum(values, floor))
    line = {
        "weights": found[1:] * (facts["y_radius"] / facts["x_radius"]),
        "intercept": found[0] * facts["y_radius"],
    }
    return line, matrix


def _least_reach(values: np.ndarray, error: np.ndarray, facts: dict[str, Any]) -> PyTree:
    """Returns infinite half-widths if the vectors x may lie in a hyperplane, and 0 otherwise.

    If they lie in a hyperplane, many lines fit equally well, and noise selects one of them.
    """
    flat = np.where(values[..., 0] <= CLEAR_OF_ITSELF * error, np.inf, 0.0)
    return {"weights": flat[..., None], "intercept": flat}


STATISTICS["linear regression"] = Statistic(
    _solution, _least_reach, {"weights": np.inf, "intercept": np.inf}, relative=True
)
