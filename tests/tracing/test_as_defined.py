"""8 bits, bfloat16 and extrema of NaN are what XLA defines, also where jaxlib has YNNPACK."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import dpjax
from dpjax._tracing._programs import Program
from dpjax.sensitivity._norms import distance

# From some size on, a sum or an extremum and what feeds it may be computed elsewhere.
SHAPE = (400, 6, 2)
DTYPES = ["int8", "uint8"]
SUMS = {
    "sum": lambda v: v.sum((1, 2)),
    "sum of all": lambda v: v.sum(),
    "max": lambda v: v.max(2),
    "min": lambda v: v.min(0),
    "product": lambda v: v.reshape(len(v), -1) @ jnp.ones((12, 3), v.dtype),
}
ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": lambda a, b: -a,
    "square": lambda a, b: a * a,
    "abs": lambda a, b: abs(a),
    "sign": lambda a, b: (jnp if isinstance(a, jax.Array) else np).sign(a),
    "power": lambda a, b: a**3,
    "larger": lambda a, b: (jnp if isinstance(a, jax.Array) else np).maximum(a, b),
    "clip": lambda a, b: (jnp if isinstance(a, jax.Array) else np).clip(a, 3, 77),
    "quotient": lambda a, b: a // (b | 1),
    "remainder": lambda a, b: a % (b | 1),
    "a line": lambda a, b: a * a.dtype.type(3) + a.dtype.type(100) - b,
}
STRANGE = [np.nan, np.inf, -np.inf, 127.9, -128.9, 255.9, -0.9, 300.0, -1e30, 1e-30, -0.0, 2.5]


def of(dtype):
    """All of them, in a shape that is summed up elsewhere."""
    ends = np.iinfo(dtype)
    return np.resize(np.arange(ends.min, ends.max + 1), SHAPE).astype(dtype)


def run(function, *arguments):
    """As a release and the sampler compute it."""
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    return np.asarray(jax.jit(Program.trace("target", function, *specs))(*arguments))


def assert_sums_are_exact(function, arguments, expected):
    """Of the function's numbers, as floats."""
    expected = np.asarray(expected, np.float32)
    assert np.array_equal(run(function, *arguments), expected)
    for name, total in SUMS.items():
        said = run(lambda *xs, total=total: total(function(*xs).astype(jnp.float32)), *arguments)
        assert np.array_equal(said, np.asarray(total(expected))), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_sums_of_arithmetic_are_exact(name, dtype):
    compute = ARITHMETIC[name]
    a, b = of(dtype), np.random.default_rng(0).permuted(of(dtype))
    with np.errstate(all="ignore"):
        expected = compute(a, b)
    assert_sums_are_exact(compute, (a, b), expected)


def test_every_quotient_is_that_of_xla():
    """Also by 0, and of the least by -1."""
    for dtype in DTYPES:
        a, b = (x.reshape(-1) for x in np.meshgrid(*[np.unique(of(dtype))] * 2))
        for divide in (lax.div, lax.rem):
            assert np.array_equal(run(divide, a, b), jax.jit(divide)(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_sums_of_casts_from_floats_are_exact(source, dtype):
    x = np.random.default_rng(0).uniform(-300, 300, SHAPE)
    x.reshape(-1)[: len(STRANGE)] = STRANGE
    x = np.asarray(jnp.asarray(x).astype(source))
    # What XLA casts and returns, it casts as it is defined.
    expected = jax.jit(lambda x: x.astype(dtype))(x)
    ends = np.iinfo(dtype)
    whole = np.clip(np.trunc(x.astype("float32")), ends.min, ends.max)
    assert np.array_equal(expected, np.where(np.isnan(whole), 0, whole))
    assert_sums_are_exact(lambda x: x.astype(dtype), (x,), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [*DTYPES, "int16", "uint16", "int32", "uint32", "bool"])
def test_sums_of_casts_from_integers_are_exact(source, dtype):
    x = np.random.default_rng(0).integers(-(2**31), 2**31, SHAPE).astype(source)
    assert_sums_are_exact(lambda x: x.astype(dtype), (x,), x.astype(dtype))


def test_it_is_exact_in_float64_and_int64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).uniform(-300, 300, SHAPE)
        x.reshape(-1)[: len(STRANGE)] = STRANGE
        for dtype in DTYPES:
            assert_sums_are_exact(
                lambda x, d=dtype: x.astype(d), (x,), jnp.asarray(x).astype(dtype)
            )
            whole = np.random.default_rng(0).integers(-(2**63), 2**63, SHAPE)
            assert_sums_are_exact(lambda x, d=dtype: x.astype(d), (whole,), whole.astype(dtype))


def test_it_is_exact_inside_of_loops_and_under_vmap():
    def total(x):
        def step(carry, row):
            return carry + row, (row - carry).astype(jnp.float32).sum()

        last, sums = lax.scan(step, jnp.zeros_like(x[0]), x)
        return last, jax.lax.cond(x[0, 0] > 0, jnp.negative, jnp.square, x), sums

    rows = of("int8")
    program = Program.trace("target", total, jax.ShapeDtypeStruct(SHAPE[1:], jnp.int8))
    last, chosen, sums = jax.jit(jax.vmap(program))(rows)
    before = np.cumsum(rows, 1, dtype=np.int8) - rows
    assert np.array_equal(last, rows.sum(1, dtype=np.int8))
    assert np.array_equal(sums, (rows - before).astype(np.float32).sum(2))
    with np.errstate(all="ignore"):
        assert np.array_equal(chosen, np.where(rows[:, :1, :1] > 0, -rows, rows * rows))


def test_a_release_is_no_further_from_its_neighbor_than_was_proved():
    """Without words of 32 bits, jaxlib 0.10 leaves the cast out, and they are 3.8 apart."""

    def target(x):
        return x.astype(jnp.int8).astype(jnp.float32).max()

    here = np.full(5000, -1.9, np.float32)
    there = np.r_[here[1:], np.float32(1.9)]
    spec = jax.ShapeDtypeStruct(here.shape, jnp.float32)
    proved = dpjax.prove_sensitivity(target, spec, bounds=(-1.9, 1.9), norm="l1")
    private = dpjax.privatize(target, dpjax.laplace(proved, epsilon=1e6))
    key = dpjax.random.seeded_key(0)
    apart = float(private(key, there).value) - float(private(key, here).value)
    assert apart == pytest.approx(2, abs=1e-3)
    assert proved.value == pytest.approx(2, rel=1e-3)


EXTREMA = {
    "max": lambda v, w: v.max(-1),
    "min": lambda v, w: v.min(-1),
    "max of all": lambda v, w: v.max(),
    "max of columns": lambda v, w: abs(v).max(0),
    "sum of maxima": lambda v, w: (jnp if isinstance(v, jax.Array) else np).maximum(v, w).sum(-1),
    "sum of minima": lambda v, w: (jnp if isinstance(v, jax.Array) else np).minimum(v, w).sum(0),
    "relu": lambda v, w: (jnp if isinstance(v, jax.Array) else np).maximum(v, 0).sum(-1),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", EXTREMA)
def test_an_extremum_of_nan_is_nan(name, dtype):
    rng = np.random.default_rng(0)
    for shape in ((400, 12), (12, 400), (100, 40, 3), (3, 3)):
        v, w = (np.where(rng.random(shape) < 0.1, np.nan, rng.normal(size=shape)) for _ in "vw")
        v, w = (np.asarray(jnp.asarray(x).astype(dtype)) for x in (v, w))
        expected = EXTREMA[name](v.astype("float32"), w.astype("float32"))
        found = run(EXTREMA[name], v, w).astype("float32")
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        assert found == pytest.approx(expected, rel=0.1, abs=0.1, nan_ok=True)


def test_a_reduction_of_the_users_finds_nan():
    rows = np.where(np.arange(4800).reshape(400, 12) % 37 == 0, np.nan, 1).astype(np.float32)
    least = run(lambda v: lax.reduce(v, np.float32(np.inf), lax.min, (1,)), rows)
    assert np.array_equal(np.isnan(least), np.isnan(rows).any(1))


@pytest.mark.parametrize("norm", ["l1", "l2", "linf", "range", lambda v: jnp.max(jnp.abs(v))])
@pytest.mark.parametrize("dims", [2, 6, 40])
def test_a_value_that_is_nan_at_one_place_is_infinitely_far(dims, norm):
    """In linf and on a CPU, that place was left out: the sensitivity was that of the others."""

    def target(x):
        means = x.mean(0)
        return means.at[0].set(jnp.log(means[0]))  # NaN on half of all databases.

    def oracle(key, n):
        return jax.random.normal(key, (n, dims))

    with pytest.raises(ValueError, match="the estimated sensitivity is infinite"):
        dpjax.sample_sensitivity(
            jax.random.key(0), target, oracle, n=20, norm=norm, m=900, gamma=0.05
        )


@pytest.mark.parametrize("norm", ["l1", "l2", "linf", "range"])
def test_distances_of_nan_are_infinite(norm):
    values = np.where(np.arange(4800).reshape(400, 12) % 37 == 0, np.nan, 1).astype(np.float32)
    apart = jax.jit(jax.vmap(lambda x: distance(norm, x, jnp.zeros_like(x))))(values)
    assert np.array_equal(np.isinf(apart), np.isnan(values).any(1))


def test_distances_of_small_integers_do_not_wrap():
    for dtype in ("int8", "uint8", "int16", "uint16", "bool"):
        low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        x, y = np.random.default_rng(0).integers(low, high, (2, 400, 12), endpoint=True)
        apart = jax.jit(jax.vmap(lambda x, y: distance("linf", x, y)))
        assert np.array_equal(apart(x.astype(dtype), y.astype(dtype)), abs(x - y).max(1))


# jaxlib 0.10 read beyond arrays of bfloat16 in these: at best the sums were NaN.
OF_BFLOAT16 = {
    "exp": lambda v: jnp.exp(v.astype(jnp.float32) * 0.6875),
    "exp2": lambda v: jnp.exp2(v * jnp.bfloat16(0.6875)).astype(jnp.float32),
    "expm1": lambda v: jnp.expm1(v.astype(jnp.float32) / 3),
    "log1p": lambda v: jnp.log1p(v.astype(jnp.float32) * 0.5),
    "erf": lambda v: lax.erf(v.astype(jnp.float32) * 3),
    "sigmoid": lambda v: jax.nn.sigmoid(v * jnp.bfloat16(0.6875)).astype(jnp.float32),
    "power": lambda v: (v * jnp.bfloat16(0.5)) ** 3 + jnp.maximum(v, jnp.bfloat16(0.25)),
    "integers": lambda v: (v * 100).astype(jnp.int8).astype(jnp.float32),
    "product": lambda v: jnp.exp(
        jnp.einsum("ij,->ij", v, jnp.bfloat16(0.7), preferred_element_type=jnp.float32)
    ),
    "matrices of one row": lambda v: jnp.exp(
        jnp.matmul(v.reshape(-1, 1), jnp.full((1, 1), 0.7, v.dtype), preferred_element_type="f4")
    ).reshape(v.shape),
    "convolution": lambda v: jnp.exp(
        lax.conv_general_dilated(
            v[None, None],
            jnp.full((1, 1, 1, 1), 0.7, v.dtype),
            (1, 1),
            "SAME",
            preferred_element_type=jnp.float32,
        )[0, 0]
    ),
    "kept": lambda v: jnp.exp(v.astype(jnp.bfloat16).astype(jnp.float32) * 0.7),
}


def handed_over(function, x):
    """Whether numbers of bfloat16 are given to YNNPACK."""
    text = jax.jit(function).lower(x).compile().as_text()
    names = re.findall(r"calls=%([\w.]+),.*__ynn_fusion", text)
    bodies = dict(re.findall(r"^%([\w.]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    return any("bf16[" in bodies[name] for name in names)


@pytest.mark.parametrize("total", ["all", "columns", "rows"])
@pytest.mark.parametrize("name", OF_BFLOAT16)
def test_sums_of_bfloat16_are_those_of_float32(name, total):
    """Not run before it is known what is handed over: it may end the process."""
    axes = {"all": None, "columns": 0, "rows": 1}[total]

    def target(v):
        values = OF_BFLOAT16[name](v)
        return values.astype(jnp.float32).sum(axes), v.astype(jnp.bfloat16)

    x = np.random.default_rng(0).uniform(-1, 1, (500, 18)).astype(np.float32)
    x = x if name == "kept" else x.astype(jnp.bfloat16)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    program = Program.trace("target", target, spec)
    assert not handed_over(program, x)
    assert not handed_over(jax.vmap(program), np.stack([x] * 3))
    with jax.disable_jit():  # Operation by operation.
        expected, _ = target(jnp.asarray(x))
    # One operation of JAX may be several of XLA, which round to bfloat16 each.
    close = {"rtol": 2.0**-8 if name in ("exp2", "sigmoid", "power") else 2e-5, "atol": 1e-3}
    found, _ = jax.jit(program)(x)
    np.testing.assert_allclose(found, expected, **close)
    batch, _ = jax.jit(jax.vmap(program))(np.stack([x, x + 1]).astype(x.dtype))
    np.testing.assert_allclose(batch[0], expected, **close)


def test_bfloat16_stays_what_it_is_outside_of_cpus():
    program = Program.trace(
        "target", lambda v: jnp.exp(v) + v, jax.ShapeDtypeStruct((3,), "bfloat16")
    )
    lowered = jax.jit(program).trace(jnp.ones(3, "bfloat16")).lower(lowering_platforms=("cuda",))
    assert "bitcast" not in lowered.as_text()


def test_programs_without_bytes_are_left_alone():
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    program = Program.trace("target", lambda x: x.astype(jnp.int16).sum(), spec)
    again = jax.make_jaxpr(program)(spec)
    assert str(again.jaxpr.eqns[-1]) == str(program.jaxpr.jaxpr.eqns[-1])


def test_an_operation_may_have_no_outputs():
    """As what JAX leaves of a derivative."""

    def target(x):
        return jax.grad(lambda x: jnp.linalg.inv(jnp.outer(x, x) + jnp.eye(3)).sum())(x).max()

    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_allclose(run(target, x), target(x), rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # NumPy and JAX warn of them.
def test_casts_from_complex_numbers_are_those_of_their_real_parts():
    z = jnp.array([1.5, -2.5, 300, -300, 127.7], jnp.complex64)
    for dtype in DTYPES:
        cast = functools.partial(lax.convert_element_type, new_dtype=jnp.dtype(dtype))
        assert np.array_equal(run(cast, z), cast(z.real))


def test_zeros_keep_their_order():
    x, y = jnp.array([-0.0, 0.0, -0.0, 0.0]), jnp.array([0.0, -0.0, -0.0, 0.0])
    for extremum in (jnp.maximum, jnp.minimum):
        assert np.array_equal(np.signbit(run(extremum, x, y)), np.signbit(extremum(x, y)))


LOOPS = {
    "scan": lambda x: lax.scan(lambda c, a: (jnp.maximum(c, a), None), x[0], x)[0][None],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.maximum(c, x), x),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_inside_of_shard_map_keep_what_varies(loop):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    over = PartitionSpec("a")
    spread = jax.shard_map(LOOPS[loop], mesh=mesh, in_specs=over, out_specs=over)
    x = np.arange(4, dtype=np.float32)
    assert np.array_equal(run(lambda x: spread(x), x), LOOPS[loop](x))


def test_loops_over_spread_arrays_keep_where_these_are():
    with jax.set_mesh(jax.make_mesh((1,), ("a",), axis_types=(AxisType.Explicit,))):

        def largest(x):
            start = jax.reshard(x, PartitionSpec("a"))
            rows = jax.reshard(jnp.ones((2, 4)), PartitionSpec(None, "a"))
            return lax.scan(lambda c, row: (jnp.maximum(c, row), None), start, rows)[0]

        x = np.arange(4, dtype=np.float32)
        assert np.array_equal(run(largest, x), np.maximum(x, 1))
