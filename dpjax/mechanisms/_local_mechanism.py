"""The base of mechanisms that everybody runs on an answer of their own."""

import abc

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax.mechanisms._mechanism import SensitivityMechanism, count
from dpjax.random._facade import in_range


class LocalMechanism(SensitivityMechanism):
    """A mechanism whose value holds an answer of each person, and which draws for each by itself.

    Attributes:
        sensitivity: one answer changes, norm "hamming".
        epsilon: of the guarantee.
        categories: number of possible answers.

    Formal guarantees:
        None of its own.
    """

    sensitivity: Sensitivity
    epsilon: Scalar
    categories: int

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity."""
        return "hamming"

    @property
    @abc.abstractmethod
    def report_weights(self) -> tuple[int, int]:
        """2^32 times the probability of a report, where it is true and where it is not."""

    @abc.abstractmethod
    def _draw_answers(self, key: Key, answers: jax.Array) -> jax.Array:
        """What is reported for an array of answers."""

    def _draw(self, key: Key, value: Value) -> Value:
        leaves, structure = jax.tree.flatten(value)
        keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
        reported = [
            self._draw_answers(leaf_key, leaf) for leaf_key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, reported)

    def _check_value(self, value: Value) -> None:
        for leaf in jax.tree.leaves(value):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"value must hold integer categories, got dtype {leaf.dtype}")

    def _number_of_answers(self, shape: tuple[int, ...] | None, like: PyTree) -> int:
        if like is None:
            return count(() if shape is None else shape)
        if shape is not None:
            raise ValueError(f"like has shapes and dtypes of its own: leave out shape={shape}")
        value = _checks.real_shapes("like", like)
        self._check_value(value)
        return sum(leaf.size for leaf in jax.tree.leaves(value))

    def clamped(self, value: Value) -> Value:
        """Answers as they are kept or lied about: clamped to [0, categories).

        Args:
            value: a pytree of integers.

        Returns:
            A pytree of the same structure and shapes, as private as the value.
        """
        value = _checks.real_arrays("value", value)
        return jax.tree.map(lambda x: in_range(x, self.categories), value)
