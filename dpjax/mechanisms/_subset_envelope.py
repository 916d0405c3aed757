"""The subset envelope: a differentially private release of the result of any program.

docs/proofs/subset-envelope.md has the proofs.

The records are divided into blocks, and the program is evaluated on subsets of the blocks. Removing
a block also removes every subset that contains the block. The loss of a number y is the least
number of blocks to remove until no remaining subset has a result above y. Changing one block
changes the loss by at most 1, for any program (docs/proofs/subset-envelope.md).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec, frozen_pytree, static
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Scalar, Target
from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._lanes import program_of_a_number
from dpjax._tracing._programs import Program
from dpjax.mechanisms._selection import SelectionMechanism, exponential
from dpjax.mechanisms._smooth_quantile import check_bounds
from dpjax.mechanisms._start import begin
from dpjax.release._mechanism import SensitivityMechanism

# The subsets that are evaluated at the same time need about this many bytes.
_MOST_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class BlockDesign:
    """Blocks in groups. The subsets are all sets of `size` blocks within one group.

    Attributes:
        blocks: the number of blocks.
        size: the number of blocks in a subset.
        groups: the number of groups. Their sizes differ by at most 1.
    """

    blocks: int
    size: int
    groups: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the number of blocks in each group. If `size` is 1, each block is a group."""
        groups = self.blocks if self.size == 1 else self.groups
        least, larger = divmod(self.blocks, groups)
        return tuple(least + (group < larger) for group in range(groups))

    @property
    def evaluations(self) -> int:
        """Returns the number of subsets."""
        return sum(math.comb(length, self.size) for length in self.lengths)

    @property
    def most_losses(self) -> int:
        """Returns T, the largest possible loss.

        A group with fewer than `size` blocks has no subset. T is the number of blocks to remove
        until each group has only `size - 1` blocks.
        """
        return sum(length - self.size + 1 for length in self.lengths)

    @functools.cached_property
    def subsets(self) -> np.ndarray:
        """Returns the indices of the blocks in every subset, shape (evaluations, size)."""
        starts = np.cumsum((0, *self.lengths[:-1]))
        return np.concatenate(
            [
                start + np.array(list(itertools.combinations(range(length), self.size)), np.int32)
                for start, length in zip(starts, self.lengths, strict=True)
            ]
        ).astype(np.int32)

    def evaluate(
        self, program: Callable[[Database], jax.Array], database: Database, size: int
    ) -> jax.Array:
        """Evaluates the program on the records of every subset.

        Record i is in block i modulo `blocks`, so that blocks are similar even if records are
        sorted. Each block has n // blocks records, and the last n % blocks records are not used.
        The number of subsets that are evaluated at the same time depends only on shapes.

        Args:
            program: maps records to a scalar.
            database: a pytree of arrays with leading axis n.
            size: the bytes that one evaluation takes.
        """
        n = jax.tree.leaves(database)[0].shape[0]
        records = n // self.blocks

        def by_block(x: jax.Array) -> jax.Array:
            used = x[: records * self.blocks]
            return jnp.swapaxes(used.reshape(records, self.blocks, *x.shape[1:]), 0, 1)

        in_blocks = jax.tree.map(by_block, database)

        def one(chosen: jax.Array) -> jax.Array:
            def subset(x: jax.Array) -> jax.Array:
                return x[chosen].reshape(self.size * records, *x.shape[2:])

            return program(jax.tree.map(subset, in_blocks))

        at_once = max(1, _MOST_BYTES // max(1, size))
        if at_once >= self.evaluations:
            return jax.vmap(one)(jnp.asarray(self.subsets))
        return lax.map(one, jnp.asarray(self.subsets), batch_size=at_once)

    def thresholds(self, results: jax.Array) -> jax.Array:
        """Returns the numbers at which the loss changes.

        For every y, exactly loss(y) of these numbers exceed y.

        Args:
            results: the results of all subsets, shape (evaluations,), without NaN.

        Returns:
            An array of shape (most_losses,).
        """
        ends = np.cumsum([math.comb(length, self.size) for length in self.lengths])[:-1]
        parts = jnp.split(results, ends)
        return jnp.concatenate(
            [
                _thresholds_of_group(part, length, self.size)
                for part, length in zip(parts, self.lengths, strict=True)
            ]
        )


def _thresholds_of_group(results: jax.Array, length: int, size: int) -> jax.Array:
    """Returns m_0, m_1, ...: m_c is the least y whose loss in this group is at most c."""
    if size == length:  # There is only one subset.
        return results
    subsets = itertools.combinations(range(length), size)
    masks = np.array([sum(1 << block for block in chosen) for chosen in subsets])
    # `largest[mask]` is the largest result of any subset that contains only blocks in the bit mask.
    largest = jnp.full(2**length, -jnp.inf, results.dtype).at[masks].set(results)
    for block in range(length):
        without, with_block = jnp.moveaxis(largest.reshape(-1, 2, 2**block), 1, 0)
        largest = jnp.stack([without, jnp.maximum(without, with_block)], axis=1).ravel()
    stay = np.bitwise_count(np.arange(2**length))
    counts = range(length, size - 1, -1)
    return jnp.stack([jnp.min(largest[np.flatnonzero(stay == count)]) for count in counts])


def losses_at_ends(thresholds: jax.Array, inner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the losses at the left and at the right end of every candidate, int32.

    Each candidate is an interval. The first interval starts at minus infinity, where the loss is
    the number of thresholds. The last interval ends at infinity, where the loss is 0.

    Args:
        thresholds: from `BlockDesign.thresholds`.
        inner: the ends that two neighboring candidates share, in increasing order.
    """
    above = jnp.sum(thresholds[:, None] > inner[None, :], axis=0, dtype=jnp.int32)
    most = jnp.full(1, thresholds.size, jnp.int32)
    return jnp.concatenate([most, above]), jnp.concatenate([above, jnp.zeros(1, jnp.int32)])


def doubled_scores(thresholds: jax.Array, inner: jax.Array) -> jax.Array:
    """Returns twice the score of each candidate, which is an integer.

    A candidate is an interval with a loss at each of its two ends. T is the largest possible loss.
    If T / 2 lies between the two losses, the score is 0. Otherwise the score is minus the distance
    from T / 2 to the nearer loss. Changing one record changes the loss at each end by at most 1, so
    twice the score changes by at most 2.
    """
    left, right = losses_at_ends(thresholds, inner)
    return -jnp.maximum(0, jnp.maximum(2 * right - thresholds.size, thresholds.size - 2 * left))


# A group of this many blocks needs tables of 2^20 numbers.
_MOST_IN_A_GROUP = 20
_MOST_EVALUATIONS = 10**6
_MOST_CANDIDATES = 2**20
# If `size` is this number of bytes, `BlockDesign.evaluate` runs one evaluation at a time.
_ALONE = 2**62
# This factor covers the float32 rounding errors of the odds in `SubsetEnvelope.outside`.
_OUTWARD = 1 + 2.0**-12


@frozen_pytree
class Candidate:
    """The selected candidate, which is an interval; made by a `SubsetEnvelope`.

    Attributes:
        index: the index of the candidate from 0, int32; -1 if a traced parameter was bad.
        value: the middle of the interval.

    Formal guarantees:
        None of its own.
    """

    index: jax.Array
    value: jax.Array

    def __repr__(self) -> str:
        return f"Candidate(index={self.index}, value={self.value})"


@frozen_pytree
class SubsetEnvelope(SensitivityMechanism):
    """Evaluates a program on subsets of the records; made by `subset_envelope`.

    Attributes:
        sensitivity: a bound of 1 in the norm "hamming": one record changes.
        epsilon: the epsilon of the guarantee.
        target: the program.
        design: the blocks and their subsets.
        lower: the left end of the first candidate.
        upper: the right end of the last candidate.
        candidates: the number of candidates.

    Formal guarantees:
        Those stated by the factory function that created the object.
    """

    target: Target = static()
    design: BlockDesign = static()
    lower: float = static()
    upper: float = static()
    candidates: int = static()
    _calls_user = True

    @property
    def selection(self) -> SelectionMechanism:
        """The mechanism that selects a candidate by its doubled score, at sensitivity 2."""
        return exponential(2.0, self.epsilon)

    @property
    def zcdp(self) -> tuple[float, float]:
        """The cost of one selection in zCDP: rho = epsilon^2 / 8 and delta = 0."""
        return self.selection.zcdp

    @property
    def outside(self) -> Scalar:
        """A bound on the probability that the selected candidate is outside of the results' range.

        A candidate is an interval. It is outside of the range if all results are below it, or all
        results are above it. The bound is x / (1 + x), x = (candidates - 1) exp(-epsilon T / 4).
        The largest possible loss T is blocks - groups * (size - 1). The bound is attained if all
        subsets have the same result. If results spread over k candidates in the middle, the
        probability is about k times smaller.
        """
        scores = jax.ShapeDtypeStruct((self.candidates,), jnp.int32)
        scale = self.selection.effective_scale(like=scores)
        numpy = jnp if _checks.is_traced(scale) else np
        odds = (self.candidates - 1) * numpy.exp(-self.design.most_losses / scale) * _OUTWARD
        bound = odds / (1 + odds)
        return bound if _checks.is_traced(scale) else float(bound)

    def _middles(self, dtype: np.dtype) -> jax.Array:
        ends = np.linspace(self.lower, self.upper, self.candidates + 1)
        return jnp.asarray((ends[1:] + ends[:-1]) / 2, dtype)

    def _frozen(self, value: TreeSpec) -> Self:
        return dataclasses.replace(self, target=self._program(value.tree()))

    def _program(self, value: Value) -> Program:
        """Traces the target on the records of a subset; refuses a target that may mix subsets."""
        if isinstance(self.target, Program):
            return self.target
        self._check_records(value)
        blocks, size = self.design.blocks, self.design.size

        def subset(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            records = leaf.shape[0] // blocks * size
            return jax.ShapeDtypeStruct((records, *leaf.shape[1:]), leaf.dtype)

        return program_of_a_number("target", self.target, jax.tree.map(subset, value))

    def _scores(self, value: Value) -> tuple[jax.Array, np.dtype]:
        """Returns twice the score of every candidate, and the dtype of releases."""
        program = self._program(value)
        (leaf,) = program.outputs.leaves
        dtype = compute_dtype(leaf.dtype)

        def one(records: Database) -> jax.Array:
            (found,) = jax.tree.leaves(program(records))
            return found.astype(dtype)

        # If a worker process on the host dies, all evaluations of its batch fail. So a target that
        # runs code on the host is evaluated on one subset at a time.
        size = _ALONE if program.calls_host else program.largest_array
        results = self.design.evaluate(one, value, size)
        # Replacing NaN by a constant preserves the guarantee. It only defines another program, and
        # the proof is valid for any program.
        results = jnp.where(jnp.isnan(results), -jnp.inf, results)
        inner = np.linspace(self.lower, self.upper, self.candidates + 1)[1:-1]
        thresholds = self.design.thresholds(results)
        return doubled_scores(thresholds, jnp.asarray(inner, dtype)), dtype

    def _check_value(self, value: Value) -> None:
        self._check_records(value)
        self._program(value)
        selection = self.selection
        selection._check_value(jax.ShapeDtypeStruct((self.candidates,), jnp.int32))

    def _check_records(self, value: Value) -> None:
        n = _checks.count_records("value", value)
        if n < self.design.blocks:
            raise ValueError(
                f"value must have at least as many records as blocks={self.design.blocks}, got {n}"
            )

    def _draw(self, key: Key, value: Value) -> Candidate:
        scores, dtype = self._scores(value)
        index = self.selection._draw(key, scores)
        middle = self._middles(dtype)[jnp.maximum(index, 0)]
        return Candidate(index, jnp.where(index < 0, jnp.nan, middle))

    def clamped(self, value: Value) -> Value:
        """The records without a change, because the mechanism does not clamp them.

        Args:
            value: a pytree of arrays of records.

        Returns:
            The same arrays.
        """
        return _checks.real_arrays("value", value)

    def scores(self, value: Value) -> jax.Array:
        """The score of every candidate. The best possible score is 0.

        A candidate is an interval with a loss at each of its two ends. T is the largest possible
        loss; `dpjax.subset_envelope` defines losses. If T / 2 lies between the two losses, the
        score is 0. Otherwise it is minus the distance from T / 2 to the nearer loss.

        Scores are as private as the records. Call this method on public or simulated records to see
        which candidates a release would probably select.

        Args:
            value: a pytree of arrays of records.

        Returns:
            Floats of shape (candidates,): multiples of 1/2.
        """
        value = self._checked(value)
        return _compiled_scores(self._frozen(TreeSpec.of(value)), value)

    def log_prob(self, output: Value, value: Value) -> jax.Array:
        value = self._checked(value)
        scores, dtype = self._scores(value)
        found = self.selection.log_prob(output.index, scores)
        middle = self._middles(dtype)[jnp.clip(output.index, 0, self.candidates - 1)]
        return jnp.where(output.value == middle, found, -jnp.inf)

    def grids(self, value: Value) -> PyTree:
        """The grid spacings of an output: 1 for its index, and 0 for its value.

        The spacing 0 means that the value of an output is on no grid: it is the middle of an
        interval. The spacings do not depend on the argument `value`.
        """
        del value
        return Candidate(jnp.float32(1), jnp.float32(0))


def subset_envelope(
    target: Target,
    epsilon: Scalar,
    *,
    lower: float,
    upper: float,
    blocks: int = 38,
    size: int = 6,
    groups: int = 3,
    candidates: int = 1024,
) -> SubsetEnvelope:
    """Releases the result of any program, without a sensitivity, an oracle or a model of the data.

    The mechanism cuts the records into blocks, and assigns the blocks to groups. It runs the
    program on the records of every subset: every set of `size` blocks within a group. Removing a
    block also removes every subset that contains the block. The loss of a number y is the least
    number of blocks to remove until no remaining result is above y. As y grows, the loss decreases
    from T, the largest possible loss, to 0. A candidate is an interval. The release is a candidate
    near which the loss is likely to fall below T / 2. With size=1 this is sample-and-aggregate with
    a median. Larger subsets have more records, so their results are closer to the result on all
    records.

    Args:
        target: maps a pytree of arrays with a leading axis of records to one number. It runs on
            n // blocks * size records.
        epsilon: finite, above 0.
        lower: the left end of the first candidate; public. Results below `lower` count as results
            in the first candidate.
        upper: the right end of the last candidate; public.
        blocks: the number of blocks, at most n. Record i is in block i modulo blocks, and the last
            n % blocks records are not used.
        size: the number of blocks in a subset.
        groups: the number of groups. Each group has at least `size` blocks, and at most 20. It has
            no effect if size is 1.
        candidates: the number of intervals of equal length between `lower` and `upper`.

    Returns:
        A `SubsetEnvelope`: `mechanism(key, database)` takes a pytree of arrays with leading axis n,
        and releases a `Candidate`. Subsets are evaluated in large batches; host code runs on one
        subset at a time. `mechanism.outside` bounds the probability that the release is outside of
        the range of all results. Check this bound first: for T = 23 and epsilon 1 it is .77 with
        1,024 candidates, and .17 with 64.

    Raises:
        TypeError: if target is not a function, or a parameter not a number; at a release, if the
            target closes over a traced value.
        ValueError: if a number is out of range, or there are more than 10^6 subsets; at a release,
            if there are too few records, or the target does not return one number, or it contains
            operations that may mix subsets under `vmap`, such as draws with "rbg" keys.

    Formal guarantees:
        epsilon-DP when one record is replaced, for any target, by the proof in
        docs/proofs/subset-envelope.md, and epsilon^2 / 8-zCDP. Both are true of the integers that
        are drawn. A replaced record changes every score by at most 1. Blocks and subsets depend
        only on n, and each result depends only on the records of its subset. NaN counts as a result
        below `lower`.

        The running time of the target is not protected. It may reveal records if the target loops
        until convergence, or runs on the host.

    Source:
        Fang, Dong and Yi, "Shifted inverse" (2022), by blocks and with subsets of one size; Steinke
        (2023) on differentialprivacy.org; Nissim, Raskhodnikova and Smith (2007) for
        sample-and-aggregate. Steinke and Steinke (2025) study the trade-off between data and
        evaluations, and Linder et al. (2025) study queries of subsets of records.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> private_spread = dpjax.subset_envelope(
        ...     jnp.std, 2.0, lower=0.0, upper=1.0, candidates=64
        ... )
        >>> release = private_spread(dpjax.random.seeded_key(0), jnp.linspace(0, 1, 3800))
        >>> release.guarantee
        (epsilon=2, delta=0)-DP, under replace-one, seeded key
    """
    _checks.function("target", target)
    sensitivity, epsilon = begin("hamming", 1.0, epsilon)
    low, high = check_bounds(lower, upper)
    blocks = _checks.integer("blocks", blocks, least=1)
    size = _checks.integer("size", size, least=1, most=blocks)
    groups = _checks.integer("groups", groups, least=1, most=blocks)
    candidates = _checks.integer("candidates", candidates, least=2, most=_MOST_CANDIDATES)
    design = BlockDesign(blocks, size, groups)
    lengths = design.lengths
    if min(lengths) < size or (size > 1 and max(lengths) > _MOST_IN_A_GROUP):
        raise ValueError(
            f"each group must have from size={size} to {_MOST_IN_A_GROUP} blocks, got"
            f" {min(lengths)} to {max(lengths)}: choose other blocks or groups"
        )
    if design.evaluations > _MOST_EVALUATIONS:
        raise ValueError(
            f"there may be at most {_MOST_EVALUATIONS:,} subsets, got {design.evaluations:,}:"
            " choose more groups or another size"
        )
    return SubsetEnvelope(sensitivity, epsilon, target, design, low, high, candidates)


@jax.jit
def _compiled_scores(mechanism: SubsetEnvelope, value: Value) -> jax.Array:
    return mechanism._scores(value)[0] / 2
