"""How many are done, how fast, how long it will still take, and what an interruption leaves."""

import contextlib
from collections.abc import Callable, Iterator

from dpjax._core import _checks


@contextlib.contextmanager
def counting(
    unit: str, total: int, *, done: int = 0, shown: bool
) -> Iterator[Callable[[int], object]]:
    """A function to call with how many more are done, which a bar shows, if it is to be shown."""
    if not shown:
        yield lambda more: None
        return
    tqdm = _checks.extra("tqdm", "progress").tqdm
    with tqdm(total=total, initial=done, unit=f" {unit}", unit_scale=True) as bar:
        yield bar.update


@contextlib.contextmanager
def saying_what_is_kept(note: Callable[[], str]) -> Iterator[None]:
    """Where Ctrl-C ends a run: what it leaves, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        interruption.add_note(note())
        raise
