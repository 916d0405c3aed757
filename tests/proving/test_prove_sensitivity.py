"""Proofs of real targets: the bound, its enforcement, and the refusals."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.proving import Ball, Categories, NoProofError
from dpjax.proving._rows import norm_of
from tables import for_each

N = 100
NUMBERS = jax.ShapeDtypeStruct((N,), jnp.float32)
VECTORS = jax.ShapeDtypeStruct((N, 3), jnp.float32)
HISTOGRAM = jnp.zeros(10)

# More are in tests/proved_targets.py.
EXACT = {
    "one-hot": (
        lambda x: jax.nn.one_hot((x * 10).astype(int), 10).sum(0), NUMBERS, (0, 1), "l2", 2**0.5,
    ),
    "scatter": (
        lambda x: HISTOGRAM.at[jnp.clip((x * 10).astype(int), 0, 9)].add(1), NUMBERS, (0, 1),
        "l1", 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_bounds_are_exact_up_to_rounding(case):
    target, records, bounds, norm, truth = EXACT[case]
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm=norm)
    assert truth * (1 - 1e-6) <= found.value <= 1.01 * truth
    assert (found.gamma, found.confidence, found.n, found.method) == (0, 1, N, "proved")


def test_the_released_target_clamps_its_records():
    """Unclamped records would move the mean by much more than the bound."""
    found = dpjax.prove_sensitivity(jnp.mean, NUMBERS, bounds=(0, 1), norm="l1")
    private = dpjax.privatize(jnp.mean, dpjax.laplace(found, epsilon=1e6))
    wild = jnp.full(N, 1e9).at[:50].set(jnp.nan).at[50:60].set(-jnp.inf)
    release = private(dpjax.random.seeded_key(0), wild)
    assert abs(float(release.value) - 0.4) < 1e-3
    assert release.guarantee.gamma == 0


def test_a_mechanism_alone_is_refused_because_nothing_clamps():
    found = dpjax.prove_sensitivity(jnp.mean, NUMBERS, bounds=(0, 1), norm="l1")
    with pytest.raises(ValueError, match="privatize"):
        dpjax.laplace(found, 1.0)(dpjax.random.seeded_key(0), jnp.zeros(()))


def test_another_target_is_refused():
    found = dpjax.prove_sensitivity(jnp.mean, NUMBERS, bounds=(0, 1), norm="l1")
    with pytest.raises(ValueError, match="must be the target that"):
        dpjax.privatize(jnp.sum, dpjax.laplace(found, 1.0))


INTERVALS = (-2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (-3.0, -1.0), (-1.0, 0.0)


@pytest.mark.parametrize("bound", [*INTERVALS, Ball(1.5), Categories((1.0, 4.0, -2.0))])
def test_clamps_keep_their_promise(bound):
    from dpjax._core._bounds import Interval

    bound = Interval(*bound) if isinstance(bound, tuple) else bound
    strange = [np.nan, np.inf, -np.inf, 1e-40, -1e-40, -0.0, 3e38, -3e38, 1.0, 4.0, 2.0]
    rows = jnp.array([[x, y] for x in strange for y in strange], jnp.float32)
    out = np.asarray(jax.jit(bound.clamp)(rows), float)
    assert np.isfinite(out).all()
    if isinstance(bound, Interval):
        x = np.asarray(rows)
        normal = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
        expected = np.where(np.isnan(x), bound.low, np.clip(normal, bound.low, bound.high))
        assert out.tobytes() == expected.astype(float).tobytes()
    elif isinstance(bound, Ball):
        assert np.linalg.norm(out, axis=1).max() <= 1.5 * (1 + 18 * 4 * 2.0**-24)
    else:
        assert set(out.ravel()) <= {1.0, 4.0, -2.0}


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (lambda x: 1 / x.mean(), "div.*test_prove_sensitivity.py:.*may be 0"),
        (lambda x: jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: y / 2, x), "while"),
        (jnp.argmax, "argmax.*dpjax.exponential"),
        # JAX's own functions have no line of the user, but their call has.
        (lambda x: jnp.linalg.inv(jnp.outer(x, x)).sum(), "_sensitivity.py:.*release the matrix"),
        (lambda x: jnp.abs(jnp.fft.rfft(x)), "_sensitivity.py:.*multiply by a public matrix"),
        (lambda x: x[:0].mean(), "slice.*_sensitivity.py:.*Leave out arrays"),
        (lambda x: x.astype(jnp.bfloat16) * 2, "bfloat16"),
        (lambda x: jnp.log(x).mean(), "log"),
        (lambda x: x.sum() + jax.random.normal(jax.random.key(0)), "random"),
    ],
)
def test_refusals_name_the_operation_the_line_and_a_remedy(target, match):
    with pytest.raises(NoProofError, match=match) as caught:
        dpjax.prove_sensitivity(target, NUMBERS, bounds=(0, 1), norm="l1")
    assert str(caught.value).endswith("Or sample it (dpjax.sample_sensitivity)")


@for_each(
    "shape, dtype, bounds, match",
    [
        ((N,), np.float32, Ball(2.0**41), "radius of a Ball must be in"),
        ((N,), np.float32, Categories(()), "at least one number"),
        ((N,), np.float32, 3.0, r"must be \(low, high\), a Ball or"),
        ((N,), np.float32, {"a": (0, 1)}, "a tree like the records"),
        ((N,), np.float32, (1e-40, 1), "normal .not subnormal. numbers of float32"),
        ((N,), np.float32, (0, 2.0**61), r"up to 2\^60"),
        ((N,), np.int32, (0, 0.5), "integers in the range of int32"),
        ((N,), np.int8, (0, 300), "integers in the range of int8"),
        ((), np.float32, (0, 1), "a common leading axis"),
    ],
)
def test_bounds_that_records_cannot_be_clamped_to_are_refused(shape, dtype, bounds, match):
    spec = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises((TypeError, ValueError), match=match):
        dpjax.prove_sensitivity(jnp.sum, spec, bounds=bounds, norm="l1")


def test_explain_shows_every_step():
    found = dpjax.prove_sensitivity(lambda x: jnp.tanh(x).sum(), NUMBERS, bounds=(0, 1), norm="l1")
    lines = found.explain().splitlines()
    assert [line.split()[0] for line in lines] == ["tanh", "reduce_sum"]
    assert "test_prove_sensitivity.py" in lines[0]


def by_a_wrong_norm(x):
    return (x / jnp.maximum(1, jnp.sqrt(jnp.sum(jnp.abs(x), axis=1, keepdims=True)))).mean(0)


def test_a_proof_is_explained_alike_in_a_shard_map_that_is_not_compiled():
    """There JAX makes shards of all arrays, also of the neighbors that `explain` compares."""
    proved = dpjax.prove_sensitivity(sigmoids, np.zeros(20, np.float32), bounds=(0, 1), norm="l1")
    found = []

    def body(x):
        found.append(proved.explain())
        return x

    mesh = jax.make_mesh((1,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("shards")
    jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros(1))
    assert found == [proved.explain()]


def sigmoids(records):
    return jax.nn.sigmoid(records).mean()


@pytest.mark.parametrize("wrapped", [by_a_wrong_norm, jax.jit(by_a_wrong_norm)])
def test_explain_says_where_a_bound_is_lost_and_what_to_use(wrapped):
    """A record of length 10 becomes one of length 10^.5, but the rule knows only the least norm."""
    found = dpjax.prove_sensitivity(wrapped, VECTORS, bounds=(-10, 10), norm="l2")
    text = found.explain()
    lines = [line for line in text.splitlines() if "^" in line]
    assert len(lines) == 1
    (said,) = lines
    step = 2 * 10 * 3**0.5
    claimed, reached = (
        float(x) for x in re.search("to (.*)x is .*by more than (.*) in", said).groups()
    )
    assert said.strip().startswith("^ div")
    assert reached <= 2 * 10**0.5 * 1.001
    assert claimed == pytest.approx(step / reached, rel=0.05)
    assert "maximum of a number and the norm" in said
    assert found.explain() == text
    assert jax.jit(lambda s: s)(found).explain() == text


def test_a_proof_travels_without_its_program():
    found = dpjax.prove_sensitivity(by_a_wrong_norm, VECTORS, bounds=(-10, 10), norm="l2")
    copy = pickle.loads(pickle.dumps(found.proof))
    assert copy.steps == found.proof.steps == tuple(copy.explained().splitlines())


@pytest.mark.parametrize("bounds", [(-1, 1), Ball(1.0), Categories((1.0, -2.0, 0.5))])
def test_random_neighbors_stay_within_the_bounds_of_every_step(bounds):
    """Those that `explain` runs; it also works inside jit."""

    def descent(x):
        return jax.lax.fori_loop(0, 2, lambda i, w: w - jnp.tanh(x @ w).mean(), jnp.ones(3))

    found = dpjax.prove_sensitivity(descent, VECTORS, bounds=bounds, norm="l1")
    losses = found.proof.losses
    moved, _ = losses._moved()
    assert all(moved[s.key] <= norm_of([s.value], "l1") for s in losses.steps)
    assert moved[losses.steps[-1].key] > 0
    texts = []
    jax.jit(lambda x: texts.append(found.explain()) or x)(1.0)
    assert "reduce_sum" in texts[0]


def test_sums_are_charged_for_their_rounding():
    """Both sums may be off by gamma N, and the real bound is 1. Longer sums are exact."""
    many = jax.ShapeDtypeStruct((300,), jnp.float32)
    found = dpjax.prove_sensitivity(jnp.sum, many, bounds=(0, 1), norm="l1")
    assert found.value >= 1 + 2 * 299 * 2.0**-24 * 300 * 0.99
    whole = dpjax.prove_sensitivity(lambda x: (x > 0.5).sum(), many, bounds=(0, 1), norm="l1")
    assert whole.value < 1 + 1e-9


def test_a_lemma_is_known_by_its_program_and_not_by_its_name():
    """A function called `_var` can be anything."""

    def _var(x, correction):
        return 100 * x.mean() + correction.astype(x.dtype)

    found = dpjax.prove_sensitivity(
        lambda x: jax.jit(_var)(x, jnp.int32(0)), NUMBERS, bounds=(0, 1), norm="l1"
    )
    assert found.value >= 1


def test_queries_one_by_one_are_refused_because_nothing_clamps():
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    proved = dpjax.prove_sensitivity(jnp.sum, spec, bounds=(0, 1), norm="linf")
    mechanism = dpjax.above_threshold(proved, epsilon=1.0, threshold=1.0)
    with pytest.raises(ValueError, match="clamped records"):
        mechanism.start(dpjax.random.seeded_key(0))
    state = dpjax.above_threshold(1.0, epsilon=1.0, threshold=1.0).start(dpjax.random.seeded_key(0))
    with pytest.raises(ValueError, match="clamped records"):
        mechanism.step(state, 5.0)
