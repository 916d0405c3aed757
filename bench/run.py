"""Runs every benchmark and prints one table; results are appended under bench/results/."""

import mean
import priestley_chao
import releases
from harness import machine


def main() -> None:
    """Prints the table in Markdown."""
    rows = [row for job in (mean, priestley_chao, releases) for row in job.run()]
    print(f"On {machine()}:\n")
    print("| Job | Peer | dpjax | Peer | Ratio |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {row} |")


if __name__ == "__main__":
    main()
