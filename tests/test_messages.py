"""What a newcomer meets: mistakes of a first hour, and messages that say how to go on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

N = 6
BOUND = dpjax.assume_sensitivity(1.0, norm="l1")
LAPLACE = dpjax.laplace(BOUND, 1.0)
LONGEST = 500


def oracle(key, n):
    return jax.random.uniform(key, (n,))


def sample(target=jnp.mean, oracle=oracle, norm="l1"):
    return dpjax.sample_sensitivity(jax.random.key(0), target, oracle, n=N, norm=norm, m=10)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """Like a module of Equinox: its activation is a leaf."""

    weights: jax.Array
    activation: object


def message(kind, function, *arguments):
    with pytest.raises(kind) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("many", [[1.0] * 10**6, [[1.0, 2.0]] * 10**5], ids=["flat", "nested"])
def test_a_list_as_database_is_told_in_a_line(many, key):
    told = message(ValueError, dpjax.privatize(jnp.mean, LAPLACE), key, many)
    assert "numpy.asarray" in told
    assert len(told) < LONGEST
    assert len(message(ValueError, dpjax.oracles.resample, many)) < LONGEST
    assert "1.0" not in told  # The database is private.


@pytest.mark.parametrize("wrong", [BOUND, 1.0, jnp.mean], ids=["sensitivity", "number", "swapped"])
def test_what_is_no_mechanism_is_told_what_is_one(wrong):
    told = message(TypeError, dpjax.privatize, jnp.mean, wrong)
    assert "mechanism must be" in told
    assert "dpjax.laplace(sensitivity, epsilon)" in told


ASKS_FOR_VALUES = {
    "NumPy": np.median,
    "float": lambda x: float(jnp.sum(x)),
    "item": lambda x: jnp.sum(x).item(),
    "int": lambda x: jnp.zeros(int(jnp.sum(x))),
    "if": lambda x: 1.0 if jnp.sum(x) > 0 else 0.0,
    "index": lambda x: [1.0, 2.0][jnp.argmax(x)],
    "shape": lambda x: jnp.zeros(jnp.argmax(x)),
    "mask": lambda x: jnp.sum(x[x > 0]),
    "jit": jax.jit(lambda x: 1.0 if jnp.sum(x) > 0 else 0.0),
}


@pytest.mark.parametrize("how", ASKS_FOR_VALUES)
def test_functions_that_ask_for_numbers_are_told_both_ways_out(how, key):
    function = ASKS_FOR_VALUES[how]
    told = message(TypeError, sample, function)
    assert "target must be JAX code" in told
    assert "jax.numpy" in told
    assert "dpjax.targets.host" in told
    assert message(TypeError, dpjax.privatize(function, LAPLACE), key, np.ones(N)) == told
    told = message(TypeError, sample, jnp.mean, oracle, function)
    assert "norm must be JAX code" in told
    assert "dpjax.targets.host" not in told  # Which a norm must not call.


def test_an_oracle_of_numpy_is_told_of_jax_random():
    def numpy_oracle(key, n):
        return np.random.default_rng(int(jax.random.bits(key))).random(n)

    told = message(TypeError, sample, jnp.mean, numpy_oracle)
    assert "oracle must be JAX code" in told
    assert "jax.random" in told


def test_an_oracle_with_swapped_arguments_is_told_so():
    told = message(TypeError, sample, jnp.mean, lambda n, key: oracle(key, n))
    assert "oracle(key, n)" in told
    # Only that: other mistakes keep their own words.
    told = message(TypeError, sample, jnp.mean, lambda key, n: np.asarray(key))
    assert "oracle must be JAX code" in told


@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh, lambda x: x])
def test_a_model_with_functions_is_told_how_to_keep_its_arrays(activation, key):
    model = Model(jnp.zeros(2), activation)
    for told in (
        message(TypeError, sample, lambda x: Model(jnp.mean(x), activation)),
        message(TypeError, LAPLACE, key, model),
    ):
        assert "equinox.partition" in told
        assert "dpjax.bernstein" in told


def test_too_large_an_epsilon_is_not_blamed_on_delta(key):
    weights = jax.ShapeDtypeStruct((257,), np.float32)

    def release(epsilon, delta):
        return jax.eval_shape(dpjax.gaussian(1.0, epsilon, delta), key, weights)

    told = message(ValueError, release, 100.0, 1e-5)
    assert told.startswith("epsilon=100 is too large for delta=1e-05, which allows at most 46.7")
    release(46.6, 1e-5)  # As it says.
    assert message(ValueError, release, 46.8, 1e-5).startswith("epsilon=46.8 is too large")
    assert message(ValueError, release, 1.0, 1e-30).startswith("delta=1e-30 is too close")


def words_of(key):
    return [str(word) for word in np.asarray(jax.random.key_data(key)).tolist()]


def test_no_message_shows_the_words_of_a_key():
    key = dpjax.random.secure_key()
    raw = np.asarray(jax.random.key_data(key))
    assert "dpjax.random.CHACHA20" in message(TypeError, LAPLACE, raw, 0.0)  # To restore it.
    for told in (
        message(TypeError, LAPLACE, raw, 0.0),
        message(TypeError, dpjax.privatize, key, LAPLACE),
        message(TypeError, dpjax.privatize, jnp.mean, {"key": [key, raw]}),
        message(TypeError, dpjax.laplace, 1.0, key),
        message(TypeError, dpjax.laplace, raw, 1.0),
        message(TypeError, dpjax.random.seeded_key, raw),
        message(TypeError, LAPLACE, dpjax.random.seeded_key(0), key),
    ):
        assert not any(word in told for word in words_of(key))


@pytest.mark.parametrize("describe", [repr, str], ids=["repr", "str"])
def test_nothing_but_a_key_prints_its_words(describe):
    key = dpjax.random.secure_key()
    sensitivity = dpjax.Sensitivity(
        0.1, 0.05, 0.99, "l1", 10, m=90, k=90, identity="c" * 32, target="d"
    )
    mechanism = dpjax.laplace(sensitivity, 1.0)
    with dpjax.random.KeyLedger() as ledger:
        release = mechanism(key, 0.0)
    for value in (sensitivity, mechanism, release, release.guarantee, ledger):
        assert not any(word in describe(value) for word in words_of(key))
