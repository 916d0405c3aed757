"""The page that says what programs cost on accelerators."""

import pathlib
from typing import Any

from accelerators.facts import Facts
from accelerators.targets import ACCELERATORS, Accelerator

_HEAD = """# Programs on accelerators

No accelerator has run these programs: XLA compiled them for devices that were not there. `make accelerators CHECK="--all --write"`
compiles them and writes this page. The check fails if a program does not compile, calls the host, computes with float64, or takes
more memory, launches or loops than `tests/accelerators/limits.toml` allows.

Memory is temporary memory. Flops and bytes are XLA's count. Launches are kernels of one run. Loops are those whose length data decide,
as often as they are entered. On a TPU a program is one launch, and the column counts its operations. Compile times are those of a
busy machine with two cores.

The last column is an **estimate**, not a measurement. It is the larger of flops over peak and bytes over bandwidth. On a GPU, each
launch adds 3 microseconds, and each such loop 15. Peaks are those of data sheets: 67 Tflops of float32 and 3.35 TB/s for an H100, 4.8 TB/s
for an H200, and 197 or 918 Tflops of bfloat16 over six passes with .82 or 1.64 TB/s for TPU v5e or v6e. Integers count as floats.
A loop counts one step, so a program with such loops takes longer.
"""
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "accelerators.md"


def line(facts: Facts) -> str:
    """The facts in one line."""
    return (
        f"{facts.compile_seconds:5.1f} s, {facts.temporary / 2**20:6.1f} MiB,"
        f" {facts.flops:.1e} flops, {facts.bytes:.1e} bytes,"
        f" {facts.launches} launches, {facts.loops} loops, {facts.wide} wide"
    )


def write(found: dict[str, dict[str, Any]]) -> None:
    """Writes the page, with a table for each accelerator."""
    tables = [_table(name, rows) for name, rows in found.items()]
    PAGE.write_text("\n".join([_HEAD, *tables]))


def estimate(facts: Facts, accelerator: Accelerator) -> float:
    """Seconds of a run, by a roofline: the larger of arithmetic and memory, and what is waited."""
    busy = max(facts.flops / accelerator.flops, facts.bytes / accelerator.bandwidth)
    return busy + facts.launches * accelerator.launch + facts.loops * accelerator.wait


def _table(name: str, rows: dict[str, Any]) -> str:
    lines = [
        f"## {name}\n",
        "| Program | Compiled in s | Memory, MiB | Flops | Bytes | Launches | Loops | Estimate, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for program, values in rows.items():
        facts = Facts(**values)
        lines.append(
            f"| {program} | {facts.compile_seconds:.0f} | {facts.temporary / 2**20:.1f}"
            f" | {facts.flops:.1e} | {facts.bytes:.1e} | {facts.launches} | {facts.loops}"
            f" | {1e3 * estimate(facts, ACCELERATORS[name]):.2g} |"
        )
    return "\n".join(lines) + "\n"
