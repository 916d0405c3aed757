"""Steps that run while the host prepares the next ones."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from dpjax._running._waiting import NoAnswerError
from dpjax._tracing._interruptions import stopping

Step = TypeVar("Step")
Started = TypeVar("Started")

# The device must never wait for the host.
_STEPS_IN_FLIGHT = 2


def run_in_flight(
    steps: Iterable[Step],
    start: Callable[[Step], Started],
    finish: Callable[[Started], None],
    *,
    calls_host: bool,
) -> None:
    """Starts one step after the other, and finishes them in order, while later ones run.

    Also if Ctrl-C or an error ends it: devices finish all started steps, unless they never will.
    Ctrl-C stops code on the host, which may take long.
    """
    in_flight: deque[Started] = deque()
    try:
        for step in steps:
            in_flight.append(start(step))
            if len(in_flight) > _STEPS_IN_FLIGHT:
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
