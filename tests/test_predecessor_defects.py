"""What R diffpriv 0.4.2 gets wrong, one test or more for each of the 18 rows of the list."""

import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax import targets
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE

N = 20


def uniform(key, n):
    return jax.random.uniform(key, (n,))


@pytest.fixture(scope="module")
def sampled(keys):
    """The sampled sensitivity of the mean of N records."""
    return dpjax.sample_sensitivity(keys(0), jnp.mean, uniform, n=N, norm="l1", m=100)


def test_row_1_exponential_mechanism_takes_the_exponential(key):
    def pmf(scores, epsilon):
        mechanism = dpjax.exponential(0.5, epsilon)
        log_prob = jax.jit(mechanism.log_prob)
        return np.exp([log_prob(r, jnp.asarray(scores)) for r in range(3)])

    np.testing.assert_allclose(pmf([10.0, 5.0, 0.0], 0.5), [0.9185, 0.0754, 0.0062], atol=1e-4)
    np.testing.assert_allclose(pmf([10.0, 5.0, 0.0], 1e-6), np.full(3, 1 / 3), atol=1e-4)
    mixed = pmf([1.0, -1.0, 0.0], 1.0)
    assert mixed[0] > mixed[2] > mixed[1] > 0
    np.testing.assert_allclose(pmf([-1.0, -3.0, -2.0], 1.0), mixed, rtol=1e-5)
    # And the draws: a false alarm once in 10^6 keys; score / sum(score) fails.
    mechanism = dpjax.exponential(0.5, 0.5)
    keys = jax.random.split(key, 20_000)
    scores = jnp.asarray([10.0, 5.0, 1.0])
    drawn = jax.jit(jax.vmap(lambda k: mechanism(k, scores).value))(keys)
    drawn = np.bincount(drawn, minlength=3)
    assert stats.chisquare(drawn, 20_000 * pmf(scores, 0.5), sum_check=False).pvalue > 1e-6
    assert stats.chisquare(drawn, 20_000 * np.array(scores) / 16).pvalue < 1e-6


def every_kind_of_release(key, database):
    """Name, release and the exact value that must not be in it."""
    lattice = dpjax.evaluate_on_lattice(targets.priestley_chao(bandwidth=0.2), degree=3, dims=1)
    records = {"x": database, "y": database}
    whole = (100 * database).astype("int32")
    cases = {
        "laplace": (lambda d: d, dpjax.laplace(1.0, 1.0), database),
        "gaussian": (lambda d: d, dpjax.gaussian(1.0, 1.0, 1e-5), database),
        "integers": (lambda d: d, dpjax.laplace(10.0, 1.0), whole),
        "exponential": (lambda d: d, dpjax.exponential(1.0, 1.0), database),
        "permute and flip": (lambda d: d, dpjax.permute_and_flip(1.0, 1.0), database),
        "randomized response": (lambda d: d, dpjax.randomized_response(1.0, 100), whole),
        "bernstein": (lattice, dpjax.bernstein(1.0, 1.0, degree=3, dims=1), records),
        "one's own": (lambda d: d, additive(1.0, 1.0, norm="l1", noise=LAPLACE), database),
    }
    for name, (target, mechanism, private) in cases.items():
        exact = jax.tree.map(np.asarray, target(jax.tree.map(jnp.asarray, private)))
        yield name, dpjax.privatize(target, mechanism)(key, private), private, exact
        yield f"{name}, of a value", mechanism(key, exact), private, exact


def test_row_2_releases_hold_nothing_of_the_database(key):
    database = np.random.default_rng(0).uniform(size=N).astype("float32")
    for name, release, private, exact in every_kind_of_release(key, database):
        stored = pickle.dumps(release)
        for array in (*jax.tree.leaves(private), jax.tree.leaves(exact)[0]):
            secret = array.tobytes()
            # Any four records in a row: the noise alone leaves no such run as it was.
            windows = [secret[i : i + 16] for i in range(0, len(secret) - 15, 4)]
            assert windows
            assert not any(window in stored for window in windows), name
        again = pickle.loads(stored)
        assert repr(again.guarantee) == repr(release.guarantee)
        assert {field.name for field in dataclasses.fields(release)} == {
            "value",
            "guarantee",
            "accuracy",
            "labels",  # Names of columns and public keys.
            "training",  # The arguments of a training.
        }


@pytest.mark.parametrize(("epsilon", "delta"), [(10.0, 0.1), (20.0, 1e-5)])
def test_row_3_gaussian_noise_keeps_delta_at_every_epsilon(epsilon, delta):
    def exact_delta(sigma):
        with mpmath.workdps(50):
            mu, e = 1 / mpmath.mpf(sigma), mpmath.mpf(epsilon)
            x = mu / 2 - e / mu
            return float(mpmath.ncdf(x) - mpmath.exp(e) * mpmath.ncdf(x - mu))

    assert exact_delta(dpjax.gaussian(1.0, epsilon, delta).scale) <= delta
    assert exact_delta(math.sqrt(2 * math.log(1.25 / delta)) / epsilon) > 4 * delta
    with pytest.raises(ValueError, match="epsilon must be at most 1"):
        dpjax.gaussian(1.0, epsilon, delta, calibration="classical")


def test_row_4_all_records_of_a_pair_come_from_one_call(key):
    asked = []

    def shared_cause(key, n):
        asked.append(n)
        key_center, key_records = jax.random.split(key)
        return 1000 * jax.random.normal(key_center) + jax.random.uniform(key_records, (n,))

    distances = dpjax.sample_distances(key, jnp.ptp, shared_cause, n=N, norm="l1", m=200)
    assert set(asked) == {N + 1}
    # Drawn in a call of its own, the last record would lie a thousand away.
    assert 0 < distances.max() < 1.01


def test_row_5_targets_that_depend_on_the_order_are_refused(key):
    def first(database):
        return database[0]

    with pytest.raises(ValueError, match="target depends on the order of the records"):
        dpjax.sample_sensitivity(key, first, uniform, n=N, norm="l1", m=100)


def test_row_5_asked_for_by_name_the_worst_position_counts(key):
    def first(database):
        return database[0]

    each = dpjax.sample_sensitivity(key, first, uniform, n=3, norm="l1", m=1000, positions="each")
    assert each.value > 0.5


def test_row_6_a_randomized_target_closes_over_one_key(key, keys):
    learner_key = keys(7)

    def noisy_mean(database):
        return jnp.mean(database) + jax.random.normal(learner_key)

    distances = dpjax.sample_distances(key, noisy_mean, uniform, n=N, norm="l1", m=200)
    assert distances.max() <= 1 / N + 1e-5
    private = dpjax.privatize(noisy_mean, dpjax.laplace(1e-6, 1.0))
    values = [float(private(keys(i), np.full(N, 0.5)).value) for i in (1, 2)]
    assert values == pytest.approx([float(noisy_mean(jnp.full(N, 0.5)))] * 2, abs=1e-4)


def test_row_7_integer_releases_leave_every_integer_possible(key):
    keys = jax.random.split(key, 5000)
    mechanism = dpjax.laplace(1.0, 1.0)
    here, there = (np.asarray(jax.vmap(lambda k, x=x: mechanism(k, x).value)(keys)) for x in (0, 1))
    assert here.dtype == "int32"
    np.testing.assert_array_equal(here + 1, there)


@pytest.mark.parametrize("noise", ["exact", "float"])
def test_row_7_float_releases_are_possible_from_a_neighbor(noise, key):
    keys = jax.random.split(key, 5000)
    mechanism = dpjax.laplace(1.0, 1.0, noise=noise)
    released = np.asarray(jax.vmap(lambda k: mechanism(k, 0.0).value)(keys), float)
    near = released[np.abs(released) < 0.5]
    # From the neighbor 1, a number near 0 is 1 + z for a float32 z below -1/2: a multiple of 2^-24.
    possible = near * 2**24 == np.rint(near * 2**24)
    assert np.all(possible) if noise == "exact" else np.mean(possible) < 0.7


def test_row_8_another_database_size_is_refused(sampled, key):
    private = dpjax.privatize(jnp.mean, dpjax.laplace(sampled, 1.0))
    with pytest.raises(ValueError, match=f"n={N} records, .* got 5"):
        private(key, np.zeros(5))


def test_row_9_a_sampled_sensitivity_has_its_gamma(sampled):
    assert sampled.gamma > 0
    guarantee = dpjax.laplace(sampled, 1.0).guarantee
    assert guarantee.gamma == sampled.gamma
    assert "-random DP" in repr(guarantee)
    with pytest.raises(TypeError):
        dpjax.Sensitivity(0.1)


def test_row_10_gamma_is_not_set_at_release(sampled, key):
    with pytest.raises(TypeError):
        dpjax.laplace(sampled, 1.0, gamma=0.01)
    with pytest.raises(TypeError):
        dpjax.laplace(sampled, 1.0)(key, 0.5, gamma=0.01)


def test_row_11_a_single_pair_is_refused_when_the_operating_point_is_made():
    with pytest.raises(ValueError, match="m"):
        dpjax.operating_point(m=1, method="dkw")
    with pytest.raises(ValueError, match="m"):
        dpjax.operating_point(m=1, gamma=0.05)


def test_row_12_another_shape_is_refused(sampled, key):
    mechanism = dpjax.laplace(sampled, 1.0)
    for value in (np.zeros(2), np.zeros((1,)), {"mean": 0.5}):
        with pytest.raises(
            ValueError, match="value must have the structure, shapes and dtypes of the sampled"
        ):
            mechanism(key, value)


def test_row_13_zero_sensitivity_is_refused_unless_meant(key):
    def constant(database):
        return 3.0 + 0 * jnp.sum(database)

    arguments = {"n": N, "norm": "l1", "m": 100}
    with pytest.raises(ValueError, match="estimated sensitivity is 0"):
        dpjax.sample_sensitivity(key, constant, uniform, **arguments)
    with pytest.raises(ValueError, match=r"sensitivity must be .* got 0"):
        dpjax.laplace(0.0, 1.0)
    meant = dpjax.assume_sensitivity(0.0, norm="l1", allow_zero=True)
    assert "no noise" in repr(dpjax.laplace(meant, 1.0)(key, 3.0).guarantee)


def test_row_14_bad_parameters_are_refused_with_their_value():
    for call, message in [
        (lambda: dpjax.laplace(1.0, math.inf), "epsilon must be .* got inf"),
        (lambda: dpjax.laplace(math.inf, 1.0), "sensitivity must be .* got inf"),
        (lambda: dpjax.bernstein(1.0, 1.0, degree=3, dims=-1), "dims must be .* got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="sensitivity must be"):
        dpjax.laplace(None, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dpjax.laplace(1.0, 1.0).epsilon = math.inf


def test_row_15_nan_counts_as_infinite_and_is_refused(key):
    distances = jnp.asarray([3.0, jnp.nan, 1.0, 2.0])
    assert [float(dpjax.order_statistic(distances, k)) for k in (3, 4)] == [3.0, math.inf]

    def sometimes_nan(database):
        return jnp.mean(jnp.log(database - 0.1))

    with pytest.raises(ValueError, match="estimated sensitivity is infinite"):
        dpjax.sample_sensitivity(key, sometimes_nan, uniform, n=N, norm="l1", m=100)


def test_row_16_vector_valued_functions_are_refused_or_get_a_polynomial_each(key):
    def vector(x):
        return jnp.stack([x[0], 10 * x[0]])

    with pytest.raises(ValueError, match="must return scalars"):
        dpjax.evaluate_on_lattice(lambda database: vector, degree=4, dims=1)(np.zeros(N))
    pair = dpjax.approximate_bernstein(lambda x: tuple(vector(x)), degree=4, dims=1)
    assert [float(polynomial([0.5])) for polynomial in pair] == pytest.approx([0.5, 5.0])


@pytest.mark.parametrize("n", [1, 2])
def test_row_17_databases_are_any_pytree_of_any_size(n, key):
    def oracle(key, n):
        u = jax.random.uniform(key, (n, 20))
        return {
            "image": u[:, :16].reshape(n, 4, 4),
            "flag": u[:, 16] > 0.5,
            "day": (20_000 * u[:, 17]).astype(int),  # Dates, as days.
            "nested": [u[:, 18], [u[:, 18:]]],
        }

    def target(database):
        return jax.tree.map(lambda leaf: jnp.sum(leaf.astype(float)), database)

    if n == 1:
        distances = dpjax.sample_distances(key, target, oracle, n=n, norm="l1", m=20)
        assert np.all(np.isfinite(distances))
        assert distances.min() > 0
    database = jax.tree.map(np.asarray, jax.jit(oracle, static_argnums=1)(key, n))
    release = dpjax.privatize(target, dpjax.laplace(1.0, 1.0))(key, database)
    assert jax.tree.structure(release.value) == jax.tree.structure(database)


def test_row_18_many_releases_are_one_compiled_call(sampled, key):
    traces = []

    @jax.jit
    def release(mechanism, keys):
        traces.append(1)
        return jax.vmap(lambda k: mechanism(k, jnp.asarray(0.5)))(keys)

    keys = jax.random.split(key, 10_000)
    for epsilon in (0.5, 1.0):
        batch = release(dpjax.laplace(sampled, epsilon), keys)
        assert len(set(batch.value.tolist())) > 8_900  # Of 10^4 draws on the grid.
    assert len(traces) == 1
