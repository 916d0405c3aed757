"""The sampler: what it estimates, what it refuses, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._running._devices import Layout
from dpjax._running._processes import Team
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import Plan


@pytest.fixture
def sample(key, uniform):
    """A small sampling; each test names what matters to it.

    One chunk size for all of them, so that a target is compiled once.
    """

    def sample(target=jnp.mean, oracle=uniform, **settings):
        settings = {"n": 5, "norm": "l1", "m": 100, "chunk_size": 50, **settings}
        return dpjax.sample_sensitivity(settings.pop("key", key), target, oracle, **settings)

    return sample


@pytest.fixture
def sample_quickly(sample):
    """Without the search for order dependence, which a database of one record cannot have."""
    return lambda target, **settings: sample(target, **{"n": 1, "positions": "each", **settings})


# What is estimated.


@pytest.mark.parametrize(
    "gamma",
    [0.2, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.4, marks=pytest.mark.slow)],
)
def test_figure_4(reference, keys, gamma):
    """The average of sampled sensitivities of the mean of exponentials is E[G_(k)].

    G is exponential of mean 1/n, so E[G_(k)] = (1/n) sum 1/j and its variance is (1/n^2) sum 1/j^2,
    over j = m-k+1..m. Rejects beyond 4.5 standard errors: a false alarm once in 1.5e5 keys.
    """
    rows = reference("r_diffpriv")["figure4"]
    row = next(row for row in rows if (row["m"], row["gamma"]) == (100, gamma))
    repeats = 200

    def exponential(key, n):
        return jax.random.exponential(key, (n,))

    sensitivities = [
        dpjax.sample_sensitivity(
            keys(i), jnp.mean, exponential, n=100, norm="l1", m=100, gamma=gamma, method="dkw"
        )
        for i in range(repeats)
    ]
    assert {s.k for s in sensitivities} == {row["k"]}
    average = np.mean([s.value for s in sensitivities])

    def z(k):
        j = np.arange(100 - k + 1, 101)
        expected, variance = np.sum(1 / j) / 100, np.sum(1 / j**2) / 100**2
        return (average - expected) / np.sqrt(variance / repeats)

    assert abs(z(row["k"])) < 4.5
    assert abs(z(row["k"] - 2)) > 4.5  # Power: one or two ranks off would be seen.
    assert abs(z(row["k"] + 2)) > 4.5
    combined = np.hypot(row["se"], np.std([s.value for s in sensitivities]) / np.sqrt(repeats))
    assert abs(average - row["mean"]) < 4.5 * combined  # R's own average, of 50 repeats


def hundreds(database):
    """A target in whole numbers."""
    return (100 * jnp.max(database)).astype(int)


def test_it_is_the_order_statistic_of_the_samples(sample_quickly, key, uniform):
    # Whole numbers have no rounding, so the estimate is one of the distances.
    sensitivity = sample_quickly(hundreds, m=200, gamma=0.2)
    distances = dpjax.sample_distances(key, hundreds, uniform, n=1, norm="l1", m=200)
    assert sensitivity.value == np.sort(distances)[sensitivity.k - 1]
    assert sensitivity.k == dpjax.operating_point(m=200, gamma=0.2).k


def test_floats_add_the_resolution(sample_quickly, key, uniform):
    estimate = sample_quickly(jnp.max).value
    distances = dpjax.sample_distances(key, jnp.max, uniform, n=1, norm="l1", m=100)
    added = estimate - float(np.max(distances))
    assert added == pytest.approx(np.finfo(np.float32).eps, rel=0.05)  # Of a value near 1


def test_what_a_sensitivity_carries(sample):
    sensitivity = sample()
    point = dpjax.operating_point(m=100)
    assert (sensitivity.m, sensitivity.k, sensitivity.gamma) == (100, 100, point.gamma)
    assert (sensitivity.method, sensitivity.confidence) == ("exact", 0.99)
    assert (sensitivity.n, sensitivity.norm, sensitivity.positions) == (5, "l1", "last")
    assert sensitivity.relation is dpjax.NeighboringRelation.REPLACE_ONE
    assert repr(sensitivity.records) == "float32[5]"
    assert repr(sensitivity.outputs) == "float32[]"
    assert sensitivity.chunk_size == 50
    assert not sensitivity.zero_allowed


def test_given_gamma_alone_it_takes_ten_times_the_least_m(sample):
    for options, least in (({}, 44), ({"confidence": None}, 9), ({"method": "dkw"}, 285)):
        sensitivity = sample(m=None, gamma=0.1, **options)
        assert sensitivity.m == 10 * least
        point = dpjax.operating_point(m=10 * least, gamma=0.1, **options)
        assert (sensitivity.k, sensitivity.confidence) == (point.k, point.confidence)


def test_marginal_sensitivities_say_so(sample):
    guarantee = dpjax.laplace(sample(confidence=None, gamma=0.1), 1.0).guarantee
    assert (
        repr(guarantee) == "(epsilon=1, delta=0, gamma=0.1)-random DP, marginal, under replace-one"
    )


def test_one_call_of_the_oracle_draws_all_the_records(key, uniform):
    """Records that share a cause keep sharing it: the means of a pair differ by at most 1/n.

    A changed record from a call of its own would lie 1000 away in half of the pairs.
    """
    asked = []

    def shared_cause(key, n):
        asked.append(n)
        return jnp.where(uniform(key, 1) < 0.5, 1000.0, 0.0) + uniform(key, n)

    distances = dpjax.sample_distances(key, jnp.mean, shared_cause, n=5, norm="l1", m=100)
    assert set(asked) == {6}
    assert np.max(distances) <= 0.2 + 1e-3


def test_records_without_replacement_never_collide(key, uniform):
    """A pair from one permutation holds n + 1 distinct records, so the replaced one is new."""

    def shuffled(key, n):
        return jnp.argsort(uniform(key, n))

    def largest_gap(database):
        return jnp.max(jnp.diff(jnp.sort(database)))

    distances = dpjax.sample_distances(key, largest_gap, shuffled, n=5, norm="l1", m=100)
    # One number of 0..5 is missing on each side: the gap is 2 in the middle, 1 at an end.
    assert set(np.asarray(distances)) <= {0.0, 1.0}
    assert 0.2 < np.mean(np.asarray(distances)) < 0.8


# Databases.


def test_a_database_is_any_pytree(sample, key, uniform):
    def patients(key, n):
        scans = uniform(key, 16 * n).reshape(n, 4, 4)
        ages = (90 * scans[:, 0, 0]).astype(int)
        return {"age": ages, "scan": (scans,), "smoker": scans[:, 0, 1] < 0.3}

    def target(database):
        return {
            "smokers": jnp.sum(database["smoker"]),
            "brightness": jnp.mean(database["scan"][0], axis=0),
            "oldest": jnp.max(database["age"]),
        }

    sensitivity = sample(target, patients, positions="each")
    assert repr(sensitivity.records) == (
        "{'age': 'int32[5]', 'scan': ('float32[5, 4, 4]',), 'smoker': 'bool[5]'}"
    )
    private = dpjax.privatize(target, dpjax.laplace(sensitivity, 1.0))
    release = private(dpjax.random.seeded_key(0), patients(key, 5))
    shapes = {"smokers": (), "brightness": (4, 4), "oldest": ()}
    assert jax.tree.map(jnp.shape, release.value) == shapes


@pytest.mark.parametrize("n", [1, 2])
def test_tiny_databases(sample, n):
    sensitivity = sample(n=n, m=500, gamma=0.1)
    # G is the distance of two uniforms over n: P(nG <= t) = 1 - (1 - t)^2, .684 at gamma .1.
    assert sensitivity.n == n
    assert 0.684 / n < sensitivity.value < 0.8 / n


# Order.


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(lambda database: database[0], marks=pytest.mark.slow),
        lambda database: database[0] + jnp.mean(database),
    ],
)
def test_order_dependent_targets_are_refused(sample, target):
    with pytest.raises(ValueError, match=r"depends on the order .* positions=.average"):
        sample(target)


def test_targets_that_depend_on_order_a_little_are_refused(sample):
    # Record 0 counts 1.1 times as much as the others, which the last record does not show.
    with pytest.raises(ValueError, match="depends on the order"):
        sample(lambda database: jnp.mean(database) + 0.1 * database[0] / 5)


def test_order_dependence_shows_behind_rare_bad_values(sample):
    # The infinite distance of a bad value must not count as what replacing a record does.
    def target(database):
        return jnp.where(jnp.max(database) > 0.99, jnp.nan, first_plus_mean(database))

    with pytest.raises(ValueError, match="depends on the order"):
        sample(target, gamma=0.5)


def test_targets_that_ignore_the_order_are_accepted(sample):
    target = lambda x: (jnp.sort(x), jnp.std(x), jnp.median(x), jnp.sum(x > 0.5))  # noqa: E731
    assert sample(target, n=51).value > 0


def test_an_infinite_value_is_not_order_dependence(sample):
    def overflowing(database):
        return jnp.where(jnp.max(database) > 0.95, jnp.inf, jnp.mean(database))

    assert 0 < sample(overflowing, gamma=0.6).value < 1


def first_plus_mean(database):
    return database[0] + jnp.mean(database)


def test_each_position_covers_the_worst_one(sample, key, uniform):
    sensitivity = sample(first_plus_mean, positions="each", m=1000, gamma=0.1)
    each = dpjax.sample_distances(
        key, first_plus_mean, uniform, n=5, norm="l1", m=1000, positions="each"
    )
    assert each.shape == (5, 1000)
    worst = np.sort(each, axis=1)[:, sensitivity.k - 1]
    assert sensitivity.value == pytest.approx(worst[0], rel=1e-5)
    assert worst[0] > 5 * worst[1:].max()
    # All n statements hold at once: each is sampled at confidence 1 - (1 - C)/n.
    assert sensitivity.k == dpjax.operating_point(m=1000, gamma=0.1, confidence=1 - 0.01 / 5).k
    assert (sensitivity.confidence, sensitivity.positions) == (0.99, "each")


def test_averaged_positions_say_so(sample):
    sensitivity = sample(first_plus_mean, positions="average", m=1000, gamma=0.5)
    assert sensitivity.value < 0.2 + 1e-5  # Position 0 exceeds that: its share is below gamma.
    assert "averaged over positions" in repr(dpjax.laplace(sensitivity, 1.0).guarantee)


def changed_record(difference):
    """A norm that counts from 1 the record in which two databases differ."""
    return (1 + jnp.argmax(difference != 0)).astype(float)


@pytest.mark.parametrize("positions", ["last", "average", "each"])
def test_which_record_is_changed(key, uniform, positions):
    places = dpjax.sample_distances(
        key, lambda x: x, uniform, n=6, norm=changed_record, m=1200, positions=positions
    )
    if positions == "last":
        assert set(np.asarray(places)) == {6.0}
    elif positions == "each":
        np.testing.assert_array_equal(places, np.tile(np.arange(1.0, 7.0)[:, None], 1200))
    else:
        counts = np.bincount(np.asarray(places, int), minlength=7)[1:]
        assert len(counts) == 6
        # Chi-square with 5 degrees of freedom: beyond 35 once in 6e5 keys.
        assert np.sum((counts - 200) ** 2 / 200) < 35


# Values that cannot be used.


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_too_many_bad_values_are_refused(sample_quickly, bad):
    with pytest.raises(ValueError, match=r"sensitivity is infinite.* NaN"):
        sample_quickly(lambda x: jnp.where(x[0] > 0.9, bad, x[0]), m=200, gamma=0.05)


@pytest.mark.parametrize("bad", [jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.slow)])
def test_rare_bad_values_count_as_the_largest_distances(sample_quickly, key, uniform, bad):
    def target(database):
        return jnp.where(database[0] > 0.99, bad, database[0])

    sensitivity = sample_quickly(target, m=200, gamma=0.1)
    distances = dpjax.sample_distances(key, target, uniform, n=1, norm="l1", m=200)
    assert 0 < np.isinf(distances).sum() < 200 - sensitivity.k
    expected = np.sort(distances)[sensitivity.k - 1]
    assert sensitivity.value == pytest.approx(expected, rel=1e-5)


def test_zero_must_be_asked_for_by_name(sample_quickly):
    def constant(database):
        return jnp.zeros(2) * database[0]

    with pytest.raises(ValueError, match=r"sensitivity is 0.*allow_zero=True"):
        sample_quickly(constant)
    sensitivity = sample_quickly(constant, allow_zero=True)
    assert sensitivity.value == 0.0
    mechanism = dpjax.laplace(sensitivity, 1.0)
    assert repr(mechanism.guarantee).endswith("no noise")
    released = mechanism(dpjax.random.seeded_key(0), jnp.array([1.0, 2.0])).value
    np.testing.assert_array_equal(released, [1.0, 2.0])


def test_allowing_zero_changes_nothing_where_there_is_noise(sample):
    sensitivity = sample(allow_zero=True)
    assert not sensitivity.zero_allowed
    assert "no noise" not in repr(dpjax.laplace(sensitivity, 1.0).guarantee)


def shifted_mean(database):
    """Like the mean age of a million people: the distances drown in the rounding of the value."""
    return jnp.mean(database) + 1e6


def test_cancellation_is_refused_with_advice(sample_quickly):
    with pytest.raises(ValueError, match=r"rounding error.*float64.*allow_cancellation=True"):
        sample_quickly(shifted_mean, n=5)


def test_accepted_cancellation_is_covered(sample_quickly):
    sensitivity = sample_quickly(shifted_mean, n=5, allow_cancellation=True)
    assert sensitivity.value > 1e6 * np.finfo(np.float32).eps


def test_float64_cures_cancellation(sample_quickly, x64):
    assert 0.1 < sample_quickly(shifted_mean, n=5).value < 0.2


def test_large_float_counts_are_refused_and_integers_are_exact(sample_quickly):
    # Design: a float count of 10^7 stands at 1.7 times the resolution.
    with pytest.raises(ValueError, match="rounding error"):
        sample_quickly(lambda x: 1e7 + jnp.sum(x > 0.5).astype(float))
    assert sample_quickly(lambda x: 10**7 + jnp.sum(x > 0.5)).value == 1.0


COUNTS = {
    "l2 of counts": (lambda x: jnp.zeros(4, "int32").at[x].add(1), 3, "l2", 2**0.5),
    "a large sum": (jnp.sum, 2**24 + 1, "l1", 2**24 + 1),
    "a large one and many small ones": (
        lambda x: jnp.sum(x) * jnp.array([2**24] + [1] * 99, "int32"),
        1,
        "l1",
        2**24 + 99,
    ),
    "a float beside": (lambda x: (jnp.sum(x), jnp.zeros(())), 2**24 + 1, "l1", 2**24 + 1),
    "counts": (lambda x: jnp.zeros(4, "int32").at[x].add(1), 3, "l1", 2.0),
}


@pytest.mark.parametrize("what", COUNTS)
def test_the_norm_of_integers_is_rounded_up(key, what):
    """It is found in floats: casts, sums and roots of it are rounded to nearest."""
    target, large, norm, true = COUNTS[what]

    def oracle(key, n):
        return large * jax.random.bernoulli(key, 0.5, (n,)).astype("int32")

    found = dpjax.sample_sensitivity(key, target, oracle, n=1, norm=norm, m=40, positions="each")
    assert true <= found.value <= true * (1 + 2e-5)
    if true == 2:
        assert found.value == 2


def test_eight_times_the_resolution_is_enough(sample_quickly):
    # Whole steps next to 2^20, where the resolution is 1/8 of the value over 2^20.
    def count(base):
        return lambda x: base + jnp.sum(x > 0.5).astype(float)

    assert sample_quickly(count(2.0**20 - 2)).value > 1
    with pytest.raises(ValueError, match="below 8 times the resolution"):
        sample_quickly(count(2.0**20))


def test_distances_in_whole_steps_of_a_float_target_may_be_counted(sample_quickly):
    # Whether a coordinate changed has no resolution.
    assert sample_quickly(jnp.round, norm="hamming").value >= 1.0


# Refused before anything is sampled.


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda x: "private", "contain real numbers or booleans"),
        (lambda x: np.array(["a", "b"]), "contain real numbers or booleans"),
        (lambda x: jax.lax.complex(x, x), "contain real numbers or booleans, got dtype complex64"),
        (lambda x: jax.random.key(0), "contain real numbers or booleans"),
        (lambda x: lambda t: t, "be arrays, got a function.*evaluate_on_lattice"),
        (lambda x: {}, "contain at least one array"),
        (lambda x: None, "contain at least one array"),
        (lambda x: x[:0], "not be empty"),
    ],
)
def test_targets_must_return_real_arrays(sample, target, message):
    with pytest.raises((TypeError, ValueError), match=f"the value of the target must {message}"):
        sample(target)


@pytest.mark.parametrize("bad", [None, 3, "mean"])
def test_target_and_oracle_must_be_functions(sample, bad):
    with pytest.raises(TypeError, match="target must be a function"):
        sample(bad)
    with pytest.raises(TypeError, match="oracle must be a function"):
        sample(jnp.mean, bad)


@pytest.mark.parametrize(
    "oracle",
    [
        lambda key, n: jax.random.uniform(key, (n - 1,)),
        lambda key, n: jax.random.uniform(key, (5,)),
        lambda key, n: jax.random.uniform(key),
        lambda key, n: {"a": jax.random.uniform(key, (n,)), "b": jax.random.uniform(key, (3,))},
    ],
)
def test_oracles_must_draw_as_many_records_as_asked(sample, oracle):
    with pytest.raises(ValueError, match=r"leading axis is the number .* asked for 6"):
        sample(oracle=oracle)


@pytest.mark.parametrize(
    "oracle",
    [
        lambda key, n: jnp.arange(float(n)),
        lambda key, n: np.random.default_rng(0).random(n, np.float32),
        lambda key, n: jax.random.uniform(jax.random.key(0), (n,)),
        jax.jit(lambda key, n: jnp.ones(n), static_argnums=1),
    ],
)
def test_oracles_must_use_their_key(sample, oracle):
    with pytest.raises(ValueError, match="oracle must use its key"):
        sample(oracle=oracle)


def labelled(labels):
    """Records whose labels are fixed, each by its place."""
    return lambda key, n: {"x": jax.random.uniform(key, (n,)), "of": [{"label": labels(n)}]}


def in_one_array(labels):
    """As a column beside features that are drawn."""

    def oracle(key, n):
        columns = jnp.reshape(labels(n), (n, -1))
        drawn = jnp.concatenate([jax.random.uniform(key, (n, 2)), columns], axis=1)
        return {"of": [{"label": drawn}]}

    return oracle


def total(database):
    return jnp.mean(database["of"][0]["label"])


@pytest.mark.parametrize(
    "labels",
    [
        lambda n: (jnp.arange(n) < n // 2).astype(jnp.float32),
        lambda n: np.random.default_rng(0).random((n, 2), np.float32),
        lambda n: jax.lax.scan(lambda c, _: (c + 1.0, c), 0.0, length=n)[1],
    ],
)
@pytest.mark.parametrize("oracle", [labelled, in_one_array])
def test_what_each_record_has_by_its_place_is_refused(sample, labels, oracle):
    """The last record kept its label: half of all pairs lay beyond a bound for 95% of them."""
    with pytest.raises(ValueError, match=r"the numbers at \['of'\]\[0\]\['label'\] depend only on"):
        sample(total, oracle(labels))
    for positions in ("average", "each"):
        sample(total, oracle(labels), positions=positions)


def test_sums_look_for_what_records_have_by_their_places(sample):
    target = dpjax.targets.summable(lambda r: r["x"] + r["of"][0]["label"], average=True)
    with pytest.raises(ValueError, match="the same in every database"):
        sample(target, labelled(lambda n: jnp.arange(n) / n), m=200)


def test_what_16_bits_cannot_tell_apart_is_for_float32(key):
    """Of 32 numbers in bfloat16, a record moves the mean by few units in the last place."""
    narrow = lambda key, n: jax.random.uniform(key, (n,), jnp.bfloat16)  # noqa: E731
    settings = {"n": 32, "norm": "l1", "gamma": 0.05}
    with pytest.raises(ValueError, match="let the target compute and return float32, or"):
        dpjax.sample_sensitivity(key, jnp.mean, narrow, **settings)
    wide = lambda d: jnp.mean(d.astype(jnp.float32))  # noqa: E731
    assert dpjax.sample_sensitivity(key, wide, narrow, **settings).value < 1 / 32


@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
def test_rare_marks_are_not_taken_for_places(sample, n):
    """A record in n has one: a database is that of another by chance."""
    oracle = lambda key, n: jax.random.bernoulli(key, 1 / n, (n,)).astype(jnp.float32)  # noqa: E731
    for seed in range(3):
        settings = {"n": n, "key": jax.random.key(seed)}
        sample(jnp.mean, oracle, **settings, allow_zero=True, allow_cancellation=True)


@pytest.mark.parametrize("labels", [jnp.ones, lambda n: jnp.full((n, 3), jnp.nan)])
def test_what_all_records_have_in_common_may_be_fixed(sample, labels):
    assert sample(lambda d: jnp.mean(d["x"]), labelled(labels)).value > 0


@pytest.mark.parametrize("oracle", [lambda key, n: (), lambda key, n: "abc"])
def test_oracles_must_draw_arrays(sample, oracle):
    with pytest.raises((TypeError, ValueError), match="the value of the oracle"):
        sample(oracle=oracle)


BAD_KEYS = {
    "seed": (lambda: 0, "typed JAX key, got 0"),
    "none": (lambda: None, "typed JAX key, got None"),
    "raw": (lambda: jax.random.PRNGKey(0), "typed JAX key, got a raw uint32 array"),
    "numpy": (lambda: np.zeros(2, np.uint32), "typed JAX key"),
    "batch": (lambda: jax.random.split(jax.random.key(0), 3), r"one key, got shape \(3,\)"),
    "rbg": (lambda: jax.random.key(0, impl="rbg"), "got rbg"),
    "unsafe": (lambda: jax.random.key(0, impl="unsafe_rbg"), "got unsafe_rbg"),
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_other_keys_are_refused(sample, uniform, kind):
    make, message = BAD_KEYS[kind]
    with pytest.raises((TypeError, ValueError), match=f"key must be .*{message}"):
        sample(key=make())
    with pytest.raises((TypeError, ValueError), match=f"key must be .*{message}"):
        dpjax.sample_distances(make(), jnp.mean, uniform, n=5, norm="l1", m=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1 and at most .*, got 0"),
        ({"n": -1}, "n must be .* got -1"),
        ({"n": 2.0}, "n must be an integer"),
        ({"m": 0}, "m must be .* got 0"),
        ({"m": 1.5}, "m must be an integer"),
        ({"m": 2**33}, "m must be at most"),
        ({"m": None}, "m, gamma or both must be given"),
        ({"m": 10, "gamma": 0.01}, "m=10 is too small.* at least 459"),
        ({"gamma": 1.5}, "gamma must be strictly between 0 and 1, got 1.5"),
        ({"method": "wilks"}, "method must be one of"),
        ({"method": "dkw", "confidence": 0.9}, "confidence must be None"),
        ({"norm": "l3"}, "norm must be a function or one of"),
        ({"positions": "first"}, "positions must be one of"),
        ({"chunk_size": 0}, "chunk_size must be .* got 0"),
        ({"chunk_size": 2.0}, "chunk_size must be an integer"),
    ],
)
def test_bad_settings_are_refused(sample, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sample(**settings)


@pytest.mark.parametrize(
    "norm", [lambda difference: difference, lambda difference: jnp.abs(difference)[None]]
)
def test_norms_must_return_scalars(sample, key, uniform, norm):
    with pytest.raises((TypeError, ValueError), match=r"norm .*scalar"):
        sample(lambda x: x, norm=norm, positions="each")
    with pytest.raises((TypeError, ValueError), match=r"norm .*scalar"):
        dpjax.sample_distances(key, lambda x: x, uniform, n=5, norm=norm, m=10)


def test_it_runs_on_the_host(sample, key):
    with pytest.raises(TypeError, match=r"on the host.*sample_distances"):
        jax.jit(lambda key: sample(key=key).value)(key)
    with pytest.raises(TypeError, match=r"traced value.*sample_distances"):
        jax.vmap(lambda factor: sample(scaled_mean(factor)).value)(jnp.ones(2))


# Identity: which sampling it was.


def scaled_mean(factor):
    return lambda database: factor * jnp.mean(database)


def drawn_up_to(largest):
    return lambda key, n: jax.random.uniform(key, (n,), maxval=largest)


def identity(key, *, m=100, gamma=0.1, confidence=0.99, **changed):
    base = {"target": jnp.mean, "oracle": drawn_up_to(1.0), "positions": "last"}
    settings = {**base, "n": 5, "norm": "l1", **changed}
    pair = RandomPair.trace(key, settings.pop("target"), settings.pop("oracle"), **settings)
    point = dpjax.operating_point(m=m, gamma=gamma, confidence=confidence)
    return Plan(key, pair, Layout((None,), point.m, 10), Team((0,)), point, confidence).identity


def test_equal_settings_have_equal_identities(sample, key, uniform):
    first, second = (sample(lambda x: jnp.mean(x), gamma=0.1) for _ in range(2))
    assert first.identity == second.identity == identity(key, oracle=uniform)
    assert first.target == second.target


@pytest.mark.parametrize(
    "changed",
    [
        {"target": jnp.sum},
        {"target": scaled_mean(2.0)},
        {"oracle": lambda key, n: jax.random.exponential(key, (n,))},
        {"oracle": drawn_up_to(2.0)},
        {"n": 6},
        {"norm": "l2"},
        {"positions": "average"},
        {"m": 101},
        {"gamma": 0.2},
        {"confidence": 0.95},
        {"confidence": None},
    ],
)
def test_every_setting_is_part_of_the_identity(key, changed):
    assert identity(key, **changed) != identity(key)


def test_the_key_is_part_of_the_identity(keys):
    assert len({identity(keys(i)) for i in range(3)}) == 3


class Weighted:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, difference):
        return self.weight * jnp.sum(jnp.abs(difference))


def closing_over(weight):
    return lambda difference: weight * jnp.sum(jnp.abs(difference))


@pytest.mark.parametrize("make", [closing_over, Weighted])
def test_what_a_norm_holds_is_part_of_the_identity(key, make):
    assert identity(key, norm=make(2.0)) == identity(key, norm=make(2.0))
    assert identity(key, norm=make(2.0)) != identity(key, norm=make(3.0))


WEIGHT = 2.0


def weighted_by_a_global(difference):
    return WEIGHT * jnp.sum(jnp.abs(difference))


def test_what_a_norm_looks_up_is_part_of_the_identity(key, monkeypatch):
    before = identity(key, norm=weighted_by_a_global)
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    assert identity(key, norm=weighted_by_a_global) != before


FINGERPRINTS = """
import jax, jax.numpy as jnp, dpjax

def oracle(key, n):
    return {"x": jax.random.normal(key, (n, 2)), "y": jax.random.bernoulli(key, 0.5, (n,))}

doubling = dpjax.targets.host(lambda x: x * 2, output=jax.ShapeDtypeStruct((2,), "float32"))

def target(database):
    doubled = doubling(database["x"][0])
    fit = dpjax.targets.logistic_regression(regularization=0.1)(database)
    gram = database["x"].T @ database["x"] + jnp.eye(2)
    return {"fit": fit, "solved": jnp.linalg.solve(gram, fit), "host": doubled}

def norm(difference):
    return jnp.sum(jax.nn.relu(difference["fit"]))

from dpjax.sensitivity._pairs import RandomPair
from dpjax._running._devices import Layout
from dpjax.sensitivity._plan import Plan
from dpjax._running._processes import Team
key = dpjax.random.seeded_key(0)
pair = RandomPair.trace(key, target, oracle, n=5, norm=norm, positions="last")
plan = Plan(key, pair, Layout((None,), 100, 10), Team((0,)), dpjax.operating_point(m=100), 0.99)
print(pair.target.fingerprint, pair.oracle.fingerprint, plan.identity)
"""


def test_fingerprints_are_the_same_in_every_process(run_python):
    printed = {run_python(FINGERPRINTS, PYTHONHASHSEED=seed) for seed in ("0", "1")}
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 3
