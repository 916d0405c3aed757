"""More programs that people write, to check rules that were made for those of natural_programs.py.

Run and read them in the same way.
"""

import jax
import jax.numpy as jnp
import numpy as np

import natural_programs as natural
from dpjax.proving import Categories
from natural_programs import (
    BALL,
    GROUPS,
    INTO,
    LABELED,
    LEVELS,
    NUMBERS,
    OUT,
    ROWS,
    SCORES,
    TIMES,
    N,
    Natural,
)

PAIRED = (
    {"a": natural.spec(dtype=jnp.int32), "b": natural.spec(dtype=jnp.int32)},
    {"a": Categories((0, 1, 2)), "b": Categories((0, 1, 2))},
)
POSITIVE = (natural.spec(), (0.1, 1))
CLASSES = (
    {"x": natural.spec(3), "y": natural.spec(dtype=jnp.int32)},
    {"x": natural.Ball(1.0), "y": Categories((0, 1, 2, 3))},
)
HEADS = INTO[:, :4]


def _between_groups(d):
    counts = jax.ops.segment_sum(jnp.ones(N), d["g"], 5)
    means = jax.ops.segment_sum(d["v"], d["g"], 5) / jnp.maximum(counts, 1)
    return (counts * (means - d["v"].mean()) ** 2).sum() / N


def _at_risk_and_events(d):
    at_risk = (d["t"][None] >= LEVELS[:, None]).sum(1)
    inside = (d["t"][None] < LEVELS[:, None] + 0.1) & (d["t"][None] >= LEVELS[:, None])
    return at_risk, (inside & d["e"][None]).sum(1)


def _nelson_aalen(d):
    at_risk, events = _at_risk_and_events(d)
    return jnp.cumsum(events / jnp.maximum(at_risk, 5))


def _f1(d):
    said, true = d["s"] > 0.5, d["y"] == 1
    return 2 * (said & true).sum() / jnp.maximum(said.sum() + true.sum(), 10)


def _theil(x):
    share = x / x.mean()
    return (share * jnp.log(share)).mean()


def _kolmogorov(x):
    return jnp.abs(jnp.sort(x) - (jnp.arange(N) + 0.5) / N).max()


def _hodges_lehmann(x):
    return jnp.median((0.5 * (x[:, None] + x[None])).ravel())


def _herfindahl(d):
    totals = jnp.zeros(5).at[d["g"]].add(d["v"])
    return ((totals / jnp.maximum(totals.sum(), 5)) ** 2).sum()


def _chi_square(d):
    table = jnp.zeros((3, 3)).at[d["a"], d["b"]].add(1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / N
    return ((table - expected) ** 2 / jnp.maximum(expected, 1)).sum()


def _log_odds(d):
    said, true = d["s"] > 0.5, d["y"] == 1
    a, b, c, e = (
        (x & y).sum() + 0.5 for x, y in ((said, true), (said, ~true), (~said, true), (~said, ~true))
    )
    return jnp.log(a * e / (b * c))


def _weighted_kappa(d):
    table = jnp.zeros((3, 3)).at[d["a"], d["b"]].add(1) / N
    weights = (np.arange(3)[:, None] - np.arange(3)[None]) ** 2 / 4
    expected = table.sum(1)[:, None] * table.sum(0)[None]
    return 1 - (weights * table).sum() / jnp.maximum((weights * expected).sum(), 0.2)


def _log_loss(d):
    p = jnp.clip(d["s"], 0.05, 0.95)
    return -(d["y"] * jnp.log(p) + (1 - d["y"]) * jnp.log1p(-p)).mean()


def _silhouette(x):
    to = jnp.sqrt(((x[:, None] - np.array([[0.2] * 3, [0.8] * 3], np.float32)) ** 2).sum(-1))
    own, other = to.min(1), to.max(1)
    return ((other - own) / jnp.maximum(other, 0.1)).mean()


def _ridge_of_two(d):
    x, y = d["x"][:, :2], d["y"]
    (a, b), (_, c) = x.T @ x / N + 0.5 * jnp.eye(2)
    p, q = x.T @ y / N
    return jnp.stack([c * p - b * q, a * q - b * p]) / (a * c - b * b)


def _step_of_power_iteration(x):
    v = x.T @ (x @ (jnp.ones(3) / np.sqrt(3, dtype=np.float32))) / N
    return v / jnp.maximum(jnp.linalg.norm(v), 0.2)


def _soft_means(x):
    d = ((x[:, None] - np.array([[0.2] * 3, [0.8] * 3], np.float32)[None]) ** 2).sum(-1)
    weights = jax.nn.softmax(-2 * d, axis=1)
    return weights.T @ x / weights.sum(0)[:, None]


def _smoothed_cross_entropy(w, d):
    labels = 0.9 * jax.nn.one_hot(d["y"], 4) + 0.1 / 4
    return -(labels * jax.nn.log_softmax(d["x"] @ w)).sum(1).mean()


def _normalized_network(p, d):
    hidden = d["x"] @ p[0]
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 0.5)
    return jnp.mean((jnp.tanh(hidden) @ p[1] - d["y"]) ** 2)


def _attention_pooling(x):
    return jax.nn.softmax(x @ INTO[:, 0]) @ x


def _auc_by_argsort(d):
    ranks = jnp.argsort(jnp.argsort(d["s"]))
    ones = (d["y"] == 1).sum()
    above = (ranks * (d["y"] == 1)).sum() - ones * (ones - 1) / 2
    return above / jnp.maximum(ones * (N - ones), N * N / 8)


def _least_squares(d):
    x, y = d["x"][:, 0], d["y"]
    c = jnp.cov(x, y)
    return c[0, 1] / jnp.maximum(c[0, 0], 0.1)


def _circular_mean(x):
    angles = 2 * np.pi * x
    return jnp.arctan2(jnp.sin(angles).mean(), jnp.maximum(jnp.cos(angles).mean(), 0.1))


def _huber_step(x):
    middle = jnp.median(x)
    return middle + jnp.clip(x - middle, -0.1, 0.1).mean()


def _mixture_step(x):
    logits = jnp.stack([-((x - 0.2) ** 2), -((x - 0.8) ** 2)], 1) / 0.1
    weights = jax.nn.softmax(logits, axis=1)
    totals = weights.sum(0)
    return totals / N, (weights * x[:, None]).sum(0) / jnp.maximum(totals, 1)


def _mutual_information(d):
    p = jnp.zeros((3, 3)).at[d["a"], d["b"]].add(1) / N
    product = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    return jnp.where(
        p > 0, p * jnp.log(jnp.where(p > 0, p, 1) / jnp.where(p > 0, product, 1)), 0
    ).sum()


def _determination(d):
    errors = ((d["y"] - d["x"][:, 0]) ** 2).sum()
    return 1 - errors / jnp.maximum(((d["y"] - d["y"].mean()) ** 2).sum(), N / 5)


def _impurity(d):
    left = (d["s"] <= 0.5).astype(jnp.float32)

    def gini(chosen):
        count = chosen.sum()
        share = (chosen * d["y"]).sum() / jnp.maximum(count, 1)
        return count / N * 2 * share * (1 - share)

    return gini(left) + gini(1 - left)


def _log_rank(d):
    at_risk, events = _at_risk_and_events(d)
    return (events - at_risk * (events.sum() / jnp.maximum(at_risk.sum(), N))).sum()


def _trimmed_variance(x):
    kept = jnp.sort(x)[3:-3]
    return ((kept - kept.mean()) ** 2).mean()


def _two_samples(d):
    ones = d["y"] == 1
    at_most = d["s"][None] <= LEVELS[:, None]
    shares = [(at_most & chosen).sum(1) / jnp.maximum(chosen.sum(), 5) for chosen in (ones, ~ones)]
    return jnp.abs(shares[0] - shares[1]).max()


PROGRAMS = {
    "sum of squares between groups": Natural(_between_groups, GROUPS, "l1"),
    "Nelson-Aalen": Natural(_nelson_aalen, TIMES, "linf"),
    "F1": Natural(_f1, SCORES, "l1"),
    "Theil": Natural(_theil, POSITIVE, "l1"),
    "Kolmogorov": Natural(_kolmogorov, NUMBERS, "l1"),
    "Kolmogorov of two samples": Natural(_two_samples, SCORES, "l1"),
    "Hodges-Lehmann": Natural(_hodges_lehmann, NUMBERS, "l1"),
    "trimmed variance": Natural(_trimmed_variance, NUMBERS, "l1"),
    "Herfindahl": Natural(_herfindahl, GROUPS, "l1"),
    "chi-square": Natural(_chi_square, PAIRED, "l1"),
    "log odds": Natural(_log_odds, SCORES, "l1"),
    "weighted kappa": Natural(_weighted_kappa, PAIRED, "l1"),
    "log loss": Natural(_log_loss, SCORES, "l1"),
    "silhouette": Natural(_silhouette, ROWS, "l1"),
    "ridge of two features": Natural(_ridge_of_two, LABELED, "l2"),
    "step of power iteration": Natural(_step_of_power_iteration, BALL, "l2"),
    "step of soft k-means": Natural(_soft_means, ROWS, "l2"),
    "step of smoothed cross entropy": Natural(
        lambda d: jax.grad(_smoothed_cross_entropy)(HEADS, d), CLASSES, "l2"
    ),
    "step of a normalized network": Natural(
        lambda d: jax.grad(_normalized_network)((INTO, OUT), d), LABELED, "l2"
    ),
    "attention pooling": Natural(_attention_pooling, BALL, "l2"),
    "AUC by argsort": Natural(_auc_by_argsort, SCORES, "l1"),
    "least squares": Natural(_least_squares, LABELED, "l1"),
    "circular mean": Natural(_circular_mean, NUMBERS, "l1"),
    "step of Huber": Natural(_huber_step, NUMBERS, "l1"),
    "step of a mixture": Natural(_mixture_step, NUMBERS, "l1"),
    "mutual information": Natural(_mutual_information, PAIRED, "l1"),
    "determination": Natural(_determination, LABELED, "l1"),
    "impurity of a split": Natural(_impurity, SCORES, "l1"),
    "log-rank": Natural(_log_rank, TIMES, "l1"),
}  # fmt: skip
FARTHEST = {
    "sum of squares between groups": 0.0505556,
    "Nelson-Aalen": 0.2,
    "F1": 0.2,
    "Theil": 0.328042,
    "Kolmogorov": 0.0333334,
    "Kolmogorov of two samples": 0.238462,
    "Hodges-Lehmann": 0.5,
    "trimmed variance": 0.0399306,
    "Herfindahl": 0.36,
    "chi-square": 12.837,
    "log odds": 2.19722,
    "weighted kappa": 0.311569,
    "log loss": 0.0981483,
    "silhouette": 0.0317827,
    "ridge of two features": 0.147219,
    "step of power iteration": 0.166662,
    "step of soft k-means": 0.966338,
    "step of smoothed cross entropy": 0.0566656,
    "step of a normalized network": 1.73119,
    "attention pooling": 0.343924,
    "AUC by argsort": 0.257778,
    "least squares": 1.15018,
    "circular mean": 0.643147,
    "step of Huber": 0.5,
    "step of a mixture": 1.00138,
    "mutual information": 0.247154,
    "determination": 7.17226,
    "impurity of a split": 0.0644445,
    "log-rank": 6.3,
}


if __name__ == "__main__":
    natural.main(PROGRAMS, FARTHEST)
