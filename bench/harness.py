"""Timing two ways of doing the same job side by side, and writing down what was measured."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def race(contenders: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """The best time of each contender in seconds, warm, taking turns so that noise hits all."""
    for run in contenders.values():
        run()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def record(job: str, sizes: dict[str, int], seconds: dict[str, float], results: Any) -> None:
    """Appends one JSON line: what ran, on what, how long it took, and what it computed."""
    line = {
        "job": job,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "sizes": sizes,
        "seconds": seconds,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{jax.default_backend()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def machine() -> str:
    """The device, or the processor and its number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"
