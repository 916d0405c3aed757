"""Targets of sums over records: `summable`, for faster sampling, and `exact_sums`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import _checks
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Target
from dpjax.proving._exact_targets import exact_bounds
from dpjax.proving._prove_sensitivity import public_bounds
from dpjax.sensitivity._sums import Summable


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


def summable(
    statistic: Callable[[PyTree], PyTree],
    finish: Callable[[PyTree], Value] = lambda total: total,
    *,
    average: bool = False,
) -> Summable:
    """A target that is a function of a sum: f(D) = finish(sum_i statistic(x_i)).

    Neighbors share n - 1 records, and the sampler computes their sum once. If the traced operations
    of `finish` are affine, the sampler computes f(D) - f(D') from only the two records that differ,
    without cancellation. If the oracle also draws independent records
    (`dpjax.oracles.independent`), the sampler draws only these two.

    Args:
        statistic: maps one record, the database's pytree without the leading axis, to a pytree of
            real arrays.
        finish: maps the sum to the value. By default the sum is the value.
        average: divides the sum by n before `finish` gets it.

    Returns:
        A target: maps a database to the value.

    Raises:
        TypeError: if statistic or finish is not a function.

    Formal guarantees:
        No sensitivity is known. The sampled distances equal those of the target up to rounding. The
        sampler measures the rounding of the released target on random databases, and adds it to the
        estimate, as for any other target.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, whose pairs share n - 1 records.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> variance = targets.summable(
        ...     lambda x: {"x": x, "square": x**2},
        ...     lambda mean: mean["square"] - mean["x"] ** 2,
        ...     average=True,
        ... )
        >>> float(variance(jnp.array([1.0, 3.0])))
        1.0
    """
    _checks.function("statistic", statistic)
    _checks.function("finish", finish)
    return Summable(statistic, finish, average)


def log_likelihoods(
    log_likelihood: Callable[[PyTree, PyTree], jax.Array], parameters: PyTree
) -> Summable:
    """A target: log p(D | theta) for each parameter in a public list, with independent records.

    This is the target of Section 4 of the paper (see Source), for a list of theta instead of all
    theta. If records are dependent, write a target that returns the K log likelihoods of a
    database.

    Args:
        log_likelihood: maps one record and one parameter to log p(record | parameter), a float.
            Terms that do not depend on the parameter may be left out, because they shift all K log
            likelihoods equally. Keep it finite on every record, by clamping the record or by a
            lower limit: a record with probability 0 under a parameter makes the sensitivity
            infinite.
        parameters: public, a pytree of arrays with leading axis K: a grid, or draws from the prior.

    Returns:
        A `dpjax.targets.summable` target: maps a database to floats of shape (K,). Sample its
        sensitivity in the norm "range", and release it by `dpjax.posterior_sampler`.

    Raises:
        TypeError: if log_likelihood is not a function, or parameters are not arrays.

    Formal guarantees:
        No sensitivity is known. Replacing a record x by x' changes the values by log p(x' | theta)
        - log p(x | theta), for any n.

    Source:
        Rubinstein and Aldà (2017), section 4; Dimitrakakis et al. (2014).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> target = targets.log_likelihoods(
        ...     lambda x, rate: x * jnp.log(rate) - rate, jnp.array([1.0, 2.0])
        ... )
        >>> target(jnp.array([0.0, 0.0, 0.0])).tolist()
        [-3.0, -6.0]
    """
    _checks.function("log_likelihood", log_likelihood)
    fixed = _checks.real_arrays("parameters", parameters)

    def statistic(record: PyTree) -> jax.Array:
        return jax.vmap(lambda parameter: log_likelihood(record, parameter))(fixed)

    return summable(statistic)
