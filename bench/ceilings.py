"""What a device can do at most: copies, matrix products, random words of JAX's generators."""

import jax
import jax.numpy as jnp

from harness import Race, record

COPIED = 2**30  # Floats: 4 GiB read, 4 GiB written.
SIDE = 2**14
WORDS = 2**28


def run() -> None:
    """Records bytes and floating-point operations per second."""
    if jax.default_backend() == "cpu":
        return
    ceilings = measured(COPIED, SIDE, WORDS)
    print(", ".join(f"{name}: {rate:.3g} per second" for name, rate in ceilings.items()))


def measured(copied: int, side: int, words: int) -> dict[str, float]:
    """The rates of a copy of floats, of a product of square matrices, and of random words."""
    vector, matrix = jnp.ones(copied), jnp.ones((side, side))
    copy = jax.jit(lambda x: -x)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    draw = jax.jit(lambda key: jax.random.bits(key, (words,)))
    threefry, philox = (jax.random.key(0, impl=x) for x in ("threefry2x32", "unsafe_rbg"))
    assert float(copy(vector)[-1]) == -1
    assert float(multiply(matrix)[0, 0]) == side
    race = Race(
        {
            "copy": lambda: copy(vector).block_until_ready(),
            "matmul": lambda: multiply(matrix).block_until_ready(),
            "threefry": lambda: draw(threefry).block_until_ready(),
            "philox": lambda: draw(philox).block_until_ready(),
        },
        rounds=10,
    )
    rates = {
        "bytes": 8 * copied / race.seconds["copy"],
        "flops": 2 * side**3 / race.seconds["matmul"],
        "threefry words": words / race.seconds["threefry"],
        "Philox words": words / race.seconds["philox"],
    }
    sizes = {"copied": copied, "side": side, "words": words}
    record("ceilings", [], race=race, sizes=sizes, results=rates)
    return rates


if __name__ == "__main__":
    run()
