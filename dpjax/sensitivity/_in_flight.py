"""Steps that run while the host prepares the next ones."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from dpjax.sensitivity._waiting import NoAnswerError

Step = TypeVar("Step")
Started = TypeVar("Started")

# The device must never wait for the host.
_STEPS_IN_FLIGHT = 2


def run_in_flight(
    steps: Iterable[Step], start: Callable[[Step], Started], finish: Callable[[Started], None]
) -> None:
    """Starts one step after the other, and finishes them in order, while later ones run.

    Also where Ctrl-C or an error ends it: what was started is finished, unless it never will be.
    """
    in_flight: deque[Started] = deque()
    try:
        for step in steps:
            in_flight.append(start(step))
            if len(in_flight) > _STEPS_IN_FLIGHT:
                finish(in_flight.popleft())
    except NoAnswerError:
        in_flight.clear()
        raise
    finally:
        while in_flight:
            finish(in_flight.popleft())
