"""Private weighted majority on 10^4 sequences of 10^4 steps, against diffprivlib and OpenDP."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opendp.prelude as opendp
from jax.sharding import PartitionSpec

import dpjax
from dpjax import learning
from harness import Race, Row, every_device, record
from releases import diffprivlib_mechanisms

SEQUENCES, STEPS, EXPERTS = 10**4, 10**4, 10
TOGETHER = 100  # Sequences that are followed at once, on all devices.
PART = 2000  # Steps of a sequence that a peer takes: it would need hours for all.
MEANS = np.where(np.arange(EXPERTS) == 0, 0.2, 0.5)


def run(sequences: int = SEQUENCES, steps: int = STEPS) -> None:
    """Every contender follows experts whose losses it sees one step later, under one guarantee."""
    opendp.enable_features("contrib")
    mechanism = learning.private_weighted_majority(1.0, 1e-6, steps=steps)
    epsilon = mechanism.choice.guarantee.epsilon
    all_losses = _losses(steps)
    losses = np.asarray(all_losses)[0, :PART]
    follow_all = _all_sequences(mechanism, all_losses, sequences)
    choices: dict[str, np.ndarray] = {}
    in_opendp, in_diffprivlib = _opendp_choice(epsilon), _diffprivlib_choice(epsilon)
    race = Race(
        {
            "dpjax": lambda: choices.update(dpjax=follow_all()[0]),
            "diffprivlib": lambda: choices.update(diffprivlib=_followed(in_diffprivlib, losses)),
            "opendp": lambda: choices.update(opendp=_followed(in_opendp, losses)),
        },
        rounds=1,
        warm=False,
    )
    expected = _expected_loss(losses, epsilon / 2)
    followed = losses[np.arange(len(losses)), [choices[name][: len(losses)] for name in choices]]
    found = dict(zip(choices, followed.mean(axis=1).tolist(), strict=True))
    # An average of so many independent choices varies by 1%.
    assert all(abs(mean - expected) < 0.06 for mean in found.values()), (found, expected)
    share = sequences * steps / len(losses)
    job = f"private weighted majority, {sequences:,} sequences of {steps:,} steps, k = {EXPERTS}"
    rows = [
        Row(
            job,
            f"{name}, exponential mechanism, loop ({len(losses)} choices, scaled)",
            race.seconds["dpjax"],
            race.seconds[name.lower()] * share,
            10,
            "a choice takes 2 k exact draws of exponential noise at once, under a key of its own",
        )
        for name in ("diffprivlib", "OpenDP")
    ]
    record(
        "private weighted majority",
        rows,
        race=race,
        sizes={"sequences": sequences, "steps": steps, "experts": EXPERTS, "part": len(losses)},
        results={"average loss": found, "expected": expected, "epsilon of a choice": epsilon},
    )


def _losses(steps: int) -> jax.Array:
    """Of a hundred sequences: one expert is good, the others are not."""
    means = jnp.asarray(MEANS, jnp.float32)
    return jax.random.bernoulli(jax.random.key(0), means, (TOGETHER, steps, EXPERTS))


def _all_sequences(mechanism: Any, losses: jax.Array, sequences: int) -> Any:
    """Choices on every sequence, spread over the devices; the losses recur, the keys never do."""
    mesh = every_device()
    (axis,) = mesh.axis_names
    keys = jax.random.split(dpjax.random.seeded_key(1), (sequences // TOGETHER, TOGETHER))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(None, axis), PartitionSpec(axis)),
        out_specs=PartitionSpec(None, axis),
    )
    def followed(keys: jax.Array, losses: jax.Array) -> jax.Array:
        def one(key: jax.Array, losses: jax.Array) -> jax.Array:
            return mechanism(key, losses).value.astype(jnp.uint8)

        return jax.lax.map(lambda some: jax.vmap(one)(some, losses), keys)

    return lambda: np.asarray(followed(keys, losses)).reshape(sequences, -1)


def _followed(choose: Any, losses: np.ndarray) -> np.ndarray:
    """Choices of a peer, one after the other, on minus the losses so far."""
    cumulative, choices = np.zeros(losses.shape[1]), []
    for row in losses:
        choices.append(choose(-cumulative))
        cumulative += row
    return np.array(choices)


def _opendp_choice(epsilon: float) -> Any:
    domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False))
    metric = opendp.linf_distance(T=float)
    measurement = opendp.m.make_report_noisy_max_gumbel(domain, metric, scale=2 / epsilon)
    assert abs(measurement.map(1.0) / epsilon - 1) < 1e-9
    return lambda scores: measurement(scores.tolist())


def _diffprivlib_choice(epsilon: float) -> Any:
    exponential = diffprivlib_mechanisms().Exponential

    def choose(scores: np.ndarray) -> int:
        utility = (scores - scores.min()).tolist()
        return exponential(epsilon=epsilon, sensitivity=1.0, utility=utility).randomise()

    return choose


def _expected_loss(losses: np.ndarray, rate: float) -> float:
    before = np.cumsum(losses, axis=0) - losses
    weights = np.exp(-rate * (before - before.min(axis=1, keepdims=True)))
    return float(((weights * losses).sum(axis=1) / weights.sum(axis=1)).mean())


if __name__ == "__main__":
    run()
