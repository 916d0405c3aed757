"""The plot of a ledger: what was spent, and the budget."""

import dpjax
from dpjax import plotting


def test_what_a_ledger_has_spent_is_drawn(tmp_path, ax):
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon="0.5")
    for epsilon in (0.1, 0.2):
        ledger.charge(dpjax.Guarantee(epsilon))
    assert plotting.ledger_history(ledger, ax=ax) is ax
    spent, budget = ax.get_lines()
    assert spent.get_ydata().tolist() == [0, 0.1, 0.3]
    assert set(budget.get_ydata()) == {0.5}
    assert ax.get_ylim()[1] > 0.5
