"""Posteriors from simulated databases, against sums that give them exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax import queries
from dpjax._core._values import Release
from tables import for_each

N, DRAWS = 40, 20_000
# Probabilities of a bank are wrong by normal errors: of 4.5 standard errors once in 150,000.
FURTHEST = 4.5


def bernoulli(key, share, n):
    return jax.random.bernoulli(key, share, (n,)).astype(jnp.int32)


def count(records):
    return jnp.sum(records, dtype=jnp.int32)


PRIVATE = dpjax.privatize(count, dpjax.laplace(1.0, epsilon=0.5))


def integer_laplace(difference, scale):
    """The probability that Laplace noise, rounded to an integer, is a difference."""
    at_zero = -np.expm1(-1 / (2 * scale))
    return np.where(
        difference == 0,
        at_zero,
        np.exp(-np.abs(difference) / scale) * np.sinh(1 / (2 * scale)),
    )


def exact_posterior(released, scale, n=N):
    """The distribution function of a share given a noisy count, under a uniform prior."""
    grid = (np.arange(2000) + 0.5) / 2000
    counts = np.arange(n + 1)
    likelihood = stats.binom.pmf(counts[:, None], n, grid) * integer_laplace(
        released - counts[:, None], scale
    )
    weights = likelihood.sum(axis=0)
    return grid, weights / weights.sum()


def error_of(posterior, grid, weights):
    """The largest error of the distribution function at quartiles, in standard errors."""
    below = np.cumsum(weights)
    worst = 0.0
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        at = grid[np.searchsorted(below, level)] + 0.5 / 2000
        exact = below[np.searchsorted(below, level)]
        found = posterior.weights[posterior.theta <= at].sum()
        worst = max(worst, abs(found - exact) / (0.5 / np.sqrt(posterior.effective_size)))
    return worst


@pytest.fixture(scope="module")
def bank(keys):
    return dpjax.simulation_bank(
        keys(1), PRIVATE, prior=jax.random.uniform, model=bernoulli, n=N, draws=DRAWS
    )


@pytest.mark.parametrize("released", [-3, 11, 44])
def test_a_noisy_count_has_the_posterior_of_the_sum(bank, released):
    posterior = bank.posterior(np.int32(released))
    scale = float(PRIVATE.mechanism.effective_scale(like=jnp.int32(0)))
    assert error_of(posterior, *exact_posterior(released, scale)) < FURTHEST
    # Power: another scale, and another number of people, are told from the truth.
    assert error_of(posterior, *exact_posterior(released, 4 * scale)) > FURTHEST
    assert error_of(posterior, *exact_posterior(released, scale, n=60)) > FURTHEST


def test_mean_and_interval_are_those_of_the_weighted_draws(bank):
    posterior = bank.posterior(np.int32(11))
    grid, weights = exact_posterior(11, float(PRIVATE.mechanism.effective_scale(like=jnp.int32(0))))
    mean = np.sum(grid * weights)
    assert posterior.mean == pytest.approx(mean, abs=0.005)
    low, high = posterior.interval(0.8)
    assert posterior.weights[(posterior.theta >= low) & (posterior.theta <= high)].sum() == (
        pytest.approx(0.8, abs=1e-3)
    )
    assert low == pytest.approx(grid[np.searchsorted(np.cumsum(weights), 0.1)], abs=0.02)
    assert posterior.weights.sum() == pytest.approx(1, abs=1e-5)


def test_a_posterior_prints_its_numbers_and_its_size(bank):
    text = repr(bank.posterior(np.int32(11)))
    assert text.startswith("Posterior(0.2")
    assert "(95%), effective size " in text
    assert text.endswith("of 20,000)")


def test_draws_become_a_table_and_functions_of_theta(bank):
    posterior = bank.posterior(np.int32(11))
    odds = posterior.predict(lambda share: {"odds": share / (1 - share), "pair": share[None] ** 2})
    frame = odds.to_frame()
    assert list(frame.columns) == ["odds", "pair_0", "weight"]
    np.testing.assert_allclose(frame.pair_0, posterior.theta**2, rtol=1e-6)
    assert odds.mean["odds"] == pytest.approx(np.sum(frame.odds * frame.weight), rel=1e-6)
    assert list(posterior.to_frame().columns) == ["theta", "weight"]


def test_equal_draws_for_other_libraries_have_the_weighted_averages(bank, keys):
    posterior = bank.posterior(np.int32(11)).predict(
        lambda x: {"share": x, "pair": x + jnp.ones(2)}
    )
    found = posterior.to_xarray(keys(5), draws=4000)
    assert found.pair.dims == ("chain", "draw", "pair_dim_0")
    assert found.share.shape == (1, 4000)
    spread = float(found.share.std())
    assert float(found.share.mean()) == pytest.approx(
        float(posterior.mean["share"]), abs=spread / 20
    )
    neighbors = np.corrcoef(found.share[0, 1:], found.share[0, :-1])[0, 1]
    assert abs(neighbors) < 4.5 / np.sqrt(4000)


@pytest.mark.slow
def test_arviz_summarizes_the_draws(bank, keys):
    """Its mean and spread are the posterior's, up to the error that it states itself."""
    arviz = pytest.importorskip("arviz")
    posterior = bank.posterior(np.int32(11)).predict(lambda x: {"pair": x * jnp.array([1.0, 2.0])})
    data = arviz.convert_to_inference_data(posterior.to_xarray(keys(5), draws=4000))
    found = arviz.summary(data, hdi_prob=0.95, round_to=None)
    assert list(found.index) == ["pair[0]", "pair[1]"]
    error = 4.5 * found["mcse_mean"].to_numpy()
    assert (np.abs(found["mean"].to_numpy() - posterior.mean["pair"]) < error).all()
    assert found["ess_bulk"].min() > 3000


def test_one_call_is_a_bank_and_its_posterior(bank, keys):
    release = Release(jnp.int32(11), PRIVATE.mechanism.guarantee)
    alone = dpjax.posterior(
        keys(1), release, PRIVATE, prior=jax.random.uniform, model=bernoulli, n=N, draws=DRAWS
    )
    np.testing.assert_array_equal(alone.weights, bank.posterior(release).weights)


def test_no_ledger_is_told(bank, keys, tmp_path):
    with dpjax.Ledger(tmp_path / "ledger", epsilon=1.0, delta=0.0) as ledger:
        dpjax.simulation_bank(
            keys(1), PRIVATE, prior=jax.random.uniform, model=bernoulli, n=N, draws=200
        )
        bank.posterior(np.int32(11))
        assert not ledger.history()


def test_an_interrupted_bank_goes_on_with_the_same_bits(bank, keys, tmp_path):
    def make(draws):
        return dpjax.simulation_bank(
            keys(1),
            PRIVATE,
            prior=jax.random.uniform,
            model=bernoulli,
            n=N,
            draws=draws,
            path=tmp_path / "bank",
            chunk_size=1024,
        )

    make(4096)
    whole = make(8192)
    np.testing.assert_array_equal(whole.theta[:8192], bank.theta[:8192])
    np.testing.assert_array_equal(whole.values[0], bank.values[0][:8192])


# What is weighed, for every kind of private function. theta is one of few values, so that sums give
# the exact posterior: P(theta | release) is proportional to the average of the density.
FEW = jnp.array([0.2, 0.5, 0.8])


def few(key):
    return jax.random.choice(key, FEW)


def shares_of(posterior):
    theta = np.asarray(posterior.theta)
    return np.array([posterior.weights[theta == np.float32(x)].sum() for x in FEW])


def exact_shares(n, density):
    """Of each theta, where `density` takes the number of ones to the density of the release."""
    counts = np.arange(n + 1)
    densities = np.array([density(c) for c in counts])
    found = np.array([np.sum(stats.binom.pmf(counts, n, x) * densities) for x in FEW])
    return found / found.sum()


def few_posterior(keys, release, private, **others):
    options = {"prior": few, "model": bernoulli, "n": N, "draws": 4000} | others
    return dpjax.posterior(keys(2), release, private, **options)


def agrees(posterior, exact):
    return np.max(np.abs(shares_of(posterior) - exact)) < FURTHEST * 0.5 / np.sqrt(
        posterior.effective_size
    )


def test_a_query_is_weighed_in_its_integers(keys):
    query = queries.sum_query(lower=0.0, upper=1.0, capacity=N)
    mechanism = dpjax.laplace(query.sensitivity(), epsilon=0.5)
    private = dpjax.privatize(query, mechanism)

    def model(key, share, n):
        return bernoulli(key, share, n).astype(jnp.float32)

    posterior = few_posterior(keys, jnp.float32(17.0), private, model=model)
    exact = exact_shares(N, lambda c: np.exp(-abs(17 - c) / mechanism.scale))
    assert agrees(posterior, exact)
    assert not agrees(posterior, exact_shares(N, lambda c: np.exp(-abs(28 - c) / 2)))


def test_a_selection_is_weighed_by_its_probability(keys):
    def scores(records):
        ones = count(records)
        return jnp.stack([ones, N - ones])

    mechanism = dpjax.exponential(1.0, epsilon=0.2)
    posterior = few_posterior(keys, jnp.int32(1), dpjax.privatize(scores, mechanism))

    def density(c):
        return 1 / (1 + np.exp(0.2 / 2 * (2 * c - N)))

    assert agrees(posterior, exact_shares(N, density))
    assert not agrees(posterior, exact_shares(N, lambda c: 1 - density(c)))


def test_answers_by_randomized_response_are_weighed_one_by_one(keys):
    mechanism = dpjax.randomized_response(1.0)
    reports = jnp.array([1, 1, 0, 1, 0], jnp.int32)
    private = dpjax.privatize(lambda answers: answers, mechanism)
    posterior = few_posterior(keys, reports, private, n=5)
    truth = np.e / (1 + np.e)
    one = np.array(FEW) * truth + (1 - np.array(FEW)) * (1 - truth)
    exact = one**3 * (1 - one) ** 2
    assert agrees(posterior, exact / exact.sum())


def test_several_releases_about_one_database_are_weighed_together(keys):
    twice = [PRIVATE, dpjax.privatize(lambda x: N - count(x), dpjax.laplace(1.0, epsilon=1.0))]
    released = [jnp.int32(12), jnp.int32(30)]
    posterior = few_posterior(keys, released, twice)

    def density(c):
        return np.exp(-abs(12 - c) / 2 - abs(30 - (N - c)))

    assert agrees(posterior, exact_shares(N, density))
    assert not agrees(posterior, exact_shares(N, lambda c: np.exp(-abs(12 - c) / 2)))


def test_a_release_that_a_ledger_repeats_does_not_count_twice(keys):
    """Two draws may be equal by chance: then their values are given, and count as two."""
    bank = dpjax.simulation_bank(
        keys(1), [PRIVATE, PRIVATE], prior=jax.random.uniform, model=bernoulli, n=N, draws=2000
    )
    database = bernoulli(jax.random.key(0), 0.4, N)
    release, same, other = (PRIVATE(keys(i), database) for i in (2, 2, 3))
    assert int(release.value) == int(same.value) != int(other.value)
    for twice in ([release, release], [release, same]):
        with pytest.raises(
            ValueError, match=r"release\[0\] and release\[1\] have equal numbers, but must be"
        ):
            bank.posterior(twice)
    assert bank.posterior([release, other]).effective_size > 100
    assert bank.posterior([release.value, same.value]).effective_size > 100
    with pytest.raises(ValueError, match="must be two draws"):
        dpjax.confidence_set(
            keys(4), [release, same], [PRIVATE, PRIVATE], model=bernoulli, n=N, bounds=(0.0, 1.0)
        )


def test_a_sampled_sensitivity_counts_as_any_other(keys):
    """The posterior is that of the noise that was drawn; the guarantee of the release stays."""

    def mean(records):
        return jnp.mean(records.astype(float))

    sampled = dpjax.sample_sensitivity(
        keys(3), mean, lambda key, n: bernoulli(key, 0.5, n), n=N, m=1000, gamma=0.02, norm="l1"
    )
    privates = [
        dpjax.privatize(mean, dpjax.laplace(sensitivity, epsilon=1.0))
        for sensitivity in (sampled, float(sampled.value))
    ]
    release = privates[0](keys(5), bernoulli(jax.random.key(3), 0.5, N))
    assert release.guarantee.gamma == 0.02
    found = [
        dpjax.posterior(
            keys(6), release.value, one, prior=jax.random.uniform, model=bernoulli, n=N, draws=5000
        )
        for one in privates
    ]
    np.testing.assert_allclose(found[0].weights, found[1].weights, rtol=1e-4, atol=1e-9)
    assert release.guarantee.gamma == 0.02


def test_numbers_that_no_release_holds_are_refused(bank, keys):
    """Also whole numbers that would wrap around in the integers of the release."""
    for number in (2**32 + 12, np.nan, np.inf, -np.inf, 1e12, np.float32(2.0**31), 12.5):
        with pytest.raises(ValueError, match="release must be like"):
            bank.posterior(number)
        with pytest.raises(ValueError, match="release must be like"):
            dpjax.confidence_set(keys(4), number, PRIVATE, model=bernoulli, n=N, bounds=(0.0, 1.0))
    zeros = [bank.posterior(x).weights for x in (0.0, -0.0)]
    np.testing.assert_array_equal(*zeros)
    mean = dpjax.privatize(lambda x: jnp.mean(x.astype(float)), dpjax.laplace(1 / N, 1.0))
    of_floats = dpjax.simulation_bank(
        keys(1), mean, prior=jax.random.uniform, model=bernoulli, n=N, draws=500
    )
    with pytest.raises(ValueError, match="release must not be NaN"):
        of_floats.posterior(np.nan)
    for number in (np.inf, -np.inf, 1e38):
        with pytest.raises(ValueError, match="none of the 500 simulated databases"):
            of_floats.posterior(number)


def test_a_private_number_of_records_is_a_part_of_theta(keys):
    counting = queries.counting_query()
    relation = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    mechanism = dpjax.laplace(counting.sensitivity(relation=relation), epsilon=1.0)

    def prior(key):
        return {"n": jax.random.randint(key, (), 0, 51)}

    posterior = few_posterior(
        keys,
        jnp.int32(48),
        dpjax.privatize(counting, mechanism),
        prior=prior,
        model=lambda key, theta, n: jnp.zeros(n),
        n=lambda theta: theta["n"],
        capacity=50,
    )
    exact = integer_laplace(48 - np.arange(51), float(mechanism.effective_scale(like=jnp.int32(0))))
    exact /= exact.sum()
    n = np.asarray(posterior.theta["n"])
    found = np.array([posterior.weights[n == x].sum() for x in range(51)])
    assert np.max(np.abs(found - exact)) < FURTHEST * 0.5 / np.sqrt(posterior.effective_size)


def test_nan_and_values_out_of_range_count_as_what_is_released_instead(keys):
    """Where there are more than 20 ones, the target is NaN, which a release takes for 0."""
    private = dpjax.privatize(
        lambda x: jnp.where(count(x) > 20, jnp.nan, count(x).astype(float)),
        dpjax.laplace(1.0, epsilon=0.5),
    )
    posterior = few_posterior(keys, jnp.float32(2.0), private)
    exact = exact_shares(N, lambda c: np.exp(-abs(2.0 - (c if c <= 20 else 0)) / 2))
    assert agrees(posterior, exact)
    assert exact[2] > 0.4  # It is the likeliest explanation.


def failing(records):
    ones = int(np.sum(records))
    if ones > 20:
        raise ValueError("too many")
    return np.float32(ones)


def test_a_host_program_fails_as_in_a_release(keys):
    target = dpjax.targets.host(
        failing, output=jax.ShapeDtypeStruct((), jnp.float32), failure=jnp.float32(-5.0), jobs=1
    )
    private = dpjax.privatize(target, dpjax.laplace(1.0, epsilon=0.5))
    posterior = few_posterior(keys, jnp.float32(-4.0), private, draws=1000)
    exact = exact_shares(N, lambda c: np.exp(-abs(-4.0 - (c if c <= 20 else -5.0)) / 2))
    assert agrees(posterior, exact)


# Refusals, which are about public facts.

PLAIN = {"prior": jax.random.uniform, "model": bernoulli, "n": N, "draws": 200}
REFUSED = {
    "a plain function": (count, {}, TypeError, "dpjax.privatize"),
    "no private function": ([], {}, ValueError, "private must contain at least one"),
    "n beyond the capacity": (PRIVATE, {"capacity": N - 1}, ValueError, "n must be"),
    "a private n without capacity": (PRIVATE, {"n": lambda x: x}, ValueError, "capacity must be"),
    "few draws": (PRIVATE, {"draws": 10}, ValueError, "draws must be"),
    "a model of other sizes": (
        PRIVATE,
        {"model": lambda key, share, n: jnp.zeros(3, jnp.int32)},
        ValueError,
        "model must return arrays whose leading axis",
    ),
    "a prior of texts": (PRIVATE, {"prior": lambda key: "a"}, TypeError, "theta must "),
}


@for_each("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name, keys):
    private, changed, kind, told = REFUSED[name]
    with pytest.raises(kind, match=told):
        dpjax.simulation_bank(keys(1), private, **(PLAIN | changed))


@for_each("release", [jnp.zeros(2, jnp.int32), jnp.float32(0.5), {"a": jnp.int32(1)}, [1, 2]])
def test_a_release_of_something_else_is_refused(release, bank):
    with pytest.raises(ValueError, match="release must be"):
        bank.posterior(release)


def test_few_draws_near_the_release_are_refused_with_the_remedy(keys):
    sharp = dpjax.privatize(lambda x: jnp.mean(x.astype(float)), dpjax.laplace(1 / N, epsilon=50.0))
    fine = dpjax.simulation_bank(
        keys(1), sharp, prior=jax.random.uniform, model=bernoulli, n=N, draws=1000
    )
    with pytest.raises(
        ValueError, match=r"effective size must be at least 100.*tempered.*or for about"
    ):
        fine.posterior(jnp.float32(0.25))
    with pytest.raises(ValueError, match="none of the 1,000 simulated databases"):
        fine.posterior(jnp.float32(3e38))


def test_a_prior_that_draws_nan_is_refused():
    """Its quantiles would be those of the other draws, or NaN."""

    def prior(key):
        share = jax.random.uniform(key)
        return {"share": share, "odds": jnp.where(share > 0.5, jnp.nan, share)}

    with pytest.raises(
        ValueError, match=r"prior must draw parameters without NaN, got NaN for \['odds'\]"
    ):
        dpjax.posterior(
            dpjax.random.seeded_key(0),
            jnp.int32(10),
            PRIVATE,
            prior=prior,
            model=lambda key, theta, n: bernoulli(key, theta["share"], n),
            n=N,
            draws=2000,
        )
