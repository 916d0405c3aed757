"""The records of the demo: what is public, what is private, and oracles made of public facts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import jax
import jax.numpy as jnp
import names
import numpy as np
from sklearn.datasets import load_breast_cancer

PUBLIC_PATIENTS = 200

# The ten names of the diffpriv paper.
SCIENTISTS = (
    "Michael Jordan",
    "Andrew Ng",
    "Andrew Zisserman",
    "Christopher Manning",
    "Jitendra Malik",
    "Geoffrey Hinton",
    "Scott Shenker",
    "Bernhard Scholkopf",
    "Jon Kleinberg",
    "Judea Pearl",
)
FIRST_NAME, LAST_NAME = 11, 13  # letters in the longest names of the census
NO_LETTER = len(ascii_lowercase)


@dataclass(frozen=True)
class Patients:
    """Breast-cancer records.

    Attributes:
        features: shape (n, 30).
        benign: the diagnosis, shape (n,), 1 for benign and 0 for malignant.
        feature_names: of the 30 columns.
    """

    features: jax.Array
    benign: jax.Array
    feature_names: tuple[str, ...]

    def columns(self, *chosen: str) -> jax.Array:
        """A few features by name, shape (n, number chosen)."""
        return self.features[:, [self.feature_names.index(name) for name in chosen]]


def load_patients() -> tuple[Patients, Patients]:
    """The records that ship with scikit-learn, as 200 public patients and 369 private ones."""
    data = load_breast_cancer()
    # A fixed shuffle, because the severe cases come early in the file. It does not look at the
    # records, so the private ones stay a fair draw from where the public ones come from.
    order = np.random.default_rng(0).permutation(len(data.target))

    def part(rows: np.ndarray) -> Patients:
        features = jnp.asarray(data.data[rows], jnp.float32)
        return Patients(features, jnp.asarray(data.target[rows]), tuple(data.feature_names))

    return part(order[:PUBLIC_PATIENTS]), part(order[PUBLIC_PATIENTS:])


@dataclass(frozen=True)
class UnitScale:
    """Scales features to [0, 1] by a public range; what lies outside is clamped."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def of(cls, public: jax.Array, share: float = 1.0) -> "UnitScale":
        """By the range of the middle share of the public records."""
        tail = 50 * (1 - share)
        return cls(*jnp.percentile(public, jnp.array([tail, 100 - tail]), axis=0))

    def __call__(self, features: jax.Array) -> jax.Array:
        """From the units of the features to [0, 1]."""
        return jnp.clip((features - self.low) / (self.high - self.low), 0, 1)

    def undo(self, scaled: jax.Array) -> jax.Array:
        """From [0, 1] back to the units of the features."""
        return self.low + scaled * (self.high - self.low)


def standard_scale(public: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Scales features to mean 0 and standard deviation 1 among the public records."""
    mean, deviation = jnp.mean(public, axis=0), jnp.std(public, axis=0)
    return lambda features: (features - mean) / deviation


def encode_names(people: Sequence[str], width: int = FIRST_NAME + LAST_NAME) -> np.ndarray:
    """Letters as codes 0 to 25, cut or padded with 26 to a fixed width; shape (people, width)."""
    codes = {letter: code for code, letter in enumerate(ascii_lowercase)}
    encoded = np.full((len(people), width), NO_LETTER, np.int8)
    for row, person in zip(encoded, people, strict=True):
        letters = [codes[letter] for letter in person.lower() if letter in codes][:width]
        row[: len(letters)] = letters
    return encoded


def census_oracle() -> Callable[[jax.Array, int], jax.Array]:
    """An oracle of US names, drawn by their frequency in the census of 1990."""
    men, men_below = _read_census("first:male", FIRST_NAME)
    women, women_below = _read_census("first:female", FIRST_NAME)
    first = jnp.concatenate([men, women])
    first_below = jnp.concatenate([men_below / 2, 0.5 + women_below / 2])
    last, last_below = _read_census("last", LAST_NAME)

    def draw(key: jax.Array, n: int, codes: jax.Array, below: jax.Array) -> jax.Array:
        return codes[jnp.searchsorted(below, jax.random.uniform(key, (n,)), side="right")]

    def oracle(key: jax.Array, n: int) -> jax.Array:
        key_first, key_last = jax.random.split(key)
        drawn = draw(key_first, n, first, first_below), draw(key_last, n, last, last_below)
        return jnp.concatenate(drawn, axis=1)

    return oracle


def _read_census(file: str, width: int) -> tuple[jax.Array, jax.Array]:
    """The names of a census file and their distribution function.

    The function comes from the cumulative column: the frequencies themselves are rounded to 0 for
    most last names.
    """
    rows = [line.split() for line in Path(names.FILES[file]).read_text().splitlines()]
    cumulative = np.array([float(row[2]) for row in rows])
    codes = encode_names([row[0] for row in rows], width)
    return jnp.asarray(codes), jnp.asarray(cumulative / cumulative[-1], jnp.float32)
