"""Independent records, each with a key of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _checks


@dataclasses.dataclass(frozen=True, eq=False)
class Independent:
    """An oracle of independent records, made by `independent`.

    Attributes:
        draw: takes a key to one record, a pytree of arrays without the leading axis.

    Formal guarantees:
        Records are independent and identically distributed, as far as `draw` uses its key alone.
    """

    draw: Callable[[jax.Array], Any]

    def __call__(self, key: jax.Array, n: int) -> Any:
        """Draws a database of n records."""
        return jax.vmap(self.record, in_axes=(None, 0))(key, jnp.arange(n, dtype=jnp.uint32))

    def record(self, key: jax.Array, index: jax.Array) -> Any:
        """Record number `index` of any database of this key."""
        return self.draw(jax.random.fold_in(key, index))


def independent(draw: Callable[[jax.Array], Any]) -> Independent:
    """An oracle that draws every record by itself: record i is draw(fold_in(key, i)).

    The sampler can then draw single records: for a sum over records, whose distances depend on two
    of them, that saves drawing the other n - 1.

    Args:
        draw: takes a key to one record, a pytree of arrays without the leading axis.

    Returns:
        An oracle.

    Raises:
        TypeError: if draw is not a function.

    Formal guarantees:
        The same records however many are asked for: the distances are those of drawing all of them.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, with independent records.

    Example:
        >>> import jax
        >>> import dpjax
        >>> oracle = dpjax.oracles.independent(lambda key: jax.random.normal(key, (2,)))
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5, 2)
    """
    _checks.function("draw", draw)
    return Independent(draw)
