"""Releases on disjoint parts: the largest counts, and under add-or-remove-one alone."""

import numpy as np
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation
from dpjax.accounting import compose, group, parallel

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def test_the_largest_counts():
    parts = [Guarantee(e, d, relation=ADD) for e, d in ((0.5, 1e-6), (1.0, 1e-9), (0.2, 0.0))]
    together = parallel(*parts)
    assert (together.epsilon, together.delta) == (1.0, 1e-6)
    assert together.relation is ADD
    assert parallel(parts[2]).epsilon == 0.2


def test_a_histogram_is_one_mechanism_for_every_bucket():
    """Counting buckets one by one costs what counting them at once does; replaced, twice."""
    query = dpjax.queries.histogram_query(100)
    at_once = dpjax.laplace(query.sensitivity(relation=ADD), epsilon=0.5)
    one = dpjax.laplace(dpjax.queries.counting_query().sensitivity(relation=ADD), epsilon=0.5)
    assert one.scale == at_once.scale
    assert parallel(*[one.guarantee] * 100).epsilon == at_once.guarantee.epsilon
    replaced = dpjax.laplace(query.sensitivity(), epsilon=1.0)
    assert replaced.scale == at_once.scale
    assert group(parallel(*[one.guarantee] * 100), 2).epsilon == replaced.guarantee.epsilon


def test_two_parts_of_binary_randomized_response_by_enumeration():
    """A record that is added to one part changes the joint distribution by the part's epsilon."""
    epsilons = 0.7, 1.2
    with_it = [np.array([np.exp(e), 1.0]) / (1 + np.exp(e)) for e in epsilons]
    without = [p[::-1] for p in with_it]
    joint = [np.outer(with_it[0], without[1]), np.outer(without[0], with_it[1])]
    nobody = np.outer(*without)
    worst = max(np.abs(np.log(p / nobody)).max() for p in joint)
    stated = parallel(*(Guarantee(e, relation=ADD) for e in epsilons)).epsilon
    assert worst == pytest.approx(stated, rel=1e-12)
    # Replaced from one part to the other it is more.
    assert np.abs(np.log(joint[0] / joint[1])).max() > stated


def test_replaced_records_and_groups_are_refused():
    with pytest.raises(ValueError, match="add-or-remove-one"):
        parallel(Guarantee(1.0), Guarantee(1.0))
    with pytest.raises(ValueError, match="groups"):
        parallel(group(Guarantee(1.0, relation=ADD), 2))
    with pytest.raises(ValueError, match="at least one"):
        parallel()


def test_notes_and_samplings_are_those_of_all():
    parts = [
        Guarantee(1.0, relation=ADD, notes=("seeded key",)),
        Guarantee(0.5, gamma=0.1, confidence=0.99, relation=ADD),
    ]
    together = parallel(*parts)
    assert (together.gamma, together.confidence) == (0.1, 0.99)
    assert together.notes == compose(*parts).notes
