"""Every rule, on all pairs of neighbors over three values a coordinate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import lt_to_p

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of, traced
from dpjax.proving import Ball, NoProofError, _prove_sensitivity
from dpjax.proving._layout import cut, reshape
from dpjax.proving._operations import OPERATIONS
from dpjax.proving._rows import as_dense, norm_of
from dpjax.proving._value import Difference, RefusalError, make
from elementary_table import ELEMENTARY
from random_programs import distance

NAN = jnp.array([jnp.nan] * N)
TABLE = np.array([0.5, -2.0, 1.0], np.float32)
TAPS = np.array([[[2.0, 1.0]]], np.float32)
MATRIX = np.array([[1.0, -2.0]], np.float32)

# One program for each primitive with a rule.
RULES = {
    "add": lambda x: x + x.sum(),
    "sub": lambda x: x - x.mean(),
    "mul": lambda x: x * x[::1].sum(),
    "mul itself": lambda x: x * x,
    "div": lambda x: x / (4 + x.sum()),
    "div by what all move": lambda x: x.sum() / (3.5 + x.sum()),
    "div of a constant": lambda x: 2.0 / (3.2 - x.sum()),
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "abs of one sign": lambda x: jnp.abs(x - 1),
    "square": jnp.square,
    "integer_pow": lambda x: x**3,
    "negative power": lambda x: (x + 2.0) ** -2,
    "max": lambda x: jnp.maximum(x, x.mean()),
    "min": lambda x: jnp.minimum(x, 0.5),
    **{name: row.program for name, row in ELEMENTARY.items() if row.program},
    "clamp": lambda x: lax.clamp(jnp.float32(-0.5), x, jnp.float32(0.5)),
    "sqrt of a sum": lambda x: jnp.sqrt(x.sum() + 3.1),
    "rsqrt of a sum": lambda x: lax.rsqrt(x.sum() + 3.1),
    "sin of a rise": lambda x: jnp.sin(1.2 * x),
    "sin of a peak": lambda x: jnp.sin(x + 1.3),
    "cos of a fall": lambda x: jnp.cos(x + 1.6),
    "cos of a trough": lambda x: jnp.cos(x - 3.3),
    "floor": lambda x: jnp.floor(1.3 * x),
    "ceil": lambda x: jnp.ceil(1.3 * x),
    "round": lambda x: jnp.round(2 * x),
    "sign": jnp.sign,
    "lt": lambda x: x < 0.3,
    # Where x is negative, x * 0 is -0, which is less than 0 in the total order.
    "lt_to": lambda x: lt_to_p.bind(x * 0, jnp.zeros_like(x)),
    "median of a public array": lambda x: x + jnp.median((x == x).astype(x.dtype)),
    "lt_to in one record": lambda x: lt_to_p.bind(x * 0, 0 - jnp.arange(N, dtype=x.dtype)),
    "le": lambda x: x <= 0.25,
    "gt": lambda x: x > x.mean(),
    "ge": lambda x: x >= 1.0,
    "eq": lambda x: x == 0.25,
    "ne": lambda x: x != 1.0,
    "and": lambda x: (x > 0) & (x < 0.5),
    "or": lambda x: (x > 0.5) | (x < 0),
    "xor": lambda x: (x > 0.5) ^ (x > 0),
    "not": lambda x: ~(x > 0),
    "select_n": lambda x: jnp.where(x > 0, 3 * x, -x),
    "select by all": lambda x: jnp.where(x.sum() > 0, x, -x),
    "is_finite": lambda x: jnp.where(jnp.isfinite(x), x, 5.0),
    "convert": lambda x: (3 * x).astype(jnp.int32),
    "div of integers": lambda x: lax.div((3 * x).astype(jnp.int32) + 6, jnp.int32(4)),
    "div by several": lambda x: lax.div((9 * x).astype(jnp.int32), jnp.array([4, 1, 9])),
    "rem by several": lambda x: lax.rem((9 * x).astype(jnp.int32), jnp.array([4, 1, 99])),
    "rem": lambda x: lax.rem((x > 0.5).astype(jnp.int32) + 3, jnp.int32(4)),
    "rem of small integers": lambda x: lax.rem((3 * x).astype(jnp.int32), jnp.int32(4)),
    "floor_divide": lambda x: (9 * x).astype(jnp.int32) // 4,
    "interpolation": lambda x: jnp.interp(x, np.array([-0.5, 0.25, 1.0], np.float32), TABLE),
    "interpolation, partly flat": lambda x: jnp.interp(x, np.arange(-1.0, 2), TABLE[[0, 0, 2]]),
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_max of all": lambda x: jnp.max(x.sum() - 0.1 * x),
    "reduce_min": jnp.min,
    "reduce_or": lambda x: jnp.any(x > 0.5),
    "reduce_and": lambda x: jnp.all(x > 0),
    "sort": jnp.sort,
    "sort, then a wave": lambda x: jnp.cos(4 * np.pi * (jnp.sort(x) - 0.25)),
    "sort of all": lambda x: jnp.sort(x - x.mean()),
    "broadcast": lambda x: x[:, None] * TABLE[None],
    "reshape": lambda x: (x[:, None] * TABLE[None]).reshape(3, 3, 1),
    "squeeze": lambda x: jnp.squeeze(x[:, None], 1),
    "transpose": lambda x: (x[:, None] * TABLE[None]).T,
    "slice": lambda x: x[1:] - x[:-1],
    "slice, maximum of neighbors": lambda x: jnp.maximum(x[1:], x[:-1]),
    "slice, order of neighbors": lambda x: x[1:] > x[:-1],
    "slice with steps": lambda x: jnp.maximum(x[::2], x[:2]),
    "slice of all": lambda x: (jnp.minimum(x, x.mean()))[0],
    "concatenate": lambda x: jnp.concatenate([x, x[:1] * 2]),
    "iota": lambda x: x * jnp.arange(3, dtype=jnp.float32),
    "dot by a row": lambda x: x[:, None] @ MATRIX,
    "dot over records": lambda x: x @ TABLE,
    "outer": lambda x: x[:, None] * x[None, :],
    "gram": lambda x: (x[:, None] * TABLE[None]).T @ (x[:, None] * TABLE[None]),
    "gather": lambda x: jnp.quantile(x, 1.0),
    "scatter_add": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(1.0),
    "scatter_add of x": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(x),
    "one-hot": lambda x: jax.nn.one_hot((x + 1).astype(int), 3).sum(0),
    "pjit": jax.jit(lambda x: x + 1),
    "custom_jvp": lambda x: jax.nn.relu(x),
    "variance": jnp.var,
    "median": jnp.median,
    "pairs": lambda x: jnp.abs(x[:, None] - x[None, :]).mean(),
    "conv_general_dilated": lambda x: lax.conv(
        jnp.stack([x, x], 1)[:, None], TAPS, (1,), "VALID", precision="highest"
    ),
    "reduce_window_sum": lambda x: lax.reduce_window(
        jnp.stack([x, x], 1), 0.0, lax.add, (1, 2), (1, 1), "VALID"
    ),
    "reduce_window_max": lambda x: lax.reduce_window(
        jnp.stack([x, x], 1), -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"
    ),
    "reduce_window_min": lambda x: lax.reduce_window(
        jnp.stack([x, x], 1), jnp.inf, lax.min, (1, 2), (1, 1), "VALID"
    ),
    "pow": lambda x: (x + 1.5) ** 1.5,
    "root of numbers from 0": lambda x: (x + 1.0) ** 0.5,
    "power of numbers from 0": lambda x: (x + 1.0) ** 2.5,
    "power of 3": lambda x: 3.0**x,
    "power of a fraction": lambda x: jnp.power(0.2, 2 * x),
    "exp2": lambda x: jnp.exp2(1.5 * x),
    "argmin": lambda x: jnp.argmin(jnp.abs(x[:, None] - TABLE[None]), 1),
    "argmax": lambda x: jnp.argmax(jnp.zeros(3).at[(x + 1).astype(int)].add(1.0)),
    "argmin as one-hot": lambda x: jax.nn.one_hot(
        jnp.argmin(jnp.abs(x[:, None] - TABLE[None]), 1), 3
    ).sum(0),
    "cumprod": lambda x: lax.cumprod(x[:, None] * TABLE[None], 1),
    "cumprod of numbers from 0": lambda x: lax.cumprod(
        jnp.stack([(x + 1) / 2, jnp.abs(x), 0 * x + x.mean() + 1], 1), 1, reverse=True
    ),
    "cumprod of positive numbers": lambda x: lax.cumprod(0.7 + 0.2 * x[:, None] * TABLE[None], 1),
    "cumprod of one number": lambda x: lax.cumprod(x[:, None], 1),
    "cummax": lax.cummax,
    "cummax of rows": lambda x: lax.cummax(x[:, None] * TABLE[None], 1),
    "cummin": lambda x: lax.cummin(x, reverse=True),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "top_k of rows": lambda x: lax.top_k(x[:, None] * TABLE[None], 2)[0],
    "top_k, places": lambda x: lax.top_k(x, 2)[1],
    "top_k, places of 0 and -0": lambda x: lax.top_k(0 * x, 1)[1].astype(float) + x.mean(),
    "top_k, places of rounded": lambda x: (
        lax.top_k(jnp.round(x / 3), 2)[1].astype(float) + x.mean()
    ),
    "top_k, places in rows of 0 and -0": lambda x: (
        lax.top_k(jnp.stack([0 * x, -0.0 * x, 0 * x], 1), 1)[1].sum().astype(float) + x.mean()
    ),
    "scatter_max": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].max(x),
    "scatter_min": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].min(x),
    "scatter_max of rows": lambda x: (
        jnp.zeros((3, 3)).at[(x + 1).astype(int)].max(x[:, None] * TABLE[None])
    ),
    "scatter": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].set(2.0),
    "scatter_add at two places": lambda x: (
        jnp.zeros((3, 2)).at[(x + 1).astype(int), (x > 0).astype(int)].add(x)
    ),
    "gather of several": lambda x: jnp.sort(x)[jnp.array([0, 2, 2])],
    "gather of columns": lambda x: (x[:, None] * TABLE[None])[:, jnp.array([2, 0])],
    "ranks": lambda x: (x[:, None] > x[None, :]).sum(1),
    "signs of pairs": lambda x: jnp.sign(x[:, None] - x[None, :]).sum(0),
    "positive pairs": lambda x: ((x[:, None] > x[None, :]) & (x[:, None] > 0)).sum(),
    "differences of pairs": lambda x: jnp.exp(-jnp.square(x[:, None] - x[None, :])).sum(),
    "a mean beside each record": lambda x: x[:, None] + jnp.stack([x.mean(), x.sum()])[None],
    "distinct": lambda x: (jnp.zeros(3).at[(x + 1).astype(int)].add(1.0) > 0).sum(),
    "counts and a start": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(1.0) + 0.1,
    "roots of counts": lambda x: jnp.sqrt(jnp.zeros(3).at[(x + 1).astype(int)].add(1.0)),
    "reciprocals of counts": lambda x: 1 / (jnp.zeros(3).at[(x + 1).astype(int)].add(x) + 3.5),
    "repeated counts": lambda x: jnp.tile(jnp.zeros(3).at[(x + 1).astype(int)].add(1.0), 2) > 1,
    "copies of counts": lambda x: (
        (jnp.zeros(3).at[(x + 1).astype(int)].add(1.0)[:, None] > TABLE[None]).astype(int).sum(0)
    ),
    "median of three": lambda x: jnp.quantile(x, 0.5),
    "percentiles": lambda x: jnp.percentile(x, np.array([10.0, 50, 80])),
    "integers times floats": lambda x: lax.dot_general(
        jnp.arange(1, N + 1), jnp.sort(x), (([0], [0]), ([], [])), "highest", jnp.float32
    ),
    "cumsum": jnp.cumsum,
    "stack": lambda x: jnp.stack([x, -x]),
    "tile": lambda x: jnp.tile(x, 2),
    "split": lambda x: jnp.split(x, [1])[1],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1,), (2,)),
    "rev": lambda x: x[::-1],
    "pad": lambda x: jnp.pad(x, (1, 0)),
    "stop_gradient": lax.stop_gradient,
    "copy": jnp.copy,
    "sort of several": lambda x: lax.sort([jnp.abs(x), 3 * x], num_keys=1)[1],
    "sort of places": lambda x: jnp.argsort(jnp.round(x)),
    "sort of rows by rows": lambda x: lax.sort(
        [x[:, None] * TABLE[None], TABLE[None] - x[:, None]], num_keys=2
    )[1],
    "labels in the order of records": lambda x: (x > 0).astype(float)[jnp.argsort(x)],
    "distribution function by sorting": lambda x: jnp.searchsorted(jnp.sort(x), TABLE / 2),
    "distribution function from the right": lambda x: jnp.searchsorted(
        jnp.sort(jnp.round(x)), TABLE, side="right"
    ),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda y: 2 * y, lambda y: y - 1, x),
    "switch": lambda x: lax.switch(
        (x.sum() + 1).astype(jnp.int32), [jnp.sin, jnp.abs, lambda y: y[::-1]], x
    ),
    "diagonal": lambda x: jnp.diagonal(x[:, None] * jnp.sort(x)[None]),
    "lag product": lambda x: x[1:] * x[:-1],
    "sums by one-hot": lambda x: jax.nn.one_hot((x + 1).astype(int), 3).T @ (x - 0.3),
    "squares of a row": lambda x: jnp.square(x[:, None] * TABLE[None]).sum(1),
    "weights of sorted records": lambda x: TABLE @ jnp.sort(x),
    "two sums of sorted records": lambda x: jnp.stack([TABLE, TABLE[::-1]]) @ jnp.sort(x),
    "rows by a matrix": lambda x: (x[:, None] * TABLE[None]) @ TABLE,
}


FIRST, SECOND = all_pairs(VALUES)


@pytest.fixture(scope="module")
def moved():
    """The values of all rules on all pairs, from one compilation."""
    run = jax.jit(jax.vmap(lambda x: {name: rule(x) for name, rule in RULES.items()}))
    return run(FIRST), run(SECOND)


@pytest.mark.parametrize("rule", RULES)
def test_no_pair_lies_further_apart(rule, moved):
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    for norm, bound in bounds_of(RULES[rule], spec, (-1, 1)).items():
        assert distance(moved[0][rule], moved[1][rule], norm).max() <= bound


def shorter(d):
    return Difference(0.75 * d.each, 0.75 * d.l1, 0.75 * d.l2)


FAULTS = {
    "differences": lambda x: dataclasses.replace(
        x, changed=shorter(x.changed), others=shorter(x.others)
    ),
    "range": lambda x: dataclasses.replace(x, high=x.high - 0.1 * (x.high - x.low)),
}
# No record moves what these return; or this jax calls them by another name.
WITHOUT_A_BOUND = {"iota", "is_finite", "add_any", "copy_p", "scatter_add", "platform_index"}
WITH_A_BOUND = {name for name, row in OPERATIONS.items() if row.rule} - WITHOUT_A_BOUND


@functools.cache
def program_of(rule):
    return traced(RULES[rule], jax.ShapeDtypeStruct((N,), jnp.float32), (-1, 1))


def holds(rule, moved):
    """Whether the values of a program on all pairs are as is claimed."""
    claimed = _prove_sensitivity._walk(*program_of(rule))[1]
    values, others = (jax.tree.map(np.asarray, x[rule]) for x in moved)
    (low, high) = (np.broadcast_to(x, values.shape[1:]) for x in (claimed[0].low, claimed[0].high))
    return bool(((low <= values) & (values <= high)).all()) and all(
        distance(values, others, norm).max() <= norm_of(claimed, norm)
        for norm in ("l1", "l2", "linf")
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", sorted(WITH_A_BOUND))
def test_a_fault_in_any_rule_is_found(name, fault, moved, monkeypatch):
    """These programs show where a rule claims three quarters of a distance, or a short range."""
    operation = OPERATIONS[name]

    def faulty(*operands, **parameters):
        made = operation.rule(*operands, **parameters)
        found = made if isinstance(made, list) else [made]
        wrong = [x if x.is_public else FAULTS[fault](x) for x in found]
        return wrong if isinstance(made, list) else wrong[0]

    users = [program for program in RULES if f" {name}" in str(program_of(program)[0])]
    assert all(holds(program, moved) for program in users)
    monkeypatch.setitem(OPERATIONS, name, operation._replace(rule=faulty))
    assert not all(holds(program, moved) for program in users)


@pytest.mark.parametrize("wave", [jnp.sin, jnp.cos])
@pytest.mark.parametrize("start", np.linspace(-8, 8, 9).tolist())
def test_a_wave_between_its_ends(wave, start):
    """The range of an interval, and so the sensitivity, against a grid."""
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    values = wave(np.linspace(start, start + 2, 10**5, dtype=np.float32))
    found = dpjax.prove_sensitivity(
        lambda x: wave(x).sum(), spec, bounds=(start, start + 2), norm="l1"
    )
    width = float(values.max() - values.min())
    assert width <= found.value <= width + 1e-4


# Programs of records of two coordinates.
OF_VECTORS = {
    "gram": lambda x: x.T @ x,
    "matrix": lambda x: x @ np.array([[1.0, 2.0], [-1.0, 0.5]], np.float32),
    "max of a row": lambda x: x.max(1),
    "sum of a row": lambda x: x.sum(1),
    "sort": lambda x: jnp.sort(x, axis=0),
    "squared length": lambda x: jnp.einsum("ni,ni->n", x, x),
    "outer products": lambda x: jnp.multiply(
        *(lax.broadcast_in_dim(x, (N, 2, 2), (0, k)) for k in (1, 2))
    ),
    "covariance": lambda x: (x - x.mean(0)[None]).T @ (x - x.mean(0)[None]),
    "quotient": lambda x: x / (1 + jnp.abs(x).sum(1, keepdims=True)),
}


@pytest.fixture(scope="module")
def moved_vectors():
    """The values of all programs of vectors on some pairs."""
    first, second = all_pairs(VALUES, (2,))
    choice = np.random.default_rng(0).choice(len(first), 4000, replace=False)
    run = jax.jit(jax.vmap(lambda x: {name: rule(x) for name, rule in OF_VECTORS.items()}))
    return run(first[choice]), run(second[choice])


@pytest.mark.parametrize("bounds", [(-1, 1), Ball(2**0.5)])
@pytest.mark.parametrize("target", OF_VECTORS)
def test_no_pair_of_vectors_lies_further_apart(target, bounds, moved_vectors):
    spec = jax.ShapeDtypeStruct((N, 2), jnp.float32)
    for norm, bound in bounds_of(OF_VECTORS[target], spec, bounds).items():
        moved = distance(moved_vectors[0][target], moved_vectors[1][target], norm)
        assert moved.max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8, np.bool_])
def test_integers(dtype):
    spec = jax.ShapeDtypeStruct((N,), dtype)
    total = dpjax.prove_sensitivity(
        lambda x: x.astype(jnp.int32).sum(), spec, bounds=(0, 1), norm="l1"
    )
    assert total.value == pytest.approx(1, rel=1e-9)
    if dtype in (np.uint8, np.int8):
        with pytest.raises(NoProofError, match="overflow"):
            dpjax.prove_sensitivity(lambda x: x * x, spec, bounds=(0, 100), norm="l1")


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (lambda x: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO), "halves"),
        (lambda x: jnp.dot(x, x, precision="default"), "precision"),
        (lambda x: lax.reduce_or((x * 3).astype(jnp.int32), (0,)), "bitwise"),
        (
            lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(1.0, unique_indices=True),
            "unique_indices",
        ),
        (lambda x: jnp.where(NAN == NAN, x, NAN), "NaN"),
        (lambda x: jnp.where(jnp.isfinite(NAN), x / 9, x), "is_finite"),
        (lambda x: x % 0.3, "remainders of floats"),
        (lambda x: lax.reshape(x[:, None] * TABLE[None], (N, N), (1, 0)), "also transposes"),
        (lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), "accuracy="),
        (lambda x: x * 1e18 * 1e18, "overflow"),
        (lambda x: x * 1e-18 * 1e-18 * 1e18 * 1e18, "may combine"),
        (lambda x: jax.nn.one_hot(x.astype(int), 3) / x.sum(), "may be 0"),
        (lambda x: jnp.cumprod(x), "cumprod"),
    ],
)
def test_parameters_without_a_rule_are_refused(target, match):
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    with pytest.raises(NoProofError, match=match):
        dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l1")


def pair_bound(target, low, high, dtype="float64", n=1):
    return bounds_of(target, jax.ShapeDtypeStruct((n,), dtype), (low, high))["linf"]


def test_small_differences_do_not_vanish_on_the_host():
    with jax.enable_x64(True), np.errstate(all="ignore"):
        jump = lambda x: jnp.where(jnp.exp(x)[0] > 1e-230, 1.0, 0.0)  # noqa: E731
        assert pair_bound(jump, -600, -500, n=2) >= 1
        assert pair_bound(lambda x: jnp.exp(x)[0], -600, -500, n=2) >= np.exp(-500) / 2


def test_rounding_moves_where_the_slope_is_zero_on_the_host():
    with np.errstate(all="ignore"):
        assert pair_bound(lax.erf, 30, 40, "float32") > 2.0**-24


def test_a_product_of_exponentials_may_be_that_of_a_sum():
    low, high = 0.99 * 2.0**-44, 1.01 * 2.0**-44
    with jax.enable_x64(True), np.errstate(all="ignore"):
        target = lambda x: jnp.exp(x) * jnp.exp(x * 2.0**-40 - 600)  # noqa: E731
        first, second = (jax.jit(target)(np.array([x]))[0] for x in (low, high))
        assert 0 < abs(first - second) <= pair_bound(target, low, high)
        # A chain of k of them rounds k - 1 sums.
        one = pair_bound(jnp.exp, -600 - 2.0**-43, -600)
        assert one >= 12 * 600 * 2.0**-53 * np.exp(-600)


def test_quotients_of_quotients_are_refused_where_their_denominators_overflow():
    size = 2.0 ** (128 / 3)
    with pytest.raises(RefusalError, match="may combine"):
        pair_bound(lambda x: 1 / x / x / x, 0.999 * size, 1.001 * size, "float32")
    assert pair_bound(lambda x: 1 / x / x, 1, 2, "float32") < 1.6


def test_infinite_constants_are_rounded_with_the_others():
    """The float32 next to .1 lies above it."""
    start = float(np.float32(0.1))
    with jax.enable_x64(True):
        levels = jnp.array([np.inf, 0.1])
        below = lambda x: x <= jax.jit(lambda y: y.astype(jnp.float32))(levels)  # noqa: E731
        first, second = (jax.jit(below)(np.float32([x])) for x in (start, 1.0))
        assert (first != second).any()
        assert pair_bound(below, start, 1, "float32") >= 1
        twice = lambda x: x <= jax.jit(lambda y: y.astype("float32").astype(float))(levels)  # noqa: E731
        with pytest.raises(RefusalError, match="casts of NaN or infinity"):
            pair_bound(twice, 0.1, 0.1 + 1e-10)


def test_numbers_of_another_shape_are_refused():
    """A sum would count 4 rows for 2 groups as none."""
    rows = [np.zeros((4, 1)), np.inf, np.inf]
    with pytest.raises(RefusalError, match="shape"):
        make((2, 1), np.dtype(np.float32), np.zeros((1, 1)), np.ones((1, 1)), None, rows, rows)
    with pytest.raises(RefusalError, match="shape"):
        make((2, 1), np.dtype(np.float32), np.zeros(1), np.ones(1), None, rows, rows)
    unknown = [np.full((1, 1), np.nan), np.inf, np.inf]
    with pytest.raises(RefusalError, match="NaN"):
        make((2, 1), np.dtype(np.float32), np.zeros((1, 1)), np.ones((1, 1)), None, rows, unknown)


def test_public_rows_added_at_private_places():
    rows = lambda: jnp.concatenate([jnp.arange(3.0), 4 + jnp.arange(3.0)])[:, None]  # noqa: E731
    target = lambda x: jnp.zeros((2, 1)).at[(5 * x).astype(int)].add(rows()).sum()  # noqa: E731
    assert pair_bound(target, 0, 1, "float32", n=6) >= 6


def test_a_median_of_very_many_takes_places_of_floats():
    few, many = (pair_bound(jnp.median, 0, 1, "float32", n=n) for n in (2**10, 2**24 + 4))
    assert few < 0.51
    assert many >= 1


def test_the_units_of_elementary_functions_cover_their_errors():
    x = np.linspace(-8, 30, 40001, dtype=np.float32)
    functions = {
        jnp.exp: np.exp, jnp.tanh: np.tanh, jnp.sin: np.sin, jnp.cos: np.cos, jnp.expm1: np.expm1,
    }  # fmt: skip
    for device, host in functions.items():
        exact = host(x.astype(float))
        error = np.abs(np.asarray(jax.jit(device)(x), float) - exact)
        floor = np.abs(exact) if device is jnp.exp else np.maximum(np.abs(exact), 1)
        assert (error <= 32 * 2.0**-24 * floor).all()


def row(axis, changed, others):
    """Numbers of which the changed row moves by one amount, and every other one by another."""
    moves = [(np.full((1, 1), float(d)), np.inf, np.inf) for d in (changed, others)]
    ends = np.full((1, 1), -9.0), np.full((1, 1), 9.0)
    return make((4, 3), np.dtype(np.float32), *ends, axis, *moves)


def test_a_row_that_is_left_may_be_another():
    left = cut(row(0, 1, 2), (0, 0), (1, 3), (1, 1))
    assert as_dense(left).others.each.max() >= 2
    assert as_dense(left).others.l1 >= 6


def test_a_reshape_keeps_rows():
    assert reshape(row(0, 1, 0), (4, 3, 1)).axis == 0
    for shape in ((3, 4), (2, 6), (12,)):
        mixed = reshape(row(0, 1, 0.5), shape)
        assert mixed.axis is None
        assert mixed.others.l1 == pytest.approx(3 + 3 * 1.5)


def test_arrays_with_bounds_of_unlike_shapes_are_sorted_together():
    """Each step of the loop has bounds of its own, and the places that are sorted have one."""
    steps = lambda x: jax.lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(2), x)[1]  # noqa: E731
    target = lambda x: jnp.argsort(steps(x), axis=0).sum(1)  # noqa: E731
    spec = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    found = dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="linf")
    assert 3 <= found.value <= 6.001
