"""Steps that run while the host prepares the next ones."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from dpjax._running._layout import Device, platform_of
from dpjax._running._waiting import NoAnswerError
from dpjax._tracing._interruptions import stopping
from dpjax._tracing._programs import Program

Step = TypeVar("Step")
Started = TypeVar("Started")

# The device must never wait for the host.
_STEPS_IN_FLIGHT = 2


def run_in_flight(
    steps: Iterable[Step],
    start: Callable[[Step], Started],
    finish: Callable[[Started], None],
    *,
    programs: tuple[Program, ...],
    device: Device | None,
) -> None:
    """Starts one step after the other, and finishes them in order, while later ones run.

    Also if Ctrl-C or an error ends it: devices finish all started steps, unless they never will.
    Ctrl-C stops code on the host, which may take long.

    Args:
        steps: what to do.
        start: starts a step.
        finish: waits for it by `wait_for`.
        programs: what a step runs.
        device: where it is computed; None for the default device.
    """
    calls_host = any(program.calls_host for program in programs)
    # On a CPU, a step that will never be done also blocks the thread that starts the next one.
    one_by_one = platform_of(device) == "cpu" and any(x.library_calls for x in programs)
    most = 0 if one_by_one else _STEPS_IN_FLIGHT
    in_flight: deque[Started] = deque()
    try:
        for step in steps:
            in_flight.append(start(step))
            if len(in_flight) > most:
                finish(in_flight.popleft())
        while in_flight:
            finish(in_flight.popleft())
    except NoAnswerError:
        raise
    except BaseException as error:
        interrupted = calls_host and not isinstance(error, Exception)
        with stopping() if interrupted else contextlib.nullcontext():
            # Later steps fail with an earlier one, which is the one to tell.
            while in_flight:
                with contextlib.suppress(Exception):
                    finish(in_flight.popleft())
        raise
