"""Secure releases: a million scalars and one large vector, against diffprivlib and OpenDP."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opendp.prelude as opendp

import dpjax
from harness import Race, Row, record

COORDINATES, KEYS = 2**20, 10**6
# The peers would take seconds to minutes for everything.
VECTOR_PART, SCALAR_PART = 2**13, 2000


def run(rounds: int = 5) -> None:
    """Scalars, a vector, and what a first call costs."""
    opendp.enable_features("contrib")
    _scalars(rounds)
    _vector(rounds)
    _first_call()


def _scalars(rounds: int) -> None:
    """A million scalars, each under a key of its own."""
    keys = jax.random.split(dpjax.random.seeded_key(1), KEYS)
    mechanism = dpjax.laplace(1.0, 1.0)
    release = jax.jit(jax.vmap(lambda key: mechanism(key, jnp.float32(0)).value))
    in_opendp = opendp.m.make_laplace(
        opendp.atom_domain(T=float, nan=False), opendp.absolute_distance(T=float), scale=1.0
    )
    in_diffprivlib = diffprivlib_mechanisms().Laplace(epsilon=1.0, sensitivity=1.0)
    found = {}

    def noted(name: str, draw: Callable[[], Any]) -> Callable[[], None]:
        return lambda: found.update({name: float(np.abs(draw()).mean())})

    race = Race(
        {
            "dpjax": lambda: release(keys).block_until_ready(),
            "diffprivlib": noted(
                "diffprivlib", lambda: [in_diffprivlib.randomise(0.0) for _ in range(SCALAR_PART)]
            ),
            "opendp": noted("opendp", lambda: [in_opendp(0.0) for _ in range(SCALAR_PART)]),
        },
        rounds=rounds,
    )
    noted("dpjax", lambda: release(keys))()
    # The average of 2000 noises of scale 1 varies by 2.2%.
    assert all(abs(mean - 1) < 0.12 for mean in found.values()), found
    job = "10^6 Laplace releases, each with its own key"
    rows = [
        Row(
            job,
            f"{name}, loop ({SCALAR_PART} releases, scaled)",
            race.seconds["dpjax"],
            race.seconds[name.lower()] * KEYS / SCALAR_PART,
            100,
            "each takes a ChaCha20 block under its own key and an exact integer draw, a release of"
            " diffprivlib's four floats of the system's generator",
        )
        for name in ("diffprivlib", "OpenDP")
    ]
    record(
        "scalar releases",
        rows,
        race=race,
        sizes={"keys": KEYS, "keys of the peers": SCALAR_PART},
        results={"average noise": found},
        work={"bytes": 36.0 * KEYS, "flops": 0.0},
    )


def diffprivlib_mechanisms() -> Any:
    """Its mechanisms without its models, which do not import beside a recent scikit-learn."""
    spec = importlib.util.find_spec("diffprivlib")
    package = types.ModuleType("diffprivlib")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["diffprivlib"] = package
    return importlib.import_module("diffprivlib.mechanisms")


def _vector(rounds: int) -> None:
    """One vector of 2^20 coordinates."""
    values = np.random.default_rng(0).normal(size=COORDINATES).astype(np.float32)
    on_device, key, threefry = jnp.asarray(values), dpjax.random.seeded_key(0), jax.random.key(0)
    peer = opendp.m.make_laplace(
        opendp.vector_domain(opendp.atom_domain(T=float, nan=False)),
        opendp.l1_distance(T=float),
        scale=1.0,
    )
    part = values[:VECTOR_PART].astype(float).tolist()
    laplace = jax.jit(lambda key: dpjax.laplace(1.0, 1.0)(key, on_device).value)
    gaussian = jax.jit(lambda key: dpjax.gaussian(1.0, 1.0, 1e-5)(key, on_device).value)
    plain = jax.jit(lambda key: on_device + jax.random.laplace(key, (COORDINATES,)))
    noises = {
        "laplace": np.abs(np.asarray(laplace(key)) - values).mean(),
        "gaussian": np.abs(np.asarray(gaussian(key)) - values).mean()
        / (3.7306 * (2 / np.pi) ** 0.5),
        "opendp": np.abs(np.array(peer(part)) - part).mean(),
    }
    assert all(abs(noise - 1) < 0.06 for noise in noises.values()), noises
    race = Race(
        {
            "laplace": lambda: laplace(key).block_until_ready(),
            "gaussian": lambda: gaussian(key).block_until_ready(),
            "jax": lambda: plain(threefry).block_until_ready(),
            "opendp": lambda: peer(part),
        },
        rounds=rounds,
    )
    in_opendp = race.seconds["opendp"] * COORDINATES / VECTOR_PART
    vector, in_part = "release of a vector of 2^20", "OpenDP, vector (2^13, scaled)"
    record(
        "vector release",
        [
            Row(f"Laplace {vector}", in_part, race.seconds["laplace"], in_opendp),
            Row(
                f"Laplace {vector}",
                "jax.random.laplace (not private)",
                race.seconds["laplace"],
                race.seconds["jax"],
                0.1,
                "four ChaCha20 words and four table entries a coordinate, for one threefry word",
            ),
            Row(f"Gaussian {vector}", in_part, race.seconds["gaussian"], in_opendp),
        ],
        race=race,
        sizes={"coordinates": COORDINATES, "coordinates of OpenDP": VECTOR_PART},
        results={"average noise over its expectation": {k: float(v) for k, v in noises.items()}},
        work={"bytes": 8.0 * COORDINATES, "flops": 0.0},
    )


def _first_call() -> None:
    """The first release of a shape that was never released before: tracing and compilation."""
    value, key = jnp.zeros((1, 1, 1)), dpjax.random.seeded_key(2)
    mechanism = dpjax.laplace(1.0, 1.0)
    race = Race({"first call": lambda: mechanism(key, value).value}, rounds=1, warm=False)
    record("first release of a new shape", [], race=race, sizes={"coordinates": 1})
    print(f"first release of a new shape: {race.seconds['first call']:.3g} s")


if __name__ == "__main__":
    run()
