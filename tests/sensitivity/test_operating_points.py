"""Operating points against recorded values, exact arithmetic and simulated coverage."""

import math
import re
from fractions import Fraction

import jax
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import operating_point
from dpjax.sensitivity import _operating_points
from dpjax.sensitivity._operating_points import confidence_of_each
from tables import for_each

DKW = {"method": "dkw"}
MARGINAL = {"confidence": None}


# Method "dkw" is Table 1 of the paper, to the last digit.


@pytest.mark.parametrize("mode", ["gamma_only", "m_only", "m_and_gamma"])
def test_dkw_is_the_recorded_table(reference, mode):
    for row in reference("r_diffpriv")["operating_points_dkw"][mode]:
        point = operating_point(**row["input"], method="dkw")
        assert (point.m, point.k) == (row["m"], row["k"]), row
        assert point.gamma == pytest.approx(row["gamma"], rel=1e-12), row
        assert point.rho == pytest.approx(row["rho"], rel=1e-12), row
        assert (point.method, point.confidence) == ("dkw", None)


def test_dkw_refuses_the_recorded_infeasible_rows(reference):
    for row in reference("r_diffpriv")["operating_points_dkw"]["infeasible"]:
        with pytest.raises(ValueError, match="too small"):
            operating_point(m=row["m"], gamma=row["gamma"], method="dkw")


# What is infeasible is refused, and the advice is right.


def advice(m, gamma, **options):
    with pytest.raises(ValueError, match=f"m={m} is too small for gamma") as refused:
        operating_point(m=m, gamma=gamma, **options)
    text = str(refused.value)
    return (
        int(re.search(r"m of at least (\d+)", text)[1]),
        float((re.search(r"gamma of at least ([-+.e\d]+)", text) or [0, "nan"])[1]),
    )


INFEASIBLE = [(1, 0.01), (2, 0.1), (10, 0.05), (10, 1e-4), (50, 0.005), (70, 0.009), (500, 1e-4)]


@pytest.mark.parametrize("options", [{}, {"confidence": 0.5}, MARGINAL, DKW], ids=str)
def test_the_m_that_a_refusal_names_is_the_least_that_will_do(options):
    for m, gamma in INFEASIBLE:
        least_m, _ = advice(m, gamma, **options)
        assert operating_point(m=least_m, gamma=gamma, **options).k == least_m
        with pytest.raises(ValueError, match="too small"):
            operating_point(m=least_m - 1, gamma=gamma, **options)


@pytest.mark.parametrize("options", [{}, {"confidence": 0.5}, MARGINAL, DKW], ids=str)
def test_the_gamma_that_a_refusal_names_will_do(options):
    for m, gamma in INFEASIBLE[options == DKW :]:  # For a single pair no gamma below 1 will.
        _, least_gamma = advice(m, gamma, **options)
        assert operating_point(m=m, gamma=least_gamma, **options).k == m
        assert least_gamma == pytest.approx(operating_point(m=m, **options).gamma, rel=1e-5)


def test_a_refusal_never_names_more_pairs_than_the_limit():
    with pytest.raises(ValueError, match="gamma") as refused:
        operating_point(m=10, gamma=1e-11)
    numbers = [int(number) for number in re.findall(r"m of at least (\d+)", str(refused.value))]
    assert all(number <= 10**10 for number in numbers)


def test_one_pair_under_dkw_is_refused_and_two_will_do():
    with pytest.raises(ValueError, match=r"m=1 is too small.*at least 2"):
        operating_point(m=1, method="dkw")
    with pytest.raises(ValueError, match="m=1 is too small") as refused:
        operating_point(m=1, gamma=0.5, method="dkw")
    assert "gamma of at least 1" not in str(refused.value)
    assert operating_point(m=2, method="dkw").gamma < 1


# Values.


@pytest.mark.parametrize(
    ("gamma", "dkw", "exact", "marginal"),
    [
        (0.2, 61, 21, 4),
        (0.1, 285, 44, 9),
        (0.05, 1_305, 90, 19),
        (0.01, 41_971, 459, 99),
        (0.001, 5_486_187, 4_603, 999),
    ],
)
def test_least_m(gamma, dkw, exact, marginal):
    points = [operating_point(gamma=gamma, **options) for options in (DKW, {}, MARGINAL)]
    assert [point.m for point in points] == [dkw, exact, marginal]
    assert all(point.k == point.m and point.gamma == gamma for point in points)


def test_least_k_of_the_three_statements():
    ks = [operating_point(m=1500, gamma=0.1, **options).k for options in (DKW, {}, MARGINAL)]
    assert ks == [1421, 1377, 1351]


def test_default_confidence_depends_on_the_method():
    assert operating_point(gamma=0.1).confidence == 0.99
    assert operating_point(gamma=0.1) == operating_point(gamma=0.1, confidence=0.99)
    assert operating_point(gamma=0.1, method="dkw").confidence is None
    assert operating_point(gamma=0.1, **DKW) == operating_point(gamma=0.1, **DKW, **MARGINAL)


def test_least_gamma_given_m_alone():
    for m in (1, 19, 90, 10**6, 10**10):
        exact, marginal = operating_point(m=m), operating_point(m=m, confidence=None)
        assert exact.gamma == pytest.approx(-math.expm1(math.log(0.01) / m), rel=1e-12)
        assert marginal.gamma == pytest.approx(1 / (m + 1), rel=1e-12)
        assert exact.k == marginal.k == m


def coverage_probability(m, gamma):
    """P(Binomial(m, 1 - gamma) <= k - 1) for k = 1..m, as exact rationals."""
    p, total, sums = 1 - Fraction(gamma), Fraction(0), []
    for j in range(m):
        total += math.comb(m, j) * p**j * (1 - p) ** (m - j)
        sums.append(total)
    return sums


def test_k_of_few_pairs_is_that_of_many(monkeypatch):
    """Integers up to 1000 pairs, and SciPy beyond."""
    cases = [(900, 0.05, 0.99), (1000, 0.01, 0.5), (999, 0.9, 0.999), (700, 0.02, 0.9)]
    few = [_operating_points._least_k(*case) for case in cases]
    assert few[0] == 871
    monkeypatch.setattr(_operating_points, "_FEW_PAIRS", 0)
    assert [_operating_points._least_k(*case) for case in cases] == few


def test_exact_k_is_the_least_by_rational_arithmetic():
    for m in (1, 2, 3, 7, 20, 33):
        for gamma in (0.01, 0.1, 0.2, 0.3, 0.5, 0.75, 0.9):
            covered = coverage_probability(m, gamma)
            for confidence in (0.01, 0.3, 0.5, 0.75, 0.9, 0.99, 0.999999):
                enough = [k for k in range(1, m + 1) if covered[k - 1] >= Fraction(confidence)]
                if not enough:
                    with pytest.raises(ValueError, match="too small"):
                        operating_point(m=m, gamma=gamma, confidence=confidence)
                    continue
                point = operating_point(m=m, gamma=gamma, confidence=confidence)
                assert point.k == enough[0], (m, gamma, confidence)


def test_exact_k_is_feasible_where_floats_cannot_tell():
    """Confidences next to what a k reaches: in floats, every third k was one too small."""
    for m, gamma in ((5, 0.5), (20, 0.1), (20, 0.3), (60, 0.05)):
        covered = coverage_probability(m, gamma)
        for k in range(m // 2, m):
            nearest = float(covered[k - 1])
            for confidence in (nearest, math.nextafter(nearest, 0), math.nextafter(nearest, 1)):
                if not 0 < confidence < 1:
                    continue
                k_taken = operating_point(m=m, gamma=gamma, confidence=confidence).k
                enough = [c >= Fraction(confidence) for c in covered]
                assert k_taken == enough.index(True) + 1, (m, gamma, confidence)
    # Rational arithmetic would take minutes: one more is taken.
    m, gamma, confidence = 10**5 + 1, 0.5, 0.5
    assert operating_point(m=m, gamma=gamma, confidence=confidence).k == (m + 1) // 2 + 1


def doubt(m, k, gamma):
    """P(Binomial(m, 1 - gamma) >= k), to at least 12 digits for any m: a sum from its top term."""
    with mpmath.workdps(40):
        g, j = mpmath.mpf(gamma), m - k
        choose = mpmath.loggamma(m + 1) - mpmath.loggamma(j + 1) - mpmath.loggamma(k + 1)
        top = mpmath.exp(choose + j * mpmath.log(g) + k * mpmath.log1p(-g))
    term = total = 1.0
    while j > 0 and term > 1e-18 * total:
        term *= j / (m - j + 1) * ((1 - gamma) / gamma)
        j, total = j - 1, total + term
    return top * mpmath.mpf(total)


@pytest.mark.parametrize("m", [10**3, 10**5, 10**7, 10**9])
@pytest.mark.parametrize("confidence", [0.5, 0.99, 1 - 1e-9])
def test_exact_k_is_the_least_up_to_a_billion_pairs(m, confidence):
    for gamma in (0.5, 0.2, 0.05, 0.001, 1e-6, 1e-8):
        if m < operating_point(gamma=gamma, confidence=confidence).m:
            continue
        k = operating_point(m=m, gamma=gamma, confidence=confidence).k
        allowed = 1 - mpmath.mpf(confidence)
        assert doubt(m, k, gamma) <= allowed < doubt(m, k - 1, gamma), gamma


def test_the_sum_used_above_is_the_binomial_tail():
    assert float(doubt(1000, 950, 0.05)) == pytest.approx(stats.binom.sf(949, 1000, 0.95), rel=1e-9)


def test_confidence_near_one_is_never_rounded_inward():
    # In float64 the coverage itself, near 1, does not resolve what is left of it.
    for m, gamma, confidence in [
        (93966285, 0.2032833414833491, 0.9999999999999825),
        (4503213, 0.09514291894104802, 0.9999999999999741),
        (710832713, 0.038327568492590364, 0.9999999999999257),
    ]:
        k = operating_point(m=m, gamma=gamma, confidence=confidence).k
        assert doubt(m, k, gamma) <= 1 - mpmath.mpf(confidence)


@given(m=st.integers(1, 10**9), gamma=st.floats(1e-9, 0.999))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_marginal_k_is_the_ceiling_in_rational_arithmetic(m, gamma):
    k = math.ceil((1 - Fraction(gamma)) * (m + 1))
    if k > m:
        with pytest.raises(ValueError, match="too small"):
            operating_point(m=m, gamma=gamma, confidence=None)
    else:
        assert operating_point(m=m, gamma=gamma, confidence=None).k == k


@given(
    m=st.integers(2, 10**9),
    gamma=st.floats(1e-3, 0.99),
    options=st.sampled_from([{}, {"confidence": 0.5}, {"confidence": 0.999999}, MARGINAL, DKW]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_round_trips(m, gamma, options):
    from_gamma = operating_point(gamma=gamma, **options)
    assert operating_point(m=from_gamma.m, gamma=gamma, **options).k == from_gamma.k
    if from_gamma.m > 1 + (options == DKW):  # One pair fewer needs a larger gamma.
        assert operating_point(m=from_gamma.m - 1, **options).gamma > gamma
    from_m = operating_point(m=m, **options)
    assert operating_point(m=m, gamma=from_m.gamma, **options).k == m
    assert operating_point(gamma=from_m.gamma * (1 + 1e-9), **options).m <= m
    with pytest.raises(ValueError, match="too small"):
        operating_point(m=m, gamma=from_m.gamma * (1 - 1e-9), **options)


GAMMAS = [j / 100 for j in range(1, 100)] + [1 / j for j in range(2, 30)] + [0.001, 1 / 3, 2 / 3]


@pytest.mark.parametrize("options", [MARGINAL, {}, {"confidence": 0.5}, {"confidence": 0.9}, DKW])
def test_every_statement_holds_in_rational_arithmetic(options):
    """Gamma and the confidence are floats. .3 lies below three tenths, so 7 of 10 is too few.

    What else reaches a rank is a confidence, which is one of a float, too.
    """
    for m in (1, 2, 3, 9, 10, 19, 30):
        shares = {}
        for gamma in GAMMAS:
            try:
                point = operating_point(m=m, gamma=gamma, **options)
            except ValueError:
                continue
            if options == DKW:
                with mpmath.workdps(60):
                    rho = mpmath.mpf(point.rho)
                    band = rho + mpmath.sqrt(mpmath.log(1 / rho) / (2 * m))
                    assert mpmath.mpf(point.k) / m >= 1 - mpmath.mpf(gamma) + band
            elif options == MARGINAL:
                assert Fraction(point.k, m + 1) >= 1 - Fraction(gamma)
                assert point.k == 1 or Fraction(point.k - 1, m + 1) < 1 - Fraction(gamma)
            else:
                sums = shares.setdefault(gamma, coverage_probability(m, gamma))
                assert sums[point.k - 1] >= Fraction(point.confidence)
                assert point.k == 1 or sums[point.k - 2] < Fraction(point.confidence)


def test_the_float_of_three_tenths_needs_one_more_pair():
    assert Fraction(0.3) < Fraction(3, 10)
    assert operating_point(m=9, gamma=0.3, **MARGINAL).k == 8
    assert operating_point(m=9, gamma=0.1, **MARGINAL).k == 9  # Above one tenth.


# Coverage, simulated: what is promised of Phi(G_(k)) holds, and would not at a smaller k.

RUNS = 20_000
# Every check below has a false-alarm rate of at most 1e-6 where the promise just holds.
FALSE_ALARM = 1e-6


def uncovered(point, k, distribution):
    """1 - Phi(G_(k)) in each of many runs, for exponential distances or for these rounded up."""
    draws = np.random.default_rng(1941).standard_exponential((RUNS, point.m))
    if distribution == "discrete":
        draws = np.ceil(draws * 100) / 100
    return np.exp(-np.partition(draws, k - 1, axis=1)[:, k - 1])


def too_often(fails, rate):
    return fails.sum() > stats.binom.isf(FALSE_ALARM, RUNS, rate)


def too_much(uncovered, gamma):
    standard_error = uncovered.std() / math.sqrt(RUNS)
    return uncovered.mean() > gamma + stats.norm.isf(FALSE_ALARM) * standard_error


@pytest.mark.parametrize("distribution", ["continuous", "discrete"])
def test_coverage_exact(distribution):
    point = operating_point(m=300, gamma=0.1)
    assert not too_often(uncovered(point, point.k, distribution) > 0.1, 0.01)
    assert too_often(uncovered(point, point.k - 3, distribution) > 0.1, 0.01)


@pytest.mark.parametrize("distribution", ["continuous", "discrete"])
def test_coverage_marginal(distribution):
    point = operating_point(m=300, gamma=0.1, confidence=None)
    assert not too_much(uncovered(point, point.k, distribution), 0.1)
    assert too_much(uncovered(point, point.k - 3, distribution), 0.1)


@pytest.mark.parametrize("distribution", ["continuous", "discrete"])
def test_coverage_dkw(distribution):
    # Marginally, and as a high-probability statement: (gamma - rho) at confidence 1 - rho.
    point = operating_point(m=300, gamma=0.2, method="dkw")
    missed = uncovered(point, point.k, distribution)
    assert not too_much(missed, 0.2)
    assert not too_often(missed > 0.2 - point.rho, point.rho)
    missed = uncovered(point, round(0.92 * point.k), distribution)
    assert too_often(missed > 0.2 - point.rho, point.rho)
    assert too_much(uncovered(point, round(0.84 * point.k), distribution), 0.2)


def test_marginal_is_weaker_than_it_sounds():
    # Design: at m = 19, gamma = .05, the estimate at hand covers less than .95 in 38% of runs.
    point = operating_point(gamma=0.05, confidence=None)
    share = (uncovered(point, point.k, "continuous") > 0.05).mean()
    assert share == pytest.approx(0.95**19, abs=5 * math.sqrt(0.25 / RUNS))  # 5 standard errors


# Bad inputs.


@pytest.mark.parametrize("options", [{}, MARGINAL, DKW], ids=str)
@pytest.mark.parametrize("gamma", [0, 1, -0.1, 2, float("nan"), float("inf"), -float("inf")])
def test_gamma_out_of_range(gamma, options):
    with pytest.raises(ValueError, match=f"gamma must be strictly between 0 and 1, got {gamma:g}"):
        operating_point(m=100, gamma=gamma, **options)


@pytest.mark.parametrize("gamma", ["0.1", True, [0.1], 1j, np.array([0.1])])
def test_gamma_that_is_no_number(gamma):
    with pytest.raises(TypeError, match="gamma"):
        operating_point(gamma=gamma)


@pytest.mark.parametrize("options", [{}, MARGINAL, DKW], ids=str)
@pytest.mark.parametrize("gamma", [1e-11, 1e-17, 1e-100, 1e-300, 5e-324])
def test_more_than_ten_billion_pairs_are_refused(gamma, options):
    with pytest.raises(ValueError, match="limit"):
        operating_point(gamma=gamma, **options)


@pytest.mark.parametrize("m", [0, -1, 10**10 + 1])
def test_m_out_of_range(m):
    with pytest.raises(ValueError, match=f"m must be an integer .* got {m}"):
        operating_point(m=m)


@pytest.mark.parametrize("m", [1.5, 100.0, "100", True, [100]])
def test_m_that_is_no_integer(m):
    with pytest.raises(TypeError, match="m must be an integer"):
        operating_point(m=m)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 1.5, float("nan")])
def test_confidence_out_of_range(confidence):
    with pytest.raises(ValueError, match=f"confidence must be .* got {confidence:g}"):
        operating_point(m=100, confidence=confidence)


def test_combinations_that_mean_nothing():
    with pytest.raises(ValueError, match="neither"):
        operating_point()
    with pytest.raises(ValueError, match="method must be one of"):
        operating_point(m=100, method="wilks")
    with pytest.raises(ValueError, match=r"confidence must be None with method=.dkw., got 0.99"):
        operating_point(m=100, method="dkw", confidence=0.99)
    with pytest.raises(TypeError, match="confidence"):
        operating_point(m=100, confidence="high")


def test_traced_parameters_are_refused():
    for make in (
        lambda value: operating_point(gamma=value),
        lambda value: operating_point(m=value),
        lambda value: operating_point(m=100, confidence=value),
    ):
        with pytest.raises(TypeError, match=r"(gamma|m|confidence) (is traced|must be)"):
            jax.jit(make)(5)


def test_integers_and_floats_of_numpy_are_accepted():
    assert operating_point(m=np.int64(1500), gamma=np.float64(0.1)).k == 1377


# The least gamma is not below the exact one by a single rounding.


SIZES = [1, 2, 3, 7, 10, 90, 459, 999, 4_603, 10**6 - 1, 10**7, 10**10]


@pytest.mark.parametrize("confidence", [0.01, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-12])
@for_each("m", SIZES)
def test_the_least_gamma_covers_in_exact_arithmetic(m, confidence):
    gamma = operating_point(m=m, confidence=confidence).gamma
    with mpmath.workdps(400):
        missed = (1 - mpmath.mpf(gamma)) ** m
        assert missed <= 1 - mpmath.mpf(confidence)
        lower = (1 - mpmath.mpf(gamma * (1 - 1e-14))) ** m
        assert lower > 1 - mpmath.mpf(confidence)


@for_each("m", SIZES)
def test_the_least_marginal_gamma_covers_in_exact_arithmetic(m):
    gamma = operating_point(m=m, confidence=None).gamma
    assert Fraction(1, m + 1) <= Fraction(gamma) <= Fraction(1, m + 1) * (1 + Fraction(2, 10**15))


@pytest.mark.parametrize("m", [2, 100, 1_305, 41_971, 10**8])
def test_the_least_gamma_of_theorem_15_is_rounded_up(m):
    point = operating_point(m=m, **DKW)
    with mpmath.workdps(50):
        rho = mpmath.mpf(point.rho)
        exact = rho + mpmath.sqrt(mpmath.log(1 / rho) / (2 * m))
        assert exact <= point.gamma <= exact * (1 + 1e-15)


@pytest.mark.parametrize("gamma", [0.5, 0.3, 0.1, 0.05, 0.01, 1e-3, 1e-4])
def test_the_least_m_is_feasible_in_exact_arithmetic(gamma):
    m = _operating_points._least_m(gamma, 0.99)
    assert (1 - Fraction(gamma)) ** m <= 1 - Fraction(0.99)
    assert operating_point(gamma=gamma).m == m
    point = operating_point(gamma=gamma, **DKW)
    with mpmath.workdps(50):
        rho = mpmath.mpf(point.rho)
        assert rho + mpmath.sqrt(mpmath.log(1 / rho) / (2 * point.m)) <= gamma


@given(st.floats(0.01, 0.999999), st.integers(1, 10**6))
def test_statements_at_their_confidence_hold_together(confidence, statements):
    each = confidence_of_each(confidence, statements)
    assert statements * (1 - Fraction(each)) <= 1 - Fraction(confidence)
    assert each == confidence or statements > 1
