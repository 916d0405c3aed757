"""Who writes to an array that a function closes over changes no program that was traced before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import mechanisms, oracles
from dpjax._tracing._programs import Program

N = 16
ONES = np.ones(N, np.float32)
RECORDS = jax.ShapeDtypeStruct((N,), jnp.float32)


def ones():
    """To write to; in whole lines of the cache, because only such arrays have views in JAX."""
    room = np.zeros(4 * N + 64, np.uint8)
    found = room[-room.ctypes.data % 64 :][: 4 * N].view(np.float32)
    found[:] = 1
    return found


def of_a_jit(weights):
    weighted = jax.jit(lambda x: x * weights)
    return lambda x: jnp.mean(weighted(x))


def of_a_loop(weights):
    return lambda x: jnp.mean(lax.map(lambda at: x[at] * jnp.asarray(weights)[at], jnp.arange(N)))


def of_a_branch(weights):
    return lambda x: jnp.mean(lax.cond(x[0] < 9, lambda x: x * weights, lambda x: x, x))


def of_a_scalar(weights):
    return lambda x: jnp.mean(x * weights.reshape(-1)[:1].reshape(()))


def of_a_view_in_jax(weights):
    view = jnp.from_dlpack(weights)
    return lambda x: jnp.mean(x * view)


TARGETS = {
    "a closure": lambda weights: lambda x: jnp.mean(x * weights),
    "a jit": of_a_jit,
    "a loop": of_a_loop,
    "a branch": of_a_branch,
    "a scalar": of_a_scalar,
    "a view in JAX": of_a_view_in_jax,
}


def new_ways_to_call(function):
    """Each is compiled by itself."""
    committed = jax.device_put(ONES, jax.devices()[0])
    return {
        "committed": lambda: function(committed),
        "jit": lambda: jax.jit(function)(ONES),
        "jit, committed": lambda: jax.jit(function)(committed),
        "vmap": lambda: jax.vmap(function)(ONES[None])[0],
        "loop": lambda: lax.map(function, ONES[None])[0],
        "again": lambda: function(ONES),
    }


@pytest.mark.parametrize("name", TARGETS)
def test_a_program_computes_what_it_did(name):
    weights = ones()
    program = Program.trace("target", TARGETS[name](weights), RECORDS)
    first = program.fingerprint
    assert program(ONES) == 1
    weights *= 1000
    for way, call in new_ways_to_call(program).items():
        assert float(call()) == 1, way
    assert program.fingerprint == first


@pytest.mark.parametrize("name", TARGETS)
def test_a_program_of_equal_arrays_is_its_own(name):
    """Compiled programs are found by fingerprint, and another one was compiled with this one."""
    weights = ones()
    compiled = jax.jit(lambda x, program: program(x), static_argnames="program")
    assert compiled(ONES, program=Program.trace("target", TARGETS[name](weights), RECORDS)) == 1
    weights *= 100
    other = Program.trace("target", TARGETS[name](ones()), RECORDS)
    for way, call in new_ways_to_call(lambda x: compiled(x, program=other)).items():
        assert float(call()) == 1, way


def test_a_release_keeps_its_target(key):
    weights = ones()
    target = TARGETS["a closure"](weights)
    proved = dpjax.prove_sensitivity(target, RECORDS, bounds=(0, 1), norm="l1")
    private = dpjax.privatize(target, dpjax.laplace(proved, epsilon=1e6))
    released = jax.jit(lambda x: private(key, x).value)
    assert float(released(ONES)) == pytest.approx(1, abs=1e-3)
    weights *= 1000
    assert float(released(jax.device_put(ONES, jax.devices()[0]))) == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="target has changed since it was traced"):
        private(key, ONES)


@pytest.mark.parametrize("of", ["oracle", "norm", "target"])
def test_a_sampling_is_of_its_own_arrays(key, of):
    def sensitivity(weights, key):
        scaled = dict.fromkeys(("oracle", "norm", "target"), 1.0) | {of: weights.reshape(())}
        return dpjax.sample_sensitivity(
            key,
            lambda x: jnp.mean(x) * scaled["target"],
            lambda key, n: scaled["oracle"] * jax.random.uniform(key, (n,)),
            n=N,
            norm=lambda v: scaled["norm"] * jnp.abs(v),
            m=60,
            gamma=0.1,
        )

    weights = np.ones((1, 1), np.float32)
    first = sensitivity(weights, key)
    weights *= 0.01
    # With a key that is bound to a device, programs are compiled anew.
    again = sensitivity(np.ones((1, 1), np.float32), jax.device_put(key, jax.devices()[0]))
    assert again.identity == first.identity
    assert again.value == first.value


def test_a_norm_that_was_written_to_is_another_norm(key):
    """Noise in the new one, with a sensitivity in the old one, would be 1000 times too small."""
    weights = ones()
    norm = lambda moved: jnp.sum(jnp.abs(moved) * weights)  # noqa: E731
    oracle = oracles.independent(lambda key: jax.random.uniform(key, (N,)))
    target = lambda x: jnp.mean(x, axis=0)  # noqa: E731
    sampled = dpjax.sample_sensitivity(key, target, oracle, n=9, norm=norm, m=60, gamma=0.1)
    additive = functools.partial(mechanisms.additive, norm=norm, noise=dpjax.random.LAPLACE)
    assert additive(sampled, 1.0).scale == sampled.value
    gammas = functools.partial(dpjax.gamma_by_record, key, target, oracle, n=9, records=2, pairs=20)
    gammas(sensitivity=sampled)
    weights *= 1000
    with pytest.raises(ValueError, match="norm must be the norm in which"):
        additive(sampled, 1.0)
    with pytest.raises(ValueError, match="norm must be the norm in which"):
        gammas(sensitivity=sampled)


class Scaled:
    """An object that is no pytree."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, x):
        return jnp.mean(x * self.weights)


def of_a_module(weights):
    """A pytree of another library."""

    class Module(pytest.importorskip("equinox").Module):
        weights: object

        def __call__(self, x):
            return jnp.mean(x * self.weights)

    return Module(weights)


def of_a_global(weights):
    scope = {"jnp": jnp, "weights": weights}
    exec("def target(x): return jnp.mean(x * weights)", scope)
    return scope["target"]


def of_a_view(weights):
    view = weights[::2].reshape(2, -1)
    return lambda x: jnp.mean(x * view.reshape(-1)[0])


def of_a_memory_map(weights):
    mapped = np.ndarray.view(weights, np.memmap)
    return lambda x: jnp.mean(x * mapped)


WIDE = {
    **{name: TARGETS[name] for name in ("a closure", "a loop", "a branch", "a scalar")},
    "a default": lambda weights: lambda x, w=weights: jnp.mean(x * w),
    "a partial": lambda weights: functools.partial(lambda w, x: jnp.mean(x * w), weights),
    "a pytree": lambda weights: (lambda held: lambda x: jnp.mean(x * held["a"][0]))(
        {"a": [weights]}
    ),
    "a global": of_a_global,
    "an object": Scaled,
    "a module": of_a_module,
    "asarray": lambda weights: lambda x: jnp.mean(x * jnp.asarray(weights)),
    "asarray of a dtype": lambda weights: lambda x: jnp.mean(x * jnp.asarray(weights, jnp.float32)),
    "a view": of_a_view,
    "a memory map": of_a_memory_map,
    "a matrix product": lambda weights: lambda x: x @ weights.astype(weights.dtype, copy=False) / N,
    "a derivative": lambda weights: lambda x: jnp.mean(jax.grad(lambda x: jnp.sum(x * weights))(x)),
}


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_an_array_that_jax_converts_is_read_anew(name, dtype):
    """Without x64. The program before is kept: JAX would find the numbers that it holds.

    Whatever a function reaches gets here: what matters is who holds the converted array, not where
    the function found it.
    """
    weights = np.ones(N, dtype)
    function = WIDE[name](weights)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        before = Program.trace("target", function, RECORDS)
        weights *= 50
        after = Program.trace("target", function, RECORDS)
    assert (float(before(ONES)), float(after(ONES))) == (1, 50)
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize("of", ["oracle", "norm", "target"])
def test_a_sampling_is_of_the_numbers_of_now(key, of):
    """The sensitivity was the one from before the write, and noise 50 times too small."""
    weights = np.ones((), np.float64)
    scaled = dict.fromkeys(("oracle", "norm", "target"), np.float32(1)) | {of: weights}

    def sampled():
        return dpjax.sample_sensitivity(
            key,
            lambda x: jnp.mean(x) * jnp.asarray(scaled["target"]),
            lambda key, n: jnp.asarray(scaled["oracle"]) * jax.random.uniform(key, (n,)),
            n=N,
            norm=lambda v: jnp.asarray(scaled["norm"]) * jnp.abs(v),
            m=60,
            gamma=0.1,
        )

    before = sampled()
    weights[...] = 50
    after = sampled()
    assert after.value == pytest.approx(50 * before.value, rel=1e-4)
    assert after.identity != before.identity


def test_a_jit_of_the_caller_keeps_the_numbers_that_jax_gave_it():
    """As it does where the caller calls it; sampled and released is what it computes."""
    weights = np.ones(N, np.float64)
    weighted = jax.jit(lambda x: x * weights)
    target = lambda x: jnp.mean(weighted(x))  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        before = Program.trace("target", target, RECORDS)
        weights *= 50
        after = Program.trace("target", target, RECORDS)
        assert float(after(ONES)) == float(target(ONES)) == 1
    assert after.fingerprint == before.fingerprint


def test_an_array_may_be_deleted(key):
    """A later program of equal arrays does not need it."""

    def sensitivity(weights):
        target = dpjax.targets.summable(lambda x: x * weights, average=True)
        oracle = dpjax.oracles.independent(jax.random.uniform)
        return dpjax.sample_sensitivity(key, target, oracle, n=N, norm="l1", m=60, gamma=0.1).value

    weights = jnp.full((), 3.0)
    first = sensitivity(weights)
    weights.delete()
    assert sensitivity(jnp.full((), 3.0)) == first


def test_programs_without_arrays_are_left_as_they_are():
    program = Program.trace("target", lambda x: jnp.sum(jnp.tanh(x)), RECORDS)
    assert program.jaxpr is program.traced
