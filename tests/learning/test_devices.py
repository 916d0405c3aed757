"""Training on many devices: what one device computes, and refusals of what cannot be right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpjax
from dpjax import learning

SETUP = """
import re
import jax, jax.numpy as jnp, numpy as np, dpjax, optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dpjax import learning
auto, explicit = AxisType.Auto, AxisType.Explicit
MESHES = [
    jax.make_mesh((4,), ("a",), devices=jax.devices()[:4], axis_types=(auto,)),
    jax.make_mesh((8,), ("a",), axis_types=(explicit,)),
    jax.make_mesh((2, 4), ("a", "b"), axis_types=(explicit, auto)),
]
def put(mesh, tree, *spec):
    return jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, P(*spec))), tree)
def loss(w, x):
    return jnp.dot(w["a"], x) + jnp.sum(w["b"]) * x[0]
w = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
def batch_of(mask):
    return learning.Batch(jnp.arange(len(mask)), jnp.asarray(mask), len(mask))
"""


STEP = """
key = dpjax.random.seeded_key(0)
# Multiples of 2^-12 within the clip norm: all sums are exact.
x = jnp.asarray(np.random.default_rng(0).integers(-999, 999, (64, 3)) / 4096, jnp.float32)
mask = batch_of(jnp.arange(64) % 5 != 2)
def check(meshes, noise, *, microbatch_size, jit=True):
    clipped = learning.clipped_gradients(loss, clip_norm=1.0, microbatch_size=microbatch_size)
    def step(w, x, mask, state):
        batch = clipped(w, x, mask)
        return noise.update(batch, state), (batch.value, batch.norm_bound, batch.within)
    def numbers(given):
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves = jax.tree.leaves(given)
        return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]
    state = noise.init(w)
    expected = numbers(jax.jit(step)(w, x, mask, state))
    for mesh in meshes:
        axes = (mesh.axis_names,)
        alike, spread = put(mesh, (w, state)), put(mesh, (x, mask), *axes)
        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(*axes), P(*axes), P()), out_specs=P())
        for form in (sharded, step) if jit else (sharded,):
            found = jax.jit(form)(alike[0], *spread, alike[1])
            for one, other in zip(numbers(found), expected, strict=True):
                np.testing.assert_array_equal(one, other)
gaussian = learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=16)
adaptive = learning.adaptive_noise(
    key, noise_multiplier=1.0, batch_size=16, initial_clip_norm=1.0, quantile=.6)
"""


# What fast tests run, in one process.
PROGRAMS = {
    "step": SETUP + STEP + "check(MESHES[1:2], gaussian, microbatch_size=256)",
    "records": SETUP
    + """
def formed(w, x):
    return jnp.sum(jnp.tanh(x * w["in"] @ w["in"]) + x @ w["in"] * w["bias"])
def dense(w, x):
    return jnp.sum((jax.nn.relu(x @ w["in"] + 2) - x[0]) * w["bias"])
def rows(w, x):
    return jnp.sum((w["in"][jnp.int32(x[1] > 0)] * x[0] + w["bias"]) ** 2)
def loop(w, x):
    return lax.scan(lambda c, y: (c + jnp.sum(y * w["in"]) * w["bias"][0], None), 0.0, x)[0] ** 2
w = {"in": jnp.eye(3), "bias": jnp.ones(3)}
x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32) / 100
for shards, losses in ((4, (formed, rows)), (8, (dense, loop))):
    mesh = jax.make_mesh((shards,), ("i",), devices=jax.devices()[:shards], axis_types=(auto,))
    for loss in losses:
        clipped = learning.clipped_gradients(loss, clip_norm=1.0, microbatch_size=2)
        @jax.jit
        def parts(x, mask):
            def of_a_batch(w, x, mask):
                batch = clipped(w, x, mask)
                return batch.value, batch.norm_bound, batch.within
            specs = P(), P("i"), P("i")
            on_shards = jax.shard_map(of_a_batch, mesh=mesh, in_specs=specs, out_specs=P())
            return on_shards(w, x, batch_of(mask))
        vector = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        everyone = np.ones(16, bool)
        _, bound, _ = parts(x, everyone)
        for slot in range(16):
            large, without = x.copy(), everyone.copy()
            large[slot], without[slot] = -1e4, False
            alone, _, counted = parts(large, ~without)
            whole, _, _ = parts(large, everyone)
            absent, _, _ = parts(large, without)
            other, _, _ = parts(x, without)
            np.testing.assert_array_equal(vector(absent), vector(other))
            moved = np.linalg.norm(vector(whole) - vector(absent))
            assert 0.99 < moved <= bound < 1.01, (shards, loss, slot, moved)
            assert counted == -1
        whole, one = vector(parts(x, everyone)[0]), vector(clipped(w, x, True).value)
        np.testing.assert_allclose(whole, one, atol=1e-6)
        norms = jax.jit(jax.shard_map(
            clipped.norms, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i")))(w, x)
        np.testing.assert_allclose(norms, clipped.norms(w, x), rtol=1e-5)
""",
    "microbatches": SETUP
    + """
w = {"a": jnp.zeros(64), "b": jnp.zeros(2)}
clipped = learning.clipped_gradients(loss, clip_norm=1.0, microbatch_size=64)
step = jax.jit(lambda w, x: clipped(w, x, True).value)
given = put(MESHES[0], w), put(MESHES[0], jnp.ones((512, 64)), "a")
text = step.lower(*given).compile().as_text()
moved = set(re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce)[.(-]", text))
assert moved == {"all-reduce"}, moved
""",
    "keys": SETUP
    + """
from dpjax.random._keys import key_for_each
mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(auto, auto))
both = ("a", "b")
words = lambda key: [int(x) for x in np.asarray(key).reshape(-1, 8)[:, 0]]
drawn_from = lambda key, x: jax.random.key_data(key_for_each(key, x))[None]
def on(function, *specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(both)))
key, x = dpjax.random.seeded_key(1), jnp.zeros(4)
pcast = on(lambda key, x: drawn_from(lax.pcast(key, both, to="varying"), x), P(), P(both))
found = words(pcast(key, x))
assert len(set(found)) == 4 and found[:1] == words(jax.random.key_data(key))
own = on(lambda keys, x: drawn_from(keys[0], x), P(both), P(both))
keys = jax.random.split(dpjax.random.seeded_key(2), 3)
found = words(own(keys[jnp.array([0, 1, 0, 2])], x))
assert len(set(found)) == 4
assert [found[i] for i in (0, 1, 3)] == words(jax.random.key_data(keys))
""",
}


@pytest.fixture(scope="module")
def failures(failures_of):
    return failures_of(PROGRAMS, devices=8)


def test_a_step_on_many_devices_is_that_on_one(failures):
    """Bit for bit, for the sums are exact: in `jit` and in `shard_map`.

    One draw of noise, one sum, one bound.
    """
    assert not failures.get("step"), failures["step"]


@pytest.mark.slow
def test_a_step_on_any_mesh_is_that_on_one_device(run_python):
    """Also adaptive ones, on two axes of devices, and in microbatches smaller than a shard.

    The noise does not know how the sum was cut, so each size meets one noise.
    """
    run_python(
        SETUP
        + STEP
        + """
for size, noise in ((4, adaptive), (256, gaussian)):
    check(MESHES, noise, microbatch_size=size)
""",
        devices=8,
    )


def test_records_move_sums_no_further_on_any_shard(failures):
    """Neighbors in every slot of 4 and 8 shards, for layers of every kind.

    Inside of `shard_map`, JAX adds up gradients of what all shards share before they are clipped:
    what is in the same slot of other shards would go into each. So would an empty slot. One
    record is far beyond the clip norm, and the others below it, of another sign.
    """
    assert not failures.get("records"), failures["records"]


def test_microbatches_of_a_sharded_batch_stay_on_their_devices(failures):
    """Each device takes its part of every microbatch, and only sums travel."""
    assert not failures.get("microbatches"), failures["microbatches"]


@pytest.mark.slow
def test_a_training_on_many_devices_is_that_on_one(run_python):
    """Poisson batches over all shards, as docs/how-to/dp-sgd.md does it; to rounding."""
    run_python(
        SETUP
        + """
key_noise, key_batches = jax.random.split(dpjax.random.seeded_key(5))
n, shards = 400, 8
data = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
drawn = learning.poisson_sampling(n, batch_size=50)
sampling = learning.poisson_sampling(
    n, batch_size=50, capacity=shards * -(-drawn.capacity // shards))
def loss(w, x):
    return jnp.square(jnp.dot(w["a"], x) + jnp.sum(w["b"]) - x[0])
clipped = learning.clipped_gradients(loss, clip_norm=1.0, microbatch_size=16)
noise = learning.gaussian_noise(key_noise, noise_multiplier=1.0, batch_size=50)
def update(w, state, records, batch):
    updates, state = noise.update(clipped(w, records, batch), state)
    return jax.tree.map(lambda x, y: x - 0.1 * y, w, updates), state
def trained(update, data):
    @jax.jit
    def step(w, state, key, data):
        batch = sampling(key)
        return update(w, state, jnp.take(data, batch.indices, axis=0), batch)
    same = learning.gaussian_noise(key_noise, noise_multiplier=1.0, batch_size=50)
    now, state = w, same.init(w)  # The second training of one optimizer has other noise.
    for i in range(5):
        now, state = step(now, state, jax.random.fold_in(key_batches, i), data)
    return now, learning.guarantee(state, sampling, delta=1e-5, method="renyi").epsilon
alone, promised = trained(update, data)
mesh = jax.make_mesh((shards,), ("i",), axis_types=(auto,))
with jax.set_mesh(mesh):
    split = jax.shard_map(update, in_specs=(P(), P(), P("i"), P("i")), out_specs=P())
    for found, epsilon in (trained(split, data), trained(update, put(mesh, data, "i"))):
        assert epsilon == promised
        for leaf in w:
            np.testing.assert_allclose(found[leaf], alone[leaf], rtol=1e-5, atol=1e-6)
""",
        devices=8,
    )


def test_shards_whose_keys_are_copies_draw_other_noise(failures):
    """Of any mechanism: `pcast` makes a key vary in type alone; or an array of keys has one twice.

    A key that no other shard has draws what it draws alone, and so does the first of its copies.
    """
    assert not failures.get("keys"), failures["keys"]


# Refusals: one device is enough, for JAX keeps account of the axes all the same.


def linear(w, x):
    return jnp.dot(w, x)


CLIPPED = learning.clipped_gradients(linear, clip_norm=1.0)
W, X, BATCH = jnp.zeros(2), jnp.ones((4, 2)), learning.Batch(jnp.arange(4), jnp.ones(4, bool), 4)
ALIKE, SPREAD = PartitionSpec(), PartitionSpec("shards")


def sharded(function, specs, given, **options):
    mesh = jax.make_mesh((1,), ("shards",), axis_types=(AxisType.Auto,))
    given = jax.device_put(given, NamedSharding(mesh, ALIKE))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ALIKE, **options)(*given)


def apart(tree):
    return jax.tree.map(lambda x: lax.pcast(x, "shards", to="varying"), tree)


@pytest.fixture
def noise(key):
    return learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=4)


def test_one_sum_gets_one_draw(noise):
    """A key that differs would release one sum under several draws, whose mean has less noise."""

    def step(w, x, batch, state):
        varying = dataclasses.replace(state, key=apart(state.key))
        return noise.update(CLIPPED(w, x, batch), varying)[0]

    with pytest.raises(ValueError, match="key must be the same on all shards"):
        sharded(step, (ALIKE, SPREAD, SPREAD, ALIKE), (W, X, BATCH, noise.init(W)))


def test_noise_multipliers_are_the_same_on_all_shards(key):
    def step(key, w, x, batch, multiplier):
        noise = learning.gaussian_noise(key, noise_multiplier=apart(multiplier), batch_size=4)
        return noise.update(CLIPPED(w, x, batch), noise.init(w))[0]

    specs = ALIKE, ALIKE, SPREAD, SPREAD, ALIKE
    with pytest.raises(ValueError, match="noise_multiplier must be the same on all shards"):
        sharded(step, specs, (key, W, X, BATCH, jnp.float32(1)))


@pytest.mark.parametrize(
    ("function", "specs", "message"),
    [
        (lambda w, x, m: CLIPPED(apart(w), x, m), (ALIKE, SPREAD, SPREAD), "parameters and clip"),
        (
            lambda w, x, m: CLIPPED(w, x, m, clip_norm=jnp.max(x)),
            (ALIKE, SPREAD, SPREAD),
            "parameters and clip_norm must be the same on all shards",
        ),
        (CLIPPED, (ALIKE, ALIKE, SPREAD), "examples must all be sharded over"),
        (
            lambda w, x, m: learning.clipped_gradients(lambda w, e: linear(w, e[0]), clip_norm=1.0)(
                w, (x, jnp.ones(4)), m
            ),
            (ALIKE, SPREAD, SPREAD),
            "examples must all be sharded over",
        ),
        (
            lambda w, x, m: learning.clipped_gradients(
                lambda w, e: lax.psum(linear(w, e), "shards"), clip_norm=1.0
            )(w, x, m),
            (ALIKE, SPREAD, SPREAD),
            "loss must be a pure function",
        ),
        (
            lambda w, x, m: learning.clipped_gradients(
                lambda w, e: linear(w, e - x[0]), clip_norm=1.0
            )(w, x, m),
            (ALIKE, SPREAD, SPREAD),
            "loss must be a pure function",
        ),
    ],
    ids=["parameters", "clip_norm", "mask alone", "an example", "collective", "closure"],
)
def test_clipped_sums_that_cannot_be_right_are_refused(function, specs, message):
    with pytest.raises(ValueError, match=message):
        sharded(lambda *given: function(*given).value, specs, (W, X, BATCH))


def test_no_record_is_on_two_shards(run_python):
    """Gathered, or copied by `pcast`, a record counts once on every shard, for one norm bound.

    JAX says that such examples vary. But slots of all shards together are more than the batch has,
    with the batch gathered too or not. What else reaches it: `psum_scatter` of copies, and `True`
    or a mask in place of the batch, which say nothing of the slots: all of them are refused.
    """
    run_python(
        SETUP
        + """
mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(auto,))
clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
w, x, batch = jnp.zeros(3), jnp.ones((8, 3)), batch_of(np.ones(8, bool))
gathered = lambda tree: jax.tree.map(lambda x: lax.all_gather(x, "i", tiled=True), tree)
copied = lambda tree: jax.tree.map(lambda x: lax.pcast(x, "i", to="varying"), tree)
mask = lambda batch: batch._mask
for function, spec in (
    (lambda x, b: (gathered(x), gathered(b)), P("i")),
    (lambda x, b: (gathered(x), b), P("i")),
    (lambda x, b: (gathered(x), True), P("i")),
    (lambda x, b: (gathered(x), gathered(mask(b))), P("i")),
    (lambda x, b: (copied(x), copied(b)), P()),
    (lambda x, b: (copied(x), b), P()),
    (lambda x, b: (copied(x), True), P()),
    (lambda x, b: (x, True), P("i")),
    (lambda x, b: (x, mask(b)), P("i")),
):
    def total(w, x, batch):
        return clipped(w, *function(x, batch)).value
    for form in (lambda f: f, jax.jit):
        on_shards = form(jax.shard_map(total, mesh=mesh, in_specs=(P(), spec, spec), out_specs=P()))
        try:
            on_shards(w, x, batch)
        except ValueError as error:
            assert "slots of the batch once" in str(error) or "sampling(key)" in str(error), error
        else:
            raise AssertionError(function)
""",
        devices=8,
    )


def test_batches_may_be_the_same_on_all_shards():
    everyone = CLIPPED(W, X, True).value
    alike = sharded(lambda w, x, m: CLIPPED(w, x, m).value, (ALIKE, SPREAD, ALIKE), (W, X, BATCH))
    np.testing.assert_array_equal(everyone, alike)


UNCHECKED = {
    "shard_map": lambda function: sharded(lambda x: function(x), (SPREAD,), (X,), check_vma=False),
    "pmap": lambda function: jax.pmap(function)(X[None]),
    "jit in pmap": lambda function: jax.pmap(jax.jit(function), axis_name="i")(X[None]),
}


@pytest.mark.parametrize("where", UNCHECKED)
def test_where_jax_does_not_check_nothing_is_released(where, noise):
    """No clipped sum, no norms, no step, and no release of any mechanism."""
    state, whole = noise.init(W), CLIPPED(W, X, True)
    leaves, form = jax.tree.flatten(state)
    key = dpjax.random.seeded_key(0)
    for function in (
        lambda x: CLIPPED(W, x, True).value,
        lambda x: CLIPPED.norms(W, x),
        lambda x: noise.update(whole, jax.tree.unflatten(form, leaves))[0],
        lambda x: dpjax.laplace(1.0, 1.0)(key, x[0]).value,
    ):
        with pytest.raises(ValueError, match=r"use jax\.shard_map with check_vma=True"):
            UNCHECKED[where](function)


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
@pytest.mark.parametrize("change", [lambda key: key, apart], ids=["replicated", "pcast"])
def test_one_batch_is_drawn_for_all_shards(kind, change, key):
    """Drawn on each, under one key, the local batches would be the same places of all shards.

    Who is in a batch would say who else is: the accounting needs records that join independently.
    """
    draw = {
        "poisson": learning.poisson_sampling(4, batch_size=2),
        "fixed": learning.fixed_size_sampling(4, batch_size=2),
    }[kind]
    with pytest.raises(ValueError, match=r"sampling\(key\) must be outside of jax.shard_map"):
        sharded(
            lambda key, x: CLIPPED(W, x[draw(change(key)).indices], True).value,
            (ALIKE, SPREAD),
            (key, X),
        )
    with pytest.raises(ValueError, match=r"sampling\(key\) must be outside of jax.shard_map"):
        jax.pmap(lambda x: x[draw(key).indices])(X[None])
