"""Floats of 16 bits, with each of their roundings or without it: a compiler may drop any."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from all_pairs import VALUES, N, all_pairs, bounds_of
from dpjax.proving import NoProofError, _choices
from dpjax.proving import _rounding as rounding
from dpjax.proving._value import Abstract, Difference
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
            # JAX 0.11 rounds an array of NumPy before the program, where no compiler can undo it.
            memory[id(x)] = (jnp.asarray(x).astype(dtype).astype(jnp.float32), x)
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
        in dpjax.prove_sensitivity(target, records, bounds=(0, 1), norm="l2").explain()
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

    with pytest.raises(NoProofError, match="may combine"):
        dpjax.prove_sensitivity(target, RECORDS, bounds=(0, 2.0**-100), norm="l1")


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
        "lemma" not in dpjax.prove_sensitivity(rows, RECORDS, bounds=(-1, 1), norm="l1").explain()
    )


def ties(dtype):
    """All numbers of a dtype, those halfway, where its rounding turns, and those beside them."""
    bits = np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype))
    with np.errstate(invalid="ignore"):
        numbers = np.unique(bits.astype(np.float32))
    numbers = numbers[np.abs(numbers) < rounding.largest(np.dtype(dtype)) / 2]
    halfway = (numbers[1:] + numbers[:-1]) / 2  # Exact in float32.
    beside = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    found = np.concatenate([numbers, halfway, *beside])
    return found[np.abs(found) >= np.finfo(np.float32).tiny]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_holds_what_its_ends_are_rounded_to(dtype):
    """Rounding is monotone, so the ends of an interval decide: here all ends that matter.

    What else reaches the line is every rule with a relative error: `test_ranges.py` has those.
    """
    ends = ties(dtype)
    assert len(ends) > 2**15
    none = Difference(np.zeros(ends.shape), 0.0, 0.0)
    for other in (ends, 0.75 * ends, 1.25 * ends):
        low, high = np.minimum(ends, other).astype(float), np.maximum(ends, other).astype(float)
        x = Abstract(
            ends.shape, np.dtype(np.float32), low, high, None, none, none, apart=0.0
        )  # fmt: skip
        found = _choices.convert(x, np.dtype(dtype))
        for number in (ends.astype(float), ends.astype(dtype).astype(float)):
            assert (found.low <= number).all()
            assert (number <= found.high).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_threshold_below_the_records_may_be_reached_by_rounding(dtype):
    """A record at the lower end becomes less than it, and another record does not."""
    ends = ties(dtype)
    ends = ends[(ends > 1) & (ends < 1.5) & (ends.astype(dtype).astype(np.float32) < ends)]
    for low in ends[:: max(1, len(ends) // 16)]:
        level = np.nextafter(low.astype(dtype).astype(np.float32), np.float32(2))

        def target(x, level=level):
            return jnp.where(x.astype(dtype).astype(jnp.float32) < level, 1e3, 0.0).sum()

        first = np.full(N, 1.9, np.float32)
        second = np.array([low, *first[1:]], np.float32)
        assert float(target(second)) - float(target(first)) == 1000
        assert bounds_of(target, RECORDS, (float(low), 2))["l1"] >= 1000


REFUSED = {
    "Compute in float32": lambda x: (x.astype(jnp.bfloat16) + 1).astype(jnp.float32),
    "preferred_element_type": lambda x: x.astype(jnp.bfloat16) @ jnp.ones(N, jnp.bfloat16),
    "Cast to float32 first": lambda x: x.astype(jnp.bfloat16).astype(jnp.int32),
    "may overflow": lambda x: (4e4 * x).astype(jnp.float16).astype(jnp.float32),
    "convolve records": lambda x: lax.conv_general_dilated(
        x.astype(jnp.bfloat16)[:, None, None], jnp.ones((1, 1, 1), jnp.bfloat16), (1,), "SAME",
        preferred_element_type=jnp.float32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_arithmetic_in_16_bits_is_refused_with_its_line(why):
    with pytest.raises(NoProofError, match=why) as refusal:
        dpjax.prove_sensitivity(REFUSED[why], RECORDS, bounds=(-1, 1), norm="l1")
    assert "test_16_bits.py" in str(refusal.value)


def test_units_of_16_bits():
    assert rounding.unit(np.dtype(jnp.bfloat16)) == 2.0**-8
    assert rounding.unit(np.dtype(np.float16)) == 2.0**-11
    numbers = np.linspace(1, 2, 4097, dtype=np.float32)
    for dtype in DTYPES:
        off = np.abs(np.asarray(jax.jit(rounded(dtype))(numbers)) - numbers) / numbers
        assert off.max() <= rounding.unit(np.dtype(dtype))
