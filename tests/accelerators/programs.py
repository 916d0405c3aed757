"""The programs of the engine, with the shapes of their arguments on devices that need not exist."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import ShapeDtypeStruct as Spec
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import dpjax
from dpjax import learning, queries, targets
from dpjax._running._devices import AXIS, Layout, within
from dpjax.sensitivity import _probes
from dpjax.sensitivity._chunks import Block, _compiled_selection, _compiled_step, probing_of
from dpjax.sensitivity._order_statistics import _select
from dpjax.sensitivity._pairs import RandomPair
from dpjax.sensitivity._plan import pairs_in_a_chunk

_FEATURES = 20
_MANY = 2**20
_SHARED, _SPREAD = PartitionSpec(), PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Call:
    """A jitted function and what it is called with."""

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: Mesh | None = None

    def trace(self) -> Any:
        """The traced program, which no device has seen."""
        context = within(self.mesh) if self.mesh is not None else contextlib.nullcontext()
        with context:
            return self.function.trace(*self.arguments, **self.static)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Devices that programs are made for."""

    devices: Sequence[Any]

    @property
    def one(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.devices[0])

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices[:4]), (AXIS,))

    def on(self, tree: Any, sharding: Any = None) -> Any:
        sharding = sharding or self.one
        return jax.tree.map(lambda x: Spec(x.shape, x.dtype, sharding=sharding), tree)

    def key(self, *shape: int) -> Any:
        return self.on(Spec(shape, dpjax.random.seeded_key(0).dtype))

    def threefry(self, *shape: int) -> Any:
        return self.on(Spec(shape, jax.random.key(0).dtype))


def _classified(key: jax.Array, n: int) -> Any:
    kx, ky = jax.random.split(key)
    x = jax.random.normal(kx, (n, _FEATURES))
    return {"x": x, "y": jnp.sign(x[:, 0] - x[:, 1] + jax.random.logistic(ky, (n,)))}


def _separated(key: jax.Array, n: int, dims: int) -> Any:
    kx, ky = jax.random.split(key)
    positive = jax.random.bernoulli(ky, shape=(n,))
    center = jnp.where(positive, 0.2, 0.8)[:, None]
    x = jnp.clip(center + 0.1 * jax.random.normal(kx, (n, dims)), 0, 1)
    return {"x": x, "y": jnp.where(positive, 1.0, -1.0)}


def _logistic_loss(weights: jax.Array, database: Any) -> jax.Array:
    margins = database["y"] * (database["x"] @ weights)
    return jnp.mean(jax.nn.softplus(-margins)) + 0.005 * jnp.sum(weights**2)


def _solved(database: Any) -> jax.Array:
    x, y = database["x"], database["y"]
    return jnp.linalg.solve(x.T @ x / len(y) + 0.1 * jnp.eye(_FEATURES), x.T @ y / len(y))


@functools.cache
def samplings() -> dict[str, tuple[Any, Any, int, str, int]]:
    """Target, oracle, n, norm and m."""
    normal = lambda key, n: jax.random.normal(key, (n,))  # noqa: E731
    kde = targets.kernel_density_on_lattice(bandwidth=0.1, degree=10, dims=1)
    uniform = dpjax.oracles.independent(lambda key: jax.random.uniform(key, (1,)))
    alone = dpjax.oracles.independent(jax.random.normal)
    training = targets.optax_training(
        _logistic_loss, jnp.zeros(_FEATURES), optax.sgd(2.0), steps=200
    )
    svm = targets.linear_svm(regularization=1 / 3000, steps=8)
    newton = targets.logistic_regression(regularization=0.01)
    ridge = targets.ridge_regression(regularization=0.1)
    summed = targets.summable(lambda x: x, average=True)
    dense = lambda database: kde(database)  # noqa: E731
    return {
        "mean": (jnp.mean, normal, 1000, "l1", 10**7),
        "mean by sums": (summed, alone, 1000, "l1", 10**7),
        "density": (dense, uniform, 5000, "linf", 50_000),
        "density by sums": (kde, uniform, 5000, "linf", 50_000),
        "SVM of 8": (svm, functools.partial(_separated, dims=8), 1000, "l1", 1500),
        "SVM of 64": (svm, functools.partial(_separated, dims=64), 1000, "l1", 1500),
        "training by optax": (training, _classified, 1000, "l2", 1000),
        "logistic regression": (newton, _classified, 1000, "l2", 1000),
        "ridge regression": (ridge, _classified, 1000, "l2", 10**5),
        "linear solve": (_solved, _classified, 1000, "l2", 10**5),
    }


def _pair(name: str) -> tuple[RandomPair, int]:
    target, oracle, n, norm, m = samplings()[name]
    key = jax.random.key(0)
    return RandomPair.trace(key, target, oracle, n=n, norm=norm, positions="last"), m


def _chunk(name: str, place: _Place, many: bool = False, probes: int = 0) -> Call:
    pair, m = _pair(name)
    size = pairs_in_a_chunk(pair, m, None, place.devices[0])
    count = 4 if many else 1
    layout = Layout(tuple(place.devices[:count]), m, size)
    mesh = place.mesh if many else None
    spread, shared = (NamedSharding(mesh, x) for x in (_SPREAD, _SHARED)) if many else (None, None)
    rows = Spec((count * (layout.block + 1), size), pair.distance_dtype)
    arguments = (
        place.on(Block(rows, Spec((count,), pair.distance_dtype)), spread),
        place.on(Spec((), jax.random.key(0).dtype), shared),
        place.on(Spec((), jnp.uint32), shared),
        place.on(Spec((count, 3), jnp.uint32), spread),
    )
    probing = probing_of(pair, size, probes)
    if probing:
        arguments += (place.on(Spec((probing.rows,), jnp.int32)),)
    static = {"pair": pair, "size": size, "mesh": mesh, "probing": probing}
    return Call(_compiled_step, arguments, static, mesh)


def _probe(place: _Place) -> Call:
    pair, _ = _pair("mean by sums")
    static = {"pair": pair, "kept": 8, "devices": (None,)}
    numbers = place.on(Spec((1, 2, 100), jnp.uint32))
    return Call(_probes._compiled_probes, (place.threefry(), numbers), static)


def _selection(place: _Place) -> Call:
    spec = Spec((10**7,), jnp.float32)
    return Call(_select, place.on((spec, Spec((), jnp.uint32))))


def _spread_selection(place: _Place) -> Call:
    spread, shared = (NamedSharding(place.mesh, x) for x in (_SPREAD, _SHARED))
    block = Block(Spec((160, 65536), jnp.float32), Spec((4,), jnp.float32))
    arguments = place.on(block, spread), place.on(Spec((), jnp.uint32), shared)
    return Call(_compiled_selection, arguments, {"mesh": place.mesh}, place.mesh)


def _release(mechanism: Any, shape: tuple[int, ...], dtype: Any, place: _Place) -> Call:
    function = jax.jit(lambda key, x: mechanism(key, x).value)
    return Call(function, (place.key(), place.on(Spec(shape, dtype))))


def _releases_of_many_keys(mechanism: Any, place: _Place) -> Call:
    function = jax.jit(jax.vmap(lambda key, x: mechanism(key, x).value))
    return Call(function, (place.key(10**6), place.on(Spec((10**6,), jnp.float32))))


def _histogram(place: _Place) -> Call:
    query = queries.histogram_query(10**6)
    private = dpjax.privatize(query, dpjax.laplace(query.sensitivity(), epsilon=1.0))
    function = jax.jit(lambda key, x: private(key, x).value)
    return Call(function, (place.key(), place.on(Spec((10**6,), jnp.int32))))


def _mwem(place: _Place) -> Call:
    names = [f"a{i}" for i in range(10)]
    pairs = [(a, b) for a in names for b in names if a < b]
    workload = queries.marginal_workload(dict.fromkeys(names, 2), pairs)
    mechanism = queries.mwem(workload, 1.0, rounds=10, records=10_000)
    return _release(mechanism, workload.shape, jnp.int32, place)


def perceptron_loss(parameters: Any, example: Any) -> jax.Array:
    """The cross-entropy of a network with one hidden layer on one example."""
    hidden = jax.nn.relu(example["x"] @ parameters["in"] + parameters["bias"])
    scores = hidden @ parameters["out"] + parameters["shift"]
    return jax.nn.logsumexp(scores) - scores[example["y"]]


def _private_step(place: _Place) -> Call:
    clipped = learning.clipped_gradients(perceptron_loss, clip_norm=1.0)
    noise = learning.gaussian_noise(
        dpjax.random.seeded_key(0), noise_multiplier=1.0, batch_size=256
    )
    optimizer = optax.chain(noise, optax.sgd(0.1))
    shapes = {"in": (784, 128), "bias": (128,), "out": (128, 10), "shift": (10,)}
    parameters = {name: Spec(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {"x": Spec((256, 784), jnp.float32), "y": Spec((256,), jnp.int32)}

    def step(parameters: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(clipped(parameters, batch, True), state, parameters)
        return optax.apply_updates(parameters, updates), state

    # A training begins outside of programs, so its first state is an array of this machine.
    state = optimizer.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters))
    return Call(jax.jit(step), place.on((parameters, state, batch)))


QUICK = (
    *("chunk: mean", "chunk: mean, 4 devices", "chunk: density by sums", "chunk: mean by sums"),
    *("order statistic", "order statistic, 4 devices", "Laplace, vector"),
)


def programs(devices: Sequence[Any]) -> dict[str, Callable[[], Call]]:
    """How to make each program for devices."""
    place, part = _Place(devices), functools.partial
    laplace, gaussian = dpjax.laplace(1.0, 1.0), dpjax.gaussian(1.0, 1.0, 1e-5)
    vector = (_MANY,), jnp.float32, place
    return {
        **{f"chunk: {name}": part(_chunk, name, place) for name in samplings()},
        "chunk: mean, 4 devices": part(_chunk, "mean", place, many=True),
        "probes: mean": part(_chunk, "mean", place, probes=100),
        "probes: mean by sums": part(_probe, place),
        "order statistic": part(_selection, place),
        "order statistic, 4 devices": part(_spread_selection, place),
        "Laplace, scalar": part(_release, laplace, (), jnp.float32, place),
        "Laplace, vector": part(_release, laplace, *vector),
        "Gaussian, vector": part(_release, gaussian, *vector),
        "exponential mechanism": part(_release, dpjax.exponential(1.0, 1.0), *vector),
        "Laplace, many keys": part(_releases_of_many_keys, laplace, place),
        "histogram": part(_histogram, place),
        "MWEM": part(_mwem, place),
        "DP-SGD step": part(_private_step, place),
    }
