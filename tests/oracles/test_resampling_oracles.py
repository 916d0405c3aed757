"""Oracles fitted to public records: what they draw and what they refuse.

Statistical tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax.oracles import resample, smoothed_resample

FALSE_ALARM = 1e-6
PUBLIC = {
    "age": np.array([20.0, 30.0, 50.0, 90.0], "float32"),
    "visits": np.array([1, 2, 3, 4]),
    "ill": np.array([False, False, True, True]),
    "scan": np.arange(8.0, dtype="float32").reshape(4, 2),
}


def drawn_by(oracle, key, n):
    return jax.jit(oracle, static_argnums=1)(key, n)


both = pytest.mark.parametrize("make", [resample, smoothed_resample])


@both
def test_shape_and_dtypes(make, key):
    drawn = drawn_by(make(PUBLIC), key, 7)
    assert drawn["age"].shape == (7,)
    assert drawn_by(make(PUBLIC), key, 1)["age"].shape == (1,)
    assert drawn["scan"].shape == (7, 2)
    assert {name: leaf.dtype.name for name, leaf in drawn.items()} == {
        "age": "float32",
        "visits": "int32",
        "ill": "bool",
        "scan": "float32",
    }


@both
def test_key_decides(make, keys):
    oracle = jax.jit(make(PUBLIC), static_argnums=1)
    first, again, other = (oracle(keys(i), 7)["age"] for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_records_are_drawn_uniformly_and_whole(key):
    drawn = drawn_by(resample(PUBLIC), key, 20_000)
    row = np.asarray(drawn["visits"]) - 1
    np.testing.assert_array_equal(drawn["age"], PUBLIC["age"][row])
    np.testing.assert_array_equal(drawn["ill"], PUBLIC["ill"][row])
    np.testing.assert_array_equal(drawn["scan"], PUBLIC["scan"][row])
    assert stats.chisquare(np.bincount(row)).pvalue > FALSE_ALARM


def test_records_are_drawn_independently(key):
    pairs = jax.jit(jax.vmap(lambda k: resample(PUBLIC)(k, 2)["visits"]))(
        jax.random.split(key, 20_000)
    )
    table = np.zeros((4, 4))
    np.add.at(table, (pairs[:, 0] - 1, pairs[:, 1] - 1), 1)
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bandwidth", [0.1, pytest.param(None, marks=pytest.mark.slow)])
def test_smoothed_moments(bandwidth, key):
    n = 100_000
    drawn = drawn_by(smoothed_resample(PUBLIC, bandwidth), key, n)
    row = np.asarray(drawn["visits"]) - 1
    width = 4**-0.2 if bandwidth is None else bandwidth
    columns = []
    for name in ("age", "scan"):
        spread = width * PUBLIC[name].std(axis=0)
        noise = (np.asarray(drawn[name]) - PUBLIC[name][row]) / spread
        columns += list(noise.reshape(n, -1).T)
    for column in columns:
        assert stats.kstest(column, "norm", method="asymp").pvalue > FALSE_ALARM
        assert stats.kstest(0.95 * column, "norm", method="asymp").pvalue < FALSE_ALARM
    # Of independent noise, 5 / sqrt(n) is exceeded once in 10^6.
    assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 5 / np.sqrt(n)
    np.testing.assert_array_equal(drawn["ill"], PUBLIC["ill"][row])


@pytest.mark.slow
def test_smoothing_noise_differs_between_columns_and_records(key):
    drawn = drawn_by(smoothed_resample(PUBLIC), key, 1000)
    noise = drawn["scan"] - jnp.asarray(PUBLIC["scan"])[drawn["visits"] - 1]
    assert len(set(noise.ravel().tolist())) > 1900
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.2


def test_constant_column_stays_constant(key):
    drawn = drawn_by(smoothed_resample(np.full(3, 7.0)), key, 100)
    assert set(drawn.tolist()) == {7.0}
    # The mean of these is rounded, so their standard deviation is not 0 as computed.
    oracle = smoothed_resample(np.full(400, 0.1, np.float32))
    assert set(drawn_by(oracle, key, 100).tolist()) == {np.float32(0.1)}
    np.testing.assert_allclose(oracle.log_prob(np.float32(0.1)), 0, atol=1e-6)


@pytest.mark.parametrize("strange", [np.nan, np.inf, 3e38])
def test_records_that_have_no_spread_are_refused(strange):
    with pytest.raises(ValueError, match="records must be finite"):
        smoothed_resample({"a": np.float32([1, strange, -strange]), "b": np.arange(3)})


@both
@pytest.mark.parametrize(
    "records",
    [np.zeros(1), {"a": np.zeros(3), "b": np.zeros(4)}, 3.0, np.zeros((0, 2)), {}],
    ids=["one record", "ragged", "a number", "no record", "nothing"],
)
def test_records_without_a_common_axis_of_two_are_refused(make, records):
    with pytest.raises(ValueError, match=r"records(\[0\])? must"):
        make(records)


@both
@pytest.mark.parametrize("records", [np.array(["a", "b"]), np.zeros(3, complex), [jnp.mean]])
def test_records_that_are_no_real_arrays_are_refused(make, records):
    with pytest.raises(TypeError, match=r"records(\[0\])? must"):
        make(records)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_bandwidth_is_refused(bandwidth):
    with pytest.raises(ValueError, match=f"bandwidth must be .* got {bandwidth:g}"):
        smoothed_resample(PUBLIC, bandwidth)


def test_weights_decide(key):
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    row = np.asarray(drawn_by(resample(PUBLIC, weights), key, 20_000)["visits"]) - 1
    counts = np.bincount(row)
    assert stats.chisquare(counts, 2_000 * weights).pvalue > FALSE_ALARM
    assert stats.chisquare(counts, 2_000 * np.array([1.2, 1.8, 3, 4])).pvalue < FALSE_ALARM


def test_the_probability_of_a_record_counts_its_equals():
    oracle = resample({"a": np.array([1, 1, 2, 2]), "b": np.array([[3], [3], [3], [4]])})
    records = {"a": np.array([1, 2, 2, 1]), "b": np.array([[3], [3], [4], [4]])}
    found = np.exp(jax.jit(jax.vmap(oracle.log_prob))(records))
    np.testing.assert_allclose(found, [0.5, 0.25, 0.25, 0], atol=1e-6)
    with pytest.raises(ValueError, match="a record must have the shape"):
        oracle.log_prob(records)


def test_smoothed_density_is_the_one_of_the_draws(key):
    public = {"x": np.array([0.0, 1.0, 5.0], "float32"), "c": np.array([0, 1, 1])}
    oracle = smoothed_resample(public, bandwidth=0.5)
    spread = 0.5 * public["x"].std()
    x = np.linspace(-10, 15, 2_501, dtype="float32")
    grid = {"x": np.tile(x, 2), "c": np.repeat([0, 1], len(x))}
    density = np.exp(np.asarray(jax.jit(jax.vmap(oracle.log_prob))(grid), float)).reshape(2, -1)
    for c in (0, 1):
        centers = public["x"][public["c"] == c]
        expected = sum(stats.norm.pdf(x, center, spread) for center in centers) / 3
        np.testing.assert_allclose(density[c], expected, rtol=1e-3, atol=1e-6)
    assert np.trapezoid(density, x).sum() == pytest.approx(1, abs=1e-4)
    cdf = np.cumsum(density.sum(axis=0)) * (x[1] - x[0])
    drawn = np.asarray(drawn_by(oracle, key, 20_000)["x"])
    for factor, agrees in ((1.0, True), (1.1, False)):
        p = stats.kstest(factor * drawn, lambda t: np.interp(t, x, cdf), method="asymp").pvalue
        assert (p > FALSE_ALARM) == agrees


def test_a_constant_column_must_be_met():
    oracle = smoothed_resample({"a": np.full(3, 7.0), "b": np.array([1.0, 2.0, 3.0])})
    met, missed = (oracle.log_prob({"a": np.asarray(a), "b": np.asarray(2.0)}) for a in (7.0, 7.5))
    assert np.isfinite(met)
    assert np.isneginf(missed)
