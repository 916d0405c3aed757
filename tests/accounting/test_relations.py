"""One budget for releases under both neighboring relations."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

import dpjax
from dpjax import Guarantee, accounting, learning, queries
from dpjax._core._records import PaddedRecords
from dpjax._files import _ledger_file
from dpjax.accounting._composition import release_under, under
from dpjax.accounting._concentrated import concentration
from dpjax.mechanisms import additive
from dpjax.random import GAUSSIAN

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE


def added(value, norm):
    return dpjax.assume_sensitivity(value, norm=norm, relation=ADD)


ONE_MORE = dpjax.gaussian(added(1.0, "l2"), 0.5, 1e-6)
PURE = dpjax.laplace(added(1.0, "l1"), 0.25)
CHOICE = dpjax.permute_and_flip(added(1.0, "linf"), 0.25)
REPLACED = dpjax.laplace(1.0, 0.25)


@pytest.fixture
def ledger(tmp_path):
    return dpjax.Ledger(tmp_path / "ledger.db", epsilon=10, delta="1e-4")


# The prices.


def divergence(p, q, epsilon):
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0)))


def test_the_price_of_two_steps_is_reached():
    """D, D without a record, D with another one: exact answers, as far apart as they may be.

    Each step is (epsilon, delta)-DP, and no smaller delta holds for both at twice the epsilon.
    """
    epsilon, delta, least = 0.5, 0.01, 0.02
    yes = [least]
    for _ in range(2):
        yes.append(math.exp(epsilon) * yes[-1] + delta)
    other, without, this = (np.array([p, 1 - p]) for p in yes)
    for p, q in ((this, without), (without, other)):
        assert divergence(p, q, epsilon) == pytest.approx(delta)
        assert divergence(q, p, epsilon) <= delta
    price = under(Guarantee(epsilon, delta, relation=ADD), REPLACE)
    assert price.relation is REPLACE
    assert price.epsilon == 2 * epsilon
    exact = divergence(this, other, price.epsilon)
    assert exact <= price.delta <= exact * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_count_of_signs_needs_twice_the_epsilon(epsilon):
    """Two-sided geometric noise on a sum of -1 and 1: exact in the norm that the sum moves in."""
    noise = np.exp(-epsilon * np.abs(np.arange(-400, 401)))
    plus, none, minus = (np.roll(noise, shift) / noise.sum() for shift in (1, 0, -1))
    inside = slice(10, -10)
    assert np.max(np.log(plus[inside] / none[inside])) == pytest.approx(epsilon)
    price = under(Guarantee(epsilon, relation=ADD), REPLACE)
    worst = np.max(np.log(plus[inside] / minus[inside]))
    assert price.delta == 0
    assert worst == pytest.approx(price.epsilon)


def delta_of(mu, epsilon):
    """The exact delta of Gaussian noise, by Balle and Wang (2018), Theorem 8."""
    x = mu / 2 - epsilon / mu
    return scipy.special.ndtr(x) - math.exp(epsilon) * scipy.special.ndtr(x - mu)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 0.1])
def test_gaussian_noise_costs_what_it_does_at_twice_the_shift(epsilon, delta):
    """And the noise that is drawn covers it: it is no less than the noise for the price itself."""
    mechanism = dpjax.gaussian(added(1.0, "l2"), epsilon, delta)
    price = under(mechanism.guarantee, REPLACE)
    mu = 2 / mechanism.scale
    assert price.delta == delta
    assert delta_of(mu, price.epsilon) <= delta
    assert delta_of(mu, price.epsilon * (1 - 1e-3)) > delta
    twin = dpjax.gaussian(2.0, price.epsilon, delta)
    for shape in ((), (10,), (10**6,)):
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert twin.scale <= mechanism.scale * (1 + 1e-12)
        assert twin.effective_scale(like=like) <= mechanism.effective_scale(like=like) * (1 + 2e-3)


def test_gaussian_noise_that_the_tables_do_not_cover_costs_two_steps():
    """Where e^epsilon times what they miss is not small against delta."""
    far = dpjax.gaussian(added(1.0, "l2"), 15.0, 1e-8)
    assert far.guarantee.replacing is None
    assert under(far.guarantee, REPLACE).epsilon == 30.0
    few = additive(
        added(1.0, "l2"),
        15.0,
        norm="l2",
        noise=GAUSSIAN,
        delta=1e-8,
        multiplier=lambda e, d: far.scale,
        dims=2,
    )
    assert few.guarantee.replacing is not None
    assert under(few.guarantee, REPLACE).delta == 1e-8
    near_one = dpjax.gaussian(added(1.0, "l2"), 0.1, 0.95)
    assert near_one.guarantee.replacing is None


def test_a_price_does_not_outlive_what_it_belongs_to():
    """`dataclasses.replace`, float32 and groups change the guarantee, so two steps count."""
    known = ONE_MORE.guarantee
    assert known.replacing is not None
    own = under(known, REPLACE).epsilon
    raised = Guarantee(2.0, 1e-6, relation=ADD, replacing=known.replacing)
    assert under(raised, REPLACE).epsilon == 4.0
    assert under(accounting.group(known, 2), REPLACE).epsilon == 2.0
    assert under(accounting.group(known, 1), REPLACE).epsilon == own
    assert under(jax.jit(lambda: known)(), REPLACE).delta > 2e-6
    again = dpjax.Release.from_dict(
        json.loads(json.dumps(dpjax.Release(1.0, known).to_dict()))
    ).guarantee
    assert again == known
    assert under(again, REPLACE).epsilon == own
    together = accounting.compose(known, PURE.guarantee)
    assert together.relation is ADD
    assert under(together, REPLACE).epsilon == pytest.approx(own + 0.5)
    assert under(together, REPLACE).delta == 1e-6


def test_dp_sgd_costs_what_its_accountant_says():
    sampling = learning.poisson_sampling(500, batch_size=50)
    terms = {"noise_multiplier": 2.0, "steps": 20, "delta": 1e-5, "dims": 2, "method": "renyi"}
    one, other = (accounting.dp_sgd(sampling, relation=x, **terms) for x in (ADD, REPLACE))
    price = under(one, REPLACE)
    assert (price.epsilon, price.delta) == (other.epsilon, other.delta)


@pytest.mark.parametrize(
    "sampled",
    [
        Guarantee(1.0, gamma=0.05, relation=ADD),
        Guarantee(1.0, confidence=0.99, relation=ADD),
        Guarantee(1.0, events=(dpjax.SampledEvent(0.0, 1.0, "a"),), relation=ADD),
    ],
)
def test_a_gamma_has_no_price(sampled, ledger):
    """Nobody knows which pairs it is about; a ledger, a filter and a composition refuse it."""
    for pay in (
        ledger.charge,
        lambda guarantee: accounting.compose(guarantee, Guarantee(1.0)),
        accounting.PrivacyFilter(epsilon=1.0, delta=1e-6).admit,
    ):
        with pytest.raises(
            ValueError, match="gamma 0 and confidence 1 to be converted to replace-one"
        ):
            pay(sampled)
    assert not ledger.history()


# Where prices are paid.


def test_one_ledger_pays_for_a_training_and_a_statistic(ledger, keys):
    sampling = learning.poisson_sampling(500, batch_size=50)
    terms = {"noise_multiplier": 2.0, "steps": 20, "delta": 1e-5, "dims": 2, "method": "renyi"}
    training = accounting.dp_sgd(sampling, **terms)
    assert training.relation is ADD
    ledger.charge(training, what="training")
    with ledger:
        release = REPLACED(keys(0), 1.0)
        counted = PURE(keys(1), 1.0)
    assert counted.guarantee.relation is ADD
    costs = [float(row["epsilon"]) for row in ledger.history()]
    assert costs == pytest.approx([float(training.replacing[0]), 0.25, 0.5])
    assert all("under replace-one" in row["guarantee"] for row in ledger.history())
    together = accounting.compose(training, release.guarantee, counted.guarantee)
    assert ledger.spent.epsilon == pytest.approx(float(together.epsilon))
    assert ledger.spent.relation is together.relation is REPLACE


def test_the_converse_is_refused_with_a_remedy(tmp_path, keys):
    """A guarantee under replace-one says nothing where n is private. Everything that pays asks."""
    ledger = dpjax.Ledger(tmp_path / "x.db", epsilon=1, delta=1e-5, relation=ADD)
    budget = {"epsilon": 1.0, "delta": 1e-6, "relation": ADD}
    refused = pytest.raises(
        ValueError, match="Make the release under add-or-remove-one, or pay from a budget"
    )
    with ledger, refused:
        REPLACED(keys(0), 1.0)
    with ledger.share(0.5), refused:
        REPLACED(keys(0), 1.0)
    with refused:
        ledger.charge(Guarantee(0.1))
    with refused:
        accounting.PrivacyFilter(**budget).admit(REPLACED)
    with refused:
        accounting.PrivacyOdometer(delta=1e-6, relation=ADD).add(REPLACED.guarantee)
    assert not ledger.history()
    with ledger:
        PURE(keys(1), 1.0)
    assert ledger.spent == Guarantee(0.25, relation=ADD, notes=("seeded key",))


def twin(mechanism):
    """Gaussian noise of the same scale, under replace-one, at twice the sensitivity."""
    price, scale = under(mechanism.guarantee, REPLACE), mechanism.scale
    return additive(
        2.0,
        price.epsilon,
        norm="l2",
        noise=GAUSSIAN,
        delta=price.delta,
        multiplier=lambda epsilon, delta: scale / 2,
    )


@pytest.mark.parametrize("method", ["optimal", "drv", "kov", "zcdp", "renyi", "pld"])
def test_every_composition_takes_noise_at_twice_the_shift(method):
    mixed = accounting.compose_at(ONE_MORE, PURE, REPLACED, delta=1e-5, method=method)
    same = accounting.compose_at(
        twin(ONE_MORE), dpjax.laplace(2.0, 0.5), REPLACED, delta=1e-5, method=method
    )
    assert mixed.relation is REPLACE
    assert mixed.epsilon == pytest.approx(same.epsilon, rel=1e-6)


def test_bounded_ranges_add_up_too():
    """Two steps have 4 rho, where 2 epsilon alone would give 16."""
    assert concentration(release_under(CHOICE, REPLACE)).rho == 4 * concentration(CHOICE).rho
    assert concentration(release_under(PURE, REPLACE)).rho == pytest.approx(0.5**2 / 2)


def test_two_steps_of_a_cost_with_a_delta_are_those_of_the_guarantee():
    """Where a mechanism knows no rho alone, as noise whose multiplier is one's own."""
    own = additive(
        added(1.0, "l1"), 1.0, norm="l1", noise=dpjax.random.LAPLACE, delta=1e-6,
        multiplier=lambda epsilon, delta: 1 / epsilon,
    )  # fmt: skip
    price = under(own.guarantee, REPLACE)
    assert price.delta > 3e-6
    assert concentration(release_under(own, REPLACE)) == (pytest.approx(2.0**2 / 2), price.delta)


def test_filters_odometers_and_shares_take_it_at_twice_the_shift(ledger, keys):
    for kind, pay in (
        (accounting.PrivacyFilter(epsilon=5.0, delta=1e-5), "admit"),
        (accounting.PrivacyOdometer(delta=1e-5), "add"),
    ):
        getattr(kind, pay)(ONE_MORE)
        rho = kind._sums.rho
        getattr(kind, pay)(twin(ONE_MORE))
        assert float(kind._sums.rho) == pytest.approx(2 * float(rho), rel=1e-9)
    assert accounting.PrivacyOdometer(delta=1e-5).reading.relation is REPLACE
    left = []
    for mechanism in (ONE_MORE, twin(ONE_MORE)):
        with ledger.share(0.25) as share:
            mechanism(keys(len(left)), 0.0)
        left.append(share.remaining)
    assert left[0] == pytest.approx(left[1], rel=1e-9)
    assert left[0] < 1


def test_a_named_release_is_kept_under_its_own_relation(ledger, keys):
    records = queries.padded_records(jnp.ones(5), capacity=8)
    terms = {"lower": 0, "upper": 1, "epsilon": 0.5, "relation": ADD, "name": "ages"}
    release = queries.private_mean(keys(0), records, **terms)
    with ledger:
        paid = queries.private_mean(keys(0), records, **terms)
        again = queries.private_mean(keys(1), records, **terms)
    assert paid.guarantee == again.guarantee == release.guarantee
    assert len(ledger.history()) == 1
    assert ledger.spent.epsilon == 1.0


# The relation of a ledger.


def of_training(key):
    noise = learning.gaussian_noise(key, noise_multiplier=2.0, batch_size=1)
    del noise
    sampling = learning.poisson_sampling(500, batch_size=50)
    terms = {"noise_multiplier": 2.0, "steps": 2, "delta": 1e-5, "dims": 2, "method": "renyi"}
    return accounting.dp_sgd(sampling, **terms)


INHERIT = {
    "number": lambda key: dpjax.laplace(1.0, 0.5),
    "assumed": lambda key: dpjax.assume_sensitivity(1.0, norm="l1"),
    "query": lambda key: queries.histogram_query(3).sensitivity(),
    "proved": lambda key: _proved(),
    "events": lambda key: accounting.compose_events(
        dpjax.gaussian(1.0, 1.0, 1e-6).dp_event, delta=1e-5
    ),
    "dp_sgd": of_training,
    "filter": lambda key: accounting.PrivacyFilter(epsilon=1.0, delta=1e-6),
    "odometer": lambda key: accounting.PrivacyOdometer(delta=1e-6),
    "mean": lambda key: queries.private_mean(
        key, queries.padded_records(jnp.ones(5), capacity=8), lower=0, upper=1, epsilon=0.1
    ),
    "variance": lambda key: queries.private_variance(
        key, queries.padded_records(jnp.ones(5), capacity=8), lower=0, upper=1, epsilon=0.1
    ),
    "covariance": lambda key: queries.private_covariance(
        key, queries.padded_records(jnp.ones((5, 2)), capacity=8), radius=1.0, epsilon=0.1
    ),
    "pca": lambda key: queries.private_pca(
        key,
        queries.padded_records(jnp.ones((5, 2)), capacity=8),
        components=1,
        radius=1.0,
        epsilon=0.1,
    ),
    "k-means": lambda key: queries.private_k_means(
        key,
        queries.padded_records(jnp.ones((5, 2)), capacity=8),
        clusters=1,
        iterations=1,
        radius=1.0,
        epsilon=0.1,
        delta=1e-7,
    ),
    "regression": lambda key: queries.private_linear_regression(
        key,
        queries.padded_records({"x": jnp.ones((5, 1)), "y": jnp.ones(5)}, capacity=8),
        x_radius=1.0,
        y_radius=1.0,
        epsilon=0.1,
    ),
}


def _proved():
    """Of a target for both kinds of database."""

    def total(database):
        if isinstance(database, jax.Array):
            return jnp.sum(database)
        return jnp.sum(jnp.where(database.present, database.records, 0.0))

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    for records in (shape, PaddedRecords(shape, jax.ShapeDtypeStruct((8,), jnp.bool_))):
        try:
            return dpjax.prove_sensitivity(total, records, bounds=(0, 1), norm="l1")
        except TypeError:
            continue
    raise AssertionError


def relation_of(made):
    found = getattr(made, "relation", None)
    return made.guarantee.relation if found is None else found


@pytest.mark.parametrize("name", INHERIT)
def test_what_is_made_inside_inherits_the_relation(name, tmp_path, keys):
    """Every public function with an argument `relation`, and mechanisms made from numbers."""
    for i, relation in enumerate((ADD, REPLACE)):
        with dpjax.Ledger(tmp_path / f"{i}.db", epsilon=5, delta=1e-5, relation=relation) as ledger:
            assert relation_of(INHERIT[name](keys(i))) is relation
        assert ledger.spent.relation is relation
    outside = relation_of(INHERIT[name](keys(2)))
    assert outside is (ADD if name == "dp_sgd" else REPLACE)


@pytest.mark.slow
@pytest.mark.parametrize("relation", [ADD, REPLACE, None])
def test_a_training_inherits_the_relation_of_its_ledger(relation, tmp_path, keys):
    """Which is no open one: it is given. What is said beside it counts more."""
    ledger = dpjax.Ledger(tmp_path / "x.db", epsilon=50, delta=1e-3, relation=relation)
    terms = {
        "database": jnp.ones((40, 2)),
        "optimizer": optax.sgd(0.1),
        "epochs": 1,
        "batch_size": 20,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
        "ledger": ledger,
    }
    release = learning.fit(keys(0), lambda w, x: (w @ x) ** 2, jnp.zeros(2), **terms)
    assert release.guarantee.relation is ledger.relation is (relation or REPLACE)
    assert ledger.spent.epsilon == pytest.approx(float(release.guarantee.epsilon))
    if relation is None:
        release = learning.fit(
            keys(1), lambda w, x: (w @ x) ** 2, jnp.zeros(2), **terms, relation=ADD
        )
        assert release.guarantee.relation is ADD


def test_a_part_and_a_share_pass_a_relation_on(tmp_path):
    ledger = dpjax.Ledger(tmp_path / "x.db", epsilon=1, relation=REPLACE)
    with ledger.parallel("cut") as part, part("Fair"):
        assert dpjax.laplace(1.0, 0.5).guarantee.relation is ADD
    with dpjax.Ledger(tmp_path / "y.db", epsilon=1, relation=ADD).share(0.5):
        assert dpjax.laplace(1.0, 0.5).guarantee.relation is ADD
        assert dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1", relation=REPLACE), 1.0)


def test_the_relation_of_a_file_never_changes(tmp_path):
    path = tmp_path / "x.db"
    assert dpjax.Ledger(path, epsilon=1, relation=ADD).relation is ADD
    assert dpjax.Ledger(path, epsilon=1).relation is ADD
    assert dpjax.Ledger(path, epsilon=1).spent.relation is ADD
    with pytest.raises(
        ValueError, match=r"relation must be the one .* is add-or-remove-one, .* Got rep"
    ):
        dpjax.Ledger(path, epsilon=1, relation=REPLACE)
    with pytest.raises(ValueError, match="'both' is not a valid NeighboringRelation"):
        dpjax.Ledger(path, epsilon=1, relation="both")


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_files_of_the_first_format_open(relation, tmp_path, monkeypatch):
    """They do not say their relation, so it is that of the first debit."""
    path = tmp_path / "old.db"
    budget = 10**_ledger_file.EPSILON_DIGITS, 0
    monkeypatch.setattr(_ledger_file, "FORMATS", (1,))
    old = _ledger_file.LedgerFile(path, budget)
    assert "relation" not in old.chain.entries[0].body
    monkeypatch.undo()
    assert dpjax.Ledger(path, epsilon=1).relation is REPLACE
    assert dpjax.Ledger(path, epsilon=1, relation=ADD).relation is ADD
    dpjax.Ledger(path, epsilon=1, relation=relation).charge(Guarantee(0.25, relation=relation))
    again = dpjax.Ledger(path, epsilon=1)
    assert again.relation is relation
    assert again.spent == Guarantee(0.25, relation=relation)
    with pytest.raises(ValueError, match=r"relation must be the one that old\.db was made with"):
        dpjax.Ledger(path, epsilon=1, relation=ADD if relation is REPLACE else REPLACE)
