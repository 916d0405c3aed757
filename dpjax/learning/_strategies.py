"""Strategy matrices of correlated noise: lower triangular, with rational entries.

This file has what all strategies share, and banded strategies. `_buffers` has buffered ones.
"""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax

from dpjax._core import _checks
from dpjax._core._types import PyTree
from dpjax._exact import _limbs
from dpjax._exact._limbs import Limbs
from dpjax._tracing._fingerprints import digest
from dpjax.random._noise import GAUSSIAN
from dpjax.targets._optax_training import optax_promotion

# Entries on the diagonal, and all entries of banded strategies, are integers divided by 2^BITS. A
# common factor of all entries has no effect.
BITS = 18
# A strategy with more bands would leave too few bits for the sums of a batch.
_MOST_BANDS = 2**12
_MOST_STEPS = 2**24
# A finer grid than this would decrease the noise by less than .01%.
_MOST_FINE = 14
# The functions that make strategies.
MAKERS = "optimized_strategy, toeplitz_strategy, banded_strategy or buffered_strategy"


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy(abc.ABC):
    """A strategy matrix C: step t publishes sum_j C[t, j] g_j + noise.

    C is lower triangular with b bands: C[t, j] is 0 unless 0 <= t - j < b. Its entries are rational
    numbers, so that sums are exact. A common factor of all entries has no effect, because the noise
    is relative to the largest norm of a column. `toeplitz_strategy`, `banded_strategy`,
    `optimized_strategy` and `buffered_strategy` make strategies.

    Attributes:
        steps: the number of steps that a training may take.

    Formal guarantees:
        None of its own: it is public.
    """

    _KIND: ClassVar[str]

    steps: int

    @property
    @abc.abstractmethod
    def bands(self) -> int:
        """b, the number of bands. A record may take part only once in any b consecutive steps."""

    @abc.abstractmethod
    def _entries(self) -> np.ndarray:
        """Computes `entries`."""

    @property
    def rounding(self) -> float:
        """How many grid units rounding may add to the difference of neighbors, in a coordinate.

        Each row is rounded once, which adds less than 1.
        """
        return 1.0

    @property
    def largest_noise(self) -> int:
        """The bound to which the noise of an update is clamped before it is kept: an int32."""
        return 2**31 - 1

    @abc.abstractmethod
    def nothing_kept(self, leaf: jax.Array) -> PyTree:
        """Returns the stored noise of one array of parameters before the first step."""

    @abc.abstractmethod
    def diagonal(self, step: jax.Array) -> jax.Array:
        """Returns 2^18 C[t, t] for step t, as int32."""

    @abc.abstractmethod
    def earlier(self, kept: PyTree, step: jax.Array) -> Limbs:
        """Returns the sum of 2^18 C[t, j] noise_j over the steps j before t.

        Here t is `step`, and noise_j is the noise of update j.
        """

    @abc.abstractmethod
    def keep(self, kept: PyTree, newest: jax.Array, step: jax.Array) -> PyTree:
        """Returns the stored noise after a step. `newest` is the noise of this step, as int32."""

    def _keep_integers(self, name: str, shape: str, fits: bool, bits: int) -> None:
        """Replaces an array by a read-only copy, because programs would not see later changes.

        Raises an error if the array is not int32, if its shape does not fit, or if an entry is
        beyond 2^bits.
        """
        given = getattr(self, name)
        kept = np.array(given)
        if kept.dtype != np.int32 or not fits:
            raise ValueError(
                f"{name} must be an int32 array of {shape}, got {_checks.described(given)}"
            )
        if np.abs(kept.astype(np.int64)).max() > 2**bits:
            raise ValueError(
                f"{name} must be from -2^{bits} to 2^{bits}, got {kept.min()} to {kept.max()}"
            )
        kept.flags.writeable = False
        object.__setattr__(self, name, kept)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strategy) or type(self) is not type(other):
            return False
        return self is other or all(map(np.array_equal, self._numbers, other._numbers))

    def __hash__(self) -> int:
        return self.number

    @property
    def _numbers(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @functools.cached_property
    def number(self) -> int:
        """An identifier of the matrix, from 0 to 2^32 - 1."""
        return int(digest(self._KIND, *self._numbers)[:8], 16)

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """The floats nearest to C[t, t - i], shape (steps, bands); or (1, bands) if Toeplitz."""
        return self._entries()

    @property
    def matrix(self) -> np.ndarray:
        """C as an array of float64, of shape (steps, steps)."""
        dense = np.zeros((self.steps, self.steps))
        rows = np.broadcast_to(self.entries, (self.steps, self.bands))
        for lag in range(min(self.bands, self.steps)):
            later = np.arange(lag, self.steps)
            dense[later, later - lag] = rows[lag:, lag]
        return dense

    @functools.cached_property
    def column_norm(self) -> float:
        """The largest norm of a column of C, rounded up."""
        squares = self.entries**2
        if len(squares) == 1:
            return math.sqrt(math.fsum(squares[0])) * (1 + 2**-50)
        # Squares are multiples of 2^-36, so all sums are exact.
        of_columns = np.zeros(self.steps)
        for lag in range(min(self.bands, self.steps)):
            of_columns[: self.steps - lag] += squares[lag:, lag]
        return math.sqrt(of_columns.max()) * (1 + 2**-50)

    def overlap(self, *, groups: int, steps: int) -> float:
        """The l2 norm of the change of all rows if a record joins every batch of its group or bin.

        Row t is what step t publishes. A record in the batch of step j changes row t by at most
        |C[t, j]| times the norm bound. If several batches of the record change the same row, these
        bounds are added up. The result is in units of the norm bound. It is divided by the largest
        norm of a column of C, and rounded up.
        """
        return _overlap(self, groups, steps)

    def moved_rows(self, first: int, *, groups: int, steps: int) -> np.ndarray:
        """How much a record changes each row, at most, in multiples of the norm bound.

        The record joins the batches of the steps `first`, `first` + `groups`, and so on.
        """
        moved = np.zeros(steps)
        for step in range(first, steps, groups):
            lags = np.arange(min(self.bands, steps - step))
            rows = step + lags if len(self.entries) > 1 else 0
            moved[step + lags] += np.abs(self.entries[rows, lags])
        return moved

    def fineness(self, *, dims: int, multiplier: float) -> int:
        """The k for which the grid of a sum has a spacing of about norm bound / (2^k sqrt(dims)).

        Any k is valid. A finer grid has less rounding error. But noise is a drawn integer divided
        by an integer (`_grid_fit`). On a finer grid, noise spans more steps, so the divisor is
        smaller. Then rounding the divisor down increases the noise more.
        """
        assert GAUSSIAN.lattice is not None
        moved = 2 * multiplier * self.column_norm * math.sqrt(dims)
        digits = math.floor(math.log2(GAUSSIAN.lattice.resolution / moved) / 2)
        return max(0, min(_MOST_FINE, digits))

    def error(self) -> float:
        """The root mean square, over steps t, of the noise in the sum of the first t gradients.

        This is for a noise multiplier and a norm bound of 1. For independent noise it is
        sqrt((steps + 1) / 2).
        """
        if len(self.entries) == 1:
            start = np.zeros(self.steps)
            start[0] = 1
            inverse = scipy.signal.lfilter([1.0], self.entries[0], start)
            squares = np.cumsum(np.cumsum(inverse) ** 2)
        else:
            sums = np.tri(self.steps)
            # Solves for the rows of A C^-1, which are the columns of C^-T A^T.
            solved = scipy.linalg.solve_triangular(self.matrix.T, sums.T, lower=False)
            squares = (solved**2).sum(0)
        return self.column_norm * math.sqrt(squares.mean())


@dataclasses.dataclass(frozen=True, eq=False)
class BandedStrategy(Strategy):
    """A strategy given by its bands. A state keeps the noise of the last bands - 1 updates.

    Attributes:
        numerators: int32, the bands in units of 2^-18: numerators[t, i] is 2^18 C[t, t - i]. If C
            is a Toeplitz matrix, one row is stored for all t.

    Formal guarantees:
        None of its own: it is public.
    """

    _KIND = "strategy"

    numerators: np.ndarray = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        steps = _checks.integer("steps", self.steps, least=1, most=_MOST_STEPS)
        object.__setattr__(self, "steps", steps)
        given = np.shape(self.numerators)
        is_matrix = len(given) == 2 and given[0] in (1, steps)
        shape = f"shape (1, bands) or ({steps}, bands), with 1 to {_MOST_BANDS} bands"
        fits = is_matrix and 1 <= given[1] <= _MOST_BANDS
        self._keep_integers("numerators", shape, fits, BITS)
        if (least := self.numerators[:, 0].min()) < 1:
            raise ValueError(f"numerators must be above 0 in the first column, got {least}")

    @property
    def bands(self) -> int:
        """The number of columns of `numerators`."""
        return self.numerators.shape[1]

    def _entries(self) -> np.ndarray:
        return self.numerators / 2**BITS

    def nothing_kept(self, leaf: jax.Array) -> jax.Array:
        """Returns zeros. Later, the noise of update j is stored at index j modulo `bands` - 1."""
        return jnp.zeros((self.bands - 1, *jnp.shape(leaf)), jnp.int32)

    def diagonal(self, step: jax.Array) -> jax.Array:
        """Returns the first numerator of a row."""
        return self._row(step)[0]

    def earlier(self, kept: jax.Array, step: jax.Array) -> Limbs:
        """Returns the sum of 2^18 C[t, j] noise_j over the last `bands` - 1 steps j.

        Here t is `step`, and noise_j is the stored noise of update j.
        """
        places = len(kept)
        if not places:
            return _limbs.constant(0)
        lags = (step - 1 - jnp.arange(places)) % places + 1
        return _limbs.weighted_total(self._row(step)[lags], kept)

    def keep(self, kept: jax.Array, newest: jax.Array, step: jax.Array) -> jax.Array:
        """Replaces the oldest noise by the newest."""
        if not len(kept):
            return kept
        return lax.dynamic_update_index_in_dim(kept, newest, step % len(kept), 0)

    def _row(self, step: jax.Array) -> jax.Array:
        rows = jnp.asarray(self.numerators)
        return rows[jnp.minimum(step, len(rows) - 1)]


@functools.lru_cache(256)
def _overlap(strategy: Strategy, groups: int, steps: int) -> float:
    # In a Toeplitz matrix, a record of a later group changes rows by the same numbers as a record
    # of the first group, only later.
    firsts = range(1 if len(strategy.entries) == 1 else groups)
    norms = [np.linalg.norm(strategy.moved_rows(i, groups=groups, steps=steps)) for i in firsts]
    # In the product of the strategy's matrix and the gradients, each row is rounded once. The noise
    # scale covers the rounding of `bands` rows. A record that takes part `count` times may change
    # up to `more` * `bands` rows.
    count = -(-steps // groups)
    more = min(steps, count * strategy.bands) / strategy.bands
    return max(float(max(norms)) / strategy.column_norm, math.sqrt(more)) * (1 + 1e-9)


def toeplitz_strategy(coefficients: object, *, steps: int) -> Strategy:
    """A strategy whose rows are shifted copies of one another: C[t, j] = coefficients[t - j].

    Args:
        coefficients: shape (bands,), such as those of
            `jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz`. The first is
            above 0.
        steps: the number of steps of the training.

    Returns:
        A `Strategy`.

    Raises:
        TypeError: if an argument is not of numbers.
        ValueError: if a coefficient is not finite; if the first coefficient is not above 0, or is
            less than 2^-18 of the largest coefficient; or if a number is out of range.

    Formal guarantees:
        None: a strategy is public. Entries are rounded to multiples of 2^-18 of the largest, and
        all bounds are those of the rounded matrix.

    Source:
        Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), arXiv 2306.08153;
        McKenna, "Scaling up the Banded Matrix Factorization Mechanism" (2024), arXiv 2405.15913.

    Example:
        >>> import dpjax
        >>> strategy = dpjax.learning.toeplitz_strategy([1.0, 0.5, 0.375], steps=100)
        >>> strategy.bands
        3
        >>> plain = dpjax.learning.toeplitz_strategy([1.0], steps=100)
        >>> round(plain.error(), 2), round(strategy.error(), 2)
        (7.11, 4.57)
    """
    given = np.asarray(coefficients)
    if given.ndim != 1:
        raise ValueError(f"coefficients must have shape (bands,), got shape {given.shape}")
    return _strategy("coefficients", given[None], steps)


def banded_strategy(rows: object) -> Strategy:
    """A strategy given by its bands: C[t, t - i] = rows[t, i].

    Args:
        rows: shape (steps, bands). rows[t, 0] is the diagonal, and above 0. Entries with i > t are
            outside of the matrix, and are ignored.

    Returns:
        A `Strategy`.

    Raises:
        TypeError: if the rows are not of numbers.
        ValueError: if an entry is not finite; if a diagonal entry is not above 0, or is less than
            2^-18 of the largest entry; or if there are more than 4,096 bands.

    Formal guarantees:
        Those of `toeplitz_strategy`.

    Source:
        Choquette-Choo et al. (2023).

    Example:
        >>> import dpjax
        >>> strategy = dpjax.learning.banded_strategy([[1.0, 0.0], [1.0, 0.5], [0.8, 0.4]])
        >>> strategy.matrix.round(3).tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.4, 0.8]]
    """
    given = np.asarray(rows)
    if given.ndim != 2 or not given.size:
        raise ValueError(f"rows must have shape (steps, bands), got {given.shape}")
    steps, bands = given.shape
    inside = np.arange(bands) <= np.arange(steps)[:, None]
    return _strategy("rows", np.where(inside, given, 0), steps)


def optimized_strategy(*, steps: int, bands: int) -> Strategy:
    """The banded Toeplitz strategy with the least mean squared error of prefix sums.

    Args:
        steps: the number of steps of the training.
        bands: b, at most the number of steps. With more bands, the error is smaller, but more
            memory is needed. A record may take part only once in any b consecutive steps.

    Returns:
        A `Strategy`.

    Raises:
        ModuleNotFoundError: if jax_privacy, of the extra `correlated`, is not installed.
        TypeError: if an argument is not an integer.
        ValueError: if an argument is out of range.

    Formal guarantees:
        Those of `toeplitz_strategy`.

    Source:
        `jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz`; McKenna (2024).

    Example:
        >>> import dpjax
        >>> strategy = dpjax.learning.optimized_strategy(steps=64, bands=8)  # doctest: +SKIP
    """
    steps = _checks.integer("steps", steps, least=1, most=_MOST_STEPS)
    bands = _checks.integer("bands", bands, least=1, most=min(steps, _MOST_BANDS))
    factorization = _checks.extra("jax_privacy.matrix_factorization", "correlated")
    with optax_promotion():
        coefficients = factorization.toeplitz.optimize_banded_toeplitz(steps, bands)
    return toeplitz_strategy(coefficients, steps=steps)


def _strategy(name: str, rows: np.ndarray, steps: int) -> Strategy:
    """Returns the strategy whose entries are `rows`, rounded."""
    if rows.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, got dtype {rows.dtype}")
    rows = rows.astype(np.float64)
    if not np.all(np.isfinite(rows)):
        raise ValueError(f"{name} must be finite, got {rows[~np.isfinite(rows)][0]}")
    if not 1 <= rows.shape[1] <= _MOST_BANDS:
        raise ValueError(f"{name} must have 1 to {_MOST_BANDS} bands, got {rows.shape[1]}")
    largest = np.abs(rows).max()
    numerators = np.round(rows / largest * 2**BITS) if largest else rows
    if not np.all(numerators[:, 0] >= 1):
        least = rows[:, 0].min()
        raise ValueError(
            f"{name} must have diagonal entries above 2^-18 times the largest entry {largest:g}, "
            f"got {least:g}: the update of a step is divided by its diagonal entry"
        )
    return BandedStrategy(steps, numerators.astype(np.int32))
