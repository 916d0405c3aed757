"""Attacks on how noise is drawn and added. Each must succeed on naive noise, and fail here.

The attacker knows everything but the key and the value: he knows that it is one of two neighbors,
and sees one release. He wins where the release is impossible from one of them.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpjax
from certificates import weights_of

RELEASES = 200_000
FALSE_ALARM = 1e-6


@functools.cache
def released(name, value):
    """Releases of a value, under keys of their own."""
    keys = jax.random.split(
        dpjax.random.seeded_key(zlib.crc32(f"{name} {value}".encode())), RELEASES
    )
    naive = {"naive laplace": jax.random.laplace, "naive gaussian": jax.random.normal}
    if name in naive:
        # Added outside of jit, which would fuse the sum into the sampler's last product.
        noise = jax.jit(jax.vmap(lambda key: naive[name](key, (), jnp.float32)))(keys)
        return (np.float32(value) + np.asarray(noise)).astype(np.float64)
    mechanisms = {
        "laplace": dpjax.laplace(1.0, 1.0),
        "gaussian": dpjax.gaussian(1.0, 1.0, 1e-5),
        "bernstein": dpjax.bernstein(1.0, 1.0, degree=1, dims=1),
    }
    if name == "bernstein":
        draw = lambda key, x: mechanisms[name](key, jnp.stack([x, x])).value.values[0]  # noqa: E731
    else:
        draw = lambda key, x: mechanisms[name](key, x).value  # noqa: E731
    # The value is an argument, so that all of them share a program.
    return np.asarray(jax.jit(jax.vmap(draw, (0, None)))(keys, np.float32(value)), np.float64)


def grid_of(name):
    mechanisms = {
        "laplace": lambda: dpjax.laplace(1.0, 1.0),
        "gaussian": lambda: dpjax.gaussian(1.0, 1.0, 1e-5),
        "bernstein": lambda: dpjax.bernstein(1.0, 1.0, degree=1, dims=1),
    }
    return mechanisms[name]().grid


# Millions of releases take their time: one of a kind is attacked in every run.
EXACT = ["laplace", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gaussian", "bernstein"))]
NAIVE = ["naive laplace", pytest.param("naive gaussian", marks=pytest.mark.slow)]


def low_bits(outputs):
    """Trailing zeros of the significand: how coarse a lattice the number lies on."""
    bits = np.abs(outputs.astype(np.float32)).view(np.uint32).astype(np.int64)
    exponent, fraction = bits >> 23, (bits & (2**23 - 1)) | 2**23
    zeros = np.log2(fraction & -fraction).astype(np.int64)
    return np.clip(exponent - 127 - 23 + zeros, -40, 10)


def distinguishing_chance(first, second):
    """Chance that a release shows a lattice that never occurs from the other value.

    Learned on one half, counted on the other.
    """
    half = RELEASES // 2
    cells = [low_bits(x) + 64 * np.digitize(x, np.linspace(-4, 5, 19)) for x in (first, second)]
    learned = [set(cell[:half].tolist()) for cell in cells]
    wins = 0.0
    for own, other in ((0, 1), (1, 0)):
        impossible = np.array(sorted(learned[own] - learned[other]))
        frequent = [cell for cell in impossible if np.sum(cells[own][:half] == cell) > 20]
        wins += np.isin(cells[own][half:], frequent).mean() / 2
    return wins


@pytest.mark.parametrize("name", NAIVE)
def test_low_bits_give_naive_noise_away(name):
    assert distinguishing_chance(released(name, 0.0), released(name, 1.0)) > 0.1


@pytest.mark.parametrize("name", EXACT)
def test_low_bits_tell_nothing(name):
    assert distinguishing_chance(released(name, 0.0), released(name, 1.0)) == 0
    # Nor do they tell values that are no multiples of anything.
    assert distinguishing_chance(released(name, 0.0), released(name, 0.7310586)) == 0


@pytest.mark.parametrize("name", EXACT)
def test_low_bits_have_one_distribution(name):
    """The grid point, modulo 256, is uniform whatever the value."""
    for value in (0.0, 1.0, 0.7310586):
        steps = np.rint(released(name, value) / grid_of(name)).astype(np.int64)
        counts = np.bincount(steps & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


def support_of_the_sampler():
    """All that `jax.random.laplace` can draw in float32: one noise for each of 2^23 uniforms."""
    step = np.float32(2.0**-23)
    uniform = np.arange(2**23, dtype=np.float32) * step
    # As the sampler does it: u in (-1, 1), then sign(u) * log1p(-|u|).
    low = np.float32(-1 + np.finfo(np.float32).epsneg)
    u = jnp.maximum(low, jnp.asarray(uniform * (np.float32(1) - low) + low))
    return np.unique(np.asarray(jax.jit(lambda x: jnp.sign(x) * jnp.log1p(-jnp.abs(x)))(u)))


def test_enumeration_of_the_support_gives_naive_noise_away():
    support = support_of_the_sampler()
    outputs = released("naive laplace", 0.0)
    assert np.isin(outputs.astype(np.float32), support).mean() > 0.99  # The enumeration is right.
    from_one = np.unique((np.float32(1) + support).astype(np.float32))
    assert np.mean(~np.isin(outputs.astype(np.float32), from_one)) > 0.85


@pytest.mark.parametrize("name", ["laplace", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_enumeration_of_the_support_fails(name):
    """From either value every point of one grid is possible: the supports are the same."""
    grid = grid_of(name)
    for value in (0.0, 1.0, 0.3):
        outputs = released(name, value)
        assert np.all(outputs / grid == np.rint(outputs / grid))
    here, there = (released(name, value) for value in (0.0, 1.0))
    # Near the middle the grid fills up: no point of it belongs to one of the values alone.
    middle = [np.rint(x[np.abs(x - 0.5) < 2.0**-8] / grid) for x in (here, there)]
    counts = [np.bincount((x + 2**20).astype(np.int64), minlength=2**21) for x in middle]
    lone = np.sum((counts[0] > 8) & (counts[1] == 0)) + np.sum((counts[1] > 8) & (counts[0] == 0))
    assert lone == 0


def test_perfect_noise_and_a_float_sum_is_not_enough():
    """The addition alone gives it away, whatever the noise: the control of the whole design."""
    generator = np.random.default_rng(0)
    noise = generator.laplace(size=RELEASES)  # 53 bits: real noise, for a float32.
    here, there = ((value + noise.astype(np.float32)).astype(np.float32) for value in (0, 1))
    near = here[np.abs(here) < 0.5].astype(np.float64)
    assert np.mean(near * 2**24 != np.rint(near * 2**24)) > 0.3
    assert np.all(there[np.abs(there) < 0.5] * 2.0**24 % 1 == 0)


def test_selection_leaves_every_option_possible():
    """Float Gumbel noise covers [-4.5, 15.9]: beyond a gap of 20.4 an option is impossible."""
    gumbel = np.asarray(jax.random.gumbel(jax.random.key(0), (2**20,), jnp.float32))
    assert gumbel.max() - gumbel.min() < 20.5
    # The integers of the exact race go on: a gap of 23 scales is crossed by e^-23 of the draws,
    # as the tables say, and 24 scales more for every restart.
    from dpjax.random import _lattice

    first = weights_of(_lattice.exponential_tables()[0])
    assert min(first[: _lattice._CELLS + 1]) > 0
    probability = first[_lattice._CELLS] / 2**96
    assert probability == pytest.approx(np.exp(-24), rel=1e-9)


def test_float_randomized_response_breaks_its_promise():
    """`jax.random.bernoulli` at epsilon 17 never lies; here a lie is at least one word in 2^32."""
    lie = np.float32(1) / (1 + np.exp(np.float32(17)))
    uniform_step = np.float32(2.0**-23)
    assert lie < uniform_step  # The least uniform but 0: the lie is 0 or 3 times too likely.
    for epsilon in (15.0, 17.0, 22.0):
        weight = int(dpjax.randomized_response(epsilon).lie_weight)
        assert weight >= 1
        assert (2**32 - weight) / weight <= np.exp(epsilon)
