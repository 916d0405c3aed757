"""Audited lower bounds against the number of samples."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dpjax.auditing._result import AuditResult
from dpjax.plotting._axes import BLUE, VERMILION, axes_or_new, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def audit_curve(results: Iterable[AuditResult], *, ax: "Axes | None" = None) -> "Axes":
    """Plots audited lower bounds against the number of samples, and the mechanism's claim.

    A bound above the claim refutes it. Other bounds rise towards the truth with the number of
    samples. If they level off, the tried events show no more.

    Args:
        results: of `dpjax.auditing.audit_curve`, or of audits of one mechanism. All must bound
            epsilon at one delta, or delta at one epsilon.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no result is given, or the results bound different quantities.

    Formal guarantees:
        Those of every single result, at its own confidence. The curve as a whole has none.

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
        raise ValueError("results must hold at least one, all for one bound at one confidence")
    first = ordered[0]
    ax = axes_or_new(ax)
    samples, bounds = zip(*((result.samples, result.bound) for result in ordered), strict=True)
    label = f"audited lower bound, confidence {first.confidence:.8g}"
    ax.plot(samples, bounds, color=BLUE, marker="o", label=label)
    if first.claimed is not None:
        ax.axhline(
            first.claimed, color=VERMILION, linestyle="--", label=f"claimed, {first.claimed:g}"
        )
    top = 1.1 * max(*bounds, first.claimed or 0.0, 1e-12)
    ax.set_ylim(-0.04 * top, top)  # A claim of 0 stays clear of the frame.
    ax.set_xscale("log")
    ax.set_xlabel("samples of each value")
    ax.set_ylabel(_axis_label(first))
    legend_above(ax)
    return ax


def _question(result: AuditResult) -> tuple[str, float, float | None, float]:
    at = result.delta if result.bounded == "epsilon" else result.epsilon
    return result.bounded, at, result.claimed, result.confidence


def _axis_label(result: AuditResult) -> str:
    if result.bounded == "epsilon":
        return f"epsilon at delta = {result.delta:g}"
    return f"delta at epsilon = {result.epsilon:g}"
