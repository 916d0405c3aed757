"""Widths of posteriors before a study, against normal ones, whose width is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.population._widths import _check_size, _with_other_noise


def private(n, epsilon):
    return dpjax.privatize(jnp.mean, dpjax.gaussian(4 / n, epsilon, delta=1e-6))


def model(key, mean, n):
    return mean + jax.random.normal(key, (n,))


def test_widths_are_those_of_the_exact_posterior(keys):
    found = dpjax.posterior_widths(
        keys(1),
        private,
        prior=jax.random.normal,
        model=model,
        n=[40],
        epsilon=[0.5, 4.0],
        draws=60_000,
        repeats=30,
    )
    assert found.width.dims == ("n", "epsilon", "repeat")
    for epsilon in (0.5, 4.0):
        scale = float(private(40, epsilon).mechanism.effective_scale(like=jnp.zeros(())))
        variance = scale**2 + 1 / 40
        exact = 2 * 1.96 * np.sqrt(variance / (1 + variance))
        measured = float(found.width.sel(n=40, epsilon=epsilon).mean())
        assert measured == pytest.approx(exact, rel=0.06)  # The two differ by much more.
    # At a false-alarm rate of 1e-6.
    assert float(found.contains.sum()) >= stats.binom.ppf(1e-6, 60, 0.95)


def test_a_cell_with_a_narrow_posterior_is_refused_and_not_left_out():
    """The average of the others would be too large."""
    cell = {"effective_size": np.array([900.0, 40.0])}
    with pytest.raises(ValueError, match=r"draws=10,000 is too small: .* such as 5e\+04"):
        _check_size(800, 3.0, cell, 10_000)
    _check_size(800, 3.0, {"effective_size": np.array([900.0, 100.0])}, 10_000)


def test_a_target_that_depends_on_epsilon_is_simulated_for_each(keys):
    """Where only the noise differs, the values of one epsilon are those of all."""

    def clipped(largest, epsilon):
        mechanism = dpjax.laplace(largest / 20, epsilon)
        return dpjax.privatize(lambda x: jnp.clip(x, -largest, largest).mean(), mechanism)

    def bank(private):
        given = {"prior": jax.random.normal, "model": model, "n": 40, "draws": 200}
        return dpjax.simulation_bank(keys(1), private, **given)

    first = bank(clipped(1.0, 1.0))
    assert _with_other_noise(first, keys(1), clipped(1.0, 3.0)).values is first.values
    other = _with_other_noise(first, keys(1), clipped(3.0, 3.0))
    np.testing.assert_array_equal(other.values[0], bank(clipped(3.0, 3.0)).values[0])
    assert np.max(other.values[0]) > 1 >= np.max(first.values[0])


def test_wrong_arguments_are_refused_by_name(keys):
    given = {"prior": jax.random.normal, "model": model, "n": [40], "epsilon": [1.0]}
    with pytest.raises(ValueError, match="n must be"):
        dpjax.posterior_widths(keys(1), private, **(given | {"n": [0]}))
    with pytest.raises(ValueError, match="epsilon must be"):
        dpjax.posterior_widths(keys(1), private, **(given | {"epsilon": [-1.0]}))
    with pytest.raises(TypeError, match=r"dpjax\.privatize"):
        dpjax.posterior_widths(keys(1), lambda n, epsilon: jnp.mean, **given)
