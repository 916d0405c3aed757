"""Sums of clipped per-example gradients, against forming every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax import learning
from dpjax.learning._rounding import slack

BATCH = 6
REPLACE = dpjax.NeighboringRelation.REPLACE_ONE


def normal(seed, *shape):
    # NumPy converts, for which JAX would compile a program of every shape.
    drawn = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(drawn.astype(jnp.result_type(float)))


def tokens(seed, length):
    drawn = np.random.default_rng(seed).integers(0, 7, (BATCH, length))
    return jnp.asarray(drawn.astype(np.int32))


def perceptron(p, example):
    """Dense layers and biases, with a layer norm."""
    x = example["x"]
    x = (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-5) * p["scale"] + p["shift"]
    hidden = jax.nn.relu(x @ p["in"] + p["bias"])
    return jnp.sum((hidden @ p["out"].T - example["y"]) ** 2)


def embedding(p, example):
    hidden = jnp.mean(p["table"][example["tokens"]], axis=0)
    return jnp.sum((hidden @ p["out"]) ** 2)


def rows(p, example):
    """As Equinox looks up an embedding; there is no row 7."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)
    )
    starts = jnp.stack([example["tokens"] + 2, example["tokens"]], axis=1)
    found = lax.gather(p["table"], starts, numbers, (1, 4), mode="clip")
    return jnp.sum(jnp.tanh(found) ** 2)


def convolution(p, example):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        example["x"][None],
        p["first"],
        (2, 1),
        "SAME",
        rhs_dilation=(1, 2),
        dimension_numbers=numbers,
    )
    x = jax.nn.relu(x + p["bias"].reshape(1, 1, 1, -1))
    x = jnp.transpose(x, (0, 3, 1, 2))
    numbers = ("NCHW", "OIHW", "NCHW")
    x = lax.conv_general_dilated(x, p["second"], (1, 2), "VALID", dimension_numbers=numbers)
    return jnp.sum(x**2)


def attention(p, example):
    x = example["x"]
    query, keys = jnp.einsum("td,dhe->the", x, p["query"]), jnp.einsum("td,dhe->the", x, p["key"])
    weights = jax.nn.softmax(jnp.einsum("the,she->hts", query, keys))
    mixed = jnp.einsum("hts,sd,hde->te", weights, x, p["value"])
    return jnp.sum((jnp.mean(mixed, axis=0) @ p["out"]) ** 2)


def tied(p, example):
    hidden = jnp.mean(p["table"][example["tokens"]], axis=0)
    return jax.nn.logsumexp(p["table"] @ jnp.tanh(hidden @ p["middle"]))


def recurrent(p, example):
    def step(hidden, x):
        return jnp.tanh(hidden @ p["hidden"] + x @ p["in"]), None

    hidden, _ = lax.scan(step, jnp.zeros_like(p["out"][:, 0]), example["x"])
    return jnp.sum((hidden @ p["out"]) ** 2) + 0.1 * jnp.sum(p["in"] ** 2)


def checkpointed(p, example):
    @jax.checkpoint
    def layer(w, x):
        return jax.nn.silu(jnp.dot(w, x))

    return jnp.sum(layer(p["second"], layer(p["first"], example["x"])) ** 2)


def models():
    """Losses with parameters, examples, and how each parameter is clipped."""
    return {
        "perceptron": (
            perceptron,
            {
                "in": normal(1, 5, 4),
                "bias": normal(2, 4),
                "scale": normal(3, 5),
                "shift": normal(4, 5),
                "out": normal(5, 3, 4),
            },
            {"x": normal(6, BATCH, 5), "y": normal(7, BATCH, 3)},
            {
                "in": "dense",
                "out": "dense",
                "bias": "elementwise",
                "scale": "elementwise",
                "shift": "elementwise",
            },
        ),
        "embedding": (
            embedding,
            {"table": normal(1, 7, 4), "out": normal(2, 4, 3)},
            {"tokens": tokens(0, 5)},
            {"table": "embedding", "out": "dense"},
        ),
        "rows": (
            rows,
            {"table": normal(1, 7, 4)},
            {"tokens": tokens(2, 5)},
            {"table": "embedding"},
        ),
        "convolution": (
            convolution,
            {"first": normal(1, 3, 3, 2, 4), "bias": normal(2, 4), "second": normal(3, 5, 4, 2, 2)},
            {"x": normal(4, BATCH, 7, 6, 2)},
            {"first": "convolution", "second": "convolution", "bias": "elementwise"},
        ),
        "attention": (
            attention,
            {
                "query": normal(1, 4, 2, 3),
                "key": normal(2, 4, 2, 3),
                "value": normal(3, 2, 4, 4),
                "out": normal(4, 4, 2),
            },
            {"x": normal(5, BATCH, 3, 4)},
            {"query": "formed", "key": "formed", "value": "formed", "out": "dense"},
        ),
        "tied": (
            tied,
            {"table": normal(1, 7, 4), "middle": normal(2, 4, 4)},
            {"tokens": tokens(1, 4)},
            {"table": "formed", "middle": "dense"},
        ),
        "recurrent": (
            recurrent,
            {"hidden": normal(1, 4, 4), "in": normal(2, 3, 4), "out": normal(3, 4, 2)},
            {"x": normal(4, BATCH, 3, 3)},
            {"hidden": "formed", "in": "formed", "out": "dense"},
        ),
        "checkpointed": (
            checkpointed,
            {"first": normal(1, 4, 5), "second": normal(2, 3, 4)},
            {"x": normal(3, BATCH, 5)},
            {"first": "dense", "second": "dense"},
        ),
    }


every_model = pytest.mark.parametrize("name", models())


@functools.partial(jax.jit, static_argnums=0)
def by_hand(loss, parameters, examples, clip_norm):
    """Every gradient, formed and clipped; and their norms."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(parameters, examples)
    leaves = jax.tree.leaves(gradients)
    squares = [jnp.sum(jnp.square(x.reshape(len(x), -1)), axis=1) for x in leaves]
    norms = jnp.sqrt(sum(squares[1:], squares[0]))
    factors = jnp.minimum(1, clip_norm / norms)
    return jax.tree.map(lambda x: jnp.tensordot(factors, x, 1), gradients), norms


def largest_difference(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)


def check_model(name, tolerance):
    loss, parameters, examples, _ = models()[name]
    norms = by_hand(loss, parameters, examples, 1.0)[1]
    # Some are clipped, and some are not.
    clip_norm = float(jnp.median(norms))
    expected, norms = by_hand(loss, parameters, examples, clip_norm)
    clipped = learning.clipped_gradients(loss, clip_norm=clip_norm)
    found = clipped(parameters, examples, True)
    assert largest_difference(found.value, expected) <= tolerance * clip_norm
    assert int(found.within) == 0
    assert jax.tree.structure(found.value) == jax.tree.structure(parameters)


@every_model
def test_sums_are_those_of_gradients_that_are_formed(name):
    check_model(name, 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "perceptron",
        pytest.param("convolution", marks=pytest.mark.slow),
        pytest.param("embedding", marks=pytest.mark.slow),
    ],
)
def test_sums_in_float64(name, x64):
    check_model(name, 1e-14)


@every_model
def test_it_says_how_each_parameter_is_clipped(name):
    loss, parameters, examples, ways = models()[name]
    example = jax.tree.map(lambda x: x[0], examples)
    texts = learning.clipped_gradients(loss, clip_norm=1.0).explain(parameters, example)
    assert {leaf: text.split()[0].strip(":") for leaf, text in texts.items()} == ways


def test_norms_are_those_of_the_gradients():
    loss, parameters, examples, _ = models()["perceptron"]
    _, expected = by_hand(loss, parameters, examples, 1.0)
    norms = learning.clipped_gradients(loss, clip_norm=1.0).norms(parameters, examples)
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


@pytest.fixture(scope="module")
def perceptron_batch():
    _, parameters, examples, _ = models()["perceptron"]
    return learning.clipped_gradients(perceptron, clip_norm=1.5), parameters, examples


def same_bits(one, other):
    pairs = zip(jax.tree.leaves(one.value), jax.tree.leaves(other.value), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("field", "bad"),
    [("x", np.nan), ("x", np.inf), ("y", np.nan), ("y", -np.inf), ("y", "large")],
)
def test_an_example_that_is_not_finite_counts_as_zero(field, bad, perceptron_batch):
    clipped, parameters, examples = perceptron_batch
    if bad == "large":  # Its square is infinite.
        bad = jnp.finfo(examples[field].dtype).max / 4
    without = clipped(parameters, examples, jnp.arange(BATCH) != 2)
    neighbor = {**examples, field: examples[field].at[2, 1].set(bad)}
    assert same_bits(clipped(parameters, neighbor, jnp.ones(BATCH, bool)), without)
    assert not same_bits(clipped(parameters, examples, jnp.ones(BATCH, bool)), without)


def test_nothing_times_infinity_is_zero_too():
    """Where x is infinite and the gradient of what it meets 0, and in every row of a table."""

    def loss(p, example):
        hidden = example["x"] @ p["w"] + p["table"][example["tokens"]][0]
        return jnp.sum(jnp.where(example["keep"], hidden, 0))

    parameters = {"w": normal(1, 2, 3), "table": normal(2, 7, 3).at[6].set(jnp.inf)}
    examples = {
        "x": normal(3, BATCH, 2).at[0].set(jnp.inf),
        "tokens": tokens(0, 2).at[:, 0].set(jnp.arange(BATCH, dtype=jnp.int32) + 1),
        "keep": jnp.arange(BATCH) > 0,
    }
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    found = clipped(parameters, examples, True)
    # The last one reads a row that is infinite.
    without = clipped(parameters, examples, (jnp.arange(BATCH) > 0) & (jnp.arange(BATCH) < 5))
    assert same_bits(found, without)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found.value))


def test_an_empty_batch_is_zero(perceptron_batch):
    clipped, parameters, examples = perceptron_batch
    found = clipped(parameters, examples, jnp.zeros(BATCH, bool))
    assert largest_difference(found.value, jax.tree.map(jnp.zeros_like, parameters)) == 0
    assert int(found.within) == 0


def test_neighbors_are_within_the_norm_bound(perceptron_batch):
    clipped, parameters, examples = perceptron_batch
    everyone = clipped(parameters, examples, jnp.ones(BATCH, bool))
    replaced = {**examples, "y": examples["y"].at[0].set(-100 * examples["y"][0])}
    for neighbor, relation in (
        (clipped(parameters, examples, jnp.arange(BATCH) != 0), "add-or-remove-one"),
        (clipped(parameters, replaced, jnp.ones(BATCH, bool)), "replace-one"),
    ):
        sensitivity = everyone.sensitivity(dpjax.NeighboringRelation(relation))
        difference = jax.tree.map(jnp.subtract, everyone.value, neighbor.value)
        distance = float(dpjax.sensitivity._norms.length("l2", difference))
        assert 0.5 * sensitivity.value < distance <= sensitivity.value
        assert sensitivity.norm == "l2"
    assert everyone.sensitivity(REPLACE).value == 2 * everyone.sensitivity().value


def outer_product(p, example):
    return jnp.dot(example["x"] @ p, example["g"])


def repeated_rows(p, example):
    signs = jnp.array([[1.0], [-1.0], [1.0], [1.0]], jnp.float32)
    return jnp.sum(signs * p[example["tokens"]] * example["g"][None])


def patches(p, example):
    numbers = ("NWC", "WIO", "NWC")
    x = example["x"].reshape(1, -1, 1)
    x = lax.conv_general_dilated(x, p, (1,), "SAME", dimension_numbers=numbers)
    return jnp.sum(jnp.sum(x[0], axis=0) * example["g"])


@pytest.mark.parametrize("clip_norm", [1e-10, 1.0])
@pytest.mark.parametrize(
    ("loss", "shape"),
    [(outer_product, (9, 5)), (repeated_rows, (7, 5)), (patches, (3, 1, 5))],
)
def test_no_example_of_any_magnitude_is_beyond_the_bound(loss, shape, clip_norm):
    """Alone, with numbers over the whole range of float32, and over twelve magnitudes in each."""
    rng, count = np.random.default_rng(0), 3000

    def drawn(size):
        within = 10 ** rng.uniform(-6, 6, (count, 1, size)) * (rng.random((count, 1, size)) < 0.7)
        numbers = 10 ** rng.uniform(-44, 38, (count, 1, 1)) * rng.normal(size=within.shape) * within
        with np.errstate(over="ignore"):
            return jnp.asarray(numbers.astype(np.float32))

    examples = {"x": drawn(9), "g": drawn(5)}
    examples["tokens"] = jnp.asarray(rng.integers(0, 7, (count, 1, 4)), jnp.int32)
    clipped = learning.clipped_gradients(loss, clip_norm=clip_norm)
    start = jnp.zeros(shape, jnp.float32)

    def of_one(example):
        found = clipped(start, example, True)
        return found.value, found.norm_bound

    sums, norm_bounds = jax.jit(jax.vmap(of_one))(examples)
    lengths = np.linalg.norm(np.asarray(sums, float).reshape(count, -1), axis=1)
    assert np.all(lengths <= norm_bounds)
    # Some are clipped, some are not, and some are not finite.
    assert 30 < np.sum(lengths > 0.99 * clip_norm) < np.sum(lengths > 0) < count - 300


def linear(w, x):
    return w * x


def test_rounding_is_charged():
    """In floats a record may move a sum by more than the clip norm, but never beyond the bound."""
    rng = np.random.default_rng(0)
    clipped = learning.clipped_gradients(linear, clip_norm=0.3)
    moved = []
    for _ in range(20):
        examples = jnp.asarray(rng.uniform(0, 2, 256), jnp.float32).at[100].set(3)
        one = clipped(jnp.float32(1), examples, jnp.ones(256, bool))
        other = clipped(jnp.float32(1), examples, jnp.arange(256) != 100)
        moved.append(float(one.value) - float(other.value))
    assert 0.3 + 1e-6 < max(moved) <= float(one.norm_bound) <= 0.304


def test_what_rounding_is_charged_does_not_grow_with_the_batch():
    def charged(batch):
        return slack([jnp.zeros(100, jnp.float32)], terms=10, part=min(batch, 256), batch=batch)

    # Of both neighbors and of two sums, b roundings of 2 b / 3 terms.
    assert 8 / 3 * 65**2 * 2.0**-24 < charged(64) < 1e-3
    assert 8 / 3 * 257**2 * 2.0**-24 < charged(256) < charged(2**14) < 0.0165


@pytest.mark.parametrize("microbatch_size", [8, 32, 256])
def test_where_the_last_record_takes_the_place_of_one_the_bound_holds(microbatch_size):
    """Two sums of floats differ then, of large and small numbers that a float does not hold.

    What else reaches it: where all records behind it move up, every sum differs; a batch is in a
    random order so that they do not.
    """
    clipped = learning.clipped_gradients(linear, clip_norm=1.0, microbatch_size=microbatch_size)
    value = jax.jit(lambda x, mask: clipped(jnp.float32(1), x, mask).value)
    rng = np.random.default_rng(1)
    bound = float(clipped(jnp.float32(1), jnp.ones(512), True).norm_bound)
    for _ in range(20):
        small = 2.0 ** -rng.integers(14, 24) * rng.uniform(0.9, 1.1)
        x = np.where(rng.uniform(size=512) < rng.uniform(), 1.0, small).astype("float32")
        place, last = int(rng.integers(512)), x[-1]
        x[place] = 1.0
        moved = x.copy()
        moved[place], mask = last, np.arange(512) < 511
        if place == 511:
            moved[place] = 0.0
        assert abs(value(x, jnp.ones(512, bool)) - value(moved, mask)) <= bound


def test_microbatches_add_up_to_the_batch_in_any_order(perceptron_batch):
    whole, parameters, examples = perceptron_batch
    mask = jnp.arange(BATCH) != 4
    parts = learning.clipped_gradients(perceptron, clip_norm=1.5, microbatch_size=2)
    one = parts(parameters, examples, mask)
    assert largest_difference(one.value, whole(parameters, examples, mask).value) < 1e-6
    assert int(one.within) == int(whole(parameters, examples, mask).within)
    # The microbatches are {0, 3}, {1, 4} and {2, 5}: each of them has a slot in every third.
    order = jnp.array([1, 2, 0, 4, 5, 3])
    other = parts(parameters, jax.tree.map(lambda x: x[order], examples), mask[order])
    assert same_bits(one, other)


def test_microbatches_that_do_not_divide_a_batch(perceptron_batch):
    whole, parameters, examples = perceptron_batch
    parts = learning.clipped_gradients(perceptron, clip_norm=1.5, microbatch_size=4)
    one, other = parts(parameters, examples, True), whole(parameters, examples, True)
    assert largest_difference(one.value, other.value) < 1e-6
    assert int(one.within) == int(other.within)


def test_batches_share_a_program_whatever_their_masks(perceptron_batch, compilations):
    clipped, parameters, examples = perceptron_batch
    masks = [jnp.arange(BATCH) != i for i in range(3)]
    clipped(parameters, examples, masks[0])
    assert compilations(lambda: [clipped(parameters, examples, mask).value for mask in masks]) == []


def test_linear_algebra_of_every_example():
    def loss(p, x):
        return jnp.sum(
            jnp.linalg.solve(jnp.eye(2, dtype=x.dtype) + jnp.outer(x, x), x * p["w"]) ** 2
        )

    parameters, examples = {"w": normal(0, 2)}, normal(1, BATCH, 2)
    clipped = learning.clipped_gradients(loss, clip_norm=0.1, microbatch_size=3)
    expected, _ = by_hand(loss, parameters, examples, 0.1)
    assert largest_difference(clipped(parameters, examples, True).value, expected) < 1e-6


def test_examples_may_hold_keys_and_numpy_arrays():
    """Such as those of dropout, one for each example."""

    def loss(p, example):
        mask = jax.random.bernoulli(example["key"], 0.5, example["x"].shape)
        return jnp.sum(jnp.where(mask, example["x"], 0) @ p["w"])

    parameters = {"w": np.ones((3, 2), np.float32)}
    examples = {
        "x": np.ones((BATCH, 3), np.float32),
        "key": jax.random.split(jax.random.key(0), BATCH),
    }
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    expected, _ = by_hand(loss, parameters, {**examples, "x": jnp.asarray(examples["x"])}, 1.0)
    assert largest_difference(clipped(parameters, examples, True).value, expected) < 1e-6
    example = {"x": examples["x"][0], "key": examples["key"][0]}
    assert clipped.explain(parameters, example)["w"].startswith("dense")


def printing(w, x):
    jax.debug.print("{}", x)
    return w * x


def drawn_by_rbg(x):
    """Under `vmap`, all examples get bits of the first one's key."""
    seed = lax.bitcast_convert_type(x, jnp.int32)
    return jax.random.uniform(jax.random.key(seed, impl="rbg"), dtype=jnp.float32)


@jax.custom_batching.custom_vmap
def mixing(x):
    return x


@mixing.def_vmap
def _(axis_size, in_batched, x):
    return jnp.cumsum(x), True


def with_a_rule(rule):
    """A loss whose derivative is code of its own."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))
    return lambda w, x: same(w * x)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (printing, ValueError, "loss must not call code outside of JAX"),
        (lambda w, x: w * drawn_by_rbg(x), ValueError, "loss must not draw with rbg keys"),
        (with_a_rule(drawn_by_rbg), ValueError, "loss must not draw with rbg keys"),
        (
            with_a_rule(lambda g: printing(g, g) / g),
            ValueError,
            "loss must not call code outside of JAX",
        ),
        (lambda w, x: w * float(x), TypeError, "loss must be JAX code"),
    ],
)
def test_losses_that_show_or_mix_examples_are_refused(loss, error, message):
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)
    with pytest.raises(error, match=message):
        clipped(jnp.float32(1), jnp.ones(3, jnp.float32), True)


@pytest.mark.parametrize("loss", [lambda w, x: w * mixing(x), with_a_rule(mixing)])
def test_rules_for_vmap_that_mix_examples_are_left_out(loss):
    """Also in a derivative."""
    examples = jnp.array([0.5, -0.25, 3.0], jnp.float32)
    clipped, plain = (
        learning.clipped_gradients(f, clip_norm=1.0)(jnp.float32(1), examples, True)
        for f in (loss, lambda w, x: w * x)
    )
    assert clipped.value == plain.value == 1.25


def test_half_precision_is_summed_in_float32():
    def loss(p, x):
        return jnp.sum((x @ p["w"]) ** 2)

    parameters = {"w": normal(0, 3, 2).astype(jnp.bfloat16)}
    examples = normal(1, BATCH, 3).astype(jnp.bfloat16)
    clipped = learning.clipped_gradients(loss, clip_norm=0.1)
    value = clipped(parameters, examples, True).value["w"]
    expected, _ = by_hand(loss, parameters, examples, 0.1)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected["w"], atol=0.02)


def test_a_bad_traced_clip_norm_gives_nan(perceptron_batch):
    clipped, parameters, examples = perceptron_batch

    @jax.jit
    def parts(norm):
        found = clipped(parameters, examples, True, clip_norm=norm)
        return found.value, found.norm_bound

    for bad in (-1.0, 1e-11, 1e11):
        assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(parts(bad)))
    with pytest.raises(ValueError, match="clip_norm must be a number from 1e-10"):
        clipped(parameters, examples, True, clip_norm=1e-11)


def test_a_narrow_clip_norm_does_not_round_the_bound(x64):
    """In float32 the little that rounding adds in float64 would be nothing."""
    clipped = learning.clipped_gradients(linear, clip_norm=1.0)
    examples = jnp.ones(3, "float64")
    bound = jax.jit(lambda norm: clipped(jnp.float64(1), examples, True, clip_norm=norm).norm_bound)
    assert 1 + 1e-16 < float(bound(jnp.float32(1))) < 1 + 1e-12


def test_integers_that_do_not_hold_the_number_of_rows():
    def loss(table, token):
        return jnp.sum(jnp.tanh(table[token]) ** 2)

    table, examples = normal(1, 300, 2), jnp.array([-1, 5, 127, -128, 5, 0], jnp.int8)
    expected, _ = by_hand(loss, table, examples, 0.1)
    found = learning.clipped_gradients(loss, clip_norm=0.1)(table, examples, True)
    assert largest_difference(found.value, expected) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be a finite number above 0"),
        ({"clip_norm": 1e11}, ValueError, "clip_norm must be a number from 1e-10 to 1e\\+10"),
        ({"clip_norm": 1.0, "microbatch_size": 0}, ValueError, "microbatch_size must be"),
        ({"loss": 3, "clip_norm": 1.0}, TypeError, "loss must be a function"),
    ],
)
def test_bad_parameters_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        learning.clipped_gradients(**{"loss": linear, **arguments})


@pytest.mark.parametrize(
    ("loss", "parameters", "examples", "mask", "error", "message"),
    [
        (linear, 1, jnp.ones(3), True, TypeError, "parameters must be float arrays"),
        (linear, jnp.int32(1), jnp.ones(3), True, TypeError, "parameters must be float arrays"),
        (linear, jnp.ones(2), jnp.ones(3), True, ValueError, "loss must return the loss of one"),
        (linear, jnp.ones(()), jnp.ones(()), True, ValueError, "examples must be arrays with a"),
        (linear, jnp.ones(()), jnp.ones(3), jnp.ones(3), ValueError, "batch must be what sampling"),
        (linear, jnp.ones(()), jnp.ones(3), None, ValueError, "or True if no slot is empty, got"),
        (linear, jnp.ones(()), jnp.ones(3), False, ValueError, "batch must be what sampling"),
    ],
)
def test_bad_batches_are_refused(loss, parameters, examples, mask, error, message):
    with pytest.raises(error, match=message):
        learning.clipped_gradients(loss, clip_norm=1.0)(parameters, examples, mask)


CONVOLUTIONS = {
    "grouped": {"feature_group_count": 2, "padding": "SAME"},
    "transposed": {"lhs_dilation": (2, 2), "padding": [(1, 1)] * 2},
    "plain": {"padding": "SAME"},
}


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        pytest.param(
            dtype,
            settings,
            id=f"{dtype}-{name}",
            marks=[pytest.mark.slow] * (dtype == "float64" and name != "grouped"),
        )
        for dtype in ("float32", "float64")
        for name, settings in CONVOLUTIONS.items()
    ],
)
def test_no_example_makes_the_others_of_a_convolution_nan(settings, dtype):
    """Under `vmap`, XLA fills kernels of groups up with zeros; and zero times infinity is NaN.

    One record, whose intermediate numbers overflow, made every gradient of its batch NaN, and all
    counted as zero; in a slot that is masked, too. What else reaches it: parameters that are not
    the kernel, kernels that an example makes, several trainings under `vmap`.
    """

    def loss(w, x):
        kernel = x[0, : 2 // settings.get("feature_group_count", 1), :3, :3]
        kernel = jnp.broadcast_to(kernel, w.shape)
        one, other = (
            jax.lax.conv_general_dilated(x, k, (1, 1), **settings) for k in (w, w**2 + kernel)
        )
        return jnp.sum(jnp.sin(one)) + jnp.sum(jnp.sin(other))

    with jax.enable_x64(dtype == "float64"):
        shape = (4, 2 // settings.get("feature_group_count", 1), 3, 3)
        weights = jnp.full(shape, 0.3, dtype)
        examples = jax.random.normal(jax.random.key(0), (4, 1, 2, 5, 5), dtype)
        clipped = learning.clipped_gradients(loss, clip_norm=1.0)
        mask = jnp.arange(4) != 2
        clean = clipped(weights, examples, mask).value
        assert jnp.linalg.norm(clean) > 0.1
        for present in (mask, True):
            dirty = clipped(weights, examples.at[2].set(jnp.inf), present).value
            np.testing.assert_allclose(dirty, clean, atol=1e-6)
        both = jax.vmap(lambda w: clipped(w, examples, mask).value)(
            jnp.stack([weights, jnp.full_like(weights, jnp.nan)])
        )
        np.testing.assert_allclose(both[0], clean, atol=1e-6)
