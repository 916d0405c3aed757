"""Correlated noise against jax_privacy's: error, epsilon, time of a step, accuracy, simulation.

The strategies are the same. `--accuracy 5` trains on so many seeds, which takes minutes, and
`--draws 4000000` simulates so many privacy losses.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy.clipping
import jax_privacy.noise_addition
import numpy as np
import optax
import sklearn.datasets
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

import dpjax
from dpjax import learning
from dpjax.learning import _buffers
from dpjax.random import seeded_key
from dpjax.targets._optax_training import optax_promotion
from harness import Race, Row, record

SIZE, BANDS, STEPS = 101_770, 16, 512
CLIP_NORM, DELTA = 1.0, 1e-5
ADDED = dpjax.NeighboringRelation.ADD_OR_REMOVE_ONE


def errors_of_prefix_sums() -> dict[str, float]:
    """The relative differences of the stated errors of the same strategies."""
    coefficients = toeplitz.optimize_banded_toeplitz(STEPS, BANDS)
    banded = learning.toeplitz_strategy(coefficients, steps=STEPS).error()
    theirs = math.sqrt(float(toeplitz.loss(coefficients, n=STEPS)))
    found = {"banded": abs(banded / theirs - 1)}
    for groups in (STEPS, STEPS // 4):
        series, column = series_of(groups)
        ours = _buffers.rounded(*series, steps=STEPS)
        with optax_promotion(), jax.enable_x64(True):
            squared = float(toeplitz.loss(column, n=STEPS))
        name = f"{len(ours.decays)} buffers, {groups} groups"
        found[name] = abs(ours.error() / math.sqrt(squared) - 1)
    return found


def epsilons() -> dict[str, float]:
    """Of BandMF with cyclic Poisson batches: ours, and dp-accounting's of the same event."""
    cycles = learning.cyclic_sampling(60_000, groups=BANDS, batch_size=600)
    given = {"noise_multiplier": 2.0, "steps": STEPS, "delta": DELTA, "dims": SIZE}
    event = dp_accounting.PoissonSampledDpEvent(cycles.rate, dp_accounting.GaussianDpEvent(2.0))
    theirs = dp_accounting.pld.PLDAccountant().compose(event, STEPS // BANDS)
    ours = float(dpjax.accounting.dp_sgd(cycles, **given).epsilon)
    return {"dpjax": ours, "dp-accounting": theirs.get_epsilon(DELTA)}


@functools.cache
def series_of(groups: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Decays and scales of jax_privacy's buffers for so many groups, and their coefficients."""
    with optax_promotion(), jax.enable_x64(True):
        found = buffered_toeplitz.optimize(
            n=STEPS, min_sep=groups, max_participations=STEPS // groups, error="mean"
        )
        coefficients = np.asarray(found.toeplitz_coefs(STEPS))
        return (np.asarray(found.buf_decay), np.asarray(found.output_scale)), coefficients


def noises() -> dict[str, Any]:
    """The noise of both libraries, as transformations of a clipped sum to an average."""
    coefficients = np.asarray(toeplitz.optimize_banded_toeplitz(STEPS, BANDS))
    normal = jnp.asarray(coefficients / np.linalg.norm(coefficients), jnp.float32)
    series, column = series_of(STEPS)
    column_norm = float(np.linalg.norm(column))
    narrow = buffered_toeplitz.BufferedToeplitz.build(*series, dtype=jnp.float32)
    pairs = {
        "": (
            learning.toeplitz_strategy(coefficients, steps=STEPS),
            toeplitz.inverse_as_streaming_matrix(normal), 1.0,
        ),
        ", buffers": (
            _buffers.rounded(*series, steps=STEPS),
            narrow.inverse_as_streaming_matrix(), column_norm,
        ),
    }  # fmt: skip
    given: dict[str, float] = {"noise_multiplier": 1.0, "batch_size": 1.0}
    made: dict[str, Any] = {}
    for name, (strategy, inverse, stddev) in pairs.items():
        privatizer = jax_privacy.noise_addition.matrix_factorization_privatizer(
            inverse, stddev=stddev, prng_key=0
        )
        made["dpjax, exact" + name] = learning.correlated_noise(
            seeded_key(0), strategy=strategy, **given
        )
        made["jax_privacy, floats" + name] = learning.with_privatizer(privatizer, batch_size=1.0)
    made["dpjax, exact and independent"] = learning.gaussian_noise(seeded_key(0), **given)
    return made


class Steps:
    """A training whose gradients take no time: each call is a step of its noise alone."""

    def __init__(self, noise: Any, *, donated: bool):
        """Starts it. A donated state is overwritten by the next one, in place of a copy."""
        clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w[:2], x), clip_norm=CLIP_NORM)

        def step(state: Any) -> Any:
            return noise.update(clipped(jnp.zeros(SIZE), jnp.ones((4, 2)), True), state)

        self._step = jax.jit(step, donate_argnums=(0,) if donated else ())
        # Arrays of a first state may be shared, which cannot be donated.
        with optax_promotion():
            self._state = jax.tree.map(jnp.copy, noise.init(jnp.zeros(SIZE)))

    def __call__(self) -> None:
        """Runs one step."""
        update, self._state = self._step(self._state)
        jax.block_until_ready((update, self._state))


def race_of_steps() -> tuple[Race, dict[str, float]]:
    """Steps of noise alone, of as many numbers as a small perceptron has; and their CPU times."""
    runs: dict[str, Callable[[], Any]] = {}
    for donated in (False, True):
        for name, noise in noises().items():
            runs[name + ", donated" * donated] = Steps(noise, donated=donated)
    return Race(runs, rounds=60), cpu_seconds(runs)


def cpu_seconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least CPU time of five runs in a row, of 12 turns, for one run."""
    found = dict.fromkeys(runs, math.inf)
    for _ in range(12):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(5):
                run()
            found[name] = min(found[name], (time.process_time() - start) / 5)
    return found


def tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Digits, and a larger made table."""
    digits = sklearn.datasets.load_digits()
    made = sklearn.datasets.make_classification(
        40_000, 40, n_informative=20, n_classes=4, random_state=0
    )
    return {"digits": (digits.data / 16, digits.target), "made, n = 40,000": made}


def accuracy(name: str, epsilon: float, seeds: int) -> dict[str, list[float]]:
    """Of softmax regression on held-out rows: plain noise, and both libraries' BandMF."""
    x, y = tables()[name]
    order = np.random.default_rng(0).permutation(len(x))
    x, y = np.float32(x[order]), np.int32(y[order])
    n, kinds = int(0.8 * len(x)), int(y.max()) + 1
    bands, epochs, in_an_epoch = 4, 10, 16
    size, steps = n / in_an_epoch, epochs * in_an_epoch

    def loss(w: Any, example: Any) -> jax.Array:
        scores = example["x"] @ w["w"] + w["b"]
        return optax.losses.softmax_cross_entropy_with_integer_labels(scores, example["y"])

    start = {"w": jnp.zeros((x.shape[1], kinds)), "b": jnp.zeros(kinds)}
    dims = sum(leaf.size for leaf in jax.tree.leaves(start))
    records = {"x": jnp.asarray(x[:n]), "y": jnp.asarray(y[:n])}
    coefficients = np.asarray(toeplitz.optimize_banded_toeplitz(steps, bands))
    strategy = learning.toeplitz_strategy(coefficients, steps=steps)
    optimizer = optax.sgd(1.0)

    def score(w: Any) -> float:
        return float(np.mean(np.argmax(x[n:] @ w["w"] + w["b"], axis=1) == y[n:]))

    def by_fit(seed: int, **given: Any) -> float:
        found = learning.fit(
            seeded_key(seed), loss, start, database=records, optimizer=optimizer, epochs=epochs,
            batch_size=size, clip_norm=CLIP_NORM, epsilon=epsilon, delta=DELTA, **given,
        )  # fmt: skip
        return score(found.value)

    cycles = learning.cyclic_sampling(n, groups=bands, batch_size=size)
    multiplier = dpjax.accounting.dp_sgd_noise_multiplier(
        cycles, epsilon=epsilon, delta=DELTA, steps=steps, dims=dims
    )
    summed = jax_privacy.clipping.clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, batch_argnums=1, keep_batch_dim=False
    )
    normal = jnp.asarray(coefficients / np.linalg.norm(coefficients), jnp.float32)

    @jax.jit
    def their_sum(w: Any, batch: Any, mask: jax.Array) -> Any:
        return summed(w, batch, is_padding_example=~mask)

    def by_jax_privacy(seed: int) -> float:
        privatizer = jax_privacy.noise_addition.matrix_factorization_privatizer(
            toeplitz.inverse_as_streaming_matrix(normal), stddev=multiplier, prng_key=seed
        )
        whole = optax.chain(optax.scale(1 / size), optimizer)

        @jax.jit
        def step(w: Any, state: Any, inner: Any, total: Any) -> Any:
            noisy, state = privatizer.update(total, state)
            updates, inner = whole.update(noisy, inner, w)
            return optax.apply_updates(w, updates), state, inner

        w, state, inner = start, privatizer.init(start), whole.init(start)
        for number in range(steps):
            batch = cycles(seeded_key(seed * steps + number), step=number)
            rows = jax.tree.map(lambda column, batch=batch: column[batch.indices], records)
            w, state, inner = step(w, state, inner, their_sum(w, rows, batch._mask))
        return score(w)

    return {
        "dpjax, DP-SGD": [by_fit(seed) for seed in range(seeds)],
        "dpjax, BandMF": [by_fit(seed, strategy=strategy) for seed in range(seeds)],
        "jax_privacy, BandMF": [by_jax_privacy(seed) for seed in range(seeds)],
    }


def simulation(draws: int) -> dict[str, Any]:
    """2,048 steps of batches of n / 64, by every sampling: epsilon, and CPU seconds of losses."""
    steps, n, multiplier = 2048, 60_000, 3.0
    strategy = learning.toeplitz_strategy(0.6 ** np.arange(BANDS), steps=steps)
    bins = learning.balls_in_bins_sampling(n, bins=64)
    given = {"noise_multiplier": multiplier, "steps": steps, "dims": SIZE}

    def known(sampling: learning.BatchSampling) -> float:
        found = dpjax.accounting.dp_sgd(sampling, strategy=strategy, delta=DELTA, **given)
        return float(found.epsilon)

    def secret(sampling: learning.BatchSampling) -> tuple[float, float]:
        losses = learning.participation_losses(sampling, strategy=strategy, **given)
        start = time.process_time()
        found = dpjax.accounting.monte_carlo(seeded_key(0), losses, draws=draws, relation=ADDED)
        return found.epsilon(DELTA), time.process_time() - start

    cycles = learning.cyclic_sampling(n, groups=BANDS, batch_size=n / 64)
    found: dict[str, Any] = {"cyclic": known(cycles), "known bins": known(bins)}
    found["secret bins"] = secret(bins)
    apart = learning.min_separation_sampling(n, separation=BANDS, batch_size=n / 64)
    found["at least 16 steps apart"] = secret(apart)
    return {"draws": draws, **found}


def seconds_of_a_batch() -> dict[str, float]:
    """CPU seconds to draw 600 of 60,000 records in step 2,047, the least of 5."""
    n, size, key = 60_000, 600, seeded_key(0)
    apart = learning.min_separation_sampling(n, separation=BANDS, batch_size=size)
    whole = learning.poisson_sampling(n, batch_size=size)

    def least(draw: Callable[[], Any]) -> float:
        found = []
        for _ in range(6):  # The first call compiles.
            start = time.process_time()
            jax.block_until_ready(draw())
            found.append(time.process_time() - start)
        return min(found)

    return {
        "at least 16 steps apart": least(lambda: apart(key, step=2047)),
        "poisson": least(lambda: whole(key)),
    }


def run() -> None:
    """All of it, as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accuracy", type=int, default=0)
    parser.add_argument("--draws", type=int, default=0)
    asked = parser.parse_args()
    results: dict[str, Any] = {"differences of errors": errors_of_prefix_sums()}
    results["epsilon"] = epsilons()
    results["seconds of a batch"] = seconds_of_a_batch()
    if asked.draws:
        results["simulation"] = simulation(asked.draws)
    for name in tables() if asked.accuracy else ():
        for epsilon in (2.0, 8.0):
            found = accuracy(name, epsilon, asked.accuracy)
            results[f"{name}, epsilon {epsilon:g}"] = found
            print(
                name, epsilon, {way: np.mean(scores) for way, scores in found.items()}, flush=True
            )
    race, results["CPU seconds of a step"] = race_of_steps()
    print(race.seconds, results)
    job = f"step of correlated noise, {SIZE:,} parameters, {BANDS} bands"
    ours, theirs = (
        race.seconds[f"{who}, donated"] for who in ("dpjax, exact", "jax_privacy, floats")
    )
    row = Row(job, "jax_privacy, noise in floats", ours, theirs, 0.5)
    sizes = {"parameters": SIZE, "bands": BANDS, "steps": STEPS}
    record("correlated noise", [row], race=race, sizes=sizes, results=results)


if __name__ == "__main__":
    run()
