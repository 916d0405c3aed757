"""For sampled sensitivities: a line that says which bound a proof would give.

A proof needs bounds on records. The oracle that draws records for sampling does not state them. So
two ranges are tried. In the wide range [-2^20, 2^20], only targets that clip their records have a
useful bound. For all other targets, the range [0, 1] serves as an example.
"""

import contextlib
import functools
import math
from typing import cast, get_args

import jax
import jax.extend.core as jex
import numpy as np

from dpjax._core._guarantee import shown_number
from dpjax._core._proof import Interval, Proof, RecordBounds
from dpjax._core._values import Norm, Target
from dpjax._tracing._programs import Program
from dpjax._tracing._walks import aval, equations
from dpjax.proving._exact_programs import exact_steps
from dpjax.proving._prove_sensitivity import ProvedNorm, own_bound, walked_bound

# Larger programs are skipped, because their proofs would take longer than 50 ms.
_MOST_OPERATIONS, _MOST_CONSTANTS, _MOST_PER_RECORD = 80, 2**14, 2**10
_WIDE, _USEFUL = 2**20, 100


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
        if isinstance(norm, str) and norm in get_args(ProvedNorm) and _is_small(program):
            line = _line(target, program, cast(ProvedNorm, norm), estimate)
    return Proof(steps, summary=line or "") if steps or line else None


def _line(target: Target, program: Program, norm: ProvedNorm, estimate: float) -> str | None:
    specs = program.inputs.argument(0).tree()
    own = own_bound(target, norm, specs)
    if math.isfinite(own) and own > 0:
        return f"its own proof gives {shown_number(own)} at gamma 0: see target.sensitivity"
    dtypes = [np.dtype(x.dtype) for x in jax.tree.leaves(specs)]
    for low, high, shown in ((-_WIDE, _WIDE, "[-2^20, 2^20]"), (0, 1, "[0, 1]")):
        # All arrays have the same bounds, clipped to the range of each dtype.
        kinds = map(_ends, dtypes)
        ends = tuple(Interval(max(low, least), min(high, most)) for least, most in kinds)
        bound = _walked(program, norm, RecordBounds(ends))
        if 0 < bound < math.inf and (high == 1 or bound <= _USEFUL * estimate):
            every = [(b.low, b.high) for b in ends] == list(map(_ends, dtypes))
            records = "all records" if every else f"records in {shown}"
            return f"dpjax.prove_sensitivity proves {shown_number(bound)} at gamma 0 for {records}"
    return None


# Programs are compared by their fingerprints. So if a target is traced again, its bound comes from
# the cache.
_walked = functools.lru_cache(maxsize=64)(walked_bound)


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
