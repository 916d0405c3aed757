"""Sums: that of floats depends on the order, so its sensitivity is not that of the real sum."""

import jax
import jax.numpy as jnp
import numpy as np

import dpjax

N = 2**20
QUERY = dpjax.queries.sum_query(lower=0.0, upper=1.0, capacity=N)


def both_sums(records):
    return jnp.sum(records), QUERY(records)


def test_reordering_moves_a_float_sum_and_not_an_exact_one():
    records = np.random.default_rng(0).random(N, np.float32)
    sums = jax.jit(both_sums)
    orders = [records, records[::-1].copy(), np.sort(records), np.sort(records)[::-1].copy()]
    floats, exact = zip(*(sums(jnp.asarray(order)) for order in orders), strict=True)
    # The control: one record moves a mean of [0, 1] by 1; the order alone moves a sum by this much.
    sequential = [float(np.cumsum(order, dtype=np.float32)[-1]) for order in orders]
    assert len({float(x) for x in floats} | set(sequential)) > 1
    assert max(sequential) - min(sequential) > 1
    assert len({int(units) for units in exact}) == 1


def test_neighbors_of_an_exact_sum_are_within_its_sensitivity():
    records = np.random.default_rng(1).random(N, np.float32)
    bound = QUERY.sensitivity().value
    sums = jax.jit(both_sums)
    before = sums(jnp.asarray(records))[1]
    for replaced in (0.0, 1.0, np.nan, np.inf, -np.inf, 0.5):
        records[7] = replaced
        assert abs(int(sums(jnp.asarray(records))[1]) - int(before)) <= bound
