"""Correlated noise in lanes of a `vmap`: every kind of neighbor, copies and files of states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import learning
from dpjax._exact import _limbs
from dpjax.learning import _correlated_noise as module

STEPS, SLOTS, DIMS, MULTIPLIER = 6, 4, 5, 2.0
# The last ones are what an adversary would choose: each is nearly singular in its way.
STRATEGIES = {
    "independent": learning.toeplitz_strategy([2.0], steps=STEPS),
    "toeplitz": learning.toeplitz_strategy([1.0, 0.5], steps=STEPS),
    "any bands": learning.banded_strategy(
        [[1, 0, 0], [0.7, -0.9, 0], [1.3, 0.5, 0.25], [0.9, 0.3, -0.4], [1, 0.6, 0.2], [1, 0, 0]]
    ),
    "negative": learning.toeplitz_strategy([1.0, -1.0, 1.0], steps=STEPS),
    "zeros below": learning.banded_strategy(np.eye(3)[[0] * STEPS]),
    "huge rows": learning.banded_strategy([[1e30, 0], [1e25, -1e30]] * (STEPS // 2)),
    "equal rows": learning.toeplitz_strategy([1.0] * STEPS, steps=STEPS),
    "least diagonal": learning.toeplitz_strategy([2.0**-18, 1.0, -1.0], steps=STEPS),
}


def noise_of(strategy):
    return learning.correlated_noise(
        dpjax.random.seeded_key(1), strategy=strategy, noise_multiplier=MULTIPLIER, batch_size=1
    )


CLIPPED = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)


def step_of(noise):
    """A step of every lane: its state, its batch and who is there."""

    def step(state, records, there):
        return noise.update(CLIPPED(jnp.zeros(DIMS), records, there), state)

    return jax.vmap(step)


def copies(state, lanes):
    return jax.tree.map(lambda x: jnp.stack([x] * lanes), state)


@pytest.fixture
def moved(monkeypatch):
    """Trains lanes that all publish the same, and compares their integers before noise.

    Returns by how much they differ from those of the first lane, of shape (lanes, steps, dims), in
    units of the noise that one clip norm is worth. All lanes publish what the first lane does with
    some noise, as a privacy loss compares neighbors by one output.
    """
    seen, wanted = [], []

    def record(high, low, scale):
        high, low, scale = map(np.asarray, (high, low, scale))
        integers = high.astype(np.int32).astype(np.int64) * 2**32 + low
        noise = wanted[len(seen)] - integers if wanted else np.full(integers.shape, 12_345)
        assert np.abs(noise).max() < 2**31
        seen.append((integers, noise, np.ravel(scale)[0]))
        return noise.astype(np.int32)

    def add(key, rows, scale, exponent, dtypes, distribution):
        del key, exponent, distribution
        (row,), (dtype,) = rows, dtypes
        shape = jax.ShapeDtypeStruct(row.low.shape, jnp.int32)
        drawn = jax.pure_callback(
            record, shape, row.high, row.low, scale, vmap_method="broadcast_all"
        )
        return [_limbs.to_float(_limbs.add(row, _limbs.from_integers(drawn)), dtype)]

    whole = module._step.__wrapped__
    monkeypatch.setattr(module, "add_integer_noise", add)
    # JAX keeps programs by their function, so the real noise must not share this one.
    monkeypatch.setattr(module, "_step", lambda *given: whole(*given))

    def run(strategy, records, there):
        noise = noise_of(strategy)
        first, step = copies(noise.init(jnp.zeros(DIMS)), there.shape[1]), jax.jit(step_of(noise))
        for _ in range(2):
            wanted[:] = [integers[:1] + drawn[:1] for integers, drawn, _ in seen]
            seen.clear()
            states = first
            for batch, mask in zip(records, there, strict=True):
                updates, states = jax.block_until_ready(step(states, batch, mask))
        np.testing.assert_array_equal(updates, updates[:1].repeat(len(updates), 0))
        integers, _, scales = map(np.array, zip(*seen, strict=True))
        seen.clear()
        return (integers - integers[:, :1]).swapaxes(0, 1) * (MULTIPLIER / scales[0])

    return run


def patterns(groups):
    """The steps that a record of some group can join, in every combination."""
    for group in range(groups):
        steps = range(group, STEPS, groups)
        for size in range(1, len(steps) + 1):
            yield from itertools.combinations(steps, size)


def lanes_of(kinds, rng):
    """A lane without the record, and one for each kind: the steps and the slot of the record."""
    records = np.float32(rng.normal(size=(STEPS, 1, SLOTS, DIMS)).repeat(len(kinds) + 1, 1))
    there = np.ones((STEPS, len(kinds) + 1, SLOTS), bool)
    for lane, (_, slot) in enumerate(kinds, 1):
        records[:, lane, [slot, -1]] = records[:, lane, [-1, slot]]
    extra = rng.normal(size=(STEPS, DIMS))
    extra[0], extra[1:3] = np.eye(DIMS)[0], -np.eye(DIMS)[0]  # Signs that add up in some columns.
    there[:, 0, -1] = False
    for lane, (steps, slot) in enumerate(kinds, 1):
        there[:, lane, slot] = False
        there[list(steps), lane, slot] = True
        records[:, lane, slot] = 5 * extra
    return jnp.asarray(records), jnp.asarray(there)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_neighbor_of_any_pattern_slot_and_step_moves_the_integers_further(name, moved):
    """Batches of a record that share no published number are mechanisms of their own.

    A record in every batch, or in every other one, moves all published numbers as one mechanism.
    """
    strategy, rng = STRATEGIES[name], np.random.default_rng(7)
    apart = list(itertools.product(patterns(strategy.bands), range(SLOTS)))
    together = [range(group, STEPS, groups) for groups in (1, 2) for group in range(groups)]
    kinds = apart + [(steps, group % SLOTS) for group, steps in enumerate(together)]
    found = moved(strategy, *lanes_of(kinds, rng))[1:]
    farthest = 0.0
    for (steps, _), rows in zip(apart, found, strict=False):
        entered = {step + lag for step in steps for lag in range(strategy.bands)}
        assert set(np.flatnonzero(rows.any(1))) <= entered
        one = [np.linalg.norm(rows[step : step + strategy.bands]) for step in steps]
        farthest = max(farthest, *one)
    assert farthest <= 1
    # Of the least diagonal, noise is so large that no sum is left in the integers.
    assert farthest > 0.9 or name == "least diagonal"
    for steps, rows in zip(together, found[len(apart) :], strict=True):
        whole = strategy.overlap(groups=steps.step, steps=STEPS)
        assert np.linalg.norm(rows) <= whole


@pytest.mark.parametrize("name", ["toeplitz", "equal rows"])
def test_copies_in_64_lanes_share_no_noise_in_any_step(name):
    noise = noise_of(STRATEGIES[name])
    states = copies(noise.init(jnp.zeros(DIMS)), 64)
    step = jax.jit(step_of(noise))
    nothing = jnp.zeros((64, SLOTS, DIMS)), jnp.zeros((64, SLOTS), bool)
    found = []
    for _ in range(3):
        updates, states = step(states, *nothing)
        found.append(np.asarray(updates))
    # Of 64 * 3 draws at a scale of thousands of units, none may be another's.
    assert len(np.unique(np.concatenate(found)[:, 0])) == 64 * 3


def test_lanes_go_on_from_a_file_as_if_they_had_not_stopped():
    noise = noise_of(STRATEGIES["any bands"])
    states, step = copies(noise.init(jnp.zeros(DIMS)), 8), jax.jit(step_of(noise))
    rng = np.random.default_rng(9)
    batches = jnp.asarray(rng.normal(size=(STEPS, 8, SLOTS, DIMS)), jnp.float32)
    there = jnp.ones((8, SLOTS), bool)

    def stored(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        return jnp.asarray(np.asarray(leaf))

    whole, again = [], []
    for i, batch in enumerate(batches):
        updates, states = step(states, batch, there)
        whole.append(updates)
        if i == 2:
            kept = jax.tree.map(stored, states)
    for batch in batches[3:]:
        updates, kept = step(kept, batch, there)
        again.append(updates)
    np.testing.assert_array_equal(whole[3:], again)
