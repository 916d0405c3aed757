"""The rule of `lax.scan`, and of `lax.fori_loop` with a fixed number of steps.

Of few steps, one after the other is walked like an inner program, so nothing is assumed of the
loop. Of many steps, or if each takes one record, an invariant is walked (_long_loops.py). XLA
unrolls loops of at most 64 steps, and so may join operations of two steps of a short loop. Where
carries are sums and counters alone, joining steps changes no bound.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpjax._tracing._walks import live, parts, sizes_of_scan
from dpjax.proving._layout import broadcast, cut, join, squeeze
from dpjax.proving._long_loops import LongLoop, Run
from dpjax.proving._refusal import RefusalError
from dpjax.proving._value import Abstract, norm_of

_MOST_OPERATIONS, _MOST_UNROLLED = 2000, 64


def looped(run: Run, tried: Run, parameters: Any, operands: Sequence[Abstract]) -> list[Abstract]:
    """The last carry, and the results of all steps along a new first axis."""
    body, _ = parts(parameters["jaxpr"])
    few = parameters["length"] * len(live(body)) <= _MOST_OPERATIONS
    loop = LongLoop(parameters, operands)
    apart = parameters["length"] > _MOST_UNROLLED and parameters["unroll"] == 1
    if few and not (loop.by_record and (apart or not loop.others)):
        return _unrolled(run, parameters, operands)
    if loop.others and not apart:
        raise RefusalError(
            f"{parameters['length']} steps have more operations than the {_MOST_OPERATIONS} that a"
            " proof walks"
        )
    if not few:
        return loop.outputs(run, tried)
    return _smallest(
        lambda: loop.outputs(run, tried), lambda: _unrolled(tried, parameters, operands)
    )


def _smallest(*ways: Callable[[], list[Abstract]]) -> list[Abstract]:
    """The results of the way whose bound is least."""
    found, refusals = list[list[Abstract]](), list[RefusalError]()
    for way in ways:
        try:
            found.append(way())
        except RefusalError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]
    return min(found, key=lambda xs: norm_of(xs, "l1"))


def _unrolled(run: Run, parameters: Any, operands: Sequence[Abstract]) -> list[Abstract]:
    body, consts = parts(parameters["jaxpr"])
    length, (fixed, carries) = parameters["length"], sizes_of_scan(parameters)
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
