"""Clip norms: of parts of the parameters, and ones that are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import learning

N = 10
NORMS = {"body": 0.5, "head": 3.0}
PARAMETERS = {
    "body": {"in": 0.3 * jnp.ones((3, 4)), "bias": 0.1 * jnp.ones(4)},
    "head": jnp.ones(4),
}
ROWS = np.random.default_rng(1).normal(size=(N, 3)) * np.geomspace(0.01, 5.0, N)[:, None]
EXAMPLES = jnp.asarray(ROWS, float)


def loss(p, x):
    hidden = jnp.tanh(x @ p["body"]["in"] + p["body"]["bias"])
    return jnp.dot(hidden, p["head"]) * jnp.max(jnp.abs(x))


def length(tree):
    return np.sqrt(sum(float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(tree)))


def clipped(**settings):
    return learning.clipped_gradients(loss, **{"clip_norm": NORMS, **settings})


def test_each_part_is_clipped_to_its_own_norm():
    """Against gradients that are formed, and whatever the microbatches."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(PARAMETERS, EXAMPLES)
    expected = dict.fromkeys(NORMS, 0.0)
    for name, norm in NORMS.items():
        rows = [jax.tree.map(lambda x, i=i: x[i], gradients[name]) for i in range(N)]
        factors = [min(1.0, norm / length(row)) for row in rows]
        assert min(factors) < 1 == max(factors)
        scaled = [jax.tree.map(lambda x, f=f: f * x, r) for r, f in zip(rows, factors, strict=True)]
        expected[name] = jax.tree.map(lambda *xs: sum(xs), *scaled)
        np.testing.assert_allclose(
            clipped().norms(PARAMETERS, EXAMPLES)[name], [length(row) for row in rows], rtol=1e-5
        )
    for settings in ({}, {"microbatch_size": 3}):
        found = clipped(**settings)(PARAMETERS, EXAMPLES, True).value
        assert jax.tree.structure(found) == jax.tree.structure(PARAMETERS)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_digits_hold_the_longest_part():
    """Microbatches are added up as integers, whose last digit depends on the clip norm."""
    whole, parts = (
        clipped(clip_norm={"body": 1e-6, "head": 3.0}, microbatch_size=size) for size in (256, 3)
    )
    one, other = (made(PARAMETERS, EXAMPLES, True).value for made in (whole, parts))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("part", [4, 256])
def test_a_record_moves_the_sum_by_the_root_of_the_squares(part):
    """And no further: neighbors differ by a record that both clip norms scale down."""
    made, largest = clipped(microbatch_size=part), 0.0
    for i in range(N):
        whole, less = (made(PARAMETERS, EXAMPLES, mask) for mask in (True, jnp.arange(N) != i))
        assert float(whole.norm_bound) == pytest.approx(np.hypot(0.5, 3.0), rel=0.01)
        moved = jax.tree.map(jnp.subtract, whole.value, less.value)
        largest = max(largest, length(moved) / float(whole.norm_bound))
        for name, norm in NORMS.items():
            assert length(moved[name]) <= norm * 1.001
    assert 0.98 < largest <= 1


def test_a_batch_in_parts_has_the_same_sum(key):
    sampling = learning.fixed_size_sampling(N, batch_size=N)
    load = {"sampling": sampling, "examples": lambda i: EXAMPLES[i], "parts": 3}
    found = learning.clipped_in_parts(key, clipped(), PARAMETERS, **load)
    whole = clipped()(PARAMETERS, EXAMPLES, True)
    assert float(found.norm_bound) == pytest.approx(float(whole.norm_bound), rel=0.01)
    for x, y in zip(jax.tree.leaves(found.value), jax.tree.leaves(whole.value), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_an_example_is_within_if_all_its_parts_are():
    whole = clipped()(PARAMETERS, EXAMPLES, True)
    norms = clipped().norms(PARAMETERS, EXAMPLES)
    inside = (norms["body"] <= 0.5) & (norms["head"] <= 3.0)
    assert 0 < int(jnp.sum(inside)) < N
    assert int(whole.within) == 2 * int(jnp.sum(inside)) - N


def test_one_number_and_a_tree_of_one_are_the_same():
    one, tree = (
        learning.clipped_gradients(loss, clip_norm=norm)(PARAMETERS, EXAMPLES, True)
        for norm in (2.0, {"body": 1e10, "head": 2.0})
    )
    assert float(one.norm_bound) == pytest.approx(2.0, rel=0.01)
    given = clipped()(PARAMETERS, EXAMPLES, True, clip_norm=2.0)
    np.testing.assert_array_equal(given.value["head"], one.value["head"])
    assert tree.norm_bound >= 1e10


@pytest.mark.parametrize(
    ("clip_norm", "message"),
    [
        (0, "to freeze parameters, leave them out of argnums"),
        (float("inf"), "Without clipping there is no guarantee"),
        ({"body": 1.0, "head": 0.0}, "to freeze parameters, leave them out of argnums"),
        ({"body": 1.0}, "one number for each subtree of the parameters"),
        ({"body": 1.0, "tail": 1.0}, "one number for each subtree of the parameters"),
        ([1.0, 1.0], "one number for each subtree of the parameters"),
        ({}, "one number for each subtree of the parameters"),
        ({"body": 1.0, "head": None}, "clip_norm must be"),
    ],
)
def test_clip_norms_that_are_none_are_refused(clip_norm, message):
    with pytest.raises((TypeError, ValueError), match=message):
        clipped(clip_norm=clip_norm)(PARAMETERS, EXAMPLES, True)


def test_parameters_may_be_numbers_of_python():
    """As `jax.grad` takes them."""

    def line(p, x):
        return (p["slope"] * x + p["start"]) ** 2

    x = jnp.arange(4.0)
    made = learning.clipped_gradients(line, clip_norm=1.0)
    found, same = (
        made({"slope": one(0.5), "start": one(-1.0)}, x, True) for one in (float, jnp.asarray)
    )
    assert made.explain({"slope": 0.5, "start": -1.0}, x[0])
    with pytest.raises(TypeError, match="parameters must be float arrays"):
        made({"slope": 1, "start": -1.0}, x, True)
    for name in ("slope", "start"):
        np.testing.assert_allclose(found.value[name], same.value[name], rtol=1e-6)
    assert length(found.value) <= 4 * float(found.norm_bound)
