"""Mixtures: whom records come from, their density, and what is refused.

Statistical tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm
from scipy import stats

from dpjax.oracles import independent, mixture, resample

FALSE_ALARM = 1e-6
WEIGHTS = np.array([0.4, 0.6])
MEANS, SPREADS = np.array([0.5, 0.75]), np.array([0.14, 0.07])


def gaussian(mean, spread):
    return independent(
        lambda key: mean + spread * jax.random.normal(key), lambda x: norm.logpdf(x, mean, spread)
    )


# The density of the paper's Figure 7; weights need not add up to 1.
ORACLE = mixture([gaussian(*each) for each in zip(MEANS, SPREADS, strict=True)], 5 * WEIGHTS)


def cdf(x, weights=WEIGHTS):
    return sum(w * stats.norm.cdf(x, *m) for w, *m in zip(weights, MEANS, SPREADS, strict=True))


def test_records_follow_the_mixture(key):
    drawn = np.asarray(jax.jit(ORACLE, static_argnums=1)(key, 20_000))
    assert stats.kstest(drawn, cdf, method="asymp").pvalue > FALSE_ALARM
    # Other weights are found out.
    other = lambda x: cdf(x, [0.45, 0.55])  # noqa: E731
    assert stats.kstest(drawn, other, method="asymp").pvalue < FALSE_ALARM


def test_density_is_that_of_the_mixture():
    x = np.linspace(-1, 2.5, 3_501)
    density = np.exp(np.asarray(jax.vmap(ORACLE.log_prob)(x.astype("float32")), float))
    expected = sum(w * stats.norm.pdf(x, *m) for w, *m in zip(WEIGHTS, MEANS, SPREADS, strict=True))
    np.testing.assert_allclose(density, expected, rtol=1e-4, atol=1e-6)
    assert np.trapezoid(density, x) == pytest.approx(1, abs=1e-5)


def test_components_may_be_of_any_kind(key):
    """Trees of records, samplers, oracles fitted to records, mixtures."""
    public = {"x": np.array([1.0, 2.0], "float32"), "y": np.array([7, 8])}

    def sampler(key):
        return {"x": jax.random.uniform(key), "y": jnp.asarray(0)}

    inner = mixture([sampler, resample(public)], [1, 1])
    drawn = jax.jit(mixture([inner, sampler], [1, 1]), static_argnums=1)(key, 200)
    x, y = (np.asarray(drawn[name]) for name in ("x", "y"))
    assert set(y) == {0, 7, 8}
    np.testing.assert_array_equal(y[y > 0], 6 + x[y > 0])
    assert (x[y == 0] < 1).all()


def test_discrete_components_add_up():
    oracle = mixture([resample(np.array([1, 2])), resample(np.array([2, 3]))], [0.25, 0.75])
    found = np.exp(jax.jit(jax.vmap(oracle.log_prob))(np.arange(5)))
    np.testing.assert_allclose(found, [0, 0.125, 0.5, 0.375, 0], atol=1e-6)


def test_a_component_without_a_density_says_so():
    oracle = mixture([jax.random.normal, gaussian(0.0, 1.0)], [1, 1])
    with pytest.raises(TypeError, match="oracle must have a log density"):
        oracle.log_prob(0.0)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0], ValueError, "weights must be 2 numbers"),
        ([1.0, 0.0], ValueError, "weights must be finite and above 0"),
        ([1.0, -1.0], ValueError, "weights must be finite and above 0"),
        ([1.0, np.nan], ValueError, "weights must be finite and above 0"),
        ([1.0, 1e-10], ValueError, "at least 2\\^-32 times their sum"),
        (["a", "b"], TypeError, "weights must contain real numbers"),
    ],
)
def test_bad_weights_are_refused(weights, error, message):
    with pytest.raises(error, match=message):
        mixture([jax.random.normal, jax.random.uniform], weights)


def test_traced_weights_are_refused():
    with pytest.raises(TypeError, match="weights must be known"):
        jax.jit(lambda weights: mixture([jax.random.normal] * 2, weights).choice)(np.ones(2))


def test_bad_components_are_refused():
    with pytest.raises(ValueError, match="components must contain at least one"):
        mixture([], [])
    with pytest.raises(TypeError, match="components must be a function"):
        mixture([3.0], [1])
    pair = lambda key: jax.random.normal(key, (2,))  # noqa: E731
    with pytest.raises(ValueError, match=r"records of one kind, .*float32\[\].*float32\[2\]"):
        mixture([jax.random.normal, pair], [1, 1])
