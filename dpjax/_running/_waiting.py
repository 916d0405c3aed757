"""Waiting for a device, and noticing that it will never be done.

This is the last line of defense against the hang of `dpjax/_tracing/_lapack.py`. The check for a
resting CPU can go with that file, when dpjax needs jaxlib 0.11.1 or later.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from dpjax._running._layout import Device, platform_of
from dpjax._tracing._interruptions import stopping
from dpjax._tracing._programs import Program

# Naps grow by a share of themselves, so that the last one is that share of all of them, at most.
_SHORTEST_NAP, _LONGER, _LONGEST_NAP = 1e-4, 1.1, 0.05
# A program that computes uses processor time, and a program that hangs uses none. Patience is
# counted in naps, not in seconds, because a suspended process takes no naps.
_PATIENCE = 1200
_LEAST_SHARE = 0.01  # Of one core. Waking up takes a tenth of that.


class NoAnswerError(RuntimeError):
    """A program will never be done."""


def wait_for(
    array: Any,  # JAX does not tell type checkers that arrays have `is_ready`.
    programs: tuple[Program, ...],
    device: Device | None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Waits for an array that programs compute, or gives up if a CPU has come to rest.

    There is no limit for code on the host, which may rest, nor for an accelerator, which computes
    while the host rests. An interruption stops code on the host.

    Args:
        array: the array to wait for.
        programs: the programs that compute it.
        device: where it is computed; None for the default device.
        look: called once a nap; it ends the wait by raising.

    Raises:
        NoAnswerError: if the process has used next to no processor time for a minute of waiting.
    """
    platform = platform_of(device)
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
                    suspects = sorted({x for program in programs for x in program.library_calls})
                    raise NoAnswerError(
                        "a program does not answer: for a minute the process has computed nothing."
                        f" Calls out of XLA ({', '.join(suspects) or 'none in this program'}) may"
                        " block all threads of its pool. Start Python with NPROC=64 in its"
                        " environment, which makes the pool larger, and please report the function"
                    )
    except BaseException as error:
        if calls_host and not isinstance(error, Exception):
            with stopping(), contextlib.suppress(Exception):
                array.block_until_ready()
        raise
    array.block_until_ready()  # Raises what the computation raised.
