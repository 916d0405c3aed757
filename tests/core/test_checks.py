"""Early checks: concrete parameters raise, traced ones become NaN, casts saturate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._core import _checks


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_checks.positive, [1e-300, 1, 1e300], [0, -0.0, -1, np.nan, np.inf, -np.inf]),
        (_checks.non_negative, [0, 1e-300, 1e300], [-1e-300, -1, np.nan, np.inf]),
        (_checks.fraction, [1e-300, 0.5, 1 - 1e-16], [0, 1, -1, 2, np.nan, np.inf]),
    ],
)
def test_numbers(check, good, bad):
    for value in good:
        for number in (value, np.float64(value)):
            assert check("size", number) == value
            assert type(check("size", number)) is float
    for value in bad:
        with pytest.raises(ValueError, match=r"size must be .*, got"):
            check("size", value)
    for value in ("1", None, True, np.bool_(True), [1.0], np.ones(1), 1j, object()):
        with pytest.raises(TypeError, match=r"size must be .*, got"):
            check("size", value)


@pytest.mark.parametrize("check", [_checks.positive, _checks.non_negative, _checks.fraction])
def test_bad_traced_numbers_become_nan(check):
    for bad in (-1.0, np.nan, np.inf, -np.inf):
        assert np.isnan(jax.jit(lambda value: check("size", value))(bad))
    assert float(jax.jit(lambda value: check("size", value))(0.5)) == 0.5
    grid = jax.vmap(lambda value: check("size", value))(jnp.array([-1.0, 0.5]))
    np.testing.assert_array_equal(grid, [np.nan, 0.5])


def test_traced_integers_are_numbers_too():
    assert float(jax.jit(lambda value: _checks.positive("size", value))(3)) == 3.0


def test_traced_arrays_are_refused():
    with pytest.raises(
        ValueError,
        match=r"size must be .* shape \(2,\): to use several values, map over them by jax.vmap",
    ):
        jax.jit(lambda value: _checks.positive("size", value))(jnp.ones(2))


def test_integers():
    for value in (3, np.int64(3), np.uint8(3), jnp.int32(3)):
        assert _checks.integer("count", value, least=1) == 3
    with pytest.raises(ValueError, match="at least 4, got 3"):
        _checks.integer("count", 3, least=4)
    with pytest.raises(ValueError, match="at most 2, got 3"):
        _checks.integer("count", 3, least=1, most=2)
    for value in (3.0, "3", None, True, np.bool_(True), 1j):
        with pytest.raises(TypeError, match="count must be an integer"):
            _checks.integer("count", value, least=1)


def test_real_arrays_keeps_the_structure():
    tree = _checks.real_arrays("value", {"a": [1, 2.5], "b": np.array([True])})
    assert jax.tree.map(lambda leaf: str(leaf.dtype), tree) == {
        "a": ["int32", "float32"],
        "b": "bool",
    }


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([2**31 + 5, -(2**40), 7]), "int32", [2**31 - 1, -(2**31), 7]),
        (np.array([2**63], np.uint64), "uint32", [2**32 - 1]),
        (np.array([300, -300, 5], np.int16), "int8", [127, -128, 5]),
        (np.array([-5, 5], np.int32), "uint8", [0, 5]),
        (np.array([1e300, -1e300, 0.5]), "float32", [3.4028235e38, -3.4028235e38, 0.5]),
        (np.array([np.inf, -np.inf]), "float32", [3.4028235e38, -3.4028235e38]),
        (np.array([np.nan]), "float32", [np.nan]),
    ],
)
def test_casts_saturate_and_never_wrap(values, dtype, expected):
    found = _checks.saturating_cast(values, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), np.array(expected, dtype))


def test_a_cast_to_the_same_dtype_changes_nothing():
    values = jnp.array([np.inf, -np.inf, np.nan, 1.0])
    np.testing.assert_array_equal(_checks.saturating_cast(values, "float32"), values)


def test_extras_say_how_to_install_them():
    with pytest.raises(ModuleNotFoundError, match=r"no_such.* pip install 'dpjax\[demo\]'"):
        _checks.extra("no_such_module", "demo")
