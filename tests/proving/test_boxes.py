"""Splitting the box of a record: enclosures hold every value, and bounds hold every pair."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.proving import Ball, Categories, Interval, NoProofError
from dpjax.proving import _boxes as boxes
from dpjax.proving import _prove_sensitivity as proofs
from dpjax.queries import PaddedRecords
from tables import for_each

N = 40
# Seconds. Each search ends long before, because it comes close to the truth.
LONG = 900
_KEY = jax.random.key(7)
_WIDE = np.asarray(jax.random.normal(_KEY, (2, 5), jnp.float32))
_SQUARE = np.asarray(jax.random.normal(jax.random.key(8), (5, 5), jnp.float32))
_LEVELS = np.linspace(-1, 1, 5, dtype=np.float32)


def _standardized(x):
    return (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 0.1)


# Functions of rows of two numbers in [-1, 2], which together use all operations that are enclosed.
FUNCTIONS = {
    "network": lambda x: jnp.tanh(jnp.tanh(x @ _WIDE.astype(x.dtype)) @ _SQUARE.astype(x.dtype)),
    "from the left": lambda x: (_SQUARE.astype(x.dtype) @ jnp.tanh(x @ _WIDE.astype(x.dtype)).T).T,
    "softmax": lambda x: jax.nn.softmax(x @ _WIDE.astype(x.dtype)),
    "relu": lambda x: jax.nn.relu(x @ _WIDE.astype(x.dtype) - 0.5) - jax.nn.relu(-x[:, :1]),
    "activations": lambda x: jax.nn.gelu(x) + jax.nn.silu(x) + jax.nn.softplus(x),
    "waves": lambda x: jnp.sin(5 * x) * jnp.cos(7 * x + 1) + jnp.arctan(x) - jax.lax.erf(x),
    "powers": lambda x: x**3 - 2 * x**2 + (x + 2) ** -2 + (x + 2) ** 1.5 + 2.0**x + x**0,
    "roots": lambda x: jnp.sqrt(x + 1) + jax.lax.rsqrt(x + 2) + jnp.sqrt(jnp.abs(x)),
    "logs": lambda x: jnp.log(x + 2) + jnp.log1p(x + 1) + jnp.expm1(x) + jnp.exp2(x),
    "quotient": lambda x: x[:, :1] / (1 + x[:, 1:] ** 2) - 1 / (3 + x[:, :1]),
    "steps": lambda x: jnp.floor(3 * x) + jnp.ceil(x) + jnp.round(x * 2) + jnp.sign(x - 0.25),
    "comparisons": lambda x: (
        (x[:, :1] < x[:, 1:]) + 1.0 * (x > 0.5) * (x <= 1) - (x >= -0.25) * 1.0 + (x != 1)
    ),
    "choices": lambda x: jnp.where(x[:, :1] > 0.3, x**2, jnp.where(x < 0, -x, x + 1)),
    "logic": lambda x: ((x > 0) & ~(x > 1) | (x < -0.5)).any(1),
    "bins": lambda x: jax.nn.one_hot((x[:, 0] * 2 + 2).astype(int), 6),
    "extrema": lambda x: jnp.maximum(x.max(1), 0.2) + jnp.minimum(x.min(1), 0.1) + x.sum(1),
    "norms": lambda x: x / jnp.maximum(1.0, jnp.sqrt((x * x).sum(1, keepdims=True))),
    "density": lambda x: jnp.exp(-((x[:, :1] - _LEVELS) ** 2) / 0.1),
    "layout": lambda x: jnp.concatenate([x[:, ::-1], -x, jnp.sort(x)], 1).reshape(-1, 3, 2).sum(2),
    "cumulative": lambda x: jnp.cumsum(x, 1) + jax.lax.cummax(x, axis=1) * jax.lax.cummin(-x, 1),
    "clips": lambda x: jnp.clip(x * 3, -1, 2),
    "standardized": _standardized,
}  # fmt: skip


def _enclosure(target, specs, bounds):
    """The only part of a program that is a sum over records, its enclosure, and its bounds."""
    specs, public = proofs.public_bounds(specs, bounds)
    program = proofs.traced(target, specs, public)
    jaxpr = proofs._after_the_clamp(program, specs, public)
    with np.errstate(all="ignore"):
        found = boxes.enclosures(
            jaxpr, program.jaxpr.consts, proofs._inputs(program, public), public
        )
    assert len(found) == 1
    return found[0]


def _check_enclosed(function, dtype):
    """Values of records at random places, corners and ends are inside the ends of their boxes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _check_values(function, dtype)


def _check_values(function, dtype):
    specs = jax.ShapeDtypeStruct((N, 2), dtype)
    _, enclose = _enclosure(lambda x: jnp.asarray(function(x), dtype).sum(0), specs, (-1, 2))
    rng = np.random.default_rng(3)
    count = 600
    width = np.repeat([[0.0], [1e-7], [1e-3], [0.1], [1.0], [3.0]], count // 6, 0)
    low = rng.uniform(-1, 2, (count, 2))
    low[::5] = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0], low[::5].shape)
    low = low.astype(dtype).astype(float)
    high = np.minimum(low + width * rng.random((count, 2)), 2.0)
    found = enclose(low, high)
    run = jax.jit(function)
    for k in range(6):
        share = rng.random(low.shape) if k < 3 else rng.integers(0, 2, low.shape)
        # A number is rounded to the dtype of records, and stays in its box.
        x = (low + share * (high - low)).astype(dtype)
        x = np.where(x < low, low, np.where(x > high, low, x)).astype(dtype)
        x = np.where(x == 0, [0.0, -0.0][k % 2], x).astype(dtype)
        value = np.asarray(run(x), float).reshape(count, -1)
        assert (found.least <= value).all()
        assert (value <= found.most).all()


@for_each("name", ["waves", "quotient", "from the left"])
def test_every_value_of_some_functions_is_inside_its_enclosure(name):
    _check_enclosed(FUNCTIONS[name], np.float32)


@for_each("name", FUNCTIONS)
def test_every_value_is_inside_its_enclosure(name):
    _check_enclosed(FUNCTIONS[name], np.float32)


@for_each("name", FUNCTIONS)
def test_every_value_in_64_bits_is_inside_its_enclosure(name):
    with jax.enable_x64(True):
        _check_enclosed(FUNCTIONS[name], np.float64)


def _spike(x):
    """Far from 0 only around .3137, where no middle of a large box is."""
    return jnp.exp(-(((x - 0.3137) / 0.02) ** 2))


UNIT, ROWS = jax.ShapeDtypeStruct((30,), jnp.float32), jax.ShapeDtypeStruct((30, 2), jnp.float32)
# The target, records, bounds, norm, and the largest distance of two neighbors.
TRUTHS = {
    "a spike": (lambda x: _spike(x).sum(), UNIT, (0, 1), "l1", 1.0),
    "a difference of powers": (lambda x: (x - x**2).sum(), UNIT, (0, 1), "l1", 0.25),
    "a wave": (lambda x: jnp.sin(9 * x).mean() + 1, UNIT, (0, 1), "linf", 2 / 30),
    "a curve in l2": (
        lambda x: jnp.stack([x * jnp.cos(3 * x), x * jnp.sin(3 * x)]).sum(1),
        UNIT, (0, 1), "l2", None,
    ),
    "a curve in l1": (
        lambda x: jnp.stack([x - x**2, x**2 - x**3, x]).sum(1), UNIT, (0, 1), "l1", None,
    ),
    "a ball": (lambda x: (x[:, 0] * x[:, 1]).sum(), ROWS, Ball(1.0), "l1", 1.0),
    "categories": (
        lambda x: (x - 0.4 * x**2 + jnp.sin(x)).sum(), UNIT, Categories((0.0, 1.0, 2.5)), "l1",
        None,
    ),
}  # fmt: skip


def _reached(target, specs, bounds, norm):
    """The largest distance of two records' rows, on a grid that contains all categories."""
    if isinstance(bounds, Categories):
        grid = np.asarray(bounds.values, np.float32)
    else:
        grid = np.linspace(-1 if isinstance(bounds, Ball) else bounds[0], 1, 401, dtype=np.float32)
    if len(specs.shape) == 2:
        angles = np.linspace(0, 2 * np.pi, 721)
        grid = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    rest = np.broadcast_to(grid[0], (*specs.shape,))[1:]
    values = jax.vmap(lambda row: jnp.ravel(target(jnp.concatenate([row[None], rest]))))(grid)
    values = np.asarray(values, float)
    return float(boxes.norms(np.abs(values[:, None] - values), norm).max())


@for_each("name", TRUTHS)
def test_a_split_is_close_to_the_farthest_neighbors_and_never_below(name):
    target, specs, bounds, norm, known = TRUTHS[name]
    found = dpjax.prove_sensitivity(target, specs, bounds=bounds, norm=norm, effort=LONG)
    reached = _reached(target, specs, bounds, norm)
    assert reached * (1 - 1e-6) <= found.value <= reached * 1.01
    assert known is None or abs(reached / known - 1) < 0.01


def test_a_bound_is_right_however_early_the_search_stops(monkeypatch):
    """Also among the boxes that it halves. The clock counts how often it is read."""
    target, specs, bounds, norm, known = TRUTHS["a spike"]
    clock = types.SimpleNamespace(monotonic=functools.partial(next, itertools.count()))
    monkeypatch.setattr(boxes, "time", clock)
    monkeypatch.setattr(proofs, "time", clock)
    for effort in (1e-9, 2, 4, 30):
        found = dpjax.prove_sensitivity(target, specs, bounds=bounds, norm=norm, effort=effort)
        assert known <= found.value


_THREE = (-1.0, 0.5, 2.0)


def _part(rows):
    """A function of each row of two numbers, with three results."""
    first, second = rows[:, :1], rows[:, 1:]
    mixed = jnp.tanh(first - 2 * second) * jnp.exp(-first)
    return jnp.concatenate([mixed, first * second, jnp.where(first > 0, second**2, -1.0)], 1)


@for_each("norm", ["l1", "l2", "linf"])
def test_no_pair_over_three_values_lies_further_apart(norm):
    specs = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    target = lambda x: _part(x).sum(0) / 3  # noqa: E731
    rows = np.array(list(itertools.product(_THREE, repeat=2)), np.float32)
    found = dpjax.prove_sensitivity(
        target, specs, bounds=Categories(_THREE), norm=norm, effort=LONG
    ).value
    others = rows[np.random.default_rng(0).integers(0, 9, (40, 2))]
    databases = np.stack([np.concatenate([[row], rest]) for rest in others for row in rows])
    values = np.asarray(jax.jit(jax.vmap(target))(databases), float).reshape(40, 9, 3)
    apart = boxes.norms(np.abs(values[:, :, None] - values[:, None]), norm)
    assert apart.max() <= found <= 1.02 * apart.max()


@for_each("norm", ["l1", "l2", "linf"])
def test_no_slot_that_is_emptied_moves_a_value_further(norm):
    specs = PaddedRecords(
        jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((4,), bool)
    )

    def target(database):
        return jnp.where(database.present[:, None], _part(database.records), 0.0).sum(0)

    rows = np.array(list(itertools.product(_THREE, repeat=2)), np.float32)
    found = dpjax.prove_sensitivity(
        target, specs, bounds=Categories(_THREE), norm=norm, effort=LONG,
        relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE,
    ).value  # fmt: skip
    values = np.asarray(jax.jit(_part)(rows), float)
    truth = boxes.norms(np.abs(values), norm).max()
    assert truth * (1 - 1e-6) <= found <= 1.02 * truth
    # A record in another slot moves the value as well.
    present = np.array([True, True, True, False])
    for row in rows:
        full = np.stack([row, rows[0], rows[5], rows[8]])
        moved = np.stack([rows[8], rows[5], row, rows[0]])
        one = target(PaddedRecords(jnp.asarray(full), jnp.asarray(present)))
        other = target(PaddedRecords(jnp.asarray(moved), jnp.asarray([False, True, False, True])))
        assert boxes.norms(np.abs(np.asarray(one - other, float)), norm) <= found


def test_odd_records_stay_within_the_bound_of_a_split():
    target, specs, bounds, norm, _ = TRUTHS["a difference of powers"]
    found = dpjax.prove_sensitivity(target, specs, bounds=bounds, norm=norm, effort=LONG)
    released = found.bounds.enforced_on(target)
    base = np.linspace(0, 1, 30, dtype=np.float32)
    for odd in (np.nan, np.inf, -np.inf, -0.0, 1e-42, -1e-42, 1e30, 0.5):
        other = base.copy()
        other[7] = odd
        assert abs(released(jnp.asarray(base)) - released(jnp.asarray(other))) <= found.value


_OR_MISSING = Interval(0.6, 1, missing=True)


@for_each("compare", [jnp.greater, jnp.less_equal])
def test_a_missing_number_answers_a_comparison_as_nan_does(compare):
    # All numbers within the bounds give the same answer, and NaN may give the other one.
    level = 0.5 if compare is jnp.greater else 2.0

    def target(x):
        return (jnp.where(compare(x, level), 1.0, 3.0) + jnp.where(x > 0.8, 0.1, 0.0)).sum()

    found = dpjax.prove_sensitivity(target, UNIT, bounds=_OR_MISSING, norm="l1", effort=0.1)
    rows = jnp.asarray([0.6, 0.7, 1.0, jnp.nan], jnp.float32)
    values = np.asarray([target(row[None]) for row in rows], float)
    assert np.ptp(values) <= found.value


def test_a_missing_number_may_be_replaced():
    target = lambda x: jnp.where(jnp.isnan(x), 0.25, x).sum()  # noqa: E731
    found = dpjax.prove_sensitivity(target, UNIT, bounds=_OR_MISSING, norm="l1", effort=LONG)
    assert 0.75 <= found.value <= 0.751


@for_each("dtype", [jnp.float32, jnp.int32])
def test_a_cast_to_booleans_is_false_at_0_alone(dtype):

    def target(x):
        return (x.astype(bool).astype(jnp.float32) + 0.1 * x.astype(jnp.float32)).sum()

    specs = jax.ShapeDtypeStruct((30,), dtype)
    found = dpjax.prove_sensitivity(target, specs, bounds=(-1, 1), norm="l1", effort=LONG)
    values = [float(target(jnp.asarray([x], dtype))) for x in (-1, 0, 1)]
    assert np.ptp(values) - 1e-6 <= found.value <= 1.2001


def test_more_records_than_a_device_computes_at_once_are_refused():
    target = lambda x: jnp.tanh(x).mean(0)  # noqa: E731
    specs = jax.ShapeDtypeStruct((2**25, 2), jnp.float32)
    assert dpjax.prove_sensitivity(target, specs, bounds=(0, 1), norm="l1").value > 0
    with pytest.raises(NoProofError, match="numbers at once for 33,554,432 records"):
        dpjax.prove_sensitivity(target, specs, bounds=(0, 1), norm="l1", effort=1)


def test_what_is_not_computed_by_record_is_refused():
    for target in (lambda x: jnp.sort(x)[3], lambda x: (x - x.mean()).max()):
        with pytest.raises(NoProofError, match="for each record alone"):
            dpjax.prove_sensitivity(target, UNIT, bounds=(0, 1), norm="l1", effort=1)
    with pytest.raises(ValueError, match="effort"):
        dpjax.prove_sensitivity(jnp.sum, UNIT, bounds=(0, 1), norm="l1", effort=0)


def test_both_ends_are_printed():
    target, specs, bounds, norm, _ = TRUTHS["a difference of powers"]
    found = dpjax.prove_sensitivity(target, specs, bounds=bounds, norm=norm, effort=LONG)
    assert "the truth is between 0.2" in repr(found)
    assert "times the truth" in found.explain().splitlines()[-1]


def test_records_of_many_numbers_are_split_without_slopes():
    target = lambda x: jnp.tanh(x[:, :1] + 0.01 * x[:, 1:]).sum(0) * x.shape[1]  # noqa: E731
    specs = jax.ShapeDtypeStruct((30, 20), jnp.float32)
    found = dpjax.prove_sensitivity(target, specs, bounds=(0, 1), norm="linf", effort=LONG)
    assert 20 * np.tanh(1.01) <= found.value <= 20.4 * np.tanh(1.01)


@for_each("size", [6, 10])
def test_records_of_several_numbers_are_split_close_to_the_truth(size):
    weights = np.linspace(-0.5, 1, size, dtype=np.float32)

    def target(x):
        unit = jnp.tanh(x @ weights)
        return (unit - 0.3 * unit * unit).sum()

    specs = jax.ShapeDtypeStruct((30, size), jnp.float32)
    found = dpjax.prove_sensitivity(target, specs, bounds=(0, 1), norm="l1", effort=LONG)
    ends = np.tanh([weights[weights < 0].sum(), weights[weights > 0].sum()])  # It increases.
    low, high = ends - 0.3 * ends**2
    assert high - low <= found.value <= 1.02 * (high - low)


def test_the_lower_end_is_about_the_whole_function():
    """The numerator and the denominator are farthest at different records."""
    target = lambda x: (x - x**2).sum() / (1 + jnp.sin(3 * x).sum() ** 2)  # noqa: E731
    found = dpjax.prove_sensitivity(target, UNIT, bounds=(0, 1), norm="l1", effort=LONG)
    reached = float(found.explain().splitlines()[-1].split("between ")[1].split(" and")[0])
    assert 0.09 <= reached <= found.value


def test_the_lower_end_empties_a_slot_and_fills_none():
    """Records 0 and 1 are farther apart than a record and an empty slot."""
    specs = PaddedRecords(jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((4,), bool))
    found = dpjax.prove_sensitivity(
        lambda d: jnp.where(d.present, 1 - 3 * d.records**2, 0.0).sum(), specs, bounds=(-1, 1),
        norm="l1", effort=LONG, relation=dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )  # fmt: skip
    reached = float(found.explain().splitlines()[-1].split("between ")[1].split(" and")[0])
    assert 1.99 <= reached <= 2 <= found.value


def test_the_slope_of_a_maximum_is_of_any_entry_that_may_be_it():
    """The entry with the largest lower end is not the largest one everywhere in the box."""
    _check_enclosed(lambda x: x.max(1), np.float32)


def test_a_curve_through_an_inflection_is_steeper_than_between_its_ends():
    _check_enclosed(lambda x: jnp.tanh(4 * x) - 0.667 * x, np.float32)
