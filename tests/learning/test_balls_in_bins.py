"""Balls in bins: who joins, what the state knows, what a secret bin is worth."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpjax
from dpjax import accounting, learning
from dpjax.learning import _fit
from dpjax.random import seeded_key

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
N, BINS = 40, 4
SAMPLING = learning.balls_in_bins_sampling(N, bins=BINS, capacity=30)
PAIRS = learning.toeplitz_strategy([1.0, 0.5], steps=8)


def joining(batch):
    return set(np.asarray(batch.indices)[np.asarray(batch._mask)].tolist())


@pytest.mark.parametrize("bins", [2, 7, 65_536])
def test_a_bin_is_a_word_of_64_bits_modulo_their_number(bins):
    key = seeded_key(3)
    high, low = np.asarray(jax.random.bits(jax.random.split(key)[0], (2, N), jnp.uint32))
    exact = [(int(x) * 2**32 + int(y)) % bins for x, y in zip(high, low, strict=True)]
    sampling = learning.balls_in_bins_sampling(N, bins=bins, capacity=N)
    for place in set(exact) | {0}:
        found = joining(sampling(key, step=bins + place))
        assert found == {i for i, own in enumerate(exact) if own == place}


def test_a_record_joins_one_batch_of_each_cycle():
    batches = [joining(SAMPLING(seeded_key(1), step=step)) for step in range(2 * BINS)]
    assert sorted(i for batch in batches[:BINS] for i in batch) == list(range(N))
    assert batches[:BINS] == batches[BINS:]
    assert batches[:BINS] != [joining(SAMPLING(seeded_key(2), step=step)) for step in range(BINS)]


def test_bins_are_equally_likely_and_empty_slots_join_none():
    """A chi-squared test of 30,000 bins, with probability 1e-6 of a false alarm."""
    n = 30_000
    sampling = learning.balls_in_bins_sampling(n, bins=3)
    present = np.arange(n) % 10 > 0
    sizes = []
    for step in range(3):
        found = joining(sampling(seeded_key(0), jnp.asarray(present), step=step))
        assert all(i % 10 for i in found)
        sizes.append(len(found))
    assert sum(sizes) == present.sum()
    assert stats.chisquare(sizes).pvalue > 1e-6
    # A bin that is larger by a twentieth would be found.
    assert stats.chisquare(np.array([1.05, 0.975, 0.975]) * 9000).pvalue < 1e-3


def trained(keys, strategy=PAIRS, sampling=SAMPLING, multiplier=2.0, steps=8):
    """The state after some steps, each with its key of a batch."""
    given = {"noise_multiplier": multiplier, "batch_size": 10}
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


def one_key(step):
    del step
    return seeded_key(7)


def test_a_known_bin_is_paid_for_without_simulation():
    """Two full participations with noise 2 are one with noise sqrt(2)."""
    found = learning.guarantee(trained(one_key), SAMPLING, delta=1e-3)
    whole = learning.poisson_sampling(N, batch_size=N)
    one = accounting.dp_sgd(
        whole, noise_multiplier=math.sqrt(2), steps=1, delta=1e-3, dims=2
    )  # fmt: skip
    assert found.epsilon == pytest.approx(one.epsilon, rel=1e-3)
    assert "seeded key" in found.notes


def test_records_that_change_their_bins_have_no_guarantee():
    """Else a record could join batches of two steps that enter one published number."""
    with pytest.raises(ValueError, match="must be the sampling that drew the batches of all steps"):
        learning.guarantee(trained(seeded_key), SAMPLING, delta=1e-3)
    few = learning.balls_in_bins_sampling(N, bins=5, capacity=30)
    with pytest.raises(ValueError, match="must be the sampling that drew the batches of all steps"):
        learning.guarantee(trained(one_key), few, delta=1e-3)


def test_bins_with_too_few_slots_are_refused():
    """A bin of 12 slots is too small for half of the trainings, whose other records are cut off."""
    few = dataclasses.replace(SAMPLING, capacity=12)
    given = {"noise_multiplier": 2.0, "steps": 8, "delta": 1e-3, "dims": 2}
    with pytest.raises(ValueError, match="a batch exceeds its capacity of 12 with"):
        accounting.dp_sgd(few, **given)
    accounting.dp_sgd(SAMPLING, **given)


def test_fit_puts_records_into_bins_once(monkeypatch):
    """With little noise: each record moves its own parameter by the steps of its bin."""
    nothing = dpjax.Guarantee(1.0, relation=ADD)
    for name in ("guarantee", "dp_sgd"):  # So little noise is refused.
        monkeypatch.setattr(_fit, name, lambda *_, **__: nothing)
    found = learning.fit(
        seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(N), database=jnp.eye(N),
        optimizer=optax.sgd(lambda step: 10.0 * 2.0 ** -step), epochs=2, clip_norm=1.0,
        noise_multiplier=1e-4, delta=1e-3, sampling=SAMPLING, strategy=PAIRS,
    )  # fmt: skip
    assert np.all(found.value < 0)  # Every record moved its parameter.
    place = -np.log2(-found.value / (1 + 2.0**-BINS))
    np.testing.assert_allclose(place, np.round(place), atol=0.05)
    sizes = np.bincount(np.round(place).astype(int), minlength=BINS)
    assert len(sizes) == BINS
    assert sizes.min() > 0


def test_fit_takes_simulated_losses():
    given = {
        "database": jnp.ones((N, 2)), "optimizer": optax.sgd(0.1), "epochs": 2, "clip_norm": 1.0,
        "delta": 1e-3, "sampling": SAMPLING, "strategy": PAIRS, "simulated": simulated(),
    }  # fmt: skip
    found = learning.fit(
        seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(2), noise_multiplier=2.0, **given
    )
    state = trained(one_key)
    expected = learning.guarantee(state, SAMPLING, delta=1e-3, simulated=given["simulated"])
    assert found.guarantee == expected
    with pytest.raises(ValueError, match="noise_multiplier must be given with simulated"):
        learning.fit(seeded_key(1), lambda w, x: jnp.dot(w, x), jnp.zeros(2), epsilon=1.0, **given)


def test_fewer_bins_than_bands_cost_one_mechanism():
    """All records of a bin join, so rows may overlap; a record of bin 0 moves every row most."""
    steep = learning.toeplitz_strategy([1.0, 0.5, 0.25, 0.125, 0.0625], steps=8)
    state = trained(one_key, strategy=steep)
    moved = steep.matrix[:, ::4].sum(1)
    z = 2.0 * steep.column_norm / np.linalg.norm(moved)
    found = learning.guarantee(state, SAMPLING, delta=1e-3)
    whole = learning.poisson_sampling(N, batch_size=N)
    one = accounting.dp_sgd(whole, noise_multiplier=z, steps=1, delta=1e-3, dims=2)
    assert found.epsilon == pytest.approx(one.epsilon, rel=1e-3)


def simulated(sampling=SAMPLING, strategy=PAIRS, z=2.0, steps=8, dims=2, draws=200_000):
    losses = learning.participation_losses(
        sampling, strategy=strategy, noise_multiplier=z, steps=steps, dims=dims
    )
    return accounting.monte_carlo(seeded_key(0), losses, draws=draws, relation=ADD)


@pytest.mark.parametrize("z", [2.0, 1.1])
def test_a_secret_bin_costs_less_by_simulation(z):
    """Also with 1.1, which float32 rounds up: losses for more noise than there is are refused."""
    state = trained(one_key, multiplier=z)
    known = learning.guarantee(state, SAMPLING, delta=1e-3)
    found = learning.guarantee(state, SAMPLING, delta=1e-3, simulated=simulated(z=z))
    assert 0.3 * float(known.epsilon) < float(found.epsilon) < 0.8 * float(known.epsilon)
    assert found.confidence == 0.99
    assert {"by simulation", "in 40 public slots", "seeded key"} <= set(found.notes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 9}, "steps must be at most the 8 of the strategy"),
        ({"sampling": 3}, "sampling must be made by balls_in_bins_sampling"),
        ({"strategy": [1.0, 0.5]}, "strategy must be made by"),
    ],
)
def test_losses_of_no_training_are_refused(changed, words):
    with pytest.raises((TypeError, ValueError), match=words):
        simulated(**changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampling": learning.balls_in_bins_sampling(N, bins=5, capacity=30)}, "sampling="),
        ({"strategy": learning.toeplitz_strategy([1.0, 0.25], steps=8)}, "strategy="),
        ({"strategy": None}, "strategy="),
        ({"steps": 7}, "has steps=8, got losses .* for steps=7"),
        ({"z": 2.1}, "noise_multiplier="),
        ({"dims": 1}, "has dims=2, got losses .* for dims=1"),
    ],
)
def test_losses_of_another_training_are_refused(changed, words):
    losses = simulated(**changed, draws=1000)
    with pytest.raises(ValueError, match=words):
        learning.guarantee(trained(one_key), SAMPLING, delta=1e-2, simulated=losses)


def test_losses_of_independent_noise_do_not_cover_a_part_of_a_state_of_correlated_noise():
    """The part that counts steps has no strategy, whose rows several bins share."""
    losses = simulated(strategy=None, draws=1000)
    with pytest.raises(ValueError, match="must be the whole state of correlated_noise"):
        learning.guarantee(trained(one_key).noise, SAMPLING, delta=1e-2, simulated=losses)


def test_losses_of_other_functions_and_relations_are_refused():
    state = trained(one_key, steps=1)
    other = accounting.monte_carlo(
        seeded_key(0), lambda key: jax.random.normal(key, dtype="float64"), draws=1000
    )
    with pytest.raises(
        TypeError, match=r"must be made by accounting\.monte_carlo from learning\.part"
    ):
        learning.guarantee(state, SAMPLING, delta=1e-2, simulated=other)
    with pytest.raises(
        TypeError, match=r"must be made by accounting\.monte_carlo from learning\.part"
    ):
        learning.guarantee(state, SAMPLING, delta=1e-2, simulated=0.5)
    with pytest.raises(ValueError, match="relation must be add-or-remove-one for simulated"):
        learning.guarantee(
            state, SAMPLING, delta=1e-2, simulated=simulated(draws=1000),
            relation=dpjax.NeighboringRelation.REPLACE_ONE,
        )  # fmt: skip
    with pytest.raises(ValueError, match="must be made by balls_in_bins_sampling or min"):
        simulated(sampling=learning.poisson_sampling(N, batch_size=4))


POINTS = np.linspace(-7, 9, 401)


def divergence(means, weights, level, swapped, points=POINTS):
    """The hockey-stick divergence of a mixture of normals in the plane, by integration."""
    x = np.stack(np.meshgrid(points, points, indexing="ij"), -1)
    mixture = sum(
        w * np.exp(x @ mean - mean @ mean / 2) for w, mean in zip(weights, means, strict=True)
    )
    density = np.exp(-(x**2).sum(-1) / 2) / (2 * np.pi) * (points[1] - points[0]) ** 2
    ratio = 1 - level * mixture if swapped else mixture - level
    return (density * np.maximum(ratio, 0)).sum()


@pytest.mark.parametrize("swapped", [False, True])
def test_steps_that_look_at_earlier_outputs_are_dominated(swapped):
    """Two rows and two bins: the second gradient of the record depends on the first output."""
    x, y = np.meshgrid(POINTS, POINTS, indexing="ij")
    step = (POINTS[1] - POINTS[0]) ** 2
    density = np.exp(-(x**2 + y**2) / 2) / (2 * np.pi) * step
    c = np.array([[0.8, 0.0], [0.5, 0.8]])
    worst = [c[:, 0], c[:, 1]]
    turns = [np.ones_like(x), np.sign(x), np.sign(x - 0.5), -np.ones_like(x), np.tanh(x)]
    for level in (0.5, 1.0, 1.5, 2.5):
        most = divergence(worst, [0.5, 0.5], level, swapped)
        for second in turns:
            first = np.exp(c[0, 0] * x - c[0, 0] ** 2 / 2 + c[1, 0] * y - c[1, 0] ** 2 / 2)
            other = np.exp(c[1, 1] * second * y - (c[1, 1] * second) ** 2 / 2)
            mixture = (first + other) / 2
            ratio = 1 - level * mixture if swapped else mixture - level
            assert (density * np.maximum(ratio, 0)).sum() <= most + 1e-9


def test_simulated_losses_are_those_of_the_mixture():
    """At four epsilons, in a plane: the exact delta is below the limit, and close to it."""
    strategy = learning.toeplitz_strategy([1.0, 0.5], steps=2)
    two = learning.balls_in_bins_sampling(N, bins=2, capacity=N)
    found = simulated(two, strategy, z=1.0, steps=2, draws=400_000)
    means = [np.array([1, 0.5]) / strategy.column_norm, np.array([0, 1]) / strategy.column_norm]
    for epsilon in (0.0, 0.3, 0.6, 1.0):
        exact = max(divergence(means, [0.5, 0.5], math.exp(epsilon), x) for x in (False, True))
        assert exact <= found.delta(epsilon) < 1.1 * exact + 2e-3


def test_losses_have_the_law_of_either_direction():
    """Each column alone, at four epsilons; six standard errors are a false alarm in 10^8."""
    two = learning.balls_in_bins_sampling(N, bins=2, capacity=N)
    strategy = learning.toeplitz_strategy([1.0, 0.5], steps=2)
    means = [np.array([1, 0.5]) / strategy.column_norm, np.array([0, 1]) / strategy.column_norm]
    with jax.enable_x64(True):
        losses = learning.participation_losses(
            two, strategy=strategy, noise_multiplier=1.0, steps=2, dims=2
        )
        keys = jax.random.split(jax.random.key(0), 200_000)
        drawn = np.asarray(jax.jit(jax.vmap(losses))(keys))
    for column, swapped in zip(drawn.T, (False, True), strict=True):
        for epsilon in (0.0, 0.3, 0.6, 1.0):
            lost = np.maximum(1 - np.exp(epsilon - column), 0)
            exact = divergence(means, [0.5, 0.5], math.exp(epsilon), swapped)
            assert abs(lost.mean() - exact) < 6 * lost.std() / len(lost) ** 0.5 + 1e-4


def test_one_step_of_bins_is_a_poisson_step():
    """A record is in the first batch with probability 1 / 5, independently of all others."""
    five = learning.balls_in_bins_sampling(N, bins=5, capacity=N)
    found = simulated(five, None, z=1.0, steps=1, draws=400_000)
    one = dataclasses.replace(learning.poisson_sampling(N, batch_size=8), rate=0.2)
    exact = accounting.dp_sgd(one, noise_multiplier=1.0, steps=1, delta=1e-2, dims=1)
    assert exact.epsilon <= found.epsilon(1e-2) < 1.1 * float(exact.epsilon)


@pytest.mark.parametrize("bins", [1, 65_537])
def test_numbers_of_bins_that_cannot_be(bins):
    with pytest.raises(ValueError, match="bins must be"):
        learning.balls_in_bins_sampling(N, bins=bins)


def test_public_groups_are_no_secret_bins():
    """Losses may be built without `participation_losses`, for a sampling whose groups are known."""
    cyclic = learning.cyclic_sampling(N, groups=4, batch_size=10, capacity=10)
    losses = learning.ParticipationLosses(cyclic, PAIRS, 2.0, 8, 2)
    found = accounting.monte_carlo(seeded_key(0), losses, draws=1000, relation=ADD)
    with pytest.raises(ValueError, match="simulated must cover this training"):
        learning.guarantee(
            trained(seeded_key, sampling=cyclic), cyclic, delta=1e-2, simulated=found
        )
