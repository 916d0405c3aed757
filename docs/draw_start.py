"""Draws the pictures of the README and the start page, light and dark: docs/images/*.svg.

Run `python docs/draw_start.py`. The table takes plotnine, which ships the diamonds.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import dpjax

ROOT = Path(__file__).resolve().parent.parent
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
TEXT = {"light": "#1f2330", "dark": "#e8eaf2"}


def statistics_of_a_table(ax):
    """What the README's example of a table publishes, beside the truth."""
    namespace = {}
    own = plt.figure()  # The example draws, too.
    exec(_example("plotnine"), namespace)
    plt.close(own)
    mean, diamonds = namespace["mean"], namespace["diamonds"]
    low, high = mean.interval(0.95)
    places = np.arange(len(namespace["cuts"]))
    middle = np.asarray(mean.value)
    truth = diamonds.groupby("cut", observed=True)["price"].mean().loc[namespace["cuts"]]
    ax.bar(places, middle, 0.6, color=BLUE, alpha=0.5, label="released, with its interval of 95%")
    errors = [middle - np.asarray(low), np.asarray(high) - middle]
    ax.errorbar(places, middle, errors, fmt="none", capsize=5, color=BLUE, linewidth=2)
    ax.plot(places, truth, "_", markersize=26, color=VERMILION, mew=2, label="true mean (private)")
    ax.set_xticks(places, namespace["cuts"])
    ax.set(ylabel="mean price, dollars", ylim=(0, 7000))
    ax.legend(loc="upper right", ncol=2, fontsize="small")


def training(ax):
    """What the steps of DP-SGD cost."""
    sampling = dpjax.learning.poisson_sampling(n=50_000, batch_size=500)
    steps = np.unique(np.geomspace(1, 10_000, 25).astype(int))
    for z, color in ((0.8, VERMILION), (1.2, BLUE), (2.0, GREEN)):
        promised = [
            dpjax.accounting.dp_sgd(
                sampling, noise_multiplier=z, steps=int(t), delta=1e-6, dims=10**5
            ).epsilon
            for t in steps
        ]
        ax.plot(steps, promised, color=color, linewidth=2, label=f"noise multiplier {z:g}")
    ax.set(xscale="log", ylim=(0, 8), xlabel="steps of DP-SGD", ylabel="epsilon at delta = 1e-6")
    ax.legend(loc="upper left")


def sampling(ax):
    """Distances of pairs, and the one that is chosen."""
    key = jax.random.key(0)
    settings = {"n": 1000, "norm": "l1", "m": 200}
    oracle = lambda key, n: jax.random.exponential(key, (n,))  # noqa: E731
    distances = dpjax.sample_distances(key, jnp.mean, oracle, **settings)
    point = dpjax.operating_point(m=200, gamma=0.05)
    dpjax.plotting.sensitivity_ecdf(distances, point, ax=ax)
    ax.set_xlim(0, 0.011)  # Room for the legend.
    ax.legend(loc="lower right", fontsize="small")


def _example(word):
    """The README's block of code that holds a word."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return next(block for block in blocks if word in block)


def main():
    """Draws each picture."""
    for name, draw, size in (
        ("start", statistics_of_a_table, (6.4, 3.4)),
        ("training", training, (5.2, 3.2)),
        ("sampling", sampling, (5.2, 3.2)),
    ):
        draw_light_and_dark(name, draw, size)


def draw_light_and_dark(name, draw, size, columns=1):
    """Draws a picture on a light and on a dark page: docs/images/NAME-light.svg and -dark.svg."""
    plt.rcParams["svg.fonttype"] = "none"  # Texts stay texts: small files, in the font of the page.
    plt.rcParams["svg.hashsalt"] = "dpjax"
    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    draw(axes)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    for page, color in TEXT.items():
        for ax in figure.axes:
            _paint(figure, ax, color)
        path = ROOT / "docs" / "images" / f"{name}-{page}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _paint(figure, ax, color):
    """Text and lines of the axes in the color of a page."""
    for text in figure.findobj(plt.Text):
        text.set_color(color)
    ax.tick_params(colors=color)
    for spine in ax.spines.values():
        spine.set_color(color)
    if legend := ax.get_legend():
        legend.get_frame().set_alpha(0)


if __name__ == "__main__":
    main()
