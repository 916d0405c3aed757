"""Random programs, operation by operation, over records of several arrays, and attacks on claims.

Where `random_programs` strings words on one array, this draws operations of a pool of arrays: both
operands private, columns against rows, integers, numbers that nearly cancel, nested calls.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.proving import Ball, Categories
from random_programs import as_released, distance

N = 5
BYTES = (0, 200)
ALL_BOUNDS = {
    "x": (-1, 1), "y": (0.5, 2.0), "ball": Ball(1.5), "kind": Categories((0, 1, 3)),
    "level": Categories((-0.25, 0.5, 0.75)), "byte": BYTES, "flag": (0, 1),
}  # fmt: skip


def specs(names, dtype):
    """The records: arrays of these names."""
    kinds = {
        "x": ((N, 2), dtype), "y": ((N,), dtype), "ball": ((N, 2), dtype), "kind": ((N,), np.int32),
        "level": ((N,), dtype), "byte": ((N,), np.uint8), "flag": ((N,), np.bool_),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(*kinds[name]) for name in names}


def draw(rng, name, count, rows, dtype):
    """Values within bounds: corners and inner points."""
    shape = (count, rows, 2) if name in ("x", "ball") else (count, rows)
    bound = ALL_BOUNDS[name]
    if isinstance(bound, Categories):
        return rng.choice(bound.values, shape).astype(np.int32 if name == "kind" else dtype)
    if name == "flag":
        return rng.random(shape) < 0.5
    corner = rng.random((count, 1) + (1,) * (len(shape) - 2)) < 0.6
    share = np.where(corner, rng.integers(0, 2, shape), rng.random(shape))
    if isinstance(bound, Ball):
        points = 2 * share - 1
        length = np.maximum(1e-6, np.linalg.norm(points, axis=-1, keepdims=True))
        return (bound.radius * points / np.where(corner, length, np.maximum(1, length))).astype(
            dtype
        )
    low, high = bound
    return (low + share * (high - low)).astype(np.uint8 if name == "byte" else dtype)


def pairs(rng, names, count, dtype):
    """Databases, and neighbors in which one record is another one."""
    place = rng.integers(0, N, count)
    first, second = {}, {}
    for name in names:
        first[name] = draw(rng, name, count, N, dtype)
        same = rng.random(count) < 0.3
        first[name][same] = first[name][same][:, :1]
        second[name] = first[name].copy()
        second[name][np.arange(count), place] = draw(rng, name, count, 1, dtype)[:, 0]
    return first, second


UNARY = {
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "square": jnp.square,
    "neg": jnp.negative,
    "exp": lambda v: jnp.exp(jnp.clip(v, -9, 3)),
    "log": lambda v: jnp.log(jnp.abs(v) + 0.1),
    "root": lambda v: jnp.sqrt(jnp.abs(v)),
    "floor": lambda v: jnp.floor(2 * v + 0.5),
    "round": lambda v: jnp.round(3 * v),
    "sign": jnp.sign,
    "half": lambda v: v / 2,
    "bfloat16": lambda v: jnp.clip(v, -9, 9).astype(jnp.bfloat16).astype(v.dtype),
    "float16": lambda v: jnp.clip(v, -99, 99).astype(jnp.float16).astype(v.dtype),
    "third": lambda v: v / 3 * 7,
    "more": lambda v: v + 0.3,
    "bin": lambda v: (jnp.clip(v, -5, 5) * 1.5).astype(jnp.int32).astype(v.dtype),
    "above": lambda v: (v > 0.4).astype(v.dtype),
    "zero": lambda v: (v == 0).astype(v.dtype),
    "clip": lambda v: jnp.clip(v, -0.7, 0.9),
    "nearly cancels": lambda v: (v * 3e3 + 1e4) - 1e4,
    "cancels by a factor": lambda v: (1 + v * 1e-3) * 1e3 - 1e3,
    "cube": lambda v: v**3,
    "inverse": lambda v: 1 / (0.5 + jnp.abs(v)),
    "jitted": lambda v: jax.jit(lambda a: jnp.where(a > 0, a, a * 0.5))(v),
    "remat": lambda v: jax.checkpoint(lambda a: jnp.sin(a) * a)(v),
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
    "turned": lambda v: v.T if v.ndim != 1 else v[::-1],
    "clamp": lambda v: lax.clamp(v.dtype.type(0.5), v, v.dtype.type(0.2)),
    "byte": lambda v: jnp.clip(v * 9 + 20, 0, 255).astype(jnp.uint8).astype(v.dtype),
}
REDUCTIONS = {
    "sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "variance": jnp.var,
    "softmax": jax.nn.softmax, "logsumexp": jax.nn.logsumexp, "median": jnp.median,
    "cumsum": jnp.cumsum, "sort": jnp.sort, "flip": jnp.flip, "deviation": jnp.std,
    "log_softmax": jax.nn.log_softmax,
}  # fmt: skip
BINARY = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum,
    "min": jnp.minimum, "less": lambda a, b: (a < b).astype(a.dtype),
    "equal": lambda a, b: (a == b).astype(a.dtype),
    "div": lambda a, b: a / (1 + jnp.abs(b)),
    "where": lambda a, b: jnp.where(a > 0.1, b, a),
    "three": lambda a, b: lax.select_n(
        jnp.clip(a - b, 0, 2).astype(jnp.int32), *jnp.broadcast_arrays(a, b, a - b)
    ),
    "xor": lambda a, b: ((a > 0) ^ (b > 0.2)).astype(a.dtype),
}  # fmt: skip


KINDS = ("unary", "reduce", "binary", "product", "move")
MOVES = ("roll", "part", "join", "reshape", "counts", "one-hot", "scan", "take", "repeat")


def pick(rng, pool):
    """One of the last arrays, mostly."""
    return int(len(pool) - 1 - min(len(pool) - 1, rng.geometric(0.45) - 1))


def program(rng, names, dtype, steps=7):
    """A target, and what it is made of. Choices are made once; shapes are those of the trace."""
    seed = int(rng.integers(2**31))
    said = []

    def target(records):
        own = np.random.default_rng(seed)
        said.clear()
        pool = [records[name].astype(dtype) for name in names]
        for _ in range(own.integers(2, steps + 1)):
            pool.append(step(own, pool, said))
        return output(own, pool, said)

    return said, target


def step(rng, pool, said):
    """One more array, of few numbers."""
    v = pool[pick(rng, pool)]
    kind = rng.choice(KINDS, p=[0.34, 0.2, 0.24, 0.09, 0.13])
    if kind == "reduce" and v.ndim:
        name, axis = str(rng.choice(list(REDUCTIONS))), int(rng.integers(0, v.ndim))
        said.append(f"{name}({axis})")
        return REDUCTIONS[name](v, axis=axis)
    if kind == "binary":
        w, name = pool[int(rng.integers(len(pool)))], str(rng.choice(list(BINARY)))
        said.append(name)
        return BINARY[name](*meeting(rng, v, w))
    if kind == "product":
        return product(rng, v, pool[int(rng.integers(len(pool)))], said)
    if kind == "move" and v.ndim:
        return moved(rng, v, said)
    name = str(rng.choice(list(UNARY)))
    said.append(name)
    return UNARY[name](v)


def meeting(rng, v, w):
    """Two arrays that broadcast, perhaps rows against columns."""
    if v.ndim and w.ndim and rng.random() < 0.2 and v.size * w.size <= 60:
        return v.reshape(-1, 1), w.reshape(1, -1)
    for a, b in ((v, w), (v, w[..., None] if w.ndim else w), (v[..., None] if v.ndim else v, w)):
        try:
            np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            continue
        return a, b
    return v, w.sum()


def product(rng, v, w, said):
    """Contractions, with both operands private."""
    said.append("product")
    if v.ndim == 2 and w.ndim == 2 and v.shape[0] == w.shape[0] and rng.random() < 0.5:
        return v.T @ w
    if v.ndim == 2 and w.ndim == 2 and v.shape == w.shape:
        return jnp.einsum("ni,ni->n", v, w) if rng.random() < 0.5 else v @ w.T
    if v.ndim == 2 and w.ndim == 1 and w.shape[0] in v.shape:
        return v @ w if v.shape[1] == w.shape[0] else w @ v
    if v.ndim == 2 and w.ndim == 1 and rng.random() < 0.3:
        first, second = (jnp.clip(a, -9, 9).astype(jnp.bfloat16) for a in (v, v[:, :1] + 0.5))
        return jnp.dot(first.T, second, preferred_element_type=jnp.float32).astype(v.dtype)
    if v.ndim == 2:
        matrix = np.round(rng.normal(size=(v.shape[1], 2)) * 2) / 2
        return v @ jnp.asarray(matrix, v.dtype)
    return v * w.sum()


def moved(rng, v, said):
    """Entries that move, places that records choose, loops."""
    axis = int(rng.integers(0, v.ndim))
    n = v.shape[axis]
    name = str(rng.choice(MOVES))
    said.append(f"{name}({axis})")
    if name == "roll":
        return jnp.roll(v, 1, axis=axis)
    if name == "part":
        start, stop = sorted(rng.choice(n + 1, 2, replace=False)) if n else (0, 0)
        return lax.slice_in_dim(v, int(start), int(stop), axis=axis)
    if name == "join":
        return jnp.concatenate([v, -v], axis) if v.size < 60 else v
    if name == "reshape":
        return v.reshape(*v.shape[:axis], 1, *v.shape[axis:]).squeeze(axis) * 1
    if name == "repeat":
        return jnp.repeat(v, 2, axis=axis) if v.size < 60 else v
    flat = v.reshape(v.shape[0], -1)
    places = jnp.clip(jnp.floor(flat[:, 0] * 2 + 1), 0, 3).astype(jnp.int32)
    if name == "counts":
        return jnp.zeros(4, v.dtype).at[places].add(jnp.tanh(flat[:, -1]))
    if name == "one-hot":
        return jax.nn.one_hot(places, 4, dtype=v.dtype)
    if name == "take":
        return jnp.array([0.5, -1.0, 2.0, 0.0], v.dtype)[places]
    return lax.scan(lambda c, row: (jnp.tanh(c + row), c * row), jnp.zeros_like(flat[0]), flat)[1]


def output(rng, pool, said):
    """The last array, by itself, or with another one."""
    last = pool[-1]
    end = str(rng.choice(["all", "mean", "sum", "two"]))
    said.append(end)
    if end == "two":
        return {"a": last.sum(), "b": pool[int(rng.integers(len(pool)))]}
    return {"all": lambda v: v, "mean": jnp.mean, "sum": jnp.sum}[end](last)


def best_attack(target, rng, names, norm, dtype, count=400, rounds=2):
    """The largest distance found: random and corner pairs, then pairs near the best."""
    run = as_released(target, specs(names, dtype))
    first, second = pairs(rng, names, count, dtype)
    found = distance(run(first), run(second), norm)
    for _ in range(rounds):
        elite = np.resize(np.argsort(found)[-count // 10 :], count)
        new = [{k: v[elite].copy() for k, v in side.items()} for side in (first, second)]
        other, _ = pairs(rng, names, count, dtype)
        row = rng.integers(0, N, count)
        for name in names:  # One row of both becomes another one; the pair stays a pair.
            change = np.where(rng.random(count) < 0.7)[0]
            alike = (new[0][name] == new[1][name]).reshape(count, N, -1).all(-1)
            change = change[alike[change, row[change]]]
            for side in new:
                side[name][change, row[change]] = other[name][change, row[change]]
        moved_by = distance(run(new[0]), run(new[1]), norm)
        keep = moved_by > found[elite]
        first, second = (
            {
                k: np.where(keep.reshape(-1, *(1,) * (v.ndim - 1)), v, old[k][elite])
                for k, v in now.items()
            }
            for now, old in zip(new, (first, second), strict=True)
        )
        found = np.maximum(moved_by, found[elite])  # NaN stays.
    return float(np.max(found))
