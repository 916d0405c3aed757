"""`independent` and `mixture`: oracles whose records are independent draws."""

import abc
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Database, Key, PyTree
from dpjax._exact._numerics import count_below
from dpjax._tracing._lanes import check_lanes

_WORDS = 2**32


@frozen_pytree
class UniformChoice:
    """Chooses each index with equal probability, up to a relative error of count / 2^32."""

    count: int = static()

    @property
    def log_probabilities(self) -> jax.Array:
        return jnp.full(self.count, -math.log(self.count))

    def draw(self, key: jax.Array) -> jax.Array:
        # `randint` would need twice as many random bits.
        return jax.random.bits(key, (), jnp.uint32) % jnp.uint32(self.count)


@frozen_pytree
class WeightedChoice:
    """Chooses index i with a given probability, which is a multiple of 2^-32 above 0.

    `ends[i]` is 2^32 times the probability that the chosen index is at most i. The last index has
    no entry.
    """

    ends: jax.Array
    log_probabilities: jax.Array

    @classmethod
    def of(cls, words: np.ndarray) -> "WeightedChoice":
        """Makes a `WeightedChoice` that chooses index i with probability `words[i]` / 2^32."""
        ends = jnp.asarray(np.cumsum(words)[:-1].astype(np.uint32))
        return cls(ends, jnp.asarray(np.log(words / _WORDS), jnp.result_type(float)))

    def draw(self, key: jax.Array) -> jax.Array:
        word = jax.random.bits(key, (), jnp.uint32)
        return count_below(self.ends, word, or_equal=True)


def words_of(weights: np.ndarray) -> np.ndarray:
    """Returns 2^32 times the probability of each index: integers that add up to 2^32."""
    ends = np.cumsum(weights / weights.max())
    return np.diff(np.rint(ends / ends[-1] * _WORDS).astype(np.int64), prepend=0)


def weighted_choice(name: str, weights: ArrayLike | Sequence[float], count: int) -> WeightedChoice:
    """Makes a `WeightedChoice` from public weights above 0, which need not add up to 1."""
    if _checks.is_traced(weights):
        raise TypeError(f"{name} must be known when an oracle is made, got a traced array")
    array = _checks.host_numbers(name, weights).astype(np.float64)
    if array.shape != (count,):
        raise ValueError(f"{name} must be {count} numbers, got shape {array.shape}")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"{name} must be finite and above 0, got {_checks.shown(array.tolist())}")
    words = words_of(array)
    if words.min() == 0:
        smallest = array[np.argmin(words)] / array.sum()
        raise ValueError(
            f"{name} must each be at least 2^-32 times their sum, got {smallest:.2g} times the sum"
        )
    return WeightedChoice.of(words)


class IndependentRecords(abc.ABC):
    """An oracle whose records are independent draws, each with a key of its own.

    The functions of `dpjax.oracles` return them, as frozen pytrees whose leaves are fitted numbers.

    Attributes:
        record: draws one record from a key.
        log_prob: log density of one record, if it is known.

    Formal guarantees:
        Record i of a database is `record(fold_in(key, i))`, whatever n is. So two records can be
        drawn alone, with the same values as in the whole database.
    """

    @abc.abstractmethod
    def record(self, key: Key) -> PyTree:
        """Draws one record, a pytree of arrays."""

    def log_prob(self, record: PyTree) -> jax.Array:
        """Log density of one record; log probability for discrete parts.

        Records are independent, so the log densities of many records add up. Compute them by
        `jax.vmap`.

        Args:
            record: as `record(key)` draws it, without the leading axis of a database.

        Returns:
            A scalar; minus infinity for a record that is never drawn.

        Raises:
            TypeError: if the density is not known.
        """
        del record
        raise TypeError(
            "the oracle must have a log density: pass it to dpjax.oracles.independent as log_prob="
        )

    def __call__(self, key: Key, n: int, /) -> Database:
        """The first n records."""
        n = _checks.integer("n", n, least=0)
        return self.at(key, jnp.arange(n, dtype=jnp.uint32))

    def at(self, key: Key, numbers: jax.Array) -> Database:
        """The records at the given positions of the database that this key draws.

        A record depends only on the key and its position, and not on the size of the database.
        """

        def record(number: jax.Array) -> PyTree:
            return self.record(jax.random.fold_in(key, number))

        checked, _ = check_lanes("record", record, numbers)
        return jax.vmap(checked)(numbers)


@frozen_pytree
class _FromSampler(IndependentRecords):
    """Draws each record independently by a caller's function."""

    sampler: Callable[[Key], PyTree] = static()
    log_density: Callable[[PyTree], jax.Array] | None = static(default=None)

    def record(self, key: Key) -> PyTree:
        return self.sampler(key)

    def log_prob(self, record: PyTree) -> jax.Array:
        return super().log_prob(record) if self.log_density is None else self.log_density(record)


def independent(
    record: Callable[[Key], PyTree], log_prob: Callable[[PyTree], jax.Array] | None = None
) -> IndependentRecords:
    """An oracle of independent records, each drawn with a key of its own.

    Record i of a database is `record(fold_in(key, i))`, whatever n is. So the sampler can draw two
    records without the others. It does so for `dpjax.targets.summable` targets whose `finish` is
    affine: for a pair, it then draws two records instead of n + 1. For other targets, a function
    that draws all records in one call is faster, since it uses one key.

    Args:
        record: `record(key)` draws one record from public knowledge, a pytree of arrays.
        log_prob: `log_prob(record)` is the log density of one record, a scalar, if it is known.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records, `oracle.record(key)`
        one record, and `oracle.log_prob(record)` is its log density.

    Raises:
        TypeError: if an argument is not a function; later, if `oracle.log_prob` is called and none
            was given.
        ValueError: later, when records are drawn, if one record may depend on others under `vmap`.
            That is possible with "rbg" keys, or with operations that are not JAX's own.

    Formal guarantees:
        Records are independent and identically distributed, as far as pseudorandom keys are.
        Exchangeability, groups and `dpjax.accounting.under_distribution_shift` rely on that. A
        record that is drawn alone equals the same record of the whole database; the sampler checks
        this on random databases by their distances. It does not check that `log_prob` is the
        density of the draws.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, for P a product of one distribution.

    Example:
        >>> import jax
        >>> import dpjax
        >>> oracle = dpjax.oracles.independent(jax.random.exponential, log_prob=lambda x: -x)
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
        >>> oracle.log_prob(2.0)
        -2.0
    """
    _checks.function("record", record)
    if log_prob is not None:
        _checks.function("log_prob", log_prob)
    return _FromSampler(record, log_prob)


@frozen_pytree
class Mixture(IndependentRecords):
    """Draws each record by one of several oracles, which `choice` selects."""

    components: tuple[IndependentRecords, ...]
    choice: WeightedChoice

    def record(self, key: Key) -> PyTree:
        key_choice, key_record = jax.random.split(key)
        chosen = self.choice.draw(key_choice)
        return lax.switch(chosen, [each.record for each in self.components], key_record)

    def log_prob(self, record: PyTree) -> jax.Array:
        of_each = jnp.stack([jnp.asarray(each.log_prob(record)) for each in self.components])
        return jax.nn.logsumexp(of_each + self.choice.log_probabilities.astype(of_each.dtype))


def mixture(
    components: Sequence[IndependentRecords | Callable[[Key], PyTree]],
    weights: ArrayLike | Sequence[float],
) -> IndependentRecords:
    """An oracle that draws each record from one of several models.

    Under `vmap`, as in the sampler, every model draws a record, and one of these records is used.

    Args:
        components: oracles of independent records from `dpjax.oracles`, or functions that map a
            key to one record. All records have the same structure, shapes and dtypes.
        weights: public, one for each component, finite and above 0. They need not add up to 1.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records. It has a `log_prob`
        if all components have one. These must then be densities of the same kind.

    Raises:
        TypeError: if a component is not a function, or the weights are not numbers.
        ValueError: if there is no component, if their records differ in kind, or if a weight is
            not above 0, or below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about the mixture. Components and weights must be public.
        For example, the fraction of a group among private records is private. gamma is about the
        mixture as a whole, so all pairs with a record of a component with a small weight may be
        uncovered. Probabilities are within 2^-32 of the weights.

    Source:
        Rubinstein and Aldà (2017), Section 7, draws its data in this way.

    Example:
        >>> import jax
        >>> import dpjax
        >>> low = lambda key: 0.2 + 0.1 * jax.random.normal(key)
        >>> high = lambda key: 0.8 + 0.1 * jax.random.normal(key)
        >>> oracle = dpjax.oracles.mixture([low, high], weights=[0.4, 0.6])
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
    """
    if len(components) == 0:
        raise ValueError("components must contain at least one component, got none")
    oracles = tuple(
        each
        if isinstance(each, IndependentRecords)
        else independent(_checks.function("components", each))
        for each in components
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    kinds = [TreeSpec.of(jax.eval_shape(each.record, key)) for each in oracles]
    for kind in kinds[1:]:
        if kind != kinds[0]:
            raise ValueError(f"components must draw records of one kind, got {kinds[0]} and {kind}")
    return Mixture(oracles, weighted_choice("weights", weights, len(oracles)))
