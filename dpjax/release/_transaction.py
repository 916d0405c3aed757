"""The transaction of a release: open ledgers record it and pay for it before noise is drawn."""

import contextlib
import contextvars
import dataclasses
import enum
import math
from collections.abc import Callable, Generator
from typing import Any

import jax

from dpjax._core import _checks
from dpjax._core._open_ledgers import (
    Account,
    Drawing,
    OpenLedger,
    Payment,
    Request,
    refuse_traced,
    simulation,
    told,
    untold_programs,
)
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Guarantee, Release
from dpjax._tracing._fingerprints import digest
from dpjax.random._keys import is_seeded


def pay_and_draw(
    draw: Callable[[], Value],
    key: Key,
    used: PyTree,
    *,
    guarantee: Guarantee,
    what: str,
    name: str | None = None,
    request: Callable[[str | None], Request | None] | None = None,
    ledger: OpenLedger | None = None,
    drawing: Drawing | None = None,
    exact: Callable[[], tuple[Any, Value]] | None = None,
) -> Release:
    """Pays for a release and draws it, or returns the earlier release of an equal request.

    Args:
        draw: draws the value of the release. It uses `mechanism.unpaid_draw`, which does not notify
            ledgers, because a release of several draws pays only once.
        key: a typed key.
        used: all other inputs of the release. If an input is traced, the key may be used for many
            releases, so an open ledger refuses the release.
        guarantee: the guarantee of the release.
        what: a description of the release for the history.
        name: the user's name for the records. Without a name, no earlier release is returned.
        request: makes the request under a name. It is called even if there is no name, so that
            errors of the draw are raised before anything is paid.
        ledger: an additional ledger that pays.
        drawing: the draw, if the release is a single draw of a mechanism.
        exact: how the release is made, and the exact value, for simulations of public databases.
            None if the probability of a release is not known.
    """
    if (simulated := simulation()) is not None:
        if exact is None:
            raise TypeError(
                "private must make all of its releases by dpjax.privatize, but it makes another "
                f"release: {_checks.shown(what)}. The probability of this release is not known:"
                " use dpjax.confidence_set"
            )
        return Release(simulated(*exact()), guarantee)
    # Step 1: check the arguments. A wrong call is refused before anything is paid.
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(
            "name must be a nonempty string, such as the name of a column or a group, got"
            f" {_checks.shown(name)}"
        )
    ledgers = told(ledger)
    if ledgers:
        refuse_traced((key, used))
    accounts = [one for one in ledgers if isinstance(one, Account)]
    if len(accounts) > 1:
        raise ValueError(
            f"only one ledger pays for a release, got {len(accounts)} open ledgers: {accounts}."
            " Close the other ledgers. In a thread, open the ledger that pays, or pass it to"
            " dpjax.privatize(..., ledger=...)"
        )
    account = accounts[0] if accounts else None

    # Step 2: look up the request. If an equal request was already paid for, its release is returned
    # again, free of charge.
    asked = None if account is None or request is None else request(name)
    if account is not None and asked is not None:
        before = account.released(asked)
        if before is not None:
            return before

    # Step 3: pay. Ledgers of keys come first, so that a refused key costs no budget. The debit is
    # written to disk before anything is computed. So if the program crashes later, budget is lost,
    # but nothing is revealed.
    for one in sorted(ledgers, key=lambda one: one is account):
        one.record(Payment(key, guarantee, what, asked, drawing))

    # Step 4: compute the value and draw noise. The draw itself does not notify ledgers. A NaN in a
    # private value must not raise an error, because that would reveal it.
    with jax.debug_nans(False), jax.debug_infs(False), untold_programs():
        release = Release(draw(), guarantee)

    # Step 5: store the release, and return it. If two processes have drawn releases for the same
    # request, both return the first one.
    return release if account is None or asked is None else account.keep(asked, release)


def tell_of_training(key: Key) -> None:
    """Records the key of a training run in all open ledgers of keys.

    The steps of the training do not notify these ledgers.
    """
    refuse_unpaid_steps()
    if ledgers := told():
        refuse_traced(key)
        for one in ledgers:
            # A ledger with a budget is charged for the whole training at once, before it starts.
            # See `refuse_unpaid_steps`.
            if not isinstance(one, Account):
                one.record(Payment(key, Guarantee(math.inf, 1.0), "training"))


_STEPS_ARE_PAID: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "steps are paid for", default=False
)


@contextlib.contextmanager
def paid_steps() -> Generator[None]:
    """A context for training steps that were all paid for before the first step."""
    token = _STEPS_ARE_PAID.set(True)
    try:
        with untold_programs():
            yield
    finally:
        _STEPS_ARE_PAID.reset(token)


def refuse_unpaid_steps() -> None:
    """Refuses a training step inside `with ledger`: the number of all steps is unknown there."""
    if not _STEPS_ARE_PAID.get() and any(isinstance(one, Account) for one in told()):
        raise ValueError(
            "a training step must not run inside `with ledger`, because a run pays for all of its"
            " steps at once: call ledger.charge with the guarantee of all steps, for example by"
            " accounting.dp_sgd, and train outside of `with ledger`"
        )


def guarantee_under(key: Key, guarantee: Guarantee) -> Guarantee:
    """Returns the guarantee of a release; if the key has a seed, with the note "seeded key"."""
    if not is_seeded(key):
        return guarantee
    return dataclasses.replace(guarantee, notes=(*guarantee.notes, "seeded key"))


def request_of(
    name: str | None,
    draw: Callable[[Key, Value], Value],
    key: Key | jax.ShapeDtypeStruct,
    value: TreeSpec,
    *asked: object,
) -> Request | None:
    """Returns the request for the value that `draw(key, value)` releases; None without a name.

    The fingerprint is a hash of the name, the traced program of `draw`, and `asked`. It does not
    depend on the records: two databases of one structure under one name count as the same. Even
    without a name, `draw` is traced, so that its errors are raised before anything is paid.

    Args:
        name: the user's name for the records, or None.
        draw: draws the value.
        key: a key of the same implementation as the key of the release; its bits do not matter.
        value: describes the second argument of `draw`.
        *asked: fingerprints of programs, descriptions of records, and mechanisms.
    """
    drawn, released = jax.make_jaxpr(draw, return_shape=True)(key, value.tree())
    if name is None:
        return None
    name = str(name)  # Converts a subclass of `str`, such as `numpy.str_`, to a plain string.
    fingerprint = digest(name, drawn, _parameters((value, *asked)))
    return Request(name, fingerprint, TreeSpec.of(released))


def _parameters(value: object) -> object:
    """Returns the numbers and strings in a mechanism and its sensitivity, as nested containers.

    Functions are left out, because the traced program already contains what they compute.
    """
    if isinstance(value, tuple):
        return tuple(map(_parameters, value))
    if isinstance(value, TreeSpec):
        kinds = [(leaf.shape, str(leaf.dtype)) for leaf in value.leaves]
        return str(value.structure), kinds
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _parameters(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value).__module__, type(value).__qualname__, fields
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (str, int, float)) or hasattr(value, "dtype"):
        return value
    return type(value).__name__
