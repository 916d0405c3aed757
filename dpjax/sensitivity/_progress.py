"""How many are done, how fast, and how long it will still take."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dpjax import _checks


@contextlib.contextmanager
def counting(
    unit: str, total: int, *, done: int = 0, shown: bool
) -> Iterator[Callable[[int], Any]]:
    """A function to call with how many more are done, which a bar shows, if it is to be shown."""
    if not shown:
        yield lambda more: None
        return
    tqdm = _checks.extra("tqdm", "progress").tqdm
    with tqdm(total=total, initial=done, unit=f" {unit}", unit_scale=True) as bar:
        yield bar.update
