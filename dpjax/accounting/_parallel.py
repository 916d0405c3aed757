"""Releases on disjoint parts of a database."""

import dataclasses

from dpjax._core._values import Guarantee, NeighboringRelation
from dpjax.accounting._composition import compose, concrete


def parallel(*guarantees: Guarantee) -> Guarantee:
    """What releases on disjoint parts of one database promise together, under add-or-remove-one.

    Which part a record is in must depend on that record alone. A record that is added or removed is
    in one part; of all others the releases have the distribution that they had, and are independent
    of it. So the largest epsilon and delta hold for all of them.

    A record that is replaced may leave one part and enter another, whose sizes then change: what a
    release promises under replace-one says nothing of that. The result counts twice there:
    `group(parallel(...), 2)`.

    Args:
        *guarantees: of the releases, each on its part, under add-or-remove-one.

    Returns:
        A `Guarantee` with the largest epsilon and delta; gamma and confidence as in `compose`.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if there is none, if one is under replace-one, a batch or NaN, or if their group
            sizes differ.

    Formal guarantees:
        (max epsilon, max delta)-DP for the joint release. For groups of t, whose records may be in
        t parts, compose instead: such guarantees are refused.

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
            "guarantees must be under add-or-remove-one, for one record: one that is replaced may"
            f" leave one part and enter another; got {together.relation}, groups of"
            f" {together.group_size}"
        )
    known = [concrete(guarantee) for guarantee in guarantees]
    return dataclasses.replace(
        together,
        epsilon=max(guarantee.epsilon for guarantee in known),
        delta=max(guarantee.delta for guarantee in known),
    )
