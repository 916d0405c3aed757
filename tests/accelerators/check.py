"""Compiles the engine's programs for accelerators that are not there, and checks their limits.

JAX_PLATFORMS=cpu PYTHONPATH=.:tests python -m accelerators.check, as `make accelerators` does.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from accelerators import limits, report
from accelerators.facts import Facts, facts_of
from accelerators.programs import QUICK, Call, programs
from accelerators.targets import ACCELERATORS


def checked(platform: str, name: str, make: Callable[[], Call]) -> tuple[Facts | None, list[str]]:
    """The facts of a program, if it compiles, and what is wrong with it."""
    try:
        facts = facts_of(make().trace().lower())
    except Exception as error:  # XLA raises errors of many kinds.
        return None, [f"{type(error).__name__}: {str(error)[:800]}"]
    return facts, limits.problems(facts, platform, name)


def main() -> int:
    """The number of programs that fail."""
    options = _options()
    found: dict[str, dict[str, Any]] = {}
    failed = 0
    for accelerator in options.on:
        known = ACCELERATORS[accelerator]
        for name, make in programs(known.devices()).items():
            if not (options.all or name in (options.only or QUICK)):
                continue
            facts, problems = checked(known.platform, name, make)
            shown = ""
            if facts is not None:
                shown = report.line(facts)
                found.setdefault(accelerator, {})[name] = dataclasses.asdict(facts)
                # After each program, so that a run that is cut off keeps what it has.
                if options.facts:
                    pathlib.Path(options.facts).write_text(json.dumps(found, indent=1))
            failed += bool(problems)
            print(
                f"{accelerator:8s} {name:28s} {shown}", *problems, sep="\n    FAILED: ", flush=True
            )
    if options.write:
        report.write(found)
    print(f"{failed} programs failed")
    return failed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="slow programs too")
    parser.add_argument("--only", nargs="+", help="names of programs, in place of the quick set")
    parser.add_argument("--on", nargs="+", choices=list(ACCELERATORS), default=list(ACCELERATORS))
    parser.add_argument("--facts", help="file to write the facts to, as JSON")
    parser.add_argument("--write", action="store_true", help="writes docs/accelerators.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(min(main(), 1))
