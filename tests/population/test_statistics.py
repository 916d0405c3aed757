"""Posteriors given private statistics and statistics of private tables, against exact sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax import queries
from dpjax.population._laws import _simulated
from dpjax.random import seeded_key
from tables import for_each

N, DRAWS = 40, 4000
FURTHEST = 4.5  # Standard errors: a right probability is that far off once in 150,000.
FEW = jnp.array([0.2, 0.5, 0.8])
WARDS = queries.texts(["A", "B"])


def few(key):
    return jax.random.choice(key, FEW)


def ones(key, share, n):
    return jax.random.bernoulli(key, share, (n,)).astype(jnp.int32)


def agrees(posterior, density, n=N):
    """Whether the shares of the three values are those of a sum over the number of ones."""
    counts = np.arange(n + 1)
    densities = np.array([density(c) for c in counts])
    exact = np.array([np.sum(stats.binom.pmf(counts, n, x) * densities) for x in FEW])
    theta = np.asarray(posterior.theta)
    found = np.array([posterior.weights[theta == np.float32(x)].sum() for x in FEW])
    off = np.max(np.abs(found - exact / exact.sum()))
    return off < FURTHEST * 0.5 / np.sqrt(posterior.effective_size)


def posterior(release, private, **others):
    options = {"prior": few, "model": ones, "n": N, "draws": DRAWS} | others
    return dpjax.posterior(seeded_key(2), release, private, **options)


MEAN = functools.partial(queries.private_mean, lower=0, upper=1, epsilon=0.5)


def test_a_private_mean_is_weighed_by_its_noisy_sum():
    release = MEAN(seeded_key(3), ones(jax.random.key(0), 0.4, N))
    found = posterior(release, MEAN)
    noisy = float(release.accuracy.measured["sums"][1]) * release.accuracy.facts["unit"]

    def density(c, epsilon=0.5):
        return np.exp(-epsilon * abs(noisy - (c - N / 2)))

    assert agrees(found, density)
    assert not agrees(found, lambda c: density(c, epsilon=0.1))
    assert not agrees(found, lambda c: density(c + 6))


def table(rows):
    return dpjax.PrivateTable(rows, most_rows=N + 5)


def by_ward(key, rows):
    return table(rows).count(by={"ward": ["A", "B"]}, epsilon=0.5, key=key)


def in_b(key, rows):
    return table(rows).count(where=lambda row: row["ward"] == "B", epsilon=0.5, key=key)


def in_wards(key, share, n):
    return {"ward": WARDS[ones(key, share, n)]}


def test_several_counts_of_a_table_are_weighed_jointly():
    asks = [by_ward, in_b]
    people = {"ward": np.where(np.arange(N) % 3 == 0, "B", "A")}
    releases = [ask(seeded_key(i), people) for i, ask in enumerate(asks)]
    found = posterior(releases, asks, model=in_wards)
    (a, b), again = np.asarray(releases[0].value), int(releases[1].value)

    def density(c):
        return np.exp(-0.5 * (abs(a - (N - c)) + abs(b - c) + abs(again - c)))

    assert agrees(found, density)
    assert not agrees(found, lambda c: np.exp(-0.5 * abs(b - c)))


def test_a_private_number_of_rows_is_a_part_of_theta():
    """Rows that are absent count in no statistic of a simulated table."""
    release = in_b(seeded_key(1), {"ward": np.full(30, "B")})
    found = posterior(
        release,
        in_b,
        prior=lambda key: {"n": jax.random.randint(key, (), 0, N + 1)},
        model=lambda key, theta, n: {"ward": WARDS[jnp.ones(n, jnp.int32)]},
        n=lambda theta: theta["n"],
        capacity=N,
    )
    exact = np.exp(-0.5 * abs(int(release.value) - np.arange(N + 1)))
    n = np.asarray(found.theta["n"])
    shares = np.array([found.weights[n == x].sum() for x in range(N + 1)])
    off = np.max(np.abs(shares - exact / exact.sum()))
    assert off < FURTHEST * 0.5 / np.sqrt(found.effective_size)


ROWS = {
    "ward": WARDS[jnp.arange(N) % 2],
    "code": jnp.arange(N) % 3,
    "x": jnp.where(jnp.arange(N) < 5, jnp.nan, jnp.linspace(0, 1.2, N)),
    "y": jnp.linspace(-1, 1, N) ** 2,
}
BOUNDS = {"x": (0, 1), "y": (0, 1)}
# Statistics of a table; the arguments go to its methods.
STATISTICS = {
    "count": {"where": lambda row: (row["x"] > 0.3) & (row["ward"] == "A")},
    "count by numbers": {"by": {"code": [2, 0]}},
    "histogram": {"column": "x", "buckets": [0, 0.5, 1.0]},
    "sum": {"column": "y", "bounds": (0, 0.7)},
    "mean": {"column": "x", "bounds": (0, 1), "by": {"ward": ["B", "A"]}},
    "variance": {"column": "x", "bounds": (0, 1)},
    "quantiles": {"column": "x", "probabilities": [0.5], "bounds": (0, 1)},
    "covariance": {"columns": ["x", "y"], "bounds": BOUNDS},
    "regression": {"y": "y", "x": ["x"], "bounds": BOUNDS},
}


@for_each("name", STATISTICS)
def test_a_simulated_table_has_the_bits_of_a_private_one(name):
    def ask(key, rows):
        given = dpjax.PrivateTable(rows, most_rows=N + 5)
        return getattr(given, name.split()[0])(**STATISTICS[name], epsilon=1.0, key=key)

    people = ROWS | {"ward": np.where(np.arange(N) % 2 == 1, "B", "A")}
    padded = queries.PaddedRecords(
        jax.tree.map(lambda x: jnp.concatenate([x, x[:3]]), ROWS), jnp.arange(N + 3) < N
    )
    exact = _simulated(ask, people)[1]
    traced = jax.jit(lambda rows: [_simulated(ask, x)[1] for x in rows])([ROWS, padded])
    np.testing.assert_array_equal(exact, traced[0])
    np.testing.assert_array_equal(exact, traced[1])


def rounded(key, records):
    return dpjax.accounting.post_process(COUNT(key, records), lambda x: jnp.maximum(x, 0))


def twice(key, records):
    MEAN(key, records)
    return MEAN(key, records)


def of_numbers(key, records):
    return COUNT(key, np.asarray(records))


COUNT = dpjax.privatize(lambda x: jnp.sum(x, dtype=jnp.int32), dpjax.laplace(1.0, epsilon=0.5))
OTHER = dpjax.privatize(lambda x: jnp.sum(x, dtype=jnp.int32), dpjax.laplace(1.0, epsilon=1.0))
REFUSED = {
    "other bounds": (MEAN, functools.partial(MEAN, upper=2), {}, ValueError, "upper=2.0, got"),
    "another epsilon": (MEAN, functools.partial(MEAN, epsilon=1.0), {}, ValueError, "scale"),
    "another epsilon of a target": (COUNT, OTHER, {}, ValueError, "simulated releases of <lambda>"),
    "another n": (MEAN, MEAN, {"n": N + 1}, ValueError, r"n=41\.0, got n=40\.0"),
    "another kind": (MEAN, COUNT, {}, ValueError, "the kind"),
    "a value that lost the noisy numbers": (COUNT, rounded, {}, TypeError, "computed from them"),
    "two draws": (MEAN, twice, {}, TypeError, "draws 2"),
    "numbers of a simulated database": (
        COUNT,
        of_numbers,
        {},
        TypeError,
        "reads the values of traced arrays",
    ),
    "no draw": (COUNT, lambda key, x: x, {}, TypeError, "draws no noise"),
    "a mechanism alone": (
        COUNT,
        lambda key, x: OTHER.mechanism(key, jnp.sum(x, dtype=jnp.int32)),
        {},
        TypeError,
        "not known",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_of_another_function_is_refused(name):
    """Otherwise the posterior would be wrong, and its interval as confident as ever."""
    maker, private, others, kind, told = REFUSED[name]
    release = maker(seeded_key(3), ones(jax.random.key(0), 0.4, N))
    # A refusal for another reason, such as too few draws, has other words.
    with pytest.raises((TypeError, ValueError), match=told) as refused:
        posterior(release, private, draws=200, **others)
    assert refused.type is kind


def test_a_release_that_the_model_cannot_explain_is_refused():
    """With 40 people, a count of 90 would need noise that is drawn once in e^25 times."""
    with pytest.raises(ValueError, match="must be near a simulated one"):
        posterior(jnp.int32(90), COUNT)
    posterior(jnp.int32(55), COUNT)


def test_simulations_tell_no_ledger_and_draw_nothing_private(tmp_path):
    people = {"ward": np.full(N, "B")}
    with dpjax.Ledger(tmp_path / "ledger", epsilon=1.0, delta=0.0) as ledger:

        def ask(key, rows):
            given = dpjax.PrivateTable(rows, most_rows=N + 5, ledger=ledger, name="people")
            return given.count(by={"ward": ["A", "B"]}, epsilon=0.5, key=key)

        release = ask(seeded_key(1), people)
        posterior(release, ask, model=in_wards)
        assert len(ledger.history()) == 1
