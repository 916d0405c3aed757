"""Losses with several arguments, and with more than a number, as for `jax.value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import learning
from tables import no_refusal

N = 7


def loss(w, shift, scale, example):
    predicted = jnp.dot(example["x"], w["in"]) + shift
    value = scale * (predicted - example["y"]) ** 2
    return value, {"predicted": predicted, "large": value > 1, "row": example["x"]}


def loss_alone(*arguments):
    return loss(*arguments)[0]


def given():
    key = jax.random.key(3)
    examples = {"x": jax.random.normal(key, (N, 3)), "y": jnp.arange(N, dtype=float)}
    return ({"in": jnp.ones(3)}, jnp.asarray(0.5, float), jnp.asarray(0.25, float)), examples


@pytest.mark.parametrize("argnums", [0, 1, (1, 0), [0]])
@pytest.mark.parametrize("part", [2, 256])
def test_sums_losses_and_aux_are_those_of_value_and_grad(argnums, part):
    """Within the clip norm, and in slots that are not empty."""
    arguments, examples = given()
    mask = jnp.arange(N) != 4
    clipped = learning.clipped_gradients(
        loss, clip_norm=1e3, argnums=argnums, has_aux=True, microbatch_size=part
    )
    found = clipped(*arguments, examples, mask)
    chosen = tuple(argnums) if isinstance(argnums, list) else argnums
    each = jax.vmap(jax.value_and_grad(loss, argnums=chosen, has_aux=True), (None, None, None, 0))
    (values, aux), gradients = each(*arguments, examples)
    expected = jax.tree.map(lambda x: jnp.tensordot(mask.astype(x.dtype), x, 1), gradients)
    assert jax.tree.structure(found.value) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found.value), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)
    np.testing.assert_allclose(found.private_losses, jnp.where(mask, values, 0), rtol=1e-5)
    for name, rows in aux.items():
        shown = np.where(np.asarray(mask).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
        assert found.private_aux[name].dtype == rows.dtype
        np.testing.assert_allclose(found.private_aux[name], shown, rtol=1e-5)


def test_one_norm_bounds_the_gradients_of_all_arguments():
    arguments, examples = given()
    clipped = learning.clipped_gradients(loss_alone, clip_norm=0.5, argnums=(0, 1))
    norms = clipped.norms(*arguments, examples)
    gradients = jax.vmap(jax.grad(loss_alone, (0, 1)), (None, None, None, 0))(*arguments, examples)
    squares = sum(jnp.sum(x.reshape(N, -1) ** 2, axis=1) for x in jax.tree.leaves(gradients))
    np.testing.assert_allclose(norms, jnp.sqrt(squares), rtol=1e-5)
    assert jnp.max(norms) > 2
    for i in range(N):
        total = clipped(*arguments, jax.tree.map(lambda x, i=i: x[i : i + 1], examples), True)
        length = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(total.value)))
        assert 0.49 < length <= total.norm_bound
    texts = clipped.explain(*arguments, jax.tree.map(lambda x: x[0], examples))
    assert texts[0]["in"].startswith("dense")
    assert texts[1].startswith("elementwise")


def test_a_step_shows_neither_losses_nor_aux(key):
    """A training that returns its parameters shows them noise alone: the rest stays in the sum.

    What else leads out: printing, `jit`, `scan` and `jax.tree` take no `ClippedSum`. So a program
    shows losses only if it says `private_losses`.
    """
    arguments, examples = given()
    clipped = learning.clipped_gradients(loss, clip_norm=1.0, has_aux=True)
    sums = clipped(*arguments, examples, True)
    assert str(float(sums.private_losses[3])) not in repr(sums)
    with pytest.raises(TypeError, match="a ClippedSum cannot be transformed"):
        jax.jit(lambda x: clipped(*arguments, x, True))(examples)
    noise = learning.gaussian_noise(key, noise_multiplier=1.0, batch_size=N)
    gradient, _ = noise.update(sums, noise.init(arguments[0]))
    assert jax.tree.structure(gradient) == jax.tree.structure(arguments[0])


def test_parts_of_a_batch_have_the_losses_of_all(keys):
    arguments, examples = given()
    clipped = learning.clipped_gradients(
        lambda w, x: loss(w, *arguments[1:], x), clip_norm=1.0, has_aux=True
    )
    found = learning.clipped_in_parts(
        keys(1),
        clipped,
        arguments[0],
        sampling=learning.fixed_size_sampling(N, batch_size=N),
        examples=lambda indices: jax.tree.map(lambda x: x[indices], examples),
        parts=3,
    )
    whole = clipped(arguments[0], examples, True)
    for one, other in (
        (found.private_losses, whole.private_losses),
        (found.private_aux["predicted"], whole.private_aux["predicted"]),
    ):
        np.testing.assert_allclose(np.sort(one), np.sort(other), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "arguments", "error", "message"),
    [
        ({"argnums": -1}, 3, ValueError, "argnums must be"),
        ({"argnums": (0, 0)}, 3, ValueError, "argnums must be distinct"),
        ({"argnums": ()}, 3, ValueError, "argnums must be distinct"),
        ({"argnums": 3}, 3, ValueError, "argnums=3 must be positions of arguments in front of"),
        ({"argnums": 1.5}, 3, TypeError, "argnums must be"),
        ({}, 3, ValueError, "loss must return the loss of one example"),
        ({"has_aux": True}, 0, ValueError, "batch must be what"),
    ],
)
def test_arguments_that_are_none_are_refused(settings, arguments, error, message):
    passed, examples = given()
    with pytest.raises(error, match=message):
        learning.clipped_gradients(loss, clip_norm=1.0, **settings)(
            *passed[:arguments], examples, True
        )
    with pytest.raises(TypeError, match=r"loss must return \(loss, aux\)"):
        learning.clipped_gradients(loss_alone, clip_norm=1.0, has_aux=True)(*passed, examples, True)


def test_two_batches_are_not_one(keys):
    """A record that is in both counts twice, for one norm bound and one sampling.

    What else joins them: `jnp.concatenate` of all arrays of two batches, of their indices alone,
    or of a batch with padding, which other sizes of slots show.
    """
    sampling = learning.poisson_sampling(100, batch_size=10)
    one, other = sampling(keys(1)), sampling(keys(2))
    both = jax.tree.map(lambda *xs: jnp.concatenate(xs), one, other)
    clipped = learning.clipped_gradients(jnp.dot, clip_norm=1.0)
    for indices, batch in (
        (both.indices, both),
        (both.indices, one),
        (one.indices, both),
        (one.indices[:5], one),
        (one.indices[:5], jax.tree.map(lambda x: x[:5], one)),
    ):
        with pytest.raises(ValueError, match="slots of the batch once"):
            clipped(jnp.zeros(2), jnp.ones((100, 2))[indices], batch)


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_no_private_number_stops_a_step_whatever_is_told_to_stop(strange, key):
    """An exception would tell of one record: losses and aux leave the program as outputs."""

    def loss(w, x):
        return jnp.sum(w * x), x

    records = jnp.array([[0.1, strange], [0.3, 0.2]])
    clipped = learning.clipped_gradients(loss, clip_norm=1.0, has_aux=True)
    sampling = learning.fixed_size_sampling(2, batch_size=2)
    with no_refusal(FloatingPointError), jax.debug_nans(True), jax.debug_infs(True):
        alone = clipped(jnp.ones(2), records, True)
        parts = learning.clipped_in_parts(
            key, clipped, jnp.ones(2), sampling=sampling, examples=lambda i: records[i], parts=2
        )
    for found in (alone, parts):
        np.testing.assert_allclose(found.value, [0.3, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, batch: jax.vmap(lambda x, y: (x @ w - y) ** 2)(batch["x"], batch["y"]).mean(),
        lambda w, batch: jnp.sum((batch["x"] @ w - batch["y"]) ** 2, axis=0) / len(batch["y"]),
        lambda w, batch: jnp.mean((batch["x"].T @ jnp.ones(9) - w) ** 2),
    ],
    ids=["vmap", "axis", "shapes"],
)
def test_the_loss_of_a_batch_is_refused_in_a_sentence(loss):
    """Whatever it raises on one example; names that are not there stay as they are."""
    examples = {"x": jnp.ones((9, 2)), "y": jnp.ones(9)}
    words = r"loss must be a function of the parameters and one example.*float32\[2\].* It raised"
    gradients = learning.clipped_gradients(loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=words):
        gradients(jnp.ones(2), examples, True)
    with pytest.raises(KeyError):
        gradients(jnp.ones(2), {"z": jnp.ones(9)}, True)
