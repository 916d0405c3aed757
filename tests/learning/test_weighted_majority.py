"""Randomized weighted majority: regret against its bounds, and what its private form promises."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpjax
from dpjax import accounting, learning
from dpjax.learning._weighted_majority import Adversary, loss_bits, scan_steps

STEPS, EXPERTS = 1000, 10
ADVERSARIES = Adversary.__args__


def private(epsilon, delta, steps, method: Any = "zcdp"):
    return learning.private_weighted_majority(epsilon, delta, steps=steps, method=method)


# What is not private.


@pytest.fixture(scope="module")
def sequences():
    """Adversaries, and losses of nobody, which are as hard as any: shape (4, T, k)."""
    noise = np.random.default_rng(0).integers(0, 2, (STEPS, EXPERTS)).astype(np.float32)
    made = [learning.adversarial_losses(name, steps=STEPS, experts=EXPERTS) for name in ADVERSARIES]
    return jnp.stack([*made, jnp.asarray(noise)])


@pytest.fixture(scope="module")
def run_all(sequences):
    """Each sequence under each of 64 keys."""
    keys = jax.random.split(jax.random.key(1), 64)

    def run(key, losses, rate):
        return learning.weighted_majority(key, losses, learning_rate=rate)

    every = jax.jit(jax.vmap(jax.vmap(run, in_axes=(None, 0, None)), in_axes=(0, None, None)))
    return lambda rate: jax.tree.map(np.asarray, every(keys, sequences, rate))


RATES = {
    "best": math.sqrt(math.log(EXPERTS) / STEPS),
    "private": private(1.0, 1e-6, STEPS).learning_rate,
    "lecture": private(1.0, 1e-6, STEPS, "drv").learning_rate,
}


def test_expected_losses_are_those_of_exponential_weights(run_all, sequences):
    """In float64 on the host."""
    for rate in RATES.values():
        found = run_all(rate).expected_losses[0]
        losses = np.asarray(sequences, float)
        before = np.cumsum(losses, axis=1) - losses
        weights = np.exp(-rate * (before - before.min(axis=2, keepdims=True)))
        expected = (weights * losses).sum(axis=2) / weights.sum(axis=2)
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", RATES)
def test_expected_regret_keeps_its_bound_on_every_sequence(name, run_all):
    rate = RATES[name]
    regret = run_all(rate).expected_regret[0]
    bound = learning.regret_bound(steps=STEPS, experts=EXPERTS, learning_rate=rate)
    assert np.all(regret <= bound)
    # Whoever learns slowly pays nearly all of it while a single expert is good.
    slow = np.log(EXPERTS) - np.log1p((EXPERTS - 1) * np.exp(-rate * STEPS))
    assert regret[ADVERSARIES.index("one-good-expert")] == pytest.approx(
        slow / (rate * STEPS), abs=0.002
    )


def test_realized_regret_averages_to_what_is_expected(run_all, sequences):
    """Choices are independent: one of 4 checks fails by chance once in 4 * 10^5 (5 sigmas)."""
    runs = run_all(RATES["best"])
    realized, expected = runs.losses.mean(axis=(0, 2)), runs.expected_losses[0].mean(axis=1)
    margin = 5 * 0.5 / math.sqrt(64 * STEPS)
    assert np.all(np.abs(realized - expected) < margin)
    # Uniform choices would be told from these by the sequence with one good expert.
    assert np.max(np.abs(np.asarray(sequences).mean(axis=(1, 2)) - expected)) > 10 * margin
    np.testing.assert_allclose(
        runs.regret.mean(axis=0) - runs.expected_regret[0], realized - expected, atol=1e-5
    )


def test_adversaries_are_what_they_are_called(sequences):
    punished, alternating, good, _ = np.asarray(sequences, float)
    for losses in (punished, alternating):
        before = np.cumsum(losses, axis=0) - losses
        assert np.all(losses[np.arange(1, STEPS), before.argmin(axis=1)[1:]] == 1)
    assert np.all(punished.sum(axis=1) == 1)
    assert np.all(good == [1] * (EXPERTS - 1) + [0])


def test_losses_are_added_up_as_integers():
    losses = np.random.default_rng(2).uniform(-0.1, 1.1, (STEPS, 3)).astype(np.float32)
    losses[5] = np.nan
    scores = jax.jit(lambda x: scan_steps(lambda _, cumulative: cumulative, x))(losses)
    units = np.rint(np.clip(np.nan_to_num(losses, nan=1.0), 0, 1) * 2.0 ** loss_bits(STEPS))
    units = units.astype(np.int64)
    assert np.array_equal(scores, np.cumsum(units, axis=0) - units)
    assert np.max(scores) > 2**24  # Beyond what float32 counts.


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32"])
def test_whole_losses_count_like_floats(dtype):
    losses = np.random.default_rng(3).integers(0, 2, (7, 3))
    if dtype != "bool":
        losses[2] = [5, 0, 1]
    clipped = jnp.asarray(np.minimum(losses, 1), float)
    found, exact = (
        private(1.0, 1e-6, 7).units(x) for x in (jnp.asarray(losses).astype(dtype), clipped)
    )
    assert found.dtype == np.int32
    assert np.array_equal(found, exact)


def test_integers_never_wrap():
    for steps in (1, 2**14 - 1, 2**14, 2**20):
        assert loss_bits(steps) >= 8
        assert steps * 2 ** loss_bits(steps) < 2**31


def test_the_lecture_in_numbers():
    """At T = 10^4, k = 10, epsilon = 1, delta = 1e-6."""
    sizes = {"steps": 10**4, "experts": 10}
    lecture = private(1.0, 1e-6, 10**4, "drv").learning_rate
    assert lecture == pytest.approx(1 / math.sqrt(32e4 * math.log(1e6)))
    assert learning.regret_bound(**sizes, learning_rate=lecture) == pytest.approx(0.485, abs=5e-4)
    assert learning.regret_bound(**sizes) == pytest.approx(0.030, abs=5e-4)
    assert learning.regret_bound(**sizes) == pytest.approx(2 * math.sqrt(math.log(10) / 10**4))
    root = math.sqrt(math.log(1e6) + 1) - math.sqrt(math.log(1e6))
    assert root * math.sqrt(2 / 10**4) / lecture == pytest.approx(3.93, abs=5e-3)
    assert private(1.0, 1e-6, 10**4).learning_rate / lecture == pytest.approx(4.64, abs=5e-3)


def test_no_sequence_is_too_short_for_a_bound():
    assert learning.regret_bound(steps=1, experts=2) == 1


# What is private.


@pytest.mark.parametrize("method", ["zcdp", "drv"])
@pytest.mark.parametrize("steps", [1, 2, 7, 300])
@pytest.mark.parametrize("budget", [(0.1, 1e-9), (1.0, 1e-6), (3.0, 0.1)])
def test_all_steps_together_keep_what_is_promised(method, steps, budget):
    """By the accountant, from the choices one by one: no step is left out."""
    epsilon, delta = budget
    mechanism = private(epsilon, delta, steps, method)
    rho = sum(mechanism.choice.zcdp[0] for _ in range(steps))
    assert mechanism.choice.guarantee.epsilon == 2 * mechanism.learning_rate
    assert mechanism.zcdp == (pytest.approx(rho, rel=1e-9), 0)
    assert rho == pytest.approx(steps * mechanism.learning_rate**2 / 2, rel=1e-9)
    if method == "drv":
        choices = [mechanism.choice] * steps
        assert accounting.compose_at(*choices, delta=delta, method="drv").epsilon <= epsilon
    else:
        tight = accounting.zcdp_to_epsilon(rho, delta=delta)
        assert epsilon * (1 - 1e-6) < tight <= epsilon
    promised = mechanism.guarantee
    assert (promised.epsilon, promised.delta, promised.gamma) == (epsilon, delta, 0)


def test_a_rate_that_was_not_shown_to_be_private_is_refused():
    """Advanced composition of the lecture's rate exceeds its epsilon where that is large."""
    for epsilon, delta, steps in ((5.0, 0.1, 300), (20.0, 1e-6, 1)):
        with pytest.raises(ValueError, match="epsilon must be at most"):
            private(epsilon, delta, steps, "drv")
    one = dpjax.Guarantee(2 * 10 / math.sqrt(32 * 300 * math.log(10)))
    assert accounting.compose_at(*[one] * 300, delta=0.1, method="drv").epsilon > 10


def test_the_lectures_rate_is_not_private_at_every_epsilon():
    """Two experts lose (1, 0) or (0, 1) on the first day, and the same from then on."""
    steps, delta = 10**6, 0.01
    for factor, kept in ((2, True), (100, False)):
        epsilon = factor * math.log(1 / delta)
        eta, choices = epsilon / math.sqrt(32 * steps * math.log(1 / delta)), steps - 1
        taken = np.arange(choices + 1)  # How often the second one is.
        law = scipy.stats.binom.pmf(taken, choices, 1 / (1 + math.exp(-eta)))
        loss = eta * (2 * taken - choices)
        exact_delta = np.sum(law * -np.expm1(np.minimum(epsilon - loss, 0)))
        assert exact_delta < delta if kept else exact_delta > 0.99


def test_a_traced_calibration_is_on_the_safe_side():
    epsilons = jnp.asarray([0.01, 0.5, 2.0, 4.0])

    def rates(epsilon):
        made = [
            learning.private_weighted_majority(epsilon, 1e-3, steps=50, method=method)
            for method in ("zcdp", "drv")
        ]
        return jnp.stack([mechanism.learning_rate for mechanism in made])

    for epsilon, traced in zip(epsilons, jax.jit(jax.vmap(rates))(epsilons), strict=True):
        known = [private(float(epsilon), 1e-3, 50, x).learning_rate for x in ("zcdp", "drv")]
        assert np.all(np.asarray(traced) < known)
        assert np.all(np.asarray(traced) > 0.3 * np.asarray(known))


SMALL = jnp.asarray([[1.0, 0.0], [1.0, 0.25], [0.0, 1.0]])
OUTCOMES = jnp.asarray(list(itertools.product(range(2), repeat=3)))
MECHANISM = private(4.0, 0.1, 3)


@pytest.fixture(scope="module")
def log_probs():
    """Of all outcomes."""
    return jax.jit(jax.vmap(MECHANISM.log_prob, in_axes=(0, None)))


def softmax_of_minus(losses, rate):
    """Log probabilities of every expert at every step, in float64."""
    losses = np.asarray(losses, float)
    before = np.cumsum(losses, axis=0) - losses
    return -rate * before - np.log(np.exp(-rate * before).sum(axis=1, keepdims=True))


def test_choices_have_their_distribution(key, log_probs):
    """All of a sequence at once. Chi-squared at 10^-6, which tells a learning rate 30% off."""
    exact = softmax_of_minus(SMALL, MECHANISM.learning_rate)
    expected = np.array([sum(exact[t, a] for t, a in enumerate(x)) for x in np.asarray(OUTCOMES)])
    np.testing.assert_allclose(log_probs(OUTCOMES, SMALL), expected, rtol=1e-3)
    draws = 2**12
    drawn = jax.jit(jax.vmap(lambda key: MECHANISM(key, SMALL).value))(jax.random.split(key, draws))
    counts = np.bincount(np.asarray(drawn) @ [4, 2, 1], minlength=8)
    assert scipy.stats.chisquare(counts, draws * np.exp(expected)).pvalue > 1e-6
    off = softmax_of_minus(SMALL, 1.3 * MECHANISM.learning_rate)
    others = np.array([sum(off[t, a] for t, a in enumerate(x)) for x in np.asarray(OUTCOMES)])
    power = draws * np.sum((np.exp(others) - np.exp(expected)) ** 2 / np.exp(expected))
    assert power > 70


def test_replacing_the_losses_of_a_step_keeps_the_guarantee(log_probs):
    """Exactly, over all outcomes; one choice uses all of its range of 2 eta."""
    corners = [jnp.asarray(row) for row in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0])]
    here = np.asarray(log_probs(OUTCOMES, SMALL), float)
    ranges = []
    for step, row in itertools.product(range(3), corners):
        there = np.asarray(log_probs(OUTCOMES, SMALL.at[step].set(row)), float)
        for p, q in ((here, there), (there, here)):
            excess = np.exp(p) - math.exp(MECHANISM.epsilon) * np.exp(q)
            assert np.maximum(excess, 0).sum() <= MECHANISM.delta
        ranges.append(np.ptp(here - there) / (2 - step if step < 2 else 1))
    widest = 2 * MECHANISM.learning_rate
    assert max(ranges) <= widest * (1 + 1e-5)
    flipped = np.asarray(log_probs(OUTCOMES, SMALL.at[1].set(jnp.asarray([0.0, 1.0]))), float)
    opposite = np.asarray(log_probs(OUTCOMES, SMALL.at[1].set(jnp.asarray([1.0, 0.0]))), float)
    assert np.ptp(flipped - opposite) == pytest.approx(widest, rel=1e-3)


@pytest.mark.parametrize("simultaneous", [False, True])
def test_no_choice_loses_more_than_stated(simultaneous):
    """By the exact probabilities of choices between one expert who never errs and two who do."""
    mechanism, confidence = private(5.0, 0.1, 100), 0.9
    losses = jnp.broadcast_to(jnp.array([0.0, 1.0, 1.0]), (100, 3))
    log_probs = softmax_of_minus(losses, mechanism.learning_rate)
    behind = np.arange(100)

    def exceeds(bound):
        beyond = np.exp(log_probs[behind > bound]).reshape(-1, 3)[:, 1:].sum(axis=1)
        return 1 - np.prod(1 - beyond) if simultaneous else np.max(beyond, initial=0) / 2

    bound = mechanism.excess_loss(
        confidence=confidence, shape=losses.shape, simultaneous=simultaneous
    )
    assert exceeds(bound) <= 1 - confidence < exceeds(bound / 8)


def test_what_was_asked_for_is_public():
    key = dpjax.random.seeded_key(0)
    for losses in (jnp.zeros((2, 2)), jnp.zeros((3, 1)), jnp.zeros(3), {"a": SMALL, "b": SMALL}):
        with pytest.raises(ValueError, match=r"steps|experts|shape"):
            MECHANISM(key, losses)
    with pytest.raises(TypeError, match="key"):
        MECHANISM(jax.random.key(0), SMALL)


@pytest.mark.slow
def test_step_by_step_the_choices_are_the_same(key):
    total, choices = jnp.zeros(2, jnp.int32), []
    for number, losses in enumerate(SMALL):
        release = MECHANISM.choice(jax.random.fold_in(key, number), -total)
        assert release.guarantee.epsilon == 2 * MECHANISM.learning_rate
        choices.append(int(release.value))
        total += MECHANISM.units(losses)
    assert choices == MECHANISM(key, SMALL).value.tolist()


@pytest.mark.slow
def test_a_ledger_hears_of_the_whole_sequence(tmp_path):
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon="5", delta="0.2")
    with ledger:
        MECHANISM(dpjax.random.secure_key(), SMALL)
    assert (float(ledger.spent.epsilon), float(ledger.spent.delta)) == (4.0, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 20])
def test_the_auditor_refutes_a_rate_that_is_too_large_and_no_other(key, factor):
    honest = private(1.0, 1e-3, 8)
    mechanism = dataclasses.replace(honest, learning_rate=factor * honest.learning_rate)
    losses = jnp.full((8, 2), 0.5)
    value, neighbor = losses.at[0].set(jnp.arange(2.0)), losses.at[0].set(1 - jnp.arange(2.0))
    result = dpjax.auditing.audit(
        key, mechanism, value=value, neighbor=neighbor, samples=200_000, confidence=0.999
    )
    assert result.claimed == 1
    assert (result.bound > 1) == (factor > 1)


@pytest.mark.slow
def test_private_choices_regret_what_is_expected(key, sequences, run_all):
    """Of each sequence 32 runs, at 5 sigmas: false alarms once in 4 * 10^5."""
    for method in ("zcdp", "drv"):
        mechanism = private(1.0, 1e-6, STEPS, method)
        release = jax.jit(jax.vmap(lambda key, x, m=mechanism: m(key, x).value))
        expected = run_all(mechanism.learning_rate).expected_losses[0]
        for losses, average in zip(sequences, expected, strict=True):
            batch = jnp.broadcast_to(losses, (32, *losses.shape))
            choices = release(jax.random.split(key, 32), batch)
            realized = np.asarray(losses)[np.arange(STEPS), np.asarray(choices)].mean()
            assert abs(realized - average.mean()) < 5 * 0.5 / math.sqrt(32 * STEPS)


@pytest.mark.slow
def test_ten_thousand_sequences_at_once():
    """Each has its best expert by chance, and none exceeds the bound."""
    steps, experts = 100, 5
    losses = jax.random.uniform(jax.random.key(0), (10**4, steps, experts))
    keys = jax.random.split(jax.random.key(1), 10**4)
    runs = jax.jit(jax.vmap(learning.weighted_majority))(keys, losses)
    assert runs.choices.shape == (10**4, steps)
    assert np.max(runs.expected_regret) <= learning.regret_bound(steps=steps, experts=experts)
    assert abs(np.mean(runs.regret - runs.expected_regret)) < 5 * 0.5 / math.sqrt(10**4 * steps)
