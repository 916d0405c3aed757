"""`jax.jit` of functions that take programs, which keeps what is compiled of the last ones.

JAX itself keeps some megabytes for each of 4096 programs: a process that samples and releases one
target after the other would grow without end.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")

_MOST_KEPT = 64


class KeptJit(Generic[T]):
    """A compiled function, some of whose arguments by keyword are static."""

    def __init__(
        self, function: Callable[..., T], static: tuple[str, ...], donate: tuple[int, ...]
    ):
        """Of the arrays by position, those that are donated are used up."""
        self._static = static

        @functools.lru_cache(_MOST_KEPT)
        def compiled(values: tuple[object, ...]) -> Any:
            known: Any = dict(zip(static, values, strict=True))

            def run(*arguments: Any, **named: Any) -> T:
                return function(*arguments, **named, **known)

            run.__name__ = run.__qualname__ = function.__name__
            return jax.jit(run, donate_argnums=donate)

        self._compiled = compiled

    def _of(self, named: dict[str, Any]) -> Any:
        return self._compiled(tuple(named.pop(name) for name in self._static))

    def __call__(self, *arguments: Any, **named: Any) -> T:
        """What the function returns."""
        return self._of(named)(*arguments, **named)

    def trace(self, *arguments: Any, **named: Any) -> jax.stages.Traced:
        """The function traced for arguments of these shapes."""
        return self._of(named).trace(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """The same as XLA gets it."""
        return self._of(named).lower(*arguments, **named)


def kept_jit(
    *static: str, donate: tuple[int, ...] = ()
) -> Callable[[Callable[..., T]], KeptJit[T]]:
    """Compiles a function, and keeps that for the last 64 values of its static arguments."""
    return lambda function: KeptJit(function, static, donate)
