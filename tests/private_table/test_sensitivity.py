"""Every statistic on all neighbors of small tables moves by no more than its noise is made for."""

import itertools

import numpy as np
import pytest

import dpjax

REPLACE, ADD = dpjax.NeighboringRelation
# So large that the noise is far below what one row moves.
EPSILON = 1e6
SLOTS = 4
G, H = ["a", "b"], [0, 1]
BASE = [(5.0, "a", 1)]
# Clipped at both ends, missing, without a group, with a key that is not asked for.
ROWS = [
    (10.0, "a", 0),
    (0.0, "b", 1),
    (np.nan, "a", 1),
    (99.0, "b", 0),
    (10.0, None, 1),
    (-5.0, "z", 2),
]


def is_large(row):
    return row["x"] > 1


STATISTICS = {
    "count": lambda t, **a: t.count(**a),
    "count where": lambda t, **a: t.count(where=is_large, **a),
    "count of a text": lambda t, **a: t.count(where=lambda row: row["g"] != "a", **a),
    "count by": lambda t, **a: t.count(by={"g": G}, **a),
    "count by one key": lambda t, **a: t.count(by={"g": G[:1]}, **a),
    "crosstab": lambda t, **a: t.crosstab(["g", "h"], keys={"g": G, "h": H}, **a),
    "histogram": lambda t, **a: t.histogram("x", [0, 5, 10], **a),
    "histogram by": lambda t, **a: t.histogram("x", [0, 5, 10], by={"g": G}, **a),
    "sum": lambda t, **a: t.sum("x", bounds=(-2, 10), **a),
    "sum by": lambda t, **a: t.sum("x", bounds=(-2, 10), by={"g": G}, where=is_large, **a),
    "mean": lambda t, **a: t.mean("x", bounds=(0, 10), **a),
    "mean by": lambda t, **a: t.mean("x", bounds=(0, 10), by={"g": G, "h": H}, **a),
    "variance": lambda t, **a: t.variance("x", bounds=(0, 10), **a),
    "variance by": lambda t, **a: t.variance("x", bounds=(0, 10), by={"g": G}, **a),
}
# The share of the sensitivity that these rows attain; clipped sums need rows at both ends.
ATTAINED = {"variance": 0.5, "variance by": 0.5}


def table(rows, relation, missing):
    x, g, h = zip(*rows, strict=True) if rows else ((), (), ())
    frame = {
        "x": np.array(x, float),
        "g": np.array(g, object),
        "h": np.array(h, np.int64),
    }
    return dpjax.PrivateTable(frame, most_rows=SLOTS, relation=relation, missing=missing)


def sums_and_reach(release):
    """The numbers that got noise, in units of its scale, and the sensitivity in these units."""
    measured, facts = release.accuracy.measured, release.accuracy.facts
    numbers = release.value if measured is None else measured["sums"]
    scale = facts["arrays"][0]["scale"]
    assert facts["noise"] == "laplace"
    return np.asarray(numbers, float).ravel() / scale, EPSILON


@pytest.mark.parametrize("missing", ["drop", "lower"])
@pytest.mark.parametrize("relation", [ADD, REPLACE], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_no_neighbor_moves_further_than_the_noise_covers(name, relation, missing):
    found = []
    for added in [[], *([row] for row in ROWS)]:
        key = dpjax.random.seeded_key(len(found))
        asked = table([*BASE, *added], relation, missing)
        release = STATISTICS[name](asked, epsilon=EPSILON, key=key)
        numbers, reach = sums_and_reach(release)
        found.append(numbers)
    pairs = [(found[0], x) for x in found[1:]]
    if relation is REPLACE:
        pairs = itertools.combinations(found[1:], 2)
    moved = max(np.abs(x - y).sum() for x, y in pairs)
    # Noise is below 50 scales everywhere, except with a probability below 1e-18.
    assert moved <= reach + 100 * len(found[0])
    assert moved >= ATTAINED.get(name, 0.95) * reach
