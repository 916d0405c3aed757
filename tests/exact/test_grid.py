"""Powers of two and rounding to a grid, against exact rationals."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_modulo, round_to_grid, round_widely

BOUND, WIDE_BOUND = 2**61, 2**93
examples = settings(max_examples=300, deadline=None, derandomize=True)
compiled = jax.jit(round_to_grid)
widely, modulo = jax.jit(round_widely), jax.jit(round_modulo)


def integers(limbs):
    """Limbs as Python integers."""
    high = np.asarray(limbs.high).view(np.int32).astype(object)
    return (high * 2**32 + np.asarray(limbs.low).astype(object)).tolist()


def wide_integers(wide):
    """The same of 96 bits."""
    top = np.asarray(wide.top).view(np.int32).astype(object)
    rest = [limb % 2**64 for limb in integers(wide.rest)]
    return (top * 2**64 + np.array(rest, object)).tolist()


def exact(value, exponent, bound=BOUND):
    if isinstance(value, float) and not math.isfinite(value):
        return 0 if math.isnan(value) else int(math.copysign(bound, value))
    units = math.floor(Fraction(value) / Fraction(2) ** exponent + Fraction(1, 2))
    return max(-bound, min(bound, units))


def adversarial(dtype, exponent):
    """Halves and whole units of a grid, their neighbors, and the ends of the dtype."""
    info = jnp.finfo(dtype)
    ends = [0.0, float(info.tiny), float(info.smallest_subnormal), float(info.max), np.inf, np.nan]
    halves = [k * 2.0 ** (exponent - 1) for k in (1, 2, 3, 4, 5, 2**22 + 1, 2**23 - 1, 2**24 - 1)]
    large = [2.0**k * 2.0**exponent for k in (31, 32, 60, 61, 62, 63, 64, 92, 93, 94)]
    with np.errstate(over="ignore", under="ignore"):
        values = np.array([*ends, *halves, *large], np.dtype(dtype))
        values = np.concatenate([values, -values])
        around = [np.nextafter(values, values.dtype.type(end)) for end in (-np.inf, np.inf)]
    return np.concatenate([values, *around])


def check(values, exponent):
    found = integers(compiled(jnp.asarray(values), jnp.int32(exponent)))
    assert found == [exact(value, exponent) for value in values.tolist()]


def check_widely(values, exponent):
    found = wide_integers(widely(jnp.asarray(values), jnp.int32(exponent)))
    assert found == [exact(value, exponent, WIDE_BOUND) for value in values.tolist()]
    finite = np.where(np.isfinite(values), values, 0)
    found = [units % 2**64 for units in integers(modulo(jnp.asarray(finite), jnp.int32(exponent)))]
    assert found == [exact(value, exponent, 10**700) % 2**64 for value in finite.tolist()]


EXPONENTS = (-149, -126, -125, -60, -10, -1, 0, 1, 30, 66, 126, 127)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_float32(exponent):
    check(adversarial("float32", exponent), exponent)
    assert len(set(integers(compiled(adversarial("float32", exponent), exponent)))) > 6


@pytest.mark.parametrize("bits", [31, 43, 60])
def test_results_are_clamped_to_as_many_bits_as_are_asked_for(bits):
    for exponent in (-149, -20, 0, 30):
        values = adversarial("float32", exponent)
        found = integers(jax.jit(round_to_grid, static_argnums=2)(values, exponent, bits))
        assert found == [exact(value, exponent, 2**bits) for value in values.tolist()]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_float32_in_96_bits_and_modulo_64(exponent):
    check_widely(adversarial("float32", exponent), exponent)


@pytest.mark.parametrize("exponent", [-1074, -1022, -62, 0, 40, 961, 1023])
def test_float64_in_96_bits_and_modulo_64(exponent, x64):
    check_widely(adversarial("float64", exponent), exponent)


@given(st.integers(0, 2**32 - 1), st.integers(-160, 130))
@examples
def test_any_float32_in_96_bits_and_modulo_64(bits, exponent):
    check_widely(np.array([bits], np.uint32).view(np.float32), exponent)


@pytest.mark.parametrize("exponent", [-1074, -1022, -500, -62, -1, 0, 1, 40, 961, 1023])
def test_float64(exponent, x64):
    check(adversarial("float64", exponent), exponent)


@given(st.integers(0, 2**32 - 1), st.integers(-160, 130))
@examples
def test_any_float32_on_any_grid(bits, exponent):
    check(np.array([bits], np.uint32).view(np.float32), exponent)


@given(st.floats(-64, 64, width=32), st.integers(-20, 8))
@examples
def test_float32_near_the_grid(value, exponent):
    check(np.array([value], np.float32), exponent)


@given(st.integers(0, 2**64 - 1), st.integers(-1100, 1030))
@examples
def test_any_float64_on_any_grid(bits, exponent):
    with jax.enable_x64(True):
        check(np.array([bits], np.uint64).view(np.float64), exponent)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_every_narrow_float(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    for exponent in (-133, -10, 0):
        found = integers(compiled(jnp.asarray(values), exponent))
        with np.errstate(invalid="ignore"):  # NumPy warns of signaling NaNs.
            assert found == [exact(value, exponent) for value in values.astype(float).tolist()]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2), st.integers(-40, 40))
@examples
def test_int32(values, exponent):
    check(np.array(values, np.int32), exponent)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2), st.integers(-70, 70))
@examples
def test_int64(values, exponent):
    with jax.enable_x64(True):
        check(np.array([*values, -(2**63), 2**63 - 1]), exponent)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint32"])
def test_narrow_integers(dtype):
    top = 1 if dtype == "bool" else int(jnp.iinfo(dtype).max)
    values = np.array([0, 1, top]).astype(dtype)
    for exponent in (-3, 0, 1, 31, 32, 33):
        found = integers(compiled(jnp.asarray(values), exponent))
        assert found == [exact(int(value), exponent) for value in values]


def test_halves_go_up():
    values = jnp.asarray([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert integers(compiled(values, 0)) == [-2, -1, 0, 1, 2, 3]
    assert integers(modulo(values, 0)) == [-2, -1, 0, 1, 2, 3]
    with jax.enable_x64(True):
        assert integers(compiled(values.astype("float64"), 0)) == [-2, -1, 0, 1, 2, 3]
    # The control: half-to-even moves two numbers at distance 1 by 2, or by 0.
    assert jnp.round(values).tolist() == [-2, -2, 0, 0, 2, 2]


def test_just_below_a_half():
    # The control: x + 1/2 in floats rounds up to 1.
    value = np.nextafter(np.float32(0.5), np.float32(0))
    assert np.floor(value + np.float32(0.5)) == 1
    assert integers(compiled(jnp.asarray([value, -value]), 0)) == [0, 0]


@given(st.floats(-1000, 1000, width=32), st.floats(-1000, 1000, width=32), st.integers(-8, 4))
@example(-0.5, 0.5, 0)
@example(0.5, 1.5, 0)
@examples
def test_no_two_numbers_move_apart(x, y, exponent):
    values = sorted([x, y])
    low, high = integers(compiled(jnp.asarray(values, "float32"), jnp.int32(exponent)))
    distance = (Fraction(values[1]) - Fraction(values[0])) / Fraction(2) ** exponent
    assert 0 <= high - low <= math.ceil(distance)


@pytest.mark.slow
def test_traced_python_and_mapped_exponents_agree():
    values = jnp.asarray(adversarial("float32", -3))
    exponents = np.array([-3, 0, 5, -(2**31), 2**31 - 1], np.int32)
    mapped = jax.vmap(round_to_grid, (None, 0))(values, jnp.asarray(exponents))
    for i, exponent in enumerate(exponents.tolist()):
        python = jax.jit(lambda x, e=exponent: round_to_grid(x, e))(values)
        traced = compiled(values, jnp.int32(exponent))
        row = jax.tree.map(lambda leaf, i=i: leaf[i], mapped)
        assert integers(python) == integers(traced) == integers(row)


def test_bits_do_not_depend_on_x64():
    values = adversarial("float32", -3)
    plain = integers(compiled(values, -3))
    with jax.enable_x64(True):
        assert integers(compiled(values, -3)) == plain


def test_back_to_floats():
    units = compiled(jnp.asarray([1.25, -3.75, 1e6]), -2)
    back = _limbs.to_float(units, jnp.float32) * power_of_two(-2, jnp.float32)
    assert back.tolist() == [1.25, -3.75, 1e6]


# Integers of 96 bits.

WIDE = st.integers(0, 93).flatmap(lambda bits: st.integers(-(2**bits), 2**bits))


def limbs_of(value):
    return _limbs.Limbs(np.uint32(value >> 32 & 0xFFFFFFFF), np.uint32(value & 0xFFFFFFFF))


@jax.jit
def add_and_convert(x, y):
    total = _limbs.add_to_wide(x, y)
    as_float = _limbs.wide_to_float(total, jnp.float32)
    return total, as_float, _limbs.saturate(total, 2**63 - 2), _limbs.saturate(total, 2**31 - 2)


@given(WIDE, st.integers(-(2**63), 2**63 - 1))
@examples
def test_sums_of_96_bits(x, y):
    wide = _limbs.Wide(np.uint32(x >> 64 & 0xFFFFFFFF), limbs_of(x))
    total, as_float, *saturated = add_and_convert(wide, limbs_of(y))
    assert wide_integers(jax.tree.map(lambda leaf: leaf[None], total)) == [x + y]
    assert abs(Fraction(float(as_float)) - (x + y)) <= abs(x + y) * Fraction(1, 2**23)
    for found, bound in zip(saturated, (2**63 - 2, 2**31 - 2), strict=True):
        clamped = max(-bound, min(bound, x + y))
        assert integers(jax.tree.map(lambda leaf: leaf[None], found)) == [clamped]


# Powers of two.


def test_every_normal_power_of_float32():
    exponents = np.arange(-126, 128, dtype=np.int32)
    powers = jax.jit(lambda e: power_of_two(e, jnp.float32))(exponents)
    assert powers.dtype == "float32"
    assert powers.tolist() == [2.0**e for e in exponents.tolist()]
    assert [float(power_of_two(e, jnp.float32)) for e in (-126, 0, 127)] == [2.0**-126, 1, 2.0**127]


def test_every_normal_power_of_float64(x64):
    exponents = np.arange(-1022, 1024, dtype=np.int32)
    powers = jax.jit(lambda e: power_of_two(e, jnp.float64))(exponents)
    assert powers.dtype == "float64"
    assert powers.tolist() == [2.0**e for e in exponents.tolist()]


def test_power_out_of_range():
    for exponent, dtype in itertools.product((-127, 128), ("float32",)):
        with pytest.raises(ValueError, match=rf"\[-126, 127\] for float32, got {exponent}"):
            power_of_two(exponent, dtype)
        assert np.isnan(jax.jit(lambda e: power_of_two(e, jnp.float32))(exponent))
