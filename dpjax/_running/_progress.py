"""Progress bars, and a note after an interruption about the kept results."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Generator

from dpjax._core import _checks


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
