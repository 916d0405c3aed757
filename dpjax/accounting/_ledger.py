"""`Ledger`: a privacy budget for one database, stored in a file, with a history of releases."""

import csv
import dataclasses
import io
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._guarantee import per_unit
from dpjax._core._labels import html_of
from dpjax._core._open_ledgers import Account, Payment, Request, fingerprint_of_key, refuse_traced
from dpjax._core._release import guarantee_from_json, guarantee_to_json
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax._files._durable import database_file
from dpjax._files._ledger_file import (
    DELTA_DIGITS,
    EPSILON_DIGITS,
    BudgetExceededError,
    LedgerError,
    LedgerFile,
    decimals,
)
from dpjax.accounting._composition import compose, under
from dpjax.accounting._parallel import Parts
from dpjax.accounting._prices import Amount, as_decimals, as_float, cost_of, units
from dpjax.accounting._share import Pool, Share
from dpjax.random._keys import check_key

if TYPE_CHECKING:
    import pandas as pd


_WIDEST = 40  # Names are cut to this number of characters when a report is printed.

# In a stored name, the text after this separator is a fingerprint of the request. Reports do not
# print it.
FINGERPRINT = " #"
_COLUMNS = ("time", "what", "name", "version", "guarantee", "epsilon", "delta")


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """A table of all releases with times and costs, and the remaining budget.

    Made by `Ledger.report`.

    Attributes:
        history: the payments, as `Ledger.history` returns them.
        budget: the budget of epsilon and delta.
        path: the path of the ledger.

    Formal guarantees:
        As for `Ledger.history`. Costs and sums are exact decimals.
    """

    history: tuple[dict[str, object], ...]
    budget: tuple[Decimal, Decimal]
    path: str

    @property
    def rows(self) -> list[dict[str, object]]:
        """Returns one dict for each payment. Its values are strings, floats and exact decimals."""
        epsilon, delta = self.budget
        rows: list[dict[str, object]] = []
        for payment in self.history:
            row = {column: payment[column] for column in _COLUMNS}
            row["epsilon left"] = epsilon - _decimal(payment["spent_epsilon"])
            row["delta left"] = delta - _decimal(payment["spent_delta"])
            rows.append(row)
        return rows

    def to_frame(self) -> "pd.DataFrame":
        """The rows as a pandas DataFrame, with Decimals in the columns of costs.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
        """
        return _checks.extra("pandas", "sweep").DataFrame(self.rows)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as comma-separated values with a header; optionally writes them to a file.

        Args:
            path: the path of a file to write; None for no file.

        Returns:
            The comma-separated values as a string.
        """
        text = io.StringIO(newline="")
        titles = [*_COLUMNS, "epsilon left", "delta left"]
        writer = csv.DictWriter(text, titles, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def _repr_html_(self) -> str:
        """Returns the HTML table that notebooks show."""
        titles, *rows = self._words()
        return html_of(titles, rows, self._title())

    def __repr__(self) -> str:
        rows = self._words()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._title(), *(lines if self.history else [])])

    def _words(self) -> list[list[str]]:
        """Returns the column titles and the rows as strings, without empty columns."""
        _, delta = self.budget
        rows: list[tuple[str, ...]] = [
            ("time (UTC)", "what", "name", "guarantee", "epsilon", "left", "delta", "left")
        ]
        for row in self.rows:
            words = [str(row[column]) for column in ("time", "what", "name", "guarantee")]
            words[0] = words[0][:19].replace("T", " ")
            words[2] = words[2].partition(FINGERPRINT)[0]
            costs = (row[c] for c in ("epsilon", "epsilon left", "delta", "delta left"))
            rows.append((*map(_short, words[:3]), words[3], *map(_plain, costs)))
        keep = [
            i for i in range(8) if (i < 6 and any(r[i] for r in rows[1:])) or i in (4, 5) or delta
        ]
        return [[row[i] for i in keep] for row in rows]

    def _title(self) -> str:
        epsilon, delta = self.budget
        left = self.rows[-1] if self.history else {"epsilon left": epsilon, "delta left": delta}
        rest = f"epsilon {_plain(left['epsilon left'])} of {_plain(epsilon)}"
        if delta:
            rest += f" and delta {_plain(left['delta left'])} of {_plain(delta)}"
        return f"Ledger {self.path}: left {rest}"


def _decimal(number: object) -> Decimal:
    assert isinstance(number, Decimal)
    return number


def _plain(number: object) -> str:
    """Formats a decimal with all digits; in scientific notation if they exceed 14 characters."""
    text = format(_decimal(number), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if len(text) <= 14 else str(_decimal(number).normalize())


def _short(word: str) -> str:
    return word if len(word) <= _WIDEST else word[: _WIDEST - 3] + "..."


class Ledger(Account):
    """The privacy budget of one database, which pays for every release before its noise is drawn.

    `dpjax.privatize(target, mechanism, ledger=ledger)` makes a private function whose releases the
    ledger pays for. In a block `with ledger:`, the ledger pays for every release, also for releases
    that a mechanism makes without `privatize`. Every call draws a new release and pays for it. Only
    a release with a name is stored: `private(key, database, name="age")` returns the earlier
    release of the same request under this name, free of charge. A key that was used before is
    refused.

    Attributes:
        path: the path of the file.
        version: a public name for the state of the database.

    Formal guarantees:
        All releases together have the guarantee `ledger.spent`, under the relation of the ledger.
        Its epsilon and delta never exceed the budget. In a replace-one ledger, a release under
        add-or-remove-one costs its guarantee converted to replace-one, see
        `dpjax.accounting.compose`. An add-or-remove-one ledger refuses releases under replace-one.
        Costs are added up by basic composition, so later releases may depend on earlier ones. gamma
        and the confidence have no budget. They add up only for releases that were chosen in
        advance, see `dpjax.accounting.compose`. Each epsilon and delta counts as the decimal that
        Python prints for it, rounded up to a multiple of 10^-12 for epsilon and of 10^-24 for
        delta. The float64 itself may be larger by a relative 2^-53, which the noise covers. Sums
        are exact.

        The ledger writes a debit to the disk before noise is drawn, for any number of processes. If
        a process is killed or a release fails, the budget may have been spent without a release. A
        ledger file is refused if it is corrupted, truncated, not a ledger, read-only, or has
        several names (hard links). A second file, with `.mark` after the same name, stores how much
        was spent. If the ledger file is older than its mark, or has no mark, it is refused, too.
        But a ledger cannot notice if both files were restored, copied or removed together. So
        exclude both files from snapshots and backups that are restored as a whole. Keep both files
        on a disk of the machine, because SQLite's write-ahead log does not work on network file
        systems. Only people whom you trust should have permission to write both files, because
        nothing is signed.

        Whether a release is refused depends only on the ledger, the guarantee and the key. An
        earlier release is returned only for an equal name, version, target, mechanism and structure
        of the records. The ledger never looks at the records, because the fact that they changed
        may be private. So give different names to different columns or groups. After the records
        change, open the ledger with another `version`; otherwise it returns the old release. Names
        are public: do not choose names by looking at records, not even at which groups exist.

        While a `with` block is open, it covers all threads of the process. This is also true of
        `dpjax.random.KeyLedger`. If two budgets are open, a release in a thread that has opened
        neither is refused. Say which budget pays, by `with` in the thread or by `ledger=`. A forked
        process inherits the blocks that are open in its parent. `with` does not cover programs that
        were compiled ahead of time (`jit(f).lower(...).compile()`), other processes, and
        `mechanism.unpaid_draw`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        epsilon: float | str | Decimal,
        delta: float | str | Decimal = 0,
        version: str = "",
        relation: NeighboringRelation | None = None,
    ) -> None:
        """Opens a ledger, or creates a new one.

        Args:
            path: the path of an SQLite file, one for each private database. A budget must outlive
                the program, so ":memory:", "" and URIs are refused.
            epsilon: the epsilon of the budget, which never changes; above 0. A float counts as the
                decimal that Python prints for it.
            delta: the delta of the budget, which never changes; at least 0 and below 1.
            version: a public name for the state of the database. All versions share the budget.
            relation: which databases are neighbors, for the whole budget. Mechanisms that are made
                inside of `with ledger:` use it by default. None takes the relation of the file. A
                new file is under replace-one, or under the relation of a `dpjax.PrivateTable` that
                uses it. After the first release, the relation cannot change.

        Raises:
            TypeError: if a parameter has another type.
            ValueError: if the path is not the path of a file, the budget is out of range, or the
                budget or relation differs from the budget or relation in the file.
            LedgerError: if the file cannot be trusted, or cannot be written.
        """
        _check_text("version", version)
        budget = (
            units("epsilon", epsilon, EPSILON_DIGITS, math.floor),
            units("delta", delta, DELTA_DIGITS, math.floor),
        )
        if budget[0] <= 0:
            raise ValueError(f"epsilon must be at least 10^-{EPSILON_DIGITS}, got {epsilon}")
        if not 0 <= budget[1] < 10**DELTA_DIGITS:
            raise ValueError(f"delta must be at least 0 and below 1, got {delta}")
        self.version = version
        file = database_file(path, instead="accounting.PrivacyFilter keeps a budget in memory")
        asked = None if relation is None else str(NeighboringRelation(relation))
        self._file = LedgerFile(file, budget, relation=asked, made_under=asked)
        # The relation that applies until the first debit, if the file does not state a relation.
        self._undecided = NeighboringRelation(relation or NeighboringRelation.REPLACE_ONE)
        self._records: dict[str, object] = {}
        self.path = self._file.path

    @property
    def relation(self) -> NeighboringRelation:
        """Which databases are neighbors, for the whole budget."""
        stored = self._stored_relation()
        return self._undecided if stored is None else stored

    def _stored_relation(self) -> NeighboringRelation | None:
        """Returns the relation that the file states; None before the first debit of a new file."""
        if self._file.chain.relation is None:
            self._file.update()
        stored = self._file.chain.relation
        return None if stored is None else NeighboringRelation(stored)

    def _pays_under(self, relation: NeighboringRelation) -> None:
        """Sets the relation of a ledger without payments. Refuses to change it after a payment.

        Args:
            relation: the relation of the releases for which this ledger will pay.

        Raises:
            ValueError: if the ledger is under another relation.
        """
        stored = self._stored_relation()
        if stored is None:
            self._undecided = relation
        elif stored is not relation:
            raise ValueError(
                f"relation must be {stored}, the relation of the ledger {self.path.name}, got "
                f"{relation}. The relation of this ledger cannot change. Pass "
                f"relation=dpjax.NeighboringRelation.{stored.name}, or use another ledger"
            )

    def _knows_records(self, name: str, records: object) -> None:
        """Remembers, in this process, the object that a name stands for. Refuses another object.

        Args:
            name: the name of the records.
            records: an object that represents the records. It is compared by identity, and its
                contents are not read.

        Raises:
            ValueError: if the name already stands for another object.
        """
        if self._records.setdefault(name, records) is not records:
            raise ValueError(
                f"name={name!r} is already the name of another table in this ledger, and releases"
                " of that table would be returned for this one: give each table its own name, as in"
                ' PrivateTable(frame, name="patients", ...)'
            )

    @property
    def budget(self) -> tuple[Decimal, Decimal]:
        """The budget of epsilon and delta."""
        return as_decimals(*self._file.chain.budget)

    @property
    def remaining(self) -> tuple[Decimal, Decimal]:
        """The epsilon and delta that are left."""
        return as_decimals(*self._left())

    def _left(self) -> Amount:
        self._file.update()
        (epsilon, delta), spent = self._file.chain.budget, self._file.chain.spent
        return epsilon - spent[0], delta - spent[1]

    @property
    def spent(self) -> Guarantee:
        """The guarantee of all releases together, as by `dpjax.accounting.compose`."""
        self._file.update()
        guarantees = [_decoded(entry.body["guarantee"]) for entry in self._file.chain.debits()]
        together = compose(*guarantees) if guarantees else Guarantee(0.0, relation=self.relation)
        epsilon, delta = map(as_float, self._file.chain.spent, (EPSILON_DIGITS, DELTA_DIGITS))
        return dataclasses.replace(together, epsilon=epsilon, delta=min(1.0, delta))

    def history(self) -> list[dict[str, object]]:
        """All payments in order, as dicts; `pandas.DataFrame(ledger.history())` makes a table.

        Returns:
            A dict for each payment, with the keys time (UTC), what (the name of the target or
            mechanism), version, epsilon and delta (the cost), spent_epsilon and spent_delta (the
            sums so far), guarantee (as printed), gamma, confidence, notes, name ("" for a release
            without a name), key and request (fingerprints), and kept (whether the ledger stores the
            release). The dicts reveal nothing private, as long as your names of records and
            functions are public.
        """
        self._file.update()
        rows: list[dict[str, object]] = []
        spent = (0, 0)
        for _, _, body in self._file.chain.debits():
            cost = int(body["epsilon"]), int(body["delta"])
            spent = spent[0] + cost[0], spent[1] + cost[1]
            guarantee = _decoded(body["guarantee"])
            (epsilon, delta), (all_epsilon, all_delta) = as_decimals(*cost), as_decimals(*spent)
            rows.append(
                {
                    "time": body["time"],
                    "what": body["what"],
                    "name": body.get("name", ""),
                    "version": body["version"],
                    "epsilon": epsilon,
                    "delta": delta,
                    "spent_epsilon": all_epsilon,
                    "spent_delta": all_delta,
                    "guarantee": repr(guarantee),
                    "gamma": guarantee.gamma,
                    "confidence": guarantee.confidence,
                    "notes": ", ".join(guarantee.notes),
                    "key": body["key"],
                    "request": body["request"],
                    "kept": body["request"] in self._file.chain.releases,
                }
            )
        return rows

    def charge(self, guarantee: Guarantee, *, key: jax.Array | None = None, what: str = "") -> None:
        """Pays for a release that dpjax does not draw.

        Every call pays, because the ledger does not store the release.

        Args:
            guarantee: the guarantee of the release.
            key: a typed key that the release uses. No other release may use this key.
            what: a public description of the release, for the history.

        Raises:
            TypeError: if the guarantee or the key is traced, or of another type.
            ValueError: if the guarantee is a batch or NaN, if its group size or privacy unit
                differs from the ledger's, if it is under replace-one but the ledger is not, or if
                the key was used before.
            BudgetExceededError: if too little of the budget is left.
            LedgerError: if the file cannot be trusted, or cannot be written.
        """
        _check_text("what", what)
        if key is not None:
            check_key(key)
            refuse_traced(key)
        self.record(Payment(key, guarantee, what))

    def parallel(self, column: str) -> Parts:
        """A `with` block for releases on disjoint parts of the records.

        The block costs as much as its most expensive part:

            with ledger.parallel("cut") as part:
                slots = queries.padded_records(table, capacity=100_000)
                for cut, records in queries.split_by(slots, column="cut", keys=CUTS).items():
                    with part(cut):
                        queries.private_mean(dpjax.random.secure_key(), records, ...)

        Args:
            column: a public name for the division into parts, such as the name of a column. The
                ledger stores each release under this name, the name of the part and the name of the
                release.

        Returns:
            A `Parts`, whose docstring states the guarantee. Releases inside of the block are under
            add-or-remove-one. If the ledger is under replace-one, the block costs twice as much.

        Raises:
            TypeError: if the name is not a string.
        """
        _check_text("column", column)
        return Parts(self, column, self.record)

    def share(self, fraction: float | str | Decimal) -> Share:
        """A fraction of the whole budget, for releases that are composed tightly.

        `with ledger.share(0.25):` pays for the releases inside of the block. The ledger debits the
        whole share before the first noise is drawn, and nothing if nothing is released. If the
        budget has no delta, each release pays its own epsilon instead, and the rest of the share
        remains in the ledger.

        Args:
            fraction: the fraction of the budget, above 0 and at most 1. A float counts as the
                decimal that Python prints for it.

        Returns:
            A `Share`. One Gaussian release at `share.epsilon` and `share.delta` uses the whole
            share. k releases use the whole share if each has sqrt(k) times as much noise.

        Raises:
            TypeError: if the fraction is not a number.
            ValueError: if the fraction is out of range.
        """
        part = Fraction(units("fraction", fraction, EPSILON_DIGITS, math.floor), 10**EPSILON_DIGITS)
        if not 0 < part <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
        return self._shares(self._file.chain.budget, part, 1)[0]

    def split(self, parts: int) -> list[Share]:
        """Splits the remaining budget into equal shares, which are composed tightly.

        If the budget has a delta, the shares divide mu^2, where mu is the sensitivity of a Gaussian
        release over the standard deviation of its noise. So each of 4 shares has half of the mu of
        the whole, not a quarter. The first release in any share debits all shares. If the budget
        has no delta, each share has its part of epsilon, and each release pays its own epsilon.

        Args:
            parts: the number of shares, at least 1.

        Returns:
            A list of `Share`s.

        Raises:
            TypeError: if `parts` is not an integer.
            ValueError: if `parts` is below 1.
            BudgetExceededError: if too little of the budget is left.
        """
        count = _checks.integer("parts", parts, least=1)
        return self._shares(self._left(), Fraction(1), count)

    def _shares(self, units: Amount, part: Fraction, count: int) -> list[Share]:
        epsilon, delta = (math.floor(part * unit) for unit in units)
        # If the budget has a delta, the share is converted to the mu of Gaussian noise. For an
        # epsilon below `least`, float64 is too inaccurate for this conversion.
        least = 10 ** (EPSILON_DIGITS - 6) if self._file.chain.budget[1] else 1
        if epsilon < least or (delta == 0 and self._file.chain.budget[1] > 0):
            raise BudgetExceededError(
                f"the share is too small: {decimals((epsilon, delta))} of the budget "
                f"{decimals(self._file.chain.budget)}"
            )
        pool = Pool(self.record, (epsilon, delta), self.relation)
        return [Share(self, pool, count) for _ in range(count)]

    def report(self) -> LedgerReport:
        """A table of all releases with times and costs, and the remaining budget.

        Returns:
            A `LedgerReport`. It prints as a table, and `to_frame()` makes a pandas DataFrame.
        """
        return LedgerReport(tuple(self.history()), self.budget, str(self.path))

    def record(self, release: Payment, price: Amount | None = None) -> None:
        """Pays for a release that is about to be drawn: `price`, or the cost of its guarantee."""
        # If a user set gamma by hand, the guarantee does not say from which sampling gamma comes.
        # `compose` then adds a sampling with a random identity, and the file stores this identity.
        promised, request = under(compose(release.guarantee), self.relation), release.request
        cost = cost_of(promised)
        neighbors = f"{promised.relation}, groups of {promised.group_size}"
        self._file.debit(
            cost if price is None else price,
            neighbors=neighbors + per_unit(promised.privacy_unit),
            key=None if release.key is None else fingerprint_of_key(release.key),
            guarantee=guarantee_to_json(promised),
            what=release.what,
            version=self.version,
            name=request.name if request else "",
            request=self._stored_as(request) if request else None,
        )

    def released(self, request: Request) -> Release | None:
        """The release that is stored for a request; None if there is none."""
        found = self._file.stored(self._stored_as(request))
        if found is None:
            return None
        body, payload = found
        arrays: list[jax.Array] = []
        start = 0
        for dtype, shape in body["arrays"]:
            flat = np.frombuffer(payload, jnp.dtype(dtype), math.prod(shape), start)
            arrays.append(jax.device_put(flat.reshape(shape)))  # `device_put` needs no compilation.
            start += flat.nbytes
        value = jax.tree.unflatten(request.outputs.structure, arrays)
        return Release(value, _decoded(body["guarantee"]))

    def keep(self, request: Request, release: Release) -> Release:
        """Stores a release unless the request already has one. Returns the stored release."""
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(release.value)]
        self._file.store(
            self._stored_as(request),
            b"".join(array.tobytes() for array in arrays),
            arrays=[(array.dtype.name, array.shape) for array in arrays],
            guarantee=guarantee_to_json(release.guarantee),
        )
        return self.released(request) or release

    def _stored_as(self, request: Request) -> str:
        return f"{request.fingerprint}/{self.version}"

    def __repr__(self) -> str:
        self._file.update()
        spent, budget = decimals(self._file.chain.spent), decimals(self._file.chain.budget)
        return f"Ledger({str(self.path)!r}: spent {spent}, of {budget})"


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {_checks.shown(value)}")


def _decoded(stored: dict[str, Any]) -> Guarantee:
    try:
        return guarantee_from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"an entry of the ledger contains no guarantee: {error}") from error
