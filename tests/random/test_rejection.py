"""The exact samplers: every branch of their decision trees, and draws against the exact masses.

Chi-square tests: a fixed key, a false alarm once in 10^6 keys each; a scale 10% off fails them.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax.random import _rejection
from dpjax.random._rejection import (
    bernoulli,
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    geometric,
)

FALSE_ALARM = 1e-6
COUNT = 100_000
SAMPLERS = (bernoulli, bernoulli_exp, geometric, discrete_laplace, discrete_gaussian)
samplers = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.__name__)


def laplace_mass(scale, n):
    q = math.exp(-1 / scale)
    return (1 - q) / (1 + q) * np.exp(-np.abs(n) / scale)


def geometric_mass(scale, n):
    return np.where(n < 0, 0.0, -math.expm1(-1 / scale) * np.exp(-n / scale))


def gaussian_mass(variance, n):
    reach = np.arange(-int(40 * math.sqrt(variance)) - 40, int(40 * math.sqrt(variance)) + 41)
    return np.exp(-(n**2) / (2 * variance)) / np.exp(-(reach**2) / (2 * variance)).sum()


# Uniform integers.


def test_each_value_has_as_many_words():
    generator = np.random.default_rng(0)
    bounds = [1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 2]
    bounds += generator.integers(1, 2**32 - 1, 200).tolist()
    cases = []
    for n in bounds:
        for h in {0, n - 1, *generator.integers(0, n, 5).tolist()}:
            # The words w with floor(w n / 2^32) = h; of these, at most the first is thrown away.
            first, end = -(-h * 2**32 // n), -(-(h + 1) * 2**32 // n)
            thrown = first * n % 2**32 < 2**32 % n
            assert end - first - thrown == 2**32 // n
            cases += [(n, first, not thrown, h), (n, end - 1, end - 1 > first or not thrown, h)]
            if end - first > 2:
                cases.append((n, first + 1, True, h))
    n, word, accepted, value = (np.array(column) for column in zip(*cases, strict=True))
    found = jax.jit(_rejection._uniform)(word.astype("uint32"), n.astype("uint32"))
    assert found[0].tolist() == accepted.tolist()
    assert found[1].tolist() == value.tolist()


# The decision trees.

BATCH = 2048


@functools.partial(jax.jit, static_argnums=(0, 1))
def ask(cls, options, parameters, state):
    return cls(*parameters, *options).bound(state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def advance(cls, options, parameters, state, u):
    return cls(*parameters, *options).advance(state, u)


def in_batches(function, *columns):
    """Applies a function of arrays with leading axis BATCH; returns a matrix, one row for each."""
    rows = []
    for i in range(0, len(columns[0]), BATCH):
        batch = [column[i : i + BATCH] for column in columns]
        size = len(batch[0])
        padded = [np.pad(x, ((0, BATCH - size), *[(0, 0)] * (x.ndim - 1)), "edge") for x in batch]
        leaves = jax.tree.leaves(function(*padded))
        rows.append(np.stack([np.broadcast_to(leaf, (BATCH,)) for leaf in leaves], 1)[:size])
    return np.concatenate(rows).astype(np.uint32)


def merge(rows, weights):
    """Equal rows made one, with the sum of their weights."""
    rows, index = np.unique(rows, axis=0, return_inverse=True)
    return rows, np.bincount(index.ravel(), weights=weights, minlength=len(rows))


def exact_distribution(cls, parameters, *options, rest=1e-6, least=1e-10):
    """Probabilities of the records, following every answer to every question.

    Walks that meet in a state go on as one. Stops when the walks without a record have a
    probability below `rest`. Returns also the probability of those walks, and of those that were
    given up because theirs was below `least`.
    """
    parameters = tuple(map(jnp.uint32, parameters))
    start, structure = jax.tree.flatten(cls(*parameters, *options).start(1))

    def tree(rows):
        return jax.tree.unflatten(structure, list(rows.T))

    states = np.array([[int(leaf[0]) for leaf in start]], np.uint32).reshape(1, len(start))
    open_walks, given_up = np.ones(1), 0.0
    records, masses = [], []
    while open_walks.sum() > rest:
        bounds = in_batches(lambda rows: ask(cls, options, parameters, tree(rows)), states)[:, 0]
        parent = np.repeat(np.arange(len(states)), bounds)
        u = np.concatenate([np.arange(n, dtype=np.uint32) for n in bounds])
        mass = (open_walks / bounds)[parent]
        moved = in_batches(
            lambda rows, u: advance(cls, options, parameters, tree(rows), u), states[parent], u
        )
        following, done, record = np.split(moved, [len(start), len(start) + 1], axis=1)
        done = done[:, 0] == 1
        records.append(record[done])
        masses.append(mass[done])
        states, open_walks = merge(following[~done], mass[~done])
        kept = open_walks > least
        given_up += open_walks[~kept].sum()
        states, open_walks = states[kept], open_walks[kept]
    records, masses = merge(np.concatenate(records), np.concatenate(masses))
    found = dict(zip(map(tuple, records.tolist()), masses.tolist(), strict=True))
    return found, open_walks.sum() + given_up


def check_masses(records, rest, value, mass):
    found = collections.Counter()
    for record, probability in records.items():
        found[value(*record)] += probability
    assert sum(found.values()) + rest == pytest.approx(1, abs=1e-12)
    for outcome, probability in found.items():
        # What is still open could only add to it.
        assert -1e-12 < mass(outcome) - probability < rest + 1e-12
    assert len(found) > 1


@pytest.mark.parametrize(("a", "b"), [(2, 7), (1, 2)])
def test_tree_of_a_coin(a, b):
    records, rest = exact_distribution(_rejection._Coin, (a, b))
    check_masses(records, rest, int, lambda x: a / b if x else 1 - a / b)


@pytest.mark.parametrize(("a", "b"), [(1, 3), (3, 4), (2, 2), (7, 2)])
def test_tree_of_an_exponential_coin(a, b):
    records, rest = exact_distribution(_rejection._ExponentialCoin, (a, b))
    check_masses(records, rest, int, lambda x: math.exp(-a / b) if x else -math.expm1(-a / b))


def test_coin_of_probability_one():
    records, rest = exact_distribution(_rejection._ExponentialCoin, (0, 3))
    assert (records, rest) == ({(1,): 1.0}, 0)


@pytest.mark.parametrize(("t", "s"), [(5, 2), (1, 1), (1, 3), (4, 1)])
@pytest.mark.parametrize("signed", [False, True])
def test_tree_of_the_discrete_laplace(t, s, signed):
    def value(twice, v):
        n = (twice // 2 + t * v) // s
        return -n if signed and twice % 2 else n

    records, rest = exact_distribution(_rejection._Laplace, (t, s), signed)
    mass = laplace_mass if signed else geometric_mass
    check_masses(records, rest, value, functools.partial(mass, t / s))


# Below variance 1/2, where b is above 1; where b is 1; and in between.
@pytest.mark.parametrize(("a", "b"), [(1, 5), (1, 2), (1, 1), (2, 1), (7, 2), (12, 1)])
def test_tree_of_the_discrete_gaussian(a, b):
    t = max(1, math.isqrt(2 * a // b))

    def value(twice, v):
        n = twice // 2 + t * v
        return -n if twice % 2 else n

    records, rest = exact_distribution(_rejection._Gaussian, (a, b))
    check_masses(records, rest, value, functools.partial(gaussian_mass, a / b))


def test_square_root():
    roots = np.array([1, 2, 3, 1000, 46340, 65535])
    n = np.concatenate([roots**2 - 1, roots**2, roots**2 + 2 * roots]).astype("uint32")
    assert jax.jit(_rejection._square_root)(n).tolist() == [math.isqrt(x) for x in n.tolist()]


# Draws.


def p_value(values, mass):
    """Chi-square of integers; those with few expected counts make one cell."""
    reach = np.arange(values.min() - 5, values.max() + 6)
    expected = len(values) * mass(reach)
    observed = np.array([np.sum(values == n) for n in reach])
    kept = expected >= 20
    expected = np.append(expected[kept], len(values) - expected[kept].sum())
    observed = np.append(observed[kept], len(values) - observed[kept].sum())
    return stats.chisquare(observed, expected).pvalue


def low_bits_p_value(values, mass, reach):
    """Chi-square of the values modulo 8."""
    n = np.arange(-reach, reach + 1)
    expected = len(values) * np.bincount(n % 8, weights=mass(n))
    observed = np.bincount(values % 8, minlength=8)
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


@pytest.mark.parametrize(
    ("sampler", "mass"),
    [
        (geometric, geometric_mass),
        (discrete_laplace, laplace_mass),
        (discrete_gaussian, gaussian_mass),
    ],
    ids=["geometric", "laplace", "gaussian"],
)
def test_draws(sampler, mass, keys):
    def draw(i, a, b):
        return np.asarray(sampler(keys(i), numerator=a, denominator=b, shape=(COUNT,)), int)

    assert p_value(draw(0, 20, 3), functools.partial(mass, 20 / 3)) > FALSE_ALARM
    # A scale 10% off: 11/10 of a Laplace scale, 121/100 of a variance.
    off = 1.21 if mass is gaussian_mass else 1.1
    assert p_value(draw(0, 20, 3), functools.partial(mass, off * 20 / 3)) < FALSE_ALARM
    # Large and odd parameters: scales of about 215 and 46.
    wide, narrow = draw(1, 2**31 - 1, 9_999_991), draw(2, 7, 4)
    large = (2**31 - 1) / 9_999_991
    reach = int(60 * large)
    assert low_bits_p_value(wide, functools.partial(mass, large), reach) > FALSE_ALARM
    assert low_bits_p_value(narrow, functools.partial(mass, 7 / 4), 200) > FALSE_ALARM
    # The control: the low bits of a narrow distribution are far from uniform.
    assert low_bits_p_value(narrow, lambda n: np.ones(len(n)) / len(n), 200) < FALSE_ALARM


def test_coins(key):
    for a, b in ((1, 3), (2**31 - 3, 2**31 - 1), (1, 1000), (0, 5), (5, 5)):
        heads = int(bernoulli(key, numerator=a, denominator=b, shape=(COUNT,)).sum())
        assert stats.binomtest(heads, COUNT, a / b).pvalue > FALSE_ALARM
    for a, b in ((1, 3), (7, 2), (2**31 - 1, 2**30)):
        heads = int(bernoulli_exp(key, numerator=a, denominator=b, shape=(COUNT,)).sum())
        assert stats.binomtest(heads, COUNT, math.exp(-a / b)).pvalue > FALSE_ALARM
        assert stats.binomtest(heads, COUNT, math.exp(-1.1 * a / b)).pvalue < FALSE_ALARM


def test_largest_scales(key):
    shape = (COUNT,)
    noise = np.asarray(discrete_laplace(key, numerator=2**24 - 1, shape=shape), float)
    cells = np.floor(noise / 2**20)
    assert stats.kstest(noise, stats.laplace(scale=2**24).cdf).pvalue > FALSE_ALARM
    assert len(set(cells)) > 100
    noise = np.asarray(discrete_gaussian(key, numerator=2**31 - 1, shape=shape), float)
    assert stats.kstest(noise, stats.norm(scale=2**15.5).cdf).pvalue > FALSE_ALARM


# Programs.

A, B = 5, 7


@samplers
def test_traced_and_mapped_bits_are_the_concrete_ones(sampler, key):
    shape = (100,)
    keys = jax.random.split(key, 2)
    numerators = np.array([A - 2, A], np.int32)
    mapped = jax.jit(
        jax.vmap(
            lambda key, a, b: sampler(key, numerator=a, denominator=b, shape=shape), (0, 0, None)
        )
    )(keys, numerators, np.uint32(B))
    looped = [
        sampler(k, numerator=a, denominator=B, shape=shape).tolist()
        for k, a in zip(keys, numerators.tolist(), strict=True)
    ]
    assert mapped.tolist() == looped
    assert len(set(map(tuple, looped))) == 2


@samplers
def test_bits_do_not_depend_on_x64(sampler, key):
    plain = sampler(key, numerator=A, denominator=B, shape=(100,))
    with jax.enable_x64(True):
        wide = sampler(key, numerator=A, denominator=B, shape=(100,))
    assert wide.dtype == plain.dtype
    assert wide.tolist() == plain.tolist()


def test_shapes(key):
    assert discrete_laplace(key, numerator=3).shape == ()
    assert discrete_laplace(key, numerator=3, shape=(0, 2)).shape == (0, 2)
    assert discrete_laplace(key, numerator=3, shape=(10, 10)).shape == (10, 10)


@samplers
def test_concrete_parameters_are_checked(sampler, key):
    with pytest.raises(ValueError, match=r"numerator must be .*, got -1"):
        sampler(key, numerator=-1, denominator=3)
    with pytest.raises(ValueError, match=r"denominator must be .*, got 0"):
        sampler(key, numerator=1, denominator=0)
    with pytest.raises(ValueError, match=r"numerator must be .*, got 2147483648"):
        sampler(key, numerator=2**31, denominator=2**31 - 1)
    with pytest.raises(TypeError, match=r"numerator must be .*, got 1\.5"):
        sampler(key, numerator=1.5)
    with pytest.raises(TypeError, match="key must be a typed JAX key"):
        sampler(0, numerator=1)


def test_scales_out_of_range_are_refused(key):
    with pytest.raises(ValueError, match=r"below 2\^24, got 16777216 / 1"):
        discrete_laplace(key, numerator=2**24)
    with pytest.raises(ValueError, match="at most 3, got 4"):
        bernoulli(key, numerator=4, denominator=3)


@samplers
def test_bad_traced_parameters_show(sampler, key):
    bad = jax.vmap(lambda a, b: sampler(key, numerator=a, denominator=b))
    out = bad(np.array([-1, 2, 2], np.int32), np.array([3, 0, -3], np.int32))
    assert out.tolist() == [False if out.dtype == bool else -(2**31)] * 3


def test_traced_scales_out_of_range_show(key):
    draw = jax.jit(lambda a: (geometric(key, numerator=a), bernoulli(key, numerator=a)))
    assert [int(x) for x in draw(2**24)] == [-(2**31), 0]
