"""Norms, and the distance of two values, against recorded numbers and NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dpjax
from dpjax.sensitivity._norms import distance, norm_function, resolution, rounding_norm

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_counts(names):
    """How many names hold each letter, counted with repetition."""
    return jnp.array([sum(name.lower().count(letter) for name in names) for letter in LETTERS])


def summary(x):
    return (jnp.mean(x), jnp.median(x), jnp.var(x, ddof=1))


def curve(scale):
    return lambda x: scale * x[0] * jnp.sin(10 * x[0])


def surface(scales):
    return lambda x: scales[0] * x[0] * jnp.sin(10 * x[1]) + scales[1] * x[1]


@pytest.mark.parametrize("row", range(8))
def test_recorded_distances(reference, row, x64):
    recorded = reference("r_diffpriv")["sensitivity_norm"][row]
    name, dims = recorded["mechanism"], 2 if "dims=2" in recorded["mechanism"] else 1
    if name.startswith("Bernstein"):
        degree = int(name.split("k=")[1].rstrip(")"))
        family = curve if dims == 1 else surface
        norm, target = "linf", dpjax.evaluate_on_lattice(family, degree=degree, dims=dims)
    elif name.startswith("Exponential"):
        norm, target = "linf", letter_counts
    else:
        norm = "l1" if name == "Laplace" else "l2"
        target = jnp.mean if recorded["target"] == "mean(X)" else summary
    strings = name.startswith("Exponential")
    first, second = (
        target(x if strings else jnp.asarray(x, float)) for x in (recorded["X1"], recorded["X2"])
    )
    assert float(distance(norm, first, second)) == pytest.approx(recorded["norm"], rel=1e-12)


EXPECTED = {
    "l1": lambda d: np.abs(d).sum(),
    "l2": lambda d: np.linalg.norm(d),
    "linf": lambda d: np.abs(d).max(),
    "hamming": lambda d: np.count_nonzero(d),
}
vectors = hnp.arrays(np.float32, 8, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))


@given(first=vectors, second=vectors)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_distances_of_floats(first, second):
    rounded = np.asarray(first - second, np.float64)
    for norm, expected in EXPECTED.items():
        found = float(distance(norm, jnp.asarray(first), jnp.asarray(second)))
        assert found == pytest.approx(expected(rounded), rel=1e-5), norm
        assert found == float(distance(norm, jnp.asarray(second), jnp.asarray(first)))


@pytest.mark.parametrize("norm", EXPECTED)
@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.bool_]
)
def test_integers_never_wrap(norm, dtype):
    low, high = (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    first, second = np.array([low, high, low], dtype), np.array([high, low, low], dtype)
    difference = first.astype(np.float64) - second.astype(np.float64)
    expected = np.float32(EXPECTED[norm](difference))
    np.testing.assert_allclose(distance(norm, jnp.array(first), jnp.array(second)), expected, 1e-6)


def test_64_bit_integers_never_wrap(x64):
    ends = jnp.array([-(2**63), 2**63 - 1])
    assert float(distance("linf", ends, ends[::-1])) == 2.0**64


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-10, 1.0, 1e25, 1e37])
def test_no_difference_vanishes_or_overflows(norm, size):
    value = jnp.array([3.0, -4.0], jnp.float32) * np.float32(size)
    expected = {"l1": 7.0, "l2": 5.0, "linf": 4.0}[norm] * size
    np.testing.assert_allclose(distance(norm, value, jnp.zeros(2)), expected, rtol=1e-6)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize(
    ("first", "second"), [(np.nan, 0.0), (-np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.inf)]
)
def test_nan_counts_as_infinite(norm, first, second):
    assert np.isposinf(distance(norm, jnp.array([first, 1.0]), jnp.array([second, 1.0])))


def test_a_norm_that_returns_nan_counts_as_infinite():
    assert np.isinf(distance(lambda difference: difference[0] / 0, jnp.zeros(1), jnp.zeros(1)))


def test_pytrees_are_one_vector():
    first = {"a": jnp.array([1.0, 2.0]), "b": (jnp.array([[True]]), jnp.uint8(7))}
    second = {"a": jnp.array([1.0, 5.0]), "b": (jnp.array([[False]]), jnp.uint8(9))}
    found = {norm: float(distance(norm, first, second)) for norm in EXPECTED}
    assert found == pytest.approx({"l1": 6.0, "l2": 14**0.5, "linf": 3.0, "hamming": 3.0})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_subtracted_in_float32(dtype):
    found = distance("l1", jnp.full(300, 2.0, dtype), jnp.ones(300, dtype))
    assert found.dtype == jnp.float32
    assert float(found) == 300.0


def test_mixed_precision_keeps_the_wider(x64):
    first = (jnp.zeros(1, jnp.float32), jnp.full(1, 1e-300))
    assert float(distance("l1", first, (jnp.zeros(1, jnp.float32), jnp.zeros(1)))) == 1e-300


def test_functions_are_norms():
    def weighted(difference):
        return jnp.sum(jnp.array([1.0, 10.0]) * jnp.abs(difference))

    assert norm_function(weighted) is weighted
    assert float(distance(weighted, jnp.array([3.0, 4.0]), jnp.zeros(2))) == 43.0


def test_functions_see_signed_differences():
    first, second = jnp.array([3, 250, 0], jnp.uint8), jnp.array([5, 0, 0], jnp.uint8)
    assert float(distance(lambda d: d[0] + 1000, first, second)) == 998.0
    assert float(distance(lambda d: d[1], first, second)) == 250.0


def test_a_norm_may_count():
    def differing(difference):
        return jnp.sum(difference != 0)

    assert float(distance(differing, jnp.array([3, 4, 5]), jnp.array([3, 0, 0]))) == 2.0


@pytest.mark.parametrize("norm", ["l3", "L1", "", None, 2, ["l1"]])
def test_unknown_norms_are_refused(norm):
    with pytest.raises(ValueError, match="norm must be a function or one of"):
        norm_function(norm)


def test_resolution_is_a_unit_in_the_last_place():
    eps = float(jnp.finfo(jnp.float32).eps)
    assert float(resolution("l1", jnp.array([1000.0, -24.0]))) == pytest.approx(1024 * eps)
    assert float(resolution("linf", jnp.array([1000.0, -24.0]))) == pytest.approx(1000 * eps)
    narrow = float(jnp.finfo(jnp.bfloat16).eps)
    assert float(resolution("l1", jnp.ones(3, jnp.bfloat16))) == pytest.approx(3 * narrow)
    for exact in (jnp.array([10**6]), jnp.array([True]), jnp.array([200], jnp.uint8)):
        assert float(resolution("l1", exact)) == 0.0
    assert float(resolution("l1", jnp.array([jnp.nan]))) == 0.0  # Shows in the distances.


def test_distance_under_vmap_and_jit():
    values, others = jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3))
    found = jax.jit(jax.vmap(lambda x, y: distance("l2", x, y)))(values, others)
    np.testing.assert_allclose(found, np.linalg.norm(np.asarray(values - others), axis=1), 1e-6)


def test_the_range_is_the_largest_change_minus_the_smallest():
    zeros = {"a": jnp.zeros(2), "b": jnp.zeros((1, 2))}
    value = {"a": jnp.array([1.0, -3.0]), "b": jnp.array([[0.5, 4.0]])}
    shifted = jax.tree.map(lambda x: x + 100, value)
    assert float(distance("range", value, zeros)) == 7.0
    assert float(distance("range", shifted, zeros)) == 7.0
    # It is 0 for equal changes, but their rounding is not equal.
    assert rounding_norm("range", value) == 2.0
    assert float(resolution("range", value)) == 2 * float(resolution("linf", value))
    for other in ([jnp.nan, 0.0, 0.0], [jnp.inf, 0.0, 0.0], [jnp.inf, jnp.inf, jnp.inf]):
        assert np.isposinf(distance("range", jnp.array(other), jnp.zeros(3)))
        assert np.isposinf(distance("range", jnp.array(other), jnp.array(other)))


def test_the_range_of_integers_is_refused():
    """In float32 the range of 2^30 + 1 and 2^30 would be 0."""
    value = jnp.array([2**30 + 1, 2**30])
    with pytest.raises(ValueError, match="needs a target that returns floats"):
        distance("range", value, jnp.zeros(2, value.dtype))
