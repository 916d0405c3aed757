"""Kernel densities against R and the formula, one way against the other, and the bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

every_dims = pytest.mark.parametrize("dims", [1, 2, 3])


def records(seed, dims, n=30):
    return np.random.default_rng(seed).uniform(size=(n, dims)).astype("float32")


def formula(x, points, h):
    n, dims = x.shape
    squares = (((points[..., None, :] - x) / h) ** 2).sum(axis=-1)
    return np.exp(-squares / 2).sum(axis=-1) / (n * (np.sqrt(2 * np.pi) * h) ** dims)


def lattice(degree, dims):
    axis = np.linspace(0, 1, degree + 1)
    return np.stack(np.meshgrid(*[axis] * dims, indexing="ij"), axis=-1)


def both(database, h, degree, dims):
    """The values on the lattice, point by point and by sums over records."""
    function = dpjax.evaluate_on_lattice(
        targets.kernel_density(bandwidth=h), degree=degree, dims=dims
    )
    summed = targets.kernel_density_on_lattice(bandwidth=h, degree=degree, dims=dims)
    return jax.jit(lambda x: (function(x), summed(x)))(jnp.asarray(database))


def test_values_are_those_of_r(reference, x64):
    recorded = reference("r_diffpriv")["kde"]
    database = jnp.asarray(recorded["data"])[:, None]
    density = targets.kernel_density(bandwidth=recorded["bandwidth"])(database)
    values = jax.vmap(density)(jnp.asarray(recorded["x"])[:, None])
    np.testing.assert_allclose(values, recorded["predict"], rtol=1e-12)
    for values in both(database, recorded["bandwidth"], 10, 1):
        np.testing.assert_allclose(values, recorded["bernstein_k10_coeffs"], rtol=1e-12)


@every_dims
def test_both_are_the_formula(dims):
    x = records(dims, dims)
    exact = formula(x.astype(float), lattice(4, dims), 0.2)
    for values in both(x, 0.2, 4, dims):
        assert values.shape == (5,) * dims
        np.testing.assert_allclose(values, exact, rtol=1e-5, atol=1e-6)


def test_coordinate_i_lies_along_axis_i():
    for values in both(np.float32([[0.0, 1.0]]), 0.1, 3, 2):
        assert np.unravel_index(np.argmax(values), values.shape) == (0, 3)


@every_dims
def test_records_that_are_not_finite_weigh_nothing(dims):
    x = records(0, dims, n=5)
    weighed = formula(x[3:].astype(float), lattice(4, dims), 0.2) * 2 / 5
    x[0], x[1, 0], x[2] = np.nan, np.nan, -np.inf
    x[0, -1] = np.inf if dims > 1 else np.nan
    for values in both(x, 0.2, 4, dims):
        np.testing.assert_allclose(values, weighed, rtol=1e-5, atol=1e-6)


def test_float64_is_kept(x64):
    for dtype in ("float64", "float32"):
        for values in both(records(1, 2).astype(dtype), 0.2, 4, 2):
            assert values.dtype == dtype


@every_dims
@pytest.mark.usefixtures("x64")
def test_bound_is_attained(dims):
    n, h = 3, 0.07
    exact = (2 * np.pi) ** (-dims / 2) / (n * h**dims)
    bound = (
        targets.kernel_density(bandwidth=h, dims=dims)
        .sensitivity("linf", n=n, dtype="float64")
        .value
    )
    assert bound == pytest.approx(exact, rel=1e-14)
    x = np.full((n, dims), 0.5, "float32")
    far = x.copy()
    far[0] = np.inf
    for near, away in zip(both(x, h, 4, dims), both(far, h, 4, dims), strict=True):
        assert np.max(np.abs(near - away)) == pytest.approx(bound, rel=1e-5)


@pytest.mark.usefixtures("x64")
def test_bound_is_rounded_up():
    # K(0) = 0.3989422804014326779399460599343818684758...
    bound = (
        targets.kernel_density(bandwidth=1.0, dims=1)
        .sensitivity("linf", n=1, dtype="float64")
        .value
    )
    assert 0.39894228040143267 <= bound <= 0.39894228040143267 * (1 + 10 * 2**-52)


@pytest.mark.slow
def test_density_is_sampled_and_released(key):
    def mixture(key, n):
        key_which, key_noise = jax.random.split(key)
        heavy = jax.random.uniform(key_which, (n, 1)) < 0.4
        noise = jax.random.normal(key_noise, (n, 1))
        return jnp.where(heavy, 0.5 + 0.02**0.5 * noise, 0.75 + 0.005**0.5 * noise)

    target = targets.kernel_density_on_lattice(bandwidth=0.1, degree=10, dims=1)
    sensitivity = dpjax.sample_sensitivity(key, target, mixture, n=200, norm="linf", gamma=0.05)
    bound = target.sensitivity("linf", n=200).value
    assert 0.5 * bound < sensitivity.value < bound * (1 + 1e-3)
    mechanism = dpjax.bernstein(sensitivity, 1.0, degree=10, dims=1)
    release = dpjax.privatize(target, mechanism)(key, mixture(key, 200))
    assert np.isfinite(release.value(jnp.array([0.5])))


def test_bad_parameters_are_refused():
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="bandwidth"):
            targets.kernel_density(bandwidth=bad)
        with pytest.raises(ValueError, match="bandwidth"):
            targets.kernel_density_on_lattice(bandwidth=bad, degree=1, dims=1)
    with pytest.raises(ValueError, match="n must be"):
        targets.kernel_density(bandwidth=1.0, dims=1).sensitivity("linf", n=0)
    with pytest.raises(ValueError, match="dims must be"):
        targets.kernel_density_on_lattice(bandwidth=1.0, degree=1, dims=0)
    with pytest.raises(ValueError, match="degree must be"):
        targets.kernel_density_on_lattice(bandwidth=1.0, degree=0, dims=1)


def test_records_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="n, dims"):
        targets.kernel_density(bandwidth=1.0)(jnp.ones(3))
    with pytest.raises(ValueError, match="point must have shape"):
        targets.kernel_density(bandwidth=1.0)(jnp.ones((3, 1)))(jnp.ones(2))
    with pytest.raises(ValueError, match="records must have shape"):
        targets.kernel_density_on_lattice(bandwidth=1.0, degree=1, dims=1)(jnp.ones((3, 2)))
