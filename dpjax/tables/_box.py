"""Several columns as vectors in a ball: the box of their bounds, scaled into it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax.tables._bounds import Bounds, bounds_of
from dpjax.tables._frame import Frame


@dataclasses.dataclass(frozen=True)
class Box:
    """The bounds of some columns.

    Attributes:
        columns: by name.
        lower: the lower ends.
        upper: the upper ends.
    """

    columns: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray

    @property
    def middle(self) -> np.ndarray:
        """Of the box, and of the ellipsoid around it."""
        return self.lower / 2 + self.upper / 2

    @property
    def size(self) -> np.ndarray:
        """The half-axes of the ellipsoid that goes through the corners of the box."""
        return (self.upper / 2 - self.lower / 2) * math.sqrt(len(self.columns))

    @property
    def facts(self) -> dict[str, Any]:
        """The ellipsoid in JSON."""
        return {"middle": self.middle.tolist(), "size": self.size.tolist()}

    def vectors(self, frame: Frame) -> np.ndarray:
        """The rows, each number clipped to its bounds, in units that make the ellipsoid a ball.

        Each number is computed from its own entry alone. A missing one counts as its lower end.
        """
        numbers = np.stack([frame[name].numbers_or_nan() for name in self.columns], axis=1)
        clipped = np.clip(np.where(np.isnan(numbers), self.lower, numbers), self.lower, self.upper)
        return ((clipped - self.middle) / self.size).astype(jnp.result_type(float))


def box_of(columns: Sequence[str], bounds: Bounds, frame: Frame) -> Box:
    """The bounds of some columns, each with its own."""
    lower, upper = np.array([bounds_of(name, bounds, frame) for name in columns]).T
    return Box(tuple(columns), lower, upper)
