"""Plots of guarantees and of attacks: what was spent, claimed, audited, and what attacks found."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._losses import Risk
from dpjax._core._values import Guarantee
from dpjax.accounting._ledger import Ledger
from dpjax.attacks._linear_queries import expected_recovered_fraction
from dpjax.attacks._roc_curve import RocCurve, guessing_bound, highest_true_positive_rate
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


_RATES = 400


def roc_curve(
    curves: Mapping[str, RocCurve], guarantee: Guarantee | None = None, *, ax: "Axes | None" = None
) -> "Axes":
    """Plots true against false positive rates on logarithmic axes, and the limit of a guarantee.

    The left end shows how many members are found without false alarms. A curve contradicts the
    guarantee if its band is above the line of the guarantee at any point.

    Args:
        curves: a curve for each label, from `dpjax.attacks.roc_curve`. If a curve has confidence
            limits, a band is drawn between them.
        guarantee: the guarantee of the attacked releases, under replace-one.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: as `dpjax.attacks.highest_true_positive_rate`.
        ValueError: if no curve is given, or as `dpjax.attacks.highest_true_positive_rate`.

    Formal guarantees:
        All limits of one curve are correct together, with its confidence. This confidence does not
        cover several curves together.

    Source:
        Carlini, Chien, Nasr, Song, Terzis and Tramèr (2022), for logarithmic axes.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> random = np.random.default_rng(0)
        >>> members = random.random(10_000) < 0.5
        >>> curve = dpjax.attacks.roc_curve(random.laplace(size=10_000) + members, members)
        >>> axes = dpjax.plotting.roc_curve({"Laplace noise": curve}, dpjax.Guarantee(1.0))
        >>> axes.get_xscale()
        'log'
    """
    if not curves:
        raise ValueError("curves must contain at least one curve, got none")
    least = min(1 / len(curve.non_members) for curve in curves.values())
    rates = np.geomspace(least, 1.0, _RATES)
    bound = None if guarantee is None else highest_true_positive_rate(guarantee, rates)
    ax = axes_or_new(ax)
    for index, (label, curve) in enumerate(curves.items()):
        look = style(index)
        false_positives, true_positives = curve.points()
        # Among thresholds with the same false positive rate, the last one has the largest true
        # positive rate.
        highest = true_positives[np.searchsorted(false_positives, rates, "right") - 1]
        ax.plot(rates, highest, label=label, markevery=_RATES // 8, markersize=4, **look)
        if curve.confidence is not None:
            lower, upper = curve.limits(rates)
            ax.fill_between(rates, lower, upper, color=look["color"], alpha=0.2, linewidth=0)
    if bound is not None:
        ax.plot(rates, bound, color=ink(), linestyle=(0, (8, 3)), label=f"allowed by {guarantee}")
    ax.plot(rates, rates, color=ink(), linestyle=":", label="guessing")
    ax.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    return legend_above(ax, columns=1)


def recovered_fraction(
    c: ArrayLike,
    recovered: Mapping[str, ArrayLike],
    *,
    guarantee: Guarantee | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Plots the fraction of bits that attacks recover from answers with noise up to c sqrt(n).

    The curve shows the fraction to expect from an attack by least squares on many Walsh-Hadamard
    queries. For small c it is nearly 1. For large c it is nearly 1/2, as for guessing.

    Args:
        c: numbers above 0.
        recovered: maps the name of an attack to its fraction at each c.
        guarantee: if given, a line shows the largest fraction that it allows any attack.
        ax: the axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the fractions are not in a mapping, or not numbers.
        ValueError: if a name does not have one fraction for each c, or a c is not above 0.

    Formal guarantees:
        The line is the `dpjax.attacks.guessing_bound` of the guarantee. The curves have no
        guarantee: other attacks may be better.

    Source:
        Dinur and Nissim (2003); Dwork and Yekhanin (2008).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> c = jnp.geomspace(0.1, 10, 20)
        >>> found = dpjax.attacks.recovered_fraction(jax.random.key(0), c, n=1024)
        >>> axes = dpjax.plotting.recovered_fraction(c, {"n = 1024": found})
        >>> axes.get_ylabel()
        'recovered fraction'
    """
    if not isinstance(recovered, Mapping):
        raise TypeError(
            f"recovered must be a mapping from names to fractions, got {_checks.shown(recovered)}"
        )
    sizes = np.asarray(c, float)
    curves = {name: np.asarray(fractions, float) for name, fractions in recovered.items()}
    if sizes.ndim != 1 or not sizes.size or not np.all(sizes > 0):
        raise ValueError(f"c must be numbers above 0, got {_checks.shown(c)}")
    if any(fractions.shape != sizes.shape for fractions in curves.values()):
        raise ValueError(
            f"recovered must contain {sizes.size} fractions for each name, one for each entry of c"
        )
    order = np.argsort(sizes)
    ax = axes_or_new(ax)
    smooth = np.geomspace(np.min(sizes), np.max(sizes), 200)
    expected = expected_recovered_fraction(smooth)
    ax.plot(smooth, expected, color=ink(), label="expected for Walsh-Hadamard queries")
    for index, (name, fractions) in enumerate(curves.items()):
        ax.plot(sizes[order], fractions[order], label=name, **style(index))
    if guarantee is not None:
        label = f"most under ({float(guarantee.epsilon):g}, {float(guarantee.delta):g})-DP"
        ax.axhline(guessing_bound(guarantee), color=ink(), linestyle=(0, (1, 3)), label=label)
    lowest = min((np.min(fractions) for fractions in curves.values()), default=0.5)
    ax.set(xscale="log", ylim=(min(0.5, float(lowest)) - 0.03, 1.03))
    ax.set(xlabel="c, for noise of at most c sqrt(n)", ylabel="recovered fraction")
    return legend_above(ax)


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
    # If the claimed value is 0, the lower margin keeps its line apart from the frame.
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
        The guarantees of the profile. They hold for all points of both curves at once.

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
