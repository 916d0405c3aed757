"""What is no guarantee cannot be made by hand; made in another way, nothing that uses it takes it.

What else reaches an account: `object.__setattr__`, pickles, `jax.tree.map`, arrays that come out of
`jit`, subclasses without checks, guarantees and costs of other people's mechanisms, events of
dp-accounting, and rows of a ledger.
"""

import copy
import dataclasses
import json
import pickle
import types

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, SampledEvent, attacks
from dpjax.accounting import (
    PrivacyFilter,
    PrivacyOdometer,
    compose,
    compose_at,
    compose_events,
    group,
    parallel,
    under_distribution_shift,
)
from tables import for_each

GOOD = Guarantee(0.5, 1e-8, 0.05, 0.99, (SampledEvent(0.05, 0.99, "a"),))
BAD = {"epsilon": -100.0, "delta": -0.5, "gamma": -1.0, "confidence": 2.0}
CURVE = attacks.roc_curve([0.0, 1.0, 2.0], [True, False, True])
EVENTS = {"gamma": -1.0, "confidence": 2.0}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unchecked(Guarantee):
    def __post_init__(self):
        pass


def overwritten(one, **changes):
    one = copy.copy(one)
    for name, value in changes.items():
        object.__setattr__(one, name, value)
    return one


def negated_by_a_tree():
    return jax.tree.map(lambda x: -x, Guarantee(100.0))


def out_of_jit():
    return jax.jit(Guarantee)(-100.0)


MADE = {
    **{name: lambda n=name, x=value: overwritten(GOOD, **{n: x}) for name, value in BAD.items()},
    **{
        f"{name} of an event": lambda n=name, x=value: overwritten(
            GOOD, events=(overwritten(GOOD.events[0], **{n: x}),)
        )
        for name, value in EVENTS.items()
    },
    "group size": lambda: overwritten(GOOD, group_size=0),
    "relation": lambda: overwritten(GOOD, relation="replace-one"),
    "pickle": lambda: pickle.loads(pickle.dumps(overwritten(GOOD, epsilon=-100.0))),
    "tree": negated_by_a_tree,
    "jit": out_of_jit,
    "nan": lambda: Guarantee(jnp.float32("nan")),
    "subclass": lambda: Unchecked(-100.0),
}
made = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def on_parts(one):
    added = NeighboringRelation.ADD_OR_REMOVE_ONE
    return parallel(one if one.relation == "replace-one" else overwritten(one, relation=added))


USES = {
    "compose": compose,
    "compose with a good one": lambda one: compose(GOOD, one),
    "group": lambda one: group(one, 2),
    "under_distribution_shift": lambda one: under_distribution_shift(one, kl=0.1, n=10),
    "parallel": on_parts,
    "compose_at": lambda one: compose_at(one, Guarantee(3.0), delta=1e-6),
    "compose_at, kov": lambda one: compose_at(one, Guarantee(3.0), delta=1e-6, method="kov"),
    "compose_at, pld": lambda one: compose_at(one, Guarantee(3.0), delta=1e-6, method="pld"),
    "filter": lambda one: PrivacyFilter(epsilon=1.0, delta=1e-6).admit(one),
    "odometer": lambda one: PrivacyOdometer(delta=1e-6).add(one),
    "filter, by a mechanism": lambda one: PrivacyFilter(epsilon=1.0, delta=1e-6).admit(
        types.SimpleNamespace(guarantee=one)
    ),
    "guessing bound": attacks.guessing_bound,
    "highest rates": lambda one: attacks.highest_true_positive_rate(one, [0.5]),
    "comparison": lambda one: attacks.compare_with_claim(CURVE, one),
    "a line in a plot": lambda one: dpjax.plotting.roc_curve({"all": CURVE}, one),
    "another": lambda one: dpjax.plotting.recovered_fraction(
        [1.0, 2.0], {"all": [0.5, 0.4]}, guarantee=one
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@for_each("make", MADE.values())
def test_nothing_takes_what_is_no_guarantee(use, make):
    with pytest.raises((ValueError, TypeError), match=r"must be|NaN"):
        use(make())


@made
def test_a_ledger_takes_none(make, tmp_path):
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon=1, delta="1e-6")
    with pytest.raises((ValueError, TypeError), match=r"must be|NaN"):
        ledger.charge(make())
    assert ledger.history() == []


@pytest.mark.parametrize("stored", [{"gamma": -1.0}, {"delta": None}, {"group_size": 0}])
def test_a_row_of_a_ledger_that_holds_none_is_told(stored, tmp_path):
    """As one of an older version may, whose hashes are right."""
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon=1)
    ledger.charge(Guarantee(0.5))
    (entry,) = ledger._file.chain.debits()
    details = {**entry.body, "guarantee": {**entry.body["guarantee"], **stored}}
    for name in ("epsilon", "delta", "time"):
        del details[name]
    ledger._file.debit((1, 0), **json.loads(json.dumps(details)))
    for use in (lambda: ledger.spent, ledger.history):
        try:
            said = use()
        except (KeyError, TypeError, ValueError, dpjax.LedgerError) as error:
            said = error
        assert isinstance(said, dpjax.LedgerError)
        assert "contains no guarantee" in str(said)


BOUND = dpjax.assume_sensitivity(1.0, norm="l1")  # Which a mechanism has.


@pytest.mark.parametrize("zcdp", [(-100.0, 0.0), (float("nan"), 0.0), (0.1, -1.0), (0.1, 2.0)])
@pytest.mark.parametrize(
    "use",
    [
        lambda one: PrivacyFilter(epsilon=1.0, delta=1e-6).admit(one),
        lambda one: PrivacyOdometer(delta=1e-6).add(one),
        lambda one: compose_at(one, Guarantee(3.0), delta=1e-6, method="zcdp"),
    ],
)
def test_costs_of_mechanisms_are_not_negative(use, zcdp):
    with pytest.raises(ValueError, match="zcdp of a mechanism must be"):
        use(types.SimpleNamespace(sensitivity=BOUND, guarantee=Guarantee(0.5), zcdp=zcdp))


@pytest.mark.parametrize("method", ["pld", "renyi"])
def test_events_hold_no_nan(method):
    """By Renyi divergences dp-accounting makes an epsilon of 0 of it."""
    accounting = pytest.importorskip("dp_accounting")
    nothing = accounting.GaussianDpEvent(float("nan"))
    nested = accounting.SelfComposedDpEvent(accounting.ComposedDpEvent([nothing]), 3)
    for event in (nothing, nested, accounting.PoissonSampledDpEvent(0.1, nothing)):
        with pytest.raises(ValueError, match="must not contain NaN"):
            compose_events(accounting.GaussianDpEvent(1.0), event, delta=1e-5, method=method)


@pytest.mark.parametrize("method", ["pld", "renyi"])
@pytest.mark.parametrize("multiplier", [float("nan"), -5.0, 0.0])
def test_an_event_without_noise_counts_as_its_guarantee(multiplier, method):
    accounting = pytest.importorskip("dp_accounting")
    event = accounting.GaussianDpEvent(multiplier)
    one = types.SimpleNamespace(
        sensitivity=BOUND, guarantee=Guarantee(0.5, 1e-9), zcdp=(0.125, 1e-9), dp_event=event
    )
    plain = compose_at(Guarantee(0.5, 1e-9), Guarantee(1.0), delta=1e-6, method=method)
    found = compose_at(one, Guarantee(1.0), delta=1e-6, method=method)
    assert found.epsilon >= plain.epsilon


def test_a_filter_admits_no_more_than_its_budget():
    """It admitted 50 releases of epsilon 1 after a guarantee of -100."""
    budget = PrivacyFilter(epsilon=1.0, delta=1e-6)
    with pytest.raises(ValueError, match="epsilon must be"):
        budget.admit(out_of_jit())
    budget.admit(dpjax.laplace(1.0, epsilon=1.0))
    with pytest.raises(dpjax.BudgetExceededError):
        budget.admit(dpjax.laplace(1.0, epsilon=1.0))
