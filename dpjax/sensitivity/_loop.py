"""The sampling loop on the host: it sends chunks to devices and saves finished chunks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from dpjax._core._values import OperatingPoint
from dpjax._running._devices import Layout
from dpjax._running._progress import counting, run_in_flight, wait_for
from dpjax._tracing._host_calls import host_errors
from dpjax.sensitivity._chunks import (
    NOTHING,
    Block,
    Checkpoint,
    Finished,
    Probed,
    Probing,
    Seen,
    compute_chunks,
    empty_block,
)
from dpjax.sensitivity._operating_points import anytime_k, anytime_lower_k
from dpjax.sensitivity._plan import Sampling
from dpjax.sensitivity._probes import Findings, Probes

# Between two tests of the stopping rule, the number of drawn pairs increases by this fraction.
_GROWTH = 0.1
# A chunk for each device of this host (None for no chunk), and which probes run in these chunks.
_Task: TypeAlias = tuple[list[int | None], Probing]


@dataclasses.dataclass(eq=False)
class Watch:
    """A stopping rule that depends on the distances of the pairs drawn so far.

    Attributes:
        point: the operating point of method "anytime", at the largest number of pairs that may be
            drawn.
        until: drawing ends when the upper order statistic is at most this many times the lower one.
            If `until` is 1, drawing never ends early.
        drawn: number of pairs drawn so far.

    Formal guarantees:
        None of its own. Stopping early is valid because an "anytime" operating point is valid at
        every number of pairs at once.
    """

    point: OperatingPoint
    until: float
    drawn: int = 0

    def parts(self, tasks: list[_Task], drawn: int, layout: Layout) -> Iterator[list[_Task]]:
        """Groups tasks such that each group runs between two tests of the stopping rule."""
        part, new = list[_Task](), 0
        for task in tasks:
            part.append(task)
            new += sum(map(layout.pairs_in, task[0]))
            if new >= _GROWTH * drawn:
                yield part
                drawn, part, new = drawn + new, [], 0
        if part:
            yield part

    def has_seen_enough(
        self, distances: jax.Array, drawn: int, count: Callable[..., object]
    ) -> bool:
        """Whether sampling may end after this many distances."""
        self.drawn = drawn
        confidence = self.point.confidence
        assert confidence is not None
        upper = anytime_k(drawn, self.point.gamma, confidence) if drawn else None
        if upper is None:
            return False
        lower = max(anytime_lower_k(drawn, self.point.gamma, confidence), 1)
        found = np.asarray(distances)
        # The distances of pairs that are not drawn yet are infinite.
        found = found[(found >= 0) & (found < np.inf)]

        def of_rank(k: int) -> float:
            return float(np.partition(found, k - 1)[k - 1]) if k <= found.size else np.inf

        low, high = of_rank(lower), of_rank(upper)
        count(0, f"sensitivity from {low:.4g} to {high:.4g}")
        return high <= self.until * low and 0 < high < np.inf and self.until > 1


class _Step(NamedTuple):
    """The chunks of this host's devices in one step. Their results may not be ready yet."""

    chunks: list[int | None]
    distances: jax.Array
    resolutions: jax.Array
    probed: Probed | None

    def finished(self, probes: Probes | None) -> dict[int, Finished]:
        """Waits for the results of the step, and copies them to the host."""
        seen = [Seen()] * len(self.chunks)
        if probes is not None and self.probed is not None:
            seen = probes.look(self.chunks, self.probed)
        rows, resolutions = np.asarray(self.distances), np.asarray(self.resolutions).tolist()
        results = map(Finished, rows, resolutions, seen)
        finished = zip(self.chunks, results, strict=True)
        return {chunk: x for chunk, x in finished if chunk is not None}


@host_errors()
def sample_block(
    sampling: Sampling,
    *,
    position: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: bool = False,
    watch: Watch | None = None,
    probes: Probes | None = None,
) -> tuple[Block, Findings]:
    """Draws the distances of this host's pairs, chunk by chunk.

    Chunks with probes run first, and after them the target may be refused. A `Watch` may end
    sampling early. Distances of pairs that were not drawn are infinite.

    Returns:
        The distances, and the results of the probes on this host.
    """
    pair, layout, team = sampling.pair, sampling.layout, sampling.team
    programs, device = pair.programs, layout.devices[0]
    known = {} if checkpoint is None else checkpoint.found(position)
    findings, first, probing = Findings(), range(0), NOTHING
    if probes is not None:
        known, first, probing = probes.sufficient(known), probes.chunks, probes.probing
        findings = probes.findings(known)
    probed = [(chunks, probing) for chunks in layout.steps(known, first)]
    rest = [(chunks, NOTHING) for chunks in layout.steps(known, range(len(first), layout.chunks))]
    total = sum(layout.pairs_in(chunk) for d in layout.local for chunk in layout.chunks_of(d))
    missing = sum(layout.pairs_in(chunk) for chunks, _ in probed + rest for chunk in chunks)
    block = empty_block(layout, known, pair.distance_dtype, pair.numbers)

    def judge() -> None:
        """Raises an error if the probes refuse the target."""
        nonlocal findings
        if probes is not None:
            findings = probes.judged(findings)

    def start(task: _Task) -> _Step:
        nonlocal block
        chunks, probing = task
        team.look()
        block, distances, resolutions, probed = compute_chunks(
            block,
            sampling.key,
            position,
            chunks,
            layout=layout,
            pair=pair,
            probing=probing,
            rotations=None if probes is None or probing is NOTHING else probes.rotations(chunks),
        )
        return _Step(chunks, distances, resolutions, probed)

    with counting("pairs", total, done=total - missing, shown=progress) as count:

        def finish(step: _Step) -> None:
            nonlocal missing, findings
            wait_for(step.resolutions, programs, device, team.look)
            if checkpoint is not None or step.probed is not None:
                finished = step.finished(probes)
                if checkpoint is not None:
                    checkpoint.add(position, finished)
                if probes is not None:
                    findings |= probes.findings(finished)
            drawn = sum(map(layout.pairs_in, step.chunks))
            missing -= drawn
            count(drawn)

        def steps(tasks: list[_Task], judged_after: int) -> Iterator[_Task]:
            # The host judges the probes between two tasks, while devices work on earlier tasks. It
            # does not judge them in `finish`, because `finish` also runs after an error, for every
            # step that was already started.
            yield from tasks[:judged_after]
            judge()
            yield from tasks[judged_after:]

        def run(tasks: list[_Task], judged_after: int) -> None:
            todo = steps(tasks, judged_after)
            run_in_flight(todo, start, finish, programs=programs, device=device)
            judge()

        def enough() -> bool:
            drawn = total - missing
            return watch is not None and watch.has_seen_enough(block.distances, drawn, count)

        try:
            # The checkpoint may already contain the results of all probes. They are judged before
            # any chunk is started.
            if pair.sums is None:
                judge()
            if pair.calls_host or watch is not None:
                # Judging the probes evaluates single databases in a second program. Host code must
                # run for one program at a time, so each chunk finishes before its probes are
                # judged.
                for part in [[task] for task in probed] if pair.calls_host else [probed]:
                    run(part, len(part))
                probed = []
            for part in [rest] if watch is None else watch.parts(rest, total - missing, layout):
                if enough():
                    break
                # Two more chunks are started before the host judges the probes of earlier chunks.
                # So the devices have work while the host judges. If the target is a sum, no chunk
                # is probed. The sum is probed separately, and the host judges these probes after
                # the first chunk is finished.
                run(probed + part, max(len(probed) + 2, 3))
            enough()
        finally:
            if checkpoint is not None:
                checkpoint.save()
    return block, findings
