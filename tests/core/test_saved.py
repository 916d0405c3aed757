"""Releases outlive the program: as JSON, pickles and copies, with guarantees that are checked."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Guarantee, NeighboringRelation, Release, SampledEvent
from dpjax._core._release import _digest
from tables import for_each

KEY = dpjax.random.seeded_key(0)
SAMPLED = Guarantee(
    0.1 + 0.2,
    1e-6,
    0.05,
    0.99,
    (SampledEvent(0.03, 0.99, "a"), SampledEvent(0.02, 1.0, "b")),
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    ("seeded key",),
    3,
)
VALUES = {
    "numbers": 0.1 + 0.2,
    "nothing": None,
    "odd floats": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, 1e308]),
    "floats of JAX": jnp.array([1 / 3, jnp.nan], jnp.float32),
    "short floats": jnp.array([1 / 3, -0.0], jnp.bfloat16),
    "integers": np.array([2**63 - 1, -(2**63)]),
    "bits": {"a": jnp.array([[True], [False]]), "b": [np.uint64(2**64 - 1), (jnp.int8(-1),)]},
    "no numbers": jnp.zeros((0, 3)),
}


def through_json(release):
    return Release.from_dict(json.loads(json.dumps(release.to_dict(), allow_nan=False)))


WAYS = {
    "JSON": through_json,
    "pickle": lambda release: pickle.loads(pickle.dumps(release)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@for_each("name", VALUES)
def test_every_bit_survives(way, name):
    release = Release(VALUES[name], SAMPLED)
    again = WAYS[way](release)
    assert jax.tree.structure(again.value) == jax.tree.structure(release.value)
    for one, other in zip(*map(jax.tree.leaves, (again.value, release.value)), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.array_equal(
            one.view(np.uint8) if one.ndim else one, other.view(np.uint8) if other.ndim else other
        )
    for field in ("epsilon", "delta", "gamma", "confidence", "relation", "notes", "group_size"):
        assert getattr(again.guarantee, field) == getattr(SAMPLED, field)
    assert [vars(event) for event in again.guarantee.events] == [vars(e) for e in SAMPLED.events]


@pytest.mark.parametrize("way", WAYS)
def test_intervals_survive(way):
    query = dpjax.queries.sum_query(lower=0, upper=24, capacity=100)
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), 1.0))
    release = private(KEY, jnp.full(100, 7.5))
    again = WAYS[way](release)
    assert repr(again) == repr(release)
    assert again.interval(confidence=0.7) == release.interval(confidence=0.7)


@pytest.mark.parametrize("way", WAYS)
def test_keys_of_groups_survive(way):
    """Texts were refused. A text may also be the name of a number that JSON lacks."""
    for keys in (("NaN",), ("", "Bonn", "\ud800", "Ulm\0")):
        assert WAYS[way](Release(keys, SAMPLED)).value == keys
    found = dpjax.queries.group_keys(KEY, np.repeat(["a", "b"], 99), epsilon=1.0, delta=1e-6)
    assert WAYS[way](found).value == ("a", "b")


def test_samplings_compose_after_json_as_before():
    """One that two releases share counts once; a gamma without a sampling adds to itself."""
    one, other = (Guarantee(1.0, 0, 0.1, 0.9, (SampledEvent(0.1, 0.9, x),)) for x in "ab")
    for pair in ((one, one), (one, other), (other, Guarantee(1.0, gamma=0.1, confidence=0.9))):
        again = [through_json(Release(0.0, x)).guarantee for x in pair]
        expected = dpjax.accounting.compose(*pair)
        for mixed in (again, (again[0], pair[1])):
            found = dpjax.accounting.compose(*mixed)
            assert (found.gamma, found.confidence) == (expected.gamma, expected.confidence)


def test_a_saved_release_says_what_it_is():
    saved = dpjax.laplace(0.5, 1.0)(KEY, 50.0).to_dict()
    assert saved["dpjax"] == dpjax.__version__
    assert saved["accuracy"]["public"]["mechanism"] == "AdditiveMechanism"
    low, high = saved["interval"]["low"]["data"][0], saved["interval"]["high"]["data"][0]
    assert saved["interval"]["confidence"] == 0.95
    assert high - low == pytest.approx(2 * 0.5 * np.log(20), rel=1e-4)


SAVED = Release(0.5, SAMPLED).to_dict()


def forged(**parts):
    """A dict of a forger who knows the digest."""
    changed = {**{k: v for k, v in SAVED.items() if k != "sha256"}, **parts}
    return {**changed, "sha256": _digest(changed)}


def guarantee(**numbers):
    return {"guarantee": {**SAVED["guarantee"], **numbers}}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({**SAVED, "value": 0.6}, "must be unchanged since Release.to_dict made it"),
        ({k: v for k, v in SAVED.items() if k != "guarantee"}, "its sha256 does not match"),
        (forged(more=1), "must be unchanged since Release.to_dict made it"),
        ({**SAVED, "format": 9, "dpjax": "9.9"}, "format 9 by dpjax '9.9'.*install the version"),
        (None, "must be a dict that Release.to_dict returned, got None"),
        (forged(**guarantee(epsilon=-1.0)), "epsilon must be a number, 0 or above, got -1"),
        (forged(**guarantee(epsilon="NaN")), "epsilon must be a number, 0 or above, got nan"),
        (forged(**guarantee(epsilon=None)), "epsilon must be a number"),
        (forged(**guarantee(delta=2.0)), "delta must be a number from 0 to 1, got 2"),
        (
            forged(**guarantee(gamma=0.01)),
            "gamma of a guarantee must be at least the gamma of each of its events",
        ),
        (forged(**guarantee(confidence=1.0)), "at most the confidence of each of its events"),
        (forged(**guarantee(relation="friends")), "friends"),
        (forged(**guarantee(group_size=0)), "group_size must be an integer of at least 1"),
        (forged(guarantee={}), "saved does not contain a release: 'epsilon'"),
        (forged(value={"dtype": "object", "shape": [], "data": [1]}), "must contain real numbers"),
        (forged(value={"dtype": "int8", "shape": [1], "data": [300]}), "not contain a release"),
        (forged(value={"dtype": "int8", "shape": [2], "data": [3]}), "does not contain a release"),
        (forged(value={"set": []}), "does not contain a release"),
        (
            forged(accuracy={"kind": "magic", "public": {}, "measured": None}),
            "known kind, got 'magic'",
        ),
    ],
)
def test_forged_and_newer_dicts_are_refused(saved, message):
    with pytest.raises(ValueError, match=message):
        Release.from_dict(saved)


def test_a_value_that_json_cannot_hold_is_refused():
    for value in (dpjax.BernsteinPolynomial(jnp.ones(3)), {1: 2.0}, b"text", jax.random.key(0)):
        with pytest.raises(TypeError, match="value must"):
            Release(value, SAMPLED).to_dict()
    batch = jax.vmap(lambda key: dpjax.laplace(1.0, 1.0)(key, 0.0))(jax.random.split(KEY, 2))
    with pytest.raises(ValueError, match="must be one number, got shape"):
        jax.vmap(lambda e, k: dpjax.laplace(1.0, e)(k, 0.0))(
            jnp.ones(2), jax.random.split(KEY, 2)
        ).to_dict()
    assert through_json(jax.tree.map(lambda x: x[0], batch)).guarantee.epsilon == 1
    with pytest.raises(TypeError, match="to_dict runs on the host"):
        jax.jit(lambda x: Release(x, SAMPLED).to_dict())(1.0)
