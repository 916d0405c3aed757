"""Floats of 16 bits, with each of their roundings or without it: a compiler may drop any."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of
from dpjax.proving import NoProofError
from dpjax.proving import _rounding as rounding
from random_programs import distance

RECORDS = jax.ShapeDtypeStruct((N,), jnp.float32)
MATRIX = np.array([[1.3, -0.7, 0.1]], np.float32)
DTYPES = [jnp.bfloat16, jnp.float16]


def product(a, b):
    """In float32, of operands in 16 bits or with more digits than these hold."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def same(first, second, operation, x):
    """One number, of which a compiler may keep more digits in one place."""
    return operation(first(x), second(x))


# A program with two casts that may be dropped. A number that it uses twice may be cast twice.
PROGRAMS = {
    "there and back": lambda x, f, g: f(0.3 * x),
    "twice": lambda x, f, g: g(0.9 * f(0.3 * x)),
    "mean": lambda x, f, g: f(0.3 * x).mean(),
    "square": lambda x, f, g: same(f, g, jnp.multiply, 0.3 * x),
    "at most itself": lambda x, f, g: same(f, g, jnp.less_equal, 0.3 * x),
    "a level": lambda x, f, g: f(0.3 * x) > 0.075,
    "residual": lambda x, f, g: x - f(x * 0.999),
    "row by matrix": lambda x, f, g: product(f(0.3 * x)[:, None], g(MATRIX)),
    "gram": lambda x, f, g: same(
        f, g, lambda a, b: product(a.T, b), x[:, None] * MATRIX
    ),
    "sum by ones": lambda x, f, g: product(f(0.3 * x), g(np.ones(N, np.float32))),
    "counts": lambda x, f, g: product(f((x > 0.1).astype(jnp.float32)), g(np.ones(N, np.float32))),
    "layer": lambda x, f, g: jnp.tanh(product(f(x[:, None]), g(MATRIX)) + 0.1).sum(1).max(),
    "bins": lambda x, f, g: (f(0.3 * x)[:, None] == g(np.array([[0.3, 0.075]], np.float32))).sum(0),
}  # fmt: skip


def rounded(dtype):
    return lambda x: jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32)


def kept(x):
    return jnp.asarray(x, jnp.float32)


def proved(program, dtype):
    """The bounds of a program in which products take operands in 16 bits, and one value is one."""
    memory = {}

    def cast(x):
        if id(x) not in memory:
            memory[id(x)] = (lax.convert_element_type(x, dtype).astype(jnp.float32), x)
        return memory[id(x)][0]

    return bounds_of(lambda x: PROGRAMS[program](x, cast, cast), RECORDS, (-1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_pair_lies_further_apart_with_any_rounding_or_without(program, dtype):
    found = proved(program, dtype)
    first, second = all_pairs(VALUES)
    farthest = dict.fromkeys(found, 0.0)
    for casts in itertools.product((rounded(dtype), kept), repeat=2):
        run = jax.vmap(lambda x, casts=casts: PROGRAMS[program](x, *casts))
        moved = run(first), run(second)
        for norm in found:
            farthest[norm] = max(farthest[norm], distance(*moved, norm).max())
    for norm, bound in found.items():
        assert 0 < farthest[norm] <= bound


def test_a_product_in_16_bits_is_that_of_its_operands_and_little_more():
    def target(x):
        rows = x[:, None].astype(jnp.bfloat16)
        return product(rows, jnp.asarray(MATRIX, jnp.bfloat16)).mean(0)

    records = jax.ShapeDtypeStruct((100,), jnp.float32)
    found = bounds_of(target, records, (0, 1))
    truth = np.abs(MATRIX).sum() / 100
    assert truth <= found["l1"] <= truth * 1.04
    assert found["l2"] <= np.linalg.norm(MATRIX) / 100 * 1.04
    assert (
        "dot_general"
        in dpjax.global_sensitivity(target, records, bounds=(0, 1), norm="l2").explain()
    )


def test_tensor_cores_cut_digits():
    """Each of 2^17 terms may lose 2 u of the largest one."""
    terms = 2**17
    records = jax.ShapeDtypeStruct((2, terms), jnp.float32)
    target = lambda x: product(x.astype(jnp.bfloat16), jnp.ones((terms, 2), jnp.bfloat16))  # noqa: E731
    assert bounds_of(target, records, (0, 1))["linf"] >= terms + 2 * 2 * 2.0**-24 * terms**2


def test_integers_that_16_bits_hold_are_exact():
    counts = lambda x: (jnp.round(x).astype(jnp.bfloat16)).astype(jnp.float32).sum()  # noqa: E731
    records = jax.ShapeDtypeStruct((100,), jnp.float32)
    assert bounds_of(counts, records, (0, 256))["linf"] == pytest.approx(256, rel=1e-9)
    assert bounds_of(counts, records, (0, 300))["linf"] > 300


def test_factors_pass_through_16_bits():
    """A compiler drops both casts, and multiplies 2^60 and 2^45 first."""

    def target(x):
        back = (x * 2.0**60).astype(jnp.bfloat16).astype(jnp.float32)
        return back * 2.0**45 * 2.0**-16

    with pytest.raises(NoProofError, match="combines"):
        dpjax.global_sensitivity(target, RECORDS, bounds=(0, 2.0**-100), norm="l1")


def test_what_depends_on_16_bits_has_no_lemma():
    """A clip by norm reads its rows twice, and may see other digits of them."""

    def target(x, dtype=jnp.float32):
        rows = 2 * (9 * x[:, None] * MATRIX).astype(dtype).astype(jnp.float32)
        return rows / jnp.maximum(1, jnp.linalg.norm(rows, axis=1, keepdims=True))

    assert bounds_of(target, RECORDS, (-1, 1))["l2"] < 2.01
    assert bounds_of(lambda x: target(x, jnp.bfloat16), RECORDS, (-1, 1))["l2"] > 3
    mapped = lambda x: lax.map(lambda r: target(r[None], jnp.bfloat16)[0], x)  # noqa: E731
    assert bounds_of(mapped, RECORDS, (-1, 1))["l2"] > 3
    rows = lambda x: jnp.var((x * 0.3).astype(jnp.bfloat16).astype(jnp.float32) * 2)  # noqa: E731
    assert (
        "lemma" not in dpjax.global_sensitivity(rows, RECORDS, bounds=(-1, 1), norm="l1").explain()
    )


REFUSED = {
    "here: compute in float32": lambda x: (x.astype(jnp.bfloat16) + 1).astype(jnp.float32),
    "preferred_element_type": lambda x: x.astype(jnp.bfloat16) @ jnp.ones(N, jnp.bfloat16),
    "go by float32": lambda x: x.astype(jnp.bfloat16).astype(jnp.int32),
    "may overflow": lambda x: (4e4 * x).astype(jnp.float16).astype(jnp.float32),
    "convolve records": lambda x: lax.conv_general_dilated(
        x.astype(jnp.bfloat16)[:, None, None], jnp.ones((1, 1, 1), jnp.bfloat16), (1,), "SAME",
        preferred_element_type=jnp.float32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_arithmetic_in_16_bits_is_refused_with_its_line(why):
    with pytest.raises(NoProofError, match=why) as refusal:
        dpjax.global_sensitivity(REFUSED[why], RECORDS, bounds=(-1, 1), norm="l1")
    assert "test_16_bits.py" in str(refusal.value)


def test_units_of_16_bits():
    assert rounding.unit(np.dtype(jnp.bfloat16)) == 2.0**-8
    assert rounding.unit(np.dtype(np.float16)) == 2.0**-11
    numbers = np.linspace(1, 2, 4097, dtype=np.float32)
    for dtype in DTYPES:
        off = np.abs(np.asarray(jax.jit(rounded(dtype))(numbers)) - numbers) / numbers
        assert off.max() <= rounding.unit(np.dtype(dtype))
