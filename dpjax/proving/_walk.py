"""The walk: visits the operations of a traced program, and computes an abstract value for each.

docs/proofs/global-sensitivity.md has the proof. `_operations.py` has the rules.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from dpjax._tracing._walks import Atom, Equation, aval, called, live, parts, source_line
from dpjax.proving import _cells as cells
from dpjax.proving import _choices as choices
from dpjax.proving import _exact_programs as exact_programs
from dpjax.proving import _loops as loops
from dpjax.proving import _nan as nans
from dpjax.proving import _patterns as patterns
from dpjax.proving import _rounding as rounding
from dpjax.proving._elementwise import vanishing
from dpjax.proving._exact_sums import worth_it
from dpjax.proving._operations import Operation, operation_of
from dpjax.proving._order_statistics import Combination, combination, is_sorted
from dpjax.proving._patterns import Found
from dpjax.proving._pending import carried
from dpjax.proving._rows import as_dense, counted
from dpjax.proving._scopes import Scope
from dpjax.proving._slots import at_one_place
from dpjax.proving._value import (
    Abstract,
    OverflowRefusalError,
    Pending,
    RangeRefusalError,
    RefusalError,
    Tighter,
    check_dtype,
    constant,
)

# The message of a refusal begins with `_NO_PROOF` and ends with `_SAMPLED`.
_NO_PROOF, _SAMPLED = "no proof for ", ". Or sample it (dpjax.sample_sensitivity)"
_ONE_BY_ONE = "it adds up records one by one. Use jnp.sum or jnp.cumsum"
_INSIDE = "sums inside of this operation stay sums of floats. Sum outside of it"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a proof: an operation, its source line, and how much its result changes.

    Attributes:
        depth: the number of inner programs around the operation.
        operation: the name of the primitive, or of a lemma.
        place: the source line, as a string.
        value: the abstract value of the result.
        path: the index of the operation in its program, after the indices of the calls that lead to
            that program.
        output: the index of the result, if the operation has several results.
    """

    depth: int
    operation: str
    place: str
    value: Abstract
    path: tuple[int, ...] = ()
    output: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        return (*self.path, self.output)

    def __str__(self) -> str:
        d, one, others = as_dense(self.value).others, self.value.changed, self.value.others
        shown = f"one record moves it by {one.l1:.4g} in l1, {one.l2:.4g} in l2"
        if self.value.axis is None:
            shown = f"moves by {d.l1:.4g} in l1, {d.l2:.4g} in l2, {d.each.max():.4g} in linf"
        elif others.l1:
            shown += f", others by {others.l1:.4g} in l1"
        ends = f"[{self.value.low.min():.4g}, {self.value.high.max():.4g}]"
        shape = f"{self.value.dtype}{list(self.value.shape)}"
        return f"{'  ' * self.depth}{self.operation} {shape} in {ends}; {shown}  {self.place}"


@dataclasses.dataclass
class Walk:
    """A walk over a program, with the steps of the proof so far."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    depth: int = 0
    path: tuple[int, ...] = ()
    # The line of the user's code that contains the current operation. For an operation inside a
    # function of JAX, it is the line that calls this function.
    line: str = ""
    # The float sums and variances over records that a release could compute exactly.
    sums: exact_programs.Sums = dataclasses.field(default_factory=dict)
    # For each float sum over records that a release cannot compute exactly: the reason.
    inexact: dict[exact_programs.Path, str] = dataclasses.field(default_factory=dict)
    # Tighter bounds on arrays whose rows each depend on one record. They were found by splitting
    # the box that contains all records into smaller boxes.
    tighter: Mapping[tuple[int, ...], Tighter] = dataclasses.field(default_factory=dict)
    # For each array: bounds on the array in each cell (`_cells.py`). A cell is a small part of the
    # range of an earlier array, from which this array is computed.
    held: dict[Abstract, cells.Held] = dataclasses.field(default_factory=dict)
    # The arrays that are combinations of order statistics.
    mixtures: dict[Abstract, Combination] = dataclasses.field(default_factory=dict)
    # Maps an array to its sorted array. So if a program sorts an array twice, both results have the
    # same abstract value.
    sorts: dict[Abstract, Abstract] = dataclasses.field(default_factory=dict)
    # For each array of counts: whether every record is known to be counted in one of its entries.
    # If so, a record that leaves one count always joins another one.
    transfers: dict[Abstract, bool] = dataclasses.field(default_factory=dict)
    # The arrays that are parts of a softmax.
    softmaxes: dict[Abstract, patterns.Mark] = dataclasses.field(default_factory=dict)

    def run(
        self, jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[Any], *,
        in_part: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Returns the values of the outputs. An input of None must not be used.

        If `in_part`, bounds on an output may be known only in some cells (`_cells.py`). Otherwise,
        such an output is refused.
        """
        values: dict[jex.Var, Any] = {}
        values.update(zip(jaxpr.constvars, map(self.known, consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        scope, outer, line = Scope(jaxpr, values), self.path, self.line
        refused: dict[Atom, RefusalError] = {}

        def given(atom: Atom) -> Any:
            if isinstance(atom, jex.Literal):
                return self.known(np.asarray(atom.val, aval(atom).dtype))
            return values[atom]

        def read(atom: Atom, *, in_part: bool) -> Any:
            if (found := given(atom)) is None:
                unclamped = RefusalError("the program uses records that were not clamped")
                raise refused.get(atom, unclamped)
            if not in_part and (refusal := self.shown(found).refusal) is not None:
                raise refusal
            return found

        # Operations on which no output depends are skipped, because they need no proof.
        for count, equation in enumerate(live(jaxpr)):
            path, place = (*outer, count), source_line(equation) or line
            self.path, self.line, name = path, place, equation.primitive.name
            outputs, refusal = list[Any](), None
            try:
                if equation.effects:
                    raise RefusalError(f"this operation has side effects: {equation.effects}")
                calls = called(equation) is not None
                operands = [read(atom, in_part=calls) for atom in equation.invars]
                outputs = self.outputs(jaxpr, equation, operands)
                for variable, output in zip(equation.outvars, outputs, strict=True):
                    _check_type(aval(variable), self.shown(output))
            except RefusalError as raised:
                # The refusal is raised only if the value is used, because a lemma may bound later
                # results without it.
                outputs, refusal = [], located(raised, equation, place)
                refused.update(dict.fromkeys(equation.outvars, refusal))
                # The refusal is raised at once if the operation has a side effect, because that is
                # visible outside of the program. It is also raised at once for an overflow, because
                # that violates the assumptions of lemmas.
                if equation.effects or isinstance(refusal, OverflowRefusalError):
                    raise refusal from None
            # The walk of an inner program changes `path` and `line`. It does not restore them if it
            # refuses an operation.
            self.path, self.line = path, place
            seen = any(inner[: len(path)] == path for inner in {**self.sums, **self.inexact})
            if exact_programs.stays_inexact(equation, refused=not outputs, seen=seen):
                reason = refusal.args[0] if refusal else _INSIDE
                reason = reason.removesuffix(_SAMPLED).removeprefix(_NO_PROOF)
                self.inexact[path] = f"{name}{place}: {reason}"
            walked = outputs[0] if outputs and not self.shown(outputs[0]).refusal else None
            try:
                lemma = self.improved(scope, equation, walked)
            except RefusalError as raised:
                raise located(raised, equation, place) from None
            if lemma:
                name, outputs = f"{name}: lemma {lemma.name}", [lemma.value]
                self.note(jaxpr, lemma)
            for k, output in enumerate(outputs):
                if (facts := self.tighter.get((*path, k))) is not None:
                    outputs[k] = self.tightened(output, facts)
            combined = [given(atom) for atom in equation.invars]
            outputs = self.sharpened(scope, equation, combined, outputs, refusal)
            for k, variable in enumerate(equation.outvars):
                values[variable] = outputs[k] if outputs else None
                # The steps of an inner program are listed, so the call of the program is not listed
                # as a step.
                if outputs and not called(equation):
                    value = self.shown(outputs[k])
                    self.steps.append(Step(self.depth, name, place, value, path, k))
        self.path, self.line = outer, line
        return [read(x, in_part=in_part) for x in jaxpr.outvars]

    def tried(self, jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[Any]) -> list[Any]:
        """Returns the same values as `run`, without recording the steps and the exact sums."""
        other = copy.copy(self)
        other.steps, other.sums, other.inexact = [], {}, {}
        return other.run(jaxpr, consts, inputs)

    def known(self, array: object) -> Any:
        """Returns the abstract value of a constant."""
        return constant(array)

    def shown(self, value: Any) -> Abstract:
        """Returns the abstract value of `value`.

        In this class, `value` is already an abstract value. Subclasses compute with other objects
        that contain an abstract value, such as `Tracked`.
        """
        return value

    def tightened(self, value: Any, facts: Tighter) -> Any:
        """Returns the value with tighter facts added."""
        return facts.of(value)

    def improved(self, *situation: Any) -> Found | None:
        """Returns a lemma that applies to an operation, with its result; None if none applies."""
        return patterns.improved(*situation)

    def sharpened(
        self, scope: Scope, equation: Equation, operands: Sequence[Any], outputs: Any, refusal: Any
    ) -> list[Any]:
        """Returns the results of an operation, tightened by facts about the arrays it combines.

        If the operation was refused, there are no `outputs`, unless a lemma applies.
        """
        outputs = self.refined(equation, operands, outputs, refusal)
        return self.recognized(scope, equation, operands, outputs)

    def refined(
        self, equation: Equation, operands: Sequence[Any], outputs: Any, refusal: Any
    ) -> list[Any]:
        """Returns the result of an elementwise operation, tightened by bounds on small cells.

        A cell is a small part of the range of an array (`_cells.py`). The rule of the operation may
        refuse the whole range but accept some cells. Then the result has bounds for these cells. It
        also contains the refusal, for uses that need the whole range.
        """
        operation = operation_of(equation.primitive.name)
        elementwise = operation.rule is not None and operation.slots is at_one_place
        # `lt_to` puts -0 before 0. So its result may change although no operand changes as a
        # number.
        if (
            equation.primitive.name == "lt_to"
            or not elementwise
            or any(x is None or x.nan for x in operands)
        ):
            return outputs
        for x in operands:
            held = self.held.get(x, {})
            if not x.refusal and not any(one.alone for one in held.values()):
                self.held[x] = {**cells.separated(x), **held}
        given = [(x, self.held.get(x, {})) for x in operands]
        made = outputs[0] if outputs else None
        if not any(held for _, held in given) or (made and made.is_known):
            return outputs
        dtype, merging = np.dtype(aval(equation.outvars[0]).dtype), operation.merging
        try:
            if made is None:
                dtypes = {dtype, *(x.dtype for x in operands)}
                # A rule that refused the range of an operand may accept some cells, because a cell
                # is a smaller range. Other refusals would be the same in all cells.
                usual = isinstance(refusal, RangeRefusalError) and dtypes <= rounding.USUAL
                if merging.kind == "sum" or not usual:
                    return outputs
                like = dataclasses.replace(operands[0], dtype=dtype, pending=Pending())
                pending = carried(merging, equation.params, operands, like)
            else:
                pending = made.pending
            chooses = equation.primitive.name == "select_n"

            def rule(*xs: Abstract) -> Abstract:
                found: Any = operation.rule(*xs, **equation.params)  # type: ignore[misc]
                product = merging.kind in ("product", "quotient", "power")
                return vanishing(found, pending.bits) if product else found

            held = cells.of_result(rule, given, chooses=chooses)
            if not held:
                return outputs
            value = made or cells.stand_in(operands, held, dtype)
        except RefusalError:
            return outputs
        value = dataclasses.replace(value, pending=pending, refusal=None if made else refusal)
        for one in held.values():
            if one.good.all():
                value = dataclasses.replace(one.over(value), refusal=None)
        self.held[value] = held
        return [value]

    def recognized(
        self, scope: Scope, equation: Equation, operands: Sequence[Any], outputs: Any
    ) -> list[Any]:
        """Returns the result of an operation, tightened by facts about the arrays it combines.

        These facts are about order statistics, counts, and parts of a softmax. They are looked up
        by the abstract value of an array, because each abstract value belongs to one array.
        """
        if called(equation) or not outputs or len(outputs) > 1 or any(x is None for x in operands):
            return outputs
        (made,), name = outputs, equation.primitive.name
        if made.refusal or any(x.refusal for x in operands):
            return outputs
        if (shared := patterns.product(name, operands, self.softmaxes)) is not None:
            made = patterns.meeting(made, shared)
        if name == "sort" and is_sorted(made):
            made = self.sorts.setdefault(operands[0], made)
        found = combination(name, equation.params, operands, made, self.mixtures)
        if found is not None:
            made = found.tightened(made)
            self.mixtures[made] = found
        if name == "reduce_sum" and self.transfers:
            (x,) = operands
            held = self.held.get(x) or cells.separated(x)
            made = cells.sum_of_counts(x, made, held, self.transfers)
        if (both := cells.transfer(name, equation.params, operands, made)) is not None:
            self.transfers[made] = both
        if made is not outputs[0] and outputs[0] in self.held:
            self.held[made] = self.held[outputs[0]]
        mark = patterns.marked(name, equation.params, operands, self.softmaxes)
        if (mark := mark or patterns.exponentials_of(scope, equation)) is not None:
            self.softmaxes[made] = mark
        return [made]

    def note(self, jaxpr: jex.Jaxpr, lemma: Found) -> None:
        """Records the variance that a lemma found, because a release could compute it exactly.

        A lemma without a variance is ignored.
        """
        if (exact := exact_programs.VarianceOf.at(jaxpr, lemma.of, lemma.variance)) is not None:
            self.sums[self.path] = exact

    def outputs(self, jaxpr: jex.Jaxpr, equation: Equation, operands: list[Any]) -> list[Any]:
        """Returns the values of an operation's results, by a lemma, inner program, or rule."""
        if equation.primitive.name == "cond":
            return self.chosen(equation, operands)
        if not (inner := called(equation)):
            return self.ruled(equation, operands)
        if (kind := exact_programs.kind_of(equation)) is not None:
            if (refusal := next((x.refusal for x in operands if x.refusal), None)) is not None:
                raise refusal
            exact = kind.value(*operands)
            self.steps.append(Step(self.depth, kind.title, self.line, exact, self.path))
            return [exact]
        coarse = any(x.pending.coarse or x.refusal for x in operands)
        lemma = None if coarse else patterns.of_call(equation, operands)
        if lemma is not None:
            self.note(jaxpr, lemma)
        if lemma is not None and (found := lemma.value) is not None:
            flags = Pending.flags(x.pending for x in (found, *operands))
            found = dataclasses.replace(found, pending=found.pending.having(**flags))
            self.steps.append(Step(self.depth, f"lemma {lemma.name}", self.line, found, self.path))
            return [found]
        return self.inner_outputs(inner, operands)

    def chosen(self, equation: Equation, operands: list[Any]) -> list[Any]:
        """Returns the outputs of a `cond` or `switch`: a choice among those of its branches."""
        index, *given = operands
        branches = list(equation.params["branches"])
        # Branches for unsupported platforms never run. All supported platforms must run the same
        # branch.
        if (platforms := equation.params.get("branches_platforms")) is not None:
            kept = [k for k, names in enumerate(platforms) if names is None or _runs(names)]
            branches, index = [branches[k] for k in kept], constant(np.int32(0))
            if len(branches) != 1:
                raise RefusalError("proofs do not support code that differs between CPUs and GPUs")
        if index.nan or any(x.nan for x in given):
            raise RefusalError(
                "proofs do not support a cond or switch with operands that may be NaN. Use "
                "jnp.where instead"
            )
        found = [self.inner_outputs(branch, given) for branch in branches]
        chosen = list[Abstract]()
        for cases in zip(*found, strict=True):
            if (refusal := next((x.refusal for x in cases if x.refusal), None)) is not None:
                raise refusal
            one = choices.select(index, *cases)
            pending = carried(operation_of("select_n").merging, {}, [index, *cases], one)
            chosen.append(dataclasses.replace(one, pending=pending))
        return chosen

    def inner_outputs(self, inner: Any, operands: list[Any]) -> list[Any]:
        """Returns the outputs of an inner program."""
        self.depth += 1
        try:
            return self.run(*parts(inner), operands, in_part=True)
        finally:
            self.depth -= 1

    def ruled(self, equation: Equation, operands: Sequence[Abstract]) -> list[Abstract]:
        """Returns the values of an operation's results, by its rule."""
        # Dtypes without proofs, such as random keys, are refused here, because some rules ignore
        # dtypes.
        for variable in equation.outvars:
            check_dtype(aval(variable).dtype)
        operation = operation_of(equation.primitive.name)
        dtypes = (np.dtype(aval(equation.outvars[0]).dtype), *(x.dtype for x in operands))
        if not operation.narrow and rounding.NARROW.intersection(dtypes):
            raise RefusalError(
                "proofs of this operation do not support 16-bit floats. Compute in float32 instead"
            )
        of_nan = nans.RULES.get(equation.primitive.name)
        may_be_nan = any(x.nan for x in operands)
        if may_be_nan and of_nan is None:
            raise RefusalError(
                "an operand may be NaN (a missing number), and proofs of this operation do not "
                "support NaN. Replace NaN first, for example with jnp.where(jnp.isnan(x), 0, x)"
            )
        if equation.primitive.name == "scan":
            operands = [dataclasses.replace(x, answers=frozenset()) for x in operands]
            sums = loops.added_one_by_one(equation.params, operands)
            if any(worth_it(equation.params["length"], dtype) for dtype in sums):
                self.inexact[self.path] = f"scan{self.line}: {_ONE_BY_ONE}"
            shown, path, line = len(self.steps), self.path, self.line
            try:
                return loops.looped(self.run, self.tried, equation.params, operands)
            except RefusalError:
                del self.steps[shown:]
                self.path, self.line = path, line
                again = loops.by_invariant(self.run, self.tried, equation.params, operands)
                if again is None:
                    raise
                return again
        if operation.rule is None:
            raise RefusalError("proofs do not support this operation")
        try:
            if operation.exact and (exact := operation.exact(*operands, **equation.params)):
                exact_programs.with_sum(self.sums, self.path, exact)
        except RefusalError as refusal:
            self.inexact[self.path] = f"{equation.primitive.name}{self.line}: {refusal}"
        made = operation.rule(*operands, **equation.params)
        outputs = list[Abstract]()
        for found in made if isinstance(made, list) else [made]:
            pending = carried(operation.merging, equation.params, operands, found)
            # A compiler may multiply the factors of a product in another order, so that a partial
            # product underflows.
            if operation.merging.kind in ("product", "quotient", "power"):
                found = vanishing(found, pending.bits)
            # An entry changes only if an operand's entry changes, except for `lt_to`, which tells
            # -0 from 0.
            if operation.slots is at_one_place and equation.primitive.name != "lt_to":
                found = counted(found, operands)
            if may_be_nan and of_nan is not None:
                found = of_nan(equation.params, operands, found)
            outputs.append(dataclasses.replace(found, pending=pending))
        return outputs


def _runs(platforms: Sequence[str]) -> bool:
    """Whether a release may run on one of these platforms."""
    return not {"cpu", "gpu", "cuda", "rocm"}.isdisjoint(platforms)


def located(refusal: RefusalError, equation: Equation, line: str) -> RefusalError:
    """Returns the refusal with its operation, source line and remedy.

    A refusal that already has them is returned unchanged.
    """
    if refusal.args[1:]:
        return refusal
    name, reason = equation.primitive.name, str(refusal)
    shapes = [f"{x.dtype}{list(x.shape)}" for x in map(aval, equation.invars)]
    remedy = operation_of(name).remedy
    # A reason of several sentences already ends with a remedy. Then only a remedy that is specific
    # to this operation is added.
    if ". " not in reason or remedy != Operation().remedy:
        reason = f"{reason}. Remedy: {remedy}"
    text = f"{_NO_PROOF}{name}({', '.join(shapes)}){line}: {reason}{_SAMPLED}"
    return type(refusal)(text, "located")


def check_no_nan(jaxpr: jex.Jaxpr, outputs: Sequence[Abstract]) -> None:
    """Refuses a program with an output that may be NaN."""
    for atom, x in zip(jaxpr.outvars, outputs, strict=True):
        if x.nan:
            refusal = RefusalError(
                "the value may be NaN, and then it would not be released. Replace NaN first, for "
                "example with jnp.where(jnp.isnan(x), 0, x)"
            )
            made = Scope(jaxpr).definition(atom)
            raise located(refusal, made, source_line(made)) if made else refusal


def _check_type(expected: Any, found: Abstract) -> None:
    if tuple(expected.shape) != found.shape or np.dtype(expected.dtype) != found.dtype:
        raise RefusalError(
            f"the rule returned {found.dtype}{list(found.shape)}, but the program has "
            f"{expected.dtype}{list(expected.shape)}"
        )
