"""`resample`, `smoothed_resample` and `words`: oracles that draw from public records."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax._core import _checks
from dpjax._core._columns import codes_of, letters_of
from dpjax._core._pytree import frozen_pytree
from dpjax._core._records import public_arrays
from dpjax._core._types import Database, Key, PyTree
from dpjax._exact._numerics import is_float
from dpjax.oracles._independent import (
    IndependentRecords,
    UniformChoice,
    WeightedChoice,
    weighted_choice,
)


@frozen_pytree
class Resampled(IndependentRecords):
    """Draws whole records from public arrays with a common leading axis."""

    public: Database
    choice: UniformChoice | WeightedChoice

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
        up the probabilities of all public records that equal the given one.

    Raises:
        TypeError: if the records or weights are not real arrays.
        ValueError: if they have no common leading axis, fewer than 2 records, or if a weight is not
            above 0, or is below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about the public records, not about the population that
        they came from. It does not cover a private record that differs from all of them. Each of p
        public records is in about 2/p of the pairs, as the old or the new record. So if gamma is
        larger than 2/p, all pairs with one particular record may be uncovered. Probabilities are
        within 2^-32 of the given ones.

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
    """Returns a copy of public records, and their number.

    Without a copy, JAX may share memory with the caller's NumPy arrays, which may change later.
    """
    public, count = public_arrays("records", records, least=2)
    return jax.block_until_ready(jax.tree.map(jnp.array, public)), count


def equal_entries(public: jax.Array, record: jax.Array) -> jax.Array:
    """Compares p public records with one record. Returns booleans of shape (p, entries)."""
    record = jnp.asarray(record)
    if record.shape != public.shape[1:]:
        raise ValueError(
            f"a record must have the shape of public ones, {public.shape[1:]}, got {record.shape}"
        )
    return (public == record[None]).reshape(public.shape[0], -1)


@frozen_pytree
class SmoothedResample(IndependentRecords):
    """Draws public records with Gaussian noise of standard deviation `spread` per coordinate."""

    resampled: Resampled
    spread: PyTree

    def record(self, key: Key) -> PyTree:
        structure = jax.tree.structure(self.resampled.public)
        key_choice, *keys = jax.random.split(key, 1 + structure.num_leaves)
        chosen = self.resampled.record(key_choice)
        return jax.tree.map(_smooth, jax.tree.unflatten(structure, keys), chosen, self.spread)

    def log_prob(self, record: PyTree) -> jax.Array:
        entries = jax.tree.map(_log_noise, self.resampled.public, record, self.spread)
        from_each = sum(jnp.sum(leaf, axis=1) for leaf in jax.tree.leaves(entries))
        return jax.nn.logsumexp(from_each + self.resampled.choice.log_probabilities)


def smoothed_resample(records: Database, bandwidth: float | None = None) -> IndependentRecords:
    """The smoothed bootstrap: resampled public records plus Gaussian noise on their floats.

    The standard deviation of a coordinate's noise is `bandwidth` times the standard deviation of
    this coordinate among the public records. Integers and booleans are resampled as they are.

    Args:
        records: a pytree of arrays with a common leading axis: public records, at least 2. A
            DataFrame counts as the dict of its columns.
        bandwidth: above 0; by default p^(-1/5) for p public records, Silverman's rate.

    Returns:
        An oracle: `oracle(key, n)` draws a database of n independent records. Its `log_prob` is a
        density in coordinates with noise, and a probability in the others.

    Raises:
        TypeError: if the records are not real arrays.
        ValueError: if they have no common leading axis or fewer than 2 records; if a number is NaN,
            infinite, or too large for a standard deviation; if bandwidth is not above 0.

    Formal guarantees:
        A guarantee under this oracle is about the smoothed public records, not about the population
        that they came from. `dpjax.accounting.under_distribution_shift` bounds the difference.

    Source:
        Silverman (1986), Section 3.4 and 6.4.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> oracle = dpjax.oracles.smoothed_resample(jnp.array([31.0, 44.0, 58.0]))
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5,)
    """
    public, count = public_records(records)
    width = count**-0.2 if bandwidth is None else _checks.positive("bandwidth", bandwidth)

    def spread(leaf: jax.Array) -> jax.Array:
        if not is_float(leaf):
            return jnp.zeros(leaf.shape[1:])
        # If all numbers of a column are equal, rounding may make `jnp.std` positive.
        varies = jnp.any(leaf != leaf[:1], axis=0)
        return jnp.where(varies, width * jnp.std(leaf.astype(float), axis=0), 0).astype(leaf.dtype)

    spreads = jax.tree.map(spread, public)
    if not all(_checks.is_traced(x) or jnp.isfinite(x).all() for x in jax.tree.leaves(spreads)):
        raise ValueError("records must be finite, with finite standard deviations")
    return SmoothedResample(Resampled(public, UniformChoice(count)), spreads)


def _smooth(key: jax.Array, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    if not is_float(leaf):
        return leaf
    return leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)


def _log_noise(public: jax.Array, record: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns log densities of the noise that turns each of p public records into `record`.

    The result has shape (p, entries): one log density for each entry of each public record.
    """
    equal = jnp.where(equal_entries(public, record), 0.0, -jnp.inf)
    if not is_float(public):
        return equal
    center = public.reshape(public.shape[0], -1)
    x = jnp.asarray(record, public.dtype).reshape(1, -1)
    spread = jnp.broadcast_to(scale.reshape(1, -1), center.shape)
    noisy = spread > 0
    density = jax.scipy.stats.norm.logpdf(x, center, jnp.where(noisy, spread, 1))
    return jnp.where(noisy, density, equal)


def words(frequencies: Mapping[str, float], *, width: int | None = None) -> IndependentRecords:
    """An oracle of words, drawn by their frequencies in a public table.

    A record is an array of the codes of a word's letters, as `dpjax.targets.encode_text` makes them
    and `dpjax.targets.letter_counts` counts them. For other records, such as the position of a word
    in the table, use `resample(arrays, weights)`.

    Args:
        frequencies: maps words to frequencies, finite and above 0, in any unit; at least 2 words.
        width: how many letters of a word are encoded, at least 1; by default all.

    Returns:
        An oracle: `oracle(key, n)` draws n independent words, shape (n, width), uint8. Its
        `log_prob` adds up the probabilities of all words of the table with the same codes.

    Raises:
        TypeError: if `frequencies` is not a table, or the width not an integer.
        ValueError: if there are fewer than 2 words, no word has a letter, or a frequency is not
            above 0, or below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about words of the table. It does not cover a private word
        that is not in the table. If gamma is larger than twice the probability of a word, all pairs
        with this word may be uncovered, too. Probabilities are within 2^-32 of the frequencies.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017): names
        by their frequency, for the example of the exponential mechanism.

    Example:
        >>> import dpjax
        >>> oracle = dpjax.oracles.words({"Smith": 1.006, "Johnson": 0.81})
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5, 7)
    """
    if not isinstance(frequencies, Mapping):
        raise TypeError(
            f"frequencies must be a table from word to frequency, got {_checks.shown(frequencies)}"
        )
    if len(frequencies) < 2:
        raise ValueError(f"frequencies must contain at least 2 words, got {len(frequencies)}")
    if width is None:
        width = max(len(letters_of(word)) for word in frequencies)
        if width == 0:
            raise ValueError("frequencies must contain a word with a letter from a to z, got none")
    codes = codes_of(frequencies, _checks.integer("width", width, least=1))
    return resample(codes, np.asarray(list(frequencies.values()), np.float64))
