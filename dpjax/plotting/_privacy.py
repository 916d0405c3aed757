"""Plots of audits, privacy profiles, gammas of records, and the payments of a ledger."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._losses import Risk
from dpjax.accounting._ledger import Ledger
from dpjax.auditing._audit import AuditResult
from dpjax.auditing._gamma_by_record import RecordGammas
from dpjax.auditing._privacy_profile import PrivacyProfile
from dpjax.plotting._axes import (
    BLUE,
    GREEN,
    SKY,
    VERMILION,
    axes_or_new,
    ink,
    legend_above,
    style,
    with_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def audit_curve(results: Iterable[AuditResult], *, ax: "Axes | None" = None) -> "Axes":
    """Plots audited lower bounds against the number of samples, and the mechanism's claim.

    A bound above the claim refutes the claim. Other bounds rise towards the true value with the
    number of samples. If the bounds level off below the claim, more samples will not raise them.
    An audit of other events may give larger bounds.

    Args:
        results: the results of `dpjax.auditing.audit_curve`, or of audits of one mechanism. All
            must bound epsilon at one delta, or delta at one epsilon.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        ValueError: if no result is given, or the results bound different quantities.

    Formal guarantees:
        Each single result has its own guarantee and confidence. The curve as a whole has none.

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
        raise ValueError(
            "results must contain at least one audit, and all audits must bound the same "
            "quantity at the same confidence"
        )
    first = ordered[0]
    ax = axes_or_new(ax)
    samples, bounds = [x.samples for x in ordered], [x.bound for x in ordered]
    label = f"audited lower bound, confidence {first.confidence:.8g}"
    ax.plot(samples, bounds, color=BLUE, marker="o", label=label)
    if (claimed := first.claimed) is not None:
        ax.axhline(claimed, color=VERMILION, linestyle="--", label=f"claimed, {claimed:g}")
    top = 1.1 * max(*bounds, claimed or 0.0, 1e-12)
    # The lower margin separates the line of a claim of 0 from the frame.
    ax.set_ylim(-0.04 * top, top)
    ax.set(xscale="log", xlabel="samples of each value", ylabel=_question(first)[0])
    return legend_above(ax)


def _question(result: AuditResult) -> tuple[str, float | None, float]:
    """Returns the quantity that an audit bounds, its claimed value, and the confidence."""
    at_delta = f"epsilon at delta = {result.delta:g}"
    bounded = at_delta if result.bounded == "epsilon" else f"delta at epsilon = {result.epsilon:g}"
    return bounded, result.claimed, result.confidence


_POINTS, _WIDEST = 201, 4


def privacy_profile(profile: PrivacyProfile, *, ax: "Axes | None" = None) -> "Axes":
    """Plots a profile's gamma and delta by epsilon, up to four times the mechanisms' epsilon.

    Args:
        profile: the result of `dpjax.privacy_profile`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.

    Formal guarantees:
        The guarantees of the profile, for both curves as a whole.

    Source:
        None.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> release = jnp.mean, dpjax.laplace(1 / 100, epsilon=1.0)
        >>> profile = dpjax.privacy_profile(
        ...     dpjax.random.seeded_key(0),
        ...     release,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=100,
        ...     m=1000,
        ... )
        >>> dpjax.plotting.privacy_profile(profile).get_xlabel()
        'epsilon'
    """
    ax = axes_or_new(ax)
    epsilons = np.linspace(0, _WIDEST * profile.epsilon, _POINTS)
    gammas = [profile.gamma(float(epsilon)) for epsilon in epsilons]
    ax.plot(epsilons, gammas, label="gamma: pairs that lose more", markevery=20, **style(0))
    deltas = profile.delta(epsilons)
    ax.plot(epsilons, deltas, label="delta: average pair", markevery=20, **style(1))
    ax.axvline(profile.epsilon, color=GREEN, linestyle=":", label="epsilon of the mechanisms")
    ax.set(yscale="log", xlabel="epsilon", ylabel=f"limit, confidence {profile.confidence:g}")
    return legend_above(ax)


def gamma_by_record(
    found: RecordGammas, feature: ArrayLike, *, unit: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Plots the gamma of each record, with its limits, against a feature of the records.

    Args:
        found: the result of `dpjax.gamma_by_record`.
        feature: a number for each record, such as a column of `found.records`.
        unit: the unit of the feature.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the feature does not contain real numbers.
        ValueError: if the feature does not contain one number for each record.

    Formal guarantees:
        The limits have the guarantee of `dpjax.gamma_by_record`, for all records at once.

    Source:
        None.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> found = dpjax.gamma_by_record(
        ...     dpjax.random.seeded_key(0),
        ...     dpjax.targets.summable(lambda x: x, average=True),
        ...     dpjax.oracles.independent(jax.random.exponential),
        ...     sensitivity=dpjax.assume_sensitivity(0.03, norm="l1"),
        ...     n=100,
        ...     records=20,
        ...     pairs=100,
        ... )
        >>> dpjax.plotting.gamma_by_record(found, found.records, unit="h").get_xlabel()
        'record [h]'
    """
    x = _checks.host_numbers("feature", feature).astype(np.float64)
    if x.shape != found.uncovered.shape:
        raise ValueError(f"feature must have shape {found.uncovered.shape}, got {x.shape}")
    ax = axes_or_new(ax)
    ax.vlines(x, found.lower, found.upper, color=SKY, label=f"limits, {found.confidence:g} for all")
    ax.plot(x, found.estimates, color=BLUE, marker="o", linestyle="none", label="uncovered pairs")
    ax.set(ylim=(-0.03, 1.03), xlabel=with_unit("record", unit), ylabel="gamma of the record")
    return legend_above(ax)


def ledger_history(ledger: Ledger, *, ax: "Axes | None" = None) -> "Axes":
    """Plots the epsilon that a ledger has spent, release by release, and its budget.

    Args:
        ledger: a `dpjax.Ledger`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        LedgerError: if the file cannot be trusted.

    Formal guarantees:
        The plot shows only numbers of `ledger.history()`; see `ledger.spent`.

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
    ax = axes_or_new(ax)
    spent = [0.0, *(float(str(row["spent_epsilon"])) for row in ledger.history())]
    budget = float(ledger.budget[0])
    ax.step(range(len(spent)), spent, where="post", color=BLUE, marker="o", label="spent")
    ax.axhline(budget, color=VERMILION, linestyle="--", label=f"budget, {budget:g}")
    ax.set_ylim(-0.04 * budget, 1.1 * budget)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel="releases paid for", ylabel="epsilon spent")
    return legend_above(ax)


def tradeoff(risks: Mapping[str, Risk], *, ax: "Axes | None" = None) -> "Axes":
    """Plots the largest true positive rate of any membership attack at each false positive rate.

    The dashed line shows random guessing, without any release. The largest vertical distance from
    this line is the advantage.

    Args:
        risks: a `dpjax.accounting.Risk` for each label, such as `mechanism.risk`.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the risks are not in a mapping.

    Formal guarantees:
        No attack has a true positive rate above a curve, as each `Risk` states.

    Source:
        Dong, Roth and Su, "Gaussian differential privacy" (2022).

    Example:
        >>> import dpjax
        >>> mechanism = dpjax.gaussian(1.0, epsilon=1.0, delta=1e-6)
        >>> by_guarantee = dpjax.accounting.risk(mechanism.guarantee)
        >>> axes = dpjax.plotting.tradeoff(
        ...     {"losses": mechanism.risk, "epsilon and delta": by_guarantee}
        ... )
        >>> axes.get_ylabel()
        'true positive rate, at most'
    """
    if not isinstance(risks, Mapping) or not all(isinstance(x, Risk) for x in risks.values()):
        raise TypeError(f"risks must be a mapping from labels to Risk, got {_checks.shown(risks)}")
    ax = axes_or_new(ax)
    rates = np.linspace(0, 1, 400)
    for index, (label, risk) in enumerate(risks.items()):
        ax.plot(rates, 1 - risk.tradeoff(rates), label=label, **style(index))
    ax.plot(rates, rates, color=ink(), linestyle="--", label="without a release")
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    ax.set(xlabel="false positive rate", ylabel="true positive rate, at most")
    return legend_above(ax)
