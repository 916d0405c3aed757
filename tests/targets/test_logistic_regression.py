"""Regularized logistic regression: solved to precision, blind to order, within its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

import dpjax
from dpjax import targets


def problem(seed, n=80, d=3):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, d))
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    y = (x @ generator.normal(size=d) + 0.3 * generator.normal(size=n)) > 0
    return {"x": x, "y": y.astype(int)}


def gradient(w, records, strength):
    signs = np.where(records["y"] > 0, 1.0, -1.0)
    wrong = special.expit(-signs * (records["x"] @ w))
    return strength * w - (signs * wrong) @ records["x"] / len(signs)


def loss(w, records, strength):
    signs = np.where(records["y"] > 0, 1.0, -1.0)
    losses = np.logaddexp(0, -signs * (records["x"] @ w))
    return losses.mean() + strength / 2 * w @ w


@pytest.mark.parametrize("strength", [1.0, 0.1, 1 / 80])
def test_weights_are_those_of_a_general_optimizer(strength, x64):
    records = problem(0)
    fit = jax.jit(targets.logistic_regression(regularization=strength))
    w = np.asarray(fit(jax.tree.map(jnp.asarray, records)))
    exact = optimize.minimize(
        loss, np.zeros(3), (records, strength), jac=gradient, method="BFGS", options={"gtol": 1e-10}
    ).x
    np.testing.assert_allclose(w, exact, atol=1e-8)
    assert np.linalg.norm(gradient(w, records, strength)) < 1e-12


def test_float32_is_solved_to_float_precision():
    records = problem(1)
    fit = jax.jit(targets.logistic_regression(regularization=0.05))
    w = fit(jax.tree.map(jnp.asarray, records))
    assert w.dtype == "float32"
    assert np.linalg.norm(gradient(np.asarray(w, float), records, 0.05)) < 1e-6


@pytest.mark.parametrize(("n", "length"), [(1000, 1.0), (1000, 0.1), (10**5, 1.0)])
def test_twelve_steps_suffice_where_lambda_n_is_one(n, length, x64):
    # The slowest case known: all records agree, so the weights run far out against a weak pull.
    records = {"x": jnp.full((n, 1), length), "y": jnp.ones(n, int)}
    default, many = (
        jax.jit(targets.logistic_regression(regularization=1 / n, steps=steps))
        for steps in (12, 60)
    )
    neighbor = {"x": records["x"], "y": records["y"].at[0].set(0)}
    error = float((default(records) - many(records))[0])
    moved = float((many(neighbor) - many(records))[0])
    # The solver's error is far below the effect of a record.
    assert abs(error) < 0.01 * abs(moved)


def test_order_of_records_does_not_matter():
    records = problem(2)
    order = np.random.default_rng(0).permutation(80)
    fit = jax.jit(targets.logistic_regression(regularization=0.1))
    w, permuted = (
        fit(jax.tree.map(jnp.asarray, r))
        for r in (records, {name: x[order] for name, x in records.items()})
    )
    np.testing.assert_allclose(w, permuted, atol=1e-5)


def test_records_outside_the_unit_ball_are_scaled_into_it():
    records = jax.tree.map(jnp.asarray, problem(3))
    far = {"x": records["x"].at[0].multiply(1e6), "y": records["y"]}
    unit = {"x": records["x"].at[0].divide(jnp.linalg.norm(records["x"][0])), "y": records["y"]}
    fit = jax.jit(targets.logistic_regression(regularization=0.1))
    np.testing.assert_allclose(fit(far), fit(unit), atol=1e-5)


def test_labels_are_positive_or_not():
    records = problem(4)
    x, positive = jnp.asarray(records["x"]), records["y"] > 0
    fit = jax.jit(targets.logistic_regression(regularization=0.1))
    plain = fit({"x": x, "y": jnp.asarray(records["y"])})
    for labels in (positive, np.where(positive, 1, -1), np.where(positive, 0.5, 0.0)):
        # Another dtype is another program, which may round otherwise.
        np.testing.assert_allclose(fit({"x": x, "y": jnp.asarray(labels)}), plain, rtol=1e-5)


@pytest.mark.slow
def test_global_bound_holds_on_neighbors_found_by_search(x64):
    n, strength = 5, 0.1
    # Gradient ascent from random pairs: databases of n records, of which the last is replaced.
    fit = targets.logistic_regression(regularization=strength, steps=60)
    generator = np.random.default_rng(n)
    x = jnp.asarray(generator.normal(size=(200, n + 1, 2)))
    y = jnp.asarray(generator.integers(0, 2, size=(200, n + 1)))

    def distance(x, y):
        others = fit({"x": x[:-1], "y": y[:-1]})
        replaced = fit({"x": x.at[n - 1].set(x[-1])[:-1], "y": y.at[n - 1].set(y[-1])[:-1]})
        return jnp.sqrt(jnp.sum(jnp.square(others - replaced)) + 1e-30)

    @jax.jit
    @jax.vmap
    def search(x, y):
        def climb(x, _):
            return x + 0.3 * jax.grad(distance)(x, y), None

        x, _ = jax.lax.scan(climb, x, None, length=30)
        return distance(x, y)

    bound = targets.logistic_regression_bound(regularization=strength, n=n)
    worst = float(jnp.max(search(x, y)))
    assert worst <= bound
    # The search is no formality: where the records are weak it comes near the bound.
    assert worst > 0.2 * bound


def test_bound():
    assert targets.logistic_regression_bound(regularization=0.5, n=8) == pytest.approx(0.5)
    assert targets.logistic_regression_bound(regularization=0.1, n=3) > 2 / (3 * 0.1)


def test_weights_are_released(key):
    records = problem(5)
    bound = targets.logistic_regression_bound(regularization=0.1, n=80)
    sensitivity = dpjax.analytic_sensitivity(bound, norm="l2", n=80)
    private = dpjax.privatize(
        targets.logistic_regression(regularization=0.1), dpjax.gaussian(sensitivity, 1.0, 1e-5)
    )
    assert private(key, records).value.shape == (3,)
    records["x"][0] = np.nan
    assert np.all(np.isfinite(private(key, records).value))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="regularization"):
        targets.logistic_regression(regularization=bad)
    with pytest.raises(ValueError, match="regularization"):
        targets.logistic_regression_bound(regularization=bad, n=10)
    with pytest.raises(ValueError, match="steps"):
        targets.logistic_regression(regularization=1.0, steps=0)
    with pytest.raises(ValueError, match="n must be"):
        targets.logistic_regression_bound(regularization=1.0, n=0)
