"""Estimates how much memory a traced program needs, by the size of its largest array.

XLA fuses elementwise operations into the loop of the reduction that uses their results. So the
terms of a sum take no memory, unless another operation also needs them. Accelerators differ in this
respect: for a kernel density, XLA stores the terms on an H200, but not on an H100.
"""

import dataclasses
from collections.abc import Sequence

import jax.extend.core as jex

from dpjax._tracing._walks import Equation, aval, called, names, passed, reached_from, run

# Elementwise primitives: each element of a result depends on one element of each operand.
_BY_ELEMENT = names(
    "add add_any sub mul div rem neg abs square sqrt rsqrt integer_pow pow exp exp2 expm1 log",
    "log1p logistic tanh sin cos erf max min clamp floor ceil round sign eq ne lt le gt ge and or",
    "xor not select_n is_finite shift_left shift_right_logical shift_right_arithmetic",
    "stop_gradient convert_element_type bitcast_convert_type broadcast_in_dim squeeze",
)
_REDUCTIONS = names("reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or")
_WHOLE = object()  # A marker in `uses`: some operation needs the whole array in memory.


@dataclasses.dataclass(eq=False)
class _Array:
    """An array of the program that depends on the inputs.

    Attributes:
        size: the size in bytes.
        fusible: whether the array is the result of an elementwise operation.
        uses: the reductions that can compute the array inside their loops. The set
            also contains `_WHOLE` if an operation needs the whole array in memory.
    """

    size: int
    fusible: bool = False
    uses: set[object] = dataclasses.field(default_factory=set[object])

    @property
    def is_written(self) -> bool:
        # If two loops need the same array, XLA may compute it in both loops, or store it. The
        # estimate assumes that XLA stores it.
        return not self.fusible or _WHOLE in self.uses or len(self.uses) > 1


def largest_array(program: jex.ClosedJaxpr, inputs: Sequence[jex.Var], *, fused: bool) -> int:
    """Returns the size in bytes of the largest array that depends on the given inputs.

    If `fused` is true, arrays that XLA does not write to memory are ignored, except in the bodies
    of loops, where all arrays count.
    """
    arrays, inside = list[_Array](), list[int]()
    steps = list[tuple[str, list[_Array], list[_Array]]]()

    def array(variable: jex.Var, *, fusible: bool = False) -> _Array:
        arrays.append(_Array(_bytes(variable), fusible))
        return arrays[-1]

    # An operand that is None stands for an array that does not depend on the given inputs.
    def operation(equation: Equation, operands: list[_Array | None]) -> Sequence[_Array | None]:
        if (inner := called(equation)) is not None:
            return run(inner, operands, operation, _unreached)
        found = [x for x in operands if x is not None]
        if not found:
            return [None] * len(equation.outvars)
        name, atoms = equation.primitive.name, zip(equation.invars, operands, strict=True)
        reached = {v for v, x in atoms if isinstance(v, jex.Var) and x is not None}
        inside.extend(_sizes_inside(equation, reached))
        results = [array(v, fusible=name in _BY_ELEMENT) for v in equation.outvars]
        steps.append((name, found, results))
        return results

    variables = program.jaxpr.invars
    given = [array(v) if v in inputs else None for v in variables]
    outputs = [x for x in run(program, given, operation, _unreached) if x is not None]
    for output in outputs:
        output.uses.add(_WHOLE)
    for number, (name, operands, results) in reversed(list(enumerate(steps))):
        uses = {number} if name in _REDUCTIONS else {_WHOLE}
        if name in _BY_ELEMENT:
            uses = set[object]().union(*(result.uses for result in results))
        for operand in operands:
            operand.uses |= uses
    return max([*inside, *(x.size for x in arrays if x.is_written or not fused)], default=0)


def _unreached(constant: object) -> None:
    del constant


def _sizes_inside(equation: Equation, reached: set[jex.Var]) -> list[int]:
    """Returns the sizes in bytes of the arrays in an operation's inner jaxprs, such as loop bodies.

    Only arrays that depend on `reached` are included.
    """
    sizes = list[int]()
    for inner in jex.jaxprs_in_params(equation.params):
        found = reached_from(inner, passed(inner, equation, reached))
        sizes += map(_bytes, found)
        for operation in inner.eqns:
            sizes += _sizes_inside(operation, found)
    return sizes


def _bytes(variable: jex.Var) -> int:
    found = aval(variable)
    return found.size * getattr(found.dtype, "itemsize", 16)  # The dtype of keys has no itemsize.
