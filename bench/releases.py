"""Job 3: secure releases, against OpenDP's vector Laplace and against JAX's float noise."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import opendp.prelude as opendp

import dpjax
from harness import race, record

BATCH, KEYS = 2**20, 10**6
# OpenDP takes seconds for the whole batch: it gets a part, and its rate is compared.
PEER_PART = 2**16


def run(rounds: int = 7) -> list[str]:
    """Times batches and single releases, and returns rows for the table."""
    return [*_vector(rounds), *_scalars(rounds), *_first_call()]


def _vector(rounds: int) -> list[str]:
    """One vector of 2^20 coordinates."""
    values = np.random.default_rng(0).normal(size=BATCH).astype(np.float32)
    key = dpjax.random.seeded_key(0)
    on_device = jnp.asarray(values)

    def releases(mechanism: dpjax.Mechanism, mean_noise: float) -> Callable[[], jax.Array]:
        release = jax.jit(lambda key, value: mechanism(key, value).value)
        noise = np.abs(np.asarray(release(key, on_device)) - values).mean()
        assert abs(noise / mean_noise - 1) < 0.02, noise
        return lambda: release(key, on_device).block_until_ready()

    opendp.enable_features("contrib")
    peer = opendp.m.make_laplace(
        opendp.vector_domain(opendp.atom_domain(T=float, nan=False)),
        opendp.l1_distance(T=float),
        scale=1.0,
    )
    part = values[:PEER_PART].astype(float).tolist()

    noise = np.abs(np.array(peer(part)) - part).mean()
    assert abs(noise - 1) < 0.02, noise
    plain = jax.jit(lambda key: on_device + jax.random.laplace(key, (BATCH,)))
    threefry = jax.random.key(0)
    seconds = race(
        {
            "laplace": releases(dpjax.laplace(1.0, 1.0), 1.0),
            "gaussian": releases(dpjax.gaussian(1.0, 1.0, 1e-5), 3.7306 * (2 / np.pi) ** 0.5),
            "float laplace": lambda: plain(threefry).block_until_ready(),
            "opendp": lambda: peer(part),
        },
        rounds=rounds,
    )
    rates = {name: BATCH / time for name, time in seconds.items()}
    rates["opendp"] = PEER_PART / seconds["opendp"]
    record("vector release", {"coordinates": BATCH}, seconds, {"per second": rates})
    return [
        _row("Laplace, a vector of 2^20", "OpenDP, vector", rates["laplace"], rates["opendp"]),
        _row(
            "Laplace, a vector of 2^20",
            "jax.random.laplace (not private)",
            rates["laplace"],
            rates["float laplace"],
        ),
        _row("Gaussian, a vector of 2^20", "OpenDP, vector", rates["gaussian"], rates["opendp"]),
    ]


def _scalars(rounds: int) -> list[str]:
    """A million scalars, each under a key of its own."""
    keys = jax.random.split(dpjax.random.seeded_key(1), KEYS)
    mechanism = dpjax.laplace(1.0, 1.0)
    release = jax.jit(jax.vmap(lambda key: mechanism(key, jnp.float32(0)).value))
    opendp.enable_features("contrib")
    peer = opendp.m.make_laplace(
        opendp.atom_domain(T=float, nan=False), opendp.absolute_distance(T=float), scale=1.0
    )
    part = 2000
    noise = np.abs(np.asarray(release(keys)))
    assert abs(noise.mean() - 1) < 0.01, noise.mean()
    seconds = race(
        {
            "scalars": lambda: release(keys).block_until_ready(),
            "opendp": lambda: [peer(0.0) for _ in range(part)],
        },
        rounds=rounds,
    )
    rates = {"scalars": KEYS / seconds["scalars"], "opendp": part / seconds["opendp"]}
    record("scalar releases", {"keys": KEYS}, seconds, {"per second": rates})
    return [
        _row("Laplace, 10^6 scalars, each with a key", "OpenDP, loop", *rates.values()),
    ]


def _first_call() -> list[str]:
    """The first release of a shape that was never released before: tracing and compilation."""
    mechanism = dpjax.laplace(1.0, 1.0)
    value = jnp.zeros((1, 1, 1))
    start = time.perf_counter()
    mechanism(dpjax.random.seeded_key(2), value).value.block_until_ready()
    seconds = time.perf_counter() - start
    record("first release", {"coordinates": 1}, {"first call": seconds}, None)
    return [f"first release of a new shape | none | {seconds * 1e3:.0f} ms | | "]


def _row(job: str, peer: str, ours: float, theirs: float) -> str:
    return f"{job} | {peer} | {ours / 1e6:.1f} M/s | {theirs / 1e6:.3g} M/s | {ours / theirs:.3g}x"
