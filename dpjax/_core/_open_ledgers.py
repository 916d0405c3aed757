"""Open ledgers, which every release notifies: ledgers of keys, and ledgers of privacy budgets."""

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
# was opened later. To prevent that, this setting, which is part of the key of JAX's caches, changes
# while a ledger is open. So JAX traces the program again, and the release in it raises an error.
_TELLING = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A `with ledger:` block that is open.

    A block of an open ledger. If `last` is true, the ledger pays only if no other budget pays.
    """

    ledger: "OpenLedger"
    last: bool = False


class _Process:
    """All open blocks of this process, of all threads, in the order in which they were opened."""

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
# blocks of the code that created the task. A new thread starts without blocks.
_AROUND: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
_PROCESS = _Process()


def _after_fork() -> None:
    """Lets a forked process inherit the blocks of all threads, because a pool may fork anywhere."""
    _PROCESS.start_with(_PROCESS.blocks)


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_after_fork)


class Request(NamedTuple):
    """A description of a requested release, which contains nothing private.

    Attributes:
        name: the user's name for the records.
        fingerprint: a hash of the request; different requests have different hashes.
        outputs: structure, shapes and dtypes of the value of the release.
    """

    name: str
    fingerprint: str
    outputs: TreeSpec


class Drawing(NamedTuple):
    """A release that is one draw of a mechanism.

    Attributes:
        mechanism: the mechanism that draws.
        numbers: how many numbers the value has. Noise is added to each of them.
    """

    mechanism: Any
    numbers: int

    @classmethod
    def of(cls, mechanism: object, value: TreeSpec) -> "Drawing":
        """The draw of a mechanism for a value of these shapes."""
        return cls(mechanism, sum(leaf.size for leaf in value.leaves))


class Training(NamedTuple):
    """A release that is a whole training by DP-SGD.

    Attributes:
        run: the steps, as `accounting` describes them.
        noise_multiplier: the noise multiplier of every step.
        parameters: the shapes and dtypes of the trained parameters.
    """

    run: Any
    noise_multiplier: float
    parameters: PyTree


class Payment(NamedTuple):
    """The information that open ledgers receive about a release before its noise is drawn.

    Attributes:
        key: the key that draws the noise; None if dpjax does not draw it.
        guarantee: the guarantee of the release.
        what: the description of the release in the ledger's history.
        request: the request under which a ledger stores the release; None if the release has no
            name.
        drawing: the draw, which may cost less than the guarantee; None if the release is not a
            single draw.
        training: the steps of a training. They are needed because the best of several trainings
            costs less than their guarantees imply. None if the release is not a training.
    """

    key: Key | None
    guarantee: Guarantee
    what: str
    request: Request | None = None
    drawing: Drawing | None = None
    training: Training | None = None


class OpenLedger(abc.ABC):
    """A ledger for `with ledger:`. Each release in the block notifies it before drawing noise.

    Attributes:
        instead_of: the ledger for which this one pays in its block: a part debits the ledger by
            itself.
    """

    instead_of: "OpenLedger | None" = None

    def __enter__(self) -> Self:
        block = _Block(self)
        _AROUND.set((*_AROUND.get(), block))
        _PROCESS.begin(block)
        return self

    def __exit__(self, *_: object) -> None:
        # Several threads may have opened this ledger, so only one block of it is closed. A
        # generator may be closed in another context than the one in which it opened the block. So
        # the block is looked up in the process, too.
        around = _AROUND.get()
        blocks = (*_PROCESS.blocks, *around)
        block = next(one for one in reversed(blocks) if one.ledger is self and not one.last)
        _AROUND.set(tuple(one for one in around if one is not block))
        _PROCESS.end(block)

    @abc.abstractmethod
    def record(self, release: Payment) -> None:
        """Records a release that is about to be drawn, or raises an error to refuse it."""


class Account(OpenLedger):
    """A ledger of a privacy budget, which also stores releases.

    Attributes:
        relation: which databases are neighbors. Mechanisms that are made inside of a `with` block
            use this relation by default.
    """

    @property
    @abc.abstractmethod
    def relation(self) -> NeighboringRelation: ...

    @abc.abstractmethod
    def released(self, request: Request) -> Release | None:
        """The release that is stored for a request; None if there is none."""

    @abc.abstractmethod
    def keep(self, request: Request, release: Release) -> Release:
        """Stores a release unless the request has one already. Returns the stored release."""


@contextlib.contextmanager
def paying_for_the_rest(ledger: Account) -> Generator[None]:
    """Makes a ledger pay for releases that no other budget in the process pays for."""
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
    """A block for releases of simulated databases, which are public. No ledger is notified.

    `simulation` replaces the draw of every release, so nothing in the block releases private
    records.
    """
    token = _SIMULATION.set(simulation)
    try:
        yield
    finally:
        _SIMULATION.reset(token)


def simulation() -> Simulation | None:
    """The simulation whose block the running code is in; None outside of such blocks."""
    return _SIMULATION.get()


def told(given: OpenLedger | None = None) -> list[OpenLedger]:
    """The ledgers that a release of the running code notifies.

    These are the ledgers of the `with` blocks around the code, and the given ledger. If none of
    these is a ledger of a budget, all budgets that are open elsewhere in the process are added. If
    none is a ledger of keys, all ledgers of keys are added in the same way.
    """
    if simulation() is not None:
        return []
    around = [block.ledger for block in _AROUND.get()]
    # In a block around the block of its part, a ledger is not notified of the part's releases. But
    # if somebody opens the ledger inside of the part's block, or gives it, both are meant to pay.
    own = [
        one
        for i, one in enumerate(around)
        if not any(later.instead_of is one for later in around[i:])
    ]
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
    """The given relation, or else the relation of the budget that pays, or else a default."""
    if relation is not None:
        return NeighboringRelation(relation)
    stated = {ledger.relation for ledger in told(payer) if isinstance(ledger, Account)}
    return stated.pop() if len(stated) == 1 else otherwise


def fingerprint_of_key(key: Key) -> str:
    """A hash that identifies a key, and reveals nothing about a key of 256 random bits."""
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: PyTree) -> None:
    """Refuses a release inside of `jit` or `vmap`, which could run many times with one key."""
    if _checks.is_staging() or _checks.any_traced(used):
        raise TypeError(
            "a ledger records keys on the host, and refuses releases inside of jit or vmap, "
            "where many releases may use one key: release outside of jit, or close the ledger "
            "and use jax.debug_key_reuse"
        )


def untold_programs() -> contextlib.AbstractContextManager[None]:
    """A context for code without releases, which may run programs compiled without a ledger."""
    return _TELLING(False)
