"""Draws a posterior and its draws, and the worst neighbors of a regression: docs/images/*.svg.

Run `python docs/draw_frontier.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from draw_start import BLUE, GREEN, VERMILION, draw_light_and_dark

import dpjax

RATES = jnp.linspace(0.5, 12, 200)
N, DRAWS = 500, 20_000
SIZE, STRENGTH = 50, 0.01


def posterior(axes):
    """The posterior of a rate, as it is, tempered and released, at two epsilons."""

    def log_likelihood(visits, rate):
        return visits * jnp.log(rate) - rate

    target = dpjax.targets.log_likelihoods(log_likelihood, RATES)
    oracle = dpjax.oracles.independent(lambda key: jax.random.poisson(key, 4.0).astype(float))
    sensitivity = dpjax.sample_sensitivity(
        jax.random.key(0), target, oracle, n=N, norm="range", gamma=0.01
    )
    scores = target(np.random.default_rng(0).poisson(4.0, N).astype("float32"))
    keys = jax.random.split(dpjax.random.seeded_key(0), DRAWS)
    step = float(RATES[1] - RATES[0])
    for ax, epsilon in zip(axes, (1.0, sensitivity.value), strict=True):
        sampler = dpjax.posterior_sampler(sensitivity, epsilon, log_prior=-RATES / 4)
        drawn = np.asarray(jax.jit(jax.vmap(lambda key, s=sampler: s(key, scores).value))(keys))
        share = np.bincount(drawn, minlength=RATES.size) / DRAWS / step
        options = {"step": "mid", "color": BLUE, "alpha": 0.4, "linewidth": 0}
        ax.fill_between(RATES, share, label=f"{DRAWS:,} draws", **options)
        for temperature, color, line in ((1.0, VERMILION, "--"), (sampler.temperature, BLUE, "-")):
            weights = jax.nn.softmax(scores / temperature - RATES / 4)
            label = "posterior" if color == VERMILION else f"at temperature {temperature:.2g}"
            ax.plot(RATES, weights / step, line, color=color, linewidth=2, label=label)
        ax.set(xlim=(2.5, 6.5), xlabel="visits a year", title=f"epsilon = {epsilon:.3g}")
        ax.legend(fontsize="x-small", loc="upper right")
    axes[0].set_ylabel("density")


def regression(ax):
    """Records in a disk and the regressions of two neighbors."""
    fit = dpjax.targets.logistic_regression(regularization=STRENGTH, dims=2)
    found = dpjax.auditing.adversarial_pair(
        jax.random.key(0),
        fit,
        {"x": jnp.ones((SIZE, 2)), "y": jnp.ones(SIZE)},
        bounds={"x": dpjax.proving.Ball(1.0), "y": (0, 1)},
        norm="l2",
        steps=1000,
    )
    share = found.distance * SIZE * STRENGTH / 2
    print(f"{found}: {share:.3f} of 2 / (n lambda)")
    x, y = found.database["x"], found.database["y"]
    angles = np.linspace(0, 2 * np.pi, 100)
    ax.plot(np.cos(angles), np.sin(angles), color="gray", linewidth=0.8, label="bounds")
    for label, color, marker in ((True, BLUE, "o"), (False, GREEN, "s")):
        of_label = x[(y > 0) == label]
        name = "one label" if label else "the other"
        ax.plot(*of_label.T, marker, color=color, alpha=0.6, label=name)
    changed = np.flatnonzero(np.any(x != found.neighbor["x"], axis=1) | (y != found.neighbor["y"]))
    (place,) = changed
    old, new = x[place], found.neighbor["x"][place]
    ax.annotate("", new, old, arrowprops={"arrowstyle": "->", "color": VERMILION, "lw": 2})
    ax.plot(*new, "*", color=VERMILION, markersize=14, label="the record that changes")
    for database, line in ((found.database, "-"), (found.neighbor, "--")):
        w = np.asarray(fit(database))
        across = np.array([-w[1], w[0]]) / np.linalg.norm(w)
        ends = np.stack([-1.3 * across, 1.3 * across])
        name = "decides" if line == "-" else "decides, after the change"
        ax.plot(*ends.T, line, color=VERMILION, linewidth=1.5, label=name)
    ax.set(xlim=(-1.3, 3.2), ylim=(-1.3, 1.3), xlabel="first feature", ylabel="second feature")
    ax.set_aspect("equal")
    ax.legend(loc="center right", fontsize="x-small")


if __name__ == "__main__":
    draw_light_and_dark("posterior", posterior, (7.6, 3.0), columns=2)
    draw_light_and_dark("adversarial", regression, (5.6, 3.4))
