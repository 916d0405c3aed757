"""Proofs under add-or-remove-one: records leave, and all others may change their slots."""

import itertools
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
import random_programs as programs
from dpjax.proving import Ball, Categories, NoProofError
from dpjax.proving._exact_variances import ExactVariance
from dpjax.queries import PaddedRecords, histogram_query, padded_records
from random_programs import distance

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "500"))
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
N, VALUES = 3, (-1.0, 0.25, 1.0)
LEVELS = np.array([-0.5, 0.3, 0.9], np.float32)
TABLE = jnp.array([0.5, -2.0, 1.0], jnp.float32)
MATRIX = np.array([[1.0, -2.0], [0.5, 1.0], [0.0, 1.0]], np.float32)


def padded(shape=(), dtype=jnp.float32, n=N):
    return PaddedRecords(
        jax.ShapeDtypeStruct((n, *shape), dtype), jax.ShapeDtypeStruct((n,), jnp.bool_)
    )


def bound(target, norm="l1", bounds=(-1, 1), records=None):
    records = padded() if records is None else records
    return dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm, relation=ADDED).value


def every_pair():
    """All databases over three values in three slots, and all databases of one record less."""
    slots = list(itertools.product((None, *VALUES), repeat=N))
    held = [Counter(x for x in row if x is not None) for row in slots]
    pairs = [
        (i, j)
        for i, j in itertools.product(range(len(slots)), repeat=2)
        if held[i].total() == held[j].total() + 1 and held[j] <= held[i]
    ]
    # What an empty slot holds is arbitrary.
    numbers = np.array([[7.0 if x is None else x for x in row] for row in slots], np.float32)
    present = np.array([[x is not None for x in row] for row in slots])
    return PaddedRecords(numbers, present), np.array(pairs).T


DATABASES, PAIRS = every_pair()


def entropy(p):
    return -(p * jnp.log(jnp.maximum(p, 1e-6))).sum()


def codes(d):
    return jnp.floor(d.records).astype(int) + 1  # Floors of records are exact, sums are not.


# Programs that do not look at slots. Some ignore which slots are empty.
PROVED = {
    "count": lambda d: d.present.sum(),
    "sum": lambda d: jnp.sum(d.records, where=d.present),
    "sum of all slots": lambda d: d.records.sum(),
    "sum plus one": lambda d: (d.records + 1).sum(),
    "product with presence": lambda d: (d.records * d.present).sum(),
    "dot": lambda d: d.records @ d.present.astype(jnp.float32),
    "dot with ones": lambda d: d.records @ np.ones(N, np.float32),
    "square": lambda d: (d.records**2).sum(),
    "histogram": lambda d: jnp.zeros(3).at[codes(d)].add(d.present.astype(jnp.float32)),
    "histogram of all slots": lambda d: jnp.zeros(3).at[codes(d)].add(1.0),
    "sums by group": lambda d: jnp.zeros(3).at[codes(d)].add(d.records),
    "a prior": lambda d: jnp.zeros(3).at[codes(d)].add(d.records) + 0.1,
    "rows by group": lambda d: jnp.zeros((3, 2)).at[codes(d)].add(
        jnp.stack([d.records, d.records**2], 1)
    ),
    "one-hot": lambda d: (jax.nn.one_hot(codes(d), 3) * d.present[:, None]).sum(0),
    "one-hot of all slots": lambda d: jax.nn.one_hot(codes(d), 3).sum(0),
    "one-hot, and": lambda d: (
        ((codes(d)[:, None] == np.arange(3)) & d.present[:, None]).sum(0)
    ),
    "one-hot, where": lambda d: (
        jnp.where(d.present[:, None], jax.nn.one_hot(codes(d), 3), 0).sum(0)
    ),
    "one-hot of two": lambda d: jnp.where(
        d.present[:, None], jax.nn.one_hot(codes(d), 3), jax.nn.one_hot(1 + codes(d), 3)
    ).sum(0),
    "one-hot of both": lambda d: (
        jnp.where(np.arange(3) < 1, jax.nn.one_hot(codes(d), 3), jax.nn.one_hot(1 + codes(d), 3))
        * d.present[:, None]
    ).sum(0),
    "half as a boolean": lambda d: (
        lax.convert_element_type(d.records / 4, bool) & d.present
    ).sum(),
    "distribution": lambda d: ((d.records[:, None] <= LEVELS) & d.present[:, None]).sum(0),
    "exp": lambda d: (jnp.exp(d.records) * d.present).sum(),
    "exp of all slots": lambda d: jnp.exp(d.records).sum(),
    "looked up": lambda d: (TABLE[codes(d)] * d.present).sum(),
    "looked up in all slots": lambda d: TABLE[codes(d)].sum(),
    "gram": lambda d: (d.records[:, None] * TABLE).T @ (d.records[:, None] * TABLE),
    "gram plus one": lambda d: (d.records[:, None] + TABLE).T @ (d.records[:, None] + TABLE),
    "gram by the sign of the sum": lambda d: (
        jnp.tanh(9 * d.records.sum()) * d.records[:, None] * TABLE
    ).T @ (d.records[:, None] * TABLE),
    "gram of one-hot": lambda d: jax.nn.one_hot(codes(d), 3).T @ jax.nn.one_hot(codes(d), 3),
    "equals itself": lambda d: ((x := jnp.exp(d.records)) == x).sum() + d.present.sum(),
    "losses": lambda d: (jnp.logaddexp(0.0, -d.records) * d.present).sum(),
    "entropy": lambda d: entropy(jnp.bincount(codes(d), d.present.astype(int), length=3) / N),
    "histogram by searching": lambda d: jnp.histogram(d.records, LEVELS)[0],
    "searched in sorted records": lambda d: jnp.searchsorted(jnp.sort(d.records), LEVELS),
    "interpolated": lambda d: (jnp.interp(d.records, LEVELS, LEVELS**2) * d.present).sum(),
    "extrema by group": lambda d: jnp.zeros(3).at[codes(d)].max(d.records),
    "is exp large": lambda d: (jnp.exp(d.records) > 1.5).sum(),
    "maximum": lambda d: d.records.max(),
    "minimum": lambda d: jnp.where(d.present, d.records, 2.0).min(),
    "any": lambda d: jnp.any((d.records > 0.5) & d.present),
    "sorted": lambda d: jnp.sort(d.records),
    "median": lambda d: jnp.median(d.records),
    "variance": lambda d: jnp.var(d.records),
    "centered": lambda d: jnp.abs(d.records - d.records.mean()).sum(),
    "mean": lambda d: jnp.sum(d.records, where=d.present) / jnp.maximum(d.present.sum(), 1),
    "is the sum large": lambda d: d.records.sum() > 0.4,
    "is the count large": lambda d: d.present.sum() > 1,
    "by record": lambda d: jax.vmap(lambda x, p: jnp.where(p, jnp.tanh(x) @ TABLE, 0.0))(
        d.records[:, None] * TABLE, d.present
    ).sum(),
    "a column": lambda d: jnp.take(d.records[:, None] * TABLE, jnp.array(1), axis=1).sum(),
    "sums by a matrix": lambda d: (d.records[:, None] * TABLE).sum(0).reshape(1, 3) @ MATRIX,
    "several": lambda d: {"n": d.present.sum(), "sum": d.records.sum()},
    "stacked": lambda d: jnp.stack([d.records, d.records**2]).sum(1),
    "joined": lambda d: jnp.concatenate([d.records[:, None], d.present[:, None] * TABLE], 1).sum(0),
    "order in a record": lambda d: jnp.cumsum(d.records[:, None] * TABLE, 1)[:, ::-1].sum(0),
    "transposed": lambda d: (d.records[:, None] * TABLE).T.reshape(3, 1, N).sum((1, 2)),
    "a wave": lambda d: (jnp.round(jnp.sin(9 * d.records)) * d.present).sum(),
}  # fmt: skip

# Programs that look at slots.
REFUSED = {
    "the records": lambda d: d.records,
    "who is present": lambda d: d.present,
    "the first": lambda d: d.records[0],
    "all but the first": lambda d: d.records[1:].sum(),
    "every second": lambda d: d.records[::2].sum(),
    "the last by a mask": lambda d: d.records.at[jnp.array([2])].get().sum(),
    "numbers of slots": lambda d: (d.records * jnp.arange(N)).sum(),
    "weights": lambda d: d.records @ TABLE,
    "weights on the left": lambda d: TABLE @ (d.records * 2),
    "cumulative": lambda d: jnp.cumsum(d.records).max(),
    "neighbors": lambda d: jnp.abs(d.records[1:] - d.records[:-1]).sum(),
    "rolled": lambda d: (jnp.roll(d.records, 1) * d.records).sum(),
    "reversed": lambda d: (d.records[::-1] * d.records).sum(),
    "behind others": lambda d: jnp.concatenate([d.records, d.records]).max(),
    "mixed": lambda d: (d.records[:, None] * jnp.ones((1, 2))).reshape(2, N).sum(1),
    "pairs": lambda d: (d.records[:, None] * d.records[None]).sum(),
    "a row of products": lambda d: (d.records[:, None] @ d.records[None])[0].sum(),
    "records at the indices of others": lambda d: d.records[codes(d)].sum(),
    "the record at one index": lambda d: jnp.take(d.records, jnp.array(1)),
    "sums in slots": lambda d: (0 * d.records).at[codes(d)].add(d.records).sum(),
    "an exact variance": lambda d: ExactVariance(0.0, 0, float(N))(d.records),
    "outer product": lambda d: jnp.outer(d.records, d.records).max(),
    "public groups": lambda d: jnp.zeros(3).at[np.array([0, 1, 1])].add(d.records),
    "scan": lambda d: jax.lax.scan(lambda c, x: (c * 0.5 + x, None), 0.0, d.records)[0],
    "sorted with a slot": lambda d: (jnp.sort(d.records) * d.records).sum() + d.records[1],
    "the index of the largest": lambda d: jnp.argmax(d.records),
    "smoothed": lambda d: jnp.convolve(d.records, LEVELS).max(),
    "sixteen bits": lambda d: d.records.astype(jnp.bfloat16).astype(jnp.float32).sum(),
    "subnormal": lambda d: (d.records > 1e-40).sum(),
}


@pytest.fixture(scope="module", autouse=True)
def usual_promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# Bounds, and what the clamp of a release puts into empty slots.
BOUNDS = {0.0: (-1, 1), -1.0: Categories(VALUES)}


@pytest.fixture(scope="module")
def values():
    def emptied(number, d):
        return PaddedRecords(jnp.where(d.present, d.records, number), d.present)

    run = jax.jit(
        jax.vmap(lambda number, d: {k: f(emptied(number, d)) for k, f in PROVED.items()}, (None, 0))
    )
    return {number: run(number, DATABASES) for number in BOUNDS}


@pytest.mark.parametrize("name", PROVED)
def test_no_pair_lies_further_apart(name, values):
    for number, bounds in BOUNDS.items():
        found = values[number][name]
        first, second = (jax.tree.map(lambda x, k=side: x[k], found) for side in PAIRS)
        for norm in programs.NORMS:
            reached = distance(first, second, norm).max()
            assert reached <= bound(PROVED[name], norm, bounds), (norm, bounds)


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_look_at_slots_are_refused(name):
    with pytest.raises(NoProofError, match=r"slot|record|pairs|16-bit|subnormal|itself|rule|exact"):
        bound(REFUSED[name])


EXACT = {"count": 1, "histogram": 1, "one-hot": 1, "one-hot, and": 1, "one-hot, where": 1}


@pytest.mark.parametrize("norm", programs.NORMS)
@pytest.mark.parametrize("name", EXACT)
def test_counts_are_exact(name, norm):
    assert bound(PROVED[name], norm) == EXACT[name]


def test_a_record_is_there_or_not():
    """Under replace-one a sum would move by the width of the interval."""
    assert 1 <= bound(PROVED["sum"]) < 1.001
    assert 90 <= bound(PROVED["sum"], bounds=(18, 90)) < 90.01
    gram, ball = (lambda d: d.records.T @ d.records), Ball(2.0)
    vectors = padded((3,))
    assert 4 <= bound(gram, "l2", ball, vectors) < 4.01
    assert 2 <= bound(lambda d: d.records.sum(0), "l2", ball, vectors) < 2.01
    small, kind = (0, 0.75), bool  # Such numbers become booleans that are larger.
    signs = bound(lambda d: lax.convert_element_type(d.records, kind).sum(), "l1", small, vectors)
    assert signs == 3
    four = Categories((1.0, 4.0))
    assert 4 <= bound(PROVED["sum"], bounds=four) < 4.001


def test_queries_agree_with_the_functions_they_compute():
    query, whole = histogram_query(4), padded(dtype=jnp.int32, n=50)

    def written(d):
        return jnp.zeros(4, int).at[d.records].add(d.present.astype(int))

    for norm in ("l1", "l2", "linf"):
        known = query.sensitivity(norm, relation=ADDED).value
        assert bound(query, norm, (0, 3), whole) == known
        assert bound(written, norm, (0, 3), whole) == known


def test_rounding_in_other_slots_counts():
    """Slots of one vector register and of the rest of a loop may round differently.

    So each slot may answer otherwise whether exp(x) is large. Comparisons of records are exact.
    """
    assert bound(PROVED["is exp large"], records=padded(n=50)) >= 50
    assert bound(lambda d: (d.records > 0.5).sum(), records=padded(n=50)) == 1


def test_the_guarantee_names_the_relation():
    target = PROVED["sum of all slots"]
    found = dpjax.prove_sensitivity(
        target, padded(n=8), bounds=(0, 1), norm="l1", relation="add-or-remove-one"
    )
    assert (found.gamma, found.n, found.relation, found.method) == (0, 8, ADDED, "proved")
    assert "other slots" in found.explain()
    private = dpjax.privatize(target, dpjax.laplace(found, epsilon=1e6))
    wild = PaddedRecords(
        jnp.array([5.0, jnp.nan, 0.5, 9.0, 9.0, jnp.inf, -jnp.inf, jnp.nan]),
        jnp.array([1, 1, 1, 0, 0, 0, 1, 0], bool),
    )
    release = private(dpjax.random.seeded_key(0), wild)
    assert abs(float(release.value) - 1.5) < 1e-3
    assert release.guarantee.relation is ADDED
    with pytest.raises(ValueError, match="n=8"):
        private(dpjax.random.seeded_key(0), padded_records(np.zeros(3), capacity=9))
    with pytest.raises((TypeError, ValueError)):
        private(dpjax.random.seeded_key(0), jnp.zeros(8))
    with pytest.raises(ValueError, match="must be the target that"):
        dpjax.privatize(lambda d: d.records.max(), dpjax.laplace(found, epsilon=1.0))


def test_plain_arrays_show_their_number_of_records():
    with pytest.raises(TypeError, match="PaddedRecords"):
        bound(jnp.sum, records=jax.ShapeDtypeStruct((N,), jnp.float32))
    numbers = PaddedRecords(padded().records, jax.ShapeDtypeStruct((N,), jnp.int32))
    with pytest.raises(ValueError, match="boolean"):
        bound(PROVED["sum"], records=numbers)


def attacked(target, rng, norm, count=400):
    """The farthest neighbors of a random search: one record leaves, all others change slots."""
    first, _, place = programs.pairs(rng, count, np.float32)
    present = rng.random(first.shape[:2]) < 0.8
    present[np.arange(count), place] = True
    fewer = present.copy()
    fewer[np.arange(count), place] = False
    order = np.argsort(rng.random(present.shape), 1)
    moved = np.take_along_axis(first, order[..., None], 1), np.take_along_axis(fewer, order, 1)

    def released(records, present):
        return target(PaddedRecords(jnp.where(present[:, None], records, 0), present))

    run = jax.jit(jax.vmap(released))
    return float(distance(run(first, present), run(*moved), norm).max())


def attack(seed, count):
    """Random programs of records, masked at the start, at the end, or not at all."""
    rng = np.random.default_rng(seed)
    records, proved = padded((programs.DIMS,), n=programs.N), 0
    steps = list(programs.STEPS)
    for _ in range(count):
        words = [*rng.choice(steps, rng.integers(0, 3)), rng.choice(list(programs.ENDS))]
        mask, norm = int(rng.integers(3)), str(rng.choice(programs.NORMS))

        def target(d, words=tuple(words), mask=mask):
            v, present = d.records, d.present[:, None]
            v = jnp.where(present, v, 0.5) if mask == 1 else v
            for word in words[:-1]:
                v = programs.STEPS[word](v).astype(v.dtype)
            v = jnp.where(present, v, 0) if mask == 2 else v
            return programs.ENDS[words[-1]](v)

        try:
            found = bound(target, norm, records=records)
        except NoProofError:
            continue
        except ValueError as error:
            if "no record changes" not in str(error):
                raise
            continue
        proved += 1
        reached = attacked(target, rng, norm)
        assert reached <= found, (seed, words, mask, norm, reached, found)
    return proved


def test_random_programs_stay_within_their_bounds():
    assert attack(0, 12) >= 4


@pytest.mark.slow
def test_many_random_programs_stay_within_their_bounds():
    assert attack(SEED, COUNT) >= 0.3 * COUNT
