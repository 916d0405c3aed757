"""Many outputs of a mechanism: one program per batch, the memory of a batch bounded."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._pytree import TreeSpec
from dpjax._core._values import Release, is_mechanism

# Few sizes, so that audits with different numbers of samples share compiled programs.
_BATCHES = (2**10, 2**14, 2**17)
# Numbers in one batch, and in each of the parts that are kept in memory to learn from.
_MOST_NUMBERS = 2**24


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """How the samples of one value are spent.

    Attributes:
        batch: outputs per compiled program.
        learning: outputs that propose events, and as many others that choose among them.
        bounding: outputs that bound the probabilities of the chosen one.

    Formal guarantees:
        The parts are disjoint.
    """

    batch: int
    learning: int
    bounding: int


class Sampler:
    """Runs a mechanism under many keys.

    Attributes:
        mechanism: `mechanism(key, value)`, a release or any pytree of real arrays.

    Formal guarantees:
        Outputs of different keys are independent, as far as keys are.
    """

    def __init__(self, mechanism: Callable[[jax.Array, Any], Any], jit: bool) -> None:
        """Takes a mechanism, to be compiled or not; nothing is run yet."""
        self.mechanism = mechanism
        # The mechanism is a constant of the program: with its parameters known, it draws as it
        # does outside of `jit`.
        compiled = jax.jit(self._trace_outputs, static_argnames="size")
        self._outputs = compiled if jit else self._trace_outputs
        self._log_ratios = jax.jit(self._trace_log_ratios)

    @property
    def has_log_prob(self) -> bool:
        """Whether the mechanism states its distribution."""
        return is_mechanism(self.mechanism)

    def plan(self, key: jax.Array, value: Any, neighbor: Any, samples: int) -> SamplePlan:
        """Spends the samples; refuses outputs that cannot be compared."""
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

    def batches(self, key: jax.Array, value: Any, count: int, size: int) -> Iterator[Any]:
        """Outputs under independent keys, as NumPy arrays with a leading axis."""
        for i, batch_key in enumerate(jax.random.split(key, math.ceil(count / size))):
            outputs = jax.device_get(self._outputs(batch_key, value, size=size))
            left = count - i * size
            yield jax.tree.map(lambda leaf, left=left: leaf[:left], outputs)

    def draw(self, key: jax.Array, value: Any, count: int, size: int) -> Any:
        """The batches in one."""
        batches = list(self.batches(key, value, count, size))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)

    def log_ratios(self, outputs: Any, value: Any, neighbor: Any, size: int) -> np.ndarray:
        """Log likelihood of every output under value, minus that under neighbor."""
        count = len(jax.tree.leaves(outputs)[0])
        found = []
        for start in range(0, count, size):
            # The last batch is filled up, for the same program to serve.
            rows = np.minimum(np.arange(start, start + size), count - 1)
            batch = jax.tree.map(lambda leaf, rows=rows: np.asarray(leaf)[rows], outputs)
            found.append(np.asarray(self._log_ratios(batch, value, neighbor), float))
        return np.concatenate(found)[:count]

    def _release(self, key: jax.Array, value: Any) -> Any:
        output = self.mechanism(key, value)
        output = output.value if isinstance(output, Release) else output
        return jax.tree.map(jnp.asarray, output)

    def _trace_outputs(self, key: jax.Array, value: Any, size: int) -> Any:
        return jax.vmap(self._release, in_axes=(0, None))(jax.random.split(key, size), value)

    def _trace_log_ratios(self, outputs: Any, value: Any, neighbor: Any) -> jax.Array:
        assert is_mechanism(self.mechanism)
        log_prob = jax.vmap(self.mechanism.log_prob, in_axes=(0, None))
        return log_prob(outputs, value) - log_prob(outputs, neighbor)


def _width(output: Any) -> int:
    leaves = jax.tree.leaves(output)
    for leaf in leaves:
        number = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
        if not (number or leaf.dtype == bool):
            raise TypeError(f"mechanism must give real arrays, got dtype {leaf.dtype}")
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("mechanism must give at least one number, got none")
    return sum(leaf.size for leaf in leaves)
