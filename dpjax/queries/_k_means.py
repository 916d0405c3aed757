"""k-means by noisy counts and sums of the clusters, a few times."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._values import NeighboringRelation, Release
from dpjax.accounting._compose_at import compose_at
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.mechanisms._gaussian import gaussian
from dpjax.queries._covariance import dims_of, public_ball
from dpjax.queries._integer_sums import coarse, coarse_reach, coarsening, sums_by_group
from dpjax.queries._padded_records import present_records
from dpjax.queries._private_release import slots_of
from dpjax.queries._second_moments import RADIUS_BITS, in_ball
from dpjax.random._facade import check_key
from dpjax.release._requests import request_of
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._analytic import analytic_sensitivity
from dpjax.targets._bounds import sqrt_up

# Of the coordinates by which records are assigned.
_BITS = 14


def private_k_means(
    key: jax.Array,
    database: Any,
    *,
    clusters: int,
    radius: float,
    center: Any = 0.0,
    iterations: int = 5,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    name: str | None = None,
) -> Release:
    """Centers of clusters, by Lloyd's iterations on noisy counts and sums.

    Starts at random points of the ball. Every iteration assigns records to the nearest center, and
    releases of every cluster how many records it has and their sum; a cluster whose noisy count is
    below the noise keeps its center.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n, d); under add-or-remove-one a `PaddedRecords` of one. A
            record that is not finite counts as the center of the ball.
        clusters: k, at least 1.
        radius: of the ball that records are clipped to, public.
        center: of the ball, public: an array of shape (d,), or a number for all coordinates.
        iterations: at least 1, public.
        epsilon: of all iterations together.
        delta: of all iterations together.
        relation: which databases are neighbors.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of {"centers": shape (k, d), "counts": shape (k,)}: the last noisy counts, of
        the clusters of the centers before the last.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is
            private and it is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation, for all iterations together: each is Gaussian noise
        in the norm l2, and they compose by zCDP (`accounting.compose_at`), also as every iteration
        assigns by what came before. In units of the radius a record moves the count and the sum of
        one cluster, by sqrt(1 + 1) where it is added; where it is replaced, in one cluster by 2, or
        of one and another, by sqrt(2 + 2) = 2. A ledger that is open counts one release. Given the
        assignment, with probability 1 - beta all counts of an iteration are within e of the truth,
        and all coordinates of the center of c records within 2 e radius / (c - e), where
        e = sigma z, z is the normal quantile at 1 - beta / (2 k (d + 1)), and sigma at most
        2 sqrt(T / (2 rho)) for T iterations and the rho of zCDP that is worth (epsilon, delta).

    Source:
        Blum, Dwork, McSherry and Nissim, "Practical privacy: the SuLQ framework" (2005).

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
    dims = dims_of(database)
    into_unit_ball, middle, size = public_ball(center, radius, dims)
    capacity = slots_of(database, relation)
    bits = coarsening(capacity, bits=RADIUS_BITS)
    reach = _reach(NeighboringRelation(relation), bits, dims=k * (1 + dims))
    sensitivity = analytic_sensitivity(reach, norm="l2", relation=NeighboringRelation(relation))
    mechanism, guarantee = _share_of(sensitivity, steps, epsilon, delta, k * (1 + dims))
    unit = math.ldexp(1.0, bits - RADIUS_BITS)
    notes = guarantee_under(key, mechanism.guarantee).notes
    promised = dataclasses.replace(guarantee, notes=notes)

    def draw(key: jax.Array, slots: Any) -> dict[str, jax.Array]:
        records, present = slots
        start_key, *keys = jax.random.split(key, 1 + steps)
        inside = _placed(into_unit_ball(records), present)
        centers, counts = _points_of_ball(start_key, k, dims), jnp.zeros(k)
        for step_key in keys:
            total = _totals(inside, present, centers, bits=bits)
            noisy = mechanism.draw(step_key, total)
            centers, counts = _moved(centers, noisy, unit, mechanism.scale * unit)
        return {"centers": middle[None] + size * centers, "counts": counts}

    slots = present_records(database)
    return pay_and_draw(
        lambda: draw(key, slots),
        key,
        slots,
        guarantee=promised,
        what="k-means",
        name=name,
        request=lambda name: request_of(name, draw, key, TreeSpec.of(slots), mechanism, promised),
    )


def _share_of(
    sensitivity: Any, steps: int, epsilon: float, delta: float, dims: int
) -> tuple[AdditiveMechanism, Any]:
    """The Gaussian mechanism that may be run so often, and what all runs promise together."""
    epsilon, delta = _checks.positive("epsilon", epsilon), _checks.fraction("delta", delta)
    # Rounded, the sum of parts may be more than the whole, which leaves no bound on what is tried.
    part = delta / steps * (1 - 2.0**-40)

    def runs(share: float) -> tuple[AdditiveMechanism, Any]:
        mechanism = gaussian(sensitivity, share, part)
        each = [mechanism] * steps
        together = compose_at(*each, delta=delta, method="zcdp", dims=dims)
        return mechanism, together

    # Releases add up at the least.
    enough, too_much = epsilon / steps * (1 - 1e-9), epsilon
    for _ in range(30 if steps > 1 else 0):
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


_placed = jax.jit(in_ball)


@functools.partial(jax.jit, static_argnames="bits")
def _totals(x: jax.Array, present: jax.Array, centers: jax.Array, *, bits: int) -> jax.Array:
    """Of every cluster the count and the sum of its records, in units of the radius: (k, 1 + d)."""
    k = len(centers)
    cluster = jnp.where(present, _nearest(x, centers), k)
    weighed = jnp.concatenate([jnp.full((len(x), 1), 2**RADIUS_BITS, jnp.int32), x], axis=1)
    return coarse(sums_by_group(weighed, cluster, k), bits)


@jax.jit
def _moved(
    centers: jax.Array, noisy: jax.Array, unit: float, noise: float
) -> tuple[jax.Array, jax.Array]:
    """The next centers, and noisy counts, from noisy totals."""
    totals = noisy.astype(centers.dtype) * unit
    counts, sums = totals[:, 0], totals[:, 1:]
    found = sums / jnp.maximum(counts, noise)[:, None]
    found = found / jnp.maximum(jnp.linalg.norm(found, axis=1, keepdims=True), 1)
    return jnp.where((counts > noise)[:, None], found, centers), counts


def _nearest(x: jax.Array, centers: jax.Array) -> jax.Array:
    """Which center a record in the ball is nearest to: in integers, so wherever it stands.

    Of 14 bits, whose products, by Cauchy and Schwarz, add up to less than 2^29.
    """
    coarse_x = x >> (RADIUS_BITS - _BITS)
    coarse_centers = jnp.round(centers * 2.0**_BITS).astype(jnp.int32)
    squares = jnp.sum(coarse_centers**2, axis=1)
    products = jnp.einsum("ni,ki->nk", coarse_x, coarse_centers)
    return jnp.argmin(squares[None] - 2 * products, axis=1)


def _points_of_ball(key: jax.Array, k: int, dims: int) -> jax.Array:
    """Uniform points of the unit ball, drawn in float32: the same ones under x64."""
    direction_key, length_key = jax.random.split(key)
    directions = jax.random.normal(direction_key, (k, dims), jnp.float32).astype(float)
    lengths = jax.random.uniform(length_key, (k, 1), jnp.float32) ** (1 / dims)
    return lengths * directions / jnp.linalg.norm(directions, axis=1, keepdims=True)
