"""The search for names against a count of them, and its guarantee on neighboring databases."""

import itertools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import names
import numpy as np
import pytest

import dpjax
from dpjax._core._pytree import TreeSpec
from dpjax._core._values import NeighboringRelation
from dpjax.queries import name_search
from dpjax.release import _draw
from dpjax.release._draw import draw_of
from dpjax.targets import encode_text

PEOPLE = ["mary"] * 9 + ["mark"] * 6 + ["mar"] * 5 + ["zoe"] * 3 + ["maryann"] * 4 + [""] * 7
NOBODY, SLOTS = 255, 40
SMALL = {"width": 4, "capacity": 3}


def padded(codes):
    rows = np.full((SLOTS, 4), NOBODY, "uint8")
    rows[: len(codes)] = codes
    return rows


def search_without_noise(codes, *, threshold):
    """Noise of scale 8 / 10^4, which is rounded to 0."""
    search = name_search(1e4, threshold=threshold, **SMALL)
    return search, np.asarray(search(dpjax.random.seeded_key(0), padded(codes)).value)


def test_names_are_counted():
    search, counts = search_without_noise(encode_text(PEOPLE, width=4), threshold=4)
    # What is longer than the width is cut off.
    assert search.names(counts) == {"mary": 13, "": 7, "mark": 6, "mar": 5}
    assert list(search.names(counts)) == ["mary", "", "mark", "mar"]
    assert not search.cut_off(counts)
    assert counts.shape == (4, 3, 27)
    # m, and what ends at once; of m nothing but ma; and so on.
    asked = np.sum(counts[:, :, 0] > np.iinfo(np.int32).min, axis=1)
    assert asked.tolist() == [1, 1, 1, 1]


def test_the_most_frequent_prefixes_go_on():
    people = [letter for i, letter in enumerate("abcde") for _ in range(3 + i)]
    search, counts = search_without_noise(encode_text(people, width=4), threshold=2)
    assert search.cut_off(counts)
    assert search.names(counts) == {"e": 7, "d": 6, "c": 5}
    search, counts = search_without_noise(encode_text(people, width=4), threshold=5)
    assert not search.cut_off(counts)


def test_codes_out_of_range_are_nobodys():
    codes = encode_text(["mary", "mary", "mark", "b"], width=4)
    strange = np.concatenate([codes, [[100, 1, 1, 1], [13, 27, 0, 0]]]).astype("uint8")
    search, counts = search_without_noise(strange, threshold=1)
    assert search.names(counts) == {"mary": 2, "mark": 1, "b": 1}
    ends = jnp.array([[-(2**31), 26], [27, 2**31 - 1]])
    assert name_search(1.0, threshold=1, **SMALL).clamped(ends).tolist() == [[0, 26], [27, 27]]


# The guarantee.

MOST = encode_text(["abcd", "badc"] * 19, width=4)
ONE, ANOTHER = encode_text(["abcd", "badc"], width=4)


@jax.jit
def _log_probs(search, outputs, databases):
    of_database = jax.vmap(search.log_prob, in_axes=(0, None))
    return jax.vmap(of_database, in_axes=(None, 0))(outputs, databases)


def largest_loss(search, here, there):
    """Of 64 releases, where the last person is one or the other."""
    databases = np.array([padded([*MOST, row]) for row in (here, there)])
    keys = jax.random.split(dpjax.random.seeded_key(3), 64)
    outputs = np.array([search(key, databases[0]).value for key in keys])
    log_probs = np.asarray(_log_probs(search, outputs, databases))
    assert np.all(np.isfinite(log_probs))
    return np.abs(log_probs[1] - log_probs[0]).max()


def test_no_name_loses_more_than_epsilon():
    """Two counts of each of four levels move: by chance, nearly all of them tell the same."""
    search = name_search(8.0, threshold=1, **SMALL)
    assert 0.7 * 8 < largest_loss(search, ONE, ANOTHER) <= 8 * (1 + 1e-4)


@pytest.mark.slow
def test_nobody_who_is_removed_loses_more_than_epsilon():
    search = name_search(8.0, threshold=1, relation=NeighboringRelation.ADD_OR_REMOVE_ONE, **SMALL)
    assert search.guarantee.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert 0.7 * 8 < largest_loss(search, ONE, [NOBODY] * 4) <= 8 * (1 + 1e-4)
    assert largest_loss(search, ONE, ANOTHER) > 8 * 1.2  # Replacing is more than removing.


@pytest.mark.parametrize(
    ("relation", "moved"),
    [(NeighboringRelation.REPLACE_ONE, 2), (NeighboringRelation.ADD_OR_REMOVE_ONE, 1)],
)
def test_noise_is_drawn_at_the_scale_of_the_relation(relation, moved, monkeypatch):
    """What is drawn from is not the mechanism itself: it lacks what decides nothing."""
    search = name_search(1.0, threshold=1, relation=relation, **SMALL)
    structures, compiled = [], _draw._compiled
    monkeypatch.setattr(_draw, "_compiled", lambda x: structures.append(x) or compiled(x))
    draw = draw_of(search, TreeSpec.of(padded(encode_text(PEOPLE, width=4))))
    drawn_from = jax.tree.unflatten(*structures, draw.numbers)
    assert drawn_from._level().scale == search._level().scale == moved * 4


def test_the_error_covers_every_level():
    search = name_search(2.0, threshold=1, **SMALL)
    every, counts = search.error(confidence=0.9, simultaneous=True), 4 * 3 * 27
    tail = -np.log(1 - 0.9 ** (1 / counts))
    assert every == pytest.approx(2 * 4 / 2.0 * tail + 0.5, abs=1)
    assert search.zcdp == (pytest.approx(2.0**2 / 8), 0.0)


def test_what_is_no_name_is_refused():
    search, key = name_search(1.0, threshold=1, **SMALL), dpjax.random.seeded_key(0)
    with pytest.raises(ValueError, match=r"codes of names, shape \(n, 4\)"):
        search(key, jnp.zeros((3, 2), int))
    with pytest.raises(TypeError, match="integer codes, got dtype float32"):
        search(key, jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"epsilon=.* is too small"):
        name_search(1e-13, threshold=1, **SMALL)(key, jnp.zeros((3, 4), int))
    for wrong in ({"width": 0}, {"threshold": 0}, {"capacity": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an integer"):
            name_search(1.0, **{"threshold": 1} | SMALL | wrong)


@pytest.fixture(scope="module")
def census():
    """A million people with the first names of the US Census of 1990."""
    folder = Path(names.__path__[0])
    rows = [
        row.split()
        for kind in ("male", "female")
        for row in (folder / f"dist.{kind}.first").read_text().splitlines()
    ]
    shares = np.array([float(row[1]) for row in rows])
    drawn = np.random.default_rng(0).choice(len(rows), 10**6, p=shares / shares.sum())
    return [row[0].lower() for row in rows], drawn


@pytest.mark.slow
def test_names_of_a_census_are_found_as_stated(census):
    listed, drawn = census
    search = name_search(1.0, width=12, threshold=600, capacity=512)
    codes = encode_text(listed, width=12)[drawn]
    release = search(dpjax.random.seeded_key(9), codes)
    error = search.error(confidence=1 - 1e-6, simultaneous=True)
    truth = Counter(np.take(listed, drawn).tolist())
    found = search.names(release.value)
    assert not search.cut_off(release.value)
    assert {name for name, count in truth.items() if count >= 600 + error} <= set(found)
    assert all(abs(count - truth[name]) <= error for name, count in found.items())
    assert all(truth[name] >= 600 - error for name in found)
    assert len(found) > 200


@pytest.mark.slow
def test_the_top_of_a_census(census):
    """The ten most frequent names of a list, by the race."""
    listed, drawn = census
    counts = np.bincount(drawn, minlength=len(listed)).astype("int32")
    mechanism = dpjax.queries.top_k(1.0, epsilon=1.0, k=10)
    selected = mechanism(dpjax.random.seeded_key(9), counts).value
    gap = mechanism.score_gap(confidence=1 - 1e-6, like=counts, simultaneous=True)
    assert gap < 700 < np.sort(counts)[-10]
    assert np.all(counts[np.asarray(selected)] >= np.sort(counts)[-10] - gap)
    assert len(set(itertools.chain(selected.tolist()))) == 10
