"""What needs no compiler of an accelerator: programs are lowered for one, and call no host."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accelerators.programs import perceptron_loss, programs
from dpjax import learning

_CALLS_HOST = re.compile(r"callback|ToHost|FromHost|infeed|outfeed|is_host_transfer = true")
BATCH = {
    "x": jax.ShapeDtypeStruct((4, 6), jnp.float32),
    "y": jax.ShapeDtypeStruct((4,), jnp.int32),
}
PARAMETERS = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {"in": (6, 5), "bias": (5,), "out": (5, 3), "shift": (3,)}.items()
}


def lowered(traced, platform):
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    "name",
    [
        "chunk: mean",
        "chunk: mean by sums",
        "chunk: density by sums",
        "probes: mean",
        "order statistic",
        "Laplace, vector",
        "histogram",
    ],
)
def test_programs_are_lowered_for_accelerators_and_call_no_host(name):
    traced = programs(jax.devices() * 4)[name]().trace()
    for platform in ("cuda", "tpu"):
        assert not _CALLS_HOST.search(lowered(traced, platform))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_planted_callback_is_not_lowered(platform):
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    traced = jax.jit(lambda x: jax.pure_callback(np.sin, vector, x)).trace(vector)
    with pytest.raises(ValueError, match="lowering platform"):
        lowered(traced, platform)


def products(text):
    """The precision of each matrix product of a lowered program, sorted."""
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = [re.search(r"precision = \[(\w+), (\w+)\]", line) for line in lines]
    return sorted(x[1] if x and x[1] == x[2] else "DEFAULT" for x in found)


def gradient_products(loss, parameters, batch, platform, microbatch_size=64):
    clipped = learning.clipped_gradients(loss, clip_norm=1.0, microbatch_size=microbatch_size)
    function = jax.jit(lambda parameters, batch: clipped(parameters, batch, True).value)
    return products(lowered(function.trace(parameters, batch), platform))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("microbatch_size", [64, 2])
def test_norms_and_sums_share_one_backward_pass(platform, microbatch_size):
    """Two products forward and one back; norms add none. Each parameter is summed at HIGHEST."""
    found = gradient_products(perceptron_loss, PARAMETERS, BATCH, platform, microbatch_size)
    assert found == ["DEFAULT"] * 3 + ["HIGHEST"] * 4


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_norms_and_sums_share_gradients_that_are_formed(platform):
    """A second computation of the gradient could round in another way, and miss its norm."""

    def loss(weights, example):
        return jnp.sum(jnp.tanh(weights @ weights @ example["x"]))

    weights, batch = jax.ShapeDtypeStruct((6, 6), jnp.float32), {"x": BATCH["x"]}
    plain = jax.jit(jax.vmap(jax.grad(loss), (None, 0))).trace(weights, batch)
    found = gradient_products(loss, weights, batch, platform)
    assert found == [*products(lowered(plain, platform)), "HIGHEST"]
