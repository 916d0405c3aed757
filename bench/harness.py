"""Timing ways of doing the same job side by side, and writing down what was measured."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

# Much of XLA runs on one core of a device: with a device for each core, pairs spread over cores.
jax.config.update("jax_num_cpu_devices", os.cpu_count())

RESULTS = pathlib.Path(os.environ.get("DPJAX_RESULTS") or pathlib.Path(__file__).parent / "results")
R = "R diffpriv 0.4.2, recorded"  # Least CPU times on two cores of an AMD EPYC.
_PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "scikit-learn",
    "opendp",
    "diffprivlib",
    "jax-privacy",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        job: what was done.
        peer: the other way of doing it.
        ours: seconds of dpjax.
        theirs: seconds of the peer, for the whole job.
        goal: how many times as fast dpjax should be, None where nothing was asked for.
        reason: why the goal is missed; printed only where it is.
    """

    job: str
    peer: str
    ours: float
    theirs: float
    goal: float | None = None
    reason: str = "not known"


class Race:
    """Contenders in turns, so that noise hits all: the best time of each in seconds.

    Attributes:
        seconds: of each contender.
        peak_mib: the most memory that was used until each had run once; the first shares nothing.
    """

    def __init__(self, contenders: dict[str, Callable[[], Any]], *, rounds: int, warm: bool = True):
        """Times each `rounds` times, after one run that does not count if they are to be warm."""
        self.seconds = dict.fromkeys(contenders, float("inf"))
        self.peak_mib: dict[str, int] = {}
        for turn in range(rounds + warm):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                self.peak_mib.setdefault(name, peak_mib())
                if turn >= warm:
                    self.seconds[name] = min(self.seconds[name], elapsed)


def record(
    job: str,
    rows: list[Row],
    *,
    race: Race,
    sizes: dict[str, Any],
    results: Any = None,
    work: dict[str, float] | None = None,
) -> None:
    """Appends one JSON line: what ran, on what, how long it took, and what it computed.

    Args:
        job: a name.
        rows: comparisons for the table.
        race: the times.
        sizes: of the job.
        results: what both sides computed.
        work: the "bytes" and "flops" of the first row's job, at the least: its fraction of the
            device's ceilings is recorded with them.
    """
    line = {
        "job": job,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": machine(),
        "versions": _versions(),
        "sizes": sizes,
        "seconds": race.seconds,
        "peak_mib": race.peak_mib,
        "results": results,
        "work": work,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{device_name()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    for row in rows:
        missed = row.goal is not None and row.theirs / row.ours < row.goal
        goal = "" if row.goal is None else f", goal {row.goal:g}x{' MISSED' if missed else ''}"
        print(
            f"{row.job} | {row.peer}: {row.ours:.3g} s, {row.theirs:.3g} s,"
            f" {row.theirs / row.ours:.3g}x{goal}",
            flush=True,
        )


def every_device() -> Mesh:
    """All devices: on a CPU, one for each core."""
    return Mesh(jax.devices(), ("pairs",))


def peak_mib() -> int:
    """The most memory that was in use: the device's on an accelerator, else the process's."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics and jax.default_backend() != "cpu":
        return statistics["peak_bytes_in_use"] >> 20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20


def device_name() -> str:
    """The kind of device as a file name; all CPUs have one file."""
    device = jax.devices()[0]
    kind = device.platform if device.platform == "cpu" else device.device_kind
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


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


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"
