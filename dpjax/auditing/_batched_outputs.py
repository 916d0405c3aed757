"""Many outputs of a mechanism, in batches of bounded memory."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Key, Value
from dpjax._core._values import Release

# Few sizes, so that audits with different numbers of samples share compiled programs.
_BATCHES = (2**10, 2**14, 2**17)
# The most numbers in one batch, and in each sample that events are learned from.
_MOST_NUMBERS = 2**24


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """The numbers of samples of one value for each use. The uses share no samples."""

    batch: int  # Outputs per compiled program.
    learning: int  # Outputs that propose events; as many others choose among them.
    bounding: int  # Outputs that bound the probabilities of the chosen events.


class Sampler:
    """Runs `mechanism(key, value)`, which gives a release or a tree of arrays, under many keys."""

    def __init__(self, mechanism: Callable[[Key, Value], Release | Value], jit: bool) -> None:
        """Takes a mechanism, and compiles it at its first use if `jit` is True."""
        self.mechanism = mechanism
        # The mechanism is a constant of the program. So its parameters are known, and it draws as
        # it does outside of `jit`.
        compiled = jax.jit(self._trace_outputs, static_argnames="size")
        self._outputs = compiled if jit else self._trace_outputs
        self._log_ratios = jax.jit(self._trace_log_ratios)

    @property
    def has_log_prob(self) -> bool:
        """Whether the mechanism states its distribution."""
        return hasattr(self.mechanism, "log_prob")

    def plan(self, key: Key, value: Value, neighbor: Value, samples: int) -> SamplePlan:
        """Divides the samples among their uses; refuses outputs that cannot be compared."""
        output, other = (jax.eval_shape(self._release, key, x) for x in (value, neighbor))
        if TreeSpec.of(output) != TreeSpec.of(other):
            raise ValueError(
                "mechanism must give outputs of one shape and dtype for value and neighbor, got"
                f" {TreeSpec.of(output)} and {TreeSpec.of(other)}"
            )
        width = _width(output)
        most = max(1, _MOST_NUMBERS // width)
        learning = min(samples // 4, most)
        fitting = [size for size in _BATCHES if size <= min(learning, most)]
        return SamplePlan(
            max(fitting, default=min(_BATCHES[0], most)), learning, samples - 2 * learning
        )

    def batches(self, key: Key, value: Value, count: int, size: int) -> Iterator[Value]:
        """Outputs under independent keys, as NumPy arrays with a leading axis."""
        for i, batch_key in enumerate(jax.random.split(key, math.ceil(count / size))):
            outputs = jax.device_get(self._outputs(batch_key, value, size=size))
            yield rows_of(outputs, slice(count - i * size))

    def draw(self, key: Key, value: Value, count: int, size: int) -> Value:
        """The same outputs as one batch."""
        return joined(list(self.batches(key, value, count, size)))

    def log_ratios(self, outputs: Value, value: Value, neighbor: Value, size: int) -> np.ndarray:
        """Log likelihood of every output under value, minus that under neighbor."""
        count = len(jax.tree.leaves(outputs)[0])
        found: list[np.ndarray] = []
        for start in range(0, count, size):
            # Repeated rows fill the last batch, so that it runs the same program.
            rows = np.minimum(np.arange(start, start + size), count - 1)
            batch = rows_of(outputs, rows)
            found.append(np.asarray(self._log_ratios(batch, value, neighbor), float))
        return np.concatenate(found)[:count]

    def _release(self, key: Key, value: Value) -> Value:
        output = self.mechanism(key, value)
        output = output.value if isinstance(output, Release) else output
        return jax.tree.map(jnp.asarray, output)

    def _trace_outputs(self, key: Key, value: Value, size: int) -> Value:
        return jax.vmap(self._release, in_axes=(0, None))(jax.random.split(key, size), value)

    def _trace_log_ratios(self, outputs: Value, value: Value, neighbor: Value) -> jax.Array:
        log_prob = jax.vmap(getattr(self.mechanism, "log_prob"), in_axes=(0, None))  # noqa: B009
        return log_prob(outputs, value) - log_prob(outputs, neighbor)


def rows_of(batch: Value, rows: int | slice | np.ndarray) -> Value:
    """Some rows of a batch of outputs, or one."""
    leaves, structure = jax.tree.flatten(batch)
    return jax.tree.unflatten(structure, [np.asarray(leaf)[rows] for leaf in leaves])


def joined(batches: list[Value]) -> Value:
    """Several batches as one."""
    leaves = zip(*map(jax.tree.leaves, batches), strict=True)
    structure = jax.tree.structure(batches[0])
    return jax.tree.unflatten(structure, [np.concatenate(parts) for parts in leaves])


def _width(output: Value) -> int:
    """The number of numbers in an output."""
    leaves = jax.tree.leaves(output)
    for leaf in leaves:
        number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
        if not (number or leaf.dtype == bool):
            raise TypeError(f"mechanism must give real arrays, got dtype {leaf.dtype}")
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("mechanism must give at least one number, got none")
    return sum(leaf.size for leaf in leaves)
