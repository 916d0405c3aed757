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

    The functions of `dpjax.oracles` make them, as frozen pytrees whose leaves are fitted numbers.

    Attributes:
        record: draws one record from a key.
        log_prob: log density of one record, where it is known.

    Formal guarantees:
        Record i of a database is `record(fold_in(key, i))`, whatever n is. So two records that are
        drawn alone are the same as in the whole database.
    """

    @abc.abstractmethod
    def record(self, key: Key) -> PyTree:
        """Draws one record, a pytree of arrays."""

    def log_prob(self, record: PyTree) -> jax.Array:
        """Log density of one record; log probability for discrete parts.

        Records are independent, so that of a database is the sum. Use `jax.vmap` for many records.

        Args:
            record: as `record(key)` draws it, without the leading axis of a database.

        Returns:
            A scalar; minus infinity for a record that is never drawn.

        Raises:
            TypeError: if the density is not known.
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
        """The records at these positions of any database of the key."""

        def record(number: jax.Array) -> PyTree:
            return self.record(jax.random.fold_in(key, number))

        checked, _ = check_lanes("record", record, numbers)
        return jax.vmap(checked)(numbers)


@frozen_pytree
class _FromSampler(IndependentRecords):
    """Records from a caller's function."""

    sampler: Callable[[Key], PyTree] = static()
    log_density: Callable[[PyTree], jax.Array] | None = static(default=None)

    def record(self, key: Key) -> PyTree:
        return self.sampler(key)

    def log_prob(self, record: PyTree) -> jax.Array:
        return super().log_prob(record) if self.log_density is None else self.log_density(record)


def independent(
    record: Callable[[Key], PyTree], log_prob: Callable[[PyTree], jax.Array] | None = None
) -> IndependentRecords:
    """An oracle that declares its records independent: each is drawn with a key of its own.

    Record i of a database is `record(fold_in(key, i))`, whatever n is. So the sampler can draw two
    records without the others. It does so for `dpjax.targets.summable` targets whose `finish` is
    affine: a pair then costs two records instead of n + 1. For other targets, an oracle that draws
    all records in one call is faster, since it uses one key.

    Args:
        record: `record(key)` draws one record from public knowledge, a pytree of arrays.
        log_prob: `log_prob(record)` is the log density of one record, a scalar, if it is known.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records, `oracle.record(key)`
        one record, and `oracle.log_prob(record)` is its log density.

    Raises:
        TypeError: if an argument is not a function; later, if `oracle.log_prob` is called and none
            was given.
        ValueError: later, when records are drawn, if one may depend on others under `vmap`. That is
            possible with keys of rbg, or with operations that are not JAX's.

    Formal guarantees:
        Records are independent and identically distributed, as far as keys are. Exchangeable
        records, groups and `dpjax.accounting.under_distribution_shift` need that. Two records that
        are drawn alone are the same as in the whole database. The sampler compares the distances
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
