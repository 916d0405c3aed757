"""A seeded generator of well-typed programs over records, and attacks on claims about them.

All rules of dpjax.proving are in it but for `lt_to`, `add_any`, `clamp`, `copy` and `is_finite`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._tracing._programs import Program

N, DIMS = 6, 2
MATRIX = jnp.array([[1.0, -2.0], [0.5, 1.0]])
LEVELS = np.array([-0.5, 0.1, 0.4], np.float32)
PLACES = np.arange(N, dtype=np.float32)[:, None]


def buckets(v, count):
    return jnp.clip((v[:, 0] * 2 + count / 2).astype(int), 0, count - 1)


def clipped_gradient(row):
    gradient = jax.grad(lambda w: jnp.tanh(row @ w) ** 2)(jnp.ones(DIMS, row.dtype))
    return gradient / jnp.maximum(0.3, jnp.sqrt(jnp.sum(gradient**2)))


def shares(v):
    """The mean of each bucket, and the bucket of each record."""
    chosen = jax.nn.one_hot(buckets(v, 3), 3, dtype=v.dtype)
    return chosen.T @ v / jnp.maximum(chosen.sum(0), 1)[:, None], chosen


def nearest(v):
    """Which of the rows of a matrix is the nearest one."""
    return jnp.argmin(((v[:, None] - MATRIX.astype(v.dtype)) ** 2).sum(-1), axis=1)


def by_number(v):
    cases = [lambda x: x, lambda x: -x, jnp.tanh]
    return lax.switch(jnp.clip((v.sum() * 2).astype(int), 0, 2), cases, v)


def entropy(v):
    share = jnp.zeros(4, v.dtype).at[buckets(v, 4)].add(1) / N
    return -(share * jnp.log(jnp.maximum(share, 1e-12))).sum()


def guarded_clip(v):
    norm = jnp.sqrt((v * v).sum(1, keepdims=True))
    return jnp.where(norm > 0.5, v / jnp.where(norm > 0.5, norm, 1) * 0.5, v)


def smoothed(v, convolve):
    """Two kernels of the columns of each record, which are one feature."""
    kernels = jnp.array([[[0.5, -1.0]], [[1.5, 0.25]]], v.dtype)
    return convolve(v[:, None, :], kernels).sum(1) + v


def soft_means(v):
    weights = jax.nn.softmax(jnp.stack([v[:, 0], -v[:, 1]], 1), axis=1)
    return weights.T @ v / weights.sum(0)[:, None]


def cross_entropy(v):
    labels = 0.8 * jax.nn.one_hot(buckets(v, DIMS), DIMS, dtype=v.dtype) + 0.1
    return -(jax.lax.stop_gradient(labels) * jax.nn.log_softmax(v)).sum()


def over_its_norm(v, least):
    return v / jnp.maximum(jnp.sqrt((v * v).sum()), least)


def agreement(a, b):
    return (2 * (a & b).sum() / jnp.maximum(a.sum() + b.sum(), 2)).astype(jnp.float32)


def shares_of_totals(v):
    totals = jnp.zeros(4, v.dtype).at[buckets(v, 4)].add(jnp.abs(v[:, 1]))
    return totals / jnp.maximum(totals.sum(), 0.5)


def share_above(v):
    """Of the records whose first number is positive, how many are below each of three levels."""
    chosen = v[:, 0] > 0
    below = v[None, :, 1] <= LEVELS[:, None].astype(v.dtype)
    return ((below & chosen).sum(1) / jnp.maximum(chosen.sum(), 1)).astype(v.dtype)


# Keep the shape (N, DIMS), in floats.
STEPS = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "moments": lambda v: v + jnp.square(v).mean(0) - jnp.square(v.mean(0)),
    "means of squares": lambda v: v * ((v - v.mean(0)) ** 2).mean(0),
    "weighted means": lambda v: v - by_weight(v[:, 0], jnp.tanh(v[:, 1]) + 1.2),
    "waves": lambda v: jnp.sin(0.7 * v + 0.5) + jnp.cos(0.4 * v),
    "roots of sums": lambda v: v * jnp.sqrt(jnp.abs(v).sum() + 0.1),
    "abs": jnp.abs,
    "square": jnp.square,
    "cube": lambda v: v**3,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "erf": jax.lax.erf,
    "expm1": jnp.expm1,
    "clip": lambda v: jnp.clip(v, -0.5, 0.5),
    "above": lambda v: v > 0.3,
    "at most": lambda v: v <= -0.2,
    "near": lambda v: (v > -0.5) & ~(v > 0.5),
    "reciprocal": lambda v: 1 / (2.5 + jnp.tanh(v)),
    "negative": lambda v: -v,
    "sqrt": lambda v: jnp.sqrt(jnp.abs(v) + 0.1),
    "bare sqrt": lambda v: jnp.sqrt(jnp.abs(v)),
    "rsqrt": lambda v: jax.lax.rsqrt(jnp.abs(v) + 0.25),
    "log": lambda v: jnp.log(jnp.abs(v) + 0.5),
    "log1p": lambda v: jnp.log1p(jnp.abs(v)),
    "floor": lambda v: jnp.floor(v * 3),
    "ceil": lambda v: jnp.ceil(v * 1.7),
    "round": lambda v: jnp.round(v * 2),
    "sign": jnp.sign,
    "integers": lambda v: (v * 3).astype(jnp.int32),
    "where": lambda v: jnp.where(v > 0, v, 2 * v),
    "maximum": lambda v: jnp.maximum(v, 0.1),
    "centered": lambda v: v - v.mean(0),
    "scaled": lambda v: v * v.mean(),
    "divided": lambda v: v / (1 + jnp.square(v).sum()),
    "plus max": lambda v: v + jnp.max(v, axis=0),
    "matrix": lambda v: v @ MATRIX.astype(v.dtype),
    "weighted": lambda v: v * PLACES,
    "minimum": lambda v: jnp.minimum(v, v.mean(0)),
    "own square": lambda v: v * v,
    "swapped": lambda v: jnp.concatenate([v[:, 1:], v[:, :1]], 1),
    "rows": lambda v: v / (1 + jnp.abs(v).sum(1, keepdims=True)),
    "row max": lambda v: v - v.max(1, keepdims=True),
    "sorted": lambda v: jnp.sort(v, axis=0),
    "sorted rows": lambda v: jnp.sort(v, axis=1),
    "second": lambda v: v + v[1:2],
    "softmax": lambda v: jax.nn.softmax(jnp.clip(v, -3, 3), axis=1),
    "softmax of sums": lambda v: v * jax.nn.softmax(jnp.clip(v.sum(0), -5, 5))[None],
    "log softmax": lambda v: jax.nn.log_softmax(v, axis=1),
    "clipped by norm": lambda v: v / jnp.maximum(0.5, jnp.linalg.norm(v, axis=1, keepdims=True)),
    "scaled by norm": lambda v: (
        v * jnp.minimum(1, 0.3 / (jnp.sqrt((v * v).sum(1, keepdims=True)) + 1e-3))
    ),
    "cumulative": lambda v: jnp.cumsum(v, axis=0),
    "cumulative rows": lambda v: jnp.cumsum(v, axis=1),
    "turned": lambda v: v * v[::-1],
    "neighbors": lambda v: jnp.maximum(v, jnp.pad(v, ((1, 0), (0, 0)))[:-1]),
    "order of neighbors": lambda v: jnp.concatenate([v[1:] > v[:-1], v[:1] > 0]),
    "rolled": lambda v: jnp.where(jnp.roll(v, 1, axis=0) > v, v, 2 * v[::-1]),
    "even rows": lambda v: jnp.minimum(v, jnp.repeat(v[::2], 2, axis=0)),
    "rows of rows": lambda v: jnp.tanh(v @ v.T) @ v,
    "columns as rows": lambda v: jnp.maximum(v, jnp.pad(v[:DIMS].T, ((2, 2), (0, 0)))),
    "power": lambda v: (jnp.abs(v) + 0.2) ** 0.7,
    "looked up": lambda v: MATRIX[jnp.clip((v[:, 0] * 2).astype(int), 0, 1)] * v,
    "descended": lambda v: (
        jax.lax.fori_loop(
            0, 3, lambda i, w: w - 0.1 * jnp.tanh(w + v.mean(0)), jnp.ones(DIMS, v.dtype)
        )[None]
        + v
    ),
    "sums by group": lambda v: v + jnp.zeros_like(v).at[buckets(v, N)].add(v),
    "sum of sums": lambda v: v - v.sum(1).sum(0) / 4,
    "tiled": lambda v: jnp.tile(v, (1, 2))[:, 1 : 1 + DIMS],
    "stacked": lambda v: jnp.stack([v[:, 1], 2 * v[:, 0]], axis=1),
    "a part of two": lambda v: lax.dynamic_slice(jnp.concatenate([v, -v], 1), (0, 1), (N, DIMS)),
    "split": lambda v: jnp.concatenate(jnp.split(v, 2, axis=1)[::-1], 1),
    "reversed columns": lambda v: jnp.minimum(v, v[:, ::-1]),
    "cumulative from the end": lambda v: lax.cumsum(v, axis=0, reverse=True),
    "bytes": lambda v: jnp.clip(v * 20 + 8, 0, 15).astype(jnp.uint8) ** 2,
    "few bits": lambda v: -jnp.clip(v * 9, -11, 11).astype(jnp.int8) + jnp.int8(3),
    "signs as numbers": lambda v: (v > 0).astype(int) - 2 * (v < 0.3).astype(int),
    "exclusive": lambda v: (v > 0) ^ (v.mean(0) > 0.1)[None] | (jnp.round(v * 2) == 1),
    "different": lambda v: jnp.where(jnp.floor(v * 2) != 1, v, 0.5),
    "bins": lambda v: v * jnp.searchsorted(LEVELS.astype(v.dtype), v).astype(v.dtype),
    "minus a quantile": lambda v: v - jnp.quantile(v, 0.3, axis=0),
    "standardized": lambda v: (v - v.mean(0)) / (jnp.std(v, axis=0) + 0.5),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "inverse power": lambda v: (jnp.abs(v) + 0.5) ** -2,
    "clipped gradients": lambda v: jax.vmap(clipped_gradient)(v),
    "one step a column": lambda v: lax.scan(lambda c, x: (c * 0.5 + x, c), v[:, 0], v.T)[1].T,
    "rows or none": lambda v: jnp.where((v.sum(1) > 0)[:, None], v, 0),
    "spread": lambda v: v + lax.pad(v[:-1, :1], jnp.zeros((), v.dtype), ((0, 1, 0), (0, 1, 0))),
    "powers of factors": lambda v: (v * 3) ** 2 / 5 / (2 + jnp.abs(v)),
    "repeated": lambda v: jnp.broadcast_to(v.mean(0)[None] * 2, v.shape) - v,
    "all or any": lambda v: v * ((v > -0.9).all(0) | (v > 0.8).any(0)),
    "convolved": lambda v: smoothed(v, lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME")),
    "convolved with steps": lambda v: smoothed(
        v, lambda x, k: lax.conv_general_dilated(x, k, (2,), ((2, 1),), (2,), (2,))
    ),
    "smoothed over records": lambda v: (
        jnp.convolve(v[:, 0], LEVELS.astype(v.dtype), "same")[:, None] - v
    ),
    "sums of windows": lambda v: (
        lax.reduce_window(v, np.zeros((), v.dtype), lax.add, (3, 1), (1, 1), "SAME")
        + lax.reduce_window(v, np.zeros((), v.dtype), lax.add, (1, 2), (1, 1), "SAME")
    ),
    "maxima of windows": lambda v: (
        lax.reduce_window(v, np.array(-np.inf, v.dtype), lax.max, (1, 2), (1, 1), "SAME")
        * lax.reduce_window(v, np.array(np.inf, v.dtype), lax.min, (2, 1), (1, 1), "SAME")
    ),
    "summed one by one": lambda v: v - lax.scan(lambda c, r: (c + r, None), v[0], v)[0] / 4,
    "mapped": lambda v: lax.map(lambda r: r * jnp.tanh(r[::-1]), v),
    "held in 16 bits": lambda v: jnp.tanh(v).astype(jnp.float16),
    "product in 16 bits": lambda v: jnp.matmul(
        v.astype(jnp.bfloat16), MATRIX.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "chosen": lambda v: jnp.where(v.mean(0) > 0.1, v, -v),
    "nearest rows": lambda v: MATRIX.astype(v.dtype)[nearest(v)],
    "one-hot of the nearest": lambda v: jax.nn.one_hot(nearest(v), DIMS, dtype=v.dtype),
    "one-hot of the largest": lambda v: v * jax.nn.one_hot(v.argmax(1), DIMS, dtype=v.dtype),
    "chosen records": lambda v: v[jnp.clip((jnp.abs(v[:, 0]) * 4).astype(int), 0, N - 1)],
    "guarded quotient": lambda v: jnp.where(v > 0.1, 0.2 / jnp.where(v > 0.1, v, 1), 0.5),
    "guarded log": lambda v: jnp.where(v > 0.2, jnp.log(jnp.where(v > 0.2, v, 1)), 0),
    "guarded clip": guarded_clip,
    "by a condition": lambda v: lax.cond(v.mean() > 0.1, lambda x: x, lambda x: 1 - x, v),
    "by a number": by_number,
    "by a condition of each": jax.vmap(
        lambda r: lax.cond(r[0] > 0, lambda x: 2 * x, lambda x: -x[::-1], r)
    ),
    "ranks": lambda v: jnp.argsort(jnp.argsort(v, axis=0), axis=0),
    "winsorized": lambda v: jnp.clip(v, *jnp.quantile(v, jnp.array([0.2, 0.8], v.dtype), axis=0)),
    "between quantiles": lambda v: v * jnp.subtract(*jnp.percentile(v[:, 0], LEVELS[1:] * 90)),
    "running maximum": lambda v: lax.cummax(v, axis=0),
    "running minimum": lambda v: lax.cummin(v, axis=0, reverse=True) + v,
    "differences": lambda v: jnp.diff(v, axis=0, prepend=v[:1]),
    "lag products": lambda v: jnp.concatenate([v[1:] * v[:-1], v[:1]]),
    "running mean": lambda v: jnp.cumsum(v, axis=0) / (PLACES.astype(v.dtype) + 1),
    "averages that forget": lambda v: lax.scan(
        lambda c, r: (0.9 * c + 0.1 * r, 0.9 * c + 0.1 * r), jnp.zeros(DIMS, v.dtype), v
    )[1],
    "minus the mean of a group": lambda v: v - shares(v)[1] @ shares(v)[0],
    "residuals": lambda v: v - v[:, :1] * (v[:, :1] * v).sum(0) / ((v[:, 0] ** 2).sum() + 0.5),
    "attention": lambda v: jax.nn.softmax(v @ v.T, axis=1) @ v,
    "windows with steps": lambda v: (
        v
        + jnp.repeat(
            lax.reduce_window(v, np.zeros((), v.dtype), lax.add, (3, 1), (2, 1), ((1, 0), (0, 0))),
            2,
            axis=0,
        )
    ),
    "windows of rows and columns": lambda v: lax.reduce_window(
        v, np.zeros((), v.dtype), lax.add, (2, 2), (1, 1), "SAME", (1, 1), (2, 1)
    ),
    "sums in steps": lambda v: (
        v
        - lax.scan(
            lambda c, t: (0.5 * c + (v * t - c).sum(0) / N, None), v[0], LEVELS.astype(v.dtype)
        )[0]
    ),
    "pooled": lambda v: v - jax.nn.softmax(2 * v[:, 0]) @ v,
    "attention by parts": lambda v: jax.nn.softmax(v[:, :1] * v[None, :, 1], axis=1) @ jnp.tanh(v),
    "soft means": lambda v: v @ soft_means(v),
    "step of a cross entropy": jax.grad(cross_entropy),
    "a step of its length": lambda v: v + over_its_norm(v.mean(0), 0.3) - over_its_norm(v, 2.0),
    "by agreement": lambda v: v * agreement(v[:, 0] > 0.2, v[:, 1] > -0.1),
    "by rows and sums": lambda v: v * share_above(v)[:, None].repeat(2, 0),
    "rows of other records": lambda v: v + jnp.tanh(v.reshape(3, 4).sum(1)).repeat(2)[:, None],
}
ENDS = {
    "soft means": lambda v: soft_means(v),
    "soft counts": lambda v: jax.nn.softmax(v, axis=1).sum(0) / 2,
    "pooled": lambda v: jax.nn.softmax(v[:, 1]) @ v,
    "mean of a normal": lambda v: over_its_norm(v.sum(0), 0.5),
    "agreement": lambda v: agreement(v[:, 0] > 0.3, v[:, 1] > 0.3),
    "concentration": lambda v: (shares_of_totals(v) ** 2).sum(),
    "shares of totals": lambda v: shares_of_totals(v),
    "trimmed variance": lambda v: jnp.var(jnp.sort(v[:, 0])[1:-1]),
    "distance to a line": lambda v: jnp.abs(jnp.sort(v[:, 0]) - PLACES[:, 0] / N).max(),
    "distance of a line": lambda v: jnp.maximum(
        jnp.sort(v[:, 1]) - PLACES[:, 0] / 3, PLACES[:, 0] / 2 - jnp.sort(v[:, 1])
    ).max(),
    "quartile range": lambda v: jnp.subtract(*jnp.quantile(v[:, 0], LEVELS[1:] + 0.3)),
    "tails": lambda v: jnp.sort(v[:, 0])[4:].mean() - jnp.sort(v[:, 0])[:3].mean() / 3,
    "above or not": lambda v: share_above(v),
    "mixed": lambda v: jnp.sort(v.reshape(4, 3), axis=1).sum(0),
    "median of pairs": lambda v: jnp.median((v[:, None, 0] + v[None, :, 0]).ravel()),
    "logsumexp": lambda v: jax.nn.logsumexp(jnp.clip(v, -4, 4), axis=0),
    "logsumexp of rows": lambda v: jax.nn.logsumexp(v, axis=1).mean(),
    "covariance": lambda v: jnp.cov(v, rowvar=False),
    "sample variance": lambda v: jnp.var(v, axis=0, ddof=1),
    "bins": lambda v: jnp.histogram(v[:, 0], bins=4, range=(-1, 1))[0],
    "sums by group": lambda v: jax.ops.segment_sum(
        v, jnp.clip((v[:, 1] * 3).astype(int), 0, 2), num_segments=3
    ),
    "stacked": lambda v: jnp.stack([v.mean(0), v.min(0)]),
    "counts and a prior": lambda v: jnp.zeros(4, v.dtype).at[buckets(v, 4)].add(1) + 0.1,
    "logs of counts": lambda v: jnp.log(jnp.zeros(4, v.dtype).at[buckets(v, 4)].add(1) + 1),
    "sum of row sums": lambda v: v.sum(1).sum(0),
    "mean of means": lambda v: v.mean(1).mean(),
    "deviation": lambda v: jnp.std(v, axis=0),
    "quantile": lambda v: jnp.quantile(v, 0.4, axis=0),
    "highest totals": lambda v: jnp.cumsum(jnp.sort(v, axis=0), axis=0)[2:],
    "rows of a table": lambda v: MATRIX[buckets(v, 2)].sum(0),
    "at bins": lambda v: (jnp.searchsorted(LEVELS.astype(v.dtype), v) == 1).sum(0),
    "several": lambda v: {"a": v.mean(0), "b": (v > 0).sum(), "c": v.max()},
    "matrix of sums": lambda v: (v @ MATRIX.astype(v.dtype)).sum(0) + 3,
    "mean": lambda v: v.mean(0),
    "sum": lambda v: v.sum(),
    "max": lambda v: v.max(0),
    "min": lambda v: v.min(),
    "trimmed": lambda v: jnp.sort(v, axis=0)[1:-1].mean(0),
    "gram": lambda v: v.T @ v,
    "all": lambda v: v,
    "variance": lambda v: jnp.square(v).mean(0) - v.mean(0) ** 2,
    "two passes": lambda v: v.var(0),
    "median": lambda v: jnp.median(v[:, 0]),
    "sum then exp": lambda v: jnp.exp(-jnp.abs(v).sum(1)).sum(),
    "histogram": lambda v: jnp.zeros(5).at[jnp.clip((v[:, 0] * 2).astype(int) + 2, 0, 4)].add(1),
    "weights": lambda v: jnp.zeros(4).at[jnp.clip((v[:, 0] * 2).astype(int), 0, 3)].add(
        jnp.clip(v[:, 1], -1, 1)
    ),
    "one-hot": lambda v: jax.nn.one_hot((v[:, 0] * 2).astype(int), 4).sum(0),
    "ecdf": lambda v: (v[None, :, 0] <= jnp.linspace(-1, 1, 5)[:, None]).mean(1),
    "pairs": lambda v: jnp.tanh(v[:, None, 0] - v[None, :, 1]).mean((0, 1)),
    "joined": lambda v: jnp.concatenate([v.mean(0), v.max(0)]),
    "any": lambda v: (v > 0.9).any(0),
    "group means": lambda v: shares(v)[0],
    "slope": lambda v: (v[:, 0] * v[:, 1]).sum() / ((v[:, 0] ** 2).sum() + 0.5),
    "precision": lambda v: (
        ((v > 0).all(1).sum() / jnp.maximum((v[:, 0] > 0).sum(), 1)).astype(v.dtype)
    ),
    "entropy": entropy,
    "distinct": lambda v: (jnp.zeros(5, v.dtype).at[buckets(v, 5)].add(1) > 0).sum(),
    "seen": lambda v: jnp.zeros(5, v.dtype).at[buckets(v, 5)].set(1),
    "two indices": lambda v: (
        jnp.zeros((3, 2), v.dtype).at[buckets(v, 3), buckets(v[:, ::-1], 2)].add(1)
    ),
    "contingency": lambda v: shares(v)[1].T @ shares(v[:, ::-1])[1],
    "top two": lambda v: lax.top_k(v[:, 0], 2)[0],
    "quartiles": lambda v: jnp.percentile(v[:, 0], jnp.array([25, 50, 75], v.dtype)),
    "ecdf of sorted": lambda v: (
        jnp.searchsorted(jnp.sort(v[:, 0]), LEVELS.astype(v.dtype), side="right") / N
    ),
    "mean distance": lambda v: jnp.abs(v[:, None, 0] - v[None, :, 0]).mean(),
    "auc": lambda v: (v[:, None, 0] > v[None, :, 1]).mean(),
    "highest cumulative": lambda v: jnp.cumsum(v, axis=0).max(0),
    "autocorrelation": lambda v: (v[1:] * v[:-1]).sum(0) / ((v * v).sum(0) + 0.5),
    "last cumulative sums": lambda v: jnp.cumsum(v, axis=0)[-1],
    "sums of blocks": lambda v: lax.reduce_window(
        v, np.zeros((), v.dtype), lax.add, (N // 2, DIMS), (N // 2, DIMS), "VALID"
    ),
    "sums of nearest": lambda v: jax.ops.segment_sum(v, nearest(v), 2),
}  # fmt: skip
NORMS = ("l1", "l2", "linf")


def by_weight(v, weights):
    return (weights * v).sum() / weights.sum()


def program(rng):
    """The words of a program, and the program."""
    words = [*rng.choice(list(STEPS), rng.integers(1, 6)), rng.choice(list(ENDS))]

    def target(v):
        dtype = v.dtype
        for word in words[:-1]:
            v = STEPS[word](v).astype(dtype)
        return ENDS[words[-1]](v)

    return words, target


def distance(first, second, norm):
    """The norms of differences, in float64."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    moved = np.concatenate(
        [(np.asarray(a, float) - np.asarray(b, float)).reshape(a.shape[0], -1) for a, b in pairs],
        axis=1,
    )
    if norm == "linf":
        return np.abs(moved).max(1)
    return np.abs(moved).sum(1) if norm == "l1" else np.sqrt((moved**2).sum(1))


def pairs(rng, count, dtype):
    """Random, corner, constant and nearly constant databases in [-1, 1], and neighbors."""
    first = rng.uniform(-1, 1, (count, N, DIMS))
    first[::2] = np.sign(first[::2])
    first[1::4, :, 0] = 1.0
    first[2::8] = np.sign(rng.normal(size=(len(first[2::8]), 1, DIMS)))
    first[3::8] = rng.choice([-1, -0.5, -0.2, 0, 0.1, 0.3, 0.5, 1], first[3::8].shape)
    second, place = first.copy(), rng.integers(0, N, count)
    corner = rng.random((count, 1)) < 0.6
    other = np.where(
        corner, np.sign(rng.normal(size=(count, DIMS))), rng.uniform(-1, 1, (count, DIMS))
    )
    second[np.arange(count), place] = other
    return first.astype(dtype), second.astype(dtype), place


def as_released(target, spec):
    """The target of many databases, computed as a release does it."""
    return jax.jit(jax.vmap(Program.trace("target", target, spec)))


def best_attack(target, rng, norm, dtype, count=400, rounds=3):
    """The largest distance found by random, corner and local search."""
    run = as_released(target, spec(dtype))
    first, second, place = pairs(rng, count, dtype)
    found = distance(run(first), run(second), norm)
    for step in (0.5, 0.05, 0.005)[:rounds]:
        elite = np.argsort(found)[-count // 20 :]
        chosen = np.resize(elite, count)
        noise = rng.normal(size=first.shape) * step * (rng.random(first.shape) < 0.3)
        base = np.clip(first[chosen] + noise, -1, 1).astype(dtype)
        row = second[chosen, place[chosen]] + rng.normal(size=(count, DIMS)) * step
        neighbor = base.copy()
        neighbor[np.arange(count), place[chosen]] = np.clip(row, -1, 1).astype(dtype)
        new = distance(run(base), run(neighbor), norm)
        keep = new > found[chosen]
        first = np.where(keep[:, None, None], base, first[chosen])
        second = np.where(keep[:, None, None], neighbor, second[chosen])
        place, found = place[chosen], np.maximum(new, found[chosen])
    return float(np.max(found))


def spec(dtype):
    """The records of these programs."""
    return jax.ShapeDtypeStruct((N, DIMS), dtype)
