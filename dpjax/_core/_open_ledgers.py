"""The open ledgers, which every release tells: ledgers of keys, and one of a budget."""

import abc
import contextlib
import contextvars
import hashlib
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Guarantee, Release

# The ledgers of the blocks of `with` around the code that asks, outermost first.
OPEN: contextvars.ContextVar[tuple["OpenLedger", ...]] = contextvars.ContextVar(
    "open ledgers", default=()
)
# How to close the blocks of `with` around this code, innermost last. Threads may share a ledger, so
# each leaves its own blocks.
_BLOCKS: contextvars.ContextVar[tuple[contextlib.ExitStack, ...]] = contextvars.ContextVar(
    "open blocks", default=()
)
# A program that was compiled while no ledger was open would release without telling one. Under this
# context JAX traces such a program again, and the release in it refuses to be traced.
_TELLING = jax.make_user_context(False)


class Request(NamedTuple):
    """A request for a release, in public terms.

    Attributes:
        name: that the user gave to the records it is about.
        fingerprint: equal for equal requests only.
        outputs: structure, shapes and dtypes of the value of its release.
    """

    name: str
    fingerprint: str
    outputs: TreeSpec


class Drawing(NamedTuple):
    """A release that is one draw of a mechanism.

    Attributes:
        mechanism: that draws.
        numbers: how many get noise.
    """

    mechanism: Any
    numbers: int

    @classmethod
    def of(cls, mechanism: object, value: TreeSpec) -> "Drawing":
        """The draw for a value of these shapes."""
        return cls(mechanism, sum(leaf.size for leaf in value.leaves))


class OpenLedger(abc.ABC):
    """A ledger for `with ledger:`. Each release inside tells it before noise is drawn."""

    def __enter__(self) -> Self:
        block = contextlib.ExitStack()
        block.callback(OPEN.reset, OPEN.set((*OPEN.get(), self)))
        block.enter_context(_TELLING(True))
        _BLOCKS.set((*_BLOCKS.get(), block))
        return self

    def __exit__(self, *_: object) -> None:
        *outer, block = _BLOCKS.get()
        _BLOCKS.set(tuple(outer))
        block.close()

    @abc.abstractmethod
    def record(
        self,
        key: Key,
        guarantee: Guarantee,
        what: str,
        request: Request | None,
        drawing: Drawing | None = None,
    ) -> None:
        """Takes note of a release, or refuses it; a drawing may cost less than it promises."""


class Account(OpenLedger):
    """A ledger that also remembers releases."""

    @abc.abstractmethod
    def released(self, request: Request) -> Release | None:
        """The release under a request, if there was one."""

    @abc.abstractmethod
    def keep(self, request: Request, release: Release) -> Release:
        """Remembers a release; of several under one request the first, which is returned."""


def fingerprint_of_key(key: Key) -> str:
    """Names a key. It says nothing about a key of 256 random bits."""
    return hashlib.sha256(np.asarray(jax.random.key_data(key), "<u4").tobytes()).hexdigest()


def refuse_traced(used: PyTree) -> None:
    """Refuses tracers, and a release that a compiled program would repeat."""
    if _checks.is_staging() or any(map(_checks.is_traced, jax.tree.leaves(used))):
        raise TypeError(
            "a ledger claims keys on the host, not inside jit or vmap, where one key may serve many"
            " releases: there, use jax.debug_key_reuse"
        )


def untold_programs() -> contextlib.AbstractContextManager[None]:
    """For code that tells no ledger: it shares its programs with what ran while none was open."""
    return _TELLING(False)
