"""Ridge regression: the normal equations, within its bound; and the solver that it shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets
from dpjax.targets._minimizers import _eliminate, inverse_factor, solve


def problem(seed, n=60, d=3):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, d)) / 2
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    return {"x": x, "y": np.clip(x @ generator.normal(size=d), -1, 1)}


def normal_equations(records, strength):
    x, y = records["x"], records["y"]
    n, d = x.shape
    return np.linalg.solve(x.T @ x / n + strength * np.eye(d), x.T @ y / n)


def on_device(records):
    return jax.tree.map(jnp.asarray, records)


@pytest.mark.parametrize("strength", [pytest.param(2.0, marks=pytest.mark.slow), 0.1, 1e-3])
def test_weights_solve_the_normal_equations(strength, x64):
    fit = targets.ridge_regression(regularization=strength)
    expected = normal_equations(problem(0), strength)
    np.testing.assert_allclose(fit(on_device(problem(0))), expected, rtol=1e-10)


@pytest.mark.slow
def test_float32_is_solved_to_float_precision():
    w = targets.ridge_regression(regularization=0.01)(on_device(problem(1)))
    assert w.dtype == "float32"
    np.testing.assert_allclose(w, normal_equations(problem(1), 0.01), rtol=1e-4, atol=1e-6)


def test_records_out_of_range_are_brought_into_it():
    fit = jax.jit(targets.ridge_regression(regularization=0.1))
    records = problem(2)
    wild, tame = (jax.tree.map(np.array, records) for _ in range(2))
    wild["x"][0], tame["x"][0] = [0, 1e20, 0], [0, 1, 0]
    wild["x"][1], tame["x"][1] = [np.nan, 0.5, 0], [0, 0.5, 0]
    wild["x"][2], tame["x"][2] = [0, -np.inf, 0], [0, -1, 0]
    for row, (y, clipped) in enumerate([(5, 1), (-np.inf, -1), (np.nan, 0)]):
        wild["y"][row], tame["y"][row] = y, clipped
    np.testing.assert_allclose(fit(on_device(wild)), fit(on_device(tame)), atol=1e-6)


def test_order_of_records_does_not_matter():
    records = problem(3)
    order = np.random.default_rng(0).permutation(60)
    fit = jax.jit(targets.ridge_regression(regularization=0.1))
    permuted = {name: x[order] for name, x in records.items()}
    np.testing.assert_allclose(fit(on_device(records)), fit(on_device(permuted)), atol=1e-5)


@pytest.mark.slow
def test_a_batch_is_a_loop():
    batch = [on_device(problem(seed)) for seed in range(4)]
    fit = targets.ridge_regression(regularization=0.1)
    together = jax.vmap(fit)(jax.tree.map(lambda *x: jnp.stack(x), *batch))
    np.testing.assert_allclose(together, jnp.stack([fit(one) for one in batch]), atol=1e-5)


def neighbors(fit, x, y):
    """The distance that replacing the last of the records moves the weights."""
    old, new = ({"x": jnp.delete(x, i, axis=0), "y": jnp.delete(y, i)} for i in (-1, -2))
    return jnp.linalg.norm(fit(old) - fit(new))


@pytest.mark.parametrize(("n", "strength"), [(1, 1.0), (3, 0.1), (10, 0.01), (4, 3.0)])
def test_global_bound_holds_on_random_and_adversarial_neighbors(n, strength, x64):
    generator = np.random.default_rng(n)
    x = generator.normal(size=(400, n + 1, 2))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    y = generator.choice([-1.0, 1.0], size=(400, n + 1))
    # All along one direction, of the length at which the weights are longest, but for two records
    # at the end of the ball that disagree.
    lengths = np.linspace(0.05, 1, 100)
    x[:100], y[:100] = lengths[:, None, None] * [1.0, 0.0], 1
    x[:100, -2:], y[:100, -1] = [1.0, 0.0], -1
    fit = targets.ridge_regression(regularization=strength, dims=2)
    moved = jax.jit(jax.vmap(lambda x, y: neighbors(fit, x, y)))(jnp.asarray(x), jnp.asarray(y))
    bound = fit.sensitivity("l2", n=n, dtype="float64").value
    assert float(jnp.max(moved)) <= bound
    # The search is no formality.
    assert float(jnp.max(moved)) > 0.15 * bound


@pytest.mark.parametrize("d", [pytest.param(2, marks=pytest.mark.slow), 20])
def test_collinear_features_are_solved_to_rounding(d):
    """At the weakest lambda that float32 carries, on moments of rank one."""
    n, strength = 50, 17 * (d + 8) * 2**-23
    generator = np.random.default_rng(d)
    direction = generator.normal(size=d)
    x = np.outer(generator.choice([0.5, 1.0], n), direction / np.linalg.norm(direction))
    x = x.astype("float32")
    y = generator.choice([-1, 1], n).astype("float32")
    w = np.asarray(targets.ridge_regression(regularization=strength)(on_device({"x": x, "y": y})))
    exact = normal_equations({"x": x.astype(float), "y": y}, strength)
    longest = 1 / (2 * strength**0.5)
    error = 8 * (d + 8) * 2**-23 * (1 + (1 + strength) * longest) / strength
    assert np.linalg.norm(w - exact) <= error
    assert np.linalg.norm(w) <= longest * (1 + 1e-6)


@pytest.mark.parametrize("strength", [0.04, pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_weights_are_as_long_as_the_bound_allows(strength, x64):
    """The bound on ||w|| that the sensitivity rests on is attained."""
    fit = targets.ridge_regression(regularization=strength)
    longest = 1 / (2 * strength**0.5) if strength <= 1 else 1 / (1 + strength)
    x = jnp.full((3, 1), min(strength**0.5, 1.0))
    assert float(fit({"x": x, "y": jnp.ones(3)})[0]) == pytest.approx(longest)


@pytest.mark.usefixtures("x64")
def test_bound_is_rounded_up():
    def bound(strength, n):
        target = targets.ridge_regression(regularization=strength, dims=2)
        return target.sensitivity("l2", n=n, dtype="float64").value

    assert 0.16 <= bound(0.25, 100) < 0.16 + 1e-12
    assert bound(3.0, 7) >= 2.5 / 21
    # Few records: both weights lie in a ball.
    assert 2.0 <= bound(0.25, 1) < 2 + 1e-12


@pytest.mark.slow
def test_the_sampler_finds_less_than_the_bound(key):
    def oracle(key, n):
        keys = jax.random.split(key)
        x = jax.random.uniform(keys[0], (n, 2))
        return {"x": x, "y": x[:, 0] + 0.1 * jax.random.normal(keys[1], (n,))}

    target = targets.ridge_regression(regularization=0.1, dims=2)
    found = dpjax.sample_sensitivity(key, target, oracle, n=50, norm="l2", m=100)
    assert 0 < found.value < target.sensitivity("l2", n=50).value


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="regularization"):
        targets.ridge_regression(regularization=bad)
    with pytest.raises(ValueError, match="n must be"):
        targets.ridge_regression(regularization=1.0, dims=2).sensitivity("l2", n=0)


@pytest.mark.parametrize("size", [1, 3, 17, pytest.param(40, marks=pytest.mark.slow)])
def test_solver_inverts_the_cholesky_factor(size, x64):
    generator = np.random.default_rng(size)
    root = generator.normal(size=(size, size + 2))
    matrix, vector = root @ root.T + 0.01 * np.eye(size), generator.normal(size=size)
    exact = np.linalg.inv(np.linalg.cholesky(matrix))
    np.testing.assert_allclose(inverse_factor(jnp.asarray(matrix)), exact, atol=1e-9)
    # As on a TPU.
    np.testing.assert_allclose(_eliminate(jnp.asarray(matrix)), exact, atol=1e-9)
    x = solve(jnp.asarray(matrix), jnp.asarray(vector))
    np.testing.assert_allclose(matrix @ x, vector, atol=1e-9)


def test_solver_is_as_accurate_as_lapack_on_an_ill_conditioned_matrix():
    generator = np.random.default_rng(0)
    directions = np.linalg.qr(generator.normal(size=(40, 40)))[0]
    matrix = (directions * np.logspace(0, -5, 40)) @ directions.T
    vector = jnp.asarray(generator.normal(size=40), "float32")
    x = np.asarray(solve(jnp.asarray(matrix, "float32"), vector), float)
    lapack = np.linalg.solve(matrix.astype("float32"), np.asarray(vector))
    exact = np.linalg.solve(matrix, np.asarray(vector, float))
    assert np.linalg.norm(x - exact) < 10 * np.linalg.norm(lapack - exact)
    assert np.linalg.norm(x - exact) < 0.05 * np.linalg.norm(exact)
