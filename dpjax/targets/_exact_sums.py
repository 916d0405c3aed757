"""`exact_sums`: a target whose sums over the records are exact, in any order."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Target
from dpjax.proving._exact_targets import exact_bounds
from dpjax.proving._prove_sensitivity import public_bounds


def exact_sums(target: Target, *, bounds: PyTree) -> Callable[[Database], Value]:
    """The same target on clamped records, with exact sums over the records.

    A float sum of n numbers may be off by n units in the last place. If n is large, this error
    hides the effect of one record, and a sampled distance measures the error instead. The error
    also differs between devices. `dpjax.prove_sensitivity` makes these sums exact without this
    function. For targets without a proof, sample and release the function that is returned here.

    Each sum, matrix product, cumulative sum, window sum or scatter-add over records is computed as
    a sum of integers, if the error of the float sum may exceed a hundredth of a term. A term is
    rounded to a grid, whose step follows from the public range of the terms, and the total is
    rounded once to the dtype of the terms. So the value differs from the target's by rounding.

    Args:
        target: a pure JAX function of a database.
        bounds: public bounds on a record, as for `dpjax.prove_sensitivity`: (low, high), or a
            pytree like a database. Records are clamped to them.

    Returns:
        A function of a database. `explain()` of its sampled sensitivity lists the exact sums.

    Raises:
        TypeError: if target is not a function, or bounds are of the wrong type.
        ValueError: if a sum over the records cannot be exact, with its line: no bound on its terms
            follows from `bounds`, columns have very different ranges, a `while` loop or a branch
            contains the sum, or a loop adds up records one by one.

    Formal guarantees:
        No sensitivity is known. The exact sums have the same bits in any order of the records, on
        CPUs and GPUs, alone and under `vmap`, if the terms have the same bits.

    Source:
        docs/proofs/global-sensitivity.md, "Exact sums".

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import dpjax
        >>> target = dpjax.targets.exact_sums(jnp.mean, bounds=(-1, 1))
        >>> found = dpjax.sample_sensitivity(
        ...     dpjax.random.seeded_key(0),
        ...     target,
        ...     lambda key, n: jax.random.uniform(key, (n,), minval=-1),
        ...     n=10_000,
        ...     norm="l1",
        ...     gamma=0.1,
        ...     m=50,
        ... )
        >>> found.explain().splitlines()[0]
        'exact sum float32[10000] -> float32[], terms within 2^1 ...'
    """
    _checks.function("target", target)

    @functools.wraps(target, updated=())
    def exact_target(database: Database) -> Value:
        arrays = jax.tree.map(jnp.asarray, database)
        specs, public = public_bounds(arrays, bounds)
        return exact_bounds(target, specs, public).enforced_on(target)(arrays)

    return exact_target
