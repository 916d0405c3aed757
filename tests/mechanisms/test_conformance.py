"""The conformance table: a new mechanism is one row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import _limbs
from dpjax._limbs import Limbs
from dpjax._pytree import TreeSpec, frozen_pytree
from dpjax._shaped_norm import shape_of
from dpjax.auditing import check_conformance
from dpjax.mechanisms import additive
from dpjax.mechanisms._additive import AdditiveMechanism
from dpjax.random import LAPLACE, seeded_key


def own(sensitivity, epsilon):
    """Laplace noise for three coordinates that may all move by the sensitivity."""
    return additive(sensitivity, epsilon, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e)


def shaped(sensitivity, epsilon):
    """Gaussian noise of a shape; a number is a bound in its norm."""
    if not isinstance(sensitivity, dpjax.Sensitivity):
        sensitivity = dpjax.analytic_sensitivity(sensitivity, norm=SHAPE)
    return dpjax.shaped_gaussian(sensitivity, epsilon, 1e-2)


MATRIX = np.array([[1.0, 0.3], [0.3, 0.5]])
SHAPE = shape_of(MATRIX, TreeSpec.of(jnp.zeros(2)), 2.0**-20, None)
SCALAR = {"value": jnp.asarray(0.0), "neighbor": jnp.asarray(1.0)}
VECTOR = {"value": jnp.zeros(3), "neighbor": jnp.asarray([0.6, 0.0, -0.4])}
L2_VECTOR = {"value": jnp.zeros(3), "neighbor": jnp.asarray([0.6, 0.0, -0.8])}
TREE = {
    "value": {"a": jnp.zeros(2), "b": jnp.asarray(0.0)},
    "neighbor": {"a": jnp.asarray([0.25, 0.25]), "b": jnp.asarray(0.5)},
}
COUNTS = {"value": jnp.asarray([3, 0]), "neighbor": jnp.asarray([4, 0])}
SCORES = {"value": jnp.asarray([2.0, 1.0, 0.0]), "neighbor": jnp.asarray([1.0, 2.0, 1.0])}
INTEGER_SCORES = {"value": jnp.asarray([2, 1, 0]), "neighbor": jnp.asarray([1, 2, 1])}
LATTICE = {"value": jnp.zeros((3, 3)), "neighbor": jnp.ones((3, 3))}
# At distance 1, but for a margin that covers the grid before the map.
SHAPED = {"value": jnp.zeros(2), "neighbor": jnp.asarray(0.9999 * SHAPE.matrix @ [0.6, -0.8])}
ANSWERS = {"value": jnp.asarray([2]), "neighbor": jnp.asarray([0])}
LOSSES = {
    "value": jnp.asarray([[1.0, 0.0], [0.5, 1.0], [0.0, 0.0]]),
    "neighbor": jnp.asarray([[0.0, 1.0], [0.5, 1.0], [0.0, 0.0]]),
}
WORKLOAD = dpjax.queries.linear_workload([[1, 1, 0], [0, 1, 1], [1, 0, 0]])
ANSWERED = {"value": jnp.asarray([5, 7, 3]), "neighbor": jnp.asarray([5, 6, 4])}
ROWS_OF_SCORES = {
    "value": jnp.asarray([[2, 1, 0], [0, 0, 1]]),
    "neighbor": jnp.asarray([[1, 2, 1], [1, 0, 0]]),
}
NAMES = {
    "value": jnp.asarray([[1, 0], [1, 2], [2, 0]], "uint8"),
    "neighbor": jnp.asarray([[1, 0], [2, 1], [2, 0]], "uint8"),
}
RECORDS = {
    "value": jnp.linspace(0.3, 0.7, 25),
    "neighbor": jnp.linspace(0.3, 0.7, 25).at[3].set(1.0),
    "sensitivity": None,
}

TABLE = {
    "laplace": (dpjax.laplace, SCALAR),
    "laplace, vector": (dpjax.laplace, VECTOR),
    "laplace, pytree": (dpjax.laplace, TREE),
    "laplace, integers": (dpjax.laplace, COUNTS),
    "laplace, epsilon 5": (dpjax.laplace, SCALAR | {"epsilon": 5.0, "sensitivity": 2.0}),
    "gaussian": (lambda s, e: dpjax.gaussian(s, e, 1e-2), SCALAR),
    "gaussian, vector": (lambda s, e: dpjax.gaussian(s, e, 1e-5), L2_VECTOR),
    "gaussian, integers": (lambda s, e: dpjax.gaussian(s, e, 1e-2), COUNTS),
    "gaussian, classical": (
        lambda s, e: dpjax.gaussian(s, e, 1e-3, calibration="classical"),
        SCALAR,
    ),
    "shaped gaussian": (shaped, SHAPED),
    "exponential": (dpjax.exponential, SCORES),
    "permute-and-flip": (dpjax.permute_and_flip, SCORES),
    "bernstein": (lambda s, e: dpjax.bernstein(s, e, degree=2, dims=2), LATTICE),
    "bernstein, order 3": (lambda s, e: dpjax.bernstein(s, e, degree=2, dims=2, order=3), LATTICE),
    "randomized response": (
        lambda e: dpjax.randomized_response(e, categories=3),
        ANSWERS | {"sensitivity": None},
    ),
    "weighted majority": (
        lambda e: dpjax.learning.private_weighted_majority(e, 1e-2, steps=3),
        LOSSES | {"sensitivity": None},
    ),
    "weighted majority, advanced composition": (
        lambda e: dpjax.learning.private_weighted_majority(e, 1e-2, steps=3, method="drv"),
        LOSSES | {"sensitivity": None},
    ),
    "mwem": (
        lambda e: dpjax.queries.mwem(WORKLOAD, e, rounds=2, records=10),
        ANSWERED | {"sensitivity": None},
    ),
    "unary encoding": (
        lambda e: dpjax.unary_encoding(e, categories=3),
        ANSWERS | {"sensitivity": None},
    ),
    "unary encoding, symmetric": (
        lambda e: dpjax.unary_encoding(e, categories=3, flips="symmetric"),
        ANSWERS | {"sensitivity": None},
    ),
    "top-k": (lambda s, e: dpjax.queries.top_k(s, e, k=2), SCORES),
    "top-k, integers": (lambda s, e: dpjax.queries.top_k(s, e, k=2), INTEGER_SCORES),
    "selection in each row": (
        lambda s, e: dpjax.queries.select_each(s, e, count=2),
        ROWS_OF_SCORES,
    ),
    "name search": (
        lambda e: dpjax.queries.name_search(e, width=2, threshold=1, capacity=2),
        NAMES | {"sensitivity": None},
    ),
    "above threshold": (
        lambda s, e: dpjax.above_threshold(s, e, threshold=0.5, positives=2),
        SCORES,
    ),
    "smooth quantile": (
        lambda e: dpjax.smooth_quantile(e, 1e-2, lower=0.0, upper=1.0),
        RECORDS,
    ),
    "propose-test-release": (
        lambda e: dpjax.propose_test_release(e, 1e-2, bound=0.05, lower=0.0, upper=1.0),
        RECORDS,
    ),
    "one's own": (own, {"value": jnp.zeros(3), "neighbor": jnp.asarray([1.0, -1.0, 1.0])}),
}


# Rows that differ from one above in a detail take their time.
SLOW = {
    "laplace, pytree",
    "laplace, vector",
    "laplace, epsilon 5",
    "gaussian, vector",
    "gaussian, integers",
    "gaussian, classical",
    "shaped gaussian",
    "bernstein, order 3",
    "laplace, integers",
    "mwem",
    "weighted majority",
    "weighted majority, advanced composition",
    "unary encoding",
    "unary encoding, symmetric",
    "top-k",
    "top-k, integers",
    "selection in each row",
    "name search",
    "above threshold",
    "smooth quantile",
    "propose-test-release",
    "one's own",
}
ROWS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TABLE]


@pytest.mark.parametrize("name", ROWS)
def test_mechanism_conforms(name):
    factory, arguments = TABLE[name]
    check_conformance(seeded_key(1), factory, **arguments)


# The checks must be able to fail: each of these mechanisms is broken in one way.


def _quiet(factor):
    """Laplace noise whose scale is a factor of what log_prob says."""
    lattice = dataclasses.replace(LAPLACE.lattice, resolution=LAPLACE.lattice.resolution / factor)
    noise = dataclasses.replace(LAPLACE, lattice=lattice)
    return lambda s, e: additive(s, e, norm="l1", noise=noise)


def _zeros(key, shape):
    del key
    return Limbs(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))


def _silent(s, e):
    lattice = dataclasses.replace(LAPLACE.lattice, sample=_zeros)
    return additive(s, e, norm="l1", noise=dataclasses.replace(LAPLACE, lattice=lattice))


def _never_negative(key, shape):
    drawn = LAPLACE.lattice.sample(key, shape)
    return _limbs.where(_limbs.is_negative(drawn), _limbs.invert(drawn), drawn)


def _sign_bit_stuck(s, e):
    lattice = dataclasses.replace(LAPLACE.lattice, sample=_never_negative)
    return additive(s, e, norm="l1", noise=dataclasses.replace(LAPLACE, lattice=lattice))


def _half_the_sensitivity(s, e):
    half = dpjax.laplace(s, e)
    return dataclasses.replace(half, scale=half.scale / 2)


def _forgets_gamma(s, e):
    if isinstance(s, dpjax.Sensitivity):
        s = s.value
    return dpjax.laplace(s, e)


def _accepts_anything(s, e):
    if not isinstance(s, dpjax.Sensitivity):
        s = dpjax.Sensitivity(s, 0.0, 1.0, "l1", None)
    return AdditiveMechanism(s, e, 0.0, s.value, "l1", LAPLACE)


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
        return kind(*(getattr(usual, field.name) for field in dataclasses.fields(usual)))

    return make


BROKEN = {
    "no noise": (_silent, "depend on the key"),
    "sign bit stuck": (_sign_bit_stuck, "density of log_prob|finite|exceeds"),
    "noise in floats": (lambda s, e: dpjax.laplace(s, e, noise="float"), "the one asked for"),
    "scale 10% low": (_quiet(0.9), "density of log_prob"),
    "half the sensitivity": (_half_the_sensitivity, "privacy loss"),
    "forgets gamma": (_forgets_gamma, "gamma"),
    "another value under jit": (_made_as(_OtherUnderJit), "jit must not change"),
    "tells of NaN": (_made_as(_Telltale), "value of nan must be released like"),
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
