"""Means, moments, regression and clusters: how far a record moves them, and what is released."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import NeighboringRelation, queries
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.queries import _k_means, _second_moments, _sums
from dpjax.queries._second_moments import (
    averages,
    in_ball,
    radius_bits_for,
    second_moments_query,
)

REPLACE, ADD = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE
ORDS = {"l1": 1, "l2": 2, "linf": np.inf}
RADIUS = 2**20
both_relations = pytest.mark.parametrize("relation", [REPLACE, ADD], ids=str)


def ball(dimension):
    """Vectors at the border of the unit ball, within it and far out of it, and strange ones."""
    generator = np.random.default_rng(dimension)
    directions = generator.normal(size=(60, dimension))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    corners = np.concatenate([np.eye(dimension), -np.eye(dimension)])
    equal = np.ones((1, dimension)) / dimension**0.5
    first, last = np.eye(dimension)[0], np.eye(dimension)[-1]
    turned = [-0.5 * first + 0.75**0.5 * last, (first + last) / 2**0.5, (first - last) / 2**0.5]
    found = [directions, 0.5 * directions, 1e30 * directions, corners, -corners / 2, equal, -equal]
    ugly = [np.full(dimension, x) for x in (np.nan, np.inf, 3e38, 1e-45)]
    return np.concatenate([*found, turned, ugly]).astype("float32")


def distances(values, order):
    return np.linalg.norm(values[:, None] - values[None], order, axis=2)


@pytest.fixture(scope="module")
def placed():
    """Records of the ball as integers, by dimension."""
    clip = jax.jit(in_ball)
    return {d: np.asarray(clip(ball(d), jnp.ones(len(ball(d)), bool))) for d in (1, 3)}


@pytest.mark.parametrize("dimension", [1, 3])
def test_clipped_vectors_are_in_the_ball_and_keep_their_direction(placed, dimension):
    x, units = ball(dimension).astype(float), placed[dimension].astype(np.int64)
    assert (units**2).sum(axis=1).max() <= RADIUS**2
    finite = np.isfinite(x).all(axis=1)
    assert not units[~finite].any()
    length = np.linalg.norm(x, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        clipped = np.where(length > 1, x / length, x)
    # The margin, and the rounding of float32.
    assert np.abs(units / RADIUS - clipped)[finite].max() < 30 / RADIUS
    assert np.linalg.norm(units, axis=1).max() > (1 - 2.0**-14) * RADIUS


@pytest.mark.parametrize("dimension", [1, 3])
def test_no_record_moves_the_moments_further(placed, dimension):
    """What one record adds, in integers before they are rounded, is enumerated."""
    query = second_moments_query(lambda x: x, dims=dimension, capacity=2**14)
    z = np.concatenate([np.full((len(placed[dimension]), 1), RADIUS), placed[dimension]], axis=1)
    upper = np.triu_indices(1 + dimension)
    products = (z[:, :, None] * z[:, None])[:, upper[0], upper[1]] / RADIUS**2
    # How much of the bound is attained, in the order of the norms.
    attained = {REPLACE: {1: (0.88, 0.99, 0.99), 3: (0.7, 0.97, 0.99)}, ADD: {}}
    for i, (norm, order) in enumerate(ORDS.items()):
        for relation, moved in (
            (REPLACE, distances(products, order)),
            (ADD, np.linalg.norm(products, order, axis=1)),
        ):
            reach = query.sensitivity(norm, relation=relation).value * query.unit
            assert moved.max() <= reach
            least = attained[relation].get(dimension, (0.99, 0.99, 0.99))[i]
            assert moved.max() >= least * reach, (norm, relation)


def triangle_of(vectors):
    """The upper triangles of (1, x) (1, x)^T."""
    z = np.concatenate([np.ones((*vectors.shape[:-1], 1)), vectors], axis=-1)
    rows, columns = np.triu_indices(z.shape[-1])
    return z[..., rows] * z[..., columns]


@pytest.mark.parametrize("dimension", [1, 2, 3, 8])
def test_no_search_finds_records_that_move_the_moments_further(dimension):
    """Hill climbing on pairs of vectors in the ball, many at once, in each norm."""
    query = second_moments_query(lambda x: x, dims=dimension, capacity=1)
    generator = np.random.default_rng(dimension)
    # At least so much of the bound is found, under replace-one in l1, l2 and linf.
    least = {1: (0.99, 0.99, 0.99), 2: (0.97, 0.97, 0.99), 3: (0.85, 0.97, 0.99)}

    def moved(pairs, order):
        into = pairs / np.maximum(1, np.linalg.norm(pairs, axis=-1, keepdims=True))
        values = triangle_of(into)
        return np.linalg.norm(values[:, 0] - values[:, 1], order, axis=-1)

    for i, (norm, order) in enumerate(ORDS.items()):
        pairs = generator.normal(size=(200, 2, dimension))
        best = moved(pairs, order)
        for _ in range(400):
            scale = 10.0 ** generator.uniform(-3, 0, (len(pairs), 1, 1))
            tried = pairs + scale * generator.normal(size=pairs.shape)
            found = moved(tried, order)
            better = found > best
            pairs = np.where(better[:, None, None], tried, pairs)
            best = np.where(better, found, best)
        reach = query.sensitivity(norm).value * query.unit
        part = best.max() / reach
        assert least.get(dimension, (0.4, 0.9, 0.95))[i] <= part <= 1


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_no_search_finds_records_that_move_a_line_further(dims):
    """Hill climbing on pairs of records (x, y), many at once, in each norm; many are clipped.

    The integers of the records that were found agree with the search, and keep the bounds as well.
    """
    query = _second_moments._line_query(lambda r: (r[:, :-1], r[:, -1:]), dims=dims, capacity=1)
    generator = np.random.default_rng(dims)
    total = jax.jit(jax.vmap(lambda record: query.of_present(record[None], jnp.ones(1, bool))))
    rows, columns = (entries[:-1] for entries in np.triu_indices(2 + dims))
    # At least so much of the bound is found, in l1, l2 and linf.
    least = {1: (0.99, 0.99, 0.98), 2: (0.85, 0.98, 0.98), 3: (0.85, 0.98, 0.98)}[dims]

    def values(records):
        x, y = records[..., :-1], np.clip(records[..., -1:], -1, 1)
        x = x / np.maximum(1, np.linalg.norm(x, axis=-1, keepdims=True))
        z = np.concatenate([np.full_like(y, 0.75), x, y], axis=-1)
        return z[..., rows] * z[..., columns]

    for i, (norm, order) in enumerate(ORDS.items()):
        pairs, best = generator.normal(size=(300, 2, 1 + dims)), np.zeros(300)
        for _ in range(300):
            scale = 10.0 ** generator.uniform(-3, 0.5, (len(pairs), 1, 1))
            tried = pairs + scale * generator.normal(size=pairs.shape)
            moved = values(tried[:, 0]) - values(tried[:, 1])
            found = np.linalg.norm(moved, order, axis=1)
            better = found > best
            pairs, best = np.where(better[:, None, None], tried, pairs), np.maximum(best, found)
        reach = query.sensitivity(norm).value * query.unit
        assert least[i] <= best.max() / reach <= 1
        exact = np.asarray(total(pairs.reshape(-1, 1 + dims).astype("float32")), float) * query.unit
        np.testing.assert_allclose(exact, values(pairs.reshape(-1, 1 + dims)), atol=1e-4)
        moved = np.linalg.norm(exact[::2] - exact[1::2], order, axis=1).max()
        added = np.linalg.norm(exact, order, axis=1).max()
        assert least[i] <= moved / reach <= 1
        assert added <= query.sensitivity(norm, relation=ADD).value * query.unit


@pytest.mark.parametrize("capacity", [1, 2**14, 10**6, 2**22, 2**22 + 1, 10**8, 2**31 - 1])
def test_totals_of_any_number_of_records_fit(capacity):
    """In 64 bits, and after rounding in 31, with room for noise of 2^14 times the sensitivity."""
    products = capacity * 4 ** radius_bits_for(capacity)
    assert products <= 2**62
    query = second_moments_query(lambda x: x, dims=2, capacity=capacity)
    assert capacity <= 2**30 * query.unit
    assert query.sensitivity("l2").value <= 2**18
    assert capacity > 2**22 or radius_bits_for(capacity) == 20
    for half in (1e-3, 1.0, 7.7):
        query = _sums.centered_sums(-half, half, capacity, 1)
        assert half * capacity <= 2**30 * query.unit
        query = _sums.centered_sums(-half, half, capacity, 1, from_ends=True)
        assert 2 * half * capacity <= 2**30 * query.unit


@pytest.mark.slow
def test_integers_are_the_same_with_float64(triangles):
    query, values, _ = triangles
    shared = np.random.default_rng(5).normal(size=(2, 3)).astype("float32") / 3
    for i in (0, 70, 130):
        rows = jnp.asarray(np.concatenate([shared, ball(3)[[i]]]))
        with jax.enable_x64(True):
            np.testing.assert_array_equal(query(rows), values[i])


@pytest.mark.slow
def test_no_record_moves_the_moments_of_many_further():
    """2^23 squares of 40 bits are 2^63, where 64 bits end."""
    n = 2**23
    query = second_moments_query(lambda x: x[:, None], dims=1, capacity=n + 1)
    total = jax.jit(lambda n: query.of_present(jnp.ones(2**23 + 1), jnp.arange(2**23 + 1) < n))
    values = [np.asarray(total(count), np.int64) for count in (n - 1, n, n + 1)]
    reach = query.sensitivity("linf", relation=ADD).value
    for before, after in itertools.pairwise(values):
        assert np.abs(after - before).max() <= reach
    np.testing.assert_allclose(query.unit * values[-1] / n, 1, rtol=1e-4)


@pytest.fixture(scope="module")
def triangles():
    """Released values for all databases of two shared records and one that changes."""
    query = second_moments_query(lambda x: x, dims=3, capacity=3)
    records, shared = ball(3), np.random.default_rng(5).normal(size=(2, 3)).astype("float32") / 3

    def value(record, present):
        rows = jnp.concatenate([jnp.asarray(shared), record[None]])
        return query(queries.PaddedRecords(rows, jnp.array([True, True, present])))

    values = jax.jit(jax.vmap(value, in_axes=(0, None)))
    return query, *(np.asarray(values(records, present), np.int64) for present in (True, False))


@pytest.mark.parametrize("norm", ORDS)
def test_no_record_moves_what_gets_noise_further(triangles, norm):
    """So no entry of the covariance is there twice."""
    query, values, without = triangles
    order = ORDS[norm]
    assert values.shape[1:] == query.shape == (10,)
    assert distances(values, order).max() <= query.sensitivity(norm).value
    moved = np.linalg.norm(values - without, order, axis=1)
    assert moved.max() <= query.sensitivity(norm, relation=ADD).value


@pytest.mark.parametrize(("coordinates", "from_ends"), [(1, False), (3, False), (1, True)])
def test_no_record_moves_count_and_sums_further(coordinates, from_ends):
    low, high = -2.0, 5.0
    query = _sums.centered_sums(low, high, 3, coordinates, from_ends)
    records = np.random.default_rng(0).choice(
        np.float32([low, high, 1.5, np.nan, 1e38, -np.inf]), (300, coordinates)
    )
    records[0], records[1] = low, high

    def value(record, present):
        rows = jnp.stack([jnp.full(coordinates, 2.3), jnp.full(coordinates, -1.1), record])
        return query.of_present(rows, jnp.array([True, True, present]))

    values = jax.jit(jax.vmap(value, in_axes=(0, None)))
    with_it, without = (np.asarray(values(records, x), np.int64) for x in (True, False))
    for norm, order in ORDS.items():
        found = (
            distances(with_it, order).max(),
            np.linalg.norm(with_it - without, order, axis=1).max(),
        )
        for relation, moved in zip((REPLACE, ADD), found, strict=True):
            reach = query.sensitivity(norm, relation=relation).value
            assert (1 - 2.0**-14) * reach <= moved <= reach


def padded_if(relation, database, capacity=700):
    if relation is REPLACE:
        return jax.tree.map(jnp.asarray, database)
    return queries.padded_records(database, capacity=capacity)


@pytest.fixture(scope="module")
def records():
    """500 correlated vectors and their labels."""
    generator = np.random.default_rng(0)
    x = 0.2 * generator.normal(size=(500, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0], [0.3, 0, 0.4]])
    return x.astype("float32"), (x @ [1, -2, 0.5] + 0.3).astype("float32")


@pytest.mark.slow
@both_relations
def test_without_noise_statistics_are_those_of_numpy(key, records, relation):
    """An epsilon at which there is next to none."""
    x, y = records
    budget = {"epsilon": 1e5, "relation": relation}
    numbers, vectors = padded_if(relation, x[:, 0]), padded_if(relation, x)

    found = queries.private_mean(key, vectors, lower=-1, upper=2, **budget)
    np.testing.assert_allclose(found.value, x.mean(axis=0), atol=3e-4)
    found = queries.private_variance(key, numbers, lower=-1, upper=2, **budget)
    assert float(found.value["mean"]) == pytest.approx(x[:, 0].mean(), abs=3e-4)
    assert float(found.value["variance"]) == pytest.approx(x[:, 0].var(), abs=3e-4)
    center = np.array([0.1, -0.1, 0.2])
    found = queries.private_pca(key, vectors, components=2, radius=2.0, center=center, **budget)
    values, eigenvectors = np.linalg.eigh(np.cov(x.T, bias=True))
    np.testing.assert_allclose(found.value["variances"], values[:0:-1], atol=1e-3)
    cosines = np.abs(np.asarray(found.value["components"]) @ eigenvectors[:, :0:-1])
    np.testing.assert_allclose(cosines, np.eye(2), atol=0.05)
    both = padded_if(relation, {"x": x, "y": y})
    found = queries.private_linear_regression(key, both, x_radius=1.5, y_radius=2.0, **budget)
    np.testing.assert_allclose(found.value["weights"], [1, -2, 0.5], atol=0.03)
    assert float(found.value["intercept"]) == pytest.approx(0.3, abs=0.01)
    assert found.guarantee.epsilon == 1e5
    assert found.guarantee.relation is relation


@pytest.mark.slow
def test_the_covariance_has_each_entry_twice_and_noise_once(key, records):
    x, _ = records
    release = queries.private_covariance(key, x, radius=2.0, epsilon=1.0, delta=1e-6)
    covariance = np.asarray(release.value["covariance"])
    np.testing.assert_array_equal(covariance, covariance.T)
    sigma = 4 * 4.5**0.5 * 4.2248 / 500  # radius^2 * reach * the multiplier at (1, 1e-6), over n
    assert 0.1 * sigma < np.abs(covariance - np.cov(x.T, bias=True)).max() < 4 * sigma
    assert str(release.guarantee) == "(epsilon=1, delta=1e-06)-DP, under replace-one, seeded key"


@pytest.mark.slow
@both_relations
def test_averages_are_as_near_as_they_say(relation):
    """Of 400 averages 40 may be further away; 4 deviations are 24."""
    n, epsilon, beta = 500, 0.2, 0.1
    database = padded_if(relation, np.linspace(0, 1, n, dtype="float32"), capacity=500)
    query = _sums.centered_sums(0.0, 1.0, 500, 1)
    mechanism = dpjax.laplace(query.sensitivity(relation=relation), epsilon)
    keys = jax.random.split(dpjax.random.seeded_key(3), 400)
    totals = query(database)
    noisy = jax.jit(jax.vmap(lambda key: mechanism(key, totals).value))(keys)
    weight, sums = np.asarray(noisy, float).T
    half = 0.5 / query.unit
    count = n if relation is REPLACE else weight / half
    errors = np.abs(0.5 + sums / half / 2 / count - 0.5)
    if relation is REPLACE:
        allowed = np.log(1 / beta) / (epsilon * n)
    else:
        e = 2 * np.log(2 / beta) / epsilon
        allowed = e / (n - e)
    assert (errors > allowed).sum() < 64
    assert (errors > allowed / 4).sum() > 40  # It is not far too large.


@both_relations
def test_an_average_of_an_interval_of_any_length_is_as_accurate(key, relation):
    """Scaling by a power of two is exact, and noise in units of the interval stays the same."""

    def average(scale):
        database = padded_if(relation, scale * np.linspace(0, 1, 500, dtype="float32"))
        terms = {"lower": 0, "upper": scale, "epsilon": 1.0, "relation": relation}
        return float(queries.private_mean(key, database, **terms).value) / scale

    assert average(2.0**-70) == average(1.0) == average(2.0**70) == pytest.approx(0.5, abs=0.05)


def test_the_number_of_records_decides_nothing_where_it_is_private(key):
    for n in (0, 1, 4):
        numbers = queries.padded_records(np.ones(n, "float32"), capacity=4)
        release = queries.private_mean(key, numbers, lower=0, upper=2, epsilon=1.0, relation=ADD)
        assert 0 <= float(release.value) <= 2
        assert release.guarantee.relation is ADD
    with pytest.raises(ValueError, match="padded_records"):
        queries.private_mean(key, np.ones(4), lower=0, upper=2, epsilon=1.0, relation=ADD)


def test_an_empty_slot_is_no_record_where_the_number_of_records_is_public(key):
    numbers = np.float32([0.5, 1.5, 0.25])
    of = {"lower": 0, "upper": 2, "epsilon": 1e5, "relation": REPLACE, "missing": "lower"}
    for database in (numbers, queries.padded_records(numbers, capacity=6)):
        release = queries.private_mean(key, database, **of)
        assert float(release.value) == pytest.approx(0.75, abs=1e-3)
        low, high = release.interval()
        assert 0.749 < low < high < 0.751


def test_a_mean_is_traced_once_for_each_interval(key, monkeypatch):
    traced, clamp = [], _sums.clamp
    monkeypatch.setattr(_sums, "clamp", lambda *xs: traced.append(xs[1:]) or clamp(*xs))

    def mean(upper, key=key):
        return queries.private_mean(key, jnp.ones(7), lower=-3.5, upper=upper, epsilon=1e5).value

    jax.eval_shape(functools.partial(mean, 0.5), key=key)  # Leaves nothing behind.
    assert mean(0.5) == mean(0.5) == pytest.approx(0.5, abs=1e-3)
    assert mean(2.0) == pytest.approx(1, abs=1e-3)
    assert traced == [(-3.5, 0.5), (-3.5, 0.5), (-3.5, 2.0)]


@pytest.mark.slow
@both_relations
def test_statistics_of_no_noise_are_none(key, relation):
    """Where a traced epsilon is bad, and not what integers that mark a failure stand for."""
    database = padded_if(relation, np.ones(4, "float32"), capacity=4)

    def statistics(key, epsilon):
        shared = {"lower": 0, "upper": 2, "epsilon": epsilon, "relation": relation}
        mean = queries.private_mean(key, database, **shared)
        return mean, queries.private_variance(key, database, **shared)

    found = jax.vmap(statistics)(jax.random.split(key), jnp.array([-1.0, 1e5]))
    bad, good = (jax.tree.map(lambda x, i=i: float(x[i]), found) for i in (0, 1))
    assert np.all(np.isnan(jax.tree.leaves([release.value for release in bad])))
    assert good[0].value == pytest.approx(1, abs=1e-3)
    assert good[1].value == pytest.approx({"mean": 1, "variance": 0}, abs=1e-3)


def test_a_ledger_takes_no_column_for_another(tmp_path, key):
    """They look alike, and nothing but what they hold says which one is asked for."""
    budget = {"lower": 0, "upper": 2, "epsilon": 1e5}
    with dpjax.Ledger(tmp_path / "budget", epsilon=1e6, delta=0) as ledger:
        for column, one_key in zip((0.25, 1.5), jax.random.split(key), strict=True):
            release = queries.private_mean(one_key, np.full(4, column, "float32"), **budget)
            assert float(release.value) == pytest.approx(column, abs=1e-3)
        assert ledger.spent.epsilon == 2e5
        assert [row["what"] for row in ledger.history()] == ["mean", "mean"]


# Clusters.


@pytest.fixture(scope="module")
def points():
    centers = np.array([[0.5, 0.5], [-0.5, 0.0], [0.3, -0.6]])
    spread = 0.05 * np.random.default_rng(0).normal(size=(3, 500, 2))
    return centers, (centers[:, None] + spread).reshape(-1, 2).astype("float32")


@pytest.mark.slow
def test_clusters_are_found_under_nearly_every_key(points):
    """At epsilon 5: at least 95 of 100. The random start of before found them under 60."""
    centers, x = points

    def found(key):
        release = queries.private_k_means(key, x, clusters=3, radius=1.0, epsilon=5.0, delta=1e-6)
        apart = jnp.linalg.norm(release.value["centers"][:, None] - centers[None], axis=2)
        return jnp.all(jnp.min(apart, axis=0) < 0.1)

    keys = jax.random.split(dpjax.random.seeded_key(8), 100)
    assert jnp.sum(jax.jit(lambda keys: jax.lax.map(found, keys))(keys)) >= 95


@pytest.mark.slow
def test_clusters_are_found(key, points):
    centers, x = points
    release = queries.private_k_means(
        key, x, clusters=3, radius=1.0, iterations=6, epsilon=20.0, delta=1e-6
    )
    found = np.asarray(release.value["centers"])
    apart = np.linalg.norm(found[:, None] - centers, axis=2)
    assert sorted(apart.argmin(axis=1)) == [0, 1, 2]
    assert apart.min(axis=1).max() < 0.03
    np.testing.assert_allclose(release.value["counts"], 500, atol=30)
    assert 19.9 < release.guarantee.epsilon <= 20
    assert "seeded key" in release.guarantee.notes


def test_all_iterations_cost_what_is_asked_for():
    """The noise of T iterations is that of rho = T (reach / sigma)^2 / 2, within a percent."""
    sensitivity = dpjax.assume_sensitivity(2.0, norm="l2")
    for steps in (1, 7):
        mechanism, together = _k_means._share_of(sensitivity, steps, 1.0, 1e-6, 9)
        rho = steps * (2 / mechanism.scale) ** 2 / 2
        spent = dpjax.accounting.zcdp_to_epsilon(rho, delta=1e-6)
        assert together.epsilon <= 1
        assert together.delta == pytest.approx(1e-6, rel=1e-9)
        if steps > 1:
            assert 0.99 < spent <= 1.0001
    # Deltas of three releases add up to more than 1e-9 in floats.
    _, together = _k_means._share_of(sensitivity, 3, 50.0, 1e-9, 9)
    assert 49.9 < together.epsilon <= 50


def test_no_record_moves_clusters_further(points):
    centers, _ = points
    records, bits = ball(2), 14 + 20 - 30
    shared = np.random.default_rng(5).normal(size=(2, 2)).astype("float32") / 3

    def value(record, present):
        rows = jnp.concatenate([jnp.asarray(shared), record[None]])
        there = jnp.array([True, True, present])
        return _k_means._totals(in_ball(rows, there), there, jnp.asarray(centers), bits=bits)

    values = jax.jit(jax.vmap(value, in_axes=(0, None)))
    with_it, without = (
        np.asarray(values(records, x), np.int64).reshape(len(records), -1) for x in (True, False)
    )
    for relation, moved in (
        (REPLACE, distances(with_it, 2).max()),
        (ADD, np.linalg.norm(with_it - without, axis=1).max()),
    ):
        reach = _k_means._reach(relation, bits, dims=9)
        assert 0.9 * reach < moved <= reach


def test_the_nearest_center_is_that_of_numpy(points):
    centers, x = points
    units = _k_means._placed(jnp.asarray(x), jnp.ones(len(x), bool))
    found = jax.jit(_k_means._nearest)(units, jnp.asarray(centers))
    apart = np.linalg.norm(x[:, None] - centers, axis=2)
    np.testing.assert_array_equal(found, apart.argmin(axis=1))


@pytest.mark.parametrize(
    ("epsilon", "delta", "iterations"), [(400.0, 1e-6, 4), (1.0, 1e-31, 4), (1e-12, 1e-6, 1)]
)
def test_noise_that_does_not_fit_is_refused_in_words_of_the_caller(
    epsilon, delta, iterations, points, key
):
    """The share of one release is in no message, and nothing is paid before."""
    told = rf"at epsilon={epsilon:g} and delta={delta:g}: take"
    with pytest.raises(ValueError, match=told):
        queries.private_k_means(
            key,
            points[1],
            clusters=2,
            radius=1.0,
            iterations=iterations,
            epsilon=epsilon,
            delta=delta,
        )


def spread_of(count, dims):
    key = jax.random.key(1)
    return np.asarray(_k_means.spread_points(key, count=count, dims=dims))


def test_cells_are_spread_over_the_ball():
    """No two of 32 are near each other, and every place of the disk is near one."""
    cells = spread_of(32, 2)
    assert cells.shape == (32, 2)
    assert np.linalg.norm(cells, axis=1).max() <= 1
    apart = np.linalg.norm(cells[:, None] - cells, axis=2) + 9 * np.eye(32)
    places = np.array([x for x in itertools.product(np.linspace(-1, 1, 41), repeat=2)])
    places = places[np.linalg.norm(places, axis=1) <= 1]
    assert apart.min() > 0.22  # Of uniform points it is about 0.03.
    assert np.linalg.norm(places[:, None] - cells, axis=2).min(axis=1).max() < 0.36


def test_the_start_is_the_best_of_all_clusters_of_cells():
    """Nine heavy cells in three groups; cells with a small noisy count move no center."""
    groups = np.array([[0.5, 0.5], [-0.5, 0.0], [0.3, -0.6]])
    around = 0.05 * np.array([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    cells = np.concatenate([(groups[:, None] + around).reshape(-1, 2), spread_of(23, 2)])
    counts = np.concatenate([np.full(9, 100.0), np.full(23, 19.0)])
    start = jax.jit(_k_means.clusters_of_cells, static_argnames="clusters")
    for seed in range(5):
        found = start(jax.random.key(seed), cells, counts, 10.0, clusters=3)
        apart = np.linalg.norm(np.asarray(found)[:, None] - groups, axis=2)
        assert sorted(apart.argmin(axis=1)) == [0, 1, 2]
        assert apart.min(axis=1).max() < 1e-6
        # Without noise they count, and the centers move.
        moved = start(jax.random.key(seed), cells, counts, 0.0, clusters=3)
        assert np.linalg.norm(np.asarray(moved)[:, None] - groups, axis=2).min(axis=1).max() > 0.01
    nothing = start(jax.random.key(0), cells, np.zeros(32), 10.0, clusters=3)
    assert np.isfinite(nothing).all()


def test_every_iteration_has_noise_of_its_own(points, monkeypatch):
    """One key in all of them: their differences would be without noise."""
    seen, scales = [], []

    def recorded(mechanism, key, total):
        seen.append(jax.random.key_data(key).tobytes())
        scales.append(mechanism.scale / mechanism.sensitivity.value)
        return total

    monkeypatch.setattr(AdditiveMechanism, "unpaid_draw", recorded)

    def start(function, key, *arguments, **sizes):
        seen.append(jax.random.key_data(key).tobytes())
        return function(key, *arguments, **sizes)

    for name in ("spread_points", "clusters_of_cells"):
        started = functools.partial(start, getattr(_k_means, name))
        monkeypatch.setattr(_k_means, name, started)
    _, x = points
    key = dpjax.random.seeded_key(5)
    release = queries.private_k_means(
        key, x[:20], clusters=2, radius=1.0, iterations=3, epsilon=1.0, delta=1e-6
    )
    assert len(seen) == len({*seen, jax.random.key_data(key).tobytes()}) - 1 == 6
    # The start and three iterations together cost no more than the release says.
    rho = sum(1 / scale**2 / 2 for scale in scales)
    assert len(scales) == 4
    assert dpjax.accounting.zcdp_to_epsilon(rho, delta=1e-6) <= 1.0001
    assert 0.99 < release.guarantee.epsilon <= 1


@pytest.mark.slow
def test_a_ledger_counts_all_iterations_once(tmp_path, points):
    _, x = points
    with dpjax.Ledger(tmp_path / "budget", epsilon=1.5, delta=1e-5) as ledger:
        release = queries.private_k_means(
            dpjax.random.secure_key(), x, clusters=3, radius=1.0, epsilon=1.0, delta=1e-6
        )
        assert ledger.spent.epsilon == pytest.approx(1.0, abs=1e-6)
        assert ledger.spent.epsilon >= release.guarantee.epsilon
        with pytest.raises(dpjax.BudgetExceededError):
            queries.private_k_means(
                dpjax.random.secure_key(), x, clusters=3, radius=1.0, epsilon=1.0, delta=1e-6
            )


@pytest.mark.slow
def test_moments_are_put_together_again():
    query = second_moments_query(lambda x: x, dims=2, capacity=10)
    x = np.float32([[0.5, -0.25], [0.25, 0.5], [0, 0.125]])
    moments = averages(query(jnp.asarray(x)) * query.unit, None, query.unit)
    np.testing.assert_allclose(moments.mean, x.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(moments.second, x.T @ x / 3, atol=1e-4)


def test_clusters_of_wide_numbers_are_those_of_float32():
    """float64 and int64 without x64: the release was refused after it had been paid for."""
    points = np.round(np.random.default_rng(0).normal(size=(50, 2)) * 3)
    terms = {"clusters": 2, "radius": 9.0, "epsilon": 2.0, "delta": 1e-6, "iterations": 1}
    found = [
        queries.private_k_means(dpjax.random.seeded_key(0), points.astype(dtype), **terms).value
        for dtype in ("float32", "float64", "int64")
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other["centers"], found[0]["centers"])
