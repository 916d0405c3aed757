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
from scipy import sparse, stats

from dpjax._limbs import Limbs
from dpjax.random import _machines
from dpjax.random._rejection import (
    bernoulli,
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    geometric,
)

FALSE_ALARM = 1e-6
COUNT = 50_000  # More than there are lanes.
SAMPLERS = (bernoulli, bernoulli_exp, geometric, discrete_laplace, discrete_gaussian)
samplers = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.__name__)
one_of_each_machine = pytest.mark.parametrize(
    "sampler",
    [bernoulli, bernoulli_exp, discrete_laplace, discrete_gaussian],
    ids=lambda sampler: sampler.__name__,
)


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
    found = jax.jit(_machines._uniform)(word.astype("uint32"), n.astype("uint32"))
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


def explore(bound, advance, start, followed):
    """All states that walks can reach, and all their branches: origin, chance, where it leads to.

    Branches into states that are not `followed` are left out.
    """
    index = {tuple(start): 0}
    states, branches = [np.array([start], np.uint32)], []
    first = 0
    while len(states[-1]):
        bounds = in_batches(bound, states[-1])[:, 0]
        parent = np.repeat(np.arange(len(bounds)), bounds)
        u = np.concatenate([np.arange(n, dtype=np.uint32) for n in bounds])
        moved = in_batches(advance, states[-1][parent], u)
        following, done, record = np.split(moved, [len(start), len(start) + 1], axis=1)
        done = done[:, 0] == 1
        known = len(index)
        kept = done | followed(following)
        to = [
            -1 if ended else index.setdefault(tuple(state), len(index))
            for ended, state in zip(done[kept].tolist(), following[kept].tolist(), strict=True)
        ]
        origin, chance = first + parent[kept], 1 / bounds[parent[kept]]
        branches.append((origin, chance, np.array(to), record[kept]))
        first += len(states[-1])
        new = list(index)[known:]
        states.append(np.array(new, np.uint32).reshape(len(new), len(start)))
    return len(index), [np.concatenate(column) for column in zip(*branches, strict=True)]


def exact_distribution(cls, parameters, *options, most_k=13, most_v=5):
    """Relative probabilities of the records, following every answer to every question.

    But for walks that count beyond `most_k` or `most_v`: the latter only leaves out samples, the
    former changes probabilities by less than 1 / 13! in every trial.
    """
    parameters = tuple(map(jnp.uint32, parameters))
    start, structure = jax.tree.flatten(cls(*parameters, *options).start(1))

    def tree(rows):
        return jax.tree.unflatten(structure, list(rows.T))

    def followed(rows):
        state = tree(rows)
        k = getattr(getattr(state, "trial", state), "k", 0)
        return (k <= most_k) & (getattr(state, "v", 0) <= most_v) & np.ones(len(rows), bool)

    count, (origin, chance, to, record) = explore(
        lambda rows: ask(cls, options, parameters, tree(rows)),
        lambda rows, u: advance(cls, options, parameters, tree(rows), u),
        [int(leaf[0]) for leaf in start],
        followed,
    )
    done = to < 0
    step = sparse.csr_array((chance[~done], (to[~done], origin[~done])), (count, count))
    here = np.eye(1, count)[0]
    visits = here
    while here.sum() > 1e-12:
        here = step @ here
        visits = visits + here
    masses = collections.Counter()
    weights = (visits[origin] * chance)[done].tolist()
    for outcome, weight in zip(record[done].tolist(), weights, strict=True):
        masses[tuple(outcome)] += weight
    return masses


def check_masses(records, value, mass):
    found = collections.Counter()
    for record, weight in records.items():
        found[value(*record)] += weight
    assert len(found) > 1
    total, exact_total = sum(found.values()), sum(mass(outcome) for outcome in found)
    for outcome, weight in found.items():
        assert weight / total == pytest.approx(mass(outcome) / exact_total, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize(("a", "b"), [(2, 7), (1, 2)])
def test_tree_of_a_coin(a, b):
    records = exact_distribution(_machines.Coin, (a, b))
    check_masses(records, int, lambda x: a / b if x else 1 - a / b)


@pytest.mark.parametrize(("a", "b"), [(1, 3), (3, 4), (2, 2), (7, 2)])
def test_tree_of_an_exponential_coin(a, b):
    records = exact_distribution(_machines.ExponentialCoin, (a, b))
    check_masses(records, int, lambda x: math.exp(-a / b) if x else -math.expm1(-a / b))


def test_coin_of_probability_one():
    records = exact_distribution(_machines.ExponentialCoin, (0, 3))
    assert records == {(1,): 1.0}


@pytest.mark.parametrize(("t", "s"), [(5, 2), (1, 1), (1, 3), (4, 1)])
@pytest.mark.parametrize("signed", [False, True])
def test_tree_of_the_discrete_laplace(t, s, signed):
    def value(twice, v):
        n = (twice // 2 + t * v) // s
        return -n if signed and twice % 2 else n

    records = exact_distribution(_machines.Laplace, (t, s), signed)
    mass = laplace_mass if signed else geometric_mass
    check_masses(records, value, functools.partial(mass, t / s))


# Below variance 1/2, where b is above 1; where b is 1; and in between.
@pytest.mark.parametrize(("a", "b"), [(1, 5), (1, 2), (1, 1), (2, 1), (7, 2), (12, 1)])
def test_tree_of_the_discrete_gaussian(a, b):
    t = max(1, math.isqrt(2 * a // b))

    def value(twice, v):
        n = twice // 2 + t * v
        return -n if twice % 2 else n

    records = exact_distribution(_machines.Gaussian, (a, b))
    check_masses(records, value, functools.partial(gaussian_mass, a / b))


def test_quotient():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 2**63, 200) >> generator.integers(0, 63, 200)
    divisor = generator.integers(1, 2**31, 200) >> generator.integers(0, 31, 200)
    x, divisor = np.append(x, [2**63 - 1, 2**31, 0]), np.append(np.maximum(divisor, 1), [1, 1, 5])
    limbs = Limbs((x >> 32).astype("uint32"), (x & 0xFFFFFFFF).astype("uint32"))
    found = jax.jit(_machines.quotient)(limbs, divisor.astype("uint32"))
    assert found.tolist() == np.minimum(x // divisor, 2**31 - 1).tolist()


def test_square_root():
    roots = np.array([1, 2, 3, 1000, 46340, 65535])
    n = np.concatenate([roots**2 - 1, roots**2, roots**2 + 2 * roots]).astype("uint32")
    assert jax.jit(_machines._square_root)(n).tolist() == [math.isqrt(x) for x in n.tolist()]


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
        pytest.param(discrete_gaussian, gaussian_mass, marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_coins(key):
    for a, b in ((1, 3), (2**31 - 3, 2**31 - 1), (1, 1000), (0, 5), (5, 5)):
        heads = int(bernoulli(key, numerator=a, denominator=b, shape=(COUNT,)).sum())
        assert stats.binomtest(heads, COUNT, a / b).pvalue > FALSE_ALARM
    for a, b in ((1, 3), (7, 2), (2**31 - 1, 2**30)):
        heads = int(bernoulli_exp(key, numerator=a, denominator=b, shape=(COUNT,)).sum())
        assert stats.binomtest(heads, COUNT, math.exp(-a / b)).pvalue > FALSE_ALARM
        assert stats.binomtest(heads, COUNT, math.exp(-1.1 * a / b)).pvalue < FALSE_ALARM


@pytest.mark.slow
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


@one_of_each_machine
@pytest.mark.slow
def test_bits_are_the_same_in_any_program(sampler, key):
    """Traced and mapped under x64, against concrete parameters in a loop without it."""
    shape = (COUNT,)
    keys = jax.random.split(key, 2)
    numerators = (A - 2, A)

    @jax.jit
    @jax.vmap
    def draw(key, a, b):
        return sampler(key, numerator=a, denominator=b, shape=shape)

    too_large = -1 if sampler is discrete_gaussian else 2**24
    a = np.array([*numerators, -1, 2, 2, too_large], np.int32)
    b = np.array([B, B, 3, 0, -3, 1], np.int32)
    looped = [
        sampler(k, numerator=numerator, denominator=B, shape=shape)
        for k, numerator in zip(keys, numerators, strict=True)
    ]
    with jax.enable_x64(True):
        mapped = draw(keys[np.array([0, 1, 0, 0, 0, 0])], a, b)
    assert mapped.dtype == looped[0].dtype
    assert np.array_equal(mapped[:2], np.stack(looped))
    assert not np.array_equal(mapped[0], mapped[1])
    # Bad traced parameters show.
    assert np.unique(mapped[2:]).tolist() == [False if mapped.dtype == bool else -(2**31)]


def test_shapes(key):
    assert bernoulli(key, numerator=1, shape=(0, 2)).shape == (0, 2)
    flat = bernoulli(key, numerator=1, denominator=3, shape=(COUNT,))
    square = bernoulli(key, numerator=1, denominator=3, shape=(100, COUNT // 100))
    assert np.array_equal(square, flat.reshape(100, -1))


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
