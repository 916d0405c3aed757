"""Names of records: what was released under one is released again, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

LAPLACE = dpjax.laplace(1.0, 0.1)
RECORDS = np.linspace(0, 1, 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


def paid(ledger):
    """How many releases were."""
    return len(ledger.history())


GROUPS = {"Fair": 0.1, "Good": 0.5, "Ideal": 0.9}


def test_no_group_is_answered_by_the_release_of_another(path, keys):
    """The loop over columns or groups of one shape, which had one answer for all of them.

    What else reaches a replay: private statistics, k-means, trainings, quantiles, code on the host
    and other ledgers, see `test_every_kind_of_release_is_replayed_by_its_name_alone`.
    """
    ledger = dpjax.Ledger(path, epsilon=10**6)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1e4), ledger=ledger)
    for i, mean in enumerate(GROUPS.values()):
        assert private(keys(i), np.full(5, mean)).value == pytest.approx(mean, abs=0.01)
    assert paid(ledger) == 3
    assert not any(row["kept"] or row["name"] for row in ledger.history())
    named = {
        name: private(keys(i), np.full(5, mean), name=name).value
        for i, (name, mean) in enumerate(GROUPS.items(), 3)
    }
    assert paid(ledger) == 6
    for i, (name, mean) in enumerate(GROUPS.items(), 6):
        assert named[name] == pytest.approx(mean, abs=0.01)
        assert private(keys(i), np.zeros(5), name=name).value == named[name]
    assert paid(ledger) == 6


POINTS = np.linspace(0, 1, 32, dtype="float32").reshape(16, 2)
LABELED = {"x": POINTS, "y": np.arange(16) % 2}


def by_quantiles(key, **name):
    scores = dpjax.queries.quantile_scores(0.5, grid=np.linspace(0, 1, 11))
    mechanism = dpjax.queries.select_each(scores.sensitivity(), epsilon=1.0, count=1)
    return dpjax.privatize(scores, mechanism)(key, POINTS[:, 0], **name)


def on_the_host(key, **name):
    pytest.importorskip("cloudpickle")
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    target = dpjax.targets.host(lambda x: np.float32(np.mean(x)), output=shape)
    return dpjax.privatize(target, LAPLACE)(key, RECORDS, **name)


def trained(key, **name):
    training = dpjax.learning.objective_perturbation(
        regularization=0.5, n=16, dims=2, epsilon=1.0, delta=1e-7
    )
    return training(key, LABELED, **name)


KINDS = {
    "target": lambda key, **name: dpjax.privatize(jnp.mean, LAPLACE)(key, RECORDS, **name),
    "host program": on_the_host,
    "quantiles": by_quantiles,
    "mean": lambda key, **name: dpjax.queries.private_mean(
        key, RECORDS, lower=0, upper=1, epsilon=1.0, **name
    ),
    "covariance": lambda key, **name: dpjax.queries.private_covariance(
        key, POINTS, radius=2.0, epsilon=1.0, **name
    ),
    "components": lambda key, **name: dpjax.queries.private_pca(
        key, POINTS, components=1, radius=2.0, epsilon=1.0, **name
    ),
    "variance": lambda key, **name: dpjax.queries.private_variance(
        key, RECORDS, lower=0, upper=1, epsilon=1.0, **name
    ),
    "regression": lambda key, **name: dpjax.queries.private_linear_regression(
        key, LABELED, x_radius=2.0, y_radius=1.0, epsilon=1.0, **name
    ),
    "k-means": lambda key, **name: dpjax.queries.private_k_means(
        key, POINTS, clusters=2, radius=2.0, iterations=1, epsilon=1.0, delta=1e-7, **name
    ),
    "training": trained,
}


# They share what they do with others.
SLOW = ("covariance", "variance", "regression", "components")
kinds = [pytest.param(KINDS[x], id=x, marks=[pytest.mark.slow] * (x in SLOW)) for x in KINDS]


@pytest.mark.parametrize("release", kinds)
def test_every_kind_of_release_is_replayed_by_its_name_alone(release, path, keys):
    def drawn(*key, **name):
        return jax.tree.leaves(release(keys(*key), **name).value)

    with dpjax.Ledger(path, epsilon=100, delta="1e-3") as ledger:
        first = drawn(0, name="a")
        drawn(1)
        drawn(2, name="b")
        assert paid(ledger) == 3
        for key in (3, 0):
            np.testing.assert_array_equal(drawn(key, name="a")[0], first[0])
        assert paid(ledger) == 3
    assert [row["name"] for row in ledger.history()] == ["a", "", "b"]
    assert [row["kept"] for row in ledger.history()] == [True, False, True]


@pytest.mark.parametrize("name", ["", 2026, b"ages", ("a", "b"), float("nan")])
def test_a_name_is_a_text(name, path, keys):
    """Also where no ledger is open, so that a program does not fail once one is."""
    ledger = dpjax.Ledger(path, epsilon=1)
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    for release in (private, dpjax.privatize(jnp.mean, LAPLACE)):
        with pytest.raises(TypeError, match="name must be a nonempty string"):
            release(keys(0), RECORDS, name=name)
    assert paid(ledger) == 0


def test_without_a_budget_a_name_means_nothing(keys):
    private = dpjax.privatize(jnp.mean, LAPLACE)
    plain = private(keys(0), RECORDS).value
    assert private(keys(0), RECORDS, name="ages").value == plain
    with dpjax.random.KeyLedger():
        assert private(keys(0), RECORDS, name="ages").value == plain
    assert jax.jit(lambda key: private(key, RECORDS, name="ages").value)(keys(0)) == plain
