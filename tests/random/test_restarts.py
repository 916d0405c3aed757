"""What is drawn, bit for bit, against a reference in NumPy and Python integers.

With the shipped tables an exponential variable starts again once in 2.6 * 10^10 draws: here in
every second one. The first words leave five samples in a million open: here, all.
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import _lattice, _samples
from dpjax.random._grid_fit import Calibration
from dpjax.random._selected_index import exponential_index, permute_and_flip_index

ALONE = _samples.ALONE
# Places in rows of the first two groups, of two samples each, in parts of the first and last column
# that are drawn again.
BORDERS = [
    2 * ALONE + 257,
    *(pytest.param(count, marks=pytest.mark.slow) for count in (ALONE, ALONE + 1, 7 * ALONE + 5)),
]
OWN, SHARED = 3, 4


@pytest.fixture
def often(monkeypatch):
    """Tables with "24 more" in every second draw."""
    weights = [2**95 // 3072 // 2 * 2] * _lattice._CELLS
    first = _lattice.alias_table([*weights, 2**96 - sum(weights)], 3)
    tables = (first, *_lattice.exponential_tables()[1:])
    monkeypatch.setattr(_lattice, "exponential_tables", lambda: tables)
    _samples._of_keys.cache_clear()
    jax.clear_caches()
    yield tables
    _samples._of_keys.cache_clear()
    jax.clear_caches()


@pytest.fixture
def always_open(monkeypatch):
    """Tables whose outcomes depend on all limbs alike, so that first words decide nothing."""

    def mixed(look_up):
        return lambda table, limbs: look_up(table, [limbs[0] ^ limbs[-1], *limbs[1:]])

    def unknown(_, limb, unknown=0):
        return jnp.zeros_like(limb, jnp.int32), limb == limb

    monkeypatch.setattr(_lattice.AliasTable, "lookup", mixed(_lattice.AliasTable.lookup))
    monkeypatch.setattr(_lattice.AliasTable, "lookup_first", unknown)
    monkeypatch.setattr(sys.modules[__name__], "looked_up", mixed(looked_up))
    _samples._of_keys.cache_clear()
    jax.clear_caches()
    yield
    _samples._of_keys.cache_clear()
    jax.clear_caches()


def blocks(key, counters, nonce, round_number):
    """ChaCha20, RFC 8439 section 2.3: words in columns."""
    start = np.zeros((16, len(counters)), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12], start[12] = key[:, None], counters
    start[13], start[14] = nonce, round_number
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


def words(key, first, width, count, start, round_number):
    """The words of a round, a row for each of a sample's: the first ones, then the others.

    A sample's own block ends with its first words, or with words that are too few for another
    sample, and starts with the others. From the place ALONE on, the first words of round 0 are from
    a block that is shared by the samples of a column of a group.
    """
    rows = 16 // first
    last = slice((rows - 1) * first, rows * first)
    own = blocks(key, np.arange(count, dtype=np.uint32), OWN, start + round_number)
    drawn = np.concatenate([own[last], own[: width - first]])
    if round_number > 0:
        return drawn
    for place in range(ALONE, count, ALONE):
        group, row = divmod(place // ALONE + rows - 1, rows)
        columns = np.arange(min(ALONE, count - place), dtype=np.uint32)
        block = blocks(key, group * ALONE + columns, SHARED, start)
        drawn[:first, place : place + ALONE] = block[row * first : (row + 1) * first]
    return drawn


def looked_up(table, limbs):
    word = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), limbs, 0)
    stored = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), table.limbs, 0)
    own = 2 ** (table.width - _lattice.SLOT_BITS)
    slot = (word // own).astype(int)
    return np.where(word % own < stored[slot] % own, slot, stored[slot] // own).astype(int)


def of_exponential(tables, drawn, unused=0):
    """Variables, whether they ended, and signs. The sign's bit is that of the first limb."""
    first, *digits = drawn[:4]
    second, third, *more = drawn[4 + unused :]
    cells = looked_up(tables[0], [first & ~np.uint32(1) | third & np.uint32(1), second, third])
    total = cells.astype(object) * 2**36
    for i, (table, *word) in enumerate(zip(tables[1:], digits, more, strict=True)):
        digit = looked_up(table, word).astype(object)
        total += np.where(cells == _lattice._CELLS, 0, digit * 2 ** (24 - 12 * i))
    return total, cells != _lattice._CELLS, first & 1


def reference(key, tables, count, *, unused=0, start=0):
    """Variables, signs, words left over, and the round to go on from."""
    total, signs, left_over = np.zeros(count, object), np.zeros(count, int), np.zeros(count, int)
    left, number = np.arange(count), 0
    while left.size:
        drawn = words(key, 4 + unused, 9 + unused, count, start, number)[:, left]
        added, ended, signs[left] = of_exponential(tables, drawn, unused)
        total[left] += added
        if unused:
            left_over[left] = drawn[4]
        left, number = left[~ended], number + 1
    return total, signs, left_over, start + number


def integers(limbs):
    unsigned = np.asarray(limbs.high).astype(object) * 2**32 + np.asarray(limbs.low).astype(object)
    return np.where(unsigned >= 2**63, unsigned - 2**64, unsigned)


def of_gaussian(drawn):
    top, low = _lattice.gaussian_tables()
    first, others = drawn[:5], drawn[5:]
    total = looked_up(top, [first[0], *others[:3]]).astype(object) - 2048
    for word in zip(first[1:], others[3:], strict=True):
        total = 128 * total + looked_up(low, word) - 2048
    return total


@pytest.mark.parametrize("count", [7, *BORDERS])
def test_gaussian_is_made_of_its_tables(key, count):
    drawn = words(np.asarray(jax.random.key_data(key)), 5, 12, count, 0, 0)
    np.testing.assert_array_equal(
        integers(_lattice.lattice_gaussian(key, (count,))), of_gaussian(drawn)
    )


def next_to_ends(table, count, seed):
    """Words that only their last bits decide on: where slots end, or just before."""
    random, below = np.random.default_rng(seed), table.width - _lattice.SLOT_BITS
    slots = random.integers(_lattice.SLOTS, size=count)
    stored = functools.reduce(lambda high, low: high * 2**32 + low.astype(object), table.limbs, 0)
    own = stored[slots] % 2**below
    word = slots.astype(object) * 2**below + np.maximum(own - random.integers(2, size=count), 0)
    shifts = range(table.width - 32, -1, -32)
    return [(word // 2**shift % 2**32).astype(np.uint32) for shift in shifts]


def interleaved(limbs, tables):
    """Limbs, table by table, as samplers take them: the first of each, then the others."""
    starts = np.cumsum([0, *(len(table.limbs) for table in tables)])[:-1]
    others = np.setdiff1d(np.arange(len(limbs)), starts)
    return np.concatenate([limbs[starts], limbs[others]])


def near_ends(tables, count):
    limbs = [limb for i, table in enumerate(tables) for limb in next_to_ends(table, count, i)]
    return interleaved(np.stack(limbs), tables)


def test_the_last_bits_of_every_word_count():
    """Where the others tie, which words that are drawn never show."""
    top, low = _lattice.gaussian_tables()
    tables = _lattice.exponential_tables()
    zeros = jnp.zeros(4000, jnp.uint32)
    gaussian = near_ends((top, low, low, low, low), 4000)
    found = _lattice._gaussian(lambda _: tuple(jnp.asarray(gaussian)), zeros)
    np.testing.assert_array_equal(integers(found), of_gaussian(gaussian))
    # The last bit of the third limb is that of the first one. The table does not depend on it.
    drawn = near_ends(tables, 4000)
    sign = np.random.default_rng(9).integers(2, size=4000, dtype=np.uint32)
    drawn[5] = drawn[5] & ~np.uint32(1) | drawn[0] & np.uint32(1)
    drawn[0] = drawn[0] & ~np.uint32(1) | sign
    total, ended, _ = of_exponential(tables, drawn)
    ours, of_ours = tuple(jnp.asarray(drawn[:, ended])), zeros[: np.sum(ended)]
    _, signs, found = _lattice._exponential(lambda _: ours, of_ours)
    np.testing.assert_array_equal(integers(found), total[ended])
    np.testing.assert_array_equal(signs, sign[ended])


SAMPLERS = {
    "gaussian": (_lattice._GAUSSIAN, _lattice.gaussian_tables, (0, 1, 1, 1, 1)),
    "exponential": (_lattice._EXPONENTIAL, _lattice.exponential_tables, (0, 1, 2, 3)),
    "with a word": (_lattice._EXPONENTIAL_AND_WORD, _lattice.exponential_tables, (0, 1, 2, 3)),
}


def test_one_first_word_in_a_million_decides_nothing():
    for table in (*_lattice.gaussian_tables(), *_lattice.exponential_tables()):
        for slot in (0, 1000, 2048, 4095):
            words = jnp.uint32(slot << 20) + jnp.arange(2**20, dtype=jnp.uint32)
            assert [int(jnp.sum(table.lookup_first(words, bits)[1])) for bits in (0, 1)] == [1, 2]


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_word_of_a_block_is_two_words_of_a_sample(name):
    sampler, block = SAMPLERS[name][0], tuple(range(16))
    first, other = sampler.first_words(block, sampler.rows - 1), sampler.other_words(block)
    assert len({*first, *other}) == sampler.width
    rows = [word for row in range(sampler.rows) for word in sampler.first_words(block, row)]
    assert len(set(rows)) == sampler.rows * sampler.first


@pytest.mark.parametrize("name", SAMPLERS)
def test_three_open_columns_of_a_part_are_rare(name):
    """As docs/security.md says: they take another turn, which time may show."""
    sampler, *_, of_words = SAMPLERS[name]
    unknown = 0 if name == "gaussian" else 1
    of_sample = (len(of_words) + unknown) * 2.0**-20 + (1 + unknown) * math.exp(-24)
    of_part = math.comb(ALONE // _samples._PARTS, 3) * (sampler.rows * of_sample) ** 3
    # Where the fewest places of groups are used: one of the second group.
    assert 2 * _samples._PARTS * of_part / (ALONE + 1) < 1 / 6e9


@pytest.mark.parametrize("name", SAMPLERS)
def test_first_words_say_what_all_words_do_or_nothing(name):
    """Near the ends of all slots, for any other words; and no sample is left open without need."""
    sampler, tables, of_words = SAMPLERS[name]
    tables = [tables()[i] for i in of_words]
    random, count = np.random.default_rng(5), 40_000
    first = random.integers(2**32, size=(sampler.first, count), dtype=np.uint32)
    for i, table in enumerate(tables):
        ends = table.limbs[0] % 2**20
        slot = random.integers(4096, size=count)
        near = slot << 20 | np.clip(ends[slot] + random.integers(-2, 3, count), 0, 2**20 - 1)
        first[i] = np.where(random.random(count) < 0.3, near.astype(np.uint32), first[i])
    drawn, left_open = sampler.from_first(tuple(jnp.asarray(first)))
    differ = np.zeros(count, bool)
    for others in (0, 2**32 - 1, None):
        shape = sampler.width - sampler.first, count
        rest = random.integers(2**32, size=shape, dtype=np.uint32) if others is None else others
        words = jnp.asarray(np.concatenate([first, np.broadcast_to(np.uint32(rest), shape)]))
        # A draw of "24 more" is followed by words of zeros, which end it.
        draw = functools.partial(lambda words, r: tuple(jnp.where(r == 0, words, 0)), words)
        whole = sampler.from_all(draw, jnp.zeros(count, jnp.uint32))
        for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(whole), strict=True):
            differ |= np.asarray(one) != np.asarray(other)
    left_open = np.asarray(left_open)
    assert not np.any(differ & ~left_open)
    assert 0.1 < np.mean(left_open) < 0.5
    # Of those that are left open, most come out differently for some other words.
    assert np.mean(differ[left_open]) > 0.5


@pytest.mark.parametrize("count", [17, pytest.param(1, marks=pytest.mark.slow), *BORDERS])
def test_every_sample_takes_its_own_rounds(often, key, count):
    data = np.asarray(jax.random.key_data(key))
    total, signs, _, rounds = reference(data, often, count)
    assert count == 1 or rounds > 3
    np.testing.assert_array_equal(integers(_lattice.lattice_exponential(key, (count,))), total)
    signed = np.where(signs == 1, -1 - total, total)
    np.testing.assert_array_equal(integers(_lattice.lattice_laplace(key, (count,))), signed)


@pytest.mark.parametrize(
    "count", [5, *(pytest.param(x, marks=pytest.mark.slow) for x in (ALONE, 2 * ALONE + 257))]
)
def test_loops_go_on_with_new_words(often, key, count):
    data = np.asarray(jax.random.key_data(key))
    first = jnp.uint32(0)
    for _ in range(3):
        expected = reference(data, often, count, unused=1, start=int(first))
        first, word, drawn = _lattice.exponential_rounds(key, first, count)
        np.testing.assert_array_equal(integers(drawn), expected[0])
        np.testing.assert_array_equal(word, expected[2])
        assert int(first) == expected[3]


@pytest.mark.slow
@pytest.mark.parametrize("count", BORDERS)
def test_accelerators_draw_the_same_from_all_words(often, key, count, monkeypatch):
    drawn = integers(_lattice.lattice_laplace(key, (count,)))
    _samples._of_keys.cache_clear()
    monkeypatch.setattr(_samples, "_groups_from_first", _samples._groups_from_all)
    np.testing.assert_array_equal(
        integers(jax.jit(_lattice.lattice_laplace, static_argnums=1)(key, (count,))), drawn
    )


@pytest.mark.parametrize("count", BORDERS)
def test_samples_that_are_left_open_are_drawn_from_all_words(always_open, key, count):
    """All columns are, so the loop goes on until none is left."""
    data = np.asarray(jax.random.key_data(key))
    gaussian = of_gaussian(words(data, 5, 12, count, 0, 0))
    np.testing.assert_array_equal(integers(_lattice.lattice_gaussian(key, (count,))), gaussian)
    total, signs, *_ = reference(data, _lattice.exponential_tables(), count)
    signed = np.where(signs == 1, -1 - total, total)
    np.testing.assert_array_equal(integers(_lattice.lattice_laplace(key, (count,))), signed)


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


@pytest.mark.parametrize("count", [0, 3, ALONE + 1])
@pytest.mark.parametrize("keys", [(0,), (2, 0)])
def test_no_keys_draw_nothing(keys, count):
    none = jnp.zeros((*keys, 8), jnp.uint32)

    def draw(words):
        one = jax.random.wrap_key_data(words, impl=dpjax.random.CHACHA20)
        return _lattice.lattice_laplace(one, (count,))

    for _ in keys:
        draw = jax.vmap(draw)
    assert draw(none).low.shape == (*keys, count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, ALONE + 300])
def test_batches_have_the_bits_of_their_keys(often, key, count):
    keys = jax.random.split(key, 6)
    draw = functools.partial(_lattice.lattice_laplace, shape=(count,))
    alone = np.stack([integers(draw(one)) for one in keys])
    assert not np.array_equal(alone[0], alone[1])
    nested = jax.jit(jax.vmap(jax.vmap(draw)))(keys.reshape(2, 3))
    np.testing.assert_array_equal(integers(jax.vmap(draw)(keys)), alone)
    np.testing.assert_array_equal(integers(nested).reshape(6, count), alone)
