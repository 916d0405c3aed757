"""Convolutions and pooling, on all pairs of records over three values a coordinate."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, bounds_of
from dpjax.proving import Ball, NoProofError, _prove_sensitivity
from dpjax.release import _privatize
from random_programs import distance

N, PLACES, FEATURES = 2, 2, 2
RECORDS = jax.ShapeDtypeStruct((N, PLACES, FEATURES), jnp.float32)
WIDE = np.array([[[1.0, -2.0, 0.5], [0.3, 1.0, 0.0]], [[-1.0, 0.5, 2.0], [1.0, 1.0, -0.7]]])
WIDE = WIDE.astype(np.float32)
DEEP = np.array([[[1.0, -2.0]], [[0.5, 0.7]]], np.float32)


def convolved(x, kernel, pads=((1, 1),), steps=(1,), layout=("NWC", "WIO", "NWC"), **more):
    return lax.conv_general_dilated(
        x, jnp.asarray(kernel, x.dtype), steps, pads, dimension_numbers=layout, **more
    )


def pooled(x, start, reduce, window=(1, 2, 1), steps=(1, 1, 1), pads="SAME", **more):
    return lax.reduce_window(x, np.array(start, x.dtype), reduce, window, steps, pads, **more)


PROGRAMS = {
    "windows": lambda x: convolved(x, WIDE),
    "no padding": lambda x: convolved(x, WIDE, "VALID"),
    "steps": lambda x: convolved(x, WIDE, ((2, 3),), (2,)),
    "gaps between records' places": lambda x: convolved(x, WIDE, ((1, 0),), lhs_dilation=(2,)),
    "gaps in the kernel": lambda x: convolved(x, WIDE, ((2, 1),), rhs_dilation=(2,)),
    "gaps and steps": lambda x: convolved(
        x, WIDE, ((0, 5),), (2,), lhs_dilation=(2,), rhs_dilation=(3,)
    ),
    "groups": lambda x: convolved(x, DEEP, feature_group_count=2),
    "one place": lambda x: convolved(x, WIDE[:1], ((0, 0),)),
    "two axes": lambda x: convolved(
        x[..., None], WIDE[..., None, :], ((1, 0), (0, 1)), (1, 1), ("NHWC", "HWIO", "NHWC")
    ),
    "other layouts": lambda x: convolved(x, WIDE, layout=("NCW", "IOW", "CWN")),
    "records as places": lambda x: convolved(x, WIDE, layout=("WNC", "WIO", "NWC")),
    "records as features": lambda x: convolved(x, WIDE, layout=("CWN", "WIO", "NWC")),
    "integers": lambda x: convolved((2 * x).astype(int), np.round(WIDE)),
    "a computed kernel": lambda x: convolved(x, jnp.tanh(jnp.asarray(WIDE))),
    "record by record": jax.vmap(lambda x: convolved(x[None], WIDE)),
    "jnp.convolve": jax.vmap(lambda x: jnp.convolve(x[:, 0], WIDE[0, 0, :2])),
    "jnp.convolve over records": lambda x: jnp.convolve(x[:, 0, 0], WIDE[0, 0, :2]),
    "of sorted records": lambda x: convolved(jnp.sort(x, 0), WIDE),
    "a layer": lambda x: jax.nn.relu(convolved(x, WIDE) + 0.25).max(1).mean(0),
    "sum": lambda x: pooled(x, 0, lax.add),
    "sum of large windows": lambda x: pooled(x, 0, lax.add, (1, 3, 2), (1, 2, 1)),
    "sum with gaps": lambda x: pooled(
        x, 0, lax.add, pads=((0, 0), (1, 2), (0, 0)), base_dilation=(1, 2, 1),
        window_dilation=(1, 3, 1),
    ),
    "sum of records": lambda x: pooled(x, 0, lax.add, (2, 1, 1)),
    "cumulative sum": lambda x: pooled(x, 0, lax.add, (1, 2, 1), pads=((0, 0), (1, 0), (0, 0))),
    "maximum": lambda x: pooled(x, -np.inf, lax.max),
    "maximum beyond the ends": lambda x: pooled(
        x, -np.inf, lax.max, pads=((0, 0), (1, 1), (0, 0))
    ),
    "maximum of all": lambda x: pooled(x, -np.inf, lax.max, (1, 3, 3)),
    "maximum of records": lambda x: pooled(x, -np.inf, lax.max, (2, 1, 1)),
    "minimum": lambda x: pooled(x, np.inf, lax.min, (1, 2, 1), (1, 2, 1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def moved():
    """The values of all programs on all pairs of first records, beside a second one."""
    rows = np.array(list(itertools.product(VALUES, repeat=PLACES * FEATURES)), np.float32)
    rows = rows.reshape(-1, PLACES, FEATURES)
    fixed = np.broadcast_to(rows[37], rows.shape)
    run = jax.jit(jax.vmap(lambda x: {name: target(x) for name, target in PROGRAMS.items()}))
    return run(np.stack([rows, fixed], 1)), run(np.stack([fixed, rows], 1))


@pytest.mark.parametrize("bounds", [(-1, 1), Ball(2.0)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_pair_lies_further_apart(program, bounds, moved):
    found = bounds_of(PROGRAMS[program], RECORDS, bounds)
    for values in moved:
        all_ = np.asarray(values[program], float)
        for norm, bound in found.items():
            farthest = max(distance(all_, np.broadcast_to(x, all_.shape), norm).max() for x in all_)
            assert 0 < farthest <= bound * (1 + 1e-6)


def matrix_of(target, shape):
    """That of a linear map of one record."""
    records = np.eye(np.prod(shape), dtype=np.float32).reshape(-1, *shape)
    return np.asarray(jax.jit(target)(records), float).reshape(len(records), -1)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("gap", [1, 2])
def test_norms_of_one_record_are_nearly_exact(steps, gap):
    kernel = np.random.default_rng(0).normal(size=(3, 3, 2, 3))
    layout = ("NHWC", "HWIO", "NHWC")

    def target(x):
        pads = ((3, 3), (3, 3))
        return convolved(x, kernel, pads, (steps, steps), layout, rhs_dilation=(gap, gap))

    matrix, spec = matrix_of(target, (8, 8, 2)), jax.ShapeDtypeStruct((1, 8, 8, 2), jnp.float32)
    found = bounds_of(target, spec, Ball(0.5))
    spectral = np.linalg.norm(matrix, 2)
    assert spectral <= found["l2"] <= 1.25 * spectral  # Of all sizes: 8 places are few.
    assert found["linf"] <= found["l2"]
    cube = bounds_of(target, spec, (0, 1))
    assert cube["linf"] == pytest.approx(np.abs(matrix).sum(0).max(), rel=1e-4)


def test_a_kernel_that_takes_long_to_transform_has_the_norm_of_its_sums():
    kernel = np.ones((2, 32, 64), np.float32)
    spec = jax.ShapeDtypeStruct((1, 2000, 32), jnp.float32)
    found = bounds_of(lambda x: convolved(x, kernel, "VALID"), spec, Ball(0.5))
    assert 2 * np.sqrt(32 * 64) - 0.1 <= found["l2"] <= 2 * np.sqrt(32 * 64) * 1.02


@pytest.mark.parametrize("reduce", ["convolution", "window"])
def test_sums_are_rounded_by_each_term(reduce):
    """All additions round numbers near 2^12 times the width that a record has."""
    places, ends = 1024, (4096.0, 4097.0)
    spec = jax.ShapeDtypeStruct((1, places, 1), jnp.float32)

    def target(x):
        if reduce == "window":
            return pooled(x, 0, lax.add, (1, places, 1), pads="VALID")
        return convolved(x, np.ones((places, 1, 1)), "VALID")

    found = bounds_of(target, spec, ends)["linf"]
    error = places * 2.0**-24 * places * ends[1]
    assert found >= min(places + 2 * error, places * ends[1])
    rng = np.random.default_rng(0)
    data = rng.uniform(*ends, (64, 1, places, 1)).astype(np.float32)
    values = np.asarray(jax.jit(jax.vmap(target))(data), float)
    exact = data.astype(float).sum((1, 2, 3)).reshape(values.shape)
    assert np.abs(values - exact).max() <= error


def test_what_is_added_to_a_convolution_is_rounded_by_each_term():
    spec, kernel = jax.ShapeDtypeStruct((1, 500, 2), jnp.float32), np.ones((400, 2, 3))
    alone, more = (
        bounds_of(lambda x, by=by: convolved(x, kernel, "VALID") + by, spec, (0, 1))["linf"]
        for by in (0.0, 9.0)
    )
    assert more >= alone + 2 * 800 * 2.0**-24 * 9


def test_factors_of_a_convolution_are_those_of_a_product():
    spec, kernel = jax.ShapeDtypeStruct((1, 3, 1), jnp.float32), np.full((2, 1, 1), 2.0**45)

    def target(x):
        return convolved(x * 2.0**60, kernel) * 2.0**-16

    with pytest.raises(NoProofError, match="may combine"):
        dpjax.prove_sensitivity(target, spec, bounds=(0, 2.0**-100), norm="l1")


REFUSED = {
    "finite kernel": lambda x: convolved(x, x.sum(0)[..., None]),
    "batch_group_count": lambda x: convolved(x, WIDE[:, :, :2], batch_group_count=2),
    "highest": lambda x: convolved(x, WIDE, precision="default"),
    "same dtype": lambda x: convolved(
        x.astype(jnp.int8), np.ones((2, 2, 1)), preferred_element_type=jnp.int32
    ),
    "only padding": lambda x: pooled(x, -np.inf, lax.max, pads=((0, 0), (-9, 12), (0, 0))),
    "infinite": lambda x: pooled(x, -np.inf, lax.max, pads=((0, 0), (2, 2), (0, 0))),
    "overflow": lambda x: convolved((100 * x).astype(jnp.int8), np.ones((2, 2, 1))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_rule_is_refused_with_its_line(why):
    with pytest.raises(NoProofError, match=why) as refusal:
        dpjax.prove_sensitivity(REFUSED[why], RECORDS, bounds=(-1, 1), norm="l1")
    assert "test_windows.py" in str(refusal.value)
    assert "Remedy" in str(refusal.value)


def test_a_release_of_a_convolution_is_one_of_a_cpu(monkeypatch):
    target = lambda x: convolved(x, WIDE).mean(0)  # noqa: E731
    found = dpjax.prove_sensitivity(target, RECORDS, bounds=(-1, 1), norm="l1")
    assert "conv_general_dilated" in found.explain()
    private = dpjax.privatize(target, dpjax.laplace(found, 1.0))
    private(dpjax.random.seeded_key(0), jnp.zeros(RECORDS.shape))

    class Elsewhere:
        def devices(self):
            return {type("Device", (), {"platform": "gpu"})()}

    _privatize._check_platform(Elsewhere())
    with pytest.raises(ValueError, match="only on CPUs, for a target with a convolution"):
        _privatize._check_platform(Elsewhere(), convolves=True)
    asked = []
    monkeypatch.setattr(
        _privatize, "_check_platform", lambda records, convolves: asked.append(convolves)
    )
    private(dpjax.random.seeded_key(0), jnp.zeros(RECORDS.shape))
    assert asked == [True]


def test_large_windows_with_padding_contain_zeros():
    """The first window of 1,000 records has 500 of them, and 500 zeros."""
    spec = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    target = lambda x: lax.reduce_window(x, 0.0, lax.add, (1000,), (1,), "SAME")  # noqa: E731
    public = _prove_sensitivity.record_bounds((1, 2), spec)
    program = _prove_sensitivity.traced(target, spec, public)
    jaxpr = _prove_sensitivity._after_the_clamp(program, spec, public)
    (found,) = _prove_sensitivity._walk(jaxpr, program, public)[1]
    assert found.low.min() <= 500 < 2000 <= found.high.max()
    exact = dpjax.prove_sensitivity(target, spec, bounds=(1, 2), norm="l2")
    assert math.sqrt(1000) <= exact.value <= math.sqrt(1000) * 1.01
    assert "exact sums of windows" in exact.explain()


def test_a_convolution_over_records_moves_by_the_norm_of_its_kernel():
    spec = jax.ShapeDtypeStruct((50,), jnp.float32)
    kernel = np.array([1, -3, 2, 0.5], np.float32)
    target = lambda x: jnp.convolve(x, kernel)  # noqa: E731
    for norm, order in (("l1", 1), ("l2", 2), ("linf", np.inf)):
        found = dpjax.prove_sensitivity(target, spec, bounds=(0, 1), norm=norm)
        length = np.linalg.norm(kernel, order)
        assert length <= found.value <= length * 1.0001
