"""Linear regression from noisy sums of products."""

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._columns import check_numbers
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Key, PyTree, Scalar
from dpjax._core._values import NeighboringRelation, Release
from dpjax.queries._groups import By, inside_groups
from dpjax.queries._intervals import CLEAR, STATISTICS, Statistic
from dpjax.queries._missing import drops_missing
from dpjax.queries._padded_records import records_and_slots
from dpjax.queries._private_release import Terms, released
from dpjax.queries._query import IntegerQuery, compiled, in_units_of
from dpjax.queries._second_moments import (
    Moments,
    averages,
    largest_by_angle,
    moved_products,
    products_query,
    upper_triangle,
)
from dpjax.targets._known_sensitivity import VectorNorm, sqrt_up

# The query sums the products of the coordinates of z = (1/2, x, y). The first coordinate is below 1
# because noise on products matters more than noise on sums: the regression divides products by the
# variance of x, which is small in units of the radius.
_WEIGHT = Fraction(1, 2)


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

    x is clipped to the ball of its radius, and y to [-y_radius, y_radius]. Then all products of two
    coordinates of (1/2, x / x_radius, y / y_radius) are added up, except the square of y.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: {"x": shape (n, d), "y": shape (n,)}; under add-or-remove-one a `PaddedRecords` of
            this dict. An infinite x or y counts as 0.
        x_radius: the largest norm of x that is not clipped, public.
        y_radius: the largest |y| that is not clipped, public.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is larger if d is large.
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
        (epsilon, delta)-DP under the relation. One release has noise on n / 4, on half of the sums
        of x and y, and on the sums of x x^T and x y, each entry once. In units of the radii and in
        the norm l2, an added record changes these numbers by at most 1.61. A replaced record
        changes them by at most sqrt(5) for d = 1, and 2.41 for larger d. The proof is in
        docs/proofs/shorter.md. The rest is post-processing. If an eigenvalue of the average of
        (1, x) (1, x)^T is below the size of the noise, it is increased to that size, so the weights
        are finite. Let all entries of the averages be within e of the true averages, and let s be
        the least eigenvalue of the solved system. The weights, in units of the radii, change by at
        most e ((d + 1) |w| + sqrt(d + 1)) / s.

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
    how = {"statistic": "linear regression", "weight": float(_WEIGHT), "left_out": 1}

    def line(
        query: IntegerQuery, value: jax.Array, n: jax.Array | None, scale: Scalar
    ) -> dict[str, jax.Array]:
        return _line(value, n, scale * query.unit, query.unit, numbers)

    return released(
        key,
        database,
        lambda capacity: _line_query(parts, dims=dims, capacity=capacity),
        line,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by, drops),
        what="linear regression",
        kind="bootstrap",
        facts={**numbers, **how, "simulated": True},
    )


@compiled
def _line(
    value: jax.Array, n: jax.Array | None, noise: Scalar, unit: float, numbers: dict[str, float]
) -> dict[str, jax.Array]:
    # The query does not release the last entry of the triangle, the sum of y^2, and the regression
    # does not use it.
    triangle = jnp.append(in_units_of(unit, value), jnp.zeros(1))
    return _solution(averages(triangle, n, noise, weight=float(_WEIGHT)), numbers)[0]


def _solution(moments: Moments, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Solves the regularized normal equations. Returns the regression line, and their matrix."""
    size = len(moments.mean)
    # The averages of (1, x) (1, x, y)^T, in units of the radii. The regularization is added below.
    with_one = jnp.concatenate([jnp.ones(1), moments.mean])
    products = jnp.concatenate([moments.mean[:, None], moments.second], axis=1)
    products = jnp.concatenate([with_one[None], products])
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
    """Returns infinite half-widths if the least eigenvalue may be mere noise, and 0 otherwise.

    The least eigenvalue is small if the records are nearly in a hyperplane. Then noise determines
    the line.
    """
    del facts
    flat = np.where(values[..., 0] < CLEAR * error, np.inf, 0.0)
    return {"weights": flat[..., None], "intercept": flat}


STATISTICS["linear regression"] = Statistic(
    _solution, _least_reach, {"weights": np.inf, "intercept": np.inf}
)


def _line_query(
    parts: Callable[[Database], tuple[jax.Array, jax.Array]], *, dims: int, capacity: int
) -> IntegerQuery:
    """Returns the query of the upper triangle of the sum of z z^T, for z = (1/2, x, y).

    The query leaves out the last entry, the sum of y^2.
    """
    rows, others = upper_triangle(2 + dims)
    moved, entries = functools.partial(_moved, dims), (rows[:-1], others[:-1])
    return products_query(parts, entries, moved, weight=_WEIGHT, capacity=capacity)


def _moved(d: int, norm: VectorNorm, relation: NeighboringRelation) -> Fraction:
    """Returns how much a record changes the triangle; see "Lines" in docs/proofs/shorter.md."""
    h, root = _WEIGHT, Fraction(sqrt_up(Fraction(d)))
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        moved = {
            "l1": h**2 + h * root + h + Fraction(d + 1, 2) + root,
            "l2": Fraction(sqrt_up((1 + h**2) ** 2 + 1)),
            "linf": Fraction(1),
        }
    else:
        squared = 4 + 4 * h**2 if d == 1 else 4 + 6 * h**2 + (1 - h**2) ** 2 / 2
        moved = {
            "l1": _moved_in_l1(d) if d > 1 else (1 + h) * (9 + h) / 4,
            "l2": Fraction(sqrt_up(squared)),
            "linf": Fraction(2),
        }
    return moved[norm]


def _moved_in_l1(d: int) -> Fraction:
    """Returns the l1 bound of `_moved` for a replaced record and d > 1.

    The bound is the maximum of two cases: y keeps its sign, or y changes its sign.
    """
    h, root, both = _WEIGHT, math.sqrt(2 * d), moved_products(d)
    kept = largest_by_angle(away=(1 + float(h)) * root, both=both)
    return max(kept, 2 * h + largest_by_angle(away=float(h) * root, both=both, toward=root))
