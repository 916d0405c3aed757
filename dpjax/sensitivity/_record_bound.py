"""`record_bound`: sampled sensitivities of regularized linear classifiers, without training them.

The bound for a pair is computed from the two records that differ alone. docs/proofs/record-bound.md
has the proofs.
"""

import math
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._types import Key, PyTree
from dpjax._core._values import Sensitivity, Target
from dpjax._exact._numerics import is_float, sum_up
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._lanes import refuse_touching
from dpjax._tracing._programs import Program, check_concrete
from dpjax.oracles._independent import IndependentRecords
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._plan import point_of_each

# Pairs are drawn in chunks of about this many bytes.
_BYTES = 2**26
# This factor covers the rounding errors of the last few operations, in float64.
_OUTWARD = 1 + 2.0**-40


def record_bound(
    key: Key,
    target: Target,
    oracle: IndependentRecords,
    *,
    row: Callable[[PyTree], jax.Array],
    regularization: float,
    residual: float,
    n: int,
    m: int | None = None,
    gamma: float | None = None,
    confidence: float = 0.99,
) -> Sensitivity:
    """The sampled sensitivity of logistic regression or a linear SVM, without fitting anything.

    The target minimizes (1/n) sum_i loss(u_i'w) + (lambda / 2) ||w||^2. The row u_i is the label,
    -1 or 1, times the features. The loss is logistic or the hinge. If a record with row u is
    replaced by a record with row v, the minimizer changes by at most max(||u||, ||v||, ||u - v||) /
    (n lambda). This bound needs no training, so millions of pairs take seconds, and gamma can be
    10^-6.

    Args:
        key: a typed key, as for `dpjax.sample_sensitivity`.
        target: maps a database to the weights, shape (d,).
        oracle: an oracle of independent records, from `dpjax.oracles`.
        row: maps a record to u, floats of shape (d,). If the target clips its rows, `row` must
            clip them, too.
        regularization: lambda, above 0.
        residual: a bound on the norm of the objective's gradient at the returned weights, on every
            database, rounding included.
        n: the number of records in a database.
        m: number of pairs, as for `dpjax.sample_sensitivity`.
        gamma: as for `dpjax.sample_sensitivity`.
        confidence: probability over the samples.

    Returns:
        A `Sensitivity` in the norm "l2", for this target.

    Raises:
        TypeError: if the oracle does not draw independent records, or target or row is not a
            function.
        ValueError: if a number is out of range, if `row` contains an operation that may mix the
            lanes of a `vmap`, such as draws with "rbg" keys, or if the target's value has another
            shape than a row. For an intercept, append a constant feature to every row, so that its
            weight is penalized. The bound is false for an unpenalized intercept, because then even
            a record with row 0 changes the weights.

    Formal guarantees:
        As for `dpjax.sample_sensitivity`: with the stated confidence, P(G <= value) >= 1 - gamma,
        because the bound holds for each pair (docs/proofs/record-bound.md). You vouch that the
        target minimizes this objective up to the residual.

    Source:
        Chaudhuri, Monteleoni and Sarwate (2011), Lemma 7, applied to the rows of each pair.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> people = dpjax.oracles.independent(
        ...     lambda key: {"x": jax.random.uniform(key, (2,)) / 2, "y": jnp.float32(1)}
        ... )
        >>> sensitivity = dpjax.record_bound(
        ...     jax.random.key(0),
        ...     dpjax.targets.logistic_regression(regularization=0.1),
        ...     people,
        ...     row=lambda person: jnp.where(person["y"] > 0, 1.0, -1.0) * person["x"],
        ...     regularization=0.1,
        ...     residual=1e-5,
        ...     n=1000,
        ...     gamma=1e-3,
        ... )
        >>> 0.006 < sensitivity.value < 0.0073
        True
    """
    key = sampling_key(key)
    _checks.host_only("record_bound", key, "your own formula")
    if not isinstance(oracle, IndependentRecords):
        raise TypeError(
            "oracle must draw independent records, got"
            f" {_checks.shown(oracle)}: make it with dpjax.oracles.independent"
        )
    n = _checks.integer("n", n, least=1)
    strength = float(_checks.positive("regularization", regularization))
    left = float(_checks.non_negative("residual", residual))
    database = jax.eval_shape(lambda key: oracle(key, n), key)
    program = Program.trace("target", _checks.function("target", target), database)
    record = jax.eval_shape(oracle.record, key)
    rows = Program.trace("row", _checks.function("row", row), record)
    refuse_touching("row", rows.jaxpr)
    _check_row(rows, program)
    point, stated = point_of_each(1, m=m, gamma=gamma, method="exact", confidence=confidence)
    lengths = _lengths(key, oracle, rows, n, point.m)
    (leaf,) = rows.outputs.leaves
    # The computed length of a vector of d floats has a relative error of at most (d / 2 + 3) eps.
    margin = 1 + (leaf.size + 8) * float(jnp.finfo(leaf.dtype).eps)
    longest = float(np.partition(lengths, point.k - 1)[point.k - 1])
    if not math.isfinite(longest):
        raise ValueError(
            "the estimated sensitivity is infinite: clip the vectors that the function `row`"
            " returns, for example by jax.numpy.clip"
        )
    if longest == 0:
        raise ValueError(
            "the estimated sensitivity is 0, because the function `row` returns 0 for nearly all "
            "records of the oracle: check `row` and `oracle`"
        )
    moved = longest * margin / (n * strength) * _OUTWARD
    if not sys.float_info.min <= moved < math.inf:
        raise ValueError(
            f"regularization={strength} gives {moved} as a bound on the sensitivity, but the bound "
            "must be finite, and not below the smallest normal float"
        )
    drawn = Program.trace("oracle", oracle.record, jax.ShapeDtypeStruct((), key.dtype))
    words = np.asarray(jax.random.key_data(key)).tolist()
    programs = (x.fingerprint for x in (program, rows, drawn))
    return Sensitivity(
        value=sum_up((moved, 2 * left / strength * _OUTWARD)),
        gamma=point.gamma,
        confidence=stated,
        norm="l2",
        n=n,
        m=point.m,
        k=point.k,
        method=point.method,
        identity=digest("record bound", *programs, *map(str, (words, n, point.m, strength, left))),
        target=program.fingerprint,
        records=program.inputs.argument(0),
        outputs=program.outputs,
    )


def _check_row(rows: Program, target: Program) -> None:
    check_concrete("target or row", "call record_bound", rows, target)
    shapes = [leaf.shape for leaf in rows.outputs.leaves]
    if len(shapes) != 1 or len(shapes[0]) != 1 or not is_float(rows.outputs.leaves[0]):
        raise ValueError(f"row must return floats of shape (d,), got {rows.outputs}")
    if [leaf.shape for leaf in target.outputs.leaves] != shapes:
        raise ValueError(
            f"target must return weights of the same shape as a row, {shapes[0]}, got"
            f" {target.outputs}. If you want an intercept: the bound is false for an intercept"
            " without a penalty. Append a constant feature to every row, so that its weight is"
            " penalized, too"
        )


def _lengths(
    key: Key, oracle: IndependentRecords, rows: Program, n: int, m: int
) -> np.ndarray[tuple[int], np.dtype[np.floating]]:
    """Returns max(||u||, ||v||, ||u - v||) for every pair of records with the rows u and v.

    NaN counts as infinite.
    """

    def length(index: jax.Array) -> jax.Array:
        records = oracle.at(
            jax.random.fold_in(key, index), jnp.arange(n - 1, n + 1, dtype="uint32")
        )
        (pair,) = jax.tree.leaves(jax.vmap(rows)(records))
        three = jnp.concatenate([pair, pair[:1] - pair[1:]])
        largest = jnp.max(jnp.abs(three))
        safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
        found = safe * jnp.sqrt(jnp.max(jnp.sum(jnp.square(three / safe), axis=1)))
        # XLA may ignore NaN in a maximum on a CPU, so this is tested separately.
        return jnp.where(jnp.all(jnp.isfinite(three)), found, jnp.inf)

    chunk = max(1, min(m, _BYTES // max(1, 4 * rows.largest_array, 64)))
    many = jax.jit(lambda start: jax.vmap(length)(start + jnp.arange(chunk, dtype="uint32")))
    found = [np.asarray(many(np.uint32(start))) for start in range(0, m, chunk)]
    return np.concatenate(found)[:m]
