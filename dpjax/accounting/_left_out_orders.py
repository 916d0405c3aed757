"""Renyi accounting by dp-accounting, without its warnings about orders that it leaves out."""

import contextlib
import logging
import threading
from collections.abc import Generator


@contextlib.contextmanager
def left_out_orders_hidden() -> Generator[None]:
    """Hides the warnings that this thread causes while the block runs.

    An order is left out where its series does not converge. Every other order still bounds epsilon,
    so the warning has nothing for users to act on. All other messages pass, and so do those of
    other threads.
    """
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or "Excluding this order" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
