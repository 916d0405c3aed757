"""Several private selections: of options one after the other, or of one in each row."""

import jax
from jax import lax

from dpjax._core import _checks
from dpjax.random._grid_fit import Calibration
from dpjax.random._release import resized, shares_programs
from dpjax.random._selected_index import exponential_index

_LEAST_ROWS = 4


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
    traced = any(map(_checks.is_traced, (key, scores, *jax.tree.leaves(calibration))))
    if traced or not shares_programs(scores):
        return _indices_of_rows(key, scores, calibration)
    # The key and the index of a row do not depend on the number of rows, so values of several
    # counts share a program.
    count, options = scores.shape
    rows = max(_LEAST_ROWS, 2 ** (count - 1).bit_length())
    scores = resized(scores, size=rows * options, shape=(rows, options))
    indices = _indices_of_rows(key, scores, calibration)
    return resized(indices, size=count, shape=(count,))


@jax.jit
def _indices_of_rows(key: jax.Array, scores: jax.Array, calibration: Calibration) -> jax.Array:
    keys = jax.random.split(key, len(scores))
    return jax.vmap(exponential_index, (0, 0, None))(keys, scores, calibration)
