"""The sensitivity sampler: an order statistic of sampled distances, and what may be wrong with it.

Nothing here is private: the pairs come from the oracle, so refusals may depend on what was drawn.
"""

import math
import os
from typing import Literal

import jax
from jax.sharding import Mesh

from dpjax import _checks
from dpjax._numerics import sum_up
from dpjax._programs import digest
from dpjax.base import Norm, OperatingPoint, Oracle, Sensitivity, Target
from dpjax.operating_points import operating_point
from dpjax.sensitivity._checkpoint import Checkpoint
from dpjax.sensitivity._chunks import chunk_size
from dpjax.sensitivity._compiler import compilation
from dpjax.sensitivity._devices import (
    Layout,
    check_same_on_all_hosts,
    devices_of,
    kth_distance,
    outside_any_mesh,
    placed,
)
from dpjax.sensitivity._key import sampling_key
from dpjax.sensitivity._pairs import MOST_PAIRS, PairSampler
from dpjax.sensitivity._probes import rounding_of_releases
from dpjax.sensitivity._run import sample_block

# Given gamma alone, the least m would take the largest distance seen, which costs utility.
_PAIRS_OVER_LEAST = 10
# A distance of fewer units in the last place than this is mostly rounding error.
_LEAST_RESOLVED = 8


@outside_any_mesh
def sample_sensitivity(
    key: jax.Array,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    norm: Norm,
    m: int | None = None,
    gamma: float | None = None,
    method: str = "exact",
    confidence: float | Literal["default"] | None = "default",
    positions: str = "last",
    batch_size: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    allow_zero: bool = False,
    allow_cancellation: bool = False,
) -> Sensitivity:
    """Estimates the sensitivity of a target from random pairs of neighboring databases.

    Draws m pairs (D, D') that differ in one record, and takes G_(k), the k-th smallest of the
    distances G_i = ||f(D) - f(D')||, plus the resolution of the arithmetic: a unit in the last
    place of the largest f(D), or what permuting the records or evaluating it without a batch, as
    the release does, moves it, whichever is largest.

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`; of the latter a threefry2x32 key is
            derived, once: sampling holds no secret.
        target: a pure JAX function of a database, a pytree of arrays with leading axis n. A
            randomized learner closes over one fixed, public key.
        oracle: `oracle(key, n)` draws n exchangeable records from public knowledge; made by
            `dpjax.oracles.independent`, pairs of a `dpjax.targets.summable` cost two records.
        n: records of a database, at least 1.
        norm: "l1", "l2", "linf", "hamming", or a function of the difference of two values: the
            mechanism's.
        m: number of pairs; given gamma alone, ten times the least.
        gamma: probability over random pairs that may be left uncovered; given m alone, the least.
        method: "exact" or "dkw", see `dpjax.operating_point`.
        confidence: probability over the samples; None for the marginal statement.
        positions: which record changes. "last", as in the paper, for targets that ignore the order
            of records; a target that does not is refused, if it shows on one of 5 / gamma random
            databases. "average": one drawn uniformly, and the
            guarantee is averaged over positions. "each": every position is sampled separately and
            the worst one counts; n times the work.
        batch_size: pairs in a chunk; by default what fits the cache or the device.
        mesh: devices to spread the pairs over, of this process or of all that
            `jax.distributed.initialize` has joined, which then make the same call: the same bits on
            any number of them. By default the default device.
        progress: shows a progress bar with rate and time left (needs tqdm).
        checkpoint: a file that keeps finished chunks, written at most a twentieth of the time and
            when the run ends or is interrupted; the same call goes on from there. With several
            processes each adds a suffix of its own.
        allow_zero: accepts an estimate of 0; the target is then released without noise.
        allow_cancellation: accepts an estimate below 8 times the resolution.

    Returns:
        A `Sensitivity` for the mechanism.

    Raises:
        TypeError: if the key is not a typed key, target or oracle is not a function, or the target
            does not return real arrays.
        ValueError: if a parameter is out of range or infeasible; if the oracle ignores its key or
            the number of records that it is asked for; if the target depends on the order of the
            records, or has another value in a batch than alone; if the estimate is infinite, 0, or
            lost in rounding error; if the checkpoint is of another run, truncated or corrupted; if
            processes make different calls.

    Formal guarantees:
        Replace-one neighbors. With probability at least `confidence` over the samples, a fresh pair
        from the oracle lies further apart than the estimate with probability at most gamma; if
        `confidence` is None, with probability at most gamma over samples and pair together. For
        positions="each" this holds for all positions at once: each is sampled at confidence
        1 - (1 - C)/n. In plain words: at gamma = .05 and n = 1000 up to 50 people, typically the
        outliers, may be less protected than epsilon says. Assumes that the private database is a
        draw from the oracle (`dpjax.accounting.transfer` bounds what a wrong oracle costs), and
        that m, gamma, confidence and the key were fixed before the samples were looked at. Oracle,
        n, target and tuning must come from public knowledge; then the estimate may be published.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1 and Theorem 15; Wilks (1941) for "exact".

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> sensitivity = dpjax.sample_sensitivity(
        ...     dpjax.random.seeded_key(0),
        ...     jnp.mean,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=100,
        ...     norm="l1",
        ...     gamma=0.05,
        ... )
        >>> sensitivity.m, sensitivity.k, bool(sensitivity.value < 0.01)
        (900, 871, True)
    """
    key = sampling_key(key)
    _checks.host_only(
        "sample_sensitivity", key, "dpjax.sensitivity_samples and dpjax.order_statistic"
    )
    sampler = PairSampler.trace(key, target, oracle, n=n, norm=norm, positions=positions)
    stated = operating_point(m=m, gamma=gamma, method=method, confidence=confidence).confidence
    # For the worst of n positions to be covered, every one of them must be: a union bound.
    doubts = sampler.n if positions == "each" else 1
    if not sampler.is_concrete:
        raise TypeError(
            "target, oracle or norm closes over a traced value, but sample_sensitivity runs on the"
            " host: use dpjax.sensitivity_samples inside jit and vmap"
        )
    point = _operating_point(
        m, gamma, method, None if stated is None else 1 - (1 - stated) / doubts
    )
    size = chunk_size(sampler, point.m, batch_size)
    layout = Layout(devices_of(mesh, sampler), point.m, size)
    if layout.spans_hosts:
        check_same_on_all_hosts(digest(_run(key, sampler, layout)))
    store = None if checkpoint is None else Checkpoint(checkpoint, _run(key, sampler, layout))

    key = placed(key, layout)
    rounding = rounding_of_releases(key, sampler, point, layout)
    estimate, resolution = 0.0, 0.0
    for position in range(sampler.n if positions == "each" else 1):
        block = sample_block(
            key, sampler, layout, position=position, checkpoint=store, progress=progress
        )
        selected, coarsest = kth_distance(block, point.k, layout=layout)
        estimate, resolution = max(estimate, selected), max(resolution, coarsest)
    _refuse_unusable(estimate, resolution, allow_zero, allow_cancellation)
    return Sensitivity(
        value=sum_up((estimate, max(resolution, rounding))) if estimate > 0 else 0.0,
        gamma=point.gamma,
        confidence=stated,
        norm=norm,
        n=sampler.n,
        m=point.m,
        k=point.k,
        method=point.method,
        positions=positions,
        batch_size=size,
        zero_allowed=estimate == 0,
        identity=_identity(key, sampler, point),
        target=sampler.target.fingerprint,
        records=sampler.records,
        outputs=sampler.target.outputs,
    )


def _operating_point(
    m: int | None,
    gamma: float | None,
    method: str,
    confidence: float | None,
) -> OperatingPoint:
    point = operating_point(m=m, gamma=gamma, method=method, confidence=confidence)
    if m is None:
        m = min(_PAIRS_OVER_LEAST * point.m, MOST_PAIRS)
        point = operating_point(m=m, gamma=gamma, method=method, confidence=confidence)
    if point.m > MOST_PAIRS:
        raise ValueError(f"m must be at most {MOST_PAIRS} to be sampled, got {point.m}")
    return point


def _run(key: jax.Array, sampler: PairSampler, layout: Layout) -> dict[str, str | int]:
    """Everything that decides the bits of the distances."""
    return {
        "key": digest(jax.random.key_data(key)),
        "target": sampler.target.fingerprint,
        "oracle": sampler.oracle.fingerprint,
        "norm": sampler.norm.fingerprint,
        "positions": sampler.positions,
        "shortcut": sampler.shortcut,
        "n": sampler.n,
        "m": layout.m,
        "chunk size": layout.size,
        **compilation(layout.devices),
    }


def _refuse_unusable(
    estimate: float, resolution: float, allow_zero: bool, allow_cancellation: bool
) -> None:
    if math.isinf(estimate):
        raise ValueError(
            "the estimated sensitivity is infinite: on too many random databases the target's value"
            " is infinite or NaN, or the norm is negative; make it finite, or clip what it returns"
        )
    if estimate == 0 and not allow_zero:
        raise ValueError(
            "the estimated sensitivity is 0: no noise would be added. If the target is constant and"
            " a release without noise is meant, pass allow_zero=True"
        )
    if 0 < estimate < _LEAST_RESOLVED * resolution and not allow_cancellation:
        raise ValueError(
            f"the estimated sensitivity {estimate:.3g} is below {_LEAST_RESOLVED} times the"
            f" resolution {resolution:.3g} of the target's value, so it is mostly rounding error:"
            " enable float64, or let the target compute the difference directly; to accept it, pass"
            " allow_cancellation=True"
        )


def _identity(key: jax.Array, sampler: PairSampler, point: OperatingPoint) -> str:
    return digest(
        jax.random.key_data(key),
        sampler.target.fingerprint,
        sampler.oracle.fingerprint,
        sampler.norm.fingerprint,
        sampler.positions,
        point,
    )
