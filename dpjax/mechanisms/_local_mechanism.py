"""The base of mechanisms that each person runs on an answer of their own."""

import abc

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree, Value
from dpjax._core._values import Norm, Scalar, Sensitivity
from dpjax.mechanisms._start import count
from dpjax.random._facade import in_range
from dpjax.release._mechanism import SensitivityMechanism


class LocalMechanism(SensitivityMechanism):
    """A mechanism whose value holds one answer of each person, and which draws for each alone."""

    sensitivity: Sensitivity
    epsilon: Scalar
    categories: int
    norm: Norm = "hamming"

    @property
    @abc.abstractmethod
    def report_weights(self) -> tuple[int, int]:
        """2^32 times the probability of a report about its own category, and about another."""

    @abc.abstractmethod
    def _draw_answers(self, key: Key, answers: jax.Array) -> jax.Array:
        """The reports for an array of answers."""

    @abc.abstractmethod
    def _most_lies(self, confidence: float, answers: int) -> float:
        """A number of lies among the reports of some answers that is kept at a confidence."""

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

    def lies(
        self,
        *,
        confidence: float = 0.95,
        shape: tuple[int, ...] | None = None,
        like: PyTree = None,
        simultaneous: bool = False,
    ) -> int:
        """The most lies in the report of one answer, or of all answers of a shape, at a confidence.

        Args:
            confidence: the probability, at least, that there are no more; in (0, 1).
            shape: shape of the value.
            like: instead of a shape, a pytree of arrays or `jax.ShapeDtypeStruct`s.
            simultaneous: over all the answers, instead of for each one of them.

        Returns:
            An integer. For bits, a lie is a bit that differs from the truth.
        """
        confidence = _checks.fraction("confidence", confidence)
        if like is None:
            answers = count(() if shape is None else shape)
        elif shape is not None:
            raise ValueError(f"like has shapes and dtypes of its own: leave out shape={shape}")
        else:
            value = _checks.real_shapes("like", like)
            self._check_value(value)
            answers = sum(leaf.size for leaf in jax.tree.leaves(value))
        return int(self._most_lies(confidence, answers if simultaneous else 1))

    def clamped(self, value: Value) -> Value:
        """The answers that are reported on: clamped to [0, categories).

        Args:
            value: a pytree of integers.

        Returns:
            A pytree of the same structure and shapes, as private as the value.
        """
        value = _checks.real_arrays("value", value)
        return jax.tree.map(lambda x: in_range(x, self.categories), value)
