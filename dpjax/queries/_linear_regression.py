"""Linear regression from noisy sufficient statistics."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._values import NeighboringRelation, Release
from dpjax.queries._covariance import released_moments
from dpjax.queries._padded_records import present_records
from dpjax.queries._second_moments import Moments


def private_linear_regression(
    key: jax.Array,
    database: Any,
    *,
    x_radius: float,
    y_radius: float,
    epsilon: float,
    delta: float | None = None,
    regularization: float = 0.0,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
) -> Release:
    """Least squares with an intercept, from noisy sums of products.

    A record (x / x_radius, y / y_radius) / sqrt(2) is clipped to the unit ball as a whole, which
    keeps y / x, and its products with itself are added up.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: {"x": shape (n, d), "y": shape (n,)}; under add-or-remove-one a `PaddedRecords` of
            it. A record that is not finite counts as 0.
        x_radius: about the largest norm of x, public.
        y_radius: about the largest |y|, public.
        epsilon: of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is larger where d is.
        regularization: what is added to the average of x x^T / x_radius^2: 0 or above.
        relation: which databases are neighbors.
        name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"weights": shape (d,), "intercept": ...}.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another structure, or is no
            `PaddedRecords` where n is private.

    Formal guarantees:
        Those of `private_covariance` for vectors of d + 1 coordinates: (epsilon, delta)-DP under
        the relation. The rest is post-processing. Eigenvalues of the average of
        (1, x) (1, x)^T that are below what noise may bring about are raised to that, so weights are
        finite. Let all entries of the averages be within e of the truth (see there), and s be the
        least eigenvalue of what is solved: the weights, in units of the radii, move by at most
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
    x_radius, y_radius = (
        _checks.positive("x_radius", x_radius),
        _checks.positive("y_radius", y_radius),
    )
    regularization = _checks.non_negative("regularization", regularization)
    dims = _features(database)

    def vectors(records: Any) -> jax.Array:
        x, y = (records[name].astype(jnp.result_type(float)) for name in ("x", "y"))
        both = jnp.concatenate([x / x_radius, (y / y_radius)[:, None]], axis=1)
        return both / math.sqrt(2)

    def solve(moments: Moments) -> Any:
        with_one = jnp.concatenate([jnp.ones(1), moments.mean])
        products = jnp.concatenate([moments.mean[:, None], moments.second], axis=1)
        products = jnp.concatenate([with_one[None], products])
        penalty = jnp.full(dims + 1, regularization / 2).at[0].set(0)
        values, eigenvectors = jnp.linalg.eigh(products[:-1, :-1] + jnp.diag(penalty))
        least = moments.noise * math.sqrt(dims + 1)
        turned = eigenvectors.T @ products[:-1, -1] / jnp.maximum(values, least)
        intercept, *_ = found = eigenvectors @ turned
        return {
            "weights": found[1:] * (y_radius / x_radius),
            "intercept": intercept * (math.sqrt(2) * y_radius),
        }

    return released_moments(
        key,
        database,
        vectors,
        solve,
        dims=dims + 1,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        what="linear regression",
        name=name,
    )


def _features(database: Any) -> int:
    records, present = present_records(database)
    if not isinstance(records, dict) or set(records) != {"x", "y"}:
        raise ValueError(f'database must be {{"x", "y"}}, got {_checks.described(records)}')
    if records["x"].ndim != 2 or records["y"].shape != present.shape:
        raise ValueError(f"x must have shape (n, d) and y (n,), got {_checks.described(records)}")
    return records["x"].shape[1]
