"""Targets in which every sum over the records is exact, for sampled sensitivities."""

from dpjax._core._proof import RecordBounds
from dpjax._core._types import Database
from dpjax._core._values import Target
from dpjax.proving._exact_programs import with_sums
from dpjax.proving._prove_sensitivity import traced, visited


def exact_bounds(target: Target, specs: Database, public: RecordBounds) -> RecordBounds:
    """Returns the bounds together with the list of all sums over the records in a target.

    `enforced_on(target)` then computes these sums exactly.

    Raises:
        ValueError: if a sum over the records has no public bound on its terms, or stays a sum of
            floats for another reason.
    """
    walk = visited(traced(target, specs, public), specs, public)
    exact = with_sums(public, walk.sums)
    # In the exact program, terms are computed from exact sums, so they may have other ranges.
    again = visited(traced(target, specs, exact), specs, exact) if walk.sums else walk
    for reason in (*walk.inexact.values(), *again.inexact.values()):
        raise ValueError(
            "target must have public bounds on the terms of each sum over the records, but it has "
            f"none for {reason}"
        )
    return exact
