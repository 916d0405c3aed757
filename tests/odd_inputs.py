"""Inputs that no room was written for, shared by the table tests of all rooms.

A public entry gives the right answer or refuses by a message that names the argument. It never
drops a mask or an imaginary part, wraps an integer, or depends on a private number for either.
"""

import contextlib
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import dpjax


@dataclasses.dataclass(frozen=True)
class Odd:
    """An array, and the array of plain floats that it stands for."""

    name: str
    array: object
    means: np.ndarray


# What holds more than numbers: every entry must refuse it.


class Column:
    """A column as of a table library, whose missing values are not in its numbers."""

    dtype = "Int64"
    shape = (4,)

    def to_numpy(self):
        return np.array([1, None, 0, 1], object)


def hiding(plain):
    """Arrays like `plain` that hold something besides real numbers."""
    plain = np.asarray(plain, "float32")
    some = np.zeros(plain.shape, bool)
    some.ravel()[-1] = True
    yield Odd("complex64", plain + np.complex64(3j), plain)
    yield Odd("complex128", plain + 3j, plain)
    yield Odd("jax complex", jnp.asarray(plain + np.complex64(3j)), plain)
    yield Odd("imaginary parts of 0", plain.astype("complex64"), plain)
    yield Odd("masked", np.ma.array(plain, mask=some), plain)
    yield Odd("masked integers", np.ma.array(plain.astype("int32"), mask=some), plain)
    yield Odd("masked, nothing hidden", np.ma.array(plain), plain)
    yield Odd("objects", plain.astype(object), plain)
    yield Odd("objects with None", np.where(some, None, plain.astype(object)), plain)
    yield Odd("texts", plain.astype(str), plain)
    yield Odd("bytes", plain.astype("S8"), plain)
    yield Odd("dates", plain.astype("datetime64[s]"), plain)
    yield Odd("durations", plain.astype("timedelta64[s]"), plain)
    yield Odd("structured", plain.astype([("a", "float32"), ("b", "float32")]), plain)
    yield Odd("keys", jax.random.split(jax.random.key(0), plain.shape), plain)
    yield Odd("a nullable column", Column(), plain)
    yield Odd("empty", plain[:0], plain[:0])


def hiding_in_columns(plain):
    """Those of `hiding` that are no columns of numbers: a table may hold dates and durations."""
    return [odd for odd in hiding(plain) if odd.name not in ("dates", "durations")]


# Other ways to write the same numbers, small and whole: right answers or refusals.

DTYPES = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
)  # fmt: skip


def written_otherwise(plain):
    """Arrays that hold the numbers of `plain`, which are whole and between 0 and 7."""
    plain = np.asarray(plain, "float32")
    for name in DTYPES:
        dtype = getattr(ml_dtypes, name, name)
        yield Odd(name, plain.astype(dtype), plain)
    if set(plain.ravel()) <= {0.0, 1.0}:
        yield Odd("bool", plain.astype(bool), plain)
    yield Odd("jax", jnp.asarray(plain), plain)
    yield Odd("the other byte order", plain.astype(plain.dtype.newbyteorder()), plain)
    yield Odd("every other record", np.repeat(plain, 2, axis=0)[::2], plain)
    yield Odd("backwards in memory", plain[::-1].copy()[::-1], plain)
    fixed = plain.copy()
    fixed.flags.writeable = False
    yield Odd("read-only", fixed, plain)
    if plain.ndim == 2:
        yield Odd("columns first", np.asfortranarray(plain), plain)


# Numbers that a private database may hold: always a release, and nothing wraps.

STRANGE = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-0.0": -0.0,
    "subnormal": 1e-45,
    "largest": float(np.finfo("float32").max),
    "lowest": float(np.finfo("float32").min),
}
WIDE = {
    "2^63": np.uint64(2**63),
    "2^64 - 1": np.uint64(2**64 - 1),
    "-2^63": np.int64(-(2**63)),
    "2^32": np.int64(2**32),
    "2^32 + 1": np.int64(2**32 + 1),
    "2^31": np.uint32(2**31),
    "2^31 - 1": np.int32(2**31 - 1),
    "-2^31": np.int32(-(2**31)),
    "10^300": np.float64(1e300),
    "-10^300": np.float64(-1e300),
}


def strange_numbers(plain):
    """Arrays in which one number is strange, at either end; `means` holds it as a float64."""
    plain = np.asarray(plain, "float32")
    for name, number in STRANGE.items():
        for place in (0, -1):
            array = plain.copy()
            array.ravel()[place] = number
            yield Odd(f"{name} at {place}", array, array.astype(float))


def wide_numbers(plain):
    """Arrays of dtypes that hold more than float32 and int32 do, or as much; the last is wide."""
    for name, number in WIDE.items():
        array = np.asarray(plain).astype(number.dtype)
        array.ravel()[-1] = number
        yield Odd(name, array, array.astype(float))


# Parameters: what is no number, numbers that no parameter may be, and kinds of one number.

NO_NUMBERS = [1j, "1", None, True, np.bool_(True), np.ma.masked, np.ones(2), [1.0], {}]
NO_PARAMETERS = [math.nan, math.inf, -1.0, 10**400]
KINDS_OF_NUMBERS = [
    np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16, np.asarray, jnp.asarray,
]  # fmt: skip


# Keys and transformations.


def every_key():
    """Keys of every implementation, and what is none, by name."""
    yield from ((name, jax.random.key(0, impl=name)) for name in ("threefry2x32", "rbg"))
    yield "unsafe_rbg", jax.random.key(0, impl="unsafe_rbg")
    yield "chacha20", dpjax.random.seeded_key(0)
    yield "raw", jax.random.key_data(jax.random.key(0))
    yield "several", jax.random.split(dpjax.random.seeded_key(0), 2)
    yield "a number", 0
    yield "none", None


@contextlib.contextmanager
def any_promotion():
    """JAX as users have it: the tests' strict promotion refuses what they do every day."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# Checks of an entry, which collect all that is wrong.


def assert_refused(entry, odds, names):
    """`entry(array)` refuses each, by a message that names the argument.

    Args:
        entry: a function of the argument.
        odds: what it is to refuse.
        names: of the argument, a regular expression.
    """
    wrong = {}
    for odd in odds:
        found = _outcome(entry, odd.array)
        if not isinstance(found, Exception):
            wrong[odd.name] = f"gave {found!r:.80}"
        elif not _is_refusal(found, names):
            wrong[odd.name] = f"{type(found).__name__}: {str(found)[:120]}"
    assert not wrong, _listed(wrong)


def assert_right(entry, odds, names, reference, *, tolerance=1e-5):
    """`entry(array)` is what `reference(float64 array)` is, or refuses it.

    Args:
        entry: a function of the argument, which returns a tree of arrays.
        odds: what it is given.
        names: of the argument, a regular expression.
        reference: the answer to what the array means; None for any finite answer.
        tolerance: relative to 1 or to the answer.
    """
    wrong = {}
    for odd in odds:
        found = _outcome(entry, odd.array)
        if isinstance(found, Exception):
            if not _is_refusal(found, names):
                wrong[odd.name] = f"{type(found).__name__}: {str(found)[:120]}"
            continue
        if not _agrees(found, reference and reference(odd.means.astype(float)), tolerance):
            wrong[odd.name] = f"gave {found!r:.80}"
    assert not wrong, _listed(wrong)


def assert_released(entry, odds, reference=None, *, tolerance=1e-5):
    """`entry(array)` never refuses, for the numbers are private; by default it is finite."""
    assert_right(entry, odds, r"(?!)", reference, tolerance=tolerance)


def _outcome(entry, array):
    try:
        with any_promotion():
            return jax.tree.map(np.asarray, entry(array))
    except Exception as error:
        return error


def _is_refusal(error, names):
    return isinstance(error, (TypeError, ValueError)) and bool(re.search(names, str(error)))


def _agrees(found, expected, tolerance):
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(found)]
    if expected is None:
        return all(np.isfinite(leaf).all() for leaf in leaves)
    right = [np.asarray(leaf, float) for leaf in jax.tree.leaves(expected)]
    return len(leaves) == len(right) and all(
        x.shape == y.shape and np.allclose(x, y, rtol=tolerance, atol=tolerance)
        for x, y in zip(leaves, right, strict=True)
    )


def _listed(wrong):
    return "\n" + "\n".join(f"{name}: {what}" for name, what in wrong.items())
