"""Targets that are a function of a sum: the shortcut gives what two databases give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import targets
from dpjax.oracles import independent
from dpjax.sensitivity import _loop, _probes
from dpjax.sensitivity._pairs import RandomPair

pairs = independent(lambda key: jax.random.normal(key, (2,)))
normal = independent(jax.random.normal)


def least_squares(sums):
    ridge = sums["xx"] + jnp.eye(1)
    return sums["xy"][0] / ridge[0, 0]


MEAN = targets.summable(lambda x: x, average=True)
AFFINE = {
    "mean": (MEAN, pairs, "l1"),
    "moments": (
        targets.moments(order=3, lower=-1.0, upper=1.0),
        normal,
        "l2",
    ),
    "density": (
        targets.kernel_density_on_lattice(bandwidth=0.2, degree=3, dims=2),
        independent(lambda key: jax.random.uniform(key, (2,))),
        "linf",
    ),
    "of one's own": (
        targets.summable(lambda x: jnp.sin(x), lambda s: {"a": 2 * s[0] + 1, "b": s / 3}),
        pairs,
        "l1",
    ),
}
OTHERS = {
    "variance": (
        targets.summable(
            lambda x: {"x": x, "square": x**2},
            lambda mean: mean["square"] - mean["x"] ** 2,
            average=True,
        ),
        pairs,
        "l1",
    ),
    "least squares": (
        targets.summable(
            lambda r: {"xx": r[:1, None] * r[None, :1], "xy": r[:1] * r[1]}, least_squares
        ),
        pairs,
        "l1",
    ),
}


def both(key, name, **settings):
    target, oracle, norm = (AFFINE | OTHERS)[name]
    settings = {"n": 20, "norm": norm, "m": 64, **settings}
    return [
        dpjax.sample_distances(key, f, oracle, **settings)
        for f in (target, lambda database: target(database))
    ]


# An affine one and another at every kind of position; the other combinations take their time.
SHORT = {("mean", "last"), ("mean", "average"), ("variance", "last"), ("variance", "each")}
COMBINATIONS = [
    pytest.param(name, place, marks=() if (name, place) in SHORT else pytest.mark.slow)
    for name in AFFINE | OTHERS
    for place in ("last", "average", "each")
]


@pytest.mark.parametrize(("name", "positions"), COMBINATIONS)
def test_the_same_distances_as_from_two_databases(key, x64, name, positions):
    if positions == "each":
        settings = {"positions": positions, "n": 3, "m": 16}
    else:
        settings = {"positions": positions}
    summed, dense = both(key, name, **settings)
    np.testing.assert_allclose(summed, dense, rtol=1e-9, atol=1e-12)
    assert np.max(dense) > 0


def sampler(key, name):
    target, oracle, norm = (AFFINE | OTHERS)[name]
    return RandomPair.trace(key, target, oracle, n=2000, norm=norm, positions="last")


@pytest.mark.parametrize("name", AFFINE)
def test_only_two_records_are_drawn_where_they_are_independent_and_finish_is_affine(key, name):
    assert sampler(key, name).shortcut == "two records"
    assert sampler(key, name).bytes_of_a_pair(None) < 1000


def test_all_records_are_drawn_where_nobody_says_that_they_are_independent(key):
    target, oracle, norm = AFFINE["mean"]
    found = RandomPair.trace(
        key, target, lambda key, n: oracle(key, n), n=2000, norm=norm, positions="last"
    )
    assert found.shortcut == "two sums"


@pytest.mark.parametrize("name", OTHERS)
def test_the_shared_sum_is_computed_once_elsewhere(key, name):
    assert sampler(key, name).shortcut == "two sums"


def test_the_estimate_is_that_of_two_databases(key):
    target, oracle, norm = AFFINE["mean"]
    settings = {"n": 200, "norm": norm, "m": 500, "gamma": 0.05}
    summed = dpjax.sample_sensitivity(key, target, oracle, **settings)
    dense = dpjax.sample_sensitivity(key, lambda x: target(x), oracle, **settings)
    assert summed.value == pytest.approx(dense.value, rel=1e-3)
    mechanism = dpjax.laplace(summed, epsilon=1.0)
    database = pairs(key, 200)
    release = dpjax.privatize(target, mechanism)(dpjax.random.seeded_key(0), database)
    assert release.value.shape == (2,)


def test_nothing_cancels(key):
    """Far from 0, floats of two databases are all rounding; two records tell the difference."""

    far = independent(lambda key: 1e4 + jax.random.uniform(key))
    settings = {"n": 10_000, "norm": "l1", "m": 200, "gamma": 0.1}
    with pytest.raises(ValueError, match="mostly rounding error"):
        dpjax.sample_sensitivity(key, jnp.mean, far, **settings)
    found = dpjax.sample_sensitivity(key, MEAN, far, **settings)
    # What the release's own rounding may add is in it: units in the last place of 10^4.
    assert 0.8e-4 < found.value < 1e-4 + 20 * 2**-10


def test_rounding_of_the_release_is_added(key):
    target, oracle, norm = AFFINE["mean"]
    found = dpjax.sample_sensitivity(key, target, oracle, n=200, norm=norm, m=500, gamma=0.05)
    distances = dpjax.sample_distances(key, target, oracle, n=200, norm=norm, m=500)
    bare = float(dpjax.order_statistic(distances, found.k))
    assert bare + 2**-26 < found.value < bare * 1.001


def test_both_roundings_and_the_disagreement_are_added(key):
    """Of sums of 64ths next to 2^20: exact by the shortcut, and in steps of 1/8 by the target."""
    target = targets.summable(lambda x: jnp.floor(64 * x) / 64, lambda total: total + 2.0**20)

    oracle = independent(lambda key: 8 * jax.random.uniform(key))
    # The positions that probes replace a record at.
    settings = {"n": 4, "norm": "l1", "m": 90, "positions": "average"}
    exact, rounded = (
        np.asarray(dpjax.sample_distances(key, f, oracle, **settings))
        for f in (target, lambda database: target(database))
    )
    disagreement = np.abs(exact - rounded).max()
    assert 1 / 16 < disagreement <= 1 / 8
    found = dpjax.sample_sensitivity(key, target, oracle, gamma=0.05, **settings)
    added = found.value - float(np.sort(exact)[found.k - 1])
    # Each of the two values lies within a unit in the last place, of 2^20 and a little.
    assert added == pytest.approx(2 / 8 + disagreement, rel=1e-4)


def test_a_shortcut_that_disagrees_is_refused(key):
    """The probes of the target itself find a record that is no pure function of its key."""
    scales = iter(range(1, 100))
    oracle = independent(lambda key: next(scales) * jax.random.uniform(key))
    with pytest.raises(RuntimeError, match="the shortcut for sums over records disagrees"):
        dpjax.sample_sensitivity(key, MEAN, oracle, n=30, norm="l1", m=100)


def test_statistics_on_the_host_take_no_shortcut(key):
    halved = targets.host(lambda x: x / 2, output=jax.ShapeDtypeStruct((), jnp.float32))
    target = targets.summable(halved)
    traced = RandomPair.trace(key, target, normal, n=3, norm="l1", positions="last")
    assert traced.shortcut == "two databases"


def refused_or_the_same(key, target, oracle, **settings):
    """The shortcut may refuse, but must not hide what two databases show."""
    settings = {"norm": "l1", "n": 50, "gamma": 0.01, **settings}
    dense = dpjax.sample_sensitivity(key, lambda x: target(x), oracle, **settings)
    try:
        found = dpjax.sample_sensitivity(key, target, oracle, **settings)
    except RuntimeError:
        return
    assert found.value == pytest.approx(dense.value, rel=1e-3)


def test_booleans_of_opposite_signs(key):
    target = targets.summable(
        lambda x: {"pro": x > 0.5, "con": x < -0.5}, lambda s: s["pro"] - s["con"]
    )
    refused_or_the_same(key, target, normal)


@pytest.mark.slow
def test_booleans_of_opposite_signs_on_average(key):
    target = targets.summable(
        lambda x: {"pro": x > 0.5, "con": x < -0.5}, lambda s: s["pro"] - s["con"], average=True
    )
    refused_or_the_same(key, target, normal)


def test_integers_that_wrap(key):
    def positive(x):
        return (x > 0).astype(jnp.uint8)

    refused_or_the_same(key, targets.summable(positive, lambda s: s - jnp.uint32(25)), normal)
    huge = targets.summable(lambda x: (x * 1e8).astype(jnp.int32))
    with pytest.raises(RuntimeError, match="sums may overflow"):
        dpjax.sample_sensitivity(key, huge, normal, n=50, norm="l1", m=100)


def test_rounding_steps_are_not_affine(key):
    target = targets.summable(
        lambda x: 0.9998 + x * 1e-3, lambda s: s.astype(jnp.float16).astype(jnp.float32)
    )
    assert sampler_of(key, target).shortcut == "two sums"


def sampler_of(key, target):
    return RandomPair.trace(key, target, normal, n=50, norm="l1", positions="last")


@pytest.mark.parametrize("positions", ["last", pytest.param("average", marks=pytest.mark.slow)])
def test_rounding_that_finish_enlarges_is_refused_or_covered(key, positions):
    variance = OTHERS["variance"][0]

    far = independent(lambda key: 1000 + jax.random.normal(key))
    settings = {"norm": "l1", "n": 1000, "m": 500, "gamma": 0.05, "positions": positions}
    dense = dpjax.sample_distances(
        key, lambda x: variance(x), far, **{k: settings[k] for k in ("norm", "n", "m", "positions")}
    )
    try:
        found = dpjax.sample_sensitivity(key, variance, far, **settings)
    except (RuntimeError, ValueError):
        return
    assert np.mean(np.asarray(dense) > found.value) <= 0.05


def test_sums_that_overflow_are_refused(key):
    def record(key):
        return jax.random.uniform(key, minval=60.0, maxval=71.0).astype(jnp.float16)

    tall = independent(record)
    target = targets.summable(lambda x: x, average=True)
    with pytest.raises((RuntimeError, ValueError), match=r"disagrees|infinite"):
        dpjax.sample_sensitivity(key, target, tall, n=1000, norm="l1", m=100)


def test_kept_shortcuts_see_what_functions_close_over(key):
    """An array that kept ones hold is written to; another one has its old numbers.

    Chunks of another size are compiled anew.
    """
    oracle = dpjax.oracles.independent(lambda key: jax.random.uniform(key, (2,)))

    def estimate(weights, chunk_size=None):
        target = dpjax.targets.summable(lambda x: jnp.sum(x * weights), average=True)
        settings = {"n": 9, "norm": "l1", "gamma": 0.1, "chunk_size": chunk_size}
        return dpjax.sample_sensitivity(key, target, oracle, **settings).value

    weights = np.ones(2, np.float32)
    first = estimate(weights)
    weights *= 2
    np.testing.assert_allclose(estimate(weights), 2 * first, rtol=1e-4)
    again = estimate(np.ones(2, np.float32), chunk_size=50)
    np.testing.assert_allclose(again, first, rtol=1e-4)
    weights /= 2
    assert estimate(weights) == first


def test_shortcuts_of_a_program_are_traced_once(key, uniform):
    traces = []

    def statistic(x):
        traces.append(x.shape)
        return x

    oracle = dpjax.oracles.independent(jax.random.uniform)
    for again in (False, True):
        traces.clear()
        target = dpjax.targets.summable(statistic, average=True)
        dpjax.sample_sensitivity(key, target, oracle, n=9, norm="l1", gamma=0.1)
        assert len(traces) == (1 if again else 2)


@pytest.mark.parametrize("place", ["among the probes", "among the pairs"])
def test_an_interruption_starts_no_more_probes(key, monkeypatch, place):
    started = []
    chunk, waiting = _probes._ProbesOfSum._started, _loop.wait_for

    def probed(self, start):
        started.append(start)
        if place == "among the probes" and start == 100:
            raise KeyboardInterrupt
        return chunk(self, start)

    def waited(*arguments):
        if place == "among the pairs" and len(started) == 1:
            monkeypatch.setattr(_loop, "wait_for", waiting)
            raise KeyboardInterrupt
        return waiting(*arguments)

    monkeypatch.setattr(_probes._ProbesOfSum, "_started", probed)
    monkeypatch.setattr(_loop, "wait_for", waited)
    with pytest.raises(KeyboardInterrupt):
        dpjax.sample_sensitivity(
            key, MEAN, normal, n=20, norm="l1", m=2000, gamma=0.01, chunk_size=100
        )
    assert started == ([0, 100] if place == "among the probes" else [0])


def test_a_sum_is_probed_where_nothing_is_left_to_draw(key, tmp_path, monkeypatch):
    settings = {"n": 20, "norm": "l1", "m": 300, "gamma": 0.05}
    found = dpjax.sample_sensitivity(key, MEAN, normal, **settings, checkpoint=tmp_path / "run")
    monkeypatch.setattr(_probes, "permuted", lambda *_: jnp.float32(0.25))
    jax.clear_caches()
    again = dpjax.sample_sensitivity(key, MEAN, normal, **settings, checkpoint=tmp_path / "run")
    assert again.value == pytest.approx(found.value + 0.5, abs=0.01)
    jax.clear_caches()  # The program with another `permuted`.


def test_probes_are_looked_at_while_pairs_are_drawn(key, monkeypatch):
    order = []
    for module in (_probes, _loop):
        wait = module.wait_for

        def logged(*args, wait=wait, module=module):
            order.append(module)
            wait(*args)

        monkeypatch.setattr(module, "wait_for", logged)
    dpjax.sample_sensitivity(key, MEAN, pairs, n=20, norm="l1", m=200, gamma=0.2)
    assert order == [_probes, _loop]
