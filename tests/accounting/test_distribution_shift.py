"""What a guarantee is worth under another distribution than the oracle's."""

import dataclasses
import json
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import Guarantee, SampledEvent
from dpjax._core._release import guarantee_from_json, guarantee_to_json
from dpjax.accounting import compose, group, under_distribution_shift
from dpjax.accounting._distribution_shift import _largest


def sampled(epsilon, gamma, confidence, identity, delta=0.0):
    """The guarantee of a release under one sampled sensitivity."""
    event = SampledEvent(gamma, confidence, identity)
    return Guarantee(epsilon, delta, gamma, confidence, (event,))


A = sampled(0.5, 0.05, 0.99, "a", delta=1e-6)
B = sampled(0.25, 0.02, 0.95, "b")
M = sampled(1.0, 0.1, None, "m")
PURE = Guarantee(2.0, 1e-7)
KINDS = ("kl", "reverse_kl", "chi2", "ratio")


def moved(gamma, n=1, **bound):
    return under_distribution_shift(sampled(1.0, gamma, 0.99, "a"), n=n, **bound).gamma


def divergence(a, b):
    with mpmath.workdps(50):
        a, b = mpmath.mpf(a), mpmath.mpf(b)
        inside = a * mpmath.log(a / b) if a else 0
        return inside + ((1 - a) * mpmath.log((1 - a) / (1 - b)) if a < 1 else 0)


@given(gamma=st.floats(1e-9, 0.5), tau=st.floats(1e-9, 1e-3), n=st.integers(1, 2000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_divergences_of_coins_are_inverted_outward(gamma, tau, n):
    """At the result the divergence reaches N tau; just below it, it does not."""
    limit = (n + 1) * mpmath.mpf(tau)
    found = moved(gamma, n, kl=tau)
    assert found == 1 or limit <= divergence(gamma, found) <= limit * (1 + 1e-9) + 1e-12
    assert found <= mpmath.mpf(gamma) + mpmath.sqrt(limit / 2) * (1 + mpmath.mpf(2) ** -40)
    found = moved(gamma, n, reverse_kl=tau)
    assert found == 1 or limit <= divergence(found, gamma) <= limit * (1 + 1e-9) + 1e-12


def test_the_end_of_a_search_is_beyond_the_limit():
    assert 0.5 < _largest(lambda q: q, 0.1, 0.5) < 0.5 + 1e-12


@given(gamma=st.floats(1e-9, 0.999), c=st.floats(0, 1e-2), n=st.integers(1, 2000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_closed_forms_are_rounded_up(gamma, c, n):
    with mpmath.workdps(50):
        g, grown = mpmath.mpf(gamma), (1 + mpmath.mpf(c)) ** (n + 1)
        chi2 = g + mpmath.sqrt((grown - 1) * g * (1 - g))
    assert min(chi2, 1) <= moved(gamma, n, chi2=c) <= chi2 * (1 + 1e-9)
    exact = mpmath.mpf(1 + c) ** (n + 1) * g
    assert min(exact, 1) <= moved(gamma, n, ratio=1 + c) <= exact * (1 + 1e-9)


def test_the_table_of_small_gammas():
    """Pinsker's inequality alone gives .0234 for the first two."""
    assert moved(0.001, kl=0.0005) == pytest.approx(0.0031, abs=5e-5)
    assert moved(0.001, reverse_kl=0.0005) == pytest.approx(0.0027, abs=5e-5)
    assert 0.001 + math.sqrt(0.0005) == pytest.approx(0.0234, abs=5e-5)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_event_exceeds_the_bounds(count):
    """Pairs of distributions on six atoms, each with a random event, in all four ways."""
    rng = np.random.default_rng(0)
    beyond, close = 0, dict.fromkeys(KINDS, 0)
    for _ in range(count):
        p, q = rng.dirichlet(np.ones(6) * 0.5), rng.dirichlet(np.ones(6) * 0.5)
        if rng.random() < 0.5:  # Close ones, whose bounds are not 1.
            q = 0.9 * p + 0.1 * q
        event = rng.random(6) < 0.5
        gamma, truth = p[event].sum(), q[event].sum()
        if not (0 < gamma < 1 and min(p.min(), q.min()) > 1e-12):
            continue
        # For one record in all: `ratio` and `chi2` of a pair of N = 2 are powers of a record's.
        bounds = {
            "kl": np.sum(p * np.log(p / q)) / 2,
            "reverse_kl": np.sum(q * np.log(q / p)) / 2,
            "chi2": math.sqrt(np.sum(q * q / p)) - 1,
            "ratio": math.sqrt(np.max(q / p)),
        }
        for name, bound in bounds.items():
            found = moved(gamma, **{name: max(bound, 1.0 if name == "ratio" else 0.0)})
            beyond += truth > found * (1 + 1e-9)
            close[name] += truth > gamma + 0.5 * (found - gamma)
    assert beyond == 0
    assert min(close.values()) > count / 200  # A bound twice as small would have failed.


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_moves_all_of_its_records(kind):
    """A pair of databases that differ in t records holds n + t of them."""
    bound = 1 + 1e-4 if kind == "ratio" else 1e-6
    found = under_distribution_shift(group(A, 3), n=197, **{kind: bound})
    assert (
        found.gamma
        == under_distribution_shift(
            sampled(1.5, group(A, 3).gamma, 0.99, "a"), n=199, **{kind: bound}
        ).gamma
    )
    assert found.group_size == 3


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_capped_and_leaves_bounds_alone(kind):
    assert under_distribution_shift(A, n=1000, **{kind: 10.0}).gamma == 1.0
    assert under_distribution_shift(A, n=1000, **{kind: 1e300}).gamma == 1.0
    assert repr(under_distribution_shift(PURE, n=1000, **{kind: 10.0})) == repr(PURE)
    same = 1.0 if kind == "ratio" else 0.0
    assert under_distribution_shift(A, n=1000, **{kind: same}).gamma == pytest.approx(
        0.05, rel=1e-12
    )


def test_what_never_happens_stays_so_where_the_divergence_says_so():
    """KL(P || Q) is finite also if Q has an event that P excludes."""
    assert moved(0.0, 99, reverse_kl=1e-3) == moved(0.0, 99, chi2=1e-3) == 0
    assert moved(0.0, 99, kl=1e-3) >= -math.expm1(-0.1)


def test_a_composition_moves_once():
    found = under_distribution_shift(compose(A, B), kl=1e-6, n=199)
    assert found.gamma == pytest.approx(moved(0.07, 199, kl=1e-6), rel=1e-12)
    assert found.confidence == pytest.approx(0.94)
    marginal = under_distribution_shift(compose(A, M), kl=1e-6, n=199)
    assert marginal.gamma == pytest.approx(moved(0.16, 199, kl=1e-6), rel=1e-12)
    assert marginal.confidence is None


def test_releases_of_one_sampling_share_its_event():
    both = [under_distribution_shift(g, kl=1e-6, n=199) for g in (A, sampled(2.0, 0.05, 0.99, "a"))]
    assert compose(*both).gamma == both[0].gamma
    other = under_distribution_shift(A, reverse_kl=1e-6, n=199)
    assert compose(both[0], other).gamma > both[0].gamma  # Another statement may be another event.
    assert compose(*both, under_distribution_shift(B, kl=1e-6, n=199)).gamma > both[0].gamma


@pytest.mark.parametrize(("kl", "n"), [(-1e-9, 5), (math.nan, 5), (math.inf, 5), (0.1, 0)])
def test_out_of_range(kl, n):
    with pytest.raises(ValueError, match=r"(kl|n) must be"):
        under_distribution_shift(A, kl=kl, n=n)


@pytest.mark.parametrize("bounds", [{}, {"kl": 0.1, "chi2": 0.1}])
def test_one_bound_is_given(bounds):
    with pytest.raises(
        ValueError, match="exactly one of kl, reverse_kl, chi2, ratio must be given"
    ):
        under_distribution_shift(A, n=5, **bounds)
    with pytest.raises(ValueError, match="ratio must be at least 1"):
        under_distribution_shift(A, n=5, ratio=0.9)


def test_tiny_numbers_are_not_rounded_to_none():
    """sqrt(c N gamma) is as large as gamma here, though c gamma is below every float."""
    tiny = Guarantee(1.0, gamma=1e-200, confidence=0.9)
    assert under_distribution_shift(tiny, chi2=1e-201, n=9).gamma >= 2e-200


TWO = Guarantee(1.0, 0.0, 0.05, 0.99, (SampledEvent(0.05, 0.99, "two", 2),))


@pytest.mark.parametrize(("by", "expected"), [(1.02, 0.0563), (1.1, 0.0843), (1.3, 0.1654)])
def test_exponential_means_that_are_off(by, expected):
    """Two records decide, whatever n is: the true gamma is .05 ** (1 / by)."""
    tau = math.log(by) + 1 / by - 1
    found = under_distribution_shift(TWO, kl=tau, n=1000, records=2)
    assert found.gamma == pytest.approx(expected, abs=5e-5)
    assert 0.05 ** (1 / by) < found.gamma < under_distribution_shift(TWO, kl=tau, n=1000).gamma
    assert under_distribution_shift(TWO, kl=tau, n=10**9, records=2).gamma == found.gamma


def test_groups_count_two_records_for_each():
    three = under_distribution_shift(group(TWO, 3), kl=1e-3, n=1000, records=2)
    assert three.gamma == pytest.approx(moved(0.15, 5, kl=1e-3))
    assert under_distribution_shift(
        compose(TWO, TWO), kl=1e-3, n=9, records=2
    ).gamma == pytest.approx(moved(0.05, 1, kl=1e-3))


@pytest.mark.parametrize(
    "guarantee",
    [
        A,
        compose(TWO, A),
        dataclasses.replace(TWO, gamma=0.06),
        under_distribution_shift(TWO, kl=0.0, n=9),
    ],
)
def test_records_that_do_not_decide_all_are_refused(guarantee):
    with pytest.raises(ValueError, match="records=2"):
        under_distribution_shift(guarantee, kl=1e-3, n=1000, records=2)


def test_a_saved_guarantee_knows_its_records():
    for guarantee in (TWO, A):
        read = guarantee_from_json(json.loads(json.dumps(guarantee_to_json(guarantee))))
        assert vars(read.events[0]) == vars(guarantee.events[0])
