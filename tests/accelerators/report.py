"""The page that says what programs cost on accelerators."""

import datetime
import json
import pathlib
from typing import Any

from accelerators.facts import Facts
from accelerators.targets import ACCELERATORS, Accelerator

_HEAD, _COMPILED = (
    pathlib.Path(__file__).with_name(name).read_text() for name in ("head.md", "compiled.md")
)
FACTS = pathlib.Path(__file__).with_name("facts.json")
RESULTS = pathlib.Path(__file__).parents[2] / "bench" / "results"
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
    runs = "\n".join(filter(None, (measured(path) for path in sorted(RESULTS.glob("*.jsonl")))))
    PAGE.write_text(
        f"{_HEAD}\n<!-- measured -->\n\n{runs}\n<!-- /measured -->\n\n"
        f"{_COMPILED}\n<!-- compiled -->\n\n{tables}\n<!-- /compiled -->\n"
    )


def measured(path: pathlib.Path) -> str:
    """What `bench/on_device.py` found last on one device; empty if it did not run there."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    newest = {(x["job"], x["sizes"].get("name")): x for x in lines}
    found = {name: x for (job, name), x in newest.items() if job == "program"}
    if not found:
        return ""
    exact, elementary, clipping, rates = (
        newest[job, None]["results"]
        for job in ("exactness", "elementary functions", "clipping", "ceilings")
    )
    last = newest["exactness", None]
    text = [
        f"### {last['machine']}\n",
        f"{last['date']}, jax {last['versions']['jax']}. {exact['equal']} of"
        f" {exact['computations']} exact computations give the same bits as on a CPU."
        f"{_exceptions(exact['problems'])}\n",
        f"The errors of elementary functions are at most {elementary['largest']:.2g} times the"
        f" errors that proofs allow. One record changes a clipped sum by at most"
        f" {clipping['largest']:.3g} times the proved bound.\n",
        f"The peak rates are {rates['bytes'] / 1e12:.3g} TB/s for a copy,"
        f" {rates['flops'] / 1e12:.3g} Tflops for products of float32 matrices,"
        f" {rates['threefry words'] / 1e9:.3g} billion words per second for threefry, and"
        f" {rates['Philox words'] / 1e9:.3g} billion words per second for Philox.\n",
        "| Program | Compiled in s | Launches | Time, ms | Of a ceiling |",
        "|---|---:|---:|---:|---|",
    ]
    for name, line in found.items():
        facts, seconds = line["results"], line["seconds"][name]
        share = {x: facts[x] / rates[x] / seconds for x in ("bytes", "flops")}
        binding = max(share, key=lambda x: share[x])
        text.append(
            f"| {name} | {facts['compile_seconds']:.0f} | {_shown(facts['launches'])}"
            f" | {1e3 * seconds:.3g} | {share[binding]:.0%} of"
            f" {'copy' if binding == 'bytes' else 'products'} |"
        )
    return "\n".join(text) + "\n"


def _exceptions(problems: list[str]) -> str:
    if not problems:
        return ""
    return (
        f" Different: {'; '.join(problems)}. (Of two numbers, the first is from this device, and"
        " the second from a CPU.)"
    )


def estimate(facts: Facts, accelerator: Accelerator) -> float:
    """Seconds of a run, by a roofline: the larger of arithmetic and memory, and what is waited."""
    busy = max(facts.flops / accelerator.flops, facts.bytes / accelerator.bandwidth)
    waits = (facts.launches or 0) * accelerator.launch + (facts.loops or 0) * accelerator.wait
    return busy + waits


def _table(name: str, rows: dict[str, Any]) -> str:
    lines = [
        f"### {name}\n",
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
