"""Calls of code on the host: made where no signal arrives, and ended when nobody waits for them.

Python delivers Ctrl-C to the main thread. Code that runs there may swallow it. And nobody could
tell whether such code ended by itself or because of Ctrl-C.
"""

import atexit
import contextlib
import contextvars
import functools
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Generator
from concurrent import futures
from typing import TypeVar

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
