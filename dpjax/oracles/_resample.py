"""Oracles fitted to public records."""

from typing import Any

import jax
import jax.numpy as jnp

from dpjax._records import record_arrays
from dpjax.base import Oracle


def resample(records: Any) -> Oracle:
    """The bootstrap oracle: draws n records uniformly, with replacement, from public ones.

    Args:
        records: a pytree of arrays with a common leading axis: public records, at least 2. A
            DataFrame counts as the dict of its columns.

    Returns:
        An `Oracle`: `oracle(key, n)` draws a database of n independent records.

    Raises:
        TypeError: if the records are not real arrays.
        ValueError: if they have no common leading axis, or fewer than 2 records.

    Formal guarantees:
        A guarantee under this oracle speaks of the public records, not of the population that they
        came from: a private record unlike any of them is not covered. Each of p public records is
        the replaced or the replacing one in about 2/p of the pairs, so a larger gamma may leave
        one of them out altogether.

    Source:
        Efron (1979); Rubinstein and Aldà (2017), Remark 7, on choosing an oracle.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> oracle = dpjax.oracles.resample({"age": jnp.array([31.0, 44.0, 58.0])})
        >>> oracle(dpjax.random.seeded_key(0), 5)["age"].shape
        (5,)
    """
    public, count = record_arrays("records", records, least=2)

    def oracle(key: jax.Array, n: int) -> Any:
        # Uniform to within count / 2^32, from half the words that `randint` takes.
        chosen = jax.random.bits(key, (n,), jnp.uint32) % jnp.uint32(count)
        return jax.tree.map(lambda leaf: jnp.take(leaf, chosen, axis=0), public)

    return oracle
