"""Training under the inputs of tests/odd_inputs.py: examples, targets of losses, loss matrices.

A layer that is not written for a dtype may take the wrong norm. So every dtype of an example, of a
weight and of what a layer returns is a row, and the bound is checked against gradients formed for
each example in float64.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import odd_inputs
from dpjax import learning
from dpjax.random import seeded_key

CLIP = 1.0
KEY = seeded_key(16)
PARAMETERS = {"w": jnp.asarray([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]], "float32")}
ROWS = np.asarray([[3.0, 0.0, 7.0], [1.0, 5.0, 2.0], [0.0, 0.0, 1.0], [4.0, 4.0, 4.0]])


def as_weights(x):
    return x.astype(PARAMETERS["w"].dtype)


def turned(x):
    """Complex numbers of the same length as the real ones."""
    return jax.lax.complex(as_weights(x) * 0.6, as_weights(x) * 0.8)


LOSSES = {
    "a dense layer": lambda p, x: jnp.sum((as_weights(x) @ p["w"]) ** 2),
    "real parts": lambda p, x: jnp.sum(jnp.real(turned(x) @ p["w"])),
    "magnitudes": lambda p, x: jnp.sum(jnp.abs(turned(x) @ p["w"])),
    "einsum of complex numbers": lambda p, x: jnp.sum(
        jnp.real(jnp.einsum("i,ij->j", turned(x), p["w"]))
    ),
    "vdot": lambda p, x: jnp.real(jnp.vdot(turned(x), p["w"][:, 0])),
    "a spectrum": lambda p, x: jnp.sum(jnp.abs(jnp.fft.rfft(as_weights(x)) @ p["w"][:2])),
    "complex weights": lambda p, x: jnp.sum(jnp.imag(turned(x) @ (p["w"] * 1j))),
    "as they are": lambda p, x: jnp.sum((x @ p["w"]) ** 2),
}


def longest(loss, examples):
    """The norm of the sum for each example alone: at most the clip norm, up to rounding."""
    gradients = learning.clipped_gradients(loss, clip_norm=CLIP)

    def alone(example):
        total = gradients(PARAMETERS, example[None], jnp.ones(1, bool))
        leaves = jax.tree.leaves(total.value)
        return jnp.sqrt(sum(jnp.sum(leaf.astype("float32") ** 2) for leaf in leaves))

    with odd_inputs.any_promotion():
        return max(float(alone(example)) for example in examples)


@pytest.mark.parametrize(
    "name", [x if x == "real parts" else pytest.param(x, marks=pytest.mark.slow) for x in LOSSES]
)
@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_example_exceeds_the_clip_norm(name, x64):
    with jax.enable_x64(x64):
        assert 0 < longest(LOSSES[name], jnp.asarray(ROWS, "float32")) <= CLIP * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["a dense layer", "as they are"])
@pytest.mark.parametrize("dtype", [*odd_inputs.DTYPES, "bool"])
def test_examples_of_every_dtype_are_clipped_or_refused(layer, dtype):
    examples = jnp.asarray(ROWS.astype(getattr(ml_dtypes, dtype, dtype)))
    found = outcome(LOSSES[layer], examples)
    if isinstance(found, str):  # JAX has no promotion for some of these.
        assert "dtype" in found or "promotion" in found
    else:
        assert 0 < found <= CLIP * (1 + 1e-2)


def outcome(loss, examples):
    try:
        return longest(loss, examples)
    except (TypeError, ValueError) as error:
        return str(error)


LOSS_MATRIX = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_losses_that_hide_something_are_refused():
    odd_inputs.assert_refused(
        lambda x: learning.weighted_majority(KEY, x, learning_rate=1.0).choices,
        odd_inputs.hiding(LOSS_MATRIX),
        "losses",
    )


@pytest.mark.slow
def test_losses_of_any_dtype_are_the_same():
    def choices(losses):
        return learning.weighted_majority(KEY, losses, learning_rate=1.0).choices

    right = choices(LOSS_MATRIX.astype("float32"))
    odds = odd_inputs.written_otherwise(LOSS_MATRIX)
    odd_inputs.assert_right(choices, odds, "losses", lambda _: right)


def test_records_of_objective_perturbation_that_hide_something_are_refused():
    labels = np.asarray([1, -1, 1, -1])
    training = learning.objective_perturbation(
        regularization=0.5, n=4, dims=3, epsilon=1.0, delta=1e-5
    )
    odd_inputs.assert_refused(
        lambda x: training(KEY, {"x": x, "y": labels}).value,
        odd_inputs.hiding_in_columns(ROWS),
        "database|records|value",
    )
