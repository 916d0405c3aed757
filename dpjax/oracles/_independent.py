"""Oracles whose records are independent draws."""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Database, Key, PyTree
from dpjax._tracing._lanes import check_lanes


class IndependentRecords(abc.ABC):
    """An oracle whose records are independent draws, each with a key of its own.

    Made by the functions of `dpjax.oracles`, as frozen pytrees, whose leaves are fitted numbers.

    Attributes:
        record: draws one record from a key.
        log_prob: log density of one record, where it is known.

    Formal guarantees:
        Record i of a database is `record(fold_in(key, i))`, whatever their number, so two records
        drawn without the others are those that the whole database has.
    """

    @abc.abstractmethod
    def record(self, key: Key) -> PyTree:
        """Draws one record, a pytree of arrays."""

    def log_prob(self, record: PyTree) -> jax.Array:
        """Log density of one record; log probability for discrete parts.

        Of a whole database it is the sum: records are independent. Use `jax.vmap` for many.

        Args:
            record: as `record(key)` draws it, without the leading axis of a database.

        Returns:
            A scalar; minus infinity for a record that is never drawn.

        Raises:
            TypeError: if it is not known.
        """
        del record
        raise TypeError(
            "the density of these records is not known: give it to dpjax.oracles.independent as"
            " log_prob="
        )

    def __call__(self, key: Key, n: int, /) -> Database:
        """The first n records."""
        n = _checks.integer("n", n, least=0)
        return self.at(key, jnp.arange(n, dtype=jnp.uint32))

    def at(self, key: Key, numbers: jax.Array) -> Database:
        """The records of these numbers, the same ones that any database of the key has there."""

        def record(number: jax.Array) -> PyTree:
            return self.record(jax.random.fold_in(key, number))

        checked, _ = check_lanes("record", record, numbers)
        return jax.vmap(checked)(numbers)


@frozen_pytree
class _FromSampler(IndependentRecords):
    """Records from a function of the caller's."""

    sampler: Callable[[Key], PyTree] = static()
    log_density: Callable[[PyTree], jax.Array] | None = static(default=None)

    def record(self, key: Key) -> PyTree:
        return self.sampler(key)

    def log_prob(self, record: PyTree) -> jax.Array:
        return super().log_prob(record) if self.log_density is None else self.log_density(record)


def independent(
    record: Callable[[Key], PyTree], log_prob: Callable[[PyTree], jax.Array] | None = None
) -> IndependentRecords:
    """An oracle that says that its records are independent: each is drawn with a key of its own.

    Record i of a database is `record(fold_in(key, i))`, whatever their number. So the sampler can
    draw two records without the others, and does where no more is needed: for
    `dpjax.targets.summable` targets whose `finish` is affine, a pair costs two records instead of
    n + 1. For other targets an oracle that draws all records in one call is faster, for it makes
    do with one key.

    Args:
        record: `record(key)` draws one record from public knowledge, a pytree of arrays.
        log_prob: `log_prob(record)` is the log density of one record, a scalar, where it is known.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records, `oracle.record(key)`
        one record, and `oracle.log_prob(record)` is its log density.

    Raises:
        TypeError: if an argument is not a function; later, where `oracle.log_prob` is called and
            none was given.
        ValueError: later, where records are drawn, if one may depend on others under `vmap`: by a
            rule for `vmap` of its own, keys of rbg, or operations that are not JAX's own.

    Formal guarantees:
        Records are independent and identically distributed, as far as keys are: what exchangeable
        records, groups and `dpjax.accounting.transfer` ask for. Two records drawn without the
        others are those that the whole database would have, and the sampler compares the distances
        from both on random databases. Nothing compares `log_prob` with the draws.

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
