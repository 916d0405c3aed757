"""Progress bars, and a note after an interruption about the kept results."""

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

# Waiting for a device, and noticing that it will never be done.
#
# This is the last line of defense against the hang of `dpjax/_tracing/_evaluate.py`. The check for
# a resting CPU can go with that file, when dpjax needs jaxlib 0.11.1 or later.


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


# Steps that run while the host prepares the next ones.


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


@contextlib.contextmanager
def counting(
    unit: str, total: int, *, done: int = 0, shown: bool, plan: str = ""
) -> Generator[Callable[..., object], None, None]:
    """A function to call with how many more are done, which a bar shows, if it is to be shown.

    The bar shows a second argument behind it. A plan is a line above the bar. With one, a terminal
    shows both anyway, if tqdm is installed.
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
    """Adds a note to Ctrl-C: the kept results of the run, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        interruption.add_note(note())
        raise
