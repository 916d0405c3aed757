"""The average of numbers that are clamped to public bounds."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core._values import NeighboringRelation, Release
from dpjax.accounting._composition import post_process
from dpjax.queries._bounded_sums import FINE_BITS, fine_exponent
from dpjax.queries._integer_sums import coarse, coarsening, sum_of_integers, to_units
from dpjax.queries._padded_records import present_records
from dpjax.queries._private_release import mechanism_for, public_count, released, slots_of
from dpjax.queries._query import Query, rounded_estimate
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._interval import check_interval, clamp


def private_mean(
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
    """The average record, each clamped to public bounds.

    Under replace-one a noisy sum over n, which is public. Under add-or-remove-one a noisy sum of
    distances from the middle of the interval over a noisy count, both in one release.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,) or (n, d); under add-or-remove-one a `PaddedRecords` of
            one.
        lower: a finite number, public; NaN counts as it.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        epsilon: of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors.
        name: of these records, for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of floats of shape () or (d,), in [lower, upper].

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or is no
            `PaddedRecords` where n is private.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. With h = (upper - lower) / 2, records move a sum by
        2 h under replace-one. Under add-or-remove-one they move each of d sums by h, and the count,
        which is multiplied by h, by h. For Laplace noise, but for that of floats and rounding by
        h (2^-27 c + 2^-14) / n in c slots, with probability 1 - beta every average is within
        2 h d ln(d / beta) / (epsilon n) of the truth under replace-one, and under add-or-remove-one
        within 2 h e / (n - e), where e = (d + 1) ln((d + 1) / beta) / epsilon.

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
        (epsilon=1, delta=0)-DP
    """
    low, high = check_interval(lower, upper)
    (records, _), relation = present_records(database), NeighboringRelation(relation)
    if not isinstance(records, jax.Array) or records.ndim > 2:
        raise ValueError("database must be one array of shape (n,) or (n, d)")
    shape = records.shape[1:]
    query = _centered_sums(low, high, slots_of(database, relation), math.prod(shape))
    n, middle, half = public_count(database, relation), low / 2 + high / 2, high / 2 - low / 2

    def average(totals: jax.Array) -> jax.Array:
        weight, *sums = rounded_estimate(query, totals)
        count = jnp.maximum(weight, query.unit) / half if n is None else n
        return jnp.clip(middle + jnp.stack(sums) / count, low, high).reshape(shape)

    mechanism = mechanism_for(query, epsilon=epsilon, delta=delta, relation=relation)
    release = released(key, database, query, mechanism, what="mean", name=name)
    return post_process(release, average)


def _centered_sums(low: float, high: float, capacity: int, dims: int) -> Query:
    """The number of records, times half of the interval, and sums of distances from its middle."""
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    exponent, bits = fine_exponent(half), coarsening(capacity, bits=FINE_BITS)
    weight = math.ceil(math.ldexp(half, -exponent))

    def total(records: Any, present: jax.Array) -> jax.Array:
        numbers = clamp(records, low, high).reshape(len(present), dims)
        units = to_units(numbers - middle, exponent, (-weight, weight))
        weighed = jnp.concatenate([jnp.full((len(present), 1), weight, jnp.int32), units], axis=1)
        return coarse(sum_of_integers(jnp.where(present[:, None], weighed, 0)), bits)

    return Query(
        total=total,
        shape=(1 + dims,),
        reach=_reach_of_centered_sums(Fraction(weight, 2**bits), dims),
        unit=math.ldexp(1.0, exponent + bits),
        rounding=1.0,
    )


def _reach_of_centered_sums(
    half: Fraction, dims: int
) -> Callable[[VectorNorm, NeighboringRelation], float]:
    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        if relation is NeighboringRelation.REPLACE_ONE:  # The count stays.
            return norm_up([Fraction(math.ceil(2 * half))] * dims, norm)
        return norm_up([Fraction(math.ceil(half))] * (1 + dims), norm)

    return reach
