"""`command_line`: targets that are command-line programs.

How much output a program prints may depend on private records. So the output is read in chunks, and
only as many numbers as expected are stored in memory.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, PyTree, Value
from dpjax._core._values import Target
from dpjax._tracing._host_calls import ended_when_stopped
from dpjax._tracing._host_code import HostCode
from dpjax.targets._host import host_target

# The exact decimal form of a float64 has up to 767 digits.
_LONGEST_WORD = 1024
_LONGEST_COMPLAINT = 500
_PIECE = 2**16
# Seconds. The parent waits at most this long for the program's pipes, and then checks whether the
# program has ended.
_NAP = 0.05
Process = subprocess.Popen[bytes]
# The shell sets two limits, and then replaces itself by the program. `ulimit -f` limits every file
# to 524288 blocks of 512 bytes (256 MiB). The OOM score makes Linux kill this process first if
# memory runs out.
_LIMITED = (
    "/bin/sh",
    "-c",
    '{ ulimit -f 524288; echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"',
    "sh",
)


def command_line(
    arguments: Sequence[str],
    *,
    output: PyTree,
    timeout: float,
    failure: PyTree = None,
    jobs: int | None = None,
) -> Target:
    """A command-line program as a target: it reads a CSV and prints numbers.

    The program reads the database from its standard input: a line for each record, without a
    header. Columns are the arrays in the order of the pytree, where the keys of a dict are sorted.
    Floats have enough digits to be read back unchanged, and booleans are 0 and 1. The program
    prints the numbers of the output, in the same order, separated by commas or white space.

    Args:
        arguments: the program and its arguments; no shell interprets them. If an argument names a
            file, such as a script, the file's contents are part of the target.
        output: a pytree of arrays or of `jax.ShapeDtypeStruct`: shapes and dtypes of the printed
            numbers.
        timeout: seconds after which the program and all processes that it has started are killed.
            Choose a timeout far above the usual running time.
        failure: the value to release if the program fails on the private database, see `host`.
        jobs: how many programs run at a time, see `host`.

    Returns:
        A target, which maps a database, a pytree of arrays with leading axis n, to the output.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if there are no arguments, the timeout is not above 0, or `failure` does not
            have the structure of the output.
        FileNotFoundError: if there is no such program, when the target is made or before a release.
        ModuleNotFoundError: if joblib is not installed.

    Formal guarantees:
        As for `host`. A program fails if it exits with a status other than 0, prints anything
        except the numbers, or takes longer than the timeout. A crash or hang of the program is a
        failure like any other. If the program prints too many numbers, or a word of more than 1024
        bytes, it fails at once, so that its output cannot fill the memory. Each file that the
        program writes has at most 256 MiB. If memory runs out, Linux kills the program, not its
        caller. Ctrl-C is not a failure, and kills the program. The database is not written to a
        file. `privatize` compares the arguments, the program and the files among the arguments. We
        assume that everything else on which the program depends, such as libraries and the
        environment, stays the same, also on other machines that run workers. We assume that the
        program leaves neither many files behind, nor a process in another session.

    Source:
        Rubinstein and Aldà (2017), Algorithm 1, which only runs the target.

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
    program = _Program(tuple(arguments), seconds, TreeSpec.of(output).tree())
    # Threads suffice, because each thread only waits for its program.
    files = functools.partial(_files, program.arguments)
    return host_target(
        lambda: HostCode(program, facts=files), output, failure, jobs, prefer="threads"
    )


class NumbersRead:
    """Parses numbers from the output of a program, separated by commas or white space."""

    def __init__(self, kinds: Sequence[type[int] | type[float]]):
        """Expects one number of each kind, in this order."""
        self._kinds = kinds
        self._rest = b""
        self._numbers = list[int | float]()

    def take(self, piece: bytes) -> None:
        """Parses a chunk of output.

        Raises an error if a word is not a number, or if there are more numbers than expected.
        """
        text = self._rest + piece.replace(b",", b" ")
        words = text.split()
        # The last word of this chunk may continue in the next chunk.
        self._rest = words.pop() if words and not text[-1:].isspace() else b""
        if max(map(len, [*words, self._rest])) > _LONGEST_WORD:
            raise ValueError(f"the program printed a word of more than {_LONGEST_WORD} bytes")
        for word in words:
            self._add(word)

    def all(self) -> list[int | float]:
        """Returns all numbers. Call this when the program has printed all of its output."""
        if self._rest:
            self._add(self._rest)
        if len(self._numbers) < len(self._kinds):
            found, wanted = len(self._numbers), len(self._kinds)
            raise ValueError(f"the program printed {found} of {wanted} numbers")
        return self._numbers

    def _add(self, word: bytes) -> None:
        if len(self._numbers) == len(self._kinds):
            raise ValueError(f"the program printed more than {len(self._kinds)} numbers")
        self._numbers.append(self._kinds[len(self._numbers)](word.decode()))


def converse(
    process: Process,
    told: bytes,
    take: Callable[[bytes], None],
    end: Callable[[Process], object],
    *,
    timeout: float,
) -> str:
    """Writes the input of a program and reads its output, until the program ends.

    Args:
        process: the program's process, with unbuffered pipes.
        told: the input. The program need not read all of it.
        take: is called with each chunk of the output; an error that it raises ends the
            conversation.
        end: kills all processes that the program has started, which may keep its pipes open.
        timeout: the time limit in seconds.

    Returns:
        The last characters of the program's standard error.

    Raises:
        TimeoutError: if the program takes longer than the time limit.
    """
    deadline = time.monotonic() + timeout
    left, complaint = memoryview(told), b""

    def tell(pipe: Any) -> bool:
        nonlocal left
        try:
            left = left[os.write(pipe.fileno(), left[:_PIECE]) :]
        except BrokenPipeError:
            return False
        return len(left) > 0

    def hear(pipe: Any) -> bool:
        nonlocal complaint
        piece = os.read(pipe.fileno(), _PIECE)
        if pipe is process.stdout:
            take(piece)
        else:
            complaint = (complaint + piece)[-_LONGEST_COMPLAINT:]
        return bool(piece)

    with selectors.DefaultSelector() as pipes:
        for pipe, event, call in (
            (process.stdin, selectors.EVENT_WRITE, tell),
            (process.stdout, selectors.EVENT_READ, hear),
            (process.stderr, selectors.EVENT_READ, hear),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            pipes.register(pipe, event, call)
        while pipes.get_map():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the program took longer than {timeout:g} s")
            ended = process.poll() is not None
            if ended:
                end(process)
            ready = pipes.select(0 if ended else _NAP)
            for chosen, _ in ready:
                pipe: Any = chosen.fileobj
                if not chosen.data(pipe):
                    pipes.unregister(pipe)
                    pipe.close()
            if ended and all(chosen.data is tell for chosen, _ in ready):
                break
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the program took longer than {timeout:g} s") from None
    return complaint.decode(errors="replace")


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    arguments: tuple[str, ...]
    timeout: float
    output: PyTree

    def __call__(self, database: Database) -> Value:
        specs = jax.tree.leaves(self.output)
        numbers = NumbersRead([_kind(spec) for spec in specs for _ in range(spec.size)])
        columns = [_text(np.asarray(leaf)) for leaf in jax.tree.leaves(database)]
        table = "".join(",".join(record) + "\n" for record in np.hstack(columns))
        self._run(table.encode(), numbers)
        return jax.tree.map(functools.partial(_next_numbers, iter(numbers.all())), self.output)

    def _run(self, table: bytes, numbers: NumbersRead) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = *_LIMITED, *self.arguments
        start = functools.partial(Process, program, bufsize=0, start_new_session=True, **pipes)
        # The whole process group is killed even after success, because the program may have started
        # other processes.
        with ended_when_stopped(start, _kill) as process:
            complaint = converse(process, table, numbers.take, _kill, timeout=self.timeout)
        if process.returncode != 0:
            raise RuntimeError(f"the program ended with status {process.returncode}: {complaint}")


def _kill(process: Process) -> None:
    """Kills a program and all other processes in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _files(arguments: tuple[str, ...]) -> dict[str, str]:
    """Returns hashes of the program (with name "") and of the files that its arguments name."""
    program = shutil.which(arguments[0])
    if program is None:
        raise FileNotFoundError(f"no program {arguments[0]!r} can be run here")
    hashes: dict[str, str] = {}
    for name, path in ("", program), *((x, x) for x in arguments[1:] if os.path.isfile(x)):
        with open(path, "rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _text(array: np.ndarray) -> np.ndarray:
    """Formats each record as a row of strings.

    Numbers have the fewest digits that identify them.
    """
    numbers = array.astype(int) if array.dtype == bool else array
    if not np.issubdtype(numbers.dtype, np.number):
        numbers = numbers.astype(np.float32)  # NumPy cannot print bfloat16 and similar dtypes.
    return numbers.reshape(len(numbers), -1).astype(str)


def _kind(spec: jax.ShapeDtypeStruct) -> type[int] | type[float]:
    exact = spec.dtype == bool or np.issubdtype(spec.dtype, np.integer)
    return int if exact else float


def _next_numbers(numbers: Iterator[int | float], spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """Takes the numbers of the next array of the output."""
    own = list(itertools.islice(numbers, spec.size))
    return np.array(own, bool if spec.dtype == bool else None).reshape(spec.shape)
