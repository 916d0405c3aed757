"""One release for each pair: the law of its loss, margins that point outward, coverage."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import dpjax
from dpjax import oracles, targets
from dpjax._core._losses import PairLoss
from dpjax._exact._numerics import TailBand
from dpjax.auditing import _privacy_profile as sticks
from dpjax.auditing import _profile_pairs as losses
from dpjax.auditing._privacy_profile import PrivacyProfile, _curve
from dpjax.auditing._profile_pairs import Joint
from dpjax.mechanisms._selection import EXPONENTIAL_RULE, PERMUTE_AND_FLIP_RULE

EPSILONS = np.array([0.0, 0.2, 0.5, 1.0])
N, DRAWS = 50, 200_000
MEANS = jnp.linspace(0, 5, 20)


def exponential(key, n):
    return jax.random.exponential(key, (n,))


def twenty_means(database):
    return jnp.exp(-jnp.square(database[:, None] - MEANS[None])).mean(0)


def joint(*families):
    """Releases whose shifts are the differences of their arrays."""
    found = [
        PairLoss(f, jnp.sum, 1.0, 0.0, 0.0, 0.0, shifts=(lambda x: [x]) if f == "laplace" else None)
        for f in families
    ]
    pure = float(sum(f != "gaussian" for f in families))
    deviations = math.sqrt(sum(f == "gaussian" for f in families))
    return Joint((jnp.mean,) * len(found), tuple(found), pure, deviations, "last")


@functools.partial(jax.jit, static_argnames=("releases", "count"))
def drawn(key, releases, moved, count=DRAWS):
    one = functools.partial(losses.joint_loss, releases)
    return jax.vmap(one, (None, 0))(moved, jax.random.split(key, count))


@pytest.mark.parametrize(
    ("family", "exact", "divergence"),
    [
        ("laplace", sticks.laplace, lambda a: a + math.exp(-a) - 1),
        ("pure", sticks.pure, lambda a: a * math.tanh(a / 2)),
        ("gaussian", sticks.gaussian, lambda a: a * a / 2),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_one_part_has_the_exact_curve(key, family, exact, divergence, sign):
    """Each of 36 comparisons is at 5 standard errors: a false alarm in 1 of 10^4 keys."""
    a = 0.8
    found = np.asarray(drawn(key, joint(family), [jnp.array([sign * a])]), np.float64)
    # The margins may raise a loss by so much: that of a chance in 2^10 is the largest.
    margin = 2e-3 if family == "pure" else 2e-4
    comparisons = [(found, divergence(a)), (np.exp(-found), 1.0)]
    for epsilon in EPSILONS:
        truth = float(exact(np.array(a), np.array(epsilon)))
        comparisons.append((np.maximum(-np.expm1(epsilon - found), 0), truth))
    for sample, truth in comparisons:
        assert abs(sample.mean() - truth) <= 5 * sample.std() / math.sqrt(DRAWS) + margin


RULES = {"exponential": EXPONENTIAL_RULE, "permute_and_flip": PERMUTE_AND_FLIP_RULE}
each_rule = pytest.mark.parametrize("rule", RULES)


def selection(options, rule="exponential"):
    """A release whose arrays are logits."""
    loss = PairLoss(
        "range",
        lambda x: jnp.max(x) - jnp.min(x),
        1.0,
        0.0,
        0.0,
        0.0,
        logits=lambda x: x,
        log_pmf=RULES[rule].log_pmf,
        options=options,
    )
    return Joint((jnp.mean,), (loss,), 1.0, 0.0, "last")


@functools.partial(jax.jit, static_argnames=("releases", "count"))
def selected(key, releases, first, second, count=DRAWS):
    def one(key):
        return losses.joint_loss(releases, [first - second], key, [(first, second)])

    return np.float64(0) + jax.vmap(one)(jax.random.split(key, count))


def exact_pmf(rule, logits):
    """In float64; for permute-and-flip by the midpoints of 10^4 cells."""
    likely = np.exp(logits.astype(float) - logits.max())
    if rule == "exponential":
        return likely / likely.sum()
    kept = 1 - likely[:, None] * (np.arange(10**4) + 0.5) / 10**4
    return likely * (kept.prod(0) / kept).mean(1)


@each_rule
@pytest.mark.parametrize("options", [2, 40])
def test_a_selection_has_the_exact_curve_of_its_scores(key, rule, options):
    """Each of 20 comparisons is at 4 standard errors: a false alarm in 1 of 500 keys.

    The curve of the range alone is far above.
    """
    rng = np.random.default_rng(4)
    first, second = rng.normal(size=(2, options)).astype("float32") / 2
    found = np.asarray(selected(key, selection(options, rule), first, second), np.float64)
    p, q = (exact_pmf(rule, x) for x in (first, second))
    for epsilon in (0.0, 0.1, 0.2, 0.4, 0.6):
        exact = np.maximum(p - np.exp(epsilon) * q, 0).sum()
        sample = np.maximum(-np.expm1(epsilon - found), 0)
        margin = losses._LOGIT_ERROR * 20
        assert abs(sample.mean() - exact) <= 4 * sample.std() / math.sqrt(DRAWS) + margin
    if options == 40:
        limit = float(sticks.bounded_range(np.ptp(first - second), np.array(0.4)))
        assert limit > 1.5 * np.maximum(p - np.exp(0.4) * q, 0).sum()
    exact = np.log(p) - np.log(q)
    # Above the loss of an option, by the margin.
    off = np.min(np.where(found[:, None] >= exact, found[:, None] - exact, np.inf), axis=1)
    if options == 2:
        assert off.min() > 0.9 * losses._LOGIT_ERROR
        assert off.max() < 20 * losses._LOGIT_ERROR


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 300.0])
def test_no_option_is_drawn_too_rarely(spread):
    """Also where float32 rounds its probability to 0."""
    options = 1000
    logits = (spread * np.random.default_rng(5).normal(size=options)).astype("float32")
    chances = np.asarray(losses.chances_of(jax.nn.log_softmax(logits)), float)
    exact = scipy.special.softmax(logits.astype(float))
    factor = math.exp(losses.log_of_chances(selection(options)))
    assert np.all(exact <= factor * chances / chances.sum())
    assert 1 < factor < 1.02


@pytest.mark.parametrize(("best", "known"), [(-15.9, True), (-16.1, False)])
def test_weights_and_gaps_that_cancel_lose_the_range(key, best, known):
    first, second = np.array([[best, best - 1], [best, best - 1.5]], np.float32)
    found = np.asarray(selected(key, selection(2), first, second, 20))
    assert np.all(found == 0.5) != known


def test_the_chances_of_options_are_charged():
    curve = _curve(selection(1000))
    plain = dataclasses.replace(curve, chances=0.0)
    found, ideal = (float(x.of_losses(np.array(0.5), np.array(0.2))) for x in (curve, plain))
    assert ideal == pytest.approx(-math.expm1(-0.3))
    assert found == pytest.approx(ideal * math.exp(losses.log_of_chances(selection(1000))))


def scores(database):
    return -jnp.abs(database[:, None] - jnp.linspace(0, 4, 20)[None]).mean(0)


BASE = np.linspace(0.5, -1, 20)
MECHANISMS = {
    "exponential": dpjax.exponential(4 / N, 1.0),
    "permute-and-flip": dpjax.permute_and_flip(4 / N, 1.0),
    "weights": dpjax.permute_and_flip(4 / N, 1.0, log_base=BASE),
    "posterior": dpjax.posterior_sampler(8.0, 1.0, log_prior=BASE),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_profile_of_a_selection_is_near_the_truth(key, name):
    """At epsilon 0 the range says at least three times as much."""
    mechanism = MECHANISMS[name]
    unit = 4.0 * N if name == "posterior" else 1.0

    def target(database):
        return unit * scores(database)

    profile = dpjax.privacy_profile(key, (target, mechanism), exponential, n=N, m=5000)
    by_distance = dataclasses.replace(profile, losses=None)

    @jax.jit
    @jax.vmap
    def of_pair(key):
        records = exponential(key, N + 1)
        databases = jnp.stack([records[:-1], jnp.concatenate([records[: N - 1], records[N:]])])
        values = jax.vmap(target)(databases)
        return jax.vmap(lambda x: jax.vmap(mechanism.log_prob, (0, None))(jnp.arange(20), x))(
            values
        )

    p, q = np.exp(np.moveaxis(np.asarray(of_pair(jax.random.split(key, 5000)), float), 1, 0))
    truth = np.maximum(p - q, 0).sum(1).mean()
    assert truth < profile.advantage < 1.5 * truth
    assert by_distance.advantage > 3 * truth


def test_losses_of_coordinates_and_releases_add_up(key):
    moved = [jnp.array([0.3, -0.2, 0.0]), jnp.array([0.5]), jnp.array([0.4]), jnp.array([0.3])]
    releases = joint("laplace", "range", "gaussian", "gaussian")
    found = np.asarray(drawn(key, releases, moved), np.float64)
    laplace = sum(a + math.exp(-a) - 1 for a in (0.3, 0.2))
    truth = laplace + 0.5 * math.tanh(0.25) + (0.4**2 + 0.3**2) / 2
    assert abs(found.mean() - truth) <= 5 * found.std() / math.sqrt(DRAWS) + 2e-3
    # All draws are independent: of coordinates, releases and pairs.
    assert abs(np.exp(-found).mean() - 1) <= 5 * np.exp(-found).std() / math.sqrt(DRAWS) + 2e-3


@pytest.mark.parametrize("step", [997, pytest.param(1, marks=pytest.mark.slow)])
def test_every_logarithm_and_quantile_points_outward(step):
    """Of all 2^24 uniform numbers, by enumeration: on other devices there is room to spare."""
    places = np.unique(np.append(np.arange(1, 2**24 + 1, step), [2**24 - 1, 2**24]))
    uniform = places / 2**24
    narrow = jnp.asarray(uniform, jnp.float32)
    assert np.array_equal(np.asarray(narrow, np.float64), uniform)
    exact = -np.log(uniform)
    relative, absolute = losses.LOG_ERROR
    error = np.abs(np.asarray(-jnp.log(narrow), np.float64) - exact)
    assert np.all(error <= (relative * exact + absolute) / 8)
    exact = scipy.special.ndtri(uniform[:-1])
    error = np.abs(np.asarray(jax.scipy.special.ndtri(narrow[:-1]), np.float64) - exact)
    assert np.all(error <= losses.QUANTILE_ERROR * (1 + np.abs(exact)) / 8)
    assert exact.max() < losses._LARGEST_NORMAL
    assert jax.scipy.special.ndtri(jnp.float32(1)) == jnp.inf


@pytest.mark.parametrize("family", ["laplace", "pure", "gaussian"])
def test_no_loss_is_below_that_of_exact_arithmetic(key, family):
    """At the upper ends of cells, and for shifts that are off as far as the margins allow."""
    a, off, count = 0.8, 0.9 * 2.0**-10, 5000
    found = np.asarray(drawn(key, joint(family), [jnp.array([a])], count), np.float64)
    number = ["laplace", "pure", "gaussian"].index(family)
    keys = jax.vmap(lambda k: jax.random.fold_in(k, number))(jax.random.split(key, count))
    bits = np.asarray(jax.vmap(lambda k: jax.random.bits(k, (1,), jnp.uint32))(keys)).ravel()
    uniform = ((bits >> 8) + 1) / 2**24
    if family == "laplace":
        exact = np.where(bits & 1, a, np.maximum(a + 2 * np.log(uniform), -a))
        assert np.all(found >= exact - 1e-7)
        inside = (exact > -a) & (exact < a)
        assert np.all(found[inside] > exact[inside] + 2.0**-18)
    elif family == "pure":
        up = uniform - 2.0**-24 < scipy.special.expit(a * (1 + off) + off)
        assert np.all(found >= np.where(up, a, -a) - 1e-7)
        assert np.sum(found < 0) > count / 5
    else:
        exact = a * scipy.special.ndtri(uniform) + a * a / 2
        assert np.all(found > exact + 0.9 * a * losses.QUANTILE_ERROR)


def test_an_infinite_or_unknown_shift_loses_everything(key):
    for family in ("laplace", "pure", "gaussian"):
        for bad in (jnp.inf, jnp.nan):
            found = drawn(key, joint(family), [jnp.array([bad])], 100)
            assert not np.any(np.asarray(found) < np.inf)


def test_tables_are_charged_to_losses():
    one = dataclasses.replace(joint("laplace").losses[0], loss=0.05, missed=1e-3)
    curve = _curve(dataclasses.replace(joint("laplace"), losses=(one,)))
    found = float(curve.of_losses(np.array(2.0), np.array(1.0)))
    expected = math.exp(0.05) * (1 - math.exp(1 - 0.1 - 2)) + (1 + math.e) * 1e-3
    assert found == pytest.approx(expected, rel=1e-9)
    assert curve.of_losses(np.array(np.inf), np.array(1.0)) == 1


def profile_of(sample, confidence):
    """The second estimate alone: relative distances that say nothing."""
    half = (1 - Fraction(confidence)) / 2
    blind = TailBand.of(np.full(10, np.inf), half)
    curve = _curve(joint("laplace"))
    band = TailBand.of(sample, half)
    return PrivacyProfile(1.0, 0.0, N, len(sample), confidence, blind, curve, "", losses=band)


@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_limits_hold_at_all_epsilons_at_once(key, runs):
    """At confidence .9 half of .1 is for this estimate.

    Of 60 runs 10 may fail: a false alarm in 1 of 10^3. A limit that ignores chance fails in most.
    """
    m, rng = 4000, np.random.default_rng(3)
    epsilons = np.linspace(0, 2, 9)

    def sample(size):
        """Ten coordinates, whose shifts differ from pair to pair."""
        a = rng.exponential(0.1, (size, 1)) * rng.uniform(size=(size, 10))
        depth = np.where(rng.uniform(size=a.shape) < 0.5, 0, rng.exponential(size=a.shape))
        return np.maximum(a - 2 * depth, -a).sum(1)

    def curve(found):
        return [np.maximum(-np.expm1(e - found), 0).mean() for e in epsilons]

    truth = np.mean([curve(sample(200_000)) for _ in range(4)], 0)
    samples = [sample(m) for _ in range(runs)]
    limits = np.array([profile_of(x, 0.9).delta(epsilons) for x in samples])
    failed = (limits < truth).any(1).sum()
    assert failed <= (10 if runs == 60 else 0.05 * runs + 3 * math.sqrt(0.05 * runs))
    assert np.median(limits[:, 1]) <= 1.5 * truth[1]
    blind = np.array([curve(x) for x in samples])
    assert (blind < truth).any(1).sum() > runs / 2


def test_twenty_means_are_far_below_the_curve_of_their_distance(key):
    """At epsilon .5 the curve says .046 and one release for each pair .0011; .0004 is true."""
    mechanism = dpjax.laplace(
        dpjax.sample_sensitivity(key, twenty_means, exponential, n=N, norm="l1", gamma=0.05), 1.0
    )
    profile = dpjax.privacy_profile(key, (twenty_means, mechanism), exponential, n=N, m=20_000)
    by_distance = dataclasses.replace(profile, losses=None)
    assert by_distance.delta(0.5) > 0.03
    assert 4e-4 < profile.delta(0.5) < 0.002
    assert profile.gamma(0.5) == by_distance.gamma(0.5)
    assert np.all(profile.delta(EPSILONS) <= by_distance.delta(EPSILONS))


def test_the_confidence_is_split_only_where_two_estimates_help(key):
    """One coordinate has an exact curve. Gaussian noise has one in any number of them."""

    def profile(target, mechanism):
        return dpjax.privacy_profile(key, (target, mechanism), exponential, n=N, m=200)

    one = profile(jnp.mean, dpjax.laplace(1.0, 1.0))
    several = profile(twenty_means, dpjax.gaussian(1.0, 1.0, 1e-5))
    two = profile(lambda x: jnp.stack([x.mean(), x.mean()]), dpjax.laplace(1.0, 1.0))
    assert one.losses is None
    assert several.losses is None
    assert two.losses is not None
    whole, half = (TailBand.of(np.zeros(200), Fraction(e)) for e in (1 - Fraction(0.99), 0.005))
    np.testing.assert_allclose(one.band.limits, whole.limits)
    np.testing.assert_allclose(two.band.limits, half.limits, rtol=1e-6)
    np.testing.assert_allclose(two.losses.limits, half.limits, rtol=1e-6)


def two_means(x):
    return jnp.stack([x.mean(), x.mean()])


def coin(key):
    return jax.random.bernoulli(key).astype(jnp.float32)


@pytest.mark.parametrize(
    ("target", "oracle"),
    [
        (two_means, oracles.independent(coin)),
        (targets.summable(lambda x: jnp.stack([x, x]), average=True), oracles.independent(coin)),
        (
            targets.summable(lambda x: jnp.stack([x, x]), average=True),
            lambda key, n: jax.vmap(coin)(jax.random.split(key, n)),
        ),
    ],
    ids=["two databases", "two records", "two sums"],
)
def test_losses_are_those_of_the_pairs(key, target, oracle):
    """Two means of coins: a pair moves each by 1 / N, or not at all."""
    mechanism = dpjax.laplace(2 / N, 4.0)
    found = dpjax.privacy_profile(key, (target, mechanism), oracle, n=N, m=2000).losses
    like = jnp.zeros(2)
    scale, grid = mechanism.effective_scale(like=like), mechanism.grid_for(like=like)
    # The largest loss is that of noise above both values. Half of the pairs are alike.
    largest = 2 * (1 / N + grid) / scale
    assert largest < found.points[0] < largest * (1 + 1e-4)
    assert found.least(found.points < 1e-3) < 0.5
    assert -largest <= found.points[-1]
    # Every pair has noise of its own.
    assert len(np.unique(found.points)) > 5


def test_shifts_that_are_not_known_well_say_nothing(key):
    """The sum of a large number and a small one is rounded to steps of a quarter."""

    def target(x):
        return jnp.stack([2e6 + x.mean(), x.mean()])

    release = target, dpjax.laplace(1.0, 1.0)
    profile = dpjax.privacy_profile(key, release, exponential, n=N, m=200)
    assert np.all(profile.losses.points == np.inf)
    assert profile.delta(0.0) == dataclasses.replace(profile, losses=None).delta(0.0)
