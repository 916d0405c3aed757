"""A record counts the same in every slot, for a record that is removed moves all that follow.

Whatever maps a record to integers was looked at:

- A predicate is any code, and runs on one record at a time (`lax.map`). Under `vmap` XLA computes
  the last rows of a product by other instructions, and their floats differ in the last bit.
- Codes, edges, quantiles and names compare, which rounds nothing.
- Sums, averages, vectors in a ball and clusters round, but never a sum of products: each of their
  operations is one that IEEE 754 rounds alone, whatever instruction carries it out (`in_ball`). The
  nearest cluster is found in integers, and so is the squared length of a vector.
- MWEM, the workloads and `select_each` see nothing but these integers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import NeighboringRelation, queries
from dpjax.queries import (
    _bounded_sums,
    _covariance,
    _k_means,
    _linear_regression,
    _means,
    _second_moments,
)
from dpjax.queries._quantiles import _counts_beside
from dpjax.queries._second_moments import in_ball, second_moments_query

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
CAPACITIES = (9, 67, 100, 1003, 5003)
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
SCORES = (
    lambda r: jnp.dot(r, WEIGHTS),
    lambda r: jax.nn.sigmoid(r @ WEIGHTS),
    jnp.linalg.norm,
    lambda r: jnp.exp(r[0]),
    lambda r: jnp.tanh(r[1]) * r[2] + r[3],
)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_predicate_says_the_same_in_every_slot(capacity):
    """Of a score over the least float that `vmap` makes of the record in any slot."""
    there = jnp.ones(capacity, bool)
    in_all_slots = jax.jit(jax.vmap(lambda record: [score(record) for score in SCORES]))

    @jax.jit
    def counts(records, limits):
        pairs = zip(SCORES, limits, strict=True)
        asked = [queries.counting_query(lambda r, s=s, x=x: s(r) > x) for s, x in pairs]
        return [query.total(records, there) for query in asked]

    for record in np.random.default_rng(1).normal(size=(30, 8)).astype("float32"):
        records = jnp.asarray(np.tile(record, (capacity, 1)))
        limits = [jnp.min(x) for x in in_all_slots(records)]
        assert {int(count) for count in counts(records, limits)} <= {0, capacity}


def test_a_predicate_moves_by_one_where_a_record_is_removed():
    """And another one, which is at the limit, moves up by one slot."""
    capacity, generator = 1003, np.random.default_rng(0)
    score, far = SCORES[0], np.asarray(WEIGHTS)
    in_all_slots = jax.jit(jax.vmap(score))
    count = jax.jit(
        lambda database, limit: queries.counting_query(lambda r: score(r) > limit)(database)
    )
    reach = queries.counting_query(score).sensitivity(relation=ADD).value
    for record in generator.normal(size=(10, 8)).astype("float32"):
        found = np.asarray(in_all_slots(jnp.asarray(np.tile(record, (capacity, 1)))))
        with_it = np.concatenate([far[None], np.tile(-far, (999, 1)), record[None]])
        for limit in found[999:1001]:
            more, fewer = (
                int(count(queries.padded_records(x, capacity=capacity), limit))
                for x in (with_it, with_it[1:])
            )
            assert abs(more - fewer) <= reach


def vectors_of(module, monkeypatch, release):
    """How a private statistic makes vectors of its records."""
    found = []
    monkeypatch.setattr(
        module, "released_moments", lambda key, database, vectors, *_, **__: found.append(vectors)
    )
    release()
    return found[0]


QUICK = ["ball", "clusters", "edges"]
SLOW = ["sums", "mean", "variance", "line", "ranks"]


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def total(request, monkeypatch):
    """What makes a sum of integers of records of 8 coordinates, before it is rounded."""
    for module in (_bounded_sums, _means, _second_moments, _k_means):
        monkeypatch.setattr(module, "coarse", lambda total, bits: total.low)
    some, between = jnp.ones((4, 8)), {"lower": -0.3, "upper": 1.7}
    ball, _, _ = _covariance.public_ball(0.3, 1.7, 8)

    def moments(vectors, dimension):
        return second_moments_query(vectors, dims=dimension, capacity=5003).total

    def clusters(records, present):
        centers = jnp.stack([WEIGHTS, -WEIGHTS]) / 10
        return _k_means._totals(in_ball(ball(records), present), present, centers, bits=0)

    def ranks(records, present):
        below, above = _counts_beside(records[:, 0], present.astype(int), np.linspace(-3, 3, 50))
        return jnp.stack([below, above])

    def edges(records, present):
        return queries.histogram_query(np.linspace(-3, 3, 50)).total(records[:, 0], present)

    def variance():
        vectors = vectors_of(
            _covariance,
            monkeypatch,
            lambda: queries.private_variance(None, some[:, 0], **between, epsilon=1.0),
        )
        return moments(lambda r: vectors(r[:, 0]), 1)

    def line():
        database = {"x": some[:, 1:], "y": some[:, 0]}
        vectors = vectors_of(
            _linear_regression,
            monkeypatch,
            lambda: queries.private_linear_regression(
                None, database, x_radius=1.3, y_radius=0.7, epsilon=1.0
            ),
        )
        return moments(lambda r: vectors({"x": r[:, 1:], "y": r[:, 0]}), 8)

    return {
        "sums": lambda: queries.sum_query(**between, capacity=5003, dims=8).total,
        "mean": lambda: _means._centered_sums(-0.3, 1.7, 5003, 8).total,
        "variance": variance,
        "ball": lambda: moments(ball, 8),
        "line": line,
        "clusters": lambda: clusters,
        "edges": lambda: edges,
        "ranks": lambda: ranks,
    }[request.param]()


@pytest.mark.parametrize(
    "capacity", [1003, *(pytest.param(c, marks=pytest.mark.slow) for c in CAPACITIES if c != 1003)]
)
def test_a_record_is_the_same_integers_in_every_slot(total, capacity):
    """In all slots at once it counts as often as there are slots, modulo 2^32."""
    everywhere, summed = jnp.ones(capacity, bool), jax.jit(total)
    once = jnp.arange(capacity) == capacity // 2
    generator = np.random.default_rng(2)
    scales = 10.0 ** generator.uniform(-1, 2, (20, 1))
    for record in (scales * generator.normal(size=(20, 8))).astype("float32"):
        records = jnp.asarray(np.tile(record, (capacity, 1)))
        one, all_of_them = (
            np.asarray(summed(records, there)).astype(np.uint32) for there in (once, everywhere)
        )
        np.testing.assert_array_equal(all_of_them, one * np.uint32(capacity))
