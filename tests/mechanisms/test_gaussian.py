"""The Gaussian mechanism: what it promises, and which calibration it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax


def test_guarantee_and_norm():
    mechanism = dpjax.gaussian(2.0, 0.5, 1e-6)
    assert repr(mechanism.guarantee) == "(epsilon=0.5, delta=1e-06)-DP, under replace-one"
    assert mechanism.norm == "l2"
    assert mechanism.scale == pytest.approx(2 * dpjax.gaussian(1.0, 0.5, 1e-6).scale, rel=1e-12)


def test_analytic_calibration_is_the_default_and_the_smaller():
    analytic = dpjax.gaussian(1.0, 1.0, 1e-5)
    assert analytic.scale == dpjax.gaussian(1.0, 1.0, 1e-5, calibration="analytic").scale
    assert analytic.scale < dpjax.gaussian(1.0, 1.0, 1e-5, calibration="classical").scale


def test_delta_below_what_the_tables_miss_is_refused(key):
    message = r"delta=1e-28 is too close to 0 or 1 at epsilon=1: .* in each of 3 coordinates"
    with pytest.raises(ValueError, match=message):
        dpjax.gaussian(1.0, 1.0, 1e-28)(key, jnp.zeros(3))
    scale = jax.jit(lambda delta: dpjax.gaussian(1.0, 1.0, delta).effective_scale((3,)))
    assert np.isnan(scale(1e-28))
    assert scale(1e-20) > 0


def test_a_traced_epsilon_that_delta_does_not_cover_has_no_scale_either(key):
    """What is stated of the noise is NaN where what is released is."""

    @jax.jit
    def at(epsilon):
        mechanism = dpjax.gaussian(1.0, epsilon, 1e-5)
        released, stated = mechanism(key, 0.0).value, mechanism.effective_scale()
        return released, stated, mechanism.error(confidence=0.9), mechanism.log_prob(0.0, 0.0)

    assert np.isfinite(at(50.0)).all()
    assert np.isnan(at(60.0)).all()


def test_unknown_calibration_is_refused():
    with pytest.raises(ValueError, match=r"calibration must be one of .* got 'best'"):
        dpjax.gaussian(1.0, 1.0, 1e-5, calibration="best")


@pytest.mark.parametrize("epsilon", [1.0000001, 2, 10.0, float("inf")])
def test_classical_calibration_refuses_epsilon_above_one(epsilon):
    with pytest.raises(ValueError, match=f"epsilon must be .* got {epsilon}"):
        dpjax.gaussian(1.0, epsilon, 1e-5, calibration="classical")


@pytest.mark.parametrize("epsilon", ["1", None, np.array([0.1, 0.2])])
def test_classical_calibration_refuses_what_is_no_number(epsilon):
    with pytest.raises(TypeError, match="epsilon must be"):
        dpjax.gaussian(1.0, epsilon, 1e-5, calibration="classical")


def test_classical_calibration_gives_nan_for_a_traced_epsilon_above_one(key):
    def release(epsilon):
        return dpjax.gaussian(1.0, epsilon, 1e-5, calibration="classical")(key, 0.0)

    epsilons = jnp.asarray([0.5, 1.0, 1.001, 10.0])
    batch = jax.jit(jax.vmap(release))(epsilons)
    assert np.isnan(batch.value).tolist() == [False, False, True, True]
    assert np.isnan(batch.guarantee.epsilon).tolist() == [False, False, True, True]


def test_error_agrees_with_peers(reference):
    mechanism = dpjax.gaussian(1.0, 1.0, 1e-5)
    for row in reference("peers")["accuracy"]:
        bar = mechanism.error(confidence=1 - row["alpha"]) / mechanism.scale
        exact = row["gaussian"] / row["scale"]
        grid = mechanism.grid / mechanism.scale
        assert exact + grid <= bar <= exact * (1 + 6e-5) + grid


def test_release_keeps_epsilon_and_delta_on_a_neighbor(log_probs):
    mechanism = dpjax.gaussian(1.0, 1.0, 1e-2)
    grid = np.linspace(-12, 12, 200_001) * mechanism.scale
    here, there = (np.exp(log_probs(mechanism, grid, x)) for x in (0.0, 1.0))
    delta = np.trapezoid(np.maximum(here - np.e * there, 0), grid)
    assert delta == pytest.approx(1e-2, rel=1e-3)
