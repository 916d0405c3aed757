"""Public records with noise: an oracle that also draws records between the public ones."""

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree
from dpjax._core._types import Database, Key, PyTree
from dpjax.oracles._choices import UniformChoice
from dpjax.oracles._independent import IndependentRecords
from dpjax.oracles._resample import Resampled, equal_entries, public_records


@frozen_pytree
class SmoothedResample(IndependentRecords):
    """Public records with Gaussian noise; `spread` is its standard deviation, per coordinate."""

    resampled: Resampled
    spread: PyTree

    def record(self, key: Key) -> PyTree:
        leaves, structure = jax.tree.flatten(self.resampled.public)
        key_choice, *keys = jax.random.split(key, 1 + len(leaves))
        chosen = jax.tree.leaves(self.resampled.record(key_choice))
        spread = jax.tree.leaves(self.spread)
        smoothed = [_smooth(*leaf) for leaf in zip(keys, chosen, spread, strict=True)]
        return jax.tree.unflatten(structure, smoothed)

    def log_prob(self, record: PyTree) -> jax.Array:
        entries = jax.tree.map(_log_noise, self.resampled.public, record, self.spread)
        from_each = sum(jnp.sum(leaf, axis=1) for leaf in jax.tree.leaves(entries))
        return jax.nn.logsumexp(from_each + self.resampled.choice.log_probabilities)


def smoothed_resample(records: Database, bandwidth: float | None = None) -> IndependentRecords:
    """The smoothed bootstrap: resampled public records plus Gaussian noise on their floats.

    The noise of a coordinate has `bandwidth` times the coordinate's standard deviation among the
    public records. Integers and booleans are resampled as they are.

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
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape[1:])
        varies = jnp.any(leaf != leaf[:1], axis=0)  # Of equal numbers, std may round to above 0.
        return jnp.where(varies, width * jnp.std(leaf.astype(float), axis=0), 0).astype(leaf.dtype)

    spreads = jax.tree.map(spread, public)
    if not all(_checks.is_traced(x) or jnp.isfinite(x).all() for x in jax.tree.leaves(spreads)):
        raise ValueError("records must be finite, with finite standard deviations")
    return SmoothedResample(Resampled(public, UniformChoice(count)), spreads)


def _smooth(key: jax.Array, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)


def _log_noise(public: jax.Array, record: jax.Array, scale: jax.Array) -> jax.Array:
    """Log density of the noise from each public record to another, shape (p, entries)."""
    equal = jnp.where(equal_entries(public, record), 0.0, -jnp.inf)
    if not jnp.issubdtype(public.dtype, jnp.floating):
        return equal
    center, x = (
        public.reshape(public.shape[0], -1),
        jnp.asarray(record, public.dtype).reshape(1, -1),
    )
    spread = jnp.broadcast_to(scale.reshape(1, -1), center.shape)
    noisy = spread > 0
    density = jax.scipy.stats.norm.logpdf(x, center, jnp.where(noisy, spread, 1))
    return jnp.where(noisy, density, equal)
