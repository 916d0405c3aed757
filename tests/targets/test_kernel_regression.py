"""Kernel regressions against the formulas in NumPy, and the bound of Nadaraya-Watson."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import targets

POINTS = np.linspace(0, 1, 11)


def records(seed, n=40):
    generator = np.random.default_rng(seed)
    x = generator.uniform(size=n)
    return {"x": x, "y": np.sin(5 * x) / 2 + 0.1 * generator.normal(size=n)}


def kernel(u):
    return np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)


def curve(target, database, points=POINTS):
    database = {name: jnp.asarray(x, "float32") for name, x in database.items()}

    @jax.jit
    def at(database, points):
        return jax.vmap(target(database))(points)

    return np.asarray(at(database, jnp.asarray(points, "float32")[:, None]))


def direct_priestley_chao(database, h):
    order = np.argsort(database["x"])
    x, y = database["x"][order], database["y"][order]
    return [
        sum((x[i] - x[i - 1]) * kernel((t - x[i]) / h) * y[i] for i in range(1, len(x))) / h
        for t in POINTS
    ]


def direct_nadaraya_watson(database, h, ridge):
    x, y = database["x"], database["y"]
    weights = kernel((POINTS[:, None] - x) / h)
    return weights @ y / (weights.sum(axis=1) + ridge * len(x) * kernel(0.0))


def test_priestley_chao_is_the_formula():
    database = records(0)
    got = curve(targets.priestley_chao(bandwidth=0.1), database)
    np.testing.assert_allclose(got, direct_priestley_chao(database, 0.1), atol=1e-5)


def test_nadaraya_watson_is_the_formula():
    database = records(1)
    got = curve(targets.nadaraya_watson(bandwidth=0.2, regularization=0.05), database)
    np.testing.assert_allclose(got, direct_nadaraya_watson(database, 0.2, 0.05), atol=1e-5)
    default = curve(targets.nadaraya_watson(bandwidth=0.2), database)
    np.testing.assert_allclose(default, direct_nadaraya_watson(database, 0.2, 0.01), atol=1e-5)


@pytest.mark.parametrize("make", [targets.priestley_chao, targets.nadaraya_watson])
def test_order_of_records_does_not_matter(make):
    database = records(2)
    order = np.random.default_rng(0).permutation(40)
    permuted = {name: x[order] for name, x in database.items()}
    target = make(bandwidth=0.1)
    np.testing.assert_allclose(curve(target, database), curve(target, permuted), atol=1e-5)


@pytest.mark.parametrize("small", [[-1e-40], [0.0, -0.0]], ids=["denormal", "zero"])
def test_of_tied_records_the_least_response_counts_in_any_order(small):
    generator = np.random.default_rng(3)
    x = np.concatenate([np.repeat([*small, -0.5, 0.25, 0.5, 0.75], 8), generator.normal(size=9)])
    database = {"x": x, "y": generator.normal(size=x.size)}
    target = targets.priestley_chao(bandwidth=0.1)
    got = curve(target, database)
    least = np.lexsort((database["y"], database["x"]))
    first = least[np.diff(database["x"][least], prepend=-np.inf) > 0]
    alone = {name: column[first] for name, column in database.items()}
    np.testing.assert_allclose(got, direct_priestley_chao(alone, 0.1), atol=1e-5)
    order = generator.permutation(x.size)
    permuted = {name: column[order] for name, column in database.items()}
    np.testing.assert_array_equal(got, curve(target, permuted))


@pytest.mark.parametrize("place", ["x", "y"])
@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_a_strange_record_shows_in_any_order(place, strange):
    """Its distances count as infinite, in any order; a response at the least x never counts."""
    database = records(4)
    database[place][7] = strange
    permuted = {name: column[::-1] for name, column in database.items()}
    for some in (database, permuted):
        assert not np.any(np.isfinite(curve(targets.priestley_chao(bandwidth=0.1), some)))


@pytest.mark.parametrize("make", [targets.priestley_chao, targets.nadaraya_watson])
def test_single_record(make):
    assert np.all(np.isfinite(curve(make(bandwidth=0.1), {"x": [0.5], "y": [1.0]})))


def pairs(n, generator):
    """Random and hand-made databases of n + 1 records; the last one replaces the one before it."""
    for _ in range(200):
        x = generator.choice([0.0, 0.5, 0.55, 1.0, 9.0], size=n + 1)
        yield x, generator.choice([-1.0, 1.0], size=n + 1)
    alone = np.full(n + 1, 9.0)  # All others are far away; two opposite records in one place.
    alone[-2:] = 0.5
    yield alone, np.append(np.ones(n), -1.0)


@pytest.mark.parametrize(("n", "ridge"), [(1, 0.01), (3, 0.3), (10, 0.01), (10, 0.5)])
def test_nadaraya_watson_bound_holds_on_adversarial_pairs(n, ridge):
    target = targets.nadaraya_watson(bandwidth=0.05, regularization=ridge)
    bound = target.sensitivity("linf", n=n).value
    x, y = (np.array(v, "float32") for v in zip(*pairs(n, np.random.default_rng(n)), strict=True))

    @jax.jit
    @jax.vmap
    def distance(x, y):
        keep, swap = jnp.arange(n), jnp.arange(n).at[n - 1].set(n)
        points = jnp.asarray(POINTS, "float32")[:, None]
        curves = [jax.vmap(target({"x": x[rows], "y": y[rows]}))(points) for rows in (keep, swap)]
        return jnp.max(jnp.abs(curves[0] - curves[1]))

    worst = float(jnp.max(distance(x, y)))
    assert worst <= bound * (1 + 1e-5)
    # Two opposite records alone reach half of the bound.
    assert worst >= 0.49 * bound


@pytest.mark.usefixtures("x64")
def test_nadaraya_watson_bound():
    weak = targets.nadaraya_watson(bandwidth=0.1)
    assert weak.sensitivity(n=300, dtype="float64").value == pytest.approx(1.0)
    assert weak.sensitivity(n=3, dtype="float64").value == pytest.approx(2.0)
    strong = targets.nadaraya_watson(bandwidth=0.1, regularization=0.3)
    assert strong.sensitivity(n=7).value > 4 / (1 + 0.3 * 7)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="bandwidth"):
        targets.priestley_chao(bandwidth=bad)
    with pytest.raises(ValueError, match="bandwidth"):
        targets.nadaraya_watson(bandwidth=bad)
    with pytest.raises(ValueError, match="regularization"):
        targets.nadaraya_watson(bandwidth=0.1, regularization=bad)
    with pytest.raises(ValueError, match="n must be"):
        targets.nadaraya_watson(bandwidth=0.1).sensitivity("linf", n=0)
