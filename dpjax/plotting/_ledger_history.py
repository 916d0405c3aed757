"""The spending of a ledger, release by release."""

from typing import TYPE_CHECKING

from dpjax.accounting._ledger import Ledger
from dpjax.plotting._axes import BLUE, VERMILION, axes_or_new, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        Those of `ledger.spent`. The plot shows only numbers of `ledger.history()`.

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
    ax.set_xlabel("releases paid for")
    ax.set_ylabel("epsilon spent")
    legend_above(ax)
    return ax
