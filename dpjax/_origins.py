"""Where a database comes from: what a target that runs on the host has to know.

Where it fails, a sampled database must be named in an error, and a private one must not show. A
compiled program knows nothing of its caller, so the origin travels as data: a first input that
programs with calls to the host have, see `dpjax._programs`.
"""

import contextlib
import enum
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

SPEC = jax.ShapeDtypeStruct((2,), np.uint32)


class Role(enum.IntEnum):
    """What a database is to the sampler; private by default, which is the safe mistake."""

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


def private() -> np.ndarray:
    """The origin of a database that nothing may be said about."""
    return np.zeros(SPEC.shape, SPEC.dtype)


def sampled(role: Role, pair: jax.Array) -> jax.Array:
    """The origin of a database that the sampler drew."""
    return jnp.stack([jnp.asarray(role, SPEC.dtype), pair.astype(SPEC.dtype)])


def is_private(origin: Any) -> bool:
    """Whether nothing may be said about a database."""
    return int(origin[0]) == Role.PRIVATE


def fail(origin: Any, reason: str) -> NoReturn:
    """Raises what a target that failed on a sampled database has to say."""
    role, pair = (int(number) for number in origin)
    raise RuntimeError(f"host target failed on pair {pair} ({_DESCRIPTIONS[Role(role)]}): {reason}")


@contextlib.contextmanager
def failures_in_short() -> Iterator[None]:
    """Takes the message of `fail` out of JAX's account of how it was called."""
    try:
        yield
    except Exception as error:
        said = re.search(r"host target failed on pair .*", str(error))
        if said is None:
            raise
        raise RuntimeError(said.group()) from None


class Tracing:
    """A program that is being traced.

    Attributes:
        origin: its input of that name.
        settings: what decides where calls to the host run, but not what they return.
    """

    def __init__(self, origin: Any, settings: list[Any]):
        self.origin = origin
        self.settings = settings

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that may ask what is being traced."""
        try:
            with _current(self):
                return function(*arguments)
        finally:
            self.origin = None  # JAX's caches keep this object, and it kept what was traced.


# Part of what JAX's caches go by: a function under `jit` inside a target is traced anew for every
# program, or it would keep the origin of the first.
_current = jax.make_user_context(None)


def current() -> Tracing:
    """The program that is being traced; outside of one, databases count as private."""
    return _current.value or Tracing(private(), [])
