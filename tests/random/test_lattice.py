"""Noise on the lattice: the tables as they are stored, and what is drawn from them."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from certificates import exponential_certificate, gaussian_certificate, weights_of
from dpjax.random import _lattice

FALSE_ALARM = 1e-6


def integers(limbs):
    """Limbs as signed int64."""
    high, low = (np.asarray(limb).astype(np.uint64) for limb in limbs)
    return (high << np.uint64(32) | low).astype(np.int64)


@pytest.fixture(scope="module")
def a_million(keys):
    """2^20 numbers of one draw, for all tests of it."""

    @functools.cache
    def drawn(draw):
        return integers(jax.jit(draw, static_argnums=1)(keys(20170611), (2**20,)))

    return drawn


def test_masses_against_fifty_digits():
    with mpmath.workdps(60):
        first, top, middle, bottom = _lattice.exponential_masses()
        for masses, step in ((first, 7), (top, 19), (middle, 31), (bottom, 43)):
            ratio = mpmath.mpf(masses[1]) / masses[0]
            assert abs(mpmath.log(ratio) + mpmath.mpf(2) ** -step) < mpmath.mpf(10) ** -50
        coarse, fine = _lattice.gaussian_masses()
        for masses, parameter in ((coarse, 136), (fine, 200)):
            for j in (1, 500, 1400):
                ratio = mpmath.mpf(masses[2048 + j]) / masses[2048]
                exact = mpmath.exp(-mpmath.mpf(j * j) / (2 * parameter**2))
                assert abs(ratio / exact - 1) < mpmath.mpf(10) ** -35
                assert masses[2048 - j] == masses[2048 + j]


@pytest.mark.parametrize("which", ["exponential", "gaussian"])
def test_tables_hold_the_nearest_integer_weights(which):
    """One weight off by one unit fails: all are rounded anew, the largest remainders up."""
    tables = getattr(_lattice, f"{which}_tables")()
    for table, masses in zip(
        tables[:2] if which == "gaussian" else tables,
        getattr(_lattice, f"{which}_masses")(),
        strict=True,
    ):
        step = 2 if which == "exponential" and table.width == 96 else 1
        units = 2**table.width // step
        shares = [Fraction(mass * units, sum(masses)) for mass in masses]
        expected = [math.floor(share) for share in shares]
        largest = np.argsort([float(x - share) for share, x in zip(shares, expected, strict=True)])
        for slot in largest[: units - sum(expected)]:
            expected[slot] += 1
        weights = weights_of(table)
        assert weights[: len(masses)] == [step * weight for weight in expected]
        assert not any(weights[len(masses) :])


def test_certificates_are_what_mechanisms_rely_on():
    computed = exponential_certificate()
    assert computed.loss <= _lattice.EXPONENTIAL_BOUND.loss
    assert computed.delta == _lattice.EXPONENTIAL_BOUND.delta == 0
    computed = gaussian_certificate()
    assert computed.loss <= _lattice.GAUSSIAN_BOUND.loss
    assert computed.delta <= _lattice.GAUSSIAN_BOUND.delta


@pytest.mark.parametrize("q", [2, 10, 200])
def test_a_rounded_gaussian_is_near_the_discrete_one(q):
    """docs/proofs/exact-noise.md: by n^2 / (24 q^4) from above, and by 1 / (24 q^2) from below."""
    with mpmath.workdps(60):
        scale = mpmath.mpf(q) * mpmath.sqrt(2)
        whole = sum(mpmath.exp(-((n / scale) ** 2)) for n in range(-60 * q, 60 * q + 1))
        constants = 3 * mpmath.exp(-2 * mpmath.pi**2 * q**2)
        ratios = []
        for n in [0, 1, *range(q, 40 * q + 1, q)]:
            low, high = (n - mpmath.mpf(1) / 2) / scale, (n + mpmath.mpf(1) / 2) / scale
            mass = (mpmath.erfc(low) - mpmath.erfc(high)) / 2
            ratio = mpmath.log(mass * whole / mpmath.exp(-((n / scale) ** 2)))
            assert -mpmath.mpf(1) / (24 * q**2) - constants <= ratio
            assert ratio <= mpmath.mpf(n) ** 2 / (24 * mpmath.mpf(q) ** 4) + constants
            ratios.append(ratio)
        assert ratios[0] == pytest.approx(-1 / (24 * q**2), rel=0.05)  # And not 0.
        assert max(map(abs, ratios)) <= 40**2 / (24 * mpmath.mpf(q) ** 2)


def test_a_wrong_weight_shows_in_the_certificate(monkeypatch):
    tables = _lattice.exponential_tables()
    broken = tables[1].limbs.copy()
    broken[0, 5] ^= np.uint32(1)
    wrong = (tables[0], _lattice.AliasTable(broken), *tables[2:])
    monkeypatch.setattr(_lattice, "exponential_tables", lambda: wrong)
    assert exponential_certificate().loss > _lattice.EXPONENTIAL_BOUND.loss


def test_convolution_is_a_discrete_gaussian():
    """Two levels, convolved exactly from the stored weights, against the discrete Gaussian."""
    top, low = _lattice.gaussian_tables()
    top_weights, low_weights = weights_of(top), weights_of(low)
    parameter = mpmath.sqrt(136**2 * 128**2 + 200**2)
    with mpmath.workdps(50):
        normal = parameter * mpmath.sqrt(2 * mpmath.pi)  # Within e^(-10^9), by Poisson summation.
        for n in (0, 1, 63, 64, 17_408, 50_001, -104_448, 150_000):
            exact = mpmath.exp(-(mpmath.mpf(n) ** 2) / (2 * parameter**2)) / normal
            mass = sum(
                top_weights[j + 2048] * low_weights[n - 128 * j + 2048]
                for j in range(-2048, 2048)
                if 0 <= n - 128 * j + 2048 < 4096
            )
            drawn = mpmath.mpf(mass) / mpmath.mpf(2) ** (top.width + low.width)
            assert abs(drawn / exact - 1) < _lattice.GAUSSIAN_BOUND.loss


@pytest.mark.parametrize("which", ["exponential", "gaussian"])
def test_a_slot_ends_where_its_table_says(which):
    """The last word of the slot's own outcome, and the first one of its alias, in every slot."""
    for table in getattr(_lattice, f"{which}_tables")():
        below = table.width - _lattice.SLOT_BITS
        stored = [0] * _lattice.SLOTS
        for row in table.limbs:
            stored = [number << 32 | int(limb) for number, limb in zip(stored, row, strict=True)]
        own = [number % 2**below for number in stored]
        alias = [number >> below for number in stored]

        def outcomes(words, table=table):
            limbs = [
                jnp.asarray(np.array([word >> shift & 0xFFFFFFFF for word in words], np.uint32))
                for shift in range(table.width - 32, -1, -32)
            ]
            return np.asarray(table.lookup(limbs)).tolist()

        slots = range(_lattice.SLOTS)
        assert outcomes([slot << below | own[slot] for slot in slots]) == alias
        last = [slot << below | max(own[slot] - 1, 0) for slot in slots]
        expected = [slot if own[slot] > 0 else alias[slot] for slot in slots]
        assert outcomes(last) == expected


@pytest.mark.parametrize(
    ("draw", "resolution", "law"),
    [
        (_lattice.lattice_laplace, _lattice.EXPONENTIAL_RESOLUTION, stats.laplace),
        (_lattice.lattice_exponential, _lattice.EXPONENTIAL_RESOLUTION, stats.expon),
        (_lattice.lattice_gaussian, _lattice.GAUSSIAN_RESOLUTION, stats.norm),
    ],
)
def test_distribution(draw, resolution, law, a_million):
    drawn = a_million(draw)
    edges = law.ppf(np.linspace(0, 1, 201)[1:-1]) * resolution
    counts = np.bincount(np.searchsorted(edges, drawn + 0.5), minlength=200)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    # Power: the same draws at a scale 2% off fail, at these keys and nearly all others.
    counts = np.bincount(np.searchsorted(edges * 1.02, drawn + 0.5), minlength=200)
    assert stats.chisquare(counts).pvalue < FALSE_ALARM


@pytest.mark.parametrize("draw", [_lattice.lattice_laplace, _lattice.lattice_gaussian])
def test_low_bits_and_signs_are_fair(draw, a_million):
    drawn = a_million(draw)
    assert stats.chisquare(np.bincount(drawn & 255, minlength=256)).pvalue > FALSE_ALARM
    assert abs((drawn < 0).mean() - 0.5) < 5 * 0.5 / 2**10
    # Signs do not go with magnitudes.
    large = drawn[np.abs(drawn) > np.median(np.abs(drawn))]
    assert abs((large < 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(large.size)


@pytest.mark.slow
def test_tails(key):
    """Counts beyond 10 scales and beyond 4.5 sigma, where cheap samplers give out."""
    count = 2**22
    drawn = np.abs(integers(jax.jit(_lattice.lattice_laplace, static_argnums=1)(key, (count,))))
    for scales in (8, 10, 12):
        expected = count * math.exp(-scales)
        seen = (drawn > scales * _lattice.EXPONENTIAL_RESOLUTION).sum()
        assert abs(seen - expected) < 5 * math.sqrt(expected) + 1
    drawn = np.abs(integers(jax.jit(_lattice.lattice_gaussian, static_argnums=1)(key, (count,))))
    for sigmas in (3.5, 4.5):
        expected = count * 2 * stats.norm.sf(sigmas)
        seen = (drawn > sigmas * _lattice.GAUSSIAN_RESOLUTION).sum()
        assert abs(seen - expected) < 5 * math.sqrt(expected) + 1


def test_the_exponential_starts_again(monkeypatch, key):
    """With "24 more" in every second draw, the total is still memoryless."""
    tables = _lattice.exponential_tables()
    weights = [0] * 4096
    weights[0] = weights[_lattice._CELLS] = 2**95
    often = (_lattice.alias_table(weights, 3), *tables[1:])
    monkeypatch.setattr(_lattice, "exponential_tables", lambda: often)
    drawn = integers(jax.jit(_lattice.lattice_exponential, static_argnums=1)(key, (4096,)))
    restarts = drawn // (24 * _lattice.EXPONENTIAL_RESOLUTION)
    counts = np.bincount(np.minimum(restarts, 6), minlength=7)
    expected = 4096 * np.array([2.0 ** -(i + 1) for i in range(6)] + [2.0**-6])
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    "draw",
    [_lattice.lattice_laplace, pytest.param(_lattice.lattice_gaussian, marks=pytest.mark.slow)],
)
def test_same_bits_everywhere(draw, key):
    eager = integers(draw(jax.random.split(key, 4)[0], (3,)))
    compiled = jax.jit(draw, static_argnums=1)
    alone = [integers(compiled(one, (3,))) for one in jax.random.split(key, 4)]
    np.testing.assert_array_equal(eager, alone[0])
    batch = jax.jit(jax.vmap(lambda one: draw(one, (3,))))(jax.random.split(key, 4))
    np.testing.assert_array_equal(integers(batch), alone)
    with jax.enable_x64(True):
        wide = [integers(compiled(one, (3,))) for one in jax.random.split(key, 4)]
    np.testing.assert_array_equal(wide, alone)


@pytest.mark.parametrize(
    "draw", [_lattice.lattice_exponential, _lattice.lattice_laplace, _lattice.lattice_gaussian]
)
def test_jax_sees_two_draws_from_one_key(draw, key):
    twice = jax.jit(lambda key: (draw(key, ()), draw(key, ())))
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        twice(key)


def test_lanes_share_nothing(key):
    drawn = integers(jax.jit(_lattice.lattice_laplace, static_argnums=1)(key, (50_000,)))
    assert len(np.unique(drawn)) == drawn.size
    one_each = jax.jit(jax.vmap(lambda one: _lattice.lattice_laplace(one, ())))
    drawn = integers(one_each(jax.random.split(key, 50_000)))
    assert len(np.unique(drawn)) == drawn.size


def test_weights_are_rounded_to_the_largest_remainders():
    weights = _lattice.integer_weights([1, 1, 1], 12)
    assert sorted(weights) == [1365, 1365, 1366]
    assert all(abs(Fraction(w) - Fraction(4096, 3)) < 1 for w in weights)
