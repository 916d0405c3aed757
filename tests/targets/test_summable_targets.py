"""What the shipped sums over records have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets

N = 24


def numbers(generator, n):
    return generator.normal(size=n).astype("float32")


def vectors(generator, n):
    return generator.uniform(size=(n, 2)).astype("float32")


def codes(generator, n):
    return generator.integers(0, 27, size=(n, 5)).astype("uint8")


TARGETS = {
    "bounded_mean": (targets.bounded_mean(lower=-1, upper=0.5, dims=2), vectors),
    "moments": (targets.moments(order=3, lower=-1, upper=0.5), numbers),
    "kernel_density": (
        targets.kernel_density_on_lattice(bandwidth=0.1, degree=4, dims=2),
        vectors,
    ),
    "letter_counts": (targets.letter_counts(width=5), codes),
}
of_floats = pytest.mark.parametrize("name", [name for name in TARGETS if name != "letter_counts"])
every_target = pytest.mark.parametrize("name", TARGETS)


def setting(name, databases=1, n=N):
    target, draw = TARGETS[name]
    generator = np.random.default_rng(20170611)
    return target, [jnp.asarray(draw(generator, n)) for _ in range(databases)]


@every_target
def test_it_is_a_function_of_the_sum(name):
    target, (database,) = setting(name)
    assert isinstance(target, targets.Summable)
    total = sum(target.statistic(record) for record in database)
    expected = target.finish(total / N if target.average else total)
    np.testing.assert_allclose(target(database), expected, atol=1e-5)


@every_target
def test_finish_is_affine(name):
    """So the difference of two values follows from the two records that differ."""
    target, (database, other) = setting(name, 2)
    x, y, zero = (
        jnp.zeros_like(target.statistic(database[0])) if d is None else target.statistic(d[0])
        for d in (database, other, None)
    )
    moved = target.finish(3 * x - y) - target.finish(zero)
    split = 3 * (target.finish(x) - target.finish(zero)) - (target.finish(y) - target.finish(zero))
    np.testing.assert_allclose(moved, split, rtol=1e-5, atol=1e-5)


@every_target
def test_order_of_records_does_not_matter(name):
    target, (database,) = setting(name)
    permuted = jnp.asarray(np.random.default_rng(0).permutation(np.asarray(database)))
    value, other = jax.jit(lambda x, y: (target(x), target(y)))(database, permuted)
    np.testing.assert_allclose(value, other, atol=1e-5)
    assert not np.array_equal(database, permuted)


@every_target
def test_databases_are_evaluated_at_once(name):
    target, databases = setting(name, 3)
    together = jax.jit(jax.vmap(target))(jnp.stack(databases))
    np.testing.assert_allclose(together, [target(x) for x in databases], atol=1e-6)


@every_target
def test_a_single_record(name):
    target, (database,) = setting(name, n=1)
    expected = target.finish(target.statistic(database[0]))
    np.testing.assert_allclose(target(database), expected, rtol=1e-6, atol=1e-6)


@of_floats
def test_values_stay_finite_whatever_the_records(name):
    target, (database,) = setting(name)
    for bad in (np.nan, np.inf, -np.inf, 3e38):
        assert np.all(np.isfinite(target(database.at[0].set(bad))))


@every_target
def test_dtypes(name, x64):
    target, draw = TARGETS[name]
    database = draw(np.random.default_rng(0), N)
    wanted = {"f": database.dtype.name, "i": "int64"}
    value = target(jnp.asarray(database))
    assert value.dtype == wanted[value.dtype.kind]
    if database.dtype == "float32":
        narrow, wide = (target(jnp.asarray(database.astype(d))) for d in ("float16", "float64"))
        assert wide.dtype == ("int64" if wide.dtype.kind == "i" else "float64")
        assert narrow.dtype == value.dtype
        np.testing.assert_allclose(wide, value, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_integers_that_jax_does_not_sum(dtype, key):
    """As wider ones: the sum, and what replacing one of them changes."""
    total = targets.summable(lambda x: x)

    def oracle(key, n, dtype=dtype):
        return (jax.random.key_data(key)[0] % 8 + jnp.arange(n, dtype="uint32") % 8).astype(dtype)

    assert int(total(jnp.asarray([1, 0, 7, 3, 7], dtype))) == 18
    settings = {"n": 4, "norm": "l1", "m": 5}
    np.testing.assert_array_equal(
        dpjax.sample_distances(key, total, oracle, **settings),
        dpjax.sample_distances(
            key, total, lambda *given: oracle(*given).astype("int32"), **settings
        ),
    )
