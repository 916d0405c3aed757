"""Compiles the engine's programs for accelerators that are not there, and checks their limits.

JAX_PLATFORMS=cpu PYTHONPATH=.:tests python -m accelerators.check, as `make accelerators` does.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from accelerators import limits, report
from accelerators.facts import Facts, facts_of
from accelerators.programs import QUICK, Call, programs
from accelerators.targets import ACCELERATORS


def compiled_facts(call: Call) -> Facts:
    """The facts of a call's program on the devices of its arguments."""
    lowered = call.trace().lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    return facts_of(compiled, time.perf_counter() - start)


def main() -> int:
    """The number of programs that fail."""
    options = _options()
    found: dict[str, dict[str, Any]] = {}
    failed = 0
    for accelerator in options.on:
        known = ACCELERATORS[accelerator]
        for name, make in programs(known.devices()).items():
            if not (options.all or options.only or name in QUICK) or options.only not in name:
                continue
            try:
                facts = compiled_facts(make())
            except Exception as error:  # XLA raises errors of many kinds.
                problems, shown = [f"{type(error).__name__}: {str(error)[:800]}"], ""
            else:
                found.setdefault(accelerator, {})[name] = dataclasses.asdict(facts)
                problems = limits.broken(facts, limits.allowed(known.platform, name))
                shown = report.line(facts)
            failed += bool(problems)
            print(
                f"{accelerator:8s} {name:28s} {shown}", *problems, sep="\n    FAILED: ", flush=True
            )
    if options.facts:
        pathlib.Path(options.facts).write_text(json.dumps(found, indent=1))
    if options.write:
        report.write(found)
    print(f"{failed} programs failed")
    return failed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="slow programs too")
    parser.add_argument("--only", default="", help="programs whose name has these words")
    parser.add_argument("--on", nargs="+", choices=list(ACCELERATORS), default=list(ACCELERATORS))
    parser.add_argument("--facts", help="file to write the facts to, as JSON")
    parser.add_argument("--write", action="store_true", help="writes docs/accelerators.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(min(main(), 1))
