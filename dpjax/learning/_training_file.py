"""Checkpoints of trainings and tunings: a file with how far they are and a state."""

import contextlib
import json
import os
import pathlib
import re
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core._types import PyTree
from dpjax._exact._numerics import is_key
from dpjax._files._chunk_files import check_run, read_chunks, write_chunks
from dpjax._files._durable import Json, alone, check_folder

_KIND = "training"


class TrainingFile:
    """A checkpoint: a file with an epoch and a state, used by one process at a time.

    Without a path, all methods do nothing.
    """

    def __init__(self, path: str | os.PathLike[str] | None, run: Json) -> None:
        """Refuses a path that cannot be a file. `run` describes the training in public values."""
        self._path = None if path is None else pathlib.Path(os.fspath(path))
        # Converts tuples to lists, because JSON has no tuples and the file is compared with this
        # value.
        self._run = json.loads(json.dumps(run))
        self._open = contextlib.ExitStack()
        if self._path is not None:
            check_folder(self._path, "checkpoint")
            if self._path.is_dir():
                raise ValueError(f"checkpoint {self._path} must be a file, and is a folder")

    def __enter__(self) -> Self:
        """Locks the file. Refuses one that another process uses, which would use the same keys."""
        if self._path is not None:
            lock = self._path.with_name(f"{self._path.name}.lock")
            refusal = f"checkpoint {self._path} is used by another training: name another file"
            self._open.enter_context(alone(lock, refusal))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, like: PyTree) -> tuple[int, PyTree] | None:
        """Returns the stored epoch and state, or None. `like` has the structure of the state."""
        if self._path is None:
            return None
        files = read_chunks(self._path.parent, re.escape(self._path.name), _KIND)
        if not files:
            return None
        (file,) = files
        check_run(file, self._run, f"checkpoint {self._path}", place="file")
        leaves, structure = jax.tree.flatten(like)
        kept = [_restored(x, leaf) for x, leaf in zip(file.arrays, leaves, strict=True)]
        return int(file.header["epoch"]), jax.tree.unflatten(structure, kept)

    def write(self, epoch: int, state: PyTree) -> None:
        """Replaces the stored epoch and state. The data are on disk when this method returns."""
        if self._path is not None:
            arrays = [np.asarray(words(leaf)) for leaf in jax.tree.leaves(state)]
            header = {"run": self._run, "epoch": epoch}
            write_chunks(self._path, _KIND, header, arrays, secret=True)

    def remove(self) -> None:
        """Deletes the file, because its keys are no longer needed."""
        if self._path is not None:
            self._path.unlink()


def words(leaf: jax.Array) -> jax.Array:
    """Returns the key data of a key, or any other array unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _restored(array: np.ndarray, leaf: jax.Array) -> jax.Array:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)
