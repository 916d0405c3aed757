"""`noise_shape`: learns the covariance of Gaussian noise from sampled changes of a target."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._values import Oracle, Target
from dpjax._running._devices import outside_any_mesh
from dpjax._running._progress import wait_for
from dpjax._tracing._fingerprints import digest
from dpjax._tracing._host_calls import host_errors
from dpjax._tracing._programs import check_concrete, kept_jit
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._norms import difference, flat
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair
from dpjax.sensitivity._plan import pairs_in_a_chunk
from dpjax.sensitivity._shaped_norm import MOST_COORDINATES, VALUE_BITS, NoiseShape, shape_of

_LEAST_PAIRS, _PAIRS_PER_COORDINATE = 1000, 10
# W is the mean of delta delta' over sampled changes delta of the target. Its eigenvalues are raised
# to at least this fraction of the largest eigenvalue. So the standard deviation of the noise in any
# direction is at least .03 of the largest standard deviation.
_FLOOR = 1e-6
# Rounding two values to the fine grid changes their distance by at most `_FINE` times the root mean
# square distance. The grid is coarser if it must be, so that it extends to 2^`_HEADROOM_BITS` times
# the largest sampled value. Values are rounded before their distances are computed, so the sampled
# distances include the effect of rounding.
_FINE, _HEADROOM_BITS = 2.0**-8, 4


@outside_any_mesh
def noise_shape(
    key: jax.Array,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    m: int | None = None,
    chunk_size: int | None = None,
) -> NoiseShape:
    """Finds the shape of noise that hides a replaced record with the least expected squared error.

    It draws m pairs of neighboring databases, and learns W = E[delta delta'] from the differences
    delta = f(D) - f(D'). Eigenvalues of W below 1e-6 times the largest one are raised to that
    floor. The shape is A = W^(1/4). The noise is A z, with z normal and calibrated to ||A^-1
    delta||_2. Its expected squared error is proportional to tr(A A') times the mean of ||A^-1
    delta||^2. A = W^(1/4) minimizes this product, and the minimum is (tr W^(1/2))^2. Isotropic
    noise, A = I, gives the product d tr W. Noise that whitens the differences, A = W^(1/2), gives
    d tr W, too.

    Args:
        key: a typed key, for this call alone: `dpjax.sample_sensitivity` refuses the same key.
        target: as for `dpjax.sample_sensitivity`.
        oracle: as for `dpjax.sample_sensitivity`.
        n: the number of records in a database, at least 1.
        m: number of pairs; by default 10 for each coordinate, and at least 1000.
        chunk_size: pairs in a chunk; by default the number that fits the cache or the device.

    Returns:
        A `NoiseShape`, to be passed to `dpjax.sample_sensitivity` as `norm`.

    Raises:
        TypeError: if the key is not a typed key, target or oracle is not a function, or the target
            does not return real arrays.
        ValueError: if a size is out of range, the value has more than 4096 coordinates, no
            difference is finite and above 0, or sampling refuses the oracle.

    Formal guarantees:
        None of its own. None is needed: the guarantee of `dpjax.shaped_gaussian` holds for any
        matrix that is fixed before its sensitivity is sampled. The shape is computed from draws of
        the oracle alone, so it may be published. The replaced records have random positions.

    Source:
        The minimum follows from the inequality of Cauchy and Schwarz for traces; Li and Miklau
        (2010), "Optimizing linear counting queries under differential privacy", for noise that fits
        a workload in this way.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> def oracle(key, n):
        ...     return jax.random.normal(key, (n, 2)) * jnp.array([[1.0, 0.01]])
        >>> key_shape, key_sample = jax.random.split(dpjax.random.seeded_key(0))
        >>> mean = lambda database: jnp.mean(database, axis=0)
        >>> shape = dpjax.noise_shape(key_shape, mean, oracle, n=100)
        >>> bool(shape.matrix[1, 1] < 0.2 * shape.matrix[0, 0])
        True
    """
    key = sampling_key(key)
    _checks.host_only("noise_shape", key, "a shape that was made before")
    pair = RandomPair.trace(key, target, oracle, n=n, norm="l2", positions="average")
    check_concrete("target or oracle", "call noise_shape", *pair.programs)
    size = sum(leaf.size for leaf in pair.target.outputs.leaves)
    if size > MOST_COORDINATES:
        raise ValueError(f"target must have at most {MOST_COORDINATES} coordinates, got {size}")
    if m is None:
        m = max(_LEAST_PAIRS, _PAIRS_PER_COORDINATE * size)
    m = _checks.integer("m", m, least=1, most=MOST_SAMPLED_PAIRS)
    moment, largest = _second_moment(key, pair, m, pairs_in_a_chunk(pair, m, chunk_size, None))
    matrix = _fitting_matrix(moment)
    inverse = np.linalg.inv(matrix)
    typical = np.sqrt(np.trace(inverse @ moment @ inverse))
    worst = np.linalg.norm(np.abs(inverse).sum(1))
    unit = max(_FINE * typical / worst, largest * 2.0 ** (_HEADROOM_BITS - VALUE_BITS))
    sampled_with = digest(jax.random.key_data(key))
    return shape_of(matrix, pair.target.outputs, unit, sampled_with)


def _second_moment(key: jax.Array, pair: RandomPair, m: int, size: int) -> tuple[np.ndarray, float]:
    """Returns the mean outer product of finite changes f(D) - f(D'), and the largest |f(D)_j|."""
    total, count, largest = np.zeros(()), 0, 0.0
    with host_errors(), np.errstate(over="ignore"):
        for start in range(0, m, size):
            indices = np.minimum(start + np.arange(size), m - 1).astype(np.uint32)
            moved, values = _compiled_differences(key, indices, pair=pair)
            wait_for(moved, pair.programs, None)
            rows = np.asarray(moved, np.float64)[: m - start]
            finite = np.isfinite(rows).all(1)
            total, count = total + rows[finite].T @ rows[finite], count + finite.sum()
            largest = max(largest, np.asarray(values)[: m - start][finite].max(initial=0.0))
    if not np.any(total) or not np.all(np.isfinite(total)):
        raise ValueError(
            f"there is no noise shape to learn from {m} random pairs: the changes of the target, "
            "or their squares, are all 0 or not finite. Check that the target depends on its "
            "records, and rescale it if its changes are very small or very large"
        )
    return total / count, float(largest)


@kept_jit("pair")
def _compiled_differences(
    key: jax.Array, indices: jax.Array, *, pair: RandomPair
) -> tuple[jax.Array, jax.Array]:
    def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        databases = pair.databases(key, index, jnp.zeros((), jnp.uint32))
        value, other = pair.values(index, *databases)
        zero = jax.tree.map(jnp.zeros_like, value)
        return flat(difference(value, other)), jnp.max(jnp.abs(flat(difference(value, zero))))

    return jax.vmap(one)(indices)


def _fitting_matrix(moment: np.ndarray) -> np.ndarray:
    """Returns moment^(1/4), with a floor on eigenvalues, scaled to a largest eigenvalue of 1."""
    eigenvalues, vectors = np.linalg.eigh(moment)
    floored = np.maximum(eigenvalues / eigenvalues[-1], _FLOOR)
    return (vectors * floored**0.25) @ vectors.T
