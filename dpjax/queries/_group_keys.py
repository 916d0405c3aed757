"""Releases the keys of groups that enough people are in, if the set of keys is private.

docs/proofs/groups.md has the proof.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._columns import Texts, as_text
from dpjax._core._frames import exact_column, texts_of
from dpjax._core._guarantee import RECORD, check_privacy_unit
from dpjax._core._open_ledgers import Request, relation_or_inherited
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import PaddedRecords, Parts, exact_records
from dpjax._core._types import Database, Key
from dpjax._core._values import NeighboringRelation, Release
from dpjax._tracing._fingerprints import digest
from dpjax.mechanisms._additive import AdditiveMechanism, discrete_laplace
from dpjax.queries._groups import integer_keys
from dpjax.queries._padded_records import check_capacity
from dpjax.queries._people import Contribution
from dpjax.random._keys import check_key, split_on_host
from dpjax.random._release import add_noise
from dpjax.release._draw import draw_of
from dpjax.release._transaction import guarantee_under, pay_and_draw
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity

# This factor covers the errors of the tables from which noise is drawn, and the rounding of its
# scale to float32.
_OUTWARD = 1 + 2.0**-18
# Noisy counts are clamped to at most this number, so that they are int32.
_LARGEST_COUNT = 2**31 - 2
_SIGN = np.uint64(2**63)
# Noise is added to the counts in chunks of this size. If that would need more than 64 chunks, which
# would be slow, larger chunks are used.
_CHUNK, _MANY, _LARGE_CHUNK = 2**11, 64, 2**16


class WithCounts(NamedTuple):
    """A column of a table, whose keys are released together with their noisy counts.

    Attributes:
        database: the key of each row of the table, encoded as integers, its words: uint32 of
            shape (slots, words), as one `PaddedRecords` or as `Parts`.
        named: converts the words of published keys to these keys.
        are_numbers: whether keys are integers.
        people: how many rows of a person are used, all with different keys; None if neighbors
            differ in one row.
    """

    database: PaddedRecords | Parts
    named: Callable[[np.ndarray], Sequence[Any]]
    are_numbers: bool
    people: Contribution | None = None


def group_keys(
    key: Key,
    column: ArrayLike,
    *,
    epsilon: float,
    delta: float,
    at_most: int = 1,
    capacity: int | None = None,
    relation: NeighboringRelation | None = None,
    privacy_unit: str = RECORD,
    name: str | None = None,
) -> Release:
    """The keys that occur for enough people, in a column without a public list of keys.

    Every existing group gets a noisy count. Its key is published if the noisy count reaches a
    threshold. A group without people is never published.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        column: integers or texts, shape (n,), one for each person; or (n, m), the groups that a
            person is in, with missing texts or NaN in empty places.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee, above 0.
        at_most: a public number. A person counts in at most this many groups: the first distinct
            ones in the person's row.
        capacity: under add-or-remove-one, a public bound on n, as for `padded_records`; n may be 0.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.
        privacy_unit: the unit of a row of the column, as in `Guarantee`: "person (id)" if you
            put all groups of a person, from a longer table, into one row.
        name: identifies these records for a `dpjax.Ledger`, as in `dpjax.privatize`.

    Returns:
        A `Release` of a tuple of keys in increasing order, which may be empty. `queries.by` accepts
        it as keys.

    Raises:
        TypeError: if the column does not contain integers or texts, a parameter is not a number, or
            the key is not a typed key.
        ValueError: if a parameter is out of range, or the column has another shape. Also if a
            capacity is given although n is public, or not given although n is private.

    Formal guarantees:
        (epsilon, delta)-DP under the relation. Let c be the smaller of `at_most` and m, and twice
        as large under replace-one. Counts get discrete Laplace noise of scale b = c / epsilon. With
        a = exp(-1 / b), the threshold is about 2 + b ln(c / ((1 + a) delta)). A group of one person
        reaches it with probability at most delta / c. A group of s people is missed with
        probability a^(s - threshold + 1) / (1 + a), if s is at least the threshold. Texts are
        compared by 128 bits of a hash: two texts whose hashes agree in all bits would count as one
        key.

    Source:
        Korolova, Kenthapadi, Mishra and Ntoulas, "Releasing search queries and clicks privately"
        (2009); Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson, "Differentially
        private SQL with bounded user contribution" (2020).

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> from dpjax import queries
        >>> cities = np.repeat(["Bonn", "Ulm", "Kiel"], [500, 300, 1])
        >>> queries.group_keys(
        ...     dpjax.random.seeded_key(0), cities, epsilon=1.0, delta=1e-6
        ... ).value
        ('Bonn', 'Ulm')
    """
    given: Any = column
    check_key(key)
    relation = relation_or_inherited(relation)
    delta = _checks.fraction("delta", delta)
    at_most = _checks.integer("at_most", at_most, least=1)
    people = given.people if isinstance(given, WithCounts) else None
    contribution = people or Contribution(1, 1, privacy_unit, ())
    check_privacy_unit(contribution.privacy_unit)
    if isinstance(given, WithCounts) and isinstance(given.database, Parts):
        given.database.check(relation, contribution.privacy_unit)
    is_public = relation is NeighboringRelation.REPLACE_ONE and people is None
    counted = _counted(given, capacity, at_most, is_public=is_public)
    at_most = min(at_most, counted.shape[0])
    reach = at_most * (2 if relation is NeighboringRelation.REPLACE_ONE else 1)
    reach *= contribution.rows * contribution.blocks
    sensitivity = assume_sensitivity(reach, norm="l1", relation=relation)
    sensitivity = dataclasses.replace(sensitivity, **contribution.about)
    mechanism = discrete_laplace(sensitivity, epsilon)
    size = jax.ShapeDtypeStruct((counted.size,), jnp.int32)
    draw_of(mechanism, TreeSpec.of(size))  # Refuses a bad mechanism before anything is paid.
    if delta / reach == 0:
        raise ValueError(
            f"delta={delta} is too small: divided by {reach}, the number of groups that a person "
            "changes, it underflows to 0"
        )
    threshold = _threshold(mechanism, size, delta / reach)
    if threshold > _LARGEST_COUNT:
        raise ValueError(f"epsilon={epsilon} is too small: the threshold would be {threshold}")

    def draw() -> dict[str, np.ndarray]:
        of_group, counts = counted.compute()
        noisy = _noisy(key, counts, mechanism, size.shape[0])
        published = (counts > 0) & (noisy >= threshold)
        keys = zip(counted.named(of_group[published]), noisy[published], strict=True)
        # Keys are encoded as integer words. A first pass over the batches counts the encoded keys,
        # and a second pass finds the text of each key. If the batches have changed in between, a
        # text may be missing (None).
        return _as_arrays(sorted((key, count) for key, count in keys if key is not None))

    about = (size.shape, counted.shape, counted.are_numbers, at_most, epsilon, delta)
    about = (*about, str(relation), privacy_unit if people is None else people)
    release = pay_and_draw(
        draw,
        key,
        (mechanism, counted.used),
        guarantee=guarantee_under(key, dataclasses.replace(mechanism.guarantee, delta=delta)),
        what="group keys",
        name=name,
        request=lambda name: _request(name, about),
    )
    keys, counts = _from_arrays(release.value, counted.are_numbers)
    found = (keys, counts) if isinstance(given, WithCounts) else keys
    return Release(found, release.guarantee)


class _Counted(NamedTuple):
    """How the keys of a column are counted. A key is encoded as one or more integers, its words.

    Attributes:
        compute: returns the words of each distinct key, in increasing order, and its count. It
            is called after payment.
        named: converts the words of published keys to these keys.
        are_numbers: whether keys are integers.
        size: the number of counts, which is public. If there are fewer keys, the remaining
            counts are 0.
        shape: how many keys a row has, and the number of words of a key.
        used: the arrays of the column.
    """

    compute: Callable[[], tuple[np.ndarray, np.ndarray]]
    named: Callable[[np.ndarray], Sequence[Any]]
    are_numbers: bool
    size: int
    shape: tuple[int, ...]
    used: Any


def _counted(
    given: ArrayLike | WithCounts, capacity: int | None, at_most: int, *, is_public: bool
) -> _Counted:
    """Checks a column, and returns how its keys are counted."""
    if not isinstance(given, WithCounts):
        texts, words, known = _entries(given)
        named, are_numbers = functools.partial(_named, texts, words), texts is None
    else:
        named, are_numbers, database = given.named, given.are_numbers, given.database
        if isinstance(database, Parts):
            shape = (1, np.shape(database.like.records)[1])
            count = functools.partial(distinct_in_parts, database)
            return _Counted(count, named, are_numbers, database.slots, shape, ())
        words = np.asarray(database.records)[:, None]
        known = np.asarray(database.present)[:, None]
    slots = _slots(len(words), capacity, is_public=is_public)
    empty = ((0, slots - len(words)), (0, 0))
    padded, taken = np.pad(words, (*empty, (0, 0))), np.pad(known, empty)
    return _Counted(
        lambda: _sorted_counts(padded, taken, at_most=at_most),
        named,
        are_numbers,
        taken.size,
        words.shape[1:],
        (padded, taken),
    )


def _request(name: str | None, about: tuple[object, ...]) -> Request | None:
    if name is None:
        return None
    like = {part: jax.ShapeDtypeStruct((0,), jnp.uint8) for part in ("keys", "ends", "counts")}
    return Request(name, digest("group keys", name, about), TreeSpec.of(like))


def _as_arrays(keys: Sequence[tuple[int | str, int]]) -> dict[str, np.ndarray]:
    """Encodes keys and their noisy counts.

    Ledgers store only arrays. So the keys are joined into one array of bytes, and `ends` contains
    the index at which each key ends.
    """
    texts = [str(key).encode("utf-8", "surrogatepass") for key, _ in keys]
    ends = np.cumsum([0, *map(len, texts)])[1:].astype(np.int32)
    flat = np.frombuffer(b"".join(texts), np.uint8)
    return {"keys": flat, "ends": ends, "counts": np.array([n for _, n in keys], np.int32)}


def _from_arrays(kept: dict[str, np.ndarray], are_numbers: bool) -> tuple[Any, np.ndarray]:
    """Decodes arrays made by `_as_arrays`.

    Returns the keys in increasing order, and their noisy counts.
    """
    flat, ends = np.asarray(kept["keys"]).tobytes(), np.asarray(kept["ends"]).tolist()
    texts = [
        flat[start:end].decode("utf-8", "surrogatepass")
        for start, end in itertools.pairwise([0, *ends])
    ]
    keys = tuple(map(int, texts)) if are_numbers else tuple(texts)
    return keys, np.asarray(kept["counts"])


def _entries(column: ArrayLike) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Returns the entries of n people with m entries each, as three arrays.

    These are the texts of shape (n, m), or None for numbers; integers of shape (n, m, words) that
    identify each entry; and a mask of shape (n, m) that is false at missing entries.
    """
    _checks.host_only("group_keys", column, "public keys")
    found = exact_column("column", column)
    if isinstance(found, Texts):
        texts, words = texts_of(column), np.asarray(found.words)
        known = np.any(words != 0, axis=-1)
    else:
        numbers, _ = exact_records("column", found, least=0)
        with jax.enable_x64(True):
            codes, whole = jax.jit(integer_keys)(numbers)
        words = words_of_integers(np.asarray(codes))
        texts, known = None, np.asarray(whole)
    if known.ndim not in (1, 2) or 0 in known.shape[1:]:
        raise ValueError(f"column must have shape (n,) or (n, m), got {known.shape}")
    if known.ndim == 1:
        words, known = words[:, None], known[:, None]
    return texts, words, known


def _slots(n: int, capacity: int | None, *, is_public: bool) -> int:
    if (capacity is None) != is_public:
        raise ValueError(
            "capacity must be given under add-or-remove-one, where the number of records is "
            f"private, and must be None under replace-one, got {capacity}"
        )
    if capacity is None:
        if n == 0:
            raise ValueError("column must not be empty, got an array of no records")
        return n
    return check_capacity(capacity, n)


def _threshold(mechanism: AdditiveMechanism, counts: jax.ShapeDtypeStruct, passed: float) -> int:
    """Returns a threshold for noisy counts that a key of only one person rarely reaches.

    The noisy count 1 + Z of this key reaches the threshold with a probability of at most `passed`.
    For discrete Laplace noise Z of scale b and m >= 0, P(Z >= m) is a^m / (1 + a), with
    a = exp(-1 / b).
    """
    scale = float(mechanism.effective_scale(like=counts)) * _OUTWARD
    both = math.log1p(math.exp(-1 / scale))
    return 1 + math.ceil(scale * max(1.0, -math.log(passed) - both))


def _sorted_counts(
    words: np.ndarray, known: np.ndarray, *, at_most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words of each distinct key and its number of people, both padded with zeros.

    The counting runs on the host, because compiling a program would take longer than sorting a
    million keys. All arrays have the public size, so the time does not reveal the number of people.
    """
    m = known.shape[1]
    same = np.all(words[:, :, None] == words[:, None], axis=-1) & known[:, None]
    earlier = np.tril(np.ones((1, m, m), bool), -1)
    first = known & ~np.any(same & earlier, axis=2)
    absent = ~(first & (np.cumsum(first, axis=1) <= at_most)).ravel()
    order = np.lexsort((*words.reshape(known.size, -1).T[::-1], absent))
    ordered, counted = words.reshape(known.size, -1)[order], ~absent[order]
    starts = np.any(ordered != np.roll(ordered, 1, axis=0), axis=1) | (np.arange(len(order)) == 0)
    # Entries that are not counted are sorted to the end.
    place = np.where(counted, np.cumsum(starts & counted) - 1, len(order))
    keys = np.zeros((len(order) + 1, ordered.shape[1]), np.uint32)
    keys[place] = ordered
    return keys[:-1], np.bincount(place, minlength=len(order) + 1)[:-1].astype(np.int32)


# New rows wait to be merged with the distinct rows found so far. The merge starts when the number
# of waiting rows exceeds both `_FEW` and the number of distinct rows found so far.
_FEW = 2**20


def distinct_in_parts(
    parts: Parts, words_of: Callable[[Database], np.ndarray] = np.asarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct rows of words in all parts, in increasing order, and their counts.

    `words_of` returns the words of the records of a part. The memory grows with the number of
    distinct rows, not with the number of all rows.
    """

    def of_several(several: Iterator[PaddedRecords]) -> tuple[np.ndarray, np.ndarray]:
        return _merged(map(of_one, several), none)

    def of_one(part: PaddedRecords) -> tuple[np.ndarray, np.ndarray]:
        words = words_of(part.records)[np.asarray(part.present)]
        return distinct_rows([(words, np.ones(len(words), np.int64))])

    none = words_of(parts.like.records)[:0], np.zeros(0, np.int64)
    words, counts = _merged(parts.each(of_several), none)
    parts.check_count(int(counts.sum()))
    return words, counts.astype(np.int32)


def _merged(
    several: Iterable[tuple[np.ndarray, np.ndarray]], none: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Adds the counts of equal rows of several arrays."""
    found, waiting, rows = none, list[tuple[np.ndarray, np.ndarray]](), 0
    for one in several:
        waiting, rows = [*waiting, one], rows + len(one[1])
        if rows > max(_FEW, len(found[1])):
            found, waiting, rows = distinct_rows([found, *waiting]), [], 0
    return distinct_rows([found, *waiting])


def distinct_rows(
    several: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct rows of all pairs, in increasing order, and the count of each row.

    Each pair contains rows of words, and a count for each row. The counts of equal rows are added.
    """
    words, counts = map(np.concatenate, zip(*several, strict=True))
    if len(words) == 0:
        return words, counts
    # Two words are compared as one integer. The first word of a row is the most significant.
    wide = np.pad(words, ((0, 0), (0, words.shape[1] % 2))).astype(np.uint64)
    order = np.lexsort((wide[:, ::2] << np.uint64(32) | wide[:, 1::2]).T[::-1])
    ordered = words[order]
    starts = np.append(True, np.any(ordered[1:] != ordered[:-1], axis=1))
    return ordered[starts], np.add.reduceat(counts[order], np.flatnonzero(starts))


def _noisy(key: Key, counts: np.ndarray, mechanism: AdditiveMechanism, size: int) -> np.ndarray:
    """Adds noise to `counts`, in chunks that share one compiled program.

    There are `size` counts in all. Those that `counts` leaves out are 0. The noise scale is
    calibrated to all `size` counts, and each chunk has its own random key. So the distribution of
    the noise does not depend on the position of a count.
    """
    like = jax.ShapeDtypeStruct((size,), counts.dtype)
    calibration = jax.device_put(mechanism)._calibration(like)
    chunk = _CHUNK if size <= _MANY * _CHUNK else _LARGE_CHUNK
    chunks = max(1, -(-len(counts) // chunk))
    padded = np.pad(counts, (0, chunks * chunk - len(counts))).reshape(-1, chunk)
    keys = split_on_host(key, -(-size // chunk))[:chunks]
    noisy = [
        add_noise(one, jax.device_put(x), calibration, mechanism.noise)
        for one, x in zip(keys, padded, strict=True)
    ]
    return np.concatenate(noisy)[: len(counts)]


def _named(
    texts: np.ndarray | None, words: np.ndarray, published: np.ndarray
) -> Sequence[int | str | None]:
    """Converts the words of published keys to integers or texts.

    `words` are the words of all entries of the column. `texts` are these entries, or None for
    integers.
    """
    if texts is None:
        return integers_of(published)
    flat = zip(words.reshape(-1, words.shape[-1]), texts.ravel(), strict=True)
    wanted: dict[bytes, str | None] = dict.fromkeys(word.tobytes() for word in published)
    for word, text in flat:
        if (place := word.tobytes()) in wanted:
            wanted[place] = as_text(text)
    return list(wanted.values())


def words_of_integers(numbers: np.ndarray) -> np.ndarray:
    """Splits each int64 into two words, the high word first. These pairs sort like the integers."""
    ordered = numbers.view(np.uint64) ^ _SIGN
    return np.stack([ordered >> np.uint64(32), ordered], axis=-1).astype(np.uint32)


def integers_of(words: np.ndarray) -> list[int]:
    """Inverts `words_of_integers`."""
    high, low = words.astype(np.uint64).T
    return ((high << np.uint64(32) | low) ^ _SIGN).view(np.int64).tolist()
