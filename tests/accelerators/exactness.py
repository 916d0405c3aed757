"""What every device must compute to the last bit, and how far off other numbers may be.

`bits.json` holds digests that a CPU computed. `python bench/on_device.py --record` renews it.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from accelerators.programs import perceptron_loss
from dpjax import learning, queries
from dpjax._exact._grid import round_widely
from dpjax.proving import _rounding as rounding
from elementary_table import ELEMENTARY
from mechanism_table import TABLE

RECORDED = pathlib.Path(__file__).with_name("bits.json")
# Two compute with floats before they draw, the others afterwards, with numbers that are public.
_IN_FLOATS = {"oracle check", "subset envelope", "mwem", "shaped gaussian"}
_SEED = 20170611


def exact(size: int) -> dict[str, Callable[[], Any]]:
    """Computations of about `size` numbers that have one result on every device."""
    vector = _floats(size)
    mechanisms = {name: functools.partial(_draws, name) for name in TABLE.keys() - _IN_FLOATS}
    return {
        "ChaCha20 words": lambda: jax.random.bits(_key(0), (size,)),
        "split and folded keys": lambda: _folded(size),
        "rounding to grids": lambda: [_rounded(vector, exponent) for exponent in (-149, -30, 0)],
        "Laplace noise, vector": lambda: _released(dpjax.laplace(1.0, 0.5), vector),
        "Laplace noise, a key each": lambda: _key_each(dpjax.laplace(1.0, 0.5), vector),
        "Gaussian noise, vector": lambda: _released(dpjax.gaussian(1.0, 0.5, 1e-6), vector),
        "Gaussian noise, narrow": lambda: _released(dpjax.gaussian(1.0, 40.0, 0.5), vector),
        "exponential mechanism": lambda: _released(dpjax.exponential(1.0, 1.0), vector),
        "permute-and-flip": lambda: _released(dpjax.permute_and_flip(1.0, 1.0), vector),
        "order statistics": lambda: _order_statistics(size),
        "histogram": lambda: _histogram(size),
        "sampled maximum": _sampled_maximum,
        "step of DP-SGD": _private_step,
        **dict(sorted(mechanisms.items())),
    }


def digest(found: Any) -> str:
    """Of the bits, shapes and dtypes of a pytree of arrays."""
    digester = hashlib.sha256()
    for leaf in jax.tree.leaves(found):
        array = np.asarray(leaf)
        digester.update(f"{array.dtype} {array.shape};".encode())
        digester.update(array.tobytes())
    return digester.hexdigest()[:32]


def recorded(size: int) -> dict[str, str]:
    """The digests of a CPU."""
    return json.loads(RECORDED.read_text())[str(size)]


def record(sizes: tuple[int, ...]) -> None:
    """Writes the digests that this machine computes."""
    found = {
        str(size): {name: digest(run()) for name, run in exact(size).items()} for size in sizes
    }
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


def _key(number: int) -> jax.Array:
    return dpjax.random.seeded_key(_SEED + number)


@functools.cache
def _floats(size: int) -> np.ndarray:
    """Numbers of all magnitudes and both signs; every 64th is special."""
    rng = np.random.default_rng(_SEED)
    bits = rng.integers(0, 2**32, size, dtype=np.uint32)
    found = bits.view(np.float32)
    usual = rng.standard_normal(size, dtype=np.float32) * 100
    found = np.where(np.isfinite(found) & (np.arange(size) % 2 == 0), found, usual)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38], np.float32)
    found[::64] = np.resize(special, len(found[::64]))
    return found


@jax.jit
def _folded_data(keys: jax.Array, places: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, places))


def _folded(size: int) -> jax.Array:
    count = min(size, 2**14)
    keys = jax.random.split(_key(1), count)
    return _folded_data(keys, jnp.arange(count, dtype=jnp.uint32))


@functools.partial(jax.jit, static_argnums=1)
def _rounded(x: jax.Array, exponent: int) -> Any:
    return round_widely(x, exponent)


def _released(mechanism: Any, values: np.ndarray) -> jax.Array:
    return jax.jit(lambda key, x: mechanism(key, x).value)(_key(2), values)


def _key_each(mechanism: Any, values: np.ndarray) -> jax.Array:
    values = values[: 2**17]
    keys = jax.random.split(_key(3), len(values))
    return jax.jit(jax.vmap(lambda key, x: mechanism(key, x).value))(keys, values)


def _draws(name: str) -> Any:
    """256 releases by a row of the table of mechanisms."""
    factory, arguments = TABLE[name]
    given = {"sensitivity": 1.0, "epsilon": 1.0} | arguments
    numbers = [x for x in (given["sensitivity"], given["epsilon"]) if x is not None]
    mechanism, value = factory(*numbers), given["value"]
    keys = jax.random.split(_key(4), 256)
    return jax.jit(jax.vmap(lambda key: mechanism(key, value).value))(keys)


def _order_statistics(size: int) -> list[float]:
    distances = np.abs(_floats(size))
    on_device = jnp.asarray(distances)
    ranks = (1, size // 2, size - size // 20, size)
    found = [float(dpjax.order_statistic(on_device, k)) for k in ranks]
    ordered = np.sort(np.where(np.isnan(distances), np.inf, distances))
    assert found == [float(ordered[k - 1]) for k in ranks], "not the k-th smallest"
    return found


def _histogram(size: int) -> jax.Array:
    records = np.random.default_rng(_SEED).integers(0, size // 4, size, dtype=np.int32)
    query = queries.histogram_query(size // 4)
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), epsilon=0.5))
    return private(_key(5), records).value


def _sampled_maximum() -> float:
    """A difference of two numbers is rounded once, so even the sampler has no choice."""
    sampled = dpjax.sample_sensitivity(
        jax.random.key(_SEED),
        jnp.max,
        lambda key, n: jax.random.uniform(key, (n,)),
        n=10,
        norm="l1",
        m=10_000,
        gamma=0.01,
    )
    return float(sampled.value)


def _private_step() -> Any:
    """Clipped sums of multiples of 2^-12 are exact; noise and state are integers."""
    x = np.random.default_rng(_SEED).integers(-999, 999, (64, 300)) / 2.0**16
    clipped = learning.clipped_gradients(lambda w, x: jnp.dot(w, x), clip_norm=1.0)
    noise = learning.gaussian_noise(_key(6), noise_multiplier=1.0, batch_size=16)

    def step(w: jax.Array, x: jax.Array, state: Any) -> Any:
        return noise.update(clipped(w, x, True), state)

    w = jnp.zeros(x.shape[1])
    updates, state = jax.jit(step)(w, jnp.asarray(x, jnp.float32), noise.init(w))
    return updates, [leaf for leaf in jax.tree.leaves(state) if not _is_key(leaf)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def elementary_errors(points: int, dtype: np.dtype) -> dict[str, float]:
    """The largest error of each elementary function, over what proofs count for it."""
    rows = ELEMENTARY.items()
    places = {name: np.linspace(*row.interval, points, dtype=dtype) for name, row in rows}
    run = jax.jit(lambda xs: {name: ELEMENTARY[name].device(x) for name, x in xs.items()})
    found = {name: np.asarray(y, np.longdouble) for name, y in run(places).items()}
    shares = {}
    for name, row in rows:
        truth = row.host(places[name].astype(np.longdouble))
        floor = np.abs(truth) if row.relative else np.maximum(np.abs(truth), 1)
        units = row.units or rounding.elementary(dtype)
        error = np.abs(found[name] - truth) / (floor * rounding.unit(dtype))
        shares[name] = float(error.max() / units)
    return shares


def clipping_moves(removed: int) -> float:
    """How far a record moves the clipped sum of a network, over the bound; the largest found."""
    rng = np.random.default_rng(_SEED)
    shapes = {"in": (784, 128), "bias": (128,), "out": (128, 10), "shift": (10,)}
    parameters = {
        name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
        for name, shape in shapes.items()
    }
    x = rng.normal(size=(256, 784)) * rng.lognormal(0, 3, (256, 1))
    batch = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(rng.integers(0, 10, 256), "int32")}
    clipped = learning.clipped_gradients(perceptron_loss, clip_norm=1.0)

    @jax.jit
    def total(present: jax.Array) -> Any:
        slots = learning.Batch(jnp.arange(256), present, 256)
        found = clipped(parameters, batch, slots)
        return found.value, found.norm_bound

    everybody, bound = total(jnp.ones(256, bool))
    largest = 0.0
    for record in range(removed):
        others, _ = total(jnp.arange(256) != record)
        moved = [
            np.asarray(a, float) - np.asarray(b, float)
            for a, b in zip(jax.tree.leaves(everybody), jax.tree.leaves(others), strict=True)
        ]
        length = np.sqrt(sum(float(np.sum(part**2)) for part in moved))
        largest = max(largest, length / float(bound))
    return largest
