"""ChaCha20 (RFC 8439) as a JAX key implementation, in uint32 arithmetic.

A key has 256 bits. All outputs are blocks of ChaCha20 under this key. Each kind of output has its
own nonce, so no block is used for two purposes:

    bits      nonce 0       counters 0, 1, 2, ...
    split     nonce 1       counter i holds children 2i and 2i + 1, for any number of children
    fold_in   nonce 2       counter is the data
    noise     nonces 3, 4   the noise of releases (`_samples`); the nonce's second word is the round

The words of an output are in the order of their blocks. So a draw of n words consists of the first
n words of any larger draw.

Many blocks are computed at once. Each word of the ChaCha20 state is an array with one lane per
block, and chunks of lanes fit into the cache. Under `vmap`, blocks of different keys are also
lanes. So blocks of a million keys take as long as a million blocks of one key.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import NoReturn, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import random as key_implementations
from jax.typing import ArrayLike

from dpjax._core._types import PyTree
from dpjax._exact._kernels import reduced, reduced_steps

KEY_WORDS = 8
BLOCK_WORDS = 16
_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")
_BITS, _SPLIT, _FOLD_IN = 0, 1, 2
# The number of lanes in a chunk: the fastest number on a CPU, and a number that is large enough for
# any GPU.
CHUNK, _GPU_CHUNK = 4112, 2**21
# With at least this many lanes, `_rounds_of_words` saves more time on a CPU than its compilation
# takes.
_MANY_LANES = 2**10
# Arrays whose addresses differ by multiples of 4 KiB compete for the same sets of the cache. So a
# CPU takes twice as long for 4,096 lanes as for 4,112. If the number of lanes is a multiple of
# `_PAGE_LANES`, lanes are added as padding.
_PAGE_LANES = 2**10


# A permutation of the state that turns columns into diagonals, and diagonals into columns: the word
# in column j of row i comes from column i - j. With this permutation, one loop body computes both
# kinds of rounds.
_REFLECTED = np.array(
    [4 * row + (row - column) % 4 for row in range(4) for column in range(4)], np.int32
)

_Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# The words of several blocks or samples: one array for each word, with a lane for each block or
# sample.
Words = tuple[jax.Array, ...]


@functools.partial(jax.jit, inline=True)
def block_function(state: jax.Array) -> jax.Array:
    """Computes ChaCha20 blocks (RFC 8439 section 2.3) from uint32 states of shape (16, lanes)."""
    lanes = state.shape[1]
    on_cpu = _by_words(_rounds_of_words) if lanes >= _MANY_LANES else _by_rows(reduced)
    # On a CPU, `reduced` makes XLA compute a round in one loop. On a GPU it would change nothing.
    alone = _by_rows(lambda rows: rows, unroll=20)
    on_gpu = _by_words(_rounds_in_kernels) if lanes > CHUNK else alone
    on_tpu = _by_words(_unrolled_rounds)
    return lax.platform_dependent(state, cpu=on_cpu, tpu=on_tpu, default=on_gpu)


def _by_rows(
    together: Callable[[_Rows], _Rows], unroll: int = 1
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that computes blocks in a loop of twenty equal rounds.

    The loop compiles ten times faster than unrolled rounds, but runs slower on many blocks at once.
    Each round applies `together` to the four rows of the state. `together` returns the rows
    unchanged, but may make XLA compute them in one loop.
    """

    def one_round(_: jax.Array, state: jax.Array) -> jax.Array:
        a, b, c, d = state.reshape(4, 4, -1)
        mixed = jnp.concatenate(together(_quarter_rounds((a, b, c, d))))
        return mixed.at[_REFLECTED].get(mode="promise_in_bounds")

    return lambda state: lax.fori_loop(0, 20, one_round, state, unroll=unroll) + state


def _by_words(rounds: Callable[[Words], Words]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that computes blocks. `rounds` applies all rounds to the 16 words."""

    def blocks(state: jax.Array) -> jax.Array:
        words = tuple(jnp.unstack(state))
        return jnp.stack([x + y for x, y in zip(rounds(words), words, strict=True)])

    return blocks


def _rounds_of_words(words: Words) -> Words:
    """Computes the rounds on a CPU, with two double rounds in the body of a loop.

    LLVM vectorizes this loop. It does not vectorize a body of five double rounds, which would take
    ten times as long.
    """
    lanes = words[0].size
    if lanes % _PAGE_LANES == 0:
        words = tuple(jnp.pad(x, (0, BLOCK_WORDS)) for x in words)
    step = functools.partial(reduced_steps, _double_round)
    words = lax.fori_loop(0, 10, lambda _, words: step(words), words, unroll=2)
    return tuple(x[:lanes] for x in words)


def _rounds_in_kernels(words: Words) -> Words:
    """Computes the rounds on a GPU, with two double rounds per kernel.

    Kernels with more rounds would take long to compile.

    The first two double rounds are outside the loop, so that XLA fuses them with the computation of
    the state.
    """

    def two_double_rounds(words: Words) -> Words:
        return _double_round(_double_round(words))

    return lax.fori_loop(1, 5, lambda _, x: two_double_rounds(x), two_double_rounds(words))


def _unrolled_rounds(words: Words) -> Words:
    return lax.fori_loop(0, 10, lambda _, words: _double_round(words), words, unroll=10)


def _double_round(words: Words) -> Words:
    """Mixes columns, then diagonals. It maps zeros to zeros, as `reduced_steps` requires."""
    mixed = list(words)
    for turn in (0, 1):
        for column in range(4):
            places = [4 * row + (column + turn * row) % 4 for row in range(4)]
            a, b, c, d = (mixed[place] for place in places)
            for place, word in zip(places, _quarter_rounds((a, b, c, d)), strict=True):
                mixed[place] = word
    return tuple(mixed)


def _quarter_rounds(rows: _Rows) -> _Rows:
    """Computes the quarter round on all columns, or on one column."""
    a, b, c, d = rows
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate_left(d ^ a, first)
        c = c + d
        b = _rotate_left(b ^ c, second)
    return a, b, c, d


def _rotate_left(x: jax.Array, by: int) -> jax.Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def bits_of_child_on_host(key_data: np.ndarray, data: int) -> np.ndarray:
    """Returns the first 16 words of `bits(fold_in(key, data))`, computed without compilation."""
    child = _block_on_host(_one_state(key_data, data, _FOLD_IN))[:KEY_WORDS]
    return _block_on_host(_one_state(child, 0, _BITS))


def children_on_host(key_data: np.ndarray, count: int) -> np.ndarray:
    """Returns the words of `split(key, count)`, shape (count, 8), computed without compilation."""
    blocks = [_one_state(key_data, block, _SPLIT) for block in range(-(-count // 2))]
    return _block_on_host(np.stack(blocks, axis=1)).T.reshape(-1, KEY_WORDS)[:count]


def _one_state(key_data: np.ndarray, counter: int, nonce: int) -> np.ndarray:
    return np.concatenate([_CONSTANTS, key_data, np.array([counter, nonce, 0, 0], np.uint32)])


def _block_on_host(states: np.ndarray) -> np.ndarray:
    """Computes the blocks of one state, shape (16,), or of several states, shape (16, blocks)."""
    words: PyTree = tuple(states.reshape(BLOCK_WORDS, -1))
    for _ in range(10):
        words = _double_round(words)
    return np.stack(words).reshape(states.shape) + states


# The `vmap` rules of all functions that `for_all_keys` has returned. `generates_words` recognizes
# operations by these rules.
_RULES = set[Hashable]()


def uniform_words(
    key_data: jax.Array, first: ArrayLike, *, nonce: int, width: int, count: int
) -> jax.Array:
    """Returns uniform words: `count` rows of `width` words, from counter `first` on.

    Returns:
        A uint32 array of shape (count, width). Its bits are the same under `vmap` over keys, and
        the same as those of the first rows of a draw with a larger count.
    """
    first = jnp.asarray(first, jnp.uint32)
    return _words_of_keys(nonce, width, count)(key_data, first)


@functools.cache
def _words_of_keys(nonce: int, width: int, count: int) -> Callable[..., jax.Array]:
    blocks = -(-count * width // BLOCK_WORDS)
    if blocks >= 2**28:
        raise ValueError(
            f"shape must need fewer than 2^32 random words, the limit of one key, got {count}"
        )
    parts = max(1, -(-blocks // CHUNK))
    size = -(-blocks // parts)

    def words(keys: jax.Array, first: jax.Array) -> jax.Array:
        counters = first[:, None] + jnp.arange(size, dtype=jnp.uint32)[None]
        drawn = blocks_of(keys, counters, nonce, np.uint32(0))
        return drawn.reshape(BLOCK_WORDS, *counters.shape).transpose(1, 2, 0)

    def generate(keys: jax.Array, first: jax.Array) -> jax.Array:
        starts = first[:, None] + np.arange(0, parts * size, size, dtype=np.uint32)[None]
        out = by_chunks(words, size, jnp.repeat(keys, parts, axis=0), starts.reshape(-1))
        stream = out.reshape(len(keys), parts * size * BLOCK_WORDS)
        return stream[:, : count * width].reshape(-1, count, width)

    return for_all_keys(generate)


def blocks_of(
    keys: jax.Array, counters: jax.Array, nonces: ArrayLike, rounds: ArrayLike
) -> jax.Array:
    """Returns the blocks of all keys, one key after the other: shape (16, K * n).

    Args:
        keys: shape (K, 8).
        counters: shape (K, n), the counters of each key.
        nonces: the first words of nonces, broadcast to the shape of the counters.
        rounds: the second words of nonces, broadcast to the shape of the counters.
    """
    lanes = counters.size

    def row(x: ArrayLike) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, jnp.uint32), counters.shape).reshape(1, lanes)

    of_keys = jnp.broadcast_to(keys.T[:, :, None], (KEY_WORDS, *counters.shape))
    constants = jnp.broadcast_to(_CONSTANTS[:, None], (4, lanes))
    key_rows = of_keys.reshape(KEY_WORDS, lanes)
    rest = map(row, (counters, nonces, rounds, 0))
    return block_function(jnp.concatenate([constants, key_rows, *rest]))


def for_all_keys(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Converts a function of several keys to a function of one key with a rule for `vmap`.

    Args:
        function: a function of keys of shape (K, 8) and of other arrays of shape (K,). Its results
            have a leading axis K.

    Returns:
        A function of one key of shape (8,) and of scalars.
    """

    @custom_vmap
    def of_keys(keys: jax.Array, *others: jax.Array) -> PyTree:
        batch = keys.shape[:-1]
        if 0 in batch:
            one = jax.eval_shape(
                function,
                *(jnp.zeros((1, *x.shape[len(batch) :]), x.dtype) for x in (keys, *others)),
            )
            return jax.tree.map(lambda x: jnp.zeros((*batch, *x.shape[1:]), x.dtype), one)
        out = function(keys.reshape(-1, KEY_WORDS), *(x.reshape(-1) for x in others))
        return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)

    @of_keys.def_vmap
    def rule(axis_size: int, batched: list[bool], *arguments: jax.Array) -> PyTree:
        lanes = [
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arguments, batched, strict=True)
        ]
        out = of_keys(*lanes)
        return out, jax.tree.map(lambda _: True, out)

    _RULES.add(rule)
    return jax.jit(of_keys, inline=True)


def generates_words(equation: jex.JaxprEqn) -> bool:
    """Whether a traced operation computes samples or uniform words from keys."""
    rule = getattr(equation.params.get("rule"), "rule", None)
    return isinstance(rule, Hashable) and rule in _RULES


def by_chunks(function: Callable[..., PyTree], lanes: int, *arrays: jax.Array) -> PyTree:
    """Applies a function to batches of arrays, along the leading axis, one batch at a time.

    Args:
        function: a function of batches of the arrays.
        lanes: how many ChaCha20 blocks one element of a batch needs.
        arrays: arrays of equal length.
    """
    on_cpu, on_others = (
        functools.partial(in_chunks, function, lanes, chunk) for chunk in (CHUNK, _GPU_CHUNK)
    )
    if len(arrays[0]) * lanes <= CHUNK:
        return on_cpu(*arrays)
    # On a TPU, a small chunk is best, too, because it stays in the memory near the cores.
    return lax.platform_dependent(*arrays, cpu=on_cpu, tpu=on_cpu, default=on_others)


def in_chunks(
    function: Callable[..., PyTree], lanes: int, chunk: int, *arrays: jax.Array
) -> PyTree:
    """Does the same as `by_chunks`, with `chunk` lanes in a chunk."""
    count, size = len(arrays[0]), max(1, chunk // max(1, lanes))
    batches = -(-count // size)
    if batches <= 1:
        return function(*arrays)
    size = -(-count // batches)
    function = jax.jit(function, inline=True)  # With `jit`, the function is traced only once.

    def batch(i: jax.Array) -> tuple[jax.Array, PyTree]:
        # The last batch overlaps with the batch before. Padding instead would copy all keys.
        start = jnp.minimum(i * size, count - size)
        slices = (lax.dynamic_slice_in_dim(x, start, size) for x in arrays)
        return start, function(*slices)

    def go_on(i: jax.Array, out: PyTree) -> PyTree:
        start, new = batch(i)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), out, new)

    _, one = jax.eval_shape(batch, jnp.int32(0))
    # The initial values of a loop under `shard_map` must vary over the same devices as its results.
    # So the initial zeros are computed from the arrays.
    firsts = (x.reshape(-1)[0].astype(jnp.uint32) for x in arrays)
    zero = functools.reduce(jnp.bitwise_or, firsts) & np.uint32(0)
    empty = jax.tree.map(
        lambda x: jnp.broadcast_to(zero.astype(x.dtype), (count, *x.shape[1:])), one
    )
    return lax.fori_loop(0, batches, go_on, empty)


# Without `jit`, JAX would compile each operation of this function separately.
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
    """Tells `jax.debug_key_reuse` that a key was used.

    JAX does not notice that `uniform_words` uses the key.
    """
    jax.random.bits(key, (0,))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count = math.prod(shape)
    blocks = -(-count // 2)
    if count == 0:
        return jnp.zeros((*shape, KEY_WORDS), jnp.uint32)
    children = uniform_words(key, 0, nonce=_SPLIT, width=BLOCK_WORDS, count=blocks)
    return children.reshape(-1, KEY_WORDS)[:count].reshape(*shape, KEY_WORDS)


@functools.partial(jax.jit, inline=True)
def _fold_in(key: jax.Array, data: ArrayLike) -> jax.Array:
    data = jnp.asarray(data).astype(jnp.uint32)
    return uniform_words(key, data, nonce=_FOLD_IN, width=KEY_WORDS, count=1)[0]


def _refuse_seed(seed: jax.Array) -> jax.Array:
    del seed
    raise ValueError(
        "the chacha20 implementation accepts no seed, because a search could find the seed: make"
        " keys by dpjax.random.secure_key(), or in research by dpjax.random.seeded_key(seed)"
    )


def _seed(seed: jax.Array) -> jax.Array:
    """Returns a key whose first words are the seed, least significant word first.

    This is the function that `jax.random.key` calls.
    """
    low = seed.astype(jnp.uint32)
    wide = seed.dtype.itemsize == 8
    high = (seed >> 32).astype(jnp.uint32) if wide else jnp.zeros_like(low)
    return jnp.stack([low, high] + [jnp.zeros_like(low)] * (KEY_WORDS - 2))


@dataclasses.dataclass(frozen=True)
class _NotPickled:
    """A function of the key implementation that cannot be pickled.

    Pickling a key would pickle this function, so it raises an error.
    """

    function: Callable[[jax.Array], jax.Array]
    instead: str

    def __call__(self, seed: jax.Array) -> jax.Array:
        return self.function(seed)

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key cannot be pickled, because two processes that draw with the same key would share"
            f" their noise. Give each process its own key: {self.instead}"
        )


def _implementation(
    name: str, tag: str, seed: Callable[[jax.Array], jax.Array], instead: str
) -> Hashable:
    return key_implementations.define_prng_impl(
        key_shape=(KEY_WORDS,),
        seed=_NotPickled(seed, instead),
        split=_split,
        random_bits=_random_bits,
        fold_in=_fold_in,
        name=name,
        tag=tag,
    )


# Two implementations of keys, which draw the same bits. Keys that are derived from a seed have the
# second one, so the dtype of a key shows whether the key was derived from a seed.
CHACHA20 = _implementation(
    "chacha20",
    "chacha",
    _refuse_seed,
    "make it there by dpjax.random.secure_key(), or send jax.random.key_data(key), which is as"
    " secret, and restore it by jax.random.wrap_key_data(data, impl=dpjax.random.CHACHA20)",
)
SEEDED_CHACHA20 = _implementation(
    "seeded_chacha20", "seeded", _seed, "make it there by dpjax.random.seeded_key(seed)"
)
