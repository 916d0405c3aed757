"""How tight proofs are on programs that people write: n = 30 records in float32.

FARTHEST holds the largest distance of two neighbors that a search found. So the ratio of a proved
bound to it may be too large, never too small. `--search` searches again. `--added` proves bounds
under add-or-remove-one, in 30 slots, and divides by the same distances under replace-one.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax.proving import Ball, Categories, NoProofError
from dpjax.proving._losses import Losses
from dpjax.proving._prove_sensitivity import public_bounds
from dpjax.queries import PaddedRecords

N = 30
LEVELS = np.linspace(0.1, 0.9, 9, dtype=np.float32)
INTO = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
OUT = np.random.default_rng(1).normal(size=8).astype(np.float32)


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the form of an array with one row for each record."""
    return jax.ShapeDtypeStruct((N, *shape), dtype)


# Records and their bounds.
NUMBERS = (spec(), (0, 1))
ROWS = (spec(3), (0, 1))
BALL = (spec(3), Ball(1.0))
SCORES = ({"s": spec(), "y": spec(dtype=jnp.int32)}, {"s": (0, 1), "y": Categories((0, 1))})
GROUPS = ({"v": spec(), "g": spec(dtype=jnp.int32)}, {"v": (0, 1), "g": (0, 4)})
TIMES = ({"t": spec(), "e": spec(dtype=bool)}, {"t": (0, 1), "e": (0, 1)})
LABELED = ({"x": spec(3), "y": spec()}, {"x": Ball(1.0), "y": (-1, 1)})
WITH_NAN = (spec(), dpjax.proving.Interval(0, 1, missing=True))


class Natural(NamedTuple):
    """A program, its records with their bounds, and a norm."""

    target: Callable[[Any], Any]
    records: tuple[Any, Any]
    norm: str


def _winsorized(x):
    return jnp.clip(x, jnp.quantile(x, 0.1), jnp.quantile(x, 0.9)).mean()


def _pearson(x):
    c = jnp.cov(x[:, :2], rowvar=False)
    return c[0, 1] / jnp.sqrt(jnp.maximum(c[0, 0], 0.05) * jnp.maximum(c[1, 1], 0.05))


def _kendall(x):
    signs = [jnp.sign(x[:, None, k] - x[None, :, k]) for k in (0, 1)]
    return (signs[0] * signs[1]).sum() / (N * (N - 1))


def _auc_of_pairs(d):
    positive = d["y"] == 1
    above = (d["s"][:, None] > d["s"][None]) + 0.5 * (d["s"][:, None] == d["s"][None])
    pairs = positive[:, None] & ~positive[None]
    return (above * pairs).sum() / jnp.maximum(pairs.sum(), N)


def _auc_of_ranks(d):
    y = d["y"][jnp.argsort(d["s"])]
    return (jnp.cumsum(1 - y) * y).sum() / (N * N / 4)


def _spearman(x):
    ranks = [(x[:, None, k] > x[None, :, k]).sum(1) for k in (0, 1)]
    return ((ranks[0] - ranks[1]) ** 2).sum() * (6 / (N * (N * N - 1)))


def _confusion(d):
    predicted = (d["s"] > 0.5).astype(jnp.int32)
    return jnp.zeros((2, 2), jnp.int32).at[d["y"], predicted].add(1)


def _calibration_error(d):
    bins = jax.nn.one_hot(jnp.clip((d["s"] * 5).astype(jnp.int32), 0, 4), 5)
    return jnp.abs(bins.T @ (d["s"] - d["y"])).sum() / N


def _precision(d):
    said = d["s"] > 0.5
    return (said & (d["y"] == 1)).sum() / jnp.maximum(said.sum(), 10)


def _segment_means(d):
    totals = jax.ops.segment_sum(d["v"], d["g"], 5)
    return totals / jnp.maximum(jax.ops.segment_sum(jnp.ones(N), d["g"], 5), 5)


def _guarded_means(d):
    counts = jnp.zeros(5).at[d["g"]].add(1)
    totals = jnp.zeros(5).at[d["g"]].add(d["v"])
    return jnp.where(counts > 0, totals / jnp.where(counts > 0, counts, 1), 0)


def _entropy(d):
    p = jnp.bincount(d["g"], length=5) / N
    return -(p * jnp.log(jnp.maximum(p, 1e-12))).sum()


def _survival(d):
    at_risk = (d["t"][None] >= LEVELS[:, None]).sum(1)
    inside = (d["t"][None] < LEVELS[:, None] + 0.1) & (d["t"][None] >= LEVELS[:, None])
    return jnp.cumprod(1 - (inside & d["e"][None]).sum(1) / jnp.maximum(at_risk, 1))


def _log_survival(d):
    at_risk = (d["t"][None] >= LEVELS[:, None]).sum(1).astype(jnp.float32)
    inside = (d["t"][None] < LEVELS[:, None] + 0.1) & (d["t"][None] >= LEVELS[:, None])
    events = (inside & d["e"][None]).sum(1).astype(jnp.float32)
    return jnp.exp(jnp.cumsum(jnp.log(1 - 0.9 * events / jnp.maximum(at_risk, 1.0))))


def _squares(w, d):
    return jnp.mean((d["x"] @ w - d["y"]) ** 2)


def _logistic(w, d):
    return jnp.mean(jnp.logaddexp(0.0, -d["y"] * (d["x"] @ w)))


def _network(p, x):
    return jnp.tanh(x @ p[0]) @ p[1]


def _step_of_network(d):
    return jax.grad(lambda p: jnp.mean((_network(p, d["x"]) - d["y"]) ** 2))((INTO, OUT))


def _clipped_gradients(d):
    one = jax.grad(lambda p, x, y: (_network(p, x) - y) ** 2)
    g = jax.vmap(one, (None, 0, 0))((INTO, OUT), d["x"], d["y"])
    norms = jnp.sqrt(sum(jnp.sum(z.reshape(N, -1) ** 2, 1) for z in jax.tree.leaves(g)))
    factors = 1 / jnp.maximum(1.0, norms)
    return jax.tree.map(lambda z: jnp.tensordot(factors, z, 1) / N, g)


def _chosen_gradients(d):
    g = jax.vmap(jax.grad(lambda w, x, y: (x @ w - y) ** 2), (None, 0, 0))(
        jnp.ones(3), d["x"], d["y"]
    )
    norms = jnp.linalg.norm(g, axis=1, keepdims=True)
    return jnp.where(norms > 1, g / norms, g).mean(0)


def _attention(x):
    q, k = x @ INTO[:, :3], x @ INTO[:, 3:6]
    return (jax.nn.softmax(q @ k.T / np.sqrt(3), axis=-1) @ x).mean(0)


def _means_step(x):
    d = ((x[:, None] - np.array([[0.2] * 3, [0.8] * 3], np.float32)[None]) ** 2).sum(-1)
    return (d <= d.min(1, keepdims=True)).astype(jnp.float32).T @ x


def _means_step_by_index(x):
    d = ((x[:, None] - np.array([[0.2] * 3, [0.8] * 3], np.float32)[None]) ** 2).sum(-1)
    return jax.nn.one_hot(jnp.argmin(d, 1), 2).T @ x


def _slope(d):
    x, y = d["x"][:, 0], d["y"]
    return ((x - x.mean()) * y).sum() / jnp.maximum(((x - x.mean()) ** 2).sum(), N / 10)


def _gini(x):
    return (2 * jnp.arange(1, N + 1) - N - 1) @ jnp.sort(x) / (N * jnp.maximum(x.sum(), 1.0))


def _gini_of_pairs(x):
    return jnp.abs(x[:, None] - x[None]).sum() / (2 * N * jnp.maximum(x.sum(), N / 4))


def _discrepancy(x):
    return jnp.exp(-((x[:, None] - x[None]) ** 2)).mean()


def _absent_as_zero(x):
    return jnp.where(jnp.isnan(x), 0, x).mean()


def _ecdf_at(x):
    return jnp.searchsorted(jnp.sort(x), LEVELS) / N


def _average(x):
    return jax.lax.scan(lambda c, v: (0.9 * c + 0.1 * v,) * 2, 0.0, x)[0]


def _descent(d):
    w = jnp.zeros(3)
    for _ in range(5):
        w = w - 0.1 * jax.grad(_squares)(w, d)
    return w


PROGRAMS: dict[str, Natural] = {
    "mean": Natural(jnp.mean, NUMBERS, "l1"),
    "percentiles": Natural(lambda x: jnp.percentile(x, np.array([25.0, 50, 75])), NUMBERS, "l1"),
    "quantile": Natural(lambda x: jnp.quantile(x, 0.9), NUMBERS, "l1"),
    "interquartile range": Natural(
        lambda x: jnp.subtract(*jnp.percentile(x, np.array([75.0, 25.0]))), NUMBERS, "l1"
    ),
    "mean without NaN": Natural(jnp.nanmean, NUMBERS, "l1"),
    "median without NaN": Natural(jnp.nanmedian, NUMBERS, "l1"),
    "NaN as 0": Natural(_absent_as_zero, WITH_NAN, "l1"),
    "trimmed mean": Natural(lambda x: jnp.sort(x)[3:-3].mean(), NUMBERS, "l1"),
    "winsorized mean": Natural(_winsorized, NUMBERS, "l1"),
    "variance": Natural(jnp.var, NUMBERS, "l1"),
    "third moment": Natural(lambda x: ((x - x.mean()) ** 3).mean(), NUMBERS, "l1"),
    "deviation from the median": Natural(
        lambda x: jnp.median(jnp.abs(x - jnp.median(x))), NUMBERS, "l1"
    ),
    "deviation from the mean": Natural(lambda x: jnp.abs(x - x.mean()).mean(), NUMBERS, "l1"),
    "Gini by ranks": Natural(_gini, NUMBERS, "l1"),
    "Gini by pairs": Natural(_gini_of_pairs, NUMBERS, "l1"),
    "geometric mean": Natural(lambda x: jnp.exp(jnp.log(x).mean()), (spec(), (0.1, 1)), "l1"),
    "harmonic mean": Natural(lambda x: 1 / (1 / x).mean(), (spec(), (0.1, 1)), "l1"),
    "root": Natural(lambda x: (x**0.5).mean(), NUMBERS, "l1"),
    "powers of 2": Natural(lambda x: (2.0**x).mean(), NUMBERS, "l1"),
    "histogram": Natural(lambda x: jnp.histogram(x, bins=10, range=(0, 1))[0], NUMBERS, "l1"),
    "bincount of digitize": Natural(
        lambda x: jnp.bincount(jnp.digitize(x, np.linspace(0, 1, 6)), length=7), NUMBERS, "l1"
    ),
    "one-hot counts": Natural(
        lambda x: jax.nn.one_hot(jnp.clip((x * 5).astype(int), 0, 4), 5).sum(0), NUMBERS, "l1"
    ),
    "distribution function": Natural(
        lambda x: (x[:, None] <= LEVELS).mean(0), NUMBERS, "linf"
    ),
    "distribution function by sorting": Natural(_ecdf_at, NUMBERS, "linf"),
    "Pearson": Natural(_pearson, ROWS, "l1"),
    "correlations": Natural(lambda x: jnp.corrcoef(x, rowvar=False), ROWS, "l2"),
    "Kendall": Natural(_kendall, ROWS, "l1"),
    "Spearman": Natural(_spearman, ROWS, "l1"),
    "moving average": Natural(
        lambda x: jnp.convolve(x, jnp.ones(5) / 5, mode="valid"), NUMBERS, "linf"
    ),
    "lag product": Natural(lambda x: (x[1:] * x[:-1]).mean(), NUMBERS, "l1"),
    "interpolation": Natural(
        lambda x: jnp.interp(x, jnp.array([0, 0.3, 1.0]), jnp.array([0, 0.5, 0.6])).mean(),
        NUMBERS, "l1",
    ),
    "AUC by pairs": Natural(_auc_of_pairs, SCORES, "l1"),
    "AUC by ranks": Natural(_auc_of_ranks, SCORES, "l1"),
    "confusion by indices": Natural(_confusion, SCORES, "l1"),
    "contingency table": Natural(
        lambda d: jnp.bincount(d["y"] * 2 + (d["s"] > 0.5), length=4), SCORES, "l1"
    ),
    "Brier score": Natural(lambda d: ((d["s"] - d["y"]) ** 2).mean(), SCORES, "l1"),
    "calibration error": Natural(_calibration_error, SCORES, "l1"),
    "precision": Natural(_precision, SCORES, "l1"),
    "segment sums": Natural(lambda d: jax.ops.segment_sum(d["v"], d["g"], 5), GROUPS, "l1"),
    "segment maxima": Natural(
        lambda d: jnp.zeros(5).at[d["g"]].max(d["v"]), GROUPS, "l1"
    ),
    "segment means": Natural(_segment_means, GROUPS, "l1"),
    "guarded segment means": Natural(_guarded_means, GROUPS, "l1"),
    "number of groups": Natural(
        lambda d: (jnp.zeros(5).at[d["g"]].add(1) > 0).sum(), GROUPS, "l1"
    ),
    "groups by set": Natural(lambda d: jnp.zeros(5).at[d["g"]].set(1).sum(), GROUPS, "l1"),
    "counts of unique": Natural(
        lambda d: jnp.unique(d["g"], size=5, return_counts=True, fill_value=9)[1], GROUPS, "l1"
    ),
    "entropy": Natural(_entropy, GROUPS, "l1"),
    "survival": Natural(_survival, TIMES, "linf"),
    "survival by logarithms": Natural(_log_survival, TIMES, "linf"),
    "means and deviations": Natural(lambda x: (x.mean(0), x.std(0)), ROWS, "l2"),
    "step of regression": Natural(
        lambda d: jax.grad(_squares)(jnp.zeros(3), d), LABELED, "l2"
    ),
    "step of logistic regression": Natural(
        lambda d: jax.grad(_logistic)(jnp.ones(3) / 2, d), LABELED, "l2"
    ),
    "logistic loss": Natural(lambda d: _logistic(jnp.ones(3) / 2, d), LABELED, "l1"),
    "step of a network": Natural(_step_of_network, LABELED, "l2"),
    "clipped gradients": Natural(_clipped_gradients, LABELED, "l2"),
    "gradients clipped by a choice": Natural(_chosen_gradients, LABELED, "l2"),
    "slope": Natural(_slope, LABELED, "l1"),
    "attention": Natural(_attention, BALL, "l2"),
    "power spectrum": Natural(lambda x: jnp.abs(jnp.fft.rfft(x)), NUMBERS, "l2"),
    "three largest": Natural(lambda x: jax.lax.top_k(x, 3)[0], NUMBERS, "l1"),
    "moving average by scan": Natural(_average, NUMBERS, "l1"),
    "step of k-means": Natural(_means_step, ROWS, "l2"),
    "step of k-means by index": Natural(_means_step_by_index, ROWS, "l2"),
    "second moments": Natural(lambda x: jnp.einsum("ni,nj->ij", x, x) / N, BALL, "l2"),
    "ridge by solve": Natural(
        lambda d: jnp.linalg.solve(d["x"].T @ d["x"] + N * jnp.eye(3), d["x"].T @ d["y"]),
        LABELED, "l2",
    ),
    "root of a choice": Natural(
        lambda x: jnp.where(x > 0.5, jnp.sqrt(jnp.maximum(x - 0.5, 0)), 0).mean(), NUMBERS, "l1"
    ),
    "mean of a kernel": Natural(_discrepancy, NUMBERS, "l1"),
    "five steps of descent": Natural(_descent, LABELED, "l2"),
    "running maximum": Natural(lambda x: jax.lax.cummax(x)[-1], NUMBERS, "l1"),
}  # fmt: skip
FARTHEST = {
    "mean": 0.0333334,
    "percentiles": 0.75,
    "quantile": 0.900002,
    "interquartile range": 0.75,
    "mean without NaN": 0.0333334,
    "median without NaN": 0.5,
    "NaN as 0": 0.0333334,
    "trimmed mean": 0.0416667,
    "winsorized mean": 0.123333,
    "variance": 0.0322222,
    "third moment": 0.0300741,
    "deviation from the median": 0.5,
    "deviation from the mean": 0.0644445,
    "Gini by ranks": 0.966667,
    "Gini by pairs": 0.128889,
    "geometric mean": 0.0738813,
    "harmonic mean": 0.230769,
    "root": 0.0333334,
    "powers of 2": 0.0333335,
    "histogram": 2,
    "bincount of digitize": 2,
    "one-hot counts": 2,
    "distribution function": 0.0333334,
    "distribution function by sorting": 0.0333334,
    "Pearson": 0.666667,
    "correlations": 4,
    "Kendall": 0.133333,
    "Spearman": 0.374194,
    "moving average": 0.2,
    "lag product": 0.0689657,
    "interpolation": 0.0200001,
    "AUC by pairs": 0.966667,
    "AUC by ranks": 0.128889,
    "confusion by indices": 2,
    "contingency table": 2,
    "Brier score": 0.0333334,
    "calibration error": 0.0599279,
    "precision": 0.1,
    "segment sums": 2,
    "segment maxima": 2,
    "segment means": 0.4,
    "guarded segment means": 2,
    "number of groups": 1,
    "groups by set": 1,
    "counts of unique": 58,
    "entropy": 0.146145,
    "survival": 1,
    "survival by logarithms": 0.9,
    "means and deviations": 0.316228,
    "step of regression": 0.133334,
    "step of logistic regression": 0.0358247,
    "logistic loss": 0.0288491,
    "step of a network": 0.64523,
    "clipped gradients": 0.0666668,
    "gradients clipped by a choice": 0.0666668,
    "slope": 1.13561,
    "attention": 0.177701,
    "power spectrum": 4,
    "three largest": 1,
    "moving average by scan": 0.1,
    "step of k-means": 2.05103,
    "step of k-means by index": 2.05103,
    "second moments": 0.0471405,
    "ridge by solve": 0.0709328,
    "root of a choice": 0.0235703,
    "mean of a kernel": 0.0407367,
    "five steps of descent": 0.0687435,
    "running maximum": 1,
}


def _bound(one: Natural, added: bool) -> float:
    records, bounds = one.records
    if not added:
        return dpjax.prove_sensitivity(one.target, records, bounds=bounds, norm=one.norm).value
    slots = PaddedRecords(records, spec(dtype=bool))
    return dpjax.prove_sensitivity(
        lambda d: one.target(d.records), slots, bounds=bounds, norm=one.norm,
        relation="add-or-remove-one",
    ).value  # fmt: skip


def run(
    programs: Mapping[str, Natural], reached: Mapping[str, float], *names: str,
    search: bool = False, added: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Prints each bound, its ratio to the farthest pair, and the seconds; returns the ratios."""
    ratios: dict[str, float] = {}
    for name, one in programs.items():
        if names and not any(part in name for part in names):
            continue
        start, said = time.perf_counter(), ""
        try:
            value = float(_bound(one, added))
        except NoProofError as refusal:
            value, said = np.inf, f"  {str(refusal)[:150]}"
        seconds = time.perf_counter() - start
        farthest = max(reached.get(name, 0.0), _farthest(one) if search else 0.0)
        ratios[name] = value / farthest
        print(f"{name:34}{value:10.5g}{farthest:12.6g}{ratios[name]:9.4g}{seconds:6.2f} s{said}")
    kept = np.array([*ratios.values()])
    shares = {most: int((kept <= most).sum()) for most in (1.05, 2, 10)}
    print(f"{len(kept)} programs, {int(np.isfinite(kept).sum())} proved; ratios up to: {shares}")
    return ratios


_ROUNDS, _KEPT = 60, 32


def _farthest(one: Natural) -> float:
    """The largest distance of two neighbors that a search finds.

    The search starts at random pairs, corners and copies of one record. Then it changes records of
    the farthest pairs, in both databases alike, and sometimes the record that differs.
    """
    specs, public = public_bounds(*one.records)
    pairs = Losses(None, [], specs, public, [], one.norm)._pairs()  # type: ignore[arg-type]
    target = jax.jit(jax.vmap(public.enforced_on(one.target)))
    order = {"l1": 1, "l2": 2, "linf": np.inf}[one.norm]
    tree = jax.tree.structure(pairs[0])

    def distances(first: list[Any], second: list[Any]) -> Any:
        values = (jax.tree.leaves(target(jax.tree.unflatten(tree, x))) for x in (first, second))
        moved = [
            np.abs(np.subtract(*map(np.float64, both))).reshape(len(both[0]), -1)
            for both in zip(*values, strict=True)
        ]
        return np.linalg.norm(np.concatenate(moved, 1), order, axis=1)

    first, second = (list(map(np.asarray, jax.tree.leaves(x))) for x in pairs)
    rng, pool, reached = np.random.default_rng(0), first, distances(first, second)
    differs = [(a != b).reshape(len(a), N, -1).any(2) for a, b in zip(first, second, strict=True)]
    place = np.logical_or.reduce(differs).argmax(1)
    for _ in range(_ROUNDS):
        parents = np.argsort(-reached)[:_KEPT][rng.integers(0, _KEPT, len(reached))]
        given = [[x[parents] for x in side] for side in (first, second)]
        made = _changed(rng, *given, pool, place[parents])
        found = np.concatenate([reached, distances(*made)])
        kept = np.argsort(-found)[: len(reached)]
        first, second = (
            [np.concatenate(both)[kept] for both in zip(*sides, strict=True)]
            for sides in ((first, made[0]), (second, made[1]))
        )
        reached, place = found[kept], np.concatenate([place, place[parents]])[kept]
    return float(reached[0])


def _changed(
    rng: np.random.Generator, first: list[Any], second: list[Any], pool: list[Any], place: Any
) -> tuple[list[Any], list[Any]]:
    """Pairs with other records: copies of their own records, records of the pool, or near ones."""
    count = len(place)
    rows, others = np.arange(count)[:, None], rng.integers(0, count, (count, 1))
    sources = rng.integers(0, N, (count, N))
    sources = np.where(rng.random((count, 1)) < 0.5, sources[:, :1], sources)
    chosen = rng.random((count, N)) < rng.choice([1, 1, 1, 4, 15], (count, 1)) / N
    own, near = rng.random((count, 1)) < 0.5, rng.random((count, 1)) < 0.2
    redrawn = rng.random((count, 1)) < 0.3
    made: tuple[list[Any], list[Any]] = [], []
    for a, b, drawn in zip(first, second, pool, strict=True):
        spread = [x.reshape(*x.shape, *[1] * (a.ndim - 2)) for x in (own, near, chosen, redrawn)]
        new = np.where(spread[0], a[rows, sources], drawn[others, sources])
        if a.dtype.kind == "f":
            moved = new + 0.1 * rng.normal(size=new.shape).astype(a.dtype)
            new = np.where(spread[1], moved, new)
        one = np.where(spread[2], new, a)
        other, at = one.copy(), place[:, None]
        other[rows, at] = np.where(spread[3], new[rows, (at + 1) % N], b[rows, at])
        made[0].append(one)
        made[1].append(other)
    return made


def main(programs: Mapping[str, Natural], reached: Mapping[str, float]) -> None:
    """Runs the programs that the command line names, or all of them."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    parts = [part for part in sys.argv[1:] if not part.startswith("--")]
    options = {"search": "--search" in sys.argv, "added": "--added" in sys.argv}
    run(programs, reached, *parts, **options)


if __name__ == "__main__":
    main(PROGRAMS, FARTHEST)
