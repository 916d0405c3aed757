"""Keys: where they come from, and which are refused."""

import concurrent.futures
import copy
import pickle
import sqlite3
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.random import secure_key, seeded_key
from dpjax.random._keys import check_key, check_sampling_key, is_seeded

SEEDED = jax.random.key_impl(seeded_key(0))
LAPLACE = dpjax.laplace(1.0, 1.0)


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def is_one_typed_key(key):
    return key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_secure_keys_are_typed_and_distinct():
    made = [secure_key() for _ in range(100)]
    assert all(is_one_typed_key(key) for key in made)
    assert len({words(key) for key in made}) == 100
    # All 256 bits vary: each one is missing from 100 keys with probability 2^-99.
    bits = np.array([words(key) for key in made], "uint32").view("uint8")
    assert np.all(np.bitwise_or.reduce(bits) == 255)
    assert np.all(np.bitwise_and.reduce(bits) == 0)


def test_secure_key_ignores_the_seeds_of_python_and_numpy():
    import random

    def seeded():
        random.seed(0)
        np.random.seed(0)
        return words(secure_key())

    assert seeded() != seeded()


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1])
def test_seeded_key_is_that_of_jax_for_small_seeds(seed):
    made = jax.random.key(np.uint32(seed), impl=SEEDED)
    assert words(seeded_key(seed)) == words(made)
    assert made.dtype == seeded_key(seed).dtype


def test_seeded_key_uses_256_bits_of_the_seed():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**255, 2**256 - 1]
    assert len({words(seeded_key(seed)) for seed in seeds}) == len(seeds)
    assert words(seeded_key(7)) == words(seeded_key(np.uint64(7)))
    assert is_one_typed_key(seeded_key(2**256 - 1))


@pytest.mark.parametrize("seed", [-1, 2**256])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed must be .* got {seed}"):
        seeded_key(seed)


@pytest.mark.parametrize("seed", [0.0, "0", None, True, np.zeros(2, int)])
def test_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an integer"):
        seeded_key(seed)


@pytest.mark.parametrize("wrong", [0, None, "key", 1.5, np.zeros(2, "uint32")])
def test_what_is_no_key_is_refused(wrong):
    with pytest.raises(TypeError, match="key must be a typed JAX key"):
        check_key(wrong)


def test_legacy_raw_key_is_refused():
    with pytest.raises(TypeError, match="typed JAX key, got a raw uint32 array"):
        check_key(jax.random.PRNGKey(0))


def test_batch_of_keys_is_refused_but_vmap_is_not(key):
    with pytest.raises(ValueError, match=r"one key, got shape .* use jax.vmap"):
        check_key(jax.random.split(key, 3))
    jax.vmap(lambda one: jax.random.key_data(check_key(one)))(jax.random.split(key, 3))


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_other_implementations_release_nothing(implementation):
    key = jax.random.key(0, impl=implementation)
    message = f"of the chacha20 implementation to release anything, got {implementation}"
    with pytest.raises(TypeError, match=message):
        check_key(key)
    if implementation == "threefry2x32":
        assert check_sampling_key(key) is key
    else:
        with pytest.raises(TypeError, match=f"got {implementation}"):
            check_sampling_key(key)


def test_releases_check_their_key():
    mechanism = dpjax.laplace(1.0, 1.0)
    for wrong in (0, jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), jax.random.key(0)):
        with pytest.raises(TypeError, match="key must be"):
            mechanism(wrong, 0.0)
        with pytest.raises(TypeError, match="key must be"):
            dpjax.privatize(jnp.mean, mechanism)(wrong, np.zeros(3))


# Keys that came from a seed are known by their type.


def secure_twin(key):
    """The same bits as a key that claims to be secure."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=dpjax.random.CHACHA20)


DERIVATIONS = {
    "itself": lambda key: key,
    "split": lambda key: jax.random.split(key)[1],
    "fold_in": lambda key: jax.random.fold_in(key, 7),
    "clone": jax.random.clone,
    "jit": jax.jit(lambda key: jax.random.split(key, 3)[2]),
    "vmap": lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(2))[1],
    "loop": lambda key: jax.lax.fori_loop(0, 3, lambda i, k: jax.random.fold_in(k, i), key),
    "another device": lambda key: jax.device_put(key, jax.devices()[0]),
}


@pytest.mark.parametrize("name", DERIVATIONS)
def test_derived_keys_keep_their_kind_and_have_the_same_bits(name):
    derive = DERIVATIONS[name]
    seeded, twin = derive(seeded_key(5)), derive(secure_twin(seeded_key(5)))
    assert (is_seeded(seeded), is_seeded(twin)) == (True, False)
    assert words(seeded) == words(twin)
    assert check_key(seeded) is seeded
    assert check_sampling_key(twin) is twin


def test_a_release_under_a_seeded_key_says_so(key):
    twin = secure_twin(key)
    released, private = LAPLACE(key, 0.5), LAPLACE(twin, 0.5)
    assert released.value == private.value
    assert repr(released.guarantee) == "(epsilon=1, delta=0)-DP, under replace-one, seeded key"
    assert repr(private.guarantee) == "(epsilon=1, delta=0)-DP, under replace-one"
    jitted = jax.jit(lambda key: LAPLACE(key, 0.5))
    assert jax.tree.structure(jitted(key)) == jax.tree.structure(released)
    assert jax.tree.structure(jitted(twin)) == jax.tree.structure(private)
    in_floats = dpjax.laplace(1.0, 1.0, noise="float")(key, 0.5).guarantee
    assert in_floats.notes == ("not private: noise in floats", "seeded key")


def test_the_note_survives_accounting(key):
    seeded, secure = (jax.eval_shape(LAPLACE, k, 0.5).guarantee for k in (key, secure_key()))
    account = dpjax.accounting
    one, other = (
        dpjax.Guarantee(1.0, gamma=0.1, confidence=0.9, notes=g.notes) for g in (seeded, secure)
    )
    assert other.notes == ()
    for made in (
        account.compose(other, one, one),
        account.group(one, 2),
        account.under_distribution_shift(one, kl=0.1, n=9),
    ):
        assert made.notes == ("seeded key",)


@pytest.mark.parametrize("of_seed", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: lambda seed: jax.vmap(f)(jnp.full(2, seed, "uint32"))],
    ids=["eager", "jit", "vmap"],
)
def test_the_secure_implementation_takes_no_seed(of_seed, wrap):
    def seeded(seed):
        return of_seed(seed, impl=dpjax.random.CHACHA20)

    with pytest.raises(
        ValueError, match=r"accepts no seed.*secure_key\(\), or .*seeded_key\(seed\)"
    ):
        wrap(seeded)(np.uint32(7))


def test_samples_do_not_depend_on_the_kind_of_the_key(key):
    def oracle(key, n):
        return jax.random.uniform(key, (n,))

    def sample(key):
        return dpjax.sample_distances(key, jnp.max, oracle, n=3, norm="l1", m=10)

    np.testing.assert_array_equal(sample(key), sample(secure_twin(key)))


@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        (dpjax.random.secure_key(), r"wrap_key_data\(data, impl=dpjax\.random\.CHACHA20\)"),
        (dpjax.random.seeded_key(0), r"seeded_key\(seed\)"),
    ],
    ids=["secure", "seeded"],
)
def test_a_key_is_not_pickled_and_says_what_to_do(key, remedy, module):
    """Whatever holds a key: several keys, a tree, a closure, the state of a training, an executor.

    Pickle could not find a function of the implementation. cloudpickle copied the implementation,
    and releases refused the copy. Copies within the process are keys still.
    """
    dumps = pytest.importorskip(module).dumps
    noise = dpjax.learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=1)
    holders = [key, jax.random.split(key), {"key": (key,)}, noise.init(jnp.zeros(2))]
    if module == "cloudpickle":
        holders.append(lambda: key)
    for holder in holders:
        with pytest.raises(TypeError, match=f"a key cannot be pickled.*{remedy}"):
            dumps(holder)
    copied = copy.deepcopy({"key": key})
    assert jax.random.key_impl(copied["key"]) == jax.random.key_impl(key)
    assert LAPLACE(copied["key"], 0.0).value == LAPLACE(key, 0.0).value
    release = LAPLACE(key, 0.0)
    assert pickle.loads(dumps(release)).guarantee == release.guarantee


# The ledger of keys.


@pytest.mark.parametrize("where", ["memory", "file"])
def test_ledger_refuses_a_key_that_was_used(where, tmp_path, keys):
    path = None if where == "memory" else tmp_path / "keys.db"
    ledger = dpjax.random.KeyLedger(path)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.0), ledger=ledger)
    private(keys(0), np.zeros(3))
    with pytest.raises(ValueError, match="was used for a release before"):
        private(keys(0), np.ones(3))
    private(keys(1), np.zeros(3))
    assert len(ledger) == 2
    assert keys(0) in ledger
    assert keys(2) not in ledger
    if path is not None:
        # Another process, later, knows them too, and finds nothing of the key in the file.
        with pytest.raises(ValueError, match="was used"):
            dpjax.random.KeyLedger(path).claim(keys(1))
        secret = dpjax.random.secure_key()
        dpjax.random.KeyLedger(path).claim(secret)
        data = np.asarray(jax.random.key_data(secret)).tobytes()
        assert not any(data[i : i + 4] in path.read_bytes() for i in range(0, 32, 4))


def test_a_refused_database_uses_no_key(keys):
    ledger = dpjax.random.KeyLedger()
    sensitivity = dpjax.assume_sensitivity(1.0, norm="l1", n=3)
    private = dpjax.privatize(jnp.mean, dpjax.laplace(sensitivity, 1.0), ledger=ledger)
    with pytest.raises(ValueError, match="n=3"):
        private(keys(0), np.zeros(4))
    assert len(ledger) == 0


MECHANISMS = {
    "laplace": (LAPLACE, jnp.zeros(2)),
    "gaussian": (dpjax.gaussian(1.0, 1.0, 1e-5), jnp.zeros(2)),
    "exponential": (dpjax.exponential(1.0, 1.0), jnp.zeros(2)),
    "permute and flip": (dpjax.permute_and_flip(1.0, 1.0), jnp.zeros(2)),
    "bernstein": (dpjax.bernstein(1.0, 1.0, degree=1, dims=1), jnp.zeros(2)),
    "randomized response": (dpjax.randomized_response(1.0), jnp.zeros(2, int)),
    "floats": (dpjax.laplace(1.0, 1.0, noise="float"), jnp.zeros(2)),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_open_ledger_covers_every_mechanism(name, keys):
    mechanism, value = MECHANISMS[name]
    ledger = dpjax.random.KeyLedger()
    ledger.claim(keys(0))
    with ledger, pytest.raises(ValueError, match="was used for a release before"):
        mechanism(keys(0), value)
    assert len(ledger) == 1


def test_an_open_ledger_claims_each_release_once(keys):
    ledger, other = dpjax.random.KeyLedger(), dpjax.random.KeyLedger()
    private = dpjax.privatize(jnp.mean, LAPLACE, ledger=ledger)
    with ledger as opened, other, ledger:
        assert opened is ledger
        LAPLACE(keys(0), 0.0)
        private(keys(1), np.zeros(3))
        dpjax.privatize(jnp.mean, LAPLACE)(secure_key(), np.zeros(3))
        assert len(ledger) == len(other) == 3
        with pytest.raises(ValueError, match="was used"):
            private(keys(0), np.zeros(3))
    with pytest.raises(RuntimeError, match="stop"), ledger:
        raise RuntimeError("stop")
    LAPLACE(keys(0), 0.0)  # Closed, also after an error.
    assert len(ledger) == 3
    with pytest.raises(ValueError, match="was used"):
        private(keys(1), np.zeros(3))


def test_threads_open_one_ledger_at_a_time_of_their_own(keys):
    """Blocks of `with` overlap in any order, and each thread leaves its own."""
    ledger, inside, refused = dpjax.random.KeyLedger(), threading.Barrier(2), []
    ledger.claim(keys(0))

    def first():
        with ledger:
            inside.wait(60)
            inside.wait(60)

    def second():
        inside.wait(60)
        with ledger:
            inside.wait(60)
            one.result(60)
            with pytest.raises(ValueError, match="was used for a release before"):
                LAPLACE(keys(0), jnp.zeros(()))
            refused.append(1)
        LAPLACE(keys(0), jnp.zeros(()))

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        one = threads.submit(first)
        two = threads.submit(second)
        one.result(60), two.result(60)
    assert refused == [1]


def test_a_ledger_of_keys_closes_its_file():
    ledger = dpjax.random.KeyLedger()
    connection = ledger._connection
    del ledger
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_an_open_ledger_compiles_no_release_again(keys, compilations):
    private = dpjax.privatize(jnp.mean, LAPLACE)
    first, second, value = keys(0), keys(1), jnp.zeros(37)  # A size that no other test compiles.
    private(first, value)
    with dpjax.random.KeyLedger() as ledger:
        private(keys(2), jnp.zeros(41))  # The ledger's own checks of what is traced.
        assert not compilations(lambda: private(second, value).value)
    assert len(ledger) == 2


def test_an_open_ledger_refuses_what_may_use_one_key_often(keys):
    compiled = jax.jit(lambda key: LAPLACE(key, 0.0).value)
    before = compiled(keys(0))
    ledger = dpjax.random.KeyLedger()
    with ledger:
        for release in (
            compiled,  # Compiled while no ledger was open.
            jax.jit(lambda _: LAPLACE(keys(1), 0.0).value),
            lambda key: jax.vmap(lambda k: LAPLACE(k, 0.0).value)(jax.random.split(key)),
            lambda key: jax.vmap(lambda e: dpjax.laplace(1.0, e)(key, 0.0).value)(jnp.ones(2)),
            lambda key: jax.lax.map(lambda x: LAPLACE(key, x).value, jnp.zeros(2)),
            lambda key: jax.jit(dpjax.privatize(jnp.mean, LAPLACE))(key, jnp.zeros(2)),
        ):
            with pytest.raises(TypeError, match=r"records keys on the host.*debug_key_reuse"):
                release(keys(0))
    assert len(ledger) == 0
    assert compiled(keys(0)) == before


def test_ledger_needs_a_key_that_is_known(keys):
    ledger = dpjax.random.KeyLedger()
    private = dpjax.privatize(jnp.mean, dpjax.laplace(1.0, 1.0), ledger=ledger)
    with pytest.raises(TypeError, match="debug_key_reuse"):
        jax.jit(private)(keys(0), jnp.zeros(3))
