"""Functions that draw all published noise and add it to values.

No other file draws published noise. Exact noise is integer noise on a grid (see `_grid_fit`). The
sum of value and noise is converted to a float in the very last step, which is post-processing.
Noise in floats is only for sweeps, which publish nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dpjax._core import _checks
from dpjax._core._types import PyTree, Value
from dpjax._core._values import Scalar
from dpjax._exact import _limbs
from dpjax._exact._grid import WIDE_BOUND_BITS, power_of_two, round_to_grid, round_widely
from dpjax._exact._limbs import Limbs
from dpjax._exact._numerics import compute_dtype, float_limits
from dpjax._tracing._programs import QuickJit
from dpjax.random._grid_fit import Calibration, GridFit, divided, is_usable, quotients
from dpjax.random._lattice import LatticeNoise
from dpjax.random._lattice import lattice_laplace as lattice_laplace
from dpjax.random._noise import LAPLACE_LATTICE, Lattice, Noise

# The scale of noise in floats is multiplied by this factor, which covers the rounding errors of a
# draw.
OUTWARD = 1 + 2.0**-21

# The smallest and the largest size to which values are padded. Drawing this smallest size takes no
# longer than drawing one number.
_LEAST_PADDED, _MOST_PADDED = 2**6, 2**16

# The bounds to which integer values and releases are clamped, by the size of the dtype in bytes.
# The smallest integer of the dtype marks a failure, so no release may be equal to it.
_INTEGER_BOUND = {4: 2**31 - 2, 8: 2**63 - 2}
_Drawn = TypeVar("_Drawn", bound=LatticeNoise)


def add_noise(key: jax.Array, value: Value, calibration: Calibration, noise: Noise) -> Value:
    """Adds independent noise to every coordinate of a pytree of arrays.

    NaN becomes 0, and values out of range are clamped. So whether and how a private value is
    released does not depend on its contents. Integers get integer noise. If the scale is NaN,
    infinite or not positive, the result is NaN, or the smallest integer of its dtype.

    Floats keep their dtype. Booleans and integers narrower than 32 bits become int32.
    """
    lattice, leaves = noise.lattice, list[jax.Array](jax.tree.leaves(value))
    if lattice is None:
        keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
        pairs = zip(keys, leaves, strict=True)
        released = [_add_in_floats(one, leaf, calibration, noise) for one, leaf in pairs]
    elif _checks.any_traced(key, leaves, calibration):
        # Padding would have no benefit here, because the draw is part of the caller's own program.
        drawn = lattice.sample(key, (sum(x.size for x in leaves),))
        pairs = zip(_divided_among(leaves, drawn), leaves, strict=True)
        released = [_add_to_array(own, x, calibration.fit(lattice, x.dtype)) for own, x in pairs]
    else:
        return PaddedNoise(calibration, lattice)(key, value)
    noisy = [_unless_zero(y, x, calibration) for y, x in zip(released, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(value), noisy)


class PaddedNoise:
    """Adds noise to padded arrays, so that values of many shapes share compiled programs.

    One program draws a block of noise from the key, and another program adds the noise to the
    value. The noise of an entry does not depend on the number of entries, so padding does not
    change a release.
    """

    def __init__(self, calibration: Calibration, lattice: Lattice):
        """Takes a calibration whose numbers are not traced."""
        self._calibration, self._lattice = calibration, lattice
        self._fit = functools.cache(functools.partial(calibration.fit, lattice))

    def __call__(self, key: jax.Array, value: Value) -> Value:
        """Adds noise to a value. Neither the key nor the value may be traced."""
        leaves, structure = jax.tree.flatten(value)
        starts = np.cumsum([0, *(x.size for x in leaves[:-1])])
        padded = [resized(x, (_padded_size(x.size),)) for x in leaves]
        count = self._lattice.each * sum(x.size for x in leaves)
        drawn = _block(key, count=_padded_size(count), variables=self._lattice.variables)
        fits = [self._fit(x.dtype) for x in leaves]
        released = _add_block(drawn, padded, starts, fits, combined=self._lattice.combined)
        pairs = zip(released, leaves, strict=True)
        noisy = [_unless_zero(resized(y, x.shape), x, self._calibration) for y, x in pairs]
        return jax.tree.unflatten(structure, noisy)


def add_integer_noise(
    key: jax.Array,
    steps: list[Limbs],
    scale: Scalar,
    exponent: jax.Array,
    dtypes: list[np.dtype],
    noise: Noise,
) -> list[jax.Array]:
    """Adds noise to integers, and returns the sums as floats, in units of 2^exponent.

    `scale` is in units of the integers. It must be large enough for the largest change of the
    integers between neighbors. If the scale is out of the supported range, the result is NaN.
    """
    count = sum(x.low.size for x in steps)
    if noise.lattice is None:
        keys = jax.random.split(key, len(steps))
        drawn = [OUTWARD * scale * noise.sample(one, x.low.shape, dtype)
                 for one, x, dtype in zip(keys, steps, dtypes, strict=True)]  # fmt: skip
        found = [_limbs.to_float(x, y.dtype) + y for x, y in zip(steps, drawn, strict=True)]
        return [x * power_of_two(exponent, x.dtype) for x in found]
    fit = Calibration(scale, scale, math.inf, 0.0, count).fit(noise.lattice, np.dtype("int32"))
    # XLA computes each quotient and the float made from it in one loop, and stores no quotients.
    whole = quotients(noise.lattice.sample(key, (count,)), fit)
    parts = _divided_among([x.low for x in steps], whole)
    released = list[jax.Array]()
    for x, drawn, dtype in zip(steps, parts, dtypes, strict=True):
        total = _limbs.to_float(_limbs.add(x, drawn), dtype) * power_of_two(exponent, dtype)
        released.append(jnp.where(jnp.isnan(fit.scale), jnp.nan, total))
    return released


def noise_ahead(keys: jax.Array, noise: Noise) -> LatticeNoise:
    """Draws the noise of one number for each key, before the numbers themselves are known."""
    lattice = noise.lattice
    assert lattice is not None
    return jax.vmap(lambda key: lattice.sample(key, ()))(keys)


def add_drawn(
    drawn: LatticeNoise, x: jax.Array, calibration: Calibration, noise: Noise
) -> jax.Array:
    """Adds noise from `noise_ahead` to an array, with the same result as `add_noise`."""
    assert noise.lattice is not None
    released = _add_to_array(drawn, x, calibration.fit(noise.lattice, x.dtype))
    return _unless_zero(released, x, calibration)


def shares_programs(value: Value) -> bool:
    """Whether a value should be padded, so that it shares a compiled program with other shapes.

    Scalars are not padded, because their program is smaller and faster. Large values are not
    padded, because drawing would be slower, and float32 could not represent their sizes exactly.
    Sharded values are not padded, because padding would gather them on one device.
    """
    leaves = jax.tree.leaves(value)
    whole = all(len(x.devices()) == 1 for x in leaves if isinstance(x, jax.Array))
    return whole and 1 < sum(leaf.size for leaf in leaves) <= _MOST_PADDED


def _padded_size(size: int) -> int:
    """Returns the padded size for a size. It depends only on public shapes."""
    return max(_LEAST_PADDED, 2 ** (size - 1).bit_length())


def resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Flattens an array, pads it with zeros or truncates it, and reshapes it to `shape`.

    On a CPU, NumPy does this, because compiling a program for it takes 0.05 s.
    """
    if x.shape == shape:
        return x
    is_known = not _checks.is_traced(x)
    if is_known and all(device.platform == "cpu" for device in x.devices()):
        resized = np.zeros(math.prod(shape), x.dtype)
        resized[: x.size] = np.ravel(x)[: resized.size]
        return jax.device_put(resized.reshape(shape), x.sharding if x.committed else None)
    return _resized(x, shape)


@functools.partial(jax.jit, static_argnums=1)
def _resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    return jnp.pad(x.reshape(-1)[:size], (0, max(0, size - x.size))).reshape(shape)


@functools.partial(QuickJit, static=("count", "variables"))
def _block(key: jax.Array, *, count: int, variables: Callable[..., PyTree]) -> PyTree:
    """Draws `count` random variables, by a compiled program that many kinds of release share."""
    return variables(key, (count,))


@functools.partial(QuickJit, static=("combined",))
def _add_block(
    block: PyTree,
    leaves: list[jax.Array],
    starts: jax.Array,
    fits: list[GridFit],
    *,
    combined: Callable[[PyTree], LatticeNoise],
) -> list[jax.Array]:
    """Adds noise from a block to several arrays. `starts` has the offset of each array.

    `starts` is not static, so that all shapes with the same padded sizes share a program.
    """
    drawn = combined(block)

    def noise_of(start: Any, x: jax.Array) -> LatticeNoise:
        # The padding of an array may reach beyond the block. Then it gets the last noise of the
        # block, and is dropped later.
        places = start + jnp.arange(x.size).reshape(x.shape)
        return jax.tree.map(lambda limb: limb.at[places].get(mode="clip"), drawn)

    added = zip(starts, leaves, fits, strict=True)
    return [_add_to_array(noise_of(start, x), x, fit) for start, x, fit in added]


def _divided_among(arrays: list[jax.Array], drawn: _Drawn) -> list[_Drawn]:
    """Divides a vector of noise among arrays: each gets noise of its own shape."""
    limbs, structure = jax.tree.flatten(drawn)
    ends = np.cumsum([x.size for x in arrays])[:-1]
    parts = zip(*(jnp.split(limb, ends) for limb in limbs), strict=True)
    return [
        jax.tree.unflatten(structure, [limb.reshape(x.shape) for limb in part])
        for part, x in zip(parts, arrays, strict=True)
    ]


def _add_to_array(undivided: LatticeNoise, x: jax.Array, fit: GridFit) -> jax.Array:
    drawn = divided(undivided, fit)
    # All arithmetic is on integers until the last step, so no rounding can depend on the value.
    # Values are clamped and noise is below 2^61 steps, so the sums cannot wrap around.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        dtype, bound = integer_dtype(x.dtype), int(largest_release(x.dtype))
        value = _limbs.widen(_limbs.clip(_limbs.from_integers(x), bound))
        total = _limbs.saturate(_limbs.add_to_wide(value, drawn), bound)
        released = _limbs.to_integers(total, dtype)
        return jnp.where(jnp.isnan(fit.scale), jnp.iinfo(dtype).min, released)
    dtype, largest = compute_dtype(x.dtype), largest_release(x.dtype)
    finite = jnp.clip(x.astype(dtype), -largest, largest)
    total = _limbs.add_to_wide(round_widely(finite, fit.exponent), drawn)
    released = _limbs.wide_to_float(total, dtype) * power_of_two(fit.exponent, dtype)
    released = jnp.clip(released, -largest, largest)
    return _checks.saturating_cast(jnp.where(jnp.isnan(fit.scale), jnp.nan, released), x.dtype)


def _add_in_floats(
    key: jax.Array, x: jax.Array, calibration: Calibration, noise: Noise
) -> jax.Array:
    scale = usable_scale(calibration.scale, x.dtype)
    bound = largest_value(x.dtype, calibration, noise)
    value = clamped(x, bound)
    if jnp.issubdtype(x.dtype, jnp.floating):
        drawn = OUTWARD * scale * noise.sample(key, x.shape, scale.dtype)
        return _checks.saturating_cast(value + drawn, x.dtype)
    whole = noise.whole_sample(key, x.shape, OUTWARD * scale)
    rounded = jnp.clip(whole, -float(bound), float(bound)).astype(value.dtype)
    return jnp.where(jnp.isnan(scale), jnp.iinfo(value.dtype).min, value + rounded)


def _unless_zero(released: jax.Array, x: jax.Array, calibration: Calibration) -> jax.Array:
    if not calibration.zero_allowed:
        return released
    bare = _checks.saturating_cast(clamped(x, largest_release(x.dtype)), released.dtype)
    return jnp.where(jnp.asarray(calibration.scale) == 0, bare, released)


def usable_scale(scale: Scalar, dtype: DTypeLike) -> jax.Array:
    """Returns the scale in the dtype of the computation, or NaN if it is out of range."""
    dtype = compute_dtype(dtype)
    scale = jnp.asarray(scale).astype(dtype)
    return jnp.where(is_usable(scale), scale, jnp.nan)


def check_scale(name: str, calibration: Calibration, arrays: Value) -> None:
    """Refuses a concrete scale that is out of the range of the arrays' dtypes."""
    scale = calibration.scale
    if _checks.is_traced(scale) or np.ndim(scale) > 0:
        return
    for leaf in jax.tree.leaves(arrays):
        limits = float_limits(compute_dtype(leaf.dtype))
        carried = float(limits.tiny) / float(limits.eps) <= scale <= float(limits.max)
        if not carried and not (calibration.zero_allowed and scale == 0):
            raise ValueError(
                f"{name} {float(scale):.3g} is out of the range of {limits.dtype}: rescale the"
                " target's value, or enable float64"
            )


def integer_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of released integers: int64 for 64-bit integers, otherwise int32."""
    return jnp.dtype("int64" if jnp.dtype(dtype).itemsize == 8 else "int32")


def largest_release(dtype: DTypeLike) -> int | float:
    """Returns the largest number that a release of this dtype may contain.

    For floats this is the largest float, and for integers the largest integer minus 1.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return _INTEGER_BOUND[integer_dtype(dtype).itemsize]
    return float(float_limits(dtype).max)


def largest_value(dtype: DTypeLike, calibration: Calibration, noise: Noise) -> Scalar:
    """Returns the bound to which values of a dtype are clamped before noise is added."""
    if noise.lattice is None:
        # Half of the range of the dtype is reserved for the value, and half for the noise.
        if jnp.issubdtype(dtype, jnp.floating):
            return largest_release(compute_dtype(dtype)) / 2
        return 2 ** (8 * integer_dtype(dtype).itemsize - 3)
    if calibration.zero_allowed or not jnp.issubdtype(dtype, jnp.floating):
        return largest_release(dtype)
    fit, compute = calibration.fit(noise.lattice, dtype), compute_dtype(dtype)
    # If this product overflows to infinity, values are clamped to `largest_release` instead.
    steps = power_of_two(fit.exponent, compute) * 2.0**WIDE_BOUND_BITS
    return jnp.minimum(steps, largest_release(dtype))


def clamped(x: jax.Array, bound: Scalar) -> jax.Array:
    """Returns the array to which noise is added: NaN becomes 0, and numbers are clamped.

    Floats are cast to the dtype of the computation, and integers to the dtype of the release.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(compute_dtype(x.dtype))
        return jnp.clip(jnp.where(jnp.isnan(x), 0, x), -bound, bound)
    dtype = integer_dtype(x.dtype)
    whole = x.astype(dtype) if x.dtype == bool else _checks.saturating_cast(x, dtype)
    return jnp.clip(whole, -bound, bound)


def keep_or_lie(
    key: jax.Array, categories: jax.Array, lie_weight: ArrayLike, count: int
) -> jax.Array:
    """Randomized response: returns each category, or else one of the other categories (a lie).

    Each of the count - 1 lies has probability lie_weight / 2^32 exactly.

    Categories out of range are clamped to [0, count). A weight of 0, which marks a bad parameter,
    gives -1.
    """
    truth = in_range(categories, count)
    weight = jnp.asarray(lie_weight).astype(jnp.uint32)
    word = jax.random.bits(key, truth.shape, jnp.uint32)
    # Words in [j weight, (j + 1) weight) select lie number j, if j < count - 1. All larger words
    # select the truth.
    lie, _ = _limbs.divide(word, jnp.maximum(weight, 1))
    lies = lie < count - 1
    # Lie number j stands for category j, or for category j + 1 if j >= truth, because no lie is the
    # true category.
    other = lie.astype(jnp.int32) + (lie.astype(jnp.int32) >= truth).astype(jnp.int32)
    return jnp.where(weight == 0, -1, jnp.where(lies, other, truth))


def flipped_one_hot(
    key: jax.Array, categories: jax.Array, weights: tuple[ArrayLike, ArrayLike], count: int
) -> jax.Array:
    """Unary encoding: returns a noisy int8 bit for each category.

    Each bit is 1 with probability weight / 2^32 exactly.

    The first weight is for the bit of the true category, the second for all other bits. Categories
    out of range are clamped to [0, count). If the second weight is 0, which marks a bad parameter,
    all bits are -1.
    """
    true = jax.nn.one_hot(in_range(categories, count), count, dtype=bool)
    of_true, of_others = (jnp.asarray(weight).astype(jnp.uint32) for weight in weights)
    word = jax.random.bits(key, true.shape, jnp.uint32)
    bits = (word < jnp.where(true, of_true, of_others)).astype(jnp.int8)
    return jnp.where(of_others == 0, jnp.int8(-1), bits)


def in_range(categories: jax.Array, count: int) -> jax.Array:
    """Returns categories as int32, clamped to [0, count)."""
    return jnp.clip(_checks.saturating_cast(categories, jnp.int32), 0, count - 1)


# A private scale is below 2^SCALE_BITS steps of its grid, see `private_fit`.
SCALE_BITS = 25


def laplace_steps(key: jax.Array, *fits: GridFit) -> tuple[Limbs, ...]:
    """Draws independent Laplace noise for several integers, one for each fit."""
    drawn = lattice_laplace(key, (len(fits),))
    return tuple(divided(Limbs(*(limb[i] for limb in drawn)), fit) for i, fit in enumerate(fits))


def integer_fit(scale: Scalar, sensitivity: Scalar, epsilon: Scalar, count: int) -> GridFit:
    """Returns the fit for the Laplace noise of one of `count` integers that share an epsilon."""
    calibration = Calibration(scale, sensitivity, epsilon, 0.0, count)
    return calibration.fit(LAPLACE_LATTICE, "int32")


def private_fit(exponent: jax.Array, scale: jax.Array) -> GridFit:
    """Returns a fit for Laplace noise on the grid with step 2^exponent.

    The noise has at least the given scale, which is in steps of the grid and may be private.

    The fit has the divisor c = `divisor` * 2^`shift`, where `divisor` is rounded down to 16 bits.
    This rounding increases the scale by a factor of at most 1 + 2^-15. Rounding to float32 changes
    the scale by a factor of 1 +- 2^-21. Let R be the resolution of the lattice. If the scale is at
    most 2^-17 R, `shift` is at least 1, so c is even. For even c, a lattice point N becomes
    round(N / c) = floor(N / c + 1/2), which depends only on the real number N / c. So the rounding
    does not reveal c.
    """
    step = power_of_two(exponent, scale.dtype)
    return GridFit.of(LAPLACE_LATTICE, exponent, step, 1 / scale, scale > 0)


def steps_to_float(steps: Limbs, exponent: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Converts integers in steps of a grid to floats, which is post-processing of the integers."""
    return _limbs.to_float(steps, dtype) * power_of_two(exponent, dtype)


class ComparisonNoise(NamedTuple):
    """Two Laplace noises on the same grid: one for the numbers, and one for the threshold."""

    numbers: GridFit
    threshold: GridFit

    @classmethod
    def of(cls, numbers: Calibration, threshold: Calibration) -> "ComparisonNoise":
        """Finds a grid for the noise of the numbers, and fits both noises to this grid.

        The noise of the numbers is the larger noise, so its grid is the coarser one. The grid is
        computed in JAX's default float dtype: the numbers may come one by one in different dtypes,
        and all of them need the same grid.
        """
        dtype = jnp.result_type(float)
        fit = numbers.fit(LAPLACE_LATTICE, dtype)
        return cls(fit, threshold.fit(LAPLACE_LATTICE, dtype, fit.exponent))

    @property
    def is_usable(self) -> jax.Array:
        """Whether neither of the two scales is NaN."""
        return ~(jnp.isnan(self.numbers.scale) | jnp.isnan(self.threshold.scale))


def noisy_units(x: ArrayLike, drawn: Limbs, fit: GridFit) -> Limbs:
    """Returns numbers in steps of the grid, plus noise.

    The numbers are clamped to 2^61 steps, and NaN becomes 0.
    """
    return _limbs.add(round_to_grid(jnp.asarray(x), fit.exponent), divided(drawn, fit))


def first_above(
    key: jax.Array, numbers: jax.Array, threshold: ArrayLike, noise: ComparisonNoise, count: int
) -> jax.Array:
    """Returns the indices of the first `count` noisy numbers that reach the noisy threshold.

    If there are fewer such numbers, the remaining indices are len(numbers). If a scale is NaN, all
    indices are -1. All numbers are compared, so the running time reveals nothing.
    """
    drawn = lattice_laplace(key, (numbers.size + 1,))
    line = noisy_units(threshold, Limbs(drawn.high[0], drawn.low[0]), noise.threshold)
    noisy = noisy_units(numbers, Limbs(drawn.high[1:], drawn.low[1:]), noise.numbers)
    above = ~_limbs.less(noisy, line)
    rank = jnp.cumsum(above, dtype=jnp.int32) - 1
    places = jnp.full((count,), numbers.size, jnp.int32)
    # Numbers below the threshold get the index `count`, which `mode="drop"` ignores.
    kept_at = jnp.where(above, rank, count)
    places = places.at[kept_at].set(jnp.arange(numbers.size, dtype=jnp.int32), mode="drop")
    return jnp.where(noise.is_usable, places, -1)
