"""Renders the tables of docs/benchmarks.md and README.md from the newest result of every job."""

import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
START, END = "<!-- bench -->", "<!-- /bench -->"
START_ACCURACY, END_ACCURACY = "<!-- accuracy -->", "<!-- /accuracy -->"
_ALIKE = 1.05  # Ratios up to this are shown as 1.


# The README shows these, with the peer in the second place.
FIRST_PAGE = (
    ("mean, n = 1000, m = 10^7, summable", "NumPy"),
    ("KDE, n = 5000, lattice 11, m = 5*10^4, summable", "R diffpriv"),
    ("linear SVM, n = 1000, d = 8, m = 1500", "scikit-learn"),
    ("order statistic, m = 10^7, k = .95 m", "np.partition"),
    ("10^6 Laplace releases, each with its own key", "OpenDP"),
    ("histogram of 10^6 buckets, n = 10^6, epsilon = 1", "diffprivlib"),
    ("step of DP-SGD, 784-128-10, exact noise", "jax_privacy"),
    ("README example, whole process, cold", "plain JAX"),
)

# Rows of errors in the README, with how the name of the table begins.
ACCURACY = (
    ("means by group", "made"),
    ("quantiles .25, .5, .75 by group", "made"),
    ("two-way table", "made"),
)


def main() -> None:
    """Rewrites what stands between the markers of both pages."""
    files = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    measured = {file.stem: _measured(file) for file in files}
    tables = "\n\n".join(_table(*found) for each in measured.values() for found in each)
    _replace(ROOT / "docs" / "benchmarks.md", tables)
    # The README has one machine: the CPU where most people start.
    machine, rows = measured["cpu"][0]
    shown = [row for one in FIRST_PAGE for row in rows if _is(row, *one)]
    header = "| Job | Peer | dpjax | Peer's time | Ratio |\n|---|---|---|---|---|"
    short = ["|".join(row.split("|")[:6]) + "|" for row in shown]
    _replace(ROOT / "README.md", "\n".join([f"{machine}:\n", header, *short]))
    print(tables)
    of_accuracy = ROOT / "bench" / "results" / "accuracy.json"
    if of_accuracy.exists():
        _replace_accuracy(json.loads(of_accuracy.read_text()))


def _replace_accuracy(found: dict[str, Any]) -> None:
    """Renders errors at an equal guarantee: all on one page, and three in the README."""
    rows = {(row["job"], row["table"]): _accuracy_row(row) for row in found["rows"]}
    header = (
        "| Job | Table | Runs | Best peer | epsilon .1 | 1 | 4 | Covered | Width | Why above 1 |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    about = f"{found['date']}:\n"
    page = ROOT / "docs" / "benchmarks.md"
    text = "\n".join([about, header, *rows.values()])
    _replace(page, text, START_ACCURACY, END_ACCURACY)
    named = {(row["job"], row["table"][:4]): row for row in found["rows"]}
    shown = [f"{job} {_shown_ratios(named[job, table])}" for job, table in ACCURACY]
    # One line of the README, which has few.
    _replace(ROOT / "README.md", "; ".join(shown), START_ACCURACY, END_ACCURACY, "")
    print(text)


def _accuracy_row(row: dict[str, Any]) -> str:
    compared = {epsilon: at for epsilon, at in row["at"].items() if at["peers"]}
    best = {min(at["peers"], key=at["peers"].get) for at in compared.values()}
    held = [at["covered"] for at in row["at"].values() if at["covered"] is not None]
    covered = f"{min(held):.0%} to {max(held):.0%}" if held else ""
    wide = [at["width"] for at in row["at"].values() if at.get("width") is not None]
    width = f"{min(wide):.2g} to {max(wide):.2g}" if wide else ""
    why = row["reason"] if any(_ratio_of_errors(at) > _ALIKE for at in compared.values()) else ""
    first = f"| {row['job']} | {row['table']} | {row['runs']} | {', '.join(sorted(best))}"
    return f"{first} | {_shown_ratios(row, ' | ')} | {covered} | {width} | {why} |"


def _shown_ratios(row: dict[str, Any], between: str = ", ") -> str:
    return between.join(_shown_ratio(at) for at in row["at"].values())


def _shown_ratio(at: dict[str, Any]) -> str:
    if not at["peers"]:
        return "no peer"
    ratio = _ratio_of_errors(at)
    return f"{ratio:.2g}" if ratio < float("inf") else "peer exact"


def _ratio_of_errors(at: dict[str, Any]) -> float:
    ours, theirs = at["ours"], min(at["peers"].values())
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else float("inf")  # No run of a peer was off.


def _replace(
    page: pathlib.Path, text: str, start: str = START, end: str = END, newline: str = "\n"
) -> None:
    before, rest = page.read_text().split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{newline}{text}{newline}{end}{after}")


def _is(row: str, job: str, peer: str) -> bool:
    return row.startswith(f"| {job} | {peer}")


def _table(machine: str, rows: list[str]) -> str:
    header = "| Job | Peer | dpjax | Peer's time | Ratio | Goal |\n|---|---|---|---|---|---|"
    return "\n".join([f"{machine}:\n", header, *rows])


def _measured(file: pathlib.Path) -> list[tuple[str, list[str]]]:
    """The machine with most jobs, the day and its rows; then others, with jobs that it lacks.

    Of machines with as many jobs, the last one that was measured comes first.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    jobs: dict[str, set[str]] = {}
    for line in reversed(lines):
        jobs.setdefault(line["machine"], set()).add(line["job"])
    shown: set[str] = set()
    found = []
    for machine in sorted(jobs, key=lambda machine: -len(jobs[machine])):
        new = jobs[machine] - shown
        if new:
            of_machine = [x for x in lines if x["machine"] == machine and x["job"] in new]
            found.append(_rows(of_machine))
        shown |= new
    return found


def _rows(lines: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The machine and the day, and the rows of a table, by the newest result of every job."""
    newest = {(line["job"], json.dumps(line["sizes"])): line for line in lines}.values()
    ceilings = next((line["results"] for line in newest if line["job"] == "ceilings"), None)
    last = max(line["date"] for line in newest)
    rows = []
    for line in newest:
        for position, row in enumerate(line["rows"]):
            ratio = row["theirs"] / row["ours"]
            goal = "" if row["goal"] is None else f"{row['goal']:g}x"
            if row["goal"] is not None and ratio < row["goal"]:
                goal += f", missed: {row['reason']}"
            share = _share(line["work"], row["ours"], ceilings) if position == 0 else ""
            rows.append(
                f"| {row['job']} | {row['peer']} | {_time(row['ours'])}{share}"
                f" | {_time(row['theirs'])} | {_ratio(ratio)} | {goal} |"
            )
    return f"{lines[-1]['machine']}, {last}", rows


def _share(work: dict[str, float] | None, seconds: float, ceilings: dict[str, float] | None) -> str:
    """Which part of the ceiling that binds the job reaches."""
    if work is None or ceilings is None:
        return ""
    least = {name: amount / ceilings[name] for name, amount in work.items()}
    binding = max(least, key=lambda name: least[name])
    label = {"bytes": "copy", "flops": "matmul"}[binding]
    return f" ({least[binding] / seconds:.1%} of {label})"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:,.0f}x"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


if __name__ == "__main__":
    main()
