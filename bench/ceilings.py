"""What an accelerator can do at most: a large copy and a large matrix product."""

import jax
import jax.numpy as jnp

from harness import Race, record

COPIED = 2**30  # Floats: 4 GiB read, 4 GiB written.
SIDE = 2**14


def run() -> None:
    """Records bytes and floating-point operations per second."""
    if jax.default_backend() == "cpu":
        return
    ceilings = measured(COPIED, SIDE)
    print(", ".join(f"{name}: {rate:.3g} per second" for name, rate in ceilings.items()))


def measured(copied: int, side: int) -> dict[str, float]:
    """The rates of a copy of so many floats, and of a product of square matrices."""
    vector = jnp.ones(copied)
    matrix = jnp.ones((side, side))
    copy = jax.jit(lambda x: -x)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    assert float(copy(vector)[-1]) == -1
    assert float(multiply(matrix)[0, 0]) == side
    race = Race(
        {
            "copy": lambda: copy(vector).block_until_ready(),
            "matmul": lambda: multiply(matrix).block_until_ready(),
        },
        rounds=10,
    )
    rates = {
        "bytes": 8 * copied / race.seconds["copy"],
        "flops": 2 * side**3 / race.seconds["matmul"],
    }
    record("ceilings", [], race=race, sizes={"copied": copied, "side": side}, results=rates)
    return rates


if __name__ == "__main__":
    run()
