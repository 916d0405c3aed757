"""What is kept of a mechanism from its first release on."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets
from dpjax._core._pytree import TreeSpec
from dpjax.random import secure_key
from dpjax.release._draw import _DRAWS, draw_of

SCALAR = TreeSpec.of(jax.ShapeDtypeStruct((), jnp.float32))


def test_a_value_of_another_kind_is_checked_anew(key):
    mechanism = dpjax.exponential(1.0, 1.0)
    mechanism(key, jnp.zeros(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="one array of scores"):
            mechanism(key, jnp.zeros((1, 3)))
        with pytest.raises(ValueError, match="one array of scores"):
            mechanism(key, [jnp.zeros(3)])
    assert len(_DRAWS[mechanism]) == 1


def test_another_dtype_is_checked_anew(key):
    mechanism = dpjax.laplace(1e-60, 1.0)
    with jax.enable_x64(True):
        mechanism(key, jnp.float64(0))
        for _ in range(2):
            with pytest.raises(ValueError, match="out of the range of float32"):
                mechanism(key, jnp.float32(0))
    with pytest.raises(ValueError, match="out of the range of float32"):
        mechanism(key, 0.0)


def test_numbers_are_those_of_the_precision_at_hand():
    mechanism = dpjax.laplace(1.0, 0.3)
    for _ in range(2):
        assert draw_of(mechanism, SCALAR).numbers[3] > 0.3
        with jax.enable_x64(True):
            assert draw_of(mechanism, SCALAR).numbers[3] == 0.3


def test_of_tracers_nothing_is_kept(key):
    made = []

    @jax.jit
    def release(epsilon):
        made.append(dpjax.laplace(1.0, epsilon))
        return made[0](key, jnp.float32(0)).value

    assert np.isfinite(release(1.0))
    assert made[0] not in _DRAWS


def test_what_is_kept_goes_with_the_mechanism():
    mechanism = dpjax.laplace(1.0, 1.0)
    assert draw_of(mechanism, SCALAR) is draw_of(mechanism, SCALAR)
    kept = len(_DRAWS)
    del mechanism
    gc.collect()
    assert len(_DRAWS) < kept


def test_mechanisms_of_one_structure_share_a_program():
    """So they share their programs, whatever their sensitivity, m and gamma."""
    one = dpjax.laplace(1.0, 1.0)
    other = dpjax.laplace(dpjax.assume_sensitivity(2.0, norm="l1", n=7), 3.0)
    draws = [draw_of(x, SCALAR) for x in (one, other, dpjax.gaussian(1.0, 1.0, 1e-5))]
    assert draws[0]._compiled is draws[1]._compiled
    assert draws[0]._compiled is not draws[2]._compiled


def test_a_guarantee_is_kept_without_tracers(key):
    """Also of a mechanism whose numbers are arrays, which came out of a program."""
    mechanism = jax.jit(lambda: dpjax.laplace(1.0, jnp.float32(1.0)))()
    assert mechanism(dpjax.random.secure_key(), 0.0).guarantee.notes == ()
    traced = jax.jit(lambda: mechanism(key, jnp.float32(0)))()
    release = mechanism(key, jnp.float32(0))
    assert float(release.guarantee.epsilon) == float(traced.guarantee.epsilon) == 1
    assert release.guarantee.notes == traced.guarantee.notes == ("seeded key",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfOthers:
    """A mechanism that only keeps the protocol."""

    inner: dpjax.mechanisms.AdditiveMechanism
    zcdp = dp_event = None
    norm = property(lambda self: self.inner.norm)
    sensitivity = property(lambda self: self.inner.sensitivity)
    guarantee = property(lambda self: self.inner.guarantee)

    def unpaid_draw(self, key, value):
        return self.inner.unpaid_draw(key, value)


def test_a_mechanism_of_others_is_checked_paid_for_and_kept(key, tmp_path):
    target, records = targets.bounded_mean(lower=0, upper=1), jnp.linspace(0, 1, 100)
    inner = dpjax.laplace(target.sensitivity("l1", n=100), 1.0)
    private, known = (dpjax.privatize(target, x) for x in (OfOthers(inner), inner))
    release = private(key, records)
    assert release.guarantee == known(key, records).guarantee
    assert release.guarantee.notes == ("seeded key",)
    assert release.value == known(key, records).value
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(lambda x: private(key, x).value)(jnp.zeros((2, 100)))
    small = OfOthers(dpjax.laplace(0.005, 1.0))
    with pytest.raises(ValueError, match="sensitivity is too small"):
        dpjax.privatize(target, small)(key, records)
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon=1)
    with ledger:
        first, again = (private(secure_key(), records, name="records") for _ in range(2))
        with pytest.raises(dpjax.BudgetExceededError):
            private(secure_key(), records)
    assert first.value == again.value
    assert ledger.spent.epsilon == 1
