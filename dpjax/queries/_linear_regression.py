"""Linear regression from noisy sums of products."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import Database, Key
from dpjax._core._values import NeighboringRelation, Release
from dpjax.queries._covariance import released_moments
from dpjax.queries._groups import By, inside_groups
from dpjax.queries._padded_records import present_records
from dpjax.queries._private_release import Terms
from dpjax.queries._second_moments import Moments


def private_linear_regression(
    key: Key,
    database: Database,
    *,
    x_radius: float,
    y_radius: float,
    epsilon: float,
    delta: float | None = None,
    regularization: float = 0.0,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
    by: By | None = None,
) -> Release:
    """Least squares with an intercept, from noisy sums of products.

    A record (x / x_radius, y / y_radius) / sqrt(2) is clipped to the unit ball as a whole, so x and
    y shrink by the same factor. Then the products of its coordinates are added up.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: {"x": shape (n, d), "y": shape (n,)}; under add-or-remove-one a `PaddedRecords` of
            it. A record that is not finite counts as 0.
        x_radius: about the largest norm of x, public.
        y_radius: about the largest |y|, public.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is larger if d is large.
        regularization: 0 or above; this multiple of the identity is added to the average of
            x x^T / x_radius^2.
        relation: which databases are neighbors.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`, beside x and y.

    Returns:
        A `Release` of {"weights": shape (d,), "intercept": ...}.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another structure, or n
            is private and it is not a `PaddedRecords`.

    Formal guarantees:
        The guarantees of `private_covariance` for vectors of d + 1 coordinates: (epsilon,
        delta)-DP under the relation. The rest is post-processing. Take the average of
        (1, x) (1, x)^T. Its eigenvalues are raised to the size of the noise if they are below it,
        so the weights are finite. `private_covariance` says how near the averages are to the truth:
        let all their entries be within e. Let s be the least eigenvalue of the system that is
        solved. The weights, in units of the radii, move by at most
        e ((d + 1) |w| + sqrt(d + 1)) / s.

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
    x_radius = _checks.positive("x_radius", x_radius)
    y_radius = _checks.positive("y_radius", y_radius)
    regularization = _checks.non_negative("regularization", regularization)
    records, present = present_records(database)
    records = inside_groups(records, by)
    if not hasattr(records, "keys") or records.keys() != {"x", "y"}:
        raise ValueError(f'database must be {{"x", "y"}}, got {_checks.described(records)}')
    if records["x"].ndim != 2 or records["y"].shape != present.shape:
        raise ValueError(f"x must have shape (n, d) and y (n,), got {_checks.described(records)}")
    dims = records["x"].shape[1]

    def vectors(records: Database) -> jax.Array:
        x, y = (records[name].astype(jnp.result_type(float)) for name in ("x", "y"))
        both = jnp.concatenate([x / x_radius, (y / y_radius)[:, None]], axis=1)
        return both / math.sqrt(2)

    def solve(moments: Moments) -> dict[str, jax.Array]:
        with_one = jnp.concatenate([jnp.ones(1), moments.mean])
        products = jnp.concatenate([moments.mean[:, None], moments.second], axis=1)
        products = jnp.concatenate([with_one[None], products])
        penalty = jnp.full(dims + 1, regularization / 2).at[0].set(0)
        eigenvectors, values = lax.linalg.eigh(products[:-1, :-1] + jnp.diag(penalty))
        least = moments.noise * math.sqrt(dims + 1)
        # Without this floor, noise could make an eigenvalue 0 and the weights infinite.
        rotated = eigenvectors.T @ products[:-1, -1] / jnp.maximum(values, least)
        found = eigenvectors @ rotated
        return {
            "weights": found[1:] * (y_radius / x_radius),
            "intercept": found[0] * (math.sqrt(2) * y_radius),
        }

    return released_moments(
        key,
        database,
        vectors,
        solve,
        dims=dims + 1,
        terms=Terms(epsilon, delta, relation, name, by),
        what="linear regression",
    )
