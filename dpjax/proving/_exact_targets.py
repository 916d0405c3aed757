"""Targets in which every sum over the records is exact, for sampled sensitivities."""

import contextlib
from typing import Any

import jax.extend.core as jex

from dpjax._core._bounds import RecordBounds
from dpjax._core._types import Database
from dpjax._core._values import Target
from dpjax._tracing._walks import Equation, called
from dpjax.proving._exact_programs import with_sums
from dpjax.proving._prove_sensitivity import traced, visit
from dpjax.proving._value import RefusalError
from dpjax.proving._walk import Walk


def exact_bounds(target: Target, specs: Database, public: RecordBounds) -> RecordBounds:
    """Returns the bounds together with the list of all sums over the records in a target.

    `enforced_on(target)` then computes these sums exactly.

    Raises:
        ValueError: if a sum over the records has no public bound on its terms, or stays a sum of
            floats for another reason.
    """
    first, again = _Visit(), _Visit()
    visit(first, traced(target, specs, public), specs, public)
    exact = with_sums(public, first.sums)
    # In the exact program, terms are computed from exact sums, so they may have other ranges.
    visit(again, traced(target, specs, exact), specs, exact)
    for reason in (*first.inexact.values(), *again.inexact.values()):
        raise ValueError(
            "target must have public bounds on the terms of each sum over the records, but there "
            f"are none for {reason}"
        )
    if again.sums:
        raise ValueError(f"these sums over the records of target cannot be exact: {again.sums}")
    return exact


class _Visit(Walk):
    """A walk that also enters functions whose value is bounded by a lemma.

    The sums inside of such a function are visited, because they may be exact, too.
    """

    def outputs(self, jaxpr: jex.Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        found, last = super().outputs(jaxpr, equation, operands), self.steps[-1:]
        lemma = any(x.path == self.path and x.operation.startswith("lemma ") for x in last)
        if lemma and self.path not in self.sums:
            with contextlib.suppress(RefusalError):
                self.inner_outputs(called(equation), operands)
        return found
