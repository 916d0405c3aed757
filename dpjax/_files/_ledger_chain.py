"""The entries of a ledger: a chain of hashes, and sums of the entries' costs.

Each entry holds the hash of all entries before it. The first entry holds the budget. Amounts are
integers, so sums are exact. Nothing here reads or writes a file.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dpjax._files._durable import Json

EPSILON_DIGITS, DELTA_DIGITS = 12, 24  # Budgets are in units of 10^-12 and 10^-24.
FORMATS = 1, 2  # Ledgers of the first format do not state which databases are neighbors.


class LedgerError(RuntimeError):
    """A ledger cannot be trusted or cannot be written. Nothing is released.

    Attributes:
        args: a message with the file and the problem.

    Formal guarantees:
        Raised before noise is drawn, or before the drawn value is returned. Whether it is raised
        depends only on the ledger's files, never on private data.
    """


class BudgetExceededError(RuntimeError):
    """A release would cost more than the rest of the budget.

    Attributes:
        args: a message with the cost and the remaining budget.

    Formal guarantees:
        Nothing was debited and no noise was drawn. Whether it is raised depends only on the ledger
        and the guarantee, never on private data.
    """


class Entry(NamedTuple):
    """One link of the chain, verified."""

    number: int
    digest: str
    body: Json


class Chain:
    """The entries that this process has verified, and what follows from them.

    Attributes:
        path: the path of the ledger, for messages.
        budget: the budget of epsilon and delta, in units.
        spent: sums over the entries, in units.
        entries: the entries in order. The first one holds the budget.
        releases: maps the name of a request to the number of the entry that holds its release.
        relation: which databases are neighbors, from the first entry, or else from the first debit.
    """

    def __init__(self, path: Path, budget: tuple[int, int], relation: str | None = None) -> None:
        """A chain without entries. If a relation is given, the file must have the same one."""
        self.path = path
        self.budget = budget
        self.relation: str | None = None
        self._asked = relation
        self.spent = (0, 0)
        self.entries: list[Entry] = []
        self.releases: dict[str, int] = {}
        self._keys: set[str] = set()
        self._neighbors: str | None = None

    @property
    def last_digest(self) -> str:
        """The hash of all entries, empty before the first one."""
        return self.entries[-1].digest if self.entries else ""

    def debits(self) -> list[Entry]:
        """The entries that cost something, in order."""
        return [entry for entry in self.entries if "neighbors" in entry.body]

    def refuse(self, cost: tuple[int, int], neighbors: str, key: str | None) -> None:
        """Raises if these entries forbid a debit.

        All debits must be for the same neighboring relation. `key` is a fingerprint, and no two
        debits may share one.
        """
        if min(cost) < 0:
            raise ValueError(f"cost must not be negative, got {cost}")
        if key in self._keys:
            raise ValueError(
                f"key {str(key)[:12]} was already used for a release: the noise would be the same;"
                " use a fresh key, by jax.random.split or dpjax.random.secure_key()"
            )
        if neighbors != (self._neighbors or neighbors):
            raise ValueError(
                f"guarantee is for databases that differ by {_shown(neighbors)}, but the ledger's"
                f" guarantees are for {_shown(str(self._neighbors))}: they do not add up"
            )
        left = [budget - spent for budget, spent in zip(self.budget, self.spent, strict=True)]
        if any(price > rest for price, rest in zip(cost, left, strict=True)):
            raise BudgetExceededError(
                f"this costs {decimals(cost)}, but {self.path.name} has {decimals(tuple(left))}"
                f" left of its budget of {decimals(self.budget)}"
            )

    def link(self, body: Json) -> tuple[int, str, str]:
        """Number, text and hash of the entry that would come next."""
        text = json.dumps(body, sort_keys=True)
        return len(self.entries), text, _link(self.last_digest, text)

    def extend(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """Verifies the number, text and hash of every new entry, and adds them."""
        for number, text, digest in rows:
            if number != len(self.entries) or _link(self.last_digest, str(text)) != digest:
                raise self.corrupted(f"entry {len(self.entries)}")
            self._add(Entry(number, digest, json.loads(text)))

    def corrupted(self, part: str) -> LedgerError:
        """The error for a part of the file that was changed."""
        return LedgerError(f"{self.path} is corrupted: {part} was changed after it was written")

    def _add(self, entry: Entry) -> None:
        body = entry.body
        if entry.number == 0:
            budget = (int(body["epsilon"]), int(body["delta"]))
            if body["format"] not in FORMATS or budget != self.budget:
                raise ValueError(
                    f"budget must be the one that {self.path.name} was made with, which never"
                    f" changes: {decimals(budget)}, got {decimals(self.budget)}"
                )
            self._be_under(body.get("relation"))
        elif "release" in body:
            self.releases.setdefault(body["release"], entry.number)
        else:
            epsilon, delta = self.spent
            self.spent = (epsilon + int(body["epsilon"]), delta + int(body["delta"]))
            self._keys.update(filter(None, [body["key"]]))
            self._neighbors = body["neighbors"]
            if self.relation is None:
                self._be_under(body["neighbors"].partition(",")[0])
        self.entries.append(entry)

    def _be_under(self, relation: str | None) -> None:
        if relation is not None and self._asked not in (None, relation):
            raise ValueError(
                f"relation must be the one that {self.path.name} was made with, which never"
                f" changes: {relation}, got {self._asked}"
            )
        self.relation = relation


def _shown(neighbors: str) -> str:
    """Neighbors in words. Debits of records do not name their unit of privacy."""
    return neighbors if ", per " in neighbors else f"{neighbors}, per record"


def decimals(amount: tuple[int, ...]) -> str:
    """The exact text of an amount of budget, for messages."""
    epsilon, delta = map(decimal, amount, (EPSILON_DIGITS, DELTA_DIGITS))
    return f"epsilon {epsilon}" + (f" and delta {delta}" if amount[1] else "")


def decimal(units: int, digits: int) -> str:
    """The exact decimal text of a multiple of 10^-digits."""
    text = f"{units:0{digits + 1}d}"
    fraction = text[-digits:].rstrip("0")
    return text[:-digits] + ("." + fraction if fraction else "")


def sha256(data: bytes) -> str:
    """A hash in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _link(last: str, text: str) -> str:
    return sha256(f"{last}\n{text}".encode())
