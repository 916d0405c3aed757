"""Cells, ratios of sums, clips by a choice and loops over records, on all pairs of neighbors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of
from random_programs import distance

TABLE = np.array([0.5, -2.0, 1.0], np.float32)
FIRST, SECOND = all_pairs(VALUES)
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE


def _counts(x):
    return jnp.zeros(3).at[jnp.round(x).astype(int) + 1].add(1.0)


def _entropy(x):
    p = _counts(x) / N
    return -(p * jnp.log(jnp.maximum(p, 1e-12)))


def _reciprocals(x):
    counts = _counts(x)
    return jnp.where(counts > 0, 1 / jnp.where(counts > 0, counts, 1.0), 0.0)


def _reciprocal_of_a_sum(x):
    total = x.sum()
    return jnp.where(total > 0.5, 1 / total, 0.1 * total)


def _means(x):
    places = (x > 0).astype(int)
    return jnp.zeros(3).at[places].add(x) / jnp.maximum(jnp.zeros(3).at[places].add(1.0), 1.0)


def _rows(x):
    rows = x[:, None] * TABLE[None]
    return rows, jnp.linalg.norm(rows, axis=1, keepdims=True)


def _clipped(x):
    rows, norms = _rows(x)
    return jnp.where(norms > 0.7, rows / norms, rows)


def _clipped_by_a_factor(x):
    rows, norms = _rows(x)
    return rows * jnp.where(norms <= 1.5, 1.0, 1.5 / norms)


def _clipped_by_a_chosen_product(x):
    rows, norms = _rows(x)
    return jnp.where(norms > 0.7, rows * lax.stop_gradient(0.7 / jnp.maximum(norms, 0.01)), rows)


def _clipped_by_a_minimum(x):
    rows, norms = _rows(x)
    return rows * jnp.minimum(1.0, 0.5 / norms)


def _clipped_tree(x):
    tree = (x[:, None, None] * TABLE[None, None], (0.5 * x)[:, None])
    norms = jnp.sqrt(sum(jnp.sum(z.reshape(N, -1) ** 2, 1) for z in tree))
    factors = 1 / jnp.maximum(1.0, norms)
    return [jnp.tensordot(factors, z, 1, precision="highest") for z in tree]


def _log_rank(x):
    at_risk = (x[None] >= TABLE[:, None]).sum(1)
    inside = (x[None] >= TABLE[:, None]) & (x[None] < TABLE[:, None] + 0.7)
    return jnp.cumprod(1 - inside.sum(1).astype(float) / jnp.maximum(at_risk, 1).astype(float))


def _auc(x):
    positive = x > 0
    above = (x[:, None] > x[None]).astype(float) + 0.5 * (x[:, None] == x[None]).astype(float)
    pairs = positive[:, None] & ~positive[None]
    return (above * pairs.astype(float)).sum() / jnp.maximum(pairs.sum(), 2).astype(float)


def _chosen_from_one(x):
    y = jnp.exp(x)
    return jnp.where(y < 1, y, y)


PROGRAMS = {
    "entropy of counts": _entropy,
    "reciprocals of counts": _reciprocals,
    "a quotient that is chosen": lambda x: jnp.where(x > 0.4, 1 / x, x),
    "a root that is chosen": lambda x: jnp.where(x > 0.2, jnp.sqrt(x), -x),
    "a logarithm that is chosen": lambda x: jnp.where(x < 0.1, 2.0, jnp.log(x)),
    "a slope of softplus": lambda x: jnp.exp(x - jnp.logaddexp(0.0, x)),
    "a product of one number": lambda x: x * jnp.exp(-x) * (1 - x),
    "a jump in cells": lambda x: jnp.where(x > 0.1, jnp.floor(3 * x), x * x - x),
    "a choice between an array and itself": _chosen_from_one,
    "a jump of a sum": lambda x: jnp.floor(2 * x.sum()) - 2 * x.sum(),
    "a sum beside a choice": _reciprocal_of_a_sum,
    "counts with the sign of a sum": lambda x: (jnp.exp(-_counts(x)) * jnp.tanh(9 * x.sum())).sum(),
    "a mean of some": lambda x: (
        ((x > 0).astype(float) * x).sum() / jnp.maximum((x > 0).sum(), 1).astype(float)
    ),
    "a precision": lambda x: (
        ((x > 0) & (x < 0.5)).sum().astype(float) / jnp.maximum((x > 0).sum(), 1).astype(float)
    ),
    "means by place": _means,
    "a weighted mean": lambda x: (
        jnp.dot(jnp.abs(x), x - 0.3, precision="highest") / jnp.maximum(jnp.abs(x).sum(), 0.6)
    ),
    "a ratio to itself": lambda x: jnp.abs(x).sum() / jnp.maximum(jnp.abs(x).sum(), 1.3),
    "survival": _log_rank,
    "area under a curve": _auc,
    "squares of repeated rows": lambda x: (
        jnp.square(x)[:, None] * jnp.ones((N, 3)) * jax.nn.one_hot((x + 1).astype(int), 1)
    ).sum(1),
    "clipped by a choice": _clipped,
    "clipped by a chosen factor": _clipped_by_a_factor,
    "clipped by a chosen product": _clipped_by_a_chosen_product,
    "clipped by a minimum": _clipped_by_a_minimum,
    "a sum of clipped trees": _clipped_tree,
    "a moving average": lambda x: lax.scan(lambda c, v: (1.5 * c + v, c * v), 0.3, x),
    "a moving average, backward": lambda x: lax.scan(
        lambda c, v: (jnp.maximum(0.5 * c, v), jnp.floor(2 * c)), 0.3, x, reverse=True
    ),
    "a loop over two arrays": lambda x: lax.scan(
        lambda c, v: (c * v[0] + v[1], v[1] - c), 0.1, (x, jnp.sort(x))
    ),
}


@pytest.fixture(scope="module")
def moved():
    run = jax.jit(jax.vmap(lambda x: {name: program(x) for name, program in PROGRAMS.items()}))
    return run(FIRST), run(SECOND)


def _distance(first, second, norm):
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    found = np.stack([np.asarray(distance(a, b, norm), float) for a, b in leaves])
    return np.linalg.norm(found, {"l1": 1, "l2": 2, "linf": np.inf}[norm], axis=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_pair_lies_further_apart(name, moved):
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    for norm, bound in bounds_of(PROGRAMS[name], spec, (-1, 1)).items():
        assert _distance(moved[0][name], moved[1][name], norm).max() <= bound


def proved(target, norm, n=40, bounds=(0, 1)):
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)
    return dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm).value


def test_bounds_are_tight():
    """Without cells, ratios and loops by record these were 2 to 800 times larger."""

    def precision(x):
        said = x > 0.5
        return (said & (x < 0.7)).sum().astype(float) / jnp.maximum(said.sum(), 10).astype(float)

    def mean(x):
        said = (x > 0.5).astype(float)
        return (x * said).sum() / jnp.maximum(said.sum(), 10)

    def entropy(x):
        p = jnp.zeros(5).at[(x > 0.5).astype(int)].add(1.0) / 40
        return -(p * jnp.log(jnp.maximum(p, 1e-12))).sum()

    def average(x):
        return lax.scan(lambda c, v: (0.9 * c + 0.1 * v, c), 0.0, x)[0]

    assert proved(precision, "l1") < 0.1001
    assert proved(mean, "l1") < 0.1001
    assert proved(average, "l1") < 0.1001
    assert proved(lambda x: (x[1:] * x[:-1]).sum(), "l1") < 2.001
    assert proved(lambda x: jnp.searchsorted(jnp.sort(x), np.float32([0.2, 0.7])), "linf") < 1.001
    assert proved(entropy, "l1") < 2 * np.log(40) / 40 * 1.001


def test_what_looks_like_a_ratio_of_sums_is_none():
    """Places, weights or divisors that differ give the bound of the walk."""

    def means(x, shift, mode):
        i = (x > 0.5).astype(int)
        counts = jnp.zeros(2).at[i + shift if shift else i].add(1.0, mode=mode)
        return jnp.zeros(2).at[i].add(x) / jnp.maximum(counts, 1.0)

    assert proved(lambda x: means(x, 0, None), "linf") < 1.001
    for mode in ("drop", "clip"):
        assert proved(lambda x, mode=mode: means(x, 1, mode), "linf") > 20

    def other_weights(x):
        mask, other = (x > 0.5).astype(float), (x < 0.7).astype(float)
        return (x * mask).sum() / jnp.maximum(other.sum(), 1)

    def several_terms(x):  # A record has three terms in these sums.
        said = (x > 0.5).astype(float)
        return (x * said).sum() / jnp.maximum(said.sum(), 6)

    assert proved(other_weights, "l1") > 20

    def other_axes(x):  # The weights of a divisor are all of one record.
        said = (x > 0.5).astype(float)
        return (x * said).sum(0) / jnp.maximum(said.sum(1), 1)

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert dpjax.prove_sensitivity(other_axes, square, bounds=(0, 1), norm="linf").value > 7
    matrix = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    bound = dpjax.prove_sensitivity(several_terms, matrix, bounds=(0, 1), norm="l1").value
    assert bound >= 0.5


def _parts(v):
    """Two columns, which are two results of one operation."""
    return [x.sum(1) for x in jnp.split(v, 2, 1)]


def _over_the_other(v):
    top, bottom = _parts(v)
    return top.sum() / jnp.maximum(bottom.sum(), 4)


def _with_the_other(v):
    return (v[:, 1].sum() + v[:, 0].sum()) / jnp.maximum(v[:, 1].sum(), 4)


def _entries_of_the_chosen(v):
    chosen = v[:, 1] > 0.5
    entries = (chosen[:, None] & (v > 0.2)).sum().astype(float)
    return entries / jnp.maximum(chosen.sum(), 4).astype(float)


def _signed_weights(v):
    return jnp.dot(v[:, 0], v[:, 1], precision="highest") / jnp.maximum(v[:, 1].sum(), 2)


def _rows_of_all(v):
    weights, rows = 2 + v[:, 1:], jnp.tanh(8 * v[:, 0].sum()) * v[:, 1:]
    return jnp.matmul(weights.T, rows, precision="highest") / weights.sum(0)[:, None]


HALF = [[1, 1]] * 4 + [[1, 0]] * 3
# A ratio that is none, the records that stay, and the one that is replaced by another.
NO_RATIOS = {
    "two results of one operation": (_over_the_other, HALF, [1, 0], [0, 1]),
    "more is added": (_with_the_other, HALF, [1, 0], [0, 1]),
    "several entries of a record": (
        _entries_of_the_chosen, [[1, 1]] * 3 + [[0, 0]] * 4, [0, 0], [1, 1],
    ),
    "weights below 0": (_signed_weights, [[1, 1]] * 5 + [[-1, -1]] * 2, [-1, -1], [-1, 1]),
    "rows of all records": (_rows_of_all, [[0, 1]] * 7, [-1, 1], [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RATIOS)
def test_what_looks_like_a_ratio_moves_further(name):
    target, others, *ends = NO_RATIOS[name]
    rows = [np.array([*others, end], np.float32) for end in ends]
    first, second = map(target, map(jnp.asarray, rows))
    spec, bounds = jax.ShapeDtypeStruct((8, 2), jnp.float32), (np.min(rows), 1)
    assert 0 < jnp.abs(first - second).max() <= bound_of(target, spec, bounds, "linf")


def test_what_looks_like_a_clip_by_choice_is_none():
    """Rows that are chosen by another norm, or on the wrong side, keep the bound of the walk."""
    spec = jax.ShapeDtypeStruct((8, 3), jnp.float32)

    def bound(program):
        try:
            return dpjax.prove_sensitivity(program, spec, bounds=(-9, 9), norm="l2").value
        except dpjax.proving.NoProofError:
            return np.inf

    norm = lambda x: jnp.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    assert bound(lambda x: jnp.where(norm(x) > 2, x / norm(x), x)) < 4.001
    assert bound(lambda x: jnp.where(norm(x) > 2, x, x / norm(x))) > 20
    assert bound(lambda x: jnp.where(norm(x / 9) > 2, x / norm(x), x)) > 20
    assert bound(lambda x: jnp.where(norm(x).T > 2, x[:, :1] / norm(x), x[:, :1])) > 10
    assert bound(lambda x: jnp.where(x > 2, x / norm(x), x)) > 10
    # Where no column is longer than 2, a row may be 2 * 3^.5 long.
    columns = lambda x: jnp.linalg.norm(x, axis=0, keepdims=True)  # noqa: E731
    assert bound(lambda x: x * jnp.where(columns(x) <= 2, 1.0, 2 / (norm(x) + 0.1))) > 20
    # A negative multiple of a unit vector is 5 long.
    assert bound(lambda x: jnp.where(norm(x) > 1, x * (-5 / (norm(x) + 0.1)), x)) > 9.9


def test_a_row_that_is_not_clipped_may_be_longer():
    """where(||x|| > 3, x / ||x||, x) leaves rows of length 3."""
    spec = jax.ShapeDtypeStruct((8, 3), jnp.float32)

    def program(x):
        norms = jnp.linalg.norm(x, axis=1, keepdims=True)
        return jnp.where(norms > 3, x / norms, x)

    bound = dpjax.prove_sensitivity(program, spec, bounds=(-9, 9), norm="l2").value
    assert 6 <= bound < 6.001


@pytest.mark.parametrize("level", [-0.1, 0.0])
def test_a_choice_of_nan_is_refused(level):
    """Roots of negative numbers, and quotients by 0, are chosen here."""
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    root = lambda x: jnp.where(x > -0.3, jnp.sqrt(x), 0)  # noqa: E731
    for program in (root, lambda x: jnp.where(x > level, 1 / x, 0)):
        with pytest.raises(dpjax.proving.NoProofError, match="may be"):
            dpjax.prove_sensitivity(program, spec, bounds=(-1, 1), norm="l1")


def test_a_sort_by_equal_records_depends_on_slots():
    spec = jax.ShapeDtypeStruct((6, 2), jnp.float32)
    records = dpjax.queries.PaddedRecords(spec, jax.ShapeDtypeStruct((6,), jnp.bool_))

    def target(d):
        return lax.sort([d.records[:, 0], d.records[:, 1]], num_keys=1)[1][0]

    with pytest.raises(dpjax.proving.NoProofError, match="in the order of their slots"):
        dpjax.prove_sensitivity(
            target, records, bounds=(0, 1), norm="l1", relation=ADDED
        )  # fmt: skip


def bound_of(target, spec, bounds, norm="l2"):
    """The proved bound; infinity if there is no proof."""
    try:
        return dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm).value
    except dpjax.proving.NoProofError:
        return np.inf


def test_counts_of_numbers_other_than_0_are_no_weights():
    """As a boolean, 5 is 1: a mean of the numbers above 0 is up to 5."""
    spec = jax.ShapeDtypeStruct((5,), jnp.int32)

    def program(x):
        return x.sum() / jnp.maximum(x.astype(bool).sum(), 1)

    first, second = jnp.zeros(5, int), jnp.zeros(5, int).at[0].set(5)
    assert abs(program(second) - program(first)) <= bound_of(program, spec, (0, 5))


def test_known_cells_of_one_base_do_not_bound_unknown_cells():
    """Where n + a lies in its first cell, 1 / (n + a) is refused, and it may be chosen."""
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        n, a = x[:, 0], x[:, 1]
        return jnp.where(n > 0.4, 1 / (n + a), 0.0).sum()

    first = jnp.zeros((5, 2))
    moved = program(first.at[0, 0].set(0.4001)) - program(first)
    assert 2.4 < moved <= bound_of(program, spec, (0, 100))


def test_a_branch_that_may_divide_by_0_is_refused():
    spec = jax.ShapeDtypeStruct((5,), jnp.float32)

    def program(x):
        return lax.cond(x[0] > 0.5, lambda: 1 / x[1:].sum(), lambda: 0.0)

    with pytest.raises(dpjax.proving.NoProofError, match="may be 0"):
        dpjax.prove_sensitivity(program, spec, bounds=(0, 1), norm="l1")


@pytest.mark.parametrize(
    "longer",
    [
        lambda norm: jnp.maximum(norm, 5.0) > 1,
        lambda norm: norm + 5.0 > 1,
        lambda norm: jnp.sqrt(norm**2 + 5.0) > 1,
        lambda norm: norm > -1,
    ],
)
def test_a_row_of_zeros_is_not_divided_by_its_norm(longer):
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        norm = jnp.linalg.norm(x, axis=1, keepdims=True)
        return jnp.where(longer(norm), x / norm, x).sum(0)

    assert jnp.isnan(program(jnp.zeros((5, 2)))).all()
    assert bound_of(program, spec, (-9, 9)) == np.inf


def test_a_divisor_above_0_clips_rows_that_any_condition_chooses():
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        norm = jnp.sqrt((x**2).sum(1, keepdims=True) + 1e-6)
        return jnp.where(norm > 2, 2 * x / norm, x).sum(0)

    assert 4 <= bound_of(program, spec, (-9, 9)) < 4.01


def test_a_negative_factor_does_not_clip():
    """min(-5, 1 / ||x||) is -5."""
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        norm = jnp.linalg.norm(x, axis=1, keepdims=True)
        return jnp.where(norm > 1, x * jnp.minimum(-5.0, 1 / (norm + 0.1)), x).sum(0)

    assert bound_of(program, spec, (-9, 9)) > 20


def test_a_root_of_minus_0_is_no_norm():
    """1 / sqrt(-0) is -infinity."""
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        squares = jnp.maximum((x**2).sum(1, keepdims=True), -0.0)
        return (x * jnp.minimum(1.0, 1 / jnp.sqrt(squares))).sum(0)

    assert bound_of(program, spec, (-9, 9)) == np.inf


def test_a_program_with_several_results_is_no_clip():
    spec = jax.ShapeDtypeStruct((5, 2), jnp.float32)

    def program(x):
        norm = jnp.broadcast_to(jnp.linalg.norm(x, axis=1, keepdims=True), x.shape)
        chosen = jax.jit(lambda a, b: (lax.select_n(norm > 1, a, b), 2 * a))
        first, second = chosen(x, x / jnp.maximum(norm, 1e-3))
        return first.sum(0) + second.sum(0)

    assert bound_of(program, spec, (-1, 1)) >= 6


def guarded(of_chosen, least):
    """A sum of chosen numbers, divided by how many there are."""

    def program(database):
        chosen = database["w"] > 0.5
        total = of_chosen(chosen, database["x"])
        return total / least(chosen.sum()).astype(total.dtype)

    return program


def bound_of_chosen(program, n):
    records = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name in ("x", "w")}
    bounds = {"x": (-1, 1), "w": (0, 1)}
    return dpjax.prove_sensitivity(program, records, bounds=bounds, norm="l1").value


def most_moved(program):
    """By one of three records, of all databases of corners."""
    rows = np.array([*itertools.product((-1.0, 0.0, 1.0), (0.0, 1.0))], np.float32)
    places = np.array([*itertools.product(range(6), repeat=3)])
    found = jax.vmap(program)({"x": rows[places][..., 0], "w": rows[places][..., 1]})
    apart = np.abs(np.asarray(found)[:, None] - np.asarray(found)[None])
    return apart[(places[:, None] != places[None]).sum(-1) == 1].max()


@pytest.mark.parametrize("least", [lambda n: jnp.where(n > 0, n, 1), lambda n: jnp.maximum(n, 1)])
@pytest.mark.parametrize(
    "of_chosen",
    [
        lambda m, x: jnp.where(m, x, 0).sum(),
        lambda m, x: x.sum(where=m),
        lambda m, x: (m * x).sum(),
    ],
)
def test_an_average_of_chosen_numbers_moves_by_their_range(of_chosen, least):
    """From -1 to 1, however it is written. JAX casts the literal of a guard to the dtype of n."""
    with jax.numpy_dtype_promotion("standard"):
        program = guarded(of_chosen, least)
        assert most_moved(program) == 2
        assert 2 <= bound_of_chosen(program, 30) < 2.001


def test_a_choice_of_another_number_than_0_is_no_product():
    program = guarded(lambda m, x: jnp.where(m, x, 1).sum(), lambda n: jnp.maximum(n, 1))
    assert 2 < most_moved(program) <= bound_of_chosen(program, 3)
