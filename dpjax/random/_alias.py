"""Alias tables with integer weights: one random word of fixed width draws from a distribution.

The word's first bits choose a slot, the rest decide between the slot's own outcome and its alias
(Walker 1977). Weights are integers that sum to 2^width exactly. So the distribution of an outcome
under uniform bits is known exactly: `weights` reads it back from the stored table.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

SLOT_BITS = 12
SLOTS = 2**SLOT_BITS
_LIMB_MASK = 0xFFFFFFFF
_SLOT_SHIFT, _SLOT_LOW = np.uint32(32 - SLOT_BITS), np.uint32(2 ** (32 - SLOT_BITS) - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class AliasTable:
    """A distribution over {0, ..., 4095}, stored for words of 32 * limbs bits.

    Attributes:
        limbs: uint32 of shape (limbs, 4096), most significant first: where a slot's own outcome
            ends, with the alias in the first 12 bits.

    Formal guarantees:
        Given a uniform word, outcome v is drawn with probability weights()[v] / 2^width exactly.
    """

    limbs: np.ndarray

    @property
    def width(self) -> int:
        """Bits of a word."""
        return 32 * len(self.limbs)

    def lookup(self, word: Sequence[jax.Array]) -> jax.Array:
        """Outcomes, int32, of words: uint32 arrays, the most significant limb first."""
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
        """Outcomes of words with a first limb, and whether the other limbs may give another one.

        Args:
            limb: the most significant limb of words.
            unknown: how many of its last bits are of another word.
        """
        slot = limb >> _SLOT_SHIFT
        stored = jnp.asarray(self.limbs[0]).at[slot].get(mode="promise_in_bounds")
        drawn, bound = (x & _SLOT_LOW for x in (limb, stored))
        outcome = jnp.where(drawn < bound, slot, stored >> _SLOT_SHIFT).astype(jnp.int32)
        return outcome, (drawn ^ bound) >> np.uint32(unknown) == 0

    def weights(self) -> list[int]:
        """The integer weights of the outcomes, read back from the table."""
        capacity = 2 ** (self.width - SLOT_BITS)
        weights = [0] * SLOTS
        for slot in range(SLOTS):
            stored = 0
            for row in self.limbs:
                stored = stored << 32 | int(row[slot])
            alias, own = stored >> (self.width - SLOT_BITS), stored % capacity
            weights[slot] += own
            weights[alias] += capacity - own
        return weights


def alias_table(weights: list[int], limbs: int) -> AliasTable:
    """Builds the table of at most 4096 weights that sum to 2^(32 * limbs)."""
    width = 32 * limbs
    if sum(weights) != 2**width or len(weights) > SLOTS:
        raise ValueError(f"weights must be at most {SLOTS} and sum to 2^{width}")
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
    # A full slot keeps `own` 0 and is its own alias.
    shifts = range(width - 32, -1, -32)
    return AliasTable(
        np.array([[x >> shift & _LIMB_MASK for x in stored] for shift in shifts], np.uint32)
    )


def integer_weights(masses: list[int], width: int) -> list[int]:
    """Weights that sum to 2^width, each within one unit of its share, from exact masses.

    Largest remainders are rounded up.
    """
    total = sum(masses)
    weights, remainders = zip(*(divmod(mass << width, total) for mass in masses), strict=True)
    missing = 2**width - sum(weights)
    rounded_up = sorted(range(len(masses)), key=lambda i: remainders[i], reverse=True)[:missing]
    weights = list(weights)
    for i in rounded_up:
        weights[i] += 1
    return weights
