"""Models of Equinox, Flax NNX and Flax Linen as targets: taken apart, and put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax

pytestmark = [
    pytest.mark.slow,  # They come with the extra `frameworks`, which only slow tests install.
    pytest.mark.filterwarnings("default"),  # Theirs are not ours to fix.
]

FEATURES, HIDDEN, N = 3, 4, 30


def plain(key):
    """Two layers as a dict of arrays."""
    first, second = jax.random.split(key)
    start = {
        "first": {"w": jax.random.normal(first, (FEATURES, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "second": jax.random.normal(second, (HIDDEN,)),
    }

    def score(parameters, x):
        return (
            jnp.tanh(x @ parameters["first"]["w"] + parameters["first"]["b"]) @ parameters["second"]
        )

    return start, score, lambda parameters: lambda x: score(parameters, x)


def of_equinox(key):
    import equinox as eqx

    model = eqx.nn.MLP(FEATURES, "scalar", HIDDEN, depth=1, key=key)
    start, rest = eqx.partition(model, eqx.is_inexact_array)

    def score(parameters, x):
        return eqx.combine(parameters, rest)(x)

    return start, score, lambda parameters: eqx.combine(parameters, rest)


def of_nnx(key):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
            self.second = nnx.Linear(HIDDEN, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))[..., 0]

    definition, start = nnx.split(Model(nnx.Rngs(jax.random.key(0))), nnx.Param)

    def score(parameters, x):
        return nnx.merge(definition, parameters)(x)

    return start, score, lambda parameters: nnx.merge(definition, parameters)


def of_linen(key):
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(jnp.tanh(linen.Dense(HIDDEN)(x)))[..., 0]

    model = Model()
    start = model.init(key, jnp.zeros(FEATURES))

    return start, model.apply, lambda parameters: model.bind(parameters)


MODELS = {"plain": plain, "equinox": of_equinox, "nnx": of_nnx, "linen": of_linen}


def people(key, n):
    x = jax.random.normal(key, (n, FEATURES))
    return {"x": x, "y": jnp.sign(x[:, 0] - x[:, 1])}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_sampled_released_and_put_together(name):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        start, score, together = MODELS[name](jax.random.key(1))

        def loss(parameters, records):
            scores = jax.vmap(score, in_axes=(None, 0))(parameters, records["x"])
            return jnp.mean(jax.nn.softplus(-records["y"] * scores))

        train = dpjax.targets.optax_training(loss, start, optax.adam(0.1), steps=30)
        key, key_data, key_release = jax.random.split(dpjax.random.seeded_key(3), 3)
        sensitivity = dpjax.sample_sensitivity(key, train, people, n=N, norm="l1", m=50)
        # Hardly any noise, so that what is released can be compared.
        mechanism = dpjax.laplace(sensitivity, 1e6)
        database = people(key_data, N)
        release = dpjax.privatize(train, mechanism)(key_release, database)
        assert jax.tree.structure(release.value) == jax.tree.structure(start)
        model, trained = together(release.value), train(database)
        for x in np.asarray(database["x"]):
            assert abs(float(model(x)) - float(score(trained, x))) < 0.01
        assert (
            np.mean([np.sign(model(x)) == y for x, y in zip(*database.values(), strict=True)]) > 0.9
        )
