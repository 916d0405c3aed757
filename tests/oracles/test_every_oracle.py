"""What all oracles of independent records share: identities, the shortcut for sums, host state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import oracles
from dpjax.sensitivity._pairs import RandomPair

LABELS = np.repeat(np.arange(2), 10)


def features(shift):
    return np.random.default_rng(20170611).normal(size=(20, 2)).astype("float32") + shift


# From a number, on which what is fitted depends, to an oracle.
MAKE = {
    "independent": lambda a: oracles.independent(lambda key: a * jax.random.normal(key, (2,))),
    "mixture": lambda a: oracles.mixture([jax.random.normal, jax.random.exponential], [1, a]),
    "class_gaussians": lambda a: oracles.class_gaussians({"x": features(a), "y": LABELS}),
    "resample": lambda a: oracles.resample(features(a)),
    "weighted resample": lambda a: oracles.resample(features(0), a + np.arange(20)),
    "smoothed_resample": lambda a: oracles.smoothed_resample(features(a)),
    "words": lambda a: oracles.words({"Ada": 1, "Bo": a, "C": 3}),
    "from_density": lambda a: oracles.from_density(lambda x: a + x[..., 0], dims=2, cells=8),
}
every = pytest.mark.parametrize("name", MAKE)


def total(record):
    return sum(jnp.sum(leaf.astype(float)) for leaf in jax.tree.leaves(record))


TARGET = dpjax.targets.summable(total)


def traced(oracle):
    return RandomPair.trace(jax.random.key(0), TARGET, oracle, n=5, norm="l1", positions="last")


def test_every_oracle_is_here():
    public = {name for name in vars(oracles) if not name.startswith("_")}
    assert public - {"IndependentRecords"} <= set(MAKE)


@every
def test_what_is_fitted_decides_on_the_identity(name):
    first, again, other = (traced(MAKE[name](a)).oracle.fingerprint for a in (1.0, 1.0, 2.0))
    assert first == again
    assert first != other


@every
def test_pairs_of_a_sum_cost_two_records(name):
    pair = traced(MAKE[name](1.0))
    assert pair.shortcut == "two records"
    assert pair.is_concrete


# Each takes seconds to compile.
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "words" else pytest.mark.slow) for x in MAKE]
)
def test_a_sensitivity_is_sampled(name, key):
    sensitivity = dpjax.sample_sensitivity(key, TARGET, MAKE[name](1.0), n=5, norm="l1", m=100)
    assert 0 < sensitivity.value < np.inf


@every
def test_an_oracle_passes_through_jit(name, key):
    """As an argument: what is fitted are leaves."""
    drawn = jax.eval_shape(lambda oracle, key: oracle(key, 4), MAKE[name](1.0), key)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(drawn)} == {4}
    fitted = jax.tree.leaves(MAKE[name](1.0))
    assert all(isinstance(leaf, jax.Array) for leaf in fitted)
    assert fitted or name == "independent"


@pytest.mark.parametrize("make", [oracles.resample, oracles.smoothed_resample])
def test_arrays_that_are_written_to_later_change_nothing(make):
    # Floats of NumPy's, whose memory JAX would share.
    public = np.arange(1024, dtype=np.float32)
    oracle = make(public)
    before = traced(oracle).oracle.fingerprint
    public[:] = 0
    assert traced(oracle).oracle.fingerprint == before


@pytest.mark.parametrize("name", ["class_gaussians", "weighted resample", "words", "from_density"])
def test_what_was_given_is_not_looked_at_again(name, monkeypatch):
    table = {"Ada": 1.0, "Bo": 2.0}
    x, y, weights = features(0), LABELS.copy(), np.ones(20)
    oracle = {
        "class_gaussians": lambda: oracles.class_gaussians({"x": x, "y": y}),
        "weighted resample": lambda: oracles.resample(LABELS, weights),
        "words": lambda: oracles.words(table),
        "from_density": lambda: oracles.from_density(lambda p: weights[0] + p[..., 0], dims=1),
    }[name]()
    before = traced(oracle).oracle.fingerprint
    table["Ada"] = weights[0] = 100.0
    x[:], y[:] = 0, 0
    assert traced(oracle).oracle.fingerprint == before
