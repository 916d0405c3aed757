"""Grid, scale, range and error bars of exactly what is to be released: `like=`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

import dpjax
from dpjax._core._pytree import changed
from dpjax._exact._kernels import at_once
from dpjax._exact._limbs import Limbs
from dpjax.mechanisms import additive
from dpjax.random import GAUSSIAN, LAPLACE
from dpjax.random._lattice import unchanged

FALSE_ALARM = 1e-6
FLOATS_AND_INTEGERS = {"float32": 5, "int32": 2, "bfloat16": 3, "bool": 1}
MECHANISMS = {
    "laplace": dpjax.laplace(1e5, 0.7),
    "gaussian": dpjax.gaussian(1e5, 0.7, 1e-5),
    "one's own": additive(1e5, 0.7, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 3 / e),
}
LATTICES = dpjax.bernstein(0.1, 0.7, degree=3, dims=2)


def zeros(sizes):
    return {dtype: jnp.zeros(size, dtype) for dtype, size in sizes.items()}


def shapes(value):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value)


def test_one_array_has_the_answers_of_its_shape():
    mechanism, like = MECHANISMS["laplace"], jnp.zeros((3, 4))
    assert mechanism.effective_scale(like=like) == mechanism.effective_scale((3, 4))
    assert mechanism.grid_for(like=like) == mechanism.grid_for((3, 4)) == mechanism.grids(like)
    assert mechanism.range(like=like) == mechanism.range((3, 4))
    for options in ({}, {"simultaneous": True}):
        bar = mechanism.error(confidence=0.9, like=like, **options)
        assert bar == mechanism.error(confidence=0.9, shape=(3, 4), **options)
    assert mechanism.effective_scale(like=0.0) == mechanism.effective_scale()


def test_arrays_and_their_shapes_have_the_same_answers():
    mechanism, value = MECHANISMS["gaussian"], zeros(FLOATS_AND_INTEGERS)
    for answer in (mechanism.effective_scale, mechanism.grid_for, mechanism.range):
        assert answer(like=value) == answer(like=shapes(value))
    # Where JAX has no float64, one is released in float32.
    wide = jax.ShapeDtypeStruct((3,), np.dtype("float64"))
    assert mechanism.effective_scale(like=wide) == mechanism.effective_scale((3,))
    assert mechanism.effective_scale(like=np.zeros(3)) == mechanism.effective_scale((3,))


# The scale, read off releases of noise that is the same in every place, and known.

SCALES = 2**7


def constant(lattice):
    """Noise that is 2^7 scales, or nearly, in every place."""
    points = SCALES * round(lattice.resolution)

    def sample(key, shape):
        # Made of words by a loop, as noise is: else XLA takes half a minute to compile a release.
        nothing = lax.population_count(jax.random.bits(key, shape, "uint32")) // 33
        return at_once(Limbs(*(np.uint32(x) + nothing for x in divmod(points, 2**32))))

    return dataclasses.replace(lattice, variables=sample, each=1, combined=unchanged)


def assert_scales_are_those_of_a_release(mechanism, value, key):
    noise = dataclasses.replace(mechanism.noise, lattice=constant(mechanism.noise.lattice))
    released = changed(mechanism, noise=noise)(key, value).value
    drawn = [float(leaf.ravel()[0]) / SCALES for leaf in jax.tree.leaves(released)]
    stated = jax.tree.leaves(mechanism.effective_scale(like=value))
    assert stated == pytest.approx(drawn, rel=3e-7)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_scale_of_every_array_is_what_its_release_shows(name, key):
    mechanism, value = MECHANISMS[name], zeros({"float32": 10**5, "int32": 2, "bool": 1})
    assert_scales_are_those_of_a_release(mechanism, value, key)
    # The nominal scale would not pass.
    assert mechanism.effective_scale(like=value)["float32"] > (1 + 1e-6) * mechanism.scale


@pytest.mark.parametrize("dtypes", [("float64",), ("float64", "float32", "int64")])
def test_the_scale_of_float64_and_beside_it(dtypes, key, x64):
    value = zeros(dict.fromkeys(dtypes, 3))
    assert_scales_are_those_of_a_release(MECHANISMS["laplace"], value, key)


@pytest.mark.parametrize("lattices", [1, 3])
def test_the_scale_of_every_lattice_is_that_of_all(lattices, key):
    value = [jnp.zeros((4, 4), dtype) for dtype in ("float32", "int32", "float16")[:lattices]]
    stated = LATTICES.effective_scale(like=value)
    assert stated == pytest.approx([lattices * LATTICES.scale] * lattices, rel=1e-4)
    assert_scales_are_those_of_a_release(LATTICES, value, key)
    assert LATTICES.effective_scale(like=value[0]) == LATTICES.effective_scale((7,))


def test_noise_in_lattices_spreads_by_the_stated_scale(key):
    mechanism = dpjax.bernstein(0.1, 1.0, degree=31, dims=2)
    value = (jnp.zeros((32, 32)),) * 2
    released = mechanism(key, value).value
    total = sum(np.abs(np.asarray(one.values, float)).sum() for one in released)
    scale = mechanism.effective_scale(like=value)[0]

    def p_value(scale):
        """Of a sum of exponential variables."""
        below = stats.gamma(2 * 32**2, scale=scale).cdf(total)
        return 2 * min(below, 1 - below)

    assert p_value(scale) > FALSE_ALARM
    # Power: the scale of a single lattice, or one that is 20% off.
    assert max(map(p_value, (mechanism.scale, 0.8 * scale, 1.2 * scale))) < FALSE_ALARM


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_score_falls_by_the_scale_for_a_factor_e(dtype):
    mechanism = dpjax.exponential(1e5, 0.7)
    scores = jnp.zeros(2, dtype)
    scale = mechanism.effective_scale(like=scores)
    assert scale == pytest.approx(2e5 / 0.7, rel=1e-4)
    lower = scores.at[1].set(jnp.asarray(-round(scale)).astype(dtype))
    gain = mechanism.log_prob(0, lower) - mechanism.log_prob(1, lower)
    assert float(gain) == pytest.approx(round(scale) / scale, rel=1e-6)
    bars = [mechanism.score_gap(confidence=0.9, like=scores, simultaneous=x) for x in (True, False)]
    rounding = mechanism.grid_for(like=scores) if dtype == "float32" else 0
    bounds = np.asarray([scale * np.log(20), scale * np.log(10)]) + rounding
    assert bars == pytest.approx(bounds if dtype == "float32" else np.floor(bounds))


# The others.


def test_grids_and_ranges_are_those_of_every_array(key):
    mechanism, value = dpjax.laplace(1e-3, 1.0), zeros(FLOATS_AND_INTEGERS)
    grids, (low, high) = mechanism.grid_for(like=value), mechanism.range(like=value)
    assert grids["int32"] == grids["bool"] == 1
    assert high["int32"] == 2**31 - 2
    assert high["float32"] == 2.0**93 * grids["float32"]
    ends = {dtype: jnp.full_like(x, jnp.inf) for dtype, x in value.items() if "float" in dtype}
    clamped = mechanism.clamped({**value, **ends})
    for dtype in ends:
        assert float(clamped[dtype][0]) == high[dtype]
        assert low[dtype] == -high[dtype]


def test_error_bars_of_all_arrays_hold_at_once():
    tail = LAPLACE.tail_quantile(1 - 0.9 ** (1 / 11))
    mechanism, value = MECHANISMS["laplace"], zeros(FLOATS_AND_INTEGERS)
    bars = mechanism.error(confidence=0.9, like=value, simultaneous=True)
    scales, grids = mechanism.effective_scale(like=value), mechanism.grid_for(like=value)
    bounds = {dtype: scale * tail + grids[dtype] for dtype, scale in scales.items()}
    whole = {x: np.floor(scales[x] * tail + 0.5) for x in value if "float" not in x}
    assert bars == pytest.approx({**bounds, **whole}, rel=1e-5)
    single = LATTICES.error(confidence=0.9, simultaneous=True)
    three = LATTICES.error(confidence=0.9, like=[jnp.zeros((4, 4))] * 3, simultaneous=True)
    assert three == pytest.approx([three[0]] * 3)
    assert 3 * single < three[0] < 3 * single * (1 + np.log(3))


@pytest.mark.parametrize("mechanism", [*MECHANISMS.values(), dpjax.exponential(1.0, 1.0)])
def test_shapes_and_like_are_not_both_given(mechanism):
    scores = jnp.zeros(3)
    for ask in (mechanism.effective_scale, mechanism.grid_for, mechanism.range):
        with pytest.raises(ValueError, match="`like` already determines shapes and dtypes"):
            ask((3,), like=scores)
    bound = mechanism.score_gap if hasattr(mechanism, "score_gap") else mechanism.error
    with pytest.raises(ValueError, match="`like` already determines shapes and dtypes"):
        bound(shape=(3,), like=scores)
    with pytest.raises(ValueError, match="`like` already determines shapes and dtypes"):
        mechanism.range(dtype="float32", like=scores)


def test_what_could_not_be_released_has_no_scale():
    mechanism = MECHANISMS["laplace"]
    for wrong in (jnp.sum, 1j, jax.ShapeDtypeStruct((), "complex64")):
        with pytest.raises(TypeError, match="like must "):
            mechanism.effective_scale(like=wrong)
    for empty in ((), jax.ShapeDtypeStruct((0,), "float32")):
        with pytest.raises(ValueError, match="like must"):
            mechanism.effective_scale(like=empty)
    with pytest.raises(ValueError, match=r"lattice values of shape \(4, 4\)"):
        LATTICES.effective_scale(like=[jnp.zeros((4, 4)), jnp.zeros(4)])
    for wrong in (jnp.zeros((2, 3)), [jnp.zeros(3)]):
        with pytest.raises(ValueError, match="one array of scores"):
            dpjax.exponential(1.0, 1.0).effective_scale(like=wrong)


def test_noise_in_floats_has_its_nominal_scale_and_no_grid():
    value = zeros(FLOATS_AND_INTEGERS)
    for name, noise in (("laplace", LAPLACE), ("gaussian", GAUSSIAN)):
        mechanism = changed(MECHANISMS[name], noise=noise.in_floats())
        assert set(mechanism.effective_scale(like=value).values()) == {mechanism.scale}
        assert set(mechanism.grid_for(like=value).values()) == {0}
    assert dpjax.exponential(1.0, 1.0, noise="float").grid == 0
