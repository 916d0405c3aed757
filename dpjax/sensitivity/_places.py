"""Records that may change places: the last one must stand for all of them."""

import math

import jax
import numpy as np

from dpjax._core._types import Database

# Independent records are refused by chance in at most one of so many samplings.
_CERTAIN = math.log(1e8)


def refuse_places(databases: Database) -> None:
    """Refuses columns that each record has by its place, such as labels, in several databases.

    Independent records have the same numbers, not all alike, in all of k databases with probability
    n / (e n)^k at most: then each database has one mark, with probability 1 / n for each record.
    """
    for path, leaf in jax.tree.leaves_with_path(databases):
        k, n = leaf.shape[:2]
        if k * (1 + math.log(n)) - math.log(n) < _CERTAIN:
            continue
        columns = leaf.reshape(k, n, -1)
        fixed = np.all(_same(columns, columns[:1]), axis=(0, 1))
        if np.any(fixed & ~np.all(_same(columns[0], columns[0, :1]), axis=0)):
            raise ValueError(
                "oracle must draw records that may change places, for positions='last', got numbers"
                f" at {jax.tree_util.keystr(path) or 'its only leaf'} that are the same in every"
                " database and differ from record to record: the last record, which changes, would"
                " get nearly the same number again. Shuffle all records by jax.random.permutation,"
                " or ask for positions='average' or 'each'"
            )


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Elementwise; NaN is the same as NaN."""
    return (x == y) | ((x != x) & (y != y))
