"""dp-accounting warns of orders that it leaves out; users of dpjax see none of that."""

import logging
import threading
import types

import dp_accounting
import pytest

import dpjax
from dpjax import accounting
from dpjax.accounting._compose_events import left_out_orders_hidden

EVENT = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
BATCHES = types.SimpleNamespace(kind="poisson", n=1000, rate=0.1, capacity=1000)


def plain():
    """The same steps by dp-accounting alone, which warns: else the tests below show nothing."""
    return dp_accounting.rdp.RdpAccountant().compose(EVENT)


@pytest.fixture
def log(caplog):
    """The messages of dp-accounting that reach a user's log, at every level."""
    caplog.set_level(logging.DEBUG, logger="absl")
    return caplog


@pytest.mark.parametrize(
    "account",
    [
        lambda: accounting.dp_sgd(
            BATCHES, noise_multiplier=1.0, steps=10, delta=1e-5, dims=1, method="renyi"
        ),
        lambda: accounting.dp_sgd_noise_multiplier(
            BATCHES, epsilon=4.0, steps=10, delta=1e-5, dims=1, method="renyi"
        ),
        lambda: accounting.compose_events(EVENT, delta=1e-5, method="renyi", relation=ADD),
    ],
    ids=["dp_sgd", "dp_sgd_noise_multiplier", "compose_events"],
)
def test_accounting_is_silent_and_leaves_the_logger_as_it_was(account, log):
    filters = list(logging.getLogger("absl").filters)
    account()
    assert not log.messages
    assert logging.getLogger("absl").filters == filters
    plain()
    assert log.messages


def test_other_messages_and_other_threads_are_heard(log):
    with left_out_orders_hidden():
        plain()
        logging.getLogger("absl").warning("something else")
        assert log.messages == ["something else"]
        other = threading.Thread(target=plain)
        other.start()
        other.join()
    assert len(log.messages) > 1


def test_a_divergence_that_is_lost_in_rounding_does_not_count_as_none(log):
    """At rate 1e-9 dp-accounting has divergences below 0: it warns, and says that epsilon is 0."""
    batches = types.SimpleNamespace(kind="poisson", n=10**6, rate=1e-9, capacity=10**6)
    sampled = dp_accounting.PoissonSampledDpEvent(1e-9, dp_accounting.GaussianDpEvent(1000.0))
    orders = [1.1, 2, 64, 256]
    assert min(dp_accounting.rdp.RdpAccountant(orders).compose(sampled).rdp) < 0
    promised = accounting.dp_sgd(
        batches, noise_multiplier=1e3, steps=10**9, delta=1e-12, dims=1, method="renyi"
    )
    tables = 2 * 10**9 * 2.0**-46
    assert promised.epsilon > 1.1 * tables
    with pytest.raises(ValueError, match='got a divergence that is too small: use method="pld"'):
        accounting.compose_events(sampled, delta=1e-12, relation=ADD, method="renyi")
    assert not log.messages
