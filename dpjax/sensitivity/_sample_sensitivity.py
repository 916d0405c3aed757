"""Samples the distances of the target's values on random pairs of neighboring databases.

`sample_distances` returns the distances, and can be jitted. `sample_sensitivity` returns an order
statistic of them, and checks it. Nothing here is private, because all databases are drawn from the
oracle. So the checks may depend on sampled values.
"""

import dataclasses
import functools
import math
import os
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dpjax._core import _checks
from dpjax._core._values import Method, Norm, Oracle, Positions, Sensitivity, Target
from dpjax._exact._numerics import is_float, sum_up
from dpjax._running._devices import Layout, outside_any_mesh
from dpjax._running._processes import together
from dpjax._running._progress import saying_what_is_kept
from dpjax._tracing._fingerprints import digest
from dpjax.proving._prove_sensitivity import provable
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._chunks import (
    Checkpoint,
    all_distances,
    chunk_distances,
    kth_distance,
    spread_chunks,
)
from dpjax.sensitivity._loop import Watch, sample_block
from dpjax.sensitivity._norms import NORMS
from dpjax.sensitivity._operating_points import confidence_of_each, operating_point
from dpjax.sensitivity._pairs import MOST_SAMPLED_PAIRS, RandomPair
from dpjax.sensitivity._plan import Plan, Sampling, layout_of, layout_that_fits, point_of_each
from dpjax.sensitivity._probes import (
    Findings,
    Probes,
    probed_pairs,
    refuse_other_places,
    refuse_rounding,
)


@outside_any_mesh
def sample_distances(
    key: jax.Array,
    target: Target,
    oracle: Oracle,
    *,
    n: int,
    norm: Norm,
    m: int,
    positions: Positions = "last",
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Distances ||f(D) - f(D')|| on m random pairs of neighboring databases.

    Pair i is drawn from oracle(fold_in(k, i), n + 1), where k is `key`, converted to a threefry2x32
    key if necessary. The function is pure. It works under `jit` and `vmap`, even over values that
    target or oracle close over.

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`. A key of `dpjax.random` is turned into
            a threefry2x32 key, because sampling needs no secret randomness.
        target: a pure JAX function of a database.
        oracle: `oracle(key, n)` draws n exchangeable records.
        n: the number of records in a database, at least 1.
        norm: "l1", "l2", "linf", "hamming", "range", or a function of the difference of two values.
        m: number of pairs, at least 1.
        positions: which record changes: "last", "average" (a random one) or "each".
        chunk_size: pairs in a chunk; by default the number that fits the cache or the device.
        mesh: devices to spread the pairs over; by default the default device.

    Returns:
        Distances of shape (m,), in the order of the pairs; for positions="each" of shape (n, m).
        The dtype is float32 or the float dtype of the target's value. NaN counts as infinite.

    Raises:
        TypeError: if the key is not a typed key, target or oracle is not a function, or the target
            does not return real arrays.
        ValueError: if a size is out of range, the norm is unknown, or the oracle ignores its key or
            the number of records that it is asked for; if processes make different calls.
        RuntimeError: if a target on the host fails, or if another process of the call fails.

    Formal guarantees:
        The m pairs are independent draws. So the statement of `dpjax.operating_point` holds for an
        order statistic of the distances, if you choose m, gamma and confidence C before you look at
        the distances. To choose among J gammas or reruns, use C' = 1 - (1 - C)/J for each, or
        method "dkw", whose band is valid for all gammas at once. This function does not make the
        checks of `dpjax.sample_sensitivity`. The bits are the same for one chunk size and backend.
        Inside a larger compiled program the last bits may differ.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> distances = dpjax.sample_distances(
        ...     dpjax.random.seeded_key(0),
        ...     jnp.mean,
        ...     lambda key, n: jax.random.uniform(key, (n,)),
        ...     n=100,
        ...     norm="l1",
        ...     m=500,
        ... )
        >>> distances.shape, bool(jnp.max(distances) <= 0.01)
        ((500,), True)
    """
    with together(None if _checks.is_staging() else mesh) as team:
        key = sampling_key(key)
        m = _checks.integer("m", m, least=1, most=MOST_SAMPLED_PAIRS)
        pair = RandomPair.trace(key, target, oracle, n=n, norm=norm, positions=positions)
        layout = layout_of(pair, m, chunk_size, mesh)
        if not (_checks.is_traced(key) or _checks.is_staging()) and pair.is_concrete:
            if chunk_size is None:
                layout = layout_that_fits(key, pair, layout)
            return _on_the_host(Sampling.of(key, pair, layout, team))
        return _in_a_program(key, pair, layout)


def _on_the_host(sampling: Sampling) -> jax.Array:
    """Runs the compiled program of `sample_sensitivity`.

    So the distances are the same as in `sample_sensitivity`, bit for bit.
    """

    def at(position: int) -> jax.Array:
        block, _ = sample_block(sampling, position=position)
        sampling.team.meet()
        return all_distances(block, layout=sampling.layout)

    if sampling.pair.positions == "each":
        return jnp.stack([at(position) for position in range(sampling.pair.n)])
    return at(0)


def _in_a_program(key: jax.Array, pair: RandomPair, layout: Layout) -> jax.Array:
    starts = jnp.arange(layout.chunks, dtype=jnp.uint32) * jnp.uint32(layout.size)

    def at(position: jax.Array) -> jax.Array:
        def chunk(start: jax.Array) -> jax.Array:
            return chunk_distances(key, start, position, pair=pair, size=layout.size)[0]

        return spread_chunks(chunk, starts, layout.devices).reshape(-1)[: layout.m]

    if pair.positions == "each":
        return lax.map(at, jnp.arange(pair.n, dtype=jnp.uint32))
    return at(jnp.zeros((), jnp.uint32))


# A distance below this many units in the last place is mostly rounding error.
_LEAST_RESOLVED = 8
# The defaults if `until` is given. Let m be the least number of pairs that allows the requested
# gamma and confidence. Then the number of planned pairs is `over_least` times m, or `most` if that
# is less. Memory for all distances is allocated at the start: 256 MiB for `most` pairs. Sampling
# can end only after a chunk, so there are at least `_LOOKS` chunks.
_IF_WATCHED, _LOOKS = {"over_least": 1000, "most": 2**26}, 64


@outside_any_mesh
def sample_sensitivity(
    key: jax.Array,
    target: Target,
    oracle: Oracle | list[Oracle] | tuple[Oracle, ...],
    *,
    n: int,
    norm: Norm,
    m: int | None = None,
    gamma: float | None = None,
    method: Method = "exact",
    confidence: float | Literal["default"] | None = "default",
    until: float | None = None,
    positions: Positions = "last",
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    allow_zero: bool = False,
    allow_cancellation: bool = False,
) -> Sensitivity:
    """Estimates the sensitivity of a target from random pairs of neighboring databases.

    The function draws m pairs (D, D') of databases that differ in one record. The estimate is
    G_(k), the k-th smallest of the distances G_i = ||f(D) - f(D')||. To cover rounding, it adds the
    larger of:

    - a unit in the last place of the largest f(D);
    - twice the largest change of f(D) in the probes. Probes permute the records of some databases,
      and evaluate f on one database alone, as in a release, instead of in a batch.

    If records have public bounds, `dpjax.prove_sensitivity` may prove a global sensitivity instead.
    If it can prove one, and the program has at most 80 operations, the printed result says so.

    Args:
        key: a typed key, threefry2x32 or of `dpjax.random`. A key of `dpjax.random` is turned into
            a threefry2x32 key, because sampling needs no secret randomness.
        target: a pure JAX function of a database, a pytree of arrays with leading axis n. A
            randomized learner closes over one fixed, public key.
        oracle: `oracle(key, n)` draws n exchangeable records from public knowledge. A list of J
            such functions is accepted, too. If the oracle comes from `dpjax.oracles.independent`
            and the target from `dpjax.targets.summable`, a pair needs two records only.
        n: the number of records in a database, at least 1.
        norm: the norm of the mechanism: "l1", "l2", "linf", "hamming", "range" (the largest
            coordinate minus the smallest), or a function of the difference of two values. A
            `NoiseShape` for `dpjax.shaped_gaussian`.
        m: number of pairs; by default ten times the least number for gamma. With `until`, it is the
            largest number of pairs: by default 1000 times the least number, but no more than 2^26
            unless the least number is larger.
        gamma: probability that the distance of a random pair exceeds the estimate; by default the
            least gamma that m allows.
        method: "exact", "dkw" or "anytime", see `dpjax.operating_point`.
        confidence: probability over the samples; None for the marginal statement.
        until: a ratio above 1, such as 1.05. Sampling ends when the estimate is at most this many
            times the order statistic that is a lower bound on the quantile, by method "anytime".
            The progress bar shows both numbers.
        positions: which record changes. "last", as in the paper, is for targets that ignore the
            order of records. The target is evaluated on 5 / gamma random databases with rotated
            records, and refused if a rotation changes its value. A rotation moves all records by a
            random number of places, and the last records to the front. A target that passes this
            test treats all positions alike, although it may still depend on reversals and exchanges
            of two records. The oracle is refused if replacing a record at a random position changes
            the value more than replacing the last record does. This test refuses sorted records,
            time series, and records ordered by class. "average" draws the position uniformly, and
            the guarantee is averaged over positions. "each" samples every position separately and
            returns the worst estimate, which takes n times the work.
        chunk_size: pairs in a chunk; by default the number that fits the cache or the device. For
            code on the host, it is an upper limit: m is split into chunks of equal size, because
            padding the last chunk would cost evaluations.
        mesh: devices to spread the pairs over; by default the default device. The devices belong to
            this process, or to all processes that `jax.distributed.initialize` has joined. All of
            these processes must make the same call. The bits are the same on any number of devices,
            unless `until` ends sampling after different pairs.
        progress: shows progress bars of the pairs, and of the probes of a sum (needs tqdm).
        checkpoint: a file for finished chunks, so that the same call continues after an
            interruption. It is written when the run ends, and during the run as long as writing
            takes at most a twentieth of the time. With several processes, each adds its own suffix.
        allow_zero: accepts an estimate of 0, provided that no probe changed the value, either. The
            target is then released without noise.
        allow_cancellation: accepts an estimate below 8 times the resolution.

    Returns:
        A `Sensitivity` for the mechanism.

    Raises:
        TypeError: if the key is not a typed key, target or oracle is not a function, or the target
            does not return real arrays.
        ValueError: if a parameter is out of range or infeasible; if a `NoiseShape` was sampled with
            this key, or for other values; if the oracle ignores its key or the number of records
            that it is asked for; for positions="last", if a column of the oracle's records depends
            only on the position of the record, or if replacing the last record changes the value
            less than replacing other records (fewer than one in 10^6 oracles of exchangeable
            records is refused); if the target depends on the order of the records, or has another
            value in a batch than alone; if a function contains operations or keys that are not
            JAX's own; if the oracle or the norm contains operations that may mix the lanes of a
            `vmap`, such as draws with "rbg" keys; if the estimate is infinite, 0, or mostly
            rounding error; if the checkpoint is from another run, truncated or corrupted; if
            processes make different calls.
        RuntimeError: if a target on the host fails; if another process of the call fails, is
            interrupted or ends. Then every process raises this error within seconds.

    Formal guarantees:
        The neighboring relation is replace-one. With probability at least `confidence` over the
        samples, the distance of a fresh pair from the oracle exceeds the estimate with probability
        at most gamma. If `confidence` is None, the distance exceeds the estimate with probability
        at most gamma over the samples and the pair together. In plain words: at gamma = .05 and
        n = 1000, on average over databases, up to 50 people may be less protected than epsilon
        says. These people are typically the outliers.

        Assumptions: the private database is a draw from the oracle
        (`dpjax.accounting.under_distribution_shift` bounds the cost of a wrong oracle). You chose
        m, gamma, confidence and the key before you looked at the samples; with method "anytime",
        you may choose m later. If oracle, n, target and tuning come from public knowledge, you may
        publish the estimate.

        For positions="each" the statement holds for all positions at once, because each position is
        sampled at confidence 1 - (1 - C)/n. For positions="last" it holds for the last record. For
        a record at a uniformly drawn position it holds with gamma + 2 g instead of gamma. Here g is
        the fraction of databases on which a random rotation changes the value by more than half of
        the amount added for rounding. If g is gamma or more, the probes refuse the target with
        probability at least 147/148. For a record at a fixed position the statement holds with
        gamma + 4 g, where g is the fraction of databases on which a rotation changes the value by
        more than a quarter of the added amount (docs/proofs/sampled-sensitivity.md). Both
        statements need exchangeable records, which are tested, not proved. At gamma = .05 the test
        always refuses an oracle for which 30% of positions exceed the estimate, and may accept an
        oracle with 10% of such positions.

        With J oracles the statement holds for each oracle, and for every mixture that draws one
        oracle for the whole pair. For this, each oracle is sampled at confidence 1 - (1 - C)/J, and
        the largest estimate is returned. A mixture that draws an oracle for each record is not
        covered.

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
    several = isinstance(oracle, (list, tuple)) and not callable(oracle)
    oracles: list[Any] = [*oracle] if isinstance(oracle, (list, tuple)) and several else [oracle]
    if not oracles:
        raise ValueError(
            "oracle must be a function or a list of at least one function, got an empty list"
        )
    if until is not None:
        _check_until(until, gamma, method, positions)
        method = "anytime"
    each, stated = confidence, None
    if several:
        # A marginal statement has no confidence to divide among oracles. The statement also holds
        # for the largest estimate. Of each oracle's pairs, the largest estimate covers at least as
        # many pairs as the oracle's own estimate.
        point = operating_point(m=m, gamma=gamma, method=method, confidence=confidence)
        stated = point.confidence
        each = confidence_of_each(stated, len(oracles))
    found = list[Sensitivity]()
    for j, one in enumerate(oracles):
        path = checkpoint
        if several and checkpoint is not None:
            path = f"{os.fspath(checkpoint)}.oracle-{j}"
        # If an error is raised inside this block, the other processes of the mesh also raise an
        # error.
        with together(mesh) as team:
            own = sampling_key(key)
            _checks.host_only(
                "sample_sensitivity", own, "dpjax.sample_distances and dpjax.order_statistic"
            )
            pair = RandomPair.trace(own, target, one, n=n, norm=norm, positions=positions)
            if not pair.is_concrete:
                raise TypeError(
                    "target, oracle or norm closes over a traced value, but sample_sensitivity runs"
                    " on the host: use dpjax.sample_distances inside jit and vmap"
                )
            point, confidence_of_all = point_of_each(
                pair.positions_sampled,
                m=m,
                gamma=gamma,
                method=method,
                confidence=each,
                **({} if until is None else _IF_WATCHED),
            )
            layout = layout_of(pair, point.m, chunk_size, mesh)
            if until is not None and chunk_size is None:
                layout = layout_of(pair, point.m, min(layout.size, -(-point.m // _LOOKS)), mesh)
            if chunk_size is None:
                layout = layout_that_fits(own, pair, layout, probed_pairs(pair, point))
            plan = Plan.of(own, pair, layout, team, point, confidence_of_all)
            sample = _sampled(plan, path, until, progress=progress)
        _refuse_unusable(sample, allow_zero=allow_zero, allow_cancellation=allow_cancellation)
        found.append(_sensitivity(sample, target, norm))
    return _worst(found, stated) if several else found[0]


class _Sample(NamedTuple):
    """An estimate, and everything else from which the `Sensitivity` is made.

    Attributes:
        plan: the sampling, with its final operating point.
        identity: the identity of the sampling.
        estimate: the maximum over all positions of the k-th smallest distance at a position.
        resolution: the coarsest resolution of the target's value.
        rounding: the amount to add for rounding, as measured by the probes.
        findings: the findings of the probes.
    """

    plan: Plan
    identity: str
    estimate: float
    resolution: float
    rounding: float
    findings: Findings


def _sampled(
    plan: Plan, path: str | os.PathLike[str] | None, until: float | None, *, progress: bool
) -> _Sample:
    """Draws the pairs of all positions, and selects the estimate of the worst position."""
    store = None if path is None else Checkpoint(path, plan.run)
    # Inspecting distances before sampling ends, even to show them in the progress bar, is valid
    # only if the method is "anytime".
    may_look = plan.point.method == "anytime" and jax.process_count() == 1
    watch = Watch(plan.point, until or 1.0) if until or (progress and may_look) else None
    with saying_what_is_kept(functools.partial(_what_is_kept, plan, store)):
        probes = Probes(plan, progress=progress)
        identity = plan.identity  # Hashing takes time, so it runs while devices probe a sum.
        findings, estimate, resolution, block = Findings(), 0.0, 0.0, None
        for position in range(plan.pair.positions_sampled):
            block, found = sample_block(
                plan,
                position=position,
                checkpoint=store,
                progress=progress,
                watch=watch,
                probes=None if position else probes,
            )
            findings |= probes.at_another_position(block) if position else found
            plan.team.meet()
            if watch is not None:
                point = operating_point(
                    m=watch.drawn,
                    gamma=plan.point.gamma,
                    method="anytime",
                    confidence=plan.point.confidence,
                )
                plan = dataclasses.replace(plan, point=point)
            selected, coarsest = kth_distance(block, plan.point.k, layout=plan.layout)
            estimate, resolution = max(estimate, selected), max(resolution, coarsest)
        findings = findings.of_all(plan.team)
        rounding = probes.rounding(findings)
        assert block is not None
        refuse_other_places(
            findings,
            lambda k: kth_distance(block, k, layout=plan.layout)[0],
            plan.point,
            looks=1 if watch is None else plan.layout.chunks,
        )
    if until is not None:
        # With `until`, the chunk size decides how many pairs are drawn, and so does an interruption
        # before a run resumes from a checkpoint. `plan.identity` contains neither. So the estimate
        # is added to the identity, to distinguish such runs.
        identity = digest(plan.identity, estimate)
    return _Sample(plan, identity, estimate, resolution, rounding, findings)


def _sensitivity(sample: _Sample, target: Target, norm: Norm) -> Sensitivity:
    """Makes the sensitivity: the estimate plus all bounds on rounding, and how it was sampled."""
    plan, estimate = sample.plan, sample.estimate
    pair, point = plan.pair, plan.point
    hidden = max(sample.resolution, sample.rounding), rounding_of_a_distance(plan, norm, estimate)
    # If the estimate is 0 here, the caller passed `allow_zero`, and no probe changed the value.
    value = sum_up((estimate, *hidden)) if estimate > 0 else 0.0
    return Sensitivity(
        value=value,
        gamma=point.gamma,
        confidence=plan.confidence,
        norm=norm,
        n=pair.n,
        m=point.m,
        k=point.k,
        method=point.method,
        positions=pair.positions,
        chunk_size=plan.layout.size,
        zero_allowed=estimate == 0,
        deciding_records=None if pair.two_records is None else 2,
        identity=sample.identity,
        target=pair.released.fingerprint,
        records=pair.records,
        outputs=pair.released.outputs,
        distance=None if pair.shape or not callable(norm) else pair.norm.fingerprint,
        proof=provable(target, pair.released, norm, value),
    )


def _worst(found: list[Sensitivity], confidence: float | None) -> Sensitivity:
    """Returns the largest of the sensitivities sampled from several oracles."""
    if len({(x.target, x.distance, str(x.records), str(x.outputs)) for x in found}) > 1:
        raise ValueError("oracles must draw records of the same structure, shapes and dtypes")
    worst = max(found, key=lambda x: float(x.value))
    deciding = {x.deciding_records for x in found}
    return dataclasses.replace(
        worst,
        gamma=max(float(x.gamma) for x in found),
        confidence=confidence,
        deciding_records=worst.deciding_records if len(deciding) == 1 else None,
        identity=digest("oracles", *sorted(str(x.identity) for x in found)),
    )


def _what_is_kept(plan: Plan, store: Checkpoint | None) -> str:
    if store is None:
        return (
            "no pairs are saved: with checkpoint=PATH, the same call would have continued from here"
        )
    done = sum(plan.layout.pairs_in(chunk) for _, chunk in store.chunks)
    total = plan.pair.positions_sampled * plan.point.m
    return f"{done} of {total} pairs are saved in {store.path}: the same call continues from there"


def _check_until(until: float, gamma: float | None, method: Method, positions: Positions) -> None:
    if _checks.finite("until", until) <= 1:
        raise ValueError(f"until must be a ratio above 1, such as 1.05, got {until}")
    if gamma is None or method == "dkw" or positions == "each" or jax.process_count() > 1:
        raise ValueError(
            'until can be used only with a gamma, a method other than "dkw", positions other than'
            f' "each", and one process, got gamma={gamma}, method={method!r},'
            f" positions={positions!r} and {jax.process_count()} processes"
        )


def rounding_of_a_distance(plan: Plan, norm: Norm, estimate: float) -> float:
    """Bounds how much the norm of a difference of integers may decrease by rounding in floats.

    Integers below 1 / eps are exact in floats, so there is no error except for l2. For larger
    integers, the cast of each nonzero coordinate may round, and so may its addition. The l2 norm
    adds a few more roundings.
    """
    outputs = plan.pair.released.outputs.leaves
    floats = [is_float(leaf) for leaf in outputs]
    epsilon = float(jnp.finfo(plan.pair.distance_dtype).eps)
    exact = norm != "l2" and not any(floats) and estimate < 1 / epsilon
    if all(floats) or exact or norm not in tuple(NORMS):
        return 0.0
    coordinates = sum(math.prod(leaf.shape) for leaf in outputs)
    if not any(floats):
        coordinates = min(coordinates, 2 * estimate ** (2 if norm == "l2" else 1))
    return estimate * epsilon * (coordinates + 4)


def _refuse_unusable(sample: _Sample, *, allow_zero: bool, allow_cancellation: bool) -> None:
    estimate, resolution = sample.estimate, sample.resolution
    if estimate == 0:
        refuse_rounding(sample.findings)
    if math.isinf(estimate):
        raise ValueError(
            "the estimated sensitivity is infinite: on too many random databases the target's value"
            " is infinite or NaN, or the norm is negative. Let the target return finite values, for"
            " example by clipping them"
        )
    if estimate == 0 and not allow_zero:
        raise ValueError(
            "the estimated sensitivity is 0: no noise would be added. If the target is constant and"
            " you want a release without noise, pass allow_zero=True"
        )
    if 0 < estimate < _LEAST_RESOLVED * resolution and not allow_cancellation:
        outputs = sample.plan.pair.released.outputs.leaves
        narrow = any(is_float(x) and x.dtype.itemsize < 4 for x in outputs)
        wider = "let the target compute and return float32" if narrow else "enable float64"
        raise ValueError(
            f"the estimated sensitivity {estimate:.3g} is below {_LEAST_RESOLVED} times the"
            f" resolution {resolution:.3g} of the target's value, so it is mostly rounding error:"
            f" {wider}, or let the target compute the difference directly; to accept it, pass"
            " allow_cancellation=True"
        )
