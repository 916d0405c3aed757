"""Noise of the steps of a training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import learning
from dpjax.learning._adaptive_clipping import gradient_noise_multiplier

SIZE = 4096


def linear(w, x):
    return jnp.dot(w["a"], x) + 0 * w["b"]


PARAMETERS = {"a": jnp.zeros(SIZE), "b": jnp.zeros(())}


def nothing(norm_bound=1.0):
    """A sum of no gradients."""
    return learning.ClippedSum(PARAMETERS, norm_bound, jnp.int32(0))


@pytest.fixture(scope="module")
def steps(keys):
    """Two steps of noise on nothing, and the states around them."""
    noise = learning.gaussian_noise(keys(1), noise_multiplier=2.0, batch_size=8)
    states, drawn = [noise.init(PARAMETERS)], []
    update = jax.jit(noise.update)
    for _ in range(2):
        gradient, state = update(nothing(3.0), states[-1])
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
    ).notes == ("seeded key",)


def test_ledgers_claim_the_key_of_a_training(tmp_path):
    noise = learning.gaussian_noise(dpjax.random.secure_key(), noise_multiplier=1.0, batch_size=4)
    with dpjax.random.KeyLedger(tmp_path / "keys"):
        noise.init(PARAMETERS)
        with pytest.raises(ValueError, match="key"):
            noise.init(PARAMETERS)


def test_no_step_goes_unpaid_while_a_budget_is_open(tmp_path, keys):
    """Compiled before or not: what all steps promise is charged at once, before them."""
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    state, update = noise.init(PARAMETERS), jax.jit(noise.update)
    clipped = learning.ClippedSum(PARAMETERS, jnp.float32(1.0), jnp.int32(0))
    update(clipped, state)
    with dpjax.Ledger(tmp_path / "budget", epsilon=1.0, delta=0.1) as ledger:
        for unpaid in (lambda: noise.init(PARAMETERS), lambda: update(clipped, state)):
            with pytest.raises(ValueError, match="pays for all of its steps at once"):
                unpaid()
        assert ledger.spent.epsilon == 0


def test_what_has_no_norm_bound_gets_no_noise(keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    for transformation in (noise, learning.with_privatizer(noise, batch_size=4)):
        with pytest.raises(TypeError, match="updates must be a ClippedSum"):
            transformation.update(PARAMETERS, transformation.init(PARAMETERS))


@pytest.mark.parametrize(
    "before",
    [
        optax.clip(0.01),
        optax.normalize_by_update_norm(),
        optax.scale(0.5),
        optax.stateless(lambda updates, _: jax.tree.map(lambda x: x.astype("bfloat16"), updates)),
    ],
    ids=["clip", "normalize", "scale", "cast"],
)
def test_what_was_transformed_has_no_norm_bound(before, keys):
    """Clipped to .01, d coordinates of a sum are within .01 sqrt(d), and the bound would be .01."""
    sums = learning.ClippedSum({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3))
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    chained = optax.chain(before, noise)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(TypeError, match="something has transformed them"),
    ):
        chained.update(sums, chained.init(sums.value), sums.value)


def test_sums_may_be_added_up(keys):
    """Such as those of several devices: the bounds add up as well."""
    one = learning.ClippedSum({"a": jnp.ones(3)}, jnp.float32(1), jnp.int32(3))
    both = jax.tree.map(jnp.add, one, one)
    assert float(both.norm_bound) == 2
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    state = noise.init(one.value)
    doubled = dataclasses.replace(both, value=one.value, norm_bound=jnp.float32(2))
    drawn, other = (noise.update(x, state)[0]["a"] for x in (both, doubled))
    np.testing.assert_allclose(drawn - other, 0.25, rtol=1e-5)


@pytest.mark.parametrize("norm_bound", [0.0, -1.0, np.nan, np.inf])
def test_a_bound_that_is_none_gives_nan(norm_bound, keys):
    noise = learning.gaussian_noise(keys(3), noise_multiplier=1.0, batch_size=4)
    small = {"a": jnp.zeros(3)}
    update = jax.jit(noise.update)
    gradient, _ = update(
        learning.ClippedSum(small, jnp.float32(norm_bound), jnp.int32(0)), noise.init(small)
    )
    assert np.all(np.isnan(gradient["a"]))


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
    sums = learning.ClippedSum({"a": jnp.zeros((2, 3))}, jnp.ones(2), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(noise.update, (0, None))(sums, state)
    each = dataclasses.replace(state, key=jax.random.split(state.key, 2))
    mapped = dataclasses.replace(state, key=0, step=None, noise_multiplier=None)
    drawn, _ = jax.jit(jax.vmap(noise.update, (0, mapped)))(sums, each)
    assert len(np.unique(drawn["a"])) == 6


@pytest.mark.parametrize("kind", ["exact", "float"])
def test_noise_multipliers_may_be_swept(kind, keys):
    """Each with a key; a bad one is NaN."""

    def drawn(key, multiplier):
        noise = learning.gaussian_noise(key, noise_multiplier=multiplier, batch_size=4, noise=kind)
        values = {"a": jnp.zeros(400)}
        sums = learning.ClippedSum(values, 1.0, jnp.int32(0))
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
        sums = learning.ClippedSum(values, 1.0, jnp.int32(0))
        return noise.update(sums, noise.init(values))[0]["a"]

    with pytest.raises(ValueError, match="key must be one for each value"):
        jax.vmap(drawn)(jnp.array([1.0, 2.0]))


def test_a_guarantee_is_that_of_the_least_noise(keys):
    """Whatever a state is told afterwards, and if other noise goes on with it."""
    sums = learning.ClippedSum({"a": jnp.zeros(3)}, 1.0, jnp.int32(0))
    little, much = (
        learning.gaussian_noise(keys(0), noise_multiplier=z, batch_size=4) for z in (1.1, 2.0)
    )
    _, state = little.update(sums, little.init(sums.value))
    _, state = much.update(sums, state)
    assert float(state.noise_multiplier) == pytest.approx(1.1, rel=1e-6)
    assert float(state.noise_multiplier) <= 1.1
    told = dataclasses.replace(much.init(sums.value), noise_multiplier=9.0)
    drawn, state = much.update(sums, told)
    assert float(state.noise_multiplier) == 2.0
    assert np.array_equal(drawn["a"], much.update(sums, much.init(sums.value))[0]["a"])


def test_a_state_of_another_training_is_refused(keys):
    sums = learning.ClippedSum({"a": jnp.zeros(3)}, 1.0, jnp.int32(0))
    settings = {"noise_multiplier": 1.0, "batch_size": 4}
    exact, floats = (
        learning.gaussian_noise(keys(0), noise=kind, **settings) for kind in ("exact", "float")
    )
    for state in (exact.init({"a": jnp.zeros(2)}), floats.init(sums.value)):
        with pytest.raises(ValueError, match="state must be of 3 coordinates and noise='exact'"):
            exact.update(sums, state)


def test_noise_in_floats_promises_nothing(keys):
    noise = learning.gaussian_noise(keys(0), noise_multiplier=1.0, batch_size=4, noise="float")
    sampling = learning.poisson_sampling(100, batch_size=4)
    state = dataclasses.replace(noise.init(PARAMETERS), step=jnp.int32(1))
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
    with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
        learning.guarantee(noise.init(PARAMETERS), sampling, delta=1e-5)
    with pytest.raises(ValueError, match="state must be that of one training"):
        learning.guarantee(jax.tree.map(lambda x: jnp.stack([x] * 2), state), sampling, delta=1e-5)
    with pytest.raises(TypeError, match="state must be that of gaussian_noise"):
        learning.guarantee((state,), sampling, delta=1e-5)


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
        batch = learning.ClippedSum({"a": jnp.zeros(1)}, 1.0, jnp.int32(20))
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
        batch = clipped(parameters, examples, clip_norm=state.clip_norm)
        return noise.update(batch, state)[1], state.clip_norm

    state, norms = jax.lax.scan(step, noise.init(parameters), length=200)
    assert norms[0] == 1
    assert 45 < np.mean(norms[100:]) < 55
    assert np.std(norms[100:]) > 0
    assert state.noise.coordinates == 2
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
    clipped = learning.ClippedSum(values, jnp.float32(4), jnp.int32(0))
    gradient, state = noise.update(clipped, state)
    assert seen[0].tolist() == [0.5, 1.0]
    assert gradient["a"].tolist() == [3.0, 4.0]
    assert state.inner == 1
    # Correlated noise is for one norm bound.
    gradient, _ = noise.update(dataclasses.replace(clipped, norm_bound=jnp.float32(5)), state)
    assert np.all(np.isnan(gradient["a"]))
