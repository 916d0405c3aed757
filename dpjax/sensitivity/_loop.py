"""The host's part in sampling: it hands chunks to devices, and keeps the finished ones."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from dpjax._core._values import OperatingPoint
from dpjax._running._devices import Layout
from dpjax._running._progress import counting, run_in_flight, wait_for
from dpjax._tracing._host_calls import host_errors
from dpjax.sensitivity._checkpoint import Checkpoint, Finished, Seen
from dpjax.sensitivity._chunks import NOTHING, Block, Probed, Probing, compute_chunks, empty_block
from dpjax.sensitivity._operating_points import anytime_k, anytime_lower_k
from dpjax.sensitivity._plan import Sampling
from dpjax.sensitivity._probes import Probes

# Sampling that ends when more pairs would hardly change the estimate.


# Between two looks, the number of pairs grows by this share.
_GROWTH = 0.1
_Steps = list[list[int | None]]


@dataclasses.dataclass(eq=False)
class Watch:
    """Looks at the distances while they are drawn, at an operating point that allows it.

    Attributes:
        point: of method "anytime", at the most pairs that may be drawn.
        until: the ratio of the upper to the lower order statistic at which it ends; 1 for never.
        drawn: pairs so far.

    Formal guarantees:
        None of its own: the operating point holds at every number of pairs.
    """

    point: OperatingPoint
    until: float
    drawn: int = 0

    def parts(self, steps: _Steps, drawn: int, layout: Layout) -> Iterator[_Steps]:
        """The steps from one look to the next."""
        part: _Steps = []
        new = 0
        for step in steps:
            part.append(step)
            new += sum(map(layout.pairs_in, step))
            if new >= _GROWTH * drawn:
                yield part
                drawn, part, new = drawn + new, [], 0
        if part:
            yield part

    def has_seen_enough(
        self, distances: jax.Array, drawn: int, count: Callable[..., object]
    ) -> bool:
        """Whether to end, now that so many distances are finite or infinite ones of real pairs."""
        self.drawn = drawn
        confidence = self.point.confidence
        assert confidence is not None
        upper = anytime_k(drawn, self.point.gamma, confidence) if drawn else None
        if upper is None:
            return False
        lower = max(anytime_lower_k(drawn, self.point.gamma, confidence), 1)
        found = np.asarray(distances)
        found = found[(found >= 0) & (found < np.inf)]  # Most may not be drawn yet.

        def of_rank(k: int) -> float:
            return float(np.partition(found, k - 1)[k - 1]) if k <= found.size else np.inf

        low, high = of_rank(lower), of_rank(upper)
        count(0, f"sensitivity from {low:.4g} to {high:.4g}")
        return high <= self.until * low and 0 < high < np.inf and self.until > 1


# A chunk for each device of this host, or None, and what is probed there.
_Task: TypeAlias = tuple[list[int | None], Probing]


class _Step(NamedTuple):
    """A chunk for each device of this host, or None, with its results on their way."""

    chunks: list[int | None]
    distances: jax.Array
    resolutions: jax.Array
    probed: Probed | None

    def finished(self, probes: Probes | None) -> dict[int, Finished]:
        """The chunks on the host."""
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
) -> Block:
    """The distances of the pairs that this host's devices have, chunk by chunk.

    With a watch, it ends when that says so; distances of pairs that were not drawn are infinite.
    Chunks that are probed come first, and then the target may be refused.
    """
    pair, layout, team = sampling.pair, sampling.layout, sampling.team
    found = {} if checkpoint is None else checkpoint.found(position)
    first, probing = range(0), NOTHING
    if probes is not None:
        found, first, probing = probes.known(found), probes.chunks, probes.probing
    looked_at = layout.steps(found, first)
    steps = layout.steps(found, range(len(first), layout.chunks))
    total = sum(layout.pairs_in(chunk) for d in layout.local for chunk in layout.chunks_of(d))
    planned = sum(layout.pairs_in(chunk) for chunks in looked_at + steps for chunk in chunks)
    missing = planned
    block = empty_block(layout, found, pair.distance_dtype, pair.numbers)

    def start(task: _Task) -> _Step:
        nonlocal block
        chunks, probing = task
        team.look()
        if probes is not None and missing < planned:
            probes.refuse()  # Not in `finish`, which runs for steps in flight after an error, too.
        block, distances, resolutions, probed = compute_chunks(
            block,
            sampling.key,
            position,
            chunks,
            layout=layout,
            pair=pair,
            probing=probing,
            rotations=probes.rotations(chunks) if probes and probing else None,
        )
        return _Step(chunks, distances, resolutions, probed)

    with counting("pairs", total, done=total - missing, shown=progress) as count:

        def finish(step: _Step) -> None:
            nonlocal missing
            wait_for(step.resolutions, pair.programs, layout.devices[0], team.look)
            if checkpoint is not None or step.probed is not None:
                finished = step.finished(probes)
                if checkpoint is not None:
                    checkpoint.add(position, finished)
                if probes is not None:
                    probes.known(finished)
            drawn = sum(map(layout.pairs_in, step.chunks))
            missing -= drawn
            count(drawn)

        def looked_at_last(tasks: list[_Task]) -> Iterator[_Task]:
            yield from tasks
            if probes is not None:  # While devices draw the last pairs.
                probes.refuse()

        def run(tasks: list[_Task]) -> None:
            run_in_flight(
                looked_at_last(tasks),
                start,
                finish,
                programs=pair.programs,
                device=layout.devices[0],
            )
            if probes is not None:
                probes.refuse()

        def enough() -> bool:
            drawn = total - missing
            return watch is not None and watch.has_seen_enough(block.distances, drawn, count)

        try:
            if probes is not None and pair.sums is None:  # All may be known from a checkpoint.
                probes.refuse()
            tasks = [(chunks, probing) for chunks in looked_at]
            if pair.calls_host or watch is not None:
                # A database alone calls the host while nothing else does.
                for part in [[task] for task in tasks] if pair.calls_host else [tasks]:
                    run(part)
                tasks = []
            for part in [steps] if watch is None else watch.parts(steps, total - missing, layout):
                if enough():
                    break
                run(tasks + [(chunks, NOTHING) for chunks in part])
            enough()
        finally:
            if checkpoint is not None:
                checkpoint.save()
    return block
