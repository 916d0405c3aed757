"""The rule of `lax.scan`, and of `lax.fori_loop` with a fixed number of steps: unrolled.

One step after the other is walked like an inner program, so nothing is assumed of the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpjax._tracing._walks import live, parts
from dpjax.proving._layout import broadcast, cut, join, squeeze
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract

_MOST_OPERATIONS = 2000
Run = Callable[[Any, Sequence[object], Sequence[Abstract]], list[Abstract]]


def unrolled(run: Run, parameters: Any, operands: Sequence[Abstract]) -> list[Abstract]:
    """The last carry, and the results of all steps along a new first axis."""
    body, consts = parts(parameters["jaxpr"])
    length, fixed = parameters["length"], parameters["num_consts"]
    carries = parameters["num_carry"]
    if length * len(live(body)) > _MOST_OPERATIONS:
        raise RefusalError(
            f"{length} steps have more operations than the {_MOST_OPERATIONS} that a proof walks"
        )
    public, carry = operands[:fixed], list(operands[fixed : fixed + carries])
    arrays = operands[fixed + carries :]
    made: list[list[Abstract]] = [[] for _ in body.outvars[carries:]]
    order = range(length)
    for step in reversed(order) if parameters["reverse"] else order:
        found = run(body, consts, [*public, *carry, *(_one(x, step) for x in arrays)])
        carry = found[:carries]
        for results, result in zip(made, found[carries:], strict=True):
            results.append(result)
    if parameters["reverse"]:
        made = [results[::-1] for results in made]
    if made and not length:
        raise RefusalError("a loop without steps has no rule")
    return [*carry, *(join([_row(x) for x in results], 0) for results in made)]


def _one(x: Abstract, step: int) -> Abstract:
    rest = [0] * (len(x.shape) - 1)
    row = cut(x, [step, *rest], [step + 1, *x.shape[1:]], [1] * len(x.shape))
    return squeeze(row, (0,))


def _row(x: Abstract) -> Abstract:
    return broadcast(x, (1, *x.shape), tuple(range(1, len(x.shape) + 1)))
