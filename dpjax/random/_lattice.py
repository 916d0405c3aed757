"""Laplace, exponential and Gaussian noise on one fine lattice, drawn from constant tables.

The tables do not depend on the scale of the noise. Noise of scale 1 is drawn in integer multiples
of 1 / resolution, and `_grid_fit` divides it by an integer. So the same compiled program is used
for every epsilon, traced or not. It takes the same time for every draw, and uses only uint32
arithmetic.

*Exponential.* The binary digits of an exponential variable are independent. One table draws its
first digits (up to 24 units in steps of 2^-7), and three tables draw the next 36 digits. Once in
2.6 * 10^10 draws, the variable exceeds 24 units. Then 24 is added, and the draw is repeated,
because the distribution is memoryless. *Laplace*: an exponential variable with a random sign,
rounded down. *Discrete Laplace*: two exponential variables are divided by an integer and rounded
down. This makes them geometric variables, and the noise is their difference.

*Gaussian.* The sum of a discrete Gaussian of parameter 200 on the integers and one of parameter at
least 136 on the multiples of 128 is a discrete Gaussian, within a factor 1 +- 2^-67. The reason is
that the lattice is finer than the smoothing parameter (Micciancio and Walter 2017, Corollary 4.3).
Five such variables are added, each on a lattice that is 128 times coarser than the one before. The
sum has parameter 2^35.

Mechanisms rely on EXPONENTIAL_BOUND and GAUSSIAN_BOUND. Tests verify both bounds: they compare the
weights in the tables with probabilities that are exact to 2^-300.

docs/proofs/exact-noise.md has the proofs.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core._types import PyTree
from dpjax._exact import _limbs
from dpjax._exact._kernels import at_once
from dpjax._exact._limbs import Limbs
from dpjax.random._chacha20 import Words, consume
from dpjax.random._samples import Draw, Sampler, sample

SLOT_BITS = 12
SLOTS = 2**SLOT_BITS
_LIMB_MASK = 0xFFFFFFFF
_SLOT_SHIFT, _SLOT_LOW = np.uint32(32 - SLOT_BITS), np.uint32(2 ** (32 - SLOT_BITS) - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class AliasTable:
    """A table for the alias method: a distribution over {0, ..., 4095}.

    A sample is drawn from a word of 32 * limbs bits.

    The first 12 bits of a uniform word select a slot. If the other bits are below the bound of this
    slot, the outcome is the slot. Otherwise the outcome is the slot's alias.

    Attributes:
        limbs: uint32 of shape (limbs, 4096), most significant limb first. In each slot, the first
            12 bits are the alias, and the other bits are the bound.

    Formal guarantees:
        Given a uniform word, outcome v has probability w / 2^width exactly, where w is the number
        of words that lead to v. `weights_of` in tests/certificates.py computes w.
    """

    limbs: np.ndarray

    @property
    def width(self) -> int:
        """The number of bits in a word."""
        return 32 * len(self.limbs)

    def lookup(self, word: Sequence[jax.Array]) -> jax.Array:
        """Looks up the outcome of each random word, as int32.

        `word` has one uint32 array for each limb of the words, most significant limb first.
        """
        slot = word[0] >> _SLOT_SHIFT
        stored = [jnp.asarray(row).at[slot].get(mode="promise_in_bounds") for row in self.limbs]
        alias = stored[0] >> _SLOT_SHIFT
        less = jnp.zeros(slot.shape, bool)
        for drawn, bound in zip(reversed(word[1:]), reversed(stored[1:]), strict=True):
            less = (drawn < bound) | ((drawn == bound) & less)
        drawn, bound = word[0] & _SLOT_LOW, stored[0] & _SLOT_LOW
        own = (drawn < bound) | ((drawn == bound) & less)
        return jnp.where(own, slot, alias).astype(jnp.int32)

    def lookup_first(self, limb: jax.Array, unknown: int = 0) -> tuple[jax.Array, jax.Array]:
        """Looks up the outcomes of words by their first limbs.

        Returns the outcomes, and whether the other limbs of a word might lead to another outcome.

        Args:
            limb: the most significant limbs of the words.
            unknown: how many of the last bits of `limb` are used for another purpose.
        """
        slot = limb >> _SLOT_SHIFT
        stored = jnp.asarray(self.limbs[0]).at[slot].get(mode="promise_in_bounds")
        drawn, bound = (x & _SLOT_LOW for x in (limb, stored))
        outcome = jnp.where(drawn < bound, slot, stored >> _SLOT_SHIFT).astype(jnp.int32)
        return outcome, (drawn ^ bound) >> np.uint32(unknown) == 0


def alias_table(weights: list[int], limbs: int) -> AliasTable:
    """Builds the table for at most 4096 weights, whose sum must be 2^(32 * limbs)."""
    width = 32 * limbs
    if sum(weights) != 2**width or len(weights) > SLOTS:
        raise ValueError(f"weights must have at most {SLOTS} entries and the sum 2^{width}")
    capacity = 2 ** (width - SLOT_BITS)
    left = weights + [0] * (SLOTS - len(weights))
    stored = [slot << (width - SLOT_BITS) for slot in range(SLOTS)]
    small = [slot for slot in range(SLOTS) if left[slot] < capacity]
    large = [slot for slot in range(SLOTS) if left[slot] > capacity]
    while small:
        slot, alias = small.pop(), large[-1]
        stored[slot] = (alias << (width - SLOT_BITS)) | left[slot]
        left[alias] -= capacity - left[slot]
        if left[alias] <= capacity:
            large.pop()
            if left[alias] < capacity:
                small.append(alias)
    # A slot with full capacity keeps its initial entry: the bound 0, and the slot itself as alias.
    # So the outcome of this slot is always the slot itself, whatever the random word.
    shifts = range(width - 32, -1, -32)
    return AliasTable(
        np.array([[x >> shift & _LIMB_MASK for x in stored] for shift in shifts], np.uint32)
    )


def integer_weights(masses: list[int], width: int) -> list[int]:
    """Rounds exact probability masses to integer weights that sum to 2^width.

    Each weight is within one unit of its mass. Masses with the largest remainders are rounded up.
    """
    total = sum(masses)
    weights, remainders = zip(*(divmod(mass << width, total) for mass in masses), strict=True)
    missing = 2**width - sum(weights)
    rounded_up = sorted(range(len(masses)), key=lambda i: remainders[i], reverse=True)[:missing]
    weights = list(weights)
    for i in rounded_up:
        weights[i] += 1
    return weights


_PRECISION = 300

# Exponential noise: the range from 0 to 24 units is divided into cells of width 2^-7. Three groups
# of 12 further binary digits give the position in a cell.
_FIRST_DIGITS = 7
_CELLS = 24 * 2**_FIRST_DIGITS
_GROUPS = 3
EXPONENTIAL_RESOLUTION = 2 ** (_FIRST_DIGITS + _GROUPS * SLOT_BITS)
_EXPONENTIAL_FIRST, _EXPONENTIAL_WORDS = 1 + _GROUPS, 3 + 2 * _GROUPS
_RESTART_HIGH = _CELLS << (_GROUPS * SLOT_BITS - 32)  # The high limb of 24 units.

# Gaussian noise: the parameters of the table for the coarsest level, and of the table for the other
# four levels.
_TOP, _LOW = 136, 200
_LEVELS, _LEVEL_BITS = 5, 7
_CENTER = SLOTS // 2
# This many of the finest levels are first added up in a separate int32.
_FINE = 2
GAUSSIAN_RESOLUTION = math.sqrt(
    _TOP**2 * 4 ** (_LEVEL_BITS * (_LEVELS - 1))
    + _LOW**2 * sum(4 ** (_LEVEL_BITS * level) for level in range(_LEVELS - 1))
)
_GAUSSIAN_FIRST, _GAUSSIAN_WORDS = _LEVELS, 4 + 2 * (_LEVELS - 1)


# The state of the loop: the round, which samples are unfinished, unused words, sign bits, and the
# exponential variables so far.
_State: TypeAlias = tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array, Limbs]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Bounds on how much the distribution of noise from tables differs from the ideal one.

    Attributes:
        loss: a bound on |log(drawn / ideal)|, where `drawn` and `ideal` are the probabilities of a
            lattice point, except for lattice points in an exceptional set.
        delta: a bound on the probability of the exceptional set, under both distributions.

    Formal guarantees:
        If the ideal mechanism is (epsilon, delta)-DP, the mechanism that draws d noisy coordinates
        from tables is (epsilon + 2 d loss, e^(d loss) delta + (1 + e^(epsilon + 2 d loss)) d
        delta')-DP, where delta' is the certificate's delta. docs/proofs/exact-noise.md, "The
        tables", has the proof.
    """

    loss: float
    delta: float


# Mechanisms rely on these bounds. Tests compute the exact errors of the tables and compare them
# with the bounds.
EXPONENTIAL_BOUND = Certificate(2.0**-51, 0.0)
# Each noisy number is computed from two exponential variables, so their losses add up.
PAIR_BOUND = Certificate(2 * EXPONENTIAL_BOUND.loss, 0.0)
GAUSSIAN_BOUND = Certificate(2.0**-46, 2.0**-118)


SignedExponentials: TypeAlias = tuple[jax.Array, Limbs]
"""Random signs (0 or 1), and variables floor(EXPONENTIAL_RESOLUTION * E).

E is a standard exponential variable.
"""


class Pair(NamedTuple):
    """Two lattice points for each number, from which `quotients` computes the number's noise."""

    first: Limbs
    second: Limbs


LatticeNoise: TypeAlias = Limbs | Pair
"""Noise on the lattice, which `_grid_fit.divided` converts to integers on the grid."""


def signed_exponentials(key: jax.Array, shape: tuple[int, ...]) -> SignedExponentials:
    """Draws exponential variables, each with an independent random sign."""
    _, sign, magnitude = _drawn(_EXPONENTIAL, key, shape)
    return sign, magnitude


def exponential_of(drawn: SignedExponentials) -> Limbs:
    """Returns the exponential variables alone, without the signs."""
    return drawn[1]


def laplace_of(drawn: SignedExponentials) -> Limbs:
    """Returns floor(EXPONENTIAL_RESOLUTION * Z) for standard Laplace variables Z."""
    sign, magnitude = drawn
    return _limbs.where(sign == 1, _limbs.invert(magnitude), magnitude)


def pair_of(drawn: SignedExponentials) -> Pair:
    """Splits exponential variables of shape (2 count,) into `count` pairs of neighbors."""
    _, (high, low) = drawn
    return Pair(*(Limbs(high[i::2], low[i::2]) for i in range(2)))


def lattice_exponential(key: jax.Array, shape: tuple[int, ...]) -> Limbs:
    """Draws standard exponential variables, as multiples of the lattice's step."""
    return exponential_of(signed_exponentials(key, shape))


def lattice_laplace(key: jax.Array, shape: tuple[int, ...]) -> Limbs:
    """Draws standard Laplace variables, as multiples of the lattice's step."""
    return laplace_of(signed_exponentials(key, shape))


def lattice_gaussian(key: jax.Array, shape: tuple[int, ...]) -> Limbs:
    """Draws discrete Gaussian variables with parameter GAUSSIAN_RESOLUTION."""
    return _drawn(_GAUSSIAN, key, shape)


def unchanged(drawn: Limbs) -> Limbs:
    """Returns the variables unchanged."""
    return drawn


def exponential_rounds(
    key: jax.Array, round_number: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, Limbs]:
    """Draws exponential variables, for loops that draw several times under one key.

    Returns:
        The number of the next unused round, `count` uniform words, and `count` exponential
        variables.
    """
    key_data = jax.random.key_data(key)
    (word,), _, drawn = sample(_EXPONENTIAL_AND_WORD, key_data, round_number, count)
    restarts = jnp.max(drawn.high // np.uint32(_RESTART_HIGH))
    return round_number + restarts + np.uint32(1), word, drawn


def _drawn(sampler: Sampler, key: jax.Array, shape: tuple[int, ...]) -> PyTree:
    consume(key)
    drawn = sample(sampler, jax.random.key_data(key), 0, math.prod(shape))
    return jax.tree.map(lambda x: x.reshape(shape), drawn)


# The words that a round leaves unused, a random bit, and the exponential variable of each sample.
_Exponential: TypeAlias = tuple[Words, jax.Array, Limbs]


def _exponential(draw: Draw, zeros: jax.Array, unused: int = 0) -> _Exponential:
    start: _State = (jnp.uint32(0), zeros == 0, (zeros,) * unused, zeros, Limbs(zeros, zeros))

    # The first round is almost always the last. It is part of the loop, so that it is compiled only
    # once. A sample must not depend on how many rounds other samples need, so finished samples no
    # longer change.
    def go_on(state: _State) -> _State:
        round_number, unfinished, words, sign, total = state
        more, new_sign, ended, drawn = _exponential_digits(draw(round_number), unused)
        changed = (
            unfinished & ~ended,
            tuple(jnp.where(unfinished, x, y) for x, y in zip(more, words, strict=True)),
            jnp.where(unfinished, new_sign, sign),
            _limbs.where(unfinished, _limbs.add(total, drawn), total),
        )
        return round_number + np.uint32(1), *at_once(changed)

    _, _, words, sign, total = lax.while_loop(lambda state: jnp.any(state[1]), go_on, start)
    return words, sign, total


def _exponential_digits(words: Words, unused: int) -> tuple[Words, jax.Array, jax.Array, Limbs]:
    """Draws the digits of exponential variables from the words of one round.

    Returns the unused words, a random bit, whether the draw has ended, and the variable. If the
    draw has not ended, the variable is 24 times the mean of the distribution, and the caller adds
    the variable of another round.
    """
    table, *groups = exponential_tables()
    first, *digits = words[:_EXPONENTIAL_FIRST]
    second, third, *more = words[_EXPONENTIAL_FIRST + unused :]
    # The first table is looked up by the word (first, second, third). The last bit of `first` is
    # the sign. In the lookup, this bit is replaced by the last bit of `third`. The last bit of the
    # whole word never changes the outcome, because all weights of the table are even.
    limbs = (first & ~np.uint32(1)) | (third & np.uint32(1)), second, third
    cells = table.lookup(limbs).astype(jnp.uint32)
    ended = cells != _CELLS
    places = [
        jnp.where(ended, group.lookup(word).astype(jnp.uint32), 0)
        for group, *word in zip(groups, digits, more, strict=True)
    ]
    unused_words = words[_EXPONENTIAL_FIRST : _EXPONENTIAL_FIRST + unused]
    return unused_words, first & np.uint32(1), ended, _join(cells, places)


def _exponential_from_first(words: Words) -> tuple[_Exponential, jax.Array]:
    """Returns what the first words say about a sample, and whether other words may change it."""
    table, *groups = exponential_tables()
    first, *digits = words[:_EXPONENTIAL_FIRST]
    cells, left_open = table.lookup_first(first, unknown=1)
    left_open |= cells == _CELLS
    places = list[jax.Array]()
    for group, word in zip(groups, digits, strict=True):
        place, undecided = group.lookup_first(word)
        left_open |= undecided
        places.append(place.astype(jnp.uint32))
    drawn = _join(cells.astype(jnp.uint32), places)
    return (words[_EXPONENTIAL_FIRST:], first & np.uint32(1), drawn), left_open


_EXPONENTIAL = Sampler(
    _EXPONENTIAL_FIRST, _EXPONENTIAL_WORDS, _exponential_from_first, _exponential
)
_EXPONENTIAL_AND_WORD = Sampler(
    _EXPONENTIAL_FIRST + 1,
    _EXPONENTIAL_WORDS + 1,
    _exponential_from_first,
    functools.partial(_exponential, unused=1),
)


def _gaussian(draw: Draw, _: jax.Array) -> Limbs:
    top, low = gaussian_tables()
    words = draw(jnp.uint32(0))
    first, others = words[:_LEVELS], words[_LEVELS:]
    rest = len(others) - (_LEVELS - 1)
    levels = [top.lookup((first[0], *others[:rest]))]
    levels += [low.lookup(word) for word in zip(first[1:], others[rest:], strict=True)]
    return at_once(_sum_of_levels(levels))


def _gaussian_from_first(words: Words) -> tuple[Limbs, jax.Array]:
    top, low = gaussian_tables()
    found = [
        table.lookup_first(word)
        for table, word in zip((top, *(low,) * (_LEVELS - 1)), words, strict=True)
    ]
    levels, undecided = zip(*found, strict=True)
    return _sum_of_levels(levels), functools.reduce(operator.or_, undecided)


def _sum_of_levels(outcomes: Sequence[jax.Array]) -> Limbs:
    """Adds the levels, from the coarsest on: each step multiplies by 128 and adds a level."""

    def joined(levels: Sequence[jax.Array]) -> jax.Array:
        return functools.reduce(lambda sum, x: (sum << _LEVEL_BITS) + x, levels)

    levels = [x - _CENTER for x in outcomes]
    # The sum of three levels is below 2^26 and that of two levels below 2^19, so both fit into an
    # int32.
    coarse, fine = joined(levels[:-_FINE]), joined(levels[-_FINE:])
    bits = np.uint32(_FINE * _LEVEL_BITS)
    shifted = Limbs(
        (coarse >> np.int32(32 - bits)).astype(jnp.uint32), coarse.astype(jnp.uint32) << bits
    )
    return _limbs.add(shifted, _limbs.from_integers(fine))


_GAUSSIAN = Sampler(_GAUSSIAN_FIRST, _GAUSSIAN_WORDS, _gaussian_from_first, _gaussian)


def _join(cells: jax.Array, digits: list[jax.Array]) -> Limbs:
    """Returns cells * 2^36 + top * 2^24 + middle * 2^12 + bottom, with the three `digits`."""
    top, middle, bottom = digits
    low = (middle << np.uint32(12)) | bottom | (top << np.uint32(24))
    return Limbs((cells << np.uint32(4)) | (top >> np.uint32(8)), low)


@functools.cache
def exponential_tables() -> tuple[AliasTable, ...]:
    """Returns the four tables of exponential variables.

    The first table draws the first digits. Its last outcome means "draw again, and add 24". The
    other three draw 12 digits each.
    """
    first, *groups = exponential_masses()
    even = [2 * weight for weight in integer_weights(first, 95)]
    return (
        alias_table(even, 3),
        *(alias_table(integer_weights(masses, 64), 2) for masses in groups),
    )


@functools.cache
def gaussian_tables() -> tuple[AliasTable, AliasTable]:
    """Returns the table of the coarsest level, and the table of the other levels.

    Their outcomes represent the integers from -2048 to 2047.
    """
    top, low = gaussian_masses()
    return (
        alias_table(integer_weights(top, 128), 4),
        alias_table(integer_weights(low, 64), 2),
    )


def exponential_masses() -> list[list[int]]:
    """Returns the masses for the tables of exponential variables, in units of 2^-300."""
    one = 1 << _PRECISION
    ratio = _exp_minus(Fraction(1, 2**_FIRST_DIGITS))
    first = _powers(ratio, _CELLS)
    masses = [[p - q for p, q in itertools.pairwise(first)] + [first[_CELLS]]]
    assert sum(masses[0]) == one
    for group in range(1, _GROUPS + 1):
        step = Fraction(1, 2 ** (_FIRST_DIGITS + SLOT_BITS * group))
        masses.append(_powers(_exp_minus(step), SLOTS - 1))
    return masses


def gaussian_masses() -> list[list[int]]:
    """Returns the relative masses of the Gaussian tables, for the outcomes from -2048 to 2047."""
    masses = list[list[int]]()
    for parameter in (_TOP, _LOW):
        half = [_exp_minus(Fraction(j * j, 2 * parameter**2)) for j in range(_CENTER + 1)]
        masses.append([half[abs(outcome - _CENTER)] for outcome in range(SLOTS)])
    return masses


def _powers(ratio: int, highest: int) -> list[int]:
    powers = [1 << _PRECISION]
    for _ in range(highest):
        powers.append(powers[-1] * ratio >> _PRECISION)
    return powers


def _exp_minus(x: Fraction) -> int:
    """Returns exp(-x) in units of 2^-300, with an error of a few units."""
    guard = _PRECISION + 20
    doublings = max(0, math.ceil(math.log2(x)) + 8) if x > 0 else 0
    small = (x.numerator << guard) // (x.denominator << doublings)
    term = total = 1 << guard
    for i in range(1, 60):
        term = -(term * small >> guard) // i
        total += term
    for _ in range(doublings):
        total = total * total >> guard
    return total >> (guard - _PRECISION)
