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


def on_device(records):
    return jax.tree.map(jnp.asarray, records)


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
    assert np.linalg.norm(gradient(w, records, strength)) < 1e-15


def test_float32_is_solved_to_float_precision():
    records = problem(1)
    fit = jax.jit(targets.logistic_regression(regularization=0.05))
    w = fit(jax.tree.map(jnp.asarray, records))
    assert w.dtype == "float32"
    assert np.linalg.norm(gradient(np.asarray(w, float), records, 0.05)) < 1e-6


# Four points of the unit ball, how often each occurs, and labels: as far as pure Newton steps from
# 0 overshoot, the fits of two neighbors were 46.1 apart where their bound is .234.
POINTS = [
    (-0.90727563, -0.23729116, -0.23833447),
    (0.19933429, -0.92612043, -0.32026052),
    (-0.58705216, -0.70188803, 0.40338933),
    (-0.46717274, -0.77058639, 0.43352768),
]
TIMES = [1882, 7975, 56377, 33766]
OVERSHOT = 8.532928168280529e-05


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_neighbors_that_newton_steps_overshoot_are_within_the_bound(dtype):
    with jax.enable_x64(dtype == "float64"):
        inside = np.array(POINTS) * (1 - 1e-6)
        x, y = (np.repeat(v, TIMES, axis=0) for v in (inside, [-1, -1, 1, -1]))
        neighbor = x.copy()
        neighbor[1882] = x[0]
        target = targets.logistic_regression(regularization=OVERSHOT, dims=3)
        fit = jax.jit(target)
        w, other = (
            np.asarray(fit({"x": jnp.asarray(v, dtype), "y": jnp.asarray(y)}), float)
            for v in (x, neighbor)
        )
        bound = target.sensitivity("l2", n=10**5, dtype=dtype).value
    error = np.linalg.norm(gradient(w, {"x": x, "y": y}, OVERSHOT)) / OVERSHOT
    assert np.linalg.norm(w - other) <= bound
    assert error <= bound - 2 / (10**5 * OVERSHOT)
    assert bound < {"float32": 1.2, "float64": 0.2344}[dtype]


@pytest.mark.parametrize(("n", "length"), [(1000, 1.0), (1000, 0.1), (10**5, 1.0)])
def test_weights_that_run_far_out_are_found(n, length, x64):
    # All records agree, so that the weights run far out against a weak pull.
    records = {"x": np.full((n, 1), length), "y": np.ones(n, int)}
    w = jax.jit(targets.logistic_regression(regularization=1 / n))(on_device(records))
    assert np.abs(gradient(np.asarray(w), records, 1 / n)) < 1e-15
    assert abs(w[0]) <= np.sqrt(0.2785 * n)


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


@pytest.mark.usefixtures("x64")
def test_bound():
    def bound(strength, n, dtype="float64"):
        target = targets.logistic_regression(regularization=strength, dims=3)
        return target.sensitivity("l2", n=n, dtype=dtype).value

    pull = special.expit(np.sqrt(0.2785 / 0.5))
    assert bound(0.5, 8) == pytest.approx(0.5 * pull)
    assert bound(0.1, 2) == pytest.approx(2 * np.sqrt(2.785))  # Both lie in a ball.
    pull = special.expit(np.sqrt(2.785))
    assert bound(0.1, 1000) > 2 * pull / (1000 * 0.1)
    assert bound(0.1, 1000, "float32") == pytest.approx(0.02 * pull, rel=0.01)
    # It would be 2 R / n, if weights could be longer than they are.
    longest = optimize.brentq(lambda r: 0.1 * r - special.expit(r), 0, 10)
    assert bound(0.1, 1000) < 2 * longest / 1000 < 2 / (1000 * 0.1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strength", [0.1, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_records_that_pull_hardest_are_within_the_bound(n, strength):
    """All alike but for the label of one, which contradicts them in the neighbor."""

    def minimizer(against):
        def slope(w):
            pulls = (n - against) * special.expit(-w) - against * special.expit(w)
            return strength * w - pulls / n

        return optimize.brentq(slope, -1 / strength, 1 / strength, xtol=1e-14)

    target = targets.logistic_regression(regularization=strength, dims=1)
    bound = target.sensitivity("l2", n=n, dtype="float64").value
    found = max(minimizer(k) - minimizer(k + 1) for k in range(n))
    assert bound / 5 < found <= bound


def test_a_strength_that_the_dtype_does_not_carry_is_refused():
    weak = {"regularization": 1e-6}
    records = {"x": jnp.ones((5, 3)), "y": jnp.ones(5)}
    for refused in (
        lambda: targets.logistic_regression(**weak)(records),
        lambda: targets.logistic_regression(dims=3, **weak).sensitivity("l2", n=5),
        lambda: targets.ridge_regression(**weak)(records),
        lambda: targets.ridge_regression(dims=3, **weak).sensitivity("l2", n=5),
    ):
        with pytest.raises(ValueError, match=r"regularization must be .* in float32.* float64"):
            refused()
    with jax.enable_x64(True):
        targets.logistic_regression(dims=3, **weak).sensitivity("l2", n=5, dtype="float64")


def test_weights_are_released(key):
    records = problem(5)
    target = targets.logistic_regression(regularization=0.1, dims=3)
    private = dpjax.privatize(target, dpjax.gaussian(target.sensitivity("l2", n=80), 1.0, 1e-5))
    assert private(key, records).value.shape == (3,)
    records["x"][0] = np.nan
    assert np.all(np.isfinite(private(key, records).value))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="regularization"):
        targets.logistic_regression(regularization=bad)
    with pytest.raises(ValueError, match="dims must be"):
        targets.logistic_regression(regularization=1.0, dims=0)
    with pytest.raises(ValueError, match="n must be"):
        targets.logistic_regression(regularization=1.0, dims=3).sensitivity("l2", n=0)
