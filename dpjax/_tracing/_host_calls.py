"""Calls of code on the host: how they are interrupted, and how their errors are reported.

Code on the host runs in a thread of its own. Python delivers Ctrl-C to the main thread. If the code
ran there, it could swallow the interruption, and dpjax could not tell why it ended.

If a target fails on the host, the error should describe a sampled database, but must reveal nothing
about a private one. A compiled program does not know its caller. So it gets the origin of its
database as data: the first input of programs that call the host.
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

# A signal may reach another thread than the main one. So the main thread looks for it now and then.
_NAP = 0.05
_LOCK = threading.RLock()
_ends: set[Callable[[], object]] = set()
_looks: list[Callable[[], object]] = []
_stops, _stopping = 0, 0
_ear: socket.socket | None = None
_MOST_SIGNALS = 4096


class FailedElsewhereError(RuntimeError):
    """Another process of a call has failed."""


class StoppedError(RuntimeError):
    """The awaited call was stopped."""


def aside(function: Callable[[Callable[[], bool]], T]) -> T:
    """Calls a function in a thread of its own, and returns its value.

    An interruption ends the wait at once. The thread then runs on without a reader.

    Args:
        function: takes a function that tells whether the result is still wanted.

    Raises:
        BaseException: the error of the function, or the interruption of the wait.
        StoppedError: if an interruption elsewhere stopped all calls, even finished ones.
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
    """Lets Ctrl-C stop calls while the main thread waits in XLA, where Python handles no signals.

    KeyboardInterrupt is raised as soon as XLA returns. Nothing changes if the signal already has
    another handler or listener.
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
    """Calls a function now and then, and stops all calls if it raises."""
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
    with contextlib.suppress(OSError):  # No signal has arrived, or the socket is closed.
        return _ear is not None and signal.SIGINT in _ear.recv(_MOST_SIGNALS)
    return False


@contextlib.contextmanager
def stopping() -> Generator[None, None, None]:
    """Stops all calls, including those that begin inside the block."""
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
        # Counted before anything ends. So a call that ends from here on knows that it was stopped.
        _stops += 1
        for end in tuple(_ends):
            end()


# Origins of databases.

SPEC = jax.ShapeDtypeStruct((2,), np.uint32)


class Role(enum.IntEnum):
    """The role of a database in the sampler. The default is private, the safe choice."""

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


# The origin of a private database.
PRIVATE = np.zeros(SPEC.shape, SPEC.dtype)


def sampled(role: Role, pair: jax.Array) -> jax.Array:
    """The origin of a database that the sampler drew."""
    return jnp.stack([jnp.asarray(role, SPEC.dtype), pair.astype(SPEC.dtype)])


def is_private(origin: np.ndarray) -> bool:
    """Whether errors must not describe a database."""
    return int(origin[0]) == Role.PRIVATE


class HostError(RuntimeError):
    """An error of a call to the host. XLA passes on its text only."""


def fail(origins: np.ndarray, reason: str) -> NoReturn:
    """Raises an error that names the sampled databases where a target failed."""
    role, first = (int(number) for number in origins[0])
    last = int(origins[-1][1])
    pairs = f"pair {first}" if len(origins) == 1 else f"one of the pairs {first} to {last}"
    raise HostError(f"host target failed on {pairs} ({_DESCRIPTIONS[Role(role)]}): {reason}")


# The text of the last interruption, which XLA passes on, and the interruption itself.
_interruption: tuple[str, BaseException | None] = "", None


def interrupted(error: BaseException) -> NoReturn:
    """Raises an error for an interruption. `host_errors` raises the interruption in its place."""
    global _interruption
    text = f"host target was interrupted by {type(error).__name__} ({time.monotonic_ns()})"
    _interruption = text, error
    raise HostError(text) from None


@contextlib.contextmanager
def host_errors() -> Generator[None, None, None]:
    """Reraises errors of calls to the host without the traceback of JAX."""
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
    """Whether to log a record. JAX logs all errors of callbacks, and dpjax's own are left out."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HostError)


logging.getLogger("jax._src.callback").addFilter(_is_unknown)


@dataclasses.dataclass(eq=False)
class Tracing:
    """A program that is being traced.

    Attributes:
        origin: the program's input for the origin of its database.
        settings: values that decide where calls to the host run, but not their outputs.
    """

    origin: ArrayLike | None
    settings: list[object]


# JAX's caches depend on a user context. Otherwise a function under `jit` inside a target would keep
# the origin of the first program.
TRACING = jax.make_user_context(None)


def current() -> Tracing:
    """The program that is being traced. Outside of a trace, databases count as private."""
    return TRACING.value or Tracing(PRIVATE, [])
