"""k-means by a few iterations on noisy counts and sums of clusters."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy
from dpjax._core._numbers import is_numbers
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import as_dtype
from dpjax._core._types import Database, Key, Scalar
from dpjax._core._values import Guarantee, NeighboringRelation, Release, Sensitivity
from dpjax.accounting._compose_at import compose_at
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.mechanisms._gaussian import gaussian
from dpjax.queries import _k_means_intervals as _k_means_intervals
from dpjax.queries._covariance import public_ball
from dpjax.queries._integer_query import compiled
from dpjax.queries._integer_sums import coarse, coarse_reach, coarsening, sums_by_group
from dpjax.queries._k_means_start import clusters_of_cells, number_of_cells, spread_points
from dpjax.queries._padded_records import present_records
from dpjax.queries._private_release import shape_of_record, slots_of
from dpjax.queries._second_moments import RADIUS_BITS, edge_of_ball, in_ball
from dpjax.random._facade import check_key
from dpjax.release._requests import request_of
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.targets._bounds import sqrt_up

# The bits of the coordinates that assign records to clusters.
_BITS = 14


def private_k_means(
    key: Key,
    database: Database,
    *,
    clusters: int,
    radius: float,
    center: ArrayLike = 0.0,
    iterations: int = 4,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation | None = None,
    name: str | None = None,
) -> Release:
    """Centers of clusters, by Lloyd's iterations on noisy counts and sums.

    The first release has more cells than clusters: 32 or 4 k, around points spread over the ball.
    The first centers are the best of 64 k-means of its noisy counts and sums. Every iteration
    assigns records to the nearest center, and releases the number of records of each cluster and
    their sum. A cluster keeps its center if its noisy count is not above the noise.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n, d); under add-or-remove-one a `PaddedRecords` of one. A
            record that is not finite counts as the center of the ball.
        clusters: k, at least 1.
        radius: the radius of the ball that records are clipped to, public.
        center: the center of the ball, public: an array of shape (d,), or a number for all
            coordinates.
        iterations: at least 1, public; the start is one more release.
        epsilon: the epsilon of the start and all iterations together.
        delta: the delta of them together.
        relation: which databases are neighbors; None for that of an open ledger, else replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"centers": shape (k, d), "counts": shape (k,)}. Counts are the noisy counts
        of the last iteration, so they belong to the clusters of the centers before it. Its
        `interval` covers the noise of that iteration: the center and the number of the records that
        it assigned to a cluster.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is
            private and it is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation, for the start and all iterations together. Each of
        them is Gaussian noise in the norm l2. They compose by zCDP (`accounting.compose_at`), which
        allows an iteration to depend on earlier releases. The cells do not depend on records, and
        the first centers are post-processing. Take units of the radius. A record that is added
        moves the count and the sum of one cluster, by sqrt(1 + 1) at most. A record that is
        replaced moves those of one cluster by at most 2, or those of two clusters by at most
        sqrt(2 + 2) = 2. An open ledger counts one release.
        Let sigma be the standard deviation of the noise in units of the radius, z the normal
        quantile at 1 - beta / (2 k (d + 1)), and e = sigma z. Given the assignment, with
        probability 1 - beta all counts of an iteration are within e of the truth, and all
        coordinates of the center of c records within 2 e radius / (c - e). Let rho-zCDP imply
        (epsilon, delta)-DP; then sigma is at most 2 sqrt((T + 1) / (2 rho)) for T iterations.

    Source:
        Blum, Dwork, McSherry and Nissim, "Practical privacy: the SuLQ framework" (2005). Su, Cao,
        Li, Bertino and Jin, "Differentially private k-means clustering" (2016), for a start from
        noisy counts of cells.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> from dpjax import queries
        >>> points = jnp.repeat(jnp.array([[-0.5, 0.0], [0.5, 0.0]]), 1000, axis=0)
        >>> release = queries.private_k_means(
        ...     dpjax.random.secure_key(), points, clusters=2, radius=1.0, epsilon=2.0, delta=1e-6
        ... )
        >>> release.value["centers"].shape
        (2, 2)
    """
    check_key(key)
    k = _checks.integer("clusters", clusters, least=1)
    steps = _checks.integer("iterations", iterations, least=1)
    (dims,) = shape_of_record(database, "(n, d)")
    into_unit_ball, middle, size = public_ball(center, radius, dims)
    relation = relation_or_inherited(relation)
    capacity = slots_of(database, relation)
    bits = coarsening(capacity, bits=RADIUS_BITS)
    cells = number_of_cells(k)
    reach = _reach(relation, bits, dims=cells * (1 + dims))
    sensitivity = assume_sensitivity(reach, norm="l2", relation=relation)
    mechanism, guarantee = _share_of(sensitivity, 1 + steps, epsilon, delta, cells * (1 + dims))
    unit = math.ldexp(1.0, bits - RADIUS_BITS)
    notes = guarantee_under(key, mechanism.guarantee).notes
    promised = dataclasses.replace(guarantee, notes=notes)

    def draw(key: Key, slots: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        records, present = slots
        cells_key, start_key, *keys = jax.random.split(key, 3 + steps)
        inside, noise = _placed(into_unit_ball(records), present), mechanism.scale * unit

        def noisy_step(key: jax.Array, centers: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = _totals(inside, present, centers, bits=bits)
            return _next(centers, mechanism.unpaid_draw(key, total), unit, noise)

        wide = noisy_step(keys[0], spread_points(cells_key, count=cells, dims=dims))
        centers, counts = clusters_of_cells(start_key, *wide, noise, clusters=k), jnp.zeros(k)
        for step_key in keys[1:]:
            centers, counts = noisy_step(step_key, centers)
        return {"centers": jnp.add(middle[None], size * centers), "counts": counts}

    records, present = present_records(database)
    if is_numbers(records):
        records = as_dtype(records, jnp.result_type(float))
    slots = records, present
    release = pay_and_draw(
        lambda: draw(key, slots),
        key,
        slots,
        guarantee=promised,
        what="k-means",
        name=name,
        request=lambda name: request_of(name, draw, key, TreeSpec.of(slots), mechanism, promised),
    )
    last = mechanism.accuracy(TreeSpec.of(jax.ShapeDtypeStruct((k, 1 + dims), jnp.int32)))
    if last.kind != "noise":
        return release
    ball = {"middle": middle.tolist(), "size": size, "edge": edge_of_ball(dims, RADIUS_BITS)}
    about = {**last.facts, **ball, "unit": unit, "least": float(mechanism.scale) * unit}
    return dataclasses.replace(release, accuracy=Accuracy.of("k-means", about))


def _share_of(
    sensitivity: Sensitivity, releases: int, epsilon: float, delta: float, dims: int
) -> tuple[AdditiveMechanism, Guarantee]:
    """The Gaussian mechanism for one of several releases, and the guarantee of all together."""
    epsilon, delta = _checks.positive("epsilon", epsilon), _checks.fraction("delta", delta)
    try:
        mechanism, guarantee = _equal_share(sensitivity, releases, epsilon, delta, dims)
        mechanism._check_value(jax.ShapeDtypeStruct((dims,), jnp.int32))
    except ValueError:
        # The errors inside name the share of one release, which no caller passed.
        raise ValueError(
            f"no Gaussian noise fits {releases} releases at epsilon={epsilon:g} and"
            f" delta={delta:g}: take an epsilon nearer to 1, or a larger delta"
        ) from None
    return mechanism, guarantee


def _equal_share(
    sensitivity: Sensitivity, releases: int, epsilon: float, delta: float, dims: int
) -> tuple[AdditiveMechanism, Guarantee]:
    # Parts that are rounded up may add up to more than delta, and then no epsilon would be enough.
    part = delta / releases * (1 - 2.0**-40)

    def runs(share: float) -> tuple[AdditiveMechanism, Guarantee]:
        mechanism = gaussian(sensitivity, share, part)
        each = [mechanism] * releases
        together = compose_at(*each, delta=delta, method="zcdp", dims=dims)
        return mechanism, together

    # Bisection. By basic composition, an equal share of epsilon is small enough.
    enough, too_much = epsilon / releases * (1 - 1e-9), epsilon
    for _ in range(30 if releases > 1 else 0):
        tried = (enough + too_much) / 2
        if runs(tried)[1].epsilon <= epsilon:
            enough = tried
        else:
            too_much = tried
    return runs(enough)


def _reach(relation: NeighboringRelation, bits: int, *, dims: int) -> float:
    """How far a record moves the counts and sums of all clusters, in the norm l2."""
    replaced = relation is NeighboringRelation.REPLACE_ONE
    moved = Fraction(2) if replaced else Fraction(sqrt_up(Fraction(2)))
    return coarse_reach(moved * 2**RADIUS_BITS, dims=dims, bits=bits, norm="l2")


_placed: Callable[[jax.Array, jax.Array], jax.Array] = compiled(in_ball)


def _counts_and_sums(
    x: jax.Array, present: jax.Array, centers: jax.Array, *, bits: int
) -> jax.Array:
    """The count and the sum of each cluster, in coarse units of the radius: shape (k, 1 + d)."""
    k = len(centers)
    cluster = jnp.where(present, _nearest(x, centers), k)
    weighed = jnp.concatenate([jnp.full((len(x), 1), 2**RADIUS_BITS, jnp.int32), x], axis=1)
    return coarse(sums_by_group(weighed, cluster, k), bits)


_totals = compiled(_counts_and_sums, static="bits")


@compiled
def _next(
    centers: jax.Array, noisy: jax.Array, unit: float, noise: Scalar
) -> tuple[jax.Array, jax.Array]:
    """The next centers, and noisy counts, from noisy totals."""
    totals = noisy.astype(centers.dtype) * unit
    counts, sums = totals[:, 0], totals[:, 1:]
    found = sums / jnp.maximum(counts, noise)[:, None]
    found = found / jnp.maximum(_lengths(found), 1)
    return jnp.where((counts > noise)[:, None], found, centers), counts


def _nearest(x: jax.Array, centers: jax.Array) -> jax.Array:
    """The index of the nearest center for each record in the ball.

    It is computed in integers, so the slot of a record does not matter. They have 14 bits, and by
    the inequality of Cauchy and Schwarz their products add up to less than 2^29.
    """
    coarse_x = x >> (RADIUS_BITS - _BITS)
    coarse_centers = jnp.round(centers * 2.0**_BITS).astype(jnp.int32)
    squares = jnp.sum(coarse_centers**2, axis=1)
    products = jnp.einsum("ni,ki->nk", coarse_x, coarse_centers)
    return jnp.argmin(squares[None] - 2 * products, axis=1)


def _lengths(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=1, keepdims=True))
