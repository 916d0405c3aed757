"""Features of outputs: single numbers, and codes that name a kind of output."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dpjax._core._types import Value
from dpjax.auditing import _bits

# The numbers of bins for a number with many values. Up to `_FEW` values need no bins.
BINS = (64, 1024)
_FEW = 256
_LOW_BITS = 8
# If at most this part of the numbers is off a grid, those numbers are strays.
_STRAYS = 0.02


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """An integer for every output of a batch, and the meaning of each integer in words."""

    name: str
    encode: Callable[[Value], np.ndarray]
    label: Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """One number of an output: its array among the leaves, and its index there, flattened."""

    leaf: int
    index: int
    name: str

    def __call__(self, outputs: Value) -> np.ndarray:
        """The number in every output of a batch."""
        return matrices(outputs)[self.leaf][:, self.index]


def matrices(outputs: Value) -> list[np.ndarray]:
    """The arrays of a batch of outputs, each of shape (outputs, numbers)."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(outputs)]
    return [leaf.reshape(len(leaf), -1) for leaf in leaves]


def value_like(outputs: Value, value: Value) -> list[np.ndarray] | None:
    """The value's arrays, flattened; None if outputs have another form."""
    if jax.tree.structure(outputs) != jax.tree.structure(value):
        return None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(outputs)]
    if [leaf.shape for leaf in leaves] != shapes:
        return None
    return [leaf.reshape(-1) for leaf in leaves]


def coordinates(here: Value, scores: list[np.ndarray], count: int) -> list[Coordinate]:
    """The numbers of an output with the highest scores."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(here)]
    ends = np.cumsum([len(score) for score in scores])
    chosen: list[Coordinate] = []
    for position in np.argsort(-np.concatenate(scores), kind="stable")[:count]:
        leaf = int(np.searchsorted(ends, position, side="right"))
        index = int(position - (ends[leaf - 1] if leaf else 0))
        shape = np.shape(jax.tree.leaves(here)[leaf])[1:]
        inside = "".join(f"[{i}]" for i in np.unravel_index(index, shape)) if shape else ""
        chosen.append(Coordinate(leaf, index, f"output{jax.tree_util.keystr(paths[leaf])}{inside}"))
    return chosen


def whole_output(here: Value, there: Value) -> Code:
    """The whole output, to the last bit."""
    seen: dict[int, str] = {}
    for outputs in (here, there):
        codes, rows = np.unique(_fingerprints(outputs), return_index=True)
        if len(codes) <= _FEW:
            seen |= {
                int(code): _show([leaf[row] for leaf in jax.tree.leaves(outputs)])
                for code, row in zip(codes, rows, strict=True)
            }
    return Code(
        "output", _fingerprints, lambda code: seen.get(code, f"the output with hash {code}")
    )


def exact_value(coordinate: Coordinate, here: Value, there: Value) -> Code:
    """The number, to the last bit."""
    seen: dict[int, str] = {}
    for outputs in (here, there):
        numbers = coordinate(outputs)
        codes, rows = np.unique(_bits_of(numbers), return_index=True)
        seen |= {int(c): f"{numbers[row]}" for c, row in zip(codes, rows, strict=True)}

    def encode(outputs: Value) -> np.ndarray:
        return _bits_of(coordinate(outputs))

    return Code(coordinate.name, encode, seen.__getitem__)


def bins(coordinate: Coordinate, here: Value, there: Value, count: int) -> Code:
    """The number's interval, among some that are about equally likely."""
    both = np.concatenate([coordinate(here), coordinate(there)]).astype(float)
    edges = np.unique(np.nanquantile(both, np.arange(1, count) / count, method="lower"))
    ends = np.concatenate([[-np.inf], edges, [np.inf]])

    def encode(outputs: Value) -> np.ndarray:
        return np.searchsorted(edges, coordinate(outputs).astype(float), side="right")

    def label(code: int) -> str:
        return f"[{ends[code]:.6g}, {ends[code + 1]:.6g})"

    return Code(coordinate.name, encode, label)


def grain_and_binade(coordinate: Coordinate) -> Code:
    """The lowest set bit of the number, and its magnitude."""

    def encode(outputs: Value) -> np.ndarray:
        numbers = _bits.exact_numbers(coordinate(outputs))
        return _packed(_bits.lowest_set_bit(numbers), _bits.binade(numbers))

    def label(code: int) -> str:
        lowest, size = _unpacked(code)
        return f"({_power(lowest)}, 2^{size})"

    return Code(f"(lowest set bit, magnitude) of {coordinate.name}", encode, label)


def low_bits_and_binade(coordinate: Coordinate) -> Code:
    """The lowest bits, which arithmetic leaves traces in, with the sign and the magnitude."""

    def encode(outputs: Value) -> np.ndarray:
        numbers = _bits.exact_numbers(coordinate(outputs))
        signed = 2 * _bits.low_bits(numbers, _LOW_BITS) + np.signbit(numbers)
        return _packed(signed, _bits.binade(numbers))

    def label(code: int) -> str:
        signed, size = _unpacked(code)
        return f"({'-' if signed % 2 else '+'}, {signed // 2:0{_LOW_BITS}b}, 2^{size})"

    return Code(f"(sign, low bits, magnitude) of {coordinate.name}", encode, label)


def grains_of_differences(coordinate: Coordinate, value: np.number, neighbor: np.number) -> Code:
    """The lowest set bits of the noise that leads from each value to the number, if any does."""
    name = coordinate.name
    return Code(
        f"lowest set bits of ({name} - value, {name} - neighbor)",
        lambda outputs: _packed(*_grains_from(coordinate, outputs, value, neighbor)),
        lambda code: "({}, {})".format(*map(_power, _unpacked(code))),
    )


def off_the_grid(
    coordinate: Coordinate, here: Value, there: Value, ends: Sequence[np.number] | None
) -> Code:
    """Whether the number is off the grid of nearly all numbers, and which values can lead to it."""
    found = [grain(coordinate)(outputs) for outputs in (here, there)]
    exponent = float(np.nanquantile(np.concatenate(found), _STRAYS, method="lower"))

    def encode(outputs: Value) -> np.ndarray:
        off = grain(coordinate)(outputs) < exponent
        if ends is None:
            return off.astype(np.int64)
        reached = [x != _bits.NO_NUMBER for x in _grains_from(coordinate, outputs, *ends)]
        return np.where(off, 1 + 2 * reached[0] + reached[1], 0)

    def label(code: int) -> str:
        if code == 0:
            return "on it"
        return f"off it{', from ' * (code > 1)}{['', 'neighbor', 'value', 'both'][code - 1]}"

    return Code(f"{coordinate.name} and the grid of 2^{exponent:.0f}", encode, label)


def _grains_from(coordinate: Coordinate, outputs: Value, *ends: np.number) -> list[np.ndarray]:
    """The lowest set bits of the differences to some values."""
    numbers = _bits.exact_numbers(coordinate(outputs))
    with np.errstate(over="ignore", invalid="ignore"):  # NaN becomes some integer.
        values = [_bits.exact_numbers(np.asarray([x])).astype(numbers.dtype) for x in ends]
    return [_bits.lowest_set_bit_of_difference(numbers, x) for x in values]


def grain(coordinate: Coordinate) -> Callable[[Value], np.ndarray]:
    """The lowest set bit as a float; NaN for NaN and infinities."""

    def evaluate(outputs: Value) -> np.ndarray:
        lowest = _bits.lowest_set_bit(_bits.exact_numbers(coordinate(outputs)))
        return np.where(lowest == _bits.NO_NUMBER, np.nan, lowest)

    return evaluate


def takes_few_values(coordinate: Coordinate, here: Value, there: Value) -> bool:
    """Whether a number takes so few values that it needs no bins."""
    both = np.concatenate([coordinate(here), coordinate(there)])
    return len(np.unique(_bits_of(both))) <= _FEW


def _bits_of(numbers: np.ndarray) -> np.ndarray:
    return _words(numbers).view(np.int64)


def _words(matrix: np.ndarray) -> np.ndarray:
    """Every number's bits in a 64-bit word."""
    unsigned = np.dtype(f"u{matrix.dtype.itemsize}")
    return np.ascontiguousarray(matrix).view(unsigned).astype(np.uint64)


def _fingerprints(outputs: Value) -> np.ndarray:
    """A 64-bit hash of every output; one to one if an output is a single number."""
    words = np.concatenate([_words(matrix) for matrix in matrices(outputs)], axis=1)
    # Multiplication by an odd number loses no bit of a word.
    odd = np.random.default_rng(0).integers(2**63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    return (words * odd).sum(axis=1, dtype=np.uint64).view(np.int64)


def _show(output: list[np.ndarray]) -> str:
    leaves = [np.array2string(leaf, precision=6, threshold=6) for leaf in output]
    return leaves[0] if len(leaves) == 1 else f"({', '.join(leaves)})"


def _packed(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (high.astype(np.int64) << 16) + (low.astype(np.int64) + 2**15)


def _unpacked(code: int) -> tuple[int, int]:
    return code >> 16, (code & (2**16 - 1)) - 2**15


def _power(lowest: int) -> str:
    return {_bits.NO_BIT: "zero", _bits.NO_NUMBER: "none"}.get(lowest, f"2^{lowest}")
