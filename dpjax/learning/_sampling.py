"""Samples batches of records by pure functions of a key, with a fixed number of slots."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import frozen_pytree, static
from dpjax._core._types import Key
from dpjax._core._values import Scalar
from dpjax._tracing import _shards
from dpjax._tracing._fingerprints import digest
from dpjax.accounting._dp_sgd import Kind, least_capacity, share_of_batches
from dpjax.learning import _separation
from dpjax.random._keys import check_key, is_seeded

# A batch overflows if more records join than it has slots. The default capacity is the smallest for
# which a batch overflows with at most this probability.
RARE = 1e-15
_WORD = 2.0**32
# The value of `Turn.step` for a batch that may be used in any step, and for a batch that may not be
# used in any step.
ANY_TURN, NO_TURN = -1, -2
# With more bins, the probabilities of the bins would differ by more than 2^-48 from uniform.
_MOST_BINS = 2**16
# All steps share one key. This number is folded into it to make a second key. A number drawn from
# the second key identifies the shared key.
_TELLING = 0x62696E73


class Turn(NamedTuple):
    """The step for which a batch was drawn, and the key from which it was drawn.

    Attributes:
        step: the step; -1 if the batch may be used in every step.
        bins: if all steps use one key, as in `balls_in_bins_sampling`, a number that identifies
            this key; 0 otherwise.
    """

    step: Scalar = ANY_TURN
    bins: Scalar = 0


@frozen_pytree
class Batch:
    """Records that were drawn together; made by `sampling(key)`. The choice is private.

    Load the records at `indices`, and pass them to `clipped` together with the batch, which knows
    its empty slots. A batch may enter `jit`, and `jax.shard_map` with its slots spread over shards.
    Never concatenate two batches: a record may be in both, but the accounting assumes that it is in
    one slot only.

    Attributes:
        indices: int32 of shape (capacity,); an empty slot has the index of some record.
        capacity: the number of slots of the whole batch.
        drawn_by: an identifier of the sampling that made the batch.

    Formal guarantees:
        See the sampling that made it.
    """

    indices: jax.Array
    _mask: jax.Array
    capacity: int = static()
    drawn_by: int = static(default=0)
    # The step and the bins, repeated for each slot, so that the slots may be distributed over
    # shards. None if a batch may be used in every step.
    _turn: Turn | None = None

    @property
    def turn(self) -> Turn:
        """For which step the batch was drawn, and from which bins."""
        if self._turn is None:
            return Turn()
        axes = tuple(sorted(_shards.varying_axes(self._turn)))
        step, bins = (jnp.asarray(x)[0] for x in self._turn)
        return Turn(lax.pmax(step, axes), lax.pmax(bins, axes)) if axes else Turn(step, bins)

    @staticmethod
    def filled_slots(
        batch: object, size: int, axes: frozenset[str] = frozenset()
    ) -> tuple[jax.Array, int]:
        """Which slots of this shard contain a record, and the number of slots of all shards.

        Args:
            batch: a `Batch`. Outside of `jax.shard_map` it may also be a boolean mask of shape
                (size,), or True if every slot contains a record. With a mask or True, records count
                as chosen by the caller, not as drawn by a sampling.
            size: the number of slots of this shard. Outside of `jax.shard_map` it has all slots.
            axes: the mesh axes over which `jax.shard_map` splits the slots; empty outside of it.
        """
        shards = _shards.shard_count(axes) if axes else 1
        if isinstance(batch, Batch):
            mask = batch._mask
            # Concatenated batches have too many slots. So does a batch that was copied to several
            # shards.
            if mask.shape != (size,) or size * shards != batch.capacity:
                raise ValueError(
                    f"examples must fill each of the {batch.capacity} slots of the batch once, got "
                    f"{size} examples and {len(mask)} slots on each of {shards} shards: pass the "
                    "records at batch.indices, and do not concatenate, select or copy slots"
                )
            return mask, batch.capacity
        if axes:
            raise ValueError(
                "batch must be what sampling(key) returned inside jax.shard_map, to show that no"
                f" two shards have the same record, got {_checks.described(batch)}"
            )
        if batch is True:
            return jnp.ones(size, bool), size
        is_array = isinstance(batch, (jax.Array, np.ndarray))
        if is_array and batch.shape == (size,) and batch.dtype == bool:
            return jnp.asarray(batch), size
        raise ValueError(
            f"batch must be what sampling(key) returned, a boolean mask of shape ({size},), or True"
            f" if no slot is empty, got {_checks.described(batch)}"
        )


@dataclasses.dataclass(frozen=True)
class BatchSampling:
    """How batches are drawn; `sampling(key)` draws one.

    Attributes:
        kind: "poisson" draws each record independently; "fixed" draws a uniform subset; "bins" puts
            each record into a random bin; "separated" keeps the batches that contain the same
            record apart.
        n: the number of slots for records, public.
        rate: the probability that a record joins a batch, given that it may join this batch (see
            `groups`), public.
        capacity: the number of slots of a batch, public.
        groups: the number of groups or bins; 1 if a record may join all batches. A record may join
            the batch of step t only if t modulo `groups` is its group or bin. The group of slot i
            is i modulo `groups`. For "separated", there are no groups: a record joins at most one
            of any `groups` consecutive batches.

    Formal guarantees:
        See the factory that made it.
    """

    kind: Kind
    n: int
    rate: float
    capacity: int
    groups: int = 1

    @property
    def batch_size(self) -> float:
        """The number that divides a sum: the expected batch size if no slot is empty; public."""
        if self.one_key:
            return self.n * share_of_batches(self.rate, self.groups)
        return self.n * self.rate / self.groups

    @property
    def one_key(self) -> bool:
        """Whether one key draws the batches of all steps."""
        return self.kind in ("bins", "separated")

    def __call__(
        self, key: Key, present: jax.Array | None = None, *, step: Scalar | None = None
    ) -> Batch:
        """Draws a batch. It works in `jit`, and all batches share one program.

        Args:
            key: a key from `dpjax.random.secure_key`, a different key for each step. If `one_key`
                is True, pass the same key in all steps of a training, and another key in every
                other training: with the same key, the batches of both trainings have the same
                records, so together they cost more than their guarantees. A guarantee does not
                protect against somebody who knows the key, and so knows which records were used.
            present: booleans of shape (n,), the slots that contain a record, such as `present` of a
                `PaddedRecords`; None if all slots do. Empty slots are never in a batch.
            step: the number of the step, from 0. A `cyclic_sampling`, a `balls_in_bins_sampling`
                and a `min_separation_sampling` need it, because the step decides who may join.

        Returns:
            A `Batch`, for `clipped(parameters, records at batch.indices, batch)`.

        Raises:
            TypeError: if the key is not a typed key.
            ValueError: inside of `jax.shard_map` or `jax.pmap`, where every shard would draw the
                same batch; or if `present` is not such an array, or is given for batches of a fixed
                size; or if `step` is missing where it is needed, or is given elsewhere.
        """
        check_key(key)
        if (step is None) != (self.groups == 1):
            wanted = "None" if self.groups == 1 else "the number of the step"
            raise ValueError(
                f"step must be {wanted} for a sampling with groups={self.groups}, got"
                f" {_checks.described(step)}"
            )
        step = None if step is None else _whole_step(step)
        if present is not None:
            if self.kind == "fixed":
                raise ValueError(
                    "present must be None for batches of a fixed size, which have no empty slots:"
                    f" use poisson_sampling, got {_checks.described(present)}"
                )
            if jnp.shape(present) != (self.n,) or jnp.result_type(present) != np.dtype(bool):
                given = _checks.described(present)
                raise ValueError(f"present must be booleans of shape ({self.n},), got {given}")
            present = jnp.asarray(present)
        # All shards have the same key, so they would all choose the same slots, which the
        # accounting does not cover.
        _shards.refuse_inside(
            "sampling(key)", "draw one batch for all of them, and give each shard its slots"
        )
        return _draw(key, self, present, step)


def number_of(sampling: BatchSampling, *, seeded: bool) -> int:
    """A number from 1 to 2^32 - 2 that identifies a sampling, and whether its keys are seeded.

    A `ClippedSum` and a `NoiseState` contain this number, or 0 if the caller chose the records.
    """
    words = digest("sampling", dataclasses.astuple(sampling), seeded)
    return 1 + int(words[:8], 16) % (2**32 - 2)


def poisson_sampling(n: int, *, batch_size: float, capacity: int | None = None) -> BatchSampling:
    """Batches that each record joins independently, with probability batch_size / n.

    n is public. If the number of records is private, let n be a public number of slots that is
    large enough, put the records into `queries.padded_records`, and tell `sampling(key, present)`
    which slots contain a record. Never count n from private records: each record's rate would then
    depend on the others, which voids the guarantee under add-or-remove-one.

    A batch has a fixed number of slots, so that all batches share a program. If more records join,
    some of them are left out ("truncated Poisson"). The accounting charges for this.

    Args:
        n: the number of slots for records, public. If no slot is empty, the number of records.
        batch_size: the expected size of a batch if no slot is empty, above 0, at most n; public.
        capacity: the number of slots of a batch. With the default number, the probability that more
            records join is below 1e-15.

    Returns:
        A `BatchSampling`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Given uniform random bits, every record is in the batch independently of all others, with
        the probability `rate` exactly, a multiple of 2^-32 that is not above batch_size / n. If
        more records than `capacity` join, those with the highest indices are left out. The
        remaining records are in a uniformly random order, determined by a 128-bit random word for
        each record. The order is uniform unless two words are equal. The accounting charges for
        that, too.

    Source:
        Abadi et al. (2016); Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha and Zhang, "Scalable
        DP-SGD" (2024), for truncated batches.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.poisson_sampling(1000, batch_size=50)
        >>> batch = sampling(dpjax.random.secure_key())
        >>> batch.indices.shape == (sampling.capacity,)
        True
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    size = _checks.concrete_positive("batch_size", batch_size)
    rate = _rate(size, f"n={n}", n, size / n)
    return BatchSampling("poisson", n, rate, _capacity(capacity, n, rate))


def fixed_size_sampling(n: int, *, batch_size: int) -> BatchSampling:
    """Batches that are uniform subsets of a fixed size, without replacement.

    Args:
        n: the number of records, public.
        batch_size: the size of every batch, from 1 to n; public.

    Returns:
        A `BatchSampling`.

    Raises:
        TypeError: if a parameter is not an integer.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        The records with the smallest 128-bit random words form the batch. It is uniform over
        subsets, unless two words are equal. The accounting charges for that probability, which is
        below n^2 / 2^129. The accounting is for the relation replace-one, under which n is public.

    Source:
        Balle, Barthe and Gaboardi, "Privacy amplification by subsampling" (2018).

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.fixed_size_sampling(1000, batch_size=50)
        >>> batch = sampling(dpjax.random.secure_key())
        >>> len(set(batch.indices.tolist()))
        50
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    size = _checks.integer("batch_size", batch_size, least=1, most=n)
    return BatchSampling("fixed", n, size / n, size)


def cyclic_sampling(
    n: int, *, groups: int, batch_size: float, capacity: int | None = None
) -> BatchSampling:
    """Batches for correlated noise: each record is in a fixed group, and groups take turns.

    Slot i is in the group i mod groups. The batch of step t is drawn from the group t mod groups.
    Each record of this group joins with probability batch_size groups / n, independently of all
    others. So a record takes part at most once in any `groups` consecutive steps. With batch_size =
    n / groups, every record of the group joins, and `groups` steps are an epoch in a fixed order.

    Args:
        n: number of slots for records, public, as for `poisson_sampling`.
        groups: the number of groups, at least the number of bands of the strategy.
        batch_size: the expected size of a batch if no slot is empty, above 0, at most n / groups.
        capacity: slots of a batch, as for `poisson_sampling`.

    Returns:
        A `BatchSampling`, called as `sampling(key, step=t)`.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Those of `poisson_sampling` for the slots of the group of a step. The number of a slot alone
        determines its group. A batch stores its step. If it is used in another step, `guarantee`
        raises an error.

    Source:
        Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), arXiv 2306.08153,
        Algorithm 2.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.cyclic_sampling(1000, groups=10, batch_size=20)
        >>> batch = sampling(dpjax.random.secure_key(), step=3)
        >>> set((batch.indices[batch.indices > 0] % 10).tolist()) <= {3}
        True
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    groups = _checks.integer("groups", groups, least=1, most=n)
    size = _checks.concrete_positive("batch_size", batch_size)
    most = n / groups
    rate = _rate(size, f"n / groups = {most:g}", most * (1 + 1e-12), size * groups / n)
    return BatchSampling("poisson", n, rate, _capacity(capacity, -(-n // groups), rate), groups)


def balls_in_bins_sampling(n: int, *, bins: int, capacity: int | None = None) -> BatchSampling:
    """Batches for correlated noise: each record is in a random bin, and bins take turns.

    The batch of step t is bin t mod bins. So a record joins one batch in each cycle, at a secret
    place that is the same in all cycles. All steps use the same key, which puts records into bins.

    Args:
        n: number of slots for records, public, as for `poisson_sampling`.
        bins: the number of bins, from 2 to 65,536. It is also the number of steps of an epoch.
        capacity: slots of a batch, as for `poisson_sampling`.

    Returns:
        A `BatchSampling`, called as `sampling(key, step=t)`, with one key for all steps.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Given uniform random bits, every record is in each bin with probability 1 / bins, up to a
        difference below bins / 2^64, independently of all other records. Records beyond the
        capacity are left out, as in `poisson_sampling`. The state of the noise identifies the key
        of the bins. If steps used bins of different keys, `guarantee` raises an error.

    Source:
        Chua, Ghazi, Harrison, Leeman, Kamath, Kumar, Manurangsi, Sinha and Zhang, "Balls-and-bins
        sampling for DP-SGD" (2024), arXiv 2412.16802; Choquette-Choo, Ganesh, Haque, Steinke and
        Thakurta, "Near-exact privacy amplification for matrix mechanisms" (2024), arXiv 2410.06266.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.balls_in_bins_sampling(1000, bins=10)
        >>> key = dpjax.random.secure_key()
        >>> first, again = sampling(key, step=3), sampling(key, step=13)
        >>> set(first.indices.tolist()) == set(again.indices.tolist())
        True
    """
    n = _checks.integer("n", n, least=1, most=2**31 - 1)
    bins = _checks.integer("bins", bins, least=2, most=_MOST_BINS)
    return BatchSampling("bins", n, 1.0, _capacity(capacity, n, 1 / bins), bins)


def min_separation_sampling(
    n: int, *, separation: int, batch_size: float, capacity: int | None = None
) -> BatchSampling:
    """Batches for correlated noise: a record that joined a batch waits before it may join again.

    Let b be the separation. If a record joined none of the last b - 1 batches, it joins the next
    batch with probability q ("b-min-sep sampling"). After waiting, a record may join in any step,
    so its batches are less predictable than with groups or bins. All steps use the same key.

    The first batch that a record may join is random, such that all batches have the same expected
    size B = n q / (1 + (b - 1) q). With q = 1, this is `balls_in_bins_sampling` with b bins.

    Args:
        n: number of slots for records, public, as for `poisson_sampling`.
        separation: b, from 2 to 65,536, at least the number of bands of the strategy.
        batch_size: B, the expected size of a batch if no slot is empty, above 0, at most n / b. The
            rate of the sampling is q.
        capacity: slots of a batch, as for `poisson_sampling`.

    Returns:
        A `BatchSampling`, called as `sampling(key, step=t)`, with one key for all steps. Its cost
        grows with the number of batches that a record joined before step t.

    Raises:
        TypeError: if a parameter is not a number.
        ValueError: if a parameter is out of range.

    Formal guarantees:
        Given uniform random bits, the batches of a record have the distribution above, up to a
        difference below (b + 256 t) / 2^64 in t steps, independently of all other records. The
        batches of a record are at least b steps apart, always. Records beyond the capacity are left
        out, as in `poisson_sampling`, and wait as if they had joined. The state of the noise
        identifies the key. If steps used different keys, `guarantee` raises an error.

    Source:
        Dong and Ganesh, "Privacy Amplification for BandMF via b-Min-Sep Subsampling" (2026), arXiv
        2602.09338. docs/proofs/correlated-noise.md has a proof.

    Example:
        >>> import dpjax
        >>> sampling = dpjax.learning.min_separation_sampling(1000, separation=4, batch_size=50)
        >>> key = dpjax.random.secure_key()
        >>> batches = [sampling(key, step=t) for t in (3, 4)]
        >>> sampling.batch_size <= 50 and sampling.rate > 50 / 1000
        True
    """
    n = _checks.integer("n", n, least=2, most=2**31 - 1)
    separation = _checks.integer("separation", separation, least=2, most=min(n, _MOST_BINS))
    size = _checks.concrete_positive("batch_size", batch_size)
    most, able = n / separation, max(n - (separation - 1) * size, size)
    rate = _rate(size, f"n / separation = {most:g}", most * (1 + 1e-12), size / able)
    capacity = _capacity(capacity, n, share_of_batches(rate, separation))
    return BatchSampling("separated", n, rate, capacity, separation)


def _rate(size: float, bound: str, most: float, exact: float) -> float:
    """Rounds the exact rate of a batch size down to a multiple of 2^-32.

    A record joins the batch if its random 32-bit word is below a threshold. `most` is the largest
    batch size, and `bound` describes it in the error message.
    """
    words = int(min(exact, 1.0) * _WORD)
    if size > most or words == 0:
        raise ValueError(
            f"batch_size must be at most {bound}, and so large that a record that may join does so"
            f" with a probability of at least 2^-32, got {size:g}"
        )
    return words / _WORD


def _capacity(capacity: int | None, n: int, share: float) -> int:
    """Returns `capacity`, or a default for n records that join with probability `share` each."""
    if capacity is None:
        capacity = least_capacity(n, share, RARE)
    return _checks.integer("capacity", capacity, least=1, most=n)


def _whole_step(step: Scalar) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(step), jnp.integer) or jnp.ndim(step):
        raise ValueError(f"step must be an integer, 0 or above, got {_checks.described(step)}")
    if not _checks.is_traced(step) and not 0 <= int(step) < 2**31:
        raise ValueError(f"step must be from 0 to 2^31 - 1, got {int(step)}")
    step = jnp.asarray(step).astype(jnp.int32)
    # A traced step cannot raise an error. So a negative traced step becomes NO_TURN, and then no
    # guarantee covers the training.
    return jnp.where(step < 0, np.int32(NO_TURN), step)


@functools.partial(jax.jit, static_argnames="sampling")
def _draw(
    key: Key, sampling: BatchSampling, present: jax.Array | None, step: jax.Array | None
) -> Batch:
    """Draws a batch of records in a random order."""
    if sampling.kind == "fixed":
        everyone, turn = jnp.ones(sampling.n, bool), None
        order = _in_random_order(key, jnp.arange(sampling.n, dtype=jnp.int32), everyone)
        indices, mask = order[: sampling.capacity], everyone[: sampling.capacity]
    else:
        indices, mask, turn = _of_joining(key, sampling, present, step)
    drawn_by = number_of(sampling, seeded=is_seeded(key))
    turn = jax.tree.map(lambda x: jnp.broadcast_to(x, indices.shape), turn)
    return Batch(indices, mask, sampling.capacity, drawn_by, turn)


def _of_joining(
    key: Key, sampling: BatchSampling, present: jax.Array | None, step: jax.Array | None
) -> tuple[jax.Array, jax.Array, Turn | None]:
    """Returns the indices of the records that join, the mask of the slots, and the turn.

    The indices are in a random order.
    """
    key_joins, key_order = jax.random.split(key)
    joins, bins = _joins(key_joins, sampling, step), jnp.uint32(0)
    if present is not None:
        joins &= present
    if sampling.one_key and step is not None:
        bins = jax.random.bits(jax.random.fold_in(key, _TELLING), (), jnp.uint32)
        # The proof needs an order of records that is drawn independently in each step. So the order
        # is drawn from a separate key for each step.
        key_order = jax.random.fold_in(key_order, step)
    # The batch has a fixed size, so if too many records join, those with the highest indices are
    # left out.
    (indices,) = jnp.nonzero(joins, size=sampling.capacity, fill_value=0)
    mask = jnp.arange(sampling.capacity, dtype=jnp.int32) < jnp.sum(joins, dtype=jnp.int32)
    indices = _in_random_order(key_order, indices.astype(jnp.int32), mask)
    return indices, mask, None if step is None else Turn(step, bins)


def _joins(key: Key, sampling: BatchSampling, step: jax.Array | None) -> jax.Array:
    """Returns which slots would join the batch of a step if every slot contained a record."""
    n, groups = sampling.n, sampling.groups
    if sampling.kind == "separated" and step is not None:
        return _separation.joins(key, step, n=n, separation=groups, rate=sampling.rate)
    if sampling.kind == "bins" and step is not None:
        high, low = jax.random.bits(key, (2, n), jnp.uint32)
        return _separation.modulo(high, low, groups) == step.astype(jnp.uint32) % np.uint32(groups)
    if sampling.rate == 1:
        joins = jnp.ones(n, bool)
    else:
        words = jax.random.bits(key, (n,), jnp.uint32)
        joins = words < jnp.uint32(int(sampling.rate * _WORD))
    if step is not None:
        joins &= jnp.arange(n, dtype=jnp.int32) % groups == step % groups
    return joins


def _in_random_order(key: Key, indices: jax.Array, mask: jax.Array) -> jax.Array:
    """Permutes the indices uniformly, with the empty slots last.

    Floats are added up in the order of slots. In database order, removing a record would move all
    later records to other slots. The random orders of two neighbors can be coupled. Then only one
    record moves: the last record takes the slot of the removed record.
    """
    words = jax.random.bits(key, (4, len(indices)), jnp.uint32)
    *_, ordered = lax.sort((~mask, *words, indices), num_keys=5)
    return ordered
