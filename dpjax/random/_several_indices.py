"""Several private selections: of options one after the other, or of one in each row."""

import jax
from jax import lax

from dpjax.random._grid_fit import Calibration
from dpjax.random._selected_index import exponential_index


def peeled_indices(
    key: jax.Array, scores: jax.Array, calibration: Calibration, count: int
) -> jax.Array:
    """`count` options without replacement, in order: each by softmax of the options left.

    The k largest scores with Gumbel noise have this distribution (Plackett-Luce). Gumbel noise from
    tables would have ties, because its digits are not independent, and so no exact order. Here
    every selection is exact. The calibration is that of one selection. A bad scale gives -1.
    """

    def peel(taken: jax.Array, one_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = exponential_index(one_key, scores, calibration, taken=taken)
        return taken.at[index].set(True), index

    # All false, but varying over devices as the data do: a loop under `shard_map` must start so.
    none_taken = (scores > scores) & (jax.random.key_data(key)[0] == 0)
    _, indices = lax.scan(peel, none_taken, jax.random.split(key, count))
    return indices


def indices_of_rows(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    """An option of each row of scores, by softmax, independently; -1 for a bad scale."""
    keys = jax.random.split(key, len(scores))
    return jax.vmap(exponential_index, (0, 0, None))(keys, scores, calibration)
