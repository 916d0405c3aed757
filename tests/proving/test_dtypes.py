"""Every dtype that JAX and ml_dtypes have: proved rightly, or refused.

What else reaches a rule is a dtype that comes later: so the list of what rules know is compared
with all dtypes of the installed packages. A dtype comes in by records, by a cast, by a constant, by
arithmetic, and by what a product or an iota is asked to return.
"""

import inspect
import itertools
import statistics
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax._core._bounds import Interval, RecordBounds
from dpjax._tracing._programs import Program
from dpjax.proving import NoProofError
from dpjax.proving import _rounding as rounding
from dpjax.proving._prove_sensitivity import walked_bound
from dpjax.queries import PaddedRecords
from tables import for_each

N = 4
REPLACED = dpjax.NeighboringRelation.REPLACE_ONE
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
WHOLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"bool"}
USUAL = WHOLE | {"float32", "float64"}
NARROW = {"float16", "bfloat16"}


def dtypes_of(package):
    """Everything in a package that NumPy takes for a dtype of numbers."""
    found = set()
    for name, scalar in inspect.getmembers(package, inspect.isclass):
        if issubclass(scalar, np.generic) or package is ml_dtypes:
            try:
                found.add(np.dtype(scalar))
            except TypeError:
                assert package is ml_dtypes or name in ABSTRACT, name
    return found


ABSTRACT = (
    *("generic", "number", "integer", "inexact", "floating", "complexfloating", "signedinteger"),
    *("unsignedinteger", "flexible", "character"),
)
with warnings.catch_warnings():  # NumPy says of abstract types that they are no dtypes.
    warnings.simplefilter("ignore", DeprecationWarning)
    FOUND = dtypes_of(np) | dtypes_of(ml_dtypes) | {np.dtype(jax.dtypes.float0)}
DTYPES = {str(dtype): dtype for dtype in sorted(FOUND, key=str)}
KEY = jax.random.key(0).dtype


def test_rules_know_these_dtypes_and_no_others():
    assert {str(dtype) for dtype in rounding.KNOWN} == USUAL | NARROW
    assert {"float8_e5m2", "float4_e2m1fn", "int2", "complex64", "object"} <= set(DTYPES)


def held(dtype, number):
    """A number as a dtype holds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.asarray(np.asarray(number, np.float32).astype(dtype), float))


def there_and_back(x, dtype):
    return lax.convert_element_type(lax.convert_element_type(x, dtype), jnp.float32)


LOW, HIGH = 1.12, 3.0


def just_above(dtype):
    """A threshold that the dtype's rounding of the lower end may fall below."""
    return np.nextafter(np.float32(min(LOW, held(dtype, LOW))), np.float32(9))


# Programs of floats in [LOW, HIGH], with a threshold at what the dtype makes of the lower end.
PROGRAMS = {
    "cast": lambda x, dtype, t: there_and_back(x, dtype),
    "threshold": lambda x, dtype, t: jnp.where(there_and_back(x, dtype) < t, 1e3, 0.0),
    "product": lambda x, dtype, t: there_and_back(
        lax.mul(lax.convert_element_type(x, dtype), lax.convert_element_type(x, dtype)), jnp.float32
    ),
    "comparison": lambda x, dtype, t: jnp.where(
        lax.convert_element_type(x, dtype) < lax.convert_element_type(np.float32(2), dtype), 1e3, x
    ),
    "constant": lambda x, dtype, t: x + there_and_back(jnp.asarray(np.ones(N, dtype)), jnp.float32),
    "iota": lambda x, dtype, t: x * lax.convert_element_type(lax.iota(dtype, N), jnp.float32),
    "dot": lambda x, dtype, t: lax.convert_element_type(
        lax.dot(x, np.ones(N, np.float32), preferred_element_type=dtype), jnp.float32
    ),
    "sum": lambda x, dtype, t: x + lax.convert_element_type(
        lax.reduce_sum(lax.convert_element_type(x, dtype), axes=(0,)), jnp.float32
    ),
}  # fmt: skip
# JAX has no arithmetic and no iota of booleans, and in 16 bits rules know only changes of dtype.
IN_16_BITS = {"cast", "threshold", "constant"}
OF_BOOLEANS = IN_16_BITS | {"comparison"}


def is_proved(program, name):
    if program == "dot":
        return name == "float32"
    if name in NARROW:
        return program in IN_16_BITS
    return name in USUAL and (name != "bool" or program in OF_BOOLEANS)


def bound(target, records, bounds, relation=REPLACED):
    """The bound in l1, 0 of public values; NaN where the target or its proof is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dpjax.prove_sensitivity(
                target, records, bounds=bounds, norm="l1", relation=relation
            ).value
    except (NoProofError, TypeError, ValueError) as refusal:
        if "implicit dtype promotion" in str(refusal):  # The test itself is at fault.
            raise
        return 0.0 if "no record changes its value" in str(refusal) else np.nan


def farthest(target, rows):
    """The largest move of the target, of all pairs of databases over some numbers."""
    databases = np.array(list(itertools.product(rows, repeat=N)), np.float32)
    values = np.asarray(jax.jit(jax.vmap(target))(databases), float).reshape(len(databases), -1)
    values = values.reshape(*[len(rows)] * N, -1)
    moves = [np.abs(np.ptp(values, axis=k)).sum(-1).max() for k in range(N)]
    return max(moves)


@pytest.mark.parametrize("name", DTYPES)
@for_each("program", PROGRAMS)
def test_a_program_in_any_dtype_is_proved_rightly_or_refused(name, program):
    dtype = DTYPES[name]
    records = jax.ShapeDtypeStruct((N,), jnp.float32)
    with jax.enable_x64(True):
        threshold = just_above(dtype) if is_proved(program, name) else np.float32(LOW)
        target = lambda x: PROGRAMS[program](x, dtype, threshold).sum()  # noqa: E731
        found = bound(target, records, (LOW, HIGH))
        assert np.isfinite(found) == is_proved(program, name)
        if np.isfinite(found):
            assert farthest(target, (LOW, 1.5, HIGH)) <= found


@pytest.mark.parametrize("name", DTYPES)
def test_a_cast_of_padded_records_is_proved_rightly_or_refused(name):
    """Under add-or-remove-one nothing of fewer than 32 bits that rounds is proved."""
    dtype = DTYPES[name]
    records = PaddedRecords(
        jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((N,), bool)
    )
    with jax.enable_x64(True):
        threshold = just_above(dtype) if name in USUAL else np.float32(LOW)

        def target(d):
            below = PROGRAMS["threshold"](d.records, dtype, threshold)
            return jnp.where(d.present, below, 0.0).sum() + d.present.sum().astype(below.dtype)

        found = bound(target, records, (LOW, HIGH), ADDED)
        assert np.isfinite(found) == (name in USUAL)
        if np.isfinite(found):
            full = PaddedRecords(jnp.full(N, 1.5).at[0].set(LOW), jnp.ones(N, bool))
            less = PaddedRecords(full.records, full.present.at[0].set(False))
            assert abs(float(target(full)) - float(target(less))) <= found


@pytest.mark.parametrize("relation", dpjax.NeighboringRelation)
@for_each("name", [*DTYPES, "key"])
def test_records_of_any_dtype_are_proved_or_refused(name, relation):
    leaf = jax.ShapeDtypeStruct((N,), DTYPES.get(name, KEY))
    with jax.enable_x64(True):
        records = leaf
        if relation is ADDED:
            records = PaddedRecords(leaf, jax.ShapeDtypeStruct((N,), bool))
        target = lambda d: jax.tree.leaves(d)[0].astype(jnp.float32).sum()  # noqa: E731
        for bounds in ((0, 1), dpjax.proving.Categories((0, 1))):
            found = bound(target, records, bounds, relation)
            assert found == (pytest.approx(1, rel=1e-5) if name in USUAL else pytest.approx(
                np.nan, nan_ok=True
            ))  # fmt: skip
        in_a_ball = bound(target, records, dpjax.proving.Ball(1), relation)
        assert np.isfinite(in_a_ball) == (name in {"float32", "float64"})


@pytest.mark.parametrize("name", sorted(NARROW))
def test_a_sampled_target_of_16_bits_is_called_provable_by_nobody(name):
    """A sampling walks the program of the target as it is, without bounds that a user gives."""
    target, spec = lambda x: x.astype(jnp.float32).sum(), jax.ShapeDtypeStruct((N,), DTYPES[name])
    program = Program.trace("target", target, spec)
    assert np.isinf(walked_bound(program, "l1", RecordBounds((Interval(0, 1),))))


def test_random_keys_are_refused():
    records = jax.ShapeDtypeStruct((N,), jnp.float32)
    key = jax.random.key(0)
    for target in (
        lambda x: x.sum() + jax.random.uniform(key),
        lambda x: x.sum() + jax.random.uniform(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))),
    ):
        with pytest.raises(NoProofError, match="random bits"):
            dpjax.prove_sensitivity(target, records, bounds=(0, 1), norm="l1")


TABLE, PLACES = jnp.arange(4.0), np.linspace(0.01, 0.99, 50, dtype=np.float32)
QUANTILES = np.float32([statistics.NormalDist().inv_cdf(p) for p in PLACES.tolist()])


def looked_up(places):
    numbers = lax.GatherDimensionNumbers((), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(TABLE, places[:, None], numbers, slice_sizes=(1,), mode="clip")


# A refused program of records of a dtype, words of the refusal, and the program that they ask for.
REMEDIES = {
    "an index of int8": (looked_up, "Use int32", lambda x: looked_up(x.astype("int32"))),
    "a product in int8": (
        lambda x: 100 * x, "int8 may overflow", lambda x: 100 * x.astype("int32"),
    ),
    "code for platforms": (
        lambda x: lax.platform_dependent(x, cpu=jnp.negative, cuda=jnp.abs),
        "the same code on all platforms",
        lambda x: lax.platform_dependent(x, tpu=jnp.negative, default=jnp.abs),
    ),
    "a quantile of a Gaussian": (
        jax.scipy.stats.norm.ppf, "by jnp.interp", lambda x: jnp.interp(x, PLACES, QUANTILES),
    ),
    "an inverse": (lax.erf_inv, "by jnp.interp", lambda x: jnp.interp(x, PLACES, QUANTILES)),
}  # fmt: skip


@for_each("name", REMEDIES)
def test_remedies_of_refusals_work(name):
    refused, words, mended = REMEDIES[name]
    dtype, bounds = (jnp.int8, (0, 3)) if "int8" in name else (jnp.float32, (0.25, 0.75))
    records = jax.ShapeDtypeStruct((N,), dtype)
    with pytest.raises(NoProofError, match=words):
        dpjax.prove_sensitivity(refused, records, bounds=bounds, norm="linf")
    assert dpjax.prove_sensitivity(mended, records, bounds=bounds, norm="linf").value > 0
