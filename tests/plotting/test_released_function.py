"""A released function: its curve or map, against the raw one."""

import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.plotting import released_function

LINE = dpjax.BernsteinPolynomial(jnp.array([0.0, 0.5, 1.0]))
PLANE = dpjax.BernsteinPolynomial(jnp.array([[0.0, 1.0], [2.0, 3.0]]))  # 2 x0 + x1


def square(x):
    return x[0] ** 2


def test_curves_in_one_variable(ax):
    released_function(LINE, square, error=0.25, ax=ax)
    raw, smooth, released = ax.get_lines()
    x = np.asarray(raw.get_xdata())
    np.testing.assert_allclose(raw.get_ydata(), x**2, atol=1e-6)
    np.testing.assert_allclose(released.get_ydata(), x, atol=1e-6)
    # B_2 of the square is x^2 + x (1 - x) / 2.
    np.testing.assert_allclose(smooth.get_ydata(), x**2 + x * (1 - x) / 2, atol=1e-6)
    assert [line.get_label() for line in (raw, smooth, released)] == [
        "raw function, not private",
        "its Bernstein polynomial, not private",
        "private release",
    ]
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(-0.25, abs=1e-6)
    assert band[:, 1].max() == pytest.approx(1.25, abs=1e-6)


def test_units_are_those_of_domain_and_codomain(ax):
    labels = ["radius [mm]", "area [mm²]"]
    released_function(LINE, error=0.1, domain=[(10, 30)], codomain=(100, 300), labels=labels, ax=ax)
    (released,) = ax.get_lines()
    x, y = (np.asarray(part) for part in released.get_data())
    assert (x[0], x[-1]) == (10, 30)
    np.testing.assert_allclose(y, 100 + 10 * (x - 10), rtol=1e-6)
    assert ax.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(320)
    assert [ax.get_xlabel(), ax.get_ylabel()] == labels


def test_a_map_in_two_variables(ax):
    labels = ["a [mm]", "b [mm]", "c [g]"]
    domain = [(0, 10), (0, 1)]
    released_function(PLANE, lambda x: x[0] + x[1], domain=domain, labels=labels, ax=ax)
    mesh, contours = ax.collections
    values = np.asarray(mesh.get_array()).reshape(65, 65)
    places = np.asarray(mesh.get_coordinates())
    np.testing.assert_allclose(values, places[..., 0] / 5 + places[..., 1], atol=1e-5)
    for level, path in zip(contours.levels, contours.get_paths(), strict=True):
        np.testing.assert_allclose(path.vertices @ [0.1, 1], level, atol=1e-5)
    assert len(contours.levels) > 1
    (bar,) = (other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylabel() == "private release: c [g]"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("a [mm]", "b [mm]")


def test_without_the_raw_function_nothing_private_is_drawn(ax):
    released_function(PLANE, ax=ax)
    assert len(ax.collections) == 1
    assert not ax.get_title()
    assert [ax.get_xlabel(), ax.get_ylabel()] == ["x0", "x1"]


def test_what_does_not_fit_is_refused(ax):
    cube = dpjax.BernsteinPolynomial(jnp.zeros((2, 2, 2)))
    for polynomial, more, message in (
        (cube, {}, "one or two variables"),
        (PLANE, {"error": 1.0}, "error must be None for two variables"),
        (PLANE, {"domain": [(0, 1)]}, "domain must be 2 intervals, got 1"),
        (LINE, {"labels": ["x"]}, "labels must contain 2 texts"),
    ):
        with pytest.raises(ValueError, match=message):
            released_function(polynomial, **more, ax=ax)
