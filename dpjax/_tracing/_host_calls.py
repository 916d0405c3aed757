"""Code in a program that is not JAX's: calls of Python on the host, and foreign primitives.

Code on the host runs in a separate thread, because Python delivers Ctrl-C to the main thread. If
the code ran there, it could catch KeyboardInterrupt, and dpjax would not notice the interruption.

If a target on the host fails on a sampled database, the error should say on which one. But an error
on a private database must reveal nothing about it. A compiled program does not know by which code
it is called. So programs that call the host have an additional first input, the *origin* of the
database: whether it is private, or where the sampler uses it.

A jaxpr contains primitives, but not the code that implements them. For JAX's own primitives it is
known that they compute the same alone and under `vmap`. Any other primitive could compute anything.
So primitives of installed libraries are replaced by their implementations, which consist of JAX's
primitives. Primitives that the user defined are refused. Keys must have an implementation of JAX or
dpjax.
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
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from typing import Any, NoReturn, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._tracing._evaluate import without_rules
from dpjax._tracing._host_code import is_installed
from dpjax._tracing._walks import Atom, Equation, aval, equations, replaced, specs

# The implementation of one library's primitive may use primitives of another library. This is the
# largest supported depth of such nesting.
_MOST_NESTED = 16
_own: set[jex.Primitive] = set()


def is_own(primitive: jex.Primitive) -> bool:
    """Whether a primitive belongs to JAX.

    Primitives are compared as objects, because a user may reuse the name of one of JAX's.
    """
    if primitive not in _own:
        modules = [x for x in list(sys.modules) if x.partition(".")[0] in ("jax", "jaxlib")]
        _own.update(_primitives_in(modules))
    return primitive in _own


def in_own_operations(name: str, traced: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a program in JAX's own primitives, without `unstack`; `name` is for messages.

    JAX 0.11 iterates over an array by `unstack`. Slices replace it, because proofs support slices.
    """
    for level in range(_MOST_NESTED + 1):
        for implementation in key_implementations(traced.jaxpr):
            functions = ("seed", "split", "fold_in", "random_bits")
            makers = [getattr(getattr(implementation, f), "__module__", "") for f in functions]
            if not {str(module).partition(".")[0] for module in makers} <= {"jax", "dpjax"}:
                raise ValueError(
                    f"{name} must draw with keys of JAX or of dpjax.random, got the implementation"
                    f" {implementation.name!r}, whose code is unknown"
                )
        traced = without_rules(traced)
        foreign = {x.primitive for x in equations(traced.jaxpr) if not is_own(x.primitive)}
        if not foreign and not any(map(_unstacks, equations(traced.jaxpr))):
            break
        installed = [module for module in list(sys.modules) if is_installed(module)]
        unknown = foreign - _primitives_in(installed) if level < _MOST_NESTED else foreign
        if unknown:
            raise ValueError(
                f"{name} must be made of JAX's own primitives or primitives of installed "
                f"packages, got {sorted(primitive.name for primitive in unknown)}: dpjax cannot "
                "check what these primitives compute, alone or under jax.vmap. Call functions "
                "of JAX instead"
            )
        again = jax.make_jaxpr(lambda *xs, program=traced: replaced(program, xs, _computed))
        traced = again(*specs(traced.in_avals))
    return traced


def _computed(equation: Equation, operands: list[jax.Array]) -> list[jax.Array] | None:
    """Runs a library's implementation of its own primitive; None for primitives of JAX."""
    primitive = equation.primitive
    if _unstacks(equation):
        (x,), axis = operands, equation.params["axis"]
        return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    if is_own(primitive):
        return None
    with equation.ctx.manager:
        outputs = primitive.impl(*operands, **equation.params)
    return list(outputs) if primitive.multiple_results else [outputs]


def _unstacks(equation: Equation) -> bool:
    """Whether an operation is an `unstack` of numbers. An `unstack` of keys does not count."""
    if equation.primitive.name != "unstack" or not is_own(equation.primitive):
        return False
    return not jnp.issubdtype(aval(equation.invars[0]).dtype, jax.dtypes.prng_key)


def _primitives_in(modules: list[str]) -> set[jex.Primitive]:
    """Returns all primitives that are global variables of some modules."""
    found = (sys.modules.get(module) for module in modules)
    values = (value for module in found for value in list(getattr(module, "__dict__", {}).values()))
    return {value for value in values if issubclass(type(value), jex.Primitive)}


def key_implementations(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yields the implementations of all keys that occur in a program."""
    atoms: list[Atom] = [*jaxpr.invars, *jaxpr.constvars]
    for equation in equations(jaxpr):
        atoms += (*equation.invars, *equation.outvars)
    dtypes: set[Any] = {getattr(aval(atom), "dtype", jnp.dtype(bool)) for atom in atoms}
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield dtype._impl


T = TypeVar("T")

# The interval, in seconds, at which the main thread checks for signals. A signal may arrive at
# another thread.
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
    """Raised if a call on the host was stopped."""


def aside(function: Callable[[Callable[[], bool]], T]) -> T:
    """Calls a function in a separate thread, and returns its value.

    An interruption ends the wait at once. The thread then continues, but its result is ignored.

    Args:
        function: a function with one argument, `wanted`. The call `wanted()` returns whether the
            result is still needed.

    Raises:
        BaseException: the error of the function, or the interruption of the wait.
        StoppedError: if another call was interrupted. Then this error is raised even if the
            function has just returned.
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
        raise StoppedError(
            "target on the host was stopped, because another of its calls was interrupted"
        )
    return result.result()


@contextlib.contextmanager
def heeding_ctrl_c() -> Generator[None, None, None]:
    """Lets Ctrl-C stop host calls while the main thread waits in XLA.

    While the main thread waits in XLA, Python cannot handle signals. KeyboardInterrupt is raised as
    soon as XLA returns. This context has no effect if SIGINT already has another handler, or if
    there is another wakeup file descriptor.
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
    """Calls `look` repeatedly during host calls. If `look` raises an error, all host calls stop."""
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
    # `recv` raises OSError if no signal has arrived, or if the socket is closed.
    with contextlib.suppress(OSError):
        return _ear is not None and signal.SIGINT in _ear.recv(_MOST_SIGNALS)
    return False


@contextlib.contextmanager
def stopping() -> Generator[None, None, None]:
    """Stops all host calls that are running, and all that begin inside the `with` block."""
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
    """Starts a subprocess. Ends it if the block or this process ends, or host calls are stopped."""
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
        # The counter is increased before any subprocess is ended. When a subprocess ends, the
        # waiting call compares the counter with its earlier value. So the call finds out whether
        # `_stop` ended the subprocess.
        _stops += 1
        for end in tuple(_ends):
            end()


# The origin of a database is two numbers: its role, and the index of its pair.

SPEC = jax.ShapeDtypeStruct((2,), np.uint32)


class Role(enum.IntEnum):
    """The role of a database in the sampler. It is PRIVATE (0) if no role is given."""

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


# The origin of every private database.
PRIVATE = np.zeros(SPEC.shape, SPEC.dtype)


def sampled(role: Role, pair: jax.Array) -> jax.Array:
    """Returns the origin of a sampled database.

    The origin is an array of two numbers: the role of the database, and the index of its pair.
    """
    return jnp.stack([jnp.asarray(role, SPEC.dtype), pair.astype(SPEC.dtype)])


def is_private(origin: np.ndarray) -> bool:
    """Whether an origin belongs to a private database, so that errors must not describe it."""
    return int(origin[0]) == Role.PRIVATE


class HostError(RuntimeError):
    """An error in a call to the host. XLA passes on only the text of the error."""


def fail(origins: np.ndarray, reason: str) -> NoReturn:
    """Raises an error that names the sampled databases on which a target failed."""
    role, first = (int(number) for number in origins[0])
    last = int(origins[-1][1])
    pairs = f"pair {first}" if len(origins) == 1 else f"one of the pairs {first} to {last}"
    raise HostError(f"target on the host failed on {pairs} ({_DESCRIPTIONS[Role(role)]}): {reason}")


# The last interruption: the text that XLA passes on, and the exception that caused it.
_interruption: tuple[str, BaseException | None] = "", None


def interrupted(error: BaseException) -> NoReturn:
    """Raises a `HostError` in place of an interruption; `host_errors` restores the interruption."""
    global _interruption
    text = f"target on the host was interrupted by {type(error).__name__} ({time.monotonic_ns()})"
    _interruption = text, error
    raise HostError(text) from None


@contextlib.contextmanager
def host_errors() -> Generator[None, None, None]:
    """A context that raises errors of host calls again, without JAX's traceback."""
    try:
        with heeding_ctrl_c():
            yield
    # The text of this error may contain one of the phrases below, so it must not be examined.
    except FailedElsewhereError:
        raise
    except Exception as error:
        ends = "failed on|was interrupted|was stopped"
        said = re.findall(rf"target on the host (?:{ends}).*", str(error))
        if not said:
            raise
        text, interruption = _interruption
        if text == said[-1] and interruption is not None:
            raise interruption from None
        kind = StoppedError if "was stopped" in said[-1] else RuntimeError
        raise kind(said[-1]) from None


def _is_unknown(record: logging.LogRecord) -> bool:
    """Whether to log a record. JAX logs all errors of callbacks; dpjax's own are left out."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HostError)


logging.getLogger("jax._src.callback").addFilter(_is_unknown)


@dataclasses.dataclass(eq=False)
class Tracing:
    """Information about a program while it is being traced.

    Attributes:
        origin: an input of the program. It is `PRIVATE` for a private database. For a sampled
            database, it contains the database's role in the sampler and the index of its pair.
        settings: values that determine where host calls run, but have no effect on their outputs.
    """

    origin: ArrayLike | None
    settings: list[object]


# The program that is being traced. It is a JAX user context, so it is part of the keys of JAX's
# caches. Suppose that two programs call the same `jit` function. Without this context, JAX would
# reuse the function's trace from the first program, which refers to the `origin` of the first
# program.
TRACING = jax.make_user_context(None)


def current() -> Tracing:
    """Returns facts about the program that is being traced.

    If no program is being traced, the database counts as private.
    """
    return TRACING.value or Tracing(PRIVATE, [])
