"""The walk over a traced program, with one rule for each operation.

docs/proofs/global-sensitivity.md has the proof.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax import lax

from dpjax._tracing._walks import Atom, Equation, aval, called, live, parts
from dpjax.proving import _choices as choices
from dpjax.proving import _convolutions as convolutions
from dpjax.proving import _elementary as elementary
from dpjax.proving import _elementwise as elementwise
from dpjax.proving import _inline as inline
from dpjax.proving import _layout as layout
from dpjax.proving import _lemmas as lemmas
from dpjax.proving import _loops as loops
from dpjax.proving import _pending as pending
from dpjax.proving import _places as places
from dpjax.proving import _powers as powers
from dpjax.proving import _products as products
from dpjax.proving import _reductions as reductions
from dpjax.proving import _rounding as rounding
from dpjax.proving import _sequences as sequences
from dpjax.proving import _windows as windows
from dpjax.proving._pending_facts import Pending
from dpjax.proving._refusal import OverflowRefusalError, RefusalError
from dpjax.proving._slices import Program
from dpjax.proving._value import Abstract, as_dense, check_dtype, constant

_REMEDIES = {
    "while": "sample it, or unroll a loop of a fixed number of steps in Python",
    "scan": "clip what each step carries, take fewer steps, or sample it",
    "dynamic_slice": "take rows by jax.lax.scan over them, or at public places, or sample it",
    "cond": "choose with jnp.where",
    "conv_general_dilated": "convolve records, as the batch, with a public kernel, or sample it",
    "pure_callback": "write it in JAX, or sample it",
    "argmax": "release the scores, or use dpjax.exponential",
    "argmin": "release the scores, or use dpjax.exponential",
}
_ROUND = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "sign": np.sign,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a proof: what it is, where it is written, and how far its value moves.

    `path` leads to it: the place among the live operations of each program that holds it.
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
        d = as_dense(self.value).others
        one = self.value.changed
        shown = f"one record moves it by {one.l1:.4g} in l1, {one.l2:.4g} in l2"
        if self.value.axis is None:
            shown = f"moves by {d.l1:.4g} in l1, {d.l2:.4g} in l2, {d.each.max():.4g} in linf"
        elif self.value.others.l1:
            shown += f", others by {self.value.others.l1:.4g} in l1"
        ends = f"[{self.value.low.min():.4g}, {self.value.high.max():.4g}]"
        shape = f"{self.value.dtype}{list(self.value.shape)}"
        return f"{'  ' * self.depth}{self.operation} {shape} in {ends}; {shown}  {self.place}"


@dataclasses.dataclass
class Walk:
    """The state of a walk: the steps so far."""

    steps: list[Step]
    depth: int = 0
    path: tuple[int, ...] = ()

    def run(
        self, jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[Abstract | None]
    ) -> list[Abstract]:
        """The outputs of a program, from those inputs that may be used."""
        values: dict[jex.Var, Abstract | None] = {}
        values.update(zip(jaxpr.constvars, map(constant, consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        program = Program(jaxpr)
        refused: dict[Atom, RefusalError] = {}

        def read(atom: Atom) -> Abstract:
            if isinstance(atom, jex.Literal):
                return constant(np.asarray(atom.val, aval(atom).dtype))
            if (found := values[atom]) is None:
                unclamped = RefusalError("the program uses records that were not clamped")
                raise refused.get(atom, unclamped)
            return found

        outer = self.path
        for count, equation in enumerate(live(jaxpr)):
            self.path = (*outer, count)
            try:
                if equation.effects:
                    raise RefusalError(f"it has side effects: {equation.effects}")
                outputs: list[Abstract] | None = self.outputs(equation, read)
                for variable, output in zip(equation.outvars, outputs, strict=True):
                    _check_type(aval(variable), output)
            except RefusalError as refusal:
                # It counts where its value is used; a lemma may know a result without it.
                outputs = None
                reason = self.located(refusal, equation)
                refused.update(dict.fromkeys(equation.outvars, reason))
                if equation.effects or isinstance(refusal, OverflowRefusalError):
                    raise reason from None
            name, place = equation.primitive.name, source_line(equation)
            walked = outputs[0] if outputs else None
            try:
                lemma = inline.improved(program, equation, values, walked)
            except RefusalError as refusal:
                raise self.located(refusal, equation) from None
            if lemma:
                name, outputs = f"{name}: lemma {lemma[0]}", [lemma[1]]
            for k, variable in enumerate(equation.outvars):
                values[variable] = outputs[k] if outputs else None
                if outputs and not called(equation):
                    self.steps.append(Step(self.depth, name, place, outputs[k], self.path, k))
        self.path = outer
        return [read(atom) for atom in jaxpr.outvars]

    def tried(
        self, jaxpr: jex.Jaxpr, consts: Sequence[object], inputs: Sequence[Abstract | None]
    ) -> list[Abstract]:
        """The same, of which no step is shown."""
        shown, path = len(self.steps), self.path
        try:
            return self.run(jaxpr, consts, inputs)
        finally:
            del self.steps[shown:]
            self.path = path

    def outputs(self, equation: Equation, read: Callable[[Atom], Abstract]) -> list[Abstract]:
        """What the rule of an operation says; an inner program is walked."""
        operands = [read(atom) for atom in equation.invars]
        if inner := called(equation):
            coarse = any(x.pending.coarse for x in operands)
            if not coarse and (found := lemmas.known(equation, inner, operands)) is not None:
                place = source_line(equation)
                lemma = f"lemma {equation.params['name']}"
                flags = Pending.flags([found.pending, *(x.pending for x in operands)])
                found = dataclasses.replace(found, pending=found.pending.having(**flags))
                self.steps.append(Step(self.depth, lemma, place, found, self.path))
                return [found]
            self.depth += 1
            jaxpr, consts = parts(inner)
            try:
                return self.run(jaxpr, consts, operands)
            finally:
                self.depth -= 1
        for variable in equation.outvars:
            check_dtype(aval(variable).dtype)
        name, dtype = equation.primitive.name, np.dtype(aval(equation.outvars[0]).dtype)
        if name not in rounding.OF_16_BITS and rounding.NARROW.intersection(
            (dtype, *(x.dtype for x in operands))
        ):
            raise RefusalError("floats of 16 bits have no rule here: compute in float32")
        if name == "scan":
            return loops.looped(self.run, self.tried, equation.params, operands)
        if name == "split":
            return sequences.split(operands[0], equation.params["sizes"], equation.params["axis"])
        rule = RULES.get(name)
        if rule is None:
            raise RefusalError("it has no rule")
        found = rule(equation.params, dtype, *operands)
        joined = pending.carried(name, equation.params, operands, found)
        if name in pending.PRODUCTS:
            found = elementwise.vanishing(found, joined.bits)
        found = dataclasses.replace(found, pending=joined)
        return [found]

    def located(self, refusal: RefusalError, equation: Equation) -> RefusalError:
        """The refusal with its equation, its line and a remedy; that of an inner program stays."""
        if refusal.args[1:]:
            return refusal
        name = equation.primitive.name
        shapes = [f"{x.dtype}{list(x.shape)}" for x in map(aval, equation.invars)]
        remedy = _REMEDIES.get(name, "clip per record, write it in other operations, or sample it")
        text = (
            f"no proof for {name}({', '.join(shapes)}){source_line(equation)}: {refusal}. Remedy:"
            f" {remedy} (dpjax.sample_sensitivity)"
        )
        return type(refusal)(text, "located")


def _check_type(expected: Any, found: Abstract) -> None:
    if tuple(expected.shape) != found.shape or np.dtype(expected.dtype) != found.dtype:
        raise RefusalError(
            f"the rule gave {found.dtype}{list(found.shape)}, and the program has"
            f" {expected.dtype}{list(expected.shape)}"
        )


def source_line(equation: Equation) -> str:
    """Where the user wrote an operation: the innermost frame outside of JAX and dpjax."""
    traceback: Any = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not any(f"/{name}/" in frame.file_name for name in ("jax", "dpjax", "jaxlib")):
            return f" at {frame.file_name}:{frame.line_num}"
    return ""


Rule = Callable[..., Abstract]


def _plain(rule: Rule) -> Rule:
    return lambda parameters, dtype, *xs: rule(*xs, dtype=dtype)


def _comparison(name: str) -> Rule:
    return lambda parameters, dtype, *xs: choices.compare(name, *xs)


def _logic(name: str) -> Rule:
    return lambda parameters, dtype, *xs: choices.logic(name, *xs)


def _elementary(name: str) -> Rule:
    def rule(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
        if parameters.get("accuracy") is not None:
            raise RefusalError("an accuracy of its own has no rule: leave it out")
        return elementary.ELEMENTARY[name](x, dtype=dtype)

    return rule


def _rounding(name: str) -> Rule:
    def rule(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
        # np.round rounds halves to even; the other method would leave its interval.
        method = parameters.get("rounding_method", lax.RoundingMethod.TO_NEAREST_EVEN)
        if method != lax.RoundingMethod.TO_NEAREST_EVEN:
            raise RefusalError("halves that round away from 0 have no rule: use jnp.round")
        return elementwise.steps(x, _ROUND[name], dtype=dtype)

    return rule


def _same(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
    return x


def _sum(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
    return reductions.sum_over(x, parameters["axes"])


def _extremum(largest: bool) -> Rule:
    return lambda parameters, dtype, x: reductions.extremum_over(
        x, parameters["axes"], largest=largest
    )


def _any_or_all(largest: bool) -> Rule:
    def rule(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
        if x.dtype != choices.BOOL:
            raise RefusalError("bits of integers have no rule: use booleans")
        return reductions.extremum_over(x, parameters["axes"], largest=largest)

    return rule


def _reshape(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
    if parameters.get("dimensions") is not None:
        raise RefusalError("a reshape that also transposes has no rule: transpose first")
    return layout.reshape(x, parameters["new_sizes"])


def _sort(parameters: Any, dtype: np.dtype, *xs: Abstract) -> Abstract:
    if len(xs) != 1:
        raise RefusalError("a sort of several arrays has no rule")
    return reductions.sort(xs[0], parameters["dimension"])


def _slice(parameters: Any, dtype: np.dtype, x: Abstract) -> Abstract:
    steps = parameters["strides"] or [1] * len(x.shape)
    return layout.cut(x, parameters["start_indices"], parameters["limit_indices"], steps)


def _dot(parameters: Any, dtype: np.dtype, a: Abstract, b: Abstract) -> Abstract:
    precision = parameters["precision"]
    wanted = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if dtype.kind == "f" and precision not in (wanted, lax.Precision.HIGHEST):
        raise RefusalError(f"precision {precision} has no rule: leave it out, for the highest")
    return products.contract(a, b, parameters["dimension_numbers"], dtype)


def _mode(parameters: Any) -> str:
    return str(getattr(parameters["mode"], "name", parameters["mode"])).lower()


def _scatter_add(parameters: Any, dtype: np.dtype, *xs: Abstract) -> Abstract:
    start, indices, updates = xs
    if parameters["unique_indices"] or parameters["indices_are_sorted"]:
        raise RefusalError("a promise about private indices has no rule: leave it out")
    if len(updates.shape) > 1:
        return places.add_rows(start, indices, updates, parameters)
    numbers = parameters["dimension_numbers"]
    return products.add_at_places(start, indices, updates, numbers, _mode(parameters))


def _gather(parameters: Any, dtype: np.dtype, x: Abstract, index: Abstract) -> Abstract:
    if index.is_known and not x.is_public:
        return places.take(x, index, parameters)
    return places.look_up(x, index, parameters)


RULES: dict[str, Rule] = {
    "add": _plain(elementwise.add),
    "add_any": _plain(elementwise.add),
    "sub": lambda parameters, dtype, a, b: elementwise.add(a, b, sign=-1, dtype=dtype),
    "mul": _plain(elementwise.multiply),
    "div": _plain(elementwise.quotient),
    "neg": _plain(elementwise.negative),
    "abs": _plain(elementwise.absolute),
    "square": _plain(elementwise.square),
    "pow": _plain(powers.power),
    "integer_pow": lambda parameters, dtype, x: elementwise.integer_power(
        x, parameters["y"], dtype=dtype
    ),
    "max": lambda parameters, dtype, a, b: elementwise.extremum(a, b, largest=True, dtype=dtype),
    "min": lambda parameters, dtype, a, b: elementwise.extremum(a, b, largest=False, dtype=dtype),
    "clamp": _plain(elementwise.clamp),
    **{name: _elementary(name) for name in elementary.ELEMENTARY},
    **{name: _rounding(name) for name in _ROUND},
    **{name: _comparison(name) for name in choices.COMPARISONS},
    **{name: _logic(name) for name in ("and", "or", "xor", "not")},
    "select_n": lambda parameters, dtype, *xs: choices.select(*xs),
    "is_finite": lambda parameters, dtype, x: choices.is_finite(x),
    "convert_element_type": lambda parameters, dtype, x: choices.convert(x, dtype),
    "stop_gradient": _same,
    "copy": _same,
    "copy_p": _same,
    "reduce_sum": _sum,
    "reduce_max": _extremum(True),
    "reduce_min": _extremum(False),
    "reduce_or": _any_or_all(True),
    "reduce_and": _any_or_all(False),
    "sort": _sort,
    "broadcast_in_dim": lambda parameters, dtype, x: layout.broadcast(
        x, parameters["shape"], parameters["broadcast_dimensions"]
    ),
    "reshape": _reshape,
    "squeeze": lambda parameters, dtype, x: layout.squeeze(x, parameters["dimensions"]),
    "transpose": lambda parameters, dtype, x: layout.transpose(x, parameters["permutation"]),
    "slice": _slice,
    "concatenate": lambda parameters, dtype, *xs: layout.join(xs, parameters["dimension"]),
    "iota": lambda parameters, dtype: layout.iota(
        parameters["shape"], parameters["dimension"], dtype
    ),
    "dot_general": _dot,
    "conv_general_dilated": convolutions.convolve,
    "reduce_window_sum": windows.pooled_sum,
    "reduce_window_max": windows.pooled_extremum(True),
    "reduce_window_min": windows.pooled_extremum(False),
    "gather": _gather,
    "cumsum": lambda parameters, dtype, x: sequences.cumulative_sum(
        x, parameters["axis"], reverse=parameters["reverse"]
    ),
    "stack": lambda parameters, dtype, *xs: sequences.stack(xs, parameters["axis"]),
    "tile": lambda parameters, dtype, x: sequences.tile(x, parameters["reps"]),
    "dynamic_slice": lambda parameters, dtype, x, *starts: sequences.dynamic_slice(
        x, starts, parameters["slice_sizes"]
    ),
    "rev": lambda parameters, dtype, x: sequences.reverse(x, parameters["dimensions"]),
    "pad": lambda parameters, dtype, x, value: sequences.pad(
        x, value, parameters["padding_config"]
    ),
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
}
