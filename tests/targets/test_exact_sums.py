"""Sampled targets with exact sums: their values, what is sampled, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax.proving import Ball
from dpjax.targets import exact_sums

N = 20_000
WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)


@pytest.fixture(autouse=True, scope="module")
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def gradient(d):
    x, y = d
    return x.T @ (jax.nn.sigmoid(x @ WEIGHTS) - y) / len(y)


def ridge(d):
    x, y = d
    return jnp.linalg.solve(x.T @ x + jnp.eye(3, dtype=jnp.float32), x.T @ y)


LABELED = Ball(1.0), (0, 1)
# A target, bounds on its records, and a part of each line of `explain()`.
TARGETS = {
    "mean": (jnp.mean, (-1, 1), ["exact sum"]),
    "variance": (jnp.var, (-1, 1), ["exact variance"]),
    "sums of squares": (lambda x: (x**2).sum() - x.sum() ** 2 / N, (-1, 1), ["sum", "sum"]),
    "last cumulative sum": (lambda x: jnp.cumsum(x)[-1], (-1, 1), ["exact cumulative sum"]),
    "windows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1000,), (1000,), "VALID"),
        (-1, 1),
        ["exact sums of windows"],
    ),
    "by place": (
        lambda x: jnp.zeros(3, jnp.float32).at[jnp.round(x).astype(int) + 1].add(x), (-1, 1),
        ["exact sums by place"],
    ),
    "descent": (
        lambda x: lax.fori_loop(0, 3, lambda i, w: w - jnp.tanh(w - x).mean(), jnp.float32(0)),
        (-1, 1),
        ["exact sum"],
    ),
    "a mean beside a median": (lambda x: x.mean() + jnp.median(x), (-1, 1), ["exact sum"]),
    "gradient": (gradient, LABELED, ["exact sum"]),
    "ridge, which has no proof": (ridge, LABELED, ["exact sum", "exact sum"]),
}  # fmt: skip


def database(rng, bounds):
    x = rng.uniform(-0.5, 0.5, (N, 3)).astype(np.float32)
    return (x, np.float32(x[:, 0] > 0)) if bounds is LABELED else 2 * x[:, 0]


@pytest.mark.parametrize("name", TARGETS)
def test_bits_depend_on_neither_order_nor_batch_nor_x64(name):
    target, bounds, lines = TARGETS[name]
    exact = exact_sums(target, bounds=bounds)
    records = database(np.random.default_rng(0), bounds)
    order = np.random.default_rng(1).permutation(N)
    shuffled = jax.tree.map(lambda x: x[order], records)
    run = jax.jit(exact)
    found = np.asarray(run(records))
    with jax.enable_x64(True):
        again = np.asarray(jax.jit(exact)(records))
    assert again.dtype == found.dtype == np.float32
    assert again.tobytes() == found.tobytes()
    both = np.asarray(
        jax.jit(jax.vmap(exact))(jax.tree.map(lambda *x: np.stack(x), *[records] * 3))
    )
    assert all(one.tobytes() == found.tobytes() for one in both)
    if name != "windows":
        assert np.asarray(run(shuffled)).tobytes() == found.tobytes()
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), records)
    np.testing.assert_allclose(found, np.asarray(target(wide)), rtol=2e-4, atol=1e-5)
    explained = dpjax.sample_sensitivity(
        dpjax.random.seeded_key(0), exact, oracle_of(bounds), n=N, norm="linf", m=8, gamma=0.5,
        positions="average", confidence=None, allow_cancellation=True,
    ).explain()  # fmt: skip
    shown = [line for line in explained.splitlines() if line.startswith("exact ")]
    assert len(shown) == len(lines)
    for line, part in zip(shown, lines, strict=True):
        assert part in line


def oracle_of(bounds):
    def labeled(key, n):
        x = jax.random.uniform(key, (n, 3), minval=-0.5, maxval=0.5)
        return x, jnp.float32(x[:, 0] > 0)

    return labeled if bounds is LABELED else lambda key, n: jax.random.uniform(key, (n,), minval=-1)


def test_what_is_sampled_is_what_is_released():
    target, records = exact_sums(jnp.mean, bounds=(-1, 1)), np.full(N, 0.3, np.float32)
    found = dpjax.sample_sensitivity(
        dpjax.random.seeded_key(0), target, oracle_of((-1, 1)), n=N, norm="l1", m=50
    )
    private = dpjax.privatize(target, dpjax.laplace(found, epsilon=1e6))
    release = private(dpjax.random.seeded_key(0), records)
    assert float(release.value) == pytest.approx(0.3, abs=1e-6)
    same = dpjax.privatize(exact_sums(jnp.mean, bounds=(-1, 1)), dpjax.laplace(found, epsilon=1e6))
    assert same(dpjax.random.seeded_key(0), records).value == release.value
    for other in (
        jnp.mean,
        exact_sums(jnp.mean, bounds=(-2, 1)),
        exact_sums(jnp.sum, bounds=(-1, 1)),
    ):
        with pytest.raises(ValueError, match="target must be the target that was sampled"):
            dpjax.privatize(other, dpjax.laplace(found, epsilon=1.0))
    assert "exact sum" not in repr(found)


def test_a_distance_of_many_records_is_that_of_two():
    """At 10^6 records; the quantile of |x - x'| / n is known, and the mean is near 0."""
    n, target = 10**6, exact_sums(jnp.mean, bounds=(-1, 1))
    found = dpjax.sample_sensitivity(
        dpjax.random.seeded_key(3), target, oracle_of((-1, 1)), n=n, norm="l1", m=100, gamma=0.1,
        confidence=None,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    moves = np.abs(np.subtract(*rng.uniform(-1, 1, (2, 100_000))))
    # Exact: the rank of 91 of 100 is at a level between .8 and .98 but for 1 in 10^4 keys.
    low, high = np.quantile(moves, [0.8, 0.98])
    assert low <= n * float(found.value) <= high * 1.01
    assert float(found.value) < dpjax.sample_sensitivity(
        dpjax.random.seeded_key(3), jnp.mean, oracle_of((-1, 1)), n=n, norm="l1", m=100, gamma=0.1,
        confidence=None,
    ).value  # fmt: skip


def while_of(x):
    return lax.while_loop(lambda c: c < 3, lambda c: c + jnp.abs(x).mean() + 1, jnp.float32(0))


# With a part of the message.
REFUSED = {
    "no bound": (lambda x: (1 / x).sum(), "none for reduce_sum at .*test_exact_sums.py"),
    "of another sum": (lambda x: jnp.log(x).sum() * x.mean(), "none for reduce_sum at"),
    "in a while loop": (while_of, "none for while at .*test_exact_sums.py"),
    "in a branch": (
        lambda x: lax.cond(x[0] > 0, jnp.sum, lambda x: -jnp.sum(x), x),
        "none for cond at .*sums inside of this operation",
    ),
    "one by one": (
        lambda x: lax.scan(lambda c, r: (c + r, None), jnp.float32(0), x)[0],
        "none for scan at .*adds up records one by one",
    ),
    "columns of unlike ranges": (
        lambda x: (x[:, None] * np.array([1, 1e9], np.float32)).sum(0),
        "times as large as those of another column",
    ),
    "matrices of matrices": (
        lambda x: jnp.einsum("i,ij->j", x, x[:, None] * np.ones(2000, np.float32)),
        "at most 1024 products",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sums_without_bounds_are_refused_with_their_line(name):
    target, said = REFUSED[name]
    exact = exact_sums(target, bounds=(-1, 1))
    with pytest.raises(ValueError, match=said) as caught:
        jax.eval_shape(exact, jax.ShapeDtypeStruct((N,), jnp.float32))
    assert "sample it" not in str(caught.value)


# Their rules or lemmas need no walk of the sums inside of them.
WITH_A_LEMMA = {
    "logsumexp": jax.nn.logsumexp,
    "variance of sorted numbers": lambda x: jnp.var(jnp.sort(x)),
    "variance of a second result": lambda x: jnp.var(lax.sort((x, x**2), num_keys=1)[1]),
    "weighted mean": lambda x: jnp.average(x, weights=x + 2),
    "softmax": lambda x: (jax.nn.softmax(x) * x).sum(),
    "correlation": lambda x: jnp.corrcoef(x, x**2 + x)[0, 1],
}


@pytest.mark.parametrize("name", WITH_A_LEMMA)
def test_sums_inside_of_functions_with_a_lemma_are_exact(name):
    target, rng = WITH_A_LEMMA[name], np.random.default_rng(0)
    x = rng.uniform(-1, 1, N).astype(np.float32)
    run = jax.jit(exact_sums(target, bounds=(-1, 1)))
    values = {np.asarray(run(y)).tobytes() for y in (x, x[::-1], rng.permutation(x), np.sort(x))}
    assert len(values) == 1
    assert float(run(x)) == pytest.approx(float(target(x)), rel=1e-4)


def test_sums_of_few_terms_stay_as_they_are():
    """Neither sums of few records, nor sums of the coordinates of a record."""
    spec = jax.ShapeDtypeStruct((50, 3), jnp.float32)
    target = exact_sums(lambda x: (x.sum(1) ** 2).mean(), bounds=(-1, 1))
    assert "ExactSum" not in str(jax.make_jaxpr(target)(spec))
    rows = jax.ShapeDtypeStruct((30, 5000), jnp.float32)
    assert "ExactSum" not in str(jax.make_jaxpr(target)(rows))


def test_records_are_clamped():
    wild = np.array([np.nan, np.inf, -7] + [0.0] * (N - 3), np.float32)
    found = exact_sums(jnp.sum, bounds=(-1, 1))(wild)
    assert float(found) == -1 + 1 - 1
    with pytest.raises(TypeError, match="target"):
        exact_sums(3, bounds=(0, 1))
    with pytest.raises(ValueError, match="bounds"):
        exact_sums(jnp.sum, bounds=(1, 0))(wild)
