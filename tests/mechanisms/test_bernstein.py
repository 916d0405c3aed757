"""The Bernstein mechanism: polynomials against NumPy in float64, and where the noise enters."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax import BernsteinPolynomial
from dpjax.mechanisms._bernstein import sup_norm_growth

FALSE_ALARM = 1e-6


# A direct implementation: matrices on the whole lattice, polynomials by their binomials.


def basis(degree, x):
    """Values of the basis polynomials: shape (points, degree + 1)."""
    i = np.arange(degree + 1)
    binomials = np.array([math.comb(degree, j) for j in i], float)
    x = np.asarray(x, float)[:, None]
    return binomials * x**i * (1 - x) ** (degree - i)


def direct(values, order, points):
    """The iterated Bernstein polynomial I - (I - B)^order of lattice values, at points."""
    degree, dims = values.shape[0] - 1, values.ndim
    one_axis = basis(degree, np.linspace(0, 1, degree + 1))
    operator, at_points = np.eye(1), np.ones((len(points), 1))
    for axis in range(dims):
        operator = np.kron(operator, one_axis)
        columns = basis(degree, points[:, axis])
        at_points = np.einsum("pi,pj->pij", at_points, columns).reshape(len(points), -1)
    identity = np.eye(len(operator))
    # I - (I - B)^h = B sum_{i < h} (I - B)^i, and the last B is the evaluation.
    iterated = sum(np.linalg.matrix_power(identity - operator, i) for i in range(order))
    return at_points @ (iterated @ values.ravel())


@jax.jit
def evaluate(polynomial, points):
    return polynomial(points)


@pytest.mark.parametrize(("degree", "dims", "order"), [(7, 1, 3), (4, 2, 5), (2, 3, 2)])
def test_polynomial_is_the_direct_one(degree, dims, order):
    generator = np.random.default_rng(order)
    values, points = generator.normal(size=(degree + 1,) * dims), generator.uniform(size=(50, dims))
    exact = direct(values, order, points)
    released = evaluate(BernsteinPolynomial(jnp.asarray(values), order), points)
    np.testing.assert_allclose(released, exact, atol=2e-5)


def test_direct_polynomial_of_this_file_is_the_operator():
    # I - (I - B)^2 = 2 B - B^2 on x^2 at degree 2, where B x^2 = (x^2 + x) / 2.
    values = np.linspace(0, 1, 3) ** 2
    x = np.linspace(0, 1, 9)
    once = (x**2 + x) / 2
    twice = 2 * once - (once + x) / 2
    np.testing.assert_allclose(direct(values, 2, x[:, None]), twice, atol=1e-14)


# The reference numbers.


def test_reference_in_one_dimension(reference):
    (row,) = reference("r_diffpriv")["bernstein"]["d1"]
    made = dpjax.approximate_bernstein(lambda x: x[0] * jnp.sin(10 * x[0]), degree=row["k"], dims=1)
    np.testing.assert_allclose(made.values, row["coeffs"], atol=2e-6)
    points = np.array(row["x"])[:, None]
    np.testing.assert_allclose(evaluate(made, points), row["predict"], atol=2e-6)


def test_reference_in_two_dimensions(reference):
    row = reference("r_diffpriv")["bernstein"]["d2"]
    # The reference lists the first coordinate fastest; here coordinate i lies along axis i.
    values = np.reshape(row["coeffs"], (row["k"] + 1,) * 2, order="F")
    points = np.array(row["grid"])
    released = evaluate(BernsteinPolynomial(jnp.asarray(values)), points)
    np.testing.assert_allclose(released, row["predict"], atol=2e-6)
    swapped = evaluate(BernsteinPolynomial(jnp.asarray(values.T)), points)
    assert not np.allclose(swapped, row["predict"])
    lattice = np.array(row["lattice"]).reshape((row["k"] + 1,) * 2 + (2,), order="F")
    np.testing.assert_allclose(lattice[2, 5], [0.4, 1.0])


def test_reference_kernel_density(reference):
    row = reference("r_diffpriv")["kde"]
    data = jnp.asarray(row["data"])

    def density(x):
        kernel = jax.scipy.stats.norm.pdf((x[0] - data) / row["bandwidth"])
        return jnp.mean(kernel) / row["bandwidth"]

    made = dpjax.approximate_bernstein(density, degree=10, dims=1)
    np.testing.assert_allclose(made.values, row["bernstein_k10_coeffs"], rtol=2e-6)
    points = np.array(row["x"])[:, None]
    np.testing.assert_allclose(evaluate(made, points), row["bernstein_k10_predict"], rtol=2e-6)


def test_reference_scale(reference):
    for row in reference("r_diffpriv")["bernstein_scale"]:
        made = dpjax.bernstein(row["Delta"], row["epsilon"], degree=row["k"], dims=row["dims"])
        assert made.scale == pytest.approx(row["scale_formula"], rel=1e-12)
        assert made.scale == (row["k"] + 1) ** row["dims"] * row["Delta"] / row["epsilon"]


# Polynomials.


@pytest.mark.parametrize("order", [1, 3])
def test_linear_functions_are_reproduced(order):
    made = dpjax.approximate_bernstein(
        lambda x: 2 * x[0] - x[1] + 0.5, degree=6, dims=2, order=order
    )
    points = np.array(list(itertools.product([0.0, 0.13, 0.5, 1.0], repeat=2)))
    exact = 2 * points[:, 0] - points[:, 1] + 0.5
    np.testing.assert_allclose(evaluate(made, points), exact, atol=1e-6)


def test_higher_order_approximates_better():
    x = np.linspace(0, 1, 101)[:, None]

    def error(order):
        made = dpjax.approximate_bernstein(
            lambda x: jnp.sin(5 * x[0]), degree=20, dims=1, order=order
        )
        return np.max(np.abs(np.asarray(evaluate(made, x)) - np.sin(5 * x[:, 0])))

    assert error(1) > 5 * error(2) > 10 * error(4)


@pytest.mark.parametrize("order", [1, 3])
def test_degree_100_is_stable(order):
    values = np.random.default_rng(0).uniform(size=101).astype("float32")
    x = np.linspace(0, 1, 301)[:, None]
    made = np.asarray(evaluate(BernsteinPolynomial(jnp.asarray(values), order), x))
    np.testing.assert_allclose(made, direct(values.astype(float), order, x), atol=1e-4)
    if order == 1:
        assert values.min() <= made.min() <= made.max() <= values.max()
    assert made[0] == pytest.approx(float(values[0]), abs=1e-5)


def test_polynomial_under_jit_and_vmap():
    generator = np.random.default_rng(0)
    made = BernsteinPolynomial(jnp.asarray(generator.normal(size=(6, 6))), 2)
    points = generator.uniform(size=(10, 2))
    plain = made(points)
    assert plain.shape == (10,)
    np.testing.assert_allclose(evaluate(made, points), plain, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(made))(points), plain, atol=1e-5)
    square = evaluate(made, points.reshape(5, 2, 2))
    np.testing.assert_allclose(np.ravel(square), plain, atol=1e-5)


def test_gradient_of_a_linear_polynomial_is_exact():
    made = dpjax.approximate_bernstein(lambda x: 3 * x[0], degree=10, dims=1)
    slopes = jax.jit(jax.vmap(jax.grad(made)))(jnp.asarray([[0.0], [0.3], [1.0]]))
    np.testing.assert_allclose(slopes, 3, atol=1e-4)


def test_batch_of_polynomials(key):
    def release(epsilon):
        return dpjax.bernstein(0.1, epsilon, degree=4, dims=1)(key, jnp.zeros(5)).value

    batch = jax.jit(jax.vmap(release))(jnp.asarray([0.5, 1.0, 2.0]))
    at = jax.vmap(evaluate, (0, None))(batch, jnp.asarray([0.25]))
    assert at[0] == pytest.approx(2 * float(at[1]), rel=1e-3)
    assert at[1] == pytest.approx(2 * float(at[2]), rel=1e-3)


@pytest.mark.parametrize("points", [0.5, np.zeros(3), np.zeros((4, 1))])
def test_points_of_another_dimension_are_refused(points):
    with pytest.raises(ValueError, match=r"points must have shape \(..., 2\)"):
        BernsteinPolynomial(jnp.zeros((3, 3)))(points)


# The lattice.


def test_lattice_has_coordinate_i_along_axis_i():
    target = dpjax.evaluate_on_lattice(
        lambda shift: lambda x: x[0] + 10 * x[1] + shift, degree=4, dims=2
    )
    values = target(jnp.asarray(100.0))
    i, j = np.meshgrid(np.arange(5), np.arange(5), indexing="ij")
    np.testing.assert_allclose(values, i / 4 + 10 * j / 4 + 100, rtol=1e-6)


def test_function_of_several_scalars_gives_one_lattice_each():
    target = dpjax.evaluate_on_lattice(lambda _: lambda x: (x[0], x[0] > 0.5), degree=2, dims=1)
    line, step = target(jnp.zeros(3))
    assert line.tolist() == [0.0, 0.5, 1.0]
    assert step.tolist() == [False, False, True]


def test_targets_without_a_lattice_are_refused():
    with pytest.raises(TypeError, match="target must be a function"):
        dpjax.evaluate_on_lattice(jnp.zeros(3), degree=2, dims=1)
    with pytest.raises(TypeError, match="value of the target must be a function"):
        dpjax.evaluate_on_lattice(jnp.mean, degree=2, dims=1)(jnp.zeros(3))
    with pytest.raises(ValueError, match="must return scalars"):
        dpjax.evaluate_on_lattice(lambda _: lambda x: x, degree=2, dims=1)(jnp.zeros(3))
    with pytest.raises(ValueError, match="must return scalars"):
        dpjax.approximate_bernstein(lambda x: jnp.stack([x[0], 10 * x[0]]), degree=2, dims=1)


@pytest.mark.parametrize("name", ["degree", "dims", "order"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(name, value):
    sizes = {"degree": 2, "dims": 1, "order": 1, name: value}
    message = f"{name} must be an integer of at least 1, got {value}"
    with pytest.raises(ValueError, match=message):
        dpjax.bernstein(1.0, 1.0, **sizes)
    with pytest.raises(ValueError, match=message):
        dpjax.approximate_bernstein(lambda x: x[0], **sizes)
    if name != "order":
        del sizes["order"]
        with pytest.raises(ValueError, match=message):
            dpjax.evaluate_on_lattice(lambda _: lambda x: x[0], **sizes)


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_sizes_that_are_no_integers_are_refused(size):
    with pytest.raises(TypeError, match="degree must be an integer"):
        dpjax.bernstein(1.0, 1.0, degree=size, dims=1)


@pytest.mark.parametrize("shape", [(4,), (3, 3), (5, 5, 5), ()])
def test_values_that_are_not_the_lattice_are_refused(shape, key):
    with pytest.raises(ValueError, match=r"lattice values of shape \(5, 5\)"):
        dpjax.bernstein(1.0, 1.0, degree=4, dims=2)(key, jnp.zeros(shape))


# The release.


def test_noise_enters_the_lattice_values(draws):
    mechanism = dpjax.bernstein(0.1, 1.0, degree=4, dims=1, order=3)
    released = draws(mechanism, jnp.arange(5.0), 20_000)
    noise = (released.values - np.arange(5.0)) / mechanism.scale
    for axis in range(5):
        assert stats.kstest(noise[:, axis], "laplace").pvalue > FALSE_ALARM / 5
        assert stats.kstest(0.8 * noise[:, axis], "laplace").pvalue < FALSE_ALARM
    # Each is a normal deviate of 1 / sqrt(20000) where the values are independent.
    off_diagonal = np.corrcoef(noise.T) - np.eye(5)
    assert np.abs(off_diagonal).max() < stats.norm.isf(FALSE_ALARM / 20) / np.sqrt(20_000)
    # The coefficients, of which the operator has made mixtures, are not what got the noise.
    coefficients = jax.jit(jax.vmap(lambda polynomial: polynomial.coefficients))(released)
    assert np.std(coefficients, axis=0)[2] > 1.2 * np.sqrt(2) * mechanism.scale


def test_order_is_post_processing(key):
    value = jnp.arange(5.0)
    plain, iterated = (
        dpjax.bernstein(0.1, 1.0, degree=4, dims=1, order=order)(key, value).value
        for order in (1, 3)
    )
    np.testing.assert_array_equal(plain.values, iterated.values)
    assert (plain.order, iterated.order) == (1, 3)


def test_log_prob_is_that_of_the_lattice_values(key):
    value = np.random.default_rng(0).normal(size=(3, 3)).astype("float32")
    mechanism = dpjax.bernstein(0.1, 1.0, degree=2, dims=2, order=3)
    polynomial = mechanism(key, value).value
    exact = stats.laplace.logpdf(polynomial.values, value, mechanism.scale).sum()
    log_prob = float(jax.jit(mechanism.log_prob)(polynomial, value))
    assert log_prob == pytest.approx(exact, rel=1e-4)


def test_loss_on_a_neighbor_at_the_sensitivity_is_epsilon():
    mechanism = dpjax.bernstein(0.5, 0.8, degree=2, dims=2)
    value, far = jnp.zeros((3, 3)), BernsteinPolynomial(jnp.full((3, 3), 50.0))
    log_prob = jax.jit(mechanism.log_prob)
    loss = log_prob(far, value + 0.5) - log_prob(far, value)
    assert float(loss) == pytest.approx(0.8, rel=1e-4)


def test_every_lattice_of_a_pytree_is_charged(key):
    mechanism = dpjax.bernstein(0.125, 1.0, degree=1, dims=1)
    together = mechanism(key, (jnp.zeros(2), jnp.zeros(2))).value
    # The noise of all is one draw, for four values that may all move by the sensitivity.
    whole = dpjax.laplace(4 * 0.125, 1.0)(key, jnp.zeros(4)).value
    np.testing.assert_array_equal(np.concatenate([x.values for x in together]), whole)


@pytest.mark.slow
def test_pytree_of_lattices_multiplies_the_scale(key):
    one = dpjax.bernstein(0.1, 1.0, degree=4, dims=1)
    value = (np.zeros(5, "float32"), np.ones(5, "float32"), np.zeros(5, "float32"))
    together = one(key, value).value
    assert all(isinstance(polynomial, BernsteinPolynomial) for polynomial in together)
    # The noise of all the lattices is one draw, three times as large.
    whole = dpjax.laplace(5 * 0.1, 1.0 / 3)(key, np.concatenate(value)).value
    values = np.concatenate([polynomial.values for polynomial in together])
    np.testing.assert_allclose(values, whole, rtol=1e-3, atol=1e-3)
    shifted = tuple(x + np.float32(0.1) for x in value)
    far = tuple(BernsteinPolynomial(x + 100) for x in value)
    log_prob = jax.jit(one.log_prob)
    loss = log_prob(far, shifted) - log_prob(far, value)
    assert float(loss) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("dims", "order"), [pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_simultaneous_error_bounds_the_error_everywhere(dims, order, draws):
    mechanism = dpjax.bernstein(0.1, 1.0, degree=5, dims=dims, order=order)
    released = draws(mechanism, jnp.zeros(mechanism.lattice_shape), 2000)
    axis = np.linspace(0, 1, 41 if dims == 1 else 9)
    points = np.stack(np.meshgrid(*[axis] * dims, indexing="ij"), -1).reshape(-1, dims)
    curves = jax.jit(jax.vmap(evaluate, (0, None)))(released, points)
    worst = np.max(np.abs(curves), axis=1)
    for probability in (0.5, 0.9):
        bound = mechanism.error(confidence=probability, simultaneous=True)
        allowed = stats.binom.ppf(1 - FALSE_ALARM, 2000, 1 - probability)
        assert np.sum(worst > bound) <= allowed
        assert bound < 10 * np.quantile(worst, probability)


@pytest.mark.parametrize(("degree", "dims", "order"), [(1, 1, 2), (6, 1, 2), (9, 1, 5), (3, 2, 2)])
def test_no_polynomial_exceeds_its_values_by_more_than_stated(degree, dims, order):
    """The largest one for values from -1 to 1, at many points; in one dimension it is reached."""
    points = np.stack(np.meshgrid(*[np.linspace(0, 1, 501 if dims == 1 else 31)] * dims), -1)
    units = np.eye((degree + 1) ** dims).reshape(-1, *(degree + 1,) * dims)
    parts = [direct(unit, order, points.reshape(-1, dims)) for unit in units]
    largest = np.max(np.sum(np.abs(parts), axis=0))
    bound = sup_norm_growth(degree, dims, order)
    assert largest <= bound * (1 + 1e-12)
    assert dims > 1 or bound < 1.01 * largest


def test_error_of_a_lattice_value():
    mechanism = dpjax.bernstein(0.1, 1.0, degree=5, dims=2)
    exact = mechanism.scale * stats.laplace.ppf(0.975)
    grid = mechanism.grid
    assert exact + grid <= mechanism.error() <= exact * (1 + 6e-5) + grid


def test_curve_of_a_database_is_released(key):
    def distribution(database):
        return lambda x: jnp.mean(database <= x[0])

    target = dpjax.evaluate_on_lattice(distribution, degree=5, dims=1)
    bound = dpjax.assume_sensitivity(1 / 40, norm="linf", n=40)
    private = dpjax.privatize(target, dpjax.bernstein(bound, 1e6, degree=5, dims=1))
    curve = private(key, np.linspace(0, 1, 40)).value
    np.testing.assert_allclose(curve.values, [1 / 40, 0.2, 0.4, 0.6, 0.8, 1.0], atol=0.01)
    assert evaluate(curve, np.array([[0.5]])).shape == (1,)
