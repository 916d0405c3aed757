"""What is open to be told of every release: ledgers of keys, and one of a budget."""

import abc
import contextlib
import contextvars
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dpjax import _checks
from dpjax._pytree import TreeSpec
from dpjax.base import Guarantee, Release

_OPEN: contextvars.ContextVar[tuple["OpenLedger", ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
# What closes the blocks of `with` around here, innermost last: threads that share a ledger leave
# their own.
_BLOCKS: contextvars.ContextVar[tuple[contextlib.ExitStack, ...]] = contextvars.ContextVar(
    "open blocks", default=()
)
# Programs that were compiled while no ledger was open release without telling one: under this
# context JAX traces them anew, and the release refuses.
_TELLING = jax.make_user_context(False)


class Request(NamedTuple):
    """What is asked for, in public terms.

    Attributes:
        name: that the user gave to the records it is about.
        fingerprint: equal for equal requests only.
        outputs: structure, shapes and dtypes of the value of its release.
    """

    name: str
    fingerprint: str
    outputs: TreeSpec


class OpenLedger(abc.ABC):
    """What `with ledger:` opens: it is told of every release inside, before noise is drawn."""

    def __enter__(self) -> Self:
        block = contextlib.ExitStack()
        block.enter_context(_open((*_OPEN.get(), self)))
        _BLOCKS.set((*_BLOCKS.get(), block))
        return self

    def __exit__(self, *_: object) -> None:
        *outer, block = _BLOCKS.get()
        _BLOCKS.set(tuple(outer))
        block.close()

    @abc.abstractmethod
    def record(
        self, key: jax.Array, guarantee: Guarantee, what: str, request: Request | None
    ) -> None:
        """Takes note of a release, or refuses it."""


class Account(OpenLedger):
    """A ledger that also remembers what was released."""

    @abc.abstractmethod
    def released(self, request: Request) -> Release | None:
        """What was released under a request, if anything was."""

    @abc.abstractmethod
    def keep(self, request: Request, release: Release) -> Release:
        """Remembers a release; of several under one request the first, which is returned."""


def told(
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
    """Draws a release of which every open ledger was told; inside none is open: it counts once.

    Args:
        draw: makes the release.
        key: a typed key.
        used: what else the release is made of; where it is traced the key may serve many times.
        guarantee: of the release.
        what: describes it in the history.
        name: that the user gave to the records; without one nothing is released again.
        request: makes the request under a name, or refuses it; None where there is none.
        ledger: another one to tell.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(
            "name must be a text that is not empty, such as that of a column or a group, got"
            f" {_checks.shown(name)}"
        )
    ledgers = dict.fromkeys(_OPEN.get() if ledger is None else (*_OPEN.get(), ledger))
    if not ledgers:
        return draw()
    refuse_traced((key, used))
    account = _only_account(ledgers)
    asked = None
    if account is not None and request is not None:
        with _open(()):
            asked = request(name)
        if asked is not None and (before := account.released(asked)) is not None:
            return before
    for one in sorted(ledgers, key=lambda one: one is account):  # A refused key costs nothing.
        one.record(key, guarantee, what, asked)
    with _open(()):
        release = draw()
    return release if account is None or asked is None else account.keep(asked, release)


def tell_of_training(key: jax.Array) -> None:
    """Lets ledgers of keys claim the key of a training, whose steps they will not hear of."""
    refuse_unpaid_steps()
    if ledgers := _OPEN.get():
        refuse_traced(key)
        for one in ledgers:
            one.record(key, Guarantee(math.inf, 1.0), "training", None)


def refuse_unpaid_steps() -> None:
    """Refuses steps of a training while a budget is open: one step does not know what all cost."""
    if any(isinstance(one, Account) for one in _OPEN.get()):
        raise ValueError(
            "a training pays for all of its steps at once: ledger.charge what they will promise, as"
            " by accounting.dp_sgd, and train outside of `with ledger`"
        )


def fingerprint_of_key(key: jax.Array) -> str:
    """Names a key and tells nothing of it, if it has 256 random bits."""
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: Any) -> None:
    """Refuses what is known only when a compiled program runs, or that such a program would do."""
    if _checks.is_staging() or any(map(_checks.is_traced, jax.tree.leaves(used))):
        raise TypeError(
            "a ledger claims keys on the host, not inside jit or vmap, where one key may serve many"
            " releases: there, use jax.debug_key_reuse"
        )


def _only_account(ledgers: dict[OpenLedger, None]) -> Account | None:
    accounts = [one for one in ledgers if isinstance(one, Account)]
    if len(accounts) > 1:
        raise ValueError(
            f"one budget pays for a release, got {len(accounts)} open: {accounts}; close the others"
        )
    return accounts[0] if accounts else None


@contextlib.contextmanager
def _open(ledgers: tuple[OpenLedger, ...]) -> Iterator[None]:
    token = _OPEN.set(ledgers)
    try:
        with _TELLING(bool(ledgers)):
            yield
    finally:
        _OPEN.reset(token)
