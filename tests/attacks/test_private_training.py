"""Attacks on trainings: without privacy they succeed, with it they stay below what is claimed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, learning, targets
from dpjax.attacks import (
    compare_with_claim,
    highest_true_positive_rate,
    likelihood_ratio,
    lira,
    membership_trials,
    rmia,
    roc_curve,
    shadow_models,
)

pytestmark = pytest.mark.slow

D, TRIALS = 20, 25_000


def two_classes(key, n):
    key_y, key_x = jax.random.split(key)
    y = jnp.where(jax.random.bernoulli(key_y, 0.5, (n,)), 1.0, -1.0)
    return {"x": jax.random.normal(key_x, (n, D)) / 4 + 0.05 * y[:, None], "y": y}


def logistic_loss(w, example):
    return jax.nn.softplus(-example["y"] * jnp.dot(example["x"], w))


def average_loss(w, database):
    return jnp.mean(jax.vmap(logistic_loss, (None, 0))(w, database))


TRAINING = targets.optax_training(average_loss, jnp.zeros(D), optax.sgd(2.0), steps=15)


def test_sampled_output_perturbation_stays_below_its_claim_and_a_tenth_of_the_noise_does_not(keys):
    """12,000 non-members and more, each of a training of its own."""
    sensitivity = dpjax.sample_sensitivity(
        keys(0), TRAINING, two_classes, n=50, norm="l2", gamma=0.05
    )
    claim = dpjax.gaussian(sensitivity, 1.0, 1e-5).guarantee
    found = {}
    for epsilon in (1.0, 10.0):
        mechanism = dpjax.gaussian(sensitivity, epsilon, 1e-5)
        trials = membership_trials(
            keys(1),
            dpjax.privatize(TRAINING, mechanism),
            two_classes,
            score=likelihood_ratio(TRAINING, mechanism),
            n=50,
            trials=TRIALS,
        )
        curve = roc_curve(*trials, confidence=0.99)
        assert curve.true_positive_rate(0.001).lower is not None
        found[epsilon] = compare_with_claim(curve, claim)
    assert not found[1.0].contradicted
    assert found[10.0].contradicted


def test_a_sensitivity_that_is_sampled_anew_in_every_trial_covers_what_gamma_says():
    """Marginal gamma = 1/20 of 19 pairs. Pairs beyond it, of records with huge tails, are known."""
    m, epsilon = 19, 0.05
    point = dpjax.operating_point(m=m, confidence=None)

    def heavy(key, n):
        return jnp.exp(15 * jax.random.normal(key, (n,)))

    def release(key, database):
        key_sample, key_noise = jax.random.split(key)
        distances = dpjax.sample_distances(
            key_sample, jnp.sum, heavy, n=1, norm="l1", m=m, chunk_size=m
        )
        scale = dpjax.order_statistic(distances, point.k) / epsilon
        return jnp.sum(database) + scale * jax.random.laplace(key_noise)

    def score(value, database, neighbor):
        one, other = (jnp.abs(value - jnp.sum(x)) for x in (database, neighbor))
        return jnp.log(other) - jnp.log(one)

    trials = membership_trials(jax.random.key(2), release, heavy, score=score, n=1, trials=60_000)
    curve = roc_curve(*trials)
    claimed = Guarantee(epsilon, gamma=point.gamma, confidence=None)
    assert not compare_with_claim(curve, claimed).contradicted
    too_little = Guarantee(epsilon, gamma=point.gamma / 2, confidence=None)
    assert compare_with_claim(curve, too_little).contradicted


def test_dp_sgd_stays_below_its_claim_and_a_tenth_of_the_noise_does_not(keys):
    n, steps, rate = 20, 4, 1.0
    sampling = learning.poisson_sampling(n, batch_size=10)
    base = {"steps": steps, "dims": D, "relation": NeighboringRelation.REPLACE_ONE}
    multiplier = dpjax.accounting.dp_sgd_noise_multiplier(sampling, epsilon=1.0, delta=1e-5, **base)
    claim = dpjax.accounting.dp_sgd(sampling, noise_multiplier=multiplier, delta=1e-5, **base)
    clipped = learning.clipped_gradients(logistic_loss, clip_norm=0.3)

    def average_gradient(database):
        return clipped(jnp.zeros(D), database, True).value / n

    @jax.jit
    def run(multiplier):
        def release(key, database):
            key_noise, key_batches = jax.random.split(key)
            noise = learning.gaussian_noise(key_noise, noise_multiplier=multiplier, batch_size=10)
            optimizer = optax.chain(noise, optax.sgd(rate))

            def step(carry, key):
                w, state = carry
                batch = sampling(key)
                records = jax.tree.map(lambda column: column[batch.indices], database)
                updates, state = optimizer.update(clipped(w, records, batch), state, w)
                return (optax.apply_updates(w, updates), state), None

            start = jnp.zeros(D)
            keys_steps = jax.random.split(key_batches, steps)
            return jax.lax.scan(step, (start, optimizer.init(start)), keys_steps)[0][0]

        def score(w, database, neighbor):
            one, other = (
                jnp.sum((w + rate * steps * average_gradient(x)) ** 2) for x in (database, neighbor)
            )
            return other - one

        return membership_trials(keys(3), release, two_classes, score=score, n=n, trials=TRIALS)

    kept = compare_with_claim(roc_curve(*run(multiplier), confidence=0.99), claim)
    assert not kept.contradicted
    faulty = compare_with_claim(roc_curve(*run(multiplier / 10), confidence=0.99), claim)
    assert faulty.contradicted


@pytest.fixture(scope="module")
def attacked(keys):
    """`attacked(train)`: what shadow models say, with 10^4 non-members."""
    key_records, key_others, key_models = jax.random.split(keys(4), 3)

    def run(train):
        return shadow_models(
            key_models,
            train,
            two_classes(key_records, 40),
            query=lambda w, record: record["y"] * jnp.dot(record["x"], w),
            models=512,
            population=two_classes(key_others, 2000),
        )

    return run


def rates(found):
    """At one false positive in a thousand."""
    p, p_z = jax.nn.sigmoid(found.scores), jax.nn.sigmoid(found.population)
    attacks = {
        "online": lira(found.scores, found.members),
        "offline": lira(found.scores, found.members, mode="offline"),
        "rmia": rmia(p, found.members, p_z),
    }
    curves = {
        name: roc_curve(scores, found.members, confidence=None) for name, scores in attacks.items()
    }
    return {name: x.true_positive_rate(0.001).estimate for name, x in curves.items()}


def test_shadow_models_find_members_of_a_training_and_not_of_its_releases(attacked):
    """Ten times as many members as guessing finds, and no more than epsilon allows."""
    public = rates(attacked(lambda key, database: TRAINING(database)))
    assert min(public.values()) > 0.01, public
    sensitivity = dpjax.sample_sensitivity(
        dpjax.random.seeded_key(5), TRAINING, two_classes, n=20, norm="l2", gamma=0.05
    )
    mechanism = dpjax.gaussian(sensitivity, 1.0, 1e-5)
    private = rates(attacked(dpjax.privatize(TRAINING, mechanism)))
    allowed = highest_true_positive_rate(Guarantee(1.0, 1e-5), np.array(0.001))
    assert max(private.values()) < allowed + 0.002, private
