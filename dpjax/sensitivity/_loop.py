"""The host's part in sampling: it hands chunks to devices, and keeps the finished ones."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from dpjax._running._in_flight import run_in_flight
from dpjax._running._layout import Layout
from dpjax._running._processes import Team
from dpjax._running._progress import counting
from dpjax._running._waiting import wait_for
from dpjax._tracing._origins import host_errors
from dpjax.sensitivity._blocks import Block, compute_chunks, empty_block
from dpjax.sensitivity._checkpoint import Checkpoint
from dpjax.sensitivity._pairs import RandomPair


@host_errors()
def sample_block(
    key: jax.Array,
    pair: RandomPair,
    layout: Layout,
    *,
    team: Team,
    position: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: bool = False,
) -> Block:
    """The distances of the pairs that this host's devices have, chunk by chunk."""
    found = {} if checkpoint is None else checkpoint.found(position)
    steps = layout.steps(found)
    total = sum(layout.pairs_in(chunk) for d in layout.local for chunk in layout.chunks_of(d))
    missing = sum(layout.pairs_in(chunk) for chunks in steps for chunk in chunks)
    with counting("pairs", total, done=total - missing, shown=progress) as count:
        block = empty_block(layout, found, pair.distance_dtype)
        wait = partial(wait_for, programs=pair.programs, device=layout.devices[0], look=team.look)

        def start(chunks: list[int | None]) -> _Step:
            nonlocal block
            team.look()
            block, distances, resolutions = compute_chunks(
                block, key, position, chunks, layout=layout, pair=pair
            )
            pairs = sum(map(layout.pairs_in, chunks))
            return _Step(position, chunks, pairs, distances, resolutions)

        try:
            finish = partial(_finish, wait, checkpoint, count)
            run_in_flight(steps, start, finish, calls_host=pair.calls_host)
            return block
        finally:
            if checkpoint is not None:
                checkpoint.save()


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A chunk on every device of this host, on its way."""

    position: int
    chunks: list[int | None]
    pairs: int
    distances: jax.Array
    resolutions: jax.Array


def _finish(
    wait: Callable[[jax.Array], None],
    checkpoint: Checkpoint | None,
    count: Callable[[int], object],
    step: _Step,
) -> None:
    """Waits for a step, and keeps its chunks."""
    wait(step.resolutions)
    if checkpoint is not None:
        distances, resolutions = np.asarray(step.distances), np.asarray(step.resolutions)
        for chunk, row, resolution in zip(step.chunks, distances, resolutions, strict=True):
            if chunk is not None:
                checkpoint.add(step.position, chunk, row, float(resolution))
    count(step.pairs)
