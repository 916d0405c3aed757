"""Sums over records as sums of integers: their values, and bounds on every step of a program."""

import itertools
import math
import os
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, N, all_pairs
from dpjax.proving import Ball, _exact_sums, _prove_sensitivity
from dpjax.proving._exact_programs import ExactBounds, with_sums
from dpjax.proving._exact_sums import ExactCumulative, ExactScatter, ExactSum, ExactWindows
from dpjax.proving._exact_variances import ExactVariance
from dpjax.proving._losses import _evaluate
from dpjax.proving._rows import norm_of
from dpjax.queries import PaddedRecords
from random_programs import distance

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
TABLE = np.array([0.5, -2.0, 1.0], np.float32)


@pytest.fixture(autouse=True, scope="module")
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def always(monkeypatch):
    """Also sums of few terms are exact."""
    monkeypatch.setattr(_exact_sums, "_WORTH_IT", 0.0)
    monkeypatch.setattr(_exact_sums, "_LEAST_BITS", {4: -math.inf, 8: -math.inf})


def exact_of(target, spec, bounds=(-1, 1)):
    """The bounds, the program with exact sums and its walk."""
    public = _prove_sensitivity.record_bounds(bounds, spec)
    program, sums = _prove_sensitivity.traced(target, spec, public), {}
    jaxpr = _prove_sensitivity._after_the_clamp(program, spec, public)
    _prove_sensitivity._walk(jaxpr, program, public, sums)
    assert sums
    exact = with_sums(public, sums)
    program = _prove_sensitivity.traced(target, spec, exact)
    jaxpr = _prove_sensitivity._after_the_clamp(program, spec, exact)
    return exact, program, jaxpr, *_prove_sensitivity._walk(jaxpr, program, exact)


PROVED = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "mean twice": lambda x: jnp.stack([x.mean(), (x**2).mean()]),
    "sum, also divided": lambda x: jnp.stack([x.sum(), x.sum() / 3]),
    "sum used twice": lambda x: (lambda s: jnp.stack([s / 3, s]))(x.sum()),
    "quotient of a sum and itself": lambda x: (lambda s: s / 3 + s)(x.sum()),
    "mean of exp": lambda x: jnp.exp(x).mean(),
    "density": lambda x: jnp.exp(-((TABLE[:, None] - x) ** 2)).mean(1),
    "columns": lambda x: (x[:, None] * TABLE).sum(0) / 7,
    "rows and columns": lambda x: (x[:, None] * TABLE).sum(),
    "centered": lambda x: jnp.abs(x - x.mean()).mean(),
    "variance": lambda x: ((x - x.mean()) ** 2).mean(),
    "variance by moments": lambda x: (x**2).mean() - x.mean() ** 2,
    "jnp.var": jnp.var,
    "variance, less one": lambda x: jnp.var(x * 0.3 + 7, ddof=1),
    "standard deviations": lambda x: (x[:, None] * TABLE + 2).std(0),
    "covariance": lambda x: jnp.cov(jnp.stack([x, jnp.exp(x), x**2], 1), rowvar=False),
    "variance and mean": lambda x: jnp.stack([jnp.var(x), x.mean()]),
    "variance of one column among two": lambda x: jnp.var(jnp.stack([x, 0 * x + 1], 1), axis=0),
    "sums by place": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(x),
    "rows by place and a start": lambda x: (
        jnp.ones((3, 3)).at[(x + 1).astype(int)].add(x[:, None] * TABLE)
    ),
    "sums at two places": lambda x: (
        jnp.zeros((3, 2)).at[(x + 1).astype(int), (x > 0).astype(int)].add(jnp.exp(x))
    ),
    "sums by clipped places": lambda x: (
        jnp.zeros(2).at[(2 * x + 1).astype(int)].add(x, mode="clip")
    ),
    "sums by place that drop some": lambda x: jnp.zeros(2).at[(x + 1).astype(int)].add(x) / 3,
    "log of a mean": lambda x: jnp.log(jnp.exp(x).mean()),
    "dot": lambda x: x @ TABLE,
    "dot divided": lambda x: x @ TABLE / 3,
    "gram": lambda x: (x[:, None] * TABLE).T @ (x[:, None] * TABLE) / N,
    "matrix": lambda x: jnp.outer(TABLE, TABLE) @ x,
    "cumulative sums": lambda x: jnp.cumsum(x),
    "cumulative sums from the end": lambda x: lax.cumsum(jnp.exp(x), reverse=True) / 3,
    "cumulative sums of columns": lambda x: jnp.cumsum(x[:, None] * TABLE, axis=0),
    "last of cumulative sums": lambda x: jnp.cumsum(x * 0.7)[-1],
    "cumulative sums of centered numbers": lambda x: jnp.cumsum(x - x.mean()),
    "cumulative sums of sorted numbers": lambda x: jnp.cumsum(jnp.sort(x)),
    "sums of windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"),
    "sums of padded windows": lambda x: lax.reduce_window(
        x[:, None] * TABLE, 0.0, lax.add, (2, 2), (1, 1), "SAME"
    ),
    "sums of windows with steps": lambda x: lax.reduce_window(
        jnp.exp(x), 0.0, lax.add, (2,), (2,), ((1, 2),), (2,), (2,)
    ),
    "lag products": lambda x: (x[1:] * x[:-1]).mean(),
    "trimmed": lambda x: jnp.sort(x)[1:].mean(),
    "distances": lambda x: jnp.abs(x[:, None] - x[None]).sum(),
    "weights by place": lambda x: jnp.zeros(3).at[(x + 1).astype(int)].add(TABLE),
    "steps of descent": lambda x: lax.fori_loop(
        0, 3, lambda i, w: w - 0.3 * jnp.tanh(w - x).mean(), jnp.float32(0.1)
    ),
    "sums of steps": lambda x: lax.scan(
        lambda c, t: (c + (x * t).sum() / 3, (x + t).sum()), jnp.float32(0), jnp.asarray(TABLE)
    ),
    "in a jit": jax.jit(lambda x: jax.nn.relu(x * 2 - 0.1).mean() * 3),
    "tiny": lambda x: (x * 1e-6).sum(),
    "one of many signs": lambda x: jnp.where(x > 0, x * 1e3, x).sum(),
}


def check_every_step(exact, program, jaxpr, walk, database, neighbor):
    """Every value of every step lies within its bounds."""
    keys = [step.key for step in walk.steps]

    @jax.jit
    @jax.vmap
    def values(x):
        found = {}
        inputs = [(exact.clamp(x), None)] * len(jaxpr.invars)
        _evaluate(jaxpr, program.jaxpr.consts, inputs, (), found, {})
        return [found.get(key) for key in keys]

    seen = 0
    for step, a, b in zip(walk.steps, values(database), values(neighbor), strict=True):
        if a is None:
            continue
        a, b, x = np.asarray(a, float), np.asarray(b, float), step.value
        for one in (a, b):
            assert (x.low <= one).all(), step
            assert (one <= x.high).all(), step
        each = np.maximum(x.changed.each, x.others.each)
        assert (np.abs(a - b) <= each).all(), step
        rest = 1 if x.axis is None else x.n - 1
        l1 = np.abs(a - b).reshape(len(a), -1).sum(1).max()
        assert l1 <= x.changed.l1 + rest * x.others.l1, step
        seen += step.operation.startswith("exact ")
    return seen


@pytest.mark.parametrize("name", PROVED)
def test_no_pair_lies_further_apart(name, always):
    exact, program, jaxpr, walk, outputs = exact_of(
        PROVED[name], jax.ShapeDtypeStruct((N,), jnp.float32)
    )
    first, second = all_pairs(VALUES)
    run = jax.jit(jax.vmap(exact.enforced_on(PROVED[name])))
    values, others = run(first), run(second)
    for norm in ("l1", "l2", "linf"):
        reached = distance(values, others, norm).max()
        assert reached <= norm_of(outputs, norm), norm
    # Steps of loops are proved, but not evaluated.
    assert check_every_step(exact, program, jaxpr, walk, first, second) or "step" in name
    assert any(step.operation.startswith("exact ") for step in walk.steps)
    plain = jax.vmap(jax.jit(PROVED[name]))(first)
    for one, other in zip(jax.tree.leaves(values), jax.tree.leaves(plain), strict=True):
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


@pytest.mark.parametrize("n", [1000, 30_000])
def test_every_step_of_large_programs_stays_within_its_bounds(n):
    rng = np.random.default_rng(SEED)
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)
    first = np.where(rng.random((6, n)) < 0.5, -1, rng.uniform(-1, 1, (6, n))).astype(np.float32)
    first[1], first[2] = 1.0, np.linspace(-1, 1, n)
    second = first.copy()
    second[:, 5] = np.where(first[:, 5] > 0, -1, 1)
    names = "sum", "mean", "mean of exp", "density", "centered", "columns", "jnp.var", "covariance"
    for name in names:
        proof = exact_of(PROVED[name], spec)
        assert check_every_step(*proof[:4], first, second)
        run = jax.jit(jax.vmap(proof[0].enforced_on(PROVED[name])))
        reached = distance(run(first), run(second), "l1").max()
        assert reached <= norm_of(proof[4], "l1")


def rounded(terms, kind):
    """The exact sum of terms on the grid, divided and rounded once, as a fraction and a float."""
    total = Fraction(0)
    for term in np.asarray(terms, float):
        total += Fraction(term)
    total /= Fraction(kind.divisor)
    return total


@pytest.mark.parametrize("n", [1, 7, 1000, 100_000])
def test_a_sum_is_the_nearest_float_whatever_the_order(n):
    rng = np.random.default_rng(0)
    grid = 2.0**-24
    for divisor in (1.0, float(n), 3.7):
        terms = (np.rint(rng.uniform(-1, 1, n) / grid) * grid).astype(np.float32)
        kind = ExactSum(0, float(np.float32(divisor)))
        found = np.asarray(kind(jnp.asarray(terms)))
        true = rounded(terms, kind)
        assert abs(Fraction(float(found)) - true) <= Fraction(float(np.spacing(np.abs(found)))) / 2
        for order in (rng.permutation(n), np.argsort(terms), np.argsort(-np.abs(terms))):
            assert np.asarray(kind(jnp.asarray(terms[order]))).tobytes() == found.tobytes()


def test_a_sum_in_float64_is_within_a_few_units():
    with jax.enable_x64(True):
        terms = np.random.default_rng(0).uniform(-1, 1, 50_000)
        found = float(ExactSum(0, 50_000.0)(jnp.asarray(terms)))
        assert abs(found - math.fsum(terms) / 50_000) <= 4 * 2.0**-53


def test_the_nearest_float_is_as_far_as_it_says():
    """Exact: numbers that lie farthest from floats, and the ends of their ranges."""
    unit = 2.0**-24
    for largest in (0.75, 1.0, 1 + 2.0**-30, 1 + 2.0**-24, 1.5, 2.0**20, 1e6):
        below = np.nextafter(np.float32(largest), np.float32(0)) if largest < 2**30 else largest
        power = 2.0 ** (math.frexp(largest)[1] - 1)
        numbers = [largest, power * (1 - unit / 2), power * (1 + unit), float(below) + 1e-12]
        off = max(abs(x - float(np.float32(x))) for x in numbers if x <= largest)
        found = float(_exact_sums.nearest(np.asarray(largest), unit))
        assert off <= found <= 2.0**-23 * largest


def test_rounding_to_the_grid_counts():
    """All terms are near the middle between points of the grid, so each moves by a whole step."""
    n, step = 2**20, 2.0**-42
    low, high = np.float32([0.4 * step, 0.6 * step])
    target = lambda x: ExactSum(0)(jnp.full(n, x.max()))  # noqa: E731
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    found = dpjax.prove_sensitivity(target, spec, bounds=(low, high), norm="l1")
    run = found.bounds.enforced_on(target)
    first, second = (float(run(np.float32([x] * N))) for x in (low, high))
    assert n * step == second - first <= found.value <= 1.3 * n * step


@pytest.mark.parametrize("target", ["sum", "by place"])
def test_terms_that_are_computed_differently_in_another_slot_are_counted(target):
    """Under add-or-remove-one, all terms of an exact sum move to other slots."""
    n = 1000
    sums = {
        "sum": lambda terms: ExactSum(1)(terms),
        "by place": lambda terms: ExactScatter(1, 1)(
            jnp.zeros(2, jnp.float32), jnp.zeros((n, 1), np.int32), terms
        ),
    }
    spec = PaddedRecords(
        jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.bool_)
    )

    def bound(compute):
        found = dpjax.prove_sensitivity(
            lambda d: sums[target](compute(d.records)), spec, bounds=(0, 1), norm="linf",
            relation=ADDED,
        )  # fmt: skip
        return found.value

    # A computed sine may be off by 8 units of 2^-24, so two of them differ by twice as much.
    assert bound(jnp.sin) >= math.sin(1) + 16 * n * 2.0**-24
    assert bound(lambda x: x) <= 1 + 2.0**-12


def test_sums_of_records_that_all_move_a_little_are_proved_nearly_exactly():
    n = 100_000
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)
    for target, truth in (
        (lambda x: jnp.abs(x - x.mean()).sum(), 2.0),
        (lambda x: (x[1:] * x[:-1]).sum(), 2.0),
        (lambda x: jnp.sort(x)[n // 10 : -n // 10].sum(), 1.0),
    ):
        found = dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm="l1")
        assert truth * 0.99 <= found.value <= truth * 1.05, found.explain()


def test_a_sum_in_a_loop_has_the_range_of_all_steps():
    n, factors = 100_000, jnp.array([0.5, -2, 1], jnp.float32)
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)
    target = lambda x: lax.scan(lambda c, t: (c + (x * t).sum(), None), 0.0, factors)[0]  # noqa: E731
    found = dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l1")
    assert "exact sum" in found.explain()
    assert 7 <= found.value <= 7 * 1.05


def test_names_say_which_sum_it_is():
    kinds = [
        *map(ExactSum, (-60, 0, 60), (1.0, 0.1, 1e6), ((0,), (0, 2), (1,))),
        ExactCumulative(3, 7.0, axis=1, reverse=True),
        ExactWindows(-2, 0.3, (3, 1), (2, 1), ((1, 0), (0, 0)), (1, 1), (2, 1)),
        ExactVariance(0.1, -3, 9.0, True),
        ExactScatter(4, 1),
    ]
    for kind in kinds:
        assert type(kind).named(kind.name) == kind
    for name in ("", "mean", "ExactSum_", "ExactSum_00", f"ExactSum_{b'(0)'.hex()}"):
        assert ExactSum.named(name) is None
    assert ExactSum.named(ExactCumulative(0).name) is None


def test_a_name_alone_proves_nothing():
    """A program that calls itself an exact sum is walked like any other."""
    kind = ExactSum(1)

    def forged(x):
        return 100 * x[0] + 0 * x.sum()

    forged.__name__ = kind.name
    found = dpjax.prove_sensitivity(
        lambda x: jax.jit(forged)(x), jax.ShapeDtypeStruct((N,), jnp.float32), bounds=(0, 1),
        norm="l1",
    )  # fmt: skip
    assert found.value >= 100


def test_terms_beyond_the_range_of_a_sum_have_no_proof():
    """Nor has a sum that is divided by a negative number."""
    spec = jax.ShapeDtypeStruct((N,), jnp.float32)
    for target in (lambda x: ExactSum(0)(3 * x), ExactSum(0, -2.0)):
        with pytest.raises(dpjax.proving.NoProofError, match="within its range"):
            dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm="l1")


def test_an_exact_sum_by_place_is_not_rounded_to_integers():
    """Then a sum of 0.99 and of 1 would be 0 and 1."""
    places, spec = jnp.zeros((N, 1), int), jax.ShapeDtypeStruct((N,), jnp.float32)
    target = lambda x: ExactScatter(0, 1)(jnp.zeros(1, int), places, x)  # noqa: E731
    with pytest.raises(dpjax.proving.NoProofError, match="updates have the dtype"):
        dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm="l1")


def test_factors_that_overflow_together_are_refused():
    spec = jax.ShapeDtypeStruct((1000,), jnp.float32)
    target = lambda x: ExactSum(-60)(x * 2.0**60)  # noqa: E731
    with pytest.raises(dpjax.proving.NoProofError, match="product that may overflow"):
        dpjax.prove_sensitivity(target, spec, bounds=(0, 2.0**-121), norm="l1")


def every_padded_pair():
    places = np.array(list(itertools.product(range(4), repeat=N)))
    held = np.stack([(places == k).sum(1) for k in range(3)], 1)
    lost = held[:, None] - held[None]
    pairs = np.argwhere((lost >= 0).all(-1) & (lost.sum(-1) == 1)).T
    values = np.array([*VALUES, 7.0], np.float32)
    return PaddedRecords(values[places], places < 3), pairs


ADDED_PROVED = {
    "sum": (lambda d: d.records.sum(), 1.01),
    "mean": (lambda d: (d.records * d.present).sum() / N, 1.01),
    "exp": (lambda d: (jnp.exp(d.records) * d.present).sum(), 1.01),
    "columns": (lambda d: (d.records[:, None] * TABLE).sum(0), 1.01),
    "dot": (lambda d: d.records @ d.present.astype(jnp.float32), 1.01),
    "by place": (
        lambda d: jnp.zeros(2).at[(d.records > 0).astype(int)].add(d.records),
        1.01,
    ),
    "gram": (lambda d: (d.records[:, None] * TABLE).T @ (d.records[:, None] * TABLE), 1.5),
    "cumulative sums of sorted records": (lambda d: jnp.cumsum(jnp.sort(d.records)), 2.1),
    "trimmed": (lambda d: jnp.sort(d.records)[1:].sum(), 1.1),
}


@pytest.mark.parametrize("name", ADDED_PROVED)
def test_no_pair_of_padded_records_lies_further_apart(name, always, monkeypatch):
    target, loose = ADDED_PROVED[name]
    chosen = _prove_sensitivity._proved
    seen = []

    def noted(*args):
        seen.append(chosen(*args))
        return seen[-1]

    monkeypatch.setattr(_prove_sensitivity, "_proved", noted)
    spec = PaddedRecords(
        jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.bool_)
    )
    dpjax.prove_sensitivity(target, spec, bounds=(-1, 1), norm="l1", relation=ADDED)
    _, exact = seen
    database, (first, second) = every_padded_pair()
    values = jax.jit(jax.vmap(exact.public.enforced_on(target)))(database)
    reached = distance(values[first], values[second], "l1").max()
    assert reached <= exact.bound <= loose * reached
    assert "exact " in exact.proof.explained()


def test_sums_by_place_of_many_are_proved_nearly_exactly():
    """With all records at one place, a last rounding takes two sums further apart than a record."""
    n, most = 100_000, 1.003
    g = np.zeros(n, np.int32)
    target = lambda d: jax.ops.segment_sum(d["v"], d["g"], 3)  # noqa: E731
    spec = {"v": jax.ShapeDtypeStruct((n,), jnp.float32), "g": g}
    bounds = {"v": (0, most), "g": (0, 2)}
    found = dpjax.prove_sensitivity(target, spec, bounds=bounds, norm="linf")
    assert "exact sums by place" in found.explain()
    run, farthest = jax.jit(found.bounds.enforced_on(target)), 0.0
    for v in np.linspace(0.9999 * most, most, 20).astype(np.float32):
        first = np.full(n, v)
        second = np.where(np.arange(n) == 7, np.float32(0), first)
        values = [np.asarray(run({"v": x, "g": g}), float) for x in (first, second)]
        farthest = max(farthest, float(np.abs(values[0] - values[1]).max()))
    assert most * (1 + 1e-4) < farthest <= found.value <= 1.01 * most
    v = np.random.default_rng(0).random(n, np.float32)
    x = {"v": v, "g": (np.arange(n) % 3).astype(np.int32)}
    order = np.random.default_rng(1).permutation(n)
    shuffled = {name: column[order] for name, column in x.items()}
    assert (np.asarray(run(x)) == np.asarray(run(shuffled))).all()
    exact = [v[k::3].astype(float).sum() for k in range(3)]
    assert np.asarray(run(x)) == pytest.approx(exact, rel=2**-24)


def of_axes_in_another_order(v):
    places = jnp.stack([(v > 0.3).astype(int), (v > 0.6).astype(int)], 1)
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1, 0))
    return lax.scatter_add(jnp.zeros((2, 2)), places, v, numbers)


def of_parts_of_rows(v):
    return jnp.zeros((2, 3)).at[(v > 0.3).astype(int), 1:3].add(v[:, None])


@pytest.mark.parametrize("target", [of_axes_in_another_order, of_parts_of_rows])
def test_sums_by_place_of_another_form_stay_what_they_are(target):
    """An exact scatter has one form only; in place of another form it would be another program."""
    spec = jax.ShapeDtypeStruct((1000,), jnp.float32)
    with pytest.raises(dpjax.proving.NoProofError, match="Write it in this form"):
        dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm="l1")


@pytest.mark.parametrize(("n", "most"), [(1000, 1.001), (100_000, 1.01), (1_000_000, 1.07)])
def test_a_mean_of_many_is_proved_nearly_exactly(n, most):
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)
    found = dpjax.prove_sensitivity(lambda x: x.mean(), spec, bounds=(0, 1), norm="l1")
    assert 1 <= n * found.value <= most
    assert "exact sum" in found.explain()
    grad = dpjax.prove_sensitivity(
        lambda d: d[0].T @ (jax.nn.sigmoid(d[0] @ TABLE) - d[1]) / n,
        (jax.ShapeDtypeStruct((n, 3), jnp.float32), spec), bounds=(Ball(1.0), (0, 1)), norm="linf",
    )  # fmt: skip
    assert n * grad.value <= 2 * most


@pytest.mark.parametrize(("n", "most"), [(1000, 1.0001), (100_000, 1.01), (1_000_000, 1.07)])
def test_a_variance_of_many_is_proved_nearly_exactly(n, most):
    spec = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    for target in (
        lambda x: x.var(0),
        lambda x: (x**2).mean(0) - x.mean(0) ** 2,
        lambda x: jnp.cov(x, rowvar=False),
    ):
        found = dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm="linf")
        assert 1 - 2 / n <= n * found.value <= most
        assert "exact variance" in found.explain()


def test_an_exact_variance_is_the_nearest_float():
    x = np.random.default_rng(0).uniform(5, 6, (100_000, 2)).astype(np.float32)
    exact = np.cov(x.astype(float), rowvar=False, bias=True)
    for target, expected in (
        (lambda x: x.var(0), np.diag(exact)),
        (lambda x: jnp.cov(x, rowvar=False, bias=True), exact),
    ):
        found = dpjax.prove_sensitivity(target, x, bounds=(0, 6), norm="linf")
        values = np.asarray(found.bounds.enforced_on(target)(x), float)
        assert np.abs(values - expected).max() <= 2.0**-28


@pytest.mark.parametrize("matrix", [False, True])
def test_pairs_that_an_exact_variance_moves_the_farthest_attain_its_bound(matrix):
    """All others in one corner: the bound holds, and no smaller one would."""
    n, spec = 5000, jax.ShapeDtypeStruct((5000, 2), jnp.float32)
    target = (lambda x: jnp.cov(x, rowvar=False)) if matrix else (lambda x: x.var(0, ddof=1))
    found = dpjax.prove_sensitivity(target, spec, bounds=(-3, 4), norm="linf")
    run = jax.jit(found.bounds.enforced_on(target))
    rows = np.full((2, n, 2), -3, np.float32)
    rows[1, 17] = 4
    first, second = np.asarray(run(rows[0]), float), np.asarray(run(rows[1]), float)
    reached = np.abs(first - second).max()
    assert reached <= found.value <= reached * (1 + 1e-3)


def test_a_variance_beyond_its_range_has_no_proof():
    spec, kind = jax.ShapeDtypeStruct((50,), jnp.float32), ExactVariance(0.0, 0, 50.0)
    assert dpjax.prove_sensitivity(kind, spec, bounds=(-0.9, 0.9), norm="l1").value < 0.07
    for bounds, other in (((-1.1, 0.9), kind), ((-0.9, 0.9), ExactVariance(0.5, 0, 50.0))):
        with pytest.raises(dpjax.proving.NoProofError, match="this exact variance supports"):
            dpjax.prove_sensitivity(other, spec, bounds=bounds, norm="l1")


def test_a_release_computes_the_program_that_was_proved():
    rows = np.random.default_rng(0).uniform(0, 1, 20_000).astype(np.float32)
    target = lambda x: x.mean()  # noqa: E731
    found = dpjax.prove_sensitivity(target, rows, bounds=(0, 1), norm="l1")
    assert isinstance(found.bounds, ExactBounds)
    again = pickle.loads(pickle.dumps(found))
    assert again.bounds == found.bounds
    private = dpjax.privatize(target, dpjax.laplace(again, epsilon=1e6))
    release = private(dpjax.random.seeded_key(0), rows)
    assert abs(float(release.value) - rows.astype(float).mean()) <= 2.0**-23
    other = dpjax.privatize(target, dpjax.laplace(again, epsilon=1e6))
    assert other(dpjax.random.seeded_key(0), rows[::-1].copy()).value == release.value
    with pytest.raises(ValueError, match="target"):
        dpjax.privatize(lambda x: x.max(), dpjax.laplace(found, epsilon=1.0))


@pytest.mark.parametrize("product", [False, True])
def test_a_column_with_small_numbers_keeps_its_digits(product):
    """On the grid of the large column, all numbers of the small one would be 0."""
    n, rng = 20_000, np.random.default_rng(0)
    small, large = rng.uniform(0, 1, n), rng.uniform(0, 1e12, n)
    records = {"small": np.float32(small), "large": np.float32(large)}

    def target(d):
        columns = jnp.stack([d["small"], d["large"]], 1)
        sums = jnp.ones(n, jnp.float32) @ columns if product else columns.sum(0)
        return sums / jnp.array([1, 1e12], jnp.float32)

    bounds = {"small": (0, 1), "large": (0, 1e12)}
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm="l1")
    computed = found.bounds.enforced_on(target)(records)
    assert np.asarray(computed) == pytest.approx([small.sum(), (large / 1e12).sum()], abs=0.1)


def test_columns_of_different_scales_are_summed_exactly():
    """The ranges of an age and of an income in cents differ by a factor of 10^5."""
    n, rng = 20_000, np.random.default_rng(0)
    ages, incomes = np.float32(rng.uniform(0, 1, n)), np.float32(rng.uniform(0, 1e5, n))
    records = {"age": ages, "income": incomes}

    def target(d):
        sums = jnp.stack([d["age"], d["income"]], 1).sum(0)
        return sums / jnp.array([1, 1e5], jnp.float32)

    bounds = {"age": (0, 1), "income": (0, 1e5)}
    found = dpjax.prove_sensitivity(target, records, bounds=bounds, norm="l1")
    assert 2 <= float(found.value) < 2.05
    computed = np.asarray(found.bounds.enforced_on(target)(records), float)
    sums = [ages.astype(float).sum(), incomes.astype(float).sum() / 1e5]
    np.testing.assert_allclose(computed, sums, rtol=2.0**-23)


def test_many_floats_of_64_bits_are_summed_exactly():
    """A term has 37 bits or fewer from 2^24 records on."""
    with jax.enable_x64(True):
        records = jax.ShapeDtypeStruct((10**8,), jnp.float64)
        found = dpjax.prove_sensitivity(jnp.sum, records, bounds=(0, 1), norm="l1")
    assert float(found.value) == pytest.approx(1, rel=1e-5)


def test_sums_of_the_columns_of_an_iteration_are_exact():
    """Iterating over an array is one operation of JAX 0.11; the program that is run has slices."""
    records = np.random.default_rng(0).uniform(0, 1, (20_000, 2)).astype(np.float32)

    def target(x):
        first, second = x.T
        return first.sum() + 2 * second.sum()

    found = dpjax.prove_sensitivity(target, records, bounds=(0, 1), norm="l1")
    assert 3 <= float(found.value) < 3.05
    computed = float(found.bounds.enforced_on(target)(records))
    assert computed == pytest.approx(records.astype(float).sum(0) @ [1, 2], rel=2.0**-22)


def test_sums_of_tiny_numbers_are_not_0():
    x = np.full(100_000, 1e-30, np.float32)
    found = dpjax.prove_sensitivity(jnp.sum, x, bounds=(0, 2e-30), norm="l1")
    assert float(found.bounds.enforced_on(jnp.sum)(x)) == pytest.approx(1e-25, rel=1e-3)


def test_the_search_of_a_report_sees_the_slope_of_an_exact_sum():
    n = 2000
    records = jax.ShapeDtypeStruct((n,), jnp.float32)

    def target(x):
        return jnp.mean(1 / (1 + 20 * (x - 0.3) ** 2))

    asked = {"bounds": (0, 1), "norm": "l1", "steps": 60, "restarts": 4}
    report = dpjax.sensitivity_report(dpjax.random.seeded_key(0), target, records, **asked)
    assert "exact sum" in report.proved.explain()
    # From 1 at .3 to 1 / 10.8 at 1.
    assert float(report.adversarial.distance) * n > 0.9
