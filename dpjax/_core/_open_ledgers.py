"""Open ledgers, of random keys and of privacy budgets. Every release notifies them."""

import abc
import contextlib
import contextvars
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Guarantee, NeighboringRelation, Release

# A program that was compiled while no ledger was open would release without notifying a ledger that
# is opened later. So opening a ledger changes this setting, which is part of the key of JAX's
# caches. JAX then traces the program again, and the release in it raises an error.
_TELLING = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A `with ledger:` block that is open.

    If `last` is true, the ledger pays only for releases that no other budget pays for.
    """

    ledger: "OpenLedger"
    last: bool = False


class _Process:
    """All open blocks of this process, from all threads, in the order of opening."""

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


# The `with ledger:` blocks around the running code, outermost first. An asyncio task inherits the
# blocks of the code that created it. A new thread starts without blocks.
_AROUND: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
_PROCESS = _Process()


def _after_fork() -> None:
    """Lets a forked process inherit all `with ledger:` blocks that are open in its parent.

    The blocks of all threads count, because a process pool may fork in any thread.
    """
    _PROCESS.start_with(_PROCESS.blocks)


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_after_fork)


class Request(NamedTuple):
    """A description of a requested release, which contains nothing private.

    Attributes:
        name: the user's name for the records.
        fingerprint: a hash of the request; different requests have different hashes.
        outputs: structure, shapes and dtypes of the released value.
    """

    name: str
    fingerprint: str
    outputs: TreeSpec


class Drawing(NamedTuple):
    """A release that consists of one draw of a mechanism.

    Attributes:
        mechanism: the mechanism that draws the noise.
        numbers: how many numbers the value has. Noise is added to each of them.
    """

    mechanism: Any
    numbers: int

    @classmethod
    def of(cls, mechanism: object, value: TreeSpec) -> "Drawing":
        """Describes a draw of `mechanism` for a value with these shapes."""
        return cls(mechanism, sum(leaf.size for leaf in value.leaves))


class Training(NamedTuple):
    """A release that is the result of a whole training by DP-SGD.

    Attributes:
        run: the parameters of the steps, as a `DpSgdRun` of `dpjax.accounting`.
        noise_multiplier: the noise multiplier of every step.
        parameters: the shapes and dtypes of the trained parameters.
    """

    run: Any
    noise_multiplier: float
    parameters: PyTree


class Payment(NamedTuple):
    """What open ledgers are told about a release before its noise is drawn.

    Attributes:
        key: the key that draws the noise; None if dpjax does not draw it.
        guarantee: the guarantee of the release.
        what: a description of the release for the ledger's history.
        request: a description of the requested release. A ledger uses it to find the stored
            release again. None if the release has no name.
        drawing: the draw, if the release is a single draw; a ledger may then charge less than the
            guarantee. Otherwise None.
        training: the parameters of a training, if the release is one. The best of several trainings
            costs less than their guarantees imply. Otherwise None.
    """

    key: Key | None
    guarantee: Guarantee
    what: str
    request: Request | None = None
    drawing: Drawing | None = None
    training: Training | None = None


class OpenLedger(abc.ABC):
    """A ledger that `with ledger:` opens. Each release in the block notifies it first.

    Attributes:
        instead_of: another ledger, which this ledger debits. So the other ledger is not notified of
            releases that this ledger pays for. None unless this ledger is a part or a share.
    """

    instead_of: "Account | None" = None

    def __enter__(self) -> Self:
        block = _Block(self)
        _AROUND.set((*_AROUND.get(), block))
        _PROCESS.begin(block)
        return self

    def __exit__(self, *_: object) -> None:
        # Several threads may have opened this ledger, and only one of its blocks is closed here. A
        # generator may be closed in another context than the one in which it opened the block. So
        # the block is also looked up among all blocks of the process.
        around = _AROUND.get()
        blocks = (*_PROCESS.blocks, *around)
        block = next(one for one in reversed(blocks) if one.ledger is self and not one.last)
        _AROUND.set(tuple(one for one in around if one is not block))
        _PROCESS.end(block)

    @abc.abstractmethod
    def record(self, release: Payment) -> None:
        """Records a release that is about to be drawn, or raises an error to refuse it."""


class Account(OpenLedger):
    """A ledger with a privacy budget, which also stores releases.

    Attributes:
        relation: which databases are neighbors. Mechanisms that are created inside the ledger's
            `with` block use this relation by default.
    """

    @property
    @abc.abstractmethod
    def relation(self) -> NeighboringRelation: ...

    def released(self, request: Request) -> Release | None:
        """Returns the release that is stored for a request; None if there is none.

        If the account has no file, the ledger that the account debits is asked, if there is one.
        """
        return self.instead_of.released(request) if self.instead_of else None

    def keep(self, request: Request, release: Release) -> Release:
        """Stores a release, unless the request already has one. Returns the stored release."""
        return self.instead_of.keep(request, release) if self.instead_of else release


@contextlib.contextmanager
def paying_for_the_rest(ledger: Account) -> Generator[None]:
    """A context in which a ledger pays for releases that no other budget pays for."""
    block = _Block(ledger, last=True)
    _PROCESS.begin(block)
    try:
        yield
    finally:
        _PROCESS.end(block)


Simulation: TypeAlias = Callable[[Any, Value], Value]
"""Maps the plan of a release and the exact value of a public database to a drawn value."""

_SIMULATION: contextvars.ContextVar[Simulation | None] = contextvars.ContextVar(
    "simulation of releases", default=None
)


@contextlib.contextmanager
def simulating(simulation: Simulation) -> Generator[None]:
    """A context for code that runs on simulated databases, which are public.

    In the context, `simulation` computes the value of every release, instead of the mechanism.
    Ledgers are not notified, because no private record is released.
    """
    token = _SIMULATION.set(simulation)
    try:
        yield
    finally:
        _SIMULATION.reset(token)


def simulation() -> Simulation | None:
    """Returns the simulation whose `with` block contains the running code; None without one."""
    return _SIMULATION.get()


def told(given: OpenLedger | None = None) -> list[OpenLedger]:
    """Returns the ledgers that a release by the running code must notify.

    These are the ledgers of the `with` blocks around the code, and `given`. If none of them has a
    budget, all ledgers with budgets that are open elsewhere in the process are added. Likewise, if
    none of them is a ledger of keys, all ledgers of keys are added.
    """
    if simulation() is not None:
        return []
    # A ledger that is `given` for one release counts as the innermost block.
    around = [block.ledger for block in _AROUND.get()] + ([] if given is None else [given])
    # A part or a share of a ledger passes its debits on to the ledger. If `with part:` is inside
    # `with ledger:`, only the part is told of the release. Otherwise the release would debit the
    # ledger twice. If `with ledger:` is inside `with part:`, both are told.
    own = [
        one
        for i, one in enumerate(around)
        if not any(later.instead_of is one for later in around[i:])
    ]
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
    """Returns `relation`, or else the relation of the budget that pays, or else a default."""
    if relation is not None:
        return NeighboringRelation(relation)
    stated = {ledger.relation for ledger in told(payer) if isinstance(ledger, Account)}
    return stated.pop() if len(stated) == 1 else otherwise


def fingerprint_of_key(key: Key) -> str:
    """Returns a hash that identifies a key.

    It reveals nothing about a key that has 256 random bits.
    """
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: PyTree) -> None:
    """Refuses a release inside `jit` or `vmap`, where one key could draw many releases."""
    if _checks.is_staging() or _checks.any_traced(used):
        raise TypeError(
            "a ledger records keys on the host, and refuses releases inside of jit or vmap, "
            "where many releases may use one key: release outside of jit, or close the ledger "
            "and use jax.debug_key_reuse"
        )


def untold_programs() -> contextlib.AbstractContextManager[None]:
    """Returns a context for code that makes no release.

    Inside this context, JAX may reuse programs that it compiled while no ledger was open.
    """
    return _TELLING(False)
