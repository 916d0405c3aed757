"""Minimizers are within the error that their bounds charge, whatever a solver has found.

The bounds of logistic and ridge regression add the error of a computed solution. They used to rest
on solvers that end by count. What else reaches it: objective perturbation, which has the same walk
(tests/learning/test_objective_perturbation.py). The bound of the linear SVM is the diameter of a
set that its solution is moved into, and holds for any result of its solver.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dpjax import targets
from dpjax.targets import _linear_svm, _minimizers, _regression

FLOAT32 = float(np.finfo("float32").eps)
WEAKEST = 17 * (3 + 8) * FLOAT32
MAKE = {"logistic": targets.logistic_regression, "ridge": targets.ridge_regression}


def of_nothing(matrix, vector):
    return jnp.zeros_like(vector)


def of_nan(matrix, vector):
    return jnp.full_like(vector, jnp.nan)


def of_far_away(matrix, vector):
    return 1e30 * vector


def of_the_wrong_sign(matrix, vector):
    return -vector


def factor_of(solution):
    """An inverse factor in whose place a wrong solver works as in that of `solve`."""
    scale = {"of_nothing": 0.0, "of_nan": np.nan, "of_far_away": 50.0, "of_the_wrong_sign": 1.5}

    def inverse_factor(matrix):
        return scale[solution.__name__] * jnp.eye(len(matrix), dtype=matrix.dtype)

    return inverse_factor


FAULTS = [of_nothing, of_nan, of_far_away, of_the_wrong_sign]


@pytest.fixture
def broken(monkeypatch):
    """Breaks the solvers of all targets, as a compiler or an ill-conditioned matrix might."""

    def solve_by(fault):
        monkeypatch.setattr(_minimizers, "solve", fault)
        monkeypatch.setattr(_regression, "inverse_factor", factor_of(fault))

    return solve_by


def problem(seed, n=60, d=3, separable=False):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, d)).astype("float32")
    y = np.sign(x[:, 0]) if separable else generator.choice([-1.0, 1.0], n)
    return {"x": x * 10.0 ** generator.uniform(-3, 20, (n, 1)), "y": y.astype("float32")}


def exact_minimizer(kind, records, strength):
    """In float64, by steps that cannot fail: of the records as the target scales them."""
    x = np.asarray(targets._clamping.into_unit_ball(jnp.asarray(records["x"])), float)
    y, n = np.asarray(records["y"], float), len(x)
    if kind == "ridge":
        return np.linalg.solve(x.T @ x / n + strength * np.eye(x.shape[1]), x.T @ y / n)
    rows, w = x * np.where(y > 0, 1, -1)[:, None], np.zeros(x.shape[1])

    def value(w):
        return np.mean(np.logaddexp(0, -rows @ w)) + strength / 2 * w @ w

    for _ in range(200):
        wrong = special.expit(-rows @ w)
        hessian = (rows.T * wrong * (1 - wrong)) @ rows / n + strength * np.eye(len(w))
        step = np.linalg.solve(hessian, strength * w - wrong @ rows / n)
        while value(w - step) > value(w) + 1e-15:
            step = step / 2
        w = w - step
    return w


def charged(target, dtype="float32"):
    """E, which is all that is left of the bound where a record is one of very many."""
    return target.sensitivity("l2", n=2**80, dtype=dtype).value / 2


@pytest.mark.parametrize("strength", [0.01, 3.0])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", MAKE)
def test_a_solution_is_within_the_error_whatever_the_solver_found(kind, fault, strength, broken):
    """At 0, at infinity, at NaN or uphill."""
    broken(fault)
    target = MAKE[kind](regularization=strength, dims=3)
    for separable in (False, True):
        records = problem(1, separable=separable)
        found = np.asarray(jax.jit(target)(jax.tree.map(jnp.asarray, records)), float)
        away = np.linalg.norm(found - exact_minimizer(kind, records, strength))
        assert away <= charged(target) < 0.01


@pytest.mark.parametrize("kind", MAKE)
def test_the_weakest_regularization_takes_no_walk(kind, monkeypatch):
    """Solvers get below the gradient at which it ends, so nobody waits for K steps.

    Many records, separable ones, collinear ones, one against all, and huge ones that are clipped.
    """
    plan = _regression.walk_plan
    unwalked = lambda *x, **y: plan(*x, **y)._replace(most_steps=0.0)  # noqa: E731
    monkeypatch.setattr(_regression, "walk_plan", unwalked)
    target = MAKE[kind](regularization=WEAKEST, dims=3)
    fit = jax.jit(target)
    line = np.ones((2000, 1)) * np.array([[0.6, 0.64, 0.48]], "float32")
    against = {"x": line, "y": np.where(np.arange(2000) == 0, -1.0, 1.0).astype("float32")}
    many = problem(2, n=100_000, separable=True)
    for records in (problem(3), problem(4, separable=True), against, many):
        found = np.asarray(fit(jax.tree.map(jnp.asarray, records)), float)
        assert np.linalg.norm(found - exact_minimizer(kind, records, WEAKEST)) <= charged(target)


@pytest.mark.parametrize("kind", MAKE)
def test_neighbors_of_a_broken_solver_are_within_the_bound(kind, broken, monkeypatch):
    """Without the walk they are far beyond it, so this search would see that."""
    broken(of_far_away)
    generator = np.random.default_rng(5)
    n, lanes, strength = 400, 40, 0.05
    x = generator.normal(size=(lanes, n, 3)).astype("float32")
    y = generator.choice([-1.0, 1.0], (lanes, n)).astype("float32")
    other = x.copy(), y.copy()
    other[1][:, 0] = -y[:, 0]

    def moved():
        target = MAKE[kind](regularization=strength, dims=3)
        fit = jax.jit(jax.vmap(lambda x, y: target({"x": x, "y": y})))
        distance = np.linalg.norm(np.asarray(fit(x, y)) - np.asarray(fit(*other)), axis=1)
        return distance.max() / target.sensitivity("l2", n=n).value

    assert moved() <= 1
    plan = _regression.walk_plan
    unwalked = lambda *x, **y: plan(*x, **y)._replace(most_steps=0.0)  # noqa: E731
    monkeypatch.setattr(_regression, "walk_plan", unwalked)
    assert moved() > 1


@pytest.mark.parametrize("fault", [jnp.nan, 1e30])
def test_the_bound_of_the_linear_svm_needs_no_solver(fault, monkeypatch):
    """Any weights are moved into the set whose diameter it is, and a bias follows from them."""
    monkeypatch.setattr(
        _linear_svm,
        "_solve",
        lambda rows, positive, *_: jnp.where(positive[0], fault, -fault) * jnp.ones(len(rows)),
    )
    target = targets.linear_svm(regularization=0.2, dims=3)
    x = np.random.default_rng(6).uniform(size=(50, 3)).astype("float32")
    y = np.where(np.arange(50) % 2, 1.0, -1.0).astype("float32")
    fit = jax.jit(target)
    one, other = (fit({"x": x, "y": labels}) for labels in (y, -y))
    distance = sum(np.abs(np.asarray(one[name] - other[name])).sum() for name in ("w", "b"))
    assert distance <= target.sensitivity("l1").value
