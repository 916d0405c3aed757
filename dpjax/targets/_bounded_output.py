"""What a program prints, read as it comes: memory holds what was expected, whatever is printed.

How much a program prints may depend on private records. So must not the memory that it takes here.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

# A float in full takes up to 767 digits.
_LONGEST_WORD = 1024
_LONGEST_COMPLAINT = 500
_PIECE = 2**16
_NAP = 0.05  # For a program that has ended, while another one holds its pipes.
Process = subprocess.Popen[bytes]


class NumbersRead:
    """Numbers that are printed in some order, separated by commas or white space."""

    def __init__(self, kinds: Sequence[type[int] | type[float]]):
        """Expects as many numbers as there are kinds."""
        self._kinds = kinds
        self._rest = b""
        self._numbers = list[int | float]()

    def take(self, piece: bytes) -> None:
        """Reads on; raises where something else is printed, or more."""
        text = self._rest + piece.replace(b",", b" ")
        *words, self._rest = (
            [b"", *text.split()] if not text[-1:].isspace() else [*text.split(), b""]
        )
        for word in filter(None, words):
            self._add(word)
        if len(self._rest) > _LONGEST_WORD:
            raise ValueError(f"it printed a word of more than {_LONGEST_WORD} bytes")

    def all(self) -> list[int | float]:
        """The numbers, at the end of what is printed."""
        if self._rest:
            self._add(self._rest)
        if len(self._numbers) < len(self._kinds):
            raise ValueError(f"it printed {len(self._numbers)} of {len(self._kinds)} numbers")
        return self._numbers

    def _add(self, word: bytes) -> None:
        if len(self._numbers) == len(self._kinds):
            raise ValueError(f"it printed more than {len(self._kinds)} numbers")
        if len(word) > _LONGEST_WORD:
            raise ValueError(f"it printed a word of more than {_LONGEST_WORD} bytes")
        self._numbers.append(self._kinds[len(self._numbers)](word.decode()))


def converse(
    process: Process,
    told: bytes,
    take: Callable[[bytes], None],
    end: Callable[[Process], object],
    *,
    timeout: float,
) -> str:
    """Tells a program its input, and hands over what it prints until it ends.

    Args:
        process: with pipes, unbuffered.
        told: its input, of which it need not read anything.
        take: is given what it prints; raises to hear no more.
        end: ends what the program has started and left behind, which may hold its pipes.
        timeout: in seconds.

    Returns:
        The end of its complaints.

    Raises:
        TimeoutError: if it takes longer.
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
        piece = os.read(pipe.fileno(), _PIECE)
        take(piece)
        return bool(piece)

    def hear_complaint(pipe: Any) -> bool:
        nonlocal complaint
        piece = os.read(pipe.fileno(), _PIECE)
        complaint = (complaint + piece)[-_LONGEST_COMPLAINT:]
        return bool(piece)

    with selectors.DefaultSelector() as pipes:
        for pipe, event, call in (
            (process.stdin, selectors.EVENT_WRITE, tell),
            (process.stdout, selectors.EVENT_READ, hear),
            (process.stderr, selectors.EVENT_READ, hear_complaint),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            pipes.register(pipe, event, call)
        while pipes.get_map():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"it took longer than {timeout:g} s")
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
        raise TimeoutError(f"it took longer than {timeout:g} s") from None
    return complaint.decode(errors="replace")
