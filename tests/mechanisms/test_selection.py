"""The exponential mechanism and permute-and-flip against their exact probabilities.

Chi-square tests: 2 * 10^5 draws under a fixed key, a false alarm once in 10^6 keys each.
"""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import dpjax
from dpjax.mechanisms._selection import PERMUTE_AND_FLIP_RULE, _rule

FALSE_ALARM = 1e-6
DRAWS = 100_000
FEW = 1000
K = 10  # All vectors of scores have this size, so that little is compiled.
RESPONSES = np.arange(K)
RULES = {"exponential": dpjax.exponential, "permute_and_flip": dpjax.permute_and_flip}
each_rule = pytest.mark.parametrize("rule", RULES)


def padded(*scores, dtype="float32"):
    """Scores, and responses that are never selected up to K."""
    least = -1e30 if dtype == "float32" else np.iinfo(dtype).min
    return np.array([*scores, *[least] * (K - len(scores))], dtype)


@pytest.fixture(params=[0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5)), 5, 6])
def row(request, reference):
    """Scores, mechanism parameters and exact log probabilities of a recorded case."""
    found = reference("peers")["selection"]["rows"][request.param]
    # Where scores only ever grow, the exponent has no 2: the same as twice the epsilon.
    epsilon = found["eps"] * (2 if found["monotonic"] else 1)
    exact = {name: np.array([float(mpmath.log(p)) for p in found[name]]) for name in RULES}
    return padded(*found["scores"]), float(found["sensitivity"]), epsilon, exact


def p_value(indices, pmf):
    """Of a chi-square test; 0 where a response without probability was drawn."""
    counts = np.bincount(indices, minlength=K)
    expected = np.zeros(K)
    expected[: len(pmf)] = np.asarray(pmf) * len(indices)
    likely = expected >= 5
    assert expected[~likely].sum() < 1e-6
    if counts[~likely].any():
        return 0.0
    if likely.sum() == 1:
        return 1.0
    return stats.chisquare(counts[likely], expected[likely], sum_check=False).pvalue


@each_rule
def test_log_prob_is_exact(rule, row, log_probs):
    scores, sensitivity, epsilon, exact = row
    log_prob = log_probs(RULES[rule](sensitivity, epsilon), RESPONSES, scores)
    count = len(exact[rule])
    np.testing.assert_allclose(log_prob[:count], exact[rule], rtol=6e-5, atol=5e-6)
    assert np.all(log_prob[count:] < -(2.0**17))


@each_rule
def test_draws_follow_the_exact_probabilities(rule, row, draws):
    scores, sensitivity, epsilon, exact = row
    indices = draws(RULES[rule](sensitivity, epsilon), scores, DRAWS)
    assert indices.dtype == "int32"
    assert p_value(indices, np.exp(exact[rule])) > FALSE_ALARM


@each_rule
def test_chi_square_test_has_power(rule, draws, log_probs):
    scores = padded(10.0, 5.0, 3.0, 0.0)

    def pmf(rule, epsilon):
        return np.exp(log_probs(RULES[rule](1.0, epsilon), RESPONSES, scores))

    indices = draws(RULES[rule](1.0, 0.5), scores, DRAWS)
    assert p_value(indices, pmf(rule, 0.5)) > FALSE_ALARM
    assert p_value(indices, pmf(rule, 0.55)) < FALSE_ALARM
    assert p_value(indices, pmf(rule, 0.45)) < FALSE_ALARM
    assert p_value(indices, scores[:4] / scores[:4].sum()) < FALSE_ALARM  # No exp.
    assert p_value(indices, pmf(rule, 1.0)) < FALSE_ALARM  # No factor 2.
    (other,) = set(RULES) - {rule}
    assert p_value(indices, pmf(other, 0.5)) < FALSE_ALARM


@each_rule
def test_probabilities_of_many_responses_sum_to_one(rule, log_probs, key):
    scores = 20 * jax.random.normal(key, (1000,))
    log_prob = log_probs(RULES[rule](1.0, 1.0), np.arange(1000), scores)
    assert np.exp(log_prob).sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("options", [1, 2, 7, 30, 300])
def test_the_quadrature_of_permute_and_flip_has_a_proven_error(options):
    """Against coefficients of the polynomial, with 200 digits: nodes and all of float32."""
    t, rest, weights = _rule(options)
    assert weights.sum() == pytest.approx(1, rel=1e-14)
    np.testing.assert_allclose(t + rest, 1, rtol=1e-15)
    rng = np.random.default_rng(options)
    for spread in (0.0, 1.0, 30.0):
        logits = (-spread * rng.exponential(size=options)).astype("float32")
        logits -= logits.max()
        likely = np.exp(logits.astype(float))
        with mpmath.workdps(200):
            coefficients = [mpmath.mpf(1)]
            for x in map(mpmath.mpf, likely[1:]):
                below = [*coefficients, 0], [0, *coefficients]
                coefficients = [a - x * b for a, b in zip(*below, strict=True)]
            exact = float(sum(c / (i + 1) for i, c in enumerate(coefficients)))
        products = np.prod(rest[:, None] + t[:, None] * (1 - likely[1:]), axis=1)
        assert products @ weights == pytest.approx(exact, rel=2.0**-40)
        exact = math.log(exact) + logits[0]
        found = float(PERMUTE_AND_FLIP_RULE.log_pmf(jnp.asarray(logits))[0])
        assert abs(found - exact) <= 2.0**-15 * (2 + abs(exact) + options / 2**6) / 8


@each_rule
def test_single_response_is_certain(rule, key, log_probs):
    mechanism = RULES[rule](1.0, 1.0)
    assert mechanism(key, np.zeros(1)).value == 0
    assert log_probs(mechanism, np.array([0]), np.zeros(1)) == pytest.approx(0, abs=1e-5)


@each_rule
def test_loss_on_a_neighbor_is_at_most_epsilon(rule, log_probs):
    mechanism = RULES[rule](1.0, 0.8)
    generator = np.random.default_rng(0)
    scores = 5 * generator.normal(size=(20, K))
    for x, y in zip(scores, scores + generator.choice([-1, 1], size=(20, K)), strict=True):
        loss = log_probs(mechanism, RESPONSES, x) - log_probs(mechanism, RESPONSES, y)
        assert np.abs(loss).max() <= 0.8 + 1e-4


@each_rule
def test_loss_reaches_epsilon_where_all_other_scores_rise(rule, log_probs):
    # The worst case: the best of many falls while the others rise.
    scores = np.zeros(1000)
    change = np.where(np.arange(1000) == 0, -1.0, 1.0)
    mechanism = RULES[rule](1.0, 1.0)
    here, there = (log_probs(mechanism, np.array([0]), x) for x in (scores, scores + change))
    assert 0.9 < (here - there)[0] <= 1.0 + 1e-4


def test_permute_and_flip_has_the_smaller_expected_gap(log_probs):
    scores = 3 * np.random.default_rng(1).normal(size=K)
    gaps = scores.max() - scores
    exponential, permute_and_flip = (
        np.exp(log_probs(RULES[rule](1.0, 1.0), RESPONSES, scores)) @ gaps for rule in RULES
    )
    assert permute_and_flip < exponential


# The scores.


@each_rule
@pytest.mark.parametrize("shift", [pytest.param(-1024, marks=pytest.mark.slow), 2**20])
def test_shift_of_all_scores_changes_nothing(rule, shift, draws, log_probs):
    scores = np.tile(np.array([3.0, 1.5, -2.0, 0.25, 0.0], "float32"), 2)
    mechanism, shifted = RULES[rule](1.0, 1.0), scores + np.float32(shift)
    np.testing.assert_array_equal(draws(mechanism, scores, FEW), draws(mechanism, shifted, FEW))
    here, there = (log_probs(mechanism, RESPONSES, x) for x in (scores, shifted))
    np.testing.assert_array_equal(here, there)


@each_rule
def test_integer_scores_near_the_limits_do_not_wrap(rule, draws, log_probs):
    mechanism = RULES[rule](1.0, 1.0)
    top = padded(2**31 - 1, 2**31 - 2, 2**31 - 4, dtype="int32")
    small = padded(0, -1, -3, dtype="int32")
    here, there = (log_probs(mechanism, RESPONSES, x)[:3] for x in (top, small))
    np.testing.assert_array_equal(here, there)
    if rule == "exponential":
        np.testing.assert_array_equal(draws(mechanism, top, FEW), draws(mechanism, small, FEW))


@pytest.mark.parametrize(
    "dtype", [pytest.param("bool", marks=pytest.mark.slow), "uint8", "bfloat16"]
)
def test_scores_of_any_real_dtype(dtype, key):
    mechanism = dpjax.exponential(1.0, 4.0)
    for bits in ([0, 1, 0, 0], [0, 0, 0, 1]):
        as_float = mechanism(key, np.array(bits, "float32")).value
        assert mechanism(key, jnp.asarray(bits).astype(dtype)).value == as_float


@each_rule
def test_nan_counts_as_the_lowest_score(rule, draws):
    mechanism = RULES[rule](1.0, 1.0)
    low, nan = (padded(1.0, x, 2.0, 0.0) for x in (-np.inf, np.nan))
    np.testing.assert_array_equal(draws(mechanism, nan, FEW), draws(mechanism, low, FEW))
    assert 1 not in draws(mechanism, nan, FEW)


@each_rule
def test_infinite_scores_win_and_lose(rule, draws):
    scores = padded(0.0, np.inf, -np.inf, np.nan)
    assert set(draws(RULES[rule](1.0, 1.0), scores, FEW)) == {1}


@each_rule
@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf, 3e38])
def test_equal_strange_scores_are_drawn_uniformly(rule, score, draws):
    indices = draws(RULES[rule](1.0, 1.0), np.full(K, score, "float32"), FEW)
    assert p_value(indices, np.full(K, 1 / K)) > FALSE_ALARM


@each_rule
@pytest.mark.parametrize(("unit", "sensitivity"), [(1000.0, 1e-10), (2.0**120, 1.0)])
def test_scores_of_any_size_are_told_apart(rule, unit, sensitivity, draws, log_probs):
    """Clamped at 2^61 steps of the grid, all of them were one: a uniform draw."""
    scores = unit * np.array([1, 2, 3, 4, 5, 4, 3, 2, 1, 0], "float32")
    mechanism = RULES[rule](sensitivity, 1.0)
    assert set(draws(mechanism, scores, FEW)) == {4}
    log_prob = log_probs(mechanism, RESPONSES, scores)
    assert log_prob[4] == pytest.approx(0, abs=1e-5)
    # The largest gap that is told apart, a temperature of 2 sensitivities times 2^18.
    assert np.all(np.delete(log_prob, 4) == pytest.approx(-(2.0**18), rel=1e-3))
    gap = mechanism.range()[1]
    assert gap == pytest.approx(2.0**18 * 2 * sensitivity, rel=1e-3)
    assert log_probs(mechanism, RESPONSES, padded(0.0, -gap))[1] == log_prob[0]


@pytest.mark.slow
@each_rule
def test_integers_of_64_bits_are_told_apart(rule, key, x64):
    mechanism = RULES[rule](1.0, 4.0)
    for dtype, top in (("int64", 2**63 - 1), ("uint64", 2**64 - 1)):
        scores = np.array([0, top - 40, top, top - 41], dtype)
        keys = jax.random.split(key, 200)
        chosen = jax.vmap(lambda k, s=scores, m=mechanism: m(k, s).value)(keys)
        assert np.all(np.asarray(chosen) == 2)


@each_rule
def test_scores_are_one_vector(rule, key):
    mechanism = RULES[rule](1.0, 1.0)
    for scores in (jnp.zeros((2, K)), jnp.asarray(1.0), {"a": jnp.zeros(K)}):
        with pytest.raises(ValueError, match="one array of scores"):
            mechanism(key, scores)
    batch = jax.vmap(mechanism)(jax.random.split(key, 2), jnp.zeros((2, K)))
    assert batch.value.shape == (2,)


@each_rule
def test_index_that_is_no_response_has_probability_zero(rule, log_probs):
    outputs = np.array([-1, K, 0])
    log_prob = log_probs(RULES[rule](1.0, 1.0), outputs, padded(1.0, 2.0))
    assert log_prob[0] == log_prob[1] == -np.inf
    assert np.isfinite(log_prob[2])


# Error bars.


@each_rule
@pytest.mark.parametrize("probability", [0.9])
def test_score_gap_bounds_the_gap(rule, probability, draws, log_probs):
    mechanism = RULES[rule](0.5, 1.0)
    scores = 4 * np.random.default_rng(2).normal(size=K).astype("float32")
    gaps = scores.max() - scores
    pmf = np.exp(log_probs(mechanism, RESPONSES, scores))
    bound = mechanism.score_gap(confidence=probability, shape=(K,), simultaneous=True)
    assert pmf[gaps > bound].sum() <= 1 - probability
    beyond = np.mean(gaps[draws(mechanism, scores, DRAWS)] > bound)
    assert beyond <= stats.binom.ppf(1 - FALSE_ALARM, DRAWS, 1 - probability) / DRAWS
    one = mechanism.score_gap(confidence=probability)
    assert np.all(pmf[gaps > one] <= 1 - probability)


def test_score_gap_is_not_vacuous(log_probs):
    # Many responses just below the bound: the exponential mechanism comes near it.
    mechanism = dpjax.exponential(1.0, 1.0)
    bound = mechanism.score_gap(confidence=0.5, shape=(1000,), simultaneous=True)
    scores = np.where(np.arange(1000) == 0, 0.9 * bound, 0.0)
    missed = 1 - np.exp(log_probs(mechanism, np.array([0]), scores))[0]
    assert 0.4 < missed < 0.7


def computations(draw, key):
    """How often a program of a target and a draw holds a step of the target."""
    compiled = jax.jit(lambda key, x: draw(key, 0.1234 * x + x)).lower(key, jnp.zeros(5)).compile()
    return compiled.as_text().count("constant(0.1234)")


@each_rule
def test_scores_are_computed_once(rule, key):
    """The best score and the gaps to it would be those of two roundings, and gaps wrap around."""
    assert computations(RULES[rule](1.0, 1.0)._draw, key) == 1


def test_a_value_is_computed_once_in_one_program_with_its_target(key):
    top = dpjax.queries.top_k(1.0, 1.0, k=2)
    assert computations(lambda key, x: top(key, x).value, key) == 1
