"""Plots of results; matplotlib is imported when one is drawn."""

import collections.abc
import typing

from dpjax import _checks
from dpjax.accounting import _ledger
from dpjax.auditing import _result

__all__ = [
    "audit_curve",
    "ledger_history",
]

# From matplotlib's color cycle, so that a style of one's own applies.
_BOUND, _CLAIM = "C0", "C3"


def audit_curve(
    results: collections.abc.Iterable[_result.AuditResult], ax: typing.Any = None
) -> typing.Any:
    """Plots audited lower bounds against the number of samples, and what the mechanism claims.

    A bound above the line of the claim refutes it. Below, the bounds rise towards the truth as
    the samples grow; where they level off, no event that was tried shows more.

    Args:
        results: of `dpjax.auditing.audit_curve`, or of audits of one mechanism, all of which bound
            epsilon at one delta or delta at one epsilon.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if there is no result, or the results bound different things.

    Formal guarantees:
        Those of every result by itself, at its own confidence; none for the curve as a whole.

    Source:
        None.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> results = dpjax.auditing.audit_curve(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.randomized_response(1.0),
        ...     value=jnp.asarray([0]),
        ...     neighbor=jnp.asarray([1]),
        ...     samples=(1_000, 10_000),
        ... )
        >>> axes = dpjax.plotting.audit_curve(results)
        >>> axes.get_xlabel()
        'samples of each value'
    """
    ordered = sorted(results, key=lambda result: result.samples)
    if len({_question(result) for result in ordered}) != 1:
        raise ValueError("results must hold at least one, and bound one thing at one confidence")
    first = ordered[0]
    if ax is None:
        ax = _checks.extra("matplotlib.pyplot", "demo").figure(layout="constrained").subplots()
    samples, bounds = zip(*((result.samples, result.bound) for result in ordered), strict=True)
    label = f"audited lower bound, confidence {first.confidence:.8g}"
    ax.plot(samples, bounds, color=_BOUND, marker="o", label=label)
    if first.claimed is not None:
        ax.axhline(first.claimed, color=_CLAIM, linestyle="--", label=f"claimed, {first.claimed:g}")
    top = 1.1 * max(*bounds, first.claimed or 0.0, 1e-12)
    ax.set_ylim(-0.04 * top, top)  # A claim of 0 stays clear of the frame.
    ax.set_xscale("log")
    ax.set_xlabel("samples of each value")
    ax.set_ylabel(_axis_label(first))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


def ledger_history(ledger: _ledger.Ledger, ax: typing.Any = None) -> typing.Any:
    """Plots what releases have spent of a ledger's epsilon, release by release, and its budget.

    Args:
        ledger: a `dpjax.Ledger`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        LedgerError: if the file cannot be trusted.

    Formal guarantees:
        Those of `ledger.spent`; the plot shows nothing that `ledger.history()` does not.

    Source:
        None.

    Example:
        >>> import pathlib, tempfile
        >>> import dpjax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = dpjax.Ledger(pathlib.Path(folder) / "ledger.db", epsilon=1.0)
        ...     ledger.charge(dpjax.Guarantee(0.25))
        ...     axes = dpjax.plotting.ledger_history(ledger)
        >>> axes.get_ylabel()
        'epsilon spent'
    """
    if ax is None:
        ax = _checks.extra("matplotlib.pyplot", "demo").figure(layout="constrained").subplots()
    spent = [0.0, *(float(row["spent_epsilon"]) for row in ledger.history())]
    budget = float(ledger.budget[0])
    ax.step(range(len(spent)), spent, where="post", color=_BOUND, marker="o", label="spent")
    ax.axhline(budget, color=_CLAIM, linestyle="--", label=f"budget, {budget:g}")
    ax.set_ylim(-0.04 * budget, 1.1 * budget)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("releases paid for")
    ax.set_ylabel("epsilon spent")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


def _question(result: _result.AuditResult) -> tuple[typing.Any, ...]:
    at = result.delta if result.bounded == "epsilon" else result.epsilon
    return result.bounded, at, result.claimed, result.confidence


def _axis_label(result: _result.AuditResult) -> str:
    if result.bounded == "epsilon":
        return f"epsilon at delta = {result.delta:g}"
    return f"delta at epsilon = {result.epsilon:g}"


def __dir__() -> list[str]:
    return __all__
