"""The open ledgers that every release notifies: ledgers of keys, and one ledger of a budget."""

import abc
import contextlib
import contextvars
import dataclasses
import hashlib
import os
import threading
from collections.abc import Generator
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee, NeighboringRelation, Release

# A program that was compiled while no ledger was open would release without telling a ledger opened
# later. So this setting, which is part of JAX's cache key, changes while a ledger is open: JAX then
# traces such a program again, and the release in it refuses to be traced.
_TELLING = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A `with ledger:` block that has begun, or a ledger that pays if no other budget does."""

    ledger: "OpenLedger"
    last: bool = False


class _Process:
    """The blocks that are open in any thread of this process, in the order in which they began."""

    def __init__(self) -> None:
        self.start_with(())

    def start_with(self, blocks: tuple[_Block, ...]) -> None:
        self.blocks, self._lock = blocks, threading.Lock()
        _TELLING.set_global(bool(blocks))

    def begin(self, block: _Block) -> None:
        with self._lock:
            self.blocks = (*self.blocks, block)
            _TELLING.set_global(True)

    def end(self, block: _Block) -> None:
        with self._lock:
            self.blocks = tuple(one for one in self.blocks if one is not block)
            _TELLING.set_global(bool(self.blocks))


# The `with ledger:` blocks around the code that is running, outermost first. A task of asyncio
# inherits the blocks of the code that created it, and a new thread starts with none.
_AROUND: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
_PROCESS = _Process()


def _after_fork() -> None:
    """A fork inherits the blocks of all threads: a pool may fork from threads of its own."""
    _PROCESS.start_with(_PROCESS.blocks)


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_after_fork)


class Request(NamedTuple):
    """A request for a release, in public terms.

    Attributes:
        name: the user's name for the records.
        fingerprint: equal only for equal requests.
        outputs: structure, shapes and dtypes of the value of its release.
    """

    name: str
    fingerprint: str
    outputs: TreeSpec


class Drawing(NamedTuple):
    """A release that is one draw of a mechanism.

    Attributes:
        mechanism: the mechanism that draws.
        numbers: how many numbers get noise.
    """

    mechanism: Any
    numbers: int

    @classmethod
    def of(cls, mechanism: object, value: TreeSpec) -> "Drawing":
        """The draw for a value of these shapes."""
        return cls(mechanism, sum(leaf.size for leaf in value.leaves))


class Payment(NamedTuple):
    """What open ledgers are told about a release before it is drawn.

    Attributes:
        key: the key that draws it; None if dpjax does not draw it.
        guarantee: the guarantee of the release.
        what: describes it in the history.
        request: the request under which a ledger stores it; None without a name.
        drawing: the draw, which may cost less than the guarantee; None if the release is not a
            single draw.
    """

    key: Key | None
    guarantee: Guarantee
    what: str
    request: Request | None = None
    drawing: Drawing | None = None


class OpenLedger(abc.ABC):
    """A ledger for `with ledger:`. Each release inside tells it before noise is drawn."""

    def __enter__(self) -> Self:
        block = _Block(self)
        _AROUND.set((*_AROUND.get(), block))
        _PROCESS.begin(block)
        return self

    def __exit__(self, *_: object) -> None:
        # Threads may share a ledger, so each of them leaves its own block. A generator may be
        # closed in a different context from the one in which it began, so the block is looked up.
        around = _AROUND.get()
        blocks = (*_PROCESS.blocks, *around)
        block = next(one for one in reversed(blocks) if one.ledger is self and not one.last)
        _AROUND.set(tuple(one for one in around if one is not block))
        _PROCESS.end(block)

    @abc.abstractmethod
    def record(self, release: Payment) -> None:
        """Takes note of a release that is about to be drawn, or refuses it."""


class Account(OpenLedger):
    """A ledger of a budget, which also remembers releases.

    Attributes:
        relation: which databases are neighbors; mechanisms made inside of `with` inherit it.
    """

    @property
    @abc.abstractmethod
    def relation(self) -> NeighboringRelation: ...

    @abc.abstractmethod
    def released(self, request: Request) -> Release | None:
        """The release under a request, if there was one."""

    @abc.abstractmethod
    def keep(self, request: Request, release: Release) -> Release:
        """Stores a release, unless the request already has one. Returns the stored one."""


@contextlib.contextmanager
def paying_for_the_rest(ledger: Account) -> Generator[None]:
    """Makes a ledger pay for releases that no other budget in the process pays for."""
    block = _Block(ledger, last=True)
    _PROCESS.begin(block)
    try:
        yield
    finally:
        _PROCESS.end(block)


def told(given: OpenLedger | None = None) -> list[OpenLedger]:
    """The ledgers that a release at this place notifies.

    A given one and those around this code come first. If none of them is a budget, budgets that are
    open elsewhere in the process are added; likewise for ledgers of keys.
    """
    own = [block.ledger for block in _AROUND.get()]
    own += [] if given is None else [given]
    has_one = {isinstance(ledger, Account) for ledger in own}
    elsewhere = [block.ledger for block in _PROCESS.blocks if not block.last]
    own += [ledger for ledger in elsewhere if isinstance(ledger, Account) not in has_one]
    if not any(isinstance(ledger, Account) for ledger in own):
        own += [block.ledger for block in _PROCESS.blocks if block.last]
    return list(dict.fromkeys(own))


def relation_or_inherited(
    relation: NeighboringRelation | None,
    otherwise: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
    *,
    payer: OpenLedger | None = None,
) -> NeighboringRelation:
    """A given relation; without one, the relation of the budget that pays, or else a default."""
    if relation is not None:
        return NeighboringRelation(relation)
    stated = {ledger.relation for ledger in told(payer) if isinstance(ledger, Account)}
    return stated.pop() if len(stated) == 1 else otherwise


def fingerprint_of_key(key: Key) -> str:
    """A name for a key. It reveals nothing about a key of 256 random bits."""
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: PyTree) -> None:
    """Refuses tracers, and a release that a compiled program would repeat."""
    if _checks.is_staging() or _checks.any_traced(used):
        raise TypeError(
            "a ledger records keys on the host, not inside jit or vmap, where one key may serve"
            " many releases: there, use jax.debug_key_reuse"
        )


def untold_programs() -> contextlib.AbstractContextManager[None]:
    """For code that tells no ledger, so that it can use programs compiled while none was open."""
    return _TELLING(False)
