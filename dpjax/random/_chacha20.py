"""ChaCha20 (RFC 8439) as a JAX key implementation, in uint32 arithmetic.

A key is 256 bits. Everything is derived from its blocks. Each use has a nonce of its own, so no
output is ever a key and no two uses share a block:

    bits      nonce 0    counters 0, 1, 2, ...
    split     nonce 1    counter i holds children 2i and 2i + 1, whatever their number
    fold_in   nonce 2    counter is the data
    noise     nonce 3    the noise of releases; the nonce's second word is the round

The words of a sample follow those of the sample before it. So the draw at a place is a function of
key and place, and n samples are the first n of any larger number.

Blocks are computed word by word over many lanes, in chunks that stay in the cache. Under `vmap`
keys become lanes, so a million keys cost as much as a million blocks of one key.
"""

import functools
import math
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import random as key_implementations
from jax.typing import ArrayLike

from dpjax._core._types import PyTree
from dpjax._exact._kernels import reduced

KEY_WORDS = 8
_BLOCK_WORDS = 16
_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")
_BITS, _SPLIT, _FOLD_IN, NOISE = 0, 1, 2, 3
# Lanes in a chunk: on a CPU the fastest number, on a GPU enough to fill any of them.
_CHUNK, _GPU_CHUNK = 2**14, 2**20
# From this many lanes on, `_rounds_of_words` is faster on CPU and worth its compilation.
_MANY_LANES = 2**11


# Column j of row i from column i - j, which swaps diagonals and columns. It is its own inverse, so
# one loop body serves rounds of columns and rounds of diagonals.
_REFLECTED = np.array(
    [4 * row + (row - column) % 4 for row in range(4) for column in range(4)], np.int32
)

_Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def block_function(state: jax.Array) -> jax.Array:
    """The ChaCha20 block function on uint32 states of shape (16, lanes), RFC 8439 section 2.3."""
    lanes = state.shape[1]
    on_cpu = _rounds_of_words if lanes >= _MANY_LANES else _rounds_of_rows
    on_gpu = _rounds_in_kernels if lanes > _CHUNK else _unrolled_rounds
    rounds = lax.platform_dependent(state, cpu=on_cpu, tpu=_unrolled_words, default=on_gpu)
    return rounds + state


def _rounds_of_rows(
    state: jax.Array, together: Callable[[_Rows], _Rows] = reduced, unroll: int = 1
) -> jax.Array:
    """Twenty equal rounds as one loop: compiled in a tenth of the time, and faster on CPU."""

    def one_round(_: jax.Array, state: jax.Array) -> jax.Array:
        mixed = jnp.concatenate(together(_quarter_rounds(_rows(state))))
        return mixed.at[_REFLECTED].get(mode="promise_in_bounds")

    return lax.fori_loop(0, 20, one_round, state, unroll=unroll)


def _rounds_of_words(
    state: jax.Array, together: Callable[[_Rows], _Rows] = reduced, unroll: int = 1
) -> jax.Array:
    """The same for many lanes: it mixes columns and diagonals in place and moves no word."""

    def double_round(_: jax.Array, words: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mixed = list(words)
        for turn in (0, 1):
            for column in range(4):
                places = [4 * row + (column + turn * row) % 4 for row in range(4)]
                a, b, c, d = (mixed[place] for place in places)
                changed = together(_quarter_rounds((a, b, c, d)))
                for place, word in zip(places, changed, strict=True):
                    mixed[place] = word
        return tuple(mixed)

    words = tuple(jnp.unstack(state))
    return jnp.stack(lax.fori_loop(0, 10, double_round, words, unroll=unroll))


# Outside of CPUs nothing is gained by a reduction. A GPU starts a kernel for each step of a loop,
# but longer steps of many lanes compile for long.
_unrolled_rounds = functools.partial(_rounds_of_rows, together=tuple, unroll=20)
_rounds_in_kernels = functools.partial(_rounds_of_words, together=tuple, unroll=2)
_unrolled_words = functools.partial(_rounds_of_words, together=tuple, unroll=10)


def _rows(state: jax.Array) -> _Rows:
    a, b, c, d = jnp.reshape(state, (4, 4, -1))
    return a, b, c, d


def _quarter_rounds(rows: _Rows) -> _Rows:
    """The quarter round on every column, or on one."""
    a, b, c, d = rows
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate_left(d ^ a, first)
        c = c + d
        b = _rotate_left(b ^ c, second)
    return a, b, c, d


def _rotate_left(x: jax.Array, by: int) -> jax.Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _turn(rows: PyTree, by: int) -> PyTree:
    """Rotates row i by i places on the host, which turns diagonals into columns, or back."""
    a, *others = rows
    b, c, d = (np.roll(row, -(i + 1) * by, axis=0) for i, row in enumerate(others))
    return a, b, c, d


def bits_of_child_on_host(key_data: np.ndarray, data: int) -> np.ndarray:
    """The first 16 words of `bits` of `fold_in`, without a program to compile."""
    child = _block_on_host(_one_state(key_data, data, _FOLD_IN))[:KEY_WORDS]
    return _block_on_host(_one_state(child, 0, _BITS))


def _one_state(key_data: np.ndarray, counter: int, nonce: int) -> np.ndarray:
    return np.concatenate([_CONSTANTS, key_data, np.array([counter, nonce, 0, 0], np.uint32)])


def _block_on_host(state: np.ndarray) -> np.ndarray:
    """The block function on one state, shape (16,)."""
    rows: PyTree = tuple(state.reshape(4, 4))
    for _ in range(10):
        for turn in (1, -1):
            rows = _turn(_quarter_rounds(rows), turn)
    return np.concatenate(rows) + state


# Gives the words of one round for a batch of samples; and makes samples of them.
Draw = Callable[[jax.Array], tuple[jax.Array, ...]]
WordSampler = Callable[[Draw, jax.Array], PyTree]


def uniform_words(
    key_data: jax.Array, first: ArrayLike, *, nonce: int, width: int, count: int
) -> jax.Array:
    """Uniform words: `count` samples of `width` words each, from the counter `first` on.

    Returns:
        A uint32 array of shape (count, width). A batch of keys under `vmap` or a larger count gives
        the same bits.
    """
    first = jnp.asarray(first, jnp.uint32)
    generate = _chunked(None, nonce, width, count)
    return generate(key_data, first, jnp.uint32(0))


def sample(
    sampler: WordSampler,
    key_data: jax.Array,
    round_number: ArrayLike,
    *,
    nonce: int,
    width: int,
    count: int,
) -> PyTree:
    """Samples from uniform words, chunk by chunk, so that the words never leave the cache.

    Args:
        sampler: `sampler(draw, zeros)`. `draw(r)` gives the words of round r = 0, 1, ...: a tuple
            of `width` arrays of the shape of the zeros, one element for each sample. It returns a
            pytree of uint32 arrays of that shape, computed elementwise. Its hash is the key of a
            cache, so it must not be a lambda.
        key_data: as for `uniform_words`.
        round_number: uint32, the round that the sampler calls 0.
        nonce: keeps uses apart.
        width: words per sample and round.
        count: number of samples.

    Returns:
        The sampler's results, of shape (count,).
    """
    round_number = jnp.asarray(round_number, jnp.uint32)
    return _chunked(sampler, nonce, width, count)(key_data, jnp.uint32(0), round_number)


def _part(width: int, count: int) -> tuple[int, int]:
    """Samples and blocks of a part: the least that end together, so places keep their words."""
    size = min(count, _BLOCK_WORDS // math.gcd(width, _BLOCK_WORDS))
    return size, -(-size * width // _BLOCK_WORDS)


@functools.cache
def _chunked(
    sampler: WordSampler | None, nonce: int, width: int, count: int
) -> Callable[..., PyTree]:
    """Generates samples from keys, first counters and rounds; None gives their words."""
    size, blocks = _part(width, count)
    parts = -(-count // size)
    if parts * blocks >= 2**28:
        raise ValueError(f"shape must ask for fewer than 2^32 words of one key, got {count}")

    def words_of_parts(keys: jax.Array, first: jax.Array, rounds: jax.Array) -> jax.Array:
        # Parts are the last axis, so the copies below move whole rows.
        counters = first[None] + jnp.arange(blocks, dtype=jnp.uint32)[:, None]
        lanes = jnp.broadcast_to(keys.T[:, None], (KEY_WORDS, *counters.shape))
        rounds = jnp.broadcast_to(rounds[None], counters.shape)
        state = _state(
            lanes.reshape(KEY_WORDS, -1), counters.reshape(-1), nonce, rounds.reshape(-1)
        )
        stream = block_function(state).reshape(_BLOCK_WORDS, *counters.shape).swapaxes(0, 1)
        stream = stream.reshape(_BLOCK_WORDS * blocks, -1)[: size * width]
        return stream.reshape(size, width, -1)

    def sample_parts(keys: jax.Array, first: jax.Array, rounds: jax.Array) -> PyTree:
        def draw(round_number: jax.Array) -> tuple[jax.Array, ...]:
            samples = words_of_parts(keys, first, rounds + round_number)
            return tuple(samples[:, word] for word in range(width))

        if sampler is None:  # Word by word, XLA on CPU would compile a loop for each.
            return jnp.moveaxis(words_of_parts(keys, first, rounds), -1, 0)

        zeros = jnp.broadcast_to(_zero(keys, first)[None], (size, len(first)))
        return jax.tree.map(jnp.transpose, sampler(draw, zeros))

    @custom_vmap
    def generate(keys: jax.Array, first: jax.Array, rounds: jax.Array) -> PyTree:
        starts = jnp.arange(parts, dtype=jnp.uint32) * np.uint32(blocks)
        flat_first = (first.reshape(-1, 1) + starts[None]).reshape(-1)
        flat_keys = jnp.repeat(keys.reshape(-1, KEY_WORDS), parts, axis=0)
        flat_rounds = jnp.repeat(rounds.reshape(-1), parts)
        parts_of_keys = flat_keys, flat_first, flat_rounds
        on_cpu, on_others = (
            functools.partial(_in_batches, sample_parts, max(1, lanes // blocks))
            for lanes in (_CHUNK, _GPU_CHUNK)
        )
        if len(flat_first) * blocks <= _CHUNK:
            out = on_cpu(*parts_of_keys)
        else:
            # A TPU, too, keeps a small chunk in the memory near its cores.
            out = lax.platform_dependent(*parts_of_keys, cpu=on_cpu, tpu=on_cpu, default=on_others)

        def cut(x: jax.Array) -> jax.Array:
            samples = x.reshape(*first.shape, parts * size, *x.shape[2:])
            return lax.slice_in_dim(samples, 0, count, axis=first.ndim)

        return jax.tree.map(cut, out)

    @generate.def_vmap
    def _(axis_size: int, batched: list[bool], *arguments: jax.Array) -> PyTree:
        lanes = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arguments, batched, strict=True)
        ]
        out = generate(*lanes)
        return out, jax.tree.map(lambda _: True, out)

    return generate


def _state(keys: jax.Array, counters: jax.Array, nonce: int, rounds: jax.Array) -> jax.Array:
    lanes = counters.size
    constants = jnp.broadcast_to(_CONSTANTS[:, None], (4, lanes))
    nonces = jnp.broadcast_to(np.array([[nonce], [0]], np.uint32), (2, lanes))
    return jnp.concatenate([constants, keys, counters[None], nonces[:1], rounds[None], nonces[1:]])


def _in_batches(function: Callable[..., PyTree], size: int, *arrays: jax.Array) -> PyTree:
    """Maps a function of batches over the leading axis, in batches of at most `size`."""
    count = len(arrays[0])
    batches = -(-count // size)
    if batches <= 1:
        return function(*arrays)
    size = -(-count // batches)

    def batch(i: jax.Array) -> tuple[jax.Array, PyTree]:
        # The last batch overlaps the one before. Padding instead would copy all keys.
        start = jnp.minimum(i * size, count - size)
        slices = (lax.dynamic_slice_in_dim(x, start, size) for x in arrays)
        return start, function(*slices)

    def go_on(i: jax.Array, out: PyTree) -> PyTree:
        start, new = batch(i)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), out, new)

    _, one = jax.eval_shape(batch, jnp.int32(0))
    zero = _zero(*arrays[:2])[0]
    empty = jax.tree.map(lambda x: jnp.broadcast_to(zero, (count, *x.shape[1:])), one)
    return lax.fori_loop(0, batches, go_on, empty)


def _zero(keys: jax.Array, first: jax.Array) -> jax.Array:
    """Zeros that vary over devices as the data do: loops under `shard_map` must start so."""
    return (keys[:, 0] ^ first) & np.uint32(0)


# Each is one compiled program. Outside of `jit`, its operations would be compiled one by one.
@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    count, width = math.prod(shape), 2 if bit_width == 64 else 1
    if count == 0:
        return jnp.zeros(shape, f"uint{bit_width}")
    bits = uniform_words(key, 0, nonce=_BITS, width=width, count=count)
    if bit_width == 64:
        high, low = (bits[:, word].reshape(shape).astype(jnp.uint64) for word in (0, 1))
        return high << np.uint64(32) | low
    return bits.reshape(shape).astype(f"uint{bit_width}")


def consume(key: jax.Array) -> None:
    """Marks a key as used, for `jax.debug_key_reuse`, which does not see `uniform_words`."""
    jax.random.bits(key, (0,))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count = math.prod(shape)
    blocks = -(-count // 2)
    if count == 0:
        return jnp.zeros((*shape, KEY_WORDS), jnp.uint32)
    children = uniform_words(key, 0, nonce=_SPLIT, width=_BLOCK_WORDS, count=blocks)
    return children.reshape(-1, KEY_WORDS)[:count].reshape(*shape, KEY_WORDS)


@functools.partial(jax.jit, inline=True)
def _fold_in(key: jax.Array, data: ArrayLike) -> jax.Array:
    data = jnp.asarray(data).astype(jnp.uint32)
    return uniform_words(key, data, nonce=_FOLD_IN, width=KEY_WORDS, count=1)[0]


def _refuse_seed(seed: jax.Array) -> jax.Array:
    del seed
    raise ValueError(
        "the chacha20 implementation takes no seed, because a search would find it: make keys by"
        " dpjax.random.secure_key(), or in research by dpjax.random.seeded_key(seed)"
    )


def _seed(seed: jax.Array) -> jax.Array:
    """The seed as the first words of the key, least first; `seeded_key` takes wider ones."""
    low = seed.astype(jnp.uint32)
    wide = seed.dtype.itemsize == 8
    high = (seed >> 32).astype(jnp.uint32) if wide else jnp.zeros_like(low)
    return jnp.stack([low, high] + [jnp.zeros_like(low)] * (KEY_WORDS - 2))


def _implementation(name: str, tag: str, seed: Callable[[jax.Array], jax.Array]) -> Hashable:
    return key_implementations.define_prng_impl(
        key_shape=(KEY_WORDS,),
        seed=seed,
        split=_split,
        random_bits=_random_bits,
        fold_in=_fold_in,
        name=name,
        tag=tag,
    )


# The same bits under two names. So the type of a key, and of all keys derived from it, says whether
# it came from a seed.
CHACHA20 = _implementation("chacha20", "chacha", _refuse_seed)
SEEDED_CHACHA20 = _implementation("seeded_chacha20", "seeded", _seed)
