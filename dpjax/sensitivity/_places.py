"""Records that may change places: the last one must stand for all of them."""

import math

import jax
import numpy as np
import scipy

from dpjax._core._types import Database

# Independent records are refused by chance in at most one of so many samplings.
_CERTAIN = math.log(1e8)
# The chance to refuse distances of exchangeable records at one of the three looks at them.
_CHANCE = 3e-7


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


def refuse_last(elsewhere: np.ndarray, limit: float, *, m: int, k: int, looks: int = 1) -> None:
    """Refuses records of which the last one moves the target less than others do.

    Args:
        elsewhere: how far replacing the record at a random position moves the target, on the first
            of m databases.
        limit: the k-th smallest distance at the last position, of all m; or a number above it.
        m: number of databases.
        k: rank of the limit.
        looks: at how many m, at most, this is asked.
    """
    beyond = int(np.sum(elsewhere > limit))
    if chance_of_as_many(beyond, len(elsewhere), m, k) < _CHANCE / looks:
        raise ValueError(
            "oracle must draw exchangeable records, for positions='last', but replacing a record at"
            f" a random position moved the target by more than {limit:.3g} on {beyond} of"
            f" {len(elsewhere)} databases, and replacing the last one on at most {m - k} of {m}."
            " Sorted records, time series, and classes one after the other are not exchangeable:"
            " ask for positions='average' or 'each', or shuffle all records by"
            " jax.random.permutation"
        )


def chance_of_as_many(beyond: int, probed: int, m: int, k: int) -> float:
    """Bounds the chance that so many distances at random positions exceed the k-th at the last one.

    For exchangeable records and any target; docs/proofs/shorter.md has the proof. A tie counts as
    not beyond, which lowers the chance.

    Args:
        beyond: how many do.
        probed: how many distances there are at random positions; one for each of the first pairs.
        m: number of pairs.
        k: rank of the distance at the last position, of all m pairs.
    """
    by_signs = float(scipy.special.bdtr(min(m - k, beyond), beyond, 0.5))
    top = m - k + beyond
    if k <= probed or beyond * m <= probed * top:  # The latter: no more than are expected.
        return by_signs
    of_top = np.arange(max(beyond, probed - (m - top)), min(probed, top) + 1)
    logs = _log_choose(top, of_top) + _log_choose(m - top, probed - of_top)
    by_ranks = np.sum(np.exp(logs - _log_choose(m, np.array(probed))))
    return min(by_signs, float(by_ranks))


def _log_choose(n: int, k: np.ndarray) -> np.ndarray:
    return -np.log1p(n) - scipy.special.betaln(k + 1.0, n - k + 1.0)
