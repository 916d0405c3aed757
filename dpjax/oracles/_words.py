"""Words by their frequency in a public table."""

from collections.abc import Mapping

import numpy as np

from dpjax._core import _checks
from dpjax._core._letters import codes_of, letters_of
from dpjax.oracles._independent import IndependentRecords
from dpjax.oracles._resample import resample


def words(frequencies: Mapping[str, float], *, width: int | None = None) -> IndependentRecords:
    """An oracle of words, drawn by their frequencies in a public table.

    A record holds the codes of a word's letters, as `dpjax.targets.encode_text` makes them and
    `dpjax.targets.letter_counts` counts them. For other records, such as the position of a word in
    the table, use `resample(arrays, weights)`.

    Args:
        frequencies: from word to frequency, finite and above 0, in any unit; at least 2 words.
        width: the number of letters that are kept of a word, at least 1; by default all.

    Returns:
        An oracle: `oracle(key, n)` draws n independent words, shape (n, width), uint8. Its
        `log_prob` adds up all words of the table with the same codes.

    Raises:
        TypeError: if `frequencies` is not a table, or the width not an integer.
        ValueError: if there are fewer than 2 words, no word has a letter, or a frequency is not
            above 0, or below 2^-32 of the sum.

    Formal guarantees:
        A guarantee under this oracle is about words of the table. It does not cover a private word
        unlike all of them. If gamma exceeds the frequency of a word, that word may be left out,
        too. Probabilities are within 2^-32 of the frequencies.

    Source:
        Rubinstein and Aldà, "diffpriv: An R package for easy differential privacy" (2017): names
        by their frequency, for the example of the exponential mechanism.

    Example:
        >>> import dpjax
        >>> oracle = dpjax.oracles.words({"Smith": 1.006, "Johnson": 0.81})
        >>> oracle(dpjax.random.seeded_key(0), 5).shape
        (5, 7)
    """
    if not isinstance(frequencies, Mapping):
        raise TypeError(
            f"frequencies must be a table from word to frequency, got {_checks.shown(frequencies)}"
        )
    if len(frequencies) < 2:
        raise ValueError(f"frequencies must hold at least 2 words, got {len(frequencies)}")
    if width is None:
        width = max(len(letters_of(word)) for word in frequencies)
        if width == 0:
            raise ValueError("frequencies must hold a word with a letter from a to z")
    codes = codes_of(frequencies, _checks.integer("width", width, least=1))
    return resample(codes, np.asarray(list(frequencies.values()), np.float64))
