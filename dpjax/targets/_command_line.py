"""Targets that are programs of the command line."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dpjax import _checks
from dpjax._host_code import HostCode
from dpjax._interruptions import ended_when_stopped
from dpjax.targets._host import host_target


def command_line(
    arguments: Sequence[str],
    *,
    output: Any,
    timeout: float,
    failure: Any = None,
    jobs: int | None = None,
) -> Callable[[Any], Any]:
    """A program of the command line as a target: it reads a CSV and prints numbers.

    The program finds the database on its standard input: a line for each record, without a header,
    the arrays in the order of the pytree (the keys of a dict sorted), in digits that give the same
    floats back; booleans are 0 and 1. It prints the output's numbers, in the same order, separated
    by commas or white space.

    Args:
        arguments: the program and what it is called with; no shell looks at it. Files among them,
            such as a script, count by their contents.
        output: a pytree of arrays or of `jax.ShapeDtypeStruct`: shapes and dtypes of the numbers
            that it prints.
        timeout: seconds after which the program, and what it has started, is killed; far above what
            it needs.
        failure: what is released where it fails on the private database, see `host`.
        jobs: programs at a time, see `host`.

    Returns:
        A target: takes a database, a pytree of arrays with leading axis n, to the output.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there are no arguments, the timeout is not above 0, or `failure` is not like
            the output.
        FileNotFoundError: if there is no such program; before a release, too.
        ModuleNotFoundError: if joblib is not installed.

    Formal guarantees:
        Those of `host`; to fail is to exit with a status other than 0, to print something else than
        the numbers, or to take longer than the timeout. A crash or hang of the program is a failure
        like any other; Ctrl-C is none, and kills the program. The database is written to no file.
        `privatize` compares the arguments, the program and the files among the arguments. Assumes
        that nothing else that the program depends on changes (what it loads, its environment), that
        workers on other machines have the same, and that it leaves nothing behind.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which asks for black-box access alone.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax import targets
        >>> total = targets.command_line(
        ...     ["awk", "{ s += $1 } END { print s }"], output=jnp.zeros(()), timeout=60.0
        ... )
        >>> float(total(jnp.array([1.0, 2.5])))
        3.5
    """
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise TypeError(f"arguments must be a sequence of strings, got {arguments!r}")
    if not arguments:
        raise ValueError("arguments must name a program, got none")
    seconds = _checks.positive("timeout", timeout)
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), output)
    # Threads, for they do nothing but wait.
    program = _Program(tuple(arguments), seconds, specs)
    files = functools.partial(_files, program.arguments)
    return host_target(
        lambda: HostCode(program, facts=files), output, failure, jobs, prefer="threads"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    arguments: tuple[str, ...]
    timeout: float
    output: Any

    def __call__(self, database: Any) -> Any:
        specs, structure = jax.tree.flatten(self.output)
        words = self._run(_csv(database)).replace(",", " ").split()
        ends = np.cumsum([spec.size for spec in specs])
        if len(words) != ends[-1]:
            raise ValueError(f"it printed {len(words)} words, not {ends[-1]} numbers")
        parts = np.split(np.array(words, object), ends[:-1])
        return jax.tree.unflatten(structure, list(map(_numbers, parts, specs)))

    def _run(self, table: str) -> str:
        pipe = subprocess.PIPE
        start = functools.partial(
            subprocess.Popen,
            self.arguments,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        # Also after success: a program may have left others behind.
        with ended_when_stopped(start, _kill) as process:
            try:
                printed, complaint = process.communicate(table, timeout=self.timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"it took longer than {self.timeout:g} s") from None
        if process.returncode != 0:
            raise RuntimeError(f"it ended with status {process.returncode}: {complaint[-500:]}")
        return printed


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a program and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _files(arguments: tuple[str, ...]) -> dict[str, str]:
    """Hashes of the program, and of the files that its arguments name, such as a script."""
    program = shutil.which(arguments[0])
    if program is None:
        raise FileNotFoundError(f"there is no program {arguments[0]!r} that can be run here")
    files = {name: pathlib.Path(name) for name in arguments[1:] if os.path.isfile(name)}
    return {name: _sha256(path) for name, path in {"": pathlib.Path(program), **files}.items()}


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _csv(database: Any) -> str:
    columns = [_text(np.asarray(leaf)) for leaf in jax.tree.leaves(database)]
    return "".join(",".join(record) + "\n" for record in np.hstack(columns))


def _text(array: np.ndarray) -> np.ndarray:
    """One row for each record; the shortest digits that are read back as the same number."""
    numbers = array.astype(int) if array.dtype == bool else array
    if not np.issubdtype(numbers.dtype, np.number):
        numbers = numbers.astype(np.float32)  # bfloat16 and its like, which NumPy does not know.
    return numbers.reshape(len(numbers), -1).astype(str)


def _numbers(words: np.ndarray, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    if spec.dtype == bool:
        return np.array([bool(int(word)) for word in words]).reshape(spec.shape)
    kind = int if np.issubdtype(spec.dtype, np.integer) else float
    return np.array([kind(word) for word in words]).reshape(spec.shape)
