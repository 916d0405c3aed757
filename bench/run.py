"""Runs every benchmark, or those named; results are appended under bench/results/."""

import pathlib
import subprocess
import sys

JOBS = (
    "ceilings",
    "mean",
    "guarantee",
    "privacy_profile",
    "envelope",
    "population",
    "shaped_noise",
    "priestley_chao",
    "svm",
    "kde",
    "training",
    "membership",
    "dp_sgd",
    "correlated_noise",
    "order_statistic",
    "lapack",
    "boxes",
    "releases",
    "queries",
    "k_means",
    "randomized_response",
    "sweep",
    "first_answer",
    "cold",
    "nine_jobs",
    "growth",
    "larger_than_memory",
    "ledger",
    "attacks",
    "experts",
    "accuracy",
    "synthetic",
)


def main(jobs: list[str]) -> int:
    """Each in a process of its own, so that none sees the memory or the threads of another."""
    here = pathlib.Path(__file__).parent
    unknown = set(jobs) - set(JOBS)
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    codes = [
        subprocess.run([sys.executable, here / f"{job}.py"], check=False).returncode
        for job in jobs or JOBS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
