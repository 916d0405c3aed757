"""Runs tests in children of one process, which has imported what takes long, but not dpjax.

Each line of its input is a list of tests, as JSON. It answers by a line when they have ended; how
each of them ended is in `outcomes.json`, and what was printed is in `printed.txt`.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

# No threads and no backend of JAX: they would not survive a fork.
IMPORTED = ("jax", "optax", "scipy.stats", "hypothesis", "dp_accounting", "xdist")
SECONDS = 900  # A mutant may never return.


class Outcomes:
    """How each test ended, by name: "passed", "asserted" or what else there was."""

    def __init__(self):
        self.ends = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is None:
            self.ends.setdefault(item.nodeid, "passed")
        elif not report.skipped:
            from tables import is_own_assertion  # That of the copy.

            asserted = call.when == "call" and is_own_assertion(call.excinfo.value)
            self.ends[item.nodeid] = "asserted" if asserted else str(report.longrepr)
        return report


def run(tests):
    """In a child: runs the tests, and ends."""
    try:
        os.setsid()
        printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        outcomes = Outcomes()
        # The warning is of plugins that are imported already.
        quiet = ["-q", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        pytest.main([*quiet, "-m", "long or not slow", *tests], plugins=[outcomes])
        Path("outcomes.json").write_text(json.dumps(outcomes.ends))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main():
    """Serves one request after the other."""
    sys.path[0] = os.getcwd()
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        Path("outcomes.json").unlink(missing_ok=True)
        child, end = os.fork(), time.monotonic() + SECONDS
        if child == 0:
            run(json.loads(line))
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < end:
            time.sleep(0.02)
        try:
            os.killpg(child, signal.SIGKILL)  # With all that it has left running.
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        print("done", flush=True)


if __name__ == "__main__":
    main()
