"""`prove_sensitivity`: the global sensitivity of a target, proved from its traced program.

For a sampled sensitivity, `provable` says in one line which bound a proof would give. A proof needs
bounds on records. The oracle that draws records for sampling does not state them. So two ranges are
tried. In the wide range [-2^20, 2^20], only targets that clip their records have a useful bound.
For all other targets, the range [0, 1] serves as an example.
"""

import contextlib
import dataclasses
import decimal
import functools
import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.extend.core as jex
import numpy as np

from dpjax._core import _checks
from dpjax._core._bounds import (
    Ball,
    Bound,
    Categories,
    Interval,
    PaddedRecordBounds,
    RecordBounds,
    padded_record_bounds,
    record_bounds,
    record_specs,
)
from dpjax._core._guarantee import shown_number
from dpjax._core._open_ledgers import relation_or_inherited
from dpjax._core._pytree import TreeSpec
from dpjax._core._records import PaddedRecords
from dpjax._core._types import Database, PyTree
from dpjax._core._values import (
    KnowsSensitivity,
    NeighboringRelation,
    Norm,
    Proof,
    Sensitivity,
    Target,
)
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._programs import Program, check_concrete
from dpjax._tracing._walks import JITS, aval, equations
from dpjax.proving import _rounding as rounding
from dpjax.proving._add_remove import PaddedWalk, inputs_of, moves, whole_norm
from dpjax.proving._boxes import coordinates_of, farthest_apart, split
from dpjax.proving._exact_programs import Sums, exact_steps, with_sums
from dpjax.proving._losses import Losses
from dpjax.proving._rows import norm_of
from dpjax.proving._value import Abstract, RefusalError, Source, Tighter, make
from dpjax.proving._walk import Walk, check_no_nan

ProvedNorm = Literal["l1", "l2", "linf"]
# Larger programs are skipped, because their proofs would take longer than 50 ms.
_MOST_OPERATIONS, _MOST_CONSTANTS, _MOST_PER_RECORD = 80, 2**14, 2**10
_WIDE, _USEFUL = 2**20, 100


class NoProofError(ValueError):
    """A target has no proof.

    Attributes:
        args: the operation without a rule, its source line, and a remedy.

    Formal guarantees:
        None. No bound was found, but a bound may exist. The error depends on the traced program,
        shapes and bounds alone, never on private data.
    """


def prove_sensitivity(
    target: Target,
    records: Database,
    *,
    bounds: PyTree,
    norm: ProvedNorm,
    n: int | None = None,
    relation: NeighboringRelation | None = None,
    effort: float | None = None,
) -> Sensitivity:
    """A bound on how far one record moves a target, proved from its traced program.

    The bound is valid for all neighboring databases, so gamma is 0. The proof visits the program
    operation by operation. For each array it computes a range that is valid on all databases, and
    bounds on the difference between neighbors. Rounding is included.
    Float sums of many records are computed as sums of integers: the bound is about the program
    that `privatize` compiles, whose value differs from the target's by rounding.

    Args:
        target: a pure JAX function of a database.
        records: arrays or `jax.ShapeDtypeStruct`s with a leading axis of n records, or a pytree.
            Only shapes and dtypes matter.
        bounds: public bounds on a record: (low, high) for all coordinates, or a pytree like
            `records` with such a pair, a `dpjax.proving.Interval`, `dpjax.proving.Ball` or
            `dpjax.proving.Categories` for each array. With `Interval(low, high, missing=True)`, a
            record may be NaN, for targets that handle missing numbers themselves. Numbers are
            rounded to the dtype of the records.
        norm: "l1", "l2" or "linf".
        n: the number of records, if it differs from the length of `records`.
        relation: which databases are neighbors. None takes the relation of an open ledger, or else
            replace-one. Under add-or-remove-one, `records` are `dpjax.queries.PaddedRecords`, n is
            the number of slots, and `bounds` are bounds on the records alone.
        effort: seconds, including compilation, to split the box of all possible records into small
            boxes. This tightens the bound of a function that is computed for each record alone,
            before its values are added up or combined in another way. More time may give a smaller
            bound, which is valid whenever the search stops. The search stops early if the bound is
            within a factor 1.01 of the distance of two records. None does not split the box.

    Returns:
        A `Sensitivity` with gamma 0, method "proved", and `explain()`. With `effort`, it also says
        how close the bound is to the distance of two neighbors that the search found.

    Raises:
        NoProofError: if an operation has no rule, with its line and a remedy; or with `effort`, if
            nothing is computed for each record alone.
        TypeError: if an argument has the wrong type.
        ValueError: if bounds or norm are invalid, or no record changes the value.

    Formal guarantees:
        For all databases D and D' of n records that differ in one record, the computed values f(D)
        and f(D') differ by at most the bound. For `PaddedRecords`, this covers slots: a slot may
        also be emptied or filled. Under add-or-remove-one, D' has n slots and all records of D
        except one, in any slots. A program whose value may depend on slots is refused. The clamp
        fills empty slots with a public row: 0 if the bounds allow it. `privatize` clamps the
        database first, so nothing is assumed about the data: infinities and outliers become public
        numbers, and so does NaN unless the bounds allow missing numbers. The bound includes
        rounding in the dtype, sums in any order, fused products, subnormal numbers that are flushed
        to 0, and 64 eps for elementary functions (512 in float64). Releases run on CPUs and GPUs
        only, and convolutions on CPUs only. The proof assumes four things. XLA runs without fast
        math. XLA compiles the program correctly; dpjax refuses programs that XLA is known to
        miscompile. The compiled program is deterministic. Its elementwise code computes each entry
        from the entries at the same place.

    Source:
        Reed and Pierce (2010), for sensitivity read off a program; Higham (2002), section 4.2, for
        the rounding of sums.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import dpjax
        >>> records = jax.ShapeDtypeStruct((100,), jnp.float32)
        >>> found = dpjax.prove_sensitivity(jnp.mean, records, bounds=(0, 1), norm="l1")
        >>> round(found.value, 3), found.gamma
        (0.01, 0.0)

        For a neural network, the bound does not consider which units change together, unless the
        box is split:

        >>> weights = jnp.array([[1.0, -1.0], [1.0, -2.0]])
        >>> network = lambda x: jnp.tanh(x @ weights).sum(1).mean()
        >>> records = jax.ShapeDtypeStruct((100, 2), jnp.float32)
        >>> found = dpjax.prove_sensitivity(network, records, bounds=(0, 1), norm="l1", effort=60)
        >>> round(found.value, 3)
        0.003
    """
    _checks.function("target", target)
    _checks.choice("norm", norm, get_args(ProvedNorm))
    end = None
    if effort is not None:
        end = time.monotonic() + _checks.positive("effort", effort)
    specs, relation = _known(record_specs(records, n)), relation_or_inherited(relation)
    size = jax.tree.leaves(specs)[0].shape[0]
    padded = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    public = (padded_record_bounds if padded else record_bounds)(bounds, specs)
    _refuse_rounded(target)
    program = traced(target, specs, public)
    bound = own_bound(target, norm, specs, relation)
    proof = Proof((f"the proof of {type(target).__name__} itself: at most {bound:.4g} in {norm}",))
    try:
        found = _smallest(target, program, specs, public, norm)
        if end is not None:
            found = _split(found, specs, norm, end)
        if found.bound <= bound:
            bound, proof, program, public = found
    except RefusalError as refusal:
        if math.isinf(bound):
            raise NoProofError(str(refusal.args[0])) from None
    # A sensitivity of 0 is refused: its noise would have scale 0, and a public value needs no
    # mechanism.
    if bound == 0:
        raise ValueError(
            "target must depend on the records, but no record changes its value. Publish this "
            "value without a mechanism"
        )
    if not math.isfinite(bound):
        raise NoProofError("no finite bound was found. Give narrower bounds on the records")
    return Sensitivity(
        bound,
        0.0,
        1.0,
        norm,
        size,
        relation,
        method="proved",
        target=program.fingerprint,
        records=TreeSpec.of(specs),
        outputs=program.outputs,
        bounds=public,
        proof=proof,
    )


class _Proved(NamedTuple):
    """A bound with its proof, the program that it is about, and the bounds on its records."""

    bound: float
    proof: Proof
    program: Program
    public: RecordBounds


def _smallest(
    target: Target, program: Program, specs: Database, public: RecordBounds, norm: ProvedNorm
) -> _Proved:
    """Returns the smaller of two bounds, with its proof.

    One bound is for the target as it is. The other one is for a target whose sums are computed
    exactly. This is another program, which is traced and walked separately.
    """
    sums: Sums = {}
    found, refusal = list[_Proved](), None
    try:
        found.append(_proved(program, specs, public, norm, sums))
    except RefusalError as raised:
        refusal = raised
    if sums:
        exact = with_sums(public, sums)
        with contextlib.suppress(RefusalError):
            found.append(_proved(traced(target, specs, exact), specs, exact, norm, {}))
    if refusal is not None and not found:
        raise refusal
    return min(found, key=lambda one: one.bound)


def _split(found: _Proved, specs: Database, norm: ProvedNorm, end: float) -> _Proved:
    """Returns the bound of the same program after splitting the box of a record.

    Splitting stops at the time `end`.
    """
    _, _, program, public = found
    jaxpr = _after_the_clamp(program, specs, public)
    with np.errstate(all="ignore"):
        inputs = _inputs(program, public)
        splits = split(jaxpr, program.jaxpr.consts, inputs, public, norm, end)
    if not splits:
        raise RefusalError(
            "effort= tightens only arrays that are computed for each record alone, and target has "
            "no supported array of this kind. Call prove_sensitivity without effort="
        )
    tighter = {key: facts for one in splits for key, facts in one.tighter.items()}
    again = _proved(program, specs, public, norm, {}, tighter)
    best = min((found, again), key=lambda x: x.bound)
    pairs = [one.pair for one in splits]
    reached = farthest_apart(program, specs, coordinates_of(inputs, public), pairs, norm)
    boxes = sum(one.boxes for one in splits)
    least, most = shown_number(reached, decimal.ROUND_FLOOR), shown_number(best.bound)
    said = f"after a split into {boxes:,} boxes, the truth is between {least} and {most}"
    if reached > 0:
        said += f": the bound is at most {shown_number(best.bound / reached)} times the truth"
    return best._replace(proof=Proof(best.proof.steps, best.proof.losses, said))


def _proved(
    program: Program,
    specs: Database,
    public: RecordBounds,
    norm: ProvedNorm,
    sums: Sums,
    tighter: Mapping[tuple[int, ...], Tighter] = MappingProxyType({}),
) -> _Proved:
    """Returns the bound of one program, and stores in `sums` which float sums could be exact."""
    jaxpr = _after_the_clamp(program, specs, public)
    padded = isinstance(public, PaddedRecordBounds)
    walk = (PaddedWalk if padded else Walk)(sums=sums, tighter=tighter)
    outputs = _outputs(walk, jaxpr, program, public)
    steps = tuple(map(str, walk.steps))
    if not padded:
        losses = Losses(jaxpr, program.jaxpr.consts, specs, public, walk.steps, norm)
        return _Proved(norm_of(outputs, norm), Proof(steps, losses), program, public)
    emptied, slots = moves(outputs, norm)
    # Emptying a slot replaces its row by the empty row. So a bound under replace-one is also valid
    # here. It may be tighter, because proofs under replace-one can use lemmas.
    with contextlib.suppress(RefusalError):
        replaced, values = _walk(jaxpr, program, public)
        if (other := norm_of(values, norm)) < emptied:
            emptied, steps = other, tuple(map(str, replaced.steps))
    said = f"an emptied slot moves the value by {emptied:.4g} in {norm}, and other slots of the"
    bound = whole_norm(float(rounding.up(emptied + slots)), outputs, norm)
    return _Proved(bound, Proof((*steps, f"{said} records by {slots:.4g}")), program, public)


def public_bounds(records: Database, bounds: PyTree) -> tuple[Database, RecordBounds]:
    """Returns the shapes and dtypes of a database, and bounds that its dtypes can represent."""
    specs = _known(record_specs(records, None))
    return specs, record_bounds(bounds, specs)


def _known(specs: Database) -> Database:
    """Returns shapes and dtypes of records, after a check that proofs support these dtypes."""
    for leaf in jax.tree.leaves(specs):
        if np.dtype(leaf.dtype) not in rounding.USUAL:
            raise NoProofError(_no_records_of(leaf.dtype))
    return specs


def _no_records_of(dtype: np.dtype) -> str:
    known = "float32, float64, booleans, or integers of 8 to 64 bits"
    return f"records of {dtype} have no proof. Use {known}"


def own_bound(
    target: Target,
    norm: ProvedNorm,
    specs: Database,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
) -> float:
    """Returns the bound that a target states itself, as queries of dpjax do; otherwise infinity.

    The bound is valid on all databases. So it is also valid on databases of clamped records.
    """
    if not isinstance(target, KnowsSensitivity) or target._is_rounded:
        return math.inf
    relations = {relation}
    # Replacing the contents of a slot may also empty or fill the slot.
    if isinstance(specs, PaddedRecords):
        relations.add(NeighboringRelation.ADD_OR_REMOVE_ONE)
    if norm not in target.norms or not relations <= set(target.relations):
        return math.inf
    try:
        return max(target._bound_on(norm, one, specs) for one in relations)
    except ValueError:  # The target was made without a number that its bound needs.
        return math.inf


def _refuse_rounded(target: object) -> None:
    """Refuses a query of sums: its own proof is about integers, but it returns rounded floats."""
    if isinstance(target, KnowsSensitivity) and target._is_rounded:
        raise NoProofError(
            f"a {type(target).__name__} has a proof only for the integers that privatize computes "
            "internally. Call target.sensitivity() instead of dpjax.prove_sensitivity"
        )


def traced(target: Target, specs: Database, public: RecordBounds) -> Program:
    """Returns the program of the target composed with the clamp of its records."""
    program = Program.trace("target", public.enforced_on(target), specs)
    check_concrete("target", "call prove_sensitivity", program)
    return program


def visit(walk: Walk, program: Program, specs: Database, public: RecordBounds) -> None:
    """Walks a program, and ends without an error if the walk refuses it."""
    jaxpr = _after_the_clamp(program, specs, public)
    with contextlib.suppress(RefusalError):
        _outputs(walk, jaxpr, program, public)


@functools.lru_cache(maxsize=64)
def walked_bound(program: Program, norm: ProvedNorm, public: RecordBounds) -> float:
    """Returns a proved bound on the sensitivity of a program; infinity if there is no proof.

    The records of the program are within `public`. Programs are compared by their fingerprints. So
    if a target is traced again, its bound comes from the cache.
    """
    try:
        return norm_of(_walk(program.jaxpr.jaxpr, program, public)[1], norm)
    except RefusalError:
        return math.inf


def _inputs(program: Program, public: RecordBounds) -> list[Abstract]:
    """Returns the abstract values of the clamped records."""
    leaves = program.inputs.argument(0).leaves
    return [_clamped(b, x) for b, x in zip(public.leaves, leaves, strict=True)]


def _walk(
    jaxpr: jex.Jaxpr, program: Program, public: RecordBounds, sums: Sums | None = None
) -> tuple[Walk, list[Abstract]]:
    """Returns the walk under replace-one, and the abstract values of the outputs."""
    walk = Walk(sums={} if sums is None else sums)
    return walk, _outputs(walk, jaxpr, program, public)


@np.errstate(all="ignore")
def _outputs(walk: Walk, jaxpr: jex.Jaxpr, program: Program, public: RecordBounds) -> list[Any]:
    """Returns what a walk finds about the outputs. The last inputs are records within bounds."""
    inputs: list[Any] = _inputs(program, public)
    if isinstance(walk, PaddedWalk) and isinstance(public, PaddedRecordBounds):
        inputs = inputs_of(inputs, public)
    # Records before the clamp are unbounded, so the program may use them only through the clamp.
    unusable = [None] * (len(jaxpr.invars) - len(inputs))
    outputs = walk.run(jaxpr, program.jaxpr.consts, [*unusable, *inputs])
    check_no_nan(jaxpr, [walk.shown(x) for x in outputs])
    return outputs


def _after_the_clamp(program: Program, specs: Database, public: RecordBounds) -> jex.Jaxpr:
    """Returns the program without its first operation, the clamp.

    The results of the clamp become inputs of the program.
    """
    jaxpr = program.jaxpr.jaxpr
    # The clamp is recognized by its fingerprint and its position, so that other code cannot imitate
    # it.
    clamp = jax.make_jaxpr(public.clamp)(specs)
    first: Any = jaxpr.eqns[0] if jaxpr.eqns else None
    if (
        first is None
        or first.primitive.name not in JITS
        or list(first.invars) != list(jaxpr.invars)
        or digest(first.params["jaxpr"]) != digest(clamp)
    ):
        raise RefusalError("the traced program must begin with the clamp of its records")
    return jaxpr.replace(invars=[*jaxpr.invars, *first.outvars], eqns=jaxpr.eqns[1:])


def _clamped(bound: Bound, spec: jax.ShapeDtypeStruct) -> Abstract:
    """Returns the abstract value of an array after the clamp: only one row may change."""
    shape, dtype = spec.shape, np.dtype(spec.dtype)
    if dtype not in rounding.USUAL:
        raise RefusalError(_no_records_of(dtype))
    ones, moves, norm, apart = (1,) * len(shape), math.inf, math.inf, 0.0
    whole, missing = dtype.kind != "f", False
    if isinstance(bound, Ball):
        # The clamp computes the norm of a record, and scales the record. Both steps are rounded.
        norm = bound.radius * (1 + (math.prod(shape[1:]) + 16) * 4 * rounding.unit(dtype))
        moves, apart = 2 * norm, 2 * (norm - bound.radius)
    elif isinstance(bound, Categories):
        whole = whole or all(float(x).is_integer() for x in bound.values)
    else:
        missing = bound.missing
    low, high = (np.full(ones, end) for end in bound.ends)
    changed = rounding.up(high - low), math.inf, float(rounding.up(moves))
    found = make(
        shape, dtype, low, high, 0, changed, (np.zeros(ones), 0.0, 0.0), whole=whole,
        l2_of_row=float(rounding.up(norm)), apart=apart,
    )  # fmt: skip
    return dataclasses.replace(found, nan=Source.new()) if missing else found


def provable(target: Target, program: Program, norm: Norm, estimate: float) -> Proof | None:
    """Returns a line that says which bound can be proved, and a line for each exact sum.

    If the program is large, no bound is searched for. If there is nothing to say, the result is
    None.

    The traced program, the shapes and the sampled number are public, and nothing else is used.

    Args:
        target: the sampled target, which may know its own bound.
        program: its traced program.
        norm: the norm of the estimate.
        estimate: the sampled sensitivity. A bound that is much larger is not shown.
    """
    steps, line = exact_steps(program.jaxpr.jaxpr), None
    # The line is only additional information, so an error in the proof must not stop the sampling.
    with contextlib.suppress(Exception):
        if norm in get_args(ProvedNorm) and _is_small(program):
            line = _line(target, program, cast(ProvedNorm, norm), estimate)
    return Proof(steps, summary=line or "") if steps or line else None


def _line(target: Target, program: Program, norm: ProvedNorm, estimate: float) -> str | None:
    specs = program.inputs.argument(0).tree()
    own = own_bound(target, norm, specs)
    if math.isfinite(own) and own > 0:
        return f"its own proof gives {shown_number(own)} at gamma 0: see target.sensitivity"
    whole = [_ends(np.dtype(x.dtype)) for x in jax.tree.leaves(specs)]
    for low, high, shown in ((-_WIDE, _WIDE, "[-2^20, 2^20]"), (0, 1, "[0, 1]")):
        # All arrays have the same bounds, clipped to the range of each dtype.
        ends = tuple(Interval(max(low, least), min(high, most)) for least, most in whole)
        bound = walked_bound(program, norm, RecordBounds(ends))
        if 0 < bound < math.inf and (high == 1 or bound <= _USEFUL * estimate):
            every = [b.ends for b in ends] == whole
            records = "all records" if every else f"records in {shown}"
            return f"dpjax.prove_sensitivity proves {shown_number(bound)} at gamma 0 for {records}"
    return None


def _ends(dtype: np.dtype) -> tuple[float, float]:
    if dtype.kind not in "iu":
        return (0, 1) if dtype.kind == "b" else (-math.inf, math.inf)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _is_small(program: Program) -> bool:
    """Whether a walk takes little time: few operations, and few numbers per record."""
    n = program.inputs.leaves[0].shape[0]
    sizes = [np.size(x) for x in program.jaxpr.consts]
    made = [(e, aval(v).size) for e in equations(program.jaxpr.jaxpr) for v in e.outvars]
    sizes += [size for equation, size in made if not equation.invars]
    return (
        _operations(program.jaxpr.jaxpr) <= _MOST_OPERATIONS
        and sum(sizes) <= _MOST_CONSTANTS
        and all(size <= _MOST_PER_RECORD * n for _, size in made)
    )


def _operations(jaxpr: jex.Jaxpr) -> int:
    """Returns the number of operations that a walk visits, if all loops are unrolled."""
    return sum(
        1
        + equation.params.get("length", 1)
        * sum(map(_operations, jex.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
