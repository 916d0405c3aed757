"""Renders the README's table from the newest result of every job on each kind of device."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
START, END = "<!-- bench -->", "<!-- /bench -->"


def main() -> None:
    """Rewrites what stands between the markers."""
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    _, after = rest.split(END)
    files = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    tables = "\n\n".join(_table(file) for file in files)
    readme.write_text(f"{before}{START}\n{tables}\n{END}{after}")
    print(tables)


def _table(file: pathlib.Path) -> str:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["machine"] == lines[-1]["machine"]]
    newest = {(line["job"], json.dumps(line["sizes"])): line for line in lines}.values()
    ceilings = next((line["results"] for line in newest if line["job"] == "ceilings"), None)
    last = max(line["date"] for line in newest)
    header = "| Job | Peer | dpjax | Peer's time | Ratio | Goal |\n|---|---|---|---|---|---|"
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
    return "\n".join([f"{lines[-1]['machine']}, {last}:\n", header, *rows])


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
