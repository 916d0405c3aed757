"""Releases the keys of groups that enough people are in, if the set of keys is private.

docs/proofs/groups.md has the proof.
"""

import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

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
from dpjax._core._records import exact_records
from dpjax._core._types import Key
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

_Kept: TypeAlias = dict[str, Any]


class WithCounts(NamedTuple):
    """A column whose keys are released together with their noisy counts, for tables.

    Attributes:
        entries: the column. If neighbors differ in all rows of a person, its shape is (n,), and a
            person may have several entries, each with another key. Then n is private, and a
            capacity must be given under both relations.
        people: how many entries a person has, if neighbors differ in people.
    """

    entries: ArrayLike
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
    """The keys of a column that enough people have, for columns without a public list of keys.

    Every existing group gets a noisy count. Its key is published if the noisy count reaches a
    threshold. A group without people is never published.

    Args:
        key: a typed key from `dpjax.random.secure_key`, used for nothing else.
        column: integers or texts, shape (n,), one for each person; or (n, m), the groups that a
            person is in, with missing texts or NaN in empty places.
        epsilon: the epsilon of the guarantee.
        delta: the delta of the guarantee, above 0.
        at_most: how many groups a person counts in, public: the first distinct groups in their row.
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
    with_counts = isinstance(given, WithCounts)
    column, people = given if with_counts else (given, None)
    check_key(key)
    relation = relation_or_inherited(relation)
    delta = _checks.fraction("delta", delta)
    at_most = _checks.integer("at_most", at_most, least=1)
    entries, words, known = _entries(column)
    is_public = relation is NeighboringRelation.REPLACE_ONE and people is None
    slots = _slots(len(words), capacity, is_public=is_public)
    at_most = min(at_most, words.shape[1])
    reach = at_most * (2 if relation is NeighboringRelation.REPLACE_ONE else 1)
    about_people: dict[str, Any] = {"privacy_unit": privacy_unit}
    if people is not None:
        reach *= people.rows * people.blocks
        about_people = people.about
    check_privacy_unit(about_people["privacy_unit"])
    sensitivity = assume_sensitivity(reach, norm="l1", relation=relation)
    sensitivity = dataclasses.replace(sensitivity, **about_people)
    mechanism = discrete_laplace(sensitivity, epsilon)
    size = jax.ShapeDtypeStruct((slots * words.shape[1],), jnp.int32)
    draw_of(mechanism, TreeSpec.of(size))  # Refuses a bad mechanism before anything is paid.
    if delta / reach == 0:
        raise ValueError(
            f"delta={delta} is too small: divided by {reach}, the number of groups that a person "
            "changes, it underflows to 0"
        )
    threshold = _threshold(mechanism, size, delta / reach)
    if threshold > _LARGEST_COUNT:
        raise ValueError(f"epsilon={epsilon} is too small: the threshold would be {threshold}")
    empty = ((0, slots - len(words)), (0, 0))
    padded, taken = np.pad(words, (*empty, (0, 0))), np.pad(known, empty)

    def draw() -> dict[str, np.ndarray]:
        of_group, counts = _sorted_counts(padded, taken, at_most=at_most)
        noisy = _noisy(key, counts, mechanism)
        published = (counts > 0) & (noisy >= threshold)
        named = _named(of_group[published], entries, words, noisy[published])
        return _as_arrays(*named)

    about = (size.shape, words.shape[1:], entries is None, at_most, epsilon, delta, str(relation))
    about = (*about, privacy_unit if people is None else people)
    release = pay_and_draw(
        draw,
        key,
        (mechanism, padded, taken),
        guarantee=guarantee_under(key, dataclasses.replace(mechanism.guarantee, delta=delta)),
        what="group keys",
        name=name,
        request=lambda name: _request(name, about),
    )
    keys, counts = _from_arrays(release.value, entries is None)
    return Release((keys, counts) if with_counts else keys, release.guarantee)


def _request(name: str | None, about: tuple[object, ...]) -> Request | None:
    if name is None:
        return None
    like = {part: jax.ShapeDtypeStruct((0,), jnp.uint8) for part in ("keys", "ends", "counts")}
    return Request(name, digest("group keys", name, about), TreeSpec.of(like))


def _as_arrays(keys: tuple[int, ...] | tuple[str, ...], counts: np.ndarray) -> _Kept:
    """Encodes keys as bytes, with the index where each key ends: ledgers store only arrays."""
    texts = [str(key).encode("utf-8", "surrogatepass") for key in keys]
    ends = np.cumsum([0, *map(len, texts)])[1:].astype(np.int32)
    flat = np.frombuffer(b"".join(texts), np.uint8)
    return {"keys": flat, "ends": ends, "counts": counts.astype(np.int32)}


def _from_arrays(kept: _Kept, are_numbers: bool) -> tuple[Any, np.ndarray]:
    """Decodes arrays made by `_as_arrays`.

    Returns the keys in increasing order, and their noisy counts.
    """
    flat, ends = np.asarray(kept["keys"]).tobytes(), np.asarray(kept["ends"]).tolist()
    starts = [0, *ends[:-1]]
    texts = [
        flat[start:end].decode("utf-8", "surrogatepass")
        for start, end in zip(starts, ends, strict=bool(ends))
    ]
    keys = tuple(map(int, texts)) if are_numbers else tuple(texts)
    return keys, np.asarray(kept["counts"])


def _entries(column: ArrayLike) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Returns the texts of a column, words that identify its keys, and a mask of keys.

    Their shapes are (n, m), (n, m, words) and (n, m), if each of n people has m entries. The mask
    is false at missing entries.
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
        # Maps signed integers to unsigned ones in the same order, and splits them into two words,
        # the high word first.
        ordered = np.asarray(codes).view(np.uint64) ^ _SIGN
        words = np.stack([ordered >> np.uint64(32), ordered], axis=-1).astype(np.uint32)
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


def _noisy(key: Key, counts: np.ndarray, mechanism: AdditiveMechanism) -> np.ndarray:
    """Adds noise to all counts, in chunks of equal size, which share one compiled program.

    Each chunk has its own random key, and the noise scale is calibrated to all counts at once. So
    the noise of a count does not depend on its position.
    """
    like = jax.ShapeDtypeStruct(counts.shape, counts.dtype)
    calibration = jax.tree.map(jnp.asarray, mechanism)._calibration(like)
    chunk = _CHUNK if len(counts) <= _MANY * _CHUNK else _LARGE_CHUNK
    padded = np.pad(counts, (0, -len(counts) % chunk)).reshape(-1, chunk)
    keys = split_on_host(key, len(padded))
    noisy = [
        add_noise(one, jax.device_put(x), calibration, mechanism.noise)
        for one, x in zip(keys, padded, strict=True)
    ]
    return np.concatenate(noisy)[: len(counts)]


def _named(
    published: np.ndarray, texts: np.ndarray | None, words: np.ndarray, noisy: np.ndarray
) -> tuple[tuple[int, ...] | tuple[str, ...], np.ndarray]:
    """Decodes the published words.

    Returns the keys in increasing order, with their noisy counts.
    """
    if texts is None:
        high, low = published.astype(np.uint64).T
        return tuple(((high << np.uint64(32) | low) ^ _SIGN).view(np.int64).tolist()), noisy
    count_of = dict(zip((word.tobytes() for word in published), noisy.tolist(), strict=True))
    flat = zip(words.reshape(-1, words.shape[-1]), texts.ravel(), strict=True)
    found = {as_text(text): count_of.get(word.tobytes()) for word, text in flat}
    known = sorted((text, n) for text, n in found.items() if text is not None and n is not None)
    return tuple(text for text, _ in known), np.array([count for _, count in known], np.int32)
