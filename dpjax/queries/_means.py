"""The average of numbers that are clamped to public bounds."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._types import Database, Key, Scalar
from dpjax._core._values import NeighboringRelation, Release
from dpjax._exact._limbs import Limbs
from dpjax.queries import _moment_intervals as _moment_intervals
from dpjax.queries._bounded_sums import FINE_BITS, fine_exponent
from dpjax.queries._groups import By
from dpjax.queries._integer_query import IntegerQuery, compiled, in_units_of
from dpjax.queries._integer_sums import coarse, coarsening, multiple, sum_of_integers, to_units
from dpjax.queries._private_release import Terms, released, shape_of_record
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._interval import check_interval, clamp, middle_and_half


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
) -> Release:
    """The average record, each clamped to public bounds.

    Distances from the middle of the interval are added up, with noise. Under replace-one the sum is
    divided by n, which is public. Under add-or-remove-one it is divided by a noisy count, from the
    same release.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        database: an array of shape (n,) or (n, d); under add-or-remove-one a `PaddedRecords` of
            one.
        lower: a finite number, public. NaN counts as lower.
        upper: a finite number above `lower`, public. Both are rounded inward to the dtype.
        epsilon: the epsilon of the guarantee.
        delta: for Gaussian noise; None for Laplace noise.
        relation: which databases are neighbors; None for that of an open ledger, else replace-one.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.
        by: {column: its public keys} for the statistic of every group, see `dpjax.queries.by`. The
            database is then a table of this column and the records.

    Returns:
        A `Release` of floats of shape () or (d,), in [lower, upper]; by group with a leading axis.

    Raises:
        TypeError: if a parameter is not a number, or the key not a typed key.
        ValueError: if a parameter is out of range, a database has another shape, or n is
            private and it is not a `PaddedRecords`.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. With h = (upper - lower) / 2, a record moves each of
        d sums by at most 2 h under replace-one. Under add-or-remove-one it moves each sum by at
        most h, and h times the count by h. For Laplace noise, with probability 1 - beta every
        average is within 2 h d ln(d / beta) / (epsilon n) of the truth under replace-one. Under
        add-or-remove-one it is within 2 h e / (n - e), where
        e = (d + 1) ln((d + 1) / beta) / epsilon. Rounding adds h (2^-27 c + 2^-14) / n in c slots,
        and the rounding of floats. By group, n is the size of a group. It is private under both
        relations, and counted in the same release. Then a replaced record moves two groups, so e is
        twice as large.

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
    low, high = check_interval(lower, upper)
    middle, half = middle_and_half(low, high)
    shape = shape_of_record(database, "(n,)", "(n, d)", by=by)

    def average(query: IntegerQuery, value: jax.Array, n: jax.Array | None, _: Scalar) -> jax.Array:
        totals = in_units_of(query.unit, value)
        return _average(totals, n, query.unit, (middle, half, low, high)).reshape(shape)

    return released(
        key,
        database,
        lambda capacity: _centered_sums(low, high, capacity, math.prod(shape)),
        average,
        terms=Terms(epsilon, delta, relation_or_inherited(relation), name, by),
        what="mean",
        kind="mean",
        facts={"lower": low, "upper": high},
    )


@compiled
def _average(
    totals: jax.Array, n: jax.Array | None, unit: float, interval: tuple[float, ...]
) -> jax.Array:
    """Averages from a noisy count, times half of the interval, and sums around its middle."""
    middle, half, low, high = interval
    count = jnp.maximum(totals[0], unit) / half if n is None else n
    return jnp.clip(middle + totals[1:] / count, low, high)


@functools.lru_cache(maxsize=64, typed=True)
def _centered_sums(low: float, high: float, capacity: int, dims: int) -> IntegerQuery:
    """The number of records times half of the interval, and sums of distances from its middle.

    Scaled by half of the interval, the count moves as far as a sum when a record is added.
    """
    middle, half = middle_and_half(low, high)
    exponent, bits = fine_exponent(half), coarsening(capacity, bits=FINE_BITS)
    weight = math.ceil(math.ldexp(half, -exponent))

    def total(records: Database, present: jax.Array) -> jax.Array:
        numbers = clamp(records, low, high).reshape(len(present), dims)
        units = to_units(numbers - middle, exponent, (-weight, weight))
        sums = sum_of_integers(jnp.where(present[:, None], units, 0))
        counted = multiple(jnp.sum(present, dtype=jnp.uint32)[None], weight)
        return coarse(Limbs(*map(jnp.append, counted, sums)), bits)

    def reach(norm: VectorNorm, relation: NeighboringRelation) -> float:
        half = Fraction(weight, 2**bits)
        if relation is NeighboringRelation.REPLACE_ONE:  # The count does not move.
            return norm_up([Fraction(math.ceil(2 * half))] * dims, norm)
        return norm_up([Fraction(math.ceil(half))] * (1 + dims), norm)

    return IntegerQuery(
        total=total,
        shape=(1 + dims,),
        reach=reach,
        unit=math.ldexp(1.0, exponent + bits),
        rounding=1.0,
    )
