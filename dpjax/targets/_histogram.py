"""Histograms over public bins."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype
from dpjax.targets._bounds import VectorNorm, norm_up
from dpjax.targets._summable import Summable, summable


def histogram(*, edges: Sequence[float]) -> Summable:
    """Counts of numbers per public bin, as a target.

    Bin j holds edges[j] <= x < edges[j + 1]. Numbers out of range belong to the bin at their end,
    and NaN to the first one, so that every record counts once.

    Args:
        edges: finite increasing numbers, public, in the units of the records; at least 2.

    Returns:
        A target: takes numbers of shape (n,) to integer counts of shape (len(edges) - 1,).

    Raises:
        TypeError: if the edges are not numbers.
        ValueError: if there are fewer than 2 edges, or they do not increase; on a database, if it
            does not have shape (n,).

    Formal guarantees:
        The global sensitivity under replace-one is that of `histogram_bound`; the counts are
        integers, so they have no rounding error and ignore the order of the records exactly.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.histogram(edges=[0, 18, 65, 120])
        >>> target(jnp.array([17.9, 18.0, 40.0, 130.0])).tolist()
        [1, 2, 1]
    """
    inner = _increasing(edges)[1:-1]
    bins = len(inner) + 1

    def indicator(record: Any) -> jax.Array:
        if jnp.shape(record) != ():
            raise ValueError(f"records must be numbers, got shape {jnp.shape(record)}")
        number = record.astype(compute_dtype(record.dtype))
        # NaN is not above any edge.
        index = jnp.sum(number >= jnp.asarray(inner, number.dtype), dtype=int)
        return jax.nn.one_hot(index, bins, dtype=int)

    return summable(indicator)


def histogram_bound(*, norm: VectorNorm = "l1") -> float:
    """The global sensitivity of `histogram`: 2 in the norm l1, sqrt(2) in l2, 1 in linf.

    A record that is replaced leaves one bin and enters another. Attained with 2 bins or more.

    Args:
        norm: "l1", "l2" or "linf".

    Returns:
        The bound, rounded up; pass it to `dpjax.analytic_sensitivity` with the same norm.

    Raises:
        ValueError: if the norm is another.

    Formal guarantees:
        Holds for any records under replace-one, and in floating point as well: counts are integers.

    Source:
        Dwork, McSherry, Nissim and Smith (2006).

    Example:
        >>> from dpjax import targets
        >>> targets.histogram_bound()
        2.0
    """
    return norm_up([Fraction(1)] * 2, norm)


def _increasing(edges: Sequence[float]) -> np.ndarray:
    wanted = "edges must be at least 2 finite increasing numbers"
    try:
        array = np.asarray(edges, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {_checks.shown(edges)}") from error
    if array.ndim != 1 or array.size < 2 or not np.all(np.isfinite(array)):
        raise ValueError(f"{wanted}, got {_checks.shown(edges)}")
    if not np.all(np.diff(array) > 0):
        raise ValueError(f"{wanted}, got {_checks.shown(edges)}")
    return array
