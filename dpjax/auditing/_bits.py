"""The stored bits of numbers: textbook proofs ignore them, but an attacker sees them."""

import numpy as np

# The lowest set bit of 0, which is a multiple of every power of two.
NO_BIT = 4000
# The lowest set bit of NaN, infinities, and differences that were rounded.
NO_NUMBER = -4000
# Stored bits of the significand, and the exponent of the least positive number.
_LAYOUTS = {4: (np.uint32, 23, -149), 8: (np.uint64, 52, -1074)}


def exact_numbers(column: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype of 32 or 64 bits, as the functions below need."""
    if column.dtype == bool or np.issubdtype(column.dtype, np.integer):
        return column.astype(np.int64)  # This keeps the bits of uint64.
    # Also the 8- and 16-bit floats of machine learning, which NumPy has as extension types.
    return column if column.dtype.itemsize in _LAYOUTS else column.astype(np.float32)


def lowest_set_bit(numbers: np.ndarray) -> np.ndarray:
    """The largest j such that the number is a multiple of 2^j."""
    if numbers.dtype == np.int64:
        return np.where(numbers == 0, NO_BIT, _trailing_zeros(numbers.view(np.uint64)))
    word, stored, least = _LAYOUTS[numbers.dtype.itemsize]
    exponent, fraction = _fields(numbers)
    significand = fraction | (word(exponent > 0) << word(stored))
    lowest = np.maximum(exponent, 1) - 1 + least + _trailing_zeros(significand)
    lowest = np.where(numbers == 0, NO_BIT, lowest)
    return np.where(np.isfinite(numbers), lowest, NO_NUMBER)


def binade(numbers: np.ndarray) -> np.ndarray:
    """The j with 2^j <= |number| < 2^(j+1); subnormal numbers share one j."""
    if numbers.dtype == np.int64:
        magnitude = np.abs(numbers.astype(float))
        return np.where(magnitude == 0, -1, np.frexp(magnitude)[1] - 1)
    _, stored, least = _LAYOUTS[numbers.dtype.itemsize]
    return _fields(numbers)[0] + (least + stored - 1)


def low_bits(numbers: np.ndarray, count: int) -> np.ndarray:
    """The last bits of the significand, or of the integer."""
    word = np.uint32 if numbers.dtype.itemsize == 4 else np.uint64
    return (numbers.view(word) & word(2**count - 1)).astype(np.int64)


def lowest_set_bit_of_difference(numbers: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The lowest set bit of number - value, or `NO_NUMBER` if the difference needs rounding.

    If value + noise needed no rounding, the difference is the noise, which needs none either.
    """
    if numbers.dtype == np.int64:
        return lowest_set_bit(numbers - value)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = numbers - value
        # The exact rounding error of a subtraction (Knuth's two-sum).
        back = difference - numbers
        error = (numbers - (difference - back)) - (value + back)
    return np.where(error == 0, lowest_set_bit(difference), NO_NUMBER)


def _fields(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Biased exponent and stored fraction."""
    word, stored, _ = _LAYOUTS[numbers.dtype.itemsize]
    bits = numbers.view(word)
    width = 8 * numbers.dtype.itemsize - 1 - stored
    exponent = (bits >> word(stored)) & word(2**width - 1)
    return exponent.astype(np.int64), bits & word(2**stored - 1)


def _trailing_zeros(words: np.ndarray) -> np.ndarray:
    words = words.astype(np.uint64)
    # A power of two is exact in a float. Callers do not use the result for 0.
    return np.frexp((words & (~words + np.uint64(1))).astype(float))[1].astype(np.int64) - 1
