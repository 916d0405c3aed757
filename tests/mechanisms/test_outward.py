"""Float64 parameters that become float32: claims go outward, and the noise covers what is claimed.

Epsilon, delta, gamma and the confidence are rounded outward where they become leaves of an array
type. The scale and the sensitivity are rounded to nearest, and a selection's or a lattice's scale
is computed from an epsilon that was rounded up: that is what `_OUTWARD` of the grid's fit covers.
"""

import math
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import Guarantee, SampledEvent, Sensitivity
from dpjax._exact._numerics import outward
from dpjax.mechanisms import additive
from dpjax.random import LAPLACE
from dpjax.random._noise import EXPONENTIAL

examples = settings(max_examples=60, deadline=None, derandomize=True)
NARROW = [0.1, 0.3, 0.7, 1e-5, 1 - 1e-8, 1 / 3, 1e-50, 1.0, 0.05]


# Guarantees.


def worse(claimed, exact):
    """Whether a guarantee claims no more than another one does, in exact rationals."""
    up = all(
        Fraction(float(getattr(claimed, name))) >= Fraction(float(getattr(exact, name)))
        for name in ("epsilon", "delta", "gamma")
    )
    return up and Fraction(float(claimed.confidence)) <= Fraction(float(exact.confidence))


@given(st.floats(allow_nan=False), st.sampled_from([math.inf, -math.inf]))
@example(1e-50, math.inf)
@example(3.4028235e38, math.inf)
@example(1e300, -math.inf)
@examples
def test_outward_is_a_float32_on_the_stated_side(number, toward):
    narrow = outward(number, toward)
    assert math.isinf(narrow) or float(np.float32(narrow)) == narrow
    assert narrow >= number if toward > 0 else narrow <= number
    assert outward(narrow, toward) == narrow
    if 1e-30 < abs(number) < 1e30:
        assert narrow == pytest.approx(number, rel=2.0**-23)


@jax.jit
def through_jit(guarantee):
    return guarantee


def through_scan(guarantee):
    return jax.lax.scan(lambda carry, _: (carry, None), guarantee, None, length=1)[0]


def out_of_vmap(guarantee):
    batch = jax.vmap(lambda _: guarantee)(jnp.zeros(2))
    assert batch.epsilon.shape == (2,)  # It says of how many releases.
    return jax.tree.map(lambda x: x[0], batch)


WAYS = {
    "into and out of jit": through_jit,
    "scan": through_scan,
    "vmap": out_of_vmap,
    "device": jax.device_put,
    "tree": lambda guarantee: jax.tree.map(jnp.asarray, guarantee),
    "numpy": lambda guarantee: jax.tree.map(np.float32, guarantee),
}


@pytest.mark.parametrize("way", WAYS)
def test_claims_only_get_worse_on_their_way_through_jax(way):
    for number in NARROW:
        event = SampledEvent(number, 1 - number, "a")
        exact = Guarantee(number, number, number, 1 - number, (event,))
        there = WAYS[way](exact)
        assert worse(there, exact)
        assert there.events[0].gamma >= number
        assert Fraction(float(there.events[0].confidence)) <= 1 - number
        for after in (WAYS[way](there), dpjax.accounting.compose(there)):
            assert worse(after, exact)
            assert float(after.epsilon) == float(there.epsilon)  # Once is enough.


def array_of_x64(number):
    with jax.enable_x64(True):
        return jnp.asarray(number, "float64")


@pytest.mark.parametrize("array", [np.asarray, lambda x: np.full(2, x), array_of_x64])
def test_float64_arrays_are_rounded_outward_too(array):
    """What `jax.device_get` and `enable_x64` leave behind, in a program without x64."""
    exact = Guarantee(0.7, 1e-50, 0.05, 1 - 1e-8)
    for way in (through_jit, jax.device_put, WAYS["tree"]):
        there = way(jax.tree.map(array, Guarantee(*map(array, (0.7, 1e-50, 0.05, 1 - 1e-8)))))
        assert there.epsilon.dtype == "float32"
        assert worse(jax.tree.map(lambda x: np.ravel(x)[0], there), exact)
    with jax.enable_x64(True):
        made = jax.jit(lambda epsilon: MECHANISMS["laplace"](epsilon))(0.7)
    assert "confidence 0.999999" in repr(made.guarantee)
    assert float(made.guarantee.confidence) <= 1 - 1e-8


def test_what_stays_on_the_host_stays_exact():
    exact = Guarantee(0.7, 1e-5, 0.05, 0.99)
    for same in (exact, pickle.loads(pickle.dumps(exact)), dpjax.accounting.compose(exact)):
        assert (same.epsilon, same.delta, same.gamma, same.confidence) == (0.7, 1e-5, 0.05, 0.99)
    with jax.enable_x64(True):
        assert jax.tree.leaves(exact) == [0.7, 1e-5, 0.05, 0.99]
        assert float(through_jit(exact).epsilon) == 0.7


def test_leaves_that_are_no_numbers_pass():
    exact = Guarantee(0.7, 0.1, 0.1, None)
    shapes = jax.eval_shape(through_jit, exact)
    assert (shapes.epsilon.shape, shapes.epsilon.dtype) == ((), "float32")
    assert "float32" in repr(shapes)
    assert jax.tree.map(lambda _: None, exact).epsilon is None
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    assert paths == [".epsilon", ".delta", ".gamma"]


# Mechanisms.

SAMPLED = {
    norm: Sensitivity(0.3, 0.01, 1 - 1e-8, norm, None, m=90, k=90, identity="a")
    for norm in ("l1", "l2", "linf")
}
MECHANISMS = {
    "laplace": lambda e: dpjax.laplace(SAMPLED["l1"], e),
    "gaussian": lambda e: dpjax.gaussian(SAMPLED["l2"], e, 1e-5),
    "gaussian, delta near 1": lambda e: dpjax.gaussian(SAMPLED["l2"], e, 0.998999),
    "exponential": lambda e: dpjax.exponential(SAMPLED["linf"], e),
    "bernstein": lambda e: dpjax.bernstein(SAMPLED["linf"], e, degree=2, dims=1),
    "randomized response": dpjax.randomized_response,
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_promise_nothing_more_inside_jit(name):
    """In at the front, made inside, and closed over."""
    inside = jax.jit(lambda mechanism: mechanism.guarantee)
    for epsilon in (0.1, 0.3, 0.7, 1.1):
        mechanism = MECHANISMS[name](epsilon)
        assert worse(inside(mechanism), mechanism.guarantee)
        assert worse(jax.jit(lambda m: m)(mechanism).guarantee, mechanism.guarantee)
        assert worse(jax.jit(lambda m=mechanism: m.guarantee)(), mechanism.guarantee)
    made = jax.jit(lambda epsilon: MECHANISMS[name](epsilon).guarantee)(jnp.float32(0.7))
    assert float(made.epsilon) == np.float32(0.7)  # It was a float32, and so is what is drawn.
    exact = MECHANISMS[name](float(np.float32(0.7))).guarantee
    assert worse(made, exact)


def test_a_traced_sensitivity_or_delta_takes_nothing_from_epsilon():
    def own(delta):
        return additive(
            1.0, 0.7, norm="l1", noise=LAPLACE, delta=delta, multiplier=lambda e, d: (1 - d) / e
        )

    for make, traced in ((lambda s: dpjax.laplace(s, 0.7), 0.3), (own, 0.1)):
        claimed = jax.jit(lambda x, make=make: make(x).guarantee)(traced)
        assert float(claimed.epsilon) >= 0.7


# The noise, in exact rationals: scale and epsilon as they were given, and as float32 has them.

SENSITIVITIES = st.floats(1e-20, 1e20)
EPSILONS = st.floats(1e-3, 20.0)


@jax.jit
def fit_of_laplace(mechanism):
    return mechanism._calibration(jnp.zeros(3)).fit(LAPLACE.lattice, jnp.float32)


@jax.jit
def fit_of_exponential(mechanism):
    return mechanism._calibration(jnp.zeros(3)).fit(EXPONENTIAL, jnp.float32)


@jax.jit
def fit_of_bernstein(mechanism):
    return mechanism._calibration(jnp.zeros(3)).fit(LAPLACE.lattice, jnp.float32)


# name: the mechanism, its fit, the norm of ones and by how much sensitivity over epsilon is scaled
SCALES = {
    "laplace": (dpjax.laplace, fit_of_laplace, 3, 1),
    "exponential": (dpjax.exponential, fit_of_exponential, 1, 2),
    "bernstein": (
        lambda s, e: dpjax.bernstein(s, e, degree=2, dims=1),
        fit_of_bernstein,
        1,  # Of the three, divided by the sensitivity of the three.
        3,
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_outward_margin_covers_what_float32_takes(name):
    make, fit_of, ones, factor = SCALES[name]

    @given(SENSITIVITIES, EPSILONS)
    @example(1 - 2.0**-26, 0.7)
    @example(2 - 2.0**-26, 1 + 2.0**-50)
    @example(1.0096058174560294, 3.0764735029296513)  # Lost 2e-7 without a margin.
    @examples
    def covered(sensitivity, epsilon):
        fit = fit_of(make(sensitivity, epsilon))
        grid = Fraction(2) ** int(fit.exponent)
        resolution = Fraction(LAPLACE.lattice.resolution)
        drawn = resolution * grid / (int(fit.divisor) << int(fit.shift))
        moved = Fraction(sensitivity) + grid * ones
        assert drawn >= factor * moved / Fraction(epsilon)

    covered()
