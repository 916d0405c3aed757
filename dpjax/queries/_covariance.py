"""Variance, covariance and principal components, from noisy sums of products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import NeighboringRelation, Release
from dpjax.accounting._composition import post_process
from dpjax.queries._padded_records import present_records
from dpjax.queries._private_release import mechanism_for, public_count, released, slots_of
from dpjax.queries._second_moments import Moments, moments_of, second_moments_query
from dpjax.targets._interval import check_interval, clamp


def private_variance(
    key: jax.Array,
    database: Any,
    *,
    lower: float,
    upper: float,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
) -> Release:
    """The average and the variance of numbers that are clamped to public bounds.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,); under add-or-remove-one a `PaddedRecords` of one.
        lower: a finite number, public; NaN counts as it.
        upper: a finite number above `lower`, public.
        epsilon: of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors.
        name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"mean": ..., "variance": ...}, the variance from 0 to the square of half of
        the interval.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or is no
            `PaddedRecords` where n is private.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. With h = (upper - lower) / 2 and x in [-1, 1] the
        distance from the middle in units of h, one release has noise on n, sum x and sum x^2; a
        record moves the three by 3 in the norm l1 where it is added, and x and x^2 by 9/4 where it
        is replaced, as |x - y| (1 + |x + y|) <= 9/4. With probability 1 - beta, under replace-one
        and Laplace noise the variance is within h^2 (e + 2 e + e^2) of the truth, e =
        9 ln(2 / beta) / (4 epsilon n), but for rounding by h^2 (2^-17 + 2^-12 / n).

    Source:
        Dwork, McSherry, Nissim and Smith (2006), for sums of statistics.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> release = queries.private_variance(
        ...     dpjax.random.secure_key(), jnp.arange(1000) % 2, lower=0, upper=1, epsilon=1.0
        ... )
        >>> abs(float(release.value["variance"]) - 0.25) < 0.1
        True
    """
    low, high = check_interval(lower, upper)
    middle, half = low / 2 + high / 2, high / 2 - low / 2

    records, _ = present_records(database)
    if not isinstance(records, jax.Array) or records.ndim != 1:
        raise ValueError(f"database must have shape (n,), got {_checks.described(records)}")

    def centered(numbers: jax.Array) -> jax.Array:
        return ((clamp(numbers, low, high) - middle) / half)[:, None]

    def finish(moments: Moments) -> Any:
        mean = jnp.clip(moments.mean[0], -1, 1)
        variance = jnp.clip(moments.second[0, 0] - mean**2, 0, 1)
        return {"mean": middle + half * mean, "variance": half**2 * variance}

    return released_moments(
        key,
        database,
        centered,
        finish,
        dims=1,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        what="variance",
        name=name,
    )


def private_covariance(
    key: jax.Array,
    database: Any,
    *,
    radius: float,
    center: Any = 0.0,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
) -> Release:
    """The average and the covariance of records that are clipped to a public ball.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n, d); under add-or-remove-one a `PaddedRecords` of one. A
            record that is not finite counts as the center.
        radius: of the ball, public.
        center: of the ball, public: an array of shape (d,), or a number for all coordinates.
        epsilon: of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is larger where d is.
        relation: which databases are neighbors.
        name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"mean": ..., "covariance": ...}. Noise may make an eigenvalue negative.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or is no
            `PaddedRecords` where n is private.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. One release has noise on n, the sum and the upper
        triangle of the sum of products, each entry once: in units of the radius, a record moves
        them by sqrt(3) in the norm l2 where it is added, and by 3 / sqrt(2) where it is replaced.
        Records are integers in the ball, so no rounding takes one further. With probability
        1 - beta, under replace-one and Gaussian noise of standard deviation sigma, all entries of
        the averages of x and of x x^T around the center are within sigma z / n of the truth, z the
        normal quantile at 1 - beta / (2 m) with m = (d + 1) (d + 2) / 2, but for rounding by
        radius^2 (2^-17 + 2^-12 / n).

    Source:
        Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss" (2014).

    Example:
        >>> import jax
        >>> import dpjax
        >>> from dpjax import queries
        >>> records = jax.random.uniform(jax.random.key(0), (1000, 2))
        >>> release = queries.private_covariance(
        ...     dpjax.random.secure_key(), records, radius=1.0, center=0.5, epsilon=1.0, delta=1e-6
        ... )
        >>> release.value["covariance"].shape
        (2, 2)
    """
    dims = dims_of(database)
    into_unit_ball, middle, size = public_ball(center, radius, dims)

    def finish(moments: Moments) -> Any:
        covariance = moments.second - jnp.outer(moments.mean, moments.mean)
        return {"mean": middle + size * moments.mean, "covariance": size**2 * covariance}

    return released_moments(
        key,
        database,
        into_unit_ball,
        finish,
        dims=dims,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        what="covariance",
        name=name,
    )


def private_pca(
    key: jax.Array,
    database: Any,
    *,
    components: int,
    radius: float,
    center: Any = 0.0,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
) -> Release:
    """The directions in which records vary most: eigenvectors of their noisy covariance.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: as for `private_covariance`.
        components: how many, from 1 to d.
        radius: as for `private_covariance`.
        center: as for `private_covariance`.
        epsilon: of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors.
        name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"mean": ..., "components": ..., "variances": ...}: components are rows,
        orthonormal, the largest variance first.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or is no
            `PaddedRecords` where n is private.

    Formal guarantees:
        Those of `private_covariance`, of which this is post-processing. Let E be what noise adds to
        the covariance: by Weyl's inequality each variance is within ||E||_2 of the truth, and by
        that of Davis and Kahan the sine of the angle of the first component within
        2 ||E||_2 / (gap of the first two variances).

    Source:
        Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss" (2014), Algorithm 1.

    Example:
        >>> import jax
        >>> import dpjax
        >>> from dpjax import queries
        >>> records = jax.random.uniform(jax.random.key(0), (1000, 3))
        >>> release = queries.private_pca(
        ...     dpjax.random.secure_key(), records, components=1, radius=1.0, epsilon=1.0
        ... )
        >>> release.value["components"].shape
        (1, 3)
    """
    count = _checks.integer("components", components, least=1, most=dims_of(database))
    release = private_covariance(
        key,
        database,
        radius=radius,
        center=center,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        name=name,
    )

    def directions(found: Any) -> Any:
        variances, vectors = jnp.linalg.eigh(found["covariance"])
        return {
            "mean": found["mean"],
            "components": vectors.T[::-1][:count],
            "variances": variances[::-1][:count],
        }

    return post_process(release, directions)


def released_moments(
    key: jax.Array,
    database: Any,
    vectors: Any,
    finish: Any,
    *,
    dims: int,
    epsilon: float,
    delta: float | None,
    relation: NeighboringRelation,
    what: str,
    name: str | None,
) -> Release:
    """What is made of the noisy moments of vectors in the unit ball."""
    capacity = slots_of(database, relation)
    query = second_moments_query(vectors, dims=dims, capacity=capacity)
    mechanism = mechanism_for(query, epsilon=epsilon, delta=delta, relation=relation)
    n = public_count(database, relation)
    release = released(key, database, query, mechanism, what=what, name=name)
    return post_process(
        release, lambda triangle: finish(moments_of(query, triangle, n, mechanism.scale))
    )


def dims_of(database: Any) -> int:
    """d, of records that are vectors."""
    records, _ = present_records(database)
    if not isinstance(records, jax.Array) or records.ndim != 2:
        raise ValueError(
            f"database must be one array of shape (n, d), got {_checks.described(records)}"
        )
    return records.shape[1]


def public_ball(
    center: Any, radius: Any, dims: int
) -> tuple[Callable[[Any], jax.Array], jax.Array, float]:
    """The map of a public ball to the unit ball, and its center and radius."""
    size = _checks.positive("radius", radius)
    middle = np.asarray(center, float)
    if middle.shape not in ((), (dims,)) or not np.all(np.isfinite(middle)):
        raise ValueError(
            f"center must be finite, one number or {dims}, got {_checks.shown(center)}"
        )
    middle = jnp.asarray(np.broadcast_to(middle, dims), jnp.result_type(float))

    def mapped(records: Any) -> jax.Array:
        return (records.astype(middle.dtype) - middle[None]) / size

    return mapped, middle, size
