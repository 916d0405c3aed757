"""What the demo shows: one table, what its numbers mean, and one picture."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import dpjax
from demo_data import Patients
from demo_jobs import GAMMA, Result, accuracy, curve_scale, curve_target

# Two lines of header, and how the cells are aligned.
COLUMNS = (
    ("", "target", "<"),
    ("", "norm", "<"),
    ("", "n", ">"),
    ("", "m", ">"),
    ("", "k", ">"),
    ("sampled", "sensitivity", ">"),
    ("global", "bound", ">"),
    ("", "true value", "<"),
    ("", "release", "<"),
    ("error", "(95%)", "<"),
    ("", "seconds", ">"),
)


def print_table(results: Sequence[Result]) -> None:
    """One row for each release, and its guarantee on the line below."""
    above, names, alignments = zip(*COLUMNS, strict=True)
    rows = [_row(result) for result in results]
    widths = [max(map(len, column)) for column in zip(above, names, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, alignments, widths, strict=True)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in padded).rstrip()

    print("", line(above), line(names), "-" * len(line(names)), sep="\n")
    for row, result in zip(rows, results, strict=True):
        print(line(row), f"    {result.release.guarantee}", f"    {_worth(result)}", sep="\n")


def _worth(result: Result) -> str:
    """What the release is worth on all pairs, from its profile: pairs of its own."""
    profile, epsilon = result.profile, result.profile.epsilon
    return (
        f"profile: at epsilon {epsilon:g} gamma {profile.gamma(epsilon):.2g} and delta"
        f" {profile.delta(epsilon):.2g} on average over pairs; at {2 * epsilon:g} gamma"
        f" {profile.gamma(2 * epsilon):.2g} and delta {profile.delta(2 * epsilon):.2g}"
    )


def _row(result: Result) -> tuple[str, ...]:
    job, sensitivity = result.job, result.mechanism.sensitivity
    return (
        job.name,
        str(sensitivity.norm),
        str(sensitivity.n),
        str(sensitivity.m),
        str(sensitivity.k),
        f"{sensitivity.value:.2g}",
        "-" if job.bound is None else f"{job.bound:.2g}",
        job.show_value(result.true_value),
        job.show_release(result.release.value),
        job.show_error.format(result.error),
        f"{result.seconds:.1f}",
    )


def print_comparison(weights: Result, letter: Result, public: Patients) -> None:
    """What the noise costs; like the true values, this is not private."""
    true, released = weights.true_value, weights.release.value
    counts = letter.true_value
    best = jnp.flatnonzero(counts == counts.max())
    chance = float(jnp.sum(jnp.exp(letter.mechanism.log_prob(best, counts))))
    _print_notes(
        f"The weights predict the diagnosis of the {len(public.features)} public patients with"
        f" accuracy {accuracy(true, public):.3f} (true) and {accuracy(released, public):.3f}"
        " (released).",
        f"Ten names say little at epsilon {letter.mechanism.epsilon:g}: one of the most common"
        f" letters is selected with probability {chance:.2f}. The gap says how many fewer times the"
        " selected letter may occur.",
    )


def print_meaning(mean: Result, weights: Result, curve: Result) -> None:
    """What was promised to the patients, in plain words."""
    n = mean.mechanism.sensitivity.n
    together = dpjax.accounting.compose(*(r.release.guarantee for r in (mean, weights, curve)))
    _print_notes(
        "A profile draws pairs of its own. It says what gamma leaves open: how far the pairs beyond"
        " the sampled sensitivity are protected still.",
        "gamma is a probability over random pairs of databases: the oracle draws at most"
        f" {GAMMA:.0%} of them further apart than the sampled sensitivity. Of {n} patients, on"
        f" average over databases, up to {math.ceil(GAMMA * n)}, typically the outliers, may be"
        " less protected than epsilon says.",
        "The three releases about the same patients, with targets fixed in advance, together cost"
        f" {together}.",
        "True values, and what is computed from them, are shown for comparison only: they are not"
        " private. All noise was drawn in integers, under a key of the operating system's entropy,"
        " and the guarantees hold for what was drawn: docs/security.md says how far.",
    )


def _print_notes(*notes: str) -> None:
    print()
    for note in notes:
        print(textwrap.fill(note, width=100, initial_indent="* ", subsequent_indent="  "))


def draw_curve(path: Path, result: Result, public: jax.Array, labels: Sequence[str]) -> None:
    """Draws the released curve with its error band, next to the curves without privacy."""
    scale = curve_scale(public)
    x_ends, y_ends = zip(scale.low.tolist(), scale.high.tolist(), strict=True)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = dpjax.plotting.released_function(
        result.release.value,
        curve_target(public)(result.job.database),
        error=result.error,
        domain=[x_ends],
        codomain=y_ends,
        labels=labels,
        ax=figure.subplots(),
    )
    axes.set_title(f"Released under {result.release.guarantee}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
