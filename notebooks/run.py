"""Executes the notebooks top to bottom, each in a fresh kernel: `make notebooks`.

At full size what they show is written into the files. With DPJAX_NOTEBOOKS=small (see
`verdicts.py`) each takes seconds, two at a time, and no file changes. An error, or a verdict that
no longer holds, makes it fail; the other notebooks are executed all the same.
"""

import concurrent.futures
import sys
import time
from pathlib import Path

import nbclient
import nbformat

from verdicts import SMALL

HERE = Path(__file__).parent
# Of one cell, in seconds: a kernel that hangs is an error too.
LIMIT = 600
# Two kernels that start at once may choose the same port, and one of them ends.
ATTEMPTS = 3
# What kernels and editors add differs from machine to machine.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(paths: list[str]) -> int:
    """Executes some notebooks, or all; returns how many failed."""
    notebooks = list(map(Path, paths or sorted(HERE.glob("*.ipynb"))))
    with concurrent.futures.ProcessPoolExecutor(2 if SMALL else 1) as pool:
        failed = [
            x for x, good in zip(notebooks, pool.map(passes, notebooks), strict=True) if not good
        ]
    for path in failed:
        print(f"{path.name} failed", file=sys.stderr)
    return len(failed)


def passes(path: Path) -> bool:
    """Executes one notebook, and writes it where it passed at full size."""
    start = time.perf_counter()
    try:
        notebook = executed(path)
    except (nbclient.exceptions.CellControlSignal, nbclient.exceptions.DeadKernelError) as error:
        print(error, file=sys.stderr)
        return False
    if not SMALL:
        write(path, notebook)
    print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return True


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with what it shows now."""
    for attempt in range(ATTEMPTS):
        client = nbclient.NotebookClient(
            nbformat.read(path, as_version=4),
            timeout=LIMIT,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(HERE)}},
        )
        try:
            return client.execute()
        except RuntimeError as error:
            if "Kernel didn't respond" not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def write(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Writes what the notebook holds and shows, and nothing of where and when it was executed."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    nbformat.write(notebook, path)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
