"""`sample_distances`: the distances of random pairs, as a pure function that can be jitted."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._values import Norm, Oracle, Positions, Target
from dpjax._running._devices import Layout, outside_any_mesh
from dpjax._running._processes import together
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._chunks import all_distances, chunk_distances, spread_chunks
from dpjax.sensitivity._loop import sample_block
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair
from dpjax.sensitivity._plan import Sampling, layout_of, layout_that_fits


@outside_any_mesh
def sample_distances(
    key: jax.Array,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    norm: Norm,
    m: int,
    positions: Positions = "last",
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Distances ||f(D) - f(D')|| on m random pairs of neighboring databases.

    Pair i is drawn from oracle(fold_in(key, i), n + 1), where the key is a threefry2x32 key, or is
    derived from the given one. The function is pure. It works under `jit` and `vmap`, even over
    values that target or oracle close over.

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`. A key of `dpjax.random` is turned into
            a threefry2x32 key, because sampling needs no secret randomness.
        target: a pure JAX function of a database.
        oracle: `oracle(key, n)` draws n exchangeable records.
        n: the number of records in a database, at least 1.
        norm: "l1", "l2", "linf", "hamming", "range", or a function of the difference of two values.
        m: number of pairs, at least 1.
        positions: which record changes: "last", "average" (a random one) or "each".
        chunk_size: pairs in a chunk; by default the number that fits the cache or the device.
        mesh: devices to spread the pairs over; by default the default device.

    Returns:
        Distances of shape (m,), in the order of the pairs; for positions="each" of shape (n, m).
        The dtype is float32 or the float dtype of the target's value. NaN counts as infinite.

    Raises:
        TypeError: if the key is not a typed key, target or oracle is not a function, or the target
            does not return real arrays.
        ValueError: if a size is out of range, the norm is unknown, or the oracle ignores its key or
            the number of records that it is asked for; if processes make different calls.
        RuntimeError: if a target on the host fails, or if another process of the call fails.

    Formal guarantees:
        The m pairs are independent draws. So the statement of `dpjax.operating_point` holds for an
        order statistic of the distances, if you choose m, gamma and confidence C before you look at
        the distances. To choose among J gammas or reruns, use C' = 1 - (1 - C)/J for each, or
        method "dkw", whose band is valid for all gammas at once. This function does not make the
        checks of `dpjax.sample_sensitivity`. The bits are the same for one chunk size and backend.
        Inside a larger compiled program the last bits may differ.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> distances = dpjax.sample_distances(
        ...     dpjax.random.seeded_key(0),
        ...     jnp.mean,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=100,
        ...     norm="l1",
        ...     m=500,
        ... )
        >>> distances.shape, bool(jnp.max(distances) <= 0.01)
        ((500,), True)
    """
    with together(None if _checks.is_staging() else mesh) as team:
        key = sampling_key(key)
        m = _checks.integer("m", m, least=1, most=MOST_SAMPLED_PAIRS)
        pair = RandomPair.trace(key, target, oracle, n=n, norm=norm, positions=positions)
        layout = layout_of(pair, m, chunk_size, mesh)
        if not (_checks.is_traced(key) or _checks.is_staging()) and pair.is_concrete:
            if chunk_size is None:
                layout = layout_that_fits(key, pair, layout)
            return _on_the_host(Sampling.of(key, pair, layout, team))
        return _in_a_program(key, pair, layout)


def _on_the_host(sampling: Sampling) -> jax.Array:
    """Runs the compiled program of `sample_sensitivity`, so that distances have the same bits."""

    def at(position: int) -> jax.Array:
        block, _ = sample_block(sampling, position=position)
        sampling.team.meet()
        return all_distances(block, layout=sampling.layout)

    if sampling.pair.positions == "each":
        return jnp.stack([at(position) for position in range(sampling.pair.n)])
    return at(0)


def _in_a_program(key: jax.Array, pair: RandomPair, layout: Layout) -> jax.Array:
    starts = jnp.arange(layout.chunks, dtype=jnp.uint32) * jnp.uint32(layout.size)

    def at(position: jax.Array) -> jax.Array:
        def chunk(start: jax.Array) -> jax.Array:
            return chunk_distances(key, start, position, pair=pair, size=layout.size)[0]

        return spread_chunks(chunk, starts, layout.devices).reshape(-1)[: layout.m]

    if pair.positions == "each":
        return lax.map(at, jnp.arange(pair.n, dtype=jnp.uint32))
    return at(jnp.zeros((), jnp.uint32))
