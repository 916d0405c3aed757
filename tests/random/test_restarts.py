"""What is drawn, bit for bit, against a reference in NumPy and Python integers.

With the shipped tables an exponential variable starts again once in 2.6 * 10^10 draws: here in
every second one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.random import _alias, _chacha20, _lattice
from dpjax.random._grid_fit import Calibration
from dpjax.random._selected_index import exponential_index, permute_and_flip_index

# The most samples of one key in one batch.
BORDER = _chacha20._CHUNK // 9 * 16


@pytest.fixture
def often(monkeypatch):
    """Tables with "24 more" in every second draw."""
    weights = [2**95 // 3072 // 2 * 2] * _lattice._CELLS
    first = _alias.alias_table([*weights, 2**96 - sum(weights)], 3)
    tables = (first, *_lattice.exponential_tables()[1:])
    monkeypatch.setattr(_lattice, "exponential_tables", lambda: tables)
    jax.clear_caches()
    yield tables
    jax.clear_caches()


def blocks(key, counters, round_number):
    """ChaCha20 at the nonce of noise, RFC 8439 section 2.3."""
    start = np.zeros((16, len(counters)), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12], start[12] = key[:, None], counters
    start[13], start[14] = _chacha20.NOISE, round_number
    x = start.copy()

    def mix(target, source, rotated, by):
        x[target] += x[source]
        mixed = x[rotated] ^ x[target]
        x[rotated] = mixed << np.uint32(by) | mixed >> np.uint32(32 - by)

    for _ in range(10):
        for a, b, c, d in (
            *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
            *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
        ):
            mix(a, b, d, 16)
            mix(c, d, b, 12)
            mix(a, b, d, 8)
            mix(c, d, b, 7)
    return x + start


def words(key, width, count, round_number):
    """The words of a round, one row for each of a sample's."""
    counters = np.arange(-(-count * width // 16), dtype=np.uint32)
    stream = blocks(key, counters, round_number).T.reshape(-1)
    return stream[: count * width].reshape(count, width).T


def looked_up(table, limbs):
    word = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), limbs, 0)
    stored = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), table.limbs, 0)
    own = 2 ** (table.width - _alias.SLOT_BITS)
    slot = (word // own).astype(int)
    return np.where(word % own < stored[slot] % own, slot, stored[slot] // own).astype(int)


def reference(key, tables, count, *, width=9, first=0):
    """Variables, signs, words left over, and the round to go on from."""
    total, signs, unused = np.zeros(count, object), np.zeros(count, int), np.zeros(count, np.uint32)
    left, number = np.arange(count), first
    while left.size:
        drawn = words(key, width, count, number)[:, left]
        cells = looked_up(tables[0], drawn[:3])
        ended = cells != _lattice._CELLS
        added = cells.astype(object) * 2**36
        for i, table in enumerate(tables[1:]):
            digits = looked_up(table, drawn[3 + 2 * i : 5 + 2 * i]).astype(object)
            added += np.where(ended, digits * 2 ** (24 - 12 * i), 0)
        total[left] += added
        signs[left] = drawn[2] & 1
        if width > 9:
            unused[left] = drawn[9]
        left, number = left[~ended], number + 1
    return total, signs, unused, number


def integers(limbs):
    unsigned = np.asarray(limbs.high).astype(object) * 2**32 + np.asarray(limbs.low).astype(object)
    return np.where(unsigned >= 2**63, unsigned - 2**64, unsigned)


def of_gaussian(drawn):
    top, low = _lattice.gaussian_tables()
    total = looked_up(top, drawn[:4]).astype(object) - 2048
    for first in (4, 6, 8, 10):
        total = 128 * total + looked_up(low, drawn[first : first + 2]) - 2048
    return total


def test_gaussian_is_made_of_its_tables(key):
    """From words of its own for each: 3,072 blocks, which are many lanes."""
    drawn = words(np.asarray(jax.random.key_data(key)), 12, 4096, 0)
    np.testing.assert_array_equal(
        integers(_lattice.lattice_gaussian(key, (4096,))), of_gaussian(drawn)
    )


def next_to_ends(table, count, seed):
    """Words that only their last bits decide on: where slots end, or just before."""
    random, below = np.random.default_rng(seed), table.width - _alias.SLOT_BITS
    slots = random.integers(_alias.SLOTS, size=count)
    stored = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), table.limbs, 0)
    own = stored[slots] % 2**below
    word = slots.astype(object) * 2**below + np.maximum(own - random.integers(2, size=count), 0)
    shifts = range(table.width - 32, -1, -32)
    return [(word // 2**shift % 2**32).astype(np.uint32) for shift in shifts]


def test_the_last_bits_of_every_word_count():
    """Where the others tie, which words that are drawn never show."""
    top, low = _lattice.gaussian_tables()
    first, *groups = _lattice.exponential_tables()
    zeros = jnp.zeros(4000, jnp.uint32)
    gaussian, exponential = (
        np.stack([limb for i, table in enumerate(tables) for limb in next_to_ends(table, 4000, i)])
        for tables in ((top, low, low, low, low), (first, *groups))
    )
    found = _lattice._gaussian(lambda _: tuple(jnp.asarray(gaussian)), zeros)
    np.testing.assert_array_equal(integers(found), of_gaussian(gaussian))
    cells = looked_up(first, exponential[:3])
    exponential, cells = exponential[:, cells < 3072], cells[cells < 3072]
    total = cells.astype(object)
    for i, table in enumerate(groups):
        total = 4096 * total + looked_up(table, exponential[3 + 2 * i : 5 + 2 * i])
    draw, zeros = lambda _: tuple(jnp.asarray(exponential)), zeros[: len(cells)]
    _, sign, found = _lattice._exponential(draw, zeros)
    np.testing.assert_array_equal(integers(found), total)
    np.testing.assert_array_equal(sign, exponential[2] & 1)


@pytest.mark.parametrize(
    "count", [17, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, BORDER + 1))]
)
def test_every_sample_takes_its_own_rounds(often, key, count):
    data = np.asarray(jax.random.key_data(key))
    total, signs, _, rounds = reference(data, often, count)
    assert count == 1 or rounds > 3
    np.testing.assert_array_equal(integers(_lattice.lattice_exponential(key, (count,))), total)
    signed = np.where(signs == 1, -1 - total, total)
    np.testing.assert_array_equal(integers(_lattice.lattice_laplace(key, (count,))), signed)


@pytest.mark.parametrize("count", [5, pytest.param(BORDER, marks=pytest.mark.slow)])
def test_loops_go_on_with_new_words(often, key, count):
    data = np.asarray(jax.random.key_data(key))
    first = jnp.uint32(0)
    for _ in range(3):
        expected = reference(data, often, count, width=10, first=int(first))
        first, word, drawn = _lattice.exponential_rounds(key, first, count)
        np.testing.assert_array_equal(integers(drawn), expected[0])
        np.testing.assert_array_equal(word, expected[2])
        assert int(first) == expected[3]


@pytest.mark.parametrize(
    "select", [pytest.param(exponential_index, marks=pytest.mark.slow), permute_and_flip_index]
)
def test_options_beyond_the_first_table_are_selected(often, key, select):
    """40 scales below the best one, where float noise never reaches: about one draw in ten."""
    made = Calibration(1.0, 1.0, 1.0, 0.0, 2)
    scores = jnp.asarray([40, 0], jnp.int32)
    drawn = jax.jit(jax.vmap(lambda key: select(key, scores, made)))(jax.random.split(key, 300))
    # With a chance of .01 a draw, none in 300 comes once in 20 keys, at .05 once in 5 million.
    assert set(np.asarray(drawn).tolist()) == {0, 1}


@pytest.mark.slow
def test_batches_have_the_bits_of_their_keys(often, key):
    keys = jax.random.split(key, 6)
    draw = functools.partial(_lattice.lattice_laplace, shape=(300,))
    alone = np.stack([integers(draw(one)) for one in keys])
    assert not np.array_equal(alone[0], alone[1])
    nested = jax.jit(jax.vmap(jax.vmap(draw)))(keys.reshape(2, 3))
    np.testing.assert_array_equal(integers(jax.vmap(draw)(keys)), alone)
    np.testing.assert_array_equal(integers(nested).reshape(6, 300), alone)
