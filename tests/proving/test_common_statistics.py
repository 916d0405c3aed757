"""Order statistics, means by weights, shares, softmax gradients and projections, on all pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of
from random_programs import distance

LEVELS = np.array([-0.5, 0.3], np.float32)
LINE = np.array([-0.8, 0.1, 0.4], np.float32)
WEIGHTS = np.array([[1.0, -2.0], [0.5, 1.0]], np.float32)
ONE, TWO = all_pairs(VALUES), all_pairs(VALUES, (2,))


def _sorted(v):
    return jnp.sort(v[:, 0])


def _squares(x):
    return ((x - x.mean()) ** 2).mean()


def _levels(v):
    """Whether each first number is at most each level, and which second numbers are positive."""
    return v[None, :, 0] <= LEVELS[:, None], v[:, 1] > 0


def _entropy(p):
    return -(p * jnp.log(jnp.maximum(p, 1e-9))).sum()


def _places(v):
    return jnp.round(v[:, 0]).astype(int) + 1


def _counts(v):
    return jnp.zeros(3).at[_places(v)].add(1.0)


def _totals(v):
    return jnp.zeros(3).at[_places(v)].add(9 + 9 * v[:, 1])


def _shares(v):
    chosen = jnp.zeros(3).at[_places(v)].add(1 + v[:, 1])
    return chosen / jnp.maximum(chosen.sum(), 1.5)


def _weighted_rows(v):
    weights = jnp.stack([2 + v[:, 0], jnp.where(v[:, 1] > 0, 2.0, 1.0)], 1)
    return jnp.matmul(weights.T, v, precision="highest") / weights.sum(0)[:, None]


def _agreement(v):
    a, b = v[:, 0] > 0, v[:, 1] > 0
    return 2 * (a & b).sum().astype(float) / jnp.maximum(a.sum() + b.sum(), 2).astype(float)


def _cross_entropy(v):
    labels = jnp.stack([v[:, 0] > 0, v[:, 0] <= 0], 1).astype(float)
    return -(jax.lax.stop_gradient(labels) * jax.nn.log_softmax(v)).sum()


def _signed_agreement(v):
    a, b = v[:, 0] > 0, v[:, 1] > 0
    both = jnp.where(a & b, v[:, 0] - 0.3, 0).sum()
    return both / jnp.maximum(a.sum() + b.sum(), 2).astype(float)


def _over_its_norm(m, other=None):
    squares = (m * m).sum() if other is None else (m * m).sum() + other
    return m / jnp.maximum(jnp.sqrt(squares), 0.4)


def _pooled(v, scores):
    return jnp.matmul(jax.nn.softmax(scores, axis=-1), v, precision="highest")


def _from_the_right(v, x):
    return jnp.matmul(v, jax.nn.softmax(0.8 * x), precision="highest")


def _turned(weights, v):
    return jax.lax.dot_general(weights, v, (((0,), (0,)), ((), ())), precision="highest")


# Each program, and how many times the farthest pair its bound in l1 may be.
PROGRAMS = {
    "a quantile": (lambda v: jnp.quantile(v[:, 0], 0.3), 1.001),
    "quantiles": (lambda v: jnp.quantile(v[:, 0], np.float32([0.2, 0.9])), 1.001),
    "a range of quantiles": (lambda v: jnp.subtract(*jnp.quantile(v[:, 0], LEVELS + 0.6)), 1.01),
    "order statistics added": (lambda v: (s := _sorted(v))[0] + 2 * s[1], 1.001),
    "sorted twice": (lambda v: jnp.sort(x := v[:, 0])[0] + 2 * jnp.sort(x)[1], 1.001),
    "an order statistic twice": (lambda v: (s := _sorted(v))[:1].sum() + s[0], 1.001),
    "of two vectors": (lambda v: _sorted(v)[0] - jnp.sort(v[:, 1])[2] / 2, 1.001),
    "scaled order statistics": (lambda v: (_sorted(v) * LINE / 0.5)[::2].sum(), 9),
    "an order statistic of sums": (lambda v: jnp.sort(v.sum(1))[1] / 3, 1.001),
    "variance of the least": (lambda v: jnp.var(_sorted(v)[:2]), 1.001),
    "variance of the largest": (lambda v: _squares(_sorted(v)[1:]), 1.001),
    "variance of two replaced": (lambda v: jnp.var(jnp.sort(v.ravel())), 9),
    "distance to a line": (lambda v: jnp.abs(_sorted(v) - LINE).max(), 2),
    "distance below a line": (lambda v: (LINE / 12 + 0.6 - _sorted(v)).max(), 1.1),
    "distances on both sides": (
        lambda v: jnp.maximum(_sorted(v) - LINE, LINE - 0.1 - _sorted(v)).max(), 2,
    ),
    "precision at levels": (
        lambda v: (_levels(v)[0] & _levels(v)[1]).sum(1) / jnp.maximum(_levels(v)[1].sum(), 1), 2.1,
    ),
    "agreement": (_agreement, 2.01),
    "agreement of signed numbers": (_signed_agreement, 9),
    "entropy": (lambda v: _entropy(_counts(v) / N), 1.001),
    "distinct numbers": (lambda v: (_counts(v) > 0).sum(), 1.001),
    "numbers that occur": (lambda v: jnp.zeros(3).at[_places(v)].set(1.0).sum(), 1.001),
    "distinct numbers by one-hot": (
        lambda v: (jax.nn.one_hot(_places(v) - 1, 2).sum(0) > 0).sum() * 1.5, 1.001,
    ),
    "squares of counts": (lambda v: (_counts(v) ** 2).sum() - _counts(v).sum(), 1.001),
    "shares": (_shares, 2.01),
    "shares of more": (
        lambda v: (c := _counts(v)) / jnp.maximum(c.sum() + _totals(v).sum(), 3.0), 9,
    ),
    "an angle": (
        lambda v: jnp.arctan2(v[:, 0].mean(), 1 + 0.3 * (v[:, 1] > 0).astype(float).mean()), 1.2,
    ),
    "squares of shares": (lambda v: (_shares(v) ** 2).sum(), 4.01),
    "weighted rows": (_weighted_rows, 2),
    "weighted rows, transposed": (lambda v: _weighted_rows(v).T, 2),
    "gradient of a cross entropy": (jax.grad(_cross_entropy), 2.5),
    "pooled": (lambda v: _pooled(v, 0.8 * v[:, 0]), 1.5),
    "pooled from the right": (lambda v: _from_the_right(v.T, v[:, 0]), 1.5),
    "a column pooled from the right": (lambda v: _from_the_right(v[:, 1], v[:, 0]), 1.5),
    "pooled along another axis": (
        lambda v: _turned(jax.nn.softmax(jnp.matmul(3 * v, v.T, precision="highest")), v), 9,
    ),
    "attention": (lambda v: _pooled(v, v[:, :1] * v[None, :, 1] / 3).sum(0), 4),
    "attention by a product": (
        lambda v: _pooled(v, jnp.matmul(v @ WEIGHTS, v.T, precision="highest") / 9).sum(0), 3,
    ),
    "attention by a multiple": (
        lambda v: _pooled(v, 0.3 * jnp.matmul(v, v.T, precision="highest")).sum(0), 6,
    ),
    "attention by all records": (
        lambda v: _pooled(v, jnp.matmul(v, v.T, precision="highest") * v.sum()).sum(0), 9,
    ),
    "over its norm": (lambda v: _over_its_norm(v.mean(0)), 2.5),
    "over another norm": (
        lambda v: _over_its_norm(v[:, :1].sum(0) / 9, (v[:, 1:].sum(0) ** 2).sum()), 9,
    ),
    "rows mixed": (lambda v: jnp.sort(v.reshape(2, 3), axis=1).sum(0), 3.01),
    "exponential of a sum": (lambda v: jnp.exp(v.sum() / 2), 2),
    "exponential of counts": (
        lambda v: jnp.exp(jnp.zeros(2).at[(v[:, 0] > 0).astype(int)].add(v[:, 1]).sum()), 9,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    run = jax.jit(jax.vmap(lambda x: {name: target(x) for name, (target, _) in PROGRAMS.items()}))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return [run(databases) for databases in TWO]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_pair_lies_further_apart_and_some_pair_nearly_does(name, moved):
    spec, (target, most) = jax.ShapeDtypeStruct((N, 2), jnp.float32), PROGRAMS[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        bounds = bounds_of(target, spec, (-1, 1))
    for norm, bound in bounds.items():
        assert distance(*(x[name] for x in moved), norm).max() <= bound
    assert bounds["l1"] <= most * distance(*(x[name] for x in moved), "l1").max()


def test_what_looks_like_a_lemma_is_none():
    """Sums along other axes give the bound of the walk, or a refusal."""
    spec = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def bound(target):
        try:
            return dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="linf").value
        except dpjax.proving.NoProofError:
            return np.inf

    def turned(x, axis=1):
        """Divides each exponential by the sum of another row, or of a column."""
        e = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, 1, keepdims=True, initial=-jnp.inf)))
        by = (x[:, :1] / e.sum(axis)[:, None]).sum(1)
        return jax.lax.broadcast_in_dim(by, (4, 4), (axis,)) * e

    def by_another(x):
        """Chosen numbers of a row belong to another record than those below."""
        chosen = x[:, 0] > 0
        both = jax.lax.broadcast_in_dim(chosen, (4, 4), (0,)) & (x > 0)
        return both.sum(0) / jnp.maximum(chosen.sum(), 1)

    def wrong(x):
        chosen = x[:, 0] > 0
        both = jax.lax.broadcast_in_dim(chosen, (4, 4), (1,)) & (x > 0)
        return both.sum(0) / jnp.maximum(chosen.sum(), 1)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert bound(by_another) < 1.001
        assert bound(wrong) > 3
        assert bound(turned) > 1.5
        assert bound(lambda x: turned(x, axis=0)) > 3.5
        assert bound(lambda x: jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 1])) == np.inf
        assert bound(lambda x: jnp.interp(x[:, 0], LINE, LINE + jnp.sort(x[:3, 1]))) == np.inf


def test_scores_that_depend_on_all_records():
    """One record changes the sign of every score, and so every row of an attention."""

    def target(v):
        sign = jnp.tanh(8 * v[:, 0].sum())
        scores = jnp.matmul(v[:, 1:], v[:, 1:].T, precision="highest") * sign
        return _pooled(v, scores).mean(0)

    spec = jax.ShapeDtypeStruct((30, 2), jnp.float32)
    bound = dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l2").value
    others = np.stack([np.tile([-1.0, 1.0], 14), np.tile([1.0, 1.0, -1.0, 1.0], 7)], 1)
    both = [np.concatenate([others, [[a, 1.0], [0.0, 1.0]]]).astype(np.float32) for a in (-1, 1)]
    apart = np.linalg.norm(np.subtract(*map(jax.jit(target), both)))
    assert 0.7 < apart <= bound


def test_a_ratio_of_float32_sums_in_float64_is_rounded_as_float32():
    """A record moves the exact mean of the chosen numbers by at most 2 / 1400."""
    # The sum of 1,400 is near 1,024, where the distance of floats doubles.
    numbers = np.random.default_rng(0).uniform(0.463, 1, (200, 1500)).astype(np.float32)
    numbers[:, -1], others = 1.0, numbers.copy()
    others[:, -1] = -1.0

    def target(x):
        chosen = (jnp.arange(1500) >= 100).astype(jnp.float32)
        sums = (chosen * x).sum(), chosen.sum()
        top, count = (total.astype(jnp.float64) for total in sums)
        return top / jnp.maximum(count, 1400.0)

    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((1500,), jnp.float32)
        bound = dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l1").value
        run = jax.jit(jax.vmap(target))
        apart = np.abs(np.asarray(run(numbers)) - np.asarray(run(others))).max()
    assert 2 / 1400 * (1 + 2e-7) < apart <= bound
