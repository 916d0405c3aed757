"""Lemmas, loops and places: no pair over three values lies further apart, and bounds are tight."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
import query_table
from all_pairs import VALUES, N, all_pairs, bounds_of
from dpjax import queries, targets
from dpjax.proving import Ball, NoProofError
from dpjax.proving._scopes import Scope
from dpjax.targets._known_sensitivity import BoundedTarget
from random_programs import distance

TABLE = jnp.array([[1.0, 0.0], [0.5, -3.0], [2.0, 2.0]])


def length(x):
    return jnp.sqrt(jnp.sum(x**2, axis=1, keepdims=True))


def clipped_by_others(x):
    """Of three records, an axis of coordinates looks like that of the records."""
    x = jnp.concatenate([x, x[:, :1]], axis=1)
    return x / jnp.maximum(0.1, jnp.sqrt(jnp.sum(x**2, axis=1)))[None]


def code(x):
    return (x + 1.0).astype(jnp.int32)


def places(x):
    return code(x)[:, 0]


def clipped_gradient(row):
    gradient = jax.grad(lambda w: jnp.square(row @ w - 1))(jnp.ones(4))
    return gradient / jnp.maximum(1.0, jnp.linalg.norm(gradient))


def centered(x):
    return x - x.mean(1, keepdims=True)


def weighted(x, weights, others=None):
    return (weights * x).sum() / (weights if others is None else others).sum()


# Programs of records of two coordinates.
PROGRAMS = {
    "softmax": jax.nn.softmax,
    "softmax of sums": lambda x: jax.nn.softmax(x.sum(0)),
    "log_softmax": jax.nn.log_softmax,
    "log_softmax of sums": lambda x: jax.nn.log_softmax(x.sum(0)),
    "log_softmax of records": lambda x: jax.nn.log_softmax(x, axis=0),
    "logsumexp of rows": lambda x: jax.nn.logsumexp(x, axis=1),
    "logsumexp of records": lambda x: jax.nn.logsumexp(x, axis=0),
    "logsumexp of all": jax.nn.logsumexp,
    "covariance": lambda x: jnp.cov(x, rowvar=False),
    "biased covariance": lambda x: jnp.cov(x, rowvar=False, bias=True),
    "sample variance": lambda x: jnp.var(x, axis=0, ddof=1),
    "variance in two passes": lambda x: jnp.square(x - x.mean(0, keepdims=True)).mean(0),
    "variance by moments": lambda x: (x**2).mean(0) - x.mean(0) ** 2,
    "weighted mean": lambda x: weighted(x[:, 0], x[:, 1] + 1.5),
    "layer norm": lambda x: centered(x) / jnp.sqrt(x.var(1, keepdims=True) + 0.05),
    "layer norm by a factor": lambda x: centered(x) * lax.rsqrt(x.var(1, keepdims=True) + 0.05),
    "rms norm": lambda x: x * lax.rsqrt((x**2).mean(1, keepdims=True) + 0.05),
    "layer norm of other means": lambda x: (
        (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 0.05)
    ),
    "clip by a quotient": lambda x: x / jnp.maximum(1, length(x) / 0.7),
    "clip by a factor": lambda x: x * jnp.minimum(1, 0.3 / (length(x) + 0.01)),
    "clip by the root of a maximum": lambda x: x / jnp.maximum(
        0.7, jnp.sqrt(jnp.maximum(jnp.sum(x**2, axis=1, keepdims=True), 0.1))
    ),
    "clip, then a sum": lambda x: (x / jnp.maximum(0.7, length(x))).sum(0),
    "clip by another's norm": lambda x: x / jnp.maximum(1, length(x)[::-1]),
    "clip by the norm of another row": clipped_by_others,
    "clip by the norm of a column": lambda x: x / jnp.maximum(
        0.5, jnp.sqrt(jnp.sum(x**2, axis=0, keepdims=True))
    ),
    "power": lambda x: (x + 1.5) ** 1.5,
    "power below 0": lambda x: (x + 1.5) ** -0.5,
    "quantile": lambda x: jnp.quantile(x, 0.75, axis=0),
    "searchsorted": lambda x: jnp.searchsorted(jnp.array([-0.5, 0.3]), x),
    "histogram": lambda x: jnp.histogram(x[:, 0], bins=2, range=(-1, 1))[0],
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "cumsum backwards": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "cumsum of rows": lambda x: jnp.cumsum(x, axis=1),
    "cumsum of all": lambda x: jnp.cumsum(x - x.mean(0)[None], axis=0),
    "rev": lambda x: x[::-1],
    "rev, then outer": lambda x: x.T @ x[::-1],
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 2)), constant_values=3),
    "pad, maximum of neighbors": lambda x: jnp.maximum(jnp.pad(x, ((1, 0), (0, 0)))[:3], x),
    "pad between": lambda x: lax.pad(x, 0.0, ((0, 0, 2), (0, 0, 1))),
    "stack": lambda x: jnp.stack([x, 2 * x], axis=1),
    "split": lambda x: jnp.split(x, 2, axis=1)[1],
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 0), (2, 2)),
    "table": lambda x: TABLE[places(x)],
    "table of all": lambda x: TABLE[code(x)],
    "rows of groups": lambda x: jnp.zeros((3, 2)).at[places(x)].add(x),
    "rows of groups of ones": lambda x: jnp.zeros((3, 2)).at[places(x)].add(jnp.ones((3, 2))),
    "rows of public groups": lambda x: jnp.zeros((3, 2)).at[jnp.array([0, 2, 0])].add(x),
    "scan": lambda x: lax.scan(lambda c, t: (c * t + x.mean(0), c), jnp.ones(2), TABLE[0])[1],
    "scan of steps": lambda x: lax.scan(
        lambda c, t: (c + t * x[0], None), jnp.zeros(2), jnp.arange(3.0)
    )[0],
    "scan of records": lambda x: lax.scan(lambda c, r: (c + r, c.sum()), jnp.zeros(2), x),
    "scan backwards": lambda x: lax.scan(
        lambda c, t: (c / 2 + t * x.max(0), c), jnp.zeros(2), jnp.arange(3.0), reverse=True
    )[1],
    "descent": lambda x: lax.fori_loop(0, 3, lambda i, w: w - jnp.tanh(x @ w).mean(), jnp.ones(2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    """The values of all programs on some pairs, from one compilation."""
    first, second = all_pairs(VALUES, (2,))
    choice = np.random.default_rng(0).choice(len(first), 3000, replace=False)
    run = jax.jit(jax.vmap(lambda x: {name: rule(x) for name, rule in PROGRAMS.items()}))
    return run(first[choice]), run(second[choice])


@pytest.mark.parametrize("bounds", [(-1, 1), Ball(2**0.5)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_pair_lies_further_apart(name, bounds, moved):
    spec = jax.ShapeDtypeStruct((N, 2), jnp.float32)
    firsts, seconds = (jax.tree.leaves(values[name]) for values in moved)
    for norm, bound in bounds_of(PROGRAMS[name], spec, bounds).items():
        apart = [distance(*pair, norm) for pair in zip(firsts, seconds, strict=True)]
        assert np.max(apart) <= bound * (1 + 1e-6)


NUMBERS = jax.ShapeDtypeStruct((100,), jnp.float32)
VECTORS = jax.ShapeDtypeStruct((100, 4), jnp.float32)
TIGHT = {
    "geometric mean": (lambda x: jnp.exp(jnp.log(x).mean()), NUMBERS, (0.1, 1), "l1", 0.0227627),
    "log of a mean": (lambda x: jnp.log(jnp.exp(x).mean()), NUMBERS, (0, 1), "l1", 0.0170368),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=0), NUMBERS, (0, 1), "l1", 0.0170368),
    "sigmoid": (lambda x: jax.nn.sigmoid(x).mean(), NUMBERS, (-2, 2), "l1", 0.00761594),
    "softmax": (lambda x: jax.nn.softmax(x).mean(0), VECTORS, (-1, 1), "l1", 0.0152319),
    "clip by norm": (
        lambda x: (x / jnp.maximum(1, length(x) / 2)).mean(0), VECTORS, (-10, 10), "l2", 0.04,
    ),
    "layer norm": (
        lambda x: (centered(x) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)).mean(0), VECTORS,
        (-1, 1), "l2", 0.04,
    ),
    "rms norm": (
        lambda x: (x * lax.rsqrt((x**2).mean(1, keepdims=True) + 1e-5)).mean(0), VECTORS,
        (-1, 1), "l2", 0.04,
    ),
    "clipped gradients": (
        lambda x: jax.vmap(clipped_gradient)(x).mean(0),
        VECTORS, (-10, 10), "l2", 0.02,
    ),
    "covariance": (lambda x: jnp.cov(x, rowvar=False), VECTORS, (0, 1), "l1", 0.16),
    "covariance in a ball": (
        lambda x: jnp.cov(x, rowvar=False, bias=True), VECTORS, Ball(1.0), "l2", 0.0396,
    ),
    "variance in two passes": (
        lambda x: ((x - x.mean()) ** 2).mean(), NUMBERS, (0, 1), "l1", 0.0099,
    ),
    "variance by moments": (
        lambda x: jnp.mean(x * x) - jnp.mean(x) ** 2, NUMBERS, (0, 1), "l1", 0.0099,
    ),
    "variances of columns": (
        lambda x: jnp.square(x - x.mean(0, keepdims=True)).mean(0), VECTORS, (0, 1), "l1", 0.0396,
    ),
    "weighted mean": (
        lambda x: weighted(x[:, 0], x[:, 1] + 0.5), VECTORS, (0, 1), "l1",
        1.5 / (99 * 0.5 + 1.5),
    ),
    "sample deviation": (lambda x: jnp.std(x, ddof=1), NUMBERS, (0, 1), "l1", 0.1),
    "histogram": (
        lambda x: jnp.histogram(x, bins=5, range=(0, 1))[0], NUMBERS, (0, 1), "l1", 2,
    ),
    "sums by group": (
        lambda x: jax.ops.segment_sum(x, (x[:, 0] * 3).astype(int), num_segments=4), VECTORS,
        (0, 1), "l1", 8,
    ),
    "sums by group in a ball": (
        lambda x: jax.ops.segment_sum(x, (x[:, 0] * 3 + 3).astype(int), num_segments=7), VECTORS,
        Ball(1.0), "l2", 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TIGHT)
def test_bounds_are_tight_up_to_rounding(case):
    target, records, bounds, norm, truth = TIGHT[case]
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
    assert truth * (1 - 1e-4) <= found.value <= 1.01 * truth


def test_explain_names_the_lemma():
    found = dpjax.prove_sensitivity(jax.nn.softmax, VECTORS, bounds=(-1, 1), norm="l1")
    assert "lemma softmax" in found.explain()


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: jnp.exp(x - x.max(1, keepdims=True)) / jnp.exp(x).sum(1, keepdims=True) * 9,
        lambda x: jax.nn.softmax(x, axis=1, where=x > 0),
        lambda x: jnp.exp(2 * (x - x.max(1, keepdims=True))) / jnp.exp(x).sum(1, keepdims=True),
    ],
)
def test_what_looks_like_softmax_is_not(softmax):
    try:
        found = dpjax.prove_sensitivity(softmax, VECTORS, bounds=(-1, 1), norm="l1")
    except NoProofError:
        return
    assert ": lemma" not in found.explain()


def test_a_number_that_becomes_an_integer_is_another_one():
    @jax.jit
    def scaled(x, by):
        return length(x) * by.astype(jnp.int32).astype(x.dtype)

    clip = lambda x: x / jnp.maximum(1e-3, scaled(x, 1.999))  # noqa: E731
    assert dpjax.prove_sensitivity(clip, VECTORS, bounds=(-10, 10), norm="l2").value >= 2


def test_another_function_of_that_name_is_no_search():
    @jax.jit
    def searchsorted(levels, x):
        return x + 0 * levels.sum()

    @jax.jit
    def _interp(x, places, heights):
        return 9 * x + 0 * places.sum() * heights.sum()

    for levels in (jnp.ones((2, 2)), jnp.ones(()), jnp.arange(3.0)):
        target = lambda x, levels=levels: searchsorted(levels, x).sum()  # noqa: E731
        assert dpjax.prove_sensitivity(target, NUMBERS, bounds=(0, 1), norm="l1").value >= 1
    target = lambda x: _interp(x, jnp.arange(3.0), jnp.arange(3.0)).sum()  # noqa: E731
    assert dpjax.prove_sensitivity(target, NUMBERS, bounds=(0, 1), norm="l1").value >= 9


@pytest.mark.parametrize(
    ("target", "truth"),
    [
        (lambda x: ((x - x.mean()) ** 3).mean(), 0.02),
        (lambda x: (x**2).mean() + x.mean() ** 2, 0.02),
        (lambda x: 3 * (x**2).mean() - x.mean() ** 2, 0.019),
        (lambda x: (x**2).mean() - jnp.square(x[:50].mean()), 0.03),
        (lambda x: ((x - x.max()) ** 2).mean(), 0.98),
        (lambda x: weighted(x, x + 0.5, 1.5 - x), 2.9),
        (lambda x: weighted(1 - x, 1.5 - x, x + 0.5), 2.9),
    ],
)
def test_what_looks_like_a_mean_is_none(target, truth):
    found = dpjax.prove_sensitivity(target, NUMBERS, bounds=(0, 1), norm="l1")
    ones = jnp.ones(100)
    pairs = [(ones, ones.at[0].set(0)), (0 * ones, (0 * ones).at[0].set(1))]
    reached = max(float(jnp.abs(target(a) - target(b))) for a, b in pairs)
    assert reached <= found.value
    assert ": lemma" not in found.explain()


def test_a_slice_that_reads_something_else_is_none():
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.exp(x + y))(1.0, 2.0).jaxpr
    program = Scope(jaxpr)
    assert program.between(jaxpr.invars[0], jaxpr.outvars[0]) is None
    assert len(program.between(jaxpr.eqns[0].outvars[0], jaxpr.outvars[0]).eqns) == 1


@pytest.mark.parametrize(
    "clip",
    [
        lambda x: x / jnp.maximum(1, jnp.sqrt(jnp.max(x**2, axis=1, keepdims=True))),
        lambda x: x / jnp.maximum(1, jnp.sqrt(jnp.sum(jnp.abs(x), axis=1, keepdims=True))),
        lambda x: x / jnp.maximum(1, length(x) - 0.5),
        lambda x: x / jnp.minimum(length(x) + 1, 2),
        lambda x: x / jnp.maximum(1, jnp.sqrt(jnp.minimum(jnp.sum(x**2, 1, keepdims=True), 4))),
        lambda x: 2 * x / jnp.maximum(1, length(x)),
    ],
)
def test_what_looks_like_a_clip_is_not(clip):
    """Rows of length 20 become longer than 1."""
    found = dpjax.prove_sensitivity(clip, VECTORS, bounds=(-10, 10), norm="l2")
    assert found.value > 2.1


def deviation(x):
    return jnp.sqrt(x.var(1, keepdims=True) + 0.01)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x / deviation(x),
        lambda x: (x - x.sum(1, keepdims=True) / 5) / deviation(x),
        lambda x: (x - x[::-1].mean(1, keepdims=True)) / deviation(x),
        lambda x: (x - x.mean(0, keepdims=True)) / deviation(x),
        lambda x: centered(x) / jnp.sqrt((x**2).mean(1, keepdims=True) - x**2 + 101),
        lambda x: x * lax.rsqrt((centered(x) ** 2).mean(1, keepdims=True) + 0.01),
    ],
)
def test_what_looks_like_a_norm_is_not(norm):
    """No pair is further apart than is proved; many records, and one that changes sign."""
    found = dpjax.prove_sensitivity(norm, VECTORS, bounds=(-10, 10), norm="l2")
    rng = np.random.default_rng(0)
    for row in (np.full(4, 10.0), rng.choice([-10.0, 10], 4), np.array([10.0, -10, 0, 0])):
        first = np.full((100, 4), -row).astype(np.float32)
        second = np.array(first)
        second[0] = row
        assert distance(norm(first)[None], norm(second)[None], "l2")[0] <= found.value


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (
            lambda x: lax.scan(lambda c, t: (c * c + t, None), 0.0, jnp.arange(5e3))[0] + x,
            "5000 steps",
        ),
        (lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0))), "negative padding"),
        (lambda x: TABLE[(3 * x).astype(int) + 1], "out of bounds"),
        (lambda x: lax.dynamic_slice(x, (code(x)[0, 0], 0), (1, 1)), "indices are public"),
        (lambda x: x**0.5, "may be 0 or negative"),
        (lambda x: (x + 2) ** (x + 2), "public float"),
        (lambda x: jnp.tile(x, (100, 1)).sum(0), "copies"),
        (lambda x: jnp.var(x[:, 0], ddof=N), "may be 0"),
        (lambda x: jnp.interp(x, np.float32([0.3, -0.5, 0.4]), TABLE[:, 0]), "may be 0"),
        (lambda x: TABLE[code(x)[:, 0], (x[:, 1] > 0).astype(int)], "whole rows"),
        (lambda x: x[np.array([0, 1]), :1], "only along one axis"),
        (lambda x: x[np.eye(2, dtype=int), np.eye(2, dtype=int)], "single list"),
        (lambda x: jnp.zeros(3).at[1 + code(x)[:, 0]].add(1, mode="promise_in_bounds"), "bounds"),
        (lambda x: jnp.zeros(3).at[code(x)[:, 0]].set(x[:, 1]), "which of them writes last"),
        (lambda x: jax.ops.segment_max(x, places(x), 3), "would be infinite"),
        (lambda x: jnp.arctan2(x[:, 0], x[:, 1]), "must be above 0"),
        (lambda x: lax.pad(x, x.sum(), ((1, 0, 0), (0, 0, 0))), "public, finite number"),
        (lambda x: lax.scan(lambda c, t: (c + 1, c), x[0], jnp.zeros(0))[0], "0 steps"),
    ],
)
def test_refusals(target, match):
    spec = jax.ShapeDtypeStruct((N, 2), jnp.float32)
    with pytest.raises(NoProofError, match=match):
        dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l1")


def test_a_record_that_is_taken_three_times_counts_three_times():
    found = dpjax.prove_sensitivity(
        lambda x: x[jnp.array([0, 0, 0])].sum(0),
        jax.ShapeDtypeStruct((N, 2), jnp.float32),
        bounds=(-1, 1),
        norm="l1",
    )
    assert 12 <= found.value < 12.001


REGRESSION = {"x": jax.ShapeDtypeStruct((50, 2), jnp.float32), "y": NUMBERS}


@pytest.mark.parametrize(
    ("target", "norm"),
    [
        (targets.ridge_regression(regularization=0.1, dims=2), "l2"),
        (targets.logistic_regression(regularization=0.1, dims=2), "l2"),
        (targets.linear_svm(regularization=0.1, dims=2), "l1"),
    ],
)
def test_learners_have_the_bounds_of_their_own_proofs(target, norm):
    found = dpjax.prove_sensitivity(target, REGRESSION, bounds=(-1, 1), norm=norm, n=50)
    assert found.value == target.sensitivity(norm, n=50).value
    assert "itself" in found.explain()


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("name", query_table.CASES)
def test_queries_have_the_bounds_of_their_own_proofs(name, norm):
    query, records, *_ = query_table.CASES[name]
    found = dpjax.prove_sensitivity(query, records, bounds=(-2, 7), norm=norm)
    assert found.value == query.sensitivity(norm).value


def test_a_proved_query_is_released():
    query = queries.histogram_query(4)
    found = dpjax.prove_sensitivity(query, np.arange(8), bounds=(0, 3), norm="l1")
    private = dpjax.privatize(query, dpjax.laplace(found, epsilon=1e6))
    release = private(dpjax.random.seeded_key(0), np.arange(8))
    assert release.value.tolist() == [1, 1, 1, 5]


def test_the_smaller_of_two_proofs_counts():
    target = BoundedTarget(jnp.mean, bound=lambda n, dtype: [Fraction(5)])
    found = dpjax.prove_sensitivity(target, NUMBERS, bounds=(0, 1), norm="l1")
    assert found.value < 0.0101


def test_an_object_that_claims_a_bound_is_not_believed():
    class Claims:
        norms, relations = ("l1",), tuple(dpjax.NeighboringRelation)
        _is_rounded = False

        def _bound(self, norm, relation, n, dtype):
            return 1e-3

        def _bound_on(self, norm, relation, records):
            return 1e-3

        def __call__(self, x):
            return x.sum()

    found = dpjax.prove_sensitivity(Claims(), NUMBERS, bounds=(0, 1), norm="l1")
    assert found.value >= 1
