"""A multiplier of the user's own is rounded outward, or refused."""

import functools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import dpjax
from dpjax.mechanisms import additive
from dpjax.mechanisms._additive import multiple_of
from dpjax.random import GAUSSIAN, LAPLACE

RNG = np.random.default_rng(0)
POINTS = [(float(10 ** RNG.uniform(-4, 0.5)), float(10 ** RNG.uniform(-9, -3))) for _ in range(40)]


def by(numpy):
    def multiplier(epsilon, delta):
        logarithm = -numpy.log(delta * (1 - 2.0**-24))
        return (numpy.sqrt(logarithm + epsilon) + numpy.sqrt(logarithm)) / (
            numpy.sqrt(2.0) * epsilon
        )

    return multiplier


def cancels(numpy):
    def multiplier(epsilon, delta):
        logarithm = -numpy.log(delta * (1 - 2.0**-24))
        return 1 / (numpy.sqrt(2.0) * (numpy.sqrt(logarithm + epsilon) - numpy.sqrt(logarithm)))

    return multiplier


def exact(epsilon, delta):
    with mpmath.workdps(60):
        return by(mpmath)(mpmath.mpf(epsilon), mpmath.mpf(delta))


def below(unit, epsilon, delta):
    """By which part a scale is below the exact one; rounding of float64 alone is covered."""
    return float(1 - mpmath.mpf(float(unit)) / exact(epsilon, delta)) > 2.0**-40


def scales(multiplier, points):
    made = functools.partial(additive, 1.0, norm="l2", noise=GAUSSIAN, multiplier=multiplier)
    return [made(epsilon, delta=delta).scale for epsilon, delta in points]


@pytest.mark.parametrize("numpy", [jnp, np, math], ids=["jnp", "numpy", "math"])
@pytest.mark.parametrize("formula", [by, cancels])
def test_a_scale_of_concrete_parameters_is_not_below_the_formula(formula, numpy):
    """With `jnp` it was in float32: below in 60 of 120, by .87% where the formula cancels."""
    found = scales(formula(numpy), POINTS)
    assert not any(below(unit, *point) for unit, point in zip(found, POINTS, strict=True))
    assert all(
        unit <= float(exact(*point)) * (1 + 2.0**-16)
        for unit, point in zip(found, POINTS, strict=True)
    )


def test_what_the_formula_gets_is_float64_everywhere():
    """Also where a mechanism of concrete parameters is made inside a compiled function."""
    seen = []

    def multiplier(epsilon, delta):
        seen.append((jnp.asarray(epsilon).dtype, jnp.sqrt(epsilon).dtype))
        return 1 / jnp.sqrt(epsilon)

    def scale():
        return additive(1.0, 0.3, norm="l1", noise=LAPLACE, multiplier=multiplier).scale

    outside, inside = scale(), jax.jit(scale)()
    assert set(seen) == {(np.dtype(np.float64),) * 2}
    assert type(outside) is float
    assert float(inside) == np.float32(outside)


@pytest.mark.parametrize("epsilon", [1.1e-9, 1e-8, 1e-7])
def test_a_formula_that_cancels_is_refused_at_small_parameters(epsilon):
    """Else what it loses is charged. Every relative loss from 2^-20 on is seen at some width."""
    for delta in (1e-300, 1e-10, 0.5):
        lost = abs(
            float(mpmath.mpf(float(cancels(np)(epsilon, delta))) / exact(epsilon, delta)) - 1
        )
        try:
            unit = multiple_of(cancels(np), epsilon, delta)
        except ValueError:  # The one below.
            continue
        assert not below(unit, epsilon, delta)
        assert lost < 2.0**-18
    with pytest.raises(
        ValueError, match=r"multiplier loses .* nearly equal numbers: rewrite the formula"
    ):
        multiple_of(cancels(jnp), epsilon=1.1e-9, delta=1e-300)


@pytest.mark.parametrize(
    ("multiplier", "error", "message"),
    [
        (
            lambda e, d: jnp.float32(1.0) / e.astype(np.float32),
            TypeError,
            "float64 parameters, got f",
        ),
        (lambda e, d: np.float32(3) * np.float32(e), TypeError, "float64 parameters, got float32"),
        (lambda e, d: jnp.inf, ValueError, "scale of the noise overflows"),
    ],
)
def test_what_rounds_or_overflows_is_refused(multiplier, error, message):
    with pytest.raises(error, match=message):
        additive(1.0, 0.5, norm="l1", noise=LAPLACE, multiplier=multiplier)


def test_a_short_float_inside_of_a_formula_is_charged():
    """A staircase is often even about a center: 8 of 100 were missed by steps of one length."""

    def rounded(epsilon, _):
        return (1 / epsilon).astype(np.float32).astype(np.float64)

    for epsilon in 10 ** np.random.default_rng(1).uniform(-4, 1, 100):
        assert multiple_of(rounded, float(epsilon), 0.0) * epsilon > 1 - 2.0**-40


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 60.0])
def test_what_bends_without_rounding_is_taken(epsilon):
    """Powers, and exponentials of epsilon."""
    for formula in (lambda e, _: math.exp(-e / 2) / e, lambda e, _: e**-7):
        assert multiple_of(formula, epsilon, 0.0) == pytest.approx(formula(epsilon, 0), rel=1e-9)


def test_tiny_epsilons_are_refused():
    with pytest.raises(ValueError, match="at least 1e-09 for a multiplier of your own"):
        additive(1.0, 1e-10, norm="l1", noise=LAPLACE, multiplier=lambda e, d: 1 / e)
    assert dpjax.laplace(1.0, 1e-10).scale == 1e10


def traced(formula, epsilon, delta, *, both):
    def scale(epsilon, delta):
        made = additive(
            1.0, epsilon, norm="l2", noise=GAUSSIAN, delta=delta, multiplier=formula(jnp)
        )
        return made.scale

    if both:
        return jax.jit(scale)(epsilon, delta)
    return jax.jit(lambda epsilon: scale(epsilon, delta))(epsilon)


@pytest.mark.parametrize("both", [False, True], ids=["epsilon", "epsilon and delta"])
def test_a_traced_scale_is_not_below_the_formula(both):
    """Its float32 is charged, of both parameters or of epsilon alone; beyond, there is NaN."""
    points = [(epsilon, 1e-6 if not both else delta) for epsilon, delta in POINTS]
    for point in points[:: 1 if both else 4]:
        unit, values = traced(by, *point, both=both), tuple(map(np.float32, point))
        known = (float(values[0]), float(values[1]) if both else point[1])
        assert float(unit) >= float(exact(*known))
        assert float(unit) <= float(exact(*known)) * (1 + 1e-4)
    for epsilon in (1e-5, 100.0):
        assert math.isnan(traced(by, epsilon, 1e-6, both=both))
    with pytest.raises(ValueError, match=r"multiplier loses .* in float32 at epsilon="):
        traced(cancels, 0.5, 1e-6, both=both)


def cancels_twice(numpy):
    """1 / epsilon, by what e^x has beyond its first three terms."""

    def multiplier(epsilon, _):
        return epsilon**2 / 6 / (numpy.exp(epsilon) - 1 - epsilon - epsilon**2 / 2)

    return multiplier


@pytest.mark.parametrize("both", [False, True], ids=["epsilon", "epsilon and delta"])
def test_a_traced_scale_in_float64_is_compared_with_itself_nearby(both):
    """There is no longer float: with itself alone, it lost 4e-4 at epsilon 1e-4 in silence."""
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"multiplier loses .* in float64 at epsilon="):
            traced(cancels_twice, 1e-4, 1e-6, both=both)
        for epsilon, delta in POINTS[::8]:
            known = epsilon, delta if both else 1e-6
            part = float(traced(cancels, *known, both=both)) / float(exact(*known))
            assert 1 <= part < 1 + 1e-4


def test_a_traced_parameter_needs_jax():
    def scale(epsilon):
        return additive(
            1.0, epsilon, norm="l1", noise=LAPLACE, multiplier=lambda e, d: 1 / math.sqrt(e)
        ).scale

    with pytest.raises(TypeError, match=r"must be written in jax\.numpy"):
        jax.jit(scale)(0.5)
