"""Class-conditional Gaussians: the fit, what is drawn, its density, and what is refused.

Statistical tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import jax
import numpy as np
import pytest
from scipy import stats

from dpjax.oracles import class_gaussians

FALSE_ALARM = 1e-6
RNG = np.random.default_rng(20170611)
MIX = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.3, 0.0, 0.95]])
X = np.concatenate([RNG.normal(size=(60, 3)) @ MIX.T, 4 + 2 * RNG.normal(size=(20, 3))])
PUBLIC = {"x": X.astype("float32"), "y": np.repeat([-1, 1], [60, 20])}


@pytest.fixture(scope="module")
def oracle():
    return class_gaussians(PUBLIC)


def covariances(oracle):
    scaled = np.asarray(oracle.deviations)[:, :, None] * np.asarray(oracle.factors)
    return scaled @ scaled.transpose(0, 2, 1)


def test_the_fit_is_that_of_each_class(oracle):
    np.testing.assert_array_equal(oracle.labels, [-1, 1])
    np.testing.assert_allclose(np.exp(oracle.choice.log_probabilities), [0.75, 0.25], rtol=1e-6)
    for c, rows in enumerate((PUBLIC["x"][:60], PUBLIC["x"][60:])):
        np.testing.assert_allclose(oracle.means[c], rows.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(oracle.deviations[c], rows.std(axis=0, ddof=1), rtol=1e-5)
        correlations = np.corrcoef(rows.T)
        found = np.asarray(oracle.factors[c]) @ np.asarray(oracle.factors[c]).T
        kept = (found / correlations)[~np.eye(3, dtype=bool)]
        np.testing.assert_allclose(kept, kept[0], rtol=1e-4)  # All are shrunk alike.
        assert 0 <= kept[0] < 1
    assert np.ptp(oracle.factors[0] - np.eye(3)) > np.ptp(oracle.factors[1] - np.eye(3))


def test_shrinkage_is_the_one_of_the_paper():
    """By hand from Equation (23): two features, p = 3, correlation -1/2: min(1, 4 / 1.5)."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], "float32")
    y = np.zeros(3, int)
    assert float(class_gaussians({"x": x, "y": y}).factors[0, 1, 0]) == 0
    factor = class_gaussians({"x": x, "y": y}, shrinkage=0.25).factors[0, 1, 0]
    assert float(factor) == pytest.approx(-0.375)


def test_draws_follow_the_fit(oracle, key):
    drawn = jax.jit(oracle, static_argnums=1)(key, 20_000)
    x, y = np.asarray(drawn["x"], float), np.asarray(drawn["y"])
    assert drawn["y"].dtype == PUBLIC["y"].astype("int32").dtype
    assert stats.binomtest(int((y == 1).sum()), len(y), 0.25).pvalue > FALSE_ALARM
    assert stats.binomtest(int((y == 1).sum()), len(y), 0.27).pvalue < FALSE_ALARM
    for c, label in enumerate((-1, 1)):
        factor = np.linalg.cholesky(covariances(oracle)[c].astype(float))
        white = np.linalg.solve(factor, (x[y == label] - np.asarray(oracle.means[c])).T)
        for column in (*white, (white[0] + white[1]) / np.sqrt(2), (white[1] - white[2]) / 2**0.5):
            assert stats.kstest(column, "norm", method="asymp").pvalue > FALSE_ALARM
            assert stats.kstest(0.85 * column, "norm", method="asymp").pvalue < FALSE_ALARM


def test_density_is_that_of_the_fit(oracle):
    densities = jax.jit(jax.vmap(oracle.log_prob))
    found = densities({"x": PUBLIC["x"], "y": PUBLIC["y"]})
    for c, rows in enumerate((slice(0, 60), slice(60, 80))):
        normal = stats.multivariate_normal(oracle.means[c], covariances(oracle)[c])
        expected = np.log([0.75, 0.25][c]) + normal.logpdf(PUBLIC["x"][rows])
        np.testing.assert_allclose(found[rows], expected, rtol=1e-4)
    assert np.isneginf(densities({"x": PUBLIC["x"], "y": np.zeros(80, int)})).all()


def test_few_or_constant_records_still_have_a_density():
    """Two records of a class in four dimensions; a feature that is constant in it; one in all."""
    x = RNG.normal(size=(6, 4)).astype("float32")
    x[:2, 1], x[:, 3] = 0.3, 0.1
    oracle = class_gaussians({"x": x, "y": np.array([0, 0, 1, 1, 1, 1])})
    least = 0.01 * x[:, 1].std(ddof=1)
    assert float(oracle.deviations[0, 1]) == pytest.approx(least, rel=1e-5)
    np.testing.assert_array_equal(oracle.deviations[:, 3], 0)
    log_prob = jax.jit(oracle.log_prob)
    assert np.isfinite(log_prob({"x": x[0], "y": np.asarray(0)}))
    x[0, 3] = 0.2
    assert np.isneginf(log_prob({"x": x[0], "y": np.asarray(0)}))


def test_units_do_not_matter():
    scale = np.array([1e3, 1.0, 1e-3], "float32")
    other = class_gaussians({"x": PUBLIC["x"] * scale, "y": PUBLIC["y"]})
    found = class_gaussians(PUBLIC)
    np.testing.assert_allclose(other.factors, found.factors, atol=1e-6)
    np.testing.assert_allclose(other.deviations, found.deviations * scale[None], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.arange(80)}, ValueError, "at least 2 records of every class, got 1 of class 0"),
        ({"x": X[:, 0]}, ValueError, r'records must be \{"x"'),
        ({"x": X.astype(int)}, TypeError, '"x" must be floats'),
        ({"x": X * np.nan}, ValueError, "records must be finite"),
        ({"z": X}, ValueError, "records must be"),
    ],
)
def test_bad_records_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        class_gaussians({**PUBLIC, **change})


def test_fitting_in_a_traced_program_is_refused():
    with pytest.raises(TypeError, match="class_gaussians runs on the host"):
        jax.jit(lambda x: class_gaussians({**PUBLIC, "x": x}).means)(PUBLIC["x"])


def test_bad_parameters_are_refused():
    for shrinkage in (0.0, 1.0, np.nan):
        with pytest.raises(ValueError, match="shrinkage must be"):
            class_gaussians(PUBLIC, shrinkage=shrinkage)
    with pytest.raises(ValueError, match="floor must be"):
        class_gaussians(PUBLIC, floor=-1.0)
