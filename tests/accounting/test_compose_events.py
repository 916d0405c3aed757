"""Events of dp-accounting, each counted."""

import math

import dp_accounting
import pytest

import dpjax
from dpjax.accounting import compose_events
from dpjax.accounting._compose_events import compose_times

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE
RESPONSE = dp_accounting.RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=2)


@pytest.mark.parametrize("method", ["pld", "renyi"])
@pytest.mark.parametrize("nested", [True, False])
def test_the_count_of_randomized_response_is_not_forgotten(method, nested):
    repeated = dp_accounting.SelfComposedDpEvent(RESPONSE, 4)
    if nested:
        repeated = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(repeated, 1)])
    one, by_hand, found = (
        compose_events(*events, delta=1e-9, relation=REPLACE, method=method).epsilon
        for events in ([RESPONSE], [RESPONSE] * 4, [repeated])
    )
    assert found == by_hand
    # Four answers of epsilon ln 3.
    assert one == pytest.approx(math.log(3), rel=1e-3 if method == "pld" else 0.1)
    assert 3.9 * math.log(3) < found < (4.001 if method == "pld" else 4.1) * math.log(3)


class Forgetful:
    """An accountant that forgets the count of the exponential mechanism, as a later one does."""

    def __init__(self):
        self.spent = 0

    def compose(self, event, count=1):
        self.spent += 1 if type(event).__name__ == "ExponentialMechanismDpEvent" else count


class ExponentialMechanismDpEvent(dp_accounting.NoOpDpEvent):
    """Of that name."""


@pytest.mark.parametrize("event", [ExponentialMechanismDpEvent(), dp_accounting.GaussianDpEvent(1)])
def test_the_count_of_the_exponential_mechanism_is_not_forgotten(event):
    accountant = Forgetful()
    compose_times(accountant, event, 6)
    assert accountant.spent == 6


def test_mechanisms_compose_as_recorded(reference):
    for row in reference("peers")["dp_sgd"]["gaussian"][1::2]:
        event = dp_accounting.GaussianDpEvent(row["sigma"])
        repeated = dp_accounting.SelfComposedDpEvent(event, row["count"])
        exact = float(row["exact"])
        assert exact <= compose_events(repeated, delta=row["delta"]).epsilon <= exact * (1 + 1e-6)
        looser = compose_events(repeated, delta=row["delta"], method="renyi").epsilon
        assert looser == pytest.approx(row["rdp"], rel=1e-6)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("method", ["pld", "renyi"])
def test_mechanisms_keep_the_relation_of_their_sensitivity(relation, method):
    sensitivity = dpjax.assume_sensitivity(2.0, norm="l2", relation=relation)
    mechanism = dpjax.gaussian(sensitivity, 1.0, 1e-5)
    found = compose_events(mechanism.dp_event, delta=1e-5, relation=relation, method=method)
    assert found.relation is mechanism.guarantee.relation
    assert 0.999 < found.epsilon < (1.001 if method == "pld" else 1.2)


def test_sampled_events_mean_what_dp_accounting_means():
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    added, replaced = (
        compose_events(event, delta=1e-5, relation=relation).epsilon for relation in (ADD, REPLACE)
    )
    assert replaced > 1.2 * added


@pytest.mark.parametrize("nested", [False, True])
def test_noise_means_the_same_to_both_accountants(nested):
    """Beside randomized response, a replaced record changes what two contributions make."""
    noise = dp_accounting.GaussianDpEvent(8.0)
    if nested:
        noise = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(noise, 1)])
    nothing = dp_accounting.RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=1)
    exact, looser = (
        compose_events(noise, nothing, delta=1e-5, relation=REPLACE, method=method).epsilon
        for method in ("pld", "renyi")
    )
    alone = compose_events(dp_accounting.GaussianDpEvent(4.0), delta=1e-5).epsilon
    assert 0.999 * alone < exact < looser < 1.2 * exact


@pytest.mark.parametrize("parts", [1, 2])
def test_batches_without_replacement_mean_it_too(parts):
    """At rate 1 it is the Gaussian mechanism, at a sensitivity of two contributions."""
    noise = dp_accounting.GaussianDpEvent(8.0 * math.sqrt(parts))
    if parts > 1:
        noise = dp_accounting.ComposedDpEvent([noise] * parts)
    event = dp_accounting.SampledWithoutReplacementDpEvent(100, 100, noise)
    found = compose_events(event, delta=1e-5, relation=REPLACE, method="renyi").epsilon
    alone = compose_events(dp_accounting.GaussianDpEvent(4.0), delta=1e-5, method="renyi").epsilon
    assert found == pytest.approx(alone)


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r'"pld" does not support .* under add-or-remove-one'):
        compose_events(RESPONSE, delta=1e-5, relation=ADD)
    repeated = dp_accounting.SelfComposedDpEvent(RESPONSE, 10**6)
    with pytest.raises(ValueError, match="repeated at most 100000"):
        compose_events(repeated, delta=1e-5, relation=REPLACE)
    with pytest.raises(TypeError, match="events must be dp_accounting"):
        compose_events(delta=1e-5)
    with pytest.raises(ValueError, match="method must be one of"):
        compose_events(RESPONSE, delta=1e-5, method="moments")
