"""Steps that run on devices: starting steps, waiting for them, and showing progress."""

import contextlib
import importlib.util
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from dpjax._core import _checks
from dpjax._running._devices import Device, platform_of
from dpjax._tracing._host_calls import stopping
from dpjax._tracing._programs import Program

Step = TypeVar("Step")
Started = TypeVar("Started")

# With this many steps in flight, the device never waits for the host.
_STEPS_IN_FLIGHT = 2
# Each nap is longer than the previous one by this factor, so the last nap is at most a tenth of the
# whole wait.
_SHORTEST_NAP, _LONGER, _LONGEST_NAP = 1e-4, 1.1, 0.05
# A program that computes uses processor time, while one that hangs uses none. Processor time is
# checked after this many naps. Naps are counted instead of seconds, because seconds also pass while
# the process is suspended.
_PATIENCE = 1200
_LEAST_SHARE = 0.01  # A fraction of one core. The naps themselves use about a tenth of that.


class NoAnswerError(RuntimeError):
    """Raised if a program will probably never finish."""


def run_in_flight(
    steps: Iterable[Step],
    start: Callable[[Step], Started],
    finish: Callable[[Started], None],
    *,
    programs: tuple[Program, ...],
    device: Device | None,
) -> None:
    """Starts steps one after the other, and finishes each step while later steps run.

    After Ctrl-C or another error, devices still finish the steps that were started, unless they
    hang. But code on the host, which may take long, is stopped by Ctrl-C.

    Args:
        steps: the work of each step.
        start: starts a step.
        finish: waits for a step by `wait_for`.
        programs: the programs that a step runs.
        device: the device that computes them; None for the default device.
    """
    # On a CPU, a step that hangs would also block the thread that starts the next step. So if a
    # program calls libraries that may hang, steps do not overlap.
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
        interrupted = not isinstance(error, Exception) and _on_host(programs)
        with stopping() if interrupted else contextlib.nullcontext():
            # After a step has failed, later steps fail, too. Only the first error is reported.
            while in_flight:
                with contextlib.suppress(Exception):
                    finish(in_flight.popleft())
        raise


def wait_for(
    array: Any,  # Type checkers do not know that arrays have `is_ready`.
    programs: tuple[Program, ...],
    device: Device | None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Waits for an array that programs compute; gives up if a CPU has stopped computing.

    LAPACK calls may hang; `dpjax/_tracing/_evaluate.py` avoids this where it can. So this function
    checks that the process uses processor time. The check can be removed once dpjax requires jaxlib
    0.11.1. Processor time is not checked if programs run code on the host, because this code may
    sleep. It is not checked on accelerators either, because the host is idle meanwhile. Ctrl-C
    stops code on the host.

    Args:
        array: the array to wait for.
        programs: the programs that compute it.
        device: where it is computed; None for the default device.
        look: called at every nap. If it raises an error, the wait ends.

    Raises:
        NoAnswerError: if the process has used almost no processor time for a minute of waiting.
    """
    nap, naps, spent = _SHORTEST_NAP, 0, time.process_time()
    try:
        while not array.is_ready():
            time.sleep(nap)
            nap = min(_LONGER * nap, _LONGEST_NAP)
            naps += 1
            look()
            if naps % _PATIENCE == 0 and platform_of(device) == "cpu" and not _on_host(programs):
                before, spent = spent, time.process_time()
                if spent - before < _LEAST_SHARE * _PATIENCE * _LONGEST_NAP:
                    suspects = sorted({x for program in programs for x in program.library_calls})
                    raise NoAnswerError(
                        "a program has not finished, and for a minute the process has used "
                        "almost no processor time, so the program probably hangs. Calls from XLA "
                        f"to other libraries ({', '.join(suspects) or 'none in this program'}) may "
                        "block all threads of XLA. Start Python with NPROC=64 in its environment, "
                        "so that XLA has more threads, and please report the function"
                    )
    except BaseException as error:
        if not isinstance(error, Exception) and _on_host(programs):
            with stopping(), contextlib.suppress(Exception):
                array.block_until_ready()
        raise
    array.block_until_ready()  # If the computation failed, this raises its error.


def _on_host(programs: tuple[Program, ...]) -> bool:
    return any(program.calls_host for program in programs)


@contextlib.contextmanager
def counting(
    unit: str, total: int, *, done: int = 0, shown: bool, plan: str = ""
) -> Generator[Callable[..., object], None, None]:
    """Yields a function that advances a progress bar, or does nothing if no bar is shown.

    The function takes the number of newly finished items, and a text to show after the bar. `plan`
    is a line of text above the bar. If there is a plan and tqdm is installed, terminals show both
    by default.
    """
    at_terminal = (
        plan and getattr(sys.stderr, "isatty", bool)() and importlib.util.find_spec("tqdm")
    )
    if not (shown or at_terminal):
        yield lambda more, found="": None
        return
    tqdm = _checks.extra("tqdm", "progress").tqdm
    with tqdm(total=total, initial=done, unit=f" {unit}", unit_scale=True) as bar:
        if plan and not bar.disable:
            bar.write(plan, file=sys.stderr)

        def count(more: int, found: str = "") -> None:
            bar.update(more)
            if found:
                bar.set_postfix_str(found)

        yield count


@contextlib.contextmanager
def saying_what_is_kept(note: Callable[[], str]) -> Generator[None, None, None]:
    """Adds the text of `note` to a KeyboardInterrupt: what was kept, and how to continue."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        interruption.add_note(note())
        raise
