"""A key for each value: what maps over values alone is refused, under every transformation."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import dpjax

LAPLACE = dpjax.laplace(1.0, 1.0)
VALUES = jnp.arange(3.0)
KEY = dpjax.random.seeded_key(8)
SECURITY = pathlib.Path(__file__).parents[2] / "docs" / "security.md"


def release(x, key=KEY):
    return LAPLACE(key, x).value


@jax.custom_vjp
def with_own_derivative(x):
    return release(x)


with_own_derivative.defvjp(lambda x: (release(x), None), lambda _, cotangent: (cotangent,))

# Each maps a release over values.
TRANSFORMED = {
    "vmap": jax.vmap(release),
    "jit outside": jax.jit(jax.vmap(release)),
    "jit inside": jax.vmap(jax.jit(release)),
    "nested": lambda x: jax.vmap(jax.vmap(release))(x[None]),
    "an axis of its own": lambda x: jax.vmap(release, in_axes=1)(x[None]),
    "key given": lambda x: jax.vmap(lambda key, x: release(x, key), (None, 0))(KEY, x),
    "named axis": jax.vmap(release, axis_name="i"),
    "spmd axis": jax.vmap(release, spmd_axis_name="i"),
    "keys inside": jax.vmap(
        lambda x: jax.vmap(lambda key: release(x, key))(jax.random.split(KEY, 2))
    ),
    "map in batches": lambda x: lax.map(release, x, batch_size=3),
    "vectorize": jnp.vectorize(release),
    "value_and_grad": jax.vmap(jax.value_and_grad(release)),
    "value_and_grad outside": jax.value_and_grad(lambda x: jax.vmap(release)(x).sum()),
    "grad of grad": jax.vmap(jax.value_and_grad(jax.grad(release))),
    "hessian": jax.vmap(jax.hessian(release)),
    "vjp": jax.vmap(lambda x: jax.vjp(release, x)[0]),
    "jvp": jax.vmap(lambda x: jax.jvp(release, (x,), (x,))),
    "jacfwd": jax.vmap(jax.jacfwd(release)),
    "linearize": jax.vmap(lambda x: jax.linearize(release, x)[0]),
    "checkpoint": jax.vmap(jax.checkpoint(release)),
    "value_and_grad of checkpoint": jax.vmap(jax.value_and_grad(jax.checkpoint(release))),
    "custom_vjp": jax.vmap(with_own_derivative),
    "value_and_grad of custom_vjp": jax.vmap(jax.value_and_grad(with_own_derivative)),
    "scan": jax.vmap(lambda x: lax.scan(lambda c, _: (c, release(x)), 0, None, length=2)[1]),
    "value_and_grad of scan": jax.vmap(
        jax.value_and_grad(
            lambda x: lax.scan(lambda c, _: (c + release(x), None), 0.0, None, length=2)[0]
        )
    ),
    "fori_loop": jax.vmap(lambda x: lax.fori_loop(0, 2, lambda i, c: release(c), x)),
    "while_loop": jax.vmap(lambda x: lax.while_loop(lambda c: c < 9, release, x)),
    "cond": jax.vmap(lambda x: lax.cond(jnp.bool_(True), release, release, x)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_values_alone_are_refused_under(name):
    with pytest.raises(ValueError, match=r"key must be one for each value: jax\.vmap maps"):
        TRANSFORMED[name](VALUES)


def test_keys_of_their_own_pass_with_the_bits_that_they_have_alone():
    keys = jax.random.split(KEY, 3)
    alone = [float(release(x, key)) for x, key in zip(VALUES, keys, strict=True)]
    both = jax.vmap(jax.value_and_grad(release))(VALUES, keys)[0]
    np.testing.assert_array_equal(both, alone)
    np.testing.assert_array_equal(jax.vmap(jax.checkpoint(release))(VALUES, keys), alone)


def test_the_key_that_is_drawn_from_is_the_one_given():
    """Every bit of noise is as it was without the check."""
    direct = jax.jit(LAPLACE._draw)(KEY, VALUES)
    np.testing.assert_array_equal(release(VALUES), direct)


# Shards: one device is enough, for JAX keeps account of the axes all the same.


def sharded(function, *specs, **options):
    mesh = jax.make_mesh((1,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(PartitionSpec(*spec) for spec in specs)
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("shards"), **options
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_shards_of_values_under_one_key_are_refused(wrap):
    with pytest.raises(ValueError, match=r"jax\.shard_map shards values over \['shards'\]"):
        sharded(wrap(lambda key, x: release(x, key)), (), ("shards",))(KEY, VALUES)
    with pytest.raises(ValueError, match=r"jax\.shard_map shards values"):
        sharded(wrap(release), ("shards",))(VALUES)


def test_shards_with_keys_of_their_own_pass():
    keys = jax.random.split(KEY, 1)
    by_shard = sharded(lambda keys, x: release(x, keys[0]), ("shards",), ("shards",))
    expected = release(VALUES, keys[0])  # First: its accuracy cannot be found within a shard.
    np.testing.assert_array_equal(by_shard(keys, VALUES), expected)
    folded = sharded(
        lambda x: release(x, jax.random.fold_in(KEY, lax.axis_index("shards"))), ("shards",)
    )
    expected = release(VALUES, jax.random.fold_in(KEY, 0))
    np.testing.assert_array_equal(folded(VALUES), expected)


def test_what_cannot_be_seen_is_said_in_the_docs():
    """A program that shows one key for one value, but runs for several."""
    by_sign = jax.vmap(lambda x: lax.cond(x > 0, lambda: release(5.0), lambda: release(3.0)))
    loop = lax.scan(lambda c, x: (c, release(x)), 0, VALUES)[1]
    for released, differences in ((by_sign(VALUES), [2.0, 0.0]), (loop, [1.0, 1.0])):
        np.testing.assert_allclose(np.diff(released), differences, atol=1e-5)
    said = " ".join(SECURITY.read_text().split())
    for word in ("mapped predicate", "`lax.scan`", "`lax.map`"):
        assert word in said


# The checker of JAX.


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.value_and_grad,
        lambda f: lambda x: jax.vjp(f, x)[0],
        lambda f: lambda x: jax.linearize(f, x)[0],
        jax.checkpoint,
    ],
    ids=["plain", "value_and_grad", "vjp", "linearize", "checkpoint"],
)
def test_jax_sees_reuse_of_a_key_under(transform):
    with jax.debug_key_reuse(True):
        key = dpjax.random.seeded_key(1)
        once = transform(lambda x: release(x, key))
        once(jnp.float32(0))
        with pytest.raises(jax.errors.KeyReuseError):
            once(jnp.float32(0))
