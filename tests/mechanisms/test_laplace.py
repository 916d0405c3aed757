"""The Laplace mechanism: its scale, its loss, and the event that stands for vectors."""

import itertools

import numpy as np
import pytest

import dpjax


def test_scale_is_sensitivity_over_epsilon(reference):
    rows = reference("r_diffpriv")["laplace_scale"]
    assert len(rows) == 4
    for row in rows:
        scale = dpjax.laplace(row["Delta"], row["epsilon"]).scale
        assert scale == pytest.approx(row["scale_formula"], rel=1e-12)


def test_guarantee_is_pure():
    mechanism = dpjax.laplace(0.01, epsilon=0.5)
    assert repr(mechanism.guarantee) == "(epsilon=0.5, delta=0)-DP, under replace-one"
    assert mechanism.norm == "l1"


def test_a_query_is_no_sensitivity():
    with pytest.raises(TypeError, match="got a Query: call its method"):
        dpjax.laplace(dpjax.queries.counting_query(), epsilon=0.5)


def test_error_agrees_with_peers(reference):
    for row in reference("peers")["accuracy"]:
        mechanism = dpjax.laplace(row["scale"], 1.0)
        bar = mechanism.error(confidence=1 - row["alpha"]) - mechanism.grid
        assert row["laplace"] <= bar <= row["laplace"] * (1 + 6e-5)


def test_hockey_stick_divergence_agrees_with_the_exact_one(reference, log_probs):
    for row in reference("peers")["laplace_hockey_stick"]:
        mechanism = dpjax.laplace(row["scale"], 1.0)
        grid = np.linspace(-40, 41, 200_001) * row["scale"]
        here, there = (np.exp(log_probs(mechanism, grid, x)) for x in (0.0, 1.0))
        excess = np.trapezoid(np.maximum(here - np.exp(row["eps"]) * there, 0), grid)
        assert excess == pytest.approx(float(row["delta_exact"]), abs=1e-4)


# dp_event is that of a scalar. Shifts a >= b of two coordinates, in scales, against a + b of one:


def one_coordinate(shift, t):
    """The hockey-stick divergence at t of Laplace noise of scale 1 against its shift."""
    inside = -np.expm1((np.minimum(t, shift) - shift) / 2)
    return np.where(t > -shift, inside, -np.expm1(np.minimum(t, 0)))


def two_coordinates(a, b, t):
    """The same for two coordinates: an average of `one_coordinate` over the loss of the first.

    That loss is a with probability 1/2, -a with probability exp(-a)/2, and in between has the
    density exp((loss - a)/2)/4.
    """
    ends = np.sort(np.clip([-a, t - b, t + b, a], -a, a))  # The integrand has kinks inside.
    nodes, weights = np.polynomial.legendre.leggauss(40)
    total = one_coordinate(b, t - a) / 2 + np.exp(-a) * one_coordinate(b, t + a) / 2
    for low, high in itertools.pairwise(ends):
        loss = (low + high) / 2 + (high - low) / 2 * nodes
        density = np.exp((loss - a) / 2) / 4
        total += (high - low) / 2 * np.sum(weights * density * one_coordinate(b, t - loss))
    return total


GRID = [
    (a, share * a, place)
    for a in (0.01, 0.1, 0.5, 1.0, 3.0, 10.0)
    for share in (0.01, 0.3, 0.9, 1.0)
    for place in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0, 1.1)
]


def test_vector_is_dominated_by_the_scalar():
    for a, b, place in GRID:
        t = place * (a + b)
        gap = one_coordinate(a + b, t) - two_coordinates(a, b, t)
        assert gap >= -1e-12
        s = t - a
        # The formulas of the docstring of `laplace`.
        if s > b:
            expected = 0.0
        elif s >= -b:
            expected = (b - s) * np.exp((s - b) / 2) / 4
        else:
            expected = b * np.exp((s - b) / 2) / 2
        assert gap == pytest.approx(expected, abs=1e-12), (a, b, t)


@pytest.mark.slow
def test_two_coordinates_in_the_check_above_are_what_laplace_draws(draws, log_probs):
    mechanism = dpjax.laplace(1.0, 1.0)
    value, neighbor = np.zeros(2), np.array([0.7, 0.3])
    outputs = draws(mechanism, value, 200_000)
    loss = log_probs(mechanism, outputs, value) - log_probs(mechanism, outputs, neighbor)
    for t in (0.0, 0.2, 0.5, 0.9):
        excess = np.maximum(-np.expm1(t - loss), 0)
        # Five standard errors: a false alarm once in 2 * 10^6.
        margin = 5 * excess.std() / np.sqrt(len(excess))
        assert excess.mean() == pytest.approx(two_coordinates(0.7, 0.3, t), abs=margin)
