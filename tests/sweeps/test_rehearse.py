"""Rehearsals: ratios that are known exactly, keys that are fresh, and nobody who pays."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import dpjax
from dpjax import queries

N = 50


@pytest.fixture(scope="module")
def key():
    return dpjax.random.seeded_key(20170611)


def uniform(key, n):
    return jax.random.uniform(key, (n,))


def rehearse(key, target=jnp.mean, oracle=uniform, mechanisms=None, **settings):
    settings = {"n": N, "draws": 400, **settings}
    mechanisms = dpjax.laplace(1 / N, 1.0) if mechanisms is None else mechanisms
    return dpjax.rehearse(key, target, oracle, mechanisms=mechanisms, **settings)


@pytest.fixture(scope="module")
def mean(key):
    return rehearse(
        key,
        mechanisms={
            "strong": dpjax.laplace(1 / N, 0.1),
            "weak": dpjax.laplace(1 / N, 10.0),
            "again": dpjax.laplace(1 / N, 10.0),
            "gaussian": dpjax.gaussian(1 / N, 1.0, 1e-5),
        },
    )


def test_the_ratio_is_that_of_the_standard_deviations(mean):
    """A relative error of .25 is five times the largest standard deviation among these ratios."""
    spread = 1 / math.sqrt(12 * N)
    noise = [math.sqrt(2) / N / 0.1, math.sqrt(2) / N / 10, math.sqrt(2) / N / 10]
    noise.append(float(dpjax.gaussian(1 / N, 1.0, 1e-5).scale))
    np.testing.assert_allclose(mean.noise_over_spread, np.array(noise) / spread, rtol=0.25)
    # And it can tell them apart.
    assert not np.allclose(mean.noise_over_spread[0], noise[0] / spread / 2, rtol=0.25)


def test_the_ratio_is_what_its_numbers_say(mean):
    error = mean.released - mean.value
    expected = np.sqrt((error.astype(float) ** 2).mean("draw")) / mean.value.std("draw", ddof=1)
    np.testing.assert_allclose(mean.noise_over_spread, expected, rtol=1e-5)
    np.testing.assert_allclose(mean.noise_over_spread_each[:, 0], expected, rtol=1e-5)


def test_verdicts_follow_the_ratio(mean):
    strong, weak, _, _ = mean.verdict.values
    assert strong.startswith("strong: noise is 6")
    assert strong.endswith("Do not publish: see docs/when-it-works.md.")
    assert weak.startswith("weak: noise is 0.07")
    assert weak.endswith("of the sampling spread. Publish.")
    assert mean.guarantee.values[0] == "(epsilon=0.1, delta=0)-DP"
    assert set(mean.relation.values) == {"replace-one"}


def test_every_database_and_every_draw_has_a_key_of_its_own(mean):
    """Two mechanisms that are alike differ in noise too."""
    assert len(np.unique(mean.value)) > 390  # Floats of 24 bits may meet by chance.
    noise = np.asarray(mean.released, float) - np.asarray(mean.value, float)
    assert len(np.unique(noise)) > 4 * 390
    assert np.abs(np.corrcoef(noise)[np.triu_indices(4, 1)]).max() < 0.25
    assert abs(np.corrcoef(mean.value, noise[0])[0, 1]) < 0.25


def test_equal_keys_show_the_same(mean, key):
    one = {"strong": dpjax.laplace(1 / N, 0.1)}
    again = rehearse(key, mechanisms=one)
    xarray.testing.assert_equal(again.value, mean.value)
    np.testing.assert_array_equal(again.released[0], mean.released[0])
    other = rehearse(jax.random.fold_in(key, 1), mechanisms=one)
    assert not np.isin(other.value, mean.value).all()


def test_no_open_ledger_is_told(key, tmp_path):
    with dpjax.Ledger(tmp_path / "ledger.db", epsilon=1.0) as ledger:
        rehearse(key, mechanisms=dpjax.laplace(1 / N, 5.0))
        assert ledger.history() == []
    with dpjax.random.KeyLedger(tmp_path / "keys.db"):
        rehearse(key)
        rehearse(key)


def test_a_query_is_shown_in_the_units_of_its_records(key):
    query = queries.sum_query(lower=0.0, upper=10.0, capacity=N)
    mechanisms = [dpjax.laplace(query.sensitivity("l1"), 1.0)]
    found = rehearse(key, query, lambda key, n: 10 * uniform(key, n), mechanisms)
    assert found.mechanism.values.tolist() == ["laplace"]
    np.testing.assert_allclose(found.value.mean(), 5 * N, rtol=0.05)
    spread = 10 * math.sqrt(N / 12)
    np.testing.assert_allclose(found.noise_over_spread, math.sqrt(2) * 10 / spread, rtol=0.25)


def test_numbers_that_drown_are_counted(key):
    """Their sum is that of the large one, which hides the small one."""

    def target(records):
        return {"large": 100 * jnp.mean(records), "small": jnp.mean(records)[None] / 100}

    found = rehearse(key, target, mechanisms={"laplace": dpjax.laplace(0.1, 1.0)})
    assert found.verdict.item().endswith(
        "above it in 1 of 2 numbers. Publish: those are mostly noise."
    )
    large, small = found.noise_over_spread_each[0].values
    np.testing.assert_allclose(small / large, 1e4, rtol=0.25)
    assert found.released_small.dims == ("mechanism", "draw", "value_small_dim_0")


ODD = {
    "infinite": (lambda x: jnp.where(x[0] < 0.5, jnp.inf, 0.0), "is not finite on .* of 400 drawn"),
    "missing": (lambda x: jnp.where(x[0] < 0.5, jnp.nan, 0.0), "is not finite on .* of 400 drawn"),
    "constant": (lambda x: 0 * x[0], "the same on all drawn databases. Do not publish"),
    "close": (lambda x: jnp.mean(x) / 2, "noise is 1.4 times .* Publish only if you must"),
}


@pytest.mark.parametrize("name", ODD)
def test_no_odd_answer_is_called_good(key, name):
    target, said = ODD[name]
    (verdict,) = rehearse(key, target).verdict.values
    assert re.search(said, verdict), verdict


def test_what_cannot_be_rehearsed_is_refused(key):
    sampled = dpjax.sample_sensitivity(
        jax.random.key(0), jnp.mean, uniform, n=N, norm="l1", gamma=0.2
    )
    laplace, scores = dpjax.laplace(sampled, 1.0), dpjax.exponential(1.0, 1.0)
    bernstein = dpjax.bernstein(1.0, 1.0, degree=1, dims=1)
    for settings, error, message in (
        ({"mechanisms": laplace, "n": N + 1}, ValueError, f"for databases of n={N} records"),
        ({"mechanisms": laplace, "target": jnp.max}, ValueError, "not the one that was sampled"),
        ({"mechanisms": scores}, TypeError, "mechanisms must add noise to numbers"),
        ({"mechanisms": bernstein, "target": lambda x: x[:2]}, TypeError, "numbers like those of"),
        ({"mechanisms": []}, ValueError, "at least one"),
        ({"mechanisms": [laplace, laplace]}, ValueError, "distinct names"),
        ({"mechanisms": {1: laplace}}, TypeError, "texts for names"),
        ({"draws": 3}, ValueError, "draws must be an integer of at least 20"),
        ({"n": 0}, ValueError, "n must be"),
        ({"oracle": 3}, TypeError, "oracle must be a function"),
        ({"key": jax.random.key(0)}, TypeError, "key"),
    ):
        with pytest.raises(error, match=message):
            rehearse(**{"key": key, **settings})
