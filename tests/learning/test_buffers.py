"""Buffered strategies: exact rows, no integer wraps around, and what a record moves is covered."""

import dataclasses
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from correlated_steps import DIMS, PARAMETERS, PublishedSteps, flat, rounded, total
from dpjax import learning
from dpjax._exact import _limbs
from dpjax.learning import _buffers, _correlated_noise
from dpjax.learning._buffers import BufferedStrategy
from dpjax.targets._optax_training import optax_promotion
from tables import for_each

STEPS = 5
STRATEGIES = {
    "usual": _buffers.rounded([0.98, 0.7], [0.2, 0.3], steps=STEPS),
    "never decays": _buffers.rounded([1.0], [0.4], steps=STEPS),
    "near one": _buffers.rounded([1 - 2.0**-30, 0.999], [0.5, -0.25], steps=STEPS),
    "alternates": _buffers.rounded([-0.9, 0.5, -1.0], [0.3, -0.6, 0.1], steps=STEPS),
    "huge and opposite": _buffers.rounded([0.9, 0.8, 0], [300, -299.5, 0.25], steps=STEPS),
    "steep": _buffers.rounded([0.9], [100.0], steps=STEPS),
    "more buffers than steps": _buffers.rounded(
        np.linspace(-1, 1, 9), 0.3 * np.cos(np.arange(9)), steps=STEPS
    ),
}


@pytest.fixture(scope="module")
def published():
    return PublishedSteps()


def exact_entries(strategy):
    """The first column, as rational numbers."""
    scales = [Fraction(int(x), 2**30) for x in strategy.scales]
    decays = [Fraction(int(x), 2**30) for x in strategy.decays]
    later = [
        sum(scale * decay**lag for scale, decay in zip(scales, decays, strict=True))
        for lag in range(strategy.steps - 1)
    ]
    return [Fraction(strategy.first, 2**18), *later]


def in_python(strategy, sums, shown):
    """The integers of all rows of one number, by integers that cannot wrap around."""
    scales, decays = strategy.scales.tolist(), strategy.decays.tolist()
    buffers, rows, noises = [0] * len(decays), [], []
    for newest, update in zip(sums, shown, strict=True):
        earlier = sum((b * scale + 2**29) >> 30 for b, scale in zip(buffers, scales, strict=True))
        rows.append((strategy.first * newest + earlier + 2**17) >> 18)
        noise = max(-strategy.largest_noise, min(newest - update, strategy.largest_noise))
        noises.append(noise)
        buffers = [
            ((b * decay + 2**29) >> 30) + noise * 2**18
            for b, decay in zip(buffers, decays, strict=True)
        ]
    return rows, noises


@for_each("name", STRATEGIES)
def test_each_step_publishes_its_row_in_integers(name, published):
    """And the integers are those of the exact rational matrix, within the stated rounding."""
    strategy = STRATEGIES[name]
    sums = np.float32(np.random.default_rng(1).normal(size=(STEPS, DIMS)) * 30)
    integers, noise, _, grid, updates = published(strategy, sums)
    whole, shown = rounded(sums, grid), rounded(updates, grid)
    entries = exact_entries(strategy)
    for i in range(DIMS):
        newest, public = ([row[i] for row in rows] for rows in (whole, shown))
        rows, noises = in_python(strategy, newest, public)
        assert integers[:, i].tolist() == rows
        for t in range(STEPS):
            earlier = sum(entries[t - j] * noises[j] for j in range(t))
            gap = abs(entries[0] * newest[t] + earlier - rows[t])
            assert gap <= Fraction(strategy.rounding) / 2
        assert np.all(np.abs(np.diff(public)) > 0)
    assert np.abs(noise).max() > 1000


@for_each("name", STRATEGIES)
def test_no_pattern_of_participation_moves_rows_further_than_is_covered(name, published):
    """Neighbors in each of the 31 sets of steps; both publish the same."""
    strategy, rng = STRATEGIES[name], np.random.default_rng(2)
    entries, farthest = np.abs(strategy.entries[0]), 0.0
    for pattern in itertools.product((False, True), repeat=STEPS):
        if not any(pattern):
            continue
        joined = np.flatnonzero(pattern)
        others = np.float32(rng.normal(size=(STEPS, DIMS)) * 10.0 ** rng.integers(-3, 2))
        neighbor = others.copy()
        for step in joined:
            moved = rng.normal(size=DIMS)
            neighbor[step] = np.float32(others[step] + 0.999999 * moved / np.linalg.norm(moved))
        one, noise, scales, grid, updates = published(strategy, others)
        two, *_, same = published(strategy, neighbor, one + noise)
        np.testing.assert_array_equal(updates, same)
        changed = np.linalg.norm((one - two).astype(float), axis=1)
        reach = [sum(entries[t - s] for s in joined if s <= t) for t in range(STEPS)]
        most = np.array(reach) * (1 / grid + math.sqrt(DIMS))
        most[joined[0] :] += math.sqrt(DIMS) * strategy.rounding
        assert np.all(changed <= most * (1 + 1e-6)), pattern
        if len(joined) == 1:
            assert 2 * np.linalg.norm(changed) <= scales[0]
            farthest = max(farthest, 2 * np.linalg.norm(changed) / scales[0])
    # The noise is no larger than need be.
    assert farthest > 0.97


def kept_of(strategy, integers):
    """Buffers with these integers, of shape (buffers, numbers)."""
    words = np.array(integers, object) % 2**64
    high, low = (x.astype(np.uint32) for x in (words >> 32, words % 2**32))
    return _limbs.Limbs(jnp.asarray(high), jnp.asarray(low))


def read(limbs):
    high = np.asarray(limbs.high).view(np.int32).astype(object)
    return high * 2**32 + np.asarray(limbs.low).astype(object)


def test_roundings_of_buffers_add_up_to_no_more_than_is_covered():
    """Two sequences of noise whose difference is 1 in one step, 200 steps ago."""
    strategy = _buffers.rounded([0.999, 0.99, -0.97], [2.0, -2.0, 1.0], steps=200)
    rng, count = np.random.default_rng(3), 4000
    kept = [strategy.nothing_kept(jnp.zeros(count)) for _ in range(2)]
    keep, earlier = jax.jit(strategy.keep), jax.jit(strategy.earlier)
    entries = [float(x) for x in exact_entries(strategy)]
    most = 0.0
    for step in range(199):
        noise = jnp.asarray(rng.integers(-(2**20), 2**20, count), jnp.int32)
        moved = [noise, noise + 1] if step == 0 else [noise, noise]
        kept = [keep(one, x, step) for one, x in zip(kept, moved, strict=True)]
        first, second = (read(earlier(one, jnp.int32(step))) for one in kept)
        gap = (second - first).astype(float) / 2**18 - entries[step + 1]
        most = max(most, np.abs(gap).max())
    allowed = strategy.rounding - 1
    assert 0.02 * allowed < most <= allowed


def test_noise_and_losses_cover_the_roundings_of_many_buffers():
    """Here 32 buffers never decay and cancel one another, but not their roundings."""
    full, steps, groups = np.full(32, 2**30, np.int32), 2**13, 2**12
    strategy = BufferedStrategy(steps, 2**18, full * np.tile(np.int32([1, -1]), 16), full)
    assert 2 < strategy.rounding < 2.001
    state = noise_of(strategy).init(PARAMETERS)
    exponent, scale = _correlated_noise._grid(jnp.float32(1), state, 3.0)
    one = 2.0 ** -int(exponent) + math.sqrt(DIMS)
    needed = strategy.column_norm * one + math.sqrt(steps * DIMS) * strategy.rounding
    assert 3 * needed <= float(scale) < 3.0001 * needed
    bins = learning.balls_in_bins_sampling(groups, bins=groups)
    losses = learning.participation_losses(
        bins, strategy=strategy, noise_multiplier=3.0, steps=steps, dims=DIMS
    )
    found = losses._shifts(0, apart=groups) * 3 * strategy.column_norm
    moved = strategy.moved_rows(0, groups=groups, steps=steps)
    np.testing.assert_allclose(found - moved, strategy.rounding * 2.0 ** (1 - losses.fineness))


@pytest.mark.parametrize("decay", [2**30, -(2**30), 2**30 - 1, 2**29])
def test_no_buffer_wraps_around_at_its_end(decay):
    """All noise has the largest size, and the sign that makes the buffers grow."""
    scales = np.array([2**30, -(2**30), 2**30], np.int32)
    strategy = BufferedStrategy(2**16, 1, scales, np.full(3, decay, np.int32))
    most = strategy.largest_noise
    assert 2**25 < most < 2**31
    reach = min(2**16, math.ceil(Fraction(2**30, max(1, 2**30 - abs(decay)))))
    largest = (2**18 * most + 1) * reach - 2**18 * most
    for sign in (1, -1):
        integers = [[sign * largest * side] for side in (1, -1, 1)]
        found = read(strategy.earlier(kept_of(strategy, integers), jnp.int32(0)))
        assert found.tolist() == [3 * sign * largest]
        after = strategy.keep(
            kept_of(strategy, integers), jnp.full(1, sign * most, jnp.int32), jnp.int32(0)
        )
        wanted = [((b * decay + 2**29) >> 30) + 2**18 * sign * most for (b,) in integers]
        assert read(after)[:, 0].tolist() == wanted
        assert max(map(abs, wanted)) < 2**61


@for_each("name", STRATEGIES)
def test_entries_and_norms_are_those_of_the_rational_matrix(name):
    strategy = STRATEGIES[name]
    exact = exact_entries(strategy)
    assert strategy.entries[0].tolist() == [float(x) for x in exact]
    assert Fraction(strategy.column_norm) ** 2 >= sum(x**2 for x in exact)
    dense = np.tril([[float(exact[abs(t - j)]) for j in range(STEPS)] for t in range(STEPS)])
    np.testing.assert_array_equal(strategy.matrix, dense)
    noise = np.tri(STEPS) @ np.linalg.inv(dense)
    expected = strategy.column_norm * np.linalg.norm(noise) / math.sqrt(STEPS)
    assert strategy.error() == pytest.approx(expected, rel=1e-6)


def test_entries_of_many_steps_do_not_lose_their_digits():
    """Powers near 1 of opposite sign cancel."""
    strategy = _buffers.rounded([1 - 1e-6, 1 - 2e-6], [1.0, -1.0], steps=400)
    exact = exact_entries(strategy)
    assert strategy.entries[0].tolist() == [float(x) for x in exact]


def test_a_state_keeps_two_words_for_each_buffer_and_number():
    strategy = _buffers.rounded([0.9, 0.5], [0.3, 0.2], steps=4000)
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(0), strategy=strategy, noise_multiplier=1.0, batch_size=1
    )
    state = noise.init(PARAMETERS)
    assert sum(x.nbytes for x in jax.tree.leaves(state._noise)) == 2 * 8 * DIMS
    assert (strategy.bands, state.noise.bands) == (4000, 4000)


def noise_of(strategy, **given):
    return learning.correlated_noise(
        dpjax.random.seeded_key(6), strategy=strategy, noise_multiplier=1.0, batch_size=1, **given
    )


def test_lanes_have_noise_of_their_own_and_the_same_buffers_as_one():
    noise = noise_of(STRATEGIES["usual"])
    _, state = noise.update(total(np.ones(DIMS)), noise.init(PARAMETERS))
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    found, after = jax.vmap(lambda state: noise.update(total(np.zeros(DIMS)), state))(states)
    assert not np.any(found["a"][0] == found["a"][1])
    # An update of zeros is noise, and what a state keeps of it is its negative.
    grid = 2.0 ** int(_correlated_noise._grid(jnp.float32(1), state, 1.0)[0])
    strategy, old = STRATEGIES["usual"], read(state._noise["a"])
    for lane in range(2):
        kept = read(jax.tree.map(lambda x, lane=lane: x[lane], after._noise["a"]))
        newest = [-int(x / grid) * 2**18 for x in np.asarray(found["a"][lane], float)]
        for k, decay in enumerate(strategy.decays.tolist()):
            decayed = [(b * decay + 2**29) >> 30 for b in old[k]]
            assert kept[k].tolist() == [b + x for b, x in zip(decayed, newest, strict=True)]


def test_a_state_of_another_strategy_is_refused():
    """In this process by an error, and from a file, which has the arrays alone, by NaN."""
    strategy = STRATEGIES["usual"]
    others = {
        "other decays": _buffers.rounded([0.98, 0.71], [0.2, 0.3], steps=STEPS),
        "other scales": _buffers.rounded([0.98, 0.7], [0.2, 0.31], steps=STEPS),
        "other steps": _buffers.rounded([0.98, 0.7], [0.2, 0.3], steps=STEPS + 1),
        "other first": dataclasses.replace(strategy, first=2**18 - 1),
    }
    state = noise_of(strategy).init(PARAMETERS)
    for name, other in others.items():
        assert other != strategy, name
        noise = noise_of(other)
        with pytest.raises(ValueError, match="a state of another strategy"):
            noise.update(total(np.ones(DIMS)), state)
        structure = jax.tree.structure(noise.init(PARAMETERS))
        mixed = jax.tree.unflatten(structure, jax.tree.leaves(state))
        found, _ = noise.update(total(np.ones(DIMS)), mixed)
        assert np.isnan(flat(found)).all(), name
    banded = learning.toeplitz_strategy([1.0, 0.5], steps=STEPS)
    with pytest.raises(ValueError, match="a state of another strategy"):
        noise_of(banded).update(total(np.ones(DIMS)), state)
    again = _buffers.rounded([0.98, 0.7], [0.2, 0.3], steps=STEPS)
    assert (again == strategy, hash(again) == hash(strategy)) == (True, True)


def test_a_state_in_another_dtype_or_shape_is_refused():
    noise = noise_of(STRATEGIES["usual"])
    state = noise.init(PARAMETERS)
    for change in (
        lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.uint16), lambda x: x[:1]
    ):  # fmt: skip
        changed = dataclasses.replace(state, _noise=jax.tree.map(change, state._noise))
        with pytest.raises(ValueError, match=r"as \{'a': Limbs"):
            noise.update(total(np.ones(DIMS)), changed)


def test_batches_of_a_record_pay_together():
    """In four steps of a record, or one; the guarantee is read from the state."""
    strategy = _buffers.rounded([0.9, 0.5], [0.3, 0.2], steps=8)
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(5), strategy=strategy, noise_multiplier=2.0, batch_size=10
    )
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    for groups in (2, 8):
        sampling = learning.cyclic_sampling(40, groups=groups, batch_size=40 / groups)
        state, records = noise.init(jnp.zeros(2)), jnp.ones((40, 2))
        for step in range(8):
            batch = sampling(dpjax.random.seeded_key(step), step=step)
            _, state = noise.update(clipped(jnp.zeros(2), records[batch.indices], batch), state)
        found = learning.guarantee(state, sampling, delta=1e-5)
        moved = np.abs(strategy.matrix[:, ::groups]).sum(1)
        one = dpjax.accounting.dp_sgd(
            learning.poisson_sampling(40, batch_size=40), steps=1, delta=1e-5, dims=2,
            noise_multiplier=2 * strategy.column_norm / np.linalg.norm(moved),
        )  # fmt: skip
        assert float(found.epsilon) == pytest.approx(float(one.epsilon), rel=1e-4)


@pytest.mark.parametrize(
    ("decays", "scales", "words"),
    [
        ([1.01], [1.0], "decays must be from -1 to 1"),
        ([np.nan], [1.0], "decays must be from -1 to 1"),
        ([0.5], [np.inf], "scales must be finite"),
        ([0.5], [1e6], r"scales must be below 2\^19, got 1e\+06"),
        ([0.5, 0.4], [1.0], "decays must be an int32 array of 1"),
        ([], [], "array of 1 to 32 numbers, one for each buffer"),
    ],
)
def test_what_cannot_be_is_refused(decays, scales, words):
    with pytest.raises(ValueError, match=words):
        _buffers.rounded(decays, scales, steps=4)


def test_numbers_out_of_range_are_refused_and_do_not_change():
    good, huge = np.array([2**29], np.int32), np.array([2**30 + 1], np.int32)
    for scales, decays in ((huge, good), (good, huge)):
        with pytest.raises(ValueError, match="must be from"):
            BufferedStrategy(4, 2**18, scales, decays)
    strategy = BufferedStrategy(4, 2**18, good, good)
    good[:] = 5
    assert strategy.decays.tolist() == strategy.scales.tolist() == [2**29]
    with pytest.raises(ValueError, match="read-only"):
        strategy.decays[0] = 0


def test_integers_of_numpy_are_those_of_python():
    """In int32, 60,000 steps of 71,583 numbers would wrap around to almost no numbers."""
    strategy = _buffers.rounded([0.5], [0.5], steps=60_000)
    again = dataclasses.replace(strategy, steps=np.int32(60_000), first=np.int32(strategy.first))
    assert (type(again.bands), again.number) == (int, strategy.number)


@pytest.mark.slow
def test_buffers_are_those_of_jax_privacy():
    """Of one epoch and of four; the error of their own numbers is the same within 1e-6."""
    factorization = pytest.importorskip("jax_privacy.matrix_factorization")
    for groups in (256, 64):
        ours = learning.buffered_strategy(steps=256, groups=groups)
        with optax_promotion(), jax.enable_x64(True):
            theirs = factorization.buffered_toeplitz.optimize(
                n=256, min_sep=groups, max_participations=256 // groups, error="mean"
            )
            coefficients = theirs.toeplitz_coefs(256)
            squared = factorization.toeplitz.loss(coefficients, n=256)
        assert len(ours.decays) == len(theirs.buf_decay) < 12
        np.testing.assert_allclose(ours.entries[0], coefficients, rtol=1e-6)
        # Their loss is for a largest norm of a column of 1.
        assert ours.error() == pytest.approx(math.sqrt(float(squared)), rel=1e-6)
