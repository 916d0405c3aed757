"""Searches for two neighboring databases whose values are as far apart as possible."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._core._bounds import Ball
from dpjax._core._types import Database, Key, PyTree
from dpjax._core._values import Norm, Target
from dpjax._exact._numerics import compute_dtype, is_float
from dpjax._tracing._programs import Program
from dpjax.random._keys import sampling_key
from dpjax.sensitivity._norms import distance, norm_function, resolution

# Integers are drawn by multiplying floats and casting to int32, which limits their magnitude.
_LARGEST_INTEGER = 2**30


@dataclasses.dataclass(frozen=True)
class _IntervalSearch:
    """Makes coordinates (floats or integers) in a closed interval, for the search."""

    low: float
    high: float

    def inside(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Maps uniform numbers to coordinates that are uniform in the interval."""
        if jnp.issubdtype(dtype, jnp.floating):
            return self.projected((self.low + self.width() * uniform).astype(dtype))
        steps = jnp.floor(uniform * (self.width() + 1)).astype(int)
        return (int(self.low) + jnp.minimum(steps, int(self.width()))).astype(dtype)

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Maps uniform numbers to the two ends of the interval, or to any integers in it.

        Integers may be codes of categories, for which the two ends are not special.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.inside(uniform, dtype)
        return jnp.where(uniform < 0.5, self.low, self.high).astype(dtype)

    def projected(self, records: jax.Array) -> jax.Array:
        """Clips coordinates to the interval."""
        return jnp.clip(records, self.low, self.high)

    def opposite(self, records: jax.Array) -> jax.Array:
        """Returns records mirrored at the middle of the interval."""
        if is_float(records):
            return self.projected((self.low + self.high) - records)
        return (int(self.low) + int(self.high) - records.astype(int)).astype(records.dtype)

    def width(self) -> float:
        return self.high - self.low


class _BallSearch(_IntervalSearch):
    """Makes records of floats whose l2 norm is at most a radius, for the search.

    `inside` draws records in a cube, and scales them down if they are outside of the ball.
    """

    def __init__(self, radius: float) -> None:
        super().__init__(-radius, radius)

    def extreme(self, uniform: jax.Array, dtype: np.dtype) -> jax.Array:
        """Returns records whose norm equals the radius, often nearly along an axis."""
        direction = (2 * uniform - 1) ** 3
        return self.projected((direction * (self.high / _norms(direction))).astype(dtype))

    def projected(self, records: jax.Array) -> jax.Array:
        """Scales records outside of the ball down to just inside of it."""
        wide = records.astype(compute_dtype(records.dtype))
        # In units of the radius, squares neither overflow nor underflow.
        norms = _norms(wide / self.high)
        # The margin covers the rounding of the cast to a narrow dtype, of the sum of squares, and
        # of the products.
        inward = 1 - _eps(records) - (_size(records) + 10) * _eps(wide)
        return jnp.where(norms > inward, wide * (inward / norms), wide).astype(records.dtype)


def _eps(array: jax.Array) -> float:
    return float(jnp.finfo(array.dtype).eps)


def _size(records: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns the number of coordinates of a record."""
    return math.prod(records.shape[1:])


def _norms(records: jax.Array) -> jax.Array:
    """Returns the l2 norm of each record, plus a tiny number so that it is above 0."""
    axes = tuple(range(1, records.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(records), axis=axes, keepdims=True)) + 1e-30


def _searches(records: PyTree, bounds: PyTree) -> list[_IntervalSearch]:
    """Returns a search for each array of `records`, from one bound or a tree of bounds.

    A bound is a pair (low, high) or a `Ball`.
    """
    leaves, structure = jax.tree.flatten(records)
    if _is_bound(bounds):
        each = [bounds] * len(leaves)
    else:
        each, tree = jax.tree.flatten(bounds, is_leaf=_is_bound)
        if tree != structure:
            raise ValueError(
                "bounds must be one pair (low, high) or one Ball, or a tree of these like the"
                f" records, got {bounds}"
            )
    return [_search(leaf, bound) for leaf, bound in zip(leaves, each, strict=True)]


def _is_bound(x: object) -> bool:
    """Whether `x` is one bound: a ball or a pair of numbers. A tuple of bounds is a tree."""
    if isinstance(x, tuple):
        return not any(isinstance(one, tuple | Ball) for one in x)
    return isinstance(x, Ball)


def _search(leaf: jax.ShapeDtypeStruct, bound: object) -> _IntervalSearch:
    floats = is_float(leaf)
    if isinstance(bound, Ball):
        if not floats:
            raise ValueError(f"bounds may be a Ball only for float records, got {leaf.dtype}")
        radius, info = _checks.positive("radius", bound.radius), jnp.finfo(leaf.dtype)
        # In a smaller ball, numbers would be subnormal, and rounding them could move records out of
        # the ball.
        if not _size(leaf) * float(info.tiny) <= radius <= float(info.max):
            raise ValueError(
                f"bounds must be finite and normal (not subnormal) in {leaf.dtype}, got {bound}"
            )
        return _BallSearch(radius)
    if not isinstance(bound, tuple) or len(bound) != 2:
        raise ValueError(f"bounds must be pairs (low, high) or balls, got {_checks.shown(bound)}")
    low, high = (_checks.finite("bounds", number) for number in bound)
    if floats:
        low, high = _inward(low, leaf.dtype, math.inf), _inward(high, leaf.dtype, -math.inf)
    elif not (float(low).is_integer() and float(high).is_integer()):
        raise ValueError(f"bounds of integers must be integers, got {bound}")
    else:
        info = jnp.iinfo("uint1" if leaf.dtype == bool else leaf.dtype)
        known = max(int(info.min), -_LARGEST_INTEGER), min(int(info.max), _LARGEST_INTEGER)
        if low < known[0] or high > known[1]:
            raise ValueError(
                f"bounds of {leaf.dtype} records must be between {known[0]} and {known[1]}"
            )
    if not low < high:
        raise ValueError(f"bounds must have low < high in {leaf.dtype}, got {bound}")
    return _IntervalSearch(low, high)


def _inward(number: float, dtype: np.dtype, toward: float) -> float:
    """Returns `number` in a dtype, rounded in the direction of `toward`."""
    if abs(number) > float(jnp.finfo(dtype).max):
        raise ValueError(f"bounds must be finite in {dtype}, got {number}")
    near = jnp.asarray(number, dtype)
    if float(near) != number and (float(near) < number) == (toward > 0):
        near = jnp.nextafter(near, jnp.asarray(toward, dtype))
    return float(near)


# The learning rate starts at `_RATE` times the width of the bounds, and decreases to `_FALL` times
# its initial value.
_RATE, _FALL = 0.1, 1e-3
# A bound on the relative error of computed norms with many coordinates.
_ERROR_OF_NORM = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class AdversarialPair:
    """Two neighboring databases that are far apart.

    Attributes:
        distance: a lower bound on the distance of their values, in the norm of the search.
        database: a pytree within the bounds, with leading axis n.
        neighbor: the same database with one record replaced.

    Formal guarantees:
        For databases within the bounds, the global sensitivity of the target, as it is computed, is
        at least `distance`. Other pairs may be farther apart: no search proves that a sensitivity
        is small.
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
    """Searches for two neighboring databases whose target values are as far apart as possible.

    Let f be the target. The search maximizes log ||f(D) - f(D')|| over the database and the
    replacing record. It takes projected Adam steps if f has a gradient. It also changes a few
    records at random, including integers. All restarts run in one batched program.

    Args:
        key: a typed key.
        target: a pure JAX function of a pytree of arrays with leading axis n.
        records: shapes and dtypes of a database: a pytree of `jax.ShapeDtypeStruct`, or of arrays,
            whose values are ignored.
        bounds: one bound for all arrays, or a tree like the records with a bound for each array. A
            bound is a pair `(low, high)` for every coordinate of a record, both included, or
            `dpjax.proving.Ball(radius)` for the l2 norm of a record.
        norm: as for `dpjax.sample_sensitivity`.
        steps: the number of steps of the search, at least 1.
        restarts: the number of databases to start from, at least 1.

    Returns:
        An `AdversarialPair`. Its distance is recomputed from the two databases, each evaluated
        alone, and reduced by one unit in the last place for every coordinate of both values.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if arrays have no common leading axis, bounds do not fit them, or a number is
            out of range.

    Formal guarantees:
        The distance is a lower bound on the global sensitivity under replace-one, never an upper
        bound. It is not a release, because the search uses no private data.

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
        AdversarialPair(global sensitivity at least 0.01999...)
    """
    key = sampling_key(key)
    specs = _checks.real_shapes("records", records)
    n = _checks.count_records("records", specs)
    limits = _searches(specs, bounds)
    norm_function(norm)
    steps = _checks.integer("steps", steps, least=1)
    restarts = _checks.integer("restarts", restarts, least=1)
    program = Program.trace("target", target, specs)
    search = _Search(program, tuple(limits), norm, n)
    keys = jax.random.split(key, restarts)
    found, places = jax.jit(jax.vmap(functools.partial(_climb, search, steps)))(keys)
    return _best(search, found, places)


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    """The functions and numbers that stay constant during a search."""

    program: Program
    limits: tuple[_IntervalSearch, ...]
    norm: Norm
    n: int

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of n + 1 records, the last of which replaces another."""
        leaves = self.program.inputs.leaves
        return [jax.ShapeDtypeStruct((self.n + 1, *x.shape[1:]), x.dtype) for x in leaves]

    def databases(self, arrays: list[jax.Array], place: jax.Array) -> tuple[Database, Database]:
        """Returns the two databases of a pair."""
        first = [jnp.asarray(array[: self.n]) for array in arrays]
        second = [a.at[place].set(b[self.n]) for a, b in zip(first, arrays, strict=True)]
        unflatten = self.program.inputs.structure.unflatten
        (one,), (other,) = unflatten(first), unflatten(second)
        return one, other

    def log_distance(self, arrays: list[jax.Array], place: jax.Array) -> jax.Array:
        """Returns the log distance of a pair; -inf if the distance is 0 or not finite."""
        one, other = map(self.program, self.databases(arrays, place))
        moved = distance(self.norm, one, other)
        return jnp.where((moved > 0) & jnp.isfinite(moved), jnp.log(moved), -jnp.inf)


def _climb(search: _Search, steps: int, key: Key) -> tuple[list[jax.Array], jax.Array]:
    """Returns the best pair that one restart of the search finds."""
    key_start, key_steps = jax.random.split(key)
    arrays, place = _start(search, key_start)
    floats = list(map(is_float, arrays))
    slope = _slope(search, arrays, place)
    zeros = [
        jnp.zeros(a.shape, a.dtype if x else None) for a, x in zip(arrays, floats, strict=True)
    ]

    def step(carry: PyTree, inputs: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
        arrays, height, best, highest, state = carry
        key, t = inputs
        if slope is not None:
            directions, state = _adam(slope(arrays, place), *state)
            rate = _RATE * _FALL**t
            arrays = [
                limit.projected(a - (rate * limit.width()).astype(a.dtype) * d) if x else a
                for limit, a, d, x in zip(search.limits, arrays, directions, floats, strict=True)
            ]
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
    return carry[2], place


def _start(search: _Search, key: Key) -> tuple[list[jax.Array], jax.Array]:
    """Makes one of four kinds of starting pairs: random, extreme, two blocks, or an outlier."""
    choices, uniforms = _uniforms(search, key, choices=2, sets=2)
    place, kind = (choices * jnp.array([search.n, 4.0])).astype(int)
    arrays: list[jax.Array] = []
    for limit, spec, (u, v) in zip(search.limits, search.arrays(), uniforms, strict=True):
        inside, extreme = limit.inside(u, spec.dtype), limit.extreme(v, spec.dtype)
        # In `two_kinds`, rows 0 to `place` are copies of one record, and all later rows are copies
        # of another record. The last row replaces the row at `place`. So the replacement moves
        # one record from the first block to the second.
        first, second = extreme[:1], extreme[1:2]
        second = jnp.where(jnp.all(first == second), limit.opposite(first), second)
        rows = jnp.arange(search.n + 1).reshape((-1, *(1 for _ in spec.shape[1:])))
        two_kinds = jnp.where(rows <= place, first, second)
        one_kind = jnp.where(rows < search.n, first, second)
        arrays.append(jnp.stack([inside, extreme, two_kinds, one_kind])[kind])
    return arrays, place


def _uniforms(
    search: _Search, key: Key, *, choices: int, sets: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Draws `choices` uniform numbers, and `sets` uniform numbers for every entry of each array.

    One call draws all numbers, because each call of a random number generator takes long to
    compile.
    """
    specs = search.arrays()
    sizes = [sets * spec.size for spec in specs]
    drawn = jax.random.uniform(key, (choices + sum(sizes),))
    first, *parts = jnp.split(drawn, np.cumsum([choices, *sizes[:-1]]))
    return first, [p.reshape(sets, *spec.shape) for p, spec in zip(parts, specs, strict=True)]


def _slope(
    search: _Search, arrays: list[jax.Array], place: jax.Array
) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]] | None:
    """Returns the gradient of the negative log distance, or None if JAX cannot compute it.

    The gradient of integers is 0.
    """
    gradient = jax.grad(lambda *pair: -search.log_distance(*pair), allow_int=True)

    def slope(arrays: list[jax.Array], place: jax.Array) -> list[jax.Array]:
        found = gradient(arrays, place)
        return [
            jnp.zeros(x.shape) if x.dtype == jax.dtypes.float0 else jnp.where(jnp.isfinite(x), x, 0)
            for x in found
        ]

    if not any(map(is_float, arrays)):
        return None
    try:
        jax.eval_shape(slope, arrays, place)
    # Loops and code on the host have no gradient.
    except (TypeError, ValueError, NotImplementedError):
        return None
    return slope


def _adam(
    slopes: list[jax.Array], means: list[jax.Array], squares: list[jax.Array]
) -> tuple[list[jax.Array], tuple[list[jax.Array], list[jax.Array]]]:
    """Returns Adam's update directions, whose coordinates are about 1, and its new state."""
    means = [0.9 * m + 0.1 * g for m, g in zip(means, slopes, strict=True)]
    squares = [0.99 * s + 0.01 * g * g for s, g in zip(squares, slopes, strict=True)]
    directions = [m / (jnp.sqrt(s) + 1e-30) for m, s in zip(means, squares, strict=True)]
    return directions, (means, squares)


def _changed(
    search: _Search, key: Key, arrays: list[jax.Array], place: jax.Array
) -> list[jax.Array]:
    """Replaces a few records by random, extreme, copied or perturbed records."""
    rows = jnp.arange(search.n + 1)
    choices, uniforms = _uniforms(search, key, choices=4 + 2 * len(rows), sets=1)
    (share, few, kind, size), of_rows = choices[:4], choices[4:].reshape(2, -1)
    # With probability 1/2, this changes the two records that differ. Otherwise it changes any
    # number of records, from one to all.
    either = (rows == place) | (rows == search.n)
    share = jnp.where(few < 0.5, jnp.where(either, 0.75, 0.0), jnp.maximum(share**3, 1 / len(rows)))
    which = of_rows[0] < share
    source = (of_rows[1] * len(rows)).astype(int)
    changed: list[jax.Array] = []
    for limit, array, (u,) in zip(search.limits, arrays, uniforms, strict=True):
        inside, extreme = limit.inside(u, array.dtype), limit.extreme(u, array.dtype)
        close = inside
        if is_float(array):
            away = 10 ** (-3 * size) * limit.width() * (2 * u - 1)
            close = limit.projected(array + away.astype(array.dtype))
        new = jnp.stack([inside, extreme, array[source], close])[(4 * kind).astype(int)]
        mask = which.reshape((-1, *(1 for _ in array.shape[1:])))
        changed.append(jnp.where(mask, new, array))
    return changed


def _best(search: _Search, found: list[jax.Array], places: jax.Array) -> AdversarialPair:
    """Returns the pair with the largest distance.

    Its distance is computed again, on each database alone, because values may be rounded
    differently in a batch.
    """
    alone = jax.jit(search.program)
    heights = jax.jit(jax.vmap(search.log_distance))(found, places)
    best = int(jnp.argmax(heights))
    one, other = search.databases([array[best] for array in found], places[best])
    values = alone(one), alone(other)
    moved = float(distance(search.norm, *values)) * (1 - _ERROR_OF_NORM)
    if not (math.isfinite(moved) and math.isfinite(heights[best])):
        # A value or a height is not finite. Then no distance is proved.
        moved = 0.0
    hidden = sum(float(resolution(search.norm, value)) for value in values)
    return AdversarialPair(max(0.0, moved - hidden), *jax.device_get((one, other)))
