"""Nine statistics of a table and a report of their cost: a fresh process, and the same again.

`cold` is the first run of the nine jobs in a process, with the import, and `warm` the second one.
JAX keeps no compiled programs on disk here.
"""

import importlib
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROUNDS = 3


def jobs(frame: Any, path: str) -> str:
    """As a user would write it."""
    import dpjax

    sites = {"site": ["A", "B", "C", "D", "E"]}
    kinds = {"kind": ["p", "q", "r", "s"]}
    income, plane = (0, 20_000), {"x": (0, 100), "y": (-20, 80)}
    with dpjax.Ledger(path, epsilon=1.0, delta=1e-6) as ledger:
        table = dpjax.PrivateTable(frame, ledger=ledger, most_rows=30_000)
        answers = [
            table.count(by=sites, share=0.1),
            table.crosstab(["site", "kind"], keys=sites | kinds, share=0.1),
            table.histogram("income", range(0, 20_001, 1000), share=0.1),
            table.sum("income", bounds=income, share=0.1),
            table.mean("income", bounds=income, by=sites, share=0.1),
            table.quantiles("income", [0.25, 0.5, 0.75], bounds=income, by=sites, share=0.1),
            table.top("word", 10, share=0.1),
            table.correlation("x", "y", bounds=plane, share=0.1),
            table.regression("y", ["x"], bounds=plane, share=0.1),
        ]
        for answer in answers:
            print(answer)
        return str(ledger.report())


def measure() -> dict[str, float]:
    """Seconds and CPU seconds of both runs, in this process."""
    started = time.perf_counter()
    import numpy as np
    import pandas as pd

    importlib.import_module("dpjax")
    found = {"import": time.perf_counter() - started, "import, CPU": _cpu()}
    rng, n = np.random.default_rng(7), 20_000
    x, weights = rng.uniform(0, 100, n), 1 / np.arange(1, 201)
    columns = {
        "site": rng.choice(list("ABCDE"), n, p=[0.4, 0.3, 0.15, 0.1, 0.05]),
        "kind": rng.choice(list("pqrs"), n, p=[0.5, 0.3, 0.15, 0.05]),
        "income": rng.lognormal(7.8, 0.8, n).clip(0, 20_000),
        "x": x,
        "y": (0.5 * x + rng.normal(0, 10, n)).clip(-20, 80),
        "word": rng.choice(200, n, p=weights / weights.sum()),
    }
    frame = pd.DataFrame(columns)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            before, cpu = (started, 0.0) if name == "cold" else (time.perf_counter(), _cpu())
            jobs(frame, str(pathlib.Path(folder) / f"{name}.db"))
            found[name], found[f"{name}, CPU"] = time.perf_counter() - before, _cpu() - cpu
    return found


def _cpu() -> float:
    """Seconds of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Medians of whole processes, with how busy the machine was."""
    from harness import Race, record

    runs = []
    for _ in range(ROUNDS):
        command = [sys.executable, __file__, "measure"]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(process.stdout.splitlines()[-1]))
        print(runs[-1], flush=True)
    race = Race({}, rounds=0)
    race.seconds = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    record("nine jobs", [], race=race, sizes={"rows": 20_000, "rounds": ROUNDS})


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
    else:
        main()
