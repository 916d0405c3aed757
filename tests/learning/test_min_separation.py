"""Batches that are at least b steps apart: who joins, and what it is worth that this is secret."""

import collections
import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpjax
from dpjax import accounting, learning
from dpjax.accounting._dp_sgd import DpSgdRun
from dpjax.learning import _fit, _separation
from dpjax.learning._participation import Ratio, separated_losses
from dpjax.random import seeded_key
from tables import for_each

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
N = 40
SAMPLING = learning.min_separation_sampling(N, separation=3, batch_size=8, capacity=40)
PAIRS = learning.toeplitz_strategy([1.0, 0.5], steps=8)


def joining(batch):
    return set(np.asarray(batch.indices)[np.asarray(batch._mask)].tolist())


def separated(rate, separation, n=N):
    """A sampling of any rate, and of separations that the factory refuses, such as 1."""
    return learning.BatchSampling("separated", n, rate, n, separation)


def patterns(steps, separation, rate, all_able=False):
    """The probability of each set of steps whose batches a record joins."""
    able = 1 / (1 + (separation - 1) * rate)
    states = {((), wait): able * (rate if wait else 1) for wait in range(separation)}
    if all_able:
        states = {((), 0): 1.0}
    for step in range(steps):
        after = collections.Counter()
        for (joined, wait), p in states.items():
            if wait:
                after[joined, wait - 1] += p
            else:
                after[joined, 0] += p * (1 - rate)
                after[(*joined, step), separation - 1] += p * rate
        states = after
    found = collections.Counter()
    for (joined, _), p in states.items():
        found[joined] += p
    return found


@for_each("separation, rate", [(3, 0.25), (5, 2.0**-9), (4, 1.0), (2, 1 - 2.0**-32)])
def test_distances_are_words_of_64_bits_against_exact_probabilities(separation, rate):
    """Each record of its own, in Python integers, for 600 steps."""
    key, n, steps = seeded_key(3), 5, 600
    first, waits = jax.random.split(key)
    words = np.asarray(jax.random.bits(first, (4, n), jnp.uint32)).astype(object)
    q = Fraction(rate)
    batches = [set() for _ in range(steps)]
    for i in range(n):
        word, other = words[0, i] * 2**32 + words[1, i], words[2, i] * 2**32 + words[3, i]
        share = 1 / (1 + (separation - 1) * q)
        step = 0 if Fraction(word, 2**64) < share else 1 + other % (separation - 1)
        for draw in itertools.count():
            if step >= steps:
                break
            high, low = np.asarray(
                jax.random.bits(jax.random.fold_in(waits, draw), (2, n), jnp.uint32)
            ).astype(object)[:, i]
            below = Fraction(high * 2**32 + low, 2**64)
            wait = next((k for k in range(255) if below < 1 - (1 - q) ** (k + 1)), None)
            if wait is None:
                step += 255
                continue
            if step + wait < steps:
                batches[step + wait].add(i)
            step += wait + separation
    draw = jax.jit(
        jax.vmap(lambda t: _separation.joins(key, t, n=n, separation=separation, rate=rate))
    )
    found = np.asarray(draw(jnp.arange(steps)))
    assert [set(np.flatnonzero(row)) for row in found] == batches


@for_each("separation, rate", [(2, 0.3), (3, 2.0**-20), (7, 0.9), (65_536, 1.0), (1, 0.5)])
def test_distances_are_as_far_from_their_distribution_as_is_charged(separation, rate):
    """In exact fractions: the total variation of the first step, and of every later draw."""
    q, share = Fraction(rate), 1 / (1 + (separation - 1) * Fraction(rate))

    def numbers(*shares):
        high, low = _separation._word_limits(*shares)
        return [int(x) * 2**32 + int(y) for x, y in zip(high, low, strict=True)]

    ends = [1 - (1 - q) ** k for k in range(1, 256)]
    drawn = np.diff([0, *(Fraction(x, 2**64) for x in numbers(*ends)), 1])
    exact = np.diff([0, *ends, 1])
    assert sum(abs(drawn - exact)) / 2 <= Fraction(256, 2**64)
    (limit,) = numbers(share)
    later = max(separation - 1, 1)
    # A word modulo `later` takes its first remainders once more often.
    low, more = divmod(2**64, later)
    modulo = (more * abs(Fraction(low + 1, 2**64) - Fraction(1, later))) if more else 0
    assert abs(Fraction(limit, 2**64) - share) + modulo <= Fraction(separation, 2**64)
    run = DpSgdRun(separated(rate, separation, n=10**6), 10, 1e-3, 1, ADD, "pld").checked()
    assert run.uneven == (separation + 2560) * 2.0**-64


def test_sets_of_steps_have_their_probabilities():
    """Chi-squared tests of 20,000 records, at the start and later; false alarms 1e-6 each."""
    n = 20_000
    sampling = learning.min_separation_sampling(n, separation=3, batch_size=4000)
    expected = patterns(6, 3, sampling.rate)
    joined = np.zeros((36, n), bool)
    for step in range(36):
        joined[step, list(joining(sampling(seeded_key(5), step=step)))] = True

    def p_value(rows, law):
        counts = collections.Counter(tuple(np.flatnonzero(row)) for row in rows.T)
        assert set(counts) <= set(law)
        return stats.chisquare([counts[x] for x in law], [n * p for p in law.values()]).pvalue

    assert p_value(joined[:6], expected) > 1e-6
    assert p_value(joined[30:], expected) > 1e-6
    # A rate that is larger by a twentieth would be found, and a start in which all may join, too.
    assert p_value(joined[:6], patterns(6, 3, 1.05 * sampling.rate)) < 1e-6
    assert p_value(joined[:6], patterns(6, 3, sampling.rate, all_able=True)) < 1e-6


def test_a_rate_of_one_is_a_random_bin():
    whole = learning.min_separation_sampling(N, separation=4, batch_size=10, capacity=N)
    assert (whole.rate, whole.batch_size) == (1, 10)
    batches = [joining(whole(seeded_key(1), step=step)) for step in range(12)]
    assert sorted(i for batch in batches[:4] for i in batch) == list(range(N))
    assert batches[:4] == batches[4:8] == batches[8:]
    assert min(len(batch) for batch in batches[:4]) > 0


def test_a_batch_is_a_function_of_the_key_and_the_step():
    """In any order, in `jit` and under `vmap` over keys and over steps; empty slots join none."""
    keys = jax.random.split(seeded_key(2), 3)
    drawn = {(i, t): SAMPLING(keys[i], step=t) for t in (9, 4, 0) for i in range(3)}
    together = jax.vmap(lambda key: SAMPLING(key, step=9))(keys)
    over_steps = jax.jit(jax.vmap(lambda t: SAMPLING(keys[1], step=t)))(jnp.array([4, 9]))
    for i in range(3):
        assert np.array_equal(together.indices[i], drawn[i, 9].indices)
        assert np.array_equal(together._mask[i], drawn[i, 9]._mask)
    assert np.array_equal(over_steps.indices[0], drawn[1, 4].indices)
    assert np.array_equal(over_steps.indices[1], drawn[1, 9].indices)
    assert joining(drawn[0, 9]) != joining(drawn[1, 9])
    present = jnp.arange(N) % 2 == 0
    half = SAMPLING(keys[0], present, step=4)
    assert joining(half) == {i for i in joining(drawn[0, 4]) if i % 2 == 0}
    assert half.turn.bins == drawn[0, 9].turn.bins != drawn[1, 9].turn.bins


def test_a_step_before_the_first_one_has_no_turn():
    batch = jax.jit(lambda t: SAMPLING(seeded_key(0), step=t))(-1)
    assert int(batch.turn.step) == -2
    with pytest.raises(ValueError, match="step must be from 0"):
        SAMPLING(seeded_key(0), step=-1)
    for step in (1.5, True, jnp.zeros(2, int)):
        with pytest.raises(ValueError, match="step must be an integer"):
            SAMPLING(seeded_key(0), step=step)
    with pytest.raises(ValueError, match="step must be the number of the step"):
        SAMPLING(seeded_key(0))


@for_each(
    "steps, separation, rate, bands",
    [(7, 3, 0.3, 3), (5, 1, 0.25, 1), (6, 8, 0.4, 4), (8, 4, 1.0, 4), (10, 3, 0.01, 2)],
)
def test_the_recursion_is_the_sum_over_all_sets_of_steps(steps, separation, rate, bands):
    """With any columns and rows, to 12 digits."""
    columns, rows = columns_of(steps, bands)
    law = patterns(steps, separation, rate)
    assert sum(law.values()) == pytest.approx(1)

    def ratio(joined):
        moved = sum((shifted(columns, s) for s in joined), np.zeros(steps + bands))
        return math.exp(moved @ rows - moved @ moved / 2)

    exact = math.log(sum(p * ratio(joined) for joined, p in law.items()))
    sampling = separated(rate, separation)
    with jax.enable_x64(True):
        found = Ratio.at_start(sampling)
        for step in range(steps):
            one = columns[step] @ rows[step : step + bands] - (columns[step] ** 2).sum() / 2
            found = found.after(jnp.int64(step), jnp.float64(one), sampling)
        assert float(found.total(steps)) == pytest.approx(exact, rel=1e-12, abs=1e-12)


def columns_of(steps, bands):
    """Random columns, as `separated_losses` takes them, and random rows."""
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.2, 1, (steps, bands))
    columns[np.arange(steps)[:, None] + np.arange(bands) >= steps] = 0
    return columns, rng.normal(size=steps + bands)


def shifted(columns, step):
    steps, bands = columns.shape
    moved = np.zeros(steps + bands)
    moved[step : step + bands] = columns[step]
    return moved


@for_each(
    "steps, separation, rate, bands",
    [(7, 3, 0.3, 3), (6, 8, 0.4, 4), (8, 4, 1.0, 4), (9, 2, 0.5, 1)],
)
def test_losses_have_the_law_of_either_direction(steps, separation, rate, bands):
    """Against rows and sets of steps that NumPy draws; 6 standard errors at three epsilons each."""
    columns, _ = columns_of(steps, bands)
    law = patterns(steps, separation, rate)
    shifts = np.array([sum((shifted(columns, s) for s in x), np.zeros(steps + bands)) for x in law])
    weights, rng, count = np.array(list(law.values())), np.random.default_rng(1), 100_000
    rows = rng.normal(size=(count, steps + bands))
    own = rng.choice(len(law), count, p=weights / weights.sum())

    def log_ratio(rows):
        return np.log(np.exp(rows @ shifts.T - (shifts**2).sum(1) / 2) @ weights)

    expected = log_ratio(rows + shifts[own]), -log_ratio(rows)
    sampling = separated(rate, separation)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), count)
        draw = jax.jit(jax.vmap(lambda key: separated_losses(key, columns, sampling)))
        drawn = np.asarray(draw(keys)).T
    for found, exact in zip(drawn, expected, strict=True):
        for epsilon in (0.0, 0.3, 0.8):
            ours, theirs = (np.maximum(1 - np.exp(epsilon - x), 0) for x in (found, exact))
            error = math.hypot(ours.std(), theirs.std()) / count**0.5
            assert abs(ours.mean() - theirs.mean()) < 6 * error
    # Half the standard deviation of the noise would be found.
    assert abs(drawn[0].mean() - log_ratio(rows / 2 + shifts[own]).mean()) > 0.005


def simulated(sampling=SAMPLING, strategy=PAIRS, z=2.0, steps=8, dims=2, draws=100_000):
    losses = learning.participation_losses(
        sampling, strategy=strategy, noise_multiplier=z, steps=steps, dims=dims
    )
    return accounting.monte_carlo(seeded_key(0), losses, draws=draws, relation=ADD)


def test_a_separation_of_one_is_poisson_sampling():
    """Ten steps of batches that each record joins independently, by exact losses."""
    found = simulated(separated(0.125, 1), None, z=1.0, steps=10, draws=400_000)
    poisson = dataclasses.replace(learning.poisson_sampling(N, batch_size=5), rate=0.125)
    for delta in (1e-1, 1e-2, 1e-3):
        exact = accounting.dp_sgd(poisson, noise_multiplier=1.0, steps=10, delta=delta, dims=1)
        assert exact.epsilon <= found.epsilon(delta) < 1.1 * float(exact.epsilon)


def test_more_steps_apart_than_there_are_is_one_step_of_many():
    """A record joins at most one of two batches; the divergence is an integral in the plane."""
    sampling = separated(0.5, 9)
    found = simulated(sampling, None, z=1.0, steps=2, draws=400_000)
    share = 0.5 / 5
    points = np.linspace(-7, 9, 801)
    density = stats.norm.pdf(points) * (points[1] - points[0])
    ratio = np.exp(points - 0.5)
    mixture = (1 - 2 * share) + share * (ratio[:, None] + ratio)
    both = density[:, None] * density
    for epsilon in (0.0, 0.2, 0.5):
        having = (both * np.maximum(mixture - math.exp(epsilon), 0)).sum()
        lacking = (both * np.maximum(1 - math.exp(epsilon) * mixture, 0)).sum()
        exact = max(having, lacking)
        assert exact <= found.delta(epsilon) < 1.1 * exact + 2e-3


def test_a_rate_of_one_costs_what_bins_cost():
    apart = separated(1.0, 4)
    bins = learning.balls_in_bins_sampling(N, bins=4, capacity=N)
    ours, theirs = simulated(apart), simulated(bins)
    for delta in (0.1, 0.01, 0.002):
        assert ours.epsilon(delta) == pytest.approx(theirs.epsilon(delta), rel=0.03)


def test_rounding_to_the_grid_is_in_the_losses():
    """A column moves every row by its entry and one unit of the grid, and is increased."""
    losses = learning.participation_losses(
        SAMPLING, strategy=PAIRS, noise_multiplier=2.0, steps=8, dims=2
    )
    entries = np.array([1.0, 0.5]) + 2.0 ** (1 - losses.fineness)
    exact = np.tile(entries / (2 * PAIRS.column_norm), (8, 1))
    exact[-1, 1] = 0
    assert np.all(losses._columns[exact > 0] > exact[exact > 0])
    np.testing.assert_allclose(losses._columns, exact, rtol=2e-10)


def test_losses_are_those_of_jax_privacy():
    """The log of the ratio of 200 steps of independent noise, of its dynamic program."""
    batches = pytest.importorskip("jax_privacy.batch_selection")
    generation = pytest.importorskip("jax_privacy.experimental.monte_carlo.sample_generation")
    steps, separation, rate, z = 200, 8, 0.15, 1.7
    theirs = batches.BMinSepSampling(sampling_prob=rate, iterations=steps, min_sep=separation)
    rows = np.random.default_rng(0).normal(size=(steps, 4))
    expected = generation._compute_b_min_sep_privacy_loss_no_truncation(
        theirs, rows * z, z, np.ones(1)
    )
    sampling = separated(rate, separation)
    with jax.enable_x64(True):
        found = Ratio.at_start(sampling, (4,))

        @jax.jit
        def after(found, step, row):
            return found.after(step, row / z - 1 / (2 * z**2), sampling)

        for step, row in enumerate(rows):
            found = after(found, step, row)
        np.testing.assert_allclose(found.total(steps), expected, rtol=1e-12, atol=1e-12)


def test_an_attacker_who_knows_all_other_records_learns_no_more_than_is_claimed():
    """8,000 trainings of three steps, with and without one record, by exact noise.

    The attack is the likelihood ratio of the updates. At four epsilons its delta is below the
    limit plus six standard errors, and above half of it in one.
    """
    sampling = learning.min_separation_sampling(4, separation=2, batch_size=1, capacity=4)
    clipped = learning.clipped_gradients(lambda w, x: w * x, clip_norm=1.0)
    steps, z, count = 3, 0.7, 8000

    def updates(key, there):
        key_noise, key_batches = jax.random.split(key)
        noise = learning.gaussian_noise(key_noise, noise_multiplier=z, batch_size=1.0)
        state, found = noise.init(jnp.zeros(())), []
        present = jnp.array([True, False, False, False]) & there
        for step in range(steps):
            batch = sampling(key_batches, present, step=step)
            total = clipped(jnp.zeros(()), jnp.ones(4)[batch.indices], batch)
            update, state = noise.update(total, state)
            found.append(update)
        return jnp.stack(found)

    run = jax.jit(jax.vmap(updates, in_axes=(0, None)))
    keys = jax.random.split(seeded_key(0), count)
    having, lacking = (np.asarray(run(keys, there)) / z for there in (True, False))
    law = patterns(steps, 2, sampling.rate)

    def log_ratio(rows):
        total = sum(
            p * np.exp(rows[:, list(x)].sum(1) / z - len(x) / (2 * z**2)) for x, p in law.items()
        )
        return np.log(total)

    found = simulated(sampling, None, z=z, steps=steps, dims=1)
    reached = []
    for epsilon in (0.0, 0.3, 0.8, 1.5):
        for losses in (log_ratio(having), -log_ratio(lacking)):
            lost = np.maximum(1 - np.exp(epsilon - losses), 0)
            assert lost.mean() <= found.delta(epsilon) + 6 * lost.std() / count**0.5
            reached.append(lost.mean() / found.delta(epsilon))
    assert max(reached) > 0.9


@pytest.mark.parametrize("swapped", [False, True])
def test_steps_that_look_at_earlier_outputs_are_dominated(swapped):
    """Two rows, and four sets of steps: the second gradient depends on the first output."""
    points = np.linspace(-7, 9, 401)
    x, y = np.meshgrid(points, points, indexing="ij")
    density = np.exp(-(x**2 + y**2) / 2) / (2 * np.pi) * (points[1] - points[0]) ** 2
    law = patterns(2, 2, 0.6)

    def divergence(turn, level):
        """`turn` is the sign and the size of the second row's shift, given the first row."""
        first = np.exp(0.8 * x - 0.32 + 0.5 * turn * y - (0.5 * turn) ** 2 / 2)
        second = np.exp(0.8 * turn * y - (0.8 * turn) ** 2 / 2)
        mixture = law[()] + law[0,] * first + law[1,] * second
        ratio = 1 - level * mixture if swapped else mixture - level
        return (density * np.maximum(ratio, 0)).sum()

    for level in (0.5, 1.0, 1.5, 2.5):
        most = divergence(1, level)
        for turn in (np.sign(x), np.sign(x - 0.5), -1, np.tanh(x)):
            assert divergence(turn, level) <= most + 1e-9


def trained(keys, strategy=PAIRS, sampling=SAMPLING, multiplier=2.0, steps=8):
    """The state after some steps, each with its key of a batch."""
    given = {"noise_multiplier": multiplier, "batch_size": 8}
    if strategy is None:
        noise = learning.gaussian_noise(seeded_key(5), **given)
    else:
        noise = learning.correlated_noise(seeded_key(5), strategy=strategy, **given)
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    state, records = noise.init(jnp.zeros(2)), jnp.ones((N, 2))
    for step in range(steps):
        batch = sampling(keys(step), step=step)
        _, state = noise.update(clipped(jnp.zeros(2), records[batch.indices], batch), state)
    return state


@functools.cache
def of_one_key():
    return trained(lambda _: seeded_key(7))


def test_known_batches_are_paid_for_without_simulation():
    """At most three of eight steps are three apart, and the rate does not amplify."""
    found = learning.guarantee(of_one_key(), SAMPLING, delta=1e-3)
    whole = learning.poisson_sampling(N, batch_size=N)
    one = accounting.dp_sgd(whole, noise_multiplier=2 / math.sqrt(3), steps=1, delta=1e-3, dims=2)
    assert found.epsilon == pytest.approx(one.epsilon, rel=1e-3)
    given = {"noise_multiplier": 2.0, "steps": 8, "delta": 1e-3, "dims": 2}
    renyi = [
        accounting.dp_sgd(x, method="renyi", **given).epsilon
        for x in (SAMPLING, learning.balls_in_bins_sampling(N, bins=3, capacity=N))
    ]
    assert renyi[0] == pytest.approx(renyi[1], rel=1e-6)
    risks = [
        accounting.dp_sgd_risk(x, noise_multiplier=2.0, steps=8, dims=2).advantage
        for x in (SAMPLING, learning.balls_in_bins_sampling(N, bins=3, capacity=N))
    ]
    assert risks[0] == pytest.approx(risks[1], rel=1e-6)


def test_secret_batches_cost_less_by_simulation():
    known = learning.guarantee(of_one_key(), SAMPLING, delta=1e-3)
    losses = simulated()
    found = learning.guarantee(of_one_key(), SAMPLING, delta=1e-3, simulated=losses)
    assert losses.epsilon(1e-3) <= found.epsilon < 0.7 * float(known.epsilon)
    assert found.confidence == 0.99
    assert {"by simulation", "in 40 public slots", "seeded key"} <= set(found.notes)


def test_batches_of_other_samplings_and_keys_have_no_guarantee():
    refused = pytest.raises(ValueError, match="must be the sampling that drew the batches of all")
    with refused:
        learning.guarantee(trained(seeded_key), SAMPLING, delta=1e-3)
    for other in (
        learning.min_separation_sampling(N, separation=4, batch_size=8, capacity=N),
        learning.min_separation_sampling(N, separation=3, batch_size=7, capacity=N),
        learning.min_separation_sampling(N, separation=3, batch_size=8, capacity=39),
        learning.balls_in_bins_sampling(N, bins=3, capacity=N),
        dataclasses.replace(SAMPLING, kind="bins"),
    ):
        with pytest.raises(ValueError, match="must be the sampling that drew the batches of all"):
            learning.guarantee(of_one_key(), other, delta=1e-3)
    # A batch may not be used again, or late.
    late = trained(lambda _: seeded_key(7), sampling=lambda key, step: SAMPLING(key, step=step + 1))
    with pytest.raises(ValueError, match="must be the sampling that drew the batches of all"):
        learning.guarantee(late, SAMPLING, delta=1e-3)


@for_each(
    "changed, words",
    [
        (
            {
                "sampling": learning.min_separation_sampling(
                    N, separation=4, batch_size=8, capacity=N
                )
            },
            "sampling=",
        ),
        ({"sampling": learning.balls_in_bins_sampling(N, bins=3, capacity=N)}, "sampling="),
        ({"strategy": learning.toeplitz_strategy([1.0, 0.25], steps=8)}, "strategy="),
        ({"steps": 7}, "has steps=8, got losses .* for steps=7"),
        ({"z": 2.1}, "noise_multiplier="),
    ],
)
def test_losses_of_another_training_are_refused(changed, words):
    losses = simulated(**changed, draws=1000)
    with pytest.raises(ValueError, match=words):
        learning.guarantee(of_one_key(), SAMPLING, delta=1e-2, simulated=losses)


def test_more_bands_than_steps_apart_are_refused():
    """Also for a rate of 1: the recursion needs batches that share no row."""
    wide = learning.toeplitz_strategy([1.0, 0.5, 0.25, 0.125], steps=8)
    whole = learning.min_separation_sampling(N, separation=3, batch_size=N / 3, capacity=N)
    for sampling in (SAMPLING, whole):
        given = {"noise_multiplier": 2.0, "steps": 8, "dims": 2, "strategy": wide}
        with pytest.raises(ValueError, match="must have a separation of at least 4"):
            learning.participation_losses(sampling, **given)
        with pytest.raises(ValueError, match="must have at least 4 groups"):
            accounting.dp_sgd(sampling, delta=1e-3, **given)


def test_batches_with_too_few_slots_are_refused():
    few = dataclasses.replace(SAMPLING, capacity=12)
    given = {"noise_multiplier": 2.0, "steps": 8, "delta": 1e-3, "dims": 2}
    with pytest.raises(ValueError, match="a batch exceeds its capacity of 12 with"):
        accounting.dp_sgd(few, **given)
    run = DpSgdRun(few, 8, 1e-3, 2, ADD, "pld").checked()
    cut = stats.binom.sf(12, N, SAMPLING.batch_size / N)
    assert run.missed - run.missed_anyway == pytest.approx(8 * cut, rel=1e-6)
    assert run.missed - run.missed_anyway >= 8 * cut
    usual = learning.min_separation_sampling(1000, separation=5, batch_size=50)
    assert stats.binom.sf(usual.capacity, 1000, 0.05) < 1e-15 < stats.binom.sf(90, 1000, 0.05)


@for_each("separation, batch_size", [(1, 4), (65_537, 4), (41, 0.5), (4, 10.5), (4, 0), (4, 1e-9)])
def test_samplings_that_cannot_be(separation, batch_size):
    with pytest.raises(ValueError, match=r"(separation|batch_size) must be"):
        learning.min_separation_sampling(N, separation=separation, batch_size=batch_size)


def test_one_slot_has_no_separation():
    with pytest.raises(ValueError, match="n must be an integer of at least 2"):
        learning.min_separation_sampling(1, separation=2, batch_size=0.5)


def test_losses_that_do_not_fit_into_memory_are_refused():
    many = 2**14 + 1
    given = {"noise_multiplier": 1.0, "steps": 1, "dims": 1}
    for sampling in (
        learning.min_separation_sampling(many, separation=many, batch_size=0.5, capacity=1),
        learning.balls_in_bins_sampling(many, bins=many, capacity=1),
    ):
        with pytest.raises(ValueError, match=r"sampling\.groups must be .* at most 16384"):
            learning.participation_losses(sampling, **given)
        fewer = dataclasses.replace(sampling, groups=2**14)
        assert learning.participation_losses(fewer, **given).steps == 1


def test_expected_sizes_are_those_asked_for():
    for size, separation in ((0.001, 2), (1.0, 7), (4.0, 10), (13.3, 3), (1.0, 40)):
        sampling = learning.min_separation_sampling(N, separation=separation, batch_size=size)
        assert size * (1 - 1e-5) < sampling.batch_size <= size * (1 + 1e-12)
    wide = dataclasses.replace(SAMPLING, n=10**6, groups=65_537)
    with pytest.raises(ValueError, match=r"sampling\.groups must be"):
        accounting.dp_sgd(wide, noise_multiplier=2.0, steps=8, delta=1e-3, dims=2)


def test_fit_keeps_the_batches_of_a_record_apart(monkeypatch):
    """With little noise: each record moves its own parameter by the steps that it joins."""
    nothing = dpjax.Guarantee(1.0, relation=ADD)
    for name in ("guarantee", "dp_sgd"):  # So little noise is refused.
        monkeypatch.setattr(_fit, name, lambda *_, **__: nothing)
    found = learning.fit(
        seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(N), database=jnp.eye(N),
        optimizer=optax.sgd(lambda step: 8.0 * 2.0 ** -step), epochs=2, clip_norm=1.0,
        noise_multiplier=1e-5, delta=1e-3, sampling=SAMPLING,
    )  # fmt: skip
    steps = 2 * round(N / 8)
    numbers = -found.value * 2.0 ** (steps - 1)
    np.testing.assert_allclose(numbers, np.round(numbers), atol=0.2)
    sets = set()
    for number in np.round(numbers).astype(int):
        joined = [steps - 1 - i for i in range(steps) if number >> i & 1][::-1]
        assert all(np.diff(joined) >= 3)
        sets.add(tuple(joined))
    assert len(sets) > 10
    assert max(map(len, sets)) >= 3


def test_fit_takes_simulated_losses_and_says_so_on_its_card():
    losses = simulated(steps=10, strategy=None, draws=20_000)
    found = learning.fit(
        seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(2), database=jnp.ones((N, 2)),
        optimizer=optax.sgd(0.1), epochs=2, clip_norm=1.0, noise_multiplier=2.0, delta=1e-2,
        sampling=SAMPLING, simulated=losses,
    )  # fmt: skip
    assert found.guarantee.epsilon == pytest.approx(losses.epsilon(1e-2), rel=1e-3)
    assert "in each batch, if in none of the 2 before it" in found.card()


def test_a_resumed_fit_draws_the_batches_of_one_that_was_not_interrupted(tmp_path):
    def train(**given):
        return learning.fit(
            seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(N), database=jnp.eye(N),
            optimizer=optax.sgd(0.1), epochs=2, clip_norm=1.0, noise_multiplier=2.0, delta=1e-2,
            sampling=SAMPLING, **given,
        )  # fmt: skip

    def interrupted(epoch, parameters):
        del parameters
        if epoch.number == 1:
            raise KeyboardInterrupt

    path = tmp_path / "training"
    with pytest.raises(KeyboardInterrupt):
        train(checkpoint=path, evaluate=interrupted)
    resumed, whole = train(checkpoint=path), train()
    assert np.array_equal(resumed.value, whole.value)
    assert resumed.guarantee == whole.guarantee
