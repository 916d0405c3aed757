"""Draws the price of the best of several runs: docs/images/tuning-*.svg.

Run `python docs/draw_tuning.py`.
"""

import numpy as np
from draw_start import BLUE, GREEN, VERMILION, draw_light_and_dark

import dpjax

RUN = {"noise_multiplier": 2.0, "delta": 1e-5, "dims": 10_000}


def prices(ax):
    """Epsilon over the mean number of runs, and of runs that are all shown."""
    sampling = dpjax.learning.poisson_sampling(100_000, batch_size=1000)
    runs = np.unique(np.geomspace(2, 200, 12).astype(int))
    for name, shape, color in (("geometric", 1.0, BLUE), ("logarithmic", 0.0, GREEN)):
        found = [
            dpjax.accounting.dp_sgd_best_of_runs(
                sampling, steps=1000, runs=int(count), shape=shape, **RUN
            ).epsilon
            for count in runs
        ]
        print(name, dict(zip(runs.tolist(), found, strict=True)))
        ax.plot(runs, found, color=color, linewidth=2, label=f"only the best one shown ({name})")
    counts = [1, 2, 4, 7, 10]
    shown = [
        dpjax.accounting.dp_sgd(sampling, steps=1000 * count, **RUN).epsilon for count in counts
    ]
    print("all", dict(zip(counts, shown, strict=True)))
    ax.plot(counts, shown, "--", color=VERMILION, linewidth=2, label="all runs shown")
    ax.plot(1, shown[0], "o", color=VERMILION, label="one run")
    ax.set(xscale="log", ylim=(0, 3), xlabel="number of runs, on average")
    ax.set_ylabel("epsilon at delta = 1e-5")
    ax.legend(loc="lower right", fontsize="small")


if __name__ == "__main__":
    draw_light_and_dark("tuning", prices, (5.6, 3.4))
