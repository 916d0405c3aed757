"""Four private releases on real data: run it by `make demo`."""

import os
from pathlib import Path

import jax

import dpjax
from demo_data import load_patients
from demo_jobs import Job, Result, curve_job, letter_job, mean_job, run, weights_job
from demo_report import draw_curve, print_comparison, print_meaning, print_table

PICTURE = Path(__file__).parents[1] / "build" / "demo" / "kernel_regression.png"
CURVE = ("mean radius", "mean area")


def main() -> None:
    """Runs the jobs, prints the table, draws the curve."""
    # One key for each job; a key that is used twice would correlate what must be independent.
    key_mean, key_weights, key_letter, key_curve = jax.random.split(dpjax.random.secure_key(), 4)
    public, private = load_patients()
    public_curve = public.columns(*CURVE)

    mean = announce_and_run(key_mean, mean_job(public, private))
    weights = announce_and_run(key_weights, weights_job(public, private))
    letter = announce_and_run(key_letter, letter_job())
    curve = announce_and_run(key_curve, curve_job(public_curve, private.columns(*CURVE)))

    print_table([mean, weights, letter, curve])
    print_comparison(weights, letter, public)
    print_meaning(mean, weights, curve)
    draw_curve(PICTURE, curve, public_curve, CURVE)
    print(f"\nThe kernel regression is drawn in {os.path.relpath(PICTURE)}")


def announce_and_run(key: jax.Array, job: Job) -> Result:
    """Says which job the progress bar belongs to."""
    print(f"Sampling the sensitivity: {job.name}", flush=True)
    return run(key, job)


if __name__ == "__main__":
    main()
