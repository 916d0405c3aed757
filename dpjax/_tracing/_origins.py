"""The origin of a database, for targets that run on the host.

If such a target fails, an error must name a sampled database, and must not show a private one. A
compiled program does not know its caller, so the origin travels as data. Programs that call the
host have it as their first input, see `dpjax._tracing._programs`.
"""

import contextlib
import dataclasses
import enum
import logging
import re
import time
from collections.abc import Generator
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._tracing._interruptions import FailedElsewhereError, StoppedError, heeding_ctrl_c

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
