"""Parallel composition: releases on disjoint parts of a database cost the maximum."""

import dataclasses
import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn, Self

from dpjax._core import _checks
from dpjax._core._guarantee import RECORD
from dpjax._core._open_ledgers import Account, Payment, Request, paying_for_the_rest
from dpjax._core._values import Guarantee, NeighboringRelation, Release
from dpjax._exact._numerics import round_up
from dpjax._files._ledger_file import DELTA_DIGITS, EPSILON_DIGITS
from dpjax.accounting._composition import compose, concrete, delta_of_steps
from dpjax.accounting._prices import Amount, cost_of


def parallel(*guarantees: Guarantee) -> Guarantee:
    """Composes releases on disjoint parts of one database, under add-or-remove-one.

    The part of a record must depend on this record alone. Then adding or removing a record changes
    only one part, and the distributions of releases on other parts do not change. So all releases
    together cost the largest epsilon and the largest delta.

    Replacing a record may remove it from one part and add another record to another part. So
    replace-one guarantees for the parts are not enough. For a result under replace-one, use
    `group(parallel(...), 2)` with guarantees under add-or-remove-one.

    Args:
        *guarantees: the guarantee of the release on each part, under add-or-remove-one.

    Returns:
        A `Guarantee` with the largest epsilon and delta; gamma and confidence as in `compose`.

    Raises:
        TypeError: if an argument is not a concrete guarantee.
        ValueError: if no guarantee is given, or if a guarantee is under replace-one, a batch or
            NaN, for groups of several records, or for another privacy unit than a record.

    Formal guarantees:
        (max epsilon, max delta)-DP for the joint release. Guarantees for groups of t records, or
        for all records of a person, are refused, because t records may be in t different parts. Use
        `compose` for these.

    Source:
        McSherry, "Privacy integrated queries" (2009), Theorem 4.

    Example:
        >>> import dpjax
        >>> from dpjax import queries
        >>> added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
        >>> counted = queries.counting_query().sensitivity(relation=added)
        >>> men, women = (dpjax.laplace(counted, e).guarantee for e in (0.5, 1.0))
        >>> dpjax.accounting.parallel(men, women).epsilon
        1.0
    """
    together = compose(*guarantees)
    _check_of_one_part(together)
    known = [concrete(guarantee) for guarantee in guarantees]
    return dataclasses.replace(
        together,
        epsilon=max(guarantee.epsilon for guarantee in known),
        delta=max(guarantee.delta for guarantee in known),
    )


class Parts:
    """Accounts for releases on disjoint parts of the records; made by `ledger.parallel`.

    In a block `with parts("Fair"):`, the account of the part "Fair" pays for every release. Each of
    these releases must use only the records of this part. `dpjax.privatize(...,
    ledger=parts("Fair"))` does the same for the releases of one function. Both may be inside of a
    block `with ledger:`. If a release inside the block of `ledger.parallel` does not name a part,
    the ledger pays its full cost.

    Attributes:
        column: the public name of the division into parts.

    Formal guarantees:
        Each record must be in at most one part, and its part must depend on this record alone.
        `queries.split_by` makes such parts. If you make parts yourself, you promise this. Releases
        must be under add-or-remove-one, because the sizes of parts are private. For all releases
        together, an add-or-remove-one ledger pays the largest epsilon and the largest delta of a
        part. A replaced record may leave one part and enter another, or change within a part. So a
        replace-one ledger pays 2 epsilon and (1 + e^epsilon) delta. docs/proofs/groups.md has the
        proof. Later releases may depend on earlier ones, also of other parts.

        The ledger writes the additional cost of a release to the disk before its noise is drawn. So
        after a crash or an exception, the ledger has paid for everything that was published. The
        sums of the parts are in memory, so another block or another process starts at 0. A forked
        process is refused.
    """

    def __init__(
        self, ledger: Account, column: str, pay: Callable[[Payment, Amount], None]
    ) -> None:
        self.column, self._ledger, self._pay = column, ledger, pay
        self._accounts: dict[str | int, Part] = {}
        self._of_part: dict[str | int, Amount] = {}
        self._paid = (0, 0)
        self._open, self._process, self._lock = True, os.getpid(), threading.RLock()

    def __enter__(self) -> Self:
        # If a release in the `with` block does not belong to one of the parts, the ledger itself
        # pays for the release.
        self._rest = paying_for_the_rest(self._ledger)
        self._rest.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._rest.__exit__(None, None, None)
        self._open = False

    def __call__(self, part: str | int) -> "Part":
        """Returns the account of one part, which is given by its public name or key.

        The same part always has the same account. So if two nested `with` blocks are for the same
        part, a release in the inner block is paid for once.
        """
        if isinstance(part, bool) or not isinstance(part, (str, int)):
            raise TypeError(f"part must be a string or an integer, got {_checks.shown(part)}")
        pay = functools.partial(self._pay_for, part)
        return self._accounts.setdefault(part, Part(self._ledger, self.column, part, pay))

    def _pay_for(self, part: str | int, release: Payment) -> None:
        """Pays for a release on one part: the increase of the cost of all parts together.

        That cost is the cost of the most expensive part, so the increase may be 0.
        """
        if not self._open or self._process != os.getpid():
            raise ValueError(
                "parts can only be used inside of their block `with ledger.parallel(...)`, and "
                "in the process that opened it, which has their sums in memory: open another block"
            )
        promised = compose(release.guarantee)
        _check_of_one_part(promised)
        epsilon, delta = cost_of(promised)
        what = f"{release.what} of {self.column} {part!r}"
        with self._lock:
            earlier = self._of_part.get(part, (0, 0))
            of_part = {**self._of_part, part: (earlier[0] + epsilon, earlier[1] + delta)}
            paid = self._together(of_part)
            due = paid[0] - self._paid[0], paid[1] - self._paid[1]
            self._pay(release._replace(guarantee=promised, what=what), due)
            # The totals are updated after the debit. So if the debit fails, they are unchanged, and
            # nothing is released.
            self._of_part, self._paid = of_part, paid

    def _together(self, of_part: dict[str | int, Amount]) -> Amount:
        """Returns the cost of all parts together, from the cost of each part."""
        epsilon, delta = (max(amounts) for amounts in zip(*of_part.values(), strict=True))
        if self._ledger.relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return epsilon, delta
        exact = Fraction(epsilon, 10**EPSILON_DIGITS), Fraction(delta, 10**DELTA_DIGITS)
        replaced = delta_of_steps(round_up(exact[0]), min(1.0, round_up(exact[1])), 2)
        return 2 * epsilon, math.ceil(Fraction(replaced) * 10**DELTA_DIGITS)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "parts cannot be copied or pickled, because both copies would spend the same budget"
        )


class Part(Account):
    """The account of one part; made by `Parts`.

    Attributes:
        part: the public name or key of the part.

    Formal guarantees:
        As for `Parts`. A release with a name is stored under its name, the name of the part, and
        the `column` of `Parts`.
    """

    def __init__(
        self, ledger: Account, column: str, part: str | int, pay: Callable[[Payment], None]
    ) -> None:
        self.part, self.instead_of = part, ledger
        self._column, self._pay = column, pay

    @property
    def relation(self) -> NeighboringRelation:
        """Add-or-remove-one, because the size of a part is private."""
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    def record(self, release: Payment) -> None:
        """Pays for a release of this part."""
        request = release.request
        self._pay(release._replace(request=request and self._of_part(request)))

    def released(self, request: Request) -> Release | None:
        """The release that the ledger stores for a request on this part; None if there is none."""
        return super().released(self._of_part(request))

    def keep(self, request: Request, release: Release) -> Release:
        """Stores a release unless this part already has a release for the request.

        Returns the stored release.
        """
        return super().keep(self._of_part(request), release)

    def _of_part(self, request: Request) -> Request:
        # The part is hashed into the fingerprint, so that the same request has a different
        # fingerprint on each part.
        words = repr((self._column, self.part, request.fingerprint))
        return request._replace(fingerprint=hashlib.sha256(words.encode()).hexdigest())

    def __repr__(self) -> str:
        return f"Part({self._column} {self.part!r} of {self.instead_of!r})"


def _check_of_one_part(guarantee: Guarantee) -> None:
    added = guarantee.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if guarantee.privacy_unit != RECORD:
        raise ValueError(
            f"guarantees must be for one record, got a guarantee for a {guarantee.privacy_unit},"
            " whose records may be in several parts: release all parts at once, by queries.by"
        )
    if not added or guarantee.group_size > 1:
        raise ValueError(
            "guarantees must be under add-or-remove-one and for one record, because a replaced "
            "record may leave one part and enter another, got a guarantee under "
            f"{guarantee.relation} for groups of {guarantee.group_size}"
        )
