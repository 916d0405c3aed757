"""k-means by a few iterations on noisy counts and sums of clusters."""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._accuracy import Accuracy, Ends, intervals_of
from dpjax._core._columns import is_numbers
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import Parts, as_dtype
from dpjax._core._types import Database, Key, PyTree, Scalar, Value
from dpjax._core._values import Guarantee, NeighboringRelation, Release, Sensitivity
from dpjax._exact._limbs import Limbs
from dpjax.accounting._compose_at import compose_at
from dpjax.mechanisms._additive import AdditiveMechanism, gaussian
from dpjax.mechanisms._noise_intervals import noise_bounds
from dpjax.queries._moments import public_ball
from dpjax.queries._padded_records import (
    complete,
    drops_missing,
    present_records,
    records_and_slots,
)
from dpjax.queries._people import ONE_RECORD, Contribution
from dpjax.queries._private_release import _quotient, shape_of_record, slots_of
from dpjax.queries._query import compiled
from dpjax.queries._second_moments import RADIUS_BITS, edge_of_ball, in_ball
from dpjax.queries._sums import coarse, coarse_reach, coarsening
from dpjax.queries._totals import Addend, Totals, total_of_parts, totals_of
from dpjax.random._keys import check_key
from dpjax.release._transaction import guarantee_under, pay_and_draw, request_of
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity
from dpjax.targets._known_sensitivity import sqrt_up

# The number of bits of each coordinate when a record is assigned to its nearest center.
_BITS = 14
# The initial step divides the ball into cells around points. Each point is chosen among this many
# random candidates. More candidates distribute the cells more evenly.
_CANDIDATES = 32
# The number of runs of k-means on the centers of the cells, and the number of steps of each run.
_RESTARTS = 64
_STEPS = 10
# A cell counts as empty if its noisy count is at most this many standard deviations of the noise.
_DEVIATIONS = 2
# A bound on rounding errors in float32, relative to the radius or to a count.
_FLOATS = 2.0**-20


class Partition(NamedTuple):
    """A database to cluster, as a whole or by group, with privacy for records or for people.

    Each step releases the totals of all groups together, and is paid for as one release. An added
    record is in one group, so the sensitivity of all totals is that of the totals of one group. A
    replaced record may change two groups, so groups are refused under replace-one. If neighbors
    differ in all records of a person, the sensitivity is computed as for any query by group.

    Attributes:
        database: the records of all groups, as a whole or in parts: vectors, or, if there are
            groups, a pair of the vectors and of their groups (below 0 for no group).
        groups: the number of groups; None if there are no groups.
        people: how many records and groups a person has; None if neighbors differ in one record.
    """

    database: Database | Parts
    groups: int | None = None
    people: Contribution | None = None


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
    missing: Literal["drop", "center"] = "drop",
) -> Release:
    """Centers of clusters, by Lloyd's iterations on noisy counts and sums.

    The start draws max(32, 4 k) random points, spread over the ball. Each point has a cell: the
    part of the ball that is nearest to it. The first release has a noisy count and a noisy sum of
    the records in each cell. The initial centers are the best of 64 k-means runs on these. Every
    iteration assigns records to the nearest center, and releases a noisy count and a noisy sum of
    the records in each cluster. A cluster keeps its old center if its noisy count does not exceed
    the noise.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n, d); under add-or-remove-one a `PaddedRecords` of such an
            array. An infinite record counts as the center of the ball.
        clusters: k, at least 1.
        radius: the radius of the ball that records are clipped to, public.
        center: the center of the ball, public: an array of shape (d,), or a number for all
            coordinates.
        iterations: the number of iterations, at least 1, public; the start is one more release.
        epsilon: the epsilon of the start and all iterations together.
        delta: the delta of the start and all iterations together.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        missing: "drop" leaves out a record with a missing number (NaN). "center" counts it as
            the center.

    Returns:
        A `Release` of {"centers": shape (k, d), "counts": shape (k,)}. The counts are the noisy
        counts of the last iteration. They refer to the centers before its update, to which it
        assigned the records. The `interval` of the release covers the noise of the last iteration:
        it is about the mean and the number of the records that this iteration assigned to each
        cluster.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is private
            and the database is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation, for the start and all iterations together. Each of
        these releases has Gaussian noise in the norm l2. They compose by zCDP
        (`accounting.compose_at`), which allows an iteration to depend on earlier releases. The
        cells do not depend on records, and the initial centers are post-processing. In units of the
        radius, adding a record changes the count and the sum of one cluster by at most sqrt(1 + 1).
        A replaced record either stays in its cluster and changes the sum by at most 2, or changes
        its cluster, and then both clusters change by at most sqrt(2 + 2) = 2. An open ledger
        records the start and all iterations as one release. Let sigma be the standard deviation of
        the noise in units of the radius, z the normal quantile at 1 - beta / (2 k (d + 1)), and e =
        sigma z. Given the assignment, with probability 1 - beta all counts of an iteration are
        within e of the true counts, and all coordinates of the center of c records within 2 e
        radius / (c - e). Let rho-zCDP imply (epsilon, delta)-DP; then sigma is at most 2 sqrt((T +
        1) / (2 rho)) for T iterations.

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
    given = database if isinstance(database, Partition) else Partition(database)
    database, groups, people = given
    people = people or ONE_RECORD
    check_key(key)
    drops = drops_missing(missing, "center")
    k = _checks.integer("clusters", clusters, least=1)
    steps = _checks.integer("iterations", iterations, least=1)
    example = database if groups is None else records_and_slots(database)[0][0]
    (dims,) = shape_of_record(example, "(n, d)")
    into_unit_ball, middle, size = public_ball(center, radius, dims)
    relation = relation_or_inherited(relation)
    if groups is not None and relation is NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            "by must be None for k-means under replace-one, because a replaced row may be in two"
            " groups: ask a table with the relation add-or-remove-one"
        )
    if isinstance(database, Parts):
        database.check(relation, people.privacy_unit)
    capacity = slots_of(database, relation)
    bits = coarsening(capacity, bits=RADIUS_BITS)
    cells = max(32, 4 * k)  # So many cells that two clusters rarely share a cell.
    sensitivity = _sensitivity(relation, bits, people, dims=cells * (1 + dims))
    count = 1 if groups is None else groups
    drawn = count * cells * (1 + dims)
    mechanism, guarantee = _share_of(sensitivity, 1 + steps, epsilon, delta, drawn)
    unit = math.ldexp(1.0, bits - RADIUS_BITS)
    notes = guarantee_under(key, mechanism.guarantee).notes
    promised = dataclasses.replace(guarantee, notes=notes)

    def placed(slots: tuple[jax.Array, ...]) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the records as integer vectors in the unit ball, and a mask for each group."""
        records, present, *codes = slots
        present &= complete(records) if drops else True
        each = [present] if groups is None else [present & (codes[0] == g) for g in range(count)]
        return _placed(into_unit_ball(records), present), each

    def draw(key: Key, slots: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        inside, each = placed(slots)

        def totals(centers: jax.Array) -> list[jax.Array]:
            return [_totals(inside, *pair, bits=bits) for pair in zip(each, centers, strict=True)]

        return of_each(key, totals)

    def draw_over(key: Key, parts: Parts) -> dict[str, jax.Array]:
        def totals(centers: jax.Array) -> list[jax.Array]:
            def of_part(records: Database, present: jax.Array) -> Totals:
                inside, each = placed(_slots(records, present, groups))
                pairs = zip(each, centers, strict=True)
                return tuple(_totals_in_64_bits(inside, *pair) for pair in pairs)

            found = total_of_parts(of_part, parts, is_compiled=False)
            return [coarse(total, bits) for total in found]

        return of_each(key, totals)

    def of_each(key: Key, totals: Callable[[jax.Array], list[jax.Array]]) -> dict[str, jax.Array]:
        cells_key, start_key, *keys = jax.random.split(key, 3 + steps)
        noise = mechanism.scale * unit

        def noisy_step(key: jax.Array, centers: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = jnp.concatenate(totals(centers))
            noisy = mechanism.unpaid_draw(key, total)
            return _next(centers, noisy.reshape(count, -1, 1 + dims), unit, noise)

        points = spread_points(cells_key, count=cells, dims=dims)
        wide = noisy_step(keys[0], jnp.stack([points] * count))
        pairs = zip(*wide, strict=True)
        starts = [clusters_of_cells(start_key, *pair, noise, clusters=k) for pair in pairs]
        centers, counts = jnp.stack(starts), jnp.zeros((count, k))
        for step_key in keys[1:]:
            centers, counts = noisy_step(step_key, centers)
        found = {"centers": jnp.add(middle[None, None], size * centers), "counts": counts}
        return found if groups is not None else jax.tree.map(lambda array: array[0], found)

    # The fingerprint of a request depends on the shapes of `slots`. For a database in parts, these
    # are the shapes of one part. So the number of slots of the whole database is added.
    parts = database if isinstance(database, Parts) else None
    like = database if parts is None else parts.like
    slots = _slots(*present_records(like), groups)
    about = () if parts is None else (parts.slots,)
    release = pay_and_draw(
        lambda: draw(key, slots) if parts is None else draw_over(key, parts),
        key,
        slots,
        guarantee=promised,
        what="k-means",
        name=name,
        request=lambda name: request_of(
            name, draw, key, TreeSpec.of(slots), mechanism, promised, *about
        ),
    )
    shape = (*(() if groups is None else (groups,)), k, 1 + dims)
    last = mechanism.accuracy(TreeSpec.of(jax.ShapeDtypeStruct(shape, jnp.int32)))
    if last.kind != "noise":
        return release
    ball = {"middle": middle.tolist(), "size": size, "edge": edge_of_ball(dims, RADIUS_BITS)}
    about = {**last.facts, **ball, "unit": unit, "least": float(mechanism.scale) * unit}
    return dataclasses.replace(release, accuracy=Accuracy.of("k-means", about))


def _slots(records: Database, present: jax.Array, groups: int | None) -> tuple[jax.Array, ...]:
    """Returns the vectors of a database, which slots they are in, and their groups, if any."""
    vectors, *codes = (records,) if groups is None else records
    if is_numbers(vectors):
        vectors = as_dtype(vectors, jnp.result_type(float))
    return (vectors, present, *codes)


def _share_of(
    sensitivity: Sensitivity, releases: int, epsilon: float, delta: float, dims: int
) -> tuple[AdditiveMechanism, Guarantee]:
    """Returns the Gaussian mechanism of one of `releases` releases, and the guarantee of all."""
    epsilon, delta = _checks.positive("epsilon", epsilon), _checks.fraction("delta", delta)
    # The factor rounds down: if the deltas of the releases added up to more than delta, no epsilon
    # would be enough.
    part = delta / releases * (1 - 2.0**-40)

    def runs(share: float) -> tuple[AdditiveMechanism, Guarantee]:
        mechanism = gaussian(sensitivity, share, part)
        each = [mechanism] * releases
        return mechanism, compose_at(*each, delta=delta, method="zcdp", dims=dims)

    # The bisection looks for the epsilon of one release. It starts from epsilon / `releases`, which
    # is small enough by basic composition.
    enough, too_much = epsilon / releases * (1 - 1e-9), epsilon
    try:
        for _ in range(30):
            tried = (enough + too_much) / 2
            if runs(tried)[1].epsilon <= epsilon:
                enough = tried
            else:
                too_much = tried
        mechanism, guarantee = runs(enough)
        mechanism._check_value(jax.ShapeDtypeStruct((dims,), jnp.int32))
    except ValueError:
        # The original error message contains the epsilon of one release, which the caller did not
        # pass.
        raise ValueError(
            f"no Gaussian noise fits {releases} releases at epsilon={epsilon:g} and"
            f" delta={delta:g}: take an epsilon nearer to 1, or a larger delta"
        ) from None
    return mechanism, guarantee


def _sensitivity(
    relation: NeighboringRelation, bits: int, people: Contribution, *, dims: int
) -> Sensitivity:
    """Returns the l2 sensitivity of the totals of all groups."""
    reach = people.reach(lambda _, one: _reach(one, bits, dims=dims), "l2", relation)
    found = assume_sensitivity(reach, norm="l2", relation=relation)
    return dataclasses.replace(found, **people.about)


def _reach(relation: NeighboringRelation, bits: int, *, dims: int) -> float:
    """Returns the l2 sensitivity of the counts and sums of all clusters, in units of their grid."""
    replaced = relation is NeighboringRelation.REPLACE_ONE
    moved = Fraction(2) if replaced else Fraction(sqrt_up(Fraction(2)))
    return coarse_reach(moved * 2**RADIUS_BITS, dims=dims, bits=bits, norm="l2")


_placed: Callable[[jax.Array, jax.Array], jax.Array] = compiled(in_ball)


@functools.partial(jax.jit, static_argnames="bits")
def _totals(x: jax.Array, present: jax.Array, centers: jax.Array, *, bits: int) -> jax.Array:
    """Returns the count and the sum of each cluster, rounded to a grid: shape (k, 1 + d)."""
    return coarse(_exact_totals(x, present, centers), bits)


def _exact_totals(x: jax.Array, present: jax.Array, centers: jax.Array) -> Limbs:
    """Returns the exact count and sum of each cluster: shape (k, 1 + d)."""
    k = len(centers)
    cluster = jnp.where(present, _nearest(x, centers), -1)
    weighed = jnp.concatenate([jnp.full((len(x), 1), 2**RADIUS_BITS, jnp.int32), x], axis=1)
    (total,) = totals_of([Addend(cluster, k, weighed, RADIUS_BITS)])
    return total


_totals_in_64_bits: Callable[..., Limbs] = jax.jit(_exact_totals)


@compiled
def _next(
    centers: jax.Array, noisy: jax.Array, unit: float, noise: Scalar
) -> tuple[jax.Array, jax.Array]:
    """Computes the next centers from noisy totals, and returns them with the noisy counts."""
    totals = noisy.astype(centers.dtype) * unit
    counts, sums = totals[..., 0], totals[..., 1:]
    found = sums / jnp.maximum(counts, noise)[..., None]
    found = found / jnp.maximum(jnp.sqrt(_squares(found))[..., None], 1)
    return jnp.where((counts > noise)[..., None], found, centers), counts


def _nearest(x: jax.Array, centers: jax.Array) -> jax.Array:
    """Returns the index of the nearest center for each record in the ball.

    Distances are compared as integers, so the result for a record does not depend on the record's
    position in the array. Coordinates have 14 bits. By the Cauchy-Schwarz inequality, an inner
    product is below 2^29.
    """
    coarse_x = x >> (RADIUS_BITS - _BITS)
    coarse_centers = jnp.round(centers * 2.0**_BITS).astype(jnp.int32)
    squares = jnp.sum(coarse_centers**2, axis=1)
    products = jnp.einsum("ni,ki->nk", coarse_x, coarse_centers)
    return jnp.argmin(squares[None] - 2 * products, axis=1)


@functools.partial(jax.jit, static_argnames=("count", "dims"))
def spread_points(key: jax.Array, *, count: int, dims: int) -> jax.Array:
    """Returns points spread over the unit ball: each is the candidate farthest from earlier ones.

    The algorithm is by Gonzalez (1985). Points are drawn in float32, so enabling x64 does not
    change them.
    """
    candidates = _points_of_ball(key, _CANDIDATES * count, dims)

    def add(nearest: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        point = candidates[jnp.argmax(nearest)]
        return jnp.minimum(nearest, _squares(candidates - point[None])), point

    farther_than_any = jnp.full(len(candidates), 5.0, jnp.float32)
    _, points = jax.lax.scan(add, farther_than_any, None, length=count)
    return points.astype(float)


@functools.partial(jax.jit, static_argnames="clusters")
def clusters_of_cells(
    key: jax.Array, cells: jax.Array, counts: jax.Array, noise: jax.Array, *, clusters: int
) -> jax.Array:
    """Returns the centers of the best of many runs of k-means on cells, weighted by noisy counts.

    Each run is initialized by k-means++ (Arthur and Vassilvitskii, 2007), and computes in float32.
    """
    points = cells.astype(jnp.float32)
    weights = jnp.where(counts > _DEVIATIONS * noise, counts, 0).astype(jnp.float32)

    def step(centers: jax.Array, _: None) -> tuple[jax.Array, None]:
        nearest = jnp.argmin(_apart(points, centers), axis=1)
        shares = jax.nn.one_hot(nearest, clusters, dtype=jnp.float32) * weights[:, None]
        total = jnp.sum(shares, axis=0)[:, None]
        averages = shares.T @ points / jnp.maximum(total, 1)
        return jnp.where(total > 0, averages, centers), None

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        centers, _ = jax.lax.scan(step, _seeds(key, points, weights, clusters), length=_STEPS)
        return centers, jnp.sum(weights * jnp.min(_apart(points, centers), axis=1))

    found, costs = jax.vmap(run)(jax.random.split(key, _RESTARTS))
    return found[jnp.argmin(costs)].astype(float)


def _seeds(key: jax.Array, points: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Draws centers as in k-means++: by weight times squared distance to the nearest center."""

    def draw(nearest: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # If all points with positive weight are centers already, every product is 0. The small
        # number keeps the logarithms finite.
        point = points[jax.random.categorical(key, jnp.log(weights * nearest + 1e-30))]
        return jnp.minimum(nearest, _squares(points - point[None])), point

    start = jnp.ones(len(points), jnp.float32)
    return jax.lax.scan(draw, start, jax.random.split(key, count))[1]


def _apart(points: jax.Array, centers: jax.Array) -> jax.Array:
    return _squares(points[:, None] - centers[None])


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x), axis=-1)


def _points_of_ball(key: jax.Array, count: int, dims: int) -> jax.Array:
    """Draws uniform points in the unit ball."""
    direction_key, length_key = jax.random.split(key)
    directions = jax.random.normal(direction_key, (count, dims), jnp.float32)
    radii = jax.random.uniform(length_key, (count, 1), jnp.float32) ** (1 / dims)
    return radii * directions / jnp.sqrt(_squares(directions))[:, None]


@intervals_of("k-means")
def _of_clusters(
    value: Value, measured: PyTree, facts: dict[str, Any], confidence: float, simultaneous: bool
) -> Ends:
    """Returns intervals of the centers and sizes of clusters, from the noise of the last iteration.

    A center is a noisy sum divided by a noisy count, and the release determines both: the sum is
    the center times the count. A center at the edge of the ball may have been clipped, and if a
    count did not exceed the noise, the center of the previous iteration was kept. In both cases the
    interval is the whole ball.
    """
    middle, size = np.asarray(facts["middle"]), np.asarray(facts["size"])
    spared = _FLOATS * (np.abs(middle) + size)
    centers = (np.asarray(value["centers"], np.float64) - middle) / size
    counts = np.asarray(value["counts"], np.float64)

    def count_within(parts: int) -> np.ndarray:
        (bound,) = noise_bounds(facts, confidence, facts["coordinates"] if simultaneous else parts)
        # The added 1 covers the rounding of totals.
        return (bound + 1) * facts["unit"] + _FLOATS * np.abs(counts)

    alone, reach = count_within(1), count_within(2)[..., None]
    sums, under = centers * counts[..., None], counts[..., None]
    around = (sums - reach, sums + reach), (under - reach, under + reach)
    low, high = _quotient(*around)
    inside = np.sqrt(np.sum(centers**2, axis=-1)) < 1 - facts["edge"]
    known = (inside & (counts > facts["least"] * (1 + _FLOATS)))[..., None]
    low = np.where(known, np.clip(low - facts["edge"], -1, 1), -1)
    high = np.where(known, np.clip(high + facts["edge"], -1, 1), 1)
    return (
        {"centers": middle + size * low - spared, "counts": np.maximum(counts - alone, 0)},
        {"centers": middle + size * high + spared, "counts": counts + alone},
    )
