"""Finished chunks on disk, one file each: what they are of, and which cells they hold."""

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dpjax._files import _durable
from dpjax.sweeps._cell_keys import WORDS
from dpjax.sweeps._outputs import Output

_KIND = "chunk"
_ROW = 4 * WORDS
# What may differ between parts of a sweep, those of one choice of the static parameters.
_OF_A_PART = ("function", "traced", "batch size")


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    path: pathlib.Path
    run: dict[str, Any]
    words: np.ndarray
    values: list[np.ndarray]


class Store:
    """The chunks of one sweep, in a folder.

    A part of the sweep is a choice of its static parameters. Chunks of parts that are not asked for
    stay where they are.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Any):
        """Reads what is there; refuses what is damaged."""
        self.path = pathlib.Path(os.fspath(path))
        # One that is there may lie in a folder that cannot be written to: a disk that is mounted.
        _durable.check_folder(self.path / "lock" if self.path.is_dir() else self.path, "sweep")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"sweep {self.path} must be a folder, and is a file")
        self.path.mkdir(exist_ok=True)
        _durable.sync_folder(self.path.parent)
        self._chunks: dict[str, list[_Chunk]] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator["Store"]:
        """Reads all chunks, while no other process writes any."""
        refusal = f"sweep {self.path} is being computed by another process: wait until it has ended"
        with _durable.alone(self.path / "lock", refusal):
            _durable.remove_abandoned(self.path, r"\w+\.chunk")
            for file in sorted(self.path.glob("*.chunk")):
                part, chunk = _read(file)
                self._chunks.setdefault(part, []).append(chunk)
            yield self

    def batch_size(self, part: str) -> int | None:
        """Cells in a chunk of a part, if there is one."""
        return next((chunk.run["batch size"] for chunk in self._chunks.get(part, ())), None)

    def check(self, runs: dict[str, dict[str, Any]], named: dict[str, str]) -> None:
        """Refuses chunks of another sweep.

        Args:
            runs: what decides the bits of every part.
            named: what messages call the parts.
        """
        for part, chunks in self._chunks.items():
            run = runs.get(part) or _shared(next(iter(runs.values())))
            where = f" at {named[part]}" if named.get(part) else ""
            for chunk in chunks:
                if differing := [name for name in run if run[name] != chunk.run.get(name)]:
                    raise ValueError(
                        f"sweep {self.path} is of another run, with another"
                        f" {', '.join(differing)}{where}: name another folder, or delete this one"
                    )

    def found(self, part: str, words: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
        """Fills in the values of the cells that are there, and says which."""
        rows = {row: i for i, row in enumerate(_rows(words))}
        there = np.zeros(len(words), bool)
        for chunk in self._chunks.get(part, ()):
            pairs = [(rows[row], j) for j, row in enumerate(_rows(chunk.words)) if row in rows]
            if pairs:
                cells, places = map(list, zip(*pairs, strict=True))
                there[cells] = True
                for array, stored in zip(values, chunk.values, strict=True):
                    array[cells] = stored[places]
        return there

    def add(
        self,
        part: str,
        run: dict[str, Any],
        words: np.ndarray,
        outputs: Sequence[Output],
        values: Sequence[np.ndarray],
    ) -> None:
        """Writes a chunk."""
        header = {
            "part": part,
            "run": run,
            "cells": len(words),
            "outputs": [[x.name, list(x.shape), x.dtype.name] for x in outputs],
        }
        data = words.astype("<u4").tobytes()
        name = hashlib.sha256(part.encode() + data).hexdigest()[:32]
        body = [data, *(np.ascontiguousarray(array).tobytes() for array in values)]
        _durable.write(self.path / f"{name}.chunk", _KIND, header, body)


def _shared(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in _OF_A_PART}


def _rows(words: np.ndarray) -> list[bytes]:
    data = words.astype("<u4").tobytes()
    return [data[start : start + _ROW] for start in range(0, len(data), _ROW)]


def _read(path: pathlib.Path) -> tuple[str, _Chunk]:
    header, body = _durable.read(path, _KIND)
    cells = header["cells"]
    words = np.frombuffer(body, "<u4", WORDS * cells).reshape(cells, WORDS)
    values, start = [], words.nbytes
    for _, shape, dtype in header["outputs"]:
        array = np.frombuffer(body, np.dtype(dtype), cells * math.prod(shape), start)
        values.append(array.reshape(cells, *shape))
        start += array.nbytes
    return header["part"], _Chunk(path, header["run"], words, values)
