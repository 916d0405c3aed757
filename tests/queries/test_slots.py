"""A record counts the same in every slot, for a record that is removed moves all that follow.

Whatever maps a record to integers was looked at:

- A predicate is any code, and runs on one record at a time (`lax.map`). Under `vmap` XLA computes
  the last rows of a product by other instructions, and their floats differ in the last bit. One
  that compares floats and computes in integers alone takes all records at once.
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
from dpjax._tracing._walks import primitives
from dpjax.queries import (
    _k_means,
    _moments,
    _second_moments,
    _sums,
)
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
        return [query._integers.of_present(records, there) for query in asked]

    for record in np.random.default_rng(1).normal(size=(30, 8)).astype("float32"):
        records = jnp.asarray(np.tile(record, (capacity, 1)))
        limits = [jnp.min(x) for x in in_all_slots(records)]
        assert {int(count) for count in counts(records, limits)} <= {0, capacity}


EXACT = {
    "less": lambda r: r["x"] < 0.5,
    "between": lambda r: (r["x"] >= 1e-30) & ~(r["x"] >= jnp.inf),
    "equal": lambda r: r["x"] == 0,
    "a coordinate": lambda r: r["v"][1] > r["v"][-1],
    "all": lambda r: jnp.all(r["v"] > -2),
    "chosen": lambda r: jnp.where(r["b"], r["x"], r["v"][0]) > 0,
    "not NaN": lambda r: ~jnp.isnan(r["x"]),
    "wraps": lambda r: jnp.sum(r["w"] * r["w"] + 7) > jnp.max(r["w"]),
    "of a table": lambda r: jnp.any(r["i"] == jnp.array([3, -1], jnp.int32)),
}
ROUNDING = {
    "sum": lambda r: r["x"] + 1 > 0,
    "product": lambda r: 2 * r["x"] > 0,
    "root": lambda r: jnp.sqrt(r["x"]) > 0,
    "dot": lambda r: r["v"] @ r["v"] > 1,
    "in jit": lambda r: jax.jit(jnp.exp)(r["x"]) > 1,
    "in a branch": lambda r: jax.lax.cond(r["b"], jnp.sin, jnp.cos, r["x"]) > 0,
    "of an integer": lambda r: r["w"][0].astype(jnp.float32) > 0.5,
    "to an integer": lambda r: r["x"].astype(jnp.int32) > 0,
    "a float's minimum": lambda r: jnp.minimum(r["x"], 1) > 0,
    "a float's sum": lambda r: jnp.sum(r["v"]) > 0,
    "division by 0": lambda r: jax.lax.div(r["w"][0], r["w"][1]) > 0,
    "remainder": lambda r: r["w"][0] % 2 == 0,
    "one of three": lambda r: jax.lax.select_n(r["w"][0], *(jnp.bool_(b) for b in (0, 1, 0))),
    "subnormal": lambda r: r["x"] > 1e-40,
    "subnormal table": lambda r: jnp.any(r["x"] > jnp.array([1e-40, 1.0])),
    "drawn": lambda r: jax.random.bits(jax.random.key(r["w"][0])) > 5,
}
ODD = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-45, 1.2e-38, 0.5, 1e38, 3.0]


def odd_records(count):
    choose = np.random.default_rng(2).choice
    numbers = np.asarray(ODD, np.float32)
    integers = np.array([0, 1, -1, 3, 2**31 - 1, -(2**31), 46341], np.int32)
    return {
        "x": choose(numbers, count),
        "v": choose(numbers, (count, 3)),
        "w": choose(integers, (count, 2)),
        "i": choose(integers, count).astype(np.int8),
        "b": choose([False, True], count),
    }


def operations_of_count(predicate):
    return primitives(jax.make_jaxpr(queries.counting_query(predicate))(odd_records(9)).jaxpr)


@pytest.mark.parametrize("name", EXACT)
def test_a_predicate_that_rounds_nothing_says_the_same_at_once_and_in_every_slot(name):
    """Each record over all slots; and what one alone makes of it, but that subnormal numbers are 0.

    Which instruction compares changes nothing, unless it takes subnormal numbers for 0.
    """
    assert not {"scan", "while"} & operations_of_count(EXACT[name])
    count = jax.jit(queries.counting_query(EXACT[name]))
    for capacity in (9, 67):
        for row in range(25):
            record = jax.tree.map(lambda x, row=row: x[row], odd_records(25))
            tiled = jax.tree.map(lambda x, n=capacity: np.tile(x, (n, *(1,) * x.ndim)), record)
            flushed = {
                key: np.where(np.abs(x) < 1e-38, 0, x) if key in "xv" else x
                for key, x in record.items()
            }
            flushed["i"] = flushed["i"].astype("int32")  # As a predicate sees narrow integers.
            expected = bool(EXACT[name](jax.tree.map(jnp.asarray, flushed)))
            assert int(count(tiled)) == capacity * expected


@pytest.mark.parametrize("name", ROUNDING)
def test_a_predicate_that_may_round_takes_one_record_at_a_time(name):
    assert "scan" in operations_of_count(ROUNDING[name])


def test_a_limit_that_is_traced_may_be_subnormal():
    limited = lambda x: queries.counting_query(lambda r: r > x)(jnp.ones(3))  # noqa: E731
    assert "scan" in primitives(jax.make_jaxpr(limited)(1.0).jaxpr)


def test_what_is_checked_is_what_runs():
    """A predicate that Python changes between two traces rounds in none that runs."""
    calls = []

    def predicate(record):
        calls.append(record)
        return record > 0 if len(calls) == 1 else jnp.exp(record) > 1

    assert "exp" not in primitives(
        jax.make_jaxpr(queries.counting_query(predicate))(jnp.ones(3)).jaxpr
    )


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


QUICK = ["ball", "clusters", "edges", "polynomials"]
SLOW = ["sums", "mean", "variance", "line", "ranks"]


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def total(request, monkeypatch):
    """What makes a sum of integers of records of 8 coordinates, before it is rounded."""
    for module in (_sums, _second_moments, _k_means):
        monkeypatch.setattr(module, "coarse", lambda total, bits: total.low)
    some, between = jnp.ones((4, 8)), {"lower": -0.3, "upper": 1.7}
    ball, _, _ = _moments.public_ball(0.3, 1.7, 8)

    def moments(vectors, dimension):
        return second_moments_query(vectors, dims=dimension, capacity=5003).of_present

    def clusters(records, present):
        centers = jnp.stack([WEIGHTS, -WEIGHTS]) / 10
        return _k_means._totals(in_ball(ball(records), present), present, centers, bits=0)

    def ranks(records, present):
        scores = queries.quantile_scores(0.5, grid=np.linspace(-3, 3, 50))
        return jnp.concatenate([x.low for x in scores.partial(records[:, 0], present)])

    def edges(records, present):
        return queries.histogram_query(np.linspace(-3, 3, 50))._integers.of_present(
            records[:, 0], present
        )

    def variance():
        vectors = vectors_of(
            _moments,
            monkeypatch,
            lambda: queries.private_variance(None, some[:, 0], **between, epsilon=1.0),
        )
        return moments(lambda r: vectors(r[:, 0]), 1)

    def line():
        query = _second_moments._line_query(
            lambda r: (r[:, 1:] / 1.3, r[:, :1] / 0.7), dims=7, capacity=5003
        )
        return query.of_present

    def polynomials():
        query = _second_moments.bernstein_query(
            lambda r: (r[:, 1:3] / 1.3, r[:, :1] / 0.7),
            degrees=(2, 2, 1),
            capacity=5003,
            in_cube=False,
        )
        return query.of_present

    return {
        "sums": lambda: queries.sum_query(**between, capacity=5003, dims=8)._integers.of_present,
        "mean": lambda: _sums.centered_sums(-0.3, 1.7, 5003, 8).of_present,
        "variance": variance,
        "ball": lambda: moments(ball, 8),
        "line": line,
        "polynomials": polynomials,
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
