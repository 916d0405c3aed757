"""Releases on disjoint parts of a database."""

import dataclasses

from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composition import compose, concrete


def parallel(*guarantees: Guarantee) -> Guarantee:
    """Composes releases on disjoint parts of one database, under add-or-remove-one.

    The part of a record must depend on that record alone. Adding or removing a record changes one
    part. The releases on the other parts keep their distributions, and are independent of it. So
    the largest epsilon and the largest delta hold for all releases together.

    A replaced record may leave one part and enter another, which changes the sizes of both. A
    guarantee under replace-one does not cover that. Under replace-one, use
    `group(parallel(...), 2)`.

    Args:
        *guarantees: one for the release on each part, under add-or-remove-one.

    Returns:
        A `Guarantee` with the largest epsilon and delta; gamma and confidence as in `compose`.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if no guarantee is given, or if one is under replace-one, a batch, NaN, or for
            groups of more than one.

    Formal guarantees:
        (max epsilon, max delta)-DP for the joint release. Guarantees for groups of t are refused,
        since t records may lie in t parts: compose those instead.

    Source:
        McSherry, "Privacy integrated queries" (2009), Theorem 4.

    Example:
        >>> import dpjax
        >>> from dpjax import queries
        >>> added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
        >>> counted = queries.counting_query().sensitivity(relation=added)
        >>> men, women = (dpjax.laplace(counted, e).guarantee for e in (0.5, 1.0))
        >>> dpjax.accounting.parallel(men, women).epsilon
        1.0
    """
    together = compose(*guarantees)
    if together.relation is not NeighboringRelation.ADD_OR_REMOVE_ONE or together.group_size > 1:
        raise ValueError(
            "guarantees must be under add-or-remove-one, for one record, because a replaced record"
            f" may leave one part and enter another; got {together.relation}, groups of"
            f" {together.group_size}"
        )
    known = [concrete(guarantee) for guarantee in guarantees]
    return dataclasses.replace(
        together,
        epsilon=max(guarantee.epsilon for guarantee in known),
        delta=max(guarantee.delta for guarantee in known),
    )
