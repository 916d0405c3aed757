"""Calls of code on the host: made where no signal arrives, and ended when nobody waits for them.

Python delivers Ctrl-C to the main thread. Code that runs there may swallow it. And nobody could
tell whether such code ended by itself or because of Ctrl-C.
"""

import atexit
import contextlib
import contextvars
import dataclasses
import enum
import functools
import logging
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

T = TypeVar("T")

_NAP = 0.05  # A signal may have been delivered to a thread that does not wake the main one.
_LOCK = threading.RLock()
_ends: set[Callable[[], object]] = set()
_looks: list[Callable[[], object]] = []
_stops, _stopping = 0, 0
_ear: socket.socket | None = None
_MOST_SIGNALS = 4096


class FailedElsewhereError(RuntimeError):
    """Another process of a call has failed."""


class StoppedError(RuntimeError):
    """Raised where somebody waits for a call that was stopped."""


def aside(function: Callable[[Callable[[], bool]], T]) -> T:
    """Calls a function in a thread of its own, and returns its value.

    An interruption ends the wait at once, and leaves the thread to itself.

    Args:
        function: is given a function that says whether its result is still wanted.

    Raises:
        BaseException: the error of the function, or the interruption of the wait.
        StoppedError: if an interruption elsewhere stopped all calls, also one that is done.
    """
    began, result = _stops, futures.Future[T]()

    def wanted() -> bool:
        return began == _stops and not _stopping

    def call() -> None:
        try:
            result.set_result(function(wanted))
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=(call,), daemon=True).start()
        while wanted() and not result.done():
            futures.wait([result], _NAP)
            if _heard_ctrl_c() or any(map(_raises, tuple(_looks))):
                _stop()
    except BaseException:
        _stop()
        raise
    if not wanted():
        raise StoppedError("host target was stopped, because another call was interrupted")
    return result.result()


@contextlib.contextmanager
def heeding_ctrl_c() -> Generator[None, None, None]:
    """Lets calls stop at Ctrl-C while the main thread waits for them in XLA, where Python is deaf.

    KeyboardInterrupt is raised as soon as XLA returns. Signals that somebody else listens to, or
    has a handler for, are left alone.
    """
    global _ear
    on_main_thread = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _ear is not None or not (on_main_thread and usual):
        yield
        return
    ear, mouth = socket.socketpair()
    with ear, mouth:
        ear.setblocking(False)
        mouth.setblocking(False)
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        try:
            if before == -1:
                _ear = ear
            else:
                signal.set_wakeup_fd(before)
            yield
        finally:
            _ear = None
            signal.set_wakeup_fd(before)


@contextlib.contextmanager
def watching(look: Callable[[], object]) -> Generator[None, None, None]:
    """Stops all calls when a function raises, which is called every now and then."""
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)


def _raises(look: Callable[[], object]) -> bool:
    try:
        look()
    except Exception:
        return True
    return False


def _heard_ctrl_c() -> bool:
    with contextlib.suppress(OSError):  # Nothing was said, or nobody listens any more.
        return _ear is not None and signal.SIGINT in _ear.recv(_MOST_SIGNALS)
    return False


@contextlib.contextmanager
def stopping() -> Generator[None, None, None]:
    """Stops all calls, also those that begin inside."""
    global _stopping
    _stopping += 1
    try:
        _stop()
        yield
    finally:
        _stopping -= 1


@contextlib.contextmanager
def ended_when_stopped(
    start: Callable[[], subprocess.Popen[bytes]], end: Callable[[subprocess.Popen[bytes]], object]
) -> Generator[subprocess.Popen[bytes], None, None]:
    """Starts a program that ends with the block, with a stop, or with this process."""
    with _LOCK:
        program = start()
        _ends.add(at_stop := functools.partial(end, program))
    with program:
        try:
            yield program
        finally:
            with _LOCK:
                _ends.discard(at_stop)
                end(program)


@atexit.register
def _stop() -> None:
    global _stops
    with _LOCK:
        # First: a call that ends because of the stop must find itself stopped.
        _stops += 1
        for end in tuple(_ends):
            end()


# The origin of a database, for targets that run on the host.
#
# If such a target fails, an error must name a sampled database, and must not show a private one. A
# compiled program does not know its caller, so the origin travels as data. Programs that call the
# host have it as their first input, see `dpjax._tracing._programs`.


SPEC = jax.ShapeDtypeStruct((2,), np.uint32)


class Role(enum.IntEnum):
    """The role of a database in the sampler; by default private, which is the safe mistake."""

    PRIVATE = 0
    DATABASE = 1
    NEIGHBOR = 2
    PERMUTED = 3
    ORACLE = 4


_DESCRIPTIONS = {
    Role.DATABASE: "the database",
    Role.NEIGHBOR: "the neighbor",
    Role.PERMUTED: "the database, its records permuted",
    Role.ORACLE: "the oracle's records",
}


# The origin of a database that nothing may be said about.
PRIVATE = np.zeros(SPEC.shape, SPEC.dtype)


def sampled(role: Role, pair: jax.Array) -> jax.Array:
    """The origin of a database that the sampler drew."""
    return jnp.stack([jnp.asarray(role, SPEC.dtype), pair.astype(SPEC.dtype)])


def is_private(origin: np.ndarray) -> bool:
    """Whether nothing may be said about a database."""
    return int(origin[0]) == Role.PRIVATE


class HostError(RuntimeError):
    """An error of a call to the host; XLA passes on its text alone."""


def fail(origins: np.ndarray, reason: str) -> NoReturn:
    """Raises an error that names the sampled databases on one of which a target failed."""
    role, first = (int(number) for number in origins[0])
    last = int(origins[-1][1])
    pairs = f"pair {first}" if len(origins) == 1 else f"one of the pairs {first} to {last}"
    raise HostError(f"host target failed on {pairs} ({_DESCRIPTIONS[Role(role)]}): {reason}")


# The last interruption, and the text of it that XLA passes on.
_interruption: tuple[str, BaseException | None] = "", None


def interrupted(error: BaseException) -> NoReturn:
    """Raises an error in a call to the host; `host_errors` turns it into an interruption."""
    global _interruption
    text = f"host target was interrupted by {type(error).__name__} ({time.monotonic_ns()})"
    _interruption = text, error
    raise HostError(text) from None


@contextlib.contextmanager
def host_errors() -> Generator[None, None, None]:
    """Raises the errors of calls to the host, without JAX's account of the call."""
    try:
        with heeding_ctrl_c():
            yield
    except FailedElsewhereError:  # Its text may be one of these.
        raise
    except Exception as error:
        said = re.findall(r"host target (?:failed on|was interrupted|was stopped).*", str(error))
        if not said:
            raise
        text, interruption = _interruption
        if text == said[-1] and interruption is not None:
            raise interruption from None
        kind = StoppedError if "was stopped" in said[-1] else RuntimeError
        raise kind(said[-1]) from None


def _is_unknown(record: logging.LogRecord) -> bool:
    """JAX logs every error of a callback, ours too."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HostError)


logging.getLogger("jax._src.callback").addFilter(_is_unknown)


@dataclasses.dataclass(eq=False)
class Tracing:
    """A program that is being traced.

    Attributes:
        origin: its input of that name.
        settings: values that decide where calls to the host run, but not their outputs.
    """

    origin: ArrayLike | None
    settings: list[object]


# JAX's caches look at it, too: a function under `jit` inside a target is traced anew for every
# program, or it would keep the origin of the first.
TRACING = jax.make_user_context(None)


def current() -> Tracing:
    """The program that is being traced; outside of one, databases count as private."""
    return TRACING.value or Tracing(PRIVATE, [])
