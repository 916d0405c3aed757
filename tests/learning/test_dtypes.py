"""Clipping of numbers of every dtype, against forming every gradient in plain JAX.

What else reaches the layers: features and parameters of any dtype, mixed, or cast on the way;
complex numbers of the user, of a Fourier transform, or made of real ones; products in another
precision than their operands; indices of any dtype; and all of it under x64.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import learning
from dpjax.learning._per_example import _is_real

BATCH = 4
NARROW = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("bool", "int4", "uint4", "int8", "uint8", "int32", "uint32")
FEATURES = (*INTEGERS, *NARROW, "float16", "bfloat16", "float32", "complex64")
PARAMETERS = ("float32", "bfloat16", "float16", "float8_e5m2")
WIDE = ("int64", "uint64", "float64", "complex128")


def real(x):
    return jnp.real(x) * jnp.float32(1)


# What a loss makes of six features.
READINGS = {
    "as they are": lambda x: x,
    "real part": jnp.real,
    "conjugate": jnp.conj,
    "spectrum": lambda x: jnp.fft.fft(x * jnp.float32(1)),
    "half a spectrum": lambda x: jnp.fft.rfft(jnp.tile(real(x), 2))[:6],
    "turned": lambda x: x * jnp.complex64(1 - 2j),
    "joined": lambda x: lax.complex(real(x), -real(x)),
    "codes": lambda x: jnp.real(x).astype(jnp.int8),
    "narrowed": lambda x: jnp.real(x).astype(jnp.float8_e4m3fn),
    "stopped": lax.stop_gradient,
}


def product_in(dtype):
    """A product of two dtypes, neither of which is cast."""
    return lambda w, x: lax.dot_general(
        x, w, (((0,), (0,)), ((), ())), preferred_element_type=dtype
    )


def convolved(w, x):
    numbers = ("NWC", "WIO", "NWC")
    same = jnp.promote_types(w.dtype, x.dtype)
    x = x.astype(same)[None, :, None]
    return lax.conv_general_dilated(x, w.astype(same), (2,), "VALID", dimension_numbers=numbers)


def row_numbers(x, dtype):
    return jnp.abs(real(x)).astype(dtype)


# Where they meet a parameter, and its shape.
MEETINGS = {
    "matmul": ((6, 3), lambda w, x: x @ w),
    "matvec": ((6, 3), lambda w, x: w.T @ x),
    "einsum": ((3, 6), lambda w, x: jnp.einsum("i,ji->j", x, w)),
    "vdot": ((6,), lambda w, x: jnp.vdot(x, w)),
    "positions": ((3, 2), lambda w, x: x.reshape(2, 3) @ w),
    "half precision": ((6, 3), product_in(jnp.bfloat16)),
    "single precision": ((6, 3), product_in(jnp.float32)),
    "complex product": ((6, 3), product_in(jnp.complex64)),
    "narrow weights": ((6, 3), lambda w, x: x @ w.astype(jnp.float8_e4m3fn)),
    "complex weights": ((6, 3), lambda w, x: x @ w.astype(jnp.complex64)),
    "joined weights": ((6, 3), lambda w, x: x @ lax.complex(real(w), real(w))),
    "transformed weights": ((6, 3), lambda w, x: jnp.fft.fft(real(w), axis=0).T @ x),
    "convolve": ((3,), lambda w, x: jnp.convolve(x, w)),
    "convolution": ((3, 1, 2), convolved),
    "entries": ((6,), lambda w, x: x * w),
    "rows": ((5, 3), lambda w, x: w[row_numbers(x, jnp.uint8)]),
    "a row": ((5, 3), lambda w, x: jnp.take(w, row_numbers(x, jnp.uint32)[0], axis=0)),
}

# What the loss is of the outcome.
ENDS = {
    "real part": lambda y: jnp.sum(jnp.sin(jnp.real(y))),
    "imaginary part": lambda y: jnp.sum(jnp.cos(jnp.real(y * jnp.complex64(1 - 2j)))),
    "modulus": lambda y: jnp.sum(jnp.sqrt(1 + jnp.square(jnp.abs(y)))),
}


@pytest.fixture
def promotion():
    """Dtypes that meet are promoted, as JAX does unless told otherwise."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def drawn(rng, shape, dtype):
    numbers = 3 * rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        numbers = numbers + 3j * rng.normal(size=shape)
    elif dtype == "bool" or jnp.issubdtype(dtype, jnp.unsignedinteger):
        numbers = np.maximum(numbers, 0)
    return jnp.asarray(numbers).astype(dtype)


def program(seed, features, reading, meeting, end, parameters):
    """Its name, its loss, a parameter and a batch."""
    rng, (shape, meet) = np.random.default_rng(seed), MEETINGS[meeting]

    def loss(w, x):
        y = meet(w, READINGS[reading](x))
        return ENDS[end](y.astype(jnp.float32) if str(y.dtype) in NARROW else y * jnp.float32(1))

    name = (features, reading, meeting, end, parameters)
    return name, loss, drawn(rng, shape, parameters), drawn(rng, (BATCH, 6), features)


def is_jax(loss, w, x):
    """Whether JAX itself differentiates a program: some dtypes do not meet without a cast."""
    try:
        jax.eval_shape(jax.grad(loss), w, x[0])
    except (TypeError, jax.dtypes.TypePromotionError):
        return False
    return True


def random_program(seed, features, meeting):
    rng = np.random.default_rng(seed)
    while True:
        reading, end, parameters = (str(rng.choice(list(x))) for x in (READINGS, ENDS, PARAMETERS))
        made = program(seed, features, reading, meeting, end, parameters)
        if is_jax(*made[1:]):
            return made


def each_alone(loss, w, x):
    """Each example's gradient, as JAX forms it and clipped; the clip norm and the bound."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(w, x)
    gradients = gradients.astype(np.promote_types(gradients.dtype, np.float32))
    norms = jnp.linalg.norm(gradients.reshape(BATCH, -1), axis=1)
    clip_norm = jnp.clip(jnp.median(norms), 1e-3, 1e3)
    clipped = learning.clipped_gradients(loss, clip_norm=1.0)

    def of_one(example):
        found = clipped(w, example[None], True, clip_norm=clip_norm)
        return found.value, found.norm_bound

    sums, norm_bounds = jax.vmap(of_one)(x)
    return gradients, sums, clip_norm, norm_bounds[0]


def check(programs):
    """In one program, for the sake of time."""
    names, losses, *given = zip(*programs, strict=True)
    outcomes = jax.jit(lambda *given: list(map(each_alone, losses, *given)))(*given)
    for name, (gradients, found, clip_norm, bound) in zip(names, outcomes, strict=True):
        gradients, found = (np.asarray(x, float).reshape(BATCH, -1) for x in (gradients, found))
        assert np.all(np.linalg.norm(found, axis=1) <= bound), name
        norms = np.maximum(np.linalg.norm(gradients, axis=1), 1e-30)
        expected = gradients * np.minimum(1, clip_norm / norms)[:, None]
        exact = name[-1] in ("float32", "float64") and name[2][:4] not in ("half", "narr")
        np.testing.assert_allclose(found, expected, atol=(1e-5 if exact else 0.3) * clip_norm)


@pytest.mark.parametrize(
    ("operation", "x", "expected"),
    [
        (jnp.real, jnp.complex64(1j), False),
        (lambda x: lax.complex(x, x), jnp.float32(1), False),
        (lambda x: x.astype(jnp.int32), jnp.float32(1), False),
        (lambda x: x.astype(jnp.float32), jnp.int32(1), True),
        (lambda x: x.astype(jnp.bfloat16), True, True),
    ],
)
def test_layers_take_and_give_real_numbers(operation, x, expected):
    (equation,) = jax.make_jaxpr(operation)(jnp.asarray(x)).eqns
    assert _is_real(equation) == expected


# JAX warns users of imaginary parts that get lost, and goes on.
@pytest.mark.filterwarnings("ignore:Casting from complex")
def test_complex_numbers_are_clipped_wherever_they_come_from(promotion):
    """A norm is of |x|^2, which the square of a complex number is not."""
    meetings = ("matmul", "matvec", "einsum", "vdot", "complex weights", "convolve", "entries")
    met = [("complex64", "as they are", meeting) for meeting in meetings]
    met += [("float32", "spectrum", "matmul"), ("float32", "as they are", "complex product")]
    ends = list(ENDS)
    check([program(i, *way, ends[i % 3], "float32") for i, way in enumerate(met)])


def of_features(dtypes, parameters):
    """Features as they are, at a dense layer."""
    return [
        program(
            i,
            dtype,
            "as they are",
            "matmul" if dtype.startswith("complex") else "single precision",
            "modulus",
            parameters,
        )
        for i, dtype in enumerate(dtypes)
    ]


def test_features_of_every_dtype_meet_a_dense_layer(promotion):
    programs = of_features(FEATURES, "float32")
    check(programs)
    ways = {}
    for (features, *_), loss, w, x in programs:
        if features in ("bool", "uint8", "complex64"):
            text = learning.clipped_gradients(loss, clip_norm=1.0).explain(w, x[0])
            ways[features] = text.split()[0]
    assert ways == {"bool": "dense:", "uint8": "dense:", "complex64": "formed"}


def test_features_meet_a_dense_layer_under_x64(promotion, x64):
    wide = of_features(WIDE, "float32")
    kernel = program(0, "float64", "as they are", "convolution", "real part", "float32")
    check([*wide, *of_features(("int8", "complex64"), "float64"), kernel])


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
def test_programs_at_random(features, promotion):
    """Each way in which a parameter is met, with a reading, an end and a dtype of any kind."""
    check([random_program(seed, features, meeting) for seed, meeting in enumerate(MEETINGS)])


@pytest.mark.slow
@pytest.mark.parametrize("features", [*FEATURES, *WIDE])
def test_programs_at_random_under_x64(features, promotion, x64):
    check([random_program(100 + seed, features, meeting) for seed, meeting in enumerate(MEETINGS)])


@pytest.mark.slow
def test_the_other_tests_of_this_folder_pass_under_x64(environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).parent],
        env=environment(JAX_ENABLE_X64="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout


def weighted(w, x):
    return jnp.sum(w * x)


def test_rounding_is_that_of_the_narrowest_parameter(promotion, x64):
    """In squares just above half an ulp of their sum float32 loses most, whatever x64 would hold.

    What else has two precisions: a model with parameters of both, and features of the other one.
    """
    clipped = learning.clipped_gradients(weighted, clip_norm=1.0)
    tail = 2.0 ** np.array([[-12.5], [-12.6], [-12.0], [-11.5]]) * 0.9999
    examples = np.repeat(tail, 8192, axis=1)
    examples[:, ::128] = 1
    examples = jnp.asarray(examples, jnp.float32)

    def of_one(x):
        found = clipped(jnp.zeros(8192, jnp.float32), x[None], True)
        return found.value, found.norm_bound

    sums, norm_bounds = jax.vmap(of_one)(examples)
    assert sums.dtype == jnp.float32
    assert np.all(np.linalg.norm(np.asarray(sums, float), axis=1) <= norm_bounds)

    def both(p, x):
        return weighted(p["narrow"], x.astype(jnp.float32)).astype(x.dtype) + weighted(p["wide"], x)

    narrow, wide = jnp.zeros(3, jnp.float32), jnp.zeros(3, jnp.float64)
    found = learning.clipped_gradients(both, clip_norm=1.0)(
        {"narrow": narrow, "wide": wide}, jnp.ones((2, 3), jnp.float64), True
    )
    assert found.value["narrow"].dtype == jnp.float32
    assert found.value["wide"].dtype == jnp.float64
    alone = clipped(narrow, jnp.ones((2, 3), jnp.float32), True)
    assert found.norm_bound >= alone.norm_bound > 1 + 1e-6


@pytest.mark.parametrize(
    "features", ["float64", *(pytest.param(x, marks=pytest.mark.slow) for x in ("float32", "bool"))]
)
def test_microbatches_of_float32_under_x64(features, promotion, x64):
    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2).astype(jnp.float32)

    parameters = {"w": jnp.ones((6, 3), jnp.float32), "b": jnp.ones(3, jnp.float32)}
    examples = drawn(np.random.default_rng(0), (5, 6), features)
    whole, parts = (
        learning.clipped_gradients(loss, clip_norm=0.1, microbatch_size=size)(
            parameters, examples, True
        )
        for size in (5, 2)
    )
    for one, other in zip(*map(jax.tree.leaves, (whole.value, parts.value)), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=1e-7)
