"""A step of DP-SGD: per-example clipped gradients of a perceptron and of a small CNN, batch 256."""

import json
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy.clipping
import jax_privacy.noise_addition
import numpy as np
import optax
from jax import lax

import dpjax
from dpjax import learning
from harness import Race, Row, record

BATCH, CLASSES, CLIP_NORM, NOISE, RATE = 256, 10, 1.0, 1.0, 0.1
# Where a step of 101,770 parameters spends its time: least times of many calls on an Intel Xeon.
# The gradients take .75 ms on two cores, as without privacy. The noise takes 1.8 ms on one core,
# and 2.1 ms on two:
# - .63 ms on one core for 37,000 blocks of ChaCha20, 17 ns each: ten passes over the words of 4,112
#   lanes, in vectors of 256 bits. A loop in C takes 13 ns, and OpenSSL 10 ns in vectors of 512.
#   On two cores 1.08 ms: XLA halves every pass, and its halves move from cache to cache.
# - .40 ms for look-ups of five table entries a parameter, which XLA does one by one.
# - .35 ms for the grid and the sum, which two cores divide well.
# - .12 ms for what first words leave open, and the rest for copies of rows.
# XLA counts operations to choose by how many cores it divides a loop, and has no switch inside a
# program. Passes of single rounds stay whole, but 20 of them take as long as 10 in halves. Larger
# chunks move less: all lanes at once take .85 ms on two cores, and 1.6 ms on one. Four rounds in a
# pass LLVM hardly vectorizes; five it does not, and takes 210 ns a block.
NOISE_LIMIT = (
    "the noise takes two to three times as long as a gradient on two cores: XLA halves each pass of"
    " ChaCha20, and halves move from cache to cache"
)

MICROBATCHES = (None, 1, 4, 16, 64)
ROUNDS = 7

# Opacus needs torch, so it has an environment of its own. A build of torch for CPUs is enough.
HERE = pathlib.Path(__file__).parent
OPACUS = pathlib.Path(os.environ.get("DPJAX_OPACUS") or HERE.parent / "build/opacus/bin/python")
WITHOUT_OPACUS = """\
Opacus is left out, because its environment is not there. To make it:
    python -m venv build/opacus && build/opacus/bin/pip install torch opacus"""
# A training whose epsilon is compared: 20 epochs of 60,000 records.
RECORDS, STEPS, DELTA = 60_000, 4688, 1e-5


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Random numbers of a seed."""
    drawn = scale * np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(drawn, jnp.float32)


def perceptron(p: Any, example: Any) -> jax.Array:
    """784-128-10."""
    hidden = jax.nn.relu(example["x"] @ p["in"] + p["bias"])
    return cross_entropy(hidden @ p["out"] + p["shift"], example["y"])


def convolutional(p: Any, example: Any) -> jax.Array:
    """Two convolutions of stride 2 and two dense layers."""
    x = example["x"].reshape(1, 28, 28, 1)
    for kernel, bias in (("first", "b1"), ("second", "b2")):
        x = lax.conv_general_dilated(
            x, p[kernel], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + p[bias])
    hidden = jax.nn.relu(x.reshape(-1) @ p["in"] + p["bias"])
    return cross_entropy(hidden @ p["out"] + p["shift"], example["y"])


def cross_entropy(scores: jax.Array, label: jax.Array) -> jax.Array:
    """Of one label."""
    return jax.nn.logsumexp(scores) - scores[label]


def dense_layers(inputs: int, hidden: int) -> dict[str, jax.Array]:
    """The last two layers of both models."""
    return {
        "in": normal(1, inputs, hidden, scale=inputs**-0.5),
        "bias": jnp.zeros(hidden),
        "out": normal(2, hidden, CLASSES, scale=hidden**-0.5),
        "shift": jnp.zeros(CLASSES),
    }


def models() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Losses and parameters."""
    kernels = {
        "first": normal(3, 3, 3, 1, 16, scale=0.3),
        "b1": jnp.zeros(16),
        "second": normal(4, 3, 3, 16, 32, scale=0.1),
        "b2": jnp.zeros(32),
    }
    return {
        "784-128-10": (perceptron, dense_layers(784, 128)),
        "small CNN": (convolutional, {**kernels, **dense_layers(7 * 7 * 32, 64)}),
    }


def jax_privacy_ways(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Sums of clipped gradients by jax_privacy, for each size of microbatches and layout."""
    return {
        f"jax_privacy, microbatches of {size}, {'batched' if keep else 'single'}": jax.jit(
            jax_privacy.clipping.clipped_grad(
                loss if not keep else lambda p, e: jnp.mean(jax.vmap(loss, (None, 0))(p, e)),
                l2_clip_norm=CLIP_NORM,
                batch_argnums=1,
                keep_batch_dim=keep,
                microbatch_size=size,
            )
        )
        for size in MICROBATCHES
        for keep in (False, True)
    }


def sums(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """All ways to the same sum, and the gradient of the average loss."""
    clipped = learning.clipped_gradients(loss, clip_norm=CLIP_NORM)

    @jax.jit
    def by_dpjax(p: Any, batch: Any) -> Any:
        return clipped(p, batch, True).value

    @jax.jit
    def by_optax(p: Any, batch: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(p, batch)
        aggregate = optax.contrib.differentially_private_aggregate(CLIP_NORM, 0.0, key=0)
        average = aggregate.update(gradients, aggregate.init(p))[0]
        return jax.tree.map(lambda x: BATCH * x, average)

    @jax.jit
    def without_privacy(p: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(p)

    return {
        "dpjax": by_dpjax,
        "optax": by_optax,
        **jax_privacy_ways(loss),
        "without privacy": without_privacy,
    }


def steps(
    loss: Callable[..., Any], way: Callable[..., Any], plain: Callable[..., Any], p: Any
) -> dict[str, Any]:
    """Whole steps: by dpjax, by the best way of jax_privacy, and without privacy."""
    clipped = learning.clipped_gradients(loss, clip_norm=CLIP_NORM)
    exact = learning.gaussian_noise(
        dpjax.random.seeded_key(0), noise_multiplier=NOISE, batch_size=BATCH
    )
    in_floats = jax_privacy.noise_addition.gaussian_privatizer(stddev=NOISE, prng_key=0)

    def step(gradients: Callable[..., Any], *noise: Any) -> tuple[Callable[..., Any], Any]:
        optimizer = optax.chain(*noise, optax.sgd(RATE))

        @jax.jit
        def run(p: Any, state: Any, batch: Any) -> Any:
            updates, state = optimizer.update(gradients(p, batch), state, p)
            return optax.apply_updates(p, updates), state

        return run, optimizer.init(p)

    return {
        "dpjax, step": step(lambda p, batch: clipped(p, batch, True), exact),
        "jax_privacy, step": step(way, in_floats),
        "without privacy, step": step(plain),
    }


def opacus() -> dict[str, Any] | None:
    """Seconds of steps and epsilons by `opacus_step.py`, or None without its environment."""
    if not OPACUS.exists():
        print(WITHOUT_OPACUS)
        return None
    job = {
        "batch": BATCH, "rate": RATE, "noise": NOISE, "clip_norm": CLIP_NORM, "rounds": ROUNDS,
        "sample_rate": BATCH / RECORDS, "steps": STEPS, "delta": DELTA,
    }  # fmt: skip
    command = [OPACUS, HERE / "opacus_step.py", json.dumps(job)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def epsilon() -> float:
    """Of the same training, by dpjax; its tables of noise and full batches are charged, too."""
    sampling = learning.poisson_sampling(RECORDS, batch_size=BATCH)
    given = {"noise_multiplier": NOISE, "steps": STEPS, "delta": DELTA, "dims": 101_770}
    return float(dpjax.accounting.dp_sgd(sampling, **given).epsilon)


def largest_difference(one: Any, other: Any) -> float:
    """Of all parameters."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in pairs)


def finished(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call that waits for its result."""
    return lambda: jax.block_until_ready(function(*arguments))


def run() -> None:
    """Each model: sums against sums, and steps against steps."""
    labels = np.random.default_rng(1).integers(0, CLASSES, BATCH)
    batch = {"x": normal(0, BATCH, 784), "y": jnp.asarray(labels, jnp.int32)}
    other = opacus()
    for name, (loss, p) in models().items():
        ways = sums(loss)
        errors = {
            way: largest_difference(ways["dpjax"](p, batch), function(p, batch))
            for way, function in ways.items()
            if way != "without privacy"
        }
        assert max(errors.values()) < 1e-6 * CLIP_NORM, errors
        race = Race(
            {way: finished(function, p, batch) for way, function in ways.items()}, rounds=ROUNDS
        )
        best = min((x for x in ways if x.startswith("jax_privacy")), key=race.seconds.__getitem__)
        whole = steps(loss, ways[best], ways["without privacy"], p)
        walk = Race(
            {way: finished(step, p, state, batch) for way, (step, state) in whole.items()},
            rounds=ROUNDS,
        )
        ours = race.seconds["dpjax"]
        job = f"clipped gradients, {name}, batch {BATCH}"
        rows = [
            Row(
                job,
                best,
                ours,
                race.seconds[best],
                5,
                "most of both is convolutions forward and backward, as without privacy",
            ),
            Row(
                job,
                "optax.contrib, vmapped gradients",
                ours,
                race.seconds["optax"],
                50,
                "forming small kernels for each example takes a few gradients without privacy",
            ),
            Row(job, "gradient without privacy", ours, race.seconds["without privacy"], 0.5),
            Row(
                f"step of DP-SGD, {name}, exact noise",
                "jax_privacy, noise in floats",
                walk.seconds["dpjax, step"],
                walk.seconds["jax_privacy, step"],
            ),
            Row(
                f"step of DP-SGD, {name}, exact noise",
                "step without privacy",
                walk.seconds["dpjax, step"],
                walk.seconds["without privacy, step"],
                0.5,
                NOISE_LIMIT,
            ),
        ]
        race.seconds.update(walk.seconds)
        results: dict[str, Any] = {"largest differences of sums": errors}
        if other is not None:
            mode = min(other["seconds"][name], key=other["seconds"][name].__getitem__)
            job = f"step of DP-SGD, {name}, exact noise"
            theirs = other["seconds"][name][mode]
            rows.append(
                Row(job, f"Opacus ({mode}), noise in floats", walk.seconds["dpjax, step"], theirs)
            )
            results["Opacus"] = other
            results["epsilon"] = {"dpjax": epsilon(), **other["epsilons"]}
            print(results["epsilon"])
        record(
            f"DP-SGD, {name}",
            rows,
            race=race,
            sizes={"batch": BATCH, "parameters": sum(x.size for x in jax.tree.leaves(p))},
            results=results,
        )


if __name__ == "__main__":
    run()
