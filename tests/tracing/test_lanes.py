"""Lanes of a `vmap` do not touch: what breaks it is refused wherever a record is a lane.

Records are lanes in a loss, a predicate, an independent oracle and the statistic of a sum, and
databases in a target, an oracle and a norm. What else was tried, and keeps lanes apart, is in
SEPARATE.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning

import dpjax
from dpjax import learning, oracles, queries, targets
from dpjax._tracing._evaluate import vmapped
from dpjax._tracing._lanes import check_lanes, refuse_touching, touching
from dpjax._tracing._programs import Program
from dpjax.sensitivity import _probes
from dpjax.sensitivity._pairs import RandomPair


def words_of(x, count):
    """Words of a key that depend on a record."""
    return jnp.stack([(x * 1000).astype(jnp.uint32)] * count)


def drawn_by(implementation, count):
    """Draws with a key of this implementation that a record makes."""

    def function(x):
        key = jax.random.wrap_key_data(words_of(x, count), impl=implementation)
        return x + jax.random.uniform(key)

    return function


def raw_bits(x):
    _, bits = lax.rng_bit_generator(words_of(x, 4), (), jnp.uint32)
    return x + bits.astype(jnp.float32)


def carried(x):
    """The key depends on the record from the second step of a loop on."""
    start = jax.random.key_data(jax.random.key(0, impl="rbg"))

    def step(words, _):
        drawn = jax.random.uniform(jax.random.wrap_key_data(words, impl="rbg"))
        return words + words_of(x, 4), drawn

    return x + jnp.sum(lax.scan(step, start, length=2)[1])


def cumulative_by(module):
    """A rule for `vmap` that looks at other lanes, of this module."""

    def rule(axis_size, in_batched, x):
        return jnp.cumsum(x), True

    function = jax.custom_batching.custom_vmap(lambda x: x)
    rule.__module__ = module
    function.def_vmap(rule)
    return function


# Rules of dpjax are run. Those of users are left out, see `test_rules_for_vmap.py`.
cumulative = cumulative_by("dpjax")


def in_jit_and_loop(x):
    return lax.fori_loop(0, 2, lambda _, y: jax.jit(cumulative)(y), x)


def kernel(x):
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    return pallas.pallas_call(double, out_shape=shape, interpret=True)(x[None])[0]


@custom_partitioning
def partitioned(x):
    return x


partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="->"
)


DRAWN = {name: drawn_by(name, 4) for name in ("rbg", "unsafe_rbg")}
MIXING = {**DRAWN, "raw bits": raw_bits, "a carried key": carried, "a rule": cumulative}
TOUCHING = {**MIXING, "jit and loop": in_jit_and_loop, "kernel": kernel, "partitioned": partitioned}


def separate_program(function):
    return jax.make_jaxpr(function)(jnp.float32(1))


@pytest.mark.parametrize("name", TOUCHING)
def test_what_lets_lanes_touch_is_known(name):
    program = separate_program(TOUCHING[name])
    for _ in range(2):  # What was found to keep lanes apart is remembered.
        with pytest.raises(ValueError, match=r"it must not .* could depend on other examples"):
            refuse_touching("it", program)


@pytest.mark.parametrize("name", MIXING)
def test_it_lets_them_touch(name):
    """One record changes what another one gives, as long as JAX is what it is."""
    batch = jnp.array([0.1, 0.2, 0.3])
    one, other = (jax.vmap(MIXING[name])(b) for b in (batch, batch.at[0].set(0.7)))
    assert np.any(np.asarray(one)[1:] != np.asarray(other)[1:])


def test_what_looks_across_a_named_axis_is_known():
    """Also in the middle of another transformation; an axis that is bound inside is harmless."""
    found = []

    def one(x):
        for function in (
            lambda y: lax.psum(y, "lanes"),
            lambda y: y * jnp.float32(lax.axis_index("lanes")),
            jax.jit(lambda y: lax.all_gather(y, "lanes").sum()),
        ):
            found.append(touching(separate_program(function)))
        inside = jax.vmap(lambda y: lax.psum(y, "own"), axis_name="own")
        found.append(touching(separate_program(lambda y: inside(y[None])[0])))
        return x

    jax.vmap(one, axis_name="lanes")(jnp.ones(2))
    assert found == ["look across a named axis, 'lanes'"] * 3 + [None]


def until_small(x):
    return lax.while_loop(
        lambda y: jnp.abs(y) > 0.1, lambda y: y / 2, jnp.where(jnp.abs(x) < 9, x, 0)
    )


SEPARATE = {
    "threefry": drawn_by("threefry2x32", 2),
    "philox": drawn_by("philox4x32", 2),
    "chacha20": drawn_by(jax.random.key_impl(dpjax.random.seeded_key(0)), 8),
    "gamma": lambda x: jax.random.gamma(
        jax.random.wrap_key_data(words_of(x, 2)), jnp.abs(x) + 1, ()
    ),
    "a loop that ends when it ends": until_small,
    "a branch": lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
    "a place out of range": lambda x: jnp.sum(
        jnp.arange(4.0).at[(x * 10).astype(jnp.int32)].set(x, mode="promise_in_bounds")
    ),
    "a place to read from": lambda x: (
        jnp.arange(4.0).at[(x * 10).astype(jnp.int32)].get(mode="promise_in_bounds")
    ),
    "a slice": lambda x: jnp.sum(
        lax.dynamic_slice(jnp.arange(9.0), [(x * 9).astype(jnp.int32)], [3])
    ),
    "a matrix": lambda x: jnp.linalg.slogdet(jnp.eye(3) + x * jnp.ones((3, 3)))[1],
    "eigenvalues": lambda x: jnp.sum(jnp.linalg.eigvalsh(x * jnp.ones((3, 3)))),
    "a convolution": lambda x: jnp.sum(jnp.convolve(x * jnp.arange(3.0), x + jnp.arange(5.0))),
    "a transform": lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(x * jnp.arange(4.0)))),
    "the largest": lambda x: lax.top_k(x * jnp.arange(5.0), 2)[0][1],
    "groups": lambda x: jnp.sum(
        lax.ragged_dot(
            x * jnp.ones((4, 2)),
            x * jnp.ones((2, 2, 3)),
            (x * 10).astype(jnp.int32) * jnp.array([1, -1]) + jnp.array([0, 4]),
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_lanes_of_everything_else_do_not_touch(name):
    """To the last bit, whatever another lane holds."""
    function = jax.jit(jax.vmap(SEPARATE[name]))
    batch = jnp.array([0.1, 0.2, 0.3, -0.2])
    expected = np.asarray(function(batch))
    assert touching(separate_program(SEPARATE[name])) is None
    for strange in (0.7, -5.0, 1e30, np.nan, np.inf, -np.inf):
        found = np.asarray(function(batch.at[1].set(strange)))
        np.testing.assert_array_equal(np.delete(found, 1), np.delete(expected, 1))


CONVOLUTIONS = {
    "grouped": {"feature_group_count": 2, "padding": "SAME"},
    "transposed": {"lhs_dilation": (2, 2), "padding": [(1, 1)] * 2},
    "plain": {"padding": "SAME"},
}


def independent_records(convolved, images):
    """Every record looks up its own image: records of one key have numbers of their own."""

    key = jax.random.key(0)
    keys = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(4)))

    def record(key):
        mine = jnp.all(keys == jax.random.key_data(key)[None], axis=1)
        return convolved(images[jnp.argmax(mine)])

    return oracles.independent(record)(key, 4)


SEPARATED = {
    "vmapped": vmapped,
    "checked": lambda f, images: jax.vmap(check_lanes("it", f, images)[0])(images),
    "program": lambda f, images: jax.vmap(Program.trace("it", f, images[0]))(images),
    "statistic": lambda f, images: targets.summable(
        lambda x: jnp.nan_to_num(f(x), posinf=0, neginf=0)
    )(images)[None],
    "record": independent_records,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("place", SEPARATED)
def test_no_lane_of_a_convolution_makes_another_nan(place, settings, dtype):
    """XLA fills the kernels of groups up with zeros, and zero times infinity is NaN.

    A statistic that takes NaN for 0 then lost all records by one that overflows. What else reaches
    it: losses, which are in tests/learning, and lanes of lanes, as records in sampled pairs.
    """
    groups = settings.get("feature_group_count", 1)

    def convolved(x):
        kernel = jnp.broadcast_to(x[0, : 2 // groups, :3, :3], (4, 2 // groups, 3, 3))
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, kernel, (1, 1), **settings)))

    with jax.enable_x64(dtype == "float64"):
        images = jax.random.normal(jax.random.key(0), (4, 1, 2, 5, 5), dtype)
        alone = np.array([convolved(image) for image in images])
        alone[2] = np.nan
        found = SEPARATED[place](convolved, images.at[2].set(jnp.inf))
        expected = np.nansum(alone, keepdims=True) if place == "statistic" else alone
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        if place in ("statistic", "vmapped"):  # Lanes of lanes, as the sampler runs them.
            both = jnp.stack([images, images.at[2].set(jnp.inf)])
            program = Program.trace("it", lambda x: SEPARATED[place](convolved, x), images)
            assert touching(program.jaxpr) is None
            np.testing.assert_allclose(jax.vmap(program)(both)[1], expected, rtol=1e-4)
            assert program == Program.trace("it", lambda x: SEPARATED[place](convolved, x), images)


# Where it is refused.


def of_loss(function):
    learning.clipped_gradients(lambda w, x: w * function(x), clip_norm=1.0)(
        jnp.float32(1), jnp.ones(3), True
    )


def of_predicate(function):
    queries.counting_query(lambda x: function(x) > 0.5)(jnp.ones(3))


def of_independent_records(function):
    oracle = oracles.independent(lambda key: function(jax.random.uniform(key)))
    oracle(jax.random.key(0), 3)


def sample(target=jnp.sum, oracle=lambda key, n: jax.random.uniform(key, (n,)), norm="l1"):
    return RandomPair.trace(
        jax.random.key(0), target, oracle, n=4, norm=norm, positions="last"
    )  # fmt: skip


def of_oracle(function):
    sample(oracle=lambda key, n: jnp.ones(n) * function(jax.random.uniform(key)))


def of_norm(function):
    sample(norm=lambda x: jnp.abs(function(x)))


PLACES = {
    "loss": of_loss,
    "predicate": of_predicate,
    "record": of_independent_records,
    "oracle": of_oracle,
    "norm": of_norm,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TOUCHING)
def test_it_is_refused_wherever_it_is_assumed(name, place):
    with pytest.raises(ValueError, match=f"{place} must not .* could depend on other examples"):
        PLACES[place](TOUCHING[name])


@pytest.mark.parametrize("place", PLACES)
def test_rules_of_users_are_accepted(place):
    PLACES[place](cumulative_by("users"))


def remembers():
    """Holds for every second example that it sees, whatever that is."""
    seen = jax.new_ref(jnp.int32(0))

    def function(x):
        seen[...] += 1
        return jnp.float32(seen[...] % 2)

    return function


def of_all_lanes(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.cumsum, shape, x, vmap_method="broadcast_all")


@pytest.mark.parametrize("place", PLACES)
def test_no_function_of_a_record_remembers_or_asks_python(place):
    """A loop over records keeps lanes apart, but not what is outside of the loop.

    What else reaches it: losses, oracles and norms, which were refused before, and a mechanism
    that is given a query's value by hand, where `privatize` does not look at the program.
    """
    with pytest.raises(ValueError, match=f"{place} must be a pure function"):
        PLACES[place](remembers())
    with pytest.raises(ValueError, match=f"{place} must not call code outside of JAX"):
        PLACES[place](of_all_lanes)


def test_a_key_of_a_record_or_of_a_database_may_be_rbg_nowhere():
    oracle = oracles.independent(jax.random.uniform)
    with pytest.raises(ValueError, match="record must not draw with rbg keys"):
        oracle(jax.random.key(0, impl="rbg"), 3)
    loss = lambda w, key: w * jax.random.uniform(key)  # noqa: E731
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    with pytest.raises(ValueError, match="loss must not draw with rbg keys"):
        learning.clipped_gradients(loss, clip_norm=1.0)(jnp.float32(1), keys, True)


@pytest.mark.parametrize("name", DRAWN)
def test_a_sum_of_records_that_touch_takes_no_shortcut(name):
    assert sample(targets.summable(jnp.sin)).sums is not None
    assert sample(targets.summable(DRAWN[name])).sums is None


@pytest.mark.parametrize("name", ["rbg", "jit and loop"])
def test_targets_whose_lanes_may_touch_are_looked_at_alone_everywhere(name):
    """A target is compared with itself on 5 / gamma databases, and not on eight."""

    def probes(function):
        pair = sample(lambda database: function(jnp.sum(database)))
        average = RandomPair(pair.target, pair.oracle, pair.norm, "average", pair.released)
        return _probes.probed_pairs(average, dpjax.operating_point(gamma=0.01))

    assert probes(jnp.sin) == 8
    assert probes(TOUCHING[name]) == 459
