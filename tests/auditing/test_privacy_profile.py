"""The privacy profile: exact curves, the band, and what is refused."""

import dataclasses
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpjax
from dpjax import oracles, targets
from dpjax._core._losses import PairLoss
from dpjax._core._pytree import changed
from dpjax._exact._numerics import TailBand
from dpjax.auditing import _privacy_profile as sticks
from dpjax.auditing._privacy_profile import PrivacyProfile, _curve, _joint
from dpjax.auditing._profile_pairs import Joint
from dpjax.sensitivity._norms import difference

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0])
N = 50


def divergence(p, q, epsilon):
    return np.maximum(p - np.exp(epsilon) * q, 0).sum()


def exponential(key, n):
    return jax.random.exponential(key, (n,))


def curve(*families, pure=1.0, deviations=0.0):
    losses = tuple(PairLoss(family, jnp.sum, 1.0, 0.0, 0.0, 0.0) for family in families)
    return _curve(Joint((jnp.mean,) * len(losses), losses, pure, deviations, "last"))


@pytest.mark.parametrize("a", [0.01, 0.7, 3.0, 30.0])
def test_one_shift_of_laplace_noise_is_exact(a):
    y = np.linspace(-80, 120, 2_000_001)
    p, q = (np.exp(-np.abs(y - x)) / 2 * (y[1] - y[0]) for x in (0.0, a))
    exact = [divergence(p, q, epsilon) for epsilon in EPSILONS]
    np.testing.assert_allclose(sticks.laplace(np.array(a), EPSILONS), exact, atol=1e-6)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 6.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_gaussian_noise_is_exact_and_rounded_up(mu, sign):
    mpmath = pytest.importorskip("mpmath")
    for epsilon in sign * EPSILONS:
        with mpmath.workdps(50):
            x = mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu
            exact = mpmath.ncdf(x) - mpmath.exp(epsilon) * mpmath.ncdf(x - mu)
            found = float(sticks.gaussian(np.array(mu), np.array(epsilon)))
            assert exact <= found <= exact * (1 + 1e-9) + 1e-13 * (1 + abs(epsilon))


def test_randomized_response_is_exact():
    a = 1.3
    p = np.array([math.exp(a), 1]) / (1 + math.exp(a))
    exact = [divergence(p, p[::-1], epsilon) for epsilon in EPSILONS]
    np.testing.assert_allclose(sticks.pure(np.array(a), EPSILONS), exact, rtol=1e-12)


def test_no_exponential_mechanism_exceeds_its_range_and_two_options_reach_it():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        s = rng.normal(size=rng.integers(2, 6)) * 3
        t = s + rng.uniform(-1, 1, s.size)
        p, q = (scipy.special.softmax(x) for x in (s, t))
        epsilon = rng.uniform(-0.5, 1.5)
        limit = sticks.bounded_range(np.ptp(s - t), np.array(epsilon))
        assert divergence(p, q, epsilon) <= limit + 1e-12
    x = np.linspace(-8, 8, 8001)
    p, q = (scipy.special.expit(z) for z in (x, x - 1))
    both = [np.stack([z, 1 - z]) for z in (p, q)]
    reached = np.maximum(both[0] - math.exp(0.3) * both[1], 0).sum(0).max()
    assert reached == pytest.approx(float(sticks.bounded_range(np.array(1.0), 0.3)), abs=1e-6)


@pytest.mark.parametrize("family", [sticks.laplace, sticks.pure, sticks.bounded_range])
def test_negative_epsilons_are_those_of_the_swapped_pair(family):
    a = np.array(1.3)
    np.testing.assert_allclose(
        family(a, -EPSILONS), 1 - np.exp(-EPSILONS) * (1 - family(a, EPSILONS)), atol=1e-15
    )


def test_randomized_response_with_gaussian_noise_is_their_product():
    """Summed over both answers, and integrated over the noise."""
    found = curve("pure", "gaussian", pure=0.8, deviations=0.9)
    y = np.linspace(-12, 14, 400_001)
    normal = [scipy.stats.norm.pdf(y, x) * (y[1] - y[0]) for x in (0.9, 0.0)]
    likely = 1 / (1 + math.exp(-0.8))
    weights = ([likely, 1 - likely], [1 - likely, likely])
    p, q = (np.outer(w, z) for w, z in zip(weights, normal, strict=True))
    exact = [divergence(p, q, epsilon) for epsilon in EPSILONS]
    np.testing.assert_allclose(found.delta(np.array(1.0), EPSILONS), exact, atol=1e-7)


def test_laplace_releases_add_up_to_one_and_others_to_randomized_response():
    assert curve("laplace", "laplace").family == "laplace"
    assert curve("range").family == "range"
    for families in (("range", "range"), ("laplace", "range"), ("range", "laplace")):
        assert curve(*families).family == "pure"


def test_curves_grow_with_the_relative_distance_and_an_infinite_one_counts_1():
    distance = np.append(np.linspace(0, 50, 1001), np.inf)
    for families in (("laplace",), ("range",), ("pure",), ("gaussian",), ("pure", "gaussian")):
        deviations = float("gaussian" in families)
        found = curve(*families, deviations=deviations).delta(distance[:, None], EPSILONS[None])
        assert np.all(np.diff(found, axis=0) >= -1e-12)
        assert np.all((found >= 0) & (found <= 1))
        assert np.all(found[-1] == 1)


def test_tables_are_charged():
    losses = (PairLoss("laplace", jnp.sum, 1.0, 0.0, 0.25, 1e-3),)
    found = _curve(Joint((jnp.mean,), losses, 1.0, 0.0, "last"))
    expected = math.exp(0.25) * (1 - math.exp((1 - 0.5 - 2) / 2)) + (1 + math.e) * 1e-3
    assert float(found.delta(np.array(2.0), np.array(1.0))) == pytest.approx(expected, rel=1e-9)
    assert not found.is_pure(np.array(0.6), 1.0)
    assert found.is_pure(np.array(0.49), 1.0)


def test_the_band_is_that_of_order_statistics():
    draws = np.random.default_rng(0).permutation(1000.0 + np.arange(1000))
    band = TailBand.of(draws, Fraction(1, 100))
    ranks = np.round(2000 - band.points).astype(int)
    assert ranks[0] == 1
    assert ranks[-1] == 1000
    exact = scipy.stats.beta.isf(0.01 / len(ranks), ranks, 1001 - ranks)
    np.testing.assert_allclose(band.limits, exact, rtol=1e-7)
    assert band.least(band.points < 0) == 1
    assert band.least(band.points <= 1900) == band.limits[np.argmax(band.points <= 1900)]


def test_the_mean_of_a_curve_by_hand():
    band = TailBand(np.array([3.0, 1.0]), np.array([0.1, 0.6]))
    assert band.mean(lambda x: x / 4) == pytest.approx(0.1 + 0.5 * 0.75 + 0.4 * 0.25)
    assert TailBand.of(np.array([np.nan, 1.0]), Fraction(1, 2)).points[0] == np.inf


def laplace_profile(distances, confidence=0.99):
    band = TailBand.of(distances, 1 - Fraction(confidence))
    return PrivacyProfile(1.0, 0.0, N, len(distances), confidence, band, curve("laplace"), "")


def mean_of_exponentials(runs, m):
    """Limits of delta(1) and gamma(1), and what is true, for scales from the same samples."""
    rng = np.random.default_rng(1)
    k = dpjax.operating_point(m=m, gamma=0.05).k
    found = []
    for _ in range(runs):
        distances = np.abs(rng.exponential(size=m) - rng.exponential(size=m))
        scale = np.partition(distances, k - 1)[k - 1]
        profile = laplace_profile(distances / scale)
        true = math.exp(-scale) / (2 * scale + 1), math.exp(-scale)
        found.append((profile.delta(1.0), profile.gamma(1.0), *true))
    return np.array(found).T


@pytest.mark.parametrize(
    ("runs", "m"), [(40, 10**4), pytest.param(1000, 10**4, marks=pytest.mark.slow)]
)
def test_exponential_records_with_a_scale_from_the_same_samples(runs, m):
    """Both limits hold in 99% of runs. Of 40, four may fail: a false alarm in 1 of 10^4."""
    delta, gamma, true_delta, true_gamma = mean_of_exponentials(runs, m)
    allowed = 4 if runs == 40 else 15
    assert ((delta < true_delta) | (gamma < true_gamma)).sum() <= allowed
    assert np.median(delta) <= 0.0095
    assert np.median(true_delta) == pytest.approx(0.0062, abs=4e-4)  # So the limit has power.


def columns(identical):
    def oracle(key, n):
        shape = (n, 1 if identical else 10)
        return jnp.broadcast_to(jax.random.exponential(key, shape), (n, 10))

    return oracles.independent(lambda key: oracle(key, 1)[0])


@pytest.mark.parametrize(("identical", "limit"), [(False, 5e-4), (True, 0.055)])
def test_ten_losses_rarely_add_up_on_one_pair(identical, limit):
    rng = np.random.default_rng(2)
    width, m = (1 if identical else 10), 40_000

    def distances():
        moved = rng.exponential(size=(m, width)) - rng.exponential(size=(m, width))
        return np.broadcast_to(np.abs(moved), (m, 10))

    k = dpjax.operating_point(m=m, gamma=0.05).k
    scales = np.partition(distances(), k - 1, axis=0)[k - 1]
    assert laplace_profile((0.1 * distances() / scales).sum(1)).gamma(1.0) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("identical", "limit"), [(False, 5e-4), (True, 0.052)])
def test_ten_means_rarely_go_wrong_on_one_pair(key, identical, limit):
    """Where composing them says gamma .5."""
    oracle, releases = columns(identical), []
    for i in range(10):
        target = targets.summable(lambda x, i=i: x[i], average=True)
        sensitivity = dpjax.sample_sensitivity(
            jax.random.fold_in(key, i), target, oracle, n=N, norm="l1", gamma=0.05, m=20_000
        )
        releases.append((target, dpjax.laplace(sensitivity, 0.1)))
    profile = dpjax.privacy_profile(key, releases, oracle, n=N, m=100_000)
    assert profile.gamma(1.0 + 1e-6) <= limit
    composed = dpjax.accounting.compose(*(x.guarantee for _, x in releases))
    assert composed.gamma == pytest.approx(0.5)


def sampled(key, target, norm, oracle=exponential):
    return dpjax.sample_sensitivity(key, target, oracle, n=N, norm=norm, gamma=0.05, m=2000)


def scores(database):
    return -jnp.abs(database[:, None] - jnp.linspace(0, 4, 5)[None]).mean(0)


def test_relative_distances_are_those_of_the_pairs(key):
    """A mean of records that lie at 0 or 1: the pair moves it by 1 / N, or not at all."""
    coin = oracles.independent(lambda key: jax.random.bernoulli(key).astype(jnp.float32))
    laplace, gaussian = dpjax.laplace(2 / N, 1.0), dpjax.gaussian(2 / N, 1.0, 1e-5)
    for target in (jnp.mean, targets.summable(lambda x: x, average=True)):
        for mechanism, nominal in ((laplace, 1.0), (gaussian, 2 / N / gaussian.scale)):
            profile = dpjax.privacy_profile(key, (target, mechanism), coin, n=N, m=400)
            points = profile.band.points
            moved = (1 / N + mechanism.grid) / mechanism.effective_scale() / nominal
            assert moved < points[0] < moved * (1 + 1e-4)
            assert set(np.round(points, 3)) == {0.0, 0.5}


def test_adding_a_number_to_all_scores_costs_nothing(key):
    def target(database):
        return jnp.full(5, jnp.sum(database))

    profile = dpjax.privacy_profile(
        key, (target, dpjax.exponential(1.0, 1.0)), exponential, n=N, m=200
    )
    assert profile.band.points[0] < 1e-3


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_integer_scores_are_turned_around_without_wrapping(dtype):
    mechanism = dpjax.exponential(float(jnp.iinfo(dtype).max), 1.0)
    loss = mechanism.pair_loss(jax.ShapeDtypeStruct((2,), dtype))
    limits = jnp.iinfo(dtype)
    ends = [jnp.array([end, 3], dtype) for end in (limits.min, limits.max)]
    apart = float(limits.max) - float(limits.min)
    for one, other in (ends, ends[::-1]):
        moved = difference(loss.arrays(one), loss.arrays(other))
        expected = apart / mechanism.effective_scale(like=one)
        assert float(loss.shift(moved)) == pytest.approx(expected)


def test_mixtures_of_mechanisms(key):
    releases = [
        (jnp.mean, dpjax.laplace(4 / N, 0.5)),
        (jnp.mean, dpjax.gaussian(4 / N, 0.5, 1e-5)),
        (scores, dpjax.exponential(4 / N, 0.5)),
    ]
    profile = dpjax.privacy_profile(key, releases, exponential, n=N, m=500)
    assert (profile.epsilon, profile.default_delta) == (1.5, 1e-5)
    assert profile.curve.family == "pure"
    assert profile.curve.deviations == pytest.approx(4 / N / releases[1][1].scale, rel=1e-4)
    assert profile.gamma(1.5, 0.0) == 1
    assert profile.gamma(1.5) < 0.1
    guarantee = profile.guarantee(1.5)
    assert (guarantee.delta, guarantee.gamma) == (1e-5, profile.gamma(1.5))


def test_the_text_is_a_table(key):
    profile = laplace_profile(np.linspace(0, 2, 1000))
    lines = repr(profile).splitlines()
    assert lines[1].split() == ["epsilon", "gamma", "delta"]
    assert [float(line.split()[0]) for line in lines[2:]] == [0, 0.25, 0.5, 1, 1.5, 2, 4]
    deltas = profile.delta(EPSILONS)
    np.testing.assert_allclose(deltas, [profile.delta(x) for x in EPSILONS], rtol=1e-14)
    assert profile.advantage == profile.delta(0.0) == pytest.approx(profile.risk.advantage)
    found = profile.guarantee(1.0, 0.2)
    assert (found.epsilon, found.delta, found.confidence) == (1.0, 0.2, profile.confidence)
    assert found.gamma == profile.gamma(1.0, 0.2) < profile.gamma(1.0)


def test_pairs_are_others_than_those_of_a_sensitivity(key):
    distances = dpjax.sample_distances(key, jnp.mean, exponential, n=N, norm="l1", m=100)
    profile = dpjax.privacy_profile(
        key, (jnp.mean, dpjax.laplace(1.0, 1.0)), exponential, n=N, m=100
    )
    # Points are distances, rounded up by less than 2e-5: of the same pairs, all would be near one.
    apart = np.abs(profile.band.points[:, None] - np.asarray(distances)[None])
    assert np.mean(apart.min(axis=1) < 2e-5) < 0.3


def test_what_is_refused(key):
    def profile(releases, n=N, m=100):
        return dpjax.privacy_profile(key, releases, exponential, n=n, m=m)

    laplace = dpjax.laplace(sampled(key, jnp.mean, "l1"), 1.0)
    with pytest.raises(ValueError, match="n=50"):
        profile((jnp.mean, laplace), n=51)
    with pytest.raises(ValueError, match="target"):
        profile((jnp.sum, laplace))
    with pytest.raises(TypeError, match="not known"):
        profile((jnp.mean, dpjax.laplace(1.0, 1.0, noise="float")))
    median = dpjax.smooth_quantile(1.0, 1e-6, lower=0.0, upper=1.0)
    with pytest.raises(TypeError, match="not known"):
        profile((lambda database: database, median))
    several = dpjax.queries.select_each(1.0, 1.0, count=1)
    with pytest.raises(TypeError, match="not known"):
        profile((lambda database: scores(database)[None], several))
    for releases in ([], jnp.mean, [(jnp.mean, 1.0)], [laplace]):
        with pytest.raises(TypeError, match="releases"):
            profile(releases)
    with pytest.raises(ValueError, match="order"):
        profile((lambda database: database[0], dpjax.laplace(1.0, 1.0)))
    profile = laplace_profile(np.ones(10))
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            profile.delta(bad)
        with pytest.raises(ValueError, match="epsilon"):
            profile.gamma(bad)


def test_mechanisms_for_other_pairs_are_refused():
    known, mechanism = dpjax.assume_sensitivity(1.0, norm="l1"), dpjax.laplace(1.0, 1.0)
    added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    for field, message in (
        ({"n": N - 1}, "n must be 49"),
        ({"relation": added}, "for replace-one"),
    ):
        other = changed(mechanism, sensitivity=dataclasses.replace(known, **field))
        with pytest.raises(ValueError, match=message):
            _joint([(jnp.mean, mechanism), (jnp.mean, other)], exponential, N)
    with pytest.raises(TypeError, match="must be concrete"):
        jax.jit(lambda e: _joint([(jnp.mean, dpjax.laplace(1.0, e))], exponential, N).pure)(1.0)


def test_sums_over_records_stay_one_sum():
    """Each has its own bound, its own way to add up and to finish; a single one is a list too."""
    sums = [
        targets.bounded_mean(lower=0, upper=1),
        targets.moments(order=2, lower=0, upper=1),
        targets.summable(lambda x: x),
    ]
    database = jnp.linspace(0, 1.5, 7)
    for some in ([sums[0]], sums):
        losses = (PairLoss("laplace", jnp.sum, 1.0, 0.0, 0.0, 0.0),) * len(some)
        joint = Joint(tuple(some), losses, 1.0, 0.0, "last").target
        assert isinstance(joint, targets.Summable)
        apart = [target(database) for target in some]
        jax.tree.map(np.testing.assert_array_equal, joint(database), apart)
        total = jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(joint.statistic)(database))
        close = partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, joint.finish_sum(total, 7), apart)


def test_a_bounded_mean_has_a_profile(key):
    mean = targets.bounded_mean(lower=0, upper=1)
    release = mean, dpjax.laplace(mean.sensitivity("l1", n=N), 1.0)
    oracle = oracles.independent(jax.random.uniform)
    found = dpjax.privacy_profile(key, release, oracle, n=N, m=200)
    assert 0.9 < found.band.points[0] <= 1.001
    assert found.gamma(1.001) < 0.05


def test_no_epsilon_is_too_large(key):
    """The divergence falls, though what is charged for tables grows and logarithms overflow."""
    losses = PairLoss("gaussian", jnp.sum, 1.0, 0.0, 1e-14, 1e-30)
    found = _curve(Joint((jnp.mean,), (losses,), 0.0, 1.0, "last"))
    epsilons = np.array([0.0, 1.0, 30.0, 200.0, 1e3, 1e154, 1e308])
    for distance in (0.0, 1e-200, 1.0, 50.0):
        for some in (epsilons[:4], epsilons):
            deltas = found.delta(np.array(distance), some)
            assert np.all(np.diff(deltas) <= 1e-14)
            assert deltas[-1] < 2e-14 or distance == 50


def test_what_is_profiled_is_what_is_released(key):
    """A bound that was proved for clamped records: without the clamp, no pair would differ."""

    def folded(database):
        return jnp.sum(jnp.minimum(database, 2 - database))

    records = jax.ShapeDtypeStruct((4,), jnp.float32)
    proved = dpjax.prove_sensitivity(folded, records, bounds=(0, 1), norm="l1")

    def coins(key, n):
        return 2.0 * jax.random.bernoulli(key, shape=(n,)).astype(jnp.float32)

    release = folded, dpjax.laplace(proved, 1.0)
    (found,) = _joint([release], coins, 4).target(jnp.array([0.0, 2.0, 2.0, 0.0]))
    assert found == 2
    for other in (lambda *args: coins(*args).astype(int), lambda *args: coins(*args)[:, None]):
        with pytest.raises(ValueError, match="records like those"):
            dpjax.privacy_profile(key, release, other, n=4, m=10)
