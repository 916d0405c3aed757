"""Shadow models, LiRA and RMIA: what was trained on what, and attacks by all other models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

from dpjax import targets
from dpjax.attacks import lira, logit_confidence, rmia, roc_curve, shadow_models

MODELS, RECORDS, OTHERS = 64, 40, 300


def total_of(key, database):
    """A model that remembers everything: records are unit vectors."""
    return jnp.sum(database, axis=0), jax.random.normal(key, (RECORDS,))


@pytest.fixture(scope="module")
def remembered():
    """Models of unit vectors, with some noise that grows along the records."""
    return shadow_models(
        jax.random.key(0),
        total_of,
        jnp.eye(RECORDS),
        query=lambda model, record: jnp.dot(model[0], record) + 0.1 * jnp.dot(model[1], record),
        models=1000,
    )


def test_members_are_what_models_were_trained_on(remembered):
    assert np.array_equal(remembered.scores > 0.5, remembered.members)
    assert remembered.population is None


def test_databases_keep_their_size_and_each_place_tosses_a_coin(remembered):
    """20,000 coins, within 4 standard deviations, for each model and together."""
    members = np.asarray(remembered.members)
    first, second = np.split(members, 2, axis=1)
    assert np.array_equal(first, ~second)
    assert abs(first.mean() - 0.5) < 4 * 0.5 / math.sqrt(first.size)
    of_places = first.sum(axis=0)
    assert np.all(np.abs(of_places - 500) < 4.5 * math.sqrt(250))
    # Neither places nor models share coins.
    assert np.max(np.abs(np.corrcoef(first.T) - np.eye(RECORDS // 2))) < 0.2
    assert len(np.unique(first, axis=0)) > 990


def test_models_have_keys_of_their_own(remembered):
    noise = np.asarray(remembered.scores) - np.asarray(remembered.members)
    assert len(np.unique(noise.round(5), axis=0)) == 1000
    assert scipy.stats.kstest(noise.ravel() / 0.1, "norm").pvalue > 1e-4


@pytest.fixture
def drawn():
    """Scores of a few models, of members higher, and of a population."""
    random = np.random.default_rng(0)
    members = random.random((9, 6)) < 0.5
    members[:, 0] = np.arange(9) < 1  # One model only was trained on the first record.
    scores = random.normal(size=(9, 6)) + 2 * members
    return scores, members, random.normal(size=(9, 50))


def leaving_out(model, scores, members, record):
    """What the other models say of a record: those trained on it, and those not."""
    others = np.arange(len(scores)) != model
    of_record = scores[others, record], members[others, record]
    return of_record[0][of_record[1]], of_record[0][~of_record[1]]


def test_lira_is_a_ratio_of_gaussians_of_the_other_models(drawn):
    scores, members, _ = drawn
    online, offline = (np.asarray(lira(scores, members, mode=m)) for m in ("online", "offline"))
    for model, record in np.ndindex(scores.shape):
        here, there = leaving_out(model, scores, members, record)
        x, out = scores[model, record], scipy.stats.norm(there.mean(), there.std(ddof=1))
        assert offline[model, record] == pytest.approx((x - out.mean()) / out.std(), rel=1e-3)
        exact = 0.0
        if len(here) > 1:
            exact = scipy.stats.norm(here.mean(), here.std(ddof=1)).logpdf(x) - out.logpdf(x)
        assert online[model, record] == pytest.approx(exact, rel=1e-3, abs=1e-3)


def test_a_pooled_variance_is_that_of_all_records(drawn):
    scores, members, _ = drawn
    found = np.asarray(lira(scores, members, mode="offline", variance="pooled"))
    for model in range(len(scores)):
        outs = [leaving_out(model, scores, members, record)[1] for record in range(6)]
        pooled = sum(len(x) * x.var() for x in outs) / sum(len(x) - 1 for x in outs)
        exact = (scores[model] - [x.mean() for x in outs]) / math.sqrt(pooled)
        assert np.allclose(found[model], exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_rmia_counts_the_population_that_a_record_beats(drawn, mode):
    scores, members, population = map(np.asarray, drawn)
    p, p_z = scipy.special.expit(scores), scipy.special.expit(population)
    found = np.asarray(rmia(p, members, p_z, mode=mode, threshold=1.2, slope=0.4))
    for model, record in np.ndindex(p.shape):
        here, there = leaving_out(model, p, members, record)
        average_z = np.delete(p_z, model, axis=0).mean(axis=0)
        if mode == "online":
            other = here.mean() if len(here) else np.delete(p[:, record], model).mean()
            average = (other + there.mean()) / 2
        else:
            average, average_z = (0.7 * x + 0.3 for x in (there.mean(), average_z))
        ratios = (p[model, record] / average) / (p_z[model] / average_z)
        assert found[model, record] == pytest.approx(np.mean(ratios >= 1.2), abs=1e-6)


def test_float64_is_kept(drawn, x64):
    scores, members, population = drawn
    for attack in (lambda: lira(scores, members), lambda: rmia(scores, members, population)):
        assert jax.eval_shape(attack).dtype == np.dtype(float)


@pytest.mark.parametrize("attack", ["online", "offline", "rmia"])
def test_the_attacked_model_is_in_no_fit_of_its_own(drawn, attack):
    """Its coins change nothing, and what it says of one record nothing of others."""
    scores, members, population = drawn

    def run(scores, members):
        if attack == "rmia":
            return np.asarray(rmia(jax.nn.sigmoid(scores), members, jax.nn.sigmoid(population)))
        return np.asarray(lira(scores, members, mode=attack))

    other_coins = np.where(np.arange(9)[:, None] == 4, ~members, members)
    assert np.allclose(run(scores, members)[4], run(scores, other_coins)[4], atol=1e-4)
    moved = scores + 100.0 * ((np.arange(9)[:, None] == 4) & (np.arange(6) == 2))
    there = np.arange(6) != 2
    assert np.allclose(run(scores, members)[4, there], run(moved, members)[4, there], atol=1e-4)


def test_models_that_say_nothing_tell_nothing():
    """At 4 standard errors: 1/2, over 500 models of 80 records."""
    random = np.random.default_rng(1)
    members = random.random((500, 80)) < 0.5
    noise = random.normal(size=(500, 80))
    constant = np.zeros((500, 80))
    for found in (lira(noise, members), lira(noise, members, mode="offline")):
        area = roc_curve(found, members, confidence=None).area
        assert abs(area - 0.5) < 4 / math.sqrt(12 * 20_000 / 2)
    assert np.all(np.asarray(lira(constant, members)) == 0)


@pytest.mark.parametrize(
    ("mode", "variance"), [("online", "record"), ("online", "pooled"), ("offline", "record")]
)
def test_lira_approaches_the_best_attack(mode, variance):
    """Of a shift of one standard deviation: TPR = Phi(Phi^-1(FPR) + 1)."""
    random = np.random.default_rng(2)
    members = random.random((500, 80)) < 0.5
    found = lira(random.normal(size=(500, 80)) + members, members, mode=mode, variance=variance)
    curve = roc_curve(found, members, confidence=None)
    assert curve.area == pytest.approx(scipy.stats.norm.cdf(1 / math.sqrt(2)), abs=0.01)
    for rate in (0.01, 0.1):
        best = scipy.stats.norm.cdf(scipy.stats.norm.ppf(rate) + 1)
        assert curve.true_positive_rate(rate).estimate == pytest.approx(best, rel=0.15)


@pytest.fixture(scope="module")
def overfitted():
    """Logistic regressions on fewer records than features, which they learn by heart."""
    d, keys = 40, jax.random.split(jax.random.key(3), 2)

    def draw(key, count):
        return {
            "x": jax.random.normal(key, (count, d)),
            "y": jnp.where(jnp.arange(count) % 2 == 0, 1.0, -1.0),
        }

    def loss(w, database):
        return jnp.mean(jax.nn.softplus(-database["y"] * (database["x"] @ w)))

    train = targets.optax_training(loss, jnp.zeros(d), optax.sgd(1.0), steps=20)
    return shadow_models(
        jax.random.key(4),
        lambda key, database: train(database),
        draw(keys[0], RECORDS),
        query=lambda w, record: record["y"] * jnp.dot(record["x"], w),
        models=MODELS,
        population=draw(keys[1], OTHERS),
    )


def test_training_without_privacy_is_attacked(overfitted):
    """At 1% false positives, each attack finds ten times as many members, or more."""
    assert overfitted.population.shape == (MODELS, OTHERS)
    scores, members = overfitted.scores, overfitted.members
    p, p_z = (jax.nn.sigmoid(x) for x in (scores, overfitted.population))
    for found in (
        lira(scores, members),
        lira(scores, members, mode="offline"),
        rmia(p, members, p_z),
    ):
        curve = roc_curve(found, members, confidence=None)
        assert curve.true_positive_rate(0.01).estimate > 0.1, curve


def test_logit_confidence_is_exact_where_probabilities_round_to_one():
    logits = jnp.array([[0.0, 1.0, 2.0], [0.0, 0.0, 60.0]])
    found = np.asarray(jax.jit(logit_confidence)(logits, jnp.array([1, 2])))
    assert found == pytest.approx([1 - math.log(1 + math.exp(2)), 60 - math.log(2)], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"records": jnp.eye(3)}, ValueError, "even"),
        ({"models": 0}, ValueError, "models"),
        ({"query": lambda model, record: record}, ValueError, "one number"),
        ({"query": None}, TypeError, "query"),
    ],
)
def test_what_cannot_be_trained_is_refused(change, error, named):
    base = {"records": jnp.eye(4), "query": lambda model, record: jnp.sum(record), "models": 2}
    with pytest.raises(error, match=named):
        shadow_models(jax.random.key(0), lambda key, database: database, **base | change)


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (lambda x, m: lira(x, m[:2]), "shape"),
        (lambda x, m: lira(x, m, mode="half"), "mode"),
        (lambda x, m: lira(x, m, variance="none"), "variance"),
        (lambda x, m: rmia(x, m, x[:2]), "population"),
        (lambda x, m: rmia(x, m, x, slope=1.5), "slope"),
        (lambda x, m: rmia(x, m, x, threshold=0.0), "threshold"),
    ],
)
def test_what_cannot_be_attacked_is_refused(attack, named):
    with pytest.raises(ValueError, match=named):
        attack(np.ones((3, 4)), np.eye(3, 4) > 0)
