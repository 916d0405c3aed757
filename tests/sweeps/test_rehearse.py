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
from dpjax.sweeps import _rehearse

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


MECHANISMS = {
    "strong": dpjax.laplace(1 / N, 0.1),
    "weak": dpjax.laplace(1 / N, 10.0),
    "again": dpjax.laplace(1 / N, 10.0),
}


@pytest.fixture(scope="module")
def mean(key):
    return rehearse(key, mechanisms=MECHANISMS)


def test_the_ratio_is_that_of_the_standard_deviations(mean):
    """A relative error of .25 is five times the largest standard deviation among these ratios."""
    spread = 1 / math.sqrt(12 * N)
    noise = [math.sqrt(2) / N / epsilon for epsilon in (0.1, 10.0, 10.0)]
    np.testing.assert_allclose(mean.noise_over_spread, np.array(noise) / spread, rtol=0.25)
    # And it can tell them apart.
    assert not np.allclose(mean.noise_over_spread[0], noise[0] / spread / 2, rtol=0.25)


def test_the_ratio_is_what_its_numbers_say(mean):
    error = mean.released - mean.value
    expected = np.sqrt((error.astype(float) ** 2).mean("draw")) / mean.value.std("draw", ddof=1)
    np.testing.assert_allclose(mean.noise_over_spread, expected, rtol=1e-5)
    np.testing.assert_allclose(mean.noise_over_spread_each[:, 0], expected, rtol=1e-5)


def test_verdicts_follow_the_ratio(mean):
    strong, weak, _ = mean.verdict.values
    assert strong.startswith("strong: noise is 7.5 times")
    assert strong.endswith("Do not publish: see docs/when-it-works.md.")
    assert weak.startswith("weak: noise is 0.067 of")
    assert weak.endswith("of the sampling spread. Publish.")
    assert mean.guarantee.values[0] == "(epsilon=0.1, delta=0)-DP, under replace-one"
    assert set(mean.relation.values) == {"replace-one"}


def test_every_database_and_every_draw_has_a_key_of_its_own(mean):
    """Two mechanisms that are alike differ in noise too."""
    assert len(np.unique(mean.value)) > 390  # Floats of 24 bits may meet by chance.
    noise = np.asarray(mean.released, float) - np.asarray(mean.value, float)
    assert len(np.unique(noise)) > 3 * 390
    assert np.abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 0.25
    assert abs(np.corrcoef(mean.value, noise[0])[0, 1]) < 0.25


def test_no_open_ledger_is_told(mean, key, tmp_path):
    """The budget would not pay for it. Equal keys show the same."""
    ledger = dpjax.Ledger(tmp_path / "ledger.db", epsilon=1.0)
    with ledger, dpjax.random.KeyLedger(tmp_path / "keys.db"):
        try:
            again = rehearse(key, mechanisms=MECHANISMS)
        except (TypeError, ValueError) as error:
            pytest.fail(f"a ledger was asked: {error}")
    xarray.testing.assert_equal(again, mean)
    assert ledger.history() == []


def test_a_query_is_shown_in_the_units_of_its_records(key):
    query = queries.sum_query(lower=0.0, upper=10.0, capacity=N)
    mechanisms = [dpjax.laplace(query.sensitivity("l1"), 1.0)]
    found = rehearse(key, query, lambda key, n: 10 * uniform(key, n), mechanisms)
    assert found.mechanism.values.tolist() == ["laplace"]
    np.testing.assert_allclose(found.value.mean(), 5 * N, rtol=0.05)
    spread = 10 * math.sqrt(N / 12)
    np.testing.assert_allclose(found.noise_over_spread, math.sqrt(2) * 10 / spread, rtol=0.25)


def summary(noise=0.0, **values):
    """What is said of such answers, with noise of 1 and -1 in turn, and some more."""
    draws = len(next(iter(values.values())))
    signs = np.resize([1.0, -1.0], draws)
    rows = {f"released_0{name}": row + signs * (1 + noise) for name, row in values.items()}
    found = xarray.Dataset(
        {name: ("draw", row) for name, row in {**rows, **named("value", values)}.items()},
        attrs=dict.fromkeys(("versions", "backend", "key"), ""),
    )
    return _rehearse._summary(found, {"laplace": dpjax.laplace(1.0, 1.0)})


def named(start, values):
    return {f"{start}{name}": row for name, row in values.items()}


# The squares of 2 and -2 add up to 16 over 4 draws, so their variance, over 3, is 16/3.
PLAIN = np.array([2.0, -2.0, 2.0, -2.0])


def test_numbers_that_drown_are_counted():
    """Their sum is that of the large one, which hides the small one."""
    found = summary(_large=100 * PLAIN, _small=PLAIN / 100)
    expected = np.sqrt(3 / 16) * np.array([0.01, 100])
    np.testing.assert_allclose(found.noise_over_spread_each[0], expected)
    together = math.sqrt(2 / (16 / 3 * (100**2 + 0.01**2)))
    np.testing.assert_allclose(found.noise_over_spread, together)
    said = "above it in 1 of 2 numbers. Publish: those are mostly noise."
    assert found.verdict.item().endswith(said)
    assert found.released_small.dims == ("mechanism", "draw")


ODD = {
    "infinite": (PLAIN + np.array([np.inf, 0, 0, 0]), "is not finite on 1 of 4 drawn databases"),
    "missing": (
        PLAIN + np.array([np.nan, 0, np.inf, 0]),
        "is not finite on 2 of 4 drawn databases",
    ),
    "constant": (0 * PLAIN, "the same on all drawn databases. Do not publish"),
    "close": (PLAIN / 4, r"noise is 1\.7 times .* Publish only if you must"),
    "wide": (PLAIN / 8, r"noise is 3\.5 times .* Do not publish: see"),
    "good": (PLAIN * 4, r"noise is 0\.11 of the sampling spread\. Publish\.$"),
}


@pytest.mark.parametrize("name", ODD)
def test_no_odd_answer_is_called_good(name):
    values, said = ODD[name]
    found = summary(**{"": values})
    assert re.search(said, found.verdict.item())
    assert (found.noise_over_spread.item() < 1) == (name == "good")


def test_no_noise_at_all_is_not_called_good():
    assert summary(noise=-1.0, **{"": 0 * PLAIN}).verdict.item().endswith("noise varies.")


def test_what_cannot_be_rehearsed_is_refused(key):
    sampled = dpjax.sample_sensitivity(
        jax.random.key(0), jnp.mean, uniform, n=N, norm="l1", gamma=0.2
    )
    laplace, scores = dpjax.laplace(sampled, 1.0), dpjax.exponential(1.0, 1.0)
    bernstein = dpjax.bernstein(1.0, 1.0, degree=1, dims=1)
    for settings, error, message in (
        ({"mechanisms": laplace, "n": N + 1}, ValueError, f"for databases of n={N} records"),
        ({"mechanisms": laplace, "target": jnp.max}, ValueError, "must be the target that"),
        ({"mechanisms": object()}, TypeError, "mechanisms must add noise to numbers or select"),
        ({"mechanisms": scores}, ValueError, "scores over the response set"),
        ({"mechanisms": bernstein, "target": lambda x: x[:2]}, TypeError, "numbers like those of"),
        ({"mechanisms": []}, ValueError, "at least one"),
        ({"mechanisms": [laplace, laplace]}, ValueError, "distinct names"),
        ({"mechanisms": {1: laplace}}, TypeError, "strings as names"),
        ({"draws": 3}, ValueError, "draws must be an integer of at least 20"),
        ({"n": 0}, ValueError, "n must be"),
        ({"oracle": 3}, TypeError, "oracle must be a function"),
        ({"key": jax.random.key(0)}, TypeError, "key"),
    ):
        with pytest.raises(error, match=message):
            rehearse(**{"key": key, **settings})


def test_a_proved_mechanism_releases_clamped_records(key):
    """The bias of a clamp counts as an error, and the records must be those of the proof."""
    records = jax.ShapeDtypeStruct((N,), jnp.float32)
    proved = [
        dpjax.prove_sensitivity(jnp.mean, records, bounds=(0, high), norm="l1") for high in (1, 0.5)
    ]
    mechanisms = {f"up to {x.bounds.leaves[0].high}": dpjax.laplace(x, 1e6) for x in proved}
    found = rehearse(key, mechanisms=mechanisms, draws=20)
    wide, narrow = found.released.values.mean(1)
    assert abs(wide - 1 / 2) < 0.02  # Uniform numbers, averaged over N: 20 times 5 sigma.
    assert abs(narrow - 3 / 8) < 0.02
    assert "the error by noise and by the clamp is" in found.verdict.values[1]
    others = {"oracle": lambda key, n: uniform(key, 2 * n).reshape(n, 2), "target": jnp.max}
    for name, other in others.items():
        message = (
            "records like those in the proof" if name == "oracle" else "must be the target that"
        )
        with pytest.raises(ValueError, match=message):
            rehearse(key, mechanisms=mechanisms, **{name: other})


def test_a_sweep_releases_by_a_proved_mechanism(key):
    """A private function clamps the records, so it can be swept over epsilon."""
    records = jax.ShapeDtypeStruct((N,), jnp.float32)
    proved = dpjax.prove_sensitivity(jnp.mean, records, bounds=(0, 0.5), norm="l1")

    def released(key, epsilon):
        private = dpjax.privatize(jnp.mean, dpjax.laplace(proved, epsilon))
        return private(key, jnp.ones(N)).value

    found = dpjax.sweep(key, released, traced={"epsilon": jnp.array([1e5, 1e6])}, repeats=2)
    np.testing.assert_allclose(found.value, 0.5, atol=0.01)  # Scale at most 1e-7.


def letters(key, n):
    return jax.random.choice(key, 3, (n,), p=jnp.array([0.5, 0.3, 0.2]))


def test_a_selection_loses_score_beside_the_spread_of_the_best(key):
    """Of three counts of 50 letters. An indifferent choice loses what the counts say on average."""
    counts = queries.histogram_query(3)
    noise = counts.sensitivity("linf")
    mechanisms = {
        "sure": dpjax.exponential(noise, 100.0),
        "flip": dpjax.permute_and_flip(noise, 1e-3),
        "indifferent": dpjax.exponential(noise, 1e-3),
    }
    found = rehearse(key, counts, letters, mechanisms)
    assert found.noise_over_spread[0] == 0
    assert (
        found.verdict.values[0]
        == "sure: the score that noise costs is 0 of the sampling spread. Publish."
    )
    assert found.verdict.values[2].endswith("Do not publish: see docs/when-it-works.md.")
    lost = (found.value - found.released).mean("draw")
    # The mean of (best - others) / 3 is about N (.5 - 1/3); its error is below 10%.
    np.testing.assert_allclose(lost[1:], N * (0.5 - 1 / 3), rtol=0.2)
    spread = math.sqrt(N * 0.25)
    np.testing.assert_allclose(found.value.std("draw"), spread, rtol=0.2)


def test_several_selections_are_compared_with_as_many_of_the_best(key):
    counts = queries.histogram_query(3)
    two = queries.top_k(counts.sensitivity("linf"), 100.0, k=2)
    found = rehearse(key, counts, letters, {"two": two}, draws=50)
    np.testing.assert_array_equal(found.released[0], found.value)
    assert (found.value[:, 0] >= found.value[:, 1]).all()
    one = dpjax.exponential(counts.sensitivity("linf"), 1.0)
    with pytest.raises(TypeError, match="must select as many options"):
        rehearse(key, counts, letters, {"two": two, "one": one})
    with pytest.raises(ValueError, match="value must be one array of scores"):
        dpjax.rehearse(
            key,
            lambda x: {"a": jnp.mean(x)},
            uniform,
            n=N,
            mechanisms={"noise": dpjax.laplace(2.0, 1.0), "one": dpjax.exponential(1.0, 1.0)},
        )


def test_a_sorted_histogram_beats_many_selections_where_options_are_disjoint(key):
    """And not where a record moves many scores: then selections do.

    What else selects beside noise: one option, a sum of each group, and several rows of scores.
    """
    most, k = 40, 10

    def oracle(key, n):
        return jnp.minimum(jax.random.geometric(key, 0.1, (n,)) - 1, most - 1)

    def lost(target, oracle, **noises):
        found = rehearse(key, target, oracle, noises, n=2000, draws=60)
        assert found.value.shape == (60, k)
        ratios = dict(zip(found.mechanism.values, found.noise_over_spread.values, strict=True))
        return [ratios[name] for name in noises]

    counts = queries.histogram_query(most)
    picked, noisy = lost(
        counts,
        oracle,
        picked=queries.top_k(counts.sensitivity("linf"), 1.0, k=k),
        sorted=dpjax.laplace(counts.sensitivity("l1"), 1.0),
    )
    assert noisy < picked / 2
    # The rows of the table are that all options count at once.
    marginals = queries.linear_workload(
        np.vstack([np.arange(most) >= j for j in range(most)]).astype(int)
    )
    picked, noisy = lost(
        marginals,
        oracle,
        picked=queries.top_k(marginals.sensitivity("linf"), 1.0, k=k),
        sorted=dpjax.laplace(marginals.sensitivity("l1"), 1.0),
    )
    assert picked < noisy


def test_one_option_and_rows_of_options_are_selected_by_noise_too(key):
    counts = queries.histogram_query(3)
    noise = dpjax.laplace(counts.sensitivity("l1"), 1e5)
    one = dpjax.exponential(counts.sensitivity("linf"), 1e5)
    found = rehearse(key, counts, letters, {"noise": noise, "one": one}, draws=30)
    np.testing.assert_array_equal(found.released[0], found.value)
    scores = queries.quantile_scores((0.25, 0.75), grid=(0.0, 0.25, 0.75))
    both = {
        "each": queries.select_each(scores.sensitivity(), 1e5, count=2),
        "noise": dpjax.laplace(1.0, 1e5),
    }

    def untold(database):  # Nothing is known of it in the norm l1.
        return scores(database)

    found = rehearse(key, scores, uniform, {"each": both["each"]}, draws=30)
    both["each"] = queries.select_each(4.0, 1e5, count=2)
    again = rehearse(key, untold, uniform, both, draws=30)
    assert again.released.shape == (2, 30, 2)
    np.testing.assert_array_equal(again.released[0], again.released[1])
    assert found.value.shape == again.value.shape


def test_a_sum_is_rehearsed_in_the_units_of_the_records(key):
    total = queries.sum_query(lower=0, upper=1, capacity=N)
    found = rehearse(key, total, uniform, {"noise": dpjax.laplace(total.sensitivity(), 10.0)})
    assert float(abs(found.value.mean() - N / 2)) < 1
    noise = np.abs(found.released[0] - found.value)
    assert 0.08 < float(noise.mean()) < 0.12
