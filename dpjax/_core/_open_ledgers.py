"""What is open to be told of every release: ledgers of keys, and one of a budget."""

import abc
import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Self

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee, Release

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
        block.enter_context(_with_open((*_OPEN.get(), self)))
        _BLOCKS.set((*_BLOCKS.get(), block))
        return self

    def __exit__(self, *_: object) -> None:
        *outer, block = _BLOCKS.get()
        _BLOCKS.set(tuple(outer))
        block.close()

    @abc.abstractmethod
    def record(self, key: Key, guarantee: Guarantee, what: str, request: Request | None) -> None:
        """Takes note of a release, or refuses it."""


class Account(OpenLedger):
    """A ledger that also remembers what was released."""

    @abc.abstractmethod
    def released(self, request: Request) -> Release | None:
        """What was released under a request, if anything was."""

    @abc.abstractmethod
    def keep(self, request: Request, release: Release) -> Release:
        """Remembers a release; of several under one request the first, which is returned."""


def fingerprint_of_key(key: Key) -> str:
    """Names a key and tells nothing of it, if it has 256 random bits."""
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: PyTree) -> None:
    """Refuses what is known only when a compiled program runs, or that such a program would do."""
    if _checks.is_staging() or any(map(_checks.is_traced, jax.tree.leaves(used))):
        raise TypeError(
            "a ledger claims keys on the host, not inside jit or vmap, where one key may serve many"
            " releases: there, use jax.debug_key_reuse"
        )


def open_ledgers() -> tuple["OpenLedger", ...]:
    """The ledgers of the blocks of `with` around here, outermost first."""
    return _OPEN.get()


@contextlib.contextmanager
def _with_open(ledgers: tuple[OpenLedger, ...]) -> Iterator[None]:
    """Opens these ledgers and no others."""
    token = _OPEN.set(ledgers)
    try:
        with _TELLING(bool(ledgers)):
            yield
    finally:
        _OPEN.reset(token)
