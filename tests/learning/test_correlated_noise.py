"""Correlated noise: what is published in integers, what a record moves, what is promised."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from correlated_steps import DIMS, PARAMETERS, PublishedSteps, flat, rounded, total
from dpjax import learning
from dpjax.learning._buffers import rounded as buffered
from dpjax.learning._clipping import sealed
from dpjax.learning._sampling import Turn
from dpjax.learning._strategies import BandedStrategy
from dpjax.targets._optax_training import optax_promotion

ROWS = np.array([[1, 0, 0], [0.7, -0.9, 0], [1.3, 0.5, 0.25], [0.9, 0.3, -0.4], [1, 0.6, 0.2]] * 2)
STRATEGIES = {
    "independent": learning.toeplitz_strategy([2.0], steps=10),
    "toeplitz": learning.toeplitz_strategy([1.0, 0.5, 0.375], steps=10),
    "any bands": learning.banded_strategy(ROWS),
    "steep": learning.toeplitz_strategy([0.01, 1.0], steps=10),
}


@pytest.fixture(scope="module")
def published():
    return PublishedSteps()


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_step_publishes_a_row_of_the_strategy_in_integers(name, published):
    """The row of clipped sums, where earlier ones count less their updates.

    Updates of the steep strategy grow a hundredfold in each step, so the differences are clamped.
    """
    strategy = STRATEGIES[name]
    sums = np.float32(np.random.default_rng(1).normal(size=(10, DIMS)) * 30)
    integers, noise, _, grid, updates = published(strategy, sums)
    whole, shown = rounded(sums, grid), rounded(updates, grid)
    np.testing.assert_array_equal(np.array(shown, float) * grid, updates)
    for t in range(10):
        row = [int(x) for x in strategy.numerators[min(t, len(strategy.numerators) - 1)]]
        lags = range(1, min(t + 1, strategy.bands))
        for i in range(DIMS):
            noises = [whole[t - lag][i] - shown[t - lag][i] for lag in lags]
            kept = [max(-(2**31) + 1, min(x, 2**31 - 1)) for x in noises]
            earlier = sum(row[lag] * x for lag, x in zip(lags, kept, strict=True))
            assert integers[t, i] == (row[0] * whole[t][i] + earlier + 2**17) >> 18
        update = (integers[t] + noise[t]) * (2.0**18 / row[0]) * grid
        np.testing.assert_allclose(updates[t], update, rtol=1e-6, atol=grid)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_record_moves_a_column_further_than_the_noise_covers(name, published):
    """Neighbors differ in one step by a vector of the norm bound; halves make roundings extreme.

    Both publish the same, as a privacy loss compares them.
    """
    strategy, rng = STRATEGIES[name], np.random.default_rng(2)
    base = np.float32(rng.normal(size=(10, DIMS)))
    farthest = 0.0
    for trial in range(12):
        others = base * 10.0 ** rng.integers(-3, 3)
        at = trial % 10
        moved = rng.normal(size=DIMS) if trial % 3 else np.eye(DIMS)[trial % DIMS]
        neighbor = others.copy()
        neighbor[at] = np.float32(others[at] + 0.999999 * moved / np.linalg.norm(moved))
        first, noise, scales, _, updates = published(strategy, others)
        second, _, _, _, same = published(strategy, neighbor, first + noise)
        np.testing.assert_array_equal(updates, same)
        distance = math.sqrt(sum(int(x) ** 2 for x in (first - second).ravel()))
        farthest = max(farthest, distance * 2.0 / scales[0])
        assert distance * 2.0 <= scales[0]
        changed = np.flatnonzero((first != second).any(axis=1))
        assert changed.min() >= at
        assert changed.max() < at + strategy.bands
    assert farthest > 0.95 if name != "any bands" else 0.7  # The noise is no larger than need be.


@pytest.mark.parametrize("groups", [2, 4])
def test_no_record_of_many_steps_moves_rows_further_than_it_pays_for(groups, published):
    """It joins every second or fourth step; of these strategies, some have more bands than that."""
    rng, farthest = np.random.default_rng(4), 0.0
    bins = learning.balls_in_bins_sampling(40, bins=groups)
    for name, strategy in STRATEGIES.items():
        losses = learning.participation_losses(
            bins, strategy=strategy, noise_multiplier=2.0, steps=10, dims=DIMS
        )
        for first in range(groups):
            others = np.float32(rng.normal(size=(10, DIMS)))
            moved, neighbor = rng.normal(size=DIMS), others.copy()
            neighbor[first::groups] += np.float32(0.999999 * moved / np.linalg.norm(moved))
            one, noise, scales, _, _ = published(strategy, others)
            two, *_ = published(strategy, neighbor, one + noise)
            rows = np.linalg.norm((one - two).astype(float), axis=1) / scales[0]
            # The last digits of float32 move the sums a little further than by the norm bound.
            assert np.all(rows <= losses._shifts(first, apart=groups) + 1e-6), name
            whole = 2.0 * np.linalg.norm(rows) / strategy.overlap(groups=groups, steps=10)
            assert whole <= 1
            farthest = max(farthest, whole)
    assert farthest > 0.99  # The noise is no larger than need be.


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "steep"])
def test_updates_are_sums_with_the_noise_of_the_inverse(name, published):
    strategy, rng = STRATEGIES[name], np.random.default_rng(3)
    sums = np.float32(rng.normal(size=(10, DIMS)))
    _, noise, _, grid, updates = published(strategy, sums)
    added = np.linalg.solve(strategy.matrix, noise * grid)
    np.testing.assert_allclose(updates, sums + added, atol=10 * grid)
    assert np.abs(added).max() > 1000 * grid


def test_sums_of_updates_have_the_error_that_the_strategy_states():
    """At 40,000 numbers the root mean square is within .7% with probability .95; 3% are allowed."""
    strategy = learning.toeplitz_strategy([1.0, 0.5, 0.375, 0.3125], steps=12)
    size, parameters = 40_000, jnp.zeros(40_000)
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(4), strategy=strategy, noise_multiplier=1.0, batch_size=1
    )
    state, sums = noise.init(parameters), [np.zeros(size)]
    nothing = sealed(
        parameters, jnp.float32(1), jnp.int32(0), jnp.zeros(1), None, 1, 0, Turn()
    )  # fmt: skip
    update = jax.jit(lambda state: noise.update(nothing, state))
    for _ in range(12):
        found, state = update(state)
        sums.append(sums[-1] + np.asarray(found))
    observed = np.sqrt((np.array(sums[1:]) ** 2).mean())
    assert observed == pytest.approx(strategy.error(), rel=0.03)
    assert observed < 0.75 * math.sqrt(13 / 2)  # Independent noise.


def test_the_error_is_that_of_the_matrix():
    sums = np.tri(10)
    for strategy in STRATEGIES.values():
        norms = np.sqrt((strategy.matrix**2).sum(0).max())
        assert strategy.column_norm == pytest.approx(norms)
        noise = norms * sums @ np.linalg.inv(strategy.matrix)
        assert strategy.error() == pytest.approx(np.sqrt((noise**2).sum() / 10))


def cyclic_training(strategy, sampling, *, order=None, noise="exact", key=5):
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(key), strategy=strategy, noise_multiplier=2.0, batch_size=10,
        noise=noise,
    )  # fmt: skip
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    state, records = noise.init(jnp.zeros(2)), jnp.ones((40, 2))
    for step in order or range(8):
        batch = sampling(dpjax.random.seeded_key(step), step=step)
        gradient, state = noise.update(clipped(jnp.zeros(2), records[batch.indices], batch), state)
    return gradient, state


KEY, CYCLE = dpjax.random.seeded_key(0), learning.cyclic_sampling(40, groups=4, batch_size=5)
PAIRS = learning.toeplitz_strategy([1.0, 0.5], steps=8)


def test_a_record_pays_for_the_steps_of_its_group():
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    assert (sampling.rate, sampling.capacity) == (1.0, 10)
    _, state = cyclic_training(PAIRS, sampling)
    found = learning.guarantee(state, sampling, delta=1e-5)
    # Two full steps of noise 2 are one of noise sqrt(2).
    one = dpjax.accounting.dp_sgd(
        dataclasses.replace(learning.poisson_sampling(40, batch_size=40)),
        noise_multiplier=math.sqrt(2), steps=1, delta=1e-5, dims=2,
    )  # fmt: skip
    assert found.epsilon == pytest.approx(one.epsilon, rel=1e-4)
    assert "seeded key" in found.notes


def test_a_batch_of_another_step_has_no_guarantee():
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    _, state = cyclic_training(PAIRS, sampling, order=[0, 1, 2, 3, 0, 1, 2, 3])
    with pytest.raises(ValueError, match="must be the sampling that drew the batches of all steps"):
        learning.guarantee(state, sampling, delta=1e-5)


def test_fewer_groups_than_bands_are_refused():
    three = learning.toeplitz_strategy([1.0, 0.5, 0.2], steps=8)
    sampling = learning.cyclic_sampling(40, groups=2, batch_size=10)
    _, state = cyclic_training(three, sampling)
    with pytest.raises(ValueError, match="at least 3 groups, one for each band"):
        learning.guarantee(state, sampling, delta=1e-5)


def test_a_part_of_the_state_promises_no_more():
    """The counts of the state are a state of noise, which could be of independent noise."""
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    _, state = cyclic_training(PAIRS, sampling)
    whole, part = (learning.guarantee(x, sampling, delta=1e-5) for x in (state, state.noise))
    assert whole == part
    unsampled = dataclasses.replace(state.noise, drawn_by=jnp.uint32(0))
    with pytest.raises(ValueError, match="at least 2 groups, one for each band"):
        learning.guarantee(unsampled, learning.poisson_sampling(40, batch_size=10), delta=1e-5)


def test_a_traced_step_below_zero_has_no_guarantee():
    """Else -1 would mark batches of one group as those of any step."""
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    drawn = jax.jit(lambda key, step: sampling(key, step=step))

    def same_group(key, *, step):
        del step
        return drawn(key, jnp.int32(-1))

    _, state = cyclic_training(PAIRS, same_group)
    with pytest.raises(ValueError, match="must be the sampling that drew the batches of all steps"):
        learning.guarantee(state, sampling, delta=1e-5)


def test_another_strategy_does_not_go_on_with_a_state():
    """Its column would start by one strategy and end by the other, and be longer than both."""
    first, second = (
        learning.toeplitz_strategy(x, steps=8) for x in ([1.0, 0.01], [0.01, 1.0])
    )  # fmt: skip
    noises = [
        learning.correlated_noise(
            dpjax.random.seeded_key(6), strategy=x, noise_multiplier=1.0, batch_size=1
        )
        for x in (first, second)
    ]
    found, state = noises[0].update(total(np.ones(DIMS)), noises[0].init(PARAMETERS))
    assert np.isfinite(flat(found)).all()
    with pytest.raises(ValueError, match="a state of another strategy"):
        noises[1].update(total(np.ones(DIMS)), state)
    # A file brings arrays alone, without the strategy.
    arrays, structure = jax.tree.leaves(state), jax.tree.structure(noises[1].init(PARAMETERS))
    state = jax.tree.unflatten(structure, arrays)
    for _ in range(2):
        found, state = noises[1].update(total(np.ones(DIMS)), state)
        assert np.isnan(flat(found)).all()


@pytest.mark.parametrize(
    "strategy", [PAIRS, buffered([0.9], [0.5], steps=8)], ids=["banded", "buffered"]
)
def test_a_state_of_a_finer_grid_does_not_go_on(strategy):
    """Kept integers of a grid twice as fine would move rows twice as far as noise covers.

    Slightly more noise has a coarser grid, and a file brings arrays alone, without their grid.
    """
    first, second = states = [], []
    for multiplier, found in zip((16.0, 32.0), states, strict=True):
        noise = learning.correlated_noise(
            dpjax.random.seeded_key(6), strategy=strategy, noise_multiplier=multiplier, batch_size=1
        )
        found += [noise, noise.init(PARAMETERS)]
    assert first[1].fineness == second[1].fineness + 1
    _, state = first[0].update(total(np.ones(DIMS)), first[1])
    state = jax.tree.unflatten(jax.tree.structure(second[1]), jax.tree.leaves(state))
    for _ in range(2):
        found, state = second[0].update(total(np.ones(DIMS)), state)
        assert np.isnan(flat(found)).all()


def test_equal_strategies_share_a_state():
    """A strategy is its numbers, so that equal trainings share a program."""
    again, other = (learning.toeplitz_strategy(x, steps=8) for x in ([1.0, 0.5], [1.0, 0.6]))
    assert (again == PAIRS, hash(again) == hash(PAIRS)) == (True, True)
    assert PAIRS not in (other, learning.toeplitz_strategy([1.0, 0.5], steps=9), "a strategy")
    noise = [
        learning.correlated_noise(
            dpjax.random.seeded_key(6), strategy=x, noise_multiplier=1.0, batch_size=1
        )
        for x in (PAIRS, again)
    ]
    found, _ = noise[1].update(total(np.ones(DIMS)), noise[0].init(PARAMETERS))
    assert np.isfinite(flat(found)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "uint32"])
def test_a_state_in_another_dtype_is_refused(dtype):
    """A cast may wrap around, and so move the noise of an update further than its sum moves."""
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(6), strategy=PAIRS, noise_multiplier=1.0, batch_size=1
    )
    state = noise.init(PARAMETERS)
    cast = jax.tree.map(lambda x: x.astype(dtype), state._noise)
    with pytest.raises(ValueError, match=r"as \{'a': 'int32"):
        noise.update(total(np.ones(DIMS)), dataclasses.replace(state, _noise=cast))


def test_the_numbers_of_a_strategy_do_not_change():
    with pytest.raises(ValueError, match="read-only"):
        PAIRS.numerators[0, 0] = 0


def test_steps_beyond_the_strategy_are_not_a_number():
    short = learning.toeplitz_strategy([1.0, 0.5], steps=7)
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    last, state = cyclic_training(short, sampling)
    assert np.isnan(last).all()
    with pytest.raises(ValueError, match="at most the 7 steps of its strategy"):
        learning.guarantee(state, sampling, delta=1e-5)


def test_a_larger_norm_bound_gives_no_more_numbers():
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(6), strategy=PAIRS, noise_multiplier=1.0, batch_size=1
    )
    found, state = noise.update(total(np.ones(DIMS)), noise.init(PARAMETERS))
    assert np.isfinite(flat(found)).all()
    found, state = noise.update(total(np.ones(DIMS), norm_bound=0.5), state)
    assert np.isfinite(flat(found)).all()
    for norm_bound in (1.01, 1.0):
        found, state = noise.update(total(np.ones(DIMS), norm_bound=norm_bound), state)
        assert np.isnan(flat(found)).all()


def test_copies_of_a_state_in_lanes_have_noise_of_their_own():
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(7), strategy=PAIRS, noise_multiplier=1.0, batch_size=1
    )
    state = noise.init(PARAMETERS)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    found, _ = jax.vmap(lambda state: noise.update(total(np.zeros(DIMS)), state))(states)
    assert not np.any(found["a"][0] == found["a"][1])


def test_a_state_that_a_program_closes_over_is_refused():
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(8), strategy=PAIRS, noise_multiplier=1.0, batch_size=1
    )
    state = noise.init(PARAMETERS)
    with pytest.raises(ValueError, match="state must enter this function as an argument"):
        jax.jit(lambda: noise.update(total(np.zeros(DIMS)), state))()


def test_no_private_number_turns_into_a_nan():
    noise = learning.correlated_noise(
        dpjax.random.seeded_key(9), strategy=PAIRS, noise_multiplier=1.0, batch_size=1
    )
    odd = [np.nan, np.inf, -np.inf, 3e38, 1e-45]
    found, state = noise.update(total(odd), noise.init(PARAMETERS))
    assert np.isfinite(flat(found)).all()
    found, state = noise.update(total(np.zeros(DIMS)), state)
    assert np.isfinite(flat(found)).all()


def test_noise_in_floats_promises_nothing():
    sampling = learning.cyclic_sampling(40, groups=4, batch_size=10)
    gradient, state = cyclic_training(PAIRS, sampling, noise="float")
    assert np.isfinite(gradient).all()
    assert learning.guarantee(state, sampling, delta=1e-5).epsilon == math.inf


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: learning.toeplitz_strategy([0.0, 1.0], steps=4), "diagonal entries above"),
        (lambda: learning.toeplitz_strategy([-1.0], steps=4), "diagonal entries above"),
        (lambda: learning.toeplitz_strategy([1e-9, 1.0], steps=4), "diagonal entries above"),
        (lambda: learning.toeplitz_strategy([0.0], steps=4), "diagonal entries above"),
        (lambda: learning.toeplitz_strategy([1.0, np.inf], steps=4), "finite"),
        (lambda: learning.toeplitz_strategy([1.0, np.nan], steps=4), "finite"),
        (lambda: learning.toeplitz_strategy([[1.0]], steps=4), r"must have shape \(bands,\)"),
        (lambda: learning.toeplitz_strategy([], steps=4), "bands"),
        (lambda: learning.toeplitz_strategy([1.0], steps=0), "steps"),
        (lambda: learning.banded_strategy([[1.0, 2.0], [0.0, 1.0]]), "diagonal entries above"),
        (lambda: learning.banded_strategy([1.0, 2.0]), "shape"),
        (lambda: learning.cyclic_sampling(40, groups=41, batch_size=1), "groups"),
        (lambda: learning.cyclic_sampling(40, groups=4, batch_size=11), "batch_size"),
        (
            lambda: learning.cyclic_sampling(40, groups=4, batch_size=5)(
                dpjax.random.seeded_key(0)
            ),
            "step",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "numerators",
    [
        [[0, 1]],
        [[2**18 + 1]],
        [[1], [1]],
        [1],
        np.ones((1, 0), np.int32),
        np.ones((1, 1)),
        np.full((1, 1), 2**33),
        np.ones((1, 2**12 + 1), np.int32),  # Sums of many bands may wrap around.
    ],
)
def test_a_strategy_of_other_numerators_is_refused(numerators):
    """A column norm of other integers would not be that of the rows that programs compute."""
    given = np.asarray(numerators)
    if given.dtype == np.int64 and given.max(initial=0) < 2**31:
        given = given.astype(np.int32)
    with pytest.raises(ValueError, match="numerators must be"):
        BandedStrategy(4, given)


def test_a_strategy_keeps_its_entries():
    given = np.ones((1, 1), np.int32)
    strategy = BandedStrategy(4, given)
    given[:] = 5
    assert strategy.numerators.item() == 1


def test_batches_of_a_fixed_size_have_no_groups():
    """They draw from all records, so a record would pay for too few steps."""
    grouped = dataclasses.replace(learning.fixed_size_sampling(40, batch_size=10), groups=4)
    relation = dpjax.NeighboringRelation.REPLACE_ONE
    with pytest.raises(ValueError, match="groups must be 1"):
        dpjax.accounting.dp_sgd(
            grouped, noise_multiplier=1.0, steps=8, delta=1e-5, dims=2, relation=relation
        )


def test_entries_beyond_the_triangle_are_not_read():
    read = learning.banded_strategy([[1.0, 9.0], [1.0, 0.5]])
    assert read.matrix.round(3).tolist() == [[1, 0], [0.5, 1]]


def test_a_record_joins_one_of_the_batches_of_a_cycle():
    sampling = learning.cyclic_sampling(41, groups=4, batch_size=5)
    keys = [dpjax.random.seeded_key(i) for i in range(8)]
    batches = [sampling(key, step=step) for step, key in enumerate(keys)]
    for step, batch in enumerate(batches):
        held = np.asarray(batch.indices)[np.asarray(batch._mask)]
        assert set(held % 4) <= {step % 4}
        assert int(batch.turn.step) == step
    assert sampling.batch_size == pytest.approx(5)


@pytest.mark.slow
def test_strategies_of_jax_privacy_keep_their_error():
    factorization = pytest.importorskip("jax_privacy.matrix_factorization")
    with optax_promotion():
        coefficients = factorization.toeplitz.optimize_banded_toeplitz(64, 8)
        theirs = factorization.toeplitz.loss(coefficients, n=64)
    ours = learning.optimized_strategy(steps=64, bands=8)
    assert ours.error() ** 2 == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.slow
def test_a_buffered_strategy_is_that_of_jax_privacy():
    """In one epoch, and in four, where its columns share rows."""
    factorization = pytest.importorskip("jax_privacy.matrix_factorization")
    for groups in (64, 16):
        ours = learning.buffered_strategy(steps=64, groups=groups)
        assert ours.bands == 64
        coefficients = ours.matrix[:, 0]
        with optax_promotion():
            squared = factorization.toeplitz.minsep_sensitivity_squared(
                coefficients, groups, max_participations=64 // groups
            )
            theirs = factorization.toeplitz.loss(coefficients, n=64)
        overlap = ours.overlap(groups=groups, steps=64)
        assert (overlap * ours.column_norm) ** 2 == pytest.approx(float(squared), rel=1e-5)
        # Their loss is for a largest norm of a column of 1.
        assert ours.error() ** 2 == pytest.approx(float(theirs), rel=1e-5)
