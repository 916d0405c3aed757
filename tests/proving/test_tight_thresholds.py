"""Thresholds at the end of what a program computes: a range that misses one rounding loses all.

Random chains of operations are run at both ends of the bounds, beside them and between. A threshold
is put next to the least or the largest value that was found. One record passes it, others do not,
and the jump is large. So no chain may be proved to have a range that ends before that value.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpjax
from dpjax.proving import NoProofError

# `make nightly` takes another seed every day.
SEED = int(os.environ.get("DPJAX_SEED", "1"))
COUNT = int(os.environ.get("DPJAX_PROGRAMS", "1000"))
N, JUMP = 3, 1000.0
RECORDS = jax.ShapeDtypeStruct((N,), jnp.float32)
ONE = np.ones((1, 1), np.float32)


def cast(*dtypes):
    def there_and_back(x, c):
        for dtype in (*dtypes, jnp.float32):
            x = x.astype(dtype)
        return x

    return there_and_back


def product(dtype):
    def rule(x, c):
        return lax.dot(
            x[:, None].astype(dtype), ONE.astype(dtype), preferred_element_type=jnp.float32
        )[:, 0]

    return rule


def rows(x):
    return jnp.stack([x, x / 2, jnp.ones(N)], 1)


# Of positive numbers x and a number c near 1; positive again, but for the logarithms.
CASTS = {
    "bfloat16": cast(jnp.bfloat16),
    "float16": cast(jnp.float16),
    "bfloat16 of float16": cast(jnp.float16, jnp.bfloat16),
    "float16 of bfloat16": cast(jnp.bfloat16, jnp.float16),
    "product in bfloat16": product(jnp.bfloat16),
    "product in float16": product(jnp.float16),
}
OPERATIONS = CASTS | {
    "times": lambda x, c: x * c,
    "over": lambda x, c: x / c,
    "under": lambda x, c: c / x,
    "plus": lambda x, c: x + c,
    "minus": lambda x, c: 50 - c * x,
    "square": lambda x, c: x * x,
    "ninth power": lambda x, c: (x / 4) ** 9,
    "power": lambda x, c: x**1.3,
    "power below 0": lambda x, c: x**-2,
    "root": lambda x, c: jnp.sqrt(x),
    "rsqrt": lambda x, c: lax.rsqrt(x),
    "exp": lambda x, c: jnp.exp(-x),
    "log": lambda x, c: jnp.log(x) + 9,
    "tanh": lambda x, c: jnp.tanh(x),
    "logistic": lambda x, c: jax.nn.sigmoid(x),
    "sin": lambda x, c: jnp.sin(x) + 2,
    "softmax": lambda x, c: jax.nn.softmax(rows(x), axis=1)[:, 0],
    "log_softmax": lambda x, c: 9 + jax.nn.log_softmax(rows(x), axis=1)[:, 0],
    "logsumexp": lambda x, c: jax.nn.logsumexp(rows(x), axis=1),
    "clip by norm": lambda x, c: (
        rows(x) / jnp.maximum(1, jnp.linalg.norm(rows(x), axis=1, keepdims=True))
    )[:, 0],
}


def drawn(rng):
    """A chain of one to three operations with a cast among them, and bounds."""
    names = rng.choice(list(OPERATIONS), rng.integers(1, 4)).tolist()
    names[rng.integers(len(names))] = str(rng.choice(list(CASTS)))
    numbers = rng.uniform(0.3, 3, len(names)).astype(np.float32)
    low = np.float32(rng.uniform(0.2, 3))
    high = np.float32(low * rng.uniform(1.05, 6))

    def chain(x):
        for name, number in zip(names, numbers, strict=True):
            x = OPERATIONS[name](x, number)
        return x

    return names, chain, (low, high)


def tried(low, high):
    """Numbers between the ends, many of them near the ends."""
    near = np.arange(60) * np.spacing(low)
    found = np.concatenate([np.linspace(low, high, 480), low + near, high - near])
    return np.clip(found.astype(np.float32), low, high)


def proved(target, bounds):
    try:
        return dpjax.prove_sensitivity(target, RECORDS, bounds=bounds, norm="l1").value
    except NoProofError:
        return None
    except ValueError as error:
        if "no record changes its value" not in str(error):
            raise
        return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_range_ends_before_a_computed_number(part):
    rng, jumped = np.random.default_rng([SEED, part]), 0
    for count in range(COUNT // 8):
        names, chain, (low, high) = drawn(rng)
        numbers = tried(low, high)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            values = np.asarray(jax.jit(jax.vmap(chain))(numbers.reshape(-1, N))).ravel()
            for least in (True, False):
                end = values.min() if least else values.max()
                level = np.nextafter(end, np.float32(np.inf if least else -np.inf))

                def target(x, level=level, least=least, chain=chain):
                    beyond = chain(x) < level if least else chain(x) > level
                    return jnp.where(beyond, JUMP, 0.0).sum()

                first = np.full(N, numbers[values.argmax() if least else values.argmin()])
                second = first.copy()
                second[1] = numbers[values.argmin() if least else values.argmax()]
                run = jax.jit(target)
                moved, found = abs(float(run(first)) - float(run(second))), proved(
                    target, (low, high)
                )  # fmt: skip
                assert found is None or moved <= found, (SEED, part, count, names, low, high)
                jumped += found is not None and moved > 0
        if count % 25 == 24:
            jax.clear_caches()
    assert jumped >= COUNT // 8  # In one of two cases at least there was something to lose.
