"""Exact sums, against exact rationals and under permutation."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import NeighboringRelation
from dpjax.targets._exact_sums import ExactSum, exact_sum, sum_sensitivity

examples = settings(max_examples=150, deadline=None, derandomize=True)
PARAMETERS = [
    {"lower": -1, "upper": 1, "grid": 2.0**-20},
    {"lower": 0, "upper": 100.3, "grid": 0.25},
    {"lower": -3.75, "upper": 2.6, "grid": 1},
    {"lower": 5, "upper": 7, "grid": 4},
    {"lower": -(2.0**40), "upper": 2.0**40, "grid": 2.0**-10},
    {"lower": 0, "upper": 2.0**-120, "grid": 2.0**-126},
]
parameters = pytest.mark.parametrize("parameters", PARAMETERS)


def integers(total):
    """The units of a sum as Python integers."""
    high, low = (np.asarray(limb).tolist() for limb in total.units)
    if not isinstance(high, list):
        high, low = [high], [low]
    values = [
        (h - (h >> 31 << 32)) * 2**32 + low_limb for h, low_limb in zip(high, low, strict=True)
    ]
    return values if total.units.high.ndim else values[0]


def units(x, *, lower, upper, grid):
    """What a record counts as."""
    if isinstance(x, float) and math.isnan(x):
        x = 0
    clamped = max(Fraction(lower), min(Fraction(upper), Fraction(x))) if abs(x) < math.inf else x
    clamped = {math.inf: upper, -math.inf: lower}.get(x, clamped)
    return math.floor(Fraction(clamped) / Fraction(grid) + Fraction(1, 2))


def adversarial(grid, dtype="float32"):
    """Halves of the grid and their neighbors, and the ends of the dtype."""
    info = np.finfo(dtype)
    halves = [k * grid / 2 for k in (1, 2, 3, 5, 7, 2**20 + 1, 2**23 - 1)]
    ends = [0, info.tiny, info.smallest_subnormal, info.max, np.inf, np.nan, 2.0**-60, 5, 7]
    values = np.array([*halves, *ends], dtype)
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore", under="ignore"):
        return np.concatenate(
            [values, *(np.nextafter(values, info.dtype.type(e)) for e in (-9, 9))]
        )


@parameters
def test_adversarial_floats(parameters):
    records = adversarial(parameters["grid"])
    exact = [units(x, **parameters) for x in records.tolist()]
    assert integers(exact_sum(records, **parameters)) == sum(exact)
    # Record by record, so that errors cannot cancel.
    each = jax.jit(lambda x: exact_sum(x[None], **parameters))(records)
    assert integers(each) == exact
    assert len(set(exact)) > 1


@parameters
def test_adversarial_floats_in_float64(parameters, x64):
    records = adversarial(parameters["grid"], "float64")
    each = exact_sum(records[None], **parameters)
    assert integers(each) == [units(x, **parameters) for x in records.tolist()]


@given(st.lists(st.floats(width=32), min_size=8, max_size=8), st.sampled_from(PARAMETERS))
@examples
def test_any_floats(values, parameters):
    total = exact_sum(np.array(values, np.float32), **parameters)
    assert integers(total) == sum(units(x, **parameters) for x in values)


@given(
    st.lists(st.floats(width=32), min_size=8, max_size=8),
    st.integers(0, 7),
    st.floats(width=32),
    st.sampled_from(PARAMETERS),
)
@examples
def test_neighbors_differ_by_at_most_the_sensitivity(values, position, other, parameters):
    records = np.array(values, np.float32)
    neighbor = records.copy()
    neighbor[position] = other
    first, second = (integers(exact_sum(x, **parameters)) for x in (records, neighbor))
    assert abs(first - second) <= sum_sensitivity(**parameters)
    fewer = integers(exact_sum(np.delete(records, position), **parameters))
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    assert abs(first - fewer) <= sum_sensitivity(**parameters, relation=relation)


@parameters
def test_sensitivity_is_attained(parameters):
    records = np.array([np.inf, -np.inf, 0.0], np.float32)
    high, low, _ = integers(exact_sum(records[None], **parameters))
    assert high - low == sum_sensitivity(**parameters)
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    assert max(abs(high), abs(low)) == sum_sensitivity(**parameters, relation=relation)


def test_order_does_not_matter():
    generator = np.random.default_rng(0)
    records = (generator.random(10**6) * 10.0 ** generator.integers(-4, 1, 10**6)).astype("float32")
    shuffled = generator.permutation(records)
    bounds = {"lower": 0, "upper": 10, "grid": 2.0**-20}
    total = integers(exact_sum(records, **bounds))
    assert integers(exact_sum(shuffled, **bounds)) == total
    # The control: a sum of floats moves.
    assert np.cumsum(records)[-1] != np.cumsum(shuffled)[-1]
    grid_points = np.floor(records.astype(float) * 2**20 + 0.5)
    assert total == sum(map(int, np.clip(grid_points, 0, 10 * 2**20)))


@pytest.mark.parametrize("n", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 3 * 2**16 + 5])
def test_blocks(n):
    # All bits of both limbs, so that every half carries.
    largest = (2**62 - 1) // n - (n == 1) * 2**61
    bounds = {"lower": -largest, "upper": largest, "grid": 1}
    total = integers(exact_sum(np.full((n, 2), [np.inf, -np.inf], np.float32), **bounds))
    assert total == [n * largest, -n * largest]


def test_integers_and_booleans():
    bounds = {"lower": -(2**31), "upper": 2**32, "grid": 1}
    for dtype in ("int8", "uint8", "int32", "uint32"):
        ends = [np.iinfo(dtype).min, np.iinfo(dtype).max, 7]
        assert integers(exact_sum(np.array(ends, dtype), **bounds)) == sum(map(int, ends))
    assert integers(exact_sum(np.array([True, False, True]), lower=0, upper=1, grid=1)) == 2
    halves = exact_sum(np.array([1, 3, -1, -3]), lower=-4, upper=4, grid=2)
    assert integers(halves) == 1 + 2 + 0 - 1


def test_wide_integers_saturate_without_x64():
    bounds = {"lower": -(2**31), "upper": 2**31 - 1, "grid": 1}
    assert integers(exact_sum(np.array([2**31 + 5, 2**40]), **bounds)) == 2 * (2**31 - 1)


def test_wide_integers(x64):
    records = np.array([2**31 + 5, -(2**40), 2**63 - 1])
    total = exact_sum(records, lower=-(2**50), upper=2**50, grid=1)
    assert integers(total) == 2**31 + 5 - 2**40 + 2**50


def test_bits_do_not_depend_on_x64_or_the_program():
    records = adversarial(0.25)
    bounds = PARAMETERS[1]
    plain = integers(exact_sum(records, **bounds))
    columns = np.stack([records, records[::-1]], 1)
    assert integers(exact_sum(columns, **bounds)) == [plain, plain]
    mapped = jax.jit(jax.vmap(lambda x: exact_sum(x, **bounds), in_axes=1))(columns)
    assert isinstance(mapped, ExactSum)
    assert integers(mapped) == [plain, plain]
    with jax.enable_x64(True):
        assert integers(exact_sum(records, **bounds)) == plain


def test_to_float():
    records = jnp.asarray([1.3, 2.8, -0.1])
    total = exact_sum(records, lower=-5, upper=5, grid=0.5)
    assert float(total.to_float()) == 1.5 + 3.0 + 0.0
    assert total.to_float(jnp.bfloat16).dtype == jnp.bfloat16
    # Beyond the significand of a float32.
    many = exact_sum(np.full(3, 2**24 + 2, np.float32), lower=0, upper=2**25, grid=1)
    assert abs(float(many.to_float()) - 3 * (2**24 + 2)) <= 4
    with jax.enable_x64(True):
        assert float(many.to_float()) == 3 * (2**24 + 2)


def test_too_many_units_are_refused_whatever_the_records():
    for records in (np.zeros(4, np.float32), np.full(4, np.nan, np.float32)):
        with pytest.raises(ValueError, match=r"below 2\^62, got 4 \* 1152921504606846976 = 2\^62"):
            exact_sum(records, lower=0, upper=2.0**60, grid=1)
    exact_sum(np.zeros(4, np.float32), lower=0, upper=2.0**60 - 2.0**10, grid=1)
    jax.jit(lambda x: exact_sum(x, lower=0, upper=1, grid=2.0**-55))(jnp.zeros(4))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grid": 0.3}, "grid must be a power of two"),
        ({"grid": 0}, "grid must be a power of two"),
        ({"grid": -1}, "grid must be a power of two"),
        ({"grid": 2.0**-127}, "grid must be a power of two"),
        ({"grid": math.nan}, "grid must be a finite number"),
        ({"upper": math.inf}, "upper must be a finite number"),
        ({"lower": 2}, "lower must not be above upper"),
    ],
)
def test_bad_bounds(changed, message):
    bounds = {"lower": 0, "upper": 1, "grid": 0.5, **changed}
    with pytest.raises(ValueError, match=message):
        exact_sum(np.zeros(3), **bounds)
    with pytest.raises(ValueError, match=message):
        sum_sensitivity(**bounds)


def test_bad_records():
    bounds = {"lower": 0, "upper": 1, "grid": 0.5}
    with pytest.raises(ValueError, match="records must be one array"):
        exact_sum(jnp.float32(1), **bounds)
    with pytest.raises(ValueError, match="records must be one array"):
        exact_sum([1.0, 2.0], **bounds)
    with pytest.raises(ValueError, match="must not be empty"):
        exact_sum(np.zeros((0, 3)), **bounds)
    with pytest.raises(TypeError, match="real numbers"):
        exact_sum(np.array([1j]), **bounds)
    with pytest.raises(TypeError, match="lower must be a finite number"):
        exact_sum(np.zeros(3), lower="0", upper=1, grid=1)
    with pytest.raises(TypeError, match="upper must be known before tracing"):
        jax.jit(lambda upper: exact_sum(np.zeros(3), lower=0, upper=upper, grid=1))(1.0)
