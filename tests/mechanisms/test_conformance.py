"""The conformance table: a new mechanism is one row."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax._core._pytree import changed, frozen_pytree, made
from dpjax._exact import _limbs
from dpjax._exact._limbs import Limbs
from dpjax.auditing import check_conformance
from dpjax.mechanisms import SensitivityMechanism, additive
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.random import LAPLACE, seeded_key
from dpjax.random._lattice import unchanged
from mechanism_table import FAST, SCALAR, TABLE

IN_CI = (pytest.mark.slow, pytest.mark.long)
ROWS = [name if name in FAST else pytest.param(name, marks=IN_CI) for name in TABLE]


@pytest.mark.parametrize("name", ROWS)
def test_mechanism_conforms(name):
    factory, arguments = TABLE[name]
    check_conformance(seeded_key(1), factory, **arguments)


def factories():
    """Public functions that say that they return a mechanism."""
    rooms = [value for value in vars(dpjax).values() if inspect.ismodule(value)]
    for room in (dpjax, *rooms):
        for name, function in vars(room).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                returned = inspect.signature(function).return_annotation
                returned = getattr(inspect.getmodule(function), str(returned), returned)
                if inspect.isclass(returned) and issubclass(returned, SensitivityMechanism):
                    yield name


def test_every_factory_has_a_row():
    """Two are other factories at an epsilon that they find: randomized response, and `gaussian`."""
    named = set(factories())
    assert {"laplace", "mwem", "two_coins", "private_weighted_majority"} <= named
    rows = [function for function, _ in TABLE.values()]
    called = {name for row in rows for name in (row.__name__, *row.__code__.co_names)}
    assert named - called == {"two_coins", "gaussian_for_advantage"}
    coins, response = dpjax.two_coins(3), dpjax.randomized_response(math.log(4), 3)
    assert type(coins) is type(response)
    assert coins.report_weights == response.report_weights


# The checks must be able to fail: each of these mechanisms is broken in one way.


def _quiet(factor):
    """Laplace noise whose scale is a factor of what log_prob says."""
    lattice = dataclasses.replace(LAPLACE.lattice, resolution=LAPLACE.lattice.resolution / factor)
    noise = dataclasses.replace(LAPLACE, lattice=lattice)
    return lambda s, e: additive(s, e, norm="l1", noise=noise)


def _zeros(key, shape):
    del key
    return Limbs(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))


def _drawing(variables, s, e):
    """Laplace noise whose points are drawn by another function."""
    lattice = dataclasses.replace(LAPLACE.lattice, variables=variables, combined=unchanged)
    return additive(s, e, norm="l1", noise=dataclasses.replace(LAPLACE, lattice=lattice))


def _silent(s, e):
    return _drawing(_zeros, s, e)


def _never_negative(key, shape):
    drawn = LAPLACE.lattice.sample(key, shape)
    return _limbs.where(_limbs.is_negative(drawn), _limbs.invert(drawn), drawn)


def _sign_bit_stuck(s, e):
    return _drawing(_never_negative, s, e)


def _half_the_sensitivity(s, e):
    half = dpjax.laplace(s, e)
    return changed(half, scale=half.scale / 2)


def _forgets_gamma(s, e):
    if isinstance(s, dpjax.Sensitivity):
        s = s.value
    return dpjax.laplace(s, e)


def _accepts_anything(s, e):
    if not isinstance(s, dpjax.Sensitivity):
        s = dpjax.Sensitivity(s, 0.0, 1.0, "l1", None)
    return made(AdditiveMechanism, s, e, 0.0, s.value, LAPLACE)


@frozen_pytree
class _Telltale(AdditiveMechanism):
    """Finite for every value, and odd in units of the grid where the value was NaN."""

    def _draw(self, key, value):
        step = self.grid
        return jnp.where(jnp.isnan(value), step, 0) + 2 * step * jnp.round(
            super()._draw(key, value) / (2 * step)
        )


@frozen_pytree
class _OtherUnderJit(AdditiveMechanism):
    """Private, and off by a little where the value is traced."""

    def __call__(self, key, value):
        traced = isinstance(value, jax.core.Tracer)
        return super().__call__(key, value + 1e-3 if traced else value)


def _made_as(kind):
    """Laplace noise in a mechanism of another kind."""

    def make(s, e):
        usual = dpjax.laplace(s, e)
        return made(kind, *(getattr(usual, field.name) for field in dataclasses.fields(usual)))

    return make


BROKEN = {
    "no noise": (_silent, "depend on the key"),
    "sign bit stuck": (_sign_bit_stuck, "density of log_prob|finite|exceeds"),
    "noise in floats": (lambda s, e: dpjax.laplace(s, e, noise="float"), "the requested one"),
    "scale 10% low": (_quiet(0.9), "density of log_prob"),
    "half the sensitivity": (_half_the_sensitivity, "privacy loss"),
    "forgets gamma": (_forgets_gamma, "gamma"),
    "another value under jit": (_made_as(_OtherUnderJit), "jit must not change"),
    "tells of NaN": (
        _made_as(_Telltale),
        "a value of nan, alone or among others, must be",
    ),
    "accepts anything": (_accepts_anything, "epsilon=0.0 must be refused"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x == "sign bit stuck" else ()) for x in BROKEN],
)
def test_broken_mechanism_is_caught(name):
    factory, message = BROKEN[name]
    with pytest.raises((AssertionError, TypeError), match=message):
        check_conformance(seeded_key(1), factory, **SCALAR)


def test_neighbor_beyond_the_sensitivity_is_refused():
    with pytest.raises(ValueError, match="distance 2"):
        check_conformance(
            seeded_key(1), dpjax.laplace, value=jnp.asarray(0.0), neighbor=jnp.asarray(2.0)
        )
