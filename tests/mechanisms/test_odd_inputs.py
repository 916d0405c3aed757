"""Every mechanism under the inputs of tests/odd_inputs.py: values, keys, lanes of vmap.

Strange numbers are in the conformance table. What else reaches a release: dtypes, masks, imaginary
parts, integers that do not fit, keys of other implementations, and batches of all these.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import odd_inputs
from dpjax.random import seeded_key
from mechanism_table import TABLE

every_mechanism = pytest.mark.parametrize("name", TABLE)


def made(name):
    """A mechanism, a value of one array and what else is in the value."""
    factory, arguments = TABLE[name]
    arguments = {"sensitivity": 1.0, "epsilon": 1.0} | arguments
    numbers = [x for x in (arguments["sensitivity"], arguments["epsilon"]) if x is not None]
    leaves, structure = jax.tree.flatten(arguments["value"])

    def with_array(array):
        return jax.tree.unflatten(structure, [array, *leaves[1:]])

    return factory(*numbers), np.asarray(leaves[0]), with_array


@every_mechanism
def test_what_hides_something_is_refused(name, key):
    mechanism, array, with_array = made(name)
    alone = len(jax.tree.leaves(with_array(array))) == 1
    # An empty array beside others hides nothing.
    odds = [x for x in odd_inputs.hiding(np.atleast_1d(array)) if alone or x.name != "empty"]
    odd_inputs.assert_refused(lambda x: mechanism(key, with_array(x)).value, odds, "^value ")


@every_mechanism
def test_keys_that_are_not_ours_are_refused(name):
    mechanism, array, with_array = made(name)
    for kind, other in odd_inputs.every_key():
        if kind != "chacha20":
            with pytest.raises((TypeError, ValueError), match=r"^key "):
                mechanism(other, with_array(array))


@pytest.mark.parametrize(
    "name", [x if x == "laplace" else pytest.param(x, marks=pytest.mark.slow) for x in TABLE]
)
def test_lanes_of_vmap_are_releases_of_their_own(name, keys):
    """Over keys and values, and over both again: the same bits as one by one."""
    mechanism, array, with_array = made(name)
    several = jax.random.split(keys(7), (2, 2))
    values = np.stack(
        [np.stack([array, array]), np.stack([array[..., ::-1] if array.ndim else array, array])]
    )

    def release(key, x):
        return mechanism(key, with_array(x)).value

    batched = jax.vmap(jax.vmap(release))(several, jnp.asarray(values))
    for i, j in ((0, 0), (1, 0)):
        alone = release(several[i, j], jnp.asarray(values[i, j]))
        for x, y in zip(jax.tree.leaves(batched), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i, j], y, rtol=1e-6, atol=1e-6)


ADDITIVE = {
    "laplace": dpjax.laplace(1.0, 1.0),
    "gaussian": dpjax.gaussian(1.0, 1.0, 1e-5),
}
WHOLE = np.asarray([3, 0, 1, 7, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("wide", [False, True])
def test_the_same_numbers_in_another_dtype_are_released(name, wide):
    """Within what the noise exceeds once in 10^9 keys, plus the precision of the dtype."""
    mechanism = ADDITIVE[name]
    most = mechanism.error(confidence=1 - 1e-9, shape=WHOLE.shape, simultaneous=True)
    with jax.enable_x64(wide):
        key = seeded_key(5)
        odd_inputs.assert_right(
            lambda x: mechanism(key, x).value,
            odd_inputs.written_otherwise(WHOLE),
            "^value ",
            lambda x: x,
            tolerance=1.1 * most,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDITIVE)
def test_integers_saturate_and_never_wrap(name):
    """The release of a number that its dtype in JAX cannot hold is near the end of the dtype."""
    mechanism, key = ADDITIVE[name], seeded_key(5)
    for odd in odd_inputs.wide_numbers(np.zeros(3)):
        released = np.asarray(mechanism(key, odd.array).value, float)
        assert np.isfinite(released).all(), odd.name
        assert np.abs(released[:2]).max() < 1e3, odd.name
        assert np.sign(released[2]) == np.sign(odd.means[2]), odd.name
        assert abs(released[2]) > 2.0**30, odd.name


SCORES = np.asarray([1.0, 0.0, 7.0, 2.0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [dpjax.exponential, dpjax.permute_and_flip])
def test_scores_in_another_dtype_select_the_same(make):
    """At epsilon 1000 the best one, but for once in e^1000 keys."""
    mechanism, key = make(1.0, 1000.0), seeded_key(5)
    odd_inputs.assert_right(
        lambda x: mechanism(key, x).value,
        odd_inputs.written_otherwise(SCORES),
        "^value |^epsilon=",
        np.argmax,
    )
    for odd in odd_inputs.wide_numbers(SCORES):
        best = int(np.argmax(odd.means))
        assert int(mechanism(key, odd.array).value) == best, odd.name


@pytest.mark.slow
def test_records_in_another_dtype_have_the_same_quantile():
    mechanism = dpjax.smooth_quantile(1000.0, 1e-6, lower=0.0, upper=8.0)
    records = np.repeat(np.asarray([1, 3, 7]), 40)
    odd_inputs.assert_right(
        lambda x: mechanism(seeded_key(5), x).value,
        odd_inputs.written_otherwise(records),
        "^value ",
        np.median,
        tolerance=1e-2,
    )


def test_a_number_of_any_kind_is_the_same_and_no_number_is_refused():
    for value in [*odd_inputs.NO_NUMBERS, *odd_inputs.NO_PARAMETERS]:
        with pytest.raises((TypeError, ValueError), match=r"^sensitivity must"):
            dpjax.laplace(value, 1.0)
        with pytest.raises((TypeError, ValueError), match=r"^epsilon must"):
            dpjax.laplace(1.0, value)
    for kind in odd_inputs.KINDS_OF_NUMBERS:
        assert dpjax.laplace(kind(2), kind(0.5)).scale == 4.0
