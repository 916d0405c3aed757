"""Waiting for a device, and noticing that it will never be done."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax

from dpjax import _lapack
from dpjax._interruptions import stopping
from dpjax._programs import Program

# Naps grow by a share of themselves, so that the last one is that share of all of them, at most.
_SHORTEST_NAP, _LONGER, _LONGEST_NAP = 1e-4, 1.1, 0.05
# A program that computes uses its cores, also beside others; one that hangs uses none. Counted in
# naps, not in seconds, for a suspended process takes none.
_PATIENCE = 1200
_LEAST_SHARE = 0.01  # Of one core. Waking up takes a tenth of that.


class NoAnswerError(RuntimeError):
    """A program will never be done."""


def wait_for(
    array: Any,
    programs: tuple[Program, ...],
    device: Any,
    look: Callable[[], Any] = lambda: None,
) -> None:
    """Waits for an array that programs compute, or gives up where a CPU has come to rest.

    The last line of defense: nothing is known to hang, see `dpjax._lapack`. Code on the host may
    rest, and an accelerator computes while the host does; both are waited for without limit. The
    device is None where it is the default one. An interruption stops code on the host. `look` is
    called every now and then, and ends the wait by raising.

    Raises:
        NoAnswerError: if the process has used next to no processor time for a minute of waiting.
    """
    platform = jax.default_backend() if device is None else device.platform
    calls_host = any(program.calls_host for program in programs)
    nap, naps, spent = _SHORTEST_NAP, 0, time.process_time()
    try:
        while not array.is_ready():
            time.sleep(nap)
            nap = min(_LONGER * nap, _LONGEST_NAP)
            naps += 1
            look()
            if platform == "cpu" and not calls_host and naps % _PATIENCE == 0:
                before, spent = spent, time.process_time()
                if spent - before < _LEAST_SHARE * _PATIENCE * _LONGEST_NAP:
                    raise NoAnswerError(_message(programs))
    except BaseException as error:
        if calls_host and not isinstance(error, Exception):
            with stopping(), contextlib.suppress(Exception):
                array.block_until_ready()
        raise
    array.block_until_ready()  # Raises what the computation raised.


def _message(programs: tuple[Program, ...]) -> str:
    primitives = set().union(*(program.primitives() for program in programs))
    suspects = sorted(primitives & (_lapack.NAMES | {"fft"}))
    return (
        "a program does not answer: for a minute of waiting the process has computed nothing. What"
        " leaves XLA may wait for threads of its pool that wait for others in turn"
        f" (here: {', '.join(suspects) or 'no such operation'}). Start Python with NPROC=64 in its"
        " environment, which makes the pool larger, and please report the function"
    )
