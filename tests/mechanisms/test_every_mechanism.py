"""What holds for every mechanism: strange values, bad parameters, and its event for accountants."""

import copy
import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import dpjax
from dpjax._tracing._shards import computing_now
from dpjax.mechanisms import additive
from dpjax.queries import top_k
from dpjax.random import LAPLACE
from tables import for_each

DELTA = 1e-5


def own(sensitivity, epsilon):
    """Laplace noise for two coordinates that may both move by the sensitivity."""
    return additive(sensitivity, epsilon, norm="linf", noise=LAPLACE, multiplier=lambda e, _: 2 / e)


def classical(sensitivity, epsilon):
    return dpjax.gaussian(sensitivity, epsilon, DELTA, calibration="classical")


# name: (factory of sensitivity and epsilon, a value)
MECHANISMS = {
    "laplace": (dpjax.laplace, jnp.asarray([0.5, -1.0])),
    "laplace, integers": (dpjax.laplace, jnp.asarray([3, -2])),
    "laplace, bfloat16": (dpjax.laplace, jnp.asarray([0.5, -1.0], "bfloat16")),
    "gaussian": (lambda s, e: dpjax.gaussian(s, e, DELTA), jnp.asarray([0.5, -1.0])),
    "gaussian, integers": (lambda s, e: dpjax.gaussian(s, e, DELTA), jnp.asarray([3, -2])),
    "classical gaussian": (classical, jnp.asarray([0.5, -1.0])),
    "exponential": (dpjax.exponential, jnp.asarray([1.0, 2.0, 0.0])),
    "exponential, integers": (dpjax.exponential, jnp.asarray([1, 2, 0])),
    "permute and flip": (dpjax.permute_and_flip, jnp.asarray([1.0, 2.0, 0.0])),
    "bernstein": (lambda s, e: dpjax.bernstein(s, e, degree=2, dims=1, order=2), jnp.zeros(3)),
    "one's own": (own, jnp.asarray([0.5, 1.0])),
}
RANDOMIZED_RESPONSE = (lambda _, e: dpjax.randomized_response(e, 3), jnp.asarray([2, 0, 1]))
EVERY = MECHANISMS | {"randomized response": RANDOMIZED_RESPONSE}
with_sensitivity = pytest.mark.parametrize("name", MECHANISMS)
every_mechanism = pytest.mark.parametrize("name", EVERY)
# Where each of them has to be compiled anew, other dtypes of the same mechanism take their time.
ONCE = ("laplace", "gaussian", "exponential", "bernstein", "randomized response")
compiled_mechanism = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONCE else pytest.mark.slow) for name in EVERY]
)


def is_floating(array):
    return jnp.issubdtype(array.dtype, jnp.floating)


def only_leaf(tree):
    (leaf,) = jax.tree.leaves(tree)
    return leaf


# Values: what the private database holds never decides whether or how a release happens.


def strange_values(value):
    if is_floating(value):
        limit = float(jnp.finfo(value.dtype).max)
        return [math.nan, math.inf, -math.inf, limit, -limit, 0.0]
    return [int(jnp.iinfo(value.dtype).max), int(jnp.iinfo(value.dtype).min), 0]


@every_mechanism
def test_strange_value_of_one_record_is_released_like_any_other(name, key):
    make, value = EVERY[name]
    mechanism = make(1.0, 1.0)
    ordinary = mechanism(key, value)
    for strange in strange_values(value):
        release = mechanism(key, value.at[0].set(strange))
        assert jax.tree.structure(release) == jax.tree.structure(ordinary)
        assert repr(release.guarantee) == repr(ordinary.guarantee)
        got, usual = only_leaf(release.value), only_leaf(ordinary.value)
        assert (got.dtype, got.shape) == (usual.dtype, usual.shape)
        assert np.all(np.isfinite(np.asarray(got, float)))
        if got.shape:  # The others' noise is the same, to the bit.
            np.testing.assert_array_equal(got[1:], usual[1:])


@pytest.mark.parametrize("name", ["laplace", "gaussian", "one's own", "bernstein"])
def test_nan_becomes_zero_and_infinity_a_public_bound(name, key):
    make, value = MECHANISMS[name]
    mechanism = make(1.0, 1.0)
    nan, zero, up, down, far = (
        only_leaf(mechanism(key, value.at[0].set(x)).value)[0]
        for x in (math.nan, 0.0, math.inf, -math.inf, 3e38)
    )
    assert nan == zero
    # 2^93 points of a grid that is at most 2^-16 of the sensitivity, and finer for the lattice.
    assert 2.0**72 < up == far == -down < 2.0**78


@pytest.mark.parametrize(
    "name", ["laplace, integers", pytest.param("gaussian, integers", marks=pytest.mark.slow)]
)
def test_noise_is_added_to_extreme_integers_too(name, draws):
    make, value = EVERY[name]
    for strange in strange_values(value):
        released = draws(make(1.0, 1.0), value.at[0].set(strange), 200)
        assert len(set(only_leaf(released)[:, 0].tolist())) >= 2


@compiled_mechanism
def test_log_prob_of_a_strange_value_is_no_nan(name, key):
    make, value = EVERY[name]
    mechanism = make(1.0, 1.0)
    output = mechanism(key, value).value
    log_prob = jax.jit(mechanism.log_prob)
    for strange in strange_values(value):
        assert not math.isnan(float(log_prob(output, value.at[0].set(strange))))


# Parameters.

BAD = [0.0, -1.0, math.nan, math.inf]


@with_sensitivity
def test_noise_in_floats_promises_nothing(name, key):
    """It cannot be mistaken for a private release, by a reader or by a program."""
    make, value = MECHANISMS[name]
    if name == "one's own":
        mechanism = additive(1.0, 1.0, norm="l1", noise=LAPLACE.in_floats())
    else:
        mechanism = FLOATS[name.split(",")[0]](1.0)
    release = mechanism(key, value)
    assert repr(release.guarantee) == "no guarantee, not private: noise in floats, seeded key"
    assert (release.guarantee.epsilon, release.guarantee.delta) == (math.inf, 1.0)
    composed = dpjax.accounting.compose(release.guarantee, make(1.0, 1.0).guarantee)
    assert composed.epsilon == math.inf
    assert "not private" in repr(composed)
    assert isinstance(mechanism.dp_event, dp_accounting.NonPrivateDpEvent)
    if name != "one's own":  # The same scale, without the charges.
        exact = float(make(1.0, 1.0).effective_scale())
        assert float(mechanism.effective_scale()) == pytest.approx(exact, rel=1e-3)


FLOATS = {
    "laplace": lambda e: dpjax.laplace(1.0, e, noise="float"),
    "gaussian": lambda e: dpjax.gaussian(1.0, e, DELTA, noise="float"),
    "classical gaussian": lambda e: dpjax.gaussian(
        1.0, e, DELTA, calibration="classical", noise="float"
    ),
    "exponential": lambda e: dpjax.exponential(1.0, e, noise="float"),
    "permute and flip": lambda e: dpjax.permute_and_flip(1.0, e, noise="float"),
    "bernstein": lambda e: dpjax.bernstein(1.0, e, degree=2, dims=1, order=2, noise="float"),
}


def test_noise_is_exact_or_float():
    with pytest.raises(ValueError, match=r"noise must be one of .* got 'fast'"):
        dpjax.laplace(1.0, 1.0, noise="fast")


@every_mechanism
@for_each("bad", [*BAD, -math.inf, 0, np.float32(-2), -3])
def test_bad_epsilon_raises_with_its_value(name, bad):
    with pytest.raises(ValueError, match=f"epsilon must be .* got {bad:g}"):
        EVERY[name][0](1.0, bad)


@with_sensitivity
@for_each("bad", BAD)
def test_bad_sensitivity_raises_with_its_value(name, bad):
    with pytest.raises(ValueError, match=f"sensitivity must be .* got {bad:g}"):
        MECHANISMS[name][0](bad, 1.0)


@pytest.mark.parametrize("calibration", ["analytic", "classical"])
@for_each("bad", [0.0, 1.0, -0.5, 2.0, math.nan, math.inf])
def test_bad_delta_raises_with_its_value(calibration, bad):
    with pytest.raises(ValueError, match=f"delta must be strictly between 0 and 1, got {bad:g}"):
        dpjax.gaussian(1.0, 1.0, bad, calibration=calibration)
    if bad != 0:
        with pytest.raises(ValueError, match="delta must be"):
            additive(1.0, 1.0, norm="l1", noise=LAPLACE, delta=bad)


NO_NUMBERS = ["1", None, True, np.bool_(True), np.ones(1), np.ones((2, 2)), [1.0], 1j]


@every_mechanism
@for_each("wrong", NO_NUMBERS)
def test_what_is_no_number_is_refused(name, wrong):
    make = EVERY[name][0]
    with pytest.raises(TypeError, match="epsilon must be a finite number above 0, got"):
        make(1.0, wrong)
    if name in MECHANISMS:
        with pytest.raises(TypeError, match="sensitivity must be a finite number above 0, got"):
            make(wrong, 1.0)


@for_each("wrong", NO_NUMBERS)
def test_delta_that_is_no_number_is_refused(wrong):
    with pytest.raises(TypeError, match="delta must be strictly between 0 and 1, got"):
        dpjax.gaussian(1.0, 1.0, wrong)
    with pytest.raises(TypeError, match="delta must be"):
        additive(1.0, 1.0, norm="l1", noise=LAPLACE, delta=wrong)


@every_mechanism
def test_numbers_of_any_kind_are_accepted(name):
    make = EVERY[name][0]
    kinds = [
        1,
        np.float32(1),
        np.float64(1),
        np.int64(1),
        np.ones(()),
        jnp.float32(1),
        jnp.ones(()),
    ]
    for one in kinds:
        made = make(one, one)
        assert made.epsilon == 1.0
        assert isinstance(made.epsilon, float)


@every_mechanism
def test_sensitivity_in_another_norm_is_refused(name):
    make, _ = EVERY[name]
    norm = make(1.0, 1.0).norm
    other = dpjax.assume_sensitivity(1.0, norm="l2" if norm != "l2" else "l1")
    if name in MECHANISMS:
        with pytest.raises(ValueError, match=f"sensitivity must be in the norm {norm}, got a sens"):
            make(other, 1.0)


def assert_closed(batch, lanes):
    """The bad lanes hold NaN, -1 or the least integer, and so does everything they promise."""
    for leaf in jax.tree.leaves(batch.value):
        bad = np.asarray(leaf)[lanes]
        if is_floating(leaf):
            assert np.all(np.isnan(bad.astype(float)))
        else:
            assert np.all((bad == -1) | (bad == np.iinfo(bad.dtype).min))
    guarantee = batch.guarantee
    for promised in (guarantee.epsilon, guarantee.delta, guarantee.gamma, guarantee.confidence):
        assert np.all(np.isnan(np.asarray(promised)[lanes]))


@compiled_mechanism
def test_bad_traced_parameter_is_never_released(name, key):
    make, value = EVERY[name]

    epsilons = jnp.asarray([0.9, *BAD, *[0.9] * len(BAD)])
    sensitivities = jnp.asarray([*[1.0] * (1 + len(BAD)), *BAD])
    batch = jax.jit(jax.vmap(lambda s, e: make(s, e)(key, value)))(sensitivities, epsilons)
    assert_closed(batch, slice(1, None) if name in MECHANISMS else slice(1, 1 + len(BAD)))
    # The good lane is released as if it were alone.
    alone = make(1.0, 0.9)(key, value)
    released, expected = (np.asarray(only_leaf(tree), float) for tree in (batch.value, alone.value))
    np.testing.assert_allclose(released[0], expected, rtol=1e-2, atol=0.03)
    assert float(batch.guarantee.epsilon[0]) == pytest.approx(0.9)
    assert batch.guarantee.confidence[0] == 1


def test_bad_traced_bound_is_never_released(key):
    def release(bound):
        return dpjax.laplace(dpjax.assume_sensitivity(bound, norm="l1"), 1.0)(key, 0.0)

    batch = jax.jit(jax.vmap(release))(jnp.asarray([*BAD, 2.0]))
    assert_closed(batch, slice(4))
    assert float(batch.value[4]) == pytest.approx(float(dpjax.laplace(2.0, 1.0)(key, 0.0).value))


@pytest.mark.parametrize("calibration", ["analytic", "classical"])
def test_bad_traced_delta_is_never_released(calibration, key):
    def release(delta):
        return dpjax.gaussian(1.0, 1.0, delta, calibration=calibration)(key, jnp.zeros(2))

    deltas = jnp.asarray([0.0, 1.0, math.nan, -1.0, math.inf, 1e-5])
    batch = jax.jit(jax.vmap(release))(deltas)
    assert_closed(batch, slice(5))
    assert np.all(np.isfinite(batch.value[5]))


@every_mechanism
def test_traced_parameters_must_be_scalars(name):
    with pytest.raises(ValueError, match=r"epsilon must be .* map over them by jax.vmap"):
        jax.jit(lambda e: EVERY[name][0](1.0, e).guarantee.epsilon)(jnp.ones(3))


@for_each("name", EVERY)
def test_a_batch_of_mechanisms_releases_nothing(name, key):
    """Its scales would be those of the coordinates of one value, one of them for each epsilon."""
    make, value = EVERY[name]
    batch = jax.vmap(lambda epsilon: make(1.0, epsilon))(jnp.linspace(0.5, 10.0, len(value)))
    private = dpjax.privatize(lambda database: database, batch)
    for release in (batch, batch.unpaid_draw, private, jax.jit(batch.unpaid_draw)):
        with pytest.raises(ValueError, match="must be a single mechanism, got a batch of shape"):
            release(key, value)


# Events for accountants.


def accountant_for(event):
    """Of the relation under which dp-accounting takes neighbors to be one sensitivity apart."""
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return PLDAccountant(relation)


@every_mechanism
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_event_costs_what_the_guarantee_says(name, epsilon):
    mechanism = EVERY[name][0](0.7, epsilon)
    accountant = accountant_for(mechanism.dp_event)
    accountant.compose(mechanism.dp_event)
    delta = float(mechanism.guarantee.delta)
    cost = accountant.get_epsilon(delta or 1e-9)
    # A mechanism that is only known to be epsilon-DP is charged as Laplace noise that dominates it.
    dominating = 2 * math.log((1 + math.exp(epsilon)) / 2)
    known = ("laplace", "gaussian", "bernstein", "randomized response")
    # 10^-4 is the accountant's own rounding.
    assert cost <= (epsilon if any(word in name for word in known) else dominating) + 1e-4
    if name != "classical gaussian":
        assert cost >= 0.98 * epsilon


def test_events_of_sensitivity_mechanisms_cost_their_epsilon_in_one_accountant():
    # Under REPLACE_SPECIAL an event of randomized response would be taken, at .62 for epsilon 1.
    for name, (make, _) in MECHANISMS.items():
        accountant, event = PLDAccountant(), make(1.0, 1.0).dp_event
        if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
            assert not accountant.supports(event), name
            continue
        accountant.compose(event)
        assert accountant.get_epsilon(DELTA) > 0.9 or name == "classical gaussian", name


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 3.0, 10.0])
def test_the_event_of_a_pure_mechanism_dominates_randomized_response(epsilon):
    event = dpjax.exponential(1.0, epsilon).dp_event
    t = np.linspace(0, epsilon, 1001)
    laplace = np.maximum(0, -np.expm1((t - 1 / event.noise_multiplier) / 2))
    randomized_response = (np.exp(epsilon) - np.exp(t)) / (1 + np.exp(epsilon))
    assert np.all(laplace >= randomized_response - 1e-12)
    assert laplace[0] == pytest.approx(randomized_response[0], rel=1e-9)  # Tight at t = 0.


@every_mechanism
def test_event_of_a_large_epsilon(name):
    if name != "classical gaussian":
        epsilon = 22.0 if name == "randomized response" else 1000.0
        assert isinstance(EVERY[name][0](1.0, epsilon).dp_event, dp_accounting.DpEvent)


@pytest.mark.parametrize("make", [dpjax.laplace, dpjax.exponential])
def test_event_without_noise(make):
    zero = dpjax.assume_sensitivity(0.0, norm=make(1.0, 1.0).norm, allow_zero=True)
    assert isinstance(make(zero, 1.0).dp_event, dp_accounting.DpEvent)


@pytest.mark.parametrize(
    "name",
    [
        "laplace",
        pytest.param("exponential", marks=pytest.mark.slow),
        pytest.param("bernstein", marks=pytest.mark.slow),
    ],
)
def test_values_without_keys_of_their_own_are_refused(name, key):
    """One draw for a batch of values would release their differences exactly."""
    make, value = MECHANISMS[name]
    mechanism = make(1.0, 1.0)
    batch = jnp.stack([value, value])
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(lambda x: mechanism(key, x).value)(batch)
    keys = jax.random.split(key, 2)
    released = only_leaf(jax.vmap(lambda key, x: mechanism(key, x).value)(keys, batch))
    again = only_leaf(jax.vmap(lambda key: mechanism(key, value).value)(keys))
    np.testing.assert_array_equal(released, again)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-320, 1e300, 1e-40])
def test_numbers_of_the_host_are_released_whatever_is_told_to_stop(value, key):
    mechanism = dpjax.laplace(1.0, 1.0)
    mean = dpjax.privatize(jnp.mean, mechanism)
    private = np.array([value, 1.0])
    with jax.debug_nans(True), jax.debug_infs(True), np.errstate(all="raise"):
        # First, because a program that is there already is not stopped.
        assert np.isfinite(np.asarray(mechanism.unpaid_draw(key, private))).all()
        assert np.isfinite(np.asarray(mechanism(key, private).value)).all()
        assert np.isfinite(float(mean(key, private).value))


@pytest.mark.slow
def test_releases_under_shard_map(run_python):
    run_python(
        """
import jax, jax.numpy as jnp, numpy as np, dpjax
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(dpjax.random.seeded_key(0), 4)
scores = jnp.array([0.0, 1.0, 3.0])
laplace, exponential = dpjax.laplace(1.0, 1.0), dpjax.exponential(1.0, 1.0)
draws = (
    lambda key: laplace(key, jnp.zeros(5)).value,
    lambda key: exponential(key, scores).value,
    lambda key: jax.random.bits(key, (300_000,))[-3:],
)
for draw in draws:
    alone = jax.vmap(draw)(keys)
    spread = jax.shard_map(jax.vmap(draw), mesh=mesh, in_specs=P("keys"), out_specs=P("keys"))
    np.testing.assert_array_equal(jax.jit(spread)(keys), alone)
""",
        devices=2,
    )


def test_the_first_release_may_be_in_a_shard_map_that_is_not_compiled():
    """There any operation makes shards, also one on public numbers alone."""
    mesh = jax.make_mesh((1,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
    mechanism = dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1"), 1.0)
    found = []

    def release(keys):
        with computing_now():
            assert not isinstance(jnp.ones(()) + 1, jax.core.Tracer)
        found.append(mechanism(keys[0], jnp.zeros(3)))
        return found[-1].value

    spec = jax.sharding.PartitionSpec("keys")
    keys = jax.random.split(dpjax.random.seeded_key(0), 1)
    value = jax.shard_map(release, mesh=mesh, in_specs=spec, out_specs=spec)(keys)
    alone = dpjax.laplace(dpjax.assume_sensitivity(1.0, norm="l1"), 1.0)(keys[0], jnp.zeros(3))
    np.testing.assert_array_equal(value, alone.value)
    assert found[0].accuracy.facts == alone.accuracy.facts


@compiled_mechanism
def test_another_parameter_compiles_nothing(name, key, compilations):
    """Not epsilon, the sensitivity, nor anything that says where the sensitivity comes from."""
    make, value = EVERY[name]
    norm = make(1.0, 1.0).norm
    analytic = dpjax.assume_sensitivity(1.0, norm=norm)
    sampled = dataclasses.replace(
        analytic, value=2.0, gamma=0.05, confidence=None, n=1000, m=900, k=871, identity="another"
    )
    make(analytic, 1.0)(key, value)
    release = []
    assert compilations(lambda: release.append(make(sampled, 0.3)(key, value).value)) == []
    jitted = jax.jit(lambda key, value: make(sampled, 0.3)(key, value).value)
    np.testing.assert_array_equal(only_leaf(release), only_leaf(jitted(key, value)))


# Parts of a mechanism belong together.


def smooth(_, epsilon):
    return dpjax.smooth_quantile(epsilon, DELTA, lower=0.0, upper=1.0)


def proposed(_, epsilon):
    return dpjax.propose_test_release(epsilon, DELTA, bound=0.5, lower=0.0, upper=1.0)


PARTS = EVERY | {
    "smooth quantile": (smooth, jnp.linspace(0, 1, 50)),
    "propose-test-release": (proposed, jnp.linspace(0, 1, 50)),
    "unary encoding": (lambda _, e: dpjax.unary_encoding(e, 3), jnp.asarray([2, 0, 1])),
    "above threshold": (
        lambda s, e: dpjax.above_threshold(s, e, threshold=0.0),
        jnp.asarray([-9.0, 9.0]),
    ),
    "top k": (lambda s, e: top_k(s, e, k=2), jnp.asarray([1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("part", ["epsilon", "sensitivity"])
def test_no_part_of_a_mechanism_is_replaced_without_the_noise(name, part, key):
    """`replace(laplace(1.0, 10.0), epsilon=0.1)` promised epsilon .1, with the noise of 10."""
    factory, value = PARTS[name]
    made = factory(1.0, 1.0)
    other = factory(1.0, 0.5) if part == "epsilon" else factory(50.0, 1.0)
    try:
        replaced = dataclasses.replace(made, **{part: getattr(other, part)})
    except TypeError as error:
        assert "by its factory function, and its fields cannot be replaced" in str(error)  # noqa: PT017
        return
    for one in jax.random.split(key, 5):
        drawn = (jax.tree.leaves(mechanism(one, value).value) for mechanism in (replaced, other))
        for x, y in zip(*drawn, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", PARTS)
def test_mechanisms_are_copied_whole(name, key):
    factory, value = PARTS[name]
    made = factory(1.0, 1.0)
    expected = jax.tree.leaves(made(key, value).value)
    for other in (copy.copy(made), copy.deepcopy(made)):
        found = jax.tree.leaves(other(key, value).value)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
