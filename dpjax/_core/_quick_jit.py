"""Programs of integers that XLA compiles in half of the time on a CPU, and runs as fast."""

from collections.abc import Callable
from typing import Any

import jax

from dpjax._core._checks import is_staging, is_traced

# Fusion emitters and the last level of LLVM make programs of noise no faster. Integers have the
# same bits under all options.
_OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_use_fusion_emitters": False,
}


class QuickJit:
    """A compiled function. Inside another program it is a part of that one."""

    def __init__(self, function: Callable[..., Any], *, static: tuple[str, ...] = ()):
        """Some arguments by keyword are static."""
        # JAX keeps what it traced of the inner function for both.
        self._inside = jax.jit(function, static_argnames=static)
        self._quick = jax.jit(self._inside, static_argnames=static, compiler_options=_OPTIONS)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The value of the function."""
        leaves = jax.tree.leaves((arguments, named))
        # Under `grad` or `vmap` alone nothing is recorded, but the function is no whole program.
        traced = any(map(is_traced, leaves))
        return (self._inside if traced else self._chosen())(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """The function as XLA gets it, for arguments of these shapes."""
        return self._chosen().lower(*arguments, **named)

    def _chosen(self) -> Any:
        # JAX takes options for whole programs only, and those of a CPU only there.
        is_whole = jax.default_backend() == "cpu" and not is_staging()
        return self._quick if is_whole else self._inside
