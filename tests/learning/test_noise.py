"""Noise of the steps of a training."""

import copy
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import learning
from dpjax.learning._clipping import sealed
from dpjax.learning._gaussian_noise import gradient_noise_multiplier
from dpjax.learning._sampling import Turn

SIZE = 4096


def linear(w, x):
    return jnp.dot(w["a"], x) + 0 * w["b"]


PARAMETERS = {"a": jnp.zeros(SIZE), "b": jnp.zeros(())}


def summed(value, norm_bound, within, slots=1):
    """A sum of gradients, without losses."""
    return sealed(value, norm_bound, within, jnp.zeros(slots), None, slots, 0, Turn())


def nothing(norm_bound=1.0):
    """A sum of no gradients."""
    return summed(PARAMETERS, norm_bound, jnp.int32(0), slots=1)


@pytest.fixture(scope="module")
def steps(keys):
    """Two steps of noise on nothing, and the states around them."""
    noise = learning.gaussian_noise(keys(1), noise_multiplier=2.0, batch_size=8)
    states, drawn = [noise.init(PARAMETERS)], []
    update = jax.jit(lambda state: noise.update(nothing(3.0), state))
    for _ in range(2):
        gradient, state = update(states[-1])
        drawn.append(np.concatenate([gradient["a"], gradient["b"][None]]))
        states.append(state)
    return drawn, states


def test_noise_has_the_scale_that_was_asked_for(steps):
    """The variance of 4097 normals is off by 5% with probability 2e-2 * 1e-1; by 12% with 1e-7."""
    for drawn in steps[0]:
        assert 0.88 < np.mean(drawn**2) / (2.0 * 3.0 / 8) ** 2 < 1.12


def test_no_step_and_no_parameter_shares_noise(steps):
    (first, second), _ = steps
    assert len(np.unique(np.concatenate([first, second]))) > 1.99 * SIZE
    # Correlations of independent noise are 5 / sqrt(4097) with probability 6e-7.
    for lag in (0, 1, 7):
        assert abs(np.corrcoef(first, np.roll(second, lag))[0, 1]) < 5 / np.sqrt(SIZE)


def test_every_step_has_a_key_of_its_own(steps):
    _, states = steps
    keys = {tuple(np.asarray(jax.random.key_data(state.key)).tolist()) for state in states}
    assert len(keys) == 3
    assert [int(state.step) for state in states] == [0, 1, 2]


def test_a_state_shows_no_key(steps):
    words = np.asarray(jax.random.key_data(steps[1][1].key))
    assert not any(str(word) in repr(steps[1][1]) for word in words)


def test_noise_covers_rounding_to_the_grid(steps):
    """All that is released lies on a grid, which is a power of two times 1 / 8 here."""
    (first, _), _ = steps
    spacing = np.min(np.abs(first[first != 0]))
    grid = 2.0 ** np.floor(np.log2(spacing))
    units = first.astype(np.float64) / grid
    # Fine enough to matter little, and much coarser than floats near 0 would be.
    assert np.array_equal(units * 2**10, np.round(units * 2**10))
    assert grid > 2.0**-40


def test_it_is_the_first_of_a_chain_and_compiles_once(keys, compilations):
    clipped = learning.clipped_gradients(linear, clip_norm=1.0)
    noise = learning.gaussian_noise(keys(2), noise_multiplier=1.0, batch_size=4)
    optimizer = optax.chain(noise, optax.adam(0.1))
    examples = jnp.ones((4, SIZE))

    @jax.jit
    def step(parameters, state, mask):
        batch = clipped(parameters, examples, mask)
        with jax.numpy_dtype_promotion("standard"):  # Of optax.
            updates, state = optimizer.update(batch, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters, state = step(PARAMETERS, optimizer.init(PARAMETERS), jnp.arange(4) < 3)
    masks = [jnp.arange(4) < i for i in range(3)]

    def more():
        for mask in masks:
            found = step(parameters, state, mask)
        return found

    assert compilations(more) == []
    assert learning.guarantee(
        state[0], learning.poisson_sampling(100, batch_size=4), delta=1e-5, method="renyi"
    ).notes == ("in 100 public slots", "seeded key")


def test_ledgers_claim_the_key_of_a_training(tmp_path):
    """All of its trainings have keys of their own; another optimizer of the key has the same."""
    key = dpjax.random.secure_key()
    one, other = (
        learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=4) for _ in range(2)
    )
    with dpjax.random.KeyLedger(tmp_path / "keys") as ledger:
        keys_of_trainings = [one.init(PARAMETERS).key for _ in range(2)]
        assert all(key in ledger for key in keys_of_trainings)
        assert len(ledger) == 2
        with pytest.raises(ValueError, match="was used for a release before"):
            other.init(PARAMETERS)


def test_no_step_goes_unpaid_while_a_budget_is_open(tmp_path, keys):
    """Compiled before or not: what all steps promise is charged at once, before them."""
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    state, update = noise.init(PARAMETERS), jax.jit(lambda state: noise.update(nothing(), state))
    update(state)
    with dpjax.Ledger(tmp_path / "budget", epsilon=1.0, delta=0.1) as ledger:
        for unpaid in (lambda: noise.init(PARAMETERS), lambda: update(state)):
            with pytest.raises(ValueError, match="pays for all of its steps at once"):
                unpaid()
        assert ledger.spent.epsilon == 0


def test_what_has_no_norm_bound_gets_no_noise(keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    for transformation in (noise, learning.with_privatizer(noise, batch_size=4)):
        with pytest.raises(TypeError, match="updates must be a ClippedSum"):
            transformation.update(PARAMETERS, transformation.init(PARAMETERS))


def cast(updates):
    return jax.tree.map(lambda x: x.astype("bfloat16"), updates)


def added(updates):
    return jax.tree.map(jnp.add, updates, updates)


@pytest.mark.parametrize(
    "before",
    [
        optax.clip(0.01),
        optax.clip(1),
        optax.scale(0.5),
        optax.scale(2),
        optax.scale_by_sign(),
        optax.normalize_by_update_norm(),
        optax.zero_nans(),
        optax.keep_params_nonnegative(),
        optax.masked(optax.clip(1), {"a": True}),
        optax.stateless(lambda updates, _: cast(updates)),
        optax.stateless(lambda updates, _: added(updates)),
        optax.stateless(lambda updates, _: dataclasses.replace(updates, norm_bound=0.1)),
        optax.stateless(lambda updates, _: learning.ClippedSum(updates.value, 0.1, jnp.int32(0))),
        optax.stateless(lambda updates, _: jax.jit(lambda x: x)(updates)),
    ],
    ids=[
        *("clip", "clip_integer", "scale", "scale_integer", "sign", "normalize", "nans"),
        *("nonnegative", "masked", "cast", "add", "replace", "make", "jit"),
    ],
)
def test_what_was_transformed_has_no_norm_bound(before, keys):
    """Clipped to .01, d coordinates of a sum are within .01 sqrt(d), and the bound would be .01.

    Everything that reaches the noise has the parts that left `clipped`: a sum cannot be taken
    apart, made anew, or be written to, so no dtype and no function of a transformation matters.
    """
    sums = summed({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3), slots=1)
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    chained = optax.chain(before, noise)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises((TypeError, ValueError), match="ClippedSum"),
    ):
        chained.update(sums, chained.init(sums.value), sums.value)


def test_what_passes_a_sum_on_is_allowed(keys):
    sums = summed({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3), slots=1)
    noise, same = (
        learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4) for _ in range(2)
    )
    chained = optax.chain(optax.identity(), noise)
    found, _ = chained.update(sums, chained.init(sums.value))
    np.testing.assert_array_equal(found["a"], same.update(sums, same.init(sums.value))[0]["a"])


def test_the_parts_of_a_sum_cannot_be_written_to():
    """A dictionary can, so `value` is another one each time."""
    sums = summed({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3), slots=1)
    sums.value["a"] = jnp.zeros(3)
    assert sums.value["a"].tolist() == [1, 1, 1]
    for name in ("norm_bound", "within", "_value"):
        with pytest.raises(AttributeError):
            setattr(sums, name, 0)


@pytest.mark.parametrize("kind", [learning.gaussian_noise, learning.adaptive_noise])
def test_steps_of_noise_are_accumulated_after_it(kind, keys):
    """Sums are of one batch each: two batches that were added up would need an account of both."""
    settings = {"initial_clip_norm": 1.0} if kind is learning.adaptive_noise else {}
    noise = kind(keys(3), noise_multiplier=1.0, batch_size=4, **settings)
    sums = summed({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3), slots=1)
    before = optax.MultiSteps(noise, 2)
    with pytest.raises(TypeError, match=r"use learning\.clipped_in_parts"):
        before.update(sums, before.init(sums.value), sums.value)
    after = optax.chain(noise, optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    state, moved = after.init(sums.value), []
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = after.update(sums, state, sums.value)
        moved.append(bool(jnp.any(updates["a"] != 0)))
    assert moved == [False, True]
    of_noise = state[0].noise if settings else state[0]
    assert int(of_noise.step) == 2


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.lion(0.1)], ids=["sgd", "lion"])
def test_a_sum_without_noise_says_to_add_it(optimizer):
    """Whatever an optimizer, or a step that was written by hand, computes with it first."""
    sums = summed(jnp.ones(3), jnp.float32(1), jnp.int32(3), slots=1)
    weights = jnp.ones(3)
    for used in (
        lambda: optimizer.update(sums, optimizer.init(weights), weights),
        lambda: optax.apply_updates(weights, sums),
        lambda: weights - 0.1 * sums,
        lambda: weights - sums,
        lambda: sums / 3,
        lambda: -sums,
        lambda: sum([sums, sums]),
    ):
        with pytest.raises(TypeError, match=r"Add learning\.gaussian_noise in front"):
            used()


def test_a_bound_that_is_none_gives_nan(keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    small = {"a": jnp.zeros(3)}

    @jax.jit
    def update(norm_bound, state):
        return noise.update(summed(small, norm_bound, jnp.int32(0), slots=1), state)[0]

    for norm_bound in (0.0, -1.0, np.nan, np.inf):
        released = update(np.float32(norm_bound), noise.init(small))["a"]
        assert np.all(np.isnan(released)), norm_bound
    assert np.all(np.isfinite(update(np.float32(1), noise.init(small))["a"]))


def test_keys_and_parameters_are_checked(keys):
    with pytest.raises(TypeError, match="chacha20"):
        learning.gaussian_noise(jax.random.key(0), noise_multiplier=1.0, batch_size=4)
    for bad in ({"noise_multiplier": 0.0}, {"batch_size": -1}, {"noise": "none"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            learning.gaussian_noise(keys(0), **{"noise_multiplier": 1.0, "batch_size": 4, **bad})
    with pytest.raises(ValueError, match="count_noise must be above noise_multiplier / 2"):
        learning.adaptive_noise(
            keys(0), noise_multiplier=1.0, batch_size=4, initial_clip_norm=1.0, count_noise=0.5
        )


def test_trainings_at_once_need_a_key_each(keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    state = noise.init({"a": jnp.zeros(3)})

    def update(x, state):
        return noise.update(summed({"a": x}, jnp.float32(1), jnp.int32(0), slots=1), state)

    values = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(update, (0, None))(values, state)
    each = dataclasses.replace(state, key=jax.random.split(state.key, 2))
    shared = dict.fromkeys(("step", "noise_multiplier", "drawn_by", "bins"))
    mapped = dataclasses.replace(state, key=0, **shared)
    drawn, _ = jax.jit(jax.vmap(update, (0, mapped)))(values, each)
    assert len(np.unique(drawn["a"])) == 6


def of_dot(x, noise, state):
    """A step for the sum of a fold of records."""
    return noise.update(CLIPPED(jnp.zeros(2), x, True), state)


CLIPPED = learning.clipped_gradients(jnp.dot, clip_norm=1.0)
FOLDS = jnp.arange(24.0).reshape(3, 4, 2) / 100


def closed_over(step, state):
    """Programs that run a step several times for different data, with one state from outside."""
    compiled = jax.jit(step)
    return {
        "map": lambda: jax.lax.map(lambda x: step(x, state), FOLDS),
        "map of jit": lambda: jax.lax.map(lambda x: compiled(x, state), FOLDS),
        "map of batches": lambda: jax.lax.map(lambda x: step(x, state), FOLDS, batch_size=2),
        "scan": lambda: jax.lax.scan(lambda c, x: (c, step(x, state)[0]), 0, FOLDS),
        "fori_loop": lambda: jax.lax.fori_loop(
            0, 3, lambda i, c: c + step(FOLDS[i], state)[0], jnp.zeros(2)
        ),
        "jit": lambda: jax.jit(lambda x: step(x, state))(FOLDS[0]),
        "jit of a carry": lambda: jax.jit(
            lambda x: jax.lax.scan(lambda s, x: step(x, s)[::-1], state, x)
        )(FOLDS),
        "vmap": lambda: jax.vmap(lambda x: step(x, state))(FOLDS),
        "vmap of jit": lambda: jax.vmap(lambda x: compiled(x, state))(FOLDS),
        "cond": lambda: jax.lax.cond(
            jnp.bool_(True), lambda: step(FOLDS[0], state)[0], lambda: jnp.zeros(2)
        ),
    }


@pytest.mark.parametrize("kind", ["gaussian", "adaptive", "other"])
def test_a_state_that_was_closed_over_is_refused(kind, keys):
    """Each run would draw the same noise: the difference of two folds has none.

    What else reaches it: a step that is compiled inside the loop, where the state looks like an
    argument, but is taken apart outside; a program that keeps the state as a constant and is called
    again; `jax.lax.cond`, which is refused without need. Not seen: a state that Python uses twice,
    and copies that `scan` takes one after the other (docs/security.md says so).
    """
    settings = {"noise_multiplier": 1.0, "batch_size": 1}
    noise = {
        "gaussian": lambda: learning.gaussian_noise(keys(3), **settings),
        "adaptive": lambda: learning.adaptive_noise(keys(3), initial_clip_norm=1.0, **settings),
        "other": lambda: learning.with_privatizer(optax.identity(), batch_size=1),
    }[kind]()
    state = noise.init(jnp.zeros(2))
    for run in closed_over(lambda x, state: of_dot(x, noise, state), state).values():
        with pytest.raises(ValueError, match="state must enter this function as an argument"):
            run()


def test_a_state_may_be_carried_copied_and_passed_on(keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=1)
    state = copy.deepcopy(noise.init(jnp.zeros(2)))

    @jax.jit
    def train(state):
        state, drawn = jax.lax.scan(lambda s, x: of_dot(x, noise, s)[::-1], state, FOLDS)
        return drawn, jax.lax.cond(
            jnp.bool_(True), lambda s: of_dot(FOLDS[0], noise, s)[1], lambda s: s, state
        )

    drawn, state = train(state)
    assert len(np.unique(drawn)) == 6
    assert int(state.step) == 4


def test_copies_of_a_state_in_lanes_draw_noise_of_their_own(keys):
    """Stacked for folds, for clip norms, or for learning rates; also where `vmap` is nested.

    The first copy draws what it draws alone, and what follows stays apart.
    """
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=1)
    state = noise.init(jnp.zeros(2))
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.stack([x] * 3)] * 2), state)
    folds = jnp.stack([FOLDS] * 2)
    step = jax.jit(jax.vmap(jax.vmap(lambda x, state: of_dot(x, noise, state))))
    drawn, after = step(folds, stacked)
    of_noise = np.asarray(drawn - jnp.sum(folds, axis=2))
    assert len(np.unique(np.round(of_noise, 3))) == 12
    np.testing.assert_array_equal(drawn[0, 0], of_dot(FOLDS[0], noise, state)[0])
    words = np.asarray(jax.random.key_data(after.key)).reshape(6, -1)
    assert len(np.unique(words, axis=0)) == 6


def test_a_key_that_a_program_would_keep_is_refused(keys):
    """Every call of the compiled training would draw the same noise."""
    key = keys(3)

    @jax.jit
    def train(x):
        noise = learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=1)
        return of_dot(x, noise, noise.init(jnp.zeros(2)))[0]

    with pytest.raises(ValueError, match="key must be an argument of the compiled function"):
        train(FOLDS[0])


def test_one_state_of_a_privatizer_is_not_for_many_sums():
    """Its key is its own, so `vmap` over sums alone is refused; also if the state has no arrays."""
    counter = optax.GradientTransformation(lambda _: jnp.int32(0), lambda u, s, p=None: (u, s + 1))
    for other in (counter, optax.identity()):
        noise = learning.with_privatizer(other, batch_size=1)
        state = noise.init(jnp.zeros(2))
        with pytest.raises(ValueError, match="maps over sums but not over states"):
            jax.vmap(lambda x, state: of_dot(x, noise, state), (0, None))(FOLDS, state)  # noqa: B023


def test_states_of_a_privatizer_are_mapped_over_together_with_sums():
    """A bound that is not mapped over, as at first, has no lanes."""
    counter = optax.GradientTransformation(
        lambda _: jnp.float32(0), lambda u, s, p=None: (u + s, s + 1)
    )
    noise = learning.with_privatizer(counter, batch_size=1)
    first = noise.init(jnp.zeros(2))
    states = [dataclasses.replace(first, inner=jnp.float32(i)) for i in range(len(FOLDS))]
    alone = [of_dot(x, noise, state)[0] for x, state in zip(FOLDS, states, strict=True)]
    assert len(np.unique(alone)) > len(FOLDS)
    inner = jnp.arange(len(FOLDS), dtype=jnp.float32)
    lanes = dataclasses.replace(first, inner=inner)
    axes = 0, dataclasses.replace(first, inner=0, norm_bound=None)
    found, after = jax.vmap(lambda x, state: of_dot(x, noise, state), axes)(FOLDS, lanes)
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert np.all(after.norm_bound > 0)


def test_the_division_of_a_sum_by_its_bound_is_charged():
    """Rounding moves quotients of long sums by more than 1: by 1.01, if it is not charged.

    What else reaches it: bounds in float64 for sums in float32, and long sums of many coordinates.
    """
    seen = []
    other = optax.stateless(lambda updates, _: seen.append(updates) or updates)
    noise = learning.with_privatizer(other, batch_size=1)
    state = noise.init(jnp.zeros((1000, 3)))
    bound, slots = 3.0, 2**20
    one = 1e6 + jnp.arange(3000, dtype=jnp.float32).reshape(1000, 3)
    other = one + jnp.array([[1.0, 2.0, 2.0]], jnp.float32)
    for value in (one, other):
        noise.update(summed(value, bound, jnp.int32(0), slots=slots), state)
    naive, charged = (
        np.max(np.linalg.norm(np.subtract(x, y, dtype=np.float64), axis=1))
        for x, y in ((one / bound, other / bound), seen)
    )
    assert naive > 1.01
    assert charged <= 1


@pytest.mark.parametrize("kind", ["exact", "float"])
def test_noise_multipliers_may_be_swept(kind, keys):
    """Each with a key; a bad one is NaN."""

    def drawn(key, multiplier):
        noise = learning.gaussian_noise(key, noise_multiplier=multiplier, batch_size=4, noise=kind)
        values = {"a": jnp.zeros(400)}
        sums = summed(values, 1.0, jnp.int32(0), slots=1)
        return noise.update(sums, noise.init(values))[0]["a"]

    swept = jax.jit(jax.vmap(drawn))(jax.random.split(keys(7), 3), jnp.array([1.0, 100.0, -1.0]))
    # 400 normals: off by a quarter with probability 1e-12.
    assert np.std(swept[0]) == pytest.approx(1 / 4, rel=0.25)
    assert np.std(swept[1]) == pytest.approx(100 / 4, rel=0.25)
    assert np.all(np.isnan(swept[2]))


@pytest.mark.parametrize("kind", ["exact", "float"])
def test_one_key_for_several_multipliers_is_refused(kind, keys):
    """The same draw at two scales gives the sum away."""

    def drawn(multiplier):
        noise = learning.gaussian_noise(
            keys(7), noise_multiplier=multiplier, batch_size=4, noise=kind
        )
        values = {"a": jnp.zeros(400)}
        sums = summed(values, 1.0, jnp.int32(0), slots=1)
        return noise.update(sums, noise.init(values))[0]["a"]

    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(drawn)(jnp.array([1.0, 2.0]))


def test_a_guarantee_is_that_of_the_least_noise(keys):
    """Whatever a state is told afterwards, and if other noise goes on with it."""
    sums = summed({"a": jnp.zeros(3)}, 1.0, jnp.int32(0), slots=1)
    little, much = (
        learning.gaussian_noise(keys(0), noise_multiplier=z, batch_size=4) for z in (1.1, 2.0)
    )
    _, state = little.update(sums, little.init(sums.value))
    _, state = much.update(sums, state)
    assert float(state.noise_multiplier) == pytest.approx(1.1, rel=1e-6)
    assert float(state.noise_multiplier) <= 1.1
    start = much.init(sums.value)
    told = dataclasses.replace(start, noise_multiplier=9.0)
    drawn, state = much.update(sums, told)
    assert float(state.noise_multiplier) == 2.0
    assert np.array_equal(drawn["a"], much.update(sums, start)[0]["a"])


def test_a_state_of_another_training_is_refused(keys):
    sums = summed({"a": jnp.zeros(3)}, 1.0, jnp.int32(0), slots=1)
    settings = {"noise_multiplier": 1.0, "batch_size": 4}
    exact, floats = (
        learning.gaussian_noise(keys(0), noise=kind, **settings) for kind in ("exact", "float")
    )
    for state in (exact.init({"a": jnp.zeros(2)}), floats.init(sums.value)):
        with pytest.raises(ValueError, match="state must have dims=3 and noise='exact'"):
            exact.update(sums, state)


def test_noise_in_floats_promises_nothing(keys):
    noise = learning.gaussian_noise(keys(0), noise_multiplier=1.0, batch_size=4, noise="float")
    sampling = learning.poisson_sampling(100, batch_size=4)
    state = dataclasses.replace(noise.init(PARAMETERS), step=jnp.int32(1))
    found = learning.guarantee(state, sampling, delta=1e-5)
    assert found.epsilon == np.inf
    assert found.notes == ("not private: noise in floats",)


def test_a_checkpoint_of_noise_in_floats_promises_nothing_in_an_exact_state(keys):
    """A file holds arrays alone, and the exact state says of itself that its noise is exact."""
    sums = summed({"a": jnp.zeros(3)}, 1.0, jnp.int32(0), slots=1)
    exact, floats = (
        learning.gaussian_noise(keys(0), noise_multiplier=1.0, batch_size=4, noise=kind)
        for kind in ("exact", "float")
    )
    _, stepped = floats.update(sums, floats.init(sums.value))
    empty = exact.init(sums.value)
    loaded = jax.tree.unflatten(jax.tree.structure(empty), jax.tree.leaves(stepped))
    _, resumed = exact.update(sums, loaded)
    sampling = learning.poisson_sampling(100, batch_size=4)
    for state in (loaded, resumed):
        found = learning.guarantee(state, sampling, delta=1e-5)
        assert found.epsilon == np.inf
        assert found.notes == ("not private: noise in floats",)


def test_a_guarantee_is_that_of_the_steps_taken(keys):
    noise = learning.gaussian_noise(keys(0), noise_multiplier=1.1, batch_size=4)
    sampling = learning.poisson_sampling(100, batch_size=4)
    state = dataclasses.replace(noise.init(PARAMETERS), step=jnp.int32(7))
    found = learning.guarantee(state, sampling, delta=1e-5, method="renyi")
    expected = dpjax.accounting.dp_sgd(
        sampling, noise_multiplier=1.1, steps=7, delta=1e-5, dims=SIZE + 1, method="renyi"
    )
    assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-6)
    adaptive = learning.adaptive_noise(
        keys(0), noise_multiplier=1.1, batch_size=4, initial_clip_norm=1.0
    )
    for untaken in (noise.init(PARAMETERS), adaptive.init(PARAMETERS)):
        with pytest.raises(ValueError, match="after the last step, got that of init"):
            learning.guarantee(untaken, sampling, delta=1e-5)
    with pytest.raises(ValueError, match="state must be the state of one training"):
        learning.guarantee(jax.tree.map(lambda x: jnp.stack([x] * 2), state), sampling, delta=1e-5)
    with pytest.raises(TypeError, match="state must be a state of gaussian_noise"):
        learning.guarantee((state,), sampling, delta=1e-5)


def trained(batches, *, adaptive=False):
    """The state after a step with each batch of ten records."""
    settings = {"noise_multiplier": 1.0, "batch_size": 10}
    key = dpjax.random.secure_key()
    noise = learning.gaussian_noise(key, **settings)
    if adaptive:
        noise = learning.adaptive_noise(key, initial_clip_norm=1.0, **settings)
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    state = noise.init(jnp.zeros(2))
    for batch in batches:
        slots = 10 if batch is True else batch.capacity
        _, state = noise.update(clipped(jnp.zeros(2), jnp.ones((slots, 2)), batch), state)
    return state


SMALL = learning.poisson_sampling(1000, batch_size=10, capacity=40)
OTHERS = {
    "larger": learning.poisson_sampling(1000, batch_size=39, capacity=40),
    "of fewer records": learning.poisson_sampling(500, batch_size=5, capacity=40),
    "cut off": learning.poisson_sampling(1000, batch_size=10, capacity=39),
    "of a fixed size": learning.fixed_size_sampling(1000, batch_size=10),
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_batches_of_another_sampling_are_not_accounted_for(name, adaptive):
    """40 batches of 900 records of 1000 counted as 10 of them: epsilon .58, where it was 41."""
    small, other, own = SMALL, OTHERS[name], True
    drawn, different = (x(dpjax.random.secure_key()) for x in (small, other))
    seeded = small(dpjax.random.seeded_key(0))
    for batches in (
        [different],
        [different, drawn],
        [drawn, different],
        [drawn, different, drawn],
        [own, drawn],
        [drawn, own],
        [drawn, seeded],
    ):
        state = trained(batches, adaptive=adaptive)
        with pytest.raises(ValueError, match="sampling must be the sampling that drew"):
            learning.guarantee(state, small, delta=1e-5, method="renyi")


def test_batches_of_the_sampling_are_accounted_for():
    account = functools.partial(learning.guarantee, delta=1e-5, method="renyi")
    secret, seeded = (
        [SMALL(key) for key in jax.random.split(key, 3)]
        for key in (dpjax.random.secure_key(), dpjax.random.seeded_key(0))
    )
    again = dataclasses.replace(SMALL)  # The same settings in another object.
    found = account(trained(secret), again)
    assert found.notes == ("in 1000 public slots",)
    assert found.epsilon == account(trained([True] * 3), SMALL).epsilon
    assert account(trained(seeded), SMALL).notes == ("in 1000 public slots", "seeded key")


def test_what_drew_the_batches_stays_known_in_loops_and_parts():
    noise = learning.gaussian_noise(dpjax.random.secure_key(), noise_multiplier=1.0, batch_size=10)
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)

    @jax.jit
    def train(keys, state):
        def step(state, key):
            batch = SMALL(key)
            total = clipped(jnp.zeros(2), jnp.ones((batch.capacity, 2)), batch)
            return noise.update(total, state)[::-1]

        return jax.lax.scan(step, state, keys)[0]

    state = train(jax.random.split(dpjax.random.secure_key(), 3), noise.init(jnp.zeros(2)))
    in_parts = learning.clipped_in_parts(
        dpjax.random.secure_key(),
        clipped,
        jnp.zeros(2),
        sampling=SMALL,
        examples=lambda indices: jnp.ones((len(indices), 2)),
        parts=3,
    )
    assert in_parts.drawn_by == SMALL(dpjax.random.secure_key()).drawn_by
    _, state = noise.update(in_parts, state)
    assert learning.guarantee(state, SMALL, delta=1e-5, method="renyi").epsilon > 0
    with pytest.raises(ValueError, match="sampling must be the sampling that drew"):
        learning.guarantee(state, OTHERS["larger"], delta=1e-5, method="renyi")


def test_a_state_in_half_precision_is_refused():
    """The cast may round the noise multiplier up."""
    noise = learning.gaussian_noise(dpjax.random.secure_key(), noise_multiplier=1.1, batch_size=4)
    _, state = noise.update(nothing(), noise.init(PARAMETERS))
    for dtype in ("bfloat16", "float16"):
        short = dataclasses.replace(state, noise_multiplier=state.noise_multiplier.astype(dtype))
        with pytest.raises(ValueError, match="float32 or a wider dtype"):
            noise.update(nothing(), short)
        with pytest.raises(ValueError, match="float32 or a wider dtype"):
            learning.guarantee(short, SMALL, delta=1e-5, method="renyi")


def test_the_count_is_paid_for():
    """The two Gaussians, at sensitivities 1 and 1/2, are one of noise multiplier z."""
    for z, count_noise in ((1.0, 2.0), (0.6, 10.0), (4.0, 2.5)):
        gradients = gradient_noise_multiplier(z, count_noise)
        assert gradients**-2 + (2 * count_noise) ** -2 == pytest.approx(z**-2)
        assert gradients > z


def test_the_count_gets_noise_of_its_scale(keys):
    """The variance of 600 normals is off by 30% with probability 2e-7; at half the scale by 75%."""
    noise = learning.adaptive_noise(
        keys(5),
        noise_multiplier=1.0,
        batch_size=100,
        initial_clip_norm=1.0,
        learning_rate=1.0,
        count_noise=4.0,
    )
    start = noise.init({"a": jnp.zeros(1)})

    def norm(key):
        state = dataclasses.replace(start, noise=dataclasses.replace(start.noise, key=key))
        batch = summed({"a": jnp.zeros(1)}, 1.0, jnp.int32(20), slots=1)
        return noise.update(batch, state)[1].clip_norm

    norms = jax.jit(jax.vmap(norm))(jax.random.split(keys(6), 600))
    fractions = 0.5 - np.log(norms)
    assert np.mean(fractions) == pytest.approx(0.6, abs=5 * 0.04 / np.sqrt(600))
    assert 0.7 < np.var(fractions) / 0.04**2 < 1.3


def test_a_clip_norm_moves_to_the_quantile(keys):
    """Norms are 1, 2, ..., 200; the noise of the count is 3, the step .3."""

    def loss(w, x):
        return w * x

    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    noise = learning.adaptive_noise(
        keys(4),
        noise_multiplier=1.0,
        batch_size=200,
        initial_clip_norm=1.0,
        quantile=0.25,
        learning_rate=0.3,
        count_noise=3.0,
    )
    parameters, examples = jnp.float32(0), jnp.arange(1.0, 201.0, dtype=jnp.float32)

    @jax.jit
    def step(state, _):
        batch = clipped(parameters, examples, True, clip_norm=state.clip_norm)
        return noise.update(batch, state)[1], state.clip_norm

    state, norms = jax.lax.scan(step, noise.init(parameters), length=200)
    assert norms[0] == 1
    assert 45 < np.mean(norms[100:]) < 55
    assert np.std(norms[100:]) > 0
    assert state.noise.dims == 2
    assert int(state.noise.step) == 200


def test_noise_of_others_is_for_vectors_of_norm_one():
    """What the privatizer sees is the sum over its norm bound, and its state goes on."""
    seen = []

    def update(updates, state, params=None):
        seen.append(updates["a"])
        return jax.tree.map(lambda x: x + 1, updates), state + 1

    other = optax.GradientTransformation(lambda parameters: 0, update)
    noise = learning.with_privatizer(other, batch_size=2)
    values = {"a": jnp.array([2.0, 4.0])}
    state = noise.init(values)
    clipped = summed(values, jnp.float32(4), jnp.int32(0), slots=1)
    gradient, state = noise.update(clipped, state)
    np.testing.assert_allclose(seen[0], [0.5, 1.0], rtol=1e-5)
    np.testing.assert_allclose(gradient["a"], [3.0, 4.0], rtol=1e-5)
    assert state.inner == 1
    # Correlated noise is for one norm bound.
    gradient, _ = noise.update(summed(values, jnp.float32(5), jnp.int32(0), slots=1), state)
    assert np.all(np.isnan(gradient["a"]))


def two_bits(state):
    return np.asarray(jax.random.bits(state.key, (2,))).tolist()


def test_one_key_is_for_one_training(keys):
    """Folds and restarts: every `init` has a key, and the first the one that was given.

    What else calls it: the two halves of a `multi_transform`, and a copy of the optimizer, which
    share its count. Two optimizers that were given one seeded key are the caller's: a `KeyLedger`
    and `jax.debug_key_reuse` see them. A state that is put back goes on with its key (security.md).
    """
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    copied = copy.deepcopy(optax.chain(noise, optax.sgd(1.0)))
    both = optax.multi_transform({"x": noise, "y": noise}, {"a": "x", "b": "y"})
    inner = both.init(PARAMETERS).inner_states
    states = [
        *(inner[name].inner_state for name in "xy"),
        noise.init(PARAMETERS),
        copied.init(PARAMETERS)[0],
    ]
    assert len({tuple(two_bits(state)) for state in states}) == 4
    assert np.array_equal(jax.random.key_data(states[0].key), jax.random.key_data(keys(3)))
    again = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    assert [two_bits(again.init(PARAMETERS)) for _ in range(4)] == [two_bits(x) for x in states]


def made_again(key):
    return lambda: learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=4)


def injected(key):
    made = optax.inject_hyperparams(learning.gaussian_noise)
    return lambda: made(key, noise_multiplier=1.0, batch_size=4)


@pytest.mark.parametrize("make", [made_again, injected])
def test_optimizers_of_one_secret_key_share_no_training(make):
    """`inject_hyperparams` makes the optimizer anew in each call of `init`, and so may a fold.

    What else makes one anew: `inject_stateful_hyperparams`, and every function that returns an
    optimizer. Inside of `jit` the key is not known to the count, nor is it in another process.
    """
    make = make(dpjax.random.secure_key())
    noise = make()
    states = [noise.init(PARAMETERS), noise.init(PARAMETERS), make().init(PARAMETERS)]
    states = [getattr(state, "inner_state", state) for state in states]
    assert len({tuple(two_bits(state)) for state in states}) == 3
    jax.jit(lambda state: noise.update(nothing(), state))(noise.init(PARAMETERS))


def test_the_adaptive_noise_of_two_trainings_differs(keys):
    noise = learning.adaptive_noise(
        keys(3), noise_multiplier=1.0, batch_size=4, initial_clip_norm=1.0
    )
    one, other = (noise.init(PARAMETERS).noise for _ in range(2))
    assert two_bits(one) != two_bits(other)


MAPS = {
    "vmap": lambda init: jax.vmap(init)(jnp.zeros((2, 3))),
    "vmap over nothing of it": lambda init: jax.vmap(lambda _: init(jnp.zeros(3)))(jnp.zeros(2)),
    "jit": lambda init: jax.jit(init)(jnp.zeros(3)),
    "vmap of jit": lambda init: jax.vmap(jax.jit(init))(jnp.zeros((2, 3))),
    "scan": lambda init: jax.lax.scan(lambda c, _: (c, init(c)), jnp.zeros(3), length=2),
    "scan in jit": lambda init: jax.jit(lambda: MAPS["scan"](init))(),
    "map": lambda init: jax.lax.map(init, jnp.zeros((2, 3))),
    "eval_shape": lambda init: jax.eval_shape(init, jnp.zeros(3)),
}


@pytest.mark.parametrize("mapped", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("made", ["gaussian", "adaptive", "chained", "other"])
def test_init_runs_where_the_optimizer_was_made(mapped, made, keys):
    """One call would serve many trainings; `eval_shape` looks like a program to be run twice."""
    settings = {"noise_multiplier": 1.0, "batch_size": 4}
    noise = learning.gaussian_noise(keys(3), **settings)
    optimizer = {
        "gaussian": noise,
        "adaptive": learning.adaptive_noise(keys(3), initial_clip_norm=1.0, **settings),
        "chained": optax.chain(noise, optax.adam(0.1)),
        "other": learning.with_privatizer(optax.identity(), batch_size=4),
    }[made]
    with pytest.raises(ValueError, match="init must run where the optimizer was made"):
        mapped(optimizer.init)


def test_a_key_from_outside_of_a_vmap_is_refused(keys):
    """An optimizer that is made inside, of a key that is one for all."""

    def init(parameters):
        noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
        return noise.init(parameters)

    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(init)(jnp.zeros((2, 3)))


def test_optimizers_that_are_made_inside_of_a_program_have_its_keys(keys):
    def first_noise(key):
        noise = learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=4)
        both = [noise.init(jnp.zeros(())) for _ in range(2)]
        clipped = learning.clipped_gradients(jnp.multiply, clip_norm=1.0)
        sums = clipped(jnp.zeros(()), jnp.zeros(2), True)
        return [noise.update(sums, state)[0] for state in both]

    drawn = jax.jit(jax.vmap(first_noise))(jax.random.split(keys(3), 3))
    assert len(np.unique(drawn)) == 6


def test_an_optimizer_with_noise_stays_in_its_process(keys, monkeypatch):
    """Pickled or forked it would draw the same noise in each, whatever is counted here."""
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pytest.importorskip("cloudpickle").dumps(noise)
    forked = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: forked)
    with pytest.raises(ValueError, match="got another process"):
        noise.init(PARAMETERS)


def test_a_privatizer_of_others_is_for_one_training():
    noise = learning.with_privatizer(optax.identity(), batch_size=4)
    noise.init(PARAMETERS)
    with pytest.raises(ValueError, match="init may be called only once for each privatizer"):
        noise.init(PARAMETERS)
