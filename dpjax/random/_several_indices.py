"""Several private selections: of options one after the other, or of one in each row."""

import jax
from jax import lax

from dpjax.random._grid_fit import Calibration
from dpjax.random._selected_index import exponential_index


def peeled_indices(
    key: jax.Array, scores: jax.Array, calibration: Calibration, count: int
) -> jax.Array:
    """Options in the order of a race, without replacement: each by softmax of the others left.

    The k largest scores with Gumbel noise have this distribution (Plackett-Luce). Gumbel noise from
    tables would have ties, because its digits are not independent, and so no exact order. Here
    every selection is exact.

    Args:
        key: a typed key.
        scores: shape (K,); NaN counts as the lowest score.
        calibration: of a single selection.
        count: k, at most K.

    Returns:
        int32 of shape (k,); -1 for a bad scale.
    """

    def peel(taken: jax.Array, one_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = exponential_index(one_key, scores, calibration, taken)
        return taken.at[index].set(True), index

    # All false, but varying over devices as the data do: a loop under `shard_map` must start so.
    none_taken = (scores > scores) & (jax.random.key_data(key)[0] == 0)
    _, indices = lax.scan(peel, none_taken, jax.random.split(key, count))
    return indices


def indices_of_rows(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    """An option of each row, by the softmax of its scores, drawn independently.

    Args:
        key: a typed key.
        scores: shape (rows, K); NaN counts as the lowest score.
        calibration: of a single selection.

    Returns:
        int32 of shape (rows,); -1 for a bad scale.
    """
    keys = jax.random.split(key, len(scores))
    return jax.vmap(exponential_index, (0, 0, None))(keys, scores, calibration)
