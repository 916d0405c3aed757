"""Padding: shapes share programs, and what is released does not know of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import _release

MECHANISMS = {
    "laplace": dpjax.laplace(0.5, 1.0),
    "gaussian": dpjax.gaussian(0.5, 1.0, 1e-5),
    # Where its scale is computed in float32, another divisor of the noise fits than in float64.
    "bernstein": dpjax.bernstein(0.3, 11.95, degree=6, dims=1),
}
VALUES = {
    "vector": jnp.linspace(-3, 3, 5),
    "strange": jnp.asarray([-0.0, jnp.nan, jnp.inf, -jnp.inf, 1e-42, 3e38, -3e38]),
    "full": jnp.arange(16.0),
    "one more": jnp.arange(17.0),
    "matrix": jnp.arange(21.0).reshape(3, 7),
    "integers": jnp.asarray([-(2**31), 2**31 - 1, 0, -4, 5]),
    "narrow": {"a": jnp.asarray([-128, 127], "int8"), "b": jnp.asarray([0, 65535], "uint16")},
    "tree": {
        "a": jnp.arange(3, dtype="bfloat16"),
        "b": [jnp.float32(2), jnp.arange(20), jnp.ones((2, 9), bool)],
    },
}
slow = pytest.mark.slow
CASES = [
    ("laplace", "tree"),
    *(pytest.param("laplace", name, marks=slow) for name in VALUES if name != "tree"),
    *(pytest.param("gaussian", name, marks=slow) for name in VALUES),
    pytest.param("bernstein", "strange", marks=slow),
]


def assert_same(one, other):
    assert [x.dtype for x in jax.tree.leaves(one)] == [x.dtype for x in jax.tree.leaves(other)]
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("mechanism", "value"), CASES)
def test_padded_or_not_the_same_is_released(mechanism, value, key, monkeypatch):
    release, value = (lambda key, x, m=MECHANISMS[mechanism]: m(key, x).value), VALUES[value]
    padded = release(key, value)
    assert_same(padded, jax.jit(release)(key, value))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), value)
    in_batch = jax.jit(jax.vmap(release))(jnp.stack([key, key]), batch)
    assert_same(padded, jax.tree.map(lambda x: x[1], in_batch))
    monkeypatch.setattr(_release, "_MOST_PADDED", 0)
    assert not _release.shares_programs(value)
    assert_same(padded, release(key, value))


def test_noise_of_a_smaller_value_is_that_of_the_first_places(key):
    """All of them, from one program's sizes to the next."""
    most = MECHANISMS["laplace"](key, jnp.zeros(40, "int32")).value
    for size in (2, 16, 17, 33):
        value = jnp.zeros(size, "int32")
        np.testing.assert_array_equal(MECHANISMS["laplace"](key, value).value, most[:size])


def test_another_shape_compiles_nothing(key, compilations):
    mechanism = MECHANISMS["laplace"]
    mechanism(key, jnp.zeros(9))
    value = jnp.ones((2, 6))
    assert compilations(lambda: mechanism(key, value).value) == []


@pytest.mark.parametrize("value", [jnp.arange(6.0), jnp.arange(6, dtype="bfloat16")])
def test_cpus_resize_as_other_devices_do(value):
    for shape in [(8,), (2, 2), (1, 6)]:
        on_host = _release.resized(value, shape)
        assert_same(on_host, _release._resized(value, shape))


def test_resized_values_stay_where_they_are():
    moved = jax.device_put(jnp.arange(3.0), jax.devices()[0])
    for value in (jnp.arange(3.0), moved):
        assert _release.resized(value, (64,)).committed == value.committed


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_the_padded_size_is_public(size, padded):
    assert _release._padded_size(size) == padded


def test_a_key_is_used_up_by_a_padded_release():
    """For JAX's checker, for ledgers, and where values are mapped over and keys are not."""
    release, value = MECHANISMS["laplace"], jnp.arange(9.0)
    with jax.debug_key_reuse(True):
        key = dpjax.random.seeded_key(1)
        release(key, value)
        with pytest.raises(jax.errors.KeyReuseError):
            release(key, value)
    key = dpjax.random.seeded_key(2)
    with dpjax.random.KeyLedger() as ledger:
        release(key, value)
        assert key in ledger
        with pytest.raises(ValueError, match="was used for a release before"):
            release(key, value)
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(lambda x: release(key, x))(jnp.ones((2, 9)))


def test_a_weakly_typed_nan_is_no_error(key):
    """JAX converts it, an operation that `jax.debug_nans` would stop at."""
    for value in (jnp.asarray(float("nan")), jnp.full(9, float("nan"))):
        with jax.debug_nans(True):
            released = MECHANISMS["laplace"](key, value).value
        assert np.isfinite(released).all()
