"""Composition at one delta: against exact values, peers and closed forms, and never below them."""

import itertools
import math

import jax
import mpmath
import numpy as np
import pytest
import scipy

import dpjax
from dpjax import Guarantee, SampledEvent
from dpjax.accounting import _compose_at, compose, compose_at, zcdp_to_epsilon
from dpjax.accounting._compose_at import optimal_epsilon
from dpjax.accounting._concentrated import largest_rho

METHODS = ("drv", "kov", "optimal", "zcdp", "renyi", "pld")
methods = pytest.mark.parametrize("method", METHODS)


def normal(sigma):
    """Gaussian noise of this many sensitivities."""
    return dpjax.mechanisms.additive(
        1.0,
        1.0,
        norm="l2",
        noise=dpjax.random.GAUSSIAN,
        delta=0.5,
        multiplier=lambda epsilon, delta: sigma,
    )


def sampled(epsilon, gamma, confidence, identity, delta=0.0):
    event = SampledEvent(gamma, confidence, identity)
    return Guarantee(epsilon, delta, gamma, confidence, (event,))


# The optimum.


def exact_delta(epsilons, joint):
    """By enumeration, in 40 digits."""
    with mpmath.workdps(40):
        probabilities = [1 / (1 + mpmath.exp(-mpmath.mpf(e))) for e in epsilons]
        total = mpmath.mpf(0)
        for signs in itertools.product((1, -1), repeat=len(epsilons)):
            loss = mpmath.fsum(s * mpmath.mpf(e) for s, e in zip(signs, epsilons, strict=True))
            mass = mpmath.fprod(
                p if s > 0 else 1 - p for s, p in zip(signs, probabilities, strict=True)
            )
            total += mass * max(mpmath.mpf(0), 1 - mpmath.exp(mpmath.mpf(joint) - loss))
        return total


@pytest.mark.parametrize(
    "epsilons", [[0.5], [0.1] * 8, [1.0] * 3 + [0.25] * 4, [0.1, 0.2, 0.3, 0.7, 1.1], [30.0, 0.01]]
)
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.05])
def test_optimum_is_the_least_epsilon(epsilons, delta):
    found = compose_at(*map(Guarantee, epsilons), delta=delta).epsilon
    assert exact_delta(epsilons, found) <= delta
    less = found * (1 - 1e-7) - 1e-9
    assert less < 0 or exact_delta(epsilons, less) > delta


@pytest.mark.parametrize("count", [100, 1000])
@pytest.mark.parametrize("delta", [1e-12, 1e-6])
def test_optimum_of_many_equal_ones(count, delta):
    """The binomial sum of Kairouz, Oh and Viswanath, Theorem 3.3."""
    epsilon = 0.1
    found = compose_at(*[Guarantee(epsilon)] * count, delta=delta).epsilon

    def exact(joint):
        with mpmath.workdps(60):
            e, total = mpmath.mpf(epsilon), mpmath.mpf(0)
            for lies in range(count + 1):
                loss = (count - 2 * lies) * e
                if loss <= joint:
                    break
                mass = mpmath.binomial(count, lies) * mpmath.exp((count - lies) * e)
                total += mass * (1 - mpmath.exp(joint - loss))
            return total / (1 + mpmath.exp(e)) ** count

    assert exact(mpmath.mpf(found)) <= delta < exact(mpmath.mpf(found * (1 - 1e-7)))


def test_different_epsilons_are_rounded_up_to_a_lattice(monkeypatch):
    monkeypatch.setattr(_compose_at, "_MOST_POINTS", 128)
    epsilons, delta = list(np.linspace(0.05, 0.2, 8)), 1e-3
    found = optimal_epsilon(epsilons, delta)
    assert exact_delta(epsilons, found) <= delta < exact_delta(epsilons, found * 0.95)


@pytest.mark.slow
def test_many_different_epsilons_are_nearly_optimal():
    epsilons = list(np.linspace(0.05, 0.2, 20))
    delta = 1e-4
    found = optimal_epsilon(epsilons, delta)
    signs = 1.0 - 2 * ((np.arange(2**20)[:, None] >> np.arange(20)) & 1)
    losses = signs @ epsilons
    masses = np.exp(-(np.log1p(np.exp(-signs * epsilons))).sum(1))

    def exact(joint):
        return (masses * np.maximum(0, -np.expm1(np.minimum(0, joint - losses)))).sum()

    assert exact(found) <= delta < exact(found * 0.99)


def test_deltas_of_the_releases_compose_too():
    """1 - (1 - slack) prod (1 - delta_i): between the sum and nothing."""
    releases = [Guarantee(0.1, 1e-3)] * 50
    found = compose_at(*releases, delta=0.06).epsilon
    slack = 1 - (1 - 0.06) / (1 - 1e-3) ** 50
    assert found == pytest.approx(optimal_epsilon([0.1] * 50, slack), rel=1e-9)
    assert found >= optimal_epsilon([0.1] * 50, slack)
    with pytest.raises(ValueError, match=r"delta=0\.04 is too small"):
        compose_at(*releases, delta=0.04)


# Peers.


def test_advanced_composition_agrees_with_peers(reference):
    for row in reference("peers")["advanced_composition"]["rows"]:
        releases = [Guarantee(row["eps"])] * row["k"]
        fast = METHODS if row["k"] < 1000 else METHODS[:-1]
        found = {x: compose_at(*releases, delta=row["slack"], method=x).epsilon for x in fast}
        closed = {
            "drv": min(row["basic"], float(row["drv10"])),
            "kov": min(row["basic"], float(row["kov15_form_a"]), float(row["kov15_form_b"])),
        }
        for method, value in closed.items():
            assert value <= found[method] * (1 + 1e-15) <= value * (1 + 1e-9)
        if row["kov_optimal_exact"] is not None:  # On a lattice; between its points it is less.
            assert found["optimal"] <= float(row["kov_optimal_exact"]) * (1 + 1e-12)
        assert found["optimal"] == pytest.approx(row["pld"], rel=1e-6)
        if "pld" in fast:
            assert found["optimal"] <= found["pld"] <= found["optimal"] * 1.001


def test_zcdp_agrees_with_peers(reference):
    for row in reference("peers")["zcdp_to_approxdp"]["rows"]:
        rho, delta = row["rho"], row["delta"]
        exact = mpmath.mpf(row["cks20_optimal"])
        assert exact <= zcdp_to_epsilon(rho, delta=delta) <= exact * (1 + mpmath.mpf(10) ** -11)
        simple = zcdp_to_epsilon(rho, delta=delta, method="simple")
        assert row["bun_steinke"] <= simple <= row["bun_steinke"] * (1 + 1e-12)
        # What Gaussian noise of the same rho really has is less.
        assert zcdp_to_epsilon(rho, delta=delta) > float(row["gaussian_exact_same_rho"])


@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.5, 0.99])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 30.0])
def test_the_largest_rho_is_reached_and_not_exceeded(epsilon, delta):
    rho = largest_rho(epsilon, delta)
    assert zcdp_to_epsilon(rho, delta=delta) <= epsilon
    assert zcdp_to_epsilon(rho * (1 + 1e-6), delta=delta) > epsilon


@pytest.mark.parametrize("rho", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.5, 0.999])
def test_zcdp_is_no_less_than_any_order_allows(rho, delta):
    """The best order by brute force, in 40 digits."""
    found = zcdp_to_epsilon(rho, delta=delta)
    with mpmath.workdps(40):
        best = min(
            a * rho + mpmath.log(1 / (a * delta)) / (a - 1) + mpmath.log(1 - 1 / a)
            for a in (1 + mpmath.mpf(10) ** (mpmath.mpf(i) / 50) for i in range(-250, 500))
        )
    assert found >= 0
    assert found <= max(0, best) * (1 + 1e-3) + 1e-3 * math.sqrt(rho)
    assert found >= best * (1 - 1e-3) - 1e-3 * math.sqrt(rho)


def test_gaussian_composition_agrees_with_peers(reference):
    rows = [x for x in reference("peers")["composition_epsilon"]["rows"] if x["kind"] == "gaussian"]
    # One that is refused, and every second one of the others.
    for row in (rows[3], *rows[::2]):
        mechanisms = [normal(row["sigma"])] * row["count"]

        def found(method, mechanisms=mechanisms, delta=row["delta"]):
            return compose_at(*mechanisms, delta=delta, method=method, dims=1).epsilon

        exact = float(row["exact"])
        if exact > 40:
            # The tables of the noise end where such an epsilon would matter.
            with pytest.raises(ValueError, match="outside of the noise tables"):
                found("zcdp")
            continue
        assert exact <= found("pld") <= exact * (1 + 2e-3)
        assert exact <= found("zcdp") <= found("renyi") * (1 + 1e-3)
        assert found("renyi") == pytest.approx(row["rdp"], rel=1e-3)


def test_laplace_composition_agrees_with_peers(reference):
    for row in reference("peers")["composition_epsilon"]["rows"]:
        if row["kind"] != "laplace":
            continue
        mechanisms = [dpjax.laplace(1.0, 1 / row["scale"])] * row["count"]
        for method, peer in (("pld", row["pld_disc1e_5"]), ("renyi", row["rdp"])):
            if peer < 40:
                found = compose_at(*mechanisms, delta=row["delta"], method=method, dims=1)
                peer = min(peer, row["pure"])
                assert peer * (1 - 1e-6) <= found.epsilon <= peer * (1 + 1e-3)


# Every method.


RELEASES = {
    "guarantee": Guarantee(0.1),
    "laplace": dpjax.laplace(1.0, 0.1),
    "gaussian": dpjax.gaussian(1.0, 0.1, 1e-9),
    "exponential": dpjax.exponential(1.0, 0.1),
    "permute and flip": dpjax.permute_and_flip(1.0, 0.1),
    "randomized response": dpjax.randomized_response(0.1),
}


@methods
@pytest.mark.parametrize("name", RELEASES)
def test_every_release_counts(method, name):
    """Of some events dp-accounting forgets how often they are repeated."""
    release = RELEASES[name]
    one, ten, hundred = (
        compose_at(*[release] * k, delta=1e-6, method=method).epsilon for k in (1, 10, 100)
    )
    assert 2.5 * one < ten
    assert 2.5 * ten < hundred <= 10 * (1 + 1e-12)
    mixed = compose_at(*[release] * 99, Guarantee(0.5), delta=1e-6, method=method).epsilon
    assert mixed > hundred


@methods
@pytest.mark.parametrize("delta", [1e-6, 1e-14, 1e-24])
def test_no_method_is_below_the_truth_of_randomized_response(method, delta):
    """It is the worst mechanism of its epsilon, so the optimum is the truth."""
    answers = [dpjax.randomized_response(0.3)] * 40
    truth = compose_at(*answers, delta=delta).epsilon
    assert compose_at(*answers, delta=delta, method=method, dims=1).epsilon >= truth


@pytest.mark.parametrize("method", ["zcdp", "renyi", "pld"])
@pytest.mark.parametrize("delta", [1e-10, 1e-15, 1e-18])
def test_no_method_is_below_the_truth_of_gaussian_noise(method, delta):
    """At any delta, however small: nothing known is a refusal."""
    releases = [normal(10.0)] * 10
    if method == "pld" and delta <= 1e-15:
        with pytest.raises(ValueError, match="too small"):
            compose_at(*releases, delta=delta, method=method, dims=1)
        return
    claimed = compose_at(*releases, delta=delta, method=method, dims=1)
    with mpmath.workdps(40):
        mu, epsilon = mpmath.sqrt(10) / 10, mpmath.mpf(claimed.epsilon)
        needed = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
            -mu / 2 - epsilon / mu
        )
        assert needed <= delta


@methods
def test_gamma_adds_once_for_each_sampling(method):
    a, b = sampled(0.1, 0.05, 0.99, "a"), sampled(0.2, 0.02, 0.95, "b")
    joint, basic = compose_at(a, b, a, delta=1e-6, method=method), compose(a, b, a)
    assert joint.delta == 1e-6
    assert joint.epsilon <= basic.epsilon
    assert (joint.gamma, joint.confidence) == (basic.gamma, basic.confidence)
    assert joint.gamma == pytest.approx(0.07, rel=1e-12)
    assert [event.identity for event in joint.events] == ["a", "b"]
    # It may go on.
    assert compose(joint, a).gamma == joint.gamma


@methods
def test_what_cannot_be_composed_is_refused(method):
    def at(*releases, delta=1e-6, **more):
        return compose_at(*releases, delta=delta, method=method, **more)

    one, other = Guarantee(0.1), Guarantee(0.1, group_size=2)
    for bad in ((), (one, other), (Guarantee(np.array(math.nan)),), (Guarantee(np.ones(2)),)):
        with pytest.raises(ValueError, match=r"at least one|group size|NaN|one number"):
            at(*bad)
    for bad in (1.0, None, "a"):
        with pytest.raises(TypeError, match="mechanisms or guarantees"):
            at(bad)
    for bad in (0, 1, -1e-9, math.nan):
        with pytest.raises(ValueError, match="delta must be"):
            at(one, delta=bad)
    for bad in (Guarantee(math.inf), dpjax.laplace(1.0, 1.0, noise="float")):
        with pytest.raises(ValueError, match="must all have a finite epsilon"):
            at(bad)
    with pytest.raises(ValueError, match="too small"):
        at(*[Guarantee(0.1, 1e-3)] * 2, delta=1e-6)
    with pytest.raises(TypeError, match="host"):
        jax.jit(at)(one)
    assert at(one, Guarantee(1e4)).epsilon == pytest.approx(1e4 + 0.1, rel=1e-3)
    assert at(one, Guarantee(0.1, 1e-7), dims=10**9).epsilon <= 0.2 * (1 + 1e-15)


def test_words_and_sizes_are_checked():
    with pytest.raises(ValueError, match="method must be one of"):
        compose_at(Guarantee(0.1), delta=1e-6, method="best")
    with pytest.raises(ValueError, match='at most 10000 releases, got 10001: use "kov"'):
        compose_at(*[Guarantee(0.1)] * 10_001, delta=1e-6)
    with pytest.raises(ValueError, match="method must be one of"):
        zcdp_to_epsilon(1.0, delta=0.1, method="best")
    for rho, delta in ((-1.0, 0.1), (math.nan, 0.1), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="must be"):
            zcdp_to_epsilon(rho, delta=delta)
    assert zcdp_to_epsilon(0.0, delta=0.1) == 0.0
    assert 0 <= zcdp_to_epsilon(5e-324, delta=0.1) < 1e-148


# What mechanisms cost in zCDP.


def test_zcdp_of_mechanisms():
    for release in ("laplace", "permute and flip", "randomized response"):
        assert RELEASES[release].zcdp == (pytest.approx(0.005, rel=1e-11), 0.0)
    assert RELEASES["exponential"].zcdp == (pytest.approx(0.00125, rel=1e-11), 0.0)
    assert normal(5.0).zcdp == (pytest.approx(0.02, rel=1e-11), 0.0)
    assert dpjax.laplace(1.0, 1.0, noise="float").zcdp == (math.inf, 1.0)
    own = dpjax.mechanisms.additive(
        1.0, 0.1, norm="linf", noise=dpjax.random.GAUSSIAN, delta=1e-6, multiplier=lambda *_: 1e3
    )
    assert own.zcdp == (pytest.approx(0.005, rel=1e-11), 1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_bounded_range_of_the_exponential_mechanism(epsilon):
    """No Renyi divergence of neighbors exceeds order * epsilon^2 / 8, and some come near."""
    generator = np.random.default_rng(0)
    rho, _ = dpjax.exponential(1.0, epsilon).zcdp
    worst = 0.0
    for _ in range(300):
        options = generator.integers(2, 6)
        scores = generator.normal(size=options) * generator.choice([0.1, 1, 10])
        moves = generator.choice([-1.0, 1.0], options) * generator.choice([1, generator.random()])
        p, q = (scipy.special.log_softmax(epsilon / 2 * s) for s in (scores, scores + moves))
        for order in (1.01, 1.5, 2, 8, 64):
            divergence = scipy.special.logsumexp(order * p + (1 - order) * q) / (order - 1)
            worst = max(worst, divergence / order / rho)
    assert 0.5 < worst <= 1
