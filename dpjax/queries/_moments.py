"""Averages, variances, covariances and principal components, computed from noisy sums."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Key, PyTree, Scalar
from dpjax._core._values import NeighboringRelation, Release
from dpjax.queries._groups import By
from dpjax.queries._padded_records import drops_missing
from dpjax.queries._private_release import (
    CLEAR,
    STATISTICS,
    Statistic,
    Terms,
    released,
    shape_of_record,
    slots_of,
)
from dpjax.queries._query import IntegerQuery, compiled, in_units_of
from dpjax.queries._second_moments import (
    RADIUS_BITS,
    Moments,
    edge_of_ball,
    moments_of,
    moments_query,
    radius_bits_for,
    sizes_differ,
    sums_of_moments,
)
from dpjax.queries._sums import centered_sums
from dpjax.targets._clamping import check_interval, clamp, middle_and_half


def private_mean(
    key: Key,
    database: Database,
    *,
    lower: float,
    upper: float,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "lower"] = "drop",
) -> Release:
    """The average of records that are clamped to public bounds.

    The release is a noisy sum of the records' differences from the middle of the interval. Under
    replace-one the sum is divided by n, which is public. Under add-or-remove-one, and for several
    groups, the sum is divided by a noisy count. In these two cases, if the records x have shape
    (n,), two noisy sums are released: of x - `lower` and of `upper` - x. The sum of differences and
    the count are computed from these, because this gives a smaller error.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,) or (n, d); under add-or-remove-one a `PaddedRecords` of
            such an array.
        lower: a finite number, public.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for the statistic of every group, see `dpjax.queries.by`. The
            database is then a table of this column and the records.
        missing: "drop" leaves out a record with a missing number (NaN). "lower" replaces a missing
            number by `lower`.

    Returns:
        A `Release` of floats of shape () or (d,), in [lower, upper]; by group, the value has a
        leading axis of groups.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. With h = (upper - lower) / 2, a record changes each
        of d sums by at most 2 h under replace-one. Under add-or-remove-one and with d = 1, it
        changes the sums of distances from `lower` and from `upper` by at most 2 h together; with d
        > 1, it changes each sum by at most h, and h times the count by h. For Laplace noise, with
        probability 1 - beta every average is within 2 h d ln(d / beta) / (epsilon n) of the true
        average under replace-one. Under add-or-remove-one it is within 2 h e / (n - e), where e =
        (d + 1) ln((d + 1) / beta) / epsilon. Rounding adds h (2^-27 c + 2^-14) / n in c slots, and
        the rounding of floats. By group, n is the size of a group. It is private under both
        relations, and counted in the same release. A replaced record changes two groups, so e is
        twice as large. If records with missing numbers are left out and the dtype allows missing
        numbers, as floats do, n is private and counted, too. Under replace-one, e is then max(2 d,
        d + 1) ln((d + 1) / beta) / epsilon.

    Source:
        Dwork, McSherry, Nissim and Smith (2006); Li, Lyu, Su and Yang, "Differential Privacy: From
        Theory to Practice" (2016), 2.4, for averages under add-or-remove-one.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> ages = jnp.full(1000, 40.0)
        >>> release = queries.private_mean(
        ...     dpjax.random.secure_key(), ages, lower=0, upper=100, epsilon=1.0
        ... )
        >>> abs(float(release.value) - 40) < 4
        True
        >>> release.guarantee
        (epsilon=1, delta=0)-DP, under replace-one
    """
    drops = drops_missing(missing, "lower")
    low, high = check_interval(lower, upper)
    middle, half = middle_and_half(low, high)
    shape = shape_of_record(database, "(n,)", "(n, d)", by=by)

    relation, count = relation_or_inherited(relation), math.prod(shape)
    from_ends = count == 1 and sizes_differ(relation, by)

    def average(query: IntegerQuery, value: jax.Array, n: jax.Array | None, _: Scalar) -> jax.Array:
        interval = (middle, half, low, high, query.unit)
        return _average(in_units_of(query.unit, value), n, interval, from_ends).reshape(shape)

    return released(
        key,
        database,
        lambda capacity: centered_sums(low, high, capacity, count, from_ends),
        average,
        terms=Terms(epsilon, delta, relation, name, by, drops),
        what="mean",
        kind="mean",
        facts={"lower": low, "upper": high, "from_ends": from_ends},
    )


@compiled
def _average(
    totals: jax.Array, n: jax.Array | None, interval: tuple[float, ...], from_ends: bool
) -> jax.Array:
    """Computes averages from noisy sums.

    `totals[0]` is the noisy count times half of the interval's length. The other entries of
    `totals` are the sums of the records' differences from the middle of the interval. With
    `from_ends`, `totals` are instead the sums of distances from the upper and from the lower end.
    """
    middle, half, low, high, unit = interval
    first, others = totals[0], totals[1:]
    # The number stays a scalar. If it had the shape of the sums, XLA would compute sums / (count /
    # half) as (sums * half) / count, where the product overflows for long intervals.
    count = jnp.where(from_ends, (first + totals[1]) / 2, first)
    sums = jnp.where(from_ends, (others - first) / 2, others)
    number = jnp.maximum(count, unit) / half if n is None else n
    return jnp.clip(middle + sums / number, low, high)


def private_variance(
    key: Key,
    database: Database,
    *,
    lower: float,
    upper: float,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "lower"] = "drop",
) -> Release:
    """The average and the variance of numbers that are clamped to public bounds.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,); under add-or-remove-one a `PaddedRecords` of such an
            array.
        lower: a finite number, public.
        upper: a finite number above `lower`, public.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`.
        missing: "drop" leaves out a record with a missing number (NaN). "lower" replaces a missing
            number by `lower`.

    Returns:
        A `Release` of {"mean": ..., "variance": ...}, with the variance from 0 to the square of
        half of the interval.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. Let h = (upper - lower) / 2, and let x in [-1, 1] be
        the distance from the middle in units of h. With Laplace noise, under add-or-remove-one or
        with several groups, one release has noise on the sums of (1 - x)^2 / 4, (1 - x^2) / 2 and
        (1 + x)^2 / 4, from which n, sum x and sum x^2 are computed. An added record changes these
        sums by 1 in the norm l1, and a replaced record by at most 2. Otherwise the release has
        noise on n, sum x and sum x^2. For each record, 1/2 is subtracted from x^2. So in the norm
        l1, an added record changes these three numbers by at most 5/2. A replaced record changes
        the sums by at most 9/4, as |x - y| (1 + |x + y|) <= 9/4. Under replace-one and Laplace
        noise, without groups, let
        e = 9 ln(2 / beta) / (4 epsilon n). With probability 1 - beta the variance is within
        h^2 (e + 2 e + e^2) of the true variance, and rounding adds h^2 (2^-13 + 2^-12 / n). By
        group, n is also estimated from the release, as for `private_mean`.

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
    drops = drops_missing(missing, "lower")
    low, high = check_interval(lower, upper)
    middle, half = middle_and_half(low, high)
    shape_of_record(database, "(n,)", by=by)

    def centered(numbers: jax.Array) -> jax.Array:
        return ((clamp(numbers, low, high) - middle) / half)[:, None]

    def finish(moments: Moments) -> dict[str, jax.Array]:
        mean = jnp.clip(moments.mean[0], -1, 1)
        variance = jnp.clip(moments.second[0, 0] - mean**2, 0, 1)
        return {"mean": middle + half * mean, "variance": half**2 * variance}

    return released_moments(
        key,
        database,
        centered,
        finish,
        dims=1,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by, drops),
        what="variance",
        in_cube=True,
        facts={"middle": [middle], "size": half, "scalar": True},
    )


def private_covariance(
    key: Key,
    database: Database,
    *,
    radius: float,
    center: ArrayLike = 0.0,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "center"] = "drop",
) -> Release:
    """The average and the covariance of records that are clipped to a public ball.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n, d); under add-or-remove-one a `PaddedRecords` of such an
            array. An infinite record counts as the center.
        radius: the radius of the ball, public.
        center: the center of the ball, public: an array of shape (d,), or a number for all
            coordinates.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise, which is larger if d is large.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`.
        missing: "drop" leaves out a record with a missing number (NaN). "center" counts it as
            the center.

    Returns:
        A `Release` of {"mean": ..., "covariance": ...}. Noise may make an eigenvalue negative.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. One release has noise on n, on the sum, and on the
        upper triangle of the sum of products, each entry once. With Laplace noise and d <= 2, under
        add-or-remove-one or with several groups, these numbers are computed from noisy sums of
        Bernstein polynomials: an added record changes them by at most 1 in the norm l1, and a
        replaced record by at most 2. Otherwise, in units of the radius and in the norm l2, an added
        record changes these numbers by at most sqrt(3), and a replaced record by at most 3 /
        sqrt(2). Records are rounded to integer vectors inside of the ball. For replace-one and
        Gaussian noise of standard deviation sigma, let z be the normal quantile at 1 - beta / (2
        m), with m = (d + 1) (d + 2) / 2. With probability 1 - beta all entries of the averages of x
        and of x x^T around the center are within sigma z / n of the true averages, and rounding
        adds radius^2 (2^-17 (d + 9) + 2^-12 / n).

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
    drops = drops_missing(missing, "center")
    (dims,) = shape_of_record(database, "(n, d)", by=by)
    into_unit_ball, middle, size = public_ball(center, radius, dims)
    ball = {"middle": middle.tolist(), "size": size, "scalar": False}
    return released_moments(
        key,
        database,
        into_unit_ball,
        lambda moments: _mean_and_covariance(moments, ball),
        dims=dims,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by, drops),
        what="covariance",
        facts=ball,
    )


def private_pca(
    key: Key,
    database: Database,
    *,
    components: int,
    radius: float,
    center: ArrayLike = 0.0,
    epsilon: float,
    delta: float | None = None,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
    by: By | None = None,
    missing: Literal["drop", "center"] = "drop",
) -> Release:
    """Principal components: the eigenvectors of a noisy covariance with the largest eigenvalues.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: as for `private_covariance`.
        components: the number of components, from 1 to d.
        radius: as for `private_covariance`.
        center: as for `private_covariance`.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for every group, as for `private_mean`.
        missing: "drop" leaves out a record with a missing number (NaN). "center" counts it as
            the center.

    Returns:
        A `Release` of {"mean": ..., "components": ..., "variances": ...}. Components are
        orthonormal rows, and the one with the largest variance comes first.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        The guarantees of `private_covariance`: the rest is post-processing. Let E be the error of
        the covariance. Each variance is within ||E||_2 of the true variance, by Weyl's inequality.
        By the inequality of Davis and Kahan, the sine of the angle between the released and the
        true first component is at most 2 ||E||_2 / (gap of the first two variances).

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
    drops = drops_missing(missing, "center")
    (dims,) = shape_of_record(database, "(n, d)", by=by)
    count = _checks.integer("components", components, least=1, most=dims)
    into_unit_ball, middle, size = public_ball(center, radius, dims)
    about = {"statistic": "pca", "components": count, "simulated": True}
    about |= {"middle": middle.tolist(), "size": size, "scalar": False}
    return released_moments(
        key,
        database,
        into_unit_ball,
        lambda moments: _directions(moments, about)[0],
        dims=dims,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by, drops),
        what="covariance",
        kind="bootstrap",
        facts=about,
    )


def _mean_and_covariance(moments: Moments, ball: dict[str, Any]) -> dict[str, jax.Array]:
    """Converts mean and covariance from units of the radius to the units of the records.

    If the bounds are an ellipsoid, each axis is scaled.
    """
    dtype = jnp.result_type(float)
    middle = np.asarray(ball["middle"], dtype)
    sizes = np.broadcast_to(np.asarray(ball["size"], np.float64), middle.shape)
    covariance = moments.second - jnp.outer(moments.mean, moments.mean)
    return {
        "mean": jnp.add(middle, sizes.astype(dtype) * moments.mean),
        "covariance": jnp.multiply(np.outer(sizes, sizes).astype(dtype), covariance),
    }


def _directions(moments: Moments, facts: dict[str, Any]) -> tuple[PyTree, jax.Array]:
    """Returns the components with the largest variances, and the covariance matrix."""
    found, count = _mean_and_covariance(moments, facts), facts["components"]
    vectors, variances = lax.linalg.eigh(found["covariance"])
    components = {
        "mean": found["mean"],
        "components": vectors.T[::-1][:count],
        "variances": variances[::-1][:count],
    }
    return components, found["covariance"]


def _least_reach(values: np.ndarray, error: np.ndarray, facts: dict[str, Any]) -> PyTree:
    """Returns lower bounds on half-widths, for components whose variances are nearly equal.

    Noise may swap or mix such components, so nothing is known about their directions. Coordinates
    of a direction are in [-1, 1] and differ by at most 2, so their half-width is 2. The half-width
    of a variance is the bound on its error.
    """
    gaps = np.diff(values[..., ::-1], axis=-1)
    far = np.full((*values.shape[:-1], 1), np.inf)
    nearest = np.minimum(np.append(far, -gaps, axis=-1), np.append(-gaps, far, axis=-1))
    tie = (nearest < CLEAR * error[..., None])[..., : facts["components"]]
    return {
        "mean": 0.0,
        "components": np.where(tie, 2.0, 0.0)[..., None],
        "variances": np.where(tie, error[..., None], 0.0),
    }


STATISTICS["pca"] = Statistic(
    _directions, _least_reach, {"mean": np.inf, "components": 1.0, "variances": np.inf}
)


def released_moments(
    key: Key,
    database: Database,
    vectors: Callable[[Database], jax.Array],
    finish: Callable[[Moments], dict[str, jax.Array]],
    *,
    dims: int,
    terms: Terms,
    what: str,
    in_cube: bool = False,
    kind: str = "moments",
    facts: dict[str, object],
) -> Release:
    """Releases a statistic of the noisy moments of vectors in the unit ball or the unit cube.

    `kind` and the public facts determine how intervals are computed.
    """
    sums = sums_of_moments(dims, terms.relation, terms.by, in_cube=in_cube, delta=terms.delta)
    bits = RADIUS_BITS if "degrees" in sums else radius_bits_for(slots_of(database, terms.relation))
    edge = 0.0 if in_cube else edge_of_ball(dims, bits)

    def statistic(
        query: IntegerQuery, value: jax.Array, n: jax.Array | None, scale: Scalar
    ) -> dict[str, jax.Array]:
        return finish(moments_of(in_units_of(query.unit, value), n, scale * query.unit, sums))

    return released(
        key,
        database,
        lambda capacity: moments_query(
            vectors, sums, dims=dims, capacity=capacity, in_cube=in_cube
        ),
        statistic,
        terms=terms,
        what=what,
        kind=kind,
        facts={**facts, **sums, "edge": edge},
    )


def public_ball(
    center: ArrayLike, radius: float, dims: int
) -> tuple[Callable[[Database], jax.Array], np.ndarray, float]:
    """Returns a map from a public ball to the unit ball, and the first ball's center and radius."""
    size = _checks.positive("radius", radius)
    middle = np.asarray(center, float)
    if middle.shape not in ((), (dims,)) or not np.all(np.isfinite(middle)):
        raise ValueError(f"center must be 1 or {dims} finite numbers, got {_checks.shown(center)}")
    middle = np.broadcast_to(middle, dims).astype(jnp.result_type(float))
    return lambda records: (records.astype(middle.dtype) - middle[None]) / size, middle, size
