"""Guarantees that hold though a device rounds divisions and roots by two units in the last place.

A GPU has `div.full.f32`, off by up to two units, and approximate roots. An interpreter moves the
results of such operations by two units, all up, all down, or each at random. What is checked are
the numbers that noise is drawn by, against exact ones.
"""

import itertools
import math

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._tracing._walks import sizes_of_scan
from dpjax.learning._rounding import root_of_squares
from dpjax.mechanisms._gaussian_multipliers import analytic_multiplier, classical_multiplier
from dpjax.random import _grid_fit
from dpjax.random._grid_fit import Calibration
from dpjax.random._noise import LAPLACE_LATTICE

UNITS = 2
APPROXIMATE = {"div", "sqrt", "rsqrt", "exp", "log", "sinh", "asinh"}


def perturbed(function, moves):
    """The function, with results of approximate operations moved by so many units."""

    def moved(x):
        steps = next(moves)
        y = np.asarray(x)
        for _ in range(abs(steps)):
            y = np.nextafter(y, np.asarray(math.copysign(np.inf, steps), y.dtype))
        return jnp.asarray(y)

    def run(jaxpr, consts, *arguments):
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(x):
            return x.val if isinstance(x, jex.core.Literal) else known[x]

        for equation in jaxpr.eqns:
            inputs = [read(x) for x in equation.invars]
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
                results = run(inner.jaxpr, inner.consts, *inputs)
            elif equation.primitive.name == "scan":
                results = scan(equation.params, inputs)
            else:
                results = equation.primitive.bind(*inputs, **equation.params)
                if not equation.primitive.multiple_results:
                    results = [results]
            if equation.primitive.name in APPROXIMATE:
                results = [moved(x) for x in results]
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def scan(params, inputs):
        consts, carried = sizes_of_scan(params)
        assert len(inputs) == consts + carried  # A loop over nothing, as of `fori_loop`.
        body = params["jaxpr"]
        state = inputs[consts:]
        for _ in range(params["length"]):
            state = run(body.jaxpr, body.consts, *inputs[:consts], *state)
        return state

    def call(*arguments):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = run(closed.jaxpr, closed.consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def ways():
    """Moves all up, all down, and each at random."""
    generator = np.random.default_rng(7)
    at_random = (int(generator.integers(-UNITS, UNITS + 1)) for _ in itertools.count())
    return {
        "up": itertools.repeat(UNITS),
        "down": itertools.repeat(-UNITS),
        "up, down": itertools.cycle([UNITS, -UNITS]),
        "down, up": itertools.cycle([-UNITS, UNITS]),
        "at random": at_random,
    }


@pytest.fixture(params=list(ways()))
def approximate(request):
    moves = ways()[request.param]
    return lambda function: perturbed(function, moves)


def test_the_interpreter_moves_quotients_and_nothing_else():
    x = jnp.float32(3.0)
    up = perturbed(lambda x: (x / 7, x * 7, jnp.where(x > 1, 1 / x, x)), itertools.repeat(2))(x)
    exact = x / 7, x * 7, 1 / x
    twice = [np.nextafter(np.nextafter(y, np.float32(9)), np.float32(9)) for y in exact]
    assert [float(y) for y in up] == [float(twice[0]), float(exact[1]), float(twice[2])]


# Scale, sensitivity, epsilon and rounding.
SCALES = [(0.37, 0.37, 1, 1), (1, 3, 0.1, 1000), (2e-6, 1.3e-6, 1.7, 31.6), (5e4, 1e3, 0.02, 1)]


def scales(scale):
    return (scale * (1 + 0.0037 * np.arange(1000))).astype(np.float32)


def shortage(fit, calibration):
    """How much less than the exact scale, relative to it, the noise of a fit has at worst."""
    resolution, eps = float(LAPLACE_LATTICE.resolution), float(calibration.epsilon)
    grid, shift = (2.0 ** np.asarray(x, np.float64) for x in (fit.exponent, fit.shift))
    drawn = resolution * grid / (np.asarray(fit.divisor, np.float64) * shift)
    loss = float(calibration.coordinates) * LAPLACE_LATTICE.certificate.loss
    needed = calibration.scale.astype(np.float64) * (1 + 4 * loss) / (1 - 2 * loss / eps)
    needed *= 1 + float(calibration.rounding) * grid / float(calibration.sensitivity)
    return np.max(1 - drawn / needed)


@pytest.mark.parametrize("numbers", SCALES)
def test_the_grid_has_enough_noise(approximate, numbers):
    """Around four roundings follow each other, see `_OUTWARD`: 2^-19 is 16 units."""
    scale, *others = (np.float32(x) for x in numbers)
    made = Calibration(scales(scale), *others, 1)
    fit = approximate(lambda: made._fit(LAPLACE_LATTICE, np.dtype("float32"), None, jnp))()
    assert shortage(fit, made) <= 0


def test_without_the_margin_the_grid_has_too_little(monkeypatch):
    """The check has power: it sees two units in the last place."""
    monkeypatch.setattr(_grid_fit, "_OUTWARD", 1.0)
    made = Calibration(scales(0.37), np.float32(0.37), np.float32(1), np.float32(1), 1)
    fit = perturbed(
        lambda: made._fit(LAPLACE_LATTICE, np.dtype("float32"), None, jnp), ways()["up, down"]
    )
    found = [shortage(fit(), made)]
    fit = perturbed(
        lambda: made._fit(LAPLACE_LATTICE, np.dtype("float32"), None, jnp), ways()["up"]
    )
    assert max(*found, shortage(fit(), made)) > 0


@pytest.mark.parametrize("multiplier", [analytic_multiplier, classical_multiplier])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.01, 1e-9), (1.0, 1e-5), (0.5, 0.3)])
def test_a_calibrated_gaussian_has_enough_noise(approximate, multiplier, epsilon, delta):
    exact = multiplier(epsilon, delta) / (1 + 1e-6)
    found = approximate(multiplier)(jnp.float32(epsilon), jnp.float32(delta))
    assert exact <= float(found) <= 1.01 * exact


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_root_of_squares_is_rounded_up(approximate, count):
    for seed in range(20):
        norms = np.random.default_rng(seed).uniform(0.5, 2, count).astype(np.float32)
        exact = math.sqrt(math.fsum(float(x) ** 2 for x in norms))
        assert float(approximate(root_of_squares)(list(map(jnp.asarray, norms)))) >= exact


@pytest.mark.parametrize("size", [3, 100])
def test_a_clipped_gradient_is_as_long_as_charged(approximate, size):
    """`slack` holds 16 roundings for norm, factor and product; roots and quotients take 4 each."""
    unit = float(np.finfo(np.float32).eps) / 2

    def clipped(x):
        return x * jnp.minimum(1, jnp.float32(1) / jnp.sqrt(jnp.sum(x * x)))

    for seed in range(10):
        x = np.random.default_rng(seed).normal(size=size).astype(np.float32) + 2
        found = np.asarray(approximate(clipped)(jnp.asarray(x)), np.float64)
        assert np.linalg.norm(found) <= 1 + (size + 16) * unit
