"""Encodes strings as arrays of letter codes: 1 for a to 26 for z."""

import string
from collections.abc import Iterable

import numpy as np

ALPHABET = string.ascii_lowercase


def codes_of(texts: Iterable[object], width: int) -> np.ndarray:
    """The codes of the first `width` letters of each string, padded with 0: shape (n, width)."""
    texts = list(texts)
    codes = np.zeros((len(texts), width), np.uint8)
    for row, text in zip(codes, texts, strict=True):
        letters = letters_of(text)[:width]
        row[: len(letters)] = letters
    return codes


def letters_of(text: object) -> list[int]:
    """The codes of all letters a to z in a string, ignoring case; empty for other objects."""
    folded = text.casefold() if isinstance(text, str) else ""
    return [ord(letter) - ord("a") + 1 for letter in folded if letter in ALPHABET]
