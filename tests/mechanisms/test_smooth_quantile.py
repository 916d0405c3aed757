"""Noise of a private scale: what the proof asks of it, in numbers, and what it is good for."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

import dpjax
from dpjax._core._pytree import changed
from dpjax.mechanisms._smooth_quantile import _SMOOTHNESS_MARGIN, _smoothing

GRID = [(e, d) for e in (0.01, 0.1, 1.0, 3.0, 20.0) for d in (1e-12, 1e-6, 1e-2, 0.3)]
PAIRS, COUNT = 64, 201


def delta_of(epsilon, shift, decay):
    """What the docstring says exceeds epsilon."""
    room = (epsilon - shift + decay) / math.expm1(decay)
    return -math.expm1(-decay) * math.exp(-room)


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_constants_keep_epsilon_and_delta(epsilon, delta):
    shift, decay = _smoothing(epsilon, delta)
    beta = decay + _SMOOTHNESS_MARGIN
    assert shift + beta <= epsilon
    assert delta_of(epsilon, shift, beta) <= delta
    # Nothing but margins is given away: a two-thousandth more is too much, or beta is alpha.
    if beta > 0.01 and epsilon / 2 > 1.001 * beta:
        assert delta_of(epsilon, shift, 1.0005 * beta) > delta


def test_traced_constants_are_those_of_the_host():
    epsilons, deltas = (np.array(column) for column in zip(*GRID, strict=True))
    traced = jax.jit(_smoothing)(jnp.asarray(epsilons), jnp.asarray(deltas))
    exact = np.array([_smoothing(*pair) for pair in GRID]).T
    for found, host in zip(traced, exact, strict=True):
        np.testing.assert_allclose(found, host, rtol=1e-4, atol=2e-6)


def hockey_stick(epsilon, shift, ratio):
    """Of Laplace noise of scale 1 at 0 over noise of scale 1 / ratio at a shift."""

    def excess(z):
        here = math.exp(-abs(z)) / 2
        there = ratio * math.exp(-abs(z - shift) * ratio) / 2
        return max(0.0, here - math.exp(epsilon) * there)

    ends = [-400.0, -40.0, -10.0, min(0.0, shift), max(0.0, shift), 10.0, 40.0, 400.0]
    pieces = [integrate.quad(excess, *end, limit=200)[0] for end in itertools.pairwise(ends)]
    return sum(pieces)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_proof_against_quadrature(epsilon):
    """Over shifts and both directions of the scale, the divergence never exceeds delta."""
    delta = 1e-3
    shift, decay = _smoothing(epsilon, delta)
    beta = decay + _SMOOTHNESS_MARGIN
    found = [
        hockey_stick(epsilon, part * shift / max(ratio, 1.0), ratio)
        for ratio in np.exp([-beta, -beta / 2, beta / 2, beta])
        for part in (-1.0, -0.5, 0.0, 0.5, 1.0)
    ]
    assert max(found) <= delta
    assert max(found) > delta / 20
    # Power: a scale that changes twice as fast is not private.
    assert hockey_stick(epsilon, -shift / math.exp(2 * beta), math.exp(2 * beta)) > delta


@pytest.fixture(scope="module")
def mechanism():
    return dpjax.smooth_quantile(1.0, 1e-6, lower=0.0, upper=100.0)


@pytest.fixture(scope="module")
def neighbors():
    """Pairs of databases: dense, sparse and in two lumps, where one record was replaced."""
    generator = np.random.default_rng(20070611)
    lumps = np.where(generator.random((PAIRS, COUNT)) < 0.5, 0.0, 100.0)
    spread = 100 * generator.random((PAIRS, COUNT)) ** generator.choice([1, 8], (PAIRS, 1))
    x = np.where(generator.random((PAIRS, 1)) < 0.5, lumps, spread)
    # The largest scale, and the least one.
    x[0], x[1] = np.where(np.arange(COUNT) < COUNT // 2 + 1, 0.0, 100.0), 50.0
    y = x.copy()
    rows = np.arange(PAIRS)
    y[rows, generator.integers(COUNT, size=PAIRS)] = generator.choice([0.0, 40.0, 100.0], PAIRS)
    return jnp.asarray(x, "float32"), jnp.asarray(y, "float32")


@pytest.fixture(scope="module")
def measured():
    """`measured(mechanism, databases)`: quantiles in steps, and what divides their noise."""

    @jax.jit
    def every(mechanism, databases):
        def one(database):
            records, rank, fit = mechanism._measured(database)
            return records.steps[rank], fit.divisor, fit.shift

        return jax.vmap(one)(databases)

    def measure(mechanism, databases):
        steps, divisor, shift = (np.asarray(x, np.int64) for x in every(mechanism, databases))
        return steps, divisor << shift

    return measure


def test_what_is_drawn_is_what_the_proof_is_about(mechanism, neighbors, measured):
    """Both scales cover both quantiles and are as close as beta says."""
    (here, points), (there, other_points) = (measured(mechanism, x) for x in neighbors)
    centers, scales = (here, there), (2.0**43 / points, 2.0**43 / other_points)
    beta = mechanism.decay + _SMOOTHNESS_MARGIN
    assert np.all(np.abs(centers[0] - centers[1]) <= 0.5 * np.minimum(*scales))
    changed = np.abs(np.log(scales[0] / scales[1]))
    assert np.all(changed <= beta)
    # It is tight, and the scales are many.
    assert changed.max() > 0.99 * mechanism.decay
    assert len(set(scales[0])) > PAIRS / 2


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 30.0])
def test_the_grid_carries_every_scale(epsilon, neighbors, measured):
    """What divides the noise is even, so that what is drawn is one function of the same reals."""
    mechanism = dpjax.smooth_quantile(epsilon, 1e-6, lower=0.0, upper=100.0)
    _, points = measured(mechanism, neighbors[0])
    assert np.all(points % 2 == 0)
    assert 2**17 <= points.min() < points.max() <= 2.0**43 * epsilon / 2
    # The largest scale is that of the global sensitivity.
    step = float(mechanism.grids(neighbors[0][0]))
    assert 2.0**43 / points.min() * step == pytest.approx(200 / epsilon, rel=1e-3)


@pytest.mark.slow
def test_noise_is_small_where_records_are_dense(mechanism, draws):
    dense = jnp.linspace(49.0, 51.0, COUNT)
    released = draws(mechanism, dense, 4096)
    scale = float(mechanism.noise_scale(dense))
    # The mean of |Z| has a standard error of scale / 64.
    assert np.mean(np.abs(released - 50.0)) == pytest.approx(scale, abs=scale / 12)
    assert scale < 1.0 < 100.0  # The global sensitivity over epsilon.
    np.testing.assert_array_equal(released % float(mechanism.grids(dense)), 0)
    assert mechanism.error(confidence=0.5) == pytest.approx(200 * math.log(2), rel=1e-3)


def two_lumps(middle):
    """Neighbors: two lumps, of which the first ends some records after the median."""
    lumps = jnp.where(jnp.arange(COUNT) <= COUNT // 2 + middle, 0.0, 100.0)
    return lumps, lumps.at[0].set(100.0)


@pytest.mark.slow
def test_what_ships_passes_the_auditor(mechanism, neighbors):
    """A claim that holds is refuted once in a million runs."""
    # Where the median crosses the gap, and where the scales differ by all of beta.
    pairs = [two_lumps(0), two_lumps(4), *((x[i], y[i]) for x, y in [neighbors] for i in range(4))]
    key = dpjax.random.seeded_key(3)
    found = dpjax.auditing.verify(key, mechanism, pairs=pairs, samples=200_000)
    assert found.epsilon > 0.4
    assert found.off_grid == 0


@pytest.mark.slow
def test_noise_of_the_local_sensitivity_is_refuted():
    """Its scale tells that all the records around the quantile are equal."""

    def release(key, records):
        ordered = jnp.sort(records)
        middle = COUNT // 2
        local = jnp.max(jnp.diff(ordered[middle - 1 : middle + 2]))
        return jnp.round(256 * (ordered[middle] + 2 * local * jax.random.laplace(key)))

    value, neighbor = two_lumps(1)
    with pytest.raises(AssertionError, match="refutes"):
        dpjax.auditing.verify(
            jax.random.key(0),
            release,
            value=value,
            neighbor=neighbor,
            epsilon=1.0,
            delta=1e-6,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lower": 1.0, "upper": 0.0}, "lower must be below upper, got 1 and 0"),
        ({"lower": 1e9, "upper": 1e9 + 1}, "must be between 1e-25 and 1e25"),
        ({"lower": 0.0, "upper": np.inf}, "upper must be a finite number, got inf"),
        ({"lower": 0.0, "upper": 1.0, "probability": 1.0}, "probability must be strictly between"),
        ({"lower": 0.0, "upper": 1.0, "epsilon": 1e-4}, "epsilon=0.0001 is too small"),
        ({"lower": 0.0, "upper": 1.0, "delta": 0.0}, "delta must be strictly between 0 and 1"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    arguments = {"epsilon": 1.0, "delta": 1e-6} | arguments
    with pytest.raises(ValueError, match=message):
        dpjax.smooth_quantile(arguments.pop("epsilon"), arguments.pop("delta"), **arguments)


def test_what_has_no_scale_is_not_released(mechanism, key):
    """By one program for both. A bad traced parameter is what leads here."""
    bad = changed(mechanism, shift=math.nan)
    records = jnp.linspace(49.0, 51.0, COUNT)
    assert jnp.isnan(bad(key, records).value)
    assert abs(float(mechanism(key, records).value) - 50.0) < 50.0


@pytest.mark.slow
def test_bad_traced_parameters_release_nothing(key):
    """And end: a NaN does not become a number of rounds."""

    def release(epsilon, delta):
        mechanism = dpjax.smooth_quantile(epsilon, delta, lower=0.0, upper=1.0)
        return mechanism(key, jnp.zeros(5))

    pairs = jnp.asarray([[jnp.nan, 1e-6], [1e-5, 1e-6], [1.0, jnp.nan], [1.0, 2.0]])
    bad = jax.jit(jax.vmap(release))(*pairs.T)
    assert np.all(np.isnan(bad.value))
    assert np.all(np.isnan(bad.guarantee.epsilon))
