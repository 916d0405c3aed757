"""Statistics of a Parquet file: how time and memory grow with its rows.

`python bench/larger_than_memory.py 8` goes to 10^8 rows, which takes 2 GB of disk.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import dpjax
from harness import Race, peak_mib, record

WARDS = ["north", "east", "south", "west"]
IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
_ROWS = 10**6  # Of a row group.


def write(path: pathlib.Path, n: int) -> None:
    """A file of visits: a ward, a cost and a day."""
    generator = np.random.default_rng(0)
    schema = pa.schema(
        {"ward": pa.dictionary(pa.int8(), pa.string()), "cost": "double", "day": pa.date32()}
    )
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, n, _ROWS):
            rows = min(_ROWS, n - start)
            codes = pa.array(generator.integers(0, len(WARDS), rows), pa.int8())
            days = pa.array(generator.integers(10_000, 20_000, rows), pa.int32())
            columns = [
                pa.DictionaryArray.from_arrays(codes, WARDS),
                np.round(generator.gamma(2, 1000, rows), 2),
                days.cast(pa.date32()),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def measure(path: str) -> dict[str, float]:
    """Statistics of each kind, and the peak memory of the process up to each of them.

    Means and histograms are one pass. Keys of texts are two, and four iterations of k-means five.
    """
    table = dpjax.PrivateTable(ds.dataset(path), most_rows=2 * 10**8)
    bounds = {"cost": (0, 20_000), "day": (10_000, 20_000)}
    of = {"epsilon": 1.0, "delta": 1e-9}
    found = {}
    for name, ask in (
        ("mean", lambda: table.mean("cost", bounds=bounds, by={"ward": WARDS}, epsilon=1.0)),
        ("histogram", lambda: table.histogram("day", range(10_000, 20_001, 250), epsilon=1.0)),
        ("keys", lambda: table.keys("ward", **of)),
        ("k-means", lambda: table.k_means(["cost", "day"], clusters=4, bounds=bounds, **of)),
        ("distinct", lambda: table.count_distinct("cost", epsilon=1.0)),
    ):
        start = time.perf_counter()
        value = ask().value
        if name != "keys":
            jax.block_until_ready(value)
        found[name] = time.perf_counter() - start
        found[f"peak_mib of {name}"] = peak_mib()
    return {**found, "peak_mib": found["peak_mib of histogram"]}


def run(largest: int = 7) -> None:
    """Each size in a process of its own, for its own peak memory."""
    sizes = [10**decade for decade in range(5, largest + 1)]
    found: dict[int, dict[str, float]] = {}
    for n in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "visits.parquet"
            write(path, n)
            command = [sys.executable, __file__, "measure", str(path)]
            process = subprocess.run(command, check=True, capture_output=True, text=True)
            found[n] = json.loads(process.stdout.splitlines()[-1])
        print(f"{n:.0e} rows: {found[n]}", flush=True)
    race = Race({}, rounds=0)
    race.seconds = {f"{name} of {n:.0e}": found[n][name] for n in sizes for name in found[n]}
    race.peak_mib = {f"{n:.0e}": int(found[n]["peak_mib"]) for n in sizes}
    record("larger than memory", [], race=race, sizes={"sizes": sizes})
    _draw(sizes, found)


def _draw(sizes: list[int], found: dict[int, dict[str, float]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = {
        "mean": "means of 4 groups",
        "histogram": "histogram of 40 buckets",
        "keys": "keys of a column, 2 passes",
        "distinct": "distinct entries",
        "k-means": "clusters, 5 passes",
    }
    for name, label in labels.items():
        left.loglog(sizes, [found[n][name] for n in sizes], "o-", label=label)
    left.set(xlabel="rows", ylabel="seconds, with compilation")
    left.legend()
    right.semilogx(sizes, [found[n]["peak_mib"] for n in sizes], "o-")
    right.set(xlabel="rows", ylabel="peak memory up to the histogram, MiB", ylim=(0, None))
    figure.savefig(IMAGES / "larger-than-memory.png", dpi=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        run(*map(int, sys.argv[1:]))
