"""The host's part in sampling: it hands chunks to devices, and keeps the finished ones."""

import jax
import numpy as np

from dpjax._running._in_flight import run_in_flight
from dpjax._running._progress import counting
from dpjax._running._waiting import wait_for
from dpjax._tracing._origins import host_errors
from dpjax.sensitivity._blocks import Block, compute_chunks, empty_block
from dpjax.sensitivity._checkpoint import Checkpoint
from dpjax.sensitivity._plan import Sampling
from dpjax.sensitivity._watch import Watch

# A chunk for each device of this host, or None, with distances and resolutions on their way.
_Step = tuple[list[int | None], jax.Array, jax.Array]


@host_errors()
def sample_block(
    sampling: Sampling,
    *,
    position: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: bool = False,
    watch: Watch | None = None,
) -> Block:
    """The distances of the pairs that this host's devices have, chunk by chunk.

    With a watch, it ends when that says so; distances of pairs that were not drawn are infinite.
    """
    pair, layout, team = sampling.pair, sampling.layout, sampling.team
    found = {} if checkpoint is None else checkpoint.found(position)
    steps = layout.steps(found)
    total = sum(layout.pairs_in(chunk) for d in layout.local for chunk in layout.chunks_of(d))
    missing = sum(layout.pairs_in(chunk) for chunks in steps for chunk in chunks)
    block = empty_block(layout, found, pair.distance_dtype, pair.numbers)

    def start(chunks: list[int | None]) -> _Step:
        nonlocal block
        team.look()
        block, distances, resolutions = compute_chunks(
            block, sampling.key, position, chunks, layout=layout, pair=pair
        )
        return chunks, distances, resolutions

    with counting("pairs", total, done=total - missing, shown=progress) as count:

        def finish(step: _Step) -> None:
            chunks, distances, resolutions = step
            wait_for(resolutions, pair.programs, layout.devices[0], team.look)
            if checkpoint is not None:
                checkpoint.add(position, chunks, np.asarray(distances), np.asarray(resolutions))
            count(sum(map(layout.pairs_in, chunks)))

        def enough(drawn: int) -> bool:
            return watch is not None and watch.has_seen_enough(block.distances, drawn, count)

        try:
            drawn = total - missing
            for part in [steps] if watch is None else watch.parts(steps, drawn, layout):
                if enough(drawn):
                    break
                run_in_flight(part, start, finish, calls_host=pair.calls_host)
                drawn += sum(layout.pairs_in(chunk) for chunks in part for chunk in chunks)
            enough(drawn)
        finally:
            if checkpoint is not None:
                checkpoint.save()
    return block
