"""A search for two neighboring databases that are as far apart as any within bounds."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Norm, Target
from dpjax._exact._numerics import compute_dtype
from dpjax._tracing._programs import Program
from dpjax.random._facade import sampling_key
from dpjax.sensitivity._norms import distance, norm_function, resolution

# Integers are drawn by products of floats and int32, so their bounds stay below.
_LARGEST_INTEGER = 2**30


class RecordBound(Protocol):
    """The values that one array of a record may take, made of uniform numbers in [0, 1)."""

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Values from the inside."""
        ...

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Values at the ends."""
        ...

    def projected(self, records: jax.Array) -> jax.Array:
        """The closest values within bounds, for arrays of floats."""
        ...

    def opposite(self, records: jax.Array) -> jax.Array:
        """The records on the other side of the middle."""
        ...

    def width(self) -> float:
        """How far apart two values of a coordinate may be."""
        ...


@dataclasses.dataclass(frozen=True)
class Ball:
    """Records whose l2 norm is at most a radius.

    Attributes:
        radius: above 0.

    Formal guarantees:
        None of its own: it names a set of records, for `dpjax.auditing.adversarial_pair`.
    """

    radius: float

    def __post_init__(self) -> None:
        _checks.positive("radius", self.radius)

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """From a cube; what sticks out is moved to the ball."""
        return self.projected(self.radius * (2 * uniform - 1).astype(dtype))

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """At the full length, often nearly along an axis."""
        direction = (2 * uniform - 1) ** 3
        return self.projected((direction * (self.radius / _norms(direction))).astype(dtype))

    def projected(self, records: jax.Array) -> jax.Array:
        """Records outside are scaled down, to a hair inside the ball."""
        wide = records.astype(compute_dtype(records.dtype))
        # In radii, squares neither overflow nor underflow.
        norms = _norms(wide / self.radius)
        # A narrow dtype rounds the result. The sum of squares and the products round before.
        inward = 1 - _eps(records) - (_size(records) + 10) * _eps(wide)
        return jnp.where(norms > inward, wide * (inward / norms), wide).astype(records.dtype)

    def opposite(self, records: jax.Array) -> jax.Array:
        """Across the origin."""
        return -records

    def width(self) -> float:
        """The diameter."""
        return 2 * self.radius


@dataclasses.dataclass(frozen=True)
class Interval:
    """Coordinates between two numbers, both included; for integers any code between them."""

    low: float
    high: float

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Uniform numbers."""
        if jnp.issubdtype(dtype, jnp.floating):
            return self.projected((self.low + self.width() * uniform).astype(dtype))
        steps = jnp.floor(uniform * (self.width() + 1)).astype(int)
        return (int(self.low) + jnp.minimum(steps, int(self.width()))).astype(dtype)

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """The two ends; for integers any of them."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.inside(uniform, dtype)
        return jnp.where(uniform < 0.5, self.low, self.high).astype(dtype)

    def projected(self, records: jax.Array) -> jax.Array:
        """Clipped."""
        return jnp.clip(records, self.low, self.high)

    def opposite(self, records: jax.Array) -> jax.Array:
        """As far from the other end."""
        if jnp.issubdtype(records.dtype, jnp.floating):
            return self.projected((self.low + self.high) - records)
        return (int(self.low) + int(self.high) - records.astype(int)).astype(records.dtype)

    def width(self) -> float:
        """The length of the interval."""
        return self.high - self.low


def _eps(array: jax.Array) -> float:
    return float(jnp.finfo(array.dtype).eps)


def _size(records: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Coordinates of a record."""
    return math.prod(records.shape[1:])


def _norms(records: jax.Array) -> jax.Array:
    """The l2 norm of each record, above 0."""
    axes = tuple(range(1, records.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(records), axis=axes, keepdims=True)) + 1e-30


def record_bounds(records: PyTree, bounds: PyTree) -> PyTree:
    """A bound for each array of `records`: one for all of them, or a tree of bounds like theirs.

    A bound is a pair (low, high) or a `Ball`.
    """
    is_bound = lambda one: isinstance(one, Ball | tuple) and not _holds_bounds(one)  # noqa: E731
    if is_bound(bounds):
        return jax.tree.map(lambda leaf: _bound(leaf, bounds), records)
    try:
        return jax.tree.map(
            lambda bound, leaf: _bound(leaf, bound), bounds, records, is_leaf=is_bound
        )
    except ValueError as error:
        if "bounds" in str(error):
            raise
        raise ValueError(
            f"bounds must be one bound, or a tree of bounds like the records, got {bounds}"
        ) from error


def _holds_bounds(candidate: object) -> bool:
    """Whether a tuple is a tree of bounds and not a pair of numbers."""
    return isinstance(candidate, tuple) and any(isinstance(one, tuple | Ball) for one in candidate)


def _bound(leaf: jax.ShapeDtypeStruct, bound: object) -> RecordBound:
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    if isinstance(bound, Ball):
        if not floats:
            raise ValueError(f"bounds: a Ball is for floats, got {leaf.dtype}")
        info = jnp.finfo(leaf.dtype)
        # Subnormal numbers would round out of a smaller ball.
        if not _size(leaf) * float(info.tiny) <= bound.radius <= float(info.max):
            raise ValueError(f"bounds must be finite in {leaf.dtype}, and normal, got {bound}")
        return bound
    if not isinstance(bound, tuple) or len(bound) != 2:
        raise ValueError(f"bounds must be pairs (low, high) or balls, got {_checks.shown(bound)}")
    low, high = (_checks.finite("bounds", number) for number in bound)
    if floats:
        low, high = _inward(low, leaf.dtype, math.inf), _inward(high, leaf.dtype, -math.inf)
    elif not (float(low).is_integer() and float(high).is_integer()):
        raise ValueError(f"bounds of integers must be integers, got {bound}")
    else:
        known = (0, 1) if leaf.dtype == bool else _range_of_integers(leaf.dtype)
        if low < known[0] or high > known[1]:
            raise ValueError(f"bounds of {leaf.dtype} must be from {known[0]} to {known[1]}")
    if not low < high:
        raise ValueError(f"bounds must have low < high in {leaf.dtype}, got {bound}")
    return Interval(low, high)


def _range_of_integers(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return max(int(info.min), -_LARGEST_INTEGER), min(int(info.max), _LARGEST_INTEGER)


def _inward(number: float, dtype: np.dtype, toward: float) -> float:
    """The first number of a dtype in a direction."""
    if abs(number) > float(jnp.finfo(dtype).max):
        raise ValueError(f"bounds must be finite in {dtype}, got {number}")
    near = jnp.asarray(number, dtype)
    if float(near) != number and (float(near) < number) == (toward > 0):
        near = jnp.nextafter(near, jnp.asarray(toward, dtype))
    return float(near)


# The learning rate falls from this share of the width of the bounds by this factor.
_RATE, _FALL = 0.1, 1e-3
# Bounds the relative error of a norm of many coordinates.
_ERROR_OF_NORM = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class AdversarialPair:
    """Two neighboring databases that are far apart.

    Attributes:
        distance: how far apart at least, in the norm of the search.
        database: within bounds, a pytree with leading axis n.
        neighbor: the same but for one record.

    Formal guarantees:
        The global sensitivity of the target, as it is computed, is at least `distance` for
        databases within the bounds. That says nothing of other pairs: no search shows that a
        sensitivity is small.
    """

    distance: float
    database: Database
    neighbor: Database

    def __repr__(self) -> str:
        return f"AdversarialPair(global sensitivity at least {self.distance:.6g})"


def adversarial_pair(
    key: Key,
    target: Target,
    records: PyTree,
    *,
    bounds: PyTree,
    norm: Norm,
    steps: int = 200,
    restarts: int = 64,
) -> AdversarialPair:
    """Searches for the pair of neighboring databases whose target values are farthest apart.

    Climbs log ||f(D) - f(D')|| over the database and the record that replaces one of its own:
    projected Adam where f has a gradient, and random changes of a few records, which also reach
    integers. All restarts run in one batched program.

    Args:
        key: a typed key.
        target: pure JAX, of a pytree of arrays with leading axis n.
        records: shapes and dtypes of a database: a pytree of `jax.ShapeDtypeStruct`, or of arrays,
            whose numbers are not looked at.
        bounds: what each coordinate of a record may be: `(low, high)`, both included, for all
            arrays, or a tree like the records of such pairs and of `Ball(radius)`, which bounds the
            l2 norm of a record.
        norm: as for `dpjax.sample_sensitivity`.
        steps: of the search, at least 1.
        restarts: databases to start from, at least 1.

    Returns:
        An `AdversarialPair`. Its distance is computed anew on the two databases alone, and reduced
        by a unit in the last place of every coordinate of both values.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if arrays have no common leading axis, bounds do not fit to them, or a number is
            out of range.

    Formal guarantees:
        A lower bound on the global sensitivity under replace-one. It is never an upper bound, and
        it is no release: nothing private goes in.

    Source:
        Projected gradient ascent with the steps of Adam, Kingma and Ba (2015).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> records = jax.ShapeDtypeStruct((50,), jnp.float32)
        >>> dpjax.auditing.adversarial_pair(
        ...     jax.random.key(0), jnp.mean, records, bounds=(0, 1), norm="l1"
        ... )
        AdversarialPair(global sensitivity at least 0.0199997)
    """
    key = sampling_key(key)
    specs, n = _shapes(records)
    limits = jax.tree.leaves(record_bounds(specs, bounds), is_leaf=_is_limit)
    norm_function(norm)
    steps = _checks.integer("steps", steps, least=1)
    restarts = _checks.integer("restarts", restarts, least=1)
    program = Program.trace("target", target, specs)
    search = _Search(program, tuple(limits), norm, n)
    keys = jax.random.split(key, restarts)
    found, places, _ = jax.jit(jax.vmap(functools.partial(_climb, search, steps)))(keys)
    return _best(search, found, places)


class _Pair(NamedTuple):
    """The arrays of n + 1 records, the last of which replaces the one at `place`."""

    arrays: list[jax.Array]
    place: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    """What does not change during a search."""

    program: Program
    limits: tuple[RecordBound, ...]
    norm: Norm
    n: int

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """What a pair consists of: n + 1 records."""
        leaves = self.program.inputs.leaves
        return [jax.ShapeDtypeStruct((self.n + 1, *x.shape[1:]), x.dtype) for x in leaves]

    def databases(self, arrays: list[jax.Array], place: jax.Array) -> tuple[Database, Database]:
        """The two databases of a pair."""
        structure = self.program.inputs.structure
        first = [array[: self.n] for array in arrays]
        second = [
            jnp.asarray(a).at[place].set(b[self.n]) for a, b in zip(first, arrays, strict=True)
        ]
        (one,) = jax.tree.unflatten(structure, first)
        (other,) = jax.tree.unflatten(structure, second)
        return one, other

    def log_distance(self, arrays: list[jax.Array], place: jax.Array) -> jax.Array:
        """The logarithm of the distance of a pair; -inf where nothing moves or it is no number."""
        one, other = map(self.program, self.databases(arrays, place))
        moved = distance(self.norm, one, other)
        return jnp.where((moved > 0) & jnp.isfinite(moved), jnp.log(moved), -jnp.inf)


def _shapes(records: PyTree) -> tuple[PyTree, int]:
    specs = _checks.real_shapes("records", records)
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(specs)}
    if len(sizes) != 1 or () in sizes or (0,) in sizes:
        raise ValueError(
            f"records must be arrays with a common leading axis of n, got {TreeSpec.of(specs)}"
        )
    ((n,),) = sizes
    return specs, n


def _is_limit(candidate: object) -> bool:
    return hasattr(candidate, "projected")


def _climb(search: _Search, steps: int, key: Key) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The best pair that one restart finds."""
    key_start, key_steps = jax.random.split(key)
    arrays, place = _start(search, key_start)
    floats = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
    slope = _slope(search, arrays, place, floats)
    zeros = [jnp.zeros_like(a) for a, is_float in zip(arrays, floats, strict=True) if is_float]

    def step(carry: PyTree, inputs: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
        arrays, height, best, highest, state = carry
        key, t = inputs
        if slope is not None:
            directions, state = _adam(slope(arrays, place), *state)
            rate = _RATE * _FALL**t
            arrays = _moved(search, arrays, floats, directions, rate)
            height = search.log_distance(arrays, place)
        other = _changed(search, key, arrays, place)
        other_height = search.log_distance(other, place)
        better = other_height > height
        arrays = [jnp.where(better, b, a) for a, b in zip(arrays, other, strict=True)]
        height = jnp.maximum(height, other_height)
        best = [jnp.where(height > highest, a, b) for a, b in zip(arrays, best, strict=True)]
        return (arrays, height, best, jnp.maximum(height, highest), state), None

    height = search.log_distance(arrays, place)
    inputs = jax.random.split(key_steps, steps), jnp.linspace(0.0, 1.0, steps)
    carry, _ = jax.lax.scan(step, (arrays, height, arrays, height, (zeros, zeros)), inputs)
    return carry[2], place, carry[3]


def _start(search: _Search, key: Key) -> _Pair:
    """A pair from the inside, of extremes, of two kinds of records, or of one kind and another."""
    choices, uniforms = _uniforms(search, key, choices=2, sets=2)
    place, kind = (choices * jnp.array([search.n, 4.0])).astype(int)
    arrays: list[jax.Array] = []
    for limit, spec, (u, v) in zip(search.limits, search.arrays(), uniforms, strict=True):
        inside, extreme = limit.inside(u, spec.dtype), limit.extreme(v, spec.dtype)
        # The record at `place` leaves the first kind of records, and joins the second.
        first, second = extreme[:1], extreme[1:2]
        second = jnp.where(jnp.all(first == second), limit.opposite(first), second)
        rows = jnp.arange(search.n + 1).reshape((-1, *(1 for _ in spec.shape[1:])))
        two_kinds = jnp.where(rows <= place, first, second)
        one_kind = jnp.where(rows < search.n, first, second)
        arrays.append(jnp.stack([inside, extreme, two_kinds, one_kind])[kind])
    return _Pair(arrays, place)


def _uniforms(
    search: _Search, key: Key, *, choices: int, sets: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Uniform numbers: some for choices, and `sets` for every entry of each array.

    One call draws them all, for each call of a generator takes long to compile.
    """
    specs = search.arrays()
    sizes = [sets * spec.size for spec in specs]
    drawn = jax.random.uniform(key, (choices + sum(sizes),))
    ends = np.cumsum([choices, *sizes])
    parts = [drawn[a:b] for a, b in itertools.pairwise(ends)]
    shaped = [p.reshape(sets, *spec.shape) for p, spec in zip(parts, specs, strict=True)]
    return drawn[:choices], shaped


def _slope(
    search: _Search, arrays: list[jax.Array], place: jax.Array, floats: list[bool]
) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]] | None:
    """The direction that lowers the height, for float arrays; None where there is no gradient."""
    if not any(floats):
        return None

    def depth(moving: list[jax.Array], arrays: list[jax.Array], place: jax.Array) -> jax.Array:
        rest = iter(moving)
        whole = [next(rest) if is_float else a for a, is_float in zip(arrays, floats, strict=True)]
        return -search.log_distance(whole, place)

    def slope(arrays: list[jax.Array], place: jax.Array) -> list[jax.Array]:
        moving = [a for a, is_float in zip(arrays, floats, strict=True) if is_float]
        found = jax.grad(depth)(moving, arrays, place)
        return [jnp.where(jnp.isfinite(x), x, 0) for x in found]

    try:
        jax.eval_shape(slope, arrays, place)
    except (TypeError, ValueError, NotImplementedError):  # A loop, or code on the host.
        return None
    return slope


def _adam(
    slopes: list[jax.Array], means: list[jax.Array], squares: list[jax.Array]
) -> tuple[list[jax.Array], tuple[list[jax.Array], list[jax.Array]]]:
    """A direction with steps of about 1 in every coordinate, and the state."""
    means = [0.9 * m + 0.1 * g for m, g in zip(means, slopes, strict=True)]
    squares = [0.99 * s + 0.01 * g * g for s, g in zip(squares, slopes, strict=True)]
    directions = [m / (jnp.sqrt(s) + 1e-30) for m, s in zip(means, squares, strict=True)]
    return directions, (means, squares)


def _moved(
    search: _Search,
    arrays: list[jax.Array],
    floats: list[bool],
    directions: list[jax.Array],
    rate: jax.Array,
) -> list[jax.Array]:
    """A step of gradient ascent, back within bounds."""
    rest = iter(directions)
    return [
        limit.projected(a - (rate * limit.width()).astype(a.dtype) * next(rest)) if is_float else a
        for limit, a, is_float in zip(search.limits, arrays, floats, strict=True)
    ]


def _changed(
    search: _Search, key: Key, arrays: list[jax.Array], place: jax.Array
) -> list[jax.Array]:
    """Other records in the place of a few: from the inside, extreme, copies, or close by."""
    rows = jnp.arange(search.n + 1)
    choices, uniforms = _uniforms(search, key, choices=4 + 2 * len(rows), sets=1)
    (share, few, kind, size), of_rows = choices[:4], choices[4:].reshape(2, -1)
    # From one record to all of them, few more often; half of the time of the two that differ.
    either = (rows == place) | (rows == search.n)
    share = jnp.where(few < 0.5, jnp.where(either, 0.75, 0.0), jnp.maximum(share**3, 1 / len(rows)))
    which = of_rows[0] < share
    source = (of_rows[1] * len(rows)).astype(int)
    changed: list[jax.Array] = []
    for limit, array, (u,) in zip(search.limits, arrays, uniforms, strict=True):
        inside, extreme = limit.inside(u, array.dtype), limit.extreme(u, array.dtype)
        close = inside
        if jnp.issubdtype(array.dtype, jnp.floating):
            away = 10 ** (-3 * size) * limit.width() * (2 * u - 1)
            close = limit.projected(array + away.astype(array.dtype))
        new = jnp.stack([inside, extreme, array[source], close])[(4 * kind).astype(int)]
        mask = which.reshape((-1, *(1 for _ in array.shape[1:])))
        changed.append(jnp.where(mask, new, array))
    return changed


def _best(search: _Search, found: list[jax.Array], places: jax.Array) -> AdversarialPair:
    """The farthest pair, measured on each database alone: a batch may round differently."""
    alone = jax.jit(search.program)
    heights = jax.jit(jax.vmap(search.log_distance))(found, places)
    best = int(jnp.argmax(heights))
    one, other = search.databases([array[best] for array in found], places[best])
    values = alone(one), alone(other)
    moved = float(distance(search.norm, *values)) * (1 - _ERROR_OF_NORM)
    if not (math.isfinite(moved) and math.isfinite(heights[best])):
        moved = 0.0  # A value that is no number shows nothing.
    hidden = sum(float(resolution(search.norm, value)) for value in values)
    return AdversarialPair(max(0.0, moved - hidden), *jax.device_get((one, other)))
