"""`NoiseShape`: a matrix A for correlated noise, and the norm ||A^-1 x||_2 in exact integers.

A release with shaped noise computes y = A^-1 f and adds noise to y. So the sampler must compute the
same y as a release. In floats, y is a small difference of large products, which every compiled
program may round differently. So f is rounded to a fine grid, and A^-1 is a matrix of integers.
Then y is a function of the bits of f, and depends neither on the batch nor on the compiler.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._pytree import TreeSpec
from dpjax._core._types import Value
from dpjax._exact import _limbs
from dpjax._exact._grid import power_of_two, round_to_grid
from dpjax._exact._limbs import Limbs
from dpjax._tracing._fingerprints import digest
from dpjax.sensitivity._norms import flat, widest_float

MOST_COORDINATES = 2**12
# Values are clamped to this many bits, in units of the fine grid, and split into digits of 6 bits.
# The product of a matrix row and a vector of digits is then below 2^31, so it fits int32. The
# product of a matrix row and a vector of values is below 2^61.
VALUE_BITS = 36
_DIGIT_BITS, _ROW_BITS, _MOST_ENTRY_BITS = 6, 25, 15
# The range of the grid's exponent, which is well within the exponents of float32.
_LEAST_UNIT, _LARGEST_UNIT = -80, 40


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NoiseShape:
    """A matrix A that multiplies the noise, and the norm ||A^-1 x||_2 of the sensitivity.

    Made by `dpjax.noise_shape`. Pass it as `norm` to `dpjax.sample_sensitivity`, with another key.
    Then pass the sensitivity to `dpjax.shaped_gaussian`. Two shapes are equal if all attributes are
    equal.

    Attributes:
        matrix: A, float64 of shape (d, d), symmetric; the inverse of `inverse` / 2^bits.
        inverse: A^-1 times 2^bits, integers.
        bits: number of fractional bits in `inverse`.
        unit: values are rounded to multiples of 2^unit before they are multiplied.
        outputs: structure, shapes and dtypes of the target's value, which has d coordinates.
        sampled_with: a hash of the key that the differences were drawn with; None for a matrix that
            was not sampled.

    Formal guarantees:
        `mapped` is the same function of the bits of a value in every program. It rounds to the
        grid, multiplies integers exactly, and takes the nearest float or its neighbor.
    """

    matrix: np.ndarray
    inverse: np.ndarray
    bits: int
    unit: int
    outputs: TreeSpec
    sampled_with: str | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a hash of all attributes."""
        shapes = [(leaf.shape, leaf.dtype.name) for leaf in self.outputs.leaves]
        structure = str(self.outputs.structure)
        return digest(self.inverse, self.bits, self.unit, structure, shapes, self.sampled_with)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseShape) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"NoiseShape({len(self.matrix)} coordinates, {self.fingerprint[:8]})"

    def __call__(self, difference: Value) -> jax.Array:
        """The length ||A^-1 x||_2 of a difference of two values, in floats."""
        return jnp.linalg.norm(self.mapped_in_floats(difference))

    @property
    def largest_value(self) -> float:
        """Returns the largest magnitude of a coordinate. Larger magnitudes are clamped to it."""
        return 2.0 ** (VALUE_BITS + self.unit)

    @functools.cached_property
    def log_determinant(self) -> float:
        """Returns log |det A^-1|, by which the map changes a log density."""
        return -float(np.linalg.slogdet(self.matrix)[1])

    def check_fits(self, value: Value) -> None:
        """Raises an error for values whose structure or shapes differ from `outputs`."""
        got = TreeSpec.of(value)
        if got.form != self.outputs.form:
            raise ValueError(
                f"value must fit the shape of the noise, with structure and shapes {self.outputs},"
                f" got {got}"
            )

    @functools.partial(jax.jit, static_argnums=0)
    def mapped(self, value: Value) -> jax.Array:
        """The product of A^-1 and f, the vector of all numbers of `value`.

        f is first rounded to the grid. Then the product is computed exactly, and converted to
        floats. NaN counts as 0. Magnitudes above `largest_value` count as `largest_value`.

        Args:
            value: a pytree of real arrays, of the structure and shapes of `outputs`.

        Returns:
            Shape (d,), of the widest float dtype of the value.
        """
        # The barrier prevents XLA from fusing the rounding to the grid with the computation of the
        # value.
        leaves = lax.optimization_barrier(jax.tree.leaves(value))
        units = [round_to_grid(leaf.reshape(-1), self.unit) for leaf in leaves]
        whole = Limbs(*map(jnp.concatenate, zip(*units, strict=True)))
        total = _product(_limbs.clip(whole, 2**VALUE_BITS), self.inverse)
        dtype = widest_float(leaves)
        return _limbs.to_float(total, dtype) * power_of_two(self.unit - self.bits, dtype)

    def clamped(self, value: Value) -> Value:
        """The value with NaN replaced by 0 and large numbers clamped, as `mapped` treats them."""
        return jax.tree.map(lambda leaf: _clamped(leaf, self.largest_value), value)

    @functools.partial(jax.jit, static_argnums=0)
    def shaped(self, mapped: jax.Array) -> Value:
        """The product of A and the vector `mapped`, in floats, as a pytree like `outputs`."""
        matrix = jnp.asarray(self.matrix.astype(mapped.dtype))
        released = self.unflattened(jnp.matmul(matrix, mapped, precision="highest"))
        return jax.tree.map(_as_released, released, self.outputs.tree())

    def unflattened(self, flat: jax.Array) -> Value:
        """The d numbers of `flat`, as a pytree with the structure and shapes of `outputs`."""
        leaves = self.outputs.leaves
        pieces = jnp.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [x.reshape(leaf.shape) for x, leaf in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(self.outputs.structure, shaped)

    def mapped_in_floats(self, value: Value) -> jax.Array:
        """A^-1 x in floats, for densities and lengths, which need not be exact."""
        numbers = flat(value)
        inverse = (self.inverse / 2.0**self.bits).astype(numbers.dtype)
        return jnp.matmul(inverse, numbers, precision="highest")

    def resolution(self, mapped: jax.Array) -> jax.Array:
        """A bound on the length of A^-1 u, if u is one unit in the last place per coordinate.

        The signs in u are arbitrary, so the magnitudes of all products are added.
        """
        floats = [x.dtype for x in self.outputs.leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        eps = max(float(jnp.finfo(dtype).eps) for dtype in (*floats, mapped.dtype))
        sizes = jnp.abs(flat(self.shaped(mapped))).astype(mapped.dtype)
        inverse = (np.abs(self.inverse) / 2.0**self.bits).astype(mapped.dtype)
        found = eps * jnp.linalg.norm(jnp.matmul(inverse, sizes, precision="highest"))
        return jnp.where(jnp.isfinite(found), found, 0)


def shape_of(
    matrix: np.ndarray, outputs: TreeSpec, unit: float, sampled_with: str | None
) -> NoiseShape:
    """Returns a `NoiseShape` near a positive definite matrix, on a grid as fine as `unit`."""
    size = len(matrix)
    wanted = np.linalg.inv(matrix)
    most = min(_MOST_ENTRY_BITS, _ROW_BITS - (size - 1).bit_length())
    bits = most - int(np.ceil(np.log2(np.abs(wanted).max())))
    inverse = np.round(wanted * 2.0**bits).astype(np.int32)
    exponent = int(np.floor(np.log2(unit)))
    if not (_LEAST_UNIT <= exponent <= _LARGEST_UNIT and abs(bits) <= _MOST_ENTRY_BITS + 8):
        raise ValueError(
            f"the target's values need a grid of {unit:.1g}, which is out of the range of float32:"
            " rescale the target's value"
        )
    exact = np.linalg.inv(inverse / 2.0**bits)
    found = NoiseShape((exact + exact.T) / 2, inverse, bits, exponent, outputs, sampled_with)
    # Compiled programs contain copies of both arrays, so later changes would have no effect. So the
    # arrays are made read-only.
    for array in (found.matrix, found.inverse):
        array.setflags(write=False)
    return found


def _product(vector: Limbs, matrix: np.ndarray) -> Limbs:
    """Multiplies an integer matrix and a vector, digit by digit so that int32 suffices."""
    places = range(0, VALUE_BITS + 1, _DIGIT_BITS)
    shifted = (_limbs.shift_right(vector, jnp.uint32(place)) for place in places)
    digits = [limbs.low.astype(jnp.int32) for limbs in shifted]
    # The last digit has the sign.
    digits = [*(digit & np.int32(2**_DIGIT_BITS - 1) for digit in digits[:-1]), digits[-1]]
    products = lax.dot(
        jnp.stack(digits), jnp.asarray(matrix.T), preferred_element_type=np.dtype("int32")
    )
    total = _limbs.from_integers(products[0])
    for place, product in zip(places[1:], products[1:], strict=True):
        moved = _limbs.shift_left(_limbs.from_integers(product), jnp.uint32(place))
        total = _limbs.add(total, moved)
    return total


def _as_released(x: jax.Array, sampled: jax.ShapeDtypeStruct) -> jax.Array:
    """Casts x to float16 or bfloat16 if the target returned this dtype. Otherwise returns x."""
    narrow = jnp.issubdtype(sampled.dtype, jnp.floating) and sampled.dtype.itemsize < 4
    return _checks.saturating_cast(x, sampled.dtype) if narrow else x


def _clamped(leaf: jax.Array, largest: float) -> jax.Array:
    if leaf.dtype == bool:
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        bound = leaf.dtype.type(min(largest, float(jnp.finfo(leaf.dtype).max)))
        return jnp.clip(jnp.where(jnp.isnan(leaf), jnp.zeros_like(leaf), leaf), -bound, bound)
    limits = jnp.iinfo(leaf.dtype)
    low, high = max(-int(largest), limits.min), min(int(largest), limits.max)
    return jnp.clip(leaf, leaf.dtype.type(low), leaf.dtype.type(high))
