"""The transaction of a release: every open ledger is told, and paid, before noise is drawn."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from dpjax._core import _checks
from dpjax._core._open_ledgers import (
    Account,
    OpenLedger,
    Request,
    open_ledgers,
    refuse_traced,
    with_open,
)
from dpjax._core._values import Guarantee, Mechanism, Release
from dpjax.random._facade import is_seeded


def pay_and_draw(
    draw: Callable[[], Release],
    key: jax.Array,
    used: Any,
    *,
    guarantee: Guarantee,
    what: str,
    name: str | None = None,
    request: Callable[[str | None], Request | None] | None = None,
    ledger: OpenLedger | None = None,
) -> Release:
    """Pays for a release from all open ledgers, and draws it, or returns the one that was paid for.

    Releases that `draw` makes on the way are parts of this one: nobody pays for them again.

    Args:
        draw: makes the release.
        key: a typed key.
        used: everything else that the release is made of. If a part of it is traced, the key may
            serve many releases.
        guarantee: of the release.
        what: describes it in the history.
        name: that the user gave to the records. Without a name nothing is released again.
        request: makes the request under a name, or refuses it; None if there is no request.
        ledger: another one to pay from.
    """
    # Check.
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(
            "name must be a text that is not empty, such as that of a column or a group, got"
            f" {_checks.shown(name)}"
        )
    ledgers = dict.fromkeys(open_ledgers() if ledger is None else (*open_ledgers(), ledger))
    if not ledgers:
        return draw()
    refuse_traced((key, used))
    account = _only_account(ledgers)

    # Name the request, and look it up.
    asked = None
    if account is not None and request is not None:
        with with_open(()):
            asked = request(name)
        if asked is not None and (before := account.released(asked)) is not None:
            return before

    # Pay. Ledgers of keys come first: a refused key costs no budget.
    for one in sorted(ledgers, key=lambda one: one is account):
        one.record(key, guarantee, what, asked)

    # Compute and draw, with no ledger open: what is inside is paid for.
    with with_open(()):
        release = draw()

    # Keep, and return. Of two processes that drew one request, the first release counts.
    return release if account is None or asked is None else account.keep(asked, release)


def tell_of_training(key: jax.Array) -> None:
    """Lets ledgers of keys claim the key of a training, whose steps they will not hear of."""
    refuse_unpaid_steps()
    if ledgers := open_ledgers():
        refuse_traced(key)
        for one in ledgers:
            one.record(key, Guarantee(math.inf, 1.0), "training", None)


def refuse_unpaid_steps() -> None:
    """Refuses steps of a training while a budget is open: one step does not know what all cost."""
    if any(isinstance(one, Account) for one in open_ledgers()):
        raise ValueError(
            "a training pays for all of its steps at once: ledger.charge what they will promise, as"
            " by accounting.dp_sgd, and train outside of `with ledger`"
        )


def _only_account(ledgers: dict[OpenLedger, None]) -> Account | None:
    accounts = [one for one in ledgers if isinstance(one, Account)]
    if len(accounts) > 1:
        raise ValueError(
            f"one budget pays for a release, got {len(accounts)} open: {accounts}; close the others"
        )
    return accounts[0] if accounts else None


def guarantee_under(key: jax.Array, mechanism: Mechanism) -> Guarantee:
    """What a release under a key promises: of a seeded key it says so."""
    guarantee = mechanism.guarantee
    if not is_seeded(key):
        return guarantee
    return dataclasses.replace(guarantee, notes=(*guarantee.notes, "seeded key"))
