"""Boxes of a record that a proof encloses in a second, and bounds after a split.

The peer of an enclosure is a value of the same network. A value in float64 is the least that an
enclosure could cost: an enclosure has two ends, and slopes in each coordinate.
"""

import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax.proving import _boxes as boxes
from dpjax.proving import _prove_sensitivity as proofs
from harness import Race, Row, record

N, COORDINATES, UNITS = 128, 3, 16


def run(rounds: int = 10, count: int = 2**15) -> None:
    """A network of two layers, on boxes of width .01 of a record of three numbers."""
    generator = np.random.default_rng(0)
    first, second = (
        np.asarray(generator.normal(size=(size, UNITS)) / 2, np.float32)
        for size in (COORDINATES, UNITS)
    )

    def network(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ first.astype(x.dtype)) @ second.astype(x.dtype))

    specs = jax.ShapeDtypeStruct((N, COORDINATES), jnp.float32)
    specs, public = proofs.public_bounds(specs, (0, 1))
    program = proofs.traced(lambda x: network(x).mean(0), specs, public)
    jaxpr = proofs._after_the_clamp(program, specs, public)
    inputs = proofs._inputs(program, public)
    with np.errstate(all="ignore"):
        ((_, enclose),) = boxes.enclosures(jaxpr, program.jaxpr.consts, inputs, public)
    low = generator.random((count, COORDINATES)) * 0.99
    with jax.enable_x64(True):
        value = jax.jit(network)

        def values() -> None:
            value(jnp.asarray(low)).block_until_ready()

        ways = {"boxes": partial(enclose, low, low + 0.01), "values": values}
        race = Race(ways, rounds=rounds)
    rates = {name: count / seconds for name, seconds in race.seconds.items()}
    row = Row(
        f"{count:,} boxes enclosed", "values in float64", race.seconds["boxes"],
        race.seconds["values"],
    )  # fmt: skip
    record("boxes", [row], race=race, sizes={"boxes": count}, results={"per second": rates})


def splits(*sizes: int, efforts: tuple[float, ...] = (10, 40), n: int = 100) -> None:
    """Prints bounds for networks on records of some sizes, without and with a split.

    They are divided by the lower end that the split found.
    """
    for size in sizes:
        generator = np.random.default_rng(size)
        first, second = (
            np.asarray(generator.normal(size=shape) / 2, np.float32)
            for shape in ((size, 8), (8, 2))
        )

        def mean(x: jax.Array, first: np.ndarray = first, second: np.ndarray = second) -> jax.Array:
            return jnp.tanh(jnp.tanh(x @ first) @ second).mean(0)

        specs = jax.ShapeDtypeStruct((n, size), jnp.float32)
        proved = partial(dpjax.prove_sensitivity, mean, specs, bounds=(0, 1), norm="linf")
        whole = proved().value
        for effort in efforts:
            start = time.perf_counter()
            found = proved(effort=effort)
            said = re.search(r"into ([\d,]+) boxes.*between (\S+) and", found.explain())
            count, least = said.groups() if said else ("0", "nan")
            ratios = [f"{bound / float(least):.4g}" for bound in (whole, found.value)]
            seconds = f"{time.perf_counter() - start:.1f} s"
            print(f"{size} numbers: {ratios} after {seconds}, {count} boxes", flush=True)


if __name__ == "__main__":
    run()
    splits(6, 10)
