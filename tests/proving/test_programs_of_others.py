"""Programs of other libraries: no pair of neighbors lies further apart than was proved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
import random_programs as programs


def log_likelihoods():
    """Sums of NumPyro's log densities of the records, as of a posterior."""
    dist = pytest.importorskip("numpyro.distributions")
    means = jnp.linspace(-1, 1, 5)
    mixture = dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.5, 0.5])), dist.Normal(jnp.array([-1.0, 1.0]), 1.0)
    )
    return {
        "normal at five means": lambda v: jax.vmap(
            lambda mean: dist.Normal(mean, 1.0).log_prob(v).sum()
        )(means),
        "cauchy": lambda v: dist.Cauchy(0.0, 1.0).log_prob(v).sum(),
        "laplace": lambda v: dist.Laplace(0.0, 1.0).log_prob(v).sum(0),
        "logistic": lambda v: dist.Logistic(0.0, 1.0).log_prob(v).sum(),
        "gumbel": lambda v: dist.Gumbel(0.0, 1.0).log_prob(v).sum(0),
        "log-normal": lambda v: dist.LogNormal(0.0, 1.0).log_prob(v + 1.5).sum(),
        "mixture": lambda v: mixture.log_prob(v[:, 0]).sum(),
    }


def layers():
    """Equinox layers with public weights, applied to each record."""
    nn = pytest.importorskip("equinox").nn
    key = jax.random.key(0)
    mlp = nn.MLP(programs.DIMS, 2, 8, 2, activation=jnp.tanh, key=key)
    cell = nn.GRUCell(programs.DIMS, 4, key=key)
    each = {
        "linear": nn.Linear(programs.DIMS, 3, key=key),
        "network": mlp,
        "layer norm": nn.LayerNorm(programs.DIMS),
        "rms norm": nn.RMSNorm(programs.DIMS),
        "gru": lambda record: cell(record, jnp.zeros(4)),
    }
    return {name: lambda v, layer=layer: jax.vmap(layer)(v).mean(0) for name, layer in each.items()}


def scalers():
    """What scikit-learn's scalers compute, written in JAX."""

    def quantile(v, q):
        return jnp.quantile(v, q, axis=0)

    def yeo_johnson(v):
        above, below = jnp.maximum(v, 0), jnp.minimum(v, 0)
        return jnp.where(v >= 0, jnp.log1p(above), -jnp.log1p(-below))

    def sides(v):
        return jnp.concatenate([v, v[:, :1] * v[:, 1:], v**2], axis=1)

    scaled = {
        "min-max": lambda v: (v - v.min(0)) / jnp.maximum(v.max(0) - v.min(0), 0.5),
        "standard": lambda v: (v - v.mean(0)) / (v.std(0) + 0.5),
        "largest": lambda v: v / jnp.maximum(jnp.abs(v).max(0), 0.5),
        "robust": lambda v: (
            (v - jnp.median(v, axis=0)) / jnp.maximum(quantile(v, 0.75) - quantile(v, 0.25), 0.5)
        ),
        "normalizer": lambda v: v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-3),
        "binarizer": lambda v: jnp.where(v > 0.2, 1.0, 0.0),
        "yeo-johnson": yeo_johnson,
        "polynomial": sides,
    }
    # A sum of squares, because a standardized mean is 0.
    return {name: lambda v, f=f: jnp.square(f(v)).sum(0) for name, f in scaled.items()}


@pytest.mark.slow
@pytest.mark.parametrize("norm", programs.NORMS)
@pytest.mark.parametrize("library", [log_likelihoods, layers, scalers])
def test_no_pair_lies_further_apart(library, norm):
    for place, (name, target) in enumerate(library().items()):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            spec = programs.spec(np.float32)
            found = dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm=norm)
            rng = np.random.default_rng(place)
            reached = programs.best_attack(target, rng, norm, np.float32)
        assert 0 < reached <= found.value, (name, reached, found.value)
