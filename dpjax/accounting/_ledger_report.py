"""A ledger as a table."""

import dataclasses
from decimal import Decimal
from typing import TYPE_CHECKING

from dpjax._core import _checks

if TYPE_CHECKING:
    import pandas as pd

_WIDEST = 24  # Characters of a name in print.


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """What was published, when, under what, what it cost and what is left; by `Ledger.report`.

    Attributes:
        history: the payments, as `Ledger.history` has them.
        budget: of epsilon and delta.
        path: of the ledger.

    Formal guarantees:
        Those of `Ledger.history`. Costs and sums are exact decimals.
    """

    history: tuple[dict[str, object], ...]
    budget: tuple[Decimal, Decimal]
    path: str

    @property
    def rows(self) -> list[dict[str, object]]:
        """One dict for each payment, of strings, floats and exact decimals."""
        epsilon, delta = self.budget
        return [
            {
                "time": row["time"],
                "what": row["what"],
                "name": row["name"],
                "version": row["version"],
                "guarantee": row["guarantee"],
                "epsilon": row["epsilon"],
                "delta": row["delta"],
                "epsilon left": epsilon - _decimal(row["spent_epsilon"]),
                "delta left": delta - _decimal(row["spent_delta"]),
            }
            for row in self.history
        ]

    def to_frame(self) -> "pd.DataFrame":
        """The rows as a pandas DataFrame, with Decimals in the columns of costs.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
        """
        return _checks.extra("pandas", "sweep").DataFrame(self.rows)

    def __repr__(self) -> str:
        epsilon, delta = self.budget
        rows: list[tuple[str, ...]] = [
            ("time (UTC)", "what", "name", "guarantee", "epsilon", "left", "delta", "left")
        ]
        for row in self.rows:
            words = [str(row[column]) for column in ("time", "what", "name", "guarantee")]
            words[0] = words[0][:19].replace("T", " ")
            costs = (row[c] for c in ("epsilon", "epsilon left", "delta", "delta left"))
            rows.append((*map(_short, words[:3]), words[3], *map(_plain, costs)))
        keep = [
            i for i in range(8) if (i < 6 and any(r[i] for r in rows[1:])) or i in (4, 5) or delta
        ]
        widths = {i: max(len(row[i]) for row in rows) for i in keep}
        lines = ["  ".join(row[i].ljust(widths[i]) for i in keep).rstrip() for row in rows]
        left = self.rows[-1] if self.history else {"epsilon left": epsilon, "delta left": delta}
        rest = f"epsilon {_plain(left['epsilon left'])} of {_plain(epsilon)}"
        if delta:
            rest += f" and delta {_plain(left['delta left'])} of {_plain(delta)}"
        return "\n".join([f"Ledger {self.path}: left {rest}", *(lines if self.history else [])])


def _decimal(number: object) -> Decimal:
    assert isinstance(number, Decimal)
    return number


def _plain(number: object) -> str:
    """A decimal with all of its digits: in positional notation unless that is long."""
    text = format(_decimal(number), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if len(text) <= 14 else str(_decimal(number).normalize())


def _short(word: str) -> str:
    return word if len(word) <= _WIDEST else word[: _WIDEST - 3] + "..."
