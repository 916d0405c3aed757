"""Two rows of what an oracle draws: the same numbers as drawing all rows and taking two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._programs import Program
from dpjax.sensitivity._rows import rows_of

N, ROWS = 37, np.array([5, 36])
PUBLIC = {"a": np.arange(37, dtype=np.float32), "b": np.arange(111).reshape(37, 3)}


def two_classes(key, n):
    label, noise, count = jax.random.split(key, 3)
    y = jax.random.bernoulli(label, 0.5, (n,))
    x = 0.1 * jax.random.normal(noise, (n, 3)) + jnp.where(y, 0.2, 0.8)[:, None]
    return {"x": x, "y": jnp.where(y, 1, -1), "count": jax.random.randint(count, (n, 2), 0, 9)}


def each_with_its_key(key, n):
    return jax.vmap(lambda key: jax.random.normal(key, (2,)))(jax.random.split(key, n))


def each_by_its_number(key, n):
    def record(i):
        return jax.random.uniform(jax.random.fold_in(key, i), (2,))

    return jax.vmap(record)(jnp.arange(n, dtype=jnp.uint32))


SLICED = {
    "uniform": lambda key, n: jax.random.uniform(key, (n, 2)),
    "normal": lambda key, n: jax.random.normal(key, (n,)),
    "exponential": lambda key, n: jax.random.exponential(key, (n, 4, 2)),
    "two classes": two_classes,
    "resample": dpjax.oracles.resample(PUBLIC),
    "smoothed resample": dpjax.oracles.smoothed_resample({"a": PUBLIC["a"]}, bandwidth=0.3),
    "keys": each_with_its_key,
    "numbers": each_by_its_number,
    "matrix product": lambda key, n: jax.random.normal(key, (n, 3)) @ jnp.ones((3, 2)),
    "categorical": lambda key, n: jax.random.categorical(key, jnp.zeros(5), shape=(n,)),
    "bytes": lambda key, n: jax.random.bits(key, (n, 3), "uint8"),
    "sorted in a row": lambda key, n: jnp.sort(jax.random.normal(key, (n, 4)), axis=1)[:, 1:3],
    "clipped": lambda key, n: jnp.clip(jax.random.normal(key, (n,)), 0, 1),
    "numbered": lambda key, n: jax.random.uniform(key, (n,)) + jnp.arange(n, dtype=jnp.float32),
    "every second": lambda key, n: jax.random.uniform(key, (2 * n, 2))[1::2],
    "side by side": lambda key, n: jnp.concatenate([jax.random.normal(key, (n, 2))] * 2, axis=1),
}
WHOLE = {
    "gamma": lambda key, n: jax.random.gamma(key, 2.0, (n,)),
    "permuted": lambda key, n: jax.random.permutation(key, jnp.arange(37.0)),
    "centered": lambda key, n: _centered(jax.random.normal(key, (n,))),
    "sorted": lambda key, n: jnp.sort(jax.random.normal(key, (n,))),
    "cumulated": lambda key, n: jnp.cumsum(jax.random.uniform(key, (n,))),
    "reversed": lambda key, n: jax.random.uniform(key, (n,))[::-1],
    "wide": lambda key, n: jax.random.normal(key, (3, n)).T,
}


def _centered(x):
    return x - jnp.mean(x)


def taken(oracle, key):
    key_spec = jax.ShapeDtypeStruct((), key.dtype)
    program = Program.trace("oracle", lambda key: oracle(key, N), key_spec)
    spec = jax.ShapeDtypeStruct((2,), np.int32)
    rows = Program.trace("rows", lambda key, rows: rows_of(program, rows, key), key_spec, spec)
    return program, rows


def check(oracle, key):
    program, rows = taken(oracle, key)
    found = jax.jit(rows)(key, jnp.asarray(ROWS, jnp.int32))
    expected = jax.tree.map(lambda x: x[ROWS], program(key))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    return program.largest_array(), rows.largest_array()


# What the oracles of the package and of this project's readers are made of; others take their time.
OFTEN = ("uniform", "two classes", "resample", "smoothed resample", "keys", "every second")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in SLICED]
)
def test_two_rows_are_drawn_alone(name, key):
    whole, sliced = check(SLICED[name], key)
    assert sliced < whole / 4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("permuted", "sorted", "wide") else pytest.mark.slow)
        for x in WHOLE
    ],
)
def test_where_rows_depend_on_others_all_are_drawn(name, key):
    check(WHOLE[name], key)


@pytest.mark.parametrize("axis", [0, 1])
def test_chains_of_slices_do_not_multiply(axis, key):
    """Every operand is reached by many ways, and computed once."""

    def oracle(key, n, depth=12):
        x = jax.random.normal(key, (n + depth * (axis == 0), depth + 1))
        for _ in range(depth):
            x = (x[:, 1:] + x[:, :-1]) / 2 if axis else (x[1:] + x[:-1]) / 2
        return x

    _, rows = taken(oracle, key)
    assert len(rows.jaxpr.jaxpr.eqns) < 3000  # 2^12 ways lead to the numbers that were drawn.
    if axis:
        check(oracle, key)


@pytest.mark.slow
def test_in_float64(key, x64):
    check(SLICED["two classes"], key)
    check(lambda key, n: jax.random.normal(key, (n, 2)), key)


OVERLAPPING = {
    "halves": lambda u, n: u[:n] - u[n : 2 * n],
    "neighbors": lambda u, n: u[1 : n + 1] - u[:n],
    "even and odd": lambda u, n: u[: 2 * n : 2] - u[1 : 2 * n : 2],
    "two fields": lambda u, n: {"a": u[:n], "b": u[n : 2 * n]},
    "rare": lambda u, n: u[:n] + jnp.where(u[n : 2 * n] > 0.995, 10 * (1 - u[:n]), 0.0),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_different_rows_of_one_array(name, key):
    check(lambda key, n: OVERLAPPING[name](jax.random.uniform(key, (2 * n,)), n), key)
