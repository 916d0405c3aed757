"""The host's part in sampling: it hands chunks to devices, and keeps what they finish."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from dpjax import _checks
from dpjax._origins import failures_in_short
from dpjax.sensitivity._checkpoint import Checkpoint
from dpjax.sensitivity._devices import Block, Layout, compute_chunks, empty_block
from dpjax.sensitivity._pairs import PairSampler
from dpjax.sensitivity._waiting import NoAnswerError, wait_for

# The device must never wait for the host.
_STEPS_IN_FLIGHT = 2


@failures_in_short()
def sample_block(
    key: jax.Array,
    sampler: PairSampler,
    layout: Layout,
    *,
    position: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: bool = False,
) -> Block:
    """The distances of the pairs that this host's devices have, chunk by chunk."""
    found = {} if checkpoint is None else checkpoint.found(position)
    block = empty_block(layout, found, sampler.distance_dtype)
    steps = _steps(layout, found)
    in_flight: deque[_Step] = deque()
    wait = partial(wait_for, sampler=sampler, layout=layout)
    bar = _Bar(layout, steps) if progress else None
    try:
        for chunks in steps:
            block, distances, resolutions = compute_chunks(
                block, key, position, chunks, layout=layout, sampler=sampler
            )
            in_flight.append(_Step(position, chunks, distances, resolutions))
            if len(in_flight) > _STEPS_IN_FLIGHT:
                in_flight.popleft().finish(wait, checkpoint, bar)
        while in_flight:
            in_flight.popleft().finish(wait, checkpoint, bar)
        return block
    except NoAnswerError:
        in_flight.clear()  # What is in flight will never be finished.
        raise
    finally:
        # Also where Ctrl-C or an error ended the loop: what is finished is kept.
        try:
            while in_flight:
                in_flight.popleft().finish(wait, checkpoint, bar)
        finally:
            if checkpoint is not None:
                checkpoint.save()
            if bar is not None:
                bar.close()


def _steps(layout: Layout, found: dict[int, Any]) -> list[list[int | None]]:
    """For each step the chunk of every device of this host, None where it has none left."""
    missing = [[c for c in layout.chunks_of(d) if c not in found] for d in layout.local]
    longest = max(len(chunks) for chunks in missing)
    return [
        [chunks[step] if step < len(chunks) else None for chunks in missing]
        for step in range(longest)
    ]


class _Step:
    def __init__(
        self,
        position: int,
        chunks: list[int | None],
        distances: jax.Array,
        resolutions: jax.Array,
    ):
        self.position, self.chunks = position, chunks
        self.distances, self.resolutions = distances, resolutions

    def finish(
        self, wait: Callable[[Any], None], checkpoint: Checkpoint | None, bar: "_Bar | None"
    ) -> None:
        """Waits for the step, and keeps its chunks."""
        wait(self.resolutions)
        if checkpoint is not None:
            distances, resolutions = np.asarray(self.distances), np.asarray(self.resolutions)
            for chunk, row, resolution in zip(self.chunks, distances, resolutions, strict=True):
                if chunk is not None:
                    checkpoint.add(self.position, chunk, row, float(resolution))
        if bar is not None:
            bar.update(self.chunks)


class _Bar:
    """How many pairs of this host are done, how fast, and how long it will still take."""

    def __init__(self, layout: Layout, steps: list[list[int | None]]):
        self._layout = layout
        total = sum(self._pairs(layout.chunks_of(d)) for d in layout.local)
        done = total - sum(self._pairs(chunks) for chunks in steps)
        tqdm = _checks.extra("tqdm", "progress").tqdm
        self._bar = tqdm(total=total, initial=done, unit="pairs", unit_scale=True)

    def _pairs(self, chunks: Any) -> int:
        size, m = self._layout.size, self._layout.m
        return sum(min(size, m - chunk * size) for chunk in chunks if chunk is not None)

    def update(self, chunks: list[int | None]) -> None:
        self._bar.update(self._pairs(chunks))

    def close(self) -> None:
        self._bar.close()
