"""Selects the k-th smallest of many floats exactly, in linear time."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dpjax._core import _checks
from dpjax._exact._numerics import compute_dtype

# Each step of a bisection reads all distances, which is slow on a CPU if they do not fit into its
# cache. So for at least `_MANY` distances, a CPU first selects the few distances near the result,
# and bisects only among these. An accelerator bisects among all distances just as fast.
_MANY, _INDEXABLE = 2**19, 2**31
_BLOCK = 2**15
_GROUP = 64  # This is below 2^16, so that two counts of a group fit into 32 bits.
_MOST_KEPT = 2**12
_NARROWINGS = 4

# Two bit patterns of floats, low and high, and how many distances are below each pattern. The
# number of distances below `low` is less than the rank, and the number below `high` is at least the
# rank.
_Bracket = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# Two bit patterns, and the counts that `_counts_of_groups` returns for these patterns.
_Seen = tuple[jax.Array, jax.Array, jax.Array]
_Looked = tuple[_Bracket, _Seen]


def order_statistic(distances: jax.Array, k: int | jax.Array) -> jax.Array:
    """The exact k-th smallest of m distances, in O(m) and without sorting.

    Non-negative floats sort like their bit patterns, read as unsigned integers. So the k-th
    smallest distance is the largest bit pattern with fewer than k distances below it. Bisection
    finds this pattern, with one pass over the distances for each bit (31 in float32, 63 in
    float64). If there are many distances, a CPU first brackets the result by a sample, and later
    passes read only the distances in the bracket. The function works under `jit` and `vmap`.

    Args:
        distances: shape (m,), non-negative; NaN and negative numbers count as infinite.
        k: the rank, counted from 1. A traced k out of range gives NaN.

    Returns:
        A scalar of the dtype of `distances` (float32 at least).

    Raises:
        TypeError: if k is not an integer or the distances are not floats.
        ValueError: if `distances` is not a non-empty vector or k is not between 1 and m.

    Formal guarantees:
        None of its own. If k comes from `dpjax.operating_point`, the result is the estimated
        sensitivity. But a mechanism treats a bare number as a global bound, so use
        `dpjax.sample_sensitivity` for anything that is published.

    Source:
        Algorithm 1 of Rubinstein and Aldà (2017), which sorts all distances to find this element.

    Example:
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> float(dpjax.order_statistic(jnp.array([3.0, jnp.inf, 1.0, 2.0]), 3))
        3.0
    """
    distances = jnp.asarray(_checks.real_arrays("distances", distances))
    if distances.ndim != 1 or distances.size == 0:
        raise ValueError(f"distances must have shape (m,), m >= 1, got {distances.shape}")
    if not jnp.issubdtype(distances.dtype, jnp.floating):
        raise TypeError(f"distances must be floats, got dtype {distances.dtype}")
    m = distances.shape[0]
    if not _checks.is_traced(k):
        k = _checks.integer("k", k, least=1, most=m)
    elif not jnp.issubdtype(jnp.asarray(k).dtype, jnp.integer):
        raise TypeError(f"k must be an integer, got a traced {jnp.asarray(k).dtype}")
    return _select(distances.astype(compute_dtype(distances.dtype)), jnp.asarray(k))


@jax.jit
def _select(distances: jax.Array, k: jax.Array) -> jax.Array:
    selected = select(distances, k)
    return jnp.where((k >= 1) & (k <= distances.size), selected, jnp.nan)


def select(distances: jax.Array, k: jax.Array, *, axis: str | None = None) -> jax.Array:
    """Returns the k-th smallest element of an array, or of all shards along a mesh axis.

    Devices exchange only counts. Distances stay on their devices.
    """
    flat, rank = distances.reshape(-1), k.astype(jnp.uint32)
    search = functools.partial(_search, axis=axis)
    if _MANY <= flat.size < _INDEXABLE:
        on_cpu = functools.partial(_search_many, axis=axis)
        pattern = lax.platform_dependent(flat, rank, cpu=on_cpu, default=search)
    else:
        pattern = search(flat, rank)
    return lax.bitcast_convert_type(pattern, distances.dtype)


def _patterns(distances: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * distances.dtype.itemsize}")
    # `abs` converts -0.0, whose sign bit is set, to 0.0.
    ordered = jnp.where(distances >= 0, jnp.abs(distances), jnp.inf)
    return lax.bitcast_convert_type(ordered, unsigned)


def _total(count: jax.Array, axis: str | None) -> jax.Array:
    return count if axis is None else lax.psum(count, axis)


def _all_patterns(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
    infinity = _patterns(jnp.full((), jnp.inf, distances.dtype))
    return jnp.zeros_like(infinity), infinity + 1


def _search(distances: jax.Array, rank: jax.Array, axis: str | None) -> jax.Array:
    """Returns the bit pattern of the distance that has this rank."""
    # Each bit takes one pass over all distances. The number of passes does not depend on data. If
    # it did, an accelerator would wait for the host after each pass.
    bits = 8 * distances.dtype.itemsize - 1
    return _search_among(_patterns(distances), rank, *_all_patterns(distances), bits, axis)


def _search_among(
    patterns: jax.Array,
    rank: jax.Array,
    low: jax.Array,
    high: jax.Array,
    halvings: int | jax.Array,
    axis: str | None,
) -> jax.Array:
    """Returns the largest pattern in [low, high) with fewer than `rank` patterns below it.

    Halving a bracket that contains one pattern does not change it, so `halvings` may be larger than
    needed.
    """

    def halve(_: jax.Array, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        few = _total(jnp.sum(patterns < middle, dtype=jnp.uint32), axis) < rank
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    return lax.fori_loop(0, halvings, halve, (low, high))[0]


def _search_many(distances: jax.Array, rank: jax.Array, axis: str | None) -> jax.Array:
    """Does the same as `_search`, but faster on a CPU.

    It brackets the result by a sample, and then by interpolation. Then it gathers the distances in
    the bracket, and bisects among them. If ties leave too many distances in the bracket, it bisects
    among all distances.
    """

    def narrowed(bracket: _Bracket, first: jax.Array, second: jax.Array) -> _Looked:
        low, high, below, above = bracket
        groups = _counts_of_groups(distances, first, second)
        counts = _total(_count_below(distances, groups, first, second), axis)
        for pattern, count in zip((first, second), counts, strict=True):
            few = count < rank
            low = jnp.where(few, jnp.maximum(low, pattern), low)
            below = jnp.where(few, jnp.maximum(below, count), below)
            high = jnp.where(few, high, jnp.minimum(high, pattern))
            above = jnp.where(few, above, jnp.minimum(above, count))
        return (low, high, below, above), (first, second, groups)

    def wide(state: tuple[jax.Array, _Looked]) -> jax.Array:
        step, ((low, high, below, above), _) = state
        return (step < _NARROWINGS) & (above - below > _MOST_KEPT) & (high - low > 1)

    def interpolate(state: tuple[jax.Array, _Looked]) -> tuple[jax.Array, _Looked]:
        step, (bracket, _) = state
        return step + 1, narrowed(bracket, *_around_rank(rank, bracket))

    m = _total(jnp.uint32(distances.size), axis)
    bracket = (*_all_patterns(distances), jnp.zeros_like(m), m)
    looked = narrowed(bracket, *_sampled_bracket(distances, rank, m, axis))
    _, (bracket, seen) = lax.while_loop(wide, interpolate, (jnp.zeros((), jnp.uint32), looked))
    low, high, below, _ = bracket
    kept, missed = _gather(distances, low, high, seen)
    bits = 8 * low.dtype.itemsize - lax.clz(high - low - 1).astype(jnp.int32)
    return lax.cond(
        _total(missed.astype(jnp.uint32), axis) == 0,
        lambda: _search_among(kept, rank - below, low, high, bits, axis),
        lambda: _search_among(_patterns(distances), rank, low, high, bits, axis),
    )


def _sampled_bracket(
    distances: jax.Array, rank: jax.Array, m: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns two bit patterns. The distance of this rank most likely lies between them.

    Both are bit patterns of distances in a sample of all distances. Their ranks in the sample are
    three standard errors below and above the expected rank.
    """
    sample = distances[:: round(distances.size ** (1 / 3))]
    size = _total(jnp.uint32(sample.size), axis).astype(jnp.float32)
    share = jnp.minimum(rank.astype(jnp.float32) / m.astype(jnp.float32), 1)
    margin = 3 * jnp.sqrt(size * share * (1 - share)) + 2

    def at(place: jax.Array) -> jax.Array:
        return _search(sample, jnp.clip(place, 1, size).astype(jnp.uint32), axis)

    first, last = jax.vmap(at)(size * share + jnp.stack([-margin, margin]))
    return first, last + 1


def _around_rank(rank: jax.Array, bracket: _Bracket) -> tuple[jax.Array, jax.Array]:
    """Returns two bit patterns. The distance of this rank most likely lies between them.

    The bit pattern of this distance is estimated by linear interpolation in the bracket. This
    assumes uniformly distributed patterns. The margin on either side of the estimate is a fraction
    of the bracket: 1/64, for densities that are not uniform, plus 3 / sqrt(i) if i distances are in
    the bracket. The term 3 / sqrt(i) is at least six standard deviations of the position of the
    pattern in the bracket.
    """
    low, high, below, above = bracket
    inside = (above - below).astype(jnp.float32)
    share = (rank - below).astype(jnp.float32) / inside
    margin = 1 / 64 + 3 / jnp.sqrt(inside)

    def at(share: jax.Array) -> jax.Array:
        step = jnp.clip(share, 0, 1) * (high - low).astype(jnp.float32)
        return jnp.minimum(low + step.astype(low.dtype), high)

    return at(share - margin), at(share + margin)


def _counts_of_groups(distances: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """For each group, counts the bit patterns below `first`, and those in [first, second).

    The patterns are those of the distances. A group consists of every `_BLOCK // _GROUP`-th
    distance of a block. The two counts of a group share one uint32, with the second count in the
    upper 16 bits. Distances after the last whole block are not in any group.
    """

    def count(index: jax.Array) -> jax.Array:
        block = lax.dynamic_slice(distances, (index * _BLOCK,), (_BLOCK,))
        patterns = _patterns(block).reshape(_GROUP, -1)
        below = (patterns < first).astype(jnp.uint32)
        # The subtraction is unsigned, so patterns below the first pattern wrap around to large
        # numbers.
        between = (patterns - first < second - first).astype(jnp.uint32)
        return jnp.sum(below + (between << 16), axis=0, dtype=jnp.uint32)

    return lax.map(count, jnp.arange(distances.size // _BLOCK)).reshape(-1)


def _count_below(
    distances: jax.Array, groups: jax.Array, first: jax.Array, second: jax.Array
) -> jax.Array:
    """Returns how many distances have bit patterns below `first`, and how many below `second`.

    `groups` is the result of `_counts_of_groups`.
    """
    rest = _patterns(distances[distances.size // _BLOCK * _BLOCK :])
    below = jnp.sum(groups & 0xFFFF, dtype=jnp.uint32)
    below_both = below + jnp.sum(groups >> 16, dtype=jnp.uint32)
    in_rest = [jnp.sum(rest < pattern, dtype=jnp.uint32) for pattern in (first, second)]
    return jnp.stack([below, below_both]) + jnp.stack(in_rest)


def _gather(
    distances: jax.Array, low: jax.Array, high: jax.Array, seen: _Seen
) -> tuple[jax.Array, jax.Array]:
    """Returns the bit patterns of distances in [low, high), and whether there are too many.

    The patterns are padded with `high`. The function reads only the groups that contain such a
    pattern, and the distances that are in no group.
    """
    first, second, groups = seen
    groups = lax.cond(
        (first == low) & (second == high),
        lambda: groups,
        lambda: _counts_of_groups(distances, low, high),
    )
    columns = _BLOCK // _GROUP
    occupied = groups >> 16 > 0
    (found,) = jnp.nonzero(occupied, size=_MOST_KEPT, fill_value=occupied.size)
    firsts = found // columns * _BLOCK + found % columns
    members = firsts[:, None] + columns * jnp.arange(_GROUP)[None, :]
    real = jnp.broadcast_to((found < occupied.size)[:, None], members.shape)
    grouped = _patterns(distances.at[members].get(mode="clip"))
    rest = _patterns(distances[distances.size // _BLOCK * _BLOCK :])
    kept = jnp.concatenate([jnp.where(real, grouped, high).reshape(-1), rest])
    return jnp.where(kept - low < high - low, kept, high), jnp.sum(occupied) > _MOST_KEPT
