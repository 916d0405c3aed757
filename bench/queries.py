"""Queries: a million buckets, an average of a million numbers, against diffprivlib and OpenDP."""

import importlib.util
import random
import sys
import types
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import opendp.prelude as opendp

import dpjax
from harness import Race, Row, record

RECORDS, BUCKETS, GROUPS = 10**6, 10**6, 1000
# The peers would take minutes for all buckets.
PART = 2**13
LOWER, UPPER = 0.0, 100.0


def run(rounds: int = 5) -> None:
    """Counting and adding up are in the time, on both sides."""
    opendp.enable_features("contrib")
    warnings.simplefilter("ignore")
    _histogram(rounds)
    _mean(rounds)
    _means_of_groups(rounds)


def _histogram(rounds: int) -> None:
    """Codes of a million buckets at epsilon 1, where a record is added or removed."""
    codes = np.random.default_rng(0).integers(0, BUCKETS, RECORDS).astype(np.int32)
    part, edges = codes[codes < PART], np.arange(PART + 1)
    slots, key = dpjax.queries.padded_records(codes, capacity=RECORDS), dpjax.random.seeded_key(0)
    query = dpjax.queries.histogram_query(BUCKETS)
    added = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(relation=added), epsilon=1.0))
    categories = list(range(PART))
    in_opendp = opendp.t.make_count_by_categories(
        opendp.vector_domain(opendp.atom_domain(T=int)),
        opendp.symmetric_distance(),
        categories,
        MO=opendp.L1Distance[int],
        null_category=False,
    )
    in_opendp = in_opendp >> opendp.m.make_laplace(
        in_opendp.output_domain, in_opendp.output_metric, scale=1.0
    )
    mechanism = _diffprivlib("mechanisms").GeometricTruncated(
        epsilon=1.0, sensitivity=1, lower=0, upper=sys.maxsize, random_state=random.SystemRandom()
    )
    as_list = part.tolist()

    def in_diffprivlib() -> np.ndarray:
        """As in its tools.histogram, which does not import beside a recent scikit-learn."""
        counts, _ = np.histogram(part, bins=edges)
        return np.array([mechanism.randomise(int(count)) for count in counts])

    truth = np.bincount(codes, minlength=BUCKETS)
    noises = {
        "dpjax": np.abs(np.asarray(private(key, slots).value) - truth).mean(),
        "opendp": np.abs(np.array(in_opendp(as_list)) - truth[:PART]).mean(),
    }
    # Of the discrete Laplace distribution 2 a / (1 - a^2) with a = 1 / e, of rounded noise 1.
    assert all(0.8 < noise < 1.15 for noise in noises.values()), noises
    race = Race(
        {
            "dpjax": lambda: private(key, slots).value.block_until_ready(),
            "opendp": lambda: in_opendp(as_list),
            "diffprivlib": in_diffprivlib,
        },
        rounds=rounds,
    )
    job, scaled = "histogram of 10^6 buckets, n = 10^6, epsilon = 1", BUCKETS / PART
    record(
        "histogram",
        [
            Row(
                job,
                f"{name} (2^13 buckets and their records, scaled)",
                race.seconds["dpjax"],
                race.seconds[name.lower()] * scaled,
                10,
            )
            for name in ("OpenDP", "diffprivlib")
        ],
        race=race,
        sizes={"records": RECORDS, "buckets": BUCKETS, "buckets of the peers": PART},
        results={"average noise": {name: float(noise) for name, noise in noises.items()}},
        work={"bytes": 4.0 * RECORDS + 8.0 * BUCKETS, "flops": 0.0},
    )


def _mean(rounds: int) -> None:
    """An average of clamped numbers at epsilon 1, n public."""
    x = np.random.default_rng(1).uniform(LOWER, UPPER, RECORDS)
    numbers, on_device, key = x.tolist(), jnp.asarray(x, jnp.float32), dpjax.random.seeded_key(1)
    domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False), RECORDS)
    in_opendp = (
        (domain, opendp.symmetric_distance())
        >> opendp.t.then_clamp((LOWER, UPPER))
        >> opendp.t.then_mean()
    )
    # A replaced record is one removed and one added.
    in_opendp = in_opendp >> opendp.m.then_laplace(scale=(UPPER - LOWER) / RECORDS)
    mechanism = _diffprivlib("mechanisms").LaplaceTruncated(
        epsilon=1.0,
        delta=0.0,
        sensitivity=(UPPER - LOWER) / RECORDS,
        lower=LOWER,
        upper=UPPER,
        random_state=random.SystemRandom(),
    )

    def in_dpjax() -> Any:
        return dpjax.queries.private_mean(
            key, on_device, lower=LOWER, upper=UPPER, epsilon=1.0
        ).value.block_until_ready()

    def in_diffprivlib() -> float:
        """As in its tools.mean."""
        return mechanism.randomise(float(np.mean(np.clip(x, LOWER, UPPER))))

    means = {
        "dpjax": float(in_dpjax()),
        "opendp": in_opendp(numbers),
        "diffprivlib": in_diffprivlib(),
    }
    assert all(abs(mean - x.mean()) < 0.01 for mean in means.values()), means
    race = Race(
        {"dpjax": in_dpjax, "opendp": lambda: in_opendp(numbers), "diffprivlib": in_diffprivlib},
        rounds=rounds,
    )
    job = "mean of 10^6 clamped numbers, epsilon = 1"
    record(
        "private mean",
        [
            Row(
                job,
                "OpenDP, from a list",
                race.seconds["dpjax"],
                race.seconds["opendp"],
                10,
                "tracing, its fingerprints and the checks take longer than the numbers",
            ),
            Row(
                job,
                "diffprivlib, sums in floats",
                race.seconds["dpjax"],
                race.seconds["diffprivlib"],
            ),
        ],
        race=race,
        sizes={"records": RECORDS},
        results={"means": means},
        work={"bytes": 4.0 * RECORDS, "flops": 0.0},
    )


def _means_of_groups(rounds: int) -> None:
    """Means of a thousand groups at epsilon 1; sizes of groups are private, on both sides."""
    generator, key = np.random.default_rng(2), dpjax.random.seeded_key(2)
    group = generator.integers(0, GROUPS, RECORDS).astype(np.int32)
    x = generator.uniform(LOWER, UPPER, RECORDS).astype(np.float32)
    table = {"group": jnp.asarray(group), "x": jnp.asarray(x)}
    middle, half = (LOWER + UPPER) / 2, (UPPER - LOWER) / 2
    # A replaced record moves the count and the centered sum of two groups.
    noise = _diffprivlib("mechanisms").Laplace(
        epsilon=1.0, delta=0.0, sensitivity=4.0, random_state=random.SystemRandom()
    )

    def in_dpjax() -> Any:
        return dpjax.queries.private_mean(
            key, table, lower=LOWER, upper=UPPER, epsilon=1.0, by={"group": range(GROUPS)}
        ).value.block_until_ready()

    def in_diffprivlib() -> np.ndarray:
        """Counts and sums by NumPy, and its noise for each."""
        centered = (np.clip(x, LOWER, UPPER) - middle) / half
        counts = np.bincount(group, minlength=GROUPS)
        sums = np.bincount(group, weights=centered, minlength=GROUPS)
        noisy = [[noise.randomise(float(one)) for one in column] for column in (sums, counts)]
        return middle + half * np.divide(*noisy)

    truth = np.bincount(group, weights=x) / np.bincount(group)
    off = {
        "dpjax": float(np.abs(np.asarray(in_dpjax()) - truth).max()),
        "diffprivlib": float(np.abs(in_diffprivlib() - truth).max()),
    }
    assert all(error < 5 for error in off.values()), off
    race = Race({"dpjax": in_dpjax, "diffprivlib": in_diffprivlib}, rounds=rounds)
    record(
        "means of groups",
        [
            Row(
                "means of 1,000 groups, n = 10^6, epsilon = 1",
                "NumPy and diffprivlib's noise",
                race.seconds["dpjax"],
                race.seconds["diffprivlib"],
                reason="any keys are looked up, and digits of integers are added up exactly",
            )
        ],
        race=race,
        sizes={"records": RECORDS, "groups": GROUPS},
        results={"largest error": off},
        work={"bytes": 8.0 * RECORDS, "flops": 0.0},
    )


def _diffprivlib(name: str) -> Any:
    """One of its modules without its models, which do not import beside a recent scikit-learn."""
    if "diffprivlib" not in sys.modules:
        spec = importlib.util.find_spec("diffprivlib")
        package = types.ModuleType("diffprivlib")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["diffprivlib"] = package
    return importlib.import_module(f"diffprivlib.{name}")


if __name__ == "__main__":
    run()
