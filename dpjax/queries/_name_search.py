"""Finds frequent names letter by letter, in a tree of prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._columns import ALPHABET
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._pytree import frozen_pytree, static, up
from dpjax._core._types import Key, Value
from dpjax._core._values import NeighboringRelation, Scalar, Sensitivity
from dpjax.mechanisms._additive import AdditiveMechanism, laplace
from dpjax.mechanisms._start import begin
from dpjax.random._release import in_range
from dpjax.release._mechanism import SensitivityMechanism
from dpjax.sensitivity._assume_sensitivity import assume_sensitivity

_END, _NOBODY = 0, len(ALPHABET) + 1
_SYMBOLS = len(ALPHABET) + 1  # The letters, and a symbol for the end of a name.
_NOT_ASKED = np.iinfo(np.int32).min  # Stands for the count of a prefix that is not searched.


def changed_records(difference: jax.Array) -> jax.Array:
    """Returns the number of rows with a nonzero entry. Each record has one row."""
    return jnp.sum(jnp.any(difference != 0, axis=1), dtype=jnp.result_type(float))


# The state at a level of the tree: whether each slot contains a prefix, and the slot of each
# person's prefix (-1 if this prefix is no longer searched).
_State = tuple[jax.Array, jax.Array]


@frozen_pytree
class NameSearch(SensitivityMechanism):
    """Searches a tree of prefixes for names; made by `name_search`.

    Attributes:
        sensitivity: 1. In the norm `changed_records`, one changed name has length 1.
        epsilon: the epsilon of the guarantee, for all levels together.
        threshold: a prefix is searched further if its noisy count is at least this number.
        width: the number of levels.
        capacity: the largest number of prefixes of a level that are searched further.

    Formal guarantees:
        The guarantees of `name_search`.
    """

    sensitivity: Sensitivity
    epsilon: Scalar = up()
    threshold: Scalar | np.int32
    width: int = static()
    capacity: int = static()

    @property
    def zcdp(self) -> tuple[float, float]:
        """The zCDP cost of all levels together: rho = epsilon^2 / (2 width) and delta = 0."""
        rho, delta = super().zcdp
        return rho / self.width, delta

    def _level(self) -> AdditiveMechanism:
        """Returns the mechanism for the counts of one level, which count each person once."""
        replaced = self.sensitivity.relation is NeighboringRelation.REPLACE_ONE
        return laplace(2.0 if replaced else 1.0, self.epsilon / self.width)

    def _check_value(self, value: Value) -> None:
        if not jax.tree_util.all_leaves([value]) or value.ndim != 2 or value.shape[1] != self.width:
            raise ValueError(
                f"value must be an array of codes of names, shape (n, {self.width}), made by "
                f"dpjax.targets.encode_text, got {_checks.described(value)}"
            )
        if jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"value must hold integer codes, got dtype {value.dtype}")
        counts = jax.ShapeDtypeStruct(self._counts_of_a_level(), jnp.int32)
        self._level()._check_value(counts)  # pyright: ignore  # A part of this mechanism.

    def _counts_of_a_level(self) -> tuple[int]:
        return (self.capacity * _SYMBOLS,)

    def clamped(self, value: Value) -> jax.Array:
        """The codes that are counted. Every code above 26 becomes 27, which stands for no person.

        Args:
            value: integer codes of shape (n, width).

        Returns:
            An array of the same shape. It is private data, like the value itself.
        """
        return in_range(_checks.real_arrays("value", value), _NOBODY + 1)

    def _draw(self, key: Key, value: Value) -> jax.Array:
        mechanism = self._level()

        def release(state: _State, step: tuple[Key, jax.Array]) -> tuple[_State, jax.Array]:
            one_key, codes = step
            asked, counts, places = self._count(state, codes)
            drawn = mechanism._draw(one_key, counts)  # pyright: ignore  # A part of this mechanism.
            noisy = jnp.where(asked, drawn, _NOT_ASKED)
            return self._descend(noisy, places), noisy

        # Under `shard_map`, the initial carry of a loop must vary over devices like the final
        # carry. So this zero is computed from the key, which varies over devices.
        zero = (jax.random.key_data(key)[0] & np.uint32(0)).astype(jnp.int32)
        codes = self.clamped(value) + zero
        steps = jax.random.split(key, self.width), codes.T
        _, noisy = lax.scan(release, self._root(codes), steps)
        return noisy.reshape(self.width, self.capacity, _SYMBOLS)

    def log_prob(self, output: jax.Array, value: Value) -> jax.Array:
        log_prob_of_count = jax.vmap(self._level().log_prob)

        def level(state: _State, step: tuple[jax.Array, jax.Array]) -> tuple[_State, jax.Array]:
            noisy, codes = step
            asked, counts, places = self._count(state, codes)
            otherwise = jnp.where(noisy == _NOT_ASKED, 0.0, -jnp.inf)
            terms = jnp.where(asked, log_prob_of_count(noisy, counts), otherwise)
            return self._descend(noisy, places), jnp.sum(terms)

        value = self._checked(value)
        codes = self.clamped(value)
        noisy = _checks.real_arrays("output", output).reshape(self.width, -1)
        _, terms = lax.scan(level, self._root(codes), (noisy, codes.T))
        return jnp.sum(terms)

    def _root(self, codes: jax.Array) -> _State:
        """Returns the state of the first level: all people are in slot 0, the empty prefix."""
        nowhere = codes[:, 0] & 0
        return jnp.arange(self.capacity, dtype=jnp.int32) == nowhere[0], nowhere

    def _count(self, state: _State, codes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns which nodes are searched, their numbers of people, and each person's node.

        The nodes are the prefixes of the next level: those of `state`, extended by a symbol.
        """
        taken, slots = state
        (size,) = self._counts_of_a_level()
        places = jnp.where((slots < 0) | (codes == _NOBODY), size, slots * _SYMBOLS + codes)
        counts = jnp.zeros(size, jnp.int32).at[places].add(1, mode="drop")
        return jnp.repeat(taken, _SYMBOLS), counts, places

    def _descend(self, noisy: jax.Array, places: jax.Array) -> _State:
        """Returns the state of the next level, given the noisy counts and each person's node."""
        children, kept = self._survivors(noisy)
        to = jnp.where(kept, children, noisy.size)
        numbers = jnp.arange(self.capacity, dtype=jnp.int32)
        slots = jnp.full(noisy.size, -1, jnp.int32).at[to].set(numbers, mode="drop")
        return kept, slots.at[places].get(mode="fill", fill_value=-1)

    def _survivors(self, noisy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the child nodes to search further, and a mask of those that are valid.

        A node qualifies if its noisy count reaches the threshold and it is not the end of a name.
        The `capacity` qualified nodes with the largest noisy counts are searched further. The
        result depends on noisy counts alone.
        """
        goes_on = self._goes_on(noisy)
        counts, children = lax.top_k(jnp.where(goes_on, noisy, _NOT_ASKED), self.capacity)
        return children, counts > _NOT_ASKED

    def _goes_on(self, noisy: jax.Array) -> jax.Array:
        return (np.arange(noisy.size) % _SYMBOLS != _END) & (noisy >= self.threshold)

    def cut_off(self, counts: jax.Array | np.ndarray) -> bool:
        """Whether a level had more prefixes to search further than `capacity` allows.

        Args:
            counts: the value of a release.

        Returns:
            A boolean, as public as the release.
        """
        followed = np.asarray(counts).reshape(self.width, -1)[:-1]
        return any(np.sum(self._goes_on(jnp.asarray(noisy))) > self.capacity for noisy in followed)

    def names(self, counts: jax.Array | np.ndarray) -> dict[str, int]:
        """The names that were found, with their noisy counts, the most frequent first.

        Args:
            counts: the value of a release.

        Returns:
            A dict from name to count. The empty string is a name like any other. A name of `width`
            letters represents all names that begin with it.
        """
        found: dict[str, int] = {}
        prefixes = [""]
        for level, noisy in enumerate(np.asarray(counts).reshape(self.width, -1)):
            names = [prefix + letter for prefix in prefixes for letter in ("", *ALPHABET)]
            for child in np.flatnonzero(noisy >= np.asarray(self.threshold)):
                if level == self.width - 1 or child % _SYMBOLS == _END:
                    found[names[child]] = int(noisy[child])
            children, kept = map(np.asarray, self._survivors(jnp.asarray(noisy)))
            prefixes = [names[child] for child in children[kept]]
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def error(self, *, confidence: float = 0.95, simultaneous: bool = False) -> Scalar:
        """A bound on the distance of a released count from the true one.

        Args:
            confidence: the probability that the bound is correct, in (0, 1).
            simultaneous: whether it covers all counts of all levels at once, or each count alone.

        Returns:
            A number of people.
        """
        counts = (self.width, *self._counts_of_a_level()) if simultaneous else ()
        like = jax.ShapeDtypeStruct(counts, jnp.int32)
        return self._level().error(confidence=confidence, like=like, simultaneous=simultaneous)


def name_search(
    epsilon: Scalar,
    *,
    width: int,
    threshold: int,
    capacity: int = 256,
    relation: NeighboringRelation | None = None,
) -> NameSearch:
    """Finds frequent names without a list of names: "how many begin with A?", then with Aa, Ab, ...

    There are `width` levels. Each level extends every prefix by the letters a to z and by the end
    of the name, and counts the people in each case, with integer Laplace noise. A name is found if
    the noisy count of its end is at least `threshold`. Extensions with a noisy count of at least
    `threshold` become the prefixes of the next level. If there are more than `capacity` of them,
    only the most frequent ones become prefixes of the next level.

    Args:
        epsilon: the epsilon of all levels together, above 0; each level spends epsilon / width.
        width: how many letters of a name count, at least 1; a longer name is cut off.
        threshold: at least 1. If it is above `error(confidence=p, simultaneous=True)`, then with
            probability p every name that the search finds, and every prefix that it follows,
            belongs to somebody.
        capacity: the most prefixes of a level, at least 1.
        relation: which databases are neighbors; None takes the relation of an open ledger, or else
            replace-one.

    Returns:
        A `NameSearch`. `search(key, codes)` takes the codes of `dpjax.targets.encode_text`, shape
        (n, width), and releases all noisy counts, int32 of shape (width, capacity, 27).
        `search.names(release.value)` finds the names in these counts. A code above 26 represents no
        person: if the number of records is private, a row of such codes is an empty slot.

    Raises:
        TypeError: if a parameter is not a number; at a release, if the codes are not integers.
        ValueError: if a parameter is out of range; at a release, if codes do not have shape
            (n, width).

    Formal guarantees:
        epsilon-DP under the relation. The prefixes of a level depend only on the releases of
        earlier levels. A person has one name, so the counts of a level are disjoint. One name
        changes them by 2 in the norm l1 under replace-one, and by 1 under add-or-remove-one. Each
        level is (epsilon / width)-DP, at the scale 2 width / epsilon under replace-one, and width /
        epsilon under add-or-remove-one. By adaptive composition, all levels together are
        epsilon-DP, and also epsilon^2 / (2 width)-zCDP. Let e = `error(confidence=p,
        simultaneous=True)`. With probability p all counts are within e of the true counts. Then
        every name of at least threshold + e people is found, unless the capacity was used up
        (`search.cut_off`), and no name of fewer than threshold - e people is found. The guarantee
        is exact given uniform random bits.

    Source:
        Dwork, quoted in Scientific American (2012), for baby names; Cormode, Procopiuc, Srivastava,
        Shen and Yu (2012) for trees of noisy counts; Dwork and Roth (2014), Theorem 3.16.

    Example:
        >>> import dpjax
        >>> people = ["Mary"] * 5000 + ["Mark"] * 3000 + ["Zoe"]
        >>> search = dpjax.queries.name_search(1.0, width=4, threshold=500)
        >>> codes = dpjax.targets.encode_text(people, width=4)
        >>> list(search.names(search(dpjax.random.seeded_key(0), codes).value))
        ['mary', 'mark']
    """
    sensitivity = assume_sensitivity(
        1.0, norm=changed_records, relation=relation_or_inherited(relation)
    )
    sensitivity, epsilon = begin(changed_records, sensitivity, epsilon)
    width = _checks.integer("width", width, least=1)
    threshold = _checks.integer("threshold", threshold, least=1, most=2**31 - 1)
    capacity = _checks.integer("capacity", capacity, least=1, most=2**20)
    return NameSearch(sensitivity, epsilon, np.int32(threshold), width, capacity)
