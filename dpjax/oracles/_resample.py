"""Oracles fitted to public records."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpjax._core._pytree import frozen_pytree
from dpjax._core._records import public_arrays
from dpjax._core._types import Database, Key, PyTree
from dpjax.oracles._choices import Choice, UniformChoice, weighted_choice
from dpjax.oracles._independent import IndependentRecords


@frozen_pytree
class Resampled(IndependentRecords):
    """Draws whole public records, which have a common leading axis."""

    public: Database
    choice: Choice

    def record(self, key: Key) -> PyTree:
        chosen = self.choice.draw(key)
        return jax.tree.map(lambda leaf: jnp.take(leaf, chosen, axis=0), self.public)

    def log_prob(self, record: PyTree) -> jax.Array:
        equal = jax.tree.leaves(jax.tree.map(equal_entries, self.public, record))
        same = jnp.all(jnp.stack([jnp.all(leaf, axis=1) for leaf in equal]), axis=0)
        return jax.nn.logsumexp(jnp.where(same, self.choice.log_probabilities, -jnp.inf))


def resample(
    records: Database, weights: ArrayLike | Sequence[float] | None = None
) -> IndependentRecords:
    """The bootstrap oracle: draws records with replacement from public ones.

    Args:
        records: a pytree of arrays with a common leading axis: public records, at least 2. A
            DataFrame counts as the dict of its columns.
        weights: public, one for each record, finite and above 0; by default all equal. They need
            not add up to 1.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records. Its `log_prob` adds
        up all public records that equal the given one.

    Raises:
        TypeError: if the records or weights are not real arrays.
        ValueError: if they have no common leading axis, fewer than 2 records, or if a weight is
            not above 0, or below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about the public records, not about the population that
        they came from. It does not cover a private record unlike all of them. Each of p public
        records takes part in about 2/p of the pairs, replaced or replacing. So a larger gamma may
        leave one of them out. Probabilities are within 2^-32 of the given ones.

    Source:
        Efron (1979); Rubinstein and Aldà (2017), Remark 7, on choosing an oracle.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> oracle = dpjax.oracles.resample({"age": jnp.array([31.0, 44.0, 58.0])})
        >>> oracle(dpjax.random.seeded_key(0), 5)["age"].shape
        (5,)
    """
    public, count = public_records(records)
    if weights is None:
        return Resampled(public, UniformChoice(count))
    return Resampled(public, weighted_choice("weights", weights, count))


def public_records(records: Database) -> tuple[Database, int]:
    """A copy of public records, since JAX may share memory with NumPy; and their number."""
    public, count = public_arrays("records", records, least=2)
    return jax.block_until_ready(jax.tree.map(jnp.array, public)), count


def equal_entries(public: jax.Array, record: jax.Array) -> jax.Array:
    """Whether each entry of each public record equals that of a record, shape (p, entries)."""
    record = jnp.asarray(record)
    if record.shape != public.shape[1:]:
        raise ValueError(
            f"a record must have the shape of the public ones, {public.shape[1:]}, got"
            f" {record.shape}"
        )
    return (public == record[None]).reshape(public.shape[0], -1)
