"""Which examples make a batch: pure functions of a key, with masks instead of sizes."""

import bisect
import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import scipy
from jax import lax

from dpjax import _checks, _shards
from dpjax.random._keys import check_key

# Of a batch that is cut off, where the caller names no capacity.
_RARE = 1e-15
_WORD = 2.0**32


@dataclasses.dataclass(frozen=True)
class BatchSampling:
    """How batches are drawn; `sampling(key)` draws one, as indices and a mask.

    Attributes:
        kind: "poisson", each record by itself, or "fixed", a uniform subset.
        n: number of records.
        rate: the probability that a record is in a batch.
        capacity: the number of slots of a batch.

    Formal guarantees:
        Those of the factory that made it.
    """

    kind: Literal["poisson", "fixed"]
    n: int
    rate: float
    capacity: int

    @property
    def batch_size(self) -> float:
        """The expected size of a batch, public: what a sum is divided by."""
        return self.n * self.rate

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws a batch; jit-able, and one program for all batches.

        Args:
            key: a key from `dpjax.random.secure_key`, another one for each step: who knows it knows
                whose records were used, and the guarantee no longer holds.

        Returns:
            Indices of shape (capacity,), int32, and a mask: where it is False the slot is empty,
            and its index is one of a record all the same.

        Raises:
            TypeError: if the key is not a typed key.
            ValueError: inside of `jax.shard_map` or `jax.pmap`, where every shard would draw.
        """
        check_key(key)
        # Under one key all shards would choose the same places, which the accounting rules out.
        _shards.refuse_inside(
            "sampling(key)", "draw one batch for all of them, and hand each shard its slots"
        )
        return _poisson(key, self) if self.kind == "poisson" else _fixed(key, self)


def poisson_sampling(n: int, *, batch_size: float, capacity: int | None = None) -> BatchSampling:
    """Batches that each record joins by itself, with probability batch_size / n.

    A batch has a fixed number of slots, so that all of them share a program. Records beyond it are
    left out ("truncated Poisson"), which the accounting charges for.

    Args:
        n: number of records.
        batch_size: the expected size of a batch, above 0, at most n.
        capacity: slots; if None, so many that a batch exceeds them with probability below 1e-15.

    Returns:
        A `BatchSampling`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Given uniform random bits, every record is in the batch independently of all others, with
        the probability `rate` exactly, a multiple of 2^-32 that is not above batch_size / n. Where
        more than `capacity` are, those of the highest indices are left out.

    Source:
        Abadi et al. (2016); Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha and Zhang, "Scalable
        DP-SGD" (2024), for truncated batches.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> indices, mask = sampling(dpjax.random.secure_key())
        >>> indices.shape == mask.shape == (sampling.capacity,)
        True
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    size = _checks.positive("batch_size", batch_size)
    _checks.host_only("batch_size", size, "a concrete number")
    words = int(size / n * _WORD)
    if size > n or words == 0:
        raise ValueError(f"batch_size must be at most n={n} and above n / 2^32, got {size:g}")
    rate = words / _WORD
    if capacity is None:
        # By search: SciPy's own inverse fails where the rate is small.
        exceeds = functools.partial(scipy.stats.binom.sf, n=n, p=rate)
        capacity = min(n, bisect.bisect_left(range(n), True, key=lambda x: exceeds(x) <= _RARE) + 1)
    capacity = _checks.integer("capacity", capacity, least=1, most=n)
    return BatchSampling("poisson", n, rate, capacity)


def fixed_size_sampling(n: int, *, batch_size: int) -> BatchSampling:
    """Batches that are uniform subsets of a fixed size, without replacement.

    Args:
        n: number of records.
        batch_size: of every batch, from 1 to n.

    Returns:
        A `BatchSampling`.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        The records of the least 128-bit random words make the batch, which is uniform over subsets
        but where two words are equal: with probability below n^2 / 2^129, which the accounting
        charges for. It is for the relation replace-one, under which n is public.

    Source:
        Balle, Barthe and Gaboardi, "Privacy amplification by subsampling" (2018).

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.fixed_size_sampling(1000, batch_size=50)
        >>> indices, mask = sampling(dpjax.random.secure_key())
        >>> len(set(indices.tolist())), bool(mask.all())
        (50, True)
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    size = _checks.integer("batch_size", batch_size, least=1, most=n)
    return BatchSampling("fixed", n, size / n, size)


@functools.partial(jax.jit, static_argnames="sampling")
def _poisson(key: jax.Array, sampling: BatchSampling) -> tuple[jax.Array, jax.Array]:
    if sampling.rate == 1:
        joins = jnp.ones(sampling.n, bool)
    else:
        words = jax.random.bits(key, (sampling.n,), jnp.uint32)
        joins = words < jnp.uint32(int(sampling.rate * _WORD))
    (indices,) = jnp.nonzero(joins, size=sampling.capacity, fill_value=0)
    mask = jnp.arange(sampling.capacity, dtype=jnp.int32) < jnp.sum(joins, dtype=jnp.int32)
    return indices.astype(jnp.int32), mask


@functools.partial(jax.jit, static_argnames="sampling")
def _fixed(key: jax.Array, sampling: BatchSampling) -> tuple[jax.Array, jax.Array]:
    words = jax.random.bits(key, (4, sampling.n), jnp.uint32)
    *_, order = lax.sort((*words, jnp.arange(sampling.n, dtype=jnp.int32)), num_keys=4)
    return order[: sampling.capacity], jnp.ones(sampling.capacity, bool)
