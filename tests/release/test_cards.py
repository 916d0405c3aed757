"""Model cards: the guarantee in words, what it does not promise, the risk, and how it trained."""

import json
import math

import jax.numpy as jnp
import optax
import pytest

import dpjax
from dpjax import learning

ADD = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE


def rounded_up(share):
    return f"{math.ceil(1000 * share) / 10:.1f}%"


def test_a_training_has_a_card_with_its_facts_and_its_risk(keys):
    """Numbers in the card are those of dp_sgd_risk, rounded up to .1%; JSON keeps them all."""
    settings = {"epochs": 2, "batch_size": 16, "noise_multiplier": 3.0, "delta": 1e-5}
    release = learning.fit(
        keys(1),
        lambda w, x: jnp.dot(w, x),
        jnp.zeros(3),
        database=jnp.ones((64, 3)),
        optimizer=optax.sgd(0.1),
        clip_norm=0.5,
        **settings,
    )
    facts = release.training
    assert (facts.steps, facts.batch_size, facts.slots, facts.rate) == (8, 16.0, 64, 0.25)
    assert (facts.clip_norm, facts.noise_multiplier, facts.parameters) == (("0.5",), 3.0, 3)
    assert (facts.sampling, facts.groups, facts.strategy) == ("poisson", 1, 1)
    assert dict(facts.versions)["dpjax"] == dpjax.__version__
    sampling = learning.poisson_sampling(64, batch_size=16, capacity=facts.capacity)
    risk = dpjax.accounting.dp_sgd_risk(sampling, noise_multiplier=3.0, steps=8, dims=3)
    card = release.card()
    for words in (
        f"at most {rounded_up((1 + risk.advantage) / 2)} of guesses are right",
        f"at most {rounded_up(1 - float(risk.tradeoff(0.01)))} of the members",
        "If one record is added or removed",
        "| steps that are paid for | 8 |",
        "| clip norm | 0.5 |",
        "| noise multiplier | 3 |",
        "in 64 public slots",
        "the noise came from a seed",
    ):
        assert words in card
    restored = dpjax.Release.from_dict(json.loads(json.dumps(release.to_dict())))
    assert restored.training == facts
    assert restored.card() == card
    written = release.to_dict()
    stated = {name: written["training"][name] for name in ("steps", "batch_size", "sampling")}
    assert stated == {"steps": 8, "batch_size": 16.0, "sampling": "poisson"}
    assert list(written["training"]["clip_norm"]) == ["0.5"]
    assert written["training"]["noise_multiplier"] == 3.0
    assert len(written["training"]["optimizer"]) == len(written["training"]["loss"]) == 32
    assert {"dpjax", "jax", "optax", "dp-accounting"} <= set(written["training"]["versions"])
    assert written["guarantee"]["relation"] == "add-or-remove-one"
    assert "privacy_unit" not in written["guarantee"]  # It is a record.
    changed = release.to_dict()
    changed["training"]["steps"] = 1
    with pytest.raises(ValueError, match="must be unchanged since"):
        dpjax.Release.from_dict(changed)


def test_a_card_of_overlapping_batches_has_the_risk_of_its_epsilon(keys):
    """The facts do not say how much batches overlap, so less noise must not look like more."""
    release = learning.fit(
        keys(1),
        lambda w, x: jnp.dot(w, x),
        jnp.zeros(3),
        database=jnp.ones((16, 3)),
        optimizer=optax.sgd(0.1),
        clip_norm=0.5,
        epochs=4,
        sampling=learning.poisson_sampling(16, batch_size=16, capacity=16),
        strategy=learning.toeplitz_strategy([1.0, 0.5], steps=4),
        noise_multiplier=9.0,
        delta=1e-5,
    )
    risk = dpjax.accounting.risk(release.guarantee)
    assert f"at most {rounded_up((1 + risk.advantage) / 2)} of guesses" in release.card()


def test_a_card_says_that_a_record_is_in_the_batches_of_one_bin(keys):
    release = learning.fit(
        keys(1),
        lambda w, x: jnp.dot(w, x),
        jnp.zeros(3),
        database=jnp.ones((16, 3)),
        optimizer=optax.sgd(0.1),
        clip_norm=0.5,
        epochs=1,
        sampling=learning.balls_in_bins_sampling(16, bins=4, capacity=16),
        noise_multiplier=9.0,
        delta=1e-5,
    )
    words = "| rate | 1 in the batches of its secret bin, one of 4 that take turns |"
    assert words in release.card()


def test_a_card_says_what_a_guarantee_says():
    """For each kind of guarantee; numbers are rounded up."""
    two = math.log(2)
    event = dpjax.Guarantee(two, 1e-6, 0.1, 0.9)
    for guarantee, words, others in (
        (dpjax.Guarantee(two), "one record is replaced", "plus"),
        (dpjax.Guarantee(two, 1e-6, relation=ADD), "2 times as large, plus 1e-06", "For random"),
        (event, "this fails with probability 0.1 at most", "seed"),
        (event, "these numbers, and mislead with probability 0.1 at most", "seed"),
        (dpjax.Guarantee(two, group_size=3), "a group of 3 (record)", "plus"),
        (dpjax.Guarantee(two, privacy_unit="person (id)"), "one person (id) is replaced", "plus"),
        (dpjax.Guarantee(math.inf, 1.0), "no guarantee", "times as large"),
        (dpjax.Guarantee(two, notes=("seeded key",)), "came from a seed", "plus"),
    ):
        card = dpjax.Release(1.0, guarantee).card()
        assert words in card, card
        assert others not in card
        assert "What this does not promise" in card
        assert "| Training |" not in card
    assert dpjax.Release(1.0, dpjax.Guarantee(two)).training is None
    assert "training" not in dpjax.Release(1.0, dpjax.Guarantee(two)).to_dict()
