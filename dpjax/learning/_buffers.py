"""Buffered linear strategies: entries are sums of geometric series, and memory is a few buffers.

Below its diagonal, C[t, t - i] is the sum of omega_k theta_k^(i-1) over the buffers k. So a state
needs no noise of single updates. Buffer k holds the sum of theta_k^(t-1-j) times the noise of
update j, over earlier steps j. A step multiplies the buffer by theta_k, and adds the new noise to
it.

Exact buffers would need more digits after every step. So buffers are integers, in units of 2^-18 of
the spacing of the grid, and each product is rounded. docs/proofs/correlated-noise.md bounds by how
much this changes a row between neighbors, and shows that no integer wraps around.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import _checks
from dpjax._exact import _limbs
from dpjax._exact._kernels import at_once, written
from dpjax._exact._limbs import FRACTION_BITS, Limbs
from dpjax.learning._strategies import BITS, Strategy
from dpjax.targets._optax_training import optax_promotion

_MOST_STEPS = 2**16
_MOST_BUFFERS = 2**5
# Each buffer holds integers. They stay below 2^_WORD_BITS in magnitude, and so does the weighted
# sum of all buffers.
_WORD_BITS = 61
# Powers of theta are computed with this many binary digits.
_DIGITS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class BufferedStrategy(Strategy):
    """A Toeplitz strategy with C[t, t - i] = sum_k omega_k theta_k^(i-1) below the diagonal.

    Attributes:
        first: an integer; 2^18 times the diagonal.
        scales: int32 of shape (buffers,); 2^30 omega.
        decays: int32 of shape (buffers,); 2^30 theta.

    Formal guarantees:
        None of its own: it is public.
    """

    _KIND = "buffered strategy"

    first: int
    scales: np.ndarray = dataclasses.field(repr=False)
    decays: np.ndarray = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        # Products of NumPy's integers would wrap around, so these two numbers become Python
        # integers.
        for name, most in (("steps", _MOST_STEPS), ("first", 2**BITS)):
            number = _checks.integer(name, getattr(self, name), least=1, most=most)
            object.__setattr__(self, name, number)
        shape = f"1 to {_MOST_BUFFERS} numbers, one for each buffer"
        for name in ("scales", "decays"):
            given = np.shape(getattr(self, name))
            fits = given == np.shape(self.scales) and len(given) == 1
            fits = fits and 1 <= given[0] <= _MOST_BUFFERS
            self._keep_integers(name, shape, fits, FRACTION_BITS)

    @property
    def bands(self) -> int:
        """The number of bands. It equals the number of steps: a batch changes all later outputs."""
        return self.steps

    def _entries(self) -> np.ndarray:
        """Returns the first column, computed in integers."""
        column = [self.first / 2**BITS]
        scales, decays = self.scales.tolist(), self.decays.tolist()
        powers = [1 << _DIGITS] * len(decays)
        for _ in range(self.steps - 1):
            total = sum(scale * power for scale, power in zip(scales, powers, strict=True))
            column.append(total / 2 ** (FRACTION_BITS + _DIGITS))
            powers = [p * decay >> FRACTION_BITS for p, decay in zip(powers, decays, strict=True)]
        return np.array([column])

    @property
    def rounding(self) -> float:
        """1 grid unit for rounding a row, plus a small number for rounding the buffers."""
        of_buffers = sum(
            abs(scale) / 2**FRACTION_BITS * reach + 1
            for scale, reach in zip(self.scales.tolist(), self._reaches, strict=True)
        )
        return (1 + of_buffers / 2**BITS) * (1 + 2**-40)

    @property
    def largest_noise(self) -> int:
        """The largest bound on noise for which no buffer or weighted sum of buffers overflows."""
        end, reaches = 2**_WORD_BITS, self._reaches
        scales = np.abs(self.scales.astype(np.int64)).tolist()
        weighted = sum(scale * reach for scale, reach in zip(scales, reaches, strict=True))
        # If the noise of every update is at most M in magnitude, every integer in buffer k is at
        # most (2^18 M + 1) * reaches[k].
        most = min(
            (end - 1) // max(reaches),
            (end - len(reaches)) * 2**FRACTION_BITS // max(1, weighted),
        )
        return min(2**31 - 1, (most - 1) >> BITS)

    @property
    def _reaches(self) -> list[int]:
        """Returns, for each theta, an upper bound on the sum of |theta|^i over 0 <= i < steps."""
        one = 2**FRACTION_BITS
        sizes = (abs(decay) for decay in self.decays.tolist())
        return [
            self.steps if size == one else min(self.steps, -(-one // (one - size)))
            for size in sizes
        ]

    def nothing_kept(self, leaf: jax.Array) -> Limbs:
        """Returns empty buffers, two uint32 for each number."""
        shape = len(self.decays), *jnp.shape(leaf)
        # These are two separate arrays, because JAX cannot donate one array twice.
        return Limbs(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))

    def diagonal(self, step: jax.Array) -> jax.Array:
        """Returns the same number for all steps."""
        del step
        return jnp.int32(self.first)

    def earlier(self, kept: Limbs, step: jax.Array) -> Limbs:
        """Returns the weighted sum of the buffers."""
        del step
        # The buffers are added one by one: LLVM vectorizes these additions, but not a sum over an
        # axis.
        products = [
            _limbs.scale(Limbs(*buffer), jnp.int32(scale))
            for *buffer, scale in zip(*kept, self.scales, strict=True)
        ]
        return at_once(functools.reduce(_limbs.add, products))

    def keep(self, kept: Limbs, newest: jax.Array, step: jax.Array) -> Limbs:
        """Multiplies the buffers by theta and adds the new noise."""
        del step
        of_each = jnp.asarray(self.decays).reshape(-1, *[1] * (kept.low.ndim - 1))
        decayed = _limbs.scale(kept, of_each)
        new = _limbs.shift_left(_limbs.from_integers(written(newest)[None]), jnp.uint32(BITS))
        return at_once(_limbs.add(decayed, new))


def rounded(decays: object, scales: object, *, steps: int) -> BufferedStrategy:
    """Returns a `BufferedStrategy` with theta, omega and the diagonal of C rounded.

    theta and omega are rounded to multiples of 2^-30, and the diagonal to a multiple of 2^-18.
    Every entry of the diagonal is 1 at first. Before rounding, omega and the diagonal are divided
    by the largest magnitude among them. A common factor of all entries of C has no effect.

    Args:
        decays: theta, each from -1 to 1.
        scales: omega, as many numbers as theta.
        steps: the number of steps.
    """
    theta, omega = (np.asarray(x, np.float64) for x in (decays, scales))
    if not (np.all(np.isfinite(omega)) and np.all(np.abs(theta) <= 1)):
        raise ValueError(
            f"decays must be from -1 to 1, scales must be finite, got {theta}, {omega}"
        )
    largest = np.abs(omega).max(initial=1)
    first = round(1 / largest * 2**BITS)
    if first < 1:  # Every update is divided by this number.
        raise ValueError(f"scales must be below 2^{BITS + 1}, got {largest:g}")
    whole = (np.round(x * 2**FRACTION_BITS).astype(np.int32) for x in (omega / largest, theta))
    return BufferedStrategy(steps, first, *whole)


def buffered_strategy(*, steps: int, groups: int | None = None) -> Strategy:
    """The buffered linear Toeplitz (BLT) strategy with the least mean squared error of prefix sums.

    The diagonal of the matrix C is 1. The entries C[t, j] below it are sums of a few geometric
    series in t - j. So they do not become 0 after a fixed number of bands. The strategy is for
    batches in a fixed order, where a record takes part every `groups` steps. For these batches, a
    banded strategy can have at most `groups` bands.

    Args:
        steps: the number of steps of the training, at most 65,536.
        groups: the number of groups of a `cyclic_sampling`, or of bins; None if a record joins at
            most one batch.

    Returns:
        A `Strategy` of as many bands as steps. The state of the noise keeps one buffer for each
        series, 8 bytes for each number, whatever the number of steps.

    Raises:
        ModuleNotFoundError: if jax_privacy, of the extra `correlated`, is not installed.
        TypeError: if an argument is not an integer.
        ValueError: if an argument is out of range.

    Formal guarantees:
        None: a strategy is public. Its numbers are rounded to rational ones, and all bounds are
        those of the rounded strategy. The noise also covers the rounding of the buffers. Batches of
        one record share rows, and all of them together are one mechanism: see `accounting.dp_sgd`.

    Source:
        `jax_privacy.matrix_factorization.buffered_toeplitz.optimize`; Dvijotham, McMahan, Pillutla,
        Steinke and Thakurta (2024), arXiv 2404.16706; McMahan, Xu and Zhang (2024), arXiv
        2408.08868.

    Example:
        >>> import dpjax
        >>> strategy = dpjax.learning.buffered_strategy(steps=64, groups=16)  # doctest: +SKIP
    """
    steps = _checks.integer("steps", steps, least=1, most=_MOST_STEPS)
    groups = _checks.integer("groups", steps if groups is None else groups, least=1, most=steps)
    factorization = _checks.extra("jax_privacy.matrix_factorization", "correlated")
    with optax_promotion(), jax.enable_x64(True):
        found = factorization.buffered_toeplitz.optimize(
            n=steps, min_sep=groups, max_participations=-(-steps // groups), error="mean"
        )
        decays, scales = np.asarray(found.buf_decay), np.asarray(found.output_scale)
    return rounded(decays, scales, steps=steps)
