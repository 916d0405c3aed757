"""The page that says what programs cost on accelerators."""

import datetime
import json
import pathlib
from typing import Any

from accelerators.facts import Facts
from accelerators.targets import ACCELERATORS, Accelerator

_HEAD = pathlib.Path(__file__).with_name("head.md").read_text()
FACTS = pathlib.Path(__file__).with_name("facts.json")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "accelerators.md"


def line(facts: Facts) -> str:
    """The facts in one line."""
    return (
        f"{facts.compile_seconds:5.1f} s, {facts.temporary / 2**20:6.1f} MiB,"
        f" {facts.flops:.1e} flops, {facts.bytes:.1e} bytes,"
        f" {_shown(facts.launches)} launches, {_shown(facts.loops)} loops,"
        f" {_shown(facts.wide)} wide"
    )


def write(found: dict[str, dict[str, Any]]) -> None:
    """Renews what was compiled in `facts.json`, and writes the page from all that it holds."""
    known = json.loads(FACTS.read_text())
    today = datetime.date.today().isoformat()
    for accelerator in found.keys() & known:
        rows = {name: {"date": today, **facts} for name, facts in found[accelerator].items()}
        known[accelerator].update(rows)
    FACTS.write_text(json.dumps(known, indent=1) + "\n")
    tables = "\n".join(_table(name, rows) for name, rows in known.items())
    PAGE.write_text(f"{_HEAD}\n<!-- compiled -->\n\n{tables}\n<!-- /compiled -->\n")


def estimate(facts: Facts, accelerator: Accelerator) -> float:
    """Seconds of a run, by a roofline: the larger of arithmetic and memory, and what is waited."""
    busy = max(facts.flops / accelerator.flops, facts.bytes / accelerator.bandwidth)
    waits = (facts.launches or 0) * accelerator.launch + (facts.loops or 0) * accelerator.wait
    return busy + waits


def _table(name: str, rows: dict[str, Any]) -> str:
    lines = [
        f"## {name}\n",
        f"| On {name} | Compiled | in s | MiB | Flops | Bytes | Launches | Loops | Estimate, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for program, values in rows.items():
        date, facts = values["date"], Facts(**{k: v for k, v in values.items() if k != "date"})
        lines.append(
            f"| {program} | {date} | {facts.compile_seconds:.0f} | {facts.temporary / 2**20:.1f}"
            f" | {facts.flops:.1e} | {facts.bytes:.1e}"
            f" | {_shown(facts.launches)} | {_shown(facts.loops)}"
            f" | {1e3 * estimate(facts, ACCELERATORS[name]):.2g} |"
        )
    return "\n".join(lines) + "\n"


def _shown(count: int | None) -> str:
    return "-" if count is None else str(count)
