"""What a run of DP-SGD promises, against other accountants and closed forms."""

import math
import types

import jax
import pytest
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

import dpjax
from dpjax import accounting, learning
from dpjax.accounting._dp_sgd import _LEAST_INTEGRATED, _renyi_of_replacing
from dpjax.accounting._loss_distributions import epsilons_by_losses

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE


def sampling(rate, kind="poisson", n=10**6):
    """Batches that are never cut off."""
    capacity = n if kind == "poisson" else int(n * rate)
    return types.SimpleNamespace(kind=kind, n=n, rate=rate, capacity=capacity)


def epsilon(batches, z, steps, delta=1e-5, dims=1, **more):
    found = accounting.dp_sgd(
        batches,
        noise_multiplier=z,
        steps=steps,
        delta=delta,
        dims=dims,
        **more,
    )
    assert found.delta == delta
    assert found.relation is more.get("relation", ADD)
    return found.epsilon


def rows(reference):
    """Runs with bounds by privacy loss distributions, from below and above, and Renyi's."""
    return reference("peers")["dp_sgd"]["rows"]


def test_epsilons_are_those_of_other_accountants_and_never_below_the_truth(reference):
    for row in rows(reference):
        batches = sampling(row["q"])
        found = epsilon(batches, row["sigma"], row["count"], row["delta"])
        assert row.get("lower", 0) <= found
        assert row["pld"] * (1 - 1e-5) <= found <= row["pld"] * (1 + 1e-5)
        looser = epsilon(batches, row["sigma"], row["count"], row["delta"], method="renyi")
        assert row["pld"] < looser
        assert looser == pytest.approx(row.get("rdp", looser), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "relation", "multiplier"),
    [
        ("poisson", ADD, 1),
        pytest.param("poisson", REPLACE, 2, marks=pytest.mark.slow),
        ("fixed", REPLACE, 2),
    ],
)
def test_full_batches_are_the_gaussian_mechanism(kind, relation, multiplier, reference):
    """Where a record is replaced the sum moves by two clip norms."""
    for row in reference("peers")["dp_sgd"]["gaussian"]:
        exact = float(row["exact"])
        arguments = sampling(1.0, kind), multiplier * row["sigma"], row["count"], row["delta"]
        assert exact <= epsilon(*arguments, relation=relation) <= exact * (1 + 1e-6)
        renyi = epsilon(*arguments, relation=relation, method="renyi")
        assert exact < renyi == pytest.approx(row["rdp"], rel=1e-3)


def delta_of_one_fixed_batch(epsilon, rate, z):
    """The rate times that of the Gaussian mechanism, at an epsilon that is amplified."""
    sigma, inner = z / 2, math.log1p(math.expm1(epsilon) / rate)
    mirrored = math.exp(inner + log_ndtr(-0.5 / sigma - inner * sigma))
    return rate * (ndtr(0.5 / sigma - inner * sigma) - mirrored)


@pytest.mark.parametrize(("rate", "z"), [(0.01, 1.0), (0.3, 2.5)])
def test_one_batch_of_a_fixed_size_is_the_closed_form(rate, z):
    found = epsilon(sampling(rate, "fixed"), z, 1, relation=REPLACE)
    # The curve is drawn between epsilons 1e-4 apart.
    assert delta_of_one_fixed_batch(found, rate, z) <= 1e-5
    assert delta_of_one_fixed_batch(found - 2e-4, rate, z) > 1e-5


@pytest.mark.parametrize(("rate", "z", "steps"), [(0.02, 3.0, 100), (0.3, 6.0, 20)])
def test_the_ways_of_sampling_and_accounting_are_in_order(rate, z, steps):
    """Of bounds on one thing the tighter, and of two relations the wider one."""
    added = epsilon(sampling(rate), z, steps)
    replaced = epsilon(sampling(rate), z, steps, relation=REPLACE)
    fixed = epsilon(sampling(rate, "fixed"), z, steps, relation=REPLACE)
    # Of a pair that is one of those which are covered, in either order.
    assert epsilon(sampling(rate), z / 2, steps) * (1 - 1e-3) <= fixed
    assert added < replaced <= 2 * added + 1
    for batches, tight in ((sampling(rate), replaced), (sampling(rate, "fixed"), fixed)):
        assert tight < epsilon(batches, z, steps, relation=REPLACE, method="renyi") < 3 * tight


def test_a_capacity_is_paid_for():
    n, rate = 10_000, 0.01
    free = sampling(rate, n=n)
    batches = learning.poisson_sampling(n, batch_size=100, capacity=170)
    without = epsilon(free, 1.0, 100, delta=1e-5)
    found = epsilon(batches, 1.0, 100, delta=1e-5)
    assert without < found < without * 1.1
    # What is left of delta is spent on the ideal run.
    bad = 100 * binom.sf(170, n + 1, batches.rate)
    left = 1e-5 - (1 + math.exp(found)) * bad
    assert bad > 1e-9
    assert found == pytest.approx(epsilon(free, 1.0, 100, delta=left), rel=1e-5)
    with pytest.raises(ValueError, match=r"delta=1e-05 is used up.*capacity of 110"):
        epsilon(learning.poisson_sampling(n, batch_size=100, capacity=110), 1.0, 100)


def test_the_tables_of_the_noise_are_paid_for():
    few, many = (epsilon(sampling(0.01), 1.0, 10, dims=d) for d in (1, 10**10))
    charge = 2 * 10 * 10**10 * 2.0**-46
    assert charge < many - few < 1.1 * charge


@pytest.mark.parametrize("method", [pytest.param("pld", marks=pytest.mark.slow), "renyi"])
def test_a_noise_multiplier_reaches_its_epsilon_and_hardly_more(method):
    arguments = {"delta": 1e-5, "steps": 10, "dims": 1000, "method": method}
    z = accounting.dp_sgd_noise_multiplier(sampling(0.02), epsilon=1.0, **arguments)
    assert 0.99 < epsilon(sampling(0.02), z, **arguments) <= 1.0
    assert epsilon(sampling(0.02), z * (1 - 2e-3), **arguments) > 1.0


@pytest.mark.slow
def test_a_sweep_has_a_noise_multiplier_for_each_epsilon():
    arguments = {"delta": 1e-5, "steps": 10, "dims": 3, "method": "renyi"}

    def multiplier(_, *, epsilon):
        return accounting.dp_sgd_noise_multiplier(sampling(0.1), epsilon=epsilon, **arguments)

    swept = dpjax.sweep(jax.random.key(0), multiplier, static={"epsilon": [1.0, 3.0]})
    for epsilon_of_cell, found in zip((1.0, 3.0), swept["value"].values[:, 0], strict=True):
        assert epsilon(sampling(0.1), float(found), **arguments) == pytest.approx(
            epsilon_of_cell, rel=2e-3
        )


@pytest.mark.slow
def test_a_noise_multiplier_is_found_where_less_noise_promises_nothing():
    batches = learning.poisson_sampling(1000, batch_size=500, capacity=700)
    arguments = {"delta": 1e-6, "steps": 10**4, "dims": 10**6, "method": "renyi"}
    with pytest.raises(ValueError, match="is used up"):
        epsilon(batches, 1.0, **arguments)
    z = accounting.dp_sgd_noise_multiplier(batches, epsilon=1.0, **arguments)
    assert 0.99 < epsilon(batches, z, **arguments) <= 1.0


@pytest.mark.slow
def test_no_noise_multiplier_is_an_answer_too():
    batches = learning.poisson_sampling(1000, batch_size=500, capacity=520)
    with pytest.raises(ValueError, match="no noise multiplier up to 1e9"):
        accounting.dp_sgd_noise_multiplier(batches, epsilon=1.0, delta=1e-6, steps=10, dims=10)


def test_what_convolutions_lose_is_charged():
    """A million steps by FFT lose 4e-11 of a delta of 2e-12, and say that it is below 0."""
    z, steps, delta = 3000.0, 10**6, 2e-9
    found = epsilons_by_losses("poisson", 1 - 2**-32, z, steps, replaced=False)(delta)
    mu = math.sqrt(steps) / z
    missed = ndtr(mu / 2 - found / mu) - math.exp(found + log_ndtr(-mu / 2 - found / mu))
    assert missed < delta - 1e-9
    with pytest.raises(ValueError, match=r"delta=1e-09 is too small for method"):
        epsilon(sampling(0.5), z, steps, delta=1e-9)


@pytest.mark.parametrize(
    ("batches", "z", "steps"),
    [
        (sampling(2**-32), 100.0, 10**9),  # Three outcomes, which are not to the power of that.
        pytest.param(sampling(1e-6), 1e-3, 1, marks=pytest.mark.slow),
        pytest.param(sampling(1e-6, "fixed", 10**7), 2e-3, 1, marks=pytest.mark.slow),
    ],
)
def test_little_noise_and_many_steps_have_an_answer(batches, z, steps):
    relation = REPLACE if batches.kind == "fixed" else ADD
    assert 0 <= epsilon(batches, z, steps, relation=relation) < 1e-2


@pytest.mark.parametrize(("method", "z"), [("pld", 1e-4), ("renyi", 1e-4), ("renyi", 0.2)])
def test_noise_that_is_too_little_is_refused(method, z):
    with pytest.raises(ValueError, match=r"too large|is used up"):
        epsilon(sampling(0.5), z, 10, relation=REPLACE, method=method)


def test_divergences_of_little_noise_are_not_below_those_that_are_integrated():
    z = _LEAST_INTEGRATED
    for order in (1.1, 2.0, 10.0):
        integrated = _renyi_of_replacing(order, 0.5, z)
        assert integrated < _renyi_of_replacing(order, 0.5, z * (1 - 1e-9))


def test_a_rate_that_is_off_is_seen():
    """An accountant that thinks of another rate promises something else."""
    found = [epsilon(sampling(0.01 * x), 1.0, 1000) for x in (0.9, 1.0, 1.1)]
    assert found[0] < 0.95 * found[1] < 0.9 * found[2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be"),
        ({"steps": 0}, ValueError, "steps must be"),
        ({"steps": 1.5}, TypeError, "steps must be"),
        ({"delta": 1.0}, ValueError, "delta must be"),
        ({"dims": 0}, ValueError, "dims must be"),
        ({"method": "moments"}, ValueError, "method must be one of"),
        ({"delta": 1e-13}, ValueError, "too small for method"),
        ({"sampling": sampling(0.1, "fixed")}, ValueError, "relation must be replace-one"),
        ({"sampling": sampling(0.1, "shuffled")}, ValueError, "sampling.kind must be"),
        ({"sampling": sampling(1.1)}, ValueError, "sampling.rate must be"),
    ],
)
def test_bad_parameters_are_refused(change, error, message):
    good = {"noise_multiplier": 1.0, "steps": 10, "delta": 1e-5, "dims": 1}
    with pytest.raises(error, match=message):
        accounting.dp_sgd(**{"sampling": sampling(0.1), **good, **change})
