"""Proofs for `PaddedRecords` under replace-one: a slot is a record, and may be emptied or filled.

A query's own bound for a replaced record takes it that both databases hold a record in the slot. So
a proof takes its bound for an added record, too. What else reaches the line is every target with a
bound of its own: queries of all kinds, alone and behind another function, scores of quantiles, and
targets that know nothing of slots.
"""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import query_table
import random_programs as programs
from dpjax import queries
from dpjax.proving import NoProofError
from dpjax.queries import PaddedRecords, sum_query
from dpjax.queries._second_moments import second_moments_query
from dpjax.targets._known_sensitivity import BoundedTarget
from random_programs import distance

SLOTS = 3
NUMBERS = np.float32([0.5, 0.7, 1.0])


def every_pair(records):
    """All databases in three slots, and all that differ from them in one slot, in any way."""
    records = jax.tree.map(np.asarray, records)
    count = len(jax.tree.leaves(records)[0])
    # What an empty slot holds is arbitrary.
    rows = [(k, True) for k in range(count)] + [(0, False), (count - 1, False)]
    slots = np.array(list(itertools.product(range(len(rows)), repeat=SLOTS)))
    chosen, present = (np.array([row[k] for row in rows])[slots] for k in (0, 1))
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(slots)), 2)
        if (slots[i] != slots[j]).sum() == 1
    ]
    return PaddedRecords(jax.tree.map(lambda x: x[chosen], records), present), np.array(pairs).T


def farthest(target, databases, pairs, norm):
    values = jax.jit(jax.vmap(target))(databases)
    first, second = (jax.tree.map(lambda x, k=side: x[k], values) for side in pairs)
    return distance(first, second, norm).max()


OF_NUMBERS = {
    "sum near its lower end": sum_query(lower=0.5, upper=1, capacity=SLOTS),
    "sum": sum_query(lower=0, upper=1, capacity=SLOTS),
    "ranks": queries.quantile_scores([0.25, 0.5], grid=[0.6, 0.8]),
    "number of records": queries.counting_query(),
    "second moments": second_moments_query(lambda x: x[:, None], dims=1, capacity=SLOTS),
    "count of some": queries.counting_query(lambda x: x > 0.6),
}
CASES = {name: (query, NUMBERS, (0, 1)) for name, query in OF_NUMBERS.items()} | {
    name: (query, jax.tree.map(lambda x: x[::2][:6], records), (-2, 7))
    for name, (query, records, *_) in query_table.CASES.items()
}


def proved(target, databases, bounds, norm):
    """The bound, of a slot that may change in any way; 0 of a public value."""
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), databases)
    leaves, structure = jax.tree.flatten(spec.records)
    bounds = PaddedRecords(jax.tree.unflatten(structure, [bounds] * len(leaves)), (0, 1))
    try:
        return dpjax.prove_sensitivity(target, spec, bounds=bounds, norm=norm).value
    except ValueError as error:
        if "no record changes its value" not in str(error):
            raise
        return 0.0


@pytest.mark.parametrize("name", CASES)
def test_no_pair_of_slots_lies_further_apart(name):
    query, records, bounds = CASES[name]
    databases, pairs = every_pair(records)
    if query._is_rounded:  # Its proof is one of integers, and it answers in floats.
        with pytest.raises(NoProofError, match="only for the integers"):
            proved(query, databases, bounds, "l1")
        return
    for norm in set(query.norms) & set(programs.NORMS):
        reached = farthest(query, databases, pairs, norm)
        assert 0 < reached <= proved(query, databases, bounds, norm), norm


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_no_pair_lies_further_apart_behind_a_lambda(name):
    query, records, bounds = CASES[name]
    databases, pairs = every_pair(records)
    behind = lambda d: query(d) * 2  # noqa: E731
    for norm in programs.NORMS:
        try:
            bound = proved(behind, databases, bounds, norm)
        except NoProofError:
            continue
        assert farthest(behind, databases, pairs, norm) <= bound, norm


def test_a_count_is_not_public():
    """Under replace-one of records in plain arrays it is: n."""
    databases, _ = every_pair(NUMBERS)
    assert proved(queries.counting_query(), databases, (0, 1), "l1") == 1
    spec = jax.ShapeDtypeStruct((SLOTS,), jnp.float32)
    with pytest.raises(ValueError, match="no record changes its value"):
        dpjax.prove_sensitivity(queries.counting_query(), spec, bounds=(0, 1), norm="l1")


def test_the_bound_of_a_query_is_the_larger_of_both():
    query = queries.histogram_query(2)
    databases, _ = every_pair(NUMBERS.astype(np.int32))
    known = [query.sensitivity("l1", relation=r).value for r in dpjax.NeighboringRelation]
    assert known[0] != known[1]
    assert proved(query, databases, (0, 1), "l1") == max(known)


def test_a_target_that_knows_no_slots_has_no_bound_of_its_own():
    total = lambda d: jnp.where(d.present, d.records, 0.0).sum()  # noqa: E731
    target = BoundedTarget(total, bound=lambda n, dtype: [Fraction(1, 2)])
    databases, pairs = every_pair(NUMBERS)
    assert farthest(target, databases, pairs, "l1") <= proved(target, databases, (0, 1), "l1")
