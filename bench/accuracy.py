"""How far releases are off at an equal guarantee, beside OpenDP and diffprivlib.

Every library answers the same questions about the same tables, under add-or-remove-one of one row,
with the same epsilon, bounds, keys and candidates. A row compares the root mean squared error with
the best peer's, and says how often an interval of 95% held the truth. `--runs` sets the number of
releases; `--jobs` and `--tables` choose some.

A peer that asks for an epsilon that it does not keep is left out: diffprivlib's means divide by a
size that they treat as public, so its means here are its sums over its counts, and its regression
is missing (notebooks/12-table.ipynb shows why).
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import diffprivlib
import jax
import numpy as np
import opendp.prelude as dp
import pandas as pd
import polars as pl

import dpjax
import harness

EPSILONS = (0.1, 1.0, 4.0)
QUARTERS = (0.25, 0.5, 0.75)
CANDIDATES = 1001  # Of quantiles, in every library that asks for them.
FILE = harness.RESULTS / "accuracy.json"

SAME = "all libraries add the same noise, so the best of their errors is lower by chance"

Found = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""A released value, and the ends of its intervals."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A table and what is public about it.

    Attributes:
        name: for the rows.
        frame: of pandas.
        group: a column of keys, and a second one.
        keys: of both columns.
        number: a column of numbers, and a second one.
        bounds: of both.
        edges: of a histogram of the first number.
        words: a column with many keys.
        unit: what a `PrivateTable` is told of people, if neighbors differ in all rows of one.
    """

    name: str
    frame: pd.DataFrame
    group: tuple[str, str]
    number: tuple[str, str]
    bounds: dict[str, tuple[float, float]]
    edges: tuple[float, ...]
    words: str | None = None
    unit: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def most_rows(self) -> int:
        """A public bound, a tenth above the number of rows."""
        return int(len(self.frame) * 1.1)

    def keys(self, column: str) -> list[Any]:
        """The keys of a column, in order."""
        return sorted(self.frame[column].unique().tolist())


def made() -> Data:
    """20,000 rows with unequal groups, skewed numbers, and names with frequencies by Zipf."""
    rng, n = np.random.default_rng(7), 20_000
    site = rng.choice(list("ABCDE"), n, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    x = rng.uniform(0, 100, n)
    frame = {
        "site": site,
        "kind": rng.choice(["p", "q", "r", "s"], n, p=[0.5, 0.3, 0.15, 0.05]),
        "income": rng.lognormal(7.8, 0.8, n).clip(0, 20_000),
        "x": x,
        "y": (0.5 * x + rng.normal(0, 10, n)).clip(-20, 80),
        "word": rng.choice(200, n, p=(w := 1 / np.arange(1, 201)) / w.sum()),
        "place": rng.integers(0, 1000, n),
    }
    bounds = {"income": (0.0, 20_000.0), "x": (0.0, 100.0), "y": (-20.0, 80.0)}
    edges = tuple(np.linspace(0, 20_000, 21).tolist())
    return Data(
        "made, n = 20,000",
        pd.DataFrame(frame),
        ("site", "kind"),
        ("income", "y"),
        bounds,
        edges,
        "word",
    )


def diamonds() -> Data:
    """53,940 diamonds, which plotnine ships."""
    from plotnine.data import diamonds as shipped

    frame = shipped.assign(cut=shipped["cut"].astype(str), color=shipped["color"].astype(str))
    bounds = {"price": (0.0, 20_000.0), "carat": (0.0, 5.0), "depth": (40.0, 80.0)}
    edges = tuple(np.linspace(0, 19_000, 20).tolist())
    frame = frame[["cut", "color", "price", "carat", "depth"]].astype({"price": float})
    return Data("diamonds, n = 53,940", frame, ("cut", "color"), ("price", "carat"), bounds, edges)


def fair() -> Data:
    """6,366 answers about marriages, which statsmodels ships."""
    from statsmodels.datasets import fair as shipped

    table = shipped.load_pandas().data
    frame = table.rename(columns={"yrs_married": "married"})
    frame = frame.assign(rating=frame["rate_marriage"].astype(int).astype(str))
    frame = frame.assign(faith=frame["religious"].astype(int).astype(str))
    frame = frame[["rating", "faith", "age", "married"]]
    bounds = {"age": (15.0, 50.0), "married": (0.0, 30.0)}
    edges = tuple(np.linspace(15, 45, 7).tolist())
    return Data("fair, n = 6,366", frame, ("rating", "faith"), ("age", "married"), bounds, edges)


@dataclasses.dataclass(frozen=True)
class Job:
    """A question, and the answers of all libraries.

    Attributes:
        name: for the rows.
        truth: without noise.
        ours: takes a table, an epsilon and a key to a release and its intervals.
        peers: take an epsilon and a number of runs to that many values, by name.
        reason: why dpjax is further off, where it is.
    """

    name: str
    data: Data
    truth: np.ndarray
    ours: Callable[[Any, float, jax.Array], Found]
    peers: dict[str, Callable[[float, int], np.ndarray]]
    reason: str = ""


def opendp(
    data: Data,
    epsilon: float,
    runs: int,
    *,
    by: list[str],
    terms: Callable[[], list[Any]],
    made: list[Any] = [],  # noqa: B006  # Never changed.
    serialized: bool = True,
) -> pd.DataFrame:
    """As many releases as runs, each at epsilon, as columns that are called NAME_RUN.

    The groups of one query share a release. OpenDP splits its epsilon evenly among all terms.
    """
    frame = pl.LazyFrame({name: data.frame[name].to_list() for name in data.frame})
    context = dp.Context.compositor(
        data=frame,
        privacy_unit=dp.unit_of(contributions=data.unit.get("rows", 1)),
        privacy_loss=dp.loss_of(epsilon=epsilon * runs),
        split_evenly_over=1,
        margins=[
            dp.polars.Margin(
                by=by, invariant="keys", max_length=data.most_rows, max_groups=max(1, 10**4)
            )
        ],
    )
    query = context.query().with_columns(*made) if made else context.query()
    every = [
        term.alias(f"{number}_{run}") for run in range(runs) for number, term in enumerate(terms())
    ]
    query = query.group_by(*by).agg(*every) if by else query.select(*every)
    # Polars would compute equal terms once, and all runs would share their noise.
    flags = pl.QueryOptFlags(comm_subexpr_elim=False)
    release = query.release()
    table = release.lazy().collect(optimizations=flags) if serialized else release.collect()
    found = table.to_pandas()
    return found.set_index(by).sort_index() if by else found


def stacked(found: pd.DataFrame, runs: int, terms: int) -> np.ndarray:
    """Values of shape (runs, groups, terms)."""
    names = [[f"{number}_{run}" for number in range(terms)] for run in range(runs)]
    return np.stack([found[one].to_numpy(float) for one in names])


def length() -> Any:
    """The number of rows of a group."""
    return dp.len(signed=True)


def of(name: str) -> Any:
    """A column of numbers without gaps."""
    return pl.col(name).fill_nan(0.0).fill_null(0.0)


def with_interval(release: dpjax.Release) -> Found:
    """The value of a release, and its intervals."""
    low, high = release.interval(0.95)
    return np.asarray(release.value, float), np.asarray(low), np.asarray(high)


def repeated(one: Callable[[], np.ndarray], runs: int) -> np.ndarray:
    """As many values as runs."""
    return np.stack([one() for _ in range(runs)])


def counts(data: Data) -> Job:
    """Rows of each group."""
    (group, _), keys = data.group, data.keys(data.group[0])
    # diffprivlib clips a count at the length of the array: that of the whole table is public.
    parts = [data.frame[group].to_numpy() == key for key in keys]
    return Job(
        "counts by group",
        data,
        np.array([x.sum() for x in parts], float),
        lambda t, e, k: with_interval(t.count(by={group: keys}, epsilon=e, key=k)),
        {
            "OpenDP": lambda e, r: stacked(
                opendp(data, e, r, by=[group], terms=lambda: [length()]), r, 1
            )[..., 0],
            "diffprivlib": lambda e, r: repeated(
                lambda: np.array([diffprivlib.tools.count_nonzero(x, epsilon=e) for x in parts]), r
            ),
        },
        SAME,
    )


def crosstab(data: Data) -> Job:
    """Rows of each pair of keys."""
    (a, b), keys = data.group, [data.keys(x) for x in data.group]
    index = pd.MultiIndex.from_product(keys)
    true = pd.crosstab(data.frame[a], data.frame[b]).reindex(keys[0]).reindex(keys[1], axis=1)
    codes = [data.frame[x].map({key: i for i, key in enumerate(data.keys(x))}) for x in (a, b)]
    edges = [np.arange(len(x) + 1) - 0.5 for x in keys]

    def theirs(e: float, r: int) -> np.ndarray:
        found = opendp(data, e, r, by=[a, b], terms=lambda: [length()]).reindex(index)
        return stacked(found, r, 1)[..., 0].reshape(r, *map(len, keys))

    sample = np.stack([x.to_numpy() for x in codes], axis=1)

    def dpl(e: float, r: int) -> np.ndarray:
        ends = [(x[0], x[-1]) for x in edges]
        return repeated(
            lambda: diffprivlib.tools.histogramdd(sample, epsilon=e, bins=edges, range=ends)[0], r
        )

    return Job(
        "two-way table",
        data,
        true.fillna(0).to_numpy(float),
        lambda t, e, k: with_interval(
            t.crosstab([a, b], keys={a: keys[0], b: keys[1]}, epsilon=e, key=k)
        ),
        {"OpenDP": theirs, "diffprivlib": dpl},
        SAME,
    )


def histogram(data: Data) -> Job:
    """Rows of each bucket."""
    column, edges = data.number[0], list(data.edges)
    low, high = edges[0], edges[-1]
    true = np.histogram(data.frame[column], edges)[0].astype(float)

    def theirs(e: float, r: int) -> np.ndarray:
        coded = np.clip(
            np.searchsorted(edges, data.frame[column], side="right") - 1, 0, len(true) - 1
        )
        with_codes = dataclasses.replace(data, frame=data.frame.assign(bucket=coded))
        found = opendp(with_codes, e, r, by=["bucket"], terms=lambda: [length()])
        return stacked(found.reindex(range(len(true))), r, 1)[..., 0]

    numbers = data.frame[column].to_numpy()
    return Job(
        "histogram",
        data,
        true,
        lambda t, e, k: with_interval(t.histogram(column, edges, epsilon=e, key=k)),
        {
            "OpenDP": theirs,
            "diffprivlib": lambda e, r: repeated(
                lambda: diffprivlib.tools.histogram(numbers, e, edges, range=(low, high))[0], r
            ),
        },
        SAME,
    )


def sums(data: Data) -> Job:
    """The sum of a column."""
    column = data.number[0]
    ends, numbers = data.bounds[column], data.frame[column].to_numpy()
    # diffprivlib's noise is that of a replaced row. Bounds that include 0 make it that of an added
    # row.
    around = min(0.0, ends[0]), max(0.0, ends[1])
    return Job(
        "sum",
        data,
        np.asarray(numbers.sum()),
        lambda t, e, k: with_interval(t.sum(column, bounds=ends, epsilon=e, key=k)),
        {
            "OpenDP": lambda e, r: stacked(
                opendp(data, e, r, by=[], terms=lambda: [of(column).dp.sum(ends)]), r, 1
            )[:, 0, 0],
            "diffprivlib": lambda e, r: repeated(
                lambda: np.asarray(diffprivlib.tools.sum(numbers, epsilon=e, bounds=around)), r
            ),
        },
        SAME,
    )


def means(data: Data, group: str | None = None, name: str = "means by group") -> Job:
    """The mean of each group."""
    column, group = data.number[0], group or data.group[0]
    ends, keys = data.bounds[column], data.keys(group)
    parts = [data.frame[data.frame[group] == key][column].to_numpy() for key in keys]

    def theirs(e: float, r: int) -> np.ndarray:
        terms = [of(column).dp.sum(ends), length()]
        found = stacked(opendp(data, e, r, by=[group], terms=lambda: terms), r, 2)
        return np.clip(found[..., 0] / np.maximum(found[..., 1], 1), *ends)

    column_of_all, key_of_all = data.frame[column].to_numpy(), data.frame[group].to_numpy()

    def one(key: Any, e: float) -> float:
        inside = key_of_all == key
        # Rows of other groups are zeros, so that no size of a group clips a sum.
        masked = np.where(inside, column_of_all, 0.0)
        total = diffprivlib.tools.sum(masked, epsilon=e / 2, bounds=(min(0.0, ends[0]), ends[1]))
        n = diffprivlib.tools.count_nonzero(inside, epsilon=e / 2)
        return float(np.clip(total / max(n, 1), *ends))

    return Job(
        name,
        data,
        np.array([x.mean() for x in parts]),
        lambda t, e, k: with_interval(
            t.mean(column, bounds=ends, by={group: keys}, epsilon=e, key=k)
        ),
        {
            "OpenDP": theirs,
            "diffprivlib": lambda e, r: repeated(
                lambda: np.array([one(key, e) for key in keys]), r
            ),
        },
    )


_MEDIAN = (
    "half of epsilon pays for counts, which give intervals; no peer gives any, and a selection with"
    " all of epsilon has half of the error. At .1, one of OpenDP's candidates, which are 20 apart,"
    " happens to be 3.1 from the median: its error at every epsilon"
)


def quantiles(data: Data, wanted: tuple[float, ...] = QUARTERS, grouped: bool = True) -> Job:
    """Quartiles of each group, or a median."""
    column = data.number[0]
    group = data.group[0]
    ends, keys = data.bounds[column], data.keys(group)
    parts = [data.frame[data.frame[group] == key][column].to_numpy() for key in keys]
    parts = parts if grouped else [data.frame[column].to_numpy()]
    grid = np.linspace(*ends, CANDIDATES).tolist()

    def theirs(e: float, r: int) -> np.ndarray:
        # Polars cannot serialize quantiles, which `opendp` needs to compute equal terms apart. So
        # each run has a column of its own.
        copies = data.frame[[group]].assign(**{f"c{i}": data.frame[column] for i in range(r)})
        numbers = iter(range(r))

        def terms() -> list[Any]:
            number = next(numbers)
            return [of(f"c{number}").dp.quantile(p, grid) for p in wanted]

        by, apart = [group] if grouped else [], dataclasses.replace(data, frame=copies)
        found = opendp(apart, e, r, by=by, terms=terms, serialized=False)
        return stacked(found, r, len(wanted))

    def ours(t: Any, e: float, k: jax.Array) -> Found:
        by = {group: keys} if grouped else None
        found = t.quantiles(column, list(wanted), bounds=ends, by=by, epsilon=e, key=k)
        return tuple(np.reshape(x, (len(parts), len(wanted))) for x in with_interval(found))

    def one(x: np.ndarray, p: float, e: float) -> float:
        return float(diffprivlib.tools.quantile(x, p, epsilon=e / len(wanted), bounds=ends))

    return Job(
        f"quantiles .25, .5, .75{' by group' if grouped else ''}" if len(wanted) > 1 else "median",
        data,
        np.array([np.quantile(x, wanted) for x in parts]),
        ours,
        {
            "OpenDP": theirs,
            "diffprivlib": lambda e, r: repeated(
                lambda: np.array([[one(x, p, e) for p in wanted] for x in parts]), r
            ),
        },
        "" if grouped else _MEDIAN,
    )


def top_ten(data: Data) -> Job:
    """The most frequent of many keys: how many of the true ten are missed."""
    column = data.words
    assert column is not None
    keys = data.keys(column)
    sizes = data.frame[column].value_counts().reindex(keys).to_numpy()
    best = set(np.array(keys)[np.argsort(-sizes)[:10]].tolist())

    def missed(names: Any) -> np.ndarray:
        return np.asarray(10.0 - len(best & set(np.asarray(names).tolist())))

    def by_counts(found: np.ndarray) -> np.ndarray:
        return np.stack([missed(np.array(keys)[np.argsort(-row)[:10]]) for row in found])

    def theirs(e: float, r: int) -> np.ndarray:
        found = opendp(data, e, r, by=[column], terms=lambda: [length()]).reindex(keys)
        return by_counts(stacked(found, r, 1)[..., 0])

    edges = np.arange(len(keys) + 1) - 0.5
    codes = data.frame[column].to_numpy()

    def dpl(e: float, r: int) -> np.ndarray:
        ends = (edges[0], edges[-1])
        one = lambda: diffprivlib.tools.histogram(codes, e, edges, range=ends)[0]  # noqa: E731
        return by_counts(repeated(one, r))

    def ours(t: Any, e: float, k: jax.Array) -> Found:
        names = t.top(column, 10, keys=keys, epsilon=e, key=k).to_frame().iloc[:, -1]
        return missed(names), None, None

    return Job(
        "top ten of 200, missed",
        data,
        np.asarray(0.0),
        ours,
        {"OpenDP": theirs, "diffprivlib": dpl},
        SAME,
    )


def _moments(
    data: Data, columns: tuple[str, ...]
) -> Callable[[float, int], tuple[np.ndarray, ...]]:
    """Averages and covariances of some columns by sums of OpenDP, in units of their bounds."""
    halves = [(data.bounds[name][1] - data.bounds[name][0]) / 2 for name in columns]
    unit = [
        (pl.col(name) - data.bounds[name][0] - half) / half
        for name, half in zip(columns, halves, strict=True)
    ]
    pairs = list(itertools.combinations_with_replacement(range(len(columns)), 2))
    every = [*unit, *(unit[i] * unit[j] for i, j in pairs)]
    ends = [(-1.0, 1.0)] * len(columns) + [(0.0 if i == j else -1.0, 1.0) for i, j in pairs]
    made = [x.alias(f"m{i}") for i, x in enumerate(every)]

    def theirs(e: float, r: int) -> tuple[np.ndarray, ...]:
        def terms() -> list[Any]:
            return [of(f"m{i}").dp.sum(end) for i, end in enumerate(ends)] + [length()]

        number = len(ends) + 1
        found = stacked(opendp(data, e, r, by=[], terms=terms, made=made), r, number)[:, 0]
        found = found[:, :-1] / np.maximum(found[:, -1:], 1)
        mean, second = found[:, : len(columns)], np.zeros((r, len(columns), len(columns)))
        for (i, j), one in zip(pairs, found[:, len(columns) :].T, strict=True):
            second[:, i, j] = second[:, j, i] = one
        return mean, second - mean[:, :, None] * mean[:, None, :]

    return theirs


def variance(data: Data) -> Job:
    """The variance of a column, by sums of x and x^2 in units of its bounds, and counts."""
    column = data.number[0]
    ends, numbers = data.bounds[column], data.frame[column].to_numpy()
    theirs, half = _moments(data, (column,)), (ends[1] - ends[0]) / 2
    unit = (numbers - ends[0] - half) / half

    def of_sums(e: float) -> np.ndarray:
        parts = ((unit, (-1, 1)), (unit**2, (0, 1)), (np.ones_like(unit), (0, 1)))
        one, two, n = (diffprivlib.tools.sum(x, epsilon=e / 3, bounds=b) for x, b in parts)
        n = max(n, 1)
        return np.clip(two / n - (one / n) ** 2, 0, 1) * half**2

    def ours(t: Any, e: float, k: jax.Array) -> Found:
        release = t.variance(column, bounds=ends, epsilon=e, key=k)
        low, high = release.interval(0.95)
        return tuple(np.asarray(x["variance"], float) for x in (release.value, low, high))

    return Job(
        "variance",
        data,
        np.asarray(numbers.var()),
        ours,
        {
            "OpenDP, three sums": lambda e, r: np.clip(theirs(e, r)[1][:, 0, 0], 0, 1) * half**2,
            "diffprivlib, three sums": lambda e, r: repeated(lambda: of_sums(e), r),
        },
    )


def correlation(data: Data) -> Job:
    """The correlation of two columns."""
    a, b = data.number
    theirs = _moments(data, data.number)

    def of_moments(e: float, r: int) -> np.ndarray:
        _, found = theirs(e, r)
        variances = np.maximum(found[:, 0, 0] * found[:, 1, 1], 1e-9)
        return np.clip(found[:, 0, 1] / np.sqrt(variances), -1, 1)

    return Job(
        "correlation",
        data,
        np.asarray(np.corrcoef(data.frame[a], data.frame[b])[0, 1]),
        lambda t, e, k: with_interval(t.correlation(a, b, bounds=data.bounds, epsilon=e, key=k)),
        {"OpenDP, six sums": of_moments},
    )


def regression(data: Data, more: tuple[str, ...] = ()) -> Job:
    """A line, judged a standard deviation on both sides of the middle of each x."""
    y, *x = (*data.number, *more)
    theirs = _moments(data, (y, *x))
    numbers = data.frame[x].to_numpy(float)
    sides = np.array(list(itertools.product([-1, 1], repeat=len(x))))
    at = numbers.mean(axis=0) + sides * numbers.std(axis=0)
    ones = np.ones((len(numbers), 1))
    level, *slopes = np.linalg.lstsq(np.c_[ones, numbers], data.frame[y], rcond=None)[0]
    low, high = np.array([data.bounds[name] for name in (y, *x)]).T
    middle, half = (low + high) / 2, (high - low) / 2

    def of_moments(e: float, r: int) -> np.ndarray:
        mean, found = theirs(e, r)
        values, axes = np.linalg.eigh(found[:, 1:, 1:])
        # The least variance that noise leaves.
        inverse = axes / np.maximum(values, 1e-3)[:, None, :] @ np.swapaxes(axes, 1, 2)
        weights = np.einsum("rij,rj->ri", inverse, found[:, 1:, 0])
        apart = (at - middle[1:]) / half[1:] - mean[:, None, 1:]
        line = mean[:, :1] + np.einsum("rpi,ri->rp", apart, weights)
        return middle[0] + half[0] * np.clip(line, -1, 1)

    def ours(t: Any, e: float, k: jax.Array) -> Found:
        found = t.regression(y, x, bounds=data.bounds, epsilon=e, key=k).value
        line = found["intercept"] + at @ np.asarray(found["weights"])
        return np.clip(line, low[0], high[0]), None, None

    return Job(
        f"regression on {len(x)} columns" if more else "regression",
        data,
        level + at @ slopes,
        ours,
        {f"OpenDP, {'nine' if more else 'six'} sums": of_moments},
    )


def missing(data: Data) -> Job:
    """A mean of those who answered, where a tenth did not."""
    column = data.number[0]
    ends = data.bounds[column]
    gone = np.random.default_rng(1).random(len(data.frame)) < 0.1
    frame = data.frame.assign(**{column: data.frame[column].mask(gone)})
    data = dataclasses.replace(data, frame=frame)

    def theirs(e: float, r: int) -> np.ndarray:
        answered = dataclasses.replace(data, frame=frame[~gone])
        terms = [of(column).dp.sum(ends), length()]
        found = stacked(opendp(answered, e, r, by=[], terms=lambda: terms), r, 2)[:, 0]
        return found[:, 0] / found[:, 1]

    return Job(
        "mean with missing values",
        data,
        np.asarray(frame[column].mean()),
        lambda t, e, k: with_interval(t.mean(column, bounds=ends, epsilon=e, key=k)),
        {"OpenDP, after a filter": theirs},
    )


def people() -> Data:
    """5,000 people with one to four visits each, and the cost of each visit."""
    rng, n = np.random.default_rng(8), 5000
    person = np.repeat(np.arange(n), rng.integers(1, 5, n))
    cost = rng.lognormal(5, 0.7, len(person)).clip(0, 2000)
    ward = rng.choice(list("ABC"), len(person), p=[0.6, 0.3, 0.1])
    frame = pd.DataFrame({"person": person, "ward": ward, "cost": cost})
    return Data(
        f"made, {n:,} people",
        frame,
        ("ward", "ward"),
        ("cost", "cost"),
        {"cost": (0.0, 2000.0)},
        (),
        unit={"person": "person", "rows": 4},
    )


def of_people(job: Job, words: str) -> Job:
    """A job about people; diffprivlib knows records alone."""
    peers = {name: peer for name, peer in job.peers.items() if name == "OpenDP"}
    return dataclasses.replace(job, name=f"{job.name}, {words}", peers=peers)


def unknown_range(data: Data) -> Job:
    """A mean, where dpjax has to find the range and the peer is told."""
    column = data.number[0]
    ends = data.bounds[column]

    def theirs(e: float, r: int) -> np.ndarray:
        terms = [of(column).dp.sum(ends), length()]
        found = stacked(opendp(data, e, r, by=[], terms=lambda: terms), r, 2)[:, 0]
        return found[:, 0] / found[:, 1]

    return Job(
        "mean with unknown range",
        data,
        np.asarray(data.frame[column].mean()),
        lambda t, e, k: with_interval(t.mean(column, bounds=None, epsilon=e, key=k)),
        {"OpenDP, told the range": theirs},
        "a quarter of epsilon finds the range, which ends at a power of two, 32,768; the peer is"
        " told 20,000. At .1 it ends at 16,384, below 174 rows; intervals are of clipped numbers",
    )


def jobs() -> list[Job]:
    """The usual jobs on three tables, and what real tables have besides."""
    first = made()
    usual = (counts, crosstab, histogram, sums, means, variance, quantiles, correlation, regression)
    several = [job(data) for data in (first, diamonds(), fair()) for job in usual]
    pair, of_pairs = dataclasses.replace(first, number=("y", "x")), ("correlation", "regression")
    return [
        *(job for job in several if job.data is not first or job.name not in of_pairs),
        correlation(pair),
        regression(pair),
        regression(diamonds(), ("depth",)),
        top_ten(first),
        quantiles(first, (0.5,), grouped=False),
        missing(first),
        unknown_range(first),
        of_people(counts(people()), "of people with 4 rows"),
        of_people(means(people()), "of people with 4 rows"),
        means(first, "place", "means of 1,000 groups"),
    ]


def measured(job: Job, runs: int) -> dict[str, Any]:
    """Errors and coverage of one job at every epsilon."""
    table = dpjax.PrivateTable(job.data.frame, most_rows=job.data.most_rows, **job.data.unit)
    row: dict[str, Any] = {"job": job.name, "table": job.data.name, "reason": job.reason}
    row["at"] = {}
    for epsilon in EPSILONS:
        # With one seed for all rows, chance would make all of them better or worse.
        seed = zlib.crc32(f"{job.name}, {job.data.name}, {epsilon}".encode())
        keys = jax.random.split(dpjax.random.seeded_key(seed), runs)
        found = [job.ours(table, epsilon, key) for key in keys]
        ours = rmse(np.stack([value for value, _, _ in found]), job.truth)
        ends = [(low, high) for _, low, high in found if low is not None and high is not None]
        held = [(low <= job.truth) & (job.truth <= high) for low, high in ends]
        # The least half-width that would cover, for these releases, is a quantile of their errors.
        errors = np.abs(np.stack([value for value, _, _ in found]) - job.truth)
        widths = [(high - low) / 2 for low, high in ends]
        best = np.quantile(errors, 0.95, axis=0, method="higher")
        wide = np.mean(widths, axis=0) / np.maximum(best, 1e-9) if ends else None
        peers = {name: rmse(peer(epsilon, runs), job.truth) for name, peer in job.peers.items()}
        row["at"][str(epsilon)] = {
            "ours": ours,
            "peers": peers,
            "covered": float(np.mean(held)) if held else None,
            "width": float(np.median(wide)) if wide is not None and np.min(best) > 0 else None,
        }
        print(job.name, job.data.name, epsilon, f"{ours:.3g}", peers, row["at"], flush=True)
    return row


def rmse(values: np.ndarray, truth: np.ndarray) -> float:
    """The root of the mean squared distance from the truth."""
    return float(np.sqrt(np.mean((values - truth) ** 2)))


def is_asked(name: str, words: list[str] | None) -> bool:
    """Whether one of the words is in a name; no words ask for all."""
    return words is None or any(word in name for word in words)


def main() -> None:
    """Measures all jobs, or those named, and keeps the others as they were measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", nargs="*", default=None)
    parser.add_argument("--tables", nargs="*", default=None)
    asked = parser.parse_args()
    dp.enable_features("contrib", "honest-but-curious")
    warnings.simplefilter("ignore")
    kept = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    rows = {(row["job"], row["table"]): row for row in kept}
    for job in jobs():
        if (kept_row := rows.get((job.name, job.data.name))) is not None:
            kept_row["reason"] = job.reason
        if is_asked(job.name, asked.jobs) and is_asked(job.data.name, asked.tables):
            try:
                found = measured(job, asked.runs)
            except AttributeError as error:
                print(f"{job.name}: {error}")
                continue
            rows[job.name, job.data.name] = found | {"runs": asked.runs}
            write([*rows.values()])
    write([*rows.values()])


def write(rows: list[dict[str, Any]]) -> None:
    """Writes what was measured, and when."""
    FILE.parent.mkdir(exist_ok=True)
    about = {"date": datetime.date.today().isoformat(), "rows": rows}
    FILE.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
