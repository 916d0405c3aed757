"""What `fit` tells a caller after each epoch, and what the caller may answer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._values import Guarantee


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The public facts of a training after one of its epochs, for `evaluate` of `fit`.

    Attributes:
        number: the number of finished epochs, at least 1.
        epochs: the number of all epochs.
        step: the number of finished steps.
        steps: the number of all steps.

    Formal guarantees:
        All facts depend on arguments and shapes alone. The sizes of the drawn batches, and how
        often gradients were clipped, are private, so they are not among them.
    """

    number: int
    epochs: int
    step: int
    steps: int
    _promised: Callable[[int], Guarantee] = dataclasses.field(repr=False, compare=False)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the parameters of the finished epochs.

        It says what was spent so far. A training that `evaluate` stops has the guarantee of all
        epochs, because results decided when to stop.
        """
        return self._promised(self.step)


def stops(answer: Any) -> bool:
    """Whether `evaluate` returned True, as a Python, NumPy or JAX boolean."""
    return (isinstance(answer, bool) or _is_scalar(answer, np.bool_)) and bool(answer)


def scores(found: Any) -> str:
    """Formats the result of `evaluate` for the progress bar: a string, a number, or a dict."""
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        return ", ".join(f"{name}={scores(score)}" for name, score in found.items())
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if is_number or _is_scalar(found, np.floating, np.integer):
        return f"{float(found):.4g}"
    return ""


def _is_scalar(found: Any, *kinds: type) -> bool:
    """Whether `found` is an array without axes whose dtype is of one of these kinds."""
    is_array = isinstance(found, (np.ndarray, np.generic, jax.Array)) and found.ndim == 0
    return is_array and any(jnp.issubdtype(found.dtype, kind) for kind in kinds)
